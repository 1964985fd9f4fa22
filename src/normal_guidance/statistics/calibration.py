r"""Calibration turns a model's logit into a probability; a scan is positive from the threshold on.

Both come from the validation scans of a run, which also chose its epoch and hyperparameters, so results on them are too
good; the threshold is counted on any test scans, too.  An ensemble (`nguide fit`) has out-of-fold scans instead: each
was predicted by members that were not trained on it.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Annotated, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.records import Between
from normal_guidance.core.arrays import is_number
from normal_guidance.core.metrics import auroc

NEWTON_STEPS = 100  # the fit takes at most so many steps; about 6 are needed
HALVINGS = 30  # a step that would raise the loss is halved at most so often

ROUNDING = 1e-12  # the share by which a step may raise the loss, and by which equal scores may differ


class Lines(NamedTuple):
    """Many lines, log-odds = slope * score + intercept, with the standard error of their slopes."""

    slope: Float64[Tensor, "lines"]
    intercept: Float64[Tensor, "lines"]
    error: Float64[Tensor, "lines"]


def fit_lines(
    scores: Float[Tensor, "lines scans"], labels: Int[Tensor, "scans"], chosen: Bool[Tensor, "lines scans"]
) -> Lines:
    """Logistic regressions with Platt's smoothed targets (1999) by Newton's method, each of its `chosen` scans."""
    # Targets (N+ + 1) / (N+ + 2) for positive and 1 / (N- + 2) for negative scans keep the fit finite where one score
    # separates the classes. The slope of equal scores is 0.
    weight, values, is_positive = chosen.double(), scores.double(), labels == 1
    positive, negative = weight @ is_positive.double(), weight @ (~is_positive).double()
    high, low = (positive + 1) / (positive + 2), 1 / (negative + 2)
    targets = torch.where(is_positive, high[:, None], low[:, None])
    # Standardised, so that steps have the same size for all scores.
    count = weight.sum(1, keepdim=True)
    center = (weight * values).sum(1, keepdim=True) / count
    scale = ((weight * (values - center).square()).sum(1, keepdim=True) / (count - 1).clamp_min(1.0)).sqrt()
    flat = ~(scale > ROUNDING * (1.0 + center.abs()))
    x = torch.where(flat, 0.0, (values - center) / scale.masked_fill(flat, 1.0))
    slope = torch.zeros_like(center)
    intercept = torch.logit((weight * targets).sum(1, keepdim=True) / count)

    def loss(slope: Tensor, intercept: Tensor) -> Tensor:
        odds = slope * x + intercept
        return (weight * (torch.nn.functional.softplus(odds) - targets * odds)).sum(1, keepdim=True)

    for _ in range(NEWTON_STEPS):
        (g, h), (a, b, c) = _derivatives(x, weight, targets, slope, intercept)
        equal, determinant = a == 0.0, a * c - b * b  # where all scores are equal, only the intercept moves
        safe = determinant.masked_fill(determinant <= 0.0, torch.inf)
        step_slope = torch.where(equal, 0.0, (c * g - b * h) / safe)
        step_intercept = torch.where(equal, h / c.clamp_min(1e-300), (a * h - b * g) / safe)
        most, size = loss(slope, intercept) * (1 + ROUNDING), torch.ones_like(slope)
        for _ in range(HALVINGS):
            too_far = loss(slope - size * step_slope, intercept - size * step_intercept) > most
            if not too_far.any():
                break
            size = torch.where(too_far, size / 2, size)
        slope, intercept = slope - size * step_slope, intercept - size * step_intercept
        if torch.maximum(step_slope.abs(), step_intercept.abs()).max() < 1e-9:
            break
    _, (a, b, c) = _derivatives(x, weight, targets, slope, intercept)
    error = torch.where(flat, 0.0, (c / (a * c - b * b)).sqrt())
    slope, error = (torch.where(flat, 0.0, values / scale.masked_fill(flat, 1.0))[:, 0] for values in (slope, error))
    return Lines(slope, intercept[:, 0] - slope * center[:, 0], error)


def _derivatives(
    x: Tensor, weight: Tensor, targets: Tensor, slope: Tensor, intercept: Tensor
) -> tuple[tuple[Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]:
    """The gradient by slope and intercept, and the curvature [[a, b], [b, c]]."""
    p = (slope * x + intercept).sigmoid()
    off, curve = weight * (p - targets), weight * p * (1 - p)
    gradient = (x * off).sum(1, keepdim=True), off.sum(1, keepdim=True)
    a, b = ((factor * curve).sum(1, keepdim=True) for factor in (x * x, x))
    return gradient, (a, b, curve.sum(1, keepdim=True))


FEW = 20  # with fewer scans of a class numbers are called rough: one scan moves them by over 5 %


@dataclass(frozen=True)
class Calibration:
    r"""$p = \sigma(\text{slope} \cdot \text{logit} + \text{intercept})$; slope 1 and intercept 0 change nothing."""

    slope: float = 1.0
    intercept: float = 0.0

    def probability(self, logit: float) -> float:
        """The calibrated probability, between 0 and 1."""
        return torch.tensor(self.slope * logit + self.intercept, dtype=torch.float64).sigmoid().item()


@dataclass(frozen=True)
class CallCounts:
    """How many scans a threshold puts on the right side."""

    positive: Annotated[int, Between(0.0)]
    found: Annotated[int, Between(0.0)]  # positive scans at or above the threshold
    negative: Annotated[int, Between(0.0)]
    spared: Annotated[int, Between(0.0)]  # negative scans below it

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
    """The probability from which on a scan is positive, and the results of that rule."""

    rule: str  # "youden" or "sensitivity"
    target: Annotated[float, Between(0.0, 1.0)] | None  # the required sensitivity, if there was one
    threshold: Annotated[float, Between(0.0, 1.0)]  # a scan at or above it is positive
    validation: CallCounts  # on the scans that chose the threshold
    test: CallCounts | None = None


@dataclass(frozen=True)
class Operation:
    """How a logit becomes a decision: calibration, operating point, and notes for people about what is doubtful."""

    calibration: Calibration
    point: OperatingPoint | None
    notes: tuple[str, ...] = ()
    scans: str = "validation"  # the scans that they come from: validation, or out-of-fold


def choose_operation(
    logits: Float[Tensor, "scans"],
    labels: Int[Tensor, "scans"],
    *,
    sensitivity: float | None = None,
    test: tuple[Float[Tensor, "tested"], Int[Tensor, "tested"]] | None = None,
    scans: str = "validation",
) -> Operation:
    """Choose calibration and threshold on the validation scans; without both classes neither is chosen, with a note."""
    # The threshold reaches at least `sensitivity`, without it the greatest Youden's J, and is also counted on `test`
    # scans.
    check_sensitivity(sensitivity)
    logits = logits.double()
    if not logits.isfinite().all():
        a_scan = f"{'an' if scans[0] in 'aeiou' else 'a'} {scans} scan"
        raise UserError(f"{a_scan} has a logit that is not a finite number; give a run that has not diverged")
    positive, negative = int((labels == 1).sum()), int((labels == 0).sum())
    if not positive or not negative:
        known = f"{positive} positive and {negative} negative scans"
        if sensitivity is not None:
            raise UserError(
                f"the {scans} scans have {known}, which give no threshold for sensitivity {sensitivity:g}; leave out "
                "--sensitivity, or give a run with both classes"
            )
        note = f"the {scans} scans have {known}: probabilities are not calibrated, and no threshold was chosen"
        return Operation(Calibration(), None, (note,), scans)
    notes = []
    if auroc(logits, labels).item() == 1.0:
        notes.append(
            f"the {scans} scans are separated without an error: a threshold between the classes, where no scan lies, "
            "is arbitrary, and the numbers flatter"
        )
    if min(positive, negative) < FEW:
        notes.append(f"there are only {positive} positive and {negative} negative {scans} scans: take it as rough")
    calibration, left = Calibration(), "probabilities are not calibrated"
    line = fit_lines(logits[None], labels, torch.ones_like(logits, dtype=torch.bool)[None])
    if logits.unique().numel() == 1:
        notes.append(f"all {scans} scans have the same logit: {left}")
    elif line.slope.item() <= 0:  # a line that falls would reverse the order of scans
        notes.append(f"higher logits do not go with positive {scans} scans: {left}; look at the model")
    else:
        calibration = Calibration(line.slope.item(), line.intercept.item())
    if sensitivity is None:
        rule, level = "youden", youden_threshold(logits, labels)
    else:
        rule, level = "sensitivity", sensitive_threshold(logits, labels, sensitivity)
    point = OperatingPoint(
        rule=rule,
        target=sensitivity,
        threshold=calibration.probability(level),
        validation=count(logits, labels, level),
        test=None if test is None else count(test[0].double(), test[1], level),
    )
    return Operation(calibration, point, tuple(notes), scans)


def check_sensitivity(sensitivity: float | None) -> None:
    """Refuse what is not a share of scans."""
    if sensitivity is not None and not (is_number(sensitivity) and 0 < sensitivity <= 1):
        raise UserError(f"sensitivity is {sensitivity!r}; give a share above 0 and at most 1, for instance 0.95")


def youden_threshold(logits: Float64[Tensor, "scans"], labels: Int[Tensor, "scans"]) -> float:
    """The logit that maximises sensitivity + specificity - 1; the lowest of equals, which misses fewest positives."""
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


def count(logits: Float64[Tensor, "scans"], labels: Int[Tensor, "scans"], level: float) -> CallCounts:
    """Count what a threshold on the logit finds."""
    above, positive, negative = logits >= level, labels == 1, labels == 0
    return CallCounts(
        positive=int(positive.sum()),
        found=int((above & positive).sum()),
        negative=int(negative.sum()),
        spared=int((~above & negative).sum()),
    )


def describe(operation: Operation) -> list[str]:
    """Calibration and threshold in sentences for people."""
    notes = [f"Note: {note}." for note in operation.notes]
    point = operation.point
    if point is None:
        return ["No threshold was chosen.", *notes]
    rule = "Youden's J" if point.target is None else f"a sensitivity of at least {point.target:g}"
    test = f"; on the test scans {point.test}" if point.test else ""
    scans = operation.scans if operation.scans == "validation" else f"{operation.scans} scans"
    return [
        f"A scan counts as positive from {point.threshold:.3f} on ({rule}): {point.validation} on {scans}{test}.",
        *notes,
    ]


def wilson(found: int, of: int, z: float = 1.96) -> tuple[float, float]:
    """The ends of a share's interval (Wilson, 1927)."""
    share = found / of
    middle, spread = share + z * z / (2 * of), z * math.sqrt(share * (1 - share) / of + (z / (2 * of)) ** 2)
    return max(0.0, (middle - spread) / (1 + z * z / of)), min(1.0, (middle + spread) / (1 + z * z / of))
