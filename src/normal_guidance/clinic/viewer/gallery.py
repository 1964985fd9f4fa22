"""What the page can request: splits, their scans, and one scan with every method's curve.

The page sends only the numbers of splits and scans, which are looked up in tables: no name or path from a client is
ever used on the disk.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa
import pyarrow.compute as pc
import torch

from normal_guidance import __version__
from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json
from normal_guidance.clinic.viewer import runs
from normal_guidance.clinic.viewer.images import Cache
from normal_guidance.clinic.viewer.runs import PredictionFolder, ScanResult, SplitPredictions, number, numbers
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.features.windows import Window, window_from_json
from normal_guidance.scans.index.geometry import orientation_letters
from normal_guidance.scans.index.manifest import FINDINGS, MANIFEST, Manifest, ScanRow, beside, read_manifest
from normal_guidance.scans.index.problems import Caution
from normal_guidance.sweep.predictions import read_predictions
from normal_guidance.sweep.run import NOT_OURS

TABLE_BYTES = 2**28  # predictions that stay in memory: the next scan of the same methods is shown at once
ROWS = 16  # scans whose files and positions stay in memory: every slice needs them


class NotHereError(LookupError):
    """A number that does not exist; the page shows the message."""


class ListedScan(NamedTuple):
    """A scan in the list of a split, with its probabilities by the split's methods."""

    part: str
    label: int | None
    scores: tuple[float | None, ...]


class KnownScan(NamedTuple):
    """What is the same for all methods."""

    scan_id: str
    patient_id: str
    slices: int


class KnownModel(NamedTuple):
    """The windows of a model's encoder, one for each channel, and the dataset that it was trained on."""

    windows: tuple[Window | None, ...] = ()
    dataset: str | None = None


@dataclass(eq=False)
class Gallery:
    """The scans behind a folder's predictions; a manifest says where the images and the slice labels are."""

    folder: Path
    splits: Sequence[SplitPredictions]
    manifest: Manifest | None
    model: KnownModel = field(default_factory=KnownModel)

    def __post_init__(self) -> None:
        self.summary = runs.read_summary(self.folder)  # None for studies and runs
        pages = (self.folder / name for name, (_, mark) in runs.PAGES.items() if (self.folder / mark).is_file())
        self.page = next(filter(Path.is_file, pages), None)
        self._tables: Cache[tuple[Path, str], pa.Table] = Cache(TABLE_BYTES, lambda table: int(table.nbytes))
        ids: Sequence[str] = () if self.manifest is None else self.manifest.scan_ids
        self._row_of = {scan: index for index, scan in enumerate(ids)}
        self._scans: list[KnownScan] = []
        self._number_of: dict[str, int] = {}
        self._lists = [self._read_list(split) for split in self.splits]
        self.row = lru_cache(ROWS)(self._row)

    def __len__(self) -> int:
        """The number of scans in all splits."""
        return len(self._scans)

    def about(self) -> dict[str, Any]:
        """What the page reads first."""
        chooses_finding = self.summary is not None and all(source.group for source in self.splits[0].sources)
        dataset = None if self.manifest is None else self.manifest.about.get("source")
        body = runs.body_of([dataset, self.model.dataset], self.model.windows)
        return {
            "title": self.folder.resolve().name,
            "page": runs.PAGES[self.page.name][0] if self.page else "",
            "version": __version__,
            "splits": [
                {"name": split.name, "methods": [{"name": each.name, "title": each.title} for each in split.sources]}
                for split in self.splits
            ],
            "choice": "Finding" if chooses_finding else "Method",
            "windows": {
                modality: runs.display_windows(modality, body, self.model.windows) for modality in ("CT", "MR")
            },
            "missing": self._missing(),
            "not_predicted": [
                {"id": str(line.get("scan_id") or ""), "reason": str(line.get("reason") or "no reason is recorded")}
                for line in (self.summary.scans if self.summary else [])
                if line.get("state") in ("refused", "failed")
            ],
        }

    def scans(self, split: int) -> list[dict[str, Any]]:
        """The list of a split."""
        self._check_split(split)
        lines, sources = [], self.splits[split].sources
        for scan, listed in self._lists[split].items():
            result = self._results.get(self._scans[scan].scan_id)
            flags = [warning.flag for warning in self._warnings(scan) if warning.flag != runs.NOTE]
            lines.append(
                {
                    **self._names(scan),
                    "part": listed.part,
                    "label": listed.label,
                    "scores": [number(score) for score in listed.scores],
                    "positive": [None if result is None else result.of(source.group)["positive"] for source in sources],
                    "flags": list(dict.fromkeys(flags)),
                }
            )
        return lines

    def scan(self, split: int, scan: int) -> dict[str, Any]:
        """One scan of a split: geometry, slice labels, and every method's curve."""
        self._check_split(split)
        listed = self._lists[split].get(scan)
        if listed is None:
            raise NotHereError(f"split {split} has no scan {scan}; reload the page")
        row, note, scan_id = None, None, self._scans[scan].scan_id
        try:
            row = self.row(scan)
        except NotHereError as error:
            note = str(error)
        spacing = None if row is None else row.slice_spacing
        result = self._results.get(scan_id)
        return {
            **self._names(scan),
            "part": listed.part,
            "label": listed.label,
            "methods": {
                source.name: self._curve(source, scan, score, spacing)
                for source, score in zip(self.splits[split].sources, listed.scores, strict=True)
            },
            **_geometry(row),
            "series": (result.description if result else "") or (row and row.series_description) or "",
            "instance_numbers": (row and row.instance_numbers) or runs.read_instance_numbers(self.folder, scan_id),
            "warnings": [warning._asdict() for warning in self._warnings(scan)],
            "note": note,
        }

    def _row(self, scan: int) -> ScanRow:
        """The scan's row of the manifest; raises NotHereError, with the reason, if there is none."""
        if not 0 <= scan < len(self._scans):
            raise NotHereError(f"there is no scan {scan}; reload the page")
        known = self._scans[scan]
        if self.manifest is None:
            raise NotHereError("Images need the index of the scans: give --index.")
        index = self._row_of.get(known.scan_id)
        if index is None:
            root = self.manifest.root
            raise NotHereError(f"The index {root} has no scan {known.scan_id}; give the index of this study.")
        row = self.manifest[index]
        if len(row) != known.slices:
            raise NotHereError(
                f"The index has {len(row)} slices of scan {known.scan_id}, the predictions have {known.slices}; "
                "they belong to different versions of the scan, so no image is shown."
            )
        return row

    def _read_list(self, split: SplitPredictions) -> dict[int, ListedScan]:
        known: dict[int, tuple[str, int | None]] = {}
        by_method: list[dict[int, float | None]] = []
        for source in split.sources:
            scores: dict[int, float | None] = {}
            for row in read_predictions(source.path, runs.BRIEF, group=source.group).to_pylist():
                scan = self._enter(row, source)
                known.setdefault(scan, (row["part"] or "", row["label"] if row["label"] in (0, 1) else None))
                scores[scan] = row["probability"]
            if source.scores is not None:
                brief = read_predictions(source.scores, ("scan_id", "probability")).to_pylist()
                score_of = {row["scan_id"]: row["probability"] for row in brief}
                scores = {scan: score_of.get(self._scans[scan].scan_id) for scan in scores}
            by_method.append(scores)
        return {
            scan: ListedScan(part, label, tuple(scores.get(scan) for scores in by_method))
            for scan, (part, label) in known.items()
        }

    def _enter(self, row: dict[str, Any], source: PredictionFolder) -> int:
        """The scan's number, a new one for a new id: equal ids are the same scan in all splits and for all methods."""
        scan = self._number_of.setdefault(row["scan_id"], len(self._scans))
        if scan == len(self._scans):
            self._scans.append(KnownScan(row["scan_id"], row["patient_id"] or "", row["slices"]))
        if self._scans[scan].slices != row["slices"]:
            raise UserError(
                f"{source.path}: {row['slices']} slices of scan {row['scan_id']!r}, but {self._scans[scan].slices} in "
                "another run; give a folder whose runs saw the same scans"
            )
        return scan

    def _curve(
        self, source: PredictionFolder, scan: int, score: float | None, spacing: float | None
    ) -> dict[str, Any] | None:
        """The method's curve; None where it was not tested on this scan, as Centered Gaussian on validation scans."""
        key = (source.path, source.group)
        table = self._tables.get(key)
        if table is None:
            table = read_predictions(source.path, ("scan_id", "attention", "log_attention"), group=source.group)
            self._tables.put(key, table)
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
        drawn = runs.curve(attention, heads, score, spacing)
        result = self._results.get(row["scan_id"])
        return drawn if result is None else {**drawn, **runs.within(result.of(source.group), slices)}

    def _names(self, scan: int) -> dict[str, Any]:
        known = self._scans[scan]
        return {"number": scan, "id": known.scan_id, "patient": known.patient_id, "slices": known.slices}

    def _check_split(self, split: int) -> None:
        if not 0 <= split < len(self.splits):
            raise NotHereError(f"there is no split {split}; reload the page")

    @cached_property
    def _results(self) -> dict[str, ScanResult]:
        """The results of `nguide predict` by scan; empty for studies and runs."""
        if self.summary is None:
            return {}
        results = {scan.scan_id: runs.read_result(self.folder, scan.scan_id) for scan in self._scans}
        return {scan: result for scan, result in results.items() if result is not None}

    def _warnings(self, scan: int) -> list[Caution]:
        result = self._results.get(self._scans[scan].scan_id)
        if result is None:
            return [] if self.summary is None else [runs.NO_RESULT]
        return runs.warnings(result.problems, result.of_model)

    def _missing(self) -> list[dict[str, str]]:
        """What is missing on the page, and the command that adds it."""
        if self.manifest is not None:
            return []
        why = (
            "No images and no slice labels: the predictions do not say where the scans are. Give the index that nguide "
            "index made."
        )
        command = f"nguide view {self.folder} --index INDEX"
        if self.summary is not None and self.summary.anonymous:
            why = (
                "No images: these results are anonymous, so they do not say where the scans are. The key slices are in "
                "each scan's strip.png. To look at all slices, predict without --anonymize."
            )
            command = "nguide predict SCAN --model MODEL -o OTHER"
        return [{"what": "images", "why": why, "command": command}]


def open_gallery(folder: Path, index: Path | None = None, store: Path | None = None) -> Gallery:
    """Read everything about the scans of a study, a run or new scans but the scans; `store` records the window."""
    splits = runs.find_splits(folder)
    # New scans have their index in the folder; `nguide fit SCANS` keeps it as MODEL.index beside the model.
    made = folder.resolve()
    model = made.parent if (made.parent / FINDINGS).is_file() else made
    places = (folder, beside(model, "index"))
    scans = index or next((place for place in places if (place / MANIFEST).is_file()), None)
    manifest = None if scans is None else read_manifest(scans)
    bundle = folder / runs.BUNDLE
    if manifest is not None and bundle.is_file():  # the slice labels of the finding that the model is of
        finding = read_json(bundle).get("finding")
        name = finding.get("name") if isinstance(finding, dict) else None
        if name in [known.name for known in manifest.findings]:
            manifest = manifest.of_finding(name)
    return Gallery(folder, splits, manifest, _known_model(folder, store))


def _known_model(folder: Path, store: Path | None) -> KnownModel:
    """What a store, the summary of new scans or a model says of the encoder; nothing where none does."""
    summary = runs.read_summary(folder)
    about: Any = open_store(store).provenance if store is not None else summary and summary.model
    if about is None and (folder / runs.BUNDLE).is_file():
        about = read_json(folder / runs.BUNDLE)
    if about is None:
        return KnownModel()
    try:
        windows = tuple(window_from_json(window) for window in about["preprocessing"]["windows"])
    except (*NOT_OURS, IndexError) as error:
        if store is None:
            return KnownModel()
        raise UserError(f"{store} does not record the windows of its encoder; leave out --store") from error
    training = about.get("training")
    dataset = training.get("dataset") if isinstance(training, dict) else None
    return KnownModel(windows, dataset if isinstance(dataset, str) else None)


def _geometry(row: ScanRow | None) -> dict[str, Any]:
    """Size, spacing, slice labels and positions of a scan; None for each without a manifest."""
    if row is None:
        return {"image": None, "truth": None, "positions_mm": None, "modality": "CT"}
    labels = [] if row.slice_labels is None else [int(label) for label in row.slice_labels]
    letters = orientation_letters(row.orientation)
    return {
        "image": {
            "rows": row.rows,
            "columns": row.columns,
            "spacing": None if row.pixel_spacing is None else numbers(row.pixel_spacing),
            "letters": None if letters is None else letters._asdict(),
        },
        "truth": labels if labels and min(labels) >= 0 else None,
        # Without a spacing, those of the row are slice numbers.
        "positions_mm": None if row.slice_spacing is None else numbers(row.positions),
        "modality": "MR" if row.modality == "MR" else "CT",
    }
