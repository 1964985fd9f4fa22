"""A drawn scan before it is written: its images, ids and headers, and the oddities that may still change them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any
from uuid import UUID

import numpy as np

from normal_guidance.base.errors import UserError
from normal_guidance.scans.phantom.anatomy import CENTRAL, HILUM
from normal_guidance.scans.phantom.plan import ANATOMIES, ScanPlan
from normal_guidance.scans.phantom.rendering import BODIES

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
        """A short name in the style of Kaggle's: the last 12 hexadecimal digits of the uid's number."""
        return f"{int(self.uid.rpartition('.')[2]):032x}"[-12:]


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
    oddity: str | None = None  # its name in `ODDITIES`
    compression: str = "none"

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


def uid_of(random: np.random.Generator) -> str:
    """A UID derived from a random UUID (version 4), by DICOM PS3.5 B.2."""
    return f"2.25.{UUID(bytes=random.bytes(16), version=4).int}"


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
    return hashlib.sha256(np.stack([image.hu for image in images]).astype("<i2").tobytes()).hexdigest()


# Oddities of real datasets, each switched on by name; no scan has two, so that each can be studied alone.


SHARE = 0.05  # share of the scans that an oddity changes, at least one

KAGGLE = ("rsna-ich", "rsna-pe", "rsna-at")
FOLDERS = ("rsna-pe", "rsna-at", "folder")
EVERYWHERE = (*KAGGLE, "folder")
TILT = 14.0  # degrees
MISSING = 2  # neighbouring slices that a gap leaves out
EXTRA = 3  # slices of another series in the scan's folder

Change = Callable[[Draft, np.random.Generator], tuple[str, list[Image]]]
"""Changes a draft; returns a description and the changed images (none: the scan as a whole)."""


@dataclass(frozen=True)
class Oddity:
    """An oddity of a scan, and the layouts that can have it."""

    layouts: tuple[str, ...]
    change: Change


def _named(detail: str, encoding: Encoding | None = None) -> Change:
    """A change of the encoding, or none here: the writer looks at the oddity's name."""

    def change(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
        draft.encoding = encoding or draft.encoding
        return detail, []

    return change


def _tilt(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    angle = math.radians(TILT)
    draft.change(orientation=(1.0, 0.0, 0.0, 0.0, math.cos(angle), math.sin(angle)))
    return f"gantry tilted by {TILT} degrees", []


def _gaps(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    start = int(random.integers(2, len(draft.images) - MISSING - 2))
    gone = draft.images[start : start + MISSING]
    del draft.images[start : start + MISSING]
    return f"{len(gone)} slices left out after the slice in this file", [draft.images[start - 1]]


def _duplicates(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    twice = draft.images[int(random.integers(len(draft.images)))]
    draft.extras.append(replace(twice, uid=draft.new_uid("duplicate"), instance=draft.next_instance))
    return "second copy of a slice, with a later InstanceNumber", draft.extras[-1:]


def _mixed_series(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    series = draft.new_uid("other series")
    for number, image in enumerate(draft.images[:EXTRA]):
        uid, instance = draft.new_uid(f"other series {number}"), draft.next_instance
        draft.extras.append(replace(image, uid=uid, instance=instance, series_uid=series))
    return f"slices of another series, {series}", draft.extras[-EXTRA:]


def _localizer(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    volume = np.stack([image.hu for image in draft.images[::-1]])
    size = volume.shape[1]
    rows = np.linspace(0, len(volume) - 1, size).round().astype(int)
    front = volume.astype(np.float32).mean(axis=1)[rows].astype(np.int16)  # seen from the front
    uid, plane = draft.new_uid("localizer"), (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)
    image = Image(uid, draft.next_instance, front, position=draft.images[-1].position, orientation=plane)
    draft.extras.append(replace(image, image_type=LOCALIZER))
    return "localizer", draft.extras[-1:]


def _secondary_capture(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    uid, hu = draft.new_uid("capture"), draft.images[len(draft.images) // 2].hu
    kind = ("DERIVED", "SECONDARY")
    draft.extras.append(Image(uid, draft.next_instance, hu, orientation=None, image_type=kind, capture=True))
    return "secondary capture of a slice", draft.extras[-1:]


def _one_slice(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    draft.images = [replace(draft.images[len(draft.images) // 2], instance=1)]
    return "one slice is left", []


def _cut(number: int, within: str, detail: str) -> Change:
    """The lowest or highest slice, which are never positive, ends within a part; the other slices are the scan."""

    def change(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
        draft.extras.append(replace(draft.images.pop(number), cut=within))
        return detail, draft.extras[-1:]

    return change


def _no_position(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    draft.change(position=None, orientation=None)
    return "no ImagePositionPatient, no ImageOrientationPatient", []


def _renumber(draft: Draft, numbers: Iterable[int]) -> None:
    draft.images = [replace(image, instance=number) for image, number in zip(draft.images, numbers, strict=True)]


def _reversed(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    _renumber(draft, range(len(draft.images), 0, -1))
    return "InstanceNumber runs down from the highest slice", []


def _shuffled(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    _renumber(draft, (1 + random.permutation(len(draft.images))).tolist())
    return "InstanceNumber in no order", []


def _incomplete_organ(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    """The lower third of the scan is missing."""
    del draft.images[: len(draft.images) // 3]
    _renumber(draft, range(1, len(draft.images) + 1))
    return "the lower third is missing", []


ODDITIES: Mapping[str, Oddity] = {
    "tilt": Oddity(EVERYWHERE, _tilt),
    "gaps": Oddity(EVERYWHERE, _gaps),
    "duplicates": Oddity(EVERYWHERE, _duplicates),
    "mixed_series": Oddity(FOLDERS, _mixed_series),
    "localizer": Oddity(EVERYWHERE, _localizer),
    "secondary_capture": Oddity(EVERYWHERE, _secondary_capture),
    "one_slice": Oddity(EVERYWHERE, _one_slice),
    "unreadable": Oddity(EVERYWHERE, _cut(0, "header", "file ends within its header")),
    "truncated": Oddity(EVERYWHERE, _cut(-1, "pixels", "file ends within its pixels; its header is whole")),
    "wrong_intercept": Oddity(
        EVERYWHERE, _named("12-bit two's complement that is said to be unsigned", WRONG_INTERCEPT)
    ),
    "bits": Oddity(
        EVERYWHERE, _named("signed, but the sign is not extended from BitsStored to BitsAllocated", UNEXTENDED)
    ),
    "multi_frame": Oddity(("folder",), _named("all slices in one Legacy Converted Enhanced CT file")),
    "no_position": Oddity(EVERYWHERE, _no_position),
    "reversed": Oddity(EVERYWHERE, _reversed),
    "shuffled": Oddity(EVERYWHERE, _shuffled),
    "double_rows": Oddity(KAGGLE, _named("its last row is in the label table twice")),
    "rows_without_image": Oddity(KAGGLE, _named("one row of the label table has no image")),
    "indeterminate": Oddity(("rsna-pe",), _named("called indeterminate")),
    "incomplete_organ": Oddity(("rsna-at",), _incomplete_organ),
}

NEEDS_ROW = ("double_rows", "rows_without_image")
"""Oddities of a scan's rows in a label table: in rsna-at only positive scans have any."""


def assign_oddities(
    names: Sequence[str], labels: Sequence[int], random: np.random.Generator, layout: str
) -> dict[int, str]:
    """The oddity of every scan that has one, by the scan's number."""
    for name in names:
        if name not in ODDITIES:
            known = ", ".join(key for key, oddity in ODDITIES.items() if layout in oddity.layouts)
            raise UserError(f"oddity {name!r} is unknown; choose from {known}, or all")
        if layout not in ODDITIES[name].layouts:
            raise UserError(f"oddity {name!r} does not exist in {layout}, only in {', '.join(ODDITIES[name].layouts)}")
    each, free = max(1, round(SHARE * len(labels))), random.permutation(len(labels)).tolist()
    if len(names) * each > len(labels):
        raise UserError(f"{len(names)} oddities change {each} scans each, but there are {len(labels)}; make more scans")
    assigned: dict[int, str] = {}
    # Oddities that only some scans can have choose first.
    for name in sorted(names, key=lambda name: name not in (*NEEDS_ROW, "indeterminate")):
        wanted = {"indeterminate": 0}.get(name, 1 if name in NEEDS_ROW and layout == "rsna-at" else None)
        fitting = [scan for scan in free if wanted is None or labels[scan] == wanted]
        if len(fitting) < each:
            kind = "positive" if wanted else "negative"
            raise UserError(f"oddity {name!r} needs {each} {kind} scans; make more scans, or change --positive")
        for scan in fitting[:each]:
            assigned[scan] = name
            free.remove(scan)
    return assigned
