"""`convolution` on CUDA: forward reads x and writes y once, backward reads x and g and writes their gradient once.

A program is one warp with four features per lane.  It goes down its rows in groups and loads the rows of a group, and
the few before and after them, one by one into registers: the loads of a group overlap, a row's neighbours are in other
registers of the same lane, and sums over rows need no exchange between lanes.  Its part of the weight's gradient stays
in registers until its last row, so no two programs add to one number.

One small integer per row says which neighbours count, the same for all configurations and features (`_taps_kernel`).
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.core.arrays import PerBag
from normal_guidance.core.kernels.products_triton import Stacked, dense_within

Weight = Float[Tensor, "configurations features taps"]
Bias = Float[Tensor, "configurations features"]

TAPS_TILE = 64  # rows and bags that `_taps_kernel` compares at a time
FEATURES = 128  # features per program: four for each lane of its warp
ENOUGH_PROGRAMS = 4096
"""Twice as many as an H200 runs at once; with fewer, programs get fewer rows each, so that there are more of them."""

BACKWARD_REGISTERS = 144
"""Allows fourteen programs per multiprocessor instead of ten; ptxas spills 36 bytes (bfloat16, seven taps)."""


def forward(rows: Stacked, weight: Weight, bias: Bias, first: PerBag, lengths: PerBag, longest: int) -> Stacked:
    """Launch `_forward_kernel`; it does not need the length of the longest bag."""
    rows, weight, bias = dense_within(rows), dense_within(weight), dense_within(bias)
    out = rows.new_empty(rows.shape)
    blocks = _blocks(rows, weight)
    taps = _taps(first, lengths, rows.shape[1], weight.shape[2])
    strides = (rows.stride(0), weight.stride(0), bias.stride(0), out.stride(0))
    _forward_kernel[_grid(rows, blocks)](rows, weight, bias, taps, out, *strides, rows.shape[1], **blocks)
    return out


def backward(
    gradient: Stacked, rows: Stacked, weight: Weight, first: PerBag, lengths: PerBag, longest: int
) -> tuple[Stacked, Weight, Bias]:
    """Launch `_backward_kernel` and sum the parts of its programs; the bias's gradient has the weight's dtype."""
    gradient, rows, weight = dense_within(gradient), dense_within(rows), dense_within(weight)
    configurations, count, features = rows.shape
    width = weight.shape[2]
    d_rows = rows.new_empty(rows.shape)
    blocks = _blocks(rows, weight)
    taps = _taps(first, lengths, count, width)
    chunks = triton.cdiv(count, blocks["CHUNK"])
    shares = rows.new_empty(configurations, chunks, width + 1, features, dtype=torch.float32)
    strides = (gradient.stride(0), rows.stride(0), weight.stride(0), d_rows.stride(0))
    _backward_kernel[_grid(rows, blocks)](
        gradient, rows, weight, taps, d_rows, shares, *strides, count, **blocks, maxnreg=BACKWARD_REGISTERS
    )
    d_weight, d_bias = weight.new_empty(weight.shape), weight.new_empty(weight.shape[:2])
    total = shares.sum(1)
    d_weight.copy_(total[:, :width].mT)
    d_bias.copy_(total[:, width])
    return d_rows, d_weight, d_bias


def _taps(first: PerBag, lengths: PerBag, rows: int, width: int) -> Int[Tensor, "rows"]:
    """Launch `_taps_kernel`: one launch, where torch's own operations would need a dozen."""
    taps = torch.empty(rows, dtype=torch.int32, device=first.device)
    grid = (triton.cdiv(rows, TAPS_TILE),)
    _taps_kernel[grid](first, lengths, taps, rows, len(first), K=width, TILE=TAPS_TILE)
    return taps


def _blocks(rows: Stacked, weight: Weight) -> dict[str, Any]:
    """Constants of the kernels: a group is the rows that fit in registers, a chunk the rows of a program."""
    configurations, count, features = rows.shape
    group, block = 16 // rows.element_size(), min(FEATURES, max(32, triton.next_power_of_2(features)))
    chunk = 64
    while chunk > group and configurations * triton.cdiv(count, chunk) * triton.cdiv(features, block) < ENOUGH_PROGRAMS:
        chunk //= 2
    sizes = {"M": features, "K": weight.shape[2], "GROUP": group, "CHUNK": chunk, "BLOCK_M": block}
    return {**sizes, "num_warps": 1, "num_stages": 1}


def _grid(rows: Stacked, blocks: dict[str, Any]) -> tuple[int, int]:
    """The grid: adjacent programs share rows, so that memory is read in long runs."""
    configurations, count, features = rows.shape
    return triton.cdiv(features, blocks["BLOCK_M"]) * triton.cdiv(count, blocks["CHUNK"]), configurations


@triton.jit
@no_type_check
def _taps_kernel(first, lengths, taps, rows, bags, K: tl.constexpr, TILE: tl.constexpr):
    """Bits of a row: bit k < K if it and its neighbour at tap k are slices of one bag, bit K if it is a class token."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    before, after = tl.full((TILE,), -1, tl.int32), tl.full((TILE,), -1, tl.int32)
    for start in range(0, bags, TILE):
        bag = start + tl.arange(0, TILE)
        begin = tl.load(first + bag, mask=bag < bags, other=0).to(tl.int32)
        end = begin + tl.load(lengths + bag, mask=bag < bags, other=-1).to(tl.int32)
        held = (row[:, None] >= begin[None, :]) & (row[:, None] <= end[None, :])
        before = tl.maximum(before, tl.max(tl.where(held, row[:, None] - begin[None, :], -1), axis=1))
        after = tl.maximum(after, tl.max(tl.where(held, end[None, :] - row[:, None], -1), axis=1))
    bits = tl.where(before == 0, 1 << K, 0)
    for k in tl.static_range(K):
        inside = (before > 0) & (before + (k - K // 2) > 0) & (after >= k - K // 2)
        bits += tl.where(inside, 1 << k, 0)
    tl.store(taps + row, bits, mask=row < rows)


@triton.jit
@no_type_check
def _load_rows(base, start, rows, m, M: tl.constexpr, COUNT: tl.constexpr):
    """Rows from `start` on, each as a vector; 0 before the first row and after the last."""
    values = ()
    for i in tl.static_range(COUNT):
        inside = (start + i >= 0) & (start + i < rows)
        values += (tl.load(base + (start + i) * M + m, mask=inside & (m < M), other=0.0),)
    return values


@triton.jit
@no_type_check
def _load_weight(base, m, M: tl.constexpr, K: tl.constexpr):
    """A vector of features for each tap."""
    values = ()
    for k in tl.static_range(K):
        values += (tl.load(base + m * K + k, mask=m < M, other=0.0).to(tl.float32),)
    return values


@triton.jit
@no_type_check
def _if_bit(bits, k: tl.constexpr, value):
    """The vector as float32 if the row's bit k is set, else 0."""
    return tl.where((bits >> k) & 1 != 0, value.to(tl.float32), 0.0)


@triton.jit
@no_type_check
def _forward_kernel(
    rows,
    weight,
    bias,
    taps,
    out,
    row_stride,
    weight_stride,
    bias_stride,
    out_stride,
    count,
    M: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """y of one chunk of rows and one block of features."""
    feature_blocks: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    begin, configuration = tl.program_id(0) // feature_blocks * CHUNK, tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) % feature_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    w = _load_weight(weight + configuration * weight_stride, m, M, K)
    b = tl.load(bias + configuration * bias_stride + m, mask=m < M, other=0.0).to(tl.float32)
    rows += configuration * row_stride
    out += configuration * out_stride
    for step in range(0, CHUNK, GROUP):
        start = begin + step
        x = _load_rows(rows, start - K // 2, count, m, M, GROUP + K - 1)
        for i in tl.static_range(GROUP):
            bits = tl.load(taps + start + i, mask=start + i < count, other=0)
            if bits == (1 << K) - 1:  # most rows: no end of the bag is near, which saves a third of the instructions
                y = b
                for k in tl.static_range(K):
                    y += w[k] * x[i + k].to(tl.float32)
            else:
                y = _if_bit(bits, K // 2, b) + _if_bit(bits, K, x[i + K // 2])
                for k in tl.static_range(K):
                    y += w[k] * _if_bit(bits, k, x[i + k])
            tl.store(out + (start + i) * M + m, y.to(out.dtype.element_ty), mask=(start + i < count) & (m < M))


@triton.jit
@no_type_check
def _backward_kernel(
    gradient,
    rows,
    weight,
    taps,
    d_rows,
    shares,
    gradient_stride,
    row_stride,
    weight_stride,
    d_row_stride,
    count,
    M: tl.constexpr,
    K: tl.constexpr,
    GROUP: tl.constexpr,
    CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    """Gradients of one chunk of rows and one block of features: row s is tap k of the row at its own tap K - 1 - k."""
    feature_blocks: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    begin, configuration = tl.program_id(0) // feature_blocks * CHUNK, tl.program_id(1).to(tl.int64)
    m = tl.program_id(0) % feature_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    w = _load_weight(weight + configuration * weight_stride, m, M, K)
    gradient += configuration * gradient_stride
    rows += configuration * row_stride
    d_rows += configuration * d_row_stride
    totals = ()
    for _ in tl.static_range(K + 1):
        totals += (tl.zeros((BLOCK_M,), tl.float32),)
    for step in range(0, CHUNK, GROUP):
        start = begin + step
        g = _load_rows(gradient, start - K // 2, count, m, M, GROUP + K - 1)
        x = _load_rows(rows, start, count, m, M, GROUP)
        for i in tl.static_range(GROUP):
            bits = tl.load(taps + start + i, mask=start + i < count, other=0)
            d = _if_bit(bits, K, g[i + K // 2])
            sums = ()
            for k in tl.static_range(K):
                read = _if_bit(bits, K - 1 - k, g[i + K - 1 - k])
                d += w[k] * read
                sums += (totals[k] + x[i].to(tl.float32) * read,)
            sums += (totals[K] + _if_bit(bits, K // 2, g[i + K // 2]),)
            totals = sums
            tl.store(d_rows + (start + i) * M + m, d.to(d_rows.dtype.element_ty), mask=(start + i < count) & (m < M))
    chunks = tl.num_programs(0) // feature_blocks
    shares += (configuration * chunks + tl.program_id(0) // feature_blocks) * (K + 1) * M
    for k in tl.static_range(K + 1):
        tl.store(shares + k * M + m, totals[k], mask=m < M)
