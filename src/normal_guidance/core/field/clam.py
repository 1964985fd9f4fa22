"""CLAM-SB: gated attention, with pseudo-labels for the slices that it attends most and least."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Float
from torch import Tensor, nn

from normal_guidance.core.arrays import PerBag
from normal_guidance.core.layers import GatedScores, linear
from normal_guidance.core.layout import Layout, as_rows
from normal_guidance.core.method import Method
from normal_guidance.core.prediction import (
    FEATURES,
    BagsLike,
    ClassWeights,
    Features,
    Prediction,
    attend_and_classify,
    scan_cross_entropy,
)

SLICES = 8  # B, the slices that are taken from either end of attention, as in the paper; at most half of a scan
SHARE = 0.7  # the share of the scan's loss; the rest is the slices'


class CLAM(nn.Module):
    """Clustering-constrained attention, single branch: gated ABMIL, and a classifier of slices for each class."""

    # The classifier of the scan's class learns that the B slices with most attention are evidence of it and the B with
    # least are not, the other one that those with most are not, by the smooth hinge log(1 + e^(1 - m)) of a margin m.
    # Reference: Lu et al., "Data-efficient and weakly supervised computational pathology on whole-slide images", 2021.

    def __init__(self, features: int = FEATURES, hidden: int = 128) -> None:
        super().__init__()
        self.attention = GatedScores(features, hidden)
        self.instances = nn.Linear(features, 4)  # outside and inside, of the negative and of the positive class
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        scores = self.attention(rows)[0]
        evidence = rows @ self.classifier.weight[0].to(rows.dtype)
        prediction = attend_and_classify(scores, evidence, self.classifier.bias, layout)
        if torch.compiler.is_exporting():  # a deployed model has no loss
            return prediction
        of_slices = linear(self.instances, rows).to(scores.dtype)
        margin = layout.fold((of_slices[:, 1::2] - of_slices[:, ::2]).mT)  # (bags, classes, longest)
        most, least = (_taken(margin, layout, layout.fold(sign * scores)) for sign in (1, -1))
        own = (_mean(F.softplus(1 - most), layout) + _mean(F.softplus(1 + least), layout)) / 2
        return prediction._replace(extra={"own": own, "other": _mean(F.softplus(1 + most), layout)})


def _taken(
    margin: Float[Tensor, "bags classes longest"], layout: Layout, scores: Float[Tensor, "bags longest"]
) -> Float[Tensor, "bags classes taken"]:
    """The margins of the slices with the highest scores, highest first."""
    chosen = layout.hide(scores.detach()).topk(min(SLICES, layout.longest)).indices
    return margin.gather(2, chosen[:, None].expand(-1, margin.shape[1], -1))


def _mean(values: Float[Tensor, "bags classes taken"], layout: Layout) -> Float[Tensor, "bags classes"]:
    """The mean over the slices that count: at most half of the scan's, and none of a single slice."""
    count = (layout.lengths[:, None, None] // 2).clamp_max(SLICES)
    counted = torch.arange(values.shape[2], device=values.device) < count
    return torch.where(counted, values, 0.0).sum(2) / count.squeeze(2).clamp_min(1)


def clam_loss(prediction: Prediction, labels: PerBag, class_weights: ClassWeights = None) -> Float[Tensor, ""]:
    """The scan's cross-entropy and the slices' loss, weighted .7 and .3 as in the paper."""
    assert prediction.extra is not None
    own, other = (prediction.extra[name] for name in ("own", "other"))
    positive = labels[:, None] == 1
    of_slices = torch.where(positive, own[:, 1:] + other[:, :1], own[:, :1] + other[:, 1:]).mean()
    return SHARE * scan_cross_entropy(prediction.logit, labels, class_weights) + (1 - SHARE) * of_slices


METHOD = Method("clam", "CLAM-SB", CLAM, loss=clam_loss)
