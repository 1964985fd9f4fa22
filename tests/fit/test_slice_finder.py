"""`SliceFinder` has scikit-learn's habits, does what `nguide fit` does, and refuses bad scans in one line."""

import pickle
from collections.abc import Iterator
from dataclasses import replace

import numpy as np
import pytest
import torch
from sklearn.base import clone, is_classifier
from sklearn.exceptions import NotFittedError
from sklearn.metrics import accuracy_score, roc_auc_score
from sklearn.model_selection import cross_val_score

import normal_guidance
from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.fit import measured
from normal_guidance.fit.fit_ensemble import FoldPlan, fit_ensemble
from normal_guidance.fit.slice_finder import SliceFinder
from normal_guidance.front import fitted_model
from normal_guidance.scans.features.store import write_store
from normal_guidance.statistics.calibration import choose_operation
from normal_guidance.study.drawn import shifted_mean
from small_bundle import few_settings

QUICK = {"folds": 3}


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    """The finder's habits do not depend on the number of kinds and steps, but the time does."""
    with pytest.MonkeyPatch.context() as patch:
        few_settings(patch)
        yield


@pytest.fixture(scope="module")
def train() -> Bags:
    return shifted_mean(45, seed=1, features=4, shift=1.5)


@pytest.fixture(scope="module")
def new() -> Bags:
    return shifted_mean(25, seed=2, features=4, shift=1.5)


@pytest.fixture(scope="module")
def finder(train: Bags) -> SliceFinder:
    return SliceFinder(**QUICK).fit(train)


def test_it_is_the_ensemble_with_its_calibration(train: Bags, new: Bags, finder: SliceFinder):
    fit = fit_ensemble(train, train.patient_ids, FoldPlan(folds=3))
    operation = choose_operation(fit.logits, train.labels, scans="out-of-fold")
    own = fit.ensemble(new.features, new.lengths)
    np.testing.assert_allclose(finder.decision_function(new), own.logit, rtol=1e-6)
    torch.testing.assert_close(finder.find_slices(new), own.attention)
    positive = [operation.calibration.probability(logit) for logit in own.logit.tolist()]
    np.testing.assert_allclose(finder.predict_proba(new)[:, 1], positive, rtol=1e-6)
    np.testing.assert_allclose(finder.predict_proba(new).sum(1), 1.0)
    assert finder.predict(new).tolist() == [int(one >= operation.point.threshold) for one in positive]
    np.testing.assert_array_equal(finder.out_of_fold_logits_, fit.logits)
    torch.testing.assert_close(finder.out_of_fold_attention_, fit.attention)


def test_a_planted_signal_is_found(new: Bags, finder: SliceFinder):
    assert finder.score(new) == accuracy_score(new.labels, finder.predict(new)) > 0.8
    assert roc_auc_score(new.labels, finder.decision_function(new)) > 0.9
    assert finder.sentences_[0].startswith("It finds the slices better than position does: +.")
    assert finder.out_of_fold_.specific.difference > 0.1
    sums = [own.sum().item() for own in finder.find_slices(new).split(new.lengths.tolist())]
    assert sums == pytest.approx([1.0] * len(new), abs=1e-4)


def test_intervals_hold_the_finding(train: Bags, new: Bags, finder: SliceFinder):
    first, last = finder.find_intervals(new)
    own = finder.interval_calibration_.interval(finder.find_slices(new), new.lengths)
    torch.testing.assert_close((first, last), own)
    plain = replace(train, slice_labels=None)
    without = SliceFinder(**QUICK).fit(plain)
    assert without.interval_calibration_ is None
    with pytest.raises(UserError, match=r"Intervals promise nothing .* needs 9, better 30; fit the finder to more"):
        without.find_intervals(new)
    with pytest.raises(UserError, match="no patients have a positive scan with slice labels, but intervals with"):
        SliceFinder(**QUICK, coverage=0.8).fit(plain)


def test_fitting_has_no_side_effects_and_repeats_itself(train: Bags, finder: SliceFinder, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    features, labels = train.features.clone(), train.labels.clone()
    chance, threads = torch.get_rng_state(), torch.get_num_threads()
    numpys = np.random.get_state()[1].copy()  # noqa: NPY002 (the global state that fitting must leave alone)
    again = clone(finder)
    assert again.fit(train) is again
    assert torch.equal(train.features, features)
    assert torch.equal(train.labels, labels)
    assert torch.equal(torch.get_rng_state(), chance)
    np.testing.assert_array_equal(np.random.get_state()[1], numpys)  # noqa: NPY002
    assert torch.get_num_threads() == threads
    assert torch.is_grad_enabled()
    assert list(tmp_path.iterdir()) == []
    torch.testing.assert_close(again.ensemble_.state_dict(), finder.ensemble_.state_dict(), rtol=0, atol=0)
    assert again.threshold_ == finder.threshold_


def test_it_is_cloned_shown_and_pickled(new: Bags, finder: SliceFinder):
    copy = clone(SliceFinder(folds=3, seed=7).set_params(coverage=0.8))
    assert is_classifier(copy)
    assert repr(copy) == "SliceFinder(coverage=0.8, folds=3, seed=7)"
    again = pickle.loads(pickle.dumps(finder))
    np.testing.assert_array_equal(again.predict_proba(new), finder.predict_proba(new))
    assert again.sentences_ == finder.sentences_


def test_scans_in_every_form_are_the_same(new: Bags, finder: SliceFinder, tmp_path):
    known = finder.decision_function(new)
    store = write_store(tmp_path / "store", [("train", new)], provenance={"encoder": "drawn"})
    arrays = [bag.features.numpy() for bag in new]
    for scans in (list(new), arrays, [bag.features for bag in new], store):
        np.testing.assert_allclose(finder.decision_function(scans), known, rtol=1e-6)
    assert finder.score(arrays, new.labels.numpy()) == finder.score(new) == finder.score(store)


def test_patients_share_a_fold_in_bags_arrays_and_folders(train: Bags, finder: SliceFinder, tmp_path, monkeypatch):
    arrays, patients = [bag.features.numpy() for bag in train], [f"P{n // 2}" for n in range(len(train))]
    labels = train.labels.numpy()
    made = SliceFinder(**QUICK).fit(arrays, labels, groups=patients)
    of_bags = SliceFinder(**QUICK).fit(train, groups=patients)
    np.testing.assert_array_equal(made.out_of_fold_logits_, of_bags.out_of_fold_logits_)
    assert not np.array_equal(made.out_of_fold_logits_, finder.out_of_fold_logits_)  # each scan a patient of its own
    assert made.out_of_fold_.gain is None  # arrays have no slice labels
    monkeypatch.setattr(fitted_model, "make_plan", lambda *_, seed: FoldPlan(3, seed))
    of_fit = normal_guidance.fit(arrays, labels, out=tmp_path / "model", patient_ids=patients)
    np.testing.assert_array_equal(of_fit.measured.fit.logits, made.out_of_fold_logits_)


@pytest.mark.slow
def test_scikit_learn_validates_it(train: Bags):
    scores = cross_val_score(SliceFinder(**QUICK), train, train.labels.numpy(), cv=2, scoring="roc_auc")
    assert scores.min() > 0.7


def test_a_finder_that_was_not_fitted_says_so(new: Bags):
    for method in ("predict", "predict_proba", "decision_function", "find_slices", "find_intervals", "score"):
        with pytest.raises(NotFittedError, match="SliceFinder instance is not fitted"):
            getattr(SliceFinder(), method)(new)


def fit_features(labels: list[int] | None = None, **options: object) -> SliceFinder:
    return SliceFinder(**options).fit([torch.randn(3, 2) for _ in range(8)], labels)


HALF = [0, 1] * 4
NAN = torch.tensor([[0.0] * 4] * 2 + [[np.nan] * 4])


@pytest.mark.parametrize(  # the page of errors (docs/errors_page.py) has the others
    ("act", "message"),
    [
        (lambda _: fit_features([1] * 8), "labels have 1 different values"),
        (lambda _: fit_features(HALF, folds=5), "cannot be divided into 5 folds"),
        (lambda _: fit_features(HALF, folds=2), "folds is 2; give a whole number of at least 3"),
        (lambda finder: finder.predict([torch.zeros(3, 4), NAN]), "scan 'scan-1', position 2, feature 0: value nan"),
        (lambda finder: finder.predict(shifted_mean(4, seed=1, features=4)[:0]), "there is nothing to predict"),
        (lambda finder: finder.ensemble_(torch.zeros(3, 4)), "a model takes features and the slices of each scan"),
    ],
)
def test_mistakes_are_refused_in_one_line(finder: SliceFinder, act, message: str, unchecked: None):
    with pytest.raises(UserError, match=message) as caught:
        act(finder)
    assert "\n" not in str(caught.value)


def test_test_scans_of_another_width_are_refused_before_the_fit(train: Bags, monkeypatch):
    monkeypatch.setattr(measured, "fit_ensemble", lambda *_, **__: pytest.fail("it was fitted first"))
    other = replace(shifted_mean(9, seed=3, features=2), patient_ids=tuple(f"other-{n}" for n in range(9)))
    with pytest.raises(UserError, match="test scans have 2 features, training scans 4; encode both alike"):
        measured.fit_and_measure(train, test=other)
