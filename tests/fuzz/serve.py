"""Runs one case in a worker process."""

from __future__ import annotations

import faulthandler
import os
import resource
import shutil
import sys
import time
import traceback
import warnings
from bisect import bisect
from collections.abc import Callable
from functools import cache
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, NamedTuple

import guard

if TYPE_CHECKING:
    from samples import Samples

    Case = Callable[[Random, Samples, guard.Probe], str]
    """Runs a case, returns its outcome in a word or two, or raises an error that a user would see as a traceback."""

ADDRESS_SPACE = 8 * 2**30
"""Most bytes that a worker may allocate, so that the machine survives the findings."""

GOLDEN = (5**0.5 - 1) / 2


class Setup(NamedTuple):
    """What the cases of a run share."""

    module: Path
    """Defines `KINDS`."""
    folder: Path
    """Holds samples and cases."""
    seed: int
    keep: bool
    """Whether to keep the cases' folders."""

    def record(self, number: int) -> Path:
        """What is known of a case whose worker died: its kind, whether native decoders were at work, where."""
        return self.folder / f"{number}.record"


class Outcome(NamedTuple):
    """How a case ended; a finding's outcome begins with FINDING."""

    kind: str
    outcome: str
    detail: str = ""
    trace: str = ""
    seconds: float = 0.0


@cache
def prepare(setup: Setup) -> dict[str, tuple[int, Case]]:
    """Prepares this process, once, and returns the kinds of cases."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(setup.module.parent))
    kinds: dict[str, tuple[int, Case]] = import_module(setup.module.stem).KINDS
    os.chdir(setup.folder / "cases")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    guard.install()
    warnings.simplefilter("error")  # a warning is a line that a user would have to understand
    return kinds


def choose(weights: dict[str, int], number: int) -> str:
    """The kind of a case: multiples of the golden ratio spread evenly, so that few cases already have all kinds."""
    place = number * GOLDEN % 1 * sum(weights.values())
    return list(weights)[bisect(list(accumulate(weights.values())), place)]


class Runner:
    """Runs cases by their numbers; a worker that receives it first imports what they need, before its time counts."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def __setstate__(self, state: dict[str, Setup]) -> None:
        self.setup = state["setup"]
        prepare(self.setup)

    def __call__(self, number: int) -> Outcome:
        return run_case(self.setup, number)


def run_case(setup: Setup, number: int) -> Outcome:
    from samples import Samples

    kinds = prepare(setup)
    kind = choose({name: weight for name, (weight, _) in kinds.items()}, number)
    folder, begin = setup.folder / "cases" / str(number), time.monotonic()
    with setup.record(number).open("wb", buffering=0) as record:
        record.write(f"{kind}\n".encode())
        faulthandler.enable(record)
        folder.mkdir()
        try:
            probe = guard.Probe(folder, lambda native: record.write(b"native\n" if native else b"python\n"))
            outcome = kinds[kind][1](Random(f"{setup.seed}/{number}"), Samples(setup.folder / "samples"), probe)
            return Outcome(kind, outcome, seconds=time.monotonic() - begin)
        except guard.Finding as error:
            return Outcome(kind, f"FINDING: {error.kind}", error.detail, traceback.format_exc())
        except BaseException as error:
            detail = f"{type(error).__name__}: {error}"[:500]
            return Outcome(kind, "FINDING: traceback", detail, traceback.format_exc())
        finally:
            faulthandler.disable()
            if not setup.keep:
                shutil.rmtree(folder)
