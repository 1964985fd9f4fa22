"""The paper's tables from the data: train the runs that are missing, then write tables of all complete runs.

DIR/tables.md .tex .csv .json      our numbers, the published ones, their difference, and what validation chose
DIR/sensitivity/<method>.md ...    the same for each divergence and lambda
DIR/initialisations/<origin>/<method>/<seed>    chosen configurations, trained again from other initial weights
DIR/initialisations.md .json .png  what a study might have shown with these

A study trains every configuration once for each partition, so a method's number is one draw of its initial weights:
the chosen configuration, and the published one where it differs, can be trained from more of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import write_atomically, write_json
from normal_guidance.core.methods import method_title
from normal_guidance.show.figure_style import RED, WIDTH, method_color, save, styled
from normal_guidance.show.text_tables import NOTHING, Grid, digits
from normal_guidance.statistics.split_results import Metric
from normal_guidance.study.experiment import (
    FORMS,
    SENSITIVITY,
    Listener,
    Study,
    TrainingJob,
    find_results,
    jobs_of,
    load_result,
    train_jobs,
    train_study,
)
from normal_guidance.study.references import PUBLISHED_SEEDS, MakeGrid, published, published_choice, published_seed
from normal_guidance.study.study_tables import (
    SHOWN_METRICS,
    TITLES,
    StudyTables,
    collect,
    collect_sensitivity,
    refuse_unguided,
)
from normal_guidance.sweep.config import Config, grid, sensitivity_grid


def reproduce(study: Study, *, make_grid: MakeGrid = grid, listener: Listener | None = None) -> StudyTables:
    """Train the runs that the study lacks and write the paper's tables of all complete runs in its folder."""
    train_study(study, make_grid=make_grid, listener=listener)
    results = collect(study.folder, study.dataset.name)
    results.write(study.folder, "tables")
    return results


def reproduce_sensitivity(
    study: Study, *, make_grid: MakeGrid = sensitivity_grid, listener: Listener | None = None
) -> dict[str, StudyTables]:
    """Train and write the sensitivity to divergence and lambda: one table for each guided method of the study."""
    for method in study.methods:
        refuse_unguided(method)
    train_jobs(study, sensitivity_jobs(study, make_grid), listener)
    results = {method: collect_sensitivity(study.folder, study.dataset.name, method) for method in study.methods}
    for method, tables in results.items():
        tables.write(study.folder / SENSITIVITY, method)
    return results


def sensitivity_jobs(study: Study, make_grid: MakeGrid = sensitivity_grid) -> list[TrainingJob]:
    """The jobs of the study's methods with every divergence and lambda."""
    return jobs_of(study, study.methods, make_grid, study.folder / SENSITIVITY, f"{SENSITIVITY} of ")


INITIALISATIONS = "initialisations"
ORIGINS = {"chosen": "validation's", "published": "the authors'"}
"""Whose choice is trained again: validation's in this study, or the authors' where it differs."""

STEP = 10_000  # seeds of initial weights lie so far apart; the first is the study's own


def from_initialisations(config: Config, count: int) -> tuple[Config, ...]:
    """The configuration with so many seeds of initial weights, its own first."""
    return tuple(replace(config, seed=config.seed + STEP * number) for number in range(count))


def train_initialisations(study: Study, count: int, listener: Listener | None = None) -> None:
    """Train each method and partition of a complete study from `count` initial weights, for each of `ORIGINS`."""
    methods = [method for method in study.methods if method not in FORMS]
    jobs = [job for seed in study.seeds for method in methods for job in _jobs_of_run(study, method, seed, count)]
    train_jobs(study, jobs, listener)


def _jobs_of_run(study: Study, method: str, seed: int, count: int) -> Iterator[TrainingJob]:
    result = load_result(method, seed, study.folder / method / str(seed))
    if result is None:
        raise UserError(f"{study.folder} has no complete run {method}/{seed}; train it first, by the same command")
    if not result.winners:
        return  # nothing was selected
    chosen = result.winners[0].config
    settings = {"chosen": (chosen.l1, chosen.lr)}
    theirs = published_choice(method, study.dataset.name, seed)
    if theirs is not None and theirs != settings["chosen"]:
        settings["published"] = theirs
    for origin, (l1, lr) in settings.items():
        yield TrainingJob(
            method=method,
            folder=study.folder / INITIALISATIONS / origin / method / str(seed),
            protocol=replace(study.config(method, seed), l1=l1, lr=lr),
            make_grid=partial(from_initialisations, count=count),
            title=f"{count} initialisations of {method}, {origin}, seed {seed}",
        )


@dataclass(frozen=True)
class Initialisations:
    """The test scores of one method from every initialisation, for each partition."""

    method: str
    origin: str
    scores: Mapping[int, Mapping[int, float]]  # partition -> seed of the weights -> score, where an epoch was selected
    best: Mapping[int, int] = field(default_factory=dict)  # partition -> seed of the highest validation AUROC

    @property
    def means(self) -> np.ndarray:
        """The mean over the partitions for each combination of initialisations."""
        return np.array([np.mean(chosen) for chosen in product(*(values.values() for values in self.scores.values()))])

    @property
    def first(self) -> float:
        """The mean of the study's own initialisations; NaN where nothing was selected from one of them."""
        return float(np.mean([values.get(seed, np.nan) for seed, values in self.scores.items()]))

    @property
    def chosen(self) -> float:
        """The mean where validation chooses the initialisation of each partition; NaN where its choice is unknown."""
        return float(np.mean([values.get(self.best.get(seed, -1), np.nan) for seed, values in self.scores.items()]))


def collect_initialisations(folder: Path, dataset: str, metric: Metric) -> list[Initialisations]:
    """The scores of all complete runs below a study's folder, by origin and method."""
    rows: dict[tuple[str, str], Initialisations] = {}
    for origin in ORIGINS:
        for result in find_results(folder / INITIALISATIONS / origin, dataset):
            method, seed = result.method, result.seed
            tested = [winner for winner in result.winners if winner.test is not None]
            if not tested:
                continue
            values = {winner.config.seed: getattr(winner.test, metric) for winner in tested}
            best = max(tested, key=lambda winner: winner.val_auroc).config
            # Where validation chose what the authors chose, its run counts for both.
            theirs = published_choice(method, dataset, seed) == (best.l1, best.lr)
            for whose in ORIGINS if theirs and origin == "chosen" else (origin,):
                row = rows.setdefault((whose, method), Initialisations(method, whose, {}, {}))
                scores = dict(sorted({**row.scores, seed: values}.items()))
                rows[whose, method] = replace(row, scores=scores, best={**row.best, seed: best.seed})
    ours = {method: row.scores for (origin, method), row in rows.items() if origin == "chosen"}
    ordered = sorted(rows.values(), key=lambda row: [*ORIGINS].index(row.origin))
    return [row for row in ordered if row.origin == "chosen" or row.scores != ours.get(row.method)]


INNER = (2.5, 50.0, 97.5)  # percentiles of the means that the table shows

CAPTION = (
    "Means over the partitions that are named. First: the initialisation of the study itself. By validation: that of "
    "the highest validation AUROC on each partition."
)


@dataclass(frozen=True)
class InitialisationTable:
    """All methods of one metric: means over the partitions, from every combination of their initialisations."""

    metric: Metric
    dataset: str
    rows: tuple[Initialisations, ...]

    def grid(self) -> Grid:
        count = max(len(values) for row in self.rows for values in row.scores.values())
        header = ["Method", "Configurations (partitions)", "First", "Least", "Most", "Median [95 % of means]"]
        header += ["By validation", "Published", "Means below it"]
        rows = []
        for row in self.rows:
            means, theirs = row.means, published_mean(self.metric, row.method, self.dataset, tuple(row.scores))
            low, middle, high = (digits(float(value)) for value in np.percentile(means, INNER))
            cells = [method_title(row.method), f"{ORIGINS[row.origin]} ({', '.join(map(str, row.scores))})"]
            cells += [digits(float(value)) for value in (row.first, means.min(), means.max())]
            cells += [f"{middle} [{low}, {high}]", digits(row.chosen)]
            below = NOTHING if theirs is None else f"{float((means <= theirs).mean()):.0%}"
            rows.append([*cells, digits(theirs), below])
        return Grid(f"{TITLES[self.metric]}, {count} initialisations", CAPTION, header, rows)


def published_mean(metric: Metric, method: str, dataset: str, seeds: Sequence[int]) -> float | None:
    """The published mean over these partitions; None where it is not known."""
    if set(seeds) == set(PUBLISHED_SEEDS):
        whole = published(metric, method, dataset)
        return None if whole is None else whole.mean
    known = [value for seed in seeds if (value := published_seed(metric, method, dataset, seed)) is not None]
    return float(np.mean(known)) if len(known) == len(seeds) else None


def initialisation_tables(folder: Path, dataset: str) -> list[InitialisationTable]:
    """The tables of all complete runs; an error where there are none."""
    rows = {metric: tuple(collect_initialisations(folder, dataset, metric)) for metric in SHOWN_METRICS}
    if not any(rows.values()):
        raise UserError(f"{folder / INITIALISATIONS} has no complete run; train them with --initialisations")
    return [InitialisationTable(metric, dataset, of_metric) for metric, of_metric in rows.items() if of_metric]


def write_initialisations(folder: Path, dataset: str) -> str:
    """Write the tables and the figure beside the study's, and return the page."""
    tables = initialisation_tables(folder, dataset)
    grids = [table.grid().markdown(2) for table in tables]
    page = "\n".join(["# What other initial weights would have shown", "", *grids])
    write_atomically(folder / f"{INITIALISATIONS}.md", page.encode())
    content = {str(table.metric): [asdict(row) for row in table.rows] for table in tables}
    write_json(folder / f"{INITIALISATIONS}.json", content)
    save(plot_initialisations(tables[0]), folder / f"{INITIALISATIONS}.png")
    return page


@styled
def plot_initialisations(table: InitialisationTable) -> Figure:
    """A row for each method: every initialisation on every partition, then the means of all combinations."""
    seeds = sorted({seed for row in table.rows for seed in row.scores})
    figure = Figure(figsize=(1.3 * WIDTH, 1.1 + 0.3 * len(table.rows)), layout="constrained")
    panels = figure.subplots(1, len(seeds) + 1, sharex=True, sharey=True)
    for line, row in enumerate(table.rows):
        color = method_color(row.method)
        for panel, seed in zip(panels, seeds, strict=False):
            values = list(row.scores.get(seed, {}).values())
            height = line + np.linspace(-0.25, 0.25, len(values)) if len(values) > 1 else [line] * len(values)
            panel.plot(values, height, marker="o", ms=3.5, color=color, ls="", alpha=0.7)
            _mark(panel, published_mean(table.metric, row.method, table.dataset, (seed,)), line)
        if len(row.scores) == len(seeds):
            low, middle, high = np.percentile(row.means, INNER)
            panels[-1].plot([row.means.min(), row.means.max()], [line, line], lw=1, color=color)
            panels[-1].plot([low, high], [line, line], lw=5, color=color, solid_capstyle="butt")
            panels[-1].plot([middle], [line], marker="|", ms=10, color="white", ls="")
            _mark(panels[-1], published_mean(table.metric, row.method, table.dataset, tuple(seeds)), line)
    for panel, name in zip(panels, [*(f"partition {seed}" for seed in seeds), "mean"], strict=True):
        panel.set_title(name, fontsize="medium")
    whose = {"chosen": "", "published": ", authors' choice"}
    panels[0].set_yticks(range(len(table.rows)), [method_title(row.method) + whose[row.origin] for row in table.rows])
    panels[0].invert_yaxis()
    figure.supxlabel(TITLES[table.metric], fontsize="medium")
    _mark(panels[-1], np.nan, 0, label="published")
    panels[-1].plot([], [], marker="o", ms=3.5, color="0.4", ls="", label="one initialisation")
    panels[-1].plot([], [], lw=5, color="0.4", label="95 % of the means; thin: all")
    figure.legend(loc="outside upper right", ncols=3)
    return figure


def _mark(panel: Axes, value: float | None, line: int, label: str | None = None) -> None:
    if value is not None:
        panel.plot([value], [line], marker="D", ms=5, mfc="none", color=RED, ls="", label=label)
