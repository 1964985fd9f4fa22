"""Ragged attention against torch's own, bag by bag, and its Triton kernels against the plain formula.

The kernels run in Triton's interpreter where triton is installed and on the GPU where there is one; both need torch
and pytest alone: `pytest --noconftest tests/core/kernels/test_self_attention.py`.  What dynamo or Triton must read
cannot carry run-time shape checks, so those tests start this file as a script.
"""

import sys
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap

from in_a_process import (
    assert_script_passes,
    float32_products,
    let_interpreter_loop,
    needs_cuda,
    needs_triton,
    worst_error,
)
from normal_guidance.core.kernels import self_attention
from normal_guidance.core.kernels.self_attention import attend

CONFIGS, UNUSED = 2, 5
GARBAGE = 1e4
"""The content of class tokens' rows and unused rows, which must not be read."""

# One tile or several; bags that fill a tile, miss it by one, or hold one slice; d = 4 to 96.
CASES = {
    "one tile": ([3, 1, 5], 6, 2, 32),
    "full tile": ([63, 1, 20], 63, 1, 96),
    "tiles": ([64, 1, 130, 63, 31], 140, 1, 96),
    "narrow tiles": ([64, 1, 65], 65, 1, 4),
}


def problem(
    lengths: list[int], heads: int, d: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    """qkv, token, first, lengths and the gradient of the output."""
    generator = torch.Generator().manual_seed(0)
    sizes = torch.tensor(lengths) + 1
    first, used = sizes.cumsum(0) - sizes, int(sizes.sum())
    shape = (CONFIGS, used + UNUSED, heads * d)
    qkv = torch.randn(*shape[:2], 3 * heads * d, generator=generator)
    token = torch.randn(CONFIGS, 3 * heads * d, generator=generator)
    grad = torch.randn(shape, generator=generator)
    qkv[:, first], qkv[:, used:], grad[:, used:] = GARBAGE, -GARBAGE, GARBAGE
    qkv, token, grad = (x.to(device, dtype) for x in (qkv, token, grad))
    return qkv, token, first.to(device), torch.tensor(lengths, device=device), grad


def bag_by_bag(qkv: Tensor, token: Tensor, lengths: list[int], heads: int) -> Tensor:
    """The same by torch's attention, one bag at a time."""
    outputs, row = [], 0
    for length in lengths:
        bag = torch.cat([token[:, None], qkv[:, row + 1 : row + 1 + length]], dim=1)
        q, k, v = bag.unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        outputs.append(F.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2))
        row += length + 1
    unused = qkv.new_zeros(qkv.shape[0], qkv.shape[1] - row, qkv.shape[2] // 3)
    return torch.cat([*outputs, unused], dim=1)


@pytest.mark.parametrize("case", CASES)
def test_equals_torch_bag_by_bag(case: str) -> None:
    lengths, longest, heads, d = CASES[case]
    qkv, token, first, counts, grad = problem(lengths, heads, d)
    inputs = [qkv.requires_grad_(), token.requires_grad_()]
    out = attend(qkv, token, first, counts, heads, longest)
    want = bag_by_bag(qkv, token, lengths, heads)
    torch.testing.assert_close(out, want)
    got_gradients, want_gradients = (torch.autograd.grad(value, inputs, grad) for value in (out, want))
    torch.testing.assert_close(got_gradients, want_gradients)
    for rows in (first, slice(-UNUSED, None)):
        assert (got_gradients[0][:, rows] == 0).all()


def test_gradients_are_the_derivatives() -> None:
    qkv, token, first, lengths, _ = problem([2, 1, 3], heads=2, d=2)
    inputs = (qkv.requires_grad_(), token.requires_grad_())
    assert torch.autograd.gradcheck(lambda q, t: attend(q, t, first, lengths, 2, 4), inputs)
    # Registration: schema, fake tensors and autograd agree with what the operator does.
    operator = torch.ops.normal_guidance.ragged_attend.default
    torch.library.opcheck(operator, (*inputs, first, lengths, 2, 4))


def test_vmap_equals_a_loop_over_configurations() -> None:
    qkv, token, first, lengths, grad = problem([3, 1, 5], heads=2, d=4)
    inputs = [qkv.requires_grad_(), token.requires_grad_()]

    def one(qkv: Tensor, token: Tensor) -> Tensor:
        return attend(qkv, token, first, lengths, heads=2, longest=5)

    mapped = vmap(one)(qkv, token)
    looped = torch.stack([one(*pair) for pair in zip(qkv, token, strict=True)])
    torch.testing.assert_close(mapped, looped)
    torch.testing.assert_close(*(torch.autograd.grad(value, inputs, grad) for value in (mapped, looped)))
    # What the configurations share, and dimensions that are not the first.
    torch.testing.assert_close(vmap(one, in_dims=(None, 0))(qkv[0], token)[0], looped[0])
    torch.testing.assert_close(vmap(one, in_dims=(1, 0))(qkv.movedim(0, 1), token), looped)
    with pytest.raises(NotImplementedError, match="must be the same for all configurations"):
        vmap(lambda n: attend(qkv, token, first, n, 2, 5))(lengths.expand(2, -1))


@pytest.mark.slow
def test_compiled_vmap_equals_eager() -> None:
    assert_script_passes(__file__, "compiled", "cpu")


@needs_triton
@pytest.mark.slow(but="one tile, narrow tiles")
@pytest.mark.parametrize("cases", ["one tile, narrow tiles", "full tile, tiles"])
def test_kernels_interpreted(cases: str) -> None:
    assert_script_passes(__file__, "interpreted", cases, TRITON_INTERPRET="1")


@needs_cuda
def test_compiled_vmap_equals_eager_on_cuda() -> None:
    assert_script_passes(__file__, "compiled", "cuda")


# Roundings of inputs to 8 bits (bfloat16) and 11 (tf32), and of attention weights on the way.
CUDA_TOLERANCE = {"bfloat16": 3e-2, "tf32": 5e-3, "float32": 2e-5}


@needs_cuda
@pytest.mark.parametrize("kind", CUDA_TOLERANCE)
@pytest.mark.parametrize("case", CASES)
def test_cuda_equals_the_cpu_in_float64(case: str, kind: str) -> None:
    lengths, longest, heads, d = CASES[case]
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    with float32_products("highest" if kind == "float32" else "high"):
        assert_kernels_agree(problem(lengths, heads, d, dtype, "cuda"), heads, longest, CUDA_TOLERANCE[kind])


@needs_cuda
@pytest.mark.parametrize("longest", [60, 300])
def test_cuda_graph_serves_other_bags_and_repeats_exactly(longest: int) -> None:
    """A graph captured once works with other lengths: nothing waits for the host, and no shape depends on them."""
    heads, d, rows = 2, 96, 3 * (longest + 1) + UNUSED
    qkv = torch.randn(CONFIGS, rows, 3 * heads * d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    token = torch.randn(CONFIGS, 3 * heads * d, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(CONFIGS, rows, heads * d, device="cuda", dtype=torch.bfloat16)
    lengths = torch.full((3,), longest, device="cuda")
    first = torch.arange(3, device="cuda") * (longest + 1)

    def step() -> tuple[Tensor, ...]:
        out = attend(qkv, token, first, lengths, heads, longest)
        return out, *torch.autograd.grad(out, [qkv, token], grad)

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        step()  # compiles
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    lengths.copy_(torch.tensor([7, longest, 1]))
    first.copy_(torch.tensor([0, 8, 9 + longest]))
    graph.replay()
    torch.cuda.synchronize()
    for got, want in zip(captured, step(), strict=True):
        assert torch.equal(got, want)


def assert_kernels_agree(inputs: tuple[Tensor, ...], heads: int, longest: int, tolerance: float) -> None:
    """Triton's forward and backward against the formula in float64."""
    from normal_guidance.core.kernels import self_attention_triton

    qkv, token, first, lengths, grad = inputs
    bags = first, lengths, heads, longest
    out, lse = self_attention_triton.forward(qkv, token, *bags)
    gradients = self_attention_triton.backward(grad, qkv, token, out, lse, *bags)
    exact = qkv.double(), token.double()
    want, want_lse = self_attention.reference_forward(*exact, *bags)
    want_gradients = self_attention.reference_backward(grad.double(), *exact, want_lse, *bags)
    used = slice(None, -UNUSED)
    worst_error((out, lse[..., used], *gradients), (want, want_lse[..., used], *want_gradients), tolerance)
    for value, rows in ((out, slice(-UNUSED, None)), (gradients[0], slice(-UNUSED, None)), (gradients[0], first)):
        assert (value[:, rows] == 0).all()


def compiled(device: str) -> None:
    """compile(vmap(loss)), then the gradient of the sum, as in the sweep."""
    dtype = torch.float64 if device == "cpu" else torch.float32
    qkv, token, first, lengths, grad = problem([3, 1, 5], 2, 16, dtype, device)
    inputs = [qkv.requires_grad_(), token.requires_grad_()]

    def loss(qkv: Tensor, token: Tensor, grad: Tensor) -> Tensor:
        return (attend(qkv * 2, token * 2, first, lengths, heads=2, longest=5).tanh() * grad).sum()

    results = []
    for step in (vmap(loss), torch.compile(vmap(loss), fullgraph=True)):
        values = step(*inputs, grad)
        results.append([values, *torch.autograd.grad(values.sum(), inputs)])
    torch.testing.assert_close(*results)


def interpreted(cases: str) -> None:
    """The kernels in Triton's interpreter; float16 stands for bfloat16, which it cannot multiply (triton 3.6)."""
    let_interpreter_loop()
    for case, (dtype, tolerance) in product(cases.split(", "), ((torch.float32, 2e-6), (torch.float16, 2e-3))):
        lengths, longest, heads, d = CASES[case]
        assert_kernels_agree(problem(lengths, heads, d, dtype), heads, longest, tolerance)


if __name__ == "__main__":
    {"compiled": compiled, "interpreted": interpreted}[sys.argv[1]](sys.argv[2])
    print("largest difference within the tolerance")
