"""What the page may ask for: splits, their scans, and one scan with every method's curve.

Splits and scans have numbers, and nothing else comes from the page: a number is looked up in a table, and no name or
path that a client sends ever meets the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import torch

from normal_guidance import __version__
from normal_guidance.data.manifest import Manifest, ScanRow, read_manifest
from normal_guidance.data.windows import WINDOWS
from normal_guidance.errors import UserError
from normal_guidance.evaluation.predictions import read_predictions
from normal_guidance.evaluation.run_report import NOT_OURS
from normal_guidance.features.store import open_store
from normal_guidance.files import read_json
from normal_guidance.viewer.attention_curves import curve, number, numbers
from normal_guidance.viewer.cache import Cache
from normal_guidance.viewer.prediction_folders import (
    BRIEF,
    MANIFEST,
    SUMMARY,
    PredictionFolder,
    SplitPredictions,
    find_splits,
)

TABLE_BYTES = 2**28
"""Of predictions that stay in memory, so that the next scan of the same methods comes at once."""

ROWS = 16
"""Scans whose files and positions stay at hand: every slice asks for them."""

WHOLE_SCALE = (-1024.0, 3071.0)
"""HU that twelve bits hold: how slices look that the encoder saw without a window."""

DIRECTIONS = (("L", "R"), ("P", "A"), ("H", "F"))
"""What lies where x, y and z of a patient grow, and at the other end."""


class NotHereError(LookupError):
    """A number that is none of ours; the sentence goes to the page."""


@dataclass(frozen=True)
class Listed:
    """A scan in the list of a split."""

    number: int
    part: str
    label: int | None
    scores: tuple[float | None, ...]
    """Probabilities, by the split's methods."""


@dataclass(frozen=True)
class _Scan:
    """What all methods agree about."""

    scan_id: str
    patient_id: str
    slices: int


class Gallery:
    """The scans behind a folder's predictions.

    Args:
        folder: of a study, a run, or new scans.
        splits: its predictions.
        manifest: where the images and the slice labels are; None if nobody said.
        encoder_windows: lowest and highest HU that the encoder told apart, one pair for each channel.
    """

    def __init__(
        self,
        folder: Path,
        splits: Sequence[SplitPredictions],
        manifest: Manifest | None,
        encoder_windows: Sequence[tuple[float, float]] = (),
    ) -> None:
        self.folder, self.splits, self.manifest = folder, tuple(splits), manifest
        self.encoder_windows = tuple(encoder_windows)
        self._tables: Cache[tuple[Path, str], pa.Table] = Cache(TABLE_BYTES, lambda table: int(table.nbytes))
        self._scans: list[_Scan] = []
        self._number_of: dict[str, int] = {}
        self._lists = [self._read_list(split) for split in self.splits]
        self.row = lru_cache(ROWS)(self._row)

    def __len__(self) -> int:
        """Scans of all splits."""
        return len(self._scans)

    # ----------------------------------------------------------------------------------------------------
    # What the page asks for
    # ----------------------------------------------------------------------------------------------------

    def about(self) -> dict[str, Any]:
        """The first thing that the page reads."""
        return {
            "title": self.folder.resolve().name,
            "version": __version__,
            "splits": [
                {
                    "name": split.name,
                    "methods": [{"name": source.name, "title": source.title} for source in split.sources],
                }
                for split in self.splits
            ],
            "windows": self._windows(),
            "missing": self._missing(),
        }

    def scans(self, split: int) -> list[dict[str, Any]]:
        """The list of a split."""
        self._check_split(split)
        return [
            {
                **self._names(scan.number),
                "part": scan.part,
                "label": scan.label,
                "scores": [number(score) for score in scan.scores],
            }
            for scan in self._lists[split].values()
        ]

    def scan(self, split: int, scan: int) -> dict[str, Any]:
        """One scan of a split: geometry, truth, and every method's curve."""
        self._check_split(split)
        listed = self._lists[split].get(scan)
        if listed is None:
            raise NotHereError(f"split {split} has no scan {scan}; reload the page")
        row, note = None, None
        try:
            row = self.row(scan)
        except NotHereError as error:
            note = str(error)
        spacing = None if row is None else row.slice_spacing
        return {
            **self._names(scan),
            "part": listed.part,
            "label": listed.label,
            "methods": {
                source.name: self._curve(source, scan, score, spacing)
                for source, score in zip(self.splits[split].sources, listed.scores, strict=True)
            },
            **_geometry(row),
            "note": note,
        }

    def _row(self, scan: int) -> ScanRow:
        """Where the slices of a scan are; raises NotHereError that says why there are none."""
        if not 0 <= scan < len(self._scans):
            raise NotHereError(f"there is no scan {scan}; reload the page")
        known = self._scans[scan]
        if self.manifest is None:
            raise NotHereError("Images need the index of the scans.")
        place = self._place_of.get(known.scan_id)
        if place is None:
            raise NotHereError(
                f"The index {self.manifest.root} has no scan {known.scan_id}; give the one of this study."
            )
        row = self.manifest[place]
        if len(row) != known.slices:
            raise NotHereError(
                f"The index has {len(row)} slices of scan {known.scan_id}, the predictions have {known.slices}; "
                "they are of different versions of it, so no image is shown."
            )
        return row

    # ----------------------------------------------------------------------------------------------------
    # Tables
    # ----------------------------------------------------------------------------------------------------

    def _read_list(self, split: SplitPredictions) -> dict[int, Listed]:
        found: dict[int, tuple[str, int | None]] = {}
        scores: list[dict[int, float | None]] = []
        for source in split.sources:
            own: dict[int, float | None] = {}
            for row in read_predictions(source.path, BRIEF, group=source.group).to_pylist():
                scan = self._enter(row, source)
                found.setdefault(scan, (row["part"] or "", known_label(row["label"])))
                own[scan] = row["probability"]
            if source.scores is not None:
                brief = read_predictions(source.scores, ("scan_id", "probability")).to_pylist()
                told = {row["scan_id"]: row["probability"] for row in brief}
                own = {scan: told.get(self._scans[scan].scan_id) for scan in own}
            scores.append(own)
        return {
            scan: Listed(scan, part, label, tuple(own.get(scan) for own in scores))
            for scan, (part, label) in found.items()
        }

    def _enter(self, row: dict[str, Any], source: PredictionFolder) -> int:
        """A scan's number; scans of the same id are the same in all splits and for all methods."""
        scan = self._number_of.setdefault(row["scan_id"], len(self._scans))
        if scan == len(self._scans):
            self._scans.append(_Scan(row["scan_id"], row["patient_id"] or "", row["slices"]))
        if self._scans[scan].slices != row["slices"]:
            raise UserError(
                f"{source.path}: {row['slices']} slices of scan {row['scan_id']!r}, but {self._scans[scan].slices} in "
                "another run; give a folder whose runs saw the same scans"
            )
        return scan

    def _curve(
        self, source: PredictionFolder, scan: int, score: float | None, spacing: float | None
    ) -> dict[str, Any] | None:
        """None where the method was not tested on this scan, as Centered Gaussian is on no validation scan."""
        table = self._table(source)
        place = pc.index(table["scan_id"], self._scans[scan].scan_id).as_py()
        if place < 0:
            return None
        row = table.slice(place, 1).to_pylist()[0]
        attention, heads = torch.tensor(row["attention"]), torch.tensor(row["log_attention"])
        slices = self._scans[scan].slices
        whole = heads.ndim == 2 and len(attention) == heads.shape[1] == slices
        if not whole or not (attention.isfinite().all() and (attention >= 0).all()):
            raise UserError(
                f"{source.path}: the attention of scan {row['scan_id']!r} is not {slices} numbers of 0 or more; the "
                "file is damaged, or the model diverged"
            )
        return curve(attention, heads, score, spacing)

    def _table(self, source: PredictionFolder) -> pa.Table:
        key = (source.path, source.group)
        table = self._tables.get(key)
        if table is None:
            table = read_predictions(source.path, ("scan_id", "attention", "log_attention"), group=source.group)
            self._tables.put(key, table)
        return table

    def _names(self, scan: int) -> dict[str, Any]:
        known = self._scans[scan]
        return {"number": scan, "id": known.scan_id, "patient": known.patient_id, "slices": known.slices}

    def _check_split(self, split: int) -> None:
        if not 0 <= split < len(self.splits):
            raise NotHereError(f"there is no split {split}; reload the page")

    @cached_property
    def _place_of(self) -> dict[str, int]:
        """In the manifest."""
        return {} if self.manifest is None else {scan: place for place, scan in enumerate(self.manifest.scan_ids)}

    # ----------------------------------------------------------------------------------------------------
    # About the whole
    # ----------------------------------------------------------------------------------------------------

    def _windows(self) -> list[dict[str, Any]]:
        presets = [(name, name.capitalize(), window) for name, window in WINDOWS.items() if window is not None]
        several = len(self.encoder_windows) > 1
        for place, window in enumerate(self.encoder_windows, start=1):
            suffix = f" {place}" if several else ""
            presets.append((f"encoder{suffix}", f"Encoder{suffix}", window))
        return [{"name": name, "title": title, "low": low, "high": high} for name, title, (low, high) in presets]

    def _missing(self) -> list[dict[str, str]]:
        """What could be shown and is not, and the command that helps."""
        command = f"nguide view {self.folder}"
        if self.manifest is None and is_anonymous(self.folder):
            return [
                {
                    "what": "images",
                    "why": "No images: these results are anonymous, so they do not say where the scans lie. The key "
                    "slices are in each scan's strip.png. To look at all slices, predict without --anonymize.",
                    "command": "nguide predict SCAN --model MODEL -o OTHER",
                }
            ]
        if self.manifest is None:
            return [
                {
                    "what": "images",
                    "why": "No images and no slice labels: the predictions do not say where the scans lie. Give what "
                    "nguide index made.",
                    "command": f"{command} --index INDEX",
                }
            ]
        return []


def open_gallery(folder: Path, index: Path | None = None, store: Path | None = None) -> Gallery:
    """Reads what there is about the scans, and opens no scan.

    Args:
        folder: of a study, a run, or new scans.
        index: what `nguide index` made; new scans bring their own.
        store: of the features, for the window that the encoder saw.
    """
    splits = find_splits(folder)
    place = index or (folder if (folder / MANIFEST).is_file() else None)
    manifest = None if place is None else read_manifest(place)
    return Gallery(folder, splits, manifest, _encoder_windows(folder, store))


def _encoder_windows(folder: Path, store: Path | None) -> list[tuple[float, float]]:
    """As a store tells them, or the summary of new scans; none where nobody does."""
    summary = folder / SUMMARY
    if store is None and not summary.is_file():
        return []
    about = read_json(summary).get("model") if store is None else open_store(store).provenance
    try:
        windows = about["preprocessing"]["windows"]  # type: ignore[index]
        return [WHOLE_SCALE if window is None else (float(window[0]), float(window[1])) for window in windows]
    except (*NOT_OURS, IndexError) as error:
        if store is None:
            return []
        raise UserError(f"{store} does not say which windows its encoder saw; leave out --store") from error


def is_anonymous(folder: Path) -> bool:
    """Whether a folder is what `nguide predict --anonymize` made, which leaves out where the scans lie."""
    summary = folder / SUMMARY
    return summary.is_file() and read_json(summary).get("anonymous") is True


def _geometry(row: ScanRow | None) -> dict[str, Any]:
    """Of a scan whose images are there."""
    if row is None:
        return {"image": None, "truth": None, "positions": None}
    labels = [] if row.slice_labels is None else [int(label) for label in row.slice_labels]
    return {
        "image": {
            "rows": row.rows,
            "columns": row.columns,
            "spacing": None if row.pixel_spacing is None else numbers(row.pixel_spacing),
            "letters": letters(row.orientation),
        },
        "truth": labels if labels and min(labels) >= 0 else None,
        # Without a spacing they are slice numbers.
        "positions": None if row.slice_spacing is None else numbers(row.positions),
    }


def known_label(label: int | None) -> int | None:
    """Labels are 0 and 1; anything else is none.

    Example:
        >>> known_label(1), known_label(-1)
        (1, None)
    """
    return label if label in (0, 1) else None


def letters(orientation: Sequence[float] | None) -> dict[str, str] | None:
    """What lies at the edges of a slice, from the direction cosines of its rows and columns.

    Example:
        >>> letters((1.0, 0.0, 0.0, 0.0, 1.0, 0.0))
        {'left': 'R', 'right': 'L', 'top': 'A', 'bottom': 'P'}
    """
    if orientation is None:
        return None
    across, down = _direction(orientation[:3]), _direction(orientation[3:])
    return {"left": across[1], "right": across[0], "top": down[1], "bottom": down[0]}


def _direction(cosines: Sequence[float]) -> tuple[str, str]:
    """(Towards, from)."""
    axis = max(range(3), key=lambda place: abs(cosines[place]))
    positive, negative = DIRECTIONS[axis]
    return (positive, negative) if cosines[axis] > 0 else (negative, positive)
