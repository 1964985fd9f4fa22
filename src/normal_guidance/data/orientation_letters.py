"""The letters at the edges of a slice that say which side of the patient they show: R and L, A and P, H and F."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

AXES = ("LR", "PA", "HF")
"""The letters of DICOM's three axes, in their direction and against it: left, posterior, head."""

SHARE = np.sin(np.radians(22.5))
"""An edge shows the letter of each axis with at least this direction cosine: two letters from 22.5 degrees on."""

RIGHT_ANGLE = 0.1
"""Rows and columns with a larger cosine of their angle are damaged, and have no letters."""


class Edges(NamedTuple):
    """The letters at the edges of a picture whose rows run to the right and columns downwards, as stored."""

    left: str
    right: str
    top: str
    bottom: str


def orientation_letters(orientation: Sequence[float] | None) -> Edges | None:
    """The letters for direction cosines of a row and of a column (ImageOrientationPatient); None if unknown."""
    if orientation is None or len(orientation) != 6:
        return None
    row, column = np.asarray(orientation, np.float64).reshape(2, 3)
    lengths = np.linalg.norm([row, column], axis=1)
    if not np.isfinite(lengths).all() or not (lengths > 0).all():
        return None
    row, column = row / lengths[0], column / lengths[1]
    if abs(row @ column) > RIGHT_ANGLE:
        return None
    return Edges(_letters(-row), _letters(row), _letters(-column), _letters(column))


def _letters(direction: np.ndarray) -> str:
    """The letters of a direction, the nearest axis first."""
    order = np.argsort(-np.abs(direction), kind="stable")
    near = [axis for axis in order if abs(direction[axis]) >= SHARE]
    return "".join(AXES[axis][0 if direction[axis] > 0 else 1] for axis in near)
