r"""Smoothing along the slices of each bag with one symmetric kernel, mirrored at the bag's ends, and its gradients.

$y_j = \sum_k \kappa_k x_{m(j + k - T)}$ with m the reflection of `core.layout.mirror`: the operator S of `layers.Sm`.
Bags lie among the rows as in `products`.

S is a polynomial of $D^{-1}A$ with the chain's symmetric A, so $S^\top = D S D^{-1}$, where D holds the chain's degrees
(1 at the two ends, 2 inside).  The gradient is therefore again a sum over the neighbours that a row reads, and no two
programs add to one number.  This holds for symmetric kernels only, and `Sm`'s kernels are symmetric.
"""

from typing import Any

import torch
from jaxtyping import Float, Int, Shaped
from torch import Tensor

from normal_guidance.core.arrays import PerBag
from normal_guidance.core.kernels.products import Rows, accumulator, operator, padded_index, save_tensors
from normal_guidance.core.layout import mirror


def smooth(rows: Rows, kernel: Float[Tensor, "taps"], first: PerBag, count: PerBag, longest: int) -> Rows:
    """Rows smoothed within each bag by a symmetric kernel of 2T + 1 taps; 0 in unused rows."""
    return stacked_smooth(rows[None], kernel[None], first, count, longest, False).squeeze(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    save_tensors(ctx, inputs, output)
    ctx.longest, ctx.transposed = inputs[4:]


def _smooth_gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    rows, kernel, first, count = ctx.saved_tensors
    for_rows, for_kernel = ctx.needs_input_grad[:2]
    d_rows = d_kernel = None
    if for_rows:
        d_rows = stacked_smooth(gradient, kernel, first, count, ctx.longest, not ctx.transposed)
    if for_kernel:
        # <g, S^T x> = <x, S g>: for the transpose, rows and gradient change places.
        reader, read = (rows, gradient) if ctx.transposed else (gradient, rows)
        d_kernel = stacked_kernel_gradient(reader, read, first, count, ctx.longest, kernel.shape[1]).to(kernel.dtype)
    return d_rows, d_kernel, None, None, None, None


@operator("ragged_smooth", stacked=2, gradient=_smooth_gradients, save=_save, triton="smoothing_triton.smooth")
def stacked_smooth(
    rows: Tensor, kernel: Tensor, first: Tensor, count: Tensor, longest: int, transposed: bool
) -> Tensor:
    """`smooth` of (C, R, F) rows with (C, 2T + 1) kernels, or its transpose: (C, R, F)."""
    source, scale = _neighbours(first, count, longest, rows.shape[1], kernel.shape[1], transposed)
    smoothed = torch.zeros_like(rows, dtype=torch.promote_types(accumulator(rows.dtype), kernel.dtype))
    for k in range(kernel.shape[1]):
        smoothed += kernel[:, k, None, None] * scale[:, k, None] * rows[:, source[:, k]]
    return smoothed.masked_fill((source[:, 0] < 0)[:, None], 0).to(rows.dtype).contiguous()


@operator("ragged_smooth_kernel_gradient", stacked=2, triton="smoothing_triton.kernel_gradient")
def stacked_kernel_gradient(
    gradient: Tensor, rows: Tensor, first: Tensor, count: Tensor, longest: int, taps: int
) -> Tensor:
    r"""$\partial \kappa_k = \sum_{j} g_j \cdot x_{m(j + k - T)}$ of (C, R, F) gradients and rows: (C, 2T + 1)."""
    source, _ = _neighbours(first, count, longest, rows.shape[1], taps, transposed=False)
    used = gradient.to(accumulator(rows.dtype)).masked_fill((source[:, 0] < 0)[:, None], 0)
    return torch.stack([(used * rows[:, source[:, k]]).sum((1, 2)) for k in range(taps)], dim=1)


def _neighbours(
    first: PerBag, count: PerBag, longest: int, rows: int, taps: int, transposed: bool
) -> tuple[Int[Tensor, "rows taps"], Shaped[Tensor, "rows taps"]]:
    """The row that each tap of each row reads (-1 for unused rows), and the factor D D^-1 of the transpose."""
    index = padded_index(first, count, longest, rows)[:, None]
    bag, place = index.clamp_min(0) // longest, index % longest
    neighbour = mirror(place + torch.arange(taps, device=index.device) - taps // 2, count[bag])
    scale = _degree(place, count[bag]) / _degree(neighbour, count[bag]) if transposed else torch.ones_like(neighbour)
    return (first[bag] + neighbour).masked_fill(index < 0, -1), scale


def _degree(place: Int[Tensor, "*shape"], count: Int[Tensor, "*or_one"]) -> Int[Tensor, "*shape"]:
    """The number of neighbours in the chain; a single row has none, but any constant is right for it."""
    return 2 - ((place == 0) | (place == count - 1)).long()
