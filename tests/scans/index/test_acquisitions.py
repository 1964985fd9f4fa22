"""Of several acquisitions in one series one is kept, whatever tells them apart; interleaved slices stay together."""

import random

import pytest
from test_geometry import header, kinds

from normal_guidance.scans.index.dicom_slices import ATTRIBUTES, Header
from normal_guidance.scans.index.geometry import Ordered, order_slices

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


def shuffled(*parts: list[Header]) -> list[Header]:
    slices = [one for part in parts for one in part]
    random.Random(1).shuffle(slices)
    return slices


def names(ordered: Ordered) -> set[str]:
    return {file[0] for file, _ in ordered.slices}


def heights(count: int, step: float = 5.0, start: float = 0.0) -> list[float]:
    return [start + step * place for place in range(count)]


@pytest.mark.parametrize("attribute", ATTRIBUTES)
@pytest.mark.parametrize("shift", [0.0, 0.3, 2.5])
def test_one_of_two_phases_is_kept(attribute, shift):
    field, (early, late) = FIELD_OF[attribute]
    both = shuffled(
        phase("b", heights(12, start=shift), **{field: late}),
        phase("a", heights(12), **{field: early}),
    )
    ordered = order_slices(both)
    assert names(ordered) == {"a"}
    assert len(ordered.slices) == 12
    assert kinds(ordered) == ["several_acquisitions"]
    assert attribute in ordered.findings[0].detail


def test_the_longer_phase_is_kept():
    ordered = order_slices(shuffled(phase("a", heights(8), acquisition=1), phase("b", heights(12), acquisition=2)))
    assert names(ordered) == {"b"}
    assert "AcquisitionNumber 1 (8 slices)" in ordered.findings[0].detail


def test_a_time_for_every_slice_tells_phases_apart():
    first = [
        header(n, 5.0 * n, file=f"a{n}.dcm", sop_uid=f"a{n}", acquired=f"202611181015{n:02d}") for n in range(1, 13)
    ]
    second = [
        header(n, 5.0 * n, file=f"b{n}.dcm", sop_uid=f"b{n}", acquired=f"202611181016{n:02d}") for n in range(1, 13)
    ]
    assert names(order_slices(shuffled(first, second))) == {"a"}


def test_a_number_for_every_rotation_tells_phases_apart():
    """Step and shoot: the number goes on from slice to slice, through both phases."""
    first = [header(n, 5.0 * n, file=f"a{n}.dcm", sop_uid=f"a{n}", acquisition=n) for n in range(1, 13)]
    second = [header(n, 5.0 * n, file=f"b{n}.dcm", sop_uid=f"b{n}", acquisition=n + 12) for n in range(1, 13)]
    assert names(order_slices(shuffled(first, second))) == {"a"}


def test_phases_without_positions_are_told_apart_by_restarting_numbers():
    nowhere = {"position": None, "orientation": None}
    both = shuffled(
        phase("a", heights(12), acquisition=1, **nowhere), phase("b", heights(12), acquisition=2, **nowhere)
    )
    ordered = order_slices(both)
    assert names(ordered) == {"a"}
    assert "several_acquisitions" in kinds(ordered)


def test_interleaved_slices_stay_together():
    """MR: odd slices first, then even ones, with a time and a number of their own."""
    odd = phase("a", heights(6, 10.0), acquisition=1, acquired="20261118101500")
    even = phase("b", heights(6, 10.0, 5.0), 7, acquisition=2, acquired="20261118101600")
    ordered = order_slices(shuffled(odd, even))
    assert len(ordered.slices) == 12
    assert kinds(ordered) == []


def test_blocks_of_one_body_stay_together():
    """A head in two blocks, thin below and thick above, that share a slice."""
    below = phase("a", heights(8, 2.5), acquisition=1)
    above = phase("b", heights(12, 5.0, 17.5), 9, acquisition=2)
    ordered = order_slices(shuffled(below, above))
    assert names(ordered) == {"a", "b"}
    assert "several_acquisitions" not in kinds(ordered)
    assert "mixed_acquisitions" not in kinds(ordered)


def test_phases_that_nothing_tells_apart_are_reported_as_mixed():
    ordered = order_slices(shuffled(phase("a", heights(12)), phase("b", heights(12))))
    assert kinds(ordered)[0] == "mixed_acquisitions"
    assert "24 slices at 12 positions" in ordered.findings[0].detail


def test_copies_of_the_same_slices_are_not_mixed():
    both = phase("a", heights(12)) + [
        header(n, z, file=f"copy{n}.dcm", sop_uid=f"a.{n}") for n, z in enumerate(heights(12), start=1)
    ]
    assert "mixed_acquisitions" not in kinds(order_slices(both))


def test_a_single_repeated_slice_is_a_duplicate():
    again = header(13, 25.0, file="b13.dcm", sop_uid="b", acquisition=2)
    ordered = order_slices([*phase("a", heights(12), acquisition=1), again])
    assert kinds(ordered) == ["duplicate"]
