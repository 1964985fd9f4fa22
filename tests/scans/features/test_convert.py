"""Features of other programs: every arrangement gives the same store, an exported store comes back exactly, and what
does not fit is named."""

import pickle
import sys
import zipfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import h5py
import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from fake_scans import contents
from test_store import make as bags_of
from torchmil.datasets import BinaryClassificationDataset, ProcessedMILDataset

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import UNKNOWN, Bags
from normal_guidance.scans.features.convert import EXPORT_FORMATS, export_store, import_store
from normal_guidance.scans.features.store import FeatureStore, open_store, write_store
from normal_guidance.scans.index.manifest import Finding, parse_findings
from normal_guidance.scans.index.problems import file_name
from small_files import npy

IDS, LABELS, PATIENTS, PARTS = ("A", "B", "C"), [0, 1, 1], ["P1", "P2", "P2"], ["train", "val", "val"]
LENGTHS = [2, 4, 3]
SLICES = [[0, 0], [0, 1, 1, 0], [1, 0, 0]]
RANDOM = np.random.default_rng(0)
FEATURES = [RANDOM.normal(size=(n, 5)).astype(np.float32) for n in LENGTHS]
PACKED = np.concatenate(FEATURES)
PADDED = np.stack([np.concatenate([scan, np.zeros((4 - len(scan), 5), np.float32)]) for scan in FEATURES])
MASK = np.arange(4) < np.array(LENGTHS)[:, None]
WHOLE = {"y": LABELS, "slice_labels": np.concatenate(SLICES), "patient_ids": PATIENTS, "split": PARTS, "ids": IDS}
PADDED_SLICES = np.array([[*scan, *[-1] * (4 - len(scan))] for scan in SLICES])
PLAIN = {"x": PACKED, "lengths": LENGTHS, "ids": IDS}
GOOD = {**PLAIN, "y": LABELS}
"""Without slice labels, patients and parts."""


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
"""All scans in one file, as named arrays."""


def tensors(fields: dict) -> dict:
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
    assert (store.scan_ids, store.lengths.tolist(), store.labels.tolist()) == (IDS, LENGTHS, LABELS)
    assert np.array_equal(store.bags().features.numpy(), PACKED)
    assert store.patient_ids == (tuple(PATIENTS) if patients else IDS)
    assert (store.slice_labels is not None) == slices
    assert not slices or store.slice_labels.tolist() == np.concatenate(SLICES).tolist()
    assert (store.scans["part"].tolist(), store.recipe) == (PARTS if parts else [None] * 3, "")


@pytest.mark.parametrize(
    ("suffix", "layout"),
    [*(("npz", layout) for layout in LAYOUTS), ("pt", "ids"), ("pt", "mask"), ("h5", "ids"), ("h5", "padded lengths")],
)
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
def test_files_of_one_scan_and_of_many(tmp_path, suffix):
    for name in ("one", "many"):
        (tmp_path / name).mkdir()
    for number, scan in enumerate(IDS):
        WRITERS[suffix](tmp_path / "one" / f"{scan}.{suffix}", one_scan(number))
    check(import_store(tmp_path / "one", tmp_path / "store"))
    for name, chosen in (("a", slice(0, 2)), ("b", slice(2, 3))):
        fields = {key: value[chosen] for key, value in {**WHOLE, "lengths": LENGTHS}.items()}
        fields["slice_labels"], fields["x"] = np.concatenate(SLICES[chosen]), np.concatenate(FEATURES[chosen])
        WRITERS[suffix](tmp_path / "many" / f"{name}.{suffix}", fields)
    check(import_store(tmp_path / "many", tmp_path / "again"))


def table_of(path: Path, **changes: list) -> Path:
    columns = {"scan_id": list(IDS), "label": LABELS, "patient_id": PATIENTS, "split": PARTS}
    columns["slice_labels"] = [" ".join(map(str, scan)) for scan in SLICES]
    table = pd.DataFrame({name: value for name, value in {**columns, **changes}.items() if value is not None})
    table.to_csv(path, index=False) if path.suffix == ".csv" else table.to_parquet(path)
    return path


@pytest.mark.parametrize("table", ["labels.csv", "labels.parquet"])
def test_features_and_nothing_else_with_a_table(tmp_path, table):
    """One array a scan; the table lies in the same folder, and is not taken for features."""
    scans = dict(zip(IDS, FEATURES, strict=True))
    for suffix, save in (("npy", np.save), ("pt", lambda path, scan: torch.save(torch.from_numpy(scan), path))):
        (tmp_path / suffix).mkdir()
        for scan, features in scans.items():
            save(tmp_path / suffix / f"{scan}.{suffix}", features)
    np.savez(tmp_path / "named.npz", **scans)
    np.savez(tmp_path / "packed.npz", **PLAIN)
    labels = table_of(tmp_path / "npy" / table)
    for source in ("npy", "pt", "named.npz", "packed.npz"):
        check(import_store(tmp_path / source, tmp_path / f"store {source}", labels=labels))


def test_lists_and_mappings_of_pytorch(tmp_path):
    scans = [tensors(one_scan(number)) for number in range(3)]
    features = [torch.from_numpy(scan) for scan in FEATURES]
    contents = {
        "mapping": dict(zip(IDS, scans, strict=True)),
        "list": [{**scan, "scan_id": name} for name, scan in zip(IDS, scans, strict=True)],
        "ragged": {**tensors(WHOLE), "features": features, "slice_labels": SLICES},
        "bf": {"x": torch.from_numpy(PADDED).bfloat16(), "mask": torch.from_numpy(MASK), "y": LABELS},
    }
    for name, content in contents.items():
        torch.save(content, tmp_path / f"{name}.pt")
        store = import_store(tmp_path / f"{name}.pt", tmp_path / name)
        if name != "bf":
            check(store)
    assert (store.dtype, store.scan_ids) == (torch.bfloat16, ("bf-0", "bf-1", "bf-2"))
    assert torch.equal(store.bags().features, torch.from_numpy(PACKED).bfloat16())


@pytest.mark.parametrize("kind", ["lists", "fixed lists", "numbered", "a row a scan"])
def test_parquet(tmp_path, kind):
    whole = {"scan_id": IDS, "label": LABELS, "patient_id": PATIENTS, "part": PARTS}
    columns = {name: np.repeat(np.asarray(value, object), LENGTHS).tolist() for name, value in whole.items()}
    columns |= {"slice_label": np.concatenate(SLICES).tolist(), "z": np.arange(9.0).tolist()}
    if kind == "lists":
        columns["features"] = pa.array(PACKED.tolist(), pa.list_(pa.float32()))
    elif kind == "fixed lists":
        columns["features"] = pa.array(PACKED.tolist(), pa.list_(pa.float32(), 5))
    elif kind == "numbered":
        columns |= {f"f{n}": pa.array(PACKED[:, n]) for n in (4, 3, 2, 1, 0)}
    else:
        columns = {**whole, "scan_id": list(IDS), "slice_labels": pa.array(SLICES)}
        columns["features"] = pa.array([scan.tolist() for scan in FEATURES], pa.list_(pa.list_(pa.float32())))
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


def test_files_of_other_programs_are_imported(tmp_path):
    """Features and labels are enough: of equally long scans too; torchmil's CT set calls slice labels slice_labels."""
    np.savez(tmp_path / "a.npz", x=np.arange(24, dtype=np.float32).reshape(2, 3, 4), y=[[0], [1]])
    store = import_store(tmp_path / "a.npz", tmp_path / "equal")
    assert (store.scan_ids, store.lengths.tolist(), store.labels.tolist()) == (("a-0", "a-1"), [3, 3], [0, 1])
    mil = tmp_path / "mil"
    for folder in ("features", "labels", "slice_labels"):
        (mil / folder).mkdir(parents=True)
    features = np.random.default_rng(0).normal(size=(3, 4)).astype(">f4")  # big-endian: of another machine
    np.save(mil / "features" / "x.npy", features)
    np.save(mil / "labels" / "x.npy", np.array(1.0))
    np.save(mil / "slice_labels" / "x.npy", np.array([[0], [1], [0]], dtype=np.float32))
    (mil / "splits.csv").write_text("bag_name,split\nx,test\n")
    store = import_store(mil, tmp_path / "one", "torchmil")
    assert (store.scan_ids, store.patient_ids, store.scans["part"].tolist()) == (("x",), ("x",), ["test"])
    assert (store.labels.tolist(), store.slice_labels.tolist()) == ([1], [0, 1, 0])
    assert np.array_equal(store.bags().features.numpy(), features)
    assert (store.provenance, store.recipe) == ({"imported_from": "torchmil"}, "")


def test_features_that_hardly_vary_are_refused(tmp_path):
    """Constant ones, and those that only rounding tells apart; some constant ones among others are fine."""
    varying = np.random.default_rng(0).normal(size=(2, 3, 8))
    for number, features in enumerate((np.ones_like(varying), 1 + 1e-3 * varying)):
        np.savez(tmp_path / f"{number}.npz", x=features, y=[0, 1])
        with pytest.raises(UserError, match=rf"features in .*{number}\.npz are nearly the same in all slices: nine in"):
            import_store(tmp_path / f"{number}.npz", tmp_path / "store")
    varying[..., :3] = (0.0, 1e6, 1.0)
    np.savez(tmp_path / "some.npz", x=varying, y=[0, 1])
    assert len(import_store(tmp_path / "some.npz", tmp_path / "store")) == 2


EXPORTED = ("b-2", "a/1", "..", "é ü", ".hidden", "100%", "a_1")


def make(folder: Path, dtype=torch.float32, recipe="8e1f") -> FeatureStore:
    """Ids that are no file names, in no order; the first scan has no slice labels."""
    bags = replace(bags_of("x", [3, 1, 4, 2, 5, 2, 3], dtype), scan_ids=EXPORTED)
    bags.slice_labels[3] = 1
    parts = [("train", bags[:2]), ("val", bags[2:4]), (None, bags[4:])]
    return write_store(folder / "store", parts, provenance={"encoder": "é"}, recipe=recipe)


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_a_store_comes_back_exactly(tmp_path, form):
    for dtype in (torch.float16, torch.float32, torch.float64):
        folder = tmp_path / str(dtype)
        store = make(folder, dtype)
        export_store(store, folder / "exported", form)
        import_store(folder / "exported", folder / "again", form)
        assert contents(folder / "again") == contents(store.folder)
        assert sorted(file.name for file in folder.iterdir()) == ["again", "exported", "store"]
    part = store.select(["..", "b-2"])
    export_store(part, tmp_path / "part", form)
    again = import_store(tmp_path / "part", tmp_path / "again", form)
    assert again.scan_ids == ("..", "b-2")
    assert torch.equal(again.bags().features, part.bags().features)


def test_torchmil_reads_the_export(tmp_path):
    from torchmil.utils.common import read_csv

    store = make(tmp_path)
    root = tmp_path / "mil"
    export_store(store, root, "torchmil")
    folders = {f"{key}_path": f"{root}/{key}" for key in ("features", "labels", "inst_labels")}
    dataset = ProcessedMILDataset(**folders, bag_keys=["X", "Y", "y_inst"], verbose=False)
    assert set(dataset.get_bag_names()) == {file_name(scan) for scan in EXPORTED}
    bags = {file_name(scan): bag for scan, bag in zip(EXPORTED, store.bags(), strict=True)}
    for number, name in enumerate(dataset.get_bag_names()):
        read, bag = dataset[number], bags[name]
        assert torch.equal(read["X"], bag.features)
        assert read["Y"].tolist() == [bag.label]
        unknown = [UNKNOWN] * len(bag.features)
        assert read["y_inst"].tolist() == (unknown if bag.slice_labels is None else bag.slice_labels.tolist())
    binary = BinaryClassificationDataset(**folders, bag_keys=["X", "Y", "y_inst"], bag_names=["a%2F1"], verbose=False)
    assert (binary[0]["Y"].item(), binary[0]["y_inst"].tolist()) == (1, [1])
    split = {row["bag_name"]: row["split"] for row in read_csv(f"{root}/splits.csv")}
    assert (split["a%2F1"], split["%2E."], split["a_1"]) == ("train", "val", "")


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_an_export_is_damaged_or_in_the_way(tmp_path, form):
    store, out = make(tmp_path), tmp_path / "exported"
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match=r"mine (is|exists)"):
        export_store(store, tmp_path / "mine", form)
    assert (tmp_path / "mine").read_text() == "mine"
    export_store(store, out, form)
    for file in [out] if out.is_file() else sorted(out.rglob("*.np*")):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"exported.* cannot be (read|imported)"):
        import_store(out, tmp_path / "again", form)


def test_what_cannot_be_exported_is_refused(tmp_path):
    half = make(tmp_path / "half", torch.bfloat16)
    bag = Bags(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([0]), scan_ids=("x" * 300,))
    long = write_store(tmp_path / "long", bag, provenance={})
    for given, form, message in (
        (half, "matlab", "format 'matlab' is unknown; choose one of npz, hdf5, torchmil"),
        (half, "npz", "is bfloat16, which npz does not have"),
        (long, "npz", "is too long for a file's name"),
    ):
        with pytest.raises(UserError, match=message):
            export_store(given, tmp_path / "out", form)
    # Two encoders are not mixed.
    export_store(make(tmp_path / "a"), tmp_path / "npz", "npz")
    export_store(make(tmp_path / "b", recipe="77aa").select(["a_1"]), tmp_path / "other", "npz")
    (tmp_path / "npz" / "a_1.npz").write_bytes((tmp_path / "other" / "a_1.npz").read_bytes())
    with pytest.raises(UserError, match=r"scan 'a_1' was made by another encoder .*\(recipes 77aa and 8e1f\); keep"):
        import_store(tmp_path / "npz", tmp_path / "never", "npz")
    assert not (tmp_path / "never").exists()


def test_the_label_comes_from_slice_labels(tmp_path):
    np.savez(tmp_path / "in.npz", **PLAIN, slice_labels=np.concatenate(SLICES))
    check(import_store(tmp_path / "in.npz", tmp_path / "store"), patients=False, parts=False)
    np.savez(tmp_path / "x.npz", **PLAIN)
    table = table_of(tmp_path / "t.csv", label=None, slice_labels=None, slice_ranges=["", "2-3", "1"])
    with pytest.raises(UserError, match=r"x.npz: scan 'A' has no label; looked for label, labels, y, .*found x, leng"):
        import_store(tmp_path / "x.npz", tmp_path / "no", labels=table)
    table = table_of(tmp_path / "t.csv", label=["0", "", ""], slice_labels=None, slice_ranges=["", "2-3", "1"])
    check(import_store(tmp_path / "x.npz", tmp_path / "ranges", labels=table))


def test_missing_patients_and_rows_without_features_are_warnings(tmp_path):
    np.savez(tmp_path / "in.npz", **GOOD)
    lines: list[str] = []
    store = import_store(tmp_path / "in.npz", tmp_path / "one", tell=lines.append)
    assert lines[1].startswith("warning: no scan has a patient id ('A'): every scan without a patient id counts as a")
    assert "may lie on both sides of a split" in lines[1]
    assert b"finding" not in (tmp_path / "one" / "store.json").read_bytes()
    assert (store.findings, store.finding, "findings" in repr(store)) == ((), None, False)
    with pytest.raises(UserError, match="has no finding 'any', but one label without a name"):
        store.of_finding("any")
    table = tmp_path / "t.csv"
    table.write_text("scan_id,label,patient_id\nA,0,P1\nB,1,\nC,1,P2\nD,1,P3\n")
    lines.clear()
    store = import_store(tmp_path / "in.npz", tmp_path / "two", labels=table, tell=lines.append)
    assert store.patient_ids == ("P1", "B", "P2")
    assert lines[1].startswith("warning: 1 of 3 scans do not have a patient id ('B')")
    assert lines[2] == f"warning: 1 of 4 rows of {table} have no features ('D'); they were left out"


FINDINGS, NAMES = parse_findings("any=1386000,epidural,subdural"), "scan_id,any,epidural,subdural"


def test_findings_are_views_of_the_same_features(tmp_path):
    np.savez(tmp_path / "in.npz", **PLAIN, patient_ids=PATIENTS)
    lines = [f"{NAMES},slice_labels_any,slice_labels_epidural", "A,0,0,0,0 0,", "B,1,0,,0 1 1 0,", "C,1,1,1,,0 1 0"]
    (tmp_path / "t.csv").write_text("\n".join(lines))
    made = import_store(tmp_path / "in.npz", tmp_path / "store", labels=tmp_path / "t.csv", findings=FINDINGS)
    for store in (made, open_store(tmp_path / "store")):
        assert (store.findings, store.finding) == (FINDINGS, FINDINGS[0])
        assert "findings any epidural subdural" in repr(store)
        assert (store.labels.tolist(), store.slice_labels.tolist()) == ([0, 1, 1], [0, 0, 0, 1, 1, 0, -1, -1, -1])
        epidural = store.of_finding("epidural")
        assert (epidural.labels.tolist(), epidural.slice_labels.tolist()) == ([0, 0, 1], [0] * 7 + [1, 0])
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
    with pytest.raises(UserError, match="has the findings any, epidural, subdural, but npz has one label; choose: --f"):
        export_store(made, tmp_path / "npz", "npz")
    export_store(made.of_finding("epidural"), tmp_path / "npz", "npz")
    assert import_store(tmp_path / "npz", tmp_path / "back").labels.tolist() == [0, 0, 1]
    with pytest.raises(UserError, match="--findings names columns of the table of labels; give it: --labels TABLE"):
        import_store(tmp_path / "in.npz", tmp_path / "never", findings=FINDINGS)


@pytest.mark.parametrize(
    ("table", "message"),
    [
        (f"{NAMES}\nA,0,0,0\nB,x,0,0\n", "t.csv, row 2, scan 'B': any 'x' is neither 0 nor 1; correct the row"),
        (f"{NAMES}\nA,0,0,0\nB,,0,0\nC,1,1,1\n", "row 2, scan 'B': any is empty, but the first finding must be known"),
        ("scan_id,any,epidural\nA,0,0\n", r"has no column subdural \(0 or 1\); it has scan_id, any, epidural; add sub"),
        (f"{NAMES},slice_labels,slice_labels_any\nA,0,0,0,,\n", "has the columns slice_labels and slice_labels_any; l"),
        ("scan_id,label\nA,0\nB,1\n", r"scan 'C' has no row in .* \(the table: 'A', 'B'; the features: 'C'\)"),
        ("scan_id,label\nA,0\nB,1\nB,1\n", r"t.csv, row 3: scan_id 'B' occurs twice"),
        ("scan_id,label\nA,1\nB,1\nC,1\n", r"scan 'A' has another label than in --labels .* \(0 and 1\)"),
        ("scan_id,label\nA,x\nB,1\nC,1\n", r"t.csv, row 1, scan 'A': label 'x' is neither 0 nor 1"),
        ("scan_id,slice_labels\nA,0 0 0\nB,\nC,\n", r"t.csv, row 1, scan 'A': 3 slice labels for 2 slices"),
        ("scan_id,slice_labels\nA,0 1\nB,\nC,\n", r"scan 'A' is labelled negative but has 1 positive slices"),
        ("scan_id,part\nA,dev\nB,\nC,\n", r"part 'dev' is unknown; choose one of train, val, test"),
        ("scan_id\nA\n", r"has only the column scan_id"),
        ("key,label\nA,0\n", r"has no column scan_id \(a .*\); it has key, label; add scan_id, or rename"),
        ("scan_id,part,split\nA,val,val\n", r"has the columns part and split"),
    ],
)
def test_tables_that_do_not_fit(tmp_path, table, message):
    findings = FINDINGS if "any" in table else ()
    np.savez(tmp_path / "in.npz", **(PLAIN if findings else GOOD))
    (tmp_path / "t.csv").write_text(table)
    with pytest.raises(UserError, match=message):
        import_store(tmp_path / "in.npz", tmp_path / "store", labels=tmp_path / "t.csv", findings=findings)
    assert not (tmp_path / "store").exists()


def refused(path: Path, message: str) -> None:
    with pytest.raises(UserError, match=message) as error:
        import_store(path, path.parent / "never")
    assert str(path) in str(error.value) or "not installed" in message
    assert not (path.parent / "never").exists()


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"x": None, "coords": [1]}, r"has no features: looked for features, feats, .*, arr_0; found lengths, ids, y"),
        ({"y": None}, r"in.npz: scan 'A' has no label; looked for label, .*; found x, lengths, ids; add one"),
        ({"lengths": [2, 4, 4]}, r"lengths add up to 10, but there are 9 slices"),
        ({"lengths": [2.5, 4, 3]}, r"lengths are not whole numbers from 0"),
        ({"lengths": [0, 6, 3]}, r"in.npz: scan 'A' has no slices"),
        ({"lengths": None}, r"scan_id has 3 values, and lengths, offsets and scan_index are absent, but there are 9"),
        ({"lengths": None, "offsets": [0, 2, 6]}, r"offsets are \[0, 2, 6\] to \[6\], not 0 to the number"),
        ({"lengths": None, "scan_index": [0, 0, 2, 2, 2, 2, 1, 1, 1]}, r"scan_index does not count the scans in order"),
        ({"lengths": None, "ids": list("AABBABCCC")}, r"slices of one scan_id do not stand together"),
        ({"y": [0, 1]}, r"label has 2 values for 3 scans"),
        ({"y": [0, 0, 0, 1, 1, 1, 1, 1, 1]}, r"label changes within a scan \(positions 2 to 5\)"),
        ({"ids": ["A", "B", "A"]}, r"scan 'A' is in .*in.npz and in .*in.npz; give each scan once"),
        ({"slice_labels": [0, 1]}, r"2 slice labels for 9 slices"),
        ({"slice_labels": [0, 7, 0, 0, 0, 0, 0, 0, 0]}, r"slice labels other than 0, 1 and -1 \(unknown\)"),
        ({"recipe": "x" * 5000}, "a text of 5,000 characters, 'x{100}...', is not an id or a label"),
        ({"lengths": np.zeros(10**6, int)}, r"lengths has 1,000,000 values for 9 slices"),
        ({"x": PACKED.astype(int)}, r"features are int64 of shape \(9, 5\), not \(slices, features\) of floats"),
        (
            {"x": None, "lengths": None, "y": None, "ids": None, "A": PACKED.astype(int)},
            r"found A; the array 'A' is int64 of shape \(9, 5\), not \(slices, features\) of floats",
        ),
        ({"x": np.array([PACKED, PACKED[:2]], object)}, r"write one array for each scan, or the slices of .* lengths"),
        ({"x": PACKED[0]}, r"features are float32 of shape \(5,\)"),
        ({"x": PADDED, "lengths": [2, 5, 3]}, r"lengths are not 3 numbers up to 4"),
        ({"x": PADDED, "lengths": None}, r"the last slice of scan 0 is 0 throughout, like padding; add mask"),
        ({"x": PADDED, "mask": MASK[:, :3]}, r"mask is bool of shape \(3, 3\), not 0 and 1 of shape \(3, 4\)"),
        ({"x": PADDED, "slice_labels": [[0]]}, r"slice_labels has the shape \(1, 1\), not \(3, 4\)"),
        (
            {"x": np.where(np.arange(5) == 3, np.nan, PACKED)},
            r"in.npz: scan 'A', position 0, feature 3: value nan; .*fin",
        ),
    ],
)
def test_files_that_do_not_fit(tmp_path, fields, message):
    np.savez(tmp_path / "in.npz", **{key: value for key, value in {**GOOD, **fields}.items() if value is not None})
    refused(tmp_path / "in.npz", message)


def laughs() -> list:
    """A thousand million values, which few bytes hold."""
    inner: list = [1.0]
    for _ in range(20):
        inner = [inner] * 10
    return inner


ONE = torch.ones(9, 5)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"features": torch.ones(1).expand(10**9, 6)}, r"a tensor of shape \(1000000000, 6\) declares 24,000,000,000"),
        ({"features": ONE.to_sparse()}, "it holds a tensor of torch.float32, torch.sparse_coo, cpu; save dense"),
        ({"features": ONE.to("meta")}, "it holds a tensor of torch.float32, torch.strided, meta"),
        ({"features": ONE.to(torch.float8_e4m3fn)}, "features are float8_e4m3fn of shape"),
        ({"features": ONE, "label": laughs()}, "its lists hold more values than are stored"),
        ({"features": ONE, "patient_id": "\ud800"}, "surrogates not allowed"),
    ],
    ids=["large", "sparse", "meta", "float8", "laughs", "text"],
)
def test_tensors_that_do_not_fit(tmp_path, content, message):
    torch.save({"label": 1, **content}, tmp_path / "a.pt")
    refused(tmp_path / "a.pt", message)


def zip_of(path: Path, members: dict[str, bytes], method: int = zipfile.ZIP_DEFLATED) -> bytes:
    with zipfile.ZipFile(path, "w", method) as archive:
        for name, content in members.items():
            archive.writestr(name, content)
    return path.read_bytes()


NPY, LABEL = npy(FEATURES[0]), {"label.npy": npy(np.array(1))}


def test_archives_that_are_damaged_or_hostile_are_named(tmp_path):
    path = tmp_path / "a.npz"
    for members, method, message in (
        ({"features.npy": NPY[:60], **LABEL}, zipfile.ZIP_DEFLATED, r"EOF: reading array header"),
        ({"features.npy": NPY[:-4], **LABEL}, zipfile.ZIP_DEFLATED, r"declares 40 bytes .* but 36 follow"),
        ({"features": b"not an array", **LABEL}, zipfile.ZIP_DEFLATED, r"magic"),
        ({"features.npy": NPY, **LABEL}, zipfile.ZIP_BZIP2, r"packed by method 12; pack it again with deflate"),
        ({"features.npy": NPY, "features": NPY}, zipfile.ZIP_DEFLATED, r"two members of one name"),
    ):
        zip_of(path, members, method)
        refused(path, message)
    good = zip_of(path, {"features.npy": NPY, **LABEL})
    assert import_store(path, tmp_path / "store").scan_ids == ("a",)
    for place, flag in ((good.index(b"PK\x03\x04") + 6, 1), (good.index(b"PK\x01\x02") + 8, 1)):
        good = good[:place] + bytes([flag]) + good[place + 1 :]
    path.write_bytes(good)
    refused(path, r"'features': the member is encrypted")
    path.write_bytes(NPY)
    refused(path, r"it is a single array; name it .npy")
    np.savez_compressed(path, features=np.zeros((2**20, 65), np.float32), label=1)
    assert path.stat().st_size < 10**6
    refused(path, r"declares 272,\d{3},\d{3} bytes, more than the 268,435,456")
    path.write_bytes(zip_of(path, {"a.npy": NPY}).replace(b"PK\x01\x02", b"PK\x01\x03"))
    refused(path.rename(tmp_path / "a"), r"holds no scan")
    torch.save({"features": torch.ones(2, 3), "label": 1}, tmp_path / "a.pt")
    with zipfile.ZipFile(tmp_path / "a.pt") as archive:
        members = {name: archive.read(name) for name in archive.namelist()}
    zip_of(tmp_path / "a.pt", members)
    refused(tmp_path / "a.pt", "its records are packed, as torch.save does not")


def test_sources_that_are_none(tmp_path):
    out = tmp_path / "store"
    (tmp_path / "in" / "below").mkdir(parents=True)
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").write_text("no features")
    pq.write_table(pa.table({"scan_id": ["A"], "z": [0.5]}), tmp_path / "a.parquet")
    for source, form, message in (
        ("nowhere", "npz", "nowhere does not exist"),
        ("in", None, r"in holds no scan: it is not a file of features .* found below"),
        ("notes.txt", None, r"notes.txt holds no scan: it is not a file of features \(.npz"),
        ("in", "xls", "format 'xls' is unknown; choose one of npz, npy, pt, hdf5, parquet, torchmil"),
        ("empty", "npz", "empty holds no scan of format npz"),
        ("empty", "torchmil", "empty holds no scan of format torchmil"),
        ("a.parquet", None, r"numbered columns .* found scan_id \(string\), z \(double\)"),
    ):
        with pytest.raises(UserError, match=message):
            import_store(tmp_path / source, out, form)
    np.save(tmp_path / "in" / "A.npy", FEATURES[0])
    np.savez(tmp_path / "in" / "B.npz", features=FEATURES[1], label=1)
    with pytest.raises(UserError, match="in holds files of npy and npz; choose with --format"):
        import_store(tmp_path / "in", out)
    assert import_store(tmp_path / "in", out, "npz").scan_ids == ("B",)
    with pytest.raises(UserError, match="is a feature store already"):
        import_store(out, tmp_path / "again")


def test_files_that_do_not_fit_together(tmp_path):
    for folder in ("widths", "keys"):
        (tmp_path / folder).mkdir()
    for width in (3, 4):
        np.savez(tmp_path / "widths" / f"{width}.npz", x=np.ones((2, width), np.float32), y=1)
    with pytest.raises(UserError, match=r"scan '4' has 4 features, but scan '3' has 3; .*transposed"):
        import_store(tmp_path / "widths", tmp_path / "never")
    for scan in "AB":
        np.savez(tmp_path / "keys" / f"{scan}.npz", resnet=FEATURES[0])
    table = table_of(tmp_path / "t.csv", scan_id=["resnet", "B", "C"])
    with pytest.raises(UserError, match=r"'resnet' is in .*A.npz, resnet and in .*B.npz, resnet; .* call it features"):
        import_store(tmp_path / "keys", tmp_path / "never", labels=table)
    np.savez(tmp_path / "a.npz", features=FEATURES[0], label=1, recipe="é" * 900)  # \\u00e9 in the shard's header
    with pytest.raises(UserError, match=r"recipe 'é{50}'... has 900 characters"):
        import_store(tmp_path / "a.npz", tmp_path / "never")


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
def test_damaged_files_are_named(tmp_path, monkeypatch, suffix):
    path = tmp_path / f"a.{suffix}"
    if suffix == "npy":
        np.save(path, FEATURES[0])
    elif suffix == "parquet":
        pd.DataFrame(PACKED).rename(columns=str).to_parquet(path)
    else:
        WRITERS[suffix](path, one_scan(0))
    for content in (path.read_bytes()[: path.stat().st_size // 2], b"", b"not a file of features at all"):
        path.write_bytes(content)
        refused(path, rf"a.{suffix} cannot be read")
    if suffix == "h5":
        monkeypatch.setitem(sys.modules, "h5py", None)
        refused(path, r"h5py is not installed; pip install 'normal-guidance\[encoders\]'")


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("splits.csv", "bag_name,split\nA," + "x" * 200_000, r"splits.csv cannot be read \(field larger than field"),
        ("about.json", "[" * 100_000, r"about.json cannot be read \(nested more than"),
        ("about.json", '{"provenance": {}, "recipe": "", "order": 0}', r"about.json is damaged: order is 0, n"),
    ],
)
def test_torchmil_tables_that_are_damaged(tmp_path, name, content, message):
    (tmp_path / "features").mkdir()
    np.save(tmp_path / "features" / "A.npy", FEATURES[0])
    (tmp_path / name).write_text(content)
    with pytest.raises(UserError, match=message):
        import_store(tmp_path, tmp_path / "never")
