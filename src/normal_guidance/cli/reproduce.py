"""`nguide reproduce`: the paper's tables from the data on, ours beside the published."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.cli.completion import BEYOND, DATASETS, METHODS, one_of, some_of
from normal_guidance.cli.json_output import AsJson, print_json
from normal_guidance.cli.training_options import (
    Chunk,
    Device,
    Epochs,
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
    named_methods,
    parse_list,
)
from normal_guidance.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.evaluation.run_report import Run
    from normal_guidance.evaluation.study import Listener, StudyData


def reproduce(
    dataset: Annotated[str, typer.Argument(help="semi-synthetic.", autocompletion=one_of(DATASETS))],
    out: Annotated[Path, typer.Option("--out", "-o", help="Runs go to OUT/method/seed, tables to OUT.")],
    methods: Annotated[
        str | None,
        typer.Option(
            help="Comma-separated names (nguide methods), all, beyond. Default: all; with --sensitivity: ng.",
            autocompletion=some_of((*METHODS, *BEYOND), "all", "beyond"),
        ),
    ] = None,
    seeds: Annotated[str, typer.Option(help="Seeds of the paper's partitions.")] = "1001,2001,3001",
    epochs: Epochs = 1000,
    patience: Patience = None,
    train_above_val: TrainAboveVal = True,
    renormalize: Renormalize = True,
    modes: Modes = 1,
    negatives: Negatives = "own",
    warmup: Warmup = 0,
    device: Device = None,
    precision: Precision = "auto",
    chunk: Chunk = None,
    report: Annotated[
        bool, typer.Option("--report", help="Also compare the methods, draw the figures and write OUT/report.html.")
    ] = False,
    sensitivity: Annotated[
        bool, typer.Option("--sensitivity", help="The study of divergences and lambdas in place of the four tables.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Train the paper's grid on its data and compare its tables with ours.

    Started again, the command goes on where it was. Other methods or seeds with the same OUT fill up the same tables.
    """
    from normal_guidance.cli.progress_bar import make_console, say
    from normal_guidance.evaluation.study import Study
    from normal_guidance.evaluation.study_folder import SENSITIVITY
    from normal_guidance.reports.reproduction import reproduce as reproduce_tables
    from normal_guidance.reports.reproduction import reproduce_sensitivity
    from normal_guidance.training.config import Config

    guides: dict[str, Any] = {"renormalize": renormalize, "modes": modes, "negatives": negatives, "warmup": warmup}
    study = Study(
        dataset=_dataset(dataset),
        folder=out,
        methods=choose_methods(methods, sensitivity),
        seeds=tuple(parse_list("--seeds", seeds, int)),
        protocol=Config("ng", epochs=epochs, patience=patience, train_above_val=train_above_val, **guides),
        execution=choose_execution(device, precision, chunk),
    )
    check_guidance(study.methods, given_guides(guides))
    console = make_console(stderr=as_json)
    if sensitivity:
        results = reproduce_sensitivity(study, listener=make_listener(console))
        files = {out / SENSITIVITY / f"{method}.md": one for method, one in results.items()}
    else:
        files = {out / "tables.md": reproduce_tables(study, listener=make_listener(console))}
    if as_json:
        documents = {path.stem: json.loads(one.json()) for path, one in files.items()}
        print_json(documents if sensitivity else documents["tables"])
    for path, one in files.items():
        if not as_json:
            show_page(console, one.markdown())
        say(console, f"Tables: {path}, and as .tex, .csv and .json beside it")
    if report:
        from normal_guidance.reports.experiment_report import write_report

        say(console, f"Report: {write_report(study)}")


def _dataset(name: str) -> StudyData:
    from normal_guidance.evaluation.study import DATASETS

    if name not in DATASETS:
        raise UserError(f"dataset {name!r} is unknown; choose one of {', '.join(DATASETS)}")
    return DATASETS[name]


def choose_methods(text: str | None, sensitivity: bool) -> tuple[str, ...]:
    """The paper's that the study can take, unless named; sensitivity is ABMIL's, as there, unless more is asked."""
    if text is None and sensitivity:
        return ("ng",)
    return tuple(named_methods(text or "all", keep=lambda method: method.guided or not sensitivity))


def make_listener(console: Console) -> Listener:
    """Shows the progress of a study's runs, and what they selected."""
    from normal_guidance.cli.progress_bar import say, watch_run
    from normal_guidance.cli.sweep import outcome
    from normal_guidance.evaluation.study import Listener

    def finished(title: str, run: Run) -> None:
        # `outcome` would name an option that this command does not have.
        lines = outcome(run) if run.winners else [f"{run.note}; the tables leave it out"]
        for line in lines:
            say(console, f"{title}: {line}")

    return Listener(lambda title: watch_run(console, title), finished)


def show_page(console: Console, page: str) -> None:
    """Drawn on a terminal; elsewhere the page as it is, which can be read, searched and kept."""
    from rich.markdown import Markdown

    from normal_guidance.cli.progress_bar import say

    if console.is_terminal:
        console.print(Markdown(page))
    else:
        say(console, page)
