"""Orders slices along the body by their headers, and reports problems of that order.

Only the position along the slice normal orders slices.  InstanceNumber may run against it, start anywhere or repeat;
it is the fallback, and a fallback is always reported.  Nothing here reads files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING, NamedTuple, TypeVar

import numpy as np

from normal_guidance.scans.index.problems import Problem

if TYPE_CHECKING:
    from normal_guidance.scans.index.dicom_slices import Header


DUPLICATE_MM = 0.01  # slices nearer than this are at the same position: scanners write positions to .001 mm or finer

SPACING_MM = 0.01  # pixel spacings that differ by more than this are different; rounding in headers is finer

ORIENTATION_DEGREES = 1.0  # slices whose rows or columns differ by a larger angle have different orientations

TILT_DEGREES = 1.0
"""Slices are sheared against each other if the line of their positions is farther than this from their normal."""

GAP_STEPS = 1.5  # A step longer than this many median steps means a missing slice

GAP_SHARE = 0.25
"""If more than one step and this share of the steps are long, no slice is missing: the scan has two spacings."""

UNEVEN_SHARE = 0.1  # steps that differ from the median step by more than this share of it are uneven

FARTHEST_MM = 1e6  # positions farther from the origin than this are damaged

AXES_TOLERANCE = 0.01
"""Largest deviation of direction cosines from unit length and from a right angle; beyond it they are ignored."""

Trait = TypeVar("Trait")


@dataclass(frozen=True)
class Ordered:
    """The slices of one scan in order."""

    slices: tuple[tuple[str, int], ...]  # file and frame of every slice
    positions: tuple[float, ...]  # mm along the slice normal, ascending; slice numbers where positions are unknown
    spacing: float | None  # the median step in mm; None for one slice, or where positions are unknown
    orientation: tuple[float, ...] | None
    rows: int
    columns: int
    pixel_spacing: tuple[float, float] | None
    findings: tuple[Problem, ...]  # without the scan's id, which the geometry does not know
    located: bool  # whether `positions` are mm


class _Slice(NamedTuple):
    header: Header
    frame: int
    position: tuple[float, float, float] | None
    orientation: tuple[float, ...] | None
    height: float = math.nan
    """mm along the slice normal, rounded to .001 mm so that rounding errors do not order equal positions."""

    @property
    def name(self) -> str:
        return f"{self.header.file} frame {self.frame}" if self.header.frames > 1 else self.header.file

    @property
    def number(self) -> float:
        """InstanceNumber, infinite where it is missing."""
        number = self.header.instance_number
        return math.inf if number is None else float(number)

    @property
    def rank(self) -> tuple[float, tuple[tuple[int, int | str], ...], int]:
        """The sort key: InstanceNumber, then file name, then frame."""
        return self.number, natural(self.header.file), self.frame


def order_slices(headers: Sequence[Header]) -> Ordered:
    """Orders the slices of one scan by their position along the slice normal, ascending.

    Slices whose size, pixel spacing or orientation is in the minority are left out, and so are repeated acquisitions of
    the same part of the body.  Of several slices at the same position, only the one with the lowest InstanceNumber
    stays.  If a slice has no position, all are ordered by InstanceNumber, in the direction of the known positions, or
    else by file name.
    """
    findings: list[Problem] = []
    slices = sorted(_expand(headers, findings), key=lambda item: item.rank)
    sizes = [item.header for item in slices]
    slices = _keep_majority(slices, "mixed_size", sizes, _same_size, _size_text, findings)
    oriented = [item for item in slices if item.orientation is not None]
    if len(oriented) == len(slices):
        axes = [np.array(item.orientation, float).reshape(2, 3) for item in slices]
        slices = _keep_majority(slices, "mixed_orientation", axes, _same_direction, _direction_text, findings)
        oriented = slices
    orientation = oriented[0].orientation if oriented else None
    normal = None if orientation is None else normal_of(orientation)
    for number, item in enumerate(slices):
        if normal is not None and item.position is not None:
            height = float(np.dot(item.position, normal))
            slices[number] = item._replace(height=round(height, 3) + 0.0)
    slices = _keep_acquisition(slices, findings)
    reason = _why_not_by_position(slices)
    if reason:
        slices = _order_by_number(slices, reason, findings)
        positions = [float(number) for number in range(len(slices))]
    else:
        slices = _order_by_position(slices, findings)
        positions = [item.height for item in slices]
        _check_steps(slices, positions, findings)
        _check_tilt(slices, orientation, findings)
    first = slices[0].header
    if len(slices) == 1:
        findings.append(Problem("", first.file, "one_slice", "no other slice of this series", "kept"))
    return Ordered(
        slices=tuple((item.header.file, item.frame) for item in slices),
        positions=tuple(positions),
        spacing=None if reason or len(positions) < 2 else round(float(np.median(np.diff(positions))), 4),
        orientation=orientation,
        rows=first.rows,
        columns=first.columns,
        pixel_spacing=first.pixel_spacing,
        findings=tuple(findings),
        located=not reason,
    )


def natural(name: str) -> tuple[tuple[int, int | str], ...]:
    """A key that sorts numbers in names as numbers."""
    words = re.findall(r"[0-9]+|[^0-9]+", name)
    numbered = ((0, int(word)) if word[0] in "0123456789" and len(word) < 4000 else (1, word) for word in words)
    return *numbered, (-1, name)  # shorter names first; 1 and 01 differ


def normal_of(orientation: Sequence[float]) -> np.ndarray:
    """The direction in which slices are stacked: row direction x column direction."""
    normal = np.cross(np.asarray(orientation[:3], float), np.asarray(orientation[3:], float))
    return normal / np.linalg.norm(normal)


def _expand(headers: Sequence[Header], findings: list[Problem]) -> list[_Slice]:
    slices = []
    for header in headers:
        positions: Sequence[tuple[float, float, float] | None] = (header.position,)
        orientation = header.orientation
        if header.frames > 1:
            detail = f"{header.frames} frames"
            findings.append(Problem("", header.file, "multi_frame", detail, "each frame is a slice"))
            positions = header.frame_positions or (None,) * header.frames
            orientation = header.frame_orientation or header.orientation
        directions = _directions(orientation)
        for frame, position in enumerate(positions):
            known = position is not None and all(abs(value) < FARTHEST_MM for value in position)  # NaN is not below
            slices.append(_Slice(header, frame, position if known else None, directions))
    return slices


def _directions(values: tuple[float, ...] | None) -> tuple[float, ...] | None:
    """The values if they are direction cosines (two unit vectors at a right angle), otherwise None."""
    if values is None or len(values) != 6 or not all(abs(value) < 2 for value in values):  # NaN is not below 2
        return None
    row, column = np.array(values[:3], float), np.array(values[3:], float)
    products = np.array([row @ row - 1, column @ column - 1, row @ column])
    return values if np.abs(products).max() <= AXES_TOLERANCE else None


def _keep_majority(
    slices: list[_Slice],
    kind: str,
    traits: Sequence[Trait],
    same: Callable[[Trait, Trait], bool],
    text: Callable[[_Slice], str],
    findings: list[Problem],
) -> list[_Slice]:
    """The slices of the largest group (the first one, if several are as large); the others are reported by file."""
    firsts: list[Trait] = []
    groups: list[int] = []  # of each slice the first one of the same trait
    for trait in traits:
        group = next((number for number, first in enumerate(firsts) if same(first, trait)), len(firsts))
        if group == len(firsts):
            firsts.append(trait)
        groups.append(group)
    largest = Counter(groups).most_common()[0][0]
    kept = [item for item, group in zip(slices, groups, strict=True) if group == largest]
    for item, group in zip(slices, groups, strict=True):
        if group != largest:
            detail = f"{text(item)}, but most slices of the scan: {text(kept[0])}"
            findings.append(Problem("", item.header.file, kind, detail, "left out"))
    return kept


def _same_size(first: Header, other: Header) -> bool:
    """Whether sizes and spacings are equal; an unknown spacing equals any other."""
    if (first.rows, first.columns) != (other.rows, other.columns):
        return False
    spacings = zip(first.pixel_spacing or (), other.pixel_spacing or (), strict=False)
    return all(abs(a - b) <= SPACING_MM for a, b in spacings)


def _same_direction(axes: np.ndarray, other: np.ndarray) -> bool:
    limit = math.cos(math.radians(ORIENTATION_DEGREES))
    return bool(((axes * other).sum(1) >= limit * np.linalg.norm(axes, axis=1) * np.linalg.norm(other, axis=1)).all())


def _size_text(item: _Slice) -> str:
    spacing = item.header.pixel_spacing
    pixels = "pixels" if spacing is None else f"pixels of {spacing[0]:g} x {spacing[1]:g} mm"
    return f"{item.header.rows} x {item.header.columns} {pixels}"


def _direction_text(item: _Slice) -> str:
    return "orientation " + "\\".join(f"{value:.4g}" for value in item.orientation or ())


# Acquisitions of one series are told apart: phases, repeats, echoes and b-values of the same part of the body, whose
# slices, sorted by position, would make a volume that was never acquired.  The longest is kept, of equally long ones
# the first by time or number.  Acquisitions of other parts of the body stay, as a head that is scanned in two blocks.

FEWEST = 3  # fewer slices are not an acquisition: two may be one slice that was sent twice

REPEATED = "left out; the longest is kept, the first of equally long ones"

ATTRIBUTES: dict[str, Callable[[Header], float | str | None]] = {
    "TemporalPositionIdentifier": lambda header: header.temporal_position,
    "AcquisitionNumber": lambda header: header.acquisition,
    "DiffusionBValue": lambda header: header.b_value,
    "EchoTime": lambda header: header.echo_time,
    "acquisition time": lambda header: header.acquired or None,
}
"""What tells acquisitions apart, in the order in which it is tried."""


class _Run(NamedTuple):
    """Slices that follow each other by an attribute without coming back to where some of them were."""

    first: float | str
    last: float | str
    members: list[int]
    low: float
    high: float

    def name(self, attribute: str) -> str:
        values = f"{self.first:g}" if isinstance(self.first, float | int) else self.first
        if self.last != self.first:
            values += f" to {self.last:g}" if isinstance(self.last, float | int) else f" to {self.last}"
        return f"{attribute} {values} ({len(self.members)} slices)"

    def repeats(self, other: _Run) -> bool:
        """Whether both show the same part of the body: more than half the length of the shorter one."""
        if min(len(self.members), len(other.members)) < FEWEST:
            return False
        shared = min(self.high, other.high) - max(self.low, other.low)
        return shared > 0.5 * min(self.high - self.low, other.high - other.low)


def _keep_acquisition(slices: list[_Slice], findings: list[Problem]) -> list[_Slice]:
    """The slices of the longest acquisition; where a position is missing, InstanceNumbers say which repeat others."""
    heights = [item.height for item in slices]
    if not all(map(math.isfinite, heights)):
        heights = [item.number for item in slices]
    if len(slices) < 2 * FEWEST or not all(map(math.isfinite, heights)):
        return slices
    # Several acquisitions show in numbers that occur more than once, or in steps that differ from the median by 10 %.
    times = Counter(item.number for item in slices if item.number < math.inf)
    steps = np.diff(np.sort(heights))
    median = float(np.median(steps))
    uneven = np.abs(steps - median).max() > max(0.1 * median, DUPLICATE_MM)
    if not uneven and sum(count > 1 for count in times.values()) < FEWEST:
        return slices
    for attribute, value_of in ATTRIBUTES.items():
        values = [value_of(item.header) for item in slices]
        runs = sorted(_runs(values, heights), key=lambda run: -len(run.members))  # stable: the first of equals
        kept: list[_Run] = []
        for run in runs:
            other = next((longer for longer in kept if run.repeats(longer)), None)
            if other is None:
                kept.append(run)
            else:
                file = slices[run.members[0]].header.file
                detail = f"{run.name(attribute)} shows the same part of the body as {other.name(attribute)}"
                findings.append(Problem("", file, "several_acquisitions", detail, REPEATED))
        if len(kept) < len(runs):
            return [slices[member] for member in sorted(member for run in kept for member in run.members)]
    # Most positions have several slices, unless these are copies of one file.
    height_of = {item.header.sop_uid or item.header.file: height for item, height in zip(slices, heights, strict=True)}
    starts = 1 + sum(after - before >= DUPLICATE_MM for before, after in pairwise(sorted(height_of.values())))
    if len(height_of) - starts > 0.5 * starts:
        detail = f"{len(height_of)} slices at {starts} positions, and none of {', '.join(ATTRIBUTES)} tells them apart"
        action = "the lowest InstanceNumber of each position is kept"
        findings.append(Problem("", "", "mixed_acquisitions", detail, action))
    return slices


def _runs(values: Sequence[int | float | str | None], heights: Sequence[float]) -> list[_Run]:
    """Divides the slices, in the order of an attribute, where they come back to a part of the body; none if unknown."""
    groups: dict[int | float | str, list[int]] = {}
    for member, value in enumerate(values):
        if value is None:
            return []
        groups.setdefault(value, []).append(member)
    runs: list[_Run] = []
    for value, members in sorted(groups.items()):
        low, high = min(heights[member] for member in members), max(heights[member] for member in members)
        before = runs[-1] if runs else None
        if before is None or (low < before.high + DUPLICATE_MM and high > before.low - DUPLICATE_MM):
            runs.append(_Run(value, value, list(members), low, high))
        else:
            joined = [*before.members, *members]
            runs[-1] = _Run(before.first, value, joined, min(before.low, low), max(before.high, high))
    return runs


def _why_not_by_position(slices: Sequence[_Slice]) -> str:
    for tag, without in (
        ("ImageOrientationPatient", [item for item in slices if item.orientation is None]),
        ("ImagePositionPatient", [item for item in slices if item.position is None]),
    ):
        if without:
            count = f"{len(without)} of {len(slices)} slices, first in {without[0].name}"
            return f"{tag} is missing or impossible in {count}"
    if len(slices) > 2 and len({item.height for item in slices}) == 1:  # two may be one slice sent twice
        return f"ImagePositionPatient: all {len(slices)} slices are at {slices[0].height:g} mm"
    return ""


def _order_by_number(slices: list[_Slice], reason: str, findings: list[Problem]) -> list[_Slice]:
    """Orders by InstanceNumber, or by frame number in one file; `slices` are sorted by these and then by name."""
    numbers = {item.header.file: item.header.instance_number for item in slices}
    if len(numbers) > 1 and None in numbers.values():
        findings.append(Problem("", "", "no_order", reason, "ordered by file name: InstanceNumber is missing, too"))
        return sorted(slices, key=lambda item: (natural(item.header.file), item.frame))
    known = [item.height for item in slices if math.isfinite(item.height)]
    ups = np.sign(np.diff(known)).sum()
    by = "InstanceNumber" if len(numbers) > 1 else "frame number"
    twice = len(numbers) - len(set(numbers.values()))
    note = f", file name where it repeats ({twice} times)" if twice else ""
    direction = ", descending as the known positions do" if ups < 0 else ""
    findings.append(Problem("", "", "no_position", reason, f"ordered by {by}{direction}{note}"))
    return slices[::-1] if ups < 0 else slices


def _order_by_position(slices: Sequence[_Slice], findings: list[Problem]) -> list[_Slice]:
    """Orders by position; of slices at the same position, the one that comes first by `rank` stays."""
    groups: list[list[_Slice]] = []
    for item in sorted(slices, key=lambda item: item.height):
        if groups and item.height - groups[-1][0].height < DUPLICATE_MM:
            groups[-1].append(item)
        else:
            groups.append([item])
    kept = [min(group, key=lambda item: item.rank) for group in groups]
    for group, best in zip(groups, kept, strict=True):
        for item in group:
            if item is not best:
                detail = f"same position as {best.name}: {best.height:g} mm"
                detail = detail if item.header.frames == 1 else f"frame {item.frame}: {detail}"
                findings.append(Problem("", item.header.file, "duplicate", detail, "left out"))
    return kept


def _check_steps(slices: Sequence[_Slice], positions: Sequence[float], findings: list[Problem]) -> None:
    if len(positions) < 3:
        return
    steps = np.diff(positions)
    usual = float(np.median(steps))
    gaps = np.flatnonzero(steps > GAP_STEPS * usual)
    if len(gaps) > max(1, GAP_SHARE * len(steps)):
        gaps = gaps[:0]
    for number in gaps.tolist():
        before, after, step = slices[number], slices[number + 1], float(steps[number])
        missing = max(1, round(step / usual) - 1)
        detail = f"{step:g} mm from {before.name} to {after.name}, usually {usual:g} mm: {missing} missing"
        findings.append(Problem("", after.header.file, "gap", detail, "kept"))
    rest = np.delete(steps, gaps)
    if np.abs(rest - usual).max() > max(UNEVEN_SHARE * usual, DUPLICATE_MM):
        detail = f"steps of {rest.min():g} to {rest.max():g} mm, usually {usual:g} mm"
        findings.append(Problem("", "", "uneven", detail, "kept"))


def _check_tilt(slices: Sequence[_Slice], orientation: tuple[float, ...] | None, findings: list[Problem]) -> None:
    """Compares the line from the first to the last slice with the normal: a gantry tilt separates them by its angle."""
    first, last = slices[0].position, slices[-1].position
    if first is None or last is None or orientation is None or len(slices) < 2:
        return
    line = np.subtract(last, first)
    along = float(line @ normal_of(orientation))
    across = math.sqrt(max(0.0, float(line @ line) - along**2))
    angle = math.degrees(math.atan2(across, along))
    if angle > TILT_DEGREES:
        stated = slices[0].header.tilt
        detail = f"{angle:.1f} degrees between the slice normal and the line of positions"
        detail += "" if stated is None else f", GantryDetectorTilt {stated:g}"
        findings.append(Problem("", "", "tilt", detail, "kept; slices are sheared, not resampled"))


# The letters at the edges of a slice that say which side of the patient they show: R and L, A and P, H and F.

AXES = ("LR", "PA", "HF")  # the letters of DICOM's three axes, in their direction and against it: left, posterior, head

SHARE = np.sin(np.radians(22.5))
"""An edge shows the letter of each axis with at least this direction cosine: two letters from 22.5 degrees on."""

RIGHT_ANGLE = 0.1  # rows and columns with a larger cosine of their angle are damaged, and have no letters


class Edges(NamedTuple):
    """The letters at the edges of a picture whose rows run to the right and columns downwards, as stored."""

    left: str
    right: str
    top: str
    bottom: str


def orientation_letters(orientation: Sequence[float] | None) -> Edges | None:
    """The letters for direction cosines of a row and of a column (ImageOrientationPatient); None if unknown."""
    if orientation is None or len(orientation) != 6:
        return None
    row, column = np.asarray(orientation, np.float64).reshape(2, 3)
    lengths = np.linalg.norm([row, column], axis=1)
    if not np.isfinite(lengths).all() or not (lengths > 0).all():
        return None
    row, column = row / lengths[0], column / lengths[1]
    if abs(row @ column) > RIGHT_ANGLE:
        return None
    return Edges(_letters(-row), _letters(row), _letters(-column), _letters(column))


def _letters(direction: np.ndarray) -> str:
    """The letters of a direction, the nearest axis first."""
    order = np.argsort(-np.abs(direction), kind="stable")
    near = [axis for axis in order if abs(direction[axis]) >= SHARE]
    return "".join(AXES[axis][0 if direction[axis] > 0 else 1] for axis in near)
