"""One scan as a picture: attention along its slices, the slices labelled positive, and the slices themselves."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from textwrap import fill

import numpy as np
import torch
from jaxtyping import Float, Int
from matplotlib.figure import Figure
from torch import Tensor

from normal_guidance.fit.bundle import Bundle
from normal_guidance.scans.features.windows import read_windowed
from normal_guidance.scans.index.manifest import ScanRow
from normal_guidance.show.figure_style import GREEN, ORANGE, WIDTH, Picture, fill_truth, label_slices, styled

ACROSS = 8  # slices under the curve: of each eighth of the scan the one with the highest attention
LETTERS = 120  # of a line of the title

Images = Sequence[tuple[str, Float[np.ndarray, "rows columns"]]]  # slices and their names


def slices_under(row: ScanRow, root: Path, attention: Float[Tensor, "slices"], bundle: Bundle) -> Images:
    """Slices from all parts of a scan in the encoder's window; raises UnreadableError where a file cannot be read."""
    _, saw = bundle.encoding()
    parts = torch.arange(len(row)).tensor_split(min(ACROSS, len(row)))
    places = [int(part[attention[part].argmax()]) for part in parts]
    images = read_windowed(row, root, places, saw.windows[0], saw.field, repair=bundle.repair)
    return list(zip(map(row.slice_name, places), images, strict=True))


@styled
def plot_scan(
    title: str,
    attention: Float[Tensor, "slices"],
    images: Images = (),
    *,
    truth: Int[Tensor, "slices"] | None = None,
    keys: Sequence[int] = (),
    interval: tuple[int, int] | None = None,
) -> Figure:
    """Attention along the slices, and some of the slices below; key slices and the interval are counted from 1."""
    figure = Picture(figsize=(WIDTH, 3.9 if images else 2.6), layout="constrained")
    figure.suptitle(fill(title, LETTERS), fontsize=9)
    grid = figure.add_gridspec(2, max(1, len(images)), height_ratios=(2, 1.3)) if images else figure.add_gridspec(1, 1)
    panel, slices = figure.add_subplot(grid[0, :]), np.arange(1, len(attention) + 1)
    fill_truth(panel, truth)
    if interval is not None:
        panel.axvspan(interval[0] - 0.5, interval[1] + 0.5, color=ORANGE, alpha=0.2, lw=0, label="interval")
    panel.plot(slices, attention, color=GREEN, lw=1.8, marker="o" if len(slices) < 60 else "", ms=3, label="attention")
    if keys:
        heights = [1.1 * float(attention.max())] * len(keys)
        panel.plot(keys, heights, ls="", marker="v", ms=5, color="0.2", label="key slices", clip_on=False)
    panel.set(xlim=(0.5, len(slices) + 0.5), ylabel="attention")
    panel.set_ylim(bottom=0)
    label_slices(panel)
    panel.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=4)
    low, high = (edge([edge(image) for _, image in images], initial=0) for edge in (np.min, np.max))
    for column, (name, image) in enumerate(images):
        shown = figure.add_subplot(grid[1, column])
        shown.imshow(image, cmap="gray", vmin=low, vmax=high)
        shown.set_title(f"slice {name}".replace(" (", "\n("), fontsize=8)  # in two lines: eight stand side by side
        shown.set_axis_off()
    return figure
