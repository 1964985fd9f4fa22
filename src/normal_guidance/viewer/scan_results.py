"""What `nguide predict` says of a scan beyond its attention: call, key slices, interval, and what was odd."""

from __future__ import annotations

import csv
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from normal_guidance.errors import UserError
from normal_guidance.evaluation.run_report import NOT_OURS
from normal_guidance.features.convert import file_name
from normal_guidance.files import read_json
from normal_guidance.typed_json import ContentError, read_as

PREDICTION, SLICES = "prediction.json", "slices.csv"

AGAIN = "delete the folder and predict again"

ORDINARY = ("localizer", "secondary_capture", "no_image")
"""Files that are left out of every scan: they are not slices of it."""

FLAG_OF_KIND = {
    "unsuitable": "forced",
    **dict.fromkeys(("gap", "unreadable", "failed", "incomplete_organ", "one_slice"), "incomplete"),
    **dict.fromkeys(("duplicate", "double_scan"), "duplicated"),
}
"""The flag of a problem by its kind; other slices that were left out have the flag `LEFT_OUT`."""

LEFT_OUT, NOTE = "left out", "note"

FLAGS = ("forced", "incomplete", LEFT_OUT, "duplicated")
"""Flags in the list of scans, the gravest first; a note is shown with the scan only."""

WORDS = {
    "forced": "Predicted by force, although the model was not made for this scan",
    "incomplete": "Incomplete",
    LEFT_OUT: "Left out",
    "duplicated": "Duplicated",
    NOTE: "Note",
}
"""The beginning of a warning."""


@dataclass(frozen=True)
class Problem:
    """Something odd about a scan, as prediction.json has it."""

    kind: str
    detail: str
    action: str


@dataclass(frozen=True)
class Interval:
    """First and last slice, and what the interval does, in words."""

    first: int
    last: int
    meaning: str = ""


@dataclass(frozen=True)
class Called:
    """The result for one finding; slices are counted from 0, key slices are in the order of prediction.json."""

    key_slices: tuple[int, ...]
    interval: Interval | None
    threshold: float | None
    positive: bool | None

    def as_json(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class ScanResult:
    """The result for a scan: that for its first finding, and those for all by their names, where they have names."""

    first: Called
    findings: dict[str, Called]
    problems: tuple[Problem, ...]
    description: str
    """SeriesDescription; empty where it is unknown."""

    def of(self, finding: str) -> Called:
        """The result for a finding; without a name, that for the only one."""
        return self.findings.get(finding, self.first)


def read_result(folder: Path, scan_id: str) -> ScanResult | None:
    """Read the result for a scan; None where `nguide predict` did not write the folder."""
    path = folder / file_name(scan_id) / PREDICTION
    if not path.is_file():
        return None
    about = read_json(path, AGAIN)
    try:
        return ScanResult(
            first=_called(about),
            findings={read_as(str, one["name"], "name"): _called(one) for one in about.get("findings", [])},
            problems=tuple(read_as(Problem, one, "problems", exact=False) for one in about.get("problems", [])),
            description=str(about.get("source", {}).get("series_description") or ""),
        )
    except (*NOT_OURS, ContentError) as error:
        raise UserError(f"{path} is damaged: {error}; {AGAIN}") from error


def _called(about: Any) -> Called:
    """The result for a finding from a part of prediction.json, which counts slices from 1."""
    interval = about.get("interval")
    counted = interval and read_as(Interval, interval, "interval", exact=False)
    return Called(
        key_slices=tuple(read_as(int, one["slice"], "key_slices") - 1 for one in about["key_slices"]),
        interval=counted and Interval(counted.first - 1, counted.last - 1, counted.meaning),
        threshold=read_as(float | None, about.get("threshold"), "threshold"),
        positive=read_as(bool | None, about.get("positive"), "positive"),
    )


def read_instance_numbers(folder: Path, scan_id: str) -> list[int | None] | None:
    """The InstanceNumber of every slice; None where no slice has one, as in NIfTI."""
    path = folder / file_name(scan_id) / SLICES
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        words = [line.get("instance_number") or "" for line in csv.DictReader(file)]
    numbers = [int(word) if word.lstrip("-").isdigit() else None for word in words]
    return numbers if any(number is not None for number in numbers) else None


def flag_of(problem: Problem) -> str:
    """The flag of one problem.

    Example:
        >>> flag_of(Problem("unsuitable", "it is MR", "predicted because of --force"))
        'forced'
        >>> flag_of(Problem("mixed_size", "64 x 64", "left out")), flag_of(Problem("tilt", "12 degrees", "kept"))
        ('left out', 'note')
    """
    if problem.kind in FLAG_OF_KIND:
        return FLAG_OF_KIND[problem.kind]
    is_left_out = problem.action.startswith("left out") and problem.kind not in ORDINARY
    return LEFT_OUT if is_left_out else NOTE


def flags(problems: Iterable[Problem]) -> list[str]:
    """The flags of a scan, the gravest first."""
    found = {flag_of(one) for one in problems}
    return [flag for flag in FLAGS if flag in found]


def warnings(problems: Iterable[Problem]) -> list[dict[str, str]]:
    """One sentence for each kind of problem and what was done about it, the gravest first.

    Example:
        >>> gaps = [Problem("gap", "10 mm after slice 4", "kept"), Problem("gap", "15 mm after slice 9", "kept")]
        >>> [one["text"] for one in warnings(gaps)]
        ['Incomplete: 10 mm after slice 4, and 1 more like this (kept).']
    """

    def order(problem: Problem) -> tuple[int, str, str]:
        return (*FLAGS, NOTE).index(flag_of(problem)), problem.kind, problem.action

    found = []
    for _, same in groupby(sorted(problems, key=order), order):
        first, *others = same
        more = f", and {len(others)} more like this" if others else ""
        flag = flag_of(first)
        forced = flag == "forced" and first.action.startswith("predicted because of --force")
        action = "" if forced else f" ({first.action})"
        found.append({"flag": flag, "text": f"{WORDS[flag]}: {first.detail}{more}{action}."})
    return found
