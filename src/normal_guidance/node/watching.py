"""The watched folder: files that appear in it are taken as if they had been sent.

A file is taken when its size has not changed for a while, and is deleted from the folder when the node has it.  Files
that are not DICOM images are moved to `not-taken`, so that they are judged once.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from normal_guidance.files import make_folder
from normal_guidance.node.audit import Audit
from normal_guidance.node.incoming import NotTakenError, Received, hash_of
from normal_guidance.node.receiver import read_image
from normal_guidance.node.series_queue import RELEASED, Stored

NOT_TAKEN = "not-taken"

QUIET_SECONDS = 5.0
"""A file that has not changed for so long is complete."""

PEER = "folder"
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
            verdict = self.store(read_image(file), PEER, RELEASED)
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
