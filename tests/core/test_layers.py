"""Layers against their definitions; `test_models` has those of TransMIL against torch's own modules."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from normal_guidance.core.layers import LongAttention, Sm, SpectralLinear
from normal_guidance.core.layout import Layout, take_rows, unpack
from same import assert_same


def chain(size: int) -> Tensor:
    """D^-1 A of the chain graph: one neighbour to each side, no self-loop; a single slice stays as it is."""
    if size == 1:
        return torch.ones(1, 1, dtype=torch.float64)
    right = torch.diag(torch.ones(size - 1, dtype=torch.float64), 1)
    adjacency = right + right.T
    return adjacency / adjacency.sum(1, keepdim=True)


def dense_sm(rows: Tensor, alpha: Tensor, steps: int) -> Tensor:
    """T steps of g <- (1 - alpha) h + alpha A g, with the matrix."""
    g = rows
    for _ in range(steps):
        g = (1 - alpha) * rows + alpha * (chain(len(rows)) @ g)
    return g


@given(st.lists(st.integers(1, 90), min_size=1, max_size=5), st.floats(-6, 6), st.integers(1, 12))
def test_sm_is_the_dense_matrix_polynomial(lengths: list[int], raw_alpha: float, steps: int) -> None:
    sm = Sm(steps).double()
    assert torch.sigmoid(sm.raw_alpha).item() == 0.5
    nn.init.constant_(sm.raw_alpha, raw_alpha)
    rows = torch.randn(sum(lengths), 3, dtype=torch.float64, requires_grad=True)
    layout = Layout.packed(lengths)
    want = torch.cat([dense_sm(bag, torch.sigmoid(sm.raw_alpha), steps) for bag in rows.split(lengths)])
    assert_same(sm(rows, layout), want, [rows, sm.raw_alpha])
    padded, mask = unpack(rows.detach(), torch.tensor(lengths))
    torch.testing.assert_close(sm(padded.flatten(0, 1), Layout.from_mask(mask))[mask.flatten()], want.detach())
    first = (sm.first_row(layout)[:, :, None] * take_rows(rows, layout.first_rows(steps + 1))).sum(1)
    torch.testing.assert_close(first, take_rows(want, layout.starts))


@pytest.mark.parametrize("shape", [(128, 768), (6, 4), (1, 128)])
def test_spectral_linear_divides_by_the_largest_singular_value(shape: tuple[int, int]) -> None:
    layer = SpectralLinear(shape[1], shape[0]).double()
    sigma = torch.linalg.matrix_norm(layer.weight, 2)
    torch.testing.assert_close(layer.normalized_weight(), layer.weight / sigma, rtol=1e-6, atol=0)
    upstream = torch.randn_like(layer.weight)
    (got,) = torch.autograd.grad(layer.normalized_weight(), layer.weight, upstream)
    (exact,) = torch.autograd.grad(layer.weight / torch.linalg.matrix_norm(layer.weight, 2), layer.weight, upstream)
    assert (got - exact).norm() / exact.norm() < 1e-3


def test_spectral_linear_of_a_vanished_weight_is_finite() -> None:
    for out_features in (1, 3):
        layer = SpectralLinear(4, out_features)
        nn.init.zeros_(layer.weight)
        weight = layer.normalized_weight()
        weight.sum().backward()
        assert not weight.any()
        assert layer.weight.grad.isfinite().all()


@pytest.mark.parametrize("shared", [False, True], ids=["own keys", "shared keys"])
@pytest.mark.parametrize("configs", [0, 3], ids=["alone", "stacked"])
def test_long_attention_and_its_gradients(configs: int, shared: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    q, k, v = (torch.randn(max(1, configs), 2, 33, 12, generator=generator).requires_grad_() for _ in range(3))
    want = torch.softmax(q @ (k[:1] if shared else k).transpose(-1, -2) / 12**0.5, -1) @ v
    if configs:
        dims = (0, None if shared else 0, 0)
        keys = k[:1] if shared else k[:, None]
        got = torch.func.vmap(LongAttention.apply, dims)(q[:, None], keys, v[:, None])[:, 0]
    else:
        got = LongAttention.apply(q, k, v)
    assert_same(got, want, (q, k, v), rtol=1e-4, atol=1e-6)
