"""Tests 3 and 4, from the curves: whether attended slices matter, and whether attention points away from evidence."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from normal_guidance.core.metrics import localization
from normal_guidance.evaluation.trust.changed_scans import ScanPredictions
from normal_guidance.evaluation.trust.deletion_curves import CONTROLS, Curves, Kind, Score, worth
from normal_guidance.evaluation.trust.intervals import NO_ESTIMATE, Bootstrap, Estimate
from normal_guidance.evaluation.trust.verdicts import (
    FAILS,
    PASSES,
    UNDECIDED,
    TrustResult,
    TrustTest,
    Verdict,
    decide,
)
from normal_guidance.statistics.number_format import digits
from normal_guidance.statistics.scores import Labelled

AWAY = 0.05
"""Slice labels show attention that points away if localization AUROC lies this far below .5.

Thousands of scans would make a smaller distance significant, too.
"""

SCORES: dict[Score, str] = {"auroc": "scan AUROC", "logit": "logit of positive scans"}

CONTROL_WORDS = {"random": "as many random slices", "moved": "the same attention moved along the scan"}

DELETION = TrustTest(
    name="deletion",
    title="Delete and insert",
    measured="scan AUROC that attended slices, removed and kept alone, are worth beyond other slices",
    words={
        PASSES: (
            "The slices that attention points at are those that separate positive from negative scans.",
            "Nothing.",
        ),
        FAILS: (
            "Attended slices separate positive from negative scans no better than other slices do, so attention does "
            "not explain the scan's score.",
            "Do not show this attention as evidence. Try guidance or a head whose attention is its evidence.",
        ),
        UNDECIDED: (
            "The test showed neither that attended slices matter more than others nor that they do not.",
            "Test more scans.",
        ),
    },
)

INVERTED = TrustTest(
    name="inverted",
    title="Inverted attention",
    measured="scan AUROC that attended slices are worth beyond other slices; an alarm below 0",
    words={
        PASSES: ("Attention does not point away from the evidence.", "Nothing."),
        FAILS: (
            "ALARM: attention points away from the evidence.",
            "Do not show this attention: the least attended slices are nearer to the finding. Look for a wrong sign "
            "between scores and attention. If there is none, train again with another seed or with guidance.",
        ),
        UNDECIDED: (
            "The test showed neither that attention points away from the evidence nor that it does not.",
            "Test more scans, or give slice labels of some.",
        ),
    },
)


def judge_deletion(curves: Mapping[Kind, Curves], bootstrap: Bootstrap) -> TrustResult:
    """The verdict by scan AUROC against the harder control; the logit of positive scans is reported only."""
    control, number = _control(curves, bootstrap, harder=True)
    verdict = decide(number)
    more: dict[str, Estimate | float] = {
        f"{kind}, {SCORES[score]}, beside {order}": bootstrap.estimate(one.gap(score, order))
        for kind, one in curves.items()
        for score in SCORES
        for order in one.auroc
        if order != "attended"
    }
    meaning, _ = DELETION.words[verdict]
    if verdict == PASSES:
        meaning += _caveats(curves, bootstrap)
    return DELETION.result(verdict, number, CONTROL_WORDS[control], meaning=meaning, more=more)


def judge_alarm(
    curves: Mapping[Kind, Curves] | None, own: ScanPredictions, scans: Labelled, bootstrap: Bootstrap
) -> TrustResult:
    """The verdict without slice labels; where there are slice labels, they confirm it, or decide an open one."""
    number, verdict, control = NO_ESTIMATE, UNDECIDED, CONTROLS[0]
    more: dict[str, Estimate | float] = {}
    if curves is not None:
        control, number, verdict = _point_away(curves, bootstrap)
        more["logit of positive scans lost, beyond random slices"] = bootstrap.estimate(
            curves["deletion"].gap("logit", "random")
        )
    by_labels = ""
    found = _localization(own, scans, bootstrap)
    if found is not None and found.known:
        more["localization AUROC"] = found
        labels = FAILS if found.high < 0.5 - AWAY else PASSES if found.low > 0.5 else UNDECIDED
        agree = "slice labels confirm it" if labels == verdict else "slice labels do not confirm it"
        if verdict == UNDECIDED and labels != UNDECIDED:
            verdict, agree = labels, "by slice labels alone"
        if verdict != UNDECIDED:
            by_labels = f" ({agree}: localization AUROC {digits(found.value)})"
    meaning, _ = INVERTED.words[verdict]
    meaning = f"{meaning.removesuffix('.')}{by_labels}."
    return INVERTED.result(verdict, number, CONTROL_WORDS[control], meaning=meaning, more=more)


def without_scan_score() -> TrustResult:
    """The result of deletion for a method without a logit, such as the centred Gaussian."""
    return DELETION.result(
        UNDECIDED,
        NO_ESTIMATE,
        CONTROL_WORDS[CONTROLS[0]],
        meaning="The model has no scan score, so removing slices cannot lower it.",
        action="Test a model that scores scans.",
    )


def _control(curves: Mapping[Kind, Curves], bootstrap: Bootstrap, *, harder: bool) -> tuple[str, Estimate]:
    """The control against which attention is worth least (harder) or most."""
    found = {name: bootstrap.estimate(worth(curves, name)) for name in CONTROLS}
    name = (min if harder else max)(found, key=lambda name: found[name].value)
    return name, found[name]


def _point_away(curves: Mapping[Kind, Curves], bootstrap: Bootstrap) -> tuple[str, Estimate, Verdict]:
    """The control, number and verdict of the alarm, which must hold against every control, as must its absence.

    The logit alone gives false alarms: max pooling's logit rises or falls with the sign of its weights when slices are
    removed, in negative scans just as much.  If the model is at chance, no slice is evidence.
    """
    easy, hard = (_control(curves, bootstrap, harder=harder) for harder in (False, True))
    if not bootstrap.estimate(curves["deletion"].whole_auroc).low > 0.5:
        return *hard, UNDECIDED
    if easy[1].high < 0:
        return *easy, FAILS
    return *hard, PASSES if hard[1].low > 0 else UNDECIDED


def _caveats(curves: Mapping[Kind, Curves], bootstrap: Bootstrap) -> str:
    """Limits of a passed test, as sentences."""
    caveats = ""
    if not bootstrap.estimate(curves["deletion"].gap("auroc", "random")).low > 0:
        caveats += " They are sufficient, but the model was not shown to need them: other slices hold evidence, too."
    if not bootstrap.estimate(worth(curves, "middle")).low > 0:
        caveats += " However, slices from the middle of the scan were not shown to be worth less."
    return caveats


def _localization(own: ScanPredictions, scans: Labelled, bootstrap: Bootstrap) -> Estimate | None:
    if scans.slice_labels is None:
        return None
    found = localization(own.scores, scans.slice_labels.cpu(), scans.lengths.cpu())
    per_scan = torch.full((len(scans.lengths),), torch.nan, dtype=torch.float64)
    per_scan[found.kept] = found.auroc
    return bootstrap.estimate(bootstrap.mean(per_scan))
