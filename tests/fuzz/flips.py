"""Flips single bits in every file that we write, and reads the folder as the commands do.

    python tests/fuzz/flips.py --per-file 150 --seed 1 --jobs 2

Every flip must be refused with a UserError, or change nothing, or change only what is shown to people.  Results that
differ (SILENT) and other exceptions (TRACEBACK) are findings.  A file that is not read back (without it, the same is
read) is only shown.

Prints counts by file, the findings, and one JSON line; exit code 1 if there are findings.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from random import Random
from typing import NamedTuple

REFUSED, SAME, SHOWN, SILENT, TRACEBACK = "refused", "same", "only shown", "SILENT", "TRACEBACK"
OUTCOMES = (REFUSED, SAME, SHOWN, SILENT, TRACEBACK)
SLOW = {"job": 10}
"""Folders that take so many times longer to read, so that fewer of their bits are flipped."""

MADE_AGAIN = ("job",)
"""Folders whose files are made again if they are missing: that nothing changes then does not say that none is read."""


class Finding(NamedTuple):
    file: str
    bit: int
    outcome: str
    detail: str


def bits_of(content: bytes, count: int, random: Random) -> list[int]:
    """Which bits to flip: all, or a sample with some of those around the seal, where a seal may be taken away."""
    every = 8 * len(content)
    if every <= count:
        return list(range(every))
    mark = content.find(b"nguide-seal:")
    around = range(8 * max(0, mark - 8), 8 * (mark + 20)) if mark >= 0 else range(0)
    chosen = {*random.sample(range(every), count), *random.sample(around, min(len(around), count // 5))}
    return sorted(random.sample(sorted(chosen), count))


def flip(path: Path, bit: int) -> None:
    with path.open("r+b") as file:
        file.seek(bit // 8)
        [byte] = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([byte ^ 1 << bit % 8]))


def attack(folder: Path, name: str, file: Path, count: int, seed: int) -> Iterator[tuple[int, str, str]]:
    """Bit, outcome and detail of some flips in one file."""
    from own_folders import READERS

    from normal_guidance.base.errors import UserError

    read, content = READERS[name], file.read_bytes()
    before = read(folder)
    bits = bits_of(content, max(1, count // SLOW.get(name, 1)), Random(f"{seed}/{file.name}"))
    if name not in MADE_AGAIN and _reads_the_same_without(file, lambda: read(folder) == before):
        yield from ((bit, SHOWN, "") for bit in bits)
        return
    for bit in bits:
        flip(file, bit)
        try:
            after = read(folder)
            used, shown = after.used == before.used, after.shown == before.shown
            yield bit, SAME if used and shown else SHOWN if used else SILENT, ""
        except UserError as error:
            yield bit, REFUSED, str(error)
        except BaseException as error:
            yield bit, TRACEBACK, f"{type(error).__name__}: {error}"[:200]
        finally:
            file.write_bytes(content)


def _reads_the_same_without(file: Path, same: Callable[[], bool]) -> bool:
    away = file.with_name(f".{file.name}.away")
    file.rename(away)
    try:
        return same()
    except Exception:
        return False
    finally:
        away.rename(file)


def work(base: str, share: int, shares: int, count: int, seed: int) -> tuple[dict[str, Counter[str]], list[Finding]]:
    """Every `shares`-th file of a copy."""
    sys.path.insert(0, str(Path(__file__).parent))
    warnings.simplefilter("error")
    from own_folders import READERS, copy_folders, files_in

    counts: dict[str, Counter[str]] = {}
    findings = []
    with tempfile.TemporaryDirectory() as place:
        folder = copy_folders(Path(base), Path(place) / "copy")
        files = [(name, file) for name in READERS for file in files_in(folder / name)]
        for name, file in files[share::shares]:
            label = str(file.relative_to(folder))
            counts[label] = Counter()
            for bit, outcome, detail in attack(folder, name, file, count, seed):
                counts[label][outcome] += 1
                if outcome in (SILENT, TRACEBACK):
                    findings.append(Finding(label, bit, outcome, detail))
    return counts, findings


def run(base: Path, per_file: int, seed: int, jobs: int) -> tuple[dict[str, Counter[str]], list[Finding]]:
    with ProcessPoolExecutor(jobs, mp_context=get_context("spawn")) as pool:
        parts = [pool.submit(work, str(base), share, jobs, per_file, seed) for share in range(jobs)]
        done = [part.result() for part in parts]
    counts = {label: own for part, _ in done for label, own in part.items()}
    return dict(sorted(counts.items())), [finding for _, found in done for finding in found]


def main() -> int:
    parser = argparse.ArgumentParser(description="Flips bits; exit code 1 if one is silent or a traceback.")
    parser.add_argument("--per-file", type=int, default=150, help="bits to flip in each file")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    chosen = parser.parse_args()
    begin = time.monotonic()
    os.environ["OMP_NUM_THREADS"] = "1"
    with tempfile.TemporaryDirectory(prefix="flips-") as place:
        sys.path.insert(0, str(Path(__file__).parent))
        from own_folders import make_folders

        base = make_folders(Path(place) / "base")
        counts, findings = run(base, chosen.per_file, chosen.seed, chosen.jobs)
    print(f"{'file':<50}" + "".join(f"{outcome:>12}" for outcome in OUTCOMES))
    for label, own in counts.items():
        print(f"{label:<50}" + "".join(f"{own[outcome]:>12,}" for outcome in OUTCOMES))
    total = sum(counts.values(), Counter())
    print(f"{'all':<50}" + "".join(f"{total[outcome]:>12,}" for outcome in OUTCOMES))
    for finding in findings[:50]:
        print(f"found: {finding}")
    report = {"seed": chosen.seed, "seconds": round(time.monotonic() - begin, 1), "outcomes": dict(total)}
    print(json.dumps({**report, "files": counts, "findings": len(findings)}))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
