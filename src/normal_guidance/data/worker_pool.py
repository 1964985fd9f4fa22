"""Worker processes that are allowed to die: parsers and decoders of medical images crash and hang, over one file each.

Every worker has a socket of its own, so the parent knows which tasks each one is at: if a worker dies (a segmentation
fault, the kernel out of memory) or says nothing for too long, its tasks are tried once more, each alone, and one that
ends its worker again is a `Failure`.  Nothing is lost but that.  Workers are started as programs of their own, not
forked (CUDA and OpenMP do not survive it) and not by multiprocessing, which would run the user's main script again.

What they do in there is in `normal_guidance.data.worker_process`.
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
"""Seconds after which a worker is taken to hang: the longest scans take one, compressed, on a slow disk."""

START_TIMEOUT = 300.0
"""Seconds for a worker to start, and to import what a task takes, from what may be a slow disk."""

ATTEMPTS = 2
"""How often a task is tried whose worker dies: the first may have died of another task, or for want of memory."""

POLL_SECONDS = 0.2
"""How long the parent sleeps at most before it looks at deadlines again."""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""There are as many workers as cores; more threads in each would only be in the way of the others."""


class StartError(UserError):
    """A worker that ends before its first task, or cannot import what that takes: nothing about the task itself."""

    def __init__(self, message: str, death: Death | None = None) -> None:
        super().__init__(f"a worker process {message}; use --workers 0")
        self.death = death


class Pool:
    """Processes that work for `map`, started when there is work, or before; with `workers=0`, all is done in this one.

    Example:
        >>> with Pool(workers=0) as pool:
        ...     list(pool.map(len, ["one", "three"]))
        [3, 5]
    """

    def __init__(self, workers: int, timeout: float = TIMEOUT) -> None:
        self.workers, self.timeout = workers, timeout
        self._started: list[_Worker] = []
        self._stopping = threading.Event()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.close()

    def start(self, tasks: int, modules: Sequence[str] = ()) -> None:
        """Starts the workers that so many tasks will keep busy; they import these modules before their first task.

        For who has something else to do until then: a start takes seconds, and nobody waits for it here.
        """
        while len(self._started) < min(self.workers, tasks):
            self._started.append(_Worker.start(modules))

    def stop(self) -> None:
        """Ends the `map` that another thread is in; there will be no other."""
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
        """What the function makes of each task, in their order.

        Args:
            function: found by its name in the workers, so it lies in a module; nothing in it may need `__main__`.
            tasks: drawn when there is room.
            size: of a task.
            ahead: what is begun and not yet given out is at most of this size, but for a single batch.
            batch: tasks that a worker takes at a time, within the timeout: many where they are short.
            batches: that are begun and not yet given out, for each worker: with `ahead`, this bounds the memory.
        """
        if self.workers < 1:
            for task in tasks:
                if self._stopping.is_set():
                    return
                yield attempt(function, task)
            return
        work = _Work(iter(tasks), batch, size, batches * self.workers, ahead)
        while not self._stopping.is_set():
            self._hand_out(function, work)
            if work.has_next():
                yield from work.give_out()
            elif work.begun or work.could_begin(1):
                self._collect(work)
            else:
                return

    def _hand_out(self, function: Callable[[Any], Any], work: _Work[Any]) -> None:
        """Tasks to every worker that has none; workers are started as long as there are tasks for them."""
        while True:
            idle = next((worker for worker in self._started if worker.ready and worker.job is None), None)
            starting = sum(not worker.ready for worker in self._started)
            if idle is None:
                # Those that are starting take the next ones: begun tasks that nobody has are for them.
                if len(self._started) < self.workers and work.could_begin(starting + 1):
                    self._started.append(_Worker.start())
                    continue
                return
            job = work.begin()
            if job is None:
                return
            idle.give(job, function, work.tasks_of(job))

    def _collect(self, work: _Work[Any]) -> None:
        """Waits for something to happen: results, deaths, deadlines."""
        by_connection = {worker.connection: worker for worker in self._started}
        for connection in wait(list(by_connection), POLL_SECONDS):
            worker = by_connection[connection]  # type: ignore[index]  # connections, because such were given
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
    """What a worker is at: tasks of a batch, which are all of them, or a single one that is tried again."""

    number: int
    """Of the batch."""
    places: Sequence[int]
    attempt: int


@dataclass
class _Batch(Generic[Task]):
    tasks: list[Task]
    size: int
    results: dict[int, Any] = field(default_factory=dict)


@dataclass
class _Work(Generic[Task]):
    """The tasks of a `map`: which are begun, which are to be tried again, which are done and wait for their turn."""

    tasks: Iterator[Task]
    batch: int
    size_of: Callable[[Task], int]
    most: int
    ahead: int
    begun: dict[int, _Batch[Task]] = field(default_factory=dict)
    open: deque[_Job] = field(default_factory=deque)
    """Begun, but nobody is at them."""
    next_begun: int = 0
    next_out: int = 0
    exhausted: bool = False

    def _draw(self) -> bool:
        """Draws a batch, if there is room and something is left."""
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
        """Whether so many workers would have something to do."""
        while len(self.open) < count and self._draw():
            pass
        return len(self.open) >= count

    def begin(self) -> _Job | None:
        """Something to work at."""
        return self.open.popleft() if self.could_begin(1) else None

    def tasks_of(self, job: _Job) -> list[Task]:
        return [self.begun[job.number].tasks[place] for place in job.places]

    def done(self, job: _Job, results: Iterable[Any]) -> None:
        self.begun[job.number].results.update(zip(job.places, results, strict=True))

    def died(self, job: _Job, death: Death) -> None:
        if job.attempt < ATTEMPTS:
            self.open.extendleft(_Job(job.number, [place], job.attempt + 1) for place in reversed(job.places))
        else:
            detail = f"the process that read it {death} ({ATTEMPTS} attempts)"
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
    """What it is at."""
    patience: float = START_TIMEOUT
    deadline: float = float("inf")

    @classmethod
    def start(cls, modules: Sequence[str] = ()) -> _Worker:
        ours, theirs = socket.socketpair()
        code = f"from normal_guidance.data.worker_process import serve; serve({theirs.fileno()}, {list(modules)!r})"
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # decoders talk, and whatever is wrong is said by the result
                stderr=subprocess.DEVNULL,
            )
        worker = cls(process, Connection(ours.detach()))
        worker.expect(START_TIMEOUT)
        return worker

    def expect(self, seconds: float) -> None:
        """It is to say something within this time."""
        self.patience, self.deadline = seconds, time.monotonic() + seconds

    def give(self, job: _Job, function: Callable[[Any], Any], tasks: list[Any]) -> None:
        self.job = job
        self.expect(START_TIMEOUT)
        with suppress(ConnectionError):  # it is dead, which `receive` will notice
            self.connection.send((function, tasks))

    def receive(self, work: _Work[Any], timeout: float) -> None:
        """Takes one message."""
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
        """How it ended, for it has."""
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
    """The memory that a worker sends after its message; unmapped when the last array in it is gone."""
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
