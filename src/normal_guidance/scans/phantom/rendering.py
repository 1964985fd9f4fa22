"""Draws a scan, with lesions, which decide its label, and look-alikes, which do not.

A lesion moves the pixels under it towards its own HU by the share `contrast`: 0 leaves the slice unchanged.  It is
drawn in every slice of its block and in no other.  Look-alikes and injuries of solid organs have their own random
numbers, so that positive and negative scans have equally many of them.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import numpy as np

from normal_guidance.scans.phantom.anatomy import ARTERIES, CENTRAL, HILUM, Abdomen, Chest, Head
from normal_guidance.scans.phantom.drawing import Canvas, Cover, Pose, bump, minus, times
from normal_guidance.scans.phantom.plan import ANATOMIES, LesionBlock, ScanPlan

BLOOD, CLOT, LEAK, FLUID = 68.0, 45.0, 240.0, 30.0
"""HU of a fresh bleed, of a clot in a vessel, of leaking contrast medium, of fluid in fat."""


Shape = tuple[float, ...]  # the shape of a lesion or look-alike in all of its slices: six random numbers from 0 to 1


def draw_shape(random: np.random.Generator) -> Shape:
    return tuple(random.random(6).tolist())


Painter = Callable[[Any, Canvas, float, float, Shape, float], None]
"""Paints (body, canvas, height in the body, place in the block from -1 to 1, shape, contrast)."""


def stain(canvas: Canvas, cover: Cover | None, value: float, contrast: float) -> None:
    """Moves the pixels under a cover towards `value`, by the share `contrast`."""
    if cover is not None:
        canvas.fill(Cover(cover.box, cover.share * np.float32(contrast)), value)


def _swell(u: float) -> float:
    """The size at the place `u` of a block: 1 in the middle, a half at both ends."""
    return 0.5 + 0.5 * math.sqrt(max(0.0, 1 - u * u))


def _intraparenchymal(body: Head, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    turn, out, size, flat, tilt, _ = shape
    x, y, a, b = body.brain(z)
    angle, place = 6.28 * turn, 0.15 + 0.5 * out
    radius = min((8 + 12 * size) * _swell(u), 0.35 * a)
    at_x, at_y = x + a * place * math.cos(angle), y + b * place * math.sin(angle)
    spot = canvas.cover(at_x, at_y, radius, radius * (0.6 + 0.4 * flat), 3.1 * tilt, soft=2.0)
    stain(canvas, times(spot, canvas.cover(x, y, a, b)), BLOOD, contrast)


def _subdural(body: Head, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    turn, _, size, *_ = shape
    x, y, a, b = body.brain(z)
    angle = math.pi * (turn > 0.5) + 0.9 * (turn % 0.5 - 0.25)
    thick = min((3.5 + 4.5 * size) * _swell(u), 0.3 * a)
    rest = canvas.cover(x - thick * math.cos(angle), y - thick * math.sin(angle), a, b)
    stain(canvas, minus(canvas.cover(x, y, a, b), rest), BLOOD, contrast)


def _epidural(body: Head, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    turn, _, size, *_ = shape
    x, y, a, b = body.brain(z)
    angle = math.pi * (turn > 0.5) + 1.4 * (turn % 0.5 - 0.25)
    deep = min((8 + 7 * size) * _swell(u), 0.4 * a)
    lens = canvas.cover(x + a * math.cos(angle), y + b * math.sin(angle), deep, 2.3 * deep, angle)
    stain(canvas, times(lens, canvas.cover(x, y, a, b)), BLOOD, contrast)


def _intraventricular(body: Head, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    side = 1 if shape[0] > 0.5 else -1
    level = canvas.cover(side * 20.0, 38.0, 40.0, 38.0 * _swell(u))  # blood settles at the back
    stain(canvas, times(body.ventricle(canvas, z, side), level), BLOOD, contrast)
    x, y, a, b = body.brain(z)
    middle = canvas.cover(x, y + 0.08 * b, 0.05 * a, 0.14 * b * _swell(u))  # third and fourth ventricle
    stain(canvas, middle, BLOOD, contrast)


def _subarachnoid(body: Head, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    turn, _, size, *_ = shape
    x, y, a, b = body.brain(z)
    radius = min((28 + 20 * size) * _swell(u), 0.8 * a)
    angle = 6.28 * turn
    sector = canvas.cover(x + a * math.cos(angle), y + b * math.sin(angle), radius, radius, soft=4.0)
    rim = minus(canvas.cover(x, y, a, b), canvas.cover(x, y, a - 2.5, b - 2.5))
    for place in (rim, body.sulci(canvas, z)):
        stain(canvas, times(sector, place), BLOOD, contrast)


def _embolus(side: int, body: Chest, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    first, second, size, off, turn, _ = shape
    hosts = {int(ARTERIES * first), int(ARTERIES * second)}
    for number in hosts:
        x, y, radius = body.artery(z, side, number)
        clot = radius * (0.55 + 0.3 * size) * (0.6 + 0.4 * _swell(u))
        away = (radius - clot) * off
        cover = canvas.cover(x + away * math.cos(6.28 * turn), y + away * math.sin(6.28 * turn), clot, 0.85 * clot)
        stain(canvas, cover, CLOT, contrast)
    if abs(z - HILUM) < CENTRAL:
        reach = canvas.cover(side * 26.0, -6.0, 22.0 * _swell(u), 16.0)
        stain(canvas, times(body.central(canvas, z, side), reach), CLOT, contrast)


def _in_cavity(body: Abdomen, z: float, u: float, shape: Shape) -> tuple[float, float]:
    turn, out, _, drift, *_ = shape
    x, y, a, b = body.cavity(z)
    place = 0.2 + 0.55 * out
    angle = 6.28 * turn + 0.3 * (drift - 0.5) * u
    return x + a * place * math.cos(angle), y + b * place * math.sin(angle)


def _extravasation(body: Abdomen, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    x, y = _in_cavity(body, z, u, shape)
    size, tilt = shape[2], shape[4]
    radius = (5 + 7 * size) * _swell(u)
    around = canvas.cover(x, y, 2.2 * radius, 1.8 * radius, 3.1 * tilt, soft=5.0)
    stain(canvas, around, FLUID, 0.5 * contrast)
    for turn in (0.0, 2.1, 4.2):  # three spots that overlap: an irregular shape
        at_x, at_y = x + 0.5 * radius * math.cos(turn + tilt), y + 0.5 * radius * math.sin(turn + tilt)
        stain(canvas, canvas.cover(at_x, at_y, 0.7 * radius, 0.45 * radius, turn, soft=2.0), LEAK, 0.6 * contrast)


def _bowel(body: Abdomen, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    x, y = _in_cavity(body, z, u, shape)
    size, tilt = shape[2], shape[4]
    radius = (11 + 9 * size) * _swell(u)
    haze = canvas.cover(x, y, 1.7 * radius, 1.3 * radius, 3.1 * tilt, soft=6.0)
    if haze is not None:
        strands = np.clip(0.45 + 0.6 * body.texture.at(z)[haze.box], 0, 1)
        stain(canvas, Cover(haze.box, haze.share * strands), FLUID, contrast)
    wall = minus(canvas.cover(x, y, radius, 0.8 * radius), canvas.cover(x, y, radius - 6, 0.8 * radius - 6))
    stain(canvas, wall, 130.0, 0.8 * contrast)


LESIONS: Mapping[str, Painter] = {
    "intraparenchymal": _intraparenchymal,
    "subdural": _subdural,
    "epidural": _epidural,
    "intraventricular": _intraventricular,
    "subarachnoid": _subarachnoid,
    "left": partial(_embolus, 1),
    "right": partial(_embolus, -1),
    "Active_Extravasation": _extravasation,
    "Bowel": _bowel,
}


def _calcification(body: Head | Abdomen, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    turn, out, size, *_ = shape
    x, y, a, b = body.brain(z) if isinstance(body, Head) else body.cavity(z)
    place = 0.1 + 0.6 * out
    at_x, at_y = x + a * place * math.cos(6.28 * turn), y + b * place * math.sin(6.28 * turn)
    radius = (1.5 + 2.5 * size) * _swell(u)
    canvas.ellipse(at_x, at_y, radius, radius, 170.0 if isinstance(body, Head) else 420.0)


def _bone_edge(body: Head, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    """A slice that is partly bone: a bright band along the skull that is not a bleed."""
    turn, _, size, *_ = shape
    x, y, a, b = body.brain(z)
    thick = (1.5 + 2 * size) * _swell(u)
    rest = canvas.cover(x - thick * math.cos(6.28 * turn), y - thick * math.sin(6.28 * turn), a, b)
    stain(canvas, minus(canvas.cover(x, y, a, b), rest), 400.0, 0.12)


def _streak(body: Any, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    """Movement or metal: bright and dark lines across the patient."""
    turn, off, size, *_ = shape
    cos, sin = math.cos(3.14 * turn), math.sin(3.14 * turn)
    away = canvas.x * np.float32(sin) - canvas.y * np.float32(cos) - np.float32(60 * (off - 0.5))
    strength = (10 + 14 * size) * _swell(u) * (1.0 if isinstance(body, Head) else 2.5)
    lines = strength * np.cos(away / 4) * np.exp(-((away / 14) ** 2))
    canvas.image += np.where(canvas.image > -400, lines, 0)


def _sinus(body: Head, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    """Dense blood in a vein at the back of the brain, which is normal."""
    x, y, _, b = body.brain(z)
    canvas.ellipse(x, y + b - 4, 3.0 + 3 * shape[2], 3.5, 62.0)


def _node(body: Chest, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    """A lymph node beside an artery: as dense as a clot, but around the vessel and not in it."""
    side, number = 1 if shape[0] > 0.5 else -1, int(ARTERIES * shape[1])
    x, y, radius = body.artery(z, side, number)
    size = (2.5 + 3.5 * shape[2]) * _swell(u)
    angle = 6.28 * shape[3]
    away = radius + size
    canvas.ellipse(x + away * math.cos(angle), y + away * math.sin(angle), size, size, CLOT + 10)


def _mixing(body: Chest, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    """Blood without contrast medium in a vein: a dark core that is not a clot."""
    if z > 0.36:
        canvas.ellipse(-30.0, -26.0, 5.0 * _swell(u), 6.0 * _swell(u), 90.0, soft=3.0)
    else:
        canvas.ellipse(-26.0, -22.0, 8.0 * bump(z, 0.1, 0.5), 9.0 * bump(z, 0.1, 0.5), 90.0, soft=3.0)


def _plug(body: Chest, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    """Mucus in an airway, or a nodule."""
    side = 1 if shape[0] > 0.5 else -1
    x, y, a, b = body.lung(z, side)
    angle, place, radius = 6.28 * shape[1], 0.3 + 0.4 * shape[3], (2 + 3 * shape[2]) * _swell(u)
    canvas.ellipse(x + a * place * math.cos(angle), y + b * place * math.sin(angle), radius, radius, 35.0)


def _oral_contrast(body: Abdomen, canvas: Canvas, z: float, u: float, shape: Shape, contrast: float) -> None:
    """Swallowed contrast medium: as bright as a leak, but inside a loop of bowel."""
    x, y = _in_cavity(body, z, u, shape)
    radius = (9 + 5 * shape[2]) * _swell(u)
    canvas.ellipse(x, y, radius, 0.8 * radius, 75.0, 3.1 * shape[4])
    canvas.ellipse(x, y, radius - 3, 0.8 * radius - 3, 210.0, 3.1 * shape[4])


LOOK_ALIKE_KINDS: Mapping[str, Mapping[str, Painter]] = {
    "head": {"calcification": _calcification, "bone edge": _bone_edge, "streak": _streak, "sinus": _sinus},
    "chest": {"node": _node, "mixing": _mixing, "streak": _streak, "plug": _plug},
    "abdomen": {"calcification": _calcification, "oral contrast": _oral_contrast, "streak": _streak},
}


def paint_injuries(body: Abdomen, canvas: Canvas, z: float, injuries: Mapping[str, str], shape: Shape) -> None:
    """Dark tears of solid organs: labels of the patient, not of slices."""
    for organ, grade in injuries.items():
        deep = 1.0 if grade == "high" else 0.5
        angle = 3.1 * shape[0]
        if organ == "kidney":
            side = 1 if shape[1] > 0.5 else -1
            tear = canvas.cover(side * 74.0, 44.0, 20.0 * deep * bump(z, 0.43, 0.57), 4.0, angle, soft=2.0)
            stain(canvas, times(body.kidney(canvas, z, side), tear), FLUID, 0.9)
        elif organ == "spleen":
            tear = canvas.cover(104.0, 22.0, 22.0 * deep * bump(z, 0.64, 0.80), 5.0, angle, soft=2.0)
            stain(canvas, times(body.spleen(canvas, z), tear), FLUID + 10, 0.9)
        else:
            tear = canvas.cover(-88.0, 2.0, 34.0 * deep * bump(z, 0.62, 0.84), 7.0, angle, soft=3.0)
            stain(canvas, times(body.liver(canvas, z), tear), FLUID + 10, 0.8)


LOWEST, HIGHEST = -1000, 2047
"""Range of HU, which every encoding of the writer can hold; values beyond are clipped."""

BODIES: Mapping[str, type[Head | Chest | Abdomen]] = {"head": Head, "chest": Chest, "abdomen": Abdomen}


def render(plan: ScanPlan, size: int, *, contrast: float = 1.0) -> np.ndarray:
    """Draws a scan: int16 HU of (slices, rows, columns), from the lower end up; labels change only the lesions."""
    body: Any = BODIES[plan.anatomy](plan.patient_stream("body"), size)
    random = plan.patient_stream("distortion")
    patient_size, scan_pose = plan.patient_stream("size"), plan.stream("pose")
    width, depth = (float(value) for value in patient_size.normal(1.0, 0.04, 2).clip(0.9, 1.07))
    spread = 8.0 if plan.anatomy == "head" else 4.0  # mm
    angle = float(np.clip(scan_pose.normal(0.0, 0.06), -0.15, 0.15))
    pose = Pose(angle, float(scan_pose.normal(0.0, spread)), float(scan_pose.normal(0.0, spread)), width, depth)
    canvas = Canvas(size, body.WIDTH, pose, random, distortion=body.DISTORTION)
    scan, noise = plan.stream("scan"), plan.stream("noise")
    shift, level = float(scan.uniform(-0.01, 0.01)), float(scan.uniform(*body.NOISE))
    tear = draw_shape(plan.patient_stream("tear"))
    kinds = LOOK_ALIKE_KINDS[plan.anatomy]
    painted = [(kinds[block.kind], block, shape, 1.0) for block, shape in draw_look_alikes(plan)]
    for i, block in enumerate(plan.blocks):
        painted.append((LESIONS[block.kind], block, draw_shape(plan.stream(f"lesion {i}")), contrast))
    volume = np.empty((plan.slices, size, size), np.int16)
    for number in range(plan.slices):
        z = (number + 0.5) / plan.slices + shift
        canvas.start(z)
        body.draw(canvas, z)
        if plan.injuries:
            paint_injuries(body, canvas, z, plan.injuries, tear)
        for painter, block, shape, strength in painted:
            if block.start <= number < block.stop:
                place = (2 * number + 1 - block.start - block.stop) / (block.stop - block.start)
                painter(body, canvas, z, place, shape, strength)
        # Noise of standard deviation 1, correlated between neighbours as after a reconstruction kernel.
        white = noise.standard_normal((size + 2, size + 2), np.float32)
        rows = white[:-2] + 2 * white[1:-1] + white[2:]
        canvas.image += level * ((rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]) / np.float32(6))
        volume[number] = np.rint(canvas.image).clip(LOWEST, HIGHEST)
    return volume


def draw_look_alikes(plan: ScanPlan) -> list[tuple[LesionBlock, Shape]]:
    """Draws what looks like a lesion in this scan and is not one, whatever the scan's label."""
    random, drawn = plan.stream("look-alikes"), []
    first, last = (round(edge * plan.slices) for edge in ANATOMIES[plan.anatomy].organ)
    for _ in range(int(random.poisson(2.0))):  # the mean number of a scan
        kind = str(random.choice(list(LOOK_ALIKE_KINDS[plan.anatomy])))
        start = int(random.integers(first, last))
        length = 1 + int(random.integers(0, max(2, plan.slices // 7)))
        drawn.append((LesionBlock(start, min(start + length, last), kind), draw_shape(random)))
    return drawn
