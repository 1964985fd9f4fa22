"""MAD-MIL: several heads of gated attention, each on its own part of the features."""

from __future__ import annotations

import torch
from torch import nn

from normal_guidance.core.layers import GatedScores
from normal_guidance.core.layout import as_rows
from normal_guidance.core.method import Method
from normal_guidance.core.prediction import FEATURES, BagsLike, Features, Prediction, as_prediction

HEADS = 4


class MADMIL(nn.Module):
    """Multi-head attention-based deep MIL: head k sees part k of the features, and pools it by its own attention."""

    # Reference: Keshvarikhojasteh, Pluim, Veta, "Multi-head Attention-based Deep Multiple Instance Learning", 2024.

    def __init__(self, features: int = FEATURES, hidden: int = 128, heads: int = HEADS) -> None:
        super().__init__()
        widths = [len(part) for part in torch.arange(features).tensor_split(min(heads, features))]
        self.widths = widths
        self.heads = nn.ModuleList([GatedScores(width, hidden) for width in widths])
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        parts = rows.split(self.widths, dim=1)
        scores = torch.cat([head(part) for head, part in zip(self.heads, parts, strict=True)])
        weights = self.classifier.weight[0].to(rows.dtype).split(self.widths)
        evidence = torch.stack([part @ weight for part, weight in zip(parts, weights, strict=True)])
        log_a = layout.log_softmax(layout.fold(scores))
        logit = (log_a.exp() * layout.pad(evidence)).sum((1, 2)) + self.classifier.bias
        return as_prediction(logit, log_a, layout)


METHOD = Method("madmil", "MAD-MIL", MADMIL)
