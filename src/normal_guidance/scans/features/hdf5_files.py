"""HDF5 files: those of unknown origin are read by a process of their own, ours are written so that full disks are safe.

The HDF5 library hangs, aborts or crashes on some damaged files, follows links into other files, and allocates whatever
a header declares.  `answer` therefore runs in the process of `normal_guidance.base.workers.ask`, which imports this
module; so it does not import torch.  Refused are links, storage and virtual datasets that lead to other files, filters
other than `FILTERS`, which may be programs, and sizes that the stored bytes do not support.
"""

from __future__ import annotations

import io
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np

from normal_guidance.base.errors import UnreadableError
from normal_guidance.base.system import importing
from normal_guidance.base.workers import ASK_BYTES, ask, excess

if TYPE_CHECKING:
    from typing_extensions import Buffer

PIECE_BYTES = 2**26  # bytes that are read at once, unless a chunk is larger

CHUNK_BYTES = 2**29  # largest chunk that is read: HDF5 holds a whole chunk in memory, and its packed bytes beside it

FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}  # accepted filters, by HDF5's number


def import_h5py() -> Any:
    with importing("encoders", "h5py is not installed"):
        import h5py
    return h5py


class Hdf5Member(NamedTuple):
    """What a member is: a group with the names of its members, or a dataset with its shape."""

    attributes: dict[str, Any]
    members: tuple[str, ...] | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    step: int = 1  # rows that are read at once
    values: np.ndarray | None = None  # all values, if there are few, which saves a question


@contextmanager
def open_hdf5(path: Path) -> Iterator[Hdf5Group]:
    """The members of a file, which the other process holds open until the block ends."""
    import_h5py()
    name = str(path.absolute())
    try:
        yield Hdf5Group(name)
    finally:
        with suppress(ValueError):  # the process is gone, and the file with it
            ask(close, name)


class Hdf5Group(Mapping[str, Any]):
    """The attributes and members of a group; a member is looked at when it is asked for."""

    def __init__(self, path: str, name: str = "/", about: Hdf5Member | None = None) -> None:
        self.path, self.name = path, name
        self.about = about or _member(path, name)
        self.members = frozenset(self.about.members or ())

    def __getitem__(self, name: str) -> Any:
        if name not in self.members:
            return self.about.attributes[name]
        full = f"{self.name.rstrip('/')}/{name}"
        about = _member(self.path, full)
        return Hdf5Dataset(self.path, full, about) if about.members is None else Hdf5Group(self.path, full, about)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self.about.attributes if name not in self.members)
        yield from self.about.members or ()

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Hdf5Dataset:
    """A dataset; rows are read when it is sliced."""

    def __init__(self, path: str, name: str, about: Hdf5Member) -> None:
        self.path, self.name, self.about = path, name, about
        self.shape, self.dtype, self.attrs = about.shape, np.dtype(about.dtype), about.attributes
        self._kept = None if about.values is None else (0, about.values)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, rows: int | slice) -> Any:
        if isinstance(rows, slice):
            return self._rows(*rows.indices(len(self))[:2])
        return self._rows(rows, rows + 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._rows(0, len(self)) if self.shape else self._piece(0)
        return array if dtype is None else array.astype(dtype)

    def _rows(self, begin: int, end: int) -> np.ndarray:
        shape, step = (max(0, end - begin), *self.shape[1:]), self.about.step
        size = math.prod(shape) * self.dtype.itemsize
        if problem := excess(size, size):
            raise ValueError(f"{self.name} {problem}")
        first = begin - begin % step
        if begin < end <= first + step:
            return self._piece(first)[begin - first : end - first]
        array = np.empty(shape, self.dtype)
        for start in range(first, end, step):
            low, high = max(start, begin), min(start + step, end)
            array[low - begin : high - begin] = self._piece(start)[low - start : high - start]
        return array

    def _piece(self, start: int) -> np.ndarray:
        """The rows of one piece, of which the last is kept: scans are read one after the other."""
        if self._kept is None or self._kept[0] != start:
            rows = (start, min(start + self.about.step, len(self))) if self.shape else ()
            values = ask(answer, (self.path, self.name, rows))
            assert isinstance(values, np.ndarray), "a description instead of values"
            self._kept = start, values
        return self._kept[1]


def _member(path: str, name: str) -> Hdf5Member:
    member = ask(answer, (path, name, None))
    assert isinstance(member, Hdf5Member), "values instead of a description"
    return member


def answer(question: tuple[str, str, tuple[int, ...] | None]) -> Hdf5Member | np.ndarray:
    """Describes a member or, with rows (none for a scalar), reads it; what is wrong with it is an UnreadableError."""
    path, name, rows = question
    try:
        h5py = import_h5py()
        if path not in _OPENED:
            _OPENED[path] = h5py.File(path, "r", track_order=True, rdcc_nbytes=PIECE_BYTES)
        member = _find(_OPENED[path], name)
        if rows is not None:
            return _read(member, rows)
        if isinstance(member, h5py.Group):
            return Hdf5Member(_attributes(member), tuple(member))
        if isinstance(member, h5py.Dataset):
            return _about(member, os.stat(path).st_size)
        return Hdf5Member({}, dtype="O")  # a named type, which holds no values
    except UnreadableError:
        raise
    except MemoryError as error:
        raise UnreadableError("unreadable", f"reading it takes more than {ASK_BYTES:,} bytes") from error
    except Exception as error:  # HDF5 raises many kinds
        reason = str(error.args[0]) if error.args else type(error).__name__
        raise UnreadableError("unreadable", f"{name}: {reason}") from error


_OPENED: dict[str, Any] = {}  # the open files, by their path


def close(path: str) -> None:
    """Closes a file, which HDF5 locks against writing while it is open."""
    if path in _OPENED:
        _OPENED.pop(path).close()


def _find(file: Any, name: str) -> Any:
    """The member of a name; soft links are followed one by one, so that none leads out of the file."""
    h5py = import_h5py()
    member, open_parts, links = file["/"], name.split("/"), 0
    while open_parts:
        part = open_parts.pop(0)
        if part in ("", "."):
            continue
        link = member.get(part, getlink=True) if isinstance(member, h5py.Group) else None
        if link is None:
            raise UnreadableError("unreadable", f"{name} is a link to {part!r}, which is not there")
        if isinstance(link, h5py.ExternalLink):
            raise UnreadableError("unreadable", f"{name} is a link to another file ({link.filename}); copy the data")
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > 16:
                raise UnreadableError("unreadable", f"{name} is a link that leads in a circle")
            member = file["/"] if link.path.startswith("/") else member
            open_parts = [*link.path.split("/"), *open_parts]
        else:
            member = member[part]
    return member


def _about(dataset: Any, file_size: int) -> Hdf5Member:
    name = dataset.name
    if dataset.is_virtual or dataset.external:
        raise UnreadableError("unreadable", f"{name} takes its data from other files; copy the data into this one")
    plan = dataset.id.get_create_plist()
    wrong = [code for code in (plan.get_filter(n)[0] for n in range(plan.get_nfilters())) if code not in FILTERS]
    if wrong:
        known = ", ".join(FILTERS.values())
        raise UnreadableError("unreadable", f"{name} is packed by filter {wrong[0]}; write it with one of {known}")
    kind, shape = dataset.dtype, dataset.shape or ()
    row = math.prod(shape[1:]) * kind.itemsize
    if problem := excess(math.prod(shape) * kind.itemsize, min(dataset.id.get_storage_size(), file_size)):
        raise UnreadableError("unreadable", f"{name} {problem}")
    chunk = math.prod(dataset.chunks) * kind.itemsize if dataset.chunks else 0
    if chunk > CHUNK_BYTES:
        raise UnreadableError(
            "unreadable", f"{name} has chunks of {chunk:,} bytes, more than {CHUNK_BYTES:,}; write it with chunks=True"
        )
    rows = dataset.chunks[0] if dataset.chunks else 1  # whole chunks, so that none is unpacked twice
    step = rows * max(1, PIECE_BYTES // max(1, rows * row))
    few = 0 < math.prod(shape) * kind.itemsize <= 2**20 and kind.kind in "fiub"  # sent together with the shape
    values = _read(dataset, (0, shape[0]) if shape else ()) if few and dataset.shape is not None else None
    return Hdf5Member(_attributes(dataset), None, shape, kind.str, step, values)


def _attributes(member: Any) -> dict[str, Any]:
    """Numbers and text; anything else by the name of its type."""
    values = {name: member.attrs[name] for name in member.attrs}
    plain = (str, bytes, int, float, np.generic, np.ndarray)
    return {name: value if isinstance(value, plain) else type(value).__name__ for name, value in values.items()}


def _read(dataset: Any, rows: tuple[int, ...]) -> np.ndarray:
    values = dataset[slice(*rows) if rows else ()]
    if dataset.dtype.kind != "O":
        return np.asarray(values)
    texts = values.reshape(-1).tolist() if isinstance(values, np.ndarray) else [values]
    if not all(isinstance(text, str | bytes) for text in texts):
        raise UnreadableError("unreadable", f"{dataset.name} holds neither numbers nor text; write one of them")
    return np.array(texts, object).reshape(np.shape(values))


class SafeDisk(io.RawIOBase):
    """An open file for HDF5 that never fails: HDF5 crashes the process if it cannot write while it closes a file."""

    # From the first error on, writes go to memory, where HDF5 finds them again; `check` raises the error.  The caller
    # checks after each scan, so memory holds one scan and the tables of the file at most.

    def __init__(self, file: BinaryIO) -> None:
        self.descriptor = file.fileno()
        self.error: OSError | None = None
        self.position = 0
        self.kept: list[tuple[int, bytes]] = []

    def check(self) -> None:
        if self.error is not None:
            raise self.error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self.position, os.SEEK_END: os.fstat(self.descriptor).st_size}[whence]
        self.position = begin + offset
        return self.position

    def write(self, content: Buffer) -> int:
        given, done = memoryview(content).cast("B"), 0
        try:
            while self.error is None and done < len(given):
                done += os.pwrite(self.descriptor, given[done:], self.position + done)
        except OSError as error:
            self.error = error
        if done < len(given):
            self.kept.append((self.position + done, bytes(given[done:])))
        self.position += len(given)
        return len(given)

    def readinto(self, buffer: Buffer) -> int:
        wanted, begin = memoryview(buffer).cast("B"), self.position
        read = os.pread(self.descriptor, len(wanted), begin)
        wanted[: len(read)] = read
        for start, content in self.kept:
            first, last = max(start, begin), min(start + len(content), begin + len(wanted))
            if first < last:
                wanted[first - begin : last - begin] = content[first - start : last - start]
        self.position += len(wanted)
        return len(wanted)

    def truncate(self, size: int | None = None) -> int:
        size = self.position if size is None else size
        try:
            if self.error is None:
                os.ftruncate(self.descriptor, size)
        except OSError as error:
            self.error = error
        return size
