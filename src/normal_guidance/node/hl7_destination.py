"""A reading list that takes results as HL7 v2 messages: ORU^R01 of version 2.5.1 over MLLP, acknowledged one by one.

Each finding is a group of observations: the probability, with the threshold as its reference range and a flag, the
call, and the key slices.  Results are preliminary: a radiologist decides.
"""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

from normal_guidance import __version__
from normal_guidance.errors import UserError
from normal_guidance.extras import install_command
from normal_guidance.node.addresses import Peer
from normal_guidance.node.destinations import About, Accepted, Identity, NotSentError
from normal_guidance.node.result_content import FindingResult, ResultContent, prediction_files, read_content

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


class Observation(NamedTuple):
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
    result.add_group("ORU_R01_PATIENT").add(_patient(content))
    order = result.add_group("ORU_R01_ORDER_OBSERVATION")
    order.add(_order(content, now))
    for number, one in enumerate(observations(content), start=1):
        order.add_group("ORU_R01_OBSERVATION").add(_observation(number, one))
    return str(message.to_er7())


def _patient(content: ResultContent) -> Any:
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


def observations(content: ResultContent) -> Iterator[Observation]:
    """What is said of the study, and of each finding."""
    yield Observation("ST", STUDY_UID, "", plain(content.header("StudyInstanceUID")))
    for number, one in enumerate(content.findings, start=1):
        yield from _of_finding(one, str(number))
    for note in content.notes:
        yield Observation("TX", f"note^Note^{SCHEME}", "", plain(note))
    yield Observation("ST", f"software^Software^{SCHEME}", "", f"normal-guidance {__version__}")


def _of_finding(one: FindingResult, group: str) -> Iterator[Observation]:
    code = (
        f"{one.code}^{plain(one.title)}^SCT"
        if one.code
        else f"{plain(one.name) or 'finding'}^{plain(one.title)}^{SCHEME}"
    )
    flag = {None: "", True: "A", False: "N"}[one.positive]
    below = "" if one.threshold is None else f"<{one.threshold:.4g}"
    yield Observation("NM", "111047^Probability^DCM", group, f"{one.probability:.4f}", below, flag)
    yield Observation("CE", f"sought^What was looked for^{SCHEME}", group, code)
    if one.positive is not None:
        call = "10828004^Positive^SCT" if one.positive else "260385009^Negative^SCT"
        yield Observation("CE", f"call^Scan by the threshold^{SCHEME}", group, call)
    if one.positive is not False:
        slices = ", ".join(map(str, one.key_slices))
        yield Observation("ST", f"key_slices^Instance numbers of the key slices^{SCHEME}", group, slices)
    yield Observation("ST", f"model^Fingerprint of the model^{SCHEME}", group, one.model)


def _observation(number: int, one: Observation) -> Any:
    segment = Segment("OBX", version=VERSION)
    segment.obx_1, segment.obx_2, segment.obx_3, segment.obx_4 = str(number), one.kind, one.code, one.group
    segment.obx_5, segment.obx_7, segment.obx_8, segment.obx_11 = one.value, one.reference, one.flag, PRELIMINARY
    return segment


def plain(text: str) -> str:
    """Text without the signs that separate parts of a message, and on one line."""
    return " ".join(re.sub(r"[|^&~\\\x00-\x1f\x7f]", " ", text).split())
