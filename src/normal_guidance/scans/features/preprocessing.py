"""From a scan's values to an encoder's input: window, pad to a square, resize, normalise.

The order of the steps is the paper's.  Each window makes a channel.  A slice's result depends on the rest of its scan
in two respects only: the scan's minimum fills the margins, and a window of percentiles is a range of the scan, which is
scaled to 0..1 because other scans have other ranges.  All steps run on the device that holds the slices; the CPU
and CUDA differ in the last bits.

A field comes before all steps: what lies outside it is cut off, and the rest is treated as the whole scan.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Annotated, Any, NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from jaxtyping import Float32, Int16, Real
from torch import Tensor

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.base.records import Between, read_as
from normal_guidance.scans.index.geometry import normal_of
from normal_guidance.scans.index.manifest import Manifest, ValueRange, Values, range_of_values

# The field: the middle of every slice, a square of so many millimetres, which is all that the encoder sees.
# This module does not import torch: worker processes use it.


def middle(rows: int, columns: int, spacing: Sequence[float] | None, field: float) -> tuple[slice, slice]:
    """Rows and columns of a field of `field` mm: round(field / spacing) of each, at least 1, at most the image's.

    Of an odd number of lines that are left over, one more is below or right.  An unknown spacing raises an
    `UnreadableError`.

    Args:
        rows: rows of the image.
        columns: columns of the image.
        spacing: mm between rows, mm between columns.
        field: mm.
    """
    with np.errstate(over="ignore"):
        # A manifest holds 32 bits: a half must be rounded the same way in a new scan, whose header is read in 64.
        widths = [] if spacing is None else np.array(spacing, np.float32).tolist()
    if len(widths) != 2 or not all(0 < width < math.inf for width in widths):
        found = "unknown" if spacing is None else " x ".join(f"{width:g}" for width in spacing) + " mm"
        raise UnreadableError("no_spacing", f"a field of {field:g} mm needs the pixel spacing, which is {found}")
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


# A summary of the scans behind features, so that a model's user can check whether a new scan is of the same kind.


SPACING_PERCENTILES = (1, 50, 99)
"""Percentiles for low, median and high slice spacing: a few wrong headers must not widen the range."""

PLANES = ("sagittal", "coronal", "axial")
"""Planes by the axis that slices are stacked along: left, posterior, superior."""


def plane_of(orientation: Sequence[float] | None) -> str | None:
    """The plane that is nearest to the slices; None where the orientation is unknown."""
    return None if orientation is None else PLANES[int(np.abs(normal_of(orientation)).argmax())]


def describe_inputs(
    manifest: Manifest, left_out: Collection[str] = (), values: Sequence[Values] = ()
) -> dict[str, Any]:
    """Counts and ranges of the scans of a manifest without those left out; no entry describes a single scan.

    `values` are those of its scans, where they were measured.
    """
    kept = [number for number, scan in enumerate(manifest.scan_ids) if scan not in left_out]
    table, lengths = manifest.table.take(kept), manifest.lengths[kept]
    planes = Counter(filter(None, map(plane_of, table["orientation"].to_pylist())))
    spacings = [spacing for spacing in table["slice_spacing"].to_pylist() if spacing]
    measured = range_of_values(values)
    return {
        "source": manifest.about.get("source"),
        "scans": len(kept),
        "modalities": dict(sorted(Counter(table["modality"].to_pylist()).items())),
        "planes": dict(sorted(planes.items())),
        "slices": {"fewest": int(lengths.min()), "median": int(np.median(lengths)), "most": int(lengths.max())},
        "slice_spacing": _range(spacings) if spacings else None,
        "values": None if measured is None else asdict(measured),
    }


@dataclass(frozen=True)
class Counts:
    """Slices of the shortest, the median and the longest scan."""

    fewest: int
    median: int
    most: int


@dataclass(frozen=True)
class SpacingRange:
    """Slice spacing in mm."""

    low: float
    median: float
    high: float


@dataclass(frozen=True)
class ScanSummary:
    """What `describe_inputs` recorded, as it is read back."""

    source: str | None
    scans: int
    modalities: dict[str, int]
    planes: dict[str, int]
    slices: Counts
    slice_spacing: SpacingRange | None
    values: ValueRange | None = None


def is_encoded(provenance: Mapping[str, Any]) -> bool:
    """Whether `nguide encode` made the features; users' own may have any provenance."""
    return {"identity", "preprocessing"} <= provenance.keys()


def scans_behind(provenance: Mapping[str, Any]) -> ScanSummary | None:
    """The scans that `nguide encode` made features of; None where it did not, or did not record them."""
    inputs = provenance.get("inputs") if is_encoded(provenance) else None
    return None if inputs is None else read_as(ScanSummary, inputs, "provenance.inputs")


def _range(spacings: Sequence[float]) -> dict[str, float]:
    """Low, median and high in mm, rounded to the micrometre because manifests hold float32."""
    values = np.percentile(np.array(spacings, np.float64), SPACING_PERCENTILES).round(3).tolist()
    return dict(zip(("low", "median", "high"), values, strict=True))


# Windows: the range of values that an encoder or a picture tells apart, as a named preset, numbers or percentiles.
# A window clips the values, which stay in their unit: Hounsfield units (HU) in CT, 10^-6 mm2/s in ADC maps.  Most other
# MR sequences have no unit, and the same tissue has other values in each scan.  There the window is a range of
# percentiles of the scan itself, and what lies in it is scaled to 0..1.


Range = tuple[float, float]
"""Lowest and highest value; values beyond are clipped."""


@dataclass(frozen=True)
class Percentiles:
    """The range between two percentiles of a scan's foreground, the voxels above its minimum.

    What is cut off or filled around a scan is its minimum, often half of all voxels, and says nothing about the tissue.
    """

    low: float | int = 1.0
    high: float | int = 99.0

    def __post_init__(self) -> None:
        if not 0 <= self.low < self.high <= 100:
            raise UserError(
                f"window {self} is not a range of percentiles; give LOW-HIGH within 0-100, for instance 1-99"
            )
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

MR_WINDOWS = ("adc", PERCENTILE)
"""Presets that are not for CT."""


def default_window(modalities: Iterable[str]) -> str:
    """The window for scans of these modalities where none is given: CT has a unit, MR in general has none."""
    return "none" if set(modalities) <= {"CT"} else PERCENTILE


def parse_windows(words: str) -> tuple[Window | None, ...]:
    """The windows in a user's text, one channel each: presets, LOW:HIGH or percentile:LOW-HIGH, joined by commas.

    Names may be in capitals.
    """
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


def range_of(window: Window | None, values: Real[np.ndarray, "..."]) -> Range | None:
    """The range of a window in a scan; None for the whole range."""
    return window.range_of(values) if isinstance(window, Percentiles) else window


def window_as_json(window: Window | None) -> Any:
    """A window as stores and bundles record it; `window_from_json` is the inverse."""
    if isinstance(window, Percentiles):
        return {"percentiles": [window.low, window.high]}
    return None if window is None else list(window)


def window_from_json(content: Any) -> Window | None:
    """A window from a store or bundle."""
    if isinstance(content, dict):
        low, high = content["percentiles"]
        return Percentiles(low, high)
    return None if content is None else (float(content[0]), float(content[1]))


def apply_windows(values: Real[np.ndarray, "..."], windows: Sequence[Window | None]) -> Float32[np.ndarray, "..."]:
    """Clips the values to each window, still in their unit; the first axis of the result has one channel per window.

    Percentiles are those of the given values; `range_of` takes them from a whole scan.
    """
    channels = np.empty((len(windows), *values.shape), np.float32)
    for channel, window in zip(channels, windows, strict=True):
        bounds = range_of(window, values)
        if bounds is None:
            channel[...] = values
        else:
            np.clip(values, *bounds, out=channel, casting="same_kind")
    return channels


VERSION = 1
"""Version of this module's arithmetic: a change that alters results raises it and changes the fingerprints."""

VERSION_WITH_FIELD = 2
"""Version of a preprocessing with a field: software that knows no fields must refuse it, not encode whole slices."""

VERSION_WITH_PERCENTILES = 3
"""Version of a preprocessing with percentiles, with or without a field, for the same reason."""

SIZE = 224
"""Rows and columns of an image, unless the encoder takes others."""

CHUNK_BYTES = 2**26
"""Bytes of a scan that are padded and resized at once, which bounds the memory for a long scan."""


class Statistics(NamedTuple):
    """Mean and standard deviation, one value for each channel."""

    mean: tuple[float, ...]
    sd: tuple[float, ...]


@dataclass(frozen=True)
class _Content:
    """The types of `Preprocessing.to_dict`."""

    version: int
    windows: tuple[tuple[float, float] | dict[str, tuple[float, float]] | None, ...]
    size: Annotated[int, Between(1.0)]
    mean: tuple[float, ...] | None
    sd: tuple[float, ...] | None
    field: float | None = None


@dataclass(frozen=True)
class Preprocessing:
    """How a scan becomes an encoder's input.

    Args:
        windows: for each channel the lowest and highest value, in HU for CT; values outside are set to these.
            `Percentiles` are a range of each scan, which becomes 0..1.  None keeps all values.
        size: rows and columns of the result.
        statistics: the mean to subtract and the sd to divide by, for each channel; None leaves the windowed values.
        field: side in mm of the square in the middle of each slice that the encoder sees; None: the whole slice.
    """

    windows: tuple[tuple[float | int, float | int] | Percentiles | None, ...] = (None,)
    size: int = SIZE
    statistics: Statistics | None = None
    field: float | int | None = None

    def __post_init__(self) -> None:
        if not self.windows or self.size < 1:
            raise UserError(f"{len(self.windows)} windows, size {self.size}; give at least one window and one pixel")
        for window in self.windows:
            if isinstance(window, tuple) and not -math.inf < window[0] < window[1] < math.inf:
                raise UserError(f"window {window[0]}:{window[1]} is empty or infinite; give LOW:HIGH")
        if self.statistics is not None:
            self._check(self.statistics)
        if self.field is not None:
            if not 0 < self.field < math.inf:
                raise UserError(f"field {self.field:g} is not a size; give millimetres above 0, for instance 70")
            object.__setattr__(self, "field", float(self.field))  # 70 and 70.0 must have the same fingerprint
        floats = tuple((float(one[0]), float(one[1])) if isinstance(one, tuple) else one for one in self.windows)
        object.__setattr__(self, "windows", floats)  # as 300 and 300.0

    def _check(self, statistics: Statistics) -> None:
        mean, sd = statistics
        if len(mean) != self.channels or len(sd) != self.channels:
            raise UserError(f"{len(mean)} means and {len(sd)} sds for {self.channels} channels; give one of each")
        if not all(map(math.isfinite, (*mean, *sd))) or min(sd) <= 0:
            raise UserError(
                f"mean {_comma_separated(mean)} and sd {_comma_separated(sd)} cannot normalise: the scans are constant "
                "after windowing, or damaged; check the scans, or choose a wider window"
            )

    @property
    def channels(self) -> int:
        """One for each window."""
        return len(self.windows)

    @property
    def has_percentiles(self) -> bool:
        """Whether a scan must be read as a whole before its first slice can be windowed."""
        return any(isinstance(window, Percentiles) for window in self.windows)

    @property
    def fingerprint(self) -> str:
        """sha256 of `to_dict` as canonical JSON; differs for any other preprocessing."""
        return hashlib.sha256(json.dumps(self.to_dict(), sort_keys=True, separators=(",", ":")).encode()).hexdigest()

    def apply(
        self,
        hu: Int16[Tensor, "slices rows columns"] | Float32[Tensor, "slices rows columns"],
        lowest: float | None = None,
        spacing: Sequence[float] | None = None,
        ranges: Sequence[Range | None] = (),
    ) -> Float32[Tensor, "slices {self.channels} {self.size} {self.size}"]:
        """Slices cut to the field, windowed, padded to a square, resized and normalised, on their device.

        Args:
            hu: finite values.
            lowest: the scan's minimum, within the field, which fills the margins; the slices' own, if left out.
            spacing: mm between rows, mm between columns; a field needs it.
            ranges: the range of each window in the whole scan, within the field; the slices' own, if left out.
        """
        if self.field is not None:
            if spacing is None:
                raise UserError(f"a field of {self.field:g} mm needs the pixel spacing; give it in mm: (rows, columns)")
            down, across = middle(hu.shape[1], hu.shape[2], spacing, self.field)
            hu = hu[:, down, across]
        slices, rows, columns = hu.shape
        side = max(rows, columns)
        if lowest is None and rows != columns:
            lowest = float(hu.min())
        ranges = ranges or [range_of(window, hu.cpu().numpy()) for window in self.windows]
        images = torch.empty(slices, self.channels, self.size, self.size, device=hu.device)
        step = max(1, CHUNK_BYTES // (4 * self.channels * side * side))
        for start in range(0, slices, step):
            images[start : start + step] = self._resized(hu[start : start + step], lowest, ranges)
        if self.statistics is not None:
            for channel, mean, sd in zip(images.unbind(1), *self.statistics, strict=True):
                channel.sub_(mean).div_(sd)  # by numbers: copying them to a card would wait for all of its work
        return images

    def with_statistics(self, statistics: Statistics) -> Preprocessing:
        """This preprocessing, normalised with the training scans' statistics (`combine_statistics`)."""
        return replace(self, statistics=statistics)

    def to_unit_range(self) -> Preprocessing:
        """This preprocessing with each window mapped to 0..1, for encoders that normalise themselves (`unit_range`)."""
        if any(window is None for window in self.windows):
            raise UserError(
                "this encoder takes values between a lowest and a highest, but one window is 'none'; give a window, "
                "for instance head, -1000:1000 or percentile"
            )
        # percentiles become 0..1 by themselves
        bounds = [window if isinstance(window, tuple) else (0.0, 1.0) for window in self.windows]
        return replace(
            self,
            statistics=Statistics(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds)),
        )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; `from_dict` is the inverse."""
        field = {} if self.field is None else {"field": self.field}
        return {
            "version": _version(self.has_percentiles, self.field),
            "windows": [window_as_json(window) for window in self.windows],
            "size": self.size,
            "mean": None if self.statistics is None else [float(value) for value in self.statistics.mean],
            "sd": None if self.statistics is None else [float(value) for value in self.statistics.sd],
            **field,
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Preprocessing:
        """The preprocessing that `to_dict` described; another version is an error, as the results would differ."""
        known = read_as(_Content, dict(content), "preprocessing")
        windows = tuple(window_from_json(window) for window in known.windows)
        version = _version(any(isinstance(window, Percentiles) for window in windows), known.field)
        if known.version != version:
            raise UserError(
                f"the preprocessing is of version {known.version!r}, this software's is {version}; encode the scans "
                "again, or install the version that encoded them"
            )
        whole = known.mean is not None and known.sd is not None
        return Preprocessing(
            windows=windows,
            size=known.size,
            statistics=Statistics(known.mean or (), known.sd or ()) if whole else None,
            field=known.field,
        )

    def _resized(self, hu: Tensor, lowest: float | None, ranges: Sequence[Range | None]) -> Tensor:
        """Windows slices, centres them on squares, an odd line going below or right, and resizes them."""
        slices, rows, columns = hu.shape
        side = max(rows, columns)
        top, left = (side - rows) // 2, (side - columns) // 2
        values = hu.float()
        square = torch.empty(slices, self.channels, side, side, device=hu.device)
        for channel, window, bounds in zip(square.unbind(1), self.windows, ranges, strict=True):
            low, high = bounds or (-math.inf, math.inf)
            if lowest is not None and rows != columns:
                # Clipping is monotone: the minimum's clipped value is the minimum of the clipped scan.
                channel.fill_(min(max(lowest, low), high))
            torch.clamp(values, low, high, out=channel[:, top : top + rows, left : left + columns])
            if isinstance(window, Percentiles):
                channel.sub_(low).div_(high - low)
        # One-channel images all have the same memory layout, so a slice's bits do not depend on the others.
        flat = square.view(slices * self.channels, 1, side, side)
        resized = F.interpolate(flat, size=(self.size, self.size), mode="bilinear", antialias=True)
        return resized.view(slices, self.channels, self.size, self.size)


def _version(has_percentiles: bool, field: float | None) -> int:
    if has_percentiles:
        return VERSION_WITH_PERCENTILES
    return VERSION if field is None else VERSION_WITH_FIELD


def scan_statistics(images: Float32[Tensor, "slices channels size size"]) -> Statistics:
    """Mean and sd over the pixels of a scan that is not normalised yet.

    The sums are numpy's on any device, because torch's depend on the number of threads.
    """
    channels = images.cpu().numpy().swapaxes(0, 1)
    return Statistics(
        mean=tuple(float(channel.mean(dtype=np.float64)) for channel in channels),
        sd=tuple(float(channel.std(dtype=np.float64)) for channel in channels),
    )


def combine_statistics(scans: Iterable[Statistics]) -> Statistics:
    """The mean of the scans' means and the mean of their sds, as the paper normalises."""
    every = list(scans)
    if not every:
        raise UserError("there are no training scans to take mean and sd from; give a split with a part 'train'")
    means, sds = (np.array([one[kind] for one in every], dtype=np.float64) for kind in (0, 1))
    return Statistics(tuple(means.mean(axis=0).tolist()), tuple(sds.mean(axis=0).tolist()))


def _comma_separated(values: tuple[float, ...]) -> str:
    return ", ".join(f"{value:g}" for value in values)
