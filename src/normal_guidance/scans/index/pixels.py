"""The pixels of DICOM files in Hounsfield units, with the repairs that two public data sets need.

There is one decoder per transfer syntax, so that the result does not depend on other installed packages.
Decoders are native code that trusts its input, so sizes are compared with the header before decoding.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int16, Integer

from normal_guidance.base.errors import UnreadableError
from normal_guidance.base.system import importing
from normal_guidance.scans.index.dicom_slices import (
    BIG_ENDIAN,
    NATIVE,
    PIXELS,
    Dataset,
    Elements,
    first_item,
    frame_count,
    number,
    raw,
    read_elements,
    refusing,
    sequence,
    text,
    uid_name,
    unsigned,
)

# JPEG streams inside DICOM files are checked before native code decodes them: GDCM ends the whole process if a JPEG-LS
# stream has another size than the header, and OpenJPEG allocates as much memory as the stream states.

_START, _END, _START_2000, _BOX_2000 = b"\xff\xd8", b"\xff\xd9", b"\xff\x4f\xff\x51", b"jP  \r\n\x87\n"
_FRAME_MARKERS = (*range(0xC0, 0xC4), *range(0xC5, 0xC8), *range(0xC9, 0xCC), *range(0xCD, 0xD0), 0xF7)
"""SOF0 to SOF15 and JPEG-LS's SOF55; C4, C8 and CC mean something else."""


class Codestream(NamedTuple):
    """The size and precision that a compressed image states."""

    rows: int
    columns: int
    bits: int


def parse_codestream(code: bytes) -> Codestream:
    """Size and precision of a JPEG, JPEG-LS or JPEG 2000 stream with one component; refuses one that is cut off."""
    if _END not in code[-10:]:  # padding may follow
        raise UnreadableError("unreadable", "the compressed image is cut off: it has no end marker")
    if code.startswith(_START):
        stated, components = _parse_jpeg(code)
    elif code.startswith(_START_2000) or code[4:12] == _BOX_2000:
        stated, components = _parse_jpeg_2000(code)
    else:
        raise UnreadableError("unreadable", f"the compressed image begins with {code[:4].hex()}: not a JPEG")
    if components != 1:
        raise UnreadableError("unreadable", f"the compressed image has {components} components, but a CT image has 1")
    if stated.rows < 1 or stated.columns < 1:
        raise UnreadableError("unreadable", f"the compressed image states {stated.rows} x {stated.columns} pixels")
    return stated


def _parse_jpeg(code: bytes) -> tuple[Codestream, int]:
    offset = 2
    while offset + 10 <= len(code) and code[offset] == 0xFF:
        marker, length = code[offset + 1], int.from_bytes(code[offset + 2 : offset + 4], "big")
        if marker in _FRAME_MARKERS:
            rows, columns = (int.from_bytes(code[offset + i : offset + i + 2], "big") for i in (5, 7))
            return Codestream(rows, columns, code[offset + 4]), code[offset + 9]
        offset += 2 + max(length, 2)
    raise UnreadableError("unreadable", "the compressed image does not state its size")


def _parse_jpeg_2000(code: bytes) -> tuple[Codestream, int]:
    """SIZ: marker, Lsiz, Rsiz, then the corners of the image and of the tiles in four bytes each, then components."""
    offset = code.find(_START_2000) + 4
    if offset < 4 or len(code) < offset + 39:
        raise UnreadableError("unreadable", "the compressed image does not state its size")
    right, bottom, left, top = (int.from_bytes(code[offset + i : offset + i + 4], "big") for i in (4, 8, 12, 16))
    components = int.from_bytes(code[offset + 36 : offset + 38], "big")
    return Codestream(bottom - top, right - left, (code[offset + 38] & 0x7F) + 1), components


def decode_gdcm(code: bytes, stated: Codestream, syntax: str, *, signed: bool) -> Integer[np.ndarray, "rows columns"]:
    """Decodes one frame of JPEG or JPEG-LS, which have no signs: if `signed`, the highest bit becomes the sign."""
    # pydicom's plugin for GDCM is not used: it returns uninitialized memory if decoding fails.
    with importing("dicom", "JPEG and JPEG-LS need python-gdcm"):
        import gdcm
    for quiet in (gdcm.Trace.DebugOff, gdcm.Trace.WarningOff, gdcm.Trace.ErrorOff):
        quiet()

    fragment = gdcm.Fragment()
    fragment.SetByteStringValue(code)
    fragments = gdcm.SequenceOfFragments.New()
    fragments.AddFragment(fragment)
    element = gdcm.DataElement(gdcm.Tag(0x7FE0, 0x0010))
    element.SetValue(fragments.__ref__())
    image = gdcm.Image()
    image.SetNumberOfDimensions(2)
    image.SetDimensions((stated.columns, stated.rows, 1))
    image.SetPhotometricInterpretation(gdcm.PhotometricInterpretation(gdcm.PhotometricInterpretation.MONOCHROME2))
    image.SetPixelFormat(gdcm.PixelFormat(1, 8 if stated.bits <= 8 else 16, stated.bits, stated.bits - 1, 0))
    image.SetTransferSyntax(gdcm.TransferSyntax(gdcm.TransferSyntax.GetTSType(syntax)))
    image.SetDataElement(element)
    change = gdcm.ImageChangeTransferSyntax()
    change.SetTransferSyntax(gdcm.TransferSyntax(gdcm.TransferSyntax.ExplicitVRLittleEndian))
    change.SetInput(image)
    image.thisown = False  # `change` owns the only reference and frees it; Python would free it again
    if not change.Change():
        raise UnreadableError("unreadable", "GDCM cannot decode the compressed image")

    decoded = change.GetOutput()
    width = decoded.GetPixelFormat().GetBitsAllocated() // 8
    content = decoded.GetBuffer().encode("utf-8", "surrogateescape")  # GDCM returns bytes as str
    if len(content) < stated.rows * stated.columns * width:
        raise UnreadableError("unreadable", f"GDCM decoded only {len(content):,} bytes of the compressed image")
    pixels = np.frombuffer(content, f"<{'i' if signed else 'u'}{width}", stated.rows * stated.columns)
    if signed:
        shift = 8 * width - stated.bits
        pixels = np.right_shift(np.left_shift(pixels, shift), shift)
    return pixels.reshape(stated.rows, stated.columns)


PYDICOM = (*NATIVE, "1.2.840.10008.1.2.5")  # uncompressed, and RLE lossless

MONOCHROME = ("MONOCHROME1", "MONOCHROME2")  # photometric interpretations of CT; pydicom judges others

OPENJPEG = tuple(f"1.2.840.10008.1.2.4.{number}" for number in (90, 91, 201, 202, 203))
"""JPEG 2000, and high-throughput JPEG 2000."""

GDCM = tuple(f"1.2.840.10008.1.2.4.{number}" for number in (50, 57, 70, 80, 81))
"""JPEG baseline, JPEG lossless (any predictor, first predictor), JPEG-LS (lossless, near lossless)."""

FREE_BYTES, EXPANSION = 2**28, 200
"""An image larger than `FREE_BYTES` is refused if its compressed pixels are more than `EXPANSION` times smaller."""

RESCALE_LIMIT = 1e6  # larger slopes and intercepts are damaged: CT numbers have five digits

WRONG_INTERCEPT, WRAP, RIGHT_INTERCEPT = -100.0, 4096, -1000
"""RSNA 2019: with 12 unsigned bits and an intercept above `WRONG_INTERCEPT`, negative values wrapped at `WRAP`."""

_SHARED, _PER_FRAME, _TRANSFORMATION, _SLOPE, _INTERCEPT = 0x52009229, 0x52009230, 0x00289145, 0x00281053, 0x00281052
_LAYOUT = (0x00280002, 0x00280004, 0x00280008, 0x00280010, 0x00280011, 0x00280100, 0x00280101, 0x00280103)
_TAGS = (*_LAYOUT, _SLOPE, _INTERCEPT, _SHARED, _PER_FRAME, PIXELS)

Stored = Integer[np.ndarray, "frames rows columns"]
Hounsfield = Int16[np.ndarray, "frames rows columns"] | Float32[np.ndarray, "frames rows columns"]
Notes = list[tuple[str, str]]
"""Problems as a kind of `normal_guidance.scans.index.problems.KINDS` and the values that were found."""


class _Image(NamedTuple):
    """The header values that decoding needs."""

    syntax: str
    frames: int
    rows: int
    columns: int
    allocated: int  # bits of a pixel in the file
    stored: int  # bits that are used
    signed: bool
    photometric: str

    @property
    def dtype(self) -> np.dtype:
        return np.dtype(f"{'i' if self.signed else 'u'}{self.allocated // 8}")

    @property
    def shape(self) -> tuple[int, int, int]:
        return self.frames, self.rows, self.columns

    @property
    def bytes(self) -> int:
        return self.frames * self.rows * self.columns * self.allocated // 8


def read_pixels(content: bytes | Path, file: str, *, repair: bool = True) -> tuple[Hounsfield, Notes]:
    """Every frame in HU, int16 where all are whole numbers of its range, else float32, and problems; two repairs."""
    # 'bits' (RSNA 2023): unused bits above BitsStored are set, or the sign was not extended into them.
    # 'intercept' (RSNA 2019; Howard, "Some DICOM gotchas to be aware of"): 12 unsigned bits and an intercept above -100
    # cannot show air: negative values wrapped at 4096.
    with refusing(file):
        elements = read_elements(content, _TAGS, pixels=True)
        image = _image(elements)
        stored = _decode(image, _pixel_bytes(elements.dataset, image))
        notes: Notes = []
        if repair:
            stored = _repair_bits(stored, image, notes)
        return _to_hu(stored, image, _rescales(elements.dataset, image.frames, notes), notes, repair), notes


def _image(elements: Elements) -> _Image:
    dataset = elements.dataset
    rows, columns = unsigned(dataset, 0x00280010), unsigned(dataset, 0x00280011)
    allocated = unsigned(dataset, 0x00280100)
    stored = unsigned(dataset, 0x00280101) or allocated
    samples = unsigned(dataset, 0x00280002) or 1
    if not rows or not columns:
        raise UnreadableError("no_image", f"(0028,0010) Rows x (0028,0011) Columns is {rows} x {columns}")
    if samples != 1:
        raise UnreadableError("unreadable", f"(0028,0002) SamplesPerPixel is {samples}, but a CT image has 1")
    if allocated not in (8, 16, 32) or stored is None or stored > allocated:
        detail = f"(0028,0100) BitsAllocated is {allocated}, (0028,0101) BitsStored is {stored}"
        raise UnreadableError("unreadable", detail)
    return _Image(
        syntax=elements.syntax,
        frames=frame_count(dataset),
        rows=rows,
        columns=columns,
        allocated=allocated,
        stored=stored,
        signed=unsigned(dataset, 0x00280103) == 1,
        photometric=text(dataset, 0x00280004) or "MONOCHROME2",
    )


def _pixel_bytes(dataset: Dataset, image: _Image) -> bytes | memoryview:
    element = raw(dataset, PIXELS)
    if element is None:
        raise UnreadableError("unreadable", "(7FE0,0010) PixelData is missing, empty or cut off")
    content = element.value
    native = image.syntax in NATIVE
    if (native and image.bytes > len(content)) or (image.bytes > max(FREE_BYTES, EXPANSION * len(content))):
        pixels = f"{image.frames} x {image.rows} x {image.columns} pixels of {image.allocated} bits"
        raise UnreadableError("unreadable", f"{pixels} are {image.bytes:,} bytes, but PixelData has {len(content):,}")
    if not native and element.length != 0xFFFFFFFF:
        raise UnreadableError("unreadable", f"PixelData is not encapsulated, but TransferSyntax is {image.syntax}")
    return content


def _rescales(dataset: Dataset, frames: int, notes: Notes) -> list[tuple[float, float]]:
    """Slope and intercept of every frame: the frame's own, those that the frames share, or the file's."""
    shared, groups = sequence(dataset, _SHARED)[:1], sequence(dataset, _PER_FRAME)
    if len(groups) != frames:
        item = first_item(shared, _TRANSFORMATION)
        return [_rescale(dataset if item is None else item, notes)] * frames
    items = (first_item([group, *shared], _TRANSFORMATION) for group in groups)
    return [_rescale(dataset if item is None else item, notes) for item in items]


def _rescale(dataset: Dataset, notes: Notes) -> tuple[float, float]:
    slope, intercept = number(dataset, _SLOPE), number(dataset, _INTERCEPT)
    good_slope = slope if slope and abs(slope) <= RESCALE_LIMIT else 1.0
    good_intercept = intercept if intercept is not None and abs(intercept) <= RESCALE_LIMIT else 0.0
    if (slope, intercept) != (good_slope, good_intercept):
        there = [text(dataset, tag) or "missing" for tag in (_SLOPE, _INTERCEPT)]
        detail = f"(0028,1053) RescaleSlope is {there[0]}, (0028,1052) RescaleIntercept is {there[1]}"
        note = ("no_rescale", f"{detail}; read as {good_slope:g} and {good_intercept:g}")
        if note not in notes:  # once, not for every frame
            notes.append(note)
    return good_slope, good_intercept


def _decode(image: _Image, content: bytes | memoryview) -> Stored:
    """The stored values, decompressed."""
    if image.syntax in NATIVE and image.syntax != BIG_ENDIAN and image.photometric in MONOCHROME:
        stored = np.frombuffer(content, image.dtype.newbyteorder("<"), count=math.prod(image.shape))
        return stored.astype(image.dtype, copy=False).reshape(image.shape)
    content = bytes(content)
    if image.syntax in PYDICOM:
        return _decode_pydicom(image, content, "pydicom" if image.syntax not in NATIVE else "")
    if image.syntax in OPENJPEG:
        with importing("dicom", "JPEG 2000 needs pylibjpeg-openjpeg"):
            import_module("openjpeg")
        list(_codestreams(image, content))  # runs its checks
        return _decode_pydicom(image, content, "pylibjpeg")
    if image.syntax in GDCM:
        streams = _codestreams(image, content)
        frames = [decode_gdcm(code, stated, image.syntax, signed=image.signed) for code, stated in streams]
        return np.stack(frames).astype(image.dtype, copy=False)
    raise UnreadableError("unreadable", f"transfer syntax {uid_name(image.syntax)} is not supported")


def _decode_pydicom(image: _Image, content: bytes, plugin: str) -> Stored:
    from pydicom.pixels.decoders.base import get_decoder

    options: dict[str, Any] = {
        "rows": image.rows,
        "columns": image.columns,
        "number_of_frames": image.frames,
        "samples_per_pixel": 1,
        "photometric_interpretation": image.photometric,
        "pixel_representation": int(image.signed),
        "bits_allocated": image.allocated,
        "bits_stored": image.stored,
        "pixel_keyword": "PixelData",
        "pixel_vr": "OW" if image.allocated > 8 else "OB",
        "allow_excess_frames": False,
    }
    if image.syntax not in OPENJPEG:
        options["correct_unused_bits"] = False  # `_repair_bits` does it, and notes it
    if image.syntax in NATIVE:
        options["view_only"] = True
    stored, _ = get_decoder(image.syntax).as_array(content, raw=True, decoding_plugin=plugin, **options)
    return stored.astype(image.dtype, copy=False).reshape(image.shape)


def _codestreams(image: _Image, content: bytes) -> Iterable[tuple[bytes, Codestream]]:
    """The JPEG stream of every frame; refuses one that is cut off or differs in size from the header."""
    from pydicom.encaps import generate_frames

    count = 0
    for code in generate_frames(content, number_of_frames=image.frames):
        stated = parse_codestream(code)
        if (stated.rows, stated.columns) != (image.rows, image.columns):
            detail = f"is {stated.rows} x {stated.columns}, but the header says {image.rows} x {image.columns}"
            raise UnreadableError("unreadable", f"the compressed image {detail}")
        if stated.bits > image.allocated:
            raise UnreadableError("unreadable", f"compressed pixels of {stated.bits} bits in {image.allocated} bits")
        count += 1
        yield code, stated
        if count == image.frames:
            return
    raise UnreadableError("unreadable", f"PixelData has {count} frames, but (0028,0008) says {image.frames}")


def _repair_bits(stored: Stored, image: _Image, notes: Notes) -> Stored:
    shift = image.allocated - image.stored
    lowest = -(2 ** (image.stored - 1)) if image.signed else 0
    if not shift or (lowest <= stored.min() and stored.max() < lowest + 2**image.stored):
        return stored
    repaired = np.right_shift(np.left_shift(stored, shift), shift)
    if changed := int((repaired != stored).sum()):
        bits = f"BitsStored is {image.stored} of {image.allocated}, PixelRepresentation is {int(image.signed)}"
        notes.append(("bits", f"{bits}, but {changed} of {stored.size} pixels use the other bits"))
    return repaired


def _to_hu(
    stored: Stored, image: _Image, rescales: list[tuple[float, float]], notes: Notes, repair: bool
) -> Hounsfield:
    may_wrap = repair and image.stored == 12 and not image.signed
    wraps = [may_wrap and slope == 1 and intercept > WRONG_INTERCEPT for slope, intercept in rescales]
    kept = [rescale for wrap, rescale in zip(wraps, rescales, strict=True) if not wrap]
    bounds = int(stored.min()), int(stored.max())
    ends = [slope * bound + intercept for slope, intercept in kept for bound in bounds]
    is_whole = all(number.is_integer() for rescale in kept for number in rescale)
    fits = min(ends, default=0) >= -(2**15) and max(ends, default=0) < 2**15
    hu = np.empty(image.shape, np.int16 if is_whole and fits else np.float32)
    wrapped = 0
    for frame, pixels, (slope, intercept), wrap in zip(hu, stored, rescales, wraps, strict=True):
        if wrap:
            restored = (pixels.astype(np.int32) - RIGHT_INTERCEPT) % WRAP + RIGHT_INTERCEPT
            wrapped += int((restored != pixels + np.float32(intercept)).sum())
            pixels, slope, intercept = restored, 1.0, 0.0
        _write_hu(frame, pixels, slope, intercept)
    if wrapped:
        header = f"BitsStored is 12, PixelRepresentation is 0, RescaleIntercept is {rescales[0][1]:g}"
        detail = f"{wrapped} of {stored.size} pixels were negative numbers that wrapped at {WRAP}"
        notes.append(("intercept", f"{header}: {detail}"))
    return hu


def _write_hu(hu: np.ndarray, pixels: Integer[np.ndarray, "rows columns"], slope: float, intercept: float) -> None:
    if hu.dtype == np.int16:  # integers wrap at 2**16: where the result fits, no step on the way to it matters
        np.copyto(hu, pixels, casting="unsafe")
        if slope != 1:
            hu *= np.int64(slope).astype(np.int16)
        hu += np.int64(intercept).astype(np.int16)
    elif pixels.dtype.itemsize > 2:  # more digits than float32 has; the sum may be small again
        hu[:] = pixels * slope + intercept
    else:
        hu[:] = pixels
        hu *= slope
        hu += intercept
