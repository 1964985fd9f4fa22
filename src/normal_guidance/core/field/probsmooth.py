"""Probabilistic smooth attention: the scores are random, with a prior that makes neighbours alike."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor, nn

from normal_guidance.core.arrays import PerBag
from normal_guidance.core.layers import linear
from normal_guidance.core.layout import Layout, as_rows
from normal_guidance.core.method import Method
from normal_guidance.core.prediction import (
    FEATURES,
    BagsLike,
    ClassWeights,
    Features,
    NoiseEpoch,
    Prediction,
    attend_and_classify,
    normal,
    scan_cross_entropy,
)
from normal_guidance.core.regularizers.smoothness import chain_energy

SAMPLES = 8  # random scores of a slice in a training step
MOST = 20.0  # random scores are kept within this number of 0, as in torchmil


class ProbSmooth(nn.Module):
    r"""ABMIL whose scores are normal, $f_j \sim \mathcal{N}(\mu_j, \sigma_j^2)$, under a prior of smoothness."""

    # Training classifies random attention and adds the divergence from the prior; prediction takes the mean scores.
    # Reference: Castro-Macías et al., "Probabilistic Smooth Attention for Deep Multiple Instance Learning in Medical
    # Imaging", 2025; without variance: Wu et al., 2023 (`core.regularizers.smoothness`).

    def __init__(self, features: int = FEATURES, hidden: int = 128) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.score = nn.Linear(hidden, 2)  # mu and log sigma^2
        self.classifier = nn.Linear(features, 1)
        self.epoch = NoiseEpoch()

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        inner = torch.tanh(linear(self.hidden, rows)).to(self.score.weight.dtype)
        mean, log_variance = linear(self.score, inner).unbind(1)
        evidence = rows @ self.classifier.weight[0].to(rows.dtype)
        prediction = attend_and_classify(mean, evidence, self.classifier.bias, layout)
        if torch.compiler.is_exporting():  # a deployed model has no loss
            return prediction
        random = mean + (log_variance / 2).exp() * normal(rows, self.epoch, SAMPLES).to(mean.dtype)
        attention = layout.log_softmax(layout.fold(random.clamp(-MOST, MOST))).exp()
        samples = (attention * layout.pad(evidence)[:, None]).sum(2) + self.classifier.bias
        extra = {"samples": samples, "divergence": _divergence(mean, log_variance, layout)}
        return prediction._replace(extra=extra)


def _divergence(
    mean: Float[Tensor, "rows"], log_variance: Float[Tensor, "rows"], layout: Layout
) -> Float[Tensor, "bags"]:
    r"""$\frac{1}{S} (\sum_j (\mu_j - \mu_{j+1})^2 + \sum_j (L_{jj} \sigma_j^2 - \log \sigma_j^2 / 2))$."""
    place = torch.arange(layout.longest, device=mean.device)
    neighbours = (place > 0).long() + (place + 1 < layout.lengths[:, None]).long()
    spread = layout.fold(log_variance)
    of_slices = torch.where(layout.mask, neighbours * spread.exp() - spread / 2, 0.0)
    size = layout.lengths.to(mean.dtype)
    return chain_energy(layout.fold(mean)[:, None], layout).squeeze(1) + of_slices.sum(1) / size


def probsmooth_loss(prediction: Prediction, labels: PerBag, class_weights: ClassWeights = None) -> Float[Tensor, ""]:
    """The mean cross-entropy under random attention, and the divergence from the prior."""
    assert prediction.extra is not None
    likelihood = scan_cross_entropy(prediction.extra["samples"], labels, class_weights)
    return likelihood + prediction.extra["divergence"].mean()


METHOD = Method("probsmooth", "ProbSmooth", ProbSmooth, loss=probsmooth_loss)
