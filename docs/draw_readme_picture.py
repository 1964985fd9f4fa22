"""Draws docs/images/prostatex-scans.png: what `nguide fit` finds in real prostate MRI that it was not trained on.

    git clone https://github.com/rcuocolo/PROSTATEx_masks
    nguide index prostatex PROSTATEx_masks -o index
    nguide encode index --encoder efficientnet-lite0 --window adc --normalize 1100,820 --field 70 --offline -o store
    .venv/bin/python docs/draw_readme_picture.py index store --scores scores.pt

Patients are divided into five folds, as in docs/results/prostatex.md (first division); each fold is scored by a
`SliceFinder` that was fitted to the other four.  The scans shown are picked by rank, not by eye: of the positive scans
in the order of what is gained over position alone (slice AUROC), those at the 10th, 50th and 90th percentile.  The
script prints the numbers of the caption.  `--scores` keeps the scores, so that a second run only draws.

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
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.fit.slice_finder import SliceFinder
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.features.windows import in_field
from normal_guidance.scans.index.manifest import Manifest, ScanRow, read_manifest
from normal_guidance.scans.index.splits import fold_scans
from normal_guidance.scans.index.volumes import read_nifti, read_volume
from normal_guidance.show.figure_style import BLUE, RED, save

OUT = Path(__file__).parent / "images" / "prostatex-scans.png"
FOLDS = 5
PERCENTILES = (10, 50, 90)
FIELD = 70.0
"""mm: the part of a slice that the encoder saw."""
BRIGHTEST = 2500
"""ADC in 10^-6 mm2/s that is drawn white."""


def score_held_out(bags: Bags) -> tuple[Tensor, Tensor]:
    """Slice scores, packed, and scan scores, each of scans that were not trained on."""
    folds = torch.tensor(fold_scans(bags.patient_ids, bags.labels.tolist(), FOLDS, 0))
    slices = [torch.empty(0)] * len(bags)
    scans = torch.zeros(len(bags), dtype=torch.float64)
    for fold in range(FOLDS):
        held_out = (folds == fold).nonzero().flatten()
        finder = SliceFinder().fit(bags[(folds != fold).nonzero().flatten()])
        test = bags[held_out]
        found = finder.find_slices(test).split(test.lengths.tolist())
        for number, scores in zip(held_out.tolist(), found, strict=True):
            slices[number] = scores
        scans[held_out] = torch.from_numpy(finder.decision_function(test))
        print(f"fold {fold + 1} of {FOLDS}", flush=True)
    return torch.cat(slices), torch.stack([scans, folds.double()])


def by_position(lengths: Tensor) -> Tensor:
    """The guess that knows nothing of the scan: minus the distance from the middle, packed."""
    return torch.cat([-(torch.arange(n) - (n - 1) / 2).abs() for n in lengths.tolist()])


def mean_over_folds(values: Tensor, folds: Tensor) -> float:
    return torch.stack([values[folds == fold].mean() for fold in range(FOLDS)]).mean().item()


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
        label="position alone",
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
    figure = Figure(figsize=(9, 4.1), layout="constrained")
    parts = figure.subfigures(1, len(shown), wspace=0.03)
    rows = {row.scan_id: row for row in index}
    scores = slices.split(bags.lengths.tolist())
    for part, scan, percentile, (ours, guess) in zip(parts, shown, PERCENTILES, values, strict=True):
        grid = part.add_gridspec(2, 2, height_ratios=(1.25, 1))
        columns = [part.add_subplot(grid[0, 0]), part.add_subplot(grid[0, 1]), part.add_subplot(grid[1, :])]
        name = bags.scan_ids[scan]
        part.suptitle(f"{percentile}th percentile of the gain", fontsize=9.5, fontweight="bold")
        title = f"slice AUROC {ours:.2f}, position alone {guess:.2f}"
        draw_scan(columns, rows[name], index.root, scores[scan], bags[scan], title)
    handles, names = columns[2].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside lower center", ncols=3, fontsize=8.5, frameon=False)
    return figure


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("index", type=Path)
    parser.add_argument("store", type=Path)
    parser.add_argument("--scores", type=Path, help="file that keeps the scores")
    options = parser.parse_args()
    bags = open_store(options.store).bags()
    if options.scores and options.scores.exists():
        slices, (scans, folds) = torch.load(options.scores)
    else:
        slices, (scans, folds) = score_held_out(bags)
        if options.scores:
            torch.save((slices, torch.stack([scans, folds])), options.scores)
    found, guess = (
        localization(scores.double(), bags.slice_labels, bags.lengths) for scores in (slices, by_position(bags.lengths))
    )
    of_fold = [auroc(scans[folds == fold], bags.labels[folds == fold]) for fold in range(FOLDS)]
    print(f"{len(found.kept)} positive scans: nguide fit {mean_over_folds(found.auroc, folds[found.kept]):.3f},")
    print(f"position alone {mean_over_folds(guess.auroc, folds[found.kept]):.3f};")
    print(f"scan AUROC {torch.stack(of_fold).mean():.3f}; slice AUROC is above, equal to, below that of position in")
    gain = found.auroc - guess.auroc
    print(*(int(one.sum()) for one in (gain > 0, gain == 0, gain < 0)), "scans")
    order = gain.argsort(stable=True)
    picked = [order[round(percentile / 100 * (len(order) - 1))] for percentile in PERCENTILES]
    values = [(found.auroc[place].item(), guess.auroc[place].item()) for place in picked]
    shown = [found.kept[place].item() for place in picked]
    print(save(draw(read_manifest(options.index), bags, slices, shown, values), OUT))


if __name__ == "__main__":
    main()
