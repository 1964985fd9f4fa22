"""A head without contrast medium: neck and face, skull base, brain with ventricles and sulci, vertex."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from normal_guidance.simulate.phantom.drawing import Canvas, Cover, Field, bump, minus, ramp

WIDTH = 245.0
"""Width of the picture in mm."""
DISTORTION = 3.0
"""mm by which shapes are bent."""

CSF, GREY, WHITE, BONE, DIPLOE, FAT, MUSCLE = 7.0, 37.0, 29.0, 1250.0, 650.0, -90.0, 50.0
"""HU."""


class Outline(NamedTuple):
    """The brain's ellipse in one slice: centre and half-axes in mm."""

    x: float
    y: float
    a: float
    b: float


class Head:
    """One patient's head; heights are shares of the scan, from the neck to above the vertex."""

    def __init__(self, random: np.random.Generator, size: int) -> None:
        self.age = float(random.uniform(0.0, 1.0))  # wider ventricles and sulci
        self.ventricles = 0.75 + 0.6 * self.age + float(random.normal(0.0, 0.08))
        self.thickness = float(random.uniform(5.5, 8.0))
        self.folds = Field(random, size=size, cells=22, levels=14)
        self.border = Field(random, size=size, cells=14, levels=8)
        self.cells = Field(random, size=size, cells=45, levels=24)
        self.calcified = float(random.uniform(0.0, 1.0))

    def skull(self, z: float) -> Outline:
        """Outer table of the skull."""
        dome = math.sqrt(max(0.0, 1 - (max(z - 0.45, 0.0) / 0.49) ** 2))
        base = 1 - 0.16 * (1 - ramp(z, 0.08, 0.4))
        return Outline(0.0, 0.0, 74.0 * dome * base, 91.0 * dome * base)

    def brain(self, z: float) -> Outline:
        """Inside of the skull; in the posterior fossa only its back part."""
        skull = self.skull(z)
        low = 1 - ramp(z, 0.12, 0.37)
        end = ramp(z, 0.06, 0.12)
        inner = self.thickness
        a = (skull.a - inner) * (1 - 0.2 * low) * end
        b = (skull.b - inner) * (1 - 0.5 * low) * end
        return Outline(0.0, 0.47 * (skull.b - inner) * low, max(a, 0.0), max(b, 0.0))

    def draw(self, canvas: Canvas, z: float) -> None:
        self._neck_and_face(canvas, z)
        skull, brain = self.skull(z), self.brain(z)
        if skull.a > 3 and z > 0.06:
            self._skull(canvas, z, skull)
        if brain.a > 2:
            self._brain(canvas, z, brain)
        if z < 0.36:
            self._skull_base(canvas, z)

    def _neck_and_face(self, canvas: Canvas, z: float) -> None:
        scalp = self.skull(z)
        if z < 0.4:  # the lower end: neck and jaw
            neck = 1 - ramp(z, 0.02, 0.12)
            canvas.ellipse(0.0, 22.0 * neck + 6.0, 70.0 - 6 * neck, 82.0 - 18 * neck, FAT)
            canvas.ellipse(0.0, 22.0 * neck + 6.0, 66.0 - 6 * neck, 78.0 - 18 * neck, MUSCLE)
            face = 1 - ramp(z, 0.28, 0.4)
            canvas.ellipse(0.0, -46.0, 58.0 * face, 52.0 * face, FAT)
            canvas.ellipse(0.0, -44.0, 54.0 * face, 50.0 * face, MUSCLE)
        if scalp.a > 0 and z > 0.12:
            canvas.ellipse(0.0, scalp.y, scalp.a + 6, scalp.b + 6, MUSCLE)
            canvas.ellipse(0.0, scalp.y, scalp.a + 4.5, scalp.b + 4.5, FAT)

    def _skull(self, canvas: Canvas, z: float, skull: Outline) -> None:
        thick = self.thickness
        if z < 0.14:  # below the base only its back is bone
            low = ramp(z, 0.06, 0.14)
            canvas.ellipse(0.0, 8.0, skull.a - 6, skull.b - 12, MUSCLE)
            brain = self.brain(z)
            canvas.ellipse(brain.x, brain.y, (brain.a + thick) * low, (brain.b + thick) * low, BONE)
            return
        canvas.ellipse(skull.x, skull.y, skull.a, skull.b, BONE)
        canvas.ellipse(skull.x, skull.y, skull.a - 0.3 * thick, skull.b - 0.3 * thick, DIPLOE)
        canvas.ellipse(skull.x, skull.y, skull.a - 0.65 * thick, skull.b - 0.65 * thick, BONE)
        if z < 0.4:  # in front of the brain: face, not brain
            canvas.ellipse(skull.x, skull.y, skull.a - thick, skull.b - thick, 30.0)

    def _brain(self, canvas: Canvas, z: float, brain: Outline) -> None:
        x, y, a, b = brain
        if z < 0.37:  # wall between the posterior fossa and the face
            canvas.ellipse(x, y, a + 4, b + 4, BONE)
        inside = canvas.cover(x, y, a, b)
        canvas.fill(inside, CSF)
        gap = 0.8 + 2.0 * self.age
        cortex = canvas.cover(x, y, a - gap, b - gap)
        canvas.fill(cortex, GREY)
        white = canvas.cover(x, y, a - 11, b - 11, soft=2.0)
        if white is not None:
            wavy = np.clip(white.share * (0.9 + 1.2 * self.border.at(z)[white.box]), 0, 1)
            canvas.fill(Cover(white.box, wavy), WHITE)
        canvas.fill(self.sulci(canvas, z), CSF)
        if z > 0.4:
            canvas.ellipse(0.0, 0.0, 0.9, b - 3, 46.0)  # falx
        self._deep(canvas, z)

    def sulci(self, canvas: Canvas, z: float) -> Cover | None:
        """Fluid between the folds of the cortex: where a smooth random field changes its sign, near the surface."""
        x, y, a, b = self.brain(z)
        rim = minus(canvas.cover(x, y, a, b), canvas.cover(x, y, a - 17, b - 17, soft=4.0))
        if rim is None:
            return None
        width = 0.08 + 0.12 * self.age
        lines = np.clip(1.3 * (1 - np.abs(self.folds.at(z)[rim.box]) / width), 0, 1)
        return Cover(rim.box, rim.share * lines * (0.55 + 0.4 * self.age))

    def ventricle(self, canvas: Canvas, z: float, side: int) -> Cover | None:
        """One lateral ventricle: front horn, body and back horn."""
        height, wide = bump(z, 0.46, 0.70), self.ventricles
        body = ramp(z, 0.58, 0.64)
        if height <= 0:
            return None
        front = canvas.cover(
            side * (9.0 + 3 * body), -24.0 + 10 * body, 5.5 * wide * height, 18.0 * height, side * -0.3
        )
        back = canvas.cover(side * 21.0, 32.0 - 14 * body, 6.0 * wide * height, 20.0 * height, side * 0.35)
        return _union(canvas, front, back)

    def _deep(self, canvas: Canvas, z: float) -> None:
        nuclei, wide = bump(z, 0.42, 0.6), self.ventricles
        for side in (-1, 1):
            canvas.ellipse(side * 24.0, -12.0, 7.0 * nuclei, 17.0 * nuclei, GREY + 1, side * -0.25, soft=2.0)
            canvas.ellipse(side * 11.0, 10.0, 9.0 * nuclei, 13.0 * nuclei, GREY, side * 0.5, soft=2.0)
        for side in (-1, 1):
            canvas.fill(self.ventricle(canvas, z, side), CSF)
        third = bump(z, 0.40, 0.52)
        canvas.ellipse(0.0, 4.0, 2.2 * wide * third, 12.0 * third, CSF)
        fourth = bump(z, 0.2, 0.34)
        canvas.ellipse(0.0, 42.0, 7.0 * wide * fourth, 5.0 * fourth, CSF)
        cisterns = bump(z, 0.33, 0.44)
        for angle in (0.0, 1.05, -1.05):
            canvas.ellipse(14 * math.sin(angle), 4 - 14 * math.cos(angle), 14 * cisterns, 4 * cisterns, CSF, angle)
        if z < 0.36:  # brain stem in its cistern
            stem = ramp(z, 0.08, 0.16)
            canvas.ellipse(0.0, 18.0, 17 * stem, 14 * stem, CSF)
            canvas.ellipse(0.0, 20.0, 13 * stem, 11 * stem, GREY - 4)
        self._calcifications(canvas, z)

    def _calcifications(self, canvas: Canvas, z: float) -> None:
        """Pineal gland and choroid plexus, in most adults; their size differs."""
        if self.calcified > 0.3:
            pineal, plexus = bump(z, 0.47, 0.52), bump(z, 0.54, 0.6)
            canvas.ellipse(0.0, 22.0, 3.0 * pineal * self.calcified, 3.0 * pineal * self.calcified, 160.0)
            for side in (-1, 1):
                size = 3.5 * plexus * self.calcified
                canvas.ellipse(side * 21.0, 27.0, size, 1.4 * size, 140.0, side * 0.3)

    def _skull_base(self, canvas: Canvas, z: float) -> None:
        petrous, cells = bump(z, 0.13, 0.27), self.cells.at(z)
        for side in (-1, 1):
            canvas.ellipse(side * 38.0, 10.0, 27.0 * petrous, 8.5 * petrous, 1000.0, side * -0.55)
            mastoid = canvas.cover(side * 54.0, 22.0, 13.0 * petrous, 15.0 * petrous)
            if mastoid is not None:
                canvas.fill(mastoid, 200.0 + 900.0 * cells[mastoid.box])
            orbit = bump(z, 0.2, 0.36)
            canvas.ellipse(side * 31.0, -62.0, 20.0 * orbit + 2, 27.0 * orbit + 2, BONE * min(orbit, 0.7), side * 0.25)
            canvas.ellipse(side * 31.0, -63.0, 19.0 * orbit, 26.0 * orbit, FAT, side * 0.25)
            canvas.ellipse(side * 32.0, -72.0, 12.0 * orbit, 12.5 * orbit, 14.0)
            canvas.ellipse(side * 25.0, -50.0, 2.5 * orbit, 14.0 * orbit, 35.0, side * -0.3)
            sinus = bump(z, 0.02, 0.2)
            canvas.ellipse(side * 27.0, -62.0, 17.0 * sinus, 19.0 * sinus, 700.0)
            canvas.ellipse(side * 27.0, -62.0, 15.0 * sinus, 17.0 * sinus, -990.0)
        sphenoid = bump(z, 0.12, 0.3)
        canvas.ellipse(0.0, -18.0, 18.0 * sphenoid, 13.0 * sphenoid, 700.0)
        canvas.ellipse(0.0, -24.0, 12.0 * sphenoid, 8.0 * sphenoid, -950.0)
        nose = canvas.cover(0.0, -60.0, 9.0 * bump(z, -0.1, 0.32), 27.0 * bump(z, -0.1, 0.32))
        if nose is not None:
            canvas.fill(nose, -450.0 + 600.0 * cells[nose.box])
        frontal = bump(z, 0.31, 0.42)
        canvas.ellipse(0.0, -80.0, 15.0 * frontal, 6.0 * frontal, 800.0)
        canvas.ellipse(0.0, -80.0, 13.0 * frontal, 4.0 * frontal, -980.0)
        spine = 1 - ramp(z, 0.06, 0.12)
        canvas.ellipse(0.0, 28.0, 14.0 * spine, 13.0 * spine, 600.0)
        canvas.ellipse(0.0, 44.0, 22.0 * spine, 8.0 * spine, 700.0)
        canvas.ellipse(0.0, 37.0, 8.0 * spine, 7.0 * spine, 25.0)
        canvas.ellipse(0.0, -2.0, 11.0 * spine, 8.0 * spine, -980.0)  # airway
        jaw = 1 - ramp(z, 0.02, 0.07)
        for side in (-1, 1):
            canvas.ellipse(side * 36.0, -46.0, 4.0 * jaw, 24.0 * jaw, 1100.0, side * -0.35)


def _union(canvas: Canvas, one: Cover | None, other: Cover | None) -> Cover:
    """Both covers in one, over the whole picture."""
    share = np.zeros_like(canvas.image)
    for cover in (one, other):
        if cover is not None:
            np.maximum(share[cover.box], cover.share, out=share[cover.box])
    return Cover((slice(0, canvas.size), slice(0, canvas.size)), share)
