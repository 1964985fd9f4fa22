"""The state of a sweep after an epoch: everything that the remaining epochs depend on, so that a killed run resumes."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Annotated, Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from normal_guidance.errors import UserError
from normal_guidance.training.config import Config
from normal_guidance.training.engine import Engine
from normal_guidance.training.selection import Selection, Winner, group_of
from normal_guidance.training.stacked_model import Parameters
from normal_guidance.typed_json import Between, ContentError, read_as

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
