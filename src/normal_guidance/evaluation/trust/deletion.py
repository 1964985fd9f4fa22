"""Tests 3 and 4, from the curves: do attended slices matter, and does attention point away from the evidence."""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

from normal_guidance.core.metrics import localization
from normal_guidance.evaluation.trust.changed_scans import Answer
from normal_guidance.evaluation.trust.deletion_curves import CONTROLS, Curves, Kind, Score, worth
from normal_guidance.evaluation.trust.intervals import Bootstrap, Estimate
from normal_guidance.evaluation.trust.verdicts import FAILS, PASSES, UNTOLD, TrustResult, Verdict, decide
from normal_guidance.statistics.number_format import digits
from normal_guidance.statistics.scores import Labelled

NOTHING = Estimate(math.nan, math.nan, math.nan)

AWAY = 0.05
"""Localization AUROC below .5 that slice labels call pointing away: thousands of scans would show less, too."""

SCORES: dict[Score, str] = {"auroc": "scan AUROC", "logit": "logit of positive scans"}

CONTROL_WORDS = {"random": "as many random slices", "moved": "the same attention moved along the scan"}

DELETION_TITLE = "Delete and insert"
DELETION_MEASURED = "scan AUROC that attended slices are worth, removed and kept alone, beyond others"

DELETION_WORDS: Mapping[Verdict, tuple[str, str]] = {
    PASSES: ("The slices that attention points at are those that tell the scans apart.", "Nothing."),
    FAILS: (
        "Attended slices tell the scans apart no better than others do, so attention says nothing about why.",
        "Do not show this attention as evidence. Try guidance or a head whose attention is its evidence.",
    ),
    UNTOLD: (
        "Whether attended slices matter more than others was neither shown nor excluded.",
        "Test more scans.",
    ),
}

ALARM_TITLE = "Inverted attention"
ALARM_MEASURED = "scan AUROC that attended slices are worth beyond others; an alarm below 0"

ALARM_WORDS: Mapping[Verdict, tuple[str, str]] = {
    PASSES: ("Attention does not point away from the evidence.", "Nothing."),
    FAILS: (
        "ALARM: attention points away from the evidence",
        "Do not show this attention: the least attended slices are nearer to the finding. Look for a sign lost between "
        "scores and attention; else train again with another seed or with guidance.",
    ),
    UNTOLD: (
        "Neither an alarm nor its absence could be shown.",
        "Test more scans, or give slice labels of some.",
    ),
}


def judge_deletion(curves: Mapping[Kind, Curves], bootstrap: Bootstrap) -> TrustResult:
    """By scan AUROC beside the harder control; the logit of positive scans is told, and decides nothing."""
    control, number = _control(curves, bootstrap, harder=True)
    verdict = decide(number)
    more: dict[str, Estimate | float] = {
        f"{kind}, {SCORES[score]}, beside {order}": bootstrap.estimate(one.gap(score, order))
        for kind, one in curves.items()
        for score in SCORES
        for order in one.auroc
        if order != "attended"
    }
    meaning, action = DELETION_WORDS[verdict]
    return TrustResult(
        name="deletion",
        title=DELETION_TITLE,
        verdict=verdict,
        measured=DELETION_MEASURED,
        number=number,
        reference=0.0,
        reference_words=CONTROL_WORDS[control],
        meaning=f"{meaning}{_remarks(curves, bootstrap) if verdict == PASSES else ''}",
        action=action,
        more=more,
    )


def judge_alarm(
    curves: Mapping[Kind, Curves] | None, own: Answer, scans: Labelled, bootstrap: Bootstrap
) -> TrustResult:
    """First without slice labels; where there are some, they confirm, or decide what is left open."""
    number, verdict, control = NOTHING, UNTOLD, CONTROLS[0]
    more: dict[str, Estimate | float] = {}
    if curves is not None:
        control, number, verdict = _point_away(curves, bootstrap)
        more["logit of positive scans lost, beyond random slices"] = bootstrap.estimate(
            curves["deletion"].gap("logit", "random")
        )
    meaning, action = ALARM_WORDS[verdict]
    found = _localization(own, scans, bootstrap)
    if found is not None and found.known:
        more["localization AUROC"] = found
        labels = FAILS if found.high < 0.5 - AWAY else PASSES if found.low > 0.5 else UNTOLD
        agree = "slice labels confirm it" if labels == verdict else "slice labels do not confirm it"
        if verdict == UNTOLD and labels != UNTOLD:
            verdict, agree = labels, "by slice labels alone"
            meaning, action = ALARM_WORDS[verdict]
        if verdict != UNTOLD:
            meaning = f"{meaning.rstrip('.')} ({agree}: localization AUROC {digits(found.value)})."
    return TrustResult(
        name="inverted",
        title=ALARM_TITLE,
        verdict=verdict,
        measured=ALARM_MEASURED,
        number=number,
        reference=0.0,
        reference_words=CONTROL_WORDS[control],
        meaning=meaning if meaning.endswith(".") else f"{meaning}.",
        action=action,
        more=more,
    )


def without_scan_score() -> TrustResult:
    """For a method that has no logit, as the centred Gaussian."""
    return TrustResult(
        "deletion", DELETION_TITLE, UNTOLD, DELETION_MEASURED, NOTHING, 0.0, CONTROL_WORDS[CONTROLS[0]],
        "The model has no scan score, so nothing can be seen to fall.", "Test a model that scores scans.",
    )  # fmt: skip


def _control(curves: Mapping[Kind, Curves], bootstrap: Bootstrap, *, harder: bool) -> tuple[str, Estimate]:
    """The control that leaves attention the smaller, or the larger, worth."""
    found = {name: bootstrap.estimate(worth(curves, name)) for name in CONTROLS}
    name = (min if harder else max)(found, key=lambda name: found[name].value)
    return name, found[name]


def _point_away(curves: Mapping[Kind, Curves], bootstrap: Bootstrap) -> tuple[str, Estimate, Verdict]:
    """An alarm must hold beside every control, and so must its absence.

    The logit alone gives false alarms: max pooling's logit rises or falls with the sign of its weights when slices are
    removed, in negative scans just as much.  And of a model at chance no slice is evidence.
    """
    easy, hard = (_control(curves, bootstrap, harder=harder) for harder in (False, True))
    if not bootstrap.estimate(curves["deletion"].whole_auroc).low > 0.5:
        return *hard, UNTOLD
    if easy[1].high < 0:
        return *easy, FAILS
    return *hard, PASSES if hard[1].low > 0 else UNTOLD


def _remarks(curves: Mapping[Kind, Curves], bootstrap: Bootstrap) -> str:
    """What a reader should know although the test was passed."""
    said = ""
    if not bootstrap.estimate(curves["deletion"].gap("auroc", "random")).low > 0:
        said += " They suffice, but the model was not shown to need them: other slices hold evidence, too."
    if not bootstrap.estimate(worth(curves, "middle")).low > 0:
        said += " Slices from the middle of the scan were not shown to be worth less, though."
    return said


def _localization(own: Answer, scans: Labelled, bootstrap: Bootstrap) -> Estimate | None:
    if scans.slice_labels is None:
        return None
    found = localization(own.scores, scans.slice_labels.cpu(), scans.lengths.cpu())
    per_scan = torch.full((len(scans.lengths),), torch.nan, dtype=torch.float64)
    per_scan[found.kept] = found.auroc
    return bootstrap.estimate(bootstrap.mean(per_scan))
