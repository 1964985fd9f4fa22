"""Files of features that other programs wrote, opened as named arrays: npz, npy, PyTorch, HDF5, parquet.

Opening executes no code: NumPy's pickles are refused, PyTorch loads with `weights_only`.  What a file declares is
checked by `normal_guidance.base.workers` before it is allocated.  Large arrays stay on the disk until they are
sliced, where the format allows it (npy, HDF5, PyTorch's zip files).
"""

from __future__ import annotations

import math
import os
import pickle
import re
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.base.files import read_parquet
from normal_guidance.base.system import install_command
from normal_guidance.base.workers import (
    ASK_BYTES,
    ask,
    check_array,
    check_parquet,
    excess,
    member_problem,
    read_array,
)

# HDF5 files of unknown origin, read by a process of their own.
# The HDF5 library hangs, aborts or crashes on some damaged files, follows links into other files, and allocates
# whatever a header declares.  `answer` therefore runs in the process of `normal_guidance.base.workers.ask`; `Group` and
# `Dataset` are what the rest of the program sees.  Refused are links, storage and virtual datasets that lead to other
# files, filters other than `FILTERS`, which may be programs, and sizes that the stored bytes do not support.  The other
# process imports this module, which therefore does not import torch.


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


Fields = Mapping[str, Any]
"""What a file holds, by key: arrays, tensors, HDF5 datasets, text and numbers; or again such a mapping."""

READ_ERRORS = (
    *(OSError, ValueError, TypeError, KeyError, EOFError, RuntimeError, IndexError, AttributeError, SyntaxError),
    *(MemoryError, OverflowError, AssertionError, struct.error, tokenize.TokenError, zlib.error),
    *(zipfile.BadZipFile, pickle.UnpicklingError, pa.ArrowException),
)
"""What libraries raise for damaged files, found by damaging some."""


NPY = b"\x93NUM"


class Kind(NamedTuple):
    """A kind of file: its endings, its first four bytes (None for zip archives), and the function that opens it."""

    suffixes: tuple[str, ...]
    begins: bytes | None
    open: Callable[[Path], AbstractContextManager[Fields]]


def kind_of(path: Path) -> str | None:
    """The kind of a file: by its ending or, where that is unknown, by its first bytes; None if neither is known."""
    suffix = path.suffix.lower()
    named = next((kind for kind, about in KINDS.items() if suffix in about.suffixes), None)
    return named or (_kind_of_content(path) if path.is_file() else None)


def has_suffix(path: Path) -> bool:
    """Whether a file's name ends like one of features."""
    return any(path.suffix.lower() in about.suffixes for about in KINDS.values())


def _kind_of_content(path: Path) -> str | None:
    begin = _begins(path)
    if begin.startswith(b"PK"):
        return _kind_of_archive(path)
    return next((kind for kind, about in KINDS.items() if begin == about.begins), None)


def _kind_of_archive(path: Path) -> str | None:
    try:
        with zipfile.ZipFile(path) as archive:
            names = archive.namelist()
    except READ_ERRORS:
        return None
    if any(name.endswith("data.pkl") for name in names):
        return "pt"
    return "npz" if names and all(name.endswith(".npy") for name in names) else None


def _begins(path: Path) -> bytes:
    """The first four bytes of a file."""
    try:
        with path.open("rb") as file:
            return file.read(4)
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}); make it readable, or leave it out") from error


@contextmanager
def open_file(path: Path, kind: str) -> Iterator[Fields]:
    """Opens a file of a kind; what its library cannot read, here or in the block, becomes a `UserError`."""
    try:
        with KINDS[kind].open(path) as fields:
            yield fields
    except UserError:
        raise
    except READ_ERRORS as error:
        reason = " ".join(str(error).split())[:300] or type(error).__name__
        raise UserError(f"{path} cannot be read ({reason}); leave it out, or write or copy it again") from error


class _Archive(Mapping[str, Any]):
    """The arrays of an npz file, each read when it is asked for."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        infos = archive.infolist()
        self.archive, self.size = archive, size
        self.members = {info.filename.removesuffix(".npy"): info for info in infos}
        if len(self.members) < len(infos):
            raise ValueError("it has two members of one name")
        problem = excess(sum(info.file_size for info in infos), size)
        if problem:
            raise ValueError(f"it {problem}")

    def __getitem__(self, name: str) -> Any:
        info = self.members[name]
        problem = member_problem(info)
        if problem:
            raise ValueError(f"{name!r}: {problem}")
        try:
            with self.archive.open(info) as file:
                return read_array(file, info.file_size, min(info.compress_size, self.size))
        except ValueError as error:
            raise ValueError(f"{error}: {name!r}") from error

    def __iter__(self) -> Iterator[str]:
        return iter(self.members)

    def __len__(self) -> int:
        return len(self.members)


@contextmanager
def _npz(path: Path) -> Iterator[Fields]:
    if _begins(path) == NPY:
        raise ValueError("it is a single array; name it .npy")
    with zipfile.ZipFile(path) as archive:
        yield _Archive(archive, path.stat().st_size)


@contextmanager
def _npy(path: Path) -> Iterator[Fields]:
    if _begins(path).startswith(b"PK"):
        raise ValueError("it is an archive of arrays; name it .npz")
    size = path.stat().st_size
    with path.open("rb") as file:
        check_array(file, size, size)
    yield {"features": np.load(path, allow_pickle=False, mmap_mode="r")}


@contextmanager
def _pt(path: Path) -> Iterator[Fields]:
    zipped = zipfile.is_zipfile(path)
    if zipped:
        with zipfile.ZipFile(path) as archive:
            if any(info.compress_type != zipfile.ZIP_STORED for info in archive.infolist()):
                raise ValueError("its records are packed, as torch.save does not")
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch warns of old formats
            content = torch.load(path, map_location="cpu", weights_only=True, mmap=zipped)
    except pickle.UnpicklingError as error:
        found = re.search(r"(?:Unsupported global: GLOBAL|Unsupported class|unsupported GLOBAL) (\S+)", str(error))
        if found is None:
            raise ValueError("not a file of tensors, or damaged") from error
        raise UserError(
            f"{path} holds Python objects ({found[1]}), which could run code, so it is not read; save tensors, "
            "numbers and text only: torch.save({'features': tensor, 'label': 1}, path)"
        ) from error
    _check_values(content, path.stat().st_size)
    if isinstance(content, torch.Tensor):
        yield {"features": content}
    elif isinstance(content, Mapping):
        yield {str(key): value for key, value in content.items()}
    elif isinstance(content, list | tuple) and all(isinstance(one, Mapping) for one in content):
        yield {f"{path.stem}-{number}": one for number, one in enumerate(content)}
    elif isinstance(content, list | tuple):
        yield {"features": list(content)}
    else:
        raise ValueError(f"it holds one {type(content).__name__}, not tensors")


def _check_values(content: Any, stored: int) -> None:
    """Refuses tensors that are larger than what is stored, and lists that hold themselves or each other too often."""
    pending, seen = [content], 0
    while pending:
        value = pending.pop()
        seen += 1
        if seen > stored + 1:  # every value takes a byte at least, unless it is one of the others again
            raise ValueError("its lists hold more values than are stored; save tensors")
        if isinstance(value, Mapping):
            pending.extend(value.values())
        elif isinstance(value, list | tuple):
            pending.extend(value)
        elif isinstance(value, torch.Tensor):
            if value.layout != torch.strided or value.device.type != "cpu" or value.is_quantized:
                what = f"{value.dtype}, {value.layout}, {value.device}"
                raise ValueError(f"it holds a tensor of {what}; save dense numbers")
            problem = excess(value.numel() * value.itemsize, stored)
            if problem:
                raise ValueError(f"a tensor of shape {tuple(value.shape)} {problem}")


@contextmanager
def _parquet(path: Path) -> Iterator[Fields]:
    check_parquet(path)
    table = read_parquet(path)
    columns = {name: table[name].combine_chunks() for name in table.column_names}
    lists = {name: _nested(column) for name, column in columns.items() if _is_list(column.type)}
    numbered = _numbered([name for name, column in columns.items() if pa.types.is_floating(column.type)])
    others = [name for name in columns if name not in lists and name not in numbered]
    plain = {name: np.array(columns[name].to_pylist(), object) for name in others}
    if any(np.asarray(values[0]).dtype.kind == "f" for values in lists.values() if len(values)):
        yield {**plain, **lists}
    elif numbered:
        features = np.stack([columns[name].to_numpy(zero_copy_only=False) for name in numbered], axis=1)
        yield {**plain, **lists, "features": features}
    else:
        raise ValueError(
            "looked for features: a column of lists of floats, or numbered columns of floats such as f0, f1; found "
            + ", ".join(f"{name} ({column.type})" for name, column in columns.items())
        )


def _is_list(kind: pa.DataType) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _nested(column: pa.Array) -> Any:
    """A column of lists: one array if all lists have the same length, else a list with an array for each row."""
    if column.null_count:
        return [None if row is None else np.array(row) for row in column.to_pylist()]
    lengths = pc.list_value_length(column).to_numpy()
    values = column.flatten()
    if not _is_list(values.type) and len(set(lengths.tolist())) == 1:
        return values.to_numpy(zero_copy_only=False).reshape(len(column), -1)
    return [_array(row.values) for row in column]


def _array(values: pa.Array) -> np.ndarray:
    """The values of one row: an array of one or, for a list of lists, of two dimensions."""
    if not _is_list(values.type):
        return values.to_numpy(zero_copy_only=False)
    lengths = set(pc.list_value_length(values).to_pylist())
    if len(lengths) > 1:
        raise ValueError(f"slices of one scan have {min(lengths)} to {max(lengths)} features")
    return values.flatten().to_numpy(zero_copy_only=False).reshape(len(values), -1)


def _numbered(names: list[str]) -> list[str]:
    """The names that differ in their last number only, by that number; the largest such group of two or more."""
    groups: dict[str, list[tuple[int, str]]] = {}
    for name in names:
        match = re.fullmatch(r"(.*?)([0-9]{1,9})", name)
        if match:
            groups.setdefault(match[1], []).append((int(match[2]), name))
    largest = max(groups.values(), key=len, default=[])
    return [name for _, name in sorted(largest)] if len(largest) > 1 else []


KINDS = {
    "npz": Kind((".npz",), None, _npz),
    "npy": Kind((".npy",), NPY, _npy),
    "pt": Kind((".pt", ".pth"), None, _pt),
    "hdf5": Kind((".h5", ".hdf5"), b"\x89HDF", open_hdf5),
    "parquet": Kind((".parquet",), b"PAR1", _parquet),
}
"""The kinds of files that can be opened, by the name of their format."""
