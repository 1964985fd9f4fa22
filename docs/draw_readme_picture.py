"""Draws docs/images/attention.png: what ABMIL attends to with and without Normal Guidance.

Slices of the Shifted Mean set are independent, those of a scan are not: neighbours look alike.  So the features are
smoothed along the slices first (binomial kernel, variance restored), and attention can follow the shape of a lesion.

    .venv/bin/python docs/draw_readme_picture.py
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import torch

from normal_guidance.core.bags import Bags
from normal_guidance.core.layers import Sm
from normal_guidance.core.methods import METHODS
from normal_guidance.reports.figures.attention import AttendedScan, draw_attention
from normal_guidance.simulate.semi_synthetic import shifted_mean
from normal_guidance.statistics.scores import score
from normal_guidance.training.config import Config
from normal_guidance.training.loop import predict_bags, train_model

SHIFT = 1.0
PASSES = 8


@torch.no_grad()
def smoothed(bags: Bags) -> Bags:
    """Features averaged with their neighbours PASSES times (a binomial kernel), scaled back to unit variance."""
    features, sm = bags.features, Sm(steps=1)  # one step at alpha = 1/2: half the slice, half its neighbours
    for _ in range(PASSES):
        features = sm(features, bags.layout)
    return replace(bags, features=features / features.std())


def main() -> None:
    train, val, test = (smoothed(shifted_mean(n, i, shift=SHIFT)) for i, n in ((1, 2000), (2, 500), (3, 400)))
    shown = test.localizable.nonzero().flatten().tolist()[:4]
    curves: dict[str, tuple[torch.Tensor, ...]] = {}
    for name in ("abmil", "ng"):
        prediction = predict_bags(train_model(Config(name, lr=0.01, l1=1e-3, epochs=30), train, val).model, test)
        curves[name] = prediction.attention.split(test.lengths.tolist())
        print(METHODS[name].title, score(test, prediction.slice_scores, prediction.logit))
    scans = [
        AttendedScan(test.scan_ids[i], {name: parts[i] for name, parts in curves.items()}, test[i].slice_labels)
        for i in shown
    ]
    print(draw_attention(scans, Path(__file__).parent / "images" / "attention.png", reference="ng"))


if __name__ == "__main__":
    main()
