"""Where results go: what every kind of destination has, and the simplest kind; `sending` has the table of kinds."""

from __future__ import annotations

import ssl
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import make_folder, write_atomically
from normal_guidance.clinic.results.result_folder import dicom_results


class NotSentError(Exception):
    """A destination that did not take a file, with the reason; sending is tried again later."""


@dataclass(frozen=True)
class SentSeries:
    """A series by its hash in this node, and its results (SCAN/prediction.json and so on)."""

    key: str
    folder: Path
    round: int = 1  # later results of a series, from 2 on, replace the first


Accepted = Callable[[Path], object]  # receives each file when the destination has it, so that it is not sent again


@dataclass(frozen=True)
class Destination(ABC):
    """Takes the results of a series."""

    address: object  # a folder, a partner or a URL
    kind: ClassVar[str] = ""  # what the user writes before it

    @property
    def name(self) -> str:
        """What the user wrote; the queue knows a destination by it."""
        return f"{self.kind}{self.address}"

    def files(self, folder: Path) -> list[Path]:
        """The files of the results that it takes; none is a reason to fail."""
        return dicom_results(folder)

    @abstractmethod
    def send(self, files: Sequence[Path], series: SentSeries, accepted: Accepted) -> None:
        """Send files, each of which the destination may have already; raise NotSentError if one is not accepted."""


@dataclass(frozen=True)
class Identity:
    """How this node presents itself to destinations."""

    aet: str
    commit: bool = False
    tls: ssl.SSLContext | None = None


@dataclass(frozen=True)
class FolderDestination(Destination):
    """Copies DICOM results to a folder, for sites without a DICOM network."""

    address: Path
    kind = "folder:"

    def send(self, files: Sequence[Path], series: SentSeries, accepted: Accepted) -> None:
        """Copy each file to SERIES/ROUND, where it appears when it is complete."""
        for file in files:
            out = self.address / series.key / str(series.round) / "-".join(file.relative_to(series.folder).parts[1:])
            try:
                make_folder(out.parent)
                write_atomically(out, file.read_bytes())
            except (OSError, UserError) as error:
                raise NotSentError(f"{self.address} cannot be written") from error
            accepted(file)
