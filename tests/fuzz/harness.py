"""Runs one case in a worker process, and what every case is held to.

Errors must say something; nothing is written elsewhere, no secret read, not too much memory used.  An audit hook sees
every file that Python opens, makes, moves or removes.  The tree of the case's folder is compared as well, because the
hook does not see native code.
"""

from __future__ import annotations

import ctypes
import faulthandler
import os
import resource
import shutil
import sys
import traceback
import warnings
from bisect import bisect
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from importlib import import_module
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import TYPE_CHECKING, Any, NamedTuple

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.index.problems import KINDS as PROBLEM_KINDS

if TYPE_CHECKING:
    from samples import Samples

MEMORY = 2 * 2**30
"""Most bytes of real memory that a case may use."""

SECRET = b"nobody may read this"
"""Content of the file outside the root."""

_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND
_PATHS = {
    **{"os.mkdir": ((0, 2),), "os.remove": ((0, 1),), "os.rmdir": ((0, 1),), "os.chmod": ((0, 2),)},
    **{"os.chown": ((0, 3),), "os.utime": ((0, 3),), "os.truncate": ((0, None),), "os.symlink": ((1, 2),)},
    **{"os.rename": ((0, 2), (1, 3)), "os.link": ((0, 2), (1, 3))},
}
"""Events and which of their arguments are a path and the open folder that it is relative to."""

_NEVER = ("os.system", "os.exec", "os.posix_spawn", "socket.connect")


class Finding(Exception):  # noqa: N818  # what fuzzing looks for
    """A case that did something forbidden."""

    def __init__(self, kind: str, detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


class Probe:
    """The folder of one case, and the checks on it.

        folder/in        the files that the case reads
        folder/out       the only place that it may write to
        folder/outside   files that it must not read

    Args:
        folder: empty.
        tell: receives whether native decoders follow, whose death is not a finding.
    """

    def __init__(self, folder: Path, tell: Callable[[bool], object]) -> None:
        self.folder, self.tell = folder, tell
        self.root, self.out, self.outside = folder / "in", folder / "out", folder / "outside"
        for path in (self.root, self.out, self.outside):
            path.mkdir()
        (self.outside / "secret.dcm").write_bytes(SECRET)

    @contextmanager
    def watched(self) -> Iterator[None]:
        """Checks everything that is done within the block; raises a Finding at its end."""
        before = tree(self.folder, self.out)
        _seen.clear()
        _reset_memory()
        _eye.append(self)
        try:
            yield
        finally:
            _eye.clear()
        if _seen:
            raise Finding("outside", "; ".join(sorted(set(_seen))))
        if peak_memory() > MEMORY:
            raise Finding("memory", f"{peak_memory() / 2**30:.1f} GiB")
        after = tree(self.folder, self.out)
        if after != before:
            changed = sorted(name for name in before.keys() | after.keys() if before.get(name) != after.get(name))
            raise Finding("outside", f"changed {', '.join(changed)}")


def tree(folder: Path, without: Path) -> dict[str, Any]:
    """Names, kinds, sizes and times of everything in a folder except one of its folders."""
    found = {}
    for base, folders, files in os.walk(folder):
        folders[:] = [name for name in folders if os.path.join(base, name) != str(without)]
        for name in (*folders, *files):
            path = os.path.join(base, name)
            state = os.lstat(path)
            found[path] = (state.st_mode, state.st_size if name in files else 0, state.st_mtime_ns)
    return found


_eye: list[Probe] = []
_seen: list[str] = []


def install() -> None:
    """Adds the audit hook for the rest of the process: it cannot be removed."""
    sys.addaudithook(_hear)


def _hear(event: str, arguments: tuple[Any, ...]) -> None:
    if not _eye:
        return
    probe = _eye[0]
    if event == "open":
        path, _, flags = arguments
        if isinstance(path, str | bytes | os.PathLike):
            _judge(probe, event, path, writes=bool((flags or 0) & _WRITING))
    elif event in _PATHS:
        for place, folder in _PATHS[event]:
            path, base = arguments[place], -1 if folder is None else arguments[folder]
            if isinstance(path, str | bytes | os.PathLike):
                name = os.fsdecode(path)
                _judge(probe, event, f"/proc/self/fd/{base}/{name}" if base >= 0 else name, writes=True)
    elif event in _NEVER or (event == "subprocess.Popen" and not _is_worker(arguments[1])):
        _seen.append(event)


def _is_worker(words: list[str]) -> bool:
    """Whether the started program is a worker process of the package."""
    return words[:3] == [sys.executable, "-P", "-c"] and "normal_guidance.base.workers" in words[3]


def _judge(probe: Probe, event: str, path: str | bytes | os.PathLike[str], *, writes: bool) -> None:
    name = os.fsdecode(path)
    if name.startswith("/dev/"):
        return
    place = Path(os.path.realpath(name))
    if writes and not place.is_relative_to(probe.out):
        _seen.append(f"{event} writes {name}")
    elif place.is_relative_to(probe.outside):
        _seen.append(f"{event} reads {name}")


def _reset_memory() -> None:
    """Resets Linux's record of the peak memory, after memory that was freed is given back: workers keep it."""
    ctypes.CDLL(None).malloc_trim(0)
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")


def peak_memory() -> int:
    with open("/proc/self/status") as file:
        line = next(line for line in file if line.startswith("VmHWM"))
    return int(line.split()[1]) * 1024


LONGEST_MESSAGE = 3000
"""Longest message on the terminal; problems.csv cuts its own."""


def expect(condition: object, detail: str) -> None:
    if not condition:
        raise Finding("wrong", detail)


def attempt(read: Callable[[], object]) -> str:
    """The outcome of reading; errors must be described in words."""
    try:
        read()
        return "read"
    except UnreadableError as error:
        expect(error.kind in PROBLEM_KINDS and error.detail.strip(), f"an error that says nothing: {error!r}")
        _check_memory(str(error))
        return error.kind
    except UserError as error:
        text = str(error)
        expect(len(text) < LONGEST_MESSAGE, f"a message of {len(text)} characters: {text[:200]}")
        _check_memory(text)
        return "user error"


def _check_memory(text: str) -> None:
    if "MemoryError" in text or "bad_alloc" in text:
        raise Finding("memory", text)


Case = Callable[[Random, "Samples", Probe], str]
"""Runs a case, returns its outcome in a word or two, or raises an error that a user would see as a traceback."""

ADDRESS_SPACE = 8 * 2**30
"""Most bytes that a worker may allocate, so that the machine survives the findings."""

GOLDEN = (5**0.5 - 1) / 2


class Setup(NamedTuple):
    """What the cases of a run share."""

    module: Path
    """Defines `KINDS`."""
    folder: Path
    """Holds samples and cases."""
    seed: int
    keep: bool
    """Whether to keep the cases' folders."""

    def record(self, number: int) -> Path:
        """What is known of a case whose worker died: its kind, whether native decoders were at work, where."""
        return self.folder / f"{number}.record"


class Outcome(NamedTuple):
    """How a case ended; a finding's outcome begins with FINDING."""

    kind: str
    outcome: str
    detail: str = ""
    trace: str = ""


@cache
def prepare(setup: Setup) -> dict[str, tuple[int, Case]]:
    """Prepares this process, once, and returns the kinds of cases."""
    sys.dont_write_bytecode = True
    sys.path.insert(0, str(setup.module.parent))
    kinds: dict[str, tuple[int, Case]] = import_module(setup.module.stem).KINDS
    os.chdir(setup.folder / "cases")
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    install()
    warnings.simplefilter("error")  # a warning is a line that a user would have to understand
    return kinds


def choose(weights: dict[str, int], number: int) -> str:
    """The kind of a case: multiples of the golden ratio spread evenly, so that few cases already have all kinds."""
    place = number * GOLDEN % 1 * sum(weights.values())
    return list(weights)[bisect(list(accumulate(weights.values())), place)]


class Runner:
    """Runs cases by their numbers; a worker that receives it first imports what they need, before its time counts."""

    def __init__(self, setup: Setup) -> None:
        self.setup = setup

    def __setstate__(self, state: dict[str, Setup]) -> None:
        self.setup = state["setup"]
        prepare(self.setup)

    def __call__(self, number: int) -> Outcome:
        return run_case(self.setup, number)


def run_case(setup: Setup, number: int) -> Outcome:
    from samples import Samples

    kinds = prepare(setup)
    kind = choose({name: weight for name, (weight, _) in kinds.items()}, number)
    folder = setup.folder / "cases" / str(number)
    with setup.record(number).open("wb", buffering=0) as record:
        record.write(f"{kind}\n".encode())
        faulthandler.enable(record)
        folder.mkdir()
        try:
            probe = Probe(folder, lambda native: record.write(b"native\n" if native else b"python\n"))
            outcome = kinds[kind][1](Random(f"{setup.seed}/{number}"), Samples(setup.folder / "samples"), probe)
            return Outcome(kind, outcome)
        except Finding as error:
            return Outcome(kind, f"FINDING: {error.kind}", error.detail, traceback.format_exc())
        except BaseException as error:
            detail = f"{type(error).__name__}: {error}"[:500]
            return Outcome(kind, "FINDING: traceback", detail, traceback.format_exc())
        finally:
            faulthandler.disable()
            if not setup.keep:
                shutil.rmtree(folder)
