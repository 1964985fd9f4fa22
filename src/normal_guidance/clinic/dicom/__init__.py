"""Results as DICOM objects, for the software that hospitals have.

in     `ScanPrediction` and its strip; the headers of its slices (source_series.py)
out    key objects, a structured report and a picture (objects.py)
first  writer.py
"""

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import install_command

try:
    import highdicom  # noqa: F401
except ImportError as error:
    raise UserError(f"DICOM results need highdicom; {install_command('dicom')}") from error
