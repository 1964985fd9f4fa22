"""The centred Gaussian, smoothing, and what training does to parameters and batches."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from measured.data import slice_auroc, test_set
from measured.text import digits, short, table
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.metrics import localization
from normal_guidance.core.models import METHODS, CenteredGaussian, build_model
from normal_guidance.simulate.phantom.plan import plan
from normal_guidance.simulate.semi_synthetic import SEEDS, shifted_mean
from normal_guidance.training.config import L1_STRENGTHS
from normal_guidance.training.objective import objective


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


def smoothing() -> str:
    """Ten steps with D^-1 A beside D^-1/2 A D^-1/2: the weights that the end slices get."""
    adjacency = torch.diag(torch.ones(39, dtype=torch.float64), 1)
    adjacency = adjacency + adjacency.T
    degree, operators = adjacency.sum(1), []
    for matrix in (adjacency / degree[:, None], adjacency / (degree[:, None] * degree).sqrt()):
        weights = torch.eye(40, dtype=torch.float64)
        for _ in range(10):
            weights = 0.5 * torch.eye(40, dtype=torch.float64) + 0.5 * matrix @ weights
        operators.append(weights)
    change = (operators[0] - operators[1]).abs().sum(1)
    return table(
        ["", "end slice", "5th slice", "middle slice"],
        [
            ("sum of the weights, D^-1 A", *(digits(operators[0].sum(1)[i].item()) for i in (0, 4, 20))),
            ("sum of the weights, D^-1/2 A D^-1/2", *(digits(operators[1].sum(1)[i].item()) for i in (0, 4, 20))),
            ("sum of the weights' differences", *(digits(change[i].item()) for i in (0, 4, 20))),
        ],
    )


def parameters() -> str:
    rows = []
    for method in ("mean", "abmil", "smap", "transmil", "smtp"):
        torch.manual_seed(1001)
        named = dict(build_model(method).named_parameters())
        counts = {name: p.numel() for name, p in named.items()}
        matrices = sum(n for name, n in counts.items() if named[name].ndim > 1 and "token" not in name)
        rows.append((METHODS[method].title, f"{sum(counts.values()):,}", f"{sum(counts.values()) - matrices:,}"))
    return table(["model", "parameters", "of these no weights (biases, norms, class token, alpha)"], rows)


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
            objective(prediction, bags.labels, bags.layout, weights, guidance=guidance).backward()
            norms.append(norm(weights))
        alphas = [short(alpha / 2 * math.sqrt(moving)) for alpha in L1_STRENGTHS[:-1]]
        rows.append((METHODS[method].title.split(" + ")[0], *alphas, *(digits(value, 2) for value in norms)))
    return table(["", *(f"α = {short(alpha)}" for alpha in L1_STRENGTHS[:-1]), "BCE", "BCE + guidance"], rows)


def batches() -> str:
    """Scans that an epoch leaves out; CT's training sets are four sixths of the scans, to the nearest."""
    sizes = {
        "semi-synthetic": 10_000,
        "head-ct": 21_744 * 4 // 6,
        "chest-ct": 7_279 * 4 // 6,
        "abdomen-ct": 4_711 * 4 // 6,
    }
    rows = [(name, f"{n:,}", n // 64, n % 64, f"{n % 64 / n:.2%}") for name, n in sizes.items()]
    return table(["training set", "scans", "batches of 64", "left out of an epoch", "share"], rows)
