"""Deletion and insertion: the scan's score without the most attended slices, or with nothing but these.

A removal says something only beside other removals of as many slices: at random; from the middle, where many findings
lie; the least attended; by the same attention moved along the scan, which keeps its shape (a solid block removed at
random does other harm than scattered slices); and by the attention of untrained models.

Two scores are followed.  The logit of positive scans says what the model's own number depends on; attention that is
tied to the logit wins there by construction, even on noise.  Scan AUROC says whether what was removed tells positive
scans from negative ones, and noise does not.

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

from normal_guidance.core.packed import bag_of_rows, place_in_bag
from normal_guidance.evaluation.trust.changed_scans import Answer, Model, SliceSelection, ask
from normal_guidance.evaluation.trust.intervals import Bootstrap, Varied
from normal_guidance.statistics.slice_ranks import highest_first, moved_round
from normal_guidance.training.batches import Scans

SHARES = (0.1, 0.2, 0.3, 0.5, 0.7)
"""Of a scan's slices, or of its attention, that are removed, or kept."""

REPEATS = 3
"""Random orders whose scores are averaged."""

ROUNDING = 1e-6
"""Attention that counts as nothing when a share is reached."""

By = Literal["slices", "attention"]
Kind = Literal["deletion", "insertion"]
Score = Literal["auroc", "logit"]
Orders = Mapping[str, Sequence[Int64[Tensor, "slices"]]]
"""Name -> one order or several: the slices' numbers, scan after scan, those to remove first coming first."""

CONTROLS = ("random", "moved")
"""What attention must beat to point anywhere."""


def make_orders(
    own: Answer, lengths: Int[Tensor, "scans"], untrained: Sequence[Answer], generator: torch.Generator
) -> Orders:
    """The attended slices first, and everything to compare with."""

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
    answer: Answer, lengths: Int[Tensor, "scans"], share: float, by: By, order: Int64[Tensor, "slices"]
) -> Int64[Tensor, "scans"]:
    """How many slices a share is, at least one: of the slices, or the fewest that hold so much of the attention."""
    if by == "slices":
        return (share * lengths + 0.5).floor().long().clamp(min=1)
    held = answer.attention[order]
    running = held.cumsum(0)
    before = (running - held)[lengths.cumsum(0) - lengths]
    short = running - before[bag_of_rows(lengths)] < share - ROUNDING
    return 1 + torch.zeros(len(lengths), dtype=torch.int64).index_add(0, bag_of_rows(lengths), short.long())


@dataclass(frozen=True, eq=False)
class Curves:
    """Scan scores by share, for each order: the logit of positive scans in standard deviations, and scan AUROC.

    `whole` is that of untouched scans: where deletion begins and insertion ends.
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
    """What attended slices are worth beyond others, in scan AUROC: the mean of both gaps.

    In weak data deletion alone says little: what is left of a negative scan has lost its highest noise, too.
    """
    return Varied.weighted({one.gap("auroc", against): 1 / len(curves) for one in curves.values()})


def draw_curves(
    model: Model,
    scans: Scans,
    own: Answer,
    orders: Orders,
    bootstrap: Bootstrap,
    *,
    by: By = "slices",
    watch: Callable[[float], None] | None = None,
) -> dict[Kind, Curves]:
    """Both curves of every order: the model is asked 2 x shares x orders times; `watch` is told the share done."""
    lengths = scans.lengths.cpu()
    scale = float(own.logit.std()) or 1.0
    counts = [count_slices(own, lengths, share, by, orders["attended"][0]) for share in SHARES]
    kinds: tuple[Kind, ...] = ("deletion", "insertion")
    questions = {
        (kind, name, repeat, number): _kept(order, lengths, count, kind)
        for kind in kinds
        for name, several in orders.items()
        for repeat, order in enumerate(several)
        for number, count in enumerate(counts)
    }
    logits: dict[Kind, dict[str, Tensor]] = {kind: {"whole": own.logit / scale} for kind in kinds}
    for done, ((kind, *key), chosen) in enumerate(questions.items(), start=1):
        logits[kind]["/".join(map(str, key))] = ask(model, scans, chosen).logit / scale
        if watch is not None:
            watch(done / len(questions))
    return {kind: _curves(kind, logits[kind], orders, bootstrap) for kind in kinds}


def _curves(kind: Kind, logits: Mapping[str, Float64[Tensor, "scans"]], orders: Orders, bootstrap: Bootstrap) -> Curves:
    aurocs, means = bootstrap.aurocs(logits), bootstrap.means(logits, bootstrap.labels == 1)
    return Curves(kind, SHARES, _averaged(means, orders), _averaged(aurocs, orders), means["whole"], aurocs["whole"])


def _averaged(found: Mapping[str, Varied], orders: Orders) -> dict[str, list[Varied]]:
    """Over the orders of one name."""
    return {
        name: [
            Varied.weighted({found[f"{name}/{repeat}/{number}"]: 1 / len(several) for repeat in range(len(several))})
            for number in range(len(SHARES))
        ]
        for name, several in orders.items()
    }


def _kept(
    order: Int64[Tensor, "slices"], lengths: Int[Tensor, "scans"], counts: Int64[Tensor, "scans"], kind: Kind
) -> SliceSelection:
    """What is left without the first of an order, at least one slice; or the first alone.  Slices keep their order."""
    removing = kind == "deletion"
    counts = torch.minimum(counts, lengths - 1 if removing else lengths)
    first = torch.zeros(len(order), dtype=torch.bool)
    first[order[place_in_bag(lengths) < counts[bag_of_rows(lengths)]]] = True
    return SliceSelection.where(~first if removing else first, lengths)
