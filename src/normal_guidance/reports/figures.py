"""Figures, each drawn by one function from plain tensors and written to a file."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from pathlib import Path

import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from torch import Tensor

from normal_guidance.core.guidance import normal_reference

COLORS = ("#1F77B4", "#FF7F0E", "#2CA02C", "#D62728")
"""The paper's: blue, orange, green, red."""


@dataclass(frozen=True, eq=False)
class AttendedScan:
    """One scan's attention by method, with the truth where it is known."""

    title: str
    attention: Mapping[str, Float[Tensor, "slices"]]
    slice_labels: Int[Tensor, "slices"] | None = None


def draw_attention(scans: Sequence[AttendedScan], path: Path, *, guided: str | None = None) -> Path:
    """Attention along the slices, one panel a scan: truth filled, one line a method, the guided one's normal dashed.

    Each curve is scaled to its own peak, because a narrow bell would flatten the others.

    Example:
        >>> import tempfile
        >>> scan = AttendedScan("scan 1", {"ABMIL": torch.rand(30)}, torch.ones(30, dtype=torch.int64))
        >>> draw_attention([scan], Path(tempfile.mkdtemp()) / "attention.png").name
        'attention.png'
    """
    figure = Figure(figsize=(3.2 * len(scans), 2.9), layout="constrained")
    panels = figure.subplots(1, len(scans), squeeze=False, sharey=True)[0]
    for panel, scan in zip(panels, scans, strict=True):
        _draw_scan(panel, scan, guided)
    panels[0].set_ylabel("attention (share of its peak)")
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), frameon=False)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path


def _draw_scan(panel: Axes, scan: AttendedScan, guided: str | None) -> None:
    first = next(iter(scan.attention.values()))
    slices = torch.arange(1, len(first) + 1)
    if scan.slice_labels is not None:
        panel.fill_between(
            slices, 0, 1.05, where=(scan.slice_labels == 1).numpy(), step="mid", color="#D62728", alpha=0.15, lw=0,
            label="slices labelled positive",
        )  # fmt: skip
    for (method, attention), color in zip(scan.attention.items(), COLORS, strict=False):
        peak = attention.max()
        panel.plot(slices, attention / peak, color=color, label=method, lw=1.6)
        if method == guided:
            reference = normal_reference(attention[None])[0]
            panel.plot(slices, reference / peak, color=color, ls="--", lw=1, label=f"{method}: normal reference")
    panel.set(title=scan.title, xlabel="slice", xlim=(1, len(first)), ylim=(0, 1.05))
    panel.spines[["top", "right"]].set_visible(False)


def draw_density(densities: Mapping[str, Float[np.ndarray, "bins"]], path: Path) -> Path:
    """Where in a scan the positive slices lie: density over the relative position, one panel a dataset or part.

    Example:
        >>> import tempfile
        >>> draw_density({"head CT": np.ones(20)}, Path(tempfile.mkdtemp()) / "density.png").name
        'density.png'
    """
    figure = Figure(figsize=(3.2 * len(densities), 2.6), layout="constrained")
    panels = figure.subplots(1, len(densities), squeeze=False, sharey=True)[0]
    for panel, (title, density), color in zip(panels, densities.items(), cycle(COLORS), strict=False):
        edges = np.linspace(0, 1, len(density) + 1)
        panel.stairs(density, edges, fill=True, color=color, alpha=0.35)
        panel.stairs(density, edges, color=color, lw=1.4)
        panel.axhline(1, color="0.5", lw=0.8, ls=":")  # what slices that lie anywhere alike would show
        panel.set(title=title, xlabel="slice / slices of the scan", xlim=(0, 1))
        panel.spines[["top", "right"]].set_visible(False)
    panels[0].set_ylabel("density of positive slices")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)
    return path
