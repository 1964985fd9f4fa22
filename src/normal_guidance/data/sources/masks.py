"""Slice labels from a mask volume, matched by position in space: grids and orders of slices may differ."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING

import numpy as np

from normal_guidance.data.found import Mask
from normal_guidance.data.geometry import DUPLICATE_MM, ORIENTATION_DEGREES, normal_of

if TYPE_CHECKING:
    from normal_guidance.data.geometry import Ordered


def slices_of_mask(mask: Mask, ordered: Ordered) -> np.ndarray:
    """A slice is positive if a nonzero slice of the mask is nearer than half the larger of the two steps.

    Raises a ValueError where positions are unknown, the mask is oriented otherwise, does not cover the scan, or marks
    something outside it.

    Example:
        >>> from normal_guidance.data.geometry import Ordered
        >>> axial = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
        >>> scan = Ordered((("1", 0), ("2", 0)), (0.0, 5.0), 5.0, axial, 512, 512, None, (), True)
        >>> slices_of_mask(Mask("m.nii", axial, ((0.0, 0.0, 5.0), (0.0, 0.0, 0.0)), (True, False)), scan).tolist()
        [0, 1]
    """
    if not ordered.located or ordered.orientation is None:
        raise ValueError(f"mask {mask.file} cannot be matched: positions of the slices are unknown")
    normal = normal_of(ordered.orientation)
    if abs(float(normal @ normal_of(mask.orientation))) < math.cos(math.radians(ORIENTATION_DEGREES)):
        raise ValueError(f"mask {mask.file} is oriented otherwise than the scan")
    heights = np.array(mask.positions, float) @ normal
    distance = np.abs(np.subtract.outer(np.array(ordered.positions), heights))
    near = distance <= max(_step(heights), ordered.spacing or 0.0) / 2 + DUPLICATE_MM
    outside = int((~near.any(1)).sum())
    if outside:
        raise ValueError(f"mask {mask.file} does not cover {outside} of {len(ordered.slices)} slices")
    positive = np.array(mask.positive, bool)
    lost = int((positive & ~near.any(0)).sum())
    if lost:
        raise ValueError(f"{lost} of {int(positive.sum())} nonzero slices of mask {mask.file} lie outside the scan")
    return (near & positive).any(1).astype(np.int8)


def _step(heights: np.ndarray) -> float:
    return float(np.median(np.diff(np.sort(heights)))) if len(heights) > 1 else 0.0
