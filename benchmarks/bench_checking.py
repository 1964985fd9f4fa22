"""What it costs to check every file that is read: sweep and predict before and after; a table, then one JSON line.

    git worktree add /tmp/before 122b799
    python benchmarks/bench_checking.py --before /tmp/before --out DIR [--scans 60] [--epochs 20] [--rounds 7]

122b799 is the last commit that reads without checks.  Each version makes a demo of its own (`nguide demo`); then both
sweep their store and predict their new scans in turn, each time in a new process and into a new folder.  Seconds are
those of CPU time, of the process and its workers, so that another load on the machine matters less; the ratio is that
of the medians, and its interval comes from 2,000 resamplings of the rounds.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np

from report import machine

SEED = 1001
"""The seed of scans and split."""


def nguide(checkout: Path, *words: str) -> float:
    """Seconds of CPU that a command takes with the package of a checkout."""
    environment = os.environ | {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "normal_guidance.cli", *words], env=environment, stdout=subprocess.DEVNULL
    )
    _, status, used = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode:
        raise SystemExit(f"nguide {' '.join(words)} of {checkout} ended with {process.returncode}")
    return used.ru_utime + used.ru_stime


def folder_of(demo: Path, what: str) -> Path:
    """The index or store of a demo, which earlier versions did not keep beside the model."""
    beside = demo / f"model.{what}"
    return beside if beside.exists() else demo / what


def commands(demo: Path, out: Path, epochs: int) -> dict[str, list[str]]:
    split = demo / "parts" / f"split-{SEED}.csv"
    store = folder_of(demo, "store")
    return {
        "sweep": f"sweep {store} --split {split} --epochs {epochs} -o {out}".split(),
        "predict": f"predict {demo / 'new' / 'scans'} --model {demo / 'model'} --offline --device cpu -o {out}".split(),
    }


def ratio(before: list[float], after: list[float]) -> tuple[float, float, float]:
    """The ratio of the medians and its 95 % interval."""
    pairs = np.array([before, after])
    drawn = pairs[:, np.random.default_rng(0).integers(len(before), size=(2000, len(before)))]
    resampled = np.median(drawn[1], axis=1) / np.median(drawn[0], axis=1)
    low, high = np.quantile(resampled, [0.025, 0.975])
    return float(np.median(after) / np.median(before)), float(low), float(high)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--before", type=Path, required=True, help="A checkout of the earlier version.")
    parser.add_argument("--out", type=Path, required=True, help="A new folder; the demos stay in it.")
    parser.add_argument("--scans", type=int, default=60)
    parser.add_argument("--epochs", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    checkouts = {"before": options.before, "after": Path(__file__).parent.parent}
    for version, checkout in checkouts.items():
        demo = options.out / version
        nguide(checkout, "demo", "-o", str(demo), "--scans", str(options.scans), "--seed", str(SEED))
        nguide(checkout, "split", str(folder_of(demo, "index")), "--seeds", str(SEED), "-o", str(demo / "parts"))
    seconds: dict[str, dict[str, list[float]]] = {}
    for number in range(options.rounds):
        order = list(checkouts.items())[:: -1 if number % 2 else 1]
        for version, checkout in order:
            for name, words in commands(options.out / version, options.out / "result", options.epochs).items():
                took = nguide(checkout, *words)
                seconds.setdefault(name, {}).setdefault(version, []).append(took)
                shutil.rmtree(options.out / "result")
    print(f"{'':<8} {'before':>9} {'after':>9}  after / before [95 %]")
    report = {}
    for name, of in seconds.items():
        middle, low, high = ratio(of["before"], of["after"])
        report[name] = {**of, "ratio": [middle, low, high]}
        medians = [float(np.median(of[version])) for version in checkouts]
        print(f"{name:<8} {medians[0]:>7.2f} s {medians[1]:>7.2f} s  {middle:.3f} [{low:.3f}, {high:.3f}]")
    print(json.dumps({"benchmark": "bench_checking", "machine": machine("cpu"), "cpu_seconds": report}))


if __name__ == "__main__":
    main()
