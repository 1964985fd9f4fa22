"""Damage to DICOM files that knows their elements: values, types, lengths, the pixels and their compressed fragments.

A scanner of a few lines finds the elements of explicit little endian files, which the samples are; other content
is damaged byte by byte.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Callable, Iterator
from random import Random
from typing import NamedTuple

from mutations import BYTES, Mutator, flip_bits, mutate
from pydicom.datadict import tag_for_keyword

LONG = (b"OB", b"OD", b"OF", b"OL", b"OV", b"OW", b"SQ", b"SV", b"UC", b"UN", b"UR", b"UT", b"UV")
"""Types whose length has four bytes."""

PIXELS, ITEM, END_OF_ITEMS = b"\xe0\x7f\x10\x00", b"\xfe\xff\x00\xe0", b"\xfe\xff\xdd\xe0"
UNDEFINED = 0xFFFFFFFF

SYNTAXES = tuple(f"1.2.840.10008.1.2{end}" for end in ("", ".1", ".2", ".5", ".1.99")) + tuple(
    f"1.2.840.10008.1.2.4.{number}" for number in (50, 51, 57, 70, 80, 81, 90, 91, 100, 201, 202, 203)
)

SHORTS = (0, 1, 2, 3, 7, 8, 9, 11, 12, 13, 15, 16, 17, 24, 31, 32, 33, 64, 255, 256, 1024, 32767, 32768, 65535)

NUMBERS = (
    *("", "0", "-0", "1", "-1", "2", "31", "32", "33", "100", "1000", "65536", "100001", "2147483648", "-2147483649"),
    *("99999999999999999999", "1e5", "1e8", "1e300", "1e308", "-1e308", "1e400", "1e-320", "nan", "inf", "-inf", "NaN"),
    *("abc", "1,5", "1_0", "0x10", "--1", "１２", "1\\2", "1\\2\\3", "\\\\", "nan\\0\\0", "1e308\\1e308\\1e308"),
    *("0\\0\\0\\0\\0\\0", "1\\0\\0\\1\\0\\0", "2\\0\\0\\0\\2\\0", "1\\0\\0\\0\\1\\0", "inf\\0\\0\\0\\1\\0", "\0", " "),
    "9" * 1200,
)

TEXTS = (
    *("", " ", "CT", "MR", "OT", "ORIGINAL\\PRIMARY\\LOCALIZER", "DERIVED\\SECONDARY", "MONOCHROME1", "PALETTE COLOR"),
    *("RGB", "YBR_FULL_422", "../../evil", "/etc/passwd", "=1+1", "a\nb\r\nc", "\0\0", "ä日\ud7ff", "x" * 3000),
    *("ISO 2022 IR 87", "\\ISO_IR 192\\ISO 2022 IR 149", "ISO_IR 999", "1.2.840.10008.5.1.4.1.1.7", "1.2." + "3" * 300),
)

KEYWORDS = """
    TransferSyntaxUID SpecificCharacterSet ImageType SOPClassUID SOPInstanceUID Modality PatientID
    GantryDetectorTilt SeriesInstanceUID InstanceNumber ImagePositionPatient ImageOrientationPatient
    SamplesPerPixel PhotometricInterpretation NumberOfFrames Rows Columns PixelSpacing BitsAllocated BitsStored
    HighBit PixelRepresentation RescaleIntercept RescaleSlope PixelValueTransformationSequence
    SharedFunctionalGroupsSequence PerFrameFunctionalGroupsSequence
"""
KNOWN = set(map(tag_for_keyword, KEYWORDS.split()))
"""Elements that readers use."""


class Element(NamedTuple):
    """The place of an element: its first byte, the first byte of its value, its end."""

    tag: int
    vr: bytes
    start: int
    value: int
    end: int


def scan(content: bytes) -> list[Element]:
    """The elements of an explicit little endian file, also those in sequences, as far as they can be parsed."""
    return list(_scan(content, 132, len(content))) if content[128:132] == b"DICM" else []


def _scan(content: bytes, place: int, end: int) -> Iterator[Element]:
    while place + 8 <= end:
        group, number = struct.unpack_from("<HH", content, place)
        vr = content[place + 4 : place + 6]
        if group == 0xFFFE:  # an item of a sequence: its elements follow
            place += 8
            continue
        long = vr in LONG
        if long and place + 12 > end:
            return
        length = struct.unpack_from("<I" if long else "<H", content, place + (8 if long else 6))[0]
        value = place + (12 if long else 8)
        stop = len(content) if length == UNDEFINED else value + length
        if stop > end:
            return
        yield Element(group << 16 | number, vr, place, value, stop)
        if vr == b"SQ" and length != UNDEFINED:
            yield from _scan(content, value, stop)
        place = stop


def _encode(tag: int, vr: bytes, value: bytes) -> bytes:
    value += b"\0" * (len(value) % 2)
    start = struct.pack("<HH", tag >> 16, tag & 0xFFFF) + vr
    if vr in LONG:
        return start + b"\0\0" + struct.pack("<I", len(value)) + value
    return start + struct.pack("<H", len(value) & 0xFFFF) + value


def _known(content: bytes) -> list[Element]:
    """The elements that readers use."""
    return [element for element in scan(content) if element.tag in KNOWN]


def _odd_value(random: Random, element: Element) -> bytes:
    if element.tag == 0x00020010:
        return random.choice(SYNTAXES).encode()
    if element.vr in (b"US", b"SS"):
        return struct.pack("<H", random.choice(SHORTS)) * random.choice((1, 1, 1, 2))
    if element.vr == b"SQ":
        return random.choice((b"", ITEM + b"\0\0\0\0", ITEM + b"\xff\xff\xff\xff", nested_items(random), b"\xff" * 16))
    return random.choice(NUMBERS if element.vr in (b"DS", b"IS", b"FD") else TEXTS).encode("utf-8", "surrogatepass")


def nested_items(random: Random) -> bytes:
    """Nests sequences deeper than Python's stack."""
    item = ITEM + struct.pack("<I", UNDEFINED) + b"\x00\x52\x29\x92SQ\0\0" + struct.pack("<I", UNDEFINED)
    return item * random.choice((3, 50, 400, 3000))


Change = Callable[[Random, bytes, Element], bytes]


def of_element(change: Change) -> Mutator:
    """The change of an element that readers use; some bits are flipped where none can be found."""

    def mutator(random: Random, content: bytes) -> bytes:
        known = _known(content)
        return change(random, content, random.choice(known)) if known else flip_bits(random, content)

    return mutator


def _with(content: bytes, element: Element, replacement: bytes) -> bytes:
    return content[: element.start] + replacement + content[element.end :]


@of_element
def change_value(random: Random, content: bytes, element: Element) -> bytes:
    """Writes another value correctly."""
    return _with(content, element, _encode(element.tag, element.vr, _odd_value(random, element)))


TYPES = tuple(b"US SS DS IS UI OB OW SQ UN UT FD ?? \0\0 zz".split())


@of_element
def change_structure(random: Random, content: bytes, element: Element) -> bytes:
    """Another type or length, or an element that is missing, doubled, or not in the order of tags."""
    kind, place = ("<I", element.start + 8) if element.vr in LONG else ("<H", element.start + 6)
    width, size = struct.calcsize(kind), element.end - element.value
    most = 2 ** (8 * width) - 1
    length = random.choice((0, 1, size + 1, size + 2, size * 2, 1000, most - 1, most)) & most
    lying = content[:place] + struct.pack(kind, length) + content[place + width :]
    whole, vr = content[element.start : element.end], random.choice(TYPES)
    other, without = _encode(element.tag, vr, content[element.value : element.end]), _with(content, element, b"")
    where = random.choice(_known(content)).start
    return random.choice(
        (
            *(lying, lying, without, content[:where] + whole + content[where:]),
            *(without[:where] + whole + without[where:], _with(content, element, other)),
            content[: element.start + 4] + vr + content[element.start + 6 :],  # the length is then read from elsewhere
        )
    )


def add_nesting(random: Random, content: bytes) -> bytes:
    """Inserts a sequence without an end before the pixels."""
    tag = random.choice((0x00091001, 0x52009229, 0x52009230))
    head = struct.pack("<HH", tag >> 16, tag & 0xFFFF) + b"SQ\0\0" + struct.pack("<I", UNDEFINED)
    place = content.rfind(PIXELS)
    return content[:place] + head + nested_items(random) + content[place:]


def change_prefix(random: Random, content: bytes) -> bytes:
    """Removes the preamble or the file meta information, or writes the preamble of another format."""
    first = next((element.start for element in scan(content) if element.tag >= 0x00030000), 132)
    return random.choice(
        (content[132:], content[first:], b"II*\0" * 32 + content[128:], content[:132] + content[first:])
    )


def deflate(random: Random, content: bytes) -> bytes:
    """Deflates the file; it may be damaged."""
    elements = scan(content)
    first = next((element.start for element in elements if element.tag >= 0x00030000), None)
    syntax = next((element for element in elements if element.tag == 0x00020010), None)
    if first is None or syntax is None:
        return flip_bits(random, content)
    rest = content[syntax.end : first]
    meta = content[144 : syntax.start] + _encode(0x00020010, b"UI", b"1.2.840.10008.1.2.1.99") + rest
    packer = zlib.compressobj(1, zlib.DEFLATED, -zlib.MAX_WBITS)
    packed = packer.compress(content[first:]) + packer.flush()
    if random.random() < 0.5:
        packed = flip_bits(random, packed)
    return content[:140] + struct.pack("<I", len(meta)) + meta + packed


def change_pixel_length(random: Random, content: bytes) -> bytes:
    place = content.rfind(PIXELS) + 8
    if place < 8:
        return flip_bits(random, content)
    size = len(content) - place - 4
    length = random.choice((0, 1, 2, size - 1, size + 1, size + 2, size // 2, 2**31, UNDEFINED - 1, UNDEFINED))
    return content[:place] + struct.pack("<I", length % 2**32) + content[place + 4 :]


def change_pixels(random: Random, content: bytes) -> bytes:
    """Flips, cuts and unusual bytes in the decoder's input."""
    place = content.rfind(PIXELS) + 12
    if random.random() < 0.5:
        place = min(len(content), place + 40)  # past the first items, into the first compressed image
    return content[:place] + random.choice(BYTES[:-1])(random, content[place:])


def _fragments(content: bytes) -> tuple[int, list[bytes]]:
    """The place of the first fragment, and all fragments, the offset table first; none if pixels are plain."""
    start = place = content.rfind(PIXELS) + 12
    found = []
    while start >= 12 and content[place : place + 4] == ITEM and place + 8 <= len(content):
        length = struct.unpack_from("<I", content, place + 4)[0]
        found.append(content[place + 8 : place + 8 + length])
        place += 8 + length
    return start, found


def change_fragments(random: Random, content: bytes) -> bytes:
    """Makes fragments missing, doubled, empty, split, out of order, or wrongly counted by the offset table."""
    start, fragments = _fragments(content)
    if len(fragments) < 2:
        return change_pixel_length(random, content)
    number = random.randrange(len(fragments))
    whole = fragments[number]
    middle = random.randrange(len(whole) + 1)
    change = random.randrange(7)
    if change == 0:
        random.shuffle(fragments)
    elif change == 1:
        fragments[0] = struct.pack("<I", random.choice((0, 1, 8, len(content), UNDEFINED))) * random.randrange(4)
    else:
        ways = ([], [whole, whole], [b""], [whole[:middle], whole[middle:]], [whole[:middle]])
        fragments[number : number + 1] = random.choice(ways)
    items = b"".join(ITEM + struct.pack("<I", len(fragment)) + fragment for fragment in fragments)
    return content[:start] + items + random.choice((END_OF_ITEMS + b"\0\0\0\0",) * 3 + (b"", b"\xff" * 8))


SIZE_MARKERS = tuple(bytes((0xFF, code)) for code in (0xC3, 0xF7, 0xC0, 0x51, 0xC4, 0xDA, 0x52, 0x90, 0xF8))
"""Frame headers of JPEG, JPEG-LS, baseline and JPEG 2000; tables, scans, coding styles, tiles, presets."""


def change_codestream(random: Random, content: bytes) -> bytes:
    """Unusual bytes right after a marker: the size, the precision, the number of components, the tables."""
    start = content.rfind(PIXELS)
    marker = random.choice(SIZE_MARKERS)
    place = content.find(marker, start)
    if place < 0:
        return change_pixels(random, content)
    for _ in range(random.choice((1, 1, 2))):
        where = place + 2 + random.randrange(48)
        odd = bytes((random.choice((0, 1, 2, 8, 12, 16, 17, 32, 33, 127, 128, 255)),))
        content = content[:where] + odd + content[where + 1 :]
    return content


DICOM: tuple[Mutator, ...] = (
    *(change_value,) * 8,
    *(change_codestream, change_fragments) * 3,
    *(change_structure,) * 5,
    *(change_pixels, change_pixels, add_nesting, change_prefix, deflate, change_pixel_length),
    *BYTES,
)

PIXEL: tuple[Mutator, ...] = (
    *(change_codestream, change_pixels, change_fragments) * 2,
    *(change_value, change_pixel_length),
)


def mutate_dicom(random: Random, content: bytes) -> bytes:
    return mutate(random, content, DICOM)


def mutate_pixels(random: Random, content: bytes) -> bytes:
    """Damage that leaves most of the header readable, so that decoders see it."""
    return mutate(random, content, PIXEL)
