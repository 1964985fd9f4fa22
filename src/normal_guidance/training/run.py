"""A run's folder: what was asked for, how far it got, and what came of it.

    lock                 held by the one process that may write
    config.json          what the run is: configurations, execution, fingerprints of the data
    state.safetensors    how far it got; gone when the run is complete
    history.parquet      every configuration and epoch
    best.safetensors     the winner's weights; with several groups of configurations, one file for each
    best.json            the configuration that rebuilds its model: `load_winner`
    predictions.parquet  what the winners say about every scan (`normal_guidance.evaluation.predictions`)
    report.json          versions, times, scores: written last, so a folder that has it is complete

Every file is written atomically: whenever the process dies, the folder is one that the same command goes on from.
"""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import socket
import time
import zlib
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import pyarrow as pa
import pyarrow.parquet as pq
import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn

from normal_guidance.core.models import METHODS
from normal_guidance.errors import UserError
from normal_guidance.files import write_atomically
from normal_guidance.training.config import AXES, L1_STRENGTHS, LEARNING_RATES, Config, departures
from normal_guidance.training.selection import group_of
from normal_guidance.training.stack import initial_model
from normal_guidance.training.state import HISTORY
from normal_guidance.training.sweep import Execution, Sweep

FORMAT = 1
"""Version of the layout on disk; a folder of another version is refused."""

SAVE_EPOCHS, SAVE_SECONDS = 50, 300.0
"""The state is saved after so many epochs or seconds, whichever comes first.

It is looked at after an epoch: a killed run loses that much at most, plus the epoch being trained.
"""

LOCK, CONFIG, STATE, REPORT = "lock", "config.json", "state.safetensors", "report.json"
HISTORY_TABLE, PREDICTION_TABLE = "history.parquet", "predictions.parquet"
WINNERS = ("best.json", "best.safetensors", "best-*.json", "best-*.safetensors")

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.float32: "F32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int64: "I64",
    torch.uint8: "U8",
}
"""What the header of a safetensors file calls the dtypes that a state or a model may have."""


# ----------------------------------------------------------------------------------------------------
# Whose folder it is
# ----------------------------------------------------------------------------------------------------


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a folder, which is made if need be; the lock dies with the process.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder, lock_folder(Path(folder)):
        ...     with lock_folder(Path(folder)):
        ...         pass
        Traceback (most recent call last):
        normal_guidance.errors.UserError: /... is being written by process ... on ...; wait until it ends, or choose
        another folder
    """
    make_folder(folder)
    with _held(folder):
        yield


def _held(folder: Path) -> TextIO:
    """The open file that holds the lock."""
    try:
        file = (folder / LOCK).open("a+", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{folder} cannot be written ({error.strerror}); choose another folder") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except OSError as error:
        with file:
            if not isinstance(error, BlockingIOError):
                raise UserError(f"{folder} cannot be locked ({error.strerror}); choose another folder") from error
            file.seek(0)
            holder = file.read() or "another process"
            raise UserError(
                f"{folder} is being written by {holder}; wait until it ends, or choose another folder"
            ) from error
    return file


def make_folder(folder: Path) -> None:
    """Makes a folder and those above it; where that cannot be, the user chose the wrong one.

    Example:
        >>> make_folder(Path("/dev/null/run"))
        Traceback (most recent call last):
        normal_guidance.errors.UserError: /dev/null/run is, or lies under, a file; name a folder
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{folder} is, or lies under, a file; name a folder") from error
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}); choose another folder") from error


def identity_of(configs: Sequence[Config], execution: Execution, data: Mapping[str, Any]) -> dict[str, Any]:
    """What makes a run this run, as config.json holds it: started again with anything else, it is refused.

    Example:
        >>> identity = identity_of([Config("ng", epochs=5)], Execution(), {"train": "8e1f"})
        >>> identity["execution"]
        {'device': 'cpu', 'precision': 'float32', 'engine': 'packed', 'chunk': None}
        >>> identity["departures"]
        {'epochs': 5, 'lr': [0.01], 'l1': [0.0]}
    """
    return {
        "format": FORMAT,
        "data": dict(data),
        "execution": {
            "device": torch.device(execution.device).type,
            "precision": execution.precision,
            "engine": "slotted" if execution.slotted else "packed",
            "chunk": execution.chunk,
        },
        "configs": [asdict(config) for config in configs],
        "departures": {**departures(configs[0]), **_other_grid(configs)},
    }


def _other_grid(configs: Sequence[Config]) -> dict[str, Any]:
    """The axes whose values are not the paper's, and whether pairs are missing; guidance counts where there is any."""
    paper: dict[str, Sequence[Any]] = {"lr": LEARNING_RATES, "l1": L1_STRENGTHS}
    if METHODS[configs[0].method].guided:
        paper |= {"guidance_weight": (1.0,), "divergence": ("forward_kl",)}
    values = {axis: sorted({getattr(config, axis) for config in configs}) for axis in paper}
    other: dict[str, Any] = {axis: found for axis, found in values.items() if found != sorted(paper[axis])}
    pairs: dict[tuple[object, ...], set[tuple[float, float]]] = defaultdict(set)
    for config in configs:
        pairs[group_of(config)].add((config.l1, config.lr))
    least, full = min(map(len, pairs.values())), len(values["lr"]) * len(values["l1"])
    return other | ({"pairs": f"{least} of {full} (l1, lr)"} if least < full else {})


@dataclass(frozen=True, eq=False)
class RunFolder:
    """A locked folder whose config.json says what `identity` says."""

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
        """Where the sweep keeps its state; `environment` is that of this start."""
        run = hashlib.sha256(json.dumps(self.identity, sort_keys=True).encode()).hexdigest()
        return StateFile(self.path / STATE, run, save_epochs, save_seconds, environment)


@contextmanager
def open_run(folder: str | Path, identity: Mapping[str, Any]) -> Iterator[RunFolder]:
    """Locks a folder for one run, new or begun before; any other run in it is refused.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with open_run(folder, identity_of([Config("ng")], Execution(), {})) as run:
        ...         sorted(file.name for file in run.path.iterdir()), run.complete
        (['config.json', 'lock'], False)
    """
    path = Path(folder)
    with lock_folder(path):
        _clean(path)
        _claim(path, identity)
        run = RunFolder(path, identity)
        if run.complete:
            (path / STATE).unlink(missing_ok=True)  # a run killed after its report, its last act but one
        yield run


def _clean(folder: Path) -> None:
    """What a killed process had begun to write: a state may be gigabytes, and nobody will ever finish it."""
    _forget(folder, ".*.partial")


def _claim(folder: Path, identity: Mapping[str, Any]) -> None:
    """Enters what the run is, once; a run that has saved something is only compared."""
    if not is_begun(folder, identity):
        # Results whose state and report are gone: nobody could tell which run they are of.
        _forget(folder, *WINNERS, HISTORY_TABLE, PREDICTION_TABLE)
        write_json(folder / CONFIG, identity)


def is_begun(folder: str | Path, identity: Mapping[str, Any]) -> bool:
    """Whether the folder holds something of this run; another run in it is refused, and nothing is written.

    `identity` may be a part of what `identity_of` makes: only that is compared.

    Example:
        >>> is_begun("nowhere", identity_of([Config("ng")], Execution(), {}))
        False
    """
    folder = Path(folder)
    names, path = _names_in(folder), folder / CONFIG
    if CONFIG not in names:
        if others := sorted(name for name in names if name != LOCK and not name.endswith(".partial")):
            raise UserError(f"{folder} holds {others[0]!r} but no {CONFIG}, so it is no run; choose another folder")
        return False
    before = read_json(path)
    if before.get("format") != FORMAT:
        raise UserError(
            f"{path}: format {before.get('format')!r}, but this version of normal-guidance reads format {FORMAT}; "
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


def _forget(folder: Path, *patterns: str) -> None:
    for pattern in patterns:
        for file in folder.glob(pattern):
            file.unlink()


def _compare(folder: Path, before: Mapping[str, Any], now: Mapping[str, Any]) -> None:
    old = dict(_leaves({name: before.get(name) for name in now}))
    new = dict(_leaves(json.loads(json.dumps(now))))
    missing = object()
    different = [name for name in (old | new) if old.get(name, missing) != new.get(name, missing)]
    if different:
        name = different[0]
        more = f" ({len(different) - 1} more differences)" if len(different) > 1 else ""
        raise UserError(
            f"{folder} holds another run: {name} was {old.get(name, 'absent')}, now it is {new.get(name, 'absent')}"
            f"{more}; give another folder (--out), or the data and options that the run began with"
        )


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """("configs.0.lr", 0.1) and so on."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    write_atomically(path, json.dumps(content, indent=2).encode())


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object of a run; anything else is damage."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy the run again, or delete its folder") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: no JSON object; copy the run again, or delete its folder")
    return content


# ----------------------------------------------------------------------------------------------------
# How far it got
# ----------------------------------------------------------------------------------------------------


class StateFile:
    """The sweep's `Checkpoint` in a file, which belongs to one run and says how long and where that has run so far.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     state = StateFile(Path(folder, "state.safetensors"), "run A")
        ...     state.save({"history": torch.zeros(2, 0)}, {"epoch": 7})
        ...     tensors, about = state.load()
        ...     tensors["history"].shape, about, state.resumed
        (torch.Size([2, 0]), {'epoch': 7}, 1)
    """

    def __init__(
        self,
        path: Path,
        run: str,
        save_epochs: int = SAVE_EPOCHS,
        save_seconds: float = SAVE_SECONDS,
        environment: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("save_epochs", save_epochs), ("save_seconds", save_seconds)):
            if not value > 0:
                raise UserError(f"{name} is {value}; it must be above 0")
        self.path, self.run = path, run
        self.save_epochs, self.save_seconds = save_epochs, save_seconds
        self.resumed = 0
        """How often the run went on from a saved state."""
        self.environments = [] if environment is None else [dict(environment)]
        """The distinct ones of all starts that the state comes from, this one last unless it was among them."""
        self._seconds_before, self._begin = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """That the run has taken, what was lost when it was killed left out."""
        return self._seconds_before + time.monotonic() - self._begin

    def due(self, epochs: int, seconds: float) -> bool:
        return epochs >= self.save_epochs or seconds >= self.save_seconds

    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        kept = {
            "run": self.run,
            "crc32": _checksum(tensors),
            "seconds": self.seconds,
            "resumed": self.resumed,
            "environments": self.environments,
            "sweep": dict(about),
        }
        _write_tensors(self.path, tensors, kept)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not self.path.exists():
            return None
        tensors, kept = _read_tensors(self.path)
        if not isinstance(kept, dict) or kept.get("run") != self.run:
            raise UserError(f"{self.path} is of another run; {_AFRESH}")
        if missing := [name for name in ("crc32", "seconds", "resumed", "environments", "sweep") if name not in kept]:
            raise UserError(f"{self.path} does not say {missing[0]!r}: an older version wrote it; {_AFRESH}")
        if kept["crc32"] != _checksum(tensors):
            raise UserError(f"{self.path} is damaged (its checksum is wrong); {_AFRESH}")
        self.resumed = kept["resumed"] + 1
        before = kept["environments"]
        self.environments = [*before, *(one for one in self.environments if one not in before)]
        self._seconds_before, self._begin = kept["seconds"], time.monotonic()
        return tensors, kept["sweep"]


_AFRESH = "copy it again, or delete it to train from the start"


def _checksum(tensors: Mapping[str, Tensor]) -> int:
    """Of all names and numbers.  safetensors notices a cut file, but not a changed number."""
    total = 0
    for name in sorted(tensors):
        total = zlib.crc32(_raw(tensors[name]), zlib.crc32(name.encode(), total))
    return total


def _write_tensors(path: Path, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
    """A safetensors file, written without another copy of what may be gigabytes.

    The library's `save` makes that copy, and its `save_file` writes to a file of its own, which we could not sync.
    """
    # Wide numbers first, as the library does it: every tensor then starts at a multiple of its numbers' size.
    names = sorted(tensors, key=lambda name: (-tensors[name].itemsize, name))
    header: dict[str, Any] = {"__metadata__": {"about": json.dumps(about)}}
    end = 0
    for name in names:
        tensor, begin = tensors[name], end
        end += tensor.numel() * tensor.itemsize
        header[name] = {"dtype": DTYPE_NAMES[tensor.dtype], "shape": [*tensor.shape], "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    text = text.ljust(-(-len(text) // 8) * 8)

    def write(file: BinaryIO) -> None:
        file.write(len(text).to_bytes(8, "little") + text)
        for name in names:
            file.write(_raw(tensors[name]))

    write_atomically(path, write)


def _raw(tensor: Tensor) -> memoryview:
    """A tensor's bytes, not copied where it lies on the host in one piece."""
    return tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().data


def _read_tensors(path: Path) -> tuple[dict[str, Tensor], Any]:
    """The tensors, mapped to memory, and what the file says about them."""
    try:
        with safe_open(path, framework="pt") as file:
            about = json.loads((file.metadata() or {})["about"])
            return {name: file.get_tensor(name) for name in file.keys()}, about  # noqa: SIM118 (no mapping)
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        raise UserError(f"{path} is damaged or none of ours ({error}); {_AFRESH}") from error


# ----------------------------------------------------------------------------------------------------
# What came of it
# ----------------------------------------------------------------------------------------------------


def diverged(result: Sweep) -> int:
    """Configurations whose loss or scores left the numbers, the last epoch's scores included."""
    lost = ~result.history.isfinite().all(2)
    trained = torch.arange(1, len(lost) + 1)[:, None] <= result.trained
    return int((trained & lost).any(0).sum())


def history_table(result: Sweep) -> pa.Table:
    """One row for each configuration and epoch that was trained.

    Example:
        >>> from normal_guidance.data.synthetic import shifted_mean
        >>> from normal_guidance.training.sweep import sweep
        >>> scans = shifted_mean(16, seed=1, features=8)
        >>> table = history_table(sweep([Config("mean", epochs=3, batch_size=8)], scans, scans))
        >>> table.num_rows, table.column_names[-5:]
        (3, ['epoch', 'loss', 'train_auroc', 'val_auroc', 'selected'])
    """
    epochs, count, _ = result.history.shape
    number, epoch = torch.meshgrid(torch.arange(count), torch.arange(1, epochs + 1), indexing="ij")
    trained = epoch <= result.trained[:, None]
    number, epoch = number[trained], epoch[trained]
    axes = {axis: pa.array([getattr(config, axis) for config in result.configs]) for axis in AXES}
    numbers = result.history[epoch - 1, number].T.contiguous().numpy()
    return pa.table(
        {
            "config": number.numpy(),
            **{axis: values.take(pa.array(number.numpy())) for axis, values in axes.items()},
            "epoch": epoch.numpy(),
            **dict(zip(HISTORY, numbers, strict=True)),
            "selected": (epoch == result.best_epoch[number]).numpy(),
        }
    )


def group_names(configs: Sequence[Config]) -> dict[tuple[object, ...], str]:
    """A name for each group that has a winner of its own, fit for a file; empty where there is only one group.

    Example:
        >>> list(group_names([Config("ng", divergence=name) for name in ("forward_kl", "reverse_kl")]).values())
        ['forward_kl-lambda1.0-seed0', 'reverse_kl-lambda1.0-seed0']
    """
    groups = {group_of(config): config for config in configs}
    if len(groups) == 1:
        return dict.fromkeys(groups, "")
    return {group: f"{c.divergence}-lambda{c.guidance_weight}-seed{c.seed}" for group, c in groups.items()}


def winner_file(group: str) -> str:
    """Name of a winner's two files, without .safetensors and .json."""
    return f"best-{group}" if group else "best"


def write_history(folder: Path, result: Sweep) -> None:
    """Writes history.parquet."""
    write_table(folder / HISTORY_TABLE, history_table(result))


def write_table(path: Path, table: pa.Table) -> None:
    write_atomically(path, lambda file: pq.write_table(table, file))


def write_winners(folder: Path, result: Sweep, features: int) -> None:
    """Writes the winners' weights and what `load_winner` needs to know."""
    _forget(folder, *WINNERS)  # a start that was killed here may have had others: CUDA does not promise the same bits
    names = group_names(result.configs)
    for winner in result.winners:
        file = winner_file(names[group_of(winner.config)])
        about = {
            "format": FORMAT,
            "config": asdict(winner.config),
            "features": features,
            "number": winner.number,
            "epoch": winner.epoch,
            "val_auroc": winner.val_auroc,
        }
        _write_tensors(folder / f"{file}.safetensors", winner.weights, about)
        write_json(folder / f"{file}.json", about)


def winner_model(config: Config, features: int, weights: Mapping[str, Tensor]) -> nn.Module:
    """The plain model with these weights, in their dtype, ready to predict."""
    dtype = next(iter(weights.values())).dtype
    model = initial_model(config, features).to(dtype)
    model.load_state_dict(dict(weights))
    return model.eval()


def load_winner(folder: str | Path, group: str = "") -> nn.Module:
    """The winner of a run as a plain model: `group` names which one, where the run has several.

    Example:
        >>> load_winner("nowhere")
        Traceback (most recent call last):
        normal_guidance.errors.UserError: nowhere is no complete run: report.json is missing; give the folder of one
    """
    folder = Path(folder)
    if not (folder / REPORT).is_file():
        raise UserError(f"{folder} is no complete run: {REPORT} is missing; give the folder of one")
    groups = _winning_groups(folder / REPORT)
    if group not in groups:
        action = f"choose a group: {', '.join(groups)}" if any(groups) else "leave the group out"
        nothing = "it selected no epoch; give a run that did"
        raise UserError(f"{folder} has no winner {group or 'without a group'!r}: {action if groups else nothing}")
    path = folder / f"{winner_file(group)}.json"
    about = read_json(path)
    weights, _ = _read_tensors(path.with_suffix(".safetensors"))
    try:
        return winner_model(Config(**about["config"]), about["features"], weights)
    except (KeyError, TypeError, RuntimeError, StopIteration) as error:
        raise UserError(f"{path} and its weights do not fit together ({error}); copy the run again") from error


def _winning_groups(path: Path) -> list[str]:
    """Groups that have a winner, by the report: files of others may lie beside it."""
    try:
        return [str(winner["group"]) for winner in read_json(path)["winners"]]
    except (KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}); copy the run again") from error
