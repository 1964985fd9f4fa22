"""The tables and figures of docs/results/beyond.md and its appendices.

They are made from docs/results/tables/beyond.parquet and beyond-points.csv.  The first has a row for each job (a
sweep), seed and lambda: what validation chose, and what it reached on the test scans.  The second says which of them a
row of a page shows, along which axis, and what it is compared with.  The two tables about Posterior Bells and the
paper's methods come from docs/results/tables/semi-synthetic.parquet.
"""

from __future__ import annotations

import csv
import json
import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any, NamedTuple

import numpy as np
from keep import read, results_of
from make_page import IMAGES, TABLES, difference, short, table
from matplotlib.figure import Figure
from page_semi_synthetic import PAPER, compare, scores
from removed_heads import color_of, title_of

from normal_guidance.show.figure_style import (
    METHOD_MARKERS,
    WIDTH,
    save,
    styled,
)
from normal_guidance.show.text_tables import NOTHING, digits, signed
from normal_guidance.statistics.differences import (
    DRAWS,
    LEVEL,
    Claim,
    differences,
    measure,
    resample,
    student_quantile,
)
from normal_guidance.statistics.split_results import Metric, SplitResults
from normal_guidance.study.drawn import SEEDS, VARIANTS

LOCALIZATION: Metric = "localization_auroc"
SCANS: Metric = "scan_auroc"
SHOWN = {LOCALIZATION: "localization AUROC", SCANS: "scan AUROC"}

AXES = ("form", "width", "kernel", "l1", "start", "temperature", "guidance", "lambda", "data")
NUMBERS = {"sigma": "σ", "beta": "β", "kappa": "κ", "shape": "p", "gamma": "γ"}
"""What bells learn beside their weights, and the symbols of the page."""

Winner = Mapping[str, Any]
"""A row of the table: the selected epoch of the best configuration of one lambda."""


class Point(NamedTuple):
    """A row of the page: a job's winners for one lambda, and the row of the same axis and data to compare with."""

    axis: str
    label: str
    against: str
    variant: str
    method: str
    job: str
    weight: str

    @property
    def is_reference(self) -> bool:
        return self.label == self.against


@cache
def points(axis: str) -> list[Point]:
    """In the order of the page."""
    with (TABLES / "beyond-points.csv").open(encoding="utf-8", newline="") as file:
        return [Point(**row) for row in csv.DictReader(file) if row["axis"] == axis]


@cache
def winners() -> dict[tuple[str, str, str], dict[int, Winner]]:
    """Variant, job and lambda -> seed -> row."""
    found: dict[tuple[str, str, str], dict[int, Winner]] = defaultdict(dict)
    for row in read(TABLES / "beyond.parquet"):
        found[row["variant"], row["job"], f"{row['weight']:g}"][row["seed"]] = row
    return {key: dict(sorted(of_seeds.items())) for key, of_seeds in found.items()}


def winners_of(point: Point) -> dict[int, Winner]:
    """By seed."""
    return winners().get((point.variant, point.job, point.weight), {})


# ----------------------------------------------------------------------------------------------------
# Rows: means and differences with intervals
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Interval:
    """An estimate and its 95 % interval."""

    value: float
    low: float
    high: float

    def words(self, *, sign: bool = False) -> str:
        value = signed(self.value) if sign else digits(self.value)
        return f"{value} [{digits(self.low)}, {digits(self.high)}]"


@dataclass(frozen=True)
class Row:
    """What is known about a point."""

    point: Point
    values: Mapping[Metric, Interval]
    """Metrics that the point has."""
    beyond: Mapping[Metric, Interval]
    """Differences from the axis's reference where that has the same seeds; none for the reference itself."""


def rows_of(points: Sequence[Point]) -> list[Row]:
    """Every point with intervals; all points of one variant together."""
    variants: dict[str, list[Point]] = defaultdict(list)
    for point in points:
        variants[point.variant].append(point)
    return [row for members in variants.values() for row in _rows(members)]


def _rows(points: Sequence[Point]) -> list[Row]:
    splits = [_split(points, seed) for seed in winners_of(points[0])]
    estimates, drawn = measure(splits), resample(splits)
    values = {
        (point.label, metric): _interval(estimates[metric][point.label], drawn[metric][point.label], splits, metric)
        for point in points
        for metric in SHOWN
        if point.label in estimates[metric]
    }
    claims = [
        Claim(point.label, point.against, metric)
        for point in points
        for metric in SHOWN
        if not point.is_reference and {point.label, point.against} <= set(estimates[metric])
    ]
    beyond = {
        (one.method, one.metric): Interval(one.estimate, one.low, one.high) for one in differences(splits, claims)
    }
    return [Row(point, *(_of(point, found) for found in (values, beyond))) for point in points]


def _of(point: Point, found: Mapping[tuple[str, Metric], Interval]) -> dict[Metric, Interval]:
    return {metric: found[point.label, metric] for metric in SHOWN if (point.label, metric) in found}


def _split(points: Sequence[Point], seed: int) -> SplitResults:
    """The test scans of a seed, and these points on them, by label."""
    results = {point.label: results_of(winners_of(point)[seed]) for point in points}
    labels = results[points[0].label][0]
    ids = tuple(f"{seed}-{number}" for number in range(len(labels)))
    return SplitResults(ids, ids, labels, {label: one for label, (_, one) in results.items()})


def _interval(estimate: float, drawn: np.ndarray, splits: Sequence[SplitResults], metric: Metric) -> Interval:
    """Degrees of freedom as `differences` counts them: scans with a localization, or those of the rarer class."""
    if metric == LOCALIZATION:
        scans = sum(int(one.localized.sum()) for one in splits)
    else:
        scans = min(sum(int((one.labels == label).sum()) for one in splits) for label in (0, 1))
    reach = student_quantile(LEVEL, scans - 1) * float(drawn.std(ddof=1)) if scans > 1 else math.nan
    return Interval(estimate, estimate - reach, estimate + reach)


# ----------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------

HEADER = ("", "localization AUROC", "difference", "scan AUROC", "difference", "learned or held", "lr, L1", "seeds")


@cache
def measured(axis: str) -> list[Row]:
    return rows_of(points(axis))


def axis_table(rows: Sequence[Row]) -> str:
    """One axis, one row a point."""
    return table(HEADER, map(_cells, rows))


def _cells(row: Row) -> list[str]:
    cells = [f"**{row.point.label}**" if row.point.is_reference else row.point.label]
    for metric in SHOWN:
        cells.append(row.values[metric].words() if metric in row.values else NOTHING)
        cells.append(row.beyond[metric].words(sign=True) if metric in row.beyond else NOTHING)
    own = list(winners_of(row.point).values())
    chosen = [f"{short(one['lr'])}, {short(one['l1'])}" for one in own if one["lr"] is not None]
    return [*cells, _numbers(own) or NOTHING, "; ".join(chosen) or NOTHING, str(len(own))]


def _numbers(own: Sequence[Winner]) -> str:
    """Means over the seeds."""
    names = [name for name in NUMBERS if all(name in one["numbers"] for one in own)]
    return ", ".join(f"{NUMBERS[name]} {short(fmean(one['numbers'][name] for one in own))}" for name in names)


def data_tables(rows: Sequence[Row]) -> str:
    """Methods by variants, one table a metric, and beneath how far each is from the oracle, with intervals."""
    parts = []
    for metric, name in SHOWN.items():
        cells = {(row.point.label, row.point.variant): digits(row.values[metric].value) for row in rows}
        body = [
            [label, *(cells.get((label, variant), NOTHING) for variant in VARIANTS)]
            for label in dict.fromkeys(row.point.label for row in rows)
        ]
        heading = name[0].upper() + name[1:]
        parts.append(f"{heading}:\n\n" + table(["", *(one.title for one in VARIANTS.values())], body))
    whole = [[VARIANTS[row.point.variant].title, *_cells(row)[:5]] for row in rows]
    parts.append(
        "With intervals; differences are from the oracle of the same data:\n\n" + table(["data", *HEADER[:5]], whole)
    )
    return "\n\n".join(parts)


def about() -> str:
    """Software, machine, date, time, and the protocol."""
    once = {(*key[:2], seed): row for key, of_seeds in winners().items() for seed, row in of_seeds.items()}
    dates = sorted({row["date"] for row in once.values()})
    trained = {key: row for key, row in once.items() if row["lr"] is not None}
    machines = sorted({f"{row['device']}, {row['precision']}" for row in trained.values()})
    spent = timedelta(seconds=round(sum(row["seconds"] for row in once.values())))
    protocol = json.loads(next(iter(once.values()))["made_with"])["protocol"]
    rates, strengths = (", ".join(map(short, protocol[name])) for name in ("lr", "l1"))
    return "\n".join(
        [
            f"- Software: {'; '.join(sorted({row['software'] for row in once.values()}))}".replace("told", "stated"),
            f"- Machine: {'; '.join(machines)}; date: {' to '.join(dict.fromkeys((dates[0], dates[-1])))}",
            f"- Sweeps: {len(trained)}, of {len({key[:2] for key in trained})} jobs; {spent} (h:mm:ss), "
            "all processes together",
            f"- Protocol: lr {rates}; L1 {strengths}; {protocol['epochs']} epochs at most, "
            f"patience {protocol['patience']}, batches of {protocol['batch_size']}; the configuration and epoch with "
            "the best validation scan AUROC, of all epochs; no slice label is used before the test",
            f"- Numbers: means over the paper's seeds; [95 % intervals] from {DRAWS:,} resamplings "
            "of the test scans, paired for differences (from the row in bold), not adjusted for the number of rows",
        ]
    )


# ----------------------------------------------------------------------------------------------------
# Posterior Bells against the runs of semi-synthetic.md
# ----------------------------------------------------------------------------------------------------


def ahead() -> str:
    """Posterior Bells against every method, selected as the paper selects."""
    found = compare("posterior_bells", PAPER, "beyond")
    rows = [
        [title_of(other, PAPER), *(difference(found.get((other, metric)), bold=False) for metric in SHOWN)]
        for other in dict.fromkeys(other for other, _ in found)
    ]
    return table(["Against", "Localization AUROC", "Scan AUROC"], rows)


def unfiltered() -> str:
    """What TransMIL's family reaches without the filter, and how far Posterior Bells are ahead of it."""
    reached, found, rows = scores("unfiltered"), compare("posterior_bells", "beyond", "unfiltered"), []
    for method in dict.fromkeys(method for method, _ in reached):
        values = [[getattr(reached[method, seed], metric) for metric in SHOWN] for seed in SEEDS]
        cells = [" / ".join(map(digits, one)) for one in [*values, list(map(fmean, zip(*values, strict=True)))]]
        own = (difference(found[method, metric], bold=False) for metric in SHOWN)
        rows.append([title_of(method, PAPER), *cells, *own])
    header = ["Method, no filter", *map(str, SEEDS), "Mean"]
    return table([*header, "Posterior Bells: localization", "Posterior Bells: scan"], rows)


# ----------------------------------------------------------------------------------------------------
# Lambda without slice labels: what each rule chooses, and what it loses
# ----------------------------------------------------------------------------------------------------


class Choice(NamedTuple):
    """What a rule chose in one seed."""

    weight: float
    localization: float
    regret: float
    """What is lost against the lambda that localizes best on the test scans."""


def values_of(own: Sequence[Winner]) -> dict[str, list[float]]:
    """Rule -> its value of each lambda: validation AUROC, criteria that all lambdas have, and slice labels."""
    names = [name for name in own[0]["criteria"] if all(name in one["criteria"] for one in own)]
    return {
        "validation scan AUROC": [one["val_auroc"] for one in own],
        **{name: [one["criteria"][name] for one in own] for name in names},
        "slice labels of the validation scans": [one["val_localization"] for one in own],
    }


def choices(by_seed: Sequence[Sequence[Winner]]) -> dict[str, list[Choice]]:
    """Rule -> its choice in every seed: the first lambda of the highest value."""
    made: dict[str, list[Choice]] = defaultdict(list)
    for own in by_seed:
        localized = [fmean(one["auroc"]) for one in own]
        for rule, values in values_of(own).items():
            best = values.index(max(values))
            made[rule].append(Choice(own[best]["weight"], localized[best], max(localized) - localized[best]))
    return made


def regret_table(by_method: Mapping[str, Mapping[str, Sequence[Choice]]]) -> str:
    """One row a rule: for each method the lambdas that it chose, and its regret; the mean regret over methods last."""
    header = ["lambda chosen by"]
    for title in by_method:
        header += [f"{title}: λ", "localization AUROC", "regret"]
    rows = []
    for rule in dict.fromkeys(rule for made in by_method.values() for rule in made):
        cells, every = [rule], []
        for made in by_method.values():
            own = made.get(rule, [])
            every += [one.regret for one in own]
            means = [digits(fmean(one.localization for one in own)), digits(fmean(one.regret for one in own))]
            cells += [", ".join(short(one.weight) for one in own), *means] if own else [NOTHING] * 3
        rows.append([*cells, digits(fmean(every))])
    return table([*header, "regret, all"], rows)


def choice() -> str:
    """What every rule chooses for the methods of the axis of lambda."""
    by_method = {}
    for method in dict.fromkeys(point.method for point in points("lambda")):
        own = [winners_of(point) for point in points("lambda") if point.method == method]
        by_method[title_of(method)] = choices([[one[seed] for one in own] for seed in own[0]])
    return regret_table(by_method)


# ----------------------------------------------------------------------------------------------------
# Figures
# ----------------------------------------------------------------------------------------------------

DASHES = {"centered_gaussian": (6, 3), "ends_of_bells": (1, 2), "ends_of_whole_bells": (4, 2, 1, 2)}
"""Patterns for those that have no scan score."""


@styled
def plot_forms(rows: Sequence[Row]) -> Figure:
    """Localization against classification, one marker a method, with 95 % intervals; the oracle as lines."""
    figure = Figure(figsize=(WIDTH, 0.52 * WIDTH), layout="constrained")
    panel = figure.subplots()
    for row in rows:
        method, where, label = row.point.method, row.values[LOCALIZATION], row.point.label
        if method == "oracle":
            panel.axhline(where.value, color="black", lw=1, label=label)
            panel.axvline(row.values[SCANS].value, color="black", lw=1)
        elif SCANS not in row.values:
            panel.axhline(where.value, color="0.45", lw=1, ls=(0, DASHES[method]), label=label)
        else:
            scan = row.values[SCANS]
            panel.errorbar(scan.value, where.value, xerr=_reach(scan), yerr=_reach(where), label=label, **_look(method))
    panel.set_xlabel(f"{SHOWN[SCANS]} (mean over seeds, 95 % interval)")
    panel.set_ylabel(SHOWN[LOCALIZATION])
    panel.grid(color="0.93", lw=0.7)
    panel.set_axisbelow(True)
    figure.legend(loc="outside right center")
    return figure


@styled
def plot_data(rows: Sequence[Row]) -> Figure:
    """One panel a metric, one column a variant, one marker a method; the variant's oracle as a line."""
    variants = [name for name in VARIANTS if any(row.point.variant == name for row in rows)]
    methods = list(dict.fromkeys(row.point.method for row in rows if row.point.method != "oracle"))
    figure = Figure(figsize=(WIDTH, 0.75 * WIDTH), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, metric in zip(panels, SHOWN, strict=True):
        for row in rows:
            method, value, label = row.point.method, row.values[metric], row.point.label
            place = float(variants.index(row.point.variant))
            if method == "oracle":
                panel.plot([place - 0.42, place + 0.42], [value.value] * 2, color="black", lw=1.4, label=label)
            else:
                place += 0.8 * ((methods.index(method) + 0.5) / len(methods) - 0.5)
                panel.errorbar(place, value.value, yerr=_reach(value), label=label, **_look(method, size=5))
        panel.set_ylabel(SHOWN[metric])
        panel.grid(axis="y", color="0.93", lw=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(axis="x", length=0)
    panels[-1].set_xlim(-0.6, len(variants) - 0.4)
    panels[-1].set_xticks(range(len(variants)), [_folded(VARIANTS[name].title) for name in variants])
    handles, labels = panels[0].get_legend_handles_labels()
    once = dict(zip(labels, handles, strict=True))
    ordered = list(dict.fromkeys(row.point.label for row in rows))
    figure.legend([once[name] for name in ordered], ordered, loc="outside upper center", ncols=4)
    return figure


def _look(method: str, size: float = 6.5) -> dict[str, Any]:
    own = {"color": color_of(method), "marker": METHOD_MARKERS.get(method, "D"), "ms": size}
    return {**own, "mec": "white", "mew": 0.6, "lw": 0, "elinewidth": 1}


def _reach(value: Interval) -> float:
    return value.high - value.value


def _folded(text: str, width: int = 17) -> str:
    """In lines of about so many letters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


FIGURES = {"form": ("beyond-forms.png", plot_forms), "data": ("beyond-data.png", plot_data)}


def draw(images: Path = IMAGES) -> None:
    """Writes the figures; `make_page.py --write` does it after the tables."""
    for axis, (file, plot) in FIGURES.items():
        save(plot(measured(axis)), images / file)


SECTIONS: dict[str, Callable[[], str]] = {
    "ahead": ahead,
    "unfiltered": unfiltered,
    "about": about,
    **{axis: lambda axis=axis: axis_table(measured(axis)) for axis in AXES},  # type: ignore[misc]
    "data": lambda: data_tables(measured("data")),
    "choice": choice,
}
