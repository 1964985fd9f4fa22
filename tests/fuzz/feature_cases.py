"""Cases of features that other programs wrote: files, folders and tables for `nguide store import`, and stores.

Run them alone: python tests/fuzz/run.py --of tests/fuzz/feature_cases.py --cases 3000
"""

from __future__ import annotations

import io
from collections.abc import Callable
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import numpy as np
import torch
from feature_mutations import (
    ABOUTS,
    IDS,
    arrays,
    make_hdf5,
    make_npy,
    make_npz,
    make_parquet,
    make_pt,
    outward_hdf5,
    write_torchmil,
)
from guard import SECRET, Probe, attempt, expect
from mutations import BYTES, bomb, mutate
from samples import Samples
from table_mutations import mutate_csv, mutate_parquet

from normal_guidance.core.bags import Bags
from normal_guidance.scans.features.convert import import_store
from normal_guidance.scans.features.store import FeatureStore, open_store, write_store

TABLE = b"scan_id,label,patient_id,part,slice_labels\nA,0,P1,train,0 0\nB,1,P2,val,0 1 1 0\nC,1,P3,val,1 0 0\n"


def _import(probe: Probe, source: Path, form: str | None = None, labels: Path | None = None) -> str:
    """The outcome of an import; a store that comes of it is complete, an error leaves nothing behind."""
    stores: list[FeatureStore] = []
    lines: list[str] = []
    out = probe.out / "store"
    with probe.watched():
        outcome = attempt(lambda: stores.append(import_store(source, out, form, labels=labels, tell=lines.append)))
    if outcome == "user error":
        expect(not any(probe.out.iterdir()), f"left behind: {list(probe.out.iterdir())}")
        return outcome
    expect(outcome == "read", f"import raised an UnreadableError: {outcome}")
    _check(stores[0])
    return outcome


def _check(store: FeatureStore) -> None:
    bags = store.bags()
    expect(bags.features.ndim == 2 and bags.features.shape[1] > 0, f"features of shape {tuple(bags.features.shape)}")
    expect(bags.features.isfinite().all(), "features that are not finite")
    expect(set(bags.labels.tolist()) <= {0, 1}, f"labels {bags.labels.tolist()}")
    expect(not store.damaged(), "a new store is damaged")
    raw = bags.features.contiguous().view(torch.uint8).numpy().tobytes()
    expect(SECRET[:20] not in raw, "features of another file")


def of_file(suffix: str, make: Callable[[Random], bytes]) -> Callable[[Random, Samples, Probe], str]:
    """One file, alone or in a folder, under its own ending or none."""

    def case(random: Random, samples: Samples, probe: Probe) -> str:
        name = random.choice((f"a{suffix}", f"a{suffix}", f"a{suffix}", "a", "a.npz", "A.h5"))
        (probe.root / name).write_bytes(make(random))
        labels = None
        if random.random() < 0.6:
            labels = probe.root / "labels.csv"
            labels.write_bytes(b"scan_id,label\na,1\nA,1\nB,1\nC,1\n")
        return _import(probe, random.choice((probe.root / name, probe.root)), None, labels)

    return case


def outward(random: Random, samples: Samples, probe: Probe) -> str:
    """HDF5 whose features lie in another file, which nobody may read."""
    outward_hdf5(random, probe.root / "a.h5", probe.outside / "secret.dcm")
    outcome = _import(probe, probe.root / "a.h5")
    expect(outcome == "user error", "features of another file were imported")
    return outcome


def npz(random: Random, samples: Samples, probe: Probe) -> str:
    """An npz file, now and then a zip bomb."""
    if random.random() >= 0.02:
        return of_file(".npz", make_npz)(random, samples, probe)
    (probe.root / "a.npz").write_bytes(_bomb(random.choice((1, 3))))
    expect(_import(probe, probe.root / "a.npz") == "user error", "a zip bomb was imported")
    return "bomb"


@cache
def _bomb(gigabytes: int) -> bytes:
    """An npz of some megabytes whose features are so many gigabytes of zeros, declared rightly."""
    header, shape = io.BytesIO(), (gigabytes * 2**30 // 32, 8)
    np.lib.format.write_array_header_1_0(header, {"descr": "<f4", "fortran_order": False, "shape": shape})
    return bomb(b"features.npy", header.getvalue(), gigabytes)


def torchmil(random: Random, samples: Samples, probe: Probe) -> str:
    write_torchmil(random, probe.root)
    return _import(probe, probe.root)


def table(random: Random, samples: Samples, probe: Probe) -> str:
    """Good features with a damaged table of labels."""
    packed = random.random() < 0.4
    labels = probe.root / ("labels.parquet" if packed else "labels.csv")
    labels.write_bytes((mutate_parquet if packed else mutate_csv)(random, TABLE).content)
    whole = arrays()
    np.savez(probe.root / "a.npz", features=whole["features"], lengths=whole["lengths"], scan_id=whole["scan_id"])
    return _import(probe, probe.root / "a.npz", None, labels)


@cache
def _store() -> dict[str, bytes]:
    whole = arrays()
    bags = Bags(
        torch.from_numpy(whole["features"]),
        torch.tensor(whole["lengths"]),
        torch.tensor(whole["label"]),
        torch.tensor(whole["slice_labels"]),
        IDS,
    )
    with TemporaryDirectory() as folder:
        write_store(f"{folder}/store", bags, provenance={"encoder": "noise"})
        return {file.name: file.read_bytes() for file in Path(folder, "store").iterdir()}


def store(random: Random, samples: Samples, probe: Probe) -> str:
    """A store of which a file is damaged."""
    files = dict(_store())
    name = random.choice(tuple(files))
    files[name] = random.choice(ABOUTS) if random.random() < 0.1 else mutate(random, files[name], BYTES)
    for file, content in files.items():
        (probe.root / file).write_bytes(content)
    opened: list[FeatureStore] = []
    with probe.watched():
        outcome = attempt(lambda: opened.append(open_store(probe.root)))
        if opened:
            opened[0].damaged()
            outcome = attempt(lambda: opened[0].bags())
    return outcome


FEATURES = {
    "npz": (7, npz),
    "npy": (4, of_file(".npy", make_npy)),
    "pt": (6, of_file(".pt", make_pt)),
    "hdf5": (8, of_file(".h5", make_hdf5)),
    "hdf5 outward": (1, outward),
    "parquet": (4, of_file(".parquet", make_parquet)),
    "torchmil": (5, torchmil),
    "table": (3, table),
    "store": (4, store),
}

KINDS = {f"features: {name}": kind for name, kind in FEATURES.items()}
"""Kinds of cases, and how often each is run."""
