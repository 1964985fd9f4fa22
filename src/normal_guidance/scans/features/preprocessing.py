"""From a scan's values to an encoder's input: cut to the field, window, pad to a square, resize, normalise.

The order of the steps is the paper's; a window makes a channel.  A slice's result depends on the rest of its scan in
two respects only: the scan's minimum fills the margins, and a window of percentiles is a range of the scan.
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
from jaxtyping import Float32, Int16
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.records import Between, read_as
from normal_guidance.scans.features.windows import (
    Percentiles,
    Range,
    Window,
    middle,
    plane_of,
    range_of,
    window_as_json,
    window_from_json,
    word_of,
)
from normal_guidance.scans.index.manifest import Manifest, ValueRange, Values, range_of_values


def describe_inputs(
    manifest: Manifest, left_out: Collection[str] = (), values: Sequence[Values] = ()
) -> dict[str, Any]:
    """Counts and ranges, of no single scan, of a manifest without those left out: new scans are checked by them."""
    kept = [number for number, scan in enumerate(manifest.scan_ids) if scan not in left_out]
    table, lengths = manifest.table.take(kept), manifest.lengths[kept]
    planes = Counter(filter(None, map(plane_of, table["orientation"].to_pylist())))
    spacings = np.array([spacing for spacing in table["slice_spacing"].to_pylist() if spacing], np.float64)
    spacing_range = None
    if len(spacings):  # to the micrometre, because manifests hold float32; a few wrong headers must not widen the range
        spacing_range = SpacingRange(*np.percentile(spacings, (1, 50, 99)).round(3).tolist())
    summary = ScanSummary(
        source=manifest.about.get("source"),
        scans=len(kept),
        modalities=dict(sorted(Counter(table["modality"].to_pylist()).items())),
        planes=dict(sorted(planes.items())),
        slices=SlicesPerScan(int(lengths.min()), int(np.median(lengths)), int(lengths.max())),
        slice_spacing=spacing_range,
        values=range_of_values(values),
    )
    return asdict(summary)


@dataclass(frozen=True)
class SlicesPerScan:
    """Slices of the shortest, the median and the longest scan."""

    fewest: int
    median: int
    most: int


@dataclass(frozen=True)
class SpacingRange:
    low: float
    median: float
    high: float


@dataclass(frozen=True)
class ScanSummary:
    """What `describe_inputs` records."""

    source: str | None
    scans: int
    modalities: dict[str, int]
    planes: dict[str, int]
    slices: SlicesPerScan
    slice_spacing: SpacingRange | None
    values: ValueRange | None = None


def is_encoded(provenance: Mapping[str, Any]) -> bool:
    """Whether `nguide encode` made the features; users' own may have any provenance."""
    return {"identity", "preprocessing"} <= provenance.keys()


def scans_behind(provenance: Mapping[str, Any]) -> ScanSummary | None:
    """The scans that `nguide encode` made features of; None where it did not, or did not record them."""
    inputs = provenance.get("inputs") if is_encoded(provenance) else None
    return None if inputs is None else read_as(ScanSummary, inputs, "provenance.inputs")


VERSION, VERSION_WITH_FIELD, VERSION_WITH_PERCENTILES = 1, 2, 3
"""Versions of the arithmetic here: a change that alters results raises them, and so the fingerprints.  Software that
knows neither fields nor percentiles must refuse them, not encode whole slices."""

SIZE = 224  # rows and columns of an image, unless the encoder takes others

CHUNK_BYTES = 2**26  # bytes of a scan that are padded and resized at once, which bounds the memory for a long scan


class Statistics(NamedTuple):
    """Mean and standard deviation, one value for each channel."""

    mean: tuple[float, ...]
    sd: tuple[float, ...]


def _range_of_windowed(window: Window | None) -> Range | None:
    """The values that a window leaves: percentiles become 0..1; None where it leaves all."""
    return (0.0, 1.0) if isinstance(window, Percentiles) else window


@dataclass(frozen=True)
class PreprocessingFile:
    """The types of `Preprocessing.to_dict`."""

    version: int
    windows: tuple[tuple[float, float] | dict[str, tuple[float, float]] | None, ...]
    size: Annotated[int, Between(1.0)]
    mean: tuple[float, ...] | None
    sd: tuple[float, ...] | None
    field: float | None = None


@dataclass(frozen=True)
class Preprocessing:
    """How a scan becomes an encoder's input."""

    windows: tuple[tuple[float | int, float | int] | Percentiles | None, ...] = (None,)
    """By channel the range that values are clipped to, in HU for CT; `Percentiles` become 0..1, None keeps all."""
    size: int = SIZE
    statistics: Statistics | None = None
    """The mean to subtract and the sd to divide by, for each channel; None leaves the windowed values."""
    field: float | int | None = None
    """Side in mm of the square in the middle of each slice that the encoder sees; None: the whole slice."""

    def __post_init__(self) -> None:
        if not self.windows or self.size < 1:
            raise UserError(f"{len(self.windows)} windows, size {self.size}; give at least one window and one pixel")
        for window in self.windows:
            if isinstance(window, tuple) and not -math.inf < window[0] < window[1] < math.inf:
                raise UserError(f"window {window[0]}:{window[1]} is empty or infinite; give LOW:HIGH")
        if self.statistics is not None:
            mean, sd = self.statistics
            if len(mean) != self.channels or len(sd) != self.channels:
                raise UserError(f"{len(mean)} means and {len(sd)} sds for {self.channels} channels; give one of each")
            if not all(map(math.isfinite, (*mean, *sd))) or min(sd) <= 0:
                raise UserError(
                    f"mean {', '.join(f'{value:g}' for value in mean)} and sd "
                    f"{', '.join(f'{value:g}' for value in sd)} cannot normalise: the scans are constant after "
                    "windowing, or damaged; check the scans, or choose a wider window"
                )
        if self.field is not None:
            if not 0 < self.field < math.inf:
                raise UserError(f"field {self.field:g} is not a size; give millimetres above 0, for instance 70")
            object.__setattr__(self, "field", float(self.field))  # 70 and 70.0 must have the same fingerprint
        floats = tuple((float(w[0]), float(w[1])) if isinstance(w, tuple) else w for w in self.windows)
        object.__setattr__(self, "windows", floats)  # as 300 and 300.0

    @property
    def channels(self) -> int:
        return len(self.windows)

    @property
    def has_percentiles(self) -> bool:
        """Whether a scan must be read as a whole before its first slice can be windowed."""
        return any(isinstance(window, Percentiles) for window in self.windows)

    @property
    def version(self) -> int:
        if self.has_percentiles:
            return VERSION_WITH_PERCENTILES
        return VERSION if self.field is None else VERSION_WITH_FIELD

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
        """Finite slices cut to the field, windowed, padded to a square, resized and normalised, on their device."""
        # The scan's `lowest`, which fills the margins, and `ranges` of its windows, both within the field, are the
        # slices' own if left out.  A field needs `spacing`, in mm between rows and between columns.
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
        bounds = [_range_of_windowed(window) or (0.0, 1.0) for window in self.windows]
        return self.with_statistics(
            Statistics(tuple(low for low, _ in bounds), tuple(high - low for low, high in bounds))
        )

    def refuse_misfit(self, seen: Range | None = None) -> None:
        """Refuses a mean beyond a window's values (`seen` where it keeps all), or an sd of another size."""
        # An encoder would get values in a sliver or far away, of which it makes the same features for every slice.
        for window, mean, sd in zip(self.windows, *(self.statistics or ((), ())), strict=False):
            if (bounds := _range_of_windowed(window) or seen) is None:
                continue
            (low, high), most = bounds, bounds[1] - bounds[0]
            if not (low <= mean <= high and most / 100 <= sd <= most):
                raise UserError(
                    f"--normalize {mean:g},{sd:g} does not fit the window {word_of(window)}, which leaves values from "
                    f"{low:g} to {high:g}; give a mean within them and an sd from {most / 100:g} to {most:g}, or leave "
                    "--normalize out"
                )

    def to_dict(self) -> dict[str, Any]:
        """The fields as JSON values; `from_dict` is the inverse."""
        return {
            "version": self.version,
            "windows": [window_as_json(window) for window in self.windows],
            "size": self.size,
            "mean": None if self.statistics is None else [float(value) for value in self.statistics.mean],
            "sd": None if self.statistics is None else [float(value) for value in self.statistics.sd],
            **({} if self.field is None else {"field": self.field}),
        }

    @staticmethod
    def from_dict(content: Mapping[str, Any]) -> Preprocessing:
        """The preprocessing that `to_dict` described; another version is an error, as the results would differ."""
        known = read_as(PreprocessingFile, dict(content), "preprocessing")
        whole = known.mean is not None and known.sd is not None
        result = Preprocessing(
            windows=tuple(map(window_from_json, known.windows)),
            size=known.size,
            statistics=Statistics(known.mean or (), known.sd or ()) if whole else None,
            field=known.field,
        )
        if known.version != result.version:
            raise UserError(
                f"the preprocessing is of version {known.version!r}, this software's is {result.version}; encode the "
                "scans again, or install the version that encoded them"
            )
        return result

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


def scan_statistics(images: Float32[Tensor, "slices channels size size"]) -> Statistics:
    """Mean and sd over the pixels of a scan that is not normalised yet."""
    channels = images.cpu().numpy().swapaxes(0, 1)  # torch's sums depend on the number of threads
    return Statistics(
        mean=tuple(float(channel.mean(dtype=np.float64)) for channel in channels),
        sd=tuple(float(channel.std(dtype=np.float64)) for channel in channels),
    )


def combine_statistics(scans: Iterable[Statistics]) -> Statistics:
    """The mean of the scans' means and the mean of their sds, as the paper normalises."""
    every = list(scans)
    if not every:
        raise UserError("there are no training scans to take mean and sd from; give a split with a part 'train'")
    means, sds = (np.array([scan[kind] for scan in every], dtype=np.float64) for kind in (0, 1))
    return Statistics(tuple(means.mean(axis=0).tolist()), tuple(sds.mean(axis=0).tolist()))
