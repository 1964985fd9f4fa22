"""`ng.fit` for each kind of scans, and what a notebook shows of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import normal_guidance as ng
from normal_guidance.core.bags import Bags
from normal_guidance.scans.features.store import write_store
from normal_guidance.study.drawn import shifted_mean


def draw(scans: int, seed: int, first: int = 0) -> Bags:
    names = tuple(f"S{first + number:04}" for number in range(scans))
    return replace(shifted_mean(scans, seed, features=6, shift=2.0), scan_ids=names, patient_ids=names)


def test_test_scans_come_from_one_place(tmp_path: Path) -> None:
    parts = {"train": draw(20, 1), "test": draw(30, 2, first=20)}
    store = write_store(tmp_path / "store", parts.items(), provenance={})
    with pytest.raises(ng.UserError, match=r"store .* has 30 test scans of its own; leave test= out"):
        ng.fit(store, out=tmp_path / "model", test=draw(30, 3, first=90))
