"""Presets have their documented limits, windows clip; workers send HU of a scan's pieces, as those of whole scans."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from fake_scans import PREPROCESSING, contents
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as stn
from test_encoding import run as encode_scans

from normal_guidance.base.errors import UnreadableError, UserError
from normal_guidance.scans.features import windows as module
from normal_guidance.scans.features.encoding import EncodingOptions
from normal_guidance.scans.features.encoding_machine import _on_host
from normal_guidance.scans.features.windows import (
    MAX_SIDE,
    PIECE,
    WINDOWS,
    Decoding,
    Percentiles,
    apply_windows,
    cut,
    default_window,
    parse_windows,
    plane_of,
    range_of,
)
from normal_guidance.scans.index.manifest import Manifest, ScanRow, write_manifest
from normal_guidance.scans.index.problems import KINDS, Problem, read_problems


def test_presets_and_parse():
    """The paper's window of the head; the levels of the others are those of radiologists; ADC is in 10^-6 mm2/s."""
    ct = {name: parse_windows(name)[0] for name in WINDOWS.keys() - {"none", "adc", "percentile"}}
    levels = {name: (sum(window) / 2, window[1] - window[0]) for name, window in ct.items()}
    assert levels == {"head": (100, 400), "lung": (-600, 1500), "mediastinum": (40, 400), "abdomen": (50, 400)}
    assert parse_windows("head, lung ,-1e2:3.5") == (WINDOWS["head"], WINDOWS["lung"], (-100, 3.5))
    assert parse_windows("ADC,Percentile:5-95,NONE") == ((0, 3000), Percentiles(5, 95), None)
    assert parse_windows("percentile,percentile:0.5-99.5") == (Percentiles(1, 99), Percentiles(0.5, 99.5))


NO_WINDOWS = ("", "brain", "1", "1:2:3", "a:b", "head,", "300:-100", "5:5", "nan:1", "0:inf", "percentile:")
NO_RANGES = ("percentile:99-1", "percentile:5-5", "percentile:0-101", "percentile:nan-99")


@pytest.mark.parametrize("word", [*NO_WINDOWS, "percentile:5", *NO_RANGES])
def test_parse_refuses(word):
    message = "is not a range of percentiles; give LOW-HIGH within 0-100" if word in NO_RANGES else "LOW:HIGH"
    with pytest.raises(UserError, match=message):
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


def test_percentiles_are_those_of_the_voxels_above_the_minimum():
    """By hand: 101 values in steps of 1 have their 1st and 99th percentile at the second and the last but one."""
    scan = np.concatenate([np.full(5002, -7), np.arange(200, 301)]).reshape(3, -1, 1)
    assert range_of(Percentiles(), scan) == (201, 299)
    assert range_of(Percentiles(0, 100), scan) == (200, 300)
    clipped = apply_windows(scan, [Percentiles()])[0]
    assert (clipped.min(), clipped.max()) == (201, 299)
    for constant in (np.zeros(8), np.array([0.0, 1.0, 1.0])):
        with pytest.raises(UnreadableError, match="percentiles 1 and 99 of its voxels are the same"):
            range_of(Percentiles(), constant)


OTHERS = "for other tissue give lung, mediastinum, abdomen or LOW:HIGH"
PERCENTILES = "from the 1st to the 99th of each scan"


def test_the_default_window_is_by_modality_and_planes_by_orientation():
    assert default_window(["CT", "CT"]) == ("head", f"CT scans: --window head (-100:300 HU, soft tissue; {OTHERS})")
    assert default_window({"MR"}) == ("percentile", f"MR scans: --window percentile ({PERCENTILES})")
    both = f"CT and MR scans: --window percentile ({PERCENTILES})"
    assert default_window(["MR", "CT", "MR"]) == ("percentile", both)
    axes = {"axial": (1, 0, 0, 0, 1, 0), "coronal": (1, 0, 0, 0, 0, -1), "sagittal": (0, 1, 0, 0, 0, -1)}
    for plane, values in axes.items():
        for sign in (1.0, -1.0):
            assert plane_of(tuple(sign * value for value in values)) == plane


# What worker processes read and send

LONG = 2 * PIECE + 22


def make_row(slices: int, name: str = "s", **changes) -> ScanRow:
    files = tuple(f"{name}/{number}.dcm" for number in range(slices))
    places = tuple(map(float, range(slices)))
    row = ScanRow(name, f"p-{name}", 0, None, "dicom", files, (0,) * slices, places, rows=12, columns=12)
    return replace(row, **changes)


class _Reading:
    """Draws each slice by its file's name, notes a problem of each, and remembers how many were wanted at a time."""

    def __init__(self, dtype: type = np.int16, gone: tuple[str, ...] = ()) -> None:
        self.sizes: list[int] = []
        self.dtype, self.gone = dtype, gone

    def __call__(self, row, root, *, repair=True):
        self.sizes.append(len(row))
        for file in row.files:
            if file in self.gone:
                raise UnreadableError("unreadable", f"{file}: gone")
        draws = (np.random.default_rng(list(file.encode())) for file in row.files)
        hu = np.stack([draw.integers(-1000, 2000, (row.rows, row.columns)) for draw in draws])
        problems = [Problem(row.scan_id, file, "bits", "found", "mended") for file in row.files]
        return hu.astype(self.dtype), problems


def test_scans_are_cut_into_pieces_of_consecutive_slices():
    row = make_row(LONG)
    pieces = cut(row)
    assert [len(piece) for piece in pieces] == [PIECE, PIECE, LONG - 2 * PIECE]
    for field in ("files", "frames", "positions"):
        assert sum((getattr(piece, field) for piece in pieces), ()) == getattr(row, field)
    assert [len(piece) for piece in cut(make_row(PIECE))] == [PIECE]
    for change in (
        {"columns": 11},  # the margins take the minimum of the whole scan
        {"files": ("one.dcm",) * LONG},  # one file is decoded once
    ):
        assert len(cut(make_row(LONG, **change))) == 1


def test_scans_are_read_whole_for_their_percentiles_and_where_their_field_is_not_square():
    """The whole scan's percentiles are sent, of the field where there is one; a window in units needs none."""
    row = make_row(LONG, pixel_spacing=(1.0, 1.0))
    assert cut(row, whole=True) == [row]
    read = _Reading()
    volume = read(row, Path())[0]
    decoding = Decoding(read, Path(), True, windows=(Percentiles(), (0.0, 80.0), None))
    assert decoding.pixels(row)[0].ranges == (Percentiles().range_of(volume), (0.0, 80.0), None)
    (low, high), *_ = replace(decoding, field=6.0).pixels(row)[0].ranges
    assert (low, high) == Percentiles().range_of(volume[:, 3:9, 3:9])
    assert Decoding(read, Path(), True).pixels(row)[0].ranges == ()

    for changes, count in (
        ({"pixel_spacing": (1.0, 1.0)}, 3),
        ({"pixel_spacing": (1.0, 1.0), "columns": 20}, 3),  # the field is square, though the slices are not
        ({"pixel_spacing": (1.0, 2.0)}, 1),  # a field of 6 x 3 pixels has margins
        ({"pixel_spacing": None}, 1),  # the scan fails once
    ):
        assert len(cut(make_row(LONG, **changes), 6.0)) == count


@pytest.fixture
def long_scans(tmp_path) -> Manifest:
    """Batches hold pieces of several scans."""
    root = tmp_path / "scans"
    root.mkdir()
    lengths, spacings = (5, LONG, PIECE + 1, 3), ((1.0, 1.0), (1.0, 1.0), (1.0, 2.0), (1.0, 2.0))
    sizes = enumerate(zip(lengths, spacings, strict=True))
    rows = [make_row(length, f"s{number}", pixel_spacing=spacing) for number, (length, spacing) in sizes]
    return write_manifest(tmp_path / "manifest.parquet", rows, {"source": "fake", "root": str(root)})


def run(manifest: Manifest, out: Path, read, parts: dict[str, str] | None = None, field: float | None = None):
    way, options = replace(PREPROCESSING, field=field), EncodingOptions(batch_size=16, unit=100, threads=1)
    job = {"preprocessing": way, "read": read, "options": options}
    return encode_scans(manifest, out, **job, **({"parts": parts, "statistics": None} if parts else {}))


@pytest.mark.parametrize(("measured", "field"), [(False, None), (True, None), (False, 6.0)])
def test_pieces_give_the_same_bytes_as_whole_scans(long_scans, tmp_path, monkeypatch, measured, field):
    parts = dict.fromkeys(long_scans.scan_ids, "train") if measured else None
    pieces, whole = _Reading(), _Reading()
    run(long_scans, tmp_path / "pieces", pieces, parts, field)
    monkeypatch.setattr(module, "PIECE", 10 * LONG)
    run(long_scans, tmp_path / "whole", whole, parts, field)
    assert contents(tmp_path / "pieces") == contents(tmp_path / "whole")
    assert len(read_problems(tmp_path / "pieces" / "problems.csv")) == sum(map(len, long_scans))
    turns, last = 2 if measured else 1, [PIECE, 1] if field is None else [PIECE + 1]  # whose field is not square
    assert whole.sizes == [5, LONG, PIECE + 1, 3] * turns
    assert pieces.sizes == [5, PIECE, PIECE, LONG - 2 * PIECE, *last, 3] * turns


def test_slices_that_cannot_be_read_cost_their_scan_only_and_the_first_is_named(long_scans, tmp_path):
    whole = run(long_scans, tmp_path / "whole", _Reading()).store
    gone = (f"s1/{PIECE + 3}.dcm", f"s1/{LONG - 1}.dcm")
    outcome = run(long_scans, tmp_path / "store", _Reading(gone=gone))
    assert outcome.store.scan_ids == ("s0", "s2", "s3")
    (line,) = [line for line in read_problems(tmp_path / "store" / "problems.csv") if line.scan_id == "s1"]
    assert (line.kind, line.detail) == ("unreadable", f"{gone[0]}: gone")
    assert torch.equal(outcome.store.bags().features, whole.select(["s0", "s2", "s3"]).bags().features)
    parts = dict.fromkeys(long_scans.scan_ids, "train")
    run(long_scans, tmp_path / "measured", _Reading(gone=gone), parts)
    report = json.loads((tmp_path / "measured" / "report.json").read_text())
    run(long_scans.take([0, 2, 3]), tmp_path / "others", _Reading(), dict.fromkeys(("s0", "s2", "s3"), "train"))
    assert report["preprocessing"] == json.loads((tmp_path / "others" / "report.json").read_text())["preprocessing"]


# What is sent


def pixels(hu: np.ndarray):
    return Decoding(lambda row, root, repair: (hu, []), Path(), True).pixels(make_row(len(hu)))[0]


@pytest.mark.parametrize("dtype", [np.int16, np.float32, np.float64, np.int32])
def test_whole_numbers_are_sent_in_16_bits_and_others_in_32(dtype):
    hu, sent = np.array([[[7, -1024], [3, 500]]], dtype), "int16" if dtype == np.int16 else "float32"
    found = pixels(hu)
    assert (found.hu.dtype, found.lowest) == (sent, -1024)
    assert np.array_equal(found.hu, hu)
    assert _on_host((found, []), pinned=False)[0].dtype == getattr(torch, sent)


@pytest.mark.parametrize(
    ("hu", "message"),
    [
        *((np.array([[[0.0, bad]]], np.float32), "not finite") for bad in (np.nan, np.inf, -np.inf)),
        *(
            (np.zeros(shape, np.float32), "{} slices of {} x {} pixels".format(*shape))
            for shape in [(0, 4, 4), (2, 0, 4), (2, 4, 0), (1, 1, MAX_SIDE + 1)]
        ),
    ],
)
def test_pixels_and_sizes_that_no_scan_has_are_refused(hu, message):
    with pytest.raises(UnreadableError, match=message) as caught:
        pixels(hu)
    assert caught.value.kind in KINDS


def test_a_worker_does_not_import_torch():
    code = (
        "import sys, normal_guidance.base.workers, normal_guidance.scans.features.windows\n"
        "import normal_guidance.scans.index.volumes, normal_guidance.scans.index.dicom_slices\n"
        "print([name for name in ('torch', 'pandas', 'transformers') if name in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
