"""From scans to a feature store: `nguide encode`, on this machine or, with `ray`, on many.

Worker processes read scans; this process runs the encoder over their slices in fixed batches (`encoding_machine.py`).
Consecutive scans are packed into units, and a complete unit is saved atomically (`encoding_job.py`), so a killed job
loses only its current unit.  The store is the same byte for byte whether or not the job was killed, for any number of
workers or machines, as long as the encoder's arithmetic is the same; so the number of its threads is fixed, too.

A scan that cannot be decoded is left out of the store, whose report.json gives the reason (`lacks`).  The next start of
the same command reads only these scans, and writes the store that would have been written with them, byte for byte.
"""

from __future__ import annotations

import hashlib
import json
import math
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, closing
from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import torch

from normal_guidance import __version__
from normal_guidance.base.errors import UserError, shorten
from normal_guidance.base.files import read_json_as, sealed_json, write_json
from normal_guidance.base.system import connected, disk, peak_bytes
from normal_guidance.base.workers import TIMEOUT
from normal_guidance.core.arrays import refuse_alike
from normal_guidance.core.bags import Bag, Bags
from normal_guidance.scans.features.encoders import Encoder
from normal_guidance.scans.features.encoding_job import (
    CONFIG,
    REPORT,
    STATISTICS,
    VALUES,
    Encoded,
    EncodingJob,
    EncodingReport,
    ValuesFile,
    job_folder,
    open_job,
    read_statistics,
    recorded_identity,
    refuse_another,
    statistics_lines,
    values_json,
)
from normal_guidance.scans.features.encoding_machine import (
    LEFT_OUT,
    UNIT,
    Cluster,
    EncodingOptions,
    Inputs,
    Load,
    Machine,
    Setup,
    in_units,
    start_workers,
)
from normal_guidance.scans.features.onnx_engine import TORCH
from normal_guidance.scans.features.preprocessing import Preprocessing, Statistics, combine_statistics, describe_inputs
from normal_guidance.scans.features.store import AGAIN, LACKING, FeatureStore, dtype_name, open_store, write_store
from normal_guidance.scans.features.windows import Decoding, Reader, word_of
from normal_guidance.scans.index.manifest import Manifest, ScanRow, Values
from normal_guidance.scans.index.problems import Problem, read_problems, summarize, write_problems
from normal_guidance.scans.index.splits import refuse_other_scans, refuse_overlap
from normal_guidance.show.progress_bar import Shown

PROBLEMS = "problems.csv"


@dataclass(frozen=True)
class EncodingProgress:
    """How far a job is: slices of finished units and, on this machine, of finished batches."""

    stage: str
    slices: int
    of: int
    begun_with: int  # slices that an earlier start of the job had done

    def shown(self) -> Shown:
        """The same as a bar shows it."""
        share = self.slices / self.of if self.of else 0.0
        return Shown(self.stage, share, f"{self.slices:,} of {self.of:,} slices", self.of)


@dataclass(frozen=True, eq=False)
class EncodingPlan:
    """What is encoded and how; `inputs` have no mean and sd until the training scans are measured."""

    manifest: Manifest
    parts: Mapping[str, str] | None
    inputs: Inputs
    options: EncodingOptions
    dtype: torch.dtype
    out: Path
    identity: dict[str, Any]
    watch: Callable[[EncodingProgress], object]

    @cached_property
    def units(self) -> list[list[int]]:
        """The scans' numbers in each unit."""
        lengths = self.manifest.lengths.tolist()
        return list(in_units(range(len(lengths)), lengths.__getitem__, self.options.unit))

    def rows(self, unit: int) -> list[ScanRow]:
        numbers = self.units[unit]
        return list(Manifest(self.manifest.table.slice(numbers[0], len(numbers)), self.manifest.about))

    @property
    def recipe(self) -> str:
        """A hash of everything that turns scans into features: the encoder's fingerprint, preprocessing and repairs."""
        encoder = self.identity["encoder"]["fingerprint"]
        return _sha256([encoder, self.inputs.preprocessing.fingerprint, self.options.repair])


def _sha256(content: Any) -> str:
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()


MEASURED = 64  # scans whose mean and sd normalise all, where no split names training scans: more hardly change them


@dataclass(frozen=True, eq=False)
class EncodingResult:
    """The result of a job; `failed` counts the scans that are not in the store, `problems` all problems, by kind."""

    store: FeatureStore
    failed: Mapping[str, int]
    problems: Mapping[str, int]
    slices: int  # slices that this start encoded, in `seconds`
    seconds: float
    complete_before: bool = False  # whether the store was there already, and this start could add nothing


@dataclass(frozen=True, eq=False)
class EncodingTask:
    """What to encode and how; the encoder's size replaces that of `preprocessing`, and the job keeps float32."""

    manifest: Manifest
    load: Load
    preprocessing: Preprocessing
    read: Reader
    # None: those of the windows for an encoder that normalises by itself (`Encoder.unit_range`), else the mean of the
    # means and sds of the training scans or, without `parts`, of `MEASURED` scans.
    statistics: Statistics | None = None
    parts: Mapping[str, str] | None = None
    root: Path | None = None
    options: EncodingOptions = field(default_factory=EncodingOptions)
    dtype: torch.dtype = torch.float32  # of the store
    workers: int = 0  # decode (on Ray, per task); with 0, this process does, and a decoder that crashes ends the job
    timeout: float = TIMEOUT  # seconds for a scan, after which its worker is ended


def encode(
    task: EncodingTask,
    out: str | Path,
    *,
    ray: str | None = None,
    watch: Callable[[EncodingProgress], object] = lambda progress: None,
) -> EncodingResult:
    """Encodes the scans of a manifest into a new store; the same call continues a job that was killed.

    It also tries again the scans that an existing store lacks.
    """
    out, root, manifest, parts = Path(out).absolute(), _root_of(task), task.manifest, task.parts
    options = replace(task.options, threads=task.options.threads or _threads_of(recorded_identity(out)))
    # With Ray the workers run on other machines; and a store that exists is probably complete.
    with start_workers(task.workers, task.timeout, 0 if ray or out.exists() else len(manifest)) as pool:
        # With Ray, this process needs only the encoder's fingerprint: the devices are in other machines.
        encoder = task.load() if ray else task.load(device=options.device, precision=options.precision)
        preprocessing = _fit_preprocessing(task, encoder)
        by = "some scans" if parts is None else "training scans"
        if preprocessing.statistics is not None:
            by = "given statistics" if task.statistics else "the encoder's range"
        identity = _identity_of(task, encoder, preprocessing, by, options)
        done = _completed_before(out, identity)
        if done is not None and len(done.store) == len(manifest) and not job_folder(out).exists():
            return done
        check_scans(manifest, parts)
        engine = identity["execution"]["engine"]
        setup = Setup(task.load, encoder.fingerprint, engine, torch.__version__, options, task.workers, task.timeout)
        with open_job(out, identity) as job, ExitStack() as stack:
            done = _completed_before(out, identity)  # another process may just have completed it
            if done is None or len(done.store) < len(manifest):
                inputs = Inputs(Decoding(task.read, root, options.repair), preprocessing)
                plan = EncodingPlan(manifest, parts, inputs, options, task.dtype, out, identity, watch)
                machine: Machine | Cluster = Machine(setup, encoder, pool)
                if ray is not None:
                    machine = Cluster(stack.enter_context(connected(ray)), setup)
                resumed = done is not None or job.begun  # what an earlier start could not read may be there now
                if done is None:
                    normalised = _normalised(plan, job, machine)
                    encoded = _encode_units(normalised, job, machine, range(len(plan.units)))
                    done = _assemble(normalised, job, job.unit, encoded)
                if resumed and len(done.store) < len(manifest):
                    done = _take_up(plan, job, machine, done)
            job.remove()
        return done


def _root_of(task: EncodingTask) -> Path:
    root = Path(task.root or task.manifest.root)
    if not root.is_dir():
        raise UserError(f"the scans' folder {root} does not exist; give the folder where they lie now (--root FOLDER)")
    return root


def _take_up(plan: EncodingPlan, job: EncodingJob, machine: Machine | Cluster, done: EncodingResult) -> EncodingResult:
    """Tries again the scans that a store lacks; if all of them fail as before, the store stays as it is."""
    # A new training scan may change what to normalise with; all scans are then encoded again.
    store, again, ids = done.store, job.take_up(), plan.manifest.scan_ids
    if store.dtype != plan.dtype:
        raise UserError(
            f"{plan.out} lacks {len(ids) - len(store)} scans and holds {dtype_name(store.dtype)}; encode them with "
            f"--dtype {dtype_name(store.dtype)}, or give another folder (-o)"
        )
    if not again.begun:
        known, _ = read_statistics(store.folder, plan.inputs.preprocessing.channels)
        again.add_statistics({scan: measured for scan, measured in known.items() if measured is not None})
    plan = _normalised(plan, again, machine)
    earlier = EarlierStore(plan, store) if plan.recipe == store.recipe else None
    held = set(store.scan_ids) if earlier else set()
    units = {number for number, scans in enumerate(plan.units) if not held.issuperset(ids[scan] for scan in scans)}
    encoded = _encode_units(plan, again, machine, sorted(units), earlier)

    def reasons(unit: Encoded) -> tuple[set[tuple[str, str]], list[str]]:
        return {(problem.scan_id, problem.kind) for problem in unit.problems}, unit.failed

    if earlier and all(reasons(again.unit(number)) == reasons(earlier.unit(number)) for number in units):
        return done

    def unit(number: int) -> Encoded:
        return again.unit(number) if earlier is None or number in units else earlier.unit(number)

    return _assemble(plan, again, unit, encoded, job.before)


class EarlierStore:
    """The units of a store that lacks scans."""

    def __init__(self, plan: EncodingPlan, store: FeatureStore) -> None:
        self.plan, self.store = plan, store
        self._number = {scan: number for number, scan in enumerate(store.scan_ids)}
        self._problems: dict[str, list[Problem]] = defaultdict(list)
        for problem in read_problems(store.folder / PROBLEMS):
            self._problems[problem.scan_id].append(problem)
        self._values = read_json_as(store.folder / VALUES, ValuesFile, AGAIN).values

    def unit(self, number: int) -> Encoded:
        """The scans of a unit that the store holds; the others failed."""
        ids = [row.scan_id for row in self.plan.rows(number)]
        held = torch.tensor([self._number[scan] for scan in ids if scan in self._number], dtype=torch.int64)
        return Encoded(
            self.store.rows(held).float(),
            [scan for scan in ids if scan not in self._number],
            [problem for scan in ids for problem in self._problems[scan]],
            {scan: self._values[scan] for scan in ids if scan in self._values},
        )


def _merged(rows: Sequence[ScanRow], before: Encoded, now: Encoded) -> Encoded:
    features = {row.scan_id: of_scan for unit in (now, before) for row, of_scan in _scans_of(rows, unit)}
    good = [features[row.scan_id] for row in rows if row.scan_id in features]
    return Encoded(
        torch.cat(good) if good else now.features[:0],
        [row.scan_id for row in rows if row.scan_id not in features],
        [problem for problem in before.problems if problem.scan_id not in before.failed]
        + [problem for problem in now.problems if problem.scan_id in before.failed],
        {**before.values, **now.values},
    )


def _scans_of(rows: Sequence[ScanRow], unit: Encoded) -> Iterator[tuple[ScanRow, torch.Tensor]]:
    """The scans of a unit that could be encoded."""
    failed, start = set(unit.failed), 0
    for row in rows:
        if row.scan_id not in failed:
            yield row, unit.features[start : start + len(row)]
            start += len(row)


def _normalised(plan: EncodingPlan, job: EncodingJob, machine: Machine | Cluster) -> EncodingPlan:
    """The plan with mean and sd: if there are no others, the means over the training scans that can be read."""
    preprocessing = plan.inputs.preprocessing
    if preprocessing.statistics is not None:
        return plan
    known, training = job.statistics(preprocessing.channels), to_measure(plan.manifest, plan.parts)
    length_of = dict(zip(training.scan_ids, training.lengths.tolist(), strict=True))
    of = sum(length_of.values())
    if others := known.keys() - length_of.keys():
        raise UserError(
            f"{job.path} has statistics of scan {shorten(min(others))!r}, which is not one to measure; delete the "
            "folder and encode again"
        )
    slices = before = sum(length_of[scan] for scan in known)
    left = training.take(number for number, scan in enumerate(training.scan_ids) if scan not in known)
    plan.watch(EncodingProgress("statistics", slices, of, before))
    for measured in machine.measure(plan.inputs, left):
        job.add_statistics(measured)
        known |= measured
        slices += sum(length_of[scan] for scan in measured)
        plan.watch(EncodingProgress("statistics", slices, of, before))
    usable = [statistics for scan in training.scan_ids if (statistics := known[scan]) is not None]
    if not usable:
        job.forget()
        raise UserError(
            f"none of {len(training)} scans to measure could be read, so there is no mean and sd to normalise with; "
            f"check that they lie in {plan.inputs.decoding.root}, and encode again"
        )
    fitted = preprocessing.with_statistics(combine_statistics(usable))
    return replace(plan, inputs=plan.inputs._replace(preprocessing=fitted))


def to_measure(manifest: Manifest, parts: Mapping[str, str] | None) -> Manifest:
    """The scans whose mean and sd normalise all: those of the part train or, without parts, some drawn by their ids."""
    ids = manifest.scan_ids
    if parts is not None:
        return manifest.take(number for number, scan in enumerate(ids) if parts[scan] == "train")
    drawn = sorted(range(len(ids)), key=lambda number: hashlib.sha256(ids[number].encode()).digest())
    return manifest.take(sorted(drawn[:MEASURED]))


def _encode_units(
    plan: EncodingPlan,
    job: EncodingJob,
    machine: Machine | Cluster,
    units: Sequence[int],
    earlier: EarlierStore | None = None,
) -> tuple[int, float]:
    """Encodes the units that are not done yet, of them only what `earlier` lacks; returns their slices and seconds."""
    begin, inputs = time.monotonic(), plan.inputs
    held = set(earlier.store.scan_ids) if earlier else set()
    sizes = {number: sum(len(row) for row in plan.rows(number) if row.scan_id not in held) for number in units}
    done = job.units() & sizes.keys()
    finished = before = sum(sizes[number] for number in done)
    work = [number for number in units if number not in done]
    if held:
        near = frozenset(row.scan_id for number in work for row in plan.rows(number) if row.scan_id in held)
        inputs = inputs._replace(decoding=replace(inputs.decoding, held=near))

    def report_slices(slices: int) -> None:
        stage, more = ("taking up", 0) if earlier else ("encoding", slices)
        plan.watch(EncodingProgress(stage, finished + more, sum(sizes.values()), before))

    report_slices(0)
    for number, encoded in machine.encode(inputs, ((number, plan.rows(number)) for number in work), report_slices):
        if isinstance(machine, Machine):
            _record_engine(plan, job, machine.encoder.engine, earlier)
        rows = plan.rows(number)
        if earlier is None and len(encoded.features) > 1 and not job.units():  # before other scans are encoded
            _refuse_destroyed(plan, job, encoded)
        unit = _merged(rows, earlier.unit(number), encoded) if earlier else encoded
        for row, features in _scans_of(rows, unit):  # at once; the units so far stay for a new start
            if not features.to(plan.dtype).isfinite().all():
                raise UserError(
                    f"scan {row.scan_id!r} has a feature of size {features.abs().max().item():g}, too large for "
                    f"{dtype_name(plan.dtype)}; run the same command with --dtype float32, which continues from here"
                )
        job.save_unit(number, unit)
        finished += sizes[number]
        report_slices(0)
    return finished - before, time.monotonic() - begin


def _refuse_destroyed(plan: EncodingPlan, job: EncodingJob, unit: Encoded) -> None:
    """Refuses features that a window or a normalisation which does not fit the scans' values has made alike."""
    preprocessing, values = plan.inputs.preprocessing, unit.values.values()
    low, high = min(scan.low for scan in values), max(scan.high for scan in values)
    windows = ",".join(map(word_of, preprocessing.windows))
    try:
        if plan.identity["normalized_by"] == "given statistics":
            preprocessing.refuse_misfit(seen=(low, high))
        refuse_alike(
            *torch.std_mean(unit.features.double(), 0, correction=0),
            f"features of the first {len(values)} scans",
            f"these scans' values lie from {low:g} to {high:g}, the window is {windows}: give another (--window)",
        )
    except UserError:
        job.remove()  # the next start may have other options
        raise


def _assemble(
    plan: EncodingPlan,
    job: EncodingJob,
    unit: Callable[[int], Encoded],
    encoded: tuple[int, float],
    instead_of: Path | None = None,
) -> EncodingResult:
    """Writes the store from units; an earlier one is moved to `instead_of` first."""
    manifest, preprocessing = plan.manifest, plan.inputs.preprocessing
    problems: list[Problem] = []
    without: set[str] = set()
    values: dict[str, Values] = {}
    slices = 0
    for number in range(len(plan.units)):
        made = unit(number)
        slices += len(made.features)
        without.update(made.failed)
        problems += made.problems
        values |= made.values
    left_out = [problem for problem in problems if problem.action == LEFT_OUT]
    failed = dict(sorted(Counter(problem.kind for problem in left_out).items()))
    write_problems(job.path / PROBLEMS, problems)
    if len(without) == len(manifest):
        job.forget()
        raise UserError(
            f"none of the {len(manifest)} scans could be encoded; read {job.path / PROBLEMS}, correct the causes "
            "and encode again"
        )

    def stream() -> Iterator[tuple[str | None, Bags]]:
        for number in range(len(plan.units)):
            pairs = _scans_of(plan.rows(number), unit(number))
            for part, scans in groupby(pairs, lambda pair: plan.parts[pair[0].scan_id] if plan.parts else None):
                bags = []
                for row, features in scans:
                    labels = None if row.slice_labels is None else torch.from_numpy(row.slice_labels.astype(np.int64))
                    bags.append(Bag(features, row.label, labels, row.scan_id, row.patient_id))
                yield part, Bags.pack(bags)

    lacks = {problem.scan_id: f"{problem.kind}: {shorten(problem.detail)}" for problem in left_out}
    report: dict[str, Any] = {
        "normal_guidance": __version__,
        "recipe": plan.recipe,
        "preprocessing": preprocessing.to_dict(),
        "inputs": describe_inputs(manifest, without, list(values.values())),
        "dtype": dtype_name(plan.dtype),
        "scans": {"manifest": len(manifest), "encoded": len(manifest) - len(without), "failed": len(without)},
        "slices": {"manifest": int(manifest.lengths.sum()), "encoded": slices},
        "failed": failed,
        **({"lacks": lacks} if lacks else {}),
        "problems": dict(sorted(summarize(problems).items())),
        "identity": plan.identity,
    }
    files = {PROBLEMS: (job.path / PROBLEMS).read_bytes(), REPORT: sealed_json(report)}
    provenance = {name: report[name] for name in ("normal_guidance", "preprocessing", "inputs", "identity")}
    if without:  # so that the next start measures and encodes only what is missing
        provenance[LACKING] = len(without)
        files[VALUES] = sealed_json({"values": values_json(values)})
        if plan.identity["normalized_by"] in ("training scans", "some scans"):
            files[STATISTICS] = statistics_lines(dict(sorted(job.statistics(preprocessing.channels).items())))
    store = write_store(
        plan.out,
        stream(),
        findings=manifest.findings,
        further={row.scan_id: row.further for row in manifest} if manifest.findings else None,
        provenance=provenance,
        recipe=plan.recipe,
        dtype=plan.dtype,
        files=files,
        instead_of=instead_of,
    )
    return EncodingResult(store, failed, summarize(problems), *encoded)


def _record_engine(plan: EncodingPlan, job: EncodingJob, engine: str, earlier: EarlierStore | None) -> None:
    """Records that the first batch has shown torch to be needed; features of two engines are not mixed."""
    execution = plan.identity["execution"]
    if engine == execution["engine"]:
        return
    if earlier or job.units():
        refuse_another(job.path, plan.identity, {**plan.identity, "execution": {**execution, "engine": engine}})
    execution["engine"] = engine
    write_json(job.path / CONFIG, plan.identity)


def _threads_of(before: Mapping[str, Any] | None) -> int:
    execution = (before or {}).get("execution")
    threads = execution.get("threads") if isinstance(execution, dict) else None
    return threads if type(threads) is int and threads > 0 else torch.get_num_threads()


def _fit_preprocessing(task: EncodingTask, encoder: Encoder) -> Preprocessing:
    """The preprocessing for this encoder; its statistics stay None if the training scans must be measured first."""
    given = task.preprocessing
    if encoder.channels != given.channels:
        raise UserError(
            f"encoder {encoder.name} takes {encoder.channels} channels, but the number of windows is "
            f"{given.channels}; give one window for each channel"
        )
    fitted = replace(given, size=encoder.size)
    if task.statistics is not None:
        fitted = fitted.with_statistics(task.statistics)
        fitted.refuse_misfit()
        return fitted
    if encoder.unit_range:
        return fitted.to_unit_range()
    if task.parts is not None and "train" not in task.parts.values():
        raise UserError("no scan of the split is of part 'train', so mean and sd are unknown; give another split")
    return fitted


def _identity_of(
    task: EncodingTask, encoder: Encoder, preprocessing: Preprocessing, by: str, options: EncodingOptions
) -> dict[str, Any]:
    """Everything that identifies a job, as in its config.json and the store's report.json."""
    # With Ray, the device is of other machines than this one, which has loaded the encoder.
    device = torch.device(options.device).type
    execution = {**asdict(options), "device": device, "engine": encoder.engine if device == "cpu" else TORCH}
    return {
        "manifest": fingerprint_manifest(task.manifest),
        "encoder": {"name": encoder.name, "fingerprint": encoder.fingerprint},
        "preprocessing": preprocessing.to_dict(),
        "normalized_by": by,
        "split": None if task.parts is None else _sha256(sorted(task.parts.items())),
        "execution": execution,
        "versions": {"torch": torch.__version__, "numpy": np.__version__},
    }


def fingerprint_manifest(manifest: Manifest) -> str:
    """SHA-256 of the scans of a manifest, whatever folder they lie in."""
    digest = hashlib.sha256()
    for start in range(0, len(manifest), UNIT):
        table = manifest.table.slice(start, UNIT).combine_chunks()
        plain = [array.cast(pa.string()) if pa.types.is_dictionary(array.type) else array for array in table.columns]
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
    problems = summarize(read_problems(out / PROBLEMS))
    failed = read_json_as(out / REPORT, EncodingReport, AGAIN, exact=False).failed
    return EncodingResult(open_store(out), failed, problems, 0, 0.0, complete_before=True)


def check_scans(manifest: Manifest, parts: Mapping[str, str] | None) -> None:
    """Checks at the start what writing the store would reject at the end."""
    if not len(manifest):
        raise UserError("the manifest has no scan; read its problems.csv, and run nguide index again")
    if parts is not None:
        refuse_other_scans(parts, manifest.scan_ids, "manifest")
        refuse_overlap(manifest.patient_ids, (parts[scan] for scan in manifest.scan_ids), "patient")
    for of_finding in (manifest, *(manifest.of_finding(finding.name) for finding in manifest.findings[1:])):
        of_finding.without_features()  # which checks the labels


# What encoding a manifest would take: `nguide encode --dry-run` reads and encodes a few batches and writes nothing.

BATCHES, SECONDS = 32, 10.0
"""The measurement ends after so many batches, or so many seconds after the first."""


@dataclass(frozen=True)
class EncodingEstimate:
    """What a job would take on this machine; the scans that were encoded to measure it, and why some failed."""

    scans: int
    slices: int
    batches: int
    batch_size: int
    device: str
    device_bytes: int  # most memory that the measurement took: on CUDA of the card, else of this process
    store_bytes: int
    job_bytes: int  # what the job needs besides, until the store is complete
    free_bytes: int
    measured_scans: int
    measured_slices: int
    failed: Mapping[str, str]
    slices_per_s: float
    first_batch_s: float  # seconds from the start to the first encoded batch
    statistics_s: float  # seconds for mean and sd of the training scans
    total_s: float


def estimate_encoding(task: EncodingTask, out: str | Path) -> EncodingEstimate:
    """Estimates what `encode` would take of a task, from scans drawn with the same draws every time."""
    begin, root, manifest, options = time.monotonic(), _root_of(task), task.manifest, task.options
    check_scans(manifest, task.parts)
    rows = _draw(manifest, BATCHES * options.batch_size)
    with start_workers(task.workers, task.timeout, len(rows)) as pool:
        encoder = task.load(device=options.device, precision=options.precision)
        fitted = _fit_preprocessing(task, encoder)
        inputs = Inputs(Decoding(task.read, root, options.repair), fitted)
        same = (encoder.fingerprint, encoder.engine, torch.__version__)
        setup = Setup(task.load, *same, options, task.workers, task.timeout)
        machine, starting = Machine(setup, encoder, pool), time.monotonic() - begin
        to_normalise = 0.0
        if fitted.statistics is None:
            measured, rate = _measure(machine, inputs, next(in_units(rows, len, 4 * options.batch_size)))
            inputs = inputs._replace(preprocessing=fitted.with_statistics(measured))
            to_normalise = float(to_measure(manifest, task.parts).lengths.sum()) / rate
        scans, measured_slices, failed, first_batch, rate = _try(machine, inputs, rows, options.batch_size)
    if len(failed) == scans:
        scan, reason = next(iter(failed.items()))
        raise UserError(
            f"none of {scans} scans could be encoded, for instance {scan!r} ({reason}); check that they lie in {root}, "
            "or give the folder where they lie now (--root FOLDER)"
        )
    slices = int(manifest.lengths.sum())
    units = in_units(manifest.lengths.tolist(), int, options.unit)
    first_batch += starting
    return EncodingEstimate(
        scans=len(manifest),
        slices=slices,
        batches=sum(math.ceil(sum(unit) / options.batch_size) for unit in units),
        batch_size=options.batch_size,
        device=options.device,
        device_bytes=peak_bytes(options.device),
        store_bytes=slices * encoder.width * task.dtype.itemsize,
        job_bytes=slices * encoder.width * torch.float32.itemsize,
        free_bytes=disk(Path(out))[1],
        measured_scans=scans,
        measured_slices=measured_slices,
        failed=failed,
        slices_per_s=rate,
        first_batch_s=first_batch,
        statistics_s=to_normalise,
        total_s=first_batch + to_normalise + slices / rate,
    )


def _draw(manifest: Manifest, slices: int) -> list[ScanRow]:
    """Scans of at least so many slices in all, from anywhere in the manifest."""
    order = np.random.default_rng(0).permutation(len(manifest))
    return next(in_units((manifest[int(number)] for number in order), len, slices))


def _measure(machine: Machine, inputs: Inputs, rows: list[ScanRow]) -> tuple[Statistics, float]:
    begin = time.monotonic()
    measured = [statistics for scan in machine.measure(inputs, rows) for statistics in scan.values() if statistics]
    if not measured:
        raise UserError(
            f"none of {len(rows)} scans could be read, for instance {rows[0].scan_id!r}, so there is no mean and sd to "
            f"normalise with; check that they lie in {inputs.decoding.root}"
        )
    return combine_statistics(measured), sum(map(len, rows)) / (time.monotonic() - begin)


def _try(
    machine: Machine, inputs: Inputs, rows: list[ScanRow], batch_size: int
) -> tuple[int, int, dict[str, str], float, float]:
    """Encodes scans until the speed is known: scans, slices, why scans failed, s to the first batch, slices per s."""
    units = list(in_units(rows, len, batch_size))
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
    return scans, slices, failed, first - begin, rate
