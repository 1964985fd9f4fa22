"""A committee with its calibration and threshold, and what it does on scans that it was not trained on.

Both ways to fit share this: `nguide fit` (`fitting.py`) and `SliceFinder` (`slice_finder.py`).
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from typing import Any, NamedTuple

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import LabelledScans
from normal_guidance.core.blocks import count_slices
from normal_guidance.core.methods import COMMITTEE
from normal_guidance.core.prediction import Prediction
from normal_guidance.fit.fit_committee import CommitteeFit, FoldPlan, fit_committee
from normal_guidance.show.text_tables import digits, interval
from normal_guidance.statistics.calibration import FEW, Operation, check_sensitivity, choose_operation
from normal_guidance.statistics.conformal import (
    IntervalCalibration,
    calibrate_intervals,
    check_coverage,
    promise,
    scans_needed,
)
from normal_guidance.statistics.differences import delong, separated_low
from normal_guidance.statistics.skill import (
    MeanAuroc,
    PatientSpecific,
    Skill,
    mean_auroc,
    measure_skill,
    patient_specific,
)
from normal_guidance.statistics.split_results import MethodResults, SplitResults
from normal_guidance.sweep.loop import predict_bags

COVERAGE = 0.9  # the probability that is promised where labels allow it, unless another one is asked for
ADVISED = 30  # with so many labelled scans the coverage of 90 % is uncertain by 5 %
UNLIKELY = 0.01  # test scans that hold so seldom by chance are not of the kind that calibrated

ASSUMPTIONS = (
    "The promise is for new positive scans of the same kind of patients, scanners and findings as the labelled ones, "
    "and is an average over such scans: it is not a probability for one scan in particular. Labelled scans were seen "
    "by the members that were not trained on them, new scans are seen by the whole committee, which is assumed to find "
    "slices no worse."
)


class Held(NamedTuple):
    held: int  # test scans whose whole finding is in the interval
    scans: int  # with slice labels


@dataclass(frozen=True)
class PromisedIntervals:
    """The calibration of a committee's intervals, and what they do on test scans."""

    coverage: float  # the probability to promise
    labelled: int  # patients with a positive scan that has slice labels
    calibration: IntervalCalibration | None = None  # None where they are too few
    length: float | None = None  # the median share of a positive scan's slices in its interval
    test: Held | None = None  # None without calibration, or without test scans with slice labels

    def as_json(self) -> dict[str, Any]:
        return {
            "coverage": self.coverage if self.calibration else None,
            "labelled_patients": self.labelled,
            "calibration": self.calibration and self.calibration.to_dict(),
            "median_share_of_slices": self.length,
            "test": self.test and self.test._asdict(),
        }

    def sentences(self) -> list[str]:
        """What intervals promise, and whether test scans agree."""
        if self.calibration is None or self.length is None:
            return [
                f"Intervals promise nothing about the finding: {_patients(self.labelled)} a positive scan with slice "
                f"labels, but a promise of {100 * self.coverage:g} % needs {_needed(self.coverage)}."
            ]
        lines = [
            f"An interval {promise(self.coverage)}. It was calibrated on {self.labelled} scans with slice labels, one "
            f"for each patient, which leaves this probability uncertain by {100 * self.calibration.spread:.0f} %.",
            f"The median interval has {100 * self.length:.0f} % of its scan's slices.",
        ]
        if self.test is not None:
            from scipy.stats import betabinom

            lines.append(f"On the test scans it contains the whole finding in {self.test.held} of {self.test.scans}.")
            if not betabinom.cdf(*self.test, *self.calibration.beta) >= UNLIKELY:
                lines[-1] += (
                    " Chance does not explain so few: the test scans are of another kind, so do not rely on it."
                )
        return lines


def check_promise(coverage: float | None, scans: LabelledScans) -> None:
    """Refuse a coverage that is not a probability, or that these scans cannot promise; None asks for nothing."""
    if coverage is None:
        return
    check_coverage(coverage)
    labelled = len(one_per_patient(scans))
    if labelled < scans_needed(coverage):
        raise UserError(
            f"{_patients(labelled)} a positive scan with slice labels, but intervals with a coverage of {coverage:g} "
            f"need {_needed(coverage)}; label more scans, ask for less, or leave the coverage out"
        )


def promise_intervals(
    scans: LabelledScans, attention: Float[Tensor, "slices"], coverage: float | None = None
) -> PromisedIntervals:
    """Calibrate intervals on training scans by their out-of-fold attention, if enough of them have slice labels."""
    check_promise(coverage, scans)
    asked, chosen = coverage or COVERAGE, one_per_patient(scans)
    if len(chosen) < scans_needed(asked) or scans.slice_labels is None:
        return PromisedIntervals(asked, len(chosen))

    def of_chosen(values: Tensor) -> Tensor:
        by_scan = values.split(scans.lengths.tolist())
        return torch.cat([by_scan[scan] for scan in chosen])

    labels = of_chosen(scans.slice_labels)
    calibration = calibrate_intervals(of_chosen(attention), scans.lengths[chosen], labels, asked)
    return PromisedIntervals(asked, len(chosen), calibration, _length(calibration, scans, attention))


def check_on(promised: PromisedIntervals, test: LabelledScans, attention: Float[Tensor, "slices"]) -> PromisedIntervals:
    """The same with what it does on test scans; the length is then theirs."""
    calibration = promised.calibration
    if calibration is None or test.slice_labels is None or not int((test.labels == 1).sum()):
        return promised
    first, last = calibration.interval(attention, test.lengths)
    held = [
        int(first[scan]) <= int(positive.min()) and int(positive.max()) <= int(last[scan])
        for scan, labels in enumerate(test.slice_labels.split(test.lengths.tolist()))
        if len(positive := (labels == 1).nonzero())
    ]
    tested = Held(sum(held), len(held)) if held else None
    return replace(promised, length=_length(calibration, test, attention), test=tested)


def one_per_patient(scans: LabelledScans) -> list[int]:
    """The numbers of the scans with a positive slice, of each patient the one whose id has the lowest hash."""
    # The promise needs scans that are independent; neither their order nor what they show may choose among them.
    if scans.slice_labels is None:
        return []
    chosen: dict[str, int] = {}
    hashes = [sha256(name.encode()).digest() for name in scans.scan_ids]
    for scan in (count_slices(scans.slice_labels, scans.lengths).positive > 0).nonzero().flatten().tolist():
        best = chosen.setdefault(scans.patient_ids[scan], scan)
        if hashes[scan] < hashes[best]:
            chosen[scans.patient_ids[scan]] = scan
    return sorted(chosen.values())


def _length(calibration: IntervalCalibration, scans: LabelledScans, attention: Tensor) -> float:
    first, last = calibration.interval(attention, scans.lengths)
    return ((last - first + 1) / scans.lengths)[scans.labels == 1].double().median().item()


def _needed(coverage: float) -> str:
    needed = scans_needed(coverage)
    return f"{needed}, better {ADVISED}" if needed < ADVISED else str(needed)


def _patients(number: int) -> str:
    return "1 patient has" if number == 1 else f"{number or 'no'} patients have"


OUT_OF_FOLD = "out-of-fold"  # what the training scans are called where the model is measured on them
WHERE_USUAL = "where findings usually lie"
NOT_OF_THE_SCAN = f"show {WHERE_USUAL}, and nothing about the patient"


@dataclass(frozen=True)
class ScanAuroc:
    """A scan AUROC with its interval (DeLong, patients as units), NaN where one class has a single patient."""

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
    """What a model does on scans that it was not trained on; None where no positive scan has slice labels."""

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
    predicted: Prediction  # out of fold
    out_of_fold: Measured
    tested: Prediction | None
    test: Measured | None
    intervals: PromisedIntervals

    def cautions(self, finding: str = "") -> tuple[str, ...]:
        """What it was not shown to do, for whoever reads a result of the model; nothing of what was not measured."""
        measured, report = self.test or self.out_of_fold, "see the model's report."
        model = f"The model of {finding}" if finding else "This model"
        cautions: list[str] = []
        if not measured.scans.shown:
            numbers = f"scan AUROC {measured.scans}"
            cautions.append(f"{model} was not shown to tell scans apart ({numbers}); {report}")
        if not self.fit.committee.looks:
            cautions.append(
                f"{model} attends to the same places in every scan: its key slices {NOT_OF_THE_SCAN}; {report}"
            )
        elif measured.skill is not None and not measured.finds:
            numbers = f"skill {digits(measured.skill.skill)} {interval(measured.skill.low, measured.skill.high)}"
            cautions.append(
                f"{model} was not shown to find slices better than their position does ({numbers}); {report}"
            )
        return tuple(cautions)

    def sentences(self) -> list[str]:
        """Three sentences: does it tell scans apart, does it find the slices, can it be trusted."""
        measured, committee = self.test or self.out_of_fold, self.fit.committee
        counts = f"{measured.positive} positive and {measured.negative} negative"
        if self.test:  # training scans are usually more than those for testing
            counts += f" test scans; training scans, out of fold: {self.out_of_fold.scans}"
        else:
            counts += " scans, each by members that were not trained on it"
        if measured.scans.shown:
            apart = f"It tells scans apart with an AUROC of {measured.scans} ({counts})."
        else:
            apart = f"It is not shown to tell scans apart: scan AUROC {measured.scans}, which may be chance ({counts})."
        skill = measured.skill
        if not committee.looks:
            known = "" if skill is None else f" (localization AUROC {digits(skill.auroc)})"
            finds = f"It does not find slices: it attends to the same places in every scan, {WHERE_USUAL}{known}."
        elif skill is None:
            finds = (
                "Whether it finds the slices is unknown: no scan has labels for some of its slices; label 30 to know."
            )
        else:
            ends = f"skill {digits(skill.skill)} {interval(skill.low, skill.high)}, {skill.scans} scans"
            finds = (
                f"It {'finds' if measured.finds else 'is not shown to find'} slices better than their position in the "
                f"scan does: localization AUROC {digits(skill.auroc)}, by position alone {digits(skill.prior_auroc)} "
                f"({ends})."
            )
        return [apart, finds, _trusted(self.out_of_fold, self.fit)]


def fit_and_measure(
    scans: LabelledScans,
    plan: FoldPlan | None = None,
    *,
    test: LabelledScans | None = None,
    sensitivity: float | None = None,
    coverage: float | None = None,
    device: torch.device | str = "cpu",
    watch: Callable[[float], None] | None = None,
) -> MeasuredFit:
    """Fit a committee, calibrate it and choose its threshold, all out of fold; `fit` says what the options mean."""
    check_sensitivity(sensitivity)  # before the work
    check_promise(coverage, scans)
    if test is not None and (shared := {*scans.patient_ids} & {*test.patient_ids}):
        raise UserError(f"patient {min(shared)!r} has training and test scans ({len(shared)} such); split again")
    if test is not None and test.width != scans.width:
        raise UserError(f"test scans have {test.width} features, training scans {scans.width}; encode both alike")
    fit = fit_committee(scans, scans.patient_ids, plan, device=device, watch=watch)
    predicted = Prediction(fit.logits.float(), fit.attention, fit.attention.clamp_min(1e-38).log()[None])
    intervals = promise_intervals(scans, fit.attention, coverage)
    tested, measured, counted = None, None, None
    if test is not None:
        tested = predict_bags(fit.committee, test)
        measured, counted = measure(test, tested), (tested.logit, test.labels)
        intervals = check_on(intervals, test, tested.attention)
    operation = choose_operation(fit.logits, scans.labels, sensitivity=sensitivity, test=counted, scans=OUT_OF_FOLD)
    return MeasuredFit(fit, operation, predicted, measure(scans, predicted), tested, measured, intervals)


def measure(scans: LabelledScans, prediction: Prediction) -> Measured:
    labels = scans.labels
    positive, slices = int(labels.sum()), scans.slice_labels
    counts, auroc = (positive, len(labels) - positive), scan_auroc(scans, prediction.logit)
    if slices is None or not count_slices(slices, scans.lengths).mixed.any():
        return Measured(*counts, auroc, localization=None, skill=None, specific=None)
    what, patients = (prediction.slice_scores, slices, scans.lengths), scans.patient_ids
    return Measured(
        *counts,
        auroc,
        localization=mean_auroc(*what, patient_ids=patients),
        skill=measure_skill(*what, patient_ids=patients),
        specific=patient_specific(*what, patient_ids=patients),
    )


def scan_auroc(scans: LabelledScans, logits: Float[Tensor, "scans"]) -> ScanAuroc:
    """The AUROC and its interval, as the difference from scores that are all the same."""
    nothing = np.full(len(scans), np.nan)
    scores = {COMMITTEE: logits.double().numpy(), "chance": np.zeros(len(scans))}
    results = {name: MethodResults(nothing, nothing, values) for name, values in scores.items()}
    split = SplitResults(scans.scan_ids, scans.patient_ids, scans.labels.numpy().astype(np.int64), results)
    difference = delong([split], COMMITTEE, "chance")
    value, (low, high) = 0.5 + difference.difference, difference.interval()
    if difference.standard_error == 0 and value in (0.0, 1.0):
        pairs = {*zip(scans.labels.tolist(), scans.patient_ids, strict=True)}
        end = separated_low(*(sum(label == wanted for label, _ in pairs) for wanted in (1, 0)))
        return ScanAuroc(value, end if value else 0.0, 1.0 if value else 1 - end)
    return ScanAuroc(value, max(0.5 + low, 0.0), min(0.5 + high, 1.0))


def _trusted(measured: Measured, fit: CommitteeFit) -> str:
    if min(measured.positive, measured.negative) < FEW:
        return f"Take all of it as rough: {measured.positive} positive and {measured.negative} negative scans are few."
    if not measured.scans.shown:
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
    central = {setting.places.central for setting in kept if not setting.places.whole_scan}
    if central == {False}:
        return "anywhere in the scan"
    return "anywhere in the scan, " + ("all" if central == {True} else "some") + " members first around its middle"
