"""Datasets from stores and splits: which scans, which seeds, which labels, and what is refused."""

import pickle
from dataclasses import replace

import pandas as pd
import pytest

from normal_guidance.base.errors import UserError
from normal_guidance.scans.features.store import write_store
from normal_guidance.scans.index.manifest import PARTS
from normal_guidance.study.experiment import stored_dataset
from small_study import SEEDS, make_store, part_of, some_scans, without_slice_labels, write_splits


@pytest.fixture(scope="module")
def store(tmp_path_factory):
    return make_store(tmp_path_factory.mktemp("stored") / "chest")


def test_each_split_has_the_scans_that_its_table_says(store, tmp_path):
    dataset = stored_dataset([store.folder], write_splits(tmp_path, store.scan_ids))
    assert (dataset.name, dataset.seeds, dataset.oracle) == ("chest", SEEDS, None)
    for seed in SEEDS:
        for part in PARTS:
            expected = [scan for number, scan in enumerate(store.scan_ids) if part_of(number, seed) == part]
            assert list(dataset.draw(seed, part).scan_ids) == expected
            assert dataset.fingerprints[seed, part] == dataset.draw(seed, part).fingerprint
    assert dataset.fingerprints[1001, "train"] != dataset.fingerprints[2001, "train"]


def test_a_folder_of_splits_is_all_its_tables_by_name(store, tmp_path):
    files = write_splits(tmp_path, store.scan_ids, (2001, 1001))
    (tmp_path / "readme.txt").write_text("no table")
    frame = pd.read_csv(files[0])
    frame.to_parquet(tmp_path / "split-3.parquet")
    dataset = stored_dataset([store.folder], [tmp_path])
    assert dataset.seeds == (1001, 2001, 3)
    assert dataset.draw(3, "val").scan_ids == dataset.draw(2001, "val").scan_ids


def test_splits_whose_names_end_in_the_same_number_or_none_are_numbered(store, tmp_path):
    for name, split in zip(("a", "b-7"), write_splits(tmp_path, store.scan_ids), strict=True):
        split.rename(tmp_path / f"{name}.csv")
    assert stored_dataset([store.folder], [tmp_path]).seeds == (1, 2)
    (tmp_path / "a.csv").rename(tmp_path / "c-7.csv")
    assert stored_dataset([store.folder], [tmp_path]).seeds == (1, 2)


def test_without_splits_each_store_has_its_own(tmp_path):
    for seed in SEEDS:
        bags = {part: some_scans(6, seed + PARTS.index(part)) for part in PARTS}
        own = {part: replace(one, patient_ids=one.scan_ids) for part, one in bags.items()}
        write_store(tmp_path / f"chest-{seed}", own.items(), provenance={})
    folders = [tmp_path / f"chest-{seed}" for seed in SEEDS]
    dataset = stored_dataset(folders)
    assert (dataset.name, dataset.seeds) == ("chest-1001", SEEDS)
    assert dataset.draw(2001, "val").scan_ids[0] == "synthetic-2002-000000"
    assert dataset.draw(2001, "val").folder == folders[1]


def test_a_store_for_each_split(store, tmp_path):
    """Features that were normalised with a split's training scans are that split's own."""
    other = make_store(tmp_path / "other", some_scans(shift=5.0))
    dataset = stored_dataset([store.folder, other.folder], write_splits(tmp_path / "splits", store.scan_ids))
    assert [dataset.draw(seed, "test").folder for seed in SEEDS] == [store.folder, other.folder]


def test_it_travels_to_processes_that_start_elsewhere(store, tmp_path, monkeypatch):
    splits = write_splits(tmp_path / "splits", store.scan_ids)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to(store.folder)
    dataset = stored_dataset([(tmp_path / "link").relative_to(tmp_path)], [splits[0].relative_to(tmp_path)])
    monkeypatch.chdir("/")
    there = pickle.loads(pickle.dumps(dataset))
    assert there.draw(1001, "test").fingerprint == dataset.fingerprints[1001, "test"]


@pytest.mark.parametrize(
    ("unlabelled", "expected"),
    [
        ((), (True, True)),
        (("train",), (True, False)),
        (("val",), (True, False)),
        (("test",), (False, False)),
        (PARTS, (False, False)),
    ],
)
def test_which_parts_have_slice_labels(tmp_path, unlabelled, expected):
    bags = some_scans()
    numbers = [number for number in range(len(bags)) if part_of(number, 2001) in unlabelled]
    store = make_store(tmp_path / "store", without_slice_labels(bags, numbers))
    # A third of the scans is in another part of the first split, which therefore has some labels in each.
    splits = write_splits(tmp_path / "splits", store.scan_ids)
    both, second = stored_dataset([store.folder], splits), stored_dataset([store.folder], splits[1:])
    assert (second.has_slice_labels, second.has_supervision) == expected
    assert (both.has_slice_labels, both.has_supervision) == expected  # what one split lacks, the dataset lacks


def test_negative_slices_alone_locate_nothing(tmp_path):
    bags = some_scans(36)
    store = make_store(tmp_path / "store", replace(bags, labels=0 * bags.labels, slice_labels=0 * bags.slice_labels))
    assert not stored_dataset([store.folder], write_splits(tmp_path, store.scan_ids)).has_slice_labels


@pytest.mark.parametrize(
    ("stores", "splits", "name", "message"),
    [
        ([], [], None, "no store is given; give the folder of one"),
        (["nowhere"], [], None, "nowhere is not a feature store: store.json is missing"),
        (["store"], [], None, "chest has no scan in part 'train'; give --split FILE"),
        (["store", "store", "store"], ["splits"], None, "3 stores and 2 splits; give one store for all splits, or one"),
        (["store"], ["splits/split-1001.csv", "splits"], None, "split-1001.csv is given twice; give each split once"),
        (["store", "store"], [], None, "chest is given twice; give each split once"),
        (["store"], ["empty"], None, r"empty holds no split \(.csv, .parquet\); make some with nguide split"),
        (
            ["store"],
            ["nowhere.csv"],
            None,
            "nowhere.csv is not a file; .* holds all-train.csv, leaky.csv, short",
        ),
        (["store"], ["splits.txt"], None, "splits.txt is not a .csv or .parquet file; give one with"),
        (["store"], ["short.csv"], None, "short.csv: scan '.*' is in the store, but has no part"),
        (["store"], ["all-train.csv"], None, "all-train.csv has no scan in part 'val'; give --split FILE"),
        (["store"], ["leaky.csv"], None, "patient 'patient-0' has scans in part 'train' and in part 'val'"),
        (["store"], ["splits"], "semi-synthetic", "dataset 'semi-synthetic' is drawn, not stored: .*another name"),
    ],
)
def test_what_is_refused(store, tmp_path, stores, splits, name, message):
    write_splits(tmp_path / "splits", store.scan_ids)
    (tmp_path / "empty").mkdir()
    scans = store.scan_ids
    leaky = [f"{scan},{PARTS[number % 3]}" for number, scan in enumerate(scans)]
    tables = {
        "short.csv": [f"{scan},train" for scan in scans[1:]],
        "all-train.csv": [f"{scan},train" for scan in scans],
        "leaky.csv": leaky,
    }
    for file, lines in tables.items():
        (tmp_path / file).write_text("\n".join(["scan_id,part", *lines]))
    folders = [store.folder if one == "store" else tmp_path / one for one in stores]
    with pytest.raises(UserError, match=message):
        stored_dataset(folders, [tmp_path / one for one in splits], name)
