"""The interface of a source, and functions that sources share: label tables, and slice labels by file.

A source opens a root and its label tables.  It lists groups of files whose headers are needed together, turns the
headers of a group into candidate scans, and labels each scan when its slices are in order.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from normal_guidance.base.errors import UserError, shorten
from normal_guidance.scans.index.containers import Mask, list_files, list_members
from normal_guidance.scans.index.geometry import DUPLICATE_MM, ORIENTATION_DEGREES, normal_of
from normal_guidance.scans.index.labels import (
    BINARY,
    further_labels,
    parse_labels,
    parse_ranges,
    read_labels,
)
from normal_guidance.scans.index.manifest import DatasetLabel, Finding, Labels, label_column
from normal_guidance.scans.index.problems import Problem, Report

if TYPE_CHECKING:
    from normal_guidance.scans.index.dicom_slices import Header
    from normal_guidance.scans.index.geometry import Ordered


LISTED = 10_000
"""Most rows of a label table that are reported one by one: with the wrong table, there would be millions."""

OWN_PATIENT = "scan is its own patient"
"""The action for a scan without PatientID."""


@dataclass(frozen=True)
class SourceOptions:
    """Options of a source besides its root."""

    table: Path | None = None
    """`folder`: the table of scans."""
    labels: str = "image"
    """`rsna-at`: 'image' or 'patient'."""
    findings: tuple[Finding, ...] = ()
    """`folder`: columns of the table with a label each, the first in place of the column label."""


@dataclass(frozen=True)
class Group:
    """Files whose headers are needed together."""

    name: str
    """The source's name for the group: the scan, where a group is one."""
    files: Sequence[str]
    """Relative to the dataset's root."""
    masks: Sequence[str] = ()
    """Volumes that are nonzero in the positive slices, each in some of them."""
    modality: str = ""
    """As DICOM abbreviates it, where the source knows it: other DICOM files are refused, and NIfTI counts as it."""


@dataclass(frozen=True)
class Candidate:
    """A scan before its slices are in order."""

    scan_id: str
    patient_id: str
    headers: Sequence[Header]
    known: Mapping[str, int] = field(default_factory=dict)
    """Slice labels by file; empty where the source labels slices otherwise."""
    dataset_labels: Mapping[str, DatasetLabel] = field(default_factory=dict)
    """Other labels of the scan, for its row of the manifest."""


@runtime_checkable
class ScanSource(Protocol):
    """An open source."""

    root: Path
    """The folder that the manifest's paths are relative to."""
    findings: tuple[Finding, ...]
    """What the scans are labelled for; empty for one label without a name."""
    expected_files: int | None
    expected_groups: int | None
    """Approximate numbers of files and groups, for the progress bar; None where they are unknown."""

    def groups(self) -> Iterator[Group]:
        """All files, in an order that depends only on their names."""

    def scan_of(self, group: Group, series_uid: str) -> str:
        """The id of the scan that a file of this group and series belongs to; empty where it is unknown."""

    def candidates(self, group: Group, headers: Sequence[Header]) -> Iterator[Candidate]:
        """The scans of a group."""

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        """The labels of a scan, and of its slices in their order; masks that cannot be read are not among `masks`."""

    def finish(self) -> None:
        """Reports the labels that have no file."""


def find_base(root: Path, competition: str, files: Sequence[str], folder: str) -> Path:
    """The folder with the tables and images as Kaggle distributes them: `root`, or the competition's folder in it."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give the folder that holds {', '.join(files)} and {folder}")
    base = next((base for base in (root, root / competition) if (base / files[0]).is_file()), root)
    for file in files:
        if not (base / file).is_file():
            raise UserError(f"{base / file} is not there; unpack the table from Kaggle's {competition} to that place")
    if not (base / folder).is_dir():
        raise UserError(f"{base / folder} is not a folder; unpack the images of Kaggle's {competition} to that place")
    return base


def read_texts(path: Path, columns: Sequence[str], report: Report) -> dict[str, pa.StringArray]:
    """Columns of a csv file as text; lines with more or fewer fields than the header are reported and left out."""
    bad: list[str] = []

    def refuse(row: csv.InvalidRow) -> str:
        bad.append(f"{row.actual_columns} fields instead of {row.expected_columns}: {row.text[:200]}")
        return "skip"

    try:
        table = csv.read_csv(
            path,
            parse_options=csv.ParseOptions(invalid_row_handler=refuse),
            convert_options=csv.ConvertOptions(
                include_columns=list(columns),
                column_types=dict.fromkeys(columns, pa.string()),
                quoted_strings_can_be_null=False,
            ),
        )
    except (OSError, KeyError, ValueError, pa.ArrowException) as error:  # Arrow raises a ValueError for bad content
        raise UserError(
            f"{path} cannot be read as a table with the columns {', '.join(columns)} ({error}); unpack it again"
        ) from error
    report_some((bad_row(path, detail) for detail in sorted(bad)), report)
    return {name: pc.utf8_trim_whitespace(table[name].combine_chunks()) for name in columns}


def bad_row(path: Path, detail: str) -> Problem:
    """The problem of an unusable line of a table."""
    return Problem("", path.name, "bad_row", detail, "line left out")


def numbers_of(column: pa.StringArray) -> np.ndarray:
    """The values 0 and 1 of a column of text; -1 for any other text."""
    values = column.dictionary_encode()
    words = [BINARY.get(word.lower(), -1) for word in values.dictionary.to_pylist()]
    return np.array([*words, -1], np.int8)[values.indices.to_numpy(zero_copy_only=False)]


def list_below(root: Path, folder: str, report: Report) -> Iterator[str]:
    """The files of a folder in the root, relative to the root."""
    for file in list_files(root / folder, lambda problem: report(problem._replace(file=f"{folder}/{problem.file}"))):
        yield f"{folder}/{file}"


def series_folders(files: Iterable[str]) -> Iterator[tuple[PurePosixPath, list[str]]]:
    """Groups sorted files by their folder; an archive counts as a folder."""
    folder, held = PurePosixPath("."), list[str]()
    for file in files:
        own = PurePosixPath(file.replace(".zip!", "/")).parent
        if held and own != folder:
            yield folder, held
            held = []
        folder = own
        held.append(file)
    if held:
        yield folder, held


def largest_series(scan_id: str, headers: Sequence[Header], report: Report) -> Sequence[Header]:
    """The series with the most slices; of equally large ones, the one whose UID sorts first."""
    series: dict[str, list[Header]] = {}
    for header in headers:
        series.setdefault(header.series_uid, []).append(header)
    if len(series) < 2:
        return headers
    sizes = {uid: sum(header.frames for header in members) for uid, members in series.items()}
    chosen, *others = sorted(series, key=lambda uid: (-sizes[uid], uid))
    for uid in others:
        detail = f"series {uid or 'without UID'} with {sizes[uid]} slices beside {chosen} with {sizes[chosen]}"
        report(Problem(scan_id, series[uid][0].file, "mixed_series", detail, "left out; the largest series is kept"))
    return series[chosen]


def patient_of(scan_id: str, headers: Sequence[Header], report: Report) -> str:
    """The PatientID of most slices; empty where they have none, and the scan is its own patient."""
    patients = Counter(header.patient_id for header in headers)
    patient = min(patients, key=lambda one: (-patients[one], one))
    if len(patients) > 1:
        detail = ", ".join(f"{one or 'none'} ({patients[one]} files)" for one in sorted(patients))
        action = f"counts as {patient}" if patient else OWN_PATIENT
        report(Problem(scan_id, "", "mixed_patient", f"PatientID {detail}", action))
    elif not patient:
        report(Problem(scan_id, "", "no_patient", "PatientID is missing or empty", OWN_PATIENT))
    return patient


def stem(file: str) -> str:
    """A file's name without folder, archive and ending."""
    return PurePosixPath(file.replace("!", "/")).stem


def label_files(
    scan_id: str, headers: Sequence[Header], find: Callable[[Header], int | None], report: Report
) -> tuple[list[Header], dict[str, int]]:
    """The slices that have a label, and these labels by file; the other slices are reported."""
    found = {header.file: find(header) for header in headers}
    known = {file: label for file, label in found.items() if label is not None}
    if not known:
        report(Problem(scan_id, "", "image_without_label", f"none of its {len(found)} files has a label", "left out"))
    else:
        for file, label in found.items():
            if label is None:
                report(Problem(scan_id, file, "image_without_label", "no row of the label table", "left out"))
    return [header for header in headers if header.file in known], known


def join_files(candidate: Candidate, ordered: Ordered, report: Report) -> Labels:
    """Labels of ordered slices from labels by file; a scan is positive if one of its slices is."""
    slices = np.array([candidate.known[file] for file, _ in ordered.slices], np.int8)
    label = int(slices.any())
    kept = {file for file, _ in ordered.slices}
    lost = [file for file, value in candidate.known.items() if value and file not in kept]
    if lost:
        detail = f"{len(lost)} positive slices were left out, first {lost[0]}"
        report(Problem(candidate.scan_id, lost[0], "label_mismatch", detail, f"scan counts as {label} by the others"))
    return Labels(label, slices)


def report_some(problems: Iterable[Problem], report: Report) -> None:
    """Reports problems of one kind: the first `LISTED` one by one, the others as a number."""
    more, last = 0, None
    for number, problem in enumerate(problems):
        if number < LISTED:
            report(problem)
        else:
            more, last = more + 1, problem
    if last is not None:
        detail = f"{more} more of these; the first {LISTED} are listed"
        report(Problem("", "", last.kind, detail, last.action))


def missing(scan_id: str, file: str, detail: str) -> Problem:
    """The problem of a label whose image is missing."""
    return Problem(scan_id, file, "label_without_image", detail, "label ignored")


# Slice labels from mask volumes, matched by position in space; grids and slice orders may differ.


def slices_of_mask(mask: Mask, ordered: Ordered) -> np.ndarray:
    """Labels a slice positive if a nonzero slice of the mask is nearer than half the larger of the two steps.

    Raises a ValueError if positions are unknown, or if the mask has another orientation, does not cover the scan, or
    is nonzero outside it.
    """
    if not ordered.located or ordered.orientation is None:
        raise ValueError(f"mask {mask.file} cannot be matched: positions of the slices are unknown")
    normal = normal_of(ordered.orientation)
    if abs(float(normal @ normal_of(mask.orientation))) < math.cos(math.radians(ORIENTATION_DEGREES)):
        raise ValueError(f"mask {mask.file} has another orientation than the scan")
    heights = np.array(mask.positions, float) @ normal
    places, positive = np.array(ordered.positions), np.array(mask.positive, bool)
    reach = max(_step(heights), ordered.spacing or 0.0) / 2 + DUPLICATE_MM
    outside = int((~_near(places, heights, reach)).sum())
    if outside:
        raise ValueError(f"mask {mask.file} does not cover {outside} of {len(ordered.slices)} slices")
    lost = int((positive & ~_near(heights, places, reach)).sum())
    if lost:
        raise ValueError(f"{lost} of {int(positive.sum())} nonzero slices of mask {mask.file} lie outside the scan")
    return _near(places, heights[positive], reach).astype(np.int8)


def slices_of_masks(masks: Sequence[Mask], ordered: Ordered) -> np.ndarray:
    """Labels a slice positive if it is by one of the masks; raises a ValueError if one of them does not fit."""
    return np.max([slices_of_mask(mask, ordered) for mask in masks], axis=0)


def _near(values: np.ndarray, others: np.ndarray, reach: float) -> np.ndarray:
    """For every value, whether one of the others is within reach; sorts, because there may be many thousands."""
    ordered = np.sort(others)
    return np.searchsorted(ordered, values + reach, "right") > np.searchsorted(ordered, values - reach, "left")


def _step(heights: np.ndarray) -> float:
    return float(np.median(np.diff(np.sort(heights)))) if len(heights) > 1 else 0.0


# Any scans with a table of labels: DICOM folders, zip archives or NIfTI files below a root.
# The table (.csv or .parquet) has one row per scan:
#     scan_id        unique
#     path           relative to the root: a folder, a .zip, a .nii or .nii.gz, or a multi-frame DICOM file; a folder in
#                    an archive is written archive.zip!folder
#     label          0 or 1; may be empty where slice labels are given, and is then 1 if one of them is
#     patient_id     optional; the default is DICOM's PatientID; without either, the scan is its own patient
#     slice_labels   optional; 0 and 1 in the order of the slices: '0 0 1 1', '[0, 0, 1, 1]' or a list
#     slice_ranges   optional; the positive slices, counted from 0, both ends included: '12-20;31-33'
#     mask           optional; a NIfTI volume whose nonzero slices are positive, matched to the slices by position
#     modality       optional; CT (the default) or MR
# With findings (`SourceOptions.findings`), each has a column of its name instead of `label`.  The first must be known;
# an empty cell of another one is unknown.  `slice_labels`, `slice_ranges` and `mask` are those of the first finding,
# and `slice_labels_NAME` and `slice_ranges_NAME` those of any.
# Slices are ordered by position along the slice normal, ascending: from the feet to the head in axial scans.  Where a
# cell of slice labels is empty, all slices of a negative scan are negative, and those of a positive scan are unknown.


SLICES = ("slice_labels", "slice_ranges", "mask")
"""Columns that say which slices are positive; a scan may use one of them."""

MODALITIES = ("CT", "MR")
"""Modalities that a table may name, as DICOM abbreviates them."""


@dataclass(frozen=True)
class _Row:
    scan_id: str
    path: str
    label: int | None
    patient_id: str = ""
    slice_labels: str = ""
    slice_ranges: str = ""
    mask: str = ""
    modality: str = ""
    further: Mapping[str, str] = field(default_factory=dict)
    """The cells of further findings, by their columns."""


COLUMNS = tuple(name for name in _Row.__dataclass_fields__ if name != "further")


class FolderScans:
    """Scans that a table lists."""

    expected_files: int | None = None

    def __init__(self, root: Path, options: SourceOptions, report: Report, modality: str = "") -> None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give the one that the table's paths are relative to")
        if options.table is None:
            raise UserError("the source folder needs --table FILE (.csv, .parquet) with scan_id, path and label")
        self.root, self.report, self.modality = root.resolve(), report, modality
        self.findings = options.findings
        columns = _read_table(options.table, options.findings)
        self.sliced = not set(SLICES).isdisjoint(columns)
        self.rows = _rows(options.table, columns, report)
        self.sliced_further = {
            one.name for one in self.findings[1:] if any(f"{kind}_{one.name}" in columns for kind in SLICES)
        }
        self.expected_groups: int | None = len(self.rows)

    def groups(self) -> Iterator[Group]:
        for row in self.rows.values():
            files = self._files(row)
            if files:
                mask = self._place(row, row.mask) if row.mask else None
                yield Group(row.scan_id, files, (mask,) if mask else (), row.modality or self.modality)

    def _place(self, row: _Row, text: str) -> str | None:
        """A path of the table, relative to the root; None, with a report, if it is missing or unsafe."""
        outer, mark, inner = text.partition("!")
        try:
            place = (self.root / outer).resolve()
            there = place.exists()
        except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, links in a circle
            self.report(Problem(row.scan_id, text, "label_without_image", f"not a valid path: {error}", "left out"))
            return None
        if not place.is_relative_to(self.root) or ".." in PurePosixPath(inner).parts:
            self.report(Problem(row.scan_id, text, "unsafe_path", f"leads out of {self.root}", "left out"))
            return None
        if not there:
            detail = f"no such file or folder: {self.root / outer} (paths are relative to the folder ROOT)"
            if (self.root.parent / outer).exists():
                detail += f"; did you mean ROOT = {self.root.parent}?"
            self.report(Problem(row.scan_id, text, "label_without_image", detail, "left out"))
            return None
        return place.relative_to(self.root).as_posix() + mark + inner

    def _files(self, row: _Row) -> list[str]:
        place = self._place(row, row.path)
        if place is None:
            return []
        outer, _, inner = place.partition("!")
        if (self.root / outer).is_dir():
            files = list(list_below(self.root, outer, self.report))
        elif outer.lower().endswith(".zip"):
            prefix = f"{outer}!{inner.rstrip('/')}/" if inner else f"{outer}!"
            members = list_members(self.root / outer, f"{outer}!", self.report)
            files = [file for file in members if file.startswith(prefix) or file == place]
        else:
            files = [outer]
        if not files:
            self.report(Problem(row.scan_id, row.path, "label_without_image", "no file in it", "left out"))
        return files

    def scan_of(self, group: Group, series_uid: str) -> str:
        return group.name

    def candidates(self, group: Group, headers: Sequence[Header]) -> Iterator[Candidate]:
        if headers:
            series = largest_series(group.name, headers, self.report)
            patient = self.rows[group.name].patient_id or patient_of(group.name, series, self.report)
            yield Candidate(group.name, patient or group.name, series)

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        row = self.rows[candidate.scan_id]
        further = {one.name: self._further(row, one, len(ordered.slices)) for one in self.findings[1:]}
        return self._join_first(row, ordered, masks)._replace(further=further)

    def _further(self, row: _Row, finding: Finding, count: int) -> Labels:
        try:
            return further_labels(row.further, finding, count, sliced=finding.name in self.sliced_further)
        except ValueError as error:
            self._mismatch(row, f"{finding.name}: {error}", "slice labels left out")
            return Labels(BINARY.get(row.further[label_column(finding.name)].lower()), None)

    def _join_first(self, row: _Row, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        try:
            slices = self._slices(row, ordered, masks)
        except ValueError as error:
            self._mismatch(row, str(error), "slice labels left out")
            return Labels(self._known(row, row.label), None)
        label = row.label if slices is None else int(slices.any())
        if slices is not None and row.label not in (None, label):
            detail = f"label is {row.label}, but {int(slices.sum())} of {len(slices)} slices are positive"
            self._mismatch(row, detail, f"scan counts as {row.label}, slice labels left out")
            return Labels(row.label, None)
        return Labels(self._known(row, label), slices)

    def _known(self, row: _Row, label: int | None) -> int | None:
        if label is None:
            detail = "neither a label nor slice labels"
            self.report(Problem(row.scan_id, row.path, "image_without_label", detail, "left out"))
        return label

    def _mismatch(self, row: _Row, detail: str, action: str) -> None:
        self.report(Problem(row.scan_id, "", "label_mismatch", detail, action))

    def _slices(self, row: _Row, ordered: Ordered, masks: Sequence[Mask]) -> np.ndarray | None:
        """The labels of the slices in order, or None; raises a ValueError if they do not fit."""
        given = [name for name in SLICES if getattr(row, name)]
        count = len(ordered.slices)
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; give one of them")
        if not given:
            return np.zeros(count, np.int8) if self.sliced and row.label == 0 else None
        if row.mask:
            return slices_of_masks(masks, ordered) if masks else None
        if row.slice_labels:
            labels = parse_labels(row.slice_labels)
            if len(labels) != count:
                raise ValueError(f"{len(labels)} slice labels for {count} slices")
            return labels
        return parse_ranges(row.slice_ranges, count)

    def finish(self) -> None:
        """`groups` reported the rows without files already."""


def _read_table(path: Path, findings: Sequence[Finding]) -> dict[str, list[str]]:
    needed = ["scan_id", "path"] if findings else ["scan_id", "path", "label"]  # findings are labels
    return read_labels(path, "--table", COLUMNS, needed, findings, {"label": SLICES})


def _rows(path: Path, columns: dict[str, list[str]], report: Report) -> dict[str, _Row]:
    rows: dict[str, _Row] = {}
    first = ""

    def refuse(scan_id: str, number: int, why: str) -> None:
        nonlocal first
        first = first or f"; row {number + 1}: {why}"
        report(Problem(scan_id, path.name, "bad_row", f"row {number + 1}: {why}", "left out"))

    for number in range(len(columns["scan_id"])):
        cells = {name: column[number] for name, column in columns.items()}
        values: dict[str, Any] = {name: cell for name, cell in cells.items() if name in COLUMNS}
        further = {name: cell for name, cell in cells.items() if name not in COLUMNS}
        scan_id, word = values["scan_id"], values.get("label", "").lower()
        wrong = _wrong_label(cells) or _wrong_modality(values.get("modality", ""))
        if not scan_id or not values["path"]:
            refuse(scan_id, number, "scan_id or path is empty")
        elif wrong:
            refuse(scan_id, number, wrong)
        elif scan_id in rows:
            detail = f"row {number + 1}: scan_id occurs twice"
            report(Problem(scan_id, path.name, "double_scan", detail, "the first row counts"))
        else:
            known = {"label": BINARY.get(word), "modality": values.get("modality", "").upper()}
            rows[scan_id] = _Row(**{**values, **known}, further=further)
    if not rows:
        raise UserError(f"--table {path} has no usable row{first}; each needs scan_id, path and a label, 0 or 1")
    return rows


def _wrong_label(cells: Mapping[str, str]) -> str:
    """The first label of a row that is neither 0 nor 1 nor empty, in words; empty if all are right."""
    for name, cell in cells.items():
        if (name == "label" or name.startswith("label_")) and cell and cell.lower() not in BINARY:
            return f"{name.replace('_', ' of ', 1)} {shorten(cell)!r} is neither 0 nor 1"
    return ""


def _wrong_modality(word: str) -> str:
    """What is wrong with a row's modality, in words; empty if it is right or missing."""
    if word.upper() in ("", *MODALITIES):
        return ""
    return f"modality {word!r} is not one of {', '.join(MODALITIES)}"
