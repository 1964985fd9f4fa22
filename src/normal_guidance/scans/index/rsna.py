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

from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.containers import Mask
from normal_guidance.scans.index.manifest import DatasetLabel, Finding, Labels
from normal_guidance.scans.index.problems import Problem, Report
from normal_guidance.scans.index.source import (
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
    patient_of,
    read_texts,
    report_some,
    series_folders,
    stem,
)

if TYPE_CHECKING:
    from normal_guidance.scans.index.dicom_slices import Header
    from normal_guidance.scans.index.geometry import Ordered


HEAD_COMPETITION = "rsna-intracranial-hemorrhage-detection"
HEAD_TABLE, HEAD_FOLDER = "stage_2_train.csv", "stage_2_train"

TYPES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural", "any")
"""Types of hemorrhage; the last is the slice's label."""

FINDINGS = (Finding("any", "1386000", "Intracranial hemorrhage"), *map(Finding, TYPES[:-1]))
"""pydicom's dictionary of SNOMED CT has the code of `any`, and none of the types'."""


class HeadScans:
    """The 2019 challenge as Kaggle distributes it."""

    findings: tuple[Finding, ...] = FINDINGS
    expected_groups: int | None = None

    def __init__(self, root: Path, options: SourceOptions, report: Report) -> None:
        self.root = find_base(root, HEAD_COMPETITION, (HEAD_TABLE,), HEAD_FOLDER)
        self.report = report
        self.labels = _read_labels(self.root / HEAD_TABLE, report)
        self.unseen = set(self.labels)
        self.expected_files: int | None = len(self.labels)

    def groups(self) -> Iterator[Group]:
        files = list(list_below(self.root, HEAD_FOLDER, self.report))
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
        files = (f"{HEAD_FOLDER}/ID_{sop}.dcm" for sop in sorted(self.unseen))
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
        report(Problem("", f"{HEAD_FOLDER}/ID_{names[number]}.dcm", kind, f"{detail}: {types}", action))

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


# RSNA STR Pulmonary Embolism Detection (2020): chest CT angiography, one folder per series.
#     train.csv                             one row per slice: UIDs, pe_present_on_image, labels of the exam
#     train/<study>/<series>/<sop>.dcm
# A slice's label is pe_present_on_image.  Exams that their readers called indeterminate count as negative.  The dataset
# has no patient ids, so each study counts as a patient.
# Reference: Colak et al., The RSNA Pulmonary Embolism CT Dataset, Radiology: Artificial Intelligence 2021.


CHEST_COMPETITION = "rsna-str-pulmonary-embolism-detection"
CHEST_TABLE, CHEST_FOLDER = "train.csv", "train"
UIDS = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
LABEL, NEGATIVE, INDETERMINATE = "pe_present_on_image", "negative_exam_for_pe", "indeterminate"


class ChestScans:
    """The 2020 challenge as Kaggle distributes it."""

    findings: tuple[Finding, ...] = ()
    expected_groups: int | None = None

    def __init__(self, root: Path, options: SourceOptions, report: Report) -> None:
        self.root = find_base(root, CHEST_COMPETITION, (CHEST_TABLE,), CHEST_FOLDER)
        self.report = report
        self.table = _Table(self.root / CHEST_TABLE, report)
        self.unseen = dict.fromkeys(self.table.places)
        self.expected_files: int | None = len(self.table.label)

    def groups(self) -> Iterator[Group]:
        for place, files in series_folders(list_below(self.root, CHEST_FOLDER, self.report)):
            folder = place.relative_to(CHEST_FOLDER)
            self.unseen.pop(str(folder), None)
            yield Group(str(folder), files)

    def scan_of(self, group: Group, series_uid: str) -> str:
        return PurePosixPath(group.name).name

    def candidates(self, group: Group, headers: Sequence[Header]) -> Iterator[Candidate]:
        scan_id, patient = self.scan_of(group, ""), PurePosixPath(group.name).parent.name
        labels = self._labels(group.name, scan_id)
        files = {stem(file) for file in group.files}
        for sop in labels.keys() - files - {header.sop_uid for header in headers}:
            self.report(missing(scan_id, f"{CHEST_FOLDER}/{group.name}/{sop}.dcm", "no such file"))
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
                self.report(Problem(scan_id, f"{CHEST_FOLDER}/{name}/{sop}.dcm", kind, detail, action))
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
            missing(PurePosixPath(name).name, f"{CHEST_FOLDER}/{name}", f"no such folder; {count} slices have labels")
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


# RSNA Abdominal Trauma Detection (2023): abdominal CT, one or two series per patient.
#     train_images/<patient>/<series>/<instance>.dcm
#     image_level_labels_2024.csv   patient_id, series_id, instance_number, injury_name: a row per injured slice
#     train_series_meta.csv         patient_id, series_id, aortic_hu, incomplete_organ
#     train_2024.csv                patient_id, <organ>_healthy, _injury, _low, _high, any_injury
# The rows for slices cover bowel injury and active extravasation only.  So there are two labels, and the manifest keeps
# both (`ScanRow.dataset_labels`):
#     image     the paper's label: a slice is positive if it has a row, a scan if one of its slices is.  Injuries of
#               liver, spleen and kidney count as negative.
#     patient   any_injury.  Slice labels are known where they follow from the tables: all slices are 0 if the patient
#               has no injury; rows decide if the series has some and the patient has no injury of liver, spleen or
#               kidney, which rows do not show.  Otherwise they are unknown.
# Reference: Rudie et al., The RSNA Abdominal Traumatic Injury CT (RATIC) Dataset, Radiology: Artificial
# Intelligence 2024.


ABDOMEN_COMPETITION = "rsna-2023-abdominal-trauma-detection"
IMAGES, META, PATIENTS, ABDOMEN_FOLDER = (
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
        self.root = find_base(root, ABDOMEN_COMPETITION, (IMAGES, META, PATIENTS), ABDOMEN_FOLDER)
        self.by_patient, self.report = options.labels == "patient", report
        self.rows = _read_images(self.root / IMAGES, report)
        self.meta = _read_meta(self.root / META, report)
        self.patients = _read_patients(self.root / PATIENTS, report)
        self.unseen = dict.fromkeys([*self.meta, *self.rows])
        self.without_scan = dict.fromkeys(self.patients)
        self.expected_groups: int | None = len(self.meta)

    def groups(self) -> Iterator[Group]:
        for place, files in series_folders(list_below(self.root, ABDOMEN_FOLDER, self.report)):
            folder = place.relative_to(ABDOMEN_FOLDER)
            if len(folder.parts) != 2:
                for file in files:
                    detail = f"not in {ABDOMEN_FOLDER}/<patient>/<series>"
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
                self.report(missing(scan_id, f"{ABDOMEN_FOLDER}/{group.name}/{instance}.dcm", "no such file"))
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
            missing(
                name.replace("/", "_"),
                f"{ABDOMEN_FOLDER}/{name}",
                f"no such folder; {len(self.rows.get(name, ()))} rows",
            )
            for name in sorted(self.unseen)
        )
        report_some(series, self.report)
        alone = self.without_scan.keys() - {name.partition("/")[0] for name in self.unseen}
        patients = (
            missing("", f"{ABDOMEN_FOLDER}/{patient}", f"no such folder; in {PATIENTS}") for patient in sorted(alone)
        )
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
            place = f"{ABDOMEN_FOLDER}/{patient}/{series}/{number}.dcm"
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
