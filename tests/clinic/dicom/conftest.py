"""Scans of every kind, and their results."""

from small_dicom import copied, results, scans, strip  # noqa: F401
