"""What a study might have shown: a table and a figure of the scores from many initialisations.

DIR/initialisations.md .json   the tables
DIR/initialisations.png        the distributions of localization, with the published values in them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normal_guidance.core.methods import method_title
from normal_guidance.errors import UserError
from normal_guidance.evaluation.initialisations import INITIALISATIONS, Initialisations, collect_initialisations
from normal_guidance.evaluation.published import PUBLISHED_SEEDS, published, published_seed
from normal_guidance.files import write_atomically, write_json
from normal_guidance.presentation.figure_style import RED, WIDTH, method_color, save, styled
from normal_guidance.presentation.text_tables import Grid
from normal_guidance.statistics.number_format import NOTHING, digits
from normal_guidance.statistics.scores import Metric

SHOWN: tuple[tuple[Metric, str], ...] = (
    ("localization_auroc", "Localization AUROC"),
    ("scan_auroc", "Scan AUROC"),
)

INNER = (2.5, 50.0, 97.5)
"""Percentiles of the means that the table shows."""

HEADER = (
    "Method",
    "Configurations (partitions)",
    "First",
    "Least",
    "Most",
    "Median [95 % of means]",
    "By validation",
    "Published",
    "Means below it",
)

ORIGIN_TITLES = {"chosen": "validation's", "published": "the authors'"}


@dataclass(frozen=True)
class InitialisationTable:
    """All methods of one metric."""

    metric: Metric
    title: str
    dataset: str
    rows: tuple[Initialisations, ...]

    def grid(self) -> Grid:
        """The table: means over the partitions, from every combination of their initialisations."""
        count = max(len(values) for one in self.rows for values in one.scores.values())
        return Grid(
            title=f"{self.title}, {count} initialisations",
            caption="Means over the partitions that are named. First: the initialisation of the study itself. By "
            "validation: that of the highest validation AUROC on each partition.",
            header=HEADER,
            rows=[self._cells(one) for one in self.rows],
        )

    def _cells(self, one: Initialisations) -> list[str]:
        means, theirs = one.means, published_mean(self.metric, one.method, self.dataset, tuple(one.scores))
        low, middle, high = np.percentile(means, INNER)
        return [
            method_title(one.method),
            f"{ORIGIN_TITLES[one.origin]} ({', '.join(map(str, one.scores))})",
            *(digits(float(value)) for value in (one.first, means.min(), means.max())),
            f"{digits(float(middle))} [{digits(float(low))}, {digits(float(high))}]",
            digits(one.chosen),
            NOTHING if theirs is None else digits(theirs),
            NOTHING if theirs is None else f"{one.share_below(theirs):.0%}",
        ]


def published_mean(metric: Metric, method: str, dataset: str, seeds: Sequence[int]) -> float | None:
    """The published mean over these partitions; None where it is not known."""
    if set(seeds) == set(PUBLISHED_SEEDS):
        whole = published(metric, method, dataset)
        return None if whole is None else whole.mean
    known = [one for seed in seeds if (one := published_seed(metric, method, dataset, seed)) is not None]
    return float(np.mean(known)) if len(known) == len(seeds) else None


def initialisation_tables(folder: Path, dataset: str) -> list[InitialisationTable]:
    """The tables of all complete runs; an error where there are none."""
    found = [
        InitialisationTable(metric, title, dataset, tuple(rows))
        for metric, title in SHOWN
        if (rows := collect_initialisations(folder, dataset, metric))
    ]
    if not found:
        raise UserError(f"{folder / INITIALISATIONS} has no complete run; train them with --initialisations")
    return found


def write_initialisations(folder: Path, dataset: str) -> str:
    """Write the tables and the figure beside the study's, and return the page."""
    tables = initialisation_tables(folder, dataset)
    page = "\n".join(["# What other initial weights would have shown", "", *(one.grid().markdown(2) for one in tables)])
    write_atomically(folder / f"{INITIALISATIONS}.md", page.encode())
    write_json(folder / f"{INITIALISATIONS}.json", {one.metric: [asdict(row) for row in one.rows] for one in tables})
    save(plot_initialisations(tables[0]), folder / f"{INITIALISATIONS}.png")
    return page


@styled
def plot_initialisations(table: InitialisationTable) -> Figure:
    """A row for each method: every initialisation on every partition, then the means of all combinations."""
    seeds = sorted({seed for one in table.rows for seed in one.scores})
    figure = Figure(figsize=(1.3 * WIDTH, 1.1 + 0.3 * len(table.rows)), layout="constrained")
    panels = figure.subplots(1, len(seeds) + 1, sharex=True, sharey=True)
    for place, one in enumerate(table.rows):
        color = method_color(one.method)
        for panel, seed in zip(panels, seeds, strict=False):
            values = list(one.scores.get(seed, {}).values())
            height = place + np.linspace(-0.25, 0.25, len(values)) if len(values) > 1 else [place] * len(values)
            panel.plot(values, height, marker="o", ms=3.5, color=color, ls="", alpha=0.7)
            _mark(panel, published_mean(table.metric, one.method, table.dataset, (seed,)), place)
        if len(one.scores) == len(seeds):
            low, middle, high = np.percentile(one.means, INNER)
            panels[-1].plot([one.means.min(), one.means.max()], [place, place], lw=1, color=color)
            panels[-1].plot([low, high], [place, place], lw=5, color=color, solid_capstyle="butt")
            panels[-1].plot([middle], [place], marker="|", ms=10, color="white", ls="")
            _mark(panels[-1], published_mean(table.metric, one.method, table.dataset, tuple(seeds)), place)
    for panel, name in zip(panels, [*(f"partition {seed}" for seed in seeds), "mean"], strict=True):
        panel.set_title(name, fontsize="medium")
    whose = {"chosen": "", "published": ", authors' choice"}
    panels[0].set_yticks(range(len(table.rows)), [method_title(one.method) + whose[one.origin] for one in table.rows])
    panels[0].invert_yaxis()
    figure.supxlabel(table.title, fontsize="medium")
    _mark(panels[-1], np.nan, 0, label="published")
    panels[-1].plot([], [], marker="o", ms=3.5, color="0.4", ls="", label="one initialisation")
    panels[-1].plot([], [], lw=5, color="0.4", label="95 % of the means; thin: all")
    figure.legend(loc="outside upper right", ncols=3)
    return figure


def _mark(panel: Axes, value: float | None, place: int, label: str | None = None) -> None:
    if value is not None:
        panel.plot([value], [place], marker="D", ms=5, mfc="none", color=RED, ls="", label=label)
