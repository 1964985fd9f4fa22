"""Results as DICOM objects.

    source_series.py       patient, study and slices of a scan, from its headers
    anonymize.py           the same scan without its patient
    result_headers.py      the headers and sentences that all results share, and their UIDs
    result_series.py       numbers and descriptions of their series
    body_parts.py          codes of body parts
    key_objects.py         Key Object Selection: the key slices
    structured_report.py   TID 1500: probability, threshold, key slices, the attention of every slice
    capture.py             the strip as a picture

`normal_guidance.clinic.dicom.writer` writes them.
"""

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import install_command

try:
    import highdicom  # noqa: F401
except ImportError as error:
    raise UserError(f"DICOM results need highdicom; {install_command('dicom')}") from error
