"""`nguide split`, `audit` and `describe`, as a user runs them."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json
from normal_guidance.cli import app
from normal_guidance.scans.index.manifest import ScanRow, read_manifest, write_manifest
from normal_guidance.scans.index.splits import read_parts, split_scans

run = CliRunner()


@pytest.fixture
def index(tmp_path: Path) -> Path:
    rows = []
    for n in range(60):
        labels = np.zeros(20, np.int8)
        labels[8:12] = n % 2
        files = tuple(f"S{n}/{i}.dcm" for i in range(20))
        positions = tuple(float(i) for i in range(20))
        rows.append(ScanRow(f"S{n}", f"P{n // 2}", n % 2, labels, "dicom", files, (0,) * 20, positions, 64, 64))
    # Half of the patients are positive.
    rows = [ScanRow(**{**vars(one), "label": int(one.patient_id[1:]) % 2}) for one in rows]
    (tmp_path / "index").mkdir()
    write_manifest(tmp_path / "index" / "manifest.parquet", rows, {"source": "folder", "root": str(tmp_path)})
    return tmp_path / "index"


def test_split_then_audit(index: Path, tmp_path: Path) -> None:
    result = run.invoke(app, ["split", str(index), "-o", str(tmp_path / "splits"), "--seeds", "1,2"])
    assert result.exit_code == 0, result.output
    files = sorted((tmp_path / "splits").iterdir())
    assert [file.name for file in files] == ["split-1.csv", "split-2.csv"]
    assert "train 40 scans (20 positive) of 20 patients" in " ".join(result.output.split())
    result = run.invoke(app, ["audit", str(index), *map(str, files)])
    assert result.exit_code == 0, result.output
    assert "no overlap; compared 60 scans, 30 patients, 1,200 slices" in " ".join(result.output.split())
    lines = files[0].read_text().splitlines()
    first = next(n for n, line in enumerate(lines) if line.endswith(",test"))
    files[0].write_text("\n".join([*lines[:first], lines[first].replace(",test", ",train"), *lines[first + 1 :]]))
    result = run.invoke(app, ["audit", str(index), str(files[0])])
    assert result.exit_code == 2
    assert "a patient belongs to one part" in " ".join(result.output.split())


def test_wrong_options_and_no_index(index: Path, tmp_path: Path) -> None:
    for words in (
        ["split", str(index), "-o", str(tmp_path / "s"), "--proportions", "4-1-1"],
        ["split", str(index), "-o", str(tmp_path / "s"), "--seeds", "x"],
        ["describe", str(tmp_path)],
    ):
        result = run.invoke(app, words)
        assert result.exit_code == 2
        assert "error:" in result.output
    assert not (tmp_path / "s").exists(), "a mistake leaves nothing behind"


def test_too_few_patients_are_counted_in_our_own_words() -> None:
    with pytest.raises(
        UserError, match=r"^1 positive and 0 negative patients are too few to be split so that .*; add"
    ) as e:
        split_scans(["a", "b"], ["P", "P"], [1, 1], seed=1)
    assert "test_size" not in str(e.value)


def test_a_split_that_is_not_there_is_told_from_those_that_are(index: Path, tmp_path: Path) -> None:
    (tmp_path / "splits").mkdir()
    (tmp_path / "empty").mkdir()
    (tmp_path / "splits" / "split-1.csv").write_text("scan_id,part\n")
    manifest = read_manifest(index)
    with pytest.raises(
        UserError, match=r"--split .*splits/split-7.csv is not a file; .*splits holds split-1.csv; give"
    ):
        read_parts(tmp_path / "splits" / "split-7.csv", manifest)
    with pytest.raises(UserError, match=r"holds no .csv or .parquet; make a table with nguide split"):
        read_parts(tmp_path / "empty" / "split-7.csv", manifest)


def test_describe_prints_tables_and_writes_files(index: Path, tmp_path: Path) -> None:
    run.invoke(app, ["split", str(index), "-o", str(tmp_path / "splits"), "--seeds", "1"])
    words = ["describe", str(index), "--split", str(tmp_path / "splits" / "split-1.csv"), "-o", str(tmp_path / "about")]
    result = run.invoke(app, words)
    assert result.exit_code == 0, result.output
    assert "Blocks in a positive scan" in result.output
    assert (tmp_path / "about" / "density.png").stat().st_size > 5000
    values = read_json(tmp_path / "about" / "description.json")
    assert set(values) == {"all", "train", "val", "test"}
    assert values["all"]["blocks"]["length"]["mean"] == 4
    printed = run.invoke(app, ["describe", str(index), "--json"])
    assert json.loads(printed.output)["all"]["scans"] == 60
