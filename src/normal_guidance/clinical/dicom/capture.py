"""The strip as a secondary capture: a picture, because many archives show nothing else."""

from __future__ import annotations

import io

import numpy as np
from highdicom.sc import SCImage
from PIL import Image
from pydicom import Dataset
from pydicom.sr.codedict import codes

from normal_guidance.clinical.dicom.body_parts import UNPAIRED
from normal_guidance.clinical.dicom.result_headers import NOTICE, Result, code_item
from normal_guidance.data.orientation_letters import orientation_letters
from normal_guidance.errors import UserError

SHOWN = "Key slices and the attention of all slices."

LONGEST = 10240
"""Characters of ImageComments."""


def capture(result: Result, content: bytes, name: str) -> Dataset:
    """Make an image of the PNG file `content`, which is called `name`; a gray picture becomes a gray image.

    BurnedInAnnotation says whether the patient can be read in it: the strip itself names nobody, but it shows slices
    whose pixels may.  PatientOrientation is that of the slices, which all lie the same way in the strip.
    """
    pixels = _pixels(content, name)
    source, row = result.source, result.prediction.row
    image = SCImage(
        pixels,
        "MONOCHROME2" if pixels.ndim == 2 else "RGB",
        bits_allocated=8,
        coordinate_system="PATIENT",
        patient_orientation=("L", "P"),  # highdicom wants one; replaced below
        study_instance_uid=source.study_uid,
        **result.arguments(),
    )
    letters = orientation_letters(row.orientation)
    image.PatientOrientation = [] if letters is None else [letters.right, letters.bottom]
    if source.series.body_part:
        image.BodyPartExamined = source.series.body_part
    if source.series.body_part not in UNPAIRED:
        image.Laterality = source.series.laterality
    image.ConversionType = "WSD"
    image.BurnedInAnnotation = "YES" if source.burned_in else "NO"
    image.LossyImageCompression = "01" if source.lossy else "00"
    image.DerivationDescription = f"{NOTICE} {SHOWN}"
    image.ImageComments = f"{result.text} {SHOWN}"[:LONGEST]
    image.SourceImageSequence = [_source(result, number) for number in result.prediction.key_slices]
    return result.finish(image)


def _pixels(content: bytes, name: str) -> np.ndarray:
    """Read a picture as gray (rows, columns) or colour (rows, columns, 3); transparent pixels become white."""
    try:
        with Image.open(io.BytesIO(content)) as picture:
            coloured = picture.convert("RGBA")
    except (OSError, ValueError, SyntaxError) as error:  # PIL's errors for a broken PNG
        raise UserError(f"{name} cannot be read as a picture ({error}); predict again") from error
    white = Image.new("RGBA", coloured.size, "white")
    values = np.asarray(Image.alpha_composite(white, coloured))[..., :3]
    is_gray = (values == values[..., :1]).all()
    return values[..., 0].copy() if is_gray else values.copy()


def _source(result: Result, number: int) -> Dataset:
    reference, item = result.source.slices[number], Dataset()
    item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = reference.sop_class, reference.sop_uid
    if reference.frame is not None:
        item.ReferencedFrameNumber = reference.frame
    item.PurposeOfReferenceCodeSequence = [code_item(codes.DCM.SourceImageForImageProcessingOperation)]
    return item
