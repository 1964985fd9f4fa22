"""Intervals with a promise for a committee (`statistics.conformal`), calibrated out of fold and checked on test scans.

Calibration takes one scan of each patient: the promise needs scans that are independent of each other. A hash of the
scan's id chooses it, so neither the order of the scans nor what they show does.

**What is assumed.** New scans are drawn as the labelled ones were. The attention of a labelled scan comes from the
members that were not trained on it, that of a new scan from the whole committee, so the two are not exchangeable in
the strict sense. The whole averages over more members, and is assumed to find slices no worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.core.blocks import count_slices
from normal_guidance.errors import UserError
from normal_guidance.statistics.conformal import (
    IntervalCalibration,
    calibrate_intervals,
    check_coverage,
    promise,
    scans_needed,
)
from normal_guidance.training.batches import LabelledScans

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
