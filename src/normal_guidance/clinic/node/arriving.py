"""Series that nobody sends: files that appear in a watched folder, and new series of a DICOMweb server.

A file of the folder is taken when it has not changed for a while, and is deleted when the node has it.  Files that are
not DICOM images are moved to `not-taken`, so that they are judged once.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import make_folder
from normal_guidance.clinic.node.incoming import NotTakenError, Received, hash_of
from normal_guidance.clinic.node.partners import Audit
from normal_guidance.clinic.node.receiver import read_image
from normal_guidance.clinic.node.series_queue import RELEASED, SeriesQueue, Stored
from normal_guidance.clinic.predict.dicomweb import DicomWeb, RemoteSeries

NOT_TAKEN = "not-taken"
QUIET_SECONDS = 5.0  # a file that has not changed for so long is complete
FOLDER_PEER = "folder"  # what the queue and the audit log call the folder
Store = Callable[[Received, str, str], Stored]


@dataclass
class Watching:
    """Takes the files of a folder, in which series may lie in folders of their own."""

    folder: Path
    store: Store  # writes an object and records it (`Receiver.store`)
    audit: Audit

    def step(self) -> bool:
        """Take all complete files; whether there was one."""
        taken = False
        for file in list(self._complete()):
            taken = self._take(file) or taken
        return taken

    def _complete(self) -> Iterator[Path]:
        for place, folders, names in os.walk(self.folder):
            folders[:] = [name for name in folders if name != NOT_TAKEN and not name.startswith(".")]
            for name in sorted(names):
                file = Path(place, name)
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
        except NotTakenError as error:
            self._put_aside(file, str(error))
            return False
        except OSError:  # it has gone, or may not be read; it is looked at again
            return False
        if verdict == "conflict":
            self._put_aside(file, "an object with the same UID has other content")
            return False
        if verdict == "full":
            return False
        file.unlink(missing_ok=True)
        if file.parent != self.folder:
            with suppress(OSError):  # not empty
                file.parent.rmdir()
        return True

    def _put_aside(self, file: Path, reason: str) -> None:
        """Move a file out of the way, without its name, which may name a patient, in the log."""
        name = hash_of(str(file.relative_to(self.folder)), str(time.time_ns()))
        aside = self.folder / NOT_TAKEN
        make_folder(aside)
        file.replace(aside / f"{name}{file.suffix if file.suffix == '.dcm' else ''}")
        self.audit.write("file not taken", file=name, reason=reason)


DAYS = 2  # studies of today and of this many days before are asked for
WEB_PEER = "dicomweb"  # what the queue and the audit log call the server


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
        since = time.strftime("%Y%m%d", time.localtime(time.time() - DAYS * 86_400))
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
