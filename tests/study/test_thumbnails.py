"""Small pictures of a phantom's slices: which slices, and in which grey."""

import json
from dataclasses import replace

import numpy as np
import pyarrow as pa
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.features.windows import Percentiles
from normal_guidance.scans.index.manifest import Manifest, read_manifest
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.study import study_page as thumbnails
from normal_guidance.study.figures.attention import AttendedScan
from normal_guidance.study.study_page import Images


@pytest.fixture
def images(phantom) -> Images:
    return Images(read_manifest(phantom / "index"), open_store(phantom / "store"))


def test_pictures_are_the_scan_s_own_slices_as_the_encoder_saw_them(images, phantom):
    truth = {scan["scan_id"]: scan for scan in json.loads((phantom / "scans" / "phantom.json").read_text())["scans"]}
    for number in (0, 5, 11):
        row = images.manifest[number]
        volume, _ = read_volume(row, images.manifest.root)
        found = images.thumbnails(row.scan_id)
        places = [place for place, _ in found]
        assert len(places) == thumbnails.COUNT
        assert places == sorted(set(places))
        assert places[0] > 1  # the ends show little
        assert places[-1] < len(truth[row.scan_id]["files"])
        for place, image in found:
            assert np.array_equal(image, np.clip(volume[place - 1], -100, 300))
            assert image.max() > image.min()


def test_large_slices_are_thinned_and_figures_take_them(images, monkeypatch):
    monkeypatch.setattr(thumbnails, "SIDE", 10)
    row = images.manifest[0]
    found = images.thumbnails(row.scan_id)
    assert {image.shape for _, image in found} == {(11, 11)}  # every third of 32 pixels
    volume, _ = read_volume(row, images.manifest.root)
    assert np.array_equal(found[0][1], np.clip(volume[found[0][0] - 1, ::3, ::3], -100, 300))
    AttendedScan(row.scan_id, {"ng": torch.ones(len(row))}, thumbnails=found)


def test_a_scan_of_few_slices_shows_each_once(images):
    row = images.manifest[0]
    short = images.manifest.table.slice(0, 1).to_pylist()[0]
    for name in ("files", "frames", "positions", "slice_labels"):
        short[name] = short[name][:2]
    few = Manifest(pa.Table.from_pylist([short], images.manifest.table.schema), images.manifest.about)
    places = [place for place, _ in Images(few, images.scans).thumbnails(row.scan_id)]
    assert places == [1, 2]


@pytest.mark.parametrize(
    ("provenance", "window"),
    [
        ({"preprocessing": {"windows": [[-100, 300], None]}}, (-100.0, 300.0)),
        ({"preprocessing": {"windows": [{"percentiles": [1, 99]}]}}, Percentiles()),
        ({"preprocessing": {"windows": [None]}}, None),
        ({"preprocessing": {"windows": []}}, None),
        ({"preprocessing": {"windows": ["lung"]}}, None),
        ({"preprocessing": {"windows": 3}}, None),
        ({"preprocessing": "resized"}, None),
        ({"imported_from": "hdf5"}, None),
    ],
)
def test_a_store_may_say_anything_about_its_windows(images, provenance, window):
    assert Images(images.manifest, replace(images.scans, provenance=provenance)).window == window


def test_scans_in_memory_have_no_window(images):
    assert Images(images.manifest, images.scans.bags()).window is None


def test_files_that_are_gone_are_named(images, tmp_path):
    moved = Images(Manifest(images.manifest.table, {**images.manifest.about, "root": str(tmp_path)}), images.scans)
    scan = images.manifest.scan_ids[0]
    with pytest.raises(UserError, match=rf"scan '{scan}' cannot be shown \(.*is not there.*\); copy its files back"):
        moved.thumbnails(scan)
