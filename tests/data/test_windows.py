"""Presets have their documented limits; windows clip and leave the values inside unchanged."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn

from normal_guidance.data.windows import WINDOWS, apply_windows, parse_windows
from normal_guidance.errors import UserError


def test_presets():
    assert WINDOWS["head"] == (-100, 300)  # the paper's
    assert WINDOWS["none"] is None
    levels = {name: (sum(window) / 2, window[1] - window[0]) for name, window in WINDOWS.items() if window}
    assert levels == {"head": (100, 400), "lung": (-600, 1500), "mediastinum": (40, 400), "abdomen": (50, 400)}


def test_parse():
    assert parse_windows("none") == (None,)
    assert parse_windows("-1e2:3.5") == ((-100, 3.5),)
    assert parse_windows("head, lung ,0:80") == (WINDOWS["head"], WINDOWS["lung"], (0, 80))


@pytest.mark.parametrize("word", ["", "brain", "1", "1:2:3", "a:b", "head,", "300:-100", "5:5", "nan:1", "0:inf"])
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
