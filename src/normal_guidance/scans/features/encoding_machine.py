"""Encoding on one machine: worker processes read scans, the encoder takes their slices in fixed batches.

Workers send values in their unit (HU), 16 bits where that is exact, and of each slice only the field, where there is
one.  A thread of this
process copies them to the encoder's device and preprocesses them there, on a card in a stream of its own, while the
encoder runs.  A card is given batches ahead, so that it also computes while a unit is saved.

The features of a unit depend on its scans alone: a batch never holds slices of two units, and a scan that
cannot be decoded leaves zeros in its place, so that the others' bits do not change.
"""

from __future__ import annotations

import math
import queue
import threading
from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable
from uuid import uuid4

import numpy as np
import torch
from torch import Tensor

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.base.system import RETRIES, Connection, connected
from normal_guidance.base.workers import Failure, Pool
from normal_guidance.scans.features.encoders import Encoder, Precision
from normal_guidance.scans.features.encoding_job import Encoded
from normal_guidance.scans.features.preprocessing import (
    Preprocessing,
    Range,
    Statistics,
    Window,
    in_field,
    middle,
    range_of,
    scan_statistics,
)
from normal_guidance.scans.index.manifest import ScanRow, Values, sample_values, values_of
from normal_guidance.scans.index.problems import Problem
from normal_guidance.scans.index.volumes import Slices

# Reads scans for an encoder, some slices at a time; runs in worker processes.
# This module does not import torch: a worker would wait for that longer than for everything else.


Reader = Callable[..., tuple[np.ndarray, list[Problem]]]
"""Like `normal_guidance.scans.index.volumes.read_volume(row, root, repair=True)`; workers find it by its name."""

MAX_SIDE = 8192
"""Slices with more rows or columns are an error: CT has 512 to 2048, and a square of 65,535 would take 16 GiB."""

PIECE = 64
"""Most slices of a scan that a worker reads at a time, where they are files of their own: 32 MiB at 512 x 512."""


class Pixels(NamedTuple):
    """Slices as they are sent to the encoder's process."""

    hu: Slices
    lowest: float
    """Their minimum: it fills the margins of slices that are not square."""
    ranges: tuple[Range | None, ...] = ()
    """The range of each window in them, where a window is one of percentiles; else empty."""
    sample: np.ndarray = np.empty(0, np.float32)
    """Some of the values of the whole slices, from which the scan's `Values` are found."""


@dataclass(frozen=True)
class Decoding:
    """How scans are read; sent to worker processes.

    Args:
        read: returns a scan's slices in HU, or in the unit that they have, and its problems.
        root: where the scans lie.
        repair: whether known mistakes in the files are repaired.
        field: mm of each slice's middle that are sent; None sends whole slices.
        windows: the windows of all channels, where one is of percentiles, which are then sent too; else empty.
        held: ids of scans that are not read, because a store or a unit has their features already.
    """

    read: Reader
    root: Path
    repair: bool
    field: float | None = None
    windows: tuple[Window | None, ...] = ()
    held: frozenset[str] = frozenset()

    def pixels(self, row: ScanRow) -> tuple[Pixels, list[Problem]]:
        """The slices, int16 or float32, and their problems.

        Pixels that are not finite, images too large to be slices, a field without pixel spacing, and percentiles of a
        constant scan raise an `UnreadableError`.
        """
        if row.scan_id in self.held:
            raise UnreadableError("failed", "its features are there already")
        hu, problems = self.read(row, self.root, repair=self.repair)
        if len(hu) != len(row):
            raise UnreadableError("failed", f"{len(hu)} slices were read, but the manifest has {len(row)}")
        slices, rows, columns = hu.shape
        if not hu.size or max(rows, columns) > MAX_SIDE:
            raise UnreadableError("failed", f"{slices} slices of {rows} x {columns} pixels (at most {MAX_SIDE})")
        sample = sample_values(hu)
        hu = in_field(hu, row.pixel_spacing, self.field)
        hu = np.ascontiguousarray(hu, np.int16 if hu.dtype == np.int16 else np.float32)
        lowest = float(hu.min())
        if hu.dtype != np.int16 and not (math.isfinite(lowest) and math.isfinite(hu.max())):
            raise UnreadableError("failed", "pixels that are not finite")
        return Pixels(hu, lowest, tuple(range_of(window, hu) for window in self.windows), sample), problems


def cut(row: ScanRow, field: float | None = None, *, whole: bool = False) -> list[ScanRow]:
    """Consecutive parts of a scan of at most `PIECE` slices.

    Three kinds of scans are not cut: slices that are not square, or whose field is not, because their margin is the
    whole scan's minimum; those whose window is of the whole scan's percentiles (`whole`); and files with several
    slices, which are decoded once.
    """
    if whole or not _is_square(row, field) or len(set(row.files)) < len(row):
        return [row]
    places = [slice(start, start + PIECE) for start in range(0, len(row), PIECE)]
    return [
        replace(row, files=row.files[place], frames=row.frames[place], positions=row.positions[place])
        for place in places
    ]


def _is_square(row: ScanRow, field: float | None) -> bool:
    """Whether a scan's slices are sent as squares."""
    if field is None:
        return row.rows == row.columns
    try:
        down, across = middle(row.rows, row.columns, row.pixel_spacing, field)
    except UnreadableError:  # it is recorded when the scan is read
        return False
    return down.stop - down.start == across.stop - across.start


# Items made by threads ahead of their use.


Item = TypeVar("Item")
Result = TypeVar("Result")

POLL_SECONDS = 0.2
"""Longest time before the thread notices that it should stop."""


def in_background(items: Iterable[Item], depth: int) -> Generator[Item, None, None]:
    """Yields the same items, which a thread makes up to `depth` ahead."""
    made: queue.Queue[tuple[bool, Any]] = queue.Queue(depth)
    stopping = threading.Event()

    def put(good: bool, item: Any) -> None:
        while not stopping.is_set():
            with suppress(queue.Full):
                made.put((good, item), timeout=POLL_SECONDS)
                return

    def make() -> None:
        try:
            for item in items:
                put(True, item)
                if stopping.is_set():
                    return
            put(False, None)
        except BaseException as error:
            put(False, error)

    thread = threading.Thread(target=make, daemon=True)
    thread.start()
    try:
        while True:
            good, item = made.get()
            if not good:
                break
            yield item
    finally:
        stopping.set()
        thread.join()
    if item is not None:
        raise item


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


UNIT, UNIT_ON_CUDA = 1024, 8192
"""Fewest slices of a unit: a killed job loses its unfinished units, and saving one costs little in comparison.  On a
card that is a second or two; the last batch of a unit is smaller than the others, so units should not be small."""

AHEAD_BYTES = 2**31
"""Most memory for slices that wait for the encoder; one scan alone may take more."""

BATCHES_AHEAD = 4
"""Batches that are prepared ahead of the encoder."""

BATCHES_BEGUN = 3
"""Batches that a card is given before the features of the first are waited for."""

COPYING_THREADS = 3
"""Threads that copy slices to pinned memory: what workers share arrives page by page, 4 GB/s in one thread."""

LEFT_OUT = "left out of the store"
"""The action, in problems.csv, for a scan that cannot be encoded."""

Load = Callable[..., Encoder]
"""Loads the encoder, from `device` and `precision`; on Ray it is pickled, so it must be a module's function."""


@dataclass(frozen=True)
class EncodingOptions:
    """How scans are encoded; a job that was begun with other options is an error.

    Args:
        repair: whether known mistakes in the files are repaired.
        batch_size: slices that go through the encoder together.
        device: cpu, cuda, cuda:1.
        precision: precision of the encoder's arithmetic.
        threads: threads of the encoder on the CPU, because sums depend on their number.  If left out, the number that
            the job was begun with, or torch's.
        unit: fewest slices of a unit; 0 stands for the device's own number.
    """

    repair: bool = True
    batch_size: int = 64
    device: str = "cpu"
    precision: Precision = "float32"
    threads: int | None = None
    unit: int = 0

    def __post_init__(self) -> None:
        if not self.unit:
            object.__setattr__(self, "unit", UNIT_ON_CUDA if self.device.startswith("cuda") else UNIT)


class Inputs(NamedTuple):
    """How scans become an encoder's input."""

    decoding: Decoding
    """Runs in the workers."""
    preprocessing: Preprocessing
    """Runs on the encoder's device, except for the field, which the workers cut out."""


@dataclass(frozen=True)
class Setup:
    """Everything that a process needs to encode, on any machine."""

    load: Load
    fingerprint: str
    """The encoder's fingerprint: another machine may have another version of the file of weights."""
    torch: str
    """torch's version."""
    options: EncodingOptions
    workers: int
    timeout: float


@runtime_checkable
class EncodingBackend(Protocol):
    """A `Machine`, or a cluster of machines (`normal_guidance.scans.features.encoding_machine`)."""

    def measure(self, inputs: Inputs, scans: Iterable[ScanRow]) -> Iterator[dict[str, Statistics | None]]:
        """Mean and sd of scans, some at a time; None for those that cannot be read."""

    def encode(
        self, inputs: Inputs, units: Iterable[tuple[int, list[ScanRow]]], report_slices: Callable[[int], object]
    ) -> Iterator[tuple[int, Encoded]]:
        """Encodes numbered units; `report_slices` receives the number of slices done of the current unit."""


def start_workers(workers: int, timeout: float, scans: int) -> Pool:
    """Starts worker processes for `scans` scans while the encoder is loaded: both take seconds.

    The workers import everything that reading needs at once, including pydicom.
    """
    pool = Pool(workers, timeout)
    pool.start(
        scans, (Decoding.__module__, "normal_guidance.scans.index.volumes", "normal_guidance.scans.index.dicom_slices")
    )
    return pool


class Machine:
    """An encoder and its worker processes."""

    def __init__(self, setup: Setup, encoder: Encoder, pool: Pool) -> None:
        self.setup, self.encoder, self.pool = setup, encoder, pool

    def measure(self, inputs: Inputs, scans: Iterable[ScanRow]) -> Iterator[dict[str, Statistics | None]]:
        """Mean and sd of scans, one at a time; None for those that cannot be read."""
        ids: deque[str] = deque()
        images: list[Tensor] = []

        def draw() -> Iterator[ScanRow]:
            for row in scans:
                ids.append(row.scan_id)
                yield row

        for piece in _prepared(self.pool, inputs, self.encoder.device, draw()):
            images += [] if piece.images is None else [piece.images]
            if piece.outcome is not None:
                good = not isinstance(piece.outcome, Failure)
                yield {ids.popleft(): scan_statistics(torch.cat(images)) if good else None}
                images = []

    def encode(
        self,
        inputs: Inputs,
        units: Iterable[tuple[int, list[ScanRow]]],
        report_slices: Callable[[int], object] = lambda slices: None,
    ) -> Generator[tuple[int, Encoded], None, None]:
        """Encodes numbered units, one after the other; `report_slices` receives the slices done of the current one."""
        device, size = self.encoder.device, self.setup.options.batch_size
        items = in_background(_in_own_stream(_batches(self.pool, inputs, device, units, size), device), BATCHES_AHEAD)
        threads = self.setup.options.threads or torch.get_num_threads()
        begun: deque[_Features | _UnitEnd] = deque()
        features: list[Tensor] = []
        slices, waiting, ahead = 0, 0, BATCHES_BEGUN if device.startswith("cuda") else 0
        with number_of_threads(threads):
            try:
                for item in chain(items, [None]):
                    if isinstance(item, _Batch):
                        begun.append(_Features.fetched(self.encoder.begin(item.arrived())))
                        waiting += 1
                    elif isinstance(item, _Blank):
                        begun.append(_Features(torch.zeros(item.slices, self.encoder.width), None))
                        waiting += 1
                    elif item is not None:
                        begun.append(item)
                    while begun and (item is None or waiting > ahead or isinstance(begun[0], _UnitEnd)):
                        first = begun.popleft()
                        if isinstance(first, _Features):
                            features.append(first.arrived())
                            waiting -= 1
                            slices += len(features[-1])
                            report_slices(slices)
                        else:
                            yield first.number, _encoded_unit(first, torch.cat(features))
                            features, slices = [], 0
            except BaseException:
                self.pool.stop()
                raise
            finally:
                items.close()

    def close(self) -> None:
        """Ends the workers."""
        self.pool.close()


@contextmanager
def number_of_threads(count: int) -> Iterator[None]:
    """Sets torch's number of threads inside a block."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


class _Batch(NamedTuple):
    """Images for the encoder, which a stream of their own may still prepare."""

    images: Tensor
    ready: torch.cuda.Event | None

    def arrived(self) -> Tensor:
        """The images, for use in the current stream."""
        if self.ready is not None:
            stream = torch.cuda.current_stream(self.images.device)
            stream.wait_event(self.ready)
            self.images.record_stream(stream)
        return self.images


class _Blank(NamedTuple):
    """A batch without an image, which is not encoded: its slices are of scans that are left out."""

    slices: int


class _Features(NamedTuple):
    """Features of a batch on the CPU, which a card may still compute."""

    host: Tensor
    done: torch.cuda.Event | None

    @staticmethod
    def fetched(features: Tensor) -> _Features:
        """Features whose copy is under way; a plain copy would wait for all that the card was given since."""
        if not features.is_cuda:
            return _Features(features, None)
        host = torch.empty(features.shape, pin_memory=True)
        host.copy_(features, non_blocking=True)
        return _Features(host, torch.cuda.current_stream(features.device).record_event())

    def arrived(self) -> Tensor:
        """The features, once they are there."""
        if self.done is not None:
            self.done.synchronize()
        return self.host


class _Decoded(NamedTuple):
    """What is known of a scan beside its slices."""

    problems: list[Problem]
    samples: list[np.ndarray]
    """Samples of its values, one for each piece."""


@dataclass(frozen=True, eq=False)
class _UnitEnd:
    """Marks the end of a unit's batches."""

    number: int
    rows: list[ScanRow]
    outcomes: list[_Decoded | Failure]
    """For each scan what is known of it, or why it could not be decoded."""


def _in_own_stream(items: Iterator[Tensor | _Blank | _UnitEnd], device: str) -> Iterator[_Batch | _Blank | _UnitEnd]:
    """The items, made in a stream of the card, if it is one, beside the encoder's; for a thread of their own."""
    if torch.device(device).type != "cuda":
        yield from (_Batch(item, None) if isinstance(item, Tensor) else item for item in items)
        return
    stream = torch.cuda.Stream(device)
    with torch.cuda.device(device), torch.cuda.stream(stream):
        for item in items:
            yield _Batch(item, stream.record_event()) if isinstance(item, Tensor) else item


def _batches(
    pool: Pool, inputs: Inputs, device: str, units: Iterable[tuple[int, list[ScanRow]]], batch_size: int
) -> Iterator[Tensor | _Blank | _UnitEnd]:
    """The encoder's input: the batches of a unit, which its scans fill one after the other, then its `_UnitEnd`."""
    waiting: deque[tuple[int, list[ScanRow]]] = deque()

    def scans() -> Iterator[ScanRow]:
        for number, rows in units:
            waiting.append((number, rows))
            yield from rows

    size = inputs.preprocessing.size
    cutter = _BatchCutter((batch_size, inputs.preprocessing.channels, size, size), device)
    outcomes: list[_Decoded | Failure] = []
    for piece in _prepared(pool, inputs, device, scans()):
        yield from cutter.add(piece.images, piece.slices)
        if piece.outcome is None:
            continue
        number, rows = waiting[0]
        outcomes.append(piece.outcome)
        if len(outcomes) == len(rows):
            yield from cutter.rest()
            yield _UnitEnd(number, rows, outcomes)
            waiting.popleft()
            outcomes = []


class _Piece(NamedTuple):
    """Some slices of a scan as the encoder takes them."""

    slices: int
    images: Tensor | None
    """None if they could not be read."""
    outcome: _Decoded | Failure | None
    """With the last slices of a scan: what is known of it, or why it could not be read."""


def _prepared(pool: Pool, inputs: Inputs, device: str, scans: Iterable[ScanRow]) -> Iterator[_Piece]:
    """The slices of all scans, in their order."""
    waiting: deque[tuple[int, bool]] = deque()
    # The workers cut the field out, so that less is sent, and measure percentiles; the other steps are left.
    whole = inputs.preprocessing.has_percentiles
    windows = inputs.preprocessing.windows if whole else ()
    decoding = replace(inputs.decoding, field=inputs.preprocessing.field, windows=windows)
    preprocessing = replace(inputs.preprocessing, field=None)

    def draw() -> Iterator[ScanRow]:
        for row in scans:
            pieces = cut(row, decoding.field, whole=whole)
            for piece in pieces:
                waiting.append((len(piece), piece is pieces[-1]))
                yield piece

    outcome: _Decoded | Failure = _Decoded([], [])
    read = pool.map(decoding.pixels, draw(), size=_largest_bytes, ahead=AHEAD_BYTES)
    pinned = torch.device(device).type == "cuda"
    for result in in_threads(_pinned, read, COPYING_THREADS) if pinned else map(_unpinned, read):
        (slices, is_last), images = waiting.popleft(), None
        if isinstance(result, Failure):
            outcome = outcome if isinstance(outcome, Failure) else result
        else:
            images = preprocessing.apply(result.hu.to(device, non_blocking=True), result.lowest, ranges=result.ranges)
            if isinstance(outcome, _Decoded):
                outcome = _Decoded(outcome.problems + result.problems, [*outcome.samples, result.sample])
        yield _Piece(slices, images, outcome if is_last else None)
        if is_last:
            outcome = _Decoded([], [])


def _largest_bytes(row: ScanRow) -> int:
    """The size of slices, if they are float32."""
    return 4 * len(row) * row.rows * row.columns


class _Slices(NamedTuple):
    """What a worker read."""

    hu: Tensor
    lowest: float
    ranges: tuple[Range | None, ...]
    sample: np.ndarray
    problems: list[Problem]


def _unpinned(read: tuple[Pixels, list[Problem]] | Failure) -> _Slices | Failure:
    if isinstance(read, Failure):
        return read
    pixels, problems = read
    return _Slices(torch.from_numpy(pixels.hu), pixels.lowest, pixels.ranges, pixels.sample, problems)


def _pinned(read: tuple[Pixels, list[Problem]] | Failure) -> _Slices | Failure:
    """Slices in pinned memory, from which a copy to the card runs beside this process."""
    slices = _unpinned(read)
    if isinstance(slices, Failure):
        return slices
    pinned = torch.empty(slices.hu.shape, dtype=slices.hu.dtype, pin_memory=True)
    # By numpy, because torch's threads would wait for each other where workers keep all cores busy.
    pinned.numpy()[...] = slices.hu.numpy()
    return slices._replace(hu=pinned)


class _BatchCutter:
    """Cuts consecutive scans into batches of equal size."""

    def __init__(self, shape: tuple[int, int, int, int], device: str) -> None:
        self.shape, self.device = shape, device
        self.batch, self.filled, self.blank = torch.empty(shape, device=device), 0, True

    def add(self, images: Tensor | None, slices: int) -> Iterator[Tensor | _Blank]:
        """The batches that these slices complete; without images, zeros take their place."""
        start = 0
        while start < slices:
            take = min(slices - start, len(self.batch) - self.filled)
            piece = 0.0 if images is None else images[start : start + take]
            self.batch[self.filled : self.filled + take] = piece
            self.blank = self.blank and images is None
            self.filled, start = self.filled + take, start + take
            if self.filled == len(self.batch):
                yield from self.rest()

    def rest(self) -> Iterator[Tensor | _Blank]:
        """The last batch, which may be smaller; nothing if it is empty."""
        if self.filled:
            yield _Blank(self.filled) if self.blank else self.batch[: self.filled]
            self.batch, self.filled, self.blank = torch.empty(self.shape, device=self.device), 0, True


def _encoded_unit(unit: _UnitEnd, features: Tensor) -> Encoded:
    good, failed, problems, values = [], [], [], dict[str, Values]()
    start = 0
    for row, outcome in zip(unit.rows, unit.outcomes, strict=True):
        own = features[start : start + len(row)]
        start += len(row)
        if not isinstance(outcome, Failure) and not own.isfinite().all():
            outcome = Failure("failed", "the encoder returned features that are not finite")
        if isinstance(outcome, Failure):
            failed.append(row.scan_id)
            problems.append(Problem(row.scan_id, "", outcome.kind, outcome.detail, LEFT_OUT))
        else:
            good.append(own)
            problems += outcome.problems
            values[row.scan_id] = values_of(np.concatenate(outcome.samples), row.modality)
    return Encoded(torch.cat(good) if good else features[:0], failed, problems, values)


# Encoding on a Ray cluster: each unit is a task, and this process saves the results.
# If a machine dies, Ray runs its tasks again elsewhere.  The bytes are those of one machine, because a unit depends on
# its scans alone, and every machine must have the same encoder, the same torch and room for the same number of threads.
# All machines must see the scans under the same path.


@contextmanager
def connect(address: str, setup: Setup) -> Iterator[Cluster]:
    """Connects to a running cluster."""
    with connected(address) as connection:
        yield Cluster(connection, setup)


class Cluster:
    """Encodes as `normal_guidance.scans.features.encoding_machine.Machine` does, on many machines."""

    def __init__(self, connection: Connection, setup: Setup) -> None:
        import ray

        self.connection, self.setup, self.job = connection, ray.put(setup), uuid4().hex
        self.needs = _needs(setup)
        self.slots = connection.room(self.needs, "ask for less (--threads, --workers, --device)")

    def measure(self, inputs: Inputs, scans: Iterable[ScanRow]) -> Iterator[dict[str, Statistics | None]]:
        """Mean and sd of scans, some at a time; None for those that cannot be read."""
        yield from self._run(_measure, inputs, enumerate(_in_units(scans)))

    def encode(
        self,
        inputs: Inputs,
        units: Iterable[tuple[int, list[ScanRow]]],
        report_slices: Callable[[int], object] = lambda slices: None,
    ) -> Iterator[tuple[int, Encoded]]:
        """Encodes numbered units; results come in any order, and `report_slices` is not called."""
        yield from self._run(_encode, inputs, units)

    def _run(
        self, function: Callable[..., Any], inputs: Inputs, units: Iterable[tuple[int, list[ScanRow]]]
    ) -> Iterator[Any]:
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


def _in_units(scans: Iterable[ScanRow]) -> Iterator[list[ScanRow]]:
    rows: list[ScanRow] = []
    for row in scans:
        rows.append(row)
        if sum(map(len, rows)) >= UNIT:
            yield rows
            rows = []
    if rows:
        yield rows


_MACHINES: dict[str, Machine] = {}
"""By job, the encoder and workers of this process; at most one entry."""


def _encode(job: str, setup: Setup, inputs: Inputs, number: int, rows: list[ScanRow]) -> tuple[int, Encoded]:
    (result,) = _machine(job, setup, inputs).encode(inputs, [(number, rows)])
    return result


def _measure(job: str, setup: Setup, inputs: Inputs, _: int, rows: list[ScanRow]) -> dict[str, Statistics | None]:
    measured: dict[str, Statistics | None] = {}
    for one in _machine(job, setup, inputs).measure(inputs, rows):
        measured |= one
    return measured


def _machine(job: str, setup: Setup, inputs: Inputs) -> Machine:
    """The machine of this process; an error if its results could differ from those of the others."""
    if job not in _MACHINES:
        import socket

        where = f"machine {socket.gethostname()} of the Ray cluster"
        if torch.__version__ != setup.torch:
            raise UserError(
                f"{where} has torch {torch.__version__}, not {setup.torch}; install the same version on all machines"
            )
        if not inputs.decoding.root.is_dir():
            raise UserError(
                f"{where} does not see {inputs.decoding.root}; give a path that all machines share (--root)"
            )
        encoder = setup.load(device=setup.options.device, precision=setup.options.precision)
        if encoder.fingerprint != setup.fingerprint:
            raise UserError(f"{where} has other weights of {encoder.name}; copy the same file to all machines")
        while _MACHINES:
            _MACHINES.popitem()[1].close()  # of an earlier job
        _MACHINES[job] = Machine(setup, encoder, Pool(setup.workers, setup.timeout))
    return _MACHINES[job]
