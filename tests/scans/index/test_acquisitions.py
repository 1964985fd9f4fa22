"""Of several acquisitions in one series one is kept, whatever tells them apart; interleaved slices stay together."""

import random

import pytest
from test_geometry import header, kinds

from normal_guidance.scans.index.dicom_slices import Header
from normal_guidance.scans.index.geometry import ATTRIBUTES, Ordered, order_slices

FIELD_OF = {
    "TemporalPositionIdentifier": ("temporal_position", (1, 2)),
    "AcquisitionNumber": ("acquisition", (4, 5)),
    "DiffusionBValue": ("b_value", (0.0, 800.0)),
    "EchoTime": ("echo_time", (20.0, 80.0)),
    "acquisition time": ("acquired", ("20261118101500", "20261118101700")),
}


def phase(name: str, heights: list[float], first: int = 1, **values) -> list[Header]:
    return [
        header(number, z, file=f"{name}{number}.dcm", sop_uid=f"{name}.{number}", **values)
        for number, z in enumerate(heights, start=first)
    ]


def ordered_of(*parts: list[Header]) -> Ordered:
    """The slices of all parts in order, shuffled before."""
    slices = [header for part in parts for header in part]
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
    ordered = ordered_of(
        phase("b", heights(12, start=shift), **{field: late}), phase("a", heights(12), **{field: early})
    )
    assert names(ordered) == {"a"}
    assert len(ordered.slices) == 12
    assert kinds(ordered) == ["several_acquisitions"]
    assert attribute in ordered.findings[0].detail


NOWHERE = {"position": None, "orientation": None}


def each(name: str, value_of) -> list[Header]:
    """A phase whose slices have a value of their own each."""
    return [header(n, 5.0 * n, file=f"{name}{n}.dcm", sop_uid=f"{name}{n}", **value_of(n)) for n in range(1, 13)]


@pytest.mark.parametrize(
    ("first", "second", "kept"),
    [
        # the longer phase
        (phase("b", heights(12), acquisition=2), phase("a", heights(8), acquisition=1), "b"),
        # a time for every slice
        (
            each("a", lambda n: {"acquired": f"202611181015{n:02d}"}),
            each("b", lambda n: {"acquired": f"202611181016{n:02d}"}),
            "a",
        ),
        # step and shoot: the number goes on from slice to slice, through both phases
        (each("a", lambda n: {"acquisition": n}), each("b", lambda n: {"acquisition": n + 12}), "a"),
        # without positions: restarting numbers
        (phase("a", heights(12), acquisition=1, **NOWHERE), phase("b", heights(12), acquisition=2, **NOWHERE), "a"),
    ],
    ids=["longer", "times", "numbers", "nowhere"],
)
def test_phases_are_told_apart(first, second, kept):
    ordered = ordered_of(first, second)
    assert names(ordered) == {kept}
    assert "several_acquisitions" in kinds(ordered)


@pytest.mark.parametrize(
    ("first", "second"),
    [
        # MR: odd slices first, then even ones, with a time and a number of their own
        (
            phase("a", heights(6, 10.0), acquisition=1, acquired="20261118101500"),
            phase("b", heights(6, 10.0, 5.0), 7, acquisition=2, acquired="20261118101600"),
        ),
        # a head in two blocks, thin below and thick above, that share a slice
        (phase("a", heights(8, 2.5), acquisition=1), phase("b", heights(12, 5.0, 17.5), 9, acquisition=2)),
    ],
    ids=["interleaved", "blocks"],
)
def test_slices_of_one_body_stay_together(first, second):
    ordered = ordered_of(first, second)
    assert names(ordered) == {"a", "b"}
    assert not {"several_acquisitions", "mixed_acquisitions"} & set(kinds(ordered))


def test_phases_that_nothing_tells_apart_are_reported_as_mixed():
    ordered = ordered_of(phase("a", heights(12)), phase("b", heights(12)))
    assert kinds(ordered)[0] == "mixed_acquisitions"
    assert "24 slices at 12 positions" in ordered.findings[0].detail
    copies = [header(n, z, file=f"copy{n}.dcm", sop_uid=f"a.{n}") for n, z in enumerate(heights(12), start=1)]
    assert "mixed_acquisitions" not in kinds(order_slices(phase("a", heights(12)) + copies))


def test_a_single_repeated_slice_is_a_duplicate():
    again = header(13, 25.0, file="b13.dcm", sop_uid="b", acquisition=2)
    assert kinds(order_slices([*phase("a", heights(12), acquisition=1), again])) == ["duplicate"]
