"""Blocks of positive slices against the rule's two examples and a slice-by-slice reference."""

from collections.abc import Callable
from operator import attrgetter

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normal_guidance.core.blocks import BlockStatistics, block_statistics, count_slices, find_blocks

LABELS = st.lists(st.integers(0, 1), min_size=1, max_size=40)
BAGS = st.lists(LABELS | st.integers(1, 5).map(lambda length: [-1] * length), max_size=10)


def walk(labels: list[int], gap: int) -> list[list[int]]:
    """The block rule in plain Python: a block goes on while at most `gap` negatives separate its positives."""
    blocks: list[list[int]] = []
    for j, label in enumerate(labels):
        if label != 1:
            continue
        if blocks and j - blocks[-1][1] <= gap:
            blocks[-1][1] = j + 1
        else:
            blocks.append([j, j + 1])
    return blocks


def digits(text: str) -> Tensor:
    return torch.tensor([int(digit) for digit in text])


def pack(bags: list[list[int]]) -> tuple[Tensor, Tensor]:
    packed = [label for bag in bags for label in bag]
    return torch.tensor(packed, dtype=torch.int64), torch.tensor([len(bag) for bag in bags], dtype=torch.int64)


@pytest.mark.parametrize(
    ("labels", "blocks"),
    [
        ("1110001", [[0, 7]]),
        ("11100001", [[0, 3], [7, 8]]),
        ("0000", []),
        ("1", [[0, 1]]),
        ("0001000", [[3, 4]]),
        ("10001000100001", [[0, 9], [13, 14]]),
    ],
)
def test_blocks_bridge_up_to_three_negatives(labels: str, blocks: list[list[int]]) -> None:
    assert find_blocks(digits(labels)).tolist() == blocks


@given(labels=LABELS, gap=st.integers(0, 6))
def test_blocks_equal_a_walk_over_slices(labels: list[int], gap: int) -> None:
    assert find_blocks(torch.tensor(labels), gap).tolist() == walk(labels, gap)


@given(bags=BAGS, gap=st.integers(0, 4))
def test_statistics_equal_a_walk_over_bags(bags: list[list[int]], gap: int) -> None:
    statistics = block_statistics(*pack(bags), gap)
    walked = [walk(bag, gap) for bag in bags]
    numbers = [len(blocks) for blocks in walked if blocks]
    assert statistics.bags_by_blocks == {k: numbers.count(k) for k in set(numbers)}
    assert statistics.lengths.tolist() == [stop - start for blocks in walked for start, stop in blocks]
    assert statistics.fractions.tolist() == [
        (stop - start) / len(bag) for bag, blocks in zip(bags, walked, strict=True) for start, stop in blocks
    ]
    assert statistics.unlabelled == sum(-1 in bag for bag in bags)
    assert statistics.all_negative == sum(set(bag) == {0} for bag in bags)
    assert statistics.gap == gap


def test_the_end_of_a_bag_ends_a_block() -> None:
    labels = digits("0011" + "1100" + "0100")
    assert block_statistics(labels, torch.tensor([4, 4, 4])).lengths.tolist() == [2, 2, 1]
    assert block_statistics(labels, torch.tensor([12])).lengths.tolist() == [8]


@given(bags=st.lists(LABELS.filter(any), min_size=1, max_size=10))
def test_summary_equals_numpy(bags: list[list[int]]) -> None:
    statistics = block_statistics(*pack(bags))
    summary = statistics.summary()
    for name, values in (("length", statistics.lengths), ("fraction", statistics.fractions)):
        array = values.numpy()
        expected = [array.mean(), *np.percentile(array, [0, 5, 25, 50, 75, 95, 100])]
        assert list(summary[name]) == ["mean", "min", "5th", "25th", "50th", "75th", "95th", "max"]
        assert list(summary[name].values()) == pytest.approx(expected, abs=1e-12)


def test_receptive_field_is_the_rounded_mean_length() -> None:
    statistics = block_statistics(digits("1110" + "1111" + "1111"), torch.tensor([4, 4, 4]))
    assert statistics.mean_length == pytest.approx(11 / 3)
    assert statistics.receptive_field == 4


@given(bags=BAGS)
def test_counts_equal_a_count_per_bag(bags: list[list[int]]) -> None:
    counts = count_slices(*pack(bags))
    for value, found in ((1, counts.positive), (0, counts.negative), (-1, counts.unknown)):
        assert found.tolist() == [bag.count(value) for bag in bags]
    kinds = counts.mixed, counts.all_negative, counts.all_positive, counts.unlabelled
    for bag, *flags in zip(bags, *(kind.tolist() for kind in kinds), strict=True):
        assert flags == [set(bag) == {0, 1}, set(bag) == {0}, set(bag) == {1}, set(bag) == {-1}]


# Guards


@pytest.mark.parametrize(
    ("labels", "lengths", "message"),
    [
        ([0, 1, 1, 0], [2, 3], r"lengths add up to 5 slices, but slice_labels has shape \(4,\)"),
        ([0, 1, 1, 0], [4, 0], r"positive slice counts, got \[4, 0\]"),
        ([0.0, 1.0, 1.0, 2.0], [2, 2], "bag 1 has slice label 2.0: use 1 positive"),
        ([-1, 1, -1, 0], [1, 3], r"bag 1 has 1 unknown \(-1\) of 3 slice labels"),
    ],
)
def test_labels_and_lengths_that_do_not_fit(labels: list[float], lengths: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        block_statistics(torch.tensor(labels), torch.tensor(lengths))


def test_a_bag_without_labels_and_a_negative_gap_are_refused() -> None:
    with pytest.raises(ValueError, match=r"needs slice labels 0 or 1, but all of them are -1 \(unknown\)"):
        find_blocks(torch.tensor([-1, -1]))
    with pytest.raises(ValueError, match="gap must be 0 or more negative slices, got -1"):
        find_blocks(torch.tensor([1, 0]), gap=-1)


@pytest.mark.parametrize("read", [BlockStatistics.summary, attrgetter("mean_length"), attrgetter("receptive_field")])
def test_nothing_to_describe_without_blocks(read: Callable[[BlockStatistics], object]) -> None:
    statistics = block_statistics(torch.tensor([0, 0, -1]), torch.tensor([2, 1]))
    with pytest.raises(ValueError, match="1 bags have no positive slice and 1 have unknown slice labels"):
        read(statistics)
