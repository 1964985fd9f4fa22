"""`nguide sweep`: methods and seeds trained on stored features, every configuration of a grid at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from normal_guidance.cli.completion import BEYOND, DIVERGENCES, METHODS, some_of
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
    named_methods,
    parse_if_given,
    parse_list,
)
from normal_guidance.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from normal_guidance.evaluation.run_report import Run, Selected
    from normal_guidance.features.store import FeatureStore
    from normal_guidance.training.config import Config
    from normal_guidance.training.sweep import Execution

T = TypeVar("T")


def _above_zero(minutes: float) -> float:
    if not minutes > 0:
        raise UserError(f"--save-minutes is {minutes:g}; it must be above 0")
    return minutes


def sweep(
    store: Annotated[Path, typer.Argument(help="Folder of a feature store.")],
    split: Annotated[
        Path | None, typer.Option(help="Table (.csv, .parquet): scan_id, part. Default: the store's own parts.")
    ] = None,
    methods: Annotated[
        str,
        typer.Option(
            help="Comma-separated names (nguide methods), 'all' that train of the paper's, or 'beyond'.",
            autocompletion=some_of((*METHODS, *BEYOND), "all", "beyond"),
        ),
    ] = "ng",
    seeds: Annotated[str, typer.Option(help="Seeds of initial weights and order, one run each: 0,1,2.")] = "0",
    out: Annotated[Path, typer.Option("--out", "-o", help="Runs go to OUT/method/seed.")] = Path("sweep-output"),
    lr: LearningRates = None,
    l1: L1Strengths = None,
    guidance_weight: Annotated[
        str | None, typer.Option(help="Lambdas; each has its own winner. Default: the paper's 1.0.")
    ] = None,
    divergence: Annotated[
        str | None,
        typer.Option(
            help="Divergences; each has its own winner. Default: the paper's forward_kl.",
            autocompletion=some_of(DIVERGENCES),
        ),
    ] = None,
    renormalize: Renormalize = True,
    modes: Modes = 1,
    negatives: Negatives = "own",
    warmup: Warmup = 0,
    epochs: Epochs = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Scans in a batch.")] = 64,
    patience: Patience = None,
    train_above_val: TrainAboveVal = True,
    device: Device = None,
    precision: Precision = "auto",
    chunk: Chunk = None,
    save_epochs: Annotated[int, typer.Option(min=1, help="Save after so many epochs")] = 50,
    save_minutes: Annotated[
        float,
        typer.Option(callback=_above_zero, help="or minutes: a killed run loses that, plus the epoch it was in."),
    ] = 5.0,
    as_json: AsJson = False,
) -> None:
    """Train methods on stored features, all configurations of the grid at once, and score the winners on the test part.

    Started again with the same options, a killed command goes on where it was, and what is complete is only shown.
    """
    options = _given({name: value for name, value in locals().items() if name != "as_json"})  # and no other names yet
    from normal_guidance.cli.progress_bar import make_console, say

    execution = choose_execution(device, precision, chunk)
    names = parse_methods(methods)
    axes = {
        "lr": parse_if_given("--lr", lr, float),
        "l1": parse_if_given("--l1", l1, float),
        "guidance_weight": parse_if_given("--guidance-weight", guidance_weight, float),
        "divergence": parse_if_given("--divergence", divergence, str),
    }
    protocol = {"epochs": epochs, "batch_size": batch_size, "patience": patience, "train_above_val": train_above_val}
    guides = {"renormalize": renormalize, "modes": modes, "negatives": negatives, "warmup": warmup}
    grids = make_grids(names, parse_list("--seeds", seeds, int), axes, **protocol, **guides)
    check_guidance(names, [*_guidance_axes(guidance_weight, divergence), *given_guides(guides)])
    parts = open_parts(store, split)
    console = make_console(stderr=as_json)
    saving = {"save_epochs": save_epochs, "save_seconds": 60 * save_minutes}
    runs = _run_all(console, out, grids, parts, execution, options=options, **saving)
    if as_json:
        print_json({"folder": out, "runs": [_run_json(*key, run) for key, run in runs.items()]})
        return
    console.print(_table(runs, scored=parts[2] is not None))
    say(console, f"Runs: {out}")


def _guidance_axes(guidance_weight: str | None, divergence: str | None) -> list[str]:
    """Those that were given, as they were."""
    given = {"--guidance-weight": guidance_weight, "--divergence": divergence}
    return [f"{option} {value}" for option, value in given.items() if value is not None]


def _run_all(
    console: Console,
    out: Path,
    grids: Mapping[tuple[str, int], tuple[Config, ...]],
    parts: tuple[FeatureStore, FeatureStore, FeatureStore | None],
    execution: Execution,
    **arguments: Any,
) -> dict[tuple[str, int], Run]:
    """A run for each method and seed, one after the other, when all have been looked at."""
    from normal_guidance.cli.progress_bar import say, watch_run
    from normal_guidance.evaluation.runs import check_sweep, run_sweep

    folders = {(method, seed): out / method / str(seed) for method, seed in grids}
    for key, configs in grids.items():
        check_sweep(folders[key], configs, *parts, execution)
    runs = {}
    for key, configs in grids.items():
        title = f"{key[0]}, seed {key[1]}"
        with watch_run(console, title) as watch:
            runs[key] = run_sweep(folders[key], configs, *parts, execution, watch=watch, **arguments)
        for line in outcome(runs[key]):
            say(console, f"{title}: {line}")
    return runs


def make_grids(
    methods: Sequence[str],
    seeds: Sequence[int],
    axes: Mapping[str, Sequence[Any] | None],
    **protocol: Any,
) -> dict[tuple[str, int], tuple[Config, ...]]:
    """The configurations of every method and seed; axes without values are the paper's, guidance is for the guided.

    Example:
        >>> grids = make_grids(["abmil", "ng"], [0], {"lr": [0.1], "l1": None, "guidance_weight": [0.1, 1.0]})
        >>> {key: len(configs) for key, configs in grids.items()}
        {('abmil', 0): 8, ('ng', 0): 16}
    """
    from normal_guidance.training.config import Config, grid

    given = {axis: values for axis, values in axes.items() if values is not None}
    grids = {}
    for method in methods:
        for seed in seeds:
            base = Config(method, seed=seed, **protocol).without_idle_guides()
            own = {axis: given[axis] for axis in given if axis in ("lr", "l1") or base.spec.guided}
            grids[method, seed] = grid(base, **own)
    return grids


def parse_methods(text: str) -> list[str]:
    """Names of methods; 'all' are those of the paper that train, 'beyond' those that it does not have.

    Example:
        >>> len(parse_methods("all"))
        8
    """
    return named_methods(text, keep=lambda method: method.scores_scans)


def open_parts(folder: Path, split: Path | None) -> tuple[FeatureStore, FeatureStore, FeatureStore | None]:
    """Training, validation and, if there is one, test part of a store."""
    from normal_guidance.features.store import open_store

    store = open_store(folder)
    if split is not None:
        store = store.with_parts(split)
    names = set(store.scans["part"].tolist())
    for needed in ("train", "val"):
        if needed not in names:
            raise UserError(
                f"no scan of {split or folder} is of part {needed!r}; give --split FILE, a table with the columns "
                "scan_id and part (train, val, test)"
            )
    return store.part("train"), store.part("val"), store.part("test") if "test" in names else None


def outcome(run: Run) -> list[str]:
    """What a run selected, a line for each winner.

    That nothing could be selected is a result, not a mistake: the protocol ran to its end, and the other runs of the
    command go on.  So it is said here, and no error.
    """
    seconds = f"{run.seconds:.0f} s"
    if not run.winners:
        hint = "use lower learning rates" if run.all_diverged else "--no-train-above-val drops that condition"
        return [f"{run.note} ({seconds}); {hint}"]
    return [
        f"{one.group + ': ' if one.group else ''}lr {one.config.lr:g}, L1 {one.config.l1:g}, epoch {one.epoch} of "
        f"{one.config.epochs}, validation AUROC {one.val_auroc:.3f} ({seconds})"
        for one in run.winners
    ]


def _given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The command's options as JSON takes them."""
    given = {name: value for name, value in parameters.items() if value is not None}
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def _run_json(method: str, seed: int, run: Run) -> dict[str, Any]:
    """What was selected, as the run's report.json has it."""
    about = {"method": method, "seed": seed, "folder": run.folder, "seconds": run.seconds, "note": run.note}
    return {**about, "winners": run.report["winners"]}


def _table(runs: Mapping[tuple[str, int], Run], scored: bool) -> Table:
    from rich.table import Table

    table = Table(title="\nScores on the test part" if scored else "\nSelected; there is no test part")
    for column in ("method", "seed", "group"):
        table.add_column(column)
    tested = ("slice AUROC", "slice AUPRC", "scan AUROC", "scan AUPRC") if scored else ()
    for column in ("validation AUROC", *tested):
        table.add_column(column, justify="right")
    for (method, seed), run in runs.items():
        if not run.winners:
            table.add_row(method, str(seed), "", "none selected")
        for one in run.winners:
            table.add_row(method, str(seed), one.group, *_cells(one))
    return table


def _cells(one: Selected) -> list[str]:
    scores = one.test
    values = [one.val_auroc]
    if scores is not None:
        values += [scores.localization_auroc, scores.localization_auprc]
        values += [value for value in (scores.scan_auroc, scores.scan_auprc) if value is not None]
    return [f"{value:.3f}" if value == value else "-" for value in values]
