"""`--json`: one document on standard output, the same as in the file where there is one, and no NaN in it."""

import json
import math
from dataclasses import replace
from pathlib import Path
from typing import Any, NoReturn

import pytest

from normal_guidance.base.files import read_json
from normal_guidance.cli.command import print_json
from normal_guidance.core.methods import BEYOND, EVERY_METHOD, METHODS
from normal_guidance.scans.index.manifest import write_manifest
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.experiment import DATASETS
from small_command import nguide


def refuse(word: str) -> NoReturn:
    raise AssertionError(f"{word} is not JSON")


def loads(text: str) -> Any:
    """As strict readers read: no NaN, no Infinity, nothing behind the document."""
    return json.loads(text, parse_constant=refuse)


def ask(*words: object, code: int = 0) -> Any:
    return loads(nguide(*words, "--json", code=code).stdout)


def test_numbers_that_are_none_are_null(capsys):
    with pytest.raises(AssertionError, match="NaN is not JSON"):
        loads(json.dumps(math.nan))  # what Python does on its own
    print_json({"a": [math.nan, 1.5], "b": (-math.inf, Path("x")), 3: None})
    assert loads(capsys.readouterr().out) == {"a": [None, 1.5], "b": [None, "x"], "3": None}


def test_methods():
    told = ask("methods")
    assert [one["name"] for one in told] == list(EVERY_METHOD)
    assert {"ng", "mhng"} <= {one["name"] for one in told if one["guided"]}
    assert not any(one["guided"] for one in told if one["name"] in ("abmil", "transmil"))
    assert next(one for one in told if one["name"] == "max")["parameters"] == 769  # 768 weights and a bias
    assert [one["name"] for one in told if one["when"]] == list(BEYOND)
    printed = nguide("methods").output
    assert all(name in printed for name in METHODS)
    assert "4,743,169" in printed
    assert "whole_bells, whole_bells_ng: Use it for findings in one block of slices" in printed


def test_index_prints_its_report(trained, tmp_path):
    scans = trained.folder / "scans"
    words = ("--table", scans / "labels.csv", "-o", tmp_path / "index", "--workers", 0)
    told = ask("index", "folder", scans, *words)
    assert told == read_json(tmp_path / "index" / "report.json")
    assert told["counts"]["scans"] == 24


def test_split_audit_and_describe(trained, tmp_path):
    index = trained.folder / "index"
    (told,) = ask("split", index, "-o", tmp_path, "--seeds", 5)
    assert (told["file"], told["seed"]) == (str(tmp_path / "split-5.csv"), 5)
    assert sum(part["scans"] for part in told["parts"].values()) == 24
    (proof,) = ask("audit", index, told["file"])
    assert (proof["overlap"], proof["parts"], proof["compared"]["scans"]) == (False, told["parts"], 24)
    about = ask("describe", index, "--split", told["file"], "-o", tmp_path / "about")
    assert about == read_json(tmp_path / "about" / "description.json")
    lines = (tmp_path / "split-5.csv").read_text().splitlines()
    (tmp_path / "short.csv").write_text("\n".join(lines[:-1]))
    assert nguide("audit", index, tmp_path / "short.csv", "--json", code=2).stdout == ""


def test_store(trained, tmp_path):
    store = trained.store
    told = ask("store", "show", store.folder)
    assert (told["scans"], told["slices"], told["features"]) == (24, int(store.lengths.sum()), store.width)
    assert told["fingerprint"] == store.fingerprint
    assert sum(told["parts"].values()) == 24
    assert ask("store", "verify", store.folder)["damaged"] == []


def test_sweep_prints_what_the_runs_report(trained, tmp_path):
    quick = ("--epochs", 2, "--batch-size", 4, "--lr", 0.1, "--l1", 0, "--device", "cpu", "--no-train-above-val")
    told = ask("sweep", trained.store.folder, "--methods", "abmil,ng", "--out", tmp_path / "runs", *quick)
    assert [(run["method"], run["seed"]) for run in told["runs"]] == [("abmil", 0), ("ng", 0)]
    for run in told["runs"]:
        report = read_json(Path(run["folder"]) / "report.json")
        assert run["winners"] == report["winners"]
        assert 0 <= run["winners"][0]["test"]["scan_auroc"] <= 1
        assert "as_json" not in report["options"]


def test_reproduce_prints_its_tables(monkeypatch, tmp_path):
    small = replace(DATASETS["semi-synthetic"], draw=lambda seed, part: shifted_mean(70, seed, features=8))
    monkeypatch.setitem(DATASETS, "semi-synthetic", small)
    options = ("--methods", "mean", "--seeds", "1001", "--epochs", 1, "--device", "cpu", "--out", tmp_path)
    told = ask("reproduce", "semi-synthetic", *options)
    assert told == read_json(tmp_path / "tables.json")


def test_bundle_prints_what_it_wrote(trained, tmp_path):
    told = ask("bundle", trained.run, "-o", tmp_path / "bundle")
    assert told == read_json(tmp_path / "bundle" / "bundle.json")


def test_encode_prints_its_report(trained, tmp_path):
    words = ("--encoder", "efficientnet-lite0", "--normalize", "0,100", "--workers", 0, "--offline", "--device", "cpu")
    few = tmp_path / "index"
    few.mkdir()
    about = {"source": "folder", "root": str(trained.manifest.root)}
    write_manifest(few / "manifest.parquet", [trained.manifest[0]], about)
    told = ask("encode", few, "-o", tmp_path / "store", *words)
    assert told == read_json(tmp_path / "store" / "report.json")
    assert told["scans"] == {"manifest": 1, "encoded": 1, "failed": 0}


def test_weights(monkeypatch, tmp_path):
    monkeypatch.setenv("NGUIDE_CACHE", str(tmp_path))
    monkeypatch.setenv("TORCH_HOME", str(tmp_path))
    told = ask("weights", "list")
    assert told["cache"] == str(tmp_path)
    found = {one["name"]: one["found"] for one in told["weights"]}
    assert found["vit-b16-imagenet"] is None
    assert Path(found["efficientnet-lite0"]).is_file()
    assert {one["name"]: one["state"] for one in ask("weights", "check")} == {
        "vit-b16-imagenet": "missing",
        "efficientnet-lite0": "ok",
    }
    (tmp_path / "vit_b_16-c867db91.pth").write_bytes(b"damaged")
    assert ask("weights", "check", code=2)[0]["state"] == "damaged"
