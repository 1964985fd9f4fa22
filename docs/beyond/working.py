"""Jobs and seeds, done side by side by processes that keep the scans they have drawn."""

from __future__ import annotations

import os
import threading
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from contextlib import ExitStack, closing
from dataclasses import dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

import torch

from beyond.measuring import OutOfTimeError, line, measure
from beyond.points import Job, Protocol
from beyond.results import read, write
from normal_guidance.training.sweep import Execution

Scans = tuple[str, int]
"""Variant and seed of what is drawn."""


class Task(NamedTuple):
    """One job on one seed."""

    job: Job
    seed: int

    @property
    def scans(self) -> Scans:
        return self.job.variant, self.seed

    def __str__(self) -> str:
        return f"{self.job.variant}/{self.job.name}, seed {self.seed}"


@dataclass(frozen=True)
class Setting:
    """What every task is done with."""

    folder: Path
    protocol: Protocol
    execution: Execution
    processes: int = 1
    deadline: float | None = None
    """In `time.time()`; None: no end."""

    @property
    def is_over(self) -> bool:
        return self.deadline is not None and time.time() > self.deadline


class Board:
    """Tasks by the scans that they need: who has drawn some is given what else needs them."""

    def __init__(self, tasks: Iterable[Task]) -> None:
        self.tasks: dict[Scans, deque[Task]] = defaultdict(deque)
        for task in tasks:
            self.tasks[task.scans].append(task)
        self.holders: Counter[Scans] = Counter()
        self.lock = threading.Lock()

    def take(self, held: Scans | None) -> Task | None:
        """The next task, of the same scans if there is one, else of those that the fewest hold; None: all are taken."""
        with self.lock:
            left = [scans for scans, tasks in self.tasks.items() if tasks]
            if not left:
                return None
            if held in left:
                return self.tasks[held].popleft()
            scans = min(left, key=lambda one: self.holders[one])  # of equal ones the first
            self.holders.subtract([held] if held else [])
            self.holders[scans] += 1
            return self.tasks[scans].popleft()


def lacking(tasks: Sequence[Task], setting: Setting) -> list[Task]:
    """Those whose result is not there; results of other protocols are refused."""
    return [task for task in tasks if read(setting.folder, *task, setting.protocol) is None]


def work(tasks: Sequence[Task], setting: Setting, tell: Callable[[str], None]) -> list[Task]:
    """Does the tasks until the deadline and tells of each; returns those that failed."""
    board, failed, told = Board(tasks), list[Task](), _Teller(tell, len(tasks))
    if setting.processes == 1:
        _serve(board, setting, do, told, failed)
        return failed
    # Each process compiles with a pool of its own.
    os.environ.setdefault("TORCHINDUCTOR_COMPILE_THREADS", str(_share(setting.processes)))
    with ExitStack() as processes:
        doers = [processes.enter_context(closing(_Process())) for _ in range(setting.processes)]
        threads = [threading.Thread(target=_serve, args=(board, setting, one, told, failed)) for one in doers]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    return failed


def _share(processes: int) -> int:
    return max(1, (os.cpu_count() or 1) // processes)


class _Process:
    """Does tasks in a process of its own; in another one if that dies."""

    def __init__(self) -> None:
        self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))

    def __call__(self, task: Task, setting: Setting) -> str:
        try:
            return self.pool.submit(do, task, setting).result()
        except BrokenProcessPool:
            self.pool = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
            raise

    def close(self) -> None:
        self.pool.shutdown()


class _Teller:
    """Numbers what is told, whichever thread tells it."""

    def __init__(self, tell: Callable[[str], None], count: int) -> None:
        self.tell, self.count, self.done, self.lock = tell, count, 0, threading.Lock()

    def __call__(self, text: str) -> None:
        with self.lock:
            self.done += 1
            self.tell(f"[{self.done}/{self.count}] {text}")


def _serve(
    board: Board, setting: Setting, do_one: Callable[[Task, Setting], str], tell: _Teller, failed: list[Task]
) -> None:
    """Tasks one after the other, until none is left or the time is up."""
    held = None
    while not setting.is_over and (task := board.take(held)) is not None:
        held = task.scans
        try:
            tell(f"{task}: {do_one(task, setting)}")
        except OutOfTimeError as reached:
            tell(f"{task}: left at {reached}, the time is up")
        except Exception as error:  # whatever it is, the other tasks can be done
            failed.append(task)
            tell(f"{task}: FAILED, {type(error).__name__}: {error}")


def do(task: Task, setting: Setting) -> str:
    """Measures and writes, in whichever process; what it found, in words."""
    if setting.processes > 1:
        torch.set_num_threads(_share(setting.processes))
    result = measure(*task, setting.protocol, setting.execution, setting.deadline)
    write(setting.folder, task.job, result)
    return f"{line(result)} ({result.about['seconds']:.0f} s)"
