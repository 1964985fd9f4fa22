"""The field: the middle of every slice, a square of so many millimetres, which is all that the encoder sees.

This module does not import torch: worker processes use it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from normal_guidance.data.problems import UnreadableError


def middle(rows: int, columns: int, spacing: Sequence[float] | None, field: float) -> tuple[slice, slice]:
    """Rows and columns of a field of `field` mm: round(field / spacing) of each, at least 1, at most the image's.

    Of an odd number of lines that are left over, one more is below or right.  An unknown spacing raises an
    `UnreadableError`.

    Args:
        rows: rows of the image.
        columns: columns of the image.
        spacing: mm between rows, mm between columns.
        field: mm.
    """
    with np.errstate(over="ignore"):
        # A manifest holds 32 bits: a half must be rounded the same way in a new scan, whose header is read in 64.
        widths = [] if spacing is None else np.array(spacing, np.float32).tolist()
    if len(widths) != 2 or not all(0 < width < math.inf for width in widths):
        found = "unknown" if spacing is None else " x ".join(f"{width:g}" for width in spacing) + " mm"
        raise UnreadableError("no_spacing", f"a field of {field:g} mm needs the pixel spacing, which is {found}")
    return _middle(rows, field / widths[0]), _middle(columns, field / widths[1])


def _middle(lines: int, wanted: float) -> slice:
    kept = max(1, round(min(wanted, lines)))
    start = (lines - kept) // 2
    return slice(start, start + kept)


def in_field(volume: np.ndarray, spacing: Sequence[float] | None, field: float | None) -> np.ndarray:
    """The field of every slice of a volume; the volume itself without a field."""
    if field is None:
        return volume
    down, across = middle(volume.shape[1], volume.shape[2], spacing, field)
    return volume[:, down, across]
