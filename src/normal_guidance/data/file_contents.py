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
    """The slices of a mask volume, and which of them have a nonzero voxel.

    Example:
        >>> Mask("A17-mask.nii", (1.0, 0.0, 0.0, 0.0, 1.0, 0.0), ((0.0, 0.0, 0.0), (0.0, 0.0, 5.0)), (False, True)).file
        'A17-mask.nii'
    """

    file: str
    orientation: tuple[float, ...]
    positions: tuple[tuple[float, float, float], ...]
    """The centre of every slice's first pixel."""
    positive: tuple[bool, ...]


class Refusal(NamedTuple):
    """The reason why a file is not a slice.

    Example:
        >>> Refusal("A17/1.dcm", "localizer", "ImageType is ORIGINAL\\\\PRIMARY\\\\LOCALIZER").kind
        'localizer'
    """

    file: str
    kind: str
    detail: str
    series_uid: str = ""


def is_nifti(file: str) -> bool:
    """Whether a file is NIfTI, by its name.

    Example:
        >>> is_nifti("A17.nii.gz"), is_nifti("A17/1.dcm")
        (True, False)
    """
    return file.lower().endswith(NIFTI)
