"""The tables: means over seeds with intervals, and differences with intervals, from the results that are there."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from statistics import fmean

import numpy as np
from measured.text import short, table

from beyond.points import Point, Protocol, points_of
from beyond.results import Found, Winner, split, winners_of
from beyond.variations import NUMBERS
from normal_guidance.reports.study_tables import software
from normal_guidance.simulate.semi_synthetic import SEEDS, VARIANTS
from normal_guidance.statistics.bootstrap import DRAWS, measure, resample
from normal_guidance.statistics.differences import LEVEL, Claim, differences, student_quantile
from normal_guidance.statistics.number_format import NOTHING, digits, signed
from normal_guidance.statistics.scores import Metric
from normal_guidance.statistics.split_results import SplitResults

IN_PROGRESS = "*In progress: not measured yet.*"

LOCALIZATION: Metric = "localization_auroc"
SCANS: Metric = "scan_auroc"
SHOWN = (LOCALIZATION, SCANS)


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
    winners: Mapping[int, Winner]
    values: Mapping[Metric, Interval]
    """Metrics that the point has."""
    beyond: Mapping[Metric, Interval]
    """Differences from the axis's reference where that has the same seeds; none for the reference itself."""


def rows_of(found: Found, points: Sequence[Point]) -> list[Row]:
    """Every point that has a result, with intervals over the seeds that it has; all points of one variant together."""
    groups: dict[tuple[str, tuple[int, ...]], list[Point]] = defaultdict(list)
    for point in points:
        if seeds := tuple(sorted(winners_of(found, point))):
            groups[point.job.variant, seeds].append(point)
    rows = {
        row.point: row
        for (variant, seeds), members in groups.items()
        for row in _rows(found, members, [one for one in points if one.job.variant == variant], seeds)
    }
    return [rows[point] for point in points if point in rows]


def _rows(found: Found, members: Sequence[Point], points: Sequence[Point], seeds: Sequence[int]) -> list[Row]:
    wanted = {one.against for one in members}
    others = [one for one in points if one.label in wanted and one not in members]
    others = [one for one in others if set(seeds) <= set(winners_of(found, one))]
    splits = [split(found, [*members, *others], seed) for seed in seeds]
    estimates, drawn = measure(splits), resample(splits)
    values = {
        point: {
            metric: _interval(estimates[metric][point.label], drawn[metric][point.label], _freedom(splits, metric))
            for metric in SHOWN
            if point.label in estimates[metric]
        }
        for point in members
    }
    claims = [
        Claim(point.label, point.against, metric)
        for point in members
        for metric in SHOWN
        if not point.is_reference and {point.label, point.against} <= set(estimates[metric])
    ]
    found_differences = {
        (one.method, one.metric): Interval(one.estimate, one.low, one.high) for one in differences(splits, claims)
    }
    return [
        Row(
            point,
            winners_of(found, point),
            values[point],
            {metric: found_differences[key] for metric in SHOWN if (key := (point.label, metric)) in found_differences},
        )
        for point in members
    ]


def _interval(estimate: float, drawn: np.ndarray, freedom: int) -> Interval:
    reach = student_quantile(LEVEL, freedom) * float(drawn.std(ddof=1)) if freedom > 0 else math.nan
    return Interval(estimate, estimate - reach, estimate + reach)


def _freedom(splits: Sequence[SplitResults], metric: Metric) -> int:
    """As `differences` counts them: scans that localization is measured on, or those of the rarer kind."""
    if metric == LOCALIZATION:
        return sum(int(one.localized.sum()) for one in splits) - 1
    return min(sum(int((one.labels == label).sum()) for one in splits) for label in (0, 1)) - 1


# ----------------------------------------------------------------------------------------------------
# Tables
# ----------------------------------------------------------------------------------------------------

HEADER = ("", "localization AUROC", "difference", "scan AUROC", "difference", "learned or held", "lr, L1", "seeds")


def axis_table(found: Found, axis: str) -> str:
    """One axis, one row a point; points without a result say so."""
    points = points_of(axis)
    rows = {row.point: row for row in rows_of(found, points)}
    if not rows:
        return IN_PROGRESS
    return table(HEADER, [_cells(point, rows.get(point), found) for point in points])


def _cells(point: Point, row: Row | None, found: Found) -> list[str]:
    label = f"**{point.label}**" if point.is_reference else point.label
    if row is None:
        return [label, *[NOTHING] * 6, _seeds({}, point, found)]
    cells = [label]
    for metric in SHOWN:
        cells.append(row.values[metric].words() if metric in row.values else NOTHING)
        cells.append(row.beyond[metric].words(sign=True) if metric in row.beyond else NOTHING)
    winners = list(row.winners.values())
    return [*cells, numbers(winners) or NOTHING, _choices(winners), _seeds(row.winners, point, found)]


def numbers(winners: Sequence[Winner]) -> str:
    """Means over the seeds."""
    names = [name for name in NUMBERS if all(name in one.numbers for one in winners)]
    return ", ".join(f"{NUMBERS[name]} {short(fmean(one.numbers[name] for one in winners))}" for name in names)


def _choices(winners: Sequence[Winner]) -> str:
    """What validation chose, seed by seed."""
    pairs = [f"{short(one.lr)}, {short(one.l1)}" for one in winners if one.lr is not None and one.l1 is not None]
    return "; ".join(pairs) or NOTHING


def _seeds(winners: Mapping[int, Winner], point: Point, found: Found) -> str:
    without = sum(1 for (job, seed) in found if job == point.job and seed not in winners)
    if not winners and not without:
        return "in progress"
    words = str(len(winners)) if len(winners) == len(SEEDS) else f"{len(winners)} of {len(SEEDS)}"
    return f"{words} ({without}: no epoch selected)" if without else words


def data_tables(found: Found) -> str:
    """Methods by variants, one table a metric, and beneath how far each is from the ceiling, with intervals."""
    points = points_of("data")
    rows = {row.point: row for row in rows_of(found, points)}
    if not rows:
        return IN_PROGRESS
    titles = {"localization_auroc": "Localization AUROC", "scan_auroc": "Scan AUROC"}
    parts = []
    for metric in SHOWN:
        cells = {(row.point.label, row.point.job.variant): row.values[metric] for row in rows.values()}
        body = [
            [label, *(digits(cells[label, name].value) if (label, name) in cells else NOTHING for name in VARIANTS)]
            for label in dict.fromkeys(point.label for point in points)
        ]
        parts.append(f"{titles[metric]}:\n\n" + table(["", *(one.title for one in VARIANTS.values())], body))
    whole = [
        [VARIANTS[point.job.variant].title, *_cells(point, rows.get(point), found)[:5]]
        for point in points
        if point in rows
    ]
    parts.append(
        "With intervals; differences are from the oracle of the same data:\n\n" + table(["data", *HEADER[:5]], whole)
    )
    return "\n\n".join(parts)


# ----------------------------------------------------------------------------------------------------
# What it was measured with
# ----------------------------------------------------------------------------------------------------


def about(found: Found, protocol: Protocol) -> str:
    """Software, machine, date, time, and the protocol."""
    if not found:
        return IN_PROGRESS
    abouts = [result.about for result in found.values()]
    environments = [one["environment"] for one in abouts]
    dates = sorted({one["date"] for one in environments})
    machines = sorted({f"{one['environment']['device']}, {one['precision']}" for one in abouts if "epochs" in one})
    spent = timedelta(seconds=round(sum(one["seconds"] for one in abouts)))
    trained = [job for job, _ in found if job.is_trained]
    among = " among epochs whose training AUROC is above it" if protocol.train_above_val else ", of all epochs"
    rates, strengths = (", ".join(map(short, values)) for values in (protocol.lr, protocol.l1))
    return "\n".join(
        [
            f"- Software: {'; '.join(sorted({software(one) for one in environments}))}",
            f"- Machine: {'; '.join(machines)}; date: {' to '.join(dict.fromkeys((dates[0], dates[-1])))}",
            f"- Sweeps: {len(trained)}, of {len(set(trained))} jobs; {spent} (h:mm:ss), all processes together",
            f"- Protocol: lr {rates}; L1 {strengths}; {protocol.epochs} epochs at most, patience {protocol.patience}, "
            f"batches of {protocol.batch_size}; the configuration and epoch with the best validation scan AUROC{among}"
            "; no slice label is used before the test",
            f"- Numbers: means over the paper's seeds; [95 % intervals] from {DRAWS:,} resamplings "
            "of the test scans, paired for differences (from the row in bold), not adjusted for the number of rows",
        ]
    )
