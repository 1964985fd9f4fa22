"""`products` on CUDA: one launch reads each row of a bag once, with tensor cores, and sums in a fixed order.

A program handles one (tile, bag, configuration); tiles past a bag's end read nothing.  Fewer than 16 queries are
padded to 16, the least for tensor cores; the kernels are bound by memory, so the padding costs nothing.

Kernels are marked `no_type_check` because Triton compiles their source: the tests' shape checks must not wrap them.
"""

from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.runtime.errors import OutOfResources

from normal_guidance.core.arrays import PerBag

Stacked = Float[Tensor, "configurations rows features"]
Queries = Float[Tensor, "configurations bags queries features"]
Weights = Float[Tensor, "configurations bags queries longest"]

TILE = 64  # rows of a bag that a program holds at a time; most scans of the benchmark fit
WIDEST_QUERIES = 128  # the most queries that a program holds; more are tiled, and rows are then read once per tile
SUMMED_QUERIES = 32  # queries that `spread` sums over at a time


def dot(queries: Queries, rows: Stacked, first: PerBag, count: PerBag, longest: int) -> Weights:
    """Launch `_dot_kernel`."""
    queries, rows = dense_within(queries), dense_within(rows)
    configurations, bags, q, m = queries.shape
    scores = queries.new_empty(configurations, bags, q, longest, dtype=torch.float32)
    blocks = _blocks(q, m, rows)
    grid = (triton.cdiv(longest, TILE) * triton.cdiv(q, blocks["BLOCK_Q"]), bags, configurations)
    strides = (queries.stride(0), rows.stride(0))
    launch(_dot_kernel, grid, queries, rows, first, count, scores, *strides, longest, Q=q, M=m, **blocks)
    return scores


def pool(weights: Weights, rows: Stacked, first: PerBag, count: PerBag) -> Queries:
    """Launch `_pool_kernel`."""
    weights, rows = dense_within(weights), dense_within(rows)
    configurations, bags, q, longest = weights.shape
    m = rows.shape[-1]
    pooled = rows.new_empty(configurations, bags, q, m)
    blocks = _blocks(q, m, rows)
    grid = (triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(q, blocks["BLOCK_Q"]), bags, configurations)
    strides = (weights.stride(0), rows.stride(0))
    launch(_pool_kernel, grid, weights, rows, first, count, pooled, *strides, longest, Q=q, M=m, **blocks)
    return pooled


def spread(weights: Weights, queries: Queries, first: PerBag, count: PerBag, rows: int) -> Stacked:
    """Launch `_spread_kernel`, and write zeros in unused rows."""
    weights, queries = dense_within(weights), dense_within(queries)
    configurations, bags, q, longest = weights.shape
    m = queries.shape[-1]
    out = queries.new_empty(configurations, rows, m)
    blocks = _blocks(min(q, SUMMED_QUERIES), m, queries)
    grid = (triton.cdiv(m, blocks["BLOCK_M"]) * triton.cdiv(longest, TILE), bags, configurations)
    strides = (weights.stride(0), queries.stride(0), out.stride(0))
    launch(_spread_kernel, grid, weights, queries, first, count, out, *strides, longest, Q=q, M=m, **blocks)
    zero_unused_rows(out, first, count)
    return out


def zero_unused_rows(out: Stacked, first: PerBag, count: PerBag) -> None:
    """Write zeros in the unused rows, in place.  Filling all of `out` first would write every row twice."""
    configurations, rows, m = out.shape
    grid = (triton.cdiv(rows, TILE), configurations)
    _zero_unused_kernel[grid](out, first, count, out.stride(0), rows, len(first), M=m, TILE=TILE, BLOCK_M=128)


def launch(kernel: Any, grid: tuple[int, ...], *arguments: Any, num_stages: int, **constants: Any) -> None:
    """Launch a kernel that loads `num_stages` tiles ahead, or fewer if shared memory does not hold them."""
    try:
        kernel[grid](*arguments, **constants, num_stages=num_stages)
    except OutOfResources:
        if num_stages == 1:
            raise
        launch(kernel, grid, *arguments, num_stages=num_stages - 1, **constants)


def dense_within(stacked: Float[Tensor, "configurations *shape"]) -> Float[Tensor, "configurations *shape"]:
    """The tensor, contiguous within each configuration.  Shared tensors have a stride of 0 and are not copied."""
    return stacked if stacked[0].is_contiguous() else stacked.contiguous()


def precision_of(rows: Float[Tensor, "*shape"]) -> str:
    """The precision of float32 products, as set for torch's matrix products."""
    exact = rows.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
    return "ieee" if exact else "tf32"


def _blocks(queries: int, features: int, rows: Float[Tensor, "*shape"]) -> dict[str, Any]:
    """Tile sizes: 256 bytes of a row at a time; twice the warps if many queries would fill the registers."""
    block_q = min(WIDEST_QUERIES, max(16, triton.next_power_of_2(queries)))
    block_m = min(256 // rows.element_size(), max(16, triton.next_power_of_2(features)))
    return {
        "TILE": TILE,
        "BLOCK_Q": block_q,
        "BLOCK_M": block_m,
        "PRECISION": precision_of(rows),
        "num_warps": 4 if block_q <= 32 else 8,
        "num_stages": 3,
    }


@triton.jit
@no_type_check
def _dot_kernel(
    queries,
    rows,
    first,
    count,
    scores,
    query_stride,
    row_stride,
    longest,
    Q: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """s_qj for one tile of rows: products are summed along the features."""
    query_tiles: tl.constexpr = (Q + BLOCK_Q - 1) // BLOCK_Q
    tile, bag, configuration = tl.program_id(0) // query_tiles, tl.program_id(1), tl.program_id(2).to(tl.int64)
    q = tl.program_id(0) % query_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    j = tile * TILE + tl.arange(0, TILE)
    length = tl.load(count + bag).to(tl.int32)
    bag_rows = rows + configuration * row_stride + tl.load(first + bag) * M
    bag_queries = queries + configuration * query_stride + bag * (Q * M)
    total = tl.zeros((TILE, BLOCK_Q), tl.float32)
    if tile * TILE < length:
        for start in range(0, M, BLOCK_M):
            m = start + tl.arange(0, BLOCK_M)
            x_inside = (j < length)[:, None] & (m < M)[None, :]
            u_inside = (q < Q)[None, :] & (m < M)[:, None]
            x = tl.load(bag_rows + j[:, None] * M + m[None, :], mask=x_inside, other=0.0)
            u = tl.load(bag_queries + q[None, :] * M + m[:, None], mask=u_inside, other=0.0)
            total = tl.dot(x, u, total, input_precision=PRECISION)
    bag_scores = scores + (configuration * tl.num_programs(1) + bag) * Q * longest
    tl.store(bag_scores + q[None, :] * longest + j[:, None], total, mask=(q < Q)[None, :] & (j < longest)[:, None])


@triton.jit
@no_type_check
def _pool_kernel(
    weights,
    rows,
    first,
    count,
    pooled,
    weight_stride,
    row_stride,
    longest,
    Q: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """z_q for one block of features: products are summed along the bag's rows."""
    feature_tiles: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    bag, configuration = tl.program_id(1), tl.program_id(2).to(tl.int64)
    q = tl.program_id(0) // feature_tiles * BLOCK_Q + tl.arange(0, BLOCK_Q)
    m = tl.program_id(0) % feature_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    length = tl.load(count + bag).to(tl.int32)
    bag_rows = rows + configuration * row_stride + tl.load(first + bag) * M
    bag_weights = weights + configuration * weight_stride + bag * (Q * longest)
    total = tl.zeros((BLOCK_Q, BLOCK_M), tl.float32)
    for start in range(0, length, TILE):
        j = start + tl.arange(0, TILE)
        a_inside = (q < Q)[:, None] & (j < length)[None, :]
        x_inside = (j < length)[:, None] & (m < M)[None, :]
        a = tl.load(bag_weights + q[:, None] * longest + j[None, :], mask=a_inside, other=0.0)
        x = tl.load(bag_rows + j[:, None] * M + m[None, :], mask=x_inside, other=0.0)
        total = tl.dot(a.to(x.dtype), x, total, input_precision=PRECISION)
    bag_pooled = pooled + (configuration * tl.num_programs(1) + bag) * (Q * M)
    inside = (q < Q)[:, None] & (m < M)[None, :]
    tl.store(bag_pooled + q[:, None] * M + m[None, :], total.to(pooled.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _spread_kernel(
    weights,
    queries,
    first,
    count,
    out,
    weight_stride,
    query_stride,
    out_stride,
    longest,
    Q: tl.constexpr,
    M: tl.constexpr,
    TILE: tl.constexpr,
    BLOCK_Q: tl.constexpr,
    BLOCK_M: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """y_j for one tile of rows and one block of features: products are summed along the queries."""
    feature_tiles: tl.constexpr = (M + BLOCK_M - 1) // BLOCK_M
    tile, bag, configuration = tl.program_id(0) // feature_tiles, tl.program_id(1), tl.program_id(2).to(tl.int64)
    length = tl.load(count + bag).to(tl.int32)
    if tile * TILE >= length:
        return
    j = tile * TILE + tl.arange(0, TILE)
    m = tl.program_id(0) % feature_tiles * BLOCK_M + tl.arange(0, BLOCK_M)
    bag_weights = weights + configuration * weight_stride + bag * (Q * longest)
    bag_queries = queries + configuration * query_stride + bag * (Q * M)
    total = tl.zeros((TILE, BLOCK_M), tl.float32)
    for start in range(0, Q, BLOCK_Q):
        q = start + tl.arange(0, BLOCK_Q)
        a_inside = (q < Q)[None, :] & (j < length)[:, None]
        u_inside = (q < Q)[:, None] & (m < M)[None, :]
        a = tl.load(bag_weights + q[None, :] * longest + j[:, None], mask=a_inside, other=0.0)
        u = tl.load(bag_queries + q[:, None] * M + m[None, :], mask=u_inside, other=0.0)
        total = tl.dot(a.to(u.dtype), u, total, input_precision=PRECISION)
    bag_out = out + configuration * out_stride + tl.load(first + bag) * M
    inside = (j < length)[:, None] & (m < M)[None, :]
    tl.store(bag_out + j[:, None] * M + m[None, :], total.to(out.dtype.element_ty), mask=inside)


@triton.jit
@no_type_check
def _zero_unused_kernel(
    out, first, count, out_stride, rows, bags, M: tl.constexpr, TILE: tl.constexpr, BLOCK_M: tl.constexpr
):
    """Write zeros in a tile's rows that are in no bag; bags may be in any order, with any gaps."""
    row = tl.program_id(0) * TILE + tl.arange(0, TILE)
    used = tl.zeros((TILE,), tl.int32)
    for start in range(0, bags, TILE):
        bag = start + tl.arange(0, TILE)
        begin = tl.load(first + bag, mask=bag < bags, other=0).to(tl.int32)
        end = begin + tl.load(count + bag, mask=bag < bags, other=0).to(tl.int32)
        held = (row[:, None] >= begin[None, :]) & (row[:, None] < end[None, :])
        used = tl.maximum(used, tl.max(held.to(tl.int32), axis=1))
    unused = (used == 0) & (row < rows)
    tile_out = out + tl.program_id(1).to(tl.int64) * out_stride + row[:, None].to(tl.int64) * M
    for start in range(0, M, BLOCK_M):
        m = start + tl.arange(0, BLOCK_M)
        zeros = tl.zeros((TILE, BLOCK_M), out.dtype.element_ty)
        tl.store(tile_out + m[None, :], zeros, mask=unused[:, None] & (m < M)[None, :])
