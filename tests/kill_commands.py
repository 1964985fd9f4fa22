"""Kills every command that writes, at random moments, and compares what its reruns make with an uninterrupted run.

    python tests/kill_commands.py --kills 25 --seed 1 [--commands encode,predict]

Each round begins in an empty folder.  A command is killed by SIGKILL once, in every third round three times in a row
(slow ones five times in each), and then run to its end.  All files must be those of an uninterrupted run, byte for
byte, and nothing else may be left.  Four things hold times and are compared without them: members of JSON (`TIMES`),
also where a page quotes it, times of day in texts (`TIME_OF_DAY`), dates and times in DICOM results, and tables of a
study, where all runs take 0 s.
A lock file names its process and is compared by its name.  A command that refuses a complete output is not run again
when a kill came after its last write.

Everything is imported once, and each attempt is a fork, so that moments of writing are met and not those of importing.
It prints a table and, last, one JSON line; the exit code is 1 if anything differs, is left or is refused.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import pkgutil
import re
import shutil
import signal
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from random import Random
from typing import Any

THREE_IN_A_ROW = 3
"""Every so many rounds have three kills."""

TIMES = ("seconds", "seal", "date", "resumed")
"""Members of JSON that hold a time, the number of starts, or a checksum of these."""

TIME_OF_DAY = re.compile(rb"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d(\.\d+)?")

TIMES_IN_PAGES = re.compile(rb"&quot;(seconds|resumed)&quot;: (\{[^}]*\}|[\d.e-]+)")
"""The same in the reports of runs that a study's page quotes."""

SLOW = 5.0
"""Seconds from which on a command is slow."""


@dataclass
class Case:
    """A command, and what was seen of it."""

    line: str
    """Its words, with the folders {at} of the inputs and {out} of the output."""
    resumes: bool = True
    """Whether a complete output is taken as such; other commands refuse it."""
    kills: int = 0
    rounds: int = 0
    refused: list[str] = field(default_factory=list)
    different: Counter[str] = field(default_factory=Counter)
    left: Counter[str] = field(default_factory=Counter)
    seconds: float = 0.0


ENCODE = (
    "encode {at}/index --encoder tiny --split {at}/splits/split-1.csv --window head --device cpu --workers 0 -o {out}"
)
SPLIT = "--split {at}/splits/split-1.csv"
TRAINING = "--epochs 4 --lr 0.1,0.01 --l1 0 --device cpu"
ONE_RUN = "--epochs 4 --lr 0.1 --l1 0 --device cpu --seeds 1001"
DRAWN = "--size 32 --slices 12"

RESUMED = {
    "phantom": f"phantom folder {{out}} --scans 6 {DRAWN}",
    "split": "split {at}/index --proportions 2:1:1 -o {out}",
    "describe": f"describe {{at}}/index {SPLIT} -o {{out}}",
    "encode": ENCODE,
    "sweep": f"sweep {{at}}/store {SPLIT} --methods ng,abmil {TRAINING} --save-epochs 1 -o {{out}}",
    "reproduce": f"reproduce semi-synthetic --seeds 1001 --methods mean,ng {TRAINING} -o {{out}}",
    "trust": f"trust {{at}}/run/ng/1001 --store {{at}}/store {SPLIT} -o {{out}}",
    "predict": "predict {at}/drawn/scans -m {at}/run/ng/1001 --dicom --workers 0 -o {out}",
    "predict features": "predict {at}/own -m {at}/own-run/ng/1001 --workers 0 -o {out}",
    "store export hdf5": "store export {at}/store -f hdf5 -o {out}",
    "experiment": f"experiment {{at}}/store {SPLIT} --methods mean,ng {TRAINING} -o {{out}}",
}
REFUSED = {
    "index": "index folder {at}/scans --table {at}/scans/labels.csv --workers 0 -o {out}",
    "bundle": "bundle {at}/run/ng/1001 -o {out}",
    "store import": "store import {at}/npz -o {out}",
    "store export npz": "store export {at}/store -f npz -o {out}",
    "store export torchmil": "store export {at}/store -f torchmil -o {out}",
    "fit": "fit {at}/own-store --device cpu -o {out}",
}
"""Commands that take a complete output as such, and those that refuse it."""

INPUTS = (
    f"phantom folder {{at}}/scans --scans 64 {DRAWN} --positive 0.5",
    f"phantom folder {{at}}/drawn --scans 4 {DRAWN} --positive 0.5 --seed 7",
    REFUSED["index"].replace("{out}", "{at}/index"),
    "split {at}/index --seeds 1 --proportions 2:1:1 -o {at}/splits",
    ENCODE.replace("{out}", "{at}/store"),
    f"sweep {{at}}/store {SPLIT} --methods ng {ONE_RUN} -o {{at}}/run",
    "store export {at}/store -f npz -o {at}/npz",
    "store import {at}/own-training -o {at}/own-store",
    "split {at}/own-store --seeds 1 --proportions 2:1:1 -o {at}/own-split",
    f"sweep {{at}}/own-store --split {{at}}/own-split/split-1.csv {ONE_RUN} -o {{at}}/own-run",
)


def prepare(at: Path) -> None:
    """The inputs: scans, index, splits, store, a run, new scans, features of one's own and their model."""
    import numpy as np

    random = np.random.default_rng(0)
    for folder, count in (("own", 6), ("own-training", 24)):
        (at / folder).mkdir(parents=True)
        for number in range(count):
            features = random.normal(number % 2, 1, (8, 5)).astype(np.float32)
            np.savez(at / folder / f"s{number:02d}.npz", features=features, label=number % 2, patient_id=f"p{number}")
    said = at.parent / "said.txt"
    for line in INPUTS:
        assert attempt(line.format(at=at).split(), said=said) == 0, (line, said.read_text())


def load_everything() -> None:
    """Import all that the commands import, and put a tiny encoder and a tiny dataset in the place of large ones."""
    os.environ.setdefault("MPLBACKEND", "Agg")
    import torch

    torch.set_num_threads(1)  # a forked child must not wait for threads that only its parent has
    import normal_guidance

    for module in pkgutil.walk_packages(normal_guidance.__path__, "normal_guidance."):
        if not re.search(r"triton|ray|__main__|viewer", module.name):
            importlib.import_module(module.name)
    late = ("matplotlib.pyplot", "sklearn.linear_model", "sklearn.model_selection", "h5py", "pydicom", "highdicom")
    for name in late:
        importlib.import_module(name)
    import small_bundle
    from normal_guidance.fit import bundle
    from normal_guidance.scans.features import encoders
    from normal_guidance.scans.index.manifest import PARTS
    from normal_guidance.study.drawn import shifted_mean
    from normal_guidance.study.experiment import DATASETS
    from normal_guidance.sweep.run import Run

    def tiny(name: str, **options: Any) -> Any:
        return small_bundle.tiny(options.get("device", "cpu"))

    encoders.load_encoder = bundle.load_encoder = tiny
    # Tables and pages print the time that runs took; here it is 0.
    Run.seconds = property(lambda run: 0.0, lambda run, value: None)
    drawn = DATASETS["semi-synthetic"]
    DATASETS["semi-synthetic"] = replace(
        drawn, draw=lambda seed, part: shifted_mean(70, seed + PARTS.index(part), features=8)
    )


def attempt(words: Sequence[object], kill_after: float | None = None, said: Path | None = None) -> int | None:
    """Run a command in a child; return its exit code, or None if it was killed."""
    child = os.fork()
    if child == 0:
        code = 70
        try:
            os.setpgrp()
            told = os.open(said or os.devnull, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
            os.dup2(told, 1)
            os.dup2(told, 2)
            sys.argv = ["nguide", *map(str, words)]
            from normal_guidance.cli.__main__ import main

            main()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else 0
        finally:
            sys.stdout.flush()
            os._exit(code)
    if kill_after is not None:
        time.sleep(kill_after)
        os.kill(child, signal.SIGKILL)
    _, status = os.waitpid(child, 0)
    return None if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def contents(folder: Path) -> dict[str, bytes]:
    """All files below a folder, without times; empty folders have an entry, too."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_file():
            found[name] = _plain(path)
        elif not any(path.iterdir()):
            found[f"{name}/"] = b""
    return found


def _plain(path: Path) -> bytes:
    if path.name == "lock":  # it names the process that wrote last
        return b""
    content = path.read_bytes()
    if path.suffix == ".json":
        return json.dumps(_without_times(json.loads(content))).encode()
    if path.suffix == ".dcm":
        return _dicom_without_times(path)
    if path.suffix == ".html":
        content = TIMES_IN_PAGES.sub(b"", content)
    return TIME_OF_DAY.sub(b"", content) if path.suffix in (".html", ".md", ".tex", ".csv") else content


def _dicom_without_times(path: Path) -> bytes:
    import pydicom

    def forget(part: Any, element: Any) -> None:
        if element.VR in ("DA", "DT", "TM"):
            del part[element.tag]

    dataset = pydicom.dcmread(path)
    dataset.walk(forget)
    return f"{dataset.file_meta}\n{dataset}".encode() + dataset.get("PixelData", b"")


def _without_times(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_times(inner) for name, inner in value.items() if name not in TIMES}
    return [_without_times(inner) for inner in value] if isinstance(value, list) else value


def kind(name: str) -> str:
    """A file's name without what is drawn at random, so that kinds can be counted."""
    return re.sub(r"[0-9a-f]{32}", "*", name)


def attack(case: Case, at: Path, folder: Path, kills: int, random: Random) -> None:
    """Kill a command so many times, in rounds that each end with a comparison."""
    said = folder.parent / "said.txt"
    out = folder / "out"
    words = case.line.format(at=at, out=out).split()

    def fresh() -> None:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)

    fresh()
    begin = time.monotonic()
    code = attempt(words, said=said)
    case.seconds = time.monotonic() - begin
    if code != 0:
        case.refused.append(f"uninterrupted: exit code {code}: {said.read_text()[-300:]}")
        return
    whole = contents(folder)
    fresh()
    attempt(words, said=said)
    case.different.update(f"without a kill: {name}" for name in _differing(whole, contents(folder)))
    while case.kills < kills:
        fresh()
        case.rounds += 1
        for _ in range(5 if case.seconds > SLOW else 3 if case.rounds % THREE_IN_A_ROW == 0 else 1):
            killed = attempt(words, random.uniform(0, case.seconds), said) is None
            case.kills += killed
        if case.resumes or not out.exists():
            code = attempt(words, said=said)
            if code != 0:
                case.refused.append(f"exit code {code}: {said.read_text()[-300:].strip()}")
                continue
        found = contents(folder)
        case.different.update(kind(name) for name in _differing(whole, found) if name in whole)
        case.left.update(kind(name) for name in found.keys() - whole.keys())


def _differing(one: dict[str, bytes], other: dict[str, bytes]) -> list[str]:
    return sorted(name for name in one.keys() | other.keys() if one.get(name) != other.get(name))


def run(folder: Path, kills: int, seed: int, names: Sequence[str]) -> dict[str, Case]:
    """Attack the named commands, or all, and print what is seen of each."""
    load_everything()
    prepare(folder / "in")
    known = {name: Case(line) for name, line in RESUMED.items()}
    known |= {name: Case(line, resumes=False) for name, line in REFUSED.items()}
    chosen = {name: known[name] for name in names or known}
    print(f"{'command':<22}{'seconds':>8}{'rounds':>8}{'kills':>7}{'refused':>9}{'differ':>8}{'left':>6}", flush=True)
    for name, case in chosen.items():
        attack(case, folder / "in", folder / "work" / name.replace(" ", "-"), kills, Random(f"{seed} {name}"))
        counts = f"{len(case.refused):>9}{case.different.total():>8}{case.left.total():>6}"
        print(f"{name:<22}{case.seconds:>8.2f}{case.rounds:>8}{case.kills:>7}{counts}", flush=True)
        for line in (*case.refused[:3], *list(case.different.items())[:5], *list(case.left.items())[:5]):
            print(f"    {line}", flush=True)
    return chosen


def main() -> None:
    options = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    options.add_argument("--kills", type=int, default=25)
    options.add_argument("--seed", type=int, default=1)
    options.add_argument("--commands", default="", help="names, separated by commas; all if left out")
    given = options.parse_args()
    names = [name for name in given.commands.split(",") if name]
    with tempfile.TemporaryDirectory() as folder:
        seen = run(Path(folder), given.kills, given.seed, names)
    wrong = {name: (case.refused, case.different, case.left) for name, case in seen.items()}
    print(json.dumps({"kills": {name: case.kills for name, case in seen.items()}, "wrong": wrong}))
    sys.exit(1 if any(map(any, wrong.values())) else 0)


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main()
