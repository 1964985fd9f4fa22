"""Cases of features that other programs wrote: files, folders and tables for `nguide store import`.

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
from functools import cache, partial, reduce
from pathlib import Path
from random import Random
from typing import Any

import h5py
import numpy as np
import pyarrow as pa
import torch
from harness import SECRET, Case, Probe, attempt, expect
from mutations import BYTES, HOSTILE, METHODS, lie, mutate, zip_of
from samples import Samples
from table_mutations import mutate_csv, mutate_parquet, write_parquet

from normal_guidance.scans.features.convert import import_store
from normal_guidance.scans.features.store import FeatureStore

IDS, LABELS, LENGTHS = ("A", "B", "C"), (0, 1, 1), (2, 4, 3)
SLICES, WIDTH = sum(LENGTHS), 5
SLICE_LABELS = (0, 0, 0, 1, 1, 0, 1, 0, 0)

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
    return {
        "features": np.random.default_rng(0).normal(size=(SLICES, WIDTH)).astype(np.float32),
        "lengths": np.array(LENGTHS),
        "label": np.array(LABELS),
        "slice_labels": np.array(SLICE_LABELS),
        "scan_id": np.array(IDS),
        "patient_id": np.array(["P1", "P2", "P3"]),
    }


def fields(random: Random) -> dict[str, Any]:
    """One file's arrays in one of the layouts, sometimes with an odd one among them."""
    whole: dict[str, Any] = dict(arrays())
    layout, ends = random.randrange(5), np.cumsum((0, *LENGTHS))
    if layout == 1:
        padded = np.zeros((3, 4, WIDTH), np.float32)
        for scan, own in zip(padded, np.split(whole["features"], ends[1:-1]), strict=True):
            scan[: len(own)] = own
        whole["features"] = padded
        del whole["slice_labels"]
    elif layout == 2:
        whole = {"features": whole["features"], "label": np.array(1)}
    elif layout == 3:
        whole["scan_index"] = np.repeat(np.arange(3), whole.pop("lengths"))
    elif layout == 4:
        whole["offsets"] = ends
        del whole["lengths"]
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


def mutate_npy(random: Random, content: bytes) -> bytes:
    """Damaged bytes, or another shape, number format or version in the header."""
    if random.random() < 0.4:
        return mutate(random, content, BYTES)
    kind = random.choice(TYPES) if random.random() < 0.5 else "'<f4'"
    shape = random.choice(SHAPES) if random.random() < 0.7 else f"({SLICES}, {WIDTH})"
    text = f"{{'descr': {kind}, 'fortran_order': {random.choice(('False', 'True', '1', 'None'))}, 'shape': {shape}, }}"
    if random.random() < 0.15:
        text = random.choice((text[:-20], text[:9], "{}", "[]", "0", "x" * 70_000, text + ";import os", ""))
    header = text.encode().ljust(118) + b"\n"
    version = random.choice((1, 1, 1, 2, 3, 9))
    length = random.choice((len(header), len(header), len(header), 0, 65_535, 2**31))
    size = struct.pack("<H", min(length, 65_535)) if version == 1 else struct.pack("<I", length)
    return b"\x93NUMPY" + bytes((version, version // 9 * 9)) + size + header + content[128:]


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


CYCLE: list[Any] = [1.0]
CYCLE.append(CYCLE)

SHALLOW, DEEP = (reduce(lambda inner, _: [inner] * 10, range(depth), [1.0] * 10) for depth in (2, 12))
"""Lists of lists of lists, ten times the same in each: few bytes, ten to the power of `depth` numbers."""


@cache
def odd_tensors() -> tuple[Any, ...]:
    ones = torch.ones(9, 5)
    return (
        *(torch.ones(1).expand(10**9, 6), torch.ones(1).expand(10**6, 10**6, 1), torch.zeros(10**6, 10**6, 0)),
        *(ones.to_sparse(), ones.to("meta"), ones.to(torch.complex64), ones.to(torch.float8_e4m3fn)),
        *(ones.clone().requires_grad_(), torch.nn.Parameter(ones), torch.ones(5, 9).T, torch.zeros(3, 0)),
        torch.quantize_per_tensor(ones, 0.1, 0, torch.qint8),
        *(list(ones.split(LENGTHS)), [ones, None, "x"], {"A": ones, "B": {"C": {"D": {}}}}, {1: 2, (3, 4): ones}),
        *(SHALLOW, DEEP, CYCLE, [], "text", 2**70, NAN, b"\xff", None, bytearray(10)),
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
        whole[random.choice((*whole, "features", "extra"))] = random.choice(odd_tensors())
    elif change == 1:
        whole = random.choice(odd_tensors())
    buffer = io.BytesIO()
    torch.save(whole, buffer, _use_new_zipfile_serialization=random.random() < 0.7)
    return buffer.getvalue()


def make_hdf5(random: Random) -> bytes:
    """Scans in datasets side by side or in groups, at times with an odd member."""
    buffer, version = io.BytesIO(), random.choice(("earliest", "latest"))
    with h5py.File(buffer, "w", track_order=random.random() < 0.5, libver=version) as file:
        if random.random() < 0.4:
            for scan in IDS:
                place = file.create_group(scan)
                _write(random, place, "features", arrays()["features"])
                place.attrs.update(label=1, patient_id=f"P{scan}")
        else:
            for name, array in fields(random).items():
                _write(random, file, name, array)
        if random.random() < 0.3:
            _add_odd_member(random, file)
    content = buffer.getvalue()
    return content if random.random() < 0.3 else mutate(random, content, BYTES)


def _write(random: Random, place: Any, name: str, array: np.ndarray) -> None:
    if array.dtype.kind in "USO":
        place[name] = np.array([str(one).encode("utf-8", "replace") for one in array.reshape(-1)], object)
        return
    options = random.choice(
        ({}, {}, {"compression": "gzip", "shuffle": True}, {"compression": "lzf"}, {"fletcher32": True})
    )
    plain = not array.ndim or not 0 < array.size < 1e6
    data = array.astype(int) if array.dtype.kind == "M" else array
    place.create_dataset(name, data=data, **({} if plain else options))


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

ODD_ATTRIBUTES = {
    "label": np.zeros(5000, "f4"),
    "provenance": "{" * 3000,
    "features": h5py.Empty("f4"),
    "patient_id": np.void(b"abc"),
}


def _add_odd_member(random: Random, file: Any) -> None:
    """One of those above, or a link to nowhere, in a circle, to a group or another file, or a type without data."""
    name = random.choice(("features", "label", "extra", "A/features"))
    links = [*map(h5py.SoftLink, ("/label", f"/{name}", "nowhere")), h5py.ExternalLink("../outside/secret.dcm", "/x")]
    odd = random.choice((*ODD_ATTRIBUTES, *links, file["/"], np.dtype("f4"), *ODD_DATASETS))
    if isinstance(odd, str):
        file.attrs[odd] = ODD_ATTRIBUTES[odd]
        return
    if name in file:
        del file[name]
    if isinstance(odd, dict):
        file.create_dataset(name, **odd)
    else:
        file[name] = odd


ODD_COLUMNS: tuple[pa.Array, ...] = (
    pa.array([[1.0], [1.0, 2.0], None] * 3, pa.list_(pa.float32())),
    pa.array([[[1.0]], [[1.0], [2.0, 3.0]], []] * 3, pa.list_(pa.list_(pa.float32()))),
    *(pa.array([row] * 9, pa.list_(pa.float32())) for row in ([], [None] * 5)),
    *(pa.array([value] * 9) for value in (["x"], {"a": 1.0}, b"\xff")),
    *(pa.nulls(9, pa.float32()), pa.array([0] * 9, pa.timestamp("ns"))),
    pa.array(["x", "y", None] * 3).dictionary_encode(),
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
        columns[random.choice(tuple(columns))] = random.choice(ODD_COLUMNS)
    content = write_parquet(pa.table(columns), random.choice(("snappy", "zstd", "none", "gzip")))
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


def _import(probe: Probe, source: Path, labels: Path | None = None) -> str:
    """The outcome of an import; a store that comes of it is complete, an error leaves nothing behind."""
    stores: list[FeatureStore] = []
    out = probe.out / "store"
    with probe.watched():
        outcome = attempt(lambda: stores.append(import_store(source, out, labels=labels, tell=str)))
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


def of_file(suffix: str, make: Callable[[Random], bytes], random: Random, samples: Samples, probe: Probe) -> str:
    """One file, alone or in a folder, under its own ending or none."""
    name = random.choice((f"a{suffix}", f"a{suffix}", f"a{suffix}", "a", "a.npz", "A.h5"))
    (probe.root / name).write_bytes(make(random))
    labels = None
    if random.random() < 0.6:
        labels = probe.root / "labels.csv"
        labels.write_bytes(b"scan_id,label\na,1\nA,1\nB,1\nC,1\n")
    return _import(probe, random.choice((probe.root / name, probe.root)), labels)


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
    return _import(probe, probe.root / "a.npz", labels)


FEATURES: dict[str, tuple[int, Case]] = {
    "npz": (7, partial(of_file, ".npz", make_npz)),
    "npy": (4, partial(of_file, ".npy", make_npy)),
    "pt": (6, partial(of_file, ".pt", make_pt)),
    "hdf5": (8, partial(of_file, ".h5", make_hdf5)),
    "parquet": (4, partial(of_file, ".parquet", make_parquet)),
    "torchmil": (5, torchmil),
    "table": (3, table),
}

KINDS = {f"features: {name}": kind for name, kind in FEATURES.items()}
"""Kinds of cases, and how often each is run."""
