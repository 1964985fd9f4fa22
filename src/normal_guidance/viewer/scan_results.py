"""What `nguide predict` says of a scan beyond its attention: call, key slices, interval, and what was odd."""

from __future__ import annotations

import csv
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normal_guidance.data.cautions import DOUBTFUL, HARMLESS, Caution, cautions
from normal_guidance.data.problems import KINDS, Problem
from normal_guidance.data.scan_names import folder_name
from normal_guidance.errors import UserError, shorten
from normal_guidance.evaluation.run_report import NOT_OURS
from normal_guidance.files import read_json
from normal_guidance.typed_json import ContentError, read_as

PREDICTION, SLICES = "prediction.json", "slices.csv"

AGAIN = "delete the folder and predict again"

NOTE = "note"
"""The flag of what changes nothing."""

NO_RESULT = Caution(DOUBTFUL, f"The scan has no {PREDICTION}: what was odd about it is not known.")
"""The caution of a scan whose folder was deleted or renamed after it was predicted."""


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
    of_model: tuple[str, ...] = ()
    """Cautions about the model."""

    def of(self, finding: str) -> Called:
        """The result for a finding; without a name, that for the only one."""
        return self.findings.get(finding, self.first)


def read_result(folder: Path, scan_id: str) -> ScanResult | None:
    """Read the result for a scan; None where `nguide predict` did not write the folder."""
    path = folder / folder_name(scan_id) / PREDICTION
    if not path.is_file():
        return None
    about = read_json(path, AGAIN)
    try:
        problems = tuple(map(_problem, about.get("problems", [])))
        of_scan = {one.text for one in cautions(problems)}
        told = read_as(tuple[str, ...], about.get("cautions", []), "cautions")
        return ScanResult(
            first=_called(about),
            findings={read_as(str, one["name"], "name"): _called(one) for one in about.get("findings", [])},
            problems=problems,
            description=str(about.get("source", {}).get("series_description") or ""),
            of_model=tuple(text for text in told if text not in of_scan),
        )
    except (*NOT_OURS, ContentError) as error:
        raise UserError(f"{path} is damaged: {error}; {AGAIN}") from error


def _problem(about: Any) -> Problem:
    one = read_as(Problem, about, "problems")
    if one.kind not in KINDS:
        raise ContentError(f"problems has the kind {shorten(one.kind)!r}")
    return one


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
    path = folder / folder_name(scan_id) / SLICES
    if not path.is_file():
        return None
    with path.open(encoding="utf-8", newline="") as file:
        words = [line.get("instance_number") or "" for line in csv.DictReader(file)]
    numbers = [int(word) if word.lstrip("-").isdigit() else None for word in words]
    return numbers if any(number is not None for number in numbers) else None


def flags(found: Iterable[Caution]) -> list[str]:
    """The flags of cautions, each once."""
    return list(dict.fromkeys(one.flag for one in found if one.flag != NOTE))


def warnings(problems: Sequence[Problem], of_model: Sequence[str] = ()) -> list[Caution]:
    """The cautions of a scan, the gravest first, those of the model, then what was odd and changes nothing, as notes."""
    notes = [Caution(NOTE, f"Note: {one.detail} ({one.action}).") for one in problems if one.kind in HARMLESS]
    return [*cautions(problems), *(Caution(DOUBTFUL, text) for text in of_model), *dict.fromkeys(notes)]
