r"""Reference distributions: a normal with the moments of attention, or a mixture of normals, in any dimension.

All functions take log-attention that sums to one over a bag's slices and return log r, a constant to the gradient.
Shapes are `(bags, heads, longest)`, hidden in the padding.

A reference with k modes is a mixture of k normals with weights of their own and one common covariance, fitted to
attention by expectation maximisation.  The covariance is common because a mode with its own width could shrink onto a
single slice, where the likelihood is unbounded, and the reference would reward the spikes that guidance is to smooth.
The first guess cuts attention where the cut removes most of its variance, again and again until there are k parts, so
nothing is random.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.layout import Layout
from normal_guidance.core.positions import Points, in_slices, slice_numbers

VARIANCE_FLOOR = 1e-6
"""The least variance, in squared slices.  Attention on one slice has none; its reference then stays on that slice."""

EM_STEPS = 5
"""Steps from the first guess.  The reference is then within .01 (total variation, mean over random attention of 40 and
300 slices) of the result of 500 steps, and every step of training computes it anew."""

Padded = Float[Tensor, "bags heads longest"]
Shares = Float[Tensor, "bags heads modes longest"]


def log_normal(log_a: Padded, layout: Layout, least_width: float = 0.0) -> Padded:
    """log r by eqs. 2 and 3 of the paper: positions are slice numbers, and there is one mode.

    The standard deviation is at least `least_width` slices.
    """
    a = log_a.detach().exp()
    j = slice_numbers(layout)[:, None]
    mean = (j * a).sum(-1, keepdim=True)
    mean = mean + ((j - mean) * a).sum(-1, keepdim=True)  # one step of refinement: removes the sum's rounding
    distance = (j - mean).square()
    variance = (distance * a).sum(-1, keepdim=True).clamp_min(_floor(least_width))
    return layout.log_softmax(-distance / (2 * variance))


@torch.no_grad()
def log_mixture(
    log_a: Padded, layout: Layout, points: Points | None = None, modes: int = 1, least_width: float = 0.0
) -> Padded:
    r"""log r of the mixture of normals fitted to attention at these points, by default the slice numbers.

    $$ r_j = \sum_m \pi_m\, \mathrm{softmax}_j\big(-\tfrac12 (x_j - \mu_m)^\top \Sigma^{-1} (x_j - \mu_m)\big) $$

    One dimension is computed in attention's precision, more dimensions in float64, because the covariance of points on
    a line is singular apart from its floor.
    """
    a = log_a.detach().exp()
    if points is None:
        x = slice_numbers(layout)[:, None, None].to(a.dtype)
    else:
        x = in_slices(points, layout)[:, None]
        x = x.to(a.dtype) if x.shape[2] == 1 else x
    weights = a.to(x.dtype)[:, :, None]
    shares = _first_guess(weights, x, modes, ordered=points is None)
    floor = _floor(least_width)
    log_pi, distance = _maximize(weights * shares, x, floor)
    for _ in range(EM_STEPS if modes > 1 else 0):
        shares = torch.softmax(log_pi - distance / 2, dim=2)
        log_pi, distance = _maximize(weights * shares, x, floor)
    log_modes = layout.log_softmax(-distance.flatten(1, 2) / 2).unflatten(1, distance.shape[1:3])
    return layout.hide(torch.logsumexp(log_pi + log_modes, dim=2).to(log_a.dtype))


def _floor(least_width: float) -> float:
    return max(VARIANCE_FLOOR, least_width**2)


def _maximize(
    weights: Shares, x: Float[Tensor, "bags 1 dimensions longest"], floor: float
) -> tuple[Float[Tensor, "bags heads modes 1"], Shares]:
    """The log of each mode's weight, and squared distances from its mean in units of the common covariance."""
    mass = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)  # a mode may have died out
    log_pi = mass.log() - mass.sum(2, keepdim=True).log()
    x = x[:, :, None]
    mean = (weights[..., None, :] * x).sum(-1) / mass
    away = x - mean[..., None]
    mean = mean + (weights[..., None, :] * away).sum(-1) / mass
    away = x - mean[..., None]
    if x.shape[3] == 1:
        squared = away.squeeze(3).square()
        variance = (weights * squared).sum((2, 3), keepdim=True).clamp_min(floor)
        return log_pi, squared / variance
    covariance = ((weights[..., None, :] * away) @ away.mT).sum(2)
    covariance = covariance + floor * torch.eye(x.shape[3], dtype=x.dtype, device=x.device)
    root, _ = torch.linalg.cholesky_ex(covariance)
    return log_pi, torch.linalg.solve_triangular(root[:, :, None], away, upper=False).square().sum(3)


def _first_guess(
    weights: Float[Tensor, "bags heads 1 longest"],
    x: Float[Tensor, "bags 1 dimensions longest"],
    modes: int,
    *,
    ordered: bool,
) -> Shares:
    """Attention in `modes` parts along its main axis: one cut after the other, each where it removes most variance."""
    shares = torch.ones_like(weights)
    if modes == 1:
        return shares
    axis = _main_axis(weights, x)
    order = None if ordered else axis.argsort(-1)
    if order is not None:
        weights, axis = weights.gather(-1, order), axis.gather(-1, order)
    for _ in range(modes - 1):
        shares = _cut(weights, axis, shares)
    return shares if order is None else shares.gather(-1, order.argsort(-1).expand_as(shares))


def _cut(
    weights: Float[Tensor, "bags heads 1 longest"], axis: Float[Tensor, "bags heads 1 longest"], shares: Shares
) -> Float[Tensor, "bags heads modes_and_one longest"]:
    r"""Cut the part P into L and R that removes most variance, $w_L w_R (m_L - m_R)^2 / w_P$."""
    mass = (weights * shares).cumsum(-1)
    moment = (weights * shares * axis).cumsum(-1)
    whole, total = mass[..., -1:], moment[..., -1:]
    # A side that only rounding makes non-empty must not decide.
    between = mass * (whole - mass) * whole
    possible = (between > torch.finfo(mass.dtype).eps * whole**3) & (shares > 0)
    removed = (moment * whole - total * mass).square() / between.where(possible, 1.0)
    best = removed.where(possible, 0.0).flatten(2).argmax(-1)[..., None, None]
    longest = weights.shape[-1]
    place = torch.arange(longest, device=axis.device)
    behind = (place > best % longest) & (torch.arange(shares.shape[2], device=axis.device)[:, None] == best // longest)
    moved = shares * behind
    return torch.cat([shares - moved, moved.sum(2, keepdim=True)], dim=2)


def _main_axis(
    weights: Float[Tensor, "bags heads 1 longest"], x: Float[Tensor, "bags 1 dimensions longest"]
) -> Float[Tensor, "bags heads 1 longest"]:
    """The points' coordinate along the direction in which attention is widest."""
    if x.shape[2] == 1:
        return x.expand_as(weights)
    away = x - (weights * x).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
    _, directions = torch.linalg.eigh((weights * away) @ away.mT)
    return directions[..., -1:].mT @ away
