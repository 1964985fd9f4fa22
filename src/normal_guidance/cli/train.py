"""`nguide sweep`: train methods on stored features, all configurations of the grid at once."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.cli.command import AsJson, one_of, print_json, valid_json
from normal_guidance.cli.options import (
    Device,
    DryRun,
    Track,
    TrainingOptions,
    methods_option,
    named_methods,
    parse_list,
    print_estimates,
    with_training_options,
)

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from normal_guidance.fit.fitting import FittedModel
    from normal_guidance.fit.measured import Measured
    from normal_guidance.scans.features.store import FeatureStore
    from normal_guidance.study.trust.attention_tests import By
    from normal_guidance.study.trust.examine import Trust
    from normal_guidance.sweep.config import Config, Execution
    from normal_guidance.sweep.run import Run, Selected


# `nguide methods`: list the methods and regularizers by the names that the other commands take.


def methods(as_json: AsJson = False) -> None:
    """List the methods by the names that the other commands take: the paper's, ours, then those of the field."""
    from normal_guidance.core.methods import BEYOND, EVERY_METHOD, NAMED
    from normal_guidance.core.regularizers import REGULARIZERS

    sizes = {
        name: sum(parameter.numel() for parameter in method.build(768).parameters())
        for name, method in NAMED.items()
        if method.model == name
    }
    found = [
        {
            "name": method.name,
            "title": method.title,
            "model": method.model,
            "regularizer": method.regularizer,
            "guided": method.guided,
            "scores_scans": method.scores_scans,
            "parameters": sizes[method.model],
            "when": method.when,
        }
        for method in EVERY_METHOD.values()
    ]
    if as_json:
        print_json(found)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "method", "regularizer", "scan score", "parameters")
    for one in found:
        if one["name"] in NAMED:
            scored = "yes" if one["scores_scans"] else "no"
            table.add_row(*(str(one[key] or "") for key in ("name", "title", "regularizer")), scored, _count(one))
    console = Console()
    console.print(table)
    console.print("nguide fit needs no choice of method. The heads that the paper lacks are for research:")
    for method in BEYOND.values():
        if method.regularizer is None:
            console.print(f"{method.name}, {method.name}_ng: {method.when}", soft_wrap=True)
    console.print("Every method with trained attention takes a regularizer, as --regularizer entropy or abmil_entropy:")
    for term in REGULARIZERS.values():
        console.print(f"{term.name}: {term.about}", soft_wrap=True)


def _count(one: Mapping[str, object]) -> str:
    return f"{one['parameters']:,}"


# `nguide trust`: test whether the attention of a trained model can be trusted.


PARTS = ("val", "test")
BY = ("slices", "attention")


def trust(
    run: Annotated[
        Path,
        typer.Argument(
            help="Folder of a run that nguide sweep or nguide experiment wrote, or of a model of nguide fit.",
            metavar="RUN",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for trust.json, trust.md and trust.png.")],
    store: Annotated[
        Path | None,
        typer.Option(help="Folder of the run's feature store. Default: the path that a run records; a model needs it."),
    ] = None,
    split: Annotated[
        Path | None,
        typer.Option(
            help="Table (.csv, .parquet) with scan_id and part. Default: the run's, or the store's own parts."
        ),
    ] = None,
    part: Annotated[
        str,
        typer.Option(
            help="Scans to test on: test, or val for a run; a model of nguide fit was trained on val.",
            autocompletion=one_of(PARTS),
        ),
    ] = "test",
    group: Annotated[str, typer.Option(help="Name of the winner, where the run has several.")] = "",
    by: Annotated[
        str, typer.Option(help="Remove by share of slices or of attention.", autocompletion=one_of(BY))
    ] = "slices",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Test a model's attention: shuffle slices, randomise weights, delete and insert slices, alarm if inverted.

    Each test reports a number, its value by chance, an interval and a verdict: passes, fails, or cannot be told. No
    slice labels are needed. The exit code is 0 whatever the verdicts.
    """
    from normal_guidance.base.files import make_folder, write_atomically, write_json
    from normal_guidance.cli.options import choose_execution
    from normal_guidance.cli.progress import make_console, say
    from normal_guidance.scans.index.manifest import refuse_several
    from normal_guidance.study.figures.deletion import draw_trust
    from normal_guidance.study.trust.examine import examine_saved, trust_page

    chosen, where = _by(by), choose_execution(device, "auto").device
    console = make_console(stderr=as_json)
    with console.status("Testing") as status:  # shown on a terminal only

        def watch(done: float) -> None:
            status.update(f"Testing: {done:.0%}")

        refuse_several(run)
        found = examine_saved(
            run, store=store, split=split, part=part, group=group, by=chosen, device=where, watch=watch
        )
    make_folder(out)
    if found.curves is not None:
        draw_trust(found.curves, out / "trust.png", by=found.by)
    page = trust_page(found, picture=None if found.curves is None else "trust.png")
    write_atomically(out / "trust.md", page.encode())
    written = valid_json({"run": run, "part": part, **found.as_json()})
    write_json(out / "trust.json", written)
    if as_json:
        print_json(written)
        return
    console.print(_trust_table(found))
    for note in found.notes:
        say(console, note)
    for finding in found.findings:
        todo = "" if finding.verdict == "passes" else f" What to do: {finding.action}"
        say(console, f"{finding.title}: {finding.verdict}. {finding.meaning}{todo}")
    say(console, f"Details: {out / 'trust.md'}")


def _by(text: str) -> By:
    match text:
        case "slices" | "attention":
            return text
    raise UserError(f"--by {text} is unknown; choose one of {', '.join(BY)}")


def _trust_table(found: Trust) -> Table:
    from rich.table import Table

    from normal_guidance.study.trust.examine import verdict_table

    grid = verdict_table(found)
    table = Table(*grid.header, title=grid.title)
    for row in grid.rows:
        table.add_row(*row)
    return table


# `--track` of `nguide fit`, `nguide sweep` and `nguide experiment`.


def check_track(to: str | None) -> None:
    """Refuse a tracker that is unknown or not installed, before training."""
    if to is not None:
        from normal_guidance.sweep.tracking import check_tracker

        check_tracker(to)


def track_runs(to: str | None, out: Path, console: Console) -> None:
    """Write the winners of the complete runs in a folder, with their curves."""
    if to is not None:
        from normal_guidance.cli.progress import say
        from normal_guidance.sweep.tracking import track, tracked_runs

        say(console, f"Tracked: {track(tracked_runs(out), to, out)}")


def track_fits(
    to: str | None, out: Path, models: Mapping[str, FittedModel], asked: Mapping[str, Any], as_json: bool
) -> None:
    """Write what was measured about fitted models; they are not trained by epochs and have no curves."""
    if to is not None:
        from normal_guidance.cli.progress import make_console, say
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
    from normal_guidance.cli.progress import make_console, say

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
    from normal_guidance.cli.progress import say, watch_run
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
