"""A scan of the manifest as one volume in HU, from DICOM files (`pixels.py`) or a NIfTI file (here)."""

from __future__ import annotations

import gzip
import io
import math
import os
from collections import defaultdict
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float32, Int16

from normal_guidance.base.errors import UnreadableError
from normal_guidance.base.system import importing
from normal_guidance.scans.index.containers import locate
from normal_guidance.scans.index.dicom_slices import Header, refusing
from normal_guidance.scans.index.manifest import ScanRow
from normal_guidance.scans.index.pixels import read_pixels
from normal_guidance.scans.index.problems import Problem

with importing("dicom", "reading NIfTI needs nibabel"):
    import nibabel
    from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform

ACTIONS = {
    "bits": "bits above BitsStored were replaced by the sign",
    "intercept": "wrapped values were restored, with the intercept -1000",
    "no_rescale": "read as the detail says",
}
"""The action for each problem of pixels."""

Slices = Int16[np.ndarray, "slices rows columns"] | Float32[np.ndarray, "slices rows columns"]


def read_volume(row: ScanRow, root: Path, *, repair: bool = True) -> tuple[Slices, list[Problem]]:
    """Reads all slices of a scan in the row's order, and problems; raises UnreadableError if a slice is missing."""
    volume: Slices = np.empty((0, 0, 0), np.int16)
    problems: list[Problem] = []
    numbers: dict[str, list[int]] = defaultdict(list)
    for number, file in enumerate(row.files):
        numbers[file].append(number)
    for file, wanted in numbers.items():
        content = locate(root, file)
        if row.kind == "nifti":
            slices: Slices = read_nifti(content, file)
        else:
            slices, notes = read_pixels(content, file, repair=repair)
            problems += [Problem(row.scan_id, file, kind, detail, ACTIONS[kind]) for kind, detail in notes]
        frames = [row.frames[number] for number in wanted]
        if slices.shape[1:] != (row.rows, row.columns):
            size = f"{slices.shape[1]} x {slices.shape[2]} pixels"
            raise UnreadableError("unreadable", f"{file}: {size}, but the manifest says {row.rows} x {row.columns}")
        if max(frames) >= len(slices) or min(frames) < 0:
            detail = f"{file}: {len(slices)} slices, but the manifest wants slice {max(frames) + 1}"
            raise UnreadableError("unreadable", detail)
        if not volume.size:  # a wrong size in the manifest might not fit the memory; it is checked by now
            volume = np.empty((len(row), row.rows, row.columns), slices.dtype)
        elif slices.dtype != volume.dtype:
            volume = volume.astype(np.float32, copy=False)
        for number, frame in zip(wanted, frames, strict=True):
            volume[number] = slices[frame]
    return volume, problems


# NIfTI files are turned to the closest canonical orientation: slices from the feet to the head, rows from front to
# back, columns from the patient's right to the left, as in axial DICOM slices.  NIfTI's axes point right, anterior
# and superior, DICOM's left, posterior and superior.

EXPANSION = 1100  # largest ratio of gzip, about 1032 to 1, with some room: a file that promises more is damaged

LARGEST = 65_535
"""Most voxels along an axis, as in DICOM: NIfTI-2 can state billions, which take memory before a voxel is read."""

_GZIP = b"\x1f\x8b"
_NIFTI_2 = (b"\x1c\x02\x00\x00", b"\x00\x00\x02\x1c")
"""Beginnings of NIfTI-2: the size of its header, 540 bytes; NIfTI-1 has 348."""


def read_nifti_header(content: bytes | Path, file: str) -> Header:
    """The geometry of the slices that `read_nifti` returns, as a multi-frame DICOM header; CT is assumed."""
    with refusing(file), _image(content) as image:
        turn = _turn(image)
        lps = np.diag([-1.0, -1.0, 1.0, 1.0]) @ image.affine @ inv_ornt_aff(turn, image.shape[:3])
        across, down, along = lps[:3, :3].T
        columns, rows, slices = (image.shape[int(axis)] for axis in np.argsort(turn[:, 0]))
        positions = tuple(tuple((lps[:3, 3] + k * along).tolist()) for k in range(slices))
        widths = np.linalg.norm(down), np.linalg.norm(across)
        orientation = tuple((across / widths[1]).tolist()) + tuple((down / widths[0]).tolist())
        return Header(
            file=file,
            modality="CT",
            rows=rows,
            columns=columns,
            frames=slices,
            position=positions[0],
            orientation=orientation,
            pixel_spacing=(float(widths[0]), float(widths[1])),
            frame_positions=positions,
            frame_orientation=orientation,
        )


def read_nifti(content: bytes | Path, file: str = "") -> Float32[np.ndarray, "slices rows columns"]:
    """The volume in its own units (HU for CT), scaled as its header says; raises UnreadableError if it is damaged."""
    with refusing(file or str(content)[:100]), _image(content) as image:
        volume = apply_orientation(np.asarray(image.get_fdata(dtype=np.float32)), _turn(image))
        volume = np.ascontiguousarray(volume.reshape(volume.shape[:3]).transpose(2, 1, 0))
        bad = int((~np.isfinite(volume)).sum())
        if bad:
            raise UnreadableError("unreadable", f"{bad} of {volume.size} voxels are not finite")
        return volume


@contextmanager
def _image(content: bytes | Path) -> Iterator[Any]:
    """Opens an image of three dimensions; its voxels are not read yet."""
    with io.BytesIO(content) if isinstance(content, bytes) else content.open("rb") as file:
        zipped = file.read(2) == _GZIP
        available = file.seek(0, os.SEEK_END) * (EXPANSION if zipped else 1)
        file.seek(0)
        stream: Any = gzip.GzipFile(fileobj=file) if zipped else file
        start = stream.read(4)
        stream.seek(0)
        image: Any = (nibabel.Nifti2Image if start in _NIFTI_2 else nibabel.Nifti1Image).from_stream(stream)
        shape, dtype = image.shape, image.get_data_dtype()
        if len(shape) < 3 or any(size != 1 for size in shape[3:]) or min(shape) < 1 or max(shape) > LARGEST:
            shown = " x ".join(map(str, shape))
            raise UnreadableError("unreadable", f"the shape is {shown}; a volume has 3 dimensions of 1 to {LARGEST}")
        if dtype.kind not in "iuf":
            raise UnreadableError("unreadable", f"voxels are {dtype}, not single numbers")
        needed = int(image.dataobj.offset) + math.prod(shape) * dtype.itemsize
        if needed > available:
            detail = f"{needed:,} bytes of header and voxels cannot be in a file of this size"
            raise UnreadableError("unreadable", detail)
        if int(image.header["qform_code"]) <= 0 and int(image.header["sform_code"]) <= 0:
            detail = "neither qform nor sform says how the volume lies in the patient; write one of them"
            raise UnreadableError("unreadable", detail)
        if not np.isfinite(image.affine).all() or abs(np.linalg.det(image.affine[:3, :3])) < 1e-9:
            raise UnreadableError("unreadable", "the affine does not map voxels to space")
        yield image


def _turn(image: Any) -> np.ndarray:
    """The flips and exchanges that make the axes point left, posterior and superior."""
    return ornt_transform(io_orientation(image.affine), axcodes2ornt(("L", "P", "S")))
