"""`nguide sweep`: methods and seeds trained on stored features, every configuration of a grid at once."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

import typer

from normal_guidance.errors import UserError

if TYPE_CHECKING:
    from rich.table import Table

    from normal_guidance.evaluation.runs import Run, Selected
    from normal_guidance.features.store import FeatureStore
    from normal_guidance.training.config import Config
    from normal_guidance.training.sweep import Execution

T = TypeVar("T")


def sweep(
    store: Annotated[Path, typer.Argument(help="Folder of a feature store.")],
    split: Annotated[
        Path | None,
        typer.Option(
            "--split", "--parts", help="Table (.csv, .parquet): scan_id, part. Default: the store's own parts."
        ),
    ] = None,
    methods: Annotated[str, typer.Option(help="Comma-separated names (nguide methods), or 'all' that train.")] = "ng",
    seeds: Annotated[str, typer.Option(help="Seeds of initial weights and order, one run each: 0,1,2.")] = "0",
    out: Annotated[Path, typer.Option("--out", "-o", help="Runs go to OUT/method/seed.")] = Path("sweep-output"),
    lr: Annotated[str | None, typer.Option(help="Learning rates. Default: the paper's 4.")] = None,
    l1: Annotated[str | None, typer.Option(help="L1 strengths. Default: the paper's 8.")] = None,
    guidance_weight: Annotated[str, typer.Option(help="Lambdas; each has its own winner.")] = "1.0",
    divergence: Annotated[str, typer.Option(help="Divergences; each has its own winner.")] = "forward_kl",
    renormalize: Annotated[
        bool, typer.Option("--renormalize/--no-renormalize", help="Guide class-token rows made to sum to one.")
    ] = True,
    epochs: Annotated[int, typer.Option(min=1)] = 1000,
    batch_size: Annotated[int, typer.Option(min=1, help="Scans in a batch.")] = 64,
    patience: Annotated[
        int | None, typer.Option(min=1, help="Stop after so many epochs without a better one. Default: never.")
    ] = None,
    train_above_val: Annotated[
        bool,
        typer.Option("--train-above-val/--no-train-above-val", help="Select only epochs with training AUROC above."),
    ] = True,
    device: Annotated[str | None, typer.Option(help="cpu, cuda, cuda:1. Default: cuda if there is one.")] = None,
    precision: Annotated[
        str, typer.Option(help="auto (float32 on the CPU, tf32 on CUDA), float32, tf32, bf16.")
    ] = "auto",
    chunk: Annotated[int | None, typer.Option(min=1, help="Configurations trained together at most.")] = None,
    save_epochs: Annotated[int, typer.Option(min=1, help="Save after so many epochs")] = 50,
    save_minutes: Annotated[float, typer.Option(help="or minutes: a killed run loses no more.")] = 5.0,
) -> None:
    """Train methods on stored features, all configurations of the grid at once, and score the winners on the test part.

    Started again with the same options, a killed command goes on where it was, and what is complete is only shown.
    """
    options = _given(locals())  # before there are other names
    from normal_guidance.cli.progress import make_console, say, watch_run
    from normal_guidance.evaluation.runs import run_sweep

    execution = choose_execution(device, precision, chunk)
    grids = make_grids(
        parse_methods(methods),
        parse_list("--seeds", seeds, int),
        {
            "lr": lr and parse_list("--lr", lr, float),
            "l1": l1 and parse_list("--l1", l1, float),
            "guidance_weight": parse_list("--guidance-weight", guidance_weight, float),
            "divergence": parse_list("--divergence", divergence, str),
        },
        renormalize=renormalize,
        epochs=epochs,
        batch_size=batch_size,
        patience=patience,
        train_above_val=train_above_val,
    )
    train, val, test = open_parts(store, split)
    console, runs = make_console(), {}
    for (method, seed), configs in grids.items():
        title = f"{method}, seed {seed}"
        with watch_run(console, title) as watch:
            run = run_sweep(
                out / method / str(seed),
                configs,
                train,
                val,
                test,
                execution,
                save_epochs=save_epochs,
                save_seconds=60 * save_minutes,
                options=options,
                watch=watch,
            )
        runs[method, seed] = run
        for line in outcome(run):
            say(console, f"{title}: {line}")
    console.print(_table(runs))
    say(console, f"Runs: {out}")


def make_grids(
    methods: Sequence[str], seeds: Sequence[int], axes: Mapping[str, Any], **protocol: Any
) -> dict[tuple[str, int], tuple[Config, ...]]:
    """The configurations of every method and seed; axes without values are the paper's, guidance is for the guided."""
    from normal_guidance.core.models import METHODS
    from normal_guidance.training.config import Config, grid

    given = {axis: values for axis, values in axes.items() if values}
    grids = {}
    for method in methods:
        for seed in seeds:
            base = Config(method, seed=seed, **protocol)
            own = {axis: given[axis] for axis in given if axis in ("lr", "l1") or METHODS[method].guided}
            grids[method, seed] = grid(base, **own)
    return grids


def parse_list(option: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """The values of an option that takes several, separated by commas.

    Example:
        >>> parse_list("--lr", "0.1, 0.01", float)
        [0.1, 0.01]
    """
    values: list[T] = []
    for word in text.split(","):
        try:
            value = kind(word.strip())
        except ValueError as error:
            raise UserError(f"{option} {text}: {word.strip()!r} is no {kind.__name__}; write 1,2,3") from error
        if value in values or value == "":
            raise UserError(f"{option} {text}: {word.strip()!r} is empty or given twice; give each value once")
        values.append(value)
    return values


def parse_methods(text: str) -> list[str]:
    """Names of methods; 'all' are those that train.

    Example:
        >>> len(parse_methods("all"))
        8
    """
    from normal_guidance.core.models import METHODS

    trainable = [name for name, method in METHODS.items() if method.scores_scans]
    return trainable if text == "all" else parse_list("--methods", text, str)


def choose_execution(device: str | None, precision: str, chunk: int | None = None) -> Execution:
    """Where and how to compute; what the machine does not have is an error."""
    import torch

    from normal_guidance.training.sweep import Execution

    device = device or ("cuda" if torch.cuda.is_available() else "cpu")
    try:
        kind = torch.device(device).type
    except RuntimeError as error:
        raise UserError(f"--device {device} is unknown; give cpu, cuda or cuda:1") from error
    if kind not in ("cpu", "cuda") or (kind == "cuda" and not torch.cuda.is_available()):
        raise UserError(f"--device {device}: this machine or torch has none; use cpu")
    automatic = "tf32" if kind == "cuda" else "float32"
    chosen = automatic if precision == "auto" else precision
    match chosen:
        case "float32" | "tf32" | "bf16":
            return Execution(device, chosen, chunk=chunk)
    raise UserError(f"--precision {precision} is unknown; choose one of auto, float32, tf32, bf16")


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
    seconds = f"{run.report['seconds']['total']:.0f} s"
    if not run.winners:
        return [f"{run.report['note']} ({seconds}); --no-train-above-val drops that condition"]
    return [
        f"{one.group + ': ' if one.group else ''}lr {one.config.lr:g}, L1 {one.config.l1:g}, epoch {one.epoch} of "
        f"{one.config.epochs}, validation AUROC {one.val_auroc:.3f} ({seconds})"
        for one in run.winners
    ]


def _given(parameters: Mapping[str, Any]) -> dict[str, Any]:
    """The command's options as JSON takes them."""
    given = {name: value for name, value in parameters.items() if value is not None}
    return {name: str(value) if isinstance(value, Path) else value for name, value in given.items()}


def _table(runs: Mapping[tuple[str, int], Run]) -> Table:
    from rich.table import Table

    table = Table(title="\nScores on the test part")
    for column in ("method", "seed", "group"):
        table.add_column(column)
    for column in ("validation AUROC", "slice AUROC", "slice AUPRC", "scan AUROC", "scan AUPRC"):
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
