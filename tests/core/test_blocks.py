"""Blocks of positive slices against the rule's two examples and a slice-by-slice reference."""

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.blocks import GAP, block_statistics, count_slices, find_blocks

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


def blocks_of(labels: list[int]) -> list[list[int]]:
    found: list[list[int]] = find_blocks(*pack([labels]))[0].tolist()
    return found


def pack(bags: list[list[int]]) -> tuple[Tensor, Tensor]:
    packed = [label for bag in bags for label in bag]
    return torch.tensor(packed, dtype=torch.int64), torch.tensor([len(bag) for bag in bags], dtype=torch.int64)


@pytest.mark.parametrize(
    ("labels", "blocks"),
    [
        ([1, 1, 1, 0, 0, 0, 1], [[0, 7]]),
        ([1, 1, 1, 0, 0, 0, 0, 1], [[0, 3], [7, 8]]),
        ([0] * 4, []),
        ([1, *[0, 0, 0, 1] * 2, 0, 0, 0, 0, 1], [[0, 9], [13, 14]]),
    ],
)
def test_blocks_bridge_up_to_three_negatives(labels: list[int], blocks: list[list[int]]) -> None:
    assert blocks_of(labels) == blocks


@given(labels=LABELS)
def test_blocks_equal_a_walk_over_slices(labels: list[int]) -> None:
    assert blocks_of(labels) == walk(labels, GAP)


@given(bags=BAGS)
def test_statistics_equal_a_walk_over_bags(bags: list[list[int]]) -> None:
    statistics = block_statistics(*pack(bags))
    walked = [walk(bag, GAP) for bag in bags]
    numbers = [len(blocks) for blocks in walked if blocks]
    assert statistics.bags_by_blocks == {k: numbers.count(k) for k in set(numbers)}
    assert statistics.lengths.tolist() == [stop - start for blocks in walked for start, stop in blocks]
    assert statistics.fractions.tolist() == [
        (stop - start) / len(bag) for bag, blocks in zip(bags, walked, strict=True) for start, stop in blocks
    ]
    assert statistics.unlabelled == sum(-1 in bag for bag in bags)
    assert statistics.all_negative == sum(set(bag) == {0} for bag in bags)


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
    statistics = block_statistics(torch.tensor([1, 1, 1, 0, *[1] * 8]), torch.tensor([4, 4, 4]))
    assert statistics.mean_length == pytest.approx(11 / 3)
    assert statistics.receptive_field == 4


@given(bags=BAGS)
def test_counts_equal_a_count_per_bag(bags: list[list[int]]) -> None:
    counts = count_slices(*pack(bags))
    for value, counted in ((1, counts.positive), (0, counts.negative), (-1, counts.unknown)):
        assert counted.tolist() == [bag.count(value) for bag in bags]
    kinds = counts.mixed, counts.all_negative, counts.all_positive, counts.unlabelled
    for bag, *flags in zip(bags, *(kind.tolist() for kind in kinds), strict=True):
        assert flags == [set(bag) == {0, 1}, set(bag) == {0}, set(bag) == {1}, set(bag) == {-1}]


EMPTY = block_statistics(torch.tensor([0, 0, -1]), torch.tensor([2, 1]))
DESCRIBED = [EMPTY.summary, lambda: EMPTY.mean_length, lambda: EMPTY.receptive_field]


@pytest.mark.parametrize(
    ("call", "message"),
    [(read, "1 bags have no positive slice and 1 have unknown slice labels") for read in DESCRIBED],
)
def test_what_cannot_be_described_is_refused(call: Callable[[], object], message: str) -> None:
    """Beside what `localization` refuses in docs/errors_page.py."""
    with pytest.raises(UserError, match=message):
        call()
