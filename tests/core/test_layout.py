"""Packed, padded and back: nothing lost, nothing mixed between bags."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normal_guidance.base.errors import UserError
from normal_guidance.core.layout import Layout, SlottedLayout, as_rows, mirror, pack, unpack


@given(st.lists(st.integers(1, 80), min_size=1, max_size=6))
def test_unpack_is_the_inverse_of_pack(lengths: list[int]) -> None:
    rows = torch.randn(sum(lengths), 3)
    padded, mask = unpack(rows, torch.tensor(lengths))
    again, counts = pack(padded, mask)
    assert torch.equal(again, rows)
    assert counts.tolist() == lengths
    assert not padded[~mask].any()


def test_mirror_walks_back_at_both_ends() -> None:
    positions = torch.arange(-4, 8)
    assert mirror(positions, torch.tensor(4)).tolist() == [2, 3, 2, 1, 0, 1, 2, 3, 2, 1, 0, 1]
    assert mirror(positions, torch.tensor(2)).tolist() == [0, 1] * 6
    assert mirror(positions, torch.tensor(1)).tolist() == [0] * 12


def test_moving_a_layout_to_its_own_device_changes_nothing() -> None:
    layout = Layout.packed([2, 3])
    assert layout.to("cpu") is layout
    moved = layout.to("meta")
    assert {value.device.type for value in vars(moved).values() if isinstance(value, torch.Tensor)} == {"meta"}
    assert moved.sizes == (2, 3)


@pytest.mark.parametrize(
    ("bags", "message"),
    [
        (torch.ones(1, 5) > 0, r"padded features of shape \(5, 2\) do not fit"),
        (torch.tensor([2.0, 3.0]), r"float32 of shape \(2,\); pass integer lengths"),
    ],
)
def test_wrong_bags_are_named(bags: torch.Tensor, message: str, unchecked: None) -> None:
    """Beside those of docs/errors_page.py."""
    with pytest.raises(UserError, match=message):
        as_rows(torch.zeros(5, 2), bags)


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
