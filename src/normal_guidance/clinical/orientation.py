"""Which way a picture of a slice lies: the letters that readers expect at its edges, R for the patient's right."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

TOWARDS = (("L", "R"), ("P", "A"), ("H", "F"))
"""The directions of DICOM's three axes, forwards and backwards: left, posterior, head."""

LEAST = 0.1
"""A smaller part of a direction is not named: 6 degrees of tilt are still 'L'."""


class Edges(NamedTuple):
    """The letters at the edges of a picture, each the direction in which this edge lies."""

    left: str
    right: str
    top: str
    bottom: str


def directions(orientation: Sequence[float]) -> tuple[str, str]:
    """Where the rows and the columns of a slice run to, as in PatientOrientation; oblique ones have several letters.

    Args:
        orientation: direction cosines of a row and of a column, as in ImageOrientationPatient.

    Example:
        >>> directions((1.0, 0.0, 0.0, 0.0, 1.0, 0.0)), directions((0.0, 1.0, 0.0, 0.0, 0.0, -1.0))
        (('L', 'P'), ('P', 'F'))
        >>> directions((1.0, 0.0, 0.0, 0.0, 0.97, -0.26))
        ('L', 'PF')
    """
    return _letters(orientation[:3]), _letters(orientation[3:])


def edges(orientation: Sequence[float]) -> Edges:
    """The letters at the edges of a slice that is drawn with its first row on top and its first column on the left.

    Example:
        >>> edges((1.0, 0.0, 0.0, 0.0, 1.0, 0.0))
        Edges(left='R', right='L', top='A', bottom='P')
    """
    (right, bottom), (left, top) = directions(orientation), directions([-one for one in orientation])
    return Edges(left, right, top, bottom)


def _letters(direction: Sequence[float]) -> str:
    """The axes of a direction, the strongest first."""
    parts = sorted(zip(direction, TOWARDS, strict=True), key=lambda one: -abs(one[0]))
    return "".join(backwards if part < 0 else forwards for part, (forwards, backwards) in parts if abs(part) > LEAST)
