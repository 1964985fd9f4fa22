"""DICOM files as raw elements, for headers and pixels.

pydicom finds the elements; their values are parsed here, because real files hold malformed numbers, and because it is
several times faster: one header takes under a millisecond.  Pixels of plain files are found without pydicom.  Any error
inside a file is an `UnreadableError`.
"""

from __future__ import annotations

import io
import math
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.base.system import importing

with importing("dicom", "reading DICOM needs pydicom"):
    from pydicom import Dataset as Dataset  # for the modules that build on this one
    from pydicom import dcmread
    from pydicom.dataelem import DataElement, RawDataElement
    from pydicom.tag import BaseTag
    from pydicom.uid import UID
    from pydicom.valuerep import EXPLICIT_VR_LENGTH_16 as _KINDS_16
    from pydicom.valuerep import EXPLICIT_VR_LENGTH_32 as _KINDS_32

IMPLICIT, EXPLICIT, BIG_ENDIAN = "1.2.840.10008.1.2", "1.2.840.10008.1.2.1", "1.2.840.10008.1.2.2"
DEFLATED = "1.2.840.10008.1.2.1.99"
NATIVE = (IMPLICIT, EXPLICIT, BIG_ENDIAN, DEFLATED)  # transfer syntaxes without compressed pixels

PIXELS = 0x7FE00010  # tag of the pixels

INFLATED_BYTES = 2**29  # largest size of an inflated file, about a thousand slices

INFLATED_FREE, INFLATED_RATIO = 2**24, 20
"""Size that any deflated file may inflate to, and most bytes for a stored one beyond it: slices reach 2 to 10."""

TEXT_BYTES = 1024  # longest value that is read as text or numbers; longer ones are damaged

_FIRST_GROUPS = (b"\x02\x00", b"\x08\x00")
"""Possible beginnings of a file without the DICOM prefix: group 0002 or 0008, little endian."""

_SHORT, _LONG = (frozenset(kind.value.encode() for kind in kinds) for kinds in (_KINDS_16, _KINDS_32))
"""Kinds of values whose length has two bytes, and four."""

_HEAD, _LENGTH, _SYNTAX = struct.Struct("<HH2sH"), struct.Struct("<L"), 0x00020010


class Elements(NamedTuple):
    """Some elements of a file."""

    dataset: Dataset
    syntax: str  # transfer syntax UID
    left: int  # bytes from the place where reading stopped to the end of the file; negative if the file ends too early


@contextmanager
def refusing(file: str = "") -> Iterator[None]:
    """Turns any exception of a parser or decoder into an UnreadableError that names the file, and hides warnings."""
    prefix = f"{file}: " if file else ""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pydicom warns of each odd value; important ones are checked here
            yield
    except UserError:
        raise
    except UnreadableError as error:
        raise UnreadableError(error.kind, prefix + error.detail) from error
    except Exception as error:  # decoders raise any exception, also RecursionError and MemoryError
        raise UnreadableError("unreadable", f"{prefix}{type(error).__name__}: {error}") from error


def read_elements(content: bytes | Path, tags: Iterable[int], *, pixels: bool = False) -> Elements:
    """The raw elements with these tags, without pixels unless `pixels` is set; call it within `refusing`."""
    if pixels:
        content = content.read_bytes() if isinstance(content, Path) else content
        plain = _read_plain(content, frozenset(tags))
        if plain is not None:
            return plain
    with content.open("rb") if isinstance(content, Path) else io.BytesIO(content) as file:
        head = file.read(2048)
        if not head:
            raise UnreadableError("unreadable", "the file is empty")
        if head[128:132] != b"DICM" and head[:2] not in _FIRST_GROUPS:
            raise UnreadableError("no_image", "not a DICOM file")
        size = file.seek(0, os.SEEK_END)
        deflated = DEFLATED.encode() in head
        source = file
        if deflated:
            source = _inflated(file)
            size = source.seek(0, os.SEEK_END)
        source.seek(0)
        dataset = dcmread(source, stop_before_pixels=not pixels, force=True, specific_tags=list(tags))
        left = size - source.tell()
    return Elements(dataset, DEFLATED if deflated else _syntax(dataset), left)


def _read_plain(content: bytes, tags: frozenset[int]) -> Elements | None:
    """The elements of a plain file; None for any other, and for a damaged one, which pydicom reads."""
    # Plain: explicit little endian, tags ascend, uncompressed pixels end it.  Several times as fast as `dcmread`.
    if content[128:132] != b"DICM":
        return None
    elements: dict[BaseTag, DataElement | RawDataElement] = {}
    offset, before, syntax = 132, 0, b""
    try:
        while before != PIXELS:
            group, element, kind, length = _HEAD.unpack_from(content, offset)
            tag, offset = group << 16 | element, offset + 8
            if kind in _LONG:
                (length,) = _LENGTH.unpack_from(content, offset)
                offset += 4
            elif kind not in _SHORT:
                return None
            end = offset + length  # beyond the file if the length is not stated
            if tag <= before or end > len(content) or (tag in tags and kind == b"SQ"):
                return None
            if tag in tags:
                value: Any = memoryview(content)[offset:end] if tag == PIXELS else content[offset:end]
                elements[BaseTag(tag)] = RawDataElement(BaseTag(tag), kind.decode(), length, value, offset, False, True)
            elif tag == _SYNTAX:
                syntax = content[offset:end]
            before, offset = tag, end
    except struct.error:  # the file ends before its pixels
        return None
    if offset != len(content) or syntax.rstrip(b" \0") != EXPLICIT.encode():
        return None
    return Elements(Dataset(elements), EXPLICIT, 0)


def _inflated(file: io.BufferedIOBase) -> io.BytesIO:
    """Turns a deflated file into an explicit little endian one; pydicom would inflate without limit."""
    file.seek(0)
    content = file.read()
    if content[132:140] != b"\x02\x00\x00\x00UL\x04\x00":
        raise UnreadableError("unreadable", "deflated, but (0002,0000) FileMetaInformationGroupLength is missing")
    end = 144 + int.from_bytes(content[140:144], "little")
    inflater = zlib.decompressobj(-zlib.MAX_WBITS)
    most = min(INFLATED_BYTES, max(INFLATED_FREE, INFLATED_RATIO * len(content)))
    dataset = inflater.decompress(content[end:], most)
    if inflater.unconsumed_tail:
        raise UnreadableError("unreadable", f"inflates to more than {most:,} bytes, the most for {len(content):,}")
    if not inflater.eof:
        raise UnreadableError("unreadable", "the deflated data set ends too early")
    deflated, explicit = DEFLATED.encode(), EXPLICIT.encode().ljust(len(DEFLATED), b"\0")
    return io.BytesIO(content[:end].replace(deflated, explicit) + dataset)


def _syntax(dataset: Any) -> str:
    """The transfer syntax of (0002,0010); where it is missing, the one that pydicom detected."""
    stated = dataset.file_meta.get("TransferSyntaxUID")
    if stated:
        return str(stated)
    implicit, little_endian = dataset.original_encoding
    return IMPLICIT if implicit else EXPLICIT if little_endian else BIG_ENDIAN


class Raw(NamedTuple):
    """The raw value of an element."""

    value: bytes | memoryview  # pixels may be a view of the file's content
    length: int  # the length that the file states
    little_endian: bool


def raw(dataset: Dataset, tag: int) -> Raw | None:
    """The raw element; None where it is missing, empty or a sequence."""
    element = dataset.get_item(tag) if tag in dataset else None
    if not isinstance(element, RawDataElement) or not element.value:
        return None
    return Raw(element.value, element.length, element.is_little_endian)


def text(dataset: Dataset, tag: int) -> str:
    """A value as text without padding; '' where it is missing."""
    element = raw(dataset, tag)
    if element is None:
        return ""
    value = bytes(element.value[:TEXT_BYTES])
    if value.isascii():
        return value.decode("ascii").strip(" \0")
    try:
        return str(dataset[tag].value).strip(" \0")[:TEXT_BYTES]  # decodes by SpecificCharacterSet
    except Exception:
        return value.decode("latin-1").strip(" \0")


def numbers(dataset: Dataset, tag: int, count: int) -> tuple[float, ...] | None:
    """The values of decimal strings; None unless there are `count` values and all are finite."""
    words = text(dataset, tag).split("\\")
    try:
        values = tuple(float(word) for word in words)
    except ValueError:
        return None
    return values if len(values) == count and all(map(math.isfinite, values)) else None


def number(dataset: Dataset, tag: int) -> float | None:
    """The value of one decimal string."""
    values = numbers(dataset, tag, 1)
    return values[0] if values else None


def integer(dataset: Dataset, tag: int) -> int | None:
    """The value of one integer string; '3.0' counts as 3."""
    value = number(dataset, tag)
    return int(value) if value is not None and value == int(value) else None


def unsigned(dataset: Dataset, tag: int) -> int | None:
    """The value of one unsigned short (US), for instance Rows."""
    element = raw(dataset, tag)
    if element is None or len(element.value) < 2:
        return None
    return int.from_bytes(element.value[:2], "little" if element.little_endian else "big")


def sequence(dataset: Dataset, tag: int) -> list[Dataset]:
    """The items of a sequence; empty where it is missing."""
    if tag not in dataset:
        return []
    items = dataset[tag].value
    return list(items) if items and dataset[tag].VR == "SQ" else []


def first_item(groups: Iterable[Dataset], tag: int) -> Dataset | None:
    """The first item of a functional group's sequence, in the first group that has one."""
    return next((items[0] for group in groups if (items := sequence(group, tag))), None)


def frame_count(dataset: Dataset) -> int:
    """NumberOfFrames; 0, which some writers use for a single image, and malformed values count as one frame."""
    return max(1, integer(dataset, 0x00280008) or 1)


def uid_name(uid: str) -> str:
    """The name of a UID; the UID itself where pydicom does not know it."""
    return UID(uid).name
