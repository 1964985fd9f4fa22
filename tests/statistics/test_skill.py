"""Skill, gain and the patient-specific measure against scikit-learn, numpy's interpolation and hand calculation."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.metrics import roc_auc_score
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.methods import METHODS
from normal_guidance.core.metrics import localization
from normal_guidance.statistics.differences import student_quantile
from normal_guidance.statistics.skill import (
    Gain,
    MeanAuroc,
    PatientSpecific,
    ScoredSlices,
    Skill,
    best_prior,
    position_density,
    skill,
)
from normal_guidance.study.drawn import bayes_slice_scores, shifted_mean

LENGTHS = torch.tensor([30, 41, 24, 35, 30, 52])


def mean_auroc(*scans: Tensor) -> MeanAuroc:
    return ScoredSlices(*scans).mean_auroc()


def measure_gain(*scans: Tensor, patient_ids: list[str] | None = None) -> Gain:
    return ScoredSlices(*scans, patient_ids).gain()


def measure_skill(*scans: Tensor, patient_ids: list[str] | None = None, **options: object) -> Skill:
    return ScoredSlices(*scans, patient_ids).skill(**options)


def patient_specific(*scans: Tensor, patient_ids: list[str] | None = None, **options: object) -> PatientSpecific:
    return ScoredSlices(*scans, patient_ids).patient_specific(**options)


def bell(lengths: Tensor, centre: float | Tensor = 0.5) -> Tensor:
    """The same bell over the relative positions of every scan, or one around each scan's own centre."""
    positions = torch.cat([(torch.arange(size).double() + 0.5) / size for size in lengths.tolist()])
    middle = torch.as_tensor(centre).expand(len(lengths)).repeat_interleave(lengths)
    return -((positions - middle) ** 2).round(decimals=9)  # mirrored slices tie


def findings(lengths: Tensor, seed: int = 0, sd: float = 0.15) -> tuple[Tensor, Tensor]:
    """Slice labels with one block in each scan, and the relative positions of their centres."""
    generator = torch.Generator().manual_seed(seed)
    centre = (0.5 + sd * torch.randn(len(lengths), generator=generator)).clamp(0.15, 0.85)
    return (bell(lengths, centre) > -(0.1**2)).long(), centre


def split(values: Tensor, lengths: Tensor) -> list[np.ndarray]:
    return [scan.numpy() for scan in values.split(lengths.tolist())]


def test_skill_by_hand() -> None:
    assert [skill(auroc, 0.8) for auroc in (0.9, 1.0, 0.8, 0.6)] == pytest.approx([0.5, 1.0, 0.0, -1.0])
    assert math.isnan(skill(0.9, 1.0))


def test_a_density_by_hand(monkeypatch: pytest.MonkeyPatch) -> None:
    # The scans reach the middles of three bins; a bin takes in a quarter of each neighbour.
    with monkeypatch.context() as patch:
        patch.setattr("normal_guidance.statistics.skill.BINS", 3)
        density = position_density(torch.tensor([3, 3]), torch.tensor([0, 1, 0, 1, 1, 0]))
    of_positives, of_slices = [0.5 * 1 + 0.25 * 2, 0.25 * 1 + 0.5 * 2, 0.25 * 2], [1.5, 2.0, 1.5]  # 1, 2, 0 of 2, 2, 2
    assert density.heights.tolist() == pytest.approx(np.divide(of_positives, of_slices))
    # Short scans leave bins at the mean.
    density = position_density(torch.tensor([1, 2]), torch.tensor([1, 1, 0]))
    assert density.heights.isfinite().all()
    # Slices at .5, .25 and .75; bins 0 and 19 are not reached.
    assert density.heights[[0, 19]].tolist() == pytest.approx([0.75, 0.75])
    assert density.heights[[5, 14]].tolist() == pytest.approx([1.0, 0.0])


def test_negative_and_unlabelled_scans_do_not_train_the_density() -> None:
    labels, _ = findings(LENGTHS)
    more = torch.cat([LENGTHS, torch.tensor([9, 5])])
    density = position_density(more, torch.cat([labels, torch.zeros(9).long(), torch.full((5,), -1)]))
    assert torch.equal(density.heights, position_density(LENGTHS, labels).heights)


def test_the_best_prior_is_the_best_of_all() -> None:
    labels, _ = findings(LENGTHS)
    features = torch.zeros(len(labels), 4, dtype=torch.float64)
    gaussian = METHODS["centered_gaussian"].build(4)(features, LENGTHS).slice_scores
    guesses = {"centered_gaussian": gaussian, "middle": bell(LENGTHS)}
    reached = {name: localization(guess, labels, LENGTHS).mean_auroc.item() for name, guess in guesses.items()}
    name, alone = best_prior(labels, LENGTHS)
    assert (alone.mean_auroc, name) == max((auroc, name) for name, auroc in reached.items())
    high = (bell(LENGTHS, 0.9) > -(0.1**2)).long()
    lower, middle = torch.tensor([0, 1, 0, 0]), torch.tensor([0, 1, 1, 0])  # S / 2 of the slices from 1 to S
    for known, lengths, density, expected in (
        (high, LENGTHS, position_density(LENGTHS, high), "position_density"),
        (labels, LENGTHS, position_density(LENGTHS, high), name),
        (lower, torch.tensor([4]), None, "centered_gaussian"),
        (middle, torch.tensor([4]), None, "middle"),
    ):
        assert best_prior(known, lengths, density)[0] == expected


def test_skill_against_scikit_learn() -> None:
    lengths = torch.randint(10, 60, (40,))
    labels, _ = findings(lengths)
    scores = torch.randn(len(labels)) + labels
    found = measure_skill(scores, labels, lengths, density=position_density(lengths, labels))
    own, prior = (
        [roc_auc_score(y, s) for y, s in zip(split(labels, lengths), split(guess, lengths), strict=True)]
        for guess in (scores, position_density(lengths, labels).scores(lengths))
    )
    expected = np.mean(own), np.mean(prior), (np.mean(own) - np.mean(prior)) / (1 - np.mean(prior))
    assert (found.auroc, found.prior_auroc, found.skill) == pytest.approx(expected, abs=1e-12)
    assert found.prior == "position_density"
    # The delta method: the linear part of the skill in each scan, its standard error, and Student's t.
    parts = (np.array(own) + (found.skill - 1) * np.array(prior)) / (1 - found.prior_auroc)
    reach = student_quantile(0.95, 39) * parts.std(ddof=1) / math.sqrt(40)
    assert (found.high - found.low) / 2 == pytest.approx(reach, rel=0.08)
    assert (found.low + found.high) / 2 == pytest.approx(found.skill)


def test_gain_is_the_mean_paired_difference_from_the_best_guess() -> None:
    lengths = torch.randint(10, 60, (40,))
    labels, centre = findings(lengths)
    scores = bell(lengths) + 0.02 * torch.randn(len(labels)) + 0.02 * labels
    found, (_, guess) = measure_gain(scores, labels, lengths), best_prior(labels, lengths)
    own = np.array([roc_auc_score(y, s) for y, s in zip(split(labels, lengths), split(scores, lengths), strict=True)])
    differences = own - guess.auroc.numpy()
    assert (found.auroc, found.position) == pytest.approx((own.mean(), guess.mean_auroc.item()))
    assert found.gain == pytest.approx(differences.mean()) == pytest.approx(found.auroc - found.position)
    reach = student_quantile(0.95, 39) * differences.std(ddof=1) / math.sqrt(40)
    assert (found.high - found.gain, found.gain - found.low) == pytest.approx((reach, reach), rel=0.08)
    for known, sign in ((bell(lengths), 0), (bell(lengths, 0.1), -1), (bell(lengths, centre), 1)):
        one = measure_gain(known, labels, lengths)
        assert one.shown == (sign > 0) == (one.low > 0)
        assert np.sign(one.gain) == sign


def test_a_bell_has_no_skill_and_the_oracle_has() -> None:
    lengths = torch.randint(20, 60, (60,))
    labels, centre = findings(lengths)
    density = position_density(lengths, labels)
    assert measure_skill(bell(lengths), labels, lengths).skill == 0.0
    assert measure_skill(bell(lengths), labels, lengths, density=density).skill <= 0.0
    assert measure_skill(bell(lengths, 0.3), labels, lengths, density=density).skill < 0
    assert measure_skill(torch.zeros(len(labels)), labels, lengths).skill < 0
    oracle = measure_skill(bell(lengths, centre), labels, lengths, density=density)
    assert oracle.skill == 1.0
    bags = shifted_mean(200, seed=1, features=2)
    assert measure_skill(bayes_slice_scores(bags), bags.slice_labels, bags.lengths).low > 0


def by_hand(scores: Tensor, labels: Tensor, lengths: Tensor, patients: list[str]) -> float:
    """All pairs, one at a time, with numpy's interpolation and scikit-learn's AUROC."""
    truths, ranked = split(labels, lengths), []
    for scan in split(scores, lengths):
        ranked.append(np.array([(scan < value).sum() + ((scan == value).sum() - 1) / 2 for value in scan]))
    differences = []
    for i, truth in enumerate(truths):
        positions = (np.arange(len(truth)) + 0.5) / len(truth)
        others = []
        for o, other in enumerate(ranked):
            if patients[o] != patients[i]:
                laid = np.interp(positions, (np.arange(len(other)) + 0.5) / len(other), other)
                others.append(roc_auc_score(truth, laid.round(9)))
        differences.append(roc_auc_score(truth, ranked[i]) - np.mean(others))
    return float(np.mean(differences))


@given(seed=st.integers(0, 1000))
def test_against_all_pairs_one_at_a_time(seed: int) -> None:
    torch.manual_seed(seed)
    lengths = torch.randint(2, 40, (5,))
    labels = torch.randint(2, (int(lengths.sum()),))
    starts = lengths.cumsum(0) - lengths
    labels[starts], labels[starts + 1] = 1, 0
    scores = torch.rand(len(labels)).round(decimals=1)
    patients = ["a", "b", "b", "c", "a"]
    found = patient_specific(scores, labels, lengths, patient_ids=patients)
    assert found.difference == pytest.approx(by_hand(scores, labels, lengths, patients), abs=1e-12)
    assert found.difference == pytest.approx(found.own - found.others, abs=1e-12)
    assert (found.scans, found.patients) == (5, 3)


def test_by_hand() -> None:
    # Other scans' peaks lie on a negative slice: one tie in three is won half, so their AUROC is 1/3.
    labels, lengths = torch.tensor([0, 1, 0, 0, 0, 0, 1, 0]), torch.tensor([4, 4])
    found = patient_specific(torch.tensor([0.1, 0.7, 0.1, 0.1, 0.1, 0.1, 0.7, 0.1]), labels, lengths)
    assert (found.own, found.others) == (1.0, pytest.approx(1 / 3))
    assert str(found).startswith("patient-specific +.667 [too few scans for an interval]")  # two scans that are alike
    # Two slices laid over four: 0, .25, .75, 1; four over two: the middle of each half.
    labels = torch.tensor([0, 0, 0, 1, 1, 0])
    found = patient_specific(torch.tensor([1.0, 2.0, 3.0, 4.0, 9.0, 8.0]), labels, torch.tensor([4, 2]))
    assert (found.own, found.others) == (1.0, 0.0)


def test_one_bell_for_all_scans_is_not_specific() -> None:
    for lengths, tolerance in ((torch.full((50,), 40), 0.0), (torch.randint(20, 80, (50,)), 0.01)):
        labels, centre = findings(lengths)
        found = patient_specific(bell(lengths), labels, lengths)
        assert found.difference == pytest.approx(0.0, abs=tolerance)
        assert tolerance or (found.low, found.high) == (0.0, 0.0)
        assert patient_specific(bell(lengths, centre), labels, lengths).low > 0.1


def test_at_most_so_many_others_are_drawn_by_the_seed() -> None:
    lengths = torch.randint(20, 60, (80,))
    labels, centre = findings(lengths)
    scores = bell(lengths, centre) + 0.1 * torch.rand(len(labels))
    everyone = patient_specific(scores, labels, lengths, others=1000)
    some, again, different = (patient_specific(scores, labels, lengths, others=20, seed=seed) for seed in (1, 1, 2))
    assert some == again
    assert some.others != different.others
    assert some.others == pytest.approx(everyone.others, abs=0.03)


def test_scans_left_out_are_counted_as_by_localization() -> None:
    labels, _ = findings(LENGTHS)
    scores = torch.randn(len(labels))
    lengths = torch.cat([torch.tensor([4, 3]), LENGTHS, torch.tensor([2])])
    more = torch.cat([torch.zeros(4).long(), torch.full((3,), -1), labels, torch.ones(2).long()])
    padded = torch.cat([torch.rand(7), scores, torch.rand(2)])
    for measure in (measure_skill, patient_specific):
        found = measure(padded, more, lengths)
        assert (found.scans, found.unlabelled, found.all_negative, found.all_positive) == (6, 1, 1, 1)
        alone = measure(scores, labels, LENGTHS)
        assert (found.low, found.high) == (alone.low, alone.high)


@pytest.mark.parametrize("measure", [measure_gain, measure_skill, patient_specific])
def test_with_too_few_patients_the_interval_is_unknown(measure) -> None:
    labels, _ = findings(LENGTHS)
    found = measure(bell(LENGTHS), labels, LENGTHS, patient_ids=["A"] * len(LENGTHS))
    assert (found.scans, found.patients) == (6, 1)
    assert np.isnan([found.low, found.high]).all()
    nobody = measure(torch.rand(4), torch.tensor([0, 0, -1, -1]), torch.tensor([2, 2]))
    assert (nobody.scans, nobody.all_negative, nobody.unlabelled) == (0, 1, 1)
    assert str(nobody).endswith("(0 scans)" if measure is not measure_gain else "[too few scans for an interval]")


def test_intervals_stay_within_what_is_possible() -> None:
    """Of two scans, one is perfect and one nearly so: their t interval alone would reach far beyond 1."""
    labels, lengths = torch.tensor([1, 0, 0, 0, 0, 0, 1, 0]), torch.tensor([4, 4])
    scores = torch.tensor([0.9, 0.1, 0.2, 0.3, 0.3, 0.4, 0.35, 0.1])
    for measure, least in ((mean_auroc, 0.0), (patient_specific, -1.0)):
        found = measure(scores, labels, lengths)
        assert (found.low, found.high) == (least, 1.0)
    assert measure_skill(scores, labels, lengths).high == 1.0


def test_patients_not_scans_are_resampled() -> None:
    lengths = torch.randint(20, 60, (40,))
    labels, _ = findings(lengths)
    scores = bell(lengths) + 0.02 * torch.randn(len(labels))
    # Every patient twice: as much as is known of half as many scans, so the interval is about as wide as of those.
    twice = (torch.cat([scores, scores]), torch.cat([labels, labels]), torch.cat([lengths, lengths]))
    names = [str(scan) for scan in range(40)] * 2
    measured = measure_skill(scores, labels, lengths), measure_skill(*twice, patient_ids=names), measure_skill(*twice)
    once, by_patient, by_scan = (each.high - each.low for each in measured)
    assert by_patient == pytest.approx(once, rel=0.1)
    assert by_scan < 0.8 * once


LABELS = torch.tensor([0, 1, 0, 1])
WRONG_SCANS = [
    ({"scores": torch.tensor([1.0, math.nan, 1.0, 1.0])}, "scan 0: a slice's score is NaN"),
    ({"scores": torch.ones(3)}, r"scores of shape \(3,\) do not fit slice_labels of shape \(4,\)"),
    ({"lengths": torch.tensor([2, 3])}, "lengths add up to 5 slices"),
    ({"patient_ids": ["A"]}, "1 patient_ids for 2 scans; give one for each scan"),
]


@pytest.mark.usefixtures("unchecked")
@pytest.mark.parametrize(
    ("measure", "options", "complaint"),
    [
        *((ScoredSlices, *row) for row in WRONG_SCANS),
        (position_density, {"slice_labels": 0 * LABELS}, "none of 2 scans has a positive slice"),
    ],
)
def test_input_that_cannot_be_right_is_refused(measure, options: dict[str, object], complaint: str) -> None:
    usual = {"slice_labels": LABELS, "lengths": torch.tensor([2, 2])}
    usual |= {} if measure is position_density else {"scores": torch.rand(4)}
    with pytest.raises(UserError, match=complaint):
        measure(**{**usual, **options})


def test_each_scan_needs_others_to_compare_with() -> None:
    with pytest.raises(UserError, match="others is 0, but each scan needs at least 1"):
        patient_specific(torch.rand(4), LABELS, torch.tensor([2, 2]), others=0)
