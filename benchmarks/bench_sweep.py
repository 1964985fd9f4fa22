"""The sweep: all 32 configurations of a method at once; a table, the goals, then one JSON line.

    python benchmarks/bench_sweep.py [--device cpu|cuda] [--steps] [--torchmil] [--accuracy] [--methods ng,mhng] ...

Three parts.  Without a choice, CUDA runs the first and the CPU the second.

steps     Milliseconds of a training step of batches of 64 scans, by method, scan lengths, precision and engine:
          "epoch" is `train_epoch` of the sweep's own engine (planning the batches, all steps, training AUROC), wall
          clock divided by steps, the median over epochs; "replay" is the same steps' CUDA graphs alone, by events.
          "first s" are the seconds from nothing to the end of a first epoch with its evaluation, less those of a
          usual one: recording, and compiling for the compiled engine, which `sweep` does only when it is worth it.
          Features are noise and labels random.  Operations are the matrix products that cannot be avoided (floor.py),
          times the configurations; the card's rate is that of one large square product, measured in the same run.
          "eval" is the share of validation, training AUROC and selection in an epoch of the paper's semi-synthetic
          data (156 steps, 2,500 validation scans), and "grid" the minutes that 1,000 such epochs would take.
torchmil  The whole grid, trained by `sweep.sweep` and, one configuration after another, by torchmil's Trainer, in
          turns and in alternating order; semi-synthetic scans in memory, float32.
accuracy  The same grid on semi-synthetic scans in float32 and in other precisions: differences of validation AUROC, by
          configuration, beside those between two float32 runs with different seeds, which is the noise.

A row is printed when it is known.  No case of `steps` is begun that would probably end behind `--budget` seconds.
Kernels and compiled code are kept on disk: "first s" of a fresh machine is the one to report.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, get_args

import torch
from torch import Tensor

from floor import FLOORS, gigaflop
from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import METHODS, build_model
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.core.prediction import FEATURES
from normal_guidance.study.drawn import SIZES, shifted_mean
from normal_guidance.sweep.config import Config, EngineName, Execution, grid
from normal_guidance.sweep.engine import (
    Engine,
    PackedEngine,
    Precision,
    SlottedEngine,
    matrix_precision,
    row_dtype,
    slot_numbers,
    synchronize,
)
from normal_guidance.sweep.execution import SLOT_CLASSES
from normal_guidance.sweep.stack import Stack
from normal_guidance.sweep.sweep import HISTORY, Selection, Sweep, sweep
from report import machine, names

SEED = 2026
CONFIGS = 32
BAGS = 64
EPOCHS = {"steps": 5, "torchmil": 2, "accuracy": 25}
"""Epochs that are timed, or trained."""
PRECISIONS: dict[str, list[Precision]] = {"ng": ["tf32", "bf16"], "smap": ["tf32"], "mhng": ["bf16"], "smtp": ["bf16"]}
"""What is timed on CUDA, unless the command line says otherwise."""

PAPER_STEPS, PAPER_VAL, PAPER_EPOCHS = SIZES[0] // BAGS, SIZES[1], 1000
"""An epoch of the semi-synthetic data, and the paper's number of them."""

STEP_GOALS_MS = {
    ("ng", "head", "tf32"): 0.20,
    ("smap", "head", "tf32"): 0.50,
    ("mhng", "head", "bf16"): 2.8,
    ("mhng", "chest", "bf16"): 18.0,
    ("smtp", "head", "bf16"): 4.0,
}
"""On an H200.  Before: .403, .844, 4.99, 27.6 (LOG.md)."""
FIRST_GOAL_S = 15.0
"""Seconds before training begins, on a machine that runs the method for the first time."""
GRID_GOALS_MINUTES = {"ng": 2.0, "mhng": 15.0}
PER_SLICE_GOAL = 1.3
EVALUATION_GOAL = 0.10

TRAINER_LACKS = (
    "torchmil's Trainer as it is has no guidance, no L1 (the 8 configurations of a learning rate are the same to it),\n"
    "no clipping, and does not hold validation against training AUROC when it selects; it pads a batch to its longest\n"
    "scan and records for gradients in validation too.  It is given AUROC as its metric, so that both report it for\n"
    "both sets, and scans in memory."
)


def say(text: str) -> None:
    """Flushed, so that a run that is killed leaves its lines."""
    print(text, flush=True)


def configurations(method: str, count: int, epochs: int, bags: int, seed: int = 0) -> tuple[Config, ...]:
    """The first of the paper's 32."""
    return grid(Config(method, epochs=epochs, batch_size=bags, seed=seed))[:count]


def timed(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds from an idle device to an idle device."""
    synchronize(device)
    start = time.perf_counter()
    run()
    synchronize(device)
    return time.perf_counter() - start


def timed_on_device(device: torch.device, run: Callable[[], object]) -> float:
    """Seconds between two events on the device."""
    if device.type != "cuda":
        return timed(device, run)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    begin.record()
    run()
    end.record()
    torch.cuda.synchronize(device)
    return begin.elapsed_time(end) / 1000


# ----------------------------------------------------------------------------------------------------
# Scans
# ----------------------------------------------------------------------------------------------------


def head_lengths(scans: int, generator: torch.Generator) -> Tensor:
    """Head CT: uniform, 20 to 60 slices."""
    return torch.randint(20, 61, (scans,), generator=generator)


def chest_lengths(scans: int, generator: torch.Generator) -> Tensor:
    """Chest CT: 63 to 1,083 slices with a mean of about 246: log-normal, clipped, the longest scan always there."""
    lengths = (217.3 * (0.5 * torch.randn(scans, generator=generator)).exp()).round().long().clamp(63, 1083)
    lengths[0] = 1083
    return lengths


SHAPES: dict[str, Callable[[int, torch.Generator], Tensor]] = {"head": head_lengths, "chest": chest_lengths}


class Noise:
    """Scans (`core.bags.ScanSet`) with features drawn on the device at each read: an engine reads once."""

    dtype = torch.float32

    def __init__(self, lengths: Tensor, width: int, device: torch.device, generator: torch.Generator) -> None:
        self.lengths, self.width, self.device = lengths, width, device
        self.labels = torch.randperm(len(lengths), generator=generator) % 2

    def rows(self, scans: Tensor) -> Tensor:
        return torch.randn(int(self.lengths[scans].sum()), self.width, device=self.device)


# ----------------------------------------------------------------------------------------------------
# Steps
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One method on scans of one kind in one precision.  Times of a step are for all configurations together."""

    method: str
    shape: str
    precision: str
    engine: str
    configs: int
    steps: int
    slices: float
    """In a batch, the mean; likewise `gflop`."""
    mean_length: float
    longest: int
    slots: tuple[int, ...]
    slots_filled: float
    epoch_ms: float
    epoch_ms_all: tuple[float, ...]
    replay_ms: float
    slices_per_second: float
    """Slices times configurations, as an epoch runs; likewise `ns_per_slice`."""
    ns_per_slice: float
    replay_ns_per_slice: float
    gflop: float
    tflop_per_s: float
    rate_share: float
    replay_rate_share: float
    memory_gib: float | None
    reserved_gib: float | None
    first_s: float
    val_ms_per_1000: float
    train_auroc_ms: float
    selection_ms: float
    evaluation_share: float
    grid_minutes: float
    finite: bool
    seconds: float


@dataclass(frozen=True)
class Size:
    """What may be made smaller for a trial."""

    configs: int
    bags: int
    features: int
    batches: int
    val_scans: int
    epochs: int
    profile: bool = False


def matrix_rate(precision: Precision, device: torch.device) -> float:
    """Operations per second of one large square product."""
    size = {"cuda": 8192}.get(device.type, 512)
    dtype = row_dtype(precision)
    left, right = (torch.randn(size, size, device=device).to(dtype) for _ in range(2))
    result = torch.empty_like(left)
    calls = 20 if precision in ("tf32", "bf16") else 5

    def run() -> None:
        for _ in range(calls):
            torch.mm(left, right, out=result)

    with matrix_precision(precision):
        run()
        seconds = statistics.median(timed_on_device(device, run) for _ in range(5))
    return calls * 2 * size**3 / seconds


def shuffled(scans: int, epochs: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(SEED)
    return [torch.randperm(scans, generator=generator) for _ in range(epochs)]


def make_engine(
    name: EngineName, stack: Stack, train: Noise, val: Noise, precision: Precision, slots: Sequence[int]
) -> Engine:
    bags = stack.configs[0].batch_size
    if name == "packed":
        return PackedEngine(stack, train, val, bags, precision)
    engine = SlottedEngine(stack, train, val, bags, precision, slots)
    if name == "compiled":
        engine.compile(every=True)
    return engine


def time_case(
    method: str, shape: str, precision: Precision, name: EngineName, size: Size, device: torch.device, rate: float
) -> Row:
    """Builds the sweep's engine on noise and times everything that an epoch does."""
    begin = time.perf_counter()
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
    torch.manual_seed(SEED)
    generator = torch.Generator().manual_seed(SEED)
    train, val = (
        Noise(SHAPES[shape](scans, generator), size.features, device, generator)
        for scans in (size.bags * size.batches, size.val_scans)
    )
    recording, warming, *orders = shuffled(len(train.lengths), size.epochs + 2)
    slots = slot_numbers(train.lengths, size.bags, iter([recording, warming, *orders]), classes=SLOT_CLASSES)
    configs = configurations(method, size.configs, size.epochs, size.bags)
    with matrix_precision(precision):
        on_cuda, start = device.type == "cuda", time.perf_counter()
        engine = make_engine(name, Stack.of(configs, size.features, device), train, val, precision, slots)
        timed(device, lambda: (engine.train_epoch(recording), engine.evaluate()))
        first = time.perf_counter() - start
        usual = timed(device, lambda: (engine.train_epoch(warming), engine.evaluate()))
        epochs = [timed(device, lambda order=order: engine.train_epoch(order)) for order in orders]
        replays, allotted = epochs, [int(train.lengths[order].sum()) for order in orders[-1].split(size.bags)]
        if isinstance(engine, SlottedEngine):
            allotted = slots_of(engine, orders[-1])
            replays = [timed_on_device(device, lambda: replay(engine, allotted)) for _ in range(3)]
            if size.profile:
                say(kernels(engine, allotted))
        evaluation = time_evaluation(engine, size)
    batches = train.lengths[orders[-1]].reshape(size.batches, size.bags)
    slices = batches.sum(1).double().mean().item()
    work = size.configs * statistics.mean(gigaflop(FLOORS[method](b, size.features)) for b in batches.tolist())
    epoch_ms = 1e3 * statistics.median(epochs) / size.batches
    replay_ms = 1e3 * statistics.median(replays) / size.batches
    val_ms = evaluation["val"] * 1e6 / size.val_scans
    evaluating = val_ms * PAPER_VAL / 1000 + 1e3 * evaluation["selection"]
    paper_epoch = PAPER_STEPS * epoch_ms + evaluating
    return Row(
        method=method,
        shape=shape,
        precision=precision,
        engine=name,
        configs=size.configs,
        steps=size.batches,
        slices=slices,
        mean_length=train.lengths.double().mean().item(),
        longest=int(train.lengths.max()),
        slots=tuple(sorted(set(allotted))) if isinstance(engine, SlottedEngine) else (),
        slots_filled=batches.sum().item() / sum(allotted),
        epoch_ms=epoch_ms,
        epoch_ms_all=tuple(1e3 * seconds / size.batches for seconds in epochs),
        replay_ms=replay_ms,
        slices_per_second=1e3 * size.configs * slices / epoch_ms,
        ns_per_slice=1e6 * epoch_ms / (size.configs * slices),
        replay_ns_per_slice=1e6 * replay_ms / (size.configs * slices),
        gflop=work,
        tflop_per_s=work / epoch_ms,
        rate_share=1e12 * work / epoch_ms / rate,
        replay_rate_share=1e12 * work / replay_ms / rate,
        memory_gib=torch.cuda.max_memory_allocated(device) / 2**30 if on_cuda else None,
        reserved_gib=torch.cuda.max_memory_reserved(device) / 2**30 if on_cuda else None,
        first_s=max(0.0, first - usual),
        val_ms_per_1000=val_ms,
        train_auroc_ms=1e3 * evaluation["train_auroc"],
        selection_ms=1e3 * evaluation["selection"],
        # The steps' time holds the training AUROC already.
        evaluation_share=(evaluating + 1e3 * evaluation["train_auroc"]) / paper_epoch,
        grid_minutes=PAPER_EPOCHS * paper_epoch / 60_000,
        finite=all(bool(torch.isfinite(parameter).all()) for parameter in engine.parameters.values()),
        seconds=time.perf_counter() - begin,
    )


def slots_of(engine: SlottedEngine, order: Tensor) -> list[int]:
    """The number of slots that each batch is given, as `train_epoch` chooses it."""
    totals = engine.lengths[order].reshape(-1, engine.batch_size).sum(1) + engine.batch_size
    return [next(rows for rows in engine.rows if rows >= total) for total in totals.tolist()]


def replay(engine: SlottedEngine, slots: Sequence[int]) -> None:
    """The steps of the epoch trained last, of so many slots, and nothing else."""
    engine.step.zero_()
    for rows in slots:
        if engine.graphed:
            engine._graphs[rows].replay()
        else:
            engine._train_step(rows)


def kernels(engine: SlottedEngine, slots: Sequence[int], most: int = 30) -> str:
    """What a step's time is made of: milliseconds and launches of the kernels, the slowest first."""
    activity = torch.profiler.ProfilerActivity
    with torch.profiler.profile(activities=[activity.CUDA if engine.graphed else activity.CPU]) as profile:
        replay(engine, slots)
        synchronize(engine.device)
    time_of = "device_time_total" if engine.graphed else "self_cpu_time_total"
    found = sorted(profile.key_averages(), key=lambda one: -getattr(one, time_of))
    lines = [
        f"{getattr(one, time_of) / 1e3 / len(slots):8.3f} x{one.count / len(slots):4.0f} {one.key[:90]}"
        for one in found
    ]
    total = sum(getattr(one, time_of) for one in found) / 1e3 / len(slots)
    return "\n".join([f"{total:8.3f} ms in all", *lines[:most]])


def time_evaluation(engine: Engine, size: Size) -> dict[str, float]:
    """Seconds of the validation set, of the paper's training AUROC, and of selecting, each once an epoch."""
    device, selection = engine.device, Selection(engine.parameters)
    logits = torch.randn(size.configs, PAPER_STEPS * BAGS, device=device)
    labels = torch.arange(logits.shape[1], device=device) % 2
    val, loss = engine.evaluate()
    parts: dict[str, Callable[[], object]] = {
        "val": engine.evaluate,
        "train_auroc": lambda: auroc(logits, labels),
        "selection": lambda: selection.update(1, val, val, loss, engine.parameters),
    }
    for run in parts.values():
        run()
    return {name: statistics.median(timed(device, run) for _ in range(5)) for name, run in parts.items()}


COLUMNS = (
    f"{'method':<9}{'scans':<6}{'precision':<10}{'engine':<9}{'epoch ms':>9}{'replay ms':>10}{'slices/s':>10}"
    f"{'ns/slice':>9}{'to head':>8}{'GFLOP':>9}{'TFLOP/s':>9}{'of rate':>8}{'filled':>7}{'GiB':>6}{'first s':>8}"
    f"{'val ms/1000':>12}{'eval':>7}{'grid min':>9}"
)


def line(row: Row, head: Row | None) -> str:
    to_head = "-" if head is None else f"{row.ns_per_slice / head.ns_per_slice:.2f}"
    memory = "-" if row.memory_gib is None else f"{row.memory_gib:.1f}"
    return (
        f"{row.method:<9}{row.shape:<6}{row.precision:<10}{row.engine:<9}{row.epoch_ms:>9.3f}{row.replay_ms:>10.3f}"
        f"{row.slices_per_second:>10.3g}{row.ns_per_slice:>9.3g}{to_head:>8}{row.gflop:>9.1f}{row.tflop_per_s:>9.3g}"
        f"{row.rate_share:>8.1%}{row.slots_filled:>7.0%}{memory:>6}{row.first_s:>8.1f}"
        f"{row.val_ms_per_1000:>12.2f}{row.evaluation_share:>7.1%}{row.grid_minutes:>9.1f}"
        f"{'' if row.finite else '  NOT FINITE'}"
    )


def head_of(row: Row, rows: Sequence[Row]) -> Row | None:
    """The same method, precision and engine on head-like scans."""
    wanted = (row.method, row.precision, row.engine, "head")
    return next((r for r in rows if (r.method, r.precision, r.engine, r.shape) == wanted), None)


def run_steps(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    epochs = options.epochs or EPOCHS["steps"]
    sizes = (options.configs, options.bags, options.features, options.batches, options.val_scans, epochs)
    size = Size(*sizes, profile=options.profile)
    usual: list[Precision] = ["tf32"] if device.type == "cuda" else ["float32"]
    cases = [
        (method, precision, shape, engine)
        for method in options.methods or list(PRECISIONS)
        for precision in options.precision or (PRECISIONS.get(method, usual) if device.type == "cuda" else usual)
        for shape in options.shapes
        for engine in options.engines
    ]
    rates = {precision: matrix_rate(precision, device) for precision in dict.fromkeys(case[1] for case in cases)}
    say("large square product: " + ", ".join(f"{name} {rate / 1e12:.3g} TFLOP/s" for name, rate in rates.items()))
    for shape in options.shapes:
        lengths = SHAPES[shape](size.bags * size.batches, torch.Generator().manual_seed(SEED))
        mean, shortest, longest = lengths.double().mean(), lengths.min(), lengths.max()
        say(f"{shape}: {size.bags} scans a batch, of {shortest}-{longest} slices, mean {mean:.1f}")
    say(f"{size.configs} configurations, {size.features} features, epochs of {size.batches} batches\n{COLUMNS}")
    rows: list[Row] = []
    failed: list[dict[str, str]] = []
    begin, slowest = time.perf_counter(), 0.0
    for method, precision, shape, engine in cases:
        case = {"method": method, "shape": shape, "precision": precision, "engine": engine}
        start = time.perf_counter()
        if start - begin + slowest > options.budget:
            say(f"left out: {' '.join(case.values())}, it might end behind the budget of {options.budget:.0f} s")
            failed.append({**case, "why": "budget"})
            continue
        try:
            forget(device)
            row = time_case(method, shape, precision, engine, size, device, rates[precision])
        except Exception as error:  # out of memory, most likely: the other cases still count
            traceback.print_exc()
            say(f"FAILED: {' '.join(case.values())}: {type(error).__name__}")
            failed.append({**case, "why": f"{type(error).__name__}: {error}"[:500]})
        else:
            rows.append(row)
            say(line(row, head_of(row, rows)))
        slowest = max(slowest, time.perf_counter() - start)
    comparable = device.type == "cuda" and (size.configs, size.bags, size.features) == (CONFIGS, BAGS, FEATURES)
    goals = step_goals(rows) if comparable else []
    return {"rates": rates, "rows": [asdict(row) for row in rows], "failed": failed, "goals": goals}


def forget(device: torch.device) -> None:
    """Compiled code, graphs and memory of the last case."""
    if device.type == "cuda":
        torch._dynamo.reset()
        gc.collect()
        torch.cuda.empty_cache()


def goal(name: str, about: str, value: float, limit: float, **more: Any) -> dict[str, Any]:
    return {"goal": name, "about": about, "limit": limit, "value": value, "met": bool(value <= limit), **more}


def step_goals(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Each goal for each row; they are meant for an H200 and the full size."""
    found = []
    for row in rows:
        about, head = f"{row.method} {row.shape} {row.precision} {row.engine}", head_of(row, rows)
        limit = STEP_GOALS_MS.get((row.method, row.shape, row.precision))
        if limit is not None:
            found.append(goal("ms a step at most", about, row.epoch_ms, limit, replay=row.replay_ms))
        if row.engine == "recorded":
            found.append(goal("seconds before training at most", about, row.first_s, FIRST_GOAL_S))
        if row.shape == "head" and row.method in GRID_GOALS_MINUTES:
            limit = GRID_GOALS_MINUTES[row.method]
            found.append(goal("minutes of 1,000 epochs (extrapolated) at most", about, row.grid_minutes, limit))
        if row.shape != "head" and head is not None:
            to_head = row.ns_per_slice / head.ns_per_slice
            found.append(goal("cost of a slice relative to head at most", about, to_head, PER_SLICE_GOAL))
        found.append(goal("share of evaluation and selection at most", about, row.evaluation_share, EVALUATION_GOAL))
    return found


# ----------------------------------------------------------------------------------------------------
# torchmil's Trainer
# ----------------------------------------------------------------------------------------------------


TORCHMIL_METHODS = ("abmil", "ng", "transmil", "mhng")
"""Methods whose counterpart in torchmil (counterparts.py) trains on features alone."""


def train_with_torchmil(method: str, configs: Sequence[Config], train: Bags, val: Bags) -> None:
    """Every configuration one after another by torchmil's Trainer; lr is all that it can vary."""
    import torchmetrics
    from torch.utils.data import DataLoader
    from torchmil.data import collate_fn
    from torchmil.utils.trainer import Trainer

    from counterparts import COUNTERPARTS

    bags, val_bags = ([{"X": bag.features, "Y": torch.tensor(bag.label)} for bag in scans] for scans in (train, val))
    for config in configs:
        torch.manual_seed(config.seed)
        model = COUNTERPARTS[method].build(train.width)
        Trainer(
            model,
            torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum),
            metrics_dict={"auroc": torchmetrics.AUROC(task="binary")},
            obj_metric="auroc",
            device="cpu",
            disable_pbar=True,
            verbose=False,
        ).train(
            config.epochs,
            DataLoader(bags, config.batch_size, shuffle=True, drop_last=True, collate_fn=collate_fn),
            DataLoader(val_bags, config.batch_size, collate_fn=collate_fn),
        )


def run_torchmil(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    epochs = options.epochs or EPOCHS["torchmil"]
    train = shifted_mean(options.train_scans or 256, SEED, features=options.features)
    val = shifted_mean(max(2, len(train) // 4), SEED + 1, features=options.features)
    say(f"the grid of {options.configs} configurations, {epochs} epochs in batches of {options.bags}, on the CPU")
    say(f"training {train}\nvalidation {val}\n{TRAINER_LACKS}")
    say(f"{'method':<9}{'ours s':>9}{'torchmil s':>12}{'torchmil/ours':>15}{'configs/hour':>14}{'torchmil':>10}")
    found = []
    for method in options.methods or ["abmil", "ng"]:
        configs = configurations(method, options.configs, epochs, options.bags)
        runs: dict[str, Callable[[], object]] = {
            "ours": lambda configs=configs: sweep(configs, train, val, Execution("cpu")),
            "torchmil": lambda configs=configs, method=method: train_with_torchmil(method, configs, train, val),
        }
        sweep(configs[:1], train, val, Execution("cpu"))  # imports, threads, libraries' scratch
        train_with_torchmil(method, configs[:1], train, val)
        seconds: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(options.repeats):
            for name in list(runs) if number % 2 == 0 else list(reversed(runs)):
                seconds[name].append(timed(device, runs[name]))
        median = {name: statistics.median(values) for name, values in seconds.items()}
        per_hour = {name: 3600 * len(configs) / value for name, value in median.items()}
        ratio = median["torchmil"] / median["ours"]
        say(
            f"{method:<9}{median['ours']:>9.2f}{median['torchmil']:>12.2f}{ratio:>15.2f}"
            f"{per_hour['ours']:>14.0f}{per_hour['torchmil']:>10.0f}"
        )
        found.append(
            {"method": method, "configs": len(configs), "epochs": epochs, "train_scans": len(train), "ratio": ratio}
            | {"val_scans": len(val), "seconds": median, "seconds_all": seconds, "configs_per_hour": per_hour}
        )
    return {"torchmil": found, "torchmil_lacks": TRAINER_LACKS}


# ----------------------------------------------------------------------------------------------------
# Accuracy
# ----------------------------------------------------------------------------------------------------

ACCURACY_SHIFT = 1.0
"""Twice the paper's, so that few scans and epochs teach enough: ng reached .67 with .5 and .87 with 1.0."""


def val_history(result: Sweep) -> Tensor:
    return result.history[..., HISTORY.index("val_auroc")]


def slice_auroc(result: Sweep, val: Bags, device: torch.device) -> float | None:
    """Localization by the winner's attention, computed in float32 whatever it was trained in."""
    if not result.winners:
        return None
    winner = result.winners[0]
    model = build_model(winner.config.method, val.width).to(device)
    model.load_state_dict({name: weight.float() for name, weight in winner.weights.items()})
    attention = []
    with torch.no_grad():
        for batch in val.batches(256):
            attention.append(model(batch.features.to(device), batch.lengths.to(device)).attention.cpu())
    assert val.slice_labels is not None
    return localization(torch.cat(attention), val.slice_labels, val.lengths).mean_auroc.item()


def differences(ours: Sweep, reference: Sweep) -> dict[str, dict[str, float]]:
    """Of validation AUROC by configuration: in the last epoch, and in the best epoch of each."""
    found = {}
    for name, pick in {"last": lambda auroc: auroc[-1], "best": lambda auroc: auroc.amax(0)}.items():
        difference = pick(val_history(ours)) - pick(val_history(reference))
        known = difference[difference.isfinite()]
        found[name] = {
            "mean": known.mean().item(),
            "mean_abs": known.abs().mean().item(),
            "max_abs": known.abs().max().item(),
            "not_finite": int((~difference.isfinite()).sum()),
        }
    return found


def run_accuracy(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    epochs = options.epochs or EPOCHS["accuracy"]
    scans = options.train_scans or 2000
    train, val = (
        shifted_mean(count, seed, features=options.features, shift=ACCURACY_SHIFT)
        for count, seed in ((scans, SEED), (max(2, scans // 2), SEED + 1))
    )
    precisions = options.precision or (["tf32", "bf16"] if device.type == "cuda" else ["float64"])
    variants: list[tuple[str, Precision, int]] = [("float32", "float32", 0), ("noise", "float32", 1)]
    variants += [(precision, precision, 0) for precision in precisions if precision != "float32"]
    say(f"accuracy: {options.configs} configurations, {epochs} epochs, a shift of {ACCURACY_SHIFT}")
    say(f"training {train}\nvalidation {val}")
    say("differences of validation AUROC from float32; 'noise' is float32 with another seed of weights and order")
    header = "".join(f"{which + ': mean':>12}{'mean |d|':>10}{'max |d|':>9}" for which in ("last", "best"))
    say(f"{'method':<9}{'run':<9}{header}{'selected AUROC':>16}{'slice AUROC':>13}{'seconds':>9}")
    found, goals = [], []
    for method in options.methods or ["mhng"]:
        results: dict[str, Sweep] = {}
        for name, precision, seed in variants:
            configs = configurations(method, options.configs, epochs, options.bags, seed)
            execution, start = Execution(str(device), precision), time.perf_counter()
            result = results[name] = sweep(configs, train, val, execution)
            seconds = time.perf_counter() - start
            selected = result.winners[0].val_auroc if result.winners else None
            located, compared = slice_auroc(result, val, device), differences(result, results["float32"])
            found.append(
                {"method": method, "run": name, "precision": precision, "seed": seed, "differences": compared}
                | {"selected_val_auroc": selected, "slice_auroc": located, "seconds": seconds}
                | {
                    "best_val_auroc": val_history(result).amax(0).tolist(),
                    "last_val_auroc": val_history(result)[-1].tolist(),
                }
            )
            shown = "".join(
                f"{values['mean']:>+12.4f}{values['mean_abs']:>10.4f}{values['max_abs']:>9.4f}"
                for values in compared.values()
            )
            chosen, inside = ("-" if value is None else f"{value:.4f}" for value in (selected, located))
            say(f"{method:<9}{name:<9}{shown}{chosen:>16}{inside:>13}{seconds:>9.1f}")
            forget(device)
        noise = next(entry for entry in found if (entry["method"], entry["run"]) == (method, "noise"))["differences"]
        for entry in found:
            if entry["method"] == method and entry["run"] not in ("float32", "noise"):
                for which, values in entry["differences"].items():
                    about, limit = f"{method} {entry['run']} {which} epoch", noise[which]["mean_abs"]
                    goals.append(
                        goal("mean |difference| of AUROC at most the noise's", about, values["mean_abs"], limit)
                    )
    return {"accuracy": found, "goals": goals}


# ----------------------------------------------------------------------------------------------------
# Command line
# ----------------------------------------------------------------------------------------------------

PARTS: dict[str, Callable[[argparse.Namespace, torch.device], dict[str, Any]]] = {
    "steps": run_steps,
    "torchmil": run_torchmil,
    "accuracy": run_accuracy,
}


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    trainable = [name for name in FLOORS if METHODS[name].pool is None]
    parser = argparse.ArgumentParser(description="Time the sweep of all configurations of a method at once.")
    parser.add_argument("--device", default="cpu", help="cpu, cuda, cuda:1; cpu unless given")
    for name, text in (
        ("steps", "time training steps; the default on CUDA"),
        ("torchmil", "the whole grid beside torchmil's Trainer, on the CPU; the default there"),
        ("accuracy", "compare precisions by validation AUROC"),
    ):
        parser.add_argument(f"--{name}", action="store_true", help=text)
    parser.add_argument("--methods", type=names(trainable), help=f"of {','.join(trainable)}; each part has its default")
    parser.add_argument("--shapes", type=names(SHAPES), default=list(SHAPES), help="scan lengths for steps: head,chest")
    parser.add_argument("--precision", type=names(get_args(Precision)), help="for all methods; e.g. tf32,bf16")
    parser.add_argument("--engines", type=names(get_args(EngineName)), default=["recorded"], help="for steps")
    parser.add_argument("--configs", type=int, default=CONFIGS, help="the first so many of the paper's 32")
    parser.add_argument("--epochs", type=int, help=f"to time or to train; else {EPOCHS}")
    parser.add_argument("--batches", type=int, default=40, help="in an epoch of steps")
    parser.add_argument("--train-scans", type=int, help="for torchmil (256 unless given) and accuracy (2000)")
    parser.add_argument("--repeats", type=int, default=4, help="turns of ours and torchmil, the order alternating")
    parser.add_argument("--profile", action="store_true", help="list the kernels of a step, for steps")
    parser.add_argument("--budget", type=float, default=440, help="seconds after which steps begin no case")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--commit", help="to report where the code has come without its repository")
    # Small runs, for tests.
    parser.add_argument("--features", type=int, default=FEATURES, help=argparse.SUPPRESS)
    parser.add_argument("--bags", type=int, default=BAGS, help=argparse.SUPPRESS)
    parser.add_argument("--val-scans", type=int, default=1024, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    check(parser, options)
    return options


def check(parser: argparse.ArgumentParser, options: argparse.Namespace) -> None:
    """Fills in the parts, and refuses what would fail late."""
    cuda = torch.device(options.device).type == "cuda"
    if cuda and not torch.cuda.is_available():
        parser.error(f"--device {options.device}: torch finds no CUDA device here; use --device cpu")
    options.parts = [name for name in PARTS if getattr(options, name)] or ["steps" if cuda else "torchmil"]
    on_cuda_only = [name for name in options.precision or () if name in ("tf32", "bf16") and not cuda]
    if on_cuda_only:
        parser.error(f"--precision {','.join(on_cuda_only)} is for CUDA; on {options.device} use float32")
    impossible = [name for name in options.methods or () if name not in TORCHMIL_METHODS]
    if "torchmil" in options.parts and impossible:
        parser.error(f"--torchmil compares {','.join(TORCHMIL_METHODS)} only, not {','.join(impossible)}")
    if not 1 <= options.configs <= CONFIGS:
        parser.error(f"--configs is {options.configs}; the paper's grid has 1 to {CONFIGS}")


def verdicts(goals: Sequence[dict[str, Any]]) -> Iterator[str]:
    for entry in goals:
        more = [f"replay alone {entry['replay']:.3g}"] if "replay" in entry else []
        text = f"{entry['goal']} {entry['limit']:.3g}: {entry['value']:.3g}" + (f" ({', '.join(more)})" if more else "")
        yield f"{'met   ' if entry['met'] else 'MISSED'}  {entry['about']:<29} {text}"


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    torch.set_num_threads(options.threads)
    device = torch.device(options.device)
    about = machine(options.device, options.commit)
    say(", ".join(f"{key} {value}" for key, value in about.items()))
    started = time.perf_counter()
    report: dict[str, Any] = {"benchmark": "sweep", "machine": about, "options": {**vars(options), "seed": SEED}}
    goals: list[dict[str, Any]] = []
    for part in options.parts:
        found = PARTS[part](options, device)
        goals += found.pop("goals", [])
        report |= found
    for text in verdicts(goals):
        say(text)
    say(json.dumps(report | {"goals": goals, "seconds": round(time.perf_counter() - started, 1)}))
    return 1 if report.get("failed") else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
