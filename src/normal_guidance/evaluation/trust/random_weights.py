"""Test 2: untrained weights.  Attention that is as good with these does not come from training.

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
from normal_guidance.evaluation.trust.changed_scans import Model, ScanPredictions
from normal_guidance.evaluation.trust.deletion_curves import Curves, Kind, worth
from normal_guidance.evaluation.trust.intervals import NO_ESTIMATE, Bootstrap, Estimate
from normal_guidance.evaluation.trust.shuffled_slices import MOSTLY
from normal_guidance.evaluation.trust.verdicts import (
    FAILS,
    PASSES,
    UNDECIDED,
    TrustResult,
    TrustTest,
    Verdict,
    decide,
    worst,
)
from normal_guidance.statistics.scores import Labelled
from normal_guidance.statistics.slice_ranks import rank_correlation

UNTRAINED = 19
"""Untrained models: a further one has a higher scan AUROC than all of them with a probability of 5 %."""

COMPARED = 3
"""Untrained models whose attention is compared: each costs as much as a curve."""

LEARNT = 0.05
"""Scan AUROC: a model whose whole interval lies below the best untrained model plus this has learnt nothing."""

Untrained = Callable[[int], Model]
"""Makes the same model with untrained weights, from a seed."""

CONTROL = "untrained models' attention"

RANDOMIZE = TrustTest(
    name="randomize",
    title="Randomise weights",
    measured="scan AUROC that attended slices are worth beyond those that untrained models attend to",
    words={
        PASSES: (
            "Training decides where the model looks, and the slices it looks at separate positive from negative scans.",
            "Nothing.",
        ),
        FAILS: (
            "Attention is not worth more than that of an untrained model",
            "Do not show this attention as evidence. If scan AUROC is high, only the classifier has learnt: train with "
            "another lambda, learning rate or head. If it is at chance, train first.",
        ),
        UNDECIDED: (
            "The test showed neither that attention differs from that of untrained models nor that it does not",
            "Test more scans; or give a function that makes the model with untrained weights (`untrained=`).",
        ),
    },
)


def untrained_copies(model: nn.Module) -> Untrained:
    """A function that copies a module with untrained weights: each layer is reset (`reset_parameters`) or shuffled."""

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
    own: ScanPredictions,
    others: Sequence[ScanPredictions],
    scans: Labelled,
    curves: Mapping[Kind, Curves] | None,
    bootstrap: Bootstrap,
) -> TrustResult:
    """The verdict on attention against that of untrained models, which is the worst of three checks.

    The checks: attention ranks slices differently, the model separates scans better, attended slices are worth more.
    """
    lengths = scans.lengths.cpu()
    compared = others[:COMPARED]
    alike = bootstrap.estimate(bootstrap.mean(_mean_correlation([(own, other) for other in compared], lengths)))
    chance = _mean_correlation(list(combinations(compared, 2)), lengths)
    more: dict[str, Estimate | float] = {
        "rank correlation with untrained models": alike,
        "rank correlation among untrained models": bootstrap.estimate(bootstrap.mean(chance)),
    }
    reasons: dict[str, Verdict] = {"it ranks slices as untrained models do": _differs(alike)}
    gap = NO_ESTIMATE
    if curves is not None:
        gap = bootstrap.estimate(worth(curves, "untrained"))
        whole = bootstrap.estimate(curves["deletion"].whole_auroc)
        best = max(auroc(other.logit, scans.labels.cpu()).item() for other in others)
        more |= {"scan AUROC": whole, f"highest scan AUROC of {len(others)} untrained models": best}
        reasons["untrained models separate positive from negative scans as well"] = _has_learnt(whole, best)
        reasons["slices that untrained models attend to are worth as much"] = decide(gap)
    if scans.slice_labels is not None:
        more |= _localization(own, compared, scans)
    verdict = worst([*reasons.values(), *([] if curves is not None else [UNDECIDED])])
    meaning, _ = RANDOMIZE.words[verdict]
    if verdict != PASSES:
        meaning = f"{meaning} ({_why(verdict, [reason for reason, one in reasons.items() if one == verdict])})."
    return RANDOMIZE.result(verdict, gap, CONTROL, meaning=meaning, more=more)


def without_untrained() -> TrustResult:
    """The result for a model that is a plain function and came without `untrained`."""
    return RANDOMIZE.result(
        UNDECIDED,
        NO_ESTIMATE,
        CONTROL,
        meaning="The model is a plain function, so there is no untrained version of it to compare with.",
        action="Give a function that makes the same model with untrained weights from a seed (`untrained=`).",
    )


def _why(verdict: Verdict, reasons: Sequence[str]) -> str:
    if verdict == FAILS:
        return "; ".join(reasons)
    return f"undecided: whether {'; whether '.join(reasons)}" if reasons else "the model has no scan score"


def _differs(alike: Estimate) -> Verdict:
    """Whether attention ranks slices in another order; attention that is equal everywhere has no correlation."""
    if not alike.known:
        return UNDECIDED
    if alike.low > MOSTLY:
        return FAILS
    return PASSES if alike.high < MOSTLY else UNDECIDED


def _has_learnt(whole: Estimate, best: float) -> Verdict:
    if whole.low > 0.5 and whole.value > best:
        return PASSES
    return FAILS if whole.high < best + LEARNT else UNDECIDED


def _mean_correlation(
    pairs: Sequence[tuple[ScanPredictions, ScanPredictions]], lengths: Int[Tensor, "scans"]
) -> Float64[Tensor, "scans"]:
    found = [rank_correlation(one.scores, other.scores, lengths) for one, other in pairs]
    return torch.stack(found).nanmean(0)


def _localization(
    own: ScanPredictions, others: Sequence[ScanPredictions], scans: Labelled
) -> dict[str, Estimate | float]:
    assert scans.slice_labels is not None
    labels, lengths = scans.slice_labels.cpu(), scans.lengths.cpu()
    found = [localization(one.scores, labels, lengths).mean_auroc.item() for one in (own, *others)]
    return {
        "localization AUROC": found[0],
        "localization AUROC of untrained models": sum(found[1:]) / len(others),
    }
