"""Simulated data: the paper's semi-synthetic set, one at real positions, and CT phantoms written as real DICOM."""
