"""Deletion and insertion: the scan's score without the most attended slices, or with nothing but these.

A removal means something only in comparison with the removal of as many other slices: random ones; those in the middle,
where many findings lie; the least attended; those of the same attention moved along the scan, which keeps its shape
(removing a solid block does other harm than removing scattered slices); and those of untrained models' attention.

The curves follow two scores.  The logit of positive scans shows what the model's own number depends on; attention that
is tied to the logit wins there by construction, even on noise.  Scan AUROC shows whether the removed slices separate
positive from negative scans, which noise does not.

Reference: Petsiuk, Das, Saenko, "RISE", 2018 (deletion and insertion).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from jaxtyping import Float64, Int, Int64
from torch import Tensor

from normal_guidance.core.packed import bag_of_rows, place_in_bag, sum_per_bag
from normal_guidance.evaluation.trust.changed_scans import (
    Model,
    ScanPredictions,
    SliceSelection,
    predict_scans,
)
from normal_guidance.evaluation.trust.intervals import Bootstrap, Varied
from normal_guidance.statistics.slice_ranks import highest_first, moved_round
from normal_guidance.training.batches import Scans

SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)
"""Shares of a scan's slices, or of its attention, to remove or to keep."""

REPEATS = 3
"""Random orders, over which scores are averaged."""

ROUNDING = 1e-6
"""A share of attention counts as reached if no more than this is missing."""

By = Literal["slices", "attention"]
Kind = Literal["deletion", "insertion"]
Score = Literal["auroc", "logit"]
Orders = Mapping[str, Sequence[Int64[Tensor, "slices"]]]
"""Name -> one or several orders: the slices' numbers, scan after scan, the first to remove first."""

CONTROLS = ("random", "moved")
"""Orders that attention must beat."""


def make_orders(
    own: ScanPredictions,
    lengths: Int[Tensor, "scans"],
    untrained: Sequence[ScanPredictions],
    generator: torch.Generator,
) -> Orders:
    """The order by attention, and the orders to compare it with."""

    def order(scores: Tensor) -> Tensor:
        return highest_first(scores, lengths, generator)

    def drawn() -> Tensor:
        return torch.rand(len(own.scores), generator=generator)

    place, size = place_in_bag(lengths), lengths[bag_of_rows(lengths)]
    orders = {
        "attended": [order(own.scores)],
        "least attended": [order(-own.scores)],
        "middle": [order(-(place - (size - 1) / 2).abs())],
        "random": [order(drawn()) for _ in range(REPEATS)],
        "moved": [order(own.scores[moved_round(lengths, generator)]) for _ in range(REPEATS)],
    }
    return orders | ({"untrained": [order(one.scores) for one in untrained]} if untrained else {})


def count_slices(
    predictions: ScanPredictions, lengths: Int[Tensor, "scans"], share: float, by: By, order: Int64[Tensor, "slices"]
) -> Int64[Tensor, "scans"]:
    """How many slices make up a share of the slices, or the fewest that hold a share of attention; at least one."""
    if by == "slices":
        return (share * lengths + 0.5).floor().long().clamp(min=1)
    held = predictions.attention[order]
    running = held.cumsum(0)
    before = (running - held)[lengths.cumsum(0) - lengths]
    short = running - before[bag_of_rows(lengths)] < share - ROUNDING
    return 1 + sum_per_bag(short, lengths)


@dataclass(frozen=True, eq=False)
class Curves:
    """Scan scores by share, for each order: the logit of positive scans in standard deviations, and scan AUROC.

    `whole_logit` and `whole_auroc` are those of whole scans, where deletion begins and insertion ends.
    """

    kind: Kind
    shares: tuple[float, ...]
    logit: Mapping[str, Sequence[Varied]]
    auroc: Mapping[str, Sequence[Varied]]
    whole_logit: Varied
    whole_auroc: Varied

    def gap(self, score: Score, against: str, order: str = "attended") -> Varied:
        """Mean distance between two curves: how much more the score owes to the slices of `order`."""
        curves = self.logit if score == "logit" else self.auroc
        sign = 1 if self.kind == "deletion" else -1
        distances = [other - own for own, other in zip(curves[order], curves[against], strict=True)]
        return Varied.weighted(dict(zip(distances, sign * self._widths(), strict=True)))

    def _widths(self) -> Float64[np.ndarray, "shares"]:
        """Weights of the trapezoidal rule; the curves meet where nothing is removed, and where everything is kept."""
        end = 0.0 if self.kind == "deletion" else 1.0
        at = np.array([end, *self.shares] if self.kind == "deletion" else [*self.shares, end])
        half = np.diff(at) / 2 / (at[-1] - at[0])
        weights = np.append(half, 0) + np.insert(half, 0, 0)
        return weights[1:] if self.kind == "deletion" else weights[:-1]


def worth(curves: Mapping[Kind, Curves], against: str) -> Varied:
    """What attended slices are worth beyond others, in scan AUROC: the mean of the gaps by deletion and insertion.

    Deletion alone shows little in weak data: the rest of a negative scan has lost its highest noise, too.
    """
    return Varied.weighted({one.gap("auroc", against): 1 / len(curves) for one in curves.values()})


def draw_curves(
    model: Model,
    scans: Scans,
    own: ScanPredictions,
    orders: Orders,
    bootstrap: Bootstrap,
    *,
    by: By = "slices",
    watch: Callable[[float], None] | None = None,
) -> dict[Kind, Curves]:
    """Both curves of every order, from 2 x shares x orders passes over the scans; `watch` receives the share done."""
    lengths = scans.lengths.cpu()
    scale = float(own.logit.std()) or 1.0
    counts = [count_slices(own, lengths, share, by, orders["attended"][0]) for share in SHARES]
    kinds: tuple[Kind, ...] = ("deletion", "insertion")
    selections = {
        (kind, name, repeat, number): _slices_to_show(order, lengths, count, kind)
        for kind in kinds
        for name, several in orders.items()
        for repeat, order in enumerate(several)
        for number, count in enumerate(counts)
    }
    logits: dict[Kind, dict[str, Tensor]] = {kind: {"whole": own.logit / scale} for kind in kinds}
    for done, ((kind, *key), shown) in enumerate(selections.items(), start=1):
        logits[kind]["/".join(map(str, key))] = predict_scans(model, scans, shown).logit / scale
        if watch is not None:
            watch(done / len(selections))
    return {kind: _curves(kind, logits[kind], orders, bootstrap) for kind in kinds}


def _curves(kind: Kind, logits: Mapping[str, Float64[Tensor, "scans"]], orders: Orders, bootstrap: Bootstrap) -> Curves:
    aurocs, means = bootstrap.aurocs(logits), bootstrap.means(logits, bootstrap.labels == 1)
    return Curves(kind, SHARES, _averaged(means, orders), _averaged(aurocs, orders), means["whole"], aurocs["whole"])


def _averaged(found: Mapping[str, Varied], orders: Orders) -> dict[str, list[Varied]]:
    """Curves averaged over the orders of one name."""
    return {
        name: [
            Varied.weighted({found[f"{name}/{repeat}/{number}"]: 1 / len(several) for repeat in range(len(several))})
            for number in range(len(SHARES))
        ]
        for name, several in orders.items()
    }


def _slices_to_show(
    order: Int64[Tensor, "slices"], lengths: Int[Tensor, "scans"], counts: Int64[Tensor, "scans"], kind: Kind
) -> SliceSelection:
    """The slices without the first of an order (at least one is left), or these alone, as they lie in the scan."""
    removing = kind == "deletion"
    counts = torch.minimum(counts, lengths - 1 if removing else lengths)
    first = torch.zeros(len(order), dtype=torch.bool)
    first[order[place_in_bag(lengths) < counts[bag_of_rows(lengths)]]] = True
    return SliceSelection.where(~first if removing else first, lengths)
