r"""Fits members of a committee (`training.committee`) that look for one kind of places, out of fold.

Attention and weights depend on each other, so they are found in turns.  Attention begins as the prior of the places.
A penalised logistic regression on each scan's features, pooled under its attention, gives weights.  Scans that it has
not seen say how much its evidence is worth (`fit_sharpness`); evidence of that size gives new attention.

Every step uses scan labels of the training folds only.  What a fold's evidence is worth is found on all other folds,
whose evidence is out of fold itself.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, fields

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.layout import Layout
from normal_guidance.core.places import Places
from normal_guidance.statistics.platt import Lines, fit_lines
from normal_guidance.training.committee import look
from normal_guidance.training.regression import fit_logistic

TURNS = 3
"""Turns of weights and attention; more change little."""

FACTORS = 2.0 ** torch.arange(-3.0, 4.5, 0.5, dtype=torch.float64)
"""Sizes of evidence that are tried: standard deviations of a window's log-odds, the mean of all scans' windows."""

BIAS_STEPS = 8
"""Newton's steps to the best bias; five suffice where log-odds are moderate."""

MOST_POOLED = 50_000_000
"""Numbers of pooled features that are in memory together, but for one fold's at least."""

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

    def to(self, device: torch.device | str) -> Fitted:
        """The same on another device."""
        return Fitted(*(getattr(self, field.name).to(device) for field in fields(self)))


def fit_evidence(
    scans: Bags,
    folds: Int[Tensor, "scans"],
    places: Places,
    penalties: Sequence[Penalty],
    *,
    sharpness: float = 1.0,
    turns: int = TURNS,
    before: Fitted | None = None,
) -> tuple[Fitted, ...]:
    """Fit one member for each fold and penalty; `scans` have scaled features.  Return the members of every turn.

    Args:
        folds: the fold of each scan, from 0.
        sharpness: with several places, attention sees so many times the log-odds.
        before: the turn before; without it, attention begins as the prior.

    Example:
        >>> from normal_guidance.simulate.semi_synthetic import shifted_mean
        >>> scans, folds = shifted_mean(60, seed=1, features=4, shift=2.0), torch.arange(60) % 3
        >>> *_, found = fit_evidence(scans, folds, Places(6.0, central=False), [Penalty("ridge", 1.0)])
        >>> found.weights.shape, found.weights.mean((0, 1)).abs().argmax().item()  # the first feature has the signal
        (torch.Size([3, 1, 4]), 0)
    """
    count, device = int(folds.max()) + 1, scans.features.device
    folds = folds.to(device)
    training = folds != torch.arange(count, device=device)[:, None]
    everywhere = Layout.packed(scans.lengths)
    last, made = None if before is None else before.to(device), []
    for _ in range(turns):
        weights, raw = _regress(scans, training, places, penalties, last)
        if places.several:
            scale, certain = fit_slopes(raw, scans.labels, training)
            last = _out_of_fold(scans, folds, places, scale[:, :, None] * weights, sharpness * certain)
            made.append(last.to("cpu"))
            continue
        windows = torch.zeros(len(scans), len(penalties), everywhere.longest, dtype=torch.float64, device=device)
        for fold, batch, rows, layout in _held_out(scans, folds):
            found = places.windows(layout.pad((rows @ weights[fold].T.to(rows.dtype)).T), layout)
            windows[batch, :, : layout.longest] = found
        scale, certain = fit_sharpness(places, windows, everywhere, scans.labels, training)
        last = _out_of_fold(scans, folds, places, scale[:, :, None] * weights, certain)
        made.append(last.to("cpu"))
    return tuple(made)


def fit_slopes(
    raw: Float64[Tensor, "penalties scans"], labels: Int[Tensor, "scans"], training: Bool[Tensor, "folds scans"]
) -> tuple[Float64[Tensor, "folds penalties"], Float64[Tensor, "folds penalties"]]:
    """What evidence must be multiplied by to be log-odds of the scan, and how much of that is certain."""
    lines = _lines(raw, labels, training)
    slope = lines.slope.clamp_min(0.0)
    certain = torch.where(slope > 0.0, 1.0 - lines.error / slope, 0.0).clamp_min(0.0)
    return slope.view(len(training), -1), certain.view(len(training), -1)


def _lines(
    raw: Float64[Tensor, "penalties scans"], labels: Int[Tensor, "scans"], training: Bool[Tensor, "folds scans"]
) -> Lines:
    """The lines of all folds and penalties, each fitted to the fold's training scans."""
    folds, penalties = len(training), len(raw)
    return fit_lines(raw.repeat(folds, 1), labels, training.repeat_interleave(penalties, 0))


def fit_sharpness(
    places: Places,
    windows: Float64[Tensor, "scans penalties longest"],
    layout: Layout,
    labels: Int[Tensor, "scans"],
    training: Bool[Tensor, "folds scans"],
) -> tuple[Float64[Tensor, "folds penalties"], Float64[Tensor, "folds penalties"]]:
    """What evidence must be multiplied by to be log-odds, and how much of that is certain.

    The factor is the most probable one for the training scans' labels.  The smallest factor that is at most half a
    unit of log-likelihood worse, which is one standard error, is certain; 0 is where no evidence is as probable.

    Args:
        windows: evidence of the windows, in any unit and out of fold.

    Example:
        >>> labels, layout = torch.arange(100) % 2, Layout.packed([4] * 100)
        >>> windows = torch.zeros(100, 1, 4).double()
        >>> windows[:, 0, 2] = 0.01 * (labels - 0.5)
        >>> every = torch.ones(1, 100, dtype=torch.bool)
        >>> scale, sharpness = fit_sharpness(Places(0.0, central=False), windows, layout, labels, every)
        >>> scale.item() > 500, round(sharpness.item(), 2)
        (True, 0.5)
        >>> fit_sharpness(Places(0.0, central=False), windows, layout, labels.roll(50) // 2, every)[1].item()
        0.0
    """
    unit = windows.square().sum((0, 2)).div(layout.lengths.sum()).sqrt().clamp_min(1e-300)  # of each penalty
    factors = FACTORS.to(unit.device) / unit[:, None]
    odds = torch.stack([places.log_odds(one[:, None] * windows, layout) for one in factors.T], 2)
    odds = torch.cat([torch.zeros_like(odds[:, :, :1]), odds], 2)  # no evidence
    loss = _loss_with_best_bias(odds, labels, training)
    best, place = loss[:, :, 1:].min(2)
    certain = (loss <= best[:, :, None] + 0.5).double().argmax(2)
    all_factors = torch.cat([torch.zeros_like(unit)[:, None], factors], 1).expand(len(training), -1, -1)
    scale = all_factors.gather(2, place[:, :, None] + 1)[:, :, 0]
    return scale, all_factors.gather(2, certain[:, :, None])[:, :, 0] / scale


def _loss_with_best_bias(
    odds: Float64[Tensor, "scans penalties factors"],
    labels: Int[Tensor, "scans"],
    training: Bool[Tensor, "folds scans"],
) -> Float64[Tensor, "folds penalties factors"]:
    """The log loss of all training scans together, with the bias that makes it least, by Newton's method."""
    chosen, targets = training.double(), labels.double()
    total, positive = chosen.sum(1), chosen @ targets
    found = []
    for share, count, hits in zip(chosen, total, positive, strict=True):
        bias = torch.logit(hits / count, eps=1e-3) - (share @ odds.flatten(1) / count).view(odds.shape[1:])
        for _ in range(BIAS_STEPS):
            p = (odds + bias).sigmoid()
            slope, curve = ((share @ x.flatten(1)).view(bias.shape) for x in (p - targets[:, None, None], p * (1 - p)))
            bias = bias - (slope / curve.clamp_min(1e-3)).clamp(-2.0, 2.0)
        losses = F.binary_cross_entropy_with_logits(
            odds + bias, targets[:, None, None].expand_as(odds), reduction="none"
        )
        found.append((share @ losses.flatten(1)).view(bias.shape))
    return torch.stack(found)


def _regress(
    scans: Bags,
    training: Bool[Tensor, "folds scans"],
    places: Places,
    penalties: Sequence[Penalty],
    before: Fitted | None,
) -> tuple[Float64[Tensor, "folds penalties inputs"], Float64[Tensor, "penalties scans"]]:
    """Weights for each fold and penalty, from features pooled under the attention of the turn before.

    Also the scores of the scans by the weights of their own fold, from the same features.
    """
    folds, count, inputs = len(training), len(penalties), scans.width
    strengths = torch.tensor(
        [[one.of(int(own.sum()), inputs) for one in penalties] for own in training],
        dtype=torch.float64,
        device=training.device,
    )
    if before is None:  # attention is the prior, for all alike
        nothing = scans.features.new_zeros(1, inputs)
        rows, scale = _standardised(_pool(scans, places, nothing, nothing[:, 0])[0])
        chosen = training.repeat_interleave(count, 0)
        ridge, lasso = strengths.flatten(0, 1).unbind(1)
        weights, bias = fit_logistic(rows, scans.labels, chosen, ridge=ridge, lasso=lasso)
        scores = (weights @ rows.T + bias[:, None]).view(folds, count, -1)
        return (weights / scale).view(folds, count, inputs), (scores * ~training[:, None]).sum(0)
    found, raw = [], strengths.new_zeros(count, len(scans))
    together = max(1, MOST_POOLED // (count * len(scans) * inputs))
    for some in torch.arange(folds, device=training.device).split(together):
        pooled = [_pool(scans, places, before.weights[fold], before.sharpness[fold]) for fold in some.tolist()]
        rows, scale = _standardised(torch.cat(pooled))
        chosen, (ridge, lasso) = training[some].repeat_interleave(count, 0), strengths[some].flatten(0, 1).unbind(1)
        weights, bias = fit_logistic(rows, scans.labels, chosen, ridge=ridge, lasso=lasso)
        scores = (rows @ weights[:, :, None])[:, :, 0] + bias[:, None]
        raw += (scores.view(len(some), count, -1) * ~training[some][:, None]).sum(0)
        found.append((weights / scale).view(len(some), count, inputs))
    return torch.cat(found), raw


def _standardised(pooled: Float64[Tensor, "*many scans inputs"]) -> tuple[Tensor, Tensor]:
    """Rows around 0 whose inputs have a variance of 1 in the mean, and what they were divided by."""
    scale = pooled.std(-2).mean(-1).clamp_min(1e-12)[..., None]
    return (pooled - pooled.mean(-2, keepdim=True)) / scale[..., None, :], scale


def _pool(
    scans: Bags, places: Places, weights: Float[Tensor, "penalties inputs"], sharpness: Float[Tensor, "penalties"]
) -> Float64[Tensor, "penalties scans inputs"]:
    """The features of every scan, pooled under each member's attention."""
    pooled = []
    for batch in torch.arange(len(scans), device=scans.features.device).split(SCANS_AT_ONCE):
        rows, layout = scans.rows(batch), Layout.packed(scans.lengths[batch])
        log_a, _ = look(places, rows @ weights.T.to(rows.dtype), sharpness, layout)
        pooled.append(layout.pool(log_a.exp(), rows))
    return torch.cat(pooled).movedim(1, 0).double()


def _held_out(scans: Bags, folds: Int[Tensor, "scans"]) -> Iterator[tuple[int, Int[Tensor, "some"], Tensor, Layout]]:
    """All scans in batches of one fold: the fold, the scans, their rows and layout."""
    for fold in range(int(folds.max()) + 1):
        for batch in (folds == fold).nonzero().flatten().split(SCANS_AT_ONCE):
            yield fold, batch, scans.rows(batch), Layout.packed(scans.lengths[batch])


def _out_of_fold(
    scans: Bags,
    folds: Int[Tensor, "scans"],
    places: Places,
    weights: Float64[Tensor, "folds penalties inputs"],
    sharpness: Float64[Tensor, "folds penalties"],
) -> Fitted:
    """What the members say of the scans they have not seen."""
    raw = weights.new_zeros(weights.shape[1], len(scans))
    attention = scans.features.new_zeros(weights.shape[1], len(scans.features), dtype=torch.float32)
    starts = scans.lengths.cumsum(0) - scans.lengths
    for fold, batch, rows, layout in _held_out(scans, folds):
        log_a, found = look(places, rows @ weights[fold].T.to(rows.dtype), sharpness[fold], layout)
        raw[:, batch] = found.T
        place = torch.arange(layout.longest, device=rows.device)
        slices = (starts[batch][:, None] + place)[layout.mask]
        attention[:, slices] = layout.restore(log_a.exp()).float()
    training = folds != torch.arange(len(weights), device=folds.device)[:, None]
    lines, shape = _lines(raw, scans.labels, training), sharpness.shape
    # Evidence that points the wrong way is not turned around, but counts as nothing.
    rising = lines.slope > 0.0
    nothing = _lines(0.0 * raw, scans.labels, training).intercept
    gain = torch.where(rising, lines.slope, 0.0).view(shape)
    bias = torch.where(rising, lines.intercept, nothing).view(shape)
    logits = gain.T[:, folds] * raw + bias.T[:, folds]
    return Fitted(weights, bias, gain, sharpness, logits, attention)
