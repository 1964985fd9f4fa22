"""A feature store in other programs' formats, and back: npz, HDF5, torchmil's folders.

    npz        a folder with a file for each scan: features, label and, where known, slice_labels, patient_id, part
    hdf5       one file with a group for each scan: features and slice_labels; label, patient_id, part are attributes
    torchmil   features/, labels/, inst_labels/ with a .npy for each scan, and splits.csv (bag_name, split)

An exported store is imported exactly, in the same order, with the same recipe and provenance.  Files of other programs
need features and labels only.  Names of files and groups are the scans' ids, with characters that some disks do not
allow written as %XX.  Reading executes no code: pickles are not allowed.
"""

from __future__ import annotations

import csv
import io
import json
import os
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple
from urllib.parse import quote, unquote

import numpy as np
import torch

from normal_guidance.core.bags import UNKNOWN, Bag, Bags
from normal_guidance.errors import UserError
from normal_guidance.features.store import FeatureStore, write_store
from normal_guidance.files import folder_atomically, sync, sync_folder, write_atomically

ABOUT, SPLITS = "about.json", "splits.csv"

NAME_BYTES = 240
"""Longest name of a file, without its suffix: disks allow 255 bytes."""


class Scan(NamedTuple):
    """One scan between a store and another format."""

    bag: Bag
    part: str | None
    recipe: str


class Format(NamedTuple):
    """The functions that write and read a format."""

    write: Callable[[FeatureStore, Path], None]
    read: Callable[[Path], tuple[Mapping[str, Any], Iterator[Scan]]]
    """Returns the store's provenance and its scans."""


def export_store(store: FeatureStore, out: str | Path, form: str) -> None:
    """Writes a store in another format, completely or not at all; `out` must not exist yet."""
    write = _format(form).write
    if store.dtype == torch.bfloat16:
        raise UserError(f"store {store.folder} is bfloat16, which {form} does not have; write it as float32 first")
    long = [scan for scan in store.scan_ids if len(file_name(scan)) > NAME_BYTES]
    if long:
        raise UserError(f"scan id {long[0]!r} is too long for a file's name; give the scans shorter ids")
    write(store, Path(out).absolute())


def import_store(source: str | Path, out: str | Path, form: str, *, dtype: torch.dtype | None = None) -> FeatureStore:
    """Writes a new store from another format; scans of two encoders are an error."""
    read = _format(form).read
    if not Path(source).exists():
        raise UserError(f"{source} does not exist; give a file or folder of format {form}")
    provenance, scans = read(Path(source))
    first = next(scans, None)
    if first is None:
        raise UserError(f"{source} holds no scan of format {form}; choose another of {', '.join(FORMATS)}")

    def stream() -> Iterator[tuple[str | None, Bags]]:
        yield first.part, Bags.pack([first.bag])
        for scan in scans:
            if scan.recipe != first.recipe:
                raise UserError(
                    f"{source}: scan {scan.bag.scan_id!r} was made by another encoder or preprocessing than scan "
                    f"{first.bag.scan_id!r} (recipes {scan.recipe[:12] or 'unknown'} and "
                    f"{first.recipe[:12] or 'unknown'}); import them as two stores"
                )
            yield scan.part, Bags.pack([scan.bag])

    return write_store(out, stream(), provenance=provenance, recipe=first.recipe, dtype=dtype)


def _format(name: str) -> Format:
    if name not in FORMATS:
        raise UserError(f"format {name!r} is unknown; choose one of {', '.join(FORMATS)}")
    return FORMATS[name]


def file_name(scan: str) -> str:
    """A scan's id as a file name; `unquote` is the inverse.

    Example:
        >>> file_name("ID_a2.1"), file_name("../a b"), file_name("é")
        ('ID_a2.1', '%2E.%2Fa%20b', '%C3%A9')
    """
    name = quote(scan, safe="")
    return f"%2E{name[1:]}" if name.startswith(".") else name


def _scans(store: FeatureStore) -> Iterator[Scan]:
    """The scans of a store, loaded one at a time."""
    for number, part in enumerate(store.scans["part"].tolist()):
        one = store.select([store.scan_ids[number]])
        yield Scan(one.bags()[0], part, store.recipe)


def _labels(values: Any, where: str) -> torch.Tensor | None:
    """Slice labels of one scan, checked; None if all of them are unknown (-1)."""
    if values is None:
        return None
    labels = np.asarray(values).reshape(-1)
    if not np.isin(labels, (0, 1, UNKNOWN)).all():
        raise UserError(f"{where} has slice labels other than 0, 1 and {UNKNOWN} (unknown); correct them")
    return None if (labels == UNKNOWN).all() else torch.from_numpy(labels.astype(np.int64))


def _scan(where: str, scan: str, fields: Mapping[str, Any], recipe: str = "") -> Scan:
    """A scan from the fields of a file, with the checks that `Bags` does not make."""
    try:
        features, label = np.asarray(fields["features"]), np.asarray(fields["label"]).reshape(())
        if features.dtype.kind != "f" or features.ndim != 2:
            raise ValueError(
                f"features are {features.dtype} of shape {features.shape}, not (slices, features) of floats"
            )
        if label not in (0, 1):
            raise ValueError(f"the label is {label}, not 0 or 1")
        slice_labels = _labels(fields.get("slice_labels"), where)
        if slice_labels is not None and len(slice_labels) != len(features):
            raise ValueError(f"{len(slice_labels)} slice labels for {len(features)} slices")
        bag = Bag(
            torch.from_numpy(np.ascontiguousarray(features.astype(features.dtype.newbyteorder("="), copy=False))),
            int(label),
            slice_labels,
            scan,
            str(fields.get("patient_id", scan)),
        )
    except UserError:
        raise
    except (KeyError, ValueError, TypeError) as error:
        raise UserError(f"{where} cannot be imported ({error}); correct it, or leave it out") from error
    part = fields.get("part")
    return Scan(bag, None if part is None else str(part), str(fields.get("recipe", recipe)))


def _fields(scan: Scan) -> dict[str, Any]:
    """The fields of a scan in npz and HDF5."""
    bag = scan.bag
    known = {"slice_labels": None if bag.slice_labels is None else bag.slice_labels.numpy().astype(np.int8)}
    fields = {"label": bag.label, "patient_id": bag.patient_id, "part": scan.part, "recipe": scan.recipe, **known}
    return {"features": bag.features.numpy(), **{name: value for name, value in fields.items() if value is not None}}


def _about(folder: Path, form: str) -> dict[str, Any]:
    """Provenance, recipe and order of an exported store; files of other programs have none."""
    path = folder / ABOUT
    if not path.exists():
        return {"provenance": {"imported_from": form}, "recipe": "", "order": []}
    try:
        about = json.loads(path.read_bytes())
        return {name: about[name] for name in ("provenance", "recipe", "order")}
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} cannot be read ({error!r}); export the store again, or delete the file") from error


def _write_about(folder: Path, store: FeatureStore) -> None:
    about = {"provenance": store.provenance, "recipe": store.recipe, "order": [file_name(s) for s in store.scan_ids]}
    write_atomically(folder / ABOUT, json.dumps(about).encode())


def _sorted_by_order(names: list[str], order: list[str]) -> list[str]:
    place = {name: number for number, name in enumerate(order)}
    return sorted(names, key=lambda name: (place.get(name, len(place)), name))


# ----------------------------------------------------------------------------------------------------
# npz
# ----------------------------------------------------------------------------------------------------


def _write_npz(store: FeatureStore, out: Path) -> None:
    with folder_atomically(out) as draft:
        for scan in _scans(store):
            content = io.BytesIO()
            np.savez(content, **_fields(scan))
            write_atomically(draft / f"{file_name(str(scan.bag.scan_id))}.npz", content.getvalue())
        _write_about(draft, store)


def _read_npz(source: Path) -> tuple[Mapping[str, Any], Iterator[Scan]]:
    about = _about(source, "npz")
    names = _sorted_by_order([file.stem for file in source.glob("*.npz")], about["order"])

    def scans() -> Iterator[Scan]:
        for name in names:
            path = source / f"{name}.npz"
            try:
                with path.open("rb") as file, np.load(file, allow_pickle=False) as arrays:
                    fields = {key: arrays[key] for key in arrays}
            except (OSError, ValueError, zipfile.BadZipFile) as error:
                raise UserError(f"{path} cannot be read ({error}); leave it out, or copy it again") from error
            yield _scan(str(path), unquote(name), fields)

    return about["provenance"], scans()


# ----------------------------------------------------------------------------------------------------
# HDF5
# ----------------------------------------------------------------------------------------------------


def _h5py() -> Any:
    try:
        import h5py
    except ImportError as error:
        raise UserError("h5py is not installed; pip install 'normal-guidance[encoders]'") from error
    return h5py


def _write_hdf5(store: FeatureStore, out: Path) -> None:
    h5py = _h5py()
    if out.exists():
        raise UserError(f"{out} exists already; choose another name, or move or delete it first")
    out.parent.mkdir(parents=True, exist_ok=True)
    draft = out.with_name(f".{out.name}.{os.getpid()}.partial")
    try:
        with h5py.File(draft, "w", track_order=True) as file:
            file.attrs["provenance"] = json.dumps(store.provenance)
            for scan in _scans(store):
                group = file.create_group(file_name(str(scan.bag.scan_id)))
                for name, value in _fields(scan).items():
                    if isinstance(value, np.ndarray):
                        group[name] = value
                    else:
                        group.attrs[name] = value
        with draft.open("r+b") as written:
            sync(written)
        draft.replace(out)
    finally:
        draft.unlink(missing_ok=True)
    sync_folder(out.parent)


def _read_hdf5(source: Path) -> tuple[Mapping[str, Any], Iterator[Scan]]:
    h5py = _h5py()
    try:
        with h5py.File(source, "r") as file:
            provenance = json.loads(file.attrs.get("provenance", '{"imported_from": "hdf5"}'))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{source} cannot be read as HDF5 ({error}); give a file that h5py opens") from error

    def scans() -> Iterator[Scan]:
        with h5py.File(source, "r", track_order=True) as file:
            for name in file:
                where = f"{source}, {name}"
                try:
                    item = file[name]
                    inner = {} if isinstance(item, h5py.Dataset) else {key: item[key][()] for key in item}
                    own = {"features": item[()]} if isinstance(item, h5py.Dataset) else inner
                    fields = {**dict(item.attrs), **own}
                except (OSError, KeyError, RuntimeError, TypeError) as error:
                    raise UserError(f"{where} cannot be read ({error}); copy the file again") from error
                yield _scan(where, unquote(name), fields)

    return provenance, scans()


# ----------------------------------------------------------------------------------------------------
# torchmil
# ----------------------------------------------------------------------------------------------------

SPLIT_COLUMNS = ("bag_name", "split", "patient_id")
"""Columns of splits.csv; torchmil reads the first two."""


def _write_torchmil(store: FeatureStore, out: Path) -> None:
    with folder_atomically(out) as draft:
        text = io.StringIO(newline="")
        table = csv.writer(text, lineterminator="\n")
        table.writerow(SPLIT_COLUMNS)
        for folder in ("features", "labels", "inst_labels"):
            (draft / folder).mkdir()
        for scan in _scans(store):
            bag, name = scan.bag, file_name(str(scan.bag.scan_id))
            labels = torch.full((len(bag.features),), UNKNOWN) if bag.slice_labels is None else bag.slice_labels
            arrays = {"features": bag.features.numpy(), "labels": np.array([bag.label]), "inst_labels": labels.numpy()}
            for folder, array in arrays.items():
                content = io.BytesIO()
                np.save(content, array)
                write_atomically(draft / folder / f"{name}.npy", content.getvalue())
            table.writerow((name, scan.part or "", bag.patient_id))
        write_atomically(draft / SPLITS, text.getvalue().encode())
        _write_about(draft, store)


def _read_torchmil(source: Path) -> tuple[Mapping[str, Any], Iterator[Scan]]:
    about, rows = _about(source, "torchmil"), _read_splits(source / SPLITS)
    names = _sorted_by_order([file.stem for file in (source / "features").glob("*.npy")], about["order"])
    slice_labels = next((f for f in ("inst_labels", "slice_labels") if (source / f).is_dir()), None)

    def scans() -> Iterator[Scan]:
        for name in names:
            row = rows.get(name, {})
            fields = {
                "features": _load(source / "features" / f"{name}.npy"),
                "label": _load(source / "labels" / f"{name}.npy"),
                "slice_labels": None if slice_labels is None else _load(source / slice_labels / f"{name}.npy"),
                "part": row.get("split") or None,
                "patient_id": row.get("patient_id") or unquote(name),
            }
            yield _scan(str(source / "features" / f"{name}.npy"), unquote(name), fields, about["recipe"])

    return about["provenance"], scans()


def _load(path: Path) -> np.ndarray:
    try:
        array: np.ndarray = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise UserError(f"{path} cannot be read ({error}); leave the scan out, or copy it again") from error
    return array


def _read_splits(path: Path) -> dict[str, dict[str, str]]:
    if not path.exists():
        return {}
    try:
        with path.open(newline="", encoding="utf-8") as file:
            return {row["bag_name"]: row for row in csv.DictReader(file)}
    except (OSError, ValueError, KeyError) as error:
        raise UserError(f"{path} cannot be read ({error!r}); it needs the columns bag_name and split") from error


FORMATS = {
    "npz": Format(_write_npz, _read_npz),
    "hdf5": Format(_write_hdf5, _read_hdf5),
    "torchmil": Format(_write_torchmil, _read_torchmil),
}
"""Formats that a store is exported to and imported from."""
