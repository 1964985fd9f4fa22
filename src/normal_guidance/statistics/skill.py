"""Measures of localization that a guess by position alone cannot reach: skill, and what is specific to the patient.

Findings lie in the middle of a scan more often than at its ends, so attention that is high in the middle of every scan
has an AUROC far above .5 and knows nothing of any patient. Skill asks how much of the way from the best guess by
position to perfect localization was covered; the patient-specific measure asks whether a scan's own attention finds its
finding better than that of other patients' scans does, laid over it by relative position.

Both use the scans of localization AUROC, those with slices of both classes, and resample patients for their intervals.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int, Int64, Shaped
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import bag_of_rows, place_in_bag
from normal_guidance.core.blocks import count_slices
from normal_guidance.core.metrics import Localization, localization
from normal_guidance.core.models import CenteredGaussian
from normal_guidance.show.text_tables import digits, interval, signed
from normal_guidance.statistics.differences import BASELINE, DRAWS, LEVEL, ROUNDING, resample, student_quantile
from normal_guidance.statistics.localization import ranks
from normal_guidance.statistics.split_results import MethodResults, PackedScans, SplitResults

BINS = 20  # bins of relative position, each a twentieth of a scan

# The guess by distance from the middle: the paper's centred Gaussian peaks half a slice below it, so that a bell in the
# middle would look a little skilled beside it on short scans.
MIDDLE = "middle"
POSITION_DENSITY = "position_density"  # the guess that knows where the findings of training scans lie

# The most other scans that a scan is compared with. If their AUROCs vary by .2, their mean is known to .02.
OTHERS = 100

ALIKE = 10  # patients from which on a spread of 0 is believed, and the interval has no width
MAX_CELLS = 2**22  # the most slices scored by others' attention at a time, which limits memory


@dataclass(frozen=True, eq=False)
class PositionDensity:
    """How often a slice is positive by its relative position, in `BINS` bins; made by `position_density`."""

    heights: Float64[Tensor, "bins"]

    def scores(self, lengths: Int[Tensor, "scans"]) -> Float64[Tensor, "slices"]:
        """Packed scores of the slices of scans with these lengths, linear between the middles of two bins."""
        bin_below, weight = _bins(lengths.cpu(), len(self.heights))
        above = (bin_below + 1).clamp(max=len(self.heights) - 1)
        return torch.lerp(self.heights[bin_below], self.heights[above], weight)


def position_density(lengths: Int[Tensor, "scans"], slice_labels: Shaped[Tensor, "slices"]) -> PositionDensity:
    """The share of positive slices by relative position, (j + .5) / S, in the positive scans of a training set."""
    # All scans weigh the same. Each slice counts in the two bins nearest to it, and each bin takes in a quarter of both
    # neighbours. Scans without a positive slice or without labels are left out.
    lengths, slice_labels = lengths.cpu().long(), slice_labels.cpu()
    positive = count_slices(slice_labels, lengths).positive > 0
    if not positive.any():
        raise UserError(f"none of {len(lengths)} scans has a positive slice; give training scans with slice labels")
    chosen = positive[bag_of_rows(lengths)]
    lengths, labels = lengths[positive], (slice_labels[chosen] == 1).double()
    bin_below, weight = _bins(lengths, BINS)
    of_scan = 1 / lengths.double()[bag_of_rows(lengths)]
    counted = _histogram(bin_below, weight, of_scan)
    positives = _histogram(bin_below, weight, of_scan * labels)
    # Bins that no scan reaches, because all are short, are as high as the mean.
    return PositionDensity(torch.where(counted > 0, positives / counted, positives.sum() / counted.sum()))


def _bins(lengths: Tensor, bins: int) -> tuple[Tensor, Tensor]:
    """For each slice, the last bin whose middle is not above it, and the weight of the next bin; at the ends, 0."""
    along = (place_in_bag(lengths) + 0.5) / lengths.double()[bag_of_rows(lengths)] * bins - 0.5
    along = along.clamp(0, bins - 1)
    return along.long(), along - along.floor()


def _histogram(bin_below: Tensor, weight: Tensor, values: Tensor) -> Tensor:
    counts = torch.zeros(BINS + 1, dtype=torch.float64)
    counts = counts.index_add(0, bin_below, (1 - weight) * values).index_add(0, bin_below + 1, weight * values)[:-1]
    padded = F.pad(counts, (1, 1))
    return padded[:-2] / 4 + padded[1:-1] / 2 + padded[2:] / 4


def near_middle(lengths: Int[Tensor, "scans"]) -> Float64[Tensor, "slices"]:
    """Packed scores of slices: the nearer to the middle of their scan, the higher."""
    return -(2 * place_in_bag(lengths) + 1 - lengths[bag_of_rows(lengths)]).abs().double()


def best_prior(
    slice_labels: Shaped[Tensor, "slices"], lengths: Int[Tensor, "scans"], density: PositionDensity | None = None
) -> tuple[str, Localization]:
    """The guess that localizes best on these scans, and how well: centred Gaussian, middle or `density`."""
    # Choosing on the evaluated scans favours the prior, and so never the method that is compared with it.
    slice_labels, lengths = slice_labels.cpu(), lengths.cpu()
    nothing = torch.zeros(len(slice_labels), 1, dtype=torch.float64)
    guesses = {BASELINE: CenteredGaussian()(nothing, lengths).slice_scores, MIDDLE: near_middle(lengths)}
    if density is not None:
        guesses[POSITION_DENSITY] = density.scores(lengths)
    priors = {name: localization(scores, slice_labels, lengths) for name, scores in guesses.items()}
    return max(priors.items(), key=lambda prior: prior[1].mean_auroc.item())


@dataclass(frozen=True, kw_only=True)
class _Interval:
    """The interval of a measure, and the scans that it rests on or leaves out."""

    low: float
    high: float
    scans: int
    patients: int
    unlabelled: int
    all_negative: int
    all_positive: int


@dataclass(frozen=True, kw_only=True)
class MeanAuroc(_Interval):
    """A localization AUROC, the plain mean over scans, with its interval; made by `ScoredSlices`."""

    auroc: float

    def __str__(self) -> str:
        return f"{digits(self.auroc)} {interval(self.low, self.high)}"


def skill(auroc: float, prior: float) -> float:
    """The share of the way from a prior's AUROC to 1 (Murphy, 1988); NaN for a perfect prior."""
    return (auroc - prior) / (1 - prior) if prior < 1 else math.nan


@dataclass(frozen=True, kw_only=True)
class Skill(_Interval):
    """The skill of a method over the best guess by position, with its interval; NaN where it is undefined."""

    prior: str  # the name of the prior: "centered_gaussian", "middle" or "position_density"
    auroc: float
    prior_auroc: float
    skill: float

    def __str__(self) -> str:
        return (
            f"skill {signed(self.skill)} {interval(self.low, self.high)}: AUROC {digits(self.auroc)}, "
            f"{self.prior} {digits(self.prior_auroc)} ({self.scans} scans)"
        )


@dataclass(frozen=True, kw_only=True)
class Gain(_Interval):
    """The localization AUROC of a method minus that of the distance from the middle, with its interval."""

    auroc: float
    position: float
    gain: float

    def __str__(self) -> str:
        return f"{signed(self.gain)} {interval(self.low, self.high)}"

    @property
    def shown(self) -> bool:
        """Whether it is above 0 by its whole interval."""
        return self.low > 0


@dataclass(frozen=True, kw_only=True)
class PatientSpecific(_Interval):
    """How much better a scan's own attention localizes than that of other patients' scans; NaN where undefined."""

    own: float  # mean localization AUROC by a scan's own attention
    others: float  # mean localization AUROC by other patients' attention at the same relative positions
    difference: float

    def __str__(self) -> str:
        return (
            f"patient-specific {signed(self.difference)} {interval(self.low, self.high)}: "
            f"own AUROC {digits(self.own)}, others' {digits(self.others)} ({self.scans} scans)"
        )


class ScoredSlices:
    """One method's slice scores, and the measures of how they localize, with intervals over resampled patients."""

    def __init__(
        self,
        scores: Float[Tensor, "slices"],
        slice_labels: Shaped[Tensor, "slices"],
        lengths: Int[Tensor, "scans"],
        patient_ids: Sequence[str] | None = None,
    ) -> None:
        self.scores, self.slice_labels, self.lengths = scores.detach().cpu(), slice_labels.cpu(), lengths.cpu()
        self.measured = localization(self.scores, self.slice_labels, self.lengths)
        self.auroc = self.measured.auroc
        if self.auroc.isnan().any():
            scan = int(self.measured.kept[self.auroc.isnan()][0])
            raise UserError(f"scan {scan}: a slice's score is NaN; leave out a model that has diverged")
        names = [str(scan) for scan in range(len(lengths))] if patient_ids is None else patient_ids
        if len(names) != len(lengths):
            raise UserError(f"{len(names)} patient_ids for {len(lengths)} scans; give one for each scan")
        self.patients = tuple(names[scan] for scan in self.measured.kept.tolist())

    def mean_auroc(self) -> MeanAuroc:
        """The localization AUROC, with an interval made as that of `skill`."""
        value, drawn = self.measured.mean_auroc.item(), self._draw(own=self.auroc)
        return MeanAuroc(auroc=value, **self._interval(value, drawn["own"], 0.0))

    def skill(self, density: PositionDensity | None = None) -> Skill:
        """The skill, with the interval of `differences`; `density` None if there is none."""
        # Every draw recomputes both mean AUROCs on the same patients; the prior and the density stay as they are.
        name, prior = best_prior(self.slice_labels, self.lengths, density)
        drawn = self._draw(own=self.auroc, prior=prior.auroc)
        with np.errstate(divide="ignore", invalid="ignore"):
            skills = (drawn["own"] - drawn["prior"]) / (1 - drawn["prior"])
        auroc, prior_auroc = self.measured.mean_auroc.item(), prior.mean_auroc.item()
        value = skill(auroc, prior_auroc)
        about = self._interval(value, skills, -math.inf)
        return Skill(prior=name, auroc=auroc, prior_auroc=prior_auroc, skill=value, **about)

    def gain(self) -> Gain:
        """How much better they localize than the distance from the middle, paired by patient."""
        guess = localization(near_middle(self.lengths), self.slice_labels, self.lengths)
        drawn = self._draw(own=self.auroc, guess=guess.auroc)
        auroc, position = self.measured.mean_auroc.item(), guess.mean_auroc.item()
        about = self._interval(auroc - position, drawn["own"] - drawn["guess"], -1.0)
        return Gain(auroc=auroc, position=position, gain=auroc - position, **about)

    def patient_specific(self, others: int = OTHERS, seed: int = 0) -> PatientSpecific:
        """Own localization AUROC minus that by other patients' attention at the same relative positions."""
        # 0 means that attention knows where findings lie in general, and nothing of this patient. Ranks within each
        # scan make the measure the same for attention, its logarithm and its shares; numbers are whole until the last
        # division, so equal scores tie exactly. Resampled patients keep the scans they are compared with.
        if others < 1:
            raise UserError(f"others is {others}, but each scan needs at least 1 to compare with; use {OTHERS}")
        lengths, mixed = self.lengths.long(), self.measured.kept
        kept = torch.isin(bag_of_rows(lengths), mixed)
        drawn_others = _draw_others(self.patients, others, seed)
        by_others = _auroc_by_others(self.scores[kept], self.slice_labels[kept], lengths[mixed], drawn_others)
        drawn = self._draw(seed, own=self.auroc, others=by_others)
        difference = (self.auroc - by_others).mean().item()
        return PatientSpecific(
            own=self.measured.mean_auroc.item(),
            others=by_others.mean().item(),
            difference=difference,
            **self._interval(difference, drawn["own"] - drawn["others"], -1.0),
        )

    def _draw(self, seed: int = 0, **aurocs: Float64[Tensor, "kept"]) -> dict[str, Float64[np.ndarray, "draws"]]:
        """The mean of each AUROC over the same resampled patients; NaN for fewer than two patients."""
        if len({*self.patients}) < 2:
            return {name: np.full(DRAWS, np.nan) for name in aurocs}
        methods = {name: MethodResults(auroc.numpy(), auroc.numpy()) for name, auroc in aurocs.items()}
        scans = tuple(str(scan) for scan in range(len(self.patients)))
        split = SplitResults(scans, self.patients, np.ones(len(scans), dtype=np.int64), methods)
        return resample([split], seed=seed)["localization_auroc"]

    def _interval(self, estimate: float, drawn: np.ndarray, least: float) -> dict[str, Any]:
        """The fields of `_Interval`: Student's t times the spread of the draws, for a measure between `least` and 1."""
        # NaN for fewer than two patients, where a draw is undefined, and for fewer than `ALIKE` patients who are all
        # the same: their spread of 0 says that they are few, not that the number is exact.
        patients, low, high = len({*self.patients}), math.nan, math.nan
        if patients >= 2 and math.isfinite(estimate) and np.isfinite(drawn).all():
            error = float(drawn.std(ddof=1))
            if error > ROUNDING or patients >= ALIKE:
                reach = student_quantile(LEVEL, patients - 1) * error if error > ROUNDING else 0.0
                low, high = estimate - reach, estimate + reach
        left_out = {name: getattr(self.measured, name) for name in ("unlabelled", "all_negative", "all_positive")}
        # Of NaN and a number, max and min give the first, NaN.
        ends = {"low": max(low, least), "high": min(high, 1.0)}
        return {**ends, "scans": len(self.measured.kept), "patients": patients, **left_out}


def _draw_others(patients: Sequence[str], others: int, seed: int) -> Int64[Tensor, "scans others"]:
    """The scans of other patients that each scan is compared with, -1 where there are fewer."""
    generator = np.random.default_rng(seed)
    _, number = np.unique(np.array(patients, dtype=str), return_inverse=True)
    drawn = np.full((len(patients), min(others, max(len(patients) - 1, 1))), -1)
    for row, patient in zip(drawn, number, strict=True):
        rest = np.flatnonzero(number != patient)
        chosen = rest if len(rest) <= len(row) else generator.choice(rest, len(row), replace=False)
        row[: len(chosen)] = chosen
    return torch.from_numpy(drawn)


def _auroc_by_others(scores: Tensor, labels: Tensor, lengths: Tensor, others: Tensor) -> Float64[Tensor, "scans"]:
    """The mean AUROC of each scan's labels by the ranks of the others; NaN without any."""
    scans = PackedScans.of(lengths)
    doubled = (2 * ranks(scores, lengths)).long()
    total, count = torch.zeros(len(lengths), dtype=torch.float64), (others >= 0).sum(1)
    at_once = max(1, MAX_CELLS // max(1, len(scores)))
    for columns in others.T.split(at_once):
        laid = torch.stack([_laid_over(doubled, scans, other.clamp(min=0)) for other in columns])
        aurocs = localization(laid.double(), labels, lengths).auroc
        total += torch.where(columns >= 0, aurocs, 0).sum(0)
    return total / count


def _laid_over(values: Tensor, scans: PackedScans, other: Tensor) -> Int64[Tensor, "slices"]:
    """The values of each scan's other at its own relative positions, times 2 S: whole numbers, so ties are exact."""
    # Slice j of S lies at x = ((2 j + 1) S' - S) / 2 S of the other's S' slices; beyond its ends their values hold.
    size, other_size = scans.lengths[scans.of_slice], scans.lengths[other][scans.of_slice]
    x = ((2 * scans.places + 1) * other_size - size).clamp(min=0)
    x = torch.minimum(x, 2 * size * (other_size - 1))
    below, beyond = x // (2 * size), x % (2 * size)
    start = scans.starts[other][scans.of_slice]
    low, high = values[start + below], values[start + (below + 1).clamp(max=other_size - 1)]
    return low * (2 * size - beyond) + high * beyond
