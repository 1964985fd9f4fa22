"""Sets of scans that are not as they should be: each gives a sensible committee, or one sentence."""

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.fit.fit_committee import (
    CommitteeFit,
    FoldPlan,
    fit_committee,
    make_plan,
)
from normal_guidance.study.drawn import shifted_mean


def names(scans: Bags) -> list[str]:
    return [str(number) for number in range(len(scans))]


def changed(scans: Bags, features: Callable[[torch.Tensor], torch.Tensor]) -> Bags:
    return Bags(features(scans.features), scans.lengths, scans.labels, scans.slice_labels)


def planted() -> Bags:
    return shifted_mean(120, 1, features=12, shift=1.5)


def all_easy() -> Bags:
    return shifted_mean(60, 2, features=12, shift=9.0)


def no_signal() -> Bags:
    return shifted_mean(60, 3, features=12, shift=0.0)


def twelve_scans() -> Bags:
    return shifted_mean(12, 4, features=12, shift=3.0)


def three_positives() -> Bags:
    scans = shifted_mean(400, 5, features=12, shift=3.0)
    few = torch.cat([(scans.labels == 1).nonzero()[:3, 0], (scans.labels == 0).nonzero()[:40, 0]])
    return Bags.pack([scans[int(number)] for number in few])


def one_slice_scans() -> Bags:
    generator = torch.Generator().manual_seed(6)
    labels = torch.arange(60) % 2
    rows = torch.randn(60, 12, generator=generator)
    rows[:, 0] += 2.0 * labels
    return Bags(rows, torch.ones(60, dtype=torch.int64), labels, labels)


def constant_features() -> Bags:
    return changed(shifted_mean(40, 7, features=12, shift=2.0), lambda rows: torch.ones_like(rows))


def huge_and_tiny_features() -> Bags:
    return changed(planted(), lambda rows: rows * torch.logspace(-20, 18, 12))


def one_long_scan() -> Bags:
    short, long = (
        shifted_mean(60, 8, features=12, shift=2.0),
        shifted_mean(4, 9, features=12, shift=2.0, min_slices=900, max_slices=900),
    )
    return Bags.pack([*(short[number] for number in range(60)), *(long[number] for number in range(4))])


def the_same_scan_again() -> Bags:
    scans = shifted_mean(10, 10, features=12, shift=2.0)
    return Bags.pack([replace(scans[number % 10], scan_id=None, patient_id=None) for number in range(60)])


SETS = {
    make.__name__: make
    for make in (
        planted,
        all_easy,
        no_signal,
        twelve_scans,
        three_positives,
        one_slice_scans,
        constant_features,
        huge_and_tiny_features,
        one_long_scan,
        the_same_scan_again,
    )
}


def fitted(scans: Bags) -> CommitteeFit:
    plan = make_plan(scans.labels.tolist(), names(scans))
    return fit_committee(scans, names(scans), FoldPlan(min(3, plan.folds), repeats=1))


@pytest.mark.parametrize("name", SETS)
def test_an_odd_set_gives_finite_numbers(name: str) -> None:
    scans = SETS[name]()
    found = fitted(scans)
    prediction = found.committee(scans.features, scans.lengths)
    for values in (found.logits, found.attention, prediction.logit, prediction.attention, prediction.log_attention):
        assert values.isfinite().all()
    own = [part.sum().item() for part in prediction.attention.split(scans.lengths.tolist())]
    assert own == pytest.approx([1.0] * len(scans), abs=1e-4)


@pytest.mark.parametrize("name", ["planted", "all_easy", "huge_and_tiny_features", "one_long_scan"])
def test_a_signal_is_found_however_easy_or_large(name: str) -> None:
    scans = SETS[name]()
    found = fitted(scans)
    assert auroc(found.logits, scans.labels) > 0.9
    located = localization(found.attention.clamp_min(1e-30).log(), scans.slice_labels, scans.lengths).auroc
    assert located.nanmean() > 0.85


def test_one_slice_scans_are_told_apart() -> None:
    scans = one_slice_scans()
    assert auroc(fitted(scans).logits, scans.labels) > 0.7


def test_features_that_say_nothing_give_the_prior_and_the_frequency() -> None:
    scans = constant_features()
    found = fitted(scans)
    assert found.committee.sharpness.max() == 0.0
    expected = torch.logit(scans.labels.double().mean())
    torch.testing.assert_close(found.logits, expected.expand(len(scans)), rtol=0, atol=0.5)


def test_one_patient_with_most_scans_stays_in_one_fold() -> None:
    scans = planted()
    patients = ["A" if number < 80 else str(number) for number in range(len(scans))]
    found = fit_committee(scans, patients, FoldPlan(3))
    assert len(found.folds[0, :80].unique()) == 1
    assert auroc(found.logits[:80], scans.labels[:80]) > 0.95
    assert auroc(found.logits[80:], scans.labels[80:]) > 0.9


@pytest.mark.parametrize(("labels", "said"), [([1, 1, 0, 0, 0], "2 positive scans"), ([0] * 9, "0 positive scans")])
def test_too_few_are_refused(labels: list[int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_plan(labels, [str(number) for number in range(len(labels))])
