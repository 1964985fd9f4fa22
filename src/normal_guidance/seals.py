"""Seals: a checksum inside a file that we write, so that damage is seen when the file is read back.

A sealed file holds the text `nguide-seal:` and 64 hexadecimal digits once: the SHA-256 of the file with zeros in their
place.  JSON has it as the last member, parquet and safetensors in their metadata, so every program still reads them.
No flipped bit goes unseen: in the text before the digits it unseals the file and leaves its content as it was, anywhere
else the digits no longer fit.  A file without a seal was written by an earlier version, or edited by hand.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from pathlib import Path

from normal_guidance.errors import UserError

MARK = "nguide-seal:"
DIGITS = 64
OPEN = MARK + "0" * DIGITS
"""What a writer puts into a file, and `seal` fills in."""


def seal(head: bytes, rest: Iterable[bytes | memoryview] = ()) -> bytes:
    """The first bytes of a file with its seal; `rest` are those after them."""
    before, found, after = head.partition(OPEN.encode())
    if not found or MARK.encode() in before or MARK.encode() in after:
        raise UserError(f"the text {MARK!r} is kept for checksums; use another in names and notes")
    return before + MARK.encode() + _digest(head, rest).encode() + after


def is_sealed(head: bytes, path: Path, rest: Iterable[bytes | memoryview] = (), again: str = "copy it again") -> bool:
    """Whether a file has a seal; a wrong one is an error, and `again` says what to do."""
    before, found, after = head.partition(MARK.encode())
    if not found:
        return False
    opened = before + OPEN.encode() + after[DIGITS:]
    if len(after) < DIGITS or _digest(opened, rest).encode() != after[:DIGITS]:
        raise UserError(f"{path} is damaged: its content does not fit its checksum; {again}")
    return True


def _digest(head: bytes, rest: Iterable[bytes | memoryview]) -> str:
    digest = hashlib.sha256(head)
    for part in rest:
        digest.update(part)
    return digest.hexdigest()
