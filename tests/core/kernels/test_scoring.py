"""`tanh_scores` and `project_columns` against the formula, and the kernels against float64.

Needs torch and pytest alone: `pytest --noconftest tests/core/kernels/test_scoring.py`.  Run as a script it is what some
tests start in a process of their own: `compiled [cuda]` or, with TRITON_INTERPRET=1, `interpreted`.
"""

import contextlib
import sys

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from in_a_process import assert_compiled_equals_eager, assert_script_passes, needs_cuda, needs_triton
from normal_guidance.core.kernels.scoring import (
    project_columns,
    stacked_columns,
    stacked_scores,
    stacked_scores_gradients,
    tanh_scores,
)


def make_inputs(
    configurations: int, hidden: int, rows: int, inputs: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Rows, weight, bias and vector; the last two are float32 at least."""
    generator = torch.Generator().manual_seed(0)
    shapes = ((rows, inputs), (configurations, hidden, inputs), (configurations, hidden), (configurations, hidden))
    made = [torch.randn(shape, generator=generator, dtype=torch.float64) for shape in shapes]
    kinds = (dtype, dtype, *[torch.promote_types(dtype, torch.float32)] * 2)
    return tuple(tensor.to(device, kind) for tensor, kind in zip(made, kinds, strict=True))


def both(rows: Tensor, weight: Tensor, bias: Tensor, vector: Tensor) -> Tensor:
    return tanh_scores(project_columns(rows, weight), bias, vector)


def by_hand(rows: Tensor, weight: Tensor, bias: Tensor, vector: Tensor) -> Tensor:
    return torch.tanh(rows @ weight.T + bias) @ vector


STACKED = (None, 0, 0, 0)


def test_stacked_configurations_equal_the_formula_and_its_gradients() -> None:
    leaves = [tensor.requires_grad_() for tensor in make_inputs(3, 5, 7, 4)]
    got, want = vmap(both, STACKED)(*leaves), vmap(by_hand, STACKED)(*leaves)
    torch.testing.assert_close(got, want)
    side = torch.randn_like(want)
    for one, other in zip(
        torch.autograd.grad((got * side).sum(), leaves), torch.autograd.grad((want * side).sum(), leaves), strict=True
    ):
        torch.testing.assert_close(one, other)


def test_gradients_are_the_derivatives() -> None:
    rows, weight, bias, vector = (tensor.requires_grad_() for tensor in make_inputs(2, 3, 4, 3))
    assert torch.autograd.gradcheck(stacked_columns, (rows, weight))
    columns = stacked_columns(rows, weight).detach().requires_grad_()
    assert torch.autograd.gradcheck(stacked_scores, (columns, bias, vector))


def test_rows_of_their_own_are_refused() -> None:
    rows, weight, _, _ = make_inputs(2, 3, 4, 3)
    with pytest.raises(NotImplementedError, match="rows must be the same for all configurations"):
        vmap(project_columns)(rows.expand(2, -1, -1), weight)


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    assert_script_passes(__file__, "compiled")


@needs_triton
def test_kernels_equal_float64_in_tritons_interpreter() -> None:
    assert_script_passes(__file__, "interpreted", TRITON_INTERPRET="1")


def compiled(device: str = "cpu") -> None:
    """Forward and backward under compile(vmap), in float32."""
    leaves = [tensor.requires_grad_() for tensor in make_inputs(3, 8, 32, 16, torch.float32, device)]
    assert_compiled_equals_eager(lambda *tensors: vmap(both, STACKED)(*tensors).sin().sum(), leaves)


def largest_error(dtype: torch.dtype, device: str) -> float:
    """The largest error of an output, relative to its largest number; columns in both memory layouts."""
    from normal_guidance.core.kernels import scoring_triton

    worst = 0.0
    for hidden, rows in ((128, 200), (20, 70)):
        _, _, bias, vector = make_inputs(2, hidden, rows, 1, dtype, device)
        generator = torch.Generator().manual_seed(1)
        columns = torch.randn(2, hidden, rows, generator=generator).to(device, dtype)
        gradient = torch.randn(2, rows, generator=generator).to(device)
        exact = [tensor.double() for tensor in (gradient, columns, bias, vector)]
        want = (stacked_scores(*exact[1:]), *stacked_scores_gradients(*exact))
        for given in (columns, columns.mT.contiguous().mT):
            got = (scoring_triton.scores(given, bias, vector), *scoring_triton.gradients(gradient, given, bias, vector))
            for one, other in zip(got, want, strict=True):
                assert one.shape == other.shape
                worst = max(worst, ((one - other).abs().max() / other.abs().max()).item())
    return worst


def interpreted() -> None:
    """The kernels on the CPU; float16 stands for bfloat16, which numpy does not know."""
    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
    limits = {torch.float32: 1e-6, torch.half: 2e-3}
    errors = {kind: largest_error(kind, "cpu") for kind in limits}
    assert all(errors[kind] < limit for kind, limit in limits.items()), errors
    print(f"largest difference {max(errors.values()):.1e}")


@needs_cuda
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_cuda_equals_float64(dtype: torch.dtype, tolerance: float) -> None:
    assert largest_error(dtype, "cuda") < tolerance


@needs_cuda
def test_compiled_on_cuda() -> None:
    assert_script_passes(__file__, "compiled", "cuda")


if __name__ == "__main__":
    {"compiled": compiled, "interpreted": interpreted}[sys.argv[1]](*sys.argv[2:])
