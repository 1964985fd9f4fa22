"""Runs the encoder over scans, on this machine (`Machine`) or on a Ray cluster (`Cluster`).

Worker processes read scans (`windows.py`).  A thread of this process copies them to the encoder's device and
preprocesses them there, on a card in a stream of its own, while the encoder runs.

The features of a unit depend on its scans alone: a batch never holds slices of two units, and a scan that cannot be
decoded leaves zeros in its place, so that the others' bits do not change.  On a cluster each unit is a task, which Ray
runs again elsewhere if a machine dies; every machine must have the same encoder and torch, room for the same number of
threads, and see the scans under the same path.
"""

from __future__ import annotations

import socket
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import RETRIES, Connection
from normal_guidance.base.workers import Failure, Pool, in_background
from normal_guidance.scans.features.encoders import Encoder, Precision
from normal_guidance.scans.features.encoding_job import Encoded
from normal_guidance.scans.features.preprocessing import Preprocessing, Statistics, scan_statistics
from normal_guidance.scans.features.windows import Decoding, Pixels, cut
from normal_guidance.scans.index.manifest import ScanRow, Values, values_of
from normal_guidance.scans.index.problems import Problem

UNIT, UNIT_ON_CUDA = 1024, 8192
"""Fewest slices of a unit: a killed job loses its unfinished units, and saving one costs little in comparison.  On a
card that is a second or two; the last batch of a unit is smaller than the others, so units should not be small."""

AHEAD_BYTES = 2**31  # most memory for slices that wait for the encoder; one scan alone may take more

LEFT_OUT = "left out of the store"  # the action, in problems.csv, for a scan that cannot be encoded

Load = Callable[..., Encoder]
"""Loads the encoder, from `device` and `precision`; on Ray it is pickled, so it must be a module's function."""

Units = Iterable[tuple[int, list[ScanRow]]]  # numbered units: consecutive scans that are encoded and saved together


@dataclass(frozen=True)
class EncodingOptions:
    """How scans are encoded; a job that was begun with other options is an error."""

    repair: bool = True
    batch_size: int = 64
    device: str = "cpu"
    precision: Precision = "float32"
    threads: int | None = None
    """Of the encoder on the CPU, because sums depend on them; None: those the job was begun with, or torch's."""
    unit: int = 0  # fewest slices of a unit; 0 stands for the device's own number

    def __post_init__(self) -> None:
        if not self.unit:
            object.__setattr__(self, "unit", UNIT_ON_CUDA if self.device.startswith("cuda") else UNIT)


class Inputs(NamedTuple):
    decoding: Decoding  # runs in the workers
    preprocessing: Preprocessing  # runs on the encoder's device, except for the field, which the workers cut out


@dataclass(frozen=True)
class Setup:
    """Everything that a process needs to encode, on any machine, which may have other weights or another torch."""

    load: Load
    fingerprint: str
    engine: str
    torch: str
    options: EncodingOptions
    workers: int
    timeout: float


Item = TypeVar("Item")
Result = TypeVar("Result")


def in_units(items: Iterable[Item], slices_of: Callable[[Item], int], at_least: int) -> Iterator[list[Item]]:
    """Packs consecutive items into units of at least so many slices; the last one may have fewer."""
    unit: list[Item] = []
    slices = 0
    for item in items:
        unit.append(item)
        slices += slices_of(item)
        if slices >= at_least:
            yield unit
            unit, slices = [], 0
    if unit:
        yield unit


def in_threads(function: Callable[[Item], Result], items: Iterable[Item], threads: int) -> Iterator[Result]:
    """The function's result for each item, in their order; `threads` of them are made at a time."""
    begun: deque[Future[Result]] = deque()
    with ThreadPoolExecutor(threads) as pool:
        for item in items:
            begun.append(pool.submit(function, item))
            if len(begun) > threads:
                yield begun.popleft().result()
        while begun:
            yield begun.popleft().result()


def start_workers(workers: int, timeout: float, scans: int) -> Pool:
    """Starts worker processes, which import what reading needs, while the encoder is loaded: both take seconds."""
    pool = Pool(workers, timeout)
    pool.start(
        scans, (Decoding.__module__, "normal_guidance.scans.index.volumes", "normal_guidance.scans.index.dicom_slices")
    )
    return pool


class Machine:
    def __init__(self, setup: Setup, encoder: Encoder, pool: Pool) -> None:
        self.setup, self.encoder, self.pool = setup, encoder, pool

    def measure(self, inputs: Inputs, scans: Iterable[ScanRow]) -> Iterator[dict[str, Statistics | None]]:
        """Mean and sd of scans, one at a time; None for those that cannot be read."""
        images: list[Tensor] = []
        for scan, _, piece, outcome in _prepared(self.pool, inputs, self.encoder.device, scans):
            images += [] if piece is None else [piece]
            if outcome is not None:
                good = not isinstance(outcome, Failure)
                yield {scan: scan_statistics(torch.cat(images)) if good else None}
                images = []

    def encode(
        self, inputs: Inputs, units: Units, report_slices: Callable[[int], object] = lambda slices: None
    ) -> Generator[tuple[int, Encoded], None, None]:
        """Encodes numbered units, one after the other; `report_slices` receives the slices done of the current one."""
        device, size = self.encoder.device, self.setup.options.batch_size
        items = in_background(_in_own_stream(_batches(self.pool, inputs, device, units, size), device), depth=4)
        threads_before = torch.get_num_threads()
        begun: deque[_Begun | _UnitEnd] = deque()
        features: list[Tensor] = []
        # A card is given batches ahead, so that it also computes while a unit is saved.
        slices, waiting, ahead = 0, 0, 3 if device.startswith("cuda") else 0
        torch.set_num_threads(self.setup.options.threads or threads_before)
        try:
            for item in chain(items, [None]):
                if isinstance(item, _ImageBatch):
                    begun.append(self._begin(item))
                    waiting += 1
                elif item is not None:
                    begun.append(item)
                while begun and (item is None or waiting > ahead or isinstance(begun[0], _UnitEnd)):
                    first = begun.popleft()
                    if isinstance(first, _UnitEnd):
                        yield first.number, _encoded_unit(first, torch.cat(features))
                        features, slices = [], 0
                    else:
                        host, done = first
                        if done is not None:
                            done.synchronize()
                        features.append(host)
                        waiting -= 1
                        slices += len(host)
                        report_slices(slices)
        except BaseException:
            self.pool.stop()
            raise
        finally:
            items.close()
            torch.set_num_threads(threads_before)

    def _begin(self, batch: _ImageBatch) -> _Begun:
        """Gives a batch to the encoder, and begins to copy its features to this process."""
        if batch.images is None:
            return torch.zeros(batch.slices, self.encoder.width), None
        if batch.ready is not None:
            stream = torch.cuda.current_stream(batch.images.device)
            stream.wait_event(batch.ready)
            batch.images.record_stream(stream)
        features = self.encoder.begin(batch.images)
        if not features.is_cuda:
            return features, None
        # A plain copy would wait for all that the card was given since.
        host = torch.empty(features.shape, pin_memory=True)
        host.copy_(features, non_blocking=True)
        return host, torch.cuda.current_stream(features.device).record_event()


class _ImageBatch(NamedTuple):
    """Images for the encoder, which a stream of their own may still prepare."""

    slices: int
    images: Tensor | None  # None if all slices are of scans that are left out
    ready: torch.cuda.Event | None = None


_Begun = tuple[Tensor, torch.cuda.Event | None]
"""Features of a batch on the CPU, and the event after which a card has computed them."""


class _Decoded(NamedTuple):
    """What is known of a scan beside its slices: its problems, and samples of its values, one for each piece."""

    problems: list[Problem]
    samples: list[np.ndarray]


@dataclass(frozen=True, eq=False)
class _UnitEnd:
    """Marks the end of a unit's batches; for each scan what is known of it, or why it could not be decoded."""

    number: int
    rows: list[ScanRow]
    outcomes: list[_Decoded | Failure]


def _in_own_stream(items: Iterator[_ImageBatch | _UnitEnd], device: str) -> Iterator[_ImageBatch | _UnitEnd]:
    """The items, made on a card in a stream beside the encoder's; for a thread of their own."""
    if torch.device(device).type != "cuda":
        yield from items
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for item in items:
            if isinstance(item, _ImageBatch) and item.images is not None:
                item = item._replace(ready=stream.record_event())
            yield item


def _batches(
    pool: Pool, inputs: Inputs, device: str, units: Units, batch_size: int
) -> Iterator[_ImageBatch | _UnitEnd]:
    """The batches of each unit, which its scans fill one after the other (zeros where unread), then its `_UnitEnd`."""
    waiting: deque[tuple[int, list[ScanRow]]] = deque()

    def scans() -> Iterator[ScanRow]:
        for number, rows in units:
            waiting.append((number, rows))
            yield from rows

    size = inputs.preprocessing.size
    shape, filled, blank = (batch_size, inputs.preprocessing.channels, size, size), 0, True
    batch = torch.empty(shape, device=device)
    outcomes: list[_Decoded | Failure] = []
    for _, slices, images, outcome in _prepared(pool, inputs, device, scans()):
        outcomes += [] if outcome is None else [outcome]
        unit_ends = len(outcomes) == len(waiting[0][1])
        start = 0
        while start < slices:
            take = min(slices - start, batch_size - filled)
            batch[filled : filled + take] = 0.0 if images is None else images[start : start + take]
            blank = blank and images is None
            filled, start = filled + take, start + take
            if filled == batch_size or (unit_ends and start == slices):
                yield _ImageBatch(filled, None if blank else batch[:filled])
                batch, filled, blank = torch.empty(shape, device=device), 0, True
        if unit_ends:
            yield _UnitEnd(*waiting.popleft(), outcomes)
            outcomes = []


def _prepared(
    pool: Pool, inputs: Inputs, device: str, scans: Iterable[ScanRow]
) -> Iterator[tuple[str, int, Tensor | None, _Decoded | Failure | None]]:
    """Of each piece the scan, the slices, and images if they were read; with a scan's last, what is known of it."""
    waiting: deque[tuple[str, int, bool]] = deque()
    # The workers cut the field out, so that less is sent, and measure percentiles; the other steps are left.
    whole = inputs.preprocessing.has_percentiles
    windows = inputs.preprocessing.windows if whole else ()
    decoding = replace(inputs.decoding, field=inputs.preprocessing.field, windows=windows)
    preprocessing = replace(inputs.preprocessing, field=None)

    def draw() -> Iterator[ScanRow]:
        for row in scans:
            pieces = cut(row, decoding.field, whole=whole)
            for piece in pieces:
                waiting.append((row.scan_id, len(piece), piece is pieces[-1]))
                yield piece

    def as_float32(row: ScanRow) -> int:
        return 4 * len(row) * row.rows * row.columns

    outcome: _Decoded | Failure = _Decoded([], [])
    read = pool.map(decoding.pixels, draw(), size=as_float32, ahead=AHEAD_BYTES)
    pinned = torch.device(device).type == "cuda"
    copy = partial(_on_host, pinned=pinned)
    # Three threads: what workers share arrives page by page, 4 GB/s in one.
    for result in in_threads(copy, read, 3) if pinned else map(copy, read):
        (scan, slices, is_last), images = waiting.popleft(), None
        if isinstance(result, Failure):
            outcome = outcome if isinstance(outcome, Failure) else result
        else:
            hu, pixels, problems = result
            images = preprocessing.apply(hu.to(device, non_blocking=True), pixels.lowest, ranges=pixels.ranges)
            if isinstance(outcome, _Decoded):
                outcome = _Decoded(outcome.problems + problems, [*outcome.samples, pixels.sample])
        yield scan, slices, images, outcome if is_last else None
        if is_last:
            outcome = _Decoded([], [])


def _on_host(
    read: tuple[Pixels, list[Problem]] | Failure, *, pinned: bool
) -> tuple[Tensor, Pixels, list[Problem]] | Failure:
    """A scan with its slices as a tensor; in pinned memory, a copy to the card runs beside this process."""
    if isinstance(read, Failure):
        return read
    pixels, problems = read
    slices = torch.from_numpy(pixels.hu)
    if pinned:
        slices = torch.empty(slices.shape, dtype=slices.dtype, pin_memory=True)
        # By numpy, because torch's threads would wait for each other where workers keep all cores busy.
        slices.numpy()[...] = pixels.hu
    return slices, pixels, problems


def _encoded_unit(unit: _UnitEnd, features: Tensor) -> Encoded:
    good, failed, problems, values = [], [], [], dict[str, Values]()
    start = 0
    for row, outcome in zip(unit.rows, unit.outcomes, strict=True):
        of_scan = features[start : start + len(row)]
        start += len(row)
        if not isinstance(outcome, Failure) and not of_scan.isfinite().all():
            outcome = Failure("failed", "the encoder returned features that are not finite")
        if isinstance(outcome, Failure):
            failed.append(row.scan_id)
            problems.append(Problem(row.scan_id, "", outcome.kind, outcome.detail, LEFT_OUT))
        else:
            good.append(of_scan)
            problems += outcome.problems
            values[row.scan_id] = values_of(np.concatenate(outcome.samples), row.modality)
    return Encoded(torch.cat(good) if good else features[:0], failed, problems, values)


class Cluster:
    """Encodes as `Machine` does, on many machines."""

    def __init__(self, connection: Connection, setup: Setup) -> None:
        import ray

        self.connection, self.setup, self.job = connection, ray.put(setup), uuid4().hex
        self.needs = _needs(setup)
        self.slots = connection.room(self.needs, "ask for less (--threads, --workers, --device)")

    def measure(self, inputs: Inputs, scans: Iterable[ScanRow]) -> Iterator[dict[str, Statistics | None]]:
        """Mean and sd of scans, some at a time; None for those that cannot be read."""
        return self._run(_measure, inputs, enumerate(in_units(scans, len, UNIT)))

    def encode(
        self, inputs: Inputs, units: Units, report_slices: Callable[[int], object] = lambda slices: None
    ) -> Iterator[tuple[int, Encoded]]:
        """Encodes numbered units; results come in any order, and `report_slices` is not called."""
        return self._run(_encode, inputs, units)

    def _run(self, function: Callable[..., Any], inputs: Inputs, units: Units) -> Iterator[Any]:
        """Runs a task for each unit, with as many waiting as running; yields results as they come."""
        import ray

        # max_calls: a process keeps its encoder, also on the GPU, where Ray would end it after each task.
        remote: Any = ray.remote(
            num_cpus=self.needs["CPU"], num_gpus=self.needs.get("GPU", 0.0), max_retries=RETRIES, max_calls=0
        )(function)
        shared, waiting = ray.put(inputs), iter(units)
        running: list[Any] = []
        while True:
            while len(running) < 2 * self.slots and (unit := next(waiting, None)) is not None:
                running.append(remote.remote(self.job, self.setup, shared, *unit))
            if not running:
                return
            ready, running = ray.wait(running)
            yield self.connection.result(ready[0])


def _needs(setup: Setup) -> Mapping[str, float]:
    """What a task needs: cores for the encoder, or a GPU and cores for the workers that decode for it."""
    if torch.device(setup.options.device).type == "cuda":
        return {"GPU": 1.0, "CPU": float(max(1, setup.workers))}
    return {"CPU": float(setup.options.threads or 1)}


_MACHINES: dict[str, Machine] = {}  # by job, the encoder and workers of this process; at most one entry


def _encode(job: str, setup: Setup, inputs: Inputs, number: int, rows: list[ScanRow]) -> tuple[int, Encoded]:
    machine = _machine(job, setup, inputs)
    (result,) = machine.encode(inputs, [(number, rows)])
    if machine.encoder.engine != setup.engine:  # known for sure now
        here, wanted = machine.encoder.engine, setup.engine
        raise UserError(f"{_here()} encodes by {here}, not by {wanted}; install the same packages everywhere")
    return result


def _measure(job: str, setup: Setup, inputs: Inputs, _: int, rows: list[ScanRow]) -> dict[str, Statistics | None]:
    measured = _machine(job, setup, inputs).measure(inputs, rows)
    return {scan: statistics for some in measured for scan, statistics in some.items()}


def _here() -> str:
    return f"machine {socket.gethostname()} of the Ray cluster"


def _machine(job: str, setup: Setup, inputs: Inputs) -> Machine:
    """The machine of this process; an error if its results could differ from those of the others."""
    if job not in _MACHINES:
        where = _here()
        if torch.__version__ != setup.torch:
            raise UserError(f"{where} has torch {torch.__version__}, not {setup.torch}; install the same everywhere")
        if not inputs.decoding.root.is_dir():
            raise UserError(f"{where} does not see {inputs.decoding.root}; give a path that all machines see (--root)")
        encoder = setup.load(device=setup.options.device, precision=setup.options.precision)
        if encoder.fingerprint != setup.fingerprint:
            raise UserError(f"{where} has other weights of {encoder.name}; copy the same file to all machines")
        while _MACHINES:
            _MACHINES.popitem()[1].pool.close()  # of an earlier job
        _MACHINES[job] = Machine(setup, encoder, Pool(setup.workers, setup.timeout))
    return _MACHINES[job]
