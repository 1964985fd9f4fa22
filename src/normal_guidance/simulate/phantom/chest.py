"""A chest with contrast medium in the pulmonary arteries: liver dome, heart, hilum, aortic arch, apex and shoulders."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from normal_guidance.simulate.phantom.drawing import Canvas, Cover, Field, bump, ramp
from normal_guidance.simulate.phantom.trunk import MUSCLE, A, B, draw_body, draw_ribs, draw_spine, draw_table

WIDTH = 385.0
"""Width of the picture in mm."""
DISTORTION = 5.0
"""mm by which shapes are bent."""

HILUM = 0.54
"""Height at which the pulmonary arteries enter the lungs, as a share of the scan."""
CENTRAL = 0.03
"""Heights above and below the hilum at which clots are central."""
LUNGS = (0.07, 0.945)
"""Heights between which there is lung."""
LUNG = -840.0
"""HU."""
ARTERIES = 4
"""Arteries of one lung that run down, and as many that run up."""
SMALL_VESSELS = 18
"""Small vessels of one lung."""


class ChestSection(NamedTuple):
    """A vessel cut by a slice: centre and radius in mm."""

    x: float
    y: float
    radius: float


class Chest:
    """One patient's chest; heights are shares of the scan, from the upper abdomen to the base of the neck."""

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
        self._small = random.uniform(0.0, 1.0, (2, SMALL_VESSELS, 5)).tolist()

    def lung(self, z: float, side: int) -> tuple[float, float, float, float]:
        """Ellipse of the left (1) or right (-1) lung."""
        height = math.sqrt(max(0.0, 1 - (max(z - 0.35, 0.0) / (LUNGS[1] - 0.35)) ** 2.6))
        low = ramp(z, LUNGS[0], 0.16)
        a = 55.0 * (0.35 + 0.65 * height) * low if height > 0 else 0.0
        return side * (71.0 - 18 * (1 - height)), 6.0 + 14 * (1 - height), a, 84.0 * height * low

    def artery(self, z: float, side: int, number: int) -> ChestSection:
        """The artery that feeds one segment, from the hilum down or up to the end of the lung."""
        up = z > HILUM
        way = (z - HILUM) / (LUNGS[1] - HILUM) if up else (HILUM - z) / (HILUM - LUNGS[0])
        way = min(max(way, 0.0), 1.0)
        angle, reach = self._angles[(side + 1) // 2][number], self._reach[(side + 1) // 2][number]
        x, y, a, b = self.lung(z, side)
        out = reach * way**0.7
        end_x, end_y = 0.75 * a * math.cos(angle), 0.75 * b * math.sin(angle)
        hilum_x, hilum_y = side * 34.0, 8.0 + 5.0 * (number - 1.5)
        radius = (7.5 if number == 1 else 5.5) * (1 - 0.62 * way) * (0.85 if up else 1.0)
        return ChestSection(
            hilum_x + (x + side * end_x - hilum_x) * out, hilum_y + (y + end_y - hilum_y) * out, max(radius, 2.2)
        )

    def draw(self, canvas: Canvas, z: float) -> None:
        draw_table(canvas)
        shoulders = ramp(z, 0.84, 0.98)
        draw_body(canvas, self.fat, scale=0.97 + 0.05 * shoulders)
        for side in (-1, 1):
            x, y, a, b = self.lung(z, side)
            canvas.ellipse(x, y, a + 1.5, b + 1.5, -60.0)
            lung = canvas.cover(x, y, a, b)
            if lung is not None:
                canvas.fill(lung, LUNG + 35 * self.texture.at(z)[lung.box] + 40 * self.coarse.at(z)[lung.box])
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
