"""Draws docs/images/divergences.png and docs/images/heads.png: what guidance does to attention, and to each head's.

The first shows the attention of ABMIL, trained without guidance on a semi-synthetic set, on one test scan.  Slices of
that set are independent, those of a scan are not: neighbours look alike.  So its features are smoothed along the slices
first (binomial kernel, variance restored), and attention can follow the shape of a lesion.  The second starts at eight
made-up heads and follows guidance alone.

    .venv/bin/python docs/draw_figures.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.layers import Sm
from normal_guidance.show.figure_style import save
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.figures.attention import plot_divergences, plot_heads
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.loop import predict_bags, train_model

IMAGES = Path(__file__).parent / "images"

SHIFT = 1.0
PASSES = 8
FEATURES = 32
SCAN = 2  # of the positive test scans: its attention has several peaks

HEADS, SLICES = 8, 40
STEPS, STEP = 400, 0.5


@torch.no_grad()
def smoothed(bags: Bags) -> Bags:
    """Features averaged with their neighbours PASSES times (a binomial kernel), scaled back to unit variance."""
    features, sm = bags.features, Sm(steps=1)  # one step at alpha = 1/2: half the slice, half its neighbours
    for _ in range(PASSES):
        features = sm(features, bags.layout)
    return replace(bags, features=features / features.std())


def abmil_attention() -> tuple[Tensor, Tensor]:
    """What ABMIL attends to in one test scan, and the slices that are positive."""
    train, val, test = (
        smoothed(shifted_mean(n, i, shift=SHIFT, features=FEATURES)) for i, n in ((1, 2000), (2, 500), (3, 400))
    )
    attention = predict_bags(
        train_model(Config("abmil", lr=0.01, l1=1e-3, epochs=30), train, val).model, test
    ).attention
    number = int(test.localizable.nonzero().flatten()[SCAN])
    return attention.split(test.lengths.tolist())[number], test[number].slice_labels


def made_up_scores() -> Tensor:
    """Scores of heads that each prefer another place, with noise."""
    generator = torch.Generator().manual_seed(1)
    j = torch.arange(1, SLICES + 1)
    center = torch.linspace(6, SLICES - 6, HEADS)[:, None]
    width = 4 + 5 * torch.rand(HEADS, 1, generator=generator)
    return -0.5 * ((j - center) / width) ** 2 + torch.randn(HEADS, SLICES, generator=generator)


def guided(scores: Tensor) -> Tensor:
    """The scores after gradient descent on the guidance term alone, every head toward its own reference."""
    scores = scores.clone().requires_grad_()
    guidance = NormalGuidance(weight=HEADS)  # the term is a mean over heads; this undoes it
    descent = torch.optim.SGD([scores], lr=STEP)
    for _ in range(STEPS):
        descent.zero_grad()
        guidance(scores[None], from_logits=True).backward()
        descent.step()
    return scores.detach()


def draw(figure: Figure, name: str) -> None:
    """Writes a figure with a palette of 256 colours, which makes the file three times smaller."""
    path = save(figure, IMAGES / name)
    Image.open(path).convert("RGB").quantize(256).save(path, optimize=True)
    print(path, f"{path.stat().st_size:,} bytes")


def main() -> None:
    attention, truth = abmil_attention()
    draw(plot_divergences(attention, slice_labels=truth), "divergences.png")
    before = made_up_scores()
    heads = {"Before guidance": before.softmax(-1), "After guidance": guided(before).softmax(-1)}
    draw(plot_heads(heads), "heads.png")


if __name__ == "__main__":
    main()
