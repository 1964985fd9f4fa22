"""The predicting thread: decides when a series is complete, predicts it, and writes its results.

    STATE/results/SERIES-DIGEST/     outcome.json, and the folders of `clinic.results.result_folder`

DIGEST is a hash of the slices.  outcome.json is written last, so a folder that has it is complete, and a node that was
killed before the queue knew of it does not predict again.
"""

from __future__ import annotations

import shutil
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import write_json
from normal_guidance.clinic.node.destination import Destination
from normal_guidance.clinic.node.incoming import FILES, Incoming, Rule, read_conditions, why_ignored
from normal_guidance.clinic.node.partners import Audit
from normal_guidance.clinic.node.series_queue import (
    ABORTED,
    DONE,
    FAILED,
    IGNORED,
    READY,
    RECEIVING,
    REFUSED,
    QueuedSeries,
    SeriesQueue,
)
from normal_guidance.clinic.predict.new_scans import NotPredicted, find_scans
from normal_guidance.clinic.predict.predicting import Predictor
from normal_guidance.clinic.predict.scan_prediction import ScanPrediction
from normal_guidance.clinic.results.result_folder import dicom_results, write_scan
from normal_guidance.scans.index.problems import KINDS, Problem

ATTEMPTS = 3  # attempts at a series that ends the whole program
ABORTED_FACTOR = 10  # a series whose association was aborted waits so many times longer: its sender will come back
OUTCOME = "outcome.json"


@dataclass(frozen=True)
class Taking:
    """Which series are predicted, and when they are complete."""

    rules: tuple[Rule, ...] = ()  # one must fit; without rules all series are taken
    settle: float = 60.0  # seconds without a new slice after which a series is complete


class Arrivals:
    """The clock of each series that is being received, from the last slice or from the start of the node."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock, self._begin = clock, clock()
        self._last = dict[str, float]()  # every use of it is atomic

    def touch(self, series: str) -> None:
        """Restart the clock of a series."""
        self._last[series] = self._clock()

    def forget(self, series: str) -> None:
        """Drop the clock of a series that is complete."""
        self._last.pop(series, None)

    def quiet(self, series: str) -> float:
        """Seconds since something arrived."""
        last = self._last.get(series, self._begin)  # before the clock, which another thread may meanwhile restart
        return self._clock() - last


class NodeResults:
    """The folder of the results."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def folder(self, series: str, digest: str) -> Path:
        """The results for a series with these slices."""
        return self.path / f"{series}-{digest[:16]}"

    def is_complete(self, folder: Path) -> bool:
        """Whether results are all written."""
        return (folder / OUTCOME).is_file()

    def remove(self, series: str, but: Path | None = None) -> None:
        """Delete the results of a series, but for those in one folder."""
        for folder in self.path.glob(f"{series}-*"):
            if folder != but:
                shutil.rmtree(folder, ignore_errors=True)


@dataclass
class Predicting:
    """Moves series from `receiving` to `ready` and on to `predicted`, `ignored`, `refused` or `failed`."""

    predictor: Predictor
    queue: SeriesQueue
    incoming: Incoming
    results: NodeResults
    audit: Audit
    taking: Taking
    destinations: Sequence[Destination]
    arrivals: Arrivals
    ended: threading.Event

    def step(self) -> bool:
        """Settle what is complete and predict one series; whether there was one."""
        for series in self.queue.in_state(RECEIVING):
            if self._is_complete(series):
                self._settle(series)
        ready = self.queue.in_state(READY)
        if ready:
            self._predict(ready[0])
        return bool(ready)

    def _is_complete(self, series: QueuedSeries) -> bool:
        wait = self.taking.settle * (ABORTED_FACTOR if series.association == ABORTED else 1)
        return self.arrivals.quiet(series.key) >= wait

    def _settle(self, series: QueuedSeries) -> None:
        """Decide whether a complete series is predicted."""
        file = min(self.incoming.folder(series.key).glob("*.dcm"), default=None)
        conditions = {} if file is None else read_conditions(file)
        ignored = why_ignored(self.taking.rules, {**conditions, FILES: str(series.files)})
        if ignored is not None:
            self._move(series, IGNORED, ignored)
        elif series.files < series.predicted_files:
            late = f"{series.files} of its slices came after {series.predicted_files} were predicted and deleted"
            self._move(series, FAILED, f"{late}; send the whole series again")
        elif series.digest and self.queue.digest(series.key) == series.digest:
            self._move(series, DONE, "the same slices were predicted before")
        else:
            self._move(series, READY)
        self.arrivals.forget(series.key)

    def _move(self, series: QueuedSeries, state: str, reason: str = "", detail: str = "") -> bool:
        moved = self.queue.move(series, state, reason, detail)
        if moved:
            self.audit.write(state, series=series.key, peer=series.peer, files=series.files, reason=reason or None)
        return moved

    def _predict(self, series: QueuedSeries) -> None:
        digest = self.queue.digest(series.key)
        folder = self.results.folder(series.key, digest)
        if not self.results.is_complete(folder):
            if series.attempts >= ATTEMPTS:
                self._move(series, FAILED, f"the program ended {ATTEMPTS} times while it was predicted")
                return
            self.queue.count_attempt(series)
            if not self._write(series, folder):
                return
        if self.queue.predicted(series, digest, [destination.name for destination in self.destinations]):
            self.audit.write(
                "predicted", series=series.key, peer=series.peer, files=series.files, round=series.round + 1
            )
            self.results.remove(series.key, but=folder)
        else:  # a slice came meanwhile: the series is predicted again when it is complete
            self.results.remove(series.key)

    def _write(self, series: QueuedSeries, folder: Path) -> bool:
        """Predict a series and write its results; whether there are any.  An end of the node is not its fault."""
        shutil.rmtree(folder, ignore_errors=True)  # of a node that was killed
        try:
            scans = find_scans([self.incoming.folder(series.key)], modalities=self.predictor.bundle.expects.modalities)
            outcomes = list(self.predictor.predict(scans))
            predicted = [self._marked(outcome, series) for outcome in outcomes if isinstance(outcome, ScanPrediction)]
            refused = [outcome for outcome in outcomes if isinstance(outcome, NotPredicted)]
            if self.ended.is_set() and refused:
                raise OSError("the workers end with the node")
            written = [write_scan(prediction, self.predictor.bundle, folder, dicom=True) for prediction in predicted]
        except Exception as error:  # a bug must not end the node
            if isinstance(error, OSError) or self.ended.is_set():  # the disk, or the end: not the series
                self.queue.count_attempt(series, -1)
                raise
            known = isinstance(error, UserError)
            reason = "it holds no scan, or its results cannot be written" if known else type(error).__name__
            self._move(series, FAILED, reason if known else f"predicting failed with {reason}", repr(error))
            return False
        if not written:
            self._refuse(series, refused)
            return False
        if not dicom_results(folder):
            detail = "; ".join(problem.detail for scan in written for problem in scan.problems)
            self._move(series, FAILED, "its headers do not allow DICOM results", detail)
            shutil.rmtree(folder, ignore_errors=True)
            return False
        write_json(folder / OUTCOME, {"series": series.key, "round": series.round + 1, "files": series.files})
        return True

    def _marked(self, prediction: ScanPrediction, series: QueuedSeries) -> ScanPrediction:
        """Say in a later result that it replaces an earlier series."""
        if not series.round:
            return prediction
        detail = f"{series.predicted_files} files had arrived at the earlier result, {series.files} at this one"
        note = Problem(prediction.row.scan_id, "", "late_slices", detail, "predicted again")
        further = tuple(replace(each, problems=(*each.problems, note)) for each in prediction.further)
        return replace(prediction, problems=(*prediction.problems, note), further=further)

    def _refuse(self, series: QueuedSeries, refused: Sequence[NotPredicted]) -> None:
        first = refused[0].reason if refused else Problem("", "", "no_image", "no scan in it", "")
        # Reasons of a refusal are sizes and kinds; others may quote a header, and stay in the queue's file.
        if first.kind == "unsuitable":
            self._move(series, REFUSED, first.detail)
        else:
            self._move(series, FAILED, KINDS.get(first.kind, first.kind), first.detail)
