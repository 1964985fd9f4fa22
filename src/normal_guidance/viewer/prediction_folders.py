"""Find the predictions in the folder of a study, of one run, or of new scans.

DIR/METHOD/SEED/predictions.parquet                a study (`nguide experiment`), or runs of `nguide sweep`
DIR/predictions.parquet                            one run, or a model (`nguide fit`)
DIR/predictions.parquet and DIR/manifest.parquet   new scans (`nguide predict`)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from normal_guidance.core.methods import (
    CEILING,
    COMPARED,
    REFERENCE_TITLES,
    SCAN_REFERENCE,
    SLICE_REFERENCE,
    method_title,
)
from normal_guidance.data.findings import refuse_several
from normal_guidance.errors import UserError
from normal_guidance.evaluation.predictions import read_predictions
from normal_guidance.evaluation.study_folder import find_folders
from normal_guidance.files import read_json, read_json_as
from normal_guidance.training.run_folder import PREDICTION_TABLE, REPORT

SUMMARY, BUNDLE = "summary.json", "bundle.json"
"""Files beside predictions: for new scans, where the scans are and which model predicted them; for a model, itself."""

BRIEF = ("part", "scan_id", "patient_id", "label", "probability", "slices")
"""Columns for the list of scans: a few bytes a scan."""


@dataclass(frozen=True)
class PredictionFolder:
    """One method's predictions for the scans of one split."""

    name: str
    title: str
    path: Path
    group: str = ""
    scores: Path | None = None
    """Where the scans' probabilities are, if not in `path`: the supervised reference consists of two runs."""


@dataclass(frozen=True)
class SplitPredictions:
    """Methods that were tested on the same scans; the name is the seed, or empty where there is only one split."""

    name: str
    sources: tuple[PredictionFolder, ...]


def find_splits(folder: Path) -> list[SplitPredictions]:
    """Find every split of a folder, its methods in the order of the paper's tables."""
    if not folder.is_dir():
        raise UserError(f"{folder} is not a folder; give what nguide experiment, nguide sweep or nguide predict wrote")
    if (folder / PREDICTION_TABLE).is_file():
        return [SplitPredictions("", tuple(_sources_of_run(folder, _method_of(folder))))]
    refuse_several(folder)
    by_seed: dict[int, dict[str, Path]] = {}
    for method, seed, run in find_folders(folder):
        if (run / PREDICTION_TABLE).is_file():
            by_seed.setdefault(seed, {})[method] = run
    if not by_seed:
        raise UserError(
            f"{folder} holds neither {PREDICTION_TABLE} nor METHOD/SEED/{PREDICTION_TABLE}; give what nguide "
            "experiment, nguide sweep or nguide predict wrote, once it has ended"
        )
    splits = [SplitPredictions(str(seed), tuple(_sources_of_seed(runs))) for seed, runs in sorted(by_seed.items())]
    return [split for split in splits if split.sources]


def _sources_of_seed(runs: Mapping[str, Path]) -> Iterator[PredictionFolder]:
    """The folders of one seed by method; the two supervised references become one."""
    for method, run in runs.items():
        if method == SLICE_REFERENCE and SCAN_REFERENCE in runs:
            scores = runs[SCAN_REFERENCE] / PREDICTION_TABLE
            yield PredictionFolder(CEILING, method_title(CEILING), run / PREDICTION_TABLE, scores=scores)
        elif method != SCAN_REFERENCE:  # it sees a scan as a whole, so there is no curve
            yield from _sources_of_run(run, method)


def _sources_of_run(run: Path, method: str) -> Iterator[PredictionFolder]:
    """The predictions of a run, one entry for each winner."""
    path = run / PREDICTION_TABLE
    groups = pc.unique(read_predictions(path, ("group",))["group"]).to_pylist()
    title = method_title(method) if method in (*COMPARED, *REFERENCE_TITLES, CEILING) else method
    is_new = (run / SUMMARY).is_file()
    for group in groups:
        if group and is_new:  # a finding: the method is the same for all
            yield PredictionFolder(group, group, path, group)
        elif group:
            yield PredictionFolder(f"{method} {group}", f"{title}, {group}", path, group)
        else:
            yield PredictionFolder(method, title, path)


def _method_of(folder: Path) -> str:
    """The method by a run's report or by the summary of new scans; 'model' where neither names it."""
    about: Any = None
    if (folder / REPORT).is_file():
        about = read_json_as(folder / REPORT, _Report, exact=False).winners[:1]
    elif (folder / SUMMARY).is_file():
        about = [read_json_as(folder / SUMMARY, _Summary, exact=False).model]
    elif (folder / BUNDLE).is_file():
        about = [read_json(folder / BUNDLE)]
    one = about[0] if about and isinstance(about[0], dict) else {}
    config = one.get("config")
    method = one.get("method", config.get("method") if isinstance(config, dict) else None)
    return method if isinstance(method, str) else "model"


@dataclass(frozen=True)
class _Report:
    """What is read here of a run's report.json."""

    winners: list[dict[str, Any]]


@dataclass(frozen=True)
class _Summary:
    """What is read here of summary.json; other versions may have something else there."""

    model: Any = None
