"""Train all configurations of a grid at once, and keep the best.

    configurations -> chunks that fit the device -> an engine trains a chunk, epoch by epoch
                   -> AUROC of all configurations after every epoch -> the best epoch of each, kept on the device
                   -> the best configuration

The results equal those of `training.loop`, one configuration at a time; `tests/training/test_sweep.py` checks this.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.records import Between, ContentError, read_as
from normal_guidance.base.system import is_out_of_memory
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.core.bags import UNKNOWN, ScanSet
from normal_guidance.sweep.batches import check_batch_size, check_scans_like, draw_orders, pool_scans, slice_labels_of
from normal_guidance.sweep.config import Config, check_together
from normal_guidance.sweep.engine import Engine, matrix_precision
from normal_guidance.sweep.execution import (
    Compiler,
    Execution,
    choose_engine,
    current_device,
    fitting_chunk,
    release_memory,
)
from normal_guidance.sweep.stack import Parameters

# The file from which a killed run resumes: the sweep's state with a seal, bound to one run.


SAVE_EPOCHS, SAVE_SECONDS = 50, 300.0
"""The state is saved after this many epochs or seconds, whichever comes first.

The time is checked after each epoch, so a killed run loses at most that much, plus the epoch being trained.
"""


class StateFile:
    """A `Checkpoint` in a file that belongs to one run and records its time and environments so far."""

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
        """The number of times that the run resumed from a saved state."""
        self.environments = [] if environment is None else [dict(environment)]
        """The distinct environments of all starts of this run, in order of their first start."""
        self._seconds_before, self._begin = 0.0, time.monotonic()

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, without time lost when it was killed."""
        return self._seconds_before + time.monotonic() - self._begin

    def due(self, epochs: int, seconds: float) -> bool:
        return epochs >= self.save_epochs or seconds >= self.save_seconds

    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        kept = {
            "run": self.run,
            "seconds": self.seconds,
            "resumed": self.resumed,
            "environments": self.environments,
            "sweep": dict(about),
        }
        write_tensors(self.path, tensors, kept)

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        if not self.path.exists():
            return None
        tensors, kept = read_tensors(self.path, _AFRESH)
        if not isinstance(kept, dict) or kept.get("run") != self.run:
            raise UserError(f"{self.path} belongs to another run; {_AFRESH}")
        try:
            before = read_as(_Kept, kept)
        except ContentError as error:
            raise UserError(f"{self.path} is damaged, or an older version wrote it: {error}; {_AFRESH}") from error
        self.resumed = before.resumed + 1
        self.environments = [
            *before.environments,
            *(one for one in self.environments if one not in before.environments),
        ]
        self._seconds_before, self._begin = before.seconds, time.monotonic()
        return tensors, before.sweep


@dataclass(frozen=True)
class _Kept:
    """What is saved beside the tensors."""

    run: str
    seconds: Annotated[float, Between(0.0)]
    resumed: Annotated[int, Between(0.0)]
    environments: list[dict[str, Any]]
    sweep: dict[str, Any]
    """The sweep's own part, which the sweep reads."""


_AFRESH = "copy it again, or delete it to train from the start"


# Selection of the best epoch and the best configuration, by the scan labels of the validation set alone.
# Only the supervised reference is selected by slice labels: its engine measures AUROC on the validation slices.


def group_of(config: Config) -> tuple[object, ...]:
    """The values that selection keeps apart: it picks the best lr and l1 within each group."""
    return (config.divergence, config.guidance_weight, config.seed)


@dataclass(frozen=True, eq=False)
class Winner:
    """The best epoch of the best configuration of a group."""

    config: Config
    number: int
    """The number of the configuration in the sweep."""
    epoch: int
    val_auroc: float
    val_loss: float
    weights: Mapping[str, Tensor]

    def rank(self) -> tuple[float, float, int]:
        """The higher, the better; by the paper's rule (`Config.train_above_val`) the first of equals is the best."""
        loss = 0.0 if self.config.train_above_val else self.val_loss
        return (self.val_auroc, -loss, -self.number)


class Selection:
    """The best epoch of each configuration so far, its weights included, on the device.

    The best has the highest validation AUROC, and of equals the lowest validation loss.  With `train_above_val`, the
    paper's rule, only epochs whose training AUROC is above their validation AUROC count, and of equals the first.

    Patience counts from the last epoch whose validation AUROC was higher than that of the selected one or of all before
    it. So a configuration that still learns goes on while its training AUROC is below its validation AUROC, and one
    whose AUROC stays at its highest stops, although its loss may still fall.
    """

    def __init__(self, parameters: Parameters, train_above_val: bool = False, patience: int | None = None) -> None:
        first = next(iter(parameters.values()))
        count, device = len(first), first.device
        self.train_above_val, self.patience = train_above_val, patience
        self.epoch = torch.zeros(count, dtype=torch.int64, device=device)
        self.val = torch.full((count,), -math.inf, dtype=torch.float64, device=device)
        self.loss = torch.full_like(self.val, math.inf)
        self.risen, self.peak = self.epoch.clone(), self.val.clone()
        self.weights = {name: torch.zeros_like(p) for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, epoch: int, train: Tensor, val: Tensor, loss: Tensor, parameters: Parameters) -> None:
        """Keep this epoch where it is better, never one of NaN; configurations out of patience stop selecting."""
        rises: Bool[Tensor, "configs"] = val > self.val
        higher: Bool[Tensor, "configs"] = val > self.peak
        better = rises | ((val == self.val) & (loss < self.loss))
        if self.train_above_val:
            better = rises = rises & (train > val)
        if self.patience is not None:
            patient = epoch - self.risen <= self.patience
            better, rises, higher = better & patient, rises & patient, higher & patient
        self.risen = torch.where(rises | higher, epoch, self.risen)
        self.peak = torch.where(higher, val, self.peak)
        self.epoch = torch.where(better, epoch, self.epoch)
        self.val = torch.where(better, val, self.val)
        self.loss = torch.where(better, loss, self.loss)
        for name, kept in self.weights.items():
            chosen = better.reshape(-1, *[1] * (kept.ndim - 1))
            torch.where(chosen, parameters[name], kept, out=kept)

    def trained(self, epoch: int) -> Int64[Tensor, "configs"]:
        """The number of epochs that count for each configuration after this epoch: those before its patience ended.

        A configuration out of patience is trained on with its chunk, but its later epochs change nothing.
        """
        if self.patience is None:
            return torch.full_like(self.epoch, epoch)
        return (self.risen + self.patience).clamp_max(epoch)

    def over(self, epoch: int) -> list[bool]:
        """Which configurations have run out of patience."""
        if self.patience is None:
            return [False] * len(self.epoch)
        return (epoch - self.risen >= self.patience).tolist()


# The state of a sweep after an epoch: everything that the remaining epochs depend on, so that a killed run resumes.


HISTORY = ("loss", "train_auroc", "val_auroc", "val_loss")
"""The numbers recorded for every configuration after every epoch."""


@dataclass(frozen=True)
class _SavedWinner:
    """What a winner's weights are saved with."""

    number: Annotated[int, Between(0.0)]
    epoch: Annotated[int, Between(1.0)]
    val_auroc: Annotated[float, Between(0.0, 1.0)]
    val_loss: float


@dataclass(frozen=True)
class _SavedChunk:
    """What a chunk's tensors are saved with."""

    members: tuple[Annotated[int, Between(0.0)], ...]
    epoch: Annotated[int, Between(0.0)]


@dataclass(frozen=True)
class _Saved:
    """What a sweep's tensors are saved with."""

    pending: tuple[_SavedChunk, ...]
    chunks: tuple[Annotated[int, Between(1.0)], ...]
    winners: tuple[_SavedWinner, ...]
    seconds: dict[str, Annotated[float, Between(0.0)]]


@runtime_checkable
class Checkpoint(Protocol):
    """Storage for the state of a sweep, from which a killed run resumes."""

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None: ...
    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None: ...
    def due(self, epochs: int, seconds: float) -> bool:
        """Whether to save now, given the epochs and seconds since the last time."""
        ...


@dataclass(frozen=True, eq=False)
class Chunk:
    """Configurations that are trained together, and their progress."""

    members: tuple[int, ...]
    """Their numbers in the sweep."""
    epoch: int = 0
    training: Mapping[str, Tensor] = field(default_factory=dict)
    """The tensors that `collect` gathered after that epoch."""

    def part(self, places: Sequence[int]) -> Chunk:
        """A chunk of some members at the same epoch; configurations are independent, so each keeps all it needs."""
        index = torch.tensor(places)
        training = {
            name: tensor if name == "generator" else tensor[:, index] if name == "history" else tensor[index]
            for name, tensor in self.training.items()
        }
        return Chunk(tuple(self.members[place] for place in places), self.epoch, training)

    def halves(self) -> tuple[Chunk, Chunk]:
        cut = (len(self.members) + 1) // 2
        return self.part(range(cut)), self.part(range(cut, len(self.members)))


@dataclass(frozen=True, eq=False)
class Finished:
    """The results of configurations that are trained to their end."""

    members: tuple[int, ...]
    history: Tensor
    best_epoch: Tensor
    trained: Tensor
    best_val: Tensor
    best_loss: Tensor
    best: Parameters


@dataclass(frozen=True, eq=False)
class SweepState:
    """A sweep at the end of an epoch: the results of finished configurations, and the chunks still to train."""

    configs: tuple[Config, ...]
    pending: tuple[Chunk, ...]
    """The present one first."""
    history: Tensor
    best_epoch: Tensor
    trained: Tensor
    winners: tuple[Winner, ...] = ()
    chunks: tuple[int, ...] = ()
    """The number of configurations that finished together, chunk by chunk."""

    @classmethod
    def begin(cls, configs: Sequence[Config], chunk: int | None) -> SweepState:
        """The state before training, in chunks of at most `chunk` configurations."""
        count = len(configs)
        pending = [Chunk(tuple(part.tolist())) for part in torch.arange(count).split(chunk or count)]
        unknown = torch.full((configs[0].epochs, count, len(HISTORY)), math.nan, dtype=torch.float64)
        none = torch.zeros(count, dtype=torch.int64)
        return cls(tuple(configs), tuple(pending), history=unknown, best_epoch=none, trained=none)

    def restored(self, tensors: Mapping[str, Tensor], saved: _Saved) -> SweepState:
        """The state from which `tensors` and `saved` were made."""
        trained = [number for chunk in saved.pending for number in chunk.members]
        for number in (*trained, *(winner.number for winner in saved.winners)):
            if number >= len(self.configs):
                raise ContentError(f"configuration {number} is unknown; there are {len(self.configs)}")
        if len(set(trained)) < len(trained):
            raise ContentError("a configuration is in two chunks")
        winners = tuple(
            Winner(config=self.configs[one.number], weights=_part(tensors, f"winner{i}."), **asdict(one))
            for i, one in enumerate(saved.winners)
        )
        pending = tuple(
            Chunk(one.members, one.epoch, _part(tensors, f"chunk{i}.")) for i, one in enumerate(saved.pending)
        )
        return replace(
            self,
            pending=pending,
            chunks=saved.chunks,
            winners=winners,
            history=_like(tensors, "history", self.history),
            best_epoch=_like(tensors, "best_epoch", self.best_epoch),
            trained=_like(tensors, "trained", self.trained),
        )

    def tensors(self) -> dict[str, Tensor]:
        """The tensors to save, beside what `about` says."""
        parts = {"history": self.history, "best_epoch": self.best_epoch, "trained": self.trained}
        for i, winner in enumerate(self.winners):
            parts |= _named(f"winner{i}.", winner.weights)
        for i, chunk in enumerate(self.pending):
            parts |= _named(f"chunk{i}.", chunk.training)
        return parts

    def about(self) -> dict[str, Any]:
        """The JSON values to save beside the tensors."""
        names = [one.name for one in fields(_SavedWinner)]
        winners = [{name: getattr(winner, name) for name in names} for winner in self.winners]
        pending = [{"members": [*chunk.members], "epoch": chunk.epoch} for chunk in self.pending]
        return {"pending": pending, "chunks": [*self.chunks], "winners": winners}

    @property
    def done(self) -> int:
        """The number of finished configurations."""
        return len(self.configs) - sum(len(chunk.members) for chunk in self.pending)

    def after(self, epoch: int, training: Mapping[str, Tensor]) -> SweepState:
        """The state after an epoch of the present chunk."""
        return replace(self, pending=(replace(self.pending[0], epoch=epoch, training=training), *self.pending[1:]))

    def halved(self, error: Exception) -> SweepState:
        """The state with the present chunk cut in two, because it did not fit the memory."""
        if len(self.pending[0].members) == 1:
            raise UserError(
                "one configuration alone does not fit the device's memory; use a smaller batch size or another device"
            ) from error
        return replace(self, pending=(*self.pending[0].halves(), *self.pending[1:]))

    def finish(self, finished: Finished, rest: Chunk | None) -> SweepState:
        """The state after some members of the present chunk finished; the rest of it goes on."""
        members = torch.tensor(finished.members)
        winners = {group_of(winner.config): winner for winner in self.winners}
        for place, number in enumerate(finished.members):
            if not finished.best_epoch[place]:
                continue
            config = self.configs[number]
            candidate = Winner(
                config=config,
                number=number,
                epoch=int(finished.best_epoch[place]),
                val_auroc=finished.best_val[place].item(),
                val_loss=finished.best_loss[place].item(),
                weights={name: stacked[place].clone() for name, stacked in finished.best.items()},
            )
            group = group_of(config)
            winners[group] = max((candidate, winners.get(group, candidate)), key=Winner.rank)
        return replace(
            self,
            pending=(*([] if rest is None else [rest]), *self.pending[1:]),
            chunks=(*self.chunks, len(members)),
            history=self.history.index_copy(1, members, finished.history),
            best_epoch=self.best_epoch.index_copy(0, members, finished.best_epoch),
            trained=self.trained.index_copy(0, members, finished.trained),
            winners=tuple(sorted(winners.values(), key=lambda winner: winner.number)),
        )


class Keeper:
    """Saves the state when it is due, and adds up the time spent, over all starts of a run."""

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.checkpoint = checkpoint
        self.seconds = {"training": 0.0, "evaluation": 0.0, "saving": 0.0}
        self.epochs, self.at = 0, time.monotonic()
        self.last: SweepState | None = None
        """The last saved state, from which a chunk that no longer fits the memory goes on."""

    def resume(self, fresh: SweepState) -> SweepState:
        """The saved state of the run, or the fresh one if nothing was saved."""
        loaded = None if self.checkpoint is None else self.checkpoint.load()
        if loaded is None:
            return fresh
        tensors, about = loaded
        try:
            saved = read_as(_Saved, about)
            self.last = fresh.restored(tensors, saved)
        except ContentError as error:
            raise _unusable(error) from error
        self.seconds |= saved.seconds
        return self.last

    def is_due(self) -> bool:
        """Whether to save now; must be called exactly once per epoch."""
        self.epochs += 1
        return self.checkpoint is not None and self.checkpoint.due(self.epochs, time.monotonic() - self.at)

    def save(self, state: SweepState) -> None:
        if self.checkpoint is None:
            return
        begin, self.last = time.monotonic(), state
        self.checkpoint.save(state.tensors(), {**state.about(), "seconds": self.seconds})
        self.epochs, self.at = 0, time.monotonic()
        self.seconds["saving"] += self.at - begin


def _live(engine: Engine, selection: Selection, history: Tensor) -> dict[str, Tensor]:
    """The tensors that training changes, by the names under which they are saved."""
    return {
        **_named("parameters.", engine.parameters),
        **_named("momenta.", engine.momenta),
        **_named("best.", selection.weights),
        "best_epoch": selection.epoch,
        "best_val": selection.val,
        "best_loss": selection.loss,
        "risen": selection.risen,
        "peak": selection.peak,
        "history": history,
    }


def collect(engine: Engine, selection: Selection, history: Tensor, generator: Tensor) -> dict[str, Tensor]:
    """Everything that the remaining epochs depend on, copied to the host because training changes it in place."""
    parts = {**_live(engine, selection, history), "generator": generator}
    return {name: tensor.detach().to("cpu", copy=True) for name, tensor in parts.items()}


@torch.no_grad()
def restore(engine: Engine, selection: Selection, history: Tensor, saved: Mapping[str, Tensor]) -> None:
    """The inverse of `collect`, except for the generator, which the caller restores."""
    try:
        for name, tensor in _live(engine, selection, history).items():
            tensor.copy_(_like(saved, name, tensor))
    except ContentError as error:
        raise _unusable(error) from error
    engine.refresh()


def _like(saved: Mapping[str, Tensor], name: str, own: Tensor) -> Tensor:
    """The saved tensor of this name, which must have the form of our own: copying would else repeat or convert it."""
    if name not in saved:
        raise ContentError(f"it does not hold {name!r}")
    if (saved[name].shape, saved[name].dtype) != (own.shape, own.dtype):
        raise ContentError(
            f"{name} is {tuple(saved[name].shape)} of {saved[name].dtype}, not {tuple(own.shape)} of {own.dtype}"
        )
    return saved[name]


def _unusable(error: ContentError) -> UserError:
    return UserError(
        f"the run's state.safetensors is damaged, or an older version wrote it: {error}; delete it to train from the "
        "start"
    )


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


# Progress reports and time accounting of a sweep, with as few waits for the GPU as possible.


@dataclass(frozen=True, eq=False)
class SweepProgress:
    """The progress of a sweep after an epoch."""

    epoch: int
    epochs: int
    first_config: int
    best_val_auroc: float
    slices_per_second: float
    done: float
    """Share of the whole sweep that is done."""


class Watch:
    """Reports progress at most every `SECONDS`, since reading results makes the device wait."""

    SECONDS = 0.5

    def __init__(self, watch: Callable[[SweepProgress], None] | None, state: SweepState, train: ScanSet) -> None:
        self.watch, self.state = watch, state
        self.slices = int(train.lengths.sum())
        self.begin = self.last = time.monotonic()
        self.first_epoch = state.pending[0].epoch

    def __call__(self, epoch: int, best_val: Tensor) -> None:
        config, now = self.state.configs[0], time.monotonic()
        if self.watch is None or (now - self.last < self.SECONDS and epoch < config.epochs):
            return
        self.last = now
        size, total = len(self.state.pending[0].members), len(self.state.configs)
        before = max((winner.val_auroc for winner in self.state.winners), default=-math.inf)
        elapsed = max(now - self.begin, 1e-9)
        self.watch(
            SweepProgress(
                epoch=epoch,
                epochs=config.epochs,
                first_config=self.state.done,
                best_val_auroc=max(before, best_val.max().item()),
                slices_per_second=size * self.slices * (epoch - self.first_epoch) / elapsed,
                done=(self.state.done + size * epoch / config.epochs) / total,
            )
        )


class Clock:
    """Adds up the time between marks.  On CUDA marks are events that only `settle` reads, so that nothing waits."""

    def __init__(self, device: torch.device, seconds: dict[str, float]) -> None:
        self.cuda, self.seconds = device.type == "cuda", seconds
        self.events: list[tuple[str | None, torch.cuda.Event]] = []
        self.last = time.monotonic()
        self.mark(None)

    def mark(self, what: str | None) -> None:
        """Count the time since the last mark as spent on `what`; None counts it nowhere."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((what, event))
            return
        now = time.monotonic()
        if what is not None:
            self.seconds[what] += now - self.last
        self.last = now

    def settle(self) -> None:
        """Add up the marks so far; waits for the device."""
        if not self.cuda:
            return
        torch.cuda.synchronize()
        for (_, begin), (what, end) in pairwise(self.events):
            if what is not None:
                self.seconds[what] += begin.elapsed_time(end) / 1000
        self.events = self.events[-1:]


WORTH_LEAVING = 50
"""Epochs that must remain for a chunk to drop its configurations out of patience and go on without them."""

LEAVING_SHARE = {"plain": 0.5, "compiled": 0.75}
"""Share of a chunk that must be out of patience to be dropped: compiled code must be compiled anew for those that stay,
which takes as long as 70 epochs of all 32 configurations of TransMIL."""


@dataclass(frozen=True, eq=False)
class Sweep:
    """The result of a sweep: the history of every configuration, and the winners."""

    configs: tuple[Config, ...]
    history: Float64[Tensor, "epochs configs four"]
    """`HISTORY` of every epoch and configuration; NaN after the epoch at which its patience ended."""
    best_epoch: Int64[Tensor, "configs"]
    """The selected epoch of each configuration, from 1; 0 where none could be selected."""
    trained: Int64[Tensor, "configs"]
    """The number of epochs that count for each configuration: all, or until its patience ended."""
    winners: tuple[Winner, ...]
    """One for each group of configurations that differ only in lr and l1, if any epoch of it could be selected."""
    chunks: tuple[int, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent on training, evaluation (with selection) and saving."""


def sweep(
    configs: Sequence[Config],
    train: ScanSet,
    val: ScanSet,
    execution: Execution | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    watch: Callable[[SweepProgress], None] | None = None,
) -> Sweep:
    """Train all configurations in one pass over the data per epoch and keep the best.

    Scans are shuffled by the first configuration's seed, in the same order for all.  Only the supervised reference
    (`Config.on_slices`) reads slice labels; its training and validation AUROC are those of the slices.

    Example:
        >>> from normal_guidance.study.drawn import shifted_mean
        >>> from normal_guidance.sweep.config import grid
        >>> train, val = shifted_mean(64, seed=1, features=8), shifted_mean(32, seed=2, features=8)
        >>> result = sweep(grid(Config("abmil", epochs=2, batch_size=16)), train, val)
        >>> result.history.shape
        torch.Size([2, 32, 4])
    """
    check_together(configs)
    if not isinstance(execution, Execution | None):
        raise UserError(
            f"execution: got {type(execution).__name__}; give Execution(device={execution!r}), or leave it out"
        )
    execution = execution or Execution()
    check_scans(configs[0], train, val)
    pool = configs[0].spec.pool
    if pool is not None:
        train, val = pool_scans(train, pool), pool_scans(val, pool)
    state = SweepState.begin(configs, fitting_chunk(configs, train, val, execution))
    keeper = Keeper(checkpoint)
    state = keeper.resume(state)
    with matrix_precision(execution.precision), current_device(execution.device):
        while state.pending:
            try:
                finished, rest = _train_chunk(state, train, val, execution, keeper, Watch(watch, state, train))
                state = state.finish(finished, rest)
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                state = (keeper.last or state).halved(error)
            release_memory()
            keeper.save(state)
    return Sweep(
        configs=tuple(configs),
        history=state.history,
        best_epoch=state.best_epoch,
        trained=state.trained,
        winners=state.winners,
        chunks=state.chunks,
        seconds=keeper.seconds,
    )


def check_scans(config: Config, train: ScanSet, val: ScanSet) -> None:
    """Refuse scans that no run can be trained on."""
    check_scans_like(train, "train")
    check_scans_like(val, "val")
    check_batch_size(len(train.lengths), config.batch_size)
    if train.width != val.width:
        raise UserError(f"training scans have {train.width} features, validation scans {val.width}; encode both alike")
    if "modes" in config.term_options:
        short = int(train.lengths.argmin())
        slices = int(train.lengths[short])
        if slices < config.modes:
            ids = getattr(train, "scan_ids", ())
            which = f"training scan {ids[short]!r}" if ids else f"training scan {short}"
            raise UserError(
                f"modes is {config.modes}, but {which} has {slices} slices; use fewer modes or leave it out"
            )
    what = "slices" if config.on_slices else "scans"
    for part, scans in (("training", train), ("validation", val)):
        labels = slice_labels_of(scans) if config.on_slices else scans.labels
        positive, known = int((labels == 1).sum()), int((labels != UNKNOWN).sum())
        if positive in (0, known):
            raise UserError(
                f"{positive} of {known} {part} {what} are positive; AUROC needs positive and negative ones; split again"
            )


def _train_chunk(
    state: SweepState, train: ScanSet, val: ScanSet, execution: Execution, keeper: Keeper, watch: Watch
) -> tuple[Finished, Chunk | None]:
    """Train the present chunk to its end, or until so many are out of patience that the rest goes on alone."""
    chunk = state.pending[0]
    configs = [state.configs[number] for number in chunk.members]
    config, seed = configs[0], state.configs[0].seed
    engine = choose_engine(configs, train, val, execution, seed, config.epochs - chunk.epoch)
    selection = Selection(engine.parameters, config.train_above_val, config.patience)
    history = torch.full(
        (config.epochs, len(configs), len(HISTORY)), math.nan, dtype=torch.float64, device=engine.device
    )
    if chunk.training:
        restore(engine, selection, history, chunk.training)
    orders = draw_orders(len(train.lengths), seed, chunk.training.get("generator"))
    clock = Clock(engine.device, keeper.seconds)
    compiler = Compiler(engine, execution)
    epoch, over, generator = chunk.epoch, [False] * len(configs), torch.empty(0)
    for epoch in range(chunk.epoch + 1, config.epochs + 1):
        order, generator = next(orders)
        engine.stack.begin_epoch(epoch)
        loss, train_auroc = engine.train_epoch(order)
        clock.mark("training")
        val_auroc, val_loss = engine.evaluate()
        history[epoch - 1] = torch.stack([loss.double(), train_auroc, val_auroc, val_loss], 1)
        selection.update(epoch, train_auroc, val_auroc, val_loss, engine.parameters)
        clock.mark("evaluation")
        watch(epoch, selection.val)
        over = selection.over(epoch)
        share = LEAVING_SHARE["compiled" if engine.compiled else "plain"]
        if all(over) or (sum(over) >= share * len(over) and config.epochs - epoch >= WORTH_LEAVING):
            break
        if keeper.is_due() and epoch < config.epochs:
            clock.settle()
            keeper.save(state.after(epoch, collect(engine, selection, history, generator)))
            clock.mark(None)
        compiler.after_epoch(config.epochs - epoch)
        clock.mark(None)
    clock.settle()
    reached = Chunk(chunk.members, epoch, collect(engine, selection, history, generator))
    staying = [] if epoch == config.epochs else [place for place, done in enumerate(over) if not done]
    ending = [place for place in range(len(over)) if place not in staying]
    finished = _finish(reached.part(ending), selection.trained(epoch).cpu()[ending])
    return finished, reached.part(staying) if staying else None


def _finish(chunk: Chunk, trained: Tensor) -> Finished:
    """The results of a chunk's members; epochs after the end of their patience do not count."""
    history, numbers = chunk.training["history"], torch.arange(1, len(chunk.training["history"]) + 1)
    return Finished(
        members=chunk.members,
        history=torch.where((numbers[:, None] <= trained)[:, :, None], history, math.nan),
        best_epoch=chunk.training["best_epoch"],
        trained=trained,
        best_val=chunk.training["best_val"],
        best_loss=chunk.training["best_loss"],
        best={name.removeprefix("best."): t for name, t in chunk.training.items() if name.startswith("best.")},
    )
