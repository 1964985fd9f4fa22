"""A pool of worker processes that survives crashes: parsers and decoders of medical images crash or hang on some files.

Every worker has its own socket, so the parent knows the tasks of each.  If a worker dies (a segmentation fault, out of
memory) or is silent for too long, its tasks are tried once more, one by one; a task that ends its worker again becomes
a `Failure`.  All other tasks get their results.  Workers are started as separate programs: forks break CUDA and OpenMP,
and multiprocessing would run the user's main script again.

`normal_guidance.data.worker_process` is the code that runs in a worker.
"""

from __future__ import annotations

import mmap
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import islice
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from types import TracebackType
from typing import Any, Generic, NamedTuple

from normal_guidance.data.worker_process import Death, Failure, Result, Task, attempt
from normal_guidance.errors import UserError

TIMEOUT = 600.0
"""Seconds after which a silent worker counts as hanging: far more than the longest scans take on a slow disk."""

START_TIMEOUT = 300.0
"""Seconds for a worker to start and to import the modules of a task, maybe from a slow disk."""

ATTEMPTS = 2
"""Attempts at a task whose worker dies: the first worker may have died of another task, or of too little memory."""

POLL_SECONDS = 0.2
"""Longest sleep of the parent between two checks of the deadlines."""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""Environment of a worker: there are as many workers as cores, so more threads would only slow each other down."""


class StartError(UserError):
    """A worker that ends before its first task or cannot import its modules; the task itself is not at fault."""

    def __init__(self, message: str, death: Death | None = None) -> None:
        super().__init__(f"a worker process {message}; use --workers 0")
        self.death = death


class Pool:
    """Worker processes for `map`, started when there is work or by `start`; `workers=0` runs all tasks in this process.

    Args:
        workers: processes.
        timeout: seconds after which a silent worker counts as hanging.
        attempts: attempts at a task whose worker dies; `ATTEMPTS` if left out.
        memory: bytes that a worker may take beside its imports; no limit if left out.
    """

    def __init__(
        self, workers: int, timeout: float = TIMEOUT, *, attempts: int | None = None, memory: int | None = None
    ) -> None:
        self.workers, self.timeout = workers, timeout
        self.attempts, self.memory = attempts or ATTEMPTS, memory
        self._started: list[_Worker] = []
        self._stopping = threading.Event()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def start(self, tasks: int, modules: Sequence[str] = ()) -> None:
        """Starts the workers for this many tasks without waiting; they import the modules before their first task.

        A start takes seconds, in which the caller can do other work.
        """
        while len(self._started) < min(self.workers, tasks):
            self._started.append(_Worker.start(modules, self.memory))

    def stop(self) -> None:
        """Ends a `map` that runs in another thread, and all later ones."""
        self._stopping.set()

    def close(self) -> None:
        """Ends the workers, whatever they are doing."""
        self.stop()
        while self._started:
            self._started.pop().kill()

    def map(
        self,
        function: Callable[[Task], Result],
        tasks: Iterable[Task],
        *,
        size: Callable[[Task], int] = lambda task: 1,
        ahead: int = sys.maxsize,
        batch: int = 1,
        batches: int = 2,
    ) -> Iterator[Result | Failure]:
        """The function's result for each task, in their order.

        Args:
            function: imported by its name in the workers, so it must lie in a module other than `__main__`.
            tasks: read when there is room.
            size: the size of a task.
            ahead: largest total size of the batches that are begun and not yet returned; one batch is always allowed.
            batch: tasks that a worker receives at once and finishes within the timeout: many if they are short.
            batches: batches per worker that are begun and not yet returned; with `ahead`, this limits the memory.
        """
        if self.workers < 1:
            for task in tasks:
                if self._stopping.is_set():
                    return
                yield attempt(function, task)
            return
        work = _Work(iter(tasks), batch, size, batches * self.workers, ahead, self.attempts)
        while not self._stopping.is_set():
            self._hand_out(function, work)
            if work.has_next():
                yield from work.give_out()
            elif work.begun or work.could_begin(1):
                self._collect(work)
            else:
                return

    def _hand_out(self, function: Callable[[Any], Any], work: _Work[Any]) -> None:
        """Gives tasks to every idle worker, and starts workers as long as there are tasks for them."""
        while True:
            idle = next((worker for worker in self._started if worker.ready and worker.job is None), None)
            starting = sum(not worker.ready for worker in self._started)
            if idle is None:
                # Workers that are starting will take the open tasks.
                if len(self._started) < self.workers and work.could_begin(starting + 1):
                    self._started.append(_Worker.start((), self.memory))
                    continue
                return
            job = work.begin()
            if job is None:
                return
            idle.give(job, function, work.tasks_of(job))

    def _collect(self, work: _Work[Any]) -> None:
        """Waits for results, deaths and deadlines, and handles them."""
        by_connection = {worker.connection: worker for worker in self._started}
        for connection in wait(list(by_connection), POLL_SECONDS):
            worker = by_connection[connection]  # type: ignore[index]  # `wait` returns the given connections
            try:
                worker.receive(work, self.timeout)
            except (EOFError, ConnectionError, pickle.UnpicklingError):
                self._bury(worker, work, worker.end())
        for worker in self._started[:]:
            if time.monotonic() > worker.deadline:
                worker.kill()
                self._bury(worker, work, Death(silence=worker.patience))

    def _bury(self, worker: _Worker, work: _Work[Any], death: Death) -> None:
        self._started.remove(worker)
        if not worker.ready:
            raise StartError(f"{death} before its first task", death)
        if worker.job is not None:
            work.died(worker.job, death)


class _Job(NamedTuple):
    """The current work of a worker: all tasks of a batch, or a single one that is tried again."""

    number: int
    """The number of the batch."""
    places: Sequence[int]
    attempt: int


@dataclass
class _Batch(Generic[Task]):
    tasks: list[Task]
    size: int
    results: dict[int, Any] = field(default_factory=dict)


@dataclass
class _Work(Generic[Task]):
    """The tasks of a `map`: those begun, those to try again, and those done that wait for their turn."""

    tasks: Iterator[Task]
    batch: int
    size_of: Callable[[Task], int]
    most: int
    ahead: int
    attempts: int
    begun: dict[int, _Batch[Task]] = field(default_factory=dict)
    open: deque[_Job] = field(default_factory=deque)
    """Begun, but without a worker."""
    next_begun: int = 0
    next_out: int = 0
    exhausted: bool = False

    def _draw(self) -> bool:
        """Reads a batch of tasks, if there is room and tasks are left."""
        room = len(self.begun) < self.most and sum(one.size for one in self.begun.values()) < self.ahead
        if self.exhausted or not (room or not self.begun):
            return False
        tasks = list(islice(self.tasks, self.batch))
        if not tasks:
            self.exhausted = True
            return False
        self.begun[self.next_begun] = _Batch(tasks, sum(map(self.size_of, tasks)))
        self.open.append(_Job(self.next_begun, range(len(tasks)), attempt=1))
        self.next_begun += 1
        return True

    def could_begin(self, count: int) -> bool:
        """Whether there is work for this many workers."""
        while len(self.open) < count and self._draw():
            pass
        return len(self.open) >= count

    def begin(self) -> _Job | None:
        """The next work for a worker."""
        return self.open.popleft() if self.could_begin(1) else None

    def tasks_of(self, job: _Job) -> list[Task]:
        return [self.begun[job.number].tasks[place] for place in job.places]

    def done(self, job: _Job, results: Iterable[Any]) -> None:
        self.begun[job.number].results.update(zip(job.places, results, strict=True))

    def died(self, job: _Job, death: Death) -> None:
        if job.attempt < self.attempts:
            self.open.extendleft(_Job(job.number, [place], job.attempt + 1) for place in reversed(job.places))
        else:
            tries = f" ({self.attempts} attempts)" if self.attempts > 1 else ""
            detail = f"the process that read it {death}{tries}"
            self.done(job, [Failure("failed", detail, death) for _ in job.places])

    def has_next(self) -> bool:
        batch = self.begun.get(self.next_out)
        return batch is not None and len(batch.results) == len(batch.tasks)

    def give_out(self) -> list[Any]:
        """The results of the next batch."""
        batch = self.begun.pop(self.next_out)
        self.next_out += 1
        return [batch.results[place] for place in range(len(batch.tasks))]


@dataclass(eq=False)
class _Worker:
    """A process, seen from the parent."""

    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    job: _Job | None = None
    """Its current work."""
    patience: float = START_TIMEOUT
    deadline: float = float("inf")

    @classmethod
    def start(cls, modules: Sequence[str], memory: int | None) -> _Worker:
        ours, theirs = socket.socketpair()
        asked = f"{theirs.fileno()}, {list(modules)!r}, {memory}"
        code = f"from normal_guidance.data.worker_process import serve; serve({asked})"
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # decoders print; errors are part of the result
                stderr=subprocess.DEVNULL,
            )
        worker = cls(process, Connection(ours.detach()))
        worker.expect(START_TIMEOUT)
        return worker

    def expect(self, seconds: float) -> None:
        """Sets the time within which the worker must send a message."""
        self.patience, self.deadline = seconds, time.monotonic() + seconds

    def give(self, job: _Job, function: Callable[[Any], Any], tasks: list[Any]) -> None:
        self.job = job
        self.expect(START_TIMEOUT)
        with suppress(ConnectionError):  # the worker is dead; `receive` will notice
            self.connection.send((function, tasks))

    def receive(self, work: _Work[Any], timeout: float) -> None:
        """Handles one message of the worker."""
        kind, content, sizes = self.connection.recv()
        if kind == "begun":
            self.expect(timeout)
            return
        if kind == "user error":
            raise UserError(content)
        if kind == "broken":
            raise StartError(f"cannot run its tasks: {content}")
        if kind == "results":
            assert self.job is not None, "results of no task"
            work.done(self.job, pickle.loads(content, buffers=_map_buffers(self.connection, sizes)))
        self.ready, self.job, self.deadline = True, None, float("inf")

    def end(self) -> Death:
        """The cause of death of a worker that has ended."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(POLL_SECONDS)
        self.kill()
        code = self.process.returncode
        with suppress(ValueError):  # not every signal has a name
            return Death(signal.Signals(-code).name)
        return Death(f"exit code {code}")

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self.connection.close()


def _map_buffers(connection: Connection, sizes: list[int]) -> list[memoryview]:
    """Maps the memory that a worker sends after its message; it is unmapped when its last array is gone."""
    if not sum(sizes):
        return [memoryview(bytearray()) for _ in sizes]
    descriptor = recv_handle(connection)
    try:
        whole = memoryview(mmap.mmap(descriptor, sum(sizes)))
    finally:
        os.close(descriptor)
    pieces, start = [], 0
    for size in sizes:
        pieces.append(whole[start : start + size])
        start += size
    return pieces
