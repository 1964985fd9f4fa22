"""Runs the code blocks of Markdown pages: Python in one namespace, shell blocks in one shell, outputs compared.

A comment just above a block says how it is run, where that is not simply after the block before it:

    <!-- not run: the reason, and the test that runs the same small -->
    <!-- run given: store splits | small: sweep --epochs 2 | instead: vit-b16-imagenet=efficientnet-lite0 -->

`given` runs the block in a folder of its own that holds copies of these names (TUTORIAL:NAME: of another tutorial);
`small` adds options to each such command of `nguide`; `instead` replaces a word.  A block `text` shows what the block
before it printed: see `difference`.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import ModuleType
from typing import Any

from markdown_it import MarkdownIt

ROOT = Path(__file__).resolve().parents[1]
TUTORIALS = ROOT / "docs" / "tutorials"
PHOTOGRAPHED = {"read-a-report": "model/report.html", "hospital-node": "status.html"}
"""Tutorials whose picture is a photograph of a page that they leave."""

PYTHON = ("python", "py")
SHELL = ("bash", "console", "sh", "shell")

SET_UP = {"make", "pip", "git", "docker"}
"""Programs that change the machine; a block with one of them is not run."""

HANGS = 400
"""Seconds after which a block does not end, on however slow a machine."""


class PageError(Exception):
    """What is wrong with a page, with its file and line."""


@dataclass(frozen=True)
class Block:
    """One fenced block of a Markdown file; ``line`` is that of its opening fence."""

    language: str
    line: int
    source: str
    not_run: str | None = None
    given: tuple[str, ...] = ()
    small: Mapping[str, str] = field(default_factory=dict)
    instead: Mapping[str, str] = field(default_factory=dict)

    @property
    def sets_up(self) -> bool:
        """Whether a shell block installs or builds something."""
        lines = [line for line in self.source.replace("\\\n", " ").splitlines() if line.split("#")[0].strip()]
        return self.language in SHELL and any(Path(line.removeprefix("$ ").split()[0]).name in SET_UP for line in lines)


def load_module(path: Path) -> ModuleType:
    """A file that lies in no package."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.findall(r"^([a-z][\w-]*):(?!=)", makefile, re.MULTILINE))


def fenced_blocks(text: str) -> list[Block]:
    """Every fenced block of a page, with what the comment above it says."""
    blocks, above = [], ""
    for token in MarkdownIt("commonmark").parse(text):
        if token.type == "fence":
            language, line = token.info.partition(" ")[0], token.map[0] + 1
            blocks.append(Block(language, line, token.content, **_comment(above, line)))
        above = token.content.strip() if token.type == "html_block" else ""
    return blocks


def _comment(text: str, line: int) -> dict[str, Any]:
    """What `<!-- not run: ... -->` or `<!-- run ... -->` says."""
    if reason := re.fullmatch(r"<!--\s*not run:\s*(.+?)\s*-->", text):
        return {"not_run": reason[1]}
    said: dict[str, Any] = {}
    if how := re.fullmatch(r"<!--\s*run\s+(.+?)\s*-->", text):
        for part in how[1].split("|"):
            key, _, value = (word.strip() for word in part.partition(":"))
            if key == "given":
                said["given"] = tuple(value.split())
            elif key == "small":
                command, _, options = value.partition(" ")
                said.setdefault("small", {})[command] = options
            elif key == "instead":
                old, _, new = value.partition("=")
                said.setdefault("instead", {})[old] = new
            else:
                raise PageError(f"line {line}: {key!r} is none of given, small, instead")
    return said


def blocks_of(path: Path, *languages: str) -> list[Block]:
    """The blocks of a page, of some languages."""
    text = path.read_text(encoding="utf-8") if path.exists() else ""
    return [block for block in fenced_blocks(text) if block.language in languages]


def begins_with(path: Path) -> str | None:
    """The tutorial whose folder this one goes on in, as `<!-- begins in the folder of: NAME -->` says."""
    found = re.search(r"<!-- begins in the folder of: ([\w-]+) -->", path.read_text(encoding="utf-8"))
    return found and found[1]


NUMBER = re.compile(r"(?<![\w.])-?\d*\.\d+(?![\w.])")


def difference(shown: str, printed: str) -> str | None:
    """The first line of `shown` that was not printed, in this order; None if all were.

    `…` stands for anything within a line, and a line `...` for any lines.  Decimal numbers may differ by .05 or 5 %,
    whichever is more; all else must agree, but for spaces.
    """
    lines = [line.strip() for line in printed.splitlines()]
    position, skips = 0, True
    for line in (line.strip() for line in shown.splitlines()):
        if line in ("", "..."):
            skips = skips or line == "..."
            continue
        ahead = range(position, len(lines)) if skips else [i for i in range(position, len(lines)) if lines[i]][:1]
        found = next((i for i in ahead if _same(line, lines[i])), None)
        if found is None:
            return line
        position, skips = found + 1, False
    return None


def _same(shown: str, printed: str) -> bool:
    """Whether a line is the one shown."""
    pattern, numbers = "", []
    for part in re.split(r"(…)", shown):
        if part == "…":
            pattern += ".*?"
            continue
        last = 0
        for number in NUMBER.finditer(part):
            pattern += _spaces(part[last : number.start()]) + r"(-?\d*\.\d+)"
            numbers.append(float(number[0]))
            last = number.end()
        pattern += _spaces(part[last:])
    found = re.fullmatch(pattern, printed)
    return found is not None and all(
        abs(float(text) - number) <= max(0.05, 0.05 * abs(number)) + 1e-9
        for text, number in zip(found.groups(), numbers, strict=True)
    )


def _spaces(text: str) -> str:
    return r"\s+".join(re.escape(word) for word in re.split(r"\s+", text))


class Shell:
    """One bash, as a reader has one terminal: variables, folders and background programs last from block to block."""

    def __init__(self, folder: Path, small: Mapping[str, str] | None = None) -> None:
        self.own = Path(tempfile.mkdtemp(prefix="page-"))
        for program, words in {"nguide": ("-m", "normal_guidance.cli"), "python": ()}.items():
            path = self.own / program
            path.write_text(f'#!/bin/sh\nexec "{sys.executable}" {" ".join(words)} "$@"\n')
            path.chmod(0o755)
        settings = {"NGUIDE_OFFLINE": "1", "NO_COLOR": "1", "TERM": "dumb", "COLUMNS": "110", "MPLBACKEND": "Agg"}
        path = f"{self.own}:{os.environ['PATH']}:/usr/sbin"
        self.process = subprocess.Popen(
            ["bash", "--norc", "--noprofile"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            cwd=folder,
            env={**os.environ, **settings, "PATH": path},
            start_new_session=True,
        )
        self._send("set -Eeuo pipefail\ntrap 'echo \"FAILED AT LINE $LINENO\"' ERR\n")
        if small:  # a function in the background would have a process of its own, which `kill $!` would end instead
            cases = "".join(f'{command}) command nguide "$@" {options};; ' for command, options in small.items())
            self._send(f'nguide() {{ case "$1" in {cases} *) command nguide "$@";; esac; }}\n')

    def run(self, block: Block) -> str:
        """What a block prints to both outputs; raises `PageError` where a command fails."""
        source = block.source
        if block.language == "console":
            source = "\n".join(line[2:] if line.startswith("$ ") else "" for line in source.splitlines()) + "\n"
        for old, new in block.instead.items():
            if old not in source:
                raise PageError(f"line {block.line}: {old!r}, which `instead` replaces, is not in the block")
            source = source.replace(old, new)
        file, mark = self.own / "block.sh", f"END OF THE BLOCK AT LINE {block.line}"
        file.write_text("\n" * block.line + source, encoding="utf-8")
        self._send(f'source "{file}" < /dev/null\nprintf "\\n%s\\n" "{mark}"\n')
        hung = threading.Timer(HANGS, self.close)
        hung.start()
        printed: list[str] = []
        try:
            for line in self.process.stdout:  # type: ignore[union-attr]
                if line.decode().strip() == mark:
                    return "".join(printed)
                printed.append(line.decode())
        finally:
            hung.cancel()
        tail = "".join(printed)[-3000:]
        at = re.search(r"FAILED AT LINE (\d+)", tail)
        raise PageError(f"line {at[1] if at else block.line}: the shell block failed\n{tail}")

    def _send(self, text: str) -> None:
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.write(text.encode())
            self.process.stdin.flush()

    def close(self) -> None:
        """End the shell, and what it left running."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGTERM)
        for pipe in (self.process.stdin, self.process.stdout):
            with contextlib.suppress(BrokenPipeError):
                pipe.close()  # type: ignore[union-attr]
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.wait()
        shutil.rmtree(self.own, ignore_errors=True)


def run_python(path: Path, block: Block, namespace: dict[str, Any]) -> str:
    """What a block prints; raises `PageError` with the line of the page that fails."""
    printed = io.StringIO()
    try:
        with contextlib.redirect_stdout(printed):
            # Blank lines in front give the code the line numbers that it has in the document.
            exec(compile("\n" * block.line + block.source, str(path), "exec"), namespace)
    except Exception as error:
        line = block.line
        if isinstance(error, SyntaxError) and error.filename == str(path):
            line = error.lineno or line
        trace = error.__traceback__
        while trace is not None:
            if trace.tb_frame.f_code.co_filename == str(path):
                line = trace.tb_lineno
            trace = trace.tb_next
        code = path.read_text(encoding="utf-8").splitlines()[line - 1].strip()
        raise PageError(f"{path.name}:{line}: {code}\n{type(error).__name__}: {error}") from error
    return printed.getvalue()


@contextlib.contextmanager
def _inside(folder: Path) -> Iterator[None]:
    before = Path.cwd()
    os.chdir(folder)
    try:
        yield
    finally:
        os.chdir(before)


def run_page(
    path: Path,
    folder: Path,
    prepared: Callable[[str], Path] | None = None,
    choose: Callable[[Block], bool] = lambda block: True,
) -> None:
    """Run a page's blocks in order in a folder; raise `PageError` where one fails or prints something else than shown.

    Args:
        prepared: returns the file or folder of a name that a block is given.
        choose: says which blocks to run; outputs of others are not compared.
    """
    namespace: dict[str, Any] = {"__name__": "__main__"}
    blocks = blocks_of(path, *PYTHON, *SHELL, "text")
    printed: str | None = None
    skipped = False
    shell: Shell | None = None
    try:
        for block in blocks:
            if block.language == "text":
                if skipped:
                    continue
                if printed is None:
                    raise PageError(f"{path.name}:{block.line}: no output before this block")
                if line := difference(block.source, printed):
                    raise PageError(f"{path.name}:{block.line}: was not printed: {line}\nPrinted:\n{printed}")
                continue
            skipped = not choose(block)
            if block.not_run or block.sets_up or skipped:
                printed = None
                continue
            place = folder
            if block.given:
                place = Path(tempfile.mkdtemp(prefix="given-", dir=folder))
                _copy(block.given, place, prepared, f"{path.name}:{block.line}")
            if block.language in PYTHON:
                with _inside(place):
                    printed = run_python(path, block, namespace)
            elif block.given:
                own = Shell(place, block.small)
                try:
                    printed = own.run(block)
                finally:
                    own.close()
            else:
                shell = shell or Shell(folder)
                printed = shell.run(block)
    except PageError as error:
        text = str(error)
        raise PageError(text.replace("line ", f"{path.name}:", 1) if text.startswith("line ") else text) from error
    finally:
        if shell is not None:
            shell.close()


def _copy(names: Sequence[str], place: Path, prepared: Callable[[str], Path] | None, where: str) -> None:
    for name in names:
        if prepared is None:
            raise PageError(f"{where}: {name} is not prepared")
        source = prepared(name)
        name = name.rpartition(":")[2]
        if source.is_dir():
            shutil.copytree(source, place / name)
        else:
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, place / name)


def run_tutorial(path: Path, folder: Path) -> None:
    """Run a tutorial in an empty folder, after the one that it goes on from."""
    if before := begins_with(path):
        run_tutorial(path.with_name(f"{before}.md"), folder)
    run_page(path, folder)
