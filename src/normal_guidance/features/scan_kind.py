"""A summary of the scans behind features, so that a model's user can check whether a new scan is of the same kind."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Sequence
from typing import Any

import numpy as np

from normal_guidance.data.geometry import normal_of
from normal_guidance.data.manifest import Manifest

SPACING_PERCENTILES = (1, 50, 99)
"""Percentiles for low, median and high slice spacing: a few wrong headers must not widen the range."""

PLANES = ("sagittal", "coronal", "axial")
"""Planes by the axis that slices are stacked along: left, posterior, superior."""


def plane_of(orientation: Sequence[float] | None) -> str | None:
    """The plane that is nearest to the slices; None where the orientation is unknown.

    Example:
        >>> plane_of((1.0, 0.0, 0.0, 0.0, 0.97, -0.26)), plane_of((1.0, 0.0, 0.0, 0.0, 0.0, -1.0))
        ('axial', 'coronal')
    """
    return None if orientation is None else PLANES[int(np.abs(normal_of(orientation)).argmax())]


def describe_inputs(manifest: Manifest, left_out: Collection[str] = ()) -> dict[str, Any]:
    """Counts and ranges of the scans of a manifest without those left out; no entry describes a single scan.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from normal_guidance.data.manifest import ScanRow, write_manifest
        >>> axial = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
        >>> row = ScanRow("A", "P", 0, None, "dicom", ("1", "2"), (0, 0), (0.0, 5.0), 8, 8, None, 5.0, axial)
        >>> with TemporaryDirectory() as folder:
        ...     about = {"source": "folder", "root": "scans"}
        ...     describe_inputs(write_manifest(f"{folder}/manifest.parquet", [row], about))
        {'source': 'folder', 'scans': 1, 'modalities': {'CT': 1}, 'planes': {'axial': 1},
         'slices': {'fewest': 2, 'median': 2, 'most': 2}, 'slice_spacing': {'low': 5.0, 'median': 5.0, 'high': 5.0}}
    """
    kept = [number for number, scan in enumerate(manifest.scan_ids) if scan not in left_out]
    table, lengths = manifest.table.take(kept), manifest.lengths[kept]
    planes = Counter(filter(None, map(plane_of, table["orientation"].to_pylist())))
    spacings = [spacing for spacing in table["slice_spacing"].to_pylist() if spacing]
    return {
        "source": manifest.about.get("source"),
        "scans": len(kept),
        "modalities": dict(sorted(Counter(table["modality"].to_pylist()).items())),
        "planes": dict(sorted(planes.items())),
        "slices": {"fewest": int(lengths.min()), "median": int(np.median(lengths)), "most": int(lengths.max())},
        "slice_spacing": _range(spacings) if spacings else None,
    }


def _range(spacings: Sequence[float]) -> dict[str, float]:
    """Low, median and high in mm, rounded to the micrometre because manifests hold float32."""
    values = np.percentile(np.array(spacings, np.float64), SPACING_PERCENTILES).round(3).tolist()
    return dict(zip(("low", "median", "high"), values, strict=True))
