"""What a study might have shown: a table and a figure of the scores from many initialisations.

DIR/initialisations.md .json   the tables
DIR/initialisations.png        the distributions, with the published values in them
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from matplotlib.figure import Figure

from normal_guidance.core.methods import method_title
from normal_guidance.errors import UserError
from normal_guidance.evaluation.initialisations import INITIALISATIONS, Initialisations, collect_initialisations
from normal_guidance.evaluation.published import published
from normal_guidance.files import write_atomically, write_json
from normal_guidance.presentation.figure_style import RED, WIDTH, method_color, save, styled
from normal_guidance.presentation.text_tables import Grid
from normal_guidance.statistics.number_format import digits
from normal_guidance.statistics.scores import Metric

SHOWN: tuple[tuple[Metric, str], ...] = (
    ("localization_auroc", "Localization AUROC"),
    ("scan_auroc", "Scan AUROC"),
)

INNER = (2.5, 50.0, 97.5)
"""Percentiles of the means that the table shows."""

HEADER = ("Method", "Configurations", "First", "Least", "Most", "Median [95 % of means]", "Published", "Means below it")

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
            caption="Means over the partitions. First: the initialisation of the study itself.",
            header=HEADER,
            rows=[self._cells(one) for one in self.rows],
        )

    def _cells(self, one: Initialisations) -> list[str]:
        means, theirs = one.means, published(self.metric, one.method, self.dataset)
        low, middle, high = np.percentile(means, INNER)
        known = theirs is not None and len(one.scores) > 1
        return [
            method_title(one.method),
            f"{ORIGIN_TITLES[one.origin]}, {len(one.scores)} partitions",
            *(digits(float(value)) for value in (one.first, means.min(), means.max())),
            f"{digits(float(middle))} [{digits(float(low))}, {digits(float(high))}]",
            digits(theirs.mean) if theirs is not None and known else "-",
            f"{one.share_below(theirs.mean):.0%}" if theirs is not None and known else "-",
        ]


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
    save(plot_initialisations(tables), folder / f"{INITIALISATIONS}.png")
    return page


@styled
def plot_initialisations(tables: Sequence[InitialisationTable]) -> Figure:
    """A row for each method: the means from all combinations of initialisations, and the published one."""
    rows = max(len(one.rows) for one in tables)
    figure = Figure(figsize=(WIDTH, 0.9 + 0.34 * rows), layout="constrained")
    panels = figure.subplots(1, len(tables), squeeze=False)[0]
    for panel, table in zip(panels, tables, strict=True):
        for place, one in enumerate(table.rows):
            low, middle, high = np.percentile(one.means, INNER)
            color = method_color(one.method)
            panel.plot([one.means.min(), one.means.max()], [place, place], lw=1, color=color)
            panel.plot([low, high], [place, place], lw=5, color=color, solid_capstyle="butt")
            panel.plot([middle], [place], marker="|", ms=12, color="white", ls="")
            if (theirs := published(table.metric, one.method, table.dataset)) is not None:
                panel.plot([theirs.mean], [place], marker="D", ms=5, mfc="white", color=RED, ls="")
        titles = [
            method_title(one.method) + ("" if one.origin == "chosen" else " (the authors' configuration)")
            for one in table.rows
        ]
        panel.set_yticks(range(len(titles)), titles if panel is panels[0] else [""] * len(titles))
        panel.invert_yaxis()
        panel.set_xlabel(table.title)
    panels[-1].plot([], [], marker="D", ms=5, mfc="white", color=RED, ls="", label="published")
    panels[-1].plot([], [], lw=5, color="0.4", label="95 % of the means; thin: all")
    panels[-1].legend(loc="lower left")
    return figure
