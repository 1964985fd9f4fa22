"""`smoothing` on CUDA: a banded matrix, made in registers, times a tile of rows with its mirrored halo.

The kernels are bound by memory, and on tensor cores the 64 products per output are cheaper than reading 21 neighbours.
The degrees of the transpose are in the band, where they are powers of two and exact.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.arrays import PerBag
from normal_guidance.core.kernels.products_triton import Stacked, dense_within, launch, precision_of, zero_unused_rows

Kernels = Float[Tensor, "configurations taps"]

TILE = 32  # rows that a program computes: with a halo of 10 it reads 52, which fit the 64 of a tensor-core tile


def smooth(rows: Stacked, kernel: Kernels, first: PerBag, count: PerBag, longest: int, transposed: bool) -> Stacked:
    """Launch `_smooth_kernel`, and write zeros in unused rows."""
    rows, kernel = dense_within(rows), dense_within(kernel)
    configurations, _, features = rows.shape
    out = rows.new_empty(rows.shape)
    grid = (triton.cdiv(longest, TILE), len(first), configurations)
    strides = (rows.stride(0), kernel.stride(0), out.stride(0))
    blocks = _blocks(kernel.shape[1], rows)
    arguments = (rows, kernel, first, count, out, *strides)
    launch(_smooth_kernel, grid, *arguments, F=features, TRANSPOSED=transposed, **blocks)
    zero_unused_rows(out, first, count)
    return out


def kernel_gradient(gradient: Stacked, rows: Stacked, first: PerBag, count: PerBag, longest: int, taps: int) -> Kernels:
    """Launch `_kernel_gradient_kernel`, and sum the parts of its programs."""
    gradient, rows = dense_within(gradient), dense_within(rows)
    configurations, _, features = rows.shape
    grid = (triton.cdiv(longest, TILE), len(first), configurations)
    parts = rows.new_empty(configurations, grid[0] * grid[1], taps, dtype=torch.float32)
    strides = (gradient.stride(0), rows.stride(0))
    arguments = (gradient, rows, first, count, parts, *strides)
    launch(_kernel_gradient_kernel, grid, *arguments, F=features, **_blocks(taps, rows))
    return parts.sum(1)


def _blocks(taps: int, rows: Float[Tensor, "*shape"]) -> dict[str, Any]:
    """Tile sizes: 256 bytes of a row at a time, or 128 for unaligned rows, where every number needs an address."""
    aligned = rows.shape[-1] * rows.element_size() % 16 == 0
    wide = (256 if aligned else 128) // rows.element_size()
    return {
        "T": taps // 2,
        "TILE": TILE,
        "HALO": triton.next_power_of_2(TILE + taps - 1),
        "BLOCK_F": min(wide, max(16, triton.next_power_of_2(rows.shape[-1]))),
        "PRECISION": precision_of(rows),
        "num_warps": 4,
        "num_stages": 3,
    }


@triton.jit
@no_type_check
def _mirrored(position, length, T: tl.constexpr):
    """`core.layout.mirror` for positions from -T on; adding T periods keeps the remainder positive."""
    period = tl.maximum(2 * (length - 1), 1)
    folded = (position + T * period) % period
    return tl.minimum(folded, tl.minimum(period - folded, length - 1))


@triton.jit
@no_type_check
def _degree(place, length):
    """The number of neighbours in the chain."""
    return tl.where((place == 0) | (place == length - 1), 1.0, 2.0)


@triton.jit
@no_type_check
def _smooth_kernel(
    rows,
    kernel,
    first,
    count,
    out,
    row_stride,
    kernel_stride,
    out_stride,
    F: tl.constexpr,
    TRANSPOSED: tl.constexpr,
    T: tl.constexpr,
    TILE: tl.constexpr,
    HALO: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y_j of one tile of a bag, all features."""
    start, bag, configuration = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(count + bag).to(tl.int32)
    if start >= length:
        return
    j, h = tl.arange(0, TILE), tl.arange(0, HALO)
    source = _mirrored(start + h - T, length, T)
    needed = h < tl.minimum(TILE, length - start) + 2 * T
    tap = h[None, :] - j[:, None]
    band = tl.load(kernel + configuration * kernel_stride + tap, mask=(tap >= 0) & (tap <= 2 * T), other=0.0)
    if TRANSPOSED:
        band = band * (_degree(start + j, length)[:, None] / _degree(source, length)[None, :])
    band = band.to(rows.dtype.element_ty)
    begin = tl.load(first + bag) * F
    bag_rows = rows + configuration * row_stride + begin
    tile_out = out + configuration * out_stride + begin + start * F
    for feature in range(0, F, BLOCK_F):
        f = feature + tl.arange(0, BLOCK_F)
        x = tl.load(bag_rows + source[:, None] * F + f[None, :], mask=needed[:, None] & (f < F)[None, :], other=0.0)
        y = tl.dot(band, x, input_precision=PRECISION)
        inside = (start + j < length)[:, None] & (f < F)[None, :]
        tl.store(tile_out + j[:, None] * F + f[None, :], y.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _kernel_gradient_kernel(
    gradient,
    rows,
    first,
    count,
    parts,
    gradient_stride,
    row_stride,
    F: tl.constexpr,
    T: tl.constexpr,
    TILE: tl.constexpr,
    HALO: tl.constexpr,
    BLOCK_F: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """One tile's part of the kernel's gradient: products g_j . x_h of all pairs, summed along the diagonals."""
    start, bag, configuration = tl.program_id(0) * TILE, tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(count + bag).to(tl.int32)
    j, h = tl.arange(0, TILE), tl.arange(0, HALO)
    total = tl.zeros((TILE, HALO), tl.float32)
    if start < length:
        source = _mirrored(start + h - T, length, T)
        needed = h < tl.minimum(TILE, length - start) + 2 * T
        begin = tl.load(first + bag) * F
        tile_gradient = gradient + configuration * gradient_stride + begin + start * F
        bag_rows = rows + configuration * row_stride + begin
        for feature in range(0, F, BLOCK_F):
            f = feature + tl.arange(0, BLOCK_F)
            g_inside = (start + j < length)[:, None] & (f < F)[None, :]
            g = tl.load(tile_gradient + j[:, None] * F + f[None, :], mask=g_inside, other=0.0)
            x_inside = needed[None, :] & (f < F)[:, None]
            x = tl.load(bag_rows + source[None, :] * F + f[:, None], mask=x_inside, other=0.0)
            total = tl.dot(g, x, total, input_precision=PRECISION)
    k = tl.arange(0, HALO)
    diagonals = tl.gather(total, tl.minimum(j[:, None] + k[None, :], HALO - 1), 1)
    part = (configuration * tl.num_programs(1) + bag) * tl.num_programs(0) + tl.program_id(0)
    tl.store(parts + part * (2 * T + 1) + k, tl.sum(diagonals, axis=0), mask=k <= 2 * T)
