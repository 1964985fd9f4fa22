"""`nguide sweep`: train methods on stored features, all configurations of the grid at once."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.json_output import AsJson, print_json
from normal_guidance.cli.tracking import check_track, track_runs
from normal_guidance.cli.training_estimate import DryRun, print_estimates
from normal_guidance.cli.training_options import (
    Track,
    TrainingOptions,
    methods_option,
    named_methods,
    parse_list,
    with_training_options,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from normal_guidance.scans.features.store import FeatureStore
    from normal_guidance.sweep.config import Config
    from normal_guidance.sweep.execution import Execution
    from normal_guidance.sweep.run import Run, Selected


def _above_zero(minutes: float) -> float:
    if not minutes > 0:
        raise UserError(f"--save-minutes is {minutes:g}; it must be above 0")
    return minutes


@with_training_options
def sweep(
    store: Annotated[Path, typer.Argument(help="Folder of a feature store.", metavar="STORE")],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the runs: OUT/METHOD/SEED.")],
    split: Annotated[
        Path | None,
        typer.Option(help="Table (.csv, .parquet) with scan_id and part. Default: the parts that the store records."),
    ] = None,
    methods: Annotated[str, methods_option()] = "ng",
    seeds: Annotated[
        str, typer.Option(help="Seeds of initial weights and batch order, such as 0,1,2; one run for each.")
    ] = "0",
    *,
    training: TrainingOptions,
    save_epochs: Annotated[
        int, typer.Option(min=1, help="Save the state of a run after so many epochs, for resuming.")
    ] = 50,
    save_minutes: Annotated[
        float,
        typer.Option(callback=_above_zero, help="Save it also after so many minutes."),
    ] = 5.0,
    track: Track = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train methods on stored features, all configurations of the grid at once, and score the winners on the test part.

    Start a killed command again with the same options to resume it. Complete runs are shown and not repeated.
    """
    from normal_guidance.cli.progress_bar import make_console, say

    check_track(track)
    execution = training.execution()
    names = training.regularized(parse_methods(methods))
    training.check_guidance(names)
    parts = open_parts(store, split)
    training = training.in_slices(parts[0].slice_spacing)
    grids = make_grids(names, parse_list("--seeds", seeds, int), training, len(parts[0]))
    console = make_console(stderr=as_json)
    if dry_run:
        _estimate(console, out, grids, parts, execution, as_json)
        return
    given = {"store": store, "split": split, "methods": methods, "seeds": seeds, "out": out, **asdict(training)}
    given |= {"save_epochs": save_epochs, "save_minutes": save_minutes}
    saving = {"save_epochs": save_epochs, "save_seconds": 60 * save_minutes}
    runs = _run_all(console, out, grids, parts, execution, options=_for_json(given), **saving)
    track_runs(track, out, console)
    if as_json:
        print_json({"folder": out, "runs": [_run_json(*key, run) for key, run in runs.items()]})
        return
    console.print(_table(runs, scored=parts[2] is not None))
    say(console, f"Runs: {out}")


def _estimate(
    console: Console,
    out: Path,
    grids: Mapping[tuple[str, int], tuple[Config, ...]],
    parts: tuple[FeatureStore, FeatureStore, FeatureStore | None],
    execution: Execution,
    as_json: bool,
) -> None:
    """Print what the runs would take; the seeds of a method take equally long."""
    from normal_guidance.sweep.estimate import estimate_sweep
    from normal_guidance.sweep.run import check_sweep

    for (method, seed), configs in grids.items():
        check_sweep(out / method / str(seed), configs, *parts, execution)
    methods = list(dict.fromkeys(method for method, _ in grids))
    grids_of = {method: [configs for (name, _), configs in grids.items() if name == method] for method in methods}
    found = [(estimate_sweep(same[0], *parts[:2], execution), len(same)) for same in grids_of.values()]
    print_estimates(found, console, as_json)


def _run_all(
    console: Console,
    out: Path,
    grids: Mapping[tuple[str, int], tuple[Config, ...]],
    parts: tuple[FeatureStore, FeatureStore, FeatureStore | None],
    execution: Execution,
    **arguments: Any,
) -> dict[tuple[str, int], Run]:
    """Train one run for each method and seed, after checking all of them."""
    from normal_guidance.cli.progress_bar import say, watch_run
    from normal_guidance.sweep.run import check_sweep, run_sweep

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
    methods: Sequence[str], seeds: Sequence[int], training: TrainingOptions, scans: int
) -> dict[tuple[str, int], tuple[Config, ...]]:
    """Return the configurations of every method and seed, for so many training scans."""
    from normal_guidance.sweep.config import grid_of_method

    protocol, axes = training.protocol(scans), training.axes()
    return {
        (method, seed): grid_of_method(replace(protocol, method=method, seed=seed).without_idle_guides(), **axes)
        for method in methods
        for seed in seeds
    }


def parse_methods(text: str) -> list[str]:
    """Return names of methods; 'all' stands for the paper's that train, 'beyond' for ours, 'field' for others'."""
    from normal_guidance.core.methods import EVERY_METHOD, near_miss

    names = named_methods(text, keep=lambda method: method.scores_scans)
    for name in names:
        if name not in EVERY_METHOD:
            raise UserError(f"method {name!r} is unknown{near_miss(name)}; nguide methods lists them")
    return names


def open_parts(folder: Path, split: Path | None) -> tuple[FeatureStore, FeatureStore, FeatureStore | None]:
    """Return the training, validation and, if there is one, test part of a store."""
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.study.experiment import check_parts

    store = open_store(folder)
    if split is not None:
        store = store.with_parts(split)
    names = check_parts(store, split or folder, needed=("train", "val"))
    return store.part("train"), store.part("val"), store.part("test") if "test" in names else None


def outcome(run: Run) -> list[str]:
    """Return a line about each winner of a run.

    A run without a winner is a result, not an error: the protocol ran to its end, and the other runs continue.
    """
    seconds = f"{run.seconds:.0f} s"
    if not run.winners:
        hint = "use lower learning rates" if run.all_diverged else "leave out --train-above-val"
        return [f"{run.note} ({seconds}); {hint}"]
    return _few_to_choose_from(run) + [
        f"{one.group + ': ' if one.group else ''}lr {one.config.lr:g}, L1 {one.config.l1:g}, epoch {one.epoch} of "
        f"{one.config.epochs}, validation AUROC {one.val_auroc:.3f} ({seconds})"
        for one in run.winners
    ]


def _few_to_choose_from(run: Run) -> list[str]:
    """Return a warning where most configurations had no epoch that could be selected: others may be better."""
    counts = run.report["configurations"]
    trained, selectable, diverged = (counts[name] for name in ("trained", "selectable", "diverged"))
    if 2 * selectable >= trained:
        return []
    why = "the others diverged; use lower learning rates"
    if diverged < trained - selectable:
        why = "the others had no epoch whose training AUROC was above its validation AUROC; leave out --train-above-val"
    return [f"warning: only {selectable} of {trained} configurations could be selected: {why}"]


def _for_json(options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the given options, for the run's report.json."""
    given = {name: value for name, value in options.items() if value is not None}
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def _run_json(method: str, seed: int, run: Run) -> dict[str, Any]:
    """Return the winners, as in the run's report.json."""
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
