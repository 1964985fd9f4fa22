"""Any scans with a table of labels: DICOM folders, zip archives or NIfTI files below a root.

The table (.csv or .parquet) has one row per scan:

    scan_id        unique
    path           relative to the root: a folder, a .zip, a .nii or .nii.gz, or a multi-frame DICOM file; a folder in
                   an archive is written archive.zip!folder
    label          0 or 1; may be empty where slice labels are given, and is then 1 if one of them is
    patient_id     optional; the default is DICOM's PatientID; without either, the scan is its own patient
    slice_labels   optional; 0 and 1 in the order of the slices: '0 0 1 1', '[0, 0, 1, 1]' or a list
    slice_ranges   optional; the positive slices, counted from 0, both ends included: '12-20;31-33'
    mask           optional; a NIfTI volume whose nonzero slices are positive, matched to the slices by position
    modality       optional; CT (the default) or MR

With findings (`SourceOptions.findings`), each has a column of its name instead of `label`.  The first must be known; an
empty cell of another one is unknown.  `slice_labels`, `slice_ranges` and `mask` are those of the first finding, and
`slice_labels_NAME` and `slice_ranges_NAME` those of any.

Slices are ordered by position along the slice normal, ascending: from the feet to the head in axial scans.  Where a
cell of slice labels is empty, all slices of a negative scan are negative, and those of a positive scan are unknown.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Any

import numpy as np

from normal_guidance.data.containers import list_members
from normal_guidance.data.file_contents import Mask
from normal_guidance.data.findings import Finding, Labels, label_column
from normal_guidance.data.label_tables import BINARY, further_labels, parse_labels, parse_ranges, read_labels
from normal_guidance.data.problems import Problem, Report
from normal_guidance.data.sources.interface import (
    Candidate,
    Group,
    SourceOptions,
    largest_series,
    list_below,
    patient_of,
)
from normal_guidance.data.sources.masks import slices_of_masks
from normal_guidance.errors import UserError, shorten

if TYPE_CHECKING:
    from normal_guidance.data.dicom_slices import Header
    from normal_guidance.data.geometry import Ordered

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
