"""Where results go: a small interface, and a table of its kinds.

To add a kind, write a class with `name`, `files` and `send`, and a row of `KINDS`.
"""

from __future__ import annotations

import ssl
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, runtime_checkable

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import make_folder, write_atomically
from normal_guidance.clinic.node.partners import Peer
from normal_guidance.clinic.results.result_folder import dicom_results


class NotSentError(Exception):
    """A destination that did not take a file, with the reason; sending is tried again later."""


@dataclass(frozen=True)
class About:
    """What is sent.

    Args:
        series: the hash that names the series in this node.
        study_uid: of the source.
        series_uid: of the source.
        folder: the results (`clinical.result_folder`): SCAN/prediction.json, SCAN/dicom/ and so on.
        round: 1 for the first result of a series; later ones replace it.
    """

    series: str
    study_uid: str
    series_uid: str
    folder: Path
    round: int = 1


Accepted = Callable[[Path], object]
"""Receives each file when the destination has it, so that it is not sent again."""


@runtime_checkable
class Destination(Protocol):
    """Takes the results of a series."""

    @property
    def name(self) -> str:
        """What the user wrote; the queue knows a destination by it."""

    @property
    def commits(self) -> bool:
        """Whether it is to be asked for storage commitment."""

    def files(self, folder: Path) -> list[Path]:
        """The files of the results that it takes; none is a reason to fail."""

    def send(self, files: Sequence[Path], about: About, accepted: Accepted) -> None:
        """Send files, each of which the destination may have already; raise NotSentError if one is not accepted."""


@dataclass(frozen=True)
class FolderDestination:
    """Copies DICOM results to a folder, for sites without a DICOM network."""

    path: Path
    commits: bool = False

    @property
    def name(self) -> str:
        return f"folder:{self.path}"

    def files(self, folder: Path) -> list[Path]:
        """The DICOM results."""
        return dicom_results(folder)

    def send(self, files: Sequence[Path], about: About, accepted: Accepted) -> None:
        """Copy each file to SERIES/ROUND, where it appears when it is complete."""
        for file in files:
            out = self.path / about.series / str(about.round) / "-".join(file.relative_to(about.folder).parts[1:])
            try:
                make_folder(out.parent)
                write_atomically(out, file.read_bytes())
            except (OSError, UserError) as error:
                raise NotSentError(f"{self.path} cannot be written") from error
            accepted(file)


@dataclass(frozen=True)
class Identity:
    """How this node presents itself to destinations."""

    aet: str
    commit: bool = False
    tls: ssl.SSLContext | None = None


def peers_of(destinations: Sequence[Destination]) -> tuple[Peer, ...]:
    """The DICOM partners among the destinations."""
    return tuple(peer for one in destinations if isinstance(peer := getattr(one, "peer", None), Peer))
