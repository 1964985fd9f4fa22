"""The interface of a source, what sources share, and the source `folder`: any scans with a table of labels."""

from __future__ import annotations

import math
import os
from collections import Counter, deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby, islice
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from normal_guidance.base.errors import UserError, reading, shorten
from normal_guidance.scans.index.containers import Mask, is_nifti, list_files, list_members
from normal_guidance.scans.index.geometry import DUPLICATE_MM, ORIENTATION_DEGREES, normal_of
from normal_guidance.scans.index.labels import BINARY, SLICE_COLUMNS, further_labels, read_labels, slice_labels_in
from normal_guidance.scans.index.manifest import DatasetLabel, Finding, Labels, label_column
from normal_guidance.scans.index.matching import lowest_values, match_files, stem_of
from normal_guidance.scans.index.problems import Problem, Report

if TYPE_CHECKING:
    from normal_guidance.scans.index.dicom_slices import Header
    from normal_guidance.scans.index.geometry import Ordered


LISTED = 10_000
"""Most rows of a label table that are reported one by one: with the wrong table, there would be millions."""


@dataclass(frozen=True)
class SourceOptions:
    """Options of a source besides its root."""

    table: Path | None = None  # `folder`: the table of scans
    labels: str = "image"  # `rsna-at`: 'image' or 'patient'
    findings: tuple[Finding, ...] = ()
    """`folder`: columns of the table with a label each, the first in place of the column label."""


@dataclass(frozen=True)
class FileGroup:
    """Files whose headers are needed together."""

    name: str  # the source's name for the group: the scan, where a group is one
    files: Sequence[str]  # relative to the dataset's root
    masks: Sequence[str] = ()  # volumes that are nonzero in the positive slices, each in some of them
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


@runtime_checkable  # for the checks of shapes
class ScanSource(Protocol):
    """An open source."""

    root: Path  # the folder that the manifest's paths are relative to
    findings: tuple[Finding, ...] = ()  # what the scans are labelled for; empty for one label without a name
    expected_files: int | None = None
    expected_groups: int | None = None
    """Approximate numbers of files and groups, for the progress bar; None where they are unknown."""

    def groups(self) -> Iterator[FileGroup]:
        """All files, in an order that depends only on their names."""

    def scan_of(self, group: FileGroup, series_uid: str) -> str:
        """The id of the scan that a file of this group and series belongs to; empty where it is unknown."""
        return group.name

    def candidates(self, group: FileGroup, headers: Sequence[Header]) -> Iterator[Candidate]:
        """The scans of a group."""

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        """The labels of a scan, and of its slices in their order; masks that cannot be read are not among `masks`."""

    def finish(self) -> None:
        """Reports the labels that have no file, unless `groups` did."""
        return


def read_texts(path: Path, columns: Sequence[str], report: Report) -> dict[str, pa.StringArray]:
    """Columns of a csv file as text; lines with more or fewer fields than the header are reported and left out."""
    bad: list[str] = []

    def refuse(row: csv.InvalidRow) -> str:
        bad.append(f"{row.actual_columns} fields instead of {row.expected_columns}: {row.text[:200]}")
        return "skip"

    convert = csv.ConvertOptions(
        include_columns=list(columns),
        column_types=dict.fromkeys(columns, pa.string()),
        quoted_strings_can_be_null=False,
    )
    wrong = f"cannot be read as a table with the columns {', '.join(columns)}"
    with reading(path, "unpack it again", pa.ArrowException, wrong=wrong):
        table = csv.read_csv(path, parse_options=csv.ParseOptions(invalid_row_handler=refuse), convert_options=convert)
    report_some((bad_row(path, detail) for detail in sorted(bad)), report)
    return {name: pc.utf8_trim_whitespace(table[name].combine_chunks()) for name in columns}


def numbers_of(column: pa.StringArray) -> np.ndarray:
    """The values 0 and 1 of a column of text; -1 for any other text."""
    values = column.dictionary_encode()
    words = [BINARY.get(word.lower(), -1) for word in values.dictionary.to_pylist()]
    return np.array([*words, -1], np.int8)[values.indices.to_numpy(zero_copy_only=False)]


def bad_row(path: Path, detail: str) -> Problem:
    """The problem of an unusable line of a table."""
    return Problem("", path.name, "bad_row", detail, "line left out")


def missing(scan_id: str, file: str, detail: str) -> Problem:
    """The problem of a label whose image is missing."""
    return Problem(scan_id, file, "label_without_image", detail, "label ignored")


def report_some(problems: Iterable[Problem], report: Report) -> None:
    """Reports problems of one kind: the first `LISTED` one by one, the others as a number."""
    rest = iter(problems)
    for problem in islice(rest, LISTED):
        report(problem)
    for more, last in deque(enumerate(rest, start=1), maxlen=1):
        detail = f"{more} more of these; the first {LISTED} are listed"
        report(Problem("", "", last.kind, detail, last.action))


def list_below(root: Path, folder: str, report: Report) -> Iterator[str]:
    """The files of a folder in the root, relative to the root."""
    for file in list_files(root / folder, lambda problem: report(problem._replace(file=f"{folder}/{problem.file}"))):
        yield f"{folder}/{file}"


def series_folders(files: Iterable[str]) -> Iterator[tuple[PurePosixPath, list[str]]]:
    """Groups sorted files by their folder; an archive counts as a folder."""
    for folder, members in groupby(files, lambda file: PurePosixPath(file.replace(".zip!", "/")).parent):
        yield folder, list(members)


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
    files = Counter(header.patient_id for header in headers)
    patient = min(files, key=lambda patient: (-files[patient], patient))
    alone = "scan is its own patient"
    if len(files) > 1:
        detail = ", ".join(f"{name or 'none'} ({files[name]} files)" for name in sorted(files))
        action = f"counts as {patient}" if patient else alone
        report(Problem(scan_id, "", "mixed_patient", f"PatientID {detail}", action))
    elif not patient and not is_nifti(headers[0].file):  # which has no field for it
        report(Problem(scan_id, "", "no_patient", "PatientID is missing or empty", alone))
    return patient


def slices_of_masks(masks: Sequence[Mask], ordered: Ordered) -> np.ndarray:
    """1 for every slice in which one of the masks has a voxel."""
    return np.max([slices_of_mask(mask, ordered) for mask in masks], axis=0)


def slices_of_mask(mask: Mask, ordered: Ordered) -> np.ndarray:
    """Labels a slice positive if a nonzero slice of the mask is nearer than half the larger of the two steps."""
    if not ordered.located or ordered.orientation is None:
        raise ValueError(f"mask {mask.file} cannot be matched: positions of the slices are unknown")
    normal = normal_of(ordered.orientation)
    if abs(float(normal @ normal_of(mask.orientation))) < math.cos(math.radians(ORIENTATION_DEGREES)):
        raise ValueError(f"mask {mask.file} has another orientation than the scan")
    heights = np.array(mask.positions, float) @ normal
    positions, positive = np.array(ordered.positions), np.array(mask.positive, bool)
    step = float(np.median(np.diff(np.sort(heights)))) if len(heights) > 1 else 0.0
    reach = max(step, ordered.spacing or 0.0) / 2 + DUPLICATE_MM
    outside = int((~_near(positions, heights, reach)).sum())
    if outside:
        raise ValueError(f"mask {mask.file} does not cover {outside} of {len(ordered.slices)} slices")
    lost = int((positive & ~_near(heights, positions, reach)).sum())
    if lost:
        raise ValueError(f"{lost} of {int(positive.sum())} nonzero slices of mask {mask.file} lie outside the scan")
    return _near(positions, heights[positive], reach).astype(np.int8)


def _near(values: np.ndarray, others: np.ndarray, reach: float) -> np.ndarray:
    """For every value, whether one of the others is within reach; sorts, because there may be many thousands."""
    ordered = np.sort(others)
    return np.searchsorted(ordered, values + reach, "right") > np.searchsorted(ordered, values - reach, "left")


# Any scans with a table of labels; docs/howto/scans.md says what its columns hold.  Where a cell of slice labels is
# empty, all slices of a negative scan are negative, and those of a positive scan are unknown.  `mask` and the columns
# of slices without a name are those of the first finding.

SLICES = (*SLICE_COLUMNS, "mask")  # columns that say which slices are positive; a scan may use one of them

COLUMNS = ("scan_id", "path", "label", "patient_id", *SLICES, "modality")

MODALITIES = ("CT", "MR")  # modalities that a table may name, as DICOM abbreviates them


LOOKED_AT = 5  # NIfTI files whose values are read where nothing says what they are
IN_HU = -50.0  # a value as low or lower is in HU: other images have values above 0, or little below


class FolderScans(ScanSource):
    """Scans that a table lists; `guessed` says in words what was taken for granted."""

    def __init__(self, root: Path, options: SourceOptions, report: Report, modality: str = "") -> None:
        if not root.is_dir():
            raise UserError(f"{root} is not a folder; give the one that holds the scans")
        if options.table is None:
            raise UserError("the source folder needs --table FILE (.csv, .parquet) with the scans and their labels")
        self.root, self.report, self.modality = root.resolve(), report, modality
        self.findings = options.findings
        needed = ["scan_id"] if self.findings else ["scan_id", "label"]  # findings are labels
        instead = {"label": SLICES, "scan_id": ("path", "patient_id")}
        columns, _ = read = read_labels(options.table, "table", COLUMNS, needed, self.findings, instead)
        self.guessed = [f"column {read.guesses()}"] if read.guessed else []
        if "scan_id" not in columns:
            by = "path" if "path" in columns else "patient_id"
            columns["scan_id"] = [stem_of(cell) if by == "path" else cell for cell in columns[by]]
            self.guessed.append(f"scans are called by their {by}")
            twice, rows = Counter(columns["scan_id"]).most_common(1)[0] if columns["scan_id"] else ("", 0)
            if by == "patient_id" and rows > 1:  # the label of one scan would go to another of the same patient
                raise UserError(
                    f"table {options.table} has {rows} rows of patient {twice!r}, and no column that tells their scans "
                    "apart; name such a column scan_id, or add a column path with each scan's file or folder"
                )
        self.rows = _usable_rows(options.table, columns, report)
        self.expected_groups = len(self.rows)
        self.found: dict[str, list[str]] | None = None  # the files of scans without a path
        names = {scan_id: row.get("path", scan_id) for scan_id, row in self.rows.items()}
        if "path" not in columns or not any("/" in name or os.path.exists(root / name) for name in names.values()):
            self.found, how = match_files(self.root, options.table, names, report)
            self.guessed.append(how)
        if not modality:
            self.modality = self._modality_of_nifti()

    def _modality_of_nifti(self) -> str:
        """Where nothing says it, by the values of a few files: only CT, in HU, has values far below 0."""
        untold = ((scan_id, row) for scan_id, row in self.rows.items() if not row.get("modality"))
        some = islice(untold, 10 * LOOKED_AT)  # of DICOM folders, not all shall be listed twice
        files = (file for scan_id, row in some for file in self._files(scan_id, row, tell=False)[:1])
        known = list(islice((file for file in files if is_nifti(file)), LOOKED_AT))
        lowest = lowest_values([(self.root, file) for file in known])
        if not lowest:
            return ""
        modality = "CT" if min(lowest) <= IN_HU else "MR"
        self.guessed.append(
            f"NIfTI scans are {modality}: the lowest value of {len(lowest)} of them is {min(lowest):g} (a column "
            "modality with CT or MR says otherwise)"
        )
        return modality

    def groups(self) -> Iterator[FileGroup]:
        for scan_id, row in self.rows.items():
            files = self._files(scan_id, row)
            if files:
                mask = self._locate(scan_id, row["mask"]) if row.get("mask") else None
                modality = row.get("modality", "").upper() or (self.modality if is_nifti(files[0]) else "")
                yield FileGroup(scan_id, files, (mask,) if mask else (), modality)

    def _locate(self, scan_id: str, text: str, tell: bool = True) -> str | None:
        """A path of the table, relative to the root; None, with a report, if it is missing or unsafe."""
        outer, mark, inner = text.partition("!")
        kind, detail, path = "label_without_image", "", self.root
        try:
            path = (self.root / outer).resolve()
            there = path.exists()
            if not path.is_relative_to(self.root) or ".." in PurePosixPath(inner).parts:
                kind, detail = "unsafe_path", f"leads out of {self.root}"
            elif not there:
                detail = f"no such file or folder: {self.root / outer} (paths are relative to the folder ROOT)"
                if (self.root.parent / outer).exists():
                    detail += f"; did you mean ROOT = {self.root.parent}?"
        except (OSError, ValueError, RuntimeError) as error:  # too long, a zero byte, links in a circle
            kind, detail = "label_without_image", f"not a valid path: {error}"
        if detail:
            if tell:
                self.report(Problem(scan_id, text, kind, detail, "left out"))
            return None
        return path.relative_to(self.root).as_posix() + mark + inner

    def _files(self, scan_id: str, row: Mapping[str, str], tell: bool = True) -> list[str]:
        if self.found is not None:
            return self.found.get(scan_id, [])
        text, report = row["path"], self.report if tell else lambda problem: None
        path = self._locate(scan_id, text, tell)
        if path is None:
            return []
        outer, _, inner = path.partition("!")
        if (self.root / outer).is_dir():
            files = list(list_below(self.root, outer, report))
        elif outer.lower().endswith(".zip"):
            prefix = f"{outer}!{inner.rstrip('/')}/" if inner else f"{outer}!"
            members = list_members(self.root / outer, f"{outer}!", report)
            files = [file for file in members if file.startswith(prefix) or file == path]
        else:
            files = [outer]
        if not files:
            report(Problem(scan_id, text, "label_without_image", "no file in it", "left out"))
        return files

    def candidates(self, group: FileGroup, headers: Sequence[Header]) -> Iterator[Candidate]:
        if headers:
            series = largest_series(group.name, headers, self.report)
            patient = self.rows[group.name].get("patient_id") or patient_of(group.name, series, self.report)
            yield Candidate(group.name, patient or group.name, series)

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        row, further = self.rows[candidate.scan_id], dict[str, Labels]()
        for finding in self.findings[1:]:
            try:
                labels = further_labels(row, finding, len(ordered.slices))
            except ValueError as error:
                self._mismatch(row, f"{finding.name}: {error}", "slice labels left out")
                labels = Labels(BINARY.get(row[label_column(finding.name)].lower()), None)
            further[finding.name] = labels
        label = BINARY.get(row.get("label", "").lower())
        try:
            slices = self._slices(row, label, ordered, masks)
        except ValueError as error:
            self._mismatch(row, str(error), "slice labels left out")
            slices = None
        if slices is not None and label not in (None, int(slices.any())):
            detail = f"label is {label}, but {int(slices.sum())} of {len(slices)} slices are positive"
            self._mismatch(row, detail, f"scan counts as {label}, slice labels left out")
            slices = None
        if slices is not None:
            label = int(slices.any())
        if label is None:
            detail = "neither a label nor slice labels"
            self.report(Problem(row["scan_id"], row.get("path", ""), "image_without_label", detail, "left out"))
        return Labels(label, slices, further)

    def _mismatch(self, row: Mapping[str, str], detail: str, action: str) -> None:
        self.report(Problem(row["scan_id"], "", "label_mismatch", detail, action))

    def _slices(
        self, row: Mapping[str, str], label: int | None, ordered: Ordered, masks: Sequence[Mask]
    ) -> np.ndarray | None:
        """The labels of the slices in order, or None; raises a ValueError if they do not fit."""
        given = [name for name in SLICES if row.get(name)]
        if len(given) > 1:
            raise ValueError(f"{' and '.join(given)} are given; give one of them")
        if row.get("mask"):
            return slices_of_masks(masks, ordered) if masks else None
        if not given and label == 0 and not row.keys().isdisjoint(SLICES):
            return np.zeros(len(ordered.slices), np.int8)
        return slice_labels_in(row, len(ordered.slices))


def _usable_rows(path: Path, columns: Mapping[str, Sequence[str]], report: Report) -> dict[str, dict[str, str]]:
    """The cells of each scan by column; rows that cannot be used are reported."""
    rows: dict[str, dict[str, str]] = {}
    first = ""
    for number, cells in enumerate(zip(*columns.values(), strict=True), start=1):
        row = dict(zip(columns, cells, strict=True))
        wrong = _wrong_cell(row)
        if wrong:
            first = first or f"; row {number}: {wrong}"
            report(Problem(row["scan_id"], path.name, "bad_row", f"row {number}: {wrong}", "left out"))
        elif row["scan_id"] in rows:
            detail = f"row {number}: scan_id occurs twice"
            report(Problem(row["scan_id"], path.name, "double_scan", detail, "the first row counts"))
        else:
            rows[row["scan_id"]] = row
    if not rows:
        raise UserError(f"table {path} has no usable row{first}; each needs a scan and a label, 0 or 1")
    return rows


def _wrong_cell(row: Mapping[str, str]) -> str:
    """What is wrong with a row, in words; empty if it can be used."""
    if not row["scan_id"] or not row.get("path", "."):
        return "scan_id or path is empty"
    for name, cell in row.items():
        if (name == "label" or name.startswith("label_")) and cell and cell.lower() not in BINARY:
            return f"{name.replace('_', ' of ', 1)} {shorten(cell)!r} is neither 0 nor 1"
    modality = row.get("modality", "")
    known = modality.upper() in ("", *MODALITIES)
    return "" if known else f"modality {modality!r} is not one of {', '.join(MODALITIES)}"
