"""From scans to features: the whole stage beside the bare encoder on the same batches; a table, then one JSON line.

    python benchmarks/bench_encode.py [--device cpu|cuda] [--encoder vit-b16|efficientnet-lite0] [--scans 8] ...

Phantom head scans are written as uncompressed DICOM of 512 x 512 pixels, indexed and encoded into a store: reading,
windowing, resizing, encoding, writing, all that the call does but for loading the encoder, which the bare
encoder has done before, too.  That one is given the same batches, preprocessed beforehand.  Both run in turns.
`read` is what one worker alone reads.  vit-b16 has random weights, which are as fast as others.

"Once workers run" leaves out the seconds before the first encoded batch, in which the workers start: a job of a
minute feels them, one of an hour does not.  (Head CT of the paper has 752,803 slices: --copies 3200.)  They are stated
from the call on, and without those in which the encoder is loaded; on the CPU, encoding that batch is most of them.

Last comes the command itself, `nguide encode` with EfficientNet-Lite0, start included, by ONNX Runtime and by torch
in turns: on the drawn scans, or on an index of NIfTI or DICOM scans (--index; 0 pairs leave it out).

--busy 6 shows whether the stage starves beside other programs: six processes keep the cores busy all the time.

Goals: the stage reaches at least .9 of the bare encoder's slices per second; the first batch comes within 2 s; the
command is 2.5 times as fast by ONNX Runtime as by torch.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from itertools import cycle
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_WAIT_POLICY", "passive")  # as the command line does

import torch
from safetensors.torch import save_file

from normal_guidance.base.system import keep_freed_memory
from normal_guidance.scans.features.encoders import Encoder, load_encoder
from normal_guidance.scans.features.encoding import EncodingTask, encode
from normal_guidance.scans.features.encoding_machine import EncodingOptions
from normal_guidance.scans.features.preprocessing import Preprocessing, Statistics
from normal_guidance.scans.index.indexing import index
from normal_guidance.scans.index.manifest import Manifest, read_manifest
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.scans.phantom.phantom_files import write_phantom
from report import machine

GOAL, FIRST_BATCH_GOAL, ENGINE_GOAL = 0.9, 2.0, 2.5
WINDOW = (-100.0, 300.0)
STATISTICS = Statistics((0.0,), (100.0,))


def random_vit(path: Path) -> Path:
    """Random weights of ViT-B/16 under torchvision's names."""
    width, wide = 768, 3072
    shapes = {
        "conv_proj.weight": (width, 3, 16, 16),
        "conv_proj.bias": (width,),
        "class_token": (1, 1, width),
        "encoder.pos_embedding": (1, 197, width),
        "encoder.ln.weight": (width,),
        "encoder.ln.bias": (width,),
    }
    for number in range(12):
        layer = f"encoder.layers.encoder_layer_{number}."
        for name, rows, columns in (
            ("self_attention.in_proj_", 3 * width, width),
            ("self_attention.out_proj.", width, width),
            ("mlp.0.", wide, width),
            ("mlp.3.", width, wide),
        ):
            shapes |= {f"{layer}{name}weight": (rows, columns), f"{layer}{name}bias": (rows,)}
        for name in ("ln_1", "ln_2"):
            shapes |= {f"{layer}{name}.weight": (width,), f"{layer}{name}.bias": (width,)}
    generator = torch.Generator().manual_seed(0)
    save_file({name: 0.02 * torch.randn(shape, generator=generator) for name, shape in shapes.items()}, path)
    return path


def make_scans(folder: Path, scans: int) -> Manifest:
    write_phantom("rsna-ich", folder / "scans", scans=scans, size=512)
    index("rsna-ich", folder / "scans", folder / "index")
    return read_manifest(folder / "index")


def time_reading(manifest: Manifest, preprocessing: Preprocessing, device: str) -> tuple[float, list[torch.Tensor]]:
    """Seconds in which one process reads all scans, and their images."""
    images, seconds = [], 0.0
    for row in manifest:
        begin = time.perf_counter()
        volume, _ = read_volume(row, manifest.root)
        seconds += time.perf_counter() - begin
        images.append(preprocessing.apply(torch.from_numpy(volume).to(device)).cpu())
    return seconds, images


def time_encoder(encoder: Encoder, images: torch.Tensor, batch_size: int, slices: int) -> float:
    """Seconds for so many slices, which are the images again and again."""
    begin = time.perf_counter()
    batches = cycle(images.split(batch_size))
    while slices > 0:
        batch = next(batches)[:slices]
        encoder.encode(batch)
        slices -= len(batch)
    return time.perf_counter() - begin


class TimedLoad:
    """Loads the encoder, and knows how long that took."""

    def __init__(self, load: Callable[..., Encoder]) -> None:
        self.load, self.seconds = load, 0.0

    def __call__(self, **options: Any) -> Encoder:
        begin = time.perf_counter()
        encoder = self.load(**options)
        self.seconds = time.perf_counter() - begin
        return encoder


COMMAND = "import sys; {hidden}; from normal_guidance.cli.__main__ import main; main()"


def time_command(index: Path, out: Path, *, by_torch: bool) -> float:
    """Seconds of the whole command, from starting Python to its end."""
    code = COMMAND.format(hidden="sys.modules['onnxruntime'] = None" if by_torch else "pass")
    words = ["encode", str(index), "--encoder", "efficientnet-lite0", "--offline", "--device", "cpu", "--out", str(out)]
    begin = time.perf_counter()
    subprocess.run(
        [sys.executable, "-c", code, *words, "--window", "head", "--normalize", "40,80"],
        check=True,
        capture_output=True,
        env={**os.environ, "NGUIDE_CACHE": str(out.parent / "cache")},
    )
    return time.perf_counter() - begin


def _whole_batches(images: torch.Tensor, batch_size: int) -> torch.Tensor:
    """Some images twice, so that no batch is smaller than the stage's."""
    return torch.cat([images, images[: -len(images) % batch_size]])


@contextmanager
def busy(processes: int) -> Iterator[None]:
    """Other programs that want the cores."""
    started = [subprocess.Popen([sys.executable, "-c", "while True: pass"]) for _ in range(processes)]
    try:
        yield
    finally:
        for one in started:
            one.kill()
            one.wait()


def steady_rate(seen: list[tuple[float, int]]) -> float:
    """Slices per second from the first encoded batch on: without the start of the workers, which a long job forgets."""
    encoded = [(at, slices) for at, slices in seen if slices]
    (begin, first), (end, last) = encoded[0], encoded[-1]
    return (last - first) / (end - begin) if end > begin else math.nan


def parse_arguments(arguments: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description="Time the encoding of scans beside the bare encoder.")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--precision", default="float32", choices=["float32", "tf32", "bf16"])
    parser.add_argument("--encoder", default="vit-b16", choices=["vit-b16", "efficientnet-lite0"])
    parser.add_argument("--scans", type=int, default=8)
    parser.add_argument("--copies", type=int, default=1, help="read every scan so many times, under other names")
    parser.add_argument("--batch-size", type=int, default=64)
    parser.add_argument("--workers", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--threads", type=int, default=2, help="of the encoder on the CPU")
    parser.add_argument("--busy", type=int, default=0, help="processes that keep the cores busy beside it")
    parser.add_argument("--index", type=Path, help="what nguide index made, for the command")
    parser.add_argument("--pairs", type=int, default=1, help="runs of the command by each engine")
    parser.add_argument("--commit", help="to report where the code has come without its repository")
    return parser.parse_args(arguments)


def copied(manifest: Manifest, copies: int) -> Manifest:
    """The same scans again and again: drawing phantoms takes longer than reading them."""
    import pyarrow as pa

    tables = []
    for number in range(copies):
        names = pa.array([f"{scan}-{number}" for scan in manifest.scan_ids])
        tables.append(manifest.table.set_column(0, "scan_id", names))
    return Manifest(pa.concat_tables(tables), manifest.about)


def main(arguments: list[str]) -> int:
    options = parse_arguments(arguments)
    keep_freed_memory()  # as the command line does
    torch.set_num_threads(options.threads)
    about = machine(options.device, options.commit)
    print(", ".join(f"{key} {value}" for key, value in about.items()), flush=True)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        load = partial(load_encoder, "efficientnet-lite0", offline=True)
        if options.encoder == "vit-b16":
            load = partial(
                load_encoder, "vit-b16-imagenet", weights=random_vit(folder / "vit.safetensors"), offline=True
            )
        encoder = load(device=options.device, precision=options.precision)
        preprocessing = Preprocessing(windows=(WINDOW,), size=encoder.size, statistics=STATISTICS)
        manifest = make_scans(folder, options.scans)
        slices = int(manifest.lengths.sum()) * options.copies
        with busy(options.busy):
            seconds, images = time_reading(manifest, preprocessing, options.device)
            reading = seconds * options.copies
            batches = _whole_batches(torch.cat(images), options.batch_size)
            time_encoder(encoder, batches, options.batch_size, 2 * options.batch_size)  # to warm up
            settings = EncodingOptions(
                batch_size=options.batch_size, device=options.device, precision=options.precision
            )
            bare, whole, loading, steady, first = [], [], [], [], []
            for turn in range(options.repeats):
                bare.append(time_encoder(encoder, batches, options.batch_size, slices))
                begin, seen, timed = time.perf_counter(), [], TimedLoad(load)
                task = EncodingTask(
                    copied(manifest, options.copies),
                    timed,
                    Preprocessing(windows=(WINDOW,)),
                    read_volume,
                    statistics=STATISTICS,
                    options=settings,
                    workers=options.workers,
                )
                told = lambda progress, seen=seen: seen.append((time.perf_counter(), progress.slices))  # noqa: E731
                encode(task, folder / f"store-{turn}", watch=told)
                whole.append(time.perf_counter() - begin - timed.seconds)
                loading.append(timed.seconds)
                steady.append(steady_rate(seen))
                first.append(next(at for at, done in seen if done) - begin)
                print(
                    f"turn {turn}: bare {bare[-1]:.2f} s, stage {whole[-1]:.2f} s, loading {loading[-1]:.2f} s, "
                    f"first batch after {first[-1]:.2f} s",
                    flush=True,
                )
        command: dict[str, list[float]] = {"onnxruntime": [], "torch": []}
        for pair in range(options.pairs):
            for engine, seconds_of in command.items():
                out = folder / f"{engine}-{pair}"
                seconds_of.append(time_command(options.index or folder / "index", out, by_torch=engine == "torch"))
            print(f"nguide encode, pair {pair}: " + ", ".join(f"{name} {s[-1]:.2f} s" for name, s in command.items()))
    rates = {
        "bare encoder": slices / statistics.median(bare),
        "whole stage": slices / statistics.median(whole),
        "once workers run": statistics.median(steady),
        "read, one process": slices / reading,
    }
    for name, rate in rates.items():
        print(f"{name:<22}{rate:>10.1f} slices/s")
    share = rates["whole stage"] / rates["bare encoder"]
    late = statistics.median(at - load for at, load in zip(first, loading, strict=True))
    print(f"{'first batch':<22}{statistics.median(first):>10.2f} s after the call, {late:.2f} s without loading")
    print(f"{_met(share >= GOAL)}  share of the bare encoder's rate at least {GOAL}: {share:.3f}")
    print(f"{_met(late <= FIRST_BATCH_GOAL)}  first batch within {FIRST_BATCH_GOAL} s, without loading: {late:.2f}")
    faster = [torch_s / onnx_s for onnx_s, torch_s in zip(*command.values(), strict=True)]
    ratio = statistics.median(faster) if faster else math.nan
    print(f"{_met(ratio >= ENGINE_GOAL)}  nguide encode at least {ENGINE_GOAL} times as fast as by torch: {ratio:.2f}")
    report = {
        "benchmark": "encode",
        "machine": about,
        "options": {key: str(value) if isinstance(value, Path) else value for key, value in vars(options).items()},
        "slices": slices,
        "slices_per_s": rates,
        "share": share,
        "bare_s": bare,
        "stage_s": whole,
        "loading_s": loading,
        "first_batch_s": first,
        "command_s": command,
        "times_as_fast": faster,
        "met": share >= GOAL and late <= FIRST_BATCH_GOAL and not ratio < ENGINE_GOAL,
    }
    print(json.dumps(report))
    return 0


def _met(met: bool) -> str:
    return "met   " if met else "MISSED"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
