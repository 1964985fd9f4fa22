"""Writes a whole phantom dataset, and phantom.json with the truth about it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normal_guidance import __version__
from normal_guidance.errors import UserError
from normal_guidance.files import folder_atomically, read_json, write_atomically, write_json
from normal_guidance.simulate.phantom.dicom_writer import COMPRESSIONS, write_draft
from normal_guidance.simulate.phantom.drafts import Draft, checksum, make_draft
from normal_guidance.simulate.phantom.folder_layouts import LAYOUTS, FolderLayout
from normal_guidance.simulate.phantom.oddities import ODDITIES, Note, assign_oddities, check_oddities
from normal_guidance.simulate.phantom.plan import ScanPlan, plan, stream
from normal_guidance.simulate.phantom.render import render

TRUTH = "phantom.json"
"""The file with the truth about the dataset; code that reads the scans must not need it."""

MIN_SIZE, MAX_SIZE = 32, 1024
"""Rows and columns of a slice."""

MIXED = "mixed"
"""The compressions in turn, one per scan."""


def write_phantom(
    layout: str,
    out: str | Path,
    *,
    scans: int,
    seed: int = 0,
    size: int = 128,
    contrast: float = 1.0,
    positive: float | None = None,
    slices: int | None = None,
    anatomy: str | None = None,
    oddities: Sequence[str] = (),
    compression: str = "none",
) -> dict[str, Any]:
    """Draws a dataset of phantoms and writes it as DICOM; returns the content of phantom.json.

    The same arguments give the same files, byte for byte.

    Args:
        layout: one of `LAYOUTS`.
        out: a folder that is empty or does not exist; one that the same arguments filled before is left as it is.
        contrast: contrast of the lesions: 0 makes them invisible, more than 1 makes them plainer.
        positive: share of positive scans; the default is that of the real dataset.
        slices: median number of slices; chest and abdomen have 64 by default, real scans four to five times as many.
        anatomy: head (default), chest or abdomen; only for the layout folder, because the others have their own.
        oddities: names of `ODDITIES`.
        compression: one of `COMPRESSIONS`, or mixed.
    """
    chosen = _check(layout, size, contrast, anatomy, oddities, compression)
    part = chosen.anatomy or anatomy or "head"
    about = {
        "about": "PHANTOM: drawn by a program, no patients",
        "version": __version__,
        "layout": layout,
        "anatomy": part,
        "options": {
            "scans": scans,
            "seed": seed,
            "size": size,
            "contrast": contrast,
            "positive": positive,
            "slices": slices,
            "oddities": list(oddities),
            "compression": compression,
        },
    }
    before = _complete(Path(out), about)
    if before is not None:
        return before
    plans = plan(part, scans, seed, positive=positive, slices=slices)
    labels = [one.label for one in plans]
    assigned = assign_oddities(oddities, labels, stream(seed, "oddities"), layout)
    truths, drafts = [], []
    with folder_atomically(out) as folder:
        for one in plans:
            draft = _draft(one, chosen, size, contrast, compression)
            note = _change(draft, assigned.get(one.number))
            names = _names(draft, chosen)
            write_draft(folder, draft, names)  # not synced: thousands of files that can be drawn again
            truths.append(_truth(draft, names, note))
            drafts.append(_without_pixels(draft))
        for name, text in chosen.tables(drafts, seed).items():
            write_atomically(folder / name, text.encode())
        truth = {**about, "scans": truths}
        write_json(folder / TRUTH, truth)
    return truth


def _complete(out: Path, about: Mapping[str, Any]) -> dict[str, Any] | None:
    """The truth of a dataset that was drawn with the same arguments before; None where there is none."""
    if not (out / TRUTH).is_file():
        return None
    truth = read_json(out / TRUTH, "delete the folder, and draw it again")
    return truth if {name: truth.get(name) for name in about} == about else None


def _check(
    layout: str, size: int, contrast: float, anatomy: str | None, oddities: Sequence[str], compression: str
) -> FolderLayout:
    if layout not in LAYOUTS:
        raise UserError(f"layout {layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
    if anatomy is not None and LAYOUTS[layout].anatomy not in (None, anatomy):
        raise UserError(f"anatomy {anatomy!r}: scans of {layout} are of the {LAYOUTS[layout].anatomy}; use folder")
    if not MIN_SIZE <= size <= MAX_SIZE:
        raise UserError(f"size is {size}; give rows and columns of a slice, from {MIN_SIZE} to {MAX_SIZE}")
    if not 0 <= contrast <= 5:
        raise UserError(f"contrast is {contrast}; give a factor from 0 (invisible) to 5")
    if compression not in (*COMPRESSIONS, MIXED):
        raise UserError(f"compression {compression!r} is unknown; choose one of {', '.join((*COMPRESSIONS, MIXED))}")
    check_oddities(oddities, layout)
    return LAYOUTS[layout]


def _draft(one: ScanPlan, layout: FolderLayout, size: int, contrast: float, compression: str) -> Draft:
    scan_id, patient_id = layout.ids(one)
    draft = make_draft(one, render(one, size, contrast=contrast), scan_id, patient_id)
    draft.scan_id = scan_id or draft.series_uid
    names = list(COMPRESSIONS)
    draft.compression = names[one.number % len(names)] if compression == MIXED else compression
    return draft


def _change(draft: Draft, oddity: str | None) -> Note | None:
    if oddity is None:
        return None
    detail, images = ODDITIES[oddity].change(draft, draft.plan.stream("oddity"))
    if oddity in ("wrong_intercept", "bits", "multi_frame", "truncated"):
        draft.compression = "none"  # an encoder would hide what is wrong with the pixels
    return Note(oddity, detail, images)


def _names(draft: Draft, layout: FolderLayout) -> dict[str, str]:
    """The paths of files by uid; the slices of a multi-frame scan share one."""
    names = {image.uid: layout.place(draft, image) for image in draft.files}
    if draft.multi_frame:
        first = names[draft.images[0].uid]
        names.update({image.uid: first for image in draft.images})
    return names


def _truth(draft: Draft, names: dict[str, str], note: Note | None) -> dict[str, Any]:
    """The truth about a scan: its slices in order, from the feet to the head, with their labels and HU."""
    return {
        "scan_id": draft.scan_id,
        "patient_id": draft.patient_id,
        "series_uid": draft.series_uid,
        "label": draft.label,
        "files": [names[image.uid] for image in draft.images],
        "frames": list(range(len(draft.images))) if draft.multi_frame else [0] * len(draft.images),
        "slice_labels": [image.label for image in draft.images],
        "hu_sha256": checksum(draft.images),
        "slice_spacing": draft.slice_spacing,
        "pixel_spacing": draft.pixel_spacing,
        "transfer_syntax": str(COMPRESSIONS[draft.compression]),
        "lesions": [[block.start, block.stop, block.kind] for block in draft.plan.blocks],
        "injuries": dict(draft.plan.injuries),
        "oddity": None if note is None else note.oddity,
        "detail": "" if note is None else note.detail,
        "odd_files": [] if note is None else [names[image.uid] for image in note.images],
    }


def _without_pixels(draft: Draft) -> Draft:
    """The draft without its pixels, which the label tables do not need: those of a dataset would fill the memory."""
    nothing = draft.images[0].hu[:0]
    draft.change(hu=nothing)
    draft.extras = [type(image)(**{**vars(image), "hu": nothing}) for image in draft.extras]
    return draft
