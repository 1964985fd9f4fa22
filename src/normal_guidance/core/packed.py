"""Packed rows, one bag after the other: the bag of each row, its place in the bag, and sums over each bag."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Int, Int64, Shaped
from torch import Tensor

from normal_guidance.errors import UserError


def bag_of_rows(lengths: Int[Tensor, "bags"], total: int | None = None) -> Int64[Tensor, "rows"]:
    """The number of each row's bag; given the `total` of the lengths, it does not wait for a GPU."""
    bags = torch.arange(len(lengths), device=lengths.device)
    return torch.repeat_interleave(bags, lengths, output_size=total)


def find_bags(rows: Int[Tensor, "rows"], lengths: Int[Tensor, "*steps bags"]) -> Int64[Tensor, "*steps rows"]:
    """The bag of each given row, by binary search; the number of bags for rows behind the last one.

    For few rows, or for a fixed number of rows that bags need not fill; for all rows `bag_of_rows` is ten times faster.
    """
    rows = rows.expand(*lengths.shape[:-1], -1).contiguous()
    return torch.searchsorted(lengths.cumsum(-1), rows, right=True)


def place_in_bag(lengths: Int[Tensor, "bags"]) -> Int64[Tensor, "rows"]:
    """Each row's place in its bag, counted from 0."""
    bag = bag_of_rows(lengths)
    return torch.arange(len(bag), device=lengths.device) - (lengths.cumsum(0) - lengths)[bag]


def running_sum(values: Shaped[Tensor, "rows"]) -> Shaped[Tensor, "rows_and_one"]:
    """The sum of all values before each row, and last the sum of all."""
    return F.pad(values.cumsum(0), (1, 0))


def sum_per_bag(values: Shaped[Tensor, "rows"], lengths: Int[Tensor, "bags"]) -> Shaped[Tensor, "bags"]:
    """The sum of each bag's values; flags and whole numbers are exact, as differences of two running sums.

    Floating-point numbers are added within each bag: a running sum over all bags would lose their digits.
    """
    if values.is_floating_point():
        return values.new_zeros(len(lengths)).index_add(0, bag_of_rows(lengths), values)
    running, stops = running_sum(values), lengths.cumsum(0)
    return running[stops] - running[stops - lengths]


def check_lengths(lengths: Int[Tensor, "bags"], values: Shaped[Tensor, "..."], name: str) -> None:
    """Refuse lengths that are not counts of at least 1, or that do not add up to a vector of `values`."""
    if lengths.ndim != 1 or (len(lengths) and int(lengths.min()) < 1):
        raise UserError(
            f"lengths must be a vector of positive slice counts, got {lengths.tolist()}; leave empty bags out"
        )
    if values.shape != (int(lengths.sum()),):
        raise UserError(
            f"lengths add up to {int(lengths.sum())} slices, but {name} has shape {tuple(values.shape)}: "
            "give one number for every slice of every scan, in the same order"
        )
