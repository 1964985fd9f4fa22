"""A run's folder: its configuration, its progress and its results.

    lock                 held by the one process that may write
    config.json          what the run is: configurations, execution, fingerprints of the data
    state.safetensors    progress of the training; deleted when the run is complete
    history.parquet      every configuration and epoch
    best.safetensors     the winner's weights; with several groups of configurations, one file for each
    best.json            the configuration that rebuilds its model: `load_winner`
    predictions.parquet  the winners' prediction for every scan (`normal_guidance.evaluation.predictions`)
    report.json          versions, times, scores: written last, so a folder that has it is complete

Every file is written atomically: whenever the process dies, the same command resumes from the folder.
"""

from __future__ import annotations

import hashlib
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from normal_guidance.errors import UserError
from normal_guidance.files import is_draft, read_json, write_json
from normal_guidance.folders import LOCK, difference, lock_folder
from normal_guidance.training.checkpoint import SAVE_EPOCHS, SAVE_SECONDS, StateFile
from normal_guidance.training.config import L1_STRENGTHS, LEARNING_RATES, Config, departures
from normal_guidance.training.execution import Execution
from normal_guidance.training.selection import group_of

FORMAT = 1
"""Version of the layout on disk; a folder of another version is refused."""

CONFIG, STATE, REPORT = "config.json", "state.safetensors", "report.json"
HISTORY_TABLE, PREDICTION_TABLE = "history.parquet", "predictions.parquet"
WINNERS = ("best.json", "best.safetensors", "best-*.json", "best-*.safetensors")


def identity_of(configs: Sequence[Config], execution: Execution, data: Mapping[str, Any]) -> dict[str, Any]:
    """What identifies a run, as config.json holds it; a run started again with anything else is refused."""
    return {
        "format": FORMAT,
        "data": dict(data),
        "execution": {
            "device": torch.device(execution.device).type,
            "precision": execution.precision,
            "engine": "slotted" if execution.slotted else "packed",
            "chunk": execution.chunk,
        },
        "configs": [config.as_json() for config in configs],
        "departures": {**departures(configs[0]), **_other_grid(configs)},
    }


def _other_grid(configs: Sequence[Config]) -> dict[str, Any]:
    """The axes whose values differ from the paper's, and missing pairs; guidance counts for guided methods only."""
    paper: dict[str, Sequence[Any]] = {"lr": LEARNING_RATES, "l1": L1_STRENGTHS}
    if configs[0].spec.regularizer is not None:
        paper["guidance_weight"] = (1.0,)
    if configs[0].spec.guided:
        paper["divergence"] = ("forward_kl",)
    values = {axis: sorted({getattr(config, axis) for config in configs}) for axis in paper}
    other: dict[str, Any] = {axis: found for axis, found in values.items() if found != sorted(paper[axis])}
    pairs: dict[tuple[object, ...], set[tuple[float, float]]] = defaultdict(set)
    for config in configs:
        pairs[group_of(config)].add((config.l1, config.lr))
    least, full = min(map(len, pairs.values())), len(values["lr"]) * len(values["l1"])
    return other | ({"pairs": f"{least} of {full} (l1, lr)"} if least < full else {})


@dataclass(frozen=True, eq=False)
class RunFolder:
    """A locked folder whose config.json holds `identity`."""

    path: Path
    identity: Mapping[str, Any]

    @property
    def complete(self) -> bool:
        return (self.path / REPORT).exists()

    def state(
        self,
        save_epochs: int = SAVE_EPOCHS,
        save_seconds: float = SAVE_SECONDS,
        environment: Mapping[str, Any] | None = None,
    ) -> StateFile:
        """The file of the sweep's state; `environment` is that of this start."""
        run = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        return StateFile(self.path / STATE, run, save_epochs, save_seconds, environment)


@contextmanager
def open_run(folder: str | Path, identity: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Lock a folder for one run, new or begun before; a folder of another run is refused."""
    path = Path(folder)
    with lock_folder(path):
        _claim(path, identity)
        run = RunFolder(path, identity)
        if run.complete:
            (path / STATE).unlink(missing_ok=True)  # left over from a run killed between its report and this step
        yield run


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Write the identity, once; a run that has saved something is only compared with it."""
    if not is_begun(folder, identity):
        # Without a state or a report, results cannot be assigned to a run.
        forget(folder, *WINNERS, HISTORY_TABLE, PREDICTION_TABLE)
        write_json(folder / CONFIG, identity)


def is_begun(folder: str | Path, identity: Mapping[str, Any]) -> bool:
    """Whether the folder holds something of this run; a folder of another run is refused.  Nothing is written.

    `identity` may be a part of what `identity_of` makes: only that part is compared.
    """
    folder = Path(folder)
    names, path = _names_in(folder), folder / CONFIG
    if CONFIG not in names:
        if others := sorted(name for name in names if name != LOCK and not is_draft(Path(name))):
            raise UserError(f"{folder} holds {others[0]!r} but no {CONFIG}, so it is not a run; choose another folder")
        return False
    before = read_json(path)
    if before.get("format") != FORMAT:
        raise UserError(
            f"{path}: format {before.get('format')!r:.60}, but this version of normal-guidance reads format {FORMAT}; "
            "install the version that began the run, or choose another folder"
        )
    begun = not names.isdisjoint((STATE, REPORT))
    if begun:
        _compare(folder, before, identity)
    return begun


def _names_in(folder: Path) -> set[str]:
    try:
        return {file.name for file in folder.iterdir()}
    except (FileNotFoundError, NotADirectoryError):
        return set()
    except OSError as error:
        raise UserError(f"{folder} cannot be read ({error.strerror}); choose another folder") from error


def forget(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()


def _compare(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    found = difference({name: before.get(name) for name in now}, now)
    if found:
        raise UserError(
            f"{folder} holds another run: {found}; give another folder (--out), or the data and options that the run "
            "began with"
        )
