"""`nguide encode`: encode the scans of an index into a feature store."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import count_text, size_text, time_text
from normal_guidance.cli import endings
from normal_guidance.cli.command import (
    DTYPES,
    ENCODERS,
    FORMATS,
    IMPORT_FORMATS,
    WINDOWS,
    AsJson,
    Command,
    Group,
    one_of,
    print_json,
    some_of,
)
from normal_guidance.cli.options import (
    COMPUTING,
    Device,
    Precision,
    choose_execution,
    choose_precision,
)

if TYPE_CHECKING:
    from rich.console import Console

    from normal_guidance.scans.features.encoding import EncodingEstimate, EncodingProgress, EncodingResult
    from normal_guidance.scans.features.encoding_machine import EncodingOptions
    from normal_guidance.scans.features.preprocessing import Statistics
    from normal_guidance.scans.features.store import FeatureStore
    from normal_guidance.scans.features.windows import Window
    from normal_guidance.scans.index.manifest import Manifest


def encode(
    index: Annotated[Path, typer.Argument(help="Folder that nguide index made.", metavar="INDEX")],
    encoder: Annotated[
        str,
        typer.Option(
            help="vit-b16-imagenet, efficientnet-lite0, or a Hugging Face id or folder, such as microsoft/rad-dino.",
            autocompletion=one_of(ENCODERS),
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the store.")],
    window: Annotated[
        str | None,
        typer.Option(
            help="Window. CT, in HU: head, lung, mediastinum, abdomen, -100:300. MR: adc (0:3000), 0:800, percentile "
            "(1st to 99th of each scan), percentile:LOW-HIGH. Or none. Several (head,lung) make channels. Default: "
            "none for CT, percentile for MR.",
            autocompletion=some_of(WINDOWS),
            show_default=False,
        ),
    ] = None,
    field: Annotated[
        str | None,
        typer.Option(
            metavar="MM",
            help="Encode only the middle of each slice, a square of so many mm, for a small organ in a large image.",
        ),
    ] = None,
    split: Annotated[
        Path | None,
        typer.Option(help="Table that nguide split made: normalise with mean and sd of its training scans."),
    ] = None,
    normalize: Annotated[
        str | None,
        typer.Option(
            metavar="MEAN,SD", help="Normalise with this mean and sd of the windowed values instead, for each window."
        ),
    ] = None,
    dtype: Annotated[
        str, typer.Option(help="Number format of the features: float16 or float32.", autocompletion=one_of(DTYPES))
    ] = "float32",
    repair: Annotated[
        bool,
        typer.Option(
            "--repair/--no-repair", help="Repair known errors in files of RSNA 2019 (intercepts) and RSNA 2023 (bits)."
        ),
    ] = True,
    workers: Annotated[
        int | None,
        typer.Option(
            min=0,
            help="Processes that decode. Default: one for each core; one with --ray.",
            rich_help_panel=COMPUTING,
        ),
    ] = None,
    batch_size: Annotated[
        int, typer.Option(min=1, help="Slices that are encoded together.", rich_help_panel=COMPUTING)
    ] = 64,
    device: Device = None,
    precision: Precision = "auto",
    threads: Annotated[
        int | None,
        typer.Option(
            min=1,
            help="Threads of the encoder on the CPU. Default: one for each core.",
            rich_help_panel=COMPUTING,
        ),
    ] = None,
    weights: Annotated[Path | None, typer.Option(help="File with other weights for a named encoder.")] = None,
    offline: Annotated[bool, typer.Option("--offline", help="Make no network call.")] = False,
    ray: Annotated[
        str | None,
        typer.Option(
            metavar="ADDRESS",
            help="Encode on a Ray cluster: host:port of its head, or auto for the one of this machine.",
            rich_help_panel=COMPUTING,
        ),
    ] = None,
    root: Annotated[
        Path | None, typer.Option(help="Folder of the scans, if they were moved since nguide index.")
    ] = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Encode a few batches, estimate time, memory and disk, and write nothing."),
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Encode scans into a feature store: decode, window, resize, normalise, and run a frozen encoder.

    A scan that cannot be decoded is left out, problems.csv says why, and the exit code is 1. Start a killed command
    again with the same options to resume it; the store is then the same, byte for byte. So does a store that lacks
    scans: only these are tried again.
    """
    from functools import partial

    from normal_guidance.cli.progress import make_console, say
    from normal_guidance.scans.features.encoders import load_encoder
    from normal_guidance.scans.features.encoding import encode as run
    from normal_guidance.scans.features.preprocessing import Preprocessing
    from normal_guidance.scans.features.store import DTYPES
    from normal_guidance.scans.features.windows import parse_windows
    from normal_guidance.scans.index.manifest import read_manifest
    from normal_guidance.scans.index.splits import read_parts
    from normal_guidance.scans.index.volumes import read_volume

    if dtype not in ("float16", "float32"):
        raise UserError(f"--dtype {dtype} is unknown; choose float16 or float32")
    console = make_console(stderr=as_json)
    manifest = read_manifest(index)
    windows = parse_windows(window or _default_window(manifest, console))
    warning = describe_modality(manifest, windows)
    if warning:
        typer.secho(warning, fg=typer.colors.YELLOW, err=True)
    load = partial(load_encoder, encoder, weights=weights, channels=len(windows), offline=offline)
    arguments: dict[str, Any] = {
        "preprocessing": Preprocessing(windows=windows, field=_field(field)),
        "read": read_volume,
        "statistics": _statistics(normalize, len(windows)),
        "parts": None if split is None else read_parts(split, manifest),
        "root": root,
        "options": _options(device, precision, ray, repair, batch_size, threads),
        "dtype": DTYPES[dtype],
        "workers": workers if workers is not None else 1 if ray else os.cpu_count() or 1,
    }
    if dry_run:
        if ray is not None:
            raise UserError(f"--dry-run measures this machine, not the cluster {ray}; leave out --ray")
        from normal_guidance.scans.features.encoding import estimate_encoding

        _print_estimate(estimate_encoding(manifest, load, out, **arguments), out, console, as_json)
        return
    with _watch(console) as watch:
        outcome = run(manifest, load, out, ray=ray, watch=watch, **arguments)
    if as_json:
        from normal_guidance.base.files import read_json
        from normal_guidance.scans.features.encoding_job import REPORT

        print_json(read_json(outcome.store.folder / REPORT))
    else:
        for line in describe_outcome(outcome):
            say(console, line)
        if not outcome.failed:
            say(console, f"Next: nguide fit {outcome.store.folder} -o MODEL")
    if outcome.failed:
        raise typer.Exit(endings.NOT_ALL.code)


def _default_window(manifest: Manifest, console: Console) -> str:
    """Return the window for the manifest's modality, and say which it is where it changes the values."""
    from normal_guidance.cli.progress import say
    from normal_guidance.scans.features.windows import default_window

    modalities = sorted(set(manifest.table["modality"].to_pylist()))
    window = default_window(modalities)
    if window != "none":
        say(console, f"{', '.join(modalities)} scans: --window {window}, from the 1st to the 99th of each scan")
    return window


def describe_modality(manifest: Manifest, windows: Sequence[Window | None]) -> str:
    """Return a warning where a window for MR meets NIfTI scans that count as CT; empty otherwise."""
    from normal_guidance.scans.features.windows import WINDOWS, Percentiles

    kinds = zip(manifest.table["kind"].to_pylist(), manifest.table["modality"].to_pylist(), strict=True)
    count = sum(one == ("nifti", "CT") for one in kinds)
    if not count or not any(one == WINDOWS["adc"] or isinstance(one, Percentiles) for one in windows):
        return ""
    return (
        f"warning: the window is one for MR, but {count_text(count, 'NIfTI scan')} "
        f"{'counts' if count == 1 else 'count'} as CT; for MR add a column modality with MR to the table of nguide "
        "index, and index again"
    )


def _print_estimate(estimate: EncodingEstimate, out: Path, console: Console, as_json: bool) -> None:
    from dataclasses import asdict

    from normal_guidance.cli.progress import say

    if as_json:
        print_json(asdict(estimate))
        return
    for line in describe_estimate(estimate, out):
        say(console, line)


def describe_estimate(estimate: EncodingEstimate, out: Path) -> list[str]:
    """Return the lines of a dry run: sizes, memory, disk, what was measured, and the time."""
    one = estimate
    lines = [
        f"{one.scans:,} scans, {one.slices:,} slices, {one.batches:,} batches of at most {one.batch_size}",
        f"Memory: {size_text(one.device_bytes)} on {one.device}",
        f"Disk: {size_text(one.store_bytes)} for {out}, and {size_text(one.job_bytes)} until it is complete; "
        f"{size_text(one.free_bytes)} are free",
        f"Measured: {one.measured_slices:,} slices of {one.measured_scans:,} scans, {one.slices_per_s:,.1f} slices/s, "
        f"first batch after {one.first_batch_s:.1f} s",
    ]
    if one.failed:
        scan, reason = next(iter(one.failed.items()))
        lines.append(f"{len(one.failed)} of these scans could not be encoded, for instance {scan}: {reason}")
    first = (
        f", of which {time_text(one.statistics_s)} for mean and sd of the training scans" if one.statistics_s else ""
    )
    return [*lines, f"Estimated time: {time_text(one.total_s)}{first}. Nothing was written."]


def _field(text: str | None) -> float | None:
    """Return the side of the field in mm."""
    if text is None:
        return None
    try:
        side = float(text)
    except ValueError:
        side = 0.0
    if not 0 < side < math.inf:
        raise UserError(f"--field {text}: give the side of the field in millimetres, above 0, for instance 70")
    return side


def _statistics(text: str | None, channels: int) -> Statistics | None:
    """Return mean and sd of each channel."""
    from normal_guidance.scans.features.preprocessing import Statistics

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
    from normal_guidance.scans.features.encoding_machine import EncodingOptions

    if ray is None:
        device = choose_execution(device, "auto").device
    device = device or "cpu"  # on Ray, the other machines check whether they have it
    return EncodingOptions(repair, batch_size, device, choose_precision(precision, device), threads)


def describe_outcome(outcome: EncodingResult) -> list[str]:
    """Return the closing lines: the store, the speed, and the scans that are missing."""
    store = outcome.store
    speed = f", {outcome.slices / outcome.seconds:,.0f} slices/s" if outcome.slices and outcome.seconds else ""
    lines = [f"{store.folder}: {store!r}{speed}"]
    if outcome.complete_before and not outcome.failed:
        lines = [f"{store.folder} is complete already; nothing was done", *lines]
    if outcome.failed:
        still = "still " if outcome.complete_before else ""
        lines.append(
            f"{store.folder} {still}lacks {sum(outcome.failed.values())} scans of the index: "
            f"{_counts(outcome.failed)}; start the same command again when they can be read: it takes up only these"
        )
    if outcome.problems:
        lines.append(f"Problems: {_counts(outcome.problems)}; see {store.folder / 'problems.csv'}")
    return lines


def _counts(of: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in of.items())


def _watch(console: Console) -> AbstractContextManager[Callable[[EncodingProgress], None]]:
    """Show the progress of each stage of encoding."""
    from normal_guidance.cli.progress import Pace, Shown, watch

    stage, pace = "", Pace(0.0)

    def show(now: EncodingProgress) -> Shown:
        nonlocal stage, pace
        if now.stage != stage:
            stage, pace = now.stage, Pace(float(now.begun_with))
        return Shown(
            stage, now.slices / now.of if now.of else 0.0, describe_progress(now, pace.per_second(float(now.slices)))
        )

    return watch(console, "encoding", show)


def describe_progress(now: EncodingProgress, speed: float | None) -> str:
    """Return the slices that are done and, where the speed is known, speed and time left."""
    text = f"{now.slices:,} of {now.of:,} slices"
    if speed is None:
        return text
    return f"{text}, {speed:,.0f} slices/s, {time_text((now.of - now.slices) / speed)} left"


# `nguide store`: show and verify feature stores, and convert them from and to other formats.


store_app = typer.Typer(
    help="Show, verify, import and export feature stores.",
    cls=Group,
    no_args_is_help=True,
    context_settings={"help_option_names": ["-h", "--help"]},
)

Store = Annotated[Path, typer.Argument(help="Folder of a feature store.", metavar="STORE")]
Form = Annotated[
    str,
    typer.Option(
        "--format",
        "-f",
        help="npz, hdf5 or torchmil.",
        metavar="FORMAT",
        autocompletion=one_of(FORMATS),
    ),
]


@store_app.command(cls=Command)
def show(store: Store, as_json: AsJson = False) -> None:
    """Show what a store holds and how it was made; features are not read."""
    from normal_guidance.scans.features.store import open_store

    opened = open_store(store)
    if as_json:
        print_json(_about(opened))
        return
    typer.echo(repr(opened))
    typer.echo(f"recipe: {opened.recipe or 'unknown'}")
    typer.echo(f"fingerprint: {opened.fingerprint}")
    print_json(opened.provenance)


def _about(store: FeatureStore) -> dict[str, Any]:
    """Return what `show` prints, as JSON."""
    return {
        "folder": store.folder,
        "scans": len(store),
        "positive": int((store.labels == 1).sum()),
        "slices": int(store.lengths.sum()),
        "features": store.width,
        "dtype": str(store.dtype).removeprefix("torch."),
        "bytes": store.memory,
        "findings": [one.as_json() for one in store.findings],
        "parts": {str(part): int(count) for part, count in store.scans["part"].value_counts(sort=False).items()},
        "recipe": store.recipe or None,
        "fingerprint": store.fingerprint,
        "provenance": store.provenance,
    }


@store_app.command(cls=Command)
def verify(store: Store, as_json: AsJson = False) -> None:
    """Read all features and compare each scan's sha256 with the store's index; fail if a scan is damaged."""
    from normal_guidance.scans.features.store import open_store

    opened = open_store(store)
    damaged = opened.damaged()
    if as_json:
        print_json({"folder": store, "scans": len(opened), "bytes": opened.memory, "damaged": damaged})
    if damaged:
        raise UserError(
            f"{store}: {len(damaged)} of {len(opened)} scans are damaged: {', '.join(damaged[:10])}"
            f"{', ...' if len(damaged) > 10 else ''}; copy the store again, or encode it again"
        )
    if not as_json:
        typer.echo(f"{store}: {len(opened)} scans, {opened.memory:,} bytes of features; all are as they were written")


@store_app.command("import", cls=Command)
def import_features(
    source: Annotated[
        Path,
        typer.Argument(
            help="Features: a file (.npz, .npy, .pt, .h5, .parquet), a folder of such files, or torchmil's folders.",
            metavar="SOURCE",
        ),
    ],
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder for the store.")],
    labels: Annotated[
        Path | None,
        typer.Option(
            help="Table (.csv, .parquet) with scan_id, label, and optionally patient_id, part, slice_labels (0 0 1 1).",
        ),
    ] = None,
    findings: Annotated[
        str | None,
        typer.Option(
            help="Columns of that table with 0 or 1, instead of label, with a SNOMED CT code where known: "
            "any=1386000,epidural. The first is the main one, which must be known for every scan."
        ),
    ] = None,
    form: Annotated[
        str | None,
        typer.Option(
            "--format",
            "-f",
            help="npz, npy, pt, hdf5, parquet or torchmil. Default: found from the files.",
            metavar="FORMAT",
            autocompletion=one_of(IMPORT_FORMATS),
        ),
    ] = None,
) -> None:
    """Write a store from features of your own.

    A file may hold one scan or many; the command prints under which keys it found features, labels and patients.
    Reading executes no code: pickled objects are refused.
    """
    from normal_guidance.scans.features.convert import import_store
    from normal_guidance.scans.index.manifest import parse_findings

    named = () if findings is None else parse_findings(findings)
    store = import_store(source, out, form, labels=labels, findings=named, tell=lambda line: typer.echo(line, err=True))
    typer.echo(f"{out}: {store!r}")
    if not store.scans["part"].notna().any():
        typer.echo(f"Next: nguide fit {out} -o MODEL")


@store_app.command("export", cls=Command)
def export_features(
    store: Store,
    form: Form,
    out: Annotated[Path, typer.Option("--out", "-o", help="Folder to write; for hdf5, the file.")],
    finding: Annotated[
        str | None, typer.Option(help="The finding whose labels to write, where the store has several.")
    ] = None,
) -> None:
    """Write a store as npz files, HDF5 or torchmil's folders."""
    from normal_guidance.scans.features.convert import export_store
    from normal_guidance.scans.features.store import open_store

    opened = open_store(store) if finding is None else open_store(store).of_finding(finding)
    export_store(opened, out, form)
    typer.echo(f"{out}: {len(opened)} scans as {form}")


# `nguide weights`: show, import and check the pretrained weights of the named encoders.


class _ListByDefault(Group):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: the class differs between releases of typer
        return super().parse_args(ctx, args or ["list"])


weights_app = typer.Typer(
    cls=_ListByDefault,
    help="List, import and check the pretrained weights of encoders. Default: list.",
    context_settings={"help_option_names": ["-h", "--help"]},
)


@weights_app.command("list", cls=Command)
def list_weights(as_json: AsJson = False) -> None:
    """List the known weights and where they are; the files are not read."""
    from normal_guidance.scans.features.weights import KNOWN_WEIGHTS, cache_folder, find_weights

    found = {name: find_weights(name) for name in KNOWN_WEIGHTS}
    if as_json:
        rows = [{"name": name, **asdict(known), "found": found[name]} for name, known in KNOWN_WEIGHTS.items()]
        print_json({"cache": cache_folder(), "weights": rows})
        return
    for name, known in KNOWN_WEIGHTS.items():
        file = found[name]
        where = f"in {file}" if file else f"not on this machine; nguide weights import {name} {known.file}"
        typer.echo(f"{name}: {known.source}, {known.mib} MiB, {where}")
    typer.echo(f"cache: {cache_folder()} (NGUIDE_CACHE chooses another)")


@weights_app.command("import", cls=Command)
def import_weights(
    name: Annotated[
        str,
        typer.Argument(
            help="Name of an encoder that nguide weights list shows.", metavar="NAME", autocompletion=one_of(ENCODERS)
        ),
    ],
    file: Annotated[Path, typer.Argument(help="The published file, downloaded elsewhere.", metavar="FILE")],
) -> None:
    """Copy a weights file into the cache, if its sha256 is the published one."""
    from normal_guidance.scans.features.weights import import_weights

    typer.echo(f"{name}: {import_weights(name, file)}")


@weights_app.command("check", cls=Command)
def check(as_json: AsJson = False) -> None:
    """Compare the sha256 of each weights file with the published one; fail if a file is damaged."""
    from normal_guidance.base.errors import UserError
    from normal_guidance.scans.features.weights import check_weights

    found = check_weights()
    if as_json:
        print_json([one._asdict() for one in found])
    for one in [] if as_json else found:
        typer.echo(f"{one.name}: {one.state} ({', '.join(str(part) for part in (one.file, one.detail) if part)})")
    damaged = [str(one.file) for one in found if one.state == "damaged"]
    if damaged:
        raise UserError(f"{', '.join(damaged)}: damaged; delete it and import it again (nguide weights import)")
