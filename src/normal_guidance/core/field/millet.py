"""MILLET's conjunctive pooling: each slice is classified and weighted on its own, and the products are averaged."""

from __future__ import annotations

import torch
from torch import nn

from normal_guidance.core.layers import hidden_scores
from normal_guidance.core.layout import as_rows
from normal_guidance.core.method import Method
from normal_guidance.core.prediction import FEATURES, BagsLike, Features, Prediction, as_prediction

HIDDEN = 8  # hidden units of attention, as in the paper


class Millet(nn.Module):
    r"""Conjunctive pooling, the mean of $g_j (w^\top h_j + c)$ with $g_j = \sigma(v^\top \tanh(V h_j + b) + d)$."""

    # The products are the paper's interpretation of a slice.  `attention` is their softmax: it ranks slices alike, and
    # sums to one.  Reference: Early et al., "Inherently Interpretable Time Series Classification via Multiple Instance
    # Learning", 2024.

    def __init__(self, features: int = FEATURES, hidden: int = HIDDEN) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.score = nn.Linear(hidden, 1)
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        scores = hidden_scores(self.hidden, self.score.weight[0], rows, layout) + self.score.bias
        evidence = rows @ self.classifier.weight[0].to(rows.dtype) + self.classifier.bias
        products = torch.sigmoid(scores) * evidence
        logit = layout.pad(products).sum(1) / layout.lengths.to(products.dtype)
        log_a = layout.log_softmax(layout.fold(products))
        return as_prediction(logit, log_a[:, None], layout)


METHOD = Method("millet", "MILLET", Millet)
