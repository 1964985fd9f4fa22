"""The structured report: a Comprehensive 3D SR by TID 1500 (DICOM PS3.16), for software to read.

    Image Library          every object of the scan, its frame of reference and body part
    Imaging Measurements
      'key slice 1 of 3'   TID 1410, a group for each key slice, the highest attention first: its attention, and the
                           whole slice as its region; none where the scan is negative by its threshold
      'scan'               TID 1501: body part; probability; threshold and call, if there are any; first and last slice
                           of the interval, each inferred from the whole slice; the attention within it; what was
                           looked for; as comments, cautions and that there are no key slices
    Attention of every slice
      'slices'             TID 1501: the attention of every slice, inferred from that slice; in the order of the slices

Every group names the finding, if it has a name, and the algorithm with its model (TID 4019).

Viewers such as OHIF open the slice of the first group, and draw its region: the edge of the image, because nothing is
known of a place within the slice.  A group without a region among the Imaging Measurements makes OHIF 3.12 fail, so the
interval's ends have one, and 'slices', which would be drawn as one long list, lies in a container of its own.

All slices are listed: about 1 kB each, 2 MB for a scan of 2,000.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any, TypeVar

import numpy as np
from highdicom.coding_schemes import CodingSchemeIdentificationItem
from highdicom.sr import (
    AlgorithmIdentification,
    CodeContentItem,
    CodedConcept,
    Comprehensive3DSR,
    ContainerContentItem,
    ContentSequence,
    CoordinatesForMeasurement,
    FindingSite,
    GraphicTypeValues,
    ImageContentItem,
    ImageRegion,
    Measurement,
    MeasurementReport,
    MeasurementsAndQualitativeEvaluations,
    ObservationContext,
    PlanarROIMeasurementsAndQualitativeEvaluations,
    QualitativeEvaluation,
    RelationshipTypeValues,
    SourceImageForMeasurement,
    SourceImageForRegion,
    TextContentItem,
    TrackingIdentifier,
    UIDRefContentItem,
)
from pydicom import Dataset
from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code

from normal_guidance import __version__
from normal_guidance.clinical.dicom.body_parts import body_part_code
from normal_guidance.clinical.dicom.result_headers import NAME, NOTICE, Result, evidence, frames, observer
from normal_guidance.clinical.dicom.source_series import Reference
from normal_guidance.data.findings import Finding

SCHEME = "99NGUIDE"
"""Designator of our own codes; designators that begin with 99 are private."""

ATTENTION = CodedConcept("attention", SCHEME, "Attention of the slice")
INTERVAL = CodedConcept("interval", SCHEME, "Attention within the interval")
THRESHOLD = CodedConcept("threshold", SCHEME, "Threshold of the probability")
CALL = CodedConcept("call", SCHEME, "Scan by the threshold")
FIRST = CodedConcept("first", SCHEME, "First slice of the interval")
LAST = CodedConcept("last", SCHEME, "Last slice of the interval")
SLICES = CodedConcept("slices", SCHEME, "Attention of every slice")
SOUGHT = CodedConcept("sought", SCHEME, "Looked for")
"""Concepts for which DICOM has no code."""

PROBABILITY = CodedConcept.from_code(codes.DCM.Probability)
NO_UNITS = CodedConcept.from_code(codes.UCUM.NoUnits)
SOURCE = CodedConcept.from_code(codes.SCT.Source)
COMMENT = CodedConcept.from_code(codes.DCM.Comment)
"""Concepts with a DICOM code; made once, not for every slice."""

WHOLE = "The region is the whole slice, as far as the image goes; it outlines nothing within the slice."
NO_KEYS = "NEGATIVE by the threshold: no slice is reported as of interest, and there are no key objects."

PROCEDURES = {
    "CT": (codes.DCM.ComputedTomography, codes.LN.CTUnspecifiedBodyRegion),
    "MR": (codes.DCM.MagneticResonance, codes.LN.MRIUnspecifiedBodyRegion),
    "": (codes.DCM.OtherModality, Code("363679005", "SCT", "Imaging procedure")),
}
"""Modality and procedure by the headers' modality; the last entry is for all others."""


Group = TypeVar("Group", MeasurementsAndQualitativeEvaluations, PlanarROIMeasurementsAndQualitativeEvaluations)


class _Report(Comprehensive3DSR):
    """A report without highdicom's copy of whole modules: `Result.finish` adds the patient, as for other results."""

    def copy_patient_and_study_information(self, dataset: Dataset) -> None:
        pass


def structured_report(result: Result) -> Dataset:
    """Report the scan's probability and the attention of every slice."""
    objects = evidence(result, {one.sop_uid: one for one in result.source.slices}.values())
    keys = list(enumerate(result.prediction.key_slices, start=1)) if result.shows_keys else []
    report = MeasurementReport(
        observation_context=ObservationContext(observer_device_context=observer(result)),
        procedure_reported=_procedure(result)[1],
        imaging_measurements=[*(_key_slice(result, *key) for key in keys), _scan(result)],
    )
    document = _Report(
        objects,
        report[0],
        is_complete=True,
        coding_schemes=[CodingSchemeIdentificationItem(SCHEME, name=NAME, responsible_organization=NAME)],
        **result.arguments(),
    )
    # Parts with an item per slice are added last: highdicom would copy and search them, which takes half of the time.
    document.ContentSequence.insert(len(document.ContentSequence) - 1, _library(result, objects))
    document.ContentSequence.append(_slices(result))
    return result.finish(document)


def _key_slice(result: Result, rank: int, number: int) -> PlanarROIMeasurementsAndQualitativeEvaluations:
    name = f"key slice {rank} of {len(result.prediction.key_slices)}: slice {number + 1}, whole slice"
    attention = _number(ATTENTION, float(result.prediction.attention[number]))
    region = ImageRegion(GraphicTypeValues.POLYLINE, *_whole(result, number))
    group = PlanarROIMeasurementsAndQualitativeEvaluations(
        **_shared(result, name), referenced_region=region, measurements=[attention]
    )
    return _with_texts(group, [(COMMENT, WHOLE)])


def _scan(result: Result) -> MeasurementsAndQualitativeEvaluations:
    one = result.prediction
    first, last = one.interval
    inside = float(one.attention[first : last + 1].double().sum())
    measurements = [_number(PROBABILITY, one.probability)]
    evaluations = []
    if one.threshold is not None:
        measurements.append(_number(THRESHOLD, one.threshold))
        evaluations.append(QualitativeEvaluation(CALL, codes.SCT.Positive if one.is_positive else codes.SCT.Negative))
    measurements += [_end(result, FIRST, first), _end(result, LAST, last), _number(INTERVAL, inside)]
    group = MeasurementsAndQualitativeEvaluations(
        **_shared(result, "scan"), **_site(result), measurements=measurements, qualitative_evaluations=evaluations
    )
    comments = [*result.cautions, *([] if result.shows_keys else [NO_KEYS])]  # OHIF writes them on the image
    return _with_texts(group, [*((COMMENT, comment) for comment in comments), (SOUGHT, one.sought)])


def _slices(result: Result) -> ContainerContentItem:
    weights = zip(result.prediction.attention.tolist(), result.source.slices, strict=True)
    group = MeasurementsAndQualitativeEvaluations(
        **_shared(result, "slices"), measurements=[_number(ATTENTION, weight, place) for weight, place in weights]
    )
    container = ContainerContentItem(SLICES, relationship_type=RelationshipTypeValues.CONTAINS)
    container.ContentSequence = ContentSequence(group)
    return container


def _shared(result: Result, name: str) -> dict[str, Any]:
    """What every group says: its name, the finding and the algorithm."""
    return {
        "tracking_identifier": TrackingIdentifier(uid=result.uid(name), identifier=name),
        "finding_type": _finding(result.prediction.finding),
        "algorithm_id": AlgorithmIdentification(
            NAME, __version__, parameters=list(_parameters(result)), manufacturer=NAME
        ),
    }


def _site(result: Result) -> dict[str, Any]:
    """The body part, for the scan: OHIF would write it on every key slice, by the code of 'finding site'."""
    site = body_part_code(result.source.series.body_part)
    return {} if site is None else {"finding_sites": [FindingSite(site)]}


def _with_texts(group: Group, texts: Iterable[tuple[CodedConcept, str]]) -> Group:
    for name, text in texts:
        group[0].ContentSequence.append(TextContentItem(name, text, RelationshipTypeValues.CONTAINS))
    return group


def _end(result: Result, name: CodedConcept, number: int) -> Measurement:
    """An end of the interval: the number of its slice, from 1, inferred from the whole slice."""
    place = CoordinatesForMeasurement(GraphicTypeValues.POLYLINE, *_whole(result, number))
    return Measurement(name, number + 1, NO_UNITS, referenced_coordinates=[place])


def _whole(result: Result, number: int) -> tuple[np.ndarray, SourceImageForRegion]:
    """The edge of a slice, closed, from the corner of its first pixel to that of its last; and the slice."""
    columns, rows = result.prediction.row.columns, result.prediction.row.rows
    corners = np.array([[0, 0], [columns, 0], [columns, rows], [0, rows], [0, 0]], float)
    place = result.source.slices[number]
    return corners, SourceImageForRegion(place.sop_class, place.sop_uid, frames(place))


def _finding(finding: Finding | None) -> CodedConcept | None:
    """The finding by its SNOMED CT code or, where none is known, by its name in our own scheme."""
    if finding is None:
        return None
    meaning = finding.meaning or finding.name.replace("_", " ")
    if finding.code is None:
        return CodedConcept(finding.name, SCHEME, meaning)
    return CodedConcept(finding.code, "SCT", meaning)


def _parameters(result: Result) -> Iterator[str]:
    model = result.prediction.model
    yield NOTICE
    yield f"method: {result.prediction.method}"
    if model is not None:
        yield f"model: {model.fingerprint}"
        yield str(model)
    yield f"the interval {result.prediction.meaning}"


def _number(name: CodedConcept, value: float, *places: Reference) -> Measurement:
    images = [SourceImageForMeasurement(place.sop_class, place.sop_uid, frames(place)) for place in places]
    return Measurement(name, value, NO_UNITS, referenced_images=images)


def _procedure(result: Result) -> tuple[Code, Code]:
    return PROCEDURES.get(result.prediction.row.modality, PROCEDURES[""])


def _library(result: Result, objects: list[Dataset]) -> ContainerContentItem:
    """List all objects of the scan in one group, with the attributes that they share.

    highdicom's own library refuses images without spacing or position, and repeats both for every image.
    """
    context, contains = RelationshipTypeValues.HAS_ACQ_CONTEXT, RelationshipTypeValues.CONTAINS
    shared = ContentSequence([CodeContentItem(codes.DCM.Modality, _procedure(result)[0], context)])
    region = body_part_code(result.source.series.body_part)
    if region is not None:
        shared.append(CodeContentItem(codes.DCM.TargetRegion, region, context))
    if result.source.frame_of_reference:
        shared.append(UIDRefContentItem(codes.DCM.FrameOfReferenceUID, result.source.frame_of_reference, context))
    for one in objects:
        shared.append(ImageContentItem(SOURCE, one.SOPClassUID, one.SOPInstanceUID, None, None, contains))
    group = ContainerContentItem(codes.DCM.ImageLibraryGroup, relationship_type=contains)
    group.ContentSequence = shared
    library = ContainerContentItem(codes.DCM.ImageLibrary, relationship_type=contains)
    library.ContentSequence = ContentSequence([group])
    return library
