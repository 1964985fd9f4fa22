"""Results of reading a file other than a header, which files are NIfTI, and what a file is taken for.

Modules without pydicom import these.
"""

from __future__ import annotations

from typing import NamedTuple

NIFTI = (".nii", ".nii.gz")
"""Endings of NIfTI files."""

CT = ("CT",)
"""The modality of images that nothing is known about."""


class Mask(NamedTuple):
    """The slices of a mask volume, and which of them have a nonzero voxel."""

    file: str
    orientation: tuple[float, ...]
    positions: tuple[tuple[float, float, float], ...]
    """The centre of every slice's first pixel."""
    positive: tuple[bool, ...]


class Refusal(NamedTuple):
    """The reason why a file is not a slice."""

    file: str
    kind: str
    detail: str
    series_uid: str = ""


def is_nifti(file: str) -> bool:
    """Whether a file is NIfTI, by its name."""
    return file.lower().endswith(NIFTI)
