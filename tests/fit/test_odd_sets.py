"""Sets of scans that are not as they should be: each gives a sensible committee, or one sentence."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.fit.fit_committee import CommitteeFit, FoldPlan, fit_committee, make_plan
from normal_guidance.study.drawn import shifted_mean


def drawn(n: int, seed: int, shift: float = 2.0, **options: int) -> Bags:
    return shifted_mean(n, seed, features=12, shift=shift, **options)


def changed(scans: Bags, features: Callable[[torch.Tensor], torch.Tensor]) -> Bags:
    return replace(scans, features=features(scans.features))


def three_positives() -> Bags:
    scans = drawn(400, 5, 3.0)
    few = torch.cat([(scans.labels == 1).nonzero()[:3, 0], (scans.labels == 0).nonzero()[:40, 0]])
    return Bags.pack([scans[int(number)] for number in few])


def one_slice_scans() -> Bags:
    generator, labels = torch.Generator().manual_seed(6), torch.arange(60) % 2
    rows = torch.randn(60, 12, generator=generator)
    rows[:, 0] += 2.0 * labels
    return Bags(rows, torch.ones(60, dtype=torch.int64), labels, labels)


def the_same_scan_again() -> Bags:
    scans = drawn(10, 10)
    return Bags.pack([replace(scans[number % 10], scan_id=None, patient_id=None) for number in range(60)])


SETS: dict[str, Callable[[], Bags]] = {
    "planted": lambda: drawn(120, 1, 1.5),
    "all_easy": lambda: drawn(60, 2, 9.0),
    "no_signal": lambda: drawn(60, 3, 0.0),
    "twelve_scans": lambda: drawn(12, 4, 3.0),
    "three_positives": three_positives,
    "one_slice_scans": one_slice_scans,
    "constant_features": lambda: changed(drawn(40, 7), torch.ones_like),
    "huge_and_tiny_features": lambda: changed(drawn(120, 1, 1.5), lambda rows: rows * torch.logspace(-20, 18, 12)),
    "one_long_scan": lambda: Bags.pack([*drawn(60, 8), *drawn(4, 9, min_slices=900, max_slices=900)]),
    "the_same_scan_again": the_same_scan_again,
}


@cache
def fitted_set(name: str) -> tuple[Bags, CommitteeFit]:
    scans = SETS[name]()
    names = [str(number) for number in range(len(scans))]
    plan = make_plan(scans.labels.tolist(), names)
    return scans, fit_committee(scans, names, FoldPlan(min(3, plan.folds), repeats=1))


@pytest.mark.slow(but=("twelve_scans", "three_positives", "one_slice_scans", "constant_features", "planted"))
@pytest.mark.parametrize("name", SETS)
def test_an_odd_set_gives_finite_numbers(name: str) -> None:
    scans, found = fitted_set(name)
    prediction = found.committee(scans.features, scans.lengths)
    for values in (found.logits, found.attention, prediction.logit, prediction.attention, prediction.log_attention):
        assert values.isfinite().all()
    own = [part.sum().item() for part in prediction.attention.split(scans.lengths.tolist())]
    assert own == pytest.approx([1.0] * len(scans), abs=1e-4)


@pytest.mark.slow(but="planted")
@pytest.mark.parametrize("name", ["planted", "all_easy", "huge_and_tiny_features", "one_long_scan"])
def test_a_signal_is_found_however_easy_or_large(name: str) -> None:
    scans, found = fitted_set(name)
    assert auroc(found.logits, scans.labels) > 0.9
    located = localization(found.attention.clamp_min(1e-30).log(), scans.slice_labels, scans.lengths).auroc
    assert located.nanmean() > 0.85


def test_one_slice_scans_are_told_apart() -> None:
    scans, found = fitted_set("one_slice_scans")
    assert auroc(found.logits, scans.labels) > 0.7


def test_features_that_say_nothing_give_the_prior_and_the_frequency() -> None:
    scans, found = fitted_set("constant_features")
    assert found.committee.sharpness.max() == 0.0
    expected = torch.logit(scans.labels.double().mean())
    torch.testing.assert_close(found.logits, expected.expand(len(scans)), rtol=0, atol=0.5)


def test_one_patient_with_most_scans_stays_in_one_fold() -> None:
    scans = SETS["planted"]()
    patients = ["A" if number < 80 else str(number) for number in range(len(scans))]
    found = fit_committee(scans, patients, FoldPlan(3))
    assert len(found.folds[0, :80].unique()) == 1
    assert auroc(found.logits[:80], scans.labels[:80]) > 0.95
    assert auroc(found.logits[80:], scans.labels[80:]) > 0.9


@pytest.mark.parametrize(("labels", "said"), [([1, 1, 0, 0, 0], "2 positive scans"), ([0] * 9, "0 positive scans")])
def test_too_few_are_refused(labels: list[int], said: str) -> None:
    with pytest.raises(UserError, match=said):
        make_plan(labels, [str(number) for number in range(len(labels))])
