"""Ranks of slices within their scans: orders in which to remove them, and the correlation of two orders."""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64, Int, Int64
from torch import Tensor

from normal_guidance.core.packed import bag_of_rows, place_in_bag


def highest_first(
    scores: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"], generator: torch.Generator
) -> Int64[Tensor, "slices"]:
    """The slices' numbers, scan after scan, the highest score first; ties in random order.

    Ties must not be broken by position: max pooling ties most slices, and the first of them would mark a place.
    """
    order = torch.randperm(len(scores), generator=generator)
    order = order[scores[order].argsort(descending=True, stable=True)]
    return order[bag_of_rows(lengths)[order].argsort(stable=True)]


def moved_round(lengths: Int[Tensor, "scans"], generator: torch.Generator) -> Int64[Tensor, "slices"]:
    """The slices' numbers, scan after scan, each scan rotated to begin at a random slice."""
    size, place = lengths[bag_of_rows(lengths)], place_in_bag(lengths)
    by = (torch.rand(len(lengths), generator=generator) * lengths).long()[bag_of_rows(lengths)]
    return torch.arange(len(size)) - place + (place + by) % size


def ranks(scores: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"]) -> Float64[Tensor, "slices"]:
    """Ranks within each scan from 0, ties sharing their mean."""
    scan = bag_of_rows(lengths)
    order = scores.argsort(stable=True)
    order = order[scan[order].argsort(stable=True)]
    ordered, of = scores[order], scan[order]
    begins = torch.ones_like(of, dtype=torch.bool)
    begins[1:] = (ordered[1:] != ordered[:-1]) | (of[1:] != of[:-1])
    group = begins.cumsum(0) - 1
    place = place_in_bag(lengths).double()  # also right for the ordered slices: scans keep their order and lengths
    count = torch.bincount(group).double()
    mean = torch.zeros_like(count).index_add(0, group, place) / count
    return torch.empty_like(place).index_copy(0, order, mean[group])


def rank_correlation(
    one: Float[Tensor, "slices"], other: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"]
) -> Float64[Tensor, "scans"]:
    """Spearman's correlation within each scan; NaN where all slices of a scan tie in either score."""
    scan, half = bag_of_rows(lengths), (lengths.double() - 1) / 2
    x, y = (ranks(scores, lengths) - half[scan] for scores in (one, other))

    def total(values: Tensor) -> Tensor:
        return torch.zeros(len(lengths), dtype=torch.float64).index_add(0, scan, values)

    # Ranks are multiples of one half, so sums are exact.
    return total(x * y) / (total(x * x) * total(y * y)).sqrt()
