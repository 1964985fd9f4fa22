"""Scans: found and described (index), encoded (features), or drawn (phantom).

in     folders of DICOM or NIfTI
out    a manifest, then a store of features
first  index/indexing.py
"""
