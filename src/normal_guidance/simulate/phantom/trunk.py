"""The common parts of chest and abdomen: skin and fat, muscle, spine, ribs, and the patient's table."""

from __future__ import annotations

import math

from normal_guidance.simulate.phantom.drawing import Canvas

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
