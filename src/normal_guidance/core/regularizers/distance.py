"""A learned distance prior: attention at a slice is what attention at the other slices lets one expect."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.attention_term import AttentionTerm, Given, Regularizer
from normal_guidance.core.bells import Padded, is_long, window_sums
from normal_guidance.core.layout import Layout

REACHES = (1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 64.0)
"""Slices over which the influence of a slice falls to 1/e, one for each part of the prior."""

STEPS = 5  # steps of expectation maximisation, from equal weights of the reaches


Parts = Float[Tensor, "reaches rows longest"]


class DistancePrior(AttentionTerm):
    r"""$\mathrm{KL}(r_i \,\|\, a_i)$ to the prior r that a bag's other slices give, by a learned fall with distance."""

    # r_j = sum_k pi_k sum_(i != j) a_i e^(-|j - i| / l_k) / Z_ik.  Each bag fits pi; a slice does not count for itself,
    # or the shortest reach l_k would always fit best.  Reference: Peled et al., "PSA-MIL: A Probabilistic Spatial
    # Attention-Based Multiple Instance Learning for Whole Slide Image Classification", 2025, which puts it on
    # self-attention of patches.

    in_order = True

    def values(self, log_a: Padded, layout: Layout, given: Given) -> Float[Tensor, "bags heads"]:
        with torch.no_grad():
            r = _prior(log_a.exp(), layout)
            log_r = r.clamp_min(torch.finfo(r.dtype).tiny).log()
        return torch.where(r > 0, r * (log_r - log_a), 0.0).sum(-1)


def _prior(a: Padded, layout: Layout) -> Padded:
    """r, which sums to one over a bag's slices; a bag of one slice has none, and its r is 0."""
    place = torch.arange(layout.longest, device=a.device, dtype=a.dtype)
    distance = place if is_long(layout.longest, place.device) else (place[:, None] - place).abs()
    reaches = torch.stack([place.new_full((1,) * distance.ndim, reach) for reach in REACHES])  # CUDA records no copies
    fall = torch.where(distance > 0, (-distance / reaches).exp(), 0.0)

    def sums(values: Parts) -> Parts:
        """Sums over the other slices, each counted by its distance."""
        return window_sums(values, fall) if is_long(layout.longest, values.device) else values @ fall

    reached = sums(layout.mask.to(a.dtype).expand(len(REACHES), -1, -1)).movedim(0, 1)
    given_out = a[:, :, None] / reached[:, None].clamp_min(torch.finfo(a.dtype).tiny)
    given_out = given_out.masked_fill((reached == 0)[:, None], 0)
    parts = sums(given_out.movedim(2, 0).flatten(1, 2)).movedim(0, 1).reshape(*a.shape[:2], len(REACHES), -1)
    parts = parts * layout.mask[:, None, None].to(a.dtype)
    weights = torch.full_like(parts[..., :1], 1 / len(REACHES))
    for _ in range(STEPS):
        joint = weights * parts
        share = joint / joint.sum(2, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
        weights = (share * a[:, :, None]).sum(-1, keepdim=True)
        weights = weights / weights.sum(2, keepdim=True).clamp_min(torch.finfo(a.dtype).tiny)
    return (weights * parts).sum(2)


REGULARIZER = Regularizer(
    "distance", "Distance Prior", DistancePrior, "Attention falls with distance as it does in the bag (PSA)."
)
