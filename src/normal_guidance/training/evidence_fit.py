r"""Fits members of a committee (`training.committee`) that look for one kind of places, out of fold.

Attention and weights depend on each other, so they are found in turns.  Attention begins as the prior of the places.
A penalised logistic regression on each scan's features, pooled under its attention, gives weights; log-odds of the
scans that it has not seen say how much its evidence is worth (`fit_line`); evidence of that size gives new attention.

Every step uses scan labels of the training folds only.  The line of a fold is fitted to all other folds, whose
log-odds are out of fold themselves.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import product

import torch
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.layout import Layout
from normal_guidance.core.places import Places
from normal_guidance.statistics.platt import fit_line
from normal_guidance.training.committee import look
from normal_guidance.training.regression import fit_logistic

PASSES = 2
"""Turns of weights and attention; more change little, and cost scan AUROC where scans are few."""

SCANS_AT_ONCE = 256
"""Scans whose attention is computed together."""


@dataclass(frozen=True)
class Penalty:
    """How strongly a regression is held back.

    Args:
        kind: "ridge" for evidence spread over many inputs, "lasso" for few that matter.
        strength: 1 is usual for this number of scans and inputs.
    """

    kind: str
    strength: float

    def of(self, scans: int, inputs: int) -> tuple[float, float]:
        """Ridge and lasso of `fit_logistic`, for pooled features of variance 1.

        Ridge is what makes noise in all inputs together as large as the evidence, in the order of inputs / scans.
        Lasso is the largest slope that noise alone would have in any input.

        Example:
            >>> Penalty("ridge", 1.0).of(200, 100), Penalty("lasso", 1.0).of(200, 100)
            ((0.5, 0.0), (0.0, 0.1072...))
        """
        if self.kind == "ridge":
            return self.strength * inputs / scans, 0.0
        return 0.0, self.strength * 0.5 * math.sqrt(2.0 * math.log(max(2, inputs)) / scans)


@dataclass(frozen=True, eq=False)
class Fitted:
    """Members of one kind of places, one for each fold and penalty, and what they say of scans they have not seen."""

    weights: Float64[Tensor, "folds penalties inputs"]
    bias: Float64[Tensor, "folds penalties"]
    gain: Float64[Tensor, "folds penalties"]
    sharpness: Float64[Tensor, "folds penalties"]
    logits: Float64[Tensor, "penalties scans"]
    """Out of fold: by the members of the scan's own fold, which were not trained on it."""
    attention: Float[Tensor, "penalties slices"]
    """Out of fold."""


def fit_evidence(
    scans: Bags,
    folds: Int[Tensor, "scans"],
    places: Places,
    penalties: Sequence[Penalty],
    *,
    sharpness: float = 1.0,
    passes: int = PASSES,
) -> tuple[Fitted, ...]:
    """Fit one member for each fold and penalty; `scans` have scaled features.  Return the members of every pass.

    Args:
        folds: the fold of each scan, from 0.
        sharpness: attention sees so many times the evidence, less where evidence may be noise: a slope of scan
            log-odds that is one standard error above 0 counts as nothing.

    Example:
        >>> from normal_guidance.simulate.semi_synthetic import shifted_mean
        >>> scans, folds = shifted_mean(60, seed=1, features=4, shift=2.0), torch.arange(60) % 3
        >>> *_, found = fit_evidence(scans, folds, Places(4.0, central=False), [Penalty("ridge", 1.0)])
        >>> found.weights.shape, found.weights.mean((0, 1)).abs().argmax().item()  # the first feature has the signal
        (torch.Size([3, 1, 4]), 0)
    """
    count, inputs = int(folds.max()) + 1, scans.width
    weights = torch.zeros(count, len(penalties), inputs, dtype=torch.float64)
    bias, sharp = (torch.zeros(count, len(penalties), dtype=torch.float64) for _ in range(2))
    made = []
    for _ in range(passes):
        raw = torch.zeros(len(penalties), len(scans), dtype=torch.float64)
        for fold in range(count):
            own = folds == fold
            pooled = _pool(scans, places, weights[fold], sharp[fold])
            weights[fold], bias[fold] = _regress(pooled, scans.labels, ~own, penalties)
            raw[:, own] = (pooled[:, own] @ weights[fold][:, :, None])[:, :, 0] + bias[fold][:, None]
        for fold, number in product(range(count), range(len(penalties))):
            others = folds != fold
            line = fit_line(raw[number, others], scans.labels[others])
            sharp[fold, number] = sharpness * max(0.0, 1.0 - line.error / line.slope) if line.slope > 0.0 else 0.0
            weights[fold, number] *= max(0.0, line.slope)
        made.append(_out_of_fold(scans, folds, places, weights.clone(), sharp.clone()))
    return tuple(made)


def _regress(
    pooled: Float64[Tensor, "penalties scans inputs"],
    labels: Int[Tensor, "scans"],
    training: Bool[Tensor, "scans"],
    penalties: Sequence[Penalty],
) -> tuple[Float64[Tensor, "penalties inputs"], Float64[Tensor, "penalties"]]:
    rows = pooled[:, training]
    scale = rows.std(1).mean(1).clamp_min(1e-12)[:, None]
    middle = rows.mean(1)
    strengths = torch.tensor([one.of(int(training.sum()), pooled.shape[2]) for one in penalties], dtype=torch.float64)
    weights, bias = fit_logistic(
        (rows - middle[:, None]) / scale[:, None],
        labels[training],
        torch.ones(len(penalties), rows.shape[1], dtype=torch.bool),
        ridge=strengths[:, 0],
        lasso=strengths[:, 1],
    )
    weights = weights / scale
    return weights, bias - (weights * middle).sum(1)


def _pool(
    scans: Bags, places: Places, weights: Float64[Tensor, "penalties inputs"], sharpness: Float64[Tensor, "penalties"]
) -> Float64[Tensor, "penalties scans inputs"]:
    """The features of every scan, pooled under each member's attention."""
    pooled = []
    for batch in torch.arange(len(scans)).split(SCANS_AT_ONCE):
        rows, layout = scans.rows(batch), Layout.packed(scans.lengths[batch])
        log_a, _ = look(places, rows @ weights.T.to(rows.dtype), sharpness, layout)
        pooled.append(layout.pool(log_a.exp(), rows))
    return torch.cat(pooled).movedim(1, 0).double()


def _out_of_fold(
    scans: Bags,
    folds: Int[Tensor, "scans"],
    places: Places,
    weights: Float64[Tensor, "folds penalties inputs"],
    sharpness: Float64[Tensor, "folds penalties"],
) -> Fitted:
    """What the members say of the scans they have not seen; gain and bias make log-odds of their mean evidence."""
    raw = torch.zeros(weights.shape[1], len(scans), dtype=torch.float64)
    attention = torch.zeros(weights.shape[1], int(scans.lengths.sum()))
    starts = scans.lengths.cumsum(0) - scans.lengths
    for fold in range(len(weights)):
        for batch in (folds == fold).nonzero().flatten().split(SCANS_AT_ONCE):
            rows, layout = scans.rows(batch), Layout.packed(scans.lengths[batch])
            log_a, found = look(places, rows @ weights[fold].T.to(rows.dtype), sharpness[fold], layout)
            raw[:, batch] = found.T
            slices = [torch.arange(size) + start for size, start in zip(layout.lengths, starts[batch], strict=True)]
            attention[:, torch.cat(slices)] = layout.restore(log_a.exp()).float()
    gain, bias = torch.zeros_like(sharpness), torch.zeros_like(sharpness)
    logits = torch.zeros_like(raw)
    for fold, number in product(range(len(weights)), range(weights.shape[1])):
        own = folds == fold
        gain[fold, number], bias[fold, number] = _rising_line(raw[number, ~own], scans.labels[~own])
        logits[number, own] = gain[fold, number] * raw[number, own] + bias[fold, number]
    return Fitted(weights, bias, gain, sharpness, logits, attention)


def _rising_line(scores: Float64[Tensor, "scans"], labels: Int[Tensor, "scans"]) -> tuple[float, float]:
    """Slope and intercept; evidence that points the wrong way is not turned around, but counts as nothing."""
    line = fit_line(scores, labels)
    return (line.slope, line.intercept) if line.slope > 0.0 else (0.0, fit_line(0.0 * scores, labels).intercept)
