"""Measures of predictions and what is sure about them: tests, intervals, calibration.

in     logits, attention, labels and patients of scans
out    measures with intervals, p values, thresholds, conformal sets
first  localization.py
"""
