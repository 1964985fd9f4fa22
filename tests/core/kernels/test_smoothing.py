"""`smooth` against `Sm`, against the iteration that it replaces, and its kernels against float64.

Needs torch and pytest alone: `pytest --noconftest tests/core/kernels/test_smoothing.py`.  Run as a script it is what
some tests start in a process of their own: `compiled [cuda]` or, with TRITON_INTERPRET=1, `interpreted`.
"""

import sys

import pytest
import torch
from torch import Tensor
from torch.func import vmap

from in_a_process import (
    assert_a_graph_serves_other_bags,
    assert_compiled_equals_eager,
    assert_script_passes,
    float32_products,
    let_interpreter_loop,
    needs_cuda,
    needs_triton,
    worst_error,
)
from normal_guidance.core.kernels.smoothing import smooth, stacked_kernel_gradient, stacked_smooth
from normal_guidance.core.layers import Sm
from normal_guidance.core.layout import Layout

ROWS, LONGEST, T = 93, 72, 10
FIRST, COUNT = [5, 0, 80, 2, 90], [70, 1, 5, 2, 0]
"""Three tiles, one row, two rows, an empty bag; bags in no order, with unused rows between them and at the end."""
ALPHA = 0.7

Inputs = tuple[Tensor, Tensor, Tensor, Tensor]


def make_inputs(
    configurations: int, features: int, dtype: torch.dtype = torch.float64, device: str = "cpu", steps: int = T
) -> Inputs:
    """Rows, symmetric kernels (float32 at least), first, count; garbage in unused rows."""
    torch.manual_seed(0)
    rows = torch.randn(configurations, ROWS, features).to(dtype)
    rows[:, dense_operator(steps).sum(1) == 0] = 1e4
    kernel = torch.rand(configurations, 2 * steps + 1)
    kernel = (kernel + kernel.flip(1)) / kernel.sum(1, keepdim=True) / 2
    kernel = kernel.double() if dtype == torch.float64 else kernel.to(dtype).float()
    rows, kernel, first, count = (t.to(device) for t in (rows, kernel, torch.tensor(FIRST), torch.tensor(COUNT)))
    return rows, kernel, first, count


def dense_operator(steps: int = T) -> Tensor:
    """T steps of g <- (1 - alpha) h + alpha D^-1 A g as one matrix, made by iterating on the identity."""
    neighbour = torch.zeros(ROWS, ROWS, dtype=torch.float64)
    used = torch.zeros(ROWS, dtype=torch.float64)
    for begin, length in zip(FIRST, COUNT, strict=True):
        used[begin : begin + length] = 1
        for row in range(begin, begin + length - 1):
            neighbour[row, row + 1] = neighbour[row + 1, row] = 1
        if length == 1:
            neighbour[begin, begin] = 1  # nothing to be smoothed with: it stays as it is
    walk = neighbour / neighbour.sum(1, keepdim=True).clamp_min(1)
    h = g = used.diag()
    for _ in range(steps):
        g = (1 - ALPHA) * h + ALPHA * walk @ g
    return g


def sm(steps: int = T) -> Sm:
    """The layer with alpha = ALPHA."""
    layer = Sm(steps).double()
    torch.nn.init.constant_(layer.raw_alpha, torch.logit(torch.tensor(ALPHA, dtype=torch.float64)).item())
    return layer


@pytest.mark.parametrize("steps", [1, 4, T])
def test_equals_the_iteration(steps: int) -> None:
    rows, _, first, count = make_inputs(1, 5)
    kernel = sm(steps).kernel()
    torch.testing.assert_close(smooth(rows[0], kernel, first, count, LONGEST), dense_operator(steps) @ rows[0])
    transposed = stacked_smooth(rows, kernel[None], first, count, LONGEST, True)[0]
    torch.testing.assert_close(transposed, dense_operator(steps).T @ rows[0])


def test_equals_the_layer_with_gradients() -> None:
    lengths = torch.tensor([1, 2, 3, 40, 7])
    rows = torch.randn(int(lengths.sum()), 4, dtype=torch.float64, requires_grad=True)
    layer, first = sm(), lengths.cumsum(0) - lengths
    want = layer(rows, Layout.packed(lengths))
    got = smooth(rows, layer.kernel(), first, lengths, longest=50)
    torch.testing.assert_close(got, want)
    side = torch.randn_like(want)
    leaves = [rows, layer.raw_alpha]
    for one, other in zip(torch.autograd.grad(got, leaves, side), torch.autograd.grad(want, leaves, side), strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("transposed", [False, True])
def test_gradients_and_those_of_rows_are_right(transposed: bool) -> None:
    first, count = torch.tensor([4, 0, 2]), torch.tensor([5, 1, 2])
    rows = torch.randn(2, 10, 2, dtype=torch.float64, requires_grad=True)
    half = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)

    def run(rows: Tensor, half: Tensor) -> Tensor:
        kernel = torch.cat([half.flip(1), half[:, 1:]], dim=1)
        return stacked_smooth(rows, kernel, first, count, 6, transposed)

    assert torch.autograd.gradcheck(run, (rows, half))
    assert torch.autograd.gradgradcheck(lambda rows: run(rows, half.detach()), (rows,))


def test_vmap_is_a_loop_over_configurations() -> None:
    rows, kernel, first, count = make_inputs(3, 4)
    over = (0, 0, None, None, None)
    got = vmap(smooth, over)(rows, kernel, first, count, LONGEST)
    shared = vmap(smooth, (None, *over[1:]))(rows[0], kernel, first, count, LONGEST)
    for c in range(3):
        torch.testing.assert_close(got[c], smooth(rows[c], kernel[c], first, count, LONGEST))
        torch.testing.assert_close(shared[c], smooth(rows[0], kernel[c], first, count, LONGEST))


def test_dtypes() -> None:
    rows, kernel, first, count = make_inputs(1, 4, torch.bfloat16)
    kernel.requires_grad_()
    smoothed = smooth(rows[0], kernel[0], first, count, LONGEST)
    smoothed.float().square().sum().backward()
    assert smoothed.dtype == torch.bfloat16
    assert kernel.grad is not None
    assert kernel.grad.dtype == torch.float32


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    assert_script_passes(__file__, "compiled")


@needs_triton
def test_kernels_equal_float64_in_tritons_interpreter() -> None:
    assert_script_passes(__file__, "interpreted", TRITON_INTERPRET="1")


def compiled(device: str = "cpu") -> None:
    """Forward and backward under compile(vmap), in float32."""
    rows, kernel, first, count = make_inputs(3, 33, torch.float32, device)
    leaves = [rows.requires_grad_(), kernel.requires_grad_()]

    def step(rows: Tensor, kernel: Tensor, first: Tensor, count: Tensor) -> Tensor:
        return vmap(smooth, (0, 0, None, None, None))(rows.tanh(), kernel, first, count, LONGEST).sin().sum()

    assert_compiled_equals_eager(step, leaves, first, count)


def interpreted() -> None:
    """The kernels on the CPU, tile by tile in numpy.  Float16 stands for bfloat16, which numpy does not multiply."""
    from normal_guidance.core.kernels import smoothing_triton

    let_interpreter_loop()
    torch.set_float32_matmul_precision("highest")
    cases = [(2, 129, torch.float32, T), (2, 40, torch.half, T), (1, 17, torch.float32, 1), (1, 16, torch.float32, 16)]
    worst = 0.0
    for configurations, features, dtype, steps in cases:
        rows, kernel, first, count = make_inputs(configurations, features, dtype, steps=steps)
        rows, gradient = rows[:1].expand_as(rows), rows.flip(2)
        bags = (first, count, LONGEST)
        got = (
            smoothing_triton.smooth(rows, kernel, *bags, False),
            smoothing_triton.smooth(gradient, kernel, *bags, True),
            smoothing_triton.kernel_gradient(gradient, rows, *bags, kernel.shape[1]),
        )
        worst = max(worst, check_against_float64(got, gradient, (rows, kernel, first, count)))
    print(f"largest difference {worst:.1e}")


def check_against_float64(
    got: tuple[Tensor, ...], gradient: Tensor, inputs: Inputs, tolerance: float | None = None
) -> float:
    """Check each output's error relative to its largest number, and return the largest such error."""
    rows, kernel, first, count = (tensor.cpu() for tensor in inputs)
    if tolerance is None:
        tolerance = 1e-6 if rows.dtype == torch.float32 else 2e-3
    rows, kernel, gradient = rows.double(), kernel.double(), gradient.cpu().double()
    want = (
        stacked_smooth(rows, kernel, first, count, LONGEST, False),
        stacked_smooth(gradient, kernel, first, count, LONGEST, True),
        stacked_kernel_gradient(gradient, rows, first, count, LONGEST, kernel.shape[1]),
    )
    for one, other in zip(got, want, strict=True):
        assert (one.cpu()[other == 0] == 0).all(), "unused rows are exactly zero"
    return worst_error(got, want, tolerance)


def forward_and_backward(inputs: Inputs) -> tuple[tuple[Tensor, ...], Tensor]:
    """Smoothed rows and both gradients, through vmap and autograd, and the gradient of the output."""
    rows, kernel, first, count = inputs
    leaves = [rows.clone().requires_grad_(), kernel.clone().requires_grad_()]
    smoothed = vmap(smooth, (0, 0, None, None, None))(*leaves, first, count, LONGEST)
    gradient = rows.flip(2)
    return (smoothed.detach(), *torch.autograd.grad(smoothed, leaves, gradient)), gradient


@needs_cuda
@pytest.mark.parametrize("features", [768, 129])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_cuda_equals_float64(dtype: torch.dtype, tolerance: float, features: int) -> None:
    inputs = make_inputs(3, features, dtype, "cuda")
    with float32_products("highest"):
        got, gradient = forward_and_backward(inputs)
        again, _ = forward_and_backward(inputs)
    check_against_float64(got, gradient, inputs, tolerance)
    assert all(map(torch.equal, got, again)), "two runs differ"


@needs_cuda
def test_cuda_in_tf32_and_in_float64() -> None:
    inputs = make_inputs(2, 129, torch.float32, "cuda")
    with float32_products("high"):
        check_against_float64(*forward_and_backward(inputs), inputs, 5e-3)
    inputs = make_inputs(2, 40, torch.float64, "cuda")
    check_against_float64(*forward_and_backward(inputs), inputs, 1e-12)


@needs_cuda
def test_cuda_graph_replays_with_other_bags() -> None:
    rows, kernel, first, count = make_inputs(2, 64, torch.bfloat16, "cuda")
    other_first, other_count = torch.tensor([0, 9, 20, 81, 84]).cuda(), torch.tensor([8, 3, 60, 2, 9]).cuda()

    def run(first: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        bags = (first, count, LONGEST)
        return (
            stacked_smooth(rows, kernel, *bags, False),
            stacked_smooth(rows, kernel, *bags, True),
            stacked_kernel_gradient(rows, rows, *bags, kernel.shape[1]),
        )

    assert_a_graph_serves_other_bags(run, (first, count), (other_first, other_count))


@needs_cuda
def test_cuda_compiled_equals_eager() -> None:
    assert_script_passes(__file__, "compiled", "cuda")


if __name__ == "__main__":
    {"compiled": compiled, "interpreted": interpreted}[sys.argv[1]](*sys.argv[2:])
