"""A scan whose values are not those of the training scans is refused, whatever its header says, and others are not."""

from dataclasses import replace
from pathlib import Path

import nibabel
import numpy as np
import pytest

from normal_guidance.clinic import NotPredicted, PredictOptions, ScanPrediction, predict
from normal_guidance.fit.bundle import Bundle, why_not_values
from normal_guidance.scans.index.manifest import GRID, ScanRow, ValueRange, Values, sample_values, values_of
from normal_guidance.scans.index.volumes import read_volume
from small_bundle import WINDOW

HERE = PredictOptions(workers=0)
BOTH = ("dicom", "nifti")
HEAD = ValueRange((-1024.0, -1000.0), (900.0, 1500.0), 1200)
ADC = ValueRange((0.0, 20.0), (2000.0, 3500.0), 900)


def row(kind: str, modality: str) -> ScanRow:
    return ScanRow("A17", "P1", 0, None, kind, ("1",), (0,), (0.0,), 8, 8, modality=modality)


def t1_like(hu: np.ndarray) -> np.ndarray:
    """Air is black and noisy, tissue bright, bone dark."""
    noise = np.random.default_rng(1).normal(0, 12, hu.shape)
    return np.where(hu < -300, 15, np.where(hu > 300, 60, 600 + 4 * hu)) + np.abs(noise)


IMAGES = {
    "t1": t1_like,
    "windowed": lambda hu: (255 * ((np.clip(hu, *WINDOW) - WINDOW[0]) / (WINDOW[1] - WINDOW[0]))).astype(np.uint8),
    "mask": lambda hu: (hu > 20).astype(np.uint8),
    "stored": lambda hu: hu + 1024,
}


def write(path: Path, volume: np.ndarray, slice_spacing: float) -> Path:
    """Slices as NIfTI, axial, from the feet to the head."""
    path.parent.mkdir(parents=True, exist_ok=True)
    affine = np.diag([-1.0, -1.0, slice_spacing, 1.0])
    image = nibabel.Nifti1Image(volume.transpose(2, 1, 0).astype(np.float32), affine)
    image.set_qform(affine, 1)
    nibabel.save(image, path)
    return path


@pytest.fixture
def hu(trained) -> np.ndarray:
    slices, _ = read_volume(trained.manifest[0], trained.manifest.root)
    return slices.astype(np.float64)


@pytest.fixture(params=[True, False], ids=["recorded", "not recorded"])
def known(bundle, request) -> Bundle:
    """A model that recorded the values of its training scans, or not."""
    return bundle if request.param else replace(bundle, expects=replace(bundle.expects, values=None))


@pytest.mark.usefixtures("tiny_encoder")
@pytest.mark.parametrize("image", IMAGES)
def test_what_is_not_ct_in_hu_is_refused(trained, known, hu, tmp_path, image):
    file = write(tmp_path / f"{image}.nii.gz", IMAGES[image](hu), trained.manifest[0].slice_spacing)
    (outcome,) = predict(file, known, options=HERE)
    assert isinstance(outcome, NotPredicted)
    assert outcome.reason.kind == "unsuitable"
    assert ("different values" if image == "mask" else "lowest values") in outcome.reason.detail
    (forced,) = predict(file, known, options=replace(HERE, force=True))
    assert isinstance(forced, ScanPrediction)
    assert any(text.startswith("Forced: it") for text in forced.cautions)


@pytest.mark.usefixtures("tiny_encoder")
def test_ct_in_hu_is_predicted_also_with_padding(trained, known, hu, tmp_path):
    hu[:, :6] = hu[:, -6:] = -3024  # outside of a round field of view
    file = write(tmp_path / "ct.nii.gz", hu, trained.manifest[0].slice_spacing)
    (outcome,) = predict(file, known, options=HERE)
    assert isinstance(outcome, ScanPrediction), outcome.reason
    assert outcome.cautions == ()


def test_a_model_knows_the_values_of_its_training_scans(trained, bundle):
    volumes = [(read_volume(scan, trained.manifest.root)[0], scan.modality) for scan in trained.manifest]
    measured = [values_of(sample_values(volume), modality) for volume, modality in volumes]
    recorded = bundle.expects.values
    for name in ("low", "high"):
        ends = np.percentile([getattr(values, name) for values in measured], (1, 99))
        assert getattr(recorded, name) == pytest.approx(ends, abs=1e-3)
    assert recorded.distinct == int(np.percentile([values.distinct for values in measured], 1))


@pytest.mark.parametrize(
    ("known", "modality", "values", "any_scale", "refused"),
    [
        (HEAD, "CT", Values(-1024.0, 3071.0, 2000), False, ()),  # metal
        (HEAD, "CT", Values(-600.0, 900.0, 900), False, ()),  # a narrow field of view
        (HEAD, "CT", Values(-120.0, 900.0, 900), False, BOTH),  # no air
        (HEAD, "CT", Values(-1024.0, 150.0, 900), False, BOTH),  # no bone: 1,024 were subtracted twice
        (replace(HEAD, low=(-1024.0, -150.0)), "CT", Values(0.0, 900.0, 900), False, BOTH),
        (HEAD, "CT", Values(-1024.0, 1200.0, 40), False, BOTH),  # few values
        (ADC, "MR", Values(0.0, 2500.0, 700), False, ()),
        (ADC, "MR", Values(-30.0, 9000.0, 700), False, ()),  # another scanner
        (ADC, "MR", Values(0.0, 255.0, 256), False, BOTH),
        (ADC, "MR", Values(0.0, 255.0, 256), True, ()),  # the model sees percentiles alone
        (ADC, "MR", Values(-1000.0, 1200.0, 1500), True, BOTH),  # CT
        (ADC, "MR", Values(0.0, 1.0, 2), True, BOTH),  # a mask
        (None, "CT", Values(0.0, 2500.0, 1500), False, ("nifti",)),  # headers of DICOM are trusted
        (None, "MR", Values(0.0, 2500.0, 1500), False, ()),
        (None, "MR", Values(0.0, 1.0, 2), False, ("nifti",)),
    ],
)
def test_rules(known, modality, values, any_scale, refused):
    for kind in BOTH:
        reasons = why_not_values(known, row(kind, modality), values, any_scale=any_scale)
        assert bool(reasons) == (kind in refused)


def test_values_are_those_of_all_pixels():
    random = np.random.default_rng(3)
    hu = random.normal(0, 300, (20, 4 * GRID, 5 * GRID)).astype(np.float32)
    low, high = np.percentile(hu, (0.5, 99.5))
    values = values_of(sample_values(hu), "MR")
    assert (values.low, values.high) == (pytest.approx(low, rel=0.05), pytest.approx(high, rel=0.05))
    assert values.distinct > 10_000
