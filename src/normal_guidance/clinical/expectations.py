"""The kind of scan that a model was made for, and why a scan is not of that kind."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Annotated, Any

from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.values import ValueRange
from normal_guidance.features.scan_kind import ScanSummary, plane_of
from normal_guidance.typed_json import Between

SPACING_SLACK = 1.5
"""Slice spacing may be smaller or larger than in the training scans by this factor."""

FEWEST_SHARE = 0.5
"""A scan is too short with less than this share of the slices of the shortest training scan."""


@dataclass(frozen=True)
class Expectations:
    """The kind of the training scans; what was not recorded is None or empty, and not checked.

    Args:
        modalities: as DICOM abbreviates them.
        planes: axial, coronal, sagittal.
        slice_spacing: low and high in mm, the 1st and 99th percentile of the training scans.
        fewest_slices: of the shortest training scan.
        most_slices: of the longest training scan; longer scans are accepted.
        values: of the training scans; `clinical.expected_values` compares a scan's with them.
    """

    modalities: tuple[str, ...] = ()
    planes: tuple[str, ...] = ()
    slice_spacing: tuple[float, float] | None = None
    fewest_slices: Annotated[int, Between(0.0)] | None = None
    most_slices: Annotated[int, Between(0.0)] | None = None
    values: ValueRange | None = None

    @staticmethod
    def from_scans(scans: ScanSummary | None) -> Expectations:
        """Make expectations from the summary of the training scans; empty ones from None."""
        if scans is None:
            return Expectations()
        spacing = scans.slice_spacing
        return Expectations(
            modalities=tuple(scans.modalities),
            planes=tuple(scans.planes),
            slice_spacing=None if spacing is None else (spacing.low, spacing.high),
            fewest_slices=scans.slices.fewest,
            most_slices=scans.slices.most,
            values=scans.values,
        )

    def as_json(self) -> dict[str, Any]:
        """The fields; `read_as` is the inverse."""
        return asdict(self)

    def why_not(self, row: ScanRow) -> list[str]:
        """Reasons why a scan is not of this kind, each with its value and the range; empty if it is."""
        return [*self._modality(row), *self._plane(row), *self._spacing(row), *self._slices(row)]

    def _modality(self, row: ScanRow) -> list[str]:
        if not self.modalities or row.modality in self.modalities:
            return []
        return [f"its modality is {row.modality}; the model was trained on {', '.join(self.modalities)}"]

    def _plane(self, row: ScanRow) -> list[str]:
        plane = plane_of(row.orientation)
        if not self.planes or plane is None or plane in self.planes:
            return []
        return [f"its slices are {plane}; the model was trained on {' and '.join(self.planes)} ones"]

    def _spacing(self, row: ScanRow) -> list[str]:
        if self.slice_spacing is None or row.slice_spacing is None:
            return []
        low, high = self.slice_spacing
        least, most = low / SPACING_SLACK, high * SPACING_SLACK
        if least <= row.slice_spacing <= most:
            return []
        trained = f"{low:.3g} to {high:.3g} mm"
        return [
            f"its slices are {row.slice_spacing:.3g} mm apart; the model was trained on {trained} and takes "
            f"{least:.3g} to {most:.3g} mm"
        ]

    def _slices(self, row: ScanRow) -> list[str]:
        if self.fewest_slices is None or len(row) >= self.least_slices:
            return []
        return [
            f"it has {len(row)} slice{'' if len(row) == 1 else 's'}; the model was trained on {self.fewest_slices} to "
            f"{self.most_slices} and takes {self.least_slices} or more"
        ]

    @property
    def least_slices(self) -> int:
        """The least number of slices that a scan must have."""
        return 1 if self.fewest_slices is None else math.ceil(self.fewest_slices * FEWEST_SHARE)

    def __str__(self) -> str:
        """Describe the kind of scan for people."""
        spacing = self.slice_spacing
        parts = [
            ", ".join(self.modalities),
            ", ".join(self.planes),
            "" if spacing is None else f"slices {spacing[0]:.3g} to {spacing[1]:.3g} mm apart",
            "" if self.fewest_slices is None else f"{self.fewest_slices} to {self.most_slices} slices",
        ]
        return ", ".join(part for part in parts if part) or "not recorded"
