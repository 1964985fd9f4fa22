"""Train all configurations of a grid at once, and keep the best.

    configurations -> chunks that fit the device -> an engine trains a chunk, epoch by epoch
                   -> AUROC of all configurations after every epoch -> the best epoch of each, kept on the device
                   -> the best configuration

The results equal those of `training.loop`, one configuration at a time; `tests/training/test_sweep.py` checks this.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from normal_guidance.core.bags import UNKNOWN
from normal_guidance.errors import UserError
from normal_guidance.machine import is_out_of_memory
from normal_guidance.training.batches import (
    Scans,
    check_batch_size,
    check_scans_like,
    draw_orders,
    pool_scans,
    slice_labels_of,
)
from normal_guidance.training.config import Config, check_together
from normal_guidance.training.engine import matrix_precision
from normal_guidance.training.execution import (
    Compiler,
    Execution,
    choose_engine,
    current_device,
    fitting_chunk,
    release_memory,
)
from normal_guidance.training.progress import Clock, SweepProgress, Watch
from normal_guidance.training.selection import Selection, Winner
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


def check_scans(config: Config, train: Scans, val: Scans) -> None:
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
    state: SweepState, train: Scans, val: Scans, execution: Execution, keeper: Keeper, watch: Watch
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
