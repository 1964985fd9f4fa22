"""A sweep at the end of an epoch, as it is kept: all that the rest of it depends on, so that a killed one goes on."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

from normal_guidance.errors import UserError
from normal_guidance.training.config import Config
from normal_guidance.training.engine import Engine
from normal_guidance.training.selection import Selection, Winner, group_of
from normal_guidance.training.stack import Parameters

HISTORY = ("loss", "train_auroc", "val_auroc")
"""What is known of every configuration after every epoch."""


@runtime_checkable
class Checkpoint(Protocol):
    """Where a sweep keeps its state, so that a killed one goes on."""

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None: ...
    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None: ...
    def due(self, epochs: int, seconds: float) -> bool:
        """Whether to save, so many epochs and seconds after the last time."""
        ...


@dataclass(frozen=True, eq=False)
class Finished:
    """One chunk, trained to the end."""

    epochs: int
    """All, or until patience ended."""
    history: Tensor
    best_epoch: Tensor
    best_val: Tensor
    best: Parameters


@dataclass(frozen=True, eq=False)
class SweepState:
    """A sweep at the end of an epoch: finished configurations, and the chunk in training if it has begun."""

    configs: tuple[Config, ...]
    sizes: tuple[int, ...]
    """Configurations in each chunk still to train, the present one first."""
    history: Tensor
    best_epoch: Tensor
    trained: Tensor
    winners: tuple[Winner, ...] = ()
    chunks: tuple[int, ...] = ()
    epoch: int = 0
    training: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def begin(cls, configs: Sequence[Config], chunk: int | None) -> SweepState:
        """Nothing trained yet; at most `chunk` configurations will be trained together."""
        count, size = len(configs), min(chunk or len(configs), len(configs))
        sizes = (*[size] * (count // size), *([count % size] if count % size else []))
        empty = torch.empty(configs[0].epochs, 0, len(HISTORY), dtype=torch.float64)
        none = torch.empty(0, dtype=torch.int64)
        return cls(tuple(configs), sizes, history=empty, best_epoch=none, trained=none)

    def restored(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> SweepState:
        """The state that `tensors` and `about` were taken of."""
        winners = tuple(
            Winner(self.configs[w["number"]], w["number"], w["epoch"], w["val_auroc"], _part(tensors, f"winner{i}."))
            for i, w in enumerate(about["winners"])
        )
        return replace(
            self,
            sizes=tuple(about["sizes"]),
            chunks=tuple(about["chunks"]),
            epoch=about["epoch"],
            winners=winners,
            training=_part(tensors, "training."),
            history=tensors["history"],
            best_epoch=tensors["best_epoch"],
            trained=tensors["trained"],
        )

    def tensors(self) -> dict[str, Tensor]:
        """All that `restored` needs, with `about`."""
        parts = {"history": self.history, "best_epoch": self.best_epoch, "trained": self.trained}
        for i, winner in enumerate(self.winners):
            parts |= _named(f"winner{i}.", winner.weights)
        return parts | _named("training.", self.training)

    def about(self) -> dict[str, Any]:
        """What `restored` needs beside tensors."""
        winners = [{"number": w.number, "epoch": w.epoch, "val_auroc": w.val_auroc} for w in self.winners]
        return {"sizes": self.sizes, "chunks": self.chunks, "epoch": self.epoch, "winners": winners}

    @property
    def done(self) -> int:
        """Configurations that are finished."""
        return len(self.best_epoch)

    def next_chunk(self) -> int | None:
        return self.sizes[0] if self.sizes else None

    def finish(self, finished: Finished) -> SweepState:
        chunk = self.configs[self.done : self.done + self.sizes[0]]
        winners = {group_of(winner.config): winner for winner in self.winners}
        for i, config in enumerate(chunk):
            value = finished.best_val[i].item()
            rival = winners.get(group_of(config))
            if finished.best_epoch[i] and (rival is None or value > rival.val_auroc):
                weights = {name: stacked[i].clone() for name, stacked in finished.best.items()}
                epoch = int(finished.best_epoch[i])
                winners[group_of(config)] = Winner(config, self.done + i, epoch, value, weights)
        return replace(
            self,
            sizes=self.sizes[1:],
            chunks=(*self.chunks, len(chunk)),
            history=torch.cat([self.history, finished.history], 1),
            best_epoch=torch.cat([self.best_epoch, finished.best_epoch]),
            trained=torch.cat([self.trained, torch.full_like(finished.best_epoch, finished.epochs)]),
            winners=tuple(sorted(winners.values(), key=lambda winner: winner.number)),
            epoch=0,
            training={},
        )


def halve(state: SweepState, error: torch.OutOfMemoryError) -> SweepState:
    """The present chunk as two, from the start."""
    size = state.sizes[0]
    if size == 1:
        raise UserError(
            "one configuration alone does not fit the device's memory; use a smaller batch size or another device"
        ) from error
    halves = (size - size // 2, size // 2)
    return replace(state, sizes=(*halves, *state.sizes[1:]), epoch=0, training={})


class Keeper:
    """Saves the state when it is due, and counts where the time goes, over all starts of a run."""

    def __init__(self, checkpoint: Checkpoint | None) -> None:
        self.checkpoint = checkpoint
        self.seconds = {"training": 0.0, "evaluation": 0.0, "saving": 0.0}
        self.epochs, self.at = 0, time.monotonic()

    def resume(self, fresh: SweepState) -> SweepState:
        """The state where the run stopped, if it had begun."""
        loaded = None if self.checkpoint is None else self.checkpoint.load()
        if loaded is None:
            return fresh
        tensors, about = loaded
        self.seconds |= about["seconds"]
        return fresh.restored(tensors, about)

    def is_due(self) -> bool:
        """Asked once an epoch."""
        self.epochs += 1
        return self.checkpoint is not None and self.checkpoint.due(self.epochs, time.monotonic() - self.at)

    def save(self, state: SweepState) -> None:
        if self.checkpoint is None:
            return
        begin = time.monotonic()
        self.checkpoint.save(state.tensors(), {**state.about(), "seconds": self.seconds})
        self.epochs, self.at = 0, time.monotonic()
        self.seconds["saving"] += self.at - begin


def collect(engine: Engine, selection: Selection, history: Tensor, generator: Tensor) -> dict[str, Tensor]:
    """Everything that the rest of the training depends on, on the host."""
    parts = {
        **_named("parameters.", engine.parameters),
        **_named("momenta.", engine.momenta),
        **_named("best.", selection.weights),
        "best_epoch": selection.epoch,
        "best_val": selection.val,
        "history": history,
        "generator": generator,
    }
    return {name: tensor.detach().cpu() for name, tensor in parts.items()}


@torch.no_grad()
def restore(engine: Engine, selection: Selection, history: Tensor, saved: Mapping[str, Tensor]) -> None:
    for prefix, into in (
        ("parameters.", engine.parameters),
        ("momenta.", engine.momenta),
        ("best.", selection.weights),
    ):
        for name, tensor in _part(saved, prefix).items():
            into[name].copy_(tensor)
    engine.refresh()
    selection.epoch.copy_(saved["best_epoch"])
    selection.val.copy_(saved["best_val"])
    history.copy_(saved["history"])


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}
