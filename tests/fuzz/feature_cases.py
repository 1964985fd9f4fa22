"""Cases of features that other programs wrote: files, folders and tables for `nguide store import`, and stores.

Run them alone: python tests/fuzz/run.py --of tests/fuzz/feature_cases.py --cases 3000

A maker takes a random generator and returns the content of a file, damaged or hostile: npz, npy, PyTorch, HDF5 or
parquet; the same generator gives the same content.
"""

from __future__ import annotations

import io
import json
import struct
import warnings
import zipfile
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from harness import SECRET, Case, Probe, attempt, expect
from mutations import BYTES, HOSTILE, METHODS, bomb, lie, mutate, zip_of
from samples import Samples
from table_mutations import mutate_csv, mutate_parquet

from normal_guidance.core.bags import Bags
from normal_guidance.scans.features.convert import import_store
from normal_guidance.scans.features.store import FeatureStore, open_store, write_store

IDS, LABELS, LENGTHS = ("A", "B", "C"), (0, 1, 1), (2, 4, 3)
SLICES, WIDTH = sum(LENGTHS), 5
SLICE_LABELS = (0, 0, 0, 1, 1, 0, 1, 0, 0)

LOUD = b"\x93NUMPY"
SHAPES = (
    *("(3, 0)", "(0, 5)", "()", "(9,)", "(9, 5", "(-9, 5)", "(1000000000, 6)", "(9223372036854775807, 8)", "(9, 5, 1)"),
    *("(1000000, 1000000, 0)", "(0, 4611686018427387904)", "(9, 4)", "(9, 6)", "(True, 5)", "(9.0, 5)", "[9, 5]"),
    *("'9'", "(2,) * 10", "(" * 500, "(1, " * 40 + ")" * 40, "(" + "1, " * 64 + ")", "(0x9, 5)"),
)
TYPES = (
    *("'<f4'", "'<f8'", "'<f2'", "'>f4'", "'|O'", "'<U4'", "'<U1000000000'", "'|S0'", "'|V0'", "'|V2000000000'"),
    *("'<c16'", "'<M8[ns]'", "'|b1'", "'<i8'", "[('x', '<f4')]", "[('x', '|O')]", "'<f16'", "None", "''", "'f4,f4'"),
    *("('<f4', (5,))", "'<m8'", "{'names': ['a'], 'formats': ['<f4'], 'itemsize': 2000000000}", "'<f3'", "[]"),
    "'x' * 9",
)


@cache
def arrays() -> Mapping[str, np.ndarray]:
    """The features of three scans, packed."""
    features = np.random.default_rng(0).normal(size=(SLICES, WIDTH)).astype(np.float32)
    return {
        "features": features,
        "lengths": np.array(LENGTHS),
        "label": np.array(LABELS),
        "slice_labels": np.array(SLICE_LABELS),
        "scan_id": np.array(IDS),
        "patient_id": np.array(["P1", "P2", "P3"]),
    }


def fields(random: Random) -> dict[str, Any]:
    """One file's arrays in one of the layouts, sometimes with an odd one among them."""
    whole: dict[str, Any] = dict(arrays())
    layout = random.randrange(5)
    if layout == 1:
        padded = np.zeros((3, 4, WIDTH), np.float32)
        for number, end in enumerate(np.cumsum(LENGTHS)):
            padded[number, : LENGTHS[number]] = whole["features"][end - LENGTHS[number] : end]
        whole["features"] = padded
        del whole["slice_labels"]
    elif layout == 2:
        whole = {"features": whole["features"], "label": np.array(1)}
    elif layout == 3:
        whole["scan_index"] = np.repeat(np.arange(3), whole.pop("lengths"))
    elif layout == 4:
        whole["offsets"] = np.array([0, *np.cumsum(whole.pop("lengths"))])
    if random.random() < 0.5:
        whole[random.choice(tuple(whole))] = random.choice(ODD_ARRAYS)
    return whole


NAN, INF = float("nan"), float("inf")
ODD_ARRAYS: tuple[np.ndarray, ...] = (
    *map(np.zeros, ((3, 0), (0, 5), (3, 4, 0), (0, 4, 5), (100_000, 100_000, 0), (1,) * 32)),
    *(np.full((9, 5), value, kind) for value, kind in ((NAN, "f4"), (INF, "f8"), (3e38, "f4"))),
    *(np.ones((9, 5), kind) for kind in (np.longdouble, "c8", ">f2")),
    *map(np.array, (["x"] * 9, [b"\xff\x00"] * 3, ["A\x00", "../../B", "\n"], ["y" * 70_000] * 3)),
    *map(np.array, ([2**62] * 3, [-1, 5, 5], [NAN, INF, 1.0], [True, False, True], [], 0.5)),
    np.array("\ud800x", dtype="<U2"),
    np.array(["2020-01-01"] * 3, "M8[ns]"),
    np.array([(1, 2.0)] * 3, [("a", "i4"), ("b", "f8")]),
    np.array([None, 1, "x"], object),
)


def npy_bytes(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def change_header(random: Random, content: bytes) -> bytes:
    """Another shape, number format or version in the header of an npy file."""
    kind = random.choice(TYPES) if random.random() < 0.5 else "'<f4'"
    shape = random.choice(SHAPES) if random.random() < 0.7 else f"({SLICES}, {WIDTH})"
    text = f"{{'descr': {kind}, 'fortran_order': {random.choice(('False', 'True', '1', 'None'))}, 'shape': {shape}, }}"
    if random.random() < 0.15:
        text = random.choice(
            (text[: random.randrange(len(text))], "{}", "[]", "0", "x" * 70_000, text + ";import os", "")
        )
    header = text.encode().ljust(118) + b"\n"
    version = random.choice(((1, 0), (1, 0), (1, 0), (2, 0), (3, 0), (9, 9)))
    length = random.choice((len(header), len(header), len(header), 0, 65_535, 2**31))
    size = struct.pack("<H", min(length, 65_535)) if version == (1, 0) else struct.pack("<I", length)
    return LOUD + bytes(version) + size + header + content[128:]


def mutate_npy(random: Random, content: bytes) -> bytes:
    return change_header(random, content) if random.random() < 0.6 else mutate(random, content, BYTES)


def make_npy(random: Random) -> bytes:
    """One scan's features, damaged."""
    if random.random() < 0.1:
        return npy_bytes(random.choice(ODD_ARRAYS))
    return mutate_npy(random, npy_bytes(arrays()["features"]))


def make_npz(random: Random) -> bytes:
    members = {f"{name}.npy": npy_bytes(array) for name, array in fields(random).items()}
    name = random.choice(tuple(members))
    change = random.randrange(8)
    if change == 0:
        return random.choice((members[name], b"", npy_bytes(np.ones((2, 3)))[: random.randrange(140)]))
    if change in (1, 2):
        members[name] = mutate_npy(random, members[name])
    elif change == 3:
        members = {**members, random.choice((*HOSTILE, "features", "label", "", "features.npy/x")): members.pop(name)}
    elif change == 4:
        # An npz of 100 kB that would take gigabytes is made of several such members.
        members[name] = npy_bytes(np.zeros((random.choice((10, 2**21)), WIDTH), np.float32))
    content = zip_of(members.items(), random.choice(METHODS))
    if change == 5:
        return lie(random, content)
    return mutate(random, content, BYTES) if change == 6 else content


def _laughs(depth: int) -> list[Any]:
    """A list of lists of lists, ten times the same in each: few bytes, ten to the power of `depth` numbers."""
    whole: list[Any] = [1.0] * 10
    for _ in range(depth):
        whole = [whole] * 10
    return whole


def _cycle() -> list[Any]:
    whole: list[Any] = [1.0]
    whole.append(whole)
    return whole


ODD_TENSORS: tuple[Callable[[], Any], ...] = (
    lambda: torch.ones(1).expand(10**9, 6),
    lambda: torch.ones(1).expand(10**6, 10**6, 1),
    lambda: torch.ones(9, 5).to_sparse(),
    lambda: torch.ones(9, 5, device="meta"),
    lambda: torch.ones(9, 5, dtype=torch.complex64),
    lambda: torch.ones(9, 5, dtype=torch.float8_e4m3fn),
    lambda: torch.ones(9, 5, requires_grad=True),
    lambda: torch.ones(5, 9).T,
    lambda: torch.zeros(3, 0),
    lambda: torch.zeros(10**6, 10**6, 0),
    lambda: torch.nn.Parameter(torch.ones(9, 5)),
    lambda: torch.quantize_per_tensor(torch.ones(9, 5), 0.1, 0, torch.qint8),
    lambda: [torch.ones(2, 5), torch.ones(4, 5), torch.ones(3, 5)],
    lambda: [torch.ones(2, 5), None, "x"],
    lambda: [],
    lambda: {"A": torch.ones(2, 5), "B": {"C": {"D": {}}}},
    lambda: _laughs(2),
    lambda: _laughs(12),
    _cycle,
    lambda: "text",
    lambda: 2**70,
    lambda: float("nan"),
    lambda: b"\xff",
    lambda: {1: 2, (3, 4): torch.ones(1)},
    lambda: None,
    lambda: bytearray(10),
)


def make_pt(random: Random) -> bytes:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of what makes odd tensors
        content = _save(random)
    change = random.randrange(4)
    if change == 0:
        return lie(random, content)
    if change == 1 and content[:2] == b"PK":
        with zipfile.ZipFile(io.BytesIO(content)) as archive:
            return zip_of([(name, archive.read(name)) for name in archive.namelist()], zipfile.ZIP_DEFLATED)
    return mutate(random, content, BYTES) if change == 2 else content


def _save(random: Random) -> bytes:
    """Tensors in one of the layouts, with an odd one, or an odd one alone."""
    whole: Any = {
        key: torch.from_numpy(array.copy()) if array.dtype.kind in "fib" and array.itemsize <= 8 else array.tolist()
        for key, array in fields(random).items()
        if array.dtype.isnative
    }
    change = random.randrange(4)
    if change == 0:
        whole[random.choice((*whole, "features", "extra"))] = random.choice(ODD_TENSORS)()
    elif change == 1:
        whole = random.choice(ODD_TENSORS)()
    buffer = io.BytesIO()
    torch.save(whole, buffer, _use_new_zipfile_serialization=random.random() < 0.7)
    return buffer.getvalue()


def make_hdf5(random: Random) -> bytes:
    buffer = io.BytesIO()
    with h5py.File(
        buffer, "w", track_order=random.random() < 0.5, libver=random.choice(("earliest", "latest"))
    ) as file:
        groups = random.random() < 0.4
        for scan in IDS if groups else ("",):
            place = file.create_group(scan) if scan else file
            for name, array in fields(random).items() if not scan else ():
                _write(random, place, name, array)
            if scan:
                _write(random, place, "features", arrays()["features"])
                place.attrs["label"] = 1
                place.attrs["patient_id"] = f"P{scan}"
        if random.random() < 0.3:
            _add_odd_member(random, file)
    content = buffer.getvalue()
    return content if random.random() < 0.3 else mutate(random, content, BYTES)


def _write(random: Random, place: Any, name: str, array: np.ndarray) -> None:
    if array.dtype.kind in "USO":
        place[name] = np.array([str(one).encode("utf-8", "replace") for one in array.reshape(-1)], object)
        return
    if array.dtype.kind == "M":
        array = array.astype(int)
    options = random.choice(
        ({}, {}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}, {"fletcher32": True})
    )
    place.create_dataset(name, data=array, **(options if array.ndim and array.size and array.size < 1e6 else {}))


ODD_DATASETS: tuple[dict[str, Any], ...] = (
    {"shape": (10**9, 6), "dtype": "f4"},
    {"shape": (10**9, 6), "dtype": "f4", "chunks": (1000, 6)},
    {"shape": (2**40, 2**20), "dtype": "f4", "chunks": (1, 2**20)},
    {"shape": (10, 6), "dtype": "f4", "chunks": (10**4, 6), "maxshape": (None, 6)},
    {"shape": (3, 0), "dtype": "f4"},
    {"data": h5py.Empty("f4")},
    {"shape": (9, 5), "dtype": "f4", "scaleoffset": 2},
    {"shape": (3,), "dtype": h5py.vlen_dtype(np.float32)},
    {"shape": (3,), "dtype": h5py.ref_dtype},
    {"shape": (9, 5), "dtype": h5py.enum_dtype({"a": 0, "b": 1})},
    {"shape": (9,), "dtype": [("a", "f4"), ("b", "i4")]},
    {"shape": (9, 5), "dtype": "V2000000000"},
)
"""Declared sizes without data, and kinds that are not numbers."""

ODD_ATTRIBUTES = (
    ("label", np.zeros(5000, "f4")),
    ("provenance", "{" * 3000),
    ("features", h5py.Empty("f4")),
    ("patient_id", np.void(b"abc")),
)


def _add_odd_member(random: Random, file: Any) -> None:
    """One of those above, or a link to nowhere, in a circle or to a group, or a type without data."""
    name, change = random.choice(("features", "label", "extra", "A/features")), random.randrange(21)
    if change < len(ODD_ATTRIBUTES):
        key, value = ODD_ATTRIBUTES[change]
        file.attrs[key] = value
        return
    if name in file:
        del file[name]
    if change < 9:
        links = (h5py.SoftLink("/label"), h5py.SoftLink(f"/{name}"), h5py.SoftLink("nowhere"), file["/"])
        file[name] = (*links, np.dtype("f4"))[change - len(ODD_ATTRIBUTES)]
    else:
        file.create_dataset(name, **ODD_DATASETS[change - 9])


def outward_hdf5(random: Random, path: Path, secret: Path) -> None:
    """Writes a file whose features lie in another file, in one of the ways of HDF5."""
    name = random.choice(("features", "A", "A/features"))
    other = random.choice((str(secret), f"../outside/{secret.name}", str(path.with_name("other.h5"))))
    with h5py.File(path.with_name("other.h5"), "w") as file:
        file["x"] = arrays()["features"]
    with h5py.File(path, "w") as file:
        file.attrs["label"] = 1
        way = random.randrange(3)
        if way == 0:
            file[name] = h5py.ExternalLink(other, "/x")
        elif way == 1:
            file.create_dataset(name, (1, 5), "f4", external=[(other, 0, 20)])
        else:
            layout = h5py.VirtualLayout((9, 5), "f4")
            layout[:] = h5py.VirtualSource(other, "x", (9, 5))
            file.create_virtual_dataset(name, layout)


ODD_COLUMNS: tuple[Callable[[], pa.Array], ...] = (
    lambda: pa.array([[1.0], [1.0, 2.0], None] * 3, pa.list_(pa.float32())),
    lambda: pa.array([[]] * 9, pa.list_(pa.float32())),
    lambda: pa.array([[None] * 5] * 9, pa.list_(pa.float32())),
    lambda: pa.array([[[1.0]], [[1.0], [2.0, 3.0]], []] * 3, pa.list_(pa.list_(pa.float32()))),
    lambda: pa.array([["x"]] * 9),
    lambda: pa.array([{"a": 1.0}] * 9),
    lambda: pa.array([None] * 9, pa.float32()),
    lambda: pa.array([b"\xff"] * 9),
    lambda: pa.array([0] * 9, pa.timestamp("ns")),
    lambda: pa.array(["x", "y", None] * 3).dictionary_encode(),
)


def make_parquet(random: Random) -> bytes:
    whole = arrays()
    repeated = {name: np.repeat(whole[name], LENGTHS).tolist() for name in ("scan_id", "label", "patient_id")}
    columns: dict[str, Any] = {**repeated, "slice_labels": whole["slice_labels"].tolist()}
    if random.random() < 0.5:
        columns["features"] = pa.array(whole["features"].tolist(), pa.list_(pa.float32()))
    else:
        columns |= {f"f{number}": whole["features"][:, number] for number in range(WIDTH)}
    if random.random() < 0.5:
        columns[random.choice(tuple(columns))] = random.choice(ODD_COLUMNS)()
    if random.random() < 0.03:  # some kilobytes for gigabytes: the same number over and over
        columns = {f"f{number}": pa.array(np.zeros(2**26, np.float32)) for number in range(4)}
    buffer = io.BytesIO()
    pq.write_table(pa.table(columns), buffer, compression=random.choice(("snappy", "zstd", "none", "gzip")))
    content = buffer.getvalue()
    return mutate(random, content, BYTES) if random.random() < 0.6 else content


SPLITS = (
    *("bag_name,split,patient_id\nA,train,P1\n", "bag_name,split\nA," + "x" * 200_000 + "\n"),
    *("bag_name,split\nA,train,more,and,more\n", "bag_name\n", "", "split\ntrain\n", 'bag_name,split\n"A,train\n'),
    *("bag_name,split\nA,\x00\n", "bag_name,split\nA,dev\n", "bag_name,bag_name\nA,B\n", "bag_name,split\n\n\nA\n"),
)
ABOUTS = (
    b"", b"{}", b"[]", b"[" * 100_000, b"\xff", b'{"provenance": 0, "recipe": 0, "order": 0}', b"1e999",
    json.dumps({"provenance": {}, "recipe": "", "order": [[]]}).encode(),
    json.dumps({"provenance": {"a": float("nan")}, "recipe": 5, "order": {"A": 1}}).encode(),
    b'{"provenance": {}, "recipe": "\\ud800", "order": ["A", "A"]}',
)  # fmt: skip


def write_torchmil(random: Random, root: Path) -> None:
    for folder in ("features", "labels", "inst_labels"):
        (root / folder).mkdir()
    ends = np.cumsum((0, *LENGTHS))
    for number, scan in enumerate(IDS):
        rows = slice(ends[number], ends[number + 1])
        np.save(root / "features" / f"{scan}.npy", arrays()["features"][rows])
        np.save(root / "labels" / f"{scan}.npy", np.array([LABELS[number]]))
        np.save(root / "inst_labels" / f"{scan}.npy", np.array(SLICE_LABELS[rows]))
    for _ in range(random.choice((1, 1, 2))):
        change = random.randrange(6)
        chosen = root / random.choice(("features", "labels", "inst_labels")) / f"{random.choice(IDS)}.npy"
        if change < 2 and chosen.exists():
            chosen.write_bytes(mutate_npy(random, chosen.read_bytes()))
        elif change == 2:
            chosen.write_bytes(npy_bytes(random.choice(ODD_ARRAYS)))
        elif change == 3:
            (root / "splits.csv").write_bytes(random.choice(SPLITS).encode())
        elif change == 4:
            (root / "about.json").write_bytes(random.choice(ABOUTS))
        else:
            chosen.unlink(missing_ok=True)


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


def of_file(suffix: str, make: Callable[[Random], bytes]) -> Case:
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
