"""A scan without its patient, by the Basic Application Level Confidentiality Profile (DICOM PS3.15 E).

Names, dates, numbers and descriptions are emptied or left out.  Every UID is replaced by its hash with a secret that is
drawn when the program starts and never stored:

- Results of one run agree with each other: slices of one series stay in one series, scans of one study in one study,
  scans of one patient with one patient.
- The original cannot be found from the result, not even by trying all likely UIDs, and two runs cannot be matched.
- A reference to a slice leads to no object in any archive.  It still distinguishes slices and connects the three
  results; the structured report lists the slices in their order, so that its n-th slice is the n-th of the scan.
"""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from secrets import token_hex

from pydicom.uid import generate_uid

from normal_guidance import __version__
from normal_guidance.clinical.dicom.source_series import REQUIRED, Reference, SourceSeries

METHOD = f"normal-guidance {__version__}, basic profile"
"""DeidentificationMethod of the results."""

DUMMY_DATE, DUMMY_TIME = "19000101", "000000"
"""They replace the date of the result, which is required: a scan is often scored on the day it was made."""

_SECRET = token_hex(32)


def anonymize(source: SourceSeries) -> SourceSeries:
    """Replace the scan's UIDs, and its patient by a pseudonym."""
    patient = source.identity["PatientID"], source.identity.get("IssuerOfPatientID", "")
    number = _hash(repr(patient) if patient[0] else source.study_uid)[:12].upper()
    return replace(
        source,
        study_uid=_new_uid(source.study_uid),
        frame_of_reference=source.frame_of_reference and _new_uid(source.frame_of_reference),
        slices=tuple(map(_moved, source.slices)),
        identity={
            **dict.fromkeys(REQUIRED, ""),
            "PatientName": f"ANONYMOUS^{number}",
            "PatientID": f"ANONYMOUS-{number}",
            "PatientIdentityRemoved": "YES",
            "DeidentificationMethod": METHOD,
            "LongitudinalTemporalInformationModified": "REMOVED",
        },
        series=replace(source.series, description=""),
        anonymous=True,
    )


def _moved(reference: Reference) -> Reference:
    return replace(reference, sop_uid=_new_uid(reference.sop_uid), series_uid=_new_uid(reference.series_uid))


def _new_uid(uid: str) -> str:
    return str(generate_uid(entropy_srcs=[_SECRET, uid]))


def _hash(value: str) -> str:
    return sha256(f"{_SECRET} {value}".encode()).hexdigest()
