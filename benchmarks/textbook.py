"""Every trained model as a textbook writes it: one bag at a time, plain torch modules, no algebra that saves work.

Two uses: the benchmark's loop over bags, and a reference for the tests, since nothing here shares code with the
package.  Parameter names are the package's, so `load_state_dict(ours.state_dict())` copies the weights.  Each model
maps one bag `(slices, features)` to its logit and its attention `(heads, slices)`.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

SM_STEPS = 10
HEADS = 8
HIDDEN = 128


class MeanPooling(nn.Module):
    """The mean embedding, classified; attention is uniform."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, 1)

    def forward(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        attention = torch.full((1, len(bag)), 1 / len(bag), dtype=bag.dtype)
        return self.classifier(bag.mean(0)).squeeze(), attention


class MaxPooling(nn.Module):
    """The element-wise maximum, classified; attention is the share of the features whose argmax is slice j."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.classifier = nn.Linear(features, 1)

    def forward(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        maximum, argmax = bag.max(0)
        attention = torch.bincount(argmax, minlength=len(bag)).to(bag.dtype) / bag.shape[1]
        return self.classifier(maximum).squeeze(), attention[None]


class ABMIL(nn.Module):
    """Linear - tanh - Linear, softmax over the bag, pooled embedding, classifier."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.hidden = nn.Linear(features, HIDDEN)
        self.score = nn.Linear(HIDDEN, 1)
        self.classifier = nn.Linear(features, 1)

    def forward(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        attention = torch.softmax(self.score(torch.tanh(self.hidden(bag))), dim=0).T
        return self.classifier(attention @ bag).squeeze(), attention


class Sm(nn.Module):
    """T steps of g <- (1 - alpha) h + alpha A g with the dense row-normalised adjacency of the chain."""

    def __init__(self) -> None:
        super().__init__()
        self.raw_alpha = nn.Parameter(torch.zeros(()))

    def forward(self, h: Tensor) -> Tensor:
        if len(h) == 1:  # a slice without neighbours has no row to normalise
            return h
        alpha = torch.sigmoid(self.raw_alpha)
        neighbours = torch.ones(len(h) - 1, dtype=h.dtype)
        adjacency = torch.diag(neighbours, 1) + torch.diag(neighbours, -1)
        adjacency = adjacency / adjacency.sum(1, keepdim=True)
        g = h
        for _ in range(SM_STEPS):
            g = (1 - alpha) * h + alpha * (adjacency @ g)
        return g


class SmAP(nn.Module):
    """Sm on the embeddings, then ABMIL whose two attention layers are divided by their spectral norms."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.sm = Sm()
        self.hidden = nn.Linear(features, HIDDEN)
        self.score = nn.Linear(HIDDEN, 1)
        self.classifier = nn.Linear(features, 1)

    def forward(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        g = self.sm(bag)
        hidden = torch.tanh(F.linear(g, _spectrally_normalized(self.hidden.weight), self.hidden.bias))
        scores = F.linear(hidden, _spectrally_normalized(self.score.weight), self.score.bias)
        attention = torch.softmax(scores, dim=0).T
        return self.classifier(attention @ g).squeeze(), attention


def _spectrally_normalized(weight: Tensor) -> Tensor:
    return weight / torch.linalg.matrix_norm(weight, 2)


class Block(nn.Module):
    """MHA(LN(x)) on one bag: its output and, if asked for, its attention `(heads, rows, rows)`."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.block = nn.ModuleDict(
            {"norm": nn.LayerNorm(features), "attention": nn.MultiheadAttention(features, HEADS, batch_first=True)}
        )

    def forward(self, x: Tensor, need_weights: bool) -> tuple[Tensor, Tensor | None]:
        n = self.block["norm"](x)[None]
        output, weights = self.block["attention"](n, n, n, need_weights=need_weights, average_attn_weights=False)
        return output[0], None if weights is None else weights[0]


class PPEG(nn.Module):
    """The slices plus three depthwise convolutions of them; the class token passes through."""

    def __init__(self, features: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(features, features, size, padding=size // 2, groups=features) for size in (3, 5, 7)
        )

    def forward(self, x: Tensor) -> Tensor:
        slices = x[1:].T
        encoded = slices + sum(conv(slices[None])[0] for conv in self.convs)
        return torch.cat([x[:1], encoded.T])


class TransMIL(nn.Module):
    """Class token, block, PPEG, block; with `smooth`, Sm on each block's output before the residual."""

    def __init__(self, features: int, *, smooth: bool = False) -> None:
        super().__init__()
        self.class_token = nn.Parameter(torch.randn(1, features))
        self.block1 = Block(features)
        self.ppeg = PPEG(features)
        self.block2 = Block(features)
        self.sm1 = Sm() if smooth else nn.Identity()
        self.sm2 = Sm() if smooth else nn.Identity()
        self.classifier = nn.Linear(features, 1)

    def forward(self, bag: Tensor) -> tuple[Tensor, Tensor]:
        x = torch.cat([self.class_token, bag])
        output, _ = self.block1(x, need_weights=False)
        x = self.ppeg(x + self.sm1(output))
        output, weights = self.block2(x, need_weights=True)
        x = x + self.sm2(output)
        return self.classifier(x[0]).squeeze(), weights[:, 0, 1:]


def guidance(attention: Tensor) -> Tensor:
    """Forward KL from the normal reference to one bag's attention `(heads, slices)`, mean over heads."""
    values = []
    for row in attention:
        a = row / row.sum()
        j = torch.arange(1, len(a) + 1, dtype=a.dtype)
        with torch.no_grad():
            mean = (j * a).sum()
            variance = ((j - mean) ** 2 * a).sum().clamp_min(1e-6)
            log_r = torch.log_softmax(-((j - mean) ** 2) / (2 * variance), dim=0)
        values.append((log_r.exp() * (log_r - a.log())).sum())
    return torch.stack(values).mean()


def loss(model: nn.Module, bags: Sequence[Tensor], labels: Tensor, guided: bool) -> Tensor:
    """Mean over bags of BCE, plus guidance with weight 1 if `guided`: a loop, one bag after the other."""
    total = torch.zeros((), dtype=labels.dtype)
    for bag, label in zip(bags, labels, strict=True):
        logit, attention = model(bag)
        total = total + F.binary_cross_entropy_with_logits(logit, label)
        if guided:
            total = total + guidance(attention)
    return total / len(bags)


MODELS: dict[str, Callable[[int], nn.Module]] = {
    "max": MaxPooling,
    "mean": MeanPooling,
    "abmil": ABMIL,
    "smap": SmAP,
    "ng": ABMIL,
    "transmil": TransMIL,
    "smtp": lambda features: TransMIL(features, smooth=True),
    "mhng": TransMIL,
}
"""The textbook form of every trained method, by the package's names."""
