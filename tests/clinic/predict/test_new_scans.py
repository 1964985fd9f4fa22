"""Scans found by their headers: series, archives, volumes; files that are not scans, and the scan of each problem."""

import shutil
import zipfile
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from pydicom import Dataset, dcmread
from pydicom.uid import UID

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.predict.new_scans import NOT_DICOM, find_scans
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.scans.phantom.phantom_files import write_phantom
from small_bundle import PATIENT


def test_the_same_slices_as_nguide_index(trained):
    found = find_scans([trained.folder / "scans"])
    assert {row.files for row in found.rows} == {row.files for row in trained.manifest}
    of_files = {row.files: row for row in trained.manifest}
    for row in found.rows:
        same = of_files[row.files]
        assert row.positions == pytest.approx(same.positions)
        assert (row.slice_spacing, row.patient_id) == (pytest.approx(same.slice_spacing), same.patient_id)
        assert row.label == -1
    assert {problem.file for problem in found.problems[""]} == {"labels.csv", "phantom.json"}
    assert found.unusable == ()


def test_numbers_and_uids_of_the_series_are_kept_and_a_second_one_is_noted(copy, tmp_path):
    copy("one", spacing=-5.0)  # numbered from the head to the feet
    (row,) = find_scans([tmp_path / "one"]).rows
    assert row.instance_numbers == tuple(range(len(row), 0, -1))
    header = dcmread(tmp_path / "one" / "0000.dcm")
    assert row.series_uid == header.SeriesInstanceUID
    assert row.study_uid == header.StudyInstanceUID
    assert row.series_description == header.get("SeriesDescription", "")
    assert [Path(file).name for file in row.files] == [f"{len(row) - 1 - n:04d}.dcm" for n in range(len(row))]
    copy("two")
    (problem,) = find_scans([tmp_path]).problems["two"]
    assert (problem.kind, problem.detail) == ("double_scan", "a series with the same UID begins with one/0000.dcm")
    assert "put its files into one folder" in problem.action


def test_every_series_of_a_folder_is_a_scan(copy, tmp_path):
    copy("study/a", SeriesInstanceUID="1.2.3")
    for file in copy("study/b", scan=1, SeriesInstanceUID="1.2.4"):
        shutil.move(file, tmp_path / "study" / "a" / f"b{file.name}")
    (tmp_path / "study" / "a" / "readme.txt").write_text("no image")
    found = find_scans([tmp_path / "study"])
    assert [row.scan_id for row in found.rows] == ["a", "a-2"]
    assert [row.series_uid for row in found.rows] == ["1.2.3", "1.2.4"]
    assert [problem.kind for problem in found.problems[""]] == ["no_image"]


def test_a_scan_without_patient_id_is_its_own_patient(copy, tmp_path):
    copy("none", PatientID="", SeriesInstanceUID="1.2.3")
    files = copy("mostly", PatientID="", SeriesInstanceUID="1.2.4")
    copy("other/one", slices=1, PatientID="P7", SeriesInstanceUID="1.2.4")[0].replace(files[0])
    (tmp_path / "other" / "one").rmdir()
    found = find_scans([tmp_path])
    assert {row.scan_id: row.patient_id for row in found.rows} == {"mostly": "mostly", "none": "none"}
    (no,), (mixed,) = ([each for each in found.problems[scan] if "patient" in each.kind] for scan in ("none", "mostly"))
    assert (no.kind, mixed.kind) == ("no_patient", "mixed_patient")
    assert no.action == mixed.action == "scan is its own patient"
    assert mixed.detail == f"PatientID none ({len(files) - 1} files), P7 (1 files)"


def test_archives_and_volumes_are_scans(copy, tmp_path):
    files = copy("dicom")
    with zipfile.ZipFile(tmp_path / "B02.zip", "w") as archive:
        for file in files:
            archive.write(file, f"series/{file.name}")
    volume = np.random.default_rng(0).normal(0, 50, (10, 12, 14)).astype(np.float32)
    for name in ("c.nii", "d.nii.gz"):
        nibabel.save(nibabel.Nifti1Image(volume, np.diag([1.0, 1.0, 5.0, 1.0])), tmp_path / name)
    everything = find_scans([tmp_path]).rows
    assert [row.scan_id for row in everything] == ["B02-series", "dicom", "c", "d"]
    assert [row.kind for row in everything] == ["dicom", "dicom", "nifti", "nifti"]
    single = [find_scans([tmp_path / name]).rows[0] for name in ("B02.zip", "dicom", "c.nii", "d.nii.gz")]
    assert [row.scan_id for row in single] == ["B02-series", "dicom", "c", "d"]
    together = find_scans([tmp_path / "d.nii.gz", tmp_path / "dicom"])
    assert [row.scan_id for row in together.rows] == ["d", "dicom"]
    np.testing.assert_array_equal(read_volume(single[0], tmp_path)[0], read_volume(everything[1], tmp_path)[0])


def test_names_are_fit_for_folders_and_differ(copy, tmp_path):
    for name in ("a b", "a+b", "=1+1", "summary.csv", "x" * 150):
        copy(f"odd/{name}", slices=2)
    names = [row.scan_id for row in find_scans([tmp_path / "odd"]).rows]
    assert names == ["1-1", "a-b", "a-b-2", "summary.csv-2", "x" * 100]


NOTES = r"no scan in it: notes.txt is not a slice \(not a DICOM file\); give"


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ([], "there is no scan to predict"),
        (["nowhere"], "nowhere is not there; give a DICOM folder, a .zip"),
        (["empty"], "no file in it; give a DICOM folder"),
        (["notes"], NOTES),
        (["notes/notes.txt"], NOTES),
        (["empty", "notes/notes.txt"], "none of them holds an image"),
        (["notes", "notes/notes.txt"], "would be predicted twice"),
    ],
)
def test_nothing_to_predict_is_the_users_mistake(tmp_path, names, message):
    for folder in ("empty", "notes"):
        (tmp_path / folder).mkdir()
    (tmp_path / "notes" / "notes.txt").write_text("no image")
    with pytest.raises(UserError, match=message):
        find_scans([tmp_path / name for name in names])


def test_links_that_lead_out_of_the_folder_come_with_what_to_do(copy, tmp_path):
    copy("disk/a")
    copy("disk/b")
    (tmp_path / "links").mkdir()
    links = [tmp_path / "links" / name for name in "ab"]
    for link in links:
        link.symlink_to(tmp_path / "disk" / link.name)
    which = r"2 files are not slices, for instance [ab]: a link to .*disk/[ab], out of the folder: "
    what = "such links are not followed; copy the files, or name them as arguments: nguide predict A.nii.gz B.nii.gz$"
    with pytest.raises(UserError, match=which + what):
        find_scans([tmp_path / "links"])
    (tmp_path / "disk" / "a-more").mkdir()
    found = find_scans([*links, tmp_path / "disk" / "a-more"])  # a path without a scan is told beside others
    assert [row.scan_id for row in found.rows] == ["a", "b"]
    (empty,) = found.unusable
    assert (empty.scan_id, empty.reason.detail, empty.refused) == ("a-more", "no file in it", False)


def test_unreadable_files_belong_to_the_only_series_of_their_folder(copy, tmp_path):
    files = copy("one")
    files[3].write_bytes(files[3].read_bytes()[:700])
    copy("both/a", SeriesInstanceUID="1.2.3")
    for file in copy("both/b", scan=1, SeriesInstanceUID="1.2.4"):
        shutil.move(file, tmp_path / "both" / "a" / f"b{file.name}")
    (tmp_path / "both" / "a" / "0003.dcm").write_bytes(files[3].read_bytes())
    (tmp_path / "lost").mkdir()
    (tmp_path / "lost" / "x.dcm").write_bytes(files[3].read_bytes())
    (tmp_path / "broken.zip").write_bytes(b"PK\x03\x04 and nothing behind it")
    found = find_scans([tmp_path])
    assert [row.scan_id for row in found.rows] == ["both-a", "both-a-2", "one"]
    assert set(found.incomplete) == {"one"}
    (lost,) = found.incomplete["one"]
    assert (lost.file, lost.kind) == ("one/0003.dcm", "unreadable")
    assert [problem.file for problem in found.problems[""]] == ["both/a/0003.dcm"]  # its series is unknown
    assert any(problem.kind == "gap" for problem in found.problems["one"])
    failed = {scan.scan_id: scan.reason.detail for scan in found.unusable if not scan.refused}
    assert set(failed) == {"lost", "broken.zip"} == {scan.scan_id for scan in found.unusable}
    assert failed["lost"].startswith("its file cannot be read: the file ends")
    assert "the archive cannot be read" in failed["broken.zip"]


@pytest.mark.parametrize("content", [bytes(5000), b"<html>404 Not Found</html>"])
def test_a_slice_that_is_no_dicom_file_any_more_is_missing(copy, tmp_path, content):
    """A file named .dcm should be a slice; a file with another name may be anything."""
    copy("scan")[3].write_bytes(content)
    for name in ("notes.txt", "._0004.dcm"):
        (tmp_path / "scan" / name).write_bytes(b"no image")
    (tmp_path / "gone").mkdir()
    (tmp_path / "gone" / "1.dcm").write_bytes(content)
    found = find_scans([tmp_path])
    (lost,) = found.incomplete["scan"]
    assert (lost.file, lost.detail) == ("scan/0003.dcm", NOT_DICOM)
    assert {Path(problem.file).name for problem in found.problems[""]} <= {"notes.txt", "._0004.dcm"}
    (gone,) = found.unusable
    assert (gone.scan_id, gone.reason.detail) == ("gone", f"its file cannot be read: {NOT_DICOM}")


def test_scouts_and_screenshots_are_no_loss(tmp_path):
    odd = ["localizer", "secondary_capture"]
    write_phantom("folder", tmp_path / "scans", scans=4, size=32, slices=12, oddities=odd)
    found = find_scans([tmp_path / "scans"])
    assert (len(found.rows), found.unusable) == (4, ())
    assert {*odd} <= {problem.kind for problem in found.problems[""]}


STORAGE = "1.2.840.10008.5.1.4.1.1."

OBJECTS = {
    "segmentation": (f"{STORAGE}66.4", "SEG", {"PixelData": bytes(64)}),
    "surfaces": (f"{STORAGE}66.5", "SEG", {}),
    "parametric map": (f"{STORAGE}30", "CT", {"FloatPixelData": bytes(4096)}),
    "report": (f"{STORAGE}88.33", "SR", {}),
    "dose report": (f"{STORAGE}88.67", "CT", {}),
    "key objects": (f"{STORAGE}88.59", "KO", {}),
    "presentation state": (f"{STORAGE}11.1", "PR", {}),
    "document": (f"{STORAGE}104.1", "DOC", {"EncapsulatedDocument": b"%PDF-1.7"}),
    "structures": (f"{STORAGE}481.3", "RTSTRUCT", {}),
    "dose": (f"{STORAGE}481.2", "RTDOSE", {"PixelData": bytes(2048)}),
    "raw data": (f"{STORAGE}66", "CT", {}),
    "registration": (f"{STORAGE}66.1", "REG", {}),
    "private segmentation": ("1.2.3.4", "SEG", {"PixelData": bytes(2048)}),
}
"""SOP class, modality and content of objects that studies have beside their scans; some call themselves CT."""


def write_object(like: Path, path: Path, kind: str) -> None:
    sop_class, modality, content = OBJECTS[kind]
    source, made = dcmread(like), Dataset()
    for name in ("PatientID", "StudyInstanceUID", "Rows", "Columns", "BitsAllocated", "ImageOrientationPatient"):
        if content or name in ("PatientID", "StudyInstanceUID"):
            setattr(made, name, getattr(source, name))
    made.file_meta = source.file_meta
    made.SOPClassUID = made.file_meta.MediaStorageSOPClassUID = UID(sop_class)
    made.Modality, made.SOPInstanceUID = modality, "1.2.9"
    made.SeriesInstanceUID = f"1.2.{list(OBJECTS).index(kind) + 7}"
    for name, value in content.items():
        setattr(made, name, value)
    path.parent.mkdir(parents=True, exist_ok=True)
    made.save_as(path, enforce_file_format=True)


@pytest.mark.parametrize("kind", OBJECTS)
@pytest.mark.parametrize("any_modality", [False, True])
def test_objects_that_are_not_scans_are_neither_refused_nor_predicted(copy, tmp_path, kind, any_modality):
    files = copy("study/ct")
    for place in (tmp_path / "study" / "ct", tmp_path / "study" / "other"):  # beside the slices, and on its own
        write_object(files[0], place / "object.dcm", kind)
    found = find_scans([tmp_path / "study"], any_modality=any_modality)
    assert [row.scan_id for row in found.rows] == ["ct"]
    assert (found.unusable, found.incomplete, len(found.rows[0])) == ((), {}, len(files))
    told = [(problem.file, problem.kind, problem.detail[:12]) for problem in found.problems[""]]
    assert told == [(f"{folder}/object.dcm", "no_image", "not a scan: ") for folder in ("ct", "other")]
    shutil.rmtree(tmp_path / "study" / "ct")
    with pytest.raises(UserError, match=r"no scan in it: other/object.dcm is not a slice \(not a scan: "):
        find_scans([tmp_path / "study"], any_modality=any_modality)


def test_anonymous_scans_are_numbers(copy, tmp_path):
    files = copy("ZEBEDEE^JOHN/one")
    files[3].write_bytes(files[3].read_bytes()[:700])
    copy("ZEBEDEE^JOHN/two", scan=1, Modality="MR")
    copy("ZEBEDEE^JOHN/two/three", scan=2, PatientID="")
    found = find_scans([tmp_path], anonymize=True)
    assert [row.scan_id for row in found.rows] == ["scan-001", "scan-002"]
    assert [scan.scan_id for scan in found.unusable] == ["scan-003"]
    of_scans = [*found.problems.values(), *found.incomplete.values()]
    of_unusable = [(scan.reason, scan.problems) for scan in found.unusable]
    said = [replace(row, files=()) for row in found.rows], of_scans, of_unusable
    for secret in ("ZEBEDEE", PATIENT, ".dcm", str(tmp_path), dcmread(files[0]).SeriesInstanceUID):
        assert secret not in repr(said)
    open_eyed = find_scans([tmp_path])
    assert PATIENT in repr(open_eyed.rows)
    assert "ZEBEDEE" in repr(open_eyed.incomplete)
    assert found.rows[0].instance_numbers == open_eyed.rows[0].instance_numbers
    assert None not in found.rows[0].instance_numbers
