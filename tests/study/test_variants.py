"""Variants of the semi-synthetic data (docs/studies/variants.py): their draws, and Bayes' rule by enumeration."""

import itertools
import math

import pytest
import torch

from normal_guidance.core.bags import Bags
from normal_guidance.core.blocks import GAP, block_statistics
from normal_guidance.study import drawn
from normal_guidance.study.drawn import BLOCK

SEPARATION = GAP + 1


@pytest.fixture
def variants(studies):
    return studies.variants


def test_without_a_variant_the_data_and_their_oracles_are_the_paper_s(variants):
    bags, paper = variants.shifted_mean(20, 1, features=3), drawn.shifted_mean(20, 1, features=3)
    assert bags.features.equal(paper.features)
    assert bags.slice_labels.equal(paper.slice_labels)
    torch.testing.assert_close(variants.bayes_scan_scores(bags), drawn.bayes_scan_scores(bags))
    torch.testing.assert_close(variants.bayes_slice_scores(bags), drawn.bayes_slice_scores(bags))


def test_the_three_sets_of_a_variant(variants, monkeypatch):
    monkeypatch.setattr(variants, "SIZES", (4, 3, 2))
    paper, short = variants.semi_synthetic(1001), variants.semi_synthetic(1001, "short_blocks")
    assert short.train.features.equal(paper.train.features)
    assert short.test.positive_slices.max() == 6 < paper.test.positive_slices.max()
    assert variants.semi_synthetic_part(1001, "val", "more_noise").width == 4 * 768
    few = variants.semi_synthetic_part(2001, "val", "few_scans")
    assert few.features.equal(drawn.shifted_mean(250, 2002).features)


def arrangements(size: int, block: int, blocks: int) -> list[tuple[range, ...]]:
    """Every choice of starts whose blocks lie inside and far enough apart, one by one."""
    return [
        tuple(range(u, u + block) for u in starts)
        for starts in itertools.combinations(range(size - block + 1), blocks)
        if all(second - first >= block + SEPARATION for first, second in itertools.pairwise(starts))
    ]


@pytest.mark.parametrize(
    ("block", "blocks", "signals"), [(1, 2, 1), (2, 2, 2), (1, 3, 1), (2, 3, 3), (3, 1, 1), (3, 1, 2)]
)
def test_oracles_are_the_enumeration_of_all_arrangements(variants, block: int, blocks: int, signals: int):
    least = blocks * block + (blocks - 1) * SEPARATION
    lengths, shift = torch.tensor([least, least + 1, least + 5, least + 2]), 0.9
    bags = Bags(torch.randn(int(lengths.sum()), 4, dtype=torch.float64), lengths, torch.ones(4, dtype=torch.int64))
    scans, slices = [], []
    for bag in bags:
        ratio = (shift * bag.features[:, :signals] - shift**2 / 2).sum(1).exp().tolist()
        every = arrangements(len(ratio), block, blocks)
        joint = [math.prod(ratio[j] for places in ranges for j in places) / len(every) for ranges in every]
        scans.append(math.log(sum(joint)))
        for j in range(len(ratio)):
            inside = sum(p for p, ranges in zip(joint, every, strict=True) if any(j in places for places in ranges))
            slices.append(inside / sum(joint))
    options = {"block": block, "shift": shift, "blocks": blocks, "signals": signals}
    torch.testing.assert_close(variants.bayes_scan_scores(bags, **options), torch.tensor(scans, dtype=torch.float64))
    probable = variants.bayes_slice_scores(bags, **options).exp()
    torch.testing.assert_close(probable, torch.tensor(slices, dtype=torch.float64))
    torch.testing.assert_close(bags.layout.pad(probable).sum(1), torch.full((4,), float(block * blocks)).double())


def test_every_arrangement_of_blocks_is_as_probable_as_any_other(variants):
    """Two blocks of 1 in 7 slices have 3 arrangements; bounds are five standard errors wide."""
    bags = variants.shifted_mean(3_000, 4, features=1, min_slices=7, max_slices=7, block=1, blocks=2, prevalence=1.0)
    kinds, counts = bags.layout.pad(bags.slice_labels).unique(dim=0, return_counts=True)
    want = {tuple(int(any(j in one for one in ranges)) for j in range(7)) for ranges in arrangements(7, 1, 2)}
    assert {tuple(row) for row in kinds.tolist()} == want
    assert len(want) == 3
    error = 5 * math.sqrt(len(bags) / 3 * 2 / 3)
    torch.testing.assert_close(counts.double(), torch.full((3,), len(bags) / 3).double(), rtol=0, atol=error)


def test_several_blocks_are_several_by_the_rule_of_blocks(variants):
    for name, number in (("two_blocks", 2), ("three_blocks", 3)):
        bags = variants.shifted_mean(200, 1, features=1, **variants.VARIANTS[name].options)
        positive = bags.positive_slices[bags.labels == 1]
        assert (positive == BLOCK).all(), "as many positive slices as the paper's one block"
        assert block_statistics(bags.slice_labels, bags.lengths).bags_by_blocks == {number: len(positive)}


@pytest.mark.parametrize("signals", [1, 3])
def test_the_shift_moves_the_first_features_of_the_block_and_nothing_else(variants, signals):
    noise, bags = (variants.shifted_mean(50, seed=3, features=5, shift=shift, signals=signals) for shift in (0.0, 2.0))
    expected = noise.features.clone()
    expected[bags.slice_labels == 1, :signals] += 2.0
    assert bags.features.equal(expected)
    assert bags.slice_labels.equal(noise.slice_labels)


def test_features_that_share_the_signal_leave_the_ceiling_where_it_is(variants):
    """Their sum over sqrt(8) is one feature with the paper's shift: the oracles agree, number by number."""
    told = variants.VARIANTS["eight_signals"].options
    bags = variants.shifted_mean(100, 6, features=8, **told)
    one = Bags(bags.features.double().sum(1, keepdim=True) / math.sqrt(8), bags.lengths, bags.labels)
    torch.testing.assert_close(
        variants.bayes_scan_scores(bags, **told), variants.bayes_scan_scores(one), rtol=0, atol=1e-9
    )
    torch.testing.assert_close(
        variants.bayes_slice_scores(bags, **told), variants.bayes_slice_scores(one), rtol=0, atol=1e-9
    )
