"""Readers with one planted defect each: fuzzing must find all of them."""

from __future__ import annotations

import ctypes
import os
import time
from collections.abc import Callable
from random import Random

import numpy as np
from harness import MEMORY, Case, Probe, attempt

from normal_guidance.base.errors import UnreadableError, UserError


def _planted(defect: Callable[[Probe], object], *, native: bool = False) -> Case:
    def case(random: Random, samples: object, probe: Probe) -> str:
        with probe.watched():
            probe.tell(native)
            return attempt(lambda: defect(probe))

    return case


def _raise(error: Exception) -> None:
    raise error


def _fill_memory(probe: Probe) -> None:
    np.ones(MEMORY + 2**20, np.uint8)


def _write_natively(probe: Probe) -> None:
    """A write that Python does not see."""
    ctypes.CDLL(None).creat(os.fsencode(probe.folder / "evil.dcm"), 0o600)


def _ask_for_too_much(probe: Probe) -> None:
    try:
        np.ones(2**40, np.uint8)
    except MemoryError as error:
        raise UnreadableError("unreadable", f"{type(error).__name__}: {error}") from error


DEFECTS: dict[str, tuple[Callable[[Probe], object], str]] = {
    "traceback": (lambda probe: {}["Rows"], "FINDING: traceback"),
    "warning": (lambda probe: np.float64(1) / np.float64(0), "FINDING: traceback"),
    "hang": (lambda probe: time.sleep(60), "FINDING: hang"),
    "write": (lambda probe: (probe.folder / "evil.dcm").write_bytes(b""), "FINDING: outside"),
    "write above": (lambda probe: (probe.folder.parent / "evil.dcm").write_bytes(b""), "FINDING: outside"),
    "write input": (lambda probe: (probe.root / "a.dcm").write_bytes(b""), "FINDING: outside"),
    "link": (lambda probe: os.symlink("/", probe.root / "link"), "FINDING: outside"),
    "native write": (_write_natively, "FINDING: outside"),
    "read": (lambda probe: (probe.outside / "secret.dcm").read_bytes(), "FINDING: outside"),
    "memory": (_fill_memory, "FINDING: memory"),
    "asked": (_ask_for_too_much, "FINDING: memory"),
    "abort": (lambda probe: os.abort(), "FINDING: crash"),
    "decoder": (lambda probe: os.abort(), "decoder died: SIGABRT"),
    "mute": (lambda probe: _raise(UnreadableError("unreadable", "")), "FINDING: wrong"),
    "good": (lambda probe: (probe.out / "fine").write_bytes(b""), "read"),
    "good error": (lambda probe: _raise(UserError("scan 'A17' has no slices; remove its row")), "user error"),
}
"""What a reader does, and how its case must end."""

KINDS = {f"{name} -> {end}": (1, _planted(defect, native=name == "decoder")) for name, (defect, end) in DEFECTS.items()}
