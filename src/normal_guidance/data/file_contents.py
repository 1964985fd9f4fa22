"""What comes of a file besides a header; apart, because worker processes start faster with few imports."""

from __future__ import annotations

from typing import NamedTuple


class Mask(NamedTuple):
    """Where a mask volume is not zero.

    Example:
        >>> Mask("A17-mask.nii", (1.0, 0.0, 0.0, 0.0, 1.0, 0.0), ((0.0, 0.0, 0.0), (0.0, 0.0, 5.0)), (False, True)).file
        'A17-mask.nii'
    """

    file: str
    orientation: tuple[float, ...]
    positions: tuple[tuple[float, float, float], ...]
    """The first pixel's centre of every slice."""
    positive: tuple[bool, ...]


class Refusal(NamedTuple):
    """Why a file is no slice.

    Example:
        >>> Refusal("A17/1.dcm", "localizer", "ImageType is ORIGINAL\\\\PRIMARY\\\\LOCALIZER").kind
        'localizer'
    """

    file: str
    kind: str
    detail: str
    series_uid: str = ""
