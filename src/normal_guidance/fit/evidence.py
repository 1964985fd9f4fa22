r"""Fits members of a committee (`committee.py`) that look for one kind of places, out of fold.

Attention and weights depend on each other, so they are found in turns.  Attention begins as the prior of the places.
A penalised logistic regression on each scan's features, pooled under its attention, gives weights.  Scans that it has
not seen say how much its evidence is worth (`fit_sharpness`); evidence of that size gives new attention.

Every step uses scan labels of the training folds only.  What a fold's evidence is worth is found on all other folds,
whose evidence is out of fold itself.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.bells import Places, ScanPlaces
from normal_guidance.core.layout import Layout
from normal_guidance.fit.committee import attend
from normal_guidance.statistics.calibration import fit_lines

STEPS = 2000  # the most steps; a few hundred are usual
TOLERANCE = 1e-5  # it has converged when a step moves no weight by more than this
NEWTON_INPUTS = 64  # the most inputs for Newton's method, whose steps cost the square of their number for each scan
NEWTON_STEPS = 50  # the most steps of Newton's method; about 7 are usual
POWER_STEPS = 30  # products that find the largest curvature, which sets the size of the steps


def fit_logistic(
    rows: Float[Tensor, "models scans inputs"] | Float[Tensor, "scans inputs"],
    labels: Int[Tensor, "scans"],
    chosen: Bool[Tensor, "models scans"],
    *,
    ridge: Float[Tensor, "models"],
    lasso: Float[Tensor, "models"],
) -> tuple[Float64[Tensor, "models inputs"], Float64[Tensor, "models"]]:
    r"""The weights and biases of penalised logistic regressions, many at once; the bias is not penalised.

    $$ \min_{w, c} \; \operatorname{mean}_{i \in \text{chosen}} \log(1 + e^{-y_i (w^\top x_i + c)})
       + \tfrac{\text{ridge}}{2} \lVert w \rVert^2 + \text{lasso} \lVert w \rVert_1 $$

    The problem is convex: no seed and no learning rate changes its solution.  Few inputs without a lasso are solved by
    Newton's method; all else by accelerated proximal gradient steps that start again when they overshoot (O'Donoghue
    and Candes, "Adaptive restart for accelerated gradient schemes", 2015).  All is float64.
    """
    share = chosen.double() / chosen.sum(1, keepdim=True)
    rows, targets = rows.double(), labels.double()
    ridge, lasso = ridge.double()[:, None], lasso.double()[:, None]
    smooth = (lasso[:, 0] == 0.0) & (rows.shape[-1] <= NEWTON_INPUTS)
    weights, bias = rows.new_zeros(len(share), rows.shape[-1]), rows.new_zeros(len(share))
    for some, solve in ((smooth, _by_newton), (~smooth, _by_proximal_steps)):
        if some.any():
            theirs = rows if rows.ndim == 2 or some.all() else rows[some]
            weights[some], bias[some] = solve(theirs, targets, share[some], ridge[some], lasso[some])
    return weights, bias


def _by_newton(
    rows: Tensor, targets: Tensor, share: Tensor, ridge: Tensor, lasso: Tensor
) -> tuple[Float64[Tensor, "models inputs"], Float64[Tensor, "models"]]:
    """Newton's steps, halved where they would raise the loss; the last weight is the bias, which has no penalty."""
    inputs = rows.shape[-1]
    rows = torch.cat([rows, torch.ones_like(rows[..., :1])], -1)
    penalty = torch.cat([ridge.expand(-1, inputs), torch.zeros_like(ridge)], 1)
    weights = rows.new_zeros(len(share), inputs + 1)
    weights[:, -1] = torch.logit((share * targets).sum(1), eps=1e-6)
    transposed = rows.transpose(-1, -2)

    def loss(weights: Tensor) -> Tensor:
        scores = apply_weights(rows, weights)
        fit = (share * (F.softplus(scores) - targets * scores)).sum(1, keepdim=True)
        return fit + 0.5 * (penalty * weights.square()).sum(1, keepdim=True)

    now = loss(weights)
    for _ in range(NEWTON_STEPS):
        p = apply_weights(rows, weights).sigmoid()
        gradient = _sums(rows, share * (p - targets)) + penalty * weights
        curvature = transposed @ ((share * p * (1 - p)).clamp_min(1e-12)[:, :, None] * rows) + penalty.diag_embed()
        step = torch.linalg.solve(curvature, gradient[:, :, None])[:, :, 0]
        size = torch.ones_like(now)
        for _ in range(30):
            following = loss(weights - size * step)
            rises = following > now * (1 + 1e-12)
            if not rises.any():
                break
            size = torch.where(rises, size / 2, size)
        weights, now = weights - size * step, following
        if (size * step).abs().max() < TOLERANCE:
            break
    return weights[:, :-1], weights[:, -1]


def _by_proximal_steps(
    rows: Tensor, targets: Tensor, share: Tensor, ridge: Tensor, lasso: Tensor
) -> tuple[Float64[Tensor, "models inputs"], Float64[Tensor, "models"]]:
    size = 1.0 / (0.25 * _largest(rows, share) + ridge)
    weights = rows.new_zeros(len(share), rows.shape[-1])
    bias = torch.logit((share * targets).sum(1, keepdim=True), eps=1e-6)
    ahead, ahead_bias, momentum = weights, bias, torch.ones_like(bias)
    for _ in range(STEPS):
        scores = apply_weights(rows, ahead) + ahead_bias
        error = share * (scores.sigmoid() - targets)
        gradient = _sums(rows, error) + ridge * ahead
        moved = ahead - size * gradient
        moved = moved.sign() * (moved.abs() - size * lasso).clamp_min(0.0)
        moved_bias = ahead_bias - size * error.sum(1, keepdim=True)
        steps = torch.cat([moved - weights, moved_bias - bias], 1)
        overshot = (torch.cat([ahead - moved, ahead_bias - moved_bias], 1) * steps).sum(1, keepdim=True) > 0
        following = torch.where(overshot, 1.0, 0.5 * (1.0 + (1.0 + 4.0 * momentum.square()).sqrt()))
        carry = torch.where(overshot, 0.0, (momentum - 1.0) / following)
        weights, bias, momentum = moved, moved_bias, following
        ahead = weights + carry * steps[:, :-1]
        ahead_bias = bias + carry * steps[:, -1:]
        if steps.abs().max() < TOLERANCE:
            break
    return weights, bias[:, 0]


def apply_weights(
    rows: Float64[Tensor, "models scans inputs"] | Float64[Tensor, "scans inputs"],
    weights: Float64[Tensor, "models inputs"],
) -> Float64[Tensor, "models scans"]:
    """The scores of all scans by all models, without bias."""
    return weights @ rows.T if rows.ndim == 2 else (rows @ weights[:, :, None])[:, :, 0]


def _sums(rows: Tensor, factors: Float64[Tensor, "models scans"]) -> Float64[Tensor, "models inputs"]:
    return factors @ rows if rows.ndim == 2 else (factors[:, None] @ rows)[:, 0]


def _largest(rows: Tensor, share: Float64[Tensor, "models scans"]) -> Float64[Tensor, "models one"]:
    """An upper bound of the largest eigenvalue of each model's mean of x x^T, the constant of the bias included."""
    vector = rows.new_ones(len(share), rows.shape[-1] + 1)
    value = rows.new_ones(len(share), 1)
    for _ in range(POWER_STEPS):
        vector = vector / vector.norm(dim=1, keepdim=True).clamp_min(1e-300)
        scores = share * (apply_weights(rows, vector[:, :-1]) + vector[:, -1:])
        vector = torch.cat([_sums(rows, scores), scores.sum(1, keepdim=True)], 1)
        value = vector.norm(dim=1, keepdim=True)
    return 1.1 * value  # the last products may still be a little below


TURNS = 3  # turns of weights and attention; more change little

# Sizes of evidence that are tried: standard deviations of a window's log-odds, the mean of all scans' windows.
FACTORS = 2.0 ** torch.arange(-3.0, 4.5, 0.5, dtype=torch.float64)
BIAS_STEPS = 8  # Newton's steps to the best bias; five suffice where log-odds are moderate
MOST_POOLED = 50_000_000  # numbers of pooled features that are in memory together, but for one fold's at least
SCANS_AT_ONCE, ROWS_AT_ONCE = 256, 2**15  # scans, and slices with padding, whose attention is computed together


@dataclass(frozen=True)
class Penalty:
    """How strongly a regression is held back."""

    kind: str  # "ridge" for evidence spread over many inputs, "lasso" for few that matter
    strength: float  # 1 is usual for this number of scans and inputs

    def of(self, scans: int, inputs: int) -> tuple[float, float]:
        """Ridge and lasso of `fit_logistic`, for pooled features of variance 1."""
        # Ridge is what makes noise in all inputs together as large as the evidence, in the order of inputs / scans.
        # Lasso is the largest slope that noise alone would have in any input.
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
    # Out of fold: by the members of the scan's own fold, which were not trained on it.
    logits: Float64[Tensor, "penalties scans"]
    attention: Float[Tensor, "penalties slices"]

    def to(self, device: torch.device | str) -> Fitted:
        return Fitted(*(getattr(self, field.name).to(device) for field in fields(self)))


def fit_evidence(
    scans: Bags,
    folds: Int[Tensor, "scans"],
    places: Places,
    penalties: Sequence[Penalty],
    *,
    power: float = 1.0,
    turns: int = TURNS,
    before: Fitted | None = None,
) -> tuple[Fitted, ...]:
    """Fit one member for each fold and penalty to scans of scaled features; return the members of every turn."""
    # The scan's odds are the `power` of the odds of one place: above 1 the number of places with a finding, below 1
    # attention is sharper than the odds, so that the clearest slice alone says nearly what all say.  Without the turn
    # `before`, attention begins as the prior.
    count, device = int(folds.max()) + 1, scans.features.device
    folds = folds.to(device)
    training = folds != torch.arange(count, device=device)[:, None]
    chunks = _chunks(scans, places)
    last, made = None if before is None else before.to(device), []
    for _ in range(turns):
        weights = _regress(scans, chunks, training, penalties, last)
        windows = []
        for chunk in chunks:  # by the weights of the scan's own fold, which were not trained on it
            evidence = chunk.windows(weights.flatten(0, 1)).unflatten(1, weights.shape[:2])
            windows.append(evidence[torch.arange(len(evidence), device=device), folds[chunk.scans]])
        squares = torch.stack([evidence.square().sum((0, 2)) for evidence in windows]).sum(0)
        size = squares.div(len(scans.features)).sqrt().clamp_min(1e-300)  # the root mean square of the evidence
        factors = FACTORS.to(device) / size[:, None]
        pairs = list(zip(chunks, windows, strict=True))
        tried = [
            power * torch.stack([chunk.places.log_odds(factor[:, None] * evidence) for factor in factors.T], 2)
            for chunk, evidence in pairs
        ]
        scale, certain = fit_sharpness(factors, _scatter(chunks, tried), scans.labels, training)
        weights = scale[:, :, None] * weights
        odds, attention = [], weights.new_zeros(len(penalties), len(scans.features), dtype=torch.float32)
        for chunk, evidence in pairs:
            fold = folds[chunk.scans]
            log_a, of_scans = attend(chunk.places, scale[fold][:, :, None] * evidence, certain[fold])
            odds.append(of_scans)
            attention[:, chunk.slices] = chunk.places.layout.restore(log_a.exp()).float()
        last = _calibrated(weights, certain, _scatter(chunks, odds).T, attention, scans.labels, folds, training)
        made.append(last.to("cpu"))
    return tuple(made)


class _Chunk(NamedTuple):
    """Scans of about the same length."""

    scans: Int[Tensor, "bags"]
    slices: Int[Tensor, "rows"]  # the places of their rows among those of all scans
    rows: Float[Tensor, "rows inputs"]
    places: ScanPlaces

    def windows(self, weights: Float64[Tensor, "members inputs"]) -> Float64[Tensor, "bags members longest"]:
        return self.places.windows(self.places.layout.pad((self.rows @ weights.T.to(self.rows.dtype)).T))


def _chunks(scans: Bags, places: Places) -> list[_Chunk]:
    """Scans sorted by length, so that little is padded, in chunks of at most `SCANS_AT_ONCE` and `ROWS_AT_ONCE`."""
    starts, order, chunks = scans.lengths.cumsum(0) - scans.lengths, scans.lengths.argsort(stable=True), []
    while len(order):
        rows = scans.lengths[order] * torch.arange(1, len(order) + 1, device=order.device)  # padded to the longest
        some = order[: max(1, min(SCANS_AT_ONCE, int((rows <= ROWS_AT_ONCE).sum())))]
        layout = Layout.packed(scans.lengths[some])
        slices = (starts[some][:, None] + torch.arange(layout.longest, device=some.device))[layout.mask]
        chunks.append(_Chunk(some, slices, scans.features[slices], places.of(layout)))
        order = order[len(some) :]
    return chunks


def _scatter(chunks: Sequence[_Chunk], values: Sequence[Tensor]) -> Tensor:
    """The values of all scans in their own order."""
    return torch.cat(list(values))[torch.cat([chunk.scans for chunk in chunks]).argsort()]


def fit_sharpness(
    factors: Float64[Tensor, "penalties factors"],
    odds: Float64[Tensor, "scans penalties factors"],
    labels: Int[Tensor, "scans"],
    training: Bool[Tensor, "folds scans"],
) -> tuple[Float64[Tensor, "folds penalties"], Float64[Tensor, "folds penalties"]]:
    """What evidence must be multiplied by to be log-odds, the most probable factor, and how much of it is certain."""
    # Certain is the smallest factor that is at most half a unit of log-likelihood worse, which is one standard error; 0
    # is where no evidence is as probable.
    loss = _loss_with_best_bias(torch.cat([torch.zeros_like(odds[:, :, :1]), odds], 2), labels, training)
    best, index = loss[:, :, 1:].min(2)
    certain = (loss <= best[:, :, None] + 0.5).double().argmax(2)
    every = torch.cat([torch.zeros_like(factors[:, :1]), factors], 1).expand(len(training), -1, -1)
    scale = every.gather(2, index[:, :, None] + 1)[:, :, 0]
    return scale, every.gather(2, certain[:, :, None])[:, :, 0] / scale


def _loss_with_best_bias(
    odds: Float64[Tensor, "scans penalties factors"],
    labels: Int[Tensor, "scans"],
    training: Bool[Tensor, "folds scans"],
) -> Float64[Tensor, "folds penalties factors"]:
    """The log loss of all training scans together, with the bias that makes it least, by Newton's method."""
    chosen, targets = training.double(), labels.double()
    total, positive = chosen.sum(1), chosen @ targets
    by_fold = []
    for share, count, hits in zip(chosen, total, positive, strict=True):
        bias = torch.logit(hits / count, eps=1e-3) - (share @ odds.flatten(1) / count).view(odds.shape[1:])
        for _ in range(BIAS_STEPS):
            p = (odds + bias).sigmoid()
            slope, curve = ((share @ x.flatten(1)).view(bias.shape) for x in (p - targets[:, None, None], p * (1 - p)))
            bias = bias - (slope / curve.clamp_min(1e-3)).clamp(-2.0, 2.0)
        losses = F.binary_cross_entropy_with_logits(
            odds + bias, targets[:, None, None].expand_as(odds), reduction="none"
        )
        by_fold.append((share @ losses.flatten(1)).view(bias.shape))
    return torch.stack(by_fold)


def _regress(
    scans: Bags,
    chunks: Sequence[_Chunk],
    training: Bool[Tensor, "folds scans"],
    penalties: Sequence[Penalty],
    before: Fitted | None,
) -> Float64[Tensor, "folds penalties inputs"]:
    """Weights for each fold and penalty, from features pooled under the attention of the turn before."""
    folds, count, inputs = len(training), len(penalties), scans.width
    strengths = torch.tensor(
        [[penalty.of(int(chosen.sum()), inputs) for penalty in penalties] for chosen in training],
        dtype=torch.float64,
        device=training.device,
    )
    together = folds if before is None else max(1, MOST_POOLED // (count * len(scans) * inputs))
    weights_by_fold = []
    for some in torch.arange(folds, device=training.device).split(together):
        if before is None:  # attention is the prior, for all alike
            members = strengths.new_zeros(1, inputs), strengths.new_zeros(1)
        else:
            members = before.weights[some].flatten(0, 1), before.sharpness[some].flatten()
        pooled = _pool(chunks, *members)
        pooled = pooled[0] if before is None else pooled
        scale = pooled.std(-2).mean(-1).clamp_min(1e-12)[..., None]  # inputs get a variance of 1 in the mean
        rows = (pooled - pooled.mean(-2, keepdim=True)) / scale[..., None, :]
        chosen, (ridge, lasso) = training[some].repeat_interleave(count, 0), strengths[some].flatten(0, 1).unbind(1)
        weights, _ = fit_logistic(rows, scans.labels, chosen, ridge=ridge, lasso=lasso)
        weights_by_fold.append((weights / scale).view(len(some), count, inputs))
    return torch.cat(weights_by_fold)


def _pool(
    chunks: Sequence[_Chunk], weights: Float64[Tensor, "members inputs"], sharpness: Float64[Tensor, "members"]
) -> Float64[Tensor, "members scans inputs"]:
    """The features of every scan, pooled under each member's attention."""
    pooled = []
    for chunk in chunks:
        log_a, _ = attend(chunk.places, chunk.windows(weights), sharpness)
        pooled.append(chunk.places.layout.pool(log_a.exp(), chunk.rows))
    return _scatter(chunks, pooled).movedim(1, 0).double()


def _calibrated(
    weights: Float64[Tensor, "folds penalties inputs"],
    sharpness: Float64[Tensor, "folds penalties"],
    odds: Float64[Tensor, "penalties scans"],
    attention: Float[Tensor, "penalties slices"],
    labels: Int[Tensor, "scans"],
    folds: Int[Tensor, "scans"],
    training: Bool[Tensor, "folds scans"],
) -> Fitted:
    """The members with gain and bias, each fitted to the scans of the other folds."""
    lines, without_evidence = (
        fit_lines(raw.repeat(len(training), 1), labels, training.repeat_interleave(len(raw), 0))
        for raw in (odds, 0.0 * odds)
    )
    rising = lines.slope > 0.0  # evidence that points the wrong way is not turned around, but counts as nothing
    gain = torch.where(rising, lines.slope, 0.0).view(sharpness.shape)
    bias = torch.where(rising, lines.intercept, without_evidence.intercept).view(sharpness.shape)
    return Fitted(weights, bias, gain, sharpness, gain.T[:, folds] * odds + bias.T[:, folds], attention)
