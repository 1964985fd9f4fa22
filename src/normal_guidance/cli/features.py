"""Commands on features: `nguide encode`, `store` and `weights`."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normal_guidance.base.errors import UserError, choose_one_of
from normal_guidance.base.files import read_json
from normal_guidance.base.system import count_text, size_text, time_text
from normal_guidance.cli import endings
from normal_guidance.cli.command import (
    ENCODERS,
    WINDOWS,
    AsJson,
    CommandGroup,
    Out,
    Store,
    add_command,
    json_text,
    make_group,
    one_of,
    print_result,
    some_of,
)
from normal_guidance.cli.options import Device, Precision, choose_execution, choose_precision, refuse_ray_and_dry_run
from normal_guidance.show.progress_bar import make_console, say, watch

if TYPE_CHECKING:
    from normal_guidance.scans.features.encoding import EncodingEstimate, EncodingResult
    from normal_guidance.scans.features.preprocessing import Statistics
    from normal_guidance.scans.features.windows import Window
    from normal_guidance.scans.index.manifest import Manifest

FORMATS = ("npz", "hdf5", "torchmil")
IMPORT_FORMATS = ("npz", "npy", "pt", "hdf5", "parquet", "torchmil")
DTYPES = ("float16", "float32")


def encode(
    index: Path,
    out: Out,
    encoder: Annotated[str, one_of(ENCODERS)] = "efficientnet-lite0",
    window: Annotated[str | None, some_of(WINDOWS), typer.Option(show_default=False)] = None,
    field: Annotated[float | None, typer.Option(metavar="MM")] = None,
    split: Path | None = None,
    normalize: Annotated[str | None, typer.Option(metavar="MEAN,SD")] = None,
    dtype: Annotated[str, one_of(DTYPES)] = "float32",
    repair: bool = True,
    workers: Annotated[int | None, typer.Option(min=0)] = None,
    batch_size: Annotated[int, typer.Option(min=1)] = 64,
    device: Device = None,
    precision: Precision = "auto",
    threads: Annotated[int | None, typer.Option(min=1)] = None,
    weights: Path | None = None,
    offline: bool = False,
    ray: Annotated[str | None, typer.Option(metavar="ADDRESS")] = None,
    root: Path | None = None,
    dry_run: bool = False,
    as_json: AsJson = False,
) -> None:
    """Encode scans into a feature store: decode, window, resize, normalise, and run a frozen encoder.

    A scan that cannot be decoded is left out, problems.csv says why, and the exit code is 1. Start a killed command
    again with the same options to resume it; the store is then the same, byte for byte. So does a store that lacks
    scans: only these are tried again.

    Args:
        index: Folder that nguide index made.
        encoder: vit-b16-imagenet, efficientnet-lite0, or a Hugging Face id or folder, such as microsoft/rad-dino.
        out: Folder for the store.
        window: Window. CT, in HU: head, lung, mediastinum, abdomen, -100:300. MR: adc (0:3000), 0:800, percentile (1st
            to 99th of each scan), percentile:LOW-HIGH. Or none. Several (head,lung) make channels. Default: head for
            CT, percentile for MR and for both together.
        field: Encode only the middle of each slice, a square of so many mm, for a small organ in a large image.
        split: Table that nguide split made: normalise with mean and sd of its training scans, as in the paper.
            Default: with mean and sd of 64 scans, drawn by their names.
        normalize: Normalise with this mean and sd of the windowed values instead, for each window.
        dtype: Number format of the features: float16 or float32.
        repair: Repair known errors in files of RSNA 2019 (intercepts) and RSNA 2023 (bits).
        weights: File with other weights for a named encoder.
        offline: Make no network call.
        root: Folder of the scans, if they were moved since nguide index.
        dry_run: Encode a few batches, estimate time, memory and disk, and write nothing.

    Computing:
        workers: Processes that decode. Default: one for each core; one with --ray.
        batch_size: Slices that are encoded together.
        threads: Threads of the encoder on the CPU. Default: one for each core.
        ray: Encode on a Ray cluster: host:port of its head, or auto for the one of this machine.
    """
    from normal_guidance.scans.features import encoding
    from normal_guidance.scans.features.encoders import load_encoder
    from normal_guidance.scans.features.encoding_job import REPORT
    from normal_guidance.scans.features.encoding_machine import EncodingOptions
    from normal_guidance.scans.features.preprocessing import Preprocessing
    from normal_guidance.scans.features.store import DTYPES as TORCH_DTYPES
    from normal_guidance.scans.features.windows import default_window, parse_windows
    from normal_guidance.scans.index.manifest import read_manifest
    from normal_guidance.scans.index.splits import read_parts
    from normal_guidance.scans.index.volumes import read_volume

    choose_one_of("--dtype", dtype, DTYPES)
    console = make_console(stderr=as_json)
    manifest = read_manifest(index)
    usual, chosen = default_window(manifest.table["modality"].to_pylist())
    windows = parse_windows(usual if window is None else window)
    warning = modality_line(manifest, windows)
    if warning:
        typer.secho(warning, fg=typer.colors.YELLOW, err=True)
    if ray is None:
        device = choose_execution(device, "auto").device
    device = device or "cpu"  # on Ray, the other machines check whether they have it
    task = encoding.EncodingTask(
        manifest=manifest,
        load=partial(load_encoder, encoder, weights=weights, channels=len(windows), offline=offline),
        preprocessing=Preprocessing(windows=windows, field=field),
        read=read_volume,
        statistics=_statistics(normalize, len(windows)),
        parts=None if split is None else read_parts(split, manifest),
        root=root,
        options=EncodingOptions(repair, batch_size, device, choose_precision(precision, device), threads),
        dtype=TORCH_DTYPES[dtype],
        workers=workers if workers is not None else 1 if ray else os.cpu_count() or 1,
    )
    if window is None:
        say(console, chosen)
    if dry_run:
        refuse_ray_and_dry_run(ray)
        estimate = encoding.estimate_encoding(task, out)
        print_result(as_json, asdict(estimate), estimate_lines(estimate, out))
        return
    with watch(console, "encoding", encoding.EncodingProgress.shown) as update:
        outcome = encoding.encode(task, out, ray=ray, watch=update)
    print_result(as_json, read_json(outcome.store.folder / REPORT), outcome_lines(outcome))
    if outcome.failed:
        raise typer.Exit(endings.NOT_ALL.code)


def modality_line(manifest: Manifest, windows: Sequence[Window | None]) -> str:
    """Return a warning where a window for MR meets NIfTI scans that count as CT; empty otherwise."""
    from normal_guidance.scans.features.windows import WINDOWS, Percentiles

    kinds = zip(manifest.table["kind"].to_pylist(), manifest.table["modality"].to_pylist(), strict=True)
    count = sum(kind == ("nifti", "CT") for kind in kinds)
    if not count or not any(window == WINDOWS["adc"] or isinstance(window, Percentiles) for window in windows):
        return ""
    return (
        f"warning: the window is one for MR, but {count_text(count, 'NIfTI scan')} "
        f"{'counts' if count == 1 else 'count'} as CT; for MR add a column modality with MR to the table of nguide "
        "index, and index again"
    )


def estimate_lines(estimate: EncodingEstimate, out: Path) -> list[str]:
    """Return the lines of a dry run: sizes, memory, disk, what was measured, and the time."""
    lines = [
        f"{estimate.scans:,} scans, {estimate.slices:,} slices, {estimate.batches:,} batches of at most "
        f"{estimate.batch_size}",
        f"Memory: {size_text(estimate.device_bytes)} on {estimate.device}",
        f"Disk: {size_text(estimate.store_bytes)} for {out}, and {size_text(estimate.job_bytes)} until it is complete; "
        f"{size_text(estimate.free_bytes)} are free",
        f"Measured: {estimate.measured_slices:,} slices of {estimate.measured_scans:,} scans, "
        f"{estimate.slices_per_s:,.1f} slices/s, first batch after {estimate.first_batch_s:.1f} s",
    ]
    if estimate.failed:
        scan, reason = next(iter(estimate.failed.items()))
        lines.append(f"{len(estimate.failed)} of these scans could not be encoded, for instance {scan}: {reason}")
    first = ""
    if estimate.statistics_s:
        first = f", of which {time_text(estimate.statistics_s)} for mean and sd of the training scans"
    return [*lines, f"Estimated time: {time_text(estimate.total_s)}{first}. Nothing was written."]


def _statistics(text: str | None, channels: int) -> Statistics | None:
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


def outcome_lines(outcome: EncodingResult) -> list[str]:
    """Return the closing lines: the store, the speed, the scans that are missing, and the next command."""
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
    return lines if outcome.failed else [*lines, f"Next: nguide fit {store.folder} -o MODEL"]


def _counts(of: Mapping[str, int]) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in of.items())


store_app = make_group("Show, verify, import and export feature stores.")


def show(store: Store, as_json: AsJson = False) -> None:
    """Show what a store holds and how it was made; features are not read."""
    from normal_guidance.scans.features.store import open_store

    opened = open_store(store)
    document = {
        "folder": opened.folder,
        "scans": len(opened),
        "positive": int((opened.labels == 1).sum()),
        "slices": int(opened.lengths.sum()),
        "features": opened.width,
        "dtype": str(opened.dtype).removeprefix("torch."),
        "bytes": opened.memory,
        "findings": [finding.as_json() for finding in opened.findings],
        "parts": {str(part): int(count) for part, count in opened.scans["part"].value_counts(sort=False).items()},
        "recipe": opened.recipe or None,
        "fingerprint": opened.fingerprint,
        "provenance": opened.provenance,
    }
    about = (f"recipe: {opened.recipe or 'unknown'}", f"fingerprint: {opened.fingerprint}")
    print_result(as_json, document, [repr(opened), *about, json_text(opened.provenance)])


def verify(store: Store, as_json: AsJson = False) -> None:
    """Read all features and compare each scan's sha256 with the store's index; fail if a scan is damaged."""
    from normal_guidance.scans.features.store import open_store

    opened = open_store(store)
    damaged = opened.damaged()
    whole = f"{store}: {len(opened)} scans, {opened.memory:,} bytes of features; all are as they were written"
    about = {"folder": store, "scans": len(opened), "bytes": opened.memory, "damaged": damaged}
    print_result(as_json, about, [] if damaged else [whole])
    if damaged:
        raise UserError(
            f"{store}: {len(damaged)} of {len(opened)} scans are damaged: {', '.join(damaged[:10])}"
            f"{', ...' if len(damaged) > 10 else ''}; copy the store again, or encode it again"
        )


def import_features(
    source: Path,
    out: Out,
    labels: Path | None = None,
    findings: str | None = None,
    form: Annotated[str | None, one_of(IMPORT_FORMATS), typer.Option("--format", "-f", metavar="FORMAT")] = None,
) -> None:
    """Write a store from features of your own.

    A file may hold one scan or many; the command prints under which keys it found features, labels and patients.
    Reading executes no code: pickled objects are refused.

    Args:
        source: Features: a file (.npz, .npy, .pt, .h5, .parquet), a folder of such files, or torchmil's folders.
        out: Folder for the store.
        labels: Table (.csv, .parquet) with scan_id, label, and optionally patient_id, part, slice_labels (0 0 1 1).
        findings: Columns of that table with 0 or 1, instead of label, with a SNOMED CT code where known:
            any=1386000,epidural. The first is the main one, which must be known for every scan.
        form: npz, npy, pt, hdf5, parquet or torchmil. Default: found from the files.
    """
    from normal_guidance.scans.features.convert import import_store
    from normal_guidance.scans.index.manifest import parse_findings

    named = () if findings is None else parse_findings(findings)
    store = import_store(source, out, form, labels=labels, findings=named, tell=lambda line: typer.echo(line, err=True))
    typer.echo(f"{out}: {store!r}")
    if not store.scans["part"].notna().any():
        typer.echo(f"Next: nguide fit {out} -o MODEL")


def export_features(
    store: Store,
    form: Annotated[str, one_of(FORMATS), typer.Option("--format", "-f", metavar="FORMAT")],
    out: Out,
    finding: str | None = None,
) -> None:
    """Write a store as npz files, HDF5 or torchmil's folders.

    Args:
        form: npz, hdf5 or torchmil.
        out: Folder to write; for hdf5, the file.
        finding: The finding whose labels to write, where the store has several.
    """
    from normal_guidance.scans.features.convert import export_store
    from normal_guidance.scans.features.store import open_store

    opened = open_store(store) if finding is None else open_store(store).of_finding(finding)
    export_store(opened, out, form)
    typer.echo(f"{out}: {len(opened)} scans as {form}")


class ListByDefault(CommandGroup):
    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:  # Any: the class differs between releases of typer
        return super().parse_args(ctx, args or ["list"])


weights_app = make_group(
    "List, import and check the pretrained weights of encoders. Default: list.", ListByDefault, help_without_words=False
)


def list_weights(as_json: AsJson = False) -> None:
    """List the known weights and where they are; the files are not read."""
    from normal_guidance.scans.features.weights import KNOWN_WEIGHTS, cache_folder, find_weights

    rows, lines = [], []
    for name, known in KNOWN_WEIGHTS.items():
        file = find_weights(name)
        rows.append({"name": name, **asdict(known), "found": file})
        where = f"in {file}" if file else f"not on this machine; nguide weights import {name} {known.file}"
        lines.append(f"{name}: {known.source}, {known.mib} MiB, {where}")
    lines.append(f"cache: {cache_folder()} (NGUIDE_CACHE chooses another)")
    print_result(as_json, {"cache": cache_folder(), "weights": rows}, lines)


def import_weights(name: Annotated[str, one_of(ENCODERS)], file: Path) -> None:
    """Copy a weights file into the cache, if its sha256 is the published one.

    Args:
        name: Name of an encoder that nguide weights list shows.
        file: The published file, downloaded elsewhere.
    """
    from normal_guidance.scans.features import weights

    typer.echo(f"{name}: {weights.import_weights(name, file)}")


def check(as_json: AsJson = False) -> None:
    """Compare the sha256 of each weights file with the published one; fail if a file is damaged."""
    from normal_guidance.scans.features.weights import check_weights

    states = check_weights()
    lines = [
        f"{known.name}: {known.state} ({', '.join(str(part) for part in (known.file, known.detail) if part)})"
        for known in states
    ]
    print_result(as_json, [known._asdict() for known in states], lines)
    damaged = [str(known.file) for known in states if known.state == "damaged"]
    if damaged:
        raise UserError(f"{', '.join(damaged)}: damaged; delete it and import it again (nguide weights import)")


add_command(store_app, show)
add_command(store_app, verify)
add_command(store_app, import_features, "import")
add_command(store_app, export_features, "export")
add_command(weights_app, list_weights, "list")
add_command(weights_app, import_weights, "import")
add_command(weights_app, check)
