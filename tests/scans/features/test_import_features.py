"""Features of other programs: every format in every layout gives the same store, and what does not fit is named."""

import io
import pickle
import sys
import zipfile
from collections.abc import Callable
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from typer.testing import CliRunner

from normal_guidance.base.errors import UserError
from normal_guidance.cli import app
from normal_guidance.scans.features.convert import export_store, import_store
from normal_guidance.scans.features.store import FeatureStore, open_store
from normal_guidance.scans.index.manifest import Finding, parse_findings

IDS, LABELS, PATIENTS, PARTS = ("A", "B", "C"), [0, 1, 1], ["P1", "P2", "P2"], ["train", "val", "val"]
LENGTHS = [2, 4, 3]
SLICES = [[0, 0], [0, 1, 1, 0], [1, 0, 0]]
RANDOM = np.random.default_rng(0)
FEATURES = [RANDOM.normal(size=(n, 5)).astype(np.float32) for n in LENGTHS]
PACKED = np.concatenate(FEATURES)
PADDED = np.stack([np.concatenate([one, np.zeros((4 - len(one), 5), np.float32)]) for one in FEATURES])
MASK = np.arange(4) < np.array(LENGTHS)[:, None]
WHOLE = {"y": LABELS, "slice_labels": np.concatenate(SLICES), "patient_ids": PATIENTS, "split": PARTS, "ids": IDS}
PADDED_SLICES = np.array([[*one, *[-1] * (4 - len(one))] for one in SLICES])


def one_scan(number: int) -> dict:
    fields = {"features": FEATURES[number], "label": LABELS[number], "inst_labels": SLICES[number]}
    return {**fields, "patient_id": PATIENTS[number], "part": PARTS[number]}


LAYOUTS: dict[str, dict] = {
    "lengths": {**WHOLE, "X": PACKED, "lengths": LENGTHS},
    "offsets": {**WHOLE, "feats": PACKED, "offsets": [0, 2, 6, 9]},
    "index": {**WHOLE, "embeddings": PACKED, "bag_index": [0, 0, 1, 1, 1, 1, 2, 2, 2]},
    "ids": {
        "data": PACKED,
        "scan_id": np.repeat(IDS, LENGTHS),
        "labels": np.repeat(LABELS, LENGTHS),
        "y_inst": np.concatenate(SLICES),
        "patient": np.repeat(PATIENTS, LENGTHS),
        "part": np.repeat(PARTS, LENGTHS),
    },
    "mask": {**WHOLE, "x": PADDED, "mask": MASK, "slice_labels": PADDED_SLICES},
    "padded lengths": {**WHOLE, "x": PADDED, "lengths": LENGTHS, "slice_labels": PADDED_SLICES},
}
"""Layouts of all scans in one file, as named arrays."""


def tensors(fields: dict) -> dict:
    """Tensors where there are numbers, lists where there is text."""
    arrays = {key: np.asarray(value) for key, value in fields.items()}
    return {key: torch.from_numpy(a) if a.dtype.kind in "fiub" else a.tolist() for key, a in arrays.items()}


def write_h5(path: Path, fields: dict) -> None:
    with h5py.File(path, "w") as file:
        for key, value in fields.items():
            text = np.asarray(value).dtype.kind == "U"
            file[key] = np.asarray(value, dtype=object if text else None)


WRITERS: dict[str, Callable[[Path, dict], object]] = {
    "npz": lambda path, fields: np.savez(path, **fields),
    "pt": lambda path, fields: torch.save(tensors(fields), path),
    "h5": write_h5,
}


def check(store: FeatureStore, *, slices: bool = True, patients: bool = True, parts: bool = True) -> None:
    assert store.scan_ids == IDS
    assert store.lengths.tolist() == LENGTHS
    assert np.array_equal(store.bags().features.numpy(), PACKED)
    assert store.labels.tolist() == LABELS
    assert store.patient_ids == (tuple(PATIENTS) if patients else IDS)
    assert (None if store.slice_labels is None else store.slice_labels.tolist()) == (
        np.concatenate(SLICES).tolist() if slices else None
    )
    assert store.scans["part"].tolist() == (PARTS if parts else [None] * 3)
    assert store.recipe == ""


# ----------------------------------------------------------------------------------------------------
# Formats and layouts
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("suffix", WRITERS)
def test_all_scans_in_one_file(tmp_path, suffix, layout):
    path, lines = tmp_path / f"all.{suffix}", []
    WRITERS[suffix](path, LAYOUTS[layout])
    check(import_store(path, tmp_path / "store", tell=lines.append))
    (line,) = lines
    assert line.startswith(f"{path}: found features")
    assert "label ('labels')" in line if layout == "ids" else "label ('y')" in line
    path.rename(tmp_path / "no-ending")
    check(import_store(tmp_path / "no-ending", tmp_path / "again"))


@pytest.mark.parametrize("suffix", WRITERS)
def test_one_file_a_scan(tmp_path, suffix):
    (tmp_path / "in").mkdir()
    for number, scan in enumerate(IDS):
        WRITERS[suffix](tmp_path / "in" / f"{scan}.{suffix}", one_scan(number))
    check(import_store(tmp_path / "in", tmp_path / "store"))


@pytest.mark.parametrize("suffix", WRITERS)
def test_many_files_with_many_scans(tmp_path, suffix):
    (tmp_path / "in").mkdir()
    for name, chosen in (("a", slice(0, 2)), ("b", slice(2, 3))):
        fields = {key: value[chosen] for key, value in {**WHOLE, "lengths": LENGTHS}.items()}
        fields["slice_labels"], fields["x"] = np.concatenate(SLICES[chosen]), np.concatenate(FEATURES[chosen])
        WRITERS[suffix](tmp_path / "in" / f"{name}.{suffix}", fields)
    check(import_store(tmp_path / "in", tmp_path / "store"))


def table_of(path: Path, **changes: list) -> Path:
    columns = {"scan_id": list(IDS), "label": LABELS, "patient_id": PATIENTS, "split": PARTS}
    columns["slice_labels"] = [" ".join(map(str, one)) for one in SLICES]
    table = pd.DataFrame({name: value for name, value in {**columns, **changes}.items() if value is not None})
    table.to_csv(path, index=False) if path.suffix == ".csv" else table.to_parquet(path)
    return path


@pytest.mark.parametrize("table", ["labels.csv", "labels.parquet"])
def test_features_and_nothing_else_with_a_table(tmp_path, table):
    """One array a scan; the table lies in the same folder, and is not taken for features."""
    (tmp_path / "in").mkdir()
    for scan, features in zip(IDS, FEATURES, strict=True):
        np.save(tmp_path / "in" / f"{scan}.npy", features)
    labels = table_of(tmp_path / "in" / table)
    check(import_store(tmp_path / "in", tmp_path / "npy", labels=labels))
    (tmp_path / "pt").mkdir()
    for scan, features in zip(IDS, FEATURES, strict=True):
        torch.save(torch.from_numpy(features), tmp_path / "pt" / f"{scan}.pt")
    check(import_store(tmp_path / "pt", tmp_path / "of pt", labels=labels))
    np.savez(tmp_path / "all.npz", **dict(zip(IDS, FEATURES, strict=True)))
    check(import_store(tmp_path / "all.npz", tmp_path / "named", labels=labels))
    np.savez(tmp_path / "only.npz", x=PACKED, lengths=LENGTHS, ids=IDS)
    check(import_store(tmp_path / "only.npz", tmp_path / "packed", labels=labels))


def test_lists_and_mappings_of_pytorch(tmp_path):
    scans = [tensors(one_scan(number)) for number in range(3)]
    torch.save(dict(zip(IDS, scans, strict=True)), tmp_path / "mapping.pt")
    check(import_store(tmp_path / "mapping.pt", tmp_path / "one"))
    torch.save([{**one, "scan_id": scan} for scan, one in zip(IDS, scans, strict=True)], tmp_path / "list.pt")
    check(import_store(tmp_path / "list.pt", tmp_path / "two"))
    features = [torch.from_numpy(one) for one in FEATURES]
    torch.save({**tensors(WHOLE), "features": features, "slice_labels": SLICES}, tmp_path / "ragged.pt")
    check(import_store(tmp_path / "ragged.pt", tmp_path / "three"))
    torch.save(
        {"x": torch.from_numpy(PADDED).bfloat16(), "mask": torch.from_numpy(MASK), "y": LABELS}, tmp_path / "bf.pt"
    )
    half = import_store(tmp_path / "bf.pt", tmp_path / "four")
    assert (half.dtype, half.scan_ids) == (torch.bfloat16, ("bf-0", "bf-1", "bf-2"))
    assert torch.equal(half.bags().features, torch.from_numpy(PACKED).bfloat16())


def slice_columns() -> dict[str, list]:
    """One row a slice."""
    whole = {"scan_id": IDS, "label": LABELS, "patient_id": PATIENTS, "part": PARTS}
    return {name: np.repeat(np.asarray(value, object), LENGTHS).tolist() for name, value in whole.items()}


@pytest.mark.parametrize("kind", ["lists", "fixed lists", "numbered", "a row a scan"])
def test_parquet(tmp_path, kind):
    columns = {**slice_columns(), "slice_label": np.concatenate(SLICES).tolist(), "z": np.arange(9.0).tolist()}
    if kind == "lists":
        columns["features"] = pa.array(PACKED.tolist(), pa.list_(pa.float32()))
    elif kind == "fixed lists":
        columns["features"] = pa.array(PACKED.tolist(), pa.list_(pa.float32(), 5))
    elif kind == "numbered":
        columns |= {f"f{n}": pa.array(PACKED[:, n]) for n in (4, 3, 2, 1, 0)}
    else:
        columns = {"scan_id": list(IDS), "label": LABELS, "patient_id": PATIENTS, "part": PARTS}
        columns["slice_labels"] = pa.array(SLICES)
        columns["features"] = pa.array([one.tolist() for one in FEATURES], pa.list_(pa.list_(pa.float32())))
    pq.write_table(pa.table(columns), tmp_path / "all.parquet")
    check(import_store(tmp_path / "all.parquet", tmp_path / "store"))


def test_hdf5_groups_attributes_and_slides(tmp_path):
    """Scans in groups of parts, and a file a scan with coordinates, as programs for slides write them."""
    with h5py.File(tmp_path / "nested.h5", "w") as file:
        for number, scan in enumerate(IDS):
            file[f"{PARTS[number]}/{scan}/feats"] = FEATURES[number]
            file[f"{PARTS[number]}/{scan}"].attrs["label"] = LABELS[number]
    check(import_store(tmp_path / "nested.h5", tmp_path / "one"), slices=False, patients=False, parts=False)
    (tmp_path / "slides").mkdir()
    for scan, features in zip(IDS, FEATURES, strict=True):
        with h5py.File(tmp_path / "slides" / f"{scan}.h5", "w") as file:
            file["features"], file["coords"] = features, np.zeros((len(features), 2), int)
    lines: list[str] = []
    labels = table_of(tmp_path / "labels.csv")
    check(import_store(tmp_path / "slides", tmp_path / "two", labels=labels, tell=lines.append))
    assert lines == [
        f"{tmp_path / 'slides' / 'A.h5'}: found features; looked for, but absent: label, slice_labels, scan_id, "
        "patient_id, part, lengths, offsets, scan_index, mask, recipe; not used: coords"
    ]


def test_scans_of_equal_length_need_no_mask(tmp_path):
    np.savez(tmp_path / "a.npz", x=np.ones((2, 3, 4), np.float32), y=[[0], [1]])
    store = import_store(tmp_path / "a.npz", tmp_path / "store")
    assert (store.scan_ids, store.lengths.tolist(), store.labels.tolist()) == (("a-0", "a-1"), [3, 3], [0, 1])


# ----------------------------------------------------------------------------------------------------
# Labels and patients
# ----------------------------------------------------------------------------------------------------


def test_the_label_comes_from_slice_labels(tmp_path):
    np.savez(tmp_path / "in.npz", x=PACKED, lengths=LENGTHS, ids=IDS, slice_labels=np.concatenate(SLICES))
    check(import_store(tmp_path / "in.npz", tmp_path / "store"), patients=False, parts=False)
    np.savez(tmp_path / "x.npz", x=PACKED, lengths=LENGTHS, ids=IDS)
    table = table_of(tmp_path / "t.csv", label=None, slice_labels=None, slice_ranges=["", "1-2", "0"])
    with pytest.raises(UserError, match=r"x.npz: scan 'A' has no label; looked for label, labels, y, .*found x, leng"):
        import_store(tmp_path / "x.npz", tmp_path / "no", labels=table)
    table = table_of(tmp_path / "t.csv", label=["0", "", ""], slice_labels=None, slice_ranges=["", "1-2", "0"])
    check(import_store(tmp_path / "x.npz", tmp_path / "ranges", labels=table))


def test_missing_patients_and_rows_without_features_are_warnings(tmp_path):
    np.savez(tmp_path / "in.npz", x=PACKED, lengths=LENGTHS, ids=IDS, y=LABELS)
    lines: list[str] = []
    import_store(tmp_path / "in.npz", tmp_path / "one", tell=lines.append)
    assert lines[1].startswith("warning: no scan has a patient id ('A'): every scan without a patient id counts as a")
    assert "may lie on both sides of a split" in lines[1]
    table = tmp_path / "t.csv"
    table.write_text("scan_id,label,patient_id\nA,0,P1\nB,1,\nC,1,P2\nD,1,P3\n")
    lines.clear()
    store = import_store(tmp_path / "in.npz", tmp_path / "two", labels=table, tell=lines.append)
    assert store.patient_ids == ("P1", "B", "P2")
    assert lines[1].startswith("warning: 1 of 3 scans do not have a patient id ('B')")
    assert lines[2] == f"warning: 1 of 4 rows of {table} have no features ('D'); they were left out"


@pytest.mark.parametrize(
    ("table", "message"),
    [
        ("scan_id,label\nA,0\nB,1\n", r"in.npz: scan 'C' has no row in --labels .*t.csv \(its first scan_id is 'A'\)"),
        ("scan_id,label\nA,0\nB,1\nB,1\n", r"t.csv, row 3: scan_id 'B' occurs twice"),
        ("scan_id,label\nA,0\n,1\n", r"t.csv, row 2: scan_id '' is empty"),
        ("scan_id,label\nA,1\nB,1\nC,1\n", r"scan 'A' has another label than in --labels .* \(0 and 1\)"),
        ("scan_id,label\nA,x\nB,1\nC,1\n", r"t.csv, row 1, scan 'A': label 'x' is neither 0 nor 1"),
        ("scan_id,slice_labels\nA,0 0 0\nB,\nC,\n", r"t.csv, row 1, scan 'A': 3 slice labels for 2 slices"),
        ("scan_id,slice_labels\nA,0 1\nB,\nC,\n", r"scan 'A' is labelled negative but has 1 positive slices"),
        ("scan_id,part\nA,dev\nB,\nC,\n", r"part 'dev' is unknown; choose one of train, val, test"),
        ("scan_id\nA\n", r"has only the column scan_id"),
        ("id,label\nA,0\n", r"has no column scan_id \(a .*\); it has id, label; rename id to scan_id$"),
        ("scan_id,part,split\nA,val,val\n", r"has the columns part and split"),
    ],
)
def test_tables_that_do_not_fit(tmp_path, table, message):
    np.savez(tmp_path / "in.npz", x=PACKED, lengths=LENGTHS, ids=IDS, y=LABELS)
    (tmp_path / "t.csv").write_text(table)
    with pytest.raises(UserError, match=message):
        import_store(tmp_path / "in.npz", tmp_path / "store", labels=tmp_path / "t.csv")
    assert not (tmp_path / "store").exists()


# ----------------------------------------------------------------------------------------------------
# What does not fit
# ----------------------------------------------------------------------------------------------------

GOOD = {"x": PACKED, "lengths": LENGTHS, "y": LABELS, "ids": IDS}


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        (
            {"x": None, "coords": [1]},
            r"has no features: looked for features, feats, .*, arr_0; found lengths, y",
        ),
        ({"y": None}, r"in.npz: scan 'A' has no label; looked for label, .*; found x, lengths, ids; add one"),
        ({"lengths": [2, 4, 4]}, r"lengths add up to 10, but there are 9 slices"),
        ({"lengths": [2.5, 4, 3]}, r"lengths are not whole numbers from 0"),
        ({"lengths": [0, 6, 3]}, r"in.npz: scan 'A' has no slices"),
        (
            {"lengths": None},
            r"scan_id has 3 values, and lengths, offsets and scan_index are absent, but there are 9",
        ),
        ({"lengths": None, "offsets": [0, 2, 6]}, r"offsets are \[0, 2, 6\] to \[6\], not 0 to the number"),
        ({"lengths": None, "scan_index": [0, 0, 2, 2, 2, 2, 1, 1, 1]}, r"scan_index does not count the scans in order"),
        ({"lengths": None, "ids": list("AABBABCCC")}, r"slices of one scan_id do not stand together"),
        ({"y": [0, 1]}, r"label has 2 values for 3 scans"),
        ({"y": [0, 2, 1]}, r"the label is 2, not 0 or 1"),
        ({"y": [0, 0, 0, 1, 1, 1, 1, 1, 1]}, r"label changes within a scan \(slices 2 to 5\)"),
        ({"ids": ["A", "B", "A"]}, r"scan 'A' is in .*in.npz and in .*in.npz; give each scan once"),
        ({"slice_labels": [0, 1]}, r"2 slice labels for 9 slices"),
        ({"lengths": np.zeros(10**6, int)}, r"lengths has 1,000,000 values for 9 slices"),
        ({"x": PACKED.astype(int)}, r"features are int64 of shape \(9, 5\), not \(slices, features\) of floats"),
        (
            {"x": None, "lengths": None, "y": None, "ids": None, "A": PACKED.astype(int)},
            r"found A; the array 'A' is int64 of shape \(9, 5\), not \(slices, features\) of floats",
        ),
        (
            {"x": None, "lengths": None, "y": None, "ids": None, "A": PACKED[None]},
            r"found A; the array 'A' is float32 of shape \(1, 9, 5\), not \(slices, features\)",
        ),
        (
            {"x": np.array([PACKED, PACKED[:2]], object)},
            r"write one array for each scan, or the slices of all .* lengths",
        ),
        ({"x": PACKED[0]}, r"features are float32 of shape \(5,\)"),
        ({"x": PADDED[None]}, r"features are float32 of shape \(1, 3, 4, 5\)"),
        ({"x": PADDED, "lengths": [2, 5, 3]}, r"lengths are not 3 numbers up to 4"),
        ({"x": PADDED, "lengths": None}, r"the last slice of scan 0 is 0 throughout, like padding; add mask"),
        ({"x": PADDED, "mask": MASK[:, :3]}, r"mask is bool of shape \(3, 3\), not 0 and 1 of shape \(3, 4\)"),
        ({"x": PADDED, "slice_labels": [[0]]}, r"slice_labels has the shape \(1, 1\), not \(3, 4\)"),
        ({"x": np.where(np.arange(5) == 3, np.nan, PACKED)}, r"in.npz: scan 'A', slice 0, feature 3: value nan; .*fin"),
        ({"x": np.where(np.arange(5) == 3, np.inf, PACKED)}, r"scan 'A', slice 0, feature 3: value inf"),
    ],
)
def test_files_that_do_not_fit(tmp_path, fields, message):
    arrays = {key: value for key, value in {**GOOD, **fields}.items() if value is not None}
    np.savez(tmp_path / "in.npz", **arrays)
    with pytest.raises(UserError, match=message) as error:
        import_store(tmp_path / "in.npz", tmp_path / "store")
    assert "in.npz" in str(error.value)
    assert not (tmp_path / "store").exists()


def test_parquet_without_features(tmp_path):
    pq.write_table(pa.table({"scan_id": ["A"], "z": [0.5]}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"numbered columns .* found scan_id \(string\), z \(double\)"):
        import_store(tmp_path / "a.parquet", tmp_path / "store")


def test_scans_of_two_widths(tmp_path):
    (tmp_path / "in").mkdir()
    for width in (3, 4):
        np.savez(tmp_path / "in" / f"{width}.npz", x=np.ones((2, width), np.float32), y=1)
    with pytest.raises(UserError, match=r"scan '4' has 4 features, but scan '3' has 3; .*transposed"):
        import_store(tmp_path / "in", tmp_path / "store")


def test_sources_that_are_none(tmp_path):
    out = tmp_path / "store"
    (tmp_path / "in" / "below").mkdir(parents=True)
    with pytest.raises(UserError, match=r"in holds no scan: it is not a file of features .* found below"):
        import_store(tmp_path / "in", out)
    (tmp_path / "notes.txt").write_text("no features")
    with pytest.raises(UserError, match=r"notes.txt holds no scan: it is not a file of features \(.npz"):
        import_store(tmp_path / "notes.txt", out)
    np.save(tmp_path / "in" / "A.npy", FEATURES[0])
    np.savez(tmp_path / "in" / "B.npz", features=FEATURES[1], label=1)
    with pytest.raises(UserError, match="in holds files of npy and npz; choose with --format"):
        import_store(tmp_path / "in", out)
    assert import_store(tmp_path / "in", out, "npz").scan_ids == ("B",)
    with pytest.raises(UserError, match="is a feature store already"):
        import_store(out, tmp_path / "again")
    with pytest.raises(UserError, match="format 'xls' is unknown; choose one of npz, npy, pt, hdf5, parquet, torchmil"):
        import_store(tmp_path / "in", out, "xls")


def test_the_same_key_in_every_file_is_not_an_id(tmp_path):
    (tmp_path / "in").mkdir()
    for scan in "AB":
        np.savez(tmp_path / "in" / f"{scan}.npz", resnet=FEATURES[0])
    table = table_of(tmp_path / "t.csv", scan_id=["resnet", "B", "C"])
    with pytest.raises(UserError, match=r"'resnet' is in .*A.npz, resnet and in .*B.npz, resnet; .* call it features"):
        import_store(tmp_path / "in", tmp_path / "store", labels=table)


# ----------------------------------------------------------------------------------------------------
# Nothing is executed
# ----------------------------------------------------------------------------------------------------


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    np.savez("a.npz", features=np.array([Bomb()], dtype=object), label=1)
    np.save("a.npy", np.array([Bomb()], dtype=object))
    torch.save({"features": torch.ones(2, 3), "label": Bomb()}, "a.pt")
    for name, message in (("a.npz", "Object arrays"), ("a.npy", "Object arrays|Array can't be memory-mapped")):
        with pytest.raises(UserError, match=rf"{name} cannot be read \(({message})"):
            import_store(name, "store")
    with pytest.raises(UserError, match=r"a.pt holds Python objects \(.*\), which could run code, so it is not read"):
        import_store("a.pt", "store")
    for name in ("a.npz", "a.npy", "a.pt"):
        Path(name).write_bytes(pickle.dumps(Bomb()))
        with pytest.raises(UserError, match=name):
            import_store(name, "store")
    assert not Path("exploded").exists()
    np.savez("b.npz", features=FEATURES[0], label=0, names=np.array([Bomb()], dtype=object))
    assert import_store("b.npz", "fine").scan_ids == ("b",)  # what is not used is not read


@pytest.mark.parametrize("suffix", [*WRITERS, "npy", "parquet"])
@pytest.mark.parametrize("content", [b"", b"not a file of features at all", None])
def test_damaged_files_are_named(tmp_path, suffix, content):
    path = tmp_path / f"a.{suffix}"
    if content is None:
        if suffix == "npy":
            np.save(path, FEATURES[0])
        elif suffix == "parquet":
            pd.DataFrame(PACKED).rename(columns=str).to_parquet(path)
        else:
            WRITERS[suffix](path, one_scan(0))
        content = path.read_bytes()
        content = content[: len(content) // 2]
    path.write_bytes(content)
    with pytest.raises(UserError, match=rf"a.{suffix} cannot be read"):
        import_store(path, tmp_path / "store")


def zip_of(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path.read_bytes()


def npy(array: np.ndarray) -> bytes:
    buffer = io.BytesIO()
    np.save(buffer, array)
    return buffer.getvalue()


def refused(path: Path, message: str, **options: object) -> None:
    with pytest.raises(UserError, match=message) as error:
        import_store(path, path.parent / "never", **options)
    assert str(path) in str(error.value)
    assert not (path.parent / "never").exists()


def test_archives_that_are_hostile_are_named(tmp_path):
    path = tmp_path / "a.npz"
    good = zip_of(path, {"features.npy": npy(FEATURES[0]), "label.npy": npy(np.array(1))})
    assert import_store(path, tmp_path / "store").scan_ids == ("a",)
    path.write_bytes(npy(FEATURES[0]))
    refused(path, r"it is a single array; name it .npy")
    for place, flag in ((good.index(b"PK\x03\x04") + 6, 1), (good.index(b"PK\x01\x02") + 8, 1)):
        good = good[:place] + bytes([flag]) + good[place + 1 :]
    path.write_bytes(good)
    refused(path, r"'features': the member is encrypted")
    zip_of(path, {"features.npy": npy(FEATURES[0])[:60], "label.npy": npy(np.array(1))})
    refused(path, r"EOF: reading array header")
    zip_of(path, {"features.npy": npy(FEATURES[0])[:-4], "label.npy": npy(np.array(1))})
    refused(path, r"declares 40 bytes .* but 36 follow")
    zip_of(path, {"features": b"not an array", "label.npy": npy(np.array(1))})
    refused(path, r"magic")
    zip_of(path, {"features.npy": npy(FEATURES[0]), "label.npy": npy(np.array(1))}, zipfile.ZIP_BZIP2)
    refused(path, r"packed by method 12; pack it again with deflate")
    zip_of(path, {"features.npy": npy(FEATURES[0]), "features": npy(FEATURES[0])})
    refused(path, r"two members of one name")
    path.write_bytes(zip_of(path, {"a.npy": npy(FEATURES[0])}).replace(b"PK\x01\x02", b"PK\x01\x03"))
    refused(path.rename(tmp_path / "a"), r"holds no scan")


def test_a_zip_bomb_is_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez_compressed(path, features=np.zeros((2**20, 65), np.float32), label=1)
    assert path.stat().st_size < 10**6
    refused(path, r"declares 272,\d{3},\d{3} bytes, more than the 268,435,456")


@pytest.mark.parametrize("shape", [(3, 0), (2, 3, 0)])
def test_features_of_no_width_are_refused(tmp_path, shape):
    np.savez(tmp_path / "a.npz", features=np.zeros(shape, np.float32), label=np.ones(shape[0] if len(shape) > 2 else 1))
    refused(tmp_path / "a.npz", rf"features are float32 of shape \({', '.join(map(str, shape))}\), not")
    np.save(tmp_path / "b.npy", np.zeros(shape, np.float32))
    refused(tmp_path / "b.npy", r"features are float32 of shape")


def test_tensors_that_are_larger_than_their_file_are_refused(tmp_path):
    path = tmp_path / "a.pt"
    for value, message in (
        (torch.ones(1).expand(10**9, 6), r"a tensor of shape \(1000000000, 6\) declares 24,000,000,000 bytes"),
        (torch.ones(9, 5).to_sparse(), "it holds a tensor of torch.float32, torch.sparse_coo, cpu; save dense"),
        (torch.ones(9, 5, device="meta"), "it holds a tensor of torch.float32, torch.strided, meta"),
        (torch.ones(9, 5).to(torch.float8_e4m3fn), "features are float8_e4m3fn of shape"),
    ):
        torch.save({"features": value, "label": 1}, path)
        refused(path, message)
    laughs: list = [1.0]
    for _ in range(20):
        laughs = [laughs] * 10
    torch.save({"features": torch.ones(2, 3), "label": laughs}, path)
    refused(path, "its lists hold more values than are stored")
    torch.save({"features": torch.ones(2, 3), "label": 1}, path)
    with zipfile.ZipFile(path) as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    zip_of(path, members)
    refused(path, "its records are packed, as torch.save does not")


def test_texts_that_are_no_ids_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, features=FEATURES[0], label=1, recipe="x" * 5000)
    refused(path, "a text of 5,000 characters, 'x{100}...', is not an id or a label")
    np.savez(path, features=FEATURES[0], label=1, recipe="é" * 900)  # \\u00e9 in JSON, which the shard's header is
    with pytest.raises(UserError, match=r"recipe 'é{50}'... has 900 characters"):
        import_store(path, tmp_path / "never")
    torch.save({"features": torch.ones(2, 3), "label": 1, "patient_id": "\ud800"}, tmp_path / "b.pt")
    refused(tmp_path / "b.pt", "surrogates not allowed")


def test_an_empty_file_is_one_line_of_the_command(tmp_path):
    """click takes an EOFError for Ctrl-D and prints 'Aborted.'."""
    (tmp_path / "a.npz").touch()
    result = CliRunner().invoke(app, ["store", "import", str(tmp_path / "a.npz"), "-o", str(tmp_path / "store")])
    assert result.exit_code == 2
    assert f"error: {tmp_path / 'a.npz'} cannot be read" in " ".join(result.stderr.split())
    assert "Aborted" not in result.stderr


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        (
            "splits.csv",
            "bag_name,split\nA," + "x" * 200_000,
            r"splits.csv cannot be read \(.*field larger than field limit",
        ),
        ("about.json", "[" * 100_000, r"about.json cannot be read \(nested more than"),
        (
            "about.json",
            '{"provenance": {}, "recipe": "", "order": 0}',
            r"about.json is damaged: order is 0, not a list",
        ),
        ("about.json", '{"provenance": 0, "recipe": "", "order": []}', r"provenance is 0, not an object"),
    ],
)
def test_torchmil_tables_that_are_damaged(tmp_path, name, content, message):
    (tmp_path / "features").mkdir()
    np.save(tmp_path / "features" / "A.npy", FEATURES[0])
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        import_store(tmp_path, tmp_path / "never")


def test_a_missing_library_names_its_extra(tmp_path, monkeypatch):
    WRITERS["h5"](tmp_path / "a.h5", one_scan(0))
    monkeypatch.setitem(sys.modules, "h5py", None)
    with pytest.raises(UserError, match=r"h5py is not installed; pip install 'normal-guidance\[encoders\]'"):
        import_store(tmp_path / "a.h5", tmp_path / "store")


# ----------------------------------------------------------------------------------------------------
# Findings
# ----------------------------------------------------------------------------------------------------

FINDINGS = parse_findings("any=1386000,epidural,subdural")


def import_findings(folder: Path, table: str, name: str = "store") -> FeatureStore:
    np.savez(folder / "in.npz", x=PACKED, lengths=LENGTHS, ids=IDS, patient_ids=PATIENTS)
    (folder / "t.csv").write_text(table)
    return import_store(folder / "in.npz", folder / name, labels=folder / "t.csv", findings=FINDINGS)


def test_findings_are_views_of_the_same_features(tmp_path):
    lines = ["scan_id,any,epidural,subdural,slice_labels_any,slice_labels_epidural"]
    lines += ["A,0,0,0,0 0,", "B,1,0,,0 1 1 0,", "C,1,1,1,,0 1 0"]
    made = import_findings(tmp_path, "\n".join(lines))
    for store in (made, open_store(tmp_path / "store")):
        assert store.findings == (Finding("any", "1386000"), Finding("epidural"), Finding("subdural"))
        assert store.finding == store.findings[0]
        assert "findings any epidural subdural" in repr(store)
        assert store.labels.tolist() == [0, 1, 1]
        assert store.slice_labels.tolist() == [0, 0, 0, 1, 1, 0, -1, -1, -1]
        epidural = store.of_finding("epidural")
        assert epidural.labels.tolist() == [0, 0, 1]
        assert epidural.slice_labels.tolist() == [0, 0, 0, 0, 0, 0, 0, 1, 0]
        assert epidural.findings == (Finding("epidural"),)
        assert epidural.shards is store.shards
        assert epidural.fingerprint != store.fingerprint
        subdural = store.of_finding("subdural")  # of B it is unknown
        assert (subdural.scan_ids, subdural.labels.tolist(), subdural.slice_labels) == (("A", "C"), [0, 1], None)
        np.testing.assert_array_equal(subdural.bags().features, np.concatenate([FEATURES[0], FEATURES[2]]))
        assert store.of_finding("any").fingerprint == store.fingerprint
        assert store.select(["C"]).of_finding("epidural").labels.tolist() == [1]
        with pytest.raises(UserError, match="has no finding 'all'; it has any, epidural, subdural"):
            store.of_finding("all")
        with pytest.raises(UserError, match="has no label of finding 'subdural' for these scans"):
            store.select(["B"]).of_finding("subdural")
    with pytest.raises(UserError, match="has the findings any, epidural, subdural, but npz has one label; choose one"):
        export_store(made, tmp_path / "npz", "npz")
    export_store(made.of_finding("epidural"), tmp_path / "npz", "npz")
    assert import_store(tmp_path / "npz", tmp_path / "back").labels.tolist() == [0, 0, 1]


def test_a_store_without_findings_does_not_mention_them(tmp_path):
    np.savez(tmp_path / "in.npz", x=PACKED, lengths=LENGTHS, ids=IDS, y=LABELS)
    store = import_store(tmp_path / "in.npz", tmp_path / "store")
    assert b"finding" not in (tmp_path / "store" / "store.json").read_bytes()
    assert "findings" not in repr(store)
    assert (store.findings, store.finding) == ((), None)
    with pytest.raises(UserError, match="has no finding 'any', but one label without a name"):
        store.of_finding("any")


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ("B,1,x,0", "t.csv, scan 'B', finding epidural: label 'x' is neither 0 nor 1; correct the row"),
        ("B,x,0,0", "t.csv, row 2, scan 'B': any 'x' is neither 0 nor 1; correct the row"),
        ("B,,0,0", "t.csv, row 2, scan 'B': any is empty, but the first finding must be known for every scan"),
    ],
)
def test_wrong_labels_of_findings_are_refused(tmp_path, row, message):
    with pytest.raises(UserError, match=message):
        import_findings(tmp_path, f"scan_id,any,epidural,subdural\nA,0,0,0\n{row}\nC,1,1,1\n")


def test_findings_need_a_table_with_their_columns(tmp_path):
    with pytest.raises(
        UserError, match=r"has no column subdural \(0 or 1\); it has scan_id, any, epidural; add subdural"
    ):
        import_findings(tmp_path, "scan_id,any,epidural\nA,0,0\n")
    with pytest.raises(UserError, match="--findings names columns of the table of labels; give it: --labels TABLE"):
        import_store(tmp_path / "in.npz", tmp_path / "store", findings=FINDINGS)
    with pytest.raises(UserError, match="has the columns slice_labels and slice_labels_any; leave one of them out"):
        import_findings(tmp_path, "scan_id,any,epidural,subdural,slice_labels,slice_labels_any\nA,0,0,0,,\n")
