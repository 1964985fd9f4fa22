"""DICOM results of made-up predictions, and what the tests of `clinic.dicom` read them with."""

import csv
import io
import shutil
import subprocess
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import highdicom
import numpy as np
import pydicom
import pytest
import torch
from highdicom.sr import MeasurementsAndQualitativeEvaluations
from PIL import Image

from normal_guidance.clinic.dicom.objects import KINDS as RESULTS
from normal_guidance.clinic.dicom.objects import write_dicom
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.scans.index.indexing import index
from normal_guidance.scans.index.manifest import ScanRow, read_manifest
from normal_guidance.scans.index.problems import Problem
from normal_guidance.scans.phantom.phantom_files import write_phantom

Group = MeasurementsAndQualitativeEvaluations

KOS, SR, STRIP = RESULTS

IDENTITY = {
    "PatientName": "Löwenherz^Ännchen",
    "PatientID": "MRN-4711",
    "IssuerOfPatientID": "Hospital of Springfield",
    "PatientBirthDate": "19470321",
    "PatientSex": "F",
    "PatientAge": "068Y",
    "StudyDate": "20151117",
    "StudyTime": "113355.123456",
    "AccessionNumber": "ACC-99812",
    "StudyID": "STUDY-77",
    "ReferringPhysicianName": "Quack^Donald",
    "StudyDescription": "CT after a fall",
}
"""What results repeat."""

MORE = {
    "InstitutionName": "Springfield General",
    "InstitutionAddress": "1 Evergreen Terrace",
    "OperatorsName": "Operator^Otto",
    "PerformingPhysicianName": "Surgeon^Susi",
    "StationName": "SCANNER-5",
    "DeviceSerialNumber": "SN-55667",
    "OtherPatientIDs": "OTHER-12345",
    "PatientAddress": "742 Evergreen Terrace",
    "PatientComments": "afraid of machines",
    "SeriesDate": "20151118",
    "AcquisitionDate": "20151119",
}
"""What they must not repeat at all."""

KINDS = ("single", "multi_frame", "jpeg2000", "zip")


def change(path: Path, **values: object) -> None:
    """Rewrites attributes of a file; None deletes."""
    dataset = pydicom.dcmread(path)
    for name, value in values.items():
        if value is None:
            dataset.pop(name, None)
        else:
            setattr(dataset, name, value)
    dataset.save_as(path)


@pytest.fixture(scope="session")
def scans(tmp_path_factory) -> dict[str, tuple[ScanRow, Path]]:
    """One scan of every kind of `KINDS`, indexed; nobody may change the files."""
    folder = tmp_path_factory.mktemp("dicom")
    small = {"size": 32, "slices": 12, "positive": 0.5}
    plain = write_phantom("folder", folder / "plain", scans=2, oddities=["multi_frame"], **small)
    packed = write_phantom("folder", folder / "packed", scans=1, compression="jpeg2000", **small)
    paths = {scan["oddity"] or "single": folder / "plain" / Path(scan["files"][0]).parent for scan in plain["scans"]}
    paths["jpeg2000"] = folder / "packed" / Path(packed["scans"][0]["files"][0]).parent
    for file in [file for path in paths.values() for file in path.iterdir()]:
        change(file, PatientIdentityRemoved=None, DeidentificationMethod=None, **IDENTITY, **MORE)
    with zipfile.ZipFile(folder / "scan.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        for path in sorted(paths["single"].iterdir()):
            archive.write(path, f"inside/{path.name}")
    paths["zip"] = folder / "scan.zip"
    with (folder / "labels.csv").open("w", newline="") as file:
        table = csv.writer(file)
        table.writerow(["scan_id", "path", "label", "patient_id"])
        # Neither name may be taken for the patient.
        table.writerows([kind, path.relative_to(folder), 0, "FROM-THE-TABLE"] for kind, path in paths.items())
    index("folder", folder, folder / "index", table=folder / "labels.csv")
    manifest = read_manifest(folder / "index")
    return {row.scan_id: (replace(row, scan_id=f"SCANID-{row.scan_id}"), manifest.root) for row in manifest}


@pytest.fixture
def copied(scans, tmp_path) -> tuple[ScanRow, Path]:
    """The single-frame scan, in files that a test may change."""
    row, root = scans["single"]
    for file in row.files:
        (tmp_path / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copyfile(root / file, tmp_path / file)
    return row, tmp_path


def make_strip(folder: Path) -> Path:
    """A picture with an odd number of bytes."""
    values = np.random.default_rng(0).integers(0, 256, (21, 33, 3), dtype=np.uint8)
    Image.fromarray(values).save(folder / "strip.png")
    return folder / "strip.png"


@pytest.fixture
def strip(tmp_path) -> Path:
    return make_strip(tmp_path)


@pytest.fixture(scope="session")
def results(scans, tmp_path_factory) -> dict[str, dict[str, Path]]:
    """The results of every scan of `KINDS`; nobody may change the files."""
    folder = tmp_path_factory.mktemp("results")
    return {kind: write(*scan, make_strip(folder), folder / kind) for kind, scan in scans.items()}


def predicted(row: ScanRow, root: Path, **changes) -> ScanPrediction:
    """A made-up prediction whose highest slices are 7, 2 and 5."""
    attention = torch.rand(len(row), generator=torch.Generator().manual_seed(0)) / 2
    for place, number in enumerate((7, 2, 5)):
        attention[number] += 3 - place
    attention /= attention.sum()
    values = {"threshold": 0.25, "key_positions": (7, 2, 5), "interval_positions": (4, 8), "share": 0.5, **changes}
    return ScanPrediction(row, root, "ng", 1.3, 0.8125, log_attention=attention.log()[None], **values)


def write(row: ScanRow, root: Path, strip: Path, out: Path, *, anonymize=False, **changes) -> dict[str, Path]:
    files = write_dicom(predicted(row, root, **changes), strip, out, anonymize=anonymize)
    assert sorted(files) == sorted(out.iterdir())
    return {file.name: file for file in files}


def groups_of(report: Path) -> tuple[list, Group, Group]:
    """The groups of a report, by highdicom: those of the key slices, that of the scan, that of all slices."""
    document = highdicom.sr.srread(report)
    (scan,) = document.content.get_image_measurement_groups()
    slices = Group.from_sequence(document.ContentSequence[-1].ContentSequence)
    return document.content.get_planar_roi_measurement_groups(), scan, slices


def texts_of(items: pydicom.Sequence, concept: str) -> list[str]:
    """The texts of a concept, anywhere below."""
    texts = []
    for item in items:
        if item.ValueType == "TEXT" and item.ConceptNameCodeSequence[0].CodeValue == concept:
            texts.append(item.TextValue)
        texts += texts_of(item.get("ContentSequence", []), concept)
    return texts


def sources(row: ScanRow, root: Path) -> list[pydicom.Dataset]:
    """The header of every slice, by pydicom alone."""
    headers = []
    for file in row.files:
        archive, _, member = file.partition("!")
        content = zipfile.ZipFile(root / archive).read(member) if member else (root / file).read_bytes()
        headers.append(pydicom.dcmread(io.BytesIO(content), stop_before_pixels=True))
    return headers


def true_references(row: ScanRow, root: Path) -> list[tuple[str, int | None]]:
    """SOPInstanceUID of every slice, with its frame from 1 if there are several."""
    headers = zip(sources(row, root), row.frames, strict=True)
    return [(one.SOPInstanceUID, frame + 1 if "NumberOfFrames" in one else None) for one, frame in headers]


def change_all(row: ScanRow, root: Path, **values: object) -> None:
    """Rewrites attributes of all files of a scan, also to values that are not valid."""
    with pydicom.config.disable_value_validation():
        for file in row.files:
            change(root / file, **values)


def references(items: pydicom.Sequence) -> list[tuple[str, int | None]]:
    return [(one.ReferencedSOPInstanceUID, one.get("ReferencedFrameNumber")) for one in items]


def of_images(sequence: pydicom.Sequence) -> list[tuple[str, int | None]]:
    return [references(item.ReferencedSOPSequence)[0] for item in sequence if item.ValueType == "IMAGE"]


def everything(dataset: pydicom.Dataset) -> Iterator[pydicom.DataElement]:
    return (element for element in dataset.iterall() if element.VR != "SQ")


needs_dciodvfy = pytest.mark.skipif(
    shutil.which("dciodvfy") is None,
    reason="DCIODVFY IS NOT INSTALLED (apt install dicom3tools): WHETHER DICOM RESULTS ARE VALID IS NOT TESTED",
)
needs_dsrdump = pytest.mark.skipif(
    shutil.which("dsrdump") is None,
    reason="DSRDUMP IS NOT INSTALLED (apt install dcmtk): WHETHER DICOM REPORTS CAN BE READ IS NOT TESTED",
)


def errors_of(path: Path) -> list[str]:
    result = subprocess.run(["dciodvfy", "-new", path], capture_output=True, text=True, errors="replace", check=False)
    lines = (result.stdout + result.stderr).splitlines()
    assert any(line in ("KeyObjectSelectionDocument", "Comprehensive3DSR", "SCImage") for line in lines), lines
    return [line for line in lines if line.startswith("Error")]


def dumped(path: Path) -> str:
    """All codes, all of long values, all UIDs."""
    return subprocess.run(["dsrdump", "+Pc", "+Pl", "+Pu", path], capture_output=True, text=True, check=True).stdout


def read_and_problems(row: ScanRow, root: Path, strip: Path, out: Path) -> tuple[list[pydicom.Dataset], list[Problem]]:
    problems: list[Problem] = []
    files = write_dicom(predicted(row, root), strip, out, report=problems.append)
    if shutil.which("dciodvfy"):
        assert [line for path in files for line in errors_of(path)] == []
    return [pydicom.dcmread(path) for path in files], problems
