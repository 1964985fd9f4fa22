"""The sending threads, one for each destination: results go out in order, and again until they are accepted."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pydicom.uid import generate_uid

from normal_guidance.base.errors import UserError, shorten
from normal_guidance.clinic.node.destination import Destination, FolderDestination, Identity, NotSentError, SentSeries
from normal_guidance.clinic.node.partners import Audit, parse_peer
from normal_guidance.clinic.node.send_dicom import DicomDestination, Reports, WebDestination
from normal_guidance.clinic.node.series_queue import Dispatch, QueuedSeries, SeriesQueue
from normal_guidance.clinic.node.serving import NodeResults
from normal_guidance.clinic.predict.dicomweb import parse_server

FIRST_PAUSE, LONGEST_PAUSE = 2.0, 600.0  # seconds before the second attempt, doubled each time, and at most
REPORT_PATIENCE = 600.0  # seconds after which storage commitment is asked for again


@dataclass
class Sending:
    """Sends results to one destination."""

    destination: Destination
    queue: SeriesQueue
    results: NodeResults
    audit: Audit
    reports: Reports

    def step(self) -> bool:
        """Send one result that is due, and ask for commitment that is due; whether there was a result."""
        dispatch = self.queue.next_dispatch(self.destination.name, time.time())
        if dispatch is not None:
            self._send(dispatch)
        if archive := self._archive:
            for sent in self.queue.unconfirmed(archive.name, time.time()):
                self._ask_commitment(archive, sent)
        return dispatch is not None

    @property
    def _archive(self) -> DicomDestination | None:
        """The destination, if it is to be asked for storage commitment."""
        archive = self.destination
        return archive if isinstance(archive, DicomDestination) and archive.identity.commit else None

    def _send(self, dispatch: Dispatch) -> None:
        series = self.queue.series(dispatch.series)
        if series is None:
            return
        try:
            count = self._send_files(dispatch, series)
        except (NotSentError, OSError) as error:
            self._postpone(dispatch, error)
            return
        self.queue.sent(dispatch, commit=self._archive is not None)
        seconds = round(time.time() - series.arrived, 1)
        about = {"series": dispatch.series, "destination": dispatch.destination, "files": count}
        self.audit.write("sent", **about, seconds_after_last_slice=seconds)

    def _send_files(self, dispatch: Dispatch, series: QueuedSeries) -> int:
        """Send the files that the destination has not yet accepted, and return their number."""
        folder = self.results.folder(series.key, series.digest)
        if not self.results.is_complete(folder):  # new slices have removed them, or a person
            raise NotSentError("its results are gone")
        known = self.queue.accepted(dispatch)
        names = {file: file.relative_to(self.results.path).as_posix() for file in self.destination.files(folder)}
        files = [file for file, name in names.items() if name not in known]
        sent = SentSeries(series.key, folder, series.round)
        if files:
            self.destination.send(files, sent, lambda file: self.queue.accept(dispatch, names[file]))
        return len(files)

    def _ask_commitment(self, archive: DicomDestination, dispatch: Dispatch) -> None:
        series = self.queue.series(dispatch.series)
        if series is None:
            return
        transaction = str(generate_uid())
        self.queue.asked(dispatch, transaction, time.time() + REPORT_PATIENCE)
        try:
            files = archive.files(self.results.folder(series.key, series.digest))
            archive.ask_commitment(files, transaction, self.reports)
        except (NotSentError, OSError) as error:
            self._postpone(dispatch, error)

    def _postpone(self, dispatch: Dispatch, error: NotSentError | OSError) -> None:
        """Try again later; an OSError means that new slices have removed the results."""
        reason = str(error) if isinstance(error, NotSentError) else type(error).__name__
        attempts = dispatch.attempts + 1
        pause = min(LONGEST_PAUSE, FIRST_PAUSE * 2.0 ** min(attempts - 1, 16))
        self.queue.postpone(dispatch, time.time() + pause, reason)
        about = {"series": dispatch.series, "destination": dispatch.destination}
        self.audit.write("not sent", **about, attempts=attempts, reason=reason)


def _to_folder(text: str, identity: Identity) -> Destination:
    path = text.removeprefix(FolderDestination.kind)
    if not path:
        raise UserError("--to folder: names no folder; write for example folder:/data/results")
    return FolderDestination(Path(path))


def _to_reading_list(text: str, identity: Identity) -> Destination:
    from normal_guidance.clinic.node.send_text import FhirDestination, Hl7Destination, parse_fhir

    if text.startswith(FhirDestination.kind):
        return parse_fhir(text)
    return Hl7Destination(parse_peer(text.removeprefix(Hl7Destination.kind), needs_port=True), identity)


KINDS: dict[str, Callable[[str, Identity], Destination]] = {
    FolderDestination.kind: _to_folder,
    "hl7:": _to_reading_list,
    "fhir:": _to_reading_list,
    "https://": lambda text, identity: WebDestination(parse_server(text).url),
    "http://": lambda text, identity: WebDestination(parse_server(text).url),
    "": lambda text, identity: DicomDestination(parse_peer(text, needs_port=True), identity),
}
"""How each kind is made, by how its text begins; the first that fits is taken."""


def parse_destination(text: str, identity: Identity) -> Destination:
    """Make a destination from what the user wrote: AET@HOST:PORT, https://SERVER, hl7:, fhir: or folder:."""
    make = next(make for prefix, make in KINDS.items() if text.startswith(prefix))
    try:
        return make(text, identity)
    except UserError as error:
        raise UserError(f"--to {error}" if not str(error).startswith("--to") else shorten(str(error), 500)) from error
