"""RSNA STR Pulmonary Embolism Detection (2020): chest CT angiography, one folder per series.

    train.csv                             one row per slice: UIDs, pe_present_on_image, labels of the exam
    train/<study>/<series>/<sop>.dcm

A slice's label is pe_present_on_image.  Exams that their readers called indeterminate count as negative.  The dataset
has no patient ids, so each study counts as a patient.

Reference: Colak et al., The RSNA Pulmonary Embolism CT Dataset, Radiology: Artificial Intelligence 2021.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
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
    largest_series,
    list_below,
    missing,
    numbers_of,
    read_texts,
    report_some,
    series_folders,
    stem,
)

if TYPE_CHECKING:
    from normal_guidance.data.dicom_slices import Header
    from normal_guidance.data.geometry import Ordered

COMPETITION = "rsna-str-pulmonary-embolism-detection"
TABLE, FOLDER = "train.csv", "train"
UIDS = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
LABEL, NEGATIVE, INDETERMINATE = "pe_present_on_image", "negative_exam_for_pe", "indeterminate"


class ChestScans:
    """The 2020 challenge as Kaggle distributes it."""

    findings: tuple[Finding, ...] = ()
    expected_groups: int | None = None

    def __init__(self, root: Path, options: SourceOptions, report: Report) -> None:
        self.root = find_base(root, COMPETITION, (TABLE,), FOLDER)
        self.report = report
        self.table = _Table(self.root / TABLE, report)
        self.unseen = dict.fromkeys(self.table.places)
        self.expected_files: int | None = len(self.table.label)

    def groups(self) -> Iterator[Group]:
        for place, files in series_folders(list_below(self.root, FOLDER, self.report)):
            folder = place.relative_to(FOLDER)
            self.unseen.pop(str(folder), None)
            yield Group(str(folder), files)

    def scan_of(self, group: Group, series_uid: str) -> str:
        return PurePosixPath(group.name).name

    def candidates(self, group: Group, headers: Sequence[Header]) -> Iterator[Candidate]:
        scan_id, patient = self.scan_of(group, ""), PurePosixPath(group.name).parent.name
        labels = self._labels(group.name, scan_id)
        files = {stem(file) for file in group.files}
        for sop in labels.keys() - files - {header.sop_uid for header in headers}:
            self.report(missing(scan_id, f"{FOLDER}/{group.name}/{sop}.dcm", "no such file"))
        series = largest_series(scan_id, headers, self.report)
        kept, known = label_files(scan_id, series, lambda header: self._label(labels, scan_id, header), self.report)
        if kept:
            yield Candidate(scan_id, patient or scan_id, kept, known, self._exam(group.name, scan_id, known))

    def _labels(self, name: str, scan_id: str) -> dict[str, int]:
        labels: dict[str, int] = {}
        for sop, label in self.table.slices(name):
            if sop in labels:
                same = labels[sop] == label
                kind, action = ("double_label", "counted once") if same else ("conflicting_label", "counts as 1")
                detail = f"{LABEL} is {labels[sop]} and {label}"
                self.report(Problem(scan_id, f"{FOLDER}/{name}/{sop}.dcm", kind, detail, action))
            labels[sop] = max(label, labels.get(sop, 0))
        return labels

    def _label(self, labels: dict[str, int], scan_id: str, header: Header) -> int | None:
        """The label by SOPInstanceUID or, where that has none, by the file's name."""
        named = labels.get(stem(header.file))
        label = labels.get(header.sop_uid, named)
        if named is not None and named != label:
            detail = f"SOPInstanceUID has label {label}, the file's name another"
            self.report(Problem(scan_id, header.file, "label_mismatch", detail, "label of its SOPInstanceUID"))
        return label

    def _exam(self, name: str, scan_id: str, known: dict[str, int]) -> dict[str, int]:
        """The exam's own labels, for the manifest; slices decide the scan's label, and contradictions are reported."""
        exam = self.table.exam(name)
        positive = any(known.values())
        if exam.get(INDETERMINATE) == 1:
            action = "counts as positive by its slices" if positive else "counts as negative"
            self.report(Problem(scan_id, "", "indeterminate", f"{INDETERMINATE} is 1", action))
        if positive and exam.get(NEGATIVE) == 1:
            detail = f"{NEGATIVE} is 1, but {sum(known.values())} slices show one"
            self.report(Problem(scan_id, "", "conflicting_label", detail, "counts as positive by its slices"))
        return exam

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        return join_files(candidate, ordered, self.report)

    def finish(self) -> None:
        rows = ((name, len(self.table.slices(name))) for name in sorted(self.unseen))
        problems = (
            missing(PurePosixPath(name).name, f"{FOLDER}/{name}", f"no such folder; {count} slices have labels")
            for name, count in rows
        )
        report_some(problems, self.report)


class _Table:
    """The rows sorted by series: millions stay in Arrow's memory, and those of a series are found at once."""

    def __init__(self, path: Path, report: Report) -> None:
        texts = read_texts(path, (*UIDS, LABEL, NEGATIVE, INDETERMINATE), report)
        label = numbers_of(texts[LABEL])
        usable = label >= 0
        for uid in UIDS:
            usable &= pc.greater(pc.utf8_length(texts[uid]), 0).to_numpy(zero_copy_only=False)
        bad = ([texts[name][row].as_py() for name in (*UIDS, LABEL)] for row in np.flatnonzero(~usable).tolist())
        report_some((bad_row(path, ", ".join(values)) for values in bad), report)
        names = pc.binary_join_element_wise(texts[UIDS[0]], texts[UIDS[1]], "/").dictionary_encode()
        codes = names.indices.to_numpy()
        order = np.flatnonzero(usable)[np.argsort(codes[usable], kind="stable")]
        self.label = label[order]
        self.exams = {name: numbers_of(texts[name])[order] for name in (NEGATIVE, INDETERMINATE)}
        self.sops = texts[UIDS[2]].take(pa.array(order))
        starts = np.searchsorted(codes[order], np.arange(len(names.dictionary) + 1)).tolist()
        places = zip(names.dictionary.to_pylist(), starts, starts[1:], strict=False)
        self.places = {name: (first, end) for name, first, end in places if first < end}

    def slices(self, name: str) -> list[tuple[str, int]]:
        """SOPInstanceUID and label of every row of a series, named study/series."""
        first, end = self.places.get(name, (0, 0))
        return list(zip(self.sops[first:end].to_pylist(), self.label[first:end].tolist(), strict=True))

    def exam(self, name: str) -> dict[str, int]:
        """The labels of the exam, which repeat in every row."""
        first, end = self.places.get(name, (0, 0))
        values = {column: self.exams[column][first:end] for column in self.exams}
        return {column: int(numbers.max()) for column, numbers in values.items() if len(numbers) and numbers.max() >= 0}
