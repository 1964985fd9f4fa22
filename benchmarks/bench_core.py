"""One training step of every model, timed in one run beside three yardsticks; a table, the goals, then one JSON line.

    python benchmarks/bench_core.py [--shapes head,chest] [--models abmil,ng] [--repeats 7] [--threads 2] [--no-memory]

A step is forward, BCE (plus guidance for ng and mhng), backward, SGD with momentum, dropping the gradients; float32.
Ours takes packed features and a tensor of lengths; the layout is built once inside the step.
Beside it:
  floor     the bare matrix products that the step cannot avoid (floor.py);
  torchmil  its nearest model, on features padded with a mask (and an adjacency) outside the timing (counterparts.py);
  loop      a Python loop over bags through the textbook form of the same model (textbook.py).

Timing: every variant is warmed up; then rounds in which all variants of a batch shape take turns, so that a slow minute
of the machine hits all of them.  The figure is the median over the rounds; a round calls a fast variant several times.
A variant gets no further round once it has used up `SECONDS_PER_VARIANT`; it is marked * in the table.  Figures from a
machine that others use at the same time are worth nothing: each parallel operation then waits for a busy core.

Memory: growth of the resident set's peak (VmHWM) during a step over the resident set just before it, each variant in a
process of its own, after a warm-up step on two short bags that allocates momentum, threads and libraries' scratch.
Inputs are not counted.  glibc is told to map every block above 64 KiB, so that freed memory does not hide in the heap.
This sees what tensor profilers miss (scratch of matrix products) and counts all variants alike.  Linux only.
"""

from __future__ import annotations

import argparse
import json
import math
import multiprocessing
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from rich.box import SIMPLE
from rich.console import Console
from rich.table import Table
from torch import Tensor, nn

from counterparts import COUNTERPARTS, chain_adjacency
from floor import FLOORS, gigaflop, runner
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.layout import Layout, unpack
from normal_guidance.core.methods import METHODS, build_model
from normal_guidance.core.prediction import FEATURES
from report import machine, names
from textbook import MODELS as TEXTBOOK
from textbook import loss as textbook_loss

SEED = 2026
SECONDS_PER_VARIANT = 15.0
SECONDS_PER_ROUND = 0.05
WITHIN_FLOOR = {"abmil": 1.5, "ng": 1.5, "transmil": 2.0, "mhng": 2.0}
FASTER_THAN = {"torchmil": 2.0, "loop": 5.0}

# ----------------------------------------------------------------------------------------------------
# Batches
# ----------------------------------------------------------------------------------------------------


def head_lengths(bags: int) -> list[int]:
    """Head CT: uniform, 20 to 60 slices."""
    return torch.randint(20, 61, (bags,), generator=torch.Generator().manual_seed(SEED)).tolist()


def chest_lengths(bags: int) -> list[int]:
    """Chest CT: 63 to 1,083 slices with a mean of about 246: log-normal, the longest bag set to 1,083."""
    generator = torch.Generator().manual_seed(SEED)
    draws = (math.log(175) + 0.5 * torch.randn(bags - 1, generator=generator)).exp()
    return [1083, *draws.round().long().clamp(63, 1083).tolist()]


SHAPES: dict[str, tuple[int, Callable[[int], list[int]]]] = {"head": (64, head_lengths), "chest": (16, chest_lengths)}
"""Bags in a batch, and the lengths of so many bags."""


@dataclass(frozen=True)
class Batch:
    """Packed features, lengths and labels."""

    features: Tensor
    lengths: Tensor
    labels: Tensor

    @classmethod
    def random(cls, lengths: list[int], features: int) -> Batch:
        generator = torch.Generator().manual_seed(SEED)
        return cls(
            features=torch.randn(sum(lengths), features, generator=generator),
            lengths=torch.tensor(lengths),
            labels=(torch.arange(len(lengths)) % 2).float(),
        )


# ----------------------------------------------------------------------------------------------------
# Training steps
# ----------------------------------------------------------------------------------------------------


class Step:
    """One training step of a model: `prepare` turns a batch into the loss's inputs, outside the timing."""

    def __init__(
        self, model: nn.Module, prepare: Callable[[Batch], tuple[Any, ...]], loss: Callable[..., Tensor]
    ) -> None:
        self.model, self.prepare, self.loss = model, prepare, loss
        self.optimizer = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)

    def __call__(self, *inputs: Any) -> None:
        self.loss(*inputs).backward()
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)


def ours(method: str, features: int) -> Step:
    model, guided, guidance = build_model(method, features), METHODS[method].guided, NormalGuidance()

    def loss(rows: Tensor, lengths: Tensor, labels: Tensor) -> Tensor:
        layout = Layout.packed(lengths)
        prediction = model(rows, layout)
        total = F.binary_cross_entropy_with_logits(prediction.logit, labels)
        if guided:
            total = total + guidance(prediction.log_attention, lengths=layout, from_logits=True)
        return total

    return Step(model, lambda batch: (batch.features, batch.lengths, batch.labels), loss)


def torchmil(method: str, features: int) -> Step:
    counterpart = COUNTERPARTS[method]
    model = counterpart.build(features)

    def prepare(batch: Batch) -> tuple[Tensor, ...]:
        padded, mask = unpack(batch.features, batch.lengths)
        if counterpart.needs_adjacency:
            return batch.labels, padded, chain_adjacency(batch.lengths.tolist()), mask
        return batch.labels, padded, mask

    return Step(model, prepare, lambda labels, *bags: F.binary_cross_entropy_with_logits(model(*bags), labels))


def loop(method: str, features: int) -> Step:
    model, guided = TEXTBOOK[method](features), METHODS[method].guided

    def prepare(batch: Batch) -> tuple[Any, ...]:
        return batch.features.split(batch.lengths.tolist()), batch.labels

    return Step(model, prepare, lambda bags, labels: textbook_loss(model, bags, labels, guided))


STEPS: dict[str, Callable[[str, int], Step]] = {"ours": ours, "torchmil": torchmil, "loop": loop}


def same_work(kind: str, method: str) -> str:
    """A name for what a variant computes: methods that share a floor or a counterpart are measured once."""
    if kind == "floor":
        return FLOORS[method].__name__
    return COUNTERPARTS[method].title if kind == "torchmil" else method


# ----------------------------------------------------------------------------------------------------
# Time
# ----------------------------------------------------------------------------------------------------


@dataclass
class Timing:
    """Seconds of each round, and how often a round calls."""

    run: Callable[[], None]
    calls: int = 1
    spent: float = 0.0
    seconds: list[float] = field(default_factory=list)

    def warm_up(self) -> None:
        """Two calls, since the first may be far slower than the rest; one is enough where a step takes seconds."""
        once = self._call()
        if once < SECONDS_PER_VARIANT / 10:
            once = self._call()
        self.calls = max(1, min(20, int(SECONDS_PER_ROUND / once)))

    def round(self) -> None:
        """The round's figure is the median call: the first one finds the caches cold."""
        self.seconds.append(statistics.median(self._call() for _ in range(self.calls)))

    def _call(self) -> float:
        start = time.perf_counter()
        self.run()
        seconds = time.perf_counter() - start
        self.spent += seconds
        return seconds


def time_shape(batch: Batch, methods: list[str], repeats: int) -> dict[tuple[str, str], Timing]:
    """Seconds of every variant of every method on one batch, variants taking turns."""
    features, lengths = batch.features.shape[1], batch.lengths.tolist()
    timings: dict[tuple[str, str], Timing] = {}
    for method in methods:
        timings.setdefault(("floor", same_work("floor", method)), Timing(runner(FLOORS[method](lengths, features))))
        for kind, build in STEPS.items():
            if (kind, same_work(kind, method)) not in timings:
                step = build(method, features)
                inputs = step.prepare(batch)
                timings[kind, same_work(kind, method)] = Timing(lambda step=step, inputs=inputs: step(*inputs))
    for timing in timings.values():
        timing.warm_up()
    for number in range(repeats):
        for timing in timings.values():
            if number == 0 or timing.spent < SECONDS_PER_VARIANT:
                timing.round()
    return timings


# ----------------------------------------------------------------------------------------------------
# Memory
# ----------------------------------------------------------------------------------------------------


def _status_mib(name: str) -> float:
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(float(line.split()[1]) for line in lines if line.startswith(f"{name}:")) / 1024


def step_memory(task: tuple[str, str, list[int], int, int]) -> float:
    """MiB by which one step raises the resident set; runs in a process of its own."""
    kind, method, lengths, features, threads = task
    torch.set_num_threads(threads)
    torch.manual_seed(SEED)
    step = STEPS[kind](method, features)
    step(*step.prepare(Batch.random([20, 21], features)))
    inputs = step.prepare(Batch.random(lengths, features))
    Path("/proc/self/clear_refs").write_text("5")  # the peak starts again from here
    before = _status_mib("VmRSS")
    step(*inputs)
    return _status_mib("VmHWM") - before


def memory_of(shapes: dict[str, list[int]], methods: list[str], features: int, threads: int) -> dict[tuple, float]:
    """Peak memory of a step by (shape, kind, work), in MiB; empty where the system cannot tell."""
    if not os.access("/proc/self/clear_refs", os.W_OK):
        return {}
    # The server that processes are forked from imports the slow packages once and has run nothing in parallel.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["torchmil.models", "normal_guidance.core.models", "rich.table"])
    os.environ["MALLOC_MMAP_THRESHOLD_"] = "65536"
    peaks: dict[tuple, float] = {}
    for shape, lengths in shapes.items():
        for method in methods:
            for kind in STEPS:
                key = (shape, kind, same_work(kind, method))
                if key not in peaks:
                    with context.Pool(1) as pool:
                        peaks[key] = pool.apply(step_memory, ((kind, method, lengths, features, threads),))
    return peaks


# ----------------------------------------------------------------------------------------------------
# Report
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Row:
    """One method on one batch shape: times in milliseconds, memory in MiB, medians unless the name says otherwise."""

    shape: str
    model: str
    counterpart: str
    floor_gflop: float
    floor_gflop_per_s: float
    ms: dict[str, float]
    min_ms: dict[str, float]
    rounds: dict[str, int]
    memory_mib: dict[str, float | None]

    def ratio(self, slower: str, faster: str) -> float:
        return self.ms[slower] / self.ms[faster]


def make_row(shape: str, method: str, batch: Batch, timings: dict, peaks: dict) -> Row:
    chosen = {kind: timings[kind, same_work(kind, method)] for kind in ("ours", "floor", "torchmil", "loop")}
    ms = {kind: 1e3 * statistics.median(timing.seconds) for kind, timing in chosen.items()}
    work = gigaflop(FLOORS[method](batch.lengths.tolist(), batch.features.shape[1]))
    return Row(
        shape=shape,
        model=method,
        counterpart=COUNTERPARTS[method].title,
        floor_gflop=work,
        floor_gflop_per_s=1e3 * work / ms["floor"],
        ms=ms,
        min_ms={kind: 1e3 * min(timing.seconds) for kind, timing in chosen.items()},
        rounds={kind: len(timing.seconds) for kind, timing in chosen.items()},
        memory_mib={kind: peaks.get((shape, kind, same_work(kind, method))) for kind in STEPS},
    )


def goals(rows: Iterable[Row]) -> list[dict[str, Any]]:
    """Each goal for each row: what it asks, what was measured, whether it is met, and what the floor itself reaches."""
    found = []

    def add(row: Row, goal: str, value: float, limit: float, met: bool, floor: float | None = None) -> None:
        found.append(
            {"shape": row.shape, "model": row.model, "goal": goal, "limit": limit, "value": value, "met": met}
            | {"floor_reaches": floor}
        )

    for row in rows:
        if row.model in WITHIN_FLOOR:
            value, limit = row.ratio("ours", "floor"), WITHIN_FLOOR[row.model]
            add(row, "ours / floor at most", value, limit, value <= limit)
        for slower, limit in FASTER_THAN.items():
            value = row.ratio(slower, "ours")
            add(row, f"{slower} / ours at least", value, limit, value >= limit, row.ratio(slower, "floor"))
        mine, theirs = row.memory_mib["ours"], row.memory_mib["torchmil"]
        if mine is not None and theirs is not None:
            add(row, "memory, MiB, at most torchmil's", mine, theirs, mine <= theirs)
    return found


def print_table(console: Console, rows: list[Row], batch: Batch, repeats: int) -> None:
    lengths = batch.lengths
    shortest, longest, mean = int(lengths.min()), int(lengths.max()), lengths.float().mean()
    slices, features = batch.features.shape
    title = (
        f"{rows[0].shape}: {len(lengths)} bags of {shortest}-{longest} slices (mean {mean:.0f}), "
        f"{slices} slices in all, {features} features"
    )
    table = Table(title=title, box=SIMPLE, title_justify="left")
    table.add_column("model")
    for name in ("ours ms", "floor ms", "ours/floor", "GFLOP", "GFLOP/s", "torchmil ms", "torchmil/ours", "loop ms"):
        table.add_column(name, justify="right")
    for name in ("loop/ours", "MiB ours", "torchmil"):
        table.add_column(name, justify="right")
    table.add_column("counterpart")
    for row in rows:
        ms = {kind: f"{value:.1f}{'*' if row.rounds[kind] < repeats else ''}" for kind, value in row.ms.items()}
        memory = (row.memory_mib["ours"], row.memory_mib["torchmil"])
        table.add_row(
            *(row.model, ms["ours"], ms["floor"], f"{row.ratio('ours', 'floor'):.2f}"),
            *(f"{row.floor_gflop:.2f}", f"{row.floor_gflop_per_s:.0f}"),
            *(ms["torchmil"], f"{row.ratio('torchmil', 'ours'):.1f}", ms["loop"], f"{row.ratio('loop', 'ours'):.1f}"),
            *("-" if mib is None else f"{mib:.1f}" for mib in memory),
            row.counterpart,
        )
    console.print(table)


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time one training step of every model beside three yardsticks.")
    parser.add_argument("--shapes", type=names(SHAPES), default=list(SHAPES), help="batch shapes: head,chest")
    parser.add_argument("--models", type=names(TEXTBOOK), default=list(TEXTBOOK), help=f"of {','.join(TEXTBOOK)}")
    parser.add_argument("--repeats", type=int, default=7, help="rounds; the figure is their median")
    parser.add_argument("--threads", type=int, default=2, help="torch's threads")
    parser.add_argument("--no-memory", action="store_true", help="leave the memory out")
    parser.add_argument("--features", type=int, default=FEATURES, help=argparse.SUPPRESS)  # small runs, for tests
    parser.add_argument("--bags", type=int, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main(arguments: list[str]) -> None:
    options = parse_arguments(arguments)
    console = Console(width=170)
    about = machine("cpu")
    console.print(", ".join(f"{key} {value}" for key, value in about.items()), highlight=False)
    started = time.perf_counter()
    lengths = {shape: SHAPES[shape][1](options.bags or SHAPES[shape][0]) for shape in options.shapes}
    # Memory first: its processes must be forked before this one has touched much.
    peaks = {} if options.no_memory else memory_of(lengths, options.models, options.features, options.threads)

    torch.set_num_threads(options.threads)
    torch.manual_seed(SEED)
    rows: list[Row] = []
    for shape in options.shapes:
        batch = Batch.random(lengths[shape], options.features)
        timings = time_shape(batch, options.models, options.repeats)
        found = [make_row(shape, method, batch, timings, peaks) for method in options.models]
        print_table(console, found, batch, options.repeats)
        rows += found
    results = goals(rows)
    for goal in results:
        verdict = "met   " if goal["met"] else "MISSED"
        text = f"{goal['goal']} {goal['limit']:.4g}: {goal['value']:.4g}"
        if not goal["met"] and goal["floor_reaches"]:
            text += f" (the floor itself: {goal['floor_reaches']:.3g})"
        console.print(f"{verdict}  {goal['shape']:<6}{goal['model']:<9} {text}", highlight=False)
    report = {
        "benchmark": "core",
        "machine": about,
        "options": {**vars(options), "seed": SEED, "lengths": lengths},
        "seconds": round(time.perf_counter() - started, 1),
        "rows": [asdict(row) for row in rows],
        "goals": results,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main(sys.argv[1:])
