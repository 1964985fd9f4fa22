"""Packed scans as the measures need them: where each scan starts and stops, and its attention in whole numbers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from jaxtyping import Float, Int, Int64, Shaped
from torch import Tensor

from normal_guidance.core.packed import bag_of_rows, place_in_bag, sum_per_bag
from normal_guidance.errors import UserError

UNITS = 2**40
"""The sum of a scan's attention as whole numbers. Sums of whole numbers are exact in any order, on any device and after
any number of scans; 64 bits have room for 8 million scans."""


@dataclass(frozen=True)
class PackedScans:
    """The start and stop of each packed scan, and the scan of each slice."""

    lengths: Int64[Tensor, "scans"]
    starts: Int64[Tensor, "scans"]
    stops: Int64[Tensor, "scans"]
    of_slice: Int64[Tensor, "slices"]

    @classmethod
    def of(cls, lengths: Int[Tensor, "scans"]) -> PackedScans:
        """The scans with these numbers of slices, each at least 1."""
        lengths = lengths.long()
        stops = lengths.cumsum(0)
        return cls(lengths, stops - lengths, stops, bag_of_rows(lengths))

    @property
    def places(self) -> Int64[Tensor, "slices"]:
        """Each slice's place in its scan, counted from 0."""
        return place_in_bag(self.lengths)

    def count(self, values: Shaped[Tensor, "slices"]) -> Int64[Tensor, "scans"]:
        """The sum of flags or whole numbers in each scan, exact."""
        return sum_per_bag(values, self.lengths)

    def reduce(self, values: Shaped[Tensor, "slices"], how: Literal["sum", "amin", "amax"]) -> Shaped[Tensor, "scans"]:
        """The sum, minimum or maximum of each scan; NaN affects its own scan only."""
        empty = values.new_zeros(len(self.lengths))
        return empty.scatter_reduce(0, self.of_slice, values, how, include_self=False)

    def locate(self, flags: Shaped[Tensor, "slices"]) -> tuple[int, int]:
        """The scan of the first flagged slice, and the slice's place in it."""
        first = int(flags.nonzero()[0])
        return int(self.of_slice[first]), int(self.places[first])


def whole_numbers(attention: Float[Tensor, "slices"], scans: PackedScans) -> Int64[Tensor, "slices"]:
    """Attention as whole numbers that add up to about `UNITS` in each scan."""
    attention = attention.detach().double()
    wrong = ~(attention.isfinite() & (attention >= 0))
    if wrong.any():
        scan, place = scans.locate(wrong)
        raise UserError(
            f"scan {scan}, slice {place}: attention {attention[wrong][0].item()} is not a finite number of 0 or more; "
            "pass attention, not its logarithm, of a model that has not diverged"
        )
    total = scans.reduce(attention, "sum")
    if (total <= 0).any():
        scan = int((total <= 0).nonzero()[0])
        raise UserError(f"scan {scan}: attention is 0 on all of its slices, so no slice holds a share of it")
    return (attention / total[scans.of_slice] * UNITS).round().long()
