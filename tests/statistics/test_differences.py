"""Statistics against scikit-learn with weights, dense textbook formulas, hand calculation and scipy."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from sklearn.metrics import average_precision_score, roc_auc_score

from normal_guidance.base.errors import UserError
from normal_guidance.core.methods import METHODS
from normal_guidance.statistics.differences import (
    CORRECTED,
    Claim,
    Difference,
    claims,
    delong,
    differences,
    holm,
    measure,
    multiplicities,
    resample,
    student_p,
    student_quantile,
)
from normal_guidance.statistics.split_results import (
    METRICS,
    MethodResults,
    SplitResults,
    patients_of,
    split_results,
)
from normal_guidance.study.drawn import shifted_mean

TITLES = {"ng": "NG", "abmil": "ABMIL"}


def made_up(scans=60, several=3, splits=1, seed=0, methods=("ng", "abmil", "smap"), tested=0.7):
    """Splits that share patients, who have up to `several` scans of both kinds; scores tie often."""
    generator = np.random.default_rng(seed)
    patients = generator.integers(scans // several, size=scans) if several > 1 else np.arange(scans)
    labels = generator.integers(0, 2, size=scans)
    out = []
    for _ in range(splits):
        kept = np.sort(generator.permutation(scans)[: round(tested * scans)])
        measured = {}
        for method in methods:
            values = np.where(labels == 1, generator.beta(3, 1, size=(2, scans)), np.nan)[:, kept]
            measured[method] = MethodResults(*values, (labels + generator.standard_normal(scans)).round(1)[kept])
        ids = tuple(f"S{i}" for i in kept), tuple(f"P{patients[i]}" for i in kept)
        out.append(SplitResults(*ids, labels[kept], measured))
    return out


def one_scan_each(scores, labels):
    """One split of patients with one scan each, from a table of scan scores."""
    ids, nothing = tuple(f"S{i}" for i in range(len(labels))), np.full(len(labels), np.nan)
    methods = {name: MethodResults(nothing, nothing, np.asarray(values, float)) for name, values in scores.items()}
    return SplitResults(ids, ids, np.asarray(labels), methods)


def renamed(split, name):
    """The same results of other scans and patients."""
    others = {ids: tuple(f"{name}-{old}" for old in getattr(split, ids)) for ids in ("scan_ids", "patient_ids")}
    return replace(split, **others)


def test_a_method_that_scores_no_scans_has_no_scan_metrics():
    bags = shifted_mean(20, 1, features=2)
    slices = {"centered_gaussian": torch.randn(len(bags.features)), "ng": torch.randn(len(bags.features))}
    split = split_results(bags, slices, {"centered_gaussian": torch.full((20,), math.nan), "ng": torch.randn(20)})
    assert split.methods["centered_gaussian"].scan_scores is None
    assert set(resample([split], draws=3)["scan_auroc"]) == {"ng"}
    assert set(resample([split], draws=3)["localization_auroc"]) == {"centered_gaussian", "ng"}
    with pytest.raises(UserError, match="'centered_gaussian' has no scan_auroc"):
        differences([split], [Claim("ng", "centered_gaussian", "scan_auroc")], draws=10)


def broken(split, **changes):
    return lambda: patients_of([split, replace(split, **changes)])


SPLIT = made_up(scans=8, tested=1.0)[0]
NG = SPLIT.methods["ng"]
UNSCORED = replace(SPLIT, methods={"ng": NG, "abmil": replace(NG, scan_scores=None)})


@pytest.mark.parametrize(
    ("act", "message"),
    [
        (broken(SPLIT, scan_ids=("S0",) * 8), "'S0' is tested twice"),
        (broken(SPLIT, scan_ids=SPLIT.scan_ids[1:]), "7 scan_ids for 8 labels"),
        (broken(SPLIT, labels=SPLIT.labels - 1), "label -1 is neither 0 nor 1"),
        (broken(SPLIT, methods={}), "no method was tested"),
        (broken(SPLIT, methods={"ng": NG}), "'abmil' was tested in some splits only"),
        (broken(SPLIT, methods={**SPLIT.methods, "ng": replace(NG, scan_scores=None)}), "'ng' has scan scores in some"),
        (broken(SPLIT, methods={"ng": MethodResults(np.ones(7), np.ones(7))}), "'ng' has 7 auroc for 8 scans"),
        (broken(SPLIT, methods={"ng": replace(NG, scan_scores=np.full(8, np.nan))}), "no score for scan 'S0'"),
        (broken(SPLIT, methods={"ng": NG, "max": replace(NG, auroc=NG.auroc[::-1])}), "by some methods and not by"),
        (broken(SPLIT, labels=1 - SPLIT.labels), "scan 'S0' has patient and label"),
        (lambda: patients_of([]), "no split was given"),
        (lambda: resample([SPLIT], draws=1), "draws is 1, but a standard error needs at least 2"),
        (lambda: delong([SPLIT], "ng", "mhng"), "'mhng' was not tested"),
        (lambda: delong([one_scan_each({"ng": [1, 2]}, [1, 1])], "ng", "ng"), "split 1 has only positive or only neg"),
        (lambda: claims(["ng", "nosuch"]), "'nosuch' is unknown"),
        (lambda: delong([UNSCORED], "ng", "abmil"), "'abmil' has no scan scores"),
        (lambda: split_results(shifted_mean(4, 1), {}, {"ng": torch.zeros(4)}), "'ng' scores scans but no slices"),
    ],
)
def test_mistakes_are_named(act, message):
    with pytest.raises(UserError, match=message):
        act()


def test_every_draw_equals_scikit_learn_with_weights():
    splits = made_up(scans=90, splits=3)
    patients, drawn = patients_of(splits), resample(splits, draws=15, seed=3)
    (weights,) = multiplicities(patients.positive, 15, 3, at_once=15)
    for draw, of_patient in enumerate(weights):
        for method in splits[0].methods:
            expected = {metric: [] for metric in METRICS}
            for split, of in zip(splits, patients.of_scans, strict=True):
                w, kept, measured = of_patient[of], split.localized, split.methods[method]
                expected["localization_auroc"].append(np.average(measured.auroc[kept], weights=w[kept]))
                expected["localization_auprc"].append(np.average(measured.auprc[kept], weights=w[kept]))
                row = split.labels, measured.scan_scores
                expected["scan_auroc"].append(roc_auc_score(*row, sample_weight=w))
                expected["scan_auprc"].append(average_precision_score(*row, sample_weight=w))
            for metric, values in expected.items():
                assert drawn[metric][method][draw] == pytest.approx(np.mean(values), abs=1e-12)


def test_patients_are_drawn_by_kind_and_one_fewer_than_there_are():
    positive = np.arange(12) % 3 == 0
    (weights,) = multiplicities(positive, draws=400, seed=0, at_once=400)
    assert set(weights[:, positive].sum(1)) == {3.0}
    assert set(weights[:, ~positive].sum(1)) == {7.0}
    # Each of four is drawn 3/4 times on average; 400 draws know that to within .038.
    np.testing.assert_allclose(weights[:, positive].mean(0), 0.75, atol=0.15)


def test_the_seed_decides_and_the_chunks_do_not():
    splits = made_up(scans=400, splits=2)
    first, again, other = (resample(splits, 50, seed)["scan_auprc"]["ng"] for seed in (1, 1, 2))
    np.testing.assert_array_equal(first, again)
    assert not np.array_equal(first, other)
    positive = np.arange(30) < 11
    whole, pieces = (np.concatenate([*multiplicities(positive, 50, 5, at_once)]) for at_once in (50, 7))
    np.testing.assert_array_equal(whole, pieces)


def pairs(scores, labels):
    """psi(x, y) of every positive with every negative."""
    high, low = scores[labels == 1][:, None], scores[labels == 0]
    return (high > low) + 0.5 * (high == low)


@pytest.mark.parametrize("seed", range(5))
def test_one_scan_each_is_delong_as_in_textbooks(seed):
    (split,) = made_up(several=1, seed=seed)
    delta = np.subtract(*(pairs(split.methods[name].scan_scores, split.labels) for name in ("ng", "abmil")))
    # The variances of the structural components V10 (rows) and V01 (columns), DeLong et al., eq. 4-6.
    variance = delta.mean(1).var(ddof=1) / delta.shape[0] + delta.mean(0).var(ddof=1) / delta.shape[1]
    found = delong([split], "ng", "abmil")
    assert (found.difference, found.standard_error) == pytest.approx((delta.mean(), math.sqrt(variance)), abs=1e-12)
    assert found.interval(0.9) == pytest.approx(stats.norm(found.difference, found.standard_error).interval(0.9))


@pytest.mark.parametrize("seed", range(5))
def test_several_scans_a_patient_are_obuchowski(seed):
    (split,) = made_up(seed=seed, tested=1.0)
    labels, ids = split.labels, np.array(split.patient_ids)
    delta = np.subtract(*(pairs(split.methods[name].scan_scores, labels) for name in ("ng", "abmil")))
    m, n = delta.shape
    theta, people = delta.mean(), sorted(set(ids))
    high = [(delta.mean(1) - theta)[ids[labels == 1] == one].sum() for one in people]
    low = [(delta.mean(0) - theta)[ids[labels == 0] == one].sum() for one in people]
    i10, i01, i = len(set(ids[labels == 1])), len(set(ids[labels == 0])), len(people)
    s10 = i10 / ((i10 - 1) * m) * np.dot(high, high)
    s01 = i01 / ((i01 - 1) * n) * np.dot(low, low)
    s11 = i / (i - 1) * np.dot(high, low)
    assert i10 + i01 > i  # some patients have scans of both kinds, so that the last term counts
    assert delong([split], "ng", "abmil").standard_error == pytest.approx(
        math.sqrt(s10 / m + s01 / n + 2 * s11 / (m * n)), abs=1e-12
    )


def test_disjoint_splits_add_up_and_the_same_split_again_says_nothing_new():
    one, two = (made_up(seed=seed)[0] for seed in (1, 2))
    two = renamed(two, "other")
    single = [delong([split], "ng", "abmil") for split in (one, two)]
    both = delong([one, two], "ng", "abmil")
    assert both.difference == pytest.approx((single[0].difference + single[1].difference) / 2)
    assert both.standard_error == pytest.approx(math.hypot(*(found.standard_error for found in single)) / 2)
    assert delong([one] * 3, "ng", "abmil").standard_error == pytest.approx(single[0].standard_error)


def test_the_bootstrap_agrees_with_delong_where_splits_overlap():
    splits = made_up(scans=600, splits=3, seed=5)
    drawn = resample(splits, draws=2000)["scan_auroc"]
    found = delong(splits, "ng", "abmil")
    # Two thousand draws know a standard error to within 1.6 %.
    assert (drawn["ng"] - drawn["abmil"]).std() == pytest.approx(found.standard_error, rel=0.06)
    alone = renamed(splits[0], "x")
    assert delong([alone], "ng", "abmil").standard_error > found.standard_error


def test_one_patient_of_a_kind_has_no_standard_error():
    split = one_scan_each({"ng": [1, 0, 2], "abmil": [1, 2, 0]}, [1, 0, 0])
    assert math.isnan(delong([split], "ng", "abmil").standard_error)
    (found,) = differences([split], [Claim("ng", "abmil", "scan_auroc")], draws=20)
    assert (found.estimate, math.isnan(found.p), found.shown) == (0, True, False)
    assert found.words(TITLES) == "NG and ABMIL cannot be compared in scan AUROC: too few patients (3)"


def test_splits_that_often_lose_a_kind_are_too_small_to_compare():
    """Two splits with one positive patient each: in every draw, one split has none."""
    split = one_scan_each({"ng": [2, 0, 1, 3], "abmil": [1, 2, 0, 3]}, [1, 0, 0, 0])
    splits = [renamed(split, name) for name in "xy"]
    drawn = resample(splits, 20)
    assert np.isnan([drawn["scan_auroc"]["ng"], drawn["scan_auprc"]["ng"]]).all()
    (found,) = differences(splits, [Claim("ng", "abmil", "scan_auprc")], draws=20)
    assert math.isfinite(found.estimate)
    assert all(map(math.isnan, (found.low, found.high, found.p, found.p_adjusted)))


def test_claims_are_those_of_the_text():
    listed = claims([*reversed(METHODS)], "ceiling")
    localization = [(claim.method, claim.against) for claim in listed if claim.metric == "localization_auprc"]
    assert claims(["evidence_ng", "whole_bells", "whole_bells_ng"], None)[0].method == "whole_bells_ng"
    counterparts = [("smap", "abmil"), ("ng", "abmil"), ("smtp", "transmil"), ("mhng", "transmil")]
    rivals = [("ng", "smap"), ("mhng", "smtp")]
    of_gaussian, of_ceiling = (
        [(method, against) for method in METHODS] for against in ("centered_gaussian", "ceiling")
    )
    assert localization == [*of_gaussian[1:], *counterparts, *rivals, *of_ceiling]
    scan = [(claim.method, claim.against) for claim in listed if claim.metric == "scan_auroc"]
    assert scan == [*counterparts, *rivals, *of_ceiling[1:]]
    assert len(listed) == 2 * len(localization) + 2 * len(scan)
    assert {claim[:2] for claim in claims(["ng", "abmil"], None)} == {("ng", "abmil")}  # what was tested
    assert claims(["ng"], None) == []
    assert claims(["ng", "ceiling"], "ceiling") == claims(["ng"], "ceiling")


def test_a_difference_is_the_estimate_and_t_times_the_bootstraps_error():
    (split,) = made_up(scans=300)
    claimed = [Claim("ng", other, metric) for metric in METRICS for other in ("abmil", "smap")]
    found = differences([split], claimed, level=0.9, draws=300, seed=4)
    drawn, ids = resample([split], 300, 4), np.array(split.patient_ids)
    of_kind = [set(ids[split.labels == label]) for label in (0, 1)]
    for claim, one in zip(claimed, found, strict=True):
        local = claim.metric.startswith("localization")
        freedom = (len(of_kind[1]) if local else min(map(len, of_kind))) - 1
        spread = (drawn[claim.metric]["ng"] - drawn[claim.metric][claim.against]).std(ddof=1)
        values = measure([split])[claim.metric]
        assert (one.method, one.against, one.metric) == claim
        assert one.estimate == pytest.approx(values["ng"] - values[claim.against], abs=1e-12)
        expected = stats.t(freedom, one.estimate, spread).interval(0.9)
        assert (one.low, one.high) == pytest.approx(expected, abs=1e-6)
        error = delong([split], "ng", claim.against).standard_error if claim.metric == "scan_auroc" else spread
        assert one.p == pytest.approx(2 * stats.t.sf(abs(one.estimate) / error, freedom), abs=1e-4)
        assert one.p != pytest.approx(1)
    for metric in METRICS:
        family = [one for one in found if one.metric == metric]
        assert [one.p_adjusted for one in family] == holm([one.p for one in family])


def test_scans_and_patients_of_overlapping_splits_are_counted_once():
    splits = made_up(scans=100, splits=3)
    owners = {scan: who for split in splits for scan, who in zip(split.scan_ids, split.patient_ids, strict=True)}
    positive = {scan for split in splits for scan, label in zip(split.scan_ids, split.labels, strict=True) if label}
    local, whole = differences(splits, [Claim("ng", "smap", metric) for metric in METRICS[1:3]], draws=50)
    assert (whole.splits, whole.scans, whole.patients) == (3, len(owners), len(set(owners.values())))
    assert (local.splits, local.scans) == (3, len(positive))
    assert local.patients == len({owners[scan] for scan in positive})


def test_the_error_of_small_disjoint_splits_is_unbiased():
    """The variance of an average of independent means is the sum of theirs over the number of splits squared."""
    splits, variance = [], 0.0
    for i in range(3):
        values = np.random.default_rng(i).beta(3, 1, size=20)
        ids = tuple(f"split-{i}-scan-{j}" for j in range(20))
        methods = {"ng": MethodResults(values, values), "abmil": MethodResults(np.full(20, 0.5), np.full(20, 0.5))}
        splits.append(SplitResults(ids, ids, np.ones(20, dtype=np.int64), methods))
        variance += values.var(ddof=1) / 20 / 9
    (found,) = differences(splits, [Claim("ng", "abmil", "localization_auroc")], draws=10_000)
    half = stats.t.ppf(0.975, 59) * math.sqrt(variance)
    # Their sizes vary between draws, which makes up for the means that they have of their own: 20 / 19 of the variance.
    assert (found.high - found.low) / 2 == pytest.approx(half, rel=0.02)


@pytest.mark.parametrize(
    ("metric", "estimate", "p", "words"),
    [
        (
            "scan_auroc",
            0.051,
            0.132,
            f"No difference between NG and ABMIL in scan AUROC was shown: +.051 [.001, .101], "
            f"p = .132 (Holm); {CORRECTED}",
        ),
        ("localization_auroc", 0.1349, 2e-5, "NG localizes better than ABMIL: +.135 [.085, .185], p < .001 (Holm)"),
        ("localization_auprc", -0.1, 0.049, "NG localizes worse than ABMIL by AUPRC: -.100 [-.150, -.050], p = .049"),
        ("scan_auroc", 0.06, 0.02, "NG classifies scans better than ABMIL: +.060 [.010, .110], p = .020 (Holm)"),
        ("scan_auprc", 0.06, 0.02, "NG classifies scans better than ABMIL by AUPRC: +.060 [.010, .110]"),
        ("scan_auroc", 0.003, 0.6, "No difference between NG and ABMIL in scan AUROC was shown: +.003 [-.047, .053]"),
    ],
)
def test_findings_in_words(metric, estimate, p, words):
    found = Difference("ng", "abmil", metric, estimate, estimate - 0.05, estimate + 0.05, p / 2, p, 3, 900, 800)
    assert found.words(TITLES).startswith(words)
    assert (CORRECTED in found.words(TITLES)) == (CORRECTED in words)
    assert found.shown == (p < 0.05)
    assert found.test == ("DeLong" if metric == "scan_auroc" else "bootstrap")


def test_holm_by_hand():
    # Ascending: .01 * 4, .02 * 3, .03 * 2 (raised to the one before), .5 * 1; NaN is none of the four.
    assert holm([0.5, 0.01, math.nan, 0.03, 0.02]) == pytest.approx([0.5, 0.04, math.nan, 0.06, 0.06], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []


@pytest.mark.parametrize(("freedom", "tolerance"), [(4, 1e-3), (10, 3e-4), (60, 1e-5)])
def test_student_as_in_scipy(freedom, tolerance):
    for t in np.linspace(0, 8, 81):
        assert student_p(t, freedom) == pytest.approx(2 * stats.t.sf(t, freedom), abs=tolerance)
        assert student_p(-t, freedom) == student_p(t, freedom)
    for level in (0.5, 0.9, 0.99):
        assert student_p(student_quantile(level, freedom), freedom) == pytest.approx(1 - level, abs=1e-12)
