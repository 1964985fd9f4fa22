r"""Calibration turns a model's logit into a probability; a scan is positive from the threshold on.

Both come from the validation scans of a run.  Those scans also chose the model's epoch and hyperparameters, so the
results on them are too good; where a run has test scans, the same threshold is also counted on those.  A committee
(`nguide fit`) has out-of-fold scans instead: each was predicted by members that were not trained on it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from jaxtyping import Float, Float64, Int
from torch import Tensor

from normal_guidance.core.checks import is_number
from normal_guidance.core.metrics import auroc
from normal_guidance.errors import UserError
from normal_guidance.statistics.platt import fit_line
from normal_guidance.typed_json import Between

FEW = 20
"""With fewer scans of a class the numbers are called rough: one scan more or less moves them by over 5 %."""


@dataclass(frozen=True)
class Calibration:
    r"""$p = \sigma(\text{slope} \cdot \text{logit} + \text{intercept})$; slope 1 and intercept 0 change nothing."""

    slope: float = 1.0
    intercept: float = 0.0

    def probability(self, logit: float) -> float:
        """The calibrated probability, between 0 and 1."""
        return torch.tensor(self.slope * logit + self.intercept, dtype=torch.float64).sigmoid().item()


@dataclass(frozen=True)
class Counts:
    """How many scans a threshold puts on the right side."""

    positive: Annotated[int, Between(0.0)]
    found: Annotated[int, Between(0.0)]
    """Positive scans at or above the threshold."""
    negative: Annotated[int, Between(0.0)]
    spared: Annotated[int, Between(0.0)]
    """Negative scans below it."""

    @property
    def sensitivity(self) -> float:
        return self.found / self.positive if self.positive else math.nan

    @property
    def specificity(self) -> float:
        return self.spared / self.negative if self.negative else math.nan

    def __str__(self) -> str:
        return (
            f"sensitivity {self.sensitivity:.3f} ({self.found} of {self.positive}), specificity {self.specificity:.3f} "
            f"({self.spared} of {self.negative})"
        )


@dataclass(frozen=True)
class OperatingPoint:
    """The probability from which on a scan is positive, and the results of that rule.

    Args:
        rule: "youden" or "sensitivity".
        target: the required sensitivity, if there was one.
        threshold: a probability; a scan at or above it is positive.
        validation: results on the validation scans, which chose the threshold.
        test: results on the test scans, if the run has any.
    """

    rule: str
    target: Annotated[float, Between(0.0, 1.0)] | None
    threshold: Annotated[float, Between(0.0, 1.0)]
    validation: Counts
    test: Counts | None = None


@dataclass(frozen=True)
class Operation:
    """How a logit becomes a decision: calibration, operating point, and notes for people about what is doubtful."""

    calibration: Calibration
    point: OperatingPoint | None
    notes: tuple[str, ...] = ()
    scans: str = "validation"
    """The scans that they come from: validation, or out-of-fold."""

    def as_json(self) -> dict[str, Any]:
        """The fields; `read_as` is the inverse."""
        return asdict(self)


def choose_operation(
    logits: Float[Tensor, "scans"],
    labels: Int[Tensor, "scans"],
    *,
    sensitivity: float | None = None,
    test: tuple[Float[Tensor, "tested"], Int[Tensor, "tested"]] | None = None,
    scans: str = "validation",
) -> Operation:
    """Choose calibration and threshold on the validation scans; without both classes neither is chosen, with a note.

    Args:
        logits: of the validation scans.
        labels: 0 or 1.
        sensitivity: least sensitivity to reach; without it, Youden's J is maximised.
        test: logits and labels of the test scans, on which the threshold is also counted.
        scans: what the validation scans are called.
    """
    check_sensitivity(sensitivity)
    logits = logits.double()
    if not logits.isfinite().all():
        raise UserError(f"{_a(scans)} scan has a logit that is not a finite number; give a run that has not diverged")
    positive, negative = int((labels == 1).sum()), int((labels == 0).sum())
    if not positive or not negative:
        one = f"{positive} positive and {negative} negative scans"
        if sensitivity is not None:
            raise UserError(
                f"the {scans} scans have {one}, which give no threshold for sensitivity {sensitivity:g}; leave out "
                "--sensitivity, or give a run with both classes"
            )
        note = f"the {scans} scans have {one}: probabilities are not calibrated, and no threshold was chosen"
        return Operation(Calibration(), None, (note,), scans)
    calibration, notes = _fit(logits, labels, scans)
    level = (
        youden_threshold(logits, labels) if sensitivity is None else sensitive_threshold(logits, labels, sensitivity)
    )
    point = OperatingPoint(
        rule="youden" if sensitivity is None else "sensitivity",
        target=sensitivity,
        threshold=calibration.probability(level),
        validation=count(logits, labels, level),
        test=None if test is None else count(test[0].double(), test[1], level),
    )
    return Operation(calibration, point, (*_cautions(logits, labels, positive, negative, scans), *notes), scans)


def check_sensitivity(sensitivity: float | None) -> None:
    """Refuse what is not a share of scans."""
    if sensitivity is not None and not (is_number(sensitivity) and 0 < sensitivity <= 1):
        raise UserError(f"sensitivity is {sensitivity!r}; give a share above 0 and at most 1, for instance 0.95")


def _a(word: str) -> str:
    return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"


def _cautions(logits: Tensor, labels: Tensor, positive: int, negative: int, scans: str) -> list[str]:
    notes = []
    if auroc(logits, labels).item() == 1.0:
        notes.append(
            f"the {scans} scans are separated without an error: a threshold between the classes, where no scan lies, "
            "is arbitrary, and the numbers flatter"
        )
    if min(positive, negative) < FEW:
        notes.append(f"there are only {positive} positive and {negative} negative {scans} scans: take it as rough")
    return notes


def _fit(logits: Tensor, labels: Tensor, scans: str) -> tuple[Calibration, list[str]]:
    """Platt's calibration, unless it would reverse the order of scans."""
    left = "probabilities are not calibrated"
    if logits.unique().numel() == 1:
        return Calibration(), [f"all {scans} scans have the same logit: {left}"]
    line = fit_line(logits, labels)
    if line.slope <= 0:
        return Calibration(), [f"higher logits do not go with positive {scans} scans: {left}; look at the model"]
    return Calibration(line.slope, line.intercept), []


def youden_threshold(logits: Float64[Tensor, "scans"], labels: Int[Tensor, "scans"]) -> float:
    """The logit that maximises sensitivity + specificity - 1; among equals the lowest, which misses fewest positives."""
    levels = _levels(logits)
    counts = [count(logits, labels, level) for level in levels]
    best = max(range(len(levels)), key=lambda i: (round(counts[i].sensitivity + counts[i].specificity, 12), -levels[i]))
    return levels[best]


def sensitive_threshold(logits: Float64[Tensor, "scans"], labels: Int[Tensor, "scans"], sensitivity: float) -> float:
    """The highest logit that finds at least this share of the positive scans."""
    enough = (level for level in _levels(logits) if count(logits, labels, level).sensitivity >= sensitivity - 1e-12)
    return max(enough)  # the lowest level finds all


def _levels(logits: Tensor) -> list[float]:
    """All thresholds with different results: halfway between neighbouring logits, and the lowest logit."""
    values = logits.unique()
    return [values[0].item(), *((values[1:] + values[:-1]) / 2).tolist()]


def count(logits: Float64[Tensor, "scans"], labels: Int[Tensor, "scans"], level: float) -> Counts:
    """Count what a threshold on the logit finds."""
    above, positive, negative = logits >= level, labels == 1, labels == 0
    return Counts(
        positive=int(positive.sum()),
        found=int((above & positive).sum()),
        negative=int(negative.sum()),
        spared=int((~above & negative).sum()),
    )


def describe(operation: Operation) -> Sequence[str]:
    """Describe calibration and threshold in sentences for people."""
    notes = [f"Note: {note}." for note in operation.notes]
    point = operation.point
    if point is None:
        return ["No threshold was chosen.", *notes]
    rule = "Youden's J" if point.target is None else f"a sensitivity of at least {point.target:g}"
    test = f"; on the test scans {point.test}" if point.test else ""
    own = f"{point.validation} on {operation.scans if operation.scans == 'validation' else f'{operation.scans} scans'}"
    first = f"A scan counts as positive from {point.threshold:.3f} on ({rule}): {own}{test}."
    return [first, *notes]
