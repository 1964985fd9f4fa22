"""Orders slices along the body by their headers, and reports problems of that order.

Only the position along the slice normal orders slices.  InstanceNumber may run against it, start anywhere or repeat;
it is the fallback, and a fallback is always reported.  Nothing here reads files.
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Callable, Hashable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from normal_guidance.scans.index.dicom_slices import AcquisitionPlace, choose_acquisition

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


class GeometryFinding(NamedTuple):
    """A `Problem` without the scan, which the geometry does not know."""

    file: str
    kind: str
    detail: str
    action: str


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
    findings: tuple[GeometryFinding, ...]
    located: bool  # whether `positions` are mm


class _Slice(NamedTuple):
    header: Header
    frame: int
    position: tuple[float, float, float] | None
    orientation: tuple[float, ...] | None

    @property
    def name(self) -> str:
        return f"{self.header.file} frame {self.frame}" if self.header.frames > 1 else self.header.file

    @property
    def rank(self) -> tuple[float, tuple[tuple[int, int | str], ...], int]:
        """The sort key: InstanceNumber (files without one last), then file name, then frame."""
        number = self.header.instance_number
        return (math.inf if number is None else float(number), natural(self.header.file), self.frame)


def order_slices(headers: Sequence[Header]) -> Ordered:
    """Orders the slices of one scan by their position along the slice normal, ascending.

    Slices whose size, pixel spacing or orientation is in the minority are left out, and so are repeated acquisitions of
    the same part of the body (`normal_guidance.scans.index.dicom_slices`).  Of several slices at the same
    position, only the one with the lowest InstanceNumber stays.  If a slice has no position, all are ordered by
    InstanceNumber, in the direction of the known positions, or else by file name.
    """
    findings: list[GeometryFinding] = []
    slices = sorted(_expand(headers, findings), key=lambda one: one.rank)
    slices = _keep_majority(slices, "mixed_size", _same_size(), _size_text, findings)
    oriented = [one for one in slices if one.orientation is not None]
    if len(oriented) == len(slices):
        slices = oriented = _keep_majority(slices, "mixed_orientation", _same_direction(), _direction_text, findings)
    orientation = oriented[0].orientation if oriented else None
    slices = _keep_acquisition(slices, orientation, findings)
    heights = _heights(slices, orientation)
    reason = _why_not_by_position(slices, heights)
    if reason:
        slices = _order_by_number(slices, heights, reason, findings)
        positions = [float(number) for number in range(len(slices))]
    else:
        slices, positions = _order_by_position(slices, heights, findings)
        _check_steps(slices, positions, findings)
        _check_tilt(slices, orientation, findings)
    if len(slices) == 1:
        findings.append(GeometryFinding(slices[0].header.file, "one_slice", "no other slice of this series", "kept"))
    first = slices[0].header
    return Ordered(
        slices=tuple((one.header.file, one.frame) for one in slices),
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


def _expand(headers: Sequence[Header], findings: list[GeometryFinding]) -> list[_Slice]:
    slices = []
    for header in headers:
        if header.frames > 1:
            findings.append(
                GeometryFinding(header.file, "multi_frame", f"{header.frames} frames", "each frame is a slice")
            )
            places: Sequence[tuple[float, float, float] | None] = header.frame_positions or (None,) * header.frames
            orientation = _directions(header.frame_orientation or header.orientation)
        else:
            places = (header.position,)
            orientation = _directions(header.orientation)
        for frame, place in enumerate(places):
            known = place is not None and all(abs(value) < FARTHEST_MM for value in place)  # NaN is not below
            slices.append(_Slice(header, frame, place if known else None, orientation))
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
    group_of: Callable[[_Slice], Hashable],
    text: Callable[[_Slice], str],
    findings: list[GeometryFinding],
) -> list[_Slice]:
    """The slices of the largest group (the first one, if several are as large); the others are reported by file."""
    groups = [group_of(one) for one in slices]
    (largest, _), *others = Counter(groups).most_common()
    if not others:
        return slices
    kept = [one for one, group in zip(slices, groups, strict=True) if group == largest]
    for one, group in zip(slices, groups, strict=True):
        if group != largest:
            detail = f"{text(one)}, but most slices of the scan: {text(kept[0])}"
            findings.append(GeometryFinding(one.header.file, kind, detail, "left out"))
    return kept


def _same_size() -> Callable[[_Slice], Hashable]:
    seen: list[tuple[int, int, tuple[float, float] | None]] = []

    def group_of(one: _Slice) -> int:
        header = one.header
        for number, (rows, columns, spacing) in enumerate(seen):
            if (rows, columns) == (header.rows, header.columns) and _near(spacing, header.pixel_spacing):
                return number
        seen.append((header.rows, header.columns, header.pixel_spacing))
        return len(seen) - 1

    return group_of


def _near(one: tuple[float, float] | None, other: tuple[float, float] | None) -> bool:
    """Whether two spacings are equal; an unknown one equals any other."""
    return one is None or other is None or all(abs(a - b) <= SPACING_MM for a, b in zip(one, other, strict=True))


def _same_direction() -> Callable[[_Slice], Hashable]:
    seen: list[np.ndarray] = []
    limit = math.cos(math.radians(ORIENTATION_DEGREES))

    def group_of(one: _Slice) -> int:
        axes = np.array(one.orientation, float).reshape(2, 3)
        for number, other in enumerate(seen):
            if ((axes * other).sum(1) >= limit * np.linalg.norm(axes, axis=1) * np.linalg.norm(other, axis=1)).all():
                return number
        seen.append(axes)
        return len(seen) - 1

    return group_of


def _size_text(one: _Slice) -> str:
    spacing = one.header.pixel_spacing
    pixels = "pixels" if spacing is None else f"pixels of {spacing[0]:g} x {spacing[1]:g} mm"
    return f"{one.header.rows} x {one.header.columns} {pixels}"


def _direction_text(one: _Slice) -> str:
    return "orientation " + "\\".join(f"{value:.4g}" for value in one.orientation or ())


def _keep_acquisition(
    slices: list[_Slice], orientation: tuple[float, ...] | None, findings: list[GeometryFinding]
) -> list[_Slice]:
    """The slices of one acquisition; where a position is missing, InstanceNumbers say which slices repeat others."""
    heights: Sequence[float | None] = _heights(slices, orientation)
    if None in heights:
        heights = [one.header.instance_number for one in slices]
    places = [
        AcquisitionPlace(one.header, height) for one, height in zip(slices, heights, strict=True) if height is not None
    ]
    if len(places) < len(slices):
        return slices
    chosen = choose_acquisition(places)
    for file, detail in chosen.left_out:
        action = "left out; the longest is kept, the first of equally long ones"
        findings.append(GeometryFinding(file, "several_acquisitions", detail, action))
    if chosen.mixed:
        action = "the lowest InstanceNumber of each position is kept"
        findings.append(GeometryFinding("", "mixed_acquisitions", chosen.mixed, action))
    return [slices[number] for number in chosen.kept]


def _heights(slices: Sequence[_Slice], orientation: tuple[float, ...] | None) -> list[float | None]:
    """Positions in mm along the normal, rounded to .001 mm so that rounding errors do not order equal positions."""
    if orientation is None:
        return [None] * len(slices)
    normal = normal_of(orientation)
    places = (one.position for one in slices)
    return [None if place is None else round(float(np.dot(place, normal)), 3) + 0.0 for place in places]


def _why_not_by_position(slices: Sequence[_Slice], heights: Sequence[float | None]) -> str:
    without = [one for one in slices if one.orientation is None]
    if without:
        return _missing("ImageOrientationPatient", without, len(slices))
    without = [one for one, height in zip(slices, heights, strict=True) if height is None]
    if without:
        return _missing("ImagePositionPatient", without, len(slices))
    if len(slices) > 2 and len(set(heights)) == 1:  # two may be one slice sent twice; more cannot be right
        return f"ImagePositionPatient: all {len(slices)} slices are at {heights[0]:g} mm"
    return ""


def _missing(tag: str, without: Sequence[_Slice], total: int) -> str:
    return f"{tag} is missing or impossible in {len(without)} of {total} slices, first in {without[0].name}"


def _order_by_number(
    slices: list[_Slice], heights: Sequence[float | None], reason: str, findings: list[GeometryFinding]
) -> list[_Slice]:
    """Orders by InstanceNumber, or by frame number in one file; `slices` are sorted by these and then by name."""
    numbers = {one.header.file: one.header.instance_number for one in slices}
    if len(numbers) > 1 and None in numbers.values():
        action = "ordered by file name: InstanceNumber is missing, too"
        findings.append(GeometryFinding("", "no_order", reason, action))
        return sorted(slices, key=lambda one: (natural(one.header.file), one.frame))
    known = [height for height in heights if height is not None]
    ups = np.sign(np.diff(known)).sum()
    by = "InstanceNumber" if len(numbers) > 1 else "frame number"
    twice = len(numbers) - len(set(numbers.values()))
    note = f", file name where it repeats ({twice} times)" if twice else ""
    direction = ", descending as the known positions do" if ups < 0 else ""
    findings.append(GeometryFinding("", "no_position", reason, f"ordered by {by}{direction}{note}"))
    return slices[::-1] if ups < 0 else slices


def _order_by_position(
    slices: Sequence[_Slice], heights: Sequence[float | None], findings: list[GeometryFinding]
) -> tuple[list[_Slice], list[float]]:
    """Orders by position; of slices at the same position, the one that comes first by `rank` stays."""
    pairs = [(height, one) for height, one in zip(heights, slices, strict=True) if height is not None]
    groups: list[list[tuple[float, _Slice]]] = []
    for pair in sorted(pairs, key=lambda pair: pair[0]):
        if groups and pair[0] - groups[-1][0][0] < DUPLICATE_MM:
            groups[-1].append(pair)
        else:
            groups.append([pair])
    kept = [min(group, key=lambda pair: pair[1].rank) for group in groups]
    for group, (height, best) in zip(groups, kept, strict=True):
        for _, one in group:
            if one is not best:
                detail = f"same position as {best.name}: {height:g} mm"
                detail = detail if one.header.frames == 1 else f"frame {one.frame}: {detail}"
                findings.append(GeometryFinding(one.header.file, "duplicate", detail, "left out"))
    return [one for _, one in kept], [height for height, _ in kept]


def _check_steps(slices: Sequence[_Slice], positions: Sequence[float], findings: list[GeometryFinding]) -> None:
    if len(positions) < 3:
        return
    steps = np.diff(positions)
    usual = float(np.median(steps))
    gaps = np.flatnonzero(steps > GAP_STEPS * usual)
    if len(gaps) > max(1, GAP_SHARE * len(steps)):
        gaps = gaps[:0]
    for place in gaps.tolist():
        before, after, step = slices[place], slices[place + 1], float(steps[place])
        missing = max(1, round(step / usual) - 1)
        detail = f"{step:g} mm from {before.name} to {after.name}, usually {usual:g} mm: {missing} missing"
        findings.append(GeometryFinding(after.header.file, "gap", detail, "kept"))
    rest = np.delete(steps, gaps)
    if np.abs(rest - usual).max() > max(UNEVEN_SHARE * usual, DUPLICATE_MM):
        detail = f"steps of {rest.min():g} to {rest.max():g} mm, usually {usual:g} mm"
        findings.append(GeometryFinding("", "uneven", detail, "kept"))


def _check_tilt(
    slices: Sequence[_Slice], orientation: tuple[float, ...] | None, findings: list[GeometryFinding]
) -> None:
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
        findings.append(GeometryFinding("", "tilt", detail, "kept; slices are sheared, not resampled"))


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
