"""Conformal intervals against a plain loop that grows them slice by slice, by hand, and by simulation."""

import json
from fractions import Fraction

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.statistics import conformal
from normal_guidance.statistics.conformal import IntervalCalibration, calibrate_intervals, scans_needed
from normal_guidance.statistics.split_results import UNITS

# Whole numbers that tie often.
ATTENTION = st.lists(st.integers(0, 4), min_size=1, max_size=30).filter(any)
LABELS = [0, 0, 0, 1, 1, 1, 0, 0, 0, 0]
FOUND = [0.05, 0.1, 0.1, 0.2, 0.25, 0.1, 0.05, 0.05, 0.05, 0.05]


def averaged(attention: list[int]) -> list[Fraction]:
    """In whole numbers, as the module does: rounding decides between averages that are equal but for it."""
    reach = round(len(attention) * conformal.SMOOTHING / 2)
    shares = [round(value / sum(attention) * UNITS) for value in attention]
    windows = [shares[max(0, j - reach) : j + reach + 1] for j in range(len(shares))]
    return [Fraction(sum(window) // len(window)) for window in windows]


def grown(attention: list[int]) -> list[tuple[int, int]]:
    """The family of intervals, slice by slice, with the ties that the module describes."""
    weights = averaged(attention)
    mean = sum(j * weight for j, weight in enumerate(weights)) / sum(weights)
    peaks = [j for j, weight in enumerate(weights) if weight == max(weights)]
    nearest = [j for j in peaks if abs(j - mean) == min(abs(peak - mean) for peak in peaks)]
    peak = min(nearest) if (min(nearest) + max(nearest)) // 2 % 2 == 0 else max(nearest)
    first = last = peak
    lowest = {-1: weights[peak], 1: weights[peak]}
    family = [(first, last)]
    while last - first + 1 < len(weights):
        # The running minimum of a side decides, so that what lies behind a valley ties with the valley.
        sides = [side for side, place in ((-1, first - 1), (1, last + 1)) if 0 <= place < len(weights)]
        place = {-1: first - 1, 1: last + 1}

        def rank(side: int, place: dict[int, int] = place) -> tuple[Fraction, int, bool]:
            distance = abs(place[side] - peak)
            upper_first = distance % 2 == 1 if mean == peak else mean > peak
            return -min(lowest[side], weights[place[side]]), distance, upper_first != (side > 0)

        side = min(sides, key=rank)
        lowest[side] = min(lowest[side], weights[place[side]])
        first, last = min(first, place[side]), max(last, place[side])
        family.append((first, last))
    return family


def score(attention: list[int], interval: tuple[int, int]) -> float:
    weights = averaged(attention)
    share = sum(weights[interval[0] : interval[1] + 1]) / sum(weights)
    return float((share + Fraction(interval[1] - interval[0] + 1, len(weights))) / 2)


def pack(scans: list[list[int]]) -> tuple[Tensor, Tensor]:
    return (
        torch.tensor([value for scan in scans for value in scan], dtype=torch.float64),
        torch.tensor([len(scan) for scan in scans]),
    )


def at(threshold: float) -> IntervalCalibration:
    return IntervalCalibration(coverage=0.9, scans=30, threshold=threshold)


@example(scans=[[0, 4, 1, 1, 3, 4, 1, 4, 0, 0, 4]], share=0.5)  # two averages of 8/3 that rounding tells apart
@given(scans=st.lists(ATTENTION, min_size=1, max_size=5), share=st.floats(0.01, 1.0))
def test_intervals_are_those_grown_slice_by_slice(scans: list[list[int]], share: float) -> None:
    first, last = at(share).interval(*pack(scans))
    for scan, *interval in zip(scans, first.tolist(), last.tolist(), strict=True):
        # Shares are rounded to float64.
        family = grown(scan)
        if all(abs(score(scan, one) - share) > 1e-9 for one in family):
            within = [one for one in family if score(scan, one) <= share]
            assert tuple(interval) == (within[-1] if within else family[0])


def test_the_family_takes_the_larger_neighbour_again_and_again() -> None:
    # Without ties the growth is the plain greedy one; a valley (1) holds up its side, not what lies behind it.
    scan = [9, 1, 8, 20, 7, 6, 2]
    taken = [at(min(1.0, score(scan, one) + 1e-6)).interval(*pack([scan])) for one in grown(scan)]
    assert [(first.item(), last.item()) for first, last in taken] == grown(scan)
    assert grown(scan) == [(3, 3), (2, 3), (2, 4), (2, 5), (2, 6), (1, 6), (0, 6)]


def test_where_attention_is_0_intervals_still_grow() -> None:
    attention, lengths = torch.tensor([0.0] * 15 + [1.0] + [0.0] * 4), torch.tensor([20])
    assert [at(share).interval(attention, lengths)[0].item() for share in (0.6, 0.7, 0.8, 1.0)] == [13, 11, 8, 0]
    labels = torch.tensor([1] + [0] * 19).repeat(9)
    assert calibrate_intervals(attention.repeat(9), lengths.repeat(9), labels).threshold == 1.0


@pytest.mark.parametrize(("scans", "coverage", "k"), [(9, 0.9, 9), (30, 0.9, 28), (100, 0.9, 91), (19, 0.8, 16)])
def test_the_threshold_is_the_kth_smallest_score(scans: int, coverage: float, k: int) -> None:
    # Scan i has a point in the middle of 199 slices and a finding that ends i slices above it.
    attention, labels = torch.zeros(scans, 199), torch.zeros(scans, 199, dtype=torch.int64)
    attention[:, 99] = 1
    labels[torch.arange(scans), 99 + torch.arange(scans)] = 1
    order = torch.randperm(scans)
    lengths = torch.tensor([199] * scans)
    calibration = calibrate_intervals(attention[order].flatten(), lengths, labels[order].flatten(), coverage)
    first, last = calibration.interval(attention.flatten(), lengths)
    covered = last >= 99 + torch.arange(scans)
    assert (first <= 99).all()
    assert covered.tolist() == [i < k for i in range(scans)]


def test_negative_and_unlabelled_scans_are_left_out() -> None:
    attention, lengths = torch.tensor(FOUND).repeat(12), torch.tensor([10] * 12)
    labels = torch.tensor([0] * 10 + LABELS * 9 + [-1] * 10 + [1] * 10)
    calibration = calibrate_intervals(attention, lengths, labels)
    assert calibration.scans == 10  # a scan full of positive slices counts
    assert calibration.threshold == 1.0


def test_the_fewest_scans() -> None:
    assert [scans_needed(coverage) for coverage in (0.5, 0.8, 0.9, 0.95, 0.99, 0.995)] == [1, 4, 9, 19, 99, 199]
    attention, lengths, labels = torch.tensor(FOUND).repeat(8), torch.tensor([10] * 8), torch.tensor(LABELS).repeat(8)
    with pytest.raises(UserError, match=r"^8 scans with positive slices .* 0.9; give at least 9, better 30"):
        calibrate_intervals(attention, lengths, labels)
    assert calibrate_intervals(attention, lengths, labels, coverage=0.8).scans == 8
    with pytest.raises(UserError, match=r"^0 scans with positive slices .* give at least 4"):
        calibrate_intervals(attention, lengths, 0 * labels, coverage=0.8)


def test_a_calibration_survives_json() -> None:
    calibration = IntervalCalibration(0.95, 41, 0.1 + 0.2)
    assert IntervalCalibration.from_dict(json.loads(json.dumps(calibration.to_dict()))) == calibration


def read_again(**changed: object) -> None:
    IntervalCalibration.from_dict({**IntervalCalibration(0.9, 30, 0.75).to_dict(), **changed})


def calibrate(**changed: object) -> IntervalCalibration:
    nine = {"attention": torch.tensor(FOUND).repeat(9), "slice_labels": torch.tensor(LABELS).repeat(9)}
    return calibrate_intervals(**{**nine, "lengths": torch.tensor([10] * 9), **changed})  # type: ignore[arg-type]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("make", "changed", "complaint"),
    [
        (read_again, {"version": 2}, "version 2, this software's is 1; calibrate them again"),
        (read_again, {"coverage": 1.0}, r"coverage is 1.0; give a number between 0 and 1"),
        (read_again, {"coverage": "0.9"}, "the calibration of intervals.coverage is '0.9', not a number"),
        (read_again, {"scans": 8}, "8 scans with positive slices cannot calibrate"),
        (read_again, {"scans": True}, "intervals.scans is True, not a whole number"),
        (read_again, {"threshold": None}, "intervals.threshold is None, not a number"),
        (read_again, {"threshold": 1.1}, "the threshold of intervals is 1.1, not in"),
        (calibrate, {"coverage": 0.0}, "coverage is 0.0; give a number between 0 and 1"),
        (calibrate, {"attention": torch.zeros(90)}, "scan 0: attention is 0 on all of its slices"),
    ],
)
def test_what_cannot_be_right_is_refused(make, changed: dict[str, object], complaint: str) -> None:
    with pytest.raises(UserError, match=complaint):
        make(**changed)
