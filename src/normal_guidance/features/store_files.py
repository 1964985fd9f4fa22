"""The files of a feature store: their contents, writing and reading.

    store.json                   format, number of features, dtype, provenance, recipe, fingerprint
    index.parquet                one row per scan: ids, label, part, place of its slices, their checksum
    features-00000.safetensors   one tensor `features`, (slices, features); a scan never spans two shards; the
                                 metadata contain the recipe, too

Where scans are labelled for several findings, store.json lists them and index.parquet has two more columns for each
(`normal_guidance.data.findings`).

The recipe is a hash of what turned scans into features: the encoder's weights and the preprocessing.  It is the same
in all files of a store.  `normal_guidance.features.store` is the interface; this module reads and writes its files.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, BinaryIO, Literal, NamedTuple

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import torch
from jaxtyping import Float, Int8
from safetensors import SafetensorError, safe_open
from torch import Tensor

from normal_guidance.data.findings import (
    Finding,
    Labels,
    further_columns,
    label_column,
    read_findings,
    slices_column,
    with_findings,
)
from normal_guidance.data.manifest import PARTS
from normal_guidance.data.typed_tables import read_columns, refuse_rows
from normal_guidance.errors import UserError, shorten
from normal_guidance.features.scan_kind import scans_behind
from normal_guidance.features.store_place import ABOUT, check_store
from normal_guidance.files import read_json, sync, write_json, write_parquet
from normal_guidance.tensor_files import DTYPE_NAMES
from normal_guidance.typed_json import Between, ContentError, read_as

FORMAT = 2
"""Version of the layout on disk."""

FORMATS = (1, 2)
"""Versions that can be read; any other is an error.  Version 1 had no recipe."""

DtypeName = Literal["float16", "bfloat16", "float32", "float64"]
"""The names of the dtypes of features."""

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32, "float64": torch.float64}
"""Number formats that features are stored in, by the name that store.json gives them."""

HEADER_BYTES = 4096
"""Bytes reserved for a shard's header, padded with spaces, so that its features start at a page of memory."""

LACKING = "lacking"
"""The number in a store's provenance of scans that its index has and the store does not; absent if it has all."""

AGAIN = "copy the store again, or write it again"
"""The advice for files that are damaged or do not fit together."""

INDEX = pa.schema(
    {
        "scan_id": pa.string(),
        "patient_id": pa.string(),
        "label": pa.int8(),
        "shard": pa.int32(),
        "first_row": pa.int64(),
        "slices": pa.int32(),
        "slice_labels": pa.list_(pa.int8()),
        "part": pa.string(),
        "sha256": pa.string(),
    }
)
"""Columns of index.parquet; `slice_labels` and `part` may be null."""


class IndexRow(NamedTuple):
    """One scan in the index, with the columns of `INDEX`."""

    scan_id: str
    patient_id: str
    label: int
    shard: int
    first_row: int
    slices: int
    slice_labels: Int8[np.ndarray, "slices"] | None
    part: str | None
    sha256: str


class About(NamedTuple):
    """The content of store.json."""

    features: int
    dtype: torch.dtype
    provenance: dict[str, Any]
    recipe: str
    fingerprint: str
    findings: tuple[Finding, ...] = ()


def fingerprint_rows(rows: Iterable[IndexRow], features: int, dtype: torch.dtype) -> str:
    """SHA-256 of the scans, independent of their order and of their place in the store."""
    digest = hashlib.sha256(json.dumps([features, dtype_name(dtype)]).encode())
    for row in sorted(rows, key=lambda row: row.scan_id):
        slice_labels = None if row.slice_labels is None else row.slice_labels.tolist()
        identity = [row.scan_id, row.patient_id, row.label, row.part, slice_labels, row.sha256]
        digest.update(b"\n" + json.dumps(identity).encode())
    return digest.hexdigest()


def write_about(folder: Path, about: About) -> None:
    """Writes store.json."""
    fields = {"format": FORMAT, **about._asdict(), "dtype": dtype_name(about.dtype)}
    findings = [one.as_json() for one in fields.pop("findings")]
    if findings:
        fields["findings"] = findings
    write_json(folder / ABOUT, fields)


def read_about(folder: Path) -> About:
    """Reads store.json and checks that this version can read the store."""
    check_store(folder)
    path = folder / ABOUT
    fields = read_json(path, AGAIN)
    version = fields.get("format")
    if isinstance(version, int) and version not in FORMATS:
        raise UserError(
            f"{path} has format {version!r}, but this version of normal-guidance reads formats up to {FORMAT}; install "
            "the version that wrote the store, or write the store again"
        )
    try:
        known = read_as(_Content, fields)
        scans_behind(known.provenance)
        if known.format > 1 and "recipe" not in fields:
            raise ContentError("recipe is missing")
        findings = read_findings(known.findings)
    except ContentError as error:
        raise UserError(f"{path} is damaged: {error}; {AGAIN}") from error
    except UserError as error:  # a finding's own checks
        raise UserError(f"{path}: {error}") from error
    return About(known.features, DTYPES[known.dtype], known.provenance, known.recipe, known.fingerprint, findings)


@dataclass(frozen=True)
class _Content:
    """The types of store.json; what has a default came with later versions, or is absent where it is empty."""

    format: int
    features: Annotated[int, Between(1.0, 2.0**31)]
    dtype: DtypeName
    provenance: dict[str, Any]
    fingerprint: str
    recipe: str = ""
    findings: list[Any] = field(default_factory=list)


def write_index(
    folder: Path,
    rows: Iterable[IndexRow],
    findings: Sequence[Finding] = (),
    further: Mapping[str, Mapping[str, Labels]] | None = None,
) -> None:
    """Writes index.parquet; `further` are the labels for all findings but the first, by scan and finding."""
    of_scan = further or {}
    lines = [{**row._asdict(), **further_columns(findings, of_scan.get(row.scan_id, {}))} for row in rows]
    table = pa.Table.from_pylist(lines, schema=with_findings(INDEX, findings))
    write_parquet(folder / "index.parquet", table)


def read_index(folder: Path, findings: Sequence[Finding] = ()) -> pd.DataFrame:
    """Reads index.parquet: the columns of `INDEX` and of the findings, null as None, but NaN for a label."""
    path, schema = folder / "index.parquet", with_findings(INDEX, findings)
    labels = {"label": "slice_labels"} | {label_column(one.name): slices_column(one.name) for one in findings[1:]}
    nullable = {*labels, *labels.values(), "part"} - {"label"}
    table = read_columns(path, schema, AGAIN, tuple(nullable))
    _check_columns(path, table, labels)
    scans: pd.DataFrame = table.to_pandas()
    # A null in a column of strings would become NaN in pandas 3.
    return scans.assign(part=pd.Series(table["part"].to_pylist(), dtype=object))


def _check_columns(path: Path, table: pa.Table, labels: Mapping[str, str]) -> None:
    """Refuses values that no store has, before files are looked for by them."""

    def refuse(wrong: pa.ChunkedArray, what: str) -> None:
        refuse_rows(path, table, wrong, what, AGAIN)

    if not table.num_rows:
        raise UserError(f"{path} is damaged: it lists no scan; {AGAIN}")
    if table.num_rows != len(pc.unique(table["scan_id"])):
        raise UserError(f"{path} is damaged: a scan occurs twice; {AGAIN}")
    for name, least, most in (("slices", 1, 2**31), ("shard", 0, table.num_rows - 1), ("first_row", 0, 2**48)):
        values = table[name].cast(pa.int64())
        refuse(pc.or_(pc.less(values, least), pc.greater(values, most)), f"has an impossible {name}")
    refuse(pc.and_(pc.is_valid(table["part"]), pc.invert(_is_one_of(table["part"], PARTS))), "has an unknown part")
    for label, of_slices in labels.items():
        refuse(pc.invert(_is_one_of(table[label], (0, 1, None))), f"has a {label} other than 0 and 1")
        counted = pc.list_value_length(table[of_slices])
        refuse(pc.not_equal(counted, table["slices"]), f"has not as many {of_slices} as slices")
        if not pc.all(_is_one_of(pc.list_flatten(table[of_slices]), (-1, 0, 1)), min_count=0).as_py():
            raise UserError(f"{path} is damaged: {of_slices} has a label other than 0 and 1; {AGAIN}")


def _is_one_of(column: pa.ChunkedArray, values: Sequence[Any]) -> pa.ChunkedArray:
    return pc.is_in(column, pa.array(values, column.type))


def index_rows(scans: pd.DataFrame) -> list[IndexRow]:
    """The rows of an index as `read_index` returns it."""
    return [IndexRow(*values) for values in zip(*(scans[name].tolist() for name in IndexRow._fields), strict=True)]


def write_shards(
    folder: Path, scans: Iterable[tuple[IndexRow, Tensor]], shard_bytes: int, recipe: str
) -> tuple[list[IndexRow], int, torch.dtype]:
    """Writes all scans in order; returns their rows with shard and first row, the number of features and the dtype."""
    rows: list[IndexRow] = []
    shard, end = -1, 0
    features = torch.empty(0, 0)
    with ExitStack() as opened:
        for row, features in scans:
            if shard < 0 or (end + row.slices) * features.shape[1] * features.itemsize > shard_bytes:
                opened.close()
                shard, end = shard + 1, 0
                path = shard_path(folder, shard)
                file = opened.enter_context(_shard_file(path, features.shape[1], features.dtype, recipe))
            file.write(raw_bytes(features))
            rows.append(row._replace(shard=shard, first_row=end))
            end += row.slices
    return rows, features.shape[1], features.dtype


@contextmanager
def _shard_file(path: Path, features: int, dtype: torch.dtype, recipe: str) -> Iterator[BinaryIO]:
    """A safetensors file to append slices to: the header, which needs their number, is written last.

    safetensors' own writer would need a whole shard in memory.
    """
    with path.open("xb") as file:
        file.seek(HEADER_BYTES)
        yield file
        size = file.tell() - HEADER_BYTES
        slices = size // (features * dtype.itemsize)
        tensor = {"dtype": DTYPE_NAMES[dtype], "shape": [slices, features], "data_offsets": [0, size]}
        header = {"__metadata__": {"recipe": recipe}, "features": tensor}
        length, text = HEADER_BYTES - 8, json.dumps(header).encode()  # after the 8 bytes that hold this length
        if len(text) > length:
            raise UserError(f"recipe {recipe[:50]!r}... has {len(recipe)} characters; give a hash, such as sha256")
        file.seek(0)
        file.write(length.to_bytes(8, "little") + text.ljust(length))
        sync(file)


def raw_bytes(features: Float[Tensor, "slices features"]) -> memoryview:
    """The bytes of contiguous features, not copied; NumPy has no bfloat16, so they are bytes."""
    return features.view(torch.uint8).flatten().numpy().data


def map_shards(folder: Path, scans: pd.DataFrame, about: About) -> tuple[Tensor, ...]:
    """Maps the features of all shards, after checking that the files fit the index and store.json."""
    place = scans.groupby("shard")["slices"].cumsum() - scans["slices"]
    wrong = scans["scan_id"][place != scans["first_row"]].tolist()
    if wrong:
        raise UserError(f"{folder}: in index.parquet, scan {wrong[0]!r} does not follow the scan before it; {AGAIN}")
    slices = scans.groupby("shard")["slices"].sum().reindex(range(int(scans["shard"].max()) + 1), fill_value=0)
    return tuple(
        _map_shard(shard_path(folder, number), (count, about.features), about)
        for number, count in enumerate(slices.tolist())
    )


def _map_shard(path: Path, shape: tuple[int, int], about: About) -> Float[Tensor, "slices features"]:
    """One shard as a view of the mapped file; a page is read when it is first touched."""
    try:
        with safe_open(path, framework="pt") as file:
            shard: Tensor = file.get_tensor("features")
            recipe = (file.metadata() or {}).get("recipe", "")
    except (OSError, SafetensorError) as error:
        if not path.exists():
            raise UserError(f"{path} is missing; {AGAIN}") from error
        what = "cannot be read" if isinstance(error, OSError) else "is damaged"
        raise UserError(f"{path} {what} ({shorten(str(error), 300)}); {AGAIN}") from error
    if recipe != about.recipe:
        raise UserError(
            f"{path} was made by another encoder or preprocessing than the store (recipe {recipe[:12] or 'unknown'}, "
            f"not {about.recipe[:12] or 'unknown'}); features of two recipes must not be mixed: {AGAIN}"
        )
    if (tuple(shard.shape), shard.dtype) != (shape, about.dtype):
        raise UserError(
            f"{path} holds {tuple(shard.shape)} numbers of {dtype_name(shard.dtype)}, but the index needs {shape} of "
            f"{dtype_name(about.dtype)}; {AGAIN}"
        )
    return shard


def dtype_name(dtype: torch.dtype) -> str:
    """The dtype's name in store.json: float32, not torch.float32."""
    return str(dtype).removeprefix("torch.")


def shard_path(folder: Path, number: int) -> Path:
    """The file of a shard."""
    return folder / f"features-{number:05d}.safetensors"
