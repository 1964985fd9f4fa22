"""Measures of how well attention finds the positive slices of a scan, in terms that a reader can picture.

Is the slice with the highest attention positive, or one of the first few? If not, how far is it from a positive slice?
How well does the interval that holds most of the attention cover the finding? The measures use the scans of AUROC
(`core.metrics.localization`), those with slices of both classes: where every slice is positive, nothing can miss.

Attention often ties (max pooling leaves most slices at 0), and the first slice of a tie would measure the scanner, not
the method. Hits and peak errors are expected values over ties broken at random: uniform attention scores as guessing.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Float, Float64, Int, Int64, Shaped
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import bag_of_rows, check_lengths, place_in_bag, running_sum, sum_per_bag
from normal_guidance.core.blocks import GAP, count_slices
from normal_guidance.statistics.split_results import UNITS, PackedScans, whole_numbers

TOPS = (1, 3, 5)  # numbers of slices to look at: the peak, then a few

# The smallest intervals to compare with the truth: the core of the attention, and how far it spreads.
SHARES = (0.5, 0.9)

# Attention that counts as 0: the rounding of float32 must not decide whether 9 of 10 equal slices hold .9, nor choose
# between two intervals that hold the same.
SHARE_SLACK = 1e-6


def smallest_interval(
    attention: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"], share: float = 0.5
) -> tuple[Int64[Tensor, "scans"], Int64[Tensor, "scans"]]:
    """First and last position (inclusive) of each scan's shortest interval with `share` of the attention."""
    # Of equally short intervals the one with the most attention is taken, and of those the first. For every first slice
    # a binary search in the running sum finds the last one: O(S log S), all scans at once.
    check_lengths(lengths, attention, "attention")
    if not 0 < share <= 1:
        raise UserError(f"share is {share}; it must be above 0 and at most 1: .5 is half of the attention")
    scans = PackedScans.of(lengths.to(attention.device))
    return _interval(whole_numbers(attention, scans), scans, share)


def _interval(weights: Tensor, scans: PackedScans, share: float) -> tuple[Tensor, Tensor]:
    running = running_sum(weights)
    target = ((share - SHARE_SLACK) * scans.count(weights).double()).ceil().long().clamp(min=1)
    begin = torch.arange(len(weights), device=weights.device)
    end = torch.searchsorted(running, running[:-1] + target[scans.of_slice])
    # From the last slices of a scan the share is never reached: the search then ends in the next scan.
    reached = end <= scans.stops[scans.of_slice]
    length = torch.where(reached, end - begin, len(weights) + 1)
    shortest = length == scans.reduce(length, "amin")[scans.of_slice]
    held = torch.where(shortest, running[end.clamp(max=len(weights))] - running[:-1], -1)
    most = scans.reduce(held, "amax") - round(SHARE_SLACK * UNITS)
    fullest = shortest & (held >= most[scans.of_slice])
    first = scans.reduce(torch.where(fullest, begin, len(weights)), "amin")
    return first - scans.starts, end[first] - 1 - scans.starts


@dataclass(frozen=True)
class Summary:
    """The mean or median over scans, and the number of scans."""

    value: float
    kind: Literal["mean", "median"]
    scans: int

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.kind} of {self.scans} scan{'' if self.scans == 1 else 's'})"


@dataclass(frozen=True)
class LocalizationMeasures:
    """The measures of each scan with slices of both classes, ordered as `kept`, and the number of scans left out."""

    kept: Int64[Tensor, "kept"]
    hits: Mapping[int, Float64[Tensor, "kept"]]
    """By k: the probability that at least one of the k slices with the highest scores is positive."""
    peak_error_slices: Float64[Tensor, "kept"]
    """Slices from the highest score to the nearest positive slice; 0 on a positive slice."""
    peak_error_mm: Float64[Tensor, "kept"]
    """The same in millimetres; NaN where positions are unknown, also for a peak that hits."""
    overlaps: Mapping[float, Float64[Tensor, "kept"]]
    """By share: intersection over union of the smallest interval and the true blocks."""
    attention_on_positives: Float64[Tensor, "kept"]  # share of the attention that lies on positive slices
    unlabelled: int
    all_negative: int
    all_positive: int

    def columns(self) -> dict[str, Float64[Tensor, "kept"]]:
        """Every measure of every kept scan, by name: the columns of a table with one row per scan."""
        return {
            **{f"top_{k}_hit": hit for k, hit in self.hits.items()},
            "peak_error_slices": self.peak_error_slices,
            "peak_error_mm": self.peak_error_mm,
            **{f"overlap_{100 * share:g}": overlap for share, overlap in self.overlaps.items()},
            "attention_on_positives": self.attention_on_positives,
        }

    def summary(self) -> dict[str, Summary]:
        """The mean of each measure, or the median of errors, which a few large ones dominate; NaN does not count."""
        summaries = {}
        for name, values in self.columns().items():
            known = values[~values.isnan()]
            kind: Literal["mean", "median"] = "median" if "error" in name else "mean"
            middle = known.quantile(0.5) if kind == "median" and len(known) else known.mean()
            summaries[name] = Summary(middle.item(), kind, len(known))
        return summaries


def localization_measures(
    attention: Float[Tensor, "slices"],
    slice_labels: Shaped[Tensor, "slices"],
    lengths: Int[Tensor, "scans"],
    *,
    scores: Float[Tensor, "slices"] | None = None,
    positions: Float[Tensor, "slices"] | None = None,
) -> LocalizationMeasures:
    """Measures of one method's attention against the slice labels: 1, 0, or -1 (unknown) for all slices of a scan.

    The truth of the overlap is the union of the scan's blocks (`core.blocks`), so that an interval without holes does
    not lose to a label that skips a slice inside a lesion.  All other measures count labelled slices only.  A scan with
    fewer than k slices shows all of them, and so always hits.

    Args:
        attention: 0 or more on every slice; only its shares within each scan matter.
        scores: the numbers that rank the slices, by default the attention; log-attention where attention underflows.
        positions: places of the slices along the scan's axis in mm, in spatial order; NaN where unknown.

    >>> labels, lengths, places = torch.tensor([0, 1, 1, 0]), torch.tensor([4]), torch.tensor([0.0, 2.5, 5.0, 7.5])
    >>> found = localization_measures(torch.tensor([0.1, 0.2, 0.3, 0.4]), labels, lengths, positions=places)
    >>> {name: round(values.item(), 3) for name, values in found.columns().items()}
    {'top_1_hit': 0.0, 'top_3_hit': 1.0, 'top_5_hit': 1.0, 'peak_error_slices': 1.0, 'peak_error_mm': 2.5,
     'overlap_50': 0.333, 'overlap_90': 0.667, 'attention_on_positives': 0.5}
    """
    scores = attention if scores is None else scores
    check_lengths(lengths, attention, "attention")
    check_lengths(lengths, scores, "scores")
    device = attention.device
    slice_labels, lengths = slice_labels.to(device), lengths.to(device, torch.int64)
    counts, everything = count_slices(slice_labels, lengths), PackedScans.of(lengths)
    weights, scores = whole_numbers(attention, everything), scores.detach().to(device)
    if scores.isnan().any():
        scan, index = everything.locate(scores.isnan())
        raise UserError(f"scan {scan}, position {index}: its score is NaN; leave out a model that has diverged")
    along = _positions(positions, everything, device)
    kept = counts.mixed.nonzero().squeeze(1)
    among = counts.mixed[everything.of_slice]
    scans, scores, weights, along = PackedScans.of(lengths[kept]), scores[among], weights[among], along[among]
    positive = slice_labels[among] == 1
    before, after = _neighbours(positive)
    peak = scores == scans.reduce(scores, "amax")[scans.of_slice]
    # The true blocks: positive slices, and runs of at most `GAP` negatives between two of them.
    inside = (before >= scans.starts[scans.of_slice]) & (after < scans.stops[scans.of_slice])
    truth = inside & (after - before <= GAP + 1)
    return LocalizationMeasures(
        kept=kept,
        hits=_top_hits(scores, positive, scans),
        peak_error_slices=_mean_where(peak, _distance(scans.places.double(), before, after, scans), scans),
        peak_error_mm=_mean_where(peak, _distance(along, before, after, scans), scans),
        overlaps={share: _overlap(truth, *_interval(weights, scans, share), scans) for share in SHARES},
        attention_on_positives=scans.count(weights * positive) / scans.count(weights).double(),
        unlabelled=int(counts.unlabelled.sum()),
        all_negative=int(counts.all_negative.sum()),
        all_positive=int(counts.all_positive.sum()),
    )


def _top_hits(scores: Tensor, positive: Tensor, scans: PackedScans) -> dict[int, Tensor]:
    """By k: the probability that the k highest scores include a positive, with ties broken at random."""
    order = _scan_after_scan(scores.argsort(descending=True, stable=True), scans.of_slice)
    hits = {}
    for k in TOPS:
        shown = scans.lengths.clamp(max=k)
        lowest = scores[order[scans.starts + shown - 1]][scans.of_slice]
        above, tied = scores > lowest, scores == lowest
        drawn, candidates, misses = shown - scans.count(above), scans.count(tied), scans.count(tied & ~positive)
        # Each draw removes one candidate, and one miss as long as only misses were drawn.
        all_missed = (scans.count(above & positive) == 0).double()
        for i in range(k):
            chance = (misses - i).clamp(min=0) / (candidates - i).clamp(min=1).double()
            all_missed = torch.where(i < drawn, all_missed * chance, all_missed)
        hits[k] = 1 - all_missed
    return hits


def _neighbours(positive: Tensor) -> tuple[Tensor, Tensor]:
    """The last positive at or before each packed slice (-1: none), and the first at or after it (slice count: none)."""
    index, count = torch.arange(len(positive), device=positive.device), len(positive)
    before = torch.where(positive, index, -1).cummax(0).values
    after = torch.where(positive, index, count).flip(0).cummin(0).values.flip(0)
    return before, after


def _distance(along: Tensor, before: Tensor, after: Tensor, scans: PackedScans) -> Tensor:
    """The distance from every slice to the nearest positive of its scan; NaN if a position it needs is NaN."""
    starts, stops = scans.starts[scans.of_slice], scans.stops[scans.of_slice]
    back = torch.where(before >= starts, (along - along[before.clamp(min=0)]).abs(), torch.inf)
    forth = torch.where(after < stops, (along[after.clamp(max=len(along) - 1)] - along).abs(), torch.inf)
    return torch.minimum(back, forth)


def _mean_where(chosen: Tensor, values: Tensor, scans: PackedScans) -> Tensor:
    """Each scan's mean over its chosen slices."""
    return scans.reduce(torch.where(chosen, values, 0.0), "sum") / scans.count(chosen)


def _overlap(truth: Tensor, first: Tensor, last: Tensor, scans: PackedScans) -> Tensor:
    running = running_sum(truth)
    shared = running[scans.starts + last + 1] - running[scans.starts + first]
    return shared / (last + 1 - first + scans.count(truth) - shared).double()


def _positions(positions: Tensor | None, scans: PackedScans, device: torch.device) -> Tensor:
    """The place of every slice along its scan in mm, NaN where unknown."""
    if positions is None:
        return torch.full_like(scans.of_slice, torch.nan, dtype=torch.float64)
    check_lengths(scans.lengths, positions, "positions")
    positions = positions.to(device, torch.float64)
    if positions.isinf().any():
        scan, index = scans.locate(positions.isinf())
        raise UserError(f"scan {scan}, position {index}: its position is infinite; use NaN where it is unknown")
    return positions


KEYS = 5  # the most key slices of a scan

APART_MM = 8.0  # the least distance between key slices, which are never adjacent either: neighbours show the same thing


def key_positions(
    attention: Float[Tensor, "slices"], count: int = KEYS, spacing: float | None = None
) -> tuple[int, ...]:
    """The positions of the few slices to look at first, highest attention first.

    Each is at least `APART_MM` from those before it (or 2 slices, if that is more or the spacing is unknown).  The list
    ends where attention falls below an even share, 1 / slices, so a scan with all attention in one place has few.
    Of slices with the same attention, the one nearest to the mean position comes first.

    Example:
        >>> import torch
        >>> key_positions(torch.tensor([0.02, 0.08, 0.3, 0.28, 0.02, 0.02, 0.25, 0.03]), spacing=5.0)
        (2, 6)
        >>> key_positions(torch.full((9,), 1 / 9), count=3)
        (4, 2, 6)
    """
    slices = len(attention)
    apart = 2 if not spacing else max(2, math.ceil(APART_MM / spacing))
    shares = (attention.double() / attention.double().sum()).tolist()
    middle = sum(index * share for index, share in enumerate(shares))
    order = sorted(range(slices), key=lambda index: (-round(shares[index], 9), abs(index - middle), index))
    chosen: list[int] = []
    for index in order:
        enough = shares[index] >= (1 - 1e-6) / slices or not chosen
        if len(chosen) == count or not enough:
            break
        if all(abs(index - other) >= apart for other in chosen):
            chosen.append(index)
    return tuple(chosen)


def highest_first(
    scores: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"], generator: torch.Generator
) -> Int64[Tensor, "slices"]:
    """The slices' numbers, scan after scan, the highest score first; ties in random order."""
    # Ties must not be broken by position: max pooling ties most slices, and the first of them would mark a place.
    order = torch.randperm(len(scores), generator=generator)
    order = order[scores[order].argsort(descending=True, stable=True)]
    return _scan_after_scan(order, bag_of_rows(lengths))


def _scan_after_scan(order: Tensor, scan: Tensor) -> Tensor:
    return order[scan[order].argsort(stable=True)]


def moved_round(lengths: Int[Tensor, "scans"], generator: torch.Generator) -> Int64[Tensor, "slices"]:
    """The slices' numbers, scan after scan, each scan rotated to begin at a random slice."""
    size, index = lengths[bag_of_rows(lengths)], place_in_bag(lengths)
    by = (torch.rand(len(lengths), generator=generator) * lengths).long()[bag_of_rows(lengths)]
    return torch.arange(len(size)) - index + (index + by) % size


def ranks(scores: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"]) -> Float64[Tensor, "slices"]:
    """Ranks within each scan from 0, ties sharing their mean."""
    scan = bag_of_rows(lengths)
    order = _scan_after_scan(scores.argsort(stable=True), scan)
    ordered, of = scores[order], scan[order]
    begins = torch.ones_like(of, dtype=torch.bool)
    begins[1:] = (ordered[1:] != ordered[:-1]) | (of[1:] != of[:-1])
    group = begins.cumsum(0) - 1
    index = place_in_bag(lengths).double()  # also right for the ordered slices: scans keep their order and lengths
    count = torch.bincount(group).double()
    mean = torch.zeros_like(count).index_add(0, group, index) / count
    return torch.empty_like(index).index_copy(0, order, mean[group])


def rank_correlation(
    first: Float[Tensor, "slices"], second: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"]
) -> Float64[Tensor, "scans"]:
    """Spearman's correlation within each scan; NaN where all slices of a scan tie in either score."""
    half = ((lengths.double() - 1) / 2)[bag_of_rows(lengths)]
    x, y = (ranks(scores, lengths) - half for scores in (first, second))
    # Ranks are multiples of one half, so sums are exact.
    both, of_x, of_y = (sum_per_bag(values, lengths) for values in (x * y, x * x, y * y))
    return both / (of_x * of_y).sqrt()
