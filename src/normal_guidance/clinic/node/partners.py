"""DICOM partners as a user writes them: AET@HOST:PORT, and who may call this node from which address."""

from __future__ import annotations

import ipaddress
import json
import os
import re
import socket
import threading
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import cached_property
from itertools import pairwise
from pathlib import Path
from typing import Any

from normal_guidance.base.errors import UserError, shorten

_PEER = re.compile(r"(?P<aet>[^@]+)@(?P<host>\[[0-9a-fA-F:]+\]|[^:@\s]+)(:(?P<port>\d{1,5}))?")
TITLE = re.compile(r"[ !-\[\]-~]{1,16}")  # an AE title: 1 to 16 printable ASCII characters, without a backslash


def check_title(title: str) -> str:
    """Return an AE title without blanks around it; anything else is refused."""
    if not title.strip() or not TITLE.fullmatch(title.strip()):
        raise UserError(
            f"{shorten(title)!r} is not an AE title; give 1 to 16 letters, digits, blanks or signs of ASCII, without a "
            "backslash"
        )
    return title.strip()


@dataclass(frozen=True)
class Peer:
    """A partner: its AE title, host and port; without a port it only calls."""

    aet: str
    host: str
    port: int | None = None

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.aet}@{host}" + ("" if self.port is None else f":{self.port}")

    @cached_property
    def addresses(self) -> frozenset[str]:
        """The IP addresses of its host, looked up once."""
        try:
            records = socket.getaddrinfo(self.host, None, type=socket.SOCK_STREAM)
        except OSError as error:
            raise UserError(f"the host of {self} is unknown ({error.strerror}); give its IP address") from error
        return frozenset(plain_address(str(record[4][0])) for record in records)


def parse_peer(text: str, *, needs_port: bool = False) -> Peer:
    """Read AET@HOST or AET@HOST:PORT."""
    form = "AET@HOST:PORT" if needs_port else "AET@HOST"
    parts = _PEER.fullmatch(text.strip())
    if parts is None or (needs_port and parts["port"] is None):
        raise UserError(f"{shorten(text)!r} is not {form}; write for example PACS@10.1.2.3:104")
    port = None if parts["port"] is None else check_port(int(parts["port"]), text)
    return Peer(check_title(parts["aet"]), parts["host"].strip("[]"), port)


def parse_place(text: str) -> tuple[str, int]:
    """Read HOST:PORT."""
    host, _, port = text.strip().rpartition(":")
    if not host or not port.isdigit():
        raise UserError(f"{shorten(text)!r} is not HOST:PORT; write for example 127.0.0.1:8112")
    return host.strip("[]"), check_port(int(port), text)


def check_port(port: int, text: str) -> int:
    """Return a port; one that does not exist is refused, and `text` is what the user wrote."""
    if port > 65535:
        raise UserError(f"{shorten(text)!r}: there is no port {port}; give 0 to 65535")
    return port


def plain_address(address: str) -> str:
    """Return an IP address in one form: IPv4 that comes over an IPv6 socket becomes IPv4, and zones are dropped."""
    plain = ipaddress.ip_address(address.partition("%")[0])
    if isinstance(plain, ipaddress.IPv6Address) and plain.ipv4_mapped is not None:
        plain = plain.ipv4_mapped
    return str(plain)


def is_loopback(host: str) -> bool:
    """Whether a host is this machine, seen by itself only."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


@dataclass(frozen=True)
class Callers:
    """Who may call: senders may store, destinations may only report on storage commitment."""

    senders: tuple[Peer, ...]
    destinations: tuple[Peer, ...] = ()

    def knows(self, address: str) -> bool:
        """Whether anybody may call from an IP address."""
        return any(_lives_at(peer, address) for peer in (*self.senders, *self.destinations))

    def sender(self, aet: str, address: str) -> Peer | None:
        """The sender that calls, who may store; None if it is not one."""
        return next((peer for peer in self.senders if peer.aet == aet and _lives_at(peer, address)), None)

    def may_call(self, aet: str, address: str) -> bool:
        """Whether a caller may open an association."""
        return any(peer.aet == aet and _lives_at(peer, address) for peer in (*self.senders, *self.destinations))


def _lives_at(peer: Peer, address: str) -> bool:
    """Whether a partner has an address; one whose host is not known now has none."""
    try:
        return address in peer.addresses
    except UserError:
        return False


LARGEST_BYTES = 10 * 2**20  # size from which on a new file is begun
KEPT = 10  # older files that are kept: audit.jsonl.1 is the newest of them


class Audit:
    """Appends events, without patients' data, to a file: a JSON object a line, by one write, whole after a kill."""

    def __init__(self, path: Path, largest: int = LARGEST_BYTES, kept: int = KEPT) -> None:
        self.path, self.largest, self.kept = path, largest, kept
        self._lock = threading.Lock()

    def write(self, event: str, **about: Any) -> None:
        """Append an event; members that are None are left out."""
        known = {name: value for name, value in about.items() if value is not None}
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": event, **known}) + "\n"
        with self._lock:
            self._rotate()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)

    def _rotate(self) -> None:
        if not self.path.exists() or self.path.stat().st_size < self.largest:
            return
        files = [self.path, *(Path(f"{self.path}.{number}") for number in range(1, self.kept + 1))]
        for older, newer in pairwise(reversed(files)):
            if newer.exists():
                newer.replace(older)
