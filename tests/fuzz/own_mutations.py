"""Hostile content for the files that we write, with a seal that fits it: the readers must notice, not the seal.

A mutator changes what a file says: JSON gets values of other types, huge numbers, NaN, deep nesting, members that are
missing, renamed or doubled; parquet gets other types, nulls, extremes, lists of other lengths, metadata of other shape,
and a billion rows in some kilobytes.
"""

from __future__ import annotations

import hashlib
import io
import json
import struct
from collections.abc import Callable
from copy import deepcopy
from random import Random
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from mutations import BYTES, mutate
from table_mutations import mutate_csv

MARK = b"nguide-seal:"
DIGITS = 64


def seal_again(content: bytes) -> bytes:
    """The content with a seal that fits; as it is if it has none."""
    before, found, after = content.partition(MARK)
    if not found or len(after) < DIGITS:
        return content
    opened = before + MARK + b"0" * DIGITS + after[DIGITS:]
    return before + MARK + hashlib.sha256(opened).hexdigest().encode() + after[DIGITS:]


def _nested(levels: int) -> Any:
    value: Any = 1
    for number in range(levels):
        value = [value] if number % 2 else {"a": value}
    return value


PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 0.5, -0.0, 7.5, 1e308, -1e308, 1e-320, 2**31, 2**53, 2**63, 2**64, -(2**63)),
    *(10**30, 10**4200, float("nan"), float("inf"), float("-inf"), "", "0", "1", "NaN", "x", "ng", "abmil", "train"),
    *("\x00", "\ud800", "../../etc/passwd", "/", "%s", "{0}", "x" * 10**5),
)
WHOLE: tuple[Any, ...] = (
    [],
    {},
    [[]],
    [None],
    [{}],
    {"": {}},
    {"a": 1},
    [0] * 10**5,
    ["x"] * 1000,
    *map(_nested, (5, 60)),
)


def places(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a JSON value, itself first."""
    found = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        found += places(inner, (*path, key))
    return found


def change_json(random: Random, value: Any) -> Any:
    """The value with one change anywhere inside."""
    whole = {"": deepcopy(value)}
    path = random.choice(places(whole)[1:])
    outer: Any = whole
    for key in path[:-1]:
        outer = outer[key]
    key, own = path[-1], outer[path[-1]]
    choice = random.randrange(8)
    if choice == 0 and len(path) > 1:
        del outer[key]
    elif choice == 1 and isinstance(outer, dict) and len(path) > 1:
        outer[random.choice((key + "x", key.upper(), "", "__class__"))] = outer.pop(key)
    elif choice == 2 and isinstance(own, list):
        outer[key] = random.choice((own * 2, own[:-1], [*own, None], own[::-1], [own], own * 50))
    elif choice == 2 and isinstance(own, dict):
        own[random.choice(("new", "seal", "format", "", "self"))] = random.choice((*PLAIN, *WHOLE))
    elif choice == 3 and isinstance(own, int | float) and abs(own) < 1e300:  # floats end there
        outer[key] = random.choice((own + 1, -own, own * 10**9, str(own), float(own), [own], own / 3, own * 1e300))
    elif choice == 4 and isinstance(own, str):
        outer[key] = random.choice((own + "x", own[:-1], own.upper(), own * 100, [own], len(own), own[::-1]))
    else:
        outer[key] = random.choice((*PLAIN, *PLAIN, *WHOLE))
    return whole[""]


def mutate_json(random: Random, content: bytes) -> bytes:
    """A JSON file with one or a few changes."""
    choice = random.random()
    if choice < 0.05:
        deep = random.choice((99, 120, 5000, 200_000))
        return content.rstrip()[:-1] + b', "deep": ' + b"[" * deep + b"]" * deep + b"}"
    if choice < 0.08:
        return content.replace(b"{", b'{"format": 3, ', 1)
    if choice < 0.12:
        return random.choice(
            (b"", b"null", b"[]", b"3", b'"x"', b"{}", b"\xff\xfe{}", b"\xef\xbb\xbf" + content, b"[" * 10**6)
        )
    if choice < 0.2:
        return mutate(random, content, BYTES)
    value = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        value = change_json(random, value)
    return json.dumps(value, indent=random.choice((None, 2)), ensure_ascii=random.random() < 0.9).encode(
        "utf-8", "surrogatepass"
    )


def mutate_lines(random: Random, content: bytes) -> bytes:
    """Lines of JSON, each with the checksum that statistics.jsonl has."""
    import zlib

    lines = [json.loads(line.rpartition(b" ")[0]) for line in content.splitlines()]
    number = random.randrange(len(lines))
    lines[number] = change_json(random, lines[number])
    texts = [json.dumps(line).encode() for line in lines]
    return b"".join(b"%b %08x\n" % (text, zlib.crc32(text)) for text in texts)


def mutate_tensors(random: Random, content: bytes) -> bytes:
    """A safetensors file whose header, or the JSON in it, says something else."""
    size = int.from_bytes(content[:8], "little")
    header, rest = json.loads(content[8 : 8 + size]), content[8 + size :]
    about = header.get("__metadata__", {})
    if "about" in about and random.random() < 0.5:
        about["about"] = json.dumps(change_json(random, json.loads(about["about"])))
    else:
        header = change_json(random, header)
    if random.random() < 0.2:
        rest = random.choice((rest[:-1], rest + b"\0", b"", struct.pack("<f", float("nan")) * (len(rest) // 4)))
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + rest


KINDS = (
    *(pa.string(), pa.int64(), pa.float64(), pa.float16(), pa.bool_(), pa.binary(), pa.timestamp("s")),
    pa.list_(pa.int64()),
)
CELLS: tuple[Any, ...] = (
    None,
    0,
    1,
    -1,
    2,
    127,
    -128,
    2**31 - 1,
    -(2**31),
    2**63 - 1,
    0.5,
    1e38,
    float("nan"),
    float("inf"),
)
TEXTS: tuple[Any, ...] = (
    None,
    "",
    "x",
    "x" * 10**5,
    "\x00",
    "0",
    "train",
    "../..",
    "/etc/passwd",
    '{"a": 1}',
    "[" * 1000,
    "{",
)


def change_column(random: Random, column: pa.ChunkedArray) -> pa.Array:
    """The column with other values, or with values of another type."""
    values, kind = column.to_pylist(), column.type
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if random.random() < 0.15 or not values:
        return pa.nulls(len(values), random.choice(KINDS))
    number = random.randrange(len(values))
    every = random.random() < 0.2

    def put(value: Any) -> list[Any]:
        return [value] * len(values) if every else [*values[:number], value, *values[number + 1 :]]

    if pa.types.is_list(kind):
        own = values[number] or []
        cells = TEXTS if pa.types.is_string(kind.value_type) else CELLS
        other = random.choice(
            (None, [], own[:-1], own * 2, [*own, random.choice(cells)], [random.choice(cells)] * len(own))
        )
        return _array(put(other), kind)
    if pa.types.is_string(kind):
        return _array(put(random.choice((*TEXTS, values[0]))), kind)
    return _array(put(random.choice(CELLS)), kind)


def _array(values: list[Any], kind: pa.DataType) -> pa.Array:
    for attempt in (kind, None, pa.float64()):
        try:
            return pa.array(values, attempt)
        except (pa.ArrowException, OverflowError, TypeError):
            continue
    return pa.array([str(value) for value in values])


def mutate_parquet(random: Random, content: bytes) -> bytes:
    """A parquet file with other columns or metadata, as sealed as it was."""
    table = pq.read_table(pa.BufferReader(content))
    about = dict(table.schema.metadata or {})
    choice = random.random()
    if choice < 0.08:
        return mutate(random, content, BYTES)
    if choice < 0.1:
        rows = random.choice((10**6, 10**8, 5 * 10**8))
        table = pa.table({name: pa.nulls(1, table.schema.field(name).type) for name in table.column_names})
        return _bomb(table, rows, about)
    if choice < 0.25:
        table = random.choice(
            (table.slice(0, 0), pa.concat_tables([table] * 2), table.slice(1), table.take([0] * len(table)))
        )
    elif choice < 0.35:
        name = random.choice(table.column_names)
        names = [one if one != name else random.choice((f"{name}x", "scan_id", "")) for one in table.column_names]
        table = random.choice((table.drop_columns([name]), table.rename_columns(names), table.select([name])))
    elif choice < 0.5 and b"normal_guidance" in about:
        value = change_json(random, json.loads(about[b"normal_guidance"]))
        about[b"normal_guidance"] = random.choice((json.dumps(value).encode(), b"{", b"[]", b"\xff", b"[" * 10**5))
    else:
        for _ in range(random.choice((1, 1, 2))):
            place = random.randrange(table.num_columns)
            table = table.set_column(place, table.column_names[place], change_column(random, table.column(place)))
    return _written(table, about, sealed=MARK in content)


def _written(table: pa.Table, about: dict[bytes, bytes], *, sealed: bool) -> bytes:
    sink = io.BytesIO()
    own = {key: value for key, value in about.items() if key != b"ARROW:schema"}
    with pq.ParquetWriter(sink, table.schema.with_metadata(own)) as writer:
        writer.write_table(table.replace_schema_metadata(own))
        if sealed:
            writer.add_key_value_metadata({"seal": (MARK + b"0" * DIGITS).decode()})
    return sink.getvalue()


def _bomb(table: pa.Table, rows: int, about: dict[bytes, bytes]) -> bytes:
    """A file of some kilobytes that says it has so many rows: its number of rows is changed where it is written."""
    content = _written(table, about, sealed=True)
    footer = int.from_bytes(content[-8:-4], "little")
    head, tail = content[: -8 - footer], content[-8 - footer : -8]
    zigzag = b"\x16\x02"  # num_rows, the i64 of value 1 after the schema; the row groups have the same
    number, wanted = 2 * rows, bytearray()
    while number >= 0x80:
        wanted.append(number & 0x7F | 0x80)
        number >>= 7
    wanted.append(number)
    tail = tail.replace(zigzag, b"\x16" + bytes(wanted))
    return head + tail + len(tail).to_bytes(4, "little") + content[-4:]


def mutate_own_csv(random: Random, content: bytes) -> bytes:
    """Table damage as for foreign files, and cells that are too long."""
    if random.random() < 0.05:
        return content + b"x" * random.choice((2 * 10**5, 10**7)) + b",,,,\n"
    return mutate_csv(random, content).content


MUTATORS: dict[str, Callable[[Random, bytes], bytes]] = {
    ".json": mutate_json,
    ".jsonl": mutate_lines,
    ".safetensors": mutate_tensors,
    ".parquet": mutate_parquet,
    ".csv": mutate_own_csv,
}
