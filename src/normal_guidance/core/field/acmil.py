"""ACMIL: several branches of attention that must differ, trained with their best slices hidden at random."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normal_guidance.core.arrays import PerBag
from normal_guidance.core.layers import GatedScores
from normal_guidance.core.layout import Layout, as_rows
from normal_guidance.core.method import Method
from normal_guidance.core.prediction import (
    FEATURES,
    BagsLike,
    ClassWeights,
    Features,
    NoiseEpoch,
    Prediction,
    as_prediction,
    scan_cross_entropy,
    uniform,
)

BRANCHES = 5  # branches of attention, as in the paper

TOP = 10
"""One slice in so many may be hidden.  The paper hides among the 10 best of some 10,000 patches; that is half of a
short scan."""

HIDDEN = 0.6  # the probability that such a slice is hidden in a training step, as in the paper


class ACMIL(nn.Module):
    """Attention-challenging MIL: the mean of the branches' attention classifies the scan, and so does each branch."""

    # In training, each branch loses a random part of its best slices, so that it must find others, and similar branches
    # are penalised.  Prediction hides nothing.  Reference: Zhang et al., "Attention-Challenging Multiple Instance
    # Learning for Whole Slide Image Classification", 2024.

    def __init__(self, features: int = FEATURES, hidden: int = 128, branches: int = BRANCHES) -> None:
        super().__init__()
        self.attention = GatedScores(features, hidden, branches)
        self.branches = nn.Linear(features, branches)
        self.classifier = nn.Linear(features, 1)
        self.epoch = NoiseEpoch()

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        weights = torch.cat([self.classifier.weight, self.branches.weight])
        evidence = layout.pad((rows @ weights.to(rows.dtype).mT).to(weights.dtype).mT)
        of_scan, of_branches = evidence[:, :1], evidence[:, 1:]
        scores = layout.hide(layout.fold(self.attention(rows)))
        log_a = layout.log_softmax(scores)
        logit = (log_a.exp().mean(1, keepdim=True) * of_scan).sum(2).squeeze(1) + self.classifier.bias
        if torch.compiler.is_exporting():  # a deployed model has no loss
            return as_prediction(logit, log_a, layout)
        chance = layout.fold(uniform(rows, self.epoch, scores.shape[1]))
        hidden = _best(scores.detach(), layout) & (chance < HIDDEN)
        masked = layout.log_softmax(scores.masked_fill(hidden, torch.finfo(scores.dtype).min / 2)).exp()
        # The mean cosine between the attention of two branches: every pair twice, and each branch with itself.
        together = F.normalize(log_a.exp(), dim=-1).sum(1).square().sum(-1)
        branches = scores.shape[1]
        similarity = (together - branches) / (branches * (branches - 1))
        extra = {
            "scan": (masked.mean(1, keepdim=True) * of_scan).sum(2).squeeze(1) + self.classifier.bias,
            "branches": (masked * of_branches).sum(2) + self.branches.bias,
            "similarity": similarity,
        }
        return as_prediction(logit, log_a, layout, extra)


def _best(scores: Float[Tensor, "bags branches longest"], layout: Layout) -> Bool[Tensor, "bags branches longest"]:
    """The slices with the highest scores of each branch, one in `TOP` and at least one, but never the only one."""
    count = ((layout.lengths + TOP - 1) // TOP).minimum(layout.lengths - 1)
    highest = scores.sort(-1, descending=True).values
    last = highest.gather(-1, (count - 1).clamp_min(0)[:, None, None].expand(-1, scores.shape[1], 1))
    return (scores >= last) & (count > 0)[:, None, None] & layout.mask[:, None]


def acmil_loss(prediction: Prediction, labels: PerBag, class_weights: ClassWeights = None) -> Float[Tensor, ""]:
    """Cross-entropy of the scan and of its branches, both with hidden slices, and the branches' similarity."""
    assert prediction.extra is not None
    extra = prediction.extra
    of_scan, of_branches = (scan_cross_entropy(extra[name], labels, class_weights) for name in ("scan", "branches"))
    return of_scan + of_branches + extra["similarity"].mean()


METHOD = Method("acmil", "ACMIL", ACMIL, loss=acmil_loss)
