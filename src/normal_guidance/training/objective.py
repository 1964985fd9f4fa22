"""What is minimised: scan classification, sparsity of the weights, and guidance of attention."""

from __future__ import annotations

from collections.abc import Iterable

import torch
import torch.nn.functional as F
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.layout import Layout
from normal_guidance.core.models import Prediction


def objective(
    prediction: Prediction,
    labels: Int[Tensor, "bags"],
    layout: Layout,
    parameters: Iterable[Tensor],
    *,
    l1: float = 0.0,
    guidance: NormalGuidance | None = None,
) -> Float[Tensor, ""]:
    r"""The loss behind the published numbers: $\mathrm{BCE} + \frac{\alpha}{2}\sum|\theta| + \lambda D(r, a)$.

    The sum runs over all trainable parameters, biases, norms and class token included.  Slice labels cannot enter.

    Example:
        >>> from normal_guidance.core.models import build_model
        >>> model, layout = build_model("ng", 8), Layout.packed([3, 4])
        >>> prediction = model(torch.randn(7, 8), layout)
        >>> objective(prediction, torch.tensor([0, 1]), layout, model.parameters(), guidance=NormalGuidance()).shape
        torch.Size([])
    """
    loss = classification(prediction, labels)
    loss = loss + 0.5 * l1 * torch.stack([parameter.abs().sum() for parameter in parameters]).sum()
    if guidance is not None:
        loss = loss + guidance(prediction.log_attention, lengths=layout, from_logits=True)
    return loss


def classification(prediction: Prediction, labels: Int[Tensor, "bags"]) -> Float[Tensor, ""]:
    """Binary cross-entropy of the scans' labels, the mean over the batch."""
    return F.binary_cross_entropy_with_logits(prediction.logit, labels.to(prediction.logit.dtype))
