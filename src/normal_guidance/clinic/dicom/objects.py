"""DICOM results of a scan, for the software that hospitals have, each in a new series of the source's study.

    key_objects.dcm         Key Object Selection (PS3.16, TID 2010): the slices to look at; not of a negative scan
    structured_report.dcm   Comprehensive 3D SR (TID 1500): probability, threshold, key slices, attention of every slice
    strip.dcm               Secondary Capture: key slices with the attention curve; many archives show nothing else

The patient is taken from the headers of the scan's slices only.  All headers are made by `Result`.  All results say
what was looked for, by which model, and what a reader must be warned of.
"""

from __future__ import annotations

import io
from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from highdicom import sr
from highdicom.coding_schemes import CodingSchemeIdentificationItem
from highdicom.ko import KeyObjectSelection, KeyObjectSelectionDocument
from highdicom.sc import SCImage
from PIL import Image
from pydicom import Dataset, config
from pydicom.sr.codedict import codes
from pydicom.sr.coding import Code
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from normal_guidance import __version__
from normal_guidance.base.errors import UserError
from normal_guidance.base.files import make_folder, write_atomically
from normal_guidance.clinic.dicom.source_series import REQUIRED, Reference, SourceSeries, read_source, without_patient
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.scans.index.geometry import orientation_letters
from normal_guidance.scans.index.problems import Problem, Report

# What DICOM knows of a BodyPartExamined (PS3.16, annex L): its code, and whether there is a left and a right one.

OTHERS = {
    "ABDOMENPELVIS": codes.cid4031.AbdomenAndPelvis,
    "BRAIN": codes.SCT.Brain,
    "CHESTABDOMEN": codes.cid4031.ChestAndAbdomen,
    "CHESTABDPELVIS": codes.cid4031.ChestAbdomenAndPelvis,
    "CSPINE": codes.cid4031.CervicalSpine,
    "HEADNECK": codes.cid4031.HeadAndNeck,
    "LIVER": codes.SCT.Liver,
    "LSPINE": codes.cid4031.LumbarSpine,
    "LUNG": codes.SCT.Lung,
    "TSPINE": codes.cid4031.ThoracicSpine,
}
"""Terms that are not the names of the codes in CID 4031."""

UNPAIRED = frozenset(
    {
        *("ABDOMEN", "ABDOMENPELVIS", "AORTA", "BLADDER", "BRAIN", "CERVIX", "CHEST", "CHESTABDOMEN"),
        *("CHESTABDPELVIS", "CIRCLEOFWILLIS", "COCCYX", "COLON", "CORONARYARTERY", "CSPINE", "CTSPINE", "DUODENUM"),
        *("ESOPHAGUS", "FACE", "GALLBLADDER", "HEAD", "HEADNECK", "HEART", "ILEUM", "ILIUM", "JAW", "JEJUNUM"),
        *("LARYNX", "LIVER", "LSPINE", "LSSPINE", "MAXILLA", "MEDIASTINUM", "MOUTH", "NECK", "NECKCHEST"),
        *("NECKCHESTABDOMEN", "NECKCHESTABDPELV", "NOSE", "PANCREAS", "PELVIS", "PENIS", "PHARYNX", "PROSTATE"),
        *("RECTUM", "SKULL", "SPINE", "SPLEEN", "SSPINE", "STERNUM", "STOMACH", "THYMUS", "THYROID", "TLSPINE"),
        *("TONGUE", "TRACHEA", "TSPINE", "URETER", "URETHRA", "UTERUS", "VAGINA", "VULVA", "WHOLEBODY"),
    }
)
"""Body parts of which images must not have a Laterality; all others must have one, which may be empty."""

BODY_PARTS = {name.upper(): code for name, code in codes.cid4031.concepts.items()} | OTHERS
"""The SNOMED CT codes of body parts, as far as pydicom's tables know them."""

FIRST_NUMBER = 9800  # series numbers end with this and more: scanners seldom use such large ones
SOURCE_STEP = 10_000  # results of the source series 7 have numbers from 79801 on, those of a series 0 from 9801 on
FINDING_STEP = 10  # the series of the next finding have numbers that are larger by this
LARGEST = 100_000  # larger source numbers, negative and missing ones are replaced by a hash between this and its double
LONGEST_DESCRIPTION = 64  # characters of a SeriesDescription


class ObjectKind(NamedTuple):
    """A kind of result: its place among the results of a finding, and what its series is called."""

    place: int
    title: str


KINDS = {
    "key_objects.dcm": ObjectKind(1, "AI key slices, research only"),
    "structured_report.dcm": ObjectKind(2, "AI report, research only"),
    "strip.dcm": ObjectKind(3, "AI picture, research only"),
}
"""The results by the names of their files."""

NAME = "normal-guidance"  # the program's name as equipment, observer and algorithm
NOTICE = "AI-generated, for research use only, not for diagnosis."
UNICODE = "ISO_IR 192"  # character set of the results: the source's may not hold what is written here

DATES = (
    *("InstanceCreationDate", "InstanceCreationTime", "DateOfSecondaryCapture", "TimeOfSecondaryCapture"),
    "ContributionDateTime",
)
"""Optional attributes that say when a result was made."""

DUMMY_DATE, DUMMY_TIME = "19000101", "000000"  # for the date of the result: a scan is often scored on its own day


@dataclass(frozen=True)
class Result:
    """One DICOM object about a scan, in its own series."""

    # Its UIDs are a hash of what it is of and what it says in whole numbers; the last digits of probability and
    # attention differ with the number of threads.  So a result that is computed and sent again is not a second one in
    # the archive, and one that says something else, or of other slices, never has the same UIDs.

    prediction: ScanPrediction
    source: SourceSeries
    kind: ObjectKind
    finding: int = 0  # the finding's place among those of the scan

    def uid(self, purpose: str) -> str:
        """The UID for a purpose, for example 'series' or 'instance'."""
        prediction, source = self.prediction, self.source
        model, finding = prediction.model, prediction.finding
        content = (
            (__version__, self.kind.place, purpose),
            (source.study_uid, source.slices, sorted(source.identity.items()), source.series),
            (prediction.method, None if model is None else model.fingerprint),
            None if finding is None else (finding.name, finding.code),
            # of the model or the command, never computed from the scan
            (prediction.threshold, prediction.share, prediction.coverage),
            (prediction.is_positive, prediction.key_positions, prediction.interval_positions, self.cautions),
        )
        return str(generate_uid(entropy_srcs=[repr(content)]))

    @property
    def text(self) -> str:
        """Everything that a reader must know, in sentences: warnings, what was looked for, the result, the model."""
        prediction = self.prediction
        part = self.source.series.body_part
        where = f", body part {part}" if part else ""
        call = f"Probability {prediction.probability:.4g}; no threshold was chosen."
        if prediction.threshold is not None:
            side = "positive" if prediction.is_positive else "NEGATIVE"
            call = f"Probability {prediction.probability:.4g}, {side} by the threshold {prediction.threshold:.4g}."
        model = f"method {prediction.method}"
        if prediction.model is not None:
            model = f"{prediction.model}; fingerprint {prediction.model.fingerprint}"
        sentences = f"Looked for: {prediction.sought}{where}.", call, f"{NAME} {__version__}, {model}."
        return " ".join((NOTICE, *self.cautions, *sentences))

    @property
    def cautions(self) -> tuple[str, ...]:
        """Each caution as a sentence that is understood alone."""
        return tuple(f"CAUTION: {text}" for text in (*self.prediction.cautions, *self.prediction.model_cautions))

    @property
    def shows_keys(self) -> bool:
        """Whether key slices are reported as slices of interest: not of a scan that is negative by its threshold."""
        return self.prediction.is_positive is not False

    @property
    def model_name(self) -> str:
        """The model in the room of a ManufacturerModelName."""
        name, model = f"{NAME} {self.prediction.method}", self.prediction.model
        return name[:64] if model is None else f"{name[: 63 - len(model.short)]} {model.short}"

    @property
    def series_number(self) -> int:
        """No two source series of a study (unless it was merged), findings or kinds share one."""
        number = self.source.series.number
        if number is None or not 0 <= number < LARGEST:
            digest = sha256(self.source.slices[0].series_uid.encode()).digest()
            number = LARGEST + int.from_bytes(digest[:8], "big") % LARGEST
        return SOURCE_STEP * number + FIRST_NUMBER + FINDING_STEP * self.finding + self.kind.place

    @property
    def series_description(self) -> str:
        """Finding, warning, kind and source; without room its description is cut first, then the finding's name."""
        series, finding = self.source.series, self.prediction.finding
        warning = "CAUTION" if self.cautions else ""
        of = "" if series.number is None else f", of {series.number}"
        room = LONGEST_DESCRIPTION - len(f"{warning}, : {self.kind.title}{of}")
        first = ", ".join(filter(None, (finding.name[:room] if finding else "", warning)))
        text = f"{first}: {self.kind.title}{of}" if first else f"{self.kind.title}{of}"
        if not series.description:
            return text
        return f"{text}{' ' if of else ', of '}{series.description}"[:LONGEST_DESCRIPTION].rstrip(" ,")

    def arguments(self) -> dict[str, Any]:
        """Arguments that all highdicom objects need."""
        model = self.prediction.model
        return {
            "series_instance_uid": self.uid("series"),
            "series_number": self.series_number,
            "sop_instance_uid": self.uid("instance"),
            "instance_number": 1,
            "manufacturer": NAME,
            "manufacturer_model_name": self.model_name,
            "software_versions": __version__ if model is None else (__version__, f"model {model.short}"),
            "series_description": self.series_description,
            "content_qualification": "RESEARCH",
            "specific_character_set": UNICODE,
            "transfer_syntax_uid": ExplicitVRLittleEndian,
        }

    def finish(self, dataset: Dataset) -> Dataset:
        """Add patient and study, the same in all results of a scan."""
        for name, value in self.source.identity.items():
            setattr(dataset, name, value)
        if self.source.anonymous:
            profile = codes.DCM.BasicApplicationConfidentialityProfile
            dataset.DeidentificationMethodCodeSequence = [sr.CodedConcept.from_code(profile)]
            for part in (dataset, *dataset.ContributingEquipmentSequence):
                for name in DATES:
                    part.pop(name, None)
            dataset.ContentDate, dataset.ContentTime = DUMMY_DATE, DUMMY_TIME
        return dataset


def evidence(result: Result, references: Iterable[Reference]) -> list[Dataset]:
    """Make the referenced objects as highdicom needs them; `Result.finish` adds the patient."""
    row, datasets = result.prediction.row, []
    for reference in references:
        dataset = Dataset()
        dataset.SOPClassUID, dataset.SOPInstanceUID = reference.sop_class, reference.sop_uid
        dataset.StudyInstanceUID, dataset.SeriesInstanceUID = result.source.study_uid, reference.series_uid
        dataset.Modality, dataset.Rows, dataset.Columns = row.modality, row.rows, row.columns
        for name in REQUIRED:
            setattr(dataset, name, None)
        datasets.append(dataset)
    return datasets


def observer(result: Result) -> sr.ObserverContext:
    """Name the program as the observer."""
    return sr.ObserverContext(
        observer_type=codes.DCM.Device,
        observer_identifying_attributes=sr.DeviceObserverIdentifyingAttributes(
            uid=generate_uid(entropy_srcs=[NAME, __version__]),
            name=NAME,
            manufacturer_name=NAME,
            model_name=result.model_name,
        ),
    )


def frames(reference: Reference) -> list[int] | None:
    """The frame numbers of a reference, in highdicom's form."""
    return None if reference.frame is None else [reference.frame]


def key_objects(result: Result) -> Dataset:
    """List the key slices by descending attention, one item a slice, also in a multi-frame object."""
    chosen = [result.source.slices[number] for number in result.prediction.key_positions]
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


# The structured report (TID 1500): docs/conformance.md has its content.  Viewers such as OHIF open the slice of the
# first group and draw its region, the edge of the image.  A group without a region among the Imaging Measurements
# makes OHIF 3.12 fail, so the interval's ends have one, and 'slices' (1 kB each) lies in a container of its own.

SCHEME = "99NGUIDE"  # designator of our own codes; designators that begin with 99 are private

# Concepts for which DICOM has no code.
ATTENTION = sr.CodedConcept("attention", SCHEME, "Attention of the slice")
INTERVAL = sr.CodedConcept("interval", SCHEME, "Attention within the interval")
THRESHOLD = sr.CodedConcept("threshold", SCHEME, "Threshold of the probability")
CALL = sr.CodedConcept("call", SCHEME, "Scan by the threshold")
FIRST = sr.CodedConcept("first", SCHEME, "First slice of the interval")
LAST = sr.CodedConcept("last", SCHEME, "Last slice of the interval")
SLICES = sr.CodedConcept("slices", SCHEME, "Attention of every slice")
SOUGHT = sr.CodedConcept("sought", SCHEME, "Looked for")

# Concepts with a DICOM code; made once, not for every slice.
PROBABILITY = sr.CodedConcept.from_code(codes.DCM.Probability)
NO_UNITS = sr.CodedConcept.from_code(codes.UCUM.NoUnits)
SOURCE = sr.CodedConcept.from_code(codes.SCT.Source)
COMMENT = sr.CodedConcept.from_code(codes.DCM.Comment)

WHOLE = "The region is the whole slice, as far as the image goes; it outlines nothing within the slice."
NO_KEYS = "NEGATIVE by the threshold: no slice is reported as of interest, and there are no key objects."

PROCEDURES = {
    "CT": (codes.DCM.ComputedTomography, codes.LN.CTUnspecifiedBodyRegion),
    "MR": (codes.DCM.MagneticResonance, codes.LN.MRIUnspecifiedBodyRegion),
    "": (codes.DCM.OtherModality, Code("363679005", "SCT", "Imaging procedure")),
}
"""Modality and procedure by the headers' modality; the last entry is for all others."""


class _PlainReport(sr.Comprehensive3DSR):
    """A report without highdicom's copy of whole modules: `Result.finish` adds the patient, as for other results."""

    def copy_patient_and_study_information(self, dataset: Dataset) -> None:
        pass


def structured_report(result: Result) -> Dataset:
    """Report the scan's probability and the attention of every slice."""
    objects = evidence(result, {reference.sop_uid: reference for reference in result.source.slices}.values())
    keys = list(enumerate(result.prediction.key_positions, start=1)) if result.shows_keys else []
    modality, procedure = PROCEDURES.get(result.prediction.row.modality, PROCEDURES[""])
    report = sr.MeasurementReport(
        observation_context=sr.ObservationContext(observer_device_context=observer(result)),
        procedure_reported=procedure,
        imaging_measurements=[*(_key_slice(result, *key) for key in keys), _scan(result)],
    )
    document = _PlainReport(
        objects,
        report[0],
        is_complete=True,
        coding_schemes=[CodingSchemeIdentificationItem(SCHEME, name=NAME, responsible_organization=NAME)],
        **result.arguments(),
    )
    # Parts with an item per slice are added last: highdicom would copy and search them, which takes half of the time.
    document.ContentSequence.insert(len(document.ContentSequence) - 1, _library(result, objects, modality))
    document.ContentSequence.append(_slices(result))
    return result.finish(document)


def _key_slice(result: Result, rank: int, number: int) -> sr.PlanarROIMeasurementsAndQualitativeEvaluations:
    name = f"key slice {rank} of {len(result.prediction.key_slices)}: slice {number + 1}, whole slice"
    attention = _number(ATTENTION, float(result.prediction.attention[number]))
    region = sr.ImageRegion(sr.GraphicTypeValues.POLYLINE, *_whole(result, number))
    group = sr.PlanarROIMeasurementsAndQualitativeEvaluations(
        **_shared(result, name), referenced_region=region, measurements=[attention]
    )
    group[0].ContentSequence.append(_text(COMMENT, WHOLE))
    return group


def _scan(result: Result) -> sr.MeasurementsAndQualitativeEvaluations:
    prediction = result.prediction
    first, last = prediction.interval_positions
    inside = float(prediction.attention[first : last + 1].double().sum())
    measurements = [_number(PROBABILITY, prediction.probability)]
    evaluations = []
    if prediction.threshold is not None:
        call = codes.SCT.Positive if prediction.is_positive else codes.SCT.Negative
        measurements.append(_number(THRESHOLD, prediction.threshold))
        evaluations.append(sr.QualitativeEvaluation(CALL, call))
    measurements += [_end(result, FIRST, first), _end(result, LAST, last), _number(INTERVAL, inside)]
    # The body part is named for the scan only: OHIF would write it on every key slice, by the code of 'finding site'.
    site = BODY_PARTS.get(result.source.series.body_part)
    group = sr.MeasurementsAndQualitativeEvaluations(
        **_shared(result, "scan"),
        finding_sites=None if site is None else [sr.FindingSite(site)],
        measurements=measurements,
        qualitative_evaluations=evaluations,
    )
    comments = [*result.cautions, *([] if result.shows_keys else [NO_KEYS])]  # OHIF writes them on the image
    texts = [*(_text(COMMENT, comment) for comment in comments), _text(SOUGHT, prediction.sought)]
    group[0].ContentSequence.extend(texts)
    return group


def _slices(result: Result) -> sr.ContainerContentItem:
    weights = zip(result.prediction.attention.tolist(), result.source.slices, strict=True)
    group = sr.MeasurementsAndQualitativeEvaluations(
        **_shared(result, "slices"), measurements=[_number(ATTENTION, weight, place) for weight, place in weights]
    )
    container = sr.ContainerContentItem(SLICES, relationship_type=sr.RelationshipTypeValues.CONTAINS)
    container.ContentSequence = sr.ContentSequence(group)
    return container


def _shared(result: Result, name: str) -> dict[str, Any]:
    """What every group says: its name, the finding and the algorithm."""
    prediction, model, finding = result.prediction, result.prediction.model, result.prediction.finding
    parameters = [NOTICE, f"method: {prediction.method}"]
    if model is not None:
        parameters += [f"model: {model.fingerprint}", str(model)]
    meaning = (
        "is of a scan called negative and points at no finding" if prediction.interval is None else prediction.meaning
    )
    parameters.append(f"the interval {meaning}")
    concept = None
    if finding is not None:
        code = (finding.name, SCHEME) if finding.code is None else (finding.code, "SCT")
        concept = sr.CodedConcept(*code, finding.meaning or finding.name.replace("_", " "))
    return {
        "tracking_identifier": sr.TrackingIdentifier(uid=result.uid(name), identifier=name),
        "finding_type": concept,
        "algorithm_id": sr.AlgorithmIdentification(NAME, __version__, parameters=parameters, manufacturer=NAME),
    }


def _text(name: sr.CodedConcept, text: str) -> sr.TextContentItem:
    return sr.TextContentItem(name, text, sr.RelationshipTypeValues.CONTAINS)


def _end(result: Result, name: sr.CodedConcept, number: int) -> sr.Measurement:
    """An end of the interval: the number of its slice, from 1, inferred from the whole slice."""
    place = sr.CoordinatesForMeasurement(sr.GraphicTypeValues.POLYLINE, *_whole(result, number))
    return sr.Measurement(name, number + 1, NO_UNITS, referenced_coordinates=[place])


def _whole(result: Result, number: int) -> tuple[np.ndarray, sr.SourceImageForRegion]:
    """The edge of a slice, closed, from the corner of its first pixel to that of its last; and the slice."""
    columns, rows = result.prediction.row.columns, result.prediction.row.rows
    corners = np.array([[0, 0], [columns, 0], [columns, rows], [0, rows], [0, 0]], float)
    place = result.source.slices[number]
    return corners, sr.SourceImageForRegion(place.sop_class, place.sop_uid, frames(place))


def _number(name: sr.CodedConcept, value: float, *places: Reference) -> sr.Measurement:
    images = [sr.SourceImageForMeasurement(place.sop_class, place.sop_uid, frames(place)) for place in places]
    return sr.Measurement(name, value, NO_UNITS, referenced_images=images)


def _library(result: Result, objects: list[Dataset], modality: Code) -> sr.ContainerContentItem:
    """List all objects of the scan in one group, with the attributes that they share."""
    # highdicom's own library refuses images without spacing or position, and repeats both for every image.
    context, contains = sr.RelationshipTypeValues.HAS_ACQ_CONTEXT, sr.RelationshipTypeValues.CONTAINS
    shared = sr.ContentSequence([sr.CodeContentItem(codes.DCM.Modality, modality, context)])
    region = BODY_PARTS.get(result.source.series.body_part)
    if region is not None:
        shared.append(sr.CodeContentItem(codes.DCM.TargetRegion, region, context))
    if result.source.frame_of_reference:
        shared.append(sr.UIDRefContentItem(codes.DCM.FrameOfReferenceUID, result.source.frame_of_reference, context))
    for image in objects:
        shared.append(sr.ImageContentItem(SOURCE, image.SOPClassUID, image.SOPInstanceUID, None, None, contains))
    group = sr.ContainerContentItem(codes.DCM.ImageLibraryGroup, relationship_type=contains)
    group.ContentSequence = shared
    library = sr.ContainerContentItem(codes.DCM.ImageLibrary, relationship_type=contains)
    library.ContentSequence = sr.ContentSequence([group])
    return library


SHOWN = "Key slices and the attention of all slices."
LONGEST = 10240  # characters of ImageComments


def capture(result: Result, content: bytes, name: str) -> Dataset:
    """Make an image of the PNG file `content`, which is called `name`; a gray picture becomes a gray image."""
    # The strip itself names nobody, but it shows slices whose pixels may; they all lie the same way in it.
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
    image.SourceImageSequence = [_source(result, number) for number in result.prediction.key_positions]
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
    purpose = codes.DCM.SourceImageForImageProcessingOperation
    item.PurposeOfReferenceCodeSequence = [sr.CodedConcept.from_code(purpose)]
    return item


def write_dicom(
    prediction: ScanPrediction,
    strip: Path,
    out: Path,
    *,
    anonymize: bool = False,
    report: Report | None = None,
    place: int = 0,
) -> list[Path]:
    """Write a scan's results as DICOM into the folder `out`, and return the files; UserError without an identity."""
    # The strip is a PNG file, which must not name the patient.  `report` receives problems without values of a header
    # and, with `anonymize`, without names of files.  `place` is the finding's among those of the scan, from 0.

    def note(problem: Problem) -> None:
        if report is not None:
            report(problem._replace(file="") if anonymize else problem)

    source = read_source(prediction.row, prediction.root, note)
    if anonymize and source.burned_in:
        raise UserError(
            f"scan {prediction.row.scan_id!r}: (0028,0301) BurnedInAnnotation is YES: its pixels name the patient, and "
            "the strip shows them; clean the pixels first, or leave out --anonymize"
        )
    if anonymize:
        source = without_patient(source)
    try:
        picture = strip.read_bytes()
    except OSError as error:
        raise UserError(f"{strip} cannot be read ({error.strerror}); predict again") from error
    keys, report_of, image = (Result(prediction, source, kind, place) for kind in KINDS.values())
    with config.disable_value_validation():  # pydicom would warn of the source's values, which are reported above
        results = (
            key_objects(keys) if keys.shows_keys else None,
            structured_report(report_of),
            capture(image, picture, strip.name),
        )
        contents = {}
        for name, dataset in zip(KINDS, results, strict=True):
            if dataset is not None:
                file = io.BytesIO()
                dataset.save_as(file, enforce_file_format=True)
                contents[out / name] = file.getvalue()
    make_folder(out)
    for path in {out / name for name in KINDS} - {*contents}:  # of an earlier result
        path.unlink(missing_ok=True)
    for path, content in contents.items():
        write_atomically(path, content)
    return list(contents)
