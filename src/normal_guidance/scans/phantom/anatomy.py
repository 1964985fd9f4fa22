"""A head, a chest and an abdomen, drawn slice by slice from ellipses."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from normal_guidance.scans.phantom.drawing import Canvas, Cover, Field, bump, minus, ramp

CSF, GREY, WHITE, BONE, DIPLOE, HEAD_FAT, HEAD_MUSCLE = 7.0, 37.0, 29.0, 1250.0, 650.0, -90.0, 50.0
"""HU."""


class Outline(NamedTuple):
    """An organ's ellipse in one slice: centre and half-axes in mm."""

    x: float
    y: float
    a: float
    b: float


class Head:
    """One patient's head without contrast medium; heights are shares of the scan, from the neck to above the vertex."""

    WIDTH, DISTORTION, NOISE = 245.0, 3.0, (3.0, 6.5)
    """Width of the picture and bending of shapes in mm, and the range of the noise's standard deviation in HU."""

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
        a = (skull.a - self.thickness) * (1 - 0.2 * low) * end
        b = (skull.b - self.thickness) * (1 - 0.5 * low) * end
        return Outline(0.0, 0.47 * (skull.b - self.thickness) * low, max(a, 0.0), max(b, 0.0))

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
            canvas.ellipse(0.0, 22.0 * neck + 6.0, 70.0 - 6 * neck, 82.0 - 18 * neck, HEAD_FAT)
            canvas.ellipse(0.0, 22.0 * neck + 6.0, 66.0 - 6 * neck, 78.0 - 18 * neck, HEAD_MUSCLE)
            face = 1 - ramp(z, 0.28, 0.4)
            canvas.ellipse(0.0, -46.0, 58.0 * face, 52.0 * face, HEAD_FAT)
            canvas.ellipse(0.0, -44.0, 54.0 * face, 50.0 * face, HEAD_MUSCLE)
        if scalp.a > 0 and z > 0.12:
            canvas.ellipse(0.0, scalp.y, scalp.a + 6, scalp.b + 6, HEAD_MUSCLE)
            canvas.ellipse(0.0, scalp.y, scalp.a + 4.5, scalp.b + 4.5, HEAD_FAT)

    def _skull(self, canvas: Canvas, z: float, skull: Outline) -> None:
        thick = self.thickness
        if z < 0.14:  # below the base only its back is bone
            low = ramp(z, 0.06, 0.14)
            canvas.ellipse(0.0, 8.0, skull.a - 6, skull.b - 12, HEAD_MUSCLE)
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
        high, wide = bump(z, 0.46, 0.70), self.ventricles
        body = ramp(z, 0.58, 0.64)
        if high <= 0:
            return None
        front = canvas.cover(side * (9.0 + 3 * body), -24.0 + 10 * body, 5.5 * wide * high, 18.0 * high, side * -0.3)
        back = canvas.cover(side * 21.0, 32.0 - 14 * body, 6.0 * wide * high, 20.0 * high, side * 0.35)
        share = np.zeros_like(canvas.image)
        for horn in (front, back):
            if horn is not None:
                np.maximum(share[horn.box], horn.share, out=share[horn.box])
        return Cover((slice(0, canvas.size), slice(0, canvas.size)), share)

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
        mastoid = 200.0 + 900.0 * cells
        for side in (-1, 1):
            canvas.ellipse(side * 38.0, 10.0, 27.0 * petrous, 8.5 * petrous, 1000.0, side * -0.55)
            canvas.fill(canvas.cover(side * 54.0, 22.0, 13.0 * petrous, 15.0 * petrous), mastoid)
            orbit = bump(z, 0.2, 0.36)
            canvas.ellipse(side * 31.0, -62.0, 20.0 * orbit + 2, 27.0 * orbit + 2, BONE * min(orbit, 0.7), side * 0.25)
            canvas.ellipse(side * 31.0, -63.0, 19.0 * orbit, 26.0 * orbit, HEAD_FAT, side * 0.25)
            canvas.ellipse(side * 32.0, -72.0, 12.0 * orbit, 12.5 * orbit, 14.0)
            canvas.ellipse(side * 25.0, -50.0, 2.5 * orbit, 14.0 * orbit, 35.0, side * -0.3)
            sinus = bump(z, 0.02, 0.2)
            canvas.ellipse(side * 27.0, -62.0, 17.0 * sinus, 19.0 * sinus, 700.0)
            canvas.ellipse(side * 27.0, -62.0, 15.0 * sinus, 17.0 * sinus, -990.0)
        sphenoid = bump(z, 0.12, 0.3)
        canvas.ellipse(0.0, -18.0, 18.0 * sphenoid, 13.0 * sphenoid, 700.0)
        canvas.ellipse(0.0, -24.0, 12.0 * sphenoid, 8.0 * sphenoid, -950.0)
        nose = bump(z, -0.1, 0.32)
        canvas.fill(canvas.cover(0.0, -60.0, 9.0 * nose, 27.0 * nose), -450.0 + 600.0 * cells)
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


# The common parts of chest and abdomen: skin and fat, muscle, spine, ribs, and the patient's table.


FAT, MUSCLE, CORTEX, MARROW = -100.0, 55.0, 650.0, 230.0
"""HU."""

A, B = 168.0, 112.0
"""Half-axes of the body's outline in mm."""


def draw_body(canvas: Canvas, fat: float, *, scale: float = 1.0) -> None:
    """Skin, `fat` mm of fat, and muscle, which fills the body until organs are drawn."""
    a, b = A * scale, B * scale
    canvas.ellipse(0.0, 0.0, a, b, 20.0)
    canvas.ellipse(0.0, 0.0, a - 2, b - 2, FAT)
    canvas.ellipse(0.0, 1.0, a - fat, b - 0.8 * fat, MUSCLE)


def draw_table(canvas: Canvas) -> None:
    """A thin shell behind the patient, at the same place in all slices."""
    canvas.ellipse(0.0, -250.0, 390.0, 388.0, -450.0)
    canvas.ellipse(0.0, -250.0, 387.0, 385.0, -1000.0)


def draw_spine(canvas: Canvas, z: float, y: float, vertebrae: float) -> None:
    """Body, canal, arch and processes of a vertebra; `vertebrae` of them over the length of the scan."""
    phase = (z * vertebrae) % 1.0
    disc = phase < 0.22
    canvas.ellipse(0.0, y, 21.0, 16.5, 110.0 if disc else CORTEX)
    canvas.ellipse(0.0, y, 19.0, 14.5, 95.0 if disc else MARROW)
    if not disc:
        canvas.ellipse(0.0, y + 21, 15.0, 12.0, CORTEX)
    canvas.ellipse(0.0, y + 20, 10.0, 8.5, 30.0)
    process = 1 - abs(2 * phase - 1)
    canvas.ellipse(0.0, y + 34, 3.5, 5 + 7 * process, 480.0)
    for side in (-1, 1):
        canvas.ellipse(side * 24.0, y + 24, 4 + 12 * process, 4.0, 480.0, side * 0.35)
        canvas.ellipse(side * 25.0, y + 34, 17.0, 10.0, MUSCLE, side * 0.2)  # muscles beside the spine


def draw_ribs(canvas: Canvas, z: float, a: float, b: float, *, number: int, ribs: float) -> None:
    """Ribs, which run down from the back to the front, so that a slice cuts each of them at another place."""
    shift = (z * ribs) % 1.0
    for side in (-1, 1):
        for rib in range(number):
            turn = (rib + shift) / number  # 0 at the spine, 1 at the breast bone
            angle = math.pi / 2 - side * (0.3 + 2.35 * turn)
            x, y = a * math.cos(angle), b * math.sin(angle)
            along = math.atan2(b * math.cos(angle), -a * math.sin(angle))
            length = 13.0 if turn < 0.85 else 8.0
            canvas.ellipse(x, y, length, 4.2, 520.0, along)
            canvas.ellipse(x, y, length - 2, 2.2, 200.0, along)


HILUM = 0.54  # height at which the pulmonary arteries enter the lungs, as a share of the scan
CENTRAL = 0.03  # heights above and below the hilum at which clots are central
LUNGS = (0.07, 0.945)  # heights between which there is lung
LUNG = -840.0  # HU
ARTERIES = 4  # arteries of one lung that run down, and as many that run up


class Chest:
    """One patient's chest with contrast medium in the pulmonary arteries.

    Heights are shares of the scan: liver dome, heart, hilum, aortic arch, apex and shoulders.
    """

    WIDTH, DISTORTION, NOISE = 385.0, 5.0, (12.0, 26.0)

    def __init__(self, random: np.random.Generator, size: int) -> None:
        self.fat = float(random.uniform(8.0, 22.0))
        self.contrast = float(random.uniform(270.0, 400.0))
        self.aorta = float(random.uniform(0.45, 0.95)) * self.contrast
        self.heart = float(random.uniform(0.92, 1.12))
        self.texture = Field(random, size=size, cells=40, levels=30)
        self.coarse = Field(random, size=size, cells=12, levels=10)
        angles = random.uniform(-0.35, 0.35, (2, ARTERIES)) + np.linspace(-1.1, 1.1, ARTERIES)
        self._angles = angles.tolist()
        self._reach = random.uniform(0.55, 0.9, (2, ARTERIES)).tolist()
        self._small = random.uniform(0.0, 1.0, (2, 18, 5)).tolist()  # 18 small vessels of each lung

    def lung(self, z: float, side: int) -> Outline:
        """Ellipse of the left (1) or right (-1) lung."""
        height = math.sqrt(max(0.0, 1 - (max(z - 0.35, 0.0) / (LUNGS[1] - 0.35)) ** 2.6))
        low = ramp(z, LUNGS[0], 0.16)
        a = 55.0 * (0.35 + 0.65 * height) * low if height > 0 else 0.0
        return Outline(side * (71.0 - 18 * (1 - height)), 6.0 + 14 * (1 - height), a, 84.0 * height * low)

    def artery(self, z: float, side: int, number: int) -> tuple[float, float, float]:
        """Centre and radius of the artery that feeds one segment, from the hilum down or up to the end of the lung."""
        up = z > HILUM
        way = (z - HILUM) / (LUNGS[1] - HILUM) if up else (HILUM - z) / (HILUM - LUNGS[0])
        way = min(max(way, 0.0), 1.0)
        angle, reach = self._angles[(side + 1) // 2][number], self._reach[(side + 1) // 2][number]
        x, y, a, b = self.lung(z, side)
        out = reach * way**0.7
        end_x, end_y = 0.75 * a * math.cos(angle), 0.75 * b * math.sin(angle)
        hilum_x, hilum_y = side * 34.0, 8.0 + 5.0 * (number - 1.5)
        radius = (7.5 if number == 1 else 5.5) * (1 - 0.62 * way) * (0.85 if up else 1.0)
        return hilum_x + (x + side * end_x - hilum_x) * out, hilum_y + (y + end_y - hilum_y) * out, max(radius, 2.2)

    def draw(self, canvas: Canvas, z: float) -> None:
        draw_table(canvas)
        shoulders = ramp(z, 0.84, 0.98)
        draw_body(canvas, self.fat, scale=0.97 + 0.05 * shoulders)
        tissue = LUNG + 35 * self.texture.at(z) + 40 * self.coarse.at(z)
        for side in (-1, 1):
            x, y, a, b = self.lung(z, side)
            canvas.ellipse(x, y, a + 1.5, b + 1.5, -60.0)
            canvas.fill(canvas.cover(x, y, a, b), tissue)
        self._abdomen(canvas, z)
        self._mediastinum(canvas, z)
        self._vessels(canvas, z)
        draw_ribs(canvas, z, 0.735 * A, 0.84 * B, number=7, ribs=10.0)
        draw_spine(canvas, z, 54.0, 12.0)
        self._shoulders(canvas, z, shoulders)

    def _abdomen(self, canvas: Canvas, z: float) -> None:
        """Diaphragm: liver on the right, spleen and stomach on the left, growing towards the lower end."""
        liver, spleen = 1 - ramp(z, 0.02, 0.33), 1 - ramp(z, 0.0, 0.26)
        canvas.ellipse(-62.0, -4.0, 74.0 * liver, 82.0 * liver, 105.0, soft=2.0)
        canvas.ellipse(78.0, 30.0, 46.0 * spleen, 48.0 * spleen, 115.0, soft=2.0)
        canvas.ellipse(52.0, -30.0, 42.0 * spleen, 40.0 * spleen, 30.0, soft=2.0)
        canvas.ellipse(52.0, -44.0, 26.0 * spleen, 18.0 * spleen, -950.0)

    def _mediastinum(self, canvas: Canvas, z: float) -> None:
        high = ramp(z, 0.5, 0.75)
        canvas.ellipse(0.0, -14.0, 44.0 - 14 * high, 62.0 - 10 * high, -70.0, soft=2.0)
        canvas.ellipse(0.0, 58.0, 40.0, 28.0, MUSCLE)
        canvas.ellipse(0.0, -92.0, 20.0, 6.0, 350.0)  # breast bone
        heart = bump(z, 0.1, 0.5) * self.heart
        canvas.ellipse(16.0, -28.0, 62.0 * heart, 48.0 * heart, -60.0, 0.5)
        canvas.ellipse(16.0, -28.0, 58.0 * heart, 44.0 * heart, 110.0, 0.5)
        canvas.ellipse(36.0, -18.0, 25.0 * heart, 16.0 * heart, self.aorta, 0.6)  # left ventricle
        canvas.ellipse(-6.0, -44.0, 27.0 * heart, 17.0 * heart, self.contrast, 0.4)  # right ventricle
        canvas.ellipse(-26.0, -22.0, 16.0 * heart, 19.0 * heart, self.contrast - 20, 0.2)  # right atrium
        atrium = bump(z, 0.34, 0.53)
        canvas.ellipse(4.0, 14.0, 33.0 * atrium, 15.0 * atrium, self.aorta)
        canvas.ellipse(25.0, 38.0, 11.5, 11.5, self.aorta if z < 0.72 else MUSCLE)  # descending aorta
        rise = bump(z, 0.40, 0.76)
        canvas.ellipse(-10.0, -34.0, 16.0 * min(1.0, 2 * rise), 16.0 * min(1.0, 2 * rise), self.aorta)
        arch = bump(z, 0.67, 0.76)
        canvas.ellipse(5.0, 2.0, 12.5 * arch, 46.0 * arch, self.aorta, -0.35)
        if z > 0.74:
            for x, y in ((-14.0, -26.0), (2.0, -22.0), (16.0, -8.0)):
                canvas.ellipse(x, y, 5.0, 5.0, self.aorta)
        if z > 0.36:
            canvas.ellipse(-30.0, -26.0, 8.5, 10.0, self.contrast + 80)  # superior vena cava
        self._airway(canvas, z)

    def _airway(self, canvas: Canvas, z: float) -> None:
        if z > 0.60:
            canvas.ellipse(-2.0, 14.0, 10.0, 10.5, 40.0)
            canvas.ellipse(-2.0, 14.0, 8.5, 9.0, -990.0)
        elif z > 0.46:
            way = (0.60 - z) / 0.14
            for side in (-1, 1):
                canvas.ellipse(side * (7 + 30 * way), 16.0 + 6 * way, 7.5, 7.0, 40.0)
                canvas.ellipse(side * (7 + 30 * way), 16.0 + 6 * way, 6.0, 5.5, -980.0)
        canvas.ellipse(5.0, 30.0, 7.0, 5.0, 45.0)  # oesophagus

    def _vessels(self, canvas: Canvas, z: float) -> None:
        trunk, main = bump(z, 0.44, 0.60), bump(z, 0.50, 0.58)
        canvas.ellipse(18.0, -30.0, 15.0 * trunk, 17.0 * trunk, self.contrast)
        canvas.ellipse(26.0, -8.0, 11.0 * main, 24.0 * main, self.contrast, -0.5)
        canvas.ellipse(-12.0, -6.0, 32.0 * main, 9.5 * main, self.contrast, -0.2)
        for side in (-1, 1):
            for number in range(ARTERIES):
                x, y, radius = self.artery(z, side, number)
                if LUNGS[0] < z < LUNGS[1]:
                    canvas.ellipse(x, y, radius + 0.8, radius + 0.8, 0.0)
                    canvas.ellipse(x, y, radius, radius, self.contrast)
            self._small_vessels(canvas, z, side)

    def _small_vessels(self, canvas: Canvas, z: float, side: int) -> None:
        x, y, a, b = self.lung(z, side)
        for turn, out, low, span, fine in self._small[(side + 1) // 2]:
            here = bump(z, low - 0.1 - 0.3 * span, low + 0.1 + 0.3 * span)
            place = 0.3 + 0.6 * out + 0.35 * (z - low)
            if 0 < place < 0.93:
                angle = 6.28 * turn
                radius = (1.2 + 1.6 * fine) * here
                canvas.ellipse(x + a * place * math.cos(angle), y + b * place * math.sin(angle), radius, radius, 60.0)

    def _shoulders(self, canvas: Canvas, z: float, shoulders: float) -> None:
        blade, clavicle = ramp(z, 0.55, 0.75), bump(z, 0.84, 0.99)
        for side in (-1, 1):
            canvas.ellipse(side * (112.0 + 8 * blade), 58.0, 26.0 * blade, 4.0 * blade, 420.0, side * -0.9)
            canvas.ellipse(side * 52.0, -62.0, 40.0 * clavicle, 6.0 * clavicle, 480.0, side * 0.3)
            canvas.ellipse(side * 150.0, 8.0, 22.0 * shoulders, 24.0 * shoulders, 600.0)
            canvas.ellipse(side * 150.0, 8.0, 18.0 * shoulders, 20.0 * shoulders, 250.0)

    def central(self, canvas: Canvas, z: float, side: int) -> Cover | None:
        """The main pulmonary artery of one side; only near the hilum."""
        main = bump(z, 0.50, 0.58)
        if side > 0:
            return canvas.cover(26.0, -8.0, 7.0 * main, 19.0 * main, -0.5)
        return canvas.cover(-12.0, -6.0, 28.0 * main, 6.0 * main, -0.2)


class Abdomen:
    """One patient's abdomen with contrast medium in the portal venous phase.

    Heights are shares of the scan: pelvis, bowel, kidneys, liver and spleen, lung bases.
    """

    WIDTH, DISTORTION, NOISE = 385.0, 5.0, (8.0, 17.0)

    def __init__(self, random: np.random.Generator, size: int) -> None:
        self.fat = float(random.uniform(10.0, 34.0))
        self.vessel = float(random.uniform(140.0, 230.0))
        self.liver_hu = float(random.uniform(88.0, 118.0))
        self.kidney_hu = float(random.uniform(150.0, 210.0))
        self.texture = Field(random, size=size, cells=38, levels=30)
        self.coarse = Field(random, size=size, cells=12, levels=12)
        self._loops = random.uniform(0.0, 1.0, (26, 7)).tolist()  # of small bowel
        self._oral = float(random.uniform(0.0, 1.0))  # how much of the bowel holds contrast medium
        self._bladder = float(random.uniform(0.6, 1.2))

    def cavity(self, z: float) -> Outline:
        """Ellipse of the peritoneal cavity."""
        pelvis = 1 - ramp(z, 0.02, 0.3)
        a, b = A - self.fat - 15, B - 0.8 * self.fat - 10
        return Outline(0.0, -16.0 - 4 * pelvis, a * (1 - 0.42 * pelvis), (b - 16) * (1 - 0.12 * pelvis))

    def draw(self, canvas: Canvas, z: float) -> None:
        draw_table(canvas)
        draw_body(canvas, self.fat)
        self._walls(canvas, z)
        self._bowel(canvas, z)
        self._vessels(canvas, z)
        self._kidneys(canvas, z)
        self._upper(canvas, z)
        if z > 0.48:
            draw_ribs(canvas, z, A - self.fat - 7, B - 0.8 * self.fat - 5, number=6, ribs=9.0)
        if z > 0.14:
            draw_spine(canvas, z, 46.0, 11.0)
        self._pelvis(canvas, z)

    def _walls(self, canvas: Canvas, z: float) -> None:
        canvas.fill(canvas.cover(*self.cavity(z)), FAT + 12 + 14 * self.texture.at(z))
        canvas.ellipse(0.0, 62.0, 92.0, 26.0, FAT + 5)
        psoas = bump(z, 0.06, 0.62)
        for side in (-1, 1):
            canvas.ellipse(side * 40.0, 46.0, 15.0 * psoas, 19.0 * psoas, MUSCLE, side * -0.3)
            canvas.ellipse(side * 62.0, 72.0, 28.0, 15.0, MUSCLE, side * -0.25)

    def _bowel(self, canvas: Canvas, z: float) -> None:
        x, y, a, b = self.cavity(z)
        for turn, out, low, span, content, bend, wide in self._loops:
            middle = 0.1 + 0.5 * low
            here = bump(z, middle - 0.07 - 0.1 * span, middle + 0.07 + 0.1 * span)
            angle, place = 6.28 * turn + 2 * (z - middle), 0.15 + 0.6 * out
            at_x, at_y = x + a * place * math.cos(angle), y - 8 + 0.8 * b * place * math.sin(angle)
            size, other = (11 + 7 * wide) * here, (9 + 14 * span) * here
            canvas.ellipse(at_x, at_y, other, size, 75.0, 3.1 * bend)
            filled = 210.0 if content < 0.45 * self._oral else -850.0 if content > 0.9 else 22.0
            canvas.ellipse(at_x, at_y, other - 3, size - 3, filled, 3.1 * bend)
        self._colon(canvas, z)

    def _colon(self, canvas: Canvas, z: float) -> None:
        faeces = np.where(self.texture.at(z) > 0.1, -820.0, 20.0)
        _, y, a, b = self.cavity(z)
        for side, top in ((-1, 0.55), (1, 0.62)):
            here = bump(z, 0.12, top)
            wave = 1 + 0.15 * math.sin(70 * z + side)
            self._gut(canvas, side * (a - 24), 22.0, 22.0 * min(1.0, 1.6 * here) * wave, faeces)
        across = bump(z, 0.42, 0.56)
        for part in (-0.6, -0.2, 0.2, 0.6):
            self._gut(canvas, part * a, y - b + 28.0, 21.0 * across, faeces)
        self._gut(canvas, 8.0, 18.0, 20.0 * bump(z, 0.0, 0.16), faeces)

    def _gut(self, canvas: Canvas, x: float, y: float, radius: float, faeces: np.ndarray) -> None:
        canvas.ellipse(x, y, radius, radius * 0.9, 70.0)
        canvas.fill(canvas.cover(x, y, radius - 3, radius * 0.9 - 3), faeces)

    def _vessels(self, canvas: Canvas, z: float) -> None:
        split = 1 - ramp(z, 0.2, 0.34)
        for side in (-1, 1) if split > 0 else (1,):
            apart, radius = side * (6 + 36 * split), 10.0 - 4 * split
            canvas.ellipse(apart + 4, 22.0 + 14 * split, radius, radius, self.vessel)
            canvas.ellipse(apart - 24 * (side > 0), 24.0 + 14 * split, 12.0 - 5 * split, radius, self.vessel - 20)
        mesenteric = bump(z, 0.25, 0.62)
        canvas.ellipse(6.0, 2.0, 4.5 * mesenteric, 4.5 * mesenteric, self.vessel)
        canvas.ellipse(-8.0, 1.0, 6.0 * mesenteric, 6.0 * mesenteric, self.vessel - 15)

    def kidney(self, canvas: Canvas, z: float, side: int, shrink: float = 1.0) -> Cover | None:
        """The left (1) or right (-1) kidney; the right one lies lower."""
        here = bump(z, 0.36, 0.62) if side < 0 else bump(z, 0.39, 0.65)
        return canvas.cover(side * 68.0, 40.0, 25.0 * here * shrink, 31.0 * here * shrink, side * -0.5)

    def _kidneys(self, canvas: Canvas, z: float) -> None:
        for side in (-1, 1):
            canvas.fill(self.kidney(canvas, z, side), self.kidney_hu)
            canvas.fill(self.kidney(canvas, z, side, 0.62), self.kidney_hu - 45)
            sinus = bump(z, 0.44, 0.57)
            canvas.ellipse(side * 58.0, 36.0, 14.0 * sinus, 8.0 * sinus, FAT + 40, side * 0.5)

    def liver(self, canvas: Canvas, z: float) -> Cover | None:
        """The liver without the gall bladder."""
        here = bump(z, 0.38, 1.02) * ramp(z, 0.42, 0.6)
        whole = canvas.cover(-66.0, -12.0, 84.0 * here, 72.0 * here, 0.15)
        bladder = bump(z, 0.50, 0.62)
        return minus(whole, canvas.cover(-42.0, -28.0, 14.0 * bladder, 18.0 * bladder, 0.5))

    def spleen(self, canvas: Canvas, z: float) -> Cover | None:
        here = bump(z, 0.56, 0.90)
        return canvas.cover(100.0, 26.0, 24.0 * here, 46.0 * here, 0.25)

    def _upper(self, canvas: Canvas, z: float) -> None:
        stomach, pancreas = bump(z, 0.56, 0.93), bump(z, 0.54, 0.66)
        canvas.ellipse(12.0, -6.0, 52.0 * pancreas, 11.0 * pancreas, 90.0, -0.35)
        canvas.ellipse(58.0, -30.0, 50.0 * stomach, 34.0 * stomach, 75.0, -0.5)
        canvas.ellipse(58.0, -30.0, 46.0 * stomach, 30.0 * stomach, 25.0, -0.5)
        canvas.ellipse(66.0, -48.0, 28.0 * stomach, 10.0 * stomach, -900.0, -0.2)
        bladder = bump(z, 0.50, 0.62)
        canvas.ellipse(-42.0, -28.0, 14.0 * bladder, 18.0 * bladder, 10.0, 0.5)
        lungs = ramp(z, 0.78, 0.98)  # their bases, around the domes of liver and spleen
        for side in (-1, 1):
            canvas.ellipse(side * 70.0, 34.0 - 30 * lungs, 70.0 * lungs, 76.0 * lungs, -830.0)
        canvas.fill(self.liver(canvas, z), self.liver_hu + 5 * self.coarse.at(z))
        veins = bump(z, 0.60, 0.88)
        for x, y, angle in ((-70.0, -20.0, 0.7), (-52.0, 4.0, -0.4), (-92.0, 8.0, 0.2)):
            canvas.ellipse(x, y, 22.0 * veins, 4.0 * veins, self.liver_hu + 32, angle + 3 * z, soft=2.0)
        canvas.fill(self.spleen(canvas, z), self.liver_hu + 12)
        heart = ramp(z, 0.9, 0.99)
        canvas.ellipse(16.0, -48.0, 52.0 * heart, 34.0 * heart, 150.0)

    def _pelvis(self, canvas: Canvas, z: float) -> None:
        wing, hip, sacrum = bump(z, 0.03, 0.33), 1 - ramp(z, 0.03, 0.08), 1 - ramp(z, 0.13, 0.17)
        for side in (-1, 1):
            canvas.ellipse(side * (86.0 + 60 * (z - 0.1)), 38.0, 8.0 * wing, 46.0 * wing, 550.0, side * 0.75)
            canvas.ellipse(side * (86.0 + 60 * (z - 0.1)), 38.0, 4.5 * wing, 42.0 * wing, 220.0, side * 0.75)
            canvas.ellipse(side * 96.0, 22.0, 30.0 * hip, 30.0 * hip, 550.0)
            canvas.ellipse(side * 96.0, 22.0, 24.0 * hip, 24.0 * hip, 280.0)
            canvas.ellipse(side * 62.0, 76.0, 46.0 * hip, 22.0 * hip, MUSCLE, side * -0.2)
        canvas.ellipse(0.0, 66.0, 40.0 * sacrum, 15.0 * sacrum, 500.0)
        canvas.ellipse(0.0, 66.0, 37.0 * sacrum, 12.0 * sacrum, 200.0)
        canvas.ellipse(0.0, 76.0, 9.0 * sacrum, 4.0 * sacrum, 20.0)
        full = bump(z, -0.08, 0.14) * self._bladder
        canvas.ellipse(0.0, -24.0, 42.0 * full, 32.0 * full, 60.0)
        canvas.ellipse(0.0, -24.0, 39.0 * full, 29.0 * full, 8.0)
