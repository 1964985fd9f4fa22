"""Receives series: a Storage SCP with Verification and Storage Commitment.

Success is answered when an object is on the disk and in the queue.  Whoever is not known by AE title and address, or
calls another AE title, is rejected before any of their data is read.
"""

from __future__ import annotations

import logging
import shutil
import socket
import sqlite3
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import importing
from normal_guidance.clinic.node.incoming import Incoming, NotTakenError, Received, read_received
from normal_guidance.clinic.node.partners import Audit, Callers, plain_address
from normal_guidance.clinic.node.series_queue import ABORTED, OPEN, RELEASED, QueuedSeries, SeriesQueue, Stored
from normal_guidance.scans.index.dicom_slices import EXPLICIT, IMPLICIT
from normal_guidance.scans.index.pixels import GDCM, OPENJPEG, PYDICOM

with importing("node", "the node needs pynetdicom"):
    from pynetdicom import AE, evt
    from pynetdicom.association import Association
    from pynetdicom.events import Event
    from pynetdicom.sop_class import StorageCommitmentPushModel, Verification  # type: ignore[attr-defined]
    from pynetdicom.transport import AssociationSocket, RequestHandler, ThreadedAssociationServer

STORAGE = {
    "CT": "1.2.840.10008.5.1.4.1.1.2",
    "Enhanced CT": "1.2.840.10008.5.1.4.1.1.2.1",
    "Legacy Converted Enhanced CT": "1.2.840.10008.5.1.4.1.1.2.2",
    "MR": "1.2.840.10008.5.1.4.1.1.4",
    "Enhanced MR": "1.2.840.10008.5.1.4.1.1.4.1",
    "Legacy Converted Enhanced MR": "1.2.840.10008.5.1.4.1.1.4.4",
    "PET": "1.2.840.10008.5.1.4.1.1.128",
    "Enhanced PET": "1.2.840.10008.5.1.4.1.1.130",
    "Legacy Converted Enhanced PET": "1.2.840.10008.5.1.4.1.1.128.1",
}
"""SOP classes that are stored: images of series that a model may take."""

SYNTAXES = tuple(dict.fromkeys((*PYDICOM, *GDCM, *OPENJPEG)))
"""Transfer syntaxes that our decoders read; of those that a sender offers, its first one among them is taken."""

# Answers to a C-STORE.
SUCCESS, NO_RESOURCES, MISMATCH, NOT_UNDERSTOOD, DUPLICATE = 0x0000, 0xA700, 0xA900, 0xC000, 0x0111
NOT_ALLOWED = 0x0124
FREE_BYTES = 2**30  # with less space on the disk nothing more is taken
MOST_ASSOCIATIONS = 20  # associations at once; further ones are rejected, and told to come back later
MOST_WAITING = 64  # connections that have not yet said who they are; a further one takes the place of the oldest
HELLO_SECONDS = 10.0  # a connection that has not asked for an association after so long is closed

QUIET_SECONDS, MOST_ADDRESSES = 60.0, 1000
"""The log has one line about rejected calls from an address in so many seconds; so many addresses are remembered."""

PDU_BYTES = 2**17  # the size of PDUs that senders are asked for

REJECT_CALLER, REJECT_CALLED, REJECT_BUSY = (0x01, 0x01, 0x03), (0x01, 0x01, 0x07), (0x02, 0x03, 0x02)
"""Answers to a request for an association: result, source, reason."""


class Listening(NamedTuple):
    """Where the node listens, and as whom."""

    aet: str
    address: str
    port: int
    tls: ssl.SSLContext | None = None


Committing = Callable[[Event], tuple[int, Any]]  # answers a request or a report of storage commitment


@dataclass(eq=False)
class Receiver:
    """The server, and what is known of its associations; `touched` receives the key of each series that arrives."""

    listening: Listening
    callers: Callers
    queue: SeriesQueue
    incoming: Incoming
    audit: Audit
    touched: Callable[[str], object]

    def __post_init__(self) -> None:
        self.counts = {"rejected calls": 0, "refused objects": 0}  # since the start
        self._told: dict[str, float] = {}
        self._series: dict[Association, set[str]] = defaultdict(set)
        self._storing = threading.Lock()
        self._server: Any = None
        self._thread: threading.Thread | None = None
        self._contexts: list[Any] = []

    def start(self, report: Committing, commit: Committing) -> int:
        """Listen, and return the port; the two answer reports of, and requests for, storage commitment."""
        # pynetdicom's log repeats what peers send, which may name patients.
        logger = logging.getLogger("pynetdicom")
        logger.setLevel(logging.CRITICAL)
        logger.propagate = False
        entity = AE(self.listening.aet)
        # `_requested` judges both, with the address; pynetdicom would go on if it failed, and then judges by itself.
        entity.require_called_aet = True
        entity.require_calling_aet = sorted({peer.aet for peer in (*self.callers.senders, *self.callers.destinations)})
        # Never reached: `_requested` counts associations, and `_may_connect` those that wait.
        entity.maximum_associations = 2 * (MOST_ASSOCIATIONS + MOST_WAITING)
        entity.maximum_pdu_size = PDU_BYTES
        entity.acse_timeout, entity.dimse_timeout, entity.network_timeout = HELLO_SECONDS, 60, 60
        entity.add_supported_context(Verification)
        for uid in STORAGE.values():
            entity.add_supported_context(uid, list(SYNTAXES))
        plain = [IMPLICIT, EXPLICIT]
        entity.add_supported_context(StorageCommitmentPushModel, plain, scu_role=True, scp_role=True)
        handlers: list[Any] = [
            (evt.EVT_REQUESTED, self._requested),
            (evt.EVT_C_STORE, self._store),
            (evt.EVT_RELEASED, lambda event: self._end(event.assoc, RELEASED)),
            # Every connection ends here; one that was released is known no more.
            (evt.EVT_CONN_CLOSE, lambda event: self._end(event.assoc, ABORTED)),
            (evt.EVT_N_EVENT_REPORT, report),
            (evt.EVT_N_ACTION, commit),
        ]
        _, address, port, tls = self.listening
        try:
            self._server = entity.make_server(
                (address, port),
                evt_handlers=handlers,
                ssl_context=tls,
                server_class=type("Server", (BoundedServer,), {"may_connect": staticmethod(self._may_connect)}),
                request_handler=BoundedHandler,
            )
        except OSError as error:
            raise UserError(
                f"port {port} of {address} cannot be opened ({error.strerror}); choose another --port or --address"
            ) from error
        # pynetdicom would copy all contexts for each connection, before it knows who calls; `_requested` gives them.
        self._contexts, self._server.contexts = self._server.contexts, []
        entity._servers.append(self._server)
        self._thread = threading.Thread(target=self._server.serve_forever, args=(0.1,), name="receiving", daemon=True)
        self._thread.start()
        return int(self._server.server_address[1])

    def stop(self, patience: float) -> None:
        """Take no more associations, give the running ones some seconds, and abort the rest."""
        if self._server is None:
            return
        running = self._server.active_associations
        self._server.shutdown()
        for association in running:
            association.join(patience / max(1, len(running)))
        for association in running:
            if association.is_alive():
                association.abort()
        for association in running:
            association.join(2)

    def _may_connect(self, address: str) -> bool:
        if not self.callers.knows(address):
            self._reject("", address, "address")
            return False
        waiting = [call for call in self._server.active_associations if not call.is_established]
        for oldest in waiting[: max(0, len(waiting) - MOST_WAITING + 1)]:
            reader = oldest.dul.socket
            if reader is not None and reader.socket is not None:
                with suppress(OSError):  # so that whoever says nothing cannot keep others out; its threads end
                    reader.socket.shutdown(socket.SHUT_RDWR)
        return True

    def _reject(self, aet: str, address: str, reason: str) -> None:
        """Count a call that is rejected; the log has at most one line a minute for each address."""
        self.counts["rejected calls"] += 1
        now = time.monotonic()
        if now - self._told.get(address, -QUIET_SECONDS) >= QUIET_SECONDS:
            if len(self._told) >= MOST_ADDRESSES:
                self._told.clear()
            self._told[address] = now
            calls = self.counts["rejected calls"]
            with suppress(OSError):  # a full disk must not let anybody in, nor end the server
                self.audit.write("rejected", peer=aet, address=address, reason=reason, calls=calls)

    def _requested(self, event: Event) -> None:
        """Reject callers that are not known, and those that call somebody else."""
        association = event.assoc
        request: Any = association.requestor.primitive
        aet, address = str(request.calling_ae_title).strip(), address_of(association)
        if not self.callers.may_call(aet, address):
            verdict, why = REJECT_CALLER, "calling AE title or address"
        elif str(request.called_ae_title).strip() != self.listening.aet:
            verdict, why = REJECT_CALLED, "called AE title"
        elif sum(call.is_established for call in self._server.active_associations) >= MOST_ASSOCIATIONS:
            verdict, why = REJECT_BUSY, "too many associations"
        else:
            association.acceptor.supported_contexts = deepcopy(self._contexts)
            association.dul._run_loop_delay = ASSOCIATED_DELAY
            return
        association.acse.send_reject(*verdict)
        association.kill()
        self._reject(aet, address, why)

    def _store(self, event: Event) -> int:
        association = event.assoc
        request: Any = event.request
        peer, address = association.requestor.ae_title.strip(), address_of(association)
        if self.callers.sender(peer, address) is None:
            return NOT_ALLOWED
        try:
            data = event.encoded_dataset(include_meta=False)
            content = event.encoded_dataset()
            received = read_received(content, len(content) - len(data))
        except NotTakenError as error:
            return self._refuse(NOT_UNDERSTOOD, peer, str(error))
        stated = str(request.AffectedSOPInstanceUID), str(request.AffectedSOPClassUID)
        if (received.sop_uid, received.sop_class) != stated:
            return self._refuse(MISMATCH, peer, "the object is not the one that the message names")
        if shutil.disk_usage(self.incoming.path).free < FREE_BYTES:
            return self._refuse(NO_RESOURCES, peer, "the disk is full", received.series)
        try:
            verdict = self.store(received, peer, OPEN)
        except (OSError, sqlite3.Error) as error:
            reason = f"the disk does not take it: {type(error).__name__}"
            return self._refuse(NO_RESOURCES, peer, reason, received.series)
        self._series[association].add(received.series)
        if verdict == "full":
            return self._refuse(NO_RESOURCES, peer, "the queue is full", received.series)
        if verdict == "conflict":
            return self._refuse(DUPLICATE, peer, "an object with the same UID has other content", received.series)
        return SUCCESS

    def store(self, received: Received, peer: str, association: str) -> Stored:
        """Write an object and record it, unless it is known, contradicts a known one, or there is no room."""
        verdict = self.queue.judge(received)
        if verdict == "new":
            with self._storing:  # two senders of the same object must not write it both
                verdict = self.queue.judge(received)
                if verdict == "new":
                    self.incoming.write(received)
                    verdict = self.queue.add(received, peer, association)
        if verdict == "new" or (verdict == "known" and self.queue.set_association([received.series], association)):
            self.touched(received.series)
        return verdict

    def forget(self, series: QueuedSeries) -> None:
        """Delete the files of a finished series, unless a slice has arrived meanwhile."""
        with self._storing:
            if self.queue.purge(series):
                shutil.rmtree(self.incoming.folder(series.key), ignore_errors=True)

    def problems(self) -> list[str]:
        """What keeps it from receiving."""
        ended = self._thread is not None and not self._thread.is_alive()
        full = shutil.disk_usage(self.incoming.path).free < FREE_BYTES
        return ["receiving: the thread has ended"] * ended + ["the disk has less than 1 GB left"] * full

    @property
    def associations(self) -> int:
        """Associations that are open now."""
        return 0 if self._server is None else len(self._server.active_associations)

    def _refuse(self, status: int, peer: str, reason: str, series: str | None = None) -> int:
        self.counts["refused objects"] += 1
        self.audit.write("refused object", peer=peer, series=series, status=f"{status:04X}", reason=reason)
        return status

    def _end(self, association: Association, how: str) -> None:
        keys = self._series.pop(association, set())
        if keys:
            self.queue.set_association(keys, how)
            peer = association.requestor.ae_title.strip()
            self.audit.write("association ended", how=how, peer=peer, series=sorted(keys))


def read_image(file: Path) -> Received:
    """Read a file that came another way than by C-STORE; what is not an image that a model may take is refused."""
    if file.stat().st_size > LARGEST_OBJECT:
        raise NotTakenError("larger than 2 GB")
    received = read_received(file.read_bytes())
    if received.sop_class not in STORAGE.values():
        raise NotTakenError("not an image of CT, MR or PET")
    return received


def address_of(association: Association) -> str:
    """The IP address of whoever called."""
    return plain_address(str(association.requestor.address))


# Bounds that pynetdicom 3.0 lacks: it starts two threads for each connection before it knows who calls, waits for a TLS
# handshake in the only thread that accepts connections, waits without end for the rest of a truncated PDU, and takes
# PDUs of any stated length (up to 4 GB).

HANDSHAKE_SECONDS = 10.0  # a TLS handshake that takes longer is given up
SILENCE_SECONDS = 30.0  # a sender that says nothing within a message for so long has gone
PDU_SECONDS = 120.0  # a PDU, which has at most 4 MB, takes at most so long
LARGEST_PDU = 4 * 2**20  # largest PDU that is read; the node asks for far smaller ones
LARGEST_OBJECT = 2**31  # largest message, pixels included; a longer one ends its association
WAITING_DELAY, ASSOCIATED_DELAY = 0.02, 0.001  # seconds between two looks: 64 silent connections would fill a core
CHUNK = 2**16  # bytes that are read at once


class BoundedServer(ThreadedAssociationServer):
    """A server that judges a connection by its address, before anything is read from it."""

    request_queue_size = 64  # connections that may wait to be accepted
    daemon_threads = True
    may_connect: Callable[[str], bool]  # whether an IP address may connect now

    def get_request(self) -> tuple[socket.socket, tuple[str, int]]:
        """Accept a connection; TLS shakes hands later, in the connection's own thread."""
        assert self.socket is not None
        client, address = self.socket.accept()
        client.settimeout(SILENCE_SECONDS)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        return client, address

    def verify_request(self, request: Any, client_address: Any) -> bool:
        """Whether the connection goes on."""
        return self.may_connect(plain_address(client_address[0]))

    def finish_request(self, request: Any, client_address: Any) -> None:
        """Shake hands, if TLS is asked for, and begin the association."""
        if self.ssl_context is not None:
            request.settimeout(HANDSHAKE_SECONDS)
            try:
                request = self.ssl_context.wrap_socket(request, server_side=True)
            except (OSError, ssl.SSLError):
                self.shutdown_request(request)
                return
            request.settimeout(SILENCE_SECONDS)
        super().finish_request(request, client_address)

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a connection that breaks is a matter of its sender."""

    def service_actions(self) -> None:
        """Collect no garbage: pynetdicom would, every 30 s, and a loaded model has a million objects."""


class BoundedHandler(RequestHandler):
    """Makes associations whose socket has the bounds above, and which are slow until they are accepted."""

    def _create_association(self) -> Association:
        association = super()._create_association()
        reader, message = association.dul.socket, MessageCount()
        assert reader is not None
        setattr(reader, "recv", lambda size: message.read(reader, size))  # noqa: B010  # a method of pynetdicom
        association.bind(evt.EVT_DIMSE_RECV, lambda event: message.begin())
        association.dul._run_loop_delay = WAITING_DELAY
        return association


@dataclass
class MessageCount:
    """Counts the bytes of the message that is being read."""

    bytes: int = 0

    def begin(self) -> None:
        self.bytes = 0

    def read(self, reader: AssociationSocket, size: int) -> bytearray:
        """Read so many bytes; fewer if the connection ends.  An OSError ends the association."""
        self.bytes += size
        if size > LARGEST_PDU or self.bytes > LARGEST_OBJECT:
            raise OSError(f"a PDU of {size} bytes, or a message of {self.bytes}, is too large")
        content, connection, end = bytearray(), reader.socket, time.monotonic() + PDU_SECONDS
        while len(content) < size and connection is not None:
            piece = connection.recv(min(CHUNK, size - len(content)))
            if not piece:
                break
            content += piece
            if time.monotonic() > end:
                raise TimeoutError(f"a PDU of {size} bytes took more than {PDU_SECONDS:g} s")
        return content
