"""Headers of DICOM slices, and files that are not slices.

Headers are read without the pixels.  A value that is missing or malformed is None; the code that needs it decides.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normal_guidance.base.errors import UnreadableError
from normal_guidance.scans.index.dicom_files import (
    NATIVE,
    Dataset,
    Elements,
    first_item,
    frame_count,
    integer,
    number,
    numbers,
    read_elements,
    refusing,
    sequence,
    text,
    uid_name,
    unsigned,
)

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
