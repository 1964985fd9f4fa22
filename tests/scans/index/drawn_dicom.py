"""Small DICOM files of every encoding, as tests of several modules read them."""

import io
import warnings
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import pydicom
from pydicom.dataset import Dataset, FileMetaDataset
from pydicom.uid import (
    CTImageStorage,
    DeflatedExplicitVRLittleEndian,
    ExplicitVRBigEndian,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLossless,
    JPEGLosslessSV1,
    JPEGLSLossless,
    RLELossless,
)

from normal_guidance.scans.phantom.phantom_files import transcode

NATIVE = (ImplicitVRLittleEndian, ExplicitVRLittleEndian, ExplicitVRBigEndian, DeflatedExplicitVRLittleEndian)
JPEG = {
    JPEGLossless: "JPEGLosslessProcess14",
    JPEGLosslessSV1: "JPEGLosslessProcess14_1",
    JPEGLSLossless: "JPEGLSLossless",
}
SYNTAXES = (*NATIVE, RLELossless, JPEG2000Lossless, *JPEG)
AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


def image(stored: np.ndarray, *, syntax: str = ExplicitVRLittleEndian, bits: int = 16, **tags: object) -> Dataset:
    """A CT file of one or more frames, its pixels encoded."""
    signed = int(stored.dtype.kind == "i")
    frames = stored.reshape(-1, *stored.shape[-2:])
    file = Dataset()
    file.file_meta = FileMetaDataset()
    file.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian if syntax not in NATIVE else syntax
    file.SOPClassUID = file.file_meta.MediaStorageSOPClassUID = CTImageStorage
    file.SOPInstanceUID = file.file_meta.MediaStorageSOPInstanceUID = "1.2.3.4"
    file.SeriesInstanceUID, file.StudyInstanceUID, file.PatientID, file.Modality = "1.2.3", "1.2", "P1", "CT"
    file.ImageType, file.InstanceNumber = ["ORIGINAL", "PRIMARY", "AXIAL"], 7
    file.ImagePositionPatient, file.ImageOrientationPatient = ["-10", "-20.5", "30.25"], list("100010")
    file.PixelSpacing, file.SliceThickness = ["0.5", "0.75"], "2.5"
    file.Rows, file.Columns = frames.shape[1:]
    file.SamplesPerPixel, file.PhotometricInterpretation = 1, "MONOCHROME2"
    file.BitsAllocated, file.BitsStored, file.HighBit = 8 * stored.dtype.itemsize, bits, bits - 1
    file.PixelRepresentation, file.RescaleSlope, file.RescaleIntercept = signed, "1", "-1024"
    if len(frames) > 1:
        file.NumberOfFrames = len(frames)
    order = ">" if syntax == ExplicitVRBigEndian else "<"
    file.PixelData = frames.astype(frames.dtype.newbyteorder(order)).tobytes()
    file["PixelData"].VR = "OW"
    if syntax == RLELossless:
        file.compress(RLELossless, encoding_plugin="pydicom", generate_instance_uid=False)
    elif syntax == JPEG2000Lossless:
        file.compress(JPEG2000Lossless, encoding_plugin="pylibjpeg", generate_instance_uid=False)
    elif syntax in JPEG:
        transcoded(file, syntax)
    for name, value in tags.items():
        setattr(file, name, value)
    return file


def transcoded(file: Dataset, syntax: str) -> Dataset:
    """Compresses an image with GDCM, through a file."""
    with TemporaryDirectory() as folder:
        path = Path(folder, "x.dcm")
        file.save_as(path, enforce_file_format=True)
        transcode(path, JPEG[syntax])
        compressed = pydicom.dcmread(path)
    assert compressed.file_meta.TransferSyntaxUID == syntax
    file.file_meta.TransferSyntaxUID, file.PixelData = syntax, compressed.PixelData
    file["PixelData"].is_undefined_length = True
    return file


def saved(file: Dataset) -> bytes:
    buffer = io.BytesIO()
    file.save_as(buffer, enforce_file_format=True)
    return buffer.getvalue()


def write_slice(path: Path, sop: str, series: str = "S", *, z: float = 0.0, number: int = 1, **tags: object) -> None:
    """An axial CT slice of 16 x 16 pixels of 1 mm; a tag that is None is left out."""
    tags = {"ImagePositionPatient": [-8, -8, z], "PixelSpacing": [1, 1], "InstanceNumber": number, **tags}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # Kaggle's UIDs are not valid UIDs
        file = image(np.zeros((16, 16), np.int16))
        for name, value in {"SOPInstanceUID": sop, "SeriesInstanceUID": series, **tags}.items():
            if value is None:
                delattr(file, name)
            else:
                setattr(file, name, value)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(saved(file))
