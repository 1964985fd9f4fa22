"""A committee with its calibration and threshold, and what it does on scans that it was not trained on.

Both ways to fit one share this: `nguide fit` (`clinical.fitting`) and `SliceFinder` (`training.slice_finder`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.core.methods import COMMITTEE
from normal_guidance.core.prediction import Prediction
from normal_guidance.errors import UserError
from normal_guidance.statistics.calibration import FEW, Operation, check_sensitivity, choose_operation
from normal_guidance.statistics.delong import delong, separated_low
from normal_guidance.statistics.number_format import digits, interval
from normal_guidance.statistics.skill import (
    MeanAuroc,
    PatientSpecific,
    Skill,
    mean_auroc,
    measure_skill,
    patient_specific,
)
from normal_guidance.statistics.split_results import MethodResults, SplitResults
from normal_guidance.training.batches import LabelledScans
from normal_guidance.training.fit_committee import CommitteeFit, Plan, fit_committee
from normal_guidance.training.loop import predict_bags
from normal_guidance.training.promised_intervals import PromisedIntervals, check_on, check_promise, promise_intervals

OUT_OF_FOLD = "out-of-fold"
"""What the training scans are called where the model is measured on them."""


WHERE_USUAL = "where findings usually lie"
NOT_OF_THE_SCAN = f"show {WHERE_USUAL}, and nothing about the patient"


@dataclass(frozen=True)
class ScanAuroc:
    """A scan AUROC with its interval (DeLong, patients as units; `separated_low` for an AUROC of 1).

    The interval is NaN where one class has a single patient.
    """

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{digits(self.value)} {interval(self.low, self.high)}"

    @property
    def shown(self) -> bool:
        """Whether it is above chance by its whole interval."""
        return self.low > 0.5


@dataclass(frozen=True, eq=False)
class Measured:
    """What a model does on scans that it was not trained on.

    The last three are None where no positive scan has slice labels.
    """

    positive: int
    negative: int
    scans: ScanAuroc
    localization: MeanAuroc | None
    skill: Skill | None
    specific: PatientSpecific | None

    @property
    def finds(self) -> bool:
        """Whether attention is better than a guess by position, by the whole interval of skill."""
        return self.skill is not None and math.isfinite(self.skill.low) and self.skill.low > 0


@dataclass(frozen=True, eq=False)
class MeasuredFit:
    """What `fit_and_measure` has made; `tested` and `test` are None without test scans."""

    fit: CommitteeFit
    operation: Operation
    predicted: Prediction
    """Out of fold."""
    out_of_fold: Measured
    tested: Prediction | None
    test: Measured | None
    intervals: PromisedIntervals

    def cautions(self, finding: str = "") -> tuple[str, ...]:
        """What it was not shown to do, for whoever reads a result of the model; nothing of what was not measured.

        Args:
            finding: the name of what it finds, if it has one.
        """
        own = self.test or self.out_of_fold
        model = f"The model of {finding}" if finding else "This model"
        said: list[str] = []
        if not own.scans.shown:
            found = own.scans
            numbers = f"scan AUROC {digits(found.value)} {interval(found.low, found.high)}"
            said.append(f"{model} was not shown to tell scans apart ({numbers}); see the model's report.")
        if not self.fit.committee.looks:
            said.append(
                f"{model} attends to the same places in every scan: its key slices {NOT_OF_THE_SCAN}; see the model's "
                "report."
            )
        elif own.skill is not None and not own.finds:
            numbers = f"skill {digits(own.skill.skill)} {interval(own.skill.low, own.skill.high)}"
            what = "find slices better than their position does"
            said.append(f"{model} was not shown to {what} ({numbers}); see the model's report.")
        return tuple(said)

    def sentences(self) -> list[str]:
        """Three sentences: does it tell scans apart, does it find the slices, can it be trusted."""
        own = self.test or self.out_of_fold
        where = "test scans" if self.test else "scans, each by members that were not trained on it"
        return [
            _tells_apart(own, where, self.out_of_fold if self.test else None),
            _finds_slices(own) if self.fit.committee.looks else _looks_nowhere(own),
            _trusted(self.out_of_fold, self.fit),
        ]


def fit_and_measure(
    scans: LabelledScans,
    plan: Plan | None = None,
    *,
    test: LabelledScans | None = None,
    sensitivity: float | None = None,
    coverage: float | None = None,
    device: torch.device | str = "cpu",
    watch: Callable[[float], None] | None = None,
) -> MeasuredFit:
    """Fit a committee, calibrate it and choose its threshold, all out of fold.

    Args:
        scans: the training scans; labels of slices measure the result and calibrate intervals, and never train.
        plan: how; without it, the scans decide.
        test: other patients' scans, to measure the model on.
        sensitivity: least sensitivity of the threshold, out of fold; without it, Youden's J chooses.
        coverage: the probability with which intervals shall contain the finding; refused if too few scans have slice
            labels. Without it, .9 if there are enough.
        device: where it is fitted.
        watch: called with the share that is done.
    """
    check_sensitivity(sensitivity)  # before the work
    check_promise(coverage, scans)
    if test is not None and (shared := {*scans.patient_ids} & {*test.patient_ids}):
        raise UserError(f"patient {min(shared)!r} has training and test scans ({len(shared)} such); split again")
    if test is not None and test.width != scans.width:
        raise UserError(f"test scans have {test.width} features, training scans {scans.width}; encode both alike")
    fit = fit_committee(scans, scans.patient_ids, plan, device=device, watch=watch)
    own = Prediction(fit.logits.float(), fit.attention, fit.attention.clamp_min(1e-38).log()[None])
    tested = None if test is None else predict_bags(fit.committee, test)
    operation = choose_operation(
        fit.logits,
        scans.labels,
        sensitivity=sensitivity,
        test=None if test is None or tested is None else (tested.logit, test.labels),
        scans=OUT_OF_FOLD,
    )
    intervals, measured = promise_intervals(scans, fit.attention, coverage), None
    if test is not None and tested is not None:
        intervals, measured = check_on(intervals, test, tested.attention), measure(test, tested)
    return MeasuredFit(fit, operation, own, measure(scans, own), tested, measured, intervals)


def measure(scans: LabelledScans, prediction: Prediction) -> Measured:
    """Scan AUROC, and the measures of finding slices where their labels are known."""
    labels = scans.labels
    positive, slices = int(labels.sum()), scans.slice_labels
    counts = {"positive": positive, "negative": len(labels) - positive}
    found = scan_auroc(scans, prediction.logit)
    if slices is None or not _localizable(slices, scans.lengths):
        return Measured(**counts, scans=found, localization=None, skill=None, specific=None)
    what, patients = (prediction.slice_scores, slices, scans.lengths), scans.patient_ids
    return Measured(
        **counts,
        scans=found,
        localization=mean_auroc(*what, patient_ids=patients),
        skill=measure_skill(*what, patient_ids=patients),
        specific=patient_specific(*what, patient_ids=patients),
    )


def _localizable(slices: Int[Tensor, "slices"], lengths: Int[Tensor, "scans"]) -> bool:
    """Whether any scan has positive and negative slices."""
    return any(0 < int((own == 1).sum()) < len(own) for own in slices.split(lengths.tolist()))


def scan_auroc(scans: LabelledScans, logits: Float[Tensor, "scans"]) -> ScanAuroc:
    """The AUROC and its interval, as the difference from scores that are all the same."""
    nothing = np.full(len(scans), np.nan)
    scores = {COMMITTEE: logits.double().numpy(), "chance": np.zeros(len(scans))}
    results = {name: MethodResults(nothing, nothing, values) for name, values in scores.items()}
    split = SplitResults(scans.scan_ids, scans.patient_ids, scans.labels.numpy().astype(np.int64), results)
    found = delong([split], COMMITTEE, "chance")
    value, (low, high) = 0.5 + found.difference, found.interval()
    if found.standard_error == 0 and value in (0.0, 1.0):
        end = separated_low(*(len(_patients_with(scans, label)) for label in (1, 0)))
        return ScanAuroc(value, end if value else 0.0, 1.0 if value else 1 - end)
    return ScanAuroc(value, max(0.5 + low, 0.0), min(0.5 + high, 1.0))


def _patients_with(scans: LabelledScans, label: int) -> set[str]:
    return {patient for patient, own in zip(scans.patient_ids, scans.labels.tolist(), strict=True) if own == label}


def _tells_apart(own: Measured, where: str, training: Measured | None) -> str:
    counts = f"{own.positive} positive and {own.negative} negative {where}"
    if training is not None:  # usually more scans than those for testing
        counts += f"; training scans, out of fold: {training.scans}"
    if not own.scans.shown:
        return f"It is not shown to tell scans apart: scan AUROC {own.scans}, which may be chance ({counts})."
    return f"It tells scans apart with an AUROC of {own.scans} ({counts})."


def _finds_slices(own: Measured) -> str:
    if own.skill is None:
        return "Whether it finds the slices is unknown: no scan has labels for some of its slices; label 30 to know."
    found = own.skill
    text = f"localization AUROC {digits(found.auroc)}, by position alone {digits(found.prior_auroc)}"
    ends = f"skill {digits(found.skill)} {interval(found.low, found.high)}, {found.scans} scans"
    shown = "finds" if own.finds else "is not shown to find"
    return f"It {shown} slices better than their position in the scan does: {text} ({ends})."


def _looks_nowhere(own: Measured) -> str:
    found = "" if own.skill is None else f" (localization AUROC {digits(own.skill.auroc)})"
    return f"It does not find slices: it attends to the same places in every scan, {WHERE_USUAL}{found}."


def _trusted(own: Measured, fit: CommitteeFit) -> str:
    if min(own.positive, own.negative) < FEW:
        return f"Take all of it as rough: {own.positive} positive and {own.negative} negative scans are few."
    if not own.scans.shown:
        return f"Do not use it: key slices, too, may only show {WHERE_USUAL}."
    if not fit.committee.looks:
        return f"Do not use its key slices: they {NOT_OF_THE_SCAN}; better features may help."
    return (
        f"It expects findings {_places(fit)}, unless a scan's evidence says otherwise; try it on scans from elsewhere "
        "before you rely on it."
    )


def _places(fit: CommitteeFit) -> str:
    """Where the members expect findings: those of unusual places may still prefer the middle of the scan."""
    if not fit.choice.unusual:
        return "around the middle of the scan, as usual"
    kept = [fit.settings[number] for number in fit.choice.kept]
    central = {setting.places.central for setting in kept if not setting.whole}
    if central == {False}:
        return "anywhere in the scan"
    return "anywhere in the scan, " + ("all" if central == {True} else "some") + " members first around its middle"
