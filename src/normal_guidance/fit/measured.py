"""A committee with its calibration and threshold, and what it does on scans that it was not trained on.

Both ways to fit one share this: `nguide fit` (`clinical.fitting`) and `SliceFinder` (`training.slice_finder`).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import LabelledScans
from normal_guidance.core.blocks import count_slices
from normal_guidance.core.methods import COMMITTEE
from normal_guidance.core.prediction import Prediction
from normal_guidance.fit.fit_committee import CommitteeFit, Plan, fit_committee
from normal_guidance.show.text_tables import digits, interval
from normal_guidance.statistics.calibration import (
    FEW,
    Operation,
    check_sensitivity,
    choose_operation,
)
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

# Intervals with a promise for a committee (`statistics.conformal`), calibrated out of fold and checked on test scans.
# Calibration takes one scan of each patient: the promise needs scans that are independent of each other. A hash of the
# scan's id chooses it, so neither the order of the scans nor what they show does.
# **What is assumed.** New scans are drawn as the labelled ones were. The attention of a labelled scan comes from the
# members that were not trained on it, that of a new scan from the whole committee, so the two are not exchangeable in
# the strict sense. The whole averages over more members, and is assumed to find slices no worse.


COVERAGE = 0.9
"""The probability that is promised where labels allow it, unless another one is asked for."""

ADVISED = 30
"""With so many labelled scans the coverage of 90 % is uncertain by 5 %."""

UNLIKELY = 0.01
"""Test scans that hold so seldom by chance are not of the kind that calibrated."""

ASSUMPTIONS = (
    "The promise is for new positive scans of the same kind of patients, scanners and findings as the labelled ones, "
    "and is an average over such scans: it is not a probability for one scan in particular. Labelled scans were seen "
    "by the members that were not trained on them, new scans are seen by the whole committee, which is assumed to find "
    "slices no worse."
)


@dataclass(frozen=True)
class Held:
    """How many of the test scans with slice labels have their whole finding in the interval."""

    held: int
    scans: int


@dataclass(frozen=True)
class PromisedIntervals:
    """The calibration of a committee's intervals, and what they do on test scans.

    Args:
        coverage: the probability to promise.
        labelled: patients with a positive scan that has slice labels.
        calibration: None where they are too few.
        length: the median share of a positive scan's slices in its interval; None without calibration.
        test: None without calibration, or without test scans with slice labels.
    """

    coverage: float
    labelled: int
    calibration: IntervalCalibration | None = None
    length: float | None = None
    test: Held | None = None

    def as_json(self) -> dict[str, Any]:
        return {
            "coverage": self.coverage if self.calibration else None,
            "labelled_patients": self.labelled,
            "calibration": self.calibration and self.calibration.to_dict(),
            "median_share_of_slices": self.length,
            "test": self.test and {"held": self.test.held, "scans": self.test.scans},
        }

    def sentences(self) -> list[str]:
        """What intervals promise, and whether test scans agree."""
        if self.calibration is None or self.length is None:
            return [
                f"Intervals promise nothing about the finding: {_patients(self.labelled)} a positive scan with slice "
                f"labels, but a promise of {100 * self.coverage:g} % needs {_needed(self.coverage)}."
            ]
        return [
            f"An interval {promise(self.coverage)}. It was calibrated on {self.labelled} scans with slice labels, one "
            f"for each patient, which leaves this probability uncertain by {100 * self.calibration.spread:.0f} %.",
            f"The median interval has {100 * self.length:.0f} % of its scan's slices.",
            *self._tested(self.calibration),
        ]

    def _tested(self, calibration: IntervalCalibration) -> list[str]:
        if self.test is None:
            return []
        from scipy.stats import betabinom

        held, scans = self.test.held, self.test.scans
        line = f"On the test scans it contains the whole finding in {held} of {scans}."
        if betabinom.cdf(held, scans, *calibration.beta) >= UNLIKELY:
            return [line]
        return [f"{line} Chance does not explain so few: the test scans are of another kind, so do not rely on it."]


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
    """Calibrate intervals on scans by their out-of-fold attention, if enough of them have slice labels.

    Args:
        scans: the training scans.
        attention: by members that were not trained on the scan.
        coverage: the probability to promise; without it, `COVERAGE` if the labels allow it.
    """
    check_promise(coverage, scans)
    asked, chosen = coverage or COVERAGE, one_per_patient(scans)
    if len(chosen) < scans_needed(asked) or scans.slice_labels is None:
        return PromisedIntervals(asked, len(chosen))
    own, labels = (_parts(values, scans.lengths, chosen) for values in (attention, scans.slice_labels))
    calibration = calibrate_intervals(own, scans.lengths[chosen], labels, asked)
    return PromisedIntervals(asked, len(chosen), calibration, _length(calibration, scans, attention))


def check_on(promised: PromisedIntervals, test: LabelledScans, attention: Float[Tensor, "slices"]) -> PromisedIntervals:
    """The same with what it does on test scans; the length is then theirs."""
    calibration = promised.calibration
    if calibration is None or test.slice_labels is None or not int((test.labels == 1).sum()):
        return promised
    first, last = calibration.interval(attention, test.lengths)
    held = [
        int(first[scan]) <= int(found.min()) and int(found.max()) <= int(last[scan])
        for scan, own in enumerate(test.slice_labels.split(test.lengths.tolist()))
        if len(found := (own == 1).nonzero())
    ]
    return PromisedIntervals(
        promised.coverage,
        promised.labelled,
        calibration,
        _length(calibration, test, attention),
        Held(sum(held), len(held)) if held else None,
    )


def one_per_patient(scans: LabelledScans) -> list[int]:
    """The places of the scans with a positive slice, of each patient the one whose id has the lowest hash."""
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


def _parts(values: Tensor, lengths: Int[Tensor, "scans"], chosen: Sequence[int]) -> Tensor:
    own = values.split(lengths.tolist())
    return torch.cat([own[scan] for scan in chosen])


def _needed(coverage: float) -> str:
    needed = scans_needed(coverage)
    return f"{needed}, better {ADVISED}" if needed < ADVISED else str(needed)


def _patients(number: int) -> str:
    return "1 patient has" if number == 1 else f"{number or 'no'} patients have"


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
