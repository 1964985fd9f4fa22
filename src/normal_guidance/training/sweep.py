"""Train all configurations of a grid at once, by the paper's protocol, and keep the best.

    configurations -> chunks that fit the device -> an engine trains a chunk, epoch by epoch
                   -> AUROC of all configurations after every epoch -> the best epoch of each, kept on the device
                   -> the best configuration

The results equal those of `training.fit`, one configuration at a time; `tests/training/test_sweep.py` checks this.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal, get_args

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from normal_guidance.core.bags import UNKNOWN
from normal_guidance.errors import UserError
from normal_guidance.training.batches import Scans, check_batch_size, pool_scans, slice_labels_of
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
"""Epochs that must remain for a chunk to drop its configurations out of patience and go on without them."""

LEAVING_SHARE = {"plain": 0.5, "compiled": 0.75}
"""Share of a chunk that must be out of patience to be dropped: compiled code must be compiled anew for those that stay,
which takes as long as 70 epochs of all 32 configurations of TransMIL."""

COMPILING_SECONDS, COMPILED_SHARE = 60.0, 0.7
"""How long the compiler takes at most, and the time of a compiled step as a share of one that is only recorded (on an
H200; LOG.md, 2026-11-17).  They decide whether the epochs that remain are worth compiling."""

EngineName = Literal["packed", "recorded", "compiled"]

_log = logging.getLogger(__name__)

SLOT_CLASSES = 3
"""The number of row counts to choose from (`slot_numbers`); each costs a recorded graph."""


@dataclass(frozen=True)
class Execution:
    """Where and how to compute; results differ in rounding at most.

    Args:
        device: "cpu", "cuda", "cuda:1".
        precision: of matrix products. "tf32" and "bf16" are for CUDA; parameters, losses and metrics stay float32.
        engine: "packed" runs anywhere; "recorded" replays a recorded step and needs CUDA to be fast; "compiled" waits
            up to a minute for a faster step.  None takes packed on the CPU; on CUDA it begins recorded, compiles when
            the measured rest of the training is long enough, and goes on packed where the others cannot run.
        chunk: the most configurations to train together; halved automatically when memory runs out.

    Example:
        >>> Execution(device="cpu").slotted
        False
    """

    device: str = "cpu"
    precision: Precision = "float32"
    engine: EngineName | None = None
    chunk: int | None = None

    def __post_init__(self) -> None:
        for name, value, known in (
            ("precision", self.precision, get_args(Precision)),
            ("engine", self.engine, (*get_args(EngineName), None)),
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
        """Whether to train in batches with a fixed number of rows: recorded or compiled."""
        if self.engine is None:
            return torch.device(self.device).type == "cuda"
        return self.engine != "packed"


@dataclass(frozen=True, eq=False)
class Sweep:
    """The result of a sweep: the history of every configuration, and the winners."""

    configs: tuple[Config, ...]
    history: Float64[Tensor, "epochs configs three"]
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
    train: Scans,
    val: Scans,
    execution: Execution | None = None,
    *,
    checkpoint: Checkpoint | None = None,
    watch: Callable[[SweepProgress], None] | None = None,
) -> Sweep:
    """Train all configurations in one pass over the data per epoch and keep the best.

    Scans are shuffled by the first configuration's seed, in the same order for all.  Only the supervised reference
    (`Config.on_slices`) reads slice labels; its training and validation AUROC are those of the slices.

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
    """Within the context, CUDA streams, events and graphs belong to this device, even if it is not the first."""
    return torch.cuda.device(device) if torch.device(device).type == "cuda" else contextlib.nullcontext()


def is_out_of_memory(error: BaseException | None) -> bool:
    """Whether the error, or one that it followed from, says that memory ran out, in torch's or a library's words.

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
    """Free finished engines: compiled code makes them refer to themselves, so only the collector finds them."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()


def _check_scans(config: Config, train: Scans, val: Scans) -> None:
    check_batch_size(len(train.lengths), config.batch_size)
    if train.width != val.width:
        raise UserError(f"training scans have {train.width} features, validation scans {val.width}; encode both alike")
    what = "slices" if config.on_slices else "scans"
    for part, scans in (("training", train), ("validation", val)):
        labels = slice_labels_of(scans) if config.on_slices else scans.labels
        positive, known = int((labels == 1).sum()), int((labels != UNKNOWN).sum())
        if positive in (0, known):
            raise UserError(
                f"{positive} of {known} {part} {what} are positive; AUROC needs positive and negative ones; split again"
            )


def _orders(scans: int, seed: int, state: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the order of the scans in every epoch, and the generator's state after drawing it."""
    generator = torch.Generator().manual_seed(seed)
    if state is not None:
        generator.set_state(state)
    while True:
        order = torch.randperm(scans, generator=generator)
        yield order, generator.get_state()


def _make_engine(configs: Sequence[Config], train: Scans, val: Scans, execution: Execution, seed: int) -> Engine:
    """The engine that was asked for; without a wish, the packed one where the faster one cannot run."""
    config, device = configs[0], torch.device(execution.device)
    dtype = torch.float64 if execution.precision == "float64" else torch.float32
    stack = Stack.of(configs, train.width, device, dtype)
    if not execution.slotted:
        return PackedEngine(stack, train, val, config.batch_size, execution.precision)
    draw = _orders(len(train.lengths), seed)
    orders = (order for _, (order, _) in zip(range(config.epochs), draw, strict=False))
    slots = slot_numbers(train.lengths.cpu(), config.batch_size, orders, classes=SLOT_CLASSES)
    try:
        engine = SlottedEngine(stack, train, val, config.batch_size, execution.precision, slots)
        if execution.engine == "compiled":
            engine.compile()
        else:
            engine.prepare()
        return engine
    except Exception as error:
        if is_out_of_memory(error) or isinstance(error, UserError):
            raise
        reason = f"the {execution.engine or 'recorded'} engine cannot run {config.method} here ({describe(error)})"
        if execution.engine is not None:
            raise UserError(f"{reason}; leave --engine out, and another one takes over") from error
        _log.warning("%s; the packed engine takes over, which is slower", reason)
    release_memory()
    return PackedEngine(stack, train, val, config.batch_size, execution.precision)


def describe(error: BaseException) -> str:
    """The kind of an error and the first line of what it says, cut to a readable length.

    Example:
        >>> describe(RuntimeError("out of resources\nmore"))
        'RuntimeError: out of resources'
    """
    first = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:200]}".removesuffix(": ")


class _Compiler:
    """Compiles an engine's step once, when the rest of the training takes longer than compiling would."""

    def __init__(self, engine: Engine, execution: Execution) -> None:
        wanted = execution.engine is None and isinstance(engine, SlottedEngine) and engine.graphed
        self.engine = engine if wanted else None
        self.begin: float | None = None

    def after_epoch(self, left: int) -> None:
        """Decide after the second epoch, because the first one also records steps; `left` is the number to come."""
        if self.engine is None:
            return
        torch.cuda.synchronize()
        if self.begin is None:
            self.begin = time.monotonic()
            return
        engine, self.engine = self.engine, None
        rest = left * (time.monotonic() - self.begin)
        if (1 - COMPILED_SHARE) * rest < COMPILING_SECONDS:
            return
        try:
            engine.compile()
        except Exception as error:
            if is_out_of_memory(error):
                raise
            _log.warning("compiling the step failed (%s); the recorded step goes on, slower", describe(error))


def _train_chunk(
    state: SweepState, train: Scans, val: Scans, execution: Execution, keeper: Keeper, watch: Watch
) -> tuple[Finished, Chunk | None]:
    """Train the present chunk to its end, or until so many are out of patience that the rest goes on alone."""
    chunk = state.pending[0]
    configs = [state.configs[number] for number in chunk.members]
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
    compiler = _Compiler(engine, execution)
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
        best={name.removeprefix("best."): t for name, t in chunk.training.items() if name.startswith("best.")},
    )
