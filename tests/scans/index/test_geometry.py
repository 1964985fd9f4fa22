"""Slices are ordered along the body, whatever the files' order, numbers and names, and problems are reported.

Of several acquisitions in one series one is kept, whatever tells them apart; interleaved slices stay together.
"""

import math
import random
import re
from dataclasses import replace

import numpy as np
import pytest
from highdicom.spatial import get_closest_patient_orientation
from hypothesis import given
from hypothesis import strategies as st

from normal_guidance.scans.index.dicom_slices import Header
from normal_guidance.scans.index.geometry import (
    ATTRIBUTES,
    DUPLICATE_MM,
    GAP_STEPS,
    Ordered,
    natural,
    order_slices,
    orientation_letters,
)
from normal_guidance.scans.index.problems import KINDS

AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
CORONAL = (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)


def header(number: int, z: float = 0.0, **values) -> Header:
    about = {"rows": 16, "columns": 16, "pixel_spacing": (0.5, 0.5), "orientation": AXIAL, "instance_number": number}
    return Header(**{"file": f"{number}.dcm", "position": (-100.0, -90.0, z), **about, **values})


def stack(*heights: float) -> list[Header]:
    return [header(number, z) for number, z in enumerate(heights, start=1)]


def files(ordered: Ordered) -> list[str]:
    return [file.removesuffix(".dcm") for file, _ in ordered.slices]


def kinds(ordered: Ordered) -> list[str]:
    kinds = [finding.kind for finding in ordered.findings]
    assert set(kinds) <= KINDS.keys()
    return kinds


def turned_axes(turn: np.ndarray) -> tuple[float, ...]:
    return tuple(np.concatenate([turn[:, 0], turn[:, 1]]).tolist())


def rotation(axis: np.ndarray, degrees: float) -> np.ndarray:
    """Rodrigues' formula."""
    x, y, z = axis / np.linalg.norm(axis)
    cross = np.array([[0, -z, y], [z, 0, -x], [-y, x, 0]])
    angle = math.radians(degrees)
    return np.eye(3) + math.sin(angle) * cross + (1 - math.cos(angle)) * cross @ cross


@given(
    st.integers(0, 2**32),
    st.integers(2, 30),
    st.floats(0.5, 10),
    st.tuples(*[st.floats(-1, 1)] * 3).filter(lambda axis: sum(map(abs, axis)) > 0.1),
    st.floats(0, 360),
)
def test_any_shuffled_stack_in_any_direction_is_put_in_order(seed, count, step, axis, degrees):
    turn = rotation(np.array(axis), degrees)
    places = [tuple((turn[:, 2] * step * k).tolist()) for k in range(count)]
    axes = turned_axes(turn)
    headers = [header(9, file=f"{k}.dcm", position=place, orientation=axes) for k, place in enumerate(places)]
    random.Random(seed).shuffle(headers)
    ordered = order_slices(headers)
    assert files(ordered) == [str(k) for k in range(count)]
    assert (ordered.located, ordered.findings) == (True, ())
    np.testing.assert_allclose(np.diff(ordered.positions), step, atol=2e-3)
    assert ordered.spacing == pytest.approx(step, abs=2e-3)


@given(st.permutations(range(8)))
def test_what_is_said_does_not_depend_on_the_order_of_the_files(order):
    headers = stack(0.0, 5.0, 5.0, 15.0, 20.0, 25.0, 30.0, 35.0)
    assert order_slices([headers[place] for place in order]) == order_slices(headers)


def unplaced(**damage) -> list[Header]:
    first, second, third = stack(0.0, 5.0, 10.0)
    return [third, replace(second, **damage), first]


BY_NUMBER = "missing or impossible in 1 of 3 .*2.dcm.*ordered by InstanceNumber"
NUMBERLESS = [header(0, file=f"{name}.dcm", position=None, instance_number=None) for name in ("b10", "b9", "a11")]


@pytest.mark.parametrize(
    ("headers", "order", "kind", "says"),
    [
        (unplaced(position=None), ["1", "2", "3"], "no_position", f"ImagePositionPatient is {BY_NUMBER}"),
        (
            unplaced(position=(0.0, 0.0, math.nan)),
            ["1", "2", "3"],
            "no_position",
            f"ImagePositionPatient is {BY_NUMBER}",
        ),
        (unplaced(orientation=None), ["1", "2", "3"], "no_position", f"ImageOrientationPatient is {BY_NUMBER}"),
        (
            unplaced(orientation=(1.0, 0.0, 0.0, 1.0, 0.0, 0.0)),
            ["1", "2", "3"],
            "no_position",
            f"Orientation.* {BY_NUMBER}",
        ),
        (
            unplaced(orientation=(1.0, 0.0, 0.0, 0.0, math.inf, 0.0)),
            ["1", "2", "3"],
            "no_position",
            f"Orientation.* {BY_NUMBER}",
        ),
        # in the direction of the known positions
        ([*stack(15.0, 10.0, 5.0), header(4, position=None)], ["4", "3", "2", "1"], "no_position", "descending"),
        (stack(7.0, 7.0, 7.0), ["1", "2", "3"], "no_position", "all 3 slices are at 7 mm"),
        (NUMBERLESS, ["a11", "b9", "b10"], "no_order", "ordered by file name"),  # which counts the numbers in it
        (stack(3.0), ["1"], "one_slice", "no other slice"),
    ],
)
def test_the_order_where_positions_do_not_tell(headers, order, kind, says):
    ordered = order_slices(headers)
    assert (files(ordered), kinds(ordered), ordered.spacing) == (order, [kind], None)
    assert re.search(says, "".join(ordered.findings[0]))
    assert ordered.located == (kind == "one_slice")
    assert ordered.located or ordered.positions == tuple(range(len(order)))


@given(st.lists(st.text("a0129²٣ ", max_size=12)))
def test_any_names_can_be_sorted(names):
    in_order = sorted(names, key=natural)
    in_order.reverse()
    assert sorted(in_order, key=natural) == in_order[::-1]
    assert sorted(in_order) == sorted(names)


def test_frames_are_slices():
    places = tuple((0.0, 0.0, z) for z in (10.0, 0.0, 5.0))
    one = header(1, frames=3, frame_positions=places, frame_orientation=AXIAL, position=places[0])
    ordered = order_slices([one])
    assert ordered.slices == (("1.dcm", 1), ("1.dcm", 2), ("1.dcm", 0))
    assert ordered.positions == (0.0, 5.0, 10.0)
    assert kinds(ordered) == ["multi_frame"]
    unplaced = order_slices([replace(one, frame_positions=None)])
    assert unplaced.slices == (("1.dcm", 0), ("1.dcm", 1), ("1.dcm", 2))
    assert [finding.action for finding in unplaced.findings] == ["each frame is a slice", "ordered by frame number"]


def test_of_duplicates_the_lowest_instance_number_stays():
    ordered = order_slices([header(3, 5.0), header(2, 5.0 + DUPLICATE_MM / 2), header(1, 0.0), header(4, 10.0)])
    assert files(ordered) == ["1", "2", "4"]
    (finding,) = ordered.findings
    assert finding[1:] == ("3.dcm", "duplicate", "same position as 2.dcm: 5.005 mm", "left out")
    assert files(order_slices([header(1, 0.0), header(2, 0.1), header(3, 0.2)])) == ["1", "2", "3"]


def test_each_gap_is_said_with_its_neighbours_and_two_spacings_are_uneven():
    ordered = order_slices(stack(0.0, 5.0, 10.0, 20.0, 25.0, 30.0, 50.0, 55.0, 60.0))
    assert [finding[1:] for finding in ordered.findings] == [
        ("4.dcm", "gap", "10 mm from 3.dcm to 4.dcm, usually 5 mm: 1 missing", "kept"),
        ("7.dcm", "gap", "20 mm from 6.dcm to 7.dcm, usually 5 mm: 3 missing", "kept"),
    ]
    just_below = 15.0 + GAP_STEPS * 5.0 - 0.01
    assert kinds(order_slices(stack(0.0, 5.0, 10.0, 15.0, just_below, just_below + 5, just_below + 10))) == ["uneven"]
    (finding,) = order_slices(stack(0.0, 2.5, 5.0, 7.5, 10.0, 15.0, 20.0, 25.0)).findings
    assert finding[1:] == ("", "uneven", "steps of 2.5 to 5 mm, usually 2.5 mm", "kept")
    assert kinds(order_slices(stack(0.0, 5.0, 10.2, 15.0))) == []  # 4 %: rounding of a table's steps


@pytest.mark.parametrize(("degrees", "expected"), [(0.5, []), (-0.5, []), (12.0, ["tilt"]), (-20.0, ["tilt"])])
def test_tilt_is_the_angle_between_normal_and_line_of_positions(degrees, expected):
    """A tilted gantry: slices are turned about the x axis, but the table moves along z."""
    axes = turned_axes(rotation(np.array([1.0, 0, 0]), degrees))
    ordered = order_slices([header(k, 5.0 * k, orientation=axes, tilt=degrees) for k in range(5)])
    assert kinds(ordered) == expected
    assert files(ordered) == ["0", "1", "2", "3", "4"]
    assert ordered.spacing == pytest.approx(5 * math.cos(math.radians(degrees)), abs=2e-3)
    if expected:
        assert f"{abs(degrees):.1f} degrees" in ordered.findings[0].detail
        assert f"GantryDetectorTilt {degrees:g}" in ordered.findings[0].detail


@pytest.mark.parametrize(
    ("values", "kind", "says"),
    [
        ({"orientation": CORONAL}, "mixed_orientation", "orientation 1\\0\\0\\0\\0\\-1, but most slices"),
        ({"rows": 8}, "mixed_size", "8 x 16 pixels of 0.5 x 0.5 mm, but most slices"),
        ({"columns": 32}, "mixed_size", "16 x 32 pixels of 0.5 x 0.5 mm, but most slices"),
        ({"pixel_spacing": (0.5, 0.7)}, "mixed_size", "16 x 16 pixels of 0.5 x 0.7 mm, but most slices"),
    ],
)
def test_the_rarer_orientation_and_size_are_left_out(values, kind, says):
    ordered = order_slices([header(9, 15.0, **values), *stack(0.0, 5.0, 10.0)])
    assert files(ordered) == ["1", "2", "3"]
    (finding,) = ordered.findings
    assert (finding.file, finding.kind, finding.action) == ("9.dcm", kind, "left out")
    assert finding.detail.startswith(says)


@given(
    st.lists(
        st.fixed_dictionaries(
            {
                "file": st.text("ab1/.", min_size=1, max_size=4),
                "instance_number": st.none() | st.integers(-5, 5),
                "rows": st.integers(0, 2),
                "position": st.none() | st.tuples(*[st.floats()] * 3),
                "orientation": st.none() | st.just(AXIAL) | st.tuples(*[st.floats()] * 6),
                "pixel_spacing": st.none() | st.tuples(*[st.floats()] * 2),
            }
        ),
        min_size=1,
        max_size=6,
        unique_by=lambda header: header["file"],
    )
)
def test_whatever_headers_say_there_is_an_order(values):
    headers = [Header(**fields) for fields in values]
    ordered = order_slices(headers)
    assert 1 <= len(ordered.slices) == len(ordered.positions) <= len(headers)
    assert list(ordered.positions) == sorted(ordered.positions)
    left_out = [finding for finding in ordered.findings if finding.action == "left out"]
    assert len(ordered.slices) + len(left_out) == len(headers)


FIELD_OF = {
    "TemporalPositionIdentifier": ("temporal_position", (1, 2)),
    "AcquisitionNumber": ("acquisition", (4, 5)),
    "DiffusionBValue": ("b_value", (0.0, 800.0)),
    "EchoTime": ("echo_time", (20.0, 80.0)),
    "acquisition time": ("acquired", ("20261118101500", "20261118101700")),
}


def phase(name: str, heights: list[float], first: int = 1, **values) -> list[Header]:
    named = [(number, z, f"{name}{number}") for number, z in enumerate(heights, start=first)]
    return [header(number, z, file=f"{sop}.dcm", sop_uid=sop, **values) for number, z, sop in named]


def ordered_of(*parts: list[Header]) -> Ordered:
    """The slices of all parts in order, shuffled before."""
    slices = [slice_header for part in parts for slice_header in part]
    random.Random(1).shuffle(slices)
    return order_slices(slices)


def names(ordered: Ordered) -> set[str]:
    return {file[0] for file, _ in ordered.slices}


def heights(count: int, step: float = 5.0, start: float = 0.0) -> list[float]:
    return [start + step * place for place in range(count)]


@pytest.mark.parametrize("attribute", ATTRIBUTES)
@pytest.mark.parametrize("shift", [0.0, 0.3, 2.5])
def test_one_of_two_phases_is_kept(attribute, shift):
    field, (early, late) = FIELD_OF[attribute]
    later = phase("b", heights(12, start=shift), **{field: late})
    ordered = ordered_of(later, phase("a", heights(12), **{field: early}))
    assert names(ordered) == {"a"}
    assert len(ordered.slices) == 12
    assert kinds(ordered) == ["several_acquisitions"]
    assert attribute in ordered.findings[0].detail


NOWHERE = {"position": None, "orientation": None}


def each(name: str, value_of) -> list[Header]:
    return [replace(item, **value_of(item.instance_number)) for item in phase(name, heights(12))]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        # the longer phase
        (phase("b", heights(12), acquisition=2), phase("a", heights(8), acquisition=1), "b"),
        # a time for every slice
        (each("a", lambda n: {"acquired": f"1015{n:02d}"}), each("b", lambda n: {"acquired": f"1016{n:02d}"}), "a"),
        # step and shoot: the number goes on from slice to slice, through both phases
        (each("a", lambda n: {"acquisition": n}), each("b", lambda n: {"acquisition": n + 12}), "a"),
        # without positions: restarting numbers
        (phase("a", heights(12), acquisition=1, **NOWHERE), phase("b", heights(12), acquisition=2, **NOWHERE), "a"),
        # MR: odd slices first, then even ones, with a time and a number of their own
        (
            phase("a", heights(6, 10.0), acquisition=1, acquired="20261118101500"),
            phase("b", heights(6, 10.0, 5.0), 7, acquisition=2, acquired="20261118101600"),
            "ab",
        ),
        # a head in two blocks, thin below and thick above, that share a slice
        (phase("a", heights(8, 2.5), acquisition=1), phase("b", heights(12, 5.0, 17.5), 9, acquisition=2), "ab"),
    ],
    ids=["longer", "times", "numbers", "nowhere", "interleaved", "blocks"],
)
def test_phases_are_told_apart_and_slices_of_one_body_stay_together(first, second, kept):
    ordered = ordered_of(first, second)
    assert names(ordered) == set(kept)
    of_phases = {"several_acquisitions", "mixed_acquisitions"} & set(kinds(ordered))
    assert of_phases == (set() if kept == "ab" else {"several_acquisitions"})


def test_phases_that_nothing_tells_apart_are_reported_as_mixed_but_copies_are_duplicates():
    ordered = ordered_of(phase("a", heights(12)), phase("b", heights(12)))
    assert kinds(ordered)[0] == "mixed_acquisitions"
    assert "24 slices at 12 positions" in ordered.findings[0].detail
    copies = [header(n, z, file=f"copy{n}.dcm", sop_uid=f"a{n}") for n, z in enumerate(heights(12), start=1)]
    assert "mixed_acquisitions" not in kinds(order_slices(phase("a", heights(12)) + copies))
    again = header(13, 25.0, file="b13.dcm", sop_uid="b", acquisition=2)
    assert kinds(order_slices([*phase("a", heights(12), acquisition=1), again])) == ["duplicate"]


X, Y, Z = np.eye(3).tolist()


def turned(degrees: float) -> tuple[float, ...]:
    """Axial rows, and columns that lean from the back towards the feet, as with a tilted gantry."""
    angle = np.radians(degrees)
    return (1.0, 0.0, 0.0, 0.0, float(np.cos(angle)), float(-np.sin(angle)))


@pytest.mark.parametrize(
    ("orientation", "edges"),
    [
        ((*X, *Y), "R L A P"),  # axial, as radiologists hang it: the patient's right is on the left
        ((*X, 0.0, -1.0, 0.0), "R L P A"),  # axial, upside down: a prone patient's scan
        ((*X, 0.0, 0.0, -1.0), "R L H F"),  # coronal
        ((*Y, 0.0, 0.0, -1.0), "A P H F"),  # sagittal
        ((0.0, -1.0, 0.0, 0.0, 0.0, -1.0), "P A H F"),  # sagittal, mirrored
        (turned(15), "R L A P"),  # a gantry tilt is still called axial
        (turned(30), "R L AH PF"),  # oblique
        ((*X, 0.0, 2.0, 0.0), "R L A P"),  # not of unit length
    ],
)
def test_edges_name_the_side_that_they_show(orientation, edges):
    assert " ".join(orientation_letters(orientation)) == edges


def test_the_first_letters_are_highdicoms_and_there_are_none_where_the_orientation_is_unknown():
    """Of any orientation: highdicom names the nearest axis only, as long as rows and columns have different ones."""
    for unknown in (
        None,
        (),
        (1.0, 0.0, 0.0),
        (0.0,) * 6,
        (*X, *X),
        (math.nan, 0.0, 0.0, *Y),
        (math.inf, 0.0, 0.0, *Y),
    ):
        assert orientation_letters(unknown) is None
    random, compared = np.random.default_rng(0), 0
    for _ in range(200):
        axes, _ = np.linalg.qr(random.normal(size=(3, 3)))
        affine = np.eye(4)
        affine[:3, :3] = axes
        row, column, _ = (letter.value for letter in get_closest_patient_orientation(affine))
        if len(set(np.abs(axes).argmax(0))) == 3:
            compared += 1
            letters = orientation_letters((*axes[:, 0].tolist(), *axes[:, 1].tolist()))
            assert (letters.right[0], letters.bottom[0]) == (row, column)
    assert compared > 50
