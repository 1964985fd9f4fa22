"""Scores reach a reading list by HL7 v2 over MLLP and by FHIR, once, whatever the patient is called."""

import json
import threading
from collections import defaultdict
from contextlib import contextmanager
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from socketserver import BaseRequestHandler, TCPServer
from typing import Any

import pytest
from fhir.resources.R4B.observation import Observation
from hl7apy.parser import parse_message
from pydicom import Dataset

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.node.destination import Identity, NotSentError, SentSeries
from normal_guidance.clinic.node.send_text import (
    END,
    NOTICE,
    START,
    TOKEN,
    FindingResult,
    ResultContent,
    control_id,
    make_message,
    make_observation,
)
from normal_guidance.clinic.node.sending import parse_destination

US = Identity("NGUIDE")
NOTES = (NOTICE, "Forced: it has 2 slices.")


def content(**changes) -> ResultContent:
    patient = Dataset()
    patient.PatientID, patient.PatientName, patient.PatientBirthDate = "P-17", "Doe^Jane^^Dr", "19700101"
    patient.PatientSex, patient.AccessionNumber, patient.StudyInstanceUID = "F", "A-99", "1.2.3"
    patient.StudyDate, patient.StudyTime, patient.IssuerOfPatientID = "20261118", "101500.25", "HOSPITAL"
    for name, value in changes.items():
        setattr(patient, name, value)
    named = ("any", "1386000", "Intracranial hemorrhage", "any (Intracranial hemorrhage)")
    finding = FindingResult(*named, 0.8125, 0.5, True, ((3, 12), (8, None)), "ab" * 32)
    return ResultContent("0123456789abcdef0123456789abcdef", patient, (finding,), NOTES[1:])


NEGATIVE = replace(content(), findings=(replace(content().findings[0], probability=0.1, positive=False),))


def segments(message: ResultContent | str) -> dict[str, list[list[str]]]:
    text = message if isinstance(message, str) else make_message(message, "NGUIDE", "RIS")
    parts = defaultdict(list)
    for line in filter(None, text.split("\r")):
        fields = line.split("|")
        parts[fields[0]].append(fields)
    return parts


def test_a_message_names_patient_order_and_score_and_no_slice_of_a_negative_scan():
    message = make_message(content(), "NGUIDE", "RIS")
    assert parse_message(message).validate()
    parts = segments(message)
    (msh,), (pid,), (obr,) = parts["MSH"], parts["PID"], parts["OBR"]
    assert (msh[2], msh[4], msh[8], msh[11]) == ("NGUIDE", "RIS", "ORU^R01^ORU_R01", "2.5.1")
    assert msh[9] == control_id(content().identity)
    assert (pid[3], pid[5], pid[7], pid[8]) == ("P-17^^^HOSPITAL", "Doe^Jane^^Dr", "19700101", "F")
    assert (obr[3], obr[7], obr[25]) == ("A-99", "20261118101500", "P")
    value_of = {fields[3].split("^")[0]: fields for fields in parts["OBX"]}
    score = value_of["111047"]
    assert (score[2], score[5], score[7], score[8], score[11]) == ("NM", "0.8125", "<0.5", "A", "P")
    assert value_of["sought"][5] == "1386000^Intracranial hemorrhage^SCT"
    assert value_of["key_slices"][5] == "3 (image 12), 8"
    assert [fields[5] for fields in parts["OBX"] if fields[3].startswith("note")] == list(NOTES)
    values = segments(NEGATIVE)["OBX"]
    assert not any("key_slices" in fields[3] for fields in values)
    assert any(fields[5] == "260385009^Negative^SCT" for fields in values)


@pytest.mark.parametrize("name", ["Doe|A^Jane\rOBX|1|NM|x||9", "Müller^Jörg", "山田^太郎=x", "&^~^\\F\\", ""])
def test_names_cannot_change_the_message(name):
    parts = segments(content(PatientName=name, PatientID=name))
    assert set(parts) == {"MSH", "PID", "OBR", "OBX"}
    assert len(parts["PID"]) == 1
    assert len(parts["OBX"]) == len(segments(content())["OBX"])
    assert len(parts["PID"][0]) <= 9


@contextmanager
def serving(server: TCPServer):
    with server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


@contextmanager
def mllp(*codes: str | bytes):
    """A reading list that answers each message with the next code, or bytes; without one it closes the connection."""
    got, answers = [], list(codes)

    class Handler(BaseRequestHandler):
        def handle(self) -> None:
            data = b""
            while answers and (more := self.request.recv(65536)):
                data += more
                if data.endswith(END):
                    got.append(data.removeprefix(START).removesuffix(END).decode())
                    data, code = b"", answers.pop(0)
                    reply = f"MSH|^~\\&|RIS||NGUIDE||20261118||ACK|1|P|2.5.1\rMSA|{code}|{got[-1].split('|')[9]}\r"
                    self.request.sendall(code if isinstance(code, bytes) else START + reply.encode() + END)

    with serving(TCPServer(("127.0.0.1", 0), Handler)) as port:
        yield port, got


def test_a_node_tells_a_reading_list_until_it_accepts(node, series):
    with mllp("AE", "AR", "AA") as (port, got), node(to=[f"hl7:RIS@127.0.0.1:{port}"]) as run:
        assert run.take(series(AccessionNumber="A-99")) == {"done": 1}
    assert len(got) == 3
    assert len({message.split("|")[9] for message in got}) == 1  # the same control id, so that it is known again
    parts = segments(got[-1])
    assert parts["OBR"][0][3] == "A-99"
    assert parts["PID"][0][3].startswith("PHANTOM-")


@pytest.mark.parametrize("answer", ["", "hello", "MSH|^~\\&|||||||ACK|1|P|2.5.1\rMSA|AA|other\r"])
def test_what_is_not_an_acknowledgement_is_not_accepted(tmp_path, monkeypatch, answer):
    answers = [START + answer.encode() + END] if answer else []
    monkeypatch.setattr("normal_guidance.clinic.node.send_text.read_content", lambda *_: content())
    with mllp(*answers) as (port, _), pytest.raises(NotSentError):
        parse_destination(f"hl7:RIS@127.0.0.1:{port}", US).send(
            [tmp_path / "prediction.json"], SentSeries("s", tmp_path), lambda file: pytest.fail("accepted")
        )


def observe(result: ResultContent) -> dict[str, Any]:
    return json.loads(make_observation(result, result.findings[0]).model_dump_json(exclude_none=True))


def test_an_observation_names_patient_study_and_score():
    observation = observe(content())
    assert (observation["resourceType"], observation["status"]) == ("Observation", "preliminary")
    assert observation["subject"]["identifier"]["value"] == "P-17"
    assert observation["derivedFrom"][0]["identifier"]["value"] == "urn:oid:1.2.3"
    assert observation["code"]["coding"][0]["code"] == "1386000"
    assert observation["valueQuantity"]["value"] == pytest.approx(0.8125)
    assert observation["interpretation"][0]["coding"][0]["code"] == "POS"
    assert [part["valueInteger"] for part in observation["component"]] == [3, 12, 8]
    assert [note["text"] for note in observation["note"]] == list(NOTES)
    observation = observe(NEGATIVE)
    assert observation["interpretation"][0]["coding"][0]["code"] == "NEG"
    assert "component" not in observation


@contextmanager
def fhir_server(*statuses: int):
    """A server that answers each request with the next status."""
    answers, requests = list(statuses), []

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            requests.append((self.path, self.headers, Observation.model_validate_json(body)))
            self.send_response(answers.pop(0))
            self.send_header("Content-Length", "0")
            self.end_headers()

        def log_message(self, *_) -> None:
            pass

    with serving(ThreadingHTTPServer(("127.0.0.1", 0), Handler)) as port:
        yield f"http://127.0.0.1:{port}/fhir", requests


def test_a_node_creates_one_observation_however_often_it_must_try(node, series, state, monkeypatch):
    monkeypatch.setenv(TOKEN, "secret")
    with fhir_server(503, 401, 201) as (url, requests), node(to=[f"fhir:{url}"]) as run:
        assert run.take(series()) == {"done": 1}
        assert "secret" not in (state / "audit.jsonl").read_text()
    assert [path for path, _, _ in requests] == ["/fhir/Observation"] * 3
    (condition,) = {headers["If-None-Exist"] for _, headers, _ in requests}  # so that the server creates no second one
    assert condition.startswith("identifier=urn%3Anormal-guidance%7C")
    _, headers, observation = requests[-1]
    assert headers["Authorization"] == "Bearer secret"
    assert condition.endswith(observation.identifier[0].value)
    assert observation.subject.identifier.value.startswith("PHANTOM-")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("fhir:pacs", "is not fhir:URL"),
        ("fhir:http://far/fhir", "is not https"),
        ("hl7:RIS", "is not AET@HOST:PORT"),
        ("https://pacs/dicom-web/studies/1.2", "names a study"),
        ("http://", "is not the address"),
    ],
)
def test_wrong_destinations_are_refused(text, words, monkeypatch):
    monkeypatch.setenv(TOKEN, "secret")
    with pytest.raises(UserError, match=words):
        parse_destination(text, US)
