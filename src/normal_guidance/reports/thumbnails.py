"""Small pictures of a scan's slices, windowed as the encoder saw them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from normal_guidance.data.manifest import Manifest
from normal_guidance.data.problems import UnreadableError
from normal_guidance.data.windows import Window, apply_windows
from normal_guidance.errors import UserError
from normal_guidance.evaluation.run_report import NOT_OURS
from normal_guidance.evaluation.runs import Data
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
        return [(int(place) + 1, apply_windows(volume[place, ::step, ::step], self.window)[0]) for place in places]

    @property
    def window(self) -> Sequence[Window | None]:
        """The window of the encoder's first channel, as a list of one."""
        about = self.scans.provenance if isinstance(self.scans, FeatureStore) else {}
        try:
            first = about["preprocessing"]["windows"][0]
            return [None if first is None else (float(first[0]), float(first[1]))]
        except (*NOT_OURS, IndexError):  # stores of other programs may have any provenance
            return [None]

    @cached_property
    def _number_of(self) -> dict[str, int]:
        return {scan: number for number, scan in enumerate(self.manifest.scan_ids)}
