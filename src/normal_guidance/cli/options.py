"""The options that several commands share; `nguide sweep`, `experiment` and `reproduce` take all `TrainingOptions`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, cast

import typer

from normal_guidance.base.errors import UserError, choose_one_of
from normal_guidance.base.system import size_text, time_text
from normal_guidance.cli.command import one_of, print_json, some_of
from normal_guidance.show.progress_bar import say
from normal_guidance.sweep.config import GUIDES, Config, EngineName, Execution, fitting_batch, paper_config

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.core.method import Method
    from normal_guidance.sweep.estimate import SweepEstimate


T = TypeVar("T")

CORE = Path(__file__).resolve().parents[1] / "core"

METHODS = ("centered_gaussian", "max", "mean", "abmil", "smap", "ng", "transmil", "smtp", "mhng")
BEYOND = ("evidence", "evidence_ng", "whole_bells", "whole_bells_ng")
FIELD, REGULARIZERS = (
    tuple(sorted(file.stem for file in (CORE / folder).glob("[!_]*.py"))) for folder in ("field", "regularizers")
)
DEVICES = ("cpu", "cuda", "cuda:0", "cuda:1")
PRECISIONS = ("auto", "float32", "tf32", "bf16")
TRACKERS = ("tensorboard", "mlflow")
ENGINES = ("auto", "packed", "recorded", "compiled")

PROTOCOL = ("batch_size", "optimizer", "weight_decay", "schedule", "class_weights", "patience", "train_above_val")
"""Options of training that are None where they are not given: the command's protocol then has its own value."""

PANELS = {
    "grid": "Grid: every combination is trained, and validation chooses",
    "guidance": "Guidance, and other regularizers of attention; the defaults are the paper's",
    "training": "Training",
    None: "Computing",
}
FIELDS = {each.name: each.metadata for each in (*fields(Config), *fields(Execution)) if each.metadata.get("help")}


def option(name: str, *words: str, **more: Any) -> Any:
    """Return the option for a field of `Config` or `Execution`, which says its help, panel and choices."""
    about = FIELDS[name]
    least = (about.get("within") or (None,))[0]
    choices = about.get("choices")
    if isinstance(least, int):
        more["min"] = least
    if choices:
        more["autocompletion"] = one_of([choice for choice in choices if isinstance(choice, str)])
    panel, metavar = PANELS[about.get("panel")], about.get("metavar")
    return typer.Option(*words, help=about["help"], rich_help_panel=panel, metavar=metavar, **more)


def _check_track(tracker: str | None) -> str | None:
    """Refuse a tracker that is unknown or not installed, before the command begins."""
    if tracker is not None:
        from normal_guidance.sweep.tracking import check_tracker

        check_tracker(tracker)
    return tracker


Track = Annotated[
    str | None,
    one_of(TRACKERS),
    typer.Option(
        callback=_check_track,
        metavar="TRACKER",
        help="Also write options, curves and final metrics for tensorboard or mlflow; see docs/howto/export.md.",
    ),
]
Device = Annotated[str | None, one_of(DEVICES), option("device")]
Precision = Annotated[str, one_of(PRECISIONS), option("precision")]
DryRun = Annotated[
    bool, typer.Option("--dry-run", help="Train a few batches, estimate time, memory and disk, and write nothing.")
]


def methods_option(show_default: bool | str = True) -> Any:
    """Return the option ``--methods``; each command has its own default."""
    return typer.Option(
        help="Names of methods, separated by commas (nguide methods lists them); all: the paper's, beyond: ours, "
        "field: those that others compare with. A study also takes ensemble, what nguide fit makes.",
        autocompletion=some_of((*METHODS, *BEYOND, *FIELD), "all", "beyond", "field"),
        show_default=show_default,
    )


ABOVE = "--train-above-val/--no-train-above-val"


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train: grid, guidance, protocol and device, as they were given.

    Guidance, and other regularizers of attention; the defaults are the paper's:
        regularizer: Train every method that attends with this term on its attention: ng (Normal Guidance), entropy,
            clusters, distance or smoothness (nguide methods says what they do).
    """

    lr: Annotated[str | None, option("lr")] = None
    l1: Annotated[str | None, option("l1")] = None
    regularizer: Annotated[str | None, one_of(REGULARIZERS)] = None
    guidance_weight: Annotated[str | None, option("guidance_weight")] = None
    divergence: Annotated[str | None, some_of(FIELDS["divergence"]["choices"]), option("divergence")] = None
    renormalize: Annotated[bool, option("renormalize")] = True
    modes: Annotated[int, option("modes")] = 1
    negatives: Annotated[str, option("negatives")] = "own"
    warmup: Annotated[int, option("warmup")] = 0
    least_width: Annotated[str, option("least_width")] = "0"
    epochs: Annotated[int, option("epochs")] = 1000
    batch_size: Annotated[int | None, option("batch_size")] = None
    optimizer: Annotated[str | None, option("optimizer")] = None
    weight_decay: Annotated[float | None, option("weight_decay")] = None
    schedule: Annotated[str | None, option("schedule")] = None
    class_weights: Annotated[bool | None, option("class_weights", "--class-weights", show_default=False)] = None
    patience: Annotated[int | None, option("patience", min=0)] = None
    train_above_val: Annotated[bool | None, option("train_above_val", ABOVE, show_default=False)] = None
    device: Device = None
    precision: Precision = "auto"
    engine: Annotated[str, one_of(ENGINES), option("engine")] = "auto"
    chunk: Annotated[int | None, option("chunk", min=1)] = None

    def protocol(self, scans: int) -> Config:
        """Return the protocol for so many training scans; method, seed and the grid's axes are placeholders."""
        return Config("ng", **{"batch_size": fitting_batch(scans), **self._given()})

    def paper_protocol(self) -> Config:
        """Return the paper's protocol, but for the options that were given; method and seed are placeholders."""
        return paper_config("ng", **self._given())

    def _given(self) -> dict[str, Any]:
        """Return the fields of the protocol that were given, and those whose default is the same everywhere."""
        given = {name: getattr(self, name) for name in PROTOCOL if getattr(self, name) is not None}
        if self.patience == 0:
            given["patience"] = None
        guides = {name: getattr(self, name) for name in GUIDES}
        return {"epochs": self.epochs, **given, **guides, "least_width": self._width()}

    def axes(self) -> dict[str, Any]:
        """Return the given values of each axis of the grid, for `grid`; axes that were not given are left out."""
        kinds: dict[str, Callable[[str], object]] = {"lr": float, "l1": float, "guidance_weight": float}
        given = {axis: getattr(self, axis) for axis in (*kinds, "divergence") if getattr(self, axis) is not None}
        return {axis: parse_list(_flag(axis), text, kinds.get(axis, str)) for axis, text in given.items()}

    def study_axes(self) -> dict[str, Any]:
        """Return `axes` for a study, in which each run has one winner: one lambda and one divergence."""
        axes = self.axes()
        for axis in ("guidance_weight", "divergence"):
            if len(axes.get(axis, ())) > 1:
                raise UserError(
                    f"{_flag(axis)} {getattr(self, axis)}: this command takes one value; give one, compare all with "
                    "--sensitivity, or use nguide sweep"
                )
        return axes

    def execution(self) -> Execution:
        return choose_execution(self.device, self.precision, self.chunk, self.engine)

    def check_guidance(self, methods: Sequence[str], *more: str) -> None:
        """Refuse options of guidance where none of the methods is guided; `more` are such options of the command."""
        from normal_guidance.core.methods import EVERY_METHOD
        from normal_guidance.core.methods import METHODS as PAPER

        known = [EVERY_METHOD[name] for name in methods if name in EVERY_METHOD]
        default = TrainingOptions()
        options = {name: getattr(self, name) for name in ("guidance_weight", "divergence", *GUIDES)}
        options = {name: value for name, value in options.items() if value != getattr(default, name)}
        given = [f"--no-{name}" if value is False else f"{_flag(name)} {value}" for name, value in options.items()]
        given += more
        if any(method.regularizer is not None for method in known):  # these two are of any regularizer
            given = [option for option in given if not option.startswith(("--guidance-weight", "--warmup"))]
        if given and not any(method.guided for method in known):
            guided = ", ".join(name for name, method in PAPER.items() if method.guided)
            raise UserError(
                f"{given[0]}: none of {', '.join(methods)} is guided; add one of {guided} to --methods, or leave the "
                "option out"
            )

    def regularized(self, methods: Sequence[str]) -> list[str]:
        """Return the methods with --regularizer: each that attends and has none yet is trained with it."""
        from normal_guidance.core.methods import EVERY_METHOD
        from normal_guidance.core.regularizers import REGULARIZERS as TERMS

        if self.regularizer is None:
            return list(methods)
        choose_one_of("--regularizer", self.regularizer, TERMS)
        plain = [EVERY_METHOD[name] for name in methods if name in EVERY_METHOD]
        changed = {method.name for method in plain if method.attends and method.regularizer is None}
        if not changed:
            raise UserError(
                f"--regularizer {self.regularizer}: none of {', '.join(methods)} has attention to regularize; add "
                "abmil to --methods, or leave the option out"
            )
        term = TERMS[self.regularizer]
        names = [EVERY_METHOD[name].regularized(term).name if name in changed else name for name in methods]
        return list(dict.fromkeys(names))

    def _width(self, spacing: float | None = None) -> float:
        """Return --least-width in slices; `spacing` is the mm between two slices, if it is known."""
        number = self.least_width.removesuffix("mm").strip()
        in_mm = number != self.least_width.strip()
        try:
            width = float(number)
        except ValueError:
            width = -1.0
        if not 0 <= width < float("inf"):
            raise UserError(f"--least-width {self.least_width}: give slices, as 1.5, or millimetres, as 8mm")
        if in_mm and not spacing:
            raise UserError(
                f"--least-width {self.least_width}: these features do not record the distance of slices; give the "
                "width in slices"
            )
        return width / spacing if in_mm and spacing else width

    def in_slices(self, spacing: float | None) -> TrainingOptions:
        """Return the same with --least-width in slices, for scans with so many mm between two slices."""
        if not self.least_width.endswith("mm"):
            return self
        return replace(self, least_width=f"{self._width(spacing):g}")


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def parse_list(option: str, text: str, kind: Callable[[str], T]) -> list[T]:
    """Return the values of an option that takes several, separated by commas."""
    names = {"int": "a whole number", "float": "a number"}
    values: list[T] = []
    for word in text.split(","):
        try:
            value = kind(word.strip())
        except ValueError as error:
            wanted = names.get(kind.__name__, kind.__name__)
            raise UserError(f"{option} {text}: {word.strip()!r} is not {wanted}; write 1,2,3") from error
        if value in values or value == "":
            raise UserError(f"{option} {text}: {word.strip()!r} is empty or given twice; give each value once")
        values.append(value)
    return values


def named_methods(text: str, keep: Callable[[Method], bool]) -> list[str]:
    """Return names of methods; 'all' stands for the paper's, 'beyond' for ours and 'field' for others', if kept."""
    from normal_guidance.core import methods as tables

    groups = {"all": tables.METHODS, "beyond": tables.BEYOND, "field": tables.FIELD}
    names: list[str] = []
    for word in parse_list("--methods", text, str):
        kept = [name for name, method in groups.get(word, {}).items() if keep(method)]
        names += kept if word in groups else [word]
    return list(dict.fromkeys(names))


def choose_execution(device: str | None, precision: str, chunk: int | None = None, engine: str = "auto") -> Execution:
    """Return where and how to compute; a device that the machine lacks is an error."""
    import torch

    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        kind, index = torch.device(device).type, torch.device(device).index or 0
    except RuntimeError as error:
        raise UserError(f"--device {device} is unknown; give cpu, cuda or cuda:1") from error
    there = {"cpu": 1, "cuda": torch.cuda.device_count()}.get(kind, 0)
    if index >= there:
        others = f"cuda:0 to cuda:{there - 1}" if kind == "cuda" and there else "cpu"
        raise UserError(f"--device {device}: this machine or torch has none; use {others}")
    choose_one_of("--engine", engine, ENGINES)
    if engine in ("recorded", "compiled") and not device.startswith("cuda"):
        raise UserError(f"--engine {engine} is for CUDA; on {device} use auto or packed")
    known = None if engine == "auto" else cast(EngineName, engine)
    return Execution(device, choose_precision(precision, device), known, chunk)


def choose_precision(precision: str, device: str) -> Literal["float32", "tf32", "bf16"]:
    """Return the precision; 'auto' is tf32 on CUDA, else float32."""
    choose_one_of("--precision", precision, PRECISIONS)
    if precision == "auto":
        return "tf32" if device.startswith("cuda") else "float32"
    return cast(Literal["float32", "tf32", "bf16"], precision)


def refuse_ray_and_dry_run(ray: str | None) -> None:
    if ray is not None:
        raise UserError(f"--dry-run measures this machine, not the cluster {ray}; leave out --ray")


def print_estimates(estimates: Sequence[tuple[SweepEstimate, int]], console: Console, as_json: bool) -> None:
    """Print what each method would take, and all of them, one run after the other."""
    from rich.table import Table

    total = sum(estimate.total_s * runs for estimate, runs in estimates)
    if as_json:
        methods = [{**asdict(estimate), "runs": runs} for estimate, runs in estimates]
        print_json({"methods": methods, "total_s": total})
        return
    if not estimates:
        say(console, "All runs are complete. Nothing was written.")
        return
    first = estimates[0][0]
    say(console, f"{first.scans:,} scans, {first.slices:,} slices, {first.batches:,} batches x {first.epochs:,} epochs")
    table = Table("method")
    for column in ("runs", "configurations", "engine", "ms a step", "first step after", "memory", "disk", "time"):
        table.add_column(column, justify="right")
    for estimate, runs in estimates:
        table.add_row(
            estimate.method,
            str(runs),
            f"{estimate.configs}" + ("" if estimate.chunks == 1 else f" in {estimate.chunks} parts"),
            estimate.engine,
            f"{1000 * estimate.step_s:,.{0 if estimate.step_s > 0.1 else 2}f}",
            f"{estimate.first_step_s:.1f} s",
            size_text(estimate.device_bytes),
            size_text(estimate.disk_bytes),
            time_text(runs * estimate.total_s),
        )
    console.print(table)
    say(console, f"Estimated time on {first.device}: {time_text(total)}. Nothing was written.")
