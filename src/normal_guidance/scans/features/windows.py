"""What of a scan an encoder or a picture sees: the field in the middle of each slice, and windows of its values.

A window clips values, which stay in their unit: Hounsfield units (HU) in CT, 10^-6 mm2/s in ADC maps.  Most other MR
sequences have no unit, and the same tissue has other values in each scan: there the window is a range of percentiles
of the scan itself, which becomes 0..1.  Worker processes read scans with `Decoding`, so this does not import torch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Float32, Int16, Real

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.index.geometry import normal_of
from normal_guidance.scans.index.manifest import ScanRow, sample_values
from normal_guidance.scans.index.problems import Problem

PLANES = ("sagittal", "coronal", "axial")  # planes by the axis that slices are stacked along: left, posterior, superior


def plane_of(orientation: Sequence[float] | None) -> str | None:
    """The plane that is nearest to the slices; None where the orientation is unknown."""
    return None if orientation is None else PLANES[int(np.abs(normal_of(orientation)).argmax())]


def middle(rows: int, columns: int, spacing: Sequence[float] | None, field: float) -> tuple[slice, slice]:
    """Rows and columns of a field of `field` mm: round(field / spacing) of each, at least 1, at most the image's."""
    # Of an odd number of lines that are left over, one more is below or right.
    with np.errstate(over="ignore"):
        # A manifest holds 32 bits: a half must be rounded the same way in a new scan, whose header is read in 64.
        widths = [] if spacing is None else np.array(spacing, np.float32).tolist()
    if len(widths) != 2 or not all(0 < width < math.inf for width in widths):
        known = "unknown" if spacing is None else " x ".join(f"{width:g}" for width in spacing) + " mm"
        raise UnreadableError("no_spacing", f"a field of {field:g} mm needs the pixel spacing, which is {known}")
    return _middle(rows, field / widths[0]), _middle(columns, field / widths[1])


def _middle(lines: int, wanted: float) -> slice:
    kept = max(1, round(min(wanted, lines)))
    start = (lines - kept) // 2
    return slice(start, start + kept)


def in_field(volume: np.ndarray, spacing: Sequence[float] | None, field: float | None) -> np.ndarray:
    """The field of every slice of a volume; the volume itself without a field."""
    if field is None:
        return volume
    down, across = middle(volume.shape[1], volume.shape[2], spacing, field)
    return volume[:, down, across]


Range = tuple[float, float]  # lowest and highest value; values beyond are clipped


@dataclass(frozen=True)
class Percentiles:
    """The range between two percentiles of a scan's foreground: what is filled around it is its minimum."""

    low: float | int = 1.0
    high: float | int = 99.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 100:
            raise UserError(f"window {self} is not a range of percentiles; give LOW-HIGH within 0-100, as in 1-99")
        object.__setattr__(self, "low", float(self.low))  # 1 and 1.0 must have the same fingerprint
        object.__setattr__(self, "high", float(self.high))

    def __str__(self) -> str:
        return f"{PERCENTILE}:{self.low:g}-{self.high:g}"

    def range_of(self, values: Real[np.ndarray, "..."]) -> Range:
        """The lowest and highest value; a scan in which both are the same raises an `UnreadableError`."""
        foreground = values[values > values.min()]
        low, high = np.percentile(foreground, (self.low, self.high)).tolist() if foreground.size else (0.0, 0.0)
        if not low < high:
            raise UnreadableError("failed", f"percentiles {self.low:g} and {self.high:g} of its voxels are the same")
        return low, high


Window = Range | Percentiles

PERCENTILE = "percentile"

WINDOWS: dict[str, Window | None] = {
    "head": (-100.0, 300.0),
    "lung": (-1350.0, 150.0),
    "mediastinum": (-160.0, 240.0),
    "abdomen": (-150.0, 250.0),
    "adc": (0.0, 3000.0),
    PERCENTILE: Percentiles(),
    "none": None,
}
"""Presets.  CT, in HU: head as in the paper; the usual lung (level -600, width 1500), mediastinum (40, 400), abdomen
(50, 400).  MR: ADC maps in 10^-6 mm2/s, and percentiles for sequences without a unit."""


def default_window(modalities: Iterable[str]) -> tuple[str, str]:
    """The window for scans of these modalities where none is given, and a line that says so."""
    found, name, about = sorted(set(modalities)), PERCENTILE, "from the 1st to the 99th of each scan"
    if found == ["CT"]:  # it has a unit, and soft tissue is everywhere; MR in general has none
        name, about = "head", "-100:300 HU, soft tissue; for other tissue give lung, mediastinum, abdomen or LOW:HIGH"
    return name, f"{' and '.join(found)} scans: --window {name} ({about})"


def parse_windows(words: str) -> tuple[Window | None, ...]:
    """The windows in a user's text, one channel each: presets, LOW:HIGH or percentile:LOW-HIGH, joined by commas."""
    return tuple(_parse(word.strip()) for word in words.split(","))


def _parse(word: str) -> Window | None:
    name = word.lower()
    if name in WINDOWS:
        return WINDOWS[name]
    percentiles = name.startswith(f"{PERCENTILE}:")
    try:
        low, high = map(float, name.removeprefix(f"{PERCENTILE}:").split("-" if percentiles else ":"))
    except ValueError:
        raise UserError(
            f"window {word!r} is unknown; choose {', '.join(WINDOWS)}, LOW:HIGH in the scans' unit, for instance "
            f"-100:300, or {PERCENTILE}:LOW-HIGH"
        ) from None
    if percentiles:
        return Percentiles(low, high)
    if not (math.isfinite(low) and math.isfinite(high) and low < high):
        raise UserError(f"window {word!r} is empty or infinite; give LOW:HIGH with LOW below HIGH")
    return low, high


def word_of(window: Window | None) -> str:
    """A window as `parse_windows` reads it."""
    return f"{window[0]:g}:{window[1]:g}" if isinstance(window, tuple) else str(window or "none")


def range_of(window: Window | None, values: Real[np.ndarray, "..."]) -> Range | None:
    """The range of a window in a scan; None for the whole range."""
    return window.range_of(values) if isinstance(window, Percentiles) else window


def window_as_json(window: Window | None) -> Any:
    """A window as stores and bundles record it; `window_from_json` is the inverse."""
    if isinstance(window, Percentiles):
        return {"percentiles": [window.low, window.high]}
    return None if window is None else list(window)


def window_from_json(content: Any) -> Window | None:
    if isinstance(content, dict):
        return Percentiles(*content["percentiles"])
    return None if content is None else (float(content[0]), float(content[1]))


def apply_windows(values: Real[np.ndarray, "..."], windows: Sequence[Window | None]) -> Float32[np.ndarray, "..."]:
    """Clips the values to each window, of percentiles to theirs; the first axis of the result has a window each."""
    channels = np.empty((len(windows), *values.shape), np.float32)
    for channel, window in zip(channels, windows, strict=True):
        bounds = range_of(window, values)
        if bounds is None:
            channel[...] = values
        else:
            np.clip(values, *bounds, out=channel, casting="same_kind")
    return channels


def read_windowed(
    row: ScanRow, root: Path, positions: Sequence[int], window: Window | None, field: float | None, *, repair: bool
) -> Float32[np.ndarray, "_ _ _"]:
    """Some slices of a scan for a picture, in the window of an encoder, whose `field` counts for percentiles alone."""
    from normal_guidance.scans.index.volumes import read_volume  # needs extras, which features do without

    if isinstance(window, Percentiles):  # only these need the other slices
        whole, _ = read_volume(row, root, repair=repair)
        window, volume = range_of(window, in_field(whole, row.pixel_spacing, field)), whole[positions]
    else:
        volume, _ = read_volume(row.cut(positions), root, repair=repair)
    return apply_windows(volume, [window])[0]


# How worker processes read scans for an encoder, some slices at a time.

Reader = Callable[..., tuple[np.ndarray, list[Problem]]]
"""Like `normal_guidance.scans.index.volumes.read_volume(row, root, repair=True)`; workers find it by its name."""

MAX_SIDE = 8192
"""Slices with more rows or columns are an error: CT has 512 to 2048, and a square of 65,535 would take 16 GiB."""

PIECE = 64
"""Most slices of a scan that a worker reads at a time, where they are files of their own: 32 MiB at 512 x 512."""


class Pixels(NamedTuple):
    """Slices as they are sent to the encoder's process."""

    hu: Int16[np.ndarray, "slices rows columns"] | Float32[np.ndarray, "slices rows columns"]
    lowest: float  # their minimum: it fills the margins of slices that are not square
    ranges: tuple[Range | None, ...] = ()
    """The range of each window in them, where a window is one of percentiles; else empty."""
    sample: np.ndarray = np.empty(0, np.float32)
    """Some of the values of the whole slices, from which the scan's `Values` are found."""


@dataclass(frozen=True)
class Decoding:
    """How scans are read; sent to worker processes."""

    read: Reader
    root: Path
    repair: bool
    field: float | None = None  # mm of each slice's middle that are sent; None sends whole slices
    windows: tuple[Window | None, ...] = ()
    """The windows of all channels, where one is of percentiles, whose ranges are then sent too; else empty."""
    held: frozenset[str] = frozenset()
    """Ids of scans that are not read, because a store or a unit has their features already."""

    def pixels(self, row: ScanRow) -> tuple[Pixels, list[Problem]]:
        """The slices, int16 or float32, and their problems; slices that cannot be used raise an `UnreadableError`."""
        if row.scan_id in self.held:
            raise UnreadableError("failed", "its features are there already")
        hu, problems = self.read(row, self.root, repair=self.repair)
        if len(hu) != len(row):
            raise UnreadableError("failed", f"{len(hu)} slices were read, but the manifest has {len(row)}")
        slices, rows, columns = hu.shape
        if not hu.size or max(rows, columns) > MAX_SIDE:
            raise UnreadableError("failed", f"{slices} slices of {rows} x {columns} pixels (at most {MAX_SIDE})")
        sample = sample_values(hu)
        hu = in_field(hu, row.pixel_spacing, self.field)
        hu = np.ascontiguousarray(hu, np.int16 if hu.dtype == np.int16 else np.float32)
        lowest = float(hu.min())
        if hu.dtype != np.int16 and not (math.isfinite(lowest) and math.isfinite(hu.max())):
            raise UnreadableError("failed", "pixels that are not finite")
        return Pixels(hu, lowest, tuple(range_of(window, hu) for window in self.windows), sample), problems


def cut(row: ScanRow, field: float | None = None, *, whole: bool = False) -> list[ScanRow]:
    """Consecutive parts of a scan of at most `PIECE` slices."""
    # Not cut are slices that are not square, or whose field is not, because their margin is the whole scan's minimum;
    # those whose window is of the whole scan's percentiles (`whole`); and files with several slices.
    if whole or not _is_square(row, field) or len(set(row.files)) < len(row):
        return [row]
    return [row.cut(range(len(row))[start : start + PIECE]) for start in range(0, len(row), PIECE)]


def _is_square(row: ScanRow, field: float | None) -> bool:
    if field is None:
        return row.rows == row.columns
    try:
        down, across = middle(row.rows, row.columns, row.pixel_spacing, field)
    except UnreadableError:  # it is recorded when the scan is read
        return False
    return down.stop - down.start == across.stop - across.start
