"""From files of new scans to predictions.

in     DICOM, NIfTI, a zip or a DICOMweb address, and a bundle
out    `ScanPrediction` (`scan_prediction.py`) or why there is none
first  predicting.py
"""
