"""RSNA Abdominal Trauma Detection (2023): abdominal CT, one or two series per patient.

    train_images/<patient>/<series>/<instance>.dcm
    image_level_labels_2024.csv   patient_id, series_id, instance_number, injury_name: a row per injured slice
    train_series_meta.csv         patient_id, series_id, aortic_hu, incomplete_organ
    train_2024.csv                patient_id, <organ>_healthy, _injury, _low, _high, any_injury

The rows for slices cover bowel injury and active extravasation only.  So there are two labels, and the manifest keeps
both (`ScanRow.dataset_labels`):

    image     the paper's label: a slice is positive if it has a row, a scan if one of its slices is.  Injuries of
              liver, spleen and kidney count as negative.
    patient   any_injury.  Slice labels are known where they follow from the tables: all slices are 0 if the patient
              has no injury; rows decide if the series has some and the patient has no injury of liver, spleen or
              kidney, which rows do not show.  Otherwise they are unknown.

Reference: Rudie et al., The RSNA Abdominal Traumatic Injury CT (RATIC) Dataset, Radiology: Artificial
Intelligence 2024.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from normal_guidance.data.file_contents import Mask
from normal_guidance.data.findings import Finding, Labels
from normal_guidance.data.manifest import DatasetLabel
from normal_guidance.data.problems import Problem, Report
from normal_guidance.data.sources.interface import (
    Candidate,
    Group,
    SourceOptions,
    bad_row,
    find_base,
    join_files,
    largest_series,
    list_below,
    missing,
    numbers_of,
    read_texts,
    report_some,
    series_folders,
    stem,
)
from normal_guidance.errors import UserError

if TYPE_CHECKING:
    from normal_guidance.data.dicom_slices import Header
    from normal_guidance.data.geometry import Ordered

COMPETITION = "rsna-2023-abdominal-trauma-detection"
IMAGES, META, PATIENTS, FOLDER = (
    "image_level_labels_2024.csv",
    "train_series_meta.csv",
    "train_2024.csv",
    "train_images",
)
LABELS = ("image", "patient")

WITHOUT_ROWS = ("kidney", "liver", "spleen")
"""Organs whose injuries have no rows for slices."""

INJURIES = (
    "bowel_injury",
    "extravasation_injury",
    *(f"{organ}_{grade}" for organ in WITHOUT_ROWS for grade in ("low", "high")),
)


class AbdomenScans:
    """The 2023 challenge as Kaggle distributes it."""

    findings: tuple[Finding, ...] = ()
    expected_files: int | None = None

    def __init__(self, root: Path, options: SourceOptions, report: Report) -> None:
        if options.labels not in LABELS:
            raise UserError(f"labels {options.labels!r} are unknown; choose one of {', '.join(LABELS)}")
        self.root = find_base(root, COMPETITION, (IMAGES, META, PATIENTS), FOLDER)
        self.by_patient, self.report = options.labels == "patient", report
        self.rows = _read_images(self.root / IMAGES, report)
        self.meta = _read_meta(self.root / META, report)
        self.patients = _read_patients(self.root / PATIENTS, report)
        self.unseen = dict.fromkeys([*self.meta, *self.rows])
        self.without_scan = dict.fromkeys(self.patients)
        self.expected_groups: int | None = len(self.meta)

    def groups(self) -> Iterator[Group]:
        for place, files in series_folders(list_below(self.root, FOLDER, self.report)):
            folder = place.relative_to(FOLDER)
            if len(folder.parts) != 2:
                for file in files:
                    detail = f"not in {FOLDER}/<patient>/<series>"
                    self.report(Problem("", file, "image_without_label", detail, "left out"))
                continue
            self.unseen.pop(str(folder), None)
            self.without_scan.pop(folder.parent.name, None)
            yield Group(str(folder), files)

    def scan_of(self, group: Group, series_uid: str) -> str:
        return group.name.replace("/", "_")

    def candidates(self, group: Group, headers: Sequence[Header]) -> Iterator[Candidate]:
        scan_id, patient = self.scan_of(group, ""), PurePosixPath(group.name).parent.name
        rows = self.rows.get(group.name, {})
        series = largest_series(scan_id, headers, self.report)
        places = {header.file: _instance(header) for header in series}
        there = {stem(file) for file in group.files} | {str(place) for place in places.values()}
        for instance in rows:
            if str(instance) not in there:
                self.report(missing(scan_id, f"{FOLDER}/{group.name}/{instance}.dcm", "no such file"))
        known = {file: int(place in rows) for file, place in places.items()}
        if group.name not in self.meta:
            detail = f"the series has no row in {META}"
            self.report(Problem(scan_id, "", "image_without_label", detail, f"labelled by {IMAGES} alone"))
        if self.meta.get(group.name) == 1:
            detail = "incomplete_organ is 1: the series does not show the whole organ"
            self.report(Problem(scan_id, "", "incomplete_organ", detail, "kept"))
        if series:
            labels = self._labels(group.name, patient, rows, known)
            yield Candidate(scan_id, patient or scan_id, series, known, labels)

    def _labels(
        self, name: str, patient: str, rows: dict[int, set[str]], known: dict[str, int]
    ) -> dict[str, DatasetLabel]:
        found = self.patients.get(patient, {})
        return {
            "image_label": int(any(known.values())),
            "image_injuries": sorted(set().union(*rows.values())),
            "patient_label": found.get("any_injury"),
            "patient_injuries": [injury for injury in INJURIES if found.get(injury) == 1],
            "incomplete_organ": self.meta.get(name),
        }

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        images = join_files(candidate, ordered, self.report)
        return self._patient_labels(candidate, images) if self.by_patient else images

    def _patient_labels(self, candidate: Candidate, images: Labels) -> Labels:
        found = self.patients.get(candidate.patient_id)
        if found is None:
            detail = f"patient {candidate.patient_id} has no row in {PATIENTS}"
            self.report(Problem(candidate.scan_id, "", "image_without_label", detail, "left out"))
            return Labels(None, None)
        if not found["any_injury"]:
            if not images.label:
                return Labels(0, images.slices)
            detail = f"any_injury is 0, but {IMAGES} has rows of the series"
            self.report(Problem(candidate.scan_id, "", "conflicting_label", detail, "counts as 0, slices unknown"))
            return Labels(0, None)
        hidden = any(found[injury] for injury in INJURIES if injury.startswith(WITHOUT_ROWS))
        return Labels(1, images.slices if images.label and not hidden else None)

    def finish(self) -> None:
        series = (
            missing(name.replace("/", "_"), f"{FOLDER}/{name}", f"no such folder; {len(self.rows.get(name, ()))} rows")
            for name in sorted(self.unseen)
        )
        report_some(series, self.report)
        alone = self.without_scan.keys() - {name.partition("/")[0] for name in self.unseen}
        patients = (missing("", f"{FOLDER}/{patient}", f"no such folder; in {PATIENTS}") for patient in sorted(alone))
        report_some(patients, self.report)


def _instance(header: Header) -> int | None:
    """A slice's number in the table: its file's name or, where that is not a number, its InstanceNumber."""
    number = _number(stem(header.file))
    return header.instance_number if number is None else number


def _number(word: str) -> int | None:
    """A whole number, also in the form 12.0, which pandas writes for a column with gaps."""
    word = word.removesuffix(".0")
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 20 else None


def _read_images(path: Path, report: Report) -> dict[str, dict[int, set[str]]]:
    """Injuries by series, named patient/series, and instance number."""
    texts = read_texts(path, ("patient_id", "series_id", "instance_number", "injury_name"), report)
    rows: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    bad = []
    for values in zip(*(column.to_pylist() for column in texts.values()), strict=True):
        patient, series, instance, injury = values
        number = _number(instance)
        if number is None or not patient or not series:
            bad.append(bad_row(path, ", ".join(values)))
            continue
        injuries = rows[f"{patient}/{series}"][number]
        if injury in injuries:
            place = f"{FOLDER}/{patient}/{series}/{number}.dcm"
            report(Problem(f"{patient}_{series}", place, "double_label", f"{injury} more than once", "counted once"))
        injuries.add(injury)
    report_some(bad, report)
    return {name: dict(found) for name, found in rows.items()}


def _read_meta(path: Path, report: Report) -> dict[str, int | None]:
    """incomplete_organ by series, named patient/series."""
    texts = read_texts(path, ("patient_id", "series_id", "incomplete_organ"), report)
    names = zip(texts["patient_id"].to_pylist(), texts["series_id"].to_pylist(), strict=True)
    values = numbers_of(texts["incomplete_organ"]).tolist()
    return {"/".join(name): None if value < 0 else value for name, value in zip(names, values, strict=True)}


def _read_patients(path: Path, report: Report) -> dict[str, dict[str, int]]:
    """any_injury and the injuries by patient."""
    texts = read_texts(path, ("patient_id", *INJURIES, "any_injury"), report)
    values = {name: numbers_of(texts[name]) for name in (*INJURIES, "any_injury")}
    patients: dict[str, dict[str, int]] = {}
    bad = []
    for row, patient in enumerate(texts["patient_id"].to_pylist()):
        found = {name: int(column[row]) for name, column in values.items()}
        if min(found.values()) < 0 or not patient:
            bad.append(bad_row(path, f"patient {patient}: {found}"))
        elif patients.get(patient, found) != found:
            kind, detail = "conflicting_label", f"two rows of patient {patient} differ"
            report(Problem("", path.name, kind, detail, "the first counts"))
        elif patient in patients:
            report(Problem("", path.name, "double_label", f"patient {patient} more than once", "counted once"))
        else:
            if found["any_injury"] != max(found[name] for name in INJURIES):
                detail = f"patient {patient}: any_injury is {found['any_injury']}, but the injuries are {found}"
                report(Problem("", path.name, "conflicting_label", detail, "any_injury counts"))
            patients[patient] = found
    report_some(bad, report)
    return patients
