"""Random numbers that depend on a slice's embedding and the epoch alone.

A generator would give other numbers in every engine: they batch, pad and stack differently, and a training that is
resumed would have to restore its state.  Here a slice has the same numbers wherever it is computed, and others in every
epoch.
"""

from __future__ import annotations

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

COLUMNS = 4
"""Features whose bits tell slices apart."""

BITS = 0xFFFFFFFF
"""Numbers are kept to 32 bits, so that a product of two fits into 64."""


class Epoch(nn.Module):
    """The number of the epoch in training, as a buffer that compiled code and recorded graphs read."""

    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros((), dtype=torch.int64), persistent=False)


def set_epoch(model: nn.Module, number: int) -> None:
    """Tell a model which epoch begins; only models that draw random numbers ask for it."""
    for module in model.modules():
        if isinstance(module, Epoch):
            module.number.fill_(number)


def uniform(rows: Float[Tensor, "rows features"], epoch: Epoch, count: int) -> Float[Tensor, "count rows"]:
    """Numbers in (0, 1) for every row."""
    bits = rows.detach()[:, :COLUMNS].float().contiguous().view(torch.int32).to(torch.int64) & BITS
    state = _mixed(epoch.number + 1)
    for column in bits.unbind(1):
        state = _mixed(state ^ column)
    # A constant for each number: of an arange, the compiler would make 32 bits on CUDA, too few for the product.
    series = torch.stack([_mixed(state ^ (number * 0x9E3779B9 & BITS)) for number in range(1, count + 1)])
    return (series.to(torch.float64) + 0.5).div(BITS + 1.0).float()


def normal(rows: Float[Tensor, "rows features"], epoch: Epoch, count: int) -> Float[Tensor, "count rows"]:
    """Standard normal numbers for every row, by the transformation of Box and Muller."""
    radius, angle = uniform(rows, epoch, 2 * count).split(count)
    return (-2 * radius.clamp_min(torch.finfo(radius.dtype).tiny).log()).sqrt() * (2 * math.pi * angle).cos()


def _mixed(state: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The last steps of MurmurHash3, in which every bit changes every other with a probability of one half."""
    state = (state ^ (state >> 16)) * 0x85EBCA6B & BITS
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & BITS
    return state ^ (state >> 16)
