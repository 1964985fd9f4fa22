"""Fuzzes all code that reads files of unknown origin: DICOM, NIfTI, archives, label tables, datasets, features.

    python tests/fuzz/run.py --cases 10000 --seed 1 --jobs 2
    python tests/fuzz/run.py --seed 1 --case 4711        repeat one case with its traceback; its folder is kept

A case is a file or a dataset, damaged at random, and the code that reads it.  It may end well or with a clear error: a
UserError, an UnreadableError, a line of problems.csv.  Anything else is a finding: another exception or a warning, no
answer within `PATIENCE`, more memory than `harness.MEMORY`, a file made or changed outside the output folder, a secret
read, the loss of an undamaged scan, the death of the process.  Only a native decoder of compressed pixels may die:
`nguide encode` runs it in worker processes and records the scan as failed; such deaths are counted.  HDF5 may die as
well, in the process that reads it for `nguide store import`.

Prints outcomes by kind of case, the findings, and one JSON line; exit code 1 if there are findings.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness import Outcome, Runner, Setup

from normal_guidance.base.workers import Failure, Pool

HERE = Path(__file__).parent
PATIENCE = 20.0
"""Seconds after which a case counts as hanging: HDF5 that hangs is ended after 15 s (`workers.PATIENCE`)."""


def outcomes(setup: Setup, numbers: Sequence[int], jobs: int, patience: float) -> Iterator[tuple[int, Outcome]]:
    """The outcome of every case; workers that die or hang are replaced."""
    with Pool(jobs, patience, attempts=1) as pool:
        for number, result in zip(numbers, pool.map(Runner(setup), numbers), strict=True):
            yield number, buried(setup, number, result) if isinstance(result, Failure) else result


def buried(setup: Setup, number: int, failure: Failure) -> Outcome:
    """The outcome of a case that killed its worker, or did not end; faulthandler wrote where it crashed."""
    if failure.death is None:  # before the case began
        raise RuntimeError(failure.detail)
    kind, *said = setup.record(number).read_text(errors="replace").splitlines()
    if not failure.death.cause:
        return Outcome(kind, "FINDING: hang", failure.detail)
    if [line for line in said if line in ("python", "native")][-1:] == ["native"]:
        return Outcome(kind, f"decoder died: {failure.death.cause}")
    return Outcome(kind, "FINDING: crash", failure.death.cause, "\n".join(said))


def main() -> int:
    parser = argparse.ArgumentParser(description="Fuzzes the readers; exit code 1 if there are findings.")
    parser.add_argument("--cases", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--case", type=int, help="run this one alone, with its traceback, and keep its folder")
    parser.add_argument("--of", type=Path, default=HERE / "cases.py", help="file that defines other KINDS of cases")
    parser.add_argument("--patience", type=float, default=PATIENCE, help="seconds after which a case hangs")
    chosen = parser.parse_args()
    begin, alone = time.monotonic(), chosen.case is not None
    counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
    findings: list[dict[str, object]] = []
    setup = Setup(chosen.of.resolve(), Path(tempfile.mkdtemp(prefix="fuzz-")), chosen.seed, alone)
    numbers = [chosen.case] if alone else range(chosen.cases)
    try:
        (setup.folder / "cases").mkdir()
        (setup.folder / "samples").mkdir()
        if chosen.of.name != "planted.py":  # in another process, so that this one stays small
            subprocess.run([sys.executable, HERE / "samples.py", setup.folder / "samples"], check=True)
        for number, (kind, outcome, detail, trace) in outcomes(
            setup, numbers, 1 if alone else chosen.jobs, chosen.patience
        ):
            counts[kind][outcome] += 1
            if outcome.startswith("FINDING: "):
                what = outcome.removeprefix("FINDING: ")
                findings.append({"case": number, "of": kind, "kind": what, "detail": detail[:300]})
                places = [line.strip() for line in trace.splitlines() if line.strip().startswith("File ")]
                print(f"{findings[-1]}\n{trace}" if alone else f"{findings[-1]} at {[*places, '?'][-1]}", flush=True)
    finally:
        if not alone:
            shutil.rmtree(setup.folder, ignore_errors=True)
    for kind, own in sorted(counts.items()):
        print(
            f"{kind:<20} {own.total():>6}",
            *(f"    {outcome:<30} {count:>6}" for outcome, count in own.most_common()),
            sep="\n",
        )
    if alone:
        print(f"the case lies in {setup.folder / 'cases' / str(chosen.case)}")
    for finding in findings:
        print(f"found: {finding}; again: python tests/fuzz/run.py --seed {chosen.seed} --case {finding['case']}")
    report = {
        "seed": chosen.seed,
        "cases": sum(own.total() for own in counts.values()),
        "seconds": round(time.monotonic() - begin, 1),
        "outcomes": counts,
        "findings": findings,
    }
    print(json.dumps(report))
    return 1 if findings else 0


if __name__ == "__main__":
    sys.exit(main())
