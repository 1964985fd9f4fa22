"""Finds the files of scans that a table names without saying where they lie.

A scan's name may be that of its file (A17.nii.gz, A17_0000.nii.gz), of its folder or of its archive; of DICOM files
also the SeriesInstanceUID, StudyInstanceUID or PatientID that their headers state.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path, PurePosixPath

from normal_guidance.base.errors import UserError, both_sides, shorten
from normal_guidance.base.workers import ask
from normal_guidance.scans.index.containers import is_nifti, list_files, locate
from normal_guidance.scans.index.problems import Problem, Report

MASKS = frozenset(("mask", "masks", "label", "labels", "labelstr", "seg", "segs", "segmentation", "segmentations"))
"""Folders, in small letters, whose files are drawn on scans and are none."""

ENDINGS = re.compile(r"(_0000)?\.(nii\.gz|nii|dcm|dicom|ima|zip)$", re.IGNORECASE)  # nnU-Net's channel 0 among them

HEADERS = {"SeriesInstanceUID": "series_uid", "StudyInstanceUID": "study_uid", "PatientID": "patient_id"}

Places = Mapping[str, Mapping[str, list[str]]]  # by name the places that are called so, each with its files


def match_files(root: Path, table: Path, names: Mapping[str, str], report: Report) -> tuple[dict[str, list[str]], str]:
    """The files of each scan by the name that the table gives it, and how they were found; none at all is an error."""
    files = [file for file in list_files(root, report) if MASKS.isdisjoint(PurePosixPath(file.lower()).parts[:-1])]
    by_name = _by_name(files)
    found, how = _match(names, by_name, report), "files are found by the scans' names"
    if not found:
        # Headers need the extra dicom, which features do without.
        from normal_guidance.scans.index.dicom_slices import Header
        from normal_guidance.scans.index.header_reading import HeaderRequest, read_all

        wanted = (HeaderRequest(file, any_modality=True) for file in files if not is_nifti(file))
        headers = [result for result in read_all(root, wanted) if isinstance(result, Header)]
        for tag, field in HEADERS.items():
            by_tag: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
            for header in headers:
                by_tag[getattr(header, field)][""].append(header.file)
            if found := _match(names, by_tag, report):
                how = f"files are found by their {tag}"
                break
    if not found:
        paths = [PurePosixPath(file.replace("!", "/")) for file in files]
        there = sorted({stem_of(str(path if is_nifti(path.name) else path.parent)) for path in paths} - {""})
        sides = both_sides("the table", names.values(), "the folder", there)
        raise UserError(
            f"no scan of {table} is in {root} ({sides}); correct the names, or add a column path with each "
            "scan's file or folder"
        )
    for scan_id in names:
        if scan_id not in found:
            report(Problem(scan_id, "", "label_without_image", f"nothing in {root} has this name", "left out"))
    return found, how


def _match(names: Mapping[str, str], by_name: Places, report: Report) -> dict[str, list[str]]:
    """The files of the scans that one place is named after, exactly or but for case and leading zeros."""
    alike: dict[str, dict[str, list[str]]] = defaultdict(dict)
    for name, places in by_name.items():
        alike[plain(name)] |= places
    found: dict[str, list[str]] = {}
    for scan_id, name in names.items():
        name = ENDINGS.sub("", name)
        places = by_name.get(name) or alike.get(plain(name), {})
        files = min(places.values(), key=len, default=[])  # of A17/A17.nii.gz and A17 the file
        if any(not set(files) <= set(others) for others in places.values()):
            some = " and ".join(sorted(places)[:2])
            detail = f"{len(places)} places have this name, such as {shorten(some)}; add a column path"
            report(Problem(scan_id, "", "label_without_image", detail, "left out"))
        elif files:
            found[scan_id] = files
    return found


def _by_name(files: Sequence[str]) -> dict[str, dict[str, list[str]]]:
    """The files by the names of the files, and of the folders and archives that they lie in."""
    places: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for file in files:
        path = PurePosixPath(file.replace("!", "/"))
        for place in (path, *path.parents[:-1]):
            for name in {stem_of(place.as_posix()), ENDINGS.sub("", place.as_posix())}:
                places[name][place.as_posix()].append(file)
    return places


def stem_of(path: str) -> str:
    """The name of a file, a folder or an archive, without its ending."""
    return ENDINGS.sub("", PurePosixPath(path.rstrip("/")).name)


def plain(name: str) -> str:
    """A name in small letters, its numbers without leading zeros: spreadsheets cut them off."""
    return re.sub(r"(?<!\d)0+(?=\d)", "", name.lower())


def lowest_values(files: Sequence[tuple[Path, str]]) -> list[float]:
    """The lowest value of each NIfTI file that can be read."""
    lowest = []
    for file in files:
        try:
            lowest.append(ask(_lowest_value, file))
        except ValueError:  # indexing says what is wrong with it
            continue
    return lowest


def _lowest_value(file: tuple[Path, str]) -> float:
    from normal_guidance.scans.index.volumes import read_nifti

    return float(read_nifti(locate(*file), file[1]).min())
