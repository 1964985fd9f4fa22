"""A batch in a fixed number of rows gives the values and gradients of packed bags, whatever unused rows hold."""

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor

from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.layout import Layout, SlottedLayout
from normal_guidance.core.methods import NAMED, build_model

FEATURES = 16


def in_fixed_rows(rows: Tensor, lengths: list[int], capacity: int) -> Tensor:
    """Packed rows laid out in `capacity` rows, by hand; rows without a slice hold large numbers."""
    laid_out = torch.randn(capacity, rows.shape[1], dtype=rows.dtype) * 100
    begin = start = 0
    for length in lengths:
        laid_out[start + 1 : start + 1 + length] = rows[begin : begin + length]
        begin, start = begin + length, start + 1 + length
    return laid_out


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
@pytest.mark.parametrize(
    "name", [name for name, method in NAMED.items() if method.scores_scans and method.model == name]
)
def test_fixed_rows_give_what_packed_rows_give(name: str, lengths: list[int], spare: int, data: st.DataObject) -> None:
    torch.manual_seed(0)
    model = build_model(name, FEATURES).double()
    rows = torch.randn(sum(lengths), FEATURES, dtype=torch.float64)
    capacity, longest = sum(lengths) + len(lengths) + spare, max(lengths) + data.draw(st.integers(0, 5))
    packed, slotted = Layout.packed(lengths), SlottedLayout.of(torch.tensor(lengths), capacity, longest)
    want = model(rows, packed)
    got = model(in_fixed_rows(rows, lengths, capacity), slotted)
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
