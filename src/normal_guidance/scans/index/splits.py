"""Training, validation and test scans, by patient: 4:1:1, stratified by the patient's label.

One sixth of the patients is held out for testing, then one fifth of the rest for validation, both with scikit-learn's
`train_test_split`, as in the paper; `audit` proves that the parts share nothing.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

from normal_guidance.base.errors import UserError, both_sides, choose_one_of, reading, shorten
from normal_guidance.base.files import write_atomically
from normal_guidance.base.tables import read_cells, read_rows
from normal_guidance.scans.index.labels import read_table
from normal_guidance.scans.index.manifest import PARTS, Manifest
from normal_guidance.show.text_tables import as_csv

if TYPE_CHECKING:
    from normal_guidance.core.bags import LabelledScans


PROPORTIONS = (4, 1, 1)  # the paper's proportions, in the order of `PARTS`


class SplitRow(NamedTuple):
    """One line of a split."""

    scan_id: str
    patient_id: str
    label: Literal[0, 1]
    part: str


COLUMNS = SplitRow._fields


class PartRow(NamedTuple):
    """What a user's own table of parts must have; other columns are not read."""

    scan_id: str
    part: str


AGAIN = "make it with nguide split"


@dataclass(frozen=True, eq=False)
class Split:
    """The part of every scan.

    Example:
        >>> split = split_scans(["a", "b", "c"] * 8, [f"P{n}" for n in range(24)], [0, 1] * 12, seed=1001)
        Traceback (most recent call last):
        normal_guidance.base.errors.UserError: scan 'a' occurs 8 times; give each scan once
    """

    scan_ids: tuple[str, ...]
    patient_ids: tuple[str, ...]
    labels: tuple[int, ...]
    parts: tuple[str, ...]

    def __post_init__(self) -> None:
        for scan, times in Counter(self.scan_ids).most_common(1):
            if times > 1:
                raise UserError(f"scan {scan!r} occurs {times} times; give each scan once")
        for part in sorted(set(self.parts)):
            choose_one_of("part", part, PARTS)
        refuse_overlap(self.patient_ids, self.parts, "patient")

    def __len__(self) -> int:
        return len(self.scan_ids)

    def numbers(self, part: str) -> list[int]:
        """The row numbers of the scans of a part."""
        return [number for number, other in enumerate(self.parts) if other == part]

    def counts(self) -> dict[str, dict[str, int]]:
        """Patients, scans and positive scans of each part."""
        counts = {}
        for part in PARTS:
            patients, numbers = {self.patient_ids[n] for n in self.numbers(part)}, self.numbers(part)
            positive = sum(self.labels[n] for n in numbers)
            counts[part] = {"patients": len(patients), "scans": len(numbers), "positive": positive}
        return counts


def split_scans(
    scan_ids: Sequence[str],
    patient_ids: Sequence[str],
    labels: Iterable[int],
    seed: int,
    proportions: Sequence[int] = PROPORTIONS,
) -> Split:
    """Splits scans by patient.

    Example:
        >>> patients = [f"P{n // 2}" for n in range(48)]
        >>> split = split_scans([f"S{n}" for n in range(48)], patients, [n // 2 % 2 for n in range(48)], seed=1001)
        >>> [counts["patients"] for counts in split.counts().values()]
        [16, 4, 4]
    """
    if len(proportions) != len(PARTS) or min(proportions) < 1:
        raise UserError(f"proportions {':'.join(map(str, proportions))}: give three whole numbers above 0, as in 4:1:1")
    labels = [int(label) for label in labels]
    label_of = patient_labels(patient_ids, labels)
    train, val, test = proportions
    patients = sorted(label_of)
    rest, testing = _draw(patients, label_of, test / (train + val + test), seed)
    training, validating = _draw(rest, label_of, val / (train + val), seed)
    drawn = zip(PARTS, (training, validating, testing), strict=True)
    part_of = {patient: part for part, members in drawn for patient in members}
    parts = tuple(part_of[patient] for patient in patient_ids)
    return Split(tuple(scan_ids), tuple(patient_ids), tuple(labels), parts)


def fold_scans(patient_ids: Sequence[str], labels: Sequence[int], folds: int, seed: int) -> list[int]:
    """The fold of every scan, from 0: a patient's scans share one, and every fold has scans of both labels."""
    from sklearn.model_selection import StratifiedGroupKFold  # slow, and stores need splits without it

    positive, patients = sum(labels), len(set(patient_ids))
    made = [-1] * len(labels)
    if 2 <= folds <= min(positive, len(labels) - positive, patients):
        kind = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
        for number, (_, scans) in enumerate(kind.split(list(labels), list(labels), groups=list(patient_ids))):
            for scan in scans:
                made[scan] = number
    if set(zip(made, labels, strict=True)) != {(fold, label) for fold in range(folds) for label in (0, 1)}:
        raise UserError(
            f"{positive} positive and {len(labels) - positive} negative scans of {patients} patients cannot be divided "
            f"into {folds} folds that all have both; use fewer, or add patients"
        )
    return made


def patient_labels(patient_ids: Sequence[str], labels: Sequence[int]) -> dict[str, int]:
    """The label that most of a patient's scans have; ties count as negative."""
    scans: dict[str, list[int]] = defaultdict(list)
    for patient, label in zip(patient_ids, labels, strict=True):
        scans[patient].append(label)
    return {patient: int(2 * sum(of_patient) > len(of_patient)) for patient, of_patient in scans.items()}


def _draw(patients: Sequence[str], label_of: Mapping[str, int], share: float, seed: int) -> tuple[list[str], list[str]]:
    from sklearn.model_selection import train_test_split

    labels = [label_of[patient] for patient in patients]
    try:
        rest, drawn = train_test_split(list(patients), test_size=share, random_state=seed, stratify=labels)
    except ValueError as error:
        raise UserError(
            f"{sum(labels)} positive and {len(labels) - sum(labels)} negative patients are too few to be split so that "
            "training, validation and test each have both; add patients"
        ) from error
    return rest, drawn


def write_split(path: str | Path, split: Split) -> None:
    """Writes a split as csv."""
    rows = zip(split.scan_ids, split.patient_ids, split.labels, split.parts, strict=True)
    write_atomically(path, as_csv([dict(zip(COLUMNS, row, strict=True)) for row in rows]).encode())


def read_split(path: str | Path) -> Split:
    """Reads a split; refuses one whose parts share a patient.

    Example:
        >>> read_split("nowhere.csv")
        Traceback (most recent call last):
        normal_guidance.base.errors.UserError: nowhere.csv cannot be read (No such file or directory); make it with
        nguide split
    """
    rows = read_rows(Path(path), SplitRow, AGAIN, exact=False)
    with reading(path, AGAIN):
        return Split(*(tuple(getattr(row, name) for row in rows) for name in COLUMNS))


def read_parts(path: Path, scans: Manifest | LabelledScans) -> dict[str, str]:
    """Every scan's part, from a table with scan_id and part; one of `nguide split` must be of the same scans."""
    if path.suffix not in (".csv", ".parquet"):
        raise UserError(f"{path} is not a .csv or .parquet file; give one with the columns scan_id and part")
    if not path.is_file():
        folder, names = path.parent, ""
        if folder.is_dir():
            names = ", ".join(sorted(other.name for other in folder.iterdir() if other.suffix in (".csv", ".parquet")))
            there = f"holds {shorten(names, 300)}" if names else "holds no .csv or .parquet"
        else:
            there = "is not a folder"
        step = "give one with the columns scan_id and part" if names else "make a table with nguide split"
        raise UserError(f"--split {path} is not a file; {folder} {there}; {step}")
    if path.suffix == ".parquet":
        columns, _ = read_table(path, "--split", PartRow._fields, PartRow._fields)
        rows: Sequence[PartRow] = [PartRow(*pair) for pair in zip(columns["scan_id"], columns["part"], strict=True)]
    else:
        again = "give a table with the columns scan_id and part"
        if read_cells(path, again)[:1] == [list(COLUMNS)]:
            split = read_split(path)
            with reading(path, AGAIN):
                check_origin(split, scans)
        rows = read_rows(path, PartRow, again, exact=False)
    part_of: dict[str, str] = {}
    for row in rows:
        if row.scan_id in part_of:
            raise UserError(f"{path} has scan {shorten(row.scan_id)!r} more than once; give each scan once")
        part_of[row.scan_id] = row.part
    return part_of


def check_origin(split: Split, scans: Manifest | LabelledScans) -> None:
    """Refuses a split that was made from other scans of the same names: other patients, or other labels."""
    origin = "manifest" if isinstance(scans, Manifest) else "store"
    here = dict(zip(scans.scan_ids, zip(scans.patient_ids, scans.labels.tolist(), strict=True), strict=True))
    there = dict(zip(split.scan_ids, zip(split.patient_ids, split.labels, strict=True), strict=True))
    both = [scan for scan in split.scan_ids if scan in here]
    for number, what in ((0, "belongs to another patient"), (1, "has another label")):
        if other := [scan for scan in both if here[scan][number] != there[scan][number]]:
            raise UserError(
                f"scan {other[0]!r} {what} in the {origin} than in the split ({len(other)} such scans), which was made "
                "from other data; make the split again"
            )


def audit(split: Split, scans: Manifest | LabelledScans, checksums: Mapping[str, str] | None = None) -> dict[str, int]:
    """Refuses parts that share a patient, scan, slice or checksum of features; returns how many were compared."""
    have = set(scans.scan_ids)
    refuse_other_scans(split.scan_ids, have, "manifest" if isinstance(scans, Manifest) else "store")
    part_of = dict(zip(split.scan_ids, split.parts, strict=True))
    parts = [part_of[scan] for scan in scans.scan_ids]
    check_origin(split, scans)
    refuse_overlap(scans.patient_ids, parts, "patient")
    compared = {"scans": len(have), "patients": len(set(scans.patient_ids))}
    if isinstance(scans, Manifest):
        files, frames = (scans.table[name].combine_chunks().flatten().to_pylist() for name in ("files", "frames"))
        of_slices = [part for part, length in zip(parts, scans.lengths.tolist(), strict=True) for _ in range(length)]
        refuse_overlap(list(zip(files, frames, strict=True)), of_slices, "slice")
        compared["slices"] = len(files)
    if checksums is None:
        return compared
    absent = have - set(checksums)
    known = [scan for scan in scans.scan_ids if scan not in absent]
    refuse_overlap([checksums[scan] for scan in known], [part_of[scan] for scan in known], "checksum")
    return {**compared, "checksums": len(known)}


def refuse_other_scans(split: Collection[str], scans: Collection[str], origin: str) -> None:
    """Refuses a split that has not the scans of its origin, a store or a manifest."""
    listed, have = set(split), set(scans)
    for lost, where in ((listed - have, origin), (have - listed, "split")):
        if lost:
            raise UserError(
                f"scan {min(lost)!r} is not in the {where} ({len(lost)} such scans); make the split again "
                f"({both_sides('the split', listed, f'the {origin}', have)})"
            )


def refuse_overlap(
    ids: Iterable[object], parts: Iterable[str], what: str, part_of: dict[object, str] | None = None
) -> None:
    """Refuses two parts that share a patient, or what the ids are of; `part_of` takes note of their parts."""
    part_of = {} if part_of is None else part_of
    for member, part in zip(ids, parts, strict=True):
        before = part_of.setdefault(member, part)
        if before != part:
            raise UserError(
                f"{what} {member!r} is in part {before!r} and in part {part!r}; put all its scans into one part"
            )
