"""The values of a scan in three numbers, which tell CT in HU from other images, windowed copies and masks.

A NIfTI file does not say its modality, and a header may be wrong, so a model compares the values of a new scan with
those that it was trained on (`normal_guidance.clinical.expectations`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Annotated

import numpy as np
from jaxtyping import Float32, Shaped

from normal_guidance.typed_json import Between

GRID = 32
"""Values that are taken along each side of a slice: about 1,000 a slice tell the ends of the range well enough."""

MOST_VALUES = 2**16
"""Values of a scan that are looked at: more take milliseconds, and tell no more."""

AMONG = (1, 99)
"""Percentiles of the training scans' values: a few odd scans must not widen the range."""

PERCENTILES = (0.5, 99.5)
"""The ends of the range: a few wrong pixels must not move them."""

CT_RANGE = (-1024.0, 3071.0)
"""HU beyond these, such as the padding around a round field of view, count as the ends: 12 bits hold no others."""

Pixel = Annotated[float, Between(float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))]
"""The value of a pixel, which is a float32."""

Count = Annotated[int, Between(1.0, float(MOST_VALUES))]
"""How many different values there are."""


@dataclass(frozen=True)
class Values:
    """The values of a scan."""

    low: Pixel
    """The lower of `PERCENTILES`."""
    high: Pixel
    distinct: Count
    """Two in a mask, at most 256 in a windowed copy."""


def sample_values(slices: Shaped[np.ndarray, "slices rows columns"]) -> Float32[np.ndarray, "values"]:
    """Evenly spread values of some slices."""
    rows, columns = (max(1, side // GRID) for side in slices.shape[1:])
    return slices[:, ::rows, ::columns].astype(np.float32).ravel()


def values_of(sample: Float32[np.ndarray, "values"], modality: str) -> Values:
    """The values of a scan of which `sample` is a sample."""
    some = sample[:: -(-len(sample) // MOST_VALUES)]
    known = np.clip(some, *CT_RANGE) if modality == "CT" else some
    low, high = np.percentile(known, PERCENTILES)
    return Values(round(float(low), 3), round(float(high), 3), len(np.unique(known)))


@dataclass(frozen=True)
class ValueRange:
    """The values of the scans that a model was trained on: from where to where they lie, without the oddest scans."""

    low: tuple[Pixel, Pixel]
    high: tuple[Pixel, Pixel]
    distinct: Count
    """Of the scans with the fewest different values."""


def range_of_values(scans: Sequence[Values]) -> ValueRange | None:
    """The range of some scans; None without any."""
    if not scans:
        return None
    ends = np.percentile([(one.low, one.high, one.distinct) for one in scans], AMONG, axis=0).round(3).tolist()
    (low, high, distinct), (low_end, high_end, _) = ends
    return ValueRange((low, low_end), (high, high_end), int(distinct))
