r"""Penalised logistic regressions, many at once: each has its own rows, penalty and training scans.

$$ \min_{w, c} \; \operatorname{mean}_{i \in \text{chosen}} \log(1 + e^{-y_i (w^\top x_i + c)})
   + \tfrac{\text{ridge}}{2} \lVert w \rVert^2 + \text{lasso} \lVert w \rVert_1 $$

The problem is convex: it has one solution, which no seed and no learning rate changes.  Few inputs without a lasso are
solved by Newton's method; all else by accelerated proximal gradient steps that start again when they overshoot
(O'Donoghue and Candes, "Adaptive restart for accelerated gradient schemes", 2015).  All is float64.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

STEPS = 2000
"""The most steps; a few hundred are usual."""

TOLERANCE = 1e-5
"""It has converged when a step moves no weight by more than this."""

NEWTON_INPUTS = 64
"""The most inputs for Newton's method, whose steps cost the square of their number for each scan."""

NEWTON_STEPS = 50
"""The most steps of Newton's method; about 7 are usual."""

POWER_STEPS = 30
"""Products that find the largest curvature, which sets the size of the steps."""


def fit_logistic(
    rows: Float[Tensor, "models scans inputs"] | Float[Tensor, "scans inputs"],
    labels: Int[Tensor, "scans"],
    chosen: Bool[Tensor, "models scans"],
    *,
    ridge: Float[Tensor, "models"],
    lasso: Float[Tensor, "models"],
) -> tuple[Float64[Tensor, "models inputs"], Float64[Tensor, "models"]]:
    """The weights and biases of all models; the bias is not penalised.

    Args:
        rows: of each model, or of all.
        chosen: the training scans.
    """
    share = chosen.double() / chosen.sum(1, keepdim=True)
    rows, targets = rows.double(), labels.double()
    ridge, lasso = ridge.double()[:, None], lasso.double()[:, None]
    smooth = (lasso[:, 0] == 0.0) & (rows.shape[-1] <= NEWTON_INPUTS)
    weights, bias = rows.new_zeros(len(share), rows.shape[-1]), rows.new_zeros(len(share))
    for some, solve in ((smooth, _by_newton), (~smooth, _by_proximal_steps)):
        if some.any():
            own = rows if rows.ndim == 2 or some.all() else rows[some]
            weights[some], bias[some] = solve(own, targets, share[some], ridge[some], lasso[some])
    return weights, bias


def _by_newton(
    rows: Tensor, targets: Tensor, share: Tensor, ridge: Tensor, lasso: Tensor
) -> tuple[Float64[Tensor, "models inputs"], Float64[Tensor, "models"]]:
    """Newton's steps, halved where they would raise the loss; the last weight is the bias, which has no penalty."""
    inputs = rows.shape[-1]
    rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
    penalty = torch.cat([ridge.expand(-1, inputs), torch.zeros_like(ridge)], 1)
    weights = rows.new_zeros(len(share), inputs + 1)
    weights[:, -1] = torch.logit((share * targets).sum(1), eps=1e-6)
    transposed = rows.transpose(-1, -2)

    def loss(weights: Tensor) -> Tensor:
        scores = apply_weights(rows, weights)
        fit = (share * (F.softplus(scores) - targets * scores)).sum(1, keepdim=True)
        return fit + 0.5 * (penalty * weights.square()).sum(1, keepdim=True)

    now = loss(weights)
    for _ in range(NEWTON_STEPS):
        p = apply_weights(rows, weights).sigmoid()
        gradient = _sums(rows, share * (p - targets)) + penalty * weights
        curvature = transposed @ ((share * p * (1 - p)).clamp_min(1e-12)[:, :, None] * rows) + penalty.diag_embed()
        step = torch.linalg.solve(curvature, gradient[:, :, None])[:, :, 0]
        size = torch.ones_like(now)
        for _ in range(30):
            following = loss(weights - size * step)
            rises = following > now * (1 + 1e-12)
            if not rises.any():
                break
            size = torch.where(rises, size / 2, size)
        weights, now = weights - size * step, following
        if (size * step).abs().max() < TOLERANCE:
            break
    return weights[:, :-1], weights[:, -1]


def _by_proximal_steps(
    rows: Tensor, targets: Tensor, share: Tensor, ridge: Tensor, lasso: Tensor
) -> tuple[Float64[Tensor, "models inputs"], Float64[Tensor, "models"]]:
    size = 1.0 / (0.25 * _largest(rows, share) + ridge)
    weights = rows.new_zeros(len(share), rows.shape[-1])
    bias = torch.logit((share * targets).sum(1, keepdim=True), eps=1e-6)
    ahead, ahead_bias, momentum = weights, bias, torch.ones_like(bias)
    for _ in range(STEPS):
        scores = apply_weights(rows, ahead) + ahead_bias
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


def apply_weights(
    rows: Float64[Tensor, "models scans inputs"] | Float64[Tensor, "scans inputs"],
    weights: Float64[Tensor, "models inputs"],
) -> Float64[Tensor, "models scans"]:
    """The scores of all scans by all models, without bias."""
    return weights @ rows.T if rows.ndim == 2 else (rows @ weights[:, :, None])[:, :, 0]


def _sums(rows: Tensor, factors: Float64[Tensor, "models scans"]) -> Float64[Tensor, "models inputs"]:
    return factors @ rows if rows.ndim == 2 else (factors[:, None] @ rows)[:, 0]


def _largest(rows: Tensor, share: Float64[Tensor, "models scans"]) -> Float64[Tensor, "models one"]:
    """An upper bound of the largest eigenvalue of each model's mean of x x^T, the constant of the bias included."""
    vector = rows.new_ones(len(share), rows.shape[-1] + 1)
    value = rows.new_ones(len(share), 1)
    for _ in range(POWER_STEPS):
        vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(1e-300)
        scores = share * (apply_weights(rows, vector[:, :-1]) + vector[:, -1:])
        vector = torch.cat([_sums(rows, scores), scores.sum(1, keepdim=True)], 1)
        value = vector.norm(dim=1, keepdim=True)
    return 1.1 * value  # the last products may still be a little below
