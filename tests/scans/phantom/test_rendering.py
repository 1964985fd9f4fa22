"""Volumes look like scans, lesions are where the labels say and nowhere else, and they are subtle."""

from dataclasses import replace

import numpy as np
import pytest

from normal_guidance.scans.phantom.plan import ANATOMIES, LesionBlock, ScanPlan, plan
from normal_guidance.scans.phantom.rendering import HIGHEST, LOWEST, draw_look_alikes, render

SIZE = 96


def auroc(scores: np.ndarray, labels: np.ndarray) -> float:
    positive, negative = scores[labels == 1], scores[labels == 0]
    return float((positive[:, None] > negative).mean() + 0.5 * (positive[:, None] == negative).mean())


@pytest.fixture(scope="module")
def volumes() -> dict[str, np.ndarray]:
    return {name: render(plan(name, 1, seed=1, positive=0.0, slices=32)[0], SIZE) for name in ANATOMIES}


@pytest.mark.slow(but=("head-epidural", "chest-left", "abdomen-Bowel"))
@pytest.mark.parametrize("kind", [(name, kind) for name, one in ANATOMIES.items() for kind in one.kinds], ids="-".join)
def test_lesions_are_in_all_slices_of_their_block_and_in_no_other(kind):
    anatomy, lesion = kind
    slices = 24
    low, high = (round(edge * slices) for edge in ANATOMIES[anatomy].organ)
    places = ((low + 1, low + 3), (slices // 3, slices // 2 + 1), (high - 3, high - 1))
    for seed in range(2):
        one = ScanPlan(0, 0, anatomy, slices, tuple(LesionBlock(*place, lesion) for place in places), seed)
        change = render(one, 64).astype(int) - render(replace(one, blocks=()), 64)
        shown = np.abs(change).max((1, 2)) > 5
        assert shown.tolist() == one.slice_labels.astype(bool).tolist()
        assert (change != 0).mean((1, 2)).max() < 0.15  # a small part of the picture


@pytest.mark.slow(but="head")
@pytest.mark.parametrize("anatomy", ANATOMIES)
def test_contrast_is_an_option(anatomy):
    one = plan(anatomy, 1, seed=3, positive=1.0, slices=16)[0]
    without = render(replace(one, blocks=()), 64).astype(int)
    changes = [np.abs(render(one, 64, contrast=value) - without).sum() for value in (0.0, 0.5, 1.0, 2.0)]
    assert changes[0] == 0
    assert changes == sorted(changes)


@pytest.mark.parametrize("anatomy", ANATOMIES)
def test_volumes_are_plausible_hu(volumes, anatomy):
    volume = volumes[anatomy]
    assert volume.dtype == np.int16
    assert LOWEST <= volume.min() < -950
    assert 300 < volume.max() <= HIGHEST
    middle = volume[16]
    assert 0.05 < ((middle > 0) & (middle < 120)).mean() < 0.7  # soft tissue
    assert 0.005 < (middle > 300).mean() < 0.2  # bone and contrast medium
    assert (middle[:4] < -900).all()  # air above the patient


def test_look_alikes_do_not_depend_on_the_label():
    for anatomy in ANATOMIES:
        plans = (plan(anatomy, 60, seed=6, positive=share) for share in (1.0, 0.0))
        positive, negative = ([draw_look_alikes(scan) for scan in scans] for scans in plans)
        assert positive == negative
        counts = list(map(len, positive))
        assert 1.5 < np.mean(counts) < 2.5
        assert min(counts) == 0  # some scans have none, so having one does not reveal the label either


def test_bleeding_can_be_found_but_not_by_the_brightest_pixel():
    """A reader that smooths and looks for the density of blood inside the skull beats chance; a naive one does not."""
    plans = plan("head", 30, seed=8, positive=0.5, slices=16)
    labels = np.array([one.label for one in plans])
    smart, naive = [], []
    for one in plans:
        volume = render(one, 64).astype(np.float32)
        near = [np.roll(volume, (y, x), (1, 2)) for y in (-1, 0, 1) for x in (-1, 0, 1)]
        smooth, lowest, highest = np.mean(near, 0), np.min(near, 0), np.max(near, 0)
        blood = (smooth > 48) & (smooth < 75) & (lowest > 20) & (highest < 110)
        smart.append(blood[5:14].mean())
        naive.append(volume.max())
    assert auroc(np.array(smart), labels) > 0.7
    assert 0.2 < auroc(np.array(naive), labels) < 0.8
