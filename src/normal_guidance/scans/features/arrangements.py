"""Finds the scans in named arrays, whichever way another program arranged them, and adds a table's labels and patients.

    one scan    features (slices, features)
    packed      features of all scans one below the other, and how they are cut: lengths (one a scan), offsets (0, ...,
                slices), scan_index (0 0 1 1 1, one a slice) or a scan id for each slice
    padded      features (scans, slices, features), and mask (True for a slice) or lengths
    a list      features is a list with one array for each scan
    named       one array, or one mapping with features, for each scan, under the scan's id

Labels, patients and parts have one value for each scan or, where scans are packed, for each slice.  The columns of a
table (`ScanTable`) are those of `normal_guidance.scans.index.source` without paths: docs/howto/own-features.md.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import unquote

import numpy as np
import torch
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.base.errors import UserError, both_sides, reading, shorten
from normal_guidance.core.bags import UNKNOWN, looks_padded
from normal_guidance.scans.features.feature_files import Fields
from normal_guidance.scans.features.store import DTYPES
from normal_guidance.scans.index.labels import BINARY, SLICE_COLUMNS, further_labels, read_labels, slice_labels_in
from normal_guidance.scans.index.manifest import Finding, Labels

KEYS = {
    "features": ("features", "feats", "feat", "embeddings", "embedding", "x", "data", "arr_0"),
    "label": ("label", "labels", "y", "target", "targets"),
    "slice_labels": ("slice_labels", "slice_label", "inst_labels", "instance_labels", "y_inst"),
    "scan_id": ("scan_id", "scan_ids", "bag_id", "bag_ids", "bag_name", "bag_names", "ids", "id"),
    "patient_id": ("patient_id", "patient_ids", "patient", "patients"),
    "part": ("part", "parts", "split", "splits"),
    "lengths": ("lengths", "length"),
    "offsets": ("offsets", "indptr", "ptr"),
    "scan_index": ("scan_index", "bag_index", "bag_idx", "batch"),
    "mask": ("mask", "masks"),
    "recipe": ("recipe",),
}
"""The keys that are looked for, in capitals or not; of several names for one thing the first counts."""

PER_SCAN = ("label", "scan_id", "patient_id", "part", "recipe")

LONGEST_TEXT = 1000  # most characters of an id or a label; more are damage


class Found(NamedTuple):
    """Where a scan was found: the file (and the key in it), all keys there, and the key of each known field."""

    where: str
    keys: tuple[str, ...]
    key_of: Mapping[str, str]

    def __str__(self) -> str:
        """One line: what was found under which key, what was looked for and is absent, what was not used."""
        known = ", ".join(name if name == key else f"{name} ({key!r})" for name, key in self.key_of.items())
        absent = ", ".join(name for name in KEYS if name not in self.key_of)
        unused = ", ".join(key for key in self.keys if key not in self.key_of.values())
        not_used = f"; not used: {unused}" if unused else ""
        return f"{self.where}: found {known or 'an array'}; looked for, but absent: {absent}{not_used}"


class FoundScan(NamedTuple):
    """One scan of a file; what the file does not say is None."""

    found: Found
    scan_id: str
    features: Float[Tensor, "slices features"]
    label: int | None = None
    slice_labels: Int[Tensor, "slices"] | None = None
    patient_id: str | None = None
    part: str | None = None
    recipe: str = ""


def scans_of(fields: Fields, where: str, name: str, depth: int = 0) -> Iterator[FoundScan]:
    """The scans of a file or of a mapping in it; `name` is the id of one without, or numbered: NAME-0, NAME-1."""
    there: dict[str, str] = {}
    for key in fields:
        there.setdefault(key.lower(), key)
    keys = {field: next((there[name] for name in names if name in there), None) for field, names in KEYS.items()}
    key_of = {field: key for field, key in keys.items() if key is not None}
    values = {field: fields[key] for field, key in key_of.items()} if "features" in key_of else {}
    if isinstance(values.get("features", {}), Mapping):
        yield from _named(fields, where, depth)
        return
    found = Found(where, tuple(fields), key_of)
    with reading(where, "correct it, or leave it out", wrong="cannot be imported"):
        single, columns, slices = _arranged(values)
        for number, (features, slice_labels) in enumerate(slices):
            row = {field: column[number] for field, column in columns.items()}
            scan, of_scan = unquote(name) if single else f"{unquote(name)}-{number}", _features(features)
            yield FoundScan(
                found=found,
                scan_id=_text(row.get("scan_id")) or scan,
                features=of_scan,
                label=_label(row.get("label")),
                slice_labels=_slice_labels(slice_labels, len(of_scan)),
                patient_id=_text(row.get("patient_id")) or None,
                part=_text(row.get("part")) or None,
                recipe=_text(row.get("recipe")),
            )


def _named(fields: Fields, where: str, depth: int) -> Iterator[FoundScan]:
    """Scans under their ids; what is neither an array nor a mapping is a remark about the file."""
    seen = False
    for key in fields if depth < 2 else ():  # parts with scans, scans with fields
        value, here = fields[key], f"{where}, {key}"
        if isinstance(value, Mapping):
            yield from scans_of(value, here, key, depth + 1)
        elif _dimensions(value) == 2 and _is_float(value):
            yield from scans_of({"features": value, **dict(getattr(value, "attrs", {}))}, here, key, depth + 1)
        elif _dimensions(value):
            raise _no_features(fields, where, key)
        else:
            continue
        seen = True
    if not seen:
        raise _no_features(fields, where)


def _no_features(fields: Fields, where: str, odd: str | None = None) -> UserError:
    shown = [key for _, key in zip(range(20), fields, strict=False)]
    more = ", ..." if len(fields) > len(shown) else ""
    kind = "" if odd is None else f"; {_not_features(fields[odd], f'the array {odd!r} is')}"
    return UserError(
        f"{where} has no features: looked for {', '.join(KEYS['features'])}; found {', '.join(shown) or 'nothing'}"
        f"{more}{kind}; rename the key of the features"
    )


Columns = dict[str, list[Any]]  # of each field that is there one value for each scan

Slices = Iterable[tuple[Any, Any]]  # for each scan its features, and its slice labels or None


def _arranged(values: Fields) -> tuple[bool, Columns, Slices]:
    """Whether there is one scan only; the fields of the scans, and their slices."""
    features = values["features"]
    if isinstance(features, list | tuple):
        return False, *_listed(values)
    dimensions = _dimensions(features)
    if dimensions not in (2, 3) or not features.shape[-1] or not _is_float(features):
        raise _not_features(features)
    slices = math.prod(features.shape[:-1])
    for name, value in values.items():  # before its values become Python's numbers, which takes minutes
        count = math.prod(getattr(value, "shape", ()))
        if name != "features" and count > max(10_000, slices + 1):
            raise ValueError(f"{name} has {count:,} values for {slices:,} slices")
    if dimensions == 3:
        return False, *_padded(values)
    ends = _ends(values)
    if ends is None:
        return True, _columns(values, 1), [(features, values.get("slice_labels"))]
    bounds = [0, *ends]
    columns = _columns(values, len(ends), bounds)
    labels = None if values.get("slice_labels") is None else _column(values["slice_labels"])
    if labels is not None and len(labels) != ends[-1]:
        raise ValueError(f"{len(labels)} slice labels for {ends[-1]} slices")
    scans = (slice(begin, end) for begin, end in pairwise(bounds))
    return False, columns, ((features[scan], None if labels is None else labels[scan]) for scan in scans)


def _listed(values: Fields) -> tuple[Columns, Slices]:
    features, labels = values["features"], values.get("slice_labels")
    columns = _columns(values, len(features))
    if labels is not None and len(labels) != len(features):
        raise ValueError(f"slice_labels has {len(labels)} entries for {len(features)} scans")
    return columns, zip(features, [None] * len(features) if labels is None else labels, strict=True)


def _padded(values: Fields) -> tuple[Columns, Slices]:
    features = values["features"]
    scans, longest = features.shape[:2]
    columns, masks = _columns(values, scans), _masks(values, scans, longest)
    labels = None if values.get("slice_labels") is None else np.asarray(values["slice_labels"])
    if labels is not None and labels.shape[:2] != (scans, longest):
        raise ValueError(f"slice_labels has the shape {labels.shape}, not {(scans, longest)}")

    def slices(number: int) -> tuple[Any, Any]:
        keep, of_scan = masks[number], _features(features[number])
        if values.keys().isdisjoint({"mask", "lengths"}) and looks_padded(of_scan):
            raise ValueError(
                f"the last slice of scan {number} is 0 throughout, like padding; add mask (True for a slice) or lengths"
            )
        return of_scan[torch.from_numpy(keep)], None if labels is None else labels[number][keep]

    return columns, map(slices, range(scans))


def _masks(values: Fields, scans: int, longest: int) -> np.ndarray:
    """True for the slices of padded scans, (scans, slices)."""
    if "mask" in values:
        mask = np.asarray(values["mask"])
        if mask.shape != (scans, longest) or not np.isin(mask, (0, 1)).all():
            raise ValueError(f"mask is {mask.dtype} of shape {mask.shape}, not 0 and 1 of shape {(scans, longest)}")
        return mask.astype(bool)
    if "lengths" not in values:
        return np.ones((scans, longest), bool)
    lengths = np.array(_whole(values["lengths"], "lengths"))
    if len(lengths) != scans or (lengths > longest).any():
        raise ValueError(f"lengths are not {scans} numbers up to {longest}, as features of shape {scans} x {longest}")
    return np.arange(longest) < lengths[:, None]


def _ends(values: Fields) -> list[int] | None:
    """Where each packed scan ends; None if nothing cuts the slices, so that they are one scan."""
    rows = len(values["features"])
    if "lengths" in values:
        ends = np.cumsum(_whole(values["lengths"], "lengths")).tolist()
        what = f"lengths add up to {ends[-1] if ends else 0}"
    elif "offsets" in values:
        starts = _whole(values["offsets"], "offsets")
        ends = starts[1:] if starts[:1] == [0] else []
        what = f"offsets are {starts[:3]} to {starts[-1:]}, not 0 to the number of slices"
    elif "scan_index" in values:
        index = _whole(values["scan_index"], "scan_index")
        if index[:1] != [0] or any(after - before not in (0, 1) for before, after in pairwise(index)):
            raise ValueError("scan_index does not count the scans in order, as in 0 0 1 1 1 2; sort the slices by scan")
        ends = _changes(index)
        what = f"scan_index has {len(index)} values"
    elif "scan_id" in values and len(_column(values["scan_id"])) > 1:
        ids = _column(values["scan_id"])
        ends = _changes(ids)
        what = f"scan_id has {len(ids)} values, and lengths, offsets and scan_index are absent"
        if len(ids) == rows and len(ends) > len(set(ids)):
            raise ValueError("slices of one scan_id do not stand together; sort the slices by scan")
    else:
        return None
    if not ends or ends[-1] != rows:
        raise ValueError(f"{what}, but there are {rows} slices")
    return ends


def _changes(values: Sequence[Any]) -> list[int]:
    inner = [number for number, (before, after) in enumerate(pairwise(values), start=1) if before != after]
    return [*inner, len(values)] if len(values) else []


def _columns(values: Fields, scans: int, bounds: Sequence[int] = ()) -> Columns:
    columns = {name: _column(values[name]) for name in PER_SCAN if name in values}
    for name, column in columns.items():
        if len(column) == scans:
            continue
        if len(column) == 1 and name in ("part", "recipe"):  # one value may stand for all scans of a file
            columns[name] = column * scans
            continue
        if not bounds or len(column) != bounds[-1]:
            raise ValueError(f"{name} has {len(column)} values for {scans} scan{'' if scans == 1 else 's'}")
        for begin, end in pairwise(bounds):
            if any(value != column[begin] for value in column[begin:end]):
                raise ValueError(
                    f"{name} changes within a scan (positions {begin} to {end - 1}); give one value for each scan, and "
                    "labels of slices as slice_labels"
                )
        columns[name] = [column[begin] for begin in bounds[:-1]]
    return columns


def _column(value: Any) -> list[Any]:
    """Numbers or text of any shape as one list."""
    array = value if isinstance(value, Tensor) else np.asarray(value)
    flat: list[Any] = array.reshape(-1).tolist()
    return [value.decode("utf-8", "replace") if isinstance(value, bytes) else value for value in flat]


def _whole(value: Any, name: str) -> list[int]:
    column = _column(value)
    if any(not isinstance(number, int | float) or number != int(number) or number < 0 for number in column):
        raise ValueError(f"{name} are not whole numbers from 0")
    return [int(number) for number in column]


def _dimensions(value: Any) -> int:
    return len(getattr(value, "shape", ()))


def _is_float(value: Any) -> bool:
    return value.dtype in DTYPES.values() if isinstance(value, Tensor) else value.dtype.kind == "f"


def _features(value: Any) -> Float[Tensor, "slices features"]:
    array = value if isinstance(value, Tensor) else np.asarray(value)
    if array.ndim != 2 or not array.shape[1] or not _is_float(array):
        raise _not_features(array)
    if isinstance(array, Tensor):
        return array.detach().contiguous()
    return torch.from_numpy(np.array(array, array.dtype.newbyteorder("=")))


def _not_features(array: Any, what: str = "features are") -> ValueError:
    kind, shape = str(getattr(array, "dtype", type(array).__name__)), tuple(getattr(array, "shape", ()))
    return ValueError(
        f"{what} {kind.removeprefix('torch.')} of shape {shape}, not (slices, features) of floats, nor (scans, "
        "slices, features)"
    )


def _label(value: Any) -> int | None:
    """A label of 0 or 1; None for no label: nothing, NaN or -1."""
    word = _text(value).lower()
    if word in ("", str(UNKNOWN), f"{UNKNOWN}.0"):
        return None
    if word not in BINARY:
        raise ValueError(f"the label is {word}, not 0 or 1")
    return BINARY[word]


def _slice_labels(values: Any, slices: int) -> Int[Tensor, "slices"] | None:
    """None if all slice labels are unknown (-1)."""
    if values is None:
        return None
    labels = np.asarray(values).reshape(-1)
    if labels.dtype == object:
        labels = np.array([UNKNOWN if _text(label) == "" else label for label in labels.tolist()])
    if not np.isin(labels, (0, 1, UNKNOWN)).all():
        raise ValueError(f"slice labels other than 0, 1 and {UNKNOWN} (unknown)")
    if len(labels) != slices:
        raise ValueError(f"{len(labels)} slice labels for {slices} slices")
    return None if (labels == UNKNOWN).all() else torch.from_numpy(labels.astype(np.int64))


def _text(value: Any) -> str:
    """Text of a value; empty for None and NaN."""
    if value is None or value != value:
        return ""
    text = value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
    if len(text) > LONGEST_TEXT:
        raise ValueError(f"a text of {len(text):,} characters, {shorten(text)!r}, is not an id or a label")
    text.encode()  # half a character would make a store that cannot be read; the error is a ValueError
    return text


COLUMNS = ("scan_id", "label", "patient_id", "part", "split", *SLICE_COLUMNS)


class ScanTable:
    """The rows of a .csv or .parquet file, and which of them were used; `findings` stand in place of the label."""

    def __init__(self, path: Path, findings: Sequence[Finding] = ()) -> None:
        self.path, self.findings = path, tuple(findings)
        columns, _ = read = read_labels(path, "--labels", COLUMNS, ["scan_id"], findings)
        self.guesses = read.guesses()
        names = [name for name in columns if name != "scan_id"]
        if not names:
            raise UserError(f"--labels {path} has only the column scan_id; add {', '.join(COLUMNS[1:])}, or some")
        if {"part", "split"} <= set(names):
            raise UserError(f"--labels {path} has the columns part and split; leave one of them out")
        self.rows: dict[str, dict[str, str]] = {}
        for number, cells in enumerate(zip(*columns.values(), strict=True), start=1):
            row = dict(zip(columns, cells, strict=True))
            scan = row["scan_id"]
            if not scan or scan in self.rows or len(scan) > LONGEST_TEXT:
                problem = "is empty" if not scan else "occurs twice" if scan in self.rows else "is too long"
                raise UserError(f"--labels {path}, row {number}: scan_id {shorten(scan)!r} {problem}; correct the row")
            self.rows[scan] = row
        self.used: set[str] = set()

    def fill(self, scan: FoundScan, following: Iterable[FoundScan] = ()) -> FoundScan:
        """The scan with what its row says; a value that the file gives otherwise is an error."""
        row = self.rows.get(scan.scan_id)
        if row is None:
            others = [scan.scan_id, *(other.scan_id for other in islice(following, 3))]
            unused = self.rows.keys() - self.used or self.rows
            raise UserError(
                f"{scan.found.where}: scan {scan.scan_id!r} has no row in --labels {self.path}; add the row, or leave "
                f"the scan out ({both_sides('the table', unused, 'the features', others)})"
            )
        self.used.add(scan.scan_id)
        changes: dict[str, Any] = {}
        for name, value in self._values(scan, row).items():
            have = getattr(scan, name)
            if value is None:
                continue
            same = torch.equal(have, value) if isinstance(have, Tensor) else have in (None, value)
            if not same:
                raise UserError(
                    f"{scan.found.where}: scan {scan.scan_id!r} has another {name} than in --labels {self.path}"
                    f"{'' if name == 'slice_labels' else f' ({have} and {value})'}; correct one of them"
                )
            changes[name] = value
        return scan._replace(**changes)

    def further(self, scan: FoundScan) -> dict[str, Labels]:
        """The labels of a scan for all findings but the first."""
        row, labels = self.rows[scan.scan_id], {}
        for finding in self.findings[1:]:
            where = f"--labels {self.path}, scan {scan.scan_id!r}, finding {finding.name}"
            try:
                labels[finding.name] = further_labels(row, finding, len(scan.features))
            except ValueError as error:
                raise UserError(f"{where}: {error}; correct the row") from error
        return labels

    def _values(self, scan: FoundScan, row: dict[str, str]) -> dict[str, Any]:
        word, named = row.get("label", "").lower(), self.findings[0].name if self.findings else "label"
        try:
            if word and word not in BINARY:
                raise ValueError(f"{named} {shorten(word)!r} is neither 0 nor 1")
            label = BINARY.get(word)
            slices = slice_labels_in(row, len(scan.features))
            sliced = not row.keys().isdisjoint(SLICE_COLUMNS)
            if slices is None and sliced and (label if word else scan.label) == 0:
                slices = np.zeros(len(scan.features), np.int8)
            if self.findings and label is None and slices is None and scan.label is None:
                raise ValueError(f"{named} is empty, but the first finding must be known for every scan")
        except ValueError as error:
            row_number = list(self.rows).index(scan.scan_id) + 1
            raise UserError(
                f"--labels {self.path}, row {row_number}, scan {scan.scan_id!r}: {error}; correct the row"
            ) from error
        part = row.get("part") or row.get("split") or None
        of_slices = None if slices is None else torch.from_numpy(slices.astype(np.int64))
        return {"label": label, "slice_labels": of_slices, "patient_id": row.get("patient_id") or None, "part": part}
