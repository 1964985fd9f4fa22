"""A summary of the scans behind features, so that a model's user can check whether a new scan is of the same kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from normal_guidance.data.geometry import normal_of
from normal_guidance.data.manifest import Manifest
from normal_guidance.data.values import ValueRange, Values, range_of_values
from normal_guidance.typed_json import read_as

SPACING_PERCENTILES = (1, 50, 99)
"""Percentiles for low, median and high slice spacing: a few wrong headers must not widen the range."""

PLANES = ("sagittal", "coronal", "axial")
"""Planes by the axis that slices are stacked along: left, posterior, superior."""


def plane_of(orientation: Sequence[float] | None) -> str | None:
    """The plane that is nearest to the slices; None where the orientation is unknown."""
    return None if orientation is None else PLANES[int(np.abs(normal_of(orientation)).argmax())]


def describe_inputs(
    manifest: Manifest, left_out: Collection[str] = (), values: Sequence[Values] = ()
) -> dict[str, Any]:
    """Counts and ranges of the scans of a manifest without those left out; no entry describes a single scan.

    `values` are those of its scans, where they were measured.
    """
    kept = [number for number, scan in enumerate(manifest.scan_ids) if scan not in left_out]
    table, lengths = manifest.table.take(kept), manifest.lengths[kept]
    planes = Counter(filter(None, map(plane_of, table["orientation"].to_pylist())))
    spacings = [spacing for spacing in table["slice_spacing"].to_pylist() if spacing]
    measured = range_of_values(values)
    return {
        "source": manifest.about.get("source"),
        "scans": len(kept),
        "modalities": dict(sorted(Counter(table["modality"].to_pylist()).items())),
        "planes": dict(sorted(planes.items())),
        "slices": {"fewest": int(lengths.min()), "median": int(np.median(lengths)), "most": int(lengths.max())},
        "slice_spacing": _range(spacings) if spacings else None,
        "values": None if measured is None else asdict(measured),
    }


@dataclass(frozen=True)
class Counts:
    """Slices of the shortest, the median and the longest scan."""

    fewest: int
    median: int
    most: int


@dataclass(frozen=True)
class Range:
    """Slice spacing in mm."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class ScanSummary:
    """What `describe_inputs` recorded, as it is read back."""

    source: str | None
    scans: int
    modalities: dict[str, int]
    planes: dict[str, int]
    slices: Counts
    slice_spacing: Range | None
    values: ValueRange | None = None


def is_encoded(provenance: Mapping[str, Any]) -> bool:
    """Whether `nguide encode` made the features; users' own may have any provenance."""
    return {"identity", "preprocessing"} <= provenance.keys()


def scans_behind(provenance: Mapping[str, Any]) -> ScanSummary | None:
    """The scans that `nguide encode` made features of; None where it did not, or did not record them."""
    inputs = provenance.get("inputs") if is_encoded(provenance) else None
    return None if inputs is None else read_as(ScanSummary, inputs, "provenance.inputs")


def _range(spacings: Sequence[float]) -> dict[str, float]:
    """Low, median and high in mm, rounded to the micrometre because manifests hold float32."""
    values = np.percentile(np.array(spacings, np.float64), SPACING_PERCENTILES).round(3).tolist()
    return dict(zip(("low", "median", "high"), values, strict=True))
