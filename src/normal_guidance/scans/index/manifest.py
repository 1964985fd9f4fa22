"""The manifest: one row per scan, with everything that is needed to read it.

Paths are relative to the root in the manifest's metadata, so that a dataset can be moved.
Lists (files, positions, labels) stay in Arrow's memory, about 40 bytes a slice, until a row is read.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, NamedTuple

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from jaxtyping import Float32, Shaped

from normal_guidance.base.errors import ContentError, UserError, reading, shorten
from normal_guidance.base.files import FORMAT, HEAD, read_json_as, read_parquet_about, write_json, write_parquet
from normal_guidance.base.records import Between, parse_json, read_as
from normal_guidance.base.tables import read_columns, refuse_rows

if TYPE_CHECKING:
    from normal_guidance.core.bags import Bags

# Findings are what scans are labelled for: any hemorrhage, and five kinds of it.  `label` and `slice_labels` are those
# of the first finding.  Manifests and stores list their findings in their metadata, and keep the others' labels in
# `label_NAME`, null where it is unknown, and `slice_labels_NAME`.

NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9_-]{0,31}")  # A name is also that of a folder and of a part of columns' names

CODE = re.compile(r"[0-9]{6,18}")  # an identifier of SNOMED CT

OPTION = "--findings"

FINDINGS = "findings.json"
"""In a folder of models, one for each finding in a folder of its name: the findings in order, and those left out."""


@dataclass(frozen=True)
class Finding:
    """One finding: its name, and SNOMED CT's identifier and words for it where they are known."""

    name: str
    code: str | None = None
    meaning: str | None = None

    def __post_init__(self) -> None:
        if not NAME.fullmatch(self.name):
            raise UserError(f"finding {self.name!r}: a name has up to 32 letters, digits, - and _; give it another one")
        if self.code is not None and not CODE.fullmatch(self.code):
            wrong = f"code {self.code!r} is not an identifier of SNOMED CT, which has 6 to 18 digits"
            raise UserError(f"finding {self.name}: {wrong}; correct it, or leave it out")

    def __str__(self) -> str:
        known = [*([self.meaning] if self.meaning else []), *([f"SNOMED CT {self.code}"] if self.code else [])]
        return f"{self.name} ({', '.join(known)})" if known else self.name

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


class Labels(NamedTuple):
    """The labels of a scan and of its slices, for its first finding and, by their names, for further ones."""

    label: int | None  # None where it is unknown; a scan without a label for the first finding is left out
    slices: np.ndarray | None
    further: Mapping[str, Labels] | None = None  # None for no others


def parse_findings(text: str) -> tuple[Finding, ...]:
    """Findings as users give them: names with commas between, each with =CODE where it is known."""
    words = [word.strip() for word in text.split(",")]
    if "" in words:
        raise UserError(f"{OPTION} {text!r}: a name is empty; give names with commas between, as any,epidural")
    pairs = [word.partition("=") for word in words]
    return _unique([Finding(name.strip(), code.strip() if mark else None) for name, mark, code in pairs])


def read_findings(content: Any) -> tuple[Finding, ...]:
    """Findings as a manifest, a store or a model records them; raises a `ContentError` for anything else."""
    findings = read_as(list[Finding], content, "findings")
    try:
        return _unique(findings)
    except UserError as error:
        raise ContentError(str(error)) from error


def _unique(findings: Sequence[Finding]) -> tuple[Finding, ...]:
    seen: set[str] = set()
    for finding in findings:
        if finding.name.casefold() in seen:  # some disks do not tell capitals apart
            raise UserError(f"finding {finding.name!r} occurs twice; give each once")
        seen.add(finding.name.casefold())
    return tuple(findings)


def choose_finding(findings: Sequence[Finding], name: str, where: str) -> Finding:
    """The finding of a name; another name is refused."""
    if not findings:
        raise UserError(f"{where} has no finding {name!r}, but one label without a name; leave it out")
    for finding in findings:
        if finding.name == name:
            return finding
    raise UserError(f"{where} has no finding {name!r}; it has {', '.join(finding.name for finding in findings)}")


def label_column(name: str) -> str:
    """The column of a further finding's labels."""
    return f"label_{name}"


def slices_column(name: str) -> str:
    """The column of a further finding's slice labels."""
    return f"slice_labels_{name}"


def columns_of(findings: Sequence[Finding]) -> dict[str, str]:
    """The columns of labels, and of slice labels, of all findings but the first, which has columns of its own."""
    return {label_column(finding.name): slices_column(finding.name) for finding in findings[1:]}


def with_findings(schema: pa.Schema, findings: Sequence[Finding]) -> pa.Schema:
    """A table's schema with `columns_of` the findings."""
    for label, of_slices in columns_of(findings).items():
        schema = schema.append(pa.field(label, pa.int8())).append(pa.field(of_slices, pa.list_(pa.int8())))
    return schema


def check_labels(
    path: Path, table: pa.Table, findings: Sequence[Finding], slices: pa.ChunkedArray, least: int, again: str
) -> None:
    """Refuses a scan that occurs twice, and labels below `least`, above 1 or not one for each slice."""
    if table.num_rows != len(pc.unique(table["scan_id"])):
        raise UserError(f"{path} is damaged: a scan occurs twice; {again}")
    for label, of_slices in {"label": "slice_labels", **columns_of(findings)}.items():
        wrong = pc.or_(pc.less(table[label], least), pc.greater(table[label], 1))
        refuse_rows(path, table, wrong, f"has a {label} other than 0 and 1", again)
        wrong = pc.not_equal(pc.list_value_length(table[of_slices]), slices)
        refuse_rows(path, table, wrong, f"has not as many {of_slices} as slices", again)
        for value in pc.unique(pc.list_flatten(table[of_slices])).to_pylist():
            if value not in (-1, 0, 1):
                raise UserError(f"{path} is damaged: {of_slices} has the label {value}, not 0 or 1; {again}")


def further_columns(findings: Sequence[Finding], further: Mapping[str, Labels]) -> dict[str, Any]:
    """A scan's values in the columns that `with_findings` adds."""
    values: dict[str, Any] = {}
    for finding in findings[1:]:
        labels = further.get(finding.name, Labels(None, None))
        values |= {label_column(finding.name): labels.label, slices_column(finding.name): labels.slices}
    return values


@dataclass(frozen=True)
class SkippedFinding:
    """A finding without a model."""

    name: str
    reason: str


@dataclass(frozen=True)
class FindingsFile:
    """The content of findings.json."""

    findings: list[Finding]
    skipped: list[SkippedFinding]


def write_findings(folder: Path, findings: Sequence[Finding], skipped: Mapping[str, str] | None = None) -> None:
    """Writes findings.json; `skipped` says why there is no model of a finding, by its name."""
    why = [SkippedFinding(name, reason) for name, reason in (skipped or {}).items()]
    write_json(folder / FINDINGS, asdict(FindingsFile(list(findings), why)))


def findings_in(folder: Path) -> tuple[Finding, ...]:
    """The findings that a folder has models of, in order; none for any other folder."""
    path = folder / FINDINGS
    if not path.is_file():
        return ()
    again = "copy the folder again, or fit again"
    with reading(path, again):
        findings = _unique(read_json_as(path, FindingsFile, again).findings)
    if not findings:
        raise UserError(f"{path} is damaged: it lists no finding; {again}")
    return findings


def refuse_several(folder: Path) -> None:
    """Refuses a folder with models of several findings, where one is wanted."""
    findings = findings_in(folder)
    if findings:
        names, first = ", ".join(finding.name for finding in findings), folder / findings[0].name
        raise UserError(f"{folder} holds a model of each of the findings {names}; give one: {first}")


MANIFEST = "manifest.parquet"

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

PARTS = ("train", "val", "test")  # the parts of a split

FEATURES = "features"  # the kind of a scan without images

BATCH = 1024  # scans per piece of the table

DatasetLabel = int | list[str] | None


@dataclass(frozen=True, eq=False, kw_only=True)
class ManifestExtra:
    """Fields of `ScanRow` that are kept in the column `extra`; all but `instance_numbers` of new scans only."""

    study_uid: str | None = None  # StudyInstanceUID
    series_uid: str | None = None  # SeriesInstanceUID; empty in NIfTI
    series_description: str | None = None
    instance_numbers: tuple[int | None, ...] | None = None
    """InstanceNumber of every slice, None for a slice without one; None where no slice has one, as in NIfTI."""
    body_part: str | None = None  # BodyPartExamined, as DICOM abbreviates it; empty where the headers do not say it
    burned_in: bool | None = None  # whether a header says that the pixels name the patient (BurnedInAnnotation)


IN_EXTRA = tuple(extra.name for extra in fields(ManifestExtra))


@dataclass(frozen=True, eq=False)
class ScanRow(ManifestExtra):
    """One scan, its slices in order."""

    scan_id: str
    patient_id: str
    label: int
    slice_labels: np.ndarray | None  # 0 or 1 for every slice; None where they are unknown
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
    pixel_spacing: tuple[float, float] | None = None  # mm between rows, mm between columns
    slice_spacing: float | None = None  # the median step in mm
    orientation: tuple[float, ...] | None = None
    """Direction cosines of a row and of a column, as in ImageOrientationPatient."""
    modality: str = "CT"
    transfer_syntax: str = ""  # UID; several UIDs are joined by commas
    dataset_labels: Mapping[str, DatasetLabel] = field(default_factory=dict)
    """Other labels that the dataset's tables give the scan, by the names of their sources."""
    further: Mapping[str, Labels] = field(default_factory=dict)
    """Labels for the findings after the first, by their names."""

    def __len__(self) -> int:
        return len(self.files)

    def slice_name(self, position: int) -> str:
        return slice_name(position + 1, self.instance_numbers[position] if self.instance_numbers else None)

    def cut(self, places: Sequence[int]) -> ScanRow:
        """The scan with these slices only, to read their pixels; their labels are left out."""
        return replace(
            self,
            slice_labels=None,
            files=tuple(self.files[place] for place in places),
            frames=tuple(self.frames[place] for place in places),
            positions=tuple(self.positions[place] for place in places),
        )


def beside(model: Path, what: str) -> Path:
    """The folder beside a model that keeps what `nguide fit SCANS` made it from: its "index", its "store"."""
    return model.with_name(f"{model.name}.{what}")


def slice_name(number: int, image: int | None) -> str:
    """The number of a slice, and DICOM's InstanceNumber where there is one: "5 (image 12)"."""
    return str(number) if image is None else f"{number} (image {image})"


@dataclass(frozen=True)
class ManifestHead:
    """What is read from the manifest's metadata."""

    source: str
    root: str


class Manifest:
    """The scans of a manifest, or some of them, and their origin (`about`); a row is built when it is read."""

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
            for first, column in (("label", label_column(name)), ("slice_labels", slices_column(name))):
                table = table.set_column(table.column_names.index(first), SCHEMA.field(first), table[column])
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

    def without_features(self) -> Bags:
        """The scans with nothing but their labels, column by column: rows of a large manifest take seconds."""
        from normal_guidance.core.bags import UNKNOWN, Bags  # torch, which workers that read this module do not need

        lengths, column = self.lengths, self.table["slice_labels"].combine_chunks()
        known, counts = column.is_valid().to_numpy(zero_copy_only=False), column.value_lengths().fill_null(0).to_numpy()
        for number in np.flatnonzero(known & (counts != lengths))[:1]:
            raise UserError(
                f"scan {self.scan_ids[number]!r}: {counts[number]} slice labels for {lengths[number]} slices; {AGAIN}"
            )
        labels = np.full(lengths.sum(), UNKNOWN)
        labels[np.repeat(known, lengths)] = column.flatten().to_numpy(zero_copy_only=False)
        features, slices = np.zeros((len(labels), 1), np.float32), labels if known.any() else None
        return Bags(features, lengths, self.labels, slices, self.scan_ids, self.patient_ids)

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
    def int8(labels: Sequence[int] | None) -> np.ndarray | None:
        return None if labels is None else np.array(labels, np.int8)

    extra = _decode_extra(values.pop("extra"), values["scan_id"])
    lists = {name: tuple(values[name]) for name in ("files", "frames", "positions")}
    optional = {name: values[name] and tuple(values[name]) for name in ("pixel_spacing", "orientation")}
    further = {
        finding.name: Labels(values.pop(label_column(finding.name)), int8(values.pop(slices_column(finding.name))))
        for finding in findings[1:]
    }
    labels = int8(values["slice_labels"])
    return ScanRow(**{**values, **lists, **optional, **extra, "slice_labels": labels, "further": further})


def _decode_extra(text: str | None, scan_id: str) -> dict[str, Any]:
    """The fields of a `ScanRow` in the column `extra`, which may be empty."""
    try:
        values = read_as(dict, parse_json(text or "{}"))
        known = read_as(ManifestExtra, values, exact=False)
        others = {name: value for name, value in values.items() if name not in IN_EXTRA}
        return {**vars(known), "dataset_labels": read_as(dict[str, DatasetLabel], others)}
    except ValueError as error:
        raise UserError(f"scan {shorten(scan_id)!r}: extra is {text!r:.60} ({error}); {AGAIN}") from error


def write_manifest(path: str | Path, rows: Iterable[ScanRow], about: dict[str, Any]) -> Manifest:
    """Writes manifest.parquet and returns its content; `about` has `source`, `root` and, where named, `findings`."""
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
    described = table.replace_schema_metadata({"normal_guidance": json.dumps({HEAD: FORMAT, **about})})
    write_parquet(path, described, compression="zstd")
    return Manifest(table, about)


def _table(rows: list[ScanRow], findings: Sequence[Finding]) -> pa.Table:
    schema = with_findings(SCHEMA, findings)
    lines = []
    for row in rows:
        known = {name: value for name in IN_EXTRA if (value := getattr(row, name)) is not None}
        line = {name: getattr(row, name) for name in SCHEMA.names if name != "extra"}
        line["extra"] = json.dumps({**known, **row.dataset_labels}, sort_keys=True)
        lines.append(line | further_columns(findings, row.further))
    columns = [pa.array([line[name] for line in lines], schema.field(name).type) for name in schema.names]
    return pa.table(columns, schema=schema)


def read_manifest(path: str | Path) -> Manifest:
    """Reads a manifest.parquet, or the one in a folder that `nguide index` made."""
    path = Path(path)
    path = path if path.suffix == ".parquet" else path / MANIFEST
    if not path.is_file():
        command = f": nguide index folder {path.parent} --table labels.csv -o INDEX" if path.parent.is_dir() else ""
        raise UserError(f"{path} is not there; run nguide index first{command}")
    about = read_parquet_about(path, "normal_guidance", AGAIN)
    with reading(path, AGAIN):
        read_as(ManifestHead, about, exact=False)
        findings = read_findings(about.get("findings", []))
    further = columns_of(findings)
    table = read_columns(path, with_findings(SCHEMA, findings), AGAIN, (*NULLABLE, *further, *further.values()))
    _check_columns(path, table, findings)
    return Manifest(table.replace_schema_metadata(), about)


def _check_columns(path: Path, table: pa.Table, findings: Sequence[Finding]) -> None:
    """Refuses a table whose columns do not fit each other, column by column: rows take seconds."""

    def refuse(wrong: pa.ChunkedArray, what: str) -> None:
        refuse_rows(path, table, wrong, what, AGAIN)

    slices = pc.list_value_length(table["files"])
    check_labels(path, table, findings, slices, -1, AGAIN)
    refuse(pc.equal(slices, 0), "has no slice")
    for name in ("frames", "positions"):
        refuse(pc.not_equal(pc.list_value_length(table[name]), slices), f"has not as many {name} as files")
    for name, count in (("pixel_spacing", 2), ("orientation", 6)):
        refuse(pc.not_equal(pc.list_value_length(table[name]), count), f"has not {count} numbers of {name}")
    for name in ("rows", "columns"):
        refuse(pc.less(table[name], 1), f"has no {name}")
    for name in ("positions", "pixel_spacing", "orientation"):
        if not pc.all(pc.is_finite(pc.list_flatten(table[name])), min_count=0).as_py():
            raise UserError(f"{path} is damaged: {name} has a number that is not finite; {AGAIN}")
    refuse(pc.invert(pc.is_finite(table["slice_spacing"])), "has a slice_spacing that is not finite")
    if pc.any(pc.less(pc.list_flatten(table["frames"]), 0), min_count=0).as_py():
        raise UserError(f"{path} is damaged: frames has a number below 0; {AGAIN}")


# The values of a scan in three numbers, which tell CT in HU from other images, windowed copies and masks: a header may
# be wrong, and NIfTI does not say its modality, so a model compares a new scan's values with those it was trained on.

GRID = 32
"""Values that are taken along each side of a slice: about 1,000 a slice tell the ends of the range well enough."""

MOST_VALUES = 2**16  # values of a scan that are looked at: more take milliseconds, and tell no more

PERCENTILES = (0.5, 99.5)  # the ends of the range: a few wrong pixels must not move them

Pixel = Annotated[float, Between(float(np.finfo(np.float32).min), float(np.finfo(np.float32).max))]
"""The value of a pixel, which is a float32."""

Count = Annotated[int, Between(1.0, float(MOST_VALUES))]  # how many different values there are


@dataclass(frozen=True)
class Values:
    """The values of a scan."""

    low: Pixel  # the lower of `PERCENTILES`
    high: Pixel
    distinct: Count  # two in a mask, at most 256 in a windowed copy


def sample_values(slices: Shaped[np.ndarray, "slices rows columns"]) -> Float32[np.ndarray, "values"]:
    """Evenly spread values of some slices."""
    rows, columns = (max(1, side // GRID) for side in slices.shape[1:])
    return slices[:, ::rows, ::columns].astype(np.float32).ravel()


def values_of(sample: Float32[np.ndarray, "values"], modality: str) -> Values:
    """The values of a scan of which `sample` is a sample."""
    some = sample[:: -(-len(sample) // MOST_VALUES)]
    # HU that 12 bits do not hold, such as the padding around a round field of view, count as the ends.
    known = np.clip(some, -1024.0, 3071.0) if modality == "CT" else some
    low, high = np.percentile(known, PERCENTILES)
    return Values(round(float(low), 3), round(float(high), 3), len(np.unique(known)))


def one_class(labels: Iterable[int]) -> str:
    """A line about labels that are all the same, from which no model can learn; empty where both are there."""
    if len(values := {*map(int, labels)}) != 1:
        return ""
    missing = "negative (label 0)" if values.pop() else "positive (label 1)"
    return f"no scan is {missing}, and no model can be fitted to one class; add such scans, or correct the labels"


@dataclass(frozen=True)
class ValueRange:
    """The values of the scans that a model was trained on: from where to where they lie, without the oddest scans."""

    low: tuple[Pixel, Pixel]
    high: tuple[Pixel, Pixel]
    distinct: Count  # of the scans with the fewest different values


def range_of_values(scans: Sequence[Values]) -> ValueRange | None:
    """The range of some scans; None without any."""
    if not scans:
        return None
    values = [(scan.low, scan.high, scan.distinct) for scan in scans]
    # Without the ends: a few odd scans must not widen the range.
    (low, high, distinct), (low_end, high_end, _) = np.percentile(values, (1, 99), axis=0).round(3).tolist()
    return ValueRange((low, low_end), (high, high_end), int(distinct))
