"""`nguide experiment`: every method on every split of stored features, compared and told on one page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.cli.completion import BEYOND, METHODS, some_of
from normal_guidance.cli.json_output import AsJson, print_json
from normal_guidance.cli.training_options import (
    Chunk,
    Device,
    Epochs,
    L1Strengths,
    LearningRates,
    Modes,
    Negatives,
    Patience,
    Precision,
    Renormalize,
    TrainAboveVal,
    Warmup,
    check_guidance,
    choose_execution,
    given_guides,
    parse_if_given,
)

if TYPE_CHECKING:
    from normal_guidance.data.manifest import Manifest
    from normal_guidance.evaluation.study import StudyData, Train


def experiment(
    stores: Annotated[
        list[Path], typer.Argument(metavar="STORE...", help="Feature store; one for all splits, or one for each.")
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for runs, tables, figures and report.html.")],
    splits: Annotated[
        list[Path] | None,
        typer.Option(help="Table scan_id, part (.csv, .parquet) or a folder of such; may be repeated. Default: the "
                     "stores' own parts."),
    ] = None,
    methods: Annotated[
        str,
        typer.Option(help="Comma-separated names (nguide methods), all, beyond.",
                     autocompletion=some_of((*METHODS, *BEYOND), "all", "beyond")),
    ] = "all",
    dataset: Annotated[
        str | None,
        typer.Option(help="head-ct, chest-ct or abdomen-ct put the paper's numbers beside ours. Default: the store's "
                     "name."),
    ] = None,
    index: Annotated[
        Path | None, typer.Option(help="What nguide index made: errors in mm, and slices in the figures.")
    ] = None,
    lr: LearningRates = None,
    l1: L1Strengths = None,
    epochs: Epochs = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Scans in a batch.")] = 64,
    patience: Patience = None,
    train_above_val: TrainAboveVal = True,
    renormalize: Renormalize = True,
    modes: Modes = 1,
    negatives: Negatives = "own",
    warmup: Warmup = 0,
    receptive_field: Annotated[
        int | None, typer.Option(min=1, help="R of the slice reference. Default: mean length of positive blocks.")
    ] = None,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="Also train guided methods with each divergence and lambda.")
    ] = False,
    device: Device = None,
    precision: Precision = "auto",
    chunk: Chunk = None,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Train on a Ray cluster; 'auto' for one of this machine.")
    ] = None,
    as_json: AsJson = False,
) -> None:  # fmt: skip
    """Train every method on every split, and the supervised references; test, compare, and write report.html.

    Started again with the same options, the command goes on where it was; other methods with the same OUT fill up the
    same report. To add splits, give the old ones, too: only splits that are given are compared.
    """
    from dataclasses import replace
    from functools import partial

    from normal_guidance.cli.progress_bar import make_console, say
    from normal_guidance.cli.reproduce import choose_methods, make_listener, show_page
    from normal_guidance.core.models import EVERY_METHOD
    from normal_guidance.evaluation.stored_features import stored_dataset
    from normal_guidance.evaluation.study import Study
    from normal_guidance.reports.experiment_report import write_report
    from normal_guidance.reports.reproduction import reproduce, reproduce_sensitivity
    from normal_guidance.training.config import Config, grid, sensitivity_grid

    names = choose_methods(methods, sensitivity=False)
    guides: dict[str, Any] = {"renormalize": renormalize, "modes": modes, "negatives": negatives, "warmup": warmup}
    check_guidance(names, [*given_guides(guides), *["--sensitivity"] * sensitivity])
    data = stored_dataset(stores, splits or [], dataset)
    study = Study(
        dataset=data,
        folder=out,
        methods=names,
        seeds=data.seeds,
        protocol=Config(
            "ng",
            epochs=epochs,
            batch_size=batch_size,
            patience=patience,
            train_above_val=train_above_val,
            **guides,
        ),
        execution=choose_execution(device, precision, chunk),
        receptive_field=receptive_field,
    )
    manifest = _manifest(index, data)
    console, train = make_console(stderr=as_json), _cluster(ray)
    listener = make_listener(console)
    given = {"lr": parse_if_given("--lr", lr, float), "l1": parse_if_given("--l1", l1, float)}
    axes: dict[str, Any] = {axis: values for axis, values in given.items() if values is not None}
    results = reproduce(study, make_grid=partial(grid, **axes), listener=listener, train=train)
    if sensitivity:
        guided = tuple(name for name in names if EVERY_METHOD[name].guided)
        make_grid = partial(sensitivity_grid, **axes)
        reproduce_sensitivity(replace(study, methods=guided), make_grid=make_grid, listener=listener, train=train)
    page = write_report(study, manifest=manifest)
    if as_json:
        print_json(json.loads(results.json()))
    else:
        show_page(console, results.markdown())
    say(console, f"Report: {page}")


def _manifest(index: Path | None, data: StudyData) -> Manifest | None:
    """Read and checked first: a wrong folder is told before hours of training."""
    if index is None:
        return None
    from normal_guidance.data.manifest import read_manifest
    from normal_guidance.reports.experiment_report import check_manifest

    manifest = read_manifest(index)
    check_manifest(manifest, data)
    return manifest


def _cluster(address: str | None) -> Train | None:
    if address is None:
        return None
    from functools import partial

    from normal_guidance.evaluation.study_on_ray import train_on_cluster

    return partial(train_on_cluster, address)
