"""Probabilities and thresholds against scikit-learn and against counting, and what a validation set cannot tell."""

import json

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_curve

from normal_guidance.base.errors import UserError
from normal_guidance.base.records import read_as
from normal_guidance.statistics.calibration import (
    Calibration,
    Operation,
    choose_operation,
    count,
    describe,
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


def test_many_overlapping_scans_need_no_note():
    assert choose_operation(*draw(5, scans=200)).notes == ()


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
    higher = [one for one in logits.tolist() if one > level]
    assert all(count(logits, labels, one + 1e-9).sensitivity < target - 1e-9 for one in higher)


def test_a_scan_at_the_threshold_is_positive_also_as_a_probability():
    logits, labels = draw(7)
    for sensitivity in (None, 0.9, 1.0):
        chosen = choose_operation(logits, labels, sensitivity=sensitivity)
        positive = torch.tensor(
            [chosen.calibration.probability(one) >= chosen.point.threshold for one in logits.tolist()]
        )
        assert int((positive & (labels == 1)).sum()) == chosen.point.validation.found
        assert int((~positive & (labels == 0)).sum()) == chosen.point.validation.spared


def test_test_scans_are_counted_at_the_same_threshold():
    logits, labels = draw(8)
    other, truth = draw(9, scans=50)
    chosen = choose_operation(logits, labels, test=(other, truth))
    positive = torch.tensor([chosen.calibration.probability(one) >= chosen.point.threshold for one in other.tolist()])
    assert chosen.point.test.found == int((positive & (truth == 1)).sum())
    assert chosen.point.test.spared == int((~positive & (truth == 0)).sum())
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
    assert any(note in one for one in chosen.notes)


@pytest.mark.parametrize("sensitivity", [0.0, 1.1, -1.0])
def test_an_impossible_sensitivity_is_refused(sensitivity):
    with pytest.raises(UserError, match="give a share above 0 and at most 1"):
        choose_operation(*draw(1), sensitivity=sensitivity)


def test_a_diverged_model_is_refused():
    with pytest.raises(UserError, match="not a finite number"):
        choose_operation(torch.tensor([0.0, torch.nan]), torch.tensor([0, 1]))


def test_json_and_back():
    for chosen in (choose_operation(*draw(1), test=draw(2)), choose_operation(torch.ones(1), torch.tensor([1]))):
        assert read_as(Operation, json.loads(json.dumps(chosen.as_json()))) == chosen
