"""DSMIL: a classifier of slices, and attention to the slice that it finds most positive."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normal_guidance.core.arrays import PerBag
from normal_guidance.core.layers import linear
from normal_guidance.core.layout import as_rows
from normal_guidance.core.method import Method
from normal_guidance.core.prediction import (
    FEATURES,
    BagsLike,
    ClassWeights,
    Features,
    Prediction,
    classify,
    scan_cross_entropy,
)


class DSMIL(nn.Module):
    """Dual-stream MIL: the critical slice m has the highest score of a linear classifier, and all attend to it."""

    # a = softmax_j(q_j . q_m / sqrt(d)) with q = W h + b; the logit is the mean of both streams'.  Reference: Li, Li,
    # Eliceiri, "Dual-stream Multiple Instance Learning Network for Whole Slide Image Classification with
    # Self-supervised Contrastive Learning", 2021.

    def __init__(self, features: int = FEATURES, hidden: int = 128) -> None:
        super().__init__()
        self.query = nn.Linear(features, hidden)
        self.instance = nn.Linear(features, 1)
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        weights = torch.cat([self.instance.weight, self.classifier.weight]).to(rows.dtype)
        of_slice, evidence = (rows @ weights.mT).unbind(1)
        critical, place = layout.hide(layout.fold(of_slice)).max(1)
        queries = linear(self.query, rows)
        is_critical = torch.arange(layout.longest, device=rows.device) == place[:, None]
        query = layout.pool(is_critical[:, None].to(queries.dtype), queries)
        scores = layout.dot(query.contiguous(), queries).squeeze(1).to(self.query.weight.dtype)
        log_a = layout.log_softmax(scores * self.query.out_features**-0.5)
        prediction = classify(log_a, evidence, self.classifier.bias, layout)
        critical = critical + self.instance.bias
        extra = {"bag": prediction.logit, "critical": critical}
        return prediction._replace(logit=(prediction.logit + critical) / 2, extra=extra)


def dsmil_loss(prediction: Prediction, labels: PerBag, class_weights: ClassWeights = None) -> Float[Tensor, ""]:
    """The mean of both streams' cross-entropy."""
    assert prediction.extra is not None
    return scan_cross_entropy(torch.stack([*prediction.extra.values()], 1), labels, class_weights)


METHOD = Method("dsmil", "DSMIL", DSMIL, loss=dsmil_loss)
