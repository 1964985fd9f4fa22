"""The training loss: scan classification, sparsity of the weights, and guidance of attention."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.core.bags import UNKNOWN
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.layout import Layout
from normal_guidance.core.models import Prediction


def objective(
    prediction: Prediction,
    labels: Int[Tensor, "bags"] | Int[Tensor, "slices"],
    layout: Layout,
    parameters: Iterable[Tensor],
    *,
    l1: float = 0.0,
    guidance: NormalGuidance | None = None,
    on_slices: bool = False,
    class_weights: Float[Tensor, "two"] | None = None,
) -> Float[Tensor, ""]:
    r"""The loss behind the published numbers: $\mathrm{BCE} + \frac{\alpha}{2}\sum|\theta| + \lambda D(r, a)$.

    The sum runs over the given parameters: all trainable ones, biases, norms and class token included, except those
    that a method exempts (`Method.unpenalized`; no method of the paper does).  Labels are those of the scans, or with
    `on_slices` those of the slices, for a supervised reference.  `class_weights` are those of `balanced_weights`.

    Example:
        >>> from normal_guidance.core.models import build_model
        >>> model, layout = build_model("ng", 8), Layout.packed([3, 4])
        >>> prediction = model(torch.randn(7, 8), layout)
        >>> objective(prediction, torch.tensor([0, 1]), layout, model.parameters(), guidance=NormalGuidance()).shape
        torch.Size([])
    """
    loss = (slice_classification if on_slices else classification)(prediction, labels, class_weights)
    loss = loss + 0.5 * l1 * torch.stack([parameter.abs().sum() for parameter in parameters]).sum()
    if guidance is not None:
        of_scans = None if on_slices else labels
        loss = loss + guidance(prediction.log_attention, lengths=layout, from_logits=True, labels=of_scans)
    return loss


def balanced_weights(labels: Int[Tensor, "targets"]) -> Float[Tensor, "two"]:
    """Weights of negative and positive targets, inverse to their number; the mean over all with a known label is 1.

    Example:
        >>> balanced_weights(torch.tensor([0, 0, 0, 1, UNKNOWN]))  # 4 / (2 * 3) and 4 / (2 * 1)
        tensor([0.6667, 2.0000], dtype=torch.float64)
    """
    counts = torch.stack([(labels == 0).sum(), (labels == 1).sum()]).double()
    return counts.sum() / (2.0 * counts.clamp_min(1.0))  # a sample for an estimate may lack a class


def _weight_of(labels: Tensor, class_weights: Tensor | None) -> Tensor | None:
    return None if class_weights is None else torch.where(labels == 1, class_weights[1], class_weights[0])


def classification(
    prediction: Prediction, labels: Int[Tensor, "bags"], class_weights: Float[Tensor, "two"] | None = None
) -> Float[Tensor, ""]:
    """Binary cross-entropy of the scan labels, each weighted by its class, the mean over the batch."""
    weight = _weight_of(labels, class_weights)
    return F.binary_cross_entropy_with_logits(prediction.logit, labels.to(prediction.logit.dtype), weight)


def slice_classification(
    prediction: Prediction,
    slice_labels: Int[Tensor, "slices"] | Int[Tensor, "bags longest"],
    class_weights: Float[Tensor, "two"] | None = None,
) -> Float[Tensor, ""]:
    """`classification` of the slice labels, the mean over the slices of the batch whose label is not `UNKNOWN`.

    Example:
        >>> logits = torch.tensor([0.0, 2.0, -7.0])
        >>> prediction = Prediction(torch.zeros(1), logits.sigmoid(), logits[None])
        >>> slice_classification(prediction, torch.tensor([1, 0, UNKNOWN]))  # (log 2 + log(1 + e^2)) / 2
        tensor(1.4100)
    """
    logits, known = prediction.slice_scores, slice_labels != UNKNOWN
    weight = _weight_of(slice_labels, class_weights)
    each = F.binary_cross_entropy_with_logits(logits, (slice_labels == 1).to(logits.dtype), weight, reduction="none")
    return torch.where(known, each, 0).sum() / known.sum().clamp_min(1)
