"""The figure of docs/results/beyond.md, and the table of its appendix.

The figure is made from docs/results/tables/beyond.parquet and beyond-points.csv.  The first has a row for each job (a
sweep), seed and lambda: what validation chose, and what it reached on the test scans.  The second names them along nine
axes, of which the figure shows `data`.  The table comes from docs/results/tables/semi-synthetic.parquet.
"""

from __future__ import annotations

import csv
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from field_tables import SEMI
from keep import read, results_of
from make_page import IMAGES, TABLES, table
from matplotlib.figure import Figure
from removed_heads import color_of, title_of
from variants import VARIANTS

from normal_guidance.show.figure_style import METHOD_MARKERS, WIDTH, save, styled
from normal_guidance.show.text_tables import NOTHING, digits, p_value, signed
from normal_guidance.statistics.differences import (
    LEVEL,
    Claim,
    Difference,
    differences,
    measure,
    resample,
    student_quantile,
)
from normal_guidance.statistics.split_results import Metric, SplitResults

LOCALIZATION: Metric = "localization_auroc"
SCANS: Metric = "scan_auroc"
SHOWN = {LOCALIZATION: "localization AUROC", SCANS: "scan AUROC"}

Winner = Mapping[str, Any]
"""A row of the table: the selected epoch of the best configuration of one lambda."""


class Point(NamedTuple):
    """A job's winners for one lambda, on one variant of the data."""

    axis: str
    label: str
    against: str
    variant: str
    method: str
    job: str
    weight: str


class Row(NamedTuple):
    """A point, and for each metric its estimate and half of the 95 % interval."""

    point: Point
    values: Mapping[Metric, tuple[float, float]]


def points() -> list[Point]:
    """What the figure shows, in its order."""
    with (TABLES / "beyond-points.csv").open(encoding="utf-8", newline="") as file:
        return [Point(**row) for row in csv.DictReader(file) if row["axis"] == "data"]


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


def measured() -> list[Row]:
    """Every point with intervals; all points of one variant together."""
    variants: dict[str, list[Point]] = defaultdict(list)
    for point in points():
        variants[point.variant].append(point)
    return [row for members in variants.values() for row in _rows(members)]


def _rows(points: Sequence[Point]) -> list[Row]:
    splits = [_split(points, seed) for seed in winners_of(points[0])]
    estimates, drawn = measure(splits), resample(splits)
    return [
        Row(
            point,
            {
                metric: (estimates[metric][point.label], _reach(drawn[metric][point.label], splits, metric))
                for metric in SHOWN
            },
        )
        for point in points
    ]


def _split(points: Sequence[Point], seed: int) -> SplitResults:
    """The test scans of a seed, and these points on them, by label."""
    results = {point.label: results_of(winners_of(point)[seed]) for point in points}
    labels = results[points[0].label][0]
    ids = tuple(f"{seed}-{number}" for number in range(len(labels)))
    return SplitResults(ids, ids, labels, {label: one for label, (_, one) in results.items()})


def _reach(drawn: np.ndarray, splits: Sequence[SplitResults], metric: Metric) -> float:
    """Degrees of freedom as `differences` counts them: scans with a localization, or those of the rarer class."""
    if metric == LOCALIZATION:
        scans = sum(int(one.localized.sum()) for one in splits)
    else:
        scans = min(sum(int((one.labels == label).sum()) for one in splits) for label in (0, 1))
    return student_quantile(LEVEL, scans - 1) * float(drawn.std(ddof=1))


def ahead() -> str:
    """Posterior Bells against every method, selected as the paper selects, with Holm's correction over a metric."""
    tested = SEMI.splits(SEMI.name, "beyond")
    others = [method for method in tested[0].methods if method != "posterior_bells"]
    claimed = [
        Claim("posterior_bells", other, metric)
        for metric in SHOWN
        for other in others
        if metric == LOCALIZATION or other != "centered_gaussian"
    ]
    found = {(one.against, one.metric): one for one in differences(tested, claimed)}
    rows = [[title_of(other, SEMI.name), *(_words(found.get((other, metric))) for metric in SHOWN)] for other in others]
    return table(["Against", "Localization AUROC", "Scan AUROC"], rows)


def _words(one: Difference | None) -> str:
    if one is None:
        return NOTHING
    return f"{signed(one.estimate)} [{digits(one.low)}, {digits(one.high)}], {p_value(one.p_adjusted)}"


@styled
def plot_data(rows: Sequence[Row]) -> Figure:
    """One panel a metric, one column a variant, one marker a method; the variant's oracle as a line."""
    variants = [name for name in VARIANTS if any(row.point.variant == name for row in rows)]
    methods = list(dict.fromkeys(row.point.method for row in rows if row.point.method != "oracle"))
    figure = Figure(figsize=(WIDTH, 0.75 * WIDTH), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, metric in zip(panels, SHOWN, strict=True):
        for row in rows:
            method, (value, reach), label = row.point.method, row.values[metric], row.point.label
            place = float(variants.index(row.point.variant))
            if method == "oracle":
                panel.plot([place - 0.42, place + 0.42], [value] * 2, color="black", lw=1.4, label=label)
            else:
                place += 0.8 * ((methods.index(method) + 0.5) / len(methods) - 0.5)
                look: dict[str, Any] = {"color": color_of(method), "marker": METHOD_MARKERS.get(method, "D"), "ms": 5}
                look |= {"mec": "white", "mew": 0.6, "lw": 0, "elinewidth": 1}
                panel.errorbar(place, value, yerr=reach, label=label, **look)
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


def _folded(text: str, width: int = 17) -> str:
    """In lines of about so many letters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)


def draw(images: Path = IMAGES) -> None:
    """Writes the figure; `make_page.py --write` does it after the table."""
    save(plot_data(measured()), images / "beyond-data.png")


SECTIONS: dict[str, Callable[[], str]] = {"ahead": ahead}
