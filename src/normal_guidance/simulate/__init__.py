"""Data that we draw ourselves: the semi-synthetic set of the paper, and CT phantoms written as real DICOM."""
