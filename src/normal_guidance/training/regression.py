r"""Penalised logistic regressions, many at once: each has its own rows, penalty and training scans.

$$ \min_{w, c} \; \operatorname{mean}_{i \in \text{chosen}} \log(1 + e^{-y_i (w^\top x_i + c)})
   + \tfrac{\text{ridge}}{2} \lVert w \rVert^2 + \text{lasso} \lVert w \rVert_1 $$

The problem is convex: it has one solution, which no seed and no learning rate changes.  It is solved by accelerated
proximal gradient steps that start again when they overshoot (O'Donoghue and Candes, "Adaptive restart for accelerated
gradient schemes", 2015), in float64.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

STEPS = 2000
"""The most steps; a few hundred are usual."""

TOLERANCE = 1e-5
"""It has converged when a step moves no weight by more than this."""

POWER_STEPS = 30
"""Products that find the largest curvature, which sets the size of the steps."""


def fit_logistic(
    rows: Float[Tensor, "models scans inputs"] | Float[Tensor, "scans inputs"],
    labels: Int[Tensor, "scans"],
    chosen: Bool[Tensor, "models scans"],
    *,
    ridge: Float[Tensor, "models"],
    lasso: Float[Tensor, "models"],
    start: Float[Tensor, "models inputs"] | None = None,
) -> tuple[Float64[Tensor, "models inputs"], Float64[Tensor, "models"]]:
    """The weights and biases of all models; the bias is not penalised.

    Args:
        rows: of each model, or of all.
        chosen: the training scans.
        start: weights that are close to the solution, which is then found sooner.

    Example:
        >>> rows = torch.tensor([[[2.0, 0.1], [1.0, -0.1], [-1.0, 0.1], [-2.0, -0.1]]])
        >>> weights, bias = fit_logistic(
        ...     rows, torch.tensor([1, 1, 0, 0]), torch.ones(1, 4, dtype=torch.bool),
        ...     ridge=torch.tensor([0.1]), lasso=torch.tensor([0.1]))
        >>> weights.abs().round(decimals=2).tolist(), abs(round(bias.item(), 2))
        ([[1.14, 0.0]], 0.0)
    """
    share = chosen.double() / chosen.sum(1, keepdim=True)
    rows, targets = rows.double(), labels.double()
    ridge, lasso = ridge.double()[:, None], lasso.double()[:, None]
    size = 1.0 / (0.25 * _largest(rows, share) + ridge)
    weights = rows.new_zeros(len(share), rows.shape[-1]) if start is None else start.double()
    bias = torch.logit((share * targets).sum(1, keepdim=True), eps=1e-6)
    ahead, ahead_bias, momentum = weights, bias, torch.ones_like(bias)
    for _ in range(STEPS):
        scores = _scores(rows, ahead) + ahead_bias
        error = share * (scores.sigmoid() - targets)
        gradient = _sums(rows, error) + ridge * ahead
        moved = ahead - size * gradient
        moved = moved.sign() * (moved.abs() - size * lasso).clamp_min(0.0)
        moved_bias = ahead_bias - size * error.sum(1, keepdim=True)
        steps = torch.cat([moved - weights, moved_bias - bias], 1)
        overshot = (torch.cat([ahead - moved, ahead_bias - moved_bias], 1) * steps).sum(1, keepdim=True) > 0
        following = torch.where(overshot, 1.0, 0.5 * (1.0 + (1.0 + 4.0 * momentum.square()).sqrt()))
        carry = torch.where(overshot, 0.0, (momentum - 1.0) / following)
        weights, bias, momentum = moved, moved_bias, following
        ahead = weights + carry * steps[:, :-1]
        ahead_bias = bias + carry * steps[:, -1:]
        if steps.abs().max() < TOLERANCE:
            break
    return weights, bias[:, 0]


def _scores(rows: Tensor, weights: Float64[Tensor, "models inputs"]) -> Float64[Tensor, "models scans"]:
    return weights @ rows.T if rows.ndim == 2 else (rows @ weights[:, :, None])[:, :, 0]


def _sums(rows: Tensor, factors: Float64[Tensor, "models scans"]) -> Float64[Tensor, "models inputs"]:
    return factors @ rows if rows.ndim == 2 else (factors[:, None] @ rows)[:, 0]


def _largest(rows: Tensor, share: Float64[Tensor, "models scans"]) -> Float64[Tensor, "models one"]:
    """An upper bound of the largest eigenvalue of each model's mean of x x^T, the constant of the bias included."""
    vector = rows.new_ones(len(share), rows.shape[-1] + 1)
    value = rows.new_ones(len(share), 1)
    for _ in range(POWER_STEPS):
        vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(1e-300)
        scores = share * (_scores(rows, vector[:, :-1]) + vector[:, -1:])
        vector = torch.cat([_sums(rows, scores), scores.sum(1, keepdim=True)], 1)
        value = vector.norm(dim=1, keepdim=True)
    return 1.1 * value  # the last products may still be a little below
