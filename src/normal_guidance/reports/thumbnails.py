"""Small pictures of a scan's slices, windowed as the encoder saw them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np

from normal_guidance.data.manifest import Manifest
from normal_guidance.data.problems import UnreadableError
from normal_guidance.data.windows import Percentiles, Window, apply_windows, range_of, window_from_json
from normal_guidance.errors import UserError
from normal_guidance.evaluation.run_report import NOT_OURS
from normal_guidance.evaluation.runs import Data
from normal_guidance.features.field import in_field
from normal_guidance.features.store import FeatureStore

COUNT = 5
"""Pictures per scan, evenly spread along it."""

SIDE = 128
"""Approximate side of a picture in pixels."""


@dataclass(frozen=True)
class Images:
    """The images behind encoded scans."""

    manifest: Manifest
    scans: Data

    def thumbnails(self, scan: str) -> list[tuple[int, np.ndarray]]:
        """Up to `COUNT` slices of a scan as (slice number from 1, image)."""
        from normal_guidance.data.volumes import read_volume

        row = self.manifest[self._number_of[scan]]
        try:
            volume, _ = read_volume(row, self.manifest.root)
        except UnreadableError as error:
            raise UserError(
                f"scan {scan!r} cannot be shown ({error}); copy its files back to {self.manifest.root}, or leave out "
                "--index"
            ) from error
        step = max(1, max(volume.shape[1:]) // SIDE)
        places = np.unique(np.linspace(0, len(volume) - 1, COUNT + 2).round().astype(int)[1:-1])
        window = [range_of(self.window, in_field(volume, row.pixel_spacing, self._field))]
        return [(int(place) + 1, apply_windows(volume[place, ::step, ::step], window)[0]) for place in places]

    @property
    def window(self) -> Window | None:
        """The window of the encoder's first channel."""
        try:
            return window_from_json(self._preprocessing["windows"][0])
        except (*NOT_OURS, IndexError):  # stores of other programs may have any provenance
            return None

    @property
    def _field(self) -> float | None:
        """The field, where the window is of its percentiles."""
        return self._preprocessing.get("field") if isinstance(self.window, Percentiles) else None

    @property
    def _preprocessing(self) -> Any:
        return self.scans.provenance.get("preprocessing") if isinstance(self.scans, FeatureStore) else None

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {scan: number for number, scan in enumerate(self.manifest.scan_ids)}
