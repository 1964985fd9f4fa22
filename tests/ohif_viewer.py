"""OHIF, a web viewer for DICOM, in front of a DICOMweb server: one address for both, so that browsers ask nothing.

npm has the built viewer in one package; its dependencies, which are for building, are not needed.
"""

import base64
import hashlib
import http.server
import mimetypes
import shutil
import subprocess
import tarfile
import tempfile
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

PACKAGE = "@ohif/app@3.12.10"
SHA512 = "0kuF66Mq9c9dMD++bUsTjMrJpXJwaZhz9B4uS244DawAjSkTwIYFU93pxPuRUQixaRi7QAHlF3Fe1qudBlZrmA=="
"""Of the package, as npm's lock files have it."""

HERE = Path(__file__).parent / "ohif"
CACHE = HERE / "node_modules"
"""Ignored by git."""


def built_viewer() -> Path:
    """The folder with the viewer's index.html, fetched once; skip where npm or its registry is missing."""
    folder = CACHE / PACKAGE.replace("/", "-")
    if not (folder / "index.html").is_file():
        CACHE.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=CACHE) as draft:
            _unpack(_fetch(Path(draft)), Path(draft))
            shutil.rmtree(folder, ignore_errors=True)
            (Path(draft) / "package" / "dist").rename(folder)
    return folder


def _fetch(folder: Path) -> Path:
    npm = shutil.which("npm")
    if npm is None:
        pytest.skip("NPM IS NOT INSTALLED: WHAT THE VIEWER OHIF SHOWS IS NOT TESTED")
    command = [npm, "pack", PACKAGE, "--pack-destination", str(folder), "--loglevel=error"]
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
    if done.returncode:
        pytest.skip(f"NPM CANNOT FETCH {PACKAGE}: WHAT THE VIEWER OHIF SHOWS IS NOT TESTED\n{done.stderr[-500:]}")
    (archive,) = folder.glob("*.tgz")
    return archive


def _unpack(archive: Path, folder: Path) -> None:
    found = base64.b64encode(hashlib.sha512(archive.read_bytes()).digest()).decode()
    assert found == SHA512, f"{PACKAGE} has the SHA-512 {found}, not the one of {Path(__file__).name}; compare both"
    with tarfile.open(archive) as content:
        content.extractall(folder, filter="data")


@contextmanager
def serve_viewer(dicomweb: str) -> Iterator[str]:
    """Serve OHIF with the studies of a DICOMweb server, and yield the address."""
    folder = built_viewer()
    handler = type("Handler", (_Handler,), {"folder": folder, "dicomweb": dicomweb})
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


class _Handler(http.server.BaseHTTPRequestHandler):
    """Files of the viewer, its configuration, and DICOMweb, which is asked of the other server."""

    folder: Path
    dicomweb: str

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path.startswith("/dicom-web/"):
            self._pass_on()
        elif path == "/app-config.js":
            self._answer(200, "text/javascript", (HERE / "app-config.js").read_bytes())
        else:
            file = self.folder / path.lstrip("/")
            file = file if file.is_file() else self.folder / "index.html"  # addresses within the viewer
            self._answer(200, mimetypes.guess_type(file.name)[0] or "application/octet-stream", file.read_bytes())

    def _pass_on(self) -> None:
        request = urllib.request.Request(self.dicomweb + self.path.removeprefix("/dicom-web"))
        request.add_header("Accept", self.headers.get("Accept", "*/*"))
        # The metadata that Orthanc writes hold its own addresses, for bulk data.
        request.add_header("Forwarded", f"host={self.headers['Host']};proto=http")
        try:
            with urllib.request.urlopen(request, timeout=60) as answer:
                self._answer(answer.status, answer.headers["Content-Type"], answer.read())
        except urllib.error.HTTPError as error:
            self._answer(error.code, "text/plain", error.read())

    def _answer(self, status: int, kind: str | None, content: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind or "application/octet-stream")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    def log_message(self, format: str, *arguments: object) -> None:
        pass
