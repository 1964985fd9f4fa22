"""The line that turns a model's scores into log-odds: logistic regression of the label on the score.

Reference: Platt, "Probabilistic outputs for support vector machines and comparisons to regularized likelihood
methods", 1999.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

NEWTON_STEPS = 100
"""The fit takes at most so many steps; about 6 are needed."""


ROUNDING = 1e-12
"""A step may raise the loss by this share of it: rounding does, close to the solution."""


class Line(NamedTuple):
    """log-odds = slope * score + intercept."""

    slope: float
    intercept: float
    error: float
    """The standard error of the slope."""


def fit_line(scores: Float[Tensor, "scans"], labels: Int[Tensor, "scans"]) -> Line:
    r"""Logistic regression with Platt's smoothed targets, by Newton's method; the slope of equal scores is 0.

    $t = \frac{N_+ + 1}{N_+ + 2}$ for positive scans and $\frac{1}{N_- + 2}$ for negative ones: the fit stays finite
    where one score separates the classes.

    Example:
        >>> fit_line(torch.tensor([-1.0, 0.0, 1.0, 2.0]), torch.tensor([0, 1, 0, 1]))
        Line(slope=0.411, intercept=-0.206, error=0.933)
    """
    values = scores.double()
    positive, negative = (labels == 1).sum().item(), (labels == 0).sum().item()
    high, low = (positive + 1) / (positive + 2), 1 / (negative + 2)
    targets = torch.where(labels == 1, high, low).double()
    # Standardised, so that steps have the same size for all scores.
    center, scale = values.mean(), values.std()
    if not scale > 0.0:
        return Line(0.0, torch.logit(targets.mean()).item(), 0.0)
    design = torch.stack([(values - center) / scale, torch.ones_like(values)], dim=1)
    weights = torch.zeros(2, dtype=torch.float64)
    for _ in range(NEWTON_STEPS):
        p = (design @ weights).sigmoid()
        gradient = design.T @ (p - targets)
        step = torch.linalg.solve(_curvature(design, weights), gradient)
        size, most = 1.0, _loss(design, targets, weights) * (1 + ROUNDING)
        while _loss(design, targets, weights - size * step) > most and size > 1e-8:
            size /= 2
        weights = weights - size * step
        if step.abs().max() < 1e-9:
            break
    slope = (weights[0] / scale).item()
    error = (torch.linalg.inv(_curvature(design, weights))[0, 0].sqrt() / scale).item()
    return Line(slope, weights[1].item() - slope * center.item(), error)


def _curvature(design: Tensor, weights: Tensor) -> Tensor:
    p = (design @ weights).sigmoid()
    return design.T @ (design * (p * (1 - p))[:, None])


def _loss(design: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    return torch.nn.functional.binary_cross_entropy_with_logits(design @ weights, targets, reduction="sum")
