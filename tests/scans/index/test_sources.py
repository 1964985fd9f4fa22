"""Each source finds its scans and labels in the distributed layout, with its traps, and reports what does not fit.

The files are real DICOM and NIfTI, 16 x 16 pixels; expected labels are written out by hand.
"""

import os
import warnings
import zipfile
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pandas as pd
import pytest
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.containers import Mask
from normal_guidance.scans.index.geometry import Ordered
from normal_guidance.scans.index.indexing import SOURCES, Index, index
from normal_guidance.scans.index.labels import parse_labels, parse_ranges
from normal_guidance.scans.index.manifest import ScanRow, parse_findings, read_manifest
from normal_guidance.scans.index.problems import KINDS
from normal_guidance.scans.index.source import LISTED, slices_of_mask

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
TYPES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural", "any")


def write_slice(path: Path, sop: str, series: str = "S", *, z: float = 0.0, number: int = 1, **tags) -> None:
    """An axial CT slice; a tag that is None is left out."""
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CTImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    values = {
        "SOPClassUID": CTImageStorage,
        "SOPInstanceUID": sop,
        "SeriesInstanceUID": series,
        "StudyInstanceUID": "ST",
        "PatientID": "P",
        "Modality": "CT",
        "ImageType": ["ORIGINAL", "PRIMARY", "AXIAL"],
        "InstanceNumber": number,
        "ImagePositionPatient": [-8, -8, z],
        "ImageOrientationPatient": list(AXIAL),
        "PixelSpacing": [1, 1],
        "Rows": 16,
        "Columns": 16,
        "SamplesPerPixel": 1,
        "PhotometricInterpretation": "MONOCHROME2",
        "BitsAllocated": 16,
        "BitsStored": 16,
        "HighBit": 15,
        "PixelRepresentation": 1,
        "RescaleSlope": 1,
        "RescaleIntercept": 0,
        "PixelData": np.zeros((16, 16), np.int16).tobytes(),
        **tags,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Kaggle's UIDs are not valid UIDs
        dataset = FileDataset(str(path), Dataset(), file_meta=meta, preamble=bytes(128))
        for name, value in values.items():
            if value is not None:
                setattr(dataset, name, value)
        dataset.save_as(path, enforce_file_format=True)


def write_nifti(path: Path, volume: np.ndarray, affine: np.ndarray) -> None:
    nibabel.save(nibabel.Nifti1Image(volume, affine), path)


def scans(made: Index) -> dict[str, ScanRow]:
    return {row.scan_id: row for row in made.manifest}


def found(made: Index, kind: str) -> list[tuple[str, str]]:
    """Scan and file of every problem of a kind."""
    assert {problem.kind for problem in made.problems} <= KINDS.keys()
    return sorted((problem.scan_id, problem.file) for problem in made.problems if problem.kind == kind)


def slices(row: ScanRow) -> list[int] | None:
    return None if row.slice_labels is None else row.slice_labels.tolist()


def stems(row: ScanRow) -> list[str]:
    return [Path(file).stem for file in row.files]


# ----------------------------------------------------------------------------------------------------
# Head
# ----------------------------------------------------------------------------------------------------


class Head:
    """Two scans of three and two slices, files named in no order; b2 shows subdural bleeding."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.labels = {sop: dict.fromkeys(TYPES, 0) for sop in ("a1", "a2", "b1", "b2", "b3")}
        self.labels["b2"] |= {"subdural": 1, "any": 1}
        self.extra_rows: list[tuple[str, object]] = []
        for sop, z in (("b1", 10.0), ("b2", 0.0), ("b3", 5.0)):
            self.slice(sop, "ID_seriesB", z=z, PatientID="ID_patient2")
        for sop, z in (("a1", 5.0), ("a2", 0.0)):
            self.slice(sop, "ID_seriesA", z=z, PatientID="ID_patient1")

    def slice(self, sop: str, series: str, **tags) -> None:
        write_slice(self.root / f"stage_2_train/ID_{sop}.dcm", f"ID_{sop}", series, **tags)

    def index(self, **options) -> Index:
        rows = [(f"ID_{sop}_{kind}", value) for sop, types in self.labels.items() for kind, value in types.items()]
        table = pd.DataFrame([*rows, *self.extra_rows], columns=["ID", "Label"])
        table.to_csv(self.root / "stage_2_train.csv", index=False)
        return index("rsna-ich", self.root, self.root.parent / "out", **options)


@pytest.fixture
def head(tmp_path):
    return Head(tmp_path / "root")


def test_head_scans_are_series_of_a_flat_folder(head):
    made = head.index()
    assert made.problems == []
    one, two = made.manifest
    assert (one.scan_id, one.patient_id, one.label, slices(one)) == ("ID_seriesA", "ID_patient1", 0, [0, 0])
    assert (two.scan_id, two.patient_id, two.label, slices(two)) == ("ID_seriesB", "ID_patient2", 1, [1, 0, 0])
    assert two.files == tuple(f"stage_2_train/ID_{sop}.dcm" for sop in ("b2", "b3", "b1"))
    assert (two.positions, two.slice_spacing, two.frames) == ((0.0, 5.0, 10.0), 5.0, (0, 0, 0))
    assert (two.rows, two.columns, two.pixel_spacing, two.orientation) == (16, 16, (1.0, 1.0), AXIAL)
    assert (two.kind, two.modality, two.transfer_syntax) == ("dicom", "CT", ExplicitVRLittleEndian)
    assert one.dataset_labels == {"types": []}
    assert two.dataset_labels == {"types": ["subdural"]}


def test_head_types_are_findings_with_slice_labels(head):
    head.labels["a1"]["epidural"] = 1  # but its `any` is 0
    head.labels["b3"] |= {"epidural": 1, "any": 1}
    made = head.index()
    manifest = read_manifest(made.manifest.root.parent / "out")
    assert [finding.name for finding in manifest.findings] == ["any", *TYPES[:-1]]
    assert [finding.code for finding in manifest.findings] == ["1386000", *[None] * 5]
    shown = {name: [slices(row) for row in manifest.of_finding(name)] for name in TYPES}
    assert shown == {
        "any": [[0, 0], [1, 1, 0]],
        "epidural": [[0, 0], [0, 1, 0]],
        "subdural": [[0, 0], [1, 0, 0]],
        **{key: [[0, 0], [0, 0, 0]] for key in TYPES[1:4]},
    }
    assert manifest.of_finding("epidural").labels.tolist() == [0, 1]
    assert made.report["counts"]["findings"] == dict.fromkeys(TYPES, 0) | {"any": 1, "epidural": 1, "subdural": 1}


def test_head_duplicated_rows_are_counted_once(head):
    head.extra_rows = [(f"ID_b2_{kind}", value) for kind, value in head.labels["b2"].items()]
    made = head.index()
    assert slices(scans(made)["ID_seriesB"]) == [1, 0, 0]
    assert [(problem.kind, problem.file) for problem in made.problems] == [("double_label", "stage_2_train/ID_b2.dcm")]
    assert "epidural, intraparenchymal" in made.problems[0].detail


def test_head_labels_that_contradict_each_other(head):
    head.extra_rows = [("ID_b3_any", 1)]
    head.labels["a1"]["epidural"] = 1
    made = head.index()
    assert slices(scans(made)["ID_seriesB"]) == [1, 1, 0]
    assert slices(scans(made)["ID_seriesA"]) == [0, 0]
    actions = {problem.file: problem.action for problem in made.problems if problem.kind == "conflicting_label"}
    assert actions == {
        "stage_2_train/ID_b3.dcm": "counts as 1",
        "stage_2_train/ID_a1.dcm": "counts as 0, as any says",
    }


def test_head_unreadable_file_costs_its_slice_only(head):
    (head.root / "stage_2_train/ID_b3.dcm").write_bytes(b"\0" * 4000)
    made = head.index()
    assert slices(scans(made)["ID_seriesB"]) == [1, 0]
    (problem,) = (problem for problem in made.problems if problem.file.endswith("b3.dcm"))
    assert (problem.kind in ("unreadable", "no_image"), problem.action) == (True, "left out")
    assert found(made, "label_without_image") == []


def test_head_label_without_image_and_image_without_label(head):
    head.labels["zz"] = dict.fromkeys(TYPES, 1)
    del head.labels["b3"]
    del head.labels["a1"], head.labels["a2"]
    made = head.index()
    assert found(made, "label_without_image") == [("", "stage_2_train/ID_zz.dcm")]
    assert found(made, "image_without_label") == [
        ("ID_seriesA", ""),
        ("ID_seriesB", "stage_2_train/ID_b3.dcm"),
    ]
    assert {scan: slices(row) for scan, row in scans(made).items()} == {"ID_seriesB": [1, 0]}


def test_head_rows_that_say_nothing_are_left_out(head):
    head.extra_rows = [("ID_b1_any", 7), ("nonsense", 1), ("ID_b1_headache", 1)]
    del head.labels["b1"]["any"]
    made = head.index()
    assert len(found(made, "bad_row")) == 3
    assert slices(scans(made)["ID_seriesB"]) == [1, 0]
    assert found(made, "image_without_label") == [
        ("", "stage_2_train/ID_b1.dcm"),
        ("ID_seriesB", "stage_2_train/ID_b1.dcm"),
    ]


def test_head_uid_decides_over_file_name(head):
    head.slice("b3", "ID_seriesB", z=5.0, PatientID="ID_patient2", SOPInstanceUID="ID_b2")
    head.slice("b2", "ID_seriesB", z=0.0, PatientID="ID_patient2", SOPInstanceUID="ID_b3")
    made = head.index()
    assert stems(scans(made)["ID_seriesB"]) == ["ID_b2", "ID_b3", "ID_b1"]
    assert slices(scans(made)["ID_seriesB"]) == [0, 1, 0]
    assert len(found(made, "label_mismatch")) == 2


def test_head_file_name_serves_where_the_uid_has_no_label(head):
    head.slice("b2", "ID_seriesB", z=0.0, PatientID="ID_patient2", SOPInstanceUID="1.2.840.7")
    made = head.index()
    assert (slices(scans(made)["ID_seriesB"]), made.problems) == ([1, 0, 0], [])


def test_head_patients_and_series_that_cannot_be_told(head):
    head.slice("a1", "ID_seriesA", z=5.0, PatientID=None)
    head.slice("a2", "ID_seriesA", z=0.0, PatientID="")
    head.slice("b3", "ID_seriesB", z=5.0, PatientID="ID_other")
    head.slice("c1", "", SeriesInstanceUID=None)
    head.labels["c1"] = dict.fromkeys(TYPES, 0)
    made = head.index()
    assert {row.scan_id: row.patient_id for row in made.manifest} == {
        "ID_seriesA": "ID_seriesA",
        "ID_seriesB": "ID_patient2",
    }
    assert found(made, "no_patient") == [("ID_seriesA", "")]
    assert found(made, "mixed_patient") == [("ID_seriesB", "")]
    assert found(made, "no_series") == [("", "stage_2_train/ID_c1.dcm")]


def test_a_positive_slice_that_is_left_out_is_said(head):
    head.slice("b2", "ID_seriesB", z=5.0, number=2, PatientID="ID_patient2")
    made = head.index()
    assert scans(made)["ID_seriesB"].label == 0
    assert found(made, "duplicate") == [("ID_seriesB", "stage_2_train/ID_b2.dcm")]
    assert found(made, "label_mismatch") == [("ID_seriesB", "stage_2_train/ID_b2.dcm")]


def test_localizers_are_no_slices(head):
    head.slice("b1", "ID_seriesB", z=10.0, PatientID="ID_patient2", ImageType=["ORIGINAL", "PRIMARY", "LOCALIZER"])
    made = head.index()
    assert found(made, "localizer") == [("ID_seriesB", "stage_2_train/ID_b1.dcm")]
    assert len(scans(made)["ID_seriesB"]) == 2


def test_millions_of_missing_images_are_a_number(head):
    head.labels |= {f"x{number}": dict.fromkeys(TYPES, 0) for number in range(LISTED + 5)}
    made = head.index()
    assert len(found(made, "label_without_image")) == LISTED + 1
    assert [problem.detail for problem in made.problems if not problem.file][:1] == [
        f"5 more of these; the first {LISTED} are listed"
    ]


# ----------------------------------------------------------------------------------------------------
# Chest
# ----------------------------------------------------------------------------------------------------


class Chest:
    def __init__(self, root: Path) -> None:
        self.root = root
        self.rows: list[dict[str, object]] = []
        for study, series, labels in (("st1", "se1", (0, 1, 1)), ("st2", "se2", (0, 0))):
            for place, label in enumerate(labels):
                self.add(study, series, f"{series}i{place}", label, z=2.0 * place, number=9 - place)

    def add(self, study: str, series: str, sop: str, label: int, *, negative: int = 0, indeterminate: int = 0, **tags):
        names = {"StudyInstanceUID": study, "SeriesInstanceUID": series, "SOPInstanceUID": sop}
        exam = {"negative_exam_for_pe": negative, "qa_motion": 0, "indeterminate": indeterminate}
        self.rows.append({**names, "pe_present_on_image": label, **exam})
        write_slice(self.root / f"train/{study}/{series}/{sop}.dcm", sop, series, **{"StudyInstanceUID": study} | tags)

    def index(self, **options) -> Index:
        pd.DataFrame(self.rows).to_csv(self.root / "train.csv", index=False)
        return index("rsna-pe", self.root, self.root.parent / "out", **options)


@pytest.fixture
def chest(tmp_path):
    return Chest(tmp_path / "root")


def test_chest_scans_are_folders_and_the_study_is_the_patient(chest):
    chest.rows = chest.rows[::-1]  # Kaggle's table is in no order
    made = chest.index()
    assert made.problems == []
    one, two = made.manifest
    assert (one.scan_id, one.patient_id, one.label, slices(one)) == ("se1", "st1", 1, [0, 1, 1])
    assert (two.scan_id, two.patient_id, two.label, slices(two)) == ("se2", "st2", 0, [0, 0])
    assert one.files == tuple(f"train/st1/se1/se1i{place}.dcm" for place in range(3))
    assert one.dataset_labels == {"indeterminate": 0, "negative_exam_for_pe": 0}


def test_chest_indeterminate_exams_count_as_negative(chest):
    chest.add("st3", "se3", "x0", 0, indeterminate=1)
    chest.add("st3", "se3", "x1", 0, indeterminate=1, z=1.0)
    made = chest.index()
    assert (scans(made)["se3"].label, scans(made)["se3"].dataset_labels["indeterminate"]) == (0, 1)
    assert [(p.scan_id, p.kind, p.action) for p in made.problems] == [("se3", "indeterminate", "counts as negative")]


def test_chest_slices_decide_against_the_exam(chest):
    chest.add("st3", "se3", "x0", 1, negative=1)
    chest.add("st3", "se3", "x1", 0, negative=1, z=1.0)
    made = chest.index()
    assert scans(made)["se3"].label == 1
    assert found(made, "conflicting_label") == [("se3", "")]


def test_chest_rows_twice_contradicting_or_bad(chest):
    chest.rows += [chest.rows[0], {**chest.rows[3], "pe_present_on_image": 1}, {**chest.rows[4], "SOPInstanceUID": ""}]
    chest.rows.append({**chest.rows[4], "pe_present_on_image": "maybe"})
    made = chest.index()
    assert found(made, "double_label") == [("se1", "train/st1/se1/se1i0.dcm")]
    assert found(made, "conflicting_label") == [("se2", "train/st2/se2/se2i0.dcm")]
    assert found(made, "bad_row") == [("", "train.csv")] * 2
    assert slices(scans(made)["se2"]) == [1, 0]


def test_chest_labels_and_images_that_are_alone(chest):
    gone = chest.root / "train/st1/se1/se1i0.dcm"
    gone.unlink()
    chest.rows.append({**chest.rows[0], "SeriesInstanceUID": "se9"})
    write_slice(chest.root / "train/st2/se2/late.dcm", "late", "se2", z=9.0)
    write_slice(chest.root / "train/st7/se7/x.dcm", "x", "se7")
    made = chest.index()
    assert found(made, "label_without_image") == [("se1", "train/st1/se1/se1i0.dcm"), ("se9", "train/st1/se9")]
    assert found(made, "image_without_label") == [("se2", "train/st2/se2/late.dcm"), ("se7", "")]
    assert {scan: slices(row) for scan, row in scans(made).items()} == {"se1": [1, 1], "se2": [0, 0]}


def test_of_several_series_in_a_folder_the_largest_is_kept(chest):
    chest.add("st1", "se1", "other", 1, SeriesInstanceUID="intruder", z=50.0)
    made = chest.index()
    assert slices(scans(made)["se1"]) == [0, 1, 1]
    assert found(made, "mixed_series") == [("se1", "train/st1/se1/other.dcm")]


def test_a_folder_of_other_files_is_no_scan(chest):
    (chest.root / "train/st8/se8").mkdir(parents=True)
    (chest.root / "train/st8/se8/readme.txt").write_text("hello")
    made = chest.index()
    assert found(made, "no_image") == [("se8", "train/st8/se8/readme.txt")]
    assert found(made, "failed") == [("se8", "")]


def test_the_same_series_twice_is_one_scan(chest):
    chest.add("st9", "se1", "y", 0)
    made = chest.index()
    assert found(made, "double_scan") == [("se1", "train/st9/se1/y.dcm")]
    assert len(scans(made)["se1"]) == 3


# ----------------------------------------------------------------------------------------------------
# Abdomen
# ----------------------------------------------------------------------------------------------------

ORGANS = {"bowel": ("healthy", "injury"), "extravasation": ("healthy", "injury")}
ORGANS |= dict.fromkeys(("kidney", "liver", "spleen"), ("healthy", "low", "high"))


class Abdomen:
    """Patients: 10 bowel injury; 20 bowel and liver; 30 liver only; 40 none, with two series."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.images = [(10, 101, 3, "Bowel"), (10, 101, 4, "Bowel"), (20, 201, 3, "Active_Extravasation")]
        self.meta = [
            (10, 101, 200.5, 0),
            (20, 201, 200.5, 0),
            (30, 301, 100.0, 0),
            (40, 401, 1.0, 1),
            (40, 402, 1.0, 0),
        ]
        self.patients = {10: ("bowel_injury",), 20: ("extravasation_injury", "liver_high"), 30: ("liver_low",), 40: ()}
        for patient, series, *_ in self.meta:
            for place, instance in enumerate((2, 3, 4, 10)):
                self.slice(patient, series, instance, z=-3.0 * place)

    def slice(self, patient: int, series: int, instance: int, **tags) -> None:
        place = self.root / f"train_images/{patient}/{series}/{instance}.dcm"
        tags = {"number": instance, "PatientID": str(patient), **tags}
        write_slice(place, f"1.2.{series}.{instance}", f"1.2.{series}", **tags)

    def index(self, labels: str | None = None, **options) -> Index:
        table = pd.DataFrame(self.images, columns=["patient_id", "series_id", "instance_number", "injury_name"])
        table.to_csv(self.root / "image_level_labels_2024.csv", index=False)
        table = pd.DataFrame(self.meta, columns=["patient_id", "series_id", "aortic_hu", "incomplete_organ"])
        table.to_csv(self.root / "train_series_meta.csv", index=False)
        rows = [self.patient_row(patient, injuries) for patient, injuries in self.patients.items()]
        pd.DataFrame(rows).to_csv(self.root / "train_2024.csv", index=False)
        return index("rsna-at", self.root, self.root.parent / "out", labels=labels, **options)

    @staticmethod
    def patient_row(patient: int, injuries: tuple[str, ...]) -> dict[str, int]:
        cells = {f"{organ}_{state}": 0 for organ, states in ORGANS.items() for state in states}
        return {"patient_id": patient, **cells, **dict.fromkeys(injuries, 1), "any_injury": int(bool(injuries))}


@pytest.fixture
def abdomen(tmp_path):
    return Abdomen(tmp_path / "root")


def test_abdomen_by_image(abdomen):
    made = abdomen.index()
    assert [(p.scan_id, p.kind) for p in made.problems] == [("40_401", "incomplete_organ")]
    labels = {row.scan_id: (row.patient_id, row.label, slices(row)) for row in made.manifest}
    assert labels == {  # positions descend with the instance number: 10, 4, 3, 2
        "10_101": ("10", 1, [0, 1, 1, 0]),
        "20_201": ("20", 1, [0, 0, 1, 0]),
        "30_301": ("30", 0, [0, 0, 0, 0]),
        "40_401": ("40", 0, [0, 0, 0, 0]),
        "40_402": ("40", 0, [0, 0, 0, 0]),
    }
    assert stems(scans(made)["10_101"]) == ["10", "4", "3", "2"]
    assert made.manifest.about["options"] == {"labels": "image"}
    assert scans(made)["20_201"].dataset_labels == {
        "image_label": 1,
        "image_injuries": ["Active_Extravasation"],
        "patient_label": 1,
        "patient_injuries": ["extravasation_injury", "liver_high"],
        "incomplete_organ": 0,
    }


def test_abdomen_by_patient(abdomen):
    made = abdomen.index("patient")
    labels = {row.scan_id: (row.label, slices(row)) for row in made.manifest}
    assert labels == {
        "10_101": (1, [0, 1, 1, 0]),
        "20_201": (1, None),  # the liver's slices have no rows
        "30_301": (1, None),
        "40_401": (0, [0, 0, 0, 0]),
        "40_402": (0, [0, 0, 0, 0]),
    }
    assert made.manifest.about["options"] == {"labels": "patient"}


def test_abdomen_patients_without_row_or_against_the_images(abdomen):
    del abdomen.patients[30]
    abdomen.patients[10] = ()
    made = abdomen.index("patient")
    assert "30_301" not in scans(made)
    assert found(made, "image_without_label") == [("30_301", "")]
    assert (scans(made)["10_101"].label, slices(scans(made)["10_101"])) == (0, None)
    assert found(made, "conflicting_label") == [("10_101", "")]


def test_abdomen_series_without_row_and_files_at_the_wrong_place(abdomen):
    abdomen.meta = abdomen.meta[:-1]
    write_slice(abdomen.root / "train_images/1.dcm", "1.2.9.1", "1.2.9")
    write_slice(abdomen.root / "train_images/10/1.dcm", "1.2.9.2", "1.2.9")
    made = abdomen.index()
    assert found(made, "image_without_label") == [
        ("", "train_images/1.dcm"),
        ("", "train_images/10/1.dcm"),
        ("40_402", ""),
    ]
    assert set(scans(made)) == {"10_101", "20_201", "30_301", "40_401", "40_402"}


def test_abdomen_rows_twice_bad_or_alone(abdomen):
    abdomen.images += [abdomen.images[0], (10, 101, 99, "Bowel"), (10, 199, 1, "Bowel"), (10, 101, "x", "Bowel")]
    abdomen.patients[50] = ()
    made = abdomen.index()
    assert found(made, "double_label") == [("10_101", "train_images/10/101/3.dcm")]
    assert found(made, "bad_row") == [("", "image_level_labels_2024.csv")]
    assert found(made, "label_without_image") == [
        ("", "train_images/50"),
        ("10_101", "train_images/10/101/99.dcm"),
        ("10_199", "train_images/10/199"),
    ]
    assert slices(scans(made)["10_101"]) == [0, 1, 1, 0]


def test_abdomen_any_injury_that_contradicts_the_injuries(abdomen, monkeypatch):
    row = abdomen.patient_row

    def without_any(patient, injuries):
        return row(patient, injuries) | ({"any_injury": 0} if patient == 30 else {})

    monkeypatch.setattr(abdomen, "patient_row", without_any)
    made = abdomen.index("patient")
    assert scans(made)["30_301"].label == 0
    assert found(made, "conflicting_label") == [("", "train_2024.csv")]


# ----------------------------------------------------------------------------------------------------
# Folder
# ----------------------------------------------------------------------------------------------------


class Folder:
    def __init__(self, root: Path) -> None:
        self.root, self.rows = root, []
        root.mkdir()

    def scan(self, name: str, count: int = 4, **tags) -> None:
        for place in range(count):
            write_slice(self.root / name / f"{place}.dcm", f"{name}.{place}", name, z=5.0 * place, number=place, **tags)

    def add(self, scan_id: str, **cells) -> None:
        self.rows.append({"scan_id": scan_id, "path": scan_id, **cells})

    def index(self, suffix: str = ".csv", **options) -> Index:
        table = self.root.parent / f"labels{suffix}"
        frame = pd.DataFrame(self.rows)
        frame.to_csv(table, index=False) if suffix == ".csv" else frame.to_parquet(table)
        return index("folder", self.root, self.root.parent / "out", table=table, **options)


@pytest.fixture
def folder(tmp_path):
    return Folder(tmp_path / "root")


@pytest.mark.parametrize("suffix", [".csv", ".parquet"])
def test_folder_labels_in_each_notation(folder, suffix):
    for name in "abcdef":
        folder.scan(name, PatientID=f"patient {name}")
    folder.add("a", label=1, slice_labels="0 1 1 0", patient_id="007")
    folder.add("b", label=1, slice_ranges="1-2")
    folder.add("c", label=1, slice_ranges="0;3-3")
    folder.add("d", label=1)
    folder.add("e", label=0)
    folder.add("f", slice_labels="[0, 0, 0, 1]")
    made = folder.index(suffix)
    assert made.problems == []
    assert {row.scan_id: (row.label, slices(row)) for row in made.manifest} == {
        "a": (1, [0, 1, 1, 0]),
        "b": (1, [0, 1, 1, 0]),
        "c": (1, [1, 0, 0, 1]),
        "d": (1, None),
        "e": (0, [0, 0, 0, 0]),
        "f": (1, [0, 0, 0, 1]),
    }
    assert made.manifest.patient_ids == ["007", *(f"patient {name}" for name in "bcdef")]
    assert made.manifest.about["options"] == {"table": str(folder.root.parent / f"labels{suffix}")}


def test_folder_list_column_and_whole_scan_labels(folder):
    folder.scan("a")
    folder.scan("b")
    folder.add("a", label=1, slice_labels=[0, 1, 1, 0])
    folder.add("b", label=0, slice_labels=None)
    assert [slices(row) for row in folder.index(".parquet").manifest] == [[0, 1, 1, 0], [0, 0, 0, 0]]


@pytest.mark.parametrize("value", [0.5, float("inf"), float("-inf")])
def test_folder_numbers_that_are_no_labels(folder, value):
    """Missing values in lists are reported and not turned into numbers; in a column of labels they are bad rows."""
    folder.scan("a")
    folder.scan("b")
    folder.add("a", label=1.0, slice_labels=[0.0, 1.0, 1.0, value])
    folder.add("b", label=value, slice_labels=[0.0, 0.0, 0.0, 0.0])
    made = folder.index(".parquet")
    assert [(row.scan_id, row.label, slices(row)) for row in made.manifest] == [("a", 1, None)]
    details = {problem.kind: problem.detail for problem in made.problems}
    assert details["label_mismatch"] == f"slice label '{value}' is neither 0 nor 1"
    assert details["bad_row"] == f"row 2: label '{value}' is neither 0 nor 1"


def test_folder_without_slice_labels_knows_none(folder):
    folder.scan("a")
    folder.add("a", label=0)
    assert [(row.label, slices(row)) for row in folder.index().manifest] == [(0, None)]


def test_folder_reads_archives_and_folders_in_them(folder):
    folder.scan("x")
    folder.scan("y", count=2)
    with zipfile.ZipFile(folder.root / "both.zip", "w") as archive:
        for file in sorted(folder.root.glob("?/*.dcm")):
            archive.write(file, file.relative_to(folder.root).as_posix())
            file.unlink()
    folder.add("all", path="both.zip", label=0)
    folder.add("part", path="both.zip!y", label=1)
    made = folder.index()
    assert scans(made)["part"].files == ("both.zip!y/0.dcm", "both.zip!y/1.dcm")
    assert scans(made)["all"].files == tuple(f"both.zip!x/{place}.dcm" for place in range(4))
    assert found(made, "mixed_series") == [("all", "both.zip!y/0.dcm")]


def test_folder_archive_that_is_a_pipe_is_not_waited_for(folder):
    folder.scan("a")
    folder.add("a", label=1)
    folder.add("z.zip", label=0)
    os.mkfifo(folder.root / "z.zip")
    made = folder.index()
    assert [row.scan_id for row in made.manifest] == ["a"]
    assert found(made, "unreadable") == [("", "z.zip")]


def test_folder_archive_members_that_lead_out_are_left_out(folder):
    folder.scan("x")
    with zipfile.ZipFile(folder.root / "bad.zip", "w") as archive:
        archive.write(folder.root / "x/0.dcm", "0.dcm")
        archive.write(folder.root / "x/1.dcm", "../1.dcm")
    folder.add("a", path="bad.zip", label=0)
    made = folder.index()
    assert scans(made)["a"].files == ("bad.zip!0.dcm",)
    assert found(made, "unsafe_path") == [("", "bad.zip!../1.dcm")]
    assert not (folder.root.parent / "1.dcm").exists()


def test_folder_reads_nifti_with_a_mask(folder):
    """The mask lists its slices from head to feet, the scan from feet to head: they are matched in space."""
    affine = np.diag([-1.0, -1.0, 5.0, 1.0])
    upside_down = np.diag([-1.0, -1.0, -5.0, 1.0])
    upside_down[2, 3] = 5.0 * 5
    mask = np.zeros((16, 16, 6), np.uint8)
    mask[3, 3, 0] = 1  # the uppermost slice
    write_nifti(folder.root / "a.nii.gz", np.zeros((16, 16, 6), np.int16), affine)
    write_nifti(folder.root / "mask.nii", mask, upside_down)
    folder.add("a", path="a.nii.gz", mask="mask.nii", label=1)
    made = folder.index()
    (row,) = made.manifest
    assert (row.kind, row.files, row.frames) == ("nifti", ("a.nii.gz",) * 6, tuple(range(6)))
    assert slices(row) == [0, 0, 0, 0, 0, 1]
    assert (row.positions, row.slice_spacing) == ((0.0, 5.0, 10.0, 15.0, 20.0, 25.0), 5.0)
    assert [(p.kind, p.scan_id) for p in made.problems] == [("no_patient", "a")]
    assert row.patient_id == "a"


def test_folder_mask_over_dicom(folder):
    folder.scan("a")
    mask = np.zeros((16, 16, 4), np.uint8)
    mask[0, 0, 2] = 1
    affine = np.diag([-1.0, -1.0, 5.0, 1.0])  # to NIfTI's axes, which point right and anterior
    affine[:2, 3] = 8
    write_nifti(folder.root / "a.nii", mask, affine)
    folder.add("a", mask="a.nii", label=1)
    made = folder.index()
    assert (slices(next(iter(made.manifest))), made.problems) == ([0, 0, 1, 0], [])


@pytest.mark.parametrize(
    ("cells", "detail"),
    [
        ({"slice_labels": "0 1"}, "2 slice labels for 4 slices"),
        ({"slice_labels": "0 1 2 0"}, "slice label '2' is neither 0 nor 1"),
        ({"slice_labels": "0 0 0 0"}, "label is 1, but 0 of 4 slices are positive"),
        ({"slice_ranges": "2-4"}, "slice range '2-4' does not fit 4 slices, counted from 0 to 3"),
        ({"slice_ranges": "3-2"}, "slice range '3-2' does not fit 4 slices"),
        ({"slice_ranges": "one"}, "slice range 'one' is not one; write it as 12-20;31-33"),
        ({"slice_ranges": "1", "slice_labels": "0 1 0 0"}, "slice_labels and slice_ranges are given; give one of them"),
    ],
)
def test_folder_slice_labels_that_do_not_fit_are_left_out(folder, cells, detail):
    folder.scan("a")
    folder.add("a", label=1, **cells)
    made = folder.index()
    assert [(row.label, slices(row)) for row in made.manifest] == [(1, None)]
    (problem,) = made.problems
    assert problem.kind == "label_mismatch"
    assert problem.detail.startswith(detail)


def test_folder_masks_that_cannot_be_used(folder):
    folder.scan("a")
    (folder.root / "broken.nii").write_bytes(b"no volume")
    for scan_id, mask in (("gone", "gone.nii"), ("broken", "broken.nii"), ("dicom", "a/0.dcm"), ("out", "../x.nii")):
        folder.add(scan_id, path="a", mask=mask, label=1)
    made = folder.index()
    assert [(row.label, slices(row)) for row in made.manifest] == [(1, None)] * 4
    assert found(made, "label_without_image") == [("gone", "gone.nii")]
    assert found(made, "unsafe_path") == [("out", "../x.nii")]
    assert found(made, "unreadable") == [("broken", "broken.nii"), ("dicom", "a/0.dcm")]


@pytest.mark.parametrize(
    ("cells", "kind"),
    [
        ({"path": "nowhere"}, "label_without_image"),
        ({"path": "../outside"}, "unsafe_path"),
        ({"path": "/etc"}, "unsafe_path"),
        ({"path": "link"}, "unsafe_path"),
        ({"path": "a\0b"}, "label_without_image"),
        ({"path": "x" * 5000}, "label_without_image"),
        ({"path": "empty"}, "label_without_image"),
        ({"path": "broken.zip"}, "unreadable"),
        ({"label": "2"}, "bad_row"),
        ({"label": ""}, "image_without_label"),
        ({"path": ""}, "bad_row"),
        ({"scan_id": ""}, "bad_row"),
        ({"scan_id": "good"}, "double_scan"),
    ],
)
def test_folder_rows_that_cannot_be_used_do_not_stop_the_others(folder, cells, kind):
    folder.scan("a")
    (folder.root / "empty").mkdir()
    (folder.root / "broken.zip").write_bytes(b"PK\3\4 no archive")
    (folder.root.parent / "outside").mkdir()
    (folder.root / "link").symlink_to(folder.root.parent / "outside")
    folder.add("good", path="a", label="1")
    folder.rows.append({"scan_id": "bad", "path": "a", "label": "0", **cells})
    made = folder.index(".parquet")
    assert made.manifest.scan_ids == ["good"]
    assert kind in {problem.kind for problem in made.problems}
    assert {problem.scan_id for problem in made.problems} <= {"bad", "good", ""}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "scan_id,label\na,1\n",
            r"has no column path \(.*relative to the folder ROOT\); it has scan_id, label; add path",
        ),
        ("scan_id,path\na,a\n", r"has no column label \(0 or 1; or one of slice_labels, slice_ranges, mask\)"),
        (
            "AccessionNumber,Folder,y\na,a,1\n",
            r"no columns scan_id \(.*\), path \(.*\), label \(.*\); it has AccessionNumber, Folder, y; rename "
            "AccessionNumber to scan_id, Folder to path, y to label$",
        ),
        ("id,where,label\na,a,1\n", "rename id to scan_id and add path, or rename what the table calls otherwise"),
        ("scan_id,path,label\n", "has no usable row"),
        ("scan_id,path,label\na,a,7\n", "has no usable row; row 1: label '7' is neither 0 nor 1; each needs"),
        ("scan_id,path,label\na,a,Yes\n", "row 1: label 'Yes' is neither 0 nor 1; each needs"),
        ("scan_id,path,label\na,gone,1\n", r"no such file or folder: .*root/gone \(paths are relative to .*ROOT\)"),
        ("", "cannot be read"),
        ("scan_id,path,label\na,b\n", "cannot be read"),
        ("scan_id,scan_id,path,label\na,b,c,1\n", "column scan_id occurs twice"),
        (b"scan_id,path,label\n\xff\xfe,a,1\n", "cannot be read"),
    ],
)
def test_folder_tables_that_cannot_be_used(folder, text, message):
    table = folder.root.parent / "labels.csv"
    table.write_bytes(text if isinstance(text, bytes) else text.encode())
    with pytest.raises(UserError, match=message):
        index("folder", folder.root, folder.root.parent / "out", table=table)
    assert not (folder.root.parent / "out").exists()


@pytest.mark.parametrize("mark", [",", ";", "\t"])
def test_folder_tables_of_other_separators_are_read(folder, mark):
    folder.scan("a")
    table = folder.root.parent / "labels.csv"
    table.write_text(f'scan_id{mark}path{mark}slice_ranges\na{mark}a{mark}"0;2-3"\n')
    made = index("folder", folder.root, folder.root.parent / "out", table=table)
    assert [slices(row) for row in made.manifest] == [[1, 0, 1, 1]]


def test_folder_needs_a_table_of_a_known_kind(folder):
    with pytest.raises(UserError, match=r"needs --table FILE"):
        index("folder", folder.root, folder.root.parent / "out")
    with pytest.raises(UserError, match=r"labels.xlsx: the ending is unknown; give a .csv or .parquet"):
        index("folder", folder.root, folder.root.parent / "out", table="labels.xlsx")
    with pytest.raises(UserError, match=r"labels.csv is not a file; give the table of labels"):
        index("folder", folder.root, folder.root.parent / "out", table="labels.csv")
    with pytest.raises(UserError, match=r"nowhere is not a folder"):
        index("folder", folder.root / "nowhere", folder.root.parent / "out")  # the first thing to mend


def test_notations():
    assert parse_labels(" (0;1,true 1.0) ").tolist() == [0, 1, 1, 1]
    assert parse_ranges("", 2).tolist() == [0, 0]


@pytest.mark.parametrize(
    ("change", "values", "message"),
    [
        ({"located": False}, {}, "positions of the slices are unknown"),
        ({}, {"orientation": (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)}, "another orientation"),
        ({}, {"positions": ((0.0, 0.0, 0.0), (0.0, 0.0, 5.0))}, "does not cover 1 of 3 slices"),
        (
            {},
            {"positions": tuple((0.0, 0.0, 5.0 * k) for k in range(5)), "positive": (False, True, False, False, True)},
            "1 of 2 nonzero slices of mask m.nii lie outside",
        ),
    ],
)
def test_masks_that_do_not_fit(change, values, message):
    scan = Ordered((("1", 0), ("2", 0), ("3", 0)), (0.0, 5.0, 10.0), 5.0, AXIAL, 16, 16, None, (), True)
    places = tuple((0.0, 0.0, 5.0 * k) for k in range(3))
    mask = Mask("m.nii", AXIAL, places, (False, True, False))
    assert slices_of_mask(mask, scan).tolist() == [0, 1, 0]
    mask = mask._replace(**values)
    mask = mask._replace(positive=mask.positive[: len(mask.positions)])
    with pytest.raises(ValueError, match=message):
        slices_of_mask(mask, replace(scan, **change))


def test_a_finer_mask_marks_the_slices_that_it_touches():
    scan = Ordered((("1", 0), ("2", 0), ("3", 0)), (0.0, 5.0, 10.0), 5.0, AXIAL, 16, 16, None, (), True)
    heights = np.arange(-2, 13).astype(float)
    places = tuple((0.0, 0.0, z) for z in heights.tolist())
    mask = Mask("m.nii", AXIAL, places, tuple((heights == 7).tolist()))
    assert slices_of_mask(mask, scan).tolist() == [0, 1, 0]  # 2 mm from the second slice, 3 from the third


def test_thousands_of_slices_and_of_slices_of_their_mask():
    """Comparing all pairs in one array would take 26 GB."""
    count = 60_000
    names = tuple((str(k), 0) for k in range(count))
    scan = Ordered(names, tuple(float(k) for k in range(count)), 1.0, AXIAL, 16, 16, None, (), True)
    places = tuple((0.0, 0.0, float(k)) for k in reversed(range(count)))
    found = slices_of_mask(Mask("m.nii", AXIAL, places, tuple(k < 3 for k in range(count))), scan)
    assert np.flatnonzero(found).tolist() == [count - 3, count - 2, count - 1]


# ----------------------------------------------------------------------------------------------------
# All
# ----------------------------------------------------------------------------------------------------

TABLES = {
    "rsna-ich": ("stage_2_train.csv", "stage_2_train", "rsna-intracranial-hemorrhage-detection"),
    "rsna-pe": ("train.csv", "train", "rsna-str-pulmonary-embolism-detection"),
    "rsna-at": ("image_level_labels_2024.csv", "train_images", "rsna-2023-abdominal-trauma-detection"),
}


@pytest.mark.parametrize("source", TABLES)
def test_missing_tables_and_folders_are_named(tmp_path, source):
    table, images, competition = TABLES[source]
    with pytest.raises(
        UserError, match=f"{tmp_path}/{table} is not there; unpack the table from Kaggle's {competition}"
    ):
        index(source, tmp_path, tmp_path / "out")
    for name in (table, "train_series_meta.csv", "train_2024.csv"):
        (tmp_path / name).write_text("a,b\n1,2\n")
    with pytest.raises(UserError, match=f"{tmp_path}/{images} is not a folder"):
        index(source, tmp_path, tmp_path / "out")
    (tmp_path / images).mkdir()
    with pytest.raises(UserError, match=f"{tmp_path}/{table} cannot be read as a table with the columns"):
        index(source, tmp_path, tmp_path / "out")
    with pytest.raises(UserError, match=r"nowhere is not a folder; give the folder that holds"):
        index(source, tmp_path / "nowhere", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_the_competitions_own_folder_is_found(head):
    inner = head.root.parent / "above" / "rsna-intracranial-hemorrhage-detection"
    head.index()
    inner.parent.mkdir()
    head.root.rename(inner)
    made = index("rsna-ich", inner.parent, head.root.parent / "out2")
    assert (len(made.manifest), made.manifest.root) == (2, inner)


def test_every_source_is_tested_here():
    assert set(SOURCES) == {*TABLES, "folder", "prostatex"}  # prostatex: test_prostatex.py


def test_folder_with_findings(folder):
    for name in "abcd":
        folder.scan(name)
    rows = {
        "a": {"any": 1, "epidural": 1, "subdural": 0, "slice_labels_any": "0 1 1 0", "slice_ranges_epidural": "1"},
        "b": {"any": 0, "epidural": 0, "subdural": "", "slice_labels_any": "", "slice_ranges_epidural": ""},
        "c": {"any": 1, "epidural": 0, "subdural": 1, "slice_labels_any": "", "slice_ranges_epidural": "2"},
        "d": {"any": 1, "epidural": 2, "subdural": 1, "slice_labels_any": "", "slice_ranges_epidural": ""},
    }
    for name, cells in rows.items():
        folder.add(name, **cells)
    made = folder.index(findings=parse_findings("any=1386000,epidural,subdural"))
    manifest = made.manifest
    assert [(row.scan_id, row.label, slices(row)) for row in manifest] == [
        ("a", 1, [0, 1, 1, 0]),
        ("b", 0, [0, 0, 0, 0]),
        ("c", 1, None),
    ]
    assert [(row.label, slices(row)) for row in manifest.of_finding("epidural")] == [
        (1, [0, 1, 0, 0]),
        (0, [0, 0, 0, 0]),
        (0, None),  # its slice labels contradict it
    ]
    assert [(row.scan_id, row.label, slices(row)) for row in manifest.of_finding("subdural")] == [
        ("a", 0, None),
        ("c", 1, None),
    ]
    assert [problem.scan_id for problem in made.problems if problem.kind == "label_mismatch"] == ["c"]
    wrong = [problem.detail for problem in made.problems if problem.kind == "bad_row"]
    assert wrong == ["row 4: label of epidural '2' is neither 0 nor 1"]


@pytest.mark.parametrize(
    ("findings", "message"),
    [
        ("any,subdural", r"labels.csv has no column subdural \(0 or 1\); it has scan_id, path, any, label"),
        ("any", "has a column label beside the findings, the first of which is the label; add it to --findings"),
        ("any,path", "path is another column of the table"),
    ],
)
def test_folder_refuses_findings_that_the_table_lacks(folder, findings, message):
    folder.scan("a")
    folder.add("a", any=1, label=1)
    with pytest.raises(UserError, match=message):
        folder.index(findings=parse_findings(findings))


def test_other_sources_have_no_option_for_findings(head):
    with pytest.raises(UserError, match=r"rsna-ich has no option --findings \(given: any\); leave it out"):
        head.index(findings=parse_findings("any"))


def test_folder_says_which_scans_are_mr(folder):
    """NIfTI has no field for the modality; DICOM of another modality than the table's is refused."""
    write_nifti(folder.root / "a.nii", np.zeros((16, 16, 6), np.int16), np.diag([-1.0, -1.0, 5.0, 1.0]))
    folder.scan("b", Modality="MR")
    folder.scan("c", Modality="MR")
    folder.scan("d")
    folder.scan("e", Modality=None)
    folder.add("a", path="a.nii", label=0, modality="mr")
    folder.add("b", label=1, modality="MR")
    folder.add("c", label=1, modality="CT")
    folder.add("d", label=1)
    folder.add("e", label=1, modality="MR")
    folder.add("f", label=1, modality="MRI")
    made = folder.index()
    assert {row.scan_id: row.modality for row in made.manifest} == {"a": "MR", "b": "MR", "d": "CT", "e": "MR"}
    assert {scan for scan, _ in found(made, "wrong_modality")} == {"c"}
    (wrong,) = (problem for problem in made.problems if problem.kind == "bad_row")
    assert wrong.detail == "row 6: modality 'MRI' is not one of CT, MR"
