"""Slices for the page, decoded on request, in processes that may die, and cached up to a limit.

A slice of 512 x 512 pixels is half a megabyte, its scan 150 MB or more: slices are sent one by one, and the page
requests the slices around the one it shows.  A file is decoded as a whole: one slice in most DICOM series, all slices
in NIfTI.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.worker_pool import Pool
from normal_guidance.data.worker_process import Failure
from normal_guidance.errors import UserError
from normal_guidance.viewer.cache import Cache
from normal_guidance.viewer.slice_decoding import SliceRequest, decode, prepare

CACHE_BYTES = 2**29
"""Bytes of slices that stay in memory: about 1,000 slices of 512 x 512 pixels."""

WORKERS = 2
"""Processes that decode."""

PATIENCE = 120.0
"""Seconds for one file; a decoder that needs longer is ended."""

FAILURE_SECONDS = 10.0
"""After so many seconds an unreadable file is tried again: it may have been restored."""

FAILURE_BYTES = 1024
"""Size of a failure in the cache."""


class UnreadableSliceError(RuntimeError):
    """A slice that cannot be shown; the page shows the message."""


@dataclass(frozen=True, eq=False)
class _File:
    """The decoded slices of one file by their places in the scan; or an error, and when it happened."""

    slices: dict[int, np.ndarray]
    error: str | None = None
    since: float = 0.0

    @property
    def bytes(self) -> int:
        return FAILURE_BYTES + sum(one.nbytes for one in self.slices.values())


Key = tuple[int, str]
"""A scan's number and the name of one of its files."""


class SliceImages:
    """Slices by scan and place; everything but decoding happens in the one thread of the server's loop.

    Args:
        row_of: returns a scan's row of the manifest.
        root: folder of the scans.
        limit: bytes of slices to keep.
        workers: processes that decode.
    """

    def __init__(
        self, row_of: Callable[[int], ScanRow], root: Path, *, limit: int = CACHE_BYTES, workers: int = WORKERS
    ) -> None:
        self._row_of, self._root, self._workers = row_of, root, workers
        self.cache: Cache[Key, _File] = Cache(limit, lambda file: file.bytes)
        self._pending: dict[Key, asyncio.Future[_File]] = {}
        self._threads = ThreadPoolExecutor(workers, thread_name_prefix="decoding")
        self._own = threading.local()
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

    def prepare(self, kind: str) -> None:
        """Start the workers in the background, for scans of this kind."""
        for _ in range(self._workers):
            self._threads.submit(lambda: list(self._pool().map(prepare, [kind])))

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
        part = replace(
            row,
            slice_labels=None,
            files=(name,) * len(places),
            frames=tuple(row.frames[place] for place in places),
            positions=tuple(row.positions[place] for place in places),
        )
        try:
            (found,) = self._pool().map(decode, [SliceRequest(self._root, part)])
        except UserError as error:  # a package is missing, or no process can be started
            found = Failure("failed", str(error))
        if isinstance(found, Failure):
            return _File({}, f"{found.detail}.", time.monotonic())
        return _File(dict(zip(places, found, strict=True)))

    def _pool(self) -> Pool:
        if not hasattr(self._own, "pool"):
            self._own.pool = Pool(1, PATIENCE)
            self._pools.append(self._own.pool)
        return self._own.pool
