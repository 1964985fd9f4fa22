"""What docs/keep_runs.py keeps of a run says the same as the run."""

import json
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest
import torch

from normal_guidance.core.metrics import auroc, localization
from normal_guidance.evaluation.runs import run_sweep
from normal_guidance.simulate.semi_synthetic import shifted_mean
from normal_guidance.training.config import Config, grid

ROOT = Path(__file__).parents[1]
TRAINED = sorted(path.parent for path in (ROOT / "docs/results/runs").glob("*/*/*/report.json"))
RUNS = [run / "predictions.parquet" for run in TRAINED if (run / "predictions.parquet").exists()]


@pytest.fixture
def keep_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(ROOT / "docs"))
    import keep_runs

    return keep_runs


@pytest.mark.parametrize("method", ["abmil", "transmil"])
def test_a_kept_run_has_the_test_scans_and_their_scores(keep_runs, tmp_path, method):
    train, val, test = (shifted_mean(24, seed, features=8, shift=2.0) for seed in (1, 2, 3))
    configs = grid(Config(method, epochs=2, batch_size=8, train_above_val=False), lr=[0.1], l1=[0.01])
    run = run_sweep(tmp_path / method / "0", configs, train, val, test)
    keep_runs.keep(tmp_path / method / "0", tmp_path / "kept")
    table = pq.read_table(tmp_path / "kept/predictions.parquet")
    assert table.schema.equals(pq.read_schema(tmp_path / method / "0/predictions.parquet"))
    assert table["scan_id"].to_pylist() == list(test.scan_ids)
    assert {len(heads) for heads in table["log_attention"].to_pylist()} == {1}
    scores = torch.tensor(np.concatenate([heads[0] for heads in table["log_attention"].to_pylist()]))
    assert test.slice_labels is not None
    found = localization(scores, test.slice_labels, test.lengths).mean_auroc.item()
    assert found == pytest.approx(run.winners[0].test.localization_auroc, abs=1e-3)
    assert not (tmp_path / "kept/history.parquet").exists()
    assert json.loads((tmp_path / "kept/report.json").read_text()) == run.report


@pytest.mark.parametrize("path", RUNS, ids=lambda path: "-".join(path.parts[-4:-1]))
def test_predictions_in_the_repository_are_those_that_their_report_scored(path):
    table = pq.read_table(path)
    (winner,) = json.loads((path.parent / "report.json").read_text())["winners"]
    scan_auroc = auroc(torch.tensor(table["logit"].to_numpy()), torch.tensor(table["label"].to_numpy()))
    assert scan_auroc.item() == pytest.approx(winner["test"]["scan_auroc"], abs=1e-9)
    assert path.stat().st_size < 300_000
