"""The windows that a reader chooses from: those that radiologists use, and the model's own.

`normal_guidance.data.windows` has the windows of encoders, which are wider: a head window of -100 to 300 HU keeps bone
and blood apart for an encoder, but grey and white matter look the same in it.  Width and level are those of the table
"windowing (CT)" of Radiopaedia.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from normal_guidance.data.windows import WINDOWS, Percentiles, Range, Window

CT: dict[str, tuple[str, int, int]] = {
    "brain": ("Brain", 80, 40),
    "subdural": ("Subdural", 200, 80),  # 130 to 300 and 50 to 100 are in use
    "stroke": ("Stroke", 40, 40),  # 8 and 32, the other one in use, leaves little but noise on thin slices
    "bone": ("Bone", 1800, 400),
    "lung": ("Lung", 1500, -600),
    "mediastinum": ("Mediastinum", 400, 40),
    "soft": ("Soft tissue", 400, 50),
}
"""Windows for CT by name: title, width and level in HU."""

FIRST = {"head": "brain", "chest": "mediastinum", "abdomen": "soft"}
"""The window that a part of the body is shown in first."""

BODY_OF_SOURCE = {"rsna-ich": "head", "rsna-pe": "chest", "rsna-at": "abdomen"}
BODY_OF_WINDOW = {"head": "head", "lung": "chest", "mediastinum": "chest", "abdomen": "abdomen"}
"""Part of the body by the dataset, and by the encoder's window: manifests do not record it."""

WHOLE_SCALE = (-1024.0, 3071.0)
"""The HU of twelve bits: the window for slices of CT that the encoder saw without one."""


def body_of(sources: Sequence[str | None], encoder_windows: Sequence[Window | None]) -> str | None:
    """The part of the body, by the names of datasets or else by the encoder's first window; None if unknown."""
    known = [BODY_OF_SOURCE[source] for source in sources if source in BODY_OF_SOURCE]
    named = [BODY_OF_WINDOW[name] for name in BODY_OF_WINDOW if encoder_windows and encoder_windows[0] == WINDOWS[name]]
    return next(iter(known + named), None)


def display_windows(
    modality: str, body: str | None = None, encoder_windows: Sequence[Window | None] = ()
) -> list[dict[str, Any]]:
    """The windows for scans of a modality, as the page reads them; it starts with the one that is `first`.

    A range of None is each slice's own, from the 1st to the 99th percentile, which the page measures.  CT of an unknown
    part of the body starts with the model's window, or else with soft tissue.
    """
    if modality == "CT":
        presets: list[tuple[str, str, Range | None]] = [
            (name, title, (level - width / 2, level + width / 2)) for name, (title, width, level) in CT.items()
        ]
        first = FIRST.get(body or "", "encoder" if encoder_windows else "soft")
    else:
        adc = WINDOWS["adc"]
        presets, first = [("own", "Auto", None), ("adc", "ADC", adc if isinstance(adc, tuple) else None)], "own"
    own = "each slice's 1st to 99th percentile"
    shown = [_shown(name, title, bounds, modality, "" if bounds else own) for name, title, bounds in presets]
    for place, window in enumerate(encoder_windows, start=1):
        suffix = f" {place}" if len(encoder_windows) > 1 else ""
        bounds, note = _of_encoder(window, modality)
        shown.append(_shown(f"encoder{suffix}", f"Model{suffix}", bounds, modality, note))
    chosen = next(one for one in shown if one["name"] == first or one["name"].startswith(f"{first} "))
    return [{**one, "first": one is chosen} for one in shown]


def _shown(name: str, title: str, bounds: Range | None, modality: str, note: str) -> dict[str, Any]:
    low, high = bounds or (None, None)
    unit = "HU" if modality == "CT" else ""
    return {"name": name, "title": title, "low": low, "high": high, "unit": unit, "note": note}


def _of_encoder(window: Window | None, modality: str) -> tuple[Range | None, str]:
    """The range to show for an encoder's window, and what the page says about it."""
    if isinstance(window, Percentiles):
        saw = f"the scan's percentiles {window.low:g} to {window.high:g}"
        return None, f"the model saw {saw}; this is each slice's 1st to 99th"
    if window is None:
        return (WHOLE_SCALE if modality == "CT" else None), "the model saw all values"
    return window, "what the model saw"
