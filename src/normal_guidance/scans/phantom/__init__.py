"""Drawn CT scans with lesions, written as real DICOM: for tests, the demo and the documentation.

in     an anatomy, a number of scans, a seed, oddities by name
out    DICOM, label tables and phantom.json, which holds the truth
first  phantom_files.py (needs pydicom); plan.py and drafts.py need numpy only
"""
