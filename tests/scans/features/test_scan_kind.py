"""What a store says about the scans that it was made of, against numpy and by hand."""

import numpy as np
import pytest
from fake_scans import PREPROCESSING, load, make_manifest, read

from normal_guidance.scans.features.encoding import encode
from normal_guidance.scans.features.preprocessing import Statistics, describe_inputs
from normal_guidance.scans.features.windows import plane_of
from normal_guidance.scans.index.manifest import ScanRow, write_manifest

AXIAL, CORONAL, SAGITTAL = (1, 0, 0, 0, 1, 0), (1, 0, 0, 0, 0, -1), (0, 1, 0, 0, 0, -1)


@pytest.mark.parametrize(("axes", "plane"), [(AXIAL, "axial"), (CORONAL, "coronal"), (SAGITTAL, "sagittal")])
def test_planes(axes, plane):
    assert plane_of(tuple(map(float, axes))) == plane
    assert plane_of(tuple(-float(value) for value in axes)) == plane


def test_counts_and_ranges(tmp_path):
    random = np.random.default_rng(0)
    spacings = [None, *random.uniform(1, 9, 200).tolist()]
    rows = []
    for number, spacing in enumerate(spacings):
        slices = 5 + number % 7
        places = tuple(float(place) for place in range(slices))
        axes = tuple(map(float, CORONAL if number == 3 else AXIAL))
        where = ("f",) * slices, (0,) * slices, places
        rows.append(ScanRow(f"s{number}", "p", 0, None, "dicom", *where, 8, 8, None, spacing, axes))
    manifest = write_manifest(tmp_path / "manifest.parquet", rows, {"source": "rsna-ich", "root": "scans"})
    told = describe_inputs(manifest, left_out={"s1", "s3"})
    kept = [spacing for number, spacing in enumerate(spacings) if spacing and number not in (1, 3)]
    expected = np.percentile(kept, [1, 50, 99])
    assert list(told["slice_spacing"].values()) == pytest.approx(expected, abs=1e-3)
    assert told["planes"] == {"axial": 199}
    assert told["slices"] == {"fewest": 5, "median": 8, "most": 11}
    assert (told["source"], told["scans"], told["modalities"]) == ("rsna-ich", 199, {"CT": 199})


def test_a_store_knows_the_scans_that_are_in_it(tmp_path):
    manifest = make_manifest(tmp_path, [5, 3, 1], words={2: "unreadable"})
    how = {"preprocessing": PREPROCESSING, "read": read, "statistics": Statistics((20.0,), (80.0,))}
    told = encode(manifest, load, tmp_path / "store", **how).store.provenance["inputs"]
    assert told["slices"] == {"fewest": 3, "median": 4, "most": 5}  # the unreadable one has 1
    assert (told["scans"], told["slice_spacing"], told["planes"]) == (2, None, {})
