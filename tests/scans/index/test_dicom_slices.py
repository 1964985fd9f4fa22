"""Every encoding returns exactly the stored HU; headers with the defects of real files can be read."""

import io
import pickle
import runpy
import struct
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
from drawn_dicom import AXIAL, JPEG, SYNTAXES, image, saved
from hypothesis import given
from hypothesis import strategies as st
from pydicom.dataset import Dataset
from pydicom.encaps import encapsulate
from pydicom.uid import (
    CTImageStorage,
    DeflatedExplicitVRLittleEndian,
    EncapsulatedPDFStorage,
    EnhancedCTImageStorage,
    ExplicitVRLittleEndian,
    ImplicitVRLittleEndian,
    JPEG2000Lossless,
    JPEGLossless,
    JPEGLosslessSV1,
    RLELossless,
    SecondaryCaptureImageStorage,
)

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.index import dicom_slices, pixels
from normal_guidance.scans.index.dicom_slices import Header, exclusion, read_header
from normal_guidance.scans.index.pixels import parse_codestream, read_pixels
from normal_guidance.scans.index.problems import KINDS

SHAPE = (40, 36)


def values(bits: int, signed: bool, shape: tuple[int, ...] = SHAPE) -> np.ndarray:
    low, high = (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1) if signed else (0, 2**bits - 1)
    stored = np.random.default_rng(bits).integers(low, high + 1, shape).astype(np.int16 if signed else np.uint16)
    stored.flat[0], stored.flat[1] = low, high
    return stored


def assert_refused(content: bytes | Path, kind: str, *words: str) -> None:
    """Checks that the header is refused or, if it is good, the pixels."""
    with pytest.raises(UnreadableError) as caught:
        _ = read_header(content, "x.dcm"), read_pixels(content, "x.dcm")
    assert caught.value.kind == kind
    for word in words:
        assert word in caught.value.detail


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda uid: uid.name[:40])
@pytest.mark.parametrize(
    ("bits", "signed", "slope", "intercept"),
    [(12, False, 1, -1024), (12, True, 0.5, -1000), (16, False, 2, -3024.5), (16, True, 1, -1024)],
)
def test_golden_hu_of_every_transfer_syntax(syntax, bits, signed, slope, intercept):
    stored = values(bits, signed)
    file = image(stored, syntax=syntax, bits=bits, RescaleSlope=str(slope), RescaleIntercept=str(intercept))
    content = saved(file)

    for repair in (True, False):
        hu, notes = read_pixels(content, "x.dcm", repair=repair)

        expected = stored.astype(np.float64) * slope + intercept  # exact in float32, too
        small = slope == 1 and expected.min() >= -(2**15) and expected.max() < 2**15
        assert hu.dtype == (np.int16 if small else np.float32)
        assert np.array_equal(hu, expected[None])
        assert notes == []
    assert read_header(content, "x.dcm").transfer_syntax == syntax


@pytest.mark.parametrize(
    ("dtype", "lowest", "highest", "slope", "intercept", "expected"),
    [
        (np.uint16, 0, 65535, 1, -32768, np.int16),  # more than int16 holds, before the intercept
        (np.int16, -32768, 32767, 1, 0, np.int16),
        (np.int16, -32767, 32767, -1, 0, np.int16),
        (np.int16, -8192, 8192, 4, 0, np.float32),
        (np.int16, 0, 4, 0.25, 0, np.float32),
        (np.int32, 1_000_000, 1_000_100, 1, -1_000_000, np.int16),
        (np.int32, 0, 2**31 - 1, 1, 0, np.float32),
    ],
)
def test_hu_are_int16_only_where_that_is_exact(dtype, lowest, highest, slope, intercept, expected):
    stored = np.array([[lowest, highest], [(lowest + highest) // 2, lowest + 1]], dtype)
    file = image(stored, bits=8 * stored.itemsize, RescaleSlope=str(slope), RescaleIntercept=str(intercept))
    hu, _ = read_pixels(saved(file), "x.dcm")
    assert hu.dtype == expected
    assert np.array_equal(hu[0], (stored.astype(np.float64) * slope + intercept).astype(np.float32))


def element(tag: int, kind: bytes, value: bytes) -> bytes:
    return struct.pack("<HH2sH", tag >> 16, tag & 0xFFFF, kind, len(value)) + value


def _end_of_meta(content: bytes) -> int:
    return content.index(struct.pack("<HH", 0x0008, 0x0016))


SLOPE = element(0x00281053, b"DS", b"2 ")
ODD = {
    "an element after the pixels": lambda c: c + element(0xFFFCFFFC, b"LO", b"xx"),
    "the slope after the pixels": lambda c: c.replace(SLOPE, b"") + SLOPE,
    "a sequence without length": lambda c: (
        c[: _end_of_meta(c)] + bytes.fromhex("08000600 53510000 ffffffff feffdde0 00000000") + c[_end_of_meta(c) :]
    ),
    "no prefix": lambda c: c[132:],
}


@pytest.mark.parametrize("odd", ODD)
def test_pydicom_reads_files_that_are_not_plain(odd):
    stored = values(16, True) // 4
    content = ODD[odd](saved(image(stored, RescaleSlope="2", RescaleIntercept="-1024")))
    assert dicom_slices._read_plain(content, frozenset(pixels._TAGS)) is None
    hu, notes = read_pixels(content, "x.dcm")
    assert np.array_equal(hu[0], stored * 2 - 1024)
    assert notes == []


@given(st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4))
def test_a_damaged_header_is_read_as_pydicom_reads_it(changes):
    content = bytearray(saved(image(np.arange(16, dtype=np.int16).reshape(4, 4))))
    assert dicom_slices._read_plain(bytes(content), frozenset(pixels._TAGS)) is not None, "pydicom is not needed"
    for share, value in changes:
        content[128 + int(share * (len(content) - 129))] = value
    plain = dicom_slices._read_plain(bytes(content), frozenset(pixels._TAGS))
    if plain is not None:
        with dicom_slices.refusing():  # it warns of much
            slow = pydicom.dcmread(io.BytesIO(content), force=True, specific_tags=list(pixels._TAGS))
        for tag in pixels._TAGS:
            assert dicom_slices.raw(plain.dataset, tag) == dicom_slices.raw(slow, tag)


def test_only_the_chosen_decoders_are_used(monkeypatch):
    """pydicom decodes RLE, OpenJPEG JPEG 2000 and GDCM JPEG, whichever plugins are installed."""
    from pydicom.pixels.decoders.base import Decoder

    asked = {}
    original = Decoder.as_array

    def spy(self, *args, decoding_plugin="", **options):
        asked[self.UID] = decoding_plugin
        return original(self, *args, decoding_plugin=decoding_plugin, **options)

    monkeypatch.setattr(Decoder, "as_array", spy)
    for syntax in (RLELossless, JPEG2000Lossless, *JPEG):
        read_pixels(saved(image(values(12, True), syntax=syntax, bits=12)), "x.dcm")
    assert asked == {RLELossless: "pydicom", JPEG2000Lossless: "pylibjpeg"}


def test_unknown_transfer_syntaxes_and_missing_packages_are_named(monkeypatch):
    """Without the extra, a user learns what to install, and the file is not blamed."""
    file = image(values(16, False))
    file.file_meta.TransferSyntaxUID = "1.2.840.10008.1.2.4.51"
    file.PixelData = encapsulate([b"\xff\xd8\xff\xd9"])
    file["PixelData"].is_undefined_length = True
    assert_refused(saved(file), "unreadable", "x.dcm", "JPEG Extended")
    compressed = saved(image(values(16, True), syntax=JPEGLossless))
    monkeypatch.setitem(sys.modules, "gdcm", None)
    with pytest.raises(UserError, match=r"python-gdcm; pip install 'normal-guidance\[dicom\]'"):
        read_pixels(compressed, "x.dcm")
    monkeypatch.setitem(sys.modules, "openjpeg", None)
    with pytest.raises(UserError, match=r"pylibjpeg-openjpeg; pip install 'normal-guidance\[dicom\]'"):
        read_pixels(saved(image(values(16, True), syntax=JPEG2000Lossless)), "x.dcm")
    monkeypatch.setitem(sys.modules, "pydicom", None)
    with pytest.raises(UserError, match=r"pydicom; pip install 'normal-guidance\[dicom\]'"):
        runpy.run_path(dicom_slices.__file__)


def item(**tags: object) -> Dataset:
    made = Dataset()
    for name, value in tags.items():
        setattr(made, name, value)
    return made


def enhanced(stored: np.ndarray, syntax: str, planes=None) -> Dataset:
    file = image(stored, syntax=syntax)
    file.SOPClassUID = file.file_meta.MediaStorageSOPClassUID = EnhancedCTImageStorage
    for name in ("ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing", "SliceThickness"):
        delattr(file, name)
    del file.RescaleSlope, file.RescaleIntercept
    shared = item(
        PixelMeasuresSequence=[item(PixelSpacing=[0.7, 0.6], SliceThickness="3")],
        PlaneOrientationSequence=[item(ImageOrientationPatient=[1, 0, 0, 0, 1, 0])],
    )
    frames = [item(PlanePositionSequence=[item(ImagePositionPatient=[0, 0, 3 * k])]) for k in range(len(stored))]
    for k, frame in enumerate(frames):
        rescale = item(RescaleSlope=str(2**k), RescaleIntercept=str(-1024 + k))
        frame.PixelValueTransformationSequence = [rescale]
        if planes:
            frame.PlaneOrientationSequence = [item(ImageOrientationPatient=list(planes[k]))]
    if planes:
        del shared.PlaneOrientationSequence
    file.SharedFunctionalGroupsSequence, file.PerFrameFunctionalGroupsSequence = [shared], frames
    return file


@pytest.mark.parametrize("syntax", [ImplicitVRLittleEndian, DeflatedExplicitVRLittleEndian, RLELossless, *JPEG])
def test_enhanced_ct_with_positions_and_rescale_per_frame(syntax):
    stored = values(16, True, (3, *SHAPE))
    content = saved(enhanced(stored, syntax))
    hu, notes = read_pixels(content, "x.dcm")
    expected = np.stack([stored[k].astype(np.float64) * 2**k - 1024 + k for k in range(3)])
    assert np.array_equal(hu, expected)
    assert notes == []

    header = read_header(content, "x.dcm")
    assert header.frames == 3
    assert header.frame_positions == ((0, 0, 0), (0, 0, 3), (0, 0, 6))
    assert header.frame_orientation == header.orientation == AXIAL
    assert header.pixel_spacing == (0.7, 0.6)
    assert header.thickness == 3
    assert exclusion(header) is None


def test_frames_of_several_planes_are_refused_and_those_without_all_positions_have_none():
    stored = values(16, True, (2, *SHAPE))
    with pytest.raises(UnreadableError, match="mixed_orientation"):
        read_header(saved(enhanced(stored, ExplicitVRLittleEndian, planes=[AXIAL, (*AXIAL[:4], 0, -1)])), "x.dcm")
    nearly = enhanced(stored, ExplicitVRLittleEndian, planes=[AXIAL, (*AXIAL[:5], 1e-5)])
    assert read_header(saved(nearly), "x").frame_orientation[4] == 1
    del nearly.PerFrameFunctionalGroupsSequence[1].PlanePositionSequence
    assert read_header(saved(nearly), "x.dcm").frame_positions is None
    plain = saved(image(stored))
    assert (read_header(plain, "x.dcm").frame_positions, read_header(plain, "x.dcm").frames) == (None, 2)
    assert read_pixels(plain, "x.dcm")[0].shape == (2, *SHAPE)


def wrapped(hu: np.ndarray) -> np.ndarray:
    """HU as the wrong RSNA 2019 files store them: twelve bits of a negative number, declared as unsigned."""
    return (hu % 4096).astype(np.uint16)


HU = np.array([[-1000, -1, 0, 24], [1000, 2000, 3095, -500]])
SIGNED = np.array([[-1000, -1], [0, 2047]], np.int16)
UNEXTENDED = (SIGNED & 0x0FFF).astype(np.int16)  # 12 bits in 16: negative numbers look large
OVERLAY = np.array([[0x1001, 2], [3, 2047]], np.uint16)  # in an unused bit


@pytest.mark.parametrize(
    ("stored", "syntax", "expected", "kind", "words"),
    [
        (wrapped(HU), ExplicitVRLittleEndian, HU, "intercept", ["RescaleIntercept is 0: 3 of 8"]),
        (UNEXTENDED, ExplicitVRLittleEndian, SIGNED, "bits", ["BitsStored is 12 of 16", "2 of 4"]),
        (UNEXTENDED, RLELossless, SIGNED, "bits", ["BitsStored is 12 of 16", "2 of 4"]),
        (OVERLAY, ExplicitVRLittleEndian, OVERLAY & 0x0FFF, "bits", ["1 of 4"]),
    ],
)
def test_wrong_intercepts_and_bits_are_repaired_and_noted(stored, syntax, expected, kind, words):
    content = saved(image(stored, syntax=syntax, bits=12, RescaleIntercept="0"))
    hu, [(noted, detail)] = read_pixels(content, "x.dcm")
    assert noted == kind
    assert all(word in detail for word in words)
    untouched, notes = read_pixels(content, "x.dcm", repair=False)
    assert np.array_equal(untouched[0], stored)
    assert notes == []
    assert np.array_equal(hu[0], expected)


@pytest.mark.parametrize(
    ("stored", "options"),
    [
        (wrapped(HU), {"RescaleIntercept": "-1024"}),  # as it should be
        (wrapped(HU), {"RescaleIntercept": "-100"}),  # at the limit
        (wrapped(HU), {"RescaleSlope": "0.5"}),  # no integers in HU
        (wrapped(HU), {"bits": 16}),  # another width
        (HU.clip(-2048, 2047).astype(np.int16), {}),  # signed
        (wrapped(HU.clip(0)), {}),  # without negative values
    ],
)
def test_intercept_is_left_alone(stored, options):
    options = {"bits": 12, "RescaleSlope": "1", "RescaleIntercept": "0", **options}
    hu, notes = read_pixels(saved(image(stored, **options)), "x.dcm")
    assert np.array_equal(hu[0], stored * float(options["RescaleSlope"]) + float(options["RescaleIntercept"]))
    assert notes == []


@pytest.mark.parametrize(
    ("tags", "slope", "intercept"),
    [
        ({"RescaleSlope": None}, 1, -1024),
        ({"RescaleSlope": "0"}, 1, -1024),
        ({"RescaleIntercept": None}, 1, 0),
        ({"RescaleSlope": "1e30"}, 1, -1024),
        ({"RescaleIntercept": "-1e9"}, 1, 0),
    ],
)
def test_missing_or_impossible_rescale_is_noted(tags, slope, intercept):
    stored = values(16, True)
    hu, [(kind, detail)] = read_pixels(saved(image(stored, **tags)), "x.dcm")
    assert np.array_equal(hu[0], stored.astype(np.float32) * slope + intercept)
    assert kind == "no_rescale"
    assert f"read as {slope:g} and {intercept:g}" in detail


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda uid: uid.name[:40])
def test_header(syntax):
    file = image(values(12, False), syntax=syntax, bits=12, GantryDetectorTilt="-12.5", SeriesDescription="Schädel")
    file.SpecificCharacterSet = "ISO_IR 100"
    header = read_header(saved(file), "a/1.dcm")
    assert header == Header(
        file="a/1.dcm",
        sop_uid="1.2.3.4",
        series_uid="1.2.3",
        study_uid="1.2",
        patient_id="P1",
        modality="CT",
        image_type=("ORIGINAL", "PRIMARY", "AXIAL"),
        instance_number=7,
        rows=40,
        columns=36,
        frames=1,
        transfer_syntax=str(syntax),
        position=(-10.0, -20.5, 30.25),
        orientation=AXIAL,
        pixel_spacing=(0.5, 0.75),
        thickness=2.5,
        tilt=-12.5,
        description="Schädel",
        sop_class=str(CTImageStorage),
    )
    assert pickle.loads(pickle.dumps(header)) == header
    assert exclusion(header) is None


@pytest.mark.parametrize(
    ("value", "name"),
    [
        (b"-10\\-20.5\\30.25 ", "position"),
        (b"1\\0\\0\\0\\1\\0 ", "orientation"),
        (b"0.5\\0.75", "pixel_spacing"),
        (b"2.5 ", "thickness"),
        (b"7 ", "instance_number"),
    ],
)
@pytest.mark.parametrize("junk", [b"x", b"\\", b"nan", b"\xff"])
def test_values_that_are_no_numbers_are_none(value, name, junk):
    content = saved(image(values(16, True)))
    assert content.count(struct.pack("<H", len(value)) + value) == 1
    spoiled = (junk + b" " * len(value))[: len(value)]
    header = read_header(content.replace(value, spoiled), "x.dcm")
    assert getattr(header, name) is None
    assert header.rows == 40


CT = Header("x", modality="CT", orientation=AXIAL, image_type=("ORIGINAL", "PRIMARY", "AXIAL"))
DERIVED = ("DERIVED", "SECONDARY")


@pytest.mark.parametrize(
    ("header", "kind"),
    [
        (CT, None),
        (Header("x"), None),
        (Header("x", modality="MR"), "wrong_modality"),
        (Header("x", modality="CT", image_type=("ORIGINAL", "PRIMARY", "LOCALIZER")), "localizer"),
        (Header("x", modality="CT", image_type=DERIVED), "secondary_capture"),
        (Header("x", modality="CT", image_type=DERIVED, orientation=AXIAL), None),
        (Header("x", modality="CT", samples=3), "secondary_capture"),
        (Header("x", modality="OT", sop_class=SecondaryCaptureImageStorage), "secondary_capture"),
        (Header("x", modality="OT", sop_class=f"{SecondaryCaptureImageStorage}.2"), "secondary_capture"),
    ],
)
def test_exclusion(header, kind):
    found = exclusion(header)
    assert (found and found.kind) == kind
    assert kind is None or kind in KINDS


def test_what_has_no_pixels_is_no_image(tmp_path):
    pdf = image(values(16, True), Modality="OT")
    pdf.SOPClassUID = EncapsulatedPDFStorage
    for name in ("PixelData", "Rows", "Columns"):
        delattr(pdf, name)
    assert_refused(saved(pdf), "no_image", "Encapsulated PDF")
    for name, why in {"reportsi.dcm": "not a scan", "DICOMDIR": "no pixels", "rtplan.dcm": "not a scan"}.items():
        assert_refused(Path(pydicom.data.get_testdata_file(name)), "no_image", why)
    for content in (b"scan_id,label\nA17,1\n", b"PK\x03\x04" + b"\0" * 500, b"\0" * 500, b"\x08"):
        assert_refused(content, "no_image", "not a DICOM file")
    assert_refused(b"", "unreadable", "empty")
    assert_refused(tmp_path / "nowhere.dcm", "unreadable", "No such file")
    assert_refused(tmp_path, "unreadable", "directory")


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda uid: uid.name[:40])
def test_files_cut_off_are_refused(syntax):
    """Without decoding, native pixels that are missing show in the header: RSNA 2019 has such a file."""
    content = saved(image(values(16, True, (96, 96)), syntax=syntax))
    for share in (0.05, 0.6, 0.95):
        with pytest.raises(UnreadableError):
            read_pixels(content[: int(share * len(content))], "x.dcm")
    content = saved(image(values(16, True)))
    with pytest.raises(UnreadableError, match="pixels of 16 bits are 2,880 bytes, but the file has 2,7"):
        read_header(content[:-100], "x.dcm")


@pytest.mark.parametrize("syntax", SYNTAXES, ids=lambda uid: uid.name[:40])
def test_absurd_sizes_are_refused_before_allocating(syntax, monkeypatch):
    large = image(values(16, True), syntax=syntax)
    large.Rows = large.Columns = 65535
    many = image(values(16, True), syntax=syntax)
    many.NumberOfFrames = 2_000_000_000
    contents = saved(large), saved(many)
    monkeypatch.setattr(np, "empty", None)  # whoever allocates pixels fails otherwise
    assert_refused(contents[0], "unreadable", "65535 x 65535")
    assert_refused(contents[1], "unreadable", "2000000000 x 40 x 36")


@pytest.mark.parametrize("syntax", [RLELossless, JPEG2000Lossless, *JPEG])
def test_compressed_files_that_do_not_fit_their_header_are_refused(syntax):
    """GDCM would end the process, and OpenJPEG would allocate the size that the stream states."""
    assert_refused(saved(image(values(16, True, (2, *SHAPE)), syntax=syntax, NumberOfFrames=3)), "unreadable")
    if syntax != RLELossless:
        taller = saved(image(values(16, True), syntax=syntax, Rows=41))
        assert_refused(taller, "unreadable", "compressed image is 40 x 36, but the header says 41 x 36")
        file = image(values(16, True, (96, 96)), syntax=syntax)
        [code] = pydicom.encaps.generate_frames(file.PixelData, number_of_frames=1)
        file.PixelData = encapsulate([code[: len(code) // 2]])
        assert_refused(saved(file), "unreadable", "cut off")


def test_bombs_are_refused(monkeypatch):
    """510 kB became half a gigabyte of tiny elements, which took 90 s to parse."""
    content = saved(image(np.zeros((4096, 4096), np.int16), syntax=DeflatedExplicitVRLittleEndian))
    assert len(content) < 50_000
    assert_refused(content, "unreadable", "inflates to more than 16,777,216 bytes, the most for")
    noise = np.random.default_rng(0).integers(-(2**15), 2**15, (3000, 3000), np.int16)
    assert read_header(saved(image(noise, syntax=DeflatedExplicitVRLittleEndian)), "x.dcm").rows == 3000
    content = saved(image(np.zeros((256, 256), np.int16), syntax=JPEG2000Lossless))
    assert (read_pixels(content, "x.dcm")[0] == -1024).all()
    monkeypatch.setattr(pixels, "FREE_BYTES", 1000)
    assert_refused(content, "unreadable", "131,072 bytes")


STREAM = encapsulate([bytes.fromhex("ffd8 ffc3000b 10 0028 0024 01 01 11 00 ffd9")])


@pytest.mark.parametrize(
    ("tags", "kind", "word"),
    [
        ({"Rows": 0}, "no_image", "0 x 36"),
        ({"SamplesPerPixel": 3, "BitsAllocated": 8, "BitsStored": 8}, "unreadable", ""),
        ({"BitsAllocated": 1}, "unreadable", "BitsAllocated is 1"),
        ({"BitsStored": 17}, "unreadable", "BitsStored is 17"),
        # pydicom's plugin would return uninitialized memory.
        ({"syntax": JPEGLosslessSV1, "BitsAllocated": 8, "BitsStored": 8}, "unreadable", "16 bits in 8 bits"),
        ({"syntax": JPEGLosslessSV1, "PixelData": STREAM}, "unreadable", "GDCM cannot decode"),
    ],
)
def test_pixels_that_cannot_be_decoded_are_refused(tags, kind, word):
    content = saved(image(values(16, True), **tags))
    assert_refused(content, kind, word)
    with pytest.raises(UnreadableError, match=rf"{kind}: x\.dcm"):
        read_pixels(content, "x.dcm")


def test_pixels_called_compressed_and_nested_sequences_without_end_are_refused():
    content = saved(image(values(16, True)))
    long = content.replace(b"UI\x14\x001.2.840.10008.1.2.1\0", b"UI\x16\x001.2.840.10008.1.2.4.70")
    assert len(long) == len(content) + 2
    assert_refused(long[:140] + bytes([long[140] + 2]) + long[141:], "unreadable", "not encapsulated")
    depth = b"\x08\x00\x40\x11SQ\0\0\xff\xff\xff\xff\xfe\xff\x00\xe0\xff\xff\xff\xff" * 5000
    offset = content.index(b"\x10\x00\x20\x00LO")
    assert_refused(content[:offset] + depth + content[offset:], "unreadable", "RecursionError")
    # Group length is missing in a deflated file.
    content = saved(image(values(12, True), syntax=DeflatedExplicitVRLittleEndian, bits=12))
    assert_refused(content[:132] + content[144:], "unreadable", "(0002,0000)")


@pytest.mark.parametrize(
    ("code", "word"),
    [
        ("ffd8 ffd9", "does not state its size"),
        ("00000000 ffd9", "begins with 00000000"),
        ("ffd8 ffc3000b 08 0010 0010 03 01 11 00 ffd9", "3 components"),
        ("ffd8 ffc3000b 08 0010 0010 01 01 11 00", "no end marker"),
        ("ffd8 ffc3000b 08 0000 0010 01 01 11 00 ffd9", "states 0 x 16 pixels"),
        ("ff4fff51 002f0000 00000001000000020000000500000005" + 16 * "00" + "0001 0b0101 ffd9", "states -3 x -4 pix"),
    ],
)
def test_streams_that_are_refused(code, word):
    with pytest.raises(UnreadableError, match=word):
        parse_codestream(bytes.fromhex(code))
    # Other segments before the size are skipped.
    assert parse_codestream(bytes.fromhex("ffd8 ffe00004abcd ffc3000b 10 0203 0100 01 01 11 00 ffd9")) == (515, 256, 16)
