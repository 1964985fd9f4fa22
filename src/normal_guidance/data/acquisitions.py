"""Tells the acquisitions of one series apart: phases, repeats, echoes and b-values of the same part of the body.

Scanners may put several of them into one series.  Slices of two of them, sorted by position, would make a volume that
was never acquired, so one is kept: the longest, and of equally long ones the first by time or number.  Acquisitions of
other parts of the body stay, as those of a head that is scanned in two blocks.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from normal_guidance.data.dicom_slices import Header

FEWEST = 3
"""Fewer slices are not an acquisition: two may be one slice that was sent twice."""

OVERLAP = 0.5
"""Two acquisitions repeat each other if they share more than this part of the shorter one's length."""

DOUBLE_SHARE = 0.5
"""Acquisitions are mixed if more than this share of the positions have several slices."""

EVEN_SHARE = 0.1
"""Slices are evenly spaced if no step differs from the median step by more than this share of it."""

SAME_MM = 0.01
"""Slices nearer than this are at the same position."""

ATTRIBUTES: dict[str, Callable[[Header], float | str | None]] = {
    "TemporalPositionIdentifier": lambda header: header.temporal_position,
    "AcquisitionNumber": lambda header: header.acquisition,
    "DiffusionBValue": lambda header: header.b_value,
    "EchoTime": lambda header: header.echo_time,
    "acquisition time": lambda header: header.acquired or None,
}
"""What tells acquisitions apart, in the order in which it is tried."""


class Place(NamedTuple):
    """A slice and where it is: mm along the slice normal, or its InstanceNumber where that is unknown."""

    header: Header
    height: float


class Choice(NamedTuple):
    """The slices of one acquisition."""

    kept: list[int]
    """Places in the given order."""
    left_out: list[Repeat]
    mixed: str = ""
    """Why acquisitions could not be told apart; empty if there is one, or if they could."""


class Repeat(NamedTuple):
    """An acquisition that is left out."""

    file: str
    """Its first file."""
    detail: str


class _Run(NamedTuple):
    """Slices that follow each other by an attribute without coming back to where some of them were."""

    first: float | str
    last: float | str
    places: list[int]
    low: float
    high: float

    def name(self, attribute: str) -> str:
        values = f"{self.first:g}" if isinstance(self.first, float | int) else self.first
        if self.last != self.first:
            values += f" to {self.last:g}" if isinstance(self.last, float | int) else f" to {self.last}"
        return f"{attribute} {values} ({len(self.places)} slices)"

    def repeats(self, other: _Run) -> bool:
        """Whether both show the same part of the body."""
        if min(len(self.places), len(other.places)) < FEWEST:
            return False
        shared = min(self.high, other.high) - max(self.low, other.low)
        return shared > OVERLAP * min(self.high - self.low, other.high - other.low)


def choose_acquisition(series: Sequence[Place]) -> Choice:
    """The longest acquisition of a series, together with those of other parts of the body."""
    everything = Choice(list(range(len(series))), [])
    if len(series) < 2 * FEWEST or not _may_repeat(series):
        return everything
    for attribute, value_of in ATTRIBUTES.items():
        runs = sorted(_runs(series, value_of), key=lambda run: -len(run.places))  # stable: the first of equal ones
        kept: list[_Run] = []
        left_out: list[Repeat] = []
        for run in runs:
            other = next((one for one in kept if run.repeats(one)), None)
            if other is None:
                kept.append(run)
            else:
                detail = f"{run.name(attribute)} shows the same part of the body as {other.name(attribute)}"
                left_out.append(Repeat(series[run.places[0]].header.file, detail))
        if left_out:
            return Choice(sorted(place for run in kept for place in run.places), left_out)
    return everything._replace(mixed=_why_mixed(series))


def _may_repeat(series: Sequence[Place]) -> bool:
    """Whether positions or numbers occur more than once, or steps are uneven."""
    numbers = Counter(one.header.instance_number for one in series if one.header.instance_number is not None)
    if len([number for number, count in numbers.items() if count > 1]) >= FEWEST:
        return True
    steps = np.diff(np.sort([one.height for one in series]))
    return bool(np.abs(steps - np.median(steps)).max() > max(EVEN_SHARE * float(np.median(steps)), SAME_MM))


def _runs(series: Sequence[Place], value_of: Callable[[Header], float | str | None]) -> list[_Run]:
    """Divides the slices, in the order of an attribute, where they come back to a part of the body; none if unknown."""
    groups: dict[float | str, list[int]] = {}
    for place, one in enumerate(series):
        value = value_of(one.header)
        if value is None:
            return []
        groups.setdefault(value, []).append(place)
    runs: list[_Run] = []
    for value, places in sorted(groups.items()):
        heights = [series[place].height for place in places]
        low, high = min(heights), max(heights)
        before = runs[-1] if runs else None
        if before is None or (low < before.high + SAME_MM and high > before.low - SAME_MM):
            runs.append(_Run(value, value, list(places), low, high))
        else:
            joined = [*before.places, *places]
            runs[-1] = _Run(before.first, value, joined, min(before.low, low), max(before.high, high))
    return runs


def _why_mixed(series: Sequence[Place]) -> str:
    """Says that most positions have several slices, unless these are copies of one file."""
    single = {one.header.sop_uid or one.header.file: one.height for one in series}
    heights = sorted(single.values())
    starts = 1 + sum(after - before >= SAME_MM for before, after in pairwise(heights))
    double = len(heights) - starts
    if double <= DOUBLE_SHARE * starts:
        return ""
    return f"{len(heights)} slices at {starts} positions, and none of {', '.join(ATTRIBUTES)} tells them apart"
