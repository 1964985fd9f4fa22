"""A dry run: counts are those of the job, some scans are really encoded, times add up, and nothing is written."""

from pathlib import Path

import numpy as np
import pytest
import torch
from fake_scans import PREPROCESSING, WIDTH, load, make_manifest, read

from normal_guidance.base.errors import UserError
from normal_guidance.scans.features import encoding as encoding_estimate
from normal_guidance.scans.features.encoding import EncodingOptions, encode, estimate_encoding
from normal_guidance.scans.features.preprocessing import Statistics

LENGTHS = [5, 3, 8, 1, 6, 4, 9, 2, 7, 3]
OPTIONS = EncodingOptions(batch_size=4, unit=10, threads=1)


def arguments(**changes):
    how = {"preprocessing": PREPROCESSING, "read": read, "statistics": Statistics((20.0,), (80.0,)), "options": OPTIONS}
    return {**how, **changes}


def run(manifest, out, **changes):
    return estimate_encoding(manifest, changes.pop("load", load), out, **arguments(**changes))


@pytest.fixture
def scans(tmp_path):
    return make_manifest(tmp_path / "data", LENGTHS)


@pytest.fixture(autouse=True)
def _patience(monkeypatch):
    """The machine may be slow."""
    monkeypatch.setattr(encoding_estimate, "SECONDS", 3600.0)


class _Counted:
    """An encoder that remembers the sizes of its batches."""

    def __init__(self) -> None:
        self.sizes: list[int] = []

    def __call__(self, **options):
        encoder = load(**options)
        encoder.module.register_forward_hook(lambda module, inputs, features: self.sizes.append(len(features)))
        return encoder


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_counts_are_those_of_the_job(scans, tmp_path, workers):
    before = sorted(tmp_path.rglob("*"))
    found = run(scans, tmp_path / "store", workers=workers, dtype=torch.float16)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"
    counted = _Counted()
    store = encode(scans, counted, tmp_path / "store", **arguments(), dtype=torch.float16).store
    assert (found.scans, found.slices, found.batches) == (len(LENGTHS), sum(LENGTHS), len(counted.sizes))
    assert found.store_bytes == store.bags().features.half().nbytes == sum(LENGTHS) * WIDTH * 2
    assert found.job_bytes == sum(LENGTHS) * WIDTH * 4
    assert found.measured_scans == len(LENGTHS), "so few are all encoded"
    assert found.measured_slices == sum(LENGTHS)
    assert (found.failed, found.statistics_s, found.batch_size, found.device) == ({}, 0.0, 4, "cpu")
    assert found.device_bytes > 2**20
    assert found.free_bytes > 0
    assert found.total_s == pytest.approx(found.first_batch_s + sum(LENGTHS) / found.slices_per_s)


def test_some_scans_of_many_are_encoded(tmp_path):
    manifest = make_manifest(tmp_path / "data", [8] * 50)
    counted = _Counted()
    found = run(manifest, tmp_path / "store", load=counted)
    assert found.slices == 400
    assert found.measured_slices == sum(counted.sizes) == encoding_estimate.BATCHES * OPTIONS.batch_size
    assert found.measured_scans == 16
    places = [int(row.scan_id[1:]) for row in encoding_estimate._draw(manifest, 128)]
    assert max(np.diff(sorted(places))) < 15, "they are from everywhere"


def test_a_slow_machine_measures_less(tmp_path, monkeypatch):
    monkeypatch.setattr(encoding_estimate, "SECONDS", -1.0)
    found = run(make_manifest(tmp_path / "data", [8] * 50), tmp_path / "store")
    assert (found.measured_scans, found.measured_slices) == (2, 16)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({}, r"none of 2 scans could be encoded, for instance 's00\d' \(unreadable: .*check that they lie in .*--root"),
        (
            {"parts": {"s000": "train", "s001": "train"}, "statistics": None},
            r"none of 2 scans could be read, for instance 's00\d', so there is no mean",
        ),
        ({"statistics": None}, r"name the training scans \(--split FILE\)"),
        ({"parts": {"other": "train"}}, "scan 'other' is not in the manifest"),
        ({"root": Path("nowhere")}, r"the scans' folder nowhere does not exist; give the folder"),
    ],
)
def test_what_cannot_work_is_refused(tmp_path, changes, message):
    found = run(make_manifest(tmp_path / "some", [4, 5, 6], {1: "unreadable"}), tmp_path / "store")
    assert (found.failed, found.measured_scans) == ({"s001": "unreadable: s001: no image"}, 3)
    manifest = make_manifest(tmp_path / "data", [2, 3], {0: "unreadable", 1: "unreadable"})
    with pytest.raises(UserError, match=message):
        run(manifest, tmp_path / "store", **changes)
