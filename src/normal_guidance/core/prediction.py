"""What every model takes and returns: bags in any form, and a logit with attention over the slices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from normal_guidance.core.layout import Layout

FEATURES = 768
"""M, the width of the paper's embeddings (ViT-B/16)."""

Features = Float[Tensor, "slices features"] | Float[Tensor, "bags longest features"]
BagsLike = Layout | Int[Tensor, "bags"] | Bool[Tensor, "bags longest"] | Sequence[int]


class Prediction(NamedTuple):
    """The output of every model.

    Attributes:
        logit: one number per bag; NaN from a method without scan scores.
        attention: one number per slice, heads averaged: `(slices,)` packed or `(bags, longest)` padded, 0 in padding.
        log_attention: per head, `(heads, slices)` packed or `(bags, heads, longest)` padded, a very low number in
            padding.  Guidance and localization use it, since it does not underflow.
        extra: what a method's own loss needs beside the logit (`Method.loss`), one row per bag; most methods need none.
    """

    logit: Float[Tensor, "bags"]
    attention: Float[Tensor, "slices"] | Float[Tensor, "bags longest"]
    log_attention: Float[Tensor, "heads slices"] | Float[Tensor, "bags heads longest"]
    extra: Mapping[str, Tensor] | None = None

    @property
    def slice_scores(self) -> Float[Tensor, "slices"] | Float[Tensor, "bags longest"]:
        """The log of the heads' mean attention, which ranks slices like `attention` but does not underflow."""
        return torch.logsumexp(self.log_attention, dim=-2) - math.log(self.log_attention.shape[-2])

    def on_host(self) -> Prediction:
        """The same on the CPU, without gradients and without what only a loss needs."""
        return Prediction(self.logit.detach().cpu(), self.attention.detach().cpu(), self.log_attention.detach().cpu())


def as_prediction(
    logit: Tensor,
    log_a: Float[Tensor, "bags heads longest"],
    layout: Layout,
    extra: Mapping[str, Tensor] | None = None,
) -> Prediction:
    """The prediction of padded log-attention, in the caller's form."""
    return Prediction(logit, layout.restore(log_a.exp().mean(1)), layout.restore(log_a), extra)


def attend_and_classify(
    scores: Float[Tensor, "rows"], evidence: Float[Tensor, "rows"], bias: Float[Tensor, "1"], layout: Layout
) -> Prediction:
    """Classify slices, then pool them, which equals pooling first: logit = sum_j a_j (w . h_j) + c."""
    return classify(layout.log_softmax(layout.fold(scores)), evidence, bias, layout)


def classify(
    log_a: Float[Tensor, "bags longest"], evidence: Float[Tensor, "rows"], bias: Float[Tensor, "1"], layout: Layout
) -> Prediction:
    """`attend_and_classify` with finished log-attention."""
    logit = (log_a.exp() * layout.pad(evidence)).sum(1) + bias
    return as_prediction(logit, log_a[:, None], layout)
