"""A run's folder: one writer, one identity, a state that is whole or refused, and files that rebuild the model."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json, write_json
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config, Execution, grid, paper_config
from normal_guidance.sweep.run import (
    _report,
    diverged,
    environment,
    group_names,
    history_table,
    identity_of,
    is_begun,
    load_winner,
    open_run,
    state_of,
    write_history,
    write_winners,
)
from normal_guidance.sweep.sweep import StateFile, Sweep, SweepState, Winner, sweep

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
        (b'{"format": 3, "con', "config.json cannot be read"),
        (b"[1]", "config.json is damaged"),
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
    changed = bytearray(whole)
    changed[-3] ^= 1
    sums, foreign = "does not fit its checksum", "damaged or was not written by normal-guidance"
    empty = b"\x02\x00\x00\x00\x00\x00\x00\x00{}"
    wrong = ((whole[:-1], sums), (whole[:20], foreign), (b"", foreign), (empty, foreign), (bytes(changed), sums))
    for content, message in wrong:
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
    by_epochs, by_time = StateFile(path, save_epochs=3), StateFile(path, save_seconds=9)
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


def finish(folder: Path, result: Sweep, groups: Sequence[str] | None = None) -> None:
    """Winners, and a report that says which there are."""
    write_winners(folder, result, features=8)
    what, state = identity_of(result.configs, Execution(), {}), StateFile(environment=environment(Execution()))
    report = _report(what, result, {}, state, {}, None)
    known = report["winners"] if groups is None else [{**report["winners"][0], "group": group} for group in groups]
    write_json(folder / "report.json", {**report, "winners": known})


def test_winners_are_rebuilt_from_their_files(result: Sweep, tmp_path: Path) -> None:
    finish(tmp_path, result)
    names = group_names(result.configs)
    assert sorted(path.name for path in tmp_path.glob("best*")) == sorted(
        f"best-{name}.{kind}" for name in names.values() for kind in ("json", "safetensors")
    )
    bags = shifted_mean(5, 3, features=8)
    for winner, name in zip(result.winners, names.values(), strict=True):
        model = load_winner(tmp_path, name)
        assert not model.training
        parameters = dict(model.named_parameters())
        assert parameters.keys() == winner.weights.keys()
        assert all(torch.equal(parameters[key], value) for key, value in winner.weights.items())
        assert model(bags.features, bags.layout).logit.shape == (5,)
        about = read_json(tmp_path / f"best-{name}.json")
        assert Config(**about["config"]) == winner.config
        assert (about["epoch"], about["number"], about["val_auroc"]) == (winner.epoch, winner.number, winner.val_auroc)


FORWARD, SQUARED = "forward_kl-lambda1.0-seed0", "squared_error-lambda1.0-seed0"


def refuse_winner(folder: Path, group: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        load_winner(folder, group)


def test_wrong_winners_are_named(result: Sweep, tmp_path: Path) -> None:
    """What the report does not name is not loaded, and what the result does not have is not kept."""
    refuse_winner(tmp_path, "", r"is not a complete run: report\.json is missing; .* give the folder of a")
    for groups, group, message in (
        (None, "", f"choose a group: {FORWARD}, {SQUARED}"),
        ([FORWARD], SQUARED, f"no winner of group '{SQUARED}'; choose a group: {FORWARD}$"),
        ([""], FORWARD, f"has one winner and no group '{FORWARD}'; leave the group out"),
        ([], FORWARD, r"has no winner: .*; give a run that has one"),
    ):
        finish(tmp_path, result, groups)
        refuse_winner(tmp_path, group, message)
    finish(tmp_path, result)
    about = tmp_path / f"best-{FORWARD}.json"
    write_json(about, {**read_json(about), "features": 9})
    refuse_winner(tmp_path, FORWARD, "do not fit together")
    about.with_suffix(".safetensors").write_bytes(b"")
    refuse_winner(tmp_path, FORWARD, "damaged or was not written by normal-guidance")
    write_winners(tmp_path, replace(result, winners=result.winners[:1]), features=8)
    assert sorted(path.name for path in tmp_path.glob("best*")) == [
        f"best-{FORWARD}.json",
        f"best-{FORWARD}.safetensors",
    ]
