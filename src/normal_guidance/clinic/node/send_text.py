"""Reading lists that take results: HL7 v2 messages (ORU^R01 2.5.1 over MLLP), and FHIR Observations (R4B).

Each finding is a group of observations, or an Observation: the probability, with the threshold as its reference range
and a flag, the call, and the key slices.  Results are preliminary: a radiologist decides.
"""

from __future__ import annotations

import os
import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from pydicom import Dataset, dcmread

from normal_guidance import __version__
from normal_guidance.base.errors import UserError, shorten
from normal_guidance.base.files import read_json
from normal_guidance.base.system import importing
from normal_guidance.clinic.dicom.objects import NOTICE
from normal_guidance.clinic.node.destination import Accepted, Destination, Identity, NotSentError, SentSeries
from normal_guidance.clinic.node.incoming import hash_of
from normal_guidance.clinic.node.partners import Peer
from normal_guidance.clinic.predict.dicomweb import refuse_open_token
from normal_guidance.clinic.predict.job import PREDICTION
from normal_guidance.scans.index.manifest import slice_name

with importing("node", "HL7 and FHIR need hl7apy, requests and fhir.resources"):
    import requests
    from fhir.resources.R4B.observation import Observation
    from hl7apy.core import Message, Segment
    from hl7apy.exceptions import HL7apyException
    from hl7apy.parser import parse_message

REPORT = "structured_report.dcm"
CONNECT_SECONDS, ANSWER_SECONDS = 10.0, 60.0
VERSION = "2.5.1"
START, END = b"\x0b", b"\x1c\r"  # the frame of a message in MLLP
LARGEST_ANSWER = 65_536  # bytes of an acknowledgement; a longer one is refused
ACCEPTED, PRELIMINARY = ("AA", "CA"), "P"
SCHEME = "99NGUIDE"  # our own codes in HL7
TOKEN = "NGUIDE_FHIR_TOKEN"  # environment variable of the bearer token
SNOMED, UCUM = "http://snomed.info/sct", "http://unitsofmeasure.org"
OURS = "urn:normal-guidance"  # our own identifiers in FHIR
CATEGORY = "http://terminology.hl7.org/CodeSystem/observation-category"
INTERPRETATION = "http://terminology.hl7.org/CodeSystem/v3-ObservationInterpretation"


@dataclass(frozen=True)
class FindingResult:
    """What a model says of one finding; key slices count from 1, with DICOM's InstanceNumber where there is one."""

    name: str  # empty where the model does not name it
    code: str | None  # its SNOMED CT identifier
    meaning: str | None  # what SNOMED CT calls it
    sought: str  # what was looked for, in words
    probability: float
    threshold: float | None
    positive: bool | None  # None without a threshold
    key_slices: tuple[tuple[int, int | None], ...]
    model: str  # fingerprint of the model

    @property
    def title(self) -> str:
        """What SNOMED CT calls the finding, or else its name."""
        return self.meaning or self.name.replace("_", " ") or "finding without a name"


@dataclass(frozen=True)
class ResultContent:
    """The result of one scan: patient and study from its DICOM report, numbers from prediction.json."""

    identity: str  # a hash of the series and its slices: the same result has the same, however often it is sent
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


def read_content(file: Path, series: SentSeries) -> ResultContent:
    """The content of a scan's prediction.json and of the report beside it."""
    about = read_json(file, "predict again")
    report = _report_of(file)
    patient = dcmread(report, stop_before_pixels=True) if report is not None else Dataset()
    patient.pop("ContentSequence", None)
    findings = tuple(
        FindingResult(
            **{name: finding[name] for name in ("name", "sought", "probability", "threshold", "positive")},
            code=finding.get("code"),
            meaning=finding.get("meaning"),
            key_slices=tuple((key["slice"], key["instance_number"]) for key in finding["key_slices"]),
            model=finding["model"]["identity"]["fingerprint"],
        )
        for finding in about.get("findings") or [{**about, "name": ""}]
    )
    identity = hash_of(series.key, str(series.round), file.parent.name)
    return ResultContent(identity, patient, findings, tuple(about["cautions"]))


def _report_of(prediction: Path) -> Path | None:
    return next(iter(sorted(prediction.parent.glob(f"dicom/**/{REPORT}"))), None)


class TextDestination(Destination):
    """Takes the predictions of scans that have DICOM results, in a fixed order."""

    def files(self, folder: Path) -> list[Path]:
        return [file for file in sorted(folder.glob(f"*/{PREDICTION}")) if _report_of(file) is not None]


@dataclass(frozen=True)
class Hl7Destination(TextDestination):
    """A receiver of HL7 messages: its application (MSH-5), host and port."""

    address: Peer
    kind = "hl7:"
    identity: Identity

    def send(self, files: Sequence[Path], series: SentSeries, accepted: Accepted) -> None:
        """Send a message for each scan, and wait for its acknowledgement."""
        with self._connected() as connection:
            for file in files:
                content = read_content(file, series)
                message = make_message(content, self.identity.aet, self.address.aet)
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
            with socket.create_connection((self.address.host, self.address.port or 0), CONNECT_SECONDS) as plain:
                plain.settimeout(ANSWER_SECONDS)
                if self.identity.tls is None:
                    yield plain
                else:
                    with self.identity.tls.wrap_socket(plain, server_hostname=self.address.host) as secure:
                        yield secure
        except OSError as error:
            raise NotSentError(f"{self.name} cannot be reached, or does not answer") from error


def _answer(connection: socket.socket) -> str:
    """The next message, without its frame."""
    content = b""
    while not content.endswith(END):
        more = connection.recv(4096)
        if not more or len(content) > LARGEST_ANSWER:
            raise OSError("no whole message")
        content += more
    return content.removesuffix(END).lstrip(START).decode("utf-8", "replace")


def control_id(identity: str) -> str:
    """MSH-10, which has at most 20 letters: the same result has the same, so that a receiver knows it again."""
    return identity[:20]


def make_message(content: ResultContent, sender: str, receiver: str) -> str:
    """Make the message about a scan."""
    moment = f"{datetime.now(UTC):%Y%m%d%H%M%S+0000}"
    message = Message("ORU_R01", version=VERSION)
    message.msh.msh_3, message.msh.msh_5 = plain(sender), plain(receiver)
    message.msh.msh_7, message.msh.msh_9 = moment, "ORU^R01^ORU_R01"
    message.msh.msh_10, message.msh.msh_11, message.msh.msh_18 = control_id(content.identity), "P", "UNICODE UTF-8"
    result = message.add_group("ORU_R01_PATIENT_RESULT")
    patient = Segment("PID", version=VERSION)
    issuer = plain(content.header("IssuerOfPatientID"))
    patient.pid_1 = "1"
    patient.pid_3 = plain(content.header("PatientID")) + (f"^^^{issuer}" if issuer else "")
    patient.pid_5 = "^".join(plain(part) for part in content.header("PatientName").partition("=")[0].split("^")[:5])
    patient.pid_7, patient.pid_8 = plain(content.header("PatientBirthDate")), plain(content.header("PatientSex"))
    result.add_group("ORU_R01_PATIENT").add(patient)
    order = result.add_group("ORU_R01_ORDER_OBSERVATION")
    request = Segment("OBR", version=VERSION)
    request.obr_1, request.obr_3 = "1", plain(content.header("AccessionNumber"))
    request.obr_4 = f"AI^Slices that matter, AI, research only^{SCHEME}"
    request.obr_7 = plain(content.header("StudyDate") + content.header("StudyTime").partition(".")[0])
    request.obr_22, request.obr_25 = moment, PRELIMINARY
    order.add(request)
    for number, (kind, code, group, value, *more) in enumerate(observations(content), start=1):
        segment = Segment("OBX", version=VERSION)
        segment.obx_1, segment.obx_2, segment.obx_3 = str(number), kind, code
        segment.obx_4, segment.obx_5, segment.obx_11 = group, value, PRELIMINARY
        segment.obx_7, segment.obx_8 = more or ("", "")
        order.add_group("ORU_R01_OBSERVATION").add(segment)
    return str(message.to_er7())


def observations(content: ResultContent) -> Iterator[tuple[str, ...]]:
    """What OBX segments say of study and findings: type, code, group and value; some with a range and a flag."""
    yield "ST", "110180^Study Instance UID^DCM", "", plain(content.header("StudyInstanceUID"))
    for number, finding in enumerate(content.findings, start=1):
        yield from _of_finding(finding, str(number))
    for note in content.notes:
        yield "TX", f"note^Note^{SCHEME}", "", plain(note)
    yield "ST", f"software^Software^{SCHEME}", "", f"normal-guidance {__version__}"


def _of_finding(finding: FindingResult, group: str) -> Iterator[tuple[str, ...]]:
    code = f"{plain(finding.name) or 'finding'}^{plain(finding.title)}^{SCHEME}"
    if finding.code:
        code = f"{finding.code}^{plain(finding.title)}^SCT"
    flag = {None: "", True: "A", False: "N"}[finding.positive]
    below = "" if finding.threshold is None else f"<{finding.threshold:.4g}"
    yield "NM", "111047^Probability^DCM", group, f"{finding.probability:.4f}", below, flag
    yield "CE", f"sought^What was looked for^{SCHEME}", group, code
    if finding.positive is not None:
        call = "10828004^Positive^SCT" if finding.positive else "260385009^Negative^SCT"
        yield "CE", f"call^Scan by the threshold^{SCHEME}", group, call
    if finding.positive is not False:
        slices = ", ".join(slice_name(*numbers) for numbers in finding.key_slices)
        yield "ST", f"key_slices^Key slices from 1 and image numbers^{SCHEME}", group, slices
    yield "ST", f"model^Fingerprint of the model^{SCHEME}", group, finding.model


def plain(text: str) -> str:
    """Text without the signs that separate parts of a message, and on one line."""
    return " ".join(re.sub(r"[|^&~\\\x00-\x1f\x7f]", " ", text).split())


@dataclass(frozen=True)
class FhirDestination(TextDestination):
    """A FHIR server, by the address of its root, as https://server/fhir."""

    address: str
    kind = "fhir:"

    def send(self, files: Sequence[Path], series: SentSeries, accepted: Accepted) -> None:
        """Create an Observation for each finding, unless the server has it."""
        for file in files:
            content = read_content(file, series)
            for finding in content.findings:
                self._create(make_observation(content, finding), identifier(content, finding))
            accepted(file)

    def _create(self, observation: Observation, value: str) -> None:
        token = os.environ.get(TOKEN, "")
        headers = {
            "Content-Type": "application/fhir+json",
            "If-None-Exist": f"identifier={quote(f'{OURS}|{value}', safe='')}",
            **({"Authorization": f"Bearer {token}"} if token else {}),
        }
        try:
            answer = requests.post(
                f"{self.address}/Observation",
                observation.model_dump_json(exclude_none=True).encode(),
                headers=headers,
                timeout=(CONNECT_SECONDS, ANSWER_SECONDS),
                allow_redirects=False,
            )
        except requests.RequestException as error:
            raise NotSentError(f"{self.name} cannot be reached, or does not answer") from error
        if answer.status_code not in (200, 201):
            raise NotSentError(f"{self.name} answered with HTTP status {answer.status_code}")


def parse_fhir(text: str) -> FhirDestination:
    """Make a destination from fhir:URL; a token is not sent in the clear."""
    url = text.removeprefix(FhirDestination.kind).rstrip("/")
    parts = urlsplit(url)
    if parts.scheme not in ("http", "https") or not parts.hostname or parts.username or parts.query:
        raise UserError(f"{shorten(text)!r} is not fhir:URL; write for example fhir:https://server/fhir")
    refuse_open_token(url, os.environ.get(TOKEN, ""))
    return FhirDestination(url)


def identifier(content: ResultContent, finding: FindingResult) -> str:
    """What the same result always has: a server creates no second Observation with it."""
    return f"{content.identity}-{finding.name or 'finding'}"


def make_observation(content: ResultContent, finding: FindingResult) -> Observation:
    """Make the Observation of a finding: the probability, the call, and key slices as components."""
    coding = [{"system": SNOMED, "code": finding.code, "display": finding.title}] if finding.code else []
    patient: dict[str, Any] = {"value": content.header("PatientID") or "unknown"}
    if issuer := content.header("IssuerOfPatientID"):
        patient["assigner"] = {"display": issuer}
    study = {"system": "urn:dicom:uid", "value": f"urn:oid:{content.header('StudyInstanceUID')}"}
    key_slices = finding.key_slices if finding.positive is not False else ()
    fields: dict[str, Any] = {
        "identifier": [{"system": OURS, "value": identifier(content, finding)}],
        "status": "preliminary",
        "category": [{"coding": [{"system": CATEGORY, "code": "imaging"}]}],
        "code": {"coding": coding, "text": f"Probability of: {finding.sought}"},
        "subject": {"identifier": patient},
        "derivedFrom": [{"identifier": study, "type": "ImagingStudy"}],
        "valueQuantity": {"value": round(finding.probability, 4), "system": UCUM, "code": "1"},
        "device": {"display": f"normal-guidance {__version__}, model {finding.model}"},
        "note": [{"text": note} for note in content.notes],
        "component": [
            {"code": {"text": text}, "valueInteger": number}
            for key, image in key_slices
            for text, number in (("key slice", key), ("instance number of the key slice", image))
            if number is not None
        ],
    }
    if finding.positive is not None:
        call = ("POS", "Positive") if finding.positive else ("NEG", "Negative")
        fields["interpretation"] = [{"coding": [{"system": INTERPRETATION, "code": call[0], "display": call[1]}]}]
    if finding.threshold is not None:
        limit = {"value": round(finding.threshold, 4), "system": UCUM, "code": "1"}
        fields["referenceRange"] = [{"high": limit, "text": "scans below the threshold are called negative"}]
    return Observation(**{name: value for name, value in fields.items() if value})
