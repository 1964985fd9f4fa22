r"""Sums under a symmetric window around every slice, $y_j = \sum_k t_{|j-k|} x_k$, and their gradients.

As a matrix of slices x slices, the window of a scan with 20,000 slices takes 3 GB, and its gradient several times that.
The matrix is Toeplitz, though: $t$ says all of it.  So the sums are made block by block, from a band of the matrix that
serves every block, and nothing of it is kept for the gradient, which is again such a sum:

$$ \bar x_k = \sum_j t_{|j-k|} \bar y_j, \quad \bar t_d = \sum_{|j-k| = d} \bar y_j x_k $$

On the CPU a band ends with the last tap that is not 0, and rows without values in a block's reach are left out: a batch
of short scans and a long one costs little more than the long one.  A GPU would have to wait for either.

A Fourier transform would be faster for wide windows.  Its error is relative to the largest sum, while the logarithm of
attention needs the smallest ones exactly.
"""

# No lazy annotations here: torch reads those of the operators and cannot resolve them under the run-time checks.
from collections.abc import Iterator
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.ragged.products import save_tensors, vmap_over_configurations

SMALLEST, LARGEST = 64, 256
"""Slices whose sums are made together: twice the reach of a window, within these bounds."""


AT_ONCE = 2**22
"""Numbers that blocks read together."""

DENSE = 2048
"""Slices up to which a matrix of slices x slices is made: for every configuration, its product is faster."""


def is_long(longest: int) -> bool:
    """Whether scans are too long for a matrix of slices x slices."""
    return longest > DENSE


def window_sums(
    values: Float[Tensor, "*many rows longest"], taps: Float[Tensor, "*many reach"]
) -> Float[Tensor, "*many rows longest"]:
    """Sums under windows, the first tap at the slice itself and the others at its distance; rows are 0 beyond a scan.

    `many` is at most one dimension.  The last taps that are 0 get no gradient on the CPU.
    """
    if torch.compiler.is_exporting():
        return _plain_sums(values, taps)
    if taps.ndim == 2:
        return stacked_sums(values, taps)
    return stacked_sums(values[None], taps[None]).squeeze(0)


@torch.library.custom_op("normal_guidance::window_sums", mutates_args=())
def stacked_sums(values: Tensor, taps: Tensor) -> Tensor:
    """`window_sums` of (C, R, S) values with (C, T) taps: (C, R, S)."""
    sums = torch.empty_like(values, memory_format=torch.contiguous_format)
    for x, t, y in zip(values, taps, sums, strict=True):
        reach = _reach(t, x)
        size = _block_size(reach)
        band, blocks = _band(t[: reach + 1], size), _blocks(torch.zeros_like(x), size)
        for place, windows in _windows(x, reach, size):
            blocks[place] = windows @ band
        y.copy_(blocks.flatten(1)[:, : x.shape[1]])
    return sums


@torch.library.custom_op("normal_guidance::window_sums_tap_gradient", mutates_args=())
def stacked_tap_gradient(gradient: Tensor, values: Tensor, taps: Tensor) -> Tensor:
    """The gradient of (C, T) taps from (C, R, S) gradients and values."""
    found = torch.zeros_like(taps)
    for g, x, t, into in zip(gradient, values, taps, found, strict=True):
        reach = _reach(t, x)
        size = _block_size(reach)
        width, blocks = size + 2 * reach, _blocks(g, size)
        products = x.new_zeros(size, width)  # of each slice of a block with each that it reads
        for place, windows in _windows(x, reach, size):
            products += blocks[place].mT @ windows
        # Row i of a block reads distance o - reach at column i + o: sums along the diagonals.
        by_offset = products.as_strided((size, 2 * reach + 1), (width + 1, 1)).sum(0)
        before, own, behind = by_offset.split([reach, 1, reach])
        into[: reach + 1] = torch.cat([own, before.flip(0) + behind])
    return found


def _plain_sums(values: Float[Tensor, "rows longest"], taps: Float[Tensor, "reach"]) -> Float[Tensor, "rows longest"]:
    """`window_sums` of one configuration without blocks, whose number would be fixed in an exported graph."""
    reach, longest = len(taps) - 1, values.shape[1]
    read = torch.arange(longest, device=values.device)[:, None] + torch.arange(2 * reach + 1, device=values.device)
    return F.pad(values, (reach, reach))[:, read] @ torch.cat([taps[1:].flip(0), taps])


def _reach(taps: Tensor, values: Tensor) -> int:
    """The greatest distance that counts."""
    if taps.is_cuda:
        return min(len(taps), values.shape[1]) - 1
    counting = taps[: values.shape[1]].nonzero()
    return int(counting[-1]) if len(counting) else 0


def _block_size(reach: int) -> int:
    return max(SMALLEST, min(2 * reach, LARGEST))


def _blocks(rows: Float[Tensor, "rows longest"], size: int) -> Float[Tensor, "rows blocks size"]:
    return F.pad(rows, (0, -rows.shape[1] % size)).unflatten(1, (-1, size))


def _band(taps: Float[Tensor, "reach_and_one"], size: int) -> Float[Tensor, "width size"]:
    """Entry (i, j): the tap by which the sum at slice j of a block counts slice i of those that it reads."""
    both = F.pad(torch.cat([taps[1:].flip(0), taps]), (size - 1, size - 1))
    return both.unfold(0, size, 1).flip(1)


def _windows(
    rows: Float[Tensor, "rows longest"], reach: int, size: int
) -> Iterator[tuple[tuple[Tensor, Tensor], Float[Tensor, "some width"]]]:
    """Rows and blocks, some at a time, and the slices that they read; on the CPU only those with values."""
    width, longest = size + 2 * reach, rows.shape[1]
    padded = F.pad(rows, (reach, reach + -longest % size))
    every = padded.unfold(1, width, size)
    if rows.is_cuda:
        index = torch.arange(len(rows) * every.shape[1], device=rows.device)
        row, block = index // every.shape[1], index % every.shape[1]
    else:
        before = F.pad(padded.ne(0).cumsum(1), (1, 0))  # values before each slice
        first = torch.arange(0, longest, size)
        row, block = (before[:, first + width] > before[:, first]).nonzero(as_tuple=True)
    for some in zip(*(one.split(max(1, AT_ONCE // width)) for one in (row, block)), strict=True):
        yield some, every[some]


@stacked_sums.register_fake
def _(values: Tensor, taps: Tensor) -> Tensor:
    return values.new_empty(values.shape)


@stacked_tap_gradient.register_fake
def _(gradient: Tensor, values: Tensor, taps: Tensor) -> Tensor:
    return taps.new_empty(taps.shape)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    values, taps = ctx.saved_tensors
    for_values, for_taps = ctx.needs_input_grad
    return (
        stacked_sums(gradient, taps) if for_values else None,
        stacked_tap_gradient(gradient, values, taps) if for_taps else None,
    )


stacked_sums.register_autograd(_gradients, setup_context=save_tensors)
stacked_sums.register_vmap(vmap_over_configurations(stacked_sums, stacked=2))
stacked_tap_gradient.register_vmap(vmap_over_configurations(stacked_tap_gradient, stacked=3))
