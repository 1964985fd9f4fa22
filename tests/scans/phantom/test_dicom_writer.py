"""Files are standard CT images that other software reads, with exactly the HU that were drawn."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pydicom
import pytest
from pydicom.uid import UID

from normal_guidance.scans.phantom.drafts import (
    ENCODINGS,
    UNEXTENDED,
    WRONG_INTERCEPT,
    Draft,
    Encoding,
    checksum,
    make_draft,
    short_name,
    uid_of,
)
from normal_guidance.scans.phantom.phantom_files import COMPRESSIONS, write_draft
from normal_guidance.scans.phantom.plan import plan

SIZE, SLICES = 32, 12

# PS3.3 A.3 with its modules; 2 may be empty, 1 must have a value.
TYPE_1 = [
    "SOPClassUID",
    "SOPInstanceUID",
    "StudyInstanceUID",
    "SeriesInstanceUID",
    "Modality",
    "FrameOfReferenceUID",
    "ImageType",
    "PixelSpacing",
    "ImageOrientationPatient",
    "ImagePositionPatient",
    "SamplesPerPixel",
    "PhotometricInterpretation",
    "Rows",
    "Columns",
    "BitsAllocated",
    "BitsStored",
    "HighBit",
    "PixelRepresentation",
    "PixelData",
    "RescaleIntercept",
    "RescaleSlope",
    "RescaleType",
]
TYPE_2 = [
    "PatientName",
    "PatientID",
    "PatientBirthDate",
    "PatientSex",
    "StudyDate",
    "StudyTime",
    "ReferringPhysicianName",
    "StudyID",
    "AccessionNumber",
    "SeriesNumber",
    "PositionReferenceIndicator",
    "Manufacturer",
    "InstanceNumber",
    "SliceThickness",
    "KVP",
    "AcquisitionNumber",
    "PatientPosition",
]


def make(seed: int = 0) -> Draft:
    """Random HU over the whole range, the hardest case."""
    one = plan("head", 1, seed=seed, slices=SLICES)[0]
    random = np.random.default_rng(seed)
    volume = random.integers(-1000, 2048, (one.slices, SIZE, SIZE)).astype(np.int16)
    volume[0, 0, :4] = (-1000, -1, 0, 2047)
    return make_draft(one, volume, "scan", "PHANTOM-0000")


def write(folder: Path, draft: Draft) -> list[pydicom.Dataset]:
    names = {image.uid: f"{number}.dcm" for number, image in enumerate(draft.files)}
    write_draft(folder, draft, names)
    return [pydicom.dcmread(folder / names[image.uid]) for image in draft.files]


def hu_of(dataset: pydicom.Dataset) -> np.ndarray:
    return dataset.pixel_array.astype(int) * int(dataset.RescaleSlope) + int(dataset.RescaleIntercept)


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
@pytest.mark.parametrize("compression", COMPRESSIONS)
def test_hu_come_back_from_every_transfer_syntax(tmp_path, compression, encoding):
    draft = make()
    draft.compression, draft.encoding = compression, encoding
    draft.images = draft.images[:2]
    for image, dataset in zip(draft.images, write(tmp_path, draft), strict=True):
        assert dataset.file_meta.TransferSyntaxUID == COMPRESSIONS[compression]
        assert np.array_equal(hu_of(dataset), image.hu)
        assert hu_of(dataset)[0, :4].tolist() == image.hu[0, :4].tolist()


@pytest.mark.parametrize("encoding", ENCODINGS, ids=str)
def test_files_are_standard_ct_images(tmp_path, encoding):
    draft = make()
    draft.encoding = encoding
    for number, dataset in enumerate(write(tmp_path, draft)):
        assert dataset.SOPClassUID == pydicom.uid.CTImageStorage
        assert dataset.file_meta.MediaStorageSOPInstanceUID == dataset.SOPInstanceUID
        assert all(name in dataset and dataset[name].value not in (None, "") for name in TYPE_1)
        assert all(name in dataset for name in TYPE_2)
        assert dataset.HighBit == dataset.BitsStored - 1
        assert len(dataset.ImageType) >= 3
        assert dataset.InstanceNumber == number + 1
        uids = [element.value for element in dataset if element.VR == "UI"]
        assert all(UID(uid).is_valid and len(uid) <= 64 for uid in uids)


def test_files_say_that_they_are_phantoms(tmp_path):
    dataset = write(tmp_path, make())[0]
    assert str(dataset.PatientName).startswith("PHANTOM")
    assert dataset.Manufacturer == "PHANTOM"
    assert dataset.QualityControlImage == "YES"


def test_positions_rise_by_the_spacing(tmp_path):
    draft = make()
    positions = np.array([dataset.ImagePositionPatient for dataset in write(tmp_path, draft)], float)
    np.testing.assert_allclose(np.diff(positions[:, 2]), draft.slice_spacing, atol=1e-4)
    assert (positions[:, :2] == positions[0, :2]).all()


def test_values_outside_twelve_bits_wrap_as_in_the_challenges():
    """By hand: -1000 in 12 bits is 4096 - 1000; the known repairs undo both."""
    hu = np.array([-1000, -1, 0, 60, 2047], np.int16)
    stored = WRONG_INTERCEPT.store(hu).astype(int)
    assert stored.tolist() == [3096, 4095, 0, 60, 2047]
    repaired = stored + 1000
    repaired[repaired >= 4096] -= 4096
    assert (repaired - 1000).tolist() == hu.tolist()
    words = UNEXTENDED.store(hu).view(np.int16)
    assert ((words << 4).astype(np.int16) >> 4).tolist() == hu.tolist()


def test_multi_frame_files_hold_all_slices(tmp_path):
    draft = make()
    draft.multi_frame = True
    write_draft(tmp_path, draft, {image.uid: "all.dcm" for image in draft.images})
    dataset = pydicom.dcmread(tmp_path / "all.dcm")
    assert dataset.SOPClassUID == pydicom.uid.LegacyConvertedEnhancedCTImageStorage
    shared, frames = dataset.SharedFunctionalGroupsSequence[0], dataset.PerFrameFunctionalGroupsSequence
    rescale = shared.PixelValueTransformationSequence[0]
    volume = dataset.pixel_array.astype(int) + int(rescale.RescaleIntercept)
    assert np.array_equal(volume, np.stack([image.hu for image in draft.images]))
    heights = [float(frame.PlanePositionSequence[0].ImagePositionPatient[2]) for frame in frames]
    np.testing.assert_allclose(heights, [image.position[2] for image in draft.images], atol=1e-5)


def test_uids_are_random_uuids():
    uid = uid_of(np.random.default_rng(0))
    number = int(uid.removeprefix("2.25."))
    assert number >> 76 & 0xF == 4  # version
    assert number >> 62 & 0x3 == 2  # variant
    assert int(short_name(uid), 16) == number % 16**12


def test_the_checksum_is_over_order_and_values():
    draft = make()
    assert checksum(draft.images) != checksum(draft.images[::-1])
    assert checksum(draft.images) == checksum(make().images)


def test_an_encoding_keeps_what_it_can_hold():
    assert Encoding(16, True, -1024).store(np.array([-1024, 3000], np.int16)).tolist() == [0, 4024]


@pytest.mark.parametrize("missing", ["pydicom", "gdcm"])
def test_what_is_not_installed_is_named(tmp_path, missing):
    code = (
        f"import sys; sys.modules[{missing!r}] = None\n"
        "from normal_guidance.scans.phantom.phantom_files import write_phantom\n"
        f"write_phantom('folder', {str(tmp_path / 'out')!r}, scans=1, size=32, slices=12, compression='jpeg-ls')\n"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "UserError" in result.stderr.splitlines()[-1]
    assert "pip install 'normal-guidance[dicom]'" in result.stderr
    assert not (tmp_path / "out").exists()
