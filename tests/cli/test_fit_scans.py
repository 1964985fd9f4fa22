"""`nguide fit SCANS LABELS -o MODEL`: from a folder of scans and its table to a model, in one command."""

import json
from pathlib import Path

import pytest

from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.manifest import read_manifest
from small_bundle import draw_scans, fit_scans_quickly
from small_command import document, nguide, refusal


@pytest.fixture
def scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    fit_scans_quickly(monkeypatch)
    return draw_scans(tmp_path)


def test_a_folder_and_its_table_become_a_model(scans: Path, tmp_path: Path) -> None:
    table, model = scans / "labels.csv", tmp_path / "model"
    table.write_text(table.read_text().replace("label,", "positive,", 1))
    words = ("fit", scans, table, "-o", model, "--device", "cpu")
    said = nguide(*words).stdout.splitlines()
    begins = ("Guessed: ", "Scans: 16 of 12 patients, 8 positive, ", "Features: ", "Model: ", "", "It ")
    assert [line[: len(begin)] for line, begin in zip(said, begins, strict=False)] == list(begins)
    assert said[-2:] == [f"Report: {model / 'report.html'}", f"Next: nguide predict SCAN --model {model} -o OUT"]
    assert "positive" in said[0]

    once_more = nguide(*words).stdout.splitlines()
    assert once_more[-2:] == [f"{model} is complete already; nothing was done", f"Report: {model / 'report.html'}"]
    assert document(*words)["complete_before"] is True

    # The single commands go on from what lies beside the model.
    assert "Features: " not in nguide("fit", tmp_path / "model.store", "-o", tmp_path / "other").stdout
    kept = [(tmp_path / name / "predictions.parquet").read_bytes() for name in ("model", "other")]
    assert kept[0] == kept[1]


def test_options_of_scans_reach_index_and_store(scans: Path, tmp_path: Path) -> None:
    table = scans / "labels.csv"
    table.write_text(table.read_text().replace("label,", "bleeding,", 1))
    options = ("--findings", "bleeding", "--window", "0:80", "--field", "60")
    result = nguide("fit", scans, table, "-o", tmp_path / "model", *options, "--json")
    assert json.loads(result.stdout)["members"] > 0
    assert "Scans: 16 of 12 patients" in result.stderr
    assert [finding.name for finding in read_manifest(tmp_path / "model.index").findings] == ["bleeding"]
    made = open_store(tmp_path / "model.store").provenance["preprocessing"]
    assert (made["windows"], made["field"]) == ([[0.0, 80.0]], 60.0)


def test_a_dry_run_says_what_it_takes_and_writes_nothing(scans: Path, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    words = ("fit", scans, scans / "labels.csv", "-o", tmp_path / "model", "--dry-run")
    said = nguide(*words).stdout.splitlines()
    assert [line.split(":")[0] for line in said] == ["Scans", "Disk", "Memory", "Time"]
    assert said[-1].endswith("Nothing was written.")
    assert document(*words)["encoding"]["scans"] == 16
    assert sorted(tmp_path.rglob("*")) == before


def test_what_does_not_belong_together_is_refused(scans: Path, tmp_path: Path) -> None:
    table, out = scans / "labels.csv", ("-o", tmp_path / "model")
    (tmp_path / "store").mkdir()
    (tmp_path / "store" / "store.json").touch()
    store = tmp_path / "store"
    assert f"{store} is a feature store with labels of its own; leave {table} out" in refusal("fit", store, table, *out)
    assert f"if it holds scans, give their labels, too: nguide fit {scans} LABELS.csv" in refusal("fit", scans, *out)
    assert f"give the scans first: nguide fit {scans} {table}" in refusal("fit", table, scans, *out)
    for option in (("--encoder", "vit-b16-imagenet"), ("--window", "head"), ("--field", 70), ("--dry-run",)):
        said = refusal("fit", store, *option, *out)
        assert f"{option[0]} is for a folder of scans, and {store} is a feature store; leave it out" in said
    assert "window" in refusal("fit", scans, table, *out, "--window", "1:2:3")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["scans", "store"]
