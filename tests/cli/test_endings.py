"""How commands end: exit codes, one line on stderr, no traceback, no drafts, no processes that stay."""

import errno
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any

import pytest
import torch
import typer
from typer.testing import CliRunner

from killing import signals_of_a_terminal
from normal_guidance.base import files
from normal_guidance.base.errors import UserError
from normal_guidance.cli import endings
from normal_guidance.cli.command import Command
from normal_guidance.cli.commands import Commands
from normal_guidance.scans.features.convert import export_store
from small_command import every_command, nguide
from small_disk import small_disk
from small_study import make_store, write_splits

PAGE = Path(__file__).parents[2] / "docs" / "howto" / "command-line.md"

HANGS = 600
"""Seconds after which a process hangs, on however slow a machine."""

runner = CliRunner()


def test_codes_are_those_of_the_shell_and_of_sysexits_and_the_page_prints_them():
    rows = re.findall(r"^\| (\d+) \| (.+) \|$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert rows == [(str(ending.code), ending.when) for ending in endings.ENDINGS]
    codes = [ending.code for ending in endings.ENDINGS]
    assert codes == sorted(set(codes))
    assert {value for value in vars(endings).values() if isinstance(value, endings.Ending)} == set(endings.ENDINGS)
    for name, ending in endings.BY_SIGNAL.items():
        assert ending.code == 128 + signal.Signals[name]
    assert endings.NO_READER.code == 128 + signal.SIGPIPE
    named = (endings.NO_MEMORY, endings.GONE, endings.NO_SPACE, endings.NOT_ALLOWED, endings.BUG)
    codes = (os.EX_OSERR, os.EX_CANTCREAT, os.EX_IOERR, os.EX_NOPERM, os.EX_SOFTWARE)
    assert tuple(ending.code for ending in named) == codes


def test_every_command_tells_its_name_and_those_whose_help_promises_to_resume_say_so_when_they_end():
    commands = every_command()
    assert len(commands) > 20
    assert [name for name, command in commands.items() if not isinstance(command, Command)] == []
    assert sorted(name for name, command in commands.items() if "resume" in command.help) == list(endings.RESUMING)


def end(
    error: BaseException, *words: object, name: str = "split", before: Any = lambda out: None, color: bool = False
) -> Any:
    """Run a command of this name that does something with its output and then fails."""
    failing = typer.Typer(cls=Commands, pretty_exceptions_enable=False)

    def command(
        out: Annotated[Path | None, typer.Option("--out", "-o")] = None,
        dry_run: Annotated[bool, typer.Option("--dry-run")] = False,
    ) -> None:
        before(out)
        raise error

    failing.command(name, cls=Command)(command)
    failing.command("other", cls=Command)(lambda: None)
    return runner.invoke(failing, [name, *map(str, words)], color=color)


def os_error(number: int, path: str | None = None) -> OSError:
    return OSError(number, os.strerror(number), path)


def mistake(cause: BaseException | None) -> UserError:
    error = UserError("table x.csv cannot be read; choose another")
    error.__cause__ = cause
    return error


GONE = "is gone: it was deleted or renamed during the work; nothing was written"


@pytest.mark.parametrize(
    ("error", "code", "line"),
    [
        (os_error(errno.ENOSPC), 74, r"no space left on device \([\d.]+ \w+ free now\) at /\S+/out; free some space.*"),
        (os_error(errno.EDQUOT), 74, r".*quota exceeded \(.*"),
        (RuntimeError(f"inductor: {os.strerror(errno.ENOSPC)}"), 74, "no space left on device.*"),
        (os_error(errno.EACCES, "/data/x.csv"), 77, "/data/x.csv: permission denied; change its permissions.*"),
        (os_error(errno.EROFS, "/cd/out"), 77, "/cd/out: read-only file system.*"),
        (os_error(errno.EPIPE), 141, "the reader of standard output is gone; nothing was written"),
        (MemoryError("Unable to allocate 3 TiB"), 71, r"out of memory \(Unable to allocate 3 TiB\); use fewer.*"),
        (MemoryError(), 71, r"out of memory \(MemoryError\).*"),
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate\nmore"), 71, r".*Tried to allocate\); use.*"),
        (RuntimeError("DefaultCPUAllocator: can't allocate memory"), 71, "out of memory.*"),
        (os_error(errno.ENOENT, "out/a.csv"), 73, f"out/a.csv {GONE}"),
        (os_error(errno.ENOENT, "out"), 73, f"out {GONE}"),
        (os_error(errno.ENOENT, ".out.0123.partial/a.csv"), 73, rf"\S+/out {GONE}"),  # people know no names of drafts
        (os_error(errno.ENOENT, "out.job/unit"), 73, f"out.job/unit {GONE}"),
        (mistake(None), 2, "table x.csv cannot be read; choose another"),
        (mistake(os_error(errno.ENOENT)), 2, "table x.csv cannot be read; choose another"),
        (mistake(os_error(errno.EACCES)), 77, "table x.csv cannot be read; choose another"),
    ],
    ids=lambda value: str(value) if isinstance(value, int) else None,
)
def test_an_error_is_one_line_with_its_code(tmp_path, monkeypatch, error, code, line):
    """A mistake keeps its words, and takes the code of its cause."""
    monkeypatch.chdir(tmp_path)
    result = end(error, "-o", "out")
    assert result.exit_code == code
    assert result.stdout == ""
    assert re.fullmatch(f"error: {line}\n", result.stderr), result.stderr


@pytest.mark.parametrize(
    "error",
    [
        *(os_error(errno.ENOENT, "/no/program"), os_error(errno.ENOENT), os_error(errno.EIO)),
        *(RuntimeError("shapes differ"), KeyError("out")),
    ],
    ids=repr,
)
def test_a_bug_is_no_known_ending(tmp_path, error):
    result = end(error, "-o", tmp_path / "out")
    assert result.exception is error


def test_an_error_is_red_on_a_terminal():
    assert end(UserError("two\nlines"), color=True).stderr == "\x1b[31merror: two lines\x1b[0m\n"


def test_a_command_that_only_prints_is_silent_about_a_closed_pipe():
    result = end(os_error(errno.EPIPE))
    assert (result.exit_code, result.stderr) == (141, "")


def test_the_line_says_how_to_go_on_or_what_was_written(tmp_path):
    def write(out: Path) -> None:
        out.mkdir()
        (out / "split-1.csv").write_text("scan_id,part")

    def draft(out: Path) -> None:
        out.mkdir()
        (out / ".split-1.csv.0123.partial").write_text("scan")

    old = tmp_path / "old"
    write(old)
    os.utime(old / "split-1.csv", (0, 0))
    error = KeyboardInterrupt()
    assert end(error, "-o", tmp_path / "a", before=write).stderr == (
        f"interrupted; {tmp_path / 'a'} holds the files that were complete\n"
    )
    assert end(error, "-o", tmp_path / "b", before=draft).stderr == "interrupted; nothing was written\n"
    assert end(error, "-o", old).stderr == "interrupted; nothing was written\n"
    for name in endings.RESUMING:
        again = "interrupted; start the same command again to go on\n"
        assert end(error, "-o", tmp_path / "c", name=name).stderr == again
        assert end(error, "-o", tmp_path / "c", "--dry-run", name=name).stderr == "interrupted; nothing was written\n"


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("endings")
    store = make_store(folder / "store")
    (split,) = write_splits(folder, store.scan_ids, [1001])
    export_store(store, folder / "npz", "npz")
    return {"STORE": store.folder, "SPLIT": split, "NPZ": folder / "npz"}


QUICK = ("--epochs", "1", "--batch-size", "4", "--lr", "0.1", "--l1", "0", "--device", "cpu")

WRITING = {
    "phantom": ["phantom", "folder", "OUT", "--scans", "2", "--slices", "12", "--size", "32"],
    "split": ["split", "STORE", "-o", "OUT", "--seeds", "1,2,3"],
    "sweep": ["sweep", "STORE", "--split", "SPLIT", "--methods", "mean", "-o", "OUT", *QUICK],
    "experiment": ["experiment", "STORE", "--split", "SPLIT", "--methods", "mean", "-o", "OUT", *QUICK],
    "npz": ["store", "export", "STORE", "-f", "npz", "-o", "OUT"],
    "torchmil": ["store", "export", "STORE", "-f", "torchmil", "-o", "OUT"],
    "hdf5": ["store", "export", "STORE", "-f", "hdf5", "-o", "OUT"],
    "import": ["store", "import", "NPZ", "-o", "OUT"],
}


@pytest.mark.parametrize("name", WRITING)
def test_a_full_disk_ends_every_command_alike(name, inputs, tmp_path, monkeypatch):
    """The disk is full at the second file; hdf5 has only one."""
    out, room, original = tmp_path / "out", [0] if name == "hdf5" else [1], files.sync

    def sync(file: Any) -> None:
        if not room[0]:
            raise os_error(errno.ENOSPC)
        room[0] -= 1
        original(file)

    monkeypatch.setattr(files, "sync", sync)
    names = inputs | {"OUT": out}
    line = nguide(*(names.get(word, word) for word in WRITING[name]), code=74).stderr.splitlines()[-1]
    assert line.startswith("error: no space left on device (")
    assert f"at {out}; free some space" in line
    resumes = WRITING[name][0] in endings.RESUMING
    after = "start the same command again to go on" if resumes else f"{out} holds the files"
    assert line.endswith(after if resumes else "nothing was written") or (name == "split" and after in line)
    assert list(tmp_path.rglob("*.partial")) == []


@pytest.mark.parametrize("room", [0, 1, 1_000, 5_000, 12_345, 20_000])
def test_hdf5_survives_a_full_disk_at_any_byte(room, inputs, tmp_path, monkeypatch):
    """HDF5 crashes the process when a write fails while it closes a file."""
    original, left = os.pwrite, [room]

    def pwrite(descriptor: int, content: Any, place: int) -> int:
        if left[0] == 0 and len(content):
            raise os_error(errno.ENOSPC)
        part = content[: left[0]]
        left[0] -= len(part)
        return original(descriptor, part, place)

    monkeypatch.setattr(os, "pwrite", pwrite)
    nguide("store", "export", inputs["STORE"], "-f", "hdf5", "-o", tmp_path / "out.h5", code=74)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["hdf5", "npz"])
def test_a_real_full_disk(name, inputs, tmp_path):
    with small_disk(tmp_path / "disk", "16k") as disk:
        words = [str((inputs | {"OUT": disk / "out"}).get(word, word)) for word in WRITING[name]]
        done = subprocess.run([sys.executable, "-m", "normal_guidance.cli", *words], capture_output=True, text=True)
        assert list(disk.iterdir()) == []
    assert done.returncode == 74, done.stderr
    line = r"error: no space left on device \(16.0 KiB free now\) at .*; nothing was written\n"
    assert re.fullmatch(line, done.stderr)


def test_the_error_counts_and_not_the_draft_that_cannot_be_deleted(tmp_path):
    """The folder is gone, so the draft cannot be deleted."""

    def lose(draft: Path) -> None:
        draft.rmdir()
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt), files.folder_atomically(tmp_path / "out") as draft:
        lose(draft)


def start(code: str, **options: Any) -> subprocess.Popen[str]:
    """Start a process whose command is this code; it prints "ready" when it is to be interrupted."""
    indented = "".join(f"    {line}\n" for line in code.strip().splitlines())
    program = f"import os, sys, time, weakref\nfrom normal_guidance.cli import endings\ndef command():\n{indented}"
    words = [sys.executable, "-c", f"{program}\nendings.run(command)"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(words, **pipes | {"preexec_fn": signals_of_a_terminal} | options)


def ended_by(code: str, number: int, **options: Any) -> tuple[int, str, str]:
    """The return code, output and complaints of such a process that gets a signal."""
    with start(code, **options) as process:
        process.stdout.readline()
        process.send_signal(number)
        printed, complaints = process.communicate(timeout=HANGS)
    return process.returncode, printed, complaints


WAIT = 'print("ready", flush=True)\ntime.sleep(600)'
TRY = 'try:\n    print("ready", flush=True)\n    time.sleep(600)\n'
ENDS = {
    signal.SIGINT: (-signal.SIGINT, "", "interrupted; nothing was written\n"),  # a shell sees 130 and ends its loop
    signal.SIGTERM: (143, "", "terminated; nothing was written\n"),
    signal.SIGHUP: (129, "", "terminal closed; nothing was written\n"),
}

LOST = """
class Lost:
    def __del__(self):
        print("ready", flush=True)
        time.sleep(600)
one = Lost()
del one
time.sleep(600)
"""

LATE = """
import atexit, threading
class Late(threading.Event):
    def wait(self, timeout=None):
        was = self.is_set()
        super().wait()
        time.sleep(0.3)
        return was
endings._signals.ended = Late()
atexit.register(time.sleep, 1.0)
print("ready", flush=True)
time.sleep(600)
"""
"""The signal is sent again at the moment when the command has ended."""

COUNT = (
    f"import threading\n{TRY}finally:\n    time.sleep(6 * endings.SECONDS_TO_NOTICE)\n"
    "    print(endings._signals.count, threading.active_count(), flush=True)"
)
"""A repeated signal is not the user's, whose third would end a long cleaning, and is not repeated: no more threads."""

SERVE = """
with endings.until("SIGINT"):
    print("ready", flush=True)
    time.sleep(600)
time.sleep(3 * endings.SECONDS_TO_NOTICE)
print("done", flush=True)
sys.exit(0)  # as typer does
"""


@pytest.mark.parametrize(
    ("code", "number", "end"),
    [
        *(pytest.param(WAIT, number, end, id=f"{number.name} while it waits") for number, end in ENDS.items()),
        pytest.param(SERVE, signal.SIGINT, (0, "done\n", ""), id="Ctrl-C is the normal end of a block"),
        pytest.param(SERVE, signal.SIGTERM, ENDS[signal.SIGTERM], id="SIGTERM is not"),
        pytest.param(SERVE, signal.SIGHUP, ENDS[signal.SIGHUP], id="SIGHUP is not"),
        *(
            pytest.param(code, signal.SIGTERM, ENDS[signal.SIGTERM], id=f"an interrupt that a library {loses}")
            for loses, code in {
                "swallows": f"{TRY}except BaseException:\n    pass\ntime.sleep(600)",
                "loses in a finalizer": LOST,
                "turns into another error": f'{TRY}except BaseException:\n    raise ImportError("numpy") from None',
            }.items()
        ),
        pytest.param(LATE, signal.SIGTERM, ENDS[signal.SIGTERM], id="repeated too late"),
        pytest.param(COUNT, signal.SIGINT, (-signal.SIGINT, "1 2\n", ENDS[signal.SIGINT][2]), id="repeated once"),
    ],
)
def test_a_signal_ends_the_process_without_a_traceback(code, number, end):
    assert ended_by(code, number) == end


def test_an_ignored_signal_stays_ignored():
    """As under nohup."""
    code = 'print("ready", flush=True)\nsys.stdin.read()'
    ignore = {"preexec_fn": lambda: signal.signal(signal.SIGHUP, signal.SIG_IGN), "stdin": subprocess.PIPE}
    with start(code, **ignore) as process:
        process.stdout.readline()
        process.send_signal(signal.SIGHUP)
        assert process.communicate("", timeout=HANGS) == ("", "")
    assert process.returncode == 0


def test_a_second_signal_does_not_disturb_the_cleaning():
    cleaning = 'print("cleaning", flush=True)\n    time.sleep(1.5)\n    print("clean", flush=True)'
    with start(f"{TRY}finally:\n    {cleaning}") as process:
        process.stdout.readline()
        process.send_signal(signal.SIGINT)
        assert process.stdout.readline() == "cleaning\n"
        process.send_signal(signal.SIGINT)
        assert process.communicate(timeout=HANGS) == ("clean\n", "interrupted; nothing was written\n")


def test_a_third_signal_ends_a_cleaning_that_hangs():
    cleaning = 'for _ in range(9):\n        print("cleaning", flush=True)\n        time.sleep(100)'
    with start(f"{TRY}finally:\n    {cleaning}") as process:
        process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        process.stdout.readline()
        while process.poll() is None:
            process.send_signal(signal.SIGTERM)
            time.sleep(0.2)
        assert process.returncode == -signal.SIGTERM


@pytest.mark.parametrize(
    "code",
    [
        'patient = "Jones " * 2\nraise KeyError("label")',
        # Through typer, whose traceback could print them.
        "from normal_guidance.cli.commands import app\n"
        "def broken():\n    patient = 'Jones ' * 2\n    raise KeyError('label')\n"
        "app.command('broken')(broken)\nsys.argv = ['nguide', 'broken']\napp()",
    ],
)
def test_a_bug_keeps_its_traceback_without_values_and_says_where_it_goes(code):
    with start(code) as process:
        _, said = process.communicate(timeout=HANGS)
    assert process.returncode == 70, said
    assert "Traceback (most recent call last)" in said
    assert "KeyError" in said
    assert "Jones Jones" not in said
    assert re.search(r"error: nguide \S+ has a bug; send the traceback to its developers", said.splitlines()[-1])


@pytest.mark.parametrize("out", [None, "out"])
def test_a_reader_that_leaves_is_no_traceback(out):
    reading, writing = os.pipe()
    os.close(reading)
    begin = f"endings._job = endings.Job('split', {'None' if out is None else 'endings.Path(' + repr(out) + ')'})\n"
    with start(f'{begin}print("much")', stdout=writing) as process:
        os.close(writing)
        _, said = process.communicate(timeout=HANGS)
    assert process.returncode == 141
    assert said == ("" if out is None else "error: the reader of standard output is gone; nothing was written\n")


def test_the_command_itself_survives_head():
    """rich ends the process by itself if the reader is gone."""
    words = f"{sys.executable} -m normal_guidance.cli weights list | true; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", words], capture_output=True, text=True)
    assert done.stdout.strip() in ("0", "141")
    assert done.stderr == ""


def test_a_full_standard_output_is_named():
    with open("/dev/full", "w") as full, start('print("much")', stdout=full) as process:
        _, said = process.communicate(timeout=HANGS)
    assert process.returncode == 74
    assert said.startswith("error: no space left on device at standard output; ")
    assert len(said.splitlines()) == 1


def alive(group: int) -> list[str]:
    """The processes of a group that run; dead ones may wait for init to notice."""
    found = []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, _, pgrp = file.read_text().rpartition(") ")[2].split()[:3]
            if int(pgrp) == group and state != "Z":
                found.append(file.parent.name)
    return found


def interrupted(words: list[object], number: int, ready: Any, group: bool) -> tuple[int, str]:
    """Start a command, send the signal when it is ready, and return its code and stderr; no process may stay."""
    command = [sys.executable, "-m", "normal_guidance.cli", *map(str, words)]
    with subprocess.Popen(
        command,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=signals_of_a_terminal,
    ) as process:
        while not ready(process.pid):
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.02)
        (os.killpg if group else os.kill)(process.pid, number)
        _, said = process.communicate(timeout=HANGS)
    # A worker whose start was interrupted ends when it notices that the command is gone.
    deadline = time.monotonic() + HANGS
    while alive(process.pid):
        assert time.monotonic() < deadline, "a process stays"
        time.sleep(0.05)
    return process.returncode, said


def test_sigterm_deletes_the_draft(tmp_path):
    words = ["phantom", "folder", tmp_path / "out", "--scans", "4000"]
    code, said = interrupted(words, signal.SIGTERM, lambda pid: any(tmp_path.glob(".out.*.partial/*")), group=False)
    assert (code, said) == (143, "terminated; nothing was written\n")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="children are read from /proc")
@pytest.mark.parametrize(("number", "group"), [(signal.SIGINT, True), (signal.SIGTERM, False)])
def test_worker_processes_end_with_the_command(phantom, tmp_path, number, group):
    """Ctrl-C reaches all processes of the terminal; SIGTERM reaches the command alone."""
    folder = phantom / "scans"
    words = ["index", "folder", folder, "--table", folder / "labels.csv", "-o", tmp_path / "out", "--workers", "2"]

    def works(pid: int) -> bool:
        return bool(Path(f"/proc/{pid}/task/{pid}/children").read_text())

    code, said = interrupted(words, number, works, group)
    expected = {signal.SIGINT: (-signal.SIGINT, "interrupted"), signal.SIGTERM: (143, "terminated")}[number]
    assert (code, said) == (expected[0], f"{expected[1]}; nothing was written\n")
    assert list(tmp_path.iterdir()) == []
