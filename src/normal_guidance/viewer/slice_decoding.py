"""What a worker process does for the page: the slices of one file as whole HU."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int16

from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.volumes import read_volume

LOWEST, HIGHEST = -32768, 32767
"""HU that 16 bits hold; what lies outside is set to them."""


class SliceRequest(NamedTuple):
    """Slices of one file.

    Args:
        root: where the scans lie.
        row: a scan, with those slices only.
    """

    root: Path
    row: ScanRow


def decode(wanted: SliceRequest) -> Int16[np.ndarray, "slices rows columns"]:
    """The slices, rounded: half as large as they were, and as exact as CT scanners are."""
    hu, _ = read_volume(wanted.row, wanted.root)
    whole = np.empty(hu.shape, np.int16)
    for place, image in enumerate(hu):  # one at a time: a scan of 2 GB has no twin in memory
        whole[place] = np.clip(np.rint(image), LOWEST, HIGHEST)
    return whole


def prepare(kind: str) -> None:
    """Imports what such scans need, so that the first slice does not wait for it."""
    if kind == "nifti":
        import normal_guidance.data.nifti
    else:
        import normal_guidance.data.dicom_slices  # noqa: F401
