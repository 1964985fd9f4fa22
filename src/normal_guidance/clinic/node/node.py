"""The node: one process that receives, predicts and sends, and goes on after a kill.

    STATE/
      lock            held by the one process that works here
      queue.sqlite    `series_queue`
      incoming/       what has arrived
      results/        what was predicted
      audit.jsonl     what happened, without patients' data

Every file may be read by its owner alone.
"""

from __future__ import annotations

import gc
import os
import shutil
import ssl
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import lock_folder, make_folder, private_files, remove_left_drafts_of
from normal_guidance.clinic.node.destination import Destination, Identity
from normal_guidance.clinic.node.incoming import Incoming, NotTakenError, Received, hash_of, read_received
from normal_guidance.clinic.node.partners import Audit, Callers, Peer, is_loopback
from normal_guidance.clinic.node.receiver import Listening, Receiver, read_image
from normal_guidance.clinic.node.send_dicom import Committer, DicomDestination, Reports
from normal_guidance.clinic.node.sending import Sending
from normal_guidance.clinic.node.series_queue import ABORTED, RELEASED, Limits, SeriesQueue, Stored
from normal_guidance.clinic.node.serving import Arrivals, NodeResults, Predicting, Taking
from normal_guidance.clinic.predict.dicomweb import DicomWeb, RemoteSeries
from normal_guidance.clinic.predict.predicting import Predictor

IDLE_SECONDS = 0.2  # a thread without work looks again after so long
ERROR_SECONDS = 5.0  # a thread whose step failed tries again after so long
CLEANING_SECONDS = 60.0
DAY = 24 * 60 * 60
LATE_ATTEMPTS = 5  # after so many attempts, a minute, a destination counts as down
FULL_SHARE = 0.9  # the queue is almost full from this share of its bytes on
STOP_SECONDS = 10.0  # running associations may take so long when the node ends
NOT_TAKEN = "not-taken"
QUIET_SECONDS = 5.0  # a file that has not changed for so long is complete
FOLDER_PEER = "folder"  # what the queue and the audit log call the folder
DAYS = 2  # studies of today and of this many days before are asked for
WEB_PEER = "dicomweb"  # what the queue and the audit log call the server


@dataclass(frozen=True)
class NodeSettings:
    """What a node does."""

    state: Path  # its folder
    listening: Listening | None  # None if it only watches a folder
    senders: tuple[Peer, ...] = ()
    destinations: tuple[Destination, ...] = ()
    watch: Path | None = None  # a folder whose files are taken
    pull: str | None = None  # the address of a DICOMweb server whose new series are taken
    taking: Taking = field(default_factory=Taking)
    limits: Limits = field(default_factory=Limits)
    keep: float = 1.0  # days for which the files of finished series are kept
    tls: ssl.SSLContext | None = None  # for connections to destinations and senders

    def __post_init__(self) -> None:
        if not self.senders and self.watch is None and self.pull is None:
            raise UserError("nobody may send: give --from AET@ADDRESS, a folder with --watch, or a server with --pull")
        if self.listening is not None and is_loopback(self.listening.address):
            far = next((peer for peer in self.senders if not is_loopback(peer.host)), None)
            if far is not None:
                raise UserError(
                    f"{far} cannot reach {self.listening.address}, where only this machine can; give --address with "
                    "the address of this machine in the hospital's network, or 0.0.0.0 for all its addresses"
                )
        names = [destination.name for destination in self.destinations]
        if len(set(names)) < len(names):
            raise UserError("--to names a destination twice; leave one of them out")


Store = Callable[[Received, str, str], Stored]  # writes an object and records it (`Receiver.store`)


@dataclass
class Watching:
    """Takes the files of a folder, or of folders in it, and deletes those that the node has.

    Files that are not DICOM images are moved to `not-taken`, so that they are judged once.
    """

    folder: Path
    store: Store
    audit: Audit

    def step(self) -> bool:
        """Take all complete files; whether there was one."""
        taken = [self._take(file) for file in list(self._complete())]
        return any(taken)

    def _complete(self) -> Iterator[Path]:
        for folder, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if name != NOT_TAKEN and not name.startswith(".")]
            for name in sorted(names):
                file = Path(folder, name)
                if name.startswith(".") or file.is_symlink():
                    continue
                try:
                    age = time.time() - file.stat().st_mtime
                except OSError:  # it has gone
                    continue
                if age >= QUIET_SECONDS:
                    yield file

    def _take(self, file: Path) -> bool:
        try:
            verdict = self.store(read_image(file), FOLDER_PEER, RELEASED)
            if verdict == "conflict":
                raise NotTakenError("an object with the same UID has other content")
        except NotTakenError as error:
            # Out of the way, without its name, which may name a patient, in the log.
            name = hash_of(str(file.relative_to(self.folder)), str(time.time_ns()))
            make_folder(self.folder / NOT_TAKEN)
            file.replace(self.folder / NOT_TAKEN / f"{name}{file.suffix if file.suffix == '.dcm' else ''}")
            self.audit.write("file not taken", file=name, reason=str(error))
            return False
        except OSError:  # it has gone, or may not be read; it is looked at again
            return False
        if verdict == "full":
            return False
        file.unlink(missing_ok=True)
        if file.parent != self.folder:
            with suppress(OSError):  # not empty
                file.parent.rmdir()
        return True


class PollError(Exception):
    """The server did not answer as it should; the next step asks again."""


@dataclass
class Polling:
    """Fetches series from a DICOMweb server that have as many objects as at the last step, and more than the node."""

    server: DicomWeb
    modalities: Sequence[str]  # those that the model takes; empty for all
    folder: Path  # for objects on their way to the queue
    store: Store
    queue: SeriesQueue
    audit: Audit
    seen: dict[str, int | None] = field(default_factory=dict)  # objects of series not fetched yet, at the last step

    def step(self) -> bool:
        """Fetch the series that have stopped to grow; whether there was one."""
        since = time.strftime("%Y%m%d", time.localtime(time.time() - DAYS * DAY))
        try:
            waiting = [
                series
                for modality in self.modalities or ("",)
                for series in self.server.series(modality=modality, since=since)
                if self._is_new(series)
            ]
            ready = [series for series in waiting if self.seen.get(_key(series), -1) == series.slices]
            self.seen = {_key(series): series.slices for series in waiting}
            for series in ready:
                self._take(series)
        except UserError as error:
            raise PollError(f"{self.server.url} does not answer, or not as DICOMweb does") from error
        return bool(ready)

    def _is_new(self, series: RemoteSeries) -> bool:
        known = self.queue.series(_key(series))
        return known is None or (series.slices is not None and series.slices > known.arrivals)

    def _take(self, series: RemoteSeries) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        make_folder(self.folder)
        self.server.fetch(series, self.folder)
        verdicts = [self._store(file) for file in sorted(self.folder.iterdir())]
        shutil.rmtree(self.folder, ignore_errors=True)
        self.audit.write("fetched", series=_key(series), files=len(verdicts), not_stored=verdicts.count(False))

    def _store(self, file: Path) -> bool:
        try:
            return self.store(read_image(file), WEB_PEER, RELEASED) in ("new", "known")
        except NotTakenError:
            return False


def _key(series: RemoteSeries) -> str:
    return hash_of(series.study_uid, series.series_uid)


class Loop(threading.Thread):
    """A thread that takes steps until the node ends; a step that fails is taken again after a pause."""

    def __init__(self, name: str, step: Callable[[], bool], ended: threading.Event, idle: float = IDLE_SECONDS) -> None:
        super().__init__(name=name, daemon=True)
        self.step, self.ended, self.idle = step, ended, idle
        self.problem = ""  # why the last step failed

    def run(self) -> None:
        while not self.ended.is_set():
            try:
                pause = 0.0 if self.step() else self.idle
                self.problem = ""
            except Exception as error:  # a full disk or a bug; health names it, and the node goes on
                reason = str(error) if isinstance(error, PollError) else type(error).__name__
                self.problem, pause = f"{self.name}: {reason}", ERROR_SECONDS
            self.ended.wait(pause)


class Node:
    """A running node; `run_node` makes it."""

    def __init__(self, settings: NodeSettings, predictor: Predictor) -> None:
        state = settings.state
        for sender in settings.senders:
            _ = sender.addresses  # an unknown host is told now, not when it calls
        self.settings, self.predictor, self.started = settings, predictor, time.time()
        self.ended = threading.Event()
        self.audit = Audit(state / "audit.jsonl")
        self.queue = SeriesQueue(state / "queue.sqlite", settings.limits)
        self.incoming, self.results = Incoming(state / "incoming"), NodeResults(state / "results")
        self.arrivals = Arrivals()
        listening = settings.listening or Listening("NGUIDE", "127.0.0.1", 0)
        peers = tuple(archive.address for archive in settings.destinations if isinstance(archive, DicomDestination))
        self.callers = Callers(settings.senders, peers)
        self.receiver = Receiver(listening, self.callers, self.queue, self.incoming, self.audit, self.arrivals.touch)
        self.reports = Reports(self.queue, self.audit)
        self.committer = Committer(
            Identity(listening.aet, tls=settings.tls), self.callers, self.queue, self.audit, self.ended
        )
        predicting = Predicting(
            *(predictor, self.queue, self.incoming, self.results, self.audit),
            *(settings.taking, settings.destinations, self.arrivals, self.ended),
        )
        self.loops = [Loop("predicting", predicting.step, self.ended)]
        for destination in settings.destinations:
            step = Sending(destination, self.queue, self.results, self.audit, self.reports).step
            self.loops.append(Loop(f"sending to {destination.name}", step, self.ended))
        self.loops.append(Loop("cleaning", self.clean, self.ended, idle=CLEANING_SECONDS))
        if settings.watch is not None:
            watching = Watching(settings.watch, self.receiver.store, self.audit)
            self.loops.append(Loop("watching", watching.step, self.ended, idle=1.0))
        if settings.pull is not None:
            modalities, folder = predictor.bundle.expects.modalities, state / "fetching"
            polling = Polling(DicomWeb(settings.pull), modalities, folder, self.receiver.store, self.queue, self.audit)
            self.loops.append(Loop("pulling", polling.step, self.ended, idle=settings.taking.settle))

    def start(self) -> int | None:
        """Take up what an earlier start left, and begin; return the port, if the node listens."""
        self.recover()
        port = None
        if self.settings.listening is not None:
            port = self.receiver.start(self.reports.receive, self.committer.receive)
        for loop in self.loops:
            loop.start()
        gc.collect()
        gc.freeze()  # what is loaded stays: later collections skip it
        self.audit.write("started", port=port, queue=self.queue.by_state())
        return port

    def stop(self) -> None:
        """End: no new associations, the running ones finish or are aborted, each thread finishes its step."""
        self.ended.set()
        self.receiver.stop(STOP_SECONDS)
        for loop in self.loops:
            loop.join(STOP_SECONDS)
        self.audit.write("stopped", queue=self.queue.by_state())
        if not any(loop.is_alive() for loop in self.loops):  # a thread that still works ends with the process
            self.queue.close()

    def recover(self) -> None:
        """Take up objects whose file was written and whose row was not, and delete what was forgotten."""
        remove_left_drafts_of(self.incoming.path)
        self.queue.abort_open()
        known = self.queue.names()
        for folder in sorted(self.incoming.path.iterdir()):
            series = self.queue.series(folder.name)
            for file in sorted(folder.glob("*.dcm")):
                if file.stem in known:
                    continue
                try:
                    if series is not None and series.purged:
                        raise NotTakenError("its series is finished")
                    self.queue.add(read_received(file.read_bytes()), "recovered", ABORTED)
                except NotTakenError:
                    file.unlink(missing_ok=True)

    def clean(self) -> bool:
        """Delete the files of series that were finished long enough ago."""
        for series in self.queue.finished_before(time.time() - self.settings.keep * DAY):
            self.receiver.forget(series)
            self.results.remove(series.key)
        return False

    def problems(self) -> list[str]:
        """What keeps the node from working: for people and for monitoring."""
        problems = [*self.receiver.problems(), *(loop.problem for loop in self.loops if loop.problem)]
        problems += [f"{loop.name}: the thread has ended" for loop in self.loops if not loop.is_alive()]
        late = [dispatch for dispatch in self.queue.late_dispatches() if dispatch.attempts >= LATE_ATTEMPTS]
        for name in dict.fromkeys(dispatch.destination for dispatch in late):
            waiting = [dispatch for dispatch in late if dispatch.destination == name]
            problems.append(f"{len(waiting)} results wait for {name}: {waiting[0].reason}")
        if self.queue.held_bytes() >= FULL_SHARE * self.settings.limits.bytes:
            problems.append("the queue is almost full")
        return problems


@contextmanager
def run_node(settings: NodeSettings, predictor: Predictor) -> Iterator[tuple[Node, int | None]]:
    """Run a node in the background of a block; yields it and its port."""
    with ExitStack() as stack:
        stack.enter_context(private_files())
        make_folder(settings.state)
        settings.state.chmod(0o700)
        stack.enter_context(lock_folder(settings.state))
        for folder in ("incoming", "results"):
            make_folder(settings.state / folder)
        stack.enter_context(predictor)
        node = Node(settings, predictor)
        port = node.start()
        try:
            yield node, port
        finally:
            node.stop()
