"""docs/studies/keep.py: what is kept of a run says the same as the run."""

import json
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from normal_guidance.base.files import read_json, write_json
from normal_guidance.core.bags import Bags
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.scans.features.store import write_store
from normal_guidance.statistics.split_results import MethodResults
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.experiment import read_prediction
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.run import Run, load_run, run_sweep

DOCS = Path(__file__).parents[1] / "docs"


@pytest.fixture
def keep(studies):
    return studies.keep


def train_one(folder: Path, *parts: Bags) -> Run:
    """A run of one configuration, of the method that the folder above it names."""
    configs = grid(Config(folder.parent.name, epochs=2, batch_size=8), lr=[0.1], l1=[0.01])
    return run_sweep(folder, configs, *parts, options={"dataset": "few"})


@pytest.mark.parametrize("method", ["abmil", "transmil"])
def test_a_kept_run_has_its_report_and_its_scores(keep, tmp_path, monkeypatch, method):
    train, val, test = (shifted_mean(24, seed, features=8, shift=2.0) for seed in (1, 2, 3))
    monkeypatch.setattr(keep, "DATASETS", {"few": SimpleNamespace(draw=lambda seed, part: test)})
    keep.drawn.cache_clear()
    run = train_one(tmp_path / method / "0", train, val, test)
    keep.write([keep.run_row("few", tmp_path / method / "0")], keep.RUNS, tmp_path / "kept.parquet")
    (row,) = keep.read(tmp_path / "kept.parquet")
    assert (row["set"], row["method"], row["seed"]) == ("few", method, 0)
    kept = json.loads(row["report"])
    assert {name: value for name, value in kept.items() if name not in ("format", "seal")} == run.report
    kept_runs = import_module("kept_runs")
    monkeypatch.setattr(kept_runs, "TABLES", tmp_path)
    table = kept_runs.KeptRuns("kept", (0,))
    kept_runs._rows.cache_clear()
    with table.run_folders("few") as folder:
        assert load_run(folder / method / "0").report == run.report  # the seal still fits
    assert table.scores("few") == {(method, 0): run.winner().test}
    labels, found = keep.results_of(row)
    assert labels.tolist() == test.labels.tolist()
    prediction = read_prediction(tmp_path / method / "0", test)
    assert test.slice_labels is not None
    expected = localization(prediction.slice_scores, test.slice_labels, test.lengths)
    for values, all_of_it in ((found.auroc, expected.auroc), (found.auprc, expected.auprc)):
        assert values[labels == 1].tolist() == all_of_it.tolist()
        assert np.isnan(values[labels == 0]).all()
    assert found.scan_scores.argsort().tolist() == prediction.logit.argsort().tolist()
    assert row["measures"]["attention_on_positives"] > 0


def test_runs_are_added_to_a_table_and_replace_their_own_rows(keep, tmp_path, monkeypatch):
    """The command: a run, the guess by position beside it, patients where scans share them; other rows stay."""
    parts = {"train": shifted_mean(24, 1, features=8, shift=2.0), "test": shifted_mean(24, 3, features=8, shift=2.0)}
    shared = replace(parts["test"], patient_ids=tuple(f"p{number // 2}" for number in range(24)))
    parts["test"] = shared
    monkeypatch.setattr(keep, "DATASETS", {"few": SimpleNamespace(draw=lambda seed, part: parts[part])})
    keep.drawn.cache_clear()
    train_one(tmp_path / "abmil/7", parts["train"], parts["train"], shared)
    table = tmp_path / "kept.parquet"
    keep.write([{"set": "other", "method": "ng", "seed": 1, "report": "{}"}], keep.RUNS, table)
    monkeypatch.setattr("sys.argv", ["keep.py", f"few={tmp_path}", str(table)])
    keep.main()
    keep.main()
    rows = {keep.key_of(row): row for row in keep.read(table)}
    assert sorted(rows) == [("few", "abmil", 7), ("few", "position_density", 7), ("other", "ng", 1)]
    guess = rows["few", "position_density", 7]
    assert guess["patients"] == list(shared.patient_ids)
    assert guess["scan_rank"] is None
    scores = json.loads(guess["report"])["scores"]["position_density"]
    assert np.mean(guess["auroc"]) == pytest.approx(scores["localization_auroc"])


def test_a_run_without_a_selected_epoch_is_kept_without_results(keep, tmp_path, monkeypatch):
    scans = shifted_mean(24, 1, features=8, shift=2.0)
    run = tmp_path / "abmil/7"
    train_one(run, scans, scans, scans)
    report = read_json(run / "report.json")
    write_json(run / "report.json", {**report, "winners": []})
    assert set(keep.run_row("few", run)) == {"set", "method", "seed", "report"}


def test_ranks_keep_ties_and_methods_without_scan_scores_have_none(keep):
    labels, nothing = np.array([0, 1, 1]), np.array([np.nan, 0.5, 1.0])
    scored = keep.per_scan(labels, MethodResults(nothing, nothing, np.array([0.3, -2.0, 0.3])))
    assert scored["scan_rank"].tolist() == [1, 0, 1]
    blank = keep.per_scan(labels, MethodResults(nothing, nothing))
    assert blank["scan_rank"] is None
    assert keep.results_of({**blank, "auroc": [0.5, 1.0], "auprc": None})[1].scan_scores is None


def test_runs_in_the_repository_have_the_scores_of_their_reports(keep):
    """Scan AUROC by the ranks, and mean localization."""
    scores = import_module("page_semi_synthetic").scores
    assert all(file.stat().st_size < 1_000_000 for file in (DOCS / "results/tables").iterdir())
    checked, rows = 0, keep.read(DOCS / "results/tables/semi-synthetic.parquet")
    assert len({(row["set"], row["method"], row["seed"]) for row in rows}) == len(rows) == 113
    for name in ("semi-synthetic", "beyond", "unfiltered", "raw-rows", "field"):
        reported = scores(name)
        for row in (row for row in rows if row["set"] == name and row["method"] != "centered_gaussian"):
            labels, found = keep.results_of(row)
            own = reported[row["method"], row["seed"]]
            # Of several heads the mean was kept, in float32: where attention is uniform to rounding, slices tie.
            assert np.nanmean(found.auroc) == pytest.approx(own.localization_auroc, abs=2e-3)
            assert np.nanmean(found.auprc) == pytest.approx(own.localization_auprc, abs=2e-3)
            ranked = auroc(torch.from_numpy(found.scan_scores), torch.from_numpy(labels)).item()
            assert ranked == pytest.approx(own.scan_auroc, abs=1e-9)
            checked += 1
    assert checked == 80


def test_folds_are_added_to_the_table_of_fit_and_replace_their_own_rows(keep, tmp_path):
    """A set is a store; scores that are nearly alike are no ties; guesses by position come along; other rows stay."""
    keep_fit = import_module("keep_fit")
    scans = shifted_mean(30, 1, features=4, shift=2.0)
    write_store(tmp_path / "few", scans, provenance={})
    own = [number for number, label in enumerate(scans.labels.tolist()) if label]
    line = {"set": "few", "method": "ng", "repeat": 0, "fold": 0, "seed": 0, "seconds": 1.0, "scans": own}
    line |= {"logits": [0.5 + 1e-7 * number for number in own], "localization": [0.25] * len(own)}
    other = {**line, "method": "abmil", "logits": [0.0] * len(own)}
    table, results = tmp_path / "fit.parquet", tmp_path / "results.jsonl"
    for lines in ([other, line], [{**line, "localization": [0.75] * len(own)}, {**line, "fold": 1, "failed": "no"}]):
        results.write_text("".join(json.dumps(one) + "\n" for one in lines))
        keep_fit.main([str(tmp_path), str(results), str(table)])
    rows = {row["method"]: row for row in keep.read(table)}
    assert sorted(rows) == ["abmil", "middle", "ng", "position_density"]
    assert rows["ng"]["auroc"] == [0.75] * len(own)
    assert rows["ng"]["scan_rank"] == list(range(len(own)))
    assert rows["abmil"]["scan_rank"] == [0] * len(own)
