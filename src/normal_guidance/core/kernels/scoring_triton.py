"""`scoring` on CUDA: a program holds all hidden units of a block of columns, so that it reads them once."""

from __future__ import annotations

from typing import no_type_check

import torch
import triton
import triton.language as tl
from jaxtyping import Float
from torch import Tensor

# Kernels are written in Triton's language, so only their constants are annotated.
# mypy: disable-error-code="no-untyped-def, untyped-decorator"


Scores = Float[Tensor, "configurations rows"]
Columns = Float[Tensor, "configurations hidden rows"]
Units = Float[Tensor, "configurations hidden"]

NUMBERS = 8192  # numbers that a program holds at a time


def scores(columns: Columns, bias: Units, vector: Units) -> Scores:
    """Launch `_scores_kernel`."""
    configurations, hidden, rows = columns.shape
    out = columns.new_empty(configurations, rows, dtype=torch.float32)
    block = _block(hidden)
    with torch.cuda.device_of(columns):
        _scores_kernel[(triton.cdiv(rows, block["BLOCK"]), configurations)](
            columns, bias.contiguous(), vector.contiguous(), out, *columns.stride(), rows, HIDDEN=hidden, **block
        )
    return out


def gradients(gradient: Scores, columns: Columns, bias: Units, vector: Units) -> tuple[Columns, Units, Units]:
    """Launch `_gradients_kernel`, and add up the parts of its programs."""
    configurations, hidden, rows = columns.shape
    inner = torch.empty_like(columns)
    block = _block(hidden)
    blocks = triton.cdiv(rows, block["BLOCK"])
    bias_parts, vector_parts = (
        columns.new_empty(configurations, blocks, hidden, dtype=torch.float32) for _ in range(2)
    )
    with torch.cuda.device_of(columns):
        _gradients_kernel[(blocks, configurations)](
            gradient.contiguous(),
            columns,
            bias.contiguous(),
            vector.contiguous(),
            inner,
            bias_parts,
            vector_parts,
            *columns.stride(),
            *inner.stride(),
            rows,
            HIDDEN=hidden,
            **block,
        )
    return inner, bias_parts.sum(1).to(bias.dtype), vector_parts.sum(1).to(vector.dtype)


def _block(hidden: int) -> dict[str, int]:
    units = triton.next_power_of_2(hidden)
    return {"UNITS": units, "BLOCK": max(16, NUMBERS // units), "num_warps": 8}


@triton.jit
@no_type_check
def _hidden(
    columns,
    bias,
    vector,
    config,
    s_config,
    s_unit,
    s_row,
    rows,
    HIDDEN: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The program's units and columns, which of them exist, tanh of the columns, and the vector."""
    unit, row = tl.arange(0, UNITS), tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    inside = (unit < HIDDEN)[:, None] & (row < rows)[None, :]
    place = columns + config * s_config + unit[:, None] * s_unit + row[None, :] * s_row
    shift = tl.load(bias + config * HIDDEN + unit, mask=unit < HIDDEN, other=0.0).to(tl.float32)
    value = tl.load(place, mask=inside, other=0.0).to(tl.float32) + shift[:, None]
    weight = tl.load(vector + config * HIDDEN + unit, mask=unit < HIDDEN, other=0.0).to(tl.float32)
    return unit, row, inside, 2.0 * tl.sigmoid(2.0 * value) - 1.0, weight


@triton.jit
@no_type_check
def _scores_kernel(
    columns,
    bias,
    vector,
    out,
    s_config,
    s_unit,
    s_row,
    rows,
    HIDDEN: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The scores of a block of columns."""
    config = tl.program_id(1).to(tl.int64)
    _, row, _, hidden, weight = _hidden(
        columns, bias, vector, config, s_config, s_unit, s_row, rows, HIDDEN, UNITS, BLOCK
    )
    tl.store(out + config * rows + row, tl.sum(hidden * weight[:, None], 0), mask=row < rows)


@triton.jit
@no_type_check
def _gradients_kernel(
    gradient,
    columns,
    bias,
    vector,
    inner,
    bias_parts,
    vector_parts,
    s_config,
    s_unit,
    s_row,
    i_config,
    i_unit,
    i_row,
    rows,
    HIDDEN: tl.constexpr,
    UNITS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """The gradient of a block of columns, and its part of those of bias and vector."""
    config = tl.program_id(1).to(tl.int64)
    unit, row, inside, hidden, weight = _hidden(
        columns, bias, vector, config, s_config, s_unit, s_row, rows, HIDDEN, UNITS, BLOCK
    )
    slope = tl.load(gradient + config * rows + row, mask=row < rows, other=0.0).to(tl.float32)[None, :]
    change = slope * weight[:, None] * (1.0 - hidden * hidden)
    place = inner + config * i_config + unit[:, None] * i_unit + row[None, :] * i_row
    tl.store(place, change.to(inner.dtype.element_ty), mask=inside)
    part = (config * tl.num_programs(0) + tl.program_id(0)) * HIDDEN + unit
    tl.store(bias_parts + part, tl.sum(change, 1), mask=unit < HIDDEN)
    tl.store(vector_parts + part, tl.sum(slope * hidden, 1), mask=unit < HIDDEN)
