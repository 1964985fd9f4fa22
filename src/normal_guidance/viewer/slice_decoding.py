"""Decode the slices of one file for the page, in a worker process."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

import numpy as np
from jaxtyping import Int16

from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.volumes import read_volume

LOWEST, HIGHEST = -32768, 32767
"""The HU that 16 bits hold; values outside are set to these."""


class SliceRequest(NamedTuple):
    """Slices of one file.

    Args:
        root: folder of the scans.
        row: a scan, with those slices only.
    """

    root: Path
    row: ScanRow


def decode(wanted: SliceRequest) -> Int16[np.ndarray, "slices rows columns"]:
    """Decode slices to whole HU: half the memory, and as exact as CT scanners are."""
    hu, _ = read_volume(wanted.row, wanted.root)
    whole = np.empty(hu.shape, np.int16)
    for place, image in enumerate(hu):  # one at a time: a scan of 2 GB is not copied as a whole
        whole[place] = np.clip(np.rint(image), LOWEST, HIGHEST)
    return whole


def prepare(kind: str) -> None:
    """Import what such scans need, so that the first slice does not wait for it."""
    if kind == "nifti":
        import normal_guidance.data.nifti
    else:
        import normal_guidance.data.dicom_slices  # noqa: F401
