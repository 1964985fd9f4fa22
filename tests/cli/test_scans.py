"""`nguide index`, `split`, `audit`, `describe` and `phantom`, on tiny scans: what is printed, written and refused."""

import json
from pathlib import Path

import nibabel
import numpy as np
import pytest
from drawn_dicom import write_slice

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json
from normal_guidance.scans.index.manifest import ScanRow, read_manifest, write_manifest
from normal_guidance.scans.index.splits import read_parts
from small_command import document, nguide, output_of, refusal


@pytest.fixture
def chest(tmp_path) -> Path:
    """Two exams of four and five slices in the layout of the 2020 challenge, the first with an embolus."""
    root = tmp_path / "root"
    rows = []
    for study, series, labels in (("st1", "se1", "0110"), ("st2", "se2", "00000")):
        for place, label in enumerate(labels):
            sop = f"{series}{place}"
            write_slice(root / f"train/{study}/{series}/{sop}.dcm", sop, series, StudyInstanceUID=study, z=2.0 * place)
            rows.append(f"{study},{series},{series}{place},{label},{int('1' not in labels)},0")
    header = "StudyInstanceUID,SeriesInstanceUID,SOPInstanceUID,pe_present_on_image,negative_exam_for_pe,indeterminate"
    (root / "train.csv").write_text("\n".join([header, *rows]) + "\n")
    return root


def test_the_summary_says_what_there_is_and_what_comes_next(chest, tmp_path):
    out = tmp_path / "out"
    printed = nguide("index", "rsna-pe", chest, "-o", out, "--workers", 0).output
    seconds = json.loads((out / "report.json").read_text())["seconds"]
    assert printed.splitlines() == [
        f"Reading headers in {chest}, layout rsna-pe: begins",
        "2 scans, 9 slices, 2 patients",
        "1 positive scan (50.0 %), 2 with slice labels",
        "No problems",
        f"Manifest: {out}/manifest.parquet ({seconds:g} s)",
        f"Next: nguide encode {out} -o STORE",
    ]
    assert read_manifest(out).scan_ids == ["se1", "se2"]
    as_json = document("index", "rsna-pe", chest, "-o", tmp_path / "json", "--workers", 0)
    assert as_json == read_json(tmp_path / "json" / "report.json")
    assert as_json["counts"]["scans"] == 2


def test_problems_are_counted_by_kind(chest, tmp_path):
    (chest / "train/st2/se2/se22.dcm").write_text("no image")
    (chest / "train/st1/se1/readme.txt").write_text("no image")
    printed = nguide("index", "rsna-pe", chest, "-o", tmp_path / "out", "--workers", 1).output
    assert f"Problems: no_image 2, gap 1; see {tmp_path}/out/problems.csv\n" in printed


def index_table(table: Path, root: Path, out: Path, *rows: str, head: str = "scan_id,path,label", code: int = 0):
    table.write_text("\n".join([head, *rows]) + "\n")
    return nguide("index", "folder", root, "--table", table, "-o", out, "--workers", 0, code=code)


def test_the_share_of_scans_that_are_left_out_is_said_on_stderr(chest, tmp_path):
    rows = ["here,train/st1,1", "gone,elsewhere/st9,0", "unknown,train/st2,", "word,train/st2,maybe", ",train/st2,1"]
    result = index_table(tmp_path / "labels.csv", chest, tmp_path / "out", *rows)
    said = " ".join(result.stderr.split())
    assert "warning: 4 of the table's 5 scans are left out: 2 of 5 have a row that cannot be used" in said
    assert "1 of 5 have no files" in said
    assert "1 of 5 have no label" in said
    assert f"see {tmp_path / 'out'}/problems.csv" in said
    assert "1 scan, 4 slices, 1 patient\n" in result.stdout
    problems = (tmp_path / "out" / "problems.csv").read_text()
    assert f"{chest}/elsewhere/st9 (paths are relative to the folder ROOT)" in problems
    rows = ("here,train/st1,1", "there,train/st2,0")
    assert not index_table(tmp_path / "labels.csv", chest, tmp_path / "all", *rows).stderr
    for label, lacking in ((1, "negative (label 0)"), (0, "positive (label 1)")):
        alike = [row[:-1] + str(label) for row in rows]
        said = index_table(tmp_path / "labels.csv", chest, tmp_path / f"alike-{label}", *alike).stderr
        assert said == (
            f"warning: no scan is {lacking}, and no model can be fitted to one class; add such scans, or correct the "
            "labels\n"
        )


def test_a_scan_id_that_stands_twice_is_said_on_stderr(chest, tmp_path):
    rows = ("a,train/st1,1", "a,train/st2,0", "b,train/st2,0")
    result = index_table(tmp_path / "labels.csv", chest, tmp_path / "out", *rows)
    said = " ".join(result.stderr.split())
    assert "warning: 1 of the table's 3 scans are left out: 1 of 3 have a scan_id that stands twice; for" in said
    assert "instance a: row 2: scan_id occurs twice; see" in said
    assert "2 scans" in result.stdout


@pytest.mark.parametrize(("path", "asked"), [("train/st1", True), ("gone/st1", False)])
def test_paths_that_begin_with_the_name_of_root_come_with_the_root_that_is_meant(chest, tmp_path, path, asked):
    said = index_table(tmp_path / "labels.csv", chest / "train", tmp_path / "out", f"a,{path},1", code=2).stderr
    assert f"no such file or folder: {chest}/train/{path} (paths are relative to the folder ROOT)" in said
    assert (f"did you mean ROOT = {chest}?" in said) is asked


def test_what_was_guessed_is_said(tmp_path):
    for name, lowest in (("a", 0), ("b", 3), ("c", -1000)):
        volume = np.full((8, 8, 3), lowest, np.int16)
        nibabel.save(nibabel.Nifti1Image(volume, np.eye(4)), tmp_path / f"{name}.nii")
    table = tmp_path / "labels.csv"

    def guesses(*rows: str, head: str) -> list[str]:
        out = tmp_path / str(len(list(tmp_path.iterdir())))
        said = index_table(table, tmp_path, out, *rows, head=head).stdout
        return [line.removeprefix("Guessed: ") for line in said.splitlines() if line.startswith("Guessed: ")]

    assert guesses("a.nii,0", "b.nii,1", head="Filename,sick") == [
        "column 'Filename' is path, 'sick' is label",
        "scans are called by their path",
        "NIfTI scans are MR: the lowest value of 2 of them is 0 (a column modality with CT or MR says otherwise)",
    ]
    with_ct = guesses("a,a.nii,0", "c,c.nii,1", head="scan_id,path,label")
    assert with_ct[0].startswith("NIfTI scans are CT: the lowest value of 2 of them is -1000 (")
    assert not guesses("a,a.nii,0,MR", "c,c.nii,1,CT", head="scan_id,path,label,modality")
    assert guesses("a,a.nii,0,MR", "c,c.nii,1,", head="scan_id,path,label,modality")[0].startswith("NIfTI scans are CT")


def test_pictures_are_named_as_what_they_are_not(tmp_path):
    (tmp_path / "root" / "a").mkdir(parents=True)
    (tmp_path / "root" / "a" / "0.jpg").write_bytes(b"\xff\xd8\xff\xe0 a picture")
    said = index_table(tmp_path / "labels.csv", tmp_path / "root", tmp_path / "out", "a,a,1", code=2).stderr
    assert "for instance a/0.jpg: no_image, not a DICOM file; give DICOM files or NIfTI (.nii" in said


@pytest.fixture
def index(tmp_path: Path) -> Path:
    """60 scans of 30 patients, half of them positive."""
    rows = []
    for n in range(60):
        labels = np.zeros(20, np.int8)
        labels[8:12] = n // 2 % 2
        files = tuple(f"S{n}/{i}.dcm" for i in range(20))
        positions = tuple(float(i) for i in range(20))
        rows.append(ScanRow(f"S{n}", f"P{n // 2}", n // 2 % 2, labels, "dicom", files, (0,) * 20, positions, 64, 64))
    (tmp_path / "index").mkdir()
    write_manifest(tmp_path / "index" / "manifest.parquet", rows, {"source": "folder", "root": str(tmp_path)})
    return tmp_path / "index"


def test_split_then_audit(index, tmp_path):
    said = output_of("split", index, "-o", tmp_path / "splits", "--seeds", "1,2")
    files = sorted((tmp_path / "splits").iterdir())
    assert [file.name for file in files] == ["split-1.csv", "split-2.csv"]
    assert "train 40 scans (20 positive) of 20 patients" in said
    assert "no overlap; compared 60 scans, 30 patients, 1,200 slices" in output_of("audit", index, *files)
    (told,) = document("split", index, "-o", tmp_path / "json", "--seeds", 2)
    assert (told["file"], told["seed"]) == (str(tmp_path / "json" / "split-2.csv"), 2)
    (proof,) = document("audit", index, told["file"])
    assert (proof["overlap"], proof["parts"], proof["compared"]["scans"]) == (False, told["parts"], 60)
    lines = files[0].read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.endswith(",test"))
    files[0].write_text("\n".join([*lines[:first], lines[first].replace(",test", ",train"), *lines[first + 1 :]]))
    assert "put all its scans into one part" in refusal("audit", index, files[0])
    assert nguide("audit", index, files[0], "--json", code=2).stdout == ""


def test_a_split_that_is_not_there_is_told_from_those_that_are(index, tmp_path):
    (tmp_path / "splits").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "splits" / "split-1.csv").write_text("scan_id,part\n")
    manifest = read_manifest(index)
    there = r"--split .*splits/split-7.csv is not a file; .*splits holds split-1.csv; give"
    for folder, message in (("splits", there), ("empty", r"holds no .csv or .parquet; make a table with nguide split")):
        with pytest.raises(UserError, match=message):
            read_parts(tmp_path / folder / "split-7.csv", manifest)


def test_describe_prints_tables_and_writes_files(index, tmp_path):
    nguide("split", index, "-o", tmp_path / "splits", "--seeds", 1)
    words = ("describe", index, "--split", tmp_path / "splits" / "split-1.csv", "-o", tmp_path / "about")
    assert "Blocks in a positive scan" in nguide(*words).output
    assert (tmp_path / "about" / "density.png").stat().st_size > 5000
    values = read_json(tmp_path / "about" / "description.json")
    assert set(values) == {"all", "train", "val", "test"}
    assert values["all"]["blocks"]["length"]["mean"] == 4
    assert document(*words) == values


SMALL = ("--size", 32, "--slices", 12)


def test_a_phantom_is_written_and_described(tmp_path):
    out = tmp_path / "out"
    text = output_of("phantom", "rsna-ich", out, *SMALL, "--scans", 3, "--positive", 0.34, "--oddities", "tilt")
    assert "3 scans of 3 patients, 1 positive" in text
    assert "tilt, gantry tilted by 14.0 degrees" in text
    truth = json.loads((out / "phantom.json").read_text())
    assert truth["options"]["oddities"] == ["tilt"]
    assert len(list((out / "stage_2_train").iterdir())) == sum(len(s["files"]) for s in truth["scans"])
    # All oddities are those that the layout can have.
    text = output_of("phantom", "folder", tmp_path / "all", *SMALL, "--scans", 16, "--oddities", "all")
    assert "multi_frame" in text
    assert "indeterminate" not in text
