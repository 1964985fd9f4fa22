"""An abdomen with contrast medium in the portal venous phase: pelvis, bowel, kidneys, liver and spleen, lung bases."""

from __future__ import annotations

import math

import numpy as np

from normal_guidance.simulate.phantom.drawing import Canvas, Cover, Field, bump, minus, ramp
from normal_guidance.simulate.phantom.trunk import FAT, MUSCLE, A, B, draw_body, draw_ribs, draw_spine, draw_table

WIDTH = 385.0
"""Width of the picture in mm."""
DISTORTION = 5.0
"""mm by which shapes are bent."""

LOOPS = 26
"""Loops of small bowel."""


class Abdomen:
    """One patient's abdomen; heights are shares of the scan, from the hips to the lung bases."""

    def __init__(self, random: np.random.Generator, size: int) -> None:
        self.fat = float(random.uniform(10.0, 34.0))
        self.vessel = float(random.uniform(140.0, 230.0))
        self.liver_hu = float(random.uniform(88.0, 118.0))
        self.kidney_hu = float(random.uniform(150.0, 210.0))
        self.texture = Field(random, size=size, cells=38, levels=30)
        self.coarse = Field(random, size=size, cells=12, levels=12)
        self._loops = random.uniform(0.0, 1.0, (LOOPS, 7)).tolist()
        self._oral = float(random.uniform(0.0, 1.0))  # how much of the bowel holds contrast medium
        self._bladder = float(random.uniform(0.6, 1.2))

    def cavity(self, z: float) -> tuple[float, float, float, float]:
        """Ellipse of the peritoneal cavity."""
        pelvis = 1 - ramp(z, 0.02, 0.3)
        a, b = A - self.fat - 15, B - 0.8 * self.fat - 10
        return 0.0, -16.0 - 4 * pelvis, a * (1 - 0.42 * pelvis), (b - 16) * (1 - 0.12 * pelvis)

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
        cavity = canvas.cover(*self.cavity(z))
        if cavity is not None:
            canvas.fill(cavity, FAT + 12 + 14 * self.texture.at(z)[cavity.box])
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
        faeces = self.texture.at(z)
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
        inside = canvas.cover(x, y, radius - 3, radius * 0.9 - 3)
        if inside is not None:
            canvas.fill(inside, np.where(faeces[inside.box] > 0.1, -820.0, 20.0))

    def _vessels(self, canvas: Canvas, z: float) -> None:
        split = 1 - ramp(z, 0.2, 0.34)
        for side in (-1, 1) if split > 0 else (1,):
            apart = side * (6 + 36 * split)
            canvas.ellipse(apart + 4, 22.0 + 14 * split, 10.0 - 4 * split, 10.0 - 4 * split, self.vessel)
            canvas.ellipse(
                apart - 24 * (side > 0), 24.0 + 14 * split, 12.0 - 5 * split, 10.0 - 4 * split, self.vessel - 20
            )
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
        liver = self.liver(canvas, z)
        if liver is not None:
            canvas.fill(liver, self.liver_hu + 5 * self.coarse.at(z)[liver.box])
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
