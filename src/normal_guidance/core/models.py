"""The models of the paper, and two heads beyond it: slice embeddings in, a logit and attention over the slices out.

Each model is a plain `nn.Module` for one configuration and takes bags in any form that `as_rows` knows: packed with
`lengths`, padded with a boolean `mask`, or with a `Layout`.  Attention is returned in the same form.  `core.methods`
says how each is trained; `core.field` has the models that others compare with.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn

from normal_guidance.base.errors import UserError
from normal_guidance.core.bells import WindowAttention
from normal_guidance.core.layers import (
    PPEG,
    ClassAttention,
    SelfAttention,
    Sm,
    SpectralLinear,
    hidden_scores,
    projected_scores,
)
from normal_guidance.core.layout import as_rows
from normal_guidance.core.prediction import (
    FEATURES,
    BagsLike,
    Features,
    Prediction,
    as_prediction,
    attend_and_classify,
    classify,
)


class CenteredGaussian(nn.Module):
    r"""Attention that ignores the image: $a_j \propto \mathrm{NormPDF}(j; S/2, 1)$.  It has no scan score (NaN).

    The density underflows to ties beyond 14 slices from the centre in float32 and 38 in float64, so `log_attention`
    holds the log-density.  `published=True` is the form behind the paper's semi-synthetic figure: positions
    linspace(1, S-1, S), and the density itself in float64 with its ties.

    Reference: Harvey et al., 2026, cited by the paper as the centre-focused baseline.

    Example:
        >>> CenteredGaussian()(torch.zeros(4, 8), torch.tensor([4])).attention.float().round(decimals=3)
        tensor([0.2580, 0.4260, 0.2580, 0.0580])
    """

    def __init__(self, *, published: bool = False) -> None:
        super().__init__()
        self.published = published

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags)
        place = torch.arange(layout.longest, device=rows.device, dtype=torch.float64)
        size = layout.lengths[:, None].double()
        if self.published:
            # Rounded like linspace: mirrored slices differ by this rounding alone, so it decides the published digits.
            position = 1 + place * ((size - 2) / (size - 1).clamp_min(1))
            log_density = (-0.5 * (position - size / 2) ** 2).exp().log()  # exp underflows: these are the ties
        else:
            log_density = -0.5 * (place + 1 - size / 2) ** 2
        log_a = layout.log_softmax(log_density)
        nowhere = torch.full((layout.bags,), torch.nan, device=rows.device, dtype=rows.dtype)
        return as_prediction(nowhere, log_a[:, None], layout)


class MeanPooling(nn.Module):
    r"""A linear classifier of the mean embedding, $w \cdot \frac{1}{S}\sum_j h_j + c$; attention is uniform.

    Example:
        >>> MeanPooling(8)(torch.randn(4, 8), torch.tensor([4])).attention
        tensor([0.2500, 0.2500, 0.2500, 0.2500])
    """

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        evidence = rows @ self.classifier.weight[0].to(rows.dtype)
        return attend_and_classify(torch.zeros_like(evidence), evidence, self.classifier.bias, layout)


class MaxPooling(nn.Module):
    r"""A linear classifier of the element-wise maximum; attention is each slice's share of the M (first) argmaxes.

    $$ a_{ij} = \frac{1}{M} \sum_k \mathbb{1}[\mathrm{argmax}_{j'}\, h_{ij'k} = j] $$

    Example:
        >>> MaxPooling(2)(torch.tensor([[1.0, 0.0], [0.0, 2.0], [0.0, 1.0]]), torch.tensor([3])).attention
        tensor([0.5000, 0.5000, 0.0000])
    """

    def __init__(self, features: int = FEATURES) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        if layout.sizes is None:
            padded = layout.fold(rows.T).movedim(1, 2).masked_fill(~layout.mask[:, :, None], -torch.inf)
            maximum, argmax = padded.amax(1), padded.argmax(1)
        else:  # one pass, where amax and argmax take two
            best = [bag.max(0) for bag in rows.split(layout.sizes)]
            maximum, argmax = torch.stack([top.values for top in best]), torch.stack([top.indices for top in best])
        maximum = maximum.to(self.classifier.weight.dtype)
        count = maximum.new_zeros(layout.bags, layout.longest).scatter_add(1, argmax, torch.ones_like(maximum))
        log_a = layout.hide((count / rows.shape[1]).log())
        return as_prediction(self.classifier(maximum).squeeze(-1), log_a[:, None], layout)


class ABMIL(nn.Module):
    r"""Attention-based MIL, without a gate.

    $$ a_j = \mathrm{softmax}_j(w_2^\top \tanh(W_1 h_j + b_1) + b_2),
       \quad \mathrm{logit} = \sum_j a_j\, w^\top h_j + c $$

    Reference: Ilse, Tomczak, Welling, "Attention-based Deep Multiple Instance Learning", 2018.

    Example:
        >>> model = ABMIL(features=8)
        >>> model(torch.randn(5, 8), torch.tensor([2, 3])).logit.shape
        torch.Size([2])
    """

    def __init__(self, features: int = FEATURES, hidden: int = 128) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, hidden)
        self.score = nn.Linear(hidden, 1)
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        scores = hidden_scores(self.hidden, self.score.weight[0], rows, layout) + self.score.bias
        evidence = rows @ self.classifier.weight[0].to(rows.dtype)
        return attend_and_classify(scores, evidence, self.classifier.bias, layout)


class SmAP(nn.Module):
    r"""ABMIL on embeddings smoothed once by `Sm`, its two attention layers under spectral normalisation.

    Sm(h) W = Sm(h W): the 128 projected columns and the evidence $w \cdot h_j$ are smoothed, not the 768 features.

    Reference: Castro-Macías et al., 2024 (SmAP, 'early').

    Example:
        >>> SmAP(features=8)(torch.randn(5, 8), torch.tensor([2, 3])).attention.shape
        torch.Size([5])
    """

    def __init__(self, features: int = FEATURES, hidden: int = 128) -> None:
        super().__init__()
        self.sm = Sm()
        self.hidden = SpectralLinear(features, hidden)
        self.score = SpectralLinear(hidden, 1)
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        width = self.hidden.out_features
        unused = self.classifier.weight.new_zeros(-(width + 1) % 4, rows.shape[1])  # matrix units load 4 at a time
        weight = torch.cat([self.hidden.normalized_weight(), self.classifier.weight, unused])
        smooth = self.sm(F.linear(rows, weight.to(rows.dtype)), layout)
        vector = self.score.normalized_weight()[0]
        scores = projected_scores(smooth[:, :width], self.hidden.bias, vector, layout) + self.score.bias
        return attend_and_classify(scores, smooth[:, width], self.classifier.bias, layout)


class TransMIL(nn.Module):
    r"""Two transformer blocks $x + \mathrm{MHA}(\mathrm{LN}(x))$ with PPEG between; the class token is classified.

    Full softmax attention, no MLP, no final norm, no dropout.  Attention is the class token's row of block 2 without
    its own entry, one per head: it sums to less than one.  With `smooth`, each block's MHA is followed by its own `Sm`
    before the residual, with the class token as node 0 of the chain (SmTP).

    Reference: Shao et al., "TransMIL", 2021; smoothing: Castro-Macías et al., 2024.

    Example:
        >>> model = TransMIL(features=16)
        >>> model(torch.randn(5, 16), torch.tensor([2, 3])).log_attention.shape
        torch.Size([8, 5])
    """

    def __init__(self, features: int = FEATURES, heads: int = 8, *, smooth: bool = False) -> None:
        super().__init__()
        if features % heads:
            near = [width for width in (features - features % heads, features - features % heads + heads) if width]
            raise UserError(
                f"TransMIL: {features} features cannot be divided among {heads} heads; "
                f"use an encoder with a multiple of {heads}, as {' or '.join(map(str, near))}"
            )
        self.class_token = nn.Parameter(torch.randn(1, features))
        self.block1 = SelfAttention(features, heads)
        self.ppeg = PPEG(features)
        self.block2 = ClassAttention(features, heads)
        self.sm1 = Sm() if smooth else None
        self.sm2 = Sm() if smooth else None
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        tokens = layout.with_class_token()
        mixed = self.block1(self.class_token, rows, layout, tokens)
        if self.sm1 is not None:
            mixed = self.sm1(mixed, tokens)
        x = self.ppeg(layout.prepend(self.class_token, rows) + mixed, tokens)
        mix = None if self.sm2 is None else self.sm2.first_row(tokens)
        output, log_row = self.block2(x, tokens, mix)
        z = (tokens.take_first(x) + output).to(self.classifier.weight.dtype)
        return as_prediction(self.classifier(z).squeeze(-1), log_row[:, :, 1:], layout)


class EvidenceMIL(nn.Module):
    r"""Attention from the classifier's own evidence; its only parameters are width and sharpness.

    $$ e_j = w^\top h_j, \quad a = \mathrm{softmax}(\beta K e), \quad \mathrm{logit} = \sum_j a_j e_j + c $$

    K sums over a Gaussian window along the slices, because the evidence of adjacent slices adds up: Tied Evidence, for
    findings in several places, anywhere in the scan.

    With `bells`, attention is a mixture of bells (`WindowAttention`), and the logit has a learned scale,
    $\gamma \sum_j a_j e_j + c$, because attention that spreads beyond the evidence dilutes it: Mixture of Whole Bells,
    for findings in one block of slices, usually around the middle of the scan.

    Example:
        >>> model = EvidenceMIL(bells=True)
        >>> sum(parameter.numel() for parameter in model.parameters())  # w, c, sigma, beta, kappa, p, gamma
        774
        >>> model(torch.randn(5, 768), torch.tensor([2, 3])).attention.shape
        torch.Size([5])
    """

    def __init__(self, features: int = FEATURES, *, bells: bool = False) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, 1)
        self.attention = WindowAttention(bells=bells)
        self.log_gamma = nn.Parameter(torch.zeros(())) if bells else None  # more evidence, more logit

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        evidence = rows @ self.classifier.weight[0].to(rows.dtype)
        log_a = self.attention(layout.fold(evidence), layout)
        if self.log_gamma is not None:
            evidence = self.log_gamma.exp() * evidence
        return classify(log_a, evidence, self.classifier.bias, layout)
