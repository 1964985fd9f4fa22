"""Patient, study and DICOM objects of a scan's slices, from the headers.

Results repeat about the patient and the study only what is read here: a `SourceSeries` holds chosen attributes, as
Unicode text, so that nothing else of a header can reach a result by accident.  Pixels are not read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from secrets import token_hex

from pydicom import config
from pydicom.datadict import dictionary_VR, tag_for_keyword
from pydicom.multival import MultiValue
from pydicom.uid import generate_uid
from pydicom.valuerep import validate_value

from normal_guidance import __version__
from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.index.containers import locate
from normal_guidance.scans.index.dicom_slices import Dataset, integer, read_elements, refusing, text
from normal_guidance.scans.index.manifest import ScanRow
from normal_guidance.scans.index.problems import Problem, Report

KIND = "header"  # kind of the problems that are found here

REQUIRED = (
    *("PatientName", "PatientID", "PatientBirthDate", "PatientSex"),
    *("StudyDate", "StudyTime", "AccessionNumber", "StudyID", "ReferringPhysicianName"),
)
"""Attributes of patient and study that every object must have and that may be empty (type 2)."""

OPTIONAL = ("IssuerOfPatientID", "PatientAge", "StudyDescription", "PatientIdentityRemoved", "DeidentificationMethod")
"""Attributes that are repeated where the source has them."""

CHECKED = {"PatientSex": ("M", "F", "O"), "PatientIdentityRemoved": ("YES", "NO")}  # only these values are allowed
FREE_TEXT = ("PN", "LO", "SH")
"""Value representations whose invalid values, such as too long ones, are kept: archives match by them."""

UNSTATED = "not stated by the source"  # the method for a source that says only that it was made anonymous

OF_SERIES = ("SeriesNumber", "SeriesDescription", "BodyPartExamined", "Laterality")
"""Attributes of the series that results are told from; they are left out where they are missing or wrong."""

_UIDS = ("SOPClassUID", "SOPInstanceUID", "StudyInstanceUID", "SeriesInstanceUID", "FrameOfReferenceUID")
_PICTURE = ("NumberOfFrames", "BurnedInAnnotation", "LossyImageCompression")


@dataclass(frozen=True)
class Reference:
    """The DICOM object of a slice."""

    sop_class: str
    sop_uid: str
    series_uid: str
    frame: int | None = None  # its number in a multi-frame object, from 1


@dataclass(frozen=True)
class Series:
    """What the first slice says of its series."""

    number: int | None = None
    description: str = ""
    body_part: str = ""  # BodyPartExamined
    laterality: str = ""  # R or L, of a paired body part


@dataclass(frozen=True)
class SourceSeries:
    """A scan as its results refer to it."""

    study_uid: str
    frame_of_reference: str  # UID; empty where the headers have none
    slices: tuple[Reference, ...]
    identity: Mapping[str, str]  # patient and study by keyword: `REQUIRED`, and what is there of `OPTIONAL`
    burned_in: bool = False  # a slice says that its pixels name the patient
    lossy: bool = False  # a slice says that it was compressed with loss
    anonymous: bool = False
    series: Series = Series()


def read_source(row: ScanRow, root: Path, report: Report) -> SourceSeries:
    """Read the headers of a scan's slices; `report` receives missing and wrong attributes, which become empty."""
    # Problems name attributes, never their values.  Where results would have no DICOM object to refer to, or an
    # ambiguous one (NIfTI, missing UIDs, two slices with one UID, two patients or studies), this is an error.
    if row.kind != "dicom":
        raise UserError(
            f"scan {row.scan_id!r} is the NIfTI file {row.files[0]}, which has no DICOM identity (patient, study, SOP "
            "instances) that results could refer to; predict from the DICOM series, or without DICOM results"
        )
    headers = {file: _read_header(row.scan_id, root, file) for file in dict.fromkeys(row.files)}
    first_file, first = next(iter(headers.items()))
    identity, series, says_characters = _read_identity(row.scan_id, root, first_file)
    _refuse_two(row.scan_id, headers, "PatientID", "patient")
    _refuse_two(row.scan_id, headers, "StudyInstanceUID", "study")
    file_of: dict[str, str] = {}
    for file, header in headers.items():
        earlier = file_of.setdefault(header.values["SOPInstanceUID"], file)
        if earlier != file:
            raise UserError(
                f"scan {row.scan_id!r}: {earlier} and {file} have the same {_named('SOPInstanceUID')}, so DICOM "
                "results cannot say which slice they mean; give every slice its own"
            )

    def note(detail: str, action: str) -> None:
        report(Problem(row.scan_id, first_file, KIND, detail, action))

    for name in _UIDS:
        if any(header.values[name] and not _is_valid("UI", header.values[name]) for header in headers.values()):
            note(f"{_named(name)} is not a valid UI", "repeated as it is; archives may refuse the results")
    if not says_characters and not "".join(identity.values()).isascii():
        note("letters beyond ASCII, but no (0008,0005) SpecificCharacterSet", "read as Latin-1")
    if not first.values["FrameOfReferenceUID"]:
        note(f"no {_named('FrameOfReferenceUID')}", "left out")
    return SourceSeries(
        study_uid=first.values["StudyInstanceUID"],
        frame_of_reference=first.values["FrameOfReferenceUID"],
        slices=tuple(headers[file].reference(frame) for file, frame in zip(row.files, row.frames, strict=True)),
        identity=_checked(identity, note),
        burned_in=any(header.burned_in for header in headers.values()),
        lossy=any(header.lossy for header in headers.values()),
        series=series,
    )


@dataclass(frozen=True)
class _Header:
    """What is read from every file."""

    values: Mapping[str, str]  # values of `_UIDS`, and PatientID as it is in the file
    frames: int
    burned_in: bool
    lossy: bool

    def reference(self, frame: int) -> Reference:
        sop_class, sop_uid, _, series_uid = (self.values[name] for name in _UIDS[:4])
        return Reference(sop_class, sop_uid, series_uid, frame + 1 if self.frames > 1 else None)


@contextmanager
def _reading(scan_id: str, file: str) -> Iterator[None]:
    try:
        with refusing():
            yield
    except UnreadableError as error:
        raise UserError(
            f"scan {scan_id!r}: {file} cannot be read ({error.detail}), so DICOM results cannot refer to it; "
            "put the file back, or predict without DICOM results"
        ) from error


def _read_header(scan_id: str, root: Path, file: str) -> _Header:
    with _reading(scan_id, file):
        dataset = read_elements(locate(root, file), _HEADER.values()).dataset
        values = {name: text(dataset, _HEADER[name]) for name in (*_UIDS, "PatientID")}
        values["SOPClassUID"] = values["SOPClassUID"] or text(dataset.file_meta, 0x00020002)
        values["SOPInstanceUID"] = values["SOPInstanceUID"] or text(dataset.file_meta, 0x00020003)
        header = _Header(
            values,
            frames=integer(dataset, _HEADER["NumberOfFrames"]) or 1,
            burned_in=text(dataset, _HEADER["BurnedInAnnotation"]).upper() == "YES",
            lossy=text(dataset, _HEADER["LossyImageCompression"]) == "01",
        )
    missing = [name for name in _UIDS[:4] if not values[name]]
    if missing:
        raise UserError(
            f"scan {scan_id!r}: {file} has no {_named(missing[0])}, so DICOM results cannot refer to it; mend the "
            "file, or predict without DICOM results"
        )
    return header


def _read_identity(scan_id: str, root: Path, file: str) -> tuple[dict[str, str], Series, bool]:
    """Read the file's attributes of patient and study, its series, and whether it names its character set."""
    names = (*REQUIRED, *OPTIONAL)
    with _reading(scan_id, file):
        dataset = read_elements(locate(root, file), map(_tag, (*names, *OF_SERIES))).dataset
        identity = {name: _decoded(dataset, name) for name in names if name in dataset}
        words = {name: _decoded(dataset, name) if name in dataset else "" for name in OF_SERIES[1:]}
        body_part, laterality = words["BodyPartExamined"].upper(), words["Laterality"].upper()
        series = Series(
            number=integer(dataset, _tag("SeriesNumber")),
            description=" ".join(words["SeriesDescription"].replace("\ufffd", "?").replace("\\", " ").split()),
            body_part=body_part if _is_valid("CS", body_part) and "\\" not in body_part else "",
            laterality=laterality if laterality in ("R", "L") else "",
        )
        return identity, series, bool(dataset.get("SpecificCharacterSet"))


def _decoded(dataset: Dataset, name: str) -> str:
    """Decode an attribute's value by the file's SpecificCharacterSet; several values are joined as in a file."""
    value = dataset[name].value
    if isinstance(value, bytes):  # of unknown representation
        value = value.decode("latin-1")
    words = value if isinstance(value, MultiValue) else [value]
    return "\\".join("" if word is None else str(word) for word in words).strip(" \0")


def _checked(given: Mapping[str, str], note: Callable[[str, str], None]) -> dict[str, str]:
    """Check the attributes of `REQUIRED` and `OPTIONAL`; missing and invalid required ones become empty."""
    missing = [name for name in REQUIRED if name not in given]
    if missing:
        note(f"no {', '.join(map(_named, missing))}", "written empty")
    identity = dict.fromkeys(REQUIRED, "")
    for name, value in given.items():
        vr = dictionary_VR(name)
        value = value.upper() if vr == "CS" else value
        if "\ufffd" in value:
            note(f"{_named(name)} is not in the file's (0008,0005) SpecificCharacterSet", "unknown letters became ?")
            value = value.replace("\ufffd", "?")
        if value and not (value in CHECKED[name] if name in CHECKED else _is_valid(vr, value)):
            kept = vr in FREE_TEXT
            note(f"{_named(name)} is not a valid {vr}", "repeated as it is" if kept else "written empty")
            value = value if kept else ""
        if value or name in REQUIRED:
            identity[name] = value
    if identity.get("PatientIdentityRemoved") == "YES":
        identity.setdefault("DeidentificationMethod", UNSTATED)
    return identity


def _is_valid(vr: str, value: str) -> bool:
    try:
        for word in value.split("\\"):
            validate_value(vr, word, config.RAISE)
    except ValueError:
        return False
    return True


def _refuse_two(scan_id: str, headers: Mapping[str, _Header], name: str, what: str) -> None:
    """Refuse files that differ in an attribute: results of two patients or studies would be filed under the first."""
    file_of: dict[str, str] = {}
    for file, header in headers.items():
        file_of.setdefault(header.values[name], file)
    files = list(file_of.values())
    if len(files) > 1:
        raise UserError(
            f"scan {scan_id!r}: {files[0]} and {files[1]} differ in {_named(name)}; DICOM results belong to one "
            f"{what}, so separate the files"
        )


def _tag(name: str) -> int:
    return tag_for_keyword(name) or 0


def _named(name: str) -> str:
    """A tag with its name: '(0020,0010) StudyID'."""
    return f"({_tag(name) >> 16:04X},{_tag(name) & 0xFFFF:04X}) {name}"


_HEADER = {name: _tag(name) for name in (*_UIDS, "PatientID", *_PICTURE)}


# A scan without its patient, by the Basic Application Level Confidentiality Profile (DICOM PS3.15 E).  Names, dates,
# numbers and descriptions are emptied or left out.  Every UID is replaced by its hash with a secret that is drawn when
# the program starts and never stored: results of one run agree with each other (slices of a series, scans of a study or
# a patient stay together), but no original can be found by trying likely UIDs, and two runs cannot be matched.

METHOD = f"normal-guidance {__version__}, basic profile"  # DeidentificationMethod of the results
_SECRET = token_hex(32)


def without_patient(source: SourceSeries) -> SourceSeries:
    """Replace the scan's UIDs, and its patient by a pseudonym."""

    def new_uid(uid: str) -> str:
        return str(generate_uid(entropy_srcs=[_SECRET, uid]))

    patient = source.identity["PatientID"], source.identity.get("IssuerOfPatientID", "")
    known = repr(patient) if patient[0] else source.study_uid
    number = sha256(f"{_SECRET} {known}".encode()).hexdigest()[:12].upper()
    return replace(
        source,
        study_uid=new_uid(source.study_uid),
        frame_of_reference=source.frame_of_reference and new_uid(source.frame_of_reference),
        slices=tuple(
            replace(reference, sop_uid=new_uid(reference.sop_uid), series_uid=new_uid(reference.series_uid))
            for reference in source.slices
        ),
        identity={
            **dict.fromkeys(REQUIRED, ""),
            "PatientName": f"ANONYMOUS^{number}",
            "PatientID": f"ANONYMOUS-{number}",
            "PatientIdentityRemoved": "YES",
            "DeidentificationMethod": METHOD,
            "LongitudinalTemporalInformationModified": "REMOVED",
        },
        series=replace(source.series, description=""),
        anonymous=True,
    )
