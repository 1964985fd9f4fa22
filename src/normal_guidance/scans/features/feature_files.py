"""Files of features that other programs wrote, opened as named arrays: npz, npy, PyTorch, HDF5, parquet.

Opening executes no code: NumPy's pickles are refused, PyTorch loads with `weights_only`.  What a file declares is
checked by `normal_guidance.base.workers` before it is allocated.  Large arrays stay on the disk until they are
sliced, where the format allows it (npy, HDF5, PyTorch's zip files).
"""

from __future__ import annotations

import pickle
import re
import struct
import tokenize
import warnings
import zipfile
import zlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import torch

from normal_guidance.base.errors import FOREIGN, UserError, reading
from normal_guidance.base.files import read_parquet
from normal_guidance.base.workers import ask, check_array, excess, member_problem, parquet_columns, read_array
from normal_guidance.scans.features.hdf5_files import open_hdf5

Fields = Mapping[str, Any]
"""What a file holds, by key: arrays, tensors, HDF5 datasets, text and numbers; or again such a mapping."""

READ_ERRORS = (
    *(EOFError, SyntaxError, MemoryError, OverflowError, AssertionError, struct.error, tokenize.TokenError, zlib.error),
    *(zipfile.BadZipFile, pickle.UnpicklingError, pa.ArrowException),
)
"""What libraries raise for damaged files beside `FOREIGN`, found by damaging some."""

NPY = b"\x93NUM"


class FileKind(NamedTuple):
    """A kind of file: its endings, its first four bytes (None for zip archives), and the function that opens it."""

    suffixes: tuple[str, ...]
    begins: bytes | None
    open: Callable[[Path], AbstractContextManager[Fields]]


def kind_of(path: Path) -> str | None:
    """The kind of a file: by its ending or, where that is unknown, by its content; None if neither is known."""
    suffix = path.suffix.lower()
    named = next((name for name, kind in KINDS.items() if suffix in kind.suffixes), None)
    if named or not path.is_file():
        return named
    begin = _begins(path)
    if not begin.startswith(b"PK"):
        return next((name for name, kind in KINDS.items() if begin == kind.begins), None)
    try:
        with zipfile.ZipFile(path) as archive:
            members = archive.namelist()
    except (*FOREIGN, *READ_ERRORS):
        return None
    if any(member.endswith("data.pkl") for member in members):
        return "pt"
    return "npz" if members and all(member.endswith(".npy") for member in members) else None


def has_suffix(path: Path) -> bool:
    return any(path.suffix.lower() in kind.suffixes for kind in KINDS.values())


def _begins(path: Path) -> bytes:
    with reading(path, "make it readable, or leave it out"), path.open("rb") as file:
        return file.read(4)


@contextmanager
def open_file(path: Path, kind: str) -> Iterator[Fields]:
    """Opens a file of a kind; what its library cannot read, here or in the block, becomes a `UserError`."""
    with reading(path, "leave it out, or write or copy it again", *READ_ERRORS), KINDS[kind].open(path) as fields:
        yield fields


class _Archive(Mapping[str, Any]):
    """The arrays of an npz file, each read when it is asked for."""

    def __init__(self, archive: zipfile.ZipFile, size: int) -> None:
        infos = archive.infolist()
        self.archive, self.size = archive, size
        self.members = {info.filename.removesuffix(".npy"): info for info in infos}
        if len(self.members) < len(infos):
            raise ValueError("it has two members of one name")
        if problem := excess(sum(info.file_size for info in infos), size):
            raise ValueError(f"it {problem}")

    def __getitem__(self, name: str) -> Any:
        info = self.members[name]
        if problem := member_problem(info):
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
        named = re.search(r"(?:Unsupported global: GLOBAL|Unsupported class|unsupported GLOBAL) (\S+)", str(error))
        if named is None:
            raise ValueError("not a file of tensors, or damaged") from error
        raise UserError(
            f"{path} holds Python objects ({named[1]}), which could run code, so it is not read; save tensors, "
            "numbers and text only: torch.save({'features': tensor, 'label': 1}, path)"
        ) from error
    _check_values(content, path.stat().st_size)
    if isinstance(content, torch.Tensor):
        yield {"features": content}
    elif isinstance(content, Mapping):
        yield {str(key): value for key, value in content.items()}
    elif isinstance(content, list | tuple) and all(isinstance(item, Mapping) for item in content):
        yield {f"{path.stem}-{number}": item for number, item in enumerate(content)}
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
            if problem := excess(value.numel() * value.itemsize, stored):
                raise ValueError(f"a tensor of shape {tuple(value.shape)} {problem}")


@contextmanager
def _parquet(path: Path) -> Iterator[Fields]:
    ask(parquet_columns, path)
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
    if not _is_list(column.type.value_type) and len(pc.list_value_length(column).unique()) == 1:
        return _array(column)
    return [_array(row.values) for row in column]


def _array(values: pa.Array) -> np.ndarray:
    """The values as an array of one or, for lists, of two dimensions."""
    if not _is_list(values.type):
        return values.to_numpy(zero_copy_only=False)
    lengths = pc.list_value_length(values).unique().to_pylist()
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
    "npz": FileKind((".npz",), None, _npz),
    "npy": FileKind((".npy",), NPY, _npy),
    "pt": FileKind((".pt", ".pth"), None, _pt),
    "hdf5": FileKind((".h5", ".hdf5"), b"\x89HDF", open_hdf5),
    "parquet": FileKind((".parquet",), b"PAR1", _parquet),
}
