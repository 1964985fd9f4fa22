"""Training, validation and test scans, by patient: 4:1:1, stratified by the patient's label.

A patient's label is that of most of their scans; ties count as negative.  One sixth of the patients is held out for
testing, then one fifth of the rest for validation, both with scikit-learn's `train_test_split`, as in the paper.
A split is a csv file with the columns scan_id, patient_id, label and part; `audit` proves that its parts share
nothing.
"""

from __future__ import annotations

import io
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal, NamedTuple

import pandas as pd

from normal_guidance.base.errors import UserError, shorten
from normal_guidance.base.files import write_atomically
from normal_guidance.base.tables import read_cells, read_rows
from normal_guidance.scans.index.labels import read_table
from normal_guidance.scans.index.manifest import PARTS, Manifest

if TYPE_CHECKING:
    from normal_guidance.core.bags import LabelledScans


PROPORTIONS = (4, 1, 1)
"""The paper's proportions, in the order of `PARTS`."""


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
        times: dict[str, int] = defaultdict(int)
        for scan in self.scan_ids:
            times[scan] += 1
        often = max(times, key=lambda scan: times[scan], default="")
        if times and times[often] > 1:
            raise UserError(f"scan {often!r} occurs {times[often]} times; give each scan once")
        unknown = set(self.parts) - set(PARTS)
        if unknown:
            raise UserError(f"part {shorten(min(unknown))!r} is unknown; choose one of {', '.join(PARTS)}")
        _refuse_overlap(self.patient_ids, self.parts, "patient")

    def __len__(self) -> int:
        return len(self.scan_ids)

    def numbers(self, part: str) -> list[int]:
        """The row numbers of the scans of a part."""
        return [number for number, own in enumerate(self.parts) if own == part]

    def counts(self) -> dict[str, dict[str, int]]:
        """Patients, scans and positive scans of each part."""
        return {
            part: {
                "patients": len({self.patient_ids[n] for n in self.numbers(part)}),
                "scans": len(self.numbers(part)),
                "positive": sum(self.labels[n] for n in self.numbers(part)),
            }
            for part in PARTS
        }


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
    part_of = {
        **dict.fromkeys(training, "train"),
        **dict.fromkeys(validating, "val"),
        **dict.fromkeys(testing, "test"),
    }
    parts = tuple(part_of[patient] for patient in patient_ids)
    return Split(tuple(scan_ids), tuple(patient_ids), tuple(labels), parts)


def fold_scans(patient_ids: Sequence[str], labels: Sequence[int], folds: int, seed: int) -> list[int]:
    """The fold of every scan, from 0: a patient's scans share one, and every fold has scans of both labels.

    scikit-learn's `StratifiedGroupKFold` balances labels and sizes; where patients have several scans, folds differ.
    """
    from sklearn.model_selection import StratifiedGroupKFold  # slow, and stores need splits without it

    positive, patients = sum(labels), len(set(patient_ids))
    problem = f"{positive} positive and {len(labels) - positive} negative scans of {patients} patients"
    made = [-1] * len(labels)
    if 2 <= folds <= min(positive, len(labels) - positive, patients):
        kind = StratifiedGroupKFold(folds, shuffle=True, random_state=seed)
        for number, (_, own) in enumerate(kind.split(list(labels), list(labels), groups=list(patient_ids))):
            for scan in own:
                made[scan] = number
    found = {(fold, label) for fold, label in zip(made, labels, strict=True)}
    if found != {(fold, label) for fold in range(folds) for label in (0, 1)}:
        raise UserError(
            f"{problem} cannot be divided into {folds} folds that all have both; use fewer, or add patients"
        )
    return made


def patient_labels(patient_ids: Sequence[str], labels: Sequence[int]) -> dict[str, int]:
    """The label that most of a patient's scans have; ties count as negative."""
    scans: dict[str, list[int]] = defaultdict(list)
    for patient, label in zip(patient_ids, labels, strict=True):
        scans[patient].append(label)
    return {patient: int(2 * sum(own) > len(own)) for patient, own in scans.items()}


def _draw(patients: Sequence[str], label_of: Mapping[str, int], share: float, seed: int) -> tuple[list[str], list[str]]:
    from sklearn.model_selection import train_test_split

    labels = [label_of[patient] for patient in patients]
    counts = f"{sum(labels)} positive and {len(labels) - sum(labels)} negative patients"
    try:
        rest, drawn = train_test_split(list(patients), test_size=share, random_state=seed, stratify=labels)
    except ValueError as error:
        raise UserError(
            f"{counts} are too few to be split so that training, validation and test each have both; add patients"
        ) from error
    return rest, drawn


def write_split(path: str | Path, split: Split) -> None:
    """Writes a split as csv."""
    columns = (split.scan_ids, split.patient_ids, split.labels, split.parts)
    text = io.StringIO()
    pd.DataFrame(dict(zip(COLUMNS, columns, strict=True))).to_csv(text, index=False, lineterminator="\n")
    write_atomically(path, text.getvalue().encode())


def read_split(path: str | Path) -> Split:
    """Reads a split; refuses one whose parts share a patient.

    Example:
        >>> read_split("nowhere.csv")
        Traceback (most recent call last):
        normal_guidance.base.errors.UserError: nowhere.csv cannot be read ([Errno 2] No such file or directory:
        'nowhere.csv'); make it with nguide split
    """
    rows = read_rows(Path(path), SplitRow, AGAIN, exact=False)
    try:
        return Split(*(tuple(getattr(row, name) for row in rows) for name in COLUMNS))
    except UserError as error:
        raise UserError(f"{path}: {error}") from error


def read_parts(path: Path, scans: Manifest | LabelledScans) -> dict[str, str]:
    """Every scan's part, from a .csv or .parquet with the columns scan_id and part.

    A table of `nguide split` is bound to the scans that it was made from: where a patient or a label is another one
    here, it is refused.
    """
    if path.suffix not in (".csv", ".parquet"):
        raise UserError(f"{path} is not a .csv or .parquet file; give one with the columns scan_id and part")
    if not path.is_file():
        raise UserError(f"--split {path} is not a file; {_there(path.parent)}")
    if path.suffix == ".parquet":
        columns = read_table(path, "--split", PartRow._fields, PartRow._fields)
        rows: Sequence[PartRow] = [PartRow(*pair) for pair in zip(columns["scan_id"], columns["part"], strict=True)]
    else:
        again = "give a table with the columns scan_id and part"
        if read_cells(path, again)[:1] == [list(COLUMNS)]:
            split = read_split(path)
            try:
                check_origin(split, scans)
            except UserError as error:
                raise UserError(f"{path}: {error}") from error
        rows = read_rows(path, PartRow, again, exact=False)
    part_of: dict[str, str] = {}
    for row in rows:
        if row.scan_id in part_of:
            raise UserError(f"{path} has scan {shorten(row.scan_id)!r} more than once; give each scan once")
        part_of[row.scan_id] = row.part
    return part_of


def _there(folder: Path) -> str:
    """Say which tables a folder holds."""
    if not folder.is_dir():
        return f"{folder} is not a folder; make a table with nguide split"
    tables = sorted(one.name for one in folder.iterdir() if one.suffix in (".csv", ".parquet"))
    if not tables:
        return f"{folder} holds no .csv or .parquet; make a table with nguide split"
    return f"{folder} holds {shorten(', '.join(tables), 300)}; give one with the columns scan_id and part"


def check_origin(split: Split, scans: Manifest | LabelledScans) -> None:
    """Refuses a split that was made from other scans of the same names: other patients, or other labels."""
    place = "manifest" if isinstance(scans, Manifest) else "store"
    here = dict(zip(scans.scan_ids, zip(scans.patient_ids, scans.labels.tolist(), strict=True), strict=True))
    there = dict(zip(split.scan_ids, zip(split.patient_ids, split.labels, strict=True), strict=True))
    both = [scan for scan in split.scan_ids if scan in here]
    for number, what in ((0, "belongs to another patient"), (1, "has another label")):
        if other := [scan for scan in both if here[scan][number] != there[scan][number]]:
            raise UserError(
                f"scan {other[0]!r} {what} in the {place} than in the split ({len(other)} such scans), which was made "
                "from other data; make the split again"
            )


def audit(split: Split, scans: Manifest | LabelledScans, checksums: Mapping[str, str] | None = None) -> dict[str, int]:
    """Checks that the parts of a split share no patient, no scan and, where a manifest lists them, no slice.

    Given checksums of the scans' features, it also checks that no scan has a copy under another name in another part.
    Returns the numbers of compared scans, patients, slices and checksums; raises a UserError for anything shared.
    """
    listed, have = set(split.scan_ids), set(scans.scan_ids)
    place = "manifest" if isinstance(scans, Manifest) else "store"
    for lost, problem in ((listed - have, f"is not in the {place}"), (have - listed, "is in no part")):
        if lost:
            raise UserError(f"scan {min(lost)!r} {problem} ({len(lost)} such scans); make the split again")
    part_of = dict(zip(split.scan_ids, split.parts, strict=True))
    parts = [part_of[scan] for scan in scans.scan_ids]
    check_origin(split, scans)
    _refuse_overlap(scans.patient_ids, parts, "patient")
    compared = {"scans": len(have), "patients": len(set(scans.patient_ids))}
    if isinstance(scans, Manifest):
        files, file_parts = _slices(scans, parts)
        _refuse_overlap(files, file_parts, "slice")
        compared["slices"] = len(files)
    if checksums is None:
        return compared
    absent = have - set(checksums)
    known = [scan for scan in scans.scan_ids if scan not in absent]
    _refuse_overlap([checksums[scan] for scan in known], [part_of[scan] for scan in known], "checksum")
    return {**compared, "checksums": len(known)}


def _slices(manifest: Manifest, parts: Sequence[str]) -> tuple[list[tuple[str, int]], list[str]]:
    """File and frame of every slice, and the part of its scan."""
    of_scan = (manifest.table[name].combine_chunks() for name in ("files", "frames"))
    files, frames = (column.flatten().to_pylist() for column in of_scan)
    repeated = [part for part, length in zip(parts, manifest.lengths.tolist(), strict=True) for _ in range(length)]
    return list(zip(files, frames, strict=True)), repeated


def _refuse_overlap(ids: Sequence[object], parts: Sequence[str], what: str) -> None:
    part_of: dict[object, str] = {}
    for one, part in zip(ids, parts, strict=True):
        before = part_of.setdefault(one, part)
        if before != part:
            raise UserError(f"{what} {one!r} is in part {before!r} and in part {part!r}; a {what} belongs to one part")
