"""Time and memory of `nguide fit`, part by part; a table, then one JSON line.

    python benchmarks/bench_fit.py [--scans 100,1000] [--slices 30] [--features 1280] [--device cpu|cuda]

Scans are normal noise in float32; 40 % of them are positive and have a block of slices, a sixth of the scan, in which
20 features are higher by one standard deviation.  Each number of scans has a process of its own.  Columns are seconds
of wall time: the scaling (moments and main axes), the training of all models of each kind, the page with its figures,
all of `fit_model` from the open store to the folder, and `predict_bags` of 100 other scans by the loaded bundle; then
GiB that the process held at most, with libraries and drawn scans, GiB of the card on CUDA, and MiB of the bundle.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from normal_guidance.base.system import peak_bytes
from normal_guidance.core.bags import Bags
from normal_guidance.fit import fit_ensemble, fitting
from normal_guidance.fit.bundle import BUNDLE, WEIGHTS, load_bundle
from normal_guidance.scans.features.store import write_store
from normal_guidance.sweep.loop import predict_bags
from report import machine

POSITIVE, BLOCK, SHIFTED = 0.4, 6, 20  # share of scans, part of a scan, features
NEW = 100
METHODS = [kind.method for kind in fit_ensemble.KINDS]
COLUMNS = ("scaling", *METHODS, "page", "all", "predict")


def draw(scans: int, slices: int, features: int, seed: int) -> Bags:
    generator = torch.Generator().manual_seed(seed)
    rows = torch.randn(scans, slices, features, generator=generator)
    labels = (torch.arange(scans) < round(POSITIVE * scans)).long()
    block, places = max(1, slices // BLOCK), torch.arange(slices)
    starts = torch.randint(slices - block + 1, (scans, 1), generator=generator)
    planted = (starts <= places) & (places < starts + block) & (labels[:, None] == 1)
    rows[..., :SHIFTED] += planted[..., None].float()
    return Bags(rows.flatten(0, 1), torch.full((scans,), slices), labels, planted.flatten().long())


def clock(owner: Any, name: str, seconds: dict[str, float], column: Callable[..., str]) -> None:
    plain = getattr(owner, name)

    def clocked(*given: Any, **options: Any) -> Any:
        begin = time.perf_counter()
        made = plain(*given, **options)
        seconds[column(*given)] = time.perf_counter() - begin
        return made

    setattr(owner, name, clocked)


def measure_here(scans: int, options: argparse.Namespace) -> dict[str, Any]:
    """The row of so many scans, in this process."""
    seconds: dict[str, float] = {}
    clock(fit_ensemble, "fit_scalings", seconds, lambda *_: "scaling")
    clock(fit_ensemble.KindTraining, "run", seconds, lambda training, *_: training.kind.method)
    clock(fitting, "fit_page", seconds, lambda *_: "page")
    clock(fitting, "fit_model", seconds, lambda *_: "all")
    with TemporaryDirectory() as folder:
        store = write_store(f"{folder}/store", draw(scans, options.slices, options.features, 1), provenance={})
        fitted = fitting.fit_model(store, out := Path(folder, "model"), device=options.device)
        peak = {"peak_gib": peak_bytes("cpu") / 2**30}
        if options.device.startswith("cuda"):
            peak["card_gib"] = peak_bytes(options.device) / 2**30
        size, model = sum((out / name).stat().st_size for name in (BUNDLE, WEIGHTS)), load_bundle(out).model
        new = draw(NEW, options.slices, options.features, 2)
        clock(sys.modules[__name__], "predict_bags", seconds, lambda *_: "predict")
        predict_bags(model, new)
    return {"scans": scans, "seconds": seconds, **peak, "bundle_bytes": size, "sentences": fitted.sentences()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scans", default="100")
    parser.add_argument("--slices", type=int, default=30)
    parser.add_argument("--features", type=int, default=1280)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--commit")
    parser.add_argument("--one", type=int, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one is not None:
        print(json.dumps(measure_here(options.one, options)))
        return
    rows, head = [], [f"{name:>{max(8, len(name) + 2)}}" for name in ("scans", *COLUMNS, "peak", "card", "bundle")]
    print("".join(head), flush=True)
    for scans in map(int, options.scans.split(",")):
        run = subprocess.run([sys.executable, *sys.argv, "--one", str(scans)], capture_output=True, text=True)
        if run.returncode:
            raise SystemExit(run.stderr)
        rows.append(row := json.loads(run.stdout.splitlines()[-1]))
        cells = [row["seconds"][name] for name in COLUMNS] + [row["peak_gib"], row.get("card_gib", float("nan"))]
        texts = [f"{scans:,}", *(f"{cell:.2f}" for cell in cells), f"{row['bundle_bytes'] / 2**20:.2f}"]
        print("".join(f"{text:>{len(place)}}" for text, place in zip(texts, head, strict=True)), flush=True)
    about = {"slices": options.slices, "features": options.features, "device": options.device}
    print(json.dumps({"benchmark": "fit", "machine": machine(options.device, options.commit), **about, "rows": rows}))


if __name__ == "__main__":
    main()
