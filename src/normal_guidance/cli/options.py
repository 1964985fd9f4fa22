"""The options that `nguide sweep`, `experiment` and `reproduce` share, each declared once.

A command has one parameter `training: TrainingOptions` and the decorator `with_training_options`, which gives typer the
options one by one.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import wraps
from typing import TYPE_CHECKING, Annotated, Any, Literal, TypeVar, get_type_hints

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import size_text, time_text
from normal_guidance.cli.command import (
    BEYOND,
    DEVICES,
    DIVERGENCES,
    ENGINES,
    FIELD,
    METHODS,
    NEGATIVES,
    OPTIMIZERS,
    PRECISIONS,
    REGULARIZERS,
    SCHEDULES,
    TRACKERS,
    one_of,
    print_json,
    some_of,
)

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.core.method import Method
    from normal_guidance.sweep.config import Config, EngineName
    from normal_guidance.sweep.estimate import SweepEstimate
    from normal_guidance.sweep.execution import Execution


T = TypeVar("T")

GRID = "Grid: every combination is trained, and validation chooses"
GUIDANCE = "Guidance, and other regularizers of attention; the defaults are the paper's"
TRAINING = "Training"
COMPUTING = "Computing"

PROTOCOL = ("batch_size", "optimizer", "weight_decay", "schedule", "class_weights", "patience", "train_above_val")
"""Options of training that are None where they are not given: the command's protocol then has its own value."""

Track = Annotated[
    str | None,
    typer.Option(
        metavar="TRACKER",
        help="Also write options, curves and final metrics for tensorboard or mlflow; see docs/howto/track.md.",
        autocompletion=one_of(TRACKERS),
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="cpu, cuda or cuda:1. Default: cuda where there is one.",
        autocompletion=one_of(DEVICES),
        rich_help_panel=COMPUTING,
    ),
]
Precision = Annotated[
    str,
    typer.Option(
        help="auto (float32 on the CPU, tf32 on CUDA), float32, tf32 or bf16.",
        autocompletion=one_of(PRECISIONS),
        rich_help_panel=COMPUTING,
    ),
]


def methods_option(show_default: bool | str = True) -> Any:
    """Return the option ``--methods``; each command has its own default."""
    return typer.Option(
        help="Names of methods, separated by commas (nguide methods lists them); all: the paper's, beyond: ours, "
        "field: those that others compare with. A study also takes committee, what nguide fit makes.",
        autocompletion=some_of((*METHODS, *BEYOND, *FIELD), "all", "beyond", "field"),
        show_default=show_default,
    )


@dataclass(frozen=True, kw_only=True)
class TrainingOptions:
    """How to train: grid, guidance, protocol and device, as they were given."""

    lr: Annotated[
        str | None,
        typer.Option(help="Learning rates, such as 0.1,0.01. Default: the paper's 4.", rich_help_panel=GRID),
    ] = None
    l1: Annotated[
        str | None, typer.Option(help="Strengths of the L1 penalty. Default: the paper's 8.", rich_help_panel=GRID)
    ] = None
    regularizer: Annotated[
        str | None,
        typer.Option(
            help="Train every method that attends with this term on its attention: ng (Normal Guidance), entropy, "
            "clusters, distance or smoothness (nguide methods says what they do).",
            autocompletion=one_of(REGULARIZERS),
            rich_help_panel=GUIDANCE,
        ),
    ] = None
    guidance_weight: Annotated[
        str | None,
        typer.Option(
            help="Lambda, the weight of guidance or of another regularizer. nguide sweep takes several, each with its "
            "own winner. Default: 1.0.",
            rich_help_panel=GUIDANCE,
        ),
    ] = None
    divergence: Annotated[
        str | None,
        typer.Option(
            help="forward_kl, reverse_kl or squared_error. nguide sweep takes several, each with its own winner. "
            "Default: forward_kl.",
            autocompletion=some_of(DIVERGENCES),
            rich_help_panel=GUIDANCE,
        ),
    ] = None
    renormalize: Annotated[
        bool,
        typer.Option(
            "--renormalize/--no-renormalize",
            help="Scale the class token's attention to sum to 1 over the slices before it is guided.",
            rich_help_panel=GUIDANCE,
        ),
    ] = True
    modes: Annotated[
        int, typer.Option(min=1, help="Number of bells that attention is guided to.", rich_help_panel=GUIDANCE)
    ] = 1
    negatives: Annotated[
        str,
        typer.Option(
            help="How negative scans are guided: to their own bell (own), to uniform attention (uniform), or not at "
            "all (none).",
            autocompletion=one_of(NEGATIVES),
            rich_help_panel=GUIDANCE,
        ),
    ] = "own"
    warmup: Annotated[
        int,
        typer.Option(
            min=0,
            metavar="EPOCHS",
            help="Raise lambda from 0 to its value over so many epochs.",
            rich_help_panel=GUIDANCE,
        ),
    ] = 0
    least_width: Annotated[
        str,
        typer.Option(
            help="Least standard deviation of the bell that attention is guided to, in slices (1.5) or by the scans' "
            "median spacing in mm (8mm). With 0, attention on one slice is not guided.",
            rich_help_panel=GUIDANCE,
        ),
    ] = "0"
    epochs: Annotated[
        int, typer.Option(min=1, help="Most passes over the training scans.", rich_help_panel=TRAINING)
    ] = 1000
    batch_size: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Scans in a batch. Default: 64; 32, 16 or 8 for fewer than 256, 128 or 64 training scans.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    optimizer: Annotated[
        str | None,
        typer.Option(
            help="sgd, with momentum, or adamw. Default: sgd.",
            autocompletion=one_of(OPTIMIZERS),
            rich_help_panel=TRAINING,
        ),
    ] = None
    weight_decay: Annotated[
        float | None,
        typer.Option(
            help="Decay of the weights, as torch's SGD or AdamW does it. Default: 0.", rich_help_panel=TRAINING
        ),
    ] = None
    schedule: Annotated[
        str | None,
        typer.Option(
            help="Learning rate over the epochs: constant, or cosine, which falls to 0 at --epochs. Default: constant.",
            autocompletion=one_of(SCHEDULES),
            rich_help_panel=TRAINING,
        ),
    ] = None
    class_weights: Annotated[
        bool | None,
        typer.Option(
            "--class-weights",
            help="Weight positive and negative training scans inversely to their number. Default: all count alike.",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None
    patience: Annotated[
        int | None,
        typer.Option(
            min=0,
            metavar="EPOCHS",
            help="Stop after so many epochs in which validation AUROC reached no new high; 0: never. Default: 50.",
            rich_help_panel=TRAINING,
        ),
    ] = None
    train_above_val: Annotated[
        bool | None,
        typer.Option(
            "--train-above-val/--no-train-above-val",
            help="Select only epochs whose training AUROC is above their validation AUROC. Default: all epochs.",
            rich_help_panel=TRAINING,
            show_default=False,
        ),
    ] = None
    device: Device = None
    precision: Precision = "auto"
    engine: Annotated[
        str,
        typer.Option(
            help="auto (the one that ends first, by measurement), packed (any device, no preparation), recorded or "
            "compiled (a minute of preparation, the fastest steps).",
            autocompletion=one_of(ENGINES),
            rich_help_panel=COMPUTING,
        ),
    ] = "auto"
    chunk: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Train at most so many configurations together; fewer need less memory. Default: all.",
            rich_help_panel=COMPUTING,
        ),
    ] = None

    def protocol(self, scans: int) -> Config:
        """Return the protocol for so many training scans.

        Its method and seed are placeholders, and the grid's axes have their defaults.
        """
        from normal_guidance.sweep.config import Config, fitting_batch

        return Config("ng", **{"batch_size": fitting_batch(scans), **self._given()})

    def paper_protocol(self) -> Config:
        """Return the paper's protocol, but for the options that were given; method and seed are placeholders."""
        from normal_guidance.sweep.config import paper_config

        return paper_config("ng", **self._given())

    def _given(self) -> dict[str, Any]:
        """Return the fields of the protocol that were given, and those whose default is the same everywhere."""
        fields = {name: getattr(self, name) for name in PROTOCOL}
        given = {name: value for name, value in fields.items() if value is not None}
        if self.patience == 0:
            given["patience"] = None
        return {"epochs": self.epochs, **given, **self._guides()}

    def axes(self) -> dict[str, Any]:
        """Return the given values of each axis of the grid, for `grid`; axes that were not given are left out."""
        kinds: dict[str, Callable[[str], object]] = {"lr": float, "l1": float, "guidance_weight": float}
        given = {axis: getattr(self, axis) for axis in (*kinds, "divergence")}
        return {
            axis: parse_list(_flag(axis), text, kinds.get(axis, str))
            for axis, text in given.items()
            if text is not None
        }

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
        """Return where and how to compute."""
        return choose_execution(self.device, self.precision, self.chunk, self.engine)

    def check_guidance(self, methods: Sequence[str], *more: str) -> None:
        """Refuse options of guidance where none of the methods is guided; `more` are such options of the command."""
        from normal_guidance.core.methods import EVERY_METHOD
        from normal_guidance.core.methods import METHODS as PAPER

        known = [EVERY_METHOD[name] for name in methods if name in EVERY_METHOD]
        given = [*self.given_guidance(), *more]
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
        if self.regularizer not in TERMS:
            raise UserError(f"--regularizer {self.regularizer} is unknown; choose one of {', '.join(TERMS)}")
        plain = [EVERY_METHOD[name] for name in methods if name in EVERY_METHOD]
        changed = {one.name for one in plain if one.attends and one.regularizer is None}
        if not changed:
            raise UserError(
                f"--regularizer {self.regularizer}: none of {', '.join(methods)} has attention to regularize; add "
                "abmil to --methods, or leave the option out"
            )
        term = TERMS[self.regularizer]
        names = [EVERY_METHOD[name].regularized(term).name if name in changed else name for name in methods]
        return list(dict.fromkeys(names))

    def given_guidance(self) -> list[str]:
        """Return the options of guidance that differ from the defaults, as one types them."""
        from normal_guidance.sweep.config import GUIDES

        names = ("guidance_weight", "divergence", *GUIDES)
        default = TrainingOptions()
        given = {name: getattr(self, name) for name in names if getattr(self, name) != getattr(default, name)}
        return [f"--no-{name}" if value is False else f"{_flag(name)} {value}" for name, value in given.items()]

    def _guides(self) -> dict[str, Any]:
        from normal_guidance.sweep.config import GUIDES

        return {**{name: getattr(self, name) for name in GUIDES}, "least_width": self._width()}

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


def with_training_options(command: Callable[..., None]) -> Callable[..., None]:
    """Replace a command's parameter `training` with the options of `TrainingOptions`, for typer to read."""
    types = get_type_hints(TrainingOptions, include_extras=True)
    options = {
        field.name: inspect.Parameter(
            field.name, inspect.Parameter.KEYWORD_ONLY, default=field.default, annotation=types[field.name]
        )
        for field in fields(TrainingOptions)
    }

    @wraps(command)
    def run(**given: Any) -> None:
        training = TrainingOptions(**{name: given.pop(name) for name in options if name in given})
        command(**given, training=training)

    parameters: list[inspect.Parameter] = []
    for parameter in inspect.signature(command, eval_str=True).parameters.values():
        own = [parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY)]
        parameters += options.values() if parameter.name == "training" else own
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    return run


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
        tables.refuse_removed(word)
        kept = [name for name, method in groups.get(word, {}).items() if keep(method)]
        names += kept if word in groups else [word]
    return list(dict.fromkeys(names))


def choose_execution(device: str | None, precision: str, chunk: int | None = None, engine: str = "auto") -> Execution:
    """Return where and how to compute; a device that the machine lacks is an error."""
    import torch

    from normal_guidance.sweep.execution import Execution

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
    return Execution(device, choose_precision(precision, device), choose_engine(engine, device), chunk)


def choose_engine(engine: str, device: str) -> EngineName | None:
    """Return the engine that was asked for, or None for 'auto'."""
    match engine:
        case "auto":
            return None
        case "packed":
            return "packed"
        case "recorded" | "compiled" as chosen:
            if not device.startswith("cuda"):
                raise UserError(f"--engine {engine} is for CUDA; on {device} use auto or packed")
            return chosen
    raise UserError(f"--engine {engine} is unknown; choose one of {', '.join(ENGINES)}")


def choose_precision(precision: str, device: str) -> Literal["float32", "tf32", "bf16"]:
    """Return the precision; 'auto' is tf32 on CUDA, else float32."""
    automatic = "tf32" if device.startswith("cuda") else "float32"
    match automatic if precision == "auto" else precision:
        case "float32" | "tf32" | "bf16" as chosen:
            return chosen
    raise UserError(f"--precision {precision} is unknown; choose one of auto, float32, tf32, bf16")


# What `--dry-run` of `nguide sweep` and `nguide experiment` prints.


DryRun = Annotated[
    bool,
    typer.Option("--dry-run", help="Train a few batches, estimate time, memory and disk, and write nothing."),
]


def print_estimates(found: Sequence[tuple[SweepEstimate, int]], console: Console, as_json: bool) -> None:
    """Print what each method would take, and all of them, one run after the other."""
    from rich.table import Table

    from normal_guidance.cli.progress import say

    total = sum(one.total_s * runs for one, runs in found)
    if as_json:
        methods = [{**asdict(one), "runs": runs} for one, runs in found]
        print_json({"methods": methods, "total_s": total})
        return
    if not found:
        say(console, "All runs are complete. Nothing was written.")
        return
    first = found[0][0]
    say(console, f"{first.scans:,} scans, {first.slices:,} slices, {first.batches:,} batches x {first.epochs:,} epochs")
    table = Table()
    table.add_column("method")
    for column in ("runs", "configurations", "engine", "ms a step", "first step after", "memory", "disk", "time"):
        table.add_column(column, justify="right")
    for one, runs in found:
        together = f"{one.configs}" if one.chunks == 1 else f"{one.configs} in {one.chunks} parts"
        table.add_row(
            one.method,
            str(runs),
            together,
            one.engine,
            f"{1000 * one.step_s:,.{0 if one.step_s > 0.1 else 2}f}",
            f"{one.first_step_s:.1f} s",
            size_text(one.device_bytes),
            size_text(one.disk_bytes),
            time_text(runs * one.total_s),
        )
    console.print(table)
    say(console, f"Estimated time on {first.device}: {time_text(total)}. Nothing was written.")
