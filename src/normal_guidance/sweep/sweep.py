"""Train all configurations of a grid at once, and keep the best.

    configurations -> chunks that fit the device -> an engine trains a chunk, epoch by epoch
                   -> AUROC of all configurations after every epoch -> the best epoch of each, kept on the device
                   -> the best configuration

The results equal those of `loop.py`, one configuration at a time; `tests/sweep/test_sweep.py` checks this.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from normal_guidance.base.errors import ContentError, UserError
from normal_guidance.base.records import Between, read_as
from normal_guidance.base.system import is_out_of_memory
from normal_guidance.base.tensor_files import read_tensors, write_tensors
from normal_guidance.core.bags import UNKNOWN, ScanSet
from normal_guidance.sweep.batches import check_scans_like, draw_orders, pool_scans, slice_labels_of
from normal_guidance.sweep.config import Config, Execution, check_together
from normal_guidance.sweep.engine import Engine, matrix_precision
from normal_guidance.sweep.execution import Compiler, choose_engine, current_device, fitting_chunk, release_memory
from normal_guidance.sweep.stack import Parameters

HISTORY = ("loss", "train_auroc", "val_auroc", "val_loss")  # recorded for every configuration after every epoch
SAVE_EPOCHS, SAVE_SECONDS = 50, 300.0  # the state is saved after that many, whichever comes first
WORTH_LEAVING = 50  # epochs that must remain for a chunk to go on without its configurations out of patience

# Share of a chunk that must be out of patience to be dropped: compiled code must be compiled anew for those that stay,
# which takes as long as 70 epochs of all 32 configurations of TransMIL.
LEAVING_SHARE = {"plain": 0.5, "compiled": 0.75}

Count = Annotated[int, Between(0.0)]
AFRESH = "delete it to train from the start"


def group_of(config: Config) -> tuple[object, ...]:
    """The values that selection keeps apart: it picks the best lr and l1 within each group."""
    return (config.divergence, config.guidance_weight, config.seed)


@dataclass(frozen=True, kw_only=True)
class SelectedEpoch:
    """The best epoch of one configuration, as the files of a run hold it."""

    number: Count  # the number of the configuration in the sweep
    epoch: Annotated[int, Between(1.0)]
    val_auroc: Annotated[float, Between(0.0, 1.0)]
    val_loss: float


@dataclass(frozen=True, eq=False, kw_only=True)
class Winner(SelectedEpoch):
    """The best epoch of the best configuration of a group."""

    config: Config
    weights: Mapping[str, Tensor]

    def rank(self) -> tuple[float, float, int]:
        """The higher, the better; by the paper's rule (`Config.train_above_val`) the first of equals is the best."""
        loss = 0.0 if self.config.train_above_val else self.val_loss
        return (self.val_auroc, -loss, -self.number)


class Selection:
    """The best epoch of each configuration so far (`Config.train_above_val`), its weights included, on the device."""

    # Patience counts from the last epoch whose validation AUROC was higher than that of the selected one or of all
    # before it. So a configuration that still learns goes on while its training AUROC is below its validation AUROC,
    # and one whose AUROC stays at its highest stops, although its loss may still fall.

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
        """How many epochs count for each configuration: one out of patience is trained on, but nothing changes."""
        if self.patience is None:
            return torch.full_like(self.epoch, epoch)
        return (self.risen + self.patience).clamp_max(epoch)

    def over(self, epoch: int) -> list[bool]:
        if self.patience is None:
            return [False] * len(self.epoch)
        return (epoch - self.risen >= self.patience).tolist()


# The state after an epoch: all that the remaining epochs depend on, from which a killed run resumes.


@dataclass(frozen=True, eq=False)
class Chunk:
    """Configurations that are trained together, by number, and the epoch that they have reached."""

    members: tuple[Count, ...]
    epoch: Count = 0
    training: Mapping[str, Tensor] = field(default_factory=dict)  # the tensors that `collect` gathered after that epoch

    def part(self, indices: Sequence[int]) -> Chunk:
        """A chunk of some members at the same epoch; configurations are independent, so each keeps all it needs."""
        chosen = torch.tensor(indices)
        training = {
            name: tensor if name == "generator" else tensor[:, chosen] if name == "history" else tensor[chosen]
            for name, tensor in self.training.items()
        }
        return Chunk(tuple(self.members[index] for index in indices), self.epoch, training)


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
    chunks: tuple[int, ...]  # the number of configurations that finished together, chunk by chunk
    seconds: Mapping[str, float] = field(default_factory=dict)
    """Time spent on training, evaluation (with selection) and saving."""


@dataclass(frozen=True, eq=False)
class SweepState(Sweep):
    """A sweep at the end of an epoch: the results of finished configurations, and the chunks still to train."""

    pending: tuple[Chunk, ...] = ()  # the present one first

    @classmethod
    def begin(cls, configs: Sequence[Config], chunk: int | None) -> SweepState:
        count = len(configs)
        pending = tuple(Chunk(tuple(part.tolist())) for part in torch.arange(count).split(chunk or count))
        unknown = torch.full((configs[0].epochs, count, len(HISTORY)), math.nan, dtype=torch.float64)
        none = torch.zeros(count, dtype=torch.int64)
        return cls(tuple(configs), unknown, best_epoch=none, trained=none, winners=(), chunks=(), pending=pending)

    @property
    def done(self) -> int:
        return len(self.configs) - sum(len(chunk.members) for chunk in self.pending)

    def after(self, epoch: int, training: Mapping[str, Tensor]) -> SweepState:
        return replace(self, pending=(replace(self.pending[0], epoch=epoch, training=training), *self.pending[1:]))

    def halved(self, error: Exception) -> SweepState:
        """The state with the present chunk cut in two, because it did not fit the memory."""
        chunk, size = self.pending[0], len(self.pending[0].members)
        if size == 1:
            raise UserError(
                "one configuration alone does not fit the device's memory; use a smaller batch size or another device"
            ) from error
        cut = (size + 1) // 2
        return replace(self, pending=(chunk.part(range(cut)), chunk.part(range(cut, size)), *self.pending[1:]))

    def finish(self, ended: Chunk, trained: Tensor, rest: Chunk | None) -> SweepState:
        """The state after some members of the present chunk ended, each `trained` so long; the rest of it goes on."""
        members, training = torch.tensor(ended.members), ended.training
        best_epoch, numbers = training["best_epoch"], torch.arange(1, len(training["history"]) + 1)
        # Epochs after the end of a configuration's patience do not count.
        history = torch.where((numbers[:, None] <= trained)[:, :, None], training["history"], math.nan)
        winners = {group_of(winner.config): winner for winner in self.winners}
        for index, number in enumerate(ended.members):
            if not best_epoch[index]:
                continue
            candidate = Winner(
                config=self.configs[number],
                number=number,
                epoch=int(best_epoch[index]),
                val_auroc=training["best_val"][index].item(),
                val_loss=training["best_loss"][index].item(),
                weights={name: stacked[index].clone() for name, stacked in _part(training, "best.").items()},
            )
            group = group_of(candidate.config)
            winners[group] = max((candidate, winners.get(group, candidate)), key=Winner.rank)
        return replace(
            self,
            pending=(*([] if rest is None else [rest]), *self.pending[1:]),
            chunks=(*self.chunks, len(members)),
            history=self.history.index_copy(1, members, history),
            best_epoch=self.best_epoch.index_copy(0, members, best_epoch),
            trained=self.trained.index_copy(0, members, trained),
            winners=tuple(sorted(winners.values(), key=lambda winner: winner.number)),
        )


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
    for name, tensor in _live(engine, selection, history).items():
        tensor.copy_(_like(saved, name, tensor))
    engine.refresh()


def _like(saved: Mapping[str, Tensor], name: str, form: Tensor) -> Tensor:
    """The saved tensor of this name, which must have the same `form`: copying would else repeat or convert it."""
    if name not in saved:
        raise _unusable(f"it does not hold {name!r}")
    if (saved[name].shape, saved[name].dtype) != (form.shape, form.dtype):
        raise _unusable(
            f"{name} is {tuple(saved[name].shape)} of {saved[name].dtype}, not {tuple(form.shape)} of {form.dtype}"
        )
    return saved[name]


def _unusable(reason: object) -> UserError:
    return UserError(f"the run's state.safetensors is damaged, or an older version wrote it: {reason}; {AFRESH}")


def _named(prefix: str, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    return {prefix + name: tensor for name, tensor in tensors.items()}


def _part(tensors: Mapping[str, Tensor], prefix: str) -> dict[str, Tensor]:
    return {name.removeprefix(prefix): tensor for name, tensor in tensors.items() if name.startswith(prefix)}


@dataclass(frozen=True)
class SavedState:
    """What stands beside the tensors of state.safetensors."""

    run: str  # the run that it belongs to
    resumed: Count  # how often the run resumed from a saved state
    environments: list[dict[str, Any]]  # the distinct ones of all starts, in order of their first start
    total: Annotated[float, Between(0.0)]  # seconds that the run has taken, without time lost when it was killed
    seconds: dict[str, Annotated[float, Between(0.0)]]  # those of training, evaluation (with selection) and saving
    pending: tuple[Chunk, ...]  # without their tensors
    chunks: tuple[Annotated[int, Between(1.0)], ...]
    winners: tuple[SelectedEpoch, ...]


class StateFile:
    """Saves a sweep's state when due, in the file of one run, and adds up its times; without a path, nowhere."""

    def __init__(
        self,
        path: Path | None = None,
        run: str = "",
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
        self.environments = [] if environment is None else [dict(environment)]
        self.seconds = {"training": 0.0, "evaluation": 0.0, "saving": 0.0}
        self.last: SweepState | None = None  # from which a chunk that no longer fits the memory goes on
        self._before, self._begin = 0.0, time.monotonic()
        self._epochs, self._saved = 0, self._begin

    @property
    def total(self) -> float:
        """Seconds that the run has taken, without time lost when it was killed."""
        return self._before + time.monotonic() - self._begin

    def due(self) -> bool:
        """Whether to save now; called exactly once after each epoch."""
        self._epochs += 1
        late = time.monotonic() - self._saved >= self.save_seconds
        return self.path is not None and (late or self._epochs >= self.save_epochs)

    def save(self, state: SweepState) -> None:
        if self.path is None:
            return
        begin, self.last = time.monotonic(), state
        names = [each.name for each in fields(SelectedEpoch)]
        kept = SavedState(
            run=self.run,
            resumed=self.resumed,
            environments=self.environments,
            total=self.total,
            seconds=self.seconds,
            pending=tuple(replace(chunk, training={}) for chunk in state.pending),
            chunks=state.chunks,
            winners=tuple(SelectedEpoch(**{name: getattr(winner, name) for name in names}) for winner in state.winners),
        )
        tensors = {"history": state.history, "best_epoch": state.best_epoch, "trained": state.trained}
        for i, winner in enumerate(state.winners):
            tensors |= _named(f"winner{i}.", winner.weights)
        for i, chunk in enumerate(state.pending):
            tensors |= _named(f"chunk{i}.", chunk.training)
        write_tensors(self.path, tensors, asdict(kept))
        self._epochs, self._saved = 0, time.monotonic()
        self.seconds["saving"] += self._saved - begin

    def load(self, fresh: SweepState) -> SweepState:
        """The saved state of the run, or the fresh one if nothing was saved."""
        if self.path is None or not self.path.exists():
            return fresh
        tensors, about = read_tensors(self.path, f"copy it again, or {AFRESH}")
        if not isinstance(about, dict) or about.get("run") != self.run:
            raise UserError(f"{self.path} belongs to another run; copy it again, or {AFRESH}")
        try:
            kept = read_as(SavedState, about)
        except ContentError as error:
            raise _unusable(error) from error
        self.last = _restored(fresh, tensors, kept)
        self.resumed = kept.resumed + 1
        now = [environment for environment in self.environments if environment not in kept.environments]
        self.environments = [*kept.environments, *now]
        self.seconds |= kept.seconds
        self._before, self._begin = kept.total, time.monotonic()
        return self.last


def _restored(fresh: SweepState, tensors: Mapping[str, Tensor], kept: SavedState) -> SweepState:
    trained = [number for chunk in kept.pending for number in chunk.members]
    for number in (*trained, *(winner.number for winner in kept.winners)):
        if number >= len(fresh.configs):
            raise _unusable(f"configuration {number} is unknown; there are {len(fresh.configs)}")
    if len(set(trained)) < len(trained):
        raise _unusable("a configuration is in two chunks")
    return replace(
        fresh,
        pending=tuple(replace(chunk, training=_part(tensors, f"chunk{i}.")) for i, chunk in enumerate(kept.pending)),
        chunks=kept.chunks,
        winners=tuple(
            Winner(config=fresh.configs[best.number], weights=_part(tensors, f"winner{i}."), **vars(best))
            for i, best in enumerate(kept.winners)
        ),
        history=_like(tensors, "history", fresh.history),
        best_epoch=_like(tensors, "best_epoch", fresh.best_epoch),
        trained=_like(tensors, "trained", fresh.trained),
    )


# Progress reports and times, with as few waits for the device as possible.


@dataclass(frozen=True, eq=False)
class SweepProgress:
    epoch: int
    epochs: int
    first_config: int
    best_val_auroc: float
    slices_per_second: float
    done: float  # share of the whole sweep that is done


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
    """Adds up the time between marks in `settle`.  On CUDA marks are events, so that nothing waits before."""

    def __init__(self, device: torch.device, seconds: dict[str, float]) -> None:
        self.cuda, self.seconds = device.type == "cuda", seconds
        self.marks: list[tuple[str | None, Any]] = []
        self.mark(None)

    def mark(self, what: str | None) -> None:
        """Count the time since the last mark as spent on `what`; None counts it nowhere."""
        moment: Any = torch.cuda.Event(enable_timing=True) if self.cuda else time.monotonic()
        if self.cuda:
            moment.record()
        self.marks.append((what, moment))

    def settle(self) -> None:
        """Add up the marks so far; waits for the device."""
        if self.cuda:
            torch.cuda.synchronize()
        for (_, begin), (what, end) in pairwise(self.marks):
            if what is not None:
                self.seconds[what] += begin.elapsed_time(end) / 1000 if self.cuda else end - begin
        self.marks = self.marks[-1:]


def sweep(
    configs: Sequence[Config],
    train: ScanSet,
    val: ScanSet,
    execution: Execution | None = None,
    *,
    checkpoint: StateFile | None = None,
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
    keeper = checkpoint or StateFile()
    state = keeper.load(SweepState.begin(configs, fitting_chunk(configs, train, val, execution)))
    with matrix_precision(execution.precision), current_device(execution.device):
        while state.pending:
            try:
                state = _train_chunk(state, train, val, execution, keeper, Watch(watch, state, train))
            except RuntimeError as error:
                if not is_out_of_memory(error):
                    raise
                state = (keeper.last or state).halved(error)
            release_memory()
            keeper.save(state)
    return Sweep(**{each.name: getattr(state, each.name) for each in fields(Sweep)} | {"seconds": keeper.seconds})


def check_scans(config: Config, train: ScanSet, val: ScanSet) -> None:
    check_scans_like(train, "train")
    check_scans_like(val, "val")
    count, size = len(train.lengths), config.batch_size
    if count < size:  # partial batches are dropped
        raise UserError(f"{count} training scans do not fill one batch of {size}; use a smaller batch size")
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
    state: SweepState, train: ScanSet, val: ScanSet, execution: Execution, keeper: StateFile, watch: Watch
) -> SweepState:
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
        if keeper.due() and epoch < config.epochs:
            clock.settle()
            keeper.save(state.after(epoch, collect(engine, selection, history, generator)))
            clock.mark(None)
        compiler.after_epoch(config.epochs - epoch)
        clock.mark(None)
    clock.settle()
    reached = Chunk(chunk.members, epoch, collect(engine, selection, history, generator))
    staying = [] if epoch == config.epochs else [index for index, done in enumerate(over) if not done]
    ending = [index for index in range(len(over)) if index not in staying]
    trained = selection.trained(epoch).cpu()[ending]
    return state.finish(reached.part(ending), trained, reached.part(staying) if staying else None)
