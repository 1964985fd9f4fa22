"""Presets have their documented limits; windows clip and leave the values inside unchanged."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.features.windows import (
    WINDOWS,
    Percentiles,
    apply_windows,
    default_window,
    parse_windows,
    plane_of,
    range_of,
    window_as_json,
    window_from_json,
)


def test_presets():
    assert WINDOWS["head"] == (-100, 300)  # the paper's
    assert WINDOWS["none"] is None
    assert WINDOWS["adc"] == (0, 3000)  # 10^-6 mm2/s
    assert WINDOWS["percentile"] == Percentiles(1, 99)
    ct = {name: window for name, window in WINDOWS.items() if isinstance(window, tuple) and name != "adc"}
    levels = {name: (sum(window) / 2, window[1] - window[0]) for name, window in ct.items()}
    assert levels == {"head": (100, 400), "lung": (-600, 1500), "mediastinum": (40, 400), "abdomen": (50, 400)}


def test_parse():
    assert parse_windows("none") == (None,)
    assert parse_windows("-1e2:3.5") == ((-100, 3.5),)
    assert parse_windows("head, lung ,0:80") == (WINDOWS["head"], WINDOWS["lung"], (0, 80))
    assert parse_windows("ADC,Percentile:5-95,NONE") == (WINDOWS["adc"], Percentiles(5, 95), None)
    assert parse_windows("percentile,percentile:0.5-99.5") == (Percentiles(), Percentiles(0.5, 99.5))


@pytest.mark.parametrize(
    "word",
    ["", "brain", "1", "1:2:3", "a:b", "head,", "300:-100", "5:5", "nan:1", "0:inf", "percentile:", "percentile:5"],
)
def test_parse_refuses(word):
    with pytest.raises(UserError, match="LOW:HIGH"):
        parse_windows(word)


@given(stn.arrays(np.float32, (2, 3, 4), elements=st.floats(-4000, 4000, width=32)))
def test_apply(hu):
    before = hu.copy()
    channels = apply_windows(hu, parse_windows("head,none,-1000:1000"))
    assert channels.shape == (3, 2, 3, 4)
    assert channels.dtype == np.float32
    assert np.array_equal(channels[0], np.minimum(np.maximum(hu, -100), 300))
    assert np.array_equal(channels[1], hu)
    inside = abs(hu) <= 1000
    assert np.array_equal(channels[2][inside], hu[inside])
    assert (abs(channels[2][~inside]) == 1000).all()
    assert np.array_equal(hu, before)


@pytest.mark.parametrize("word", ["percentile:99-1", "percentile:5-5", "percentile:0-101", "percentile:nan-99"])
def test_percentiles_that_are_no_range_are_refused(word):
    with pytest.raises(UserError, match="is not a range of percentiles; give LOW-HIGH within 0-100"):
        parse_windows(word)


def test_percentiles_are_those_of_the_voxels_above_the_minimum():
    """By hand: 101 values in steps of 1 have their 1st and 99th percentile at the second and the last but one."""
    scan = np.concatenate([np.full(5002, -7), np.arange(200, 301)]).reshape(3, -1, 1)
    assert range_of(Percentiles(), scan) == (201, 299)
    assert range_of(Percentiles(0, 100), scan) == (200, 300)
    clipped = apply_windows(scan, [Percentiles()])[0]
    assert (clipped.min(), clipped.max()) == (201, 299)


@pytest.mark.parametrize("scan", [np.zeros(8), np.array([0.0, 1.0, 1.0])])
def test_a_scan_without_a_range_is_unreadable(scan):
    with pytest.raises(UnreadableError, match="percentiles 1 and 99 of its voxels are the same"):
        range_of(Percentiles(), scan)


@pytest.mark.parametrize("window", [None, (0.0, 3000.0), Percentiles(), Percentiles(0.5, 100)], ids=str)
def test_windows_survive_json(window):
    assert window_from_json(json.loads(json.dumps(window_as_json(window)))) == window


def test_the_default_is_by_modality():
    assert default_window(["CT", "CT"]) == "none"
    assert default_window({"MR"}) == default_window({"CT", "MR"}) == "percentile"


AXIAL, CORONAL, SAGITTAL = (1, 0, 0, 0, 1, 0), (1, 0, 0, 0, 0, -1), (0, 1, 0, 0, 0, -1)


@pytest.mark.parametrize(("axes", "plane"), [(AXIAL, "axial"), (CORONAL, "coronal"), (SAGITTAL, "sagittal")])
def test_planes(axes, plane):
    assert plane_of(tuple(map(float, axes))) == plane
    assert plane_of(tuple(-float(value) for value in axes)) == plane
