r"""Products of each bag's queries or weights with that bag's own rows, and a dense layer, for many configurations.

Bag b holds rows first[b] .. first[b] + count[b] - 1 of a matrix of R rows; rows outside all bags are unused.  These
numbers change from step to step, but the shapes do not, so a step can be compiled and captured in a CUDA graph.
With rows $x$, queries $u$ and weights $a$, per bag

    dot     $s_{qj} = u_q \cdot x_j$
    pool    $z_q = \sum_j a_{qj} x_j$
    spread  $y_j = \sum_q a_{qj} u_q$

and the gradients of each are the other two.  They are bound by memory: a pass reads (or writes) the rows once.

The `stacked_...` operations take C configurations in a leading dimension; `torch.func.vmap` turns the functions without
it into these.
"""

from collections.abc import Callable
from functools import wraps
from importlib import import_module
from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normal_guidance.core.arrays import PerBag

Rows = Float[Tensor, "rows features"]
Queries = Float[Tensor, "bags queries features"]
Weights = Float[Tensor, "bags queries longest"]  # of a bag's rows, or the scores that they come from


def save_tensors(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save all input tensors for the gradient, which reads sizes from them."""
    ctx.save_for_backward(*(value for value in inputs if isinstance(value, Tensor)))


def vmap_over_configurations(operation: Callable[..., Any], stacked: int) -> Callable[..., tuple[Any, Any]]:
    """The vmap rule of an operation whose first `stacked` arguments begin with the dimension of configurations."""
    # The mapped dimension is merged into it; shared arguments are expanded without a copy.  Take gradients outside of
    # `vmap`: `torch.func.grad` inside it does not support custom operators (torch 2.13).

    def rule(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
        if any(dim is not None for dim in in_dims[stacked:]):
            raise NotImplementedError(
                "the places of bags (first, lengths) must be the same for all configurations of a vmap"
            )
        tensors = [
            (value.expand(info.batch_size, *value.shape) if dim is None else value.movedim(dim, 0)).flatten(0, 1)
            for value, dim in zip(arguments[:stacked], in_dims[:stacked], strict=True)
        ]
        made = operation(*tensors, *arguments[stacked:])
        if isinstance(made, Tensor):
            return made.unflatten(0, (info.batch_size, -1)), 0
        return tuple(output.unflatten(0, (info.batch_size, -1)) for output in made), (0,) * len(made)

    return rule


def operator(
    name: str,
    stacked: int | Callable[..., Any],
    gradient: Callable[..., Any] | None = None,
    save: Callable[..., None] = save_tensors,
    like: Callable[..., Any] | None = None,
    schema: str | None = None,
    triton: str | None = None,
) -> Callable[[Callable[..., Any]], Any]:
    """Register a custom operator of torch: `vmap` gives it all configurations at once, and compilers do not open it."""
    # `stacked` may also be the rule for `vmap` itself.  `triton` is the kernel to launch instead where it runs and has
    # room, MODULE.FUNCTION of this folder.  Compilers trace `like`, or else the function, which must be as contiguous.

    def register(function: Callable[..., Any]) -> Any:
        @wraps(function)
        def either(*arguments: Any) -> Any:
            made = None
            if triton is not None and runs_in_triton(*arguments):
                module, kernel = triton.split(".")
                made = getattr(import_module(f"{__package__}.{module}"), kernel)(*arguments)
            return function(*arguments) if made is None else made

        made: Any = torch.library.custom_op(f"normal_guidance::{name}", mutates_args=(), schema=schema)(either)
        made.register_fake(like or function)
        made.register_vmap(vmap_over_configurations(made, stacked) if isinstance(stacked, int) else stacked)
        if gradient is not None:
            made.register_autograd(gradient, setup_context=save)
        return made

    return register


def runs_in_triton(*arguments: Any) -> bool:
    """Whether the Triton kernels run; float64 on CUDA is for tests and stays with torch."""
    tensors = [value for value in arguments if isinstance(value, Tensor)]
    return tensors[0].is_cuda and all(tensor.dtype != torch.float64 for tensor in tensors)


# No lazy annotations here: torch reads those of the operators and cannot resolve them under the run-time checks.


def dot(queries: Queries, rows: Rows, first: PerBag, count: PerBag, longest: int) -> Weights:
    """Products of each bag's queries with its own rows, s_bqj = u_bq . x_(first_b + j), in float32; 0 past its end."""
    if queries.dtype != rows.dtype:
        raise TypeError(f"queries are {queries.dtype} and rows {rows.dtype}; cast one to the dtype of the other")
    return stacked_dot(queries[None], rows[None], first, count, longest).squeeze(0)


def pool(weights: Weights, rows: Rows, first: PerBag, count: PerBag) -> Queries:
    """Weighted sums of each bag's own rows, z_bq = sum_j a_bqj x_(first_b + j); weights past its end are ignored."""
    # Weights are float32 for rows of any dtype, because they come from a softmax and are differentiated in float32.
    return stacked_pool(weights[None], rows[None], first, count).squeeze(0)


def _dot_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    queries, rows, first, count = ctx.saved_tensors
    for_queries, for_rows = ctx.needs_input_grad[:2]
    return (
        stacked_pool(gradient, rows, first, count) if for_queries else None,
        stacked_spread(gradient, queries, first, count, rows.shape[1]) if for_rows else None,
        *(None, None, None),
    )


@operator("ragged_dot", stacked=2, gradient=_dot_gradients, triton="products_triton.dot")
def stacked_dot(queries: Tensor, rows: Tensor, first: Tensor, count: Tensor, longest: int) -> Tensor:
    """`dot` of (C, B, Q, M) queries with (C, R, M) rows: (C, B, Q, longest)."""
    kind = accumulator(rows.dtype)
    padded = _padded(rows, first, inside_bags(count, longest)).to(kind)
    return torch.einsum("cbqm,cbjm->cbqj", queries.to(kind), padded).contiguous()


def _pool_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    gradient = gradient.contiguous()  # here, where a compiler fuses it with the operation before
    weights, rows, first, count = ctx.saved_tensors
    for_weights, for_rows = ctx.needs_input_grad[:2]
    return (
        stacked_dot(gradient, rows, first, count, weights.shape[-1]) if for_weights else None,
        stacked_spread(weights, gradient, first, count, rows.shape[1]) if for_rows else None,
        *(None, None),
    )


@operator("ragged_pool", stacked=2, gradient=_pool_gradients, triton="products_triton.pool")
def stacked_pool(weights: Tensor, rows: Tensor, first: Tensor, count: Tensor) -> Tensor:
    """`pool` of (C, B, Q, longest) weights with (C, R, M) rows: (C, B, Q, M)."""
    kind = accumulator(rows.dtype)
    inside = inside_bags(count, weights.shape[-1])
    shares = weights.to(kind).masked_fill(~inside[:, None], 0)
    return torch.einsum("cbqj,cbjm->cbqm", shares, _padded(rows, first, inside).to(kind)).to(rows.dtype).contiguous()


def _spread_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    weights, queries, first, count = ctx.saved_tensors
    for_weights, for_queries = ctx.needs_input_grad[:2]
    return (
        stacked_dot(queries, gradient, first, count, weights.shape[-1]) if for_weights else None,
        stacked_pool(weights, gradient, first, count) if for_queries else None,
        *(None, None, None),
    )


@operator("ragged_spread", stacked=2, gradient=_spread_gradients, triton="products_triton.spread")
def stacked_spread(weights: Tensor, queries: Tensor, first: Tensor, count: Tensor, rows: int) -> Tensor:
    """Weighted sums of each bag's queries for its own rows, y_(first_b + j) = sum_q a_bqj u_bq; 0 in unused rows."""
    # Of (C, B, Q, longest) weights and (C, B, Q, M) queries: (C, rows, M).
    kind = accumulator(queries.dtype)
    longest = weights.shape[-1]
    shares = weights.to(kind).masked_fill(~inside_bags(count, longest)[:, None], 0)
    padded = torch.einsum("cbqj,cbqm->cbjm", shares, queries.to(kind)).to(queries.dtype).flatten(1, 2)
    index = padded_index(first, count, longest, rows)
    return padded[:, index.clamp_min(0)].masked_fill((index < 0)[:, None], 0).contiguous()


def accumulator(dtype: torch.dtype) -> torch.dtype:
    """The dtype of sums over rows of this dtype: float32 or better."""
    return torch.promote_types(dtype, torch.float32)


def inside_bags(count: PerBag, longest: int) -> Bool[Tensor, "bags longest"]:
    """Which of `longest` places each bag fills."""
    return torch.arange(longest, device=count.device) < count[:, None]


def padded_index(first: PerBag, count: PerBag, longest: int, rows: int) -> Int[Tensor, "rows"]:
    """The index of each row in bags padded to bags x longest rows; -1 for an unused row."""
    row = first[:, None] + torch.arange(longest, device=first.device)
    row = row.masked_fill(~inside_bags(count, longest), rows).flatten()  # places past the ends go to an extra row
    index = torch.arange(row.numel(), device=first.device)
    return index.new_full((rows + 1,), -1).scatter(0, row, index)[:rows]


def _padded(
    rows: Float[Tensor, "configurations rows features"], first: PerBag, inside: Bool[Tensor, "bags longest"]
) -> Float[Tensor, "configurations bags longest features"]:
    """Each bag's rows, padded with zeros."""
    index = first[:, None] + torch.arange(inside.shape[1], device=first.device)
    return rows[:, index.masked_fill(~inside, 0)].masked_fill(~inside[:, :, None], 0)


# A dense layer and two gathers with gradients that are fast to read; the backward passes are plain torch, so a compiler
# fuses them.  Torch's own gradient of `x @ W.T` is transposed, so the step of SGD reads it with large strides; that of
# taking one row of each bag is a tensor as large as all rows, almost all zeros; that of padding sorts all places.


def project(
    rows: Float[Tensor, "*parts rows inputs"], weight: Float[Tensor, "*parts outputs inputs"]
) -> Float[Tensor, "*parts rows outputs"]:
    """Every row times the transposed weight: a linear layer without bias.  `parts` is at most one dimension."""
    if rows.ndim == 3:
        return stacked_project(rows, weight)
    return stacked_project(rows[None], weight[None]).squeeze(0)


def with_bias(
    rows: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"], bias: Float[Tensor, "outputs"]
) -> tuple[Float[Tensor, "rows wider"], Float[Tensor, "outputs wider"]]:
    """Rows and weight for `project` with the bias as an extra column: ones in the rows, biases in the weight."""
    # Adding the bias afterwards would read and write the product once more, and again for the gradient.  The width
    # stays a multiple of eight, as matrix units need.
    is_bias = torch.arange(8, device=rows.device) == 0
    ones = torch.where(is_bias, 1.0, rows.new_zeros(rows.shape[0], 8))
    biases = torch.where(is_bias, bias[:, None], 0.0)
    return torch.cat([rows, ones.to(rows.dtype)], 1), torch.cat([weight, biases.to(weight.dtype)], 1)


def _project_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
    rows, weight = ctx.saved_tensors
    d_weight = gradient.mT @ rows
    if not ctx.needs_input_grad[0]:
        return None, d_weight
    d_rows = gradient @ weight
    return (d_rows.sum(0, keepdim=True) if len(rows) < len(d_rows) else d_rows), d_weight


def _project_under_vmap(
    info: Any, in_dims: tuple[int | None, int | None], rows: Tensor, weight: Tensor
) -> tuple[Tensor, int]:
    """Rows shared by all configurations are not copied; a shared weight is repeated."""
    if in_dims[0] is not None:
        rows = rows.movedim(in_dims[0], 0).flatten(0, 1)
    elif len(rows) > 1:
        rows = rows.repeat(info.batch_size, 1, 1)
    weight = weight.movedim(in_dims[1], 0) if in_dims[1] is not None else weight.expand(info.batch_size, *weight.shape)
    return stacked_project(rows, weight.flatten(0, 1)).unflatten(0, (info.batch_size, -1)), 0


@operator("stacked_project", stacked=_project_under_vmap, gradient=_project_gradients)
def stacked_project(rows: Tensor, weight: Tensor) -> Tensor:
    """`project` for each configuration; rows given for only one configuration are shared by all."""
    return torch.matmul(rows, weight.mT)


def take_first(
    rows: Rows, first: PerBag, bag: Int[Tensor, "rows"], is_first: Bool[Tensor, "rows"]
) -> Float[Tensor, "bags features"]:
    """Row `first[b]` of each bag b.  `bag` and `is_first` describe the same rows one by one, for the gradient."""
    return stacked_take_first(rows[None], first, bag, is_first).squeeze(0)


def _take_first_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    """Each first row reads its bag's gradient: no scattering, and nothing is written if it is fused."""
    bag, is_first = ctx.saved_tensors
    of_bag = gradient[:, bag.clamp_max(gradient.shape[1] - 1)]
    return torch.where(is_first[:, None], of_bag, 0), None, None, None


@operator(
    "stacked_take_first",
    stacked=1,
    gradient=_take_first_gradients,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[2:]),
)
def stacked_take_first(rows: Tensor, first: Tensor, bag: Tensor, is_first: Tensor) -> Tensor:
    """`take_first` for each configuration."""
    return rows.index_select(1, first)


def fold(
    values: Float[Tensor, "*parts rows"],
    first: PerBag,
    lengths: PerBag,
    bag: Int[Tensor, "rows"],
    pad_index: Int[Tensor, "bags longest"],
) -> Float[Tensor, "*parts bags longest"]:
    """`values[..., pad_index]`, where bag b has the `lengths[b]` rows from `first[b]` on; the rest is arbitrary."""
    parts = values.shape[:-1]
    folded = stacked_fold(values.reshape(-1, values.shape[-1]), first, lengths, bag, pad_index)
    return folded.reshape(*parts, *pad_index.shape)


def _fold_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    """Each row reads the gradient of its own place."""
    first, lengths, bag = ctx.saved_tensors
    bags, longest = gradient.shape[1:]
    bag_there = bag.clamp_max(bags - 1)
    offset = torch.arange(len(bag), device=bag.device) - first[bag_there]
    inside = (bag < bags) & (offset >= 0) & (offset < lengths[bag_there])
    of_place = gradient.flatten(1)[:, torch.where(inside, bag_there * longest + offset, 0)]
    return torch.where(inside, of_place, 0), None, None, None, None


@operator(
    "stacked_fold",
    stacked=1,
    gradient=_fold_gradients,
    save=lambda ctx, inputs, output: ctx.save_for_backward(*inputs[1:4]),
)
def stacked_fold(values: Tensor, first: Tensor, lengths: Tensor, bag: Tensor, pad_index: Tensor) -> Tensor:
    """`fold` for each configuration."""
    return values[:, pad_index]
