"""The cost of a training step of every method and regularizer beside ABMIL's; a table, then one JSON line.

    python benchmarks/bench_field.py [--device cpu|cuda] [--methods clam,abmil_entropy] [--scans 256] [--epochs 5]

All 32 configurations of a method are trained together, on scans of noise with 20 to 60 slices in batches of 64, by the
packed engine on the CPU (float32) and the recorded one on CUDA (tf32).  A step is the median epoch, wall clock, divided
by its steps; planning, training AUROC and the optimiser are in it.  Methods take turns, so that another load on the
machine falls on all of them alike.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import torch

from normal_guidance.core.methods import DISTINCT, EVERY_METHOD
from normal_guidance.core.prediction import FEATURES
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.engine import (
    Engine,
    PackedEngine,
    SlottedEngine,
    matrix_precision,
    slot_numbers,
    synchronize,
)
from normal_guidance.sweep.execution import SLOT_CLASSES
from normal_guidance.sweep.stack import Stack
from report import machine, names

TRAINED = [name for name in DISTINCT if EVERY_METHOD[name].attends]
DEFAULT = [name for name in TRAINED if name not in ("transmil", "smtp", "mhng")]
"""Without TransMIL's family, a step of which takes a minute on a CPU; bench_sweep times it."""

BAGS = 64


def make_engine(method: str, options: argparse.Namespace) -> Engine:
    """The engine of all configurations."""
    train, val = (
        shifted_mean(scans, seed, features=options.features) for scans, seed in ((options.scans, 1), (BAGS, 2))
    )
    configs = grid(Config(method, batch_size=options.bags))[: options.configs]
    stack = Stack.of(configs, options.features, options.device)
    if torch.device(options.device).type == "cpu":
        return PackedEngine(stack, train, val, options.bags, "float32")
    orders = iter([torch.arange(options.scans)])
    rows = slot_numbers(train.lengths, options.bags, orders, classes=SLOT_CLASSES)
    return SlottedEngine(stack, train, val, options.bags, "tf32", rows)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--methods", type=names(TRAINED), default=DEFAULT)
    parser.add_argument("--scans", type=int, default=4 * BAGS)
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--configs", type=int, default=32)
    parser.add_argument("--commit")
    parser.add_argument("--features", type=int, default=FEATURES, help=argparse.SUPPRESS)
    parser.add_argument("--bags", type=int, default=BAGS, help=argparse.SUPPRESS)
    options = parser.parse_args()
    device = torch.device(options.device)
    methods = list(dict.fromkeys(["abmil", *options.methods]))
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    order, steps = torch.arange(options.scans), options.scans // options.bags
    with matrix_precision("float32" if device.type == "cpu" else "tf32"):
        engines = {method: make_engine(method, options) for method in methods}
        for epoch in range(options.epochs + 1):
            for method, engine in engines.items():
                synchronize(device)
                begin = time.perf_counter()
                engine.train_epoch(order)
                synchronize(device)
                if epoch:  # the first loads libraries and records graphs
                    seconds[method].append(time.perf_counter() - begin)
    step = {method: 1000 * statistics.median(found) / steps for method, found in seconds.items()}
    print(f"{'method':20} {'ms a step':>10} {'of ABMIL':>9}")
    for method, value in step.items():
        print(f"{method:20} {value:10.2f} {value / step['abmil']:8.2f}x")
    print(json.dumps({"benchmark": "field", "machine": machine(options.device, options.commit), "step_ms": step}))


if __name__ == "__main__":
    main()
