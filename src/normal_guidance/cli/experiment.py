"""`nguide experiment`: train every method on every split of stored features, and compare them on one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.json_output import AsJson, print_json
from normal_guidance.cli.tracking import check_track, track_runs
from normal_guidance.cli.training_estimate import DryRun, print_estimates
from normal_guidance.cli.training_options import (
    COMPUTING,
    Track,
    TrainingOptions,
    methods_option,
    with_training_options,
)

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.scans.index.manifest import Manifest
    from normal_guidance.study.experiment import (
        MakeGrid,
        Study,
        StudyData,
        Train,
    )


@with_training_options
def experiment(
    stores: Annotated[
        list[Path],
        typer.Argument(metavar="STORE", help="Folder of a feature store: one for all splits, or one for each."),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs, tables, figures and report.html.")],
    split: Annotated[
        list[Path] | None,
        typer.Option(
            help="Table (.csv, .parquet) with scan_id and part, or a folder of such tables; may be repeated. Default: "
            "the parts that the stores record."
        ),
    ] = None,
    splits: Annotated[list[Path] | None, typer.Option("--splits", hidden=True)] = None,  # the name of --split before
    methods: Annotated[str, methods_option()] = "all",
    dataset: Annotated[
        str | None,
        typer.Option(
            help="Name of the dataset; head-ct, chest-ct and abdomen-ct have the paper's numbers beside ours. Default: "
            "the store's name."
        ),
    ] = None,
    index: Annotated[
        Path | None,
        typer.Option(help="Folder that nguide index made: adds errors in mm, and slices in the figures."),
    ] = None,
    receptive_field: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Slices that the supervised slice reference sees at once. Default: mean length of the training scans' "
            "positive blocks.",
        ),
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Train guided methods also with each divergence and lambda.")
    ] = False,
    *,
    training: TrainingOptions,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Train on a Ray cluster: host:port of its head, or auto for the one of this machine.",
            rich_help_panel=COMPUTING,
        ),
    ] = None,
    track: Track = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train every method on every split, and the supervised references; test, compare, and write report.html.

    Start the command again with the same options to resume it. Other methods with the same OUT are added to the same
    report. To add splits, give the old ones as well: the report compares the given splits only.
    """
    from normal_guidance.cli.progress_bar import make_console
    from normal_guidance.cli.reproduce import choose_methods
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.study.experiment import stored_dataset

    check_track(track)
    names = tuple(training.regularized(choose_methods(methods, sensitivity=False)))
    training.check_guidance(names, *["--sensitivity"] * sensitivity)
    data = stored_dataset(stores, [*(split or []), *(splits or [])], dataset)
    training = training.in_slices(open_store(stores[0]).slice_spacing)
    plan = plan_study(data, out, names, training, receptive_field, sensitivity)
    manifest = _manifest(index, data)
    console = make_console(stderr=as_json)
    if dry_run:
        if ray is not None:
            raise UserError(f"--dry-run measures this machine, not the cluster {ray}; leave out --ray")
        _estimate(plan, console, as_json)
    else:
        run_study(plan, manifest, console, _cluster(ray), as_json)
        track_runs(track, out, console)


class StudyPlan(NamedTuple):
    """A study of stored features and its grids."""

    study: Study
    make_grid: MakeGrid
    varied: Study
    """The guided methods that are also trained with each divergence and lambda; none without --sensitivity."""
    make_varied_grid: MakeGrid


def plan_study(
    data: StudyData,
    out: Path,
    methods: tuple[str, ...],
    training: TrainingOptions,
    receptive_field: int | None = None,
    sensitivity: bool = False,
) -> StudyPlan:
    """Return the study of all splits of stored features; `nguide reproduce` on scans makes the same one."""
    from dataclasses import replace
    from functools import partial

    from normal_guidance.core.methods import EVERY_METHOD
    from normal_guidance.study.experiment import Study
    from normal_guidance.sweep.config import grid_of_method, sensitivity_grid

    axes = training.study_axes()
    study = Study(
        dataset=data,
        folder=out,
        methods=methods,
        seeds=data.seeds,
        protocol=training.protocol(min(len(data.draw(seed, "train")) for seed in data.seeds)),
        execution=training.execution(),
        receptive_field=receptive_field,
    )
    guided = tuple(name for name in methods if name in EVERY_METHOD and EVERY_METHOD[name].guided)
    return StudyPlan(
        study=study,
        make_grid=partial(grid_of_method, **axes),
        varied=replace(study, methods=guided if sensitivity else ()),
        make_varied_grid=partial(sensitivity_grid, **{axis: axes[axis] for axis in axes if axis in ("lr", "l1")}),
    )


def run_study(
    plan: StudyPlan, manifest: Manifest | None, console: Console, train: Train | None = None, as_json: bool = False
) -> None:
    """Train what the folder lacks, write tables, figures and report.html, and print the tables."""
    from normal_guidance.cli.progress_bar import say
    from normal_guidance.cli.reproduce import make_listener, show_page
    from normal_guidance.study.reproduction import reproduce, reproduce_sensitivity
    from normal_guidance.study.study_page import write_report

    listener = make_listener(console)
    results = reproduce(plan.study, make_grid=plan.make_grid, listener=listener, train=train)
    if plan.varied.methods:
        reproduce_sensitivity(plan.varied, make_grid=plan.make_varied_grid, listener=listener, train=train)
    page = write_report(plan.study, manifest=manifest)
    if as_json:
        print_json(json.loads(results.json()))
    else:
        show_page(console, results.markdown())
    say(console, f"Report: {page}")


def _estimate(plan: StudyPlan, console: Console, as_json: bool) -> None:
    from normal_guidance.study.experiment import estimate_study, study_jobs
    from normal_guidance.study.reproduction import sensitivity_jobs

    jobs = study_jobs(plan.study, plan.make_grid) + sensitivity_jobs(plan.varied, plan.make_varied_grid)
    print_estimates(estimate_study(plan.study, jobs), console, as_json)


def _manifest(index: Path | None, data: StudyData) -> Manifest | None:
    """Read and check the manifest before training, so that a wrong folder costs no hours."""
    if index is None:
        return None
    from normal_guidance.scans.index.manifest import read_manifest
    from normal_guidance.study.study_page import check_manifest

    manifest = read_manifest(index)
    check_manifest(manifest, data)
    return manifest


def _cluster(address: str | None) -> Train | None:
    if address is None:
        return None
    from functools import partial

    from normal_guidance.study.experiment import train_on_cluster

    return partial(train_on_cluster, address)
