"""Methods beyond the paper train like those of the paper: they resume bit for bit, and L1 spares some parameters."""

import pytest
import torch

from normal_guidance.core.methods import BEYOND
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.loop import train_model
from normal_guidance.sweep.stack import Stack, descend

FEATURES = 16


@pytest.mark.parametrize("method", BEYOND)
def test_l1_moves_all_but_what_it_leaves_alone(method: str) -> None:
    stack = Stack.of([Config(method, lr=0.1, l1=1.0), Config(method, lr=0.1, l1=0.0)], FEATURES)
    parameters, unpenalized = stack.initial_parameters(), BEYOND[method].unpenalized
    before = {name: theta.clone() for name, theta in parameters.items()}
    zeros = {name: torch.zeros_like(theta) for name, theta in parameters.items()}
    penalty = descend(
        parameters, list(zeros.values()), {name: t.clone() for name, t in zeros.items()},
        lr=stack.lr, l1=stack.l1, momentum=0.9, clip_norm=1.0, unpenalized=unpenalized,
    )  # fmt: skip
    for name, theta in parameters.items():
        assert theta[1].equal(before[name][1])
        penalized = name not in unpenalized and bool(before[name][0].any())  # what starts at 0 has no sign to follow
        assert theta[0].equal(before[name][0]) != penalized, name
    counted = sum(theta[0].abs().sum() for name, theta in before.items() if name not in unpenalized)
    torch.testing.assert_close(penalty, torch.stack([0.5 * counted, torch.zeros(())]))


def test_strong_l1_leaves_no_evidence_and_the_windows_as_they_were() -> None:
    """With a penalty on width and sharpness, their logarithms would end at 0, so both at 1."""
    train, val = (shifted_mean(64, seed, features=FEATURES) for seed in (1, 2))
    model = train_model(Config("whole_bells", lr=0.1, l1=50.0, epochs=40, batch_size=16), train, val).model
    assert model.classifier.weight.abs().max() < 0.2
    assert model.attention.log_sigma.exp().item() == pytest.approx(3.0, abs=0.5)
    assert model.attention.log_beta.exp().item() == pytest.approx(0.25, abs=0.05)
