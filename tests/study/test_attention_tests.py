"""The parts of the tests of attention: predictions, ranks, removals, areas, intervals, untrained weights."""

import math
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from scipy.stats import rankdata, spearmanr
from torch import nn

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.models import ABMIL, TransMIL
from normal_guidance.statistics.localization import highest_first, moved_round, rank_correlation, ranks
from normal_guidance.study.trust import attention_tests as curves_module
from normal_guidance.study.trust.attention_tests import (
    SHARES,
    Bootstrap,
    Curves,
    Estimate,
    ScanPredictions,
    SliceSelection,
    Varied,
    count_slices,
    decide,
    draw_curves,
    make_orders,
    predict_scans,
    untrained_copies,
    worth,
)
from normal_guidance.sweep.loop import predict_bags
from small_trust import FEATURES, paper_scans

LENGTHS = torch.tensor([5, 1, 8, 2])


def numbered(lengths: torch.Tensor = LENGTHS) -> Bags:
    """Scans whose only feature is the slice's number among all slices."""
    slices = int(lengths.sum())
    return Bags(torch.arange(slices).double()[:, None], lengths, torch.arange(len(lengths)) % 2)


class Recorder:
    """A model that writes down what it is shown."""

    def __init__(self) -> None:
        self.shown: list[list[int]] = []

    def __call__(self, features, lengths):
        self.shown += [part[:, 0].long().tolist() for part in features.split(lengths.tolist())]
        return torch.zeros(len(lengths)), torch.ones(len(features))


@pytest.mark.parametrize("batch_size", [1, 3, 64])
def test_predictions_are_those_of_predict_and_slices_are_shown_in_order_in_batches_of_any_size(batch_size):
    bags, model = paper_scans(7), ABMIL(FEATURES)
    said, expected = predict_scans(model, bags, batch_size=batch_size), predict_bags(model, bags)
    assert torch.allclose(said.logit, expected.logit.double(), atol=1e-6)
    assert torch.allclose(said.attention, expected.attention.double(), atol=1e-6)
    assert torch.allclose(said.scores, expected.slice_scores.double(), atol=1e-5)
    chosen = SliceSelection(torch.tensor([4, 0, 5, 13, 6, 7, 15, 14]), torch.tensor([2, 1, 3, 2]))
    recorder = Recorder()
    predict_scans(recorder, numbered(), chosen, batch_size=batch_size)
    assert recorder.shown == [[4, 0], [5], [13, 6, 7], [15, 14]]


def test_pairs_objects_and_heads_are_understood():
    bags = numbered()
    attention, logit = torch.rand(2, 16), torch.arange(4.0)
    pair = predict_scans(lambda *_: (logit[:, None], attention), bags)
    thing = predict_scans(lambda *_: SimpleNamespace(logit=logit, attention=attention.mean(0)), bags)
    assert torch.equal(pair.logit, logit.double())
    assert torch.allclose(pair.attention, thing.attention)
    assert [scan.sum().item() for scan in pair.attention.split(LENGTHS.tolist())] == pytest.approx([1.0] * 4)


@pytest.mark.parametrize(
    ("said", "reason"),
    [
        (torch.zeros(4), "the model returned Tensor; wrap it in a function"),
        ((torch.zeros(4), torch.ones(4, 8)), r"attention of shape \(8,\) for 4 scans with 16 slices"),
        ((torch.zeros(3), torch.ones(16)), "3 logits"),
        ((torch.zeros(4), -torch.ones(16)), "negative or not finite; return attention, not its logarithm"),
        ((torch.zeros(4), torch.full((16,), torch.nan)), "negative or not finite"),
        ((torch.zeros(4), torch.zeros(16)), "0 on all slices of a scan"),
    ],
)
def test_an_answer_of_another_form_is_refused(said, reason):
    with pytest.raises(UserError, match=reason):
        predict_scans(lambda *_: said, numbered())


def test_dropout_is_off_meanwhile_and_on_again_afterwards():
    class Dropping(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner, self.dropout = ABMIL(FEATURES), nn.Dropout(0.5)

        def forward(self, features, lengths):
            return self.inner(self.dropout(features), lengths)

    model, bags = Dropping().train(), paper_scans(3)
    assert torch.equal(predict_scans(model, bags).logit, predict_scans(model, bags).logit)
    assert model.training
    assert not predict_scans(model, bags).logit.requires_grad


def test_ranks_and_correlations_are_scipys():
    generator = torch.Generator().manual_seed(1)
    lengths = torch.tensor([9, 2, 30, 4])
    first, other = (torch.randint(0, 6, (45,), generator=generator).double() for _ in range(2))
    parts = list(zip(first.split(lengths.tolist()), other.split(lengths.tolist()), strict=True))
    assert torch.equal(ranks(first, lengths), torch.cat([torch.tensor(rankdata(a) - 1) for a, _ in parts]))
    expected = [spearmanr(a, b).statistic for a, b in parts if a.unique().numel() > 1 and b.unique().numel() > 1]
    correlations = rank_correlation(first, other, lengths)
    assert correlations[correlations.isfinite()].tolist() == pytest.approx(expected)
    # Ties and single slices have no correlation.
    tied, alone = torch.tensor([1.0, 1.0, 5.0]), torch.tensor([2, 1])
    assert rank_correlation(tied, torch.tensor([1.0, 2.0, 5.0]), alone).isnan().all()
    infinite = torch.tensor([-math.inf, -math.inf, 0.0])
    assert rank_correlation(infinite, infinite, torch.tensor([3])).item() == 1


def test_a_scan_moved_round_keeps_its_neighbours():
    order = moved_round(LENGTHS, torch.Generator().manual_seed(3))
    start = 0
    for own, size in zip(order.split(LENGTHS.tolist()), LENGTHS.tolist(), strict=True):
        assert sorted(own.tolist()) == list(range(start, start + size))
        assert set(((own.roll(-1) - own) % size).tolist()) <= {1 % size}
        start += size


def test_counts_by_slices_and_by_attention():
    attention = torch.tensor([0.1, 0.6, 0.3, 0.25, 0.25, 0.25, 0.25]).double()
    lengths = torch.tensor([3, 4])
    own = ScanPredictions(torch.zeros(2).double(), attention, attention)
    order = highest_first(attention, lengths, torch.Generator())
    for by, counts in (
        ("slices", {0.1: [1, 1], 0.5: [2, 2], 0.7: [2, 3]}),
        ("attention", {0.5: [1, 2], 0.6: [1, 3], 0.7: [2, 3], 0.95: [3, 4]}),
    ):
        assert {share: count_slices(own, lengths, share, by, order).tolist() for share in counts} == counts


def test_what_is_removed_and_what_is_kept_make_up_the_scan(monkeypatch):
    lengths = torch.tensor([5, 1, 8, 2] * 10)
    bags, model = numbered(lengths), Recorder()
    own = predict_scans(model, bags)
    rising = ScanPredictions(torch.arange(40).double(), torch.arange(160).double(), own.attention)
    model.shown.clear()
    monkeypatch.setattr(curves_module, "SHARES", (0.5,))
    orders = {"attended": [highest_first(rising.scores, lengths, torch.Generator())]}
    draw_curves(model, bags, rising, orders, Bootstrap(bags))
    removed, kept = model.shown[:4], model.shown[40:44]
    assert kept == [[2, 3, 4], [5], [10, 11, 12, 13], [15]]  # the later half, in its own order
    assert removed == [[0, 1], [5], [6, 7, 8, 9], [14]]  # a slice is always left


def test_orders_are_what_they_are_called():
    lengths = torch.tensor([7, 6])
    scores = torch.tensor([3, 9, 1, 4, 5, 2, 8, 30, 90, 10, 40, 50, 20]).double()
    own = ScanPredictions(torch.zeros(2).double(), scores, scores)
    orders = make_orders(own, lengths, [ScanPredictions(own.logit, -scores, scores)], torch.Generator().manual_seed(0))
    assert orders["attended"][0].tolist() == [1, 6, 4, 3, 0, 5, 2, 8, 11, 10, 7, 12, 9]
    for name in ("least attended", "untrained"):
        assert orders[name][0].tolist() == [2, 5, 0, 3, 4, 6, 1, 9, 12, 7, 10, 11, 8]
    middle = orders["middle"][0].tolist()
    assert (middle[0], {*middle[1:3]}, {*middle[7:9]}) == (3, {2, 4}, {9, 10})
    for several in (orders["random"], orders["moved"]):
        assert len({tuple(order.tolist()) for order in several}) == 3
        assert all(sorted(order[:7].tolist()) == list(range(7)) for order in several)


def varied(value: float) -> Varied:
    return Varied(value, np.full(2, value))


def test_the_area_between_curves_is_that_of_the_trapezoids():
    lost = [0.1, 0.2, 0.3, 0.4, 0.4]
    lines = {"attended": [varied(0.9 - value) for value in lost], "random": [varied(0.9)] * len(SHARES)}
    whole = varied(0.9)
    removed, kept = (Curves(kind, SHARES, lines, lines, whole, whole) for kind in ("deletion", "insertion"))
    by_deletion = np.trapezoid([0, *lost], [0, *SHARES]) / SHARES[-1]
    by_insertion = np.trapezoid([*lost, 0], [*SHARES, 1]) / (1 - SHARES[0])
    assert removed.gap("auroc", "random").value == pytest.approx(by_deletion)
    assert kept.gap("logit", "random").value == pytest.approx(-by_insertion)
    assert kept.gap("auroc", "attended", order="random").value == pytest.approx(by_insertion)
    both = worth({"deletion": removed, "insertion": kept}, "random")
    assert both.value == both.drawn[0] == pytest.approx((by_deletion - by_insertion) / 2)


def test_means_have_the_textbooks_standard_error():
    bags = paper_scans(400)
    values = torch.randn(400, generator=torch.Generator().manual_seed(2)).double()
    bootstrap = Bootstrap(bags)
    estimate = bootstrap.estimate(bootstrap.means({"it": values}, bags.labels.numpy() == 1)["it"])
    positive = values[bags.labels == 1]
    assert estimate.value == pytest.approx(positive.mean().item())
    reach = 1.96 * positive.std().item() / len(positive) ** 0.5
    assert (estimate.high - estimate.low) / 2 == pytest.approx(reach, rel=0.1)
    # A number that no scan has is not a number.
    unknown = bootstrap.estimate(bootstrap.mean(torch.full((400,), torch.nan).double()))
    assert (unknown.known, decide(unknown)) == (False, "cannot be told")
    assert str(unknown) == "- [too few scans for an interval]"


@pytest.mark.parametrize(
    ("low", "high", "verdict"),
    [(0.01, 0.2, "passes"), (-0.01, 0.2, "cannot be told"), (-0.2, 0.02, "fails"), (0.001, 0.02, "fails")],
)
def test_verdicts_are_by_the_whole_interval(low, high, verdict):
    assert decide(Estimate((low + high) / 2, low, high)) == verdict


def test_fresh_weights_differ_everywhere_and_leave_the_model_and_the_generator_alone():
    model = TransMIL(16)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1.0)
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    state = torch.get_rng_state()
    first, again, other = (untrained_copies(model)(seed).state_dict() for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    for name, tensor in model.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert torch.equal(first[name], again[name])
    for name in ("class_token", "classifier.weight"):
        assert not torch.equal(first[name], before[name])
        assert not torch.equal(first[name], other[name])
    # Shuffled: it has no reset.
    assert torch.equal(first["class_token"].sort().values, before["class_token"].sort().values)
