"""From scans to a feature store: `nguide encode`, on this machine or, with `ray_cluster`, on many.

Worker processes read scans; this process runs the encoder over their slices in fixed batches, while the next ones
are being read.  Consecutive scans of the manifest are packed into units.  A complete unit is saved atomically, so a
killed job loses only its current unit.  The features of a unit depend on its scans alone: a scan that cannot be decoded
leaves zeros in the batch, so that the others' bits do not change, and is left out of the store.  So the store is the
same byte for byte whether or not the job was killed, for any number of workers or machines, as long as the encoder's
arithmetic is the same; for that reason the number of its threads is fixed, too.
"""

from __future__ import annotations

import hashlib
import json
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from normal_guidance import __version__
from normal_guidance.core.bags import UNKNOWN, Bag, Bags
from normal_guidance.data.manifest import Manifest, ScanRow
from normal_guidance.data.problems import Problem, read_problems, summarize, write_problems
from normal_guidance.data.worker_pool import TIMEOUT, Pool
from normal_guidance.errors import UserError, shorten
from normal_guidance.features.encoder_inputs import Decoding, Reader
from normal_guidance.features.encoders import Encoder
from normal_guidance.features.encoding_folder import (
    FORMAT,
    REPORT,
    Encoded,
    EncodingJob,
    EncodingReport,
    job_folder,
    open_job,
    recorded_identity,
    refuse_another,
)
from normal_guidance.features.encoding_machine import (
    LEFT_OUT,
    UNIT,
    EncodingBackend,
    EncodingOptions,
    Inputs,
    Load,
    Machine,
    Setup,
    start_workers,
)
from normal_guidance.features.preprocessing import Preprocessing, Statistics, combine_statistics
from normal_guidance.features.scan_kind import describe_inputs
from normal_guidance.features.store import FeatureStore, check_patients, open_store, write_store
from normal_guidance.features.store_files import AGAIN, dtype_name
from normal_guidance.files import read_json_as

PROBLEMS = "problems.csv"

DEFAULTS = EncodingOptions()


@dataclass(frozen=True)
class EncodingProgress:
    """How far a job is: slices of finished units and, on this machine, of finished batches."""

    stage: str
    slices: int
    of: int
    begun_with: int
    """Slices that an earlier start of the job had done."""


@dataclass(frozen=True, eq=False)
class EncodingResult:
    """The result of a job.

    Args:
        store: the features.
        failed: number of scans that are not in the store, by kind of problem.
        problems: number of problems by kind; the store's problems.csv lists them.
        slices: slices that this start encoded.
        seconds: time that this start took to encode them.
        complete_before: whether the store was complete already.
    """

    store: FeatureStore
    failed: Mapping[str, int]
    problems: Mapping[str, int]
    slices: int
    seconds: float
    complete_before: bool = False


Watch = Callable[[EncodingProgress], object]

# ----------------------------------------------------------------------------------------------------
# The job
# ----------------------------------------------------------------------------------------------------


def encode(
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
    ray: str | None = None,
    watch: Watch = lambda progress: None,
) -> EncodingResult:
    """Encodes the scans of a manifest into a new store; the same call continues a job that was killed.

    Args:
        manifest: the scans.
        load: loads the encoder.
        out: the store, which appears when it is complete; until then the job lies in `out`.job.
        preprocessing: the windows; the size is replaced by the encoder's.
        read: `normal_guidance.data.volumes.read_volume`.
        statistics: mean and sd to normalise with.  If left out: those of the windows for an encoder that normalises
            by itself (`Encoder.unit_range`), else the mean of the training scans' means and sds.
        parts: every scan's part, 'train', 'val' or 'test'.
        root: folder of the scans, if they were moved.
        options: batch size, device, precision and the like.
        dtype: dtype of the store; the job itself keeps float32.
        workers: processes that decode (on Ray, per task).  With 0, this process decodes, and a decoder that crashes
            ends the job.
        timeout: seconds for a scan, after which its worker is ended.
        ray: address of a Ray cluster.
        watch: receives the progress.
    """
    out = Path(out).absolute()
    root = Path(root or manifest.root)
    if not root.is_dir():
        raise UserError(f"the scans' folder {root} does not exist; give the folder where they lie now (--root FOLDER)")
    options = replace(options, threads=options.threads or _threads_of(recorded_identity(out)))
    # With Ray the workers run on other machines; and a store that exists is probably complete.
    with start_workers(workers, timeout, 0 if ray or out.exists() else len(manifest)) as pool:
        # With Ray, this process needs only the encoder's fingerprint: the devices are in other machines.
        encoder = load() if ray else load(device=options.device, precision=options.precision)
        preprocessing = fit_preprocessing(preprocessing, encoder, statistics, parts)
        identity = identity_of(manifest, encoder, preprocessing, parts, options)
        done = _completed_before(out, identity)
        if done is not None and not job_folder(out).exists():
            return done
        check_scans(manifest, parts)
        setup = Setup(load, encoder.fingerprint, torch.__version__, options, workers, timeout)
        with open_job(out, identity) as job:
            done = _completed_before(out, identity)  # another process may just have completed it
            if done is None:
                plan = _EncodingPlan(manifest, parts, options, dtype, out, identity, watch)
                with _backend(setup, encoder, pool, ray) as machine:
                    done = _run(plan, job, machine, Inputs(Decoding(read, root, options.repair), preprocessing))
            job.remove()
        return done


@dataclass(frozen=True, eq=False)
class _EncodingPlan:
    """The arguments of `encode` that every step of a job needs."""

    manifest: Manifest
    parts: Mapping[str, str] | None
    options: EncodingOptions
    dtype: torch.dtype
    out: Path
    identity: Mapping[str, Any]
    watch: Watch

    @cached_property
    def units(self) -> list[range]:
        """The scans' numbers in each unit."""
        return plan_units(self.manifest.lengths, self.options.unit)

    def rows(self, unit: int) -> list[ScanRow]:
        """The scans of a unit."""
        return _rows(self.manifest, self.units[unit])


def _run(plan: _EncodingPlan, job: EncodingJob, machine: EncodingBackend, inputs: Inputs) -> EncodingResult:
    if inputs.preprocessing.statistics is None:
        measured = _measure_training_scans(plan, job, machine, inputs)
        inputs = inputs._replace(preprocessing=inputs.preprocessing.with_statistics(measured))
    begin = time.monotonic()
    slices = _encode_units(plan, job, machine, inputs)
    seconds = time.monotonic() - begin
    store, failed, problems = _assemble(plan, job, inputs.preprocessing)
    return EncodingResult(store, failed, summarize(problems), slices, seconds)


def _threads_of(before: Mapping[str, Any] | None) -> int:
    execution = (before or {}).get("execution")
    threads = execution.get("threads") if isinstance(execution, dict) else None
    return threads if type(threads) is int and threads > 0 else torch.get_num_threads()


def fit_preprocessing(
    preprocessing: Preprocessing, encoder: Encoder, statistics: Statistics | None, parts: Mapping[str, str] | None
) -> Preprocessing:
    """The preprocessing for this encoder; its statistics stay None if the training scans must be measured first."""
    if encoder.channels != preprocessing.channels:
        raise UserError(
            f"encoder {encoder.name} takes {encoder.channels} channels, but the number of windows is "
            f"{preprocessing.channels}; give one window for each channel"
        )
    fitted = replace(preprocessing, size=encoder.size)
    if statistics is not None:
        return fitted.with_statistics(statistics)
    if encoder.unit_range:
        return fitted.to_unit_range()
    if parts is None:
        raise UserError(
            f"encoder {encoder.name} takes scans normalised with the training scans' mean and sd; name the training "
            "scans (--split FILE), or give the numbers (--normalize MEAN,SD)"
        )
    if "train" not in parts.values():
        raise UserError(
            "no scan of the split is of part 'train', so there is no mean and sd to normalise with; give another split"
        )
    return fitted


def identity_of(
    manifest: Manifest,
    encoder: Encoder,
    preprocessing: Preprocessing,
    parts: Mapping[str, str] | None,
    options: EncodingOptions,
) -> dict[str, Any]:
    """Everything that identifies a job, as in its config.json and the store's report.json."""
    split = None if parts is None else hashlib.sha256(json.dumps(sorted(parts.items())).encode()).hexdigest()
    return {
        "format": FORMAT,
        "manifest": fingerprint_manifest(manifest),
        "encoder": {"name": encoder.name, "fingerprint": encoder.fingerprint},
        "preprocessing": preprocessing.to_dict(),
        "normalized_by": "training scans" if preprocessing.statistics is None else "given statistics",
        "split": split,
        "execution": {**asdict(options), "device": torch.device(options.device).type},
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
    }


def fingerprint_manifest(manifest: Manifest) -> str:
    """SHA-256 of the scans of a manifest, whatever folder they lie in."""
    digest = hashlib.sha256()
    for start in range(0, len(manifest), UNIT):
        table = manifest.table.slice(start, UNIT).combine_chunks()
        plain = [
            column.cast(pa.string()) if pa.types.is_dictionary(column.type) else column for column in table.columns
        ]
        for batch in pa.table(plain, names=table.column_names).to_batches():
            digest.update(batch.serialize())
    return digest.hexdigest()


def _completed_before(out: Path, identity: Mapping[str, Any]) -> EncodingResult | None:
    """The result of a job that is complete already; anything else at `out` is an error, before hours of work."""
    if not out.exists() or (out.is_dir() and not any(out.iterdir())):
        return None
    before = recorded_identity(out)
    if before is None or not (out / REPORT).exists():
        raise UserError(f"{out} exists and is not a store made by nguide encode; choose another folder (-o)")
    refuse_another(out, before, identity)
    problems = read_problems(out / PROBLEMS)
    failed = read_json_as(out / REPORT, EncodingReport, AGAIN, exact=False).failed
    return EncodingResult(open_store(out), failed, summarize(problems), 0, 0.0, complete_before=True)


def check_scans(manifest: Manifest, parts: Mapping[str, str] | None) -> None:
    """Checks at the start what writing the store would reject at the end."""
    if not len(manifest):
        raise UserError("the manifest has no scan; read its problems.csv, and run nguide index again")
    if parts is not None:
        have, given = set(manifest.scan_ids), set(parts)
        for scans, problem in ((given - have, "is not in the manifest"), (have - given, "is not in the split")):
            if scans:
                raise UserError(f"scan {min(scans)!r} {problem} ({len(scans)} such scans); make the split again")
        check_patients({}, manifest.patient_ids, [parts[scan] for scan in manifest.scan_ids])
    _check_labels(manifest)
    for finding in manifest.findings[1:]:
        _check_labels(manifest.of_finding(finding.name))


def _check_labels(manifest: Manifest) -> None:
    """Checks the labels of all scans as `Bags` does, column by column: rows of a large manifest take seconds."""
    lengths, column = manifest.lengths, manifest.table["slice_labels"].combine_chunks()
    known, counts = column.is_valid().to_numpy(zero_copy_only=False), column.value_lengths().fill_null(0).to_numpy()
    for number in np.flatnonzero(known & (counts != lengths))[:1]:
        raise UserError(
            f"scan {manifest.scan_ids[number]!r}: {counts[number]} slice labels for {lengths[number]} slices; run "
            "nguide index again"
        )
    labels = np.full(lengths.sum(), UNKNOWN)
    labels[np.repeat(known, lengths)] = column.flatten().to_numpy()
    Bags(
        features=torch.zeros(len(labels), 1),
        lengths=torch.from_numpy(lengths),
        labels=torch.from_numpy(manifest.labels),
        slice_labels=torch.from_numpy(labels) if known.any() else None,
        scan_ids=tuple(manifest.scan_ids),
        patient_ids=tuple(manifest.patient_ids),
    )


def plan_units(lengths: Sequence[int] | np.ndarray, at_least: int) -> list[range]:
    """Packs consecutive scans into units of at least `at_least` slices; the last one may have fewer.

    Example:
        >>> plan_units([30, 40, 200, 10], at_least=64)
        [range(0, 2), range(2, 3), range(3, 4)]
    """
    units, start, slices = [], 0, 0
    for number, length in enumerate(lengths):
        slices += int(length)
        if slices >= at_least or number == len(lengths) - 1:
            units.append(range(start, number + 1))
            start, slices = number + 1, 0
    return units


def _rows(manifest: Manifest, numbers: range) -> list[ScanRow]:
    return list(Manifest(manifest.table.slice(numbers.start, len(numbers)), manifest.about))


def _measure_training_scans(
    plan: _EncodingPlan, job: EncodingJob, machine: EncodingBackend, inputs: Inputs
) -> Statistics:
    """The mean of the training scans' means and sds, without scans that cannot be read."""
    channels = inputs.preprocessing.channels
    known, parts, ids = job.statistics(channels), plan.parts or {}, plan.manifest.scan_ids
    training = plan.manifest.take(number for number, scan in enumerate(ids) if parts[scan] == "train")
    length_of = dict(zip(training.scan_ids, training.lengths.tolist(), strict=True))
    of = sum(length_of.values())
    if others := known.keys() - length_of.keys():
        raise UserError(
            f"{job.path} has statistics of scan {shorten(min(others))!r}, which is not a training scan; delete the "
            "folder and encode again"
        )
    slices = before = sum(length_of[scan] for scan in known)
    left = training.take(number for number, scan in enumerate(training.scan_ids) if scan not in known)
    plan.watch(EncodingProgress("statistics", slices, of, before))
    for measured in machine.measure(inputs, left):
        job.add_statistics(measured)
        known |= measured
        slices += sum(length_of[scan] for scan in measured)
        plan.watch(EncodingProgress("statistics", slices, of, before))
    usable = [one for scan in training.scan_ids if (one := known[scan]) is not None]
    if not usable:
        raise UserError(
            f"none of the {len(training)} training scans could be read, so there is no mean and sd to normalise with; "
            f"check that they lie in {inputs.decoding.root}, then delete {job.path} and encode again"
        )
    return combine_statistics(usable)


def _encode_units(plan: _EncodingPlan, job: EncodingJob, machine: EncodingBackend, inputs: Inputs) -> int:
    """Encodes the units that are not done yet; returns the number of their slices."""
    lengths, done = plan.manifest.lengths, job.units()
    sizes = [int(lengths[numbers.start : numbers.stop].sum()) for numbers in plan.units]
    finished = before = sum(sizes[number] for number in done)
    work = ((number, plan.rows(number)) for number in range(len(sizes)) if number not in done)

    def report_slices(slices: int) -> None:
        plan.watch(EncodingProgress("encoding", finished + slices, sum(sizes), before))

    report_slices(0)
    for number, unit in machine.encode(inputs, work, report_slices):
        _check_range(plan.rows(number), unit, plan.dtype)
        job.save_unit(number, unit)
        finished += sizes[number]
        report_slices(0)
    return finished - before


def _check_range(rows: Sequence[ScanRow], unit: Encoded, dtype: torch.dtype) -> None:
    """Rejects features too large for the store's dtype at once; the units so far stay for a new start."""
    if unit.features.to(dtype).isfinite().all():
        return
    for row, features in _scans_of(rows, unit):
        if not features.to(dtype).isfinite().all():
            raise UserError(
                f"scan {row.scan_id!r} has a feature of size {features.abs().max().item():g}, too large for "
                f"{dtype_name(dtype)}; run the same command with --dtype float32, which continues from here"
            )


def _scans_of(rows: Sequence[ScanRow], unit: Encoded) -> Iterator[tuple[ScanRow, torch.Tensor]]:
    """The scans of a unit that could be encoded."""
    failed, start = set(unit.failed), 0
    for row in rows:
        if row.scan_id not in failed:
            yield row, unit.features[start : start + len(row)]
            start += len(row)


@contextmanager
def _backend(setup: Setup, encoder: Encoder, pool: Pool, ray: str | None) -> Iterator[EncodingBackend]:
    if ray is None:
        yield Machine(setup, encoder, pool)
        return
    from normal_guidance.features.encoding_on_ray import connect

    with connect(ray, setup) as cluster:
        yield cluster


# ----------------------------------------------------------------------------------------------------
# The store
# ----------------------------------------------------------------------------------------------------


def _assemble(
    plan: _EncodingPlan, job: EncodingJob, preprocessing: Preprocessing
) -> tuple[FeatureStore, dict[str, int], list[Problem]]:
    """Writes the store from the units."""
    problems: list[Problem] = []
    failed: Counter[str] = Counter()
    without: set[str] = set()
    slices = 0
    for number in range(len(plan.units)):
        unit = job.unit(number)
        slices += len(unit.features)
        without.update(unit.failed)
        problems += unit.problems
        failed.update(problem.kind for problem in unit.problems if problem.action == LEFT_OUT)
    write_problems(job.path / PROBLEMS, problems)
    left_out = failed.total()
    if left_out == len(plan.manifest):
        raise UserError(
            f"none of the {len(plan.manifest)} scans could be encoded; read {job.path / PROBLEMS}, correct the causes, "
            f"delete {job.path} and encode again"
        )

    def stream() -> Iterator[tuple[str | None, Bags]]:
        for number in range(len(plan.units)):
            pairs = _scans_of(plan.rows(number), job.unit(number))
            for part, scans in groupby(pairs, lambda pair: plan.parts[pair[0].scan_id] if plan.parts else None):
                yield part, Bags.pack([_bag(row, features) for row, features in scans])

    recipe = recipe_of(plan.identity["encoder"]["fingerprint"], preprocessing, repair=plan.options.repair)
    scans = len(plan.manifest)
    report = {
        "normal_guidance": __version__,
        "recipe": recipe,
        "preprocessing": preprocessing.to_dict(),
        "inputs": describe_inputs(plan.manifest, without),
        "dtype": dtype_name(plan.dtype),
        "scans": {"manifest": scans, "encoded": scans - left_out, "failed": left_out},
        "slices": {"manifest": int(plan.manifest.lengths.sum()), "encoded": slices},
        "failed": dict(sorted(failed.items())),
        "problems": dict(sorted(summarize(problems).items())),
        "identity": plan.identity,
    }
    findings = plan.manifest.findings
    store = write_store(
        plan.out,
        stream(),
        findings=findings,
        further={row.scan_id: row.further for row in plan.manifest} if findings else None,
        provenance={name: report[name] for name in ("normal_guidance", "preprocessing", "inputs", "identity")},
        recipe=recipe,
        dtype=plan.dtype,
        files={PROBLEMS: (job.path / PROBLEMS).read_bytes(), REPORT: json.dumps(report, indent=2).encode()},
    )
    return store, dict(sorted(failed.items())), problems


def recipe_of(encoder: str, preprocessing: Preprocessing, *, repair: bool) -> str:
    """A hash of everything that turns scans into features: the encoder's fingerprint, preprocessing and repairs."""
    return hashlib.sha256(json.dumps([encoder, preprocessing.fingerprint, repair]).encode()).hexdigest()


def _bag(row: ScanRow, features: torch.Tensor) -> Bag:
    labels = None if row.slice_labels is None else torch.from_numpy(row.slice_labels.astype(np.int64))
    return Bag(features, row.label, labels, row.scan_id, row.patient_id)
