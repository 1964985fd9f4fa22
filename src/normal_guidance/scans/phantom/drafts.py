"""A drawn scan before it is written: its images, ids and headers, which oddities may still change."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from normal_guidance.scans.phantom.anatomy import CENTRAL, HILUM, Abdomen, Chest, Head
from normal_guidance.scans.phantom.drawing import Canvas, Pose
from normal_guidance.scans.phantom.lesions import (
    LESIONS,
    LOOK_ALIKE_KINDS,
    LOOK_ALIKES,
    Shape,
    draw_shape,
    paint_injuries,
)
from normal_guidance.scans.phantom.plan import ANATOMIES, ScanPlan

LOWEST, HIGHEST = -1000, 2047
"""Range of HU, which every encoding of the writer can hold; values beyond are clipped."""

BODIES: Mapping[str, type[Head | Chest | Abdomen]] = {"head": Head, "chest": Chest, "abdomen": Abdomen}
"""The drawings of the body parts of `ANATOMIES`."""


class LookAlike(NamedTuple):
    """Something in the slices [start, stop) that looks like a lesion and is not one."""

    start: int
    stop: int
    kind: str
    shape: Shape


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
    painted = [(kinds[extra.kind], extra.start, extra.stop, extra.shape, 1.0) for extra in draw_look_alikes(plan)]
    for i, block in enumerate(plan.blocks):
        shape = draw_shape(plan.stream(f"lesion {i}"))
        painted.append((LESIONS[block.kind], block.start, block.stop, shape, contrast))
    volume = np.empty((plan.slices, size, size), np.int16)
    for number in range(plan.slices):
        z = (number + 0.5) / plan.slices + shift
        canvas.start(z)
        body.draw(canvas, z)
        if plan.injuries:
            paint_injuries(body, canvas, z, plan.injuries, tear)
        for painter, start, stop, shape, strength in painted:
            if start <= number < stop:
                painter(body, canvas, z, (2 * number + 1 - start - stop) / (stop - start), shape, strength)
        # Noise of standard deviation 1, correlated between neighbours as after a reconstruction kernel.
        white = noise.standard_normal((size + 2, size + 2), np.float32)
        rows = white[:-2] + 2 * white[1:-1] + white[2:]
        canvas.image += level * ((rows[:, :-2] + 2 * rows[:, 1:-1] + rows[:, 2:]) / np.float32(6))
        volume[number] = np.rint(canvas.image).clip(LOWEST, HIGHEST)
    return volume


def draw_look_alikes(plan: ScanPlan) -> list[LookAlike]:
    """Draws the look-alikes of this scan, which do not depend on its label."""
    random, drawn = plan.stream("look-alikes"), []
    first, last = (round(edge * plan.slices) for edge in ANATOMIES[plan.anatomy].organ)
    for _ in range(int(random.poisson(LOOK_ALIKES))):
        kind = str(random.choice(list(LOOK_ALIKE_KINDS[plan.anatomy])))
        start = int(random.integers(first, last))
        length = 1 + int(random.integers(0, max(2, plan.slices // 7)))
        drawn.append(LookAlike(start, min(start + length, last), kind, draw_shape(random)))
    return drawn


AXIAL = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0)
"""ImageOrientationPatient of an axial slice: rows to the left, columns to the back."""

ORIGINAL = ("ORIGINAL", "PRIMARY", "AXIAL")
LOCALIZER = ("ORIGINAL", "PRIMARY", "LOCALIZER")  # values of ImageType


@dataclass(frozen=True)
class Encoding:
    """The encoding of HU as stored values: BitsStored, PixelRepresentation and RescaleIntercept."""

    bits: int
    signed: bool
    intercept: int

    def store(self, hu: np.ndarray) -> np.ndarray:
        """The stored values as unsigned 16-bit numbers, cut to BitsStored: their sign is not extended."""
        return ((hu.astype(np.int32) - self.intercept) & ((1 << self.bits) - 1)).astype("<u2")


ENCODINGS = (Encoding(12, False, -1024), Encoding(16, True, 0), Encoding(16, True, -1024))
"""The usual encodings; every scan has one of them."""
WRONG_INTERCEPT = Encoding(12, False, 0)
"""RSNA 2019: two's complement in 12 bits, declared as unsigned; negative values appear as large ones."""
UNEXTENDED = Encoding(12, True, 0)  # RSNA 2023: two's complement in 12 bits of a 16-bit word whose upper bits are 0


@dataclass(frozen=True, eq=False)
class Image:
    """One image of a scan: a slice, or an image that is not a slice (for instance a localizer)."""

    uid: str
    instance: int  # InstanceNumber
    hu: np.ndarray
    label: int = 0
    kinds: frozenset[str] = frozenset()  # lesions of the slice
    position: tuple[float, float, float] | None = None  # ImagePositionPatient
    orientation: tuple[float, ...] | None = AXIAL
    image_type: tuple[str, ...] = ORIGINAL
    series_uid: str | None = None  # SeriesInstanceUID; None for the scan's own
    capture: bool = False  # whether it is a secondary capture
    cut: str | None = None  # where the file is truncated: in its 'header' or in its 'pixels'

    @property
    def key(self) -> str:
        """A short name in the style of Kaggle's: 12 hexadecimal digits of the uid."""
        return short_name(self.uid)


@dataclass
class Draft:
    """One scan before it is written."""

    plan: ScanPlan
    scan_id: str
    patient_id: str
    study_uid: str
    series_uid: str
    frame_uid: str
    date: str
    images: list[Image]  # slices in their true order
    pixel_spacing: float
    slice_spacing: float
    encoding: Encoding
    extras: list[Image] = field(default_factory=list)  # images that are not slices of the scan
    tilt: float = 0.0
    multi_frame: bool = False
    compression: str = "none"
    # Of its rows in the label tables.
    double_rows: bool = False
    rows_without_image: bool = False
    indeterminate: bool = False
    incomplete_organ: bool = False

    @property
    def label(self) -> int:
        return int(any(image.label for image in self.images))

    @property
    def files(self) -> list[Image]:
        """All images, slices first."""
        return [*self.images, *self.extras]

    @property
    def next_instance(self) -> int:
        return 1 + max(image.instance for image in self.files)

    def change(self, **values: Any) -> None:
        """Changes all slices."""
        self.images = [replace(image, **values) for image in self.images]

    def new_uid(self, purpose: str) -> str:
        return uid_of(self.plan.stream(f"uid {purpose}"))


def short_name(uid: str) -> str:
    """The last 12 hexadecimal digits of a uid's number."""
    return f"{int(uid.rpartition('.')[2]):032x}"[-12:]


def uid_of(random: np.random.Generator) -> str:
    """A UID derived from a random UUID (version 4), by DICOM PS3.5 B.2."""
    number = int.from_bytes(random.bytes(16), "big")
    number = number & ~(0xF << 76) | 4 << 76  # version
    number = number & ~(0x3 << 62) | 2 << 62  # variant
    return f"2.25.{number}"


def make_draft(plan: ScanPlan, volume: np.ndarray, scan_id: str, patient_id: str) -> Draft:
    """Gives a drawn volume its ids, positions and encoding; none of them depends on the labels."""
    random = plan.stream("ids")
    study, series, frame = uid_of(random), uid_of(random), uid_of(random)
    date = f"{int(random.integers(2009, 2020))}{int(random.integers(1, 13)):02d}{int(random.integers(1, 29)):02d}"
    encoding = ENCODINGS[int(random.integers(len(ENCODINGS)))]
    spacing = ANATOMIES[plan.anatomy].extent / plan.slices
    width, size = BODIES[plan.anatomy].WIDTH, volume.shape[1]
    corner, bottom = -width / 2 + width / size / 2, round(float(random.uniform(-900, 300)), 1)

    def kinds(number: int) -> frozenset[str]:
        shown = {block.kind for block in plan.blocks if block.start <= number < block.stop}
        central = plan.anatomy == "chest" and shown and abs((number + 0.5) / plan.slices - HILUM) < CENTRAL
        return frozenset({*shown, "central"} if central else shown)

    images = [
        Image(
            uid=uid_of(random),
            instance=number + 1,
            hu=volume[number],
            label=int(plan.slice_labels[number]),
            kinds=kinds(number),
            position=(corner, corner, bottom + number * spacing),
        )
        for number in range(plan.slices)
    ]
    scan_id = scan_id or series
    return Draft(plan, scan_id, patient_id, study, series, frame, date, images, width / size, spacing, encoding)


def checksum(images: list[Image]) -> str:
    """sha256 of the slices' HU in their true order, as little-endian 16-bit numbers."""
    digest = hashlib.sha256()
    for image in images:
        digest.update(image.hu.astype("<i2").tobytes())
    return digest.hexdigest()
