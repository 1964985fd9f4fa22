"""Smoothness along the chain of slices: neighbours should have similar attention."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.attention_term import AttentionTerm, Given, Regularizer
from normal_guidance.core.bells import Padded
from normal_guidance.core.layout import Layout


class Smoothness(AttentionTerm):
    r"""The chain's Laplacian form, $\frac{1}{S} f^\top L f = \frac{1}{S} \sum_j (f_j - f_{j+1})^2$, of the scores."""

    # Log-attention differs from the scores by a constant per bag, which the Laplacian removes.  Reference: Wu et al.,
    # "Smooth Attention for Deep Multiple Instance Learning: Application to CT Intracranial Hemorrhage Detection", 2023.

    in_order = True

    def values(self, log_a: Padded, layout: Layout, given: Given) -> Float[Tensor, "bags heads"]:
        return chain_energy(log_a, layout)


def chain_energy(scores: Padded, layout: Layout) -> Float[Tensor, "bags heads"]:
    """The mean over a bag's slices of the squared step to the next slice; the last has none."""
    inner = layout.mask[:, None, 1:]  # real slices come first
    steps = (scores[..., 1:] - scores[..., :-1]).masked_fill(~inner, 0)
    return steps.square().sum(-1) / layout.lengths[:, None].to(scores.dtype)


REGULARIZER = Regularizer(
    "smoothness", "Smoothness", Smoothness, "Neighbouring slices have similar attention (SA-DMIL)."
)
