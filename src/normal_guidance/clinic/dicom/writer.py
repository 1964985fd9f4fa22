"""DICOM results of a scan, for the software that hospitals have: key slices, a structured report, a picture.

    key_objects.dcm         Key Object Selection: the slices to look at; not for a scan that is negative by threshold
    structured_report.dcm   Comprehensive 3D SR, TID 1500: probability, threshold, key slices, attention of every slice
    strip.dcm               Secondary Capture: key slices with the attention curve

They belong to the source's patient and study, each as a new series.  The patient is taken from the headers of the
scan's slices only.  All say what was looked for, by which model, and what a reader must be warned of.
"""

from __future__ import annotations

import io
from pathlib import Path

from pydicom import Dataset, config

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import make_folder, write_atomically
from normal_guidance.clinic.dicom.objects import KINDS, Result, capture, key_objects, structured_report
from normal_guidance.clinic.dicom.objects import anonymize as without_patient
from normal_guidance.clinic.dicom.source_series import read_source
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.scans.index.problems import Problem, Report


def write_dicom(
    prediction: ScanPrediction,
    strip: Path,
    out: Path,
    *,
    anonymize: bool = False,
    report: Report | None = None,
    place: int = 0,
) -> list[Path]:
    """Write a scan's results as DICOM into the folder `out`, and return the files; UserError without an identity."""
    # The strip is a PNG file, which must not name the patient.  `report` receives problems without values of a header
    # and, with `anonymize`, without names of files.  `place` is the finding's among those of the scan, from 0.

    def note(problem: Problem) -> None:
        if report is not None:
            report(problem._replace(file="") if anonymize else problem)

    source = read_source(prediction.row, prediction.root, note)
    if anonymize and source.burned_in:
        raise UserError(
            f"scan {prediction.row.scan_id!r}: (0028,0301) BurnedInAnnotation is YES: its pixels name the patient, and "
            "the strip shows them; clean the pixels first, or leave out --anonymize"
        )
    if anonymize:
        source = without_patient(source)
    try:
        picture = strip.read_bytes()
    except OSError as error:
        raise UserError(f"{strip} cannot be read ({error.strerror}); predict again") from error
    keys, report_of, image = (Result(prediction, source, kind, place) for kind in KINDS.values())
    with config.disable_value_validation():  # pydicom would warn of the source's values, which are reported above
        results = (
            key_objects(keys) if keys.shows_keys else None,
            structured_report(report_of),
            capture(image, picture, strip.name),
        )
        contents = {
            out / name: _encoded(dataset) for name, dataset in zip(KINDS, results, strict=True) if dataset is not None
        }
    make_folder(out)
    for name in KINDS:
        if out / name not in contents:
            (out / name).unlink(missing_ok=True)
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents)


def _encoded(dataset: Dataset) -> bytes:
    file = io.BytesIO()
    dataset.save_as(file, enforce_file_format=True)
    return file.getvalue()
