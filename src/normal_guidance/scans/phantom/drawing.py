"""Draws slices: soft-edged ellipses, smooth random fields, a patient's pose.

An anatomy is drawn in millimetres of an average patient, x to the patient's left and y to the back, as in a picture of
an axial slice.  The canvas maps pixels to these coordinates through the patient's pose and a smooth distortion, so that
every ellipse becomes an organ-like shape.  Drawing an ellipse computes only the pixels around it, which is fast.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

AIR = -1000.0  # HU around the patient

Box = tuple[slice, slice]  # rows and columns of a part of the picture


@dataclass(frozen=True)
class Cover:
    """The share of each pixel, from 0 to 1, that belongs to a shape, in a part of the picture."""

    box: Box
    share: np.ndarray

    def part(self, box: Box) -> np.ndarray:
        """The shares in a part of the picture that lies within the box: a view."""
        (top, left), (rows, columns) = (side.start for side in self.box), box
        return self.share[rows.start - top : rows.stop - top, columns.start - left : columns.stop - left]


@dataclass(frozen=True)
class Pose:
    """A patient's pose and size: turned by `angle`, moved by `x` and `y` mm, scaled by `width` and `depth`."""

    angle: float
    x: float
    y: float
    width: float
    depth: float


class Field:
    """A smooth random function of place, of about -1 to 1: cubic B-splines between the points of a coarse grid."""

    def __init__(self, random: np.random.Generator, *, size: int, cells: int, levels: int) -> None:
        self.values = random.uniform(-1.5, 1.5, (levels + 3, cells + 3, cells + 3)).astype(np.float32)
        self.along = _splines(np.linspace(0.0, cells, size), cells)
        self.levels = levels

    def at(self, z: float) -> np.ndarray:
        """The field in the slice at `z`, from 0 to 1."""
        weights = _splines(np.array([np.clip(z, 0.0, 1.0) * self.levels]), self.levels)[0]
        plane = np.tensordot(weights, self.values, 1)
        return self.along @ plane @ self.along.T


def _splines(places: np.ndarray, cells: int) -> np.ndarray:
    """Weights of the grid's points for every place: rows of cubic B-splines."""
    cell = np.minimum(places.astype(int), cells - 1)
    t = (places - cell)[:, None]
    parts = np.hstack([(1 - t) ** 3, 3 * t**3 - 6 * t**2 + 4, -3 * t**3 + 3 * t**2 + 3 * t + 1, t**3]) / 6
    weights = np.zeros((len(places), cells + 3), np.float32)
    np.put_along_axis(weights, cell[:, None] + np.arange(4), parts.astype(np.float32), axis=1)
    return weights


class Canvas:
    """The picture of one slice, `width` mm wide, and its pixels' coordinates, bent by up to `distortion` mm."""

    def __init__(self, size: int, width: float, pose: Pose, random: np.random.Generator, *, distortion: float) -> None:
        self.size, self.pixel, self.pose, self.distortion = size, width / size, pose, distortion
        self._random_x, self._random_y = (Field(random, size=size, cells=5, levels=3) for _ in "xy")
        self._axis = ((np.arange(size) - (size - 1) / 2) * self.pixel).astype(np.float32)
        cos, sin = np.cos(pose.angle), np.sin(pose.angle)
        x, y = self._axis[None, :] - pose.x, self._axis[:, None] - pose.y
        self._x = ((cos * x + sin * y) / pose.width).astype(np.float32)
        self._y = ((-sin * x + cos * y) / pose.depth).astype(np.float32)
        self.image = np.empty((size, size), np.float32)
        self.x, self.y = self._x, self._y

    def start(self, z: float) -> None:
        """Begins the slice at `z`, from 0 to 1, filled with air."""
        self.x = self._x + self.distortion * self._random_x.at(z)
        self.y = self._y + self.distortion * self._random_y.at(z)
        self.image.fill(AIR)

    def cover(self, x: float, y: float, a: float, b: float, angle: float = 0.0, *, soft: float = 1.0) -> Cover | None:
        """An ellipse with half-axes `a` and `b`; its edge is `soft` pixels wide; None if it is off the picture."""
        if a <= 0 or b <= 0:
            return None
        box = self._box(x, y, max(a, b) + soft * self.pixel)
        if box is None:
            return None
        u, v = self.x[box] - np.float32(x), self.y[box] - np.float32(y)
        if angle:
            cos, sin = np.float32(math.cos(angle)), np.float32(math.sin(angle))
            u, v = cos * u + sin * v, cos * v - sin * u
        radius = np.sqrt((u * np.float32(1 / a)) ** 2 + (v * np.float32(1 / b)) ** 2)
        steepness = np.float32(min(a, b) / (soft * self.pixel))
        share = (1 - radius) * steepness + np.float32(0.5)
        return Cover(box, np.minimum(np.maximum(share, 0, out=share), 1, out=share))  # faster than np.clip

    def ellipse(
        self, x: float, y: float, a: float, b: float, value: float, angle: float = 0.0, *, soft: float = 1.0
    ) -> None:
        """Fills an ellipse with one value."""
        self.fill(self.cover(x, y, a, b, angle, soft=soft), value)

    def fill(self, cover: Cover | None, value: float | np.ndarray) -> None:
        """Sets the pixels under a cover to a value, or to those of a whole picture."""
        if cover is not None:
            part = self.image[cover.box]
            part += cover.share * ((value[cover.box] if isinstance(value, np.ndarray) else value) - part)

    def _box(self, x: float, y: float, radius: float) -> Box | None:
        pose = self.pose
        cos, sin = math.cos(pose.angle), math.sin(pose.angle)
        middle_x = cos * x * pose.width - sin * y * pose.depth + pose.x
        middle_y = sin * x * pose.width + cos * y * pose.depth + pose.y
        reach = (radius + 1.5 * self.distortion) * max(pose.width, pose.depth) + self.pixel
        left, right = self._index(middle_x - reach), self._index(middle_x + reach + self.pixel)
        top, bottom = self._index(middle_y - reach), self._index(middle_y + reach + self.pixel)
        return (slice(top, bottom), slice(left, right)) if right > left and bottom > top else None

    def _index(self, place: float) -> int:
        """The row or column at this distance in mm from the middle; the nearest one if it is off the picture."""
        return min(max(int(place / self.pixel + self.size / 2), 0), self.size)


def times(first: Cover | None, second: Cover | None) -> Cover | None:
    """The common part of two covers."""
    if first is None or second is None:
        return None
    pairs = zip(first.box, second.box, strict=True)
    rows, columns = (slice(max(a.start, b.start), min(a.stop, b.stop)) for a, b in pairs)
    if rows.start >= rows.stop or columns.start >= columns.stop:
        return None
    return Cover((rows, columns), first.part((rows, columns)) * second.part((rows, columns)))


def minus(first: Cover | None, second: Cover | None) -> Cover | None:
    """The part of the first cover that is outside the second."""
    common = times(first, second)
    if first is None or common is None:
        return first
    rest = Cover(first.box, first.share.copy())
    rest.part(common.box)[...] -= common.share
    return rest


def bump(z: float, low: float, high: float) -> float:
    """The share of the largest half-axis at `z` of an elliptic body that reaches from `low` to `high`."""
    u = (2 * z - low - high) / (high - low)
    return float(np.sqrt(max(0.0, 1 - u * u)))


def ramp(z: float, low: float, high: float) -> float:
    """0 below `low`, 1 above `high`, smooth between."""
    u = min(max((z - low) / (high - low), 0.0), 1.0)
    return u * u * (3 - 2 * u)
