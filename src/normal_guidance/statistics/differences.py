"""Tests of the difference between two methods: claims, intervals, p-values, and sentences; the interval of one AUROC.

A difference is averaged over the splits.  Its standard error comes from a bootstrap over patients, and Student's t
turns it into the interval and the p-value, so that the two never contradict each other.  The p-value of scan AUROC uses
DeLong's standard error.  Holm's correction covers all claims about one metric.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from statistics import NormalDist
from typing import NamedTuple

import numpy as np
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.methods import CEILING, COMPARED, ENSEMBLE, EVERY_METHOD, NAMED, scores_scans
from normal_guidance.show.text_tables import digits, interval, p_value, signed
from normal_guidance.statistics.split_results import METRICS, MethodResults, Metric, Patients, SplitResults, patients_of


@dataclass(frozen=True)
class DeLong:
    """A difference in scan AUROC with its standard error, and the resulting normal interval."""

    difference: float
    standard_error: float

    def interval(self, level: float = 0.95) -> tuple[float, float]:
        """The confidence interval at this level."""
        reach = NormalDist().inv_cdf((1 + level) / 2) * self.standard_error
        return self.difference - reach, self.difference + reach


def separated_low(positive: int, negative: int, level: float = 0.95) -> float:
    """The lower end of the interval of an AUROC of 1, where DeLong's variance is 0 however few scans there are."""
    # Newcombe, "Confidence intervals for an effect size measure based on the Mann-Whitney statistic. Part 2", 2006,
    # method 5: 1 - t = z sqrt(V(t)), V(t) = t (1 - t) / (m n) (1 + ((m + n) / 2 - 1) ((1 - t) / (2 - t) + t / (1 +
    # t))).
    z, low, high = NormalDist().inv_cdf((1 + level) / 2), 0.0, 1.0
    for _ in range(60):  # bisection: the difference of both sides, divided by 1 - theta, falls with theta
        middle = (low + high) / 2
        spread = 1 + ((positive + negative) / 2 - 1) * ((1 - middle) / (2 - middle) + middle / (1 + middle))
        below = (1 - middle) > z * z * middle * spread / (positive * negative)
        low, high = (middle, high) if below else (low, middle)
    return low


def in_standard_errors(difference: float, standard_error: float) -> float:
    """The difference divided by its standard error; with an error of 0, a difference of 0 gives 0, others infinity."""
    if standard_error == 0:
        return math.copysign(math.inf, difference) if difference else 0.0
    return difference / standard_error


def delong(splits: Sequence[SplitResults], method: str, against: str) -> DeLong:
    """The difference in scan AUROC, method minus against, averaged over the splits."""
    # var = sum u^2 + sum v^2 + 2 sum u~ v~ over patients, u and v being their centred placement values of positive and
    # of negative scans, scaled by sqrt(I / (I - 1)) for I patients with such scans (u~, v~: any).  DeLong et al. 1988
    # for one scan a patient, Obuchowski 1997 for several; counting by sorting: Sun and Xu 2014.
    patients = patients_of(splits)
    # Rows: positive scans' and negative scans' values scaled by their own patients, then both by all patients.
    sums, difference = np.zeros((4, len(patients.ids))), 0.0
    for i, (split, of) in enumerate(zip(splits, patients.of_scans, strict=True)):
        positive = split.labels == 1
        if positive.all() or not positive.any():
            raise UserError(
                f"split {i + 1} has only positive or only negative test scans, so no scan AUROC; leave it out"
            )
        first, second = (_placements(_scores(split, name), positive) for name in (method, against))
        delta = first - second
        for kind, rows in ((positive, (0, 2)), (~positive, (1, 3))):
            mean = delta[kind].mean()
            centred = np.bincount(of[kind], (delta[kind] - mean) / kind.sum(), minlength=len(patients.ids))
            sums[rows[0]] += _unbiased(of[kind]) * centred
            sums[rows[1]] += _unbiased(of) * centred
        difference += delta[positive].mean() / len(splits)
    sums /= len(splits)
    variance = (sums[0] ** 2).sum() + (sums[1] ** 2).sum() + 2 * (sums[2] * sums[3]).sum()
    return DeLong(float(difference), float(np.sqrt(np.maximum(variance, 0.0))))


def _scores(split: SplitResults, method: str) -> Float64[np.ndarray, "scans"]:
    if method not in split.methods:
        raise UserError(f"method {method!r} was not tested; choose one of {', '.join(split.methods)}")
    scores = split.methods[method].scan_scores
    if scores is None:
        raise UserError(f"{method!r} has no scan scores, so no scan AUROC; compare its localization")
    return scores


def _placements(scores: Float64[np.ndarray, "scans"], positive: Bool[np.ndarray, "scans"]) -> np.ndarray:
    """The placement value of each scan; ties count one half."""
    values = np.empty(len(scores))
    for kind, sign in ((positive, 1.0), (~positive, -1.0)):
        others = np.sort(sign * scores[~kind])
        ranked = sign * scores[kind]
        twice = np.searchsorted(others, ranked, side="left") + np.searchsorted(others, ranked, side="right")
        values[kind] = twice / (2 * len(others))
    return values


def _unbiased(patients: Int64[np.ndarray, "_"]) -> float:
    """sqrt(I / (I - 1)) for I patients; NaN for one patient, whose spread is unknown."""
    count = len(np.unique(patients))
    return math.sqrt(count / (count - 1)) if count > 1 else math.nan


@dataclass(frozen=True)
class Estimate:
    """A number with its interval; NaN where there is none."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{digits(self.value)} {interval(self.low, self.high)}"

    @property
    def known(self) -> bool:
        return all(map(math.isfinite, (self.value, self.low, self.high)))


class ScanAuroc(Estimate):
    """A scan AUROC with its interval (DeLong, patients as units), NaN where one class has a single patient."""

    @property
    def shown(self) -> bool:
        """Whether it is above chance by its whole interval."""
        return self.low > 0.5


def hanley_mcneil(auroc: float, positive: int, negative: int) -> float:
    """The standard error to expect of an AUROC (Hanley and McNeil, 1982), before any score is known."""
    two_positive, two_negative = auroc / (2 - auroc), 2 * auroc**2 / (1 + auroc)  # both above, both below the other
    variance = (positive - 1) * (two_positive - auroc**2) + (negative - 1) * (two_negative - auroc**2)
    return math.sqrt((auroc * (1 - auroc) + variance) / (positive * negative))


def scan_auroc(labels: Int[Tensor, "scans"], patient_ids: Sequence[str], scores: Float[Tensor, "scans"]) -> ScanAuroc:
    """The AUROC and its interval, as the difference from scores that are all the same."""
    nothing = np.full(len(labels), np.nan)
    each = {"own": scores.double().numpy(), "chance": np.zeros(len(labels))}
    results = {name: MethodResults(nothing, nothing, values) for name, values in each.items()}
    names = tuple(str(number) for number in range(len(labels)))
    split = SplitResults(names, tuple(patient_ids), labels.numpy().astype(np.int64), results)
    difference = delong([split], "own", "chance")
    value, (low, high) = 0.5 + difference.difference, difference.interval()
    if difference.standard_error == 0 and value in (0.0, 1.0):
        pairs = {*zip(labels.tolist(), patient_ids, strict=True)}
        end = separated_low(*(sum(label == wanted for label, _ in pairs) for wanted in (1, 0)))
        return ScanAuroc(value, end if value else 0.0, 1.0 if value else 1 - end)
    return ScanAuroc(value, max(0.5 + low, 0.0), min(0.5 + high, 1.0))


DRAWS = 2000  # resampled tests; with 2,000 of them the standard error itself is off by about 1.6 %

MAX_CELLS = 2**15
"""The most weights of one split's scans at a time: a thread's few arrays of 256 KiB fit its core's cache."""

Draws = dict[Metric, dict[str, Float64[np.ndarray, "draws"]]]
"""Metric -> method -> one average over splits per draw; methods without scan scores have no scan metrics."""


def measure(splits: Sequence[SplitResults]) -> dict[Metric, dict[str, float]]:
    """Every metric of every method, averaged over the splits; NaN where it is undefined in a split."""
    patients = patients_of(splits)
    once = _Weighted(splits, patients).averages(np.ones((1, len(patients.ids))))
    return {metric: {method: draw.item() for method, draw in methods.items()} for metric, methods in once.items()}


def resample(splits: Sequence[SplitResults], draws: int = DRAWS, seed: int = 0) -> Draws:
    """Every metric of every method in `draws` resampled tests, averaged over the splits.  A seed fixes the draws."""
    # n - 1 of the n positive patients, and likewise of the negative ones, are drawn with all their scans, which makes
    # the variance of a mean unbiased (Rao and Wu, 1988; clusters: Field and Welsh, 2007).  A draw that leaves a split
    # without positive or without negative scans is NaN.
    if draws < 2:
        raise UserError(f"draws is {draws}, but a standard error needs at least 2; use {DRAWS}")
    patients = patients_of(splits)
    weighted = _Weighted(splits, patients)
    at_once = max(1, MAX_CELLS // max(len(split.labels) for split in splits))
    chunks = [weighted.averages(weights) for weights in multiplicities(patients.positive, draws, seed, at_once)]
    return {
        metric: {method: np.concatenate([chunk[metric][method] for chunk in chunks]) for method in methods}
        for metric, methods in chunks[0].items()
    }


def multiplicities(
    positive: Bool[np.ndarray, "patients"], draws: int, seed: int, at_once: int
) -> Iterator[Float64[np.ndarray, "_ patients"]]:
    """How often each patient is drawn, in chunks of `at_once` draws; the chunk size does not change the draws."""
    strata = [np.flatnonzero(positive), np.flatnonzero(~positive)]
    generators = np.random.default_rng(seed).spawn(len(strata))
    for start in range(0, draws, at_once):
        rows = min(at_once, draws - start)
        weights = np.zeros((rows, len(positive)))
        for members, generator in zip(strata, generators, strict=True):
            if len(members):
                drawn = generator.integers(len(members), size=(rows, len(members) - 1))
                cell = drawn + len(members) * np.arange(rows)[:, None]
                counts = np.bincount(cell.ravel(), minlength=rows * len(members))
                weights[:, members] = counts.reshape(rows, len(members))
        yield weights


@dataclass(frozen=True)
class _Sorted:
    """One method's scans in ascending order of score: their patients, and the rank of each positive."""

    positives: Int64[np.ndarray, "positives"]
    negatives: Int64[np.ndarray, "negatives"]
    own: Int64[np.ndarray, "positives"]  # the number of positives strictly below each positive
    below: Int64[np.ndarray, "positives"]  # the number of negatives strictly below each positive
    upto: Int64[np.ndarray, "positives"]  # the number of negatives below each positive or tied with it

    @classmethod
    def of(cls, scores: np.ndarray, positive: np.ndarray, patients: np.ndarray) -> _Sorted:
        order = np.argsort(scores, kind="stable")
        is_positive = positive[order]
        high, low = order[is_positive], order[~is_positive]
        return cls(
            positives=patients[high],
            negatives=patients[low],
            own=np.searchsorted(scores[high], scores[high], side="left"),
            below=np.searchsorted(scores[low], scores[high], side="left"),
            upto=np.searchsorted(scores[low], scores[high], side="right"),
        )

    def metrics(self, weights: Float64[np.ndarray, "draws patients"]) -> tuple[np.ndarray, np.ndarray]:
        """AUROC and AUPRC of every draw; counts are whole numbers, so ties count exactly one half."""
        w = weights.take(self.positives, axis=1)
        positives, negatives = _running(w), _running(weights.take(self.negatives, axis=1))
        below = negatives.take(self.below, axis=1)
        all_positives, all_negatives = positives[:, -1], negatives[:, -1]
        hits = all_positives[:, None] - positives.take(self.own, axis=1)
        flagged = hits + (all_negatives[:, None] - below)
        # `flagged` is 0 only if the positive itself was not drawn, and then its weight is 0.
        precision = hits / np.maximum(flagged, 1)
        below += negatives.take(self.upto, axis=1)
        with np.errstate(invalid="ignore"):
            auroc = np.einsum("dp,dp->d", w, below) / (2 * all_positives * all_negatives)
            auprc = np.einsum("dp,dp->d", w, precision) / all_positives
        # Without negatives precision is always 1, so there is nothing to compare.
        return auroc, np.where(all_negatives > 0, auprc, np.nan)


def _running(weights: Float64[np.ndarray, "draws scans"]) -> Float64[np.ndarray, "draws bounds"]:
    """Running sums that start with 0."""
    sums = np.zeros((len(weights), weights.shape[1] + 1))
    np.cumsum(weights, axis=1, out=sums[:, 1:])
    return sums


class _Weighted:
    """The parts of the metrics that do not depend on the weights of patients, computed once."""

    def __init__(self, splits: Sequence[SplitResults], patients: Patients) -> None:
        pairs = list(zip(splits, patients.of_scans, strict=True))
        self.methods = tuple(splits[0].methods)
        # Sums over each patient's scans in a split: AUROC of every method, AUPRC of every method, and their number.
        self.sums = []
        for split, of in pairs:
            kept, methods = split.localized, [split.methods[method] for method in self.methods]
            columns = [*(method.auroc for method in methods), *(method.auprc for method in methods), np.ones(len(kept))]
            self.sums.append(np.zeros((len(patients.ids), len(columns))))
            np.add.at(self.sums[-1], of[kept], np.stack([column[kept] for column in columns], axis=1))
        self.rankings = {
            method: [
                _Sorted.of(scores, split.labels == 1, of)
                for split, of in pairs
                if (scores := split.methods[method].scan_scores) is not None
            ]
            for method, measured in splits[0].methods.items()
            if measured.scan_scores is not None
        }

    def averages(self, weights: Float64[np.ndarray, "draws patients"]) -> Draws:
        """Every metric of every method under each draw, averaged over the splits."""
        totals = [weights @ sums for sums in self.sums]
        with np.errstate(invalid="ignore"):
            means = np.mean([total[:, :-1] / total[:, -1:] for total in totals], axis=0)
        half = len(self.methods)

        def scan_metrics(rankings: Sequence[_Sorted]) -> np.ndarray:
            return np.mean([ranking.metrics(weights) for ranking in rankings], axis=0)

        # NumPy releases the interpreter lock in `take` and sums, so threads run in parallel.
        with ThreadPoolExecutor() as threads:
            scans = dict(zip(self.rankings, threads.map(scan_metrics, self.rankings.values()), strict=True))
        return {
            "localization_auroc": dict(zip(self.methods, means.T[:half], strict=True)),
            "localization_auprc": dict(zip(self.methods, means.T[half:], strict=True)),
            "scan_auroc": {method: both[0] for method, both in scans.items()},
            "scan_auprc": {method: both[1] for method, both in scans.items()},
        }


LEVEL = 0.95

BASELINE = "centered_gaussian"  # the method that every other must beat: it never looks at the image

COUNTERPARTS = {
    name: {"smap": "abmil", "smtp": "transmil"}.get(name, method.model)
    for name, method in EVERY_METHOD.items()
    if method.regularizer is not None or name in ("smap", "smtp")
}
"""A smoothed or regularized method, and its counterpart without."""

RIVALS = {"ng": "smap", "mhng": "smtp", ENSEMBLE: "ng"}
"""A guided method, and smoothing of the same model; and what `nguide fit` makes, beside guidance."""

MIN_DEFINED = 0.9
"""Share of draws that must be defined; if fewer are, the splits have too few positive or negative patients."""

ROUNDING = 1e-12  # differences below this are rounding errors of sums and count as 0


class Claim(NamedTuple):
    """The claim that a method differs from another in a metric."""

    method: str
    against: str
    metric: Metric


def claims(methods: Sequence[str], ceiling: str | None = CEILING) -> list[Claim]:
    """The differences that the paper's text discusses, metric by metric, among the methods that were tested."""
    # Each method with the centred Gaussian (localization only), smoothed and guided methods with their counterparts
    # without, guidance with smoothing, and each method with the ceiling (None for none).
    if unknown := [method for method in methods if method not in COMPARED and method != ceiling]:
        raise UserError(f"method {unknown[0]!r} is unknown; choose one of {', '.join(NAMED)}")
    tested = [method for method in COMPARED if method in methods]
    pairs = [(method, BASELINE) for method in tested if method != BASELINE and BASELINE in tested]
    pairs += [
        (method, other)
        for table in (COUNTERPARTS, RIVALS)
        for method, other in table.items()
        if {method, other} <= {*tested}
    ]
    pairs += [(method, ceiling) for method in tested if ceiling is not None]
    return [
        Claim(*pair, metric)
        for metric in METRICS
        for pair in pairs
        if metric.startswith("localization") or all(map(scores_scans, pair))
    ]


# Why an interval without 0 need not show a difference.
CORRECTED = "p is corrected for the number of comparisons, the interval is not"


@dataclass(frozen=True)
class Difference:
    """One metric of `method` minus that of `against`, averaged over the splits; NaN if too few patients were tested."""

    method: str
    against: str
    metric: Metric
    estimate: float
    low: float
    high: float
    p: float
    p_adjusted: float  # the p-value after Holm's correction over the claims about the same metric
    splits: int
    scans: int  # the number of distinct scans on which the metric was measured, in all splits together
    patients: int
    level: float = LEVEL

    @property
    def shown(self) -> bool:
        """Whether the difference is significant by the adjusted p-value."""
        return self.p_adjusted < 1 - self.level

    @property
    def test(self) -> str:
        """The source of the p-value's standard error."""
        return "DeLong" if self.metric == "scan_auroc" else "bootstrap"

    def words(self, titles: Mapping[str, str]) -> str:
        """The finding as one sentence, with the methods' titles."""
        method, against = (titles.get(name, name) for name in (self.method, self.against))
        level, curve = self.metric.split("_")
        metric = f"{level} {curve.upper()}"
        if math.isnan(self.p):
            return f"{method} and {against} cannot be compared in {metric}: too few patients ({self.patients})"
        numbers = f"{signed(self.estimate)} {interval(self.low, self.high)}, {p_value(self.p_adjusted)} (Holm)"
        if not self.shown:
            corrected = "" if self.low <= 0 <= self.high else f"; {CORRECTED}"
            return f"No difference between {method} and {against} in {metric} was shown: {numbers}{corrected}"
        does = "classifies scans" if level == "scan" else "localizes"
        by = " by AUPRC" if curve == "auprc" else ""
        return f"{method} {does} {'better' if self.estimate > 0 else 'worse'} than {against}{by}: {numbers}"


def differences(
    splits: Sequence[SplitResults],
    claimed: Sequence[Claim],
    *,
    level: float = LEVEL,
    draws: int = DRAWS,
    seed: int = 0,
) -> list[Difference]:
    """Every claimed difference, in the claims' order: estimate ± Student's t times the bootstrap's standard error."""
    # Chosen by simulation (`benchmarks/simulate_statistics.py`, LOG.md): with 16 to 500 positive patients the interval
    # covers the truth in 94 to 96 % of experiments; percentile, basic and bias-corrected ones fall to 90 or 91 %.  Its
    # limit: where both methods are nearly perfect, a few scans decide (92 % with 60 patients).
    if not 0 < level < 1:
        raise UserError(f"level is {level}; give a number between 0 and 1, such as {LEVEL}")
    patients, estimates = patients_of(splits), measure(splits)
    for claim in claimed:
        for method in (claim.method, claim.against):
            if method not in estimates[claim.metric]:
                raise UserError(f"{method!r} has no {claim.metric}; test it, or leave out the claim {tuple(claim)}")
    drawn, tested = resample(splits, draws, seed), []
    for method, against, metric in claimed:
        by_draw = np.array(drawn[metric][method] - drawn[metric][against])
        by_draw[np.abs(by_draw) < ROUNDING] = 0.0
        estimate = estimates[metric][method] - estimates[metric][against]
        estimate = 0.0 if abs(estimate) < ROUNDING else estimate
        tested.append(_difference(splits, patients, Claim(method, against, metric), estimate, by_draw, level))
    for metric in METRICS:
        family = [i for i, difference in enumerate(tested) if difference.metric == metric]
        for i, p in zip(family, holm([tested[i].p for i in family]), strict=True):
            tested[i] = replace(tested[i], p_adjusted=p)
    return tested


def _difference(
    splits: Sequence[SplitResults],
    patients: Patients,
    claim: Claim,
    estimate: float,
    drawn: Float64[np.ndarray, "draws"],
    level: float,
) -> Difference:
    # The scans of each split that the metric needs: localized ones, or negative and positive ones separately.
    kinds = (
        [[split.localized for split in splits]]
        if claim.metric.startswith("localization")
        else [[split.labels == label for split in splits] for label in (0, 1)]
    )
    freedom = min(patients.counted(kind) for kind in kinds) - 1
    used = [np.logical_or.reduce(scans) for scans in zip(*kinds, strict=True)]
    scans = {scan for split, chosen in zip(splits, used, strict=True) for scan in np.array(split.scan_ids)[chosen]}
    defined = drawn[np.isfinite(drawn)]
    low = high = p = math.nan
    if freedom > 0 and math.isfinite(estimate) and len(defined) >= max(2, MIN_DEFINED * len(drawn)):
        error = float(defined.std(ddof=1))
        reach = student_quantile(level, freedom) * error
        low, high = max(-1.0, estimate - reach), min(1.0, estimate + reach)
        if claim.metric == "scan_auroc":
            error = delong(splits, claim.method, claim.against).standard_error
        p = student_p(in_standard_errors(estimate, error), freedom)
    return Difference(*claim, estimate, low, high, p, math.nan, len(splits), len(scans), patients.counted(used), level)


def holm(p: Sequence[float]) -> list[float]:
    """P-values adjusted for their number (Holm, 1979); NaN stays NaN and does not count."""
    adjusted, highest = list(p), 0.0
    order = sorted((i for i, value in enumerate(p) if not math.isnan(value)), key=lambda i: p[i])
    for rank, i in enumerate(order):
        highest = max(highest, min(1.0, (len(order) - rank) * p[i]))
        adjusted[i] = highest
    return adjusted


def student_p(t: float, freedom: int) -> float:
    """The two-sided p-value, by Wallace's transformation of t to a normal deviate (1959)."""
    # Near .05 it is off by less than .001 for 4 degrees of freedom or more; for 1 it is .065 instead of .05.
    z = _wallace(freedom) * math.sqrt(freedom * math.log1p(t * t / freedom))
    return math.erfc(z / math.sqrt(2))


def student_quantile(level: float, freedom: int) -> float:
    """The t for which `student_p` is 1 - level."""
    z = NormalDist().inv_cdf((1 + level) / 2) / _wallace(freedom)
    return math.sqrt(freedom * math.expm1(z * z / freedom))


def _wallace(freedom: int) -> float:
    return (8 * freedom + 1) / (8 * freedom + 3)
