"""Phantom -> index -> split -> encode -> store, as a user runs it, in every layout; counts, labels and HU exact.

`phantom.json` says what is true: it was written by the generator, which knows nothing of the reader.
"""

import hashlib
from pathlib import Path

import numpy as np
import pytest

from normal_guidance.scans.features.store import open_store
from normal_guidance.scans.index.manifest import read_manifest
from normal_guidance.scans.index.problems import KINDS, Problem, read_problems
from normal_guidance.scans.index.volumes import read_volume
from normal_guidance.scans.phantom.drafts import ODDITIES
from normal_guidance.scans.phantom.phantom_files import write_phantom
from small_command import output_of

LAYOUTS = ("rsna-ich", "rsna-pe", "rsna-at", "folder")
SIZE = {"size": 32, "slices": 12, "positive": 0.5}

SAME = "tilt mixed_series localizer secondary_capture one_slice unreadable bits multi_frame no_position indeterminate"
SEEN_AS = {name: {name} for name in (*SAME.split(), "incomplete_organ")} | {
    "gaps": {"gap"},
    "duplicates": {"duplicate"},
    "truncated": {"unreadable"},
    "wrong_intercept": {"intercept"},
    "double_rows": {"double_label"},
    "rows_without_image": {"label_without_image"},
    "reversed": set(),
    "shuffled": set(),
}
"""The lines of problems.csv that tell of an oddity.  Shuffled names and reversed numbers are no problem."""


every_layout = pytest.mark.parametrize("layout", LAYOUTS)


def index(layout: str, folder: Path) -> Path:
    table = ("--table", folder / "scans" / "labels.csv") if layout == "folder" else ()
    output_of("index", layout, folder / "scans", "-o", folder / "index", "--workers", 0, *table)
    return folder / "index"


def hu_checksum(hu: np.ndarray) -> str:
    return hashlib.sha256(np.ascontiguousarray(hu.round().astype("<i2")).tobytes()).hexdigest()


@pytest.mark.slow(but="rsna-ich")
@every_layout
def test_from_files_to_features(layout: str, tmp_path: Path) -> None:
    truth = write_phantom(layout, tmp_path / "scans", scans=14, seed=3, **SIZE)["scans"]
    found = index(layout, tmp_path)
    assert read_problems(found / "problems.csv") == []
    of_scan = {scan["scan_id"]: scan for scan in truth}
    manifest = read_manifest(found)
    assert set(manifest.scan_ids) == set(of_scan)
    for row in manifest:
        scan = of_scan[row.scan_id]
        assert list(row.files) == scan["files"]
        assert row.label == scan["label"]
        assert row.slice_labels is not None
        assert row.slice_labels.tolist() == scan["slice_labels"]
        assert np.all(np.diff(row.positions) > 0)
    output_of("split", found, "-o", tmp_path / "splits", "--seeds", 1001)
    split = tmp_path / "splits" / "split-1001.csv"
    encode = ("encode", found, "--encoder", "efficientnet-lite0", "--offline", "--window", "head", "--workers", 0)
    output_of(*encode, "--split", split, "-o", tmp_path / "store", "--dtype", "float16")
    output_of("audit", found, split, "--store", tmp_path / "store")
    output_of("store", "verify", tmp_path / "store")
    store = open_store(tmp_path / "store")
    assert (len(store), store.width) == (14, 1280)
    assert store.labels.sum() == sum(scan["label"] for scan in truth)
    for number, scan_id in enumerate(store.scan_ids):
        assert int(store.lengths[number]) == len(of_scan[scan_id]["files"])
    assert {len(store.part(part)) > 0 for part in ("train", "val", "test")} == {True}


@pytest.mark.slow(but="rsna-ich")
@every_layout
def test_every_oddity_has_its_line_and_the_true_pixels(layout: str, tmp_path: Path) -> None:
    names = [name for name, one in ODDITIES.items() if layout in one.layouts]
    truth = write_phantom(layout, tmp_path / "scans", scans=22, seed=5, oddities=names, **SIZE)["scans"]
    manifest = read_manifest(index(layout, tmp_path))
    lines = read_problems(tmp_path / "index" / "problems.csv")
    assert {line.kind for line in lines} <= set(KINDS)
    of_scan = {row.scan_id: row for row in manifest}
    seen = set()
    for scan in truth:
        row = of_scan[scan["scan_id"]]
        assert (list(row.files), list(row.frames)) == (scan["files"], scan["frames"])
        hu, odd_pixels = read_volume(row, manifest.root)
        assert hu_checksum(hu) == scan["hu_sha256"], scan
        kinds = {line.kind for line in lines if _is_about(line, scan)}
        kinds |= {problem.kind for problem in odd_pixels}
        if scan["oddity"]:
            seen.add(scan["oddity"])
            assert kinds >= SEEN_AS[scan["oddity"]], (scan["oddity"], kinds)
        else:
            assert not kinds, (scan["scan_id"], kinds)
    assert seen == set(names)


def _is_about(line: Problem, scan: dict) -> bool:
    """By its scan or file; a label whose image is not there tells neither in rsna-ich."""
    if line.kind == "label_without_image" and not line.scan_id:
        return scan["oddity"] == "rows_without_image"
    return line.scan_id == scan["scan_id"] or line.file in {*scan["files"], *scan["odd_files"]}


@pytest.mark.parametrize("compression", ["rle", "jpeg2000", "jpeg-lossless", "jpeg-ls"])
def test_compressed_scans_have_the_same_pixels(compression: str, tmp_path: Path) -> None:
    truth = write_phantom("rsna-pe", tmp_path / "scans", scans=2, seed=1, compression=compression, **SIZE)["scans"]
    manifest = read_manifest(index("rsna-pe", tmp_path))
    of_scan = {scan["scan_id"]: scan for scan in truth}
    for row in manifest:
        assert hu_checksum(read_volume(row, manifest.root)[0]) == of_scan[row.scan_id]["hu_sha256"]
        assert row.transfer_syntax == of_scan[row.scan_id]["transfer_syntax"]
