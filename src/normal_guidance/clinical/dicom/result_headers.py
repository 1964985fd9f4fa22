"""The headers that all DICOM results of a scan share: UIDs, equipment, patient, and the program as their author."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from hashlib import sha256
from typing import Any

from highdicom.sr import DeviceObserverIdentifyingAttributes, ObserverContext
from pydicom import Dataset
from pydicom.sr.codedict import codes
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from normal_guidance import __version__
from normal_guidance.clinical.dicom.anonymize import DUMMY_DATE, DUMMY_TIME
from normal_guidance.clinical.dicom.source_series import REQUIRED, Reference, SourceSeries
from normal_guidance.clinical.scan_prediction import ScanPrediction

NAME = "normal-guidance"
"""The program's name as equipment, observer and algorithm."""

NOTICE = "AI-generated, for research use only, not for diagnosis."

UNICODE = "ISO_IR 192"
"""Character set of the results: the source's may not hold what is written here."""

DATES = (
    "InstanceCreationDate",
    "InstanceCreationTime",
    "DateOfSecondaryCapture",
    "TimeOfSecondaryCapture",
    "ContributionDateTime",
)
"""Optional attributes that say when a result was made."""


@dataclass(frozen=True)
class Result:
    """The content of one DICOM object about a scan, in its own series.

    Its UIDs are a hash of the source's UIDs and of the content: a result that is written and sent again is not a second
    one in the archive; only the times of writing differ.
    """

    prediction: ScanPrediction
    source: SourceSeries
    title: str
    """SeriesDescription."""
    series_number: int
    content: bytes = b""
    """What the object holds in addition to the prediction."""

    def uid(self, purpose: str) -> str:
        """The UID for a purpose, for example 'series' or 'instance'."""
        one = self.prediction
        content: tuple[object, ...] = (
            (__version__, one.method, one.logit, one.probability, one.threshold, one.attention.tolist()),
            (one.key_slices, one.interval, one.share, one.coverage),
            (self.source.study_uid, self.source.slices, sorted(self.source.identity.items())),
            (self.title, sha256(self.content).hexdigest(), purpose),
        )
        if one.finding is not None:
            content = (*content, (one.finding.name, one.finding.code))
        return str(generate_uid(entropy_srcs=[repr(content)]))

    @property
    def sentence(self) -> str:
        """Probability, decision by the threshold, program and method."""
        one = self.prediction
        call = "" if one.threshold is None else f", {'' if one.is_positive else 'not '}positive by threshold"
        number = "" if one.threshold is None else f" {one.threshold:.4g}"
        what = "that the scan is positive" if one.finding is None else f"of the finding {one.finding}"
        late = any(problem.kind == "late_slices" for problem in one.problems)
        return (
            f"{NOTICE} {NAME} {__version__}, method {one.method}. "
            f"Probability {what}: {one.probability:.4g}{call}{number}."
            f"{' Replaces an earlier result: slices arrived after it.' if late else ''}"
        )

    def arguments(self) -> dict[str, Any]:
        """Arguments that all highdicom objects need."""
        return {
            "series_instance_uid": self.uid("series"),
            "series_number": self.series_number,
            "sop_instance_uid": self.uid("instance"),
            "instance_number": 1,
            "manufacturer": NAME,
            "manufacturer_model_name": f"{NAME} {self.prediction.method}",
            "software_versions": __version__,
            "series_description": self.title,
            "content_qualification": "RESEARCH",
            "specific_character_set": UNICODE,
            "transfer_syntax_uid": ExplicitVRLittleEndian,
        }

    def finish(self, dataset: Dataset) -> Dataset:
        """Add patient and study, the same in all results of a scan."""
        for name, value in self.source.identity.items():
            setattr(dataset, name, value)
        if self.source.anonymous:
            dataset.DeidentificationMethodCodeSequence = [code_item(codes.DCM.BasicApplicationConfidentialityProfile)]
            for part in (dataset, *dataset.ContributingEquipmentSequence):
                for name in DATES:
                    part.pop(name, None)
            dataset.ContentDate, dataset.ContentTime = DUMMY_DATE, DUMMY_TIME
        return dataset


def evidence(result: Result, references: Iterable[Reference]) -> list[Dataset]:
    """Make the referenced objects as highdicom needs them; `Result.finish` adds the patient."""
    row, found = result.prediction.row, []
    for one in references:
        dataset = Dataset()
        dataset.SOPClassUID, dataset.SOPInstanceUID = one.sop_class, one.sop_uid
        dataset.StudyInstanceUID, dataset.SeriesInstanceUID = result.source.study_uid, one.series_uid
        dataset.Modality, dataset.Rows, dataset.Columns = row.modality, row.rows, row.columns
        for name in REQUIRED:
            setattr(dataset, name, None)
        found.append(dataset)
    return found


def observer(result: Result) -> ObserverContext:
    """Name the program as the observer."""
    return ObserverContext(
        observer_type=codes.DCM.Device,
        observer_identifying_attributes=DeviceObserverIdentifyingAttributes(
            uid=generate_uid(entropy_srcs=[NAME, __version__]),
            name=NAME,
            manufacturer_name=NAME,
            model_name=f"{NAME} {result.prediction.method}",
        ),
    )


def frames(reference: Reference) -> list[int] | None:
    """The frame numbers of a reference, in highdicom's form."""
    return None if reference.frame is None else [reference.frame]


def code_item(code: Any) -> Dataset:
    """Make a code an item of a sequence."""
    item = Dataset()
    item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = code.value, code.scheme_designator, code.meaning
    return item
