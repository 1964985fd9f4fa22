"""`depthwise` against torch's convolution bag by bag and against PPEG, and its kernels against float64.

Needs torch and pytest alone: `pytest --noconftest tests/core/kernels/test_convolution.py`.  Run as a script it is what
some tests start in a process of their own: `compiled [cuda]` or, with TRITON_INTERPRET=1, `interpreted`.
"""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from in_a_process import (
    assert_a_graph_serves_other_bags,
    assert_compiled_equals_eager,
    assert_script_passes,
    let_interpreter_loop,
    needs_cuda,
    needs_triton,
    worst_error,
)
from normal_guidance.core.kernels.convolution import depthwise, stacked_depthwise, stacked_depthwise_backward
from normal_guidance.core.layers import PPEG
from normal_guidance.core.layout import Layout

LENGTHS, LONGEST, TAPS, UNUSED = [2, 1, 70, 3, 1, 9, 4, 3], 72, 7, 5
"""Adjacent bags shorter than the kernel, and one of several chunks; 106 rows do not fill whole tiles."""
GARBAGE = 1e4
OVER = (0, 0, 0, None, None, None)

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_inputs(
    configurations: int,
    features: int,
    dtype: torch.dtype = torch.float64,
    device: str = "cpu",
    taps: int = TAPS,
    lengths: list[int] = LENGTHS,
) -> Inputs:
    """Rows, weight and bias (float32 at least), first, lengths; garbage in unused rows."""
    torch.manual_seed(0)
    sizes = torch.tensor(lengths) + 1
    used = int(sizes.sum())
    rows = torch.randn(configurations, used + UNUSED, features)
    rows[:, used:] = GARBAGE
    weight, bias = torch.randn(configurations, features, taps), torch.randn(configurations, features)
    wide = torch.promote_types(dtype, torch.float32)
    tensors = (rows.to(dtype), weight.to(wide), bias.to(wide), sizes.cumsum(0) - sizes, torch.tensor(lengths))
    rows, weight, bias, first, count = (tensor.to(device) for tensor in tensors)
    return rows, weight, bias, first, count


def gradient_like(rows: Tensor) -> Tensor:
    """The gradient of the output, with garbage in unused rows too."""
    return rows.flip(2) + (rows == GARBAGE)


def bag_by_bag(rows: Tensor, weight: Tensor, bias: Tensor, lengths: list[int]) -> Tensor:
    """torch's convolution of one configuration, one bag after the other."""
    outputs, row = [], 0
    for length in lengths:
        token, slices = rows[row : row + length + 1].split([1, length])
        kernel = weight[:, None]
        encoded = F.conv1d(slices.T[None], kernel, bias, padding=weight.shape[1] // 2, groups=len(weight))
        outputs += [token, encoded[0].T]
        row += length + 1
    return torch.cat([*outputs, torch.zeros_like(rows[row:])])


@pytest.mark.parametrize("taps", [1, 3, TAPS])
def test_equals_torch_bag_by_bag(taps: int) -> None:
    rows, weight, bias, first, count = make_inputs(1, 5, taps=taps)
    leaves = [tensor[0].requires_grad_() for tensor in (rows, weight, bias)]
    got, want = depthwise(*leaves, first, count, LONGEST), bag_by_bag(*leaves, LENGTHS)
    torch.testing.assert_close(got, want)
    side = gradient_like(rows[0][None])[0].detach()
    torch.testing.assert_close(*(torch.autograd.grad(value, leaves, side) for value in (got, want)))


def test_equals_ppeg_on_packed_rows() -> None:
    rows, _, _, first, count = make_inputs(1, 8)
    ppeg = PPEG(8).double()
    weight, bias = ppeg._merged()
    got = depthwise(rows[0], weight, bias, first, count, LONGEST)[:-UNUSED]
    want = ppeg(rows[0, :-UNUSED], Layout.packed(count).with_class_token())
    torch.testing.assert_close(got, want)
    parameters = list(ppeg.parameters())
    torch.testing.assert_close(*(torch.autograd.grad(value.square().sum(), parameters) for value in (got, want)))


def test_gradients_are_the_derivatives() -> None:
    *floats, first, lengths = make_inputs(2, 2, lengths=[2, 1, 5])
    inputs = [tensor.requires_grad_() for tensor in floats]
    assert torch.autograd.gradcheck(lambda *leaves: stacked_depthwise(*leaves, first, lengths, 6), inputs)
    # Registration: schema, fake tensors and autograd agree with what the operators do.
    torch.library.opcheck(stacked_depthwise, (*inputs, first, lengths, 6))
    rows, weight = (tensor.detach() for tensor in floats[:2])
    torch.library.opcheck(stacked_depthwise_backward, (gradient_like(rows), rows, weight, first, lengths, 6))


def test_vmap_is_a_loop_over_configurations() -> None:
    *leaves, first, count = make_inputs(3, 4)
    leaves = [tensor.requires_grad_() for tensor in leaves]
    side = gradient_like(leaves[0]).detach()
    mapped = vmap(depthwise, OVER)(*leaves, first, count, LONGEST)
    looped = torch.stack([depthwise(*one, first, count, LONGEST) for one in zip(*leaves, strict=True)])
    torch.testing.assert_close(mapped, looped)
    torch.testing.assert_close(*(torch.autograd.grad(value, leaves, side) for value in (mapped, looped)))
    rows, weight, bias = leaves
    shared = vmap(depthwise, (None, *OVER[1:]))(rows[0], weight, bias, first, count, LONGEST)
    torch.testing.assert_close(shared[2], depthwise(rows[0], weight[2], bias[2], first, count, LONGEST))
    with pytest.raises(NotImplementedError, match="must be the same for all configurations"):
        vmap(lambda n: depthwise(rows[0], weight[0], bias[0], first, n, LONGEST))(count.expand(2, -1))


def test_dtypes_follow_rows_and_parameters() -> None:
    rows, weight, bias, first, count = make_inputs(1, 4, torch.bfloat16)
    leaves = [rows[0].requires_grad_(), weight[0].requires_grad_(), bias[0].requires_grad_()]
    out = depthwise(*leaves, first, count, LONGEST)
    assert out.dtype == torch.bfloat16
    gradients = torch.autograd.grad(out.float().sum(), leaves)
    assert [gradient.dtype for gradient in gradients] == [torch.bfloat16, torch.float32, torch.float32]


def test_a_kernel_without_a_middle_tap_is_refused() -> None:
    rows, weight, bias, first, count = make_inputs(1, 4, taps=6)
    with pytest.raises(ValueError, match="6 taps"):
        depthwise(rows[0], weight[0], bias[0], first, count, LONGEST)


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    assert_script_passes(__file__, "compiled")


@needs_triton
@pytest.mark.slow(but="many bags and one")
@pytest.mark.parametrize("case", ["wide rows", "half precision", "many bags and one"])
def test_kernels_equal_float64_in_tritons_interpreter(case: str) -> None:
    assert_script_passes(__file__, "interpreted", case, TRITON_INTERPRET="1")


def compiled(device: str = "cpu") -> None:
    """Forward and backward under compile(vmap), in float32."""
    *leaves, first, count = make_inputs(3, 33, torch.float32, device)
    leaves = [tensor.requires_grad_() for tensor in leaves]

    def step(rows: Tensor, weight: Tensor, bias: Tensor, first: Tensor, count: Tensor) -> Tensor:
        return vmap(depthwise, OVER)(rows.tanh(), weight, bias, first, count, LONGEST).sin().sum()

    assert_compiled_equals_eager(step, leaves, first, count)


def interpreted(case: str) -> None:
    """The kernels on the CPU, row by row in numpy.  Float16 stands for bfloat16, which numpy does not multiply."""
    from normal_guidance.core.kernels import convolution_triton

    let_interpreter_loop()
    many_bags = [1 + b % 3 for b in range(convolution_triton.TAPS_TILE + 3)]
    few, many = 1, convolution_triton.ENOUGH_PROGRAMS  # chunks of many groups, and of one
    cases = {
        "wide rows": [(2, 130, torch.float32, TAPS, LENGTHS, few)],
        "half precision": [(3, 33, torch.half, TAPS, LENGTHS, many)],
        "many bags and one": [(1, 17, torch.float32, 3, many_bags, many), (1, 8, torch.float32, 1, [150], few)],
    }
    worst = 0.0
    for configurations, features, dtype, taps, lengths, programs in cases[case]:
        convolution_triton.ENOUGH_PROGRAMS = programs
        rows, weight, bias, *bags = make_inputs(configurations, features, dtype, taps=taps, lengths=lengths)
        rows = rows[:1].expand_as(rows)  # a stride of 0, as from vmap
        gradient = gradient_like(rows).transpose(1, 2).contiguous().transpose(1, 2)
        out = convolution_triton.forward(rows, weight, bias, *bags)
        gradients = convolution_triton.backward(gradient, rows, weight, *bags)
        inputs = (rows, weight, bias, *bags)
        worst = max(worst, check_against_float64((out, *gradients), gradient, inputs, max(lengths)))
    print(f"largest difference {worst:.1e}")


def check_against_float64(
    got: tuple[Tensor, ...], gradient: Tensor, inputs: Inputs, longest: int, tolerance: float | None = None
) -> float:
    """Check each output's error relative to its largest number, and return the largest such error."""
    rows, weight, bias, first, count = (tensor.cpu() for tensor in inputs)
    if tolerance is None:
        tolerance = 2e-6 if rows.dtype == torch.float32 else 2e-3
    rows, weight, bias, gradient = (tensor.cpu().double() for tensor in (rows, weight, bias, gradient))
    bags = (first, count, longest)
    want = (stacked_depthwise(rows, weight, bias, *bags), *stacked_depthwise_backward(gradient, rows, weight, *bags))
    for one, other in zip(got[:2], (rows, gradient), strict=True):
        assert (one[:, -UNUSED:] == 0).all(), "unused rows are exactly zero"
        assert torch.equal(one.cpu()[:, first].double(), other[:, first]), "class tokens pass unchanged"
    return worst_error(got, want, tolerance)


def forward_and_backward(inputs: Inputs) -> tuple[tuple[Tensor, ...], Tensor]:
    """Outputs and all gradients, through vmap and autograd, and the gradient of the output."""
    *floats, first, count = inputs
    leaves = [tensor.clone().requires_grad_() for tensor in floats]
    out = vmap(depthwise, OVER)(*leaves, first, count, LONGEST)
    gradient = gradient_like(floats[0])
    return (out.detach(), *torch.autograd.grad(out, leaves, gradient)), gradient


@needs_cuda
@pytest.mark.parametrize("features", [768, 129])
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5), (torch.bfloat16, 1e-2)]
)
def test_cuda_equals_float64(dtype: torch.dtype, tolerance: float, features: int) -> None:
    inputs = make_inputs(3, features, dtype, "cuda")
    got, gradient = forward_and_backward(inputs)
    check_against_float64(got, gradient, inputs, LONGEST, tolerance)
    for one, again in zip(got, forward_and_backward(inputs)[0], strict=True):
        assert torch.equal(one, again), "two runs differ"


@needs_cuda
def test_cuda_at_the_size_of_a_sweep() -> None:
    """Chunks of many groups: 32 configurations, 2,796 rows, and bfloat16 parameters as well."""
    lengths = [39] * 60 + [390]
    rows, weight, bias, *bags = make_inputs(32, 768, torch.bfloat16, "cuda", lengths=lengths)
    weight, bias, gradient = weight.bfloat16(), bias.bfloat16(), gradient_like(rows)
    got = (
        stacked_depthwise(rows, weight, bias, *bags, max(lengths)),
        *stacked_depthwise_backward(gradient, rows, weight, *bags, max(lengths)),
    )
    ends = slice(None, None, 31)  # the first and the last configuration
    inputs = (rows[ends], weight[ends], bias[ends], *bags)
    check_against_float64(tuple(one[ends] for one in got), gradient[ends], inputs, max(lengths), 1e-2)


@needs_cuda
def test_cuda_graph_replays_with_other_bags() -> None:
    rows, weight, bias, first, count = make_inputs(2, 64, torch.bfloat16, "cuda")
    other_count = count.flip(0)
    other_first = (other_count + 1).cumsum(0) - other_count - 1

    def run(first: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        bags = (first, count, LONGEST)
        return stacked_depthwise(rows, weight, bias, *bags), *stacked_depthwise_backward(rows, rows, weight, *bags)

    assert_a_graph_serves_other_bags(run, (first, count), (other_first, other_count))


@needs_cuda
def test_cuda_beyond_two_billion_numbers() -> None:
    """Offsets between configurations can exceed 32 bits."""
    configurations, rows, features = 3, 1_000_000, 768
    x = torch.zeros(configurations, rows, features, dtype=torch.bfloat16, device="cuda")
    first, count = torch.tensor([0, rows - 6], device="cuda"), torch.tensor([rows - 7, 3], device="cuda")
    x[:, -6:-2] = torch.randn(configurations, 4, features, device="cuda").bfloat16()
    weight, bias = (torch.randn(configurations, *shape, device="cuda") for shape in ((features, TAPS), (features,)))
    out = stacked_depthwise(x, weight, bias, first, count, rows)[:, -6:].clone()
    small = stacked_depthwise(x[:, -6:], weight, bias, first[:1], count[1:], 3)
    assert torch.equal(out, small)


@needs_cuda
def test_cuda_compiled_equals_eager() -> None:
    assert_script_passes(__file__, "compiled", "cuda")


if __name__ == "__main__":
    {"compiled": compiled, "interpreted": interpreted}[sys.argv[1]](*sys.argv[2:])
