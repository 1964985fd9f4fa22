"""The structured report: a Comprehensive SR by TID 1500 (DICOM PS3.16), for software to read.

    Image Library        every object of the scan, its frame of reference
    Imaging Measurements
      group 'scan'       the finding, if it has a name; probability; threshold and call, if there are any; attention
                         within the interval, inferred from the interval's first and last slice
      group 'slices'     the attention of every slice, inferred from that slice; in the order of the slices

All slices are listed: about 1 kB each, 2 MB for a scan of 2,000.
"""

from __future__ import annotations

from collections.abc import Iterator

from highdicom.coding_schemes import CodingSchemeIdentificationItem
from highdicom.sr import (
    AlgorithmIdentification,
    CodeContentItem,
    CodedConcept,
    ComprehensiveSR,
    ContainerContentItem,
    ContentSequence,
    ImageContentItem,
    Measurement,
    MeasurementReport,
    MeasurementsAndQualitativeEvaluations,
    ObservationContext,
    QualitativeEvaluation,
    RelationshipTypeValues,
    SourceImageForMeasurement,
    TrackingIdentifier,
    UIDRefContentItem,
)
from pydicom import Dataset
from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code

from normal_guidance import __version__
from normal_guidance.clinical.dicom.result_headers import NAME, NOTICE, Result, evidence, frames, observer
from normal_guidance.clinical.dicom.source_series import Reference
from normal_guidance.data.findings import Finding

SCHEME = "99NGUIDE"
"""Designator of our own codes; designators that begin with 99 are private."""

ATTENTION = CodedConcept("attention", SCHEME, "Attention of the slice")
INTERVAL = CodedConcept("interval", SCHEME, "Attention within the interval")
THRESHOLD = CodedConcept("threshold", SCHEME, "Threshold of the probability")
CALL = CodedConcept("call", SCHEME, "Scan by the threshold")
"""Concepts for which DICOM has no code."""

PROBABILITY = CodedConcept.from_code(codes.DCM.Probability)
NO_UNITS = CodedConcept.from_code(codes.UCUM.NoUnits)
SOURCE = CodedConcept.from_code(codes.SCT.Source)
"""Concepts with a DICOM code; made once, not for every slice."""

PROCEDURES = {
    "CT": (codes.DCM.ComputedTomography, codes.LN.CTUnspecifiedBodyRegion),
    "MR": (codes.DCM.MagneticResonance, codes.LN.MRIUnspecifiedBodyRegion),
    "": (codes.DCM.OtherModality, Code("363679005", "SCT", "Imaging procedure")),
}
"""Modality and procedure by the headers' modality; the last entry is for all others."""


class _Report(ComprehensiveSR):
    """A report without highdicom's copy of whole modules: `Result.finish` adds the patient, as for other results."""

    def copy_patient_and_study_information(self, dataset: Dataset) -> None:
        pass


def structured_report(result: Result) -> Dataset:
    """Report the scan's probability and the attention of every slice."""
    objects = evidence(result, {one.sop_uid: one for one in result.source.slices}.values())
    report = MeasurementReport(
        observation_context=ObservationContext(observer_device_context=observer(result)),
        procedure_reported=_procedure(result)[1],
        imaging_measurements=[_scan(result)],
    )
    document = _Report(
        objects,
        report[0],
        is_complete=True,
        coding_schemes=[CodingSchemeIdentificationItem(SCHEME, name=NAME, responsible_organization=NAME)],
        **result.arguments(),
    )
    # Parts with an item per slice are added last: highdicom would copy and search them, which takes half of the time.
    *_, measurements = document.ContentSequence
    document.ContentSequence.insert(len(document.ContentSequence) - 1, _library(result, objects))
    measurements.ContentSequence.extend(_slices(result))
    return result.finish(document)


def _scan(result: Result) -> MeasurementsAndQualitativeEvaluations:
    one, slices = result.prediction, result.source.slices
    first, last = one.interval
    inside = float(one.attention[first : last + 1].double().sum())
    measurements = [_number(PROBABILITY, one.probability)]
    evaluations = []
    if one.threshold is not None:
        measurements.append(_number(THRESHOLD, one.threshold))
        evaluations.append(QualitativeEvaluation(CALL, codes.SCT.Positive if one.is_positive else codes.SCT.Negative))
    measurements.append(_number(INTERVAL, inside, *dict.fromkeys((slices[first], slices[last]))))
    return _group(result, "scan", measurements, evaluations)


def _slices(result: Result) -> MeasurementsAndQualitativeEvaluations:
    weights = zip(result.prediction.attention.tolist(), result.source.slices, strict=True)
    return _group(result, "slices", [_number(ATTENTION, weight, place) for weight, place in weights], [])


def _group(
    result: Result, name: str, measurements: list[Measurement], evaluations: list[QualitativeEvaluation]
) -> MeasurementsAndQualitativeEvaluations:
    return MeasurementsAndQualitativeEvaluations(
        tracking_identifier=TrackingIdentifier(uid=result.uid(name), identifier=name),
        finding_type=_finding(result.prediction.finding),
        algorithm_id=AlgorithmIdentification(NAME, __version__, parameters=list(_parameters(result))),
        measurements=measurements,
        qualitative_evaluations=evaluations,
    )


def _finding(finding: Finding | None) -> CodedConcept | None:
    """The finding by its SNOMED CT code or, where none is known, by its name in our own scheme."""
    if finding is None:
        return None
    meaning = finding.meaning or finding.name.replace("_", " ")
    if finding.code is None:
        return CodedConcept(finding.name, SCHEME, meaning)
    return CodedConcept(finding.code, "SCT", meaning)


def _parameters(result: Result) -> Iterator[str]:
    yield NOTICE
    yield f"method: {result.prediction.method}"
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
    if result.source.frame_of_reference:
        shared.append(UIDRefContentItem(codes.DCM.FrameOfReferenceUID, result.source.frame_of_reference, context))
    for one in objects:
        shared.append(ImageContentItem(SOURCE, one.SOPClassUID, one.SOPInstanceUID, None, None, contains))
    group = ContainerContentItem(codes.DCM.ImageLibraryGroup, relationship_type=contains)
    group.ContentSequence = shared
    library = ContainerContentItem(codes.DCM.ImageLibrary, relationship_type=contains)
    library.ContentSequence = ContentSequence([group])
    return library
