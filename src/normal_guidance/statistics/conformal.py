"""Intervals of slices with a promise: they contain the whole finding of, say, 90 % of new positive scans.

Attention is learned from scan labels, so nothing says how much of it an interval must hold to contain a finding. Split
conformal calibration reads that off scans with slice labels which training has not seen. It assumes only that the
new scan is exchangeable with them: drawn in the same way, by the same kind of scanner, from the same kind of patients.

**The family.** Attention is averaged over a tenth of the scan (`SMOOTHING`). The first interval is the slice where
that average peaks. Each further one adds the neighbour with more of it, until the last is the whole scan. Its score is
the mean of its share of the averaged attention and its share of the slices (`LENGTH_WEIGHT`), which grows with every
slice; that of a calibration scan is the score of its first interval with all positive slices. Simulations led to both
choices (LOG.md, 2026-11-17): share of attention alone makes intervals up to a half longer.

**Ties** favour neither end of the scan. The peak is the highest slice nearest to the mean position of the attention; if
two are equally near, the lower one where the middle between them is even. Equal neighbours are added by their distance
from the peak; at the same distance the side of the mean position comes first, and if the peak lies on that position,
the lower side at even and the upper side at odd distances.

Reference: Papadopoulos et al., "Inductive confidence machines for regression", 2002; nested families: Gupta et al.,
"Nested conformal prediction and quantile out-of-bag ensemble methods", 2022.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from fractions import Fraction
from typing import Any

import torch
from jaxtyping import Float, Float64, Int, Int64, Shaped
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.records import read_as
from normal_guidance.core.arrays import check_lengths, is_number, running_sum
from normal_guidance.core.blocks import count_slices
from normal_guidance.statistics.split_results import UNITS, PackedScans, whole_numbers

SMOOTHING = 0.1  # the share of a scan's slices over which attention is averaged, half of it on each side of a slice
LENGTH_WEIGHT = 0.5  # of an interval's share of the slices in its score; its share of the attention has the rest
VERSION = 1  # the version of the family and its scores: a threshold means nothing for another one


@dataclass(frozen=True)
class IntervalCalibration:
    """The coverage that was asked for, the number of calibration scans, and the score up to which intervals grow."""

    coverage: float
    scans: int
    threshold: float

    def __post_init__(self) -> None:
        _check_enough(self.scans, self.coverage)
        if not 0 < self.threshold <= 1:
            raise UserError(f"the threshold of intervals is {self.threshold}, not in (0, 1]; calibrate them again")

    @property
    def spread(self) -> float:
        """The standard deviation of the coverage over sets of as many calibration scans."""
        held, missed = self.beta
        return math.sqrt(held * missed / ((held + missed) ** 2 * (held + missed + 1)))

    @property
    def beta(self) -> tuple[int, int]:
        """The parameters of the beta distribution of the coverage over sets of as many calibration scans."""
        rank = _rank(self.scans, self.coverage)
        return rank, self.scans + 1 - rank

    def interval(
        self, attention: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"]
    ) -> tuple[Int64[Tensor, "scans"], Int64[Tensor, "scans"]]:
        """First and last position (inclusive) of each scan's largest interval up to the threshold, or peak."""
        check_lengths(lengths, attention, "attention")
        family = _Family.of(attention, lengths)
        size = family.scans.count(family.scores <= self.threshold).clamp(min=1)
        inside = family.rank < size[family.scans.of_slice]
        first = torch.where(inside, family.scans.places, len(attention))
        last = torch.where(inside, family.scans.places, -1)
        return family.scans.reduce(first, "amin"), family.scans.reduce(last, "amax")

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; `from_dict` is the inverse."""
        return {"version": VERSION, **asdict(self)}

    @classmethod
    def from_dict(cls, content: Mapping[str, Any]) -> IntervalCalibration:
        """The calibration that `to_dict` described; another version is an error, as the intervals would differ."""
        if content.get("version") != VERSION:
            raise UserError(
                f"the calibration of intervals is of version {content.get('version')!r}, this software's is {VERSION}; "
                "calibrate them again, or install the version that did"
            )
        fields = {name: value for name, value in content.items() if name != "version"}
        return read_as(cls, fields, "the calibration of intervals")


def calibrate_intervals(
    attention: Float[Tensor, "slices"],
    lengths: Int[Tensor, "scans"],
    slice_labels: Shaped[Tensor, "slices"],
    coverage: float = 0.9,
) -> IntervalCalibration:
    r"""Intervals that contain all positive slices of a new positive scan with at least this probability.

    $t = s_{(k)}$ with $k = \lceil (n + 1) \cdot \text{coverage} \rceil$: the k-th smallest score of the n scans.

    Use scans that training and selection have not seen, one per patient: several scans of a patient count as less than
    as many patients. Scans without a positive slice, or with unknown labels (-1), are left out.

    The promise is an average over calibration sets: k / (n + 1) or a little more, so 90.3 % for 30 scans and 90.1 % for
    100. One set of n scans gives a coverage that varies by Beta(k, n + 1 - k), whatever the attention is worth:

    | calibration scans | 9 | 30 | 100 | 300 | 1,000 |
    |---|---|---|---|---|---|
    | sd of the coverage, for 90 % | 9.0 % | 5.2 % | 3.0 % | 1.7 % | .9 % |
    | coverage of one set in ten is below | 77 % | 83 % | 86 % | 88 % | 89 % |

    Fewer than `scans_needed` are refused; at least 30 are recommended for 90 %, and 100 are better.

    Example:
        >>> labels = torch.tensor([0, 0, 0, 1, 1, 1, 0, 0, 0, 0])
        >>> attention = torch.tensor([0.05, 0.1, 0.1, 0.2, 0.25, 0.1, 0.05, 0.05, 0.05, 0.05])
        >>> calibration = calibrate_intervals(attention.repeat(9), torch.tensor([10] * 9), labels.repeat(9))
        >>> calibration.threshold, calibration.interval(attention, torch.tensor([10]))
        (0.425, (tensor([3]), tensor([5])))
    """
    check_lengths(lengths, attention, "attention")
    positive = count_slices(slice_labels, lengths).positive > 0
    kept = int(positive.sum())
    _check_enough(kept, coverage)
    family = _Family.of(attention, lengths)
    last = family.scans.reduce(torch.where(slice_labels.to(attention.device) == 1, family.rank, 0), "amax")
    covering = family.scores[family.scans.starts + last]  # of each scan's first interval with all positive slices
    scores = covering[positive.to(attention.device)].sort().values
    return IntervalCalibration(coverage, kept, scores[_rank(kept, coverage) - 1].item())


def scans_needed(coverage: float) -> int:
    """The fewest calibration scans for a coverage: with fewer, only the whole scan could promise it."""
    return math.ceil(_exactly(coverage) / (1 - _exactly(coverage)))


def promise(coverage: float) -> str:
    """What an interval of this coverage does, in the words of every result."""
    return f"contains the whole finding of a positive scan with {100 * coverage:g} % probability"


def _rank(scans: int, coverage: float) -> int:
    """The k of `calibrate_intervals`."""
    return math.ceil((scans + 1) * _exactly(coverage))


def _exactly(coverage: float) -> Fraction:
    """The decimal number that was written: .9 / (1 - .9) is above 9 in binary."""
    return Fraction(str(float(coverage)))


def check_coverage(coverage: float) -> None:
    """Refuse what is not a probability between 0 and 1."""
    if not (is_number(coverage) and 0 < coverage < 1):
        raise UserError(f"coverage is {coverage!r}; give a number between 0 and 1, such as .9 for 90 % of the scans")


def _check_enough(scans: int, coverage: float) -> None:
    check_coverage(coverage)
    if scans < scans_needed(coverage):
        raise UserError(
            f"{scans} scan{'' if scans == 1 else 's'} with positive slices cannot calibrate intervals for a coverage "
            f"of {coverage:g}; give at least {scans_needed(coverage)}, better 30 or more, or ask for a lower coverage"
        )


@dataclass(frozen=True)
class _Family:
    """The order in which each scan's interval takes in its slices, and the score after each step."""

    scans: PackedScans
    rank: Int64[Tensor, "slices"]  # how many slices of its scan the interval takes in before each slice
    scores: Float64[Tensor, "slices"]
    """Scan after scan, the score of the interval of 1, 2, ... slices; strictly increasing."""

    @classmethod
    def of(cls, attention: Tensor, lengths: Tensor) -> _Family:
        scans = PackedScans.of(lengths.to(attention.device))
        weights = _average(whole_numbers(attention, scans), scans)
        order = _growth(weights, scans)
        rank = torch.empty_like(order).index_copy(0, order, scans.places)
        running = running_sum(weights[order])
        held = (running[1:] - running[scans.starts][scans.of_slice]) / scans.count(weights)[scans.of_slice].double()
        size = (scans.places + 1) / scans.lengths[scans.of_slice].double()
        return cls(scans, rank, (1 - LENGTH_WEIGHT) * held + LENGTH_WEIGHT * size)


def _average(weights: Tensor, scans: PackedScans) -> Tensor:
    """The mean of `SMOOTHING` of the scan's slices around each slice, in whole numbers; at the ends, of those there."""
    reach = (scans.lengths * (SMOOTHING / 2)).round().long()[scans.of_slice]
    index = torch.arange(len(weights), device=weights.device)
    start = torch.maximum(index - reach, scans.starts[scans.of_slice])
    stop = torch.minimum(index + reach + 1, scans.stops[scans.of_slice])
    running = running_sum(weights)
    return (running[stop] - running[start]) // (stop - start)


def _growth(weights: Tensor, scans: PackedScans) -> Tensor:
    """The packed slices, scan after scan, in the order in which the interval takes them in."""
    # Taking the larger of two neighbours again and again merges the two sides in the order of their running minima,
    # counted from the peak outwards. So one sort replaces the steps.
    index, peak = scans.places, _peak(weights, scans)
    towards_mean = (scans.count(weights * index) - peak * scans.count(weights)).sign()[scans.of_slice]
    peak = peak[scans.of_slice]
    upper = index >= peak
    rising = _running_minimum(weights, 2 * scans.of_slice + upper)
    mirrored = 2 * (len(scans.lengths) - 1 - scans.of_slice) + (index <= peak)
    falling = _running_minimum(weights.flip(0), mirrored.flip(0)).flip(0)
    distance = (index - peak).abs()
    upper_first = torch.where(towards_mean == 0, distance % 2 == 1, towards_mean > 0)
    order = (2 * distance + (upper_first != (index > peak))).argsort(stable=True)
    order = order[torch.where(upper, rising, falling)[order].argsort(descending=True, stable=True)]
    return order[scans.of_slice[order].argsort(stable=True)]


def _peak(weights: Tensor, scans: PackedScans) -> Tensor:
    """The index of each scan's highest weight; the module says what becomes of ties."""
    index, of = scans.places, scans.of_slice
    highest = weights == scans.reduce(weights, "amax")[of]
    off = (index * scans.count(weights)[of] - scans.count(weights * index)[of]).abs()
    nearest = highest & (off == scans.reduce(torch.where(highest, off, torch.iinfo(torch.int64).max), "amin")[of])
    low = scans.reduce(torch.where(nearest, index, len(weights)), "amin")
    high = scans.reduce(torch.where(nearest, index, -1), "amax")
    return torch.where((low + high) // 2 % 2 == 0, low, high)


def _running_minimum(weights: Tensor, group: Tensor) -> Tensor:
    """The smallest weight so far in each slice's group; groups are numbered in ascending order."""
    # No weight reaches 2 UNITS, so a later group, shifted down by as much, lies below all before it.
    shift = 2 * UNITS * group
    return (weights - shift).cummin(0).values + shift
