"""A real Orthanc for tests and benchmarks: started on free ports with a configuration of its own, and stopped."""

from __future__ import annotations

import json
import shutil
import socket
import subprocess
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ORTHANC = shutil.which("Orthanc") or ("/usr/sbin/Orthanc" if Path("/usr/sbin/Orthanc").exists() else None)
DICOMWEB = Path("/usr/share/orthanc/plugins/libOrthancDicomWeb.so")
MISSING = "ORTHANC IS NOT INSTALLED: RESULTS ARE NOT SENT TO A REAL ARCHIVE HERE (apt install orthanc orthanc-dicomweb)"

HANGS = 120
"""Seconds after which Orthanc does not start, on however slow a machine."""


def free_port() -> int:
    """A port that is free now."""
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        return bound.getsockname()[1]


@dataclass
class Orthanc:
    """A running archive, or one that is stopped and can be started again with the same content."""

    folder: Path
    aet: str
    dicom_port: int
    http_port: int
    process: subprocess.Popen[bytes] | None = None

    @property
    def to(self) -> str:
        """What `--to` takes."""
        return f"{self.aet}@127.0.0.1:{self.dicom_port}"

    @property
    def dicomweb(self) -> str:
        """The address of DICOMweb, where the plugin is installed."""
        return f"http://127.0.0.1:{self.http_port}/dicom-web"

    def start(self) -> None:
        """Start it and wait until it answers."""
        with (self.folder / "log").open("ab") as log:
            self.process = subprocess.Popen([ORTHANC, str(self.folder / "orthanc.json")], stdout=log, stderr=log)
        begin = time.monotonic()
        while True:
            try:
                self.get("/system")
                return
            except (urllib.error.URLError, ConnectionError):
                assert self.process.poll() is None, (self.folder / "log").read_text()
                assert time.monotonic() - begin < HANGS, "Orthanc does not answer"
                time.sleep(0.1)

    def stop(self) -> None:
        """Stop it and keep its content."""
        if self.process is not None:
            self.process.terminate()
            self.process.wait(HANGS)
            self.process = None

    def get(self, path: str, content: bytes | None = None) -> Any:
        """An answer of its REST interface; content is posted."""
        with urllib.request.urlopen(f"http://127.0.0.1:{self.http_port}{path}", content, timeout=HANGS) as answer:
            return json.loads(answer.read())

    def post(self, path: str, content: Any) -> Any:
        """An answer to JSON that is posted to its REST interface."""
        return self.get(path, json.dumps(content).encode())

    def store(self, file: Path) -> Any:
        """Upload a file, and return what Orthanc says of it."""
        return self.get("/instances", file.read_bytes())

    def instances(self) -> list[Mapping[str, str]]:
        """The main tags of every object, and the number of the series' UIDs that it belongs to."""
        return [instance["MainDicomTags"] for instance in self.get("/instances?expand")]

    def series(self) -> list[Mapping[str, Any]]:
        """Every series."""
        return self.get("/series?expand")


def make_orthanc(folder: Path, peers: Mapping[str, Sequence[Any]] | None = None) -> Orthanc:
    """Write a configuration; `peers` are DICOM partners by AE title: host and port."""
    folder.mkdir(parents=True, exist_ok=True)
    archive = Orthanc(folder, "ARCHIVE", free_port(), free_port())
    settings = {
        "Name": "test",
        "StorageDirectory": str(folder / "storage"),
        "IndexDirectory": str(folder / "storage"),
        "DicomAet": archive.aet,
        "DicomPort": archive.dicom_port,
        "HttpPort": archive.http_port,
        "RemoteAccessAllowed": False,
        "AuthenticationEnabled": False,
        "DicomCheckModalityHost": False,
        "OverwriteInstances": False,
        "StableAge": 1,
        "Plugins": [str(DICOMWEB)] if DICOMWEB.exists() else [],
        "DicomWeb": {"Enable": True, "Root": "/dicom-web/"},
        "DicomModalities": {aet: [aet, *place] for aet, place in (peers or {}).items()},
    }
    (folder / "orthanc.json").write_text(json.dumps(settings))
    return archive


@contextmanager
def running_orthanc(folder: Path, peers: Mapping[str, Sequence[Any]] | None = None) -> Iterator[Orthanc]:
    """An archive for the time of a block."""
    archive = make_orthanc(folder, peers)
    archive.start()
    try:
        yield archive
    finally:
        archive.stop()
