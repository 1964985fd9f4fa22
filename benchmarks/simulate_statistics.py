"""Do the intervals cover the truth, and are equal methods called different in 5 % of experiments?  A table, then JSON.

    python benchmarks/simulate_statistics.py [--experiments 2000] [--draws 200] [--jobs 2] [--designs one-60,...]

Every experiment is made up: patients with one to three scans, some of a positive patient's scans negative, and three
methods whose scores share what is hard about a patient and about a scan.  Method `b` is worse than `a` and equal to
`c`, so that a - b tests coverage and c - b tests size.  The truth is known in closed form (scan AUPRC: one integral).
Designs: one split; three disjoint splits, as on the semi-synthetic data; three overlapping ones, as on CT, where each
draws its test patients, a sixth, from the same ones.  Names end with the positive patients of all splits together;
there are four times as many negative ones.  `sharp`: all methods nearly perfect, so that few scans decide.

Two hundred draws know a standard error to within 5 %, which lowers the coverage of 95 % by .1: enough here, where
every experiment has its own.  Goals: 93-97 % covered and 3-7 % called different, with 60 to 500 positive patients.

The designs `good-30` and so on ask whether conformal intervals of 90 % contain the finding (`statistics.conformal`).
An experiment calibrates with 30 or 100 scans and tests 20 new ones, whose attention knows the finding (good), knows
nothing (useless), is one slice (point), or takes four values (ties).  Goal: 88-92 % of the new scans, over all
experiments.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from functools import cache, partial
from statistics import NormalDist
from typing import Any, NamedTuple

import numpy as np
import torch

from normal_guidance.core.arrays import bag_of_rows, place_in_bag
from normal_guidance.statistics.conformal import calibrate_intervals
from normal_guidance.statistics.differences import Claim, delong, differences
from normal_guidance.statistics.split_results import METRICS, MethodResults, Metric, SplitResults
from report import machine, names

COVERAGE, SIZE = (0.93, 0.97), (0.03, 0.07)
NEGATIVES = 4
SEVERAL = 0.6
"""Share of positive scans among the further scans of a positive patient."""
PATIENT, SCAN, METHOD = 0.4, 0.3, 0.3
"""Shares of the variance of a score: of the patient, of the scan, and of the method on that scan."""


class Effect(NamedTuple):
    """A method's mean localization AUROC and AUPRC on the probit scale, and how far it moves positive scans."""

    auroc: float
    auprc: float
    scan: float


USUAL = {"a": Effect(1.6, 0.2, 1.5), "b": Effect(0.4, -0.6, 1.2), "c": Effect(0.4, -0.6, 1.2)}
SHARP = {"a": Effect(3.0, 1.5, 2.8), "b": Effect(2.5, 1.0, 2.4), "c": Effect(2.5, 1.0, 2.4)}


class Design(NamedTuple):
    """How patients are tested."""

    kind: str
    positives: int
    effects: dict[str, Effect] = USUAL
    inside: bool = True
    """Whether the goals are meant for it."""


DESIGNS = {
    "one-60": Design("one", 60),
    "one-150": Design("one", 150),
    "one-500": Design("one", 500),
    "disjoint-150": Design("disjoint", 150),
    "overlapping-60": Design("overlapping", 60),
    "overlapping-150": Design("overlapping", 150),
    "one-16": Design("one", 16, inside=False),
    "sharp-60": Design("one", 60, SHARP, inside=False),
}


# ----------------------------------------------------------------------------------------------------
# Experiments
# ----------------------------------------------------------------------------------------------------


def experiment(design: Design, generator: np.random.Generator) -> list[SplitResults]:
    """One made-up experiment."""
    positives, members = _tested_patients(design, generator)
    total = positives * (1 + NEGATIVES)
    patient = np.repeat(np.arange(total), generator.integers(1, 4, total))
    first = np.append(True, patient[1:] != patient[:-1])
    labels = ((patient < positives) & (first | (generator.random(len(patient)) < SEVERAL))).astype(np.int64)
    # What is hard to localize, and what is hard to classify.
    hard = [_shared(patient, total, generator) for _ in range(2)]
    return [_outcomes(design, patient, labels, hard, np.isin(patient, chosen), generator) for chosen in members]


def _tested_patients(design: Design, generator: np.random.Generator) -> tuple[int, list[np.ndarray]]:
    """How many of all patients are positive, who come first, and the patients that each split tests."""
    if design.kind == "overlapping":
        # Three draws of one sixth reach 1 - (5/6)^3 of all patients.
        everyone = round(design.positives / (1 - (5 / 6) ** 3))
        kinds = [(0, everyone), (everyone, NEGATIVES * everyone)]
        return everyone, [
            np.concatenate([start + generator.permutation(size)[: round(size / 6)] for start, size in kinds])
            for _ in range(3)
        ]
    splits, total = 3 if design.kind == "disjoint" else 1, design.positives * (1 + NEGATIVES)
    return design.positives, [np.arange(total)[start::splits] for start in range(splits)]


def _shared(patient: np.ndarray, total: int, generator: np.random.Generator) -> np.ndarray:
    of_patient = math.sqrt(PATIENT) * generator.standard_normal(total)
    return of_patient[patient] + math.sqrt(SCAN) * generator.standard_normal(len(patient))


def _outcomes(
    design: Design,
    patient: np.ndarray,
    labels: np.ndarray,
    hard: list[np.ndarray],
    kept: np.ndarray,
    generator: np.random.Generator,
) -> SplitResults:
    methods = {}
    for name, effect in design.effects.items():
        localized, scan = (part + math.sqrt(METHOD) * generator.standard_normal(len(part)) for part in hard)
        # The normal distribution function of a normal deviate is skewed for a good method, as per-scan AUROCs are.
        auroc, auprc = (
            np.where(labels == 1, _normal_cdf(localized + shift), np.nan) for shift in (effect.auroc, effect.auprc)
        )
        methods[name] = MethodResults(auroc[kept], auprc[kept], (scan + effect.scan * labels)[kept])
    scan_ids = tuple(f"scan-{i}" for i in np.flatnonzero(kept))
    return SplitResults(scan_ids, tuple(f"patient-{i}" for i in patient[kept]), labels[kept], methods)


def _normal_cdf(values: np.ndarray) -> np.ndarray:
    return torch.special.ndtr(torch.from_numpy(values)).numpy()


def truth(design: Design, method: str) -> dict[Metric, float]:
    """The metrics of a method on infinitely many scans."""
    effect, cdf = design.effects[method], NormalDist().cdf
    return {
        "localization_auroc": cdf(effect.auroc / math.sqrt(2)),
        "localization_auprc": cdf(effect.auprc / math.sqrt(2)),
        "scan_auroc": cdf(effect.scan / math.sqrt(2)),
        "scan_auprc": _average_precision(effect.scan),
    }


@cache
def _average_precision(shift: float) -> float:
    # One scan and, on average, one more for every patient.
    positives, scans = 1 + SEVERAL, 2 * (1 + NEGATIVES)
    threshold = np.linspace(-7, shift + 6, 100_001)
    recall, alarms = _normal_cdf(shift - threshold), _normal_cdf(-threshold)
    precision = positives * recall / (positives * recall + (scans - positives) * alarms)
    return float(((precision[1:] + precision[:-1]) / 2 * (recall[:-1] - recall[1:])).sum())


# ----------------------------------------------------------------------------------------------------
# What becomes of them
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One metric in one design: shares of the experiments."""

    design: str
    metric: Metric
    covered: float
    covered_equal: float
    """As `covered`, for the difference of equal methods, which is 0."""
    different: float
    """Equal methods whose p-value is below .05."""
    power: float
    """Unequal methods whose p-value is below .05."""
    delong: float | None
    """Covered by DeLong's own interval, which is made with the normal distribution."""
    met: bool | None


def judge(design: Design, draws: int, seed: int) -> list[tuple[bool, bool, bool, bool, bool | None]]:
    """One experiment, metric by metric: what `Row` takes the shares of."""
    splits = experiment(design, np.random.default_rng(seed))
    claimed = [Claim(method, "b", metric) for metric in METRICS for method in ("a", "c")]
    found = differences(splits, claimed, draws=draws, seed=seed)
    judged = []
    for unequal, equal in zip(found[::2], found[1::2], strict=True):
        true = truth(design, "a")[unequal.metric] - truth(design, "b")[unequal.metric]
        by_delong = None
        if unequal.metric == "scan_auroc":
            low, high = delong(splits, "a", "b").interval()
            by_delong = low <= true <= high
        covered = unequal.low <= true <= unequal.high
        judged.append((covered, equal.low <= 0 <= equal.high, equal.p < 0.05, unequal.p < 0.05, by_delong))
    return judged


def simulate(name: str, experiments: int, draws: int, jobs: int = 1, seed: int = 0) -> Iterator[Row]:
    """All experiments of one design."""
    design = DESIGNS[name]
    seeds = range(seed, seed + experiments)
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            judged = list(pool.map(partial(judge, design, draws), seeds, chunksize=10))
    else:
        judged = [judge(design, draws, one) for one in seeds]
    for metric, results in zip(METRICS, zip(*judged, strict=True), strict=True):
        *shares, by_delong = (None if None in part else sum(part) / experiments for part in zip(*results, strict=True))
        covered, covered_equal, different, power = shares
        met = all(COVERAGE[0] <= share <= COVERAGE[1] for share in (covered, covered_equal))
        met = met and SIZE[0] <= different <= SIZE[1]
        yield Row(name, metric, covered, covered_equal, different, power, by_delong, met if design.inside else None)


# ----------------------------------------------------------------------------------------------------
# Conformal intervals
# ----------------------------------------------------------------------------------------------------

ATTENTIONS = ("good", "useless", "point", "ties")
INTERVAL_DESIGNS = {f"{kind}-{scans}": (kind, scans) for kind in ATTENTIONS for scans in (30, 100)}
CONTAINED = (0.88, 0.92)
NEW = 20
"""New scans for each calibration."""


@dataclass(frozen=True)
class IntervalRow:
    """One kind of attention and number of calibration scans, over the new scans of all experiments."""

    design: str
    covered: float
    """The share of scans whose whole finding is in the interval."""
    length: float
    """The mean share of a scan's slices that is in the interval."""
    spread: float
    """The standard deviation of the covered share between experiments, which is also due to the few new scans."""
    met: bool


def positive_scans(kind: str, count: int, generator: np.random.Generator) -> tuple[torch.Tensor, ...]:
    """Attention, lengths and slice labels of made-up scans with one finding each, most often near the middle."""
    lengths = generator.integers(20, 81, count)
    middle = np.clip(generator.normal(0.5, 0.2, count), 0, 0.999) * lengths
    reach = np.exp(generator.uniform(np.log(0.015), np.log(0.2), count)) * lengths
    packed = torch.from_numpy(lengths)
    scan, place = bag_of_rows(packed).numpy(), place_in_bag(packed).numpy()
    labels = (np.abs(place + 0.5 - middle[scan]) <= reach[scan]) | (place == np.floor(middle[scan]))
    if kind == "point":
        at = np.where(generator.random(count) < 0.7, middle, generator.random(count) * lengths)
        attention = (place == np.floor(at)[scan]).astype(float)
    else:
        logits = (0.0 if kind == "useless" else 2.0) * labels + generator.standard_normal(len(scan))
        attention = np.exp(logits) if kind != "ties" else np.clip(np.round(logits), 0, 3)
        attention = attention + (1e-6 if kind == "ties" else 0)
    return torch.from_numpy(attention), packed, torch.from_numpy(labels.astype(np.int64))


def judge_intervals(kind: str, scans: int, seed: int) -> tuple[float, float]:
    """One calibration: the share of new scans whose finding is contained, and the mean share of slices."""
    generator = np.random.default_rng(seed)
    calibration = calibrate_intervals(*positive_scans(kind, scans, generator))
    attention, lengths, labels = positive_scans(kind, NEW, generator)
    first, last = calibration.interval(attention, lengths)
    scan, place = bag_of_rows(lengths), place_in_bag(lengths)
    missed = (labels == 1) & ((place < first[scan]) | (place > last[scan]))
    covered = 1 - len(scan[missed].unique()) / NEW
    return covered, ((last - first + 1) / lengths).double().mean().item()


def simulate_intervals(name: str, experiments: int, jobs: int = 1) -> IntervalRow:
    """All experiments of one design."""
    one = partial(judge_intervals, *INTERVAL_DESIGNS[name])
    if jobs > 1:
        with ProcessPoolExecutor(jobs) as pool:
            judged = np.array(list(pool.map(one, range(experiments), chunksize=10)))
    else:
        judged = np.array([one(seed) for seed in range(experiments)])
    covered, length = judged.mean(0).tolist()
    return IntervalRow(name, covered, length, judged[:, 0].std().item(), CONTAINED[0] <= covered <= CONTAINED[1])


def interval_line(row: IntervalRow) -> str:
    shares = (row.covered, row.length, row.spread)
    return f"{row.design:<36}" + "".join(f"{share:>10.2%}" for share in shares) + f"   {'met' if row.met else 'MISSED'}"


# ----------------------------------------------------------------------------------------------------
# The tables
# ----------------------------------------------------------------------------------------------------


def line(row: Row) -> str:
    shares = (row.covered, row.covered_equal, row.different, row.power)
    by_delong = "" if row.delong is None else f"{row.delong:.2%}"
    verdict = {True: "met", False: "MISSED", None: "no goal"}[row.met]
    return (
        f"{row.design:<16}{row.metric:<20}" + "".join(f"{share:>10.2%}" for share in shares) + f"{by_delong:>10}"
        f"   {verdict}"
    )


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Coverage and size of the statistics, by simulation.")
    parser.add_argument("--experiments", type=int, default=2000)
    parser.add_argument("--draws", type=int, default=200)
    parser.add_argument("--jobs", type=int, default=2)
    both = {**DESIGNS, **INTERVAL_DESIGNS}
    parser.add_argument("--designs", type=names(both), default=list(both))
    options = parser.parse_args(arguments)
    if options.experiments < 1:
        parser.error("--experiments: at least one")
    start = time.perf_counter()
    rows = print_differences([name for name in options.designs if name in DESIGNS], options)
    intervals = print_intervals([name for name in options.designs if name in INTERVAL_DESIGNS], options)
    report: dict[str, Any] = {
        "benchmark": "statistics",
        "machine": machine("cpu"),
        "options": vars(options),
        "seconds": round(time.perf_counter() - start, 1),
        "rows": [asdict(row) for row in rows],
        "intervals": [asdict(row) for row in intervals],
        "goals": {
            "covered": COVERAGE,
            "different": SIZE,
            "contained": CONTAINED,
            "met": all(row.met for row in (*rows, *intervals) if row.met is not None),
        },
    }
    print(json.dumps(report))
    return 0


def print_differences(designs: list[str], options: argparse.Namespace) -> list[Row]:
    """The table of differences, printed row by row."""
    titles = ("covered", "c - b", "different", "power", "DeLong")
    rows: list[Row] = []
    if designs:
        print(f"{'design':<16}{'metric':<20}" + "".join(f"{title:>10}" for title in titles), flush=True)
    for name in designs:
        for row in simulate(name, options.experiments, options.draws, options.jobs):
            rows.append(row)
            print(line(row), flush=True)
    return rows


def print_intervals(designs: list[str], options: argparse.Namespace) -> list[IntervalRow]:
    """The table of conformal intervals, printed row by row."""
    rows: list[IntervalRow] = []
    if designs:
        print(f"{'conformal intervals':<36}" + "".join(f"{title:>10}" for title in ("covered", "length", "sd")))
    for name in designs:
        rows.append(simulate_intervals(name, options.experiments, options.jobs))
        print(interval_line(rows[-1]), flush=True)
    return rows


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
