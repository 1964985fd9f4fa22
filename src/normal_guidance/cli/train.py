"""Commands on methods: `nguide methods`, `sweep` and `trust`; and the option `--track`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError, choose_one_of
from normal_guidance.base.records import valid_json
from normal_guidance.cli.command import AsJson, Out, Store, one_of, print_json
from normal_guidance.cli.options import (
    Device,
    DryRun,
    Track,
    TrainingOptions,
    choose_execution,
    methods_option,
    named_methods,
    parse_list,
    print_estimates,
)
from normal_guidance.show.progress_bar import Shown, make_console, print_grid, say, watch

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from normal_guidance.fit.fitting import ModelFit
    from normal_guidance.scans.features.store import FeatureStore
    from normal_guidance.sweep.config import Config
    from normal_guidance.sweep.run import Run
    from normal_guidance.sweep.sweep import SweepProgress

    Parts = tuple[FeatureStore, FeatureStore, FeatureStore | None]


def methods(as_json: AsJson = False) -> None:
    """List the methods by the names that the other commands take: the paper's, ours, then those of the field."""
    from normal_guidance.core.methods import BEYOND, EVERY_METHOD, NAMED
    from normal_guidance.core.regularizers import REGULARIZERS

    sizes = {
        name: sum(parameter.numel() for parameter in method.build(768).parameters())
        for name, method in NAMED.items()
        if method.model == name
    }
    if as_json:
        rows = []
        for method in EVERY_METHOD.values():
            shown = ("name", "title", "model", "regularizer", "guided", "scores_scans")
            about = {name: getattr(method, name) for name in shown}
            rows.append({**about, "parameters": sizes[method.model], "when": method.when})
        print_json(rows)
        return
    from rich.console import Console
    from rich.table import Table

    table = Table("name", "method", "regularizer", "scan score", "parameters")
    for name, method in NAMED.items():
        scored = "yes" if method.scores_scans else "no"
        table.add_row(name, method.title, method.regularizer or "", scored, f"{sizes[method.model]:,}")
    console = Console()
    console.print(table)
    console.print("nguide fit needs no choice of method. The heads that the paper lacks are for research:")
    for method in BEYOND.values():
        if method.regularizer is None:
            console.print(f"{method.name}, {method.name}_ng: {method.when}", soft_wrap=True)
    console.print("Every method with trained attention takes a regularizer, as --regularizer entropy or abmil_entropy:")
    for term in REGULARIZERS.values():
        console.print(f"{term.name}: {term.about}", soft_wrap=True)


PARTS = ("val", "test")
BY = ("slices", "attention")


def trust(
    run: Path,
    out: Out,
    store: Path | None = None,
    split: Path | None = None,
    part: Annotated[str, one_of(PARTS)] = "test",
    group: str = "",
    by: Annotated[str, one_of(BY)] = "slices",
    device: Device = None,
    as_json: AsJson = False,
) -> None:
    """Test a model's attention: shuffle slices, randomise weights, delete and insert slices, alarm if inverted.

    Each test reports a number, its value by chance, an interval and a verdict: passes, fails, or cannot be told. No
    slice labels are needed. The exit code is 0 whatever the verdicts.

    Args:
        run: Folder of a run that nguide sweep or nguide experiment wrote, or of a model of nguide fit.
        out: Folder for trust.json, trust.md and trust.png.
        store: Folder of the run's feature store. Default: the path that a run records; a model needs it.
        split: Table (.csv, .parquet) with scan_id and part. Default: the run's, or the store's own parts.
        part: Scans to test on: test, or val for a run; a model of nguide fit was trained on val.
        group: Name of the winner, where the run has several.
        by: Remove by share of slices or of attention.
    """
    from normal_guidance.base.files import make_folder, write_atomically, write_json
    from normal_guidance.scans.index.manifest import refuse_several
    from normal_guidance.study import figures
    from normal_guidance.study.trust.examine import examine_saved, trust_page, verdict_table

    choose_one_of("--by", by, BY)
    where = choose_execution(device, "auto").device
    console = make_console(stderr=as_json)
    with console.status("Testing") as status:  # shown on a terminal only
        options: dict[str, Any] = {"store": store, "split": split, "part": part, "by": by, "device": where}
        options["watch"] = lambda done: status.update(f"Testing: {done:.0%}")
        refuse_several(run)
        trusted = examine_saved(run, group=group, **options)
    make_folder(out)
    if trusted.curves is not None:
        figures.save(figures.plot_trust(trusted.curves, by=trusted.by), out / "trust.png")
    page = trust_page(trusted, picture=None if trusted.curves is None else "trust.png")
    write_atomically(out / "trust.md", page.encode())
    written = valid_json({"run": run, "part": part, **trusted.as_json()})
    write_json(out / "trust.json", written)
    if as_json:
        print_json(written)
        return
    print_grid(console, verdict_table(trusted))
    for note in trusted.notes:
        say(console, note)
    for finding in trusted.findings:
        advice = "" if finding.verdict == "passes" else f" What to do: {finding.action}"
        say(console, f"{finding.title}: {finding.verdict}. {finding.meaning}{advice}")
    say(console, f"Details: {out / 'trust.md'}")


def track_runs(tracker: str | None, out: Path, console: Console) -> None:
    """Write the winners of the complete runs in a folder, with their curves."""
    if tracker is not None:
        from normal_guidance.sweep.tracking import track, tracked_runs

        say(console, f"Tracked: {track(tracked_runs(out), tracker, out)}")


def track_fits(
    tracker: str | None, out: Path, models: Mapping[str, ModelFit], asked: Mapping[str, Any], as_json: bool
) -> None:
    """Write what was measured about fitted models; they are not trained by epochs and have no curves."""
    if tracker is None:
        return
    from normal_guidance.sweep.tracking import Training, track

    given = {name: str(value) for name, value in asked.items() if value is not None}
    trained = []
    for name, model in models.items():
        plan = model.fit.plan
        options = {"folds": plan.folds, "members": len(model.fit.ensemble)}
        trained.append(Training(name, given | options, _metrics(model)))
    say(make_console(stderr=as_json), f"Tracked: {track(trained, tracker, out)}")


def _metrics(model: ModelFit) -> dict[str, float]:
    metrics = {}
    for part, measured in (("out_of_fold", model.out_of_fold), ("test", model.test)):
        if measured is not None:
            located, gain = measured.localization, measured.gain
            metrics[f"{part}/scan_auroc"] = measured.scans.value
            metrics[f"{part}/localization_auroc"] = math.nan if located is None else located.auroc
            metrics[f"{part}/gain_over_position"] = math.nan if gain is None else gain.gain
    return metrics


def _above_zero(minutes: float) -> float:
    if not minutes > 0:
        raise UserError(f"--save-minutes is {minutes:g}; it must be above 0")
    return minutes


def sweep(
    store: Store,
    out: Out,
    split: Path | None = None,
    methods: Annotated[str, methods_option()] = "ng",
    seeds: str = "0",
    *,
    training: TrainingOptions,
    save_epochs: Annotated[int, typer.Option(min=1)] = 50,
    save_minutes: Annotated[float, typer.Option(callback=_above_zero)] = 5.0,
    track: Track = None,
    dry_run: DryRun = False,
    as_json: AsJson = False,
) -> None:
    """Train methods on stored features, all configurations of the grid at once, and score the winners on the test part.

    Start a killed command again with the same options to resume it. Complete runs are shown and not repeated.

    Args:
        out: Folder for the runs: OUT/METHOD/SEED.
        split: Table (.csv, .parquet) with scan_id and part. Default: the parts that the store records.
        seeds: Seeds of initial weights and batch order, such as 0,1,2; one run for each.
        save_epochs: Save the state of a run after so many epochs, for resuming.
        save_minutes: Save it also after so many minutes.
    """
    from normal_guidance.sweep.run import check_sweep, run_sweep

    execution = training.execution()
    names = training.regularized(parse_methods(methods))
    training.check_guidance(names)
    parts = open_parts(store, split)
    training = training.in_slices(parts[0].slice_spacing)
    numbers = parse_list("--seeds", seeds, int)
    grids = make_grids(names, numbers, training, len(parts[0]))
    console = make_console(stderr=as_json)
    for (method, seed), configs in grids.items():  # all of them, before the first is trained
        check_sweep(out / method / str(seed), configs, *parts, execution)
    if dry_run:
        from normal_guidance.sweep.estimate import estimate_sweep

        firsts = [grids[method, numbers[0]] for method in names]  # the seeds of a method take equally long
        estimates = [(estimate_sweep(configs, *parts[:2], execution), len(numbers)) for configs in firsts]
        print_estimates(estimates, console, as_json)
        return
    given = {"store": store, "split": split, "methods": methods, "seeds": seeds, "out": out, **asdict(training)}
    given |= {"save_epochs": save_epochs, "save_minutes": save_minutes}
    saving: dict[str, Any] = {"save_epochs": save_epochs, "save_seconds": 60 * save_minutes}
    known = {name: value for name, value in given.items() if value is not None}
    options = {name: str(value) if isinstance(value, Path) else value for name, value in known.items()}
    runs = {}
    for (method, seed), configs in grids.items():
        title = f"{method}, seed {seed}"
        with watch_run(console, title) as watch:
            folder = out / method / str(seed)
            run = run_sweep(folder, configs, *parts, execution, watch=watch, options=options, **saving)
        for line in outcome_lines(run):
            say(console, f"{title}: {line}")
        runs[method, seed] = run
    track_runs(track, out, console)
    if as_json:
        rows = [
            {"method": method, "seed": seed, "folder": run.folder, "seconds": run.seconds, "note": run.note}
            | {"winners": run.report["winners"]}
            for (method, seed), run in runs.items()
        ]
        print_json({"folder": out, "runs": rows})
        return
    console.print(_table(runs, scored=parts[2] is not None))
    say(console, f"Runs: {out}")


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


def open_parts(folder: Path, split: Path | None) -> Parts:
    """Return the training, validation and, if there is one, test part of a store."""
    from normal_guidance.scans.features.store import open_store
    from normal_guidance.study.experiment import check_parts

    store = open_store(folder)
    if split is not None:
        store = store.with_parts(split)
    names = check_parts(store, split or folder, needed=("train", "val"))
    return store.part("train"), store.part("val"), store.part("test") if "test" in names else None


def outcome_lines(run: Run) -> list[str]:
    """Return a line about each winner of a run, and a warning where most configurations could not be selected."""
    # A run without a winner is a result, not an error: the protocol ran to its end, and the other runs continue.
    seconds = f"{run.seconds:.0f} s"
    if not run.winners:
        hint = "use lower learning rates" if run.all_diverged else "leave out --train-above-val"
        return [f"{run.note} ({seconds}); {hint}"]
    counts = run.report["configurations"]
    trained, selectable, diverged = (counts[name] for name in ("trained", "selectable", "diverged"))
    why = "the others diverged; use lower learning rates"
    if diverged < trained - selectable:
        why = "the others had no epoch whose training AUROC was above its validation AUROC; leave out --train-above-val"
    lines = [f"warning: only {selectable} of {trained} configurations could be selected: {why}"]
    return lines * (2 * selectable < trained) + [
        f"{winner.group + ': ' if winner.group else ''}lr {winner.config.lr:g}, L1 {winner.config.l1:g}, epoch "
        f"{winner.epoch} of {winner.config.epochs}, validation AUROC {winner.val_auroc:.3f} ({seconds})"
        for winner in run.winners
    ]


def _table(runs: Mapping[tuple[str, int], Run], scored: bool) -> Table:
    from rich.table import Table

    title = "\nScores on the test part" if scored else "\nSelected; there is no test part"
    table = Table("method", "seed", "group", title=title)
    tested = ("slice AUROC", "slice AUPRC", "scan AUROC", "scan AUPRC") if scored else ()
    for column in ("validation AUROC", *tested):
        table.add_column(column, justify="right")
    for (method, seed), run in runs.items():
        if not run.winners:
            table.add_row(method, str(seed), "", "none selected")
        for winner in run.winners:
            values, scores = [winner.val_auroc], winner.test
            if scores is not None:
                values += [scores.localization_auroc, scores.localization_auprc]
                values += [value for value in (scores.scan_auroc, scores.scan_auprc) if value is not None]
            cells = ["-" if math.isnan(value) else f"{value:.3f}" for value in values]
            table.add_row(method, str(seed), winner.group, *cells)
    return table


@contextmanager
def watch_run(console: Console, title: str) -> Iterator[Callable[[SweepProgress], None]]:
    """Yield a function for `run_sweep(watch=...)`; the caller reports the run's result."""

    def show(now: SweepProgress) -> Shown:
        best = f"{now.best_val_auroc:.3f}" if now.best_val_auroc > 0 else "-"
        epochs = f"epoch {now.epoch} of {now.epochs}, best validation AUROC {best}"
        return Shown(title, now.done, f"{epochs}, {now.slices_per_second:,.0f} slices/s")

    if not console.is_terminal:
        say(console, f"{title}: begins")
    with watch(console, title, show) as update:
        yield update
