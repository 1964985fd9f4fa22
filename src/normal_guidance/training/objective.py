"""The training loss: classification, sparsity of the weights, and a regularizer of attention."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.core.attention_term import AttentionTerm
from normal_guidance.core.layout import Layout
from normal_guidance.core.losses import ClassWeights, classification, slice_classification
from normal_guidance.core.method import Loss
from normal_guidance.core.prediction import Features, Prediction


def objective(
    prediction: Prediction,
    labels: Int[Tensor, "bags"] | Int[Tensor, "slices"],
    layout: Layout,
    parameters: Iterable[Tensor],
    *,
    l1: float = 0.0,
    regularizer: AttentionTerm | None = None,
    features: Features | None = None,
    classify: Loss = classification,
    on_slices: bool = False,
    class_weights: ClassWeights = None,
) -> Float[Tensor, ""]:
    r"""The loss behind the published numbers: $\mathrm{BCE} + \frac{\alpha}{2}\sum|\theta| + \lambda D(r, a)$.

    The sum runs over the given parameters: all trainable ones, biases, norms and class token included, except those
    that a method exempts (`Method.unpenalized`; no method of the paper does).  `classify` is the method's own loss
    (`Method.loss`) in the place of BCE; `regularizer` may be any term on attention, some of which need `features`.
    Labels are those of the scans, or with `on_slices` those of the slices, for a supervised reference.
    `class_weights` are those of `balanced_weights`.
    """
    loss = (slice_classification if on_slices else classify)(prediction, labels, class_weights)
    loss = loss + 0.5 * l1 * torch.stack([parameter.abs().sum() for parameter in parameters]).sum()
    if regularizer is not None:
        of_scans = None if on_slices else labels
        attention = prediction.log_attention
        loss = loss + regularizer(attention, lengths=layout, from_logits=True, labels=of_scans, features=features)
    return loss


def balanced_weights(labels: Int[Tensor, "targets"]) -> Float[Tensor, "two"]:
    """Weights of negative and positive targets, inverse to their number; the mean over all with a known label is 1."""
    counts = torch.stack([(labels == 0).sum(), (labels == 1).sum()]).double()
    return counts.sum() / (2.0 * counts.clamp_min(1.0))  # a sample for an estimate may lack a class
