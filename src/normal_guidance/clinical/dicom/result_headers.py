"""What all DICOM results of a scan have in common: UIDs, equipment, the patient, and that a program made them."""

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
"""The program, as equipment, observer and algorithm."""

NOTICE = "AI-generated, for research use only, not for diagnosis."

UNICODE = "ISO_IR 192"
"""Character set of the results: that of the source need not fit what is written here."""

DATES = (
    "InstanceCreationDate",
    "InstanceCreationTime",
    "DateOfSecondaryCapture",
    "TimeOfSecondaryCapture",
    "ContributionDateTime",
)
"""When a result was made, where it need not be said."""


@dataclass(frozen=True)
class Result:
    """What is to be told about a scan, by one DICOM object in a series of its own.

    Its UIDs are a hash of the source's UIDs and of what is told, so that writing a result again and sending it again
    gives no second one in the archive; only the times of writing differ.
    """

    prediction: ScanPrediction
    source: SourceSeries
    title: str
    """SeriesDescription."""
    series_number: int
    content: bytes = b""
    """What the object holds beside the prediction."""

    def uid(self, purpose: str) -> str:
        """The UID for a purpose, 'series' or 'instance' for instance."""
        one = self.prediction
        told = (
            (__version__, one.method, one.logit, one.probability, one.threshold, one.attention.tolist()),
            (one.key_slices, one.interval, one.share),
            (self.source.study_uid, self.source.slices, sorted(self.source.identity.items())),
            (self.title, sha256(self.content).hexdigest(), purpose),
        )
        return str(generate_uid(entropy_srcs=[repr(told)]))

    @property
    def sentence(self) -> str:
        """The scan's probability and the call, and what made them."""
        one = self.prediction
        call = "" if one.threshold is None else f", {'' if one.is_positive else 'not '}positive by threshold"
        number = "" if one.threshold is None else f" {one.threshold:.4g}"
        return (
            f"{NOTICE} {NAME} {__version__}, method {one.method}. "
            f"Probability that the scan is positive: {one.probability:.4g}{call}{number}."
        )

    def arguments(self) -> dict[str, Any]:
        """What highdicom's objects ask for in common."""
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
        """Says whose result it is: in one place, so that all results of a scan say the same."""
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
    """The objects behind references as highdicom asks for them, without a patient, whom `Result.finish` adds."""
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
    """The program as the observer."""
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
    """As highdicom takes them."""
    return None if reference.frame is None else [reference.frame]


def code_item(code: Any) -> Dataset:
    """A code as an item of a sequence."""
    item = Dataset()
    item.CodeValue, item.CodingSchemeDesignator, item.CodeMeaning = code.value, code.scheme_designator, code.meaning
    return item
