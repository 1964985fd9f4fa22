"""The scans in folders, archives and files that a user names; only headers say which scans they are.

Headers are read and slices ordered by the code behind `nguide index`.  A folder with images, on disk or in an archive,
holds one scan per series; every NIfTI file is a scan.  Files that are not images are reported.  A folder or file that
should be a scan and cannot be read is a `NotPredicted`, like a scan that fails later.
"""

from __future__ import annotations

import os
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path, PurePosixPath
from typing import TYPE_CHECKING, NamedTuple

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import UNKNOWN
from normal_guidance.scans.index.containers import CT, LEADS_OUT, NIFTI, Mask, is_nifti, list_files, list_members
from normal_guidance.scans.index.manifest import Finding, Labels, ScanRow
from normal_guidance.scans.index.problems import KINDS, Problem, Report, safe_name, same_name
from normal_guidance.scans.index.source import Candidate, FileGroup, list_below, patient_of, series_folders

if TYPE_CHECKING:
    from normal_guidance.scans.index.dicom_slices import Header
    from normal_guidance.scans.index.geometry import Ordered

NO_SCAN = frozenset({"no_image", "localizer", "secondary_capture"})  # files that nobody misses among slices
SLICE_SUFFIXES = frozenset({".dcm", ".dicom", ".ima"})  # such a file that is not DICOM is a missing slice
NOT_DICOM = "not a DICOM file"  # DICOM files without pixels (reports, presentation states) have another detail
RESERVED = ("index.html", "summary.csv", "summary.json", "predictions.parquet", "manifest.parquet", "problems.csv")
"""Files of the output folder; a scan's folder cannot have such a name."""

TAKES = "a DICOM folder, a .zip, a .nii or .nii.gz, or a folder of such"  # what a user may give
GO_ON = "refused; --force goes on"  # the action for a scan that the model was not made for
COPY = "copy the files, or name them as arguments: nguide predict A.nii.gz B.nii.gz"  # for links that lead out


@dataclass(frozen=True, eq=False)
class NotPredicted:
    """A scan without a prediction: the reason, and its other problems."""

    scan_id: str
    reason: Problem
    problems: tuple[Problem, ...] = ()

    def __repr__(self) -> str:
        return f"NotPredicted({self.scan_id!r}, {self.reason.detail!r})"

    @property
    def refused(self) -> bool:
        """Whether `force` would predict it."""
        return self.reason.kind == "unsuitable"


@dataclass(frozen=True, eq=False)
class FoundScans:
    """The scans in the given paths, in their order."""

    root: Path  # the folder that the rows' files are relative to
    rows: tuple[ScanRow, ...]
    problems: Mapping[str, tuple[Problem, ...]]  # by scan id; those of no scan stand under ""
    incomplete: Mapping[str, tuple[Problem, ...]]  # problems of their unreadable files, by scan id
    unusable: tuple[NotPredicted, ...]  # what should be a scan and cannot be read


def find_scans(
    paths: Sequence[str | Path],
    *,
    workers: int = 0,
    any_modality: bool = False,
    modalities: Sequence[str] = (),
    anonymize: bool = False,
) -> FoundScans:
    """Finds the scans and orders their slices.

    Args:
        paths: DICOM folders, zip archives, NIfTI files, or folders of such.
        workers: processes that read headers; 0 reads them in this one.
        any_modality: accept images of any modality.
        modalities: those of the model's training scans (`Expectations.modalities`); CT if left out. NIfTI, which has
            no field for its own, counts as the first.
        anonymize: number the scans instead of naming them after their folders, and leave out patient ids and the
            details of problems, which may quote headers and paths.

    Example:
        >>> find_scans(["nowhere"])
        Traceback (most recent call last):
        normal_guidance.base.errors.UserError: nowhere is not there; give a DICOM folder, a .zip, a .nii or .nii.gz, or
        a folder of such
    """
    from normal_guidance.scans.index.indexing import Indexing  # only here: predictions from features need no pydicom

    root, places = _root_of(paths)
    problems: list[Problem] = []
    accepted = tuple(modalities) or CT
    source = _NewScans(root, places, problems.append, accepted)
    indexing = Indexing(source, problems, any_modality=any_modality, modalities=accepted, with_series=True)
    found = source.named(list(indexing.rows(workers)), problems)
    if not found.rows and all(scan.reason.kind == "no_image" for scan in found.unusable):
        given = ", ".join(map(str, paths))
        why = found.unusable[0].reason.detail if len(paths) == 1 else "none of them holds an image"
        linked = any(problem.detail.endswith(LEADS_OUT) for problem in problems)
        raise UserError(f"{given}: {why}; {COPY if linked else f'give {TAKES}'}")
    return _anonymous(found) if anonymize else found


def is_url(text: str) -> bool:
    """Whether a text is a web address."""
    return text.startswith(("http://", "https://"))


def _root_of(paths: Sequence[str | Path]) -> tuple[Path, list[str]]:
    """The folder above all paths, and the paths below it ("." for the folder itself)."""
    if not paths:
        raise UserError(f"there is no scan to predict; give {TAKES}")
    for path in map(Path, paths):
        if not path.exists():
            raise UserError(f"{path} is not there; give {TAKES}")
    real = list(dict.fromkeys(Path(path).resolve() for path in paths))
    for path in real:
        outer = next((other for other in real if other != path and path.is_relative_to(other)), None)
        if outer is not None:
            raise UserError(f"{path} lies in {outer}, so its scans would be predicted twice; leave one of them out")
    if len(real) == 1 and real[0].is_dir():
        return real[0], ["."]
    root = Path(os.path.commonpath([path.parent for path in real]))
    return root, [path.relative_to(root).as_posix() for path in real]


@dataclass(eq=False)
class _Leaf:
    """A folder with files (on disk or in an archive), a single file, or an archive or folder that cannot be listed."""

    place: str  # the given path that led to it
    name: str
    files: Sequence[str] = ()
    series: list[str] = field(default_factory=list)  # UIDs of the series that are scans


class _LeafSeries(NamedTuple):
    """A scan, or what should be one: a series of a leaf. The UID is empty where no header gives it."""

    leaf: _Leaf
    uid: str = ""


class _NewScans:
    """Scans without a table, as a `ScanSource`: they have numbers for ids until all headers are read (`named`)."""

    findings: tuple[Finding, ...] = ()
    expected_files: int | None = None
    expected_groups: int | None = None

    def __init__(self, root: Path, places: Sequence[str], report: Report, modalities: Sequence[str]) -> None:
        self.root, self.places, self.report, self.modalities = root, places, report, modalities
        self.leaf_of: dict[str, _Leaf] = {}  # by its first file
        self.ids: dict[_LeafSeries, str] = {}
        self.series_of: dict[str, _LeafSeries] = {}
        self.first_file: dict[str, str] = {}
        self.taken = set(map(same_name, RESERVED))
        self.names: dict[_LeafSeries, str] = {}
        self.unlisted: dict[str, _Leaf] = {}

    def groups(self) -> Iterator[FileGroup]:
        for place in self.places:
            for leaf in _leaves(self.root, place, list(self._files(place))):
                self.leaf_of[leaf.files[0]] = leaf
                yield FileGroup("", leaf.files)

    def _files(self, place: str) -> Iterator[str]:
        if place == ".":
            return list_files(self.root, self.report)
        if (self.root / place).is_dir():
            return list_below(self.root, place, self.report)
        if place.lower().endswith(".zip"):
            return list_members(self.root / place, f"{place}!", self.report)
        return iter([place])

    def scan_of(self, group: FileGroup, series_uid: str) -> str:
        series = _LeafSeries(self.leaf_of[group.files[0]], series_uid)
        scan_id = self.ids.setdefault(series, str(len(self.ids)))
        self.series_of[scan_id] = series
        return scan_id

    def candidates(self, group: FileGroup, headers: Sequence[Header]) -> Iterator[Candidate]:
        series: dict[str, list[Header]] = defaultdict(list)
        for header in headers:
            series[header.series_uid].append(header)
        for uid, members in series.items():
            scan_id, file = self.scan_of(group, uid), members[0].file
            self.leaf_of[group.files[0]].series.append(uid)
            other = self.first_file.setdefault(uid, file) if uid else file
            if other != file:
                detail = f"a series with the same UID begins with {other}"
                action = "both kept; if they are parts of one scan, put its files into one folder"
                self.report(Problem(scan_id, file, "double_scan", detail, action))
            yield Candidate(scan_id, patient_of(scan_id, members, self.report), members)

    def join(self, candidate: Candidate, ordered: Ordered, masks: Sequence[Mask]) -> Labels:
        return Labels(UNKNOWN, None)

    def finish(self) -> None:
        """Without labels, no image can be missing."""

    def named(self, rows: Sequence[ScanRow], problems: Sequence[Problem]) -> FoundScans:
        """The scans with their names, and the problems sorted by scan."""
        scans = []
        for row in rows:
            name = self._name(self.series_of[row.scan_id])
            scans.append(replace(row, scan_id=name, patient_id=row.patient_id or name))
        of_scan: dict[str, list[Problem]] = defaultdict(list)
        lost: dict[_LeafSeries, list[Problem]] = defaultdict(list)
        for problem in problems:
            scan = self._scan_of(problem)
            if (problem.kind in NO_SCAN and not _should_be_slice(problem)) or scan is None:
                of_scan[""].append(problem._replace(scan_id=""))
            elif scan in self.names and self.series_of[problem.scan_id] == scan:
                of_scan[self.names[scan]].append(problem._replace(scan_id=self.names[scan]))
            else:
                lost[scan].append(problem)
        incomplete = {scan: of for scan, of in lost.items() if scan in self.names}
        unusable = [self._unusable(scan, of) for scan, of in lost.items() if scan not in incomplete]
        full = {scan.leaf.place for scan in self.names}
        empty = [self._empty(place, problems) for place in self.places if place not in full]
        return FoundScans(
            root=self.root,
            rows=tuple(scans),
            problems={name: tuple(of) for name, of in of_scan.items()},
            incomplete={self.names[scan]: self._renamed(of, scan) for scan, of in incomplete.items()},
            unusable=(*unusable, *empty),
        )

    def _scan_of(self, problem: Problem) -> _LeafSeries | None:
        """The scan that a problem is about; None if it is about none, or nobody knows."""
        # The series of an unreadable file is unknown: the file belongs to the only series of its leaf, or to the leaf
        # where no series is a scan.
        if problem.scan_id:
            given = self.series_of[problem.scan_id]
            if given.uid or not given.leaf.series:
                return given
            return _LeafSeries(given.leaf, given.leaf.series[0]) if len(given.leaf.series) == 1 else None
        # An archive or folder that cannot be listed, unless some of its scans were found.
        outer = problem.file.partition("!")[0]
        if problem.kind != "unreadable" or any(file.startswith(f"{outer}!") for file in self.leaf_of):
            return None
        if outer not in self.unlisted:
            place = next((place for place in self.places if _is_below(outer, place)), outer)
            self.unlisted[outer] = _Leaf(place, outer)
        return _LeafSeries(self.unlisted[outer])

    def _name(self, scan: _LeafSeries) -> str:
        if scan not in self.names:
            self.names[scan] = self._free(scan.leaf.name)
        return self.names[scan]

    def _free(self, text: str) -> str:
        """A name that is fit for a folder and that no other scan has."""
        plain = safe_name(text)
        name, number = plain, 2
        while same_name(name) in self.taken:
            name, number = f"{plain}-{number}", number + 1
        self.taken.add(same_name(name))
        return name

    def _renamed(self, problems: Sequence[Problem], scan: _LeafSeries) -> tuple[Problem, ...]:
        return tuple(problem._replace(scan_id=self.names[scan]) for problem in problems)

    def _unusable(self, scan: _LeafSeries, problems: Sequence[Problem]) -> NotPredicted:
        """A leaf or series without a readable slice."""
        name, first = self._name(scan), problems[0]
        wrong = [problem for problem in problems if problem.kind == "wrong_modality"]
        if wrong:
            detail = f"{wrong[0].detail}, not {' or '.join(self.modalities)} ({len(wrong)} files)"
            reason = Problem(name, "", "unsuitable", detail, GO_ON)
        else:
            none = "its file cannot be read" if len(problems) == 1 else f"none of its {len(problems)} files can be read"
            reason = Problem(name, first.file, "failed", f"{none}: {first.detail}", "left out")
        return NotPredicted(name, reason, self._renamed(problems, scan))

    def _empty(self, place: str, problems: Sequence[Problem]) -> NotPredicted:
        """A given path that holds nothing that is, or should be, a scan."""
        name = self._free(self.root.name if place == "." else place)
        below = [problem for problem in problems if _is_below(problem.file, place)]
        if not below:
            detail = "no file in it"
        elif len(below) == 1:
            detail = f"no scan in it: {below[0].file} is not a slice ({below[0].detail})"
        else:
            instance = f"{below[0].file}: {below[0].detail}"
            detail = f"no scan in it: {len(below)} files are not slices, for instance {instance}"
        return NotPredicted(name, Problem(name, "", "no_image", detail, "left out"))


def _leaves(root: Path, place: str, files: Sequence[str]) -> Iterator[_Leaf]:
    for folder, members in series_folders(file for file in files if not is_nifti(file)):
        single = len(files) == 1 and files[0] == place
        name = PurePosixPath(place).stem if single else folder.as_posix()
        yield _Leaf(place, root.name if name == "." else name, members)
    for file in filter(is_nifti, files):
        suffix = next(ending for ending in sorted(NIFTI, key=len, reverse=True) if file.lower().endswith(ending))
        yield _Leaf(place, file[: -len(suffix)].replace(".zip!", "/"), [file])


def _should_be_slice(problem: Problem) -> bool:
    """Whether a file that is not DICOM has the name of a slice: zeros or an error page in place of the image."""
    # Names that begin with a dot are macOS's notes about the slices, which nobody misses.
    path = PurePosixPath(problem.file.rpartition("!")[2])
    return problem.detail == NOT_DICOM and path.suffix.lower() in SLICE_SUFFIXES and not path.name.startswith(".")


def _is_below(file: str, place: str) -> bool:
    """Whether a file, relative to the root, is the given path or lies in it."""
    return place in (".", file) or file.startswith((f"{place}/", f"{place}!"))


def _anonymous(found: FoundScans) -> FoundScans:
    """The scans with numbers for names; paths of files stay, since they must be read, and instance numbers."""
    ids = [row.scan_id for row in found.rows] + [scan.scan_id for scan in found.unusable]
    width = max(3, len(str(len(ids))))
    number_of = {"": "", **{scan: f"scan-{number:0{width}d}" for number, scan in enumerate(ids, start=1)}}

    def plain(problems: Sequence[Problem]) -> tuple[Problem, ...]:
        return tuple(anonymous_problem(problem, number_of[problem.scan_id]) for problem in problems)

    def row_of(row: ScanRow) -> ScanRow:
        number = number_of[row.scan_id]
        return replace(row, scan_id=number, patient_id=number, study_uid=None, series_uid=None, series_description=None)

    return FoundScans(
        root=found.root,
        rows=tuple(map(row_of, found.rows)),
        problems={number_of[scan]: plain(of) for scan, of in found.problems.items()},
        incomplete={number_of[scan]: plain(of) for scan, of in found.incomplete.items()},
        unusable=tuple(
            NotPredicted(number_of[scan.scan_id], plain([scan.reason])[0], plain(scan.problems))
            for scan in found.unusable
        ),
    )


def anonymous_problem(problem: Problem, scan_id: str) -> Problem:
    """A problem without quotes from paths and headers: the description of its kind replaces the detail."""
    action = "noted" if problem.kind == "mixed_patient" else problem.action  # it names a patient
    keep = problem.kind == "unsuitable"  # written here, from numbers only
    return Problem(scan_id, "", problem.kind, problem.detail if keep else KINDS[problem.kind], action)
