"""A FHIR server that takes each finding as an Observation (R4B), created once however often it is sent."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

from normal_guidance import __version__
from normal_guidance.clinical.dicomweb import refuse_open_token
from normal_guidance.errors import UserError, shorten
from normal_guidance.extras import install_command
from normal_guidance.node.destinations import About, Accepted, NotSentError
from normal_guidance.node.result_content import FindingResult, ResultContent, prediction_files, read_content

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
