"""Scans are read slice by slice in the manifest's order, or not at all; NIfTI as axial slices in space."""

import gzip
import itertools
import runpy
import sys
from pathlib import Path

import nibabel
import numpy as np
import pytest
from drawn_dicom import image, saved
from nibabel.orientations import apply_orientation, axcodes2ornt, inv_ornt_aff, io_orientation, ornt_transform

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.index import volumes
from normal_guidance.scans.index.manifest import ScanRow
from normal_guidance.scans.index.problems import Problem
from normal_guidance.scans.index.volumes import read_nifti, read_nifti_header, read_volume
from small_files import put

HU = np.random.default_rng(0).integers(-1000, 2000, (4, 6, 5)).astype(np.int16)


def dicom(stored: np.ndarray, **tags: object) -> bytes:
    return saved(image(stored, **{"RescaleIntercept": "0", **tags}))


def row(files: tuple[str, ...], frames: tuple[int, ...] | None = None, kind: str = "dicom", **others) -> ScanRow:
    places = tuple(float(i) for i in range(len(files)))
    sizes = {"rows": 6, "columns": 5, **others}
    return ScanRow("A17", "P1", 1, None, kind, files, frames or (0,) * len(files), places, **sizes)


def put_all(root: Path, contents: dict[str, bytes]) -> None:
    for name, content in contents.items():
        put(root / name, content)


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (1, 2, 0)])
def test_one_slice_in_fractions_makes_the_scan_float32(tmp_path, order):
    slopes = ("1", "0.5", "1")
    put_all(tmp_path, {f"{i}.dcm": dicom(HU[i], RescaleSlope=slopes[i]) for i in range(3)})
    volume, _ = read_volume(row(tuple(f"{i}.dcm" for i in order)), tmp_path)
    assert volume.dtype == np.float32
    assert np.array_equal(volume, [HU[i] * float(slopes[i]) for i in order])


def test_several_frames_in_one_file_are_decoded_once(tmp_path, monkeypatch):
    put_all(tmp_path, {"a.dcm": dicom(HU), "b.dcm": dicom(HU[0])})
    read, original = [], volumes.read_pixels

    def noting(content, file, **options):
        read.append(file)
        return original(content, file, **options)

    monkeypatch.setattr(volumes, "read_pixels", noting)
    volume, _ = read_volume(row(("a.dcm", "b.dcm", "a.dcm", "a.dcm"), (3, 0, 1, 2)), tmp_path)
    assert np.array_equal(volume, HU[[3, 0, 1, 2]])
    assert read == ["a.dcm", "b.dcm"]


def test_repairs_are_reported_and_can_be_switched_off(tmp_path):
    wrapped = (HU % 4096).astype(np.uint16)
    put_all(tmp_path, {f"{i}.dcm": dicom(wrapped[i], BitsStored=12, HighBit=11) for i in range(2)})
    scan = row(("0.dcm", "1.dcm"))
    volume, problems = read_volume(scan, tmp_path)
    assert np.array_equal(volume, HU[:2])
    assert [problem[:3] for problem in problems] == [("A17", "0.dcm", "intercept"), ("A17", "1.dcm", "intercept")]
    assert all(isinstance(problem, Problem) and "restored" in problem.action for problem in problems)
    volume, problems = read_volume(scan, tmp_path, repair=False)
    assert np.array_equal(volume, wrapped[:2])
    assert problems == []


def test_a_slice_that_cannot_be_read_is_named(tmp_path):
    large = dicom(np.zeros((7, 5), np.int16))
    put_all(tmp_path, {"0.dcm": dicom(HU[0]), "cut.dcm": dicom(HU[0])[:-10], "a.dcm": b"text", "large.dcm": large})
    for scan, message in (
        (row(("0.dcm", "cut.dcm")), "cut.dcm: 1 x 6 x 5 pixels"),
        (row(("0.dcm", "a.dcm")), "a.dcm: not a DICOM file"),
        (row(("0.dcm", "gone.dcm")), "gone.dcm: gone.dcm is not there"),
        (row(("0.dcm", "large.dcm")), "large.dcm: 7 x 5 pixels, but the manifest says 6 x 5"),
        (row(("0.dcm", "0.dcm"), (0, 1)), "0.dcm: 1 slices, but the manifest wants slice 2"),
        (row(("0.dcm", "../x.dcm")), r"unsafe_path: \.\./x.dcm"),
        # petabytes: rows and columns of compressed files can only be checked by decoding
        (row(("0.dcm",) * 100_000, rows=65_535, columns=65_535), "6 x 5 pixels, but the manifest says 65535 x 65535"),
    ):
        with pytest.raises(UnreadableError, match=message):
            read_volume(scan, tmp_path)


RNG = np.random.default_rng(3)
VOXELS = RNG.integers(-1024, 2000, (4, 5, 6)).astype(np.int16)  # x, y, z in RAS
AFFINE = np.array([[0.5, 0, 0, -30], [0, 0.75, 0, 40], [0, 0, 2.5, -100], [0, 0, 0, 1.0]])
AXES = itertools.permutations(("LR", "PA", "IS"))
ORIENTATIONS = ["".join(sides) for axes in AXES for sides in itertools.product(*axes)]


def written(path: Path, voxels: np.ndarray, affine: np.ndarray, kind: type = nibabel.Nifti1Image) -> Path:
    nibabel.save(kind(voxels, affine), path)
    return path


def assert_refused(content: bytes | Path, *words: str) -> None:
    for read in (read_nifti_header, read_nifti):
        with pytest.raises(UnreadableError) as caught:
            read(content, "x.nii")
        assert caught.value.kind == "unreadable"
        assert all(word in caught.value.detail for word in ("x.nii", *words))


def test_slices_and_geometry_by_hand(tmp_path):
    """RAS: x grows to the right, y to the front.  DICOM: columns to the left, rows to the back."""
    path = written(tmp_path / "x.nii.gz", VOXELS, AFFINE)
    volume = read_nifti(path)
    assert volume.shape == (6, 5, 4)
    assert volume.dtype == np.float32
    for i, j, k in itertools.product(range(4), range(5), range(6)):
        assert volume[k, 4 - j, 3 - i] == VOXELS[i, j, k]

    header = read_nifti_header(path, "x.nii.gz")
    assert (header.frames, header.rows, header.columns, header.modality) == (6, 5, 4, "CT")
    assert header.pixel_spacing == (0.75, 0.5)
    assert header.orientation == header.frame_orientation == (1, 0, 0, 0, 1, 0)
    # The first pixel of the first slice is voxel (3, 4, 0): RAS (-28.5, 43, -100).
    assert header.position == header.frame_positions[0] == (28.5, -43, -100)
    assert header.frame_positions[5] == (28.5, -43, -87.5)


@pytest.mark.parametrize("codes", ORIENTATIONS)
@pytest.mark.parametrize("zipped", [False, True])
def test_every_orientation_gives_the_same_slices(tmp_path, codes, zipped):
    turn = ornt_transform(io_orientation(AFFINE), axcodes2ornt(codes))
    voxels, affine = apply_orientation(VOXELS, turn), AFFINE @ inv_ornt_aff(turn, VOXELS.shape)
    assert "".join(nibabel.aff2axcodes(affine)) == codes
    path = written(tmp_path / ("x.nii.gz" if zipped else "x.nii"), voxels, affine)
    plain = written(tmp_path / "plain.nii", VOXELS, AFFINE)

    assert np.array_equal(read_nifti(path), read_nifti(plain))
    header, expected = read_nifti_header(path, "x"), read_nifti_header(plain, "x")
    assert (header.rows, header.columns, header.frames) == (expected.rows, expected.columns, expected.frames)
    assert np.allclose(header.frame_positions, expected.frame_positions)
    assert np.allclose(header.orientation, expected.orientation)
    assert np.allclose(header.pixel_spacing, expected.pixel_spacing)
    assert np.array_equal(read_nifti(path.read_bytes(), "x"), read_nifti(plain))


def test_every_pixel_lies_where_the_affine_says(tmp_path):
    """An oblique volume: position + column * spacing * row direction + ... is the affine's point, in LPS."""
    angle = 0.3
    tilt = np.array([[1, 0, 0], [0, np.cos(angle), -np.sin(angle)], [0, np.sin(angle), np.cos(angle)]])
    affine = AFFINE.copy()
    affine[:3, :3] = tilt @ np.array([[0, 1, 0], [-1, 0, 0], [0, 0, 1]]) @ AFFINE[:3, :3]
    path = written(tmp_path / "x.nii", VOXELS, affine)
    volume, header = read_nifti(path), read_nifti_header(path, "x")
    right, down = np.array(header.orientation[:3]), np.array(header.orientation[3:])
    normal = np.cross(right, down)
    along = [np.dot(normal, position) for position in header.frame_positions]
    assert (np.diff(along) > 0).all()
    for k, i, j in [(0, 0, 0), (2, 1, 3), (5, header.rows - 1, header.columns - 1)]:
        point = header.frame_positions[k] + j * header.pixel_spacing[1] * right + i * header.pixel_spacing[0] * down
        voxel = np.linalg.solve(affine, [-point[0], -point[1], point[2], 1])[:3]
        assert np.allclose(voxel, voxel.round(), atol=1e-4)
        assert volume[k, i, j] == VOXELS[tuple(voxel.round().astype(int))]


def test_scaling(tmp_path):
    image = nibabel.Nifti1Image(VOXELS, AFFINE)
    image.header.set_slope_inter(2, -1024)
    nibabel.save(image, tmp_path / "x.nii")
    content = bytearray((tmp_path / "x.nii").read_bytes())
    content[112:120] = np.array([0.5, -1000], "<f4").tobytes()  # scl_slope, scl_inter
    stored = np.frombuffer(bytes(content[352:]), "<i2").reshape(VOXELS.shape, order="F")
    expected = (stored * 0.5 - 1000)[::-1, ::-1].transpose(2, 1, 0)
    assert np.array_equal(read_nifti(bytes(content)), expected)


def test_nifti_2_and_floats_and_a_fourth_dimension_of_one(tmp_path):
    expected = VOXELS[::-1, ::-1].transpose(2, 1, 0)
    for voxels in (VOXELS, VOXELS.astype(np.float64), VOXELS[..., None]):
        path = written(tmp_path / "x.nii", voxels, AFFINE, nibabel.Nifti2Image)
        assert np.array_equal(read_nifti(path), expected)
        assert read_nifti_header(path, "x").frames == 6


def test_what_is_no_volume_is_refused(tmp_path):
    assert_refused(b"", "")
    assert_refused(b"scan_id,label\n" * 100)
    assert_refused(b"\x1f\x8b" + b"junk" * 100)
    assert_refused(tmp_path / "nowhere.nii", "No such file")
    for shape, dtype, words in (
        ((4, 4, 4, 2), "i2", "4 x 4 x 4 x 2"),
        ((4, 4), "i2", "4 x 4"),
        ((4, 4, 4), "c8", "complex"),
    ):
        assert_refused(written(tmp_path / "a.nii", np.zeros(shape, dtype), AFFINE), words)
    lost = nibabel.Nifti1Image(VOXELS, AFFINE)
    lost.set_qform(None, code=0)
    lost.set_sform(None, code=0)
    nibabel.save(lost, tmp_path / "e.nii")
    assert_refused(tmp_path / "e.nii", "neither qform nor sform says how the volume lies in the patient")
    affine = AFFINE.copy()
    affine[:3, 2] = 0
    image = nibabel.Nifti1Image(VOXELS, None)
    image.header.set_sform(affine, code=1)
    nibabel.save(image, tmp_path / "d.nii")
    assert_refused(tmp_path / "d.nii", "affine")
    voxels = VOXELS.astype(np.float32)
    voxels[1, 2, 3] = np.nan
    with pytest.raises(UnreadableError, match="1 of 120 voxels"):
        read_nifti(written(tmp_path / "x.nii", voxels, AFFINE))


def test_files_cut_off_and_absurd_sizes_are_refused(tmp_path):
    content = written(tmp_path / "x.nii", VOXELS, AFFINE).read_bytes()
    assert_refused(content[:-100], "592 bytes of header and voxels")
    assert_refused(content[:200])
    huge = bytearray(content)
    huge[42:48] = np.array([32767, 32767, 32767], "<i2").tobytes()
    assert_refused(bytes(huge), "70,362,301,923,678 bytes")
    assert_refused(gzip.compress(bytes(huge)), "70,362,301,923,678 bytes")
    with pytest.raises(UnreadableError):
        read_nifti(gzip.compress(content)[:-50])


@pytest.mark.parametrize("shape", [(1, 1, 2**24), (2**31, 1, 1), (1, 65_536, 1)])
def test_nifti_2_with_billions_of_slices_is_refused_at_once(tmp_path, shape):
    """Packed zeros make such sizes plausible: the positions of millions of slices would take gigabytes."""
    content = bytearray(written(tmp_path / "x.nii", VOXELS, AFFINE, nibabel.Nifti2Image).read_bytes())
    content[24:48] = np.array(shape, "<i8").tobytes()
    packed = gzip.compress(bytes(content) + bytes(2**24), 1) + RNG.bytes(4 * 2**20)
    assert_refused(packed, " x ".join(map(str, shape)), "65535")


def test_missing_nibabel_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "nibabel", None)
    with pytest.raises(UserError, match=r"nibabel; pip install 'normal-guidance\[dicom\]'"):
        runpy.run_path(volumes.__file__)
