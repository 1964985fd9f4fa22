"""Cases of files that we wrote ourselves: hostile content under a seal that fits, and flipped bits.

Run them alone: python tests/fuzz/run.py --of tests/fuzz/own_cases.py --cases 3000

A hostile file gets JSON values of other types, huge numbers, NaN, deep nesting, members that are missing, renamed or
doubled; parquet gets other types, nulls, extremes, lists of other lengths, metadata of other shape.  The readers must
notice it, not the seal.

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
from functools import cache, partial, reduce
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
from harness import Case, Probe, attempt, expect
from mutations import BYTES, mutate
from samples import OWN, READERS, Read, Samples, files_in
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


PLAIN: tuple[Any, ...] = (
    *(None, True, False, 0, 1, 2, -1, 0.5, -0.0, 7.5, 1e308, -1e308, 1e-320, 2**31, 2**53, 2**63, 2**64, -(2**63)),
    *(10**30, 10**4200, float("nan"), float("inf"), float("-inf"), "", "0", "1", "NaN", "x", "ng", "abmil", "train"),
    *("\x00", "\ud800", "../../etc/passwd", "/", "%s", "{0}", "x" * 10**5),
)
WHOLE: tuple[Any, ...] = (
    *([], {}, [[]], [None], [{}], {"": {}}, {"a": 1}, [0] * 10**5, ["x"] * 1000),
    *(reduce(lambda inner, turn: [inner] if turn % 2 else {"a": inner}, range(levels), 1) for levels in (5, 60)),
)


def paths_in(value: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of everything in a JSON value, itself first."""
    paths = [path]
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, inner in items:
        paths += paths_in(inner, (*path, key))
    return paths


def _others(value: Any) -> tuple[Any, ...]:
    """Values like this one, but longer, shorter, larger, turned, or of another type."""
    if isinstance(value, list):
        return value * 2, value[:-1], [*value, None], value[::-1], [value], value * 50
    if isinstance(value, dict):
        return tuple({**value, key: inner} for key in ("new", "seal", "format", "", "self") for inner in (None, *WHOLE))
    if isinstance(value, str):
        return value + "x", value[:-1], value.upper(), value * 100, [value], len(value), value[::-1]
    if isinstance(value, int | float) and abs(value) < 1e300:  # floats end there
        return value + 1, -value, value * 10**9, str(value), float(value), [value], value / 3, value * 1e300
    return PLAIN


def change_json(random: Random, value: Any) -> Any:
    """The value with one change anywhere inside."""
    whole = {"": deepcopy(value)}
    path = random.choice(paths_in(whole)[1:])
    outer: Any = whole
    for key in path[:-1]:
        outer = outer[key]
    key, choice = path[-1], random.randrange(8)
    if choice == 0 and len(path) > 1:
        del outer[key]
    elif choice == 1 and isinstance(outer, dict) and len(path) > 1:
        outer[random.choice((key + "x", key.upper(), "", "__class__"))] = outer.pop(key)
    elif choice < 4:
        outer[key] = random.choice(_others(outer[key]))
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
    if random.random() < 0.2 and b"normal_guidance" in about:
        value = change_json(random, json.loads(about[b"normal_guidance"]))
        about[b"normal_guidance"] = random.choice((json.dumps(value).encode(), b"{", b"[]", b"\xff", b"[" * 10**5))
    else:
        table = change_table(random, table)
    sink = io.BytesIO()
    metadata = {key: value for key, value in about.items() if key != b"ARROW:schema"}
    with pq.ParquetWriter(sink, table.schema.with_metadata(metadata)) as writer:
        writer.write_table(table.replace_schema_metadata(metadata))
        if MARK in content:
            writer.add_key_value_metadata({"seal": (MARK + b"0" * DIGITS).decode()})
    return sink.getvalue()


MUTATORS: dict[str, Callable[[Random, bytes], bytes]] = {
    ".json": mutate_json,
    ".jsonl": mutate_lines,
    ".safetensors": mutate_tensors,
    ".parquet": mutate_parquet,
    ".csv": lambda random, content: mutate_csv(random, content).content,
}

NEEDED = {name: () if name in ("index", "bundle") else ("index", "store") for name in READERS}
"""Folders that a reader needs beside its own."""


def _copy(samples: Samples, name: str, out: Path) -> list[Path]:
    """Copy what a reader needs, and return the files of its own folder."""
    for needed in {name, "splits", *NEEDED[name]}:
        shutil.copytree(samples.folder / OWN / needed, out / needed)
    return files_in(out / name)


def _read(name: str, folder: Path) -> Read:
    """What is read, wherever the folder lies."""
    return Read(*(text.replace(str(folder), "") for text in READERS[name](folder)))


@cache
def _undamaged(samples: Samples, name: str) -> Read:
    with TemporaryDirectory() as folder:
        _copy(samples, name, Path(folder))
        return _read(name, Path(folder))


def hostile(name: str, random: Random, samples: Samples, probe: Probe) -> str:
    """A folder of which one file, now and then two, say something else."""
    files = _copy(samples, name, probe.out)
    for path in random.sample(files, random.choice((1, 1, 1, 2)) if len(files) > 1 else 1):
        content = path.read_bytes()
        changed = MUTATORS[path.suffix](random, content) if random.random() < 0.9 else mutate(random, content, BYTES)
        path.write_bytes(seal_again(changed))
    with probe.watched():
        return attempt(lambda: READERS[name](probe.out))


def flip(random: Random, content: bytes) -> bytes:
    """The content with one bit flipped; one flip in five is around the seal, where it may be taken away."""
    mark = content.find(MARK)
    place: Collection[int] = range(len(content))
    if mark >= 0 and random.random() < 0.2:
        place = range(max(0, mark - 8), min(mark + 20, len(content)))
    number, changed = random.choice(place), bytearray(content)
    changed[number] ^= 1 << random.randrange(8)
    return bytes(changed)


def flipped(name: str, random: Random, samples: Samples, probe: Probe) -> str:
    """A folder with one flipped bit; the outcome names the file."""
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


WEIGHTS = {
    "index": (30, 6),
    "splits": (12, 2),
    "store": (26, 10),
    "job": (6, 2),
    "study": (48, 42),
    "bundle": (24, 14),
}
"""How often the files of a folder are hostile, and how often one of their bits is flipped."""

KINDS: dict[str, tuple[int, Case]] = {
    **{f"own: {name}": (often, partial(hostile, name)) for name, (often, _) in WEIGHTS.items()},
    **{f"flip: {name}": (often, partial(flipped, name)) for name, (_, often) in WEIGHTS.items()},
}
"""Kinds of cases, and how often each is run."""
