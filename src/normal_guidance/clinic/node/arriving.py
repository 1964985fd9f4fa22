"""The watched folder: files that appear in it are taken as if they had been sent.

A file is taken when its size has not changed for a while, and is deleted from the folder when the node has it.  Files
that are not DICOM images are moved to `not-taken`, so that they are judged once.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import make_folder
from normal_guidance.clinic.node.incoming import NotTakenError, Received, hash_of
from normal_guidance.clinic.node.partners import Audit
from normal_guidance.clinic.node.receiver import read_image
from normal_guidance.clinic.node.series_queue import RELEASED, SeriesQueue, Stored
from normal_guidance.clinic.predict.dicomweb import DicomWeb, RemoteSeries

NOT_TAKEN = "not-taken"

QUIET_SECONDS = 5.0
"""A file that has not changed for so long is complete."""

FOLDER_PEER = "folder"
"""What the queue and the audit log call the folder."""

Store = Callable[[Received, str, str], Stored]


class Watching:
    """Takes the files of a folder.

    Args:
        folder: the folder; series may lie in folders of their own.
        store: writes an object and records it (`Receiver.store`).
        audit: records files that are not taken.
    """

    def __init__(self, folder: Path, store: Store, audit: Audit) -> None:
        self.folder, self.store, self.audit = folder, store, audit

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
        self._remove_empty(file.parent)
        return True

    def _put_aside(self, file: Path, reason: str) -> None:
        """Move a file out of the way, without its name, which may name a patient, in the log."""
        name = hash_of(str(file.relative_to(self.folder)), str(time.time_ns()))
        aside = self.folder / NOT_TAKEN
        make_folder(aside)
        file.replace(aside / f"{name}{file.suffix if file.suffix == '.dcm' else ''}")
        self.audit.write("file not taken", file=name, reason=reason)

    def _remove_empty(self, folder: Path) -> None:
        """Remove the folder of a series when its last file is taken."""
        if folder != self.folder:
            try:
                folder.rmdir()
            except OSError:  # not empty
                return


# A DICOMweb server that is asked for new series, for sites whose archive does not send.
# A series is fetched when the server has had the same number of its objects twice in a row.  What was fetched once is
# fetched again only if the server has more of it.


DAYS = 2
"""Studies of today and of this many days before are asked for."""

WEB_PEER = "dicomweb"
"""What the queue and the audit log call the server."""


class PollError(Exception):
    """The server did not answer as it should; the next step asks again."""


class Polling:
    """Fetches new series.

    Args:
        url: address of the server.
        modalities: those that the model takes; empty for all.
        folder: for objects on their way to the queue.
        store: writes an object and records it (`Receiver.store`).
        queue: knows what was fetched.
        audit: records what is fetched.
    """

    def __init__(
        self, url: str, modalities: Sequence[str], folder: Path, store: Store, queue: SeriesQueue, audit: Audit
    ) -> None:
        self.server, self.modalities, self.folder = DicomWeb(url), tuple(modalities), folder
        self.store, self.queue, self.audit = store, queue, audit
        self._seen: dict[str, int | None] = {}
        """Objects of each series that is not fetched yet, at the last step."""

    def step(self) -> bool:
        """Fetch the series that have stopped to grow; whether there was one."""
        try:
            found = self._search()
            waiting = [one for one in found if self._is_new(one)]
            ready = [one for one in waiting if self._seen.get(_key(one), -1) == one.slices]
            self._seen = {_key(one): one.slices for one in waiting}
            for one in ready:
                self._take(one)
        except UserError as error:
            raise PollError(f"{self.server.url} does not answer, or not as DICOMweb does") from error
        return bool(ready)

    def _search(self) -> list[RemoteSeries]:
        since = time.strftime("%Y%m%d", time.localtime(time.time() - DAYS * 86_400))
        return [
            one for modality in self.modalities or ("",) for one in self.server.series(modality=modality, since=since)
        ]

    def _is_new(self, one: RemoteSeries) -> bool:
        known = self.queue.series(_key(one))
        return known is None or (one.slices is not None and one.slices > known.arrivals)

    def _take(self, one: RemoteSeries) -> None:
        shutil.rmtree(self.folder, ignore_errors=True)
        make_folder(self.folder)
        self.server.fetch(one, self.folder)
        verdicts = [self._store(file) for file in sorted(self.folder.iterdir())]
        shutil.rmtree(self.folder, ignore_errors=True)
        self.audit.write("fetched", series=_key(one), files=len(verdicts), not_stored=verdicts.count(False))

    def _store(self, file: Path) -> bool:
        """Hand over an object."""
        try:
            return self.store(read_image(file), WEB_PEER, RELEASED) in ("new", "known")
        except NotTakenError:
            return False


def _key(one: RemoteSeries) -> str:
    return hash_of(one.study_uid, one.series_uid)
