"""A reading list that takes results as HL7 v2 messages: ORU^R01 of version 2.5.1 over MLLP, acknowledged one by one.

Each finding is a group of observations: the probability, with the threshold as its reference range and a flag, the
call, and the key slices.  Results are preliminary: a radiologist decides.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, urlsplit

from pydicom import Dataset, dcmread

from normal_guidance import __version__
from normal_guidance.base.errors import UserError, shorten
from normal_guidance.base.files import read_json
from normal_guidance.base.system import install_command
from normal_guidance.clinic.dicom.objects import NOTICE
from normal_guidance.clinic.node.destination import (
    About,
    Accepted,
    Identity,
    NotSentError,
)
from normal_guidance.clinic.node.incoming import hash_of
from normal_guidance.clinic.node.partners import Peer
from normal_guidance.clinic.predict.dicomweb import refuse_open_token
from normal_guidance.clinic.predict.job import PREDICTION

# A scan's result as messages for reading lists tell it: patient and study from its DICOM report, numbers from JSON.


REPORT = "structured_report.dcm"


@dataclass(frozen=True)
class FindingResult:
    """What a model says of one finding.

    Args:
        name: the finding's name; empty where the model does not name it.
        code: its SNOMED CT identifier; None if unknown.
        meaning: what SNOMED CT calls it; None if unknown.
        sought: what was looked for, in words.
        probability: calibrated.
        threshold: from which on a scan is positive; None if none was chosen.
        positive: None without a threshold.
        key_slices: DICOM's numbers of the slices of the highest attention, or their places from 1 without such.
        model: fingerprint of the model.
    """

    name: str
    code: str | None
    meaning: str | None
    sought: str
    probability: float
    threshold: float | None
    positive: bool | None
    key_slices: tuple[int, ...]
    model: str

    @property
    def title(self) -> str:
        """What SNOMED CT calls the finding, or else its name."""
        return self.meaning or self.name.replace("_", " ") or "finding without a name"


@dataclass(frozen=True)
class ResultContent:
    """The result of one scan.

    Args:
        identity: a hash of the series and its slices: the same result has the same, however often it is sent.
        patient: headers of the patient and study, as the results have them.
        findings: what was found.
        cautions: what a reader must know before trusting it.
    """

    identity: str
    patient: Dataset
    findings: tuple[FindingResult, ...]
    cautions: tuple[str, ...]

    def header(self, name: str) -> str:
        """A value of the patient's headers as text; empty where it is missing."""
        value = self.patient.get(name)
        return "" if value is None else str(value)

    @property
    def notes(self) -> tuple[str, ...]:
        """The notice, then the cautions."""
        return (NOTICE, *self.cautions)


def prediction_files(folder: Path) -> list[Path]:
    """The files that `read_content` reads: those of scans that have DICOM results, in a fixed order."""
    return [one for one in sorted(folder.glob(f"*/{PREDICTION}")) if _report_of(one) is not None]


def read_content(file: Path, series: str, round: int) -> ResultContent:
    """The content of a scan's prediction.json and of the report beside it."""
    about = read_json(file, "predict again")
    report = _report_of(file)
    patient = dcmread(report, stop_before_pixels=True) if report is not None else Dataset()
    patient.pop("ContentSequence", None)
    found = about.get("findings") or [{**about, "name": ""}]
    return ResultContent(
        identity=hash_of(series, str(round), file.parent.name),
        patient=patient,
        findings=tuple(_finding(one) for one in found),
        cautions=tuple(about["cautions"]),
    )


def _report_of(prediction: Path) -> Path | None:
    return next(iter(sorted(prediction.parent.glob(f"dicom/**/{REPORT}"))), None)


def _finding(about: Mapping[str, Any]) -> FindingResult:
    return FindingResult(
        name=about["name"],
        code=about.get("code"),
        meaning=about.get("meaning"),
        sought=about["sought"],
        probability=about["probability"],
        threshold=about["threshold"],
        positive=about["positive"],
        key_slices=tuple(one["instance_number"] or one["slice"] for one in about["key_slices"]),
        model=about["model"]["identity"]["fingerprint"],
    )


try:
    from hl7apy.core import Message, Segment
    from hl7apy.exceptions import HL7apyException
    from hl7apy.parser import parse_message
except ImportError as error:
    raise UserError(f"HL7 messages need hl7apy; {install_command('node')}") from error

VERSION = "2.5.1"

START, END = b"\x0b", b"\x1c\r"
"""The frame of a message in MLLP."""

CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0

LARGEST_ANSWER = 65_536
"""Bytes of an acknowledgement; a longer one is refused."""

ACCEPTED = ("AA", "CA")

PRELIMINARY = "P"

SCHEME = "99NGUIDE"
"""Our own codes."""

STUDY_UID = "110180^Study Instance UID^DCM"


class ObservationSegment(NamedTuple):
    """The fields of an OBX segment that differ."""

    kind: str
    code: str
    group: str
    value: str
    reference: str = ""
    flag: str = ""


@dataclass(frozen=True)
class Hl7Destination:
    """A receiver of HL7 messages.

    Args:
        receiver: its application (MSH-5), host and port.
        identity: who we are.
    """

    receiver: Peer
    identity: Identity
    commits: bool = False

    @property
    def name(self) -> str:
        return f"hl7:{self.receiver}"

    def files(self, folder: Path) -> list[Path]:
        """The predictions."""
        return prediction_files(folder)

    def send(self, files: Sequence[Path], about: About, accepted: Accepted) -> None:
        """Send a message for each scan, and wait for its acknowledgement."""
        with self._connected() as connection:
            for file in files:
                content = read_content(file, about.series, about.round)
                message = make_message(content, self.identity.aet, self.receiver.aet)
                connection.sendall(START + message.encode() + END)
                self._check(_answer(connection), content.identity)
                accepted(file)

    def _check(self, answer: str, identity: str) -> None:
        try:
            acknowledged = parse_message(answer, find_groups=False).msa
            code, control = acknowledged.msa_1.to_er7(), acknowledged.msa_2.to_er7()
        except (HL7apyException, AttributeError, ValueError, IndexError) as error:
            raise NotSentError(f"{self.name} sent an answer that is not HL7") from error
        if code not in ACCEPTED or control != control_id(identity):
            raise NotSentError(f"{self.name} did not accept the message (MSA-1 is {code[:8] or 'empty'})")

    @contextmanager
    def _connected(self) -> Iterator[socket.socket]:
        try:
            with socket.create_connection((self.receiver.host, self.receiver.port or 0), CONNECT_SECONDS) as plain:
                plain.settimeout(ANSWER_SECONDS)
                if self.identity.tls is None:
                    yield plain
                else:
                    with self.identity.tls.wrap_socket(plain, server_hostname=self.receiver.host) as secure:
                        yield secure
        except OSError as error:
            raise NotSentError(f"{self.name} cannot be reached, or does not answer") from error


def _answer(connection: socket.socket) -> str:
    """The next message, without its frame."""
    found = b""
    while not found.endswith(END):
        more = connection.recv(4096)
        if not more or len(found) > LARGEST_ANSWER:
            raise OSError("no whole message")
        found += more
    return found.removesuffix(END).lstrip(START).decode("utf-8", "replace")


def control_id(identity: str) -> str:
    """MSH-10, which has at most 20 letters: the same result has the same, so that a receiver knows it again."""
    return identity[:20]


def make_message(content: ResultContent, sender: str, receiver: str, now: datetime | None = None) -> str:
    """Make the message about a scan."""
    message = Message("ORU_R01", version=VERSION)
    message.msh.msh_3, message.msh.msh_5 = plain(sender), plain(receiver)
    message.msh.msh_7 = f"{now or datetime.now(UTC):%Y%m%d%H%M%S+0000}"
    message.msh.msh_9 = "ORU^R01^ORU_R01"
    message.msh.msh_10, message.msh.msh_11, message.msh.msh_18 = control_id(content.identity), "P", "UNICODE UTF-8"
    result = message.add_group("ORU_R01_PATIENT_RESULT")
    result.add_group("ORU_R01_PATIENT").add(_patient_segment(content))
    order = result.add_group("ORU_R01_ORDER_OBSERVATION")
    order.add(_order(content, now))
    for number, one in enumerate(observations(content), start=1):
        order.add_group("ORU_R01_OBSERVATION").add(_observation(number, one))
    return str(message.to_er7())


def _patient_segment(content: ResultContent) -> Any:
    segment = Segment("PID", version=VERSION)
    segment.pid_1 = "1"
    issuer = plain(content.header("IssuerOfPatientID"))
    segment.pid_3 = plain(content.header("PatientID")) + (f"^^^{issuer}" if issuer else "")
    segment.pid_5 = "^".join(plain(part) for part in content.header("PatientName").partition("=")[0].split("^")[:5])
    segment.pid_7 = plain(content.header("PatientBirthDate"))
    segment.pid_8 = plain(content.header("PatientSex"))
    return segment


def _order(content: ResultContent, now: datetime | None) -> Any:
    segment = Segment("OBR", version=VERSION)
    segment.obr_1 = "1"
    segment.obr_3 = plain(content.header("AccessionNumber"))
    segment.obr_4 = f"AI^Slices that matter, AI, research only^{SCHEME}"
    segment.obr_7 = plain(content.header("StudyDate") + content.header("StudyTime").partition(".")[0])
    segment.obr_22 = f"{now or datetime.now(UTC):%Y%m%d%H%M%S+0000}"
    segment.obr_25 = PRELIMINARY
    return segment


def observations(content: ResultContent) -> Iterator[ObservationSegment]:
    """What is said of the study, and of each finding."""
    yield ObservationSegment("ST", STUDY_UID, "", plain(content.header("StudyInstanceUID")))
    for number, one in enumerate(content.findings, start=1):
        yield from _of_finding(one, str(number))
    for note in content.notes:
        yield ObservationSegment("TX", f"note^Note^{SCHEME}", "", plain(note))
    yield ObservationSegment("ST", f"software^Software^{SCHEME}", "", f"normal-guidance {__version__}")


def _of_finding(one: FindingResult, group: str) -> Iterator[ObservationSegment]:
    code = (
        f"{one.code}^{plain(one.title)}^SCT"
        if one.code
        else f"{plain(one.name) or 'finding'}^{plain(one.title)}^{SCHEME}"
    )
    flag = {None: "", True: "A", False: "N"}[one.positive]
    below = "" if one.threshold is None else f"<{one.threshold:.4g}"
    yield ObservationSegment("NM", "111047^Probability^DCM", group, f"{one.probability:.4f}", below, flag)
    yield ObservationSegment("CE", f"sought^What was looked for^{SCHEME}", group, code)
    if one.positive is not None:
        call = "10828004^Positive^SCT" if one.positive else "260385009^Negative^SCT"
        yield ObservationSegment("CE", f"call^Scan by the threshold^{SCHEME}", group, call)
    if one.positive is not False:
        slices = ", ".join(map(str, one.key_slices))
        yield ObservationSegment("ST", f"key_slices^Instance numbers of the key slices^{SCHEME}", group, slices)
    yield ObservationSegment("ST", f"model^Fingerprint of the model^{SCHEME}", group, one.model)


def _observation(number: int, one: ObservationSegment) -> Any:
    segment = Segment("OBX", version=VERSION)
    segment.obx_1, segment.obx_2, segment.obx_3, segment.obx_4 = str(number), one.kind, one.code, one.group
    segment.obx_5, segment.obx_7, segment.obx_8, segment.obx_11 = one.value, one.reference, one.flag, PRELIMINARY
    return segment


def plain(text: str) -> str:
    """Text without the signs that separate parts of a message, and on one line."""
    return " ".join(re.sub(r"[|^&~\\\x00-\x1f\x7f]", " ", text).split())


# A FHIR server that takes each finding as an Observation (R4B), created once however often it is sent.


try:
    import requests
    from fhir.resources.R4B.observation import Observation
except ImportError as error:
    raise UserError(f"FHIR needs {error.name}; {install_command('node')}") from error

TOKEN = "NGUIDE_FHIR_TOKEN"
"""Environment variable of the bearer token."""

SECONDS = (10.0, 60.0)
"""Longest wait for a connection, and for an answer."""

SNOMED, DCM, UCUM = (
    "http://snomed.info/sct",
    "http://dicom.nema.org/resources/ontology/DCM",
    "http://unitsofmeasure.org",
)
OURS = "urn:normal-guidance"
"""Systems of codes and identifiers."""

CATEGORY = "http://terminology.hl7.org/CodeSystem/observation-category"
INTERPRETATION = "http://terminology.hl7.org/CodeSystem/v3-ObservationInterpretation"


@dataclass(frozen=True)
class FhirDestination:
    """A FHIR server.

    Args:
        url: address of its root, as https://server/fhir.
    """

    url: str
    commits: bool = False

    @property
    def name(self) -> str:
        return f"fhir:{self.url}"

    def files(self, folder: Path) -> list[Path]:
        """The predictions."""
        return prediction_files(folder)

    def send(self, files: Sequence[Path], about: About, accepted: Accepted) -> None:
        """Create an Observation for each finding, unless the server has it."""
        for file in files:
            content = read_content(file, about.series, about.round)
            for one in content.findings:
                self._create(make_observation(content, one), identifier(content, one))
            accepted(file)

    def _create(self, observation: Observation, value: str) -> None:
        token = os.environ.get(TOKEN, "")
        headers = {
            "Content-Type": "application/fhir+json",
            "If-None-Exist": f"identifier={quote(f'{OURS}|{value}', safe='')}",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        with self._reached():
            answer = requests.post(
                f"{self.url}/Observation",
                observation.model_dump_json(exclude_none=True).encode(),
                headers=headers,
                timeout=SECONDS,
                allow_redirects=False,
            )
        if answer.status_code not in (200, 201):
            raise NotSentError(f"{self.name} answered with HTTP status {answer.status_code}")

    @contextmanager
    def _reached(self) -> Iterator[None]:
        try:
            yield
        except requests.RequestException as error:
            raise NotSentError(f"{self.name} cannot be reached, or does not answer") from error


def parse_fhir(text: str) -> FhirDestination:
    """Make a destination from fhir:URL; a token is not sent in the clear."""
    url = text.removeprefix("fhir:").rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise UserError(f"{shorten(text)!r} is not fhir:URL; write for example fhir:https://server/fhir")
    refuse_open_token(url, os.environ.get(TOKEN, ""))
    return FhirDestination(url)


def identifier(content: ResultContent, one: FindingResult) -> str:
    """What the same result always has: a server creates no second Observation with it."""
    return f"{content.identity}-{one.name or 'finding'}"


def make_observation(content: ResultContent, one: FindingResult) -> Observation:
    """Make the Observation of a finding: the probability, the call, and key slices as components."""
    coding = [{"system": SNOMED, "code": one.code, "display": one.title}] if one.code else []
    fields: dict[str, Any] = {
        "identifier": [{"system": OURS, "value": identifier(content, one)}],
        "status": "preliminary",
        "category": [{"coding": [{"system": CATEGORY, "code": "imaging"}]}],
        "code": {"coding": coding, "text": f"Probability of: {one.sought}"},
        "subject": {"identifier": _patient(content)},
        "derivedFrom": [{"identifier": _study(content), "type": "ImagingStudy"}],
        "valueQuantity": {"value": round(one.probability, 4), "system": UCUM, "code": "1"},
        "device": {"display": f"normal-guidance {__version__}, model {one.model}"},
        "note": [{"text": note} for note in content.notes],
        "component": list(_components(one)),
    }
    if one.positive is not None:
        call = ("POS", "Positive") if one.positive else ("NEG", "Negative")
        fields["interpretation"] = [{"coding": [{"system": INTERPRETATION, "code": call[0], "display": call[1]}]}]
    if one.threshold is not None:
        limit = {"value": round(one.threshold, 4), "system": UCUM, "code": "1"}
        fields["referenceRange"] = [{"high": limit, "text": "scans below the threshold are called negative"}]
    return Observation(**{name: value for name, value in fields.items() if value})


def _patient(content: ResultContent) -> dict[str, Any]:
    issuer = content.header("IssuerOfPatientID")
    return {"value": content.header("PatientID") or "unknown", **({"assigner": {"display": issuer}} if issuer else {})}


def _study(content: ResultContent) -> dict[str, str]:
    return {"system": "urn:dicom:uid", "value": f"urn:oid:{content.header('StudyInstanceUID')}"}


def _components(one: FindingResult) -> Iterator[dict[str, Any]]:
    if one.positive is not False:
        for number in one.key_slices:
            yield {"code": {"text": "instance number of a key slice"}, "valueInteger": number}
