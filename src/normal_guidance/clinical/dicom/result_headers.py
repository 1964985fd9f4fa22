"""The headers that all DICOM results of a scan share: UIDs, equipment, patient, and the program as their author."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from highdicom.sr import DeviceObserverIdentifyingAttributes, ObserverContext
from pydicom import Dataset
from pydicom.sr.codedict import codes
from pydicom.uid import ExplicitVRLittleEndian, generate_uid

from normal_guidance import __version__
from normal_guidance.clinical.dicom.anonymize import DUMMY_DATE, DUMMY_TIME
from normal_guidance.clinical.dicom.result_series import Kind, series_description, series_number
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
    """One DICOM object about a scan, in its own series.

    Its UIDs are a hash of what it is of and what it says in whole numbers: the source's UIDs and identity, the model,
    the finding, the options, the key slices, the interval and the cautions.  Probability and attention are left out,
    because their last digits differ with the number of threads.  So a result that is computed and sent again is not a
    second one in the archive, and one that says something else, or of other slices, never has the same UIDs.
    """

    prediction: ScanPrediction
    source: SourceSeries
    kind: Kind
    finding: int = 0
    """The finding's place among those of the scan."""

    def uid(self, purpose: str) -> str:
        """The UID for a purpose, for example 'series' or 'instance'."""
        one, source = self.prediction, self.source
        content = (
            (__version__, self.kind.place, purpose),
            (source.study_uid, source.slices, sorted(source.identity.items()), source.series),
            (one.method, None if one.model is None else one.model.fingerprint),
            None if one.finding is None else (one.finding.name, one.finding.code),
            (one.threshold, one.share, one.coverage),  # of the model or the command, never computed from the scan
            (one.is_positive, one.key_slices, one.interval, one.cautions),
        )
        return str(generate_uid(entropy_srcs=[repr(content)]))

    @property
    def text(self) -> str:
        """Everything that a reader must know, in sentences: the warnings first."""
        return " ".join((NOTICE, *self.cautions, *self.sentences))

    @property
    def cautions(self) -> tuple[str, ...]:
        """Each caution as a sentence that is understood alone."""
        return tuple(f"CAUTION: {caution}" for caution in self.prediction.cautions)

    @property
    def sentences(self) -> tuple[str, ...]:
        """What was looked for and where, the result, and the model."""
        one = self.prediction
        where = f", body part {self.source.series.body_part}" if self.source.series.body_part else ""
        model = f"method {one.method}" if one.model is None else f"{one.model}; fingerprint {one.model.fingerprint}"
        return f"Looked for: {one.sought}{where}.", self.call, f"{NAME} {__version__}, {model}."

    @property
    def call(self) -> str:
        """Probability, and the decision by the threshold."""
        one = self.prediction
        if one.threshold is None:
            return f"Probability {one.probability:.4g}; no threshold was chosen."
        side = "positive" if one.is_positive else "NEGATIVE"
        return f"Probability {one.probability:.4g}, {side} by the threshold {one.threshold:.4g}."

    @property
    def shows_keys(self) -> bool:
        """Whether key slices are reported as slices of interest: not of a scan that is negative by its threshold."""
        return self.prediction.is_positive is not False

    @property
    def model_name(self) -> str:
        """The model in the room of a ManufacturerModelName."""
        one = self.prediction
        name = f"{NAME} {one.method}"
        return name[:64] if one.model is None else f"{name[: 63 - len(one.model.short)]} {one.model.short}"

    def arguments(self) -> dict[str, Any]:
        """Arguments that all highdicom objects need."""
        model = self.prediction.model
        return {
            "series_instance_uid": self.uid("series"),
            "series_number": series_number(self.source, self.kind, self.finding),
            "sop_instance_uid": self.uid("instance"),
            "instance_number": 1,
            "manufacturer": NAME,
            "manufacturer_model_name": self.model_name,
            "software_versions": __version__ if model is None else (__version__, f"model {model.short}"),
            "series_description": series_description(self.prediction, self.source, self.kind),
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
            model_name=result.model_name,
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
