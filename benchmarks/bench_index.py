"""A manifest of 4 million slices: time and memory to write, open and walk through it; a table, then one JSON line.

    python benchmarks/bench_index.py [--slices 4000000]

Scans are made up (names as long as Kaggle's, 63-1083 slices with a mean of about 246).  Goals: opened in under a
minute, and everything within 4 GiB.  Memory is the process's own peak, so every step runs in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from normal_guidance.scans.index.manifest import ScanRow, read_manifest, write_manifest

SECONDS_GOAL, GIB_GOAL = 60.0, 4.0
STEPS = ("write", "open", "walk", "split", "audit", "describe")


def scans(slices: int) -> Iterator[ScanRow]:
    """Made-up scans with so many slices in all."""
    generator, left, number = np.random.default_rng(2026), slices, 0
    while left:
        length = min(left, int(np.clip(round(217.3 * np.exp(0.5 * generator.standard_normal())), 63, 1083)))
        series = f"{generator.integers(1 << 40):012x}"
        images = generator.integers(1 << 48, size=length).tolist()
        labels = (np.arange(length) < length // 4 * (number % 3 == 0)).astype(np.int8)
        yield ScanRow(
            scan_id=series,
            patient_id=f"patient-{number // 2}",
            label=int(number % 3 == 0),
            slice_labels=labels,
            kind="dicom",
            files=tuple(f"train/{series}/{series}/{image:012x}.dcm" for image in images),
            frames=(0,) * length,
            positions=tuple(np.arange(length, dtype=np.float32).tolist()),
            rows=512,
            columns=512,
            pixel_spacing=(0.7, 0.7),
            slice_spacing=1.25,
            orientation=(1.0, 0.0, 0.0, 0.0, 1.0, 0.0),
            transfer_syntax="1.2.840.10008.1.2.1",
        )
        left, number = left - length, number + 1


def run(step: str, path: Path, slices: int) -> dict[str, Any]:
    """One step, timed; opening is counted apart for those that need it."""
    if step in ("split", "audit", "describe"):
        from normal_guidance.scans.index import indexing as dataset_statistics
        from normal_guidance.scans.index import splits
    start = time.perf_counter()
    if step == "write":
        manifest = write_manifest(path, scans(slices), {"source": "rsna-pe", "root": "."})
    else:
        manifest = read_manifest(path)
    opened = time.perf_counter()
    if step == "walk":
        assert sum(len(row) for row in manifest) == slices
    elif step in ("split", "audit"):
        split = splits.split_scans(manifest.scan_ids, manifest.patient_ids, manifest.labels.tolist(), seed=1001)
        if step == "audit":
            assert splits.audit(split, manifest)["slices"] == slices
    elif step == "describe":
        assert dataset_statistics.describe(manifest).slices == slices
    seconds = time.perf_counter() - (start if step in ("write", "open") else opened)
    gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
    return {"step": step, "seconds": round(seconds, 2), "gib": round(gib, 2), "scans": len(manifest)}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(description="Time and memory of a large manifest.")
    parser.add_argument("--slices", type=int, default=4_000_000)
    parser.add_argument("--step", choices=STEPS, help=argparse.SUPPRESS)
    parser.add_argument("--path", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args(arguments)
    if options.step:
        print(json.dumps(run(options.step, options.path, options.slices)))
        return 0
    found = []
    print(f"{'step':<10}{'seconds':>9}{'peak GiB':>10}", flush=True)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "manifest.parquet")
        for step in STEPS:
            words = [sys.executable, __file__, "--slices", str(options.slices), "--step", step, "--path", str(path)]
            found.append(json.loads(subprocess.run(words, check=True, capture_output=True, text=True).stdout))
            print(f"{step:<10}{found[-1]['seconds']:>9.2f}{found[-1]['gib']:>10.2f}", flush=True)
        mib = path.stat().st_size / 2**20
    print(f"{options.slices:,} slices, {found[0]['scans']:,} scans, {mib:.0f} MiB on disk")
    opening = next(one for one in found if one["step"] == "open")
    goals = {
        f"opened in under {SECONDS_GOAL:.0f} s": opening["seconds"] < SECONDS_GOAL,
        f"every step within {GIB_GOAL:.0f} GiB": max(one["gib"] for one in found) < GIB_GOAL,
    }
    from report import machine  # imports torch, and not in the processes of the steps

    for goal, met in goals.items():
        print(f"{'met   ' if met else 'MISSED'}  {goal}")
    report = {"benchmark": "index", "machine": machine("cpu"), "slices": options.slices, "mib": round(mib, 1)}
    print(json.dumps({**report, "steps": found, "goals": goals}))
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
