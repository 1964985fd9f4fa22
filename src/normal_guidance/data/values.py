"""The values of a scan in three numbers, which tell CT in HU from other images, windowed copies and masks.

A NIfTI file does not say its modality, and a header may be wrong, so a model compares the values of a new scan with
those that it was trained on (`normal_guidance.clinical.expectations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float32, Shaped

GRID = 32
"""Values that are taken along each side of a slice: about 1,000 a slice tell the ends of the range well enough."""

PERCENTILES = (0.5, 99.5)
"""The ends of the range: a few wrong pixels must not move them."""

CT_RANGE = (-1024.0, 3071.0)
"""HU beyond these, such as the padding around a round field of view, count as the ends: 12 bits hold no others."""


@dataclass(frozen=True)
class Values:
    """The values of a scan.

    Example:
        >>> hu = np.linspace(-1000, 1000, 2 * 64 * 64).reshape(2, 64, 64)
        >>> values = values_of(sample_values(hu), "CT")
        >>> round(values.low), round(values.high), values.distinct
        (-995, 979, 2048)
    """

    low: float
    """The lower of `PERCENTILES`."""
    high: float
    distinct: int
    """How many different values there are: two in a mask, at most 256 in a windowed copy."""


def sample_values(slices: Shaped[np.ndarray, "slices rows columns"]) -> Float32[np.ndarray, "values"]:
    """Evenly spread values of some slices."""
    rows, columns = (max(1, side // GRID) for side in slices.shape[1:])
    return slices[:, ::rows, ::columns].astype(np.float32).ravel()


def values_of(sample: Float32[np.ndarray, "values"], modality: str) -> Values:
    """The values of a scan of which `sample` is a sample."""
    known = np.clip(sample, *CT_RANGE) if modality == "CT" else sample
    low, high = np.percentile(known, PERCENTILES)
    return Values(float(low), float(high), len(np.unique(known)))


@dataclass(frozen=True)
class ValueRange:
    """The values of the scans that a model was trained on: the smallest and the largest of each of `Values`.

    Example:
        >>> range_of_values([Values(-1024.0, 1200.0, 1500), Values(-1000.0, 900.0, 1100)])
        ValueRange(low=(-1024.0, -1000.0), high=(900.0, 1200.0), distinct=1100)
    """

    low: tuple[float, float]
    high: tuple[float, float]
    distinct: int
    """Of the scan with the fewest different values."""


def range_of_values(scans: Sequence[Values]) -> ValueRange | None:
    """The range of some scans; None without any."""
    if not scans:
        return None
    lows, highs = (
        [round(float(value), 3) for value in ends] for ends in ([s.low for s in scans], [s.high for s in scans])
    )
    return ValueRange((min(lows), max(lows)), (min(highs), max(highs)), min(one.distinct for one in scans))
