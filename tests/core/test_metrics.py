"""Ranking metrics against scikit-learn, against counting pairs by hand, and against their own invariances."""

import math
import statistics
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import average_precision_score, roc_auc_score
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core import metrics
from normal_guidance.core.metrics import (
    MAX_PADDING,
    PUBLISHED_SD,
    MeanSd,
    auprc,
    auroc,
    localization,
    mean_and_sd,
)

Metric = Callable[..., Tensor]
SKLEARN = {auroc: roc_auc_score, auprc: average_precision_score}
BOTH = pytest.mark.parametrize("metric", SKLEARN, ids=lambda metric: metric.__name__)

# Few distinct values make most pairs tie; free floats make almost none.
TIED = st.sampled_from([-2.0, -0.5, -0.0, 0.0, 0.5, 1e-300])
FREE = st.floats(-1e9, 1e9, allow_subnormal=False)
INFINITE = st.sampled_from([-math.inf, -1.0, 0.0, 1.0, math.inf])


@st.composite
def rows(draw: st.DrawFn, values: st.SearchStrategy[float] = TIED | FREE) -> tuple[Tensor, Tensor]:
    """Scores and labels of one row with both classes, in any order."""
    positives = draw(st.lists(st.tuples(values, st.just(1)), min_size=1, max_size=15))
    negatives = draw(st.lists(st.tuples(values, st.just(0)), min_size=1, max_size=15))
    scores, labels = zip(*draw(st.permutations(positives + negatives)), strict=True)
    return torch.tensor(scores, dtype=torch.float64), torch.tensor(labels)


def count_pairs(scores: Tensor, labels: Tensor) -> float:
    """AUROC by its definition: every positive against every negative."""
    pairs = [(p, n) for p in scores[labels == 1].tolist() for n in scores[labels == 0].tolist()]
    return sum(1.0 if p > n else 0.5 if p == n else 0.0 for p, n in pairs) / len(pairs)


def count_precision(scores: Tensor, labels: Tensor) -> float:
    """AUPRC by its definition: the precision at each positive's own score."""
    pairs = list(zip(scores.tolist(), labels.tolist(), strict=True))
    thresholds = [score for score, label in pairs if label]
    above = [[label for score, label in pairs if score >= threshold] for threshold in thresholds]
    return sum(sum(labels) / len(labels) for labels in above) / len(thresholds)


@BOTH
@given(row=rows())
def test_equals_sklearn(metric: Metric, row: tuple[Tensor, Tensor]) -> None:
    scores, labels = row
    assert metric(scores, labels).item() == pytest.approx(SKLEARN[metric](labels, scores), abs=1e-12)


@given(row=rows(values=TIED | INFINITE))
def test_equals_counting_by_hand(row: tuple[Tensor, Tensor]) -> None:
    assert auroc(*row).item() == pytest.approx(count_pairs(*row), abs=1e-12)
    assert auprc(*row).item() == pytest.approx(count_precision(*row), abs=1e-12)


@BOTH
@pytest.mark.parametrize("rare", [0, 1])
def test_extreme_imbalance(metric: Metric, rare: int) -> None:
    labels = torch.full((5000,), 1 - rare)
    labels[1234] = rare
    scores = torch.randn(7, 5000, dtype=torch.float64).round(decimals=1)
    expected = [SKLEARN[metric](labels, row) for row in scores]
    torch.testing.assert_close(metric(scores, labels), torch.tensor(expected, dtype=torch.float64), rtol=0, atol=1e-12)


def test_hand_calculation() -> None:
    scores, labels = torch.tensor([3.0, 2.0, 2.0, 1.0]), torch.tensor([1, 0, 1, 0])
    # Pairs: 3>2, 3>1, 2=2, 2>1.  Precision: 1/1 at 3, and 2/3 at 2, where the tied negative counts too.
    assert auroc(scores, labels).item() == 3.5 / 4
    assert auprc(scores, labels).item() == pytest.approx((1 + 2 / 3) / 2, abs=1e-15)


def test_large_counts_do_not_overflow() -> None:
    # 150,000 positives x 150,000 negatives are five times as many pairs as 32 bits can count.
    labels = torch.arange(300_000) % 2
    assert auroc(labels.float(), labels).item() == 1.0
    assert auroc(-labels.float(), labels).item() == 0.0


@BOTH
@given(row=rows(values=TIED | INFINITE), junk=st.lists(st.sampled_from([math.nan, math.inf, -math.inf, 0.0])))
def test_masked_equals_subset(metric: Metric, row: tuple[Tensor, Tensor], junk: list[float]) -> None:
    scores, labels = row
    extra = torch.tensor(junk, dtype=torch.float64)
    shuffle = torch.randperm(len(scores) + len(extra))
    mixed = torch.cat([scores, extra])[shuffle]
    mixed_labels = torch.cat([labels, torch.full((len(extra),), -1)])[shuffle]
    mask = torch.cat([torch.ones(len(scores)), torch.zeros(len(extra))]).bool()[shuffle]
    torch.testing.assert_close(metric(mixed, mixed_labels, mask), metric(scores, labels), rtol=0, atol=1e-14)


DTYPES = [(torch.float16, torch.bool), (torch.bfloat16, torch.uint8), (torch.float32, torch.float32)]


@BOTH
@pytest.mark.parametrize(("dtype", "label_dtype"), [*DTYPES, (torch.int64, torch.int64)], ids=str)
def test_batches_of_any_dtype_equal_sklearn_row_by_row(
    metric: Metric, dtype: torch.dtype, label_dtype: torch.dtype
) -> None:
    """Scores of low precision keep their own ties."""
    scores, labels, mask = (9 * torch.randn(3, 4, 60)).to(dtype), torch.randint(2, (4, 60)), torch.rand(3, 1, 60) < 0.7
    batched = metric(scores, labels.to(label_dtype), mask)
    assert batched.dtype == torch.float64
    rows = [[(labels[j, mask[i, 0]], scores[i, j, mask[i, 0]].double()) for j in range(4)] for i in range(3)]
    want = torch.tensor([[SKLEARN[metric](*row) for row in each] for each in rows], dtype=torch.float64)
    torch.testing.assert_close(batched, want, rtol=0, atol=1e-12)


@BOTH
def test_a_diverged_configuration_spoils_its_own_row_only(metric: Metric) -> None:
    scores, labels = torch.randn(3, 20), torch.arange(20) % 2
    clean = metric(scores, labels)
    scores[1, 5] = math.nan
    spoiled = metric(scores, labels)
    assert spoiled.isnan().tolist() == [False, True, False]
    assert torch.equal(spoiled[[0, 2]], clean[[0, 2]])


@pytest.mark.parametrize(("label", "precision"), [(0, math.nan), (1, 1.0)])
def test_rows_of_one_class(label: int, precision: float) -> None:
    scores = torch.tensor([[0.3, 0.1, 0.3], [0.1, 0.2, 0.3]])
    labels = torch.tensor([[label, label, label], [0, 1, 1]])
    assert auroc(scores, labels).tolist() == pytest.approx([math.nan, 1.0], nan_ok=True)
    assert auprc(scores, labels).tolist() == pytest.approx([precision, 1.0], nan_ok=True)


@BOTH
def test_nothing_reads_the_device(metric: Metric) -> None:
    # Tensors on "meta" have shapes but no values: any step that looks at a value on the host raises.
    scores = torch.empty(32, 2500, device="meta")
    labels = torch.empty(2500, device="meta", dtype=torch.int64)
    mask = torch.empty(2500, device="meta", dtype=torch.bool)
    assert metric(scores, labels, mask).shape == (32,)
    with pytest.raises((RuntimeError, NotImplementedError)):
        bool((labels == 1).any())


# A bag is drawn as (length, kind): kinds are mixed labels, and the three that have no AUROC.
BAGS = st.lists(st.tuples(st.integers(2, 40), st.sampled_from(["mixed", "none", "all", "unknown"])), max_size=12)


def make_bags(drawn: list[tuple[int, str]], configs: tuple[int, ...]) -> tuple[Tensor, Tensor, Tensor]:
    labels = [torch.empty(0, dtype=torch.int64)]
    for length, kind in drawn:
        bag = torch.full((length,), {"mixed": 0, "none": 0, "all": 1, "unknown": -1}[kind])
        if kind == "mixed":
            bag[torch.randperm(length)[: int(torch.randint(1, length, ()))]] = 1
        labels.append(bag)
    packed = torch.cat(labels)
    lengths = torch.tensor([length for length, _ in drawn], dtype=torch.int64)
    return torch.randn(*configs, len(packed)).round(decimals=1), packed, lengths


@given(drawn=BAGS, cells=st.sampled_from([200, 2**22]))
def test_localization_equals_sklearn_bag_by_bag(drawn: list[tuple[int, str]], cells: int) -> None:
    """Ranked in many chunks, and in few."""
    scores, labels, lengths = make_bags(drawn, configs=(3,))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "MAX_CELLS", cells)
        result = localization(scores, labels, lengths)
    kinds = [kind for _, kind in drawn]
    assert result.kept.tolist() == [bag for bag, kind in enumerate(kinds) if kind == "mixed"]
    assert (result.unlabelled, result.all_negative, result.all_positive) == tuple(
        kinds.count(kind) for kind in ("unknown", "none", "all")
    )
    bags = list(zip(scores.split(lengths.tolist(), -1), labels.split(lengths.tolist()), strict=True))
    for column, bag in enumerate(result.kept.tolist()):
        for config, row in enumerate(bags[bag][0]):
            expected = [sklearn(bags[bag][1], row) for sklearn in SKLEARN.values()]
            found = [result.auroc[config, column].item(), result.auprc[config, column].item()]
            assert found == pytest.approx(expected, abs=1e-12)


@given(lengths=st.lists(st.integers(1, 2000), max_size=60), configs=st.integers(1, 64), cells=st.integers(1, 10**6))
def test_chunks_bound_padding_and_memory(lengths: list[int], configs: int, cells: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics, "MAX_CELLS", cells)
        chunks = list(metrics._chunks(torch.tensor(lengths, dtype=torch.int64), configs))
    assert sorted(bag for bags, _ in chunks for bag in bags.tolist()) == list(range(len(lengths)))
    for bags, longest in chunks:
        sizes = [lengths[bag] for bag in bags.tolist()]
        assert max(sizes) == longest
        assert min(sizes) >= (1 - MAX_PADDING) * longest
        assert len(sizes) == 1 or len(sizes) * longest * configs <= cells


def test_localization_is_the_plain_mean_over_bags() -> None:
    # A long bag weighs no more than a short one: (1 + 0) / 2, where pooling the slices would give 1 / 9.
    scores = torch.tensor([0.0, 1.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    result = localization(scores, torch.tensor([0, 1, 0, 1, 0, 0, 0]), torch.tensor([2, 5]))
    assert result.auroc.tolist() == [1.0, 0.0]
    assert result.mean_auroc.item() == 0.5
    assert result.mean_auprc.item() == pytest.approx((1 + 1 / 5) / 2)


def test_localization_of_a_diverged_configuration_is_nan() -> None:
    scores, labels, lengths = make_bags([(8, "mixed"), (8, "none"), (30, "mixed")], configs=(3,))
    scores[1, 40] = math.nan
    scores[2, 10] = math.nan  # in the bag without positives, which is not ranked
    result = localization(scores, labels, lengths)
    assert result.auroc.isnan().tolist() == [[False, False], [False, True], [False, False]]
    assert result.mean_auroc.isnan().tolist() == [False, True, False]
    assert result.mean_auprc.isnan().tolist() == [False, True, False]


@given(values=st.lists(st.floats(0, 1), min_size=2, max_size=9))
def test_mean_and_sd_equal_the_standard_library(values: list[float]) -> None:
    population = mean_and_sd(values, "population")
    sample = mean_and_sd(torch.tensor(values, dtype=torch.float64), "sample")
    assert population.mean == sample.mean == pytest.approx(statistics.fmean(values), abs=1e-12)
    assert population.sd == pytest.approx(statistics.pstdev(values), abs=1e-9)
    assert sample.sd == pytest.approx(statistics.stdev(values), abs=1e-9)


def test_the_printed_sd_says_which_it_is_and_one_value_has_no_sample_sd() -> None:
    printed = [str(mean_and_sd([0.5, 0.7], PUBLISHED_SD[level])) for level in ("localization", "scan")]
    assert printed == ["0.600 ± 0.100 (population sd)", "0.600 ± 0.141 (sample sd)"]
    assert mean_and_sd([0.5], "population") == MeanSd(0.5, 0.0, "population")
    assert math.isnan(mean_and_sd([0.5], "sample").sd)


FOUR = torch.zeros(4)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: auroc(FOUR, FOUR, FOUR[:2] > 0), r"mask of shape \(2,\) cannot broadcast to scores of shape \(4,\)"),
        (lambda: mean_and_sd([0.1, 0.2], "standard"), r"sd .* is unknown; choose one of population, sample"),
        (lambda: mean_and_sd(FOUR[:0], "sample"), "values must be a vector of one or"),
        (lambda: mean_and_sd(torch.zeros(2, 2), "sample"), "values must be a vector of one or"),
    ],
)
def test_what_does_not_fit_is_refused(call: Callable[[], object], message: str, unchecked: None) -> None:
    """Beside what docs/errors_page.py has."""
    with pytest.raises(UserError, match=message):
        call()
