"""How a command ends: an exit code and at most one line on stderr; only a bug shows a traceback.

`ENDINGS` is the table of all exit codes; docs/howto/command-line.md prints it.  The codes above 63 are those of
sysexits.h; the codes above 128 are 128 plus a signal's number, as in shells.

SIGTERM and SIGHUP raise KeyboardInterrupt, as Ctrl-C does, so that drafts are deleted and worker processes end.  This
module imports little: `run` handles signals before the commands and their libraries are imported.
"""

from __future__ import annotations

import errno
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple, NoReturn

from normal_guidance import __version__
from normal_guidance.base.errors import FULL, UserError
from normal_guidance.base.system import disk, is_out_of_memory, size_text

if TYPE_CHECKING:
    from sys import UnraisableHookArgs


class Ending(NamedTuple):
    """One way to end."""

    code: int
    when: str  # the row of the documentation
    line: str = ""  # the line on stderr, with {place}, {detail} and {after}; none if empty


DONE = Ending(0, "The command did its work.")
NOT_ALL = Ending(
    1,
    "`encode` or `predict` left out a scan, `predict` a part of its results, or `doctor` found an essential package "
    "missing.",
)
MISTAKE = Ending(2, "A mistake in the command or the data; the line says what to do.", "error: {detail}")
BUG = Ending(
    70,
    "A bug; the line follows a traceback, which has no values of variables.",
    "error: nguide {detail} has a bug; send the traceback to its developers, with the output of nguide doctor; read "
    "both first, they name your files",
)
NO_MEMORY = Ending(
    71,
    "Out of memory, on the machine or on the card.",
    "error: out of memory ({detail}); use fewer --workers, smaller batches, or a machine with more; {after}",
)
GONE = Ending(
    73,
    "The output folder was deleted or renamed while the command was working.",
    "error: {place} is gone: it was deleted or renamed during the work; {after}",
)
NO_SPACE = Ending(
    74,
    "No space left on a disk, a quota is used up, or a file is larger than allowed.",
    "error: {detail} at {place}; free some space, or choose a folder on another disk; {after}",
)
NOT_ALLOWED = Ending(
    77,
    "Permission denied, or a read-only file system.",
    "error: {place}: {detail}; change its permissions, or choose another path; {after}",
)
HUNG_UP = Ending(129, "The terminal was closed (SIGHUP).", "terminal closed; {after}")
INTERRUPTED = Ending(
    130, "Ctrl-C (SIGINT). `view` and `node` end with 0: this is how to stop them.", "interrupted; {after}"
)
NO_READER = Ending(
    141,
    "The reader of standard output is gone, as in `nguide methods | head -1`. Commands without an output folder say "
    "nothing.",
    "error: the reader of standard output is gone; {after}",
)
TERMINATED = Ending(
    143,
    "`kill`, a batch system or a shutdown (SIGTERM). `node` ends with 0: this is how to stop it.",
    "terminated; {after}",
)

ENDINGS = (
    *(DONE, NOT_ALL, MISTAKE, BUG, NO_MEMORY, GONE, NO_SPACE, NOT_ALLOWED),
    *(HUNG_UP, INTERRUPTED, NO_READER, TERMINATED),
)
"""All of them, by code."""

BY_SIGNAL = {"SIGHUP": HUNG_UP, "SIGINT": INTERRUPTED, "SIGTERM": TERMINATED}

RESUMING = ("demo", "encode", "experiment", "fit", "predict", "reproduce", "sweep")  # they go on from what they saved
SECONDS_TO_NOTICE = 0.5  # then an interrupt is repeated: libraries lose one that comes while they start
PATIENCE = 3  # the signal of this number ends the process at once, whatever it is cleaning up

SECONDS_OF_UNWINDING = 10.0
"""An error so soon after a signal is a consequence of it: libraries turn KeyboardInterrupt into errors of their own."""


class Job(NamedTuple):
    """What a command is and where it writes."""

    name: str = ""  # the words that one types: encode, store export
    out: Path | None = None
    dry: bool = False  # whether it only estimates
    begin: float = 0.0

    def after(self) -> str:
        """Say how to go on, or what was written."""
        if self.name in RESUMING and not self.dry:
            return "start the same command again to go on"
        if self.out is not None and _has_files_since(self.out, self.begin):
            return f"{self.out} holds the files that were complete"
        return "nothing was written"


_job: Job | None = None


@contextmanager
def outermost() -> Iterator[bool]:
    """Yield whether no other command is running in this process: `demo` runs others, and ends for all of them."""
    global _job
    if _job is not None:
        yield False
        return
    _job = Job()
    try:
        yield True
    finally:
        _job = None


def begin(name: str, options: Mapping[str, Any]) -> None:
    """Record the command that begins, unless it is a part of another one."""
    global _job
    if _job is not None and not _job.name:
        out = options.get("out")
        _job = Job(name, None if out is None else Path(out).absolute(), bool(options.get("dry_run")), time.time())


def _has_files_since(out: Path, begin: float) -> bool:
    """Whether the output holds a file of this command; drafts do not count, their names begin with a dot."""
    files = [out] if out.is_file() else out.rglob("[!.]*")
    with suppress(OSError):  # it may vanish at any moment
        return any(file.is_file() and file.stat().st_mtime >= begin - 1.0 for file in files)
    return False


def ending_of(error: BaseException) -> Ending | None:
    """Return how a command ends by this error; None for a bug, and for what typer handles itself."""
    if isinstance(error, SystemExit) and isinstance(error.__context__, BrokenPipeError):
        return NO_READER  # rich's Console turns one into the other
    if isinstance(error, SystemExit) or type(error).__module__.startswith(("typer.", "click.")):
        return None
    if isinstance(error, KeyboardInterrupt):
        return BY_SIGNAL.get(_signals.last, INTERRUPTED)
    if time.monotonic() - _signals.at < SECONDS_OF_UNWINDING:
        return BY_SIGNAL[_signals.last]
    if isinstance(error, UserError):
        known = None if error.__cause__ is None else _ending_of_system(error.__cause__)
        return known if known in (NO_SPACE, NOT_ALLOWED, NO_MEMORY) else MISTAKE
    return _ending_of_system(error)


def _ending_of_system(error: BaseException) -> Ending | None:
    """Return how a command ends by an error of the machine."""
    number = error.errno if isinstance(error, OSError) else None
    if number in FULL or os.strerror(errno.ENOSPC) in str(error):
        return NO_SPACE
    if number in (errno.EACCES, errno.EPERM, errno.EROFS):
        return NOT_ALLOWED
    if number == errno.EPIPE:
        return NO_READER
    if number == errno.ENOENT and _is_output(error):
        return GONE
    return NO_MEMORY if number == errno.ENOMEM or is_out_of_memory(error) else None


def _is_output(error: BaseException) -> bool:
    """Whether a missing file is one that the command itself was writing: the output, or a draft or job beside it."""
    out, path = (_job or Job()).out, getattr(error, "filename", None)
    if out is None or not isinstance(path, str | os.PathLike):
        return False
    missing = Path(path).absolute()
    return any(
        file == out or (file.parent == out.parent and file.name.lstrip(".").startswith(f"{out.name}."))
        for file in (missing, *missing.parents)
    )


def line_of(ending: Ending, error: BaseException) -> str:
    """Return the one line about an ending; empty if there is nothing to say."""
    job = _job or Job()
    if ending is NO_READER and job.out is None:
        return ""
    if isinstance(error, UserError) and ending.code < HUNG_UP.code:
        line = f"error: {error}"  # it names object, value and next action
    else:
        line = ending.line.format(place=_place(error, job), detail=_detail(ending, error, job), after=job.after())
    return " ".join(line.split())


def _place(error: BaseException, job: Job) -> str:
    """Return the file that the error names; the output where that is a draft of it, or where the error names none."""
    path = getattr(error, "filename", None)
    if isinstance(path, str | bytes | os.PathLike) and ".partial" not in os.fsdecode(path):
        return os.fsdecode(path)
    return str(job.out or "standard output")


def _detail(ending: Ending, error: BaseException, job: Job) -> str:
    if ending is BUG:
        return __version__
    if ending is NO_SPACE:
        number = getattr(error, "errno", None)
        reason = os.strerror(number if number in FULL else errno.ENOSPC).lower()
        if job.out is None:
            return reason
        return f"{reason} ({size_text(disk(job.out)[1])} free now)"
    if ending is NOT_ALLOWED:
        return str(getattr(error, "strerror", "") or "permission denied").lower()
    said = str(error).strip().partition("\n")[0]
    return f"{said[:200]}..." if len(said) > 200 else said or type(error).__name__


class _Signals:
    """The signals that asked the command to end."""

    last = ""
    at = float("-inf")
    count = 0  # those of the user, who may lose patience
    is_repeated = False  # whether the next one comes from `_repeat`
    repeater: threading.Thread | None = None
    ended = threading.Event()  # set when the command has ended, by an interrupt or otherwise


_signals = _Signals()


def watch_signals() -> None:
    """Let SIGTERM and SIGHUP unwind like Ctrl-C; a signal that the parent ignores (nohup) stays ignored."""
    _signals.ended.clear()
    for name in BY_SIGNAL:
        number = getattr(signal, name, None)  # Windows has no SIGHUP
        if number is not None and signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _on_signal)
    sys.unraisablehook = _on_unraisable


def _on_signal(number: int, frame: FrameType | None) -> None:
    is_users, _signals.is_repeated = not _signals.is_repeated, False
    _signals.count += is_users
    if is_users and _signals.count >= PATIENCE:
        signal.signal(number, signal.SIG_DFL)
        signal.raise_signal(number)
    _signals.last, _signals.at = signal.Signals(number).name, time.monotonic()
    if is_users and _signals.count == 1:
        _signals.repeater = threading.Thread(target=_repeat, args=(number,), daemon=True)
        _signals.repeater.start()
    _interrupt()


def _interrupt() -> None:
    """Raise KeyboardInterrupt, unless the command has ended or is cleaning up after one already."""
    if _signals.ended.is_set():
        return
    handled = sys.exc_info()[1]
    while handled is not None:
        if isinstance(handled, KeyboardInterrupt):
            return
        handled = handled.__context__
    raise KeyboardInterrupt


def _repeat(number: int) -> None:
    """Send the signal again until the command has ended, for when a library lost it."""
    while not _signals.ended.wait(SECONDS_TO_NOTICE):
        _signals.is_repeated = True
        if hasattr(signal, "pthread_kill"):
            signal.pthread_kill(threading.main_thread().ident or 0, number)
        else:
            signal.raise_signal(number)


@contextmanager
def until(*names: str) -> Iterator[None]:
    """Run a block that these signals are to end: the command goes on after it, as if nothing had come."""
    # Other signals end the command.  A further Ctrl-C interrupts nothing, and the third one ends the process.
    try:
        yield
    except KeyboardInterrupt:
        if _signals.last not in ("", *names):
            raise
        _signals.ended.set()
        _signals.last, _signals.at = "", float("-inf")


def _on_unraisable(found: UnraisableHookArgs) -> None:
    """Keep silent about an interrupt that came where Python cannot raise it (finalizers); `_repeat` sends it again."""
    if not isinstance(found.exc_value, KeyboardInterrupt):
        sys.__unraisablehook__(found)


def run(command: Callable[[], object]) -> NoReturn:
    """Run a command and end the process by the table."""
    try:
        watch_signals()
        code = _code_of(command)
    except KeyboardInterrupt as error:  # before or after the command
        code = _end(error)
    _signals.ended.set()
    if _signals.repeater is not None:
        _signals.repeater.join()  # a signal that it sends later would kill the process
    for name in BY_SIGNAL:
        number = getattr(signal, name, None)
        if number is not None and signal.getsignal(number) is _on_signal:
            signal.signal(number, signal.SIG_DFL)
    if code == INTERRUPTED.code and _signals.last == "SIGINT":
        # A shell ends its loop only if the command is killed by the signal.  Python does that for this error, after
        # its own cleaning.
        sys.excepthook = lambda kind, error, trace: None
        raise KeyboardInterrupt
    sys.exit(code)


def _code_of(command: Callable[[], object]) -> int:
    try:
        try:
            command()
        except SystemExit as end:
            if _signals.last and not _signals.ended.is_set():
                return _end(KeyboardInterrupt())  # typer ends without a word if the signal comes while it reads options
            if end.code:
                _give_up_output()
                return end.code if isinstance(end.code, int) else 1
        if sys.stdout is not None:
            sys.stdout.flush()
        return DONE.code
    except BaseException as error:
        return _end(error)


def _end(error: BaseException) -> int:
    """Say how the command ends by an error that nothing has handled, and return its code."""
    ending = ending_of(error)
    if ending is None:
        ending = BUG
        sys.excepthook(type(error), error, error.__traceback__)
    print_ending(ending, error)
    _give_up_output()
    return ending.code


def print_ending(ending: Ending, error: BaseException, style: Callable[[str], object] | None = None) -> None:
    """Print the line about an ending; signals that follow no longer interrupt."""
    _signals.ended.set()
    line = line_of(ending, error)
    if line and sys.stderr is not None:
        with suppress(OSError, ValueError):  # closed, or full
            if _signals.last == "SIGINT" and sys.stderr.isatty():
                sys.stderr.write("\n")  # below the ^C that a terminal prints
            if style is None:
                print(line, file=sys.stderr, flush=True)
            else:
                style(line)


def _give_up_output() -> None:
    """Flush standard output; where that is impossible, drop it, or Python would complain about it while it ends."""
    try:
        if sys.stdout is not None:
            sys.stdout.flush()
    except (OSError, ValueError):
        with suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
