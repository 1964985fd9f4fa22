r"""Depthwise convolution along the slices of each bag, for PPEG; class tokens stay unchanged.

Rows are laid out as in `SlottedLayout`: bag b holds rows `first[b]` (its class token) to `first[b] + lengths[b]`, and
rows outside all bags are unused.  With N(r) the slices of row r's own bag,

    $y_{rm} = b_m + \sum_k w_{mk}\, x_{r+k-K/2,\,m}$  over  $r + k - K/2 \in N(r)$,  and $y_r = x_r$ for a class token.

Both gradients read the neighbours' gradients only, $\partial x_s = \sum_k w_k g_{s-(k-K/2)}$ and
$\partial w_k = \sum_s x_s g_{s-(k-K/2)}$, so one pass over x and g gives both.  The cost is bound by memory.
"""

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normal_guidance.core.arrays import PerBag
from normal_guidance.core.kernels.products import Rows, accumulator, operator, padded_index

# No lazy annotations here: torch reads those of the operators and cannot resolve them under the run-time checks.


def depthwise(
    rows: Rows,
    weight: Float[Tensor, "features taps"],
    bias: Float[Tensor, "features"],
    first: PerBag,
    lengths: PerBag,
    longest: int,
) -> Rows:
    """Slices convolved within their bag by an odd number of taps; class tokens unchanged; 0 in unused rows."""
    if weight.shape[-1] % 2 == 0:
        raise ValueError(
            f"the kernel has {weight.shape[-1]} taps; pad it to an odd number, so that there is a middle tap"
        )
    return stacked_depthwise(rows[None], weight[None], bias[None], first, lengths, longest).squeeze(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    """Save all but the bias: no gradient depends on its values."""
    rows, weight, bias, first, lengths, ctx.longest = inputs
    ctx.save_for_backward(rows, weight, first, lengths)
    ctx.bias_dtype = bias.dtype


def _differentiate(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
    d_rows, d_weight, d_bias = stacked_depthwise_backward(gradient, *ctx.saved_tensors, ctx.longest)
    return d_rows, d_weight, d_bias.to(ctx.bias_dtype), None, None, None


@operator("ragged_depthwise", stacked=3, gradient=_differentiate, save=_save, triton="convolution_triton.forward")
def stacked_depthwise(
    rows: Tensor, weight: Tensor, bias: Tensor, first: Tensor, lengths: Tensor, longest: int
) -> Tensor:
    """`depthwise` of (C, R, M) rows with (C, M, K) weights and (C, M) biases: (C, R, M)."""
    source, inside, token = _neighbours(first, lengths, longest, rows.shape[1], weight.shape[2])
    kind = accumulator(rows.dtype)
    x, w, b = rows.to(kind), weight.to(kind), bias.to(kind)
    convolved = torch.where(inside[:, weight.shape[2] // 2, None], b[:, None], 0)
    for k in range(weight.shape[2]):
        convolved += w[:, None, :, k] * _read(x, source[:, k], inside[:, k])
    return torch.where(token[:, None], x, convolved).to(rows.dtype).contiguous()


@operator("ragged_depthwise_backward", stacked=3, triton="convolution_triton.backward")
def stacked_depthwise_backward(
    gradient: Tensor, rows: Tensor, weight: Tensor, first: Tensor, lengths: Tensor, longest: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of rows, weight and bias, the last in the weight's dtype."""
    taps = weight.shape[2]
    source, inside, token = _neighbours(first, lengths, longest, rows.shape[1], taps)
    kind = accumulator(rows.dtype)
    g, x, w = gradient.to(kind), rows.to(kind), weight.to(kind)
    d_rows = torch.where(token[:, None], g, 0)
    d_weight = torch.empty_like(w)
    for k in range(taps):
        opposite = taps - 1 - k  # row s is tap k of the row that is tap K - 1 - k of s
        read = _read(g, source[:, opposite], inside[:, opposite])
        d_rows += w[:, None, :, k] * read
        d_weight[:, :, k] = (x * read).sum(1)
    d_bias = _read(g, source[:, taps // 2], inside[:, taps // 2]).sum(1)
    return d_rows.to(rows.dtype).contiguous(), d_weight.to(weight.dtype).contiguous(), d_bias.to(weight.dtype)


def _neighbours(
    first: PerBag, lengths: PerBag, longest: int, rows: int, taps: int
) -> tuple[Int[Tensor, "rows taps"], Bool[Tensor, "rows taps"], Bool[Tensor, "rows"]]:
    """The row at each tap of each row, whether both are slices of one bag, and which rows are class tokens."""
    index = padded_index(first, lengths + 1, longest + 1, rows)
    bag, place = index.clamp_min(0) // (longest + 1), index.clamp_min(0) % (longest + 1)
    offset = torch.arange(taps, device=index.device) - taps // 2
    neighbour = place[:, None] + offset
    token = (index >= 0) & (place == 0)
    slices = (index >= 0) & (place > 0)
    inside = slices[:, None] & (neighbour >= 1) & (neighbour <= lengths[bag][:, None])
    source = torch.arange(rows, device=index.device)[:, None] + offset
    return source.clamp(0, rows - 1), inside, token


def _read(
    values: Float[Tensor, "configurations rows features"], source: Int[Tensor, "rows"], inside: Bool[Tensor, "rows"]
) -> Float[Tensor, "configurations rows features"]:
    """One neighbour of every row, or 0 if there is none."""
    return values[:, source].masked_fill(~inside[:, None], 0)
