"""Features of your own, read into a feature store.

A source is a file, a folder of files of one kind (`normal_guidance.features.feature_files`), or torchmil's folders.
`normal_guidance.features.scan_layouts` finds the scans in a file, a table (`normal_guidance.features.scan_table`) adds
labels and patients.  What `normal_guidance.features.convert` exported comes back exactly.
"""

from __future__ import annotations

import csv
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from itertools import chain
from pathlib import Path
from typing import Any, NamedTuple

import torch

from normal_guidance.core.bags import Bag, Bags
from normal_guidance.data.findings import OPTION, Finding, Labels
from normal_guidance.errors import UserError
from normal_guidance.features.convert import ABOUT, SPLITS
from normal_guidance.features.feature_files import KINDS, has_suffix, kind_of, open_file
from normal_guidance.features.scan_layouts import KEYS, FoundScan, scans_of
from normal_guidance.features.scan_table import ScanTable
from normal_guidance.features.store import FeatureStore, write_store
from normal_guidance.features.store_place import is_store
from normal_guidance.files import read_json_as
from normal_guidance.typed_json import parse_json

TORCHMIL = "torchmil"

FORMATS = (*KINDS, TORCHMIL)
"""Formats that features are imported from."""

TAKES = "a file of features (.npz, .npy, .pt, .h5, .parquet), or a folder of such files of one kind"

NO_PATIENTS = (
    "every scan without a patient id counts as a patient of its own, so a patient with several scans may lie on both "
    "sides of a split; add patient_id to the files, or to the table of --labels"
)


class Reading(NamedTuple):
    """The scans of a source, read one by one, and what an exported store recorded."""

    form: str
    provenance: Mapping[str, Any]
    scans: Iterator[FoundScan]


def import_store(
    source: str | Path,
    out: str | Path,
    form: str | None = None,
    *,
    labels: str | Path | None = None,
    findings: Sequence[Finding] = (),
    dtype: torch.dtype | None = None,
    tell: Callable[[str], object] = lambda line: None,
) -> FeatureStore:
    """Writes a new store from files of features; scans of two encoders are an error.

    Args:
        source: a file, a folder of files of one kind, or torchmil's folders.
        out: folder for the store.
        form: one of `FORMATS`; found from the files if left out.
        labels: a .csv or .parquet table of labels and patients, see `normal_guidance.features.scan_table`.
        findings: columns of that table with a label each, in place of the column label.
        dtype: number format of the stored features; that of the files if left out.
        tell: receives a line about the keys that were found, and a line for each warning.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> with TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/all.npz", x=np.ones((5, 3)), lengths=[2, 3], y=[0, 1], patient_id=["P1", "P2"])
        ...     import_store(f"{folder}/all.npz", f"{folder}/store")
        FeatureStore(2 scans of 2-3 slices (median 2), 5 slices x 3 features, 1 positive (50.0 %), float64, 120 bytes)
    """
    if findings and labels is None:
        raise UserError(f"{OPTION} names columns of the table of labels; give it: --labels TABLE")
    table = None if labels is None else ScanTable(Path(labels), findings)
    further: dict[str, Mapping[str, Labels]] = {}
    form, provenance, scans = read_scans(source, form, leave_out=labels)
    first = next(scans, None)
    if first is None:
        raise UserError(f"{source} holds no scan of format {form}; choose another of {', '.join(FORMATS)}")
    tell(str(first.found))
    alone: list[str] = []

    def stream() -> Iterator[tuple[str | None, Bags]]:
        for scan in checked(chain([first], scans)):
            filled = scan if table is None else table.fill(scan)
            if table is not None and findings:
                further[scan.scan_id] = table.further(scan)
            if filled.patient_id is None:
                alone.append(filled.scan_id)
            yield filled.part, _bags(filled)

    store = write_store(
        out,
        stream(),
        provenance=provenance,
        recipe=first.recipe,
        dtype=dtype,
        findings=findings,
        further=further,
    )
    if alone:
        which = "no scan has" if len(alone) == len(store) else f"{len(alone)} of {len(store)} scans do not have"
        tell(f"warning: {which} a patient id ({alone[0]!r}): {NO_PATIENTS}")
    if table is not None and table.unused:
        tell(
            f"warning: {len(table.unused)} of {len(table.rows)} rows of {table.path} have no features "
            f"({table.unused[0]!r}); they were left out"
        )
    return store


def checked(scans: Iterable[FoundScan]) -> Iterator[FoundScan]:
    """The scans; refuses a second scan of the same id, and features of a second encoder."""
    where: dict[str, str] = {}
    first: FoundScan | None = None
    for scan in scans:
        first = first or scan
        if scan.scan_id in where:
            raise UserError(
                f"scan {scan.scan_id!r} is in {where[scan.scan_id]} and in {scan.found.where}; give each scan once; a "
                f"key that every file has is not an id: call it {KEYS['features'][0]}"
            )
        if scan.recipe != first.recipe:
            raise UserError(
                f"{scan.found.where}: scan {scan.scan_id!r} was made by another encoder or preprocessing than scan "
                f"{first.scan_id!r} (recipes {scan.recipe[:12] or 'unknown'} and {first.recipe[:12] or 'unknown'}); "
                "keep them apart"
            )
        where[scan.scan_id] = scan.found.where
        yield scan


def _bags(scan: FoundScan) -> Bags:
    """A scan as a store takes it: it needs a label, of its own or from its slices."""
    label, slices = scan.label, scan.slice_labels
    if label is None and slices is not None and bool((slices >= 0).all()):
        label = int(slices.any())
    if label is None:
        raise UserError(
            f"{scan.found.where}: scan {scan.scan_id!r} has no label; looked for {', '.join(KEYS['label'])}, "
            f"{', '.join(KEYS['slice_labels'])}; found {', '.join(scan.found.keys)}; add one of them, or give a table "
            "with the columns scan_id and label: --labels TABLE"
        )
    try:
        return Bags.pack([Bag(scan.features, label, slices, scan.scan_id, scan.patient_id or scan.scan_id)])
    except UserError as error:
        raise UserError(f"{scan.found.where}: {error}") from error


def read_scans(source: str | Path, form: str | None = None, *, leave_out: str | Path | None = None) -> Reading:
    """The scans of a source, read one by one; labels may be missing.

    Args:
        source: a file, a folder of files of one kind, or torchmil's folders.
        form: one of `FORMATS`; found from the files if left out.
        leave_out: a file in the folder that holds no features, such as the table of labels.
    """
    source = Path(source)
    if form is not None and form not in FORMATS:
        raise UserError(f"format {form!r} is unknown; choose one of {', '.join(FORMATS)}")
    if not source.exists():
        raise UserError(f"{source} does not exist; give {TAKES}")
    left_out = None if leave_out is None else Path(leave_out).resolve()
    files = [source] if source.is_file() else _files(source, left_out)
    form = form or _form(source, files)
    if form == TORCHMIL:
        return Reading(form, _about(source, form)["provenance"], _torchmil_scans(source))
    if source.is_file():
        return Reading(form, _provenance_of(source, form), _scans_of_files(files, form))
    about = _about(source, form)
    chosen = [file for file in files if kind_of(file) == form]
    return Reading(form, about["provenance"], _scans_of_files(_by_order(chosen, about["order"]), form))


def _files(folder: Path, left_out: Path | None) -> list[Path]:
    files = (file for file in folder.iterdir() if file.is_file() and not file.name.startswith("."))
    return sorted(file for file in files if has_suffix(file) and file.resolve() != left_out)


def _form(source: Path, files: list[Path]) -> str:
    """The format of a source."""
    if is_store(source):
        raise UserError(f"{source} is a feature store already; use it as it is, or export it: nguide store export")
    if source.is_dir() and (source / "features").is_dir():
        return TORCHMIL
    forms = sorted({kind for file in files if (kind := kind_of(file)) is not None})
    if not forms:
        below = sorted(path.name for path in source.iterdir())[:10] if source.is_dir() else []
        found = f"; found {', '.join(below) or 'nothing'}" if source.is_dir() else ""
        raise UserError(f"{source} holds no scan: it is not {TAKES}{found}")
    if len(forms) > 1:
        raise UserError(f"{source} holds files of {' and '.join(forms)}; choose with --format, or move some away")
    return forms[0]


def _scans_of_files(files: list[Path], kind: str) -> Iterator[FoundScan]:
    for file in files:
        with open_file(file, kind) as fields:
            yield from scans_of(fields, str(file), file.stem)


def _by_order(files: list[Path], order: list[str]) -> list[Path]:
    """Files in the order of the exported store; those of other programs by name."""
    place = {name: number for number, name in enumerate(order)}
    return sorted(files, key=lambda file: (place.get(file.stem, len(place)), file.name))


def _about(folder: Path, form: str) -> dict[str, Any]:
    """Provenance, recipe and order of an exported store; files of other programs have none."""
    path = folder / ABOUT
    if not path.exists():
        return {"provenance": {"imported_from": form}, "recipe": "", "order": []}
    return asdict(read_json_as(path, _Exported, "export the store again, or delete the file", exact=False))


@dataclass(frozen=True)
class _Exported:
    """What an exported store says of itself."""

    provenance: dict[str, Any]
    recipe: str
    order: list[str]


def _provenance_of(file: Path, form: str) -> dict[str, Any]:
    """Provenance that an exported HDF5 file holds as an attribute."""
    if form != "hdf5":
        return {"imported_from": form}
    with open_file(file, form) as fields:
        text = fields.get("provenance")
        provenance = parse_json(text) if isinstance(text, str) else {"imported_from": form}
        if not isinstance(provenance, dict):
            raise ValueError("the attribute provenance is not a JSON object")
        return provenance


def _torchmil_scans(source: Path) -> Iterator[FoundScan]:
    """Scans of torchmil's folders: each folder is a field, each file a scan."""
    about, rows = _about(source, TORCHMIL), _read_splits(source / SPLITS)
    folders = {"features": "features", "label": "labels", "slice_labels": "inst_labels"}
    if not (source / "inst_labels").is_dir():
        folders["slice_labels"] = "slice_labels"
    folders = {field: name for field, name in folders.items() if (source / name).is_dir()}
    for file in _by_order(list((source / "features").glob("*.npy")), about["order"]):
        row = rows.get(file.stem, {})
        fields: dict[str, Any] = {field: _array(source / name / file.name) for field, name in folders.items()}
        fields |= {"part": row.get("split"), "patient_id": row.get("patient_id"), "recipe": about["recipe"]}
        yield from scans_of({name: one for name, one in fields.items() if one is not None}, str(file), file.stem)


def _array(path: Path) -> Any:
    with open_file(path, "npy") as fields:
        return fields["features"]


def _read_splits(path: Path) -> dict[str, dict[str, str]]:
    if not path.exists():
        return {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return {row["bag_name"]: row for row in csv.DictReader(file)}
    except (OSError, ValueError, KeyError, csv.Error) as error:
        raise UserError(f"{path} cannot be read ({error!r}); it needs the columns bag_name and split") from error
