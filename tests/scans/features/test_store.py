"""A store gives back exactly what was written, reads no more than it is asked for, and notices what is wrong."""

import hashlib
import json
import os
import threading
import weakref
from dataclasses import replace
from pathlib import Path

import pandas as pd
import pyarrow.parquet as pq
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json, write_json
from normal_guidance.core.bags import UNKNOWN, Bags
from normal_guidance.scans.features.store import (
    DTYPES,
    INDEX,
    FeatureStore,
    IndexRow,
    fingerprint_of,
    open_store,
    write_store,
)

FEATURES, F32 = 6, torch.float32


def make(part: str, lengths: list[int], dtype: torch.dtype = torch.float32, *, labelled: bool = True) -> Bags:
    """Scans named after their part; every other one is positive, and the first has no slice labels."""
    labels = torch.arange(len(lengths)) % 2
    slice_labels = torch.cat([torch.arange(n) % 2 * y for n, y in zip(lengths, labels.tolist(), strict=True)])
    slice_labels[: lengths[0]] = UNKNOWN
    return Bags(
        features=torch.randn(sum(lengths), FEATURES).to(dtype),
        lengths=torch.tensor(lengths),
        labels=labels,
        slice_labels=slice_labels if labelled else None,
        scan_ids=tuple(f"{part}-{i}" for i in range(len(lengths))),
        patient_ids=tuple(f"{part}-patient-{i // 2}" for i in range(len(lengths))),
    )


def make_parts() -> dict[str, Bags]:
    return {"train": make("train", [3, 1, 4, 2, 5]), "val": make("val", [2, 6]), "test": make("test", [4, 1, 1])}


def write(folder: Path, parts: dict[str, Bags] | None = None, **options) -> FeatureStore:
    return write_store(folder / "store", (parts or make_parts()).items(), provenance={"seed": 0}, **options)


def assert_same(bags: Bags, other: Bags) -> None:
    assert (bags.features.dtype, bags.scan_ids) == (other.features.dtype, other.scan_ids)
    assert bags.patient_ids == other.patient_ids
    for name in ("features", "lengths", "labels", "slice_labels"):
        values, others = getattr(bags, name), getattr(other, name)
        assert values is others if values is None or others is None else torch.equal(values, others), name


@pytest.mark.parametrize(
    ("dtype", "shard_bytes", "labelled"),
    [*((dtype, 100, True) for dtype in DTYPES.values()), (F32, 1, True), (F32, 10**9, True), (F32, 100, False)],
)
def test_bags_come_back_exactly(tmp_path, dtype, shard_bytes, labelled):
    bags = make("a", [3, 1, 4, 2, 5], dtype, labelled=labelled)
    write_store(tmp_path / "store", bags, provenance={}, shard_bytes=shard_bytes)
    store = open_store(str(tmp_path / "store"))
    assert_same(store.bags(), bags)
    assert len(store.shards) == {1: 5, 10**9: 1}.get(shard_bytes, len(store.shards))
    assert (store.width, store.dtype, store.memory) == (FEATURES, dtype, bags.memory)
    assert store.scans["part"].tolist() == [None] * 5


def test_the_files_are_what_other_programs_expect(tmp_path):
    """safetensors' own loader and a plain parquet reader see the scans, without this package."""
    bags = make("a", [3, 1, 4])
    write_store(tmp_path / "store", bags, provenance={"é": 1}, recipe="8e1f", shard_bytes=4 * 24)
    table = pq.read_table(tmp_path / "store" / "index.parquet")
    assert table.schema.equals(INDEX)
    assert table.column_names == list(IndexRow._fields)
    for bag, row in zip(bags, table.to_pylist(), strict=True):
        shard = load_file(tmp_path / "store" / f"features-{row['shard']:05d}.safetensors")["features"]
        features = shard[row["first_row"] : row["first_row"] + row["slices"]]
        assert torch.equal(features, bag.features)
        assert row["sha256"] == hashlib.sha256(bag.features.numpy().tobytes()).hexdigest()
        assert row["slice_labels"] == (None if bag.slice_labels is None else bag.slice_labels.tolist())
    assert table["shard"].to_pylist() == [0, 0, 1]
    content = (tmp_path / "store" / "features-00001.safetensors").read_bytes()
    assert content[4096:] == bags[2].features.numpy().tobytes(), "on a page, and nothing follows"
    about = json.loads((tmp_path / "store" / "store.json").read_bytes())
    assert (about["format"], about["features"], about["dtype"]) == (3, FEATURES, "float32")
    assert (about["provenance"], about["recipe"]) == ({"é": 1}, "8e1f")
    for shard in sorted((tmp_path / "store").glob("*.safetensors")):
        with safe_open(shard, framework="pt") as file:
            assert file.metadata() == {"recipe": "8e1f"}


def test_a_view_that_is_not_contiguous_is_stored_in_another_dtype_with_other_files(tmp_path):
    wide = torch.randn(5, 2 * FEATURES)
    bags = replace(make("a", [3, 2]), features=wide[:, ::2])
    store = write_store(tmp_path / "store", bags, provenance={}, dtype=torch.float16, files={"report.json": b"{}"})
    assert torch.equal(store.bags().features, wide[:, ::2].half())
    assert (store.folder / "report.json").read_bytes() == b"{}"
    assert repr(write(tmp_path / "other")) == (
        "FeatureStore(10 scans of 1-6 slices (median 2), 29 slices x 6 features, 4 positive (40.0 %), "
        "7 with slice labels, train 5, val 2, test 3, float32, 696 bytes)"
    )
    assert repr(store.select([])) == "FeatureStore(no scans, 6 features, float16)"


def test_no_more_than_two_parts_are_held(tmp_path):
    """The one that is being written, and the next while it is being made."""
    alive: list[weakref.ref] = []

    def stream():
        for i in range(5):
            bags = make(f"chunk{i}", [3, 2])
            alive.append(weakref.ref(bags.features))
            yield "train", bags
            del bags
            assert sum(ref() is not None for ref in alive) <= 1

    assert len(write_store(tmp_path / "store", stream(), provenance={})) == 10


def test_a_write_that_fails_leaves_nothing_and_a_store_is_not_overwritten(tmp_path):
    def stream():
        yield "train", make("train", [3, 2])
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        write_store(tmp_path / "store", stream(), provenance={}, shard_bytes=50)
    assert list(tmp_path.iterdir()) == []
    before = write(tmp_path).fingerprint
    with pytest.raises(UserError, match=r"store is a folder that is not empty; choose another name, or move or delete"):
        write(tmp_path)
    assert open_store(tmp_path / "store").fingerprint == before


NARROW = replace(make("b", [2]), features=torch.zeros(2, 3))
SHARED = replace(make("b", [2]), patient_ids=("a-patient-0",))


@pytest.mark.parametrize(
    ("pairs", "message"),
    [
        ([("train", make("a", [2])), ("val", make("a", [3]))], r"'a-0' of part 'val' is already in part 'train' \(1 "),
        ([("dev", make("a", [2]))], "part 'dev' is unknown; choose one of train, val, test"),
        ([("train", make("a", [2])), ("val", make("b", [2], torch.float16))], "'b-0' is float16, but scan 'a-0' is"),
        ([("train", make("a", [2])), ("val", NARROW)], "scan 'b-0' has 3 features, but scan 'a-0' has 6"),
        ([("train", make("a", [2])), ("test", SHARED)], "patient 'a-patient-0' is in part 'train' and in part 'test'"),
        ([], "no scan to store"),
        ([("train", make("a", [2])[:0])], "no scan to store"),
        ([("train", make("a", [2]).to(dtype=torch.float8_e5m2))], "float8_e5m2; a store holds float16, bfloat16, fl"),
    ],
)
def test_parts_that_do_not_fit_together_are_refused(tmp_path, pairs, message):
    with pytest.raises(UserError, match=message):
        write_store(tmp_path / "store", iter(pairs), provenance={})
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(UserError, match=message):
        fingerprint_of(dict(pairs))
    store = write_store(tmp_path / "store", [("train", make("a", [2])), (None, SHARED)], provenance={})
    assert store.scans["part"].tolist() == ["train", None], "scans of no part share patients with any"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"dtype": torch.float16}, r"scan 'a-1' has a feature of size 100000, too large for float16; store bfloat16"),
        ({"provenance": {"value": torch.zeros(1)}}, r"provenance .* is not JSON"),
        ({"provenance": {"value": float("nan")}}, r"provenance .* is not JSON"),
        ({"shard_bytes": 0}, "shard_bytes is 0; it must be at least 1"),
    ],
)
def test_options_that_cannot_be_are_refused(tmp_path, options, message):
    bags = make("a", [2, 2])
    bags.features[3, 1] = -1e5
    with pytest.raises(UserError, match=message):
        write_store(tmp_path / "store", bags, **{"provenance": {}, **options})
    assert list(tmp_path.iterdir()) == []


def cut(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def fill(path: Path) -> None:
    path.write_bytes(b"\xff" * 100)


def change_json(**changes):
    return lambda path: write_json(path, read_json(path) | changes)


def change_index(change):
    return lambda path: change(pd.read_parquet(path)).to_parquet(path)


def change_column(name: str, change):
    return change_index(lambda table: table.assign(**{name: change(table[name])}))


def other_tensor(**tensors):
    return lambda path: save_file(tensors, path)


SHARD = "features-00001.safetensors"


@pytest.mark.parametrize(
    ("file", "damage", "message"),
    [
        ("store.json", Path.unlink, "store.json is missing; give a folder made by nguide encode"),
        ("store.json", fill, r"store.json cannot be read \(.*copy the store again"),
        ("store.json", change_json(format=99), "format 99, but this normal-guidance reads format 3; update it"),
        ("store.json", change_json(format=2), "format 2, but .* open it with normal-guidance 0.2, or make it again"),
        ("store.json", change_json(dtype="int4"), r"store.json is damaged: dtype is 'int4', not one of"),
        ("store.json", change_json(features=7), "index.parquet and store.json do not belong together"),
        ("index.parquet", Path.unlink, r"index.parquet cannot be read \(.*No such file.*copy the store again"),
        ("index.parquet", cut, "index.parquet is damaged: its content does not fit its checksum; copy the store again"),
        ("index.parquet", change_index(lambda table: table.drop(columns="slices")), r"has no column 'slices'"),
        ("index.parquet", change_index(lambda table: table.iloc[:0]), "lists no scan"),
        ("index.parquet", change_column("part", lambda part: part.replace({"train": "val"})), "do not belong together"),
        ("index.parquet", change_column("first_row", lambda row: row + 1), "'train-0' does not follow the scan before"),
        ("index.parquet", change_column("shard", lambda n: n + (n > 0)), rf"{SHARD} holds .* the index needs \(0, 6\)"),
        (SHARD, Path.unlink, f"{SHARD} is missing; copy the store again"),
        (SHARD, fill, f"{SHARD} is damaged"),
        (SHARD, other_tensor(other=torch.zeros(7, 6)), f"{SHARD} is damaged .*features"),
        (SHARD, other_tensor(features=torch.zeros(4, 6)), r"holds \(4, 6\) numbers of float32, but the index needs"),
        (SHARD, other_tensor(features=torch.zeros(7, 6).half()), "of float16, but the index needs"),
    ],
)
def test_damage_is_noticed_and_named(tmp_path, file, damage, message):
    store = write(tmp_path, shard_bytes=8 * 24)
    assert len(store.shards[1]) == 7, "the table above is made for this"
    damage(store.folder / file)
    with pytest.raises(UserError, match=message):
        open_store(store.folder)


def test_a_shard_of_another_recipe_is_not_mixed_in(tmp_path):
    """Same sizes, same dtype: nothing else would tell that an encoder saw these scans that the others did not."""
    one = write(tmp_path / "one", recipe="8e1f", shard_bytes=1).folder
    for recipe, says in (("77aa", "77aa"), ("", "unknown")):
        other = write(tmp_path / f"other{recipe}", recipe=recipe, shard_bytes=1).folder
        (one / SHARD).write_bytes((other / SHARD).read_bytes())
        with pytest.raises(UserError, match=rf"00001.* by another encoder or .* \(recipe {says}, not 8e1f\); feat"):
            open_store(one)


def test_a_flipped_bit_is_found_where_it_is(tmp_path):
    store = write(tmp_path, shard_bytes=8 * 24)
    assert store.damaged() == []
    shard = store.folder / SHARD
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    store.folder.rename(tmp_path / "key=value")  # pyarrow reads meaning into such names
    damaged = open_store(tmp_path / "key=value")  # opening does not look at features
    assert damaged.fingerprint == store.fingerprint
    last = damaged.scans[damaged.scans["shard"] == 1]["scan_id"].tolist()[-1]
    assert damaged.damaged() == [last]
    assert damaged.select([last]).damaged() == [last]
    assert damaged.select([scan for scan in damaged.scan_ids if scan != last]).damaged() == []


@pytest.fixture(scope="module")
def shared(tmp_path_factory) -> tuple[Bags, FeatureStore]:
    torch.manual_seed(1)
    bags = make("a", torch.randint(1, 9, (20,)).tolist())
    store = write_store(tmp_path_factory.mktemp("shared") / "store", bags, provenance={}, shard_bytes=500)
    assert len(store.shards) > 3
    return bags, store


@given(chosen=st.lists(st.integers(0, 19)))
def test_rows_are_the_scans_one_below_the_other(shared, chosen):
    bags, store = shared
    want = torch.cat([torch.zeros(0, FEATURES), *(bags[i].features for i in chosen)])  # repeated scans too
    for kind in (torch.int64, torch.int32):
        assert torch.equal(store.rows(torch.tensor(chosen, dtype=kind)), want)


@given(chosen=st.lists(st.integers(0, 19), unique=True, min_size=1))
def test_selecting_from_a_store_is_selecting_from_bags(shared, chosen):
    bags, store = shared
    by_id = store.select([bags.scan_ids[i] for i in chosen])
    assert_same(by_id.bags(), replace(bags[chosen], slice_labels=by_id.slice_labels))
    if by_id.slice_labels is not None:
        assert torch.equal(by_id.slice_labels, bags[chosen].slice_labels)
    mask = torch.zeros(20, dtype=torch.bool)
    mask[chosen] = True
    for same in (mask, mask.numpy(), mask.tolist(), pd.Series(mask.numpy())):
        assert store.select(same).scan_ids == bags[mask].scan_ids
    last = store.select(mask).rows(torch.tensor([len(chosen) - 1]))
    assert torch.equal(last, bags[max(chosen)].features)


def test_a_choice_that_cannot_be_made_is_refused(shared):
    _, store = shared
    assert store.select("a-3").scan_ids == ("a-3",)
    assert store.select(store.scans["label"] == 1).labels.tolist() == [1] * 10
    for chosen, message in (
        (["a-1", "b", "c"], r"has no scan 'b' \(2 such ids\)"),
        (["a-1", "a-1"], r"the selection from store .* has scan 'a-1' twice; give each scan once"),
        ([True, False], "2 booleans for 20 scans"),
    ):
        with pytest.raises(UserError, match=message):
            store.select(chosen)
    with pytest.raises(IndexError):
        store.rows(torch.tensor([20]))


def test_rows_may_be_read_by_many_threads(shared):
    bags, store = shared
    fresh = open_store(store.folder)  # nothing cached yet
    start, wrong = threading.Barrier(8), []

    def read(seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        start.wait()
        for _ in range(50):
            order = torch.randperm(20, generator=generator)
            if not torch.equal(fresh.rows(order), bags[order].features):
                wrong.append(order)

    threads = [threading.Thread(target=read, args=(seed,)) for seed in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="needs Linux' /proc to see resident memory")
def test_features_are_read_when_they_are_asked_for(tmp_path):
    mib, scans, slices, features = 2**20, 100, 256, 1024
    bags = Bags(
        features=torch.ones(1, 1).expand(scans * slices, features),  # 100 MiB on the disk, none in memory
        lengths=torch.full((scans,), slices),
        labels=torch.zeros(scans, dtype=torch.int64),
    )
    write_store(tmp_path / "store", bags, provenance={})
    before = resident_bytes()
    store = open_store(tmp_path / "store")
    assert (store.memory, len(store.shards)) == (100 * mib, 1)
    assert resident_bytes() - before < 8 * mib
    assert store.rows(torch.tensor([7, 60])).sum() == 2 * slices * features
    assert resident_bytes() - before < 24 * mib
    everything = store.rows(torch.arange(scans))  # and the measure does see what is read
    assert resident_bytes() - before > 85 * mib  # the mapped pages; the copy may lie in memory that was kept
    del everything


@pytest.mark.parametrize("kind", ["mapping", "csv", "parquet"])
def test_parts_are_assigned(tmp_path, kind):
    store = write(tmp_path)
    split = {scan: "val" if scan.startswith("val") else "train" for scan in store.scan_ids}
    table = pd.DataFrame({"part": split.values(), "scan_id": split.keys()}).iloc[::-1]
    if kind == "csv":
        table.to_csv(tmp_path / "split.csv", index=False)
    elif kind == "parquet":
        table.to_parquet(tmp_path / "split.parquet")
    other = store.with_parts(split if kind == "mapping" else tmp_path / f"split.{kind}")
    assert other.part("train").scan_ids == tuple(scan for scan in store.scan_ids if split[scan] == "train")
    assert other.part("val").scan_ids == ("val-0", "val-1")
    assert torch.equal(other.part("val").bags().features, store.part("val").bags().features)
    assert other.fingerprint != store.fingerprint
    assert store.part("test").scan_ids == ("test-0", "test-1", "test-2")  # untouched
    for part, message in (
        ("test", r"has no scan of part 'test'; .* with_parts\(table\)"),
        ("dev", "part 'dev' is unknown; choose one of train, val, test"),
    ):
        with pytest.raises(UserError, match=message):
            other.part(part)
    for change, message in (
        ({"x": "train", "y": "val"}, r"the mapping: scan 'x' is not in the store \(2 such scans\); leave it out"),
        ({"val-0": None}, r"the mapping: scan 'val-0' is in the store, but has no part \(1 such scans\); add it"),
        ({"val-0": "dev"}, "the mapping: scan 'val-0': part 'dev' is unknown; choose one of train, val, test"),
        (
            {"val-0": "train"},
            "patient 'val-patient-0' is in part 'train' and in part 'val'; put all its scans into one part",
        ),
    ):
        with pytest.raises(UserError, match=message):
            store.with_parts({scan: part for scan, part in (split | change).items() if part})


def test_memory_disk_order_and_shards_do_not_change_the_fingerprint(tmp_path):
    for dtype in DTYPES.values():
        parts = {name: bags.to(dtype=dtype) for name, bags in make_parts().items()}
        store = write(tmp_path / str(dtype), parts, shard_bytes=200)
        assert store.fingerprint == fingerprint_of(parts) == read_json(store.folder / "store.json")["fingerprint"]
    parts = make_parts()
    want = fingerprint_of(parts)
    shuffled = {name: parts[name][torch.randperm(len(parts[name]))] for name in reversed(parts)}
    assert fingerprint_of(shuffled) == want
    store = write(tmp_path, shuffled, shard_bytes=1)
    assert store.fingerprint == want
    assert store.select(sorted(store.scan_ids)).fingerprint == want
    assert store.select(store.scan_ids[1:]).fingerprint != want
    assert fingerprint_of({"train": parts["val"], "val": parts["train"], "test": parts["test"]}) != want


def test_any_change_changes_the_fingerprint():
    bags = make("a", [3, 4])
    features, slices = bags.features.clone(), bags.slice_labels.clone()
    features[1, 2], slices[-1] = torch.nextafter(features[1, 2], torch.tensor(9.0)), slices[-1] ^ 1
    others = [
        *(replace(bags, features=features), bags.to(dtype=torch.float64), replace(bags, labels=torch.tensor([1, 1]))),
        *(replace(bags, slice_labels=slices), replace(bags, slice_labels=torch.full_like(slices, UNKNOWN))),
        replace(bags, slice_labels=None, lengths=torch.tensor([4, 3])),
        *(replace(bags, **{name: ("other", *getattr(bags, name)[1:])}) for name in ("scan_ids", "patient_ids")),
    ]
    prints = {fingerprint_of({"train": scans}) for scans in (bags, *others)}
    assert len(prints) == 1 + len(others)
