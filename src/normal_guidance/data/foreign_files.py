"""The guard for files that other people wrote: what a file declares is bounded before anything is allocated.

A file of some kilobytes may declare gigabytes, by a header that lies or by zeros that are packed a thousandfold.  Every
reader of foreign files asks here first:

    excess          why a declared size is too much for the bytes that are stored, or for the free memory
    member_problem  why a member of a zip archive is not unpacked: encrypted, an unlimited method, too large
    check_parquet   refuses a parquet file of too many values
    read_array      an array of an npy file or of a member, whose header must fit the bytes that are there
    ask             a question that a process of its own answers, with limits of time and of memory, because the
                    library that reads the file may hang, abort or crash on damage

All sizes are in bytes.  Errors are ValueErrors; the caller adds the name of the file.
"""

from __future__ import annotations

import atexit
import io
import math
import os
import sys
import zipfile
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np

from normal_guidance.data.worker_pool import Pool, StartError
from normal_guidance.data.worker_process import Failure, Result, Task
from normal_guidance.errors import UserError
from normal_guidance.machine import machine_memory

FREE_BYTES = 2**28
"""Size that any file may unpack to, however small it is: masks and labels of zeros are packed a thousandfold."""

RATIO = 100
"""Most bytes that a stored byte may unpack to, beyond `FREE_BYTES`: features reach 2 to 10, padded ones up to 50."""

METHODS = (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED)
"""Accepted compression of zip members; with other methods, zipfile unpacks without limit."""

PATIENCE = 15.0
"""Seconds for an answer of `ask`: a question reads some 64 MiB, which slow disks deliver in a few seconds."""

ASK_BYTES = 2**31
"""Memory that the process behind `ask` may take."""


def excess(declared: int, stored: int, *, free: int = FREE_BYTES, ratio: int = RATIO) -> str:
    """Why a declared size is too much for the stored bytes, or for the free memory; empty if it is not."""
    most = max(free, ratio * stored)
    if declared > most:
        return f"declares {declared:,} bytes, more than the {most:,} that {stored:,} stored bytes may unpack to"
    available = machine_memory()[1] if declared > free else None
    if available is not None and declared > available:
        return f"needs {declared:,} bytes of memory, of which {available:,} are free"
    return ""


def member_problem(info: zipfile.ZipInfo) -> str:
    """Why a member is not unpacked; empty if it may be.  zipfile itself unpacks no more than the declared size."""
    if not info.filename:
        return "the member has no name"
    if info.flag_bits & 0x1:
        return "the member is encrypted"
    if info.compress_type not in METHODS:
        return f"the member is packed by method {info.compress_type}; pack it again with deflate"
    problem = excess(info.file_size, info.compress_size)
    return f"the member {problem}" if problem else ""


def read_array(file: io.BufferedIOBase | IO[bytes], size: int, stored: int) -> np.ndarray:
    """The array of an open npy file.

    Args:
        file: open at its beginning.
        size: bytes of the whole file, which its header must account for.
        stored: bytes that it takes on the disk.
    """
    check_array(file, size, stored)
    file.seek(0)
    array: np.ndarray = np.lib.format.read_array(file, allow_pickle=False)
    return array


def check_array(file: io.BufferedIOBase | IO[bytes], size: int, stored: int) -> None:
    """Refuses an npy file whose header declares more or fewer bytes than follow, or Python objects."""
    version = np.lib.format.read_magic(file)
    readers = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}
    if version not in readers:
        raise ValueError(f"npy version {version[0]}.{version[1]} is not read; write it with np.save")
    shape, _, dtype = readers[version](file)
    if dtype.hasobject:
        raise ValueError(
            "Object arrays could run code; write numbers and text instead, such as array.astype(str); for scans of "
            "different lengths write one array for each scan, or the slices of all scans and lengths"
        )
    if any(length < 0 for length in shape):
        raise ValueError(f"the header declares the shape {shape}")
    declared, there = math.prod(shape) * dtype.itemsize, size - file.tell()
    if declared != there:
        raise ValueError(f"the header declares {declared:,} bytes ({dtype}, shape {shape}), but {there:,} follow")
    problem = excess(declared, stored)
    if problem:
        raise ValueError(f"it {problem}")


def check_parquet(path: Path) -> list[str]:
    """`parquet_columns` by the other process: pyarrow aborts on some damaged files."""
    return ask(parquet_columns, path)


def parquet_columns(path: Path, *, scan: bool = False) -> list[str]:
    """The names of a parquet file's columns; one that declares far more values than it has bytes is refused.

    Equal values take no room in the file.

    Args:
        scan: read all values first, which takes as long as reading them, without keeping any.  Where damage would make
            pyarrow abort, a scan ends with an error: for files of ours, in this process.
    """
    import pyarrow as pa
    import pyarrow.parquet as pq

    size = path.stat().st_size
    with pa.OSFile(os.fspath(path)) as file, pq.ParquetFile(file) as table:
        about = table.metadata
        _refuse_values(about.num_rows * about.num_columns, size)
        if scan:
            table.scan_contents()
        groups = (about.row_group(number) for number in range(about.num_row_groups))
        _refuse_values(
            sum(group.column(place).num_values for group in groups for place in range(group.num_columns)), size
        )
        return list(about.schema.to_arrow_schema().names)


def _refuse_values(count: int, stored: int) -> None:
    if problem := excess(8 * count, stored):
        raise ValueError(f"it {problem}")


def ask(function: Callable[[Task], Result], task: Task) -> Result:
    """The function's result, from a process with limits of time and memory; its death or error is a ValueError.

    The process starts with the first question, takes all later ones, and ends with this one.

    Args:
        function: imported by its name in the other process; its module should import little.
        task: its argument.
    """
    try:
        [result] = _process(os.getpid()).map(function, [task])
    except StartError as error:
        raise UserError(f"the process that reads foreign files does not start ({error.death}); free memory") from error
    if isinstance(result, Failure):
        raise ValueError(result.detail.removeprefix("ValueError: "))
    return result


@cache
def _process(parent: int) -> Pool:
    """The pool of one process; a fork has its own."""
    # A file that ended the process once will do so again, so it is tried once.
    pool = Pool(0 if sys.platform == "win32" else 1, PATIENCE, attempts=1, memory=ASK_BYTES)
    atexit.register(pool.close)
    return pool
