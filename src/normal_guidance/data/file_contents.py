"""Results of reading a file other than a header; a module of its own, so that worker processes import little."""

from __future__ import annotations

from typing import NamedTuple


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
