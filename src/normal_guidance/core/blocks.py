"""Blocks of positive slices: their number in a scan, their lengths, and the share of the scan that they fill.

Bags are packed: all slices of all bags in one vector, and `lengths` says where one bag ends. A slice label is
1 (positive), 0 (negative) or -1 (unknown); either all slices of a bag are labelled or none. Blocks of all bags are
found at once, without a loop in Python.
"""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int, Int64, Shaped
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import check_lengths, find_bags, sum_per_bag

GAP = 3  # the most consecutive negative slices inside a block: the rule behind the paper's three block tables

PERCENTILES = {"min": 0.0, "5th": 0.05, "25th": 0.25, "50th": 0.5, "75th": 0.75, "95th": 0.95, "max": 1.0}
"""Columns of the paper's block tables, beside the mean."""


@dataclass(frozen=True)
class SliceCounts:
    """Positive, negative and unknown slices of each bag, and the four kinds of bag that follow from them."""

    positive: Int64[Tensor, "bags"]
    negative: Int64[Tensor, "bags"]
    unknown: Int64[Tensor, "bags"]
    unlabelled: Bool[Tensor, "bags"]
    all_negative: Bool[Tensor, "bags"]
    all_positive: Bool[Tensor, "bags"]
    mixed: Bool[Tensor, "bags"]  # bags with slices of both classes, whose slices can be ranked


def count_slices(slice_labels: Shaped[Tensor, "slices"], lengths: Int[Tensor, "bags"]) -> SliceCounts:
    """Count the slices of each class in each packed bag, and refuse invalid labels; waits for a GPU."""
    lengths = lengths.to(slice_labels.device)
    check_lengths(lengths, slice_labels, "slice_labels")
    positive, negative, unknown = (sum_per_bag(slice_labels == label, lengths) for label in (1, 0, -1))
    outside = positive + negative + unknown != lengths
    if outside.any():
        known = (slice_labels == 1) | (slice_labels == 0) | (slice_labels == -1)
        value, bag = slice_labels[~known][0].item(), int(outside.nonzero()[0])
        raise UserError(f"bag {bag} has slice label {value}: use 1 positive, 0 negative, -1 unknown")
    partly = (unknown > 0) & (unknown < lengths)
    if partly.any():
        bag = int(partly.nonzero()[0])
        raise UserError(
            f"bag {bag} has {int(unknown[bag])} unknown (-1) of {int(lengths[bag])} slice labels: "
            "label all of its slices, or set all to -1"
        )
    return SliceCounts(
        *(positive, negative, unknown),
        unlabelled=unknown > 0,
        all_negative=(unknown == 0) & (positive == 0),
        all_positive=(unknown == 0) & (negative == 0),
        mixed=(positive > 0) & (negative > 0),
    )


@dataclass(frozen=True)
class BlockStatistics:
    """Blocks of all positive bags of a dataset; `unlabelled` and `all_negative` bags were skipped."""

    bags_by_blocks: dict[int, int]  # how many bags have so many blocks
    lengths: Int64[Tensor, "blocks"]
    fractions: Float64[Tensor, "blocks"]
    unlabelled: int
    all_negative: int

    @property
    def mean_length(self) -> float:
        """Mean number of slices in a block, bridged gaps included."""
        self._check_not_empty()
        return self.lengths.double().mean().item()

    @property
    def receptive_field(self) -> int:
        """R, the width of the convolution in `SliceReference`: the mean block length as a whole number."""
        return round(self.mean_length)

    def summary(self) -> dict[str, dict[str, float]]:
        """Mean and percentiles (linear interpolation) of block lengths and fractions: two rows of the tables."""
        self._check_not_empty()
        return {"length": _describe(self.lengths.double()), "fraction": _describe(self.fractions)}

    def _check_not_empty(self) -> None:
        if not len(self.lengths):
            raise UserError(
                f"no blocks to describe: {self.all_negative} bags have no positive slice and "
                f"{self.unlabelled} have unknown slice labels; pass bags with positive slices"
            )


def block_statistics(slice_labels: Shaped[Tensor, "slices"], lengths: Int[Tensor, "bags"]) -> BlockStatistics:
    """Find the blocks of all packed bags at once; the end of a bag always ends a block.

    >>> block_statistics(torch.tensor([0, 1, 1, 1]), torch.tensor([3, 1])).lengths.tolist()
    [2, 1]
    """
    counts = count_slices(slice_labels, lengths)
    blocks, bag = find_blocks(slice_labels, lengths)
    length = blocks[:, 1] - blocks[:, 0]
    bags_with = torch.bincount(torch.bincount(bag, minlength=len(lengths))).tolist()
    return BlockStatistics(
        bags_by_blocks={blocks: bags for blocks, bags in enumerate(bags_with) if blocks and bags},
        lengths=length,
        fractions=length.double() / lengths.to(bag.device)[bag],
        unlabelled=int(counts.unlabelled.sum()),
        all_negative=int(counts.all_negative.sum()),
    )


def find_blocks(slice_labels: Tensor, lengths: Tensor) -> tuple[Int64[Tensor, "blocks 2"], Int64[Tensor, "blocks"]]:
    """Blocks [start, stop) in packed positions, and the bag of each; up to `GAP` negatives in a row are part of one.

    >>> find_blocks(torch.tensor([1, 1, 1, 0, 0, 0, 1, 0, 0, 0, 0, 1]), torch.tensor([12]))[0].tolist()
    [[0, 7], [11, 12]]
    """
    positions = (slice_labels == 1).nonzero().squeeze(1)
    bag = find_bags(positions, lengths.to(slice_labels.device))
    # Two successive positives belong to different blocks if more than `GAP` negatives or a bag's end lie between them.
    apart = (positions.diff() > GAP + 1) | (bag.diff() > 0)
    edge = apart.new_ones(min(len(positions), 1))
    first, last = torch.cat([edge, apart]), torch.cat([apart, edge])
    return torch.stack([positions[first], positions[last] + 1], dim=1), bag[first]


def _describe(values: Tensor) -> dict[str, float]:
    quantiles = torch.quantile(values, values.new_tensor(list(PERCENTILES.values())))
    return {"mean": values.mean().item(), **dict(zip(PERCENTILES, quantiles.tolist(), strict=True))}
