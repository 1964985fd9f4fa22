"""A run and its folder: one writer, one identity, a state that is whole or refused, and files of what was computed."""

import json
import math
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json, write_json
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.core.bags import Bags
from normal_guidance.core.prediction import Prediction
from normal_guidance.scans.features.store import write_store
from normal_guidance.statistics.split_results import score
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep import run as runs
from normal_guidance.sweep.config import Config, Execution, grid, paper_config
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.predictions import packed_prediction, read_predictions
from normal_guidance.sweep.run import (
    Data,
    Run,
    check_sweep,
    diverged,
    history_table,
    identity_of,
    is_begun,
    load_run,
    load_winner,
    open_run,
    run_sweep,
    state_of,
    write_history,
    write_winners,
)
from normal_guidance.sweep.sweep import StateFile, Sweep, SweepState, Winner, sweep

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
        assert not model.training
        about = read_json(run.folder / f"best-{winner.group}.json")
        assert Config(**about["config"]) == winner.config
        assert (about["epoch"], about["number"], about["val_auroc"]) == (winner.epoch, winner.number, winner.val_auroc)
        for part, bags in zip(("val", "test"), sets[1:], strict=True):
            prediction = predict_bags(model, bags)
            rows = table[(table["group"] == winner.group) & (table["part"] == part)]
            assert rows["scan_id"].tolist() == list(bags.scan_ids)
            assert rows["patient_id"].tolist() == list(bags.patient_ids)
            assert rows["label"].tolist() == bags.labels.tolist()
            assert rows["slices"].tolist() == bags.lengths.tolist()
            assert rows["probability"].tolist() == pytest.approx(prediction.logit.sigmoid().tolist())
            read = read_predictions(run.folder / "predictions.parquet", part=part, group=winner.group)
            assert all(map(torch.equal, packed_prediction(read)[:3], prediction[:3]))
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


def test_a_store_a_lack_of_slice_labels_and_a_lack_of_test_scans(sets: Sets, tmp_path: Path) -> None:
    """The store's run is the same; scans alone are scored; nothing is."""
    train, val, test = sets
    store = write_store(tmp_path / "store", zip(("train", "val", "test"), sets, strict=True), provenance={})
    of_bags = small(tmp_path / "bags", sets).winners[0]
    of_store = small(tmp_path / "stored", [store.part(part) for part in ("train", "val", "test")]).winners[0]
    assert of_store == of_bags
    for name in ("config.json", "best.safetensors", "predictions.parquet", "history.parquet"):
        assert (tmp_path / "stored" / name).read_bytes() == (tmp_path / "bags" / name).read_bytes()
    unlabelled = small(tmp_path / "unlabelled", (train, val, replace(test, slice_labels=None))).winners[0].test
    assert math.isnan(unlabelled.localization_auroc)
    assert (unlabelled.localized, unlabelled.left_out) == (0, int(test.labels.sum()))
    assert (unlabelled.scan_auroc, unlabelled.scan_auprc) == (of_bags.test.scan_auroc, of_bags.test.scan_auprc)
    assert small(tmp_path / "untested", (train, val)).winners[0].test is None
    assert set(pd.read_parquet(tmp_path / "untested" / "predictions.parquet")["part"]) == {"val"}


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


def test_a_report_that_lacks_something_is_not_loaded(run: Run, tmp_path: Path) -> None:
    for name in run.report.keys() - {"features"}:
        write_json(tmp_path / "report.json", {k: v for k, v in run.report.items() if k != name})
        message = rf"report\.json is damaged: {name} is missing.*give the folder of a run, or copy"
        with pytest.raises(UserError, match=message):
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
        ("begun", begun, (train, val, None), r"data\.test\.\w+ was .*, now it is absent"),
        ("begun", begun, (train, val, test[:20]), r"data\.test\.scans was 24, now it is 20"),
        ("begun", begun, (train, other, test), r"data\.val\.fingerprint was"),
        ("begun", begun, (train[order], val, test), r"data\.train\.order was"),
        ("new", [], sets, "no configuration to train"),
        ("new", [replace(begun[0], batch_size=1000)], sets, "do not fill one batch"),
        ("new", begun, (train, narrow), "training scans have 8 features, validation scans 12"),
    ):
        for act in (check_sweep, run_sweep):
            with pytest.raises(UserError, match=message):
                act(tmp_path / folder, changed, *scans)
    with pytest.raises(UserError, match=r"12 features cannot be divided among 8 heads"):
        check_sweep(tmp_path / "new", [Config("smtp", batch_size=8)], narrow, narrow)
    assert {path: path.read_bytes() for path in files} == files
    assert not (tmp_path / "new").exists()


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


FRESH = SweepState.begin([Config("ng", epochs=2), Config("ng", lr=0.1, epochs=2)], None)


def identity(execution: Execution | None = None, **changes: Any) -> dict[str, Any]:
    configs = [Config("ng", **changes), Config("ng", lr=0.1, **changes)]
    return identity_of(configs, execution or Execution(), {"train": "a", "val": "b"})


def begin(folder: Path, what: dict[str, Any]) -> None:
    """A run that has saved something."""
    with open_run(folder, what) as path:
        state_of(path, what).save(FRESH)


def test_a_folder_of_something_else_is_named(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    with pytest.raises(UserError, match=r"holds 'thesis.tex' but no config.json, so it is not a run; choose another f"):
        begin(tmp_path, identity())


@pytest.mark.parametrize(
    ("other", "message"),
    [
        (identity(epochs=7), r"configs\.0\.epochs was 1000, now it is 7 \(2 more differences\)"),
        (identity(seed=3), r"configs\.0\.seed was 0, now it is 3 \(1 more differences\)"),
        ({**identity(), "data": {"train": "a", "val": "c"}}, r"data\.val was 'b', now it is 'c'; give another folder"),
        ({**identity(), "data": {"train": "a", "val": "b", "test": "d"}}, r"data\.test was absent, now it is 'd'"),
        ({**identity(), "configs": identity()["configs"][:1]}, r"configs\.1\.method was 'ng', now it is absent"),
        (identity(Execution(chunk=1)), r"execution\.chunk was"),
        (identity(Execution(precision="float64")), r"execution\.precision was"),
        (identity(Execution(engine="recorded")), r"execution\.engine was"),
    ],
)
def test_another_run_is_refused(tmp_path: Path, other: dict[str, Any], message: str) -> None:
    begin(tmp_path, identity())
    with pytest.raises(UserError, match=message):
        begin(tmp_path, other)


def test_a_run_that_saved_nothing_is_begun_anew_and_keeps_nothing(tmp_path: Path) -> None:
    """Wrong options that failed at once do not spoil the folder; results without a state may be of anything."""
    stale = ["best.json", "best.safetensors", "best-a.json", "best-a.safetensors", "history.parquet"]
    draft = ".state.safetensors.0123456789abcdef0123456789abcdef.partial"  # of a killed process
    with open_run(tmp_path, identity()):
        for name in (*stale, "predictions.parquet", draft):
            (tmp_path / name).write_bytes(b"of an earlier run")
    with open_run(tmp_path, identity(epochs=7)):
        assert sorted(path.name for path in tmp_path.iterdir()) == ["config.json", "lock"]
    begin(tmp_path, identity(epochs=7))
    (tmp_path / "best.json").write_bytes(b"killed before its report")
    with open_run(tmp_path, identity(epochs=7)):
        assert (tmp_path / "best.json").exists()


def test_what_is_begun_can_be_told_without_touching_it(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    assert not is_begun(folder, identity())
    assert not folder.exists()
    begin(folder, identity())
    (folder / ".config.json.0123456789abcdef0123456789abcdef.partial").write_bytes(b"a draft")
    files = sorted(folder.iterdir())
    assert is_begun(folder, identity())
    assert is_begun(folder, {"configs": identity()["configs"]})  # the rest is not compared
    with pytest.raises(UserError, match=r"configs\.0\.seed was 0, now it is 3"):
        is_begun(folder, {"configs": identity(seed=3)["configs"]})
    assert sorted(folder.iterdir()) == files
    (folder / "config.json").unlink()
    (folder / "state.safetensors").unlink()
    assert not is_begun(folder, identity())  # killed while it wrote its first file


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b'{"format": 99}', "format 99, but this normal-guidance reads format 3"),
        (b"{}", "holds another run: data was None"),
    ],
)
def test_a_config_that_cannot_be_compared_is_refused(tmp_path: Path, content: bytes, message: str) -> None:
    begin(tmp_path, identity())
    (tmp_path / "config.json").write_bytes(content)
    with pytest.raises(UserError, match=message):
        begin(tmp_path, identity())


def test_departures_name_other_grids_and_missing_pairs() -> None:
    def departing(configs: Sequence[Config]) -> dict[str, Any]:
        return identity_of(configs, Execution(), {})["departures"]

    assert departing(grid(paper_config("abmil"))) == departing(grid(paper_config("ng"))) == {}
    other = grid(paper_config("ng"), lr=[0.5], guidance_weight=[10.0, 1.0])
    assert departing(other) == {"lr": [0.5], "guidance_weight": [1.0, 10.0]}
    whole = grid(paper_config("ng"), guidance_weight=[1.0, 10.0])
    diagonal = [config for i, config in enumerate(grid(paper_config("ng"))) if i // 4 % 4 == i % 4]
    assert len({config.lr for config in diagonal}) * len({config.l1 for config in diagonal}) == 32
    assert departing(diagonal) == {"pairs": "8 of 32 (l1, lr)"}
    assert departing(whole[:-1])["pairs"] == "31 of 32 (l1, lr)"  # all are there, but not in every group
    assert "pairs" not in {**departing(whole), **departing([paper_config("ng")])}


TENSORS = {
    "scalar": torch.tensor(3.5),
    "nothing": torch.zeros(4, 0, 3, dtype=torch.float64),
    "generator": torch.Generator().get_state(),
    "half": torch.randn(3, 2).bfloat16(),
    "nan": torch.tensor([float("nan"), float("inf"), -0.0], dtype=torch.float64),
    "turned": torch.arange(6.0).reshape(2, 3).T,
    "parameter": torch.randn(3, requires_grad=True),
}


def bits(tensor: torch.Tensor) -> bytes:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()


def test_a_state_comes_back_bit_by_bit(tmp_path: Path) -> None:
    winner = Winner(config=FRESH.configs[1], number=1, epoch=2, val_auroc=0.1 + 0.2, val_loss=0.5, weights=TENSORS)
    state = StateFile(tmp_path / "state", "run")
    assert state.load(FRESH) is FRESH
    saved = replace(FRESH.after(1, TENSORS), winners=(winner,), chunks=(2, 1))
    state.save(saved)
    loaded = state.load(FRESH)
    assert (loaded.chunks, loaded.pending[0].members, loaded.pending[0].epoch) == ((2, 1), (0, 1), 1)
    assert loaded.winners[0].rank() == winner.rank()
    read = load_file(tmp_path / "state")  # any safetensors reader reads it
    state.save(FRESH)  # a state can be replaced while its tensors are in use
    own = {name.removeprefix("chunk0."): tensor for name, tensor in read.items() if name.startswith("chunk0.")}
    for source in (loaded.pending[0].training, loaded.winners[0].weights, own):
        assert source.keys() == TENSORS.keys()
        for name, tensor in TENSORS.items():
            assert (source[name].shape, source[name].dtype) == (tensor.shape, tensor.dtype)
            assert bits(source[name]) == bits(tensor)


def test_damaged_and_foreign_states_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "state"
    StateFile(path, "run").save(FRESH)
    whole = path.read_bytes()
    sums, foreign = "does not fit its checksum", "damaged or was not written by normal-guidance"
    for content, message in ((whole[:-1], sums), (whole[:20], foreign), (b"", foreign)):
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{message}.*delete it to train from the start"):
            StateFile(path, "run").load(FRESH)
    path.write_bytes(whole)
    with pytest.raises(UserError, match="belongs to another run"):
        StateFile(path, "other").load(FRESH)
    tensors, about = read_tensors(path, "copy it again")
    write_tensors(path, tensors, {name: value for name, value in about.items() if name != "environments"})
    with pytest.raises(UserError, match="an older version wrote it: environments is missing; delete it to train"):
        StateFile(path, "run").load(FRESH)


def test_states_are_due_by_epochs_or_time(tmp_path: Path) -> None:
    path = tmp_path / "state"
    by_epochs, by_time = StateFile(path, save_epochs=3), StateFile(path, save_seconds=9.0)
    by_time._saved -= 10.0
    assert [by_epochs.due() for _ in range(3)] == [False, False, True]
    assert by_time.due()
    assert not StateFile(save_epochs=1).due()  # it has no file
    for wrong in ({"save_epochs": 0}, {"save_seconds": -1.0}):
        with pytest.raises(UserError, match="it must be above 0"):
            StateFile(path, **wrong)


def test_times_restarts_and_environments_of_all_starts_are_kept(tmp_path: Path) -> None:
    for number, (commit, expected) in enumerate((("a", "a"), ("b", "ab"), ("a", "ab"), ("c", "abc"))):
        state = StateFile(tmp_path / "state", "run", environment={"commit": {"id": commit}})
        state._begin -= 100 * (number == 0)
        state.load(FRESH)
        assert state.environments == [{"commit": {"id": name}} for name in expected]
        assert state.resumed == number
        state.save(FRESH)
    StateFile(tmp_path / "state", "run", environment={"commit": {"id": "d"}}).load(FRESH)  # killed before it saved
    again = StateFile(tmp_path / "state", "run")
    again.load(FRESH)
    assert again.environments == state.environments
    assert 100 <= again.total < 110


@pytest.fixture(scope="module")
def result() -> Sweep:
    train, val = shifted_mean(48, 1, features=8, shift=3.0), shifted_mean(24, 2, features=8, shift=3.0)
    base = Config("ng", epochs=12, batch_size=16, train_above_val=False, patience=3)
    configs = grid(base, lr=(0.3, 1e-9), l1=(0.0,), divergence=("forward_kl", "squared_error"))
    return sweep(configs, train, val, Execution(chunk=2))


def test_the_history_has_every_number_that_was_trained(result: Sweep, tmp_path: Path) -> None:
    write_history(tmp_path, result)
    rows = pq.read_table(tmp_path / "history.parquet").to_pylist()
    winners = {(winner.number, winner.epoch) for winner in result.winners}
    expected = [
        {
            "config": number,
            **{name: getattr(config, name) for name in ("lr", "l1", "guidance_weight", "divergence", "seed")},
            "epoch": epoch,
            **dict(zip(("loss", "train_auroc", "val_auroc", "val_loss"), values, strict=True)),
            "selected": epoch == int(result.best_epoch[number]),
            "winner": (number, epoch) in winners,
        }
        for number, config in enumerate(result.configs)
        for epoch, values in enumerate(result.history[:, number].tolist(), start=1)
        if values[0] == values[0]  # nothing diverges here, so NaN is what patience skipped
    ]
    assert rows == expected
    assert len(rows) < len(result.history) * len(result.configs), "patience skipped nothing; choose other settings"


def test_diverged_configurations_stay_in_the_history(result: Sweep) -> None:
    """Their numbers are NaN like those of skipped epochs, also if a whole chunk diverges."""
    history = result.history.clone()
    history[1:, 0] = float("nan")
    history[0:, 1] = float("inf")
    assert diverged(result) == 0
    assert diverged(replace(result, history=history)) == 2
    history[-1, 3, 2] = float("nan")  # by the last step: the loss was taken before it
    assert diverged(replace(result, history=history, trained=torch.full_like(result.trained, len(history)))) == 4
    assert history_table(replace(result, history=history)).num_rows == int(result.trained.sum())
    whole = replace(result, trained=torch.full_like(result.trained, len(history)))
    assert history_table(whole).num_rows == history.shape[0] * history.shape[1]


FORWARD, REVERSE = "forward_kl-lambda1.0-seed0", "reverse_kl-lambda1.0-seed0"


def test_wrong_winners_are_named(run: Run, result: Sweep, tmp_path: Path) -> None:
    """What the report does not name is not loaded, and what the result does not have is not kept."""
    with pytest.raises(UserError, match=r"is not a complete run: report\.json is missing; .* give the folder of a"):
        load_winner(tmp_path)
    shutil.copytree(run.folder, tmp_path, dirs_exist_ok=True)
    for groups, group, message in (
        ([], FORWARD, r"has no winner: .*; give a run that has one"),
        ([""], FORWARD, f"has one winner and no group '{FORWARD}'; leave the group out"),
        ([FORWARD], REVERSE, f"no winner of group '{REVERSE}'; choose a group: {FORWARD}$"),
        ([FORWARD, REVERSE], "", f"choose a group: {FORWARD}, {REVERSE}"),
    ):
        winners = [{**run.report["winners"][0], "group": name} for name in groups]
        write_json(tmp_path / "report.json", {**run.report, "winners": winners})
        with pytest.raises(UserError, match=message):
            load_winner(tmp_path, group)
    write_winners(tmp_path, replace(result, winners=result.winners[:1]), features=8)
    assert {path.name for path in tmp_path.glob("best*")} == {
        f"best-{FORWARD}.{kind}" for kind in ("json", "safetensors")
    }
