"""From folders of scans to a manifest: which files are a scan, in which order, with which labels and problems.

in     a folder of DICOM or NIfTI, and a table of labels
out    a manifest (`manifest.py`), problems.csv, splits
first  indexing.py
"""
