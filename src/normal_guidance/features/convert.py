"""A feature store in other programs' formats: npz, HDF5, torchmil's folders.

    npz        a folder with a file for each scan: features, label and, where known, slice_labels, patient_id, part
    hdf5       one file with a group for each scan: features and slice_labels; label, patient_id, part are attributes
    torchmil   features/, labels/, inst_labels/ with a .npy for each scan, and splits.csv (bag_name, split)

`normal_guidance.features.import_features` reads an exported store exactly, in the same order, with the same recipe and
provenance.  Names of files and groups are the scans' ids, with characters that some disks do not allow written as %XX.
"""

from __future__ import annotations

import csv
import io
import json
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, NamedTuple

import numpy as np
import torch

from normal_guidance.core.bags import UNKNOWN, Bag
from normal_guidance.data.scan_names import file_name
from normal_guidance.errors import UserError
from normal_guidance.features.hdf5_files import import_h5py
from normal_guidance.features.store import FeatureStore
from normal_guidance.files import folder_atomically, write_atomically

if TYPE_CHECKING:
    from typing_extensions import Buffer

ABOUT, SPLITS = "about.json", "splits.csv"

NAME_BYTES = 240
"""Longest name of a file, without its suffix: disks allow 255 bytes."""


class _Scan(NamedTuple):
    bag: Bag
    part: str | None
    recipe: str


def export_store(store: FeatureStore, out: str | Path, form: str) -> None:
    """Writes a store in another format, completely or not at all; `out` must not exist yet."""
    if form not in FORMATS:
        raise UserError(f"format {form!r} is unknown; choose one of {', '.join(FORMATS)}")
    if len(store.findings) > 1:
        names = ", ".join(one.name for one in store.findings)
        raise UserError(
            f"store {store.folder} has the findings {names}, but {form} has one label; choose one: --finding NAME"
        )
    if store.dtype == torch.bfloat16:
        raise UserError(f"store {store.folder} is bfloat16, which {form} does not have; write it as float32 first")
    long = [scan for scan in store.scan_ids if len(file_name(scan)) > NAME_BYTES]
    if long:
        raise UserError(f"scan id {long[0]!r} is too long for a file's name; give the scans shorter ids")
    FORMATS[form](store, Path(out).absolute())


def _scans(store: FeatureStore) -> Iterator[_Scan]:
    """The scans of a store, loaded one at a time."""
    for number, part in enumerate(store.scans["part"].tolist()):
        one = store.select([store.scan_ids[number]])
        yield _Scan(one.bags()[0], part, store.recipe)


def _fields(scan: _Scan) -> dict[str, Any]:
    """The fields of a scan in npz and HDF5."""
    bag = scan.bag
    known = {"slice_labels": None if bag.slice_labels is None else bag.slice_labels.numpy().astype(np.int8)}
    fields = {"label": bag.label, "patient_id": bag.patient_id, "part": scan.part, "recipe": scan.recipe, **known}
    return {"features": bag.features.numpy(), **{name: value for name, value in fields.items() if value is not None}}


def _write_about(folder: Path, store: FeatureStore) -> None:
    about = {"provenance": store.provenance, "recipe": store.recipe, "order": [file_name(s) for s in store.scan_ids]}
    write_atomically(folder / ABOUT, json.dumps(about).encode())


def _write_npz(store: FeatureStore, out: Path) -> None:
    with folder_atomically(out) as draft:
        for scan in _scans(store):
            content = io.BytesIO()
            np.savez(content, **_fields(scan))
            write_atomically(draft / f"{file_name(str(scan.bag.scan_id))}.npz", content.getvalue())
        _write_about(draft, store)


class _Disk:
    """An open file for HDF5 that never fails: HDF5 crashes the process if it cannot write while it closes a file.

    From the first error on, writes go to memory, where HDF5 finds them again; `check` raises the error.  The caller
    checks after each scan, so memory holds one scan and the tables of the file at most.
    """

    def __init__(self, file: BinaryIO) -> None:
        self.descriptor = file.fileno()
        self.error: OSError | None = None
        self.place = 0
        self.kept: list[tuple[int, bytes]] = []

    def check(self) -> None:
        """Raise the first error, if there was one."""
        if self.error is not None:
            raise self.error

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        begin = {os.SEEK_SET: 0, os.SEEK_CUR: self.place, os.SEEK_END: os.fstat(self.descriptor).st_size}[whence]
        self.place = begin + offset
        return self.place

    def tell(self) -> int:
        return self.place

    def write(self, content: Buffer) -> int:
        given, done = memoryview(content).cast("B"), 0
        try:
            while self.error is None and done < len(given):
                done += os.pwrite(self.descriptor, given[done:], self.place + done)
        except OSError as error:
            self.error = error
        if done < len(given):
            self.kept.append((self.place + done, bytes(given[done:])))
        self.place += len(given)
        return len(given)

    def readinto(self, buffer: Buffer) -> int:
        wanted, begin = memoryview(buffer).cast("B"), self.place
        read = os.pread(self.descriptor, len(wanted), begin)
        wanted[: len(read)] = read
        for place, content in self.kept:
            first, last = max(place, begin), min(place + len(content), begin + len(wanted))
            if first < last:
                wanted[first - begin : last - begin] = content[first - place : last - place]
        self.place += len(wanted)
        return len(wanted)

    def read(self, size: int) -> bytes:
        content = bytearray(size)
        self.readinto(content)
        return bytes(content)

    def truncate(self, size: int) -> int:
        try:
            if self.error is None:
                os.ftruncate(self.descriptor, size)
        except OSError as error:
            self.error = error
        return size

    def flush(self) -> None:
        """Nothing is buffered here; `write_atomically` syncs the file."""


def _write_hdf5(store: FeatureStore, out: Path) -> None:
    if out.exists():
        raise UserError(f"{out} exists already; choose another name, or move or delete it first")
    import_h5py()
    out.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(out, lambda file: _fill_hdf5(store, file))


def _fill_hdf5(store: FeatureStore, file: BinaryIO) -> None:
    disk = _Disk(file)
    with import_h5py().File(disk, "w", track_order=True) as opened:
        opened.attrs["provenance"] = json.dumps(store.provenance)
        for scan in _scans(store):
            group = opened.create_group(file_name(str(scan.bag.scan_id)))
            for name, value in _fields(scan).items():
                if isinstance(value, np.ndarray):
                    group[name] = value
                else:
                    group.attrs[name] = value
            disk.check()
    disk.check()


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


FORMATS: dict[str, Callable[[FeatureStore, Path], None]] = {
    "npz": _write_npz,
    "hdf5": _write_hdf5,
    "torchmil": _write_torchmil,
}
"""Formats that a store is exported to, and the functions that write them."""
