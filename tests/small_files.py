"""Small files, as tests write and read them."""

import csv
import io
from pathlib import Path

import numpy as np


def put(path: Path, content: bytes = b"x") -> Path:
    """Write a file, into folders that need not exist."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def rows_of_csv(path: Path) -> list[dict[str, str]]:
    with path.open(encoding="utf-8", newline="") as file:
        return list(csv.DictReader(file))
