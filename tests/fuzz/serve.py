"""A worker process: runs cases one after the other and sends their results to the parent.

Arguments: the descriptor of the pipe, the file that defines `KINDS`, the folder of samples, a folder for the cases,
the seed.
"""

from __future__ import annotations

import faulthandler
import resource
import shutil
import sys
import traceback
import warnings
from bisect import bisect
from collections.abc import Callable
from importlib import import_module
from itertools import accumulate
from multiprocessing.connection import Connection
from pathlib import Path
from random import Random
from typing import Any

import guard
from samples import Samples

ADDRESS_SPACE = 8 * 2**30
"""Most bytes that a worker may allocate, so that the machine survives the findings."""

GOLDEN = (5**0.5 - 1) / 2

Case = Callable[[Random, Samples, guard.Probe], str]
"""Runs a case, returns its outcome in a word or two, or raises an error that a user would see as a traceback."""


def main(descriptor: str, module: str, samples: str, folder: str, seed: str) -> None:
    faulthandler.enable()
    pipe = Connection(int(descriptor))
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(Path(module).parent))
    kinds: dict[str, tuple[int, Case]] = import_module(Path(module).stem).KINDS
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    guard.install()
    warnings.simplefilter("error")  # a warning is a line that a user would have to understand
    pipe.send(("ready",))
    while True:
        try:
            number, keep = pipe.recv()
        except EOFError:
            return
        _run(pipe, kinds, Samples(Path(samples)), Path(folder) / str(number), (seed, number), keep)


def choose(weights: dict[str, int], number: int) -> str:
    """The kind of a case: multiples of the golden ratio spread evenly, so that few cases already have all kinds."""
    place = number * GOLDEN % 1 * sum(weights.values())
    return list(weights)[bisect(list(accumulate(weights.values())), place)]


def _run(
    pipe: Connection, kinds: dict[str, tuple[int, Case]], samples: Samples, folder: Path, key: Any, keep: bool
) -> None:
    random = Random("/".join(map(str, key)))
    kind = choose({name: weight for name, (weight, _) in kinds.items()}, key[1])
    pipe.send(("begun", kind))
    folder.mkdir()
    try:
        outcome = kinds[kind][1](random, samples, guard.Probe(folder, lambda native: pipe.send(("decoding", native))))
        pipe.send(("outcome", outcome, "", ""))
    except guard.Finding as error:
        pipe.send(("finding", error.kind, error.detail, traceback.format_exc()))
    except BaseException as error:
        pipe.send(("finding", "traceback", f"{type(error).__name__}: {error}"[:500], traceback.format_exc()))
    finally:
        if not keep:
            shutil.rmtree(folder)


if __name__ == "__main__":
    main(*sys.argv[1:])
