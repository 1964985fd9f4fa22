"""Functions that worker processes run in tests; workers import them by name, so they need a module."""

import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from normal_guidance.base.errors import UnreadableError, UserError


def wait_until(condition: Callable[[], object], seconds: float = 20.0) -> None:
    """Waits for a condition that other processes or threads bring about."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "it never came true"
        time.sleep(0.02)


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
