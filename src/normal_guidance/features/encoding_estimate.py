"""What encoding a manifest would take: `nguide encode --dry-run` reads and encodes a few batches and writes nothing."""

from __future__ import annotations

import math
import time
from collections.abc import Iterable, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from normal_guidance.data.manifest import Manifest, ScanRow
from normal_guidance.data.worker_pool import TIMEOUT
from normal_guidance.errors import UserError
from normal_guidance.features.encoder_inputs import Decoding, Reader
from normal_guidance.features.encoding import DEFAULTS, check_scans, fit_preprocessing
from normal_guidance.features.encoding_machine import EncodingOptions, Inputs, Load, Machine, Setup, start_workers
from normal_guidance.features.encoding_store import plan_units
from normal_guidance.features.preprocessing import Preprocessing, Statistics, combine_statistics
from normal_guidance.machine import disk, peak_bytes

BATCHES, SECONDS = 32, 10.0
"""The measurement ends after so many batches, or so many seconds after the first."""

BATCHES_TO_NORMALISE = 4
"""Batches of slices whose mean and sd are measured, where those of the training scans are wanted."""


@dataclass(frozen=True)
class EncodingEstimate:
    """What a job would take on this machine.

    Args:
        scans: scans of the manifest.
        slices: their slices.
        batches: batches that the encoder would receive.
        batch_size: slices of a whole batch.
        device: where the encoder runs.
        device_bytes: most memory that the measurement took: on CUDA of the card, else of this process.
        store_bytes: the store's features on the disk.
        job_bytes: what the job needs besides, until the store is complete.
        free_bytes: free space of the disk.
        measured_scans: scans that were encoded for the measurement.
        measured_slices: their slices.
        failed: of these scans, those that could not be encoded, and why.
        slices_per_s: slices that are encoded in a second.
        first_batch_s: seconds from the start to the first encoded batch.
        statistics_s: estimated seconds for mean and sd of the training scans.
        total_s: estimated seconds for all.
    """

    scans: int
    slices: int
    batches: int
    batch_size: int
    device: str
    device_bytes: int
    store_bytes: int
    job_bytes: int
    free_bytes: int
    measured_scans: int
    measured_slices: int
    failed: Mapping[str, str]
    slices_per_s: float
    first_batch_s: float
    statistics_s: float
    total_s: float


def estimate_encoding(
    manifest: Manifest,
    load: Load,
    out: str | Path,
    *,
    preprocessing: Preprocessing,
    read: Reader,
    statistics: Statistics | None = None,
    parts: Mapping[str, str] | None = None,
    root: Path | None = None,
    options: EncodingOptions = DEFAULTS,
    dtype: torch.dtype = torch.float32,
    workers: int = 0,
    timeout: float = TIMEOUT,
) -> EncodingEstimate:
    """Estimates what `normal_guidance.features.encoding.encode` would take with the same arguments.

    Scans are drawn at random, with the same draws every time, read and encoded as a job would do it.
    """
    begin = time.monotonic()
    root = Path(root or manifest.root)
    if not root.is_dir():
        raise UserError(f"the scans' folder {root} does not exist; give the folder where they lie now (--root FOLDER)")
    check_scans(manifest, parts)
    rows = _draw(manifest, BATCHES * options.batch_size)
    with start_workers(workers, timeout, len(rows)) as pool:
        encoder = load(device=options.device, precision=options.precision)
        inputs = Inputs(
            Decoding(read, root, options.repair), fit_preprocessing(preprocessing, encoder, statistics, parts)
        )
        setup = Setup(load, encoder.fingerprint, torch.__version__, options, workers, timeout)
        machine, starting = Machine(setup, encoder, pool), time.monotonic() - begin
        to_normalise = 0.0
        if inputs.preprocessing.statistics is None:
            measured, rate = _measure(machine, inputs, _first(rows, BATCHES_TO_NORMALISE * options.batch_size))
            inputs = inputs._replace(preprocessing=inputs.preprocessing.with_statistics(measured))
            to_normalise = _training_slices(manifest, parts or {}) / rate
        trial = _try(machine, inputs, rows, options.batch_size)
    if len(trial.failed) == trial.scans:
        scan, reason = next(iter(trial.failed.items()))
        raise UserError(
            f"none of {trial.scans} scans could be encoded, for instance {scan!r} ({reason}); check that they lie in "
            f"{root}, or give the folder where they lie now (--root FOLDER)"
        )
    slices = int(manifest.lengths.sum())
    units = (int(manifest.lengths[unit.start : unit.stop].sum()) for unit in plan_units(manifest.lengths, options.unit))
    first_batch = starting + trial.first_batch_s
    return EncodingEstimate(
        scans=len(manifest),
        slices=slices,
        batches=sum(math.ceil(size / options.batch_size) for size in units),
        batch_size=options.batch_size,
        device=options.device,
        device_bytes=peak_bytes(options.device),
        store_bytes=slices * encoder.width * dtype.itemsize,
        job_bytes=slices * encoder.width * torch.float32.itemsize,
        free_bytes=disk(Path(out))[1],
        measured_scans=trial.scans,
        measured_slices=trial.slices,
        failed=trial.failed,
        slices_per_s=trial.slices_per_s,
        first_batch_s=first_batch,
        statistics_s=to_normalise,
        total_s=first_batch + to_normalise + slices / trial.slices_per_s,
    )


def _draw(manifest: Manifest, slices: int) -> list[ScanRow]:
    """Scans of at least so many slices in all, from anywhere in the manifest."""
    order = np.random.default_rng(0).permutation(len(manifest))
    return _first((manifest[int(number)] for number in order), slices)


def _first(rows: Iterable[ScanRow], slices: int) -> list[ScanRow]:
    """The first scans that have at least so many slices in all, or all."""
    found, total = [], 0
    for row in rows:
        found.append(row)
        total += len(row)
        if total >= slices:
            break
    return found


def _training_slices(manifest: Manifest, parts: Mapping[str, str]) -> int:
    lengths = zip(manifest.scan_ids, manifest.lengths, strict=True)
    return sum(int(length) for scan, length in lengths if parts.get(scan) == "train")


def _measure(machine: Machine, inputs: Inputs, rows: list[ScanRow]) -> tuple[Statistics, float]:
    """Mean and sd of scans, and the slices that are measured in a second."""
    begin, found = time.monotonic(), []
    for one in machine.measure(inputs, rows):
        found += [statistics for statistics in one.values() if statistics is not None]
    if not found:
        raise UserError(
            f"none of {len(rows)} scans could be read, for instance {rows[0].scan_id!r}, so there is no mean and sd to "
            f"normalise with; check that they lie in {inputs.decoding.root}"
        )
    return combine_statistics(found), sum(map(len, rows)) / (time.monotonic() - begin)


@dataclass(frozen=True)
class _Trial:
    scans: int
    slices: int
    failed: Mapping[str, str]
    first_batch_s: float
    slices_per_s: float


def _try(machine: Machine, inputs: Inputs, rows: list[ScanRow], batch_size: int) -> _Trial:
    """Encodes scans until there is enough to tell the speed."""
    units = [[rows[number] for number in unit] for unit in plan_units([len(row) for row in rows], batch_size)]
    begin, scans, slices = time.monotonic(), 0, 0
    failed: dict[str, str] = {}
    marks: list[tuple[float, int]] = []

    def mark(of_unit: int) -> None:
        marks.append((time.monotonic(), slices + of_unit))

    with closing(machine.encode(inputs, enumerate(units), mark)) as encoded:
        for number, unit in encoded:
            scans, slices = scans + len(units[number]), slices + sum(map(len, units[number]))
            problems = {problem.scan_id: f"{problem.kind}: {problem.detail}" for problem in unit.problems}
            failed |= {scan: problems[scan] for scan in unit.failed}
            if number and time.monotonic() - marks[0][0] > SECONDS:
                break
    (first, done), (last, _) = marks[0], marks[-1]
    # The first batch waits for the workers, which a long job does once.
    rate = (slices - done) / (last - first) if slices > done else slices / (last - begin)
    return _Trial(scans, slices, failed, first - begin, rate)
