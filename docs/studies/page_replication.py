"""The measurements of docs/replication, one function an item; all together take about a minute on two cores.

They are drawn from fixed seeds, or read from the published numbers.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
import torch
from make_page import short, table
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.guidance import DIVERGENCES, NormalGuidance
from normal_guidance.core.layout import Layout
from normal_guidance.core.methods import METHODS, build_model
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.core.models import CenteredGaussian
from normal_guidance.core.prediction import classification
from normal_guidance.scans.index.manifest import PARTS
from normal_guidance.scans.phantom.drafts import UNEXTENDED, WRONG_INTERCEPT
from normal_guidance.scans.phantom.plan import ANATOMIES, plan
from normal_guidance.scans.phantom.rendering import render
from normal_guidance.statistics.split_results import METRICS, Metric
from normal_guidance.study.drawn import (
    SEEDS,
    bayes_scan_scores,
    semi_synthetic_part,
    shifted_mean,
)
from normal_guidance.study.references import published, published_seed
from normal_guidance.sweep.config import L1_STRENGTHS
from normal_guidance.sweep.loop import predict_bags


def digits(value: float, places: int = 3) -> str:
    """.689 for 0.689, as the paper's readers see it."""
    return f"{value:.{places}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.{places}f}"


def share(flags: Tensor) -> str:
    return f"{flags.double().mean():.0%}"


# ----------------------------------------------------------------------------------------------------
# Data and encoder
# ----------------------------------------------------------------------------------------------------


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
    counts = predict_bags(build_model("max"), bags).attention
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


# ----------------------------------------------------------------------------------------------------
# Guidance
# ----------------------------------------------------------------------------------------------------


LENGTHS = (40, 246, 1083, 1727)
"""Slices of a scan: the middle of head CT, the mean and the longest of chest CT, the longest of abdomen CT."""


def bells(slices: int, width: float, number: int = 1000) -> tuple[Tensor, Tensor, Tensor]:
    """Positions, bells of one width at random places, and their variances, in float64."""
    generator = torch.Generator().manual_seed(1)
    centre = 1 + torch.rand(number, 1, generator=generator, dtype=torch.float64) * (slices - 1)
    j = torch.arange(1, slices + 1, dtype=torch.float64)
    a = (-0.5 * ((j - centre) / width) ** 2).softmax(1)
    mean = (j * a).sum(1, keepdim=True)
    return j, a, ((j - mean).square() * a).sum(1, keepdim=True)


def variance() -> str:
    """How often E[J^2] - E[J]^2, in the precision of the training, misses the variance of a narrow bell."""
    rows = []
    for slices in LENGTHS:
        j, a, truth = bells(slices, 0.5)
        row: list[object] = [slices]
        for dtype in (torch.float32, torch.bfloat16):
            place, weight = j.to(dtype), a.to(dtype)
            mean = (place * weight).sum(1, keepdim=True)
            found = (place * place * weight).sum(1, keepdim=True) - mean * mean
            row += [share((found - truth).abs() > 0.1 * truth), share(found <= 0)]
        rows.append(row)
    header = ["S", "float32: more than 10 % off", "zero or less"]
    return table([*header, "bfloat16: more than 10 % off", "zero or less"], rows)


def uniform() -> str:
    rows = []
    for slices in LENGTHS:
        a = torch.full((1, slices), 1 / slices, dtype=torch.float64)
        rows.append((slices, *(short(NormalGuidance(divergence=kind)(a).item()) for kind in DIVERGENCES)))
    return table(["S", *(kind.replace("_", " ").replace("kl", "KL") for kind in DIVERGENCES)], rows)


def class_token() -> str:
    """What the class token pays to itself before training, and what it adds to the loss."""
    rows = []
    torch.manual_seed(1001)
    model = build_model("mhng")
    for slices, scans in ((20, 64), (60, 64), (246, 16), (1083, 4)):
        layout = Layout.packed([slices] * scans)
        with torch.no_grad():
            log_row = model(torch.randn(slices * scans, 768), layout).log_attention
        own = 1 - log_row.exp().unflatten(1, (scans, slices)).sum(-1)
        on, off = (NormalGuidance(renormalize=way)(log_row, lengths=layout, from_logits=True) for way in (True, False))
        rows.append((slices, digits(own.mean().item(), 4), *(digits(value.item(), 4) for value in (on, off))))
    return table(["S", "share that the class token keeps", "D, renormalize on", "D, off"], rows)


# ----------------------------------------------------------------------------------------------------
# Models and training
# ----------------------------------------------------------------------------------------------------


def gaussian_forms(lengths: Tensor) -> dict[str, Tensor]:
    """Scores of the centred Gaussian: three precisions of the density at positions 1..S, and the published form."""
    centre = (lengths.double() / 2).repeat_interleave(lengths)
    j = torch.cat([torch.arange(1, size + 1, dtype=torch.float64) for size in lengths.tolist()])
    log = -0.5 * (j - centre) ** 2
    published_form = CenteredGaussian(published=True)(torch.zeros(int(lengths.sum()), 1), lengths).slice_scores
    return {
        "log-density": log,
        "float64": log.exp(),
        "float32": log.float().exp(),
        "float64, linspace(1, S-1, S)": published_form,
    }


def gaussian() -> str:
    rows = []
    for anatomy, slices in (("head", 32), ("chest", 64), ("chest", 246), ("chest", 600), ("abdomen", 319)):
        scans = plan(anatomy, 400, seed=0, positive=1.0, slices=slices)
        lengths = torch.tensor([scan.slices for scan in scans])
        labels = torch.cat([torch.from_numpy(scan.slice_labels).long() for scan in scans])
        found = [localization(s, labels, lengths).mean_auroc.item() for s in gaussian_forms(lengths).values()]
        rows.append((anatomy, f"{lengths.min()}-{lengths.max()}", *map(digits, found)))
    for seed in SEEDS:
        bags = test_set(seed).bags
        found = [slice_auroc(scores, bags) for scores in gaussian_forms(bags.lengths).values()]
        rows.append((f"semi-synthetic {seed}", "20-60", *(digits(value, 4) for value in found)))
    return table(["blocks of", "S", *gaussian_forms(torch.tensor([4]))], rows)


def norm(parameters: Sequence[Tensor]) -> float:
    return math.sqrt(sum(float(p.grad.square().sum()) for p in parameters if p.grad is not None))


def clipping() -> str:
    rows: list[Sequence[object]] = []
    for method in ("ng", "mhng"):
        torch.manual_seed(1001)
        model, bags = build_model(method), shifted_mean(64, 1001)
        weights = list(model.parameters())
        moving = sum(int((p != 0).sum()) for p in weights)  # L1 has no gradient at 0
        norms = []
        for guidance in (None, NormalGuidance()):
            model.zero_grad()
            prediction = model(bags.features, bags.layout)
            loss = classification(prediction, bags.labels)
            if guidance is not None:
                loss = loss + guidance(prediction.log_attention, lengths=bags.layout, from_logits=True)
            loss.backward()
            norms.append(norm(weights))
        alphas = [short(alpha / 2 * math.sqrt(moving)) for alpha in L1_STRENGTHS[:-1]]
        rows.append((METHODS[method].title.split(" + ")[0], *alphas, *(digits(value, 2) for value in norms)))
    return table(["", *(f"α = {short(alpha)}" for alpha in L1_STRENGTHS[:-1]), "BCE", "BCE + guidance"], rows)


# ----------------------------------------------------------------------------------------------------
# Selection
# ----------------------------------------------------------------------------------------------------


def difficulty() -> str:
    """How well the Bayes oracle ranks the scans of each set: how hard the set happens to be."""
    rows = []
    for seed in SEEDS:
        found = []
        for part in PARTS:
            bags = semi_synthetic_part(seed, part)
            found.append(auroc(bayes_scan_scores(bags), bags.labels).item())
        rows.append((seed, *(digits(value, 4) for value in found)))
    return table(["seed", "training set", "validation set", "test set"], rows)


# ----------------------------------------------------------------------------------------------------
# Ceilings
# ----------------------------------------------------------------------------------------------------


DATASETS = ("head-ct", "chest-ct", "abdomen-ct")


def ceilings() -> str:
    """Every cell of the paper's tables in which a method reaches the ceiling."""
    rows = []
    for metric in METRICS:
        for dataset in ("semi-synthetic", *DATASETS):
            ceiling = published(metric, "ceiling", dataset)
            for method in METHODS:
                cell = published(metric, method, dataset)
                if cell and ceiling and cell.mean >= ceiling.mean:
                    relation = "beats" if cell.mean > ceiling.mean else "equals"
                    rows.append((_title(metric), dataset, method, digits(cell.mean), digits(ceiling.mean), relation))
    return table(["table", "data", "method", "method's", "ceiling's", ""], rows)


def _title(metric: Metric) -> str:
    return metric.replace("_auroc", " AUROC").replace("_auprc", " AUPRC")


FRACTIONS = {"head-ct": 0.350, "chest-ct": 0.093, "abdomen-ct": 0.119}
"""Mean share of a scan in a block, as the paper's third block table prints it."""


def blocks() -> str:
    """Blocks a scan x share of a block = share of positive slices, which is mean pooling's AUPRC."""
    swapped = FRACTIONS | {"chest-ct": FRACTIONS["abdomen-ct"], "abdomen-ct": FRACTIONS["chest-ct"]}
    rows = []
    for dataset in DATASETS:
        counts = ANATOMIES[dataset.removesuffix("-ct")].bags_by_blocks
        per_scan = sum((i + 1) * n for i, n in enumerate(counts)) / sum(counts)
        mean_pooling = published("localization_auprc", "mean", dataset)
        assert mean_pooling is not None
        both = (digits(per_scan * one[dataset]) for one in (FRACTIONS, swapped))
        rows.append((dataset, digits(per_scan, 2), *both, digits(mean_pooling.mean)))
    header = ["data", "blocks a positive scan", "x share, rows as printed", "rows exchanged"]
    return table([*header, "mean pooling's AUPRC"], rows)


SECTIONS: dict[str, Callable[[], str]] = {
    section.__name__: section
    for section in (
        *(order, repairs, draws),
        *(gaussian, variance, class_token, uniform),
        *(clipping, difficulty),
        *(ceilings, blocks),
    )
}
