"""Slice labels from mask volumes, matched by position in space; grids and slice orders may differ."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from normal_guidance.data.file_contents import Mask
from normal_guidance.data.geometry import DUPLICATE_MM, ORIENTATION_DEGREES, normal_of

if TYPE_CHECKING:
    from normal_guidance.data.geometry import Ordered


def slices_of_mask(mask: Mask, ordered: Ordered) -> np.ndarray:
    """Labels a slice positive if a nonzero slice of the mask is nearer than half the larger of the two steps.

    Raises a ValueError if positions are unknown, or if the mask has another orientation, does not cover the scan, or
    is nonzero outside it.
    """
    if not ordered.located or ordered.orientation is None:
        raise ValueError(f"mask {mask.file} cannot be matched: positions of the slices are unknown")
    normal = normal_of(ordered.orientation)
    if abs(float(normal @ normal_of(mask.orientation))) < math.cos(math.radians(ORIENTATION_DEGREES)):
        raise ValueError(f"mask {mask.file} has another orientation than the scan")
    heights = np.array(mask.positions, float) @ normal
    places, positive = np.array(ordered.positions), np.array(mask.positive, bool)
    reach = max(_step(heights), ordered.spacing or 0.0) / 2 + DUPLICATE_MM
    outside = int((~_near(places, heights, reach)).sum())
    if outside:
        raise ValueError(f"mask {mask.file} does not cover {outside} of {len(ordered.slices)} slices")
    lost = int((positive & ~_near(heights, places, reach)).sum())
    if lost:
        raise ValueError(f"{lost} of {int(positive.sum())} nonzero slices of mask {mask.file} lie outside the scan")
    return _near(places, heights[positive], reach).astype(np.int8)


def slices_of_masks(masks: Sequence[Mask], ordered: Ordered) -> np.ndarray:
    """Labels a slice positive if it is by one of the masks; raises a ValueError if one of them does not fit."""
    return np.max([slices_of_mask(mask, ordered) for mask in masks], axis=0)


def _near(values: np.ndarray, others: np.ndarray, reach: float) -> np.ndarray:
    """For every value, whether one of the others is within reach; sorts, because there may be many thousands."""
    ordered = np.sort(others)
    return np.searchsorted(ordered, values + reach, "right") > np.searchsorted(ordered, values - reach, "left")


def _step(heights: np.ndarray) -> float:
    return float(np.median(np.diff(np.sort(heights)))) if len(heights) > 1 else 0.0
