"""A committee finds planted signals, keeps to the prior where there is none, never sees the scans it predicts."""

from collections.abc import Callable
from dataclasses import replace
from functools import cache

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.bells import Places
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.fit.committee import Committee, effective_number, fit_scaling
from normal_guidance.fit.evidence import Fitted, Penalty, fit_evidence
from normal_guidance.fit.fit_committee import (
    CommitteeFit,
    FoldPlan,
    Setting,
    _assemble,
    _out_of_fold,
    fit_committee,
    make_plan,
    scale_scans,
)
from normal_guidance.study.drawn import shifted_mean
from small_bundle import few_settings


def names(scans: Bags) -> list[str]:
    return [str(number) for number in range(len(scans))]


@pytest.fixture(scope="module")
def planted() -> Bags:
    """Blocks anywhere in the scan, shown by one of eight features."""
    return shifted_mean(150, seed=1, features=8, shift=1.5)


@pytest.fixture(scope="module")
def found(planted: Bags) -> CommitteeFit:
    return fit_three(planted)


def test_a_planted_signal_is_found_in_scans_that_were_not_seen(planted: Bags, found: CommitteeFit) -> None:
    new = shifted_mean(100, seed=2, features=8, shift=1.5)
    prediction = found.committee(new.features, new.lengths)
    assert auroc(prediction.logit, new.labels) > 0.95
    assert localization(prediction.slice_scores, new.slice_labels, new.lengths).auroc.nanmean() > 0.9
    assert auroc(found.logits, planted.labels) > 0.95
    assert localization(found.attention.log(), planted.slice_labels, planted.lengths).auroc.nanmean() > 0.9


@pytest.mark.parametrize("power", [1.0, 4.0])
def test_what_is_out_of_fold_comes_from_members_that_were_not_trained_on_the_scan(planted: Bags, power: float) -> None:
    scaling, folds, places = fit_scaling(planted), torch.arange(len(planted)) % 3, Places(3.0, central=False)
    fitted = fit_evidence(scale_scans(planted, scaling), folds, places, [Penalty("ridge", 1.0)], power=power)[-1]
    committee = _assemble(scaling, [places], [[(fitted, 0)]], shown=True)
    for scan in (6, 7, 8):
        own, start = planted[scan], int(planted.lengths[:scan].sum())
        prediction = committee.of([int(folds[scan])])(own.features, [len(own.features)])
        assert prediction.logit.item() == pytest.approx(fitted.logits[0, scan].item(), abs=1e-4)
        shown = fitted.attention[0, start : start + len(own.features)]
        torch.testing.assert_close(prediction.attention, shown, rtol=1e-3, atol=1e-6)


def fit_three(scans: Bags, patients: list[str] | None = None, repeats: int = 1) -> CommitteeFit:
    return fit_committee(scans, patients or names(scans), FoldPlan(folds=3, repeats=repeats))


def test_what_every_slice_says_tells_scans_apart_and_leaves_attention_in_the_middle() -> None:
    scans = shifted_mean(120, seed=5, features=8, shift=0.0)
    scans.features[:, 3] += 0.6 * scans.labels.repeat_interleave(scans.lengths)
    fitted = fit_three(scans)
    assert not fitted.choice.unusual
    assert any(fitted.settings[number].places.whole_scan for number in fitted.choice.kept)
    assert auroc(fitted.logits, scans.labels) > 0.95
    attention, lengths = fitted.attention.split(scans.lengths.tolist()), scans.lengths.tolist()
    middle = [own[size // 4 : size - size // 4].sum().item() for own, size in zip(attention, lengths, strict=True)]
    assert sum(middle) > 0.65 * len(middle)  # a half if all places were alike


def test_settings_are_chosen_without_the_scans_that_they_predict() -> None:
    """Setting 0 is right in folds 1 and 2, setting 1 in fold 0 alone: fold 0 is predicted by setting 0."""
    labels, folds = torch.arange(60) % 2, torch.arange(60) // 20
    kinds = [Places(reach, central=True) for reach in (1.0, 2.0, None)]
    settings = [Setting(places, 1.0, Penalty("ridge", 1.0), 1) for places in kinds]
    right, noise = 4.0 * (2 * labels.double() - 1), 0.1 * torch.randn(60, generator=torch.Generator().manual_seed(0))
    turned = torch.where(folds == 0, -right, right)
    logits = torch.stack([turned, -turned, -right]) + noise
    scans = Bags(torch.zeros(60, 1), torch.ones(60, dtype=torch.int64), labels)
    none = torch.zeros(3, 3, dtype=torch.float64)
    fitted = Fitted(none[:, :, None], none, none, none, logits, torch.tensor([[0.25], [0.75], [0.5]]).expand(3, 60))
    fits = [[(fitted, setting) for setting in range(3)]]
    own, attention = _out_of_fold(settings, fits, logits[None], folds[None], scans, names(scans))
    torch.testing.assert_close(own[:20], logits[0, :20])
    assert (attention[:20] == 0.25).all()


def test_the_label_of_a_scan_does_not_change_the_members_that_predict_it(planted: Bags) -> None:
    folds = torch.arange(len(planted)) % 3
    scaled = scale_scans(planted, fit_scaling(planted))
    other = Bags(scaled.features, scaled.lengths, torch.where(folds == 0, 1 - scaled.labels, scaled.labels))
    places, penalties = Places(3.0, central=False), [Penalty("ridge", 1.0)]
    first, changed = (fit_evidence(scans, folds, places, penalties, turns=1)[0] for scans in (scaled, other))
    direction, again = (one.weights[0, 0] / one.weights[0, 0].norm() for one in (first, changed))
    torch.testing.assert_close(direction, again, rtol=0, atol=1e-4)
    # The size of a fold's evidence comes from the log-odds of the other folds.
    assert first.sharpness[0] != changed.sharpness[1]


def test_without_a_signal_attention_is_the_prior(monkeypatch: pytest.MonkeyPatch) -> None:
    few_settings(monkeypatch, REACHES=(0.0, 1 / 20, 0.15), RIDGES=(0.3, 3.0))
    noise = shifted_mean(60, seed=4, features=8, shift=0.0)
    fitted = fit_three(noise, repeats=2)
    assert not fitted.choice.unusual
    assert not fitted.choice.shown
    assert fitted.committee.sharpness.mean() < 0.3
    prior = fitted.committee.prior(noise.lengths)
    again = Committee.from_json(fitted.committee.as_json(), fitted.committee.state_dict())
    for committee in (fitted.committee, again):
        torch.testing.assert_close(committee(noise.features, noise.lengths).attention, prior)
    with pytest.raises(ValueError, match="members"):
        Committee.from_json({**again.as_json(), "members": 1}, again.state_dict())
    shown = (fitted.attention, prior)
    own, centre = (localization(values, noise.slice_labels, noise.lengths).mean_auroc for values in shown)
    assert abs(own - centre) < 0.05  # other settings may be chosen without a fold


def test_few_scans_are_divided_often_and_too_few_are_refused() -> None:
    assert make_plan([0, 1] * 6, [str(n) for n in range(12)]) == FoldPlan(folds=5, repeats=5)
    assert make_plan([0] * 9 + [1] * 3, [str(n) for n in range(12)]).folds == 3
    assert make_plan([0, 1] * 1000, [str(n) for n in range(2000)]).repeats == 1
    for labels, patients, message in (
        ([0, 1] * 6, ["A", "B"] * 6, "3 patients of each"),
        ([1, 1, 0, 0, 0], list("ABCDE"), "2 positive scans"),
        ([0] * 9, list("ABCDEFGHI"), "0 positive scans"),
    ):
        with pytest.raises(UserError, match=message):
            make_plan(labels, patients)


def test_features_that_repeat_each_other_are_decorrelated() -> None:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(600, 3, generator=generator)
    features = hidden @ torch.randn(3, 40, generator=generator) * 7 + 5 + 0.01 * torch.randn(600, 40)
    features[:, 3] = 2.0  # always the same
    scans = Bags(features, torch.full((60,), 10), torch.arange(60) % 2)
    scaling = fit_scaling(scans, components=3)
    rows = scaling(features)
    assert rows.shape == (600, 3)
    torch.testing.assert_close(rows.T.cov(correction=0), torch.eye(3), atol=1e-3, rtol=1e-3)
    assert effective_number(torch.ones(7)) == pytest.approx(7.0)


def test_features_of_their_own_stay_as_they_are_but_of_one_size() -> None:
    scans = shifted_mean(40, seed=1, features=6)
    sized = replace(scans, features=scans.features * torch.tensor([1.0, 9.0, 0.1, 1.0, 1.0, 0.0]) + 3.0)
    scaling = fit_scaling(sized)
    rows = scaling(sized.features)
    assert scaling.rotation is None
    torch.testing.assert_close(rows.std(0), torch.tensor([1.0] * 5 + [0.0]), atol=1e-3, rtol=1e-3)


# Sets of scans that are not as they should be: each gives a sensible committee, or one sentence.


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
    plan = make_plan(scans.labels.tolist(), names(scans))
    return scans, fit_committee(scans, names(scans), FoldPlan(min(3, plan.folds), repeats=1))


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


def test_one_slice_scans_are_told_apart_and_features_that_say_nothing_give_the_prior_and_the_frequency() -> None:
    scans, found = fitted_set("one_slice_scans")
    assert auroc(found.logits, scans.labels) > 0.7
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
