"""Encoding on one machine: worker processes read scans, the encoder takes their slices in fixed batches.

Workers send values in their unit (HU), 16 bits where that is exact, and of each slice only the field, where there is
one.  A thread of this
process copies them to the encoder's device and preprocesses them there, on a card in a stream of its own, while the
encoder runs.  A card is given batches ahead, so that it also computes while a unit is saved.

The features of a unit depend on its scans alone: a batch never holds slices of two units, and a scan that
cannot be decoded leaves zeros in its place, so that the others' bits do not change.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import chain
from typing import NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor

from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.problems import Problem
from normal_guidance.data.values import Values, values_of
from normal_guidance.data.windows import Range
from normal_guidance.data.worker_pool import Pool
from normal_guidance.data.worker_process import Failure
from normal_guidance.features.encoder_inputs import Decoding, Pixels, cut
from normal_guidance.features.encoders import Encoder, Precision
from normal_guidance.features.encoding_folder import Encoded
from normal_guidance.features.prefetch import in_background, in_threads
from normal_guidance.features.preprocessing import Preprocessing, Statistics, scan_statistics

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
    """A `Machine`, or a cluster of machines (`normal_guidance.features.encoding_on_ray`)."""

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
    pool.start(scans, (Decoding.__module__, "normal_guidance.data.volumes", "normal_guidance.data.dicom_slices"))
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
