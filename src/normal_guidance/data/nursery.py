"""The process that worker processes come from: it imports what their tasks take, once, and forks one when asked.

Importing torch takes seconds of a core and hundreds of megabytes; fifteen workers that each do it keep a machine busy
before they read the first scan, and so does one that takes a dead one's place.  Forked workers have it from birth.  The
nursery never runs what it imports, so it has one thread, no OpenMP and no CUDA: what does not survive a fork is not
there.

What it does in there is `normal_guidance.data.serving.raise_workers`.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from normal_guidance.data.serving import GRACE, Death

ONE_THREAD = dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
"""There are as many workers as cores; more threads in each would only be in the way of the others."""


class Nursery:
    """A process that workers are forked from, seen from the parent.

    Args:
        functions: their modules are imported there; one that cannot be is left for the workers to complain about.
    """

    def __init__(self, *functions: Callable[..., Any]) -> None:
        wanted = pickle.dumps(functions)
        ours, theirs = socket.socketpair()
        code = f"from normal_guidance.data.serving import raise_workers; raise_workers({theirs.fileno()})"
        path = os.pathsep.join(folder or os.getcwd() for folder in sys.path)
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-c", code],
                pass_fds=[theirs.fileno()],
                env={**os.environ, **ONE_THREAD, "PYTHONPATH": path},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,  # decoders talk, and whatever is wrong is said by the result
                stderr=subprocess.DEVNULL,
            )
        self._connection = Connection(ours.detach())
        with suppress(ConnectionError):  # it is dead, which the first worker's connection will show
            self._connection.send_bytes(wanted)

    @property
    def alive(self) -> bool:
        """Whether it can be asked for workers."""
        return self._process.poll() is None

    def bear(self) -> Connection:
        """To a new worker, which says "ready" when it is; should there be none, the connection is at its end."""
        ours, theirs = socket.socketpair()
        with theirs, suppress(ConnectionError):
            self._connection.send(None)
            send_handle(self._connection, theirs.fileno(), self._process.pid)
        return Connection(ours.detach())

    def bury(self, number: int) -> Death:
        """How the worker of this process number ended; one that does not is killed."""
        try:
            self._connection.send(number)
            return _death(self._connection.recv())
        except (EOFError, ConnectionError):  # somebody killed the nursery: the worker is no longer its child
            with suppress(ProcessLookupError):
                os.kill(number, signal.SIGKILL)
            return Death("an unknown cause")

    def end(self) -> Death:
        """How the nursery itself ended; if it has not within a moment, it is killed."""
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(GRACE)
        self.close()
        return _death(self._process.returncode)

    def close(self) -> None:
        """Ends it; workers that are left end by themselves when their connections do."""
        self._process.kill()
        self._process.wait()
        self._connection.close()


def _death(code: int) -> Death:
    with suppress(ValueError):  # not every signal has a name
        return Death(signal.Signals(-code).name)
    return Death(f"exit code {code}")
