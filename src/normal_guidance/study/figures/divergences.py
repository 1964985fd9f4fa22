"""The paper's two figures about the method itself: what each divergence does, and the reference of each head."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import Array, with_axes
from normal_guidance.core.guidance import (
    DIVERGENCE_TITLES,
    DIVERGENCES,
    DivergenceName,
    NormalGuidance,
    normal_reference,
)
from normal_guidance.show.figure_style import DIVERGENCE_COLORS, WIDTH, fill_truth, label_slices, save, styled

BEHAVIOUR: dict[DivergenceName, str] = {
    "forward_kl": "mode-covering",
    "reverse_kl": "mode-seeking",
    "squared_error": "mean-seeking",
}
"""The paper's term for each divergence."""

ARROWS: dict[str, Any] = {
    **{"angles": "xy", "scale_units": "xy", "scale": 1},
    **{"headwidth": 3.5, "headlength": 4, "headaxislength": 3.6, "width": 0.006, "minlength": 0},
}
"""In data units."""


def pull(attention: Float[Tensor, "slices"], divergence: DivergenceName) -> Float[Tensor, "slices"]:
    r"""Where guidance pulls each slice: $-\partial D(r, a)/\partial z_j$ for scores z of $a = \mathrm{softmax}(z)$."""
    scores = attention.log().detach().requires_grad_()
    loss = NormalGuidance(divergence=divergence)(scores[None], from_logits=True)
    (gradient,) = torch.autograd.grad(loss, scores)
    return -gradient


def draw_divergences(attention: Array, path: Path, *, slice_labels: Array | None = None) -> Path:
    """Writes the figure of `plot_divergences`.

    Example:
        >>> import tempfile
        >>> draw_divergences(torch.rand(30), Path(tempfile.mkdtemp()) / "divergences.png").name
        'divergences.png'
    """
    return save(plot_divergences(attention, slice_labels=slice_labels), path)


@styled
def plot_divergences(attention: Array, *, slice_labels: Array | None = None) -> Figure:
    """One panel per divergence: attention, its normal reference, and an arrow on each slice for the `pull` of guidance.

    Gradients of the three divergences differ in size.  In each panel the longest arrow is as long as the largest
    distance of attention from its reference; the panel says by how much arrows were stretched for that.
    """
    attention = with_axes(attention, "attention", "slices")
    attention = attention.double() / attention.sum()
    truth = _truth(slice_labels, len(attention))
    reference = normal_reference(attention[None])[0]
    farthest = (reference - attention).abs().max()
    if not 1e-9 < farthest < 1:
        raise UserError(
            "attention equals its normal reference or is not finite, so there is no pull to draw; give another scan's"
        )
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    panels = figure.subplots(1, len(DIVERGENCES), sharex=True, sharey=True)
    for panel, divergence in zip(panels, DIVERGENCES, strict=True):
        if truth is not None:
            fill_truth(panel, truth)
        arrows = pull(attention, divergence)
        stretch = farthest / arrows.abs().max()
        slices, color = np.arange(1, len(attention) + 1), DIVERGENCE_COLORS[divergence]
        panel.plot(slices, attention, color="0.25", lw=0.8, marker="o", ms=2.6, label="attention $a$")
        panel.plot(slices, reference, color="0.25", lw=1.1, ls="--", label="its normal reference $r$")
        panel.quiver(slices, attention, np.zeros(len(slices)), stretch * arrows, color=color, zorder=3, **ARROWS)
        panel.set_title(f"{DIVERGENCE_TITLES[divergence]} ({BEHAVIOUR[divergence]})\narrows stretched × {stretch:.3g}")
        panel.set_xlim(0.5, len(attention) + 0.5)
        label_slices(panel)
    panels[0].set_ylabel("attention")
    panels[0].set_ylim(bottom=0)
    handles, names = panels[0].get_legend_handles_labels()
    handles.append(Line2D([], [], color="0.25", ls="", marker=r"$\uparrow$", ms=8))
    names.append(r"$-\partial D/\partial z$ for $a = \mathrm{softmax}(z)$")
    figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    return figure


def draw_heads(attention: Mapping[str, Array], path: Path, *, slice_labels: Array | None = None) -> Path:
    """Writes the figure of `plot_heads`.

    Example:
        >>> import tempfile
        >>> draw_heads({"before training": torch.rand(8, 30)}, Path(tempfile.mkdtemp()) / "heads.png").name
        'heads.png'
    """
    return save(plot_heads(attention, slice_labels=slice_labels), path)


@styled
def plot_heads(attention: Mapping[str, Array], *, slice_labels: Array | None = None) -> Figure:
    """One row per model: the normal reference of each head, its attention, and the mean of all heads.

    Attention is divided by its sum over the slices first, as guidance does: a class token also attends to itself.
    """
    if not isinstance(attention, Mapping) or not attention:
        raise UserError("there are no heads to draw; give a dict: the attention (heads, slices) of a model by its name")
    figure = Figure(figsize=(WIDTH, 0.6 + 1.8 * len(attention)), layout="constrained")
    rows = figure.subplots(len(attention), 2, squeeze=False, sharex=True)
    for (left, right), (title, heads) in zip(rows, attention.items(), strict=True):
        heads = with_axes(heads, f"attention of {title!r}", "heads", "slices")
        heads = heads.double() / heads.sum(-1, keepdim=True)
        truth = _truth(slice_labels, heads.shape[1])
        _draw_curves(left, normal_reference(heads[None])[0], truth)
        _draw_curves(right, heads, truth)
        left.set(title=f"{title}: references", ylabel="normal reference")
        right.set(title=f"{title}: attention", ylabel="attention")
    for panel in rows[-1]:
        label_slices(panel)
    handles, names = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), handlelength=1.2, columnspacing=1.1)
    return figure


def _truth(slice_labels: Array | None, slices: int) -> Int[Tensor, "slices"] | None:
    if slice_labels is None:
        return None
    labels = with_axes(slice_labels, "slice_labels", "slices")
    if len(labels) != slices:
        raise UserError(f"slice_labels are {len(labels)} for {slices} slices; give one for each slice")
    return labels.long()


def _draw_curves(
    panel: Axes, curves: Float[Tensor, "heads slices"], slice_labels: Int[Tensor, "slices"] | None
) -> None:
    """Draw one curve per head, and their mean: the mixture that the heads form."""
    slices = np.arange(1, curves.shape[1] + 1)
    if slice_labels is not None:
        fill_truth(panel, slice_labels)
    colors = colormaps["viridis"](np.linspace(0, 0.92, len(curves)))
    for number, (curve, color) in enumerate(zip(curves, colors, strict=True), start=1):
        panel.plot(slices, curve, color=color, lw=1.1, label=f"head {number}" if number == 1 else f"{number}")
    panel.plot(slices, curves.mean(0), color="black", lw=2, label="mean of the heads")
    panel.set(xlim=(0.5, curves.shape[1] + 0.5))
    panel.set_ylim(bottom=0)
