"""Reads scans for an encoder, some slices at a time, in worker processes.

This module does not import torch: a worker would wait for that longer than for everything else.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

import numpy as np

from normal_guidance.base.errors import UnreadableError
from normal_guidance.scans.features.windows import Range, Window, in_field, middle, range_of
from normal_guidance.scans.index.manifest import ScanRow, sample_values
from normal_guidance.scans.index.problems import Problem
from normal_guidance.scans.index.volumes import Slices

Reader = Callable[..., tuple[np.ndarray, list[Problem]]]
"""Like `normal_guidance.scans.index.volumes.read_volume(row, root, repair=True)`; workers find it by its name."""

MAX_SIDE = 8192
"""Slices with more rows or columns are an error: CT has 512 to 2048, and a square of 65,535 would take 16 GiB."""

PIECE = 64
"""Most slices of a scan that a worker reads at a time, where they are files of their own: 32 MiB at 512 x 512."""


class Pixels(NamedTuple):
    """Slices as they are sent to the encoder's process."""

    hu: Slices
    lowest: float  # their minimum: it fills the margins of slices that are not square
    ranges: tuple[Range | None, ...] = ()
    """The range of each window in them, where a window is one of percentiles; else empty."""
    sample: np.ndarray = np.empty(0, np.float32)
    """Some of the values of the whole slices, from which the scan's `Values` are found."""


@dataclass(frozen=True)
class Decoding:
    """How scans are read; sent to worker processes."""

    read: Reader
    root: Path
    repair: bool
    field: float | None = None  # mm of each slice's middle that are sent; None sends whole slices
    windows: tuple[Window | None, ...] = ()
    """The windows of all channels, where one is of percentiles, whose ranges are then sent too; else empty."""
    held: frozenset[str] = frozenset()
    """Ids of scans that are not read, because a store or a unit has their features already."""

    def pixels(self, row: ScanRow) -> tuple[Pixels, list[Problem]]:
        """The slices, int16 or float32, and their problems; slices that cannot be used raise an `UnreadableError`."""
        if row.scan_id in self.held:
            raise UnreadableError("failed", "its features are there already")
        hu, problems = self.read(row, self.root, repair=self.repair)
        if len(hu) != len(row):
            raise UnreadableError("failed", f"{len(hu)} slices were read, but the manifest has {len(row)}")
        slices, rows, columns = hu.shape
        if not hu.size or max(rows, columns) > MAX_SIDE:
            raise UnreadableError("failed", f"{slices} slices of {rows} x {columns} pixels (at most {MAX_SIDE})")
        sample = sample_values(hu)
        hu = in_field(hu, row.pixel_spacing, self.field)
        hu = np.ascontiguousarray(hu, np.int16 if hu.dtype == np.int16 else np.float32)
        lowest = float(hu.min())
        if hu.dtype != np.int16 and not (math.isfinite(lowest) and math.isfinite(hu.max())):
            raise UnreadableError("failed", "pixels that are not finite")
        return Pixels(hu, lowest, tuple(range_of(window, hu) for window in self.windows), sample), problems


def cut(row: ScanRow, field: float | None = None, *, whole: bool = False) -> list[ScanRow]:
    """Consecutive parts of a scan of at most `PIECE` slices."""
    # Not cut are slices that are not square, or whose field is not, because their margin is the whole scan's minimum;
    # those whose window is of the whole scan's percentiles (`whole`); and files with several slices.
    if whole or not _is_square(row, field) or len(set(row.files)) < len(row):
        return [row]
    parts = [slice(start, start + PIECE) for start in range(0, len(row), PIECE)]
    return [
        replace(row, files=row.files[part], frames=row.frames[part], positions=row.positions[part]) for part in parts
    ]


def _is_square(row: ScanRow, field: float | None) -> bool:
    if field is None:
        return row.rows == row.columns
    try:
        down, across = middle(row.rows, row.columns, row.pixel_spacing, field)
    except UnreadableError:  # it is recorded when the scan is read
        return False
    return down.stop - down.start == across.stop - across.start
