"""`nguide encode`: the scans of an index become a feature store."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normal_guidance.cli.completion import DTYPES, ENCODERS, WINDOWS, one_of, some_of
from normal_guidance.cli.json_output import AsJson, print_json
from normal_guidance.cli.training_options import Device, Precision, choose_execution
from normal_guidance.errors import UserError

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.features.encoding import EncodingProgress, EncodingResult
    from normal_guidance.features.encoding_machine import EncodingOptions
    from normal_guidance.features.preprocessing import Statistics

LINE_SECONDS = 60.0
"""Outside a terminal, lines about the progress are at least so far apart."""


def encode(
    index: Annotated[Path, typer.Argument(help="The folder that nguide index made.", show_default=False)],
    encoder: Annotated[
        str,
        typer.Option(
            help="vit-b16-imagenet, efficientnet-lite0, or a Hugging Face id or folder, such as microsoft/rad-dino.",
            show_default=False,
            autocompletion=one_of(ENCODERS),
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="The store to write.", show_default=False)],
    window: Annotated[
        str,
        typer.Option(
            help="HU window, or several for several channels: head, lung, -100:300, none, head,lung.",
            autocompletion=some_of(WINDOWS),
        ),
    ] = "none",
    split: Annotated[
        Path | None, typer.Option(help="Table of nguide split; its training scans say what to normalise with.")
    ] = None,
    normalize: Annotated[
        str | None, typer.Option(help="MEAN,SD in HU instead, for each window.", show_default=False)
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Of the store: float16 or float32.", autocompletion=one_of(DTYPES))
    ] = "float32",
    repair: Annotated[
        bool,
        typer.Option("--repair/--no-repair", help="Mend known mistakes: RSNA 2019's intercepts, RSNA 2023's bits."),
    ] = True,
    workers: Annotated[
        int | None, typer.Option(min=0, help="Processes that decode. Default: one for each core; with --ray, 1.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, help="Slices that go through the encoder together.")] = 64,
    device: Device = None,
    precision: Precision = "auto",
    threads: Annotated[
        int | None, typer.Option(min=1, help="Of the encoder on the CPU. Default: one for each core.")
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="File of weights for a named encoder.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network call.")] = False,
    ray: Annotated[
        str | None, typer.Option(metavar="ADDRESS", help="Run on this Ray cluster: auto, or the head's host:port.")
    ] = None,
    root: Annotated[Path | None, typer.Option(help="Where the scans lie, if they were moved since.")] = None,
    as_json: AsJson = False,
) -> None:
    """Encode scans into a feature store: decode, window, resize, normalise, and run a frozen encoder.

    A scan that cannot be decoded is recorded and left out. Started again with the same options, a killed command goes
    on where it was, and the store is the same byte for byte.
    """
    from functools import partial

    from normal_guidance.cli.progress_bar import make_console, say
    from normal_guidance.data.manifest import read_manifest
    from normal_guidance.data.volumes import read_volume
    from normal_guidance.data.windows import parse_windows
    from normal_guidance.features.encoders import load_encoder
    from normal_guidance.features.encoding import encode as run
    from normal_guidance.features.preprocessing import Preprocessing
    from normal_guidance.features.store import read_parts
    from normal_guidance.features.store_files import DTYPES

    if dtype not in ("float16", "float32"):
        raise UserError(f"--dtype {dtype} is unknown; choose float16 or float32")
    windows = tuple(one and (float(one[0]), float(one[1])) for one in parse_windows(window))
    console = make_console(stderr=as_json)
    with _watch(console) as watch:
        outcome = run(
            read_manifest(index),
            partial(load_encoder, encoder, weights=weights, channels=len(windows), offline=offline),
            out,
            preprocessing=Preprocessing(windows=windows),
            read=read_volume,
            statistics=_statistics(normalize, len(windows)),
            parts=None if split is None else read_parts(split),
            root=root,
            options=_options(device, precision, ray, repair, batch_size, threads),
            dtype=DTYPES[dtype],
            workers=workers if workers is not None else 1 if ray else os.cpu_count() or 1,
            ray=ray,
            watch=watch,
        )
    if as_json:
        from normal_guidance.features.encoding_folder import REPORT
        from normal_guidance.files import read_json

        print_json(read_json(outcome.store.folder / REPORT))
        return
    for line in describe_outcome(outcome):
        say(console, line)


def _statistics(text: str | None, channels: int) -> Statistics | None:
    """Mean and sd of each channel.

    Example:
        >>> _statistics("40,80,-600,500", 2)
        Statistics(mean=(40.0, -600.0), sd=(80.0, 500.0))
    """
    from normal_guidance.features.preprocessing import Statistics

    if text is None:
        return None
    try:
        numbers = [float(word) for word in text.split(",")]
    except ValueError:
        numbers = []
    if len(numbers) != 2 * channels:
        raise UserError(f"--normalize {text}: give MEAN,SD for each of the {channels} window(s), for instance 40,80")
    return Statistics(tuple(numbers[::2]), tuple(numbers[1::2]))


def _options(
    device: str | None, precision: str, ray: str | None, repair: bool, batch_size: int, threads: int | None
) -> EncodingOptions:
    from normal_guidance.features.encoding_machine import EncodingOptions

    if ray is None:
        device = choose_execution(device, "auto").device
    device = device or "cpu"  # on Ray it is other machines', and they say if they have none
    automatic = "tf32" if device.startswith("cuda") else "float32"
    match automatic if precision == "auto" else precision:
        case "float32" | "tf32" | "bf16" as chosen:
            return EncodingOptions(repair, batch_size, device, chosen, threads)
    raise UserError(f"--precision {precision} is unknown; choose one of auto, float32, tf32, bf16")


def describe_outcome(outcome: EncodingResult) -> list[str]:
    """The closing lines: what is in the store, how fast it was, what is missing and where it says why."""
    store = outcome.store
    speed = f", {outcome.slices / outcome.seconds:,.0f} slices/s" if outcome.slices and outcome.seconds else ""
    lines = [f"{store.folder}: {store!r}{speed}"]
    if outcome.complete_before:
        lines = [f"{store.folder} is complete already; nothing was done", *lines]
    if outcome.failed:
        lines.append(f"{sum(outcome.failed.values())} scans could not be encoded: {_counts(outcome.failed)}")
    if outcome.problems:
        lines.append(f"Problems: {_counts(outcome.problems)}; see {store.folder / 'problems.csv'}")
    return lines


def _counts(of: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in of.items())


@contextmanager
def _watch(console: Console) -> Iterator[Callable[[EncodingProgress], None]]:
    """Lends what tells the progress: a bar on a terminal, elsewhere at most a line a minute."""
    pace = _Pace()
    if not console.is_terminal:
        yield _Lines(console, pace)
        return
    from rich.progress import BarColumn, TextColumn
    from rich.progress import Progress as Bars

    columns = (TextColumn("{task.description}"), BarColumn(), TextColumn("{task.fields[note]}"))
    with Bars(*columns, console=console, transient=True) as bars:
        task = bars.add_task("begins", total=1, note="")
        yield lambda now: bars.update(
            task, description=now.stage, completed=now.slices, total=now.of, note=pace.describe(now)
        )


class _Pace:
    """Slices per second and the time left, from what this start has done of a stage."""

    def __init__(self) -> None:
        self.stage, self.begin = "", 0.0

    def describe(self, now: EncodingProgress) -> str:
        if now.stage != self.stage:
            self.stage, self.begin = now.stage, time.monotonic()
        done, seconds = now.slices - now.begun_with, time.monotonic() - self.begin
        text = f"{now.slices:,} of {now.of:,} slices"
        if not done or not seconds:
            return text
        left = timedelta(seconds=round((now.of - now.slices) * seconds / done))
        return f"{text}, {done / seconds:,.0f} slices/s, {left} left"


class _Lines:
    def __init__(self, console: Console, pace: _Pace) -> None:
        self.console, self.pace, self.last = console, pace, time.monotonic()

    def __call__(self, now: EncodingProgress) -> None:
        from normal_guidance.cli.progress_bar import say

        text = self.pace.describe(now)
        if time.monotonic() - self.last >= LINE_SECONDS:
            self.last = time.monotonic()
            say(self.console, f"{now.stage}: {text}")
