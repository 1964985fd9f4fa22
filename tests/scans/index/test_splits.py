"""Splits share no patient, keep the share of positives, and are audited."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from test_manifest import ABOUT, row

from normal_guidance.base.errors import UserError
from normal_guidance.scans.index.manifest import Manifest, write_manifest
from normal_guidance.scans.index.splits import (
    PARTS,
    Split,
    audit,
    fold_scans,
    patient_labels,
    read_parts,
    read_split,
    split_scans,
    write_split,
)


def ids(scans: int) -> tuple[list[str], list[str], list[int]]:
    """Scans of patients with one to three scans each."""
    generator = np.random.default_rng(3)
    patients = [f"P{n:04d}" for n in range(scans) for _ in range(generator.integers(1, 4))][:scans]
    return [f"S{n}" for n in range(scans)], patients, generator.integers(0, 2, scans).tolist()


@given(st.integers(60, 400), st.integers(0, 2**31 - 1))
@settings(max_examples=25, deadline=None)
def test_no_patient_is_in_two_parts_and_shares_are_kept(scans: int, seed: int) -> None:
    scan_ids, patients, labels = ids(scans)
    split = split_scans(scan_ids, patients, labels, seed)
    of = {part: {patients[n] for n in split.numbers(part)} for part in PARTS}
    assert not (of["train"] & of["val"] | of["train"] & of["test"] | of["val"] & of["test"])
    total, label_of = len(set(patients)), patient_labels(patients, labels)
    assert abs(len(of["test"]) - total / 6) <= 1
    assert abs(len(of["val"]) - total / 6) <= 1
    rate = np.mean(list(label_of.values()))
    for part in PARTS:
        assert abs(np.mean([label_of[p] for p in of[part]]) - rate) <= 1.5 / len(of[part])


@given(st.integers(60, 300), st.integers(2, 6), st.integers(0, 2**31 - 1))
@settings(max_examples=25, deadline=None)
def test_folds_share_no_patient_and_all_have_both_labels(scans: int, folds: int, seed: int) -> None:
    _, patients, labels = ids(scans)
    fold_of = fold_scans(patients, labels, folds, seed)
    assert fold_of == fold_scans(patients, labels, folds, seed)
    assert len(set(zip(patients, fold_of, strict=True))) == len(set(patients))
    rate = np.mean(labels)
    for fold in range(folds):
        own = [label for label, number in zip(labels, fold_of, strict=True) if number == fold]
        assert abs(len(own) - scans / folds) <= 0.1 * scans
        assert abs(np.mean(own) - rate) <= 0.15


@pytest.mark.parametrize(
    ("patients", "labels", "folds"),
    [
        ("ABCDEF", [1, 0, 0, 0, 0, 0], 2),  # one positive
        ("AAABBB", [1, 1, 0, 0, 0, 0], 2),  # one patient has all positives
        ("ABCD", [1, 0, 1, 0], 3),
        ("ABCD", [1, 0, 1, 0], 1),
    ],
)
def test_folds_without_both_labels_are_refused(patients: str, labels: list[int], folds: int) -> None:
    with pytest.raises(UserError, match=f"cannot be divided into {folds} folds that all have both; use fewer, or add"):
        fold_scans(list(patients), labels, folds, seed=0)


def test_too_few_patients_are_counted_in_our_own_words() -> None:
    """scikit-learn's own words name `test_size`, which nobody gave."""
    with pytest.raises(UserError, match=r"^1 positive and 0 negative patients are too few to be split so that .*; add"):
        split_scans(["a", "b"], ["P", "P"], [1, 1], seed=1)


def test_wrong_proportions() -> None:
    for wrong in ((4, 1), (4, 0, 1)):
        with pytest.raises(UserError, match="proportions"):
            split_scans(*ids(60), 1001, wrong)


def test_a_seed_gives_one_split_in_any_order_of_the_scans_and_another_seed_another() -> None:
    first, again, other = (split_scans(*ids(200), seed) for seed in (1001, 1001, 2001))
    assert first.parts == again.parts != other.parts
    backward = split_scans(*(values[::-1] for values in ids(200)), 1001)
    assert backward.parts == first.parts[::-1]


def test_the_paper_draws_with_scikit_learn() -> None:
    from sklearn.model_selection import train_test_split

    patients = [f"P{n:03d}" for n in range(120)]
    labels = [int(n % 3 == 0) for n in range(120)]
    rest, test, rest_labels, _ = train_test_split(patients, labels, test_size=1 / 6, stratify=labels, random_state=1001)
    _, val = train_test_split(rest, test_size=1 / 5, stratify=rest_labels, random_state=1001)
    split = split_scans(patients, patients, labels, 1001)
    assert {patients[n] for n in split.numbers("test")} == set(test)
    assert {patients[n] for n in split.numbers("val")} == set(val)


HEADER = "scan_id,patient_id,label,part\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("scan_id,part\nA,train\n", "no column 'patient_id'"),
        (HEADER + "A,P,0,train\nB,P,0,test\n", "patient 'P' is in part 'train' and in part 'test'"),
        (HEADER + "A,P,0,training\n", "part 'training' is unknown"),
        (HEADER + "A,P,0,val\nA,P,0,val\n", "scan 'A' occurs 2 times"),
        (HEADER + "A,P,yes,val\n", "row 1: label is 'yes', not one of 0, 1"),
        (HEADER + '"A,P,0,val\n', "cannot be read"),
        ("", "no column 'scan_id', only none"),
    ],
)
def test_wrong_files_are_refused(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "split.csv").write_text(text)
    with pytest.raises(UserError, match=message):
        read_split(tmp_path / "split.csv")


def manifest_of(tmp_path: Path, **changed: object) -> Manifest:
    rows = [row(n, **{"patient_id": f"P{n}", **(changed if n == 3 else {})}) for n in range(12)]
    return write_manifest(tmp_path / "manifest.parquet", rows, ABOUT)


def split_of(manifest: Manifest, parts: tuple[str, ...]) -> Split:
    return Split(tuple(manifest.scan_ids), tuple(manifest.patient_ids), tuple(manifest.labels.tolist()), parts)


THIRDS = ("train",) * 6 + ("val",) * 3 + ("test",) * 3


def test_an_audit_compares_patients_slices_and_checksums_and_finds_foreign_scans(tmp_path: Path) -> None:
    clean = manifest_of(tmp_path)
    checksums = {scan: f"{n:x}" for n, scan in enumerate(clean.scan_ids)}
    counts = {"scans": 12, "patients": 12, "slices": 36, "checksums": 12}
    assert audit(split_of(clean, THIRDS), clean, checksums) == counts
    with pytest.raises(UserError, match="checksum '3' is in part 'train' and in part 'test'"):
        audit(split_of(clean, THIRDS), clean, {**checksums, "S11": "3"})
    shared = manifest_of(tmp_path, files=("S3/0.dcm", "S11/1.dcm", "S3/2.dcm"))
    for split, manifest, message in (
        (split_of(shared, THIRDS), shared, r"slice \('S11/1.dcm', 0\) is in part 'train' and in part 'test'"),
        (split_of(clean.take(range(11)), THIRDS[:11]), clean, "scan 'S11' is not in the split"),
        (split_of(clean, THIRDS), clean.take(range(11)), "scan 'S11' is not in the manifest"),
        (split_of(clean, THIRDS), manifest_of(tmp_path, patient_id="P7"), "scan 'S3' belongs to another patient"),
    ):
        with pytest.raises(UserError, match=message):
            audit(split, manifest)


def test_a_split_is_bound_to_the_scans_that_it_was_made_from(tmp_path: Path) -> None:
    manifest, path = manifest_of(tmp_path, patient_id="007"), tmp_path / "split.csv"
    write_split(path, split_of(manifest, THIRDS))
    assert vars(read_split(path)) == vars(split_of(manifest, THIRDS))
    assert read_parts(path, manifest) == dict(zip(manifest.scan_ids, THIRDS, strict=True))
    for changed, reason in (
        ({"patient_id": "P77"}, "belongs to another patient"),
        ({"patient_id": "007", "label": 0}, "has another label"),
    ):
        other = manifest_of(tmp_path, **changed)
        with pytest.raises(UserError, match=rf"split.csv: scan 'S3' {reason} in the manifest than in the split"):
            read_parts(path, other)
        with pytest.raises(UserError, match=f"scan 'S3' {reason}"):
            audit(read_split(path), other)


def test_a_users_own_table_of_parts_may_have_other_columns(tmp_path: Path) -> None:
    manifest = manifest_of(tmp_path)
    (tmp_path / "own.csv").write_text("part,label,scan_id\nval,sick,S1\n")
    assert read_parts(tmp_path / "own.csv", manifest) == {"S1": "val"}
    pd.DataFrame({"scan_id": [7], "part": ["val"]}).to_parquet(tmp_path / "own.parquet")
    assert read_parts(tmp_path / "own.parquet", manifest) == {"7": "val"}
    (tmp_path / "own.csv").write_text("part,scan_id\nval,S1\ntest,S1\n")
    with pytest.raises(UserError, match=r"own.csv has scan 'S1' more than once"):
        read_parts(tmp_path / "own.csv", manifest)
