"""Scans in pieces: the same bits and problems as at once, and never more than a piece of it in memory."""

from dataclasses import replace

import numpy as np
import pytest

from normal_guidance.clinical.decode_in_chunks import PIECE, PiecewiseDecoding
from normal_guidance.clinical.new_scans import find_scans
from normal_guidance.data.problems import Problem, UnreadableError
from normal_guidance.data.volumes import read_volume
from normal_guidance.features.encoder_inputs import Decoding
from normal_guidance.features.preprocessing import Preprocessing, Statistics
from small_bundle import copy_series

PREPROCESSING = Preprocessing(windows=((-100.0, 300.0), None), size=24, statistics=Statistics((1.0, 2.0), (3.0, 4.0)))


@pytest.fixture
def found(trained, tmp_path):
    """A scan of 150 slices: two pieces and a part of one."""
    copy_series(trained.manifest[0], trained.manifest.root, tmp_path / "long", slices=150)
    return find_scans([tmp_path / "long"])


class _Reading:
    """Reads, notes a problem of each file, and remembers how many slices were wanted at a time."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, row, root, *, repair=True):
        self.sizes.append(len(row))
        volume, problems = read_volume(row, root, repair=repair)
        return volume, problems + [Problem(row.scan_id, file, "bits", "found", "mended") for file in row.files]


def test_pieces_give_the_same_bits_and_problems(found):
    (row,) = found.rows
    whole, pieces = _Reading(), _Reading()
    expected, problems = Decoding(whole, found.root, True, PREPROCESSING).pixels(row)
    pixels, same = PiecewiseDecoding(pieces, found.root, True, PREPROCESSING).pixels(row)
    assert np.array_equal(pixels, expected)
    assert same == problems
    assert (whole.sizes, pieces.sizes) == ([150], [PIECE, PIECE, 150 - 2 * PIECE])


@pytest.mark.parametrize(
    "change",
    [
        {"columns": 31},  # the margins take the minimum of the whole scan
        {"files": ("one.dcm",) * 150},  # one file is decoded once
    ],
)
def test_scans_that_cannot_be_cut_are_read_at_once(found, change):
    row = replace(found.rows[0], **change)
    sizes = []

    def read(row, root, *, repair=True):
        sizes.append(len(row))
        return np.ones((len(row), row.rows, row.columns), np.float32), []

    PiecewiseDecoding(read, found.root, True, PREPROCESSING).pixels(row)
    assert sizes == [150]


def test_a_slice_that_cannot_be_decoded_fails_the_scan(found):
    (row,) = found.rows
    (found.root / row.files[140]).write_bytes(b"gone")
    with pytest.raises(UnreadableError, match=row.files[140]):
        PiecewiseDecoding(read_volume, found.root, True, PREPROCESSING).pixels(row)
