"""Attention along the slices of scans: which slices each method attends to, and which are labelled positive."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float, Int, Num
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import Array, with_axes
from normal_guidance.core.guidance import normal_reference
from normal_guidance.core.methods import BEYOND, EVERY_METHOD, method_title
from normal_guidance.show.figure_style import (
    RED,
    TRUTH,
    WIDTH,
    fill_truth,
    label_slices,
    method_color,
    save,
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
        if (truth := self.truth()) is not None and len(truth) != self.slices:
            raise UserError(f"scan {self.title!r}: {len(truth)} slice labels for {self.slices} slices; give as many")
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
        if self.slice_labels is None:
            return None
        return with_axes(self.slice_labels, f"scan {self.title!r}: slice labels", "slices").long()


def random_scans(candidates: Sequence[int], count: int = SCANS, *, seed: int = 0) -> list[int]:
    """Choose at most `count` candidates at random, in their order."""
    chosen = np.random.default_rng(seed).permutation(len(candidates))[:count]
    return [candidates[number] for number in sorted(chosen)]


def draw_attention(scans: Sequence[AttendedScan], path: Path, *, reference: str | None = None) -> Path:
    """Writes the figure of `plot_attention`.

    Example:
        >>> import tempfile, torch
        >>> scan = AttendedScan("scan 1", {"abmil": torch.rand(30)}, torch.ones(30, dtype=torch.int64))
        >>> draw_attention([scan], Path(tempfile.mkdtemp()) / "attention.png").name
        'attention.png'
    """
    return save(plot_attention(scans, reference=reference), path)


@styled
def plot_attention(scans: Sequence[AttendedScan], *, reference: str | None = None) -> Figure:
    """Attention along the slices: one column per scan, one row for each of `PANELS`, thumbnails above.

    Slices labelled positive are filled.  Each curve is scaled to its peak: a narrow bell would flatten the others.
    The normal reference of the method `reference` is dashed.
    """
    rows = _rows(scans)
    if reference is not None and reference not in scans[0].attention:
        drawn = ", ".join(scans[0].attention)
        raise UserError(f"reference {reference!r} is not among the methods to draw; choose one of {drawn}")
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
            _draw_scan(panel, scan, methods, reference)
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


def _draw_scan(panel: Axes, scan: AttendedScan, methods: Sequence[str], reference: str | None) -> None:
    slices = np.arange(1, scan.slices + 1)
    if (truth := scan.truth()) is not None:
        fill_truth(panel, truth)
    for method in methods:
        attention, color, title = scan.curve(method), method_color(method), method_title(method)
        peak, guided = attention.max(), method in EVERY_METHOD and EVERY_METHOD[method].guided
        panel.plot(slices, attention / peak, color=color, label=title, lw=1.8 if guided else 1.3)
        if method == reference:
            bell = normal_reference(attention[None])[0] / peak
            panel.plot(slices, bell, color=color, ls="--", lw=1, label=f"{title}: normal reference")
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
