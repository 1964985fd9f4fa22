"""Slice order, repairs of stored values, the semi-synthetic draws, one gray channel."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from measured.text import digits, table
from normal_guidance.core.bags import Bags
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.metrics import localization
from normal_guidance.core.models import build_model
from normal_guidance.evaluation.published import published_seed
from normal_guidance.simulate.phantom.drafts import UNEXTENDED, WRONG_INTERCEPT
from normal_guidance.simulate.phantom.plan import plan
from normal_guidance.simulate.phantom.render import render
from normal_guidance.simulate.semi_synthetic import SEEDS, semi_synthetic_part
from normal_guidance.training.fit import predict


def order() -> str:
    """D(r, a) of a bell whose slices are not in spatial order."""
    j = torch.arange(1.0, 41)
    bell = (-0.5 * ((j - 20.5) / 5) ** 2).softmax(0)
    generator = torch.Generator().manual_seed(0)
    shuffled = torch.stack([bell[torch.randperm(40, generator=generator)] for _ in range(200)])
    orders = {
        "in order": bell,
        "reversed": bell.flip(0),
        "two neighbours exchanged": bell[torch.cat([torch.arange(14), torch.tensor([15, 14]), torch.arange(16, 40)])],
        "every second slice, then the others": torch.cat([bell[::2], bell[1::2]]),
        "shuffled (mean of 200)": shuffled,
    }
    return table(
        ["slices", "forward KL"],
        [(name, digits(NormalGuidance()(torch.atleast_2d(a)).item(), 4)) for name, a in orders.items()],
    )


def repairs() -> str:
    """What the encoder would see of scans whose stored values are taken as their headers say."""
    rows = []
    for anatomy, encoding, (low, high) in (
        ("head", WRONG_INTERCEPT, (-100, 300)),
        ("abdomen", UNEXTENDED, (-math.inf, math.inf)),
    ):
        hu = render(plan(anatomy, 1, seed=0, slices=12)[0], 96).astype(np.float64)
        read = encoding.store(hu).astype(np.float64) + encoding.intercept
        right, wrong = hu.clip(low, high), read.clip(low, high)
        shown = (anatomy, f"{right.mean():.0f}", f"{wrong.mean():.0f}", f"{(right != wrong).mean():.0%}")
        rows.append((*shown, digits(np.corrcoef(right.ravel(), wrong.ravel())[0, 1], 2)))
    return table(["phantom", "mean HU", "without repair", "pixels changed", "correlation"], rows)


class TestSet(NamedTuple):
    """A semi-synthetic test set, with the attention of max pooling; of the features the first one only."""

    bags: Bags
    counts: Tensor


@cache
def test_set(seed: int) -> TestSet:
    bags = semi_synthetic_part(seed, "test")
    counts = predict(build_model("max"), bags).attention
    small = Bags(bags.features[:, :1].clone(), bags.lengths, bags.labels, bags.slice_labels)
    return TestSet(small, counts)


def slice_auroc(scores: Tensor, bags: Bags) -> float:
    assert bags.slice_labels is not None
    return localization(scores, bags.slice_labels, bags.lengths).mean_auroc.item()


def draws() -> str:
    return table(
        ["seed", "positive", "max pooling", "published"],
        [
            (
                seed,
                int(test_set(seed).bags.labels.sum()),
                digits(slice_auroc(test_set(seed).counts, test_set(seed).bags), 16),
                digits(published_seed("localization_auroc", "max", "semi-synthetic", seed) or math.nan, 16),
            )
            for seed in SEEDS
        ],
    )


def gray() -> str:
    """One gray channel through summed filters, beside three equal channels through the filters as they are."""
    torch.manual_seed(0)
    layer, image = torch.nn.Conv2d(3, 768, 16, stride=16), torch.randn(4, 1, 224, 224)
    three = layer(image.expand(-1, 3, -1, -1))
    one = F.conv2d(image, layer.weight.sum(1, keepdim=True), layer.bias, stride=16)
    change = (one - three).abs().max() / three.abs().max()
    return table(["", "largest difference / largest value"], [("summed filters, float32", f"{change:.0e}")])
