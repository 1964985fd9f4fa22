"""The guard of foreign files: sizes are bounded before anything is allocated, and a process that dies is one line."""

import io
import time
import zipfile

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from normal_guidance.base import workers as foreign_files
from normal_guidance.base.errors import UserError
from normal_guidance.base.tables import read_columns
from normal_guidance.base.workers import (
    FREE_BYTES,
    RATIO,
    ask,
    check_parquet,
    excess,
    member_problem,
    parquet_columns,
    read_array,
)
from normal_guidance.scans.index.labels import read_labels
from working import work


def test_sizes_are_bounded_by_what_is_stored():
    assert excess(FREE_BYTES, 0) == ""
    assert "more than the 268,435,456 that 1 stored" in excess(FREE_BYTES + 1, 1)
    assert excess(RATIO * 10**7, 10**7) == ""
    assert excess(RATIO * 10**7 + 1, 10**7) == (
        "declares 1,000,000,001 bytes, more than the 1,000,000,000 that 10,000,000 stored bytes may unpack to"
    )
    assert excess(101, 1, free=10, ratio=100)


def test_sizes_are_bounded_by_the_free_memory(monkeypatch):
    monkeypatch.setattr(foreign_files, "machine_memory", lambda: (10**10, 10**9))
    assert excess(10**9, 10**9) == ""
    assert excess(10**9 + 1, 10**9) == "needs 1,000,000,001 bytes of memory, of which 1,000,000,000 are free"
    monkeypatch.setattr(foreign_files, "machine_memory", lambda: (None, None))  # unknown
    assert excess(10**12, 10**12) == ""


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def read(content: bytes) -> np.ndarray:
    return read_array(io.BytesIO(content), len(content), len(content))


@pytest.mark.parametrize(
    "array", [np.ones((3, 4), "<f4"), np.asfortranarray(np.eye(3)), np.array("é"), np.zeros((2, 0))]
)
def test_arrays_come_back(array):
    found = read(npy(array))
    np.testing.assert_array_equal(found, array)
    assert found.dtype == array.dtype


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ("(1000000000, 6)", r"declares 24,000,000,000 bytes \(float32, shape \(1000000000, 6\)\), but 48 follow"),
        ("(3, 3)", "declares 36 bytes .* but 48 follow"),
        ("(-3, -4)", r"declares the shape \(-3, -4\)"),
        ("(9223372036854775807, 9223372036854775807)", "but 48 follow"),
    ],
)
def test_headers_that_lie_are_refused(shape, message):
    content = npy(np.ones((3, 4), np.float32))
    header = content[10:128].replace(b"(3, 4), }", f"({shape[1:]}, }}".encode()).rstrip().ljust(117) + b"\n"
    with pytest.raises(ValueError, match=message):
        read(content[:8] + len(header).to_bytes(2, "little") + header + content[128:])


def test_a_truncated_header_and_objects_are_refused():
    for end in (3, 9, 60):
        with pytest.raises(ValueError, match=r"EOF|magic"):
            read(npy(np.ones(3))[:end])
    with pytest.raises(ValueError, match="Object arrays could run code"):
        read(npy(np.array([None], object)))


def test_members_that_are_not_unpacked():
    info = zipfile.ZipInfo("a.npy")
    info.file_size, info.compress_size = FREE_BYTES, 100
    assert member_problem(info) == ""
    info.file_size += 1
    assert "the member declares 268,435,457 bytes" in member_problem(info)
    info.file_size, info.flag_bits = 1, 1
    assert "encrypted" in member_problem(info)
    info.flag_bits, info.compress_type = 0, zipfile.ZIP_LZMA
    assert "packed by method 14" in member_problem(info)
    info.compress_type, info.filename = zipfile.ZIP_STORED, ""
    assert "no name" in member_problem(info)


def test_parquet_of_equal_values_is_refused(tmp_path):
    """34 million equal numbers take some kilobytes."""
    path = tmp_path / "a.parquet"
    pq.write_table(pa.table({"f0": pa.array(np.zeros(2**25 + 2, np.float32))}), path)
    assert path.stat().st_size < 2 * 10**5
    with pytest.raises(ValueError, match="it declares 268,435,472 bytes"):
        check_parquet(path)
    pq.write_table(pa.table({"f0": pa.array(np.zeros(1000, np.float32))}), path)
    check_parquet(path)


@pytest.fixture
def short(monkeypatch):
    """A process of its own for this test, with a second for an answer."""
    monkeypatch.setattr(foreign_files, "PATIENCE", 1.0)
    foreign_files._process.cache_clear()
    yield
    foreign_files._process(foreign_files.os.getpid()).close()
    foreign_files._process.cache_clear()


def test_a_process_that_dies_or_hangs_is_one_line(short):
    assert ask(work, ("square", 3)) == 9
    with pytest.raises(ValueError, match=r"the process that read it was killed by SIGSEGV$"):
        ask(work, ("kill", "SIGSEGV"))
    begin = time.monotonic()
    with pytest.raises(ValueError, match=r"the process that read it gave no answer within 1 s$"):
        ask(work, ("hang", 600))
    assert time.monotonic() - begin < 300
    with pytest.raises(ValueError, match="MemoryError"):
        ask(work, ("allocate", 3 * 2**30))
    assert ask(work, ("square", 4)) == 16


def test_parquet_on_which_pyarrow_aborts_is_one_line(tmp_path):
    """One bit of a column's nesting: pyarrow throws where nothing catches, so another process looks first."""
    path = tmp_path / "labels.parquet"
    pq.write_table(pa.table({"scan_id": ["a", "b"], "label": [0, 1]}), path)
    damaged = path.read_bytes().replace(b"%\x02\x18\x05label", b"%\x00\x18\x05label")
    assert damaged != path.read_bytes()
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"the process that read it was killed by SIGABRT|level"):
        check_parquet(path)
    with pytest.raises(UserError, match=r"labels.parquet cannot be read .*; copy it again"):
        read_columns(path, pa.schema({"scan_id": pa.string()}), "copy it again")
    with pytest.raises(OSError, match="level"):  # under a seal that fits
        parquet_columns(path, scan=True)
    with pytest.raises(UserError, match=r"labels.parquet"):
        read_labels(path, "--labels", ["scan_id", "label"], ["scan_id"])
