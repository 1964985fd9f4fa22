"""pynetdicom's server with bounds: who may connect, how many at once, how large and how slow a message may be.

Bounds that pynetdicom 3.0 lacks: it starts two threads for each connection before it knows who calls, waits for a TLS
handshake in the only thread that accepts connections, waits without end for the rest of a truncated PDU, and takes PDUs
of any stated length (up to 4 GB).
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Callable
from contextlib import suppress
from typing import Any

from pynetdicom import evt
from pynetdicom.association import Association
from pynetdicom.transport import AssociationServer, AssociationSocket, RequestHandler, ThreadedAssociationServer

from normal_guidance.node.addresses import plain_address

HANDSHAKE_SECONDS = 10.0
"""A TLS handshake that takes longer is given up."""

SILENCE_SECONDS = 30.0
"""A sender that says nothing within a message for so long has gone."""

PDU_SECONDS = 120.0
"""A PDU, which has at most 4 MB, takes at most so long."""

LARGEST_PDU = 4 * 2**20
"""Largest PDU that is read; the node asks for far smaller ones."""

LARGEST_OBJECT = 2**31
"""Largest message, pixels included; a longer one ends its association."""

WAITING_DELAY, ASSOCIATED_DELAY = 0.02, 0.001
"""Seconds between two looks at a connection: each is a thread that polls, and 64 silent ones would fill a core."""

CHUNK = 2**16
"""Bytes that are read at once."""


class BoundedServer(ThreadedAssociationServer):
    """A server that judges a connection by its address, before anything is read from it."""

    request_queue_size = 64  # connections that may wait to be accepted
    daemon_threads = True
    may_connect: Callable[[str], bool]
    """Whether an IP address may connect now."""

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
    """Makes associations whose socket has the bounds above, and which are slow until `hurry` is called."""

    def _create_association(self) -> Association:
        association = super()._create_association()
        bound(association)
        association.dul._run_loop_delay = WAITING_DELAY
        return association


def hurry(association: Association) -> None:
    """Let an association that is accepted look for messages as often as pynetdicom does."""
    association.dul._run_loop_delay = ASSOCIATED_DELAY


def close_connection(association: Association) -> None:
    """Close the connection of an association; its threads notice and end."""
    reader = association.dul.socket
    if reader is not None and reader.socket is not None:
        with suppress(OSError):
            reader.socket.shutdown(socket.SHUT_RDWR)


def bound(association: Association) -> None:
    """Bound the size and the time of what an association reads."""
    reader = association.dul.socket
    assert reader is not None
    message = Message()
    setattr(reader, "recv", lambda size: message.read(reader, size))  # noqa: B010  # a method of pynetdicom
    association.bind(evt.EVT_DIMSE_RECV, lambda event: message.begin())


class Message:
    """Counts the bytes of the message that is being read."""

    def __init__(self) -> None:
        self.bytes = 0

    def begin(self) -> None:
        """Begin a new message."""
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


def make_bounded_server(may_connect: Callable[[str], bool]) -> type[AssociationServer]:
    """Make the class of a server that asks `may_connect`."""
    return type("Server", (BoundedServer,), {"may_connect": staticmethod(may_connect)})
