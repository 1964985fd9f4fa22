"""The trust tests for a run: its winner, on scans that it was not trained on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch import nn

from normal_guidance.core.bags import Bags
from normal_guidance.errors import UserError
from normal_guidance.evaluation.run_report import Run, Selected, load_run
from normal_guidance.evaluation.study import DATASETS
from normal_guidance.evaluation.trust.deletion_curves import By
from normal_guidance.evaluation.trust.examination import Trust, examine
from normal_guidance.features.store import FeatureStore, fingerprint_of, open_store
from normal_guidance.training.stacked_model import initial_model
from normal_guidance.training.winners import about_winner, load_winner

TESTED = ("val", "test")
"""Parts on which no weights were fitted."""


def examine_run(
    folder: str | Path,
    *,
    store: str | Path | None = None,
    split: str | Path | None = None,
    part: str = "test",
    group: str = "",
    by: By = "slices",
    device: str = "cpu",
    seed: int = 0,
    watch: Callable[[float], None] | None = None,
) -> Trust:
    """Run the four tests on a run's winner.

    Args:
        folder: folder of the run.
        store: folder of the features; without it, the one that the run recorded, or drawn again if they were drawn.
        split: table of parts, if they are not the store's own; without it, the one that the run recorded.
        part: 'test' or 'val'.
        group: which winner, where the run has several.
    """
    if part not in TESTED:
        raise UserError(f"models are not tested on part {part!r}; choose one of {', '.join(TESTED)}")
    run = load_run(folder)
    winner = run.winner(group)
    if winner.config.on_slices:
        raise UserError(f"{run.folder} was trained on slice labels and has no attention to test; give another run")
    scans = _scans(run, winner, store, split, part)
    model = load_winner(folder, group).to(device)
    width = about_winner(run.folder, group).features
    if scans.width != width:
        raise UserError(f"{run.folder} takes {width} features a slice, but the store has {scans.width}; give its store")

    def untrained(fresh: int) -> nn.Module:
        return initial_model(replace(winner.config, seed=fresh), width).to(next(model.parameters()))

    found = examine(model, scans, untrained=untrained, by=by, seed=seed, watch=watch)
    return replace(found, notes=_notes(run, scans, part))


def _scans(
    run: Run, winner: Selected, store: str | Path | None, split: str | Path | None, part: str
) -> Bags | FeatureStore:
    options = run.report.get("options", {})
    if store is None and options.get("dataset") in DATASETS:
        drawn = DATASETS[options["dataset"]].draw(winner.config.seed, part)
        assert isinstance(drawn, Bags)
        return drawn
    place, table = _place("store", store, options, run), _place("split", split, options, run)
    if place is None:
        raise UserError(f"{run.folder} does not say where its features are; give them: --store STORE")
    opened = open_store(place)
    return (opened if table is None else opened.with_parts(table)).part(part)


def _place(name: str, given: str | Path | None, options: Mapping[str, Any], run: Run) -> Path | None:
    """The given path, or the one that the run recorded, if it still exists."""
    if given is not None or options.get(name) is None:
        return None if given is None else Path(given)
    remembered = Path(options[name])
    if not remembered.exists():
        raise UserError(
            f"{run.folder} was trained with {remembered}, which no longer exists; give --{name} {name.upper()}"
        )
    return remembered


def _notes(run: Run, scans: Bags | FeatureStore, part: str) -> tuple[str, ...]:
    known = run.report["data"].get(part)
    if known is None:
        return (f"The run had no {part} part: make sure that no patient of these scans was trained on.",)
    own = scans.fingerprint if isinstance(scans, FeatureStore) else fingerprint_of({part: scans})
    if own == known["fingerprint"]:
        return ()
    return (f"These are not the run's own {part} scans: make sure that no patient of them was trained on.",)
