"""The manifest: one row per scan, with everything that reading it later needs.

    manifest.parquet   one row per scan: ids, label, slices in order with their files and positions, geometry
    problems.csv       what was odd (`normal_guidance.data.problems`)

Paths are relative to the root that the manifest's metadata names, so that a dataset can be moved.
Lists (files, positions, labels) stay in Arrow's memory, about 40 bytes a slice, until a row is asked for.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from normal_guidance.errors import UserError
from normal_guidance.files import read_parquet, write_atomically

FORMAT = 1
"""Version of the columns; a manifest of another version is refused."""

SCHEMA = pa.schema(
    {
        "scan_id": pa.string(),
        "patient_id": pa.string(),
        "label": pa.int8(),
        "slice_labels": pa.list_(pa.int8()),
        "kind": pa.dictionary(pa.int8(), pa.string()),
        "files": pa.list_(pa.string()),
        "frames": pa.list_(pa.int32()),
        "positions": pa.list_(pa.float32()),
        "rows": pa.int32(),
        "columns": pa.int32(),
        "pixel_spacing": pa.list_(pa.float32()),
        "slice_spacing": pa.float32(),
        "orientation": pa.list_(pa.float32()),
        "modality": pa.dictionary(pa.int8(), pa.string()),
        "transfer_syntax": pa.string(),
        "extra": pa.string(),
    }
)
"""Columns of manifest.parquet; `slice_labels`, `pixel_spacing`, `slice_spacing` and `orientation` may be null."""

PARTS = ("train", "val", "test")
"""What a scan may be used for."""

BATCH = 1024
"""Scans that are turned into a piece of the table at a time."""


@dataclass(frozen=True, eq=False)
class ScanRow:
    """One scan, its slices in order.

    Example:
        >>> files, labels = ("a/2.dcm", "a/1.dcm"), np.array([0, 1], "i1")
        >>> len(ScanRow("A17", "P1", 1, labels, "dicom", files, (0, 0), (0.0, 5.0), 512, 512))
        2
    """

    scan_id: str
    patient_id: str
    label: int
    slice_labels: np.ndarray | None
    """One 0 or 1 per slice."""
    kind: str
    """'dicom' or 'nifti'."""
    files: tuple[str, ...]
    """Of every slice, relative to the root; 'archive.zip!folder/1.dcm' lies in an archive."""
    frames: tuple[int, ...]
    """Of every slice, its place in its file from 0: always 0 but for multi-frame DICOM and NIfTI."""
    positions: tuple[float, ...]
    """Of every slice, mm along the slice normal, ascending; slice numbers where no position is known."""
    rows: int
    columns: int
    pixel_spacing: tuple[float, float] | None = None
    """mm between rows, mm between columns."""
    slice_spacing: float | None = None
    """The usual step in mm."""
    orientation: tuple[float, ...] | None = None
    """Direction cosines of a row and of a column, as in ImageOrientationPatient."""
    modality: str = "CT"
    transfer_syntax: str = ""
    """UID; several are joined by commas."""
    extra: str = "{}"
    """JSON: what a source adds, for instance other labels of the scan."""

    def __len__(self) -> int:
        return len(self.files)


class Manifest:
    """The scans of a manifest, or some of them; a row is built when it is asked for.

    Args:
        table: the columns of `SCHEMA`.
        about: where it came from: source, root, options, version.
    """

    def __init__(self, table: pa.Table, about: dict[str, Any]) -> None:
        self.table, self.about = table, about

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, number: int) -> ScanRow:
        return _scan_row(self.table.slice(number, 1).to_pylist()[0])

    def __iter__(self) -> Iterator[ScanRow]:
        for batch in self.table.to_batches(max_chunksize=BATCH):
            yield from map(_scan_row, batch.to_pylist())

    @property
    def root(self) -> Path:
        """Where the scans lie."""
        return Path(self.about["root"])

    @property
    def scan_ids(self) -> list[str]:
        return self.table["scan_id"].to_pylist()

    @property
    def patient_ids(self) -> list[str]:
        return self.table["patient_id"].to_pylist()

    @property
    def labels(self) -> np.ndarray:
        return self.table["label"].to_numpy().astype(np.int64)

    @property
    def lengths(self) -> np.ndarray:
        """Slices per scan."""
        return pc.list_value_length(self.table["files"]).to_numpy().astype(np.int64)

    def take(self, numbers: Iterable[int]) -> Manifest:
        """Some of the scans, in this order."""
        return Manifest(self.table.take(pa.array(list(numbers), pa.int64())), self.about)

    def __repr__(self) -> str:
        if not len(self):
            return "Manifest(no scans)"
        lengths, positive = self.lengths, int(self.labels.sum())
        return (
            f"Manifest({len(self)} scans of {lengths.min()}-{lengths.max()} slices (median {int(np.median(lengths))}), "
            f"{lengths.sum()} slices, {positive} positive ({100 * positive / len(self):.1f} %), "
            f"{len(set(self.patient_ids))} patients)"
        )


def _scan_row(values: dict[str, Any]) -> ScanRow:
    labels = values["slice_labels"]
    lists = {name: tuple(values[name]) for name in ("files", "frames", "positions")}
    optional = {name: values[name] and tuple(values[name]) for name in ("pixel_spacing", "orientation")}
    known = None if labels is None else np.array(labels, np.int8)
    return ScanRow(**{**values, **lists, **optional, "slice_labels": known})


def write_manifest(path: str | Path, rows: Iterable[ScanRow], about: dict[str, Any]) -> Manifest:
    """Writes manifest.parquet and returns what it holds.

    `about` names at least the `source` and the `root`.  Scan ids must be unique.
    """
    pieces, batch = [], []
    seen: set[str] = set()
    for row in rows:
        if row.scan_id in seen:
            raise UserError(f"scan {row.scan_id!r} is there twice; scan ids must be unique")
        seen.add(row.scan_id)
        batch.append(row)
        if len(batch) == BATCH:
            pieces.append(_table(batch))
            batch = []
    table = pa.concat_tables([*pieces, _table(batch)])
    about = {"format": FORMAT, **about}
    held = table.replace_schema_metadata({"normal_guidance": json.dumps(about)})
    write_atomically(path, lambda file: pq.write_table(held, file, compression="zstd"))
    return Manifest(table, about)


def _table(rows: list[ScanRow]) -> pa.Table:
    columns = {field.name: [getattr(row, field.name) for row in rows] for field in fields(ScanRow)}
    return pa.table([pa.array(columns[name], SCHEMA.field(name).type) for name in SCHEMA.names], schema=SCHEMA)


def read_manifest(path: str | Path) -> Manifest:
    """Opens manifest.parquet, or the one in a folder that `nguide index` made.

    Example:
        >>> read_manifest("nowhere")
        Traceback (most recent call last):
        normal_guidance.errors.UserError: nowhere/manifest.parquet is not there; run nguide index first
    """
    path = Path(path)
    path = path if path.suffix == ".parquet" else path / "manifest.parquet"
    if not path.is_file():
        raise UserError(f"{path} is not there; run nguide index first")
    try:
        table = read_parquet(path)
        about = json.loads((table.schema.metadata or {}).get(b"normal_guidance", b"{}"))
        version = about.get("format")
        if version == FORMAT:
            return Manifest(table.select(SCHEMA.names).cast(SCHEMA).replace_schema_metadata(), about)
    except (OSError, ValueError, KeyError, pa.ArrowException) as error:
        raise UserError(f"{path} cannot be read ({error}); run nguide index again") from error
    raise UserError(f"{path}: format {version!r}, but this version reads format {FORMAT}; run nguide index again")
