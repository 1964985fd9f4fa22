"""The attention figure draws what it is given."""

from pathlib import Path

import matplotlib.image
import numpy as np
import torch

from normal_guidance.reports.figures import AttendedScan, draw_attention


def scan(peak: int, *, labelled: bool) -> AttendedScan:
    bell = torch.exp(-0.5 * (torch.arange(30) - peak) ** 2 / 9.0)
    labels = ((torch.arange(30) - peak).abs() < 5).long() if labelled else None
    return AttendedScan(f"peak {peak}", {"plain": torch.rand(30), "guided": bell / bell.sum()}, labels)


def picture(path: Path, *scans: AttendedScan) -> np.ndarray:
    return matplotlib.image.imread(draw_attention(scans, path / "deep" / "attention.png", guided="guided"))


def pixels(image: np.ndarray, red: float, green: float, blue: float) -> int:
    return int((np.abs(image[..., :3] - np.array([red, green, blue])) < 0.02).all(-1).sum())


def test_truth_is_filled_where_it_is_known(tmp_path: Path) -> None:
    pink = (0.974, 0.874, 0.874)
    known = picture(tmp_path, scan(10, labelled=True), scan(20, labelled=True))
    unknown = picture(tmp_path, scan(10, labelled=False), scan(20, labelled=False))
    assert pixels(known, *pink) > 5_000
    assert pixels(unknown, *pink) == 0


def test_one_panel_a_scan_and_one_colour_a_method(tmp_path: Path) -> None:
    one, four = picture(tmp_path, scan(10, labelled=True)), picture(tmp_path, *[scan(10, labelled=True)] * 4)
    assert four.shape[1] > 3 * one.shape[1]
    for color in ((0.122, 0.467, 0.706), (1.0, 0.498, 0.055)):
        assert pixels(one, *color) > 200
