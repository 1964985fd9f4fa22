"""Fuzzes all code that reads files of unknown origin: DICOM, NIfTI, archives, label tables, datasets, features.

    python tests/fuzz/run.py --cases 10000 --seed 1 --jobs 2
    python tests/fuzz/run.py --seed 1 --case 4711        repeat one case with its traceback; its folder is kept

A case is a file or a dataset, damaged at random, and the code that reads it.  It may end well or with a clear error: a
UserError, an UnreadableError, a line of problems.csv.  Anything else is a finding: another exception or a warning, no
answer within `PATIENCE`, more memory than `guard.MEMORY`, a file made or changed outside the output folder, a secret
read, the loss of an undamaged scan, the death of the process.  Only a native decoder of compressed pixels may die:
`nguide encode` runs it in worker processes and records the scan as failed; such deaths are counted.  HDF5 may die as
well, in the process that reads it for `nguide store import`.

Prints outcomes by kind of case, the findings, and one JSON line; exit code 1 if there are findings.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import takewhile
from multiprocessing.connection import Connection, wait
from pathlib import Path
from uuid import uuid4

HERE = Path(__file__).parent
CASES = HERE / "cases.py"

PATIENCE = 20.0
"""Seconds after which a case counts as hanging: HDF5 that hangs is ended after 15 s (`foreign_files.PATIENCE`)."""

START_PATIENCE = 120.0
"""Seconds for a worker to import everything."""


@dataclass
class Worker:
    """A process that runs cases, and its current case."""

    process: subprocess.Popen[bytes]
    pipe: Connection
    log: Path
    number: int | None = None
    kind: str = ""
    native: bool = False
    since: float = field(default_factory=time.monotonic)

    @classmethod
    def start(cls, module: Path, folder: Path, seed: int) -> Worker:
        log = folder / f"{uuid4().hex}.log"
        ours, theirs = socket.socketpair()
        with theirs, log.open("wb") as output:
            arguments = [str(theirs.fileno()), str(module), str(folder / "samples"), str(folder / "cases"), str(seed)]
            process = subprocess.Popen(
                [sys.executable, str(HERE / "serve.py"), *arguments],
                pass_fds=[theirs.fileno()],
                cwd=folder / "cases",
                env={**os.environ, "OMP_NUM_THREADS": "1"},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
            )
        return cls(process, Connection(ours.detach()), log)

    def end(self) -> str:
        """Ends the process; returns how it ended, if it did so by itself."""
        self.pipe.close()  # which it takes for the end
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(2.0)
        self.process.kill()
        code = self.process.wait()
        return signal.Signals(-code).name if code < 0 else f"exit code {code}"

    def said(self) -> str:
        """The end of its output; faulthandler's traceback, if it crashed."""
        return self.log.read_text(errors="replace")[-4000:]


@dataclass
class Fuzzing:
    """A run with the results of its cases so far."""

    module: Path
    folder: Path
    seed: int
    numbers: Iterator[int]
    keep: bool = False
    patience: float = PATIENCE
    outcomes: defaultdict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))
    findings: list[dict[str, object]] = field(default_factory=list)
    exhausted: bool = False
    slowest: tuple[float, int] = (0.0, -1)

    def run(self, jobs: int) -> None:
        workers = [self._start() for _ in range(jobs)]
        try:
            while workers:
                heard = wait([worker.pipe for worker in workers], 0.5)
                for worker in workers[:]:
                    if not (self._hear(worker) if worker.pipe in heard else self._wait_on(worker)):
                        workers.remove(worker)
                        worker.end()
                        workers += [] if self.exhausted else [self._start()]
        finally:
            for worker in workers:
                worker.end()

    def _start(self) -> Worker:
        return Worker.start(self.module, self.folder, self.seed)

    def _hear(self, worker: Worker) -> bool:
        """Handles one message; returns False when the worker has ended."""
        try:
            what, *content = worker.pipe.recv()
        except (EOFError, OSError):
            self._bury(worker, worker.end())
            return False
        if what == "begun":
            worker.kind, worker.native = content[0], False
        elif what == "decoding":
            worker.native = content[0]
        else:
            if what == "outcome":
                self._count(worker, content[0])
            elif what == "finding":
                self._find(worker, *content)
            return self._give(worker)
        return True

    def _give(self, worker: Worker) -> bool:
        number = next(self.numbers, None)
        if number is None:
            self.exhausted = True
            return False
        worker.number, worker.since = number, time.monotonic()
        with suppress(OSError):  # if it died, the pipe says so when it is read
            worker.pipe.send((number, self.keep))
        return True

    def _wait_on(self, worker: Worker) -> bool:
        patience = START_PATIENCE if worker.number is None else self.patience
        if time.monotonic() - worker.since <= patience:
            return True
        worker.process.kill()
        if worker.number is None:
            raise RuntimeError("a worker does not start")
        self._find(worker, "hang", f"no answer within {patience:g} s", "")
        return False

    def _bury(self, worker: Worker, how: str) -> None:
        if worker.number is None:
            raise RuntimeError(f"a worker died before its first case: {how}\n{worker.said()}")
        if worker.native:
            self._count(worker, f"decoder died: {how}")
        else:
            self._find(worker, "crash", how, worker.said())

    def _count(self, worker: Worker, outcome: str) -> None:
        self.outcomes[worker.kind][outcome] += 1
        self.slowest = max(self.slowest, (round(time.monotonic() - worker.since, 2), worker.number or 0))

    def _find(self, worker: Worker, kind: str, detail: str, trace: str) -> None:
        self._count(worker, f"FINDING: {kind}")
        finding = {"case": worker.number, "of": worker.kind, "kind": kind, "detail": detail[:300]}
        self.findings.append(finding)
        print(f"{finding}\n{trace}" if self.keep else f"{finding} at {_last_place(trace)}", flush=True)


def _last_place(trace: str) -> str:
    """The place where an error was raised."""
    places = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
    return places[-1] if places else "?"


def until(numbers: Iterable[int], seconds: float | None) -> Iterator[int]:
    """The numbers of cases, as long as there is time."""
    end = time.monotonic() + (seconds or 1e9)
    return takewhile(lambda number: time.monotonic() < end, numbers)


def print_table(outcomes: dict[str, Counter[str]]) -> None:
    for kind in sorted(outcomes):
        print(f"{kind:<20} {sum(outcomes[kind].values()):>6}")
        for outcome, count in sorted(outcomes[kind].items(), key=lambda one: (-one[1], one[0])):
            print(f"    {outcome:<30} {count:>6}")


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes the readers; exit code 1 if there are findings.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--seconds", type=float, help="begin no case after so long")
    parser.add_argument("--case", type=int, help="run this one alone, with its traceback, and keep its folder")
    parser.add_argument("--of", type=Path, default=CASES, help="file that defines other KINDS of cases")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds after which a case hangs")
    chosen = parser.parse_args()
    begin = time.monotonic()
    folder = Path(tempfile.mkdtemp(prefix="fuzz-"))
    keep = chosen.case is not None
    try:
        (folder / "cases").mkdir()
        if chosen.of == CASES:
            _make_samples(folder / "samples")
        numbers = until([chosen.case] if keep else range(chosen.cases), chosen.seconds)
        fuzzing = Fuzzing(chosen.of.resolve(), folder, chosen.seed, numbers, keep, chosen.patience)
        fuzzing.run(1 if keep else chosen.jobs)
    finally:
        if not keep:
            shutil.rmtree(folder, ignore_errors=True)
    print_table(fuzzing.outcomes)
    if keep:
        print(f"the case lies in {folder / 'cases' / str(chosen.case)}")
    for finding in fuzzing.findings:
        print(f"found: {finding}; again: python tests/fuzz/run.py --seed {chosen.seed} --case {finding['case']}")
    report = {
        "seed": chosen.seed,
        "cases": sum(sum(counts.values()) for counts in fuzzing.outcomes.values()),
        "seconds": round(time.monotonic() - begin, 1),
        "slowest": dict(zip(("seconds", "case"), fuzzing.slowest, strict=True)),
        "outcomes": fuzzing.outcomes,
        "findings": fuzzing.findings,
    }
    print(json.dumps(report))
    return 1 if fuzzing.findings else 0


def _make_samples(folder: Path) -> None:
    """Makes the samples in another process: this one stays small and does not import the tested code."""
    folder.mkdir()
    code = "import sys; from pathlib import Path; from samples import write_samples; write_samples(Path(sys.argv[1]))"
    subprocess.run([sys.executable, "-c", code, str(folder)], cwd=HERE, check=True)


if __name__ == "__main__":
    sys.exit(main())
