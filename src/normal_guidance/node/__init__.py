"""A DICOM node: receives series, predicts them and sends the results on."""
