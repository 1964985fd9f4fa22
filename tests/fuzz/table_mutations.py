"""Damage to tables, csv or parquet: bytes, columns, rows and cells, and paths that lead elsewhere.

Damage to rows of a label table returns the changed rows, so that the others can be checked afterwards.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Sequence
from random import Random
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.parquet as pq
from mutations import BYTES, mutate

CELLS = (
    *("", " ", "0", "1", "2", "-1", "0.5", "1.0", "1e400", "9" * 400, "NaN", "inf", "null", "None", "true", "FALSE"),
    *("yes", "=1+1", "=cmd|' /C calc'!A0", "@SUM(A1)", "-2+3", '"', "'", "a,b", "a;b", "a\tb", "a\nb", "\x00"),
    *("\x1b[2J", "\ufeff0", "ä日本", "\u202e", "x" * 100_000, "[0, 1", "0 1 2", "0-5;3-1", "0-999999999", "1-", "[]"),
    *("[[0]]", "{'a': 1}", "b'0'", "../outside", "../outside/secret.dcm", "/etc/passwd", "/", ".", ".."),
    *("scans/../../outside", "link", "link/secret.dcm", "scans", "scans.zip!../outside", "!", "a!b", "scans//x", "~"),
    *("C:\\", "\\\\host\\x", "y" * 300, "file:///etc/passwd", "nul"),
)
"""Unusual texts for a cell."""

VALUES: tuple[Any, ...] = (
    *(None, 0, 1, -1, 2, 127, -128, 2**31 - 1, -(2**31), 2**62, 2**63 - 1, 0.5, 1e38, 1e300, float("nan")),
    *(float("inf"), float("-inf"), True, b"\xff\x00", b"1", [0, 1], [0.0, float("inf")], [None], [[0, 1]], {"a": 1}),
)
"""Unusual values for a cell of a parquet file."""

KINDS = (
    *(pa.string(), pa.int64(), pa.float64(), pa.float16(), pa.bool_(), pa.binary(), pa.timestamp("s")),
    *(pa.list_(pa.int64()), pa.date64(), pa.timestamp("ns"), pa.decimal128(30, 5), pa.duration("s")),
)
"""Types of a column."""


class Table(NamedTuple):
    """A table's bytes, and the numbers of the changed rows; None if any may have changed."""

    content: bytes
    touched: set[int] | None


def read_rows(content: bytes) -> list[list[str]]:
    return list(csv.reader(io.StringIO(content.decode())))


def write_rows(rows: Sequence[Sequence[str]], **options: Any) -> bytes:
    text = io.StringIO(newline="")
    csv.writer(text, **{"lineterminator": "\n", **options}).writerows(rows)
    return text.getvalue().encode("utf-8", "surrogatepass")


def mutate_csv(random: Random, content: bytes) -> Table:
    change = random.randrange(9)
    if change < 2:
        return Table(mutate(random, content, BYTES), None)
    if change == 2:
        return Table(_encoding(random, content), None)
    header, *rows = read_rows(content)
    touched = (
        _cells(random, rows) if change < 6 else _rows(random, rows) if change < 8 else _columns(random, header, rows)
    )
    return Table(write_rows([header, *rows]), touched)


def _cells(random: Random, rows: list[list[str]]) -> set[int]:
    touched = set()
    for _ in range(random.choice((1, 1, 2, 5))):
        number = random.randrange(len(rows))
        rows[number][random.randrange(len(rows[0]))] = random.choice(CELLS)
        touched.add(number)
    return touched


def _rows(random: Random, rows: list[list[str]]) -> set[int]:
    """Makes rows doubled, missing, cut short, too long, or other."""
    number = random.randrange(len(rows))
    row, change = rows[number], random.randrange(4)
    if change == 0:
        rows.append([random.choice((cell, cell, random.choice(CELLS))) for cell in row])
    elif change == 1:
        del row[random.randrange(len(row)) :]
    elif change == 2:
        row += ["0"] * random.choice((1, 2, 1000))
    else:
        row[:] = [random.choice(CELLS) for _ in row]
    return {number, len(rows) - 1}


def _columns(random: Random, header: list[str], rows: list[list[str]]) -> set[int] | None:
    """Columns that are missing, doubled, renamed, or in another order."""
    change, order = random.randrange(4), list(range(len(header)))
    if change == 0:
        del order[random.choice(order)]
    elif change == 1:
        order.append(random.choice(order))
    elif change == 2:
        names = ("", " ", "Label ", header[0], "\ufeffscan_id", *CELLS[:30])
        header[random.choice(order)] = random.choice(names)
    else:
        random.shuffle(order)
    for row in (header, *rows):
        row[:] = [row[place] for place in order]
    return set() if change == 3 else None


def _encoding(random: Random, content: bytes) -> bytes:
    """Another encoding, separator or end of lines, or a line of raw bytes."""
    rows, lines = read_rows(content), content.split(b"\n")
    lines[random.randrange(1, len(lines))] = random.choice(
        (b"\xff\xfe" * 5, b"\0" * 9, b'"', b"," * 5, b"", b"a" * 10**6, b'"a"b"c"')
    )
    choices = (
        *(content.decode().encode("utf-16"), b"\xef\xbb\xbf" + content, *(b"\n".join(lines),) * 4),
        *(content.replace(b"\n", end) for end in (b"\r\n", b"\r", b"\n\n")),
        *(write_rows(rows, delimiter=";"), write_rows(rows, delimiter="\t"), write_rows(rows, quoting=csv.QUOTE_ALL)),
        *(lines[0] + b"\n", content.replace(b"1", b"\xc4", 3), content + b"\x1a", content * 2),
    )
    return random.choice(choices)


def mutate_parquet(random: Random, content: bytes) -> Table:
    """The csv table as parquet, with other cells, other columns, or damaged bytes."""
    header, *rows = read_rows(content)
    change = random.random()
    touched = _cells(random, rows) if change < 0.25 else None
    table = pa.table({name: [row[place] for row in rows] for place, name in enumerate(header)})
    packed = write_parquet(change_table(random, table) if change > 0.5 else table)
    return Table(mutate(random, packed, BYTES) if 0.25 < change < 0.5 else packed, touched)


def write_parquet(table: pa.Table, compression: str = "snappy") -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer, compression=compression)
    return buffer.getvalue()


def change_table(random: Random, table: pa.Table) -> pa.Table:
    """The table with other rows, or with other, fewer or renamed columns."""
    change = random.random()
    if change < 0.2:
        return random.choice(
            (table.slice(0, 0), pa.concat_tables([table] * 2), table.slice(1), table.take([0] * len(table)))
        )
    if change < 0.35:
        old = random.choice(table.column_names)
        new = random.choice((f"{old}x", "scan_id", ""))
        names = [new if name == old else name for name in table.column_names]
        return random.choice((table.drop_columns([old]), table.rename_columns(names), table.select([old])))
    for _ in range(random.choice((1, 1, 2))):
        place = random.randrange(table.num_columns)
        table = table.set_column(place, table.column_names[place], change_column(random, table.column(place)))
    return table


def change_column(random: Random, column: pa.ChunkedArray) -> pa.Array:
    """The column with other values, or with values of another type."""
    values, kind = column.to_pylist(), column.type
    if random.random() < 0.15 or not values:
        return pa.nulls(len(values), random.choice(KINDS))
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    number = random.randrange(len(values))
    if pa.types.is_list(kind):
        old = values[number] or []
        cell = _cell(random, kind.value_type)
        value = random.choice((None, [], old[:-1], old * 2, [*old, cell], [cell] * len(old)))
    else:
        value = random.choice((values[0], *[_cell(random, kind)] * 9))
    every = random.random() < 0.2
    changed = [value if every or place == number else before for place, before in enumerate(values)]
    for wanted in (kind, None, pa.float64()):
        try:
            return pa.array(changed, wanted)
        except (pa.ArrowException, OverflowError, TypeError):
            continue
    return pa.array([str(value) for value in changed])


def _cell(random: Random, kind: pa.DataType) -> Any:
    return random.choice(CELLS if pa.types.is_string(kind) and random.random() < 0.8 else VALUES)
