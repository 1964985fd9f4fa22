"""Draws docs/images/prostatex-scans.png: a success and a failure of `nguide fit` in real prostate MRI.

    git clone https://github.com/rcuocolo/PROSTATEx_masks
    nguide index prostatex PROSTATEx_masks -o index
    nguide encode index --field 70 --offline -o store
    nguide fit store -o model
    .venv/bin/python docs/draw_readme_picture.py index store model

The scores are the model's own, out of fold: every scan by members that did not see its patient.  The two scans are
picked by rank, not by eye: of the positive scans with slice labels in the order of slice AUROC, those at the 75th and
at the 5th percentile.  The script prints the numbers of the caption.

Masks: Cuocolo et al., "PROSTATEx masks" (github.com/rcuocolo/PROSTATEx_masks, CC BY 4.0).  Images: SPIE-AAPM-NCI
PROSTATEx challenge (The Cancer Imaging Archive).
"""

from __future__ import annotations

import argparse
from pathlib import Path

import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator
from torch import Tensor

from normal_guidance.core.bags import Bag, Bags
from normal_guidance.core.metrics import localization
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.features.windows import in_field
from normal_guidance.scans.index.manifest import Manifest, ScanRow, read_manifest
from normal_guidance.scans.index.volumes import read_nifti, read_volume
from normal_guidance.show.figure_style import BLUE, RED, save
from normal_guidance.sweep.predictions import read_predictions

OUT = Path(__file__).parent / "images" / "prostatex-scans.png"
SHOWN = {"a success": 75, "a failure": 5}
"""Percentiles of slice AUROC over the positive scans."""
FIELD = 70.0
"""mm: the part of a slice that the encoder saw."""
BRIGHTEST = 2500
"""ADC in 10^-6 mm2/s that is drawn white."""


def out_of_fold(model: Path, bags: Bags) -> Tensor:
    """Attention of every scan by members that did not see its patient, packed in the order of the bags."""
    table = read_predictions(model / "predictions.parquet", ["scan_id", "slices", "attention"], part="out-of-fold")
    found = dict(zip(table["scan_id"].to_pylist(), table["attention"].to_pylist(), strict=True))
    return torch.cat([torch.tensor(found[name]) for name in bags.scan_ids])


def by_position(lengths: Tensor) -> Tensor:
    """The guess that knows nothing of the scan: minus the distance from the middle, packed."""
    return torch.cat([-(torch.arange(n) - (n - 1) / 2).abs() for n in lengths.tolist()])


def lesion(row: ScanRow, root: Path) -> np.ndarray:
    """Where masks of the scan have a voxel, in its true slices."""
    assert row.slice_labels is not None
    files = [
        file
        for file in root.rglob(f"{row.scan_id}*.nii.gz")
        if "asks" in file.parent.as_posix() and "T2" not in file.as_posix()
    ]
    inside = sum(read_nifti(file, file.name) for file in sorted(files)) > 0
    return np.asarray(inside[list(row.frames)] & (row.slice_labels[:, None, None] == 1))


def draw_scan(columns: list[Axes], row: ScanRow, root: Path, scores: Tensor, bag: Bag, title: str) -> None:
    """Two slices above, the middle one of the lesion and the one with the highest score, and scores below."""
    volume = in_field(read_volume(row, root)[0], row.pixel_spacing, FIELD)
    inside = in_field(lesion(row, root), row.pixel_spacing, FIELD)
    assert bag.slice_labels is not None
    true = bag.slice_labels.nonzero().flatten()
    middle, found = true[len(true) // 2].item(), scores.argmax().item()
    for axes, place, name in ((columns[0], middle, "lesion"), (columns[1], found, "found")):
        axes.imshow(volume[place], cmap="gray", vmin=0, vmax=BRIGHTEST, interpolation="bilinear")
        if inside[place].any():
            axes.contour(inside[place], levels=[0.5], colors=RED, linewidths=1.2)
        axes.set_title(f"{name}: slice {place + 1}", fontsize=8, pad=3)
        axes.set_xticks([])
        axes.set_yticks([])
    below, places = columns[2], np.arange(1, len(scores) + 1)
    for place in true.tolist():
        below.axvspan(
            place + 0.5, place + 1.5, color=RED, alpha=0.22, lw=0, label="true slices" if place == true[0] else None
        )
    guess = by_position(torch.tensor([len(scores)]))
    below.plot(
        places,
        (guess - guess.min()) / (guess.max() - guess.min()),
        "--",
        color="#777777",
        lw=1.2,
        label="the middle of the scan",
    )
    below.plot(places, scores / scores.max(), color=BLUE, lw=1.8, label="nguide fit")
    below.set_xlim(0.5, len(scores) + 0.5)
    below.set_ylim(0, 1.08)
    below.set_yticks([])
    below.xaxis.set_major_locator(MaxNLocator(integer=True, nbins=6))
    below.set_xlabel("slice", fontsize=8, labelpad=1)
    below.tick_params(labelsize=8)
    below.spines[["top", "right", "left"]].set_visible(False)
    below.set_title(title, fontsize=8.5, pad=4)


def draw(index: Manifest, bags: Bags, slices: Tensor, shown: list[int], values: list[tuple[float, float]]) -> Figure:
    figure = Figure(figsize=(8, 4.3), layout="constrained")
    parts = figure.subfigures(1, len(shown), wspace=0.05)
    rows = {row.scan_id: row for row in index}
    scores = slices.split(bags.lengths.tolist())
    for part, scan, (name, percentile), (ours, guess) in zip(parts, shown, SHOWN.items(), values, strict=True):
        grid = part.add_gridspec(2, 2, height_ratios=(1.25, 1))
        columns = [part.add_subplot(grid[0, 0]), part.add_subplot(grid[0, 1]), part.add_subplot(grid[1, :])]
        part.suptitle(f"{name}: slice AUROC {ours:.2f}", fontsize=11, fontweight="bold")
        title = f"{percentile}th percentile; the middle of the scan has {guess:.2f} here"
        draw_scan(columns, rows[bags.scan_ids[scan]], index.root, scores[scan], bags[scan], title)
    handles, names = columns[2].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    for name, about in (("index", "of nguide index"), ("store", "of nguide encode"), ("model", "of nguide fit")):
        parser.add_argument(name, type=Path, help=f"folder {about}")
    options = parser.parse_args()
    bags = open_store(options.store).bags()
    slices = out_of_fold(options.model, bags)
    found, guess = (
        localization(scores.double(), bags.slice_labels, bags.lengths) for scores in (slices, by_position(bags.lengths))
    )
    print(f"{len(found.kept)} positive scans: nguide fit {found.mean_auroc:.3f}, position {guess.mean_auroc:.3f}")
    order = found.auroc.argsort(stable=True)
    picked = [order[round(percentile / 100 * (len(order) - 1))] for percentile in SHOWN.values()]
    values = [(found.auroc[place].item(), guess.auroc[place].item()) for place in picked]
    shown = [found.kept[place].item() for place in picked]
    for name, scan, (ours, middle) in zip(SHOWN, shown, values, strict=True):
        print(f"{name}: {bags.scan_ids[scan]}, slice AUROC {ours:.3f}, the middle of the scan {middle:.3f}")
    print(save(draw(read_manifest(options.index), bags, slices, shown, values), OUT))


if __name__ == "__main__":
    main()
