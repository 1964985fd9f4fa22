"""From data to report in one call: what is written is what was computed, and a complete run is only loaded."""

import json
import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json, write_json
from normal_guidance.core.bags import Bags
from normal_guidance.core.prediction import Prediction
from normal_guidance.scans.features.store import write_store
from normal_guidance.statistics.split_results import score
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep import run as runs
from normal_guidance.sweep.config import Config, Execution, grid
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.run import Data, Run, check_sweep, load_run, load_winner, run_sweep
from normal_guidance.sweep.sweep import StateFile

Patch = pytest.MonkeyPatch
Sets = tuple[Bags, Bags, Bags]

HOPELESS = 1e39
"""A learning rate beyond float32: every logit is NaN after the first step."""


@pytest.fixture(autouse=True)
def _untold(monkeypatch: Patch) -> None:
    monkeypatch.delenv("NGUIDE_COMMIT", raising=False)


@pytest.fixture(scope="module")
def sets() -> Sets:
    train, val, test = (shifted_mean(n, seed, features=8, shift=3.0) for seed, n in ((1, 48), (2, 24), (3, 24)))
    return train, val, test


@pytest.fixture(scope="module")
def configs() -> tuple[Config, ...]:
    base = Config("mhng", epochs=4, batch_size=16, train_above_val=False)
    return grid(base, lr=(0.1, 0.01), l1=(0.0,), divergence=("forward_kl", "reverse_kl"))


@pytest.fixture(scope="module")
def run(sets: Sets, configs: tuple[Config, ...], tmp_path_factory: pytest.TempPathFactory) -> Run:
    return run_sweep(tmp_path_factory.mktemp("run"), configs, *sets, options={"epochs": 4})


def small(folder: Path, sets: Sequence[Data], **changes: Any) -> Run:
    arguments: dict[str, Any] = {"epochs": 2, "batch_size": 16, "train_above_val": False} | changes
    return run_sweep(folder, [Config(**{"method": "abmil"} | arguments)], *sets)


def test_scores_and_predictions_are_those_of_the_winners(run: Run, sets: Sets) -> None:
    table = pq.read_table(run.folder / "predictions.parquet").to_pandas()
    assert len(run.winners) == 2
    for winner in run.winners:
        model = load_winner(run.folder, winner.group)
        for part, bags in zip(("val", "test"), sets[1:], strict=True):
            prediction = predict_bags(model, bags)
            rows = table[(table["group"] == winner.group) & (table["part"] == part)]
            assert rows["scan_id"].tolist() == list(bags.scan_ids)
            assert rows["patient_id"].tolist() == list(bags.patient_ids)
            assert rows["label"].tolist() == bags.labels.tolist()
            assert rows["slices"].tolist() == bags.lengths.tolist()
            assert rows["logit"].tolist() == prediction.logit.tolist()
            assert rows["probability"].tolist() == pytest.approx(prediction.logit.sigmoid().tolist())
            starts = [0, *bags.lengths.cumsum(0).tolist()]
            for i, (attention, log_attention) in enumerate(zip(rows["attention"], rows["log_attention"], strict=True)):
                here = slice(starts[i], starts[i + 1])
                assert attention.tolist() == prediction.attention[here].tolist()
                assert [head.tolist() for head in log_attention] == prediction.log_attention[:, here].tolist()
            if part == "test":
                assert winner.test == score(bags, prediction.slice_scores, prediction.logit)


def test_the_report_says_what_ran(run: Run, configs: tuple[Config, ...]) -> None:
    report = read_json(run.folder / "report.json")
    assert report == run.report
    assert report["configurations"] == {"trained": 4, "selectable": 4, "diverged": 0}
    protocol = {"epochs": 4, "batch_size": 16, "patience": 50, "train_above_val": False}
    axes = {"lr": [0.01, 0.1], "l1": [0.0], "divergence": ["forward_kl", "reverse_kl"]}
    assert report["departures"] == protocol | axes
    assert report["options"] == {"epochs": 4}
    assert report["seeds"] == {"order": 0, "weights": [0]}
    assert report["execution"]["chunks"] == [4]
    assert report["seconds"]["total"] >= report["seconds"]["training"] > 0
    (environment,) = report["environments"]
    assert environment["torch"] == torch.__version__
    assert environment["date"].startswith("20")
    assert report["data"].keys() == {"train", "val", "test"}
    assert [configs[winner.number] for winner in run.winners] == [winner.config for winner in run.winners]
    assert str(run.folder) not in json.dumps(report)
    assert str(Path.home()) not in json.dumps(report)


def test_a_complete_run_does_no_work(run: Run, sets: Sets, configs: tuple[Config, ...], monkeypatch: Patch) -> None:
    def written() -> dict[str, int]:
        return {path.name: path.stat().st_mtime_ns for path in run.folder.iterdir() if path.name != "lock"}

    before = written()
    monkeypatch.setattr(runs, "sweep", lambda *_, **__: pytest.fail("it trains"))
    again = run_sweep(run.folder, configs, *sets)
    assert again.winners == run.winners == load_run(run.folder).winners
    assert written() == before
    (run.folder / "state.safetensors").write_bytes(b"killed before it was deleted")
    run_sweep(run.folder, configs, *sets)
    assert not (run.folder / "state.safetensors").exists()


def test_stores_and_bags_give_the_same_run(sets: Sets, tmp_path: Path) -> None:
    store = write_store(tmp_path / "store", zip(("train", "val", "test"), sets, strict=True), provenance={})
    of_store = small(tmp_path / "a", [store.part(part) for part in ("train", "val", "test")], method="ng")
    of_bags = small(tmp_path / "b", sets, method="ng")
    assert of_store.winners == of_bags.winners
    for name in ("config.json", "best.safetensors", "predictions.parquet", "history.parquet"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


def test_without_slice_labels_scans_are_scored(sets: Sets, tmp_path: Path) -> None:
    train, val, test = sets
    unlabelled = small(tmp_path / "a", (train, val, replace(test, slice_labels=None))).winners[0].test
    labelled = small(tmp_path / "b", sets).winners[0].test
    assert math.isnan(unlabelled.localization_auroc)
    assert (unlabelled.localized, unlabelled.left_out) == (0, int(test.labels.sum()))
    assert (unlabelled.scan_auroc, unlabelled.scan_auprc) == (labelled.scan_auroc, labelled.scan_auprc)


def test_without_test_scans_there_are_no_scores(sets: Sets, tmp_path: Path) -> None:
    run = small(tmp_path, sets[:2], method="mean")
    assert run.winners[0].test is None
    assert set(pd.read_parquet(tmp_path / "predictions.parquet")["part"]) == {"val"}


NEVER_ABOVE = "no configuration had an epoch whose training AUROC was above its validation AUROC"


@pytest.mark.parametrize(
    ("lr", "train_above_val", "reasons"),
    [
        ((HOPELESS,), False, "1 of 1 configurations diverged"),
        ((HOPELESS,), True, "1 of 1 configurations diverged"),
        ((0.0,), True, NEVER_ABOVE),
        ((0.0, HOPELESS), True, f"{NEVER_ABOVE}, 1 of 2 configurations diverged"),
    ],
)
def test_the_note_says_why_nothing_was_selected(
    sets: Sets, tmp_path: Path, lr: Sequence[float], train_above_val: bool, reasons: str
) -> None:
    train, val, test = sets
    flipped = replace(val, labels=1 - val.labels, slice_labels=None)
    base = Config("abmil", epochs=2, batch_size=48, train_above_val=train_above_val)
    run = run_sweep(tmp_path, grid(base, lr=lr, l1=[0.0]), train, flipped, test)
    assert run.note == run.report["note"] == f"{reasons}: none was selected"
    assert run.all_diverged == (lr == (HOPELESS,))
    assert run.winners == load_run(tmp_path).winners == ()
    assert run.report["configurations"]["selectable"] == 0
    assert not list(tmp_path.glob("best*"))
    assert pq.read_table(tmp_path / "predictions.parquet").num_rows == 0


def test_an_incomplete_or_damaged_run_is_not_loaded(run: Run, tmp_path: Path) -> None:
    (tmp_path / "report.json").write_bytes(b"{")
    with pytest.raises(UserError, match=r"report\.json cannot be read"):
        load_run(tmp_path)
    for change in (
        {"winners": [1]},
        {"winners": [{**run.report["winners"][0], "test": "good"}]},
        {"seconds": {}},
        {"seconds": {"total": "long"}},
        {"configurations": []},
        {"environments": []},
    ):
        write_json(tmp_path / "report.json", {**run.report, **change})
        with pytest.raises(
            UserError, match=rf"report\.json is damaged: {next(iter(change))}.*give the folder of a run, or copy"
        ):
            load_run(tmp_path)
    for name in run.report.keys() - {"features"}:
        write_json(tmp_path / "report.json", {k: v for k, v in run.report.items() if k != name})
        with pytest.raises(UserError, match=f"is damaged: {name} is missing"):
            load_run(tmp_path)


def test_what_cannot_be_trained_is_refused_before_its_turn(sets: Sets, tmp_path: Path, monkeypatch: Patch) -> None:
    train, val, test = sets
    begun = [Config("abmil", epochs=3, batch_size=16)]
    save = StateFile.save

    def save_and_stop(*arguments: Any) -> None:
        save(*arguments)
        raise KeyboardInterrupt

    monkeypatch.setattr(StateFile, "save", save_and_stop)
    with pytest.raises(KeyboardInterrupt):
        run_sweep(tmp_path / "begun", begun, *sets, save_epochs=1)
    monkeypatch.setattr(StateFile, "save", save)
    files = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    check_sweep(tmp_path / "begun", begun, *sets)
    check_sweep(tmp_path / "new", begun, *sets)
    narrow, other = shifted_mean(16, seed=1, features=12), replace(val, features=val.features + 1)
    order = torch.arange(len(train)).flip(0)
    for folder, changed, scans, message in (
        ("begun", [replace(begun[0], epochs=4)], sets, r"another run: configs\.0\.epochs was 3, now it is 4"),
        ("begun", begun, (train, val, None), r"data\.test\.\w+ was .*, now it is absent"),
        ("begun", begun, (train, val, test[:20]), r"data\.test\.scans was 24, now it is 20"),
        ("begun", begun, (train, other, test), r"data\.val\.fingerprint was"),
        ("begun", begun, (train[order], val, test), r"data\.train\.order was"),
        ("begun", begun, (*sets, Execution(chunk=1)), r"execution\.chunk was None, now it is 1"),
        ("new", [], sets, "no configuration to train"),
        ("new", [replace(begun[0], batch_size=1000)], sets, "do not fill one batch"),
    ):
        for act in (check_sweep, run_sweep):
            with pytest.raises(UserError, match=message):
                act(tmp_path / folder, changed, *scans)
    with pytest.raises(UserError, match=r"12 features cannot be divided among 8 heads"):
        check_sweep(tmp_path / "new", [Config("smtp", batch_size=8)], narrow, narrow)
    assert {path: path.read_bytes() for path in files} == files
    assert not (tmp_path / "new").exists()
    state = tmp_path / "begun" / "state.safetensors"
    state.write_bytes(state.read_bytes()[:-9])
    with pytest.raises(UserError, match=r"state\.safetensors is damaged"):
        run_sweep(tmp_path / "begun", begun, *sets)
    state.unlink()
    assert run_sweep(tmp_path / "begun", begun, *sets).report["resumed"] == 0


def test_predictions_are_made_on_the_chosen_device(sets: Sets, tmp_path: Path, monkeypatch: Patch) -> None:
    """On cuda:1 work must not wait in the streams of cuda:0, so the device is made the current one."""
    current: list[str] = []

    @contextmanager
    def noting(device: str) -> Iterator[None]:
        current.append(device)
        yield
        current.clear()

    def watched(*arguments: Any) -> Prediction:
        assert current == ["cpu"]
        return predict_bags(*arguments)

    monkeypatch.setattr(runs, "current_device", noting)
    monkeypatch.setattr(runs, "predict_bags", watched)
    small(tmp_path, sets)
