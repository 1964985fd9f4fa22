"""All configurations of a grid trained at once, by the paper's protocol, and the best of them kept.

    configurations -> chunks that fit the device -> an engine trains a chunk, epoch by epoch
                   -> AUROC of all configurations after every epoch -> each one's best epoch, kept on the device
                   -> the best configuration

The numbers are those of `training.fit`, one configuration at a time; `tests/training/test_sweep.py` holds it to that.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from normal_guidance.core.models import METHODS
from normal_guidance.errors import UserError
from normal_guidance.training.config import Config, check_together
from normal_guidance.training.engine import (
    Engine,
    PackedEngine,
    Precision,
    SlottedEngine,
    matrix_precision,
    slot_numbers,
)
from normal_guidance.training.feed import Scans, pool_scans
from normal_guidance.training.selection import Selection, Winner
from normal_guidance.training.stack import Stack
from normal_guidance.training.state import HISTORY, Checkpoint, Finished, Keeper, SweepState, collect, halve, restore
from normal_guidance.training.watch import Clock, Progress, Watch

SLOT_CLASSES = 3
"""Numbers of slots among which a batch finds the smallest that holds it; each costs a recorded graph."""


@dataclass(frozen=True)
class Execution:
    """How to compute, which is not what to compute: results differ in rounding at most.

    Args:
        device: "cpu", "cuda", "cuda:1".
        precision: of the products. "tf32" and "bf16" are for CUDA; parameters, losses and metrics stay float32.
        engine: "packed" runs anywhere; "slotted" is compiled; None takes slotted on CUDA and packed elsewhere.
        chunk: configurations trained together at most; halved by itself when the device's memory does not suffice.
    """

    device: str = "cpu"
    precision: Precision = "float32"
    engine: Literal["packed", "slotted"] | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        if self.precision in ("tf32", "bf16") and torch.device(self.device).type != "cuda":
            raise UserError(f"precision {self.precision} is for CUDA; on {self.device} use float32")
        if self.chunk is not None and self.chunk < 1:
            raise UserError(f"chunk is {self.chunk}; train at least 1 configuration at a time")

    @property
    def slotted(self) -> bool:
        return self.engine == "slotted" or (self.engine is None and torch.device(self.device).type == "cuda")


@dataclass(frozen=True, eq=False)
class Sweep:
    """What a sweep leaves: every number of every epoch, and the winners."""

    configs: tuple[Config, ...]
    history: Float64[Tensor, "epochs configs three"]
    """`HISTORY` of every epoch and configuration; NaN behind the epoch at which patience ended."""
    best_epoch: Int64[Tensor, "configs"]
    """The selected epoch of each configuration, from 1; 0 where none could be selected."""
    trained: Int64[Tensor, "configs"]
    """Epochs that each configuration was trained: all, or until patience ended for its whole chunk."""
    winners: tuple[Winner, ...]
    """One for each group that differs in lr and l1 only; a group without a selectable epoch has none."""
    chunks: tuple[int, ...]
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Where the time went: training, evaluation (with selection), saving."""


def sweep(
    configs: Sequence[Config],
    train: Scans,
    val: Scans,
    execution: Execution | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    watch: Callable[[Progress], None] | None = None,
) -> Sweep:
    """Trains all configurations in one pass over the data per epoch and keeps the best.

    Scans are shuffled by the first configuration's seed, in the same order for all.  Slice labels are not read.

    Example:
        >>> from normal_guidance.data.synthetic import shifted_mean
        >>> from normal_guidance.training.config import grid
        >>> train, val = shifted_mean(64, seed=1, features=8), shifted_mean(32, seed=2, features=8)
        >>> result = sweep(grid(Config("abmil", epochs=2, batch_size=16)), train, val)
        >>> result.history.shape
        torch.Size([2, 32, 3])
    """
    check_together(configs)
    execution = execution or Execution()
    _check_scans(configs[0], train, val)
    pool = METHODS[configs[0].method].pool
    if pool is not None:
        train, val = pool_scans(train, pool), pool_scans(val, pool)
    state = SweepState.begin(configs, execution.chunk)
    keeper = Keeper(checkpoint)
    state = keeper.resume(state)
    while (size := state.next_chunk()) is not None:
        chunk = configs[state.done : state.done + size]
        try:
            with matrix_precision(execution.precision):
                finished = _train_chunk(chunk, train, val, execution, state, keeper, Watch(watch, state, train))
        except torch.OutOfMemoryError as error:
            state = halve(state, error)
            torch.cuda.empty_cache()
            continue
        state = state.finish(finished)
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


def _check_scans(config: Config, train: Scans, val: Scans) -> None:
    if len(train.lengths) < config.batch_size:
        raise UserError(
            f"{len(train.lengths)} training scans do not fill one batch of {config.batch_size}; "
            "use a smaller batch size"
        )
    if train.width != val.width:
        raise UserError(f"training scans have {train.width} features, validation scans {val.width}; encode both alike")
    for part, scans in (("training", train), ("validation", val)):
        positive = int(scans.labels.sum())
        if positive in (0, len(scans.labels)):
            raise UserError(
                f"{positive} of {len(scans.labels)} {part} scans are positive; AUROC needs both kinds: split again"
            )


def _orders(scans: int, seed: int, state: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """The scans' order in every epoch, and the generator's state after drawing it."""
    generator = torch.Generator().manual_seed(seed)
    if state is not None:
        generator.set_state(state)
    while True:
        order = torch.randperm(scans, generator=generator)
        yield order, generator.get_state()


def _make_engine(configs: Sequence[Config], train: Scans, val: Scans, execution: Execution, seed: int) -> Engine:
    config, device = configs[0], torch.device(execution.device)
    dtype = torch.float64 if execution.precision == "float64" else torch.float32
    stack = Stack.of(configs, train.width, device, dtype)
    if not execution.slotted:
        return PackedEngine(stack, train, val, config.batch_size, execution.precision)
    draw = _orders(len(train.lengths), seed)
    orders = (order for _, (order, _) in zip(range(config.epochs), draw, strict=False))
    slots = slot_numbers(train.lengths.cpu(), config.batch_size, orders, classes=SLOT_CLASSES)
    compiled = device.type == "cuda"
    return SlottedEngine(stack, train, val, config.batch_size, execution.precision, slots, compiled=compiled)


def _train_chunk(
    configs: Sequence[Config],
    train: Scans,
    val: Scans,
    execution: Execution,
    state: SweepState,
    keeper: Keeper,
    watch: Watch,
) -> Finished:
    config, seed = configs[0], state.configs[0].seed
    engine = _make_engine(configs, train, val, execution, seed)
    selection = Selection(engine, config.train_above_val)
    history = torch.full(
        (config.epochs, len(configs), len(HISTORY)), math.nan, dtype=torch.float64, device=engine.device
    )
    if state.training:
        restore(engine, selection, history, state.training)
    orders = _orders(len(train.lengths), seed, state.training.get("generator"))
    clock, epoch = Clock(engine.device, keeper.seconds), state.epoch
    for epoch in range(state.epoch + 1, config.epochs + 1):
        order, generator = next(orders)
        loss, train_auroc = engine.train_epoch(order)
        clock.mark("training")
        val_auroc = engine.val_auroc()
        history[epoch - 1] = torch.stack([loss.double(), train_auroc, val_auroc], 1)
        selection.update(epoch, train_auroc, val_auroc, engine.parameters)
        clock.mark("evaluation")
        watch(epoch, selection.val)
        if config.patience is not None and selection.waited(epoch, config.patience):
            break
        if keeper.is_due() and epoch < config.epochs:
            clock.settle()
            training = collect(engine, selection, history, generator)
            keeper.save(replace(state, epoch=epoch, training=training))
            clock.mark(None)
    clock.settle()
    return Finished(
        epochs=epoch,
        history=history.cpu(),
        best_epoch=selection.epoch.cpu(),
        best_val=selection.val.cpu(),
        best={name: tensor.cpu() for name, tensor in selection.weights.items()},
    )
