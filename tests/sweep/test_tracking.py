"""What `--track` writes can be read back by TensorBoard and MLflow, and is written once."""

import math
import os
import sys

import pytest
from typer.testing import CliRunner

from normal_guidance.base.errors import UserError
from normal_guidance.cli.commands import app
from normal_guidance.scans.features.store import write_store
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.run import read_history, run_sweep
from normal_guidance.sweep.tracking import EXPERIMENT, TRACKERS, Training, check_tracker, track, tracked_runs
from small_bundle import few_settings

ONE = Training("ng/7", {"lr": 0.1}, {"test/scan_auroc": 0.75, "skill": math.nan}, {"loss": [0.5, math.nan, 0.25]})


@pytest.fixture(scope="module")
def runs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("runs")
    scans = [shifted_mean(24, seed, features=4, shift=3.0) for seed in (1, 2, 3)]
    configs = [Config("ng", lr=lr, epochs=3, batch_size=8, train_above_val=False) for lr in (0.1, 0.01)]
    run_sweep(folder / "ng" / "0", configs, *scans, options={"store": "somewhere"})
    return folder


def test_a_run_is_read_with_its_winners_curves(runs):
    (training,) = tracked_runs(runs)
    history = read_history(runs / "ng" / "0" / "history.parquet").to_pandas()
    winner = history[history["config"] == history.loc[history["winner"], "config"].iloc[0]]
    assert training.name == "ng/0"
    assert training.curves["val_auroc"] == winner["val_auroc"].tolist()
    assert training.options["lr"] == winner["lr"].iloc[0]
    assert training.options["asked/store"] == "somewhere"
    assert 0 <= training.metrics["test/scan_auroc"] <= 1


def test_tensorboard_reads_it_and_it_is_written_once(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    for _ in range(2):  # as a command that is started again
        track([ONE], "tensorboard", tmp_path)
    (folder,) = (tmp_path / "tensorboard" / "ng" / "7").iterdir()
    assert len(list(folder.iterdir())) == 1
    events = EventAccumulator(str(folder)).Reload()
    points = {name: [(event.step, event.value) for event in events.Scalars(name)] for name in events.Tags()["scalars"]}
    assert points == {"loss": [(1, 0.5), (3, 0.25)], "final/test/scan_auroc": [(0, 0.75)]}
    assert b"lr: 0.1" in events.Tensors("options/text_summary")[0].tensor_proto.string_val[0]


def test_mlflow_reads_it_and_it_is_written_once(tmp_path, monkeypatch):
    from mlflow.tracking import MlflowClient

    monkeypatch.delenv("MLFLOW_TRACKING_URI", raising=False)
    monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
    for _ in range(2):
        track([ONE], "mlflow", tmp_path)
    reader = MlflowClient(tracking_uri=(tmp_path / "mlruns").resolve().as_uri())
    (run,) = reader.search_runs([reader.get_experiment_by_name(EXPERIMENT).experiment_id])
    assert run.info.status == "FINISHED"
    assert run.info.run_name == "ng/7"
    assert run.data.params == {"lr": "0.1"}
    assert run.data.metrics == {"loss": 0.25, "test/scan_auroc": 0.75}
    losses = reader.get_metric_history(run.info.run_id, "loss")
    assert [(metric.step, metric.value) for metric in losses] == [(1, 0.5), (3, 0.25)]


def test_other_results_are_another_training():
    assert ONE.identity == Training(ONE.name, ONE.options, ONE.metrics, ONE.curves).identity
    assert ONE.identity != Training(ONE.name, {"lr": 0.2}, ONE.metrics, ONE.curves).identity


@pytest.mark.parametrize(
    ("to", "module"), [("tensorboard", "tensorboard.summary.writer.event_file_writer"), ("mlflow", "mlflow.tracking")]
)
def test_a_missing_package_is_named_with_its_extra(to, module, monkeypatch, tmp_path):
    assert to in TRACKERS
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(UserError, match=rf"--track {to} needs the package .*pip install 'normal-guidance\[track\]'"):
        track([], to, tmp_path)


@pytest.mark.parametrize("uri", ["http://127.0.0.1:9", "foo://x"])
def test_a_server_that_cannot_be_reached_is_named_before_training_and_after_it(uri, tmp_path, monkeypatch):
    monkeypatch.setenv("MLFLOW_TRACKING_URI", uri)
    with pytest.raises(UserError, match=f"--track mlflow: {uri} cannot be written to .*; start that server"):
        check_tracker("mlflow")
    assert "MLFLOW_HTTP_REQUEST_MAX_RETRIES" not in os.environ
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    with pytest.raises(UserError, match=f"{uri} cannot be written to"):
        TRACKERS["mlflow"]([ONE], tmp_path)


def test_fit_prints_its_results_before_they_are_tracked(tmp_path, monkeypatch):
    write_store(tmp_path / "store", shifted_mean(24, 1, features=4, shift=3.0), provenance={})

    def away(*_):
        raise UserError("the server is away")

    few_settings(monkeypatch, FOLDS=3)
    monkeypatch.setattr("normal_guidance.cli.model.track_fits", away)
    arguments = ["fit", str(tmp_path / "store"), "-o", str(tmp_path / "model"), "--track", "tensorboard"]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 2
    assert result.stdout.splitlines()[-1].startswith("Next: nguide predict FEATURES")
    assert "the server is away" in result.stderr
