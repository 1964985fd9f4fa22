"""A PACS that takes results by C-STORE, and confirms them by storage commitment if asked to."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydicom import dcmread
from pydicom.uid import ExplicitVRLittleEndian, ImplicitVRLittleEndian
from pynetdicom import AE
from pynetdicom.association import Association
from pynetdicom.presentation import build_context

from normal_guidance.clinical.result_folder import dicom_results
from normal_guidance.node.addresses import Peer
from normal_guidance.node.commitment import COMMITMENT, INSTANCE, Reports, request_dataset
from normal_guidance.node.destinations import About, Accepted, Identity, NotSentError

CONNECT_SECONDS, ANSWER_SECONDS = 10, 60

REPORT_SECONDS = 1.0
"""An association in which storage commitment was asked for stays open for so long: some archives report at once."""

WARNINGS = (0xB000, 0xB006, 0xB007)
"""Answers to a C-STORE that mean: stored, with a change or a doubt."""


@dataclass(frozen=True)
class DicomDestination:
    """A DICOM archive.

    Args:
        peer: its AE title, host and port.
        identity: who we are.
    """

    peer: Peer
    identity: Identity

    @property
    def name(self) -> str:
        return str(self.peer)

    @property
    def commits(self) -> bool:
        return self.identity.commit

    def files(self, folder: Path) -> list[Path]:
        """The DICOM results."""
        return dicom_results(folder)

    def send(self, files: Sequence[Path], about: About, accepted: Accepted) -> None:
        """Store each file."""
        datasets = {file: dcmread(file) for file in files}
        classes = sorted({str(one.SOPClassUID) for one in datasets.values()})
        contexts = [build_context(uid, [ExplicitVRLittleEndian, ImplicitVRLittleEndian]) for uid in classes]
        with self._associated(contexts) as association:
            for file, dataset in datasets.items():
                try:
                    status = association.send_c_store(dataset).get("Status")
                except (ValueError, RuntimeError) as error:
                    kind = dataset.SOPClassUID.name
                    raise NotSentError(f"{self.peer} does not take {kind}, or has ended the association") from error
                if status is None:
                    raise NotSentError(f"{self.peer} did not answer")
                if status != 0x0000 and status not in WARNINGS:
                    raise NotSentError(f"{self.peer} refused {file.name} with status {status:04X}")
                accepted(file)

    def ask_commitment(self, files: Sequence[Path], transaction: str, reports: Reports) -> None:
        """Ask whether the archive has stored files for good; `reports` receives the answer, now or later."""
        context = build_context(COMMITMENT, [ExplicitVRLittleEndian, ImplicitVRLittleEndian])
        dataset = request_dataset(transaction, [_identity(file) for file in files])
        with self._associated([context], handlers=reports.handlers()) as association:
            reports.expect(transaction)
            try:
                answer, _ = association.send_n_action(dataset, 1, COMMITMENT, INSTANCE)
            except (ValueError, RuntimeError) as error:
                raise NotSentError(f"{self.peer} has no storage commitment; leave out --commit") from error
            status = answer.get("Status")
            if status != 0x0000:
                code = "no answer" if status is None else f"status {status:04X}"
                raise NotSentError(f"{self.peer} did not take the request for storage commitment ({code})")
            reports.wait(transaction, REPORT_SECONDS)

    @contextmanager
    def _associated(self, contexts: list[Any], handlers: Sequence[Any] = ()) -> Iterator[Association]:
        """An association that is released at the end, and aborted after an error."""
        entity = AE(self.identity.aet)
        entity.connection_timeout = CONNECT_SECONDS
        entity.acse_timeout = entity.dimse_timeout = entity.network_timeout = ANSWER_SECONDS
        tls = None if self.identity.tls is None else (self.identity.tls, self.peer.host)
        association = entity.associate(
            self.peer.host,
            self.peer.port or 0,
            contexts,
            ae_title=self.peer.aet,
            tls_args=tls,
            evt_handlers=list(handlers),
        )
        if not association.is_established:
            what = "rejected the association" if association.is_rejected else "cannot be reached"
            raise NotSentError(f"{self.peer} {what}")
        try:
            yield association
        except BaseException:
            association.abort()
            raise
        if association.is_established:
            association.release()


def _identity(file: Path) -> tuple[str, str]:
    """SOP class and instance of a file."""
    meta = dcmread(file, specific_tags=[0x00080016, 0x00080018], stop_before_pixels=True)
    return str(meta.SOPClassUID), str(meta.SOPInstanceUID)
