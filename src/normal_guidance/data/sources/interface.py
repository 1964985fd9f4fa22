"""The interface of a source, and functions that sources share: label tables, and slice labels by file.

A source opens a root and its label tables.  It lists groups of files whose headers are needed together, turns the
headers of a group into candidate scans, and labels each scan when its slices are in order.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, Protocol, runtime_checkable

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from pyarrow import csv

from normal_guidance.data.containers import list_files
from normal_guidance.data.file_contents import Mask
from normal_guidance.data.findings import Finding, Labels
from normal_guidance.data.label_tables import BINARY
from normal_guidance.data.manifest import DatasetLabel
from normal_guidance.data.problems import Problem, Report
from normal_guidance.errors import UserError

if TYPE_CHECKING:
    from normal_guidance.data.dicom_slices import Header
    from normal_guidance.data.geometry import Ordered

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
