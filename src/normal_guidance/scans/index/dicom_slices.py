"""DICOM files as raw elements, and the headers of slices, read without the pixels.

pydicom finds the elements; their values are parsed here, because real files hold malformed numbers, and because it is
several times faster: one header takes under a millisecond.  Pixels of plain files are found without pydicom.  Any error
inside a file is an `UnreadableError`.  A header's value that is missing or malformed is None; who needs it decides.
"""

from __future__ import annotations

import io
import math
import os
import struct
import warnings
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
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
        deflated = DEFLATED.encode() in head
        source = _inflated(file) if deflated else file
        size = source.seek(0, os.SEEK_END)
        source.seek(0)
        dataset = dcmread(source, stop_before_pixels=not pixels, force=True, specific_tags=list(tags))
        left = size - source.tell()
    implicit, little_endian = dataset.original_encoding  # what pydicom detected, where (0002,0010) is missing
    detected = IMPLICIT if implicit else EXPLICIT if little_endian else BIG_ENDIAN
    stated = str(dataset.file_meta.get("TransferSyntaxUID") or detected)
    return Elements(dataset, DEFLATED if deflated else stated, left)


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


def raw(dataset: Dataset, tag: int) -> Any:
    """The `RawDataElement`; None where it is missing, empty or a sequence.  Pixels may be a view of the content."""
    element = dataset.get_item(tag) if tag in dataset else None
    return element if isinstance(element, RawDataElement) and element.value else None


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
    return int.from_bytes(element.value[:2], "little" if element.is_little_endian else "big")


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


# Headers of slices, and files that are not slices.

Triple = tuple[float, float, float]

SECONDARY_CAPTURE = "1.2.840.10008.5.1.4.1.1.7"
"""SOP class; those of its multi-frame variants begin with it, followed by a dot."""

NO_SCAN_CLASSES = (
    "1.2.840.10008.5.1.4.1.1.4.2",  # MR spectroscopy
    "1.2.840.10008.5.1.4.1.1.9",  # waveforms
    "1.2.840.10008.5.1.4.1.1.11",  # presentation states
    "1.2.840.10008.5.1.4.1.1.30",  # parametric maps
    "1.2.840.10008.5.1.4.1.1.66",  # raw data, registrations, fiducials, segmentations
    "1.2.840.10008.5.1.4.1.1.67",  # real world values
    "1.2.840.10008.5.1.4.1.1.88",  # structured reports, key objects
    "1.2.840.10008.5.1.4.1.1.104",  # encapsulated documents
    "1.2.840.10008.5.1.4.1.1.481.2",  # radiotherapy: doses
    "1.2.840.10008.5.1.4.1.1.481.3",  # structure sets
    "1.2.840.10008.5.1.4.1.1.481.5",  # plans
)
"""SOP classes of objects that are not scans, though they may have pixels or say CT; also those with a dot behind."""

NO_SCAN_MODALITIES = frozenset(
    ("SEG", "SR", "KO", "PR", "DOC", "REG", "FID", "RWV", "ASMT", "PLAN", "RTSTRUCT", "RTPLAN", "RTDOSE", "RTRECORD")
)
"""Modalities of such objects, for SOP classes that are not listed."""

_POSITION, _ORIENTATION, _SPACING, _THICKNESS = 0x00200032, 0x00200037, 0x00280030, 0x00180050
_SHARED, _PER_FRAME = 0x52009229, 0x52009230
_PLANE_POSITION, _PLANE_ORIENTATION, _PIXEL_MEASURES = 0x00209113, 0x00209116, 0x00289110

_GEOMETRY = (_POSITION, _ORIENTATION, _SPACING, _THICKNESS, _SHARED, _PER_FRAME)
_IDENTITY = (0x00080008, 0x00080016, 0x00080060, 0x00180015, 0x00280301)
_ACQUIRED = (0x0008002A, 0x00080022, 0x00080032)
_SIZE = (0x00280002, 0x00280008, 0x00280010, 0x00280011, 0x00280100)
_TEXTS = {"sop_uid": 0x00080018, "series_uid": 0x0020000E, "study_uid": 0x0020000D, "patient_id": 0x00100020}
_INTEGERS = {"instance_number": 0x00200013, "acquisition": 0x00200012, "temporal_position": 0x00200100}
_NUMBERS = {"tilt": 0x00181120, "echo_time": 0x00180081, "b_value": 0x00189087}
_TAGS = (*_IDENTITY, 0x0008103E, *_ACQUIRED, *_SIZE, *_GEOMETRY, *(_TEXTS | _INTEGERS | _NUMBERS).values())


@dataclass(frozen=True)
class Header:
    """The header of a file with one or more slices, as plain values that are cheap to send between processes."""

    file: str
    sop_uid: str = ""
    series_uid: str = ""
    study_uid: str = ""
    patient_id: str = ""
    modality: str = ""
    image_type: tuple[str, ...] = ()
    instance_number: int | None = None
    rows: int = 0
    columns: int = 0
    frames: int = 1
    transfer_syntax: str = ""  # UID
    position: Triple | None = None
    """ImagePositionPatient; the first frame's in a multi-frame file that has it per frame."""
    orientation: tuple[float, ...] | None = None  # ImageOrientationPatient: direction cosines of a row and of a column
    pixel_spacing: tuple[float, float] | None = None  # mm between rows, mm between columns
    thickness: float | None = None
    tilt: float | None = None  # GantryDetectorTilt in degrees
    frame_positions: tuple[Triple, ...] | None = None
    """ImagePositionPatient of every frame of a multi-frame file; None unless all frames have one."""
    frame_orientation: tuple[float, ...] | None = None
    """The orientation of all frames of a multi-frame file; files whose frames differ are refused."""
    description: str = ""  # SeriesDescription
    sop_class: str = ""  # UID
    samples: int = 1  # SamplesPerPixel: 3 in colour
    body_part: str = ""  # BodyPartExamined
    acquisition: int | None = None  # AcquisitionNumber; this and the next four tell acquisitions of one series apart
    temporal_position: int | None = None  # TemporalPositionIdentifier
    echo_time: float | None = None
    b_value: float | None = None  # DiffusionBValue
    acquired: str = ""  # AcquisitionDateTime, or AcquisitionDate and AcquisitionTime; such texts sort by time
    burned_in: bool = False  # whether BurnedInAnnotation says that the pixels name the patient


def read_header(content: bytes | Path, file: str) -> Header:
    """Reads a header without the pixels; raises UnreadableError for a damaged file, or one that is not a scan."""
    with refusing():
        elements = read_elements(content, _TAGS)
        dataset = elements.dataset
        modality = text(dataset, 0x00080060).upper()
        sop_class = text(dataset, 0x00080016) or text(dataset.file_meta, 0x00020002)
        listed = any(f"{sop_class}.".startswith(f"{known}.") for known in NO_SCAN_CLASSES)
        if listed or modality in NO_SCAN_MODALITIES:
            raise UnreadableError("no_image", f"not a scan: {uid_name(sop_class) or f'Modality is {modality}'}")
        moment, date, time = (text(dataset, tag) for tag in _ACQUIRED)
        values: dict[str, Any] = {name: text(dataset, tag) for name, tag in _TEXTS.items()}
        values |= {name: integer(dataset, tag) for name, tag in _INTEGERS.items()}
        values |= {name: number(dataset, tag) for name, tag in _NUMBERS.items()}
        header = Header(
            file=file,
            modality=modality,
            image_type=tuple(word.strip().upper() for word in text(dataset, 0x00080008).split("\\") if word.strip()),
            rows=unsigned(dataset, 0x00280010) or 0,
            columns=unsigned(dataset, 0x00280011) or 0,
            frames=frame_count(dataset),
            transfer_syntax=elements.syntax,
            description=text(dataset, 0x0008103E),
            sop_class=sop_class,
            samples=unsigned(dataset, 0x00280002) or 1,
            body_part=text(dataset, 0x00180015).upper(),
            acquired=moment or (date + time if time else ""),
            burned_in=text(dataset, 0x00280301).upper() == "YES",
            **values,
            **_geometry(dataset),
        )
        _check_pixels(header, elements)
        return header


def _check_pixels(header: Header, elements: Elements) -> None:
    """Checks that there are pixels and, where their length is known, that none are missing."""
    stated = bool(header.rows and header.columns)
    if elements.left < 8:  # reading did not stop at the tag of the pixels
        if elements.left < 0 or stated or header.modality == "CT":
            raise UnreadableError("unreadable", "the file ends before its pixels")
        raise UnreadableError("no_image", f"no pixels: {uid_name(header.sop_class) or 'neither Rows nor PixelData'}")
    if not stated:
        raise UnreadableError("no_image", f"(0028,0010) Rows x (0028,0011) Columns is {header.rows} x {header.columns}")
    bits = unsigned(elements.dataset, 0x00280100) or 0
    needed = header.rows * header.columns * header.frames * header.samples * bits // 8
    if header.transfer_syntax in NATIVE and elements.left < needed:
        raise UnreadableError(
            "unreadable",
            f"{header.frames} x {header.rows} x {header.columns} pixels of {bits} bits are {needed:,} bytes, but the "
            f"file has {elements.left:,}",
        )


def _geometry(dataset: Dataset) -> dict[str, Any]:
    """Position, orientation, spacing and thickness of the file or of its frames."""
    geometry: dict[str, Any] = {
        "position": numbers(dataset, _POSITION, 3),
        "orientation": numbers(dataset, _ORIENTATION, 6),
        "pixel_spacing": _positive(numbers(dataset, _SPACING, 2)),
        "thickness": number(dataset, _THICKNESS),
    }
    if _PER_FRAME not in dataset and _SHARED not in dataset:
        return geometry
    shared, groups = sequence(dataset, _SHARED)[:1], sequence(dataset, _PER_FRAME)
    measures = first_item(groups[:1] + shared, _PIXEL_MEASURES)
    if measures is not None:
        geometry["pixel_spacing"] = _positive(numbers(measures, _SPACING, 2))
        geometry["thickness"] = number(measures, _THICKNESS)

    def of_frames(macro: int, tag: int, count: int) -> tuple[tuple[float, ...] | None, ...]:
        """One value per frame: its own, or the one that all frames share."""
        items = (first_item([group, *shared], macro) for group in groups or shared)
        return tuple(None if item is None else numbers(item, tag, count) for item in items)

    orientations = [values for values in of_frames(_PLANE_ORIENTATION, _ORIENTATION, 6) if values is not None]
    for other in orientations[1:]:
        if max(abs(a - b) for a, b in zip(orientations[0], other, strict=True)) > 1e-3:
            detail = f"frames of one file have the orientations {orientations[0]} and {other}"
            raise UnreadableError("mixed_orientation", detail)
    geometry["frame_orientation"] = orientations[0] if orientations else None
    geometry["orientation"] = geometry["frame_orientation"] or geometry["orientation"]
    positions = of_frames(_PLANE_POSITION, _POSITION, 3)
    if positions and len(positions) == frame_count(dataset) and None not in positions:
        geometry["frame_positions"], geometry["position"] = positions, positions[0]
    return geometry


def _positive(spacing: tuple[float, ...] | None) -> tuple[float, ...] | None:
    return spacing if spacing and min(spacing) > 0 else None


def exclusion(header: Header, modalities: Sequence[str] = ("CT",)) -> UnreadableError | None:
    """Why an image is not a slice of a scan; None if it may be one: some anonymized slices have no modality."""
    image_type = "\\".join(header.image_type)
    if header.sop_class == SECONDARY_CAPTURE or header.sop_class.startswith(f"{SECONDARY_CAPTURE}."):
        return UnreadableError("secondary_capture", f"SOPClassUID is {uid_name(header.sop_class)}")
    if header.samples != 1:
        return UnreadableError("secondary_capture", f"in colour: SamplesPerPixel is {header.samples}")
    if header.modality not in (*modalities, ""):
        return UnreadableError("wrong_modality", f"Modality is {header.modality}")
    if {"LOCALIZER", "SCOUT", "TOPOGRAM"} & set(header.image_type):
        return UnreadableError("localizer", f"ImageType is {image_type}")
    if "SECONDARY" in header.image_type[1:2] and header.orientation is None:
        return UnreadableError("secondary_capture", f"ImageType is {image_type}, without ImageOrientationPatient")
    return None
