"""An ensemble with its calibration and threshold, and what it does on scans that it was not trained on.

Both ways to fit share this: `nguide fit` (`fitting.py`) and `SliceFinder` (`slice_finder.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import LabelledScans
from normal_guidance.core.blocks import count_slices
from normal_guidance.core.methods import ENSEMBLE, method_title
from normal_guidance.core.prediction import Prediction
from normal_guidance.fit.ensemble import prior_attention
from normal_guidance.fit.fit_ensemble import (
    KINDS,
    EnsembleFit,
    FoldPlan,
    fit_ensemble,
    log_losses,
)
from normal_guidance.show.text_tables import digits
from normal_guidance.statistics.calibration import FEW, Operation, check_sensitivity, choose_operation
from normal_guidance.statistics.conformal import (
    IntervalCalibration,
    calibrate_intervals,
    check_coverage,
    promise,
    scans_needed,
)
from normal_guidance.statistics.differences import ScanAuroc, hanley_mcneil, scan_auroc
from normal_guidance.statistics.skill import (
    Gain,
    MeanAuroc,
    PatientSpecific,
    ScoredSlices,
)
from normal_guidance.sweep.loop import predict_bags

COVERAGE = 0.9  # the probability that is promised where labels allow it, unless another one is asked for
ADVISED = 30  # with so many labelled scans the coverage of 90 % is uncertain by 5 %
ROUGH, GOOD = 10, 0.8  # fewer scans of a class are cautioned about, by what is known of a scan AUROC of so much
UNLIKELY = 0.01  # test scans that hold so seldom by chance are not of the kind that calibrated

ASSUMPTIONS = (
    "The promise is for new positive scans of the same kind of patients, scanners and findings as the labelled ones, "
    "and is an average over such scans: it is not a probability for one scan in particular. Labelled scans were seen "
    "by the members that were not trained on them, new scans are seen by the whole ensemble, which is assumed to find "
    "slices no worse."
)


class Held(NamedTuple):
    held: int  # test scans whose whole finding is in the interval
    scans: int  # with slice labels


@dataclass(frozen=True)
class PromisedIntervals:
    """The calibration of an ensemble's intervals, and what they do on test scans."""

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


def check_shares(sensitivity: float | None, coverage: float | None) -> None:
    """Refuse, before any work, a sensitivity or a coverage that is none."""
    check_sensitivity(sensitivity)
    if coverage is not None:
        check_coverage(coverage)


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


@dataclass(frozen=True, eq=False)
class Measured:
    """What a model does on scans that it was not trained on; None where no positive scan has slice labels."""

    positive: int
    negative: int
    scans: ScanAuroc
    localization: MeanAuroc | None
    gain: Gain | None  # over position, the distance from the middle
    specific: PatientSpecific | None

    @property
    def finds(self) -> bool:
        """Whether attention is better than position, by the whole interval of the gain."""
        return self.gain is not None and self.gain.shown


COLUMNS = ("out of fold", "localization AUROC", "scan AUROC", "log loss", "what for")


@dataclass(frozen=True)
class Ranked:
    """A row of the leaderboard: a kind of members, or a guess, out of fold."""

    name: str
    title: str
    attends: bool
    scores: bool
    why: str
    scans: ScanAuroc | None
    localization: MeanAuroc | None
    log_loss: float | None

    def cells(self) -> list[str]:
        """The texts of `COLUMNS`."""
        measured = ["" if value is None else str(value) for value in (self.localization, self.scans)]
        return [self.title, *measured, "" if self.log_loss is None else digits(self.log_loss), self.why]


@dataclass(frozen=True, eq=False)
class MeasuredFit:
    """What `fit_and_measure` has made; `tested` and `test` are None without test scans."""

    fit: EnsembleFit
    operation: Operation
    predicted: Prediction  # out of fold
    out_of_fold: Measured
    leaderboard: tuple[Ranked, ...]
    tested: Prediction | None
    test: Measured | None
    intervals: PromisedIntervals

    def cautions(self, finding: str = "") -> tuple[str, ...]:
        """What it was not shown to do, for whoever reads a result of the model; nothing of what was not measured."""
        measured, report = self.out_of_fold, "see the model's report."
        model = f"The model of {finding}" if finding else "This model"
        cautions: list[str] = []
        if min(measured.positive, measured.negative) < ROUGH:
            cautions.append(f"{model} is known roughly: {_uncertain(measured)}; {report}")
        if not measured.scans.shown:
            cautions.append(f"{model} was not shown to tell scans apart (scan AUROC {measured.scans}); {report}")
        if not self.fit.ensemble.shown:
            cautions.append(
                f"{model} attends to the same places in every scan: its key slices {NOT_OF_THE_SCAN}; {report}"
            )
        elif measured.gain is not None and not measured.finds:
            cautions.append(
                f"{model} was not shown to find slices better than their position does (localization AUROC "
                f"{measured.gain} beyond position); {report}"
            )
        return tuple(cautions)

    def sentences(self) -> list[str]:
        """Does it find the slices, does it tell scans apart, can it be trusted; test scans, if any, stand behind."""
        measured = self.out_of_fold
        lines = [_finds(measured, self.fit.ensemble.shown), _apart(measured)]
        if self.test is not None:
            of_test = "" if self.test.gain is None else f"localization AUROC {self.test.gain} beyond position, "
            counts = f"{self.test.positive} positive and {self.test.negative} negative"
            lines.append(f"On test scans, which no model has seen: {of_test}scan AUROC {self.test.scans} ({counts}).")
        return [*lines, _trusted(measured, self.fit)]


def _finds(measured: Measured, shown: bool) -> str:
    gain = measured.gain
    if not shown:
        known = "" if gain is None else f" (localization AUROC {digits(gain.auroc)})"
        return f"It does not find slices: it attends to the same places in every scan, {WHERE_USUAL}{known}."
    if gain is None:
        return "Whether it finds the slices is unknown: no scan has labels for some of its slices; label 30 to know."
    ends = f"{gain}, {gain.scans} scans; localization AUROC {digits(gain.auroc)}, by position {digits(gain.position)}"
    if gain.shown:
        return f"It finds the slices better than position does: {ends}."
    return f"It is not shown to find the slices better than position does: {ends}."


def _apart(measured: Measured) -> str:
    counts = f"{measured.positive} positive and {measured.negative} negative scans"
    how = f"({counts}, each by models that did not see its patient)"
    if measured.scans.shown:
        return f"It tells scans apart: AUROC {measured.scans} {how}."
    return f"It is not shown to tell scans apart: AUROC {measured.scans}, which may be chance {how}."


def _uncertain(measured: Measured) -> str:
    """What so few scans leave unknown."""
    margin = 1.96 * hanley_mcneil(GOOD, measured.positive, measured.negative)
    counts = f"{measured.positive} positive and {measured.negative} negative scans"
    return f"{counts} leave a scan AUROC of {digits(GOOD)} uncertain by ±{digits(margin)}"


def fit_and_measure(
    scans: LabelledScans,
    plan: FoldPlan | None = None,
    *,
    test: LabelledScans | None = None,
    sensitivity: float | None = None,
    coverage: float | None = None,
    device: torch.device | str = "cpu",
    resume: Path | None = None,
    begin: Callable[[float], None] | None = None,
    watch: Callable[[float], object] = lambda share: None,
) -> MeasuredFit:
    """Fit an ensemble, calibrate it and choose its threshold, all out of fold; `fit` says what the options mean."""
    check_sensitivity(sensitivity)  # before the work
    check_promise(coverage, scans)
    if test is not None and (shared := {*scans.patient_ids} & {*test.patient_ids}):
        raise UserError(f"patient {min(shared)!r} has training and test scans ({len(shared)} such); split again")
    if test is not None and test.width != scans.width:
        raise UserError(f"test scans have {test.width} features, training scans {scans.width}; encode both alike")
    fit = fit_ensemble(scans, scans.patient_ids, plan, device=device, resume=resume, begin=begin, watch=watch)
    predicted = Prediction(fit.logits.float(), fit.attention, fit.attention.clamp_min(1e-38).log()[None])
    intervals = promise_intervals(scans, fit.attention, coverage)
    tested, measured, counted = None, None, None
    if test is not None:
        tested = predict_bags(fit.ensemble, test)
        measured, counted = measure(test, tested), (tested.logit, test.labels)
        intervals = check_on(intervals, test, tested.attention)
    operation = choose_operation(fit.logits, scans.labels, sensitivity=sensitivity, test=counted, scans=OUT_OF_FOLD)
    own = measure(scans, predicted)
    return MeasuredFit(fit, operation, predicted, own, rank(fit, own, scans), tested, measured, intervals)


def measure(scans: LabelledScans, prediction: Prediction) -> Measured:
    labels = scans.labels
    positive = int(labels.sum())
    counts = positive, len(labels) - positive
    auroc, scored = scan_auroc(labels, scans.patient_ids, prediction.logit), _scored(scans, prediction.slice_scores)
    if scored is None:
        return Measured(*counts, auroc, localization=None, gain=None, specific=None)
    return Measured(*counts, auroc, scored.mean_auroc(), scored.gain(), scored.patient_specific())


def _scored(scans: LabelledScans, scores: Float[Tensor, "slices"]) -> ScoredSlices | None:
    """None where no scan has slices of both classes."""
    slices = scans.slice_labels
    if slices is None or not count_slices(slices, scans.lengths).mixed.any():
        return None
    return ScoredSlices(scores, slices, scans.lengths, scans.patient_ids)


def _localization(scans: LabelledScans, scores: Float[Tensor, "slices"]) -> MeanAuroc | None:
    scored = _scored(scans, scores)
    return None if scored is None else scored.mean_auroc()


def rank(fit: EnsembleFit, own: Measured, scans: LabelledScans) -> tuple[Ranked, ...]:
    """The ensemble, its kinds by their log loss, and position."""
    loss = log_losses(fit.logits, scans.labels).mean().item()
    first = Ranked(ENSEMBLE, "Ensemble", True, True, "what is kept, averaged", own.scans, own.localization, loss)
    rows = []
    for number, (kind, found) in enumerate(zip(KINDS, fit.kinds, strict=True)):
        attends, scores = number in fit.choice.attends, number in fit.choice.scores
        where = [name for name, counts in (("attention", attends), ("score", scores)) if counts]
        spare = fit.choice.usual and not kind.scores  # it would attend where no guided kind does
        why = "for where guidance fails" if spare else "left out: tells scans apart worse"
        if where:
            why = f"counts in {' and '.join(where)}"
        auroc = scan_auroc(scans.labels, scans.patient_ids, found.logits)
        located = _localization(scans, found.attention) if kind.attends else None
        title = method_title(kind.method)
        rows.append(Ranked(kind.method, title, attends, scores, why, auroc, located, fit.losses[number]))
    guess = _localization(scans, prior_attention(scans.lengths))
    position = Ranked("position", "Position: the middle of the scan", False, False, "for comparison", None, guess, None)
    return (first, *sorted(rows, key=lambda row: row.log_loss or 0.0), position)


def _trusted(measured: Measured, fit: EnsembleFit) -> str:
    if min(measured.positive, measured.negative) < FEW:
        return f"Take all of it as rough: {_uncertain(measured)}."
    if not measured.scans.shown:
        return f"Do not use it: key slices, too, may only show {WHERE_USUAL}."
    if not fit.ensemble.shown:
        return f"Do not use its key slices: they {NOT_OF_THE_SCAN}; better features may help."
    shape = "in one block of slices, as usual" if fit.choice.usual else "anywhere in the scan, also in several places"
    return f"It expects findings {shape}; try it on scans from elsewhere before you rely on it."
