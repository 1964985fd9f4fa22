"""Triton kernels of `self_attention.attend`: one program for each head, configuration and tile of a bag's rows.

Bags of up to `BLOCK` rows, class token included, are one tile: the forward pass reads queries, keys and values once,
and one fused kernel computes all gradients from one more read.  Longer bags are tiled as in FlashAttention-2 (Dao,
2023), with two backward kernels, one for queries and one for keys and values, so that no two programs add to the same
number and results do not vary from run to run.

The class token has its own tensor.  In the tile that a program computes it is row 0; in the tiles that a program loops
over it is left out and added first, as a rank-1 term, so that these are plain rows that can be prefetched.

A head's d columns are handled as two parts, "a" and "b", whose widths are powers of two: 96 = 64 + 32 instead of 128.
Offsets fit 32 bits within a configuration and need 64 across them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import sqrt
from typing import Any, no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor
from triton.runtime.errors import OutOfResources

from normal_guidance.core.arrays import PerBag, find_bags

# Kernels are written in Triton's language, so only their constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"

Wide = Float[Tensor, "configs rows three_features"]
Token = Float[Tensor, "configs three_features"]
Joined = Float[Tensor, "configs rows features"]
Sums = Float[Tensor, "configs heads rows"]

BLOCK = 64  # rows of a tile, if they fit: the number that one warp group of Hopper multiplies at a time

SMALLEST_BLOCK = 16  # the fewest rows that tensor cores multiply

TILES_HELD = 7
"""Tiles of a head's rows in the shared memory of the greediest kernel, the backward pass of one tile; measured."""

LOG2_E = tl.constexpr(1.4426950408889634)  # converts exponents to base 2, the base of the hardware's exponential


@dataclass(frozen=True)
class _Plan:
    """The grid of programs, the places of their bags, and the constants that they are compiled for."""

    grid: tuple[int, int, int]
    """Heads come first, because those of one bag are adjacent in memory."""
    places: tuple[Tensor, Tensor, Tensor, Tensor]
    """Each bag's first row and length, each tile's bag (`bags` for surplus tiles), each bag's first tile."""
    constants: dict[str, Any]

    @classmethod
    def make(
        cls, qkv: Tensor, first: Tensor, lengths: Tensor, heads: int, longest: int, most: int = BLOCK
    ) -> _Plan | None:
        """The plan with tiles of at most `most` rows, or None if the card cannot hold the smallest tiles."""
        configs, rows, width = qkv.shape
        d = width // (3 * heads)
        # Full float32 products run outside the tensor cores, from registers, which a larger tile would overflow.
        full = qkv.dtype == torch.float32 and torch.get_float32_matmul_precision() == "highest"
        block = min(
            BLOCK // 2 if full else BLOCK,
            max(SMALLEST_BLOCK, triton.next_power_of_2(longest + 1)),
            _largest_block(qkv, d),
            most,
        )
        if block < SMALLEST_BLOCK:
            return None
        single = longest < block
        tiles = len(first) if single else len(first) + rows // block
        wide, narrow = _widths(d)
        constants = {
            "HEADS": heads,
            "D": d,
            "WIDE": wide,
            "NARROW": narrow,
            "SCALE": 1 / sqrt(d),
            "BLOCK": block,
            "SINGLE": single,
            "PRECISION": "ieee" if full else "tf32",
            "num_warps": 8 if full else 4,
            "num_stages": 1 if qkv.dtype == torch.float32 else 2,
        }
        # Each tile's bag and each bag's first tile; with one tile per bag `first` fills their places and is not read.
        table = first, first
        if not single:
            counts = (lengths + block) // block  # tiles of lengths + 1 rows, rounded up
            table = find_bags(torch.arange(tiles, device=lengths.device), counts), counts.cumsum(0) - counts
        return cls((heads, tiles, configs), (first, lengths, *table), constants)


def _widths(d: int) -> tuple[int, int]:
    """The widths of the two parts of a head's columns."""
    wide = max(16, triton.next_power_of_2(d) // 2)
    return wide, max(16, triton.next_power_of_2(max(1, d - wide)))


def _largest_block(qkv: Tensor, d: int) -> int:
    """The most rows of a tile, a power of two, that the card's shared memory holds; 0 if it holds no tile."""
    if not qkv.is_cuda:  # Triton's interpreter
        return BLOCK
    memory = torch.cuda.get_device_properties(qkv.device).shared_memory_per_block_optin  # type: ignore[attr-defined]
    rows = memory // (TILES_HELD * sum(_widths(d)) * qkv.element_size())
    return 1 << rows.bit_length() - 1 if rows else 0


def forward(
    qkv: Wide, token: Token, first: PerBag, lengths: PerBag, heads: int, longest: int
) -> tuple[Joined, Sums] | None:
    """Output, and the log-sum-exp of the scores for `backward`, undefined in unused rows; None if no tile fits."""
    qkv, token, first, lengths = (x.contiguous() for x in (qkv, token, first, lengths))
    configs, rows, width = qkv.shape
    out = qkv.new_empty(configs, rows, width // 3)
    lse = qkv.new_empty(configs, heads, rows, dtype=torch.float32)

    def run(plan: _Plan) -> None:
        kernel = _single_forward_kernel if plan.constants["SINGLE"] else _forward_kernel
        kernel[plan.grid](qkv, token, out, lse, *plan.places, rows, len(first), **plan.constants)

    with torch.cuda.device_of(qkv):
        if not _run_with_tiles_that_fit(run, qkv, first, lengths, heads, longest):
            return None
        _zero_unused(out, first, lengths)
    return out, lse


def backward(
    grad: Joined,
    qkv: Wide,
    token: Token,
    out: Joined,
    lse: Sums,
    first: PerBag,
    lengths: PerBag,
    heads: int,
    longest: int,
) -> tuple[Wide, Token] | None:
    """Gradients of `qkv` and `token`; None if no tile fits."""
    grad, qkv, token, first, lengths = (x.contiguous() for x in (grad, qkv, token, first, lengths))
    rows, bags = qkv.shape[1], len(first)
    dqkv = torch.empty_like(qkv)
    dtoken = token.new_empty(len(token), bags, token.shape[1], dtype=torch.float32)

    def run(plan: _Plan) -> None:
        given, made, where = (grad, qkv, token, lse), (dqkv, dtoken), (*plan.places, rows, bags)
        if plan.constants["SINGLE"]:
            _backward_kernel[plan.grid](*given, *made, *where, **plan.constants)
        else:
            delta = torch.empty_like(lse)
            _backward_queries_kernel[plan.grid](*given, out, delta, *made, *where, **plan.constants)
            _backward_keys_kernel[plan.grid](*given, delta, *made, *where, **plan.constants)

    with torch.cuda.device_of(qkv):
        if not _run_with_tiles_that_fit(run, qkv, first, lengths, heads, longest):
            return None
        _zero_unused(dqkv, first, lengths)
    return dqkv, dtoken.sum(1).to(token.dtype)


def _run_with_tiles_that_fit(
    run: Callable[[_Plan], None], qkv: Tensor, first: Tensor, lengths: Tensor, heads: int, longest: int
) -> bool:
    """Run with the largest tiles that the card holds; False if it holds none."""
    most = BLOCK
    while (plan := _Plan.make(qkv, first, lengths, heads, longest, most)) is not None:
        try:
            run(plan)
            return True
        except OutOfResources:  # the compiler needs more than was estimated
            most = plan.constants["BLOCK"] // 2
    return False


def _zero_unused(values: Tensor, first: Tensor, lengths: Tensor) -> None:
    """Write zeros after the last bag.  Programs before its end return at once, so the whole tensor is not cleared."""
    configs, rows, width = values.shape
    block = 16
    grid = (triton.cdiv(rows, block), configs)
    _zero_unused_kernel[grid](values, first, lengths, rows, len(first), WIDTH=width, BLOCK=block, COLUMNS=256)


@triton.jit
@no_type_check
def _zero_unused_kernel(
    values, first, lengths, rows, bags, WIDTH: tl.constexpr, BLOCK: tl.constexpr, COLUMNS: tl.constexpr
):
    end = tl.load(first + bags - 1) + tl.load(lengths + bags - 1) + 1
    start = tl.program_id(0) * BLOCK
    if start + BLOCK <= end:
        return
    row = start + tl.arange(0, BLOCK)
    unused = (row >= end) & (row < rows)
    base = values + tl.program_id(1).to(tl.int64) * rows * WIDTH + row[:, None] * WIDTH
    zeros = tl.zeros((BLOCK, COLUMNS), values.dtype.element_ty)
    for start_column in range(0, WIDTH, COLUMNS):
        column = start_column + tl.arange(0, COLUMNS)[None, :]
        tl.store(base + column, zeros, mask=unused[:, None] & (column < WIDTH))


@triton.jit
@no_type_check
def _place(first, lengths, tile_bag, bag_tile, bags, BLOCK: tl.constexpr, SINGLE: tl.constexpr):
    """This program's bag, the bag's first row and length, and the tile's start in the bag."""
    tile = tl.program_id(1)
    if SINGLE:
        bag = tile
        start = 0
    else:
        bag = tl.load(tile_bag + tile).to(tl.int32)
        start = (tile - tl.load(bag_tile + bag, mask=bag < bags, other=0).to(tl.int32)) * BLOCK
    row = tl.load(first + bag, mask=bag < bags, other=0).to(tl.int32)
    length = tl.load(lengths + bag, mask=bag < bags, other=0).to(tl.int32)
    return bag, row, length, start


@triton.jit
@no_type_check
def _load(base, position, keep, STRIDE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr):
    """Rows `position` of one head in two parts, 0 for rows that are not kept."""
    a = tl.arange(0, WIDE)[None, :]
    b = WIDE + tl.arange(0, NARROW)[None, :]
    rows = base + position[:, None] * STRIDE
    return (
        tl.load(rows + a, mask=keep[:, None] & (a < D), other=0.0),
        tl.load(rows + b, mask=keep[:, None] & (b < D), other=0.0),
    )


@triton.jit
@no_type_check
def _load_row(base, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr):
    """One row of one head in two parts, (1, columns) each."""
    a = tl.arange(0, WIDE)[None, :]
    b = WIDE + tl.arange(0, NARROW)[None, :]
    return tl.load(base + a, mask=a < D, other=0.0), tl.load(base + b, mask=b < D, other=0.0)


@triton.jit
@no_type_check
def _load_with_token(
    base, token, position, length, STRIDE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr
):
    """A tile of a bag, with the class token in the bag's row 0."""
    a, b = _load(base, position, (position > 0) & (position <= length), STRIDE, D, WIDE, NARROW)
    token_a, token_b = _load_row(token, D, WIDE, NARROW)
    is_token = (position == 0)[:, None]
    return tl.where(is_token, token_a, a), tl.where(is_token, token_b, b)


@triton.jit
@no_type_check
def _store(base, position, keep, a, b, STRIDE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr):
    """The inverse of `_load`."""
    column_a = tl.arange(0, WIDE)[None, :]
    column_b = WIDE + tl.arange(0, NARROW)[None, :]
    rows = base + position[:, None] * STRIDE
    tl.store(rows + column_a, a.to(base.dtype.element_ty), mask=keep[:, None] & (column_a < D))
    tl.store(rows + column_b, b.to(base.dtype.element_ty), mask=keep[:, None] & (column_b < D))


@triton.jit
@no_type_check
def _store_gradient(
    base, token, position, length, a, b,
    STRIDE: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr,
):  # fmt: skip
    """Store the slices' gradients in their rows, 0 in the token's row, and the token's gradient in its own tensor."""
    is_token = position == 0
    _store(token, position, is_token, a, b, 0, D, WIDE, NARROW)
    a = tl.where(is_token[:, None], 0.0, a)
    b = tl.where(is_token[:, None], 0.0, b)
    _store(base, position, position <= length, a, b, STRIDE, D, WIDE, NARROW)


@triton.jit
@no_type_check
def _products(x_a, x_b, y_a, y_b, PRECISION: tl.constexpr):
    """x y^T for two tiles of rows."""
    partial = tl.dot(x_a, tl.trans(y_a), input_precision=PRECISION)
    return tl.dot(x_b, tl.trans(y_b), partial, input_precision=PRECISION)


@triton.jit
@no_type_check
def _products_with_row(x_a, x_b, row_a, row_b):
    """x y^T for a tile and one row."""
    return tl.sum(x_a.to(tl.float32) * row_a, 1) + tl.sum(x_b.to(tl.float32) * row_b, 1)


@triton.jit
@no_type_check
def _single_forward_kernel(
    qkv, token, out, lse, first, lengths, tile_bag, bag_tile, rows, bags,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, SINGLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a bag that is one tile: all loads of queries, keys and values start before the first is used."""
    head, config = tl.program_id(0), tl.program_id(2).to(tl.int64)
    _bag, row, length, _ = _place(first, lengths, tile_bag, bag_tile, bags, BLOCK, SINGLE)
    FEATURES: tl.constexpr = HEADS * D
    STRIDE: tl.constexpr = 3 * FEATURES
    qkv += config * rows * STRIDE + row * STRIDE + head * D
    token += config * STRIDE + head * D
    out += config * rows * FEATURES + row * FEATURES + head * D
    lse += (config * HEADS + head) * rows + row

    position = tl.arange(0, BLOCK)
    inside = position <= length
    q_a, q_b = _load_with_token(qkv, token, position, length, STRIDE, D, WIDE, NARROW)
    k_a, k_b = _load_with_token(qkv + FEATURES, token + FEATURES, position, length, STRIDE, D, WIDE, NARROW)
    v_a, v_b = _load_with_token(qkv + 2 * FEATURES, token + 2 * FEATURES, position, length, STRIDE, D, WIDE, NARROW)
    scores = tl.where(inside[None, :], _products(q_a, q_b, k_a, k_b, PRECISION) * (SCALE * LOG2_E), float("-inf"))
    largest = tl.max(scores, 1)
    p = tl.exp2(scores - largest[:, None])
    total = tl.sum(p, 1)
    share = (1 / total)[:, None]
    p = p.to(v_a.dtype)
    out_a = tl.dot(p, v_a, input_precision=PRECISION) * share
    out_b = tl.dot(p, v_b, input_precision=PRECISION) * share
    _store(out, position, inside, out_a, out_b, FEATURES, D, WIDE, NARROW)
    tl.store(lse + position, (largest + tl.log2(total)) / LOG2_E, mask=inside)


@triton.jit
@no_type_check
def _forward_kernel(
    qkv, token, out, lse, first, lengths, tile_bag, bag_tile, rows, bags,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, SINGLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attention of a tile of queries: loop over the bag's keys and values, updating softmax's maximum and sum."""
    head, config = tl.program_id(0), tl.program_id(2).to(tl.int64)
    bag, row, length, start = _place(first, lengths, tile_bag, bag_tile, bags, BLOCK, SINGLE)
    if bag >= bags:
        return
    FEATURES: tl.constexpr = HEADS * D
    STRIDE: tl.constexpr = 3 * FEATURES
    qkv += config * rows * STRIDE + row * STRIDE + head * D
    token += config * STRIDE + head * D
    out += config * rows * FEATURES + row * FEATURES + head * D
    lse += (config * HEADS + head) * rows + row

    position = start + tl.arange(0, BLOCK)
    q_a, q_b = _load_with_token(qkv, token, position, length, STRIDE, D, WIDE, NARROW)

    # The class token is the first key of every query.
    token_k_a, token_k_b = _load_row(token + FEATURES, D, WIDE, NARROW)
    token_v_a, token_v_b = _load_row(token + 2 * FEATURES, D, WIDE, NARROW)
    largest = _products_with_row(q_a, q_b, token_k_a, token_k_b) * (SCALE * LOG2_E)
    total = tl.full((BLOCK,), 1.0, tl.float32)
    out_a = tl.zeros((BLOCK, WIDE), tl.float32) + token_v_a
    out_b = tl.zeros((BLOCK, NARROW), tl.float32) + token_v_b

    for begin in range(1, length + 1, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        k_a, k_b = _load(qkv + FEATURES, key, key <= length, STRIDE, D, WIDE, NARROW)
        v_a, v_b = _load(qkv + 2 * FEATURES, key, key <= length, STRIDE, D, WIDE, NARROW)
        scores = _products(q_a, q_b, k_a, k_b, PRECISION) * (SCALE * LOG2_E)
        scores = tl.where((key <= length)[None, :], scores, float("-inf"))
        new_largest = tl.maximum(largest, tl.max(scores, 1))
        p = tl.exp2(scores - new_largest[:, None])
        shrink = tl.exp2(largest - new_largest)
        total = total * shrink + tl.sum(p, 1)
        p = p.to(v_a.dtype)
        out_a = tl.dot(p, v_a, out_a * shrink[:, None], input_precision=PRECISION)
        out_b = tl.dot(p, v_b, out_b * shrink[:, None], input_precision=PRECISION)
        largest = new_largest

    inside = position <= length
    share = (1 / total)[:, None]
    _store(out, position, inside, out_a * share, out_b * share, FEATURES, D, WIDE, NARROW)
    tl.store(lse + position, (largest + tl.log2(total)) / LOG2_E, mask=inside)


@triton.jit
@no_type_check
def _backward_kernel(
    grad, qkv, token, lse, dqkv, dtoken, first, lengths, tile_bag, bag_tile, rows, bags,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, SINGLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """All gradients of a bag that is one tile.  `out` is not needed: sum(out * grad) equals sum(P * dP)."""
    head, config = tl.program_id(0), tl.program_id(2).to(tl.int64)
    bag, row, length, _ = _place(first, lengths, tile_bag, bag_tile, bags, BLOCK, SINGLE)
    FEATURES: tl.constexpr = HEADS * D
    STRIDE: tl.constexpr = 3 * FEATURES
    qkv += config * rows * STRIDE + row * STRIDE + head * D
    dqkv += config * rows * STRIDE + row * STRIDE + head * D
    token += config * STRIDE + head * D
    dtoken += (config * bags + bag) * STRIDE + head * D
    grad += config * rows * FEATURES + row * FEATURES + head * D
    lse += (config * HEADS + head) * rows + row

    position = tl.arange(0, BLOCK)
    inside = position <= length
    q_a, q_b = _load_with_token(qkv, token, position, length, STRIDE, D, WIDE, NARROW)
    k_a, k_b = _load_with_token(qkv + FEATURES, token + FEATURES, position, length, STRIDE, D, WIDE, NARROW)
    v_a, v_b = _load_with_token(qkv + 2 * FEATURES, token + 2 * FEATURES, position, length, STRIDE, D, WIDE, NARROW)
    do_a, do_b = _load(grad, position, inside, FEATURES, D, WIDE, NARROW)
    log_total = tl.load(lse + position, mask=inside, other=0.0) * LOG2_E

    # Queries and gradients outside the bag are 0, so only keys need hiding.
    scores = _products(q_a, q_b, k_a, k_b, PRECISION) * (SCALE * LOG2_E)
    p = tl.exp2(tl.where(inside[None, :], scores, float("-inf")) - log_total[:, None])
    dp = _products(do_a, do_b, v_a, v_b, PRECISION)
    ds = p * (dp - tl.sum(p * dp, 1)[:, None]) * SCALE

    p_t = tl.trans(p.to(q_a.dtype))
    dv_a = tl.dot(p_t, do_a, input_precision=PRECISION)
    dv_b = tl.dot(p_t, do_b, input_precision=PRECISION)
    _store_gradient(dqkv + 2 * FEATURES, dtoken + 2 * FEATURES, position, length, dv_a, dv_b, STRIDE, D, WIDE, NARROW)
    ds = ds.to(q_a.dtype)
    dq_a = tl.dot(ds, k_a, input_precision=PRECISION)
    dq_b = tl.dot(ds, k_b, input_precision=PRECISION)
    _store_gradient(dqkv, dtoken, position, length, dq_a, dq_b, STRIDE, D, WIDE, NARROW)
    ds_t = tl.trans(ds)
    dk_a = tl.dot(ds_t, q_a, input_precision=PRECISION)
    dk_b = tl.dot(ds_t, q_b, input_precision=PRECISION)
    _store_gradient(dqkv + FEATURES, dtoken + FEATURES, position, length, dk_a, dk_b, STRIDE, D, WIDE, NARROW)


@triton.jit
@no_type_check
def _backward_queries_kernel(
    grad, qkv, token, lse, out, delta, dqkv, dtoken, first, lengths, tile_bag, bag_tile, rows, bags,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, SINGLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of queries, and delta = sum(out * grad) of each query for the keys' kernel."""
    head, config = tl.program_id(0), tl.program_id(2).to(tl.int64)
    bag, row, length, start = _place(first, lengths, tile_bag, bag_tile, bags, BLOCK, SINGLE)
    if bag >= bags:
        return
    FEATURES: tl.constexpr = HEADS * D
    STRIDE: tl.constexpr = 3 * FEATURES
    qkv += config * rows * STRIDE + row * STRIDE + head * D
    dqkv += config * rows * STRIDE + row * STRIDE + head * D
    token += config * STRIDE + head * D
    dtoken += (config * bags + bag) * STRIDE + head * D
    grad += config * rows * FEATURES + row * FEATURES + head * D
    out += config * rows * FEATURES + row * FEATURES + head * D
    lse += (config * HEADS + head) * rows + row
    delta += (config * HEADS + head) * rows + row

    position = start + tl.arange(0, BLOCK)
    inside = position <= length
    q_a, q_b = _load_with_token(qkv, token, position, length, STRIDE, D, WIDE, NARROW)
    do_a, do_b = _load(grad, position, inside, FEATURES, D, WIDE, NARROW)
    out_a, out_b = _load(out, position, inside, FEATURES, D, WIDE, NARROW)
    log_total = tl.load(lse + position, mask=inside, other=0.0) * LOG2_E
    own_delta = _products_with_row(do_a, do_b, out_a.to(tl.float32), out_b.to(tl.float32))
    tl.store(delta + position, own_delta, mask=inside)

    # The class token as key.
    token_k_a, token_k_b = _load_row(token + FEATURES, D, WIDE, NARROW)
    token_v_a, token_v_b = _load_row(token + 2 * FEATURES, D, WIDE, NARROW)
    p_token = tl.exp2(_products_with_row(q_a, q_b, token_k_a, token_k_b) * (SCALE * LOG2_E) - log_total)
    ds_token = (p_token * (_products_with_row(do_a, do_b, token_v_a, token_v_b) - own_delta))[:, None]
    dq_a = ds_token * token_k_a
    dq_b = ds_token * token_k_b

    for begin in range(1, length + 1, BLOCK):
        key = begin + tl.arange(0, BLOCK)
        k_a, k_b = _load(qkv + FEATURES, key, key <= length, STRIDE, D, WIDE, NARROW)
        v_a, v_b = _load(qkv + 2 * FEATURES, key, key <= length, STRIDE, D, WIDE, NARROW)
        scores = _products(q_a, q_b, k_a, k_b, PRECISION) * (SCALE * LOG2_E)
        p = tl.exp2(tl.where((key <= length)[None, :], scores, float("-inf")) - log_total[:, None])
        dp = _products(do_a, do_b, v_a, v_b, PRECISION)
        ds = (p * (dp - own_delta[:, None])).to(k_a.dtype)
        dq_a = tl.dot(ds, k_a, dq_a, input_precision=PRECISION)
        dq_b = tl.dot(ds, k_b, dq_b, input_precision=PRECISION)

    _store_gradient(dqkv, dtoken, position, length, dq_a * SCALE, dq_b * SCALE, STRIDE, D, WIDE, NARROW)


@triton.jit
@no_type_check
def _backward_keys_kernel(
    grad, qkv, token, lse, delta, dqkv, dtoken, first, lengths, tile_bag, bag_tile, rows, bags,
    HEADS: tl.constexpr, D: tl.constexpr, WIDE: tl.constexpr, NARROW: tl.constexpr, SCALE: tl.constexpr,
    BLOCK: tl.constexpr, SINGLE: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Gradients of a tile of keys and values: loop over the bag's queries; score tiles are (keys, queries)."""
    head, config = tl.program_id(0), tl.program_id(2).to(tl.int64)
    bag, row, length, start = _place(first, lengths, tile_bag, bag_tile, bags, BLOCK, SINGLE)
    if bag >= bags:
        return
    FEATURES: tl.constexpr = HEADS * D
    STRIDE: tl.constexpr = 3 * FEATURES
    qkv += config * rows * STRIDE + row * STRIDE + head * D
    dqkv += config * rows * STRIDE + row * STRIDE + head * D
    token += config * STRIDE + head * D
    dtoken += (config * bags + bag) * STRIDE + head * D
    grad += config * rows * FEATURES + row * FEATURES + head * D
    lse += (config * HEADS + head) * rows + row
    delta += (config * HEADS + head) * rows + row

    position = start + tl.arange(0, BLOCK)
    k_a, k_b = _load_with_token(qkv + FEATURES, token + FEATURES, position, length, STRIDE, D, WIDE, NARROW)
    v_a, v_b = _load_with_token(qkv + 2 * FEATURES, token + 2 * FEATURES, position, length, STRIDE, D, WIDE, NARROW)

    # The class token as query.
    token_q_a, token_q_b = _load_row(token, D, WIDE, NARROW)
    token_do_a, token_do_b = _load_row(grad, D, WIDE, NARROW)
    p_token = tl.exp2(_products_with_row(k_a, k_b, token_q_a, token_q_b) * (SCALE * LOG2_E) - tl.load(lse) * LOG2_E)
    ds_token = (p_token * (_products_with_row(v_a, v_b, token_do_a, token_do_b) - tl.load(delta)))[:, None]
    dk_a = ds_token * token_q_a
    dk_b = ds_token * token_q_b
    dv_a = p_token[:, None] * token_do_a
    dv_b = p_token[:, None] * token_do_b

    for begin in range(1, length + 1, BLOCK):
        query = begin + tl.arange(0, BLOCK)
        q_a, q_b = _load(qkv, query, query <= length, STRIDE, D, WIDE, NARROW)
        do_a, do_b = _load(grad, query, query <= length, FEATURES, D, WIDE, NARROW)
        log_total = tl.load(lse + query, mask=query <= length, other=0.0) * LOG2_E
        other_delta = tl.load(delta + query, mask=query <= length, other=0.0)
        # Queries and gradients after the bag's end are 0, so they add 0.
        p = tl.exp2(_products(k_a, k_b, q_a, q_b, PRECISION) * (SCALE * LOG2_E) - log_total[None, :])
        dp = _products(v_a, v_b, do_a, do_b, PRECISION)
        ds = (p * (dp - other_delta[None, :])).to(q_a.dtype)
        p = p.to(q_a.dtype)
        dv_a = tl.dot(p, do_a, dv_a, input_precision=PRECISION)
        dv_b = tl.dot(p, do_b, dv_b, input_precision=PRECISION)
        dk_a = tl.dot(ds, q_a, dk_a, input_precision=PRECISION)
        dk_b = tl.dot(ds, q_b, dk_b, input_precision=PRECISION)

    _store_gradient(
        dqkv + FEATURES, dtoken + FEATURES, position, length, dk_a * SCALE, dk_b * SCALE, STRIDE, D, WIDE, NARROW
    )
    _store_gradient(dqkv + 2 * FEATURES, dtoken + 2 * FEATURES, position, length, dv_a, dv_b, STRIDE, D, WIDE, NARROW)
