r"""The scores of ABMIL for many configurations: $s_r = \sum_h v_h \tanh(z_{hr} + b_h)$, and $z = W x^\top$ before.

Torch's own operations read and write z five times, forward and backward; the kernels here read it twice and write its
gradient once.  z has a row for each hidden unit and a column for each slice: the product that makes it and the one that
gives the gradient of W then read both factors along the dimension that they sum over, which TF32 needs to be fast.
"""

from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.kernels.products import accumulator, operator

# No lazy annotations here: torch reads those of the operators and cannot resolve them under the run-time checks.


def project_columns(
    rows: Float[Tensor, "rows inputs"], weight: Float[Tensor, "outputs inputs"]
) -> Float[Tensor, "outputs rows"]:
    """The weight times every row, one column for each."""
    return stacked_columns(rows, weight[None]).squeeze(0)


def tanh_scores(
    columns: Float[Tensor, "hidden rows"], bias: Float[Tensor, "hidden"], vector: Float[Tensor, "hidden"]
) -> Float[Tensor, "rows"]:
    """The score of each column, in float32 or better."""
    return stacked_scores(columns[None], bias[None], vector[None]).squeeze(0)


def _columns_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor]:
    rows, weight = ctx.saved_tensors
    flat = gradient.flatten(0, 1)
    inputs = rows.mT.contiguous() if rows.dtype == torch.float32 else rows.mT  # TF32 reads along the sum
    d_weight = (flat @ inputs.mT).unflatten(0, gradient.shape[:2])
    return flat.mT @ weight.flatten(0, 1) if ctx.needs_input_grad[0] else None, d_weight


def _columns_under_vmap(
    info: Any, in_dims: tuple[int | None, int | None], rows: Tensor, weight: Tensor
) -> tuple[Tensor, int]:
    if in_dims[0] is not None:
        raise NotImplementedError("the rows must be the same for all configurations of a vmap")
    assert in_dims[1] is not None
    stacked = weight.movedim(in_dims[1], 0).flatten(0, 1)
    return stacked_columns(rows, stacked).unflatten(0, (info.batch_size, -1)), 0


@operator("stacked_columns", stacked=_columns_under_vmap, gradient=_columns_gradients)
def stacked_columns(rows: Tensor, weight: Tensor) -> Tensor:
    """`project_columns` for each configuration, of rows that all share."""
    return (weight.flatten(0, 1) @ rows.mT).unflatten(0, weight.shape[:2])


@operator(
    "stacked_scores_gradients",
    stacked=4,
    like=lambda gradient, columns, bias, vector: tuple(map(torch.empty_like, (columns, bias, vector))),
    triton="scoring_triton.gradients",
)
def stacked_scores_gradients(
    gradient: Tensor, columns: Tensor, bias: Tensor, vector: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of columns, bias and vector."""
    kind = accumulator(columns.dtype)
    hidden = torch.tanh(columns.to(kind) + bias[:, :, None].to(kind))
    inner = gradient[:, None] * vector[:, :, None].to(kind) * (1 - hidden.square())
    outer = torch.einsum("cr,chr->ch", gradient, hidden)
    return inner.to(columns.dtype), inner.sum(2).to(bias.dtype), outer.to(vector.dtype)


@operator(
    "stacked_scores",
    stacked=3,
    gradient=lambda ctx, gradient: stacked_scores_gradients(gradient, *ctx.saved_tensors),
    triton="scoring_triton.scores",
)
def stacked_scores(columns: Tensor, bias: Tensor, vector: Tensor) -> Tensor:
    """`tanh_scores` for each configuration."""
    kind = accumulator(columns.dtype)
    hidden = torch.tanh(columns.to(kind) + bias[:, :, None].to(kind))
    return torch.einsum("chr,ch->cr", hidden, vector.to(kind))
