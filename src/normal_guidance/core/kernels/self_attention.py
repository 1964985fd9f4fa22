"""Softmax self-attention within bags of different length, for many configurations at once.

Rows are laid out as in `SlottedLayout`: bag b holds rows `first[b]` (its class token) to `first[b] + lengths[b]`, bags
follow each other from row 0 without gaps, and rows after the last bag are unused.  `first` and `lengths` are on the
device and change from step to step, but no shape does, so one compiled program (or CUDA graph) serves all batches.

The plain formula here pads bags to the longest, which costs memory and work; the Triton kernels in
`self_attention_triton` read each row once.
"""

from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.core.arrays import PerBag
from normal_guidance.core.kernels.products import accumulator, operator

Places = Int[Tensor, "bags places"]
Stacked = Float[Tensor, "configs rows features"]
Padded = Float[Tensor, "configs bags places features"]

# No lazy annotations here: torch reads those of the operators and cannot resolve them under the run-time checks.


def attend(
    qkv: Float[Tensor, "rows three_features"],
    token: Float[Tensor, "three_features"],
    first: PerBag,
    lengths: PerBag,
    heads: int,
    longest: int,
) -> Float[Tensor, "rows joined"]:
    r"""$\mathrm{softmax}(q k^\top / \sqrt{d})\, v$ in each bag, class token included; the heads are joined again."""
    # `token`, the class token's queries, keys and values, replaces `qkv` in the first row of every bag; unused rows
    # give 0.  `longest` is at least the largest length.
    token = token.to(qkv.dtype)
    return stacked_attend(qkv[None], token[None], first, lengths, heads, longest)[0].squeeze(0)


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    qkv, token, first, lengths, ctx.heads, ctx.longest = inputs
    ctx.save_for_backward(qkv, token, *output, first, lengths)


def _differentiate(ctx: Any, grad: Tensor, _grad_lse: Tensor) -> tuple[Tensor | None, ...]:
    """The gradient; the log-sum-exp never leaves `attend`, so its gradient is not needed."""
    grad_qkv, grad_token = stacked_attend_backward(grad, *ctx.saved_tensors, ctx.heads, ctx.longest)
    return grad_qkv, grad_token, None, None, None, None


@operator("ragged_attend", stacked=2, gradient=_differentiate, save=_save, triton="self_attention_triton.forward")
def stacked_attend(
    qkv: Tensor, token: Tensor, first: Tensor, lengths: Tensor, heads: int, longest: int
) -> tuple[Tensor, Tensor]:
    """Output (configs, rows, features) and the scores' log-sum-exp (configs, heads, rows), undefined in unused rows."""
    rows = qkv.shape[1]
    index, inside = _padded_rows(first, lengths, longest, rows)
    q, k, v = _padded_heads(qkv, token, index, heads)
    scores = _scores(q, k, inside)
    lse = scores.logsumexp(-1)
    out = (scores - lse[..., None]).exp().to(v.dtype) @ v
    joined = out.movedim(2, 3).flatten(-2)
    return _scatter(joined, index, rows), _scatter(lse.movedim(2, 3), index, rows).movedim(2, 1).contiguous()


@operator("ragged_attend_backward", stacked=5, triton="self_attention_triton.backward")
def stacked_attend_backward(
    grad: Tensor,
    qkv: Tensor,
    token: Tensor,
    out: Tensor,
    lse: Tensor,
    first: Tensor,
    lengths: Tensor,
    heads: int,
    longest: int,
) -> tuple[Tensor, Tensor]:
    """Gradients of `qkv` (0 in class tokens' rows and unused rows) and of `token` (summed over bags)."""
    # With S the scores: dS = P * (dO V^T - D), where D_i = sum_j P_ij (dO V^T)_ij.
    rows = qkv.shape[1]
    index, inside = _padded_rows(first, lengths, longest, rows)
    q, k, v = _padded_heads(qkv, token, index, heads)
    grad_out = _gather(grad, index).unflatten(-1, (heads, -1)).movedim(3, 2)
    p = (_scores(q, k, inside) - _gather(lse.mT, index).movedim(3, 2)[..., None]).exp().to(v.dtype)
    dp = grad_out @ v.mT
    ds = p * (dp - (p * dp).sum(-1, keepdim=True)) * q.shape[-1] ** -0.5
    parts = torch.stack([ds @ k, ds.mT @ q, p.mT @ grad_out])
    padded = parts.permute(1, 2, 4, 0, 3, 5).flatten(-3)
    slices = index.index_fill(1, torch.zeros(1, dtype=torch.int64, device=index.device), rows)
    return _scatter(padded, slices, rows), padded[:, :, 0].sum(1)


def _padded_rows(first: PerBag, lengths: PerBag, longest: int, rows: int) -> tuple[Places, Tensor]:
    """The rows of each padded bag, class token first, and which of them exist; the others point to row `rows`."""
    offset = torch.arange(longest + 1, device=first.device)
    inside = offset <= lengths[:, None]
    return torch.where(inside, first[:, None] + offset, rows), inside


def _gather(values: Stacked, index: Places) -> Padded:
    """Padded bags of rows, 0 in the padding."""
    return F.pad(values, (0, 0, 0, 1))[:, index]


def _scatter(padded: Padded, index: Places, rows: int) -> Stacked:
    """The rows of padded bags, 0 in unused rows.  An extra row receives the padding and is dropped."""
    values = padded.new_zeros(padded.shape[0], rows + 1, padded.shape[-1])
    values[:, index] = padded
    return values[:, :rows].contiguous()


def _padded_heads(
    qkv: Float[Tensor, "configs rows three_features"],
    token: Float[Tensor, "configs three_features"],
    index: Places,
    heads: int,
) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values (configs, bags, heads, places, d), with the token's in place 0."""
    slices = _gather(qkv, index)[:, :, 1:]
    padded = torch.cat([token[:, None, None].expand(-1, slices.shape[1], 1, -1), slices], dim=2)
    q, k, v = padded.unflatten(-1, (3, heads, -1)).permute(3, 0, 1, 4, 2, 5)
    return q, k, v


def _scores(q: Tensor, k: Tensor, inside: Tensor) -> Float[Tensor, "configs bags heads places places"]:
    """q k^T / sqrt(d), hidden outside the bag."""
    scores = (q @ k.mT) * q.shape[-1] ** -0.5
    return scores.to(accumulator(q.dtype)).masked_fill(~inside[:, None, None], -torch.inf)
