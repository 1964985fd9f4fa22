"""Damage to label tables: bytes, columns, rows and cells, and paths that lead elsewhere.

Damage to rows returns the changed rows, so that the others can be checked afterwards.
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
    *(float("inf"), float("-inf"), float("nan"), 1e300, -1, 0, 1, 2**62, True, None, b"\xff\x00", b"1"),
    *([0, 1], [0.0, float("inf")], [None], [[0, 1]], {"a": 1}, "text", "../outside"),
)
"""Unusual values for a cell of a parquet file."""


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
    change = random.choice((_cells, _cells, _cells, _rows, _rows, _columns, _encoding, _bytes, _bytes))
    return change(random, content)


def _bytes(random: Random, content: bytes) -> Table:
    return Table(mutate(random, content, BYTES), None)


def _cells(random: Random, content: bytes) -> Table:
    header, *rows = read_rows(content)
    touched = set()
    for _ in range(random.choice((1, 1, 2, 5))):
        number = random.randrange(len(rows))
        rows[number][random.randrange(len(header))] = random.choice(CELLS)
        touched.add(number)
    return Table(write_rows([header, *rows]), touched)


def _rows(random: Random, content: bytes) -> Table:
    """Makes rows doubled, cut short, too long, missing, or raw bytes."""
    header, *rows = read_rows(content)
    number = random.randrange(len(rows))
    row = rows[number]
    change = random.randrange(5)
    if change == 0:
        rows.append([random.choice((cell, cell, random.choice(CELLS))) for cell in row])
    elif change == 1:
        del row[random.randrange(len(row)) :]
    elif change == 2:
        row += ["0"] * random.choice((1, 2, 1000))
    elif change == 3:
        rows[number] = [random.choice(CELLS) for _ in row]
    else:
        lines = content.split(b"\n")
        lines[number + 1] = random.choice((b"\xff\xfe" * 5, b"\0" * 9, b'"', b"," * 5, b"", b"a" * 10**6, b'"a"b"c"'))
        return Table(b"\n".join(lines), None)
    return Table(write_rows([header, *rows]), {number, len(rows) - 1})


def _columns(random: Random, content: bytes) -> Table:
    """Columns that are missing, doubled, renamed, or in another order."""
    rows = read_rows(content)
    width = len(rows[0])
    order = list(range(width))
    change = random.randrange(4)
    if change == 0:
        del order[random.randrange(width)]
    elif change == 1:
        order.append(random.randrange(width))
    elif change == 2:
        rows[0][random.randrange(width)] = random.choice(("", " ", "Label ", rows[0][0], "\ufeffscan_id", *CELLS[:30]))
    else:
        random.shuffle(order)
        return Table(write_rows([[row[place] for place in order] for row in rows]), set())
    return Table(write_rows([[row[place] for place in order] for row in rows]), None)


def _encoding(random: Random, content: bytes) -> Table:
    text, rows = content.decode(), read_rows(content)
    choices = (
        *(text.encode("utf-16"), b"\xef\xbb\xbf" + content, content.replace(b"\n", b"\r\n")),
        *(content.replace(b"\n", b"\r"), write_rows(rows, delimiter=";"), write_rows(rows, delimiter="\t")),
        *(write_rows(rows, quoting=csv.QUOTE_ALL), content.replace(b"\n", b"\n\n"), content.split(b"\n")[0] + b"\n"),
        *(content.replace(b"1", b"\xc4", 3), content + b"\x1a", content * 2),
    )
    return Table(random.choice(choices), None)


def mutate_parquet(random: Random, content: bytes) -> Table:
    """The csv table as parquet, with columns of other types, or with damaged bytes."""
    header, *rows = read_rows(content)
    columns: dict[str, list[Any]] = {name: [row[place] for row in rows] for place, name in enumerate(header)}
    change = random.randrange(4)
    touched: set[int] | None = set()
    if change == 0:
        name, value = random.choice(header), random.choice(VALUES)
        columns[name], touched = [value] * len(rows), None
    elif change == 1:
        number = random.randrange(len(rows))
        columns[random.choice(header)][number] = random.choice((*CELLS, None))
        touched = {number}
    elif change == 2:
        name = random.choice(header)
        touched = None
        if len(header) > 1 and random.random() < 0.5:
            del columns[name]
        else:
            kind = random.choice(
                (pa.date64(), pa.timestamp("ns"), pa.decimal128(30, 5), pa.float16(), pa.duration("s"))
            )
            table = pa.table({**columns, name: pa.nulls(len(rows), kind)})
            return Table(_parquet(table), None)
    packed = _parquet(pa.table(columns))
    return Table(mutate(random, packed, BYTES), None) if change == 3 else Table(packed, touched)


def _parquet(table: pa.Table) -> bytes:
    buffer = io.BytesIO()
    pq.write_table(table, buffer)
    return buffer.getvalue()
