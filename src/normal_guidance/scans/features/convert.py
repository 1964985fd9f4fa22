"""Features of other programs, read into a store, and a store written for other programs.

    npz        a file for each scan: features, label and, where known, slice_labels, patient_id, part
    hdf5       one file with a group for each scan: features and slice_labels; label, patient_id, part are attributes
    torchmil   features/, labels/, inst_labels/ with a .npy for each scan, and splits.csv (bag_name, split)

These three are written.  Read are these and any file of features, or folder of files of one kind (`feature_files.py`),
whichever way the scans are arranged in them, with a table of labels and patients (`arrangements.py`).  An exported
store comes back exactly, in the same order, with the same recipe and provenance.  Names of files and groups are the
scans' ids, with characters that some disks do not allow written as %XX.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import chain
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import torch

from normal_guidance.base.errors import UserError, choose_one_of, reading
from normal_guidance.base.files import folder_atomically, read_json_as, write_atomically
from normal_guidance.base.records import parse_json
from normal_guidance.core.arrays import refuse_alike
from normal_guidance.core.bags import UNKNOWN, Bag, Bags
from normal_guidance.scans.features.arrangements import KEYS, FoundScan, ScanTable, scans_of
from normal_guidance.scans.features.feature_files import KINDS, has_suffix, kind_of, open_file
from normal_guidance.scans.features.hdf5_files import SafeDisk, import_h5py
from normal_guidance.scans.features.store import FeatureStore, write_store
from normal_guidance.scans.features.store_place import is_store
from normal_guidance.scans.index.manifest import OPTION, Finding, Labels
from normal_guidance.scans.index.problems import file_name
from normal_guidance.show.text_tables import as_csv

TORCHMIL = "torchmil"

IMPORT_FORMATS = (*KINDS, TORCHMIL)

ABOUT, SPLITS = "about.json", "splits.csv"

TAKES = "a file of features (.npz, .npy, .pt, .h5, .parquet), or a folder of such files of one kind"


@dataclass(frozen=True)
class ExportFile:
    """What an exported store says of itself in about.json; files of other programs have none."""

    provenance: dict[str, Any]
    recipe: str
    order: list[str]


def export_store(store: FeatureStore, out: str | Path, form: str) -> None:
    """Writes a store in another format, completely or not at all; `out` must not exist yet."""
    choose_one_of("format", form, EXPORT_FORMATS)
    if len(store.findings) > 1:
        names = ", ".join(finding.name for finding in store.findings)
        raise UserError(f"{store.folder} has the findings {names}, but {form} has one label; choose: --finding NAME")
    if store.dtype == torch.bfloat16:
        raise UserError(f"store {store.folder} is bfloat16, which {form} does not have; write it as float32 first")
    if long := [scan for scan in store.scan_ids if len(file_name(scan)) > 240]:  # disks allow 255, with a suffix
        raise UserError(f"scan id {long[0]!r} is too long for a file's name; give the scans shorter ids")
    EXPORT_FORMATS[form](store, Path(out).absolute())


def _exported(store: FeatureStore) -> Iterator[tuple[str, dict[str, Any]]]:
    """Each scan's name and what is known of it, loaded one at a time."""
    for scan, part in zip(store.scan_ids, store.scans["part"].tolist(), strict=True):
        bag = store.select([scan]).bags()[0]
        known = {
            "features": bag.features.numpy(),
            "label": bag.label,
            "patient_id": bag.patient_id,
            "part": part,
            "recipe": store.recipe,
            "slice_labels": None if bag.slice_labels is None else bag.slice_labels.numpy().astype(np.int8),
        }
        yield file_name(scan), {name: value for name, value in known.items() if value is not None}


def _write_about(folder: Path, store: FeatureStore) -> None:
    about = {"provenance": store.provenance, "recipe": store.recipe, "order": [file_name(s) for s in store.scan_ids]}
    write_atomically(folder / ABOUT, json.dumps(about).encode())


def _write_npz(store: FeatureStore, out: Path) -> None:
    with folder_atomically(out) as draft:
        for name, fields in _exported(store):
            write_atomically(draft / f"{name}.npz", partial(np.savez, **fields))
        _write_about(draft, store)


def _write_hdf5(store: FeatureStore, out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already; choose another name, or move or delete it first")
    h5py = import_h5py()

    def fill(file: BinaryIO) -> None:
        disk = SafeDisk(file)
        with h5py.File(disk, "w", track_order=True) as opened:
            opened.attrs["provenance"] = json.dumps(store.provenance)
            for name, fields in _exported(store):
                group = opened.create_group(name)
                for key, value in fields.items():
                    if isinstance(value, np.ndarray):
                        group[key] = value
                    else:
                        group.attrs[key] = value
                disk.check()
        disk.check()

    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, fill)


def _write_torchmil(store: FeatureStore, out: Path) -> None:
    with folder_atomically(out) as draft:
        rows = []
        for folder in ("features", "labels", "inst_labels"):
            (draft / folder).mkdir()
        for name, fields in _exported(store):
            slices = fields.get("slice_labels", np.full(len(fields["features"]), UNKNOWN)).astype(np.int64)
            arrays = {"features": fields["features"], "labels": np.array([fields["label"]]), "inst_labels": slices}
            for folder, array in arrays.items():
                write_atomically(draft / folder / f"{name}.npy", partial(np.save, arr=array))
            rows.append({"bag_name": name, "split": fields.get("part", ""), "patient_id": fields["patient_id"]})
        write_atomically(draft / SPLITS, as_csv(rows).encode())  # torchmil reads the first two columns
        _write_about(draft, store)


EXPORT_FORMATS: dict[str, Callable[[FeatureStore, Path], None]] = {
    "npz": _write_npz,
    "hdf5": _write_hdf5,
    TORCHMIL: _write_torchmil,
}


def import_store(
    source: str | Path,
    out: str | Path,
    form: str | None = None,
    *,
    labels: str | Path | None = None,
    findings: Sequence[Finding] = (),
    tell: Callable[[str], object] = lambda line: None,
) -> FeatureStore:
    """Writes a new store from files of features; scans of two encoders are an error.

    Args:
        source: a file, a folder of files of one kind, or torchmil's folders.
        out: folder for the store.
        form: one of `IMPORT_FORMATS`; found from the files if left out.
        labels: a .csv or .parquet table of labels and patients, see docs/howto/own-features.md.
        findings: columns of that table with a label each, in place of the column label.
        tell: receives a line about the keys that were found, and a line for each warning.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> import numpy as np
        >>> with TemporaryDirectory() as folder:
        ...     np.savez(f"{folder}/all.npz", x=np.eye(5, 3), lengths=[2, 3], y=[0, 1], patient_id=["P1", "P2"])
        ...     import_store(f"{folder}/all.npz", f"{folder}/store")
        FeatureStore(2 scans of 2-3 slices (median 2), 5 slices x 3 features, 1 positive (50.0 %), float64, 120 bytes)
    """
    if findings and labels is None:
        raise UserError(f"{OPTION} names columns of the table of labels; give it: --labels TABLE")
    table = None if labels is None else ScanTable(Path(labels), findings)
    if table is not None and table.guesses:
        tell(f"{labels}: column {table.guesses}")
    further: dict[str, Mapping[str, Labels]] = {}
    form, provenance, scans = read_scans(source, form, leave_out=labels)
    first = next(scans, None)
    if first is None:
        raise UserError(f"{source} holds no scan of format {form}; choose another of {', '.join(IMPORT_FORMATS)}")
    tell(str(first.found))
    alone: list[str] = []
    sample: list[torch.Tensor] = []

    def stream() -> Iterator[tuple[str | None, Bags]]:
        every = checked(chain([first], scans))
        for scan in every:
            filled = scan if table is None else table.fill(scan, every)
            if table is not None and findings:
                further[scan.scan_id] = table.further(scan)
            if filled.patient_id is None:
                alone.append(filled.scan_id)
            yield filled.part, _bags(filled)
            if sum(map(len, sample)) < 1024:  # so many slices show whether features vary
                sample.append(filled.features.double())
        if len(rows := torch.cat(sample)) > 1:
            spread = torch.std_mean(rows, 0, correction=0)
            refuse_alike(*spread, f"features in {source}", "check what made them, or subtract what all share")

    store = write_store(
        out,
        stream(),
        provenance=provenance,
        recipe=first.recipe,
        findings=findings,
        further=further,
    )
    if alone:
        which = "no scan has" if len(alone) == len(store) else f"{len(alone)} of {len(store)} scans do not have"
        tell(
            f"warning: {which} a patient id ({alone[0]!r}): every scan without a patient id counts as a patient of its "
            "own, so a patient with several scans may lie on both sides of a split; add patient_id to the files, or to "
            "the table of --labels"
        )
    if table is not None and (unused := [scan for scan in table.rows if scan not in table.used]):
        tell(
            f"warning: {len(unused)} of {len(table.rows)} rows of {table.path} have no features ({unused[0]!r}); they "
            "were left out"
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
    """A scan as a store takes it: it needs a label, from the file or its slices."""
    label, slices = scan.label, scan.slice_labels
    if label is None and slices is not None and bool((slices >= 0).all()):
        label = int(slices.any())
    if label is None:
        raise UserError(
            f"{scan.found.where}: scan {scan.scan_id!r} has no label; looked for {', '.join(KEYS['label'])}, "
            f"{', '.join(KEYS['slice_labels'])}; found {', '.join(scan.found.keys)}; add one of them, or give a table "
            "with the columns scan_id and label: --labels TABLE"
        )
    with reading(scan.found.where, "correct it, or leave it out"):
        return Bags.pack([Bag(scan.features, label, slices, scan.scan_id, scan.patient_id or scan.scan_id)])


def read_scans(
    source: str | Path, form: str | None = None, *, leave_out: str | Path | None = None
) -> tuple[str, Mapping[str, Any], Iterator[FoundScan]]:
    """The format of a source, the provenance that an exported store recorded, and the scans, read one by one."""
    # `leave_out` is a file in the folder that holds no features, such as the table of labels.
    source = Path(source)
    if form is not None:
        choose_one_of("format", form, IMPORT_FORMATS)
    if not source.exists():
        raise UserError(f"{source} does not exist; give {TAKES}")
    files = [source]
    if source.is_dir():
        left_out = None if leave_out is None else Path(leave_out).resolve()
        inside = (file for file in source.iterdir() if file.is_file() and not file.name.startswith("."))
        files = sorted(file for file in inside if has_suffix(file) and file.resolve() != left_out)
    form = form or _form(source, files)
    about = ExportFile({"imported_from": form}, "", [])
    if (source / ABOUT).exists():
        about = read_json_as(source / ABOUT, ExportFile, "export the store again, or delete the file", exact=False)
    if form == TORCHMIL:
        return form, about.provenance, _torchmil_scans(source, about)
    if source.is_file():
        provenance = about.provenance
        if form == "hdf5":  # an exported file holds it as an attribute
            with open_file(source, form) as fields:
                text = fields.get("provenance")
                provenance = parse_json(text) if isinstance(text, str) else provenance
                if not isinstance(provenance, dict):
                    raise ValueError("the attribute provenance is not a JSON object")
        return form, provenance, _scans_of_files(files, form)
    chosen = [file for file in files if kind_of(file) == form]
    return form, about.provenance, _scans_of_files(_by_order(chosen, about.order), form)


def _form(source: Path, files: list[Path]) -> str:
    if is_store(source):
        raise UserError(f"{source} is a feature store already; use it as it is, or export it: nguide store export")
    if source.is_dir() and (source / "features").is_dir():
        return TORCHMIL
    forms = sorted({kind for file in files if (kind := kind_of(file)) is not None})
    if not forms:
        below = sorted(path.name for path in source.iterdir())[:10] if source.is_dir() else []
        there = f"; found {', '.join(below) or 'nothing'}" if source.is_dir() else ""
        raise UserError(f"{source} holds no scan: it is not {TAKES}{there}")
    if len(forms) > 1:
        raise UserError(f"{source} holds files of {' and '.join(forms)}; choose with --format, or move some away")
    return forms[0]


def _scans_of_files(files: list[Path], kind: str) -> Iterator[FoundScan]:
    for file in files:
        with open_file(file, kind) as fields:
            yield from scans_of(fields, str(file), file.stem)


def _by_order(files: list[Path], order: list[str]) -> list[Path]:
    """Files in the order of the exported store; those of other programs by name."""
    number_of = {name: number for number, name in enumerate(order)}
    return sorted(files, key=lambda file: (number_of.get(file.stem, len(order)), file.name))


def _torchmil_scans(source: Path, about: ExportFile) -> Iterator[FoundScan]:
    """Scans of torchmil's folders: each folder is a field, each file a scan."""
    rows, splits = {}, source / SPLITS
    if splits.exists():
        with reading(splits, "it needs the columns bag_name and split", csv.Error):
            lines = csv.DictReader(io.StringIO(splits.read_text(encoding="utf-8"), newline=""))
            rows = {row["bag_name"]: row for row in lines}
    folders = {"features": "features", "label": "labels", "slice_labels": "inst_labels"}
    if not (source / "inst_labels").is_dir():
        folders["slice_labels"] = "slice_labels"
    folders = {field: name for field, name in folders.items() if (source / name).is_dir()}
    for file in _by_order(list((source / "features").glob("*.npy")), about.order):
        row = rows.get(file.stem, {})
        fields: dict[str, Any] = {}
        for key, name in folders.items():
            with open_file(source / name / file.name, "npy") as array:
                fields[key] = array["features"]
        fields |= {"part": row.get("split"), "patient_id": row.get("patient_id"), "recipe": about.recipe}
        yield from scans_of({key: value for key, value in fields.items() if value is not None}, str(file), file.stem)
