"""The paper's tables from the data: train the runs that are missing, then write tables of all complete runs.

DIR/tables.md .tex .csv .json      our numbers, the published ones, their difference, and what validation chose
DIR/sensitivity/<method>.md ...    the same for each divergence and lambda
"""

from __future__ import annotations

from normal_guidance.core.methods import EVERY_METHOD, NAMED
from normal_guidance.errors import UserError
from normal_guidance.evaluation.study import (
    Listener,
    MakeGrid,
    Study,
    Train,
    TrainingJob,
    jobs_of,
    train_jobs,
    train_study,
)
from normal_guidance.evaluation.study_folder import SENSITIVITY
from normal_guidance.reports.study_tables import Results, collect, collect_sensitivity
from normal_guidance.training.config import grid, sensitivity_grid


def reproduce(
    study: Study, *, make_grid: MakeGrid = grid, listener: Listener | None = None, train: Train | None = None
) -> Results:
    """Trains the runs that the study lacks and writes the paper's tables of all complete runs in its folder."""
    train_study(study, make_grid=make_grid, listener=listener, train=train)
    results = collect(study.folder, study.dataset.name)
    results.write(study.folder, "tables")
    return results


def reproduce_sensitivity(
    study: Study,
    *,
    make_grid: MakeGrid = sensitivity_grid,
    listener: Listener | None = None,
    train: Train | None = None,
) -> dict[str, Results]:
    """Trains and writes the sensitivity to divergence and lambda: one table for each guided method of the study."""
    for method in study.methods:
        if not EVERY_METHOD[method].guided:
            guided = ", ".join(name for name in NAMED if NAMED[name].guided)
            raise UserError(f"method {method!r} has no guidance to vary; choose among {guided}")
    train_jobs(study, sensitivity_jobs(study, make_grid), listener, train)
    results = {method: collect_sensitivity(study.folder, study.dataset.name, method) for method in study.methods}
    for method, one in results.items():
        one.write(study.folder / SENSITIVITY, method)
    return results


def sensitivity_jobs(study: Study, make_grid: MakeGrid = sensitivity_grid) -> list[TrainingJob]:
    """The jobs of the study's methods with every divergence and lambda."""
    return jobs_of(study, study.methods, make_grid, study.folder / SENSITIVITY, f"{SENSITIVITY} of ")
