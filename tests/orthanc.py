"""Orthanc, a PACS with DICOMweb, on ports of its own: for tests of what is stored, sent and shown."""

import json
import os
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

PROGRAM = os.environ.get("ORTHANC") or shutil.which("Orthanc") or "/usr/sbin/Orthanc"
PLUGIN = Path(os.environ.get("ORTHANC_DICOMWEB") or "/usr/share/orthanc/plugins/libOrthancDicomWeb.so")

PATIENCE = 60
"""Seconds until a start counts as failed."""


@dataclass(frozen=True)
class Orthanc:
    """A running Orthanc."""

    http_port: int
    dicom_port: int
    aet: str = "ORTHANC"

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.http_port}"

    @property
    def dicomweb(self) -> str:
        return f"{self.url}/dicom-web"

    def get(self, path: str) -> object:
        """The JSON answer of its REST interface."""
        with urllib.request.urlopen(self.url + path, timeout=PATIENCE) as answer:
            return json.load(answer)

    def store(self, file: Path) -> dict:
        """Upload a file by HTTP, and return what Orthanc says of it."""
        request = urllib.request.Request(f"{self.url}/instances", file.read_bytes(), method="POST")
        with urllib.request.urlopen(request, timeout=PATIENCE) as answer:
            return json.load(answer)


@contextmanager
def run_orthanc(folder: Path, **configuration: object) -> Iterator[Orthanc]:
    """Start Orthanc with an empty database, wait until it answers, and stop it; skip where it is missing."""
    if not Path(PROGRAM).exists() or not PLUGIN.exists():
        pytest.skip("ORTHANC WITH DICOMWEB IS NOT INSTALLED (apt install orthanc orthanc-dicomweb): NO PACS IS TESTED")
    one = Orthanc(*free_ports(2))
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "orthanc.json").write_text(json.dumps(_configuration(one, folder) | configuration))
    with (folder / "orthanc.log").open("w") as log:
        process = subprocess.Popen([PROGRAM, folder / "orthanc.json"], stdout=log, stderr=log)
    try:
        _wait(one, process, folder / "orthanc.log")
        yield one
    finally:
        process.terminate()
        process.wait(PATIENCE)


def free_ports(count: int) -> list[int]:
    """Ports that are free now; all are held until the last is known, so that they differ."""
    sockets = [socket.create_server(("127.0.0.1", 0)) for _ in range(count)]
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


def _configuration(one: Orthanc, folder: Path) -> dict[str, object]:
    return {
        "Name": "test",
        "StorageDirectory": str(folder / "storage"),
        "Plugins": [str(PLUGIN)],
        "HttpPort": one.http_port,
        "DicomPort": one.dicom_port,
        "DicomAet": one.aet,
        "RemoteAccessAllowed": False,
        "AuthenticationEnabled": False,
        "DicomAlwaysAllowStore": True,
    }


def _wait(one: Orthanc, process: subprocess.Popen, log: Path) -> None:
    until = time.monotonic() + PATIENCE
    while time.monotonic() < until and process.poll() is None:
        try:
            one.get("/system")
            return
        except (urllib.error.URLError, ConnectionError):
            time.sleep(0.1)
    process.kill()
    pytest.fail(f"Orthanc did not start:\n{log.read_text()[-2000:]}")
