"""Test 1: slices in another order.  What attention says about the image goes with the slices; the rest stays behind.

Shuffled slices show how much of attention is position alone, and what the order of slices is worth.  A model that looks
at neighbours finds none in a shuffled scan, though, so whether attention goes with the slices is seen where the scan is
only moved round: it begins at another slice, and its end is followed by its beginning.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from normal_guidance.core.packed import bag_of_rows
from normal_guidance.evaluation.trust.changed_scans import Answer, Model, SliceSelection, ask
from normal_guidance.evaluation.trust.intervals import Bootstrap, Estimate, Varied
from normal_guidance.evaluation.trust.verdicts import FAILS, PASSES, UNTOLD, TrustResult, Verdict
from normal_guidance.statistics.number_format import digits
from normal_guidance.statistics.slice_ranks import highest_first, moved_round, rank_correlation
from normal_guidance.training.batches import Scans

SHUFFLES = 3
"""Random orders of every scan."""

POSITION_FREE = 1e-3
"""Mean share of attention that may go elsewhere by rounding; above it, the order of slices does count."""

MOSTLY = 0.5
"""A rank correlation of so much, or more, is the greater part of attention."""

TITLE = "Shuffle slices"
MEASURED = "how far attention goes with the slices, less how far it stays at the places (rank correlations)"

WORDS = {
    PASSES: (
        "Attention goes with the slices when they change places: it comes from the image more than from the place.",
        "Nothing.",
    ),
    FAILS: (
        "Attention stays at its places whatever slices lie there: it tells where findings usually are, and nothing "
        "about this scan.",
        "Do not show this attention as evidence. Compare with the centred Gaussian, which needs no model; train "
        "without position, or with guidance of another shape.",
    ),
    UNTOLD: (
        "Attention was shown neither to go with the slices nor to stay at the places.",
        "Attention that is equal on all slices does this, and points nowhere; else test more scans.",
    ),
}


@dataclass(frozen=True, eq=False)
class Shuffled:
    """What other orders do to every scan, averaged over `SHUFFLES`."""

    follows: Float64[Tensor, "scans"]
    """Rank correlation of attention, slice by slice, in scans moved round: 1 if position does not count."""
    moves: Float64[Tensor, "scans"]
    """The same in shuffled scans: 1 if neighbours do not count either."""
    stays: Float64[Tensor, "scans"]
    """Rank correlation of attention, place by place, in shuffled scans: 1 if only position counts, 0 by chance."""
    error: Float64[Tensor, "scans"]
    """Share of the attention that is on other slices than before: the equivariance error."""
    logits: tuple[Float64[Tensor, "scans"], ...]


def shuffle(model: Model, scans: Scans, own: Answer, generator: torch.Generator) -> Shuffled:
    """Asks about every scan in random orders, and moved round."""
    lengths = scans.lengths.cpu()
    found: dict[str, list[Tensor]] = {name: [] for name in ("follows", "moves", "stays", "error")}
    logits = []
    for _ in range(SHUFFLES):
        order = moved_round(lengths, generator)
        said = ask(model, scans, SliceSelection(order, lengths))
        found["follows"].append(rank_correlation(own.scores, _back(said.scores, order), lengths))
        order = highest_first(torch.rand(len(own.scores), generator=generator), lengths, generator)
        said = ask(model, scans, SliceSelection(order, lengths))
        found["moves"].append(rank_correlation(own.scores, _back(said.scores, order), lengths))
        found["stays"].append(rank_correlation(own.scores, said.scores, lengths))
        apart = (_back(said.attention, order) - own.attention).abs() / 2
        found["error"].append(torch.zeros(len(lengths), dtype=torch.float64).index_add(0, bag_of_rows(lengths), apart))
        logits.append(said.logit)
    return Shuffled(**{name: torch.stack(each).nanmean(0) for name, each in found.items()}, logits=tuple(logits))


def _back(values: Float64[Tensor, "slices"], order: Int64[Tensor, "slices"]) -> Float64[Tensor, "slices"]:
    """What each slice got where it had been put: order[p] is the slice at place p."""
    return torch.empty_like(values).index_copy(0, order, values)


def judge_shuffling(found: Shuffled, own: Answer, bootstrap: Bootstrap) -> TrustResult:
    """By whether attention goes with the slices or stays at the places."""
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
        note = _on_order(error.value, lost)
    verdict = _verdict(difference, bootstrap.estimate(stays))
    meaning, action = WORDS[verdict]
    return TrustResult(
        name="shuffle",
        title=TITLE,
        verdict=verdict,
        measured=MEASURED,
        number=difference,
        reference=0.0,
        reference_words="attention that has nothing to do with the scan",
        meaning=f"{meaning}{note}",
        action=action,
        more=more,
    )


def _verdict(difference: Estimate, stays: Estimate) -> Verdict:
    if not difference.known:
        return UNTOLD
    if difference.high < 0 or stays.low > MOSTLY:
        return FAILS
    return PASSES if difference.low > 0 else UNTOLD


def _on_order(error: float, lost: Estimate) -> str:
    if error < POSITION_FREE:
        return " The model takes no notice of the order of slices."
    if lost.low > 0:
        return f" The order of slices counts: without it, {digits(lost.value)} of scan AUROC is lost."
    return " The order of slices changes attention, but no loss of scan AUROC by shuffling was shown."
