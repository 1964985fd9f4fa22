"""Writes files and folders atomically: they are complete or absent, even if a run is killed, and seals them.

A sealed file holds the text `nguide-seal:` and 64 hexadecimal digits once: the SHA-256 of the file with zeros in their
place.  JSON has it as the last member, parquet and safetensors in their metadata, so every program still reads them.
No flipped bit goes unseen: in the text before the digits it unseals the file and leaves its content as it was, anywhere
else the digits no longer fit.  A file without a seal was edited by hand.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
import shutil
import socket
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, TypeVar
from uuid import uuid4

from filelock import FileLock, Timeout

from normal_guidance.base.errors import ContentError, UserError, reading, shorten
from normal_guidance.base.records import parse_json, read_as

if TYPE_CHECKING:
    import pyarrow as pa


T = TypeVar("T")

MARK = "nguide-seal:"
DIGITS = 64
OPEN = MARK + "0" * DIGITS  # what a writer puts into a file, and `seal` fills in


def seal(head: bytes, rest: Iterable[bytes | memoryview] = ()) -> bytes:
    """The first bytes of a file with its seal; `rest` are those after them."""
    before, mark, after = head.partition(OPEN.encode())
    if not mark or MARK.encode() in before or MARK.encode() in after:
        raise UserError(f"the text {MARK!r} is kept for checksums; use another in names and notes")
    return before + MARK.encode() + _digest(head, rest).encode() + after


def is_sealed(head: bytes, path: Path, rest: Iterable[bytes | memoryview] = (), again: str = "copy it again") -> bool:
    """Whether a file has a seal; a wrong one is an error, and `again` says what to do."""
    before, mark, after = head.partition(MARK.encode())
    if not mark:
        return False
    opened = before + OPEN.encode() + after[DIGITS:]
    if len(after) < DIGITS or _digest(opened, rest).encode() != after[:DIGITS]:
        raise UserError(f"{path} is damaged: its content does not fit its checksum; {again}")
    return True


def _digest(head: bytes, rest: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256(head)
    for part in rest:
        digest.update(part)
    return digest.hexdigest()


try:
    import fcntl
except ImportError:  # Windows
    fcntl = None  # type: ignore[assignment]


def write_atomically(path: str | Path, content: bytes | Callable[[BinaryIO], object]) -> None:
    """Writes a file that is never seen half written, and that survives a power cut once this returns."""
    # `content` is the file's bytes, or a function that writes them to an open file.  They go to a temporary file in the
    # same folder, which is renamed when they are on the disk; if writing fails, an earlier file remains.
    path = Path(path)
    draft, descriptor = _begin(path, lambda draft: os.open(draft, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666))
    try:
        with open(draft, "r+b", opener=lambda *_: descriptor) as file:  # not fdopen: the file shall know its name
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
def folder_atomically(path: str | Path, instead_of: Path | None = None) -> Iterator[Path]:
    """Yields an empty folder, which is renamed to `path` when the block ends and deleted if the block fails."""
    # The block must sync its files.  A file or a folder with content at `path` is refused, before and after; with
    # `instead_of`, such a folder is moved there when the new one is complete, and whoever is killed between the two
    # moves it back.
    path = Path(path).absolute()  # "." has no name of its own
    if instead_of is None:
        refuse_what_is_there(path)
    make_folder(path.parent)
    remove_left_drafts(path.parent, path.name)

    def create(draft: Path) -> int:
        draft.mkdir()
        return os.open(draft, os.O_RDONLY)

    draft, held = _begin(path, create)
    try:
        yield draft
        sync_folder(draft)
        if instead_of is not None:
            path.replace(instead_of)
        refuse_what_is_there(path)  # another run may have been faster
        draft.replace(path)
    except BaseException:
        shutil.rmtree(draft, ignore_errors=True)  # the error above matters, not that the draft stays
        raise
    finally:
        os.close(held)
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


DRAFT = re.compile(r"\.(?P<name>.+)\.[0-9a-f]{32}\.partial", re.DOTALL)
"""Hidden names of what is being written.  Its writer holds a lock on it, which ends with the process."""

DAY = 24 * 60 * 60  # seconds after which a draft is left over even where locks are unknown


def is_draft(path: Path) -> bool:
    """Whether a file or folder is a draft, of a process that works or of one that was killed."""
    return DRAFT.fullmatch(path.name) is not None


def remove_left_drafts(folder: Path, name: str | None = None) -> None:
    """Removes what killed processes had begun to write in a folder: all of it, or what was to have this name."""
    try:
        inside = list(folder.iterdir())
    except OSError:  # there is no such folder
        return
    for draft in inside:
        known = DRAFT.fullmatch(draft.name)
        if known and name in (None, known["name"]):
            _remove_left(draft)


def remove_left_drafts_of(out: Path) -> None:
    """Removes what killed processes had begun to write of an output: drafts of its own, and in it at any depth."""
    out = out.absolute()
    remove_left_drafts(out.parent, out.name)
    for folder, _, _ in os.walk(out):
        remove_left_drafts(Path(folder))


def _begin(path: Path, create: Callable[[Path], int]) -> tuple[Path, int]:
    """Creates a draft and locks it for as long as it is open here; where a disk has no locks, age decides."""
    # Another process may find the draft before it is locked, and remove it: then there is a new one.
    while True:
        # In the same folder, hence on the same disk; `tempfile` would make what only its owner may read.
        draft = path.with_name(f".{path.name}.{uuid4().hex}.partial")
        descriptor = create(draft)
        if fcntl is not None:
            with suppress(OSError):
                fcntl.flock(descriptor, fcntl.LOCK_EX)
        if draft.exists():
            return draft, descriptor
        os.close(descriptor)


def _remove_left(draft: Path) -> None:
    """Removes a draft whose writer has ended, holding its lock meanwhile."""
    try:
        left = time.time() - draft.stat().st_mtime > DAY
        descriptor = os.open(draft, os.O_RDONLY)
    except OSError:  # gone, or not ours to read
        return
    try:
        if fcntl is not None:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            left = True
    except BlockingIOError:  # its writer works
        left = False
    except OSError:  # a disk without locks
        pass
    try:
        if left:
            shutil.rmtree(draft, ignore_errors=True) if draft.is_dir() else draft.unlink(missing_ok=True)
    finally:
        os.close(descriptor)


def refuse_what_is_there(path: Path) -> None:
    """Refuses a file, or a folder with content, where a new folder is to be."""
    if path.is_dir() and not any(path.iterdir()):
        return
    if path.exists():
        kind = "folder that is not empty" if path.is_dir() else "file"
        raise UserError(f"{path} is a {kind}; choose another name, or move or delete it first")


def make_folder(folder: Path) -> None:
    """Makes a folder and its parents; raises a UserError if that is impossible."""
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except (FileExistsError, NotADirectoryError) as error:
        raise UserError(f"{folder} is, or lies under, a file; name a folder") from error
    except OSError as error:
        raise UserError(f"{folder} cannot be made ({error.strerror}); choose another folder") from error


@contextmanager
def private_files() -> Iterator[None]:
    """Lets only their owner read what is written in the block, by us or by a library: files 0600, folders 0700."""
    # The umask is the whole process's, so a program with several threads sets it once, before they start.
    before = os.umask(0o077)
    try:
        yield
    finally:
        os.umask(before)


FORMAT = 3
"""Version of everything on disk: stores, manifests, jobs, runs, bundles, results and the node's queue."""

HEAD = "format"  # the first member of a JSON object of ours, which holds that version

LAST_TO_READ = "0.2"  # the newest normal-guidance that reads an older format


def check_format(path: Path, version: object, again: str = "make it again") -> None:
    """Refuses a file of another version, and names the software that reads it; `again` is what else to do."""
    if version == FORMAT:
        return
    if type(version) is not int:
        raise ContentError(f"its format {shorten(repr(version))} is not a whole number")
    action = f"open it with normal-guidance {LAST_TO_READ}, or {again}" if version < FORMAT else "update it"
    raise UserError(f"{path} has format {version}, but this normal-guidance reads format {FORMAT}; {action}")


SEAL = "seal"  # the member of a JSON object, and the metadata of a parquet file, that hold the seal

AGAIN = "copy the run again, or delete its folder"


def read_sealed(path: Path, again: str = AGAIN) -> bytes:
    """Reads a file, and checks its seal if it has one."""
    content = path.read_bytes()
    is_sealed(content, path, again=again)
    return content


def write_json(path: Path, content: Mapping[str, Any]) -> None:
    """Writes a JSON object with its format and a seal, atomically."""
    write_atomically(path, sealed_json(content))


def sealed_json(content: Mapping[str, Any]) -> bytes:
    """The bytes that `write_json` writes, where something else puts them into a file."""
    return seal(json.dumps({HEAD: FORMAT, **content, SEAL: OPEN}, indent=2, allow_nan=False).encode())


def read_json(path: Path, again: str = AGAIN) -> dict[str, Any]:
    """Reads a JSON object that `write_json` wrote, without format and seal; `again` says what to do about damage."""
    with reading(path, again):
        content = parse_json(read_sealed(path, again))
        if not isinstance(content, dict):
            raise ContentError("it is not a JSON object")
        check_format(path, content.pop(HEAD, FORMAT))  # absent where somebody wrote the file by hand
    content.pop(SEAL, None)
    return content


def read_json_as(path: Path, kind: type[T], again: str = AGAIN, *, exact: bool = True) -> T:
    """Reads a JSON object that `write_json` wrote as a class of ours (`records.read_as`)."""
    with reading(path, again):
        return read_as(kind, read_json(path, again), exact=exact)


def write_parquet(path: str | Path, table: pa.Table, compression: str = "snappy") -> None:
    """Writes a table with a seal, atomically."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    sink = pa.BufferOutputStream()
    # Not in the schema's metadata: those are in the file twice.
    with pq.ParquetWriter(sink, table.schema, compression=compression) as writer:
        writer.write_table(table)
        writer.add_key_value_metadata({SEAL: OPEN})
    write_atomically(path, seal(sink.getvalue().to_pybytes()))


def read_parquet_about(path: Path, key: str, again: str = AGAIN) -> dict[str, Any]:
    """The JSON object in the metadata of a parquet file, empty if there is none; the seal is checked."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    with reading(path, again, pa.ArrowException):
        content = read_sealed(path, again)
        about = parse_json((pq.read_schema(pa.BufferReader(content)).metadata or {}).get(key.encode(), b"{}"))
        if not isinstance(about, dict):
            raise ContentError("its metadata are not a JSON object")
        check_format(path, about.pop(HEAD, FORMAT))
    return about


def read_parquet(path: str | Path) -> pa.Table:
    """Reads a parquet file, and checks its seal if it has one."""
    # From bytes: given a path, pyarrow would read folders named key=value as columns; a Python file it releases in
    # another thread, and if the interpreter exits meanwhile, the process aborts after all its work is done
    # (apache/arrow#34314).
    import pyarrow as pa
    import pyarrow.parquet as pq

    return pq.read_table(pa.BufferReader(read_sealed(Path(path), AGAIN)))


LOCK = "lock"

PATIENCE = 0.1  # seconds to try again: the lock file may vanish at this moment, with the folder of a process that ends


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Keeps other processes out of a folder, which it makes and clears of drafts; the lock ends with the process."""
    path = folder / LOCK
    make_folder(folder)
    holder = ""
    with suppress(OSError):  # there is none; or, on Windows, it may not be read while it is locked
        holder = path.read_text(encoding="utf-8")  # before the attempt: filelock before 4 empties the file
    # Not bound to a thread: a generator that holds the lock may end in another one.
    lock = FileLock(path, thread_local=False)
    try:
        lock.acquire(timeout=PATIENCE, poll_interval=PATIENCE / 4)
    except Timeout as error:
        raise UserError(
            f"{folder} is being written by {holder or 'another process'}; wait until it ends, or choose another folder"
        ) from error
    except OSError as error:
        raise UserError(f"{folder} cannot be locked ({error.strerror}); choose another folder") from error
    try:
        path.write_text(f"process {os.getpid()} on {socket.gethostname()}", encoding="utf-8")
        remove_left_drafts(folder)
        yield
    finally:
        lock.release()


def difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str | None:
    """Describe the first difference between the recorded and the present options; None if there is none."""
    absent = "absent"
    old, new = dict(_leaves(before)), dict(_leaves(json.loads(json.dumps(now))))
    different = [name for name in old | new if old.get(name, absent) != new.get(name, absent)]
    if not different:
        return None
    # An option tells more than its format's version.
    name = min(different, key=lambda option: option.endswith(".version"))
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
