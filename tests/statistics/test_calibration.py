"""Lines and thresholds against scikit-learn and against counting, and what a validation set cannot tell."""

import json
from dataclasses import asdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.calibration import _SigmoidCalibration
from sklearn.metrics import roc_curve

from normal_guidance.base.errors import UserError
from normal_guidance.base.records import read_as
from normal_guidance.statistics.calibration import (
    Calibration,
    Operation,
    choose_operation,
    count,
    describe,
    fit_lines,
    sensitive_threshold,
    youden_threshold,
)


def draw(seed: int, scans: int = 120, shift: float = 1.5, scale: float = 1.0):
    random = np.random.default_rng(seed)
    labels = random.random(scans) < 0.4
    labels[:2] = [True, False]
    logits = (random.normal(size=scans) + shift * labels - 0.5) * scale
    return torch.from_numpy(logits), torch.from_numpy(labels.astype(np.int64))


def test_separated_scans_have_a_finite_calibration_and_a_note():
    logits, labels = torch.tensor([-3.0, -2.0, 4.0, 5.0]).double(), torch.tensor([0, 0, 1, 1])
    chosen = choose_operation(logits, labels)
    assert 0.5 < chosen.calibration.probability(5.0) < 0.99
    assert count(logits, labels, 1.0) == chosen.point.validation
    assert chosen.point.threshold == pytest.approx(chosen.calibration.probability(1.0))  # the middle of the gap
    assert "separated without an error" in chosen.notes[0]
    assert "only 2 positive and 2 negative" in chosen.notes[1]


@given(st.integers(0, 10_000), st.integers(4, 60))
def test_youden_is_the_best_point_of_the_roc_curve(seed, scans):
    logits, labels = draw(seed, scans)
    logits = (logits * 2).round()  # ties
    false, true, _ = roc_curve(labels, logits)
    reached = count(logits, labels, youden_threshold(logits, labels))
    assert reached.sensitivity + reached.specificity - 1 == pytest.approx((true - false).max())


@given(st.integers(0, 10_000), st.integers(4, 60), st.sampled_from([0.3, 0.8, 0.95, 1.0]))
def test_no_higher_threshold_is_as_sensitive(seed, scans, target):
    logits, labels = draw(seed, scans)
    level = sensitive_threshold(logits, labels, target)
    assert count(logits, labels, level).sensitivity >= target - 1e-9
    higher = [logit for logit in logits.tolist() if logit > level]
    assert all(count(logits, labels, other + 1e-9).sensitivity < target - 1e-9 for other in higher)


@pytest.mark.parametrize("sensitivity", [None, 0.9, 1.0])
def test_probabilities_at_the_threshold_are_positive_in_both_sets(sensitivity):
    logits, labels = draw(7)
    other, truth = draw(9, scans=50)
    chosen = choose_operation(logits, labels, sensitivity=sensitivity, test=(other, truth))
    for scores, known, counts in ((logits, labels, chosen.point.validation), (other, truth, chosen.point.test)):
        probabilities = [chosen.calibration.probability(score) for score in scores.tolist()]
        positive = torch.tensor(probabilities, dtype=torch.float64) >= chosen.point.threshold
        assert counts.found == int((positive & (known == 1)).sum())
        assert counts.spared == int((~positive & (known == 0)).sum())
    assert f"on the test scans {chosen.point.test}" in describe(chosen)[0]


def test_one_class_leaves_everything_open():
    chosen = choose_operation(torch.tensor([0.5, 1.0]), torch.tensor([1, 1]))
    assert (chosen.calibration, chosen.point) == (Calibration(), None)
    assert "2 positive and 0 negative scans" in chosen.notes[0]
    assert describe(chosen)[0] == "No threshold was chosen."
    with pytest.raises(UserError, match=r"give no threshold for sensitivity 0.9; leave out --sensitivity"):
        choose_operation(torch.tensor([0.5, 1.0]), torch.tensor([0, 0]), sensitivity=0.9)
    assert choose_operation(torch.zeros(0), torch.zeros(0, dtype=torch.int64)).point is None


@pytest.mark.parametrize(
    ("logits", "note"), [([1.0, 1.0, 1.0, 1.0], "same logit"), ([3.0, 2.0, 0.0, -1.0], "higher logits do not go with")]
)
def test_what_cannot_be_calibrated_is_not(logits, note):
    chosen = choose_operation(torch.tensor(logits), torch.tensor([0, 0, 1, 1]))
    assert chosen.calibration == Calibration()
    assert note in chosen.notes[-1]


@pytest.mark.parametrize(
    ("logit", "sensitivity", "message"),
    [
        *((1.0, sensitivity, "give a share above 0 and at most 1") for sensitivity in (0.0, 1.1, -1.0)),
        (torch.nan, None, "not a finite number"),
    ],
)
def test_an_impossible_sensitivity_and_a_diverged_model_are_refused(logit, sensitivity, message):
    with pytest.raises(UserError, match=message):
        choose_operation(torch.tensor([0.0, logit]), torch.tensor([0, 1]), sensitivity=sensitivity)


def test_json_and_back():
    for chosen in (choose_operation(*draw(1), test=draw(2)), choose_operation(torch.ones(1), torch.tensor([1]))):
        assert read_as(Operation, json.loads(json.dumps(asdict(chosen)))) == chosen


def fit_line(scores, labels):
    """(slope, intercept, error) of one line."""
    return [value.item() for value in fit_lines(scores[None], labels, torch.ones(1, len(scores), dtype=torch.bool))]


@pytest.mark.parametrize(("seed", "scale"), [(1, 1e-3), (2, 1.0), (1, 50.0)])
def test_the_line_is_that_of_scikit_learn(seed, scale):
    logits, labels = draw(seed, scale=scale)
    slope, intercept, _ = fit_line(logits, labels)
    theirs = _SigmoidCalibration().fit(logits.numpy() / scale, labels.numpy())
    assert slope * scale == pytest.approx(-theirs.a_, rel=1e-4)
    assert intercept == pytest.approx(-theirs.b_, rel=1e-3, abs=1e-4)


def test_scores_without_a_line():
    """Equal scores, or those that differ by rounding alone, have no slope; separated ones have a finite line."""
    slope, intercept, error = fit_line(torch.ones(40), (torch.arange(40) % 4 == 0).long())
    assert (slope, error) == (0.0, 0.0)
    assert intercept == pytest.approx(np.log(10 / 30), abs=0.1)
    noise = 1e-16 * torch.randn(40, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    assert fit_line(noise, torch.arange(40) % 2)[0] == 0.0
    assert 0 < fit_line(torch.tensor([-2.0, -1.0, 1.0, 2.0]), torch.tensor([0, 0, 1, 1]))[0] < 100
