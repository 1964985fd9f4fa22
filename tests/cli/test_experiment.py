"""`nguide experiment` on tiny stores: from features to the page, and mistakes in one line."""

import json
from pathlib import Path

import pytest
from click.testing import Result

from normal_guidance.sweep.run import load_run
from pages import check_page
from small_command import nguide, refusal
from small_study import make_store, write_splits

QUICK = ("--epochs", "1", "--no-train-above-val", "--device", "cpu", "--batch-size", "8")


def invoke(*words: object) -> Result:
    return nguide("experiment", *words)


def refused(*words: object) -> str:
    return refusal("experiment", *words)


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("command")
    write_splits(folder / "splits", make_store(folder / "chest").scan_ids)
    return folder / "chest"


@pytest.mark.usefixtures("unrendered")
def test_from_features_to_the_page(phantom, tmp_path):
    nguide("split", phantom / "index", "-o", tmp_path / "splits", "--seeds", "1001")
    out = tmp_path / "out"
    options = (phantom / "store", "--split", tmp_path / "splits", "--methods", "centered_gaussian,ng",
               "--dataset", "head-ct", "--index", phantom / "index", "--sensitivity", *QUICK, "--out", out)  # fmt: skip
    result = invoke(*options)
    for title in ("ng", "slice reference", "scan reference", "sensitivity of ng"):
        assert f"{title}, seed 1001: begins\n" in result.output
    assert (out / "tables.md").read_text() in result.output
    assert f"Report: {out / 'report.html'}\n" in result.output
    page = (out / "report.html").read_text()
    check_page(page)
    assert "Patient-specific" in (out / "measures.md").read_text()
    assert "Peak error (mm)" in (out / "measures.md").read_text()
    assert "Sensitivity to divergence and λ, head-ct" in page
    assert "Published" in (out / "tables.md").read_text()  # the paper's numbers beside ours
    trained = load_run(out / "ng" / "1001").report
    assert trained["configurations"]["trained"] == 32
    assert load_run(out / "sensitivity" / "ng" / "1001").report["configurations"]["trained"] == 288
    assert trained["departures"]["train_above_val"] is False
    assert "\x1b" not in result.output
    # Started again it trains nothing and tells the same.
    before = {path: path.read_bytes() for path in out.rglob("*.json")}
    again = invoke(*options)
    assert "begins" in result.output
    assert "begins" not in again.output
    assert {path: path.read_bytes() for path in out.rglob("*.json")} == before
    # A script reads the tables, and nothing else, from standard output.
    assert json.loads(invoke(*options, "--json").stdout) == json.loads((out / "tables.json").read_text())


def test_a_dry_run_estimates_every_method_and_writes_nothing(store, tmp_path):
    splits = ("--split", store.parent / "splits")
    options = (store, *splits, "--methods", "mean,ng", "--sensitivity", *QUICK, "--out", tmp_path / "out", "--dry-run")
    result = invoke(*options, "--json")
    methods = {one["method"]: (one["runs"], one["configs"]) for one in json.loads(result.stdout)["methods"]}
    runs = len(list((store.parent / "splits").iterdir()))
    every = dict.fromkeys(("mean", "ng", "slice_reference", "scan_reference"), (runs, 32))
    assert methods == every | {"ng, sensitivity": (runs, 288)}
    assert not (tmp_path / "out").exists()
    assert "not the cluster auto; leave out --ray" in refused(*options, "--ray", "auto")


@pytest.mark.slow
@pytest.mark.usefixtures("unrendered")
def test_splits_may_be_repeated_and_grow(store, tmp_path):
    first, second = sorted((store.parent / "splits").iterdir())
    options = ("--methods", "mean", *QUICK, "--out", tmp_path / "out")
    result = invoke(store, "--split", first, *options)
    assert "1 split of chest" in (tmp_path / "out" / "report.html").read_text()
    result = invoke(store, "--split", first, "--split", second, *options)
    assert "mean, seed 1001: begins" not in result.output
    assert "mean, seed 2001: begins" in result.output
    assert "2 splits of chest" in (tmp_path / "out" / "report.html").read_text()
    assert "1001, 2001" in (tmp_path / "out" / "tables.md").read_text()
    # A folder of splits is all of them.
    result = invoke(store, "--split", store.parent / "splits", *options)
    assert "begins" not in result.output
    # Other options in the same folder are refused.
    line = refused(store, "--split", first, "--methods", "mean", "--epochs", "2", *QUICK[2:], "--out", tmp_path / "out")
    assert "mean/1001 holds another run: configs.0.epochs was 1, now it is 2" in line
    line = refused(store, "--split", first, *options, "--dataset", "head-ct")
    assert "mean/1001 is about chest, not head-ct; give another folder" in line


def test_a_manifest_of_other_scans_is_told_before_training(store, phantom, tmp_path):
    line = refused(store, "--split", store.parent / "splits", "--index", phantom / "index", "-o", tmp_path / "out")
    assert "is not in the manifest; give the folder that it was encoded from (--index)" in line
    assert not (tmp_path / "out").exists()


@pytest.mark.usefixtures("unrendered")
def test_the_protocol_is_that_of_all_and_guides_are_those_of_guided_methods(store, tmp_path):
    out, splits = tmp_path / "out", store.parent / "splits"
    options = (store, "--split", splits, *QUICK, "--lr", "0.1,0.01", "--l1", "0", "-o", out)
    protocol = {"optimizer": "adamw", "weight_decay": 0.01, "schedule": "cosine", "class_weights": True}
    guides = {"modes": 2, "negatives": "none", "warmup": 3}
    given = ("--optimizer", "adamw", "--weight-decay", "0.01", "--schedule", "cosine", "--class-weights")
    guided = [word for name, value in guides.items() for word in (f"--{name}", value)]
    guided += ["--guidance-weight", "0.1", "--divergence", "reverse_kl"]
    invoke(*options, "--methods", "mean,ng", *given, *guided)
    of_guides = guides | {"guidance_weight": [0.1], "divergence": ["reverse_kl"]}
    for method in ("mean", "ng", "slice_reference", "scan_reference"):
        report = load_run(out / method / "1001").report
        assert report["configurations"]["trained"] == 2
        assert protocol.items() <= report["departures"].items()
        changed = {name: value for name, value in report["departures"].items() if name in of_guides}
        assert changed == (of_guides if method == "ng" else {})
    assert "guidance_weight" in (out / "tables.md").read_text()
    # So what is not guided need not be trained again beside other guides; another guided one is another run.
    assert "begins" not in invoke(*options, "--methods", "mean", *given).output
    old_name = (store, "--splits", splits, *options[3:], "--methods", "mean,ng", *given, *guided[:-4])
    assert "ng/1001 holds another run: configs.0.guidance_weight was 0.1, now it is 1.0" in refused(*old_name)
