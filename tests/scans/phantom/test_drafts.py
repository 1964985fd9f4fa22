"""Every oddity is in the files as phantom.json says, and in no other scan; headers are read with pydicom alone."""

import csv
import hashlib
import json
from collections import Counter
from pathlib import Path

import numpy as np
import pydicom
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.scans.phantom.drafts import ODDITIES, assign_oddities
from normal_guidance.scans.phantom.phantom_files import LAYOUTS, write_phantom

SMALL = {"size": 32, "slices": 12, "positive": 0.4}


def names_of(layout: str) -> list[str]:
    return [name for name, one in ODDITIES.items() if layout in one.layouts]


class Dataset:
    """A written dataset and its truth."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.scans = json.loads((folder / "phantom.json").read_text())["scans"]

    def scan(self, oddity: str) -> dict:
        (found,) = [scan for scan in self.scans if scan["oddity"] == oddity]
        return found

    def read(self, file: str) -> pydicom.Dataset:
        return pydicom.dcmread(self.folder / file)

    def slices(self, oddity: str) -> list[pydicom.Dataset]:
        return [self.read(file) for file in self.scan(oddity)["files"]]

    def odd(self, oddity: str) -> list[pydicom.Dataset]:
        return [self.read(file) for file in self.scan(oddity)["odd_files"]]

    def rows(self, table: str) -> list[dict[str, str]]:
        with (self.folder / table).open(newline="") as file:
            return list(csv.DictReader(file))


@pytest.fixture(scope="module")
def datasets(tmp_path_factory) -> dict[str, Dataset]:
    root = tmp_path_factory.mktemp("odd")
    for layout in LAYOUTS:
        write_phantom(layout, root / layout, scans=20, seed=1, oddities=names_of(layout), **SMALL)
    return {layout: Dataset(root / layout) for layout in LAYOUTS}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_are_in_the_order_of_space_and_have_the_hu_of_the_truth(datasets, layout):
    """The HU of all scans, also those with wrong headers: the challenges' known repairs are done by hand here."""
    data = datasets[layout]
    assert Counter(scan["oddity"] for scan in data.scans if scan["oddity"]) == dict.fromkeys(names_of(layout), 1)
    for scan in data.scans:
        if scan["oddity"] == "multi_frame":
            continue
        digest, files = hashlib.sha256(), [data.read(file) for file in scan["files"]]
        for file in files:
            stored = np.frombuffer(file.PixelData, "<u2" if file.PixelRepresentation == 0 else "<i2").astype(int)
            hu = stored + int(file.RescaleIntercept)
            if scan["oddity"] in ("wrong_intercept", "bits"):
                hu = (stored + 2048) % 4096 - 2048  # two's complement in 12 bits
            digest.update(hu.astype("<i2").tobytes())
        assert digest.hexdigest() == scan["hu_sha256"], scan["oddity"]
        heights = [float(file.ImagePositionPatient[2]) for file in files if scan["oddity"] != "no_position"]
        assert heights == sorted(heights)


def test_tilt(datasets):
    one = datasets["rsna-ich"].slices("tilt")[0]
    row, column = np.array(one.ImageOrientationPatient, float).reshape(2, 3)
    normal = np.cross(row, column)
    assert np.degrees(np.arccos(normal[2])) == pytest.approx(14, abs=0.01)
    assert one.GantryDetectorTilt == 14
    assert np.linalg.norm(column) == pytest.approx(1, abs=1e-5)


def test_gaps(datasets):
    data = datasets["rsna-pe"]
    steps = np.diff([float(one.ImagePositionPatient[2]) for one in data.slices("gaps")])
    spacing = data.scan("gaps")["slice_spacing"]
    assert sorted(np.rint(steps / spacing).astype(int).tolist())[-2:] == [1, 3]
    after = data.scan("gaps")["files"].index(data.scan("gaps")["odd_files"][0])
    assert round(steps[after] / spacing) == 3


def test_duplicates_and_mixed_series(datasets):
    data = datasets["folder"]
    (copy,), slices = data.odd("duplicates"), data.slices("duplicates")
    (same,) = (item for item in slices if item.ImagePositionPatient == copy.ImagePositionPatient)
    assert same.PixelData == copy.PixelData
    assert same.SOPInstanceUID != copy.SOPInstanceUID
    assert copy.InstanceNumber > max(item.InstanceNumber for item in slices)
    data = datasets["rsna-at"]
    others, slices = data.odd("mixed_series"), data.slices("mixed_series")
    assert len({one.SeriesInstanceUID for one in others}) == len({one.SeriesInstanceUID for one in slices}) == 1
    assert others[0].SeriesInstanceUID != slices[0].SeriesInstanceUID
    assert len(others) == 3 < len(slices)


def test_localizer_and_secondary_capture(datasets):
    for layout in LAYOUTS:
        (scout,), (capture,) = datasets[layout].odd("localizer"), datasets[layout].odd("secondary_capture")
        assert scout.ImageType[2] == "LOCALIZER"
        assert [float(value) for value in scout.ImageOrientationPatient] == [1, 0, 0, 0, 0, -1]
        assert capture.SOPClassUID == pydicom.uid.SecondaryCaptureImageStorage
        assert capture.BitsAllocated == 8
        assert capture.pixel_array.max() > 100
        assert capture.ConversionType == "WSD"


def test_unreadable_and_truncated_files(datasets):
    data = datasets["rsna-ich"]
    (file,) = data.scan("unreadable")["odd_files"]
    assert file not in data.scan("unreadable")["files"]
    assert b"\xe0\x7f\x10\x00" not in (data.folder / file).read_bytes()  # ends before PixelData
    (file,) = data.scan("truncated")["odd_files"]
    assert file not in data.scan("truncated")["files"]
    with pytest.raises(Exception, match=r".+"):
        _ = data.read(file).pixel_array
    assert data.read(file).Rows == 32  # its header is whole


def test_pixels_that_lie(datasets):
    one = datasets["rsna-ich"].slices("wrong_intercept")[0]
    assert (one.BitsStored, one.PixelRepresentation, int(one.RescaleIntercept)) == (12, 0, 0)
    assert one.pixel_array.max() > 3000  # air, which should be about -1000
    one = datasets["rsna-at"].slices("bits")[0]
    assert (one.BitsStored, one.PixelRepresentation) == (12, 1)
    assert np.frombuffer(one.PixelData, "<i2").min() >= 0  # no sign, though there is air


def test_multi_frame_and_order_of_instances(datasets):
    scan = datasets["folder"].scan("multi_frame")
    assert len(set(scan["files"])) == 1
    assert scan["frames"] == list(range(len(scan["slice_labels"])))
    assert datasets["folder"].read(scan["files"][0]).NumberOfFrames == len(scan["frames"])
    data = datasets["rsna-pe"]
    assert all("ImagePositionPatient" not in one for one in data.slices("no_position"))
    numbers = [one.InstanceNumber for one in data.slices("no_position")]
    assert numbers == list(range(1, len(numbers) + 1))
    numbers = [one.InstanceNumber for one in data.slices("reversed")]
    assert numbers == list(range(len(numbers), 0, -1))
    numbers = [one.InstanceNumber for one in data.slices("shuffled")]
    assert sorted(numbers) == list(range(1, len(numbers) + 1)) != numbers


@pytest.mark.parametrize(
    ("layout", "table", "copies"),
    [("rsna-ich", "stage_2_train.csv", 6), ("rsna-pe", "train.csv", 1), ("rsna-at", "image_level_labels_2024.csv", 1)],
)
def test_rows_twice_and_rows_without_image(datasets, layout, table, copies):
    data = datasets[layout]
    rows = [tuple(row.values()) for row in data.rows(table)]
    assert len(rows) - len(set(rows)) == copies
    named = {
        "rsna-ich": lambda row: f"stage_2_train/{row[0].rpartition('_')[0]}.dcm",
        "rsna-pe": lambda row: f"train/{'/'.join(row[:3])}.dcm",
        "rsna-at": lambda row: f"train_images/{'/'.join(row[:3])}.dcm",
    }[layout]
    assert len({file for file in map(named, rows) if not (data.folder / file).exists()}) == 1


def test_indeterminate_exams_and_incomplete_organs(datasets):
    data = datasets["rsna-pe"]
    scan = data.scan("indeterminate")
    rows = [row for row in data.rows("train.csv") if row["indeterminate"] == "1"]
    assert {row["SeriesInstanceUID"] for row in rows} == {scan["scan_id"]}
    assert scan["label"] == 0
    assert {row["negative_exam_for_pe"] for row in rows} == {"0"}
    data = datasets["rsna-at"]
    (row,) = [row for row in data.rows("train_series_meta.csv") if row["incomplete_organ"] == "1"]
    scan = data.scan("incomplete_organ")
    assert f"{row['patient_id']}_{row['series_id']}" == scan["scan_id"]
    extent = scan["slice_spacing"] * len(scan["files"])
    whole = max(scan["slice_spacing"] * len(scan["files"]) for scan in data.scans)
    assert extent < 0.75 * whole


def test_an_oddity_changes_a_small_share_of_many_scans():
    assigned = assign_oddities(["tilt", "gaps"], [0] * 100, np.random.default_rng(0), "rsna-ich")
    assert Counter(assigned.values()) == {"tilt": 5, "gaps": 5}


@pytest.mark.parametrize(
    ("oddities", "scans", "message"),
    [
        (["snow"], 5, "oddity 'snow' is unknown; choose from tilt, gaps"),
        (["multi_frame"], 5, "oddity 'multi_frame' does not exist in rsna-at, only in folder"),
        (["tilt", "gaps", "bits"], 2, "3 oddities change 1 scans each, but there are 2; make more scans"),
        (["double_rows"], 2, "oddity 'double_rows' needs 1 positive scans; make more scans"),
    ],
)
def test_impossible_oddities_are_named(tmp_path, oddities, scans, message):
    with pytest.raises(UserError, match=message):
        write_phantom("rsna-at", tmp_path / "out", scans=scans, oddities=oddities, size=32, slices=12)
    assert not (tmp_path / "out").exists()
