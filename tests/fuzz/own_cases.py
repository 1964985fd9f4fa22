"""Cases of files that we wrote ourselves: hostile content under a seal that fits, and flipped bits.

Run them alone: python tests/fuzz/run.py --of tests/fuzz/own_cases.py --cases 3000

A hostile file gets JSON values of other types, huge numbers, NaN, deep nesting, members that are missing, renamed or
doubled; parquet gets other types, nulls, extremes, lists of other lengths, metadata of other shape, and a billion rows
in some kilobytes.  The readers must notice it, not the seal.

A flipped bit must be refused with a UserError, or change nothing, or change only what is shown to people; a result that
differs is a finding.
"""

from __future__ import annotations

import hashlib
import io
import json
import shutil
import struct
import zlib
from collections.abc import Callable, Collection
from copy import deepcopy
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory, mkdtemp
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from harness import Case, Probe, attempt, expect
from mutations import BYTES, mutate
from samples import OWN, READERS, Read, Samples, files_in, make_folders
from table_mutations import change_table, mutate_csv

MARK = b"nguide-seal:"
DIGITS = 64


def seal_again(content: bytes) -> bytes:
    """The content with a seal that fits; as it is if it has none."""
    before, mark, after = content.partition(MARK)
    if not mark or len(after) < DIGITS:
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
    *([], {}, [[]], [None], [{}], {"": {}}, {"a": 1}, [0] * 10**5, ["x"] * 1000),
    *map(_nested, (5, 60)),
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a JSON value, itself first."""
    paths = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        paths += paths_in(inner, (*path, key))
    return paths


def change_json(random: Random, value: Any) -> Any:
    """The value with one change anywhere inside."""
    whole = {"": deepcopy(value)}
    path = random.choice(paths_in(whole)[1:])
    outer: Any = whole
    for key in path[:-1]:
        outer = outer[key]
    key, inner = path[-1], outer[path[-1]]
    choice = random.randrange(8)
    if choice == 0 and len(path) > 1:
        del outer[key]
    elif choice == 1 and isinstance(outer, dict) and len(path) > 1:
        outer[random.choice((key + "x", key.upper(), "", "__class__"))] = outer.pop(key)
    elif choice == 2 and isinstance(inner, list):
        outer[key] = random.choice((inner * 2, inner[:-1], [*inner, None], inner[::-1], [inner], inner * 50))
    elif choice == 2 and isinstance(inner, dict):
        inner[random.choice(("new", "seal", "format", "", "self"))] = random.choice((*PLAIN, *WHOLE))
    elif choice == 3 and isinstance(inner, int | float) and abs(inner) < 1e300:  # floats end there
        others = (inner + 1, -inner, inner * 10**9, str(inner), float(inner), [inner], inner / 3, inner * 1e300)
        outer[key] = random.choice(others)
    elif choice == 4 and isinstance(inner, str):
        others = (inner + "x", inner[:-1], inner.upper(), inner * 100, [inner], len(inner), inner[::-1])
        outer[key] = random.choice(others)
    else:
        outer[key] = random.choice((*PLAIN, *PLAIN, *WHOLE))
    return whole[""]


NO_OBJECT = (b"", b"null", b"[]", b"3", b'"x"', b"{}", b"\xff\xfe{}", b"[" * 10**6)


def mutate_json(random: Random, content: bytes) -> bytes:
    """A JSON file with one or a few changes."""
    choice = random.random()
    if choice < 0.05:
        deep = random.choice((99, 120, 5000, 200_000))
        return content.rstrip()[:-1] + b', "deep": ' + b"[" * deep + b"]" * deep + b"}"
    if choice < 0.08:
        return content.replace(b"{", b'{"format": 3, ', 1)
    if choice < 0.12:
        return random.choice((*NO_OBJECT, b"\xef\xbb\xbf" + content))
    if choice < 0.2:
        return mutate(random, content, BYTES)
    value = json.loads(content)
    for _ in range(random.choice((1, 1, 1, 2, 4))):
        value = change_json(random, value)
    text = json.dumps(value, indent=random.choice((None, 2)), ensure_ascii=random.random() < 0.9)
    return text.encode("utf-8", "surrogatepass")


def mutate_lines(random: Random, content: bytes) -> bytes:
    """Lines of JSON, each with the checksum that statistics.jsonl has."""
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


def mutate_parquet(random: Random, content: bytes) -> bytes:
    """A parquet file with other columns or metadata, as sealed as it was."""
    table = pq.read_table(pa.BufferReader(content))
    about = dict(table.schema.metadata or {})
    choice = random.random()
    if choice < 0.08:
        return mutate(random, content, BYTES)
    if choice < 0.1:
        return _bomb(table, random.choice((10**6, 10**8, 5 * 10**8)), about)
    if choice < 0.25 and b"normal_guidance" in about:
        value = change_json(random, json.loads(about[b"normal_guidance"]))
        about[b"normal_guidance"] = random.choice((json.dumps(value).encode(), b"{", b"[]", b"\xff", b"[" * 10**5))
    else:
        table = change_table(random, table)
    return _written(table, about, sealed=MARK in content)


def _written(table: pa.Table, about: dict[bytes, bytes], *, sealed: bool) -> bytes:
    sink = io.BytesIO()
    metadata = {key: value for key, value in about.items() if key != b"ARROW:schema"}
    with pq.ParquetWriter(sink, table.schema.with_metadata(metadata)) as writer:
        writer.write_table(table.replace_schema_metadata(metadata))
        if sealed:
            writer.add_key_value_metadata({"seal": (MARK + b"0" * DIGITS).decode()})
    return sink.getvalue()


def _bomb(table: pa.Table, rows: int, about: dict[bytes, bytes]) -> bytes:
    """A file of some kilobytes that says it has so many rows: its number of rows is changed where it is written."""
    single = pa.table({name: pa.nulls(1, table.schema.field(name).type) for name in table.column_names})
    content = _written(single, about, sealed=True)
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

NEEDED = {name: () if name in ("index", "bundle") else ("index", "store") for name in READERS}
"""Folders that a reader needs beside its own."""


@cache
def _whole(folder: Path) -> Path:
    """The undamaged folders; made here where the samples lack them."""
    return folder / OWN if (folder / OWN).is_dir() else make_folders(Path(mkdtemp(prefix="own-")))


def _copy(samples: Samples, name: str, out: Path) -> list[Path]:
    """Copy what a reader needs, and return the files of its own folder."""
    for needed in {name, "splits", *NEEDED[name]}:
        shutil.copytree(_whole(samples.folder) / needed, out / needed)
    return files_in(out / name)


def _read(name: str, folder: Path) -> Read:
    """What is read, wherever the folder lies."""
    return Read(*(text.replace(str(folder), "") for text in READERS[name](folder)))


@cache
def _undamaged(samples: Samples, name: str) -> Read:
    with TemporaryDirectory() as folder:
        _copy(samples, name, Path(folder))
        return _read(name, Path(folder))


def hostile(name: str) -> Case:
    """A folder of which one file, now and then two, say something else."""

    def case(random: Random, samples: Samples, probe: Probe) -> str:
        files = _copy(samples, name, probe.out)
        for path in random.sample(files, random.choice((1, 1, 1, 2)) if len(files) > 1 else 1):
            content = path.read_bytes()
            path.write_bytes(seal_again(MUTATORS[path.suffix](random, content)))
        with probe.watched():
            return attempt(lambda: READERS[name](probe.out))

    return case


def flip(random: Random, content: bytes) -> bytes:
    """The content with one bit flipped; one flip in five is around the seal, where it may be taken away."""
    mark = content.find(MARK)
    place: Collection[int] = range(len(content))
    if mark >= 0 and random.random() < 0.2:
        place = range(max(0, mark - 8), min(mark + 20, len(content)))
    number, changed = random.choice(place), bytearray(content)
    changed[number] ^= 1 << random.randrange(8)
    return bytes(changed)


def flipped(name: str) -> Case:
    """A folder with one flipped bit; the outcome names the file."""

    def case(random: Random, samples: Samples, probe: Probe) -> str:
        before = _undamaged(samples, name)
        path = random.choice(_copy(samples, name, probe.out))
        path.write_bytes(flip(random, path.read_bytes()))
        after: list[Read] = []
        with probe.watched():
            outcome = attempt(lambda: after.append(_read(name, probe.out)))
        if outcome == "read":
            expect(after[0].used == before.used, f"{path} was read as something else")
            outcome = "same" if after[0] == before else "only shown"
        return f"{path.relative_to(probe.out / name)}: {outcome}"

    return case


WEIGHTS = {
    "index": (30, 6),
    "splits": (12, 2),
    "store": (26, 10),
    "job": (6, 2),
    "run": (30, 12),
    "study": (18, 30),
    "bundle": (24, 14),
}
"""How often the files of a folder are hostile, and how often one of their bits is flipped."""

KINDS = {
    **{f"own: {name}": (often, hostile(name)) for name, (often, _) in WEIGHTS.items()},
    **{f"flip: {name}": (often, flipped(name)) for name, (_, often) in WEIGHTS.items()},
}
"""Kinds of cases, and how often each is run."""
