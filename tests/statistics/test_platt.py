"""The line from scores to log-odds beside scikit-learn's, and where it is hard to fit."""

import numpy as np
import pytest
import torch
from sklearn.calibration import _SigmoidCalibration
from sklearn.linear_model import LogisticRegression

from normal_guidance.statistics.calibration import fit_line


def draw(seed: int, scans: int = 120, shift: float = 1.5, scale: float = 1.0) -> tuple[torch.Tensor, torch.Tensor]:
    random = np.random.default_rng(seed)
    labels = random.random(scans) < 0.4
    labels[:2] = [True, False]
    logits = (random.normal(size=scans) + shift * labels - 0.5) * scale
    return torch.from_numpy(logits), torch.from_numpy(labels.astype(np.int64))


@pytest.mark.parametrize("scale", [1e-3, 1.0, 50.0])
@pytest.mark.parametrize("seed", [1, 2])
def test_the_line_is_that_of_scikit_learn(seed: int, scale: float) -> None:
    logits, labels = draw(seed, scale=scale)
    ours = fit_line(logits, labels)
    theirs = _SigmoidCalibration().fit(logits.numpy() / scale, labels.numpy())
    assert ours.slope * scale == pytest.approx(-theirs.a_, rel=1e-4)
    assert ours.intercept == pytest.approx(-theirs.b_, rel=1e-3, abs=1e-4)


def test_the_line_is_a_logistic_regression_on_smoothed_targets() -> None:
    logits, labels = draw(3)
    positive, negative = int(labels.sum()), int((1 - labels).sum())
    targets = np.where(labels == 1, (positive + 1) / (positive + 2), 1 / (negative + 2))
    # Each scan twice, once in each class, with its target as the weight.
    twice = np.concatenate([logits, logits])[:, None]
    classes = np.repeat([1, 0], len(logits))
    regression = LogisticRegression(C=1e12, tol=1e-10, max_iter=1000)
    regression.fit(twice, classes, sample_weight=np.concatenate([targets, 1 - targets]))
    ours = fit_line(logits, labels)
    assert ours.slope == pytest.approx(regression.coef_[0, 0], rel=1e-4)
    assert ours.intercept == pytest.approx(regression.intercept_[0], rel=1e-4)
    p = (ours.slope * logits + ours.intercept).sigmoid()
    assert p.mean().item() == pytest.approx(targets.mean(), abs=1e-6)  # what a fitted intercept does


def test_the_error_is_that_of_repeated_draws() -> None:
    lines = [fit_line(*draw(seed, scans=400)) for seed in range(60)]
    spread = np.std([line.slope for line in lines])
    assert np.mean([line.error for line in lines]) == pytest.approx(spread, rel=0.25)


def test_equal_scores_have_no_slope() -> None:
    line = fit_line(torch.ones(40), (torch.arange(40) % 4 == 0).long())
    assert (line.slope, line.error) == (0.0, 0.0)
    assert line.intercept == pytest.approx(np.log(10 / 30), abs=0.1)


def test_scores_that_differ_by_rounding_alone_have_no_slope() -> None:
    noise = 1e-16 * torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert fit_line(noise, torch.arange(40) % 2).slope == 0.0


def test_scores_that_separate_the_labels_have_a_finite_line() -> None:
    line = fit_line(torch.tensor([-2.0, -1.0, 1.0, 2.0]), torch.tensor([0, 0, 1, 1]))
    assert 0 < line.slope < 100
