"""Draws the volume of a plan in HU, slice by slice: the patient's anatomy, look-alikes, lesions, noise."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from normal_guidance.simulate.phantom import abdomen, chest, head
from normal_guidance.simulate.phantom.drawing import Canvas, Pose
from normal_guidance.simulate.phantom.lesions import (
    LESIONS,
    LOOK_ALIKE_KINDS,
    LOOK_ALIKES,
    Painter,
    Shape,
    paint_injuries,
)
from normal_guidance.simulate.phantom.plan import ANATOMIES, ScanPlan

LOWEST, HIGHEST = -1000, 2047
"""Range of HU, which every encoding of the writer can hold; values beyond are clipped."""


class Part(NamedTuple):
    """The drawing of a body part, with its size and noise."""

    body: Any
    width: float
    distortion: float
    noise: tuple[float, float]
    """Range of the noise's standard deviation in HU."""


PARTS: Mapping[str, Part] = {
    "head": Part(head.Head, head.WIDTH, head.DISTORTION, (3.0, 6.5)),
    "chest": Part(chest.Chest, chest.WIDTH, chest.DISTORTION, (12.0, 26.0)),
    "abdomen": Part(abdomen.Abdomen, abdomen.WIDTH, abdomen.DISTORTION, (8.0, 17.0)),
}
"""Body parts by name."""


class LookAlike(NamedTuple):
    """Something in the slices [start, stop) that looks like a lesion and is not one."""

    start: int
    stop: int
    kind: str
    shape: Shape


def render(plan: ScanPlan, size: int, *, contrast: float = 1.0) -> np.ndarray:
    """Draws a scan: int16 HU of (slices, rows, columns), from the lower end up.

    Labels and contrast change nothing but the lesions.
    """
    part = PARTS[plan.anatomy]
    body = part.body(plan.patient_stream("body"), size)
    canvas = Canvas(size, part.width, _pose(plan), plan.patient_stream("distortion"), distortion=part.distortion)
    scan, noise = plan.stream("scan"), plan.stream("noise")
    shift, level = float(scan.uniform(-0.01, 0.01)), float(scan.uniform(*part.noise))
    tear = Shape.draw(plan.patient_stream("tear"))
    look_alikes = draw_look_alikes(plan)
    lesions = [(block, Shape.draw(plan.stream(f"lesion {i}"))) for i, block in enumerate(plan.blocks)]
    volume = np.empty((plan.slices, size, size), np.int16)
    for number in range(plan.slices):
        z = (number + 0.5) / plan.slices + shift
        canvas.start(z)
        body.draw(canvas, z)
        if plan.injuries:
            paint_injuries(body, canvas, z, plan.injuries, tear)
        for one in look_alikes:
            painter = LOOK_ALIKE_KINDS[plan.anatomy][one.kind]
            _paint(painter, body, canvas, z, number, (one.start, one.stop), one.shape, 1.0)
        for block, shape in lesions:
            _paint(LESIONS[block.kind], body, canvas, z, number, (block.start, block.stop), shape, contrast)
        canvas.image += level * _grain(noise, size)
        volume[number] = np.rint(canvas.image).clip(LOWEST, HIGHEST)
    return volume


def draw_look_alikes(plan: ScanPlan) -> list[LookAlike]:
    """Draws the look-alikes of this scan, which do not depend on its label."""
    random, found = plan.stream("look-alikes"), []
    first, last = (round(edge * plan.slices) for edge in ANATOMIES[plan.anatomy].organ)
    for _ in range(int(random.poisson(LOOK_ALIKES))):
        kind = str(random.choice(list(LOOK_ALIKE_KINDS[plan.anatomy])))
        start = int(random.integers(first, last))
        length = 1 + int(random.integers(0, max(2, plan.slices // 7)))
        found.append(LookAlike(start, min(start + length, last), kind, Shape.draw(random)))
    return found


def _paint(
    painter: Painter,
    body: Any,
    canvas: Canvas,
    z: float,
    number: int,
    block: tuple[int, int],
    shape: Shape,
    contrast: float,
) -> None:
    start, stop = block
    if start <= number < stop:
        painter(body, canvas, z, (2 * number + 1 - start - stop) / (stop - start), shape, contrast)


def _pose(plan: ScanPlan) -> Pose:
    """The patient's size, and the patient's pose in this scan."""
    patient, scan = plan.patient_stream("size"), plan.stream("pose")
    width, depth = (float(value) for value in patient.normal(1.0, 0.04, 2).clip(0.9, 1.07))
    spread = 8.0 if plan.anatomy == "head" else 4.0
    angle = float(np.clip(scan.normal(0.0, 0.06), -0.15, 0.15))
    return Pose(angle, float(scan.normal(0.0, spread)), float(scan.normal(0.0, spread)), width, depth)


def _grain(random: np.random.Generator, size: int) -> np.ndarray:
    """Noise of standard deviation 1 that is correlated between neighbours, as after a reconstruction kernel."""
    white = random.standard_normal((size + 2, size + 2), np.float32)
    rows = white[:-2] + 2 * white[1:-1] + white[2:]
    return (rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]) / np.float32(6)
