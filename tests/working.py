"""Functions that worker processes run in tests; workers import them by name, so they need a module."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from normal_guidance.base.errors import UnreadableError, UserError

HANGS = 300
"""Seconds after which something hangs, on however slow a machine."""


def wait_until(true: Callable[[], Any], what: str = "") -> Any:
    """Wait until something is true, which other processes or threads bring about, and return it."""
    end = time.monotonic() + HANGS
    while not (found := true()):
        assert time.monotonic() < end, f"still waiting: {what or true}"
        time.sleep(0.02)
    return found


def work(task: tuple[str, object]) -> object:
    """Does what the task says, for instance ("exit", 3)."""
    name, value = task
    return globals()[name](value)


def square(value: int) -> int:
    return value * value


def array(shape: tuple[int, ...]) -> tuple[np.ndarray, str]:
    return np.arange(np.prod(shape), dtype=np.float32).reshape(shape), "note"


def exit(code: int) -> None:
    os._exit(code)


def kill(name: str) -> None:
    os.kill(os.getpid(), getattr(signal, name))


def hang(seconds: float) -> None:
    time.sleep(seconds)


def allocate(size: int) -> int:
    return len(bytearray(size))


def die_once(path: str) -> str:
    """Dies at the first attempt, as if out of memory; the second attempt succeeds."""
    if not Path(path).exists():
        Path(path).touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return "second"


def unreadable(detail: str) -> None:
    raise UnreadableError("no_image", detail)


def fail(message: str) -> None:
    raise KeyError(message)


def mistake(message: str) -> None:
    raise UserError(message)


def threads(_: None) -> str | None:
    return os.environ.get("OMP_NUM_THREADS")


def talk(text: str) -> int:
    print(text)
    return os.getpid()


def hang_and_tell(path: str) -> None:
    Path(path).write_text(str(os.getpid()))
    time.sleep(600)


def modules(_: None) -> list[str]:
    return sorted(sys.modules)
