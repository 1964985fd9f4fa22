"""Features of a user's own, from a file to predictions, by the commands that a user types."""

import json
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch

from normal_guidance.clinic.predict.predicting import score
from normal_guidance.fit.bundle import load_bundle
from normal_guidance.scans.features.store import open_store
from small_command import document, nguide, refusal


def draw(scans: int, seed: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Packed features, lengths and labels: positive scans have a block of shifted slices."""
    random = np.random.default_rng(seed)
    lengths = random.integers(4, 9, scans)
    labels = np.arange(scans) % 2
    features = random.normal(size=(lengths.sum(), 6)).astype(np.float32)
    for start, label in zip(lengths.cumsum() - lengths, labels, strict=True):
        features[start + 1 : start + 3] += 3 * label
    return features, lengths, labels


@pytest.fixture(scope="module")
def imported(tmp_path_factory) -> Path:
    """The folder of the chain: features.npz and labels.csv, store, splits, runs."""
    folder = tmp_path_factory.mktemp("own")
    features, lengths, labels = draw(48, seed=1)
    ids = [f"S{number}" for number in range(48)]
    np.savez(folder / "features.npz", x=features, lengths=lengths, ids=ids)
    patients = [f"P{number // 4 * 2 + number % 2}" for number in range(48)]
    table = pd.DataFrame({"scan_id": ids, "label": labels, "patient_id": patients})
    table.to_csv(folder / "labels.csv", index=False)
    said = nguide("store", "import", folder / "features.npz", "--labels", folder / "labels.csv", "-o", folder / "store")
    assert "found features ('x'), scan_id ('ids'), lengths; looked for, but absent: label" in said.stderr
    assert "warning" not in said.stderr
    assert f"Next: nguide fit {folder / 'store'} -o MODEL" in said.stdout
    nguide("split", folder / "store", "-o", folder / "splits", "--seeds", 1001)
    options = ("--lr", 0.1, "--l1", 0, "--epochs", 2, "--batch-size", 8, "--no-train-above-val", "--seeds", 1001)
    split = folder / "splits" / "split-1001.csv"
    nguide("sweep", folder / "store", "--split", split, "--methods", "abmil", *options, "--out", folder / "runs")
    return folder


@pytest.fixture
def run(imported) -> Path:
    return imported / "runs" / "abmil" / "1001"


def test_a_store_is_split_by_patient_and_audited(imported):
    split = pd.read_csv(imported / "splits" / "split-1001.csv")
    assert split.groupby("patient_id")["part"].nunique().max() == 1
    assert split["part"].value_counts().to_dict() == {"train": 32, "val": 8, "test": 8}
    said = nguide("audit", imported / "store", imported / "splits" / "split-1001.csv").stdout
    assert "no overlap; compared 48 scans, 24 patients, 48 checksums" in said
    with_scan = split.assign(scan_id=split["scan_id"].replace("S0", "S99"))
    with_scan.to_csv(imported / "other.csv", index=False)
    said = nguide("audit", imported / "store", imported / "other.csv", code=2).stderr
    assert "scan 'S99' is not in the store" in said
    said = refusal("split", imported / "splits", "-o", imported / "x")
    assert "is neither an index (no manifest.parquet) nor a feature store" in said


def test_predictions_from_a_file_and_from_a_store_are_the_models(imported, run, tmp_path):
    features, lengths, _ = draw(3, seed=2)
    ids = ["a/1", "b", "=c"]  # no file names, and a formula for spreadsheets
    np.savez(tmp_path / "new.npz", x=features, lengths=lengths, ids=ids)
    said = nguide("predict", tmp_path / "new.npz", "--model", run, "-o", tmp_path / "out").stdout
    assert "scan a/1: probability 0." in said
    assert "3 of 3 scans predicted" in said
    rows = pd.read_parquet(tmp_path / "out" / "predictions.parquet").set_index("scan_id")
    bundle = load_bundle(run)
    for scan, own in zip(ids, torch.from_numpy(features).split(lengths.tolist()), strict=True):
        logit, log_attention = score(bundle, own)
        assert rows.loc[scan, "logit"] == pytest.approx(logit)
        np.testing.assert_allclose(rows.loc[scan, "attention"], log_attention.softmax(-1)[0], atol=1e-6)
    names = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"a%2F1", "b", "%3Dc", "index.html", "summary.csv", "summary.json", "problems.csv"} <= names
    assert "manifest.parquet" not in names
    assert {path.name for path in (tmp_path / "out" / "b").iterdir()} == {
        "prediction.json",
        "slices.csv",
        "report.html",
        "strip.png",
    }
    assert "strip.jpg" not in names
    for name, drawn in (("index.html", "<polyline"), ("b/report.html", "data:image/png;base64,")):  # the curve
        assert drawn in (tmp_path / "out" / name).read_text()
    held = json.loads((tmp_path / "out" / "a%2F1" / "prediction.json").read_text())
    assert (held["scan_id"], held["slices"], held["source"]["kind"]) == ("a/1", int(lengths[0]), "features")
    assert "href='a%252F1/report.html'" in (tmp_path / "out" / "index.html").read_text()

    nguide("bundle", run, "-o", tmp_path / "bundle")
    nguide("predict", imported / "store", "-m", tmp_path / "bundle", "-o", tmp_path / "again")
    known = pd.read_parquet(run / "predictions.parquet").set_index("scan_id")
    again = pd.read_parquet(tmp_path / "again" / "predictions.parquet").set_index("scan_id")
    assert set(again.index) == set(open_store(imported / "store").scan_ids)
    for scan in known.index:
        assert again.loc[scan, "logit"] == pytest.approx(known.loc[scan, "logit"], abs=1e-5)


def test_anonymous_results_and_json(run, tmp_path):
    np.savez(tmp_path / "ZEBEDEE.npz", x=np.ones((4, 6), np.float32), patient_id="ZEBEDEE")
    told = document("predict", tmp_path / "ZEBEDEE.npz", "-m", run, "-o", tmp_path / "out", "--anonymize")
    assert told["scan_id"] == "scan-001"
    assert "ZEBEDEE" not in str(told)
    assert not any(b"ZEBEDEE" in path.read_bytes() for path in (tmp_path / "out").rglob("*") if path.is_file())


def test_scans_that_do_not_fit_do_not_stop_the_others(run, tmp_path):
    (tmp_path / "in").mkdir()
    for name, width, value in (("a", 6, np.inf), ("b", 7, 1), ("c", 6, 1), ("index.html", 6, 1)):
        np.save(tmp_path / "in" / f"{name}.npy", np.full((4, width), value, np.float32))
    result = nguide("predict", tmp_path / "in", "-m", run, "-o", tmp_path / "out", code=1)
    assert "scan a: failed: has features that are not finite: position 0, feature 0: inf" in result.stderr
    assert "scan b: failed: has 7 features a slice, but the model was trained on 6" in result.stderr
    assert "scan index.html: failed: has an id that cannot be the name of its folder" in result.stderr
    assert "1 of 4 scans predicted" in result.stdout


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("wide.npy", "wide.npy: scan 'wide' has 7 features a slice, but the model was trained on 6; make the features"),
        ("nowhere", "the model takes features, because it was trained on features that nguide encode did not make: "),
        ("dicom", "dicom holds no scan: it is not a file of features"),
        ("good.npy --dicom", "--dicom is for scans, but features are given, which have no images"),
        ("good.npy --encoder efficientnet-lite0", "--encoder is for scans"),
        ("good.npy good.npy", "scan 'good' is in"),
    ],
)
def test_mistakes_are_one_line(run, tmp_path, monkeypatch, words, message):
    monkeypatch.chdir(tmp_path)
    np.save("wide.npy", np.ones((4, 7), np.float32))
    np.save("good.npy", np.ones((4, 6), np.float32))
    Path("dicom").mkdir()
    Path("dicom/1.dcm").write_bytes(bytes(200))
    assert message in refusal("predict", *words.split(), "-m", run, "-o", "out")
    assert not Path("out").exists()
