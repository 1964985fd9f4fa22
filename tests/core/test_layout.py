"""Packed, padded and back: nothing lost, nothing mixed between bags."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normal_guidance.base.errors import UserError
from normal_guidance.core.layout import Layout, as_rows, mirror, pack, take_rows, unpack

LENGTHS = st.lists(st.integers(1, 80), min_size=1, max_size=6)


@given(LENGTHS)
def test_unpack_is_the_inverse_of_pack(lengths: list[int]) -> None:
    rows = torch.randn(sum(lengths), 3)
    padded, mask = unpack(rows, torch.tensor(lengths))
    again, counts = pack(padded, mask)
    assert torch.equal(again, rows)
    assert counts.tolist() == lengths
    assert not padded[~mask].any()


@given(LENGTHS, st.sampled_from([(), (2,)]))
def test_restore_is_the_inverse_of_pad(lengths: list[int], heads: tuple[int, ...]) -> None:
    layout = Layout.packed(lengths)
    values = torch.randn(*heads, sum(lengths))
    padded = layout.pad(values)
    assert padded.shape == (len(lengths), *heads, max(lengths))
    assert torch.equal(layout.restore(padded), values)


@given(LENGTHS)
def test_padded_layout_of_the_mask_agrees_with_the_packed_one(lengths: list[int]) -> None:
    rows = torch.randn(sum(lengths))
    packed = Layout.packed(lengths)
    padded, mask = unpack(rows, torch.tensor(lengths))
    other = Layout.from_mask(mask)
    assert torch.equal(packed.mask, other.mask)
    assert torch.equal(packed.pad(rows), other.pad(padded.flatten()))
    assert other.lengths.tolist() == lengths


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
    upstream = torch.randn(2, 3, 3, dtype=torch.float64)
    (fast,) = torch.autograd.grad(take_rows(rows, index), rows, upstream)
    (plain,) = torch.autograd.grad(rows[index], rows, upstream)
    torch.testing.assert_close(fast, plain)


def test_moving_a_layout_to_its_own_device_changes_nothing() -> None:
    layout = Layout.packed([2, 3])
    assert layout.to("cpu") is layout
    moved = layout.to("meta")
    assert moved.mask.device.type == "meta"
    assert moved.sizes == (2, 3)


@pytest.mark.parametrize(
    ("features", "bags", "message"),
    [
        (torch.zeros(5, 2), torch.tensor([2, 2]), r"do not fit lengths that add up to 4"),
        (torch.zeros(1, 5, 2), torch.tensor([5]), r"\(1, 5, 2\) do not fit lengths"),
        (torch.zeros(5, 2), torch.ones(1, 5, dtype=torch.bool), r"padded features of shape \(5, 2\) do not fit"),
        (torch.zeros(5, 2), torch.tensor([2, 0, 3]), r"at least one slice; empty: \[1\]"),
        (torch.zeros(2, 3, 2), torch.tensor([[True, False, True], [True] * 3]), r"\[0\] are empty or have padding"),
        (torch.zeros(2, 3, 2), torch.tensor([[False] * 3, [True] * 3]), r"bags \[0\] are empty"),
    ],
)
def test_wrong_bags_are_named(features: torch.Tensor, bags: torch.Tensor, message: str) -> None:
    with pytest.raises(UserError, match=message):
        as_rows(features, bags)


def test_bags_of_the_wrong_kind_are_named_in_production(unchecked: None) -> None:
    with pytest.raises(UserError, match=r"float32 of shape \(2,\); pass integer lengths"):
        as_rows(torch.zeros(5, 2), torch.tensor([2.0, 3.0]))


def test_a_mask_of_numbers_is_refused(unchecked: None) -> None:
    with pytest.raises(UserError, match=r"mask is torch.int64; .* write mask.bool\(\)"):
        pack(torch.zeros(2, 5, 3), torch.ones(2, 5, dtype=torch.int64))


def test_rows_that_do_not_fit_their_lengths() -> None:
    with pytest.raises(UserError, match="add up to 4 slices, but rows have the shape"):
        unpack(torch.zeros(5), torch.tensor([2, 2]))
    with pytest.raises(UserError, match="the whole batch"):
        Layout.packed([])
