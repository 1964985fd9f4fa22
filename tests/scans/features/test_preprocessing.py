"""The steps from HU to an encoder's input, each against a computation of its own."""

import hashlib
import json
from contextlib import nullcontext
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.features import preprocessing
from normal_guidance.scans.features.preprocessing import (
    Preprocessing,
    Statistics,
    combine_statistics,
    describe_inputs,
    scan_statistics,
)
from normal_guidance.scans.features.windows import Percentiles, middle
from normal_guidance.scans.index.manifest import ScanRow, write_manifest

HEAD = ((-100.0, 300.0),)


def apply(way: Preprocessing, scan: np.ndarray, lowest: float | None = None) -> np.ndarray:
    return way.apply(torch.from_numpy(scan), lowest).numpy()


def make_scan(slices: int = 3, rows: int = 50, columns: int = 50, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).normal(0, 400, (slices, rows, columns)).astype(np.float32)


def triangle_weights(before: int, after: int) -> np.ndarray:
    """(after, before): antialiased bilinear resizing along one axis, from its definition, in float64."""
    scale = before / after
    support = max(scale, 1.0)
    centres = (np.arange(after) + 0.5) * scale
    distance = np.abs(np.arange(before) + 0.5 - centres[:, None]) / support
    weights = np.clip(1 - distance, 0, None)
    return weights / weights.sum(axis=1, keepdims=True)


@pytest.mark.parametrize(("side", "size"), [(50, 20), (64, 32), (37, 24), (12, 30)])
def test_resizing_is_the_triangle_filter(side, size):
    scan = make_scan(rows=side, columns=side)
    weights = triangle_weights(side, size)
    expected = weights @ scan.astype(np.float64) @ weights.T
    np.testing.assert_allclose(apply(Preprocessing(size=size), scan)[:, 0], expected, atol=2e-3)


@pytest.mark.parametrize(("rows", "columns", "top", "left"), [(3, 6, 1, 0), (6, 3, 0, 1), (6, 6, 0, 0), (5, 6, 0, 0)])
def test_a_scan_is_centred_on_a_square_of_its_minimum(rows, columns, top, left):
    scan = make_scan(2, rows, columns)
    scan[1, 0, 0] = -1500  # the margins of both slices are filled with it
    expected = np.full((2, 1, 6, 6), -1500, np.float32)
    expected[:, 0, top : top + rows, left : left + columns] = scan
    np.testing.assert_array_equal(apply(Preprocessing(size=6), scan), expected)


def test_windows_are_channels_and_come_before_resizing():
    scan = make_scan()
    windows = ((-100.0, 300.0), (-1350.0, 150.0))
    images = apply(Preprocessing(windows=windows, size=20), scan)
    assert images.shape == (3, 2, 20, 20)
    for channel, (low, high) in enumerate(windows):
        alone = apply(Preprocessing(size=20), np.clip(scan, low, high))
        np.testing.assert_array_equal(images[:, channel], alone[:, 0])


def test_normalising_subtracts_and_divides_each_channel():
    scan = make_scan()
    plain = Preprocessing(windows=(*HEAD, None), size=20)
    normalised = plain.with_statistics(Statistics((10.0, 20.0), (2.0, 5.0)))
    expected = (apply(plain, scan) - np.array([10, 20])[:, None, None]) / np.array([2, 5])[:, None, None]
    np.testing.assert_allclose(apply(normalised, scan), expected, rtol=1e-5, atol=1e-4)


def test_the_unit_range_is_0_to_1():
    with pytest.raises(UserError, match="'none'; give a window"):
        Preprocessing(windows=(*HEAD, None)).to_unit_range()
    images = apply(Preprocessing(windows=((-100, 300),), size=50).to_unit_range(), make_scan())
    assert images.min() == 0
    assert images.max() == 1
    np.testing.assert_allclose(images[:, 0], (np.clip(make_scan(), -100, 300) + 100) / 400, atol=1e-6)


FITTING = ((0.0, 1.0), (0.4, 0.3), (0.5, 0.5), (1.0, 0.01))
ODD = ((1100.0, 820.0), (0.5, 1.5), (0.5, 0.009), (-0.1, 0.5), (1.1, 0.5))


@pytest.mark.parametrize(("window", "low", "high"), [((-100, 300), -100, 300), (Percentiles(), 0, 1), (None, -24, 976)])
def test_a_mean_and_sd_that_do_not_fit_the_window_are_refused(window, low, high):
    """In its values or, of a window that keeps all, in those that were seen."""
    for numbers, refused in ((FITTING, False), (ODD, True)):
        for mean, sd in numbers:
            statistics = Statistics((low + mean * (high - low),), (sd * (high - low),))
            way = Preprocessing(windows=(window,), statistics=statistics)
            with pytest.raises(UserError, match=r"does not fit the window .* from") if refused else nullcontext():
                way.refuse_misfit(seen=(-24, 976))
            if window is None:
                way.refuse_misfit()
    Preprocessing(windows=(window,)).refuse_misfit()


def test_a_slice_has_the_same_bits_alone_and_in_any_chunk_and_margins_of_the_scans_minimum(monkeypatch):
    scan = make_scan(7, 48, 48)
    way = Preprocessing(windows=(*HEAD, None), size=32, statistics=Statistics((1.0, 2.0), (3.0, 4.0)))
    whole = apply(way, scan)
    monkeypatch.setattr(preprocessing, "CHUNK_BYTES", 3 * 2 * 4 * 48 * 48)
    np.testing.assert_array_equal(apply(way, scan), whole)
    np.testing.assert_array_equal(np.concatenate([apply(way, item[None]) for item in scan]), whole)
    images = apply(Preprocessing(windows=(*HEAD, None), size=4), np.zeros((1, 2, 4), np.int16), lowest=-1500.0)
    assert (images[0, 0, 0] == -100).all()
    assert (images[0, 1, 0] == -1500).all()
    assert (images[0, :, 1:3] == 0).all()


@pytest.mark.parametrize(
    ("rows", "columns", "spacing", "field", "down", "across"),
    [
        (128, 84, (2.0, 2.0), 70.0, (46, 81), (24, 59)),  # 35 of each: 93 and 49 lines are left over
        (10, 10, (1.0, 0.5), 4.0, (3, 7), (1, 9)),  # each axis has its own spacing
        (10, 9, (1.0, 1.0), 5.0, (2, 7), (2, 7)),  # the odd line is below
        (10, 10, (3.0, 3.0), 10.0, (3, 6), (3, 6)),  # 3.33 lines
        (10, 10, (3.0, 3.0), 11.0, (3, 7), (3, 7)),  # 3.67 lines
        (10, 6, (1.0, 1.0), 8.0, (1, 9), (0, 6)),  # an image that is smaller on one side
        (10, 10, (1.0, 1.0), 1e9, (0, 10), (0, 10)),
        (10, 11, (1.0, 1.0), 0.01, (4, 5), (5, 6)),
    ],
)
def test_a_field_is_the_middle_of_the_image(rows, columns, spacing, field, down, across):
    assert middle(rows, columns, spacing, field) == (slice(*down), slice(*across))


@given(st.integers(1, 600), st.floats(0.01, 10), st.floats(0.1, 1000))
def test_a_manifests_32_bits_give_the_field_of_the_headers_64(lines, spacing, field):
    stored = float(np.float32(spacing))
    assert middle(lines, lines, (spacing,) * 2, field) == middle(lines, lines, (stored,) * 2, field)
    kept = middle(lines, lines, (spacing,) * 2, field)[0]
    assert 0 <= kept.start < kept.stop <= lines
    assert lines - kept.stop - kept.start in (0, 1), "it is centred"


def test_a_field_needs_the_spacing():
    with pytest.raises(UserError, match="a field of 70 mm needs the pixel spacing; give it in mm"):
        apply(Preprocessing(field=70), make_scan())
    wrong = {None: "unknown", (0.0, 1.0): "0 x 1 mm", (1.0, np.nan): "1 x nan mm", (1e300, 1.0): r"1e\+300 x 1 mm"}
    for spacing, shown in wrong.items():
        with pytest.raises(UnreadableError, match=f"no_spacing: a field of 70 mm needs .* spacing, which is {shown}"):
            middle(10, 10, spacing, 70.0)


def test_statistics_are_means_and_sds_of_channels():
    scan = make_scan(4, 30, 50)
    way = Preprocessing(windows=(*HEAD, None), size=20)
    images = apply(way, scan).astype(np.float64)
    mean, sd = scan_statistics(torch.from_numpy(apply(way, scan)))
    np.testing.assert_allclose(mean, images.mean(axis=(0, 2, 3)), rtol=1e-9)
    np.testing.assert_allclose(sd, np.sqrt(((images - np.reshape(mean, (2, 1, 1))) ** 2).mean(axis=(0, 2, 3))))
    # Combined, they are means over scans, not pixels.
    scans = [Statistics((0.0, 1.0), (1.0, 2.0)), Statistics((3.0, 1.0), (2.0, 2.0)), Statistics((6.0, 7.0), (6.0, 5.0))]
    assert combine_statistics(iter(scans)) == Statistics((3.0, 3.0), (3.0, 3.0))
    with pytest.raises(UserError, match="no training scans"):
        combine_statistics([])


WAYS = [
    Preprocessing(),
    Preprocessing(windows=HEAD),
    Preprocessing(windows=((-100.0, 301.0),)),
    Preprocessing(windows=(*HEAD, None)),
    Preprocessing(windows=HEAD, size=518),
    Preprocessing(windows=HEAD, statistics=Statistics((0.0,), (1.0,))),
    Preprocessing(windows=HEAD, statistics=Statistics((0.0,), (1.5,))),
    Preprocessing(windows=HEAD).to_unit_range(),
    Preprocessing(windows=HEAD, field=70),
    Preprocessing(windows=HEAD, field=70.5).to_unit_range(),
    Preprocessing(windows=(Percentiles(),)),
    Preprocessing(windows=(Percentiles(0.5, 99.5),)),
    Preprocessing(windows=(Percentiles(), *HEAD), field=70),
]


def test_a_description_survives_json_and_has_a_fingerprint_of_its_own():
    """The sha256 of canonical JSON, of whole numbers too; a field is described only where there is one."""
    for way in WAYS:
        assert Preprocessing.from_dict(json.loads(json.dumps(way.to_dict()))) == way
    assert len({way.fingerprint for way in WAYS}) == len(WAYS)
    for way, text in (
        (
            Preprocessing(windows=((-100, 300),)).to_unit_range(),
            '{"mean":[-100.0],"sd":[400.0],"size":224,"version":1,"windows":[[-100.0,300.0]]}',
        ),
        (Preprocessing(field=70), '{"field":70.0,"mean":null,"sd":null,"size":224,"version":2,"windows":[null]}'),
    ):
        assert way.fingerprint == hashlib.sha256(text.encode()).hexdigest()


def test_percentiles_scale_each_scan_to_0_to_1():
    """A scan and ten times the scan give the same images, margins too; a window in units beside them does not."""
    scan = torch.from_numpy(np.random.default_rng(0).integers(100, 1000, (4, 20, 16)).astype(np.float32))
    scan[:, :3] = 50.0  # the background
    way = Preprocessing(windows=(Percentiles(), (0.0, 3000.0)), size=20)
    images, larger = way.apply(scan), way.apply(10 * scan)
    torch.testing.assert_close(images[:, 0], larger[:, 0])
    assert not torch.allclose(images[:, 1], larger[:, 1])
    low, high = np.percentile(scan[:, 3:].numpy(), (1, 99))
    expected = (np.clip(scan.numpy(), low, high) - low) / (high - low)
    np.testing.assert_allclose(images[:, 0, :, 2:18].numpy(), expected, atol=1e-6)
    assert (images[:, 0, :, :2] == 0).all()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"windows": ()}, "at least one window"),
        ({"size": 0}, "size 0"),
        ({"windows": ((300.0, -100.0),)}, "300.0:-100.0 is empty"),
        ({"windows": ((-np.inf, 3.0),)}, "infinite"),
        ({"statistics": Statistics((0.0, 0.0), (1.0, 1.0))}, "2 means and 2 sds for 1 channels"),
        ({"statistics": Statistics((0.0,), (0.0,))}, "mean 0 and sd 0 cannot normalise"),
        ({"field": 0}, "field 0 is not a size; give millimetres above 0"),
    ],
)
def test_impossible_ways_are_refused(change, message):
    with pytest.raises(UserError, match=message):
        replace(Preprocessing(windows=HEAD), **change)


@pytest.mark.parametrize(
    ("way", "version", "other"),
    [
        (Preprocessing(), 1, 2),
        (Preprocessing(field=70), 2, 1),  # software that knows no fields, or no percentiles, must refuse them
        (Preprocessing(windows=(Percentiles(),)), 3, 1),
        (Preprocessing(windows=(Percentiles(),), field=70), 3, 1),
    ],
)
def test_another_versions_description_is_refused(way, version, other):
    assert way.to_dict()["version"] == version
    with pytest.raises(UserError, match=f"version {other}, this software's is {version}; encode the scans again"):
        Preprocessing.from_dict(way.to_dict() | {"version": other})


def test_a_summary_of_scans_has_counts_and_ranges(tmp_path):
    axial, coronal = (1.0, 0.0, 0.0, 0.0, 1.0, 0.0), (1.0, 0.0, 0.0, 0.0, 0.0, -1.0)
    spacings = [None, *np.random.default_rng(0).uniform(1, 9, 200).tolist()]
    rows = []
    for number, spacing in enumerate(spacings):
        slices = 5 + number % 7
        where = ("f",) * slices, (0,) * slices, tuple(map(float, range(slices)))
        axes = coronal if number == 3 else axial
        rows.append(ScanRow(f"s{number}", "p", 0, None, "dicom", *where, 8, 8, None, spacing, axes))
    manifest = write_manifest(tmp_path / "manifest.parquet", rows, {"source": "rsna-ich", "root": "scans"})
    summary = describe_inputs(manifest, left_out={"s1", "s3"})
    kept = [spacing for number, spacing in enumerate(spacings) if spacing and number not in (1, 3)]
    assert list(summary["slice_spacing"].values()) == pytest.approx(np.percentile(kept, [1, 50, 99]), abs=1e-3)
    assert summary["planes"] == {"axial": 199}
    assert summary["slices"] == {"fewest": 5, "median": 8, "most": 11}
    assert (summary["source"], summary["scans"], summary["modalities"]) == ("rsna-ich", 199, {"CT": 199})
