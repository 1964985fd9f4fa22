"""Key Object Selection: the list of slices to look at, for viewers to open (DICOM PS3.16, TID 2010)."""

from __future__ import annotations

from highdicom.ko import KeyObjectSelection, KeyObjectSelectionDocument
from pydicom import Dataset
from pydicom.sr.codedict import codes

from normal_guidance.clinical.dicom.result_headers import Result, evidence, observer


def key_objects(result: Result) -> Dataset:
    """List the key slices by descending attention, one item a slice, also in a multi-frame object.

    A scan that is negative by its threshold has no slices of interest, and gets none (`Result.shows_keys`).
    """
    chosen = [result.source.slices[number] for number in result.prediction.key_slices]
    objects = evidence(result, chosen)
    content = KeyObjectSelection(
        document_title=codes.DCM.OfInterest,
        referenced_objects=objects,
        observer_device_context=observer(result),
        description=f"{result.text} Slices of the highest attention, the highest first.",
    )
    images = [item for item in content[0].ContentSequence if item.ValueType == "IMAGE"]
    for image, reference in zip(images, chosen, strict=True):
        if reference.frame is not None:  # highdicom refers to whole objects only
            image.ReferencedSOPSequence[0].ReferencedFrameNumber = reference.frame
    return result.finish(KeyObjectSelectionDocument(objects, content, **result.arguments()))
