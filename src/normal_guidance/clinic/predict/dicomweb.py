"""Scans from a DICOMweb server, and results to one: QIDO finds series, WADO fetches them, STOW stores results.

The token comes from the environment variable `TOKEN`, never from the command line, which other users of a machine see.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import urlsplit

from normal_guidance.base.errors import UserError, shorten
from normal_guidance.base.files import folder_atomically
from normal_guidance.base.system import importing
from normal_guidance.clinic.predict.new_scans import is_url

with importing("node", "DICOMweb needs dicomweb_client, pydicom and requests"):
    import requests
    from dicomweb_client.api import DICOMwebClient
    from pydicom import dcmread

TOKEN = "NGUIDE_DICOMWEB_TOKEN"  # environment variable of the bearer token
SECONDS = (10.0, 300.0)  # longest wait for a connection, and for the next bytes of an answer
ATTEMPTS = 2  # calls of a server that is busy or cannot be reached, two seconds apart
UID = re.compile(r"[0-9]+(\.[0-9]+)*")

LOCAL = ("localhost", "127.0.0.1", "::1")
PAGE = 200  # series that are asked for at a time
AS_STORED = (("application/dicom", "*"),)  # asks for objects as the server holds them: it need not decompress them
_STUDY, _SERIES, _MODALITY, _COUNT = "0020000D", "0020000E", "00080060", "00201209"


class RemoteSeries(NamedTuple):
    """A series on a server."""

    study_uid: str
    series_uid: str
    modality: str = ""
    slices: int | None = None  # how many objects the server has; None if it does not say it


class WebPlace(NamedTuple):
    """A server by its DICOMweb root, and the UIDs of the study or series on it that a user means; empty for all."""

    server: str
    study: str = ""
    series: str = ""


def parse_place(url: str) -> WebPlace:
    """Take an address apart: SERVER, SERVER/studies/UID or SERVER/studies/UID/series/UID."""
    parts = urlsplit(url)
    if not is_url(url) or not parts.hostname or parts.username or parts.password or parts.query or parts.fragment:
        raise UserError(
            f"{shorten(url)} is not the address of a DICOMweb server; give for example https://pacs/dicom-web"
        )
    server, _, rest = url.rstrip("/").partition("/studies/")
    study, _, rest = rest.partition("/")
    word, _, series = rest.partition("/")
    for uid in (study, series):
        if uid and not (UID.fullmatch(uid) and len(uid) <= 64):
            raise UserError(
                f"{shorten(url)}: {shorten(uid)!r} is not a UID; give SERVER/studies/UID or "
                "SERVER/studies/UID/series/UID"
            )
    if word not in ("", "series") or (word and not series):
        raise UserError(f"{shorten(url)} has {shorten(rest)!r} after the study; give SERVER/studies/UID/series/UID")
    return WebPlace(server, study, series)


def parse_server(url: str) -> DicomWeb:
    """Make the server of an address that names neither study nor series."""
    place = parse_place(url)
    if place.study:
        raise UserError(f"{url} names a study; give the server alone: {place.server}")
    return DicomWeb(place.server)


def refuse_open_token(url: str, token: str) -> None:
    """Refuse to send a token without encryption to another machine."""
    parts = urlsplit(url)
    if token and parts.scheme != "https" and parts.hostname not in LOCAL:
        raise UserError(f"{shorten(url)} is not https, so that anyone could read the token; give an https address")


class DicomWeb:
    """A DICOMweb server by the address of its root, such as https://pacs/dicom-web."""

    def __init__(self, url: str) -> None:
        self.url, token = url, os.environ.get(TOKEN, "")
        refuse_open_token(url, token)
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            self._client = DICOMwebClient(url, headers=headers, timeout=SECONDS)
            self._client.set_http_retry_params(max_attempts=ATTEMPTS)
        except ValueError as error:
            raise UserError(f"{shorten(url)} is not the address of a DICOMweb server ({error})") from error

    def series(self, study: str = "", series: str = "", *, modality: str = "", since: str = "") -> list[RemoteSeries]:
        """Find series, of a study, a modality, or of studies from a date (YYYYMMDD) on."""
        filters = {"SeriesInstanceUID": series, "Modality": modality, "StudyDate": f"{since}-" if since else ""}
        wanted = {name: value for name, value in filters.items() if value}
        rows: list[RemoteSeries] = []
        with self._answering("search for series"):
            while True:
                page = self._client.search_for_series(
                    study or None, search_filters=wanted, fields=[_COUNT], limit=PAGE, offset=len(rows)
                )
                rows += map(_remote, page)
                if len(page) < PAGE:
                    return rows

    def fetch(self, series: RemoteSeries, folder: Path) -> None:
        """Write the objects of a series into an empty folder."""
        uid, wanted, count = series.series_uid, series.slices, 0
        with self._answering(f"fetch series {uid}"):
            for dataset in self._client.iter_series(series.study_uid, uid, media_types=AS_STORED):
                count += 1
                dataset.save_as(folder / f"{count:05d}.dcm", enforce_file_format=True)
        if wanted is not None and count < wanted:
            raise UserError(f"{self.url} sent {count} of {wanted} objects of series {uid}; try again later")

    def store(self, files: Sequence[Path]) -> None:
        """Store files; those that the server has already stay as they are."""
        datasets = [dcmread(file) for file in files]
        with self._answering("store results"):
            answer = self._client.store_instances(datasets)
        failed = answer.get("FailedSOPSequence") or []
        if failed:
            reasons = ", ".join(sorted({f"{int(item.get('FailureReason', 0)):04X}" for item in failed}))
            raise UserError(f"{self.url} refused {len(failed)} of {len(files)} results with reason {reasons}")

    @contextmanager
    def _answering(self, what: str) -> Iterator[None]:
        """Turn errors of the network and of the answer into messages."""
        try:
            yield
        except requests.HTTPError as error:
            code = None if error.response is None else error.response.status_code
            hint = f"; set {TOKEN}, or renew it" if code in (401, 403) else "; check the address"
            raise UserError(f"{self.url} did not {what}: HTTP status {code}{hint}") from error
        except requests.RequestException as error:
            reason = type(error).__name__
            raise UserError(f"{self.url} did not {what}: it cannot be reached ({reason}); check the address") from error
        except (ValueError, TypeError, KeyError, AttributeError, IndexError) as error:  # an answer that is not DICOMweb
            raise UserError(f"{self.url} did not {what}: its answer is not DICOMweb; check the address") from error


def _remote(row: dict[str, Any]) -> RemoteSeries:
    tags = (_STUDY, _SERIES, _MODALITY, _COUNT)
    study, series, modality, count = (str((row.get(tag, {}).get("Value") or [""])[0]) for tag in tags)
    for uid in (study, series):
        if not UID.fullmatch(uid):
            raise ValueError(f"{shorten(uid)!r} is not a UID")
    return RemoteSeries(study, series, modality, int(count) if count else None)


def fetch_all(place: WebPlace, folder: Path, modalities: Iterable[str]) -> list[Path]:
    """Fetch a study's series of these modalities, or one series, each into a folder, unless that is there."""
    if not place.study:
        raise UserError(f"{place.server} names no study; give {place.server}/studies/UID")
    server, wanted = DicomWeb(place.server), set(modalities)
    series = server.series(place.study, place.series)
    if not series:
        raise UserError(f"{place.server} has no series {place.series or f'of study {place.study}'}; check the UIDs")
    chosen = [each for each in series if place.series or not wanted or each.modality in wanted]
    if not chosen:
        others = ", ".join(sorted({each.modality for each in series}))
        raise UserError(
            f"study {place.study} on {place.server} has {len(series)} series of {others}, none of "
            f"{' or '.join(sorted(wanted))}"
        )
    folders = {folder / f"series-{each.series_uid}": each for each in chosen}
    for out, each in folders.items():
        if not out.is_dir():
            with folder_atomically(out) as draft:
                server.fetch(each, draft)
    return list(folders)
