"""Localization measures against a search over all intervals and ties, and against examples worked out by hand."""

import math
from fractions import Fraction
from itertools import combinations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.blocks import find_blocks
from normal_guidance.core.metrics import localization
from normal_guidance.statistics.localization import (
    LocalizationMeasures,
    Summary,
    localization_measures,
    smallest_interval,
)

# Small whole numbers tie often, and their sums are exact, so that the references can decide without rounding.
ATTENTION = st.lists(st.integers(0, 4), min_size=1, max_size=9).filter(any)
SHARES = st.sampled_from([Fraction(1, 10), Fraction(1, 3), Fraction(1, 2), Fraction(9, 10), Fraction(1)])


@st.composite
def scans(draw: st.DrawFn) -> list[tuple[list[int], list[int]]]:
    """Attention and slice labels of some scans: both classes, one class, or unknown."""
    found = []
    for attention in draw(st.lists(ATTENTION, min_size=1, max_size=5)):
        size = len(attention)
        labels = st.lists(st.integers(0, 1), min_size=size, max_size=size) | st.just([-1] * size)
        found.append((attention, draw(labels)))
    return found


def pack(drawn: list[tuple[list[int], list[int]]]) -> tuple[Tensor, Tensor, Tensor]:
    return (
        torch.tensor([value for attention, _ in drawn for value in attention], dtype=torch.float64),
        torch.tensor([label for _, labels in drawn for label in labels]),
        torch.tensor([len(labels) for _, labels in drawn]),
    )


def try_all_intervals(attention: list[int], share: Fraction) -> tuple[int, int]:
    """The shortest, then the fullest, then the first of all intervals that hold the share."""
    ends = [(f, l) for f in range(len(attention)) for l in range(f, len(attention))]  # noqa: E741
    enough = [end for end in ends if sum(attention[end[0] : end[1] + 1]) >= share * sum(attention)]
    return min(enough, key=lambda end: (end[1] - end[0], -sum(attention[end[0] : end[1] + 1]), end[0]))


def try_all_top(scores: list[int], labels: list[int], k: int) -> float:
    """Mean over all sets of k slices whose lowest score is no lower than any score outside the set."""
    everything, outcomes = range(len(scores)), []
    for chosen in combinations(everything, min(k, len(scores))):
        left = [scores[j] for j in everything if j not in chosen]
        if min(scores[j] for j in chosen) >= max(left, default=-1):
            outcomes.append(any(labels[j] for j in chosen))
    return sum(outcomes) / len(outcomes)


def mean_peak_error(scores: list[int], labels: list[int], positions: list[float]) -> float:
    peaks = [positions[j] for j, score in enumerate(scores) if score == max(scores)]
    truth = [positions[j] for j, label in enumerate(labels) if label]
    return sum(min(abs(peak - true) for true in truth) for peak in peaks) / len(peaks)


def set_overlap(first: int, last: int, labels: list[int]) -> float:
    blocks, _ = find_blocks(torch.tensor(labels), torch.tensor([len(labels)]))
    truth = {j for start, stop in blocks.tolist() for j in range(start, stop)}
    interval = set(range(first, last + 1))
    return len(truth & interval) / len(truth | interval)


@given(attention=st.lists(ATTENTION, min_size=1, max_size=6), share=SHARES)
def test_the_interval_is_the_best_of_all(attention: list[list[int]], share: Fraction) -> None:
    packed = torch.tensor([value for scan in attention for value in scan], dtype=torch.float64)
    first, last = smallest_interval(packed, torch.tensor([len(scan) for scan in attention]), float(share))
    expected = [try_all_intervals(scan, share) for scan in attention]
    assert list(zip(first.tolist(), last.tolist(), strict=True)) == expected


@pytest.mark.parametrize(
    ("attention", "share", "interval"),
    [
        ([0.1, 0.2, 0.4, 0.3], 0.4, (2, 2)),
        ([0.1, 0.2, 0.4, 0.3], 0.6, (2, 3)),  # two pairs hold .6; the fuller one counts
        ([0.3, 0.4, 0.3], 0.7, (0, 1)),  # equally full: the first
        ([1.0, 3.0, 2.0, 3.0, 1.0, 4.0], 1 / 3, (1, 2)),  # 5 of 14 three times, if sevenths are not rounded apart
        ([0.5, 0.0, 0.5], 0.6, (0, 2)),
        ([0.5, 0.0, 0.0], 1.0, (0, 0)),
        ([7.0], 0.5, (0, 0)),
        ([0.0, 3.0, 1.0], 1e-12, (1, 1)),  # the smallest share is held by one slice, and that is the peak
    ],
)
def test_intervals_by_hand(attention: list[float], share: float, interval: tuple[int, int]) -> None:
    first, last = smallest_interval(torch.tensor(attention), torch.tensor([len(attention)]), share)
    assert (first.item(), last.item()) == interval


@pytest.mark.parametrize(
    ("dtype", "length"),
    [(torch.float16, 10), (torch.bfloat16, 30), (torch.float32, 1000), (torch.float64, 1730), (torch.float32, 10)],
)
def test_equal_slices_are_counted_not_rounded(dtype: torch.dtype, length: int) -> None:
    # In floating point .9 x 10 x .1 may well be more than the sum of nine tenths.
    attention = torch.full((3 * length,), 1 / length, dtype=dtype)
    first, last = smallest_interval(attention, torch.tensor([length] * 3), 0.9)
    assert first.tolist() == [0, 0, 0]
    assert last.tolist() == [length * 9 // 10 - 1] * 3


# Every measure against a reference that tries everything


@given(drawn=scans(), seed=st.integers(0, 1000))
def test_measures_equal_their_definitions(drawn: list[tuple[list[int], list[int]]], seed: int) -> None:
    attention, labels, lengths = pack(drawn)
    steps = 0.5 + torch.rand(len(labels), dtype=torch.float64, generator=torch.Generator().manual_seed(seed))
    positions = steps.cumsum(0)
    found = localization_measures(attention, labels, lengths, positions=positions)
    by_auroc = localization(attention, labels, lengths)  # the same scans
    assert all(getattr(found, of) == getattr(by_auroc, of) for of in ("unlabelled", "all_negative", "all_positive"))
    mixed = [scan for scan, (_, label) in enumerate(drawn) if set(label) == {0, 1}]
    assert by_auroc.kept.tolist() == mixed
    assert found.kept.tolist() == mixed
    where = positions.split(lengths.tolist())
    for row, scan in enumerate(mixed):
        values, label = drawn[scan]
        held = sum(value for value, positive in zip(values, label, strict=True) if positive) / sum(values)
        expected = {
            **{f"top_{k}_hit": try_all_top(values, label, k) for k in (1, 3, 5)},
            "peak_error_slices": mean_peak_error(values, label, list(range(len(label)))),
            "peak_error_mm": mean_peak_error(values, label, where[scan].tolist()),
            "overlap_50": set_overlap(*try_all_intervals(values, Fraction(1, 2)), label),
            "overlap_90": set_overlap(*try_all_intervals(values, Fraction(9, 10)), label),
            "attention_on_positives": held,
        }
        assert {name: column[row].item() for name, column in found.columns().items()} == pytest.approx(
            expected, abs=1e-9
        )


def measure(attention: list[float], labels: list[int], **options: object) -> LocalizationMeasures:
    """The measures of one scan."""
    return localization_measures(torch.tensor(attention), torch.tensor(labels), torch.tensor([len(labels)]), **options)  # type: ignore[arg-type]


def test_uniform_attention_scores_what_guessing_scores() -> None:
    found = measure([0.1] * 10, [0, 0, 0, 1, 1, 0, 0, 0, 0, 0])
    assert found.hits[1].item() == pytest.approx(0.2)
    assert found.hits[3].item() == pytest.approx(1 - math.comb(8, 3) / math.comb(10, 3))
    assert found.hits[5].item() == pytest.approx(1 - math.comb(8, 5) / math.comb(10, 5))
    assert found.peak_error_slices.item() == pytest.approx((3 + 2 + 1 + 1 + 2 + 3 + 4 + 5) / 10)
    assert found.attention_on_positives.item() == pytest.approx(0.2)
    assert found.overlaps[0.5].item() == pytest.approx(2 / 5)
    assert found.overlaps[0.9].item() == pytest.approx(2 / 9)


def test_the_truth_of_the_overlap_bridges_gaps_and_nothing_else_does() -> None:
    labels, attention = [1, 0, 1, 0, 0, 0, 0, 1], [0.0, 1.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.0]
    bridged = measure(attention, labels)
    assert bridged.overlaps[0.5].item() == 1 / 4  # slices 0-2 and 7, of which the interval is slice 1
    assert bridged.peak_error_slices.item() == 1.0


def test_scores_rank_where_attention_ties() -> None:
    # exp(-800) is 0 in every precision, so attention alone cannot tell the first two slices apart.
    scores, labels, lengths = torch.tensor([-800.0, -900.0, 0.0, 1.0]), torch.tensor([1, 0, 0, 0]), torch.tensor([4])
    assert localization_measures(scores.exp(), labels, lengths).hits[3].item() == 0.5
    assert localization_measures(scores.exp(), labels, lengths, scores=scores).hits[3].item() == 1.0
    scores[1] = -math.inf
    assert localization_measures(scores.exp(), labels, lengths, scores=scores).hits[3].item() == 1.0


# Millimetres

PEAK, TRUTH = [0.0, 0.0, 0.0, 1.0], [1, 0, 0, 0]


def test_millimetres_are_between_positions() -> None:
    assert measure(PEAK, TRUTH, positions=torch.tensor([9.0, 6.0, 4.0, -1.0])).peak_error_mm.item() == 10.0


def test_millimetres_are_nan_where_positions_are_unknown() -> None:
    attention, labels = torch.tensor(PEAK * 3), torch.tensor(TRUTH + TRUTH + [0, 0, 0, 1])
    lengths, spacing = torch.tensor([4, 4, 4]), torch.tensor([math.nan, 2.0, math.nan])
    equal = torch.arange(4).repeat(3) * spacing.repeat_interleave(4)
    by_spacing = localization_measures(attention, labels, lengths, positions=equal)
    # A peak that hits is 0 mm off whatever the spacing, but scans without one would then bring in nothing but zeros.
    assert by_spacing.peak_error_mm.tolist() == pytest.approx([math.nan, 6.0, math.nan], nan_ok=True)
    assert by_spacing.peak_error_slices.tolist() == [3.0, 3.0, 0.0]
    assert by_spacing.summary()["peak_error_mm"] == Summary(6.0, "median", 1)
    positions = torch.tensor([0.0, 1.0, 2.0, 3.0] * 2 + [0.0, math.nan, 2.0, 3.0])
    by_position = localization_measures(attention, labels, lengths, positions=positions)
    assert by_position.peak_error_mm.tolist() == [3.0, 3.0, 0.0]  # the unknown one is not asked for
    unknown = localization_measures(attention, labels, lengths)
    assert unknown.peak_error_mm.isnan().all()
    assert unknown.summary()["peak_error_mm"].scans == 0
    assert math.isnan(unknown.summary()["peak_error_mm"].value)


def test_the_summary_has_means_but_medians_of_errors() -> None:
    # Peaks 0, 1 and 8 slices off; the mean of 3 would describe none of the scans.
    attention = torch.tensor([1.0] + [0.0] * 8).repeat(3)
    labels = torch.zeros(3, 9, dtype=torch.int64)
    labels[[0, 1, 2], [0, 1, 8]] = 1
    summary = localization_measures(attention, labels.flatten(), torch.tensor([9, 9, 9])).summary()
    assert summary["peak_error_slices"] == Summary(1.0, "median", 3)
    assert (summary["top_1_hit"].kind, summary["top_1_hit"].scans) == ("mean", 3)
    assert summary["top_1_hit"].value == pytest.approx(1 / 3)
    assert list(summary) == [
        *("top_1_hit", "top_3_hit", "top_5_hit", "peak_error_slices", "peak_error_mm"),
        *("overlap_50", "overlap_90", "attention_on_positives"),
    ]
    assert str(summary["peak_error_slices"]) == "1.000 (median of 3 scans)"


REFUSED = [
    ({"lengths": torch.tensor([2, 3])}, r"lengths add up to 5 slices, but attention has shape \(4,\)"),
    ({"lengths": torch.tensor([4, 0])}, r"lengths must be a vector of positive slice counts, got \[4, 0\]"),
    ({"attention": torch.ones(2, 2)}, r"attention has shape \(2, 2\)"),
    ({"attention": torch.tensor([1.0, 1.0, math.nan, 1.0])}, "scan 1, position 0: attention nan is not a finite"),
    ({"attention": torch.tensor([1.0, -0.5, 1.0, 1.0])}, "scan 0, position 1: attention -0.5 is not a finite"),
    ({"attention": torch.tensor([0.0, 1.0, 0.0, 0.0])}, "scan 1: attention is 0 on all of its slices"),
    ({"slice_labels": torch.ones(3)}, r"lengths add up to 4 slices, but slice_labels has shape \(3,\)"),
    ({"slice_labels": torch.tensor([0, 1, 2, 1])}, "bag 1 has slice label 2"),
    ({"scores": torch.ones(5)}, r"add up to 4 slices, but scores has shape \(5,\): give one number for every"),
    ({"scores": torch.tensor([0.0, 1.0, 2.0, math.nan])}, "scan 1, position 1: its score is NaN"),
    ({"positions": torch.ones(1, 4)}, r"lengths add up to 4 slices, but positions has shape \(1, 4\)"),
    ({"positions": torch.tensor([0.0, math.inf, 2.0, 3.0])}, "scan 0, position 1: its position is infinite"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(("changed", "complaint"), REFUSED)
def test_input_that_cannot_be_right_is_refused(changed: dict[str, object], complaint: str) -> None:
    usual = {"attention": torch.ones(4), "lengths": torch.tensor([2, 2]), "slice_labels": torch.tensor([0, 1, 0, 1])}
    arguments = {**usual, **changed}
    with pytest.raises(UserError, match=complaint):
        localization_measures(**arguments)  # type: ignore[arg-type]
    if changed.keys() & {"attention", "lengths"}:
        with pytest.raises(UserError, match=complaint):
            smallest_interval(arguments["attention"], arguments["lengths"])


@pytest.mark.parametrize("share", [0.0, -0.1, 1.01, math.nan])
def test_a_share_that_cannot_be_is_refused(share: float) -> None:
    with pytest.raises(UserError, match=f"share is {share}; it must be above 0 and at most 1"):
        smallest_interval(torch.ones(4), torch.tensor([2, 2]), share)
