"""Writes files and folders atomically: they are complete or absent, even if a run is killed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO
from uuid import uuid4

from normal_guidance.errors import UserError

if TYPE_CHECKING:
    import pyarrow as pa


def write_atomically(path: str | Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Writes a file that is never seen half written, and that survives a power cut once this returns.

    `content` is the file's bytes, or a function that writes them to an open file.  The bytes go to a temporary file in
    the same folder, which is renamed to `path` when they are on the disk.  Until then an earlier file stays in place;
    if writing fails, it remains.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     write_atomically(f"{folder}/report.json", b"{}")
        ...     write_atomically(f"{folder}/report.json", lambda file: file.write(b"[]"))
        ...     Path(folder, "report.json").read_bytes()
        b'[]'
    """
    path = Path(path)
    draft = _draft_of(path)
    try:
        with draft.open("x+b") as file:
            if isinstance(content, bytes):
                file.write(content)
            else:
                content(file)
            sync(file)
        draft.replace(path)
    except BaseException:
        with suppress(OSError):  # the error above matters, not that the draft stays
            draft.unlink(missing_ok=True)
        raise
    sync_folder(path.parent)


@contextmanager
def folder_atomically(path: str | Path) -> Iterator[Path]:
    """Yields an empty folder, which is renamed to `path` when the block ends and deleted if the block fails.

    The block must sync the files that it writes (`write_atomically`, `sync`).  Missing parents are created; a `path`
    that is a file or a folder with content is refused, before and after the block.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     with folder_atomically(f"{folder}/run") as draft:
        ...         write_atomically(draft / "report.json", b"{}")
        ...     [file.name for file in Path(folder).rglob("*")]
        ['run', 'report.json']
    """
    path = Path(path).absolute()  # "." has no name of its own
    _refuse_what_is_there(path)
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = _draft_of(path)
    draft.mkdir()
    try:
        yield draft
        sync_folder(draft)
        _refuse_what_is_there(path)  # another run may have been faster
        draft.replace(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)  # the error above matters, not that the draft stays
        raise
    sync_folder(path.parent)


def sync(file: BinaryIO) -> None:
    """Waits until everything written to an open file is on the disk."""
    file.flush()
    os.fsync(file.fileno())


def sync_folder(path: Path) -> None:
    """Waits until the folder's list of names is on the disk: syncing a file does not sync its name."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _draft_of(path: Path) -> Path:
    """A hidden name in the same folder, hence on the same disk, so that renaming is one step.

    `tempfile` would make files and folders that only their owner may read.
    """
    return path.with_name(f".{path.name}.{uuid4().hex}.partial")


def _refuse_what_is_there(path: Path) -> None:
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        kind = "folder that is not empty" if path.is_dir() else "file"
        raise UserError(f"{path} is a {kind}; choose another name, or move or delete it first")


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents; raises a UserError if that is impossible.

    Example:
        >>> make_folder(Path("/dev/null/run"))
        Traceback (most recent call last):
        normal_guidance.errors.UserError: /dev/null/run is, or lies under, a file; name a folder
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{folder} is, or lies under, a file; name a folder") from error
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}); choose another folder") from error


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object, atomically."""
    write_atomically(path, json.dumps(content, indent=2).encode())


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a run's folder; refuses any other content."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as error:
        raise UserError(f"{path} cannot be read ({error}); copy the run again, or delete its folder") from error
    if not isinstance(content, dict):
        raise UserError(f"{path} is damaged: it is not a JSON object; copy the run again, or delete its folder")
    return content


def read_parquet(path: str | Path, columns: Sequence[str] | None = None) -> pa.Table:
    """Reads a parquet file through Arrow's own file object.

    Given a path, pyarrow would read folders named key=value as columns.  Given a Python file, pyarrow releases it in
    another thread; if that happens while the interpreter exits, the process aborts after all its work is done (one in
    six short processes on a busy machine; apache/arrow#34314).
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    with pa.OSFile(os.fspath(path)) as file:
        return pq.read_table(file, columns=None if columns is None else list(columns))
