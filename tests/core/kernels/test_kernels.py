"""Each operation on bags against a loop over them, and its Triton kernels against the plain formula in float64.

Those on CUDA need torch, numpy and pytest alone: `pytest --noconftest tests/core/kernels -k cuda`.  What dynamo or
Triton must read cannot carry run-time shape checks, so those tests start this file as a script: `compiled DEVICE`
or, with TRITON_INTERPRET=1, `interpreted CASE`.
"""

import contextlib
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.func import vmap
from torch.utils._python_dispatch import TorchDispatchMode

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
from normal_guidance.core.kernels import products
from normal_guidance.core.kernels.convolution import depthwise, stacked_depthwise
from normal_guidance.core.kernels.products import dot, pool, stacked_dot, stacked_spread
from normal_guidance.core.kernels.scoring import project_columns, tanh_scores
from normal_guidance.core.kernels.self_attention import attend
from normal_guidance.core.kernels.smoothing import smooth
from same import assert_same

GARBAGE = 1e4  # the content of rows that must not be read


class Bags(NamedTuple):
    """Where bags lie among the rows."""

    first: Tensor
    count: Tensor
    longest: int
    rows: int

    def of(self, rows: Tensor) -> list[Tensor]:
        """Each bag's own rows."""
        pairs = zip(self.first.tolist(), self.count.tolist(), strict=True)
        return [rows[begin : begin + count] for begin, count in pairs]

    def with_tokens(self) -> "Bags":
        return self._replace(count=self.count + 1)

    def without_tokens(self) -> "Bags":
        return self._replace(first=self.first + 1)

    def to(self, device: str) -> "Bags":
        return self._replace(first=self.first.to(device), count=self.count.to(device))


SCATTERED = Bags(torch.tensor([5, 0, 80, 2, 90]), torch.tensor([70, 1, 5, 2, 0]), longest=72, rows=93)
"""Several tiles, one row, two rows, an empty bag; bags in no order, with unused rows between them and at the end."""

SMALL = Bags(torch.tensor([3, 0, 5]), torch.tensor([2, 1, 3]), longest=4, rows=9)


def slotted(*lengths: int) -> Bags:
    """Bags one after the other, each after a row for its class token, and five unused rows."""
    sizes = torch.tensor(lengths) + 1
    return Bags(sizes.cumsum(0) - sizes, torch.tensor(lengths), max(lengths), int(sizes.sum()) + 5)


SLOTTED = slotted(2, 1, 70, 3, 1, 9, 4, 3)
"""Adjacent bags shorter than a kernel of seven taps, and one of several chunks."""


@dataclass(frozen=True, eq=False)
class Operation:
    """An operation on one configuration, and the same by hand: functions of some tensors and of the bags."""

    run: Callable[..., Tensor]
    by_hand: Callable[..., Tensor]
    shapes: tuple[tuple[int, ...], ...]
    bags: Bags = SCATTERED
    reads: Callable[[Bags], Bags] = lambda bags: bags  # the bags of all rows that may be read
    rows: int = 0  # the number of the tensor that holds the rows; configurations may share it
    wide: tuple[int, ...] = ()  # the numbers of those that are float32 at least
    widens: bool = False  # whether the result is float32 at least
    shared: bool = False  # whether all configurations must have the same rows
    symmetric: int | None = None  # the number of the tensor that is

    def dims(self, shared: bool) -> tuple[int | None, ...]:
        """The dimensions of configurations in the tensors, for `vmap`."""
        shared = shared or self.shared
        return tuple(None if shared and number == self.rows else 0 for number in range(len(self.shapes)))

    def inputs(self, configurations: int, dtype: torch.dtype = torch.float64, device: str = "cpu") -> list[Tensor]:
        """The tensors, whose numbers `dtype` can represent, with garbage in what must not be read."""
        torch.manual_seed(0)
        tensors = [torch.randn(configurations, *shape) for shape in self.shapes]
        for number, tensor in enumerate(tensors):
            if tensor.shape[1] == self.bags.rows:
                unread = torch.ones(self.bags.rows, dtype=torch.bool)
                unread[torch.cat(self.reads(self.bags).of(torch.arange(self.bags.rows)))] = False
                tensor[:, unread] = GARBAGE
            if tensor.ndim == 4 and tensor.shape[3] == self.bags.longest:  # weights of each bag's rows
                beyond = torch.arange(self.bags.longest) >= self.bags.count[:, None]
                tensor.masked_fill_(beyond[:, None], torch.nan)
            if number == self.symmetric:
                tensor += tensor.flip(1)
        kinds = [torch.promote_types(dtype, torch.float32) if i in self.wide else dtype for i in range(len(tensors))]
        return [tensor.to(dtype).to(device, kind) for tensor, kind in zip(tensors, kinds, strict=True)]


def in_place(pieces: list[Tensor], bags: Bags) -> Tensor:
    """The bags' rows where they belong, and 0 in the other rows."""
    index = torch.cat(bags.of(torch.arange(bags.rows)))
    return pieces[0].new_zeros(bags.rows, pieces[0].shape[1]).index_put((index,), torch.cat(pieces))


def dot_by_hand(queries: Tensor, rows: Tensor, bags: Bags) -> Tensor:
    pairs = zip(queries, bags.of(rows), strict=True)
    return torch.stack([F.pad(u @ own.T, (0, bags.longest - len(own))) for u, own in pairs])


def pool_by_hand(weights: Tensor, rows: Tensor, bags: Bags) -> Tensor:
    return torch.stack([a[:, : len(own)] @ own for a, own in zip(weights, bags.of(rows), strict=True)])


def spread(weights: Tensor, queries: Tensor, bags: Bags) -> Tensor:
    return stacked_spread(weights[None], queries[None], bags.first, bags.count, bags.rows).squeeze(0)


def spread_by_hand(weights: Tensor, queries: Tensor, bags: Bags) -> Tensor:
    each = zip(weights, queries, bags.count.tolist(), strict=True)
    return in_place([a[:, :count].T @ u for a, u, count in each], bags)


def of_products(queries: int, features: int, bags: Bags = SCATTERED) -> dict[str, Operation]:
    u, a = (len(bags.first), queries, features), (len(bags.first), queries, bags.longest)
    x, options = (bags.rows, features), {"bags": bags, "rows": 1}
    return {
        "dot": Operation(lambda u, x, b: dot(u, x, *b[:3]), dot_by_hand, (u, x), widens=True, **options),
        "pool": Operation(lambda a, x, b: pool(a, x, *b[:2]), pool_by_hand, (a, x), wide=(0,), **options),
        "spread": Operation(spread, spread_by_hand, (a, u), wide=(0,), **options),
    }


def smooth_by_hand(rows: Tensor, kernel: Tensor, bags: Bags) -> Tensor:
    """Mirrored at a bag's ends by numpy."""
    smoothed = []
    for own in bags.of(rows):
        mirrored = own[np.pad(np.arange(len(own)), len(kernel) // 2, mode="reflect")] if len(own) else own
        smoothed.append(sum(tap * mirrored[k : k + len(own)] for k, tap in enumerate(kernel)))
    return in_place(smoothed, bags)


def of_smoothing(features: int, taps: int = 21, bags: Bags = SCATTERED) -> Operation:
    shapes = ((bags.rows, features), (taps,))
    return Operation(lambda x, k, b: smooth(x, k, *b[:3]), smooth_by_hand, shapes, bags, wide=(1,), symmetric=1)


def depthwise_by_hand(rows: Tensor, weight: Tensor, bias: Tensor, bags: Bags) -> Tensor:
    """Class tokens as they are, and torch's convolution."""
    outputs, margin = [], weight.shape[1] // 2
    for bag in bags.with_tokens().of(rows):
        encoded = F.conv1d(bag[1:].T[None], weight[:, None], bias, padding=margin, groups=len(weight))
        outputs.append(torch.cat([bag[:1], encoded[0].T]))
    return in_place(outputs, bags.with_tokens())


def of_convolution(features: int, taps: int = 7, bags: Bags = SLOTTED, wide: tuple[int, ...] = (1, 2)) -> Operation:
    shapes = ((bags.rows, features), (features, taps), (features,))
    run, options = lambda x, w, c, b: depthwise(x, w, c, *b[:3]), {"reads": Bags.with_tokens, "wide": wide}
    return Operation(run, depthwise_by_hand, shapes, bags, **options)


def of_scores(hidden: int, rows: int, inputs: int) -> Operation:
    """It has no bags."""
    shapes = ((rows, inputs), (hidden, inputs), (hidden,), (hidden,))
    return Operation(
        lambda x, w, c, v, _: tanh_scores(project_columns(x, w), c, v),
        lambda x, w, c, v, _: torch.tanh(x @ w.T + c) @ v,
        shapes,
        wide=(2, 3),
        widens=True,
        shared=True,
    )


def of_attention(heads: int, d: int, bags: Bags) -> Operation:
    """Torch's attention by hand; the token replaces the first row of a bag."""

    def by_hand(qkv: Tensor, token: Tensor, bags: Bags) -> Tensor:
        outputs = []
        for bag in bags.with_tokens().of(qkv):
            q, k, v = torch.cat([token[None], bag[1:]]).unflatten(-1, (3, heads, -1)).permute(1, 2, 0, 3)
            outputs.append(F.scaled_dot_product_attention(q, k, v).transpose(0, 1).flatten(1))
        return in_place(outputs, bags.with_tokens())

    def run(qkv: Tensor, token: Tensor, bags: Bags) -> Tensor:
        return attend(qkv, token, bags.first, bags.count, heads, bags.longest)

    shapes = ((bags.rows, 3 * heads * d), (3 * heads * d,))
    return Operation(run, by_hand, shapes, bags, Bags.without_tokens)


# One tile or several; bags that fill a tile, miss it by one, or hold one slice; d = 4 to 96.
ATTENTION = {
    "attend, one tile": of_attention(2, 32, slotted(3, 1, 5)),
    "attend, full tile": of_attention(1, 96, slotted(63, 1, 20)),
    "attend, tiles": of_attention(1, 96, slotted(64, 1, 130, 63, 31)),
    "attend, narrow tiles": of_attention(1, 4, slotted(64, 1, 65)),
}

OPERATIONS = {
    **of_products(2, 5),
    "smooth": of_smoothing(5),
    **{f"depthwise, {taps} taps": of_convolution(5, taps) for taps in (1, 3, 7)},
    "scores": of_scores(5, 7, 4),
    **ATTENTION,
}
ONE_EACH = ("dot", "pool", "spread", "smooth", "depthwise, 7 taps", "scores", "attend, one tile")
EACH = pytest.mark.parametrize("name", ONE_EACH)


def stacked(operation: Operation, tensors: list[Tensor], bags: Bags, shared: bool = False) -> Tensor:
    """The operation on all configurations; if `shared`, with the rows of the first."""
    dims = operation.dims(shared)
    given = [tensor if dim == 0 else tensor[0] for tensor, dim in zip(tensors, dims, strict=True)]
    return vmap(lambda *own: operation.run(*own, bags), dims)(*given)


@pytest.mark.parametrize("shared", [False, True], ids=["own rows", "shared rows"])
@pytest.mark.parametrize("name", OPERATIONS)
def test_values_and_gradients_are_those_by_hand(name: str, shared: bool) -> None:
    operation = OPERATIONS[name]
    leaves, dims = [tensor.requires_grad_() for tensor in operation.inputs(3)], operation.dims(shared)
    got = stacked(operation, leaves, operation.bags, shared)
    each = [[leaf[c if dim == 0 else 0] for leaf, dim in zip(leaves, dims, strict=True)] for c in range(3)]
    want = torch.stack([operation.by_hand(*own, operation.bags) for own in each])
    assert_same(got, want, leaves)
    torch.testing.assert_close(operation.run(*each[2], operation.bags), want[2])  # without vmap


@EACH
def test_configurations_may_lie_in_another_dimension(name: str) -> None:
    operation = OPERATIONS[name]
    tensors, number = operation.inputs(3), 1 - operation.rows
    moved = [tensor.movedim(0, 1) if i == number else tensor[0] for i, tensor in enumerate(tensors)]
    dims = tuple(1 if i == number else None for i in range(len(tensors)))
    got = vmap(lambda *own: operation.run(*own, operation.bags), dims, out_dims=1)(*moved)
    own = [tensor[2 if i == number else 0] for i, tensor in enumerate(tensors)]
    torch.testing.assert_close(got[:, 2], operation.by_hand(*own, operation.bags))


@pytest.mark.parametrize("name", ["dot", "pool", "spread", "smooth"])
def test_gradients_of_gradients_are_right(name: str) -> None:
    operation = (of_products(2, 3, SMALL) | {"smooth": of_smoothing(2, 7, SMALL)})[name]
    *leaves, last = [tensor.nan_to_num().requires_grad_() for tensor in operation.inputs(2)]
    rest = [last.detach()] if name == "smooth" else []  # a changed kernel would not be symmetric
    leaves += [] if rest else [last]
    assert torch.autograd.gradgradcheck(lambda *own: stacked(operation, [*own, *rest], SMALL), leaves)


class Recorded(TorchDispatchMode):
    """Keeps the calls of our operators."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: dict[Any, tuple[Any, ...]] = {}

    def __torch_dispatch__(self, function: Any, types: Any, arguments: Any = (), options: Any = None) -> Any:
        if function.namespace == "normal_guidance":
            self.calls[function] = arguments
        return function(*arguments, **(options or {}))


@EACH
def test_operators_are_registered_as_they_work(name: str, unchecked: None) -> None:
    """Schema, fake tensors and autograd agree with what the operators do, forward and backward."""
    # Unchecked, since a traced number is not an int.
    small = {"smooth": of_smoothing(2, 3, SMALL), "depthwise, 7 taps": of_convolution(2, 3, slotted(2, 1, 5))}
    operation = ({**OPERATIONS, **of_products(2, 3, SMALL)} | small)[name]
    leaves = [tensor.nan_to_num().requires_grad_() for tensor in operation.inputs(2)]
    with Recorded() as forward:
        out = stacked(operation, leaves, operation.bags)
    with Recorded() as backward:
        torch.autograd.grad(out.square().sum(), leaves)
    assert forward.calls
    assert backward.calls or name == "scores"
    for calls, differentiable in ((forward.calls, True), (backward.calls, False)):
        for function, arguments in calls.items():
            copies = [value.detach().clone() if isinstance(value, Tensor) else value for value in arguments]
            for value in copies:
                if differentiable and isinstance(value, Tensor) and value.is_floating_point():
                    value.requires_grad_()
            torch.library.opcheck(function, tuple(copies))


@EACH
def test_dtypes_follow_the_rows(name: str) -> None:
    operation = OPERATIONS[name]
    leaves = [tensor.requires_grad_() for tensor in operation.inputs(2, torch.bfloat16)]
    out = stacked(operation, leaves, operation.bags)
    assert out.dtype == (torch.float32 if operation.widens else torch.bfloat16)
    assert all(gradient.isfinite().any() for gradient in torch.autograd.grad(out.float().sum(), leaves))


def test_mistakes_are_named() -> None:
    queries, rows = (tensor[0] for tensor in OPERATIONS["dot"].inputs(1))
    with pytest.raises(TypeError, match=r"queries are torch.float32 and rows torch.float64"):
        dot(queries.float(), rows, *SCATTERED[:3])
    with pytest.raises(NotImplementedError, match=r"places of bags .* must be the same for all configurations"):
        vmap(lambda count: dot(queries, rows, SCATTERED.first, count, 72))(SCATTERED.count.expand(2, -1))
    with pytest.raises(NotImplementedError, match="the rows must be the same for all configurations"):
        vmap(project_columns, (0, None))(rows.expand(2, -1, -1), rows)
    operation = of_convolution(4, taps=6)
    with pytest.raises(ValueError, match="6 taps"):
        operation.run(*(tensor[0] for tensor in operation.inputs(1)), SLOTTED)


def forward_and_backward(
    operation: Operation, tensors: list[Tensor], bags: Bags, shared: bool = False, side: Tensor | None = None
) -> tuple[Tensor, ...]:
    """The result and the gradients of all tensors, for numbers that the rows' dtype can represent."""
    leaves = [tensor.detach().requires_grad_() for tensor in tensors]
    out = stacked(operation, leaves, bags, shared)
    side = gradient_for(out) if side is None else side
    return out.detach(), *torch.autograd.grad(out, leaves, side)


def gradient_for(out: Tensor) -> Tensor:
    """A gradient as it may come: turned round in memory."""
    side = torch.randn(out.shape[::-1], generator=torch.Generator().manual_seed(1)).to(torch.bfloat16)
    return side.to(out.device, out.dtype).permute(*reversed(range(out.ndim)))


def assert_kernels_equal_float64(
    operation: Operation,
    dtype: torch.dtype,
    tolerance: float,
    device: str = "cpu",
    *,
    turned: bool = False,
    exact_on: str = "cpu",
) -> None:
    """Errors relative to the largest number of each output; `turned`: rows are shared, others turned in memory."""
    tensors, bags = operation.inputs(2, dtype, device), operation.bags.to(device)
    if turned:
        tensors = [tensor.mT.contiguous().mT if tensor.ndim > 2 else tensor for tensor in tensors]
    got = forward_and_backward(operation, tensors, bags, turned)
    exact = [tensor.to(exact_on, torch.float64) for tensor in tensors]
    want = forward_and_backward(operation, exact, bags.to(exact_on), turned)
    for value, exactly in zip(got, want, strict=True):
        assert (value.cpu()[exactly.cpu() == 0] == 0).all(), "what must be zero is exactly zero"
    if operation.by_hand is depthwise_by_hand:
        assert torch.equal(got[0][:, bags.first].double().cpu(), want[0][:, bags.first.to(exact_on)].cpu()), "tokens"
    worst_error(got, want, tolerance)
    if device == "cuda":
        again = forward_and_backward(operation, tensors, bags, turned)
        assert all(map(torch.equal, got, again)), "two runs differ"


FEW, MANY = 1, 4096  # programs that are enough for a convolution: its chunks then have many groups of rows, or one
HALF, SINGLE = torch.half, torch.float32
"""Float16 stands for bfloat16 in the interpreter, since numpy does not multiply that."""

INTERPRETED = {
    "products": [
        (operation, dtype, MANY)
        for queries, features, dtype in ((8, 48, SINGLE), (88, 20, SINGLE), (150, 17, SINGLE), (9, 32, HALF))
        for operation in of_products(queries, features).values()
    ],
    "smooth": [
        (of_smoothing(features, taps), dtype, MANY)
        for features, taps, dtype in ((129, 21, SINGLE), (40, 21, HALF), (17, 3, SINGLE), (16, 33, SINGLE))
    ],
    "depthwise, wide rows": [(of_convolution(130), SINGLE, FEW)],
    "depthwise, half precision": [(of_convolution(33), HALF, MANY)],
    "depthwise, many bags and one": [
        (of_convolution(17, 3, slotted(*(1 + number % 3 for number in range(67)))), SINGLE, MANY),
        (of_convolution(8, 1, slotted(150)), SINGLE, FEW),
    ],
    "scores": [
        (of_scores(128, 200, 3), SINGLE, MANY),
        *((of_scores(20, 70, 3), kind, MANY) for kind in (SINGLE, HALF)),
    ],
    **{name: [(operation, kind, MANY) for kind in (SINGLE, HALF)] for name, operation in ATTENTION.items()},
}


@needs_triton
@pytest.mark.slow(
    but=("products", "smooth", "depthwise, many bags and one", "scores", "attend, one tile", "attend, narrow tiles")
)
@pytest.mark.parametrize("case", INTERPRETED)
def test_kernels_equal_float64_in_tritons_interpreter(case: str) -> None:
    assert_script_passes(__file__, "interpreted", case, TRITON_INTERPRET="1")


def interpreted(case: str) -> None:
    """The operators launch their kernels on the CPU, tile by tile in numpy."""
    from normal_guidance.core.kernels import convolution_triton

    let_interpreter_loop()
    torch.cuda.device_of = lambda tensor: contextlib.nullcontext()
    products.runs_in_triton = lambda *values: values[0].dtype != torch.float64
    for operation, dtype, convolution_triton.ENOUGH_PROGRAMS in INTERPRETED[case]:
        assert_kernels_equal_float64(operation, dtype, 2e-6 if dtype == SINGLE else 2e-3, turned=True)


def compiled(device: str) -> None:
    """Forward and backward under compile(vmap), in float32."""
    for name in ONE_EACH:
        operation = OPERATIONS[name]
        bags, dims = operation.bags.to(device), operation.dims(False)
        tensors = zip(operation.inputs(3, torch.float32, device), dims, strict=True)
        leaves = [(tensor if dim == 0 else tensor[0]).nan_to_num().requires_grad_() for tensor, dim in tensors]

        def step(*given: Tensor, operation: Operation = operation, bags: Bags = bags, dims: Any = dims) -> Tensor:
            *own, first, count = given
            moved = bags._replace(first=first, count=count)
            return vmap(lambda *own: operation.run(*own, moved), dims)(*(tensor.tanh() for tensor in own)).sin().sum()

        assert_compiled_equals_eager(step, leaves, bags.first, bags.count)


@pytest.mark.slow
def test_compiled_equals_eager() -> None:
    assert_script_passes(__file__, "compiled", "cpu")


@needs_cuda
def test_cuda_compiled_equals_eager() -> None:
    assert_script_passes(__file__, "compiled", "cuda")


TOLERANCE = {"float32": 1e-5, "tf32": 5e-3, "bfloat16": 1e-2}
"""Roundings of inputs to 8 bits (bfloat16) and 11 (tf32), and of attention weights on the way."""

ON_CUDA = {
    **{f"{name}, {q} x {m}": o for q in (8, 88) for m in (768, 129) for name, o in of_products(q, m).items()},
    **{f"smooth {features}": of_smoothing(features) for features in (768, 129)},
    **{f"depthwise {features}": of_convolution(features) for features in (768, 129)},
    "scores": of_scores(128, 200, 16),
    **ATTENTION,
}


@needs_cuda
@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", TOLERANCE)
@pytest.mark.parametrize("name", ON_CUDA)
def test_cuda_equals_float64(name: str, kind: str, turned: bool) -> None:
    tolerance = TOLERANCE[kind] if kind == "tf32" or name not in ATTENTION else 3 * TOLERANCE[kind]
    dtype = torch.bfloat16 if kind == "bfloat16" else torch.float32
    with float32_products("high" if kind == "tf32" else "highest"):
        assert_kernels_equal_float64(ON_CUDA[name], dtype, tolerance, "cuda", turned=turned)


@needs_cuda
def test_cuda_at_the_size_of_a_sweep() -> None:
    """Chunks of many groups: 2,796 rows, and bfloat16 parameters as well."""
    operation = of_convolution(768, bags=slotted(*[39] * 60, 390), wide=())
    assert_kernels_equal_float64(operation, torch.bfloat16, 1e-2, "cuda", exact_on="cuda")


@needs_cuda
@pytest.mark.parametrize("name", [name for name in ONE_EACH if name != "scores"])
def test_cuda_graph_replays_with_other_bags(name: str) -> None:
    operation = OPERATIONS[name]
    tensors = [tensor.nan_to_num() for tensor in operation.inputs(2, torch.bfloat16, "cuda")]
    bags = operation.bags.to("cuda")
    count = bags.count.flip(0)
    tokens = 0 if operation.bags is SCATTERED else 1
    others = ((count + tokens).cumsum(0) - count - tokens, count)
    side = gradient_for(stacked(operation, tensors, bags, False))  # a graph cannot draw numbers on the CPU

    def run(first: Tensor, count: Tensor) -> tuple[Tensor, ...]:
        return forward_and_backward(operation, tensors, bags._replace(first=first, count=count), side=side)

    assert_a_graph_serves_other_bags(run, (bags.first, bags.count), others)


@needs_cuda
def test_cuda_beyond_two_billion_numbers() -> None:
    """Offsets between configurations can exceed 32 bits."""
    configurations, rows, features = 3, 1_000_000, 768
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
    first, count = torch.tensor([0, rows - 6], device="cuda"), torch.tensor([rows - 7, 3], device="cuda")
    y[:, -6:-2] = torch.randn(configurations, 4, features, device="cuda").bfloat16()
    weight, bias = (torch.randn(configurations, *shape, device="cuda") for shape in ((features, 7), (features,)))
    out = stacked_depthwise(y, weight, bias, first, count, rows)[:, -6:].clone()
    assert torch.equal(out, stacked_depthwise(y[:, -6:], weight, bias, first[:1], count[1:], 3))


# Kernels that ask for more shared memory than the card has: smaller tiles, fewer stages, or the plain formula.


def out_of_resources(required: int) -> Exception:
    from triton.runtime.errors import OutOfResources

    return OutOfResources(required, 232_448, "shared memory")


@needs_triton
@pytest.mark.parametrize(("fits", "first", "tried"), [(2, 4, [4, 3, 2]), (0, 2, [2, 1])])
def test_a_kernel_loads_fewer_tiles_ahead_where_memory_is_small(fits: int, first: int, tried: list[int]) -> None:
    from triton.runtime.errors import OutOfResources

    from normal_guidance.core.kernels.products_triton import launch

    asked: list[int] = []

    def kernel(*arguments: object, num_stages: int, **constants: object) -> None:
        asked.append(num_stages)
        if num_stages > fits:
            raise out_of_resources(100_000 * num_stages)

    with contextlib.nullcontext() if fits else pytest.raises(OutOfResources):
        launch({(1,): kernel}, (1,), "rows", num_stages=first, BLOCK=16)
    assert asked == tried


@needs_triton
@pytest.mark.parametrize(("largest", "tried"), [(64, [64]), (16, [64, 32, 16]), (8, [64, 32, 16])])
def test_attention_takes_the_largest_tiles_that_fit(largest: int, tried: list[int]) -> None:
    from normal_guidance.core.kernels.self_attention_triton import _Plan, _run_with_tiles_that_fit

    blocks: list[int] = []

    def run(plan: _Plan) -> None:
        blocks.append(plan.constants["BLOCK"])
        if blocks[-1] > largest:
            raise out_of_resources(286_720)

    bags = slotted(70, 5)
    with float32_products("high"):  # full float32 begins with smaller tiles
        fits = _run_with_tiles_that_fit(run, torch.zeros(2, bags.rows, 96), bags.first, bags.count, 2, bags.longest)
    assert fits == (largest >= 16)
    assert blocks == tried


@needs_triton
def test_where_no_tile_fits_the_plain_formula_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's tensors are treated as a card's, whose kernels find no room."""
    from normal_guidance.core.kernels import self_attention_triton

    operation, asked = OPERATIONS["attend, one tile"], []
    tensors = operation.inputs(2)
    want = forward_and_backward(operation, tensors, operation.bags)
    monkeypatch.setattr(products, "runs_in_triton", lambda *values: True)
    for name in ("forward", "backward"):
        monkeypatch.setattr(self_attention_triton, name, lambda *_, name=name: asked.append(name))
    got = forward_and_backward(operation, tensors, operation.bags)
    assert all(map(torch.equal, got, want))
    assert asked == ["forward", "backward"]


if __name__ == "__main__":
    {"compiled": compiled, "interpreted": interpreted}[sys.argv[1]](*sys.argv[2:])
    print("largest difference within the tolerance")
