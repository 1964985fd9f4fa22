"""Worker processes that are allowed to die: decoders of medical images crash and hang, and cost one scan each.

Every worker has a socket of its own, so the parent knows which task each one is at: if a worker dies (a segmentation
fault, the kernel out of memory) or says nothing for too long, its task is tried once more in a fresh worker, and then
is a `Failure`.  Nothing is lost but that.  Workers are started as programs of their own, not forked (CUDA and OpenMP
do not survive it) and not by multiprocessing, which would run the user's main script again.

Arrays come back through anonymous memory that the worker fills and the parent maps: not copied, not bound by
/dev/shm, and gone with the processes, however they end.
"""

from __future__ import annotations

import mmap
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from types import TracebackType
from typing import Any, Generic, NamedTuple, TypeVar

from normal_guidance.data.problems import UnreadableError
from normal_guidance.errors import UserError
from normal_guidance.memory import keep_freed_memory

Task = TypeVar("Task")
Result = TypeVar("Result")

TIMEOUT = 600.0
"""Seconds after which a worker is taken to hang: the longest scans take one, compressed, on a slow disk."""

ATTEMPTS = 2
"""How often a task is tried whose worker dies: the first may have died of something else, such as its memory."""

POLL_SECONDS = 0.2
"""How long the parent sleeps at most before it looks at deadlines again."""

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""There are as many workers as cores; more threads in each would only be in the way of the others."""


class Failure(NamedTuple):
    """In place of a result: why there is none, as a kind of `normal_guidance.data.problems.KINDS` and a detail."""

    kind: str
    detail: str


def attempt(function: Callable[[Task], Result], task: Task) -> Result | Failure:
    """The function's result, or why there is none; the user's mistakes, which concern every task, stay errors.

    Example:
        >>> attempt(lambda number: 1 / number, 0)
        Failure(kind='failed', detail='ZeroDivisionError: division by zero')
    """
    try:
        return function(task)
    except UserError:
        raise
    except UnreadableError as error:
        return Failure(error.kind, error.detail)
    except Exception as error:
        return Failure("failed", f"{type(error).__name__}: {error}")


# ----------------------------------------------------------------------------------------------------
# In the parent
# ----------------------------------------------------------------------------------------------------


class Pool:
    """Processes that work for `map`, started when there is work; with `workers=0`, everything runs in this one.

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
    ) -> Iterator[Result | Failure]:
        """What the function makes of each task, in their order.

        Args:
            function: found by its name in the workers, so it lies in a module; nothing in it may need `__main__`.
            tasks: drawn when there is room.
            size: of a task.
            ahead: tasks that are begun and not yet given out are at most two for each worker, and together at most
                of this size, but for a single one: that bounds the memory.
        """
        if not self.workers:
            for task in tasks:
                if self._stopping.is_set():
                    return
                yield attempt(function, task)
            return
        work = _Work(iter(tasks), size, 2 * self.workers, ahead)
        while not self._stopping.is_set():
            self._hand_out(function, work)
            if work.has_next():
                yield work.give_out()
            elif work.begun or work.could_begin(1):
                self._collect(work)
            else:
                return

    def _hand_out(self, function: Callable[[Any], Any], work: _Work[Any]) -> None:
        """A task to every worker that has none; workers are started as long as there are tasks for them."""
        while True:
            idle = next((worker for worker in self._started if worker.ready and worker.number is None), None)
            starting = sum(not worker.ready for worker in self._started)
            if idle is None:
                # Those that are starting take the next ones: begun tasks that nobody has are for them.
                if len(self._started) < self.workers and work.could_begin(starting + 1):
                    self._started.append(_Worker.start())
                    continue
                return
            number = work.begin()
            if number is None:
                return
            idle.give(number, function, work.begun[number].task)

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
                self._bury(worker, work, f"gave no answer within {self.timeout:g} s")

    def _bury(self, worker: _Worker, work: _Work[Any], how: str) -> None:
        self._started.remove(worker)
        if worker.number is None and not worker.ready:
            raise RuntimeError(f"a worker process {how} before its first task")
        if worker.number is not None:
            work.died(worker.number, f"the process that read it {how}")


@dataclass
class _Begun(Generic[Task]):
    task: Task
    size: int
    attempts: int = 0
    result: Any = None
    done: bool = False


@dataclass
class _Work(Generic[Task]):
    """The tasks of a `map`: which are begun, which are to be tried again, which are done and wait for their turn."""

    tasks: Iterator[Task]
    size_of: Callable[[Task], int]
    most: int
    ahead: int
    begun: dict[int, _Begun[Task]] = field(default_factory=dict)
    open: deque[int] = field(default_factory=deque)
    """Begun, but nobody is at them."""
    next_begun: int = 0
    next_out: int = 0
    exhausted: bool = False

    def _draw(self) -> bool:
        """Draws a task, if there is room and one is left."""
        room = len(self.begun) < self.most and sum(one.size for one in self.begun.values()) < self.ahead
        if self.exhausted or not (room or not self.begun):
            return False
        try:
            task = next(self.tasks)
        except StopIteration:
            self.exhausted = True
            return False
        self.begun[self.next_begun] = _Begun(task, self.size_of(task))
        self.open.append(self.next_begun)
        self.next_begun += 1
        return True

    def could_begin(self, count: int) -> bool:
        """Whether so many workers would have something to do."""
        while len(self.open) < count and self._draw():
            pass
        return len(self.open) >= count

    def begin(self) -> int | None:
        """The number of a task to work at."""
        return self.open.popleft() if self.could_begin(1) else None

    def done(self, number: int, result: Any) -> None:
        self.begun[number].result, self.begun[number].done = result, True

    def died(self, number: int, how: str) -> None:
        one = self.begun[number]
        one.attempts += 1
        if one.attempts < ATTEMPTS:
            self.open.appendleft(number)
        else:
            self.done(number, Failure("failed", f"{how} ({ATTEMPTS} attempts)"))

    def has_next(self) -> bool:
        return self.next_out in self.begun and self.begun[self.next_out].done

    def give_out(self) -> Any:
        self.next_out += 1
        return self.begun.pop(self.next_out - 1).result


@dataclass(eq=False)
class _Worker:
    """A process, seen from the parent."""

    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    number: int | None = None
    """Of the task that it is at."""
    deadline: float = float("inf")

    @classmethod
    def start(cls) -> _Worker:
        ours, theirs = socket.socketpair()
        code = f"from normal_guidance.features.workers import serve; serve({theirs.fileno()})"
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
        return cls(process, Connection(ours.detach()))

    def give(self, number: int, function: Callable[[Any], Any], task: Any) -> None:
        self.number = number
        with suppress(ConnectionError):  # it is dead, which `receive` will notice
            self.connection.send((function, task))

    def receive(self, work: _Work[Any], timeout: float) -> None:
        """Takes one message."""
        kind, content, sizes = self.connection.recv()
        if kind == "ready":
            self.ready = True
            return
        if kind == "begun":
            self.deadline = time.monotonic() + timeout
            return
        if kind == "user error":
            raise UserError(content)
        if kind == "broken":
            raise RuntimeError(f"a worker process cannot run its tasks: {content}")
        result = pickle.loads(content, buffers=_map_buffers(self.connection, sizes))
        assert self.number is not None, "a result of no task"
        work.done(self.number, result)
        self.number, self.deadline = None, float("inf")

    def end(self) -> str:
        """How it ended, for it has."""
        with suppress(subprocess.TimeoutExpired):
            self.process.wait(POLL_SECONDS)
        self.kill()
        code = self.process.returncode
        if code >= 0:
            return f"ended with exit code {code}"
        return f"was killed by {signal.Signals(-code).name}" + (" (out of memory?)" if -code == signal.SIGKILL else "")

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


def in_background(items: Iterable[Result], depth: int) -> Generator[Result, None, None]:
    """The same items, made by a thread ahead of their use, at most `depth` of them.

    Example:
        >>> list(in_background(iter([1, 2, 3]), depth=1))
        [1, 2, 3]
    """
    made: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stopping = threading.Event()

    def put(good: bool, item: Any) -> None:
        while not stopping.is_set():
            with suppress(queue.Full):
                made.put((good, item), timeout=POLL_SECONDS)
                return

    def make() -> None:
        try:
            for item in items:
                put(True, item)
                if stopping.is_set():
                    return
            put(False, None)
        except BaseException as error:
            put(False, error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            good, item = made.get()
            if not good:
                break
            yield item
    finally:
        stopping.set()
        thread.join()
    if item is not None:
        raise item


# ----------------------------------------------------------------------------------------------------
# In the worker
# ----------------------------------------------------------------------------------------------------


def serve(descriptor: int) -> None:
    """What a worker process does until the parent is gone."""
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C goes to all processes; the parent ends the others
    _die_with_the_parent(descriptor)
    connection = Connection(descriptor)
    connection.send(("ready", None, []))
    with suppress(EOFError, ConnectionError):
        while True:
            _work(connection)


def _die_with_the_parent(descriptor: int) -> None:
    """The parent may be killed while a decoder hangs here; nobody would ever end this process."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # nothing but the other end's closing
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(connection: Connection) -> None:
    """One task."""
    try:
        function, task = connection.recv()
    except (EOFError, OSError):
        raise EOFError from None
    except Exception as error:  # a module that cannot be imported here
        connection.send(("broken", f"{type(error).__name__}: {error}", []))
        return
    connection.send(("begun", None, []))  # importing what it takes may last longer than the task
    try:
        result = attempt(function, task)
    except UserError as error:
        connection.send(("user error", str(error), []))
        return
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(result, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    sizes = [piece.nbytes for piece in raw]
    connection.send(("result", content, sizes))
    if sum(sizes):
        with _memory() as file:
            for piece in raw:
                file.write(piece)
            file.flush()
            send_handle(connection, file.fileno(), os.getppid())


def _memory() -> Any:
    """An open file that is nowhere but in memory, where the system has such."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("scan"), "wb")
    return tempfile.TemporaryFile()
