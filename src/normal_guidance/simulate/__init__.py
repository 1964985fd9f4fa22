"""Simulated data: the paper's semi-synthetic set, and CT phantoms written as real DICOM."""
