"""Time and memory of a training step by the length of the longest scan; a table, then one JSON line.

    python benchmarks/bench_length.py [--methods ensemble,whole_bells] [--slices 1000,5000,20000] [--limit 24]
                                      [--beside REPORT]

A batch has one scan of so many slices and seven of 40, of noise with 1,280 features in float32.  A step of a method is
that of one configuration, by the packed engine on the CPU, with the optimiser.  A step of the ensemble, which
`nguide fit` trains, is one of each of its six kinds, with all models of five folds.  Prediction is
that of the batch.

Every case runs in a process of its own, whose address space is limited to `--limit` GiB, and names the most memory that
it held, libraries included.  Seconds are those of one core, of CPU time, so that another load on the machine matters
less; a step of less than ten seconds is repeated.  `--beside` prints the figures of another commit, from a file whose
last line is its report, before those of this one.
"""

from __future__ import annotations

import argparse
import json
import math
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from normal_guidance.base.system import is_out_of_memory, peak_bytes
from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import ENSEMBLE, EVERY_METHOD
from normal_guidance.fit.ensemble import Ensemble, Members, fit_scalings
from normal_guidance.fit.fit_ensemble import FOLDS, KEPT, KINDS, KindTraining
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.engine import PackedEngine
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.stack import Stack
from report import machine, names

GIB = 2**30
FEATURES = 1280
SHORT, BAGS = 40, 8
QUICK = 10.0
"""Seconds below which a step is repeated; the first one also loads libraries."""

DEFAULT = [ENSEMBLE, "whole_bells_ng", "evidence", "abmil_distance", "abmil", "ng", "smap", "probsmooth", "transmil"]


def draw(slices: int, features: int) -> Bags:
    lengths = torch.full((BAGS,), SHORT)
    lengths[BAGS // 2] = slices
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(int(lengths.sum()), features, generator=generator)
    return Bags(rows, lengths, torch.arange(BAGS) // 2 % 2)


def timed(run: Callable[[], Any]) -> float:
    for _ in range(2):
        begin = time.process_time()
        run()
        seconds = time.process_time() - begin
        if seconds > QUICK:
            break
    return seconds


def method_times(method: str, scans: Bags) -> tuple[float, float]:
    stack = Stack.of([Config(method, batch_size=BAGS)], scans.width)
    engine = PackedEngine(stack, scans, scans, BAGS, "float32")
    return timed(lambda: engine.train_epoch(torch.arange(BAGS))), timed(engine.evaluate)


def ensemble_times(scans: Bags) -> tuple[float, float]:
    scalings, folds, batch = fit_scalings(scans), torch.arange(BAGS) % FOLDS, torch.arange(BAGS)
    step, kinds = 0.0, []
    for kind in KINDS:
        training = KindTraining(kind, scans, scalings[kind.form], folds, 0, "cpu")
        training._begin(batch)
        step += timed(lambda training=training: training._step(batch))
        weights = {
            name: theta.unflatten(0, (-1, training.together))[:, :KEPT].flatten(0, 1).detach()
            for name, theta in training.parameters.items()
        }
        kinds.append(Members(kind, scalings[kind.form], weights))
    ensemble = Ensemble(kinds).eval()
    return step, timed(lambda: predict_bags(ensemble, scans))


def measure_here(method: str, slices: int, features: int, limit: float) -> dict[str, Any]:
    """The figures of one case, in this process."""
    torch.set_num_threads(1)
    resource.setrlimit(resource.RLIMIT_AS, (int(limit * GIB), int(limit * GIB)))
    try:
        scans = draw(slices, features)
        step, prediction = ensemble_times(scans) if method == ENSEMBLE else method_times(method, scans)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        return {"step_s": None, "predict_s": None, "peak_gib": None}
    return {"step_s": step, "predict_s": prediction, "peak_gib": peak_bytes("cpu") / GIB}


def measure(method: str, slices: int, options: argparse.Namespace) -> dict[str, Any]:
    """The figures of one case, in a process of its own."""
    arguments = ["--one", f"{method}:{slices}", "--features", str(options.features), "--limit", str(options.limit)]
    run = subprocess.run([sys.executable, __file__, *arguments], capture_output=True, text=True, check=False)
    if run.returncode:
        raise SystemExit(run.stderr)
    return {"method": method, "slices": slices, **json.loads(run.stdout)}


def line(row: Mapping[str, Any], limit: float) -> str:
    head = f"{row['method']:16} {row['slices']:8,}"
    if row["step_s"] is None:
        return f"{head}   does not fit {limit:g} GiB"
    return f"{head} {row['step_s']:10.2f} {row['predict_s']:10.2f} {row['peak_gib']:10.2f}"


def earlier(path: Path) -> dict[str, Any]:
    report: dict[str, Any] = json.loads(path.read_text().splitlines()[-1])
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--methods", type=names([ENSEMBLE, *EVERY_METHOD]), default=DEFAULT)
    parser.add_argument("--slices", default="1000,5000,20000")
    parser.add_argument("--limit", type=float, default=24.0, help="GiB of address space for each case")
    parser.add_argument("--beside", type=Path, help="the report of another commit")
    parser.add_argument("--commit")
    parser.add_argument("--features", type=int, default=FEATURES, help=argparse.SUPPRESS)
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        method, _, slices = options.one.partition(":")
        print(json.dumps(measure_here(method, int(slices), options.features, options.limit)))
        return
    before = {} if options.beside is None else earlier(options.beside)
    known = {(row["method"], row["slices"]): row for row in before.get("rows", [])}
    rows = []
    print(f"{'method':16} {'slices':>8} {'s a step':>10} {'s predict':>10} {'peak GiB':>10}")
    for method in options.methods:
        for slices in map(int, options.slices.split(",")):
            if (method, slices) in known:
                print(f"{line(known[method, slices], before['limit_gib'])}   {before['machine']['commit']}")
            rows.append(measure(method, slices, options))
            print(line(rows[-1], options.limit), flush=True)
    peak = max((row["peak_gib"] for row in rows if row["peak_gib"] is not None), default=math.nan)
    report = {
        "benchmark": "length",
        "machine": machine("cpu", options.commit),
        "limit_gib": options.limit,
        "features": options.features,
        "rows": rows,
        "goals": {f"every case fits {options.limit:g} GiB": all(row["step_s"] is not None for row in rows)},
        "peak_gib": peak,
    }
    print(json.dumps(report))


if __name__ == "__main__":
    main()
