"""What a model says about one scan: everything that JSON, pictures, pages and DICOM results are made of."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from jaxtyping import Float
from torch import Tensor

from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.problems import Problem


@dataclass(frozen=True, eq=False)
class ScanPrediction:
    """One scan, scored.  Slices are counted from 0, in the order of `row`, feet to head in axial scans.

    Args:
        row: the scan's ids, files and geometry, as a manifest has them; its label is meaningless here.
        root: the folder that `row.files` are relative to.
        method: whose attention it is, a name in `METHODS`.
        logit: as the model gives it.
        probability: calibrated, if the model's bundle has a calibration.
        threshold: of the probability; None if none was chosen.
        attention: heads averaged, sums to one over the slices.
        head_attention: one row a head, each sums to one.
        key_slices: those of the highest attention, the highest first.
        interval: first and last slice, both inside, of the shortest run that holds `share` of the attention.
        problems: what was odd about the scan.
    """

    row: ScanRow
    root: Path
    method: str
    logit: float
    probability: float
    threshold: float | None
    attention: Float[Tensor, "slices"]
    head_attention: Float[Tensor, "heads slices"]
    key_slices: tuple[int, ...]
    interval: tuple[int, int]
    share: float
    problems: tuple[Problem, ...] = ()

    @property
    def is_positive(self) -> bool | None:
        """By the threshold; None if there is none."""
        return None if self.threshold is None else self.probability >= self.threshold
