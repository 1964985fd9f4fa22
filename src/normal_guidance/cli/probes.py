"""The imports that `nguide doctor` tries in separate processes: each takes a second, and may fail, hang or crash.

`python -P probes.py imports numpy pandas` prints one JSON object: the result, or {"error": "..."}.
"""

from __future__ import annotations

import json
import sys
import warnings
from collections.abc import Callable, Mapping
from importlib import import_module
from typing import Any


def probe_imports(*modules: str) -> dict[str, str | None]:
    """Return for each module why it cannot be imported, or None."""
    return {module: _error(lambda module=module: import_module(module)) for module in modules}  # type: ignore[misc]


def probe_torch() -> dict[str, Any]:
    """Return the CUDA devices that torch finds, or why there are none."""
    import torch

    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter("always")
        there = torch.cuda.is_available()
    why = None
    if torch.version.cuda is None:
        why = "this torch was built without CUDA"
    elif not there:  # torch only warns of an old driver, but raises an error without any
        why = _line(warned[0].message) if warned else _error(torch.cuda.init) or "torch sees no CUDA device"
    devices = []
    for number in range(torch.cuda.device_count() if there else 0):
        properties = torch.cuda.get_device_properties(number)
        capability = f"{properties.major}.{properties.minor}"
        devices.append({"name": properties.name, "bytes": properties.total_memory, "capability": capability})
    return {"cuda": torch.version.cuda, "devices": devices, "why": why}


def probe_codecs() -> dict[str, dict[str, str | None]]:
    """Return for each known transfer syntax its name, its decoder, and why it cannot be decoded, or None."""
    from pydicom.pixels.decoders.base import get_decoder
    from pydicom.uid import UID

    from normal_guidance.scans.index.pixels import GDCM, OPENJPEG, PYDICOM

    gdcm = _error(lambda: import_module("gdcm"))
    found: dict[str, dict[str, str | None]] = {}
    for uid in (*PYDICOM, *OPENJPEG, *GDCM):
        decoder, error = "pydicom", None
        if uid in GDCM:
            decoder, error = "gdcm", gdcm
        elif uid in OPENJPEG:
            decoder = "openjpeg"
            if "pylibjpeg" not in get_decoder(uid).available_plugins:
                error = "pydicom finds no pylibjpeg with pylibjpeg-openjpeg"
        found[uid] = {"name": UID(uid).name, "decoder": decoder, "error": error}
    return found


def _error(attempt: Callable[[], object]) -> str | None:
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            attempt()
    except Exception as error:  # packages raise anything when they are imported
        return f"{type(error).__name__}: {_line(error)}"
    return None


def _line(message: object) -> str:
    return " ".join(str(message).split())[:300]


PROBES: Mapping[str, Callable[..., Mapping[str, Any]]] = {
    "imports": probe_imports,
    "torch": probe_torch,
    "codecs": probe_codecs,
}


def main(name: str, *words: str) -> str:
    """Run a probe; return one line of JSON."""
    answers: list[Mapping[str, Any]] = []
    error = _error(lambda: answers.append(PROBES[name](*words)))
    return json.dumps(answers[0] if error is None else {"error": error})


if __name__ == "__main__":
    print(main(*sys.argv[1:]))
