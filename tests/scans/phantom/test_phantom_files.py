"""Datasets are the same for the same seed, complete or absent; their files are standard CT images that other software
reads, with the HU that were drawn; and only pixels and label tables, which are Kaggle's, give the labels away."""

import json
import subprocess
import sys
from operator import attrgetter
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.uid import UID

from normal_guidance.base.errors import UserError
from normal_guidance.scans.phantom.drafts import ENCODINGS, Draft, make_draft
from normal_guidance.scans.phantom.phantom_files import COMPRESSIONS, LAYOUTS, write_draft, write_phantom
from normal_guidance.scans.phantom.plan import plan
from small_files import rows_of_csv

SMALL = {"size": 32, "slices": 12}

# PS3.3 A.3 with its modules; 2 may be empty, 1 must have a value.
TYPE_1 = """
    SOPClassUID SOPInstanceUID StudyInstanceUID SeriesInstanceUID Modality FrameOfReferenceUID ImageType PixelSpacing
    ImageOrientationPatient ImagePositionPatient SamplesPerPixel PhotometricInterpretation Rows Columns BitsAllocated
    BitsStored HighBit PixelRepresentation PixelData RescaleIntercept RescaleSlope RescaleType
"""
TYPE_2 = """
    PatientName PatientID PatientBirthDate PatientSex StudyDate StudyTime ReferringPhysicianName StudyID
    AccessionNumber SeriesNumber PositionReferenceIndicator Manufacturer InstanceNumber SliceThickness KVP
    AcquisitionNumber PatientPosition
"""

# Columns of Kaggle's tables.
CHEST_COLUMNS = """
    pe_present_on_image negative_exam_for_pe qa_motion qa_contrast flow_artifact rv_lv_ratio_gte_1 rv_lv_ratio_lt_1
    leftsided_pe chronic_pe true_filling_defect_not_pe rightsided_pe acute_and_chronic_pe central_pe indeterminate
"""
ABDOMEN_COLUMNS = """
    bowel_healthy bowel_injury extravasation_healthy extravasation_injury kidney_healthy kidney_low kidney_high
    liver_healthy liver_low liver_high spleen_healthy spleen_low spleen_high
"""


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.slow(but="rsna-ich")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_same_seed_gives_the_same_bytes(tmp_path, layout):
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_phantom(layout, tmp_path / name, scans=2, seed=seed, compression="mixed", oddities=("gaps",), **SMALL)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")
    assert contents(tmp_path / "a") != contents(tmp_path / "c")


@pytest.mark.slow(but="rsna-ich")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_only_pixels_and_tables_give_the_label_away(tmp_path, layout):
    files = {}
    for name, share in (("all", 1.0), ("none", 0.0)):
        write_phantom(layout, tmp_path / name, scans=4, seed=5, positive=share, **SMALL)
        files[name] = {file: path for path, file in _dicom_files(tmp_path / name)}
    assert files["all"].keys() == files["none"].keys()
    different = 0
    for file, path in files["all"].items():
        one, other = pydicom.dcmread(path), pydicom.dcmread(files["none"][file])
        assert path.stat().st_size == files["none"][file].stat().st_size
        different += one.PixelData != other.PixelData
        for dataset in (one, other):
            del dataset.PixelData
        assert one == other
    assert 0 < different < len(files["all"])


def _dicom_files(folder: Path) -> list[tuple[Path, str]]:
    return [(path, path.relative_to(folder).as_posix()) for path in sorted(folder.rglob("*.dcm"))]


@pytest.mark.parametrize("layout", ["rsna-ich", "rsna-at"])
def test_names_and_uids_do_not_rank_positive_scans(layout):
    plans = plan(LAYOUTS[layout].anatomy, 300, seed=2, positive=0.5)
    labels = np.array([scan.label for scan in plans])
    drafts = [make_draft(one, np.zeros((one.slices, 1, 1), np.int16), *LAYOUTS[layout].ids(one)) for one in plans]
    for key in ("series_uid", "study_uid", "patient_id", "scan_id", "date", "encoding.intercept"):
        values = [attrgetter(key)(draft) for draft in drafts]
        ranks = np.unique(values, return_inverse=True)[1]
        assert ranks.max() == 0 or abs(np.corrcoef(ranks, labels)[0, 1]) < 0.2, key


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "rsna"}, "layout 'rsna' is unknown; choose one of rsna-ich, rsna-pe, rsna-at, folder"),
        ({"size": 8}, "size is 8"),
        ({"contrast": -1.0}, "contrast is -1.0"),
        ({"compression": "zip"}, "compression 'zip' is unknown; choose one of none, rle"),
        ({"anatomy": "chest"}, "anatomy 'chest': scans of rsna-ich are of the head; use folder"),
        ({"out": "full", **SMALL}, "full is a folder that is not empty"),
        ({"layout": "folder", "anatomy": "knee"}, "anatomy 'knee' is unknown; choose one of head, chest, abdomen"),
        ({"scans": 0}, "scans is 0"),
        ({"seed": -1}, "seed is -1"),
        ({"positive": 1.5}, "positive is 1.5"),
        ({"slices": 5}, "slices is 5"),
        ({"oddities": ["snow"]}, "oddity 'snow' is unknown; choose from tilt, gaps"),
        ({"oddities": ["multi_frame"]}, "oddity 'multi_frame' does not exist in rsna-ich, only in folder"),
        ({"oddities": ["tilt", "gaps", "bits"], "layout": "rsna-at", "scans": 2}, "3 oddities change 1 scans each"),
        ({"oddities": ["double_rows"], "layout": "rsna-at"}, "oddity 'double_rows' needs 1 positive scans; make more"),
    ],
)
def test_wrong_options_and_folders_are_named(tmp_path, options, message):
    (tmp_path / "full").mkdir()
    (tmp_path / "full/mine.txt").write_text("keep")
    options = {"layout": "rsna-ich", "scans": 1, **options, "out": tmp_path / options.get("out", "out")}
    with pytest.raises(UserError, match=message):
        write_phantom(**options)
    assert contents(tmp_path) == {"full/mine.txt": b"keep"}


def make(seed: int = 0) -> Draft:
    """Random HU over the whole range, the hardest case."""
    one = plan("head", 1, seed=seed, slices=12)[0]
    random = np.random.default_rng(seed)
    volume = random.integers(-1000, 2048, (one.slices, 32, 32)).astype(np.int16)
    volume[0, 0, :4] = (-1000, -1, 0, 2047)
    return make_draft(one, volume, "scan", "PHANTOM-0000")


def write(folder: Path, draft: Draft) -> list[pydicom.Dataset]:
    names = {image.uid: f"{number}.dcm" for number, image in enumerate(draft.files)}
    write_draft(folder, draft, names)
    return [pydicom.dcmread(folder / names[image.uid]) for image in draft.files]


def hu_of(dataset: pydicom.Dataset) -> np.ndarray:
    return dataset.pixel_array.astype(int) * int(dataset.RescaleSlope) + int(dataset.RescaleIntercept)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_hu_come_back_from_every_transfer_syntax(tmp_path, compression, encoding):
    draft = make()
    draft.compression, draft.encoding = compression, encoding
    draft.images = draft.images[:2]
    for image, dataset in zip(draft.images, write(tmp_path, draft), strict=True):
        assert dataset.file_meta.TransferSyntaxUID == COMPRESSIONS[compression]
        assert np.array_equal(hu_of(dataset), image.hu)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_files_are_standard_ct_images(tmp_path, encoding):
    draft = make()
    draft.encoding = encoding
    written = write(tmp_path, draft)
    for number, dataset in enumerate(written):
        assert dataset.SOPClassUID == pydicom.uid.CTImageStorage
        assert dataset.file_meta.MediaStorageSOPInstanceUID == dataset.SOPInstanceUID
        assert all(name in dataset and dataset[name].value not in (None, "") for name in TYPE_1.split())
        assert all(name in dataset for name in TYPE_2.split())
        assert dataset.HighBit == dataset.BitsStored - 1
        assert len(dataset.ImageType) >= 3
        assert dataset.InstanceNumber == number + 1
        uids = [element.value for element in dataset if element.VR == "UI"]
        assert all(UID(uid).is_valid and len(uid) <= 64 for uid in uids)
        assert str(dataset.PatientName).startswith("PHANTOM")
        assert (dataset.Manufacturer, dataset.QualityControlImage) == ("PHANTOM", "YES")
    positions = np.array([dataset.ImagePositionPatient for dataset in written], float)
    np.testing.assert_allclose(np.diff(positions[:, 2]), draft.slice_spacing, atol=1e-4)
    assert (positions[:, :2] == positions[0, :2]).all()


def test_multi_frame_files_hold_all_slices(tmp_path):
    draft = make()
    draft.oddity = "multi_frame"
    write_draft(tmp_path, draft, {image.uid: "all.dcm" for image in draft.images})
    dataset = pydicom.dcmread(tmp_path / "all.dcm")
    assert dataset.SOPClassUID == pydicom.uid.LegacyConvertedEnhancedCTImageStorage
    shared, frames = dataset.SharedFunctionalGroupsSequence[0], dataset.PerFrameFunctionalGroupsSequence
    rescale = shared.PixelValueTransformationSequence[0]
    volume = dataset.pixel_array.astype(int) + int(rescale.RescaleIntercept)
    assert np.array_equal(volume, np.stack([image.hu for image in draft.images]))
    heights = [float(frame.PlanePositionSequence[0].ImagePositionPatient[2]) for frame in frames]
    np.testing.assert_allclose(heights, [image.position[2] for image in draft.images], atol=1e-5)


@pytest.mark.parametrize("missing", ["pydicom", "gdcm"])
def test_what_is_not_installed_is_named(tmp_path, missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from normal_guidance.scans.phantom.phantom_files import write_phantom\n"
        f"write_phantom('folder', {str(tmp_path / 'out')!r}, scans=1, size=32, slices=12, compression='jpeg-ls')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UserError" in result.stderr.splitlines()[-1]
    assert "pip install 'normal-guidance[dicom]'" in result.stderr
    assert not (tmp_path / "out").exists()


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("phantoms")
    for layout in LAYOUTS:
        write_phantom(layout, root / layout, scans=10, seed=3, positive=0.4, **SMALL)
    return {layout: root / layout for layout in LAYOUTS}


def truth_of(folder: Path) -> list[dict]:
    return json.loads((folder / "phantom.json").read_text())["scans"]


def test_chest_exams(datasets):
    """The labels of slices are compared by tests/test_chain.py."""
    rows = rows_of_csv(datasets["rsna-pe"] / "train.csv")
    assert list(rows[0]) == ["StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID", *CHEST_COLUMNS.split()]
    exams = {(row["SeriesInstanceUID"], *list(row.values())[4:]): row for row in rows}
    for scan in truth_of(datasets["rsna-pe"]):
        [row] = [row for (series, *_), row in exams.items() if series == scan["scan_id"]]
        sides = {kind for *_, kind in scan["lesions"]}
        assert {side for side in ("left", "right") if row[f"{side}sided_pe"] == "1"} == sides
        assert int(row["negative_exam_for_pe"]) == 1 - scan["label"]
        assert int(row["rv_lv_ratio_gte_1"]) + int(row["rv_lv_ratio_lt_1"]) == scan["label"]


def test_abdomen_patients(datasets):
    folder = datasets["rsna-at"]
    patients = rows_of_csv(folder / "train_2024.csv")
    assert list(patients[0]) == ["patient_id", *ABDOMEN_COLUMNS.split(), "any_injury"]
    for row in patients:
        scans = [scan for scan in truth_of(folder) if scan["patient_id"] == row["patient_id"]]
        kinds = {kind for scan in scans for *_, kind in scan["lesions"]}
        assert row["bowel_injury"] == str(int("Bowel" in kinds))
        assert row["extravasation_injury"] == str(int("Active_Extravasation" in kinds))
        injuries = {f"{organ}_{grade}" for organ, grade in scans[0]["injuries"].items()}
        assert {name for name in row if name.endswith(("_low", "_high")) and row[name] == "1"} == injuries
        assert row["any_injury"] == str(int(bool(kinds or injuries)))
        for organ in ("kidney", "liver", "spleen"):
            assert sum(int(row[f"{organ}_{grade}"]) for grade in ("healthy", "low", "high")) == 1


@pytest.mark.slow(but="rsna-ich")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_no_two_seeds_share_a_scan_or_patient(datasets, layout, tmp_path):
    write_phantom(layout, tmp_path / "other", scans=10, seed=4, positive=0.4, **SMALL)
    write_phantom(layout, tmp_path / "first", scans=10, seed=0, positive=0.4, **SMALL)
    sets = [truth_of(folder) for folder in (datasets[layout], tmp_path / "other", tmp_path / "first")]
    for name in ("scan_id", "patient_id"):
        ids = [{scan[name] for scan in scans if scan[name]} for scans in sets]  # rsna-pe names no patients
        assert len(set.union(*ids)) == sum(map(len, ids))
