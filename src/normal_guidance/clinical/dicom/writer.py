"""DICOM results of a scan, for the software that hospitals have: key slices, a structured report, a picture.

    key_objects.dcm         Key Object Selection: the slices to look at
    structured_report.dcm   Comprehensive SR after TID 1500: probability, threshold, the attention of every slice
    strip.dcm               Secondary Capture: key slices with the attention curve

They belong to the source's patient and study, as three new series.  The patient is taken from the headers of the scan's
slices only.
"""

from __future__ import annotations

import io
from pathlib import Path

from pydicom import Dataset, config

from normal_guidance.clinical.dicom.anonymize import anonymize as without_patient
from normal_guidance.clinical.dicom.capture import capture
from normal_guidance.clinical.dicom.key_objects import key_objects
from normal_guidance.clinical.dicom.result_headers import Result
from normal_guidance.clinical.dicom.source_series import SourceSeries, read_source
from normal_guidance.clinical.dicom.structured_report import structured_report
from normal_guidance.clinical.scan_prediction import ScanPrediction
from normal_guidance.data.findings import Finding
from normal_guidance.data.problems import Problem, Report
from normal_guidance.errors import UserError
from normal_guidance.files import make_folder, write_atomically

SERIES = {
    "key_objects.dcm": (9801, "Key slices, AI, research only"),
    "structured_report.dcm": (9802, "Slice scores, AI, research only"),
    "strip.dcm": (9803, "Key slices and attention curve, AI, research only"),
}
"""SeriesNumber and SeriesDescription of every result; scanners seldom use such large numbers."""


FINDING_STEP = 10
"""The series of the next finding have numbers that are larger by this."""

LONGEST = 64
"""Characters of a SeriesDescription."""


def write_dicom(
    prediction: ScanPrediction,
    strip: Path,
    out: Path,
    *,
    anonymize: bool = False,
    report: Report | None = None,
    place: int = 0,
) -> list[Path]:
    """Write a scan's results as DICOM into the folder `out`, and return the files.

    The same scan and prediction give the same UIDs; see `Result`.

    Args:
        strip: a PNG file, which must not name the patient.
        anonymize: leave out everything that identifies the patient, and use new UIDs; see `clinical.dicom.anonymize`.
        report: receives missing and wrong attributes as problems, which hold no value of a header; in anonymous results
            also no names of files, which often name the patient.
        place: the finding's place among those of the scan, from 0, for the numbers of the series.

    Raises UserError where the scan has no DICOM identity (NIfTI) or an ambiguous one; nothing is written then.
    """

    def tell(problem: Problem) -> None:
        if report is not None:
            report(problem._replace(file="") if anonymize else problem)

    source = read_source(prediction.row, prediction.root, tell)
    if anonymize:
        source = _anonymous(source, prediction.row.scan_id)
    try:
        picture = strip.read_bytes()
    except OSError as error:
        raise UserError(f"{strip} cannot be read ({error.strerror}); predict again") from error
    with config.disable_value_validation():  # pydicom would warn of the source's values, which are reported above
        results = _results(prediction, source, picture, strip.name, place)
        files = {out / name: _encoded(dataset) for name, dataset in results.items()}
    make_folder(out)
    for path, content in files.items():
        write_atomically(path, content)
    return list(files)


def _anonymous(source: SourceSeries, scan_id: str) -> SourceSeries:
    if source.burned_in:
        raise UserError(
            f"scan {scan_id!r}: (0028,0301) BurnedInAnnotation is YES: its pixels name the patient, and the strip "
            "shows them; clean the pixels first, or leave out --anonymize"
        )
    return without_patient(source)


def _results(
    prediction: ScanPrediction, source: SourceSeries, picture: bytes, strip: str, place: int
) -> dict[str, Dataset]:
    def result(name: str, content: bytes = b"") -> Result:
        number, title = SERIES[name]
        return Result(prediction, source, _named(title, prediction.finding), number + FINDING_STEP * place, content)

    return {
        "key_objects.dcm": key_objects(result("key_objects.dcm")),
        "structured_report.dcm": structured_report(result("structured_report.dcm")),
        "strip.dcm": capture(result("strip.dcm", picture), strip),
    }


def _named(title: str, finding: Finding | None) -> str:
    """A title that begins with the finding's name, as much of it as there is room for."""
    if finding is None:
        return title
    return f"{finding.name[: LONGEST - len(title) - 2]}: {title}"


def _encoded(dataset: Dataset) -> bytes:
    file = io.BytesIO()
    dataset.save_as(file, enforce_file_format=True)
    return file.getvalue()
