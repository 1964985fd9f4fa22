"""A folder of results: json, pages, a strip of pictures, DICOM; a summary over scans.

in     `ScanPrediction`
out    files that people, programs and archives open
first  result_folder.py
"""
