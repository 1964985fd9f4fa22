"""Damage to any bytes, and to NIfTI files, whose headers have their fields at fixed places.

A mutator takes a random generator and the content, and returns other content; the same generator gives the same damage.
"""

from __future__ import annotations

import gzip
import struct
from collections.abc import Callable
from random import Random

Mutator = Callable[[Random, bytes], bytes]

ODD_BYTES = (b"\x00", b"\x01", b"\x7f", b"\x80", b"\xfe", b"\xff", b"\xff\xff", b"\x00\x00\x00\x80", b"\xff" * 4)
"""Numbers that reveal errors by one, of signs and of sizes."""


def flip_bits(random: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 4, 16, 64))):
        if changed:
            changed[_place(random, changed)] ^= 1 << random.randrange(8)
    return bytes(changed)


def overwrite(random: Random, content: bytes) -> bytes:
    changed = bytearray(content)
    for _ in range(random.choice((1, 1, 2, 8))):
        odd = random.choice((*ODD_BYTES, random.randbytes(random.randrange(1, 9))))
        start = _place(random, changed)
        changed[start : start + len(odd)] = odd
    return bytes(changed[: len(content)])


def truncate(random: Random, content: bytes) -> bytes:
    return content[: _place(random, content)]


def insert(random: Random, content: bytes) -> bytes:
    place = _place(random, content)
    return content[:place] + random.choice((random.randbytes(random.randrange(1, 64)), b"\0" * 64)) + content[place:]


def delete(random: Random, content: bytes) -> bytes:
    place = _place(random, content)
    return content[:place] + content[place + random.choice((1, 2, 4, 8, 128)) :]


def repeat(random: Random, content: bytes) -> bytes:
    start, size = _place(random, content), random.choice((2, 8, 32, 256))
    return content[: start + size] + content[start:]


def replace_all(random: Random, content: bytes) -> bytes:
    """Replaces the content."""
    others = (
        b"",
        b"\0" * 256,
        random.randbytes(300),
        b"\0" * 128 + b"DICM",
        b"PK\x03\x04",
        b"<html></html>",
        content * 2,
    )
    return random.choice(others)


BYTES: tuple[Mutator, ...] = (flip_bits, flip_bits, overwrite, overwrite, truncate, insert, delete, repeat, replace_all)


def _place(random: Random, content: bytes | bytearray) -> int:
    """A place anywhere, or near the beginning, where headers are."""
    return random.randrange(max(1, random.choice((len(content), min(len(content), 2048), min(len(content), 400)))))


def mutate(random: Random, content: bytes, mutators: tuple[Mutator, ...]) -> bytes:
    """Applies one or a few mutators after each other."""
    for _ in range(random.choice((1, 1, 1, 2, 3))):
        content = random.choice(mutators)(random, content)
    return content


FIELDS = {
    "sizeof_hdr": (0, "<i", 1),
    "dim": (40, "<h", 8),
    "datatype": (70, "<h", 1),
    "bitpix": (72, "<h", 1),
    "pixdim": (76, "<f", 8),
    "vox_offset": (108, "<f", 1),
    "scl_slope": (112, "<f", 1),
    "scl_inter": (116, "<f", 1),
    "qform_code": (252, "<h", 1),
    "sform_code": (254, "<h", 1),
    "quatern": (256, "<f", 6),
    "srow": (280, "<f", 12),
    "magic": (344, "<i", 1),
    "extension": (348, "<i", 3),
}
"""Fields of NIfTI-1: the place, the type and the number of values."""

ODD_NUMBERS = {
    "<h": (-32768, -1, 0, 1, 2, 3, 4, 5, 7, 8, 16, 64, 128, 256, 512, 768, 1024, 1536, 1792, 2304, 4096, 32767),
    "<i": (-(2**31), -1, 0, 1, 4, 8, 16, 348, 540, 2**31 - 1),
    "<f": (float("nan"), float("inf"), float("-inf"), 0.0, -1.0, 1e-40, 1e-10, 1e10, 3e38, -3e38, 352.0, 1e6, 2.0**31),
    "<q": (-(2**63), -1, 0, 1, 2**15, 2**16, 2**20, 2**24, 2**31, 2**40, 2**62),
}


def change_nifti_field(random: Random, content: bytes) -> bytes:
    start, kind, count = FIELDS[random.choice(tuple(FIELDS))]
    start += random.randrange(count) * struct.calcsize(kind)
    return _put(content, start, kind, random.choice(ODD_NUMBERS[kind]))


def change_nifti_shape(random: Random, content: bytes) -> bytes:
    """Sets all sizes: volumes of many thousand slices, of one row, of billions of voxels."""
    if content[:4] == struct.pack("<i", 540):
        start, kind, sizes = 16, "<q", (1, 1, 1, 32, 2**16, 2**20, 2**24, 2**31, 2**33)
    else:
        start, kind, sizes = 40, "<h", (1, 1, 1, 2, 32, 1024, 32767)
    width = struct.calcsize(kind)
    for number in range(3):
        content = _put(content, start + (number + 1) * width, kind, random.choice(sizes))
    return content


def _put(content: bytes, start: int, kind: str, value: float) -> bytes:
    return content[:start] + struct.pack(kind, value) + content[start + struct.calcsize(kind) :]


NIFTI: tuple[Mutator, ...] = (
    *(change_nifti_field,) * 6,
    change_nifti_shape,
    change_nifti_shape,
    flip_bits,
    truncate,
    insert,
)


def mutate_nifti(random: Random, content: bytes) -> bytes:
    """Damages a volume; a packed one is unpacked and packed again, or damaged as it is."""
    if content[:2] != b"\x1f\x8b":
        return mutate(random, content, NIFTI)
    if random.random() < 0.3:
        return mutate(random, content, BYTES)
    inside = mutate(random, gzip.decompress(content), NIFTI)
    padding = random.choice((0, 0, 0, 2**24))  # zeros take no room, and make sizes that are lies believable
    return gzip.compress(inside + b"\0" * padding, 1, mtime=0)
