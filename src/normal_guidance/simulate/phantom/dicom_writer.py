"""Writes drafts as real DICOM: CT Image Storage and, for the oddities, secondary captures and multi-frame CT.

Reference: DICOM PS3.3, A.3 (CT Image IOD), A.8.1 (Secondary Capture), A.70 (Legacy Converted Enhanced CT).
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from normal_guidance.errors import UserError
from normal_guidance.extras import install_command
from normal_guidance.simulate.phantom.drafts import Draft, Image

try:
    from pydicom.dataset import Dataset, FileMetaDataset
    from pydicom.sequence import Sequence
    from pydicom.uid import (
        UID,
        CTImageStorage,
        ExplicitVRLittleEndian,
        JPEG2000Lossless,
        JPEGLosslessSV1,
        JPEGLSLossless,
        LegacyConvertedEnhancedCTImageStorage,
        RLELossless,
        SecondaryCaptureImageStorage,
    )
except ImportError as error:
    raise UserError(f"phantoms are written with pydicom; {install_command('dicom')}") from error

COMPRESSIONS = {
    "none": ExplicitVRLittleEndian,
    "rle": RLELossless,
    "jpeg2000": JPEG2000Lossless,
    "jpeg-lossless": JPEGLosslessSV1,
    "jpeg-ls": JPEGLSLossless,
}
"""Transfer syntaxes by name; all are lossless."""

BODY_PARTS = {"head": "HEAD", "chest": "CHEST", "abdomen": "ABDOMEN"}

MAKER = "PHANTOM"
"""Manufacturer; the patient's name begins with it, too."""

CUTS = {"header": 0.5, "pixels": 0.6}
"""The end of a truncated file, as a share of that part."""


def write_draft(root: Path, draft: Draft, names: Mapping[str, str]) -> None:
    """Writes all files of a scan; `names` are their paths below `root`, by uid."""
    for folder in {(root / name).parent for name in names.values()}:
        folder.mkdir(parents=True, exist_ok=True)
    if draft.multi_frame:
        _write(root / names[draft.images[0].uid], _multi_frame(draft), draft.compression)
    for image in draft.extras if draft.multi_frame else draft.files:
        path = root / names[image.uid]
        _write(path, _single(draft, image), "none" if image.capture else draft.compression)
        if image.cut is not None:
            _truncate(path, image.cut)


def _write(path: Path, dataset: Dataset, compression: str) -> None:
    if compression in ("rle", "jpeg2000"):
        # The plugin is named because pydicom prefers gdcm, which crashes on RLE on some machines.
        plugin = "pydicom" if compression == "rle" else ""
        dataset.compress(COMPRESSIONS[compression], encoding_plugin=plugin, generate_instance_uid=False)
    dataset.save_as(path, enforce_file_format=True)
    if compression in ("jpeg-lossless", "jpeg-ls"):
        _compress_file(path, compression)


def _compress_file(path: Path, compression: str) -> None:
    """Compresses with gdcm as JPEG lossless or JPEG-LS, which pydicom cannot write."""
    try:
        import gdcm
    except ImportError as error:
        raise UserError(f"{compression} is written with gdcm; {install_command('dicom')}") from error
    reader = gdcm.ImageReader()
    reader.SetFileName(str(path))
    change = gdcm.ImageChangeTransferSyntax()
    syntax = {
        "jpeg-lossless": gdcm.TransferSyntax.JPEGLosslessProcess14_1,
        "jpeg-ls": gdcm.TransferSyntax.JPEGLSLossless,
    }
    change.SetTransferSyntax(gdcm.TransferSyntax(syntax[compression]))
    if not reader.Read():
        raise RuntimeError(f"gdcm cannot read {path}")
    change.SetInput(reader.GetImage())
    if not change.Change():
        raise RuntimeError(f"gdcm cannot compress {path} as {compression}")
    writer = gdcm.ImageWriter()
    writer.SetFileName(str(path))
    writer.SetFile(reader.GetFile())
    writer.SetImage(change.GetOutput())
    if not writer.Write():
        raise RuntimeError(f"gdcm cannot write {path}")


def _truncate(path: Path, cut: str) -> None:
    content = path.read_bytes()
    pixels = content.rindex(b"\xe0\x7f\x10\x00")
    end = CUTS[cut] * pixels if cut == "header" else pixels + CUTS[cut] * (len(content) - pixels)
    path.write_bytes(content[: int(end)])


def _single(draft: Draft, image: Image) -> Dataset:
    dataset = _common(draft, SecondaryCaptureImageStorage if image.capture else CTImageStorage, image.uid)
    if image.series_uid is not None:
        dataset.SeriesInstanceUID = image.series_uid
        dataset.SeriesNumber = 3
    dataset.InstanceNumber = image.instance
    dataset.ImageType = list(image.image_type)
    if image.capture:
        dataset.Modality = "OT"
        dataset.ConversionType = "WSD"
        dataset.SeriesDescription = "PHANTOM screen save"
        _set_pixels(dataset, (image.hu.clip(-160, 240) + 160).astype(np.int32) * 255 // 400, 8, False)
        return dataset
    _set_ct(dataset, draft)
    if image.position is not None and image.orientation is not None:
        dataset.ImagePositionPatient = [_number(value) for value in image.position]
        dataset.ImageOrientationPatient = [_number(value) for value in image.orientation]
        dataset.SliceLocation = _number(image.position[2])
    dataset.PixelSpacing = [_number(draft.pixel_spacing)] * 2
    dataset.SliceThickness = _number(draft.slice_spacing)
    dataset.RescaleIntercept, dataset.RescaleSlope, dataset.RescaleType = str(draft.encoding.intercept), "1", "HU"
    _set_pixels(dataset, draft.encoding.store(image.hu), draft.encoding.bits, draft.encoding.signed)
    return dataset


def _common(draft: Draft, sop_class: UID, uid: str) -> Dataset:
    """Patient, study, series, frame of reference and equipment: the same in all files of a scan."""
    dataset = Dataset()
    dataset.file_meta = FileMetaDataset()
    dataset.file_meta.TransferSyntaxUID = ExplicitVRLittleEndian
    dataset.file_meta.MediaStorageSOPClassUID = sop_class
    dataset.file_meta.MediaStorageSOPInstanceUID = UID(uid)
    part = BODY_PARTS[draft.plan.anatomy]
    values: dict[str, Any] = {
        "SpecificCharacterSet": "ISO_IR 192",
        "SOPClassUID": sop_class,
        "SOPInstanceUID": uid,
        "StudyDate": draft.date,
        "ContentDate": draft.date,
        "StudyTime": "120000",
        "ContentTime": "120000",
        "AccessionNumber": "",
        "Modality": "CT",
        "Manufacturer": MAKER,
        "ReferringPhysicianName": "",
        "StudyDescription": f"PHANTOM {part}",
        "SeriesDescription": f"PHANTOM {part} axial",
        "PatientName": f"PHANTOM^{part}",
        "PatientID": draft.patient_id,
        "PatientBirthDate": "",
        "PatientSex": "",
        "PatientIdentityRemoved": "YES",
        "DeidentificationMethod": "PHANTOM: no patient",
        "BodyPartExamined": part,
        "PatientPosition": "HFS",
        "StudyInstanceUID": draft.study_uid,
        "SeriesInstanceUID": draft.series_uid,
        "StudyID": "1",
        "SeriesNumber": 2,
        "FrameOfReferenceUID": draft.frame_uid,
        "PositionReferenceIndicator": "",
        "QualityControlImage": "YES",
        "BurnedInAnnotation": "NO",
    }
    for name, value in values.items():
        setattr(dataset, name, value)
    return dataset


def _set_ct(dataset: Dataset, draft: Draft) -> None:
    dataset.KVP = "120"
    dataset.AcquisitionNumber = 1
    dataset.GantryDetectorTilt = _number(draft.tilt)
    dataset.WindowCenter, dataset.WindowWidth = "40", "400"


def _set_pixels(dataset: Dataset, values: np.ndarray, bits: int, signed: bool) -> None:
    allocated = 8 if bits <= 8 else 16
    dataset.SamplesPerPixel = 1
    dataset.PhotometricInterpretation = "MONOCHROME2"
    dataset.Rows, dataset.Columns = values.shape[-2:]
    dataset.BitsAllocated, dataset.BitsStored, dataset.HighBit = allocated, bits, bits - 1
    dataset.PixelRepresentation = int(signed)
    content = values.astype("u1" if allocated == 8 else "<u2").tobytes()
    dataset.add_new(0x7FE00010, "OB" if allocated == 8 else "OW", content + b"\0" * (len(content) % 2))


def _multi_frame(draft: Draft) -> Dataset:
    """All slices in one file: shared and per-frame functional groups instead of one header each."""
    first = draft.images[0]
    dataset = _common(draft, LegacyConvertedEnhancedCTImageStorage, first.uid)
    dataset.InstanceNumber = 1
    dataset.ImageType = ["DERIVED", "PRIMARY", "AXIAL", "NONE"]
    dataset.ManufacturerModelName, dataset.DeviceSerialNumber, dataset.SoftwareVersions = MAKER, "0", "0"
    dataset.PixelPresentation, dataset.VolumetricProperties = "MONOCHROME", "VOLUME"
    dataset.VolumeBasedCalculationTechnique, dataset.LossyImageCompression = "NONE", "00"
    dataset.PresentationLUTShape = "IDENTITY"
    dataset.AcquisitionContextSequence = Sequence()
    dataset.NumberOfFrames = len(draft.images)
    dataset.DimensionOrganizationSequence = [_item(DimensionOrganizationUID=draft.new_uid("dimension"))]
    dataset.DimensionIndexSequence = [
        _item(
            DimensionOrganizationUID=draft.new_uid("dimension"),
            DimensionIndexPointer=0x00200032,
            FunctionalGroupPointer=0x00209113,
        )
    ]
    frame_type = _item(
        FrameType=list(dataset.ImageType),
        PixelPresentation="MONOCHROME",
        VolumetricProperties="VOLUME",
        VolumeBasedCalculationTechnique="NONE",
    )
    spacing, thickness = _number(draft.pixel_spacing), _number(draft.slice_spacing)
    rescale = _item(RescaleIntercept=str(draft.encoding.intercept), RescaleSlope="1", RescaleType="HU")
    shared = _item(
        PixelMeasuresSequence=[_item(PixelSpacing=[spacing] * 2, SliceThickness=thickness)],
        PlaneOrientationSequence=[_item(ImageOrientationPatient=[_number(v) for v in first.orientation or ()])],
        PixelValueTransformationSequence=[rescale],
        CTImageFrameTypeSequence=[frame_type],
        UnassignedSharedConvertedAttributesSequence=[_item(KVP="120")],
    )
    dataset.SharedFunctionalGroupsSequence = [shared]
    dataset.PerFrameFunctionalGroupsSequence = [
        _item(
            PlanePositionSequence=[_item(ImagePositionPatient=[_number(v) for v in image.position or ()])],
            FrameContentSequence=[_item(DimensionIndexValues=[number])],
            UnassignedPerFrameConvertedAttributesSequence=[_item(InstanceNumber=image.instance)],
        )
        for number, image in enumerate(draft.images, start=1)
    ]
    volume = np.stack([image.hu for image in draft.images])
    _set_pixels(dataset, draft.encoding.store(volume), draft.encoding.bits, draft.encoding.signed)
    return dataset


def _item(**values: Any) -> Dataset:
    item = Dataset()
    for name, value in values.items():
        setattr(item, name, value)
    return item


def _number(value: float) -> str:
    """A decimal string: at most 16 characters."""
    return f"{value:.6f}".rstrip("0").rstrip(".") or "0"
