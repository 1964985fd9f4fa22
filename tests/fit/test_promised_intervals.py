"""A promise that holds on fresh scans, by one scan of each patient, and that test scans may contradict."""

from dataclasses import replace

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags
from normal_guidance.fit.fit_ensemble import FoldPlan
from normal_guidance.fit.measured import (
    Held,
    PromisedIntervals,
    check_on,
    fit_and_measure,
    one_per_patient,
    promise_intervals,
)
from normal_guidance.statistics.conformal import IntervalCalibration, calibrate_intervals
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.loop import predict_bags
from small_bundle import few_settings

SCANS, SLICES = 24, 10


def scans(patients: int = SCANS) -> tuple[Bags, torch.Tensor]:
    """Positive scans, of which number i has i % 10 as its positive slice, and attention that peaks at slice 0."""
    labels = torch.eye(SLICES, dtype=torch.int64)[torch.arange(SCANS) % SLICES].flatten()
    ids = ([f"S{number:02}" for number in range(SCANS)], [f"P{number % patients:02}" for number in range(SCANS)])
    lengths, ones = torch.full((SCANS,), SLICES), torch.ones(SCANS, dtype=torch.int64)
    bags = Bags(torch.zeros(SCANS * SLICES, 1), lengths, ones, labels, *map(tuple, ids))
    return bags, torch.arange(SLICES, 0, -1.0).repeat(SCANS)


def test_one_scan_of_each_patient_calibrates() -> None:
    bags, attention = scans(patients=12)
    chosen = one_per_patient(bags)
    assert sorted(bags.patient_ids[scan] for scan in chosen) == sorted({*bags.patient_ids})
    assert any(scan >= 12 for scan in chosen)  # not always the first
    assert any(scan < 12 for scan in chosen)
    promised = promise_intervals(bags, attention)
    labels = torch.cat([bags.slice_labels.split(SLICES)[scan] for scan in chosen])
    alone = calibrate_intervals(attention[: 12 * SLICES], bags.lengths[:12], labels)
    assert promised.calibration == alone
    assert alone.scans == 12
    turned = bags[torch.arange(SCANS - 1, -1, -1)]
    assert {turned.scan_ids[scan] for scan in one_per_patient(turned)} == {bags.scan_ids[scan] for scan in chosen}


def test_negative_and_unlabelled_scans_do_not_count() -> None:
    bags, attention = scans()
    labels = bags.slice_labels.reshape(SCANS, SLICES).clone()
    labels[:8], labels[8:16] = 0, -1
    few = replace(bags, slice_labels=labels.flatten(), labels=(torch.arange(SCANS) >= 8).long())
    assert one_per_patient(few) == list(range(16, SCANS))
    promised = promise_intervals(few, attention)
    assert (promised.calibration, promised.labelled) == (None, 8)
    (sentence,) = promised.sentences()
    assert sentence.startswith(
        "Intervals promise nothing about the finding: 8 patients have a positive scan with slice"
    )
    assert sentence.endswith("labels, but a promise of 90 % needs 9, better 30.")
    with pytest.raises(UserError, match=r"8 patients have .* coverage of 0.9 need 9, better 30"):
        promise_intervals(few, attention, 0.9)
    assert promise_intervals(few, attention, 0.8).calibration.coverage == 0.8


def test_test_scans_are_counted() -> None:
    bags, attention = scans()
    calibration = IntervalCalibration(0.9, 30, 0.8)
    _, last = calibration.interval(attention[:SLICES], bags.lengths[:1])
    found = check_on(PromisedIntervals(0.9, 30, calibration, 0.5), bags, attention)
    assert found.test == Held(sum(number % SLICES <= int(last) for number in range(SCANS)), SCANS)
    assert found.length == pytest.approx((int(last) + 1) / SLICES)
    plain = replace(bags, slice_labels=None)
    assert check_on(PromisedIntervals(0.9, 30, calibration, 0.5), plain, attention).test is None


@pytest.mark.parametrize(("held", "doubted"), [(36, False), (33, False), (22, True)])
def test_too_few_held_is_said(held: int, doubted: bool) -> None:
    found = PromisedIntervals(0.9, 30, IntervalCalibration(0.9, 30, 0.5), 0.4, Held(held, 40))
    promise, length, tested = found.sentences()
    assert promise.endswith("one for each patient, which leaves this probability uncertain by 5 %.")
    assert length == "The median interval has 40 % of its scan's slices."
    assert tested.startswith(f"On the test scans it contains the whole finding in {held} of 40.")
    assert ("do not rely on it" in tested) == doubted


@pytest.mark.slow
def test_the_promise_holds_for_whole_ensembles_and_fresh_scans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Out-of-fold attention calibrates, the whole ensemble's is used: the promise is tested, not proved."""
    few_settings(monkeypatch)
    covered: dict[float, list[float]] = {1.0: [], 0.8: []}
    for seed in range(20):
        found = fit_and_measure(shifted_mean(60, seed=seed, features=4, shift=1.5), FoldPlan(folds=3))
        fresh = shifted_mean(100, seed=1000 + seed, features=4, shift=1.5)  # others each time: fits are independent
        attention, calibration = predict_bags(found.fit.ensemble, fresh).attention, found.intervals.calibration
        for shorter, values in covered.items():
            own = replace(calibration, threshold=shorter * calibration.threshold)
            test = check_on(replace(found.intervals, calibration=own), fresh, attention).test
            values.append(test.held / test.scans)
    right, short = (torch.tensor(values, dtype=torch.float64) for values in covered.values())
    assert 0.9 - 3 * right.std() / 20**0.5 <= right.mean() <= 0.95
    assert short.mean() + 3 * short.std() / 20**0.5 < 0.9  # intervals that are too short are noticed
