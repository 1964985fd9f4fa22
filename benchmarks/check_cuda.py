"""Every method on CUDA against the CPU in float32: widths x precisions x lengths of scans; a table, then one JSON line.

    python benchmarks/check_cuda.py [--methods ng,mhng] [--widths 768,1280] [--precisions tf32] [--lengths 20-60] ...

A case trains two configurations for some steps by `sweep.sweep` as users call it, so whatever engine takes over
counts, and compares the loss of every step after the first with the CPU's: it depends on all gradients before it.
Differences are relative to losses above 1, as those with a large L1 term are.  No case counts as little work, which the
packed engine would do; "took over" counts the cases in which it had to.  The methods with eight heads must refuse the
width 1,001 and name the widths beside it that work.

Groups of a width and a length run side by side in `--jobs` processes, fewer of long scans: bells over 5,000
slices take gigabytes.  A case that fails is named with its reason, and so is a group whose process ends early.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import ExitStack
from dataclasses import asdict, dataclass
from itertools import product
from typing import Any, get_args

import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import DISTINCT, EVERY_METHOD, SLICE_REFERENCE
from normal_guidance.sweep import execution
from normal_guidance.sweep.config import Config, EngineName, Execution, Precision, grid
from normal_guidance.sweep.sweep import HISTORY, sweep
from report import machine, names

WIDTHS = (64, 192, 384, 768, 1000, 1001, 1024, 1280, 1536, 2048)
TOLERANCE: dict[str, float] = {"float64": 1e-4, "float32": 1e-4, "tf32": 5e-3, "bf16": 3e-2}


@dataclass(frozen=True)
class Lengths:
    """Scans of `shortest` to `longest` slices: both lengths occur."""

    shortest: int
    longest: int
    scans: int
    batch_size: int
    jobs: int = 99
    """The most groups at a time."""

    def draw(self, scans: int, generator: torch.Generator) -> torch.Tensor:
        lengths = torch.randint(self.shortest, self.longest + 1, (scans,), generator=generator)
        lengths[0], lengths[-1] = self.longest, self.shortest
        return lengths


LENGTHS = {
    "1-5": Lengths(1, 5, 24, 12),
    "20-60": Lengths(20, 60, 24, 12),
    "20-400": Lengths(20, 400, 12, 6),
    "1000-5000": Lengths(1000, 5000, 2, 1, jobs=5),
}
TRAINABLE = [*(name for name in DISTINCT if EVERY_METHOD[name].scores_scans), SLICE_REFERENCE]


@dataclass(frozen=True)
class Outcome:
    """What one case gave."""

    method: str
    width: int
    lengths: str
    precision: str
    difference: float
    """The largest difference of a loss, relative to losses above 1; NaN where nothing was trained."""
    took_over: str
    """What the sweep said when the packed engine took over."""
    failed: str
    seconds: float


class Said(logging.Handler):
    """Keeps what the sweep logs."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def make_scans(lengths: Lengths, width: int, scans: int, seed: int) -> Bags:
    generator = torch.Generator().manual_seed(seed)
    sizes = lengths.draw(scans, generator)
    labels = torch.arange(scans) % 2
    features = torch.randn(int(sizes.sum()), width, generator=generator)
    return Bags(features, sizes, labels, slice_labels=labels.repeat_interleave(sizes))


def losses(method: str, train: Bags, val: Bags, batch_size: int, how: Execution) -> torch.Tensor:
    """The mean loss of every epoch but the first; an epoch is one or two steps."""
    field = 11 if method == SLICE_REFERENCE else None
    base = Config(method, epochs=2, batch_size=batch_size, receptive_field=field)
    # A larger rate overshoots at 1,536 features and more, and then any rounding grows tenfold from step to step.
    return sweep(grid(base, lr=[0.03], l1=[0.0, 0.001]), train, val, how).history[1:, :, HISTORY.index("loss")]


def check_group(
    width: int,
    lengths: str,
    methods: Sequence[str],
    precisions: Sequence[Precision],
    device: str,
    engine: EngineName | None,
    threads: int,
) -> list[Outcome]:
    """All methods and precisions on scans of one width and length."""
    torch.set_num_threads(threads)
    execution.RECORDING_SECONDS = 0.0
    said, log = Said(), logging.getLogger("normal_guidance")
    log.addHandler(said)
    log.propagate = False
    shape, found = LENGTHS[lengths], []
    train, val = (make_scans(shape, width, max(2, scans), seed) for seed, scans in ((1, shape.scans), (2, 2)))
    for method in methods:
        try:
            want = losses(method, train, val, shape.batch_size, Execution("cpu"))
        except UserError as error:
            neighbours = [str(width - width % 8), str(width - width % 8 + 8)]
            wrong = "" if width % 8 and all(name in str(error) for name in neighbours) else f"refused: {error}"
            found.append(Outcome(method, width, lengths, "refused", float("nan"), "", wrong, 0.0))
            continue
        for precision in precisions:
            said.lines.clear()
            start, difference, failed = time.perf_counter(), float("nan"), ""
            try:
                got = losses(method, train, val, shape.batch_size, Execution(device, precision, engine))
                difference = ((got - want).abs() / want.abs().clamp_min(1.0)).max().item()
                if not difference < TOLERANCE[precision]:
                    failed = f"the loss is off by {difference:.1e}"
            except Exception as error:
                failed = f"{type(error).__name__}: {error}"[:300]
            took_over = said.lines[0] if said.lines else ""
            seconds = time.perf_counter() - start
            found.append(Outcome(method, width, lengths, precision, difference, took_over, failed, seconds))
    return found


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Check every method on CUDA against the CPU.")
    parser.add_argument("--methods", type=names(TRAINABLE), default=TRAINABLE)
    parser.add_argument("--widths", type=names(map(str, WIDTHS)), default=list(map(str, WIDTHS)))
    parser.add_argument("--precisions", type=names(get_args(Precision)), default=["float32", "tf32", "bf16"])
    parser.add_argument("--lengths", type=names(LENGTHS), default=list(LENGTHS))
    parser.add_argument("--engine", choices=get_args(EngineName), help="else the sweep chooses")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--jobs", type=int, default=8)
    parser.add_argument("--commit", help="to report where the code has come without its repository")
    return parser.parse_args(arguments)


def line(outcomes: Sequence[Outcome]) -> str:
    """The cases of one method and precision."""
    differences = [one.difference for one in outcomes if one.difference == one.difference]
    worst = f"{max(differences):.1e}" if differences else "-"
    took_over, failed = (sum(bool(getattr(one, field)) for one in outcomes) for field in ("took_over", "failed"))
    first = outcomes[0]
    return f"{first.method:<20}{first.precision:<10}{len(outcomes):>6}{worst:>10}{took_over:>11}{failed:>8}"


def run_group(
    lengths: str, width: str, turns: Sequence[threading.Semaphore], options: argparse.Namespace
) -> list[Outcome]:
    """`check_group` in a process of its own, which may be killed, as soon as all turns allow it."""
    how = [",".join(options.methods), ",".join(options.precisions), options.device, options.engine or ""]
    most = min(options.jobs, LENGTHS[lengths].jobs) if lengths in LENGTHS else options.jobs
    threads = max(1, (os.cpu_count() or 1) // most)
    command = [sys.executable, __file__, "--group", width, lengths, *how, str(threads)]
    with ExitStack() as stack:
        for turn in turns:
            stack.enter_context(turn)
        run = subprocess.run(command, capture_output=True, text=True, check=False)
    lines = run.stdout.splitlines()
    if run.returncode == 0 and lines:
        return [Outcome(**one) for one in json.loads(lines[-1])]
    last = (run.stderr.strip().splitlines() or ["nothing was said"])[-1]
    why = f"the process ended with {run.returncode}: {last[:200]}"
    return [Outcome("all", int(width), lengths, "all", float("nan"), "", why, 0.0)]


def tell_group(outcomes: Sequence[Outcome], seconds: float) -> None:
    failed, slowest = [one for one in outcomes if one.failed], max(outcomes, key=lambda one: one.seconds)
    print(
        f"{seconds:5.0f} s  {slowest.width} features, {slowest.lengths} slices: {len(outcomes)} cases, {len(failed)} "
        f"failed; slowest {slowest.method} {slowest.precision} {slowest.seconds:.1f} s",
        flush=True,
    )
    for one in failed:
        print(f"FAILED {one.method} {one.width} {one.lengths} {one.precision}: {one.failed}", flush=True)
    for text in sorted({one.took_over for one in outcomes if one.took_over}):
        print(f"  {text}", flush=True)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    about = machine(options.device, options.commit)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    begin, found = time.perf_counter(), []
    groups = list(product(reversed(options.lengths), reversed(options.widths)))  # the longest and widest first
    room = {lengths: threading.Semaphore(LENGTHS[lengths].jobs) for lengths in options.lengths}
    with ThreadPoolExecutor(len(groups)) as pool:
        turn = threading.Semaphore(options.jobs)
        waiting = [pool.submit(run_group, *group, (room[group[0]], turn), options) for group in groups]
        for done in as_completed(waiting):
            outcomes = done.result()
            found += outcomes
            tell_group(outcomes, time.perf_counter() - begin)
    print(f"\n{'method':<20}{'precision':<10}{'cases':>6}{'worst':>10}{'took over':>11}{'failed':>8}")
    for method in (*options.methods, "all"):
        for precision in (*options.precisions, "refused", "all"):
            cases = [one for one in found if (one.method, one.precision) == (method, precision)]
            if cases:
                print(line(cases))
    bad = [asdict(one) for one in found if one.failed]
    print(f"{'met   ' if not bad else 'MISSED'}  nothing fails: {len(found)} cases, {len(bad)} failed")
    report: dict[str, Any] = {"benchmark": "check_cuda", "machine": about, "options": vars(options)}
    report |= {"cases": len(found), "failed": bad, "tolerance": TOLERANCE}
    report["took_over"] = sum(bool(one.took_over) for one in found)
    print(json.dumps(report | {"seconds": round(time.perf_counter() - begin, 1)}))
    return 1 if bad else 0


if __name__ == "__main__":
    if sys.argv[1:2] == ["--group"]:
        number, of, methods, precisions, device, engine, threads = sys.argv[2:]
        outcomes = check_group(
            int(number), of, methods.split(","), precisions.split(","), device, engine or None, int(threads)
        )
        print(json.dumps([asdict(one) for one in outcomes]))
        sys.exit()
    sys.exit(main(sys.argv[1:]))
