"""Regularizers of attention: values by hand, the interface of guidance, and the same in every form of bags."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core import bells as window_sums
from normal_guidance.core.attention_term import AttentionTerm
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.layout import Layout, unpack
from normal_guidance.core.regularizers import REGULARIZERS
from normal_guidance.core.regularizers.clusters import ClusterUniformity, cluster
from normal_guidance.core.regularizers.distance import REACHES, STEPS, DistancePrior
from normal_guidance.core.regularizers.entropy import EntropyMaximization
from normal_guidance.core.regularizers.smoothness import Smoothness
from same import assert_same

EVERY = pytest.mark.parametrize("name", REGULARIZERS)


def term_of(name: str, weight: float = 1.0) -> AttentionTerm:
    return REGULARIZERS[name].term(weight)


def test_entropy_is_the_divergence_from_uniform() -> None:
    logits = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    entropy = torch.special.entr(logits.softmax(1)).sum(1)
    assert_same(EntropyMaximization()(logits, from_logits=True), (math.log(9) - entropy).mean(), [logits])


def test_smoothness_is_the_laplacian_form_of_the_scores() -> None:
    scores = torch.randn(2, 7, dtype=torch.float64)
    chain = torch.diag(torch.ones(6, dtype=torch.float64), 1)
    chain = chain + chain.T
    laplacian = torch.diag(chain.sum(1)) - chain
    want = torch.stack([row @ laplacian @ row / 7 for row in scores])
    torch.testing.assert_close(Smoothness().per_bag(scores, from_logits=True), want)
    torch.testing.assert_close(Smoothness().per_bag(scores.softmax(1)), want)  # a constant per bag does not matter


def test_clusters_by_hand() -> None:
    """Two clear clusters: slices 0, 1, 4 and slices 2, 3; attention differs within the first alone."""
    features = torch.tensor([[0.0, 0.0], [0.1, 0.0], [9.0, 9.0], [9.0, 9.1], [0.0, 0.1]])
    inside = cluster(features, Layout.packed([5]))[0]
    parts = {frozenset(row.nonzero().flatten().tolist()) for row in inside if row.any()}
    assert all(part <= {0, 1, 4} or part <= {2, 3} for part in parts)
    assert inside.sum(0).tolist() == [1] * 5
    many = torch.cat([torch.randn(30, 2) * 0.01, torch.randn(30, 2) * 0.01 + 5])
    attention = torch.rand(60, dtype=torch.float64).softmax(0)
    inside = cluster(many.double(), Layout.packed([60]))[0]
    want = []
    for row in inside:
        if row.any():
            share = attention[row] / attention[row].sum()
            want.append((share * (share * row.sum()).log()).sum())
    got = ClusterUniformity().per_bag(attention, lengths=torch.tensor([60]), features=many.double())
    torch.testing.assert_close(got, torch.stack(want).mean()[None])
    with pytest.raises(UserError, match="ClusterUniformity needs the embeddings of the slices; pass features="):
        ClusterUniformity()(torch.ones(1, 4) / 4)


def textbook_prior(a: Tensor) -> Tensor:
    """r of one bag with loops."""
    size, parts = len(a), []
    for reach in REACHES:
        r = torch.zeros_like(a)
        for source in range(size):
            fall = torch.tensor([math.exp(-abs(i - source) / reach) if i != source else 0.0 for i in range(size)])
            if fall.sum() > 0:
                r += a[source] * fall.to(a) / fall.to(a).sum()
        parts.append(r)
    weights = torch.full((len(REACHES),), 1 / len(REACHES), dtype=a.dtype)
    for _ in range(STEPS):
        joint = weights[:, None] * torch.stack(parts)
        weights = (joint / joint.sum(0) * a).sum(1)
        weights = weights / weights.sum()
    return (weights[:, None] * torch.stack(parts)).sum(0)


def test_the_distance_prior_equals_a_textbook_with_loops() -> None:
    logits = torch.randn(14, dtype=torch.float64, requires_grad=True)
    lengths = [9, 5]
    want = []
    for bag in logits.split(lengths):
        a = bag.softmax(0)
        r = textbook_prior(a.detach())
        assert math.isclose(r.sum().item(), 1, rel_tol=1e-6)
        want.append((r * (r.log() - a.log())).sum())
    got = DistancePrior()(logits, lengths=torch.tensor(lengths), from_logits=True)
    assert_same(got, torch.stack(want).mean(), [logits], rtol=1e-5, atol=1e-7)


def test_the_distance_prior_of_long_scans_is_that_of_short_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    layout = Layout.packed([900, 1, 300])
    logits = (3 * torch.randn(2, 1201, dtype=torch.float64)).requires_grad_()
    found = []
    for dense in (2048, 0):
        monkeypatch.setattr(window_sums, "DENSE_SUMS", dense)
        value = DistancePrior()(logits, lengths=layout, from_logits=True)
        found.append((value, *torch.autograd.grad(value, logits)))
    torch.testing.assert_close(found[1], found[0])


@EVERY
@settings(max_examples=15)
@given(lengths=st.lists(st.integers(1, 30), min_size=1, max_size=4), heads=st.integers(1, 3))
def test_packed_padded_and_one_bag_at_a_time_agree(name: str, lengths: list[int], heads: int) -> None:
    term, counts = term_of(name), torch.tensor(lengths)
    logits = torch.randn(heads, sum(lengths), dtype=torch.float64, requires_grad=True)
    features = torch.randn(sum(lengths), 4, dtype=torch.float64)
    given = {"from_logits": True, "labels": torch.ones(len(lengths), dtype=torch.int64)}
    packed = term.per_bag(logits, lengths=counts, features=features, **given)
    rows, mask = unpack(features, counts)
    padded = torch.stack([unpack(row, counts)[0] for row in logits], 1)
    in_padding = term.per_bag(padded, mask, features=rows, **given)
    scans = zip(logits.split(lengths, 1), features.split(lengths), strict=True)
    each = {"from_logits": True, "labels": torch.ones(1)}
    alone = torch.cat([term.per_bag(scores, lengths=[len(bag)], features=bag, **each) for scores, bag in scans])
    assert torch.isfinite(torch.autograd.grad(packed.sum(), logits, retain_graph=True)[0]).all()
    for other in (in_padding, alone):
        assert_same(other, packed, [logits], atol=1e-9, rtol=1e-6)


@EVERY
def test_the_weight_multiplies_and_extreme_attention_is_finite(name: str) -> None:
    features = torch.randn(2, 40, 3)
    logits = (torch.randn(2, 40) * 60).requires_grad_()
    value = term_of(name)(logits, from_logits=True, features=features)
    torch.testing.assert_close(term_of(name, 3.0)(logits, from_logits=True, features=features), 3 * value)
    assert torch.isfinite(torch.autograd.grad(value, logits)[0]).all()
    single = torch.zeros(1, 40)
    single[0, 7] = 1.0
    assert torch.isfinite(term_of(name)(single, features=features[:1]))


def test_attention_on_one_slice_is_guided_only_with_a_least_width() -> None:
    """Without it the reference of a spike is the spike."""
    logits = torch.zeros(1, 40)
    logits[0, 20] = 30.0
    assert NormalGuidance()(logits, from_logits=True) < 1e-4
    wide = NormalGuidance(least_width=1.5)
    place = torch.arange(40.0) - 20
    reference = torch.softmax(-(place**2) / (2 * 1.5**2), 0)
    want = (reference * (reference.log() - logits.log_softmax(1))).sum()
    torch.testing.assert_close(wide(logits, from_logits=True), want)
