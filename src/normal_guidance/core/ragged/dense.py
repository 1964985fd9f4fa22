"""A dense layer and two gathers for many configurations, with gradients that are fast to read.

Torch's own operations give the same results more slowly.  The gradient of `x @ W.T` is transposed, so that the step of
SGD reads it with large strides; the gradient of taking one row of each bag is a tensor as large as all rows, almost all
zeros, written and read again; the gradient of padding sorts all places.  The backward passes here are plain torch, so a
compiler fuses them.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normal_guidance.core.ragged.products import vmap_over_configurations


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
    """Rows and weight for `project` with the bias as an extra column: ones in the rows, biases in the weight.

    Adding the bias to the product afterwards would read and write all of it once more, and again for the gradient.  The
    width stays a multiple of eight, as matrix units need.
    """
    ones = rows.new_zeros(rows.shape[0], 8)
    ones = torch.where(torch.arange(8, device=rows.device) == 0, 1.0, ones)
    biases = torch.where(torch.arange(8, device=rows.device) == 0, bias[:, None], 0.0)
    return torch.cat([rows, ones.to(rows.dtype)], 1), torch.cat([weight, biases.to(weight.dtype)], 1)


def take_first(
    rows: Float[Tensor, "rows features"],
    first: Int[Tensor, "bags"],
    bag: Int[Tensor, "rows"],
    is_first: Bool[Tensor, "rows"],
) -> Float[Tensor, "bags features"]:
    """Row `first[b]` of each bag b.  `bag` and `is_first` describe the same rows one by one, for the gradient."""
    return stacked_take_first(rows[None], first, bag, is_first).squeeze(0)


@torch.library.custom_op("normal_guidance::stacked_project", mutates_args=())
def stacked_project(rows: Tensor, weight: Tensor) -> Tensor:
    """`project` for each configuration; rows given for only one configuration are shared by all."""
    return torch.matmul(rows, weight.mT)


@stacked_project.register_fake
def _(rows: Tensor, weight: Tensor) -> Tensor:
    return rows.new_empty(weight.shape[0], rows.shape[1], weight.shape[1])


def _save_both(ctx: Any, inputs: tuple[Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _project_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
    rows, weight = ctx.saved_tensors
    d_weight = gradient.mT @ rows
    if not ctx.needs_input_grad[0]:
        return None, d_weight
    d_rows = gradient @ weight
    return (d_rows.sum(0, keepdim=True) if len(rows) < len(d_rows) else d_rows), d_weight


stacked_project.register_autograd(_project_gradients, setup_context=_save_both)


@stacked_project.register_vmap
def _(info: Any, in_dims: tuple[int | None, int | None], rows: Tensor, weight: Tensor) -> tuple[Tensor, int]:
    """Rows shared by all configurations are not copied; a shared weight is repeated."""
    if in_dims[0] is not None:
        rows = rows.movedim(in_dims[0], 0).flatten(0, 1)
    elif len(rows) > 1:
        rows = rows.repeat(info.batch_size, 1, 1)
    weight = weight.movedim(in_dims[1], 0) if in_dims[1] is not None else weight.expand(info.batch_size, *weight.shape)
    return stacked_project(rows, weight.flatten(0, 1)).unflatten(0, (info.batch_size, -1)), 0


@torch.library.custom_op("normal_guidance::stacked_take_first", mutates_args=())
def stacked_take_first(rows: Tensor, first: Tensor, bag: Tensor, is_first: Tensor) -> Tensor:
    """`take_first` for each configuration."""
    return rows.index_select(1, first)


@stacked_take_first.register_fake
def _(rows: Tensor, first: Tensor, bag: Tensor, is_first: Tensor) -> Tensor:
    return rows.new_empty(rows.shape[0], first.shape[0], rows.shape[2])


def _save_places(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[2:])


def _take_first_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
    """Each first row reads its bag's gradient: no scattering, and nothing is written if it is fused."""
    bag, is_first = ctx.saved_tensors
    found = gradient[:, bag.clamp_max(gradient.shape[1] - 1)]
    return torch.where(is_first[:, None], found, 0), None, None, None


stacked_take_first.register_autograd(_take_first_gradients, setup_context=_save_places)
stacked_take_first.register_vmap(vmap_over_configurations(stacked_take_first, stacked=1))


def fold(
    values: Float[Tensor, "*parts rows"],
    first: Int[Tensor, "bags"],
    lengths: Int[Tensor, "bags"],
    bag: Int[Tensor, "rows"],
    pad_index: Int[Tensor, "bags longest"],
) -> Float[Tensor, "*parts bags longest"]:
    """`values[..., pad_index]`, where bag b has the `lengths[b]` rows from `first[b]` on; the rest is arbitrary.

    The gradient of arbitrary places is not read.
    """
    parts = values.shape[:-1]
    folded = stacked_fold(values.reshape(-1, values.shape[-1]), first, lengths, bag, pad_index)
    return folded.reshape(*parts, *pad_index.shape)


@torch.library.custom_op("normal_guidance::stacked_fold", mutates_args=())
def stacked_fold(values: Tensor, first: Tensor, lengths: Tensor, bag: Tensor, pad_index: Tensor) -> Tensor:
    """`fold` for each configuration."""
    return values[:, pad_index]


@stacked_fold.register_fake
def _(values: Tensor, first: Tensor, lengths: Tensor, bag: Tensor, pad_index: Tensor) -> Tensor:
    return values.new_empty(values.shape[0], *pad_index.shape)


def _save_bags(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor, Tensor, Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs[1:4])


def _fold_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
    """Each row reads the gradient of its own place."""
    first, lengths, bag = ctx.saved_tensors
    bags, longest = gradient.shape[1:]
    own = bag.clamp_max(bags - 1)
    place = torch.arange(len(bag), device=bag.device) - first[own]
    inside = (bag < bags) & (place >= 0) & (place < lengths[own])
    found = gradient.flatten(1)[:, torch.where(inside, own * longest + place, 0)]
    return torch.where(inside, found, 0), None, None, None, None


stacked_fold.register_autograd(_fold_gradients, setup_context=_save_bags)
stacked_fold.register_vmap(vmap_over_configurations(stacked_fold, stacked=1))
