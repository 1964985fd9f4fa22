"""`nguide index` on tiny scans: what it prints, what it writes, mistakes in one line, help at once."""

import io
import json
import subprocess
import sys
import warnings
from pathlib import Path

import nibabel
import numpy as np
import pytest
import typer
from pydicom.dataset import Dataset, FileDataset, FileMetaDataset
from pydicom.uid import CTImageStorage, ExplicitVRLittleEndian
from rich.console import Console
from typer.testing import CliRunner

from normal_guidance.cli.commands import Commands
from normal_guidance.cli.scans import _watch, index
from normal_guidance.scans.index.indexing import SOURCES, IndexProgress
from normal_guidance.scans.index.manifest import read_manifest

app = typer.Typer(cls=Commands)
app.command()(index)
app.command("other")(lambda: None)  # with one command, typer would not ask for its name


def invoke(*arguments: str | Path):
    return CliRunner().invoke(app, ["index", *map(str, arguments)])


def write_slice(path: Path, z: float) -> None:
    meta = FileMetaDataset()
    meta.TransferSyntaxUID, meta.MediaStorageSOPClassUID = ExplicitVRLittleEndian, CTImageStorage
    meta.MediaStorageSOPInstanceUID = "1.2.3"
    path.parent.mkdir(parents=True, exist_ok=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dataset = FileDataset(str(path), Dataset(), file_meta=meta, preamble=bytes(128))
        dataset.SOPClassUID, dataset.SOPInstanceUID, dataset.Modality = CTImageStorage, path.stem, "CT"
        dataset.SeriesInstanceUID, dataset.StudyInstanceUID = path.parent.name, path.parent.parent.name
        dataset.ImagePositionPatient, dataset.ImageOrientationPatient = [0, 0, z], [1, 0, 0, 0, 1, 0]
        dataset.Rows = dataset.Columns = dataset.BitsAllocated = 16
        dataset.SamplesPerPixel, dataset.PixelRepresentation = 1, 0
        dataset.PixelData = np.zeros((16, 16), np.uint16).tobytes()
        dataset.save_as(path, enforce_file_format=True)


@pytest.fixture
def chest(tmp_path) -> Path:
    """Two exams of four and five slices in the layout of the 2020 challenge, the first with an embolus."""
    root = tmp_path / "root"
    rows = []
    for study, series, labels in (("st1", "se1", "0110"), ("st2", "se2", "00000")):
        for place, label in enumerate(labels):
            write_slice(root / f"train/{study}/{series}/{series}{place}.dcm", 2.0 * place)
            rows.append(f"{study},{series},{series}{place},{label},{int('1' not in labels)},0")
    header = "StudyInstanceUID,SeriesInstanceUID,SOPInstanceUID,pe_present_on_image,negative_exam_for_pe,indeterminate"
    (root / "train.csv").write_text("\n".join([header, *rows]) + "\n")
    return root


def test_the_summary_says_what_there_is_and_what_comes_next(chest, tmp_path):
    out = tmp_path / "out"
    result = invoke("rsna-pe", chest, "-o", out, "--workers", "0")
    assert result.exit_code == 0, result.output
    seconds = json.loads((out / "report.json").read_text())["seconds"]
    assert result.output.splitlines() == [
        f"Reading headers in {chest}, layout rsna-pe: begins",
        "2 scans, 9 slices, 2 patients",
        "1 positive scan (50.0 %), 2 with slice labels",
        "No problems",
        f"Manifest: {out}/manifest.parquet ({seconds:g} s)",
        f"Next: nguide split {out} --seeds 1 -o splits, then nguide encode {out} --encoder NAME "
        "--split splits/split-1.csv -o STORE",
    ]
    assert read_manifest(out).scan_ids == ["se1", "se2"]


def test_problems_are_counted_by_kind(chest, tmp_path):
    (chest / "train/st2/se2/se22.dcm").write_text("no image")
    (chest / "train/st1/se1/readme.txt").write_text("no image")
    result = invoke("rsna-pe", chest, "-o", tmp_path / "out", "--workers", "1")
    assert result.exit_code == 0, result.output
    assert f"Problems: no_image 2, gap 1; see {tmp_path}/out/problems.csv\n" in result.output


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("rsna-pet", "{root}", "-o", "{out}"), "source 'rsna-pet' is unknown; choose one of rsna-ich, rsna-pe"),
        (("rsna-pe", "{out}", "-o", "{out}"), "is not a folder; give the folder that holds train.csv and train"),
        (("rsna-ich", "{root}", "-o", "{out}"), "stage_2_train.csv is not there"),
        (("rsna-pe", "{root}", "-o", "{root}"), "is a folder that is not empty"),
        (
            ("rsna-pe", "{root}", "-o", "{out}", "--labels", "patient"),
            "rsna-pe has no option --labels (given: patient)",
        ),
        (("rsna-pe", "{root}", "-o", "{out}", "--table", "x.csv"), "rsna-pe has no option --table (given: x.csv)"),
        (("folder", "{root}", "-o", "{out}"), "needs --table FILE"),
        (("folder", "{root}", "-o", "{out}", "--table", "{root}/train.csv"), "has no columns scan_id"),
        (("rsna-at", "{root}", "-o", "{out}", "--labels", "organ"), "choose one of image, patient"),
        (("rsna-pe", "{root}", "-o", "{out}", "--workers", "-1"), "--workers"),
        (("rsna-pe", "{root}"), "--out"),
    ],
)
def test_mistakes_are_said_without_a_traceback(chest, tmp_path, arguments, message):
    result = invoke(*(word.format(root=chest, out=tmp_path / "out") for word in arguments))
    assert result.exit_code == 2, result.output
    assert message in " ".join(result.output.split())
    assert "Traceback" not in result.output
    assert not (tmp_path / "out").exists()


def test_the_share_of_scans_that_are_left_out_is_said_on_stderr(chest, tmp_path):
    rows = ["here,train/st1,1", "gone,elsewhere/st9,0", "unknown,train/st2,", "word,train/st2,yes", ",train/st2,1"]
    table = tmp_path / "labels.csv"
    table.write_text("\n".join(["scan_id,path,label", *rows]) + "\n")
    result = invoke("folder", chest, "--table", table, "-o", tmp_path / "out", "--workers", "0")
    assert result.exit_code == 0, result.output
    said = " ".join(result.stderr.split())
    assert "warning: 4 of the table's 5 scans are left out: 2 of 5 have a row that cannot be used" in said
    assert "1 of 5 have no files" in said
    assert "1 of 5 have no label" in said
    assert f"see {tmp_path / 'out'}/problems.csv" in said
    assert "1 scan, 4 slices, 1 patient\n" in result.stdout
    problems = (tmp_path / "out" / "problems.csv").read_text()
    assert f"{chest}/elsewhere/st9 (paths are relative to the folder ROOT)" in problems
    table.write_text("scan_id,path,label\nhere,train/st1,1\n")
    assert not invoke("folder", chest, "--table", table, "-o", tmp_path / "all", "--workers", "0").stderr


def test_a_scan_id_that_stands_twice_is_said_on_stderr(chest, tmp_path):
    table = tmp_path / "labels.csv"
    table.write_text("scan_id,path,label\na,train/st1,1\na,train/st2,0\nb,train/st2,0\n")
    result = invoke("folder", chest, "--table", table, "-o", tmp_path / "out", "--workers", "0")
    said = " ".join(result.stderr.split())
    assert "warning: 1 of the table's 3 scans are left out: 1 of 3 have a scan_id that stands twice; for" in said
    assert "instance a: row 2: scan_id occurs twice; see" in said
    assert "2 scans" in result.stdout


@pytest.mark.parametrize(("path", "asked"), [("train/st1", True), ("gone/st1", False)])
def test_paths_that_begin_with_the_name_of_root_come_with_the_root_that_is_meant(chest, tmp_path, path, asked):
    table = tmp_path / "labels.csv"
    table.write_text(f"scan_id,path,label\na,{path},1\n")
    result = invoke("folder", chest / "train", "--table", table, "-o", tmp_path / "out", "--workers", "0")
    assert result.exit_code == 2
    assert f"no such file or folder: {chest}/train/{path} (paths are relative to the folder ROOT)" in result.stderr
    assert (f"did you mean ROOT = {chest}?" in result.stderr) is asked


def test_nifti_that_counts_as_ct_untold_is_said_on_stderr(tmp_path):
    for name in ("a", "b", "c"):
        nibabel.save(nibabel.Nifti1Image(np.zeros((8, 8, 3), np.int16), np.eye(4)), tmp_path / f"{name}.nii")
    table, common = tmp_path / "labels.csv", ("--table", tmp_path / "labels.csv", "--workers", "0")
    table.write_text("scan_id,path,label\na,a.nii,0\nb,b.nii,1\nc,c.nii,1\n")
    said = invoke("folder", tmp_path, *common, "-o", tmp_path / "untold").stderr
    assert said == (
        f"warning: 3 NIfTI scans have no modality and count as CT; for MR add a column modality with MR to {table}\n"
    )
    table.write_text("scan_id,path,label,modality\na,a.nii,0,MR\nb,b.nii,1,\nc,c.nii,1,CT\n")
    said = invoke("folder", tmp_path, *common, "-o", tmp_path / "one").stderr
    assert said.startswith("warning: 1 NIfTI scan has no modality and counts as CT; for MR")
    table.write_text("scan_id,path,label,modality\na,a.nii,0,MR\nb,b.nii,1,mr\nc,c.nii,1,CT\n")
    assert not invoke("folder", tmp_path, *common, "-o", tmp_path / "told").stderr


def test_pictures_are_named_as_what_they_are_not(tmp_path):
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "0.jpg").write_bytes(b"\xff\xd8\xff\xe0 a picture")
    (tmp_path / "labels.csv").write_text("scan_id,path,label\na,a,1\n")
    result = invoke("folder", tmp_path / "root", "--table", tmp_path / "labels.csv", "-o", tmp_path / "out")
    assert result.exit_code == 2
    assert "for instance a/0.jpg: no_image, not a DICOM file; give DICOM files or NIfTI (.nii" in result.stderr


def test_help_names_every_source():
    result = invoke("--help")
    assert result.exit_code == 0
    assert all(source in result.output for source in SOURCES)


def test_the_module_is_light():
    heavy = ("torch", "pandas", "pydicom", "pyarrow", "rich.progress")
    code = f"import sys, normal_guidance.cli.scans; print([name for name in {heavy} if name in sys.modules])"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout == "[]\n"


def test_a_terminal_gets_a_bar():
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=120, _environ={"TERM": "xterm"})
    with _watch(console, "rsna-pe in root") as watch:
        watch(IndexProgress(640, 3, None))
        watch(IndexProgress(1280, 7, 0.5))
    assert "1,280 files, 7 scans" in screen.getvalue()
