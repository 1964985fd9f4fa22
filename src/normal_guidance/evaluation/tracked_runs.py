"""Complete runs as `tracking` writes them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

from normal_guidance.evaluation.run_report import Run, Selected, load_run
from normal_guidance.evaluation.study_folder import find_folders
from normal_guidance.tracking import Training
from normal_guidance.training.run_folder import HISTORY_TABLE, REPORT
from normal_guidance.training.winners import read_history

CURVES = ("loss", "train_auroc", "val_auroc", "val_loss")


def tracked_runs(folder: Path) -> list[Training]:
    """The winners of every complete run METHOD/SEED in a folder; all other configurations are in history.parquet."""
    paths = ((f"{method}/{seed}", path) for method, seed, path in find_folders(folder))
    return [one for name, path in paths if (path / REPORT).is_file() for one in _of_run(name, load_run(path))]


def _of_run(name: str, run: Run) -> Iterator[Training]:
    history = read_history(run.folder / HISTORY_TABLE).to_pandas()
    for winner in run.winners:
        own = history[history["config"] == winner.number].sort_values("epoch")
        curves = {curve: own[curve].tolist() for curve in CURVES if curve in own}
        yield Training(
            f"{name}/{winner.group}" if winner.group else name, _options(run, winner), _metrics(winner), curves
        )


def _options(run: Run, winner: Selected) -> dict[str, object]:
    asked = {f"asked/{name}": value for name, value in run.report.get("options", {}).items()}
    return {**winner.config.as_json(), **asked}


def _metrics(winner: Selected) -> dict[str, float]:
    scores = {} if winner.test is None else asdict(winner.test)
    tested = {f"test/{name}": math.nan if value is None else float(value) for name, value in scores.items()}
    return {"selected/epoch": float(winner.epoch), "selected/val_auroc": winner.val_auroc, **tested}
