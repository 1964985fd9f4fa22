"""The letters at the edges of a slice, from DICOM's axes: x to the left, y to the back, z to the head."""

import numpy as np
import pytest
from highdicom.spatial import get_closest_patient_orientation

from normal_guidance.scans.index.geometry import orientation_letters

X, Y, Z = np.eye(3).tolist()


def turned(degrees: float) -> tuple[float, ...]:
    """Axial rows, and columns that lean from the back towards the feet, as with a tilted gantry."""
    angle = np.radians(degrees)
    return (1.0, 0.0, 0.0, 0.0, float(np.cos(angle)), float(-np.sin(angle)))


@pytest.mark.parametrize(
    ("orientation", "edges"),
    [
        ((*X, *Y), "R L A P"),  # axial, as radiologists hang it: the patient's right is on the left
        ((-1.0, 0.0, 0.0, *Y), "L R A P"),  # axial, mirrored
        ((*X, 0.0, -1.0, 0.0), "R L P A"),  # axial, upside down: a prone patient's scan
        ((*X, 0.0, 0.0, -1.0), "R L H F"),  # coronal
        ((*Y, 0.0, 0.0, -1.0), "A P H F"),  # sagittal
        ((0.0, -1.0, 0.0, 0.0, 0.0, -1.0), "P A H F"),  # sagittal, mirrored
        ((*X, *Z), "R L F H"),  # coronal, upside down
        (turned(15), "R L A P"),  # a gantry tilt is still called axial
        (turned(30), "R L AH PF"),  # oblique
        (turned(60), "R L HA FP"),
        ((*X, 0.0, 2.0, 0.0), "R L A P"),  # not of unit length
    ],
)
def test_edges_name_the_side_that_they_show(orientation, edges):
    assert " ".join(orientation_letters(orientation)) == edges


@pytest.mark.parametrize(
    "unknown",
    [None, (), (1.0, 0.0, 0.0), (0.0,) * 6, (*X, *X), (float("nan"), 0.0, 0.0, *Y), (float("inf"), 0.0, 0.0, *Y)],
)
def test_nothing_is_shown_where_the_orientation_is_unknown(unknown):
    assert orientation_letters(unknown) is None


def test_the_first_letters_are_highdicoms():
    """Of any orientation: highdicom names the nearest axis only, as long as rows and columns have different ones."""
    random, compared = np.random.default_rng(0), 0
    for _ in range(200):
        axes, _ = np.linalg.qr(random.normal(size=(3, 3)))
        affine = np.eye(4)
        affine[:3, :3] = axes
        row, column, _ = (one.value for one in get_closest_patient_orientation(affine))
        if len(set(np.abs(axes).argmax(0))) == 3:
            compared += 1
            found = orientation_letters((*axes[:, 0].tolist(), *axes[:, 1].tolist()))
            assert (found.right[0], found.bottom[0]) == (row, column)
    assert compared > 50
