"""The pixels and the order of odd scans are those of phantom.json; tests/test_chain.py finds each oddity."""

import hashlib
from collections import Counter

import numpy as np
import pydicom
import pytest

from normal_guidance.scans.phantom.drafts import ODDITIES, assign_oddities
from normal_guidance.scans.phantom.phantom_files import LAYOUTS, write_phantom


@pytest.mark.parametrize("layout", LAYOUTS)
def test_slices_are_in_the_order_of_space_and_have_the_hu_of_the_truth(tmp_path, layout):
    """The HU of all scans, also those with wrong headers: the challenges' known repairs are done by hand here."""
    names = [name for name, one in ODDITIES.items() if layout in one.layouts]
    options = {"scans": 20, "seed": 1, "size": 32, "slices": 12, "positive": 0.4}
    scans = write_phantom(layout, tmp_path / "out", oddities=names, **options)["scans"]
    assert Counter(scan["oddity"] for scan in scans if scan["oddity"]) == dict.fromkeys(names, 1)
    for scan in scans:
        if scan["oddity"] == "multi_frame":
            continue
        digest, files = hashlib.sha256(), [pydicom.dcmread(tmp_path / "out" / file) for file in scan["files"]]
        for file in files:
            stored = np.frombuffer(file.PixelData, "<u2" if file.PixelRepresentation == 0 else "<i2").astype(int)
            hu = stored + int(file.RescaleIntercept)
            if scan["oddity"] in ("wrong_intercept", "bits"):
                hu = (stored + 2048) % 4096 - 2048  # two's complement in 12 bits
            digest.update(hu.astype("<i2").tobytes())
        assert digest.hexdigest() == scan["hu_sha256"], scan["oddity"]
        heights = [float(file.ImagePositionPatient[2]) for file in files if scan["oddity"] != "no_position"]
        assert heights == sorted(heights)
        numbers, up = [file.InstanceNumber for file in files], list(range(1, len(files) + 1))
        if scan["oddity"] in ("no_position", "reversed"):
            assert numbers == (up if scan["oddity"] == "no_position" else up[::-1])
        if scan["oddity"] == "shuffled":
            assert sorted(numbers) == up != numbers


def test_an_oddity_changes_a_small_share_of_many_scans():
    assigned = assign_oddities(["tilt", "gaps"], [0] * 100, np.random.default_rng(0), "rsna-ich")
    assert Counter(assigned.values()) == {"tilt": 5, "gaps": 5}
