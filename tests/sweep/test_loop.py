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


def assert_equal_weights(model: nn.Module, other: nn.Module) -> None:
    assert all(map(torch.equal, model.parameters(), other.parameters()))


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
    seen: list[EpochScores] = []
    result = train_model(Config("abmil", lr=0.1, epochs=12, batch_size=32), *sets, on_epoch=seen.append)
    assert result.history == tuple(seen)
    assert result.best is not None
    assert result.best == select_epoch(result.history)
    again = train_model(Config("abmil", lr=0.1, epochs=result.best.number, batch_size=32), *sets)
    assert_equal_weights(result.model, again.model)
    assert result.history[-1].val_auroc > 0.9  # it learns


@pytest.mark.parametrize(
    ("train_above_val", "rows", "best"),
    [
        (True, [(0.5, 0.9, 1.0), (0.4, 0.5, 1.0)], None),
        (True, [(0.9, 0.6, 0.3), (0.7, 0.8, 0.2), (0.9, 0.7, 0.6), (0.95, 0.7, 0.5)], 3),  # the first of equals
        (False, [(0.9, 0.8, 0.3), (0.7, 0.8, 0.2), (0.7, 0.8, 0.4), (0.95, 0.7, 0.1)], 2),  # of equals the lowest loss
        (False, [(math.nan, math.nan, math.nan)], None),  # a diverged configuration
    ],
)
def test_select_epoch(train_above_val: bool, rows: list[tuple[float, float, float]], best: int | None) -> None:
    history = tuple(EpochScores(number, 1.0, *row) for number, row in enumerate(rows, start=1))
    chosen = select_epoch(history, train_above_val=train_above_val)
    assert (chosen and chosen.number) == best


def test_slice_labels_do_not_enter_training(sets: tuple[Bags, Bags]) -> None:
    config = Config("ng", lr=0.1, epochs=2, batch_size=32)
    blind = [replace(bags, slice_labels=None) for bags in sets]
    with_labels, without = train_model(config, *sets), train_model(config, *blind)
    assert with_labels.history == without.history
    assert_equal_weights(with_labels.model, without.model)


def test_predictions_come_in_order_whatever_the_batch(sets: tuple[Bags, Bags]) -> None:
    model = build_model("transmil", 16)
    whole, parts = predict_bags(model, sets[1], batch_size=64), predict_bags(model, sets[1], batch_size=7)
    torch.testing.assert_close(whole.logit, parts.logit)
    torch.testing.assert_close(whole.log_attention, parts.log_attention)
    assert not whole.logit.requires_grad


def test_a_prediction_leaves_every_part_of_the_model_in_its_mode(sets: tuple[Bags, Bags]) -> None:
    model = build_model("abmil", 16).train()
    model.hidden.eval()
    predict_bags(model, sets[1])
    assert [part.training for part in (model, model.hidden, model.classifier)] == [True, False, True]
    assert not train_model(Config("abmil", epochs=1, batch_size=64), *sets).model.training
