"""What every model takes and returns: bags in any form, and a logit with attention over the slices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from normal_guidance.core.arrays import PerBag
from normal_guidance.core.bags import UNKNOWN
from normal_guidance.core.layout import Layout

PerRow = Float[Tensor, "rows"]

FEATURES = 768  # M, the width of the paper's embeddings (ViT-B/16)

Features = Float[Tensor, "slices features"] | Float[Tensor, "bags longest features"]
BagsLike = Layout | PerBag | Bool[Tensor, "bags longest"] | Sequence[int]


class Prediction(NamedTuple):
    """The output of every model.

    Attributes:
        logit: one number per bag; NaN from a method without scan scores.
        attention: one number per slice, heads averaged: `(slices,)` packed or `(bags, longest)` padded, 0 in padding.
        log_attention: per head, `(heads, slices)` packed or `(bags, heads, longest)` padded, a very low number in
            padding.  Guidance and localization use it, since it does not underflow.
        extra: what a method's own loss needs beside the logit (`Method.loss`), one row per bag; most methods need none.
    """

    logit: Float[Tensor, "bags"]
    attention: Float[Tensor, "slices"] | Float[Tensor, "bags longest"]
    log_attention: Float[Tensor, "heads slices"] | Float[Tensor, "bags heads longest"]
    extra: Mapping[str, Tensor] | None = None

    @property
    def slice_scores(self) -> Float[Tensor, "slices"] | Float[Tensor, "bags longest"]:
        """The log of the heads' mean attention, which ranks slices like `attention` but does not underflow."""
        return torch.logsumexp(self.log_attention, dim=-2) - math.log(self.log_attention.shape[-2])

    def on_host(self) -> Prediction:
        """The same on the CPU, without gradients and without what only a loss needs."""
        return Prediction(self.logit.detach().cpu(), self.attention.detach().cpu(), self.log_attention.detach().cpu())


def as_prediction(
    logit: Tensor, log_a: Float[Tensor, "bags heads longest"], layout: Layout, extra: Mapping[str, Tensor] | None = None
) -> Prediction:
    """The prediction of padded log-attention, in the caller's form."""
    return Prediction(logit, layout.restore(log_a.exp().mean(1)), layout.restore(log_a), extra)


def attend_and_classify(scores: PerRow, evidence: PerRow, bias: Float[Tensor, "1"], layout: Layout) -> Prediction:
    """Classify slices, then pool them, which equals pooling first: logit = sum_j a_j (w . h_j) + c."""
    return classify(layout.log_softmax(layout.fold(scores)), evidence, bias, layout)


def classify(
    log_a: Float[Tensor, "bags longest"], evidence: PerRow, bias: Float[Tensor, "1"], layout: Layout
) -> Prediction:
    """`attend_and_classify` with finished log-attention."""
    logit = (log_a.exp() * layout.pad(evidence)).sum(1) + bias
    return as_prediction(logit, log_a[:, None], layout)


ClassWeights = Float[Tensor, "two"] | None
"""The weight of a negative and a positive target (`sweep.stack.balanced_weights`); None: all count alike."""


def scan_cross_entropy(
    logits: Float[Tensor, "bags *more"], labels: PerBag, class_weights: ClassWeights = None
) -> Float[Tensor, ""]:
    """Binary cross-entropy of one or several logits per scan, each weighted by its scan's class, the mean of all."""
    column = labels.reshape(-1, *[1] * (logits.ndim - 1))
    weight = _weight_of(column, class_weights)
    return F.binary_cross_entropy_with_logits(logits, column.to(logits.dtype).expand_as(logits), weight)


def classification(prediction: Prediction, labels: PerBag, class_weights: ClassWeights = None) -> Float[Tensor, ""]:
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


# Random numbers that depend on a slice's embedding and the epoch alone: a generator would give other numbers in every
# engine, which batch, pad and stack differently, and a resumed training would have to restore its state.

COLUMNS = 4  # features whose bits tell slices apart
BITS = 0xFFFFFFFF  # numbers are kept to 32 bits, so that a product of two fits into 64


class NoiseEpoch(nn.Module):
    """The number of the epoch in training, as a buffer that compiled code and recorded graphs read."""

    number: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("number", torch.zeros((), dtype=torch.int64), persistent=False)


def set_epoch(model: nn.Module, number: int) -> None:
    """Tell a model which epoch begins; only models that draw random numbers ask for it."""
    for module in model.modules():
        if isinstance(module, NoiseEpoch):
            module.number.fill_(number)


def uniform(rows: Float[Tensor, "rows features"], epoch: NoiseEpoch, count: int) -> Float[Tensor, "count rows"]:
    """Numbers in (0, 1) for every row."""
    bits = rows.detach()[:, :COLUMNS].float().contiguous().view(torch.int32).to(torch.int64) & BITS
    state = _mixed(epoch.number + 1)
    for column in bits.unbind(1):
        state = _mixed(state ^ column)
    # A constant for each number: of an arange, the compiler would make 32 bits on CUDA, too few for the product.
    series = torch.stack([_mixed(state ^ (number * 0x9E3779B9 & BITS)) for number in range(1, count + 1)])
    return (series.to(torch.float64) + 0.5).div(BITS + 1.0).float()


def normal(rows: Float[Tensor, "rows features"], epoch: NoiseEpoch, count: int) -> Float[Tensor, "count rows"]:
    """Standard normal numbers for every row, by the transformation of Box and Muller."""
    radius, angle = uniform(rows, epoch, 2 * count).split(count)
    return (-2 * radius.clamp_min(torch.finfo(radius.dtype).tiny).log()).sqrt() * (2 * math.pi * angle).cos()


def _mixed(state: Int[Tensor, "*shape"]) -> Int[Tensor, "*shape"]:
    """The last steps of MurmurHash3, in which every bit changes every other with a probability of one half."""
    state = (state ^ (state >> 16)) * 0x85EBCA6B & BITS
    state = (state ^ (state >> 13)) * 0xC2B2AE35 & BITS
    return state ^ (state >> 16)


def attention_per_head(log_attention: Float[Tensor, "heads slices"]) -> Float[Tensor, "heads slices"]:
    """Attention that sums to one over the slices of one scan: TransMIL leaves a share to its class token."""
    return log_attention.softmax(dim=-1)
