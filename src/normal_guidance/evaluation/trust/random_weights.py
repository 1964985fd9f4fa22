"""Test 2: weights that have learnt nothing.  Attention that is as good with these does not come from training.

Reference: Adebayo et al., "Sanity Checks for Saliency Maps", 2018.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from itertools import combinations

import torch
from jaxtyping import Float64, Int
from torch import Tensor, nn

from normal_guidance.core.metrics import auroc, localization
from normal_guidance.evaluation.trust.changed_scans import Answer, Model
from normal_guidance.evaluation.trust.deletion_curves import Curves, Kind, worth
from normal_guidance.evaluation.trust.intervals import Bootstrap, Estimate
from normal_guidance.evaluation.trust.shuffled_slices import MOSTLY
from normal_guidance.evaluation.trust.verdicts import FAILS, PASSES, UNTOLD, TrustResult, Verdict, decide, worst
from normal_guidance.statistics.scores import Labelled
from normal_guidance.statistics.slice_ranks import rank_correlation

UNTRAINED = 19
"""Models with fresh weights: one more of their kind has a higher scan AUROC than all of them with a chance of 5 %."""

COMPARED = 3
"""Of these, whose attention is looked at: each costs as much as a curve."""

LEARNT = 0.05
"""Scan AUROC above the best untrained model: one whose whole interval lies below has learnt nothing to attend by."""

Untrained = Callable[[int], Model]
"""The same model with fresh weights, by the seed of these."""

TITLE = "Randomise weights"
MEASURED = "scan AUROC that attended slices are worth, beyond those that untrained models attend to"

WORDS: Mapping[Verdict, tuple[str, str]] = {
    PASSES: (
        "What the model has learnt decides where it looks, and what it looks at tells the scans apart.",
        "Nothing.",
    ),
    FAILS: (
        "Attention is not worth more than that of a model that has learnt nothing",
        "Do not show this attention as evidence. If scan AUROC is high, the classifier alone has learnt: train with "
        "another lambda, learning rate or head; if it is at chance, train first.",
    ),
    UNTOLD: (
        "A difference from models that have learnt nothing was neither shown nor excluded",
        "Test more scans; or say how fresh weights are made (`untrained=`).",
    ),
}


def untrained_copies(model: nn.Module) -> Untrained:
    """Copies of any module with fresh weights: `reset_parameters` where a layer has it, else its numbers are shuffled.

    Example:
        >>> from normal_guidance.core.models import ABMIL
        >>> model = ABMIL(8)
        >>> bool((untrained_copies(model)(1).hidden.weight == model.hidden.weight).any())
        False
    """

    def fresh(seed: int) -> nn.Module:
        made = copy.deepcopy(model)
        with torch.random.fork_rng(devices=[]), torch.no_grad():
            torch.manual_seed(seed)
            for module in made.modules():
                reset = getattr(module, "reset_parameters", None) or getattr(module, "_reset_parameters", None)
                if reset is not None:
                    reset()
                    continue
                for parameter in module.parameters(recurse=False):
                    flat = parameter.flatten()
                    parameter.copy_(flat[torch.randperm(len(flat)).to(flat.device)].view_as(parameter))
        return made

    return fresh


def judge_randomizing(
    own: Answer,
    others: Sequence[Answer],
    scans: Labelled,
    curves: Mapping[Kind, Curves] | None,
    bootstrap: Bootstrap,
) -> TrustResult:
    """By three things that must all hold: see `WORDS` and the reasons beside the verdict."""
    lengths = scans.lengths.cpu()
    compared = others[:COMPARED]
    alike = bootstrap.estimate(bootstrap.mean(_mean_correlation([(own, other) for other in compared], lengths)))
    chance = _mean_correlation(list(combinations(compared, 2)), lengths)
    more: dict[str, Estimate | float] = {
        "rank correlation with untrained models": alike,
        "rank correlation among untrained models": bootstrap.estimate(bootstrap.mean(chance)),
    }
    reasons: dict[str, Verdict] = {"its order of slices is that of untrained models": _differs(alike)}
    gap = Estimate(torch.nan, torch.nan, torch.nan)
    if curves is not None:
        gap = bootstrap.estimate(worth(curves, "untrained"))
        whole = bootstrap.estimate(curves["deletion"].whole_auroc)
        best = max(auroc(other.logit, scans.labels.cpu()).item() for other in others)
        more |= {"scan AUROC": whole, f"highest scan AUROC of {len(others)} untrained models": best}
        reasons["untrained models tell the scans apart as well"] = _learnt(whole, best)
        reasons["slices that untrained models attend to are worth as much"] = decide(gap)
    if scans.slice_labels is not None:
        more |= _localization(own, compared, scans)
    verdict = worst([*reasons.values(), *([] if curves is not None else [UNTOLD])])
    meaning, action = WORDS[verdict]
    why = "; ".join(reason for reason, one in reasons.items() if one == verdict)
    return TrustResult(
        name="randomize",
        title=TITLE,
        verdict=verdict,
        measured=MEASURED,
        number=gap,
        reference=0.0,
        reference_words="untrained models' attention",
        meaning=meaning if verdict == PASSES else f"{meaning} ({_reason(verdict, why)}).",
        action=action,
        more=more,
    )


def without_untrained() -> TrustResult:
    """For a model whose weights nobody can make afresh."""
    nothing = Estimate(torch.nan, torch.nan, torch.nan)
    return TrustResult(
        "randomize", TITLE, UNTOLD, MEASURED, nothing, 0.0, "untrained models' attention",
        "The model is a plain function, so its weights could not be made afresh.",
        "Give a function that makes the same model with fresh weights from a seed (`untrained=`).",
    )  # fmt: skip


def _reason(verdict: Verdict, why: str) -> str:
    if verdict == FAILS:
        return why
    return f"open: {why}" if why else "the model has no scan score"


def _differs(alike: Estimate) -> Verdict:
    """Attention without an order of its own has no correlation; that is not the untrained models' order."""
    if not alike.known:
        return UNTOLD
    if alike.low > MOSTLY:
        return FAILS
    return PASSES if alike.high < MOSTLY else UNTOLD


def _learnt(whole: Estimate, best: float) -> Verdict:
    if whole.low > 0.5 and whole.value > best:
        return PASSES
    return FAILS if whole.high < best + LEARNT else UNTOLD


def _mean_correlation(
    pairs: Sequence[tuple[Answer, Answer]], lengths: Int[Tensor, "scans"]
) -> Float64[Tensor, "scans"]:
    found = [rank_correlation(one.scores, other.scores, lengths) for one, other in pairs]
    return torch.stack(found).nanmean(0)


def _localization(own: Answer, others: Sequence[Answer], scans: Labelled) -> dict[str, Estimate | float]:
    assert scans.slice_labels is not None
    labels, lengths = scans.slice_labels.cpu(), scans.lengths.cpu()
    found = [localization(one.scores, labels, lengths).mean_auroc.item() for one in (own, *others)]
    return {
        "localization AUROC": found[0],
        "localization AUROC of untrained models": sum(found[1:]) / len(others),
    }
