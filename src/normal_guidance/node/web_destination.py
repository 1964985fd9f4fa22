"""A DICOMweb server that takes results by STOW-RS."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from normal_guidance.clinical.dicomweb import DicomWeb, parse_server
from normal_guidance.clinical.result_folder import dicom_results
from normal_guidance.errors import UserError
from normal_guidance.node.destinations import About, Accepted, NotSentError


@dataclass(frozen=True)
class WebDestination:
    """A DICOMweb server.

    Args:
        url: address of its root, as https://pacs/dicom-web.
    """

    url: str
    commits: bool = False

    @property
    def name(self) -> str:
        return self.url

    def files(self, folder: Path) -> list[Path]:
        """The DICOM results."""
        return dicom_results(folder)

    def send(self, files: Sequence[Path], about: About, accepted: Accepted) -> None:
        """Store all files together."""
        try:
            DicomWeb(self.url).store(files)
        except UserError as error:
            raise NotSentError(str(error)) from error
        for file in files:
            accepted(file)


def parse_web(url: str) -> WebDestination:
    """Make a destination from the address of a server."""
    return WebDestination(parse_server(url).url)
