"""A scan's result as messages for reading lists tell it: patient and study from its DICOM report, numbers from JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydicom import Dataset, dcmread

from normal_guidance.clinical.dicom.result_headers import NOTICE
from normal_guidance.clinical.prediction_job import PREDICTION
from normal_guidance.files import read_json
from normal_guidance.node.incoming import hash_of

REPORT = "structured_report.dcm"


@dataclass(frozen=True)
class FindingResult:
    """What a model says of one finding.

    Args:
        name: the finding's name; empty where the model does not name it.
        code: its SNOMED CT identifier; None if unknown.
        meaning: what SNOMED CT calls it; None if unknown.
        sought: what was looked for, in words.
        probability: calibrated.
        threshold: from which on a scan is positive; None if none was chosen.
        positive: None without a threshold.
        key_slices: DICOM's numbers of the slices of the highest attention, or their places from 1 without such.
        model: fingerprint of the model.
    """

    name: str
    code: str | None
    meaning: str | None
    sought: str
    probability: float
    threshold: float | None
    positive: bool | None
    key_slices: tuple[int, ...]
    model: str

    @property
    def title(self) -> str:
        """What SNOMED CT calls the finding, or else its name."""
        return self.meaning or self.name.replace("_", " ") or "finding without a name"


@dataclass(frozen=True)
class ResultContent:
    """The result of one scan.

    Args:
        identity: a hash of the series and its slices: the same result has the same, however often it is sent.
        patient: headers of the patient and study, as the results have them.
        findings: what was found.
        cautions: what a reader must know before trusting it.
    """

    identity: str
    patient: Dataset
    findings: tuple[FindingResult, ...]
    cautions: tuple[str, ...]

    def header(self, name: str) -> str:
        """A value of the patient's headers as text; empty where it is missing."""
        value = self.patient.get(name)
        return "" if value is None else str(value)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notice, then the cautions."""
        return (NOTICE, *self.cautions)


def prediction_files(folder: Path) -> list[Path]:
    """The files that `read_content` reads: those of scans that have DICOM results, in a fixed order."""
    return [one for one in sorted(folder.glob(f"*/{PREDICTION}")) if _report_of(one) is not None]


def read_content(file: Path, series: str, round: int) -> ResultContent:
    """The content of a scan's prediction.json and of the report beside it."""
    about = read_json(file, "predict again")
    report = _report_of(file)
    patient = dcmread(report, stop_before_pixels=True) if report is not None else Dataset()
    patient.pop("ContentSequence", None)
    found = about.get("findings") or [{**about, "name": ""}]
    return ResultContent(
        identity=hash_of(series, str(round), file.parent.name),
        patient=patient,
        findings=tuple(_finding(one) for one in found),
        cautions=tuple(about["cautions"]),
    )


def _report_of(prediction: Path) -> Path | None:
    return next(iter(sorted(prediction.parent.glob(f"dicom/**/{REPORT}"))), None)


def _finding(about: Mapping[str, Any]) -> FindingResult:
    return FindingResult(
        name=about["name"],
        code=about.get("code"),
        meaning=about.get("meaning"),
        sought=about["sought"],
        probability=about["probability"],
        threshold=about["threshold"],
        positive=about["positive"],
        key_slices=tuple(one["instance_number"] or one["slice"] for one in about["key_slices"]),
        model=about["model"]["identity"]["fingerprint"],
    )
