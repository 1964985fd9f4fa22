"""RSNA Intracranial Hemorrhage Detection (2019): head CT, one flat folder of slices.

    stage_2_train.csv            ID,Label: six rows per slice, ID_<sop>_<type>
    stage_2_train/ID_<sop>.dcm

A scan is a DICOM series; only headers say which slices it has, so all headers are read before the first scan is known.
A slice's label is `any`; the five types of hemorrhage are further findings.  A few rows of the table occur twice, and
one file cannot be read.

Reference: Flanders et al., Construction of a Machine Learning Dataset through Collaboration: The RSNA 2019 Brain CT
Hemorrhage Challenge, Radiology: Artificial Intelligence 2020.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import pyarrow.compute as pc

from normal_guidance.data.file_contents import Mask
from normal_guidance.data.findings import Finding, Labels
from normal_guidance.data.problems import Problem, Report
from normal_guidance.data.sources.interface import (
    Candidate,
    Group,
    SourceOptions,
    bad_row,
    find_base,
    join_files,
    label_files,
    list_below,
    missing,
    numbers_of,
    patient_of,
    read_texts,
    report_some,
    stem,
)

if TYPE_CHECKING:
    from normal_guidance.data.dicom_slices import Header
    from normal_guidance.data.geometry import Ordered

COMPETITION = "rsna-intracranial-hemorrhage-detection"
TABLE, FOLDER = "stage_2_train.csv", "stage_2_train"

TYPES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural", "any")
"""Types of hemorrhage; the last is the slice's label."""

FINDINGS = (Finding("any", "1386000", "Intracranial hemorrhage"), *map(Finding, TYPES[:-1]))
"""pydicom's dictionary of SNOMED CT has the code of `any`, and none of the types'."""


class HeadScans:
    """The 2019 challenge as Kaggle distributes it."""

    findings: tuple[Finding, ...] = FINDINGS
    expected_groups: int | None = None

    def __init__(self, root: Path, options: SourceOptions, report: Report) -> None:
        self.root = find_base(root, COMPETITION, (TABLE,), FOLDER)
        self.report = report
        self.labels = _read_labels(self.root / TABLE, report)
        self.unseen = set(self.labels)
        self.expected_files: int | None = len(self.labels)

    def groups(self) -> Iterator[Group]:
        files = list(list_below(self.root, FOLDER, self.report))
        self.unseen.difference_update(map(_stem, files))
        if files:
            yield Group("", files)

    def scan_of(self, group: Group, series_uid: str) -> str:
        return series_uid

    def candidates(self, group: Group, headers: Sequence[Header]) -> Iterator[Candidate]:
        series: dict[str, list[Header]] = {}
        for header in headers:
            self.unseen.discard(_sop(header))
            series.setdefault(header.series_uid, []).append(header)
        for header in series.pop("", ()):
            self.report(Problem("", header.file, "no_series", "SeriesInstanceUID is missing or empty", "left out"))
        for scan_id in sorted(series):
            candidate = self._candidate(scan_id, series.pop(scan_id))
            if candidate.headers:
                yield candidate

    def _candidate(self, scan_id: str, members: Sequence[Header]) -> Candidate:
        headers, known = label_files(scan_id, members, self._label, self.report)
        bits = [self.labels[key] for header in headers if (key := self._key(header))]
        shown = [name for number, name in enumerate(TYPES[:-1]) if any(bit >> number & 1 for bit in bits)]
        patient = patient_of(scan_id, members, self.report) or scan_id
        return Candidate(scan_id, patient, headers, known, {"types": shown})

    def _key(self, header: Header) -> str | None:
        """A slice's name in the table: its SOPInstanceUID or, where that has no label, its file's name."""
        return next((key for key in (_sop(header), _stem(header.file)) if key in self.labels), None)

    def _label(self, header: Header) -> int | None:
        key = self._key(header)
        if key is None:
            return None
        label = self.labels[key] >> len(TYPES) - 1
        other = self.labels.get(_stem(header.file))
        if other is not None and other >> len(TYPES) - 1 != label:
            detail = f"SOPInstanceUID has label {label}, the file's name another"
            action = "label of its SOPInstanceUID"
            self.report(Problem(header.series_uid, header.file, "label_mismatch", detail, action))
        return label

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        return join_files(candidate, ordered, self.report)._replace(further=self._types(candidate, ordered))

    def _types(self, candidate: Candidate, ordered: Ordered) -> dict[str, Labels]:
        """The labels for each type; a slice of which `any` is 0 shows none."""
        keys = {header.file: self._key(header) for header in candidate.headers}
        bits = np.array([self.labels[keys[file] or ""] for file, _ in ordered.slices])
        shown = bits >> len(TYPES) - 1 & 1
        slices = {name: (bits >> number & shown).astype(np.int8) for number, name in enumerate(TYPES[:-1])}
        return {name: Labels(int(own.any()), own) for name, own in slices.items()}

    def finish(self) -> None:
        files = (f"{FOLDER}/ID_{sop}.dcm" for sop in sorted(self.unseen))
        report_some((missing("", file, "no such file") for file in files), self.report)


def _sop(header: Header) -> str:
    return header.sop_uid.removeprefix("ID_")


def _stem(file: str) -> str:
    return stem(file).removeprefix("ID_")


def _read_labels(path: Path, report: Report) -> dict[str, int]:
    """The types of every slice in the table, as bits; 4.5 million rows take seconds."""
    columns = read_texts(path, ("ID", "Label"), report)
    parts = pc.extract_regex(columns["ID"], r"^(?:ID_)?(?P<sop>.+)_(?P<type>[^_]+)$")
    values = numbers_of(columns["Label"])
    types = pc.fill_null(pc.index_in(pc.struct_field(parts, "type"), pc.cast(list(TYPES), "string")), -1).to_numpy()
    usable = (types >= 0) & (values >= 0)
    bad = (f"ID {columns['ID'][row]}, Label {columns['Label'][row]}" for row in np.flatnonzero(~usable).tolist())
    report_some((bad_row(path, detail) for detail in bad), report)
    encoded = pc.struct_field(parts, "sop").filter(usable).dictionary_encode()
    names = encoded.dictionary.to_pylist()
    cells = encoded.indices.to_numpy() * len(TYPES) + types[usable]
    shape = (len(names), len(TYPES))
    rows = np.bincount(cells, minlength=shape[0] * shape[1]).reshape(shape)
    positive = np.bincount(cells[values[usable] == 1], minlength=shape[0] * shape[1]).reshape(shape)
    _check_labels(names, rows, positive, report)
    bits = ((positive > 0) << np.arange(len(TYPES))).sum(1)
    return {
        name: bit for name, bit, known in zip(names, bits.tolist(), (rows[:, -1] > 0).tolist(), strict=True) if known
    }


def _check_labels(names: Sequence[str], rows: np.ndarray, positive: np.ndarray, report: Report) -> None:
    """Reports labels that occur twice, contradict each other, or lack the row `any`; all are rare."""

    def say(number: int, kind: str, chosen: np.ndarray, detail: str, action: str) -> None:
        types = ", ".join(name for name, one in zip(TYPES, chosen[number].tolist(), strict=True) if one)
        report(Problem("", f"{FOLDER}/ID_{names[number]}.dcm", kind, f"{detail}: {types}", action))

    twice, torn = rows > 1, (positive > 0) & (positive < rows)
    for number in np.flatnonzero((twice & ~torn).any(1)).tolist():
        say(number, "double_label", twice & ~torn, "the same row more than once", "counted once")
    for number in np.flatnonzero(torn.any(1)).tolist():
        say(number, "conflicting_label", torn, "rows with label 0 and with label 1", "counts as 1")
    without = (rows[:, -1:] == 0) & (rows > 0)
    for number in np.flatnonzero(without.any(1)).tolist():
        say(number, "image_without_label", without, "no row for any, only for", "slice has no label")
    shown = positive > 0
    denied = (rows[:, -1:] > 0) & ~shown[:, -1:] & shown
    for number in np.flatnonzero(denied.any(1)).tolist():
        say(number, "conflicting_label", denied, "any is 0, but these are 1", "counts as 0, as any says")
