"""The sending threads, one for each destination: results go out in order, and again until they are accepted."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from pathlib import Path

from pydicom.uid import generate_uid

from normal_guidance.base.errors import UserError, shorten
from normal_guidance.clinic.node.destination import About, Destination, FolderDestination, Identity, NotSentError
from normal_guidance.clinic.node.partners import Audit, parse_peer
from normal_guidance.clinic.node.send_dicom import DicomDestination, Reports
from normal_guidance.clinic.node.series_queue import Dispatch, Series, SeriesQueue
from normal_guidance.clinic.node.serving import Results

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 600.0
"""Seconds before the second attempt, and the longest pause; each pause is twice as long as the one before."""

REPORT_PATIENCE = 600.0
"""Seconds after which storage commitment is asked for again."""


def pause(attempts: int) -> float:
    """Seconds to wait after so many attempts that failed."""
    return min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempts - 1, 16))


class Sending:
    """Sends results to one destination."""

    def __init__(
        self, destination: Destination, queue: SeriesQueue, results: Results, audit: Audit, reports: Reports
    ) -> None:
        self.destination, self.queue, self.results = destination, queue, results
        self.audit, self.reports = audit, reports

    def step(self) -> bool:
        """Send one result that is due, and ask for commitment that is due; whether there was a result."""
        one = self.queue.next_dispatch(self.destination.name, time.time())
        if one is not None:
            self._send(one)
        if self.destination.commits:
            for sent in self.queue.unconfirmed(self.destination.name, time.time()):
                self._ask(sent)
        return one is not None

    def _send(self, one: Dispatch) -> None:
        series = self.queue.series(one.series)
        if series is None:
            return
        folder = self.results.folder(series.key, series.digest)
        if not self.results.is_complete(folder):  # new slices have removed them, or a person
            self._postpone(one, "its results are gone")
            return
        known = self.queue.accepted(one)
        files = [file for file in self.destination.files(folder) if self._name(file) not in known]
        about = About(series.key, series.study_uid, series.series_uid, folder, series.round)
        try:
            if files:
                self.destination.send(files, about, lambda file: self.queue.accept(one, self._name(file)))
        except (NotSentError, OSError) as error:  # OSError: new slices have removed the results
            self._postpone(one, str(error) if isinstance(error, NotSentError) else type(error).__name__)
            return
        self.queue.sent(one, self.destination.commits)
        seconds = round(time.time() - series.arrived, 1)
        self.audit.write(
            "sent", series=one.series, destination=one.destination, files=len(files), seconds_after_last_slice=seconds
        )

    def _ask(self, one: Dispatch) -> None:
        """Ask for storage commitment."""
        series = self.queue.series(one.series)
        if series is None or not isinstance(self.destination, DicomDestination):
            return
        transaction = str(generate_uid())
        self.queue.asked(one, transaction, time.time() + REPORT_PATIENCE)
        try:
            self.destination.ask_commitment(self._files(series), transaction, self.reports)
        except (NotSentError, OSError) as error:
            self._postpone(one, str(error) if isinstance(error, NotSentError) else type(error).__name__)

    def _files(self, series: Series) -> Sequence[Path]:
        return self.destination.files(self.results.folder(series.key, series.digest))

    def _postpone(self, one: Dispatch, reason: str) -> None:
        self.queue.postpone(one, time.time() + pause(one.attempts + 1), reason)
        self.audit.write(
            "not sent", series=one.series, destination=one.destination, attempts=one.attempts + 1, reason=reason
        )

    def _name(self, file: Path) -> str:
        return file.relative_to(self.results.path).as_posix()


def _to_folder(text: str, identity: Identity) -> Destination:
    place = text.removeprefix("folder:")
    if not place:
        raise UserError("--to folder: names no folder; write for example folder:/data/results")
    return FolderDestination(Path(place))


def _to_dicom(text: str, identity: Identity) -> Destination:
    from normal_guidance.clinic.node.send_dicom import DicomDestination

    return DicomDestination(parse_peer(text, needs_port=True), identity)


def _to_hl7(text: str, identity: Identity) -> Destination:
    from normal_guidance.clinic.node.send_text import Hl7Destination

    return Hl7Destination(parse_peer(text.removeprefix("hl7:"), needs_port=True), identity)


def _to_fhir(text: str, identity: Identity) -> Destination:
    from normal_guidance.clinic.node.send_text import parse_fhir

    return parse_fhir(text)


def _to_web(text: str, identity: Identity) -> Destination:
    from normal_guidance.clinic.node.send_dicom import parse_web

    return parse_web(text)


KINDS: dict[str, Callable[[str, Identity], Destination]] = {
    "folder:": _to_folder,
    "hl7:": _to_hl7,
    "fhir:": _to_fhir,
    "https://": _to_web,
    "http://": _to_web,
    "": _to_dicom,
}
"""How each kind is made, by how its text begins; the first that fits is taken."""


def parse_destination(text: str, identity: Identity) -> Destination:
    """Make a destination from what the user wrote: AET@HOST:PORT, https://SERVER, hl7:, fhir: or folder:."""
    make = next(make for prefix, make in KINDS.items() if text.startswith(prefix))
    try:
        return make(text, identity)
    except UserError as error:
        raise UserError(f"--to {error}" if not str(error).startswith("--to") else shorten(str(error), 500)) from error
