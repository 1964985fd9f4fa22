"""A scan of the manifest as one volume in HU."""

from __future__ import annotations

from collections import defaultdict
from pathlib import Path

import numpy as np
from jaxtyping import Float32, Int16

from normal_guidance.data.containers import locate
from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.problems import Problem, UnreadableError

ACTIONS = {
    "bits": "bits above BitsStored were replaced by the sign",
    "intercept": "wrapped values were restored, with the intercept -1000",
    "no_rescale": "read as the detail says",
}
"""The action for each problem of pixels."""

Slices = Int16[np.ndarray, "slices rows columns"] | Float32[np.ndarray, "slices rows columns"]


def read_volume(row: ScanRow, root: Path, *, repair: bool = True) -> tuple[Slices, list[Problem]]:
    """Reads all slices of a scan, in the row's order, with the problems of their pixels.

    HU are int16 where all are whole numbers of its range, as in most CT, else float32.  A file with several slices is
    decoded once.

    Raises UnreadableError, with the name of the file, if a file cannot be decoded or has another size than the row: a
    scan with a slice missing would be another scan.
    """
    volume: Slices = np.empty((0, 0, 0), np.int16)
    problems: list[Problem] = []
    places: dict[str, list[int]] = defaultdict(list)
    for place, file in enumerate(row.files):
        places[file].append(place)
    for file, wanted in places.items():
        slices, notes = _read_file(row.kind, root, file, repair)
        frames = [row.frames[place] for place in wanted]
        _check(slices, frames, row, file)
        if not volume.size:  # a wrong size in the manifest might not fit the memory; it is checked by now
            volume = np.empty((len(row), row.rows, row.columns), slices.dtype)
        elif slices.dtype != volume.dtype:
            volume = volume.astype(np.float32, copy=False)
        for place, frame in zip(wanted, frames, strict=True):
            volume[place] = slices[frame]
        problems += [Problem(row.scan_id, file, kind, detail, ACTIONS[kind]) for kind, detail in notes]
    return volume, problems


def _read_file(kind: str, root: Path, file: str, repair: bool) -> tuple[Slices, list[tuple[str, str]]]:
    content = locate(root, file)
    if kind == "nifti":
        from normal_guidance.data.nifti import read_nifti

        return read_nifti(content, file), []
    from normal_guidance.data.dicom_slices import read_pixels

    return read_pixels(content, file, repair=repair)


def _check(slices: Slices, frames: list[int], row: ScanRow, file: str) -> None:
    if slices.shape[1:] != (row.rows, row.columns):
        raise UnreadableError(
            "unreadable",
            f"{file}: {slices.shape[1]} x {slices.shape[2]} pixels, but the manifest says {row.rows} x {row.columns}",
        )
    if max(frames) >= len(slices) or min(frames) < 0:
        raise UnreadableError("unreadable", f"{file}: {len(slices)} slices, but the manifest wants slice {max(frames)}")
