"""Attention that has learnt nothing is unmasked, whether the model has learnt to tell scans apart or not."""

import pytest
import torch

from normal_guidance.core.models import EvidenceMIL, MaxPooling, MeanPooling
from normal_guidance.study.trust.examine import examine
from small_trust import FEATURES, fresh_abmil, paper_scans, strong_scans, with_learnt_classifier

PASSES, FAILS, UNDECIDED = "passes", "fails", "cannot be told"


@pytest.fixture(scope="module")
def bags():
    return paper_scans(1000)


@pytest.mark.slow
def test_a_guided_model_with_random_weights_is_unmasked_by_fresh_weights(bags):
    found = examine(fresh_abmil(21), bags[:500])  # ng is ABMIL, trained with another loss
    assert found["randomize"].verdict == FAILS
    assert "untrained models separate positive from negative scans as well" in found["randomize"].meaning
    assert found["inverted"].verdict != FAILS
    # Shuffling cannot see it: attention without position goes with the slices, whatever it has learnt.
    assert found["shuffle"].verdict == PASSES
    assert found["shuffle"].more["share of attention that shuffling moves (equivariance error)"].value < 1e-6
    assert found["shuffle"].more["scan AUROC lost by shuffling"].value == pytest.approx(0, abs=1e-9)


@pytest.mark.slow
def test_attention_tied_to_random_evidence_moves_the_logit_and_is_unmasked_all_the_same(bags):
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        model = EvidenceMIL(FEATURES, bells=True)
    found = examine(model, bags[:400])
    assert found["deletion"].more["deletion, logit of positive scans, beside random"].low > 0.5  # by construction
    assert found["deletion"].verdict != PASSES
    assert found["randomize"].verdict == FAILS


@pytest.mark.slow
def test_a_classifier_with_unlearnt_attention_fails_what_it_should(bags):
    found = examine(with_learnt_classifier(fresh_abmil(5)), bags)
    assert found.scan_auroc.low > 0.7
    assert [finding.verdict for finding in found.findings[:3]] == [PASSES, FAILS, FAILS]
    assert found["inverted"].verdict != FAILS


@pytest.mark.slow
def test_attention_that_is_equal_everywhere_points_nowhere(bags):
    found = examine(with_learnt_classifier(MeanPooling(FEATURES)), bags[:400])
    assert found.scan_auroc.low > 0.6
    assert found["shuffle"].verdict == UNDECIDED
    assert PASSES not in {finding.verdict for finding in found.findings}


def test_max_pooling_attends_as_an_untrained_one_does():
    found = examine(with_learnt_classifier(MaxPooling(FEATURES)), strong_scans())
    assert found.scan_auroc.low > 0.7
    assert found["randomize"].verdict == FAILS
    assert found["randomize"].more["rank correlation with untrained models"].value == pytest.approx(1.0)
    assert found["deletion"].verdict != PASSES
