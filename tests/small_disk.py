"""A file system that is really full soon: a tmpfs of a few kB, where the tests may mount one."""

import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest


@contextmanager
def small_disk(folder: Path, size: str) -> Iterator[Path]:
    """Mount a file system of this size, such as 16k, on a new folder; the test is skipped where that is not allowed."""
    folder.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", str(folder)]
    try:
        mounted = subprocess.run(words, capture_output=True, text=True)
    except OSError as error:
        pytest.skip(f"NO REAL FULL DISK IS TESTED HERE: {error}")
    if mounted.returncode:
        pytest.skip(f"NO REAL FULL DISK IS TESTED HERE: {mounted.stderr.strip()}")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)
