"""Reads a scan and turns it into the encoder's input; runs in worker processes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from jaxtyping import Float32

from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.problems import Problem, UnreadableError
from normal_guidance.features.preprocessing import Preprocessing, Statistics

Reader = Callable[..., tuple[np.ndarray, list[Problem]]]
"""Like `normal_guidance.data.volumes.read_volume(row, root, repair=True)`; workers find it by its name."""


@dataclass(frozen=True)
class Decoding:
    """How scans are read and preprocessed; sent to worker processes.

    Args:
        read: returns a scan's slices in HU, and its problems.
        root: where the scans lie.
        repair: whether known mistakes in the files are repaired.
        preprocessing: from HU to the encoder's input.
    """

    read: Reader
    root: Path
    repair: bool
    preprocessing: Preprocessing

    def pixels(self, row: ScanRow) -> tuple[Float32[np.ndarray, "slices channels size size"], list[Problem]]:
        """The encoder's input, and the scan's problems."""
        hu, problems = self._read(row)
        return self.preprocessing.apply(hu), problems

    def statistics(self, row: ScanRow) -> Statistics:
        """Mean and sd of a scan before it is normalised."""
        return self.preprocessing.scan_statistics(self._read(row)[0])

    def _read(self, row: ScanRow) -> tuple[np.ndarray, list[Problem]]:
        hu, problems = self.read(row, self.root, repair=self.repair)
        if len(hu) != len(row):
            raise UnreadableError("failed", f"{len(hu)} slices were read, but the manifest has {len(row)}")
        return hu, problems
