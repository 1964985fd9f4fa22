"""Lock a folder for one writing process, and compare its recorded options with the present ones."""

from __future__ import annotations

import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout

from normal_guidance.errors import UserError, shorten
from normal_guidance.files import make_folder, remove_left_drafts

LOCK = "lock"

PATIENCE = 0.1
"""Seconds to try again: the lock file may vanish at this moment, with the folder of a process that ends."""


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made if need be; the lock ends with the process.

    What killed processes had begun to write there is removed.
    """
    path = folder / LOCK
    make_folder(folder)
    holder = _holder(path)  # read before the attempt: filelock before 4 empties the file
    # Not bound to a thread: a generator that holds the lock may end in another one.
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=PATIENCE, poll_interval=PATIENCE / 4)
    except Timeout as error:
        raise UserError(
            f"{folder} is being written by {holder}; wait until it ends, or choose another folder"
        ) from error
    except OSError as error:
        raise UserError(f"{folder} cannot be locked ({error.strerror}); choose another folder") from error
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        remove_left_drafts(folder)
        yield
    finally:
        lock.release()


def _holder(path: Path) -> str:
    """What the lock file says about the process that holds it."""
    try:
        return path.read_text(encoding="utf-8") or "another process"
    except OSError:  # there is none; or, on Windows, it may not be read while it is locked
        return "another process"


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first difference between the recorded and the present options; None if there is none."""
    absent = "absent"
    old, new = dict(_leaves(before)), dict(_leaves(json.loads(json.dumps(now))))
    different = [name for name in old | new if old.get(name, absent) != new.get(name, absent)]
    if not different:
        return None
    name = min(different, key=lambda one: one.endswith(".version"))  # an option tells more than its format's version
    more = f" ({len(different) - 1} more differences)" if len(different) > 1 else ""
    return f"{shorten(name)} was {_shown(old.get(name, absent))}, now it is {_shown(new.get(name, absent))}{more}"


def _shown(value: Any) -> str:
    return value if value == "absent" else shorten(repr(value))


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """("configs.0.lr", 0.1) and so on."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
