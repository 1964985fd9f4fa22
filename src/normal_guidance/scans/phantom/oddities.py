"""Oddities of real datasets, each switched on by name; no scan has two, so that each can be studied alone."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from normal_guidance.base.errors import UserError
from normal_guidance.scans.phantom.drafts import LOCALIZER, UNEXTENDED, WRONG_INTERCEPT, Draft, Image

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

    text: str
    layouts: tuple[str, ...]
    change: Change


def _setting(detail: str, **values: Any) -> Change:
    """A change of the draft's own fields."""

    def change(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
        for name, value in values.items():
            setattr(draft, name, value)
        return detail, []

    return change


def _tilt(draft: Draft, random: np.random.Generator) -> tuple[str, list[Image]]:
    angle = math.radians(TILT)
    draft.tilt = TILT
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
    draft.incomplete_organ = True
    del draft.images[: len(draft.images) // 3]
    _renumber(draft, range(1, len(draft.images) + 1))
    return "the lower third is missing", []


_unreadable = _cut(0, "header", "file ends within its header")
_truncated = _cut(-1, "pixels", "file ends within its pixels; its header is whole")
_wrong_intercept = _setting("12-bit two's complement that is said to be unsigned", encoding=WRONG_INTERCEPT)
_bits = _setting("signed, but the sign is not extended from BitsStored to BitsAllocated", encoding=UNEXTENDED)
_multi_frame = _setting("all slices in one Legacy Converted Enhanced CT file", multi_frame=True)
_double_rows = _setting("its last row is in the label table twice", double_rows=True)
_rows_without_image = _setting("one row of the label table has no image", rows_without_image=True)
_indeterminate = _setting("called indeterminate", indeterminate=True)

ODDITIES: Mapping[str, Oddity] = {
    "tilt": Oddity("gantry tilt", EVERYWHERE, _tilt),
    "gaps": Oddity("slices left out", EVERYWHERE, _gaps),
    "duplicates": Oddity("a slice twice", EVERYWHERE, _duplicates),
    "mixed_series": Oddity("slices of another series in the folder", FOLDERS, _mixed_series),
    "localizer": Oddity("a localizer among the slices", EVERYWHERE, _localizer),
    "secondary_capture": Oddity("a secondary capture among the slices", EVERYWHERE, _secondary_capture),
    "one_slice": Oddity("one slice only", EVERYWHERE, _one_slice),
    "unreadable": Oddity("a file that ends within its header", EVERYWHERE, _unreadable),
    "truncated": Oddity("a file that ends within its pixels", EVERYWHERE, _truncated),
    "wrong_intercept": Oddity("12-bit data wrapped as in RSNA 2019", EVERYWHERE, _wrong_intercept),
    "bits": Oddity("signs not extended, as in RSNA 2023", EVERYWHERE, _bits),
    "multi_frame": Oddity("all slices in one file", ("folder",), _multi_frame),
    "no_position": Oddity("InstanceNumber only, no position", EVERYWHERE, _no_position),
    "reversed": Oddity("InstanceNumber against the position", EVERYWHERE, _reversed),
    "shuffled": Oddity("InstanceNumber in no order", EVERYWHERE, _shuffled),
    "double_rows": Oddity("a label twice", KAGGLE, _double_rows),
    "rows_without_image": Oddity("a label without image", KAGGLE, _rows_without_image),
    "indeterminate": Oddity("an exam called indeterminate", ("rsna-pe",), _indeterminate),
    "incomplete_organ": Oddity("a series without a part of the organ", ("rsna-at",), _incomplete_organ),
}
"""Oddities by name."""

NEEDS_ROW = ("double_rows", "rows_without_image")
"""Oddities of a scan's rows in a label table: in rsna-at only positive scans have any."""


def check_oddities(names: Sequence[str], layout: str) -> None:
    for name in names:
        if name not in ODDITIES:
            known = ", ".join(key for key, oddity in ODDITIES.items() if layout in oddity.layouts)
            raise UserError(f"oddity {name!r} is unknown; choose from {known}, or all")
        if layout not in ODDITIES[name].layouts:
            raise UserError(f"oddity {name!r} does not exist in {layout}, only in {', '.join(ODDITIES[name].layouts)}")


def assign_oddities(
    names: Sequence[str], labels: Sequence[int], random: np.random.Generator, layout: str
) -> dict[int, str]:
    """The oddity of every scan that has one, by the scan's number."""
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
