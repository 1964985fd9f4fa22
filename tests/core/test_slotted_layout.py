"""Bags in slots give what packed bags give: values and gradients, whatever the unused slots hold."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.layout import Layout
from normal_guidance.core.models import EVERY_METHOD, build_model
from normal_guidance.core.slotted_layout import SlottedLayout

FEATURES = 16


def in_slots(rows: Tensor, lengths: list[int], capacity: int) -> Tensor:
    """Packed rows moved to their slots, by hand; slots without a slice hold large numbers."""
    slots = torch.randn(capacity, rows.shape[1], dtype=rows.dtype) * 100
    begin = slot = 0
    for length in lengths:
        slots[slot + 1 : slot + 1 + length] = rows[begin : begin + length]
        begin, slot = begin + length, slot + 1 + length
    return slots


def test_a_layout_says_where_everything_is() -> None:
    layout = SlottedLayout.of(torch.tensor([2, 1]), rows=7, longest=3)
    assert layout.first.tolist() == [0, 3]
    assert layout.starts.tolist() == [1, 4]
    assert layout.bag.tolist() == [0, 0, 0, 1, 1, 2, 2]
    assert layout.is_token().tolist() == [True, False, False, True, False, False, False]
    tokens = layout.with_class_token()
    assert tokens.starts.tolist() == [0, 3]
    assert tokens.lengths.tolist() == [3, 2]
    assert tokens.pad(torch.arange(7.0)).tolist() == [[0.0, 1.0, 2.0, 0.0], [3.0, 4.0, 0.0, 0.0]]


@settings(max_examples=20)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=5), spare=st.integers(0, 40), data=st.data())
@pytest.mark.parametrize("name", [name for name, method in EVERY_METHOD.items() if method.scores_scans])
def test_slots_give_what_packed_rows_give(name: str, lengths: list[int], spare: int, data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = build_model(name, FEATURES).double()
    rows = torch.randn(sum(lengths), FEATURES, dtype=torch.float64)
    capacity, longest = sum(lengths) + len(lengths) + spare, max(lengths) + data.draw(st.integers(0, 5))
    packed, slotted = Layout.packed(lengths), SlottedLayout.of(torch.tensor(lengths), capacity, longest)
    want = model(rows, packed)
    got = model(in_slots(rows, lengths, capacity), slotted)
    torch.testing.assert_close(got.logit, want.logit)
    torch.testing.assert_close(slotted.pad(torch.zeros(capacity)).shape, got.attention.shape)
    torch.testing.assert_close(got.attention[slotted.mask], want.attention)
    guidance = NormalGuidance()
    gradients = [
        torch.autograd.grad(
            one.logit.sum() + guidance(one.log_attention, lengths=layout, from_logits=True),
            list(model.parameters()),
            allow_unused=True,
            materialize_grads=True,
        )
        for one, layout in ((want, packed), (got, slotted))
    ]
    for a, b in zip(*gradients, strict=True):
        torch.testing.assert_close(b, a)
