"""The demo at a small size: what it prints is what it ran, and what it tells is what its files hold."""

import json
import re
import shlex
import shutil
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pandas as pd
import pydicom
import pytest
from sklearn.metrics import roc_auc_score

from normal_guidance.cli.demo import command_lines, stages
from normal_guidance.clinic.viewer import server
from normal_guidance.clinic.viewer.gallery import open_gallery
from small_command import nguide, output_of

SEED, SCANS = 7, 40
module = import_module("normal_guidance.cli.demo")  # the package gives the command that name


class Done(NamedTuple):
    out: Path
    printed: str


def run(out: Path, *words: object) -> Done:
    return Done(out, nguide("demo", "-o", out, *words).output)


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> Done:
    return run(tmp_path_factory.mktemp("demo") / "out of it", "--scans", SCANS, "--seed", SEED)


def closing(printed: str) -> str:
    """What it tells at the end, but for the time."""
    return printed.partition("New scans: drawn and predicted")[2].rpartition("All of it took")[0]


def commands(printed: str) -> list[list[str]]:
    """Everything that is printed to be typed, as a shell reads it."""
    joined = re.sub(r" \\\n +", " ", printed)
    return [shlex.split(line)[1:] for line in joined.splitlines() if re.match(r" +(\S*/|'.*/)?nguide'? ", line)]


@pytest.mark.slow
def test_the_printed_commands_are_those_that_ran(done: Done) -> None:
    planned = stages(done.out, SCANS, SEED)
    assert commands(done.printed)[: len(planned)] == [list(stage.words) for stage in planned]
    assert all(stage.made.is_file() for stage in planned)
    options = json.loads((done.out / "scans" / "phantom.json").read_text())["options"]
    assert (options["scans"], options["seed"]) == (SCANS, SEED)
    assert f"{SCANS} scans" in done.printed


@pytest.mark.slow
def test_what_it_tells_of_the_model_is_scikit_learns(done: Done) -> None:
    labels = pd.read_csv(done.out / "scans" / "labels.csv").set_index("scan_id")
    table = pd.read_parquet(done.out / "model" / "predictions.parquet")
    assert {*table["part"]} == {"out-of-fold"}
    truth = labels.loc[table["scan_id"]]
    told = re.search(r"scan(?:s apart with an|s apart:) AUROC (?:of )?(\d?\.\d{3})", done.printed)
    assert float(told[1]) == pytest.approx(roc_auc_score(truth["label"], table["logit"]), abs=6e-4)
    slices = [
        roc_auc_score([int(word) for word in words.split()], attention)
        for words, attention in zip(truth["slice_labels"], table["attention"], strict=True)
        if "1" in words
    ]
    found = re.search(r"localization AUROC (\d?\.\d{3})", done.printed)
    assert float(found[1]) == pytest.approx(np.mean(slices), abs=6e-4)
    assert "not how well on patients" in done.printed


@pytest.mark.slow
def test_new_scans_are_of_other_patients_and_told_beside_the_truth(done: Done) -> None:
    new = pd.read_csv(done.out / "new" / "labels.csv")
    known = pd.read_csv(done.out / "scans" / "labels.csv")
    assert set(new["patient_id"]).isdisjoint(known["patient_id"])
    assert sorted(new["label"]) == [0, 0, 1, 1]
    right = 0
    for scan in new.itertuples():
        told = re.search(rf"- {scan.scan_id}, .*(?:\n  .*)*", done.printed)[0]
        predicted = json.loads((done.out / "predicted" / scan.scan_id / "prediction.json").read_text())
        side = "positive" if predicted["positive"] else "negative"
        assert f"predicted {side} ({predicted['probability']:.2f}): " in told
        positive = [place for place, label in enumerate(scan.slice_labels.split(), start=1) if label == "1"]
        assert ("no hemorrhage" in told) == (not positive)
        if positive:
            assert re.search(rf"hemorrhage in slices? {positive[0]}( to|,)", told)
        if predicted["positive"]:
            first = predicted["key_slices"][0]["slice"]
            assert f"look first at slice {first}, which {'shows it' if first in positive else 'does NOT'}" in told
        assert ("look first" in told) == predicted["positive"]
        is_right = predicted["positive"] == bool(positive)
        assert told.splitlines()[0].endswith(": right" if is_right else ": WRONG")
        right += is_right
        results = sorted((done.out / "predicted" / scan.scan_id / "dicom").iterdir())
        assert {pydicom.dcmread(file).PatientID for file in results} == {scan.patient_id}
        assert len(results) == (3 if predicted["positive"] else 2)  # a negative scan has no key objects
    assert f"{right} of 4 right" in done.printed


@pytest.mark.slow
def test_every_place_it_names_is_there_and_the_viewer_opens_with_the_printed_arguments(done: Done) -> None:
    listed = done.printed.partition("Results to look at\n")[2].partition("\n\n")[0].splitlines()
    assert len(listed) == 3
    for line in listed:
        place = Path(line[13:]).relative_to(done.out)
        assert list(done.out.glob(str(place))), line
    model, new = commands(done.printed)[-2:]
    assert model[0] == new[0] == "view"
    gallery = open_gallery(Path(model[1]), None, None)
    assert gallery.manifest is not None
    assert len(gallery) == len(pd.read_parquet(done.out / "model" / "predictions.parquet"))
    assert len(open_gallery(Path(new[1]), None, None)) == module.NEW_SCANS


@pytest.mark.slow
def test_started_again_it_does_what_is_missing_and_tells_if_the_page_is_not_built(
    done: Done, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    missing = done.out / "predicted" / "summary.csv"
    before, report = missing.read_bytes(), (done.out / "model" / "report.html").stat().st_mtime_ns
    shutil.rmtree(missing.parent)
    again = run(done.out, "--scans", SCANS, "--seed", SEED)
    assert again.printed.count("done before: ") == 3
    assert missing.read_bytes() == before
    assert (done.out / "model" / "report.html").stat().st_mtime_ns == report
    assert closing(again.printed) == closing(done.printed)
    monkeypatch.setattr(server, "STATIC", tmp_path)
    assert "Not yet: the page is not built" in run(done.out, "--scans", SCANS, "--seed", SEED).printed


def refused(out: Path, *words: object) -> str:
    return output_of("demo", "-o", out, *words, code=2)


@pytest.mark.slow
def test_other_folders_are_left_alone(done: Done, tmp_path: Path) -> None:
    assert f"holds another demo: seed was {SEED}, now it is 8" in refused(done.out, "--scans", SCANS, "--seed", 8)
    (tmp_path / "letter.txt").write_text("")
    assert "holds other things; choose another folder" in refused(tmp_path)
    assert "name a folder" in refused(tmp_path / "letter.txt")
    assert [file.name for file in tmp_path.iterdir()] == ["letter.txt"]
    assert "--scans" in refused(tmp_path, "--scans", 3)


def test_a_stage_that_fails_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "SLICES", 3)
    told = refused(tmp_path / "out")
    assert "slices is 3; a scan has at least 12" in told
    assert "2/4" not in told


def test_long_commands_can_be_pasted() -> None:
    words = ["encode", "a folder", *(f"--option-{number} value" for number in range(9)), "-o", "$HOME"]
    lines = command_lines(words)
    assert len(lines) > 1
    assert all(line.endswith(" \\") for line in lines[:-1])
    assert shlex.split("\n".join(lines).replace("\\\n", ""))[1:] == words
