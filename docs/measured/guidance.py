"""Moments, reference, clamping, divergences and the class token's own share."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from measured.text import digits, share, short, table
from normal_guidance.core.guidance import DIVERGENCES, NormalGuidance, normal_reference
from normal_guidance.core.layout import Layout
from normal_guidance.core.models import build_model
from normal_guidance.core.normals import VARIANCE_FLOOR

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


def textbook_moments(j: Tensor, a: Tensor) -> tuple[Tensor, Tensor]:
    """E[J] and E[J^2] - E[J]^2, in the precision of the arguments."""
    mean = (j * a).sum(1, keepdim=True)
    return mean, (j * j * a).sum(1, keepdim=True) - mean * mean


def variance() -> str:
    rows = []
    for slices in LENGTHS:
        for width in (0.5, 1.0, 3.0, 30.0):
            j, a, truth = bells(slices, width)
            row: list[object] = [slices, width]
            for dtype in (torch.float32, torch.bfloat16):
                _, found = textbook_moments(j.to(dtype), a.to(dtype))
                row += [share((found - truth).abs() > 0.1 * truth), share(found <= 0)]
            rows.append(row)
    header = ["S", "sd of the bell", "float32: more than 10 % off", "zero or less"]
    return table([*header, "bfloat16: more than 10 % off", "zero or less"], rows)


def sum_of_reference(j: Tensor, mean: Tensor, var: Tensor) -> Tensor:
    """Of r by the density divided by its sum, which is floored at 1e-6."""
    var = var.clamp_min(VARIANCE_FLOOR)
    density = (-(j - mean).square() / (2 * var)).exp() / (2 * math.pi * var).sqrt()
    return (density / density.sum(1, keepdim=True).clamp_min(1e-6)).sum(1)


def reference() -> str:
    rows = []
    for slices in LENGTHS:
        for width in (0.3, 0.5, 1.0):
            j, a, _ = bells(slices, width)
            j, a = j.float(), a.float()
            mean, var = textbook_moments(j, a)
            centred = ((j - mean).square() * a).sum(1, keepdim=True)
            off = [(sum_of_reference(j, mean, v) - 1).abs() > 1e-3 for v in (var, centred)]
            off.append((normal_reference(a).sum(1) - 1).abs() > 1e-3)
            rows.append((slices, width, *(f"{one.double().mean():.1%}" for one in off)))
    header = ["S", "sd of the bell", "exp, then divide; E[J²] - E[J]²", "exp, then divide; centred", "ours"]
    return table(header, rows)


def clamp() -> str:
    generator, spreads, rows = torch.Generator().manual_seed(0), (1, 2, 3, 5), []
    for slices in (40, 246, 1000, 1727):
        lost = [(sd * torch.randn(500, slices, generator=generator)).softmax(1) < 1e-6 for sd in spreads]
        per_bag = lost[-1].double().mean(1)
        spread = f"{per_bag.quantile(0.05):.0%} to {per_bag.quantile(0.95):.0%}"
        rows.append((slices, *(share(one) for one in lost), spread))
    return table(["S", *(f"logits of sd {sd}" for sd in spreads), "sd 5: 5th to 95th percentile of scans"], rows)


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
