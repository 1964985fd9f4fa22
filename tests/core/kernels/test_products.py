"""`dot`, `pool` and `spread` against loops over the bags, and their kernels against float64.

Needs torch and pytest alone: `pytest --noconftest tests/core/kernels/test_products.py`.  Run as a script it is what
some tests start in a process of their own: `compiled [cuda]` or, with TRITON_INTERPRET=1, `interpreted`.
"""

import sys
from collections.abc import Callable
from functools import partial

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
from normal_guidance.core.kernels.products import dot, pool, spread, stacked_dot, stacked_pool, stacked_spread

ROWS, LONGEST = 93, 72
FIRST, COUNT = [5, 0, 80, 2, 90], [70, 1, 5, 2, 0]
"""Two tiles, one row, two rows, an empty bag; bags in no order, with unused rows between them and at the end."""

Inputs = tuple[Tensor, Tensor, Tensor, Tensor, Tensor]


def make_inputs(
    configurations: int, queries: int, features: int, dtype: torch.dtype = torch.float64, device: str = "cpu"
) -> Inputs:
    """Queries, rows, weights (float32 at least), first, count; garbage in unused rows and past the bags' ends."""
    torch.manual_seed(0)
    first, count = torch.tensor(FIRST), torch.tensor(COUNT)
    u = torch.randn(configurations, len(FIRST), queries, features).to(dtype)
    x = torch.randn(configurations, ROWS, features).to(dtype)
    a = torch.randn(configurations, len(FIRST), queries, LONGEST)
    a = a.masked_fill((torch.arange(LONGEST) >= count[:, None])[:, None], float("nan"))
    x[:, _unused()] = 1e4
    a = a if dtype != torch.float64 else a.double()
    u, x, a, first, count = (tensor.to(device) for tensor in (u, x, a, first, count))
    return u, x, a, first, count


def _unused() -> Tensor:
    used = torch.zeros(ROWS, dtype=torch.bool)
    for begin, length in zip(FIRST, COUNT, strict=True):
        used[begin : begin + length] = True
    return ~used


def by_hand(u: Tensor, x: Tensor, a: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Scores, pooled rows and spread queries of one configuration, bag by bag."""
    scores, pooled, spreaded = torch.zeros_like(a), torch.zeros_like(u), torch.zeros_like(x)
    for b, (begin, length) in enumerate(zip(FIRST, COUNT, strict=True)):
        own, shares = x[begin : begin + length], a[b, :, :length]
        scores[b, :, :length] = u[b] @ own.T
        pooled[b] = shares @ own
        spreaded[begin : begin + length] = shares.T @ u[b]
    return scores, pooled, spreaded


def three(u: Tensor, x: Tensor, a: Tensor, first: Tensor, count: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The three operations on one configuration; (C, ...) inputs go through `vmap(three, ...)`."""
    return dot(u, x, first, count, LONGEST), pool(a, x, first, count), spread(a, u, first, count, ROWS)


STACKED = (0, 0, 0, None, None)


def test_vmap_is_a_loop_over_configurations() -> None:
    u, x, a, first, count = make_inputs(3, 2, 5)
    for c in range(3):
        for got, want in zip(vmap(three, STACKED)(u, x, a, first, count), by_hand(u[c], x[c], a[c]), strict=True):
            torch.testing.assert_close(got[c], want)
    shared = vmap(three, (0, None, 0, None, None))(u, x[0], a, first, count)
    for got, want in zip(shared, by_hand(u[2], x[0], a[2]), strict=True):
        torch.testing.assert_close(got[2], want)
    moved = vmap(dot, (2, None, None, None, None), out_dims=1)(u.movedim(0, 2), x[1], first, count, LONGEST)
    torch.testing.assert_close(moved[:, 1], by_hand(u[1], x[1], a[1])[0])


def test_gradients_through_vmap_equal_the_loop() -> None:
    u, x, a, first, count = make_inputs(3, 2, 5)
    a = a.nan_to_num()
    leaves = [tensor.requires_grad_() for tensor in (u, x[0].clone(), a)]
    sides = [torch.randn_like(t) for t in vmap(three, (0, None, 0, None, None))(*leaves, first, count)]

    def total(outputs: list[tuple[Tensor, ...]]) -> Tensor:
        return sum((torch.stack(o) * side).sum() for o, side in zip(zip(*outputs, strict=True), sides, strict=True))

    stacked = vmap(three, (0, None, 0, None, None))(*leaves, first, count)
    got = torch.autograd.grad(total([tuple(o[c] for o in stacked) for c in range(3)]), leaves)
    want = torch.autograd.grad(total([by_hand(u[c], leaves[1], a[c]) for c in range(3)]), leaves)
    torch.testing.assert_close(got, want)


SMALL = (torch.tensor([3, 0, 5]), torch.tensor([2, 1, 3]))
CASES: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "dot": lambda u, x: stacked_dot(u, x, *SMALL, 4),
    "pool": lambda a, x: stacked_pool(a, x, *SMALL),
    "spread": lambda a, u: stacked_spread(a, u, *SMALL, 9),
}
SHAPES = {"a": (2, 3, 2, 4), "u": (2, 3, 2, 3), "x": (2, 9, 3)}


@pytest.mark.parametrize(("name", "inputs"), [("dot", "ux"), ("pool", "ax"), ("spread", "au")])
def test_gradients_and_theirs_are_right(name: str, inputs: str) -> None:
    tensors = [torch.randn(SHAPES[i], dtype=torch.float64, requires_grad=True) for i in inputs]
    assert torch.autograd.gradcheck(CASES[name], tensors)
    assert torch.autograd.gradgradcheck(CASES[name], tensors)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_dtypes(dtype: torch.dtype) -> None:
    scores, pooled, spreaded = vmap(three, STACKED)(*make_inputs(1, 2, 4, dtype))
    assert (scores.dtype, pooled.dtype, spreaded.dtype) == (torch.float32, dtype, dtype)


def test_mistakes_are_named() -> None:
    u, x, a, first, count = make_inputs(2, 2, 4)
    with pytest.raises(TypeError, match=r"queries are torch.float32 and rows torch.float64"):
        dot(u[0].float(), x[0], first, count, LONGEST)
    with pytest.raises(NotImplementedError, match="must be the same for all configurations"):
        vmap(pool, (0, 0, 0, None))(a, x, first.expand(2, -1), count)


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    assert_script_passes(__file__, "compiled")


@needs_triton
def test_kernels_equal_float64_in_tritons_interpreter() -> None:
    assert_script_passes(__file__, "interpreted", TRITON_INTERPRET="1")


def compiled(device: str = "cpu") -> None:
    """Forward and backward of all three under compile(vmap), rows shared, in float32."""
    u, x, a, first, count = make_inputs(3, 8, 32, torch.float32, device)
    leaves = [u.requires_grad_(), x[0].clone().requires_grad_(), a.nan_to_num().requires_grad_()]

    def loss(u: Tensor, x: Tensor, a: Tensor, first: Tensor, count: Tensor) -> Tensor:
        return sum(((i + 1) * o).sin().sum() for i, o in enumerate(three(u.tanh(), x.tanh(), a, first, count)))

    def step(*tensors: Tensor) -> Tensor:
        return vmap(loss, (0, None, 0, None, None))(*tensors).sum()

    assert_compiled_equals_eager(step, leaves, first, count)


def interpreted() -> None:
    """The kernels on the CPU, tile by tile in numpy.  Float16 stands for bfloat16, which numpy does not multiply."""
    from normal_guidance.core.kernels import products_triton

    let_interpreter_loop()
    torch.set_float32_matmul_precision("highest")
    cases = [(2, 8, 48, torch.float32), (1, 88, 20, torch.float32), (1, 150, 17, torch.float32), (2, 8, 32, torch.half)]
    worst = 0.0
    for configurations, queries, features, dtype in cases:
        u, x, a, first, count = make_inputs(configurations, queries, features, dtype)
        u, x = u[:1].expand_as(u), x.transpose(1, 2).contiguous().transpose(1, 2)
        got = (
            products_triton.dot(u, x, first, count, LONGEST),
            products_triton.pool(a, x, first, count),
            products_triton.spread(a, u, first, count, ROWS),
        )
        worst = max(worst, check_against_float64(got, (u, x, a, first, count)))
    print(f"largest difference {worst:.1e}")


def check_against_float64(got: tuple[Tensor, ...], inputs: Inputs, tolerance: float | None = None) -> float:
    """Check each output's error relative to its largest number, and return the largest such error."""
    u, x, a, first, count = (tensor.cpu() for tensor in inputs)
    if tolerance is None:
        tolerance = 1e-6 if x.dtype == torch.float32 else 2e-3
    shares = a.to(x.dtype).double()
    want = vmap(three, STACKED)(u.double(), x.double(), shares, first, count)
    for one, other in zip(got, want, strict=True):
        assert (one.cpu()[other == 0] == 0).all(), "what must be zero is exactly zero"
    return worst_error(got, want, tolerance)


@needs_cuda
@pytest.mark.parametrize("queries", [8, 88])
@pytest.mark.parametrize("features", [768, 129])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2)])
def test_cuda_equals_float64(dtype: torch.dtype, tolerance: float, features: int, queries: int) -> None:
    inputs = make_inputs(3, queries, features, dtype, "cuda")
    with float32_products("highest"):
        got, again = vmap(three, STACKED)(*inputs), vmap(three, STACKED)(*inputs)
    check_against_float64(got, inputs, tolerance)
    assert all(map(torch.equal, got, again)), "two runs differ"


@needs_cuda
def test_cuda_in_tf32_and_in_float64() -> None:
    inputs = make_inputs(2, 8, 768, torch.float32, "cuda")
    with float32_products("high"):
        check_against_float64(vmap(three, STACKED)(*inputs), inputs, 5e-3)
    inputs = make_inputs(2, 8, 64, torch.float64, "cuda")
    check_against_float64(vmap(three, STACKED)(*inputs), inputs, 1e-12)


@needs_cuda
def test_cuda_graph_replays_with_other_bags() -> None:
    u, x, a, first, count = make_inputs(2, 8, 64, torch.bfloat16, "cuda")
    other_first, other_count = torch.tensor([0, 9, 20, 81, 84]).cuda(), torch.tensor([8, 3, 60, 2, 9]).cuda()
    run = partial(vmap(three, STACKED), u, x, a.nan_to_num())
    assert_a_graph_serves_other_bags(run, (first, count), (other_first, other_count))


@needs_cuda
def test_cuda_beyond_two_billion_numbers() -> None:
    configurations, rows, features = 3, 1_000_000, 768
    if torch.cuda.mem_get_info()[0] < 4 * 2 * configurations * rows * features:
        pytest.skip("too little GPU memory for 2^31 numbers")
    first, count = torch.tensor([rows - 5]).cuda(), torch.tensor([3]).cuda()
    u = torch.randn(configurations, 1, 8, features, device="cuda", dtype=torch.bfloat16)
    a = torch.randn(configurations, 1, 8, 4, device="cuda").bfloat16().float()
    y = stacked_spread(a, u, first, count, rows)
    want = torch.einsum("cqj,cqm->cjm", a[:, 0, :, :3], u[:, 0].float())
    torch.testing.assert_close(y[:, -5:-2].float(), want, atol=0.1, rtol=1e-2)
    assert not y[:, -2:].any()
    assert not y[-1, : rows - 5].any()
    scores = stacked_dot(u, y, first, count, 4)
    torch.testing.assert_close(scores[:, 0, :, :3], u[:, 0].float() @ y[:, -5:-2].float().mT, atol=1, rtol=1e-2)


@needs_cuda
def test_cuda_compiled_equals_eager() -> None:
    assert_script_passes(__file__, "compiled", "cuda")


if __name__ == "__main__":
    {"compiled": compiled, "interpreted": interpreted}[sys.argv[1]](*sys.argv[2:])
