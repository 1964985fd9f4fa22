"""A pool of worker processes that survives crashes: parsers and decoders of medical images crash or hang on some files.

Every worker has its own socket, so the parent knows the tasks of each.  If a worker dies (a segmentation fault, out of
memory) or is silent for too long, its tasks are tried once more, one by one; a task that ends its worker again becomes
a `Failure`.  All other tasks get their results.  Workers are started as separate programs: forks break CUDA and OpenMP,
and multiprocessing would run the user's main script again.

Arrays return through anonymous memory that the worker fills and the parent maps: it is not copied, not limited by
/dev/shm, and gone when the processes end.  This module imports little, because every worker waits for its imports.

Foreign files, too, are guarded here: what a file declares is bounded before anything is allocated, since some kilobytes
may declare gigabytes, by a header that lies or by zeros that are packed a thousandfold.  Errors are ValueErrors; the
caller adds the name of the file.
"""

from __future__ import annotations

import atexit
import importlib
import io
import math
import mmap
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import zipfile
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache
from itertools import accumulate, islice
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle, send_handle
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, Generic, NamedTuple, TypeVar

import numpy as np

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.base.system import keep_freed_memory, limit_memory, machine_memory

Task = TypeVar("Task")
Result = TypeVar("Result")


class Death(NamedTuple):
    """The cause of a worker's death."""

    cause: str = ""  # a signal's name or an exit code; empty if the parent killed the worker
    silence: float = 0.0  # seconds that the parent waited before it killed the worker

    def __str__(self) -> str:
        if not self.cause:
            return f"gave no answer within {self.silence:g} s"
        if not self.cause.startswith("SIG"):
            return f"ended with {self.cause}"
        return f"was killed by {self.cause}" + (" (out of memory?)" if self.cause == "SIGKILL" else "")


@dataclass(frozen=True)
class Failure:
    """The reason for a missing result: a kind of `normal_guidance.scans.index.problems.KINDS` and a detail."""

    kind: str
    detail: str
    death: Death | None = field(default=None, compare=False, repr=False)  # how its worker died, for custom messages


def attempt(function: Callable[[Task], Result], task: Task) -> Result | Failure:
    """The function's result, or a `Failure`; a UserError concerns every task and is raised."""
    try:
        return function(task)
    except UserError:
        raise
    except UnreadableError as error:
        return Failure(error.kind, error.detail)
    except Exception as error:
        return Failure("failed", f"{type(error).__name__}: {error}")


def serve(descriptor: int, modules: Sequence[str] = (), memory: int | None = None) -> None:
    """Serves tasks until the parent is gone; imports these modules before the first task, then limits its memory."""

    def die_with_the_parent() -> None:  # even while a decoder hangs
        poll = select.poll()
        poll.register(descriptor, 0)  # only the closing of the other end
        poll.poll()
        os._exit(1)

    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the workers
    threading.Thread(target=die_with_the_parent, daemon=True).start()
    connection = Connection(descriptor)
    for module in modules:
        with suppress(Exception):  # the first task that needs it will report it
            importlib.import_module(module)
    if memory is not None:
        limit_memory(memory)
    connection.send(("ready", None, []))
    with suppress(EOFError, ConnectionError):
        while True:
            _work(connection)


def _work(connection: Connection) -> None:
    try:
        function, tasks = connection.recv()
    except (EOFError, OSError):
        raise EOFError from None
    except Exception as error:  # a module that cannot be imported here
        connection.send(("broken", f"{type(error).__name__}: {error}", []))
        return
    connection.send(("begun", None, []))  # the imports may have taken longer than the task will
    try:
        results = [attempt(function, task) for task in tasks]
    except UserError as error:
        connection.send(("user error", str(error), []))
        return
    buffers: list[pickle.PickleBuffer] = []
    content = pickle.dumps(results, protocol=5, buffer_callback=buffers.append)
    raw = [buffer.raw() for buffer in buffers]
    sizes = [piece.nbytes for piece in raw]
    connection.send(("results", content, sizes))
    if sum(sizes):
        with os.fdopen(os.memfd_create("scan"), "wb") if sys.platform == "linux" else TemporaryFile() as file:
            for piece in raw:
                file.write(piece)
            file.flush()
            send_handle(connection, file.fileno(), os.getppid())


TIMEOUT = 600.0  # seconds after which a silent worker counts as hanging: far more than the longest scans take
START_TIMEOUT = 300.0  # seconds for a worker to start and to import the modules of a task, maybe from a slow disk
ATTEMPTS = 2  # at a task whose worker dies: the first may have died of another task, or of too little memory
POLL_SECONDS = 0.2  # longest sleep between two checks of the deadlines, and of whether to stop

# Environment of a worker: there are as many workers as cores, so more threads would only slow each other down.
ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")


def in_background(items: Iterable[Result], depth: int) -> Generator[Result, None, None]:
    """The same items, which a thread makes up to `depth` ahead; its error is raised here."""
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

    # A daemon: a second Ctrl-C ends the program while the item in progress is waited for below.
    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while (result := made.get())[0]:
            yield result[1]
    finally:
        stopping.set()
        thread.join()
    if result[1] is not None:
        raise result[1]


class StartError(UserError):
    """A worker that ends before its first task or cannot import its modules; the task itself is not at fault."""

    def __init__(self, message: str, death: Death | None = None) -> None:
        super().__init__(f"a worker process {message}; use --workers 0")
        self.death = death


class Pool:
    """Worker processes for `map`, started when there is work or by `start`; with none, tasks run in this process."""

    # `memory`: bytes that a worker may take beside its imports, None for no limit.

    def __init__(
        self, workers: int, timeout: float = TIMEOUT, *, attempts: int | None = None, memory: int | None = None
    ) -> None:
        self.workers, self.timeout = workers, timeout
        self.attempts, self.memory = attempts or ATTEMPTS, memory
        self._started: list[_Worker] = []
        self._stopping = threading.Event()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self, tasks: int, modules: Sequence[str] = ()) -> None:
        """Starts the workers for this many tasks without waiting; they import the modules before their first task."""
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
        """The function's result for each task, in their order; the function lies in a module other than `__main__`."""
        # `ahead`: largest total `size` of the batches that are begun and not yet returned (one is always allowed);
        # `batch`: tasks that a worker finishes within the timeout; `batches`: batches per worker that are begun and not
        # yet returned.
        if self.workers < 1:
            for task in tasks:
                if self._stopping.is_set():
                    return
                yield attempt(function, task)
            return
        work = _Work(iter(tasks), batch, size, batches * self.workers, ahead, self.attempts)
        while not self._stopping.is_set():
            self._hand_out(function, work)
            if results := work.next_results():
                yield from results
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
            idle.give(job, function, [work.begun[job.number].tasks[place] for place in job.places])

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

    number: int  # the number of the batch
    places: Sequence[int]
    attempt: int


@dataclass
class _TaskBatch(Generic[Task]):
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
    begun: dict[int, _TaskBatch[Task]] = field(default_factory=dict)
    open: deque[_Job] = field(default_factory=deque)  # begun, but without a worker
    next_begun: int = 0
    next_out: int = 0

    def _draw(self) -> bool:
        """Reads a batch of tasks, if there is room and tasks are left."""
        room = len(self.begun) < self.most and sum(batch.size for batch in self.begun.values()) < self.ahead
        tasks = list(islice(self.tasks, self.batch)) if room or not self.begun else []
        if not tasks:
            return False
        self.begun[self.next_begun] = _TaskBatch(tasks, sum(map(self.size_of, tasks)))
        self.open.append(_Job(self.next_begun, range(len(tasks)), attempt=1))
        self.next_begun += 1
        return True

    def could_begin(self, count: int) -> bool:
        """Whether there is work for this many workers."""
        while len(self.open) < count and self._draw():
            pass
        return len(self.open) >= count

    def begin(self) -> _Job | None:
        return self.open.popleft() if self.could_begin(1) else None

    def done(self, job: _Job, results: Iterable[Any]) -> None:
        self.begun[job.number].results.update(zip(job.places, results, strict=True))

    def died(self, job: _Job, death: Death) -> None:
        if job.attempt < self.attempts:
            self.open.extendleft(_Job(job.number, [place], job.attempt + 1) for place in reversed(job.places))
        else:
            tries = f" ({self.attempts} attempts)" if self.attempts > 1 else ""
            detail = f"the process that read it {death}{tries}"
            self.done(job, [Failure("failed", detail, death) for _ in job.places])

    def next_results(self) -> list[Any]:
        """The results of the next batch; none until all of them are there."""
        batch = self.begun.get(self.next_out)
        if batch is None or len(batch.results) < len(batch.tasks):
            return []
        del self.begun[self.next_out]
        self.next_out += 1
        return [batch.results[place] for place in range(len(batch.tasks))]


@dataclass(eq=False)
class _Worker:
    """A process, seen from the parent."""

    process: subprocess.Popen[bytes]
    connection: Connection
    ready: bool = False
    job: _Job | None = None  # its current work
    patience: float = START_TIMEOUT
    deadline: float = float("inf")

    @classmethod
    def start(cls, modules: Sequence[str], memory: int | None) -> _Worker:
        ours, theirs = socket.socketpair()
        code = f"from {__name__} import serve; serve({theirs.fileno()}, {list(modules)!r}, {memory})"
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
    return [whole[end - size : end] for size, end in zip(sizes, accumulate(sizes), strict=True)]


FREE_BYTES = 2**28  # any file may unpack to so much, however small it is: masks of zeros are packed a thousandfold
RATIO = 100  # most bytes that a stored byte may unpack to beyond that: features reach 2 to 10, padded ones up to 50
METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)  # with other methods, zipfile unpacks without limit

PATIENCE = 15.0  # seconds for an answer of `ask`: a question reads some 64 MiB, which slow disks deliver in a few
ASK_BYTES = 2**31  # memory that the process behind `ask` may take


def excess(declared: int, stored: int) -> str:
    """Why a declared size is too much for the stored bytes, or for the free memory; empty if it is not."""
    most = max(FREE_BYTES, RATIO * stored)
    if declared > most:
        return f"declares {declared:,} bytes, more than the {most:,} that {stored:,} stored bytes may unpack to"
    available = machine_memory()[1] if declared > FREE_BYTES else None
    if available is not None and declared > available:
        return f"needs {declared:,} bytes of memory, of which {available:,} are free"
    return ""


def member_problem(info: zipfile.ZipInfo) -> str:
    """Why a member is not unpacked; empty if it may be.  zipfile itself unpacks no more than the declared size."""
    if not info.filename:
        return "the member has no name"
    if info.flag_bits & 0x1:
        return "the member is encrypted"
    if info.compress_type not in METHODS:
        return f"the member is packed by method {info.compress_type}; pack it again with deflate"
    problem = excess(info.file_size, info.compress_size)
    return f"the member {problem}" if problem else ""


def read_array(file: io.BufferedIOBase | IO[bytes], size: int, stored: int) -> np.ndarray:
    """The array of an open npy file of `size` bytes, which takes `stored` bytes on the disk."""
    check_array(file, size, stored)
    file.seek(0)
    array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array


def check_array(file: io.BufferedIOBase | IO[bytes], size: int, stored: int) -> None:
    """Refuses an npy file whose header declares more or fewer bytes than follow, or Python objects."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"npy version {version[0]}.{version[1]} is not read; write it with np.save")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError(
            "Object arrays could run code; write numbers and text instead, such as array.astype(str); for scans of "
            "different lengths write one array for each scan, or the slices of all scans and lengths"
        )
    if any(length < 0 for length in shape):
        raise ValueError(f"the header declares the shape {shape}")
    declared, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if declared != there:
        raise ValueError(f"the header declares {declared:,} bytes ({dtype}, shape {shape}), but {there:,} follow")
    problem = excess(declared, stored)
    if problem:
        raise ValueError(f"it {problem}")


def parquet_columns(path: Path, *, scan: bool = False) -> list[str]:
    """The names of a parquet file's columns; one that declares far more values than it has bytes is refused."""
    # Pyarrow aborts on some damaged files, so `ask` for the columns of a foreign one.  With `scan`, all values are read
    # first, without keeping any: where damage would make pyarrow abort, a scan ends with an error.
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = path.stat().st_size
    with pa.OSFile(os.fspath(path)) as file, pq.ParquetFile(file) as table:
        about = table.metadata
        problem = excess(8 * about.num_rows * about.num_columns, size)
        if scan and not problem:  # before the groups' own numbers are read
            table.scan_contents()
        groups = (about.row_group(number) for number in range(about.num_row_groups))
        values = (group.column(number).num_values for group in groups for number in range(group.num_columns))
        if problem := problem or excess(8 * sum(values), size):
            raise ValueError(f"it {problem}")
        return list(about.schema.to_arrow_schema().names)


def ask(function: Callable[[Task], Result], task: Task) -> Result:
    """The function's result, from a process with limits of time and memory; its death or error is a ValueError."""
    # The library that reads a file may hang, abort or crash on damage.  The process starts with the first question,
    # imports the function by its name, and ends with this one.
    try:
        [result] = _process(os.getpid()).map(function, [task])
    except StartError as error:
        raise UserError(f"the process that reads foreign files does not start ({error.death}); free memory") from error
    if isinstance(result, Failure):
        raise ValueError(result.detail.removeprefix("ValueError: "))
    return result


@cache
def _process(parent: int) -> Pool:
    """The pool of one process; a fork has its own."""
    # A file that ended the process once will do so again, so it is tried once.
    pool = Pool(0 if sys.platform == "win32" else 1, PATIENCE, attempts=1, memory=ASK_BYTES)
    atexit.register(pool.close)
    return pool
