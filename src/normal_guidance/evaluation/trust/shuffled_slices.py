"""Test 1: slices in another order.  Attention that comes from the image goes with the slices.

Shuffled slices show how much of attention is position alone, and what the order of slices is worth.  A model that looks
at neighbours finds none of them in a shuffled scan.  So the test measures whether attention goes with the slices on
scans that are only shifted cyclically: the scan begins at another slice, and its end is followed by its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from normal_guidance.core.packed import sum_per_bag
from normal_guidance.evaluation.trust.changed_scans import (
    Model,
    ScanPredictions,
    SliceSelection,
    predict_scans,
)
from normal_guidance.evaluation.trust.intervals import Bootstrap, Estimate, Varied
from normal_guidance.evaluation.trust.verdicts import FAILS, PASSES, UNDECIDED, TrustResult, TrustTest, Verdict
from normal_guidance.statistics.number_format import digits
from normal_guidance.statistics.slice_ranks import highest_first, moved_round, rank_correlation
from normal_guidance.training.batches import Scans

SHUFFLES = 3
"""Random orders of every scan."""

POSITION_FREE = 1e-3
"""Mean share of attention that may move by rounding; above it, the order of slices counts."""

MOSTLY = 0.5
"""From this rank correlation on, the greater part of attention agrees."""

SHUFFLE = TrustTest(
    name="shuffle",
    title="Shuffle slices",
    measured="how far attention goes with the slices, minus how far it stays at the positions (rank correlations)",
    words={
        PASSES: (
            "Attention goes with the slices when their order changes: it comes from the image more than from the "
            "position.",
            "Nothing.",
        ),
        FAILS: (
            "Attention stays at its positions whatever slices lie there: it shows where findings usually are, and "
            "nothing about this scan.",
            "Do not show this attention as evidence. Compare with the centred Gaussian, which needs no model; train "
            "without position, or with guidance of another shape.",
        ),
        UNDECIDED: (
            "The test showed neither that attention goes with the slices nor that it stays at the positions.",
            "If attention is equal on all slices, it points nowhere. Otherwise test more scans.",
        ),
    },
)


@dataclass(frozen=True, eq=False)
class Shuffled:
    """What other orders of slices do to the attention of every scan, averaged over `SHUFFLES`."""

    follows: Float64[Tensor, "scans"]
    """Rank correlation of attention, slice by slice, in cyclically shifted scans: 1 if position does not count."""
    moves: Float64[Tensor, "scans"]
    """The same in shuffled scans: 1 if neighbours do not count either."""
    stays: Float64[Tensor, "scans"]
    """Rank correlation of attention, position by position, when shuffled: 1 if only position counts, 0 by chance."""
    error: Float64[Tensor, "scans"]
    """Share of the attention that lies on other slices than before: the equivariance error."""
    logits: tuple[Float64[Tensor, "scans"], ...]


def shuffle(model: Model, scans: Scans, own: ScanPredictions, generator: torch.Generator) -> Shuffled:
    """Compares the model's attention to whole scans (`own`) with that to cyclically shifted and to shuffled scans."""
    lengths = scans.lengths.cpu()
    found: dict[str, list[Tensor]] = {name: [] for name in ("follows", "moves", "stays", "error")}
    logits = []
    for _ in range(SHUFFLES):
        order = moved_round(lengths, generator)
        changed = predict_scans(model, scans, SliceSelection(order, lengths))
        found["follows"].append(rank_correlation(own.scores, _in_original_order(changed.scores, order), lengths))
        order = highest_first(torch.rand(len(own.scores), generator=generator), lengths, generator)
        changed = predict_scans(model, scans, SliceSelection(order, lengths))
        found["moves"].append(rank_correlation(own.scores, _in_original_order(changed.scores, order), lengths))
        found["stays"].append(rank_correlation(own.scores, changed.scores, lengths))
        apart = (_in_original_order(changed.attention, order) - own.attention).abs() / 2
        found["error"].append(sum_per_bag(apart, lengths))
        logits.append(changed.logit)
    return Shuffled(**{name: torch.stack(each).nanmean(0) for name, each in found.items()}, logits=tuple(logits))


def _in_original_order(values: Float64[Tensor, "slices"], order: Int64[Tensor, "slices"]) -> Float64[Tensor, "slices"]:
    """Values of reordered slices in the original order: order[p] is the slice at position p."""
    return torch.empty_like(values).index_copy(0, order, values)


def judge_shuffling(found: Shuffled, own: ScanPredictions, bootstrap: Bootstrap) -> TrustResult:
    """The verdict on whether attention goes with the slices or stays at the positions."""
    follows, stays, error = (bootstrap.mean(one) for one in (found.follows, found.stays, found.error))
    difference = bootstrap.estimate(follows - stays)
    more: dict[str, Estimate | float] = {
        "goes with the slices, scan moved round": bootstrap.estimate(follows),
        "goes with the slices, shuffled": bootstrap.estimate(bootstrap.mean(found.moves)),
        "stays at the places, shuffled (position alone)": bootstrap.estimate(stays),
        "share of attention that shuffling moves (equivariance error)": bootstrap.estimate(error),
    }
    note = ""
    if own.scores_scans:
        aurocs = bootstrap.aurocs({"own": own.logit} | {f"{i}": logit for i, logit in enumerate(found.logits)})
        whole = aurocs.pop("own")
        lost = bootstrap.estimate(whole - Varied.weighted(dict.fromkeys(aurocs.values(), 1 / len(aurocs))))
        more["scan AUROC lost by shuffling"] = lost
        note = _order_note(error.value, lost)
    verdict = _verdict(difference, bootstrap.estimate(stays))
    meaning, _ = SHUFFLE.words[verdict]
    control = "attention that has nothing to do with the scan"
    return SHUFFLE.result(verdict, difference, control, meaning=f"{meaning}{note}", more=more)


def _verdict(difference: Estimate, stays: Estimate) -> Verdict:
    if not difference.known:
        return UNDECIDED
    if difference.high < 0 or stays.low > MOSTLY:
        return FAILS
    return PASSES if difference.low > 0 else UNDECIDED


def _order_note(error: float, lost: Estimate) -> str:
    if error < POSITION_FREE:
        return " The model ignores the order of slices."
    if lost.low > 0:
        return f" The order of slices counts: without it, {digits(lost.value)} of scan AUROC is lost."
    return " The order of slices changes attention, but shuffling was not shown to lower scan AUROC."
