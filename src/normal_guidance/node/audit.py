"""The audit log: what happened when and with whom, one JSON object a line, without patients' data.

A series is named by the hash that is also the name of its folder.  The file is rotated by size.
"""

from __future__ import annotations

import json
import os
import threading
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

LARGEST_BYTES = 10 * 2**20
"""Size from which on a new file is begun."""

KEPT = 10
"""Older files that are kept: audit.jsonl.1 is the newest of them."""


class Audit:
    """Appends events to a file, each by one write, so that a kill leaves whole lines."""

    def __init__(self, path: Path, largest: int = LARGEST_BYTES, kept: int = KEPT) -> None:
        self.path, self.largest, self.kept = path, largest, kept
        self._lock = threading.Lock()

    def write(self, event: str, **about: Any) -> None:
        """Append an event; members that are None are left out."""
        known = {name: value for name, value in about.items() if value is not None}
        time = datetime.now(UTC).isoformat(timespec="milliseconds")
        line = json.dumps({"time": time, "event": event, **known}) + "\n"
        with self._lock:
            self._rotate()
            descriptor = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            try:
                os.write(descriptor, line.encode())
            finally:
                os.close(descriptor)

    def _rotate(self) -> None:
        if not self.path.exists() or self.path.stat().st_size < self.largest:
            return
        for number in range(self.kept, 0, -1):
            older = self._numbered(number - 1) if number > 1 else self.path
            if older.exists():
                older.replace(self._numbered(number))

    def _numbered(self, number: int) -> Path:
        return self.path.with_name(f"{self.path.name}.{number}")
