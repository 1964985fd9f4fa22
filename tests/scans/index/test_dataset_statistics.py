"""Counts, blocks and densities, against a count by hand."""

from pathlib import Path

import numpy as np
import pytest
import torch
from test_manifest import row

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.indexing import (
    BINS,
    describe,
    describe_scans,
    positive_density,
)
from normal_guidance.scans.index.manifest import read_manifest, write_manifest
from normal_guidance.study.study_tables import description_tables


def test_a_small_set_described_by_hand(tmp_path: Path) -> None:
    labels = np.array([0, 1, 1, 0, 0, 0, 0, 1, 0, 0], np.int8)
    rows = [
        row(1, slices=10, slice_labels=labels),
        row(3, slices=4, slice_labels=np.array([0, 0, 1, 1], np.int8)),
        row(4, slices=6),
        row(6, slices=8, slice_labels=None),
    ]
    found = describe(write_manifest(tmp_path / "m.parquet", rows, {"source": "folder", "root": "."}))
    assert (found.scans, found.positive, found.patients, found.slices) == (4, 2, 4, 28)
    assert (found.labelled, found.positive_slices) == (3, 5)
    assert found.lengths["mean"] == 7
    assert found.blocks is not None
    assert found.blocks.bags_by_blocks == {1: 1, 2: 1}
    assert sorted(found.blocks.lengths.tolist()) == [1, 2, 2]
    tables = description_tables("folder", {"all": found})
    assert [table.title for table in tables][2:] == [
        "Blocks in a positive scan",
        "Slices in a block",
        "Share of the scan in a block",
    ]
    assert tables[2].rows == [["all", "1/2", "1/2"]]
    assert found.to_dict()["bags_by_blocks"] == {"1": 1, "2": 1}


def test_density_counts_the_slices_of_each_twentieth() -> None:
    generator = np.random.default_rng(0)
    lengths = generator.integers(1, 70, 50)
    labels = generator.integers(0, 2, lengths.sum())
    want, start = np.zeros(BINS), 0
    for length in lengths:
        for j in range(1, length + 1):
            if labels[start + j - 1]:
                # The bin k with k/20 < j/S <= (k+1)/20, in whole numbers.
                want[next(k for k in range(BINS) if k * length < BINS * j <= (k + 1) * length)] += 1
        start += length
    got = positive_density(labels, lengths)
    np.testing.assert_allclose(got, want / want.sum() * BINS)
    assert got.mean() == pytest.approx(1)


def test_no_scans_and_no_slice_labels(tmp_path: Path) -> None:
    about = {"source": "folder", "root": "."}
    with pytest.raises(UserError, match="no scans"):
        describe(write_manifest(tmp_path / "m.parquet", [], about))
    bare = describe(write_manifest(tmp_path / "m.parquet", [row(1, slice_labels=None)], about))
    assert (bare.labelled, bare.blocks, bare.density.sum()) == (0, None, 0)
    assert len(description_tables("folder", {"all": bare})) == 2


def test_scans_with_features_are_described_as_their_manifest_is(phantom: Path) -> None:
    store = open_store(phantom / "store")
    assert describe_scans(store).to_dict() == describe(read_manifest(phantom / "index")).to_dict()
    assert describe_scans(store.bags()).to_dict() == describe_scans(store).to_dict()


def test_scans_without_slice_labels_count_as_such() -> None:
    features, lengths, labels = torch.zeros(7, 2), torch.tensor([3, 2, 2]), torch.tensor([1, 0, 1])
    some = describe_scans(Bags(features, lengths, labels, torch.tensor([0, 1, 1, 0, 0, -1, -1])))
    assert (some.scans, some.labelled, some.positive_slices, some.slices) == (3, 2, 2, 7)
    none = describe_scans(Bags(features, lengths, labels))
    assert (none.labelled, none.positive, none.positive_slices, none.blocks) == (0, 2, 0, None)
    assert none.density.tolist() == [0.0] * BINS
