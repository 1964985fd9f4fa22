"""`--track` of `nguide fit`, `nguide sweep` and `nguide experiment`."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.fit.fitting import FittedModel
    from normal_guidance.fit.measured import Measured


def check_track(to: str | None) -> None:
    """Refuse a tracker that is unknown or not installed, before training."""
    if to is not None:
        from normal_guidance.sweep.tracking import check_tracker

        check_tracker(to)


def track_runs(to: str | None, out: Path, console: Console) -> None:
    """Write the winners of the complete runs in a folder, with their curves."""
    if to is not None:
        from normal_guidance.cli.progress_bar import say
        from normal_guidance.sweep.tracking import track, tracked_runs

        say(console, f"Tracked: {track(tracked_runs(out), to, out)}")


def track_fits(
    to: str | None, out: Path, models: Mapping[str, FittedModel], asked: Mapping[str, Any], as_json: bool
) -> None:
    """Write what was measured about fitted models; they are not trained by epochs and have no curves."""
    if to is not None:
        from normal_guidance.cli.progress_bar import make_console, say
        from normal_guidance.sweep.tracking import Training, track

        given = {name: str(value) for name, value in asked.items() if value is not None}
        found = [Training(name, given | _options(one), _metrics(one)) for name, one in models.items()]
        say(make_console(stderr=as_json), f"Tracked: {track(found, to, out)}")


def _options(one: FittedModel) -> dict[str, Any]:
    plan = one.fit.plan
    return {"folds": plan.folds, "repeats": plan.repeats, "members": len(one.fit.committee)}


def _metrics(one: FittedModel) -> dict[str, float]:
    parts = {"out_of_fold": one.out_of_fold, "test": one.test}
    return {
        f"{part}/{name}": value
        for part, measured in parts.items()
        if measured is not None
        for name, value in _measured(measured).items()
    }


def _measured(own: Measured) -> dict[str, float]:
    located, skill = own.localization, own.skill
    return {
        "scan_auroc": own.scans.value,
        "localization_auroc": math.nan if located is None else located.auroc,
        "skill": math.nan if skill is None else skill.skill,
    }
