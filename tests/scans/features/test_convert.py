"""Stores come back exactly from other formats, other programs read them, and what does not fit is named."""

import json
import pickle
from pathlib import Path

import h5py
import numpy as np
import pytest
import torch
from torchmil.datasets import BinaryClassificationDataset, ProcessedMILDataset

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import UNKNOWN, Bags
from normal_guidance.scans.features.convert import EXPORT_FORMATS, export_store, import_store
from normal_guidance.scans.features.store import write_store
from normal_guidance.scans.index.problems import file_name

IDS = ("b-2", "a/1", "..", "é ü", ".hidden", "100%", "a_1")
LENGTHS = [3, 1, 4, 2, 5, 2, 3]


def make(folder: Path, dtype=torch.float32, recipe="8e1f"):
    """Ids that are no file names, in no order; the first scan has no slice labels."""
    labels = torch.arange(7) % 2
    slices = torch.cat([torch.arange(n) % 2 * y for n, y in zip(LENGTHS, labels.tolist(), strict=True)])
    slices[:3] = UNKNOWN
    slices[3] = 1
    bags = Bags(
        torch.randn(sum(LENGTHS), 6).to(dtype),
        torch.tensor(LENGTHS),
        labels,
        slices,
        IDS,
        tuple(f"patient {n // 2}" for n in range(7)),
    )
    parts = [("train", bags[:2]), ("val", bags[2:4]), (None, bags[4:])]
    return write_store(folder / "store", parts, provenance={"encoder": "é"}, recipe=recipe)


def contents(folder: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in folder.iterdir()}


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_a_store_comes_back_exactly(tmp_path, form, dtype):
    store = make(tmp_path, dtype)
    export_store(store, tmp_path / "exported", form)
    import_store(tmp_path / "exported", tmp_path / "again", form)
    assert contents(tmp_path / "again") == contents(store.folder)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["again", "exported", "store"]


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_a_part_of_a_store_is_exported(tmp_path, form):
    store = make(tmp_path).select(["..", "b-2"])
    export_store(store, tmp_path / "exported", form)
    again = import_store(tmp_path / "exported", tmp_path / "again", form, dtype=torch.float16)
    assert again.scan_ids == ("..", "b-2")
    assert torch.equal(again.bags().features, store.bags().features.half())


def test_npz_is_plain_numpy(tmp_path):
    store = make(tmp_path)
    export_store(store, tmp_path / "npz", "npz")
    assert {file.name for file in (tmp_path / "npz").glob("*.npz")} == {
        "b-2.npz", "a%2F1.npz", "%2E..npz", "%C3%A9%20%C3%BC.npz", "%2Ehidden.npz", "100%25.npz", "a_1.npz"
    }  # fmt: skip
    with np.load(tmp_path / "npz" / "a%2F1.npz") as file:
        assert np.array_equal(file["features"], store.bags()[1].features.numpy())
        assert (file["label"], file["slice_labels"].tolist(), file["part"]) == (1, [1], "train")
        assert (str(file["patient_id"]), str(file["recipe"])) == ("patient 0", "8e1f")
    with np.load(tmp_path / "npz" / "b-2.npz") as file:
        assert "slice_labels" not in file


def test_hdf5_is_plain_h5py(tmp_path):
    store = make(tmp_path)
    export_store(store, tmp_path / "features.h5", "hdf5")
    with h5py.File(tmp_path / "features.h5") as file:
        assert set(file) == {file_name(scan) for scan in IDS}
        group = file["a%2F1"]
        assert np.array_equal(group["features"][()], store.bags()[1].features.numpy())
        assert (group.attrs["label"], group.attrs["part"], group["slice_labels"][()].tolist()) == (1, "train", [1])
        assert "part" not in file["a_1"].attrs


def test_torchmil_reads_the_export(tmp_path):
    """torchmil's own classes, not our idea of them."""
    store = make(tmp_path)
    export_store(store, tmp_path / "mil", "torchmil")
    root = tmp_path / "mil"
    folders = {f"{key}_path": f"{root}/{key}" for key in ("features", "labels", "inst_labels")}
    dataset = ProcessedMILDataset(**folders, bag_keys=["X", "Y", "y_inst"], verbose=False)
    assert set(dataset.get_bag_names()) == {file_name(scan) for scan in IDS}
    bags = store.bags()
    place = {file_name(scan): number for number, scan in enumerate(IDS)}
    for number, name in enumerate(dataset.get_bag_names()):
        read, bag = dataset[number], bags[place[name]]
        assert torch.equal(read["X"], bag.features)
        assert read["Y"].tolist() == [bag.label]
        assert read["y_inst"].tolist() == (
            [UNKNOWN] * len(bag.features) if bag.slice_labels is None else bag.slice_labels.tolist()
        )
    binary = BinaryClassificationDataset(**folders, bag_keys=["X", "Y", "y_inst"], bag_names=["a%2F1"], verbose=False)
    assert (binary[0]["Y"].item(), binary[0]["y_inst"].tolist()) == (1, [1])
    from torchmil.utils.common import read_csv

    split = {row["bag_name"]: row["split"] for row in read_csv(f"{root}/splits.csv")}
    assert split["a%2F1"] == "train"
    assert split["%2E."] == "val"
    assert split["a_1"] == ""


def test_files_of_other_programs_are_imported(tmp_path):
    """Features and labels are enough; torchmil's published CT set calls slice labels slice_labels."""
    mil = tmp_path / "mil"
    for folder in ("features", "labels", "slice_labels"):
        (mil / folder).mkdir(parents=True)
    features = np.random.default_rng(0).normal(size=(3, 4)).astype(">f4")  # big-endian: of another machine
    np.save(mil / "features" / "x.npy", features)
    np.save(mil / "labels" / "x.npy", np.array(1.0))
    np.save(mil / "slice_labels" / "x.npy", np.array([[0], [1], [0]], dtype=np.float32))
    (mil / "splits.csv").write_text("bag_name,split\nx,test\n")
    one = import_store(mil, tmp_path / "one", "torchmil")
    assert (one.scan_ids, one.patient_ids, one.scans["part"].tolist()) == (("x",), ("x",), ["test"])
    assert (one.labels.tolist(), one.slice_labels.tolist()) == ([1], [0, 1, 0])
    assert np.array_equal(one.bags().features.numpy(), features)
    assert (one.provenance, one.recipe) == ({"imported_from": "torchmil"}, "")

    with h5py.File(tmp_path / "plain.h5", "w") as file:
        file["y"] = features
        file["y"].attrs["label"] = 0
    two = import_store(tmp_path / "plain.h5", tmp_path / "two", "hdf5")
    assert (two.scan_ids, two.labels.tolist(), two.slice_labels) == (("y",), [0], None)

    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "z.npz", features=features, label=[1])
    three = import_store(tmp_path / "npz", tmp_path / "three", "npz")
    assert (three.scan_ids, three.labels.tolist()) == (("z",), [1])


# ----------------------------------------------------------------------------------------------------
# What does not fit
# ----------------------------------------------------------------------------------------------------


def test_two_encoders_are_not_mixed(tmp_path):
    export_store(make(tmp_path / "a"), tmp_path / "npz", "npz")
    export_store(make(tmp_path / "b", recipe="77aa").select(["a_1"]), tmp_path / "other", "npz")
    (tmp_path / "npz" / "a_1.npz").write_bytes((tmp_path / "other" / "a_1.npz").read_bytes())
    with pytest.raises(UserError, match=r"scan 'a_1' was made by another encoder .*\(recipes 77aa and 8e1f\); keep"):
        import_store(tmp_path / "npz", tmp_path / "store", "npz")
    assert not (tmp_path / "store").exists()


def one_npz(folder: Path, **fields) -> Path:
    folder.mkdir()
    np.savez(folder / "x.npz", **{"features": np.zeros((2, 3), np.float32), "label": 1, **fields})
    return folder


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"features": np.zeros((2, 3), np.int32)}, r"x.npz cannot be imported \(features are int32 of shape \(2, 3\)"),
        ({"features": np.zeros(3, np.float32)}, r"of shape \(3,\), not \(slices, features\)"),
        ({"label": 2}, "the label is 2, not 0 or 1"),
        ({"label": [0, 1]}, "label has 2 values for 1 scan"),
        ({"slice_labels": [0, 7]}, "slice labels other than 0, 1 and -1 \\(unknown\\)"),
        ({"slice_labels": [0, 1, 1]}, "3 slice labels for 2 slices"),
        ({"part": "dev"}, "part 'dev' is unknown"),
        ({"features": np.full((2, 3), np.nan, np.float32)}, "features must be finite"),
    ],
)
def test_scans_that_are_none_are_named(tmp_path, fields, message):
    with pytest.raises(UserError, match=message):
        import_store(one_npz(tmp_path / "npz", **fields), tmp_path / "store", "npz")
    assert not (tmp_path / "store").exists()


class Bomb:
    def __reduce__(self):
        return Path.touch, (Path("exploded"),)


def test_nothing_is_executed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "npz").mkdir()
    np.savez(tmp_path / "npz" / "x.npz", features=np.array(Bomb(), dtype=object), label=1)
    with pytest.raises(UserError, match=r"x.npz cannot be read \(Object arrays could run code"):
        import_store(tmp_path / "npz", tmp_path / "store", "npz")
    (tmp_path / "npz" / "x.npz").write_bytes(pickle.dumps(Bomb()))
    with pytest.raises(UserError, match=r"x.npz cannot be read"):
        import_store(tmp_path / "npz", tmp_path / "store", "npz")
    assert not Path("exploded").exists()


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_damaged_files_are_named(tmp_path, form):
    store = make(tmp_path)
    out = tmp_path / "exported"
    export_store(store, out, form)
    for file in [out] if out.is_file() else sorted(out.rglob("*.np*")):
        file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r"exported.* cannot be (read|imported)"):
        import_store(out, tmp_path / "again", form)


def test_a_damaged_description_is_named(tmp_path):
    export_store(make(tmp_path), tmp_path / "npz", "npz")
    (tmp_path / "npz" / "about.json").write_text(json.dumps({"recipe": "x"}))
    with pytest.raises(UserError, match=r"about.json is damaged: provenance is missing"):
        import_store(tmp_path / "npz", tmp_path / "again", "npz")


@pytest.mark.parametrize("form", EXPORT_FORMATS)
def test_nothing_is_overwritten(tmp_path, form):
    store = make(tmp_path)
    (tmp_path / "mine").write_text("mine")
    with pytest.raises(UserError, match=r"mine (is|exists)"):
        export_store(store, tmp_path / "mine", form)
    assert (tmp_path / "mine").read_text() == "mine"


def test_what_cannot_be_is_refused(tmp_path):
    store = make(tmp_path)
    with pytest.raises(UserError, match="format 'matlab' is unknown; choose one of npz, hdf5, torchmil"):
        export_store(store, tmp_path / "out", "matlab")
    with pytest.raises(UserError, match="nowhere does not exist"):
        import_store(tmp_path / "nowhere", tmp_path / "out", "npz")
    (tmp_path / "empty").mkdir()
    for form in ("npz", "torchmil"):
        with pytest.raises(UserError, match=f"empty holds no scan of format {form}"):
            import_store(tmp_path / "empty", tmp_path / "out", form)
    half = write_store(tmp_path / "half", store.bags().to(dtype=torch.bfloat16), provenance={})
    with pytest.raises(UserError, match="is bfloat16, which npz does not have"):
        export_store(half, tmp_path / "out", "npz")
    bag = Bags(torch.zeros(1, 2), torch.tensor([1]), torch.tensor([0]), scan_ids=("x" * 300,))
    long = write_store(tmp_path / "long", bag, provenance={})
    with pytest.raises(UserError, match="is too long for a file's name"):
        export_store(long, tmp_path / "out", "npz")
