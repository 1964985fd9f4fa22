"""A folder of scans and its table become an index and a store beside the model."""

import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.front.fitted_model import fit
from normal_guidance.front.scans_to_store import ScanFolder, scans_to_store
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.manifest import read_manifest
from normal_guidance.show.progress_bar import Shown
from small_bundle import WIDTH, draw_scans, fit_scans_quickly


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ScanFolder:
    fit_scans_quickly(monkeypatch)
    scans = draw_scans(tmp_path)
    return ScanFolder(scans, scans / "labels.csv")


def told(function: Callable[..., object], *arguments: object) -> tuple[list[str], list[Shown]]:
    """What a call says, and what it shows on the way."""
    lines: list[str] = []
    shown: list[Shown] = []
    function(*arguments, lines.append, shown.append)
    return lines, shown


def files_of(folder: Path) -> dict[Path, tuple[bytes, int]]:
    return {file: (file.read_bytes(), file.stat().st_mtime_ns) for file in folder.rglob("*") if file.is_file()}


def test_index_and_store_lie_beside_the_model_and_nothing_is_made_twice(folder: ScanFolder, tmp_path: Path) -> None:
    truth = pd.read_csv(folder.table).set_index("scan_id")
    lines, shown = told(scans_to_store, folder, tmp_path / "model")
    store, index = open_store(tmp_path / "model.store"), read_manifest(tmp_path / "model.index")
    assert dict(zip(store.scan_ids, store.labels.tolist(), strict=True)) == truth["label"].to_dict()
    assert store.lengths.tolist() == index.lengths.tolist() == truth["slice_labels"].str.split().str.len().tolist()
    scans, patients = len(truth), truth["patient_id"].nunique()
    assert lines[0] == (
        f"Scans: {scans} of {patients} patients, {truth['label'].sum()} positive, {sum(store.lengths)} slices"
    )
    assert lines[1].startswith(f"Features: {WIDTH} of each slice by efficientnet-lite0, window head; encoded in ")
    assert list(dict.fromkeys(each.title for each in shown)) == ["reading headers", "encoding"]
    assert shown[-1].share == 1

    before = files_of(tmp_path)
    lines, shown = told(scans_to_store, folder, tmp_path / "model")
    assert (lines[0].endswith("(indexed before)"), lines[1].endswith("encoded before"), shown) == (True, True, [])
    assert files_of(tmp_path) == before


@pytest.mark.parametrize("what", ["scans", "table"])
def test_an_index_of_another_folder_or_table_is_refused(folder: ScanFolder, tmp_path: Path, what: str) -> None:
    told(folder.index, tmp_path / "index")
    other = tmp_path / "other"
    if what == "scans":
        folder.scans.rename(other)
        changed = replace(folder, scans=other, table=other / folder.table.name)
    else:
        other.write_text(folder.table.read_text().replace(",1,", ",0,", 1))
        changed = replace(folder, table=other)
    named = {"scans": "folder", "table": "table"}[what]
    with pytest.raises(UserError, match=f"index was made of another {named} than .*; delete it, or give another"):
        told(changed.index, tmp_path / "index")


def test_options_that_cannot_be_are_refused_before_the_scans_are_read(folder: ScanFolder) -> None:
    for options, message in (
        ({"window": "1:2:3"}, "window"),
        ({"field": -1.0}, "field"),
        ({"scans": folder.table}, "is not a folder; give the folder of the scans"),
        ({"table": folder.scans}, "is not a file; give the table of labels"),
    ):
        with pytest.raises(UserError, match=message):
            replace(folder, **options)


def test_a_folder_with_other_things_is_refused_before_the_work(folder: ScanFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match="is a folder that is not empty"):
        told(scans_to_store, folder, folder.scans)
    assert not folder.scans.with_name(f"{folder.scans.name}.index").exists()


def test_a_threshold_that_cannot_be_is_refused_before_the_work(folder: ScanFolder, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"sensitivity is 95.0; give a share above 0"):
        fit(folder.scans, folder.table, out=tmp_path / "model", sensitivity=95.0)
    with pytest.raises(UserError, match=r"coverage is 90; give a number between 0 and 1"):
        fit(folder.scans, folder.table, out=tmp_path / "model", coverage=90)
    assert not (tmp_path / "model.index").exists()


def test_too_few_scans_are_refused_before_their_slices_are_encoded(folder: ScanFolder, tmp_path: Path) -> None:
    lines = folder.table.read_text().splitlines()
    folder.table.write_text("\n".join(lines[:4]))
    with pytest.raises(UserError, match="at least 3 patients of each are needed"):
        told(scans_to_store, folder, tmp_path / "model")
    assert not (tmp_path / "model.store").exists()
    folder.table.write_text("\n".join(lines))  # corrected: nothing stands in the way of the same call
    told(scans_to_store, folder, tmp_path / "model")


def test_a_choice_between_series_is_said(folder: ScanFolder, tmp_path: Path) -> None:
    """Of a patient's folder with two series the larger one is taken, which its user must know."""
    names = [line.partition(",")[0] for line in folder.table.read_text().splitlines()[1:]]
    one, other = (folder.scans / "scans" / name for name in names[:2])
    shutil.copytree(other, one / "second")
    lines, _ = told(folder.index, tmp_path / "index")
    assert lines[0] == f"Guessed: the largest of several series, in 1 scan; see {tmp_path / 'index' / 'problems.csv'}"


def test_a_forecast_says_what_it_takes_and_writes_nothing(folder: ScanFolder, tmp_path: Path) -> None:
    folder.table.write_text(folder.table.read_text() + "gone,Q,scans/gone,1,\n")
    before, said = files_of(tmp_path), list[str]()
    forecast = folder.forecast(tmp_path / "model", said.append, lambda shown: None)
    assert "for instance gone: " in said[0]
    assert "problems.csv" not in said[0], "it is gone when the line is read"
    assert files_of(tmp_path) == before
    slices = pd.read_csv(folder.table)["slice_labels"].str.split().str.len().sum()
    assert forecast.encoding.store_bytes == 4 * WIDTH * slices  # float32
    assert forecast.total_s == pytest.approx(sum(forecast.seconds.values()))
    assert list(forecast.seconds) == ["index", "encode", "fit"]
    assert [line.split(":")[0] for line in forecast.lines()] == ["Disk", "Memory", "Time"]
    assert forecast.lines()[-1].endswith("Nothing was written.")
