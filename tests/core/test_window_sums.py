"""Sums under windows by blocks against the whole matrix: values, gradients, stacked, compiled."""

import sys

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from in_a_process import assert_compiled_equals_eager, assert_script_passes, needs_cuda
from normal_guidance.core.bells import window_sums
from same import assert_same


def by_matrix(values: Tensor, taps: Tensor) -> Tensor:
    place = torch.arange(values.shape[-1], device=values.device)
    distance = (place[:, None] - place).abs()
    return values @ torch.where(distance < len(taps), taps[distance.clamp_max(len(taps) - 1)], 0.0)


def draw(rows: int, longest: int, reach: int) -> tuple[Tensor, Tensor]:
    """Rows that end before the longest one, as scans do, and taps that fall by many orders of magnitude."""
    values = torch.randn(rows, longest, dtype=torch.float64)
    values[0, longest // 2 :] = 0.0
    taps = torch.linspace(0, -200, reach, dtype=torch.float64).exp()
    return values.requires_grad_(), taps.requires_grad_()


@given(rows=st.integers(1, 4), longest=st.integers(1, 700), reach=st.integers(1, 900))
def test_sums_and_gradients_are_those_of_the_matrix(rows: int, longest: int, reach: int) -> None:
    leaves = draw(rows, longest, reach)
    assert_same(window_sums(*leaves), by_matrix(*leaves), leaves)


def test_small_sums_are_exact() -> None:
    """A hundred orders of magnitude below the largest: a Fourier transform would give noise of 1e-16."""
    values = torch.zeros(1, 3000, dtype=torch.float64)
    values[0, 0] = 1.0
    taps = torch.linspace(0, -500, 3000, dtype=torch.float64).exp()
    torch.testing.assert_close(window_sums(values, taps)[0], taps, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shared", [None, 0, 1])
def test_stacked_configurations_equal_one_after_the_other(shared: int | None) -> None:
    """Each with values and taps of its own, or one of both shared."""
    leaves = [torch.stack([draw(2, 500, reach)[one].detach() for reach in (500, 500, 500)]) for one in (0, 1)]
    leaves[1] = leaves[1] * torch.tensor([[1.0], [2.0], [0.0]])
    leaves = [leaf[0] if number == shared else leaf for number, leaf in enumerate(leaves)]
    for leaf in leaves:
        leaf.requires_grad_()
    dims = tuple(None if number == shared else 0 for number in range(2))
    got = vmap(window_sums, dims)(*leaves)
    each = [[leaf if number == shared else leaf[c] for number, leaf in enumerate(leaves)] for c in range(3)]
    want = torch.stack([by_matrix(*own) for own in each])
    assert_same(got, want, leaves, side=want.detach())  # taps of 0 get no gradient


def compiled(device: str = "cpu") -> None:
    leaves = [leaf.detach().expand(3, *leaf.shape).clone().to(device).requires_grad_() for leaf in draw(2, 600, 600)]
    assert_compiled_equals_eager(lambda *own: vmap(window_sums)(*own).square().sum(), leaves)


@pytest.mark.slow
def test_compiled_and_stacked_equals_eager() -> None:
    assert_script_passes(__file__)


@needs_cuda
def test_on_cuda_equals_the_matrix() -> None:
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in draw(3, 700, 700)]
    assert_same(window_sums(*leaves), by_matrix(*leaves), leaves)


if __name__ == "__main__":
    compiled(*sys.argv[1:])
