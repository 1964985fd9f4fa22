"""JPEG streams inside DICOM files: their stated size and precision, and decoding with GDCM.

A stream is checked before native code decodes it: GDCM ends the whole process if a JPEG-LS stream has another size
than the header, and OpenJPEG allocates as much memory as the stream states.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jaxtyping import Integer

from normal_guidance.data.problems import UnreadableError
from normal_guidance.errors import UserError
from normal_guidance.extras import install_command

_START, _END = b"\xff\xd8", b"\xff\xd9"
_START_2000 = b"\xff\x4f\xff\x51"
_BOX_2000 = b"jP  \r\n\x87\n"
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
    place = 2
    while place + 10 <= len(code) and code[place] == 0xFF:
        marker, length = code[place + 1], int.from_bytes(code[place + 2 : place + 4], "big")
        if marker in _FRAME_MARKERS:
            rows, columns = (int.from_bytes(code[place + i : place + i + 2], "big") for i in (5, 7))
            return Codestream(rows, columns, code[place + 4]), code[place + 9]
        place += 2 + max(length, 2)
    raise UnreadableError("unreadable", "the compressed image does not state its size")


def _parse_jpeg_2000(code: bytes) -> tuple[Codestream, int]:
    """SIZ: marker, Lsiz, Rsiz, then the corners of the image and of the tiles in four bytes each, then components."""
    place = code.find(_START_2000) + 4
    if place < 4 or len(code) < place + 39:
        raise UnreadableError("unreadable", "the compressed image does not state its size")
    right, bottom, left, top = (int.from_bytes(code[place + i : place + i + 4], "big") for i in (4, 8, 12, 16))
    components = int.from_bytes(code[place + 36 : place + 38], "big")
    return Codestream(bottom - top, right - left, (code[place + 38] & 0x7F) + 1), components


def decode_gdcm(code: bytes, stated: Codestream, syntax: str, *, signed: bool) -> Integer[np.ndarray, "rows columns"]:
    """Decodes one frame of JPEG or JPEG-LS, which have no signs: if `signed`, the highest bit becomes the sign.

    pydicom's plugin for GDCM is not used: it returns uninitialized memory if decoding fails.
    """
    try:
        import gdcm
    except ImportError as error:
        raise UserError(f"JPEG and JPEG-LS need python-gdcm; {install_command('dicom')}") from error
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
