"""The code of a worker process of `normal_guidance.data.worker_pool`: it receives tasks and sends results or failures.

Arrays return through anonymous memory that the worker fills and the parent maps: it is not copied, not limited by
/dev/shm, and gone when the processes end.  This module imports little, because every worker waits for its imports.
"""

from __future__ import annotations

import importlib
import os
import pickle
import select
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any, NamedTuple, TypeVar

from normal_guidance.data.problems import UnreadableError
from normal_guidance.errors import UserError
from normal_guidance.machine import keep_freed_memory, limit_memory

Task = TypeVar("Task")
Result = TypeVar("Result")


class Death(NamedTuple):
    """The cause of a worker's death."""

    cause: str = ""
    """A signal's name or an exit code; empty if the parent killed the worker."""
    silence: float = 0.0
    """Seconds that the parent waited before it killed the worker."""

    def __str__(self) -> str:
        if not self.cause:
            return f"gave no answer within {self.silence:g} s"
        if not self.cause.startswith("SIG"):
            return f"ended with {self.cause}"
        return f"was killed by {self.cause}" + (" (out of memory?)" if self.cause == "SIGKILL" else "")


@dataclass(frozen=True)
class Failure:
    """The reason for a missing result: a kind of `normal_guidance.data.problems.KINDS` and a detail."""

    kind: str
    detail: str
    death: Death | None = field(default=None, compare=False, repr=False)
    """How its worker died, for custom messages."""


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
    keep_freed_memory()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the workers
    _die_with_the_parent(descriptor)
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


def _die_with_the_parent(descriptor: int) -> None:
    """Ends this process when the parent dies, even while a decoder hangs."""

    def watch() -> None:
        poll = select.poll()
        poll.register(descriptor, 0)  # only the closing of the other end
        poll.poll()
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def _work(connection: Connection) -> None:
    """Runs the tasks of one message."""
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
        with _memory() as file:
            for piece in raw:
                file.write(piece)
            file.flush()
            send_handle(connection, file.fileno(), os.getppid())


def _memory() -> Any:
    """An open file in memory; on systems without such files, a temporary file."""
    if sys.platform == "linux":
        return os.fdopen(os.memfd_create("scan"), "wb")
    return tempfile.TemporaryFile()
