"""A sweep from the data to the report in one call; a killed run resumes from its folder."""

from __future__ import annotations

import hashlib
import math
import platform
from collections.abc import Callable, Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import numpy as np
import torch

from normal_guidance import __version__
from normal_guidance.core.bags import Bags
from normal_guidance.core.metrics import scan_level
from normal_guidance.core.prediction import Prediction
from normal_guidance.evaluation.predictions import prediction_table, write_predictions_table
from normal_guidance.evaluation.run_report import Run, check_files, load_run, report
from normal_guidance.features.store import FeatureStore, fingerprint_of
from normal_guidance.features.store_files import dtype_name
from normal_guidance.files import write_json
from normal_guidance.source_version import source_version
from normal_guidance.statistics.scores import Scores, score
from normal_guidance.training.checkpoint import SAVE_EPOCHS, SAVE_SECONDS, StateFile
from normal_guidance.training.config import Config, check_together
from normal_guidance.training.execution import Execution, current_device
from normal_guidance.training.loop import predict_bags
from normal_guidance.training.progress import SweepProgress
from normal_guidance.training.run_folder import (
    PREDICTION_TABLE,
    REPORT,
    STATE,
    RunFolder,
    identity_of,
    is_begun,
    open_run,
)
from normal_guidance.training.selection import group_of
from normal_guidance.training.stacked_model import initial_model
from normal_guidance.training.sweep import Sweep, check_scans, sweep
from normal_guidance.training.winners import group_names, winner_model, write_history, write_winners

Data = Bags | FeatureStore


def run_sweep(
    folder: str | Path,
    configs: Sequence[Config],
    train: Data,
    val: Data,
    test: Data | None = None,
    execution: Execution | None = None,
    *,
    save_epochs: int = SAVE_EPOCHS,
    save_seconds: float = SAVE_SECONDS,
    options: Mapping[str, Any] | None = None,
    watch: Callable[[SweepProgress], None] | None = None,
) -> Run:
    """Train all configurations, score the winners on the test scans and write everything to `folder`.

    Started again with the same arguments, a killed run resumes from its last state, which is at most `save_epochs`
    epochs or `save_seconds` back, plus the epoch it was in; a complete run is only loaded.  `options` are copied to the
    report.
    """
    execution = execution or Execution()
    with open_run(folder, _identity(configs, train, val, test, execution)) as run:
        if not run.complete:
            state = run.state(save_epochs, save_seconds, environment(execution))
            result = sweep(configs, train, val, execution, checkpoint=state, watch=watch)
            scored = {"val": val} | ({} if test is None else {"test": test})
            _finish(run, result, scored, execution, state, dict(options or {}), features_of(train))
    found = load_run(folder)
    check_files(found)
    return found


def check_sweep(
    folder: str | Path,
    configs: Sequence[Config],
    train: Data,
    val: Data,
    test: Data | None = None,
    execution: Execution | None = None,
) -> None:
    """Refuse at once a model, scans or a folder that `run_sweep` would refuse, perhaps hours later."""
    identity = _identity(configs, train, val, test, execution or Execution())
    initial_model(configs[0], train.width)
    is_begun(folder, identity)


def _identity(
    configs: Sequence[Config], train: Data, val: Data, test: Data | None, execution: Execution
) -> dict[str, Any]:
    """What a run is of; refuse what cannot be trained before a folder is made for it."""
    check_together(configs)
    check_scans(configs[0], train, val)
    parts = {"train": train, "val": val} | ({} if test is None else {"test": test})
    return identity_of(configs, execution, {part: _fingerprints(part, scans) for part, scans in parts.items()})


def _fingerprints(part: str, scans: Data) -> dict[str, Any]:
    """Identify the scans and their order, which decides which scans share a batch."""
    return {
        "scans": len(scans),
        "fingerprint": scans.fingerprint if isinstance(scans, FeatureStore) else fingerprint_of({part: scans}),
        "order": hashlib.sha256("\n".join(scans.scan_ids).encode()).hexdigest()[:16],
    }


def features_of(scans: Data) -> dict[str, Any] | None:
    """How a store's features were made, and its finding, as the report holds it: a model needs it for new scans.

    None for bags in memory, which do not record it.
    """
    if not isinstance(scans, FeatureStore):
        return None
    return {
        "recipe": scans.recipe,
        "width": scans.width,
        "dtype": dtype_name(scans.dtype),
        "provenance": dict(scans.provenance),
        **({} if scans.finding is None else {"finding": scans.finding.as_json()}),
    }


def _finish(
    run: RunFolder,
    result: Sweep,
    parts: Mapping[str, Data],
    execution: Execution,
    state: StateFile,
    options: dict[str, Any],
    features: Mapping[str, Any] | None,
) -> None:
    """Write the results of a sweep, the report last."""
    write_history(run.path, result)
    write_winners(run.path, result, next(iter(parts.values())).width)
    tables, scores = [], {}
    for name, part, scans, prediction in _predictions(result, parts, execution):
        tables.append(prediction_table(scans, prediction, part=part, group=name))
        if part == "test":
            scores[name] = _scores(scans, prediction)
    write_predictions_table(run.path / PREDICTION_TABLE, tables)
    times = {**result.seconds, "total": state.seconds}
    written = report(
        run.identity,
        result,
        scores,
        state.environments,
        seconds=times,
        resumed=state.resumed,
        options=options,
        features=features,
    )
    write_json(run.path / REPORT, written)
    (run.path / STATE).unlink(missing_ok=True)


def _predictions(
    result: Sweep, parts: Mapping[str, Data], execution: Execution
) -> list[tuple[str, str, Data, Prediction]]:
    """Every winner's predictions for every part, on the host: group, part, scans, prediction."""
    names, made = group_names(result.configs), []
    with current_device(execution.device):
        for winner in result.winners:
            width = next(iter(parts.values())).width
            model = winner_model(winner.config, width, winner.weights).to(execution.device)
            for part, scans in parts.items():
                prediction = predict_bags(model, scans).on_host()
                made.append((names[group_of(winner.config)], part, scans, prediction))
    return made


def _scores(test: Data, prediction: Prediction) -> Scores:
    """Compute all four scores; localization is NaN where no slice is labelled."""
    if test.slice_labels is not None:
        return score(test, prediction.slice_scores, prediction.logit)
    scans = scan_level(prediction.logit, test.labels)
    return Scores(
        localization_auroc=math.nan,
        localization_auprc=math.nan,
        scan_auroc=scans.auroc.item(),
        scan_auprc=scans.auprc.item(),
        localized=0,
        left_out=int(test.labels.sum()),
    )


def environment(execution: Execution) -> dict[str, Any]:
    """Date, versions, commit and machine that a run is started with."""
    cuda = torch.device(execution.device).type == "cuda"
    return {
        "date": datetime.now(UTC).date().isoformat(),
        "normal_guidance": __version__,
        "commit": source_version(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "numpy": np.__version__,
        "triton": _version_of("triton"),
        "device": torch.cuda.get_device_name(execution.device) if cuda else platform.machine(),
        "threads": torch.get_num_threads(),
    }


def _version_of(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None
