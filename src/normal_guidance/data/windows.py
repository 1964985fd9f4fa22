"""HU windows, as named presets or as numbers.

A window clips the values, which stay in HU; the encoder scales them to its own range.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from jaxtyping import Float32, Real

from normal_guidance.errors import UserError

Window = tuple[float, float]
"""Lowest and highest HU; values beyond are clipped."""

WINDOWS: dict[str, Window | None] = {
    "head": (-100.0, 300.0),
    "lung": (-1350.0, 150.0),
    "mediastinum": (-160.0, 240.0),
    "abdomen": (-150.0, 250.0),
    "none": None,
}
"""Presets: head as in the paper; the usual lung (level -600, width 1500), mediastinum (40, 400), abdomen (50, 400)."""


def parse_windows(words: str) -> tuple[Window | None, ...]:
    """The windows in a user's text, one channel each: presets or LOW:HIGH, joined by commas.

    Example:
        >>> parse_windows("head"), parse_windows("lung,-100:300")
        (((-100.0, 300.0),), ((-1350.0, 150.0), (-100.0, 300.0)))
        >>> parse_windows("brain")
        Traceback (most recent call last):
        normal_guidance.errors.UserError: window 'brain' is unknown; choose head, lung, mediastinum, abdomen, none or
        LOW:HIGH in HU, for instance -100:300
    """
    return tuple(_parse(word.strip()) for word in words.split(","))


def _parse(word: str) -> Window | None:
    if word in WINDOWS:
        return WINDOWS[word]
    try:
        low, high = map(float, word.split(":"))
    except ValueError:
        raise UserError(
            f"window {word!r} is unknown; choose {', '.join(WINDOWS)} or LOW:HIGH in HU, for instance -100:300"
        ) from None
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"window {word!r} is empty or infinite; give LOW:HIGH with LOW below HIGH")
    return low, high


def apply_windows(hu: Real[np.ndarray, "..."], windows: Sequence[Window | None]) -> Float32[np.ndarray, "..."]:
    """Clips the values to each window, still in HU; the first axis of the result has one channel per window.

    Example:
        >>> apply_windows(np.array([-2000.0, 40.0, 900.0]), parse_windows("head,none"))
        array([[ -100.,    40.,   300.],
               [-2000.,    40.,   900.]], dtype=float32)
    """
    channels = np.empty((len(windows), *hu.shape), np.float32)
    for channel, window in zip(channels, windows, strict=True):
        if window is None:
            channel[...] = hu
        else:
            np.clip(hu, *window, out=channel, casting="same_kind")
    return channels
