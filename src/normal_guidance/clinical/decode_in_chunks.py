"""Decode long scans some slices at a time: a worker holds the encoder's small images, not the whole volume."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import numpy as np
from jaxtyping import Float32

from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.problems import Problem
from normal_guidance.features.encoder_inputs import Decoding

PIECE = 64
"""Slices that are decoded at a time: 64 MiB at 512 x 512."""


@dataclass(frozen=True)
class PiecewiseDecoding(Decoding):
    """Decode like `Decoding`, with the same bits and problems, in less memory: 2,000 slices of 512 x 512 are 2 GiB.

    Two kinds of scans are read at once: slices that are not square, whose margin is the whole scan's minimum, and files
    with several slices.
    """

    def pixels(self, row: ScanRow) -> tuple[Float32[np.ndarray, "slices channels size size"], list[Problem]]:
        """The encoder's input, and the scan's problems."""
        if row.rows != row.columns or len(set(row.files)) < len(row) or len(row) <= PIECE:
            return super().pixels(row)
        size = self.preprocessing.size
        images = np.empty((len(row), self.preprocessing.channels, size, size), np.float32)
        problems: list[Problem] = []
        for piece, place in _pieces(row):
            images[place], odd = super().pixels(piece)
            problems += odd
        return images, problems


def _pieces(row: ScanRow) -> Iterator[tuple[ScanRow, slice]]:
    """Yield consecutive parts of the scan, and their places in it."""
    for start in range(0, len(row), PIECE):
        place = slice(start, start + PIECE)
        yield (
            replace(row, files=row.files[place], frames=row.frames[place], positions=row.positions[place]),
            place,
        )
