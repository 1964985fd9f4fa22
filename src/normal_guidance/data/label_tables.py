"""Tables of labels that users write, as csv or parquet: their columns as text, and the cells that say which slices are
positive.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from pyarrow import csv

from normal_guidance.errors import UserError
from normal_guidance.files import read_parquet

BINARY = {"0": 0, "1": 1, "0.0": 0, "1.0": 1, "false": 0, "true": 1}
"""Spellings of a 0/1 label."""


def read_table(path: Path, option: str, wanted: Sequence[str], needed: Sequence[str]) -> dict[str, list[str]]:
    """The wanted columns that a table has, as text; a list becomes its numbers with spaces between.

    Args:
        path: a .csv or .parquet file.
        option: the option that named it, for the errors.
        wanted: names of columns; others are not read.
        needed: columns without which the table is refused.

    Example:
        >>> read_table(Path("labels.xls"), "--labels", ["scan_id"], ["scan_id"])
        Traceback (most recent call last):
        normal_guidance.errors.UserError: --labels labels.xls: the ending is unknown; give a .csv or .parquet file
    """
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise UserError(f"{option} {path}: the ending is unknown; give a .csv or .parquet file")
    if not path.is_file():
        raise UserError(f"{option} {path} is not a file; give the table of labels")
    try:
        table = read_parquet(path) if suffix == ".parquet" else _read_csv(path)
        columns = {name: [_text(value) for value in table[name].to_pylist()] for name in _once(table, wanted)}
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:
        raise UserError(f"{option} {path} cannot be read ({error}); write it again") from error
    for name in needed:
        if name not in columns:
            raise UserError(f"{option} {path} has no column {name}; it has {', '.join(table.column_names)}")
    return columns


def _once(table: pa.Table, wanted: Sequence[str]) -> list[str]:
    """The wanted columns of a table; one that occurs twice is an error."""
    twice = {name for name in table.column_names if table.column_names.count(name) > 1}
    if twice & set(wanted):
        raise ValueError(f"column {min(twice & set(wanted))} occurs twice")
    return [name for name in table.column_names if name in wanted]


def _read_csv(path: Path) -> pa.Table:
    names = csv.open_csv(path).schema.names
    return csv.read_csv(path, convert_options=csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string())))


def _text(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(_text(one) or str(one) for one in value)
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))  # a column of integers with gaps is stored as floats
    return str(value).strip()


def parse_labels(text: str) -> np.ndarray:
    """The slice labels in a cell of the table.

    Example:
        >>> parse_labels("[0, 0, 1]").tolist(), parse_labels("0 1 1").tolist()
        ([0, 0, 1], [0, 1, 1])
    """
    words = re.split(r"[\s,;]+", text.strip().strip("[]()").strip())
    wrong = [word for word in words if word.lower() not in BINARY]
    if wrong:
        raise ValueError(f"slice label {wrong[0]!r} is neither 0 nor 1")
    return np.array([BINARY[word.lower()] for word in words], np.int8)


def parse_ranges(text: str, count: int) -> np.ndarray:
    """Slice labels from ranges of positive slices, counted from 0, both ends included.

    Example:
        >>> parse_ranges("1-2;4", 6).tolist()
        [0, 1, 1, 0, 1, 0]
    """
    labels = np.zeros(count, np.int8)
    for word in filter(None, re.split(r"[\s,;]+", text.strip())):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", word)
        if match is None:
            raise ValueError(f"slice range {word!r} is not one; write it as 12-20;31-33")
        first, last = int(match[1]), int(match[2] or match[1])
        if not first <= last < count:
            raise ValueError(f"slice range {word!r} does not fit {count} slices, counted from 0 to {count - 1}")
        labels[first : last + 1] = 1
    return labels
