"""The samples for mutation: small phantom datasets with their manifests, and single files of every kind.

The first process makes them once per run; the workers only read them.
"""

from __future__ import annotations

import io
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import NamedTuple

import nibabel
import numpy as np
import pydicom
from own_folders import make_folders
from pydicom.uid import ExplicitVRBigEndian, ImplicitVRLittleEndian
from table_mutations import read_rows, write_rows

from normal_guidance.scans.index.indexing import index
from normal_guidance.scans.index.manifest import Manifest, read_manifest
from normal_guidance.scans.phantom.phantom_files import write_phantom

OWN = "own"
"""The folder of what we wrote ourselves (`own_folders`)."""

SOURCES = ("rsna-ich", "rsna-pe", "rsna-at", "folder")
SIZE, SLICES, SCANS = 32, 12, 3
TABLE = "labels.csv"

TABLES = {
    "rsna-ich": ("stage_2_train.csv",),
    "rsna-pe": ("train.csv",),
    "rsna-at": ("image_level_labels_2024.csv", "train_series_meta.csv", "train_2024.csv"),
    "folder": (TABLE,),
}
"""Label tables of every source."""


def write_samples(folder: Path) -> None:
    """Fills an empty folder."""
    for source in SOURCES:
        root = folder / source
        write_phantom(source, root, scans=SCANS, size=SIZE, slices=SLICES, positive=0.5, compression="mixed")
        if source == "folder":
            _add_other_kinds(root)
        found = index(source, root, folder / f"{source}-index", table=table_of(source, root))
        assert len(found.manifest) == SCANS + 2 * (source == "folder"), found.problems
    _write_files(folder)
    make_folders(folder / OWN)


def table_of(source: str, root: Path) -> Path | None:
    return root / TABLE if source == "folder" else None


def _add_other_kinds(root: Path) -> None:
    """A scan in an archive, one in a file of many frames, a NIfTI volume with a mask."""
    scans = root / "scans"
    with zipfile.ZipFile(root / "scans.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for file in sorted((scans / "scan-0001").iterdir()):
            info = zipfile.ZipInfo(f"scan-0001/{file.name}")  # without today's date: cases are to be repeated
            archive.writestr(info, file.read_bytes(), zipfile.ZIP_DEFLATED)
            file.unlink()
    (scans / "scan-0001").rmdir()
    volume, mask = _volume(), np.zeros((SIZE, SIZE, SLICES), np.int16)
    mask[3:5, 3:5, 4:6] = 1
    for name, voxels in (("volume.nii.gz", volume), ("mask.nii", mask)):
        (root / name).write_bytes(_nifti(voxels, name.endswith(".gz")))
    write_phantom("folder", root / "frames", scans=1, size=SIZE, slices=SLICES, oddities=["multi_frame"])
    frames = next((root / "frames").rglob("*.dcm"))
    header, *rows = read_rows((root / TABLE).read_bytes())
    rows = [[*row, "", ""] for row in rows]
    rows[1][2] = "scans.zip!scan-0001"
    rows.append(["volume", "P9", "volume.nii.gz", "1", "", "", "mask.nii"])
    rows.append(["frames", "P10", frames.relative_to(root).as_posix(), "1", "", "3-5;7", ""])
    (root / TABLE).write_bytes(write_rows([[*header, "slice_ranges", "mask"], *rows]))


def _volume() -> np.ndarray:
    return np.random.default_rng(0).integers(-1000, 1000, (SIZE, SIZE, SLICES)).astype(np.int16)


def _nifti(voxels: np.ndarray, packed: bool = False, image: Callable[..., object] = nibabel.Nifti1Image) -> bytes:
    made = image(voxels, np.diag([-0.5, -0.5, 5.0, 1.0]))
    content = made.to_bytes()  # type: ignore[attr-defined]
    if packed:
        from gzip import compress

        return compress(content, mtime=0)
    return content


def _write_files(folder: Path) -> None:
    """Single files: two of each compression, some with oddities, other encodings of the header, volumes."""
    made = folder / "more"
    oddities = ["multi_frame", "bits", "secondary_capture"]
    truth = write_phantom("folder", made, scans=9, size=SIZE, slices=SLICES, oddities=oddities, compression="mixed")
    target = folder / "files"
    target.mkdir()
    for number, scan in enumerate(truth["scans"]):
        name = scan["oddity"] or scan["transfer_syntax"]
        for place in dict.fromkeys((scan["odd_files"] or scan["files"])[:2]):
            (target / f"{number}-{name}-{Path(place).stem}.dcm").write_bytes((made / place).read_bytes())
    plain = next(made / scan["files"][0] for scan in truth["scans"] if scan["transfer_syntax"].endswith(".1.2.1"))
    for name, syntax in (("implicit", ImplicitVRLittleEndian), ("big", ExplicitVRBigEndian)):
        dataset, buffer = pydicom.dcmread(plain), io.BytesIO()
        dataset.walk(lambda *_: None)  # parses every value: unparsed ones are written as they came
        if name == "big":
            dataset.PixelData = np.frombuffer(dataset.PixelData, "<u2").byteswap().tobytes()
        dataset.file_meta.TransferSyntaxUID = syntax
        pydicom.dcmwrite(buffer, dataset, implicit_vr=name == "implicit", little_endian=name != "big")
        (target / f"{name}.dcm").write_bytes(buffer.getvalue())
    volume = _volume()
    (target / "one.nii").write_bytes(_nifti(volume))
    (target / "packed.nii.gz").write_bytes(_nifti(volume, packed=True))
    (target / "float.nii").write_bytes(_nifti(volume.astype(np.float32)))
    (target / "two.nii.gz").write_bytes(_nifti(volume, packed=True, image=nibabel.Nifti2Image))


class Samples(NamedTuple):
    """The samples in a folder, read on demand."""

    folder: Path

    def files(self, suffix: str) -> list[Path]:
        return _files(self.folder / "files", suffix)

    def root(self, source: str) -> Path:
        return self.folder / source

    def manifest(self, source: str) -> Manifest:
        return _manifest(self.folder / f"{source}-index")


@cache
def _files(folder: Path, suffix: str) -> list[Path]:
    return [path for path in sorted(folder.iterdir()) if suffix in path.name]


@cache
def _manifest(folder: Path) -> Manifest:
    return read_manifest(folder)


if __name__ == "__main__":
    write_samples(Path(sys.argv[1]))
