"""Lock a folder for one writing process, and compare its recorded options with the present ones."""

from __future__ import annotations

import fcntl
import json
import os
import socket
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TextIO

from normal_guidance.errors import UserError
from normal_guidance.files import make_folder

LOCK = "lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keep other processes out of a folder, which is made if need be; the lock ends with the process.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder, lock_folder(Path(folder)):
        ...     with lock_folder(Path(folder)):
        ...         pass
        Traceback (most recent call last):
        normal_guidance.errors.UserError: /... is being written by process ... on ...; wait until it ends, or choose
        another folder
    """
    while True:
        make_folder(folder)
        try:
            file = (folder / LOCK).open("a+", encoding="utf-8")
        except FileNotFoundError:
            continue  # another process ended just now and removed the folder
        except OSError as error:
            raise UserError(f"{folder} cannot be written ({error.strerror}); choose another folder") from error
        with file:
            _take(file, folder)
            if _is(folder / LOCK, file):
                yield
                return


def _take(file: TextIO, folder: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(f"process {os.getpid()} on {socket.gethostname()}")
        file.flush()
    except BlockingIOError as error:
        file.seek(0)
        holder = file.read() or "another process"
        raise UserError(
            f"{folder} is being written by {holder}; wait until it ends, or choose another folder"
        ) from error
    except OSError as error:
        raise UserError(f"{folder} cannot be locked ({error.strerror}); choose another folder") from error


def _is(path: Path, file: TextIO) -> bool:
    """Return whether the open file still has this name."""
    try:
        return os.path.samestat(path.stat(), os.fstat(file.fileno()))
    except FileNotFoundError:
        return False


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first difference between the recorded and the present options; None if there is none.

    Example:
        >>> difference({"encoder": {"name": "a"}, "seeds": [1]}, {"encoder": {"name": "b"}, "seeds": [1, 2]})
        "encoder.name was 'a', now it is 'b' (1 more differences)"
    """
    absent = "absent"
    old, new = dict(_leaves(before)), dict(_leaves(json.loads(json.dumps(now))))
    different = [name for name in old | new if old.get(name, absent) != new.get(name, absent)]
    if not different:
        return None
    name = different[0]
    more = f" ({len(different) - 1} more differences)" if len(different) > 1 else ""
    return f"{name} was {_shown(old.get(name, absent))}, now it is {_shown(new.get(name, absent))}{more}"


def _shown(value: Any) -> str:
    return value if value == "absent" else repr(value)


def _leaves(value: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """("configs.0.lr", 0.1) and so on."""
    if isinstance(value, Mapping | list):
        items = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, inner in items:
            yield from _leaves(inner, f"{name}.{key}" if name else str(key))
    else:
        yield name, value
