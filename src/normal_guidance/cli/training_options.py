"""What `nguide sweep`, `experiment` and `reproduce` share: options, and how their values are read."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

from normal_guidance.cli.completion import DEVICES, NEGATIVES, PRECISIONS, one_of
from normal_guidance.errors import UserError

if TYPE_CHECKING:
    from normal_guidance.core.models import Method
    from normal_guidance.training.sweep import Execution

T = TypeVar("T")

Epochs = Annotated[int, typer.Option(min=1)]
Patience = Annotated[
    int | None,
    typer.Option(min=1, help="Stop after so many epochs without a better one, selectable or not. Default: never."),
]
TrainAboveVal = Annotated[
    bool,
    typer.Option(
        "--train-above-val/--no-train-above-val",
        help="Select only epochs whose training AUROC is above validation AUROC, as the paper does.",
    ),
]
Renormalize = Annotated[
    bool, typer.Option("--renormalize/--no-renormalize", help="Guide class-token rows made to sum to one.")
]
Modes = Annotated[int, typer.Option(min=1, help="Bells that attention is guided to in a scan; the paper's is 1.")]
Negatives = Annotated[
    str,
    typer.Option(
        help="Guide negative scans to their own bell (own, the paper's), to uniform attention (uniform), not (none).",
        autocompletion=one_of(NEGATIVES),
    ),
]
Warmup = Annotated[
    int, typer.Option(min=0, metavar="EPOCHS", help="Epochs in which lambda rises to its value. The paper's: none.")
]
LearningRates = Annotated[str | None, typer.Option(help="Learning rates. Default: the paper's 4.")]
L1Strengths = Annotated[str | None, typer.Option(help="L1 strengths. Default: the paper's 8.")]
Device = Annotated[
    str | None,
    typer.Option(help="cpu, cuda, cuda:1. Default: cuda if there is one.", autocompletion=one_of(DEVICES)),
]
Precision = Annotated[
    str,
    typer.Option(
        help="auto (float32 on the CPU, tf32 on CUDA), float32, tf32, bf16.", autocompletion=one_of(PRECISIONS)
    ),
]
Chunk = Annotated[int | None, typer.Option(min=1, help="Configurations trained together at most.")]


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


def named_methods(text: str, keep: Callable[[Method], bool]) -> list[str]:
    """Names of methods; 'all' are the paper's and 'beyond' those that it does not have, as far as `keep` wants them.

    Example:
        >>> named_methods("all, bells", keep=lambda method: method.guided)
        ['ng', 'mhng', 'bells']
    """
    from normal_guidance.core.models import BEYOND, METHODS

    groups = {"all": METHODS, "beyond": BEYOND}
    names: list[str] = []
    for word in parse_list("--methods", text, str):
        kept = [name for name, method in groups.get(word, {}).items() if keep(method)]
        names += kept if word in groups else [word]
    return list(dict.fromkeys(names))


def parse_if_given(option: str, text: str | None, kind: Callable[[str], T]) -> list[T] | None:
    """As `parse_list`; None for an option that was not given."""
    return None if text is None else parse_list(option, text, kind)


def choose_execution(device: str | None, precision: str, chunk: int | None = None) -> Execution:
    """Where and how to compute; what the machine does not have is an error.

    Example:
        >>> choose_execution("cpu", "auto").precision
        'float32'
    """
    import torch

    from normal_guidance.training.sweep import Execution

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
    automatic = "tf32" if kind == "cuda" else "float32"
    chosen = automatic if precision == "auto" else precision
    match chosen:
        case "float32" | "tf32" | "bf16":
            return Execution(device, chosen, chunk=chunk)
    raise UserError(f"--precision {precision} is unknown; choose one of auto, float32, tf32, bf16")


def given_guides(guides: Mapping[str, object]) -> list[str]:
    """Those of a command's `GUIDES` that are not the paper's, as they were given.

    Example:
        >>> given_guides({"renormalize": False, "modes": 1, "warmup": 10})
        ['--no-renormalize', '--warmup 10']
    """
    from normal_guidance.training.config import Config

    paper = Config("ng")
    given = {name: value for name, value in guides.items() if value != getattr(paper, name)}
    return [f"--no-{name}" if value is False else f"--{name} {value}" for name, value in given.items()]


def check_guidance(methods: Sequence[str], given: Sequence[str]) -> None:
    """Refuses options of guidance, as they were given, where no method has any use for them.

    Example:
        >>> check_guidance(["abmil"], ["--divergence reverse_kl"])
        Traceback (most recent call last):
        normal_guidance.errors.UserError: --divergence reverse_kl: none of abmil is guided; add one of ng, mhng to
        --methods, or leave the option out
    """
    from normal_guidance.core.models import EVERY_METHOD, METHODS

    guided = [name for name, method in METHODS.items() if method.guided]
    if given and not any(EVERY_METHOD[name].guided for name in methods if name in EVERY_METHOD):
        raise UserError(
            f"{given[0]}: none of {', '.join(methods)} is guided; add one of {', '.join(guided)} to --methods, or "
            "leave the option out"
        )
