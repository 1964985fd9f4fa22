"""Fitted ensembles find planted signals, keep to the prior where there is none, never see the scans they predict."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.core.layout import Layout
from normal_guidance.core.metrics import auroc, localization
from normal_guidance.fit import fit_ensemble as fitting
from normal_guidance.fit.ensemble import Ensemble, MemberKind, Members, Scaling, fit_scalings, prior_attention
from normal_guidance.fit.fit_ensemble import (
    KINDS,
    EnsembleFit,
    FoldPlan,
    KindTraining,
    OutOfFold,
    choose,
    fit_ensemble,
    groups_of,
    make_plan,
    predict_out_of_fold,
    together,
)
from normal_guidance.statistics.skill import ScoredSlices
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.stack import Stack
from small_bundle import few_settings

PLAN = FoldPlan(folds=3)
OWN_SCANS = pytest.mark.parametrize("kind", [KINDS[0], KINDS[2], KINDS[5]], ids=lambda kind: kind.method)


@pytest.fixture(scope="module", autouse=True)
def quick() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        few_settings(patch)
        yield


def names(scans: Bags) -> list[str]:
    return [str(number) for number in range(len(scans))]


def fit(scans: Bags, patients: list[str] | None = None, **options: object) -> EnsembleFit:
    return fit_ensemble(scans, patients or names(scans), PLAN, **options)


def gain(scans: Bags, attention: torch.Tensor) -> float:
    return ScoredSlices(attention.clamp_min(1e-30).log(), scans.slice_labels, scans.lengths).gain().gain


@pytest.fixture(scope="module")
def planted() -> Bags:
    """Blocks anywhere in the scan, shown by one of eight features."""
    return shifted_mean(60, seed=1, features=8, shift=2.0)


@pytest.fixture(scope="module")
def found(planted: Bags) -> EnsembleFit:
    return fit(planted)


def test_a_planted_signal_is_found_in_scans_that_were_not_seen(planted: Bags, found: EnsembleFit) -> None:
    new = shifted_mean(60, seed=2, features=8, shift=2.0)
    prediction = found.ensemble(new.features, new.lengths)
    for scans, logits, attention in (
        (new, prediction.logit, prediction.attention),
        (planted, found.logits, found.attention),
    ):
        assert auroc(logits, scans.labels) > 0.9
        assert localization(attention.log(), scans.slice_labels, scans.lengths).mean_auroc > 0.9
        assert gain(scans, attention) > 0.15
    assert found.choice.shown


# Who sees which scan


def test_every_scan_is_predicted_chosen_on_and_trained_on_by_groups_of_its_own() -> None:
    folds = torch.tensor([0, 1, 2, 3, 3, 0, 1])
    groups = groups_of(folds)
    assert len(groups.predicted) == 4 * 3  # one for each ordered pair
    predicts = folds == groups.predicted[:, None]
    assert (predicts.int() + groups.training.int() + groups.validation.int() == 1).all()
    pairs = {
        (int(one), *{*folds[chosen].tolist()}) for one, chosen in zip(groups.predicted, groups.validation, strict=True)
    }
    assert pairs == {(one, other) for one in range(4) for other in range(4) if one != other}
    assert (groups.training.sum(0) == 3 * 2).all()


def train(kind: MemberKind, scans: Bags, folds: torch.Tensor, scaling: Scaling) -> Members:
    return Members(kind, scaling, KindTraining(kind, scans, scaling, folds, 0, "cpu").run(lambda _: None))


@OWN_SCANS
def test_members_know_nothing_of_the_fold_that_they_predict(kind: MemberKind, planted: Bags) -> None:
    folds, scaling = torch.arange(len(planted)) % 3, fit_scalings(planted)[kind.form]
    here, members = folds == 0, train(kind, planted, folds, scaling)
    turned = replace(planted, labels=torch.where(here, 1 - planted.labels, planted.labels), slice_labels=None)
    first, again = (predict_out_of_fold(train(kind, one, folds, scaling), planted, folds) for one in (planted, turned))
    torch.testing.assert_close(again.logits[here], first.logits[here], rtol=1e-4, atol=1e-4)
    assert (again.logits - first.logits)[~here].abs().max() > 0.1
    rows = here.repeat_interleave(planted.lengths)
    noise = torch.where(rows[:, None], 9.0 * torch.randn_like(planted.features), planted.features)
    changed = train(kind, replace(turned, features=noise), folds, scaling)
    own = len(members) // 3
    for name, values in members.weights.items():
        torch.testing.assert_close(changed.weights[name][:own], values[:own], rtol=1e-4, atol=1e-5)
    assert any(not torch.allclose(changed.weights[name], values, atol=0.01) for name, values in members.weights.items())


@OWN_SCANS
def test_a_group_is_trained_as_if_it_were_alone(
    kind: MemberKind, planted: Bags, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also when models that are out of patience wait for others."""
    few_settings(monkeypatch, STEPS=100, EPOCHS=20)
    folds, scaling = torch.arange(len(planted)) % 3, fit_scalings(planted)[kind.form]
    together = train(kind, planted, folds, scaling).weights
    for group in (0, 4):
        alone = KindTraining(kind, planted, scaling, folds, 0, "cpu")
        rows = slice(group * alone.together, (group + 1) * alone.together)
        for name in ("configs", "training", "validation"):
            setattr(alone, name, getattr(alone, name)[rows])
        for name, values in alone.run(lambda _: None).items():
            kept = len(values)
            torch.testing.assert_close(values, together[name][group * kept : (group + 1) * kept], rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("method", ["ng", "whole_bells_ng", "evidence_ng", "mhng", "abmil_entropy", "mean"])
def test_scans_weigh_in_a_loss_as_their_shares_say(method: str) -> None:
    scans, configs = (
        shifted_mean(6, seed=3, features=8, shift=2.0),
        grid(Config(method), lr=[0.1], l1=[0.0], seed=[1, 2]),
    )
    stack = Stack.of(configs, 8, dtype=torch.float64)
    given = (stack.initial_parameters(), scans.features.double())
    layout, shares = Layout.packed(scans.lengths), torch.full((2, 6), 1 / 6, dtype=torch.float64)
    losses, _ = stack.losses(*given, layout, scans.labels)
    torch.testing.assert_close(stack.weighted_losses(*given, layout, scans.labels, shares), losses)
    shares = torch.rand(2, 6, dtype=torch.float64)
    one_by_one = [
        stack.losses(given[0], bag.features.double(), Layout.packed([len(bag.features)]), scans.labels[[number]])[0]
        for number, bag in enumerate(scans)
    ]
    expected = (shares * torch.stack(one_by_one, 1)).sum(1)
    torch.testing.assert_close(stack.weighted_losses(*given, layout, scans.labels, shares), expected)


# What counts


def test_kinds_are_chosen_without_the_scans_that_they_predict() -> None:
    """Kind 0 is right in folds 1 and 2, kind 1 in fold 0 alone: fold 0 is predicted by kind 0."""
    labels, folds = torch.arange(60) % 2, torch.arange(60) // 20
    right, noise = 4.0 * (2 * labels - 1.0), 0.1 * torch.randn(3, 60, generator=torch.Generator().manual_seed(0))
    turned = torch.where(folds == 0, -right, right)
    own = [
        OutOfFold(logits, torch.full((60,), level))
        for logits, level in zip(torch.stack([turned, -turned, -right]) + noise, (0.2, 0.7, 0.5), strict=True)
    ]
    kinds = [
        MemberKind("evidence_ng", "each"),
        MemberKind("evidence", "each"),
        MemberKind("mean", "each", attends=False),
    ]
    scans = Bags(torch.zeros(60, 1), torch.ones(60, dtype=torch.int64), labels)
    logits, attention = together(kinds, own, folds, scans, names(scans))
    torch.testing.assert_close(logits[:20], own[0].logits[:20])
    assert (attention[:20] == own[0].attention[:20]).all()


def test_free_kinds_attend_where_they_are_clearly_better_and_no_worse_kind_scores() -> None:
    labels, nothing = torch.arange(60) % 2, torch.zeros(60)
    sign = 2 * labels - 1.0
    kinds = [MemberKind("ng", "each"), MemberKind("evidence", "each"), MemberKind("mean", "each", attends=False)]

    def chosen(*sizes: float) -> fitting.Choice:
        return choose(kinds, [OutOfFold(size * sign, nothing) for size in sizes], labels, list(map(str, range(60))))

    assert chosen(1.0, 3.0, 1.0) == ((1,), (1,), False, True)
    assert chosen(3.0, 1.0, 3.0) == ((0,), (0, 2), True, True)
    assert chosen(2.0, 2.0, 0.0) == ((0,), (0, 1), True, True)  # guidance where nothing speaks against it
    assert not chosen(0.0, 0.0, 0.0).shown


def test_findings_in_single_slices_that_are_far_apart_are_found_by_free_kinds(studies) -> None:
    scans = studies.variants.shifted_mean(100, seed=1, features=6, shift=6.0, block=1, blocks=2)
    fitted = fit(scans)
    assert not fitted.choice.usual
    assert {kind.kind.method for kind in fitted.ensemble.kinds if kind.kind.attends} == {"evidence"}
    assert gain(scans, fitted.attention) > 0.2


def test_without_a_signal_attention_is_the_prior(planted: Bags) -> None:
    order = torch.randperm(len(planted), generator=torch.Generator().manual_seed(1))
    noise = replace(planted, labels=planted.labels[order], slice_labels=None)
    fitted = fit(noise)
    assert not fitted.choice.shown
    again = Ensemble.from_json(fitted.ensemble.as_json(), fitted.ensemble.state_dict())
    for ensemble in (fitted.ensemble, again):
        attention = ensemble(noise.features, noise.lengths).attention
        torch.testing.assert_close(attention, prior_attention(noise.lengths))
    for own, size in zip(
        prior_attention(noise.lengths).split(noise.lengths.tolist()), noise.lengths.tolist(), strict=True
    ):
        bell = np.exp(-0.5 * (((np.arange(size) + 0.5) / size - 0.5) / 0.2) ** 2)
        np.testing.assert_allclose(own, bell / bell.sum(), rtol=1e-5)


# Again


class KilledError(Exception):
    """Ends a fit from outside."""


def killed_at(share: float) -> Callable[[float], None]:
    def watch(done: float) -> None:
        if done > share:
            raise KilledError

    return watch


def bits(found: EnsembleFit) -> dict[str, bytes]:
    values = {**found.ensemble.state_dict(), "logits": found.logits, "attention": found.attention}
    return {name: tensor.numpy().tobytes() for name, tensor in values.items()}


def test_a_killed_fit_goes_on_and_is_the_same_but_not_with_other_labels(
    planted: Bags, found: EnsembleFit, tmp_path: Path
) -> None:
    assert bits(fit(planted)) == bits(found)
    with pytest.raises(KilledError):
        fit(planted, resume=tmp_path, watch=killed_at(0.7))
    finished = sorted(file.name for file in tmp_path.iterdir())
    assert finished == ["evidence-together.safetensors", "whole_bells_ng-together.safetensors"]
    shares: list[float] = []
    assert bits(fit(planted, resume=tmp_path, watch=shares.append)) == bits(found)
    assert min(shares) > 2 / 3  # of the last kind alone
    other = replace(planted, labels=1 - planted.labels, slice_labels=None)
    shares.clear()
    assert bits(fit(other, resume=tmp_path, watch=shares.append)) == bits(fit(other))
    assert min(shares) < 1 / 3


# Sets of scans that are not as they should be


def test_too_few_scans_are_refused() -> None:
    assert make_plan([0, 1] * 6, [str(n) for n in range(12)]) == FoldPlan(folds=5)
    assert make_plan([0] * 9 + [1] * 3, [str(n) for n in range(12)]).folds == 3
    # Four patients of each label, but no four folds have both.
    patients, labels = list("146660203633"), [1, 0, 0, 1, 0, 1, 1, 0, 1, 1, 0, 0]
    assert make_plan(labels, patients).folds == 3
    for labels, patients, message in (
        ([0, 1] * 6, ["A", "B"] * 6, "3 patients of each"),
        ([1, 1, 0, 0, 0], list("ABCDE"), "2 positive scans"),
        ([0] * 9, list("ABCDEFGHI"), "0 positive scans"),
    ):
        with pytest.raises(UserError, match=message):
            make_plan(labels, patients)


def drawn(n: int, seed: int, shift: float = 2.0, **options: int) -> Bags:
    return shifted_mean(n, seed, features=12, shift=shift, **options)


def one_slice_scans() -> Bags:
    generator, labels = torch.Generator().manual_seed(6), torch.arange(60) % 2
    rows = torch.randn(60, 12, generator=generator)
    rows[:, 0] += 2.0 * labels
    return Bags(rows, torch.ones(60, dtype=torch.int64), labels, labels)


def changed(scans: Bags, features: Callable[[torch.Tensor], torch.Tensor]) -> Bags:
    return replace(scans, features=features(scans.features))


SETS: dict[str, Callable[[], Bags]] = {
    "all_easy": lambda: drawn(60, 2, 9.0),
    "twelve_scans": lambda: drawn(12, 4, 3.0),
    "one_slice_scans": one_slice_scans,
    "huge_and_tiny_features": lambda: changed(drawn(80, 1), lambda rows: rows * torch.logspace(-20, 18, 12)),
    "one_long_scan": lambda: Bags.pack([*drawn(60, 8), *drawn(4, 9, min_slices=900, max_slices=900)]),
    "the_same_scan_again": lambda: Bags.pack(
        [replace(drawn(10, 10)[n % 10], scan_id=None, patient_id=None) for n in range(60)]
    ),
}


@cache
def fitted_set(name: str) -> tuple[Bags, EnsembleFit]:
    scans = SETS[name]()
    return scans, fit(scans)


def test_features_that_hardly_vary_are_refused() -> None:
    for alike in (torch.ones_like, torch.zeros_like, lambda rows: 1 + 1e-4 * rows):
        with pytest.raises(UserError, match="features are nearly the same in all slices: nine in ten features vary"):
            fit(changed(drawn(40, 7), alike))


@pytest.mark.slow(but=("twelve_scans", "one_slice_scans"))
@pytest.mark.parametrize("name", SETS)
def test_an_odd_set_gives_finite_numbers(name: str) -> None:
    scans, found = fitted_set(name)
    prediction = found.ensemble(scans.features, scans.lengths)
    for values in (found.logits, found.attention, prediction.logit, prediction.attention):
        assert values.isfinite().all()
    own = [part.sum().item() for part in prediction.attention.split(scans.lengths.tolist())]
    assert own == pytest.approx([1.0] * len(scans), abs=1e-4)
    if name in ("all_easy", "one_long_scan", "one_slice_scans"):
        assert auroc(found.logits, scans.labels) > (0.7 if name == "one_slice_scans" else 0.9)


def test_one_patient_with_most_scans_stays_in_one_fold(planted: Bags) -> None:
    patients = ["A" if number < 20 else str(number) for number in range(len(planted))]
    fitted = fit(planted, patients)
    assert auroc(fitted.logits[:20], planted.labels[:20]) > 0.85
    assert auroc(fitted.logits[20:], planted.labels[20:]) > 0.85
