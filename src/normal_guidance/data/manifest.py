"""The manifest: one row per scan, with everything that is needed to read it.

    manifest.parquet   one row per scan: ids, label, slices in order with their files and positions, geometry
    problems.csv       problems of the scans (`normal_guidance.data.problems`)

Further findings have two more columns each (`normal_guidance.data.findings`).

Paths are relative to the root in the manifest's metadata, so that a dataset can be moved.
Lists (files, positions, labels) stay in Arrow's memory, about 40 bytes a slice, until a row is read.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from normal_guidance.data.findings import (
    Finding,
    Labels,
    choose_finding,
    further_columns,
    label_column,
    read_findings,
    slices_column,
    with_findings,
)
from normal_guidance.data.typed_tables import read_columns, refuse_rows
from normal_guidance.errors import UserError, shorten
from normal_guidance.files import read_parquet_about, write_parquet
from normal_guidance.typed_json import ContentError, parse_json, read_as

MANIFEST = "manifest.parquet"

FORMAT = 1
"""Version of the columns; manifests of other versions are refused."""

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
"""Columns of manifest.parquet; `slice_labels`, `pixel_spacing`, `slice_spacing` and `orientation` may be null.

`extra` is a JSON object: the fields `IN_EXTRA` of a `ScanRow` that are known, and its `dataset_labels`.
"""

NULLABLE = ("slice_labels", "pixel_spacing", "slice_spacing", "orientation", "extra")

AGAIN = "run nguide index again"

PARTS = ("train", "val", "test")
"""The parts of a split."""

FEATURES = "features"
"""The kind of a scan without images."""

BATCH = 1024
"""Scans per piece of the table."""


DatasetLabel = int | list[str] | None


class Extra(NamedTuple):
    """Fields of `ScanRow` that are kept in the column `extra`."""

    study_uid: str | None = None
    series_uid: str | None = None
    series_description: str | None = None
    instance_numbers: tuple[int | None, ...] | None = None
    body_part: str | None = None
    burned_in: bool | None = None


IN_EXTRA = Extra._fields


@dataclass(frozen=True, eq=False)
class ScanRow:
    """One scan, its slices in order."""

    scan_id: str
    patient_id: str
    label: int
    slice_labels: np.ndarray | None
    """0 or 1 for every slice; None where they are unknown."""
    kind: str
    """'dicom' or 'nifti'; `FEATURES` for a new scan of which only the features are known, which no manifest lists."""
    files: tuple[str, ...]
    """The file of every slice, relative to the root; 'archive.zip!folder/1.dcm' lies in an archive."""
    frames: tuple[int, ...]
    """The place of every slice in its file, from 0; always 0 except in multi-frame DICOM and NIfTI."""
    positions: tuple[float, ...]
    """The position of every slice in mm along the slice normal, ascending; slice numbers where it is unknown."""
    rows: int
    columns: int
    pixel_spacing: tuple[float, float] | None = None
    """mm between rows, mm between columns."""
    slice_spacing: float | None = None
    """The median step in mm."""
    orientation: tuple[float, ...] | None = None
    """Direction cosines of a row and of a column, as in ImageOrientationPatient."""
    modality: str = "CT"
    transfer_syntax: str = ""
    """UID; several UIDs are joined by commas."""
    study_uid: str | None = None
    """StudyInstanceUID; this and the next five are kept for new scans only, and None for scans of a dataset."""
    series_uid: str | None = None
    """SeriesInstanceUID; empty in NIfTI."""
    series_description: str | None = None
    instance_numbers: tuple[int | None, ...] | None = None
    """InstanceNumber of every slice, None for a slice without one."""
    body_part: str | None = None
    """BodyPartExamined, as DICOM abbreviates it; empty where the headers do not say it."""
    burned_in: bool | None = None
    """Whether a header says that the pixels name the patient (BurnedInAnnotation)."""
    dataset_labels: Mapping[str, DatasetLabel] = field(default_factory=dict)
    """Other labels that the dataset's tables give the scan, by the names of `normal_guidance.data.sources`."""
    further: Mapping[str, Labels] = field(default_factory=dict)
    """Labels for the findings after the first, by their names."""

    def __len__(self) -> int:
        return len(self.files)


class Manifest:
    """The scans of a manifest, or some of them; a row is built when it is read.

    Args:
        table: the columns of `SCHEMA`, and those of the findings.
        about: the origin: source, root, options, version, and the findings where they have names.
    """

    def __init__(self, table: pa.Table, about: dict[str, Any]) -> None:
        self.table, self.about = table, about

    def __len__(self) -> int:
        return self.table.num_rows

    def __getitem__(self, number: int) -> ScanRow:
        return _scan_row(self.table.slice(number, 1).to_pylist()[0], self.findings)

    def __iter__(self) -> Iterator[ScanRow]:
        findings = self.findings
        for batch in self.table.to_batches(max_chunksize=BATCH):
            yield from (_scan_row(values, findings) for values in batch.to_pylist())

    @property
    def root(self) -> Path:
        """The folder that all paths are relative to."""
        return Path(self.about["root"])

    @property
    def findings(self) -> tuple[Finding, ...]:
        """What the scans are labelled for, the label's own first; empty for one label without a name."""
        return read_findings(self.about.get("findings", []))

    def of_finding(self, name: str) -> Manifest:
        """The scans with the labels of one finding, without those for which it is unknown."""
        finding = choose_finding(self.findings, name, f"the index of {self.root}")
        about, table = {**self.about, "findings": [finding.as_json()]}, self.table
        if finding != self.findings[0]:
            table = table.filter(pc.is_valid(table[label_column(name)]))
            for own, column in (("label", label_column(name)), ("slice_labels", slices_column(name))):
                table = table.set_column(table.column_names.index(own), SCHEMA.field(own), table[column])
        return Manifest(table.select(SCHEMA.names), about)

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
        """Returns the scans with these row numbers, in this order."""
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


def _scan_row(values: dict[str, Any], findings: Sequence[Finding]) -> ScanRow:
    extra = _decode_extra(values.pop("extra"), values["scan_id"])
    labels = values["slice_labels"]
    lists = {name: tuple(values[name]) for name in ("files", "frames", "positions")}
    optional = {name: values[name] and tuple(values[name]) for name in ("pixel_spacing", "orientation")}
    further = {
        one.name: Labels(values.pop(label_column(one.name)), _int8(values.pop(slices_column(one.name))))
        for one in findings[1:]
    }
    return ScanRow(**{**values, **lists, **optional, **extra, "slice_labels": _int8(labels), "further": further})


def _int8(labels: Sequence[int] | None) -> np.ndarray | None:
    return None if labels is None else np.array(labels, np.int8)


def _encode_extra(row: ScanRow) -> str:
    known = {name: value for name in IN_EXTRA if (value := getattr(row, name)) is not None}
    return json.dumps({**known, **row.dataset_labels}, sort_keys=True)


def _decode_extra(text: str | None, scan_id: str) -> dict[str, Any]:
    """The fields of a `ScanRow` in the column `extra`, which may be empty."""
    try:
        found = read_as(dict, parse_json(text or "{}"))
        known = read_as(Extra, found, exact=False)
        others = {name: value for name, value in found.items() if name not in IN_EXTRA}
        return {**known._asdict(), "dataset_labels": read_as(dict[str, DatasetLabel], others)}
    except ValueError as error:
        raise UserError(f"scan {shorten(scan_id)!r}: extra is {text!r:.60} ({error}); {AGAIN}") from error


def write_manifest(path: str | Path, rows: Iterable[ScanRow], about: dict[str, Any]) -> Manifest:
    """Writes manifest.parquet and return its content.

    `about` holds at least `source` and `root`, and the `findings` as JSON if they have names.  Scan ids must be unique.
    """
    findings = read_findings(about.get("findings", []))
    pieces, batch = [], []
    seen: set[str] = set()
    for row in rows:
        if row.scan_id in seen:
            raise UserError(f"scan {row.scan_id!r} occurs twice; scan ids must be unique")
        seen.add(row.scan_id)
        batch.append(row)
        if len(batch) == BATCH:
            pieces.append(_table(batch, findings))
            batch = []
    table = pa.concat_tables([*pieces, _table(batch, findings)])
    about = {"format": FORMAT, **about}
    held = table.replace_schema_metadata({"normal_guidance": json.dumps(about)})
    write_parquet(path, held, compression="zstd")
    return Manifest(table, about)


def _table(rows: list[ScanRow], findings: Sequence[Finding]) -> pa.Table:
    schema = with_findings(SCHEMA, findings)
    further = [further_columns(findings, row.further) for row in rows]

    def column(name: str) -> list[Any]:
        if name not in SCHEMA.names:
            return [values[name] for values in further]
        return [_encode_extra(row) if name == "extra" else getattr(row, name) for row in rows]

    return pa.table([pa.array(column(name), schema.field(name).type) for name in schema.names], schema=schema)


def read_manifest(path: str | Path) -> Manifest:
    """Reads a manifest.parquet, or the one in a folder that `nguide index` made."""
    path = Path(path)
    path = path if path.suffix == ".parquet" else path / MANIFEST
    if not path.is_file():
        raise UserError(f"{path} is not there; run nguide index first")
    about = read_parquet_about(path, "normal_guidance", AGAIN)
    if about.get("format") != FORMAT:
        raise UserError(f"{path}: format {about.get('format')!r:.60}, but this version reads format {FORMAT}; {AGAIN}")
    try:
        read_as(_About, about, exact=False)
        findings = read_findings(about.get("findings", []))
    except ContentError as error:
        raise UserError(f"{path} is damaged: {error}; {AGAIN}") from error
    except UserError as error:  # a finding's own checks
        raise UserError(f"{path}: {error}") from error
    further = [name for one in findings[1:] for name in (label_column(one.name), slices_column(one.name))]
    table = read_columns(path, with_findings(SCHEMA, findings), AGAIN, (*NULLABLE, *further))
    _check_columns(path, table, findings)
    return Manifest(table.replace_schema_metadata(), about)


@dataclass(frozen=True)
class _About:
    """The types of what is read from the manifest's metadata."""

    format: int
    source: str
    root: str


def _check_columns(path: Path, table: pa.Table, findings: Sequence[Finding]) -> None:
    """Refuses a table whose columns do not fit each other, column by column: rows take seconds."""

    def refuse(wrong: pa.ChunkedArray, what: str) -> None:
        refuse_rows(path, table, wrong, what, AGAIN)

    if table.num_rows != len(pc.unique(table["scan_id"])):
        raise UserError(f"{path} is damaged: a scan occurs twice; {AGAIN}")
    slices = pc.list_value_length(table["files"])
    refuse(pc.equal(slices, 0), "has no slice")
    for name in ("frames", "positions"):
        refuse(pc.not_equal(pc.list_value_length(table[name]), slices), f"has not as many {name} as files")
    for name, count in (("pixel_spacing", 2), ("orientation", 6)):
        refuse(pc.not_equal(pc.list_value_length(table[name]), count), f"has not {count} numbers of {name}")
    for name in ("rows", "columns"):
        refuse(pc.less(table[name], 1), f"has no {name}")
    labels = {"label": "slice_labels"} | {label_column(one.name): slices_column(one.name) for one in findings[1:]}
    for label, of_slices in labels.items():
        refuse(pc.or_(pc.less(table[label], -1), pc.greater(table[label], 1)), f"has a {label} other than 0 and 1")
        refuse(pc.not_equal(pc.list_value_length(table[of_slices]), slices), f"has not as many {of_slices} as files")
        for value in pc.unique(pc.list_flatten(table[of_slices])).to_pylist():
            if value not in (-1, 0, 1):
                raise UserError(f"{path} is damaged: {of_slices} has the label {value}, not 0 or 1; {AGAIN}")
    for name in ("positions", "pixel_spacing", "orientation"):
        if not pc.all(pc.is_finite(pc.list_flatten(table[name])), min_count=0).as_py():
            raise UserError(f"{path} is damaged: {name} has a number that is not finite; {AGAIN}")
    refuse(pc.invert(pc.is_finite(table["slice_spacing"])), "has a slice_spacing that is not finite")
    if pc.any(pc.less(pc.list_flatten(table["frames"]), 0), min_count=0).as_py():
        raise UserError(f"{path} is damaged: frames has a number below 0; {AGAIN}")
