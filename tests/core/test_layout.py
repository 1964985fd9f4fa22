"""Packed, padded and back: nothing lost, nothing mixed between bags."""

from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normal_guidance.base.errors import UserError
from normal_guidance.core.layout import Layout, SlottedLayout, as_rows, mirror, pack, take_rows, unpack
from same import assert_same

LENGTHS = st.lists(st.integers(1, 80), min_size=1, max_size=6)


@given(LENGTHS)
def test_unpack_is_the_inverse_of_pack(lengths: list[int]) -> None:
    rows = torch.randn(sum(lengths), 3)
    padded, mask = unpack(rows, torch.tensor(lengths))
    again, counts = pack(padded, mask)
    assert torch.equal(again, rows)
    assert counts.tolist() == lengths
    assert not padded[~mask].any()


@given(LENGTHS)
def test_class_tokens_stand_before_each_bag(lengths: list[int]) -> None:
    rows, token = torch.randn(sum(lengths), 2), torch.full((1, 2), 9.0)
    layout = Layout.packed(lengths)
    tokens = layout.with_class_token()
    want = torch.cat([torch.cat([token, bag]) for bag in rows.split(lengths)])
    packed = layout.prepend(token, rows)
    assert torch.equal(packed, want)
    assert torch.equal(take_rows(packed, tokens.starts), token.expand(len(lengths), -1))
    padded, mask = unpack(rows, torch.tensor(lengths))
    other = Layout.from_mask(mask)
    slots = other.prepend(token, padded.flatten(0, 1))
    assert torch.equal(slots[other.with_class_token().mask.flatten()], want)


@given(LENGTHS)
def test_dot_and_pool_stay_within_each_bag(lengths: list[int]) -> None:
    rows = torch.randn(sum(lengths), 4, dtype=torch.float64)
    queries = torch.randn(len(lengths), 3, 4, dtype=torch.float64)
    padded, mask = unpack(rows, torch.tensor(lengths))
    for layout, given_rows in ((Layout.packed(lengths), rows), (Layout.from_mask(mask), padded.flatten(0, 1))):
        scores = layout.dot(queries, given_rows).masked_fill(~mask[:, None], 0)
        torch.testing.assert_close(scores, torch.einsum("bqf,bsf->bqs", queries, padded))
        weights = torch.rand(len(lengths), 2, max(lengths), dtype=torch.float64).masked_fill(~mask[:, None], 0)
        torch.testing.assert_close(
            layout.pool(weights, given_rows), torch.einsum("bhs,bsf->bhf", weights, padded), atol=1e-12, rtol=0
        )


def test_mirror_walks_back_at_both_ends() -> None:
    positions = torch.arange(-4, 8)
    assert mirror(positions, torch.tensor(4)).tolist() == [2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 1]
    assert mirror(positions, torch.tensor(2)).tolist() == [0, 1] * 6
    assert mirror(positions, torch.tensor(1)).tolist() == [0] * 12


def test_take_rows_has_the_gradient_of_indexing() -> None:
    rows = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    index = torch.tensor([[0, 2, 2], [3, 0, 2]])
    assert_same(take_rows(rows, index), rows[index], [rows])


def test_moving_a_layout_to_its_own_device_changes_nothing() -> None:
    layout = Layout.packed([2, 3])
    assert layout.to("cpu") is layout
    moved = layout.to("meta")
    assert {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert moved.sizes == (2, 3)


FIVE = torch.zeros(5, 2)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: as_rows(FIVE, torch.tensor([2, 2])), "do not fit lengths that add up to 4"),
        (lambda: as_rows(FIVE, torch.ones(1, 5) > 0), r"padded features of shape \(5, 2\) do not fit"),
        (lambda: as_rows(FIVE, torch.tensor([2, 0, 3])), r"at least one slice; empty: \[1\]"),
        (lambda: as_rows(torch.zeros(2, 3, 2), [[True, False, True], [True] * 3]), r"\[0\] are empty or have padding"),
        (lambda: as_rows(FIVE, torch.tensor([2.0, 3.0])), r"float32 of shape \(2,\); pass integer lengths"),
        (lambda: as_rows(FIVE, None), "got Tensor alone; a model takes features and the slices of each scan"),
        (lambda: pack(torch.zeros(2, 5, 3), torch.ones(2, 5).long()), r"mask is torch.int64; .* write mask.bool\(\)"),
        (lambda: unpack(torch.zeros(5), torch.tensor([2, 2])), "add up to 4 slices, but rows have the shape"),
        (lambda: Layout.packed([]), "the whole batch"),
        (lambda: Layout.padded([2, 9], 8), "bag 1 has 9 slices; give 1 to 8, the padded length, or pad further"),
    ],
)
def test_wrong_bags_are_named(call: Callable[[], object], message: str, unchecked: None) -> None:
    with pytest.raises(UserError, match=message):
        call()


def test_a_slotted_layout_says_where_everything_is() -> None:
    layout = SlottedLayout.of(torch.tensor([2, 1]), rows=7, longest=3)
    assert layout.first.tolist() == [0, 3]
    assert layout.starts.tolist() == [1, 4]
    assert layout.bag.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert layout.is_token().tolist() == [True, False, False, True, False, False, False]
    tokens = layout.with_class_token()
    assert tokens.starts.tolist() == [0, 3]
    assert tokens.lengths.tolist() == [3, 2]
    assert tokens.pad(torch.arange(7.0)).tolist() == [[0.0, 1.0, 2.0, 0.0], [3.0, 4.0, 0.0, 0.0]]
