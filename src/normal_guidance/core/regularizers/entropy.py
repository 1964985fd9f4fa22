"""Entropy maximisation: attention should not gather on few slices."""

from __future__ import annotations

from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.attention_term import AttentionTerm, Given, Regularizer
from normal_guidance.core.bells import Padded
from normal_guidance.core.layout import Layout


class EntropyMaximization(AttentionTerm):
    r"""Attention entropy maximisation, $\log S_i - \mathrm{H}(a_i) = \sum_j a_{ij} \log(S_i a_{ij})$."""

    # The constant makes the value 0 for uniform attention at any length.  Reference: Zhang et al., "AEM: Attention
    # Entropy Maximization for Multiple Instance Learning based Whole Slide Image Classification", 2024.

    def values(self, log_a: Padded, layout: Layout, given: Given) -> Float[Tensor, "bags heads"]:
        # Not the padding's lowest number: its product with a large weight would overflow, and the gradient be NaN.
        finite = log_a.masked_fill(~layout.mask[:, None], 0)
        return (log_a.exp() * finite).sum(-1) + layout.lengths[:, None].to(log_a.dtype).log()


REGULARIZER = Regularizer(
    "entropy", "Entropy Maximisation", EntropyMaximization, "Attention spreads over many slices (AEM)."
)
