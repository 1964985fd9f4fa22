"""The letters at the edges of slices, beside highdicom's own."""

import numpy as np
import pytest
from highdicom.spatial import get_closest_patient_orientation

from normal_guidance.clinical.orientation import directions, edges

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
CORONAL = (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)
SAGITTAL = (0.0, 1.0, 0.0, 0.0, 0.0, -1.0)
PRONE = (-1.0, 0.0, 0.0, 0.0, -1.0, 0.0)
FEET_FIRST = (-1.0, 0.0, 0.0, 0.0, 1.0, 0.0)


@pytest.mark.parametrize(
    ("orientation", "left", "right", "top", "bottom"),
    [
        (AXIAL, "R", "L", "A", "P"),
        (CORONAL, "R", "L", "H", "F"),
        (SAGITTAL, "A", "P", "H", "F"),
        (PRONE, "L", "R", "P", "A"),
        (FEET_FIRST, "L", "R", "A", "P"),
    ],
)
def test_edges_as_on_a_light_box(orientation, left, right, top, bottom):
    assert edges(orientation) == (left, right, top, bottom)


def test_the_first_letters_are_highdicoms():
    """Of any orientation: highdicom names the nearest axis only, as long as rows and columns have different ones."""
    random, compared = np.random.default_rng(0), 0
    for _ in range(200):
        axes, _ = np.linalg.qr(random.normal(size=(3, 3)))
        affine = np.eye(4)
        affine[:3, :3] = axes
        row, column, _ = (one.value for one in get_closest_patient_orientation(affine))
        nearest = np.abs(axes).argmax(0)
        if len(set(nearest)) == 3:
            compared += 1
            found = directions((*axes[:, 0], *axes[:, 1]))
            assert (found[0][0], found[1][0]) == (row, column)
    assert compared > 50


def test_a_small_tilt_is_not_named_and_a_larger_one_is():
    small, large = np.deg2rad(5), np.deg2rad(15)
    assert directions((1.0, 0.0, 0.0, 0.0, np.cos(small), -np.sin(small))) == ("L", "P")
    assert directions((1.0, 0.0, 0.0, 0.0, np.cos(large), -np.sin(large))) == ("L", "PF")
