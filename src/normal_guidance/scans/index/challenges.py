"""Public challenges: head (2019), chest (2020) and abdomen (2023) CT of the RSNA, as Kaggle has them; PROSTATEx."""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.containers import Mask, is_nifti
from normal_guidance.scans.index.labels import BINARY
from normal_guidance.scans.index.manifest import DatasetLabel, Finding, Labels
from normal_guidance.scans.index.problems import Problem, Report
from normal_guidance.scans.index.source import (
    Candidate,
    FileGroup,
    FolderScans,
    ScanSource,
    SourceOptions,
    bad_row,
    largest_series,
    list_below,
    missing,
    numbers_of,
    patient_of,
    read_texts,
    report_some,
    series_folders,
    slices_of_masks,
)

if TYPE_CHECKING:
    from normal_guidance.scans.index.dicom_slices import Header
    from normal_guidance.scans.index.geometry import Ordered


class KaggleScans(ScanSource):
    """What Kaggle's challenges share: tables beside a folder of images, one folder for a series, labels by file."""

    competition: str
    tables: tuple[str, ...]
    folder: str
    unseen: dict[str, int]  # series without a folder, as they would be called below `folder`: their rows

    def __init__(self, root: Path, report: Report) -> None:
        """Finds the tables and images in `root`, or in the competition's folder in it."""
        self.root, self.report = root, report
        if not root.is_dir():
            names = f"{', '.join(self.tables)} and {self.folder}"
            raise UserError(f"{root} is not a folder; give the folder that holds {names}")
        if not (root / self.tables[0]).is_file() and (root / self.competition / self.tables[0]).is_file():
            self.root = root / self.competition
        place = f"Kaggle's {self.competition} to that place"
        for table in self.tables:
            if not (self.root / table).is_file():
                raise UserError(f"{self.root / table} is not there; unpack the table from {place}")
        if not (self.root / self.folder).is_dir():
            raise UserError(f"{self.root / self.folder} is not a folder; unpack the images of {place}")

    def groups(self) -> Iterator[FileGroup]:
        for path, files in series_folders(list_below(self.root, self.folder, self.report)):
            name = str(path.relative_to(self.folder))
            self.unseen.pop(name, None)
            yield FileGroup(name, files)

    def label_files(
        self, scan_id: str, headers: Sequence[Header], label_of: Callable[[str], int | None]
    ) -> tuple[list[Header], dict[str, int]]:
        """The slices with a label by SOPInstanceUID or else the file's name, and the labels by file; reports others."""
        labels: dict[str, int | None] = {}
        for header in headers:
            by_file, label = label_of(stem(header.file)), label_of(header.sop_uid)
            labels[header.file] = by_file if label is None else label
            if label is not None and by_file not in (None, label):
                detail = f"SOPInstanceUID has label {label}, the file's name another"
                self.report(Problem(scan_id, header.file, "label_mismatch", detail, "label of its SOPInstanceUID"))
        known = {file: label for file, label in labels.items() if label is not None}
        if not known:
            detail = f"none of its {len(labels)} files has a label"
            self.report(Problem(scan_id, "", "image_without_label", detail, "left out"))
        else:
            for file, label in labels.items():
                if label is None:
                    self.report(Problem(scan_id, file, "image_without_label", "no row of the label table", "left out"))
        return [header for header in headers if header.file in known], known

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        """Labels of ordered slices from labels by file; a scan is positive if one of its slices is."""
        slices = np.array([candidate.known[file] for file, _ in ordered.slices], np.int8)
        label = int(slices.any())
        kept = {file for file, _ in ordered.slices}
        lost = [file for file, value in candidate.known.items() if value and file not in kept]
        if lost:
            detail, action = f"{len(lost)} positive slices were left out, first {lost[0]}", f"scan counts as {label}"
            self.report(Problem(candidate.scan_id, lost[0], "label_mismatch", detail, f"{action} by the others"))
        return Labels(label, slices)

    def finish(self) -> None:
        lost = []
        for name, rows in sorted(self.unseen.items()):
            scan_id = self.scan_of(FileGroup(name, ()), "")
            lost.append(missing(scan_id, f"{self.folder}/{name}", f"no such folder; {rows} rows of the label table"))
        report_some(lost, self.report)


def stem(file: str) -> str:
    """A file's name without folder, archive and ending."""
    return PurePosixPath(file.replace("!", "/")).stem


# RSNA Intracranial Hemorrhage Detection (2019): one flat folder of slices, stage_2_train/ID_<sop>.dcm, and six rows per
# slice, ID_<sop>_<type>.  A scan is a DICOM series, so all headers are read before the first scan is known.
# Reference: Flanders et al., Radiology: Artificial Intelligence 2020.

TYPES = ("epidural", "intraparenchymal", "intraventricular", "subarachnoid", "subdural", "any")
"""Types of hemorrhage; the last is the slice's label."""

FINDINGS = (Finding("any", "1386000", "Intracranial hemorrhage"), *map(Finding, TYPES[:-1]))
"""pydicom's dictionary of SNOMED CT has the code of `any`, and none of the types'."""

HEAD_FOLDER = "stage_2_train"


class HeadScans(KaggleScans):
    """The 2019 challenge: labels by slice, as bits in the order of `TYPES`."""

    competition = "rsna-intracranial-hemorrhage-detection"
    tables, folder = ("stage_2_train.csv",), HEAD_FOLDER
    findings = FINDINGS

    def __init__(self, root: Path, options: SourceOptions, report: Report) -> None:
        super().__init__(root, report)
        self.labels = _read_head_labels(self.root / self.tables[0], report)
        self.slices_unseen = set(self.labels)
        self.expected_files = len(self.labels)

    def groups(self) -> Iterator[FileGroup]:
        files = list(list_below(self.root, self.folder, self.report))
        self.slices_unseen.difference_update(_sop(stem(file)) for file in files)
        if files:
            yield FileGroup("", files)

    def scan_of(self, group: FileGroup, series_uid: str) -> str:
        return series_uid

    def candidates(self, group: FileGroup, headers: Sequence[Header]) -> Iterator[Candidate]:
        series: dict[str, list[Header]] = {}
        for header in headers:
            self.slices_unseen.discard(_sop(header.sop_uid))
            series.setdefault(header.series_uid, []).append(header)
        for header in series.pop("", ()):
            self.report(Problem("", header.file, "no_series", "SeriesInstanceUID is missing or empty", "left out"))
        for scan_id in sorted(series):
            members = series.pop(scan_id)
            kept, known = self.label_files(scan_id, members, self._any)
            patient = patient_of(scan_id, members, self.report) or scan_id
            if kept:
                bits = [self._bits(header) for header in kept]
                types = [name for number, name in enumerate(TYPES[:-1]) if any(bit >> number & 1 for bit in bits)]
                yield Candidate(scan_id, patient, kept, known, {"types": types})

    def _any(self, name: str) -> int | None:
        bits = self.labels.get(_sop(name))
        return None if bits is None else bits >> len(TYPES) - 1

    def _bits(self, header: Header) -> int:
        names = (_sop(header.sop_uid), _sop(stem(header.file)))
        return next(self.labels[name] for name in names if name in self.labels)

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        """The labels for each type, too; a slice of which `any` is 0 shows none."""
        bits_of = {header.file: self._bits(header) for header in candidate.headers}
        bits = np.array([bits_of[file] for file, _ in ordered.slices])
        shown = bits >> len(TYPES) - 1 & 1
        slices = {name: (bits >> number & shown).astype(np.int8) for number, name in enumerate(TYPES[:-1])}
        further = {name: Labels(int(labels.any()), labels) for name, labels in slices.items()}
        return super().join(candidate, ordered, masks)._replace(further=further)

    def finish(self) -> None:
        files = (f"{self.folder}/ID_{sop}.dcm" for sop in sorted(self.slices_unseen))
        report_some((missing("", file, "no such file") for file in files), self.report)


def _sop(name: str) -> str:
    return name.removeprefix("ID_")


def _read_head_labels(path: Path, report: Report) -> dict[str, int]:
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
    _check_head_labels(names, rows, positive, report)
    bits, known = ((positive > 0) << np.arange(len(TYPES))).sum(1).tolist(), (rows[:, -1] > 0).tolist()
    return {name: bit for name, bit, has_any in zip(names, bits, known, strict=True) if has_any}


def _check_head_labels(names: Sequence[str], rows: np.ndarray, positive: np.ndarray, report: Report) -> None:
    """Reports labels that occur twice, contradict each other, or lack the row `any`; all are rare."""
    twice, torn, has_any = rows > 1, (positive > 0) & (positive < rows), rows[:, -1:] > 0
    denied = has_any & ~(positive[:, -1:] > 0) & (positive > 0)
    for kind, cells, detail, action in (
        ("double_label", twice & ~torn, "the same row more than once", "counted once"),
        ("conflicting_label", torn, "rows with label 0 and with label 1", "counts as 1"),
        ("image_without_label", ~has_any & (rows > 0), "no row for any, only for", "slice has no label"),
        ("conflicting_label", denied, "any is 0, but these are 1", "counts as 0, as any says"),
    ):
        for number in np.flatnonzero(cells.any(1)).tolist():
            types = ", ".join(name for name, cell in zip(TYPES, cells[number].tolist(), strict=True) if cell)
            report(Problem("", f"{HEAD_FOLDER}/ID_{names[number]}.dcm", kind, f"{detail}: {types}", action))


# RSNA STR Pulmonary Embolism Detection (2020): train/<study>/<series>/<sop>.dcm, and one row per slice.  Exams that
# readers called indeterminate count as negative.  There are no patient ids, so each study counts as a patient.
# Reference: Colak et al., Radiology: Artificial Intelligence 2021.

UIDS = ("StudyInstanceUID", "SeriesInstanceUID", "SOPInstanceUID")
LABEL, NEGATIVE, INDETERMINATE = "pe_present_on_image", "negative_exam_for_pe", "indeterminate"


class ChestScans(KaggleScans):
    """The 2020 challenge; rows are sorted by study/series: millions stay in Arrow's memory and are found at once."""

    competition = "rsna-str-pulmonary-embolism-detection"
    tables, folder = ("train.csv",), "train"

    def __init__(self, root: Path, options: SourceOptions, report: Report) -> None:
        super().__init__(root, report)
        path = self.root / self.tables[0]
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
        self.slice_labels, self.sops = label[order], texts[UIDS[2]].take(pa.array(order))
        self.exams = {name: numbers_of(texts[name])[order] for name in (NEGATIVE, INDETERMINATE)}
        starts = np.searchsorted(codes[order], np.arange(len(names.dictionary) + 1)).tolist()
        bounds = zip(names.dictionary.to_pylist(), starts, starts[1:], strict=False)
        self.rows = {name: slice(first, end) for name, first, end in bounds if first < end}
        self.unseen = {name: rows.stop - rows.start for name, rows in self.rows.items()}
        self.expected_files = len(order)

    def scan_of(self, group: FileGroup, series_uid: str) -> str:
        return PurePosixPath(group.name).name

    def candidates(self, group: FileGroup, headers: Sequence[Header]) -> Iterator[Candidate]:
        scan_id, patient = self.scan_of(group, ""), PurePosixPath(group.name).parent.name
        labels = self._labels(group.name, scan_id)
        files = {stem(file) for file in group.files}
        for sop in labels.keys() - files - {header.sop_uid for header in headers}:
            self.report(missing(scan_id, f"{self.folder}/{group.name}/{sop}.dcm", "no such file"))
        series = largest_series(scan_id, headers, self.report)
        kept, known = self.label_files(scan_id, series, labels.get)
        if kept:
            yield Candidate(scan_id, patient or scan_id, kept, known, self._exam(group.name, scan_id, known))

    def _labels(self, name: str, scan_id: str) -> dict[str, int]:
        """The labels of a series by SOPInstanceUID."""
        rows = self.rows.get(name, slice(0))
        labels: dict[str, int] = {}
        for sop, label in zip(self.sops[rows].to_pylist(), self.slice_labels[rows].tolist(), strict=True):
            if sop in labels:
                same = labels[sop] == label
                kind, action = ("double_label", "counted once") if same else ("conflicting_label", "counts as 1")
                detail = f"{LABEL} is {labels[sop]} and {label}"
                self.report(Problem(scan_id, f"{self.folder}/{name}/{sop}.dcm", kind, detail, action))
            labels[sop] = max(label, labels.get(sop, 0))
        return labels

    def _exam(self, name: str, scan_id: str, known: dict[str, int]) -> dict[str, int]:
        """The exam's own labels, for the manifest; slices decide the scan's label, and contradictions are reported."""
        columns = {column: values[self.rows[name]] for column, values in self.exams.items()}
        exam = {column: int(values.max()) for column, values in columns.items() if values.max() >= 0}
        positive = any(known.values())
        if exam.get(INDETERMINATE) == 1:
            action = "counts as positive by its slices" if positive else "counts as negative"
            self.report(Problem(scan_id, "", "indeterminate", f"{INDETERMINATE} is 1", action))
        if positive and exam.get(NEGATIVE) == 1:
            detail = f"{NEGATIVE} is 1, but {sum(known.values())} slices show one"
            self.report(Problem(scan_id, "", "conflicting_label", detail, "counts as positive by its slices"))
        return exam


# RSNA Abdominal Trauma Detection (2023; Rudie et al., Radiology: Artificial Intelligence 2024).  Rows for slices cover
# bowel injury and active extravasation only, so there are two labels: image, the paper's (a slice is positive if it has
# a row), and patient (any_injury), whose slice labels are unknown where liver, spleen or kidney is injured.

IMAGES, META, PATIENTS = "image_level_labels_2024.csv", "train_series_meta.csv", "train_2024.csv"
ABDOMEN_FOLDER = "train_images"
LABELS = ("image", "patient")

WITHOUT_ROWS = ("kidney", "liver", "spleen")  # organs whose injuries have no rows for slices

INJURIES = (
    "bowel_injury",
    "extravasation_injury",
    *(f"{organ}_{grade}" for organ in WITHOUT_ROWS for grade in ("low", "high")),
)


class AbdomenScans(KaggleScans):
    """The 2023 challenge."""

    competition = "rsna-2023-abdominal-trauma-detection"
    tables, folder = (IMAGES, META, PATIENTS), ABDOMEN_FOLDER

    def __init__(self, root: Path, options: SourceOptions, report: Report) -> None:
        if options.labels not in LABELS:
            raise UserError(f"labels {options.labels!r} are unknown; choose one of {', '.join(LABELS)}")
        super().__init__(root, report)
        self.by_patient = options.labels == "patient"
        self.rows = _read_injured_slices(self.root / IMAGES, report)
        texts = read_texts(self.root / META, ("patient_id", "series_id", "incomplete_organ"), report)
        names = zip(texts["patient_id"].to_pylist(), texts["series_id"].to_pylist(), strict=True)
        values = numbers_of(texts["incomplete_organ"]).tolist()
        self.incomplete = {"/".join(name): None if n < 0 else n for name, n in zip(names, values, strict=True)}
        self.patients = _read_patients(self.root / PATIENTS, report)
        self.unseen = {name: len(self.rows.get(name, ())) for name in (*self.incomplete, *self.rows)}
        self.without_scan = set(self.patients)
        self.expected_groups = len(self.incomplete)

    def groups(self) -> Iterator[FileGroup]:
        for group in super().groups():
            if group.name.count("/") != 1:
                detail = f"not in {self.folder}/<patient>/<series>"
                for file in group.files:
                    self.report(Problem("", file, "image_without_label", detail, "left out"))
                continue
            self.without_scan.discard(group.name.partition("/")[0])
            yield group

    def scan_of(self, group: FileGroup, series_uid: str) -> str:
        return group.name.replace("/", "_")

    def candidates(self, group: FileGroup, headers: Sequence[Header]) -> Iterator[Candidate]:
        scan_id, patient = self.scan_of(group, ""), group.name.partition("/")[0]
        rows = self.rows.get(group.name, {})
        series = largest_series(scan_id, headers, self.report)
        numbers: dict[str, int | None] = {}
        for header in series:  # a slice without a number in its file's name has the one of its header
            number = _number(stem(header.file))
            numbers[header.file] = header.instance_number if number is None else number
        there = {stem(file) for file in group.files} | {str(number) for number in numbers.values()}
        for listed in rows:
            if str(listed) not in there:
                self.report(missing(scan_id, f"{self.folder}/{group.name}/{listed}.dcm", "no such file"))
        if group.name not in self.incomplete:
            detail = f"the series has no row in {META}"
            self.report(Problem(scan_id, "", "image_without_label", detail, f"labelled by {IMAGES} alone"))
        if self.incomplete.get(group.name) == 1:
            detail = "incomplete_organ is 1: the series does not show the whole organ"
            self.report(Problem(scan_id, "", "incomplete_organ", detail, "kept"))
        if not series:
            return
        known = {file: int(number in rows) for file, number in numbers.items()}
        injured = self.patients.get(patient, {})
        labels: dict[str, DatasetLabel] = {
            "image_label": int(any(known.values())),
            "image_injuries": sorted(set().union(*rows.values())),
            "patient_label": injured.get("any_injury"),
            "patient_injuries": [injury for injury in INJURIES if injured.get(injury) == 1],
            "incomplete_organ": self.incomplete.get(group.name),
        }
        yield Candidate(scan_id, patient, series, known, labels)

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        images = super().join(candidate, ordered, masks)
        if not self.by_patient:
            return images
        injured = self.patients.get(candidate.patient_id)
        if injured is None:
            detail = f"patient {candidate.patient_id} has no row in {PATIENTS}"
            self.report(Problem(candidate.scan_id, "", "image_without_label", detail, "left out"))
            return Labels(None, None)
        if injured["any_injury"]:
            hidden = any(injured[injury] for injury in INJURIES if injury.startswith(WITHOUT_ROWS))
            return Labels(1, images.slices if images.label and not hidden else None)
        if not images.label:
            return Labels(0, images.slices)
        detail = f"any_injury is 0, but {IMAGES} has rows of the series"
        self.report(Problem(candidate.scan_id, "", "conflicting_label", detail, "counts as 0, slices unknown"))
        return Labels(0, None)

    def finish(self) -> None:
        super().finish()
        patients = sorted(self.without_scan - {name.partition("/")[0] for name in self.unseen})
        detail = f"no such folder; in {PATIENTS}"
        report_some((missing("", f"{self.folder}/{patient}", detail) for patient in patients), self.report)


def _number(word: str) -> int | None:
    """A whole number, also in the form 12.0, which pandas writes for a column with gaps."""
    word = word.removesuffix(".0")
    return int(word) if word.isascii() and word.isdecimal() and len(word) < 20 else None


def _read_injured_slices(path: Path, report: Report) -> dict[str, dict[int, set[str]]]:
    """Injuries by series, named patient/series, and instance number."""
    texts = read_texts(path, ("patient_id", "series_id", "instance_number", "injury_name"), report)
    rows: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    bad = []
    for patient, series, instance, injury in zip(*(column.to_pylist() for column in texts.values()), strict=True):
        number = _number(instance)
        if number is None or not patient or not series:
            bad.append(bad_row(path, ", ".join((patient, series, instance, injury))))
            continue
        injuries = rows[f"{patient}/{series}"][number]
        if injury in injuries:
            file = f"{ABDOMEN_FOLDER}/{patient}/{series}/{number}.dcm"
            report(Problem(f"{patient}_{series}", file, "double_label", f"{injury} more than once", "counted once"))
        injuries.add(injury)
    report_some(bad, report)
    return {name: dict(numbers) for name, numbers in rows.items()}


def _read_patients(path: Path, report: Report) -> dict[str, dict[str, int]]:
    """any_injury and the injuries by patient."""
    texts = read_texts(path, ("patient_id", *INJURIES, "any_injury"), report)
    columns = {name: numbers_of(texts[name]).tolist() for name in (*INJURIES, "any_injury")}
    patients: dict[str, dict[str, int]] = {}
    bad = []
    for row, patient in enumerate(texts["patient_id"].to_pylist()):
        injured = {name: values[row] for name, values in columns.items()}
        if min(injured.values()) < 0 or not patient:
            bad.append(bad_row(path, f"patient {patient}: {injured}"))
        elif patients.get(patient, injured) != injured:
            detail = f"two rows of patient {patient} differ"
            report(Problem("", path.name, "conflicting_label", detail, "the first counts"))
        elif patient in patients:
            report(Problem("", path.name, "double_label", f"patient {patient} more than once", "counted once"))
        else:
            if injured["any_injury"] != max(injured[name] for name in INJURIES):
                detail = f"patient {patient}: any_injury is {injured['any_injury']}, but the injuries are {injured}"
                report(Problem("", path.name, "conflicting_label", detail, "any_injury counts"))
            patients[patient] = injured
    report_some(bad, report)
    return patients


# PROSTATEx: ADC maps of the prostate (MR) with masks of the lesions, one scan per patient.
#
#     PROSTATEx_Classes.csv                       ID (ProstateX-0000_Finding1), Clinically Significant (True, False)
#     Images/ADC/ProstateX-0001_ep2d_diff_tra_8.nii.gz
#     Masks/ADC/ProstateX-0005-Finding1-ep2d_diff_tra_DYNDIST_MIX_ADC_ROI.nii.gz     one mask per finding
#
# A scan is positive if one of its findings is clinically significant; its positive slices are those in which a mask of
# such a finding has a voxel, unknown without such a mask.  A scan without a row in the table counts as negative.

LESIONS = "Files/lesions"  # the folder of the clone that holds the table, the images and the masks

CLASSES, ADC_MAPS, ADC_MASKS = "PROSTATEx_Classes.csv", "Images/ADC", "Masks/ADC"
OWN_LABELS = "labels.csv"
FINDING_ID, SIGNIFICANT = "ID", "Clinically Significant"

ATTRIBUTION = (
    'Masks: Cuocolo et al., "PROSTATEx masks" (github.com/rcuocolo/PROSTATEx_masks, CC BY 4.0).',
    "Images: SPIE-AAPM-NCI PROSTATEx challenge (The Cancer Imaging Archive). Cite both.",
)
"""What a page with results on PROSTATEx says."""


def open_prostatex(root: Path, options: SourceOptions, report: Report) -> ScanSource:
    """Opens the clone, its folder Files/lesions, or a folder with labels.csv."""
    if not root.is_dir():
        raise UserError(f"{root} is not a folder; give the clone of github.com/rcuocolo/PROSTATEx_masks")
    if (root / OWN_LABELS).is_file() and not (root / CLASSES).is_file():
        return FolderScans(root, SourceOptions(table=root / OWN_LABELS), report, "MR")
    return ProstateScans(root / LESIONS if (root / LESIONS).is_dir() else root, report)


class ProstateScans(ScanSource):
    """The ADC maps and masks as the public repository holds them."""

    def __init__(self, base: Path, report: Report) -> None:
        for name in (CLASSES, ADC_MAPS, ADC_MASKS):
            if not (base / name).exists():
                clone = f"the clone of github.com/rcuocolo/PROSTATEx_masks, which has {LESIONS}/{name}"
                raise UserError(f"{base / name} is not there; give {clone}")
        self.root, self.report = base.resolve(), report
        self.significant = _read_classes(base / CLASSES, report)
        self.images = self._find_images()
        self.masks = self._find_masks()
        self.expected_groups = len(self.images)

    def _volumes(self, folder: str) -> list[str]:
        return sorted(file for file in list_below(self.root, folder, self.report) if is_nifti(file))

    def _find_images(self) -> dict[str, str]:
        """The image of each patient; of several, the one whose name sorts first."""
        images: dict[str, str] = {}
        for file in self._volumes(ADC_MAPS):
            named = re.match(r"(ProstateX-\d+)_", PurePosixPath(file).name)
            if named is None:
                detail = "the name does not begin with a patient, as ProstateX-0001_ does"
                self.report(Problem("", file, "image_without_label", detail, "left out"))
            elif named[1] in images:
                detail = f"a second image of the patient, beside {images[named[1]]}"
                self.report(Problem(named[1], file, "double_scan", detail, "the first one counts"))
            else:
                images[named[1]] = file
        return images

    def _find_masks(self) -> dict[str, list[str]]:
        """The masks of each patient's significant findings; those that the table does not list are reported."""
        masks: dict[str, list[str]] = defaultdict(list)
        for file in self._volumes(ADC_MASKS):
            named = re.match(r"(ProstateX-\d+)[-_](Finding\d+)[-_]", PurePosixPath(file).name)
            patient, finding = named.groups() if named else ("", "")
            if finding not in self.significant.get(patient, {}):
                detail = f"{CLASSES} has no row {patient}_{finding}" if named else "the name has no patient and finding"
                self.report(Problem(patient, file, "image_without_label", detail, "mask ignored"))
            elif self.significant[patient][finding]:
                masks[patient].append(file)
        return masks

    def groups(self) -> Iterator[FileGroup]:
        for patient, file in self.images.items():
            yield FileGroup(patient, [file], self.masks.get(patient, ()), "MR")

    def candidates(self, group: FileGroup, headers: Sequence[Header]) -> Iterator[Candidate]:
        if headers:
            yield Candidate(group.name, group.name, headers)

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        patient = candidate.scan_id
        known = self.significant.get(patient)
        if known is None:
            detail = f"no row of {CLASSES}"
            self.report(Problem(patient, "", "image_without_label", detail, "no finding: counts as negative"))
        if not any((known or {}).values()):
            return Labels(0, np.zeros(len(ordered.slices), np.int8))
        wanted = self.masks.get(patient, [])
        names = [PurePosixPath(file).name for file in wanted]
        for finding, significant in self.significant[patient].items():
            if significant and not any(re.match(rf"{patient}[-_]{finding}[-_]", name) for name in names):
                action = "its slices count as negative" if names else "positive without slice labels"
                detail = f"{finding} is clinically significant and has no mask in {ADC_MASKS}"
                self.report(Problem(patient, "", "label_mismatch", detail, action))
        if not wanted:
            return Labels(1, None)
        try:
            if len(masks) < len(wanted):
                raise ValueError(f"{len(wanted) - len(masks)} of {len(wanted)} masks cannot be read")
            slices = slices_of_masks(masks, ordered)
            if not slices.any():
                raise ValueError(f"mask {wanted[0]} has no voxel")
        except ValueError as error:
            self.report(Problem(patient, "", "label_mismatch", str(error), "positive without slice labels"))
            return Labels(1, None)
        return Labels(1, slices)

    def finish(self) -> None:
        for patient in sorted(self.significant.keys() - self.images.keys()):
            findings = ", ".join(self.significant[patient])
            self.report(missing(patient, "", f"no image in {ADC_MAPS}; the table has {findings}"))


def _read_classes(path: Path, report: Report) -> dict[str, dict[str, bool]]:
    """Whether each finding of each patient is clinically significant."""
    texts = read_texts(path, (FINDING_ID, SIGNIFICANT), report)
    classes: dict[str, dict[str, bool]] = {}
    for name, word in zip(texts[FINDING_ID].to_pylist(), texts[SIGNIFICANT].to_pylist(), strict=True):
        named = re.fullmatch(r"(ProstateX-\d+)[-_](Finding\d+)", name)
        if named is None or word.lower() not in BINARY:
            report(bad_row(path, f"{FINDING_ID} is {name!r}, {SIGNIFICANT} is {word!r}"))
            continue
        (patient, finding), value = named.groups(), bool(BINARY[word.lower()])
        known = classes.setdefault(patient, {})
        if finding in known:
            same = known[finding] == value
            kind, action = ("double_label", "counted once") if same else ("conflicting_label", "counts as True")
            report(Problem(patient, path.name, kind, f"{finding} is {known[finding]} and {value}", action))
        known[finding] = value or known.get(finding, False)
    if not classes:
        raise UserError(f"{path} has no usable row; it needs {FINDING_ID} (ProstateX-0000_Finding1) and {SIGNIFICANT}")
    return classes
