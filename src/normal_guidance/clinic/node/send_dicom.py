"""Archives that take results by C-STORE or DICOMweb; storage commitment, asked of archives and answered to senders.

A client asks by N-ACTION whether objects are stored for good (DICOM part 4, annex J); the answer is an N-EVENT-REPORT,
in the same association or in a new one that the server opens.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from pydicom import Dataset, dcmread
from pydicom.uid import UID, ExplicitVRLittleEndian, ImplicitVRLittleEndian
from pynetdicom import AE, evt
from pynetdicom.association import Association
from pynetdicom.events import Event
from pynetdicom.pdu_primitives import SCP_SCU_RoleSelectionNegotiation
from pynetdicom.presentation import build_context

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.node.destination import Accepted, Destination, Identity, NotSentError, SentSeries
from normal_guidance.clinic.node.partners import Audit, Callers, Peer
from normal_guidance.clinic.node.receiver import address_of
from normal_guidance.clinic.node.series_queue import SeriesQueue
from normal_guidance.clinic.predict.dicomweb import DicomWeb

COMMITMENT, INSTANCE = "1.2.840.10008.1.20.1", "1.2.840.10008.1.20.1.1"  # SOP class and its only instance
ALL_STORED, SOME_MISSING = 1, 2  # kinds of a report
NOT_HERE = 0x0112  # reason for a missing object: no such object instance
RETRIES = (1.0, 10.0, 60.0, 600.0)  # seconds before each further attempt at a report in a new association
MOST_OBJECTS = 100_000  # objects in one request
PLAIN: list[str | UID] = [ExplicitVRLittleEndian, ImplicitVRLittleEndian]
CONNECT_SECONDS, ANSWER_SECONDS = 10, 60

REPORT_SECONDS = 1.0  # an association that asked for commitment stays open for so long: some archives report at once
WARNINGS = (0xB000, 0xB006, 0xB007)  # answers to a C-STORE that mean: stored, with a change or a doubt


def associate(identity: Identity, peer: Peer, contexts: Sequence[Any], **options: Any) -> Association:
    """Ask a partner for an association, which may not be established."""
    entity = AE(identity.aet)
    entity.connection_timeout = CONNECT_SECONDS
    entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = ANSWER_SECONDS
    tls = None if identity.tls is None else (identity.tls, peer.host)
    return entity.associate(peer.host, peer.port or 0, list(contexts), ae_title=peer.aet, tls_args=tls, **options)


def request_dataset(transaction: str, objects: Sequence[tuple[str, str]]) -> Dataset:
    """Make the content of a request: a UID of its own, and SOP class and instance of each object."""
    dataset = Dataset()
    dataset.TransactionUID = transaction
    dataset.ReferencedSOPSequence = [_reference(*instance) for instance in objects]
    return dataset


def _reference(sop_class: str, sop_uid: str, reason: int | None = None) -> Dataset:
    item = Dataset()
    item.ReferencedSOPClassUID, item.ReferencedSOPInstanceUID = sop_class, sop_uid
    if reason is not None:
        item.FailureReason = reason
    return item


class Reports:
    """Receives reports on what this node has sent."""

    def __init__(self, queue: SeriesQueue, audit: Audit) -> None:
        self.queue, self.audit = queue, audit
        self.awaited: WeakValueDictionary[str, threading.Event] = WeakValueDictionary()  # by transaction

    def receive(self, event: Event) -> tuple[int, None]:
        """Record a report; one that nobody asked for changes nothing."""
        try:
            dataset = event.event_information
            transaction = str(dataset.TransactionUID)
            missing = [str(item.ReferencedSOPInstanceUID) for item in dataset.get("FailedSOPSequence") or []]
        except Exception:  # decoding foreign bytes
            return 0x0110, None
        known = self.queue.confirm(transaction, missing)
        if known is not None:
            self.audit.write("commitment", series=known.series, destination=known.destination, missing=len(missing))
        if came := self.awaited.get(transaction):
            came.set()
        return 0x0000, None


@dataclass
class Committer:
    """Answers senders: what is on this disk and in the queue is safe until its series is finished."""

    identity: Identity
    callers: Callers
    queue: SeriesQueue
    audit: Audit
    ended: threading.Event

    def receive(self, event: Event) -> tuple[int, None]:
        """Take a request, and report in a thread of its own."""
        sender = self.callers.sender(event.assoc.requestor.ae_title.strip(), address_of(event.assoc))
        if sender is None:
            return 0x0124, None
        try:
            dataset = event.action_information
            transaction = str(dataset.TransactionUID)
            items = dataset.ReferencedSOPSequence
            objects = [(str(item.ReferencedSOPClassUID), str(item.ReferencedSOPInstanceUID)) for item in items]
        except Exception:  # decoding foreign bytes
            return 0x0115, None
        if event.action_type != 1 or len(objects) > MOST_OBJECTS:
            return 0x0123 if event.action_type != 1 else 0x0213, None
        kind, report = self.judge(transaction, objects)
        self.audit.write("commitment asked", peer=sender.aet, objects=len(objects), all_stored=kind == ALL_STORED)
        threading.Thread(target=self._report, args=(event.assoc, sender, kind, report), daemon=True).start()
        return 0x0000, None

    def judge(self, transaction: str, objects: Sequence[tuple[str, str]]) -> tuple[int, Dataset]:
        """Make a report: which objects are stored, and which are not."""
        held = {instance for instance in objects if self.queue.holds(*instance)}
        stored = [_reference(*instance) for instance in objects if instance in held]
        missing = [_reference(*instance, reason=NOT_HERE) for instance in objects if instance not in held]
        report = Dataset()
        report.TransactionUID = transaction
        if stored:
            report.ReferencedSOPSequence = stored
        if missing:
            report.FailedSOPSequence = missing
        return SOME_MISSING if missing else ALL_STORED, report

    def _report(self, association: Association, sender: Peer, kind: int, report: Dataset) -> None:
        """Report in the same association if it is still open, else in a new one to the sender's port."""
        time.sleep(0.05)  # the answer to the request goes first
        if _sent(association, kind, report):
            return
        for seconds in () if sender.port is None else (0.0, *RETRIES):
            if self.ended.wait(seconds) or self._report_anew(sender, kind, report):
                return
        reason = "--from names no port to report to" if sender.port is None else "the sender cannot be reached"
        self.audit.write("commitment report lost", peer=sender.aet, reason=reason)

    def _report_anew(self, sender: Peer, kind: int, report: Dataset) -> bool:
        role = SCP_SCU_RoleSelectionNegotiation()
        role.sop_class_uid, role.scu_role, role.scp_role = COMMITMENT, False, True
        association = associate(self.identity, sender, [build_context(COMMITMENT, PLAIN)], ext_neg=[role])
        done = _sent(association, kind, report)
        if association.is_established:
            association.release()
        return done


def _sent(association: Association, kind: int, report: Dataset) -> bool:
    """Send a report; whether it was taken."""
    if not association.is_established:
        return False
    try:
        answer, _ = association.send_n_event_report(report, kind, COMMITMENT, INSTANCE)
    except (ValueError, RuntimeError, AttributeError):
        return False
    return answer.get("Status") == 0x0000


@dataclass(frozen=True)
class DicomDestination(Destination):
    """A DICOM archive."""

    address: Peer
    identity: Identity

    def send(self, files: Sequence[Path], series: SentSeries, accepted: Accepted) -> None:
        """Store each file."""
        datasets = {file: dcmread(file) for file in files}
        classes = sorted({str(dataset.SOPClassUID) for dataset in datasets.values()})
        with self._associated([build_context(uid, PLAIN) for uid in classes]) as association:
            for file, dataset in datasets.items():
                try:
                    status = association.send_c_store(dataset).get("Status")
                except (ValueError, RuntimeError) as error:
                    kind = dataset.SOPClassUID.name
                    raise NotSentError(f"{self.address} does not take {kind}, or has ended the association") from error
                if status is None:
                    raise NotSentError(f"{self.address} did not answer")
                if status != 0x0000 and status not in WARNINGS:
                    raise NotSentError(f"{self.address} refused {file.name} with status {status:04X}")
                accepted(file)

    def ask_commitment(self, files: Sequence[Path], transaction: str, reports: Reports) -> None:
        """Ask whether the archive has stored files for good; `reports` receives the answer, now or later."""
        objects = []
        for file in files:
            meta = dcmread(file, specific_tags=[0x00080016, 0x00080018], stop_before_pixels=True)
            objects.append((str(meta.SOPClassUID), str(meta.SOPInstanceUID)))
        dataset = request_dataset(transaction, objects)
        handlers = [(evt.EVT_N_EVENT_REPORT, reports.receive)]
        with self._associated([build_context(COMMITMENT, PLAIN)], handlers) as association:
            came = reports.awaited[transaction] = threading.Event()
            try:
                answer, _ = association.send_n_action(dataset, 1, COMMITMENT, INSTANCE)
            except (ValueError, RuntimeError) as error:
                raise NotSentError(f"{self.address} has no storage commitment; leave out --commit") from error
            status = answer.get("Status")
            if status != 0x0000:
                code = "no answer" if status is None else f"status {status:04X}"
                raise NotSentError(f"{self.address} did not take the request for storage commitment ({code})")
            came.wait(REPORT_SECONDS)  # later ones are recorded, too

    @contextmanager
    def _associated(self, contexts: Sequence[Any], handlers: Sequence[Any] = ()) -> Iterator[Association]:
        """An association that is released at the end, and aborted after an error."""
        association = associate(self.identity, self.address, contexts, evt_handlers=list(handlers))
        if not association.is_established:
            what = "rejected the association" if association.is_rejected else "cannot be reached"
            raise NotSentError(f"{self.address} {what}")
        try:
            yield association
        except BaseException:
            association.abort()
            raise
        if association.is_established:
            association.release()


@dataclass(frozen=True)
class WebDestination(Destination):
    """A DICOMweb server that takes results by STOW-RS, by the address of its root, as https://pacs/dicom-web."""

    address: str

    def send(self, files: Sequence[Path], series: SentSeries, accepted: Accepted) -> None:
        """Store all files together."""
        try:
            DicomWeb(self.address).store(files)
        except UserError as error:
            raise NotSentError(str(error)) from error
        for file in files:
            accepted(file)
