"""Which model made a result: a fingerprint that no other model has, and how it was trained."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True)
class ModelIdentity:
    """A model as every result names it.

    Args:
        fingerprint: SHA-256 of its weights and of everything that turns a scan into a result.
        method: a name in `METHODS`, or that of a committee.
        version: of normal-guidance, which trained it; None if unknown.
        dataset: what it was trained on; None if unknown.
        scans: how many training scans there were.
        date: of the training; None if unknown.
    """

    fingerprint: str
    method: str
    version: str | None = None
    dataset: str | None = None
    scans: int | None = None
    date: str | None = None

    @property
    def short(self) -> str:
        """The first letters of the fingerprint: enough to tell models apart, and to read aloud."""
        return self.fingerprint[:12]

    def __str__(self) -> str:
        scans = (
            "" if self.scans is None else f" on {self.scans} scans" + (f" of {self.dataset}" if self.dataset else "")
        )
        version = f" with normal-guidance {self.version}" if self.version else ""
        date = f" on {self.date[:10]}" if self.date else ""
        training = f", trained{scans}{version}{date}" if scans or version or date else ""
        return f"model {self.short} ({self.method}){training}"

    def as_json(self) -> dict[str, Any]:
        return asdict(self)
