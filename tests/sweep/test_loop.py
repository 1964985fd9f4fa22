"""Training follows the protocol: loss, optimizer and choice of the epoch, without the slice labels."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn

from normal_guidance.core.bags import Bags
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.methods import build_model
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.loop import EpochScores, predict_bags, select_epoch, train_model
from normal_guidance.sweep.stack import objective


@pytest.fixture(scope="module")
def sets() -> tuple[Bags, Bags]:
    return shifted_mean(128, 1, features=16, shift=3.0), shifted_mean(64, 2, features=16, shift=3.0)


def test_objective_is_the_sum_of_its_three_terms() -> None:
    model, lengths = build_model("ng", 8), torch.tensor([4, 7, 2])
    bags = Bags(torch.randn(13, 8), lengths, torch.tensor([0, 1, 1]))
    prediction = model(bags.features, bags.layout)
    guidance = NormalGuidance(3.0)
    got = objective(prediction, bags.labels, bags.layout, model.parameters(), l1=0.02, regularizer=guidance)
    bce = sum(
        math.log1p(math.exp(-x)) if y else math.log1p(math.exp(x))
        for x, y in zip(prediction.logit.tolist(), [0, 1, 1], strict=True)
    )
    weights = sum(parameter.abs().sum().item() for parameter in model.parameters())
    guide = 3 * sum(NormalGuidance()(bag[None]).item() for bag in prediction.attention.split([4, 7, 2])) / 3
    assert got.item() == pytest.approx(bce / 3 + 0.01 * weights + guide, rel=1e-5)


def test_the_best_epoch_is_kept(sets: tuple[Bags, Bags]) -> None:
    train, val = sets
    seen: list[EpochScores] = []
    result = train_model(Config("abmil", lr=0.1, epochs=12, batch_size=32), train, val, on_epoch=seen.append)
    assert result.history == tuple(seen)
    assert result.best is not None
    assert result.best == select_epoch(result.history)
    again = train_model(Config("abmil", lr=0.1, epochs=result.best.number, batch_size=32), train, val)
    for one, other in zip(result.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert result.history[-1].val_auroc > 0.9  # it learns


def test_select_epoch_by_the_papers_rule_takes_the_first_best_whose_training_is_above() -> None:
    assert (
        select_epoch((EpochScores(1, 0.7, 0.5, 0.9, 1.0), EpochScores(2, 0.6, 0.4, 0.5, 1.0)), train_above_val=True)
        is None
    )
    rows = [(0.9, 0.6, 0.3), (0.7, 0.8, 0.2), (0.9, 0.7, 0.6), (0.95, 0.7, 0.5)]
    history = tuple(EpochScores(number, 1.0, *row) for number, row in enumerate(rows, start=1))
    chosen = select_epoch(history, train_above_val=True)
    assert chosen is not None
    assert chosen.number == 3


def test_select_epoch_takes_the_best_of_all_and_of_equals_the_lowest_loss() -> None:
    rows = [(0.9, 0.8, 0.3), (0.7, 0.8, 0.2), (0.7, 0.8, 0.4), (0.95, 0.7, 0.1)]
    history = tuple(EpochScores(number, 1.0, *row) for number, row in enumerate(rows, start=1))
    chosen = select_epoch(history)
    assert chosen is not None
    assert chosen.number == 2
    assert select_epoch((EpochScores(1, 1.0, math.nan, math.nan, math.nan),)) is None  # a diverged configuration


def test_slice_labels_do_not_enter_training(sets: tuple[Bags, Bags]) -> None:
    train, val = sets
    config = Config("ng", lr=0.1, epochs=2, batch_size=32)
    with_labels = train_model(config, train, val)
    without = train_model(config, replace(train, slice_labels=None), replace(val, slice_labels=None))
    for one, other in zip(with_labels.model.parameters(), without.model.parameters(), strict=True):
        assert torch.equal(one, other)
    assert with_labels.history == without.history


def test_predictions_come_in_order_whatever_the_batch(sets: tuple[Bags, Bags]) -> None:
    _, val = sets
    model = build_model("transmil", 16)
    whole, parts = predict_bags(model, val, batch_size=64), predict_bags(model, val, batch_size=7)
    torch.testing.assert_close(whole.logit, parts.logit)
    torch.testing.assert_close(whole.log_attention, parts.log_attention)
    assert not whole.logit.requires_grad
    assert isinstance(model, nn.Module)
    assert model.training, "as it was before"


def test_a_prediction_leaves_every_part_of_the_model_in_its_mode():
    model = nn.Sequential(build_model("abmil", 4), nn.Dropout()).train()
    model[1].eval()
    bags = shifted_mean(4, seed=1, features=4)
    predict_bags(model[0], bags)
    assert [part.training for part in (model, model[0], model[0].hidden, model[1])] == [True, True, True, False]
    config = Config("abmil", epochs=1, batch_size=4)
    assert not train_model(
        config, shifted_mean(8, seed=1, features=4), shifted_mean(8, seed=2, features=4)
    ).model.training
