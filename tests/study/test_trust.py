"""The tests of attention say of good, inverted and position-bound attention what it is."""

from dataclasses import replace

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.models import CenteredGaussian
from normal_guidance.study.trust.attention_tests import Bootstrap, ScanPredictions, judge_alarm, predict_scans
from normal_guidance.study.trust.examine import examine
from small_trust import STRONG, bayes, fresh_abmil, paper_scans, strong_scans, with_attention_of

PASSES, FAILS, UNDECIDED = "passes", "fails", "cannot be told"


@pytest.fixture(scope="module")
def bags():
    return paper_scans()


@pytest.fixture(scope="module")
def strong():
    return strong_scans()


@pytest.fixture(scope="module")
def good(bags):
    return examine(bayes(), bags, untrained=fresh_abmil)


@pytest.fixture(scope="module")
def wrong(bags):
    """Without slice labels: the alarm does not need them."""
    return examine(bayes(sign=-1), replace(bags, slice_labels=None), untrained=fresh_abmil)


@pytest.mark.slow
def test_attention_near_bayes_passes_everything_on_data_as_weak_as_the_papers(good):
    assert {finding.verdict for finding in good.findings} == {PASSES}
    assert good["shuffle"].number.low > 0.5
    assert 0.7 < good.scan_auroc.low < good.scan_auroc.high < 0.85  # the paper's ceiling is .81
    assert good["inverted"].more["localization AUROC"].low > 0.8
    assert "slice labels confirm it" in good["inverted"].meaning


@pytest.mark.slow
def test_a_model_that_uses_the_order_of_slices_loses_by_shuffling(good):
    assert good["shuffle"].more["scan AUROC lost by shuffling"].low > 0
    assert "The order of slices counts" in good["shuffle"].meaning


@pytest.mark.slow
def test_inverted_attention_raises_the_alarm_without_slice_labels(wrong):
    assert wrong["inverted"].verdict == FAILS
    assert wrong["inverted"].number.high < 0
    assert wrong["inverted"].meaning == "ALARM: attention points away from the evidence."
    assert "localization AUROC" not in wrong["inverted"].more
    assert (wrong["deletion"].verdict, wrong["randomize"].verdict) == (FAILS, FAILS)
    assert wrong["shuffle"].verdict == PASSES  # it does come from the image


@pytest.mark.slow
def test_slice_labels_confirm_the_alarm(wrong, bags):
    found = judge_alarm(wrong.curves, predict_scans(bayes(sign=-1), bags), bags, wrong.bootstrap)
    assert found.verdict == FAILS
    assert "ALARM" in found.meaning
    assert "slice labels confirm it: localization AUROC .1" in found.meaning
    assert found.more["localization AUROC"].high < 0.2


@pytest.mark.slow
def test_inverting_turns_the_curves_round(good, wrong):
    for kind in ("deletion", "insertion"):
        one, other = good.curves[kind], wrong.curves[kind]
        for order, opposite in (("attended", "least attended"), ("least attended", "attended")):
            own = [point.value for point in one.auroc[order]]
            assert own == pytest.approx([point.value for point in other.auroc[opposite]], abs=1e-9)
        assert one.gap("logit", "least attended").value == pytest.approx(-other.gap("logit", "least attended").value)


def test_where_the_scan_score_tells_nothing_slice_labels_decide(strong):
    def silent(features, lengths):
        return torch.full((len(lengths),), torch.nan), bayes(STRONG, sign=-1)(features, lengths).attention

    found = examine(silent, strong)
    assert (found["inverted"].verdict, found["deletion"].verdict) == (FAILS, UNDECIDED)
    assert "by slice labels alone" in found["inverted"].meaning
    assert found.curves is None
    assert found.scan_auroc is None
    assert examine(silent, replace(strong, slice_labels=None))["inverted"].verdict == UNDECIDED


@pytest.mark.parametrize(("bias", "verdict"), [(0.02, UNDECIDED), (0.5, FAILS)])
def test_a_trace_below_chance_is_no_alarm(bags, bias, verdict):
    """Slices in random order, the positive ones a little further back: in so many scans that is significant."""
    drawn = torch.rand(len(bags.features), generator=torch.Generator().manual_seed(1)).double()
    own = ScanPredictions(torch.zeros(len(bags)).double(), drawn - bias * bags.slice_labels, torch.ones_like(drawn))
    found = judge_alarm(None, own, bags, Bootstrap(bags))
    assert found.more["localization AUROC"].high < 0.5
    assert found.verdict == verdict


def test_position_alone_is_unmasked_by_shuffling(strong):
    found = examine(with_attention_of(CenteredGaussian(), bayes(STRONG)), strong, untrained=fresh_abmil)
    assert found["shuffle"].verdict == FAILS
    position = found["shuffle"].more["stays at the places, shuffled (position alone)"]
    assert position.value == pytest.approx(1.0)
    assert found["shuffle"].number.value == pytest.approx(-1.0, abs=0.15)
    assert found["inverted"].verdict != FAILS  # the middle is no bad guess


def test_a_method_without_weights_is_what_an_untrained_one_is(strong):
    found = examine(CenteredGaussian(), strong)
    assert (found["shuffle"].verdict, found["randomize"].verdict) == (FAILS, FAILS)
    assert found["randomize"].more["rank correlation with untrained models"].value == pytest.approx(1.0)
    assert found["deletion"].verdict == UNDECIDED


def test_a_plain_function_must_say_how_it_is_untrained(strong):
    found = examine(bayes(STRONG), strong[:40])
    assert found["randomize"].verdict == UNDECIDED
    assert "untrained=" in found["randomize"].action
    assert "untrained" not in found.curves["deletion"].auroc


def test_shares_of_attention(strong):
    found = examine(bayes(STRONG), strong, untrained=fresh_abmil, by="attention")
    assert found["deletion"].verdict == PASSES
    assert found.as_json()["by"] == "attention"


def test_the_same_seed_gives_the_same_numbers(strong):
    one, two, other = (examine(bayes(STRONG), strong[:40], seed=seed).as_json() for seed in (0, 0, 1))
    assert str(one) == str(two)  # NaN is not equal to itself
    assert str(one) != str(other)


def test_too_few_patients_are_refused(strong):
    with pytest.raises(UserError, match=r"patients have positive scans .* the tests need 5 of each"):
        examine(bayes(), strong[:6])
    with pytest.raises(UserError, match="1 patients have positive scans and 1 have negative"):
        examine(bayes(), replace(strong[:40], patient_ids=("A",) * 40))


def test_an_unknown_share_is_refused(strong, unchecked):
    with pytest.raises(UserError, match="by is 'heads'; choose one of slices, attention"):
        examine(bayes(), strong, by="heads")
