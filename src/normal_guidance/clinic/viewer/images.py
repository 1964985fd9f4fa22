"""Slices for the page, decoded on request, in processes that may die, and cached up to a limit.

A slice of 512 x 512 pixels is half a megabyte, its scan 150 MB or more, so they are sent one by one.  A file is decoded
as a whole: one slice in most DICOM series, all slices in NIfTI.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Generic, NamedTuple, TypeVar

import numpy as np
from jaxtyping import Int16

from normal_guidance.base.errors import UserError
from normal_guidance.base.workers import Failure, Pool
from normal_guidance.scans.index.manifest import ScanRow

LOWEST, HIGHEST = -32768, 32767  # the HU that 16 bits hold; values outside are set to these


class SliceRequest(NamedTuple):
    """Slices of one file: the folder of the scans, and a scan with those slices only."""

    root: Path
    row: ScanRow


def decode(wanted: SliceRequest) -> Int16[np.ndarray, "slices rows columns"]:
    """Decode slices to whole HU: half the memory, and as exact as CT scanners are."""
    from normal_guidance.scans.index.volumes import read_volume  # needs extras, which features do without

    hu, _ = read_volume(wanted.row, wanted.root)
    whole = np.empty(hu.shape, np.int16)
    for place, image in enumerate(hu):  # one at a time: a scan of 2 GB is not copied as a whole
        whole[place] = np.clip(np.rint(image), LOWEST, HIGHEST)
    return whole


def prepare(_: None) -> None:
    """Import what scans need, so that the first slice does not wait for it."""
    import normal_guidance.scans.index.volumes  # noqa: F401


CacheKey = TypeVar("CacheKey", bound=Hashable)
Value = TypeVar("Value")


class Cache(Generic[CacheKey, Value]):
    """Keep the values used last, up to a limit in bytes; the newest is kept even if it alone exceeds the limit."""

    def __init__(self, limit: int, size: Callable[[Value], int]) -> None:
        self.limit, self.bytes = limit, 0
        self._size = size
        self._held: OrderedDict[CacheKey, Value] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: CacheKey) -> Value | None:
        with self._lock:
            if key in self._held:
                self._held.move_to_end(key)
            return self._held.get(key)

    def put(self, key: CacheKey, value: Value) -> None:
        with self._lock:
            if key in self._held:
                self.bytes -= self._size(self._held.pop(key))
            self._held[key] = value
            self.bytes += self._size(value)
            while self.bytes > self.limit and len(self._held) > 1:
                self.bytes -= self._size(self._held.popitem(last=False)[1])


CACHE_BYTES = 2**29  # bytes of slices that stay in memory: about 1,000 slices of 512 x 512 pixels
WORKERS = 2  # processes that decode
PATIENCE = 120.0  # seconds for one file; a decoder that needs longer is ended
FAILURE_SECONDS = 10.0  # after so many seconds an unreadable file is tried again: it may have been restored
FAILURE_BYTES = 1024  # size of a failure in the cache


class UnreadableSliceError(RuntimeError):
    """A slice that cannot be shown; the page shows the message."""


class _File(NamedTuple):
    """The decoded slices of one file by their places in the scan; or an error, and when it happened."""

    slices: dict[int, np.ndarray]
    error: str | None = None
    since: float = 0.0

    def bytes(self) -> int:
        return FAILURE_BYTES + sum(image.nbytes for image in self.slices.values())


Key = tuple[int, str]  # a scan's number and the name of one of its files


class SliceImages:
    """Slices by scan and place; everything but decoding happens in the one thread of the server's loop."""

    def __init__(self, row_of: Callable[[int], ScanRow], root: Path) -> None:
        self._row_of, self._root = row_of, root
        self.cache: Cache[Key, _File] = Cache(CACHE_BYTES, _File.bytes)
        self._pending: dict[Key, asyncio.Future[_File]] = {}
        self._threads = ThreadPoolExecutor(WORKERS, thread_name_prefix="decoding")
        self._local = threading.local()
        self._pools: list[Pool] = []

    async def read(self, scan: int, place: int) -> bytes:
        """The pixels of a slice, rows from the top, 16 bits each, the lower byte first."""
        row = self._row_of(scan)
        if not 0 <= place < len(row):
            raise UnreadableSliceError(f"scan {row.scan_id} has {len(row)} slices; there is no slice {place + 1}")
        file = await self._file(scan, row, row.files[place])
        if file.error is not None:
            raise UnreadableSliceError(f"Slice {place + 1} cannot be read: {file.error}")
        return file.slices[place].astype("<i2", copy=False).tobytes()

    def prepare(self) -> None:
        """Start the workers in the background."""
        for _ in range(WORKERS):
            self._threads.submit(lambda: list(self._pool().map(prepare, [None])))

    def close(self) -> None:
        """End the workers at once."""
        for pool in self._pools:
            pool.close()
        self._threads.shutdown(cancel_futures=True)

    async def _file(self, scan: int, row: ScanRow, name: str) -> _File:
        """A file from the cache, or decoded; simultaneous requests share one decoding."""
        key = (scan, name)
        known = self.cache.get(key)
        if known is not None and (known.error is None or time.monotonic() - known.since < FAILURE_SECONDS):
            return known
        if key not in self._pending:
            loop = asyncio.get_running_loop()
            self._pending[key] = asyncio.ensure_future(loop.run_in_executor(self._threads, self._decode, row, name))
            self._pending[key].add_done_callback(lambda future: self._decoded(key, future))
        return await asyncio.shield(self._pending[key])  # a request that is cancelled does not cancel the others

    def _decoded(self, key: Key, future: asyncio.Future[_File]) -> None:
        del self._pending[key]
        if not future.cancelled() and future.exception() is None:
            self.cache.put(key, future.result())

    def _decode(self, row: ScanRow, name: str) -> _File:
        """Decode in this thread's own worker process, which is restarted if it dies."""
        places = [place for place, file in enumerate(row.files) if file == name]
        try:
            (slices,) = self._pool().map(decode, [SliceRequest(self._root, row.cut(places))])
        except UserError as error:  # a package is missing, or no process can be started
            slices = Failure("failed", str(error))
        if isinstance(slices, Failure):
            return _File({}, f"{slices.detail}.", time.monotonic())
        return _File(dict(zip(places, slices, strict=True)))

    def _pool(self) -> Pool:
        if not hasattr(self._local, "pool"):
            self._local.pool = Pool(1, PATIENCE)
            self._pools.append(self._local.pool)
        return self._local.pool
