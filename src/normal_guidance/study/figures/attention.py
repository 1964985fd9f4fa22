"""Numbers along the slices of scans: attention, what each divergence does to it, its heads, and positive slices."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import cycle
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int, Num
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.patches import Rectangle
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
from normal_guidance.core.methods import BEYOND, EVERY_METHOD, method_title
from normal_guidance.show.figure_style import (
    COLORS,
    DIVERGENCE_COLORS,
    RED,
    TRUTH,
    WIDTH,
    fill_truth,
    label_slices,
    method_color,
    shortened,
    styled,
)

ROWS = (("abmil", "smap", "ng"), ("transmil", "smtp", "mhng"))  # methods that share a row of panels, as in the paper

PANELS = (*ROWS, *(tuple(name for name, about in BEYOND.items() if about.guided == guided) for guided in (False, True)))
"""The paper's rows, then methods that it does not have, without guidance and with it; others share one more row."""

SCANS = 4  # scans per dataset that the paper shows
CURVES_HEIGHT = 1.9  # inches: a row of panels with one line of legend

LEGEND_LINE, LEGEND_LETTER, LEGEND_HEIGHT = 0.7, 0.068, 0.2
"""Inches that the legend needs: for the line and margins of a column, per letter of a name, and per row."""


@dataclass(frozen=True, eq=False)
class AttendedScan:
    """One scan's attention by method, with its slice labels and some of its slices where they are available.

    Args:
        title: the scan's name; a long one is shortened.
        attention: one number per slice, by the method's name in `METHODS`.
        slice_labels: 1 for the slices to fill.
        thumbnails: (slice number from 1, image) in the order of the slices, drawn in grey from the darkest to the
            brightest of all images of this scan.

    Example:
        >>> import torch
        >>> AttendedScan("A17", {"ng": torch.ones(3)}, thumbnails=[(4, np.zeros((8, 8)))])
        Traceback (most recent call last):
        normal_guidance.base.errors.UserError: scan 'A17' has 3 slices and a thumbnail of slice 4; slices count from 1
    """

    title: str
    attention: Mapping[str, Array]
    slice_labels: Array | None = None
    thumbnails: Sequence[tuple[int, Num[np.ndarray, "_ _"]]] | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.attention, Mapping) or not self.attention:
            raise UserError(f"scan {self.title!r} has no attention; give a dict: one number a slice by a method's name")
        for method in self.attention:
            if len(curve := self.curve(method)) != self.slices:
                raise UserError(
                    f"scan {self.title!r}: {len(curve)} slices by {method}, {self.slices} by another method; "
                    "give attention over the same slices"
                )
        self.truth()
        for number, _ in self.thumbnails or ():
            if not 1 <= number <= self.slices:
                raise UserError(
                    f"scan {self.title!r} has {self.slices} slices and a thumbnail of slice {number}; "
                    "slices count from 1"
                )

    @property
    def slices(self) -> int:
        return len(self.curve(next(iter(self.attention))))

    def curve(self, method: str) -> Float[Tensor, "slices"]:
        return with_axes(self.attention[method], f"scan {self.title!r}: attention by {method}", "slices")

    def truth(self) -> Int[Tensor, "slices"] | None:
        return _truth(self.slice_labels, self.slices, f"scan {self.title!r}: slice labels")


def _truth(slice_labels: Array | None, slices: int, name: str) -> Int[Tensor, "slices"] | None:
    if slice_labels is None:
        return None
    labels = with_axes(slice_labels, name, "slices")
    if len(labels) != slices:
        raise UserError(f"{name} are {len(labels)} for {slices} slices; give one for each slice")
    return labels.long()


def random_scans(candidates: Sequence[int], count: int = SCANS, *, seed: int = 0) -> list[int]:
    """Choose at most `count` candidates at random, in their order."""
    chosen = np.random.default_rng(seed).permutation(len(candidates))[:count]
    return [candidates[number] for number in sorted(chosen)]


@styled
def plot_attention(scans: Sequence[AttendedScan]) -> Figure:
    """Attention along the slices: one column per scan, one row for each of `PANELS`, thumbnails above.

    Slices labelled positive are filled.  Each curve is scaled to its peak: a narrow bell would flatten the others.

    Example:
        >>> import torch
        >>> scan = AttendedScan("scan 1", {"abmil": torch.rand(30)}, torch.ones(30, dtype=torch.int64))
        >>> len(plot_attention([scan]).axes)
        1
    """
    rows = _rows(scans)
    width = WIDTH if len(scans) > 2 else 3.6 * len(scans)
    most = max(len(scan.thumbnails or ()) for scan in scans)
    strip = 0.9 * width / len(scans) / most + 0.2 if most else 0.0  # inches: square thumbnails and their numbers
    titles = [[method_title(method) for method in methods] for methods in rows]
    lines = [math.ceil(len(names) / legend_columns(names, width)) for names in titles]
    heights = [CURVES_HEIGHT + LEGEND_HEIGHT * (count - 1) for count in lines]
    heights[0] += strip + 0.25  # titles
    heights[-1] += 0.2  # label of the x axis
    figure = Figure(figsize=(width, sum(heights)), layout="constrained")
    parts = figure.subfigures(len(rows), 1, height_ratios=heights, squeeze=False)[:, 0]
    for part, methods in zip(parts, rows, strict=True):
        is_first = part is parts[0]
        ratios = [strip, CURVES_HEIGHT - 0.6] if is_first and strip else [1]
        axes = part.subplots(len(ratios), len(scans), height_ratios=ratios, squeeze=False)
        for scan, top, panel in zip(scans, axes[0], axes[-1], strict=True):
            _draw_scan(panel, scan, methods)
            panel.tick_params(labelleft=scan is scans[0])
            if top is not panel:
                _draw_thumbnails(top, panel, scan, most)
            if is_first:
                top.set_title(shortened(scan.title))
            label_slices(panel, "slice" if part is parts[-1] else "")
        axes[-1][0].set_ylabel("attention / its peak")
        entries: dict[str, Artist] = {}
        for panel in axes[-1]:
            handles, names = panel.get_legend_handles_labels()
            entries |= dict(zip(names, handles, strict=True))
        if not is_first:  # the slice labels are explained in one row only
            entries.pop(TRUTH, None)
        names = list(entries)
        part.legend(list(entries.values()), names, loc="outside upper center", ncols=legend_columns(names, width))
    return figure


def _rows(scans: Sequence[AttendedScan]) -> list[list[str]]:
    if not scans:
        raise UserError("there is no scan to draw; give at least one")
    methods = list(scans[0].attention)
    for method in methods:
        method_color(method)  # an unknown method is an error
    for scan in scans:
        if set(scan.attention) != set(methods):
            raise UserError(
                f"scan {scan.title!r} has attention of {', '.join(scan.attention)}, {scans[0].title!r} of "
                f"{', '.join(methods)}; give the same methods for all scans"
            )
    known = {method for row in PANELS for method in row}
    rows = [[method for method in row if method in methods] for row in PANELS]
    rows.append([method for method in methods if method not in known])
    return [row for row in rows if row]


def _draw_scan(panel: Axes, scan: AttendedScan, methods: Sequence[str]) -> None:
    slices = np.arange(1, scan.slices + 1)
    fill_truth(panel, scan.truth())
    for method in methods:
        attention, color, title = scan.curve(method), method_color(method), method_title(method)
        peak, guided = attention.max(), method in EVERY_METHOD and EVERY_METHOD[method].guided
        panel.plot(slices, attention / peak, color=color, label=title, lw=1.8 if guided else 1.3)
    panel.set(xlim=(0.5, scan.slices + 0.5), ylim=(0, 1.12), yticks=[0, 0.5, 1])


def _draw_thumbnails(strip: Axes, panel: Axes, scan: AttendedScan, most: int) -> None:
    """Draw images side by side, numbered, framed in red if positive, with a mark on the panel; `most` have room."""
    thumbnails, truth = scan.thumbnails or (), scan.truth()
    darkest = min((float(image.min()) for _, image in thumbnails), default=0.0)
    brightest = max((float(image.max()) for _, image in thumbnails), default=0.0)
    for column, (number, image) in enumerate(thumbnails):
        height, width = np.array(image.shape) / max(image.shape) * 0.92  # the rest of its unit square is margin
        middle = column + 0.5
        left, right, bottom, top = middle - width / 2, middle + width / 2, 0.5 - height / 2, 0.5 + height / 2
        strip.imshow(image, cmap="gray", vmin=darkest, vmax=brightest, extent=(left, right, bottom, top))
        positive = truth is not None and bool(truth[number - 1] == 1)
        edge, thickness = (RED, 1.6) if positive else ("0.6", 0.6)
        strip.add_patch(Rectangle((left, bottom), width, height, fill=False, edgecolor=edge, lw=thickness))
        strip.text(middle, -0.05, f"{number}", ha="center", va="top", fontsize=7.5)
        panel.plot(number, 1.08, ls="", marker="v", ms=3.5, color="0.3")
    middle = len(thumbnails) / 2
    strip.set(xlim=(middle - most / 2, middle + most / 2), ylim=(-0.25, 1), aspect="equal")
    strip.set_axis_off()


def legend_columns(names: Sequence[str], width: float) -> int:
    """The largest number of columns that fit into a width in inches; matplotlib fills them one after the other."""
    for columns in range(len(names), 1, -1):
        widest = [max(map(len, column)) for column in np.array_split(np.array(names, dtype=object), columns)]
        if sum(LEGEND_LINE + LEGEND_LETTER * letters for letters in widest) <= width:
            return columns
    return 1


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


@styled
def plot_divergences(attention: Array, *, slice_labels: Array | None = None) -> Figure:
    """One panel per divergence: attention, its normal reference, and an arrow on each slice for the `pull` of guidance.

    Gradients of the three divergences differ in size.  In each panel the longest arrow is as long as the largest
    distance of attention from its reference; the panel says by how much arrows were stretched for that.

    Example:
        >>> len(plot_divergences(torch.rand(30)).axes)
        3
    """
    attention = with_axes(attention, "attention", "slices")
    attention = attention.double() / attention.sum()
    truth = _truth(slice_labels, len(attention), "slice_labels")
    reference = normal_reference(attention[None])[0]
    farthest = (reference - attention).abs().max()
    if not 1e-9 < farthest < 1:
        raise UserError(
            "attention equals its normal reference or is not finite, so it has no pull to draw; give another scan's"
        )
    figure = Figure(figsize=(WIDTH, 2.9), layout="constrained")
    panels = figure.subplots(1, len(DIVERGENCES), sharex=True, sharey=True)
    for panel, divergence in zip(panels, DIVERGENCES, strict=True):
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


@styled
def plot_heads(attention: Mapping[str, Array], *, slice_labels: Array | None = None) -> Figure:
    """One row per model: the normal reference of each head, its attention, and the mean of all heads.

    Attention is divided by its sum over the slices first, as guidance does: a class token also attends to itself.

    Example:
        >>> len(plot_heads({"before training": torch.rand(8, 30)}).axes)
        2
    """
    if not isinstance(attention, Mapping) or not attention:
        raise UserError("there are no heads to draw; give a dict: the attention (heads, slices) of a model by its name")
    figure = Figure(figsize=(WIDTH, 0.6 + 1.8 * len(attention)), layout="constrained")
    rows = figure.subplots(len(attention), 2, squeeze=False, sharex=True)
    for (left, right), (title, heads) in zip(rows, attention.items(), strict=True):
        heads = with_axes(heads, f"attention of {title!r}", "heads", "slices")
        heads = heads.double() / heads.sum(-1, keepdim=True)
        truth = _truth(slice_labels, heads.shape[1], "slice_labels")
        _draw_heads(left, normal_reference(heads[None])[0], truth)
        _draw_heads(right, heads, truth)
        left.set(title=f"{title}: references", ylabel="normal reference")
        right.set(title=f"{title}: attention", ylabel="attention")
    for panel in rows[-1]:
        label_slices(panel)
    handles, names = rows[0, 0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names), handlelength=1.2, columnspacing=1.1)
    return figure


def _draw_heads(panel: Axes, curves: Float[Tensor, "heads slices"], slice_labels: Int[Tensor, "slices"] | None) -> None:
    """Draw one curve per head, and their mean: the mixture that the heads form."""
    slices = np.arange(1, curves.shape[1] + 1)
    fill_truth(panel, slice_labels)
    colors = colormaps["viridis"](np.linspace(0, 0.92, len(curves)))
    for number, (curve, color) in enumerate(zip(curves, colors, strict=True), start=1):
        panel.plot(slices, curve, color=color, lw=1.1, label=f"head {number}" if number == 1 else f"{number}")
    panel.plot(slices, curves.mean(0), color="black", lw=2, label="mean of the heads")
    panel.set(xlim=(0.5, curves.shape[1] + 0.5))
    panel.set_ylim(bottom=0)


@styled
def plot_density(densities: Mapping[str, Float[np.ndarray, "bins"]]) -> Figure:
    """Where in a scan the positive slices lie: density by relative position, one panel per dataset or part.

    Example:
        >>> len(plot_density({"head CT": np.ones(20)}).axes)
        1
    """
    if not densities:
        raise UserError("densities are empty; give the density of at least one dataset")
    figure = Figure(figsize=(min(WIDTH, 3.2 * len(densities)), 2.4), layout="constrained")
    panels = figure.subplots(1, len(densities), squeeze=False, sharey=True)[0]
    for panel, (title, density), color in zip(panels, densities.items(), cycle(COLORS), strict=False):
        edges = np.linspace(0, 1, len(density) + 1)
        panel.stairs(density, edges, fill=True, color=color, alpha=0.35)
        panel.stairs(density, edges, color=color, lw=1.4)
        panel.axhline(1, color="0.5", lw=0.8, ls=":")  # slices that are equally likely everywhere
        panel.set(title=title, xlabel="slice / slices of the scan", xlim=(0, 1))
    panels[0].set_ylabel("density of positive slices")
    return figure
