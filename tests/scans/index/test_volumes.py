"""A scan is read slice by slice in the manifest's order, or not at all."""

import zipfile
from pathlib import Path

import nibabel
import numpy as np
import pytest
from drawn_dicom import image, saved

from normal_guidance.base.errors import UnreadableError
from normal_guidance.scans.index.manifest import ScanRow
from normal_guidance.scans.index.problems import Problem
from normal_guidance.scans.index.volumes import read_volume

HU = np.random.default_rng(0).integers(-1000, 2000, (4, 6, 5)).astype(np.int16)


def dicom(stored: np.ndarray, **tags: object) -> bytes:
    return saved(image(stored, **{"RescaleIntercept": "0", **tags}))


def row(files: tuple[str, ...], frames: tuple[int, ...] | None = None, kind: str = "dicom", **others) -> ScanRow:
    places = tuple(float(i) for i in range(len(files)))
    sizes = {"rows": 6, "columns": 5, **others}
    return ScanRow("A17", "P1", 1, None, kind, files, frames or (0,) * len(files), places, **sizes)


def put(root: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_bytes(content)


def test_files_of_one_slice_come_in_the_rows_order(tmp_path):
    put(tmp_path, {f"a/{i}.dcm": dicom(HU[i]) for i in range(4)})
    volume, problems = read_volume(row(("a/3.dcm", "a/0.dcm", "a/2.dcm")), tmp_path)
    assert volume.dtype == np.int16
    assert np.array_equal(volume, HU[[3, 0, 2]])
    assert problems == []


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_one_slice_in_fractions_makes_the_scan_float32(tmp_path, order):
    slopes = ("1", "0.5", "1")
    put(tmp_path, {f"{i}.dcm": dicom(HU[i], RescaleSlope=slopes[i]) for i in range(3)})
    volume, _ = read_volume(row(tuple(f"{i}.dcm" for i in order)), tmp_path)
    assert volume.dtype == np.float32
    assert np.array_equal(volume, [HU[i] * float(slopes[i]) for i in order])


def test_slices_in_an_archive(tmp_path):
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        for i in range(4):
            archive.writestr(f"x/{i}.dcm", dicom(HU[i]))
    volume, _ = read_volume(row(tuple(f"a.zip!x/{i}.dcm" for i in (1, 2, 0))), tmp_path)
    assert np.array_equal(volume, HU[[1, 2, 0]])


def test_several_frames_in_one_file_are_decoded_once(tmp_path, monkeypatch):
    put(tmp_path, {"a.dcm": dicom(HU), "b.dcm": dicom(HU[0])})
    from normal_guidance.scans.index import volumes as reader

    read, original = [], reader.read_pixels
    monkeypatch.setattr(
        reader, "read_pixels", lambda content, file, **options: read.append(file) or original(content, file, **options)
    )
    volume, _ = read_volume(row(("a.dcm", "b.dcm", "a.dcm", "a.dcm"), (3, 0, 1, 2)), tmp_path)
    assert np.array_equal(volume, HU[[3, 0, 1, 2]])
    assert read == ["a.dcm", "b.dcm"]


@pytest.mark.parametrize("name", ["a.nii", "a.nii.gz"])
def test_nifti(tmp_path, name):
    """The file is written with DICOM's axes: its array is the transposed volume."""
    nibabel.save(nibabel.Nifti1Image(HU.transpose(2, 1, 0), np.diag([-1, -1, 2, 1])), tmp_path / name)
    volume, problems = read_volume(row((name,) * 3, (0, 1, 3), "nifti"), tmp_path)
    assert np.array_equal(volume, HU[[0, 1, 3]])
    assert problems == []


def test_repairs_are_reported_and_can_be_switched_off(tmp_path):
    wrapped = (HU % 4096).astype(np.uint16)
    put(tmp_path, {f"{i}.dcm": dicom(wrapped[i], BitsStored=12, HighBit=11) for i in range(2)})
    scan = row(("0.dcm", "1.dcm"))
    volume, problems = read_volume(scan, tmp_path)
    assert np.array_equal(volume, HU[:2])
    assert [problem[:3] for problem in problems] == [("A17", "0.dcm", "intercept"), ("A17", "1.dcm", "intercept")]
    assert all(isinstance(problem, Problem) and "restored" in problem.action for problem in problems)
    volume, problems = read_volume(scan, tmp_path, repair=False)
    assert np.array_equal(volume, wrapped[:2])
    assert problems == []


def test_every_note_has_an_action(tmp_path):
    stored = (HU[0] & 0x0FFF).astype(np.int16)
    put(tmp_path, {"0.dcm": dicom(stored, BitsStored=12, HighBit=11, RescaleSlope=None)})
    _, problems = read_volume(row(("0.dcm",)), tmp_path)
    assert [problem.kind for problem in problems] == ["bits", "no_rescale"]
    assert all(problem.action for problem in problems)


@pytest.mark.parametrize(
    ("files", "frames", "word"),
    [
        (("0.dcm", "cut.dcm"), (0, 0), "cut.dcm: 1 x 6 x 5 pixels"),
        (("0.dcm", "text.dcm"), (0, 0), "text.dcm: not a DICOM file"),
        (("0.dcm", "gone.dcm"), (0, 0), "gone.dcm: gone.dcm is not there"),
        (("0.dcm", "large.dcm"), (0, 0), "large.dcm: 7 x 5 pixels, but the manifest says 6 x 5"),
        (("0.dcm", "0.dcm"), (0, 1), "0.dcm: 1 slices, but the manifest wants slice 1"),
        (("0.dcm", "../x.dcm"), (0, 0), r"unsafe_path: \.\./x.dcm"),
    ],
)
def test_a_slice_that_cannot_be_read_is_named(tmp_path, files, frames, word):
    large = np.zeros((7, 5), np.int16)
    put(
        tmp_path, {"0.dcm": dicom(HU[0]), "cut.dcm": dicom(HU[0])[:-10], "text.dcm": b"text", "large.dcm": dicom(large)}
    )
    with pytest.raises(UnreadableError, match=word):
        read_volume(row(files, frames), tmp_path)


def test_a_manifest_that_states_petabytes_is_refused(tmp_path):
    """Rows and columns of compressed files can only be checked by decoding."""
    put(tmp_path, {"a.dcm": dicom(HU[0])})
    with pytest.raises(UnreadableError, match="6 x 5 pixels, but the manifest says 65535 x 65535"):
        read_volume(row(("a.dcm",) * 100_000, rows=65_535, columns=65_535), tmp_path)


def test_a_nifti_file_that_cannot_be_read_is_named(tmp_path):
    put(tmp_path, {"a.nii": b"no volume"})
    with pytest.raises(UnreadableError, match=r"a\.nii: "):
        read_volume(row(("a.nii",), (0,), "nifti"), tmp_path)
