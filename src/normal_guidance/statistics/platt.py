"""The line that turns a model's scores into log-odds: logistic regression of the label on the score.

Reference: Platt, "Probabilistic outputs for support vector machines and comparisons to regularized likelihood
methods", 1999.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

NEWTON_STEPS = 100
"""The fit takes at most so many steps; about 6 are needed."""

HALVINGS = 30
"""A step that would raise the loss is halved at most so often."""

ROUNDING = 1e-12
"""A step may raise the loss by this share of it, and scores may differ by this share: rounding does that."""


class Line(NamedTuple):
    """log-odds = slope * score + intercept."""

    slope: float
    intercept: float
    error: float
    """The standard error of the slope."""


class Lines(NamedTuple):
    """Many lines."""

    slope: Float64[Tensor, "lines"]
    intercept: Float64[Tensor, "lines"]
    error: Float64[Tensor, "lines"]


def fit_line(scores: Float[Tensor, "scans"], labels: Int[Tensor, "scans"]) -> Line:
    r"""Logistic regression with Platt's smoothed targets, by Newton's method; the slope of equal scores is 0.

    $t = \frac{N_+ + 1}{N_+ + 2}$ for positive scans and $\frac{1}{N_- + 2}$ for negative ones: the fit stays finite
    where one score separates the classes.
    """
    found = fit_lines(scores[None], labels, torch.ones(1, len(scores), dtype=torch.bool, device=scores.device))
    return Line(*(values.item() for values in found))


def fit_lines(
    scores: Float[Tensor, "lines scans"], labels: Int[Tensor, "scans"], chosen: Bool[Tensor, "lines scans"]
) -> Lines:
    """Fit many lines at once, each to its `chosen` scans."""
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
        gradient, curve = _derivatives(x, weight, targets, slope, intercept)
        step_slope, step_intercept = _solve(curve, gradient)
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
    slope, error = (torch.where(flat, 0.0, one / scale.masked_fill(flat, 1.0))[:, 0] for one in (slope, error))
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


def _solve(curve: tuple[Tensor, Tensor, Tensor], gradient: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """The step; where all scores are equal, only the intercept moves."""
    (a, b, c), (g, h) = curve, gradient
    flat, determinant = a == 0.0, a * c - b * b
    safe = determinant.masked_fill(determinant <= 0.0, torch.inf)
    intercept = torch.where(flat, h / c.clamp_min(1e-300), (a * h - b * g) / safe)
    return torch.where(flat, 0.0, (c * g - b * h) / safe), intercept
