"""All configurations of a grid trained at once, by the paper's protocol, and the best of them kept.

    configurations -> chunks that fit the device -> an engine trains a chunk, epoch by epoch
                   -> AUROC of all configurations after every epoch -> each one's best epoch, kept on the device
                   -> the best configuration

The numbers are those of `training.fit`, one configuration at a time; `tests/training/test_sweep.py` holds it to that.
"""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from normal_guidance.core.bags import UNKNOWN
from normal_guidance.errors import UserError
from normal_guidance.training.batches import Scans, pool_scans, slice_labels_of
from normal_guidance.training.config import Config, check_together
from normal_guidance.training.engine import (
    Engine,
    PackedEngine,
    Precision,
    SlottedEngine,
    matrix_precision,
    slot_numbers,
)
from normal_guidance.training.progress import Clock, SweepProgress, Watch
from normal_guidance.training.selection import Selection, Winner
from normal_guidance.training.stacked_model import Stack
from normal_guidance.training.sweep_state import (
    HISTORY,
    Checkpoint,
    Chunk,
    Finished,
    Keeper,
    SweepState,
    collect,
    restore,
)

WORTH_LEAVING = 50
"""Epochs that must be left for the part of a chunk that is out of patience to be left behind."""

LEAVING_SHARE = {"cuda": 0.75}
"""How much of a chunk must be out of patience to be left behind, if not half: on CUDA the rest compiles anew, which
takes a TransMIL as long as 70 epochs of all 32 configurations."""

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

    Example:
        >>> Execution(device="cpu").slotted
        False
    """

    device: str = "cpu"
    precision: Precision = "float32"
    engine: Literal["packed", "slotted"] | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("precision", self.precision, get_args(Precision)),
            ("engine", self.engine, ("packed", "slotted", None)),
        ):
            if value not in known:
                raise UserError(f"{name} {value!r} is unknown; choose one of {', '.join(map(str, known))}")
        try:
            torch.device(self.device)
        except RuntimeError as error:
            raise UserError(f"device {self.device!r} is unknown; give cpu, cuda or cuda:1") from error
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
    """`HISTORY` of every epoch and configuration; NaN behind the epoch at which its patience ended."""
    best_epoch: Int64[Tensor, "configs"]
    """The selected epoch of each configuration, from 1; 0 where none could be selected."""
    trained: Int64[Tensor, "configs"]
    """Epochs that count for each configuration: all, or until its patience ended."""
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
    watch: Callable[[SweepProgress], None] | None = None,
) -> Sweep:
    """Trains all configurations in one pass over the data per epoch and keeps the best.

    Scans are shuffled by the first configuration's seed, in the same order for all.  Slice labels are not read,
    but by the supervised reference (`Config.on_slices`): its training and validation AUROC are those of the slices.

    Example:
        >>> from normal_guidance.simulate.semi_synthetic import shifted_mean
        >>> from normal_guidance.training.config import grid
        >>> train, val = shifted_mean(64, seed=1, features=8), shifted_mean(32, seed=2, features=8)
        >>> result = sweep(grid(Config("abmil", epochs=2, batch_size=16)), train, val)
        >>> result.history.shape
        torch.Size([2, 32, 3])
    """
    check_together(configs)
    execution = execution or Execution()
    _check_scans(configs[0], train, val)
    pool = configs[0].spec.pool
    if pool is not None:
        train, val = pool_scans(train, pool), pool_scans(val, pool)
    state = SweepState.begin(configs, execution.chunk)
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


def current_device(device: str) -> contextlib.AbstractContextManager[object]:
    """Streams, events and graphs are those of this device, also where it is not the first."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else contextlib.nullcontext()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether memory ran out, said by torch's own error, by a library's in other words, or by one that hid it.

    Example:
        >>> is_out_of_memory(RuntimeError("CUDA error: out of memory")), is_out_of_memory(RuntimeError("shapes differ"))
        (True, False)
    """
    if error is None:
        return False
    words = ("out of memory", "ALLOC_FAILED", "can't allocate memory", "not enough memory")
    found = isinstance(error, torch.OutOfMemoryError) or any(word in str(error) for word in words)
    return found or is_out_of_memory(error.__context__)


def release_memory() -> None:
    """A finished engine refers to itself through what it compiled: only the collector frees it."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_scans(config: Config, train: Scans, val: Scans) -> None:
    if len(train.lengths) < config.batch_size:
        raise UserError(
            f"{len(train.lengths)} training scans do not fill one batch of {config.batch_size}; "
            "use a smaller batch size"
        )
    if train.width != val.width:
        raise UserError(f"training scans have {train.width} features, validation scans {val.width}; encode both alike")
    what = "slices" if config.on_slices else "scans"
    for part, scans in (("training", train), ("validation", val)):
        labels = slice_labels_of(scans) if config.on_slices else scans.labels
        positive, known = int((labels == 1).sum()), int((labels != UNKNOWN).sum())
        if positive in (0, known):
            raise UserError(f"{positive} of {known} {part} {what} are positive; AUROC needs both kinds: split again")


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
    state: SweepState, train: Scans, val: Scans, execution: Execution, keeper: Keeper, watch: Watch
) -> tuple[Finished, Chunk | None]:
    """The present chunk from where it is to its end, or until so many ran out of patience that the rest leaves them."""
    configs, chunk = state.present(), state.pending[0]
    config, seed = configs[0], state.configs[0].seed
    engine = _make_engine(configs, train, val, execution, seed)
    selection = Selection(engine.parameters, config.train_above_val, config.patience)
    history = torch.full(
        (config.epochs, len(configs), len(HISTORY)), math.nan, dtype=torch.float64, device=engine.device
    )
    if chunk.training:
        restore(engine, selection, history, chunk.training)
    orders = _orders(len(train.lengths), seed, chunk.training.get("generator"))
    clock = Clock(engine.device, keeper.seconds)
    share = LEAVING_SHARE.get(engine.device.type, 0.5)
    epoch, over, generator = chunk.epoch, [False] * len(configs), torch.empty(0)
    for epoch in range(chunk.epoch + 1, config.epochs + 1):
        order, generator = next(orders)
        engine.stack.begin_epoch(epoch)
        loss, train_auroc = engine.train_epoch(order)
        clock.mark("training")
        val_auroc = engine.val_auroc()
        history[epoch - 1] = torch.stack([loss.double(), train_auroc, val_auroc], 1)
        selection.update(epoch, train_auroc, val_auroc, engine.parameters)
        clock.mark("evaluation")
        watch(epoch, selection.val)
        over = selection.over(epoch)
        if all(over) or (sum(over) >= share * len(over) and config.epochs - epoch >= WORTH_LEAVING):
            break
        if keeper.is_due() and epoch < config.epochs:
            clock.settle()
            keeper.save(state.after(epoch, collect(engine, selection, history, generator)))
            clock.mark(None)
    clock.settle()
    reached = Chunk(chunk.members, epoch, collect(engine, selection, history, generator))
    staying = [] if epoch == config.epochs else [place for place, done in enumerate(over) if not done]
    leaving = [place for place in range(len(over)) if place not in staying]
    finished = _finish(reached.part(leaving), selection.trained(epoch).cpu()[leaving])
    return finished, reached.part(staying) if staying else None


def _finish(chunk: Chunk, trained: Tensor) -> Finished:
    """What the members of a chunk leave; epochs behind the end of their patience do not count."""
    history, numbers = chunk.training["history"], torch.arange(1, len(chunk.training["history"]) + 1)
    return Finished(
        members=chunk.members,
        history=torch.where((numbers[:, None] <= trained)[:, :, None], history, math.nan),
        best_epoch=chunk.training["best_epoch"],
        trained=trained,
        best_val=chunk.training["best_val"],
        best={name.removeprefix("best."): t for name, t in chunk.training.items() if name.startswith("best.")},
    )
