"""Tables that we wrote, read back with types: rows of a CSV file, columns of a parquet file.

    read_rows(path, Problem, again)         every line as a NamedTuple, whose fields say what its cells must be
    read_columns(path, INDEX, again)        the columns of a schema, none of them null but those that may be

A parquet file that declares far more values than it has bytes is refused before anything is allocated.
"""

from __future__ import annotations

import csv
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TypeVar, get_type_hints

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from normal_guidance.base.errors import ContentError, UserError, reading, shorten
from normal_guidance.base.files import MARK, read_sealed
from normal_guidance.base.records import read_as
from normal_guidance.base.workers import ask, parquet_columns

Row = TypeVar("Row")

WHOLE = re.compile(r"-?[0-9]{1,18}", re.ASCII)


FIRST_LINE = 100_000  # the most characters of a first line that are looked at


def separator(first: str) -> str:
    """The sign between the cells of a CSV file, from its first line; many countries' spreadsheets write semicolons."""
    return next((mark for mark in ",;\t" if mark in first), ",")


def read_rows(path: Path, kind: type[Row], again: str, *, exact: bool = True) -> list[Row]:
    """The lines of a CSV file as NamedTuples of text and whole numbers; not `exact`: other columns, any order."""
    names = tuple(get_type_hints(kind))
    header, *lines = read_cells(path, again) or [[]]
    if missing := [name for name in names if name not in header]:
        shown = shorten(", ".join(header)) or "none"
        raise UserError(f"{path} has no column {missing[0]!r}, only {shown}; {again}")
    if (exact and tuple(header) != names) or any(header.count(name) > 1 for name in names):
        raise UserError(f"{path} has the columns {shorten(', '.join(header))}, not {', '.join(names)}; {again}")
    columns = [header.index(name) for name in names]
    texts = {name for name, hint in get_type_hints(kind).items() if hint is str}
    rows = []
    for number, line in enumerate(lines, start=1):
        if len(line) != len(header):
            raise UserError(f"{path}, row {number} has {len(line)} cells, not {len(header)}; {again}")
        cells: dict[str, Any] = {name: line[column] for name, column in zip(names, columns, strict=True)}
        numbers = {name: int(cell) for name, cell in cells.items() if name not in texts and WHOLE.fullmatch(cell)}
        try:
            rows.append(read_as(kind, cells | numbers))
        except ContentError as error:
            raise UserError(f"{path}, row {number}: {error}; {again}") from error
    return rows


def read_cells(path: Path, again: str) -> list[list[str]]:
    """The lines of a CSV file with their cells, the header first; lines without a cell are left out."""
    with reading(path, again, csv.Error), path.open(newline="", encoding="utf-8-sig") as file:
        mark = separator(file.readline(FIRST_LINE))
        file.seek(0)
        return [line for line in csv.reader(file, delimiter=mark, strict=True) if line]


def read_columns(path: Path, schema: pa.Schema, again: str, nullable: Sequence[str] = ()) -> pa.Table:
    """The columns of a schema in its types; null only in `nullable` ones."""
    with reading(path, again, pa.ArrowException):
        content = read_sealed(path, again)
        known = parquet_columns(path, scan=True) if MARK.encode() in content else ask(parquet_columns, path)
        if missing := [name for name in schema.names if name not in known]:
            raise UserError(f"{path} has no column {missing[0]!r}; {again}")
        table = pq.read_table(pa.BufferReader(content), columns=schema.names).select(schema.names).cast(schema)
        table = table.replace_schema_metadata()
        table.validate(full=True)  # a damaged file may hold text that is not UTF-8, or lists that overlap
    for name in schema.names:
        if _has_null(table[name], nullable=name in nullable):
            raise UserError(f"{path} is damaged: column {name} has a value missing; {again}")
    return table


def _has_null(column: pa.ChunkedArray, *, nullable: bool) -> bool:
    if column.null_count and not nullable:
        return True
    if pa.types.is_dictionary(column.type):  # the value that an index stands for may be null as well
        return not nullable and pc.any(pc.is_null(column.cast(column.type.value_type))).as_py() is True
    return pa.types.is_list(column.type) and _has_null(pc.list_flatten(column), nullable=False)


def refuse_rows(path: Path, table: pa.Table, wrong: pa.ChunkedArray | pa.Array, what: str, again: str) -> None:
    """Refuses a table in which a row is `wrong`, and names the first such scan."""
    place = pc.index(pc.fill_null(wrong, False), True).as_py()
    if place >= 0:
        raise UserError(f"{path} is damaged: scan {shorten(table['scan_id'][place].as_py())!r} {what}; {again}")
