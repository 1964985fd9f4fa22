"""HDF5 files of unknown origin, read by a process of their own.

The HDF5 library hangs, aborts or crashes on some damaged files, follows links into other files, and allocates whatever
a header declares.  `answer` therefore runs in the process of `normal_guidance.data.foreign_files.ask`; `Group` and
`Dataset` are what the rest of the program sees.  Refused are links, storage and virtual datasets that lead to other
files, filters other than `FILTERS`, which may be programs, and sizes that the stored bytes do not support.  The other
process imports this module, which therefore does not import torch.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normal_guidance.data.foreign_files import ASK_BYTES, ask, excess
from normal_guidance.data.problems import UnreadableError
from normal_guidance.errors import UserError
from normal_guidance.extras import install_command

PIECE_BYTES = 2**26
"""Bytes that are read at once, unless a chunk is larger."""

FEW_BYTES = 2**20
"""Largest dataset whose values are told together with its shape."""

CHUNK_BYTES = 2**29
"""Largest chunk that is read: HDF5 holds a whole chunk in memory, and its packed bytes beside it."""

LINKS = 16
"""Soft links that are followed on the way to one member."""

FILTERS = {1: "deflate", 2: "shuffle", 3: "fletcher32", 32000: "lzf"}
"""Accepted filters, by HDF5's number."""


def import_h5py() -> Any:
    """h5py, or one line that says how to install it."""
    try:
        import h5py
    except ImportError as error:
        raise UserError(f"h5py is not installed; {install_command('encoders')}") from error
    return h5py


class Question(NamedTuple):
    """What to tell about a file: what a member is or, with rows, its values; `rows` is empty for a scalar."""

    path: str
    name: str
    rows: tuple[int, ...] | None = None


class About(NamedTuple):
    """What a member is: a group with the names of its members, or a dataset with its shape."""

    attributes: dict[str, Any]
    members: tuple[str, ...] | None = None
    shape: tuple[int, ...] = ()
    dtype: str = ""
    step: int = 1
    """Rows that are read at once."""
    values: np.ndarray | None = None
    """All values, if there are few, which saves a question."""


@contextmanager
def open_hdf5(path: Path) -> Iterator[Group]:
    """The members of a file, which the other process holds open until the block ends."""
    import_h5py()
    place = str(path.absolute())
    try:
        yield Group(place)
    finally:
        with suppress(ValueError):  # the process is gone, and the file with it
            ask(close, place)


class Group(Mapping[str, Any]):
    """The attributes and members of a group; a member is looked at when it is asked for."""

    def __init__(self, path: str, name: str = "/", about: About | None = None) -> None:
        self.path, self.name = path, name
        self.about = about or _describe(path, name)
        self.members = frozenset(self.about.members or ())

    def __getitem__(self, name: str) -> Any:
        if name not in self.members:
            return self.about.attributes[name]
        place = f"{self.name.rstrip('/')}/{name}"
        about = _describe(self.path, place)
        return Dataset(self.path, place, about) if about.members is None else Group(self.path, place, about)

    def __iter__(self) -> Iterator[str]:
        yield from (name for name in self.about.attributes if name not in self.members)
        yield from self.about.members or ()

    def __len__(self) -> int:
        return sum(1 for _ in self)


class Dataset:
    """A dataset; rows are read when it is sliced."""

    def __init__(self, path: str, name: str, about: About) -> None:
        self.path, self.name, self.about = path, name, about
        self.shape, self.dtype, self.attrs = about.shape, np.dtype(about.dtype), about.attributes
        self._kept = None if about.values is None else (0, about.values)

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: int | slice) -> Any:
        if isinstance(place, slice):
            return self._rows(*place.indices(len(self))[:2])
        return self._rows(place, place + 1)[0]

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        array = self._rows(0, len(self)) if self.shape else self._piece(0)
        return array if dtype is None else array.astype(dtype)

    def _rows(self, begin: int, end: int) -> np.ndarray:
        shape, step = (max(0, end - begin), *self.shape[1:]), self.about.step
        size = math.prod(shape) * self.dtype.itemsize
        problem = excess(size, size)
        if problem:
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
            found = ask(answer, Question(self.path, self.name, rows))
            assert isinstance(found, np.ndarray), "a description instead of values"
            self._kept = start, found
        return self._kept[1]


def _describe(path: str, name: str) -> About:
    found = ask(answer, Question(path, name))
    assert isinstance(found, About), "values instead of a description"
    return found


def answer(question: Question) -> About | np.ndarray:
    """Describes or reads a member; anything that is wrong with the file is an UnreadableError."""
    try:
        member = _find(_open(question.path), question.name)
        if question.rows is not None:
            return _read(member, question.rows)
        h5py = import_h5py()
        if isinstance(member, h5py.Group):
            return About(_attributes(member), tuple(member))
        if isinstance(member, h5py.Dataset):
            return _about(member, os.stat(question.path).st_size)
        return About({}, dtype="O")  # a named type, which holds no values
    except UnreadableError:
        raise
    except MemoryError as error:
        raise UnreadableError("unreadable", f"reading it takes more than {ASK_BYTES:,} bytes") from error
    except Exception as error:  # HDF5 raises many kinds
        reason = str(error.args[0]) if error.args else type(error).__name__
        raise UnreadableError("unreadable", f"{question.name}: {reason}") from error


_OPENED: dict[str, Any] = {}
"""The open files, by their path."""


def _open(path: str) -> Any:
    if path not in _OPENED:
        _OPENED[path] = import_h5py().File(path, "r", track_order=True, rdcc_nbytes=PIECE_BYTES)
    return _OPENED[path]


def close(path: str) -> None:
    """Closes a file, which HDF5 locks against writing while it is open."""
    if path in _OPENED:
        _OPENED.pop(path).close()


def _find(file: Any, name: str) -> Any:
    """The member of a name; soft links are followed one by one, so that none leads out of the file."""
    h5py = import_h5py()
    place, open_parts, links = file["/"], name.split("/"), 0
    while open_parts:
        part = open_parts.pop(0)
        if part in ("", "."):
            continue
        link = place.get(part, getlink=True) if isinstance(place, h5py.Group) else None
        if link is None:
            raise UnreadableError("unreadable", f"{name} is a link to {part!r}, which is not there")
        if isinstance(link, h5py.ExternalLink):
            raise UnreadableError("unreadable", f"{name} is a link to another file ({link.filename}); copy the data")
        if isinstance(link, h5py.SoftLink):
            links += 1
            if links > LINKS:
                raise UnreadableError("unreadable", f"{name} is a link that leads in a circle")
            place = file["/"] if link.path.startswith("/") else place
            open_parts = [*link.path.split("/"), *open_parts]
        else:
            place = place[part]
    return place


def _about(dataset: Any, file_size: int) -> About:
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
    problem = excess(math.prod(shape) * kind.itemsize, min(dataset.id.get_storage_size(), file_size))
    if problem:
        raise UnreadableError("unreadable", f"{name} {problem}")
    chunk = math.prod(dataset.chunks) * kind.itemsize if dataset.chunks else 0
    if chunk > CHUNK_BYTES:
        raise UnreadableError(
            "unreadable", f"{name} has chunks of {chunk:,} bytes, more than {CHUNK_BYTES:,}; write it with chunks=True"
        )
    rows = dataset.chunks[0] if dataset.chunks else 1  # whole chunks, so that none is unpacked twice
    step = rows * max(1, PIECE_BYTES // max(1, rows * row))
    few = 0 < math.prod(shape) * kind.itemsize <= FEW_BYTES and kind.kind in "fiub"
    values = _read(dataset, (0, shape[0]) if shape else ()) if few and dataset.shape is not None else None
    return About(_attributes(dataset), None, shape, kind.str, step, values)


def _attributes(member: Any) -> dict[str, Any]:
    """Numbers and text; anything else by the name of its type."""
    found = {name: member.attrs[name] for name in member.attrs}
    plain = (str, bytes, int, float, np.generic, np.ndarray)
    return {name: value if isinstance(value, plain) else type(value).__name__ for name, value in found.items()}


def _read(dataset: Any, rows: tuple[int, ...]) -> np.ndarray:
    values = dataset[slice(*rows) if rows else ()]
    if dataset.dtype.kind != "O":
        return np.asarray(values)
    texts = values.reshape(-1).tolist() if isinstance(values, np.ndarray) else [values]
    if not all(isinstance(one, str | bytes) for one in texts):
        raise UnreadableError("unreadable", f"{dataset.name} holds neither numbers nor text; write one of them")
    array = np.empty(len(texts), object)
    array[:] = texts
    return array.reshape(np.shape(values))
