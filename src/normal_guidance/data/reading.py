"""Headers of many files, read in worker processes, in the order of the files.

A parser in C may take its whole process down.  So every worker has a pipe of its own, which tells at once when it dies
and over what: the files of its chunk are then read one by one, and the one that kills a worker again is refused.
Workers are started afresh (spawn): a copy of a process with threads may lock up.
"""

from __future__ import annotations

import multiprocessing
import signal
import time
from collections import deque
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from itertools import islice
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from normal_guidance.data.containers import locate
from normal_guidance.data.dicom import Header, exclusion, read_header
from normal_guidance.data.found import Mask, Refusal
from normal_guidance.data.problems import UnreadableError
from normal_guidance.errors import UserError

CHUNK = 64
"""Files that a worker is sent at a time: about 50 ms of work, so that pipes are idle and progress is smooth."""

AHEAD = 4
"""Chunks per worker that may be read before the first of them is taken: they wait in memory."""

PATIENCE = 300.0
"""Seconds for one chunk; a worker that needs longer hangs, and is ended."""

START_PATIENCE = 300.0
"""Seconds for a worker to start: it imports from what may be a slow disk."""

MAX_FRAMES = 100_000
"""Most slices in one file; more are damage."""

NIFTI = (".nii", ".nii.gz")


class Wanted(NamedTuple):
    """A file to read.

    Example:
        >>> Wanted("A17/1.dcm").mask
        False
    """

    file: str
    mask: bool = False


Found = Header | Mask | Refusal
"""What comes of a file."""


def read_all(root: Path, wanted: Iterable[Wanted], workers: int = 0) -> Iterator[Found]:
    """What comes of every file, in their order; with 0 workers, in this process."""
    chunks = _chunks(wanted)
    if workers < 1:
        for chunk in chunks:
            for one in chunk:
                yield read_one(root, one)
        return
    pool = _Pool(root, workers)
    try:
        for results in pool.read(chunks):
            yield from results
    finally:
        pool.close()


def read_one(root: Path, wanted: Wanted) -> Found:
    """A header, or why there is none; whatever is wrong with the file, this does not raise."""
    try:
        return _read_mask(root, wanted.file) if wanted.mask else _read_header(root, wanted.file)
    except UnreadableError as error:
        return Refusal(wanted.file, error.kind, error.detail)
    except UserError:
        raise  # a package is missing: nothing about this file
    except Exception as error:  # a parser's own mistake over a file from strangers
        return Refusal(wanted.file, "unreadable", f"{type(error).__name__}: {error}")


def is_nifti(file: str) -> bool:
    """By its name.

    Example:
        >>> is_nifti("A17.nii.gz"), is_nifti("A17/1.dcm")
        (True, False)
    """
    return file.lower().endswith(NIFTI)


def _read_header(root: Path, file: str) -> Header | Refusal:
    content = locate(root, file)
    if is_nifti(file):
        from normal_guidance.data.nifti import read_nifti_header

        header = replace(read_nifti_header(content, file), series_uid=file)  # a file is a series of its own
        refused = None
    else:
        header = read_header(content, file)
        refused = exclusion(header)
    if refused is None and header.frames > MAX_FRAMES:
        refused = UnreadableError("unreadable", f"{header.frames} frames are more than {MAX_FRAMES}")
    return header if refused is None else Refusal(file, refused.kind, refused.detail, header.series_uid)


def _read_mask(root: Path, file: str) -> Mask:
    from normal_guidance.data.nifti import read_nifti, read_nifti_header

    if not is_nifti(file):
        raise UnreadableError("unreadable", "a mask is a NIfTI file: .nii or .nii.gz")
    content = locate(root, file)
    header = read_nifti_header(content, file)
    if header.frame_positions is None or header.frame_orientation is None:
        raise UnreadableError("unreadable", "the mask has no positions")
    positive = np.abs(read_nifti(content, file)).max(axis=(1, 2)) > 0
    return Mask(file, header.frame_orientation, header.frame_positions, tuple(positive.tolist()))


def _chunks(wanted: Iterable[Wanted]) -> Iterator[list[Wanted]]:
    source = iter(wanted)
    while chunk := list(islice(source, CHUNK)):
        yield chunk


# ----------------------------------------------------------------------------------------------------
# Processes
# ----------------------------------------------------------------------------------------------------


def _work(root: Path, pipe: Connection) -> None:
    """A worker's life: chunks in, results out, until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent is interrupted, too, and closes the pipe
    try:
        pipe.send(None)  # imported everything: from here on, a death is about a file
        while True:
            chunk = pipe.recv()
            try:
                pipe.send([read_one(root, one) for one in chunk])
            except UserError as error:
                pipe.send(error)
    except (EOFError, OSError):
        pass


class _Job(NamedTuple):
    chunk: int
    first: int
    wanted: Sequence[Wanted]


class _Worker:
    def __init__(self, root: Path) -> None:
        context = multiprocessing.get_context("spawn")
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=_work, args=(root, theirs), daemon=True)
        self.process.start()
        theirs.close()  # so that their end is gone when they are
        self.job: _Job | None = None
        self.ready, self.since = False, time.monotonic()

    def send(self, job: _Job) -> None:
        self.job, self.since = job, time.monotonic()
        with suppress(OSError):  # if it died, the pipe says so when it is read
            self.pipe.send(job.wanted)

    def close(self) -> None:
        self.pipe.close()
        self.process.kill()
        self.process.join()


class _Pool:
    def __init__(self, root: Path, workers: int) -> None:
        self.root = root
        self.workers: list[_Worker] = []
        self.limit = workers
        self.jobs: deque[_Job] = deque()
        self.results: dict[int, list[Found | None]] = {}

    def read(self, chunks: Iterator[list[Wanted]]) -> Iterator[list[Found]]:
        sent = taken = 0
        exhausted = False
        while True:
            while not exhausted and len(self.jobs) < self.limit and sent - taken < AHEAD * self.limit:
                chunk = next(chunks, None)
                if chunk is None:
                    exhausted = True
                    break
                self.jobs.append(_Job(sent, 0, chunk))
                self.results[sent] = [None] * len(chunk)
                sent += 1
            if exhausted and taken == sent:
                return
            self._hire()
            self._listen()
            while taken < sent and None not in self.results[taken]:
                yield [found for found in self.results.pop(taken) if found is not None]
                taken += 1

    def _hire(self) -> None:
        """Work for whoever is free, and as many workers as there is work for."""
        for worker in self.workers:
            if worker.ready and worker.job is None and self.jobs:
                worker.send(self.jobs.popleft())
        idle = sum(worker.job is None for worker in self.workers)
        while len(self.workers) < self.limit and idle < len(self.jobs):
            self.workers.append(_Worker(self.root))
            idle += 1

    def _listen(self) -> None:
        pipes: list[Any] = [worker.pipe for worker in self.workers]
        heard = wait(pipes, timeout=1.0)
        for worker in list(self.workers):
            patience = PATIENCE if worker.ready else START_PATIENCE
            busy = worker.job is not None or not worker.ready
            if worker.pipe in heard:
                self._hear(worker)
            elif busy and time.monotonic() - worker.since > patience:
                self._bury(worker, f"did not answer within {patience:g} s")

    def _hear(self, worker: _Worker) -> None:
        try:
            answer = worker.pipe.recv()
        except (EOFError, OSError):
            worker.process.join()
            self._bury(worker, f"died ({_exit(worker.process.exitcode)})")
            return
        if isinstance(answer, UserError):
            raise answer
        if worker.job is not None:
            self._store(worker.job, answer)
        worker.ready, worker.job = True, None

    def _bury(self, worker: _Worker, reason: str) -> None:
        """Reads its files again one by one, or refuses the one that it was alone with."""
        self.workers.remove(worker)
        worker.close()
        if not worker.ready:
            raise UserError(f"worker processes cannot start: one {reason}; use --workers 0")
        job = worker.job
        if job is not None and len(job.wanted) == 1:
            self._store(job, [Refusal(job.wanted[0].file, "unreadable", f"the process that read it {reason}")])
        elif job is not None:
            singles = [_Job(job.chunk, job.first + i, [one]) for i, one in enumerate(job.wanted)]
            self.jobs.extendleft(reversed(singles))

    def _store(self, job: _Job, found: Sequence[Found]) -> None:
        self.results[job.chunk][job.first : job.first + len(found)] = found

    def close(self) -> None:
        for worker in self.workers:
            worker.close()
        self.workers.clear()


def _exit(code: int | None) -> str:
    """How a process ended; a negative code is a signal.

    Example:
        >>> _exit(-11)
        'SIGSEGV'
    """
    if code is not None and code < 0:
        try:
            return signal.Signals(-code).name
        except ValueError:
            pass
    return f"exit code {code}"
