"""A run killed with SIGKILL, at random moments and inside every write, ends with the results of an undisturbed run.

A program (`python test_kill.py FOLDER KIND`) forks runs and kills them (see `killing`); the tests judge what it saw.
"""

import json
import os
import sys
import time
from pathlib import Path
from random import Random
from typing import Any

import pytest

from killing import die_at, fork, run_program

SEED = 20261007
SAVE_EPOCHS = 3
KILLS_PER_SWEEP = 8
WRITES = {"every write": 1, "some writes": 3}
"""Kinds of kills inside writes, and how many writes lie between two of them."""
RESULTS = ("best.safetensors", "best.json", "history.parquet", "predictions.parquet")


def differences(one: Path, other: Path) -> list[str]:
    return [name for name in RESULTS if (one / name).read_bytes() != (other / name).read_bytes()]


def record(owner: Any, path: Path) -> None:
    """Make this process log every trained epoch, save and load; `due` is called after each epoch."""
    due, save, load = owner.due, owner.save, owner.load

    def note(text: str, state: Any = None) -> None:
        with path.open("a") as file:  # closed, so it is there when the process dies
            epoch = state.pending[0].epoch if state and state.pending else 0
            file.write(f"{text}\n" if state is None else f"{text} {len(state.chunks)} {epoch}\n")

    def noted_due(self: Any) -> bool:
        note("trained")
        return due(self)

    def noted_save(self: Any, state: Any) -> None:
        save(self, state)
        note("saved", state)

    def noted_load(self: Any, fresh: Any) -> Any:
        loaded = load(self, fresh)
        note("begins") if loaded is fresh else note("loaded", loaded)
        return loaded

    owner.due, owner.save, owner.load = noted_due, noted_save, noted_load


class Killer:
    """Runs to be killed, in subfolders of one folder."""

    def __init__(self, folder: Path) -> None:
        import torch

        torch.set_num_threads(1)  # a forked child must not wait for threads that only its parent has

        from normal_guidance.study.drawn import shifted_mean

        sizes = {"features": 8, "min_slices": 14, "max_slices": 20, "shift": 0.5}
        self.sets = [shifted_mean(n, seed, **sizes) for seed, n in enumerate((40, 24, 24), start=1)]
        self.folder, self.random, self.kills = folder, Random(SEED), 0

    def attempt(
        self,
        name: str,
        method: str,
        epochs: int,
        *,
        kill_after: float | None = None,
        die: tuple[Any, ...] = (),
        chunk: int | None = None,
        patience: int | None = None,
        save_epochs: int = SAVE_EPOCHS,
    ) -> bool:
        """Start a run once, and return whether it was killed, by the clock or at a call."""
        from normal_guidance.sweep.config import Config, Execution, grid
        from normal_guidance.sweep.run import run_sweep
        from normal_guidance.sweep.sweep import StateFile

        base = Config(method, epochs=epochs, batch_size=8, patience=patience, train_above_val=False)

        def run() -> None:
            record(StateFile, self.folder / f"{name}.log")
            if die:
                die_at(*die)
            configs = grid(base, lr=(0.03, 0.01), l1=(0.0, 0.001))  # whose best epochs are late
            run_sweep(self.folder / name, configs, *self.sets, Execution(chunk=chunk), save_epochs=save_epochs)

        killed = fork(run, kill_after)
        self.kills += killed
        return killed

    def at_random(self, method: str, epochs: int, **options: Any) -> dict[str, Any]:
        """Kill at random moments; after a run that survives, start another until there were enough kills."""
        begin = time.monotonic()
        self.attempt(f"{method}-whole", method, epochs, **options)
        longest = (time.monotonic() - begin) / 2
        seen: dict[str, Any] = {}
        enough = self.kills + KILLS_PER_SWEEP
        while self.kills < enough:
            name = f"{method}-killed-{len(seen) + 1}"
            while self.attempt(name, method, epochs, kill_after=self.random.uniform(0, longest), **options):
                pass
            seen[name] = {
                "differences": differences(self.folder / f"{method}-whole", self.folder / name),
                "log": (self.folder / f"{name}.log").read_text().splitlines(),
                "files": sorted(path.name for path in (self.folder / name).iterdir()),
            }
        return seen

    def in_every_write(self, step: int) -> list[list[str]]:
        """Kill before each fsync of a run, or each `step`th: with the new file unfinished, or just moved into place."""
        self.attempt("writes-whole", "abmil", 2 * SAVE_EPOCHS)
        seen: list[list[str]] = []
        while True:
            name = f"writes-{len(seen) + 1}"
            if not self.attempt(name, "abmil", 2 * SAVE_EPOCHS, die=(os, "fsync", step * len(seen) + 1)):
                return seen  # a run has no more of them
            self.attempt(name, "abmil", 2 * SAVE_EPOCHS)
            seen.append(differences(self.folder / "writes-whole", self.folder / name))

    def in_a_state(self) -> list[str]:
        """Kill with half of a state's tensors written."""
        from normal_guidance.base import tensor_files
        from normal_guidance.sweep.sweep import StateFile

        self.attempt("half", "ng", 24, die=(StateFile, "due", SAVE_EPOCHS + 1))
        tensors = len(tensor_files.read_tensors(self.folder / "half" / "state.safetensors", "copy it again")[0])
        # Each one is looked at when the next state's seal is made, and when it is written.
        self.attempt("half", "ng", 24, die=(tensor_files, "raw_bytes", tensors + tensors // 2))
        assert any((self.folder / "half").glob(".state.safetensors.*.partial"))
        self.attempt("half", "ng", 24)
        return differences(self.folder / "ng-whole", self.folder / "half")

    def seldom_saved(self) -> list[str]:
        """The log of a run that is killed before it was ever saved."""
        from normal_guidance.sweep.sweep import StateFile

        self.attempt("seldom", "ng", 24, save_epochs=50, die=(StateFile, "due", 10))
        self.attempt("seldom", "ng", 24, save_epochs=50)
        return (self.folder / "seldom.log").read_text().splitlines()


def serve(folder: Path, kind: str) -> dict[str, Any]:
    killer = Killer(folder)
    if kind == "random":
        random = {
            **killer.at_random("ng", 24),
            **killer.at_random("mhng", 9, chunk=2),  # in chunks: the state holds finished configurations, too
            **killer.at_random("abmil", 40, patience=12),
        }
        return {"runs": random, "kills": killer.kills}
    for method, epochs, chunk in (("ng", 24, None), ("mhng", 9, 2)):
        killer.attempt(f"{method}-whole", method, epochs, chunk=chunk)
    return {
        "writes": killer.in_every_write(WRITES[kind]),
        "half": killer.in_a_state(),
        "seldom": killer.seldom_saved(),
    }


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("runs")
    kind = "every write" if pytestconfig.getoption("--slow") else "some writes"
    return {**run_program(__file__, folder, kind), "folder": folder, "step": WRITES[kind]}


def lost_epochs(log: list[str]) -> list[int]:
    """For each start of a run but the first, the epochs that the start before had trained and not saved."""
    lost, since = [], 0
    for line in log[1:]:
        if line == "trained":
            since += 1
        else:
            lost += [since] if not line.startswith("saved") else []
            since = 0
    return lost


@pytest.mark.slow
def test_random_kills_leave_no_trace_and_lose_no_more_than_was_promised(tmp_path: Path) -> None:
    """Epochs trained to their end, that is: the one that a kill interrupts is lost beside them."""
    killed = run_program(__file__, tmp_path, "random")
    assert killed["kills"] >= 20
    lost = [epochs for run in killed["runs"].values() for epochs in lost_epochs(run["log"])]
    assert max(lost) <= SAVE_EPOCHS
    assert any(lost)
    went_on = 0  # from the last state
    for name, run in killed["runs"].items():
        assert run["differences"] == [], name
        assert run["files"] == sorted([*RESULTS, "config.json", "lock", "report.json"])
        saved = (0, 0)
        for line in run["log"]:
            word, *place = line.split()
            if word == "loaded":  # the state may have been saved without a note of it
                assert tuple(map(int, place)) >= saved
                went_on += 1
            saved = tuple(map(int, place)) if word in ("saved", "loaded") else saved
            assert word != "begins" or saved == (0, 0)
    assert went_on >= 10


def test_a_kill_inside_any_write_leaves_no_trace(seen: dict[str, Any]) -> None:
    files = 1 + 2 + len(RESULTS) + 1  # config.json, two states, results, report.json
    assert len(seen["writes"]) == -(-2 * files // seen["step"])  # one fsync of the file, one of its folder
    assert not any(seen["writes"])
    assert seen["half"] == []
    assert differences(seen["folder"] / "ng-whole", seen["folder"] / "mhng-whole") == list(RESULTS), "they can differ"


def test_the_count_of_lost_epochs_can_be_too_high(seen: dict[str, Any]) -> None:
    assert max(lost_epochs(seen["seldom"])) > SAVE_EPOCHS


if __name__ == "__main__":
    print(json.dumps(serve(Path(sys.argv[1]), sys.argv[2])))
