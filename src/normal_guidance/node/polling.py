"""A DICOMweb server that is asked for new series, for sites whose archive does not send.

A series is fetched when the server has had the same number of its objects twice in a row.  What was fetched once is
fetched again only if the server has more of it.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from pathlib import Path

from normal_guidance.clinical.dicomweb import DicomWeb, RemoteSeries
from normal_guidance.errors import UserError
from normal_guidance.files import make_folder
from normal_guidance.node.audit import Audit
from normal_guidance.node.incoming import NotTakenError, hash_of
from normal_guidance.node.receiver import read_image
from normal_guidance.node.series_queue import RELEASED, SeriesQueue
from normal_guidance.node.watching import Store

DAYS = 2
"""Studies of today and of this many days before are asked for."""

PEER = "dicomweb"
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
            return self.store(read_image(file), PEER, RELEASED) in ("new", "known")
        except NotTakenError:
            return False


def _key(one: RemoteSeries) -> str:
    return hash_of(one.study_uid, one.series_uid)
