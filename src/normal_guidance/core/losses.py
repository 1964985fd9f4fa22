"""The loss of classification: cross-entropy of scan labels or slice labels, weighted by class if asked."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.core.bags import UNKNOWN
from normal_guidance.core.prediction import Prediction

ClassWeights = Float[Tensor, "two"] | None
"""The weight of a negative and a positive target (`training.objective.balanced_weights`); None: all count alike."""


def scan_cross_entropy(
    logits: Float[Tensor, "bags *more"], labels: Int[Tensor, "bags"], class_weights: ClassWeights = None
) -> Float[Tensor, ""]:
    """Binary cross-entropy of one or several logits per scan, each weighted by its scan's class, the mean of all."""
    column = labels.reshape(-1, *[1] * (logits.ndim - 1))
    weight = _weight_of(column, class_weights)
    return F.binary_cross_entropy_with_logits(logits, column.to(logits.dtype).expand_as(logits), weight)


def classification(
    prediction: Prediction, labels: Int[Tensor, "bags"], class_weights: ClassWeights = None
) -> Float[Tensor, ""]:
    """`scan_cross_entropy` of the prediction's logit: the loss of every method without a loss of its own."""
    return scan_cross_entropy(prediction.logit, labels, class_weights)


def slice_classification(
    prediction: Prediction,
    slice_labels: Int[Tensor, "slices"] | Int[Tensor, "bags longest"],
    class_weights: ClassWeights = None,
) -> Float[Tensor, ""]:
    """Cross-entropy of the slice labels, the mean over the slices of the batch whose label is not `UNKNOWN`."""
    logits, known = prediction.slice_scores, slice_labels != UNKNOWN
    weight = _weight_of(slice_labels, class_weights)
    each = F.binary_cross_entropy_with_logits(logits, (slice_labels == 1).to(logits.dtype), weight, reduction="none")
    return torch.where(known, each, 0).sum() / known.sum().clamp_min(1)


def _weight_of(labels: Tensor, class_weights: ClassWeights) -> Tensor | None:
    return None if class_weights is None else torch.where(labels == 1, class_weights[1], class_weights[0])
