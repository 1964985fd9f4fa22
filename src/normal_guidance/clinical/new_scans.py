"""The scans in folders, archives and files that a user names, with nothing to say which they are but their headers.

Headers are read and slices ordered by the code behind `nguide index`.  A folder with images in it, or one in an
archive, holds one scan for each series in it; every NIfTI file is a scan.  What is no image is noted.  What should
have been a scan and cannot be one is a `NotPredicted`, like a scan that fails later.
"""

from __future__ import annotations

import json
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING

from normal_guidance.core.bags import UNKNOWN
from normal_guidance.data.containers import list_files, list_members
from normal_guidance.data.file_contents import Mask
from normal_guidance.data.header_reading import NIFTI, is_nifti
from normal_guidance.data.indexing import read_rows
from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.problems import KINDS, Problem
from normal_guidance.data.sources.interface import (
    Candidate,
    Group,
    Labels,
    Report,
    list_below,
    patient_of,
    series_folders,
)
from normal_guidance.errors import UserError

if TYPE_CHECKING:
    from normal_guidance.data.dicom_slices import Header
    from normal_guidance.data.geometry import Ordered

NO_SCAN = frozenset({"no_image", "localizer", "secondary_capture"})
"""Files that are no slices, and are no loss: reports, scouts, screenshots."""

SLICE_SUFFIXES = frozenset({".dcm", ".dicom", ".ima"})
"""A file called so is meant to be a slice; if it is no DICOM file, one is missing."""

NOT_DICOM = "not a DICOM file"
"""How reading a header says so; DICOM files without pixels (reports, presentation states) are told otherwise."""

RESERVED = ("index.html", "summary.csv", "summary.json", "predictions.parquet", "manifest.parquet", "problems.csv")
"""Names in the output folder that a scan's folder cannot have."""

MOST_LETTERS = 100
"""Of a scan's name: it becomes a folder's."""

UNLISTED = "@"
"""Begins the key of what could not be listed; the keys of scans begin with a number."""

TAKES = "a DICOM folder, a .zip, a .nii or .nii.gz, or a folder of such"


@dataclass(frozen=True, eq=False)
class NotPredicted:
    """A scan without a prediction: what is wrong with it, and what else was odd."""

    scan_id: str
    reason: Problem
    problems: tuple[Problem, ...] = ()

    @property
    def refused(self) -> bool:
        """Whether it could be predicted, if told to go on (`force`)."""
        return self.reason.kind == "unsuitable"


@dataclass(frozen=True, eq=False)
class FoundScans:
    """What lies in the given paths.

    Args:
        root: the folder that the rows' files are relative to.
        rows: the scans, in the order of their paths.
        problems: of each scan, by id; "" has those of no scan.
        incomplete: of scans that some file of could not be read: those files' problems.
        unusable: what should have been scans.
    """

    root: Path
    rows: tuple[ScanRow, ...]
    problems: Mapping[str, tuple[Problem, ...]]
    incomplete: Mapping[str, tuple[Problem, ...]]
    unusable: tuple[NotPredicted, ...]


def find_scans(
    paths: Sequence[str | Path], *, workers: int = 0, any_modality: bool = False, anonymize: bool = False
) -> FoundScans:
    """Finds the scans and orders their slices.

    Args:
        paths: DICOM folders, zip archives, NIfTI files, or folders of such.
        workers: processes that read headers; 0 reads them in this one.
        any_modality: take images that are not CT, too.
        anonymize: number scans in place of naming them after their folders, and leave out patient ids and the
            details of problems, which may quote headers and paths.

    Example:
        >>> find_scans(["nowhere"])
        Traceback (most recent call last):
        normal_guidance.errors.UserError: nowhere is not there; give a DICOM folder, a .zip, a .nii or .nii.gz, or a
        folder of such
    """
    root, places = _root_of(paths)
    problems: list[Problem] = []
    source = _NewScans(root, places, problems.append)
    rows = list(read_rows(source, problems, workers=workers, any_modality=any_modality))
    found = _Sorted(source, rows, problems).found()
    if not found.rows and all(one.reason.kind == "no_image" for one in found.unusable):
        given = ", ".join(map(str, paths))
        why = found.unusable[0].reason.detail if len(paths) == 1 else "none of them holds an image"
        raise UserError(f"{given}: {why}; give {TAKES}")
    return _anonymous(found) if anonymize else found


def _root_of(paths: Sequence[str | Path]) -> tuple[Path, list[str]]:
    """The folder above all paths, and the paths below it ("." for the folder itself)."""
    if not paths:
        raise UserError(f"there is no scan to predict; give {TAKES}")
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path} is not there; give {TAKES}")
    real = list(dict.fromkeys(Path(path).resolve() for path in paths))
    for one in real:
        inside = next((other for other in real if other != one and one.is_relative_to(other)), None)
        if inside is not None:
            raise UserError(f"{one} lies in {inside}, so its scans would be predicted twice; leave one of them out")
    if len(real) == 1 and real[0].is_dir():
        return real[0], ["."]
    root = Path(os.path.commonpath([path.parent for path in real]))
    return root, [path.relative_to(root).as_posix() for path in real]


# ----------------------------------------------------------------------------------------------------
# The source that `read_rows` reads
# ----------------------------------------------------------------------------------------------------


@dataclass
class _Leaf:
    """A folder with files in it, one in an archive, or a file of its own."""

    place: str
    """The path that was given and led to it."""
    name: str
    files: Sequence[str]
    series: list[str] = field(default_factory=list)
    """UIDs of those that are scans."""


class _NewScans:
    """Scans without a table; satisfies `Dataset`.

    While headers are read, a scan is called by a key, 'number of its leaf|UID of its series': which names are free is
    known at the end only.
    """

    expected_files: int | None = None
    expected_groups: int | None = None

    def __init__(self, root: Path, places: Sequence[str], report: Report) -> None:
        self.root, self.places, self.report = root, places, report
        self.leaves: list[_Leaf] = []
        self.leaf_of: dict[str, int] = {}
        self.folder_of: dict[str, str] = {}

    def groups(self) -> Iterator[Group]:
        for place in self.places:
            files = list(self._files(place))
            for leaf in _leaves(self.root, place, files):
                self.leaf_of[leaf.files[0]] = len(self.leaves)
                self.leaves.append(leaf)
                yield Group("", leaf.files)

    def _files(self, place: str) -> Iterator[str]:
        if place == ".":
            return list_files(self.root, self.report)
        if (self.root / place).is_dir():
            return list_below(self.root, place, self.report)
        if place.lower().endswith(".zip"):
            return list_members(self.root / place, f"{place}!", self.report)
        return iter([place])

    def scan_of(self, group: Group, series_uid: str) -> str:
        return f"{self.leaf_of[group.files[0]]}|{series_uid}"

    def candidates(self, group: Group, headers: Sequence[Header]) -> Iterator[Candidate]:
        leaf = self.leaves[self.leaf_of[group.files[0]]]
        series: dict[str, list[Header]] = defaultdict(list)
        for header in headers:
            series[header.series_uid].append(header)
        for uid, members in series.items():
            key = self.scan_of(group, uid)
            leaf.series.append(uid)
            self._note_other_folder(key, uid, members[0].file)
            extra = {
                "series_uid": "" if is_nifti(members[0].file) else uid,
                "study_uid": members[0].study_uid,
                "series_description": members[0].description,
            }
            yield Candidate(key, patient_of(key, members, self.report), members, extra=extra)

    def _note_other_folder(self, key: str, uid: str, file: str) -> None:
        other = self.folder_of.setdefault(uid, file) if uid else file
        if other != file:
            detail = f"a series of the same UID begins with {other}"
            action = "both kept; if they are parts of one scan, put its files into one folder"
            self.report(Problem(key, file, "double_scan", detail, action))

    def join(self, candidate: Candidate, ordered: Ordered, mask: Mask | None) -> Labels:
        number_of = {header.file: header.instance_number for header in candidate.headers if header.frames == 1}
        # What hospital software numbers the slices by.
        candidate.extra["instance_numbers"] = [number_of.get(file) for file, _ in ordered.slices]
        return Labels(UNKNOWN, None)

    def finish(self) -> None:
        """There are no labels that a file could be missing for."""


def _leaves(root: Path, place: str, files: Sequence[str]) -> Iterator[_Leaf]:
    volumes = [file for file in files if is_nifti(file)]
    for folder, members in series_folders(file for file in files if not is_nifti(file)):
        single = len(files) == 1 and files[0] == place
        name = PurePosixPath(place).stem if single else folder.as_posix()
        yield _Leaf(place, root.name if name == "." else name, members)
    for file in volumes:
        suffix = next(ending for ending in sorted(NIFTI, key=len, reverse=True) if file.lower().endswith(ending))
        yield _Leaf(place, file[: -len(suffix)].replace(".zip!", "/"), [file])


# ----------------------------------------------------------------------------------------------------
# Names, and what is whose problem
# ----------------------------------------------------------------------------------------------------


class _Sorted:
    """Scans with names, and their problems."""

    def __init__(self, source: _NewScans, rows: Sequence[ScanRow], problems: Sequence[Problem]) -> None:
        self.source, self.rows, self.problems = source, rows, problems
        self.taken = {name.casefold() for name in RESERVED}
        self.names: dict[str, str] = {}

    def found(self) -> FoundScans:
        for row in self.rows:
            self._name(row.scan_id)
        of_scan: dict[str, list[Problem]] = defaultdict(list)
        lost: dict[str, list[Problem]] = defaultdict(list)
        for problem in self.problems:
            key = self._owner(problem)
            if (problem.kind in NO_SCAN and not _should_be_slice(problem)) or not key:
                of_scan[""].append(self._named(problem, ""))
            elif key in self.names and problem.scan_id == key:
                of_scan[key].append(self._named(problem, key))
            else:
                lost[key].append(problem)
        missing = {
            key: tuple(self._named(one, key) for one in lost.pop(key)) for key in list(lost) if key in self.names
        }
        unusable = [self._unusable(key, of) for key, of in lost.items()] + self._empty_places(lost)
        return FoundScans(
            root=self.source.root,
            rows=tuple(self._renamed(row) for row in self.rows),
            problems={self.names.get(key, ""): tuple(of) for key, of in of_scan.items()},
            incomplete={self.names[key]: of for key, of in missing.items()},
            unusable=tuple(unusable),
        )

    def _owner(self, problem: Problem) -> str:
        """The key of the scan that a problem is about.

        A file that cannot be read does not say its series: it is of the only one in its folder, or if there are none,
        the folder's; with several, nobody knows.
        """
        number, _, uid = problem.scan_id.partition("|")
        if not number:
            return self._lost_archive(problem)
        if uid:
            return problem.scan_id
        series = self.source.leaves[int(number)].series
        return f"{number}|{series[0]}" if len(series) == 1 else "" if series else problem.scan_id

    def _lost_archive(self, problem: Problem) -> str:
        """The path of what could not even be listed, a broken archive say, unless other scans came of it."""
        outer = problem.file.partition("!")[0]
        came = any(file.startswith(f"{outer}!") for leaf in self.source.leaves for file in leaf.files[:1])
        return "" if problem.kind != "unreadable" or came else f"{UNLISTED}{outer}"

    def _name(self, key: str) -> str:
        if key not in self.names:
            leaf = self._leaf(key)
            self.names[key] = self._free(key.removeprefix(UNLISTED) if leaf is None else leaf.name)
        return self.names[key]

    def _leaf(self, key: str) -> _Leaf | None:
        return None if key.startswith(UNLISTED) else self.source.leaves[int(key.partition("|")[0])]

    def _free(self, text: str) -> str:
        """A name that is fit for a folder and that no other scan has."""
        plain = re.sub(r"[^A-Za-z0-9._-]+", "-", text).strip("-.")[:MOST_LETTERS] or "scan"
        name, number = plain, 2
        while name.casefold() in self.taken:
            name, number = f"{plain}-{number}", number + 1
        self.taken.add(name.casefold())
        return name

    def _renamed(self, row: ScanRow) -> ScanRow:
        name = self.names[row.scan_id]
        return replace(row, scan_id=name, patient_id=name if row.patient_id == row.scan_id else row.patient_id)

    def _named(self, problem: Problem, key: str) -> Problem:
        name = self.names.get(key, "")
        return problem._replace(scan_id=name, action=problem.action.replace(key, name) if key else problem.action)

    def _unusable(self, key: str, problems: Sequence[Problem]) -> NotPredicted:
        """A folder or series of which no file is a slice."""
        name, first = self._name(key), problems[0]
        wrong = [problem for problem in problems if problem.kind == "wrong_modality"]
        if wrong:
            detail = f"{wrong[0].detail}, not CT ({len(wrong)} files)"
            reason = Problem(name, "", "unsuitable", detail, "refused; --force goes on")
        else:
            files = "its file" if len(problems) == 1 else f"none of its {len(problems)} files"
            verb = "cannot be read" if len(problems) == 1 else "can be read"
            reason = Problem(name, first.file, "failed", f"{files} {verb}: {first.detail}", "left out")
        return NotPredicted(name, reason, tuple(self._named(one, key) for one in problems))

    def _empty_places(self, lost: Mapping[str, Sequence[Problem]]) -> list[NotPredicted]:
        """Paths that were given and hold nothing that is, or should be, a scan."""
        leaves = {key: self._leaf(key) for key in (*self.names, *lost)}
        full = {leaf.place for leaf in leaves.values() if leaf is not None}
        unlisted = [key.removeprefix(UNLISTED) for key, leaf in leaves.items() if leaf is None]
        empty = (place for place in self.source.places if place not in full)
        return [self._empty(place) for place in empty if not any(_is_below(path, place) for path in unlisted)]

    def _empty(self, place: str) -> NotPredicted:
        root = self.source.root
        name = self._free(root.name if place == "." else place)
        below = [one for one in self.problems if _is_below(one.file, place)]
        if len(below) == 1:
            detail = f"no scan in it: {below[0].file} is no slice ({below[0].detail})"
        elif below:
            detail = f"no scan in it: {len(below)} files are no slices, for instance {below[0].file}: {below[0].detail}"
        else:
            detail = "no file in it"
        return NotPredicted(name, Problem(name, "", "no_image", detail, "left out"))


def _should_be_slice(problem: Problem) -> bool:
    """Whether a file that is no DICOM is called as if it were: zeros, or an error page, under a slice's name.

    Those that begin with a dot are macOS's notes about the slices, and no loss.

    Example:
        >>> [_should_be_slice(Problem("", file, "no_image", NOT_DICOM, "")) for file in ("A/3.dcm", "A/._3.dcm", "A/3")]
        [True, False, False]
    """
    path = PurePosixPath(problem.file.rpartition("!")[2])
    return problem.detail == NOT_DICOM and path.suffix.lower() in SLICE_SUFFIXES and not path.name.startswith(".")


def _is_below(file: str, place: str) -> bool:
    """Whether a file, relative to the root, came of a path that was given."""
    return place in (".", file) or file.startswith((f"{place}/", f"{place}!"))


# ----------------------------------------------------------------------------------------------------
# Without patients
# ----------------------------------------------------------------------------------------------------


def _anonymous(found: FoundScans) -> FoundScans:
    """Numbers in place of names, in the order of the paths; files stay, since they must be read."""
    ids = [*(row.scan_id for row in found.rows), *(one.scan_id for one in found.unusable)]
    width = max(3, len(str(len(ids))))
    number_of = {"": "", **{scan: f"scan-{number:0{width}d}" for number, scan in enumerate(ids, start=1)}}

    def plain(problems: Sequence[Problem]) -> tuple[Problem, ...]:
        return tuple(anonymous_problem(one, number_of[one.scan_id]) for one in problems)

    return FoundScans(
        root=found.root,
        rows=tuple(
            replace(row, scan_id=number_of[row.scan_id], patient_id=number_of[row.scan_id], extra=_anonymous_extra(row))
            for row in found.rows
        ),
        problems={number_of[scan]: plain(of) for scan, of in found.problems.items()},
        incomplete={number_of[scan]: plain(of) for scan, of in found.incomplete.items()},
        unusable=tuple(
            NotPredicted(number_of[one.scan_id], plain([one.reason])[0], plain(one.problems)) for one in found.unusable
        ),
    )


def _anonymous_extra(row: ScanRow) -> str:
    """Numbers of images say nothing about a patient."""
    return json.dumps({"instance_numbers": json.loads(row.extra)["instance_numbers"]})


def anonymous_problem(problem: Problem, scan_id: str) -> Problem:
    """A problem without what it may quote of paths and headers: its kind's description takes the detail's place.

    Example:
        >>> anonymous_problem(Problem("DOE", "DOE/1.dcm", "duplicate", "same position as DOE/2.dcm", "left out"), "1")
        Problem(scan_id='1', file='', kind='duplicate', detail='Two slices at the same position.', action='left out')
    """
    action = "noted" if problem.kind == "mixed_patient" else problem.action  # which names the patient it chose
    keep = problem.kind == "unsuitable"  # written here, from numbers only
    return Problem(scan_id, "", problem.kind, problem.detail if keep else KINDS[problem.kind], action)
