"""Results as DICOM objects, for the software that hospitals have.

in     `ScanPrediction` and its strip; the headers of its slices (source_series.py)
out    key objects, a structured report and a picture
first  objects.py
"""

from normal_guidance.base.system import importing

with importing("dicom", "DICOM results need highdicom"):
    import highdicom  # noqa: F401
