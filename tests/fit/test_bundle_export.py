"""An exported bundle gives the probability and the attention of `nguide predict` for a scan's features."""

import json
from dataclasses import replace

import pytest
import torch

from normal_guidance.clinic.predict.predicting import scores_of
from normal_guidance.core.methods import build_model
from normal_guidance.core.prediction import attention_per_head
from normal_guidance.fit.bundle import Bundle, Expectations
from normal_guidance.fit.committee import Committee
from normal_guidance.fit.export import export_bundle, open_graph, read_metadata
from normal_guidance.fit.slice_finder import SliceFinder
from normal_guidance.scans.index.manifest import Finding
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.config import Config

WIDTH = 6
LENGTHS = (1, 2, 5, 33, 127, 129, 300)  # windows are summed in another way from 129 slices on


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    finder = SliceFinder(folds=3, repeats=1).fit(shifted_mean(60, 1, features=WIDTH, shift=2.0))
    about = (WIDTH, "float16", None, None, False, Expectations(), finder.operation_, {})
    return Bundle(None, finder.committee_, *about)


def check(path, bundle: Bundle) -> None:
    run = open_graph(path)
    for slices in LENGTHS:
        scan = 3 * torch.randn(slices, WIDTH, generator=torch.Generator().manual_seed(slices))
        found, wanted = run(scan), scores_of(bundle, scan)
        for number, (one, (logit, log_attention)) in enumerate(zip(bundle.each, wanted, strict=True)):
            probability = one.operation.calibration.probability(logit)
            assert found["logit"][number].item() == pytest.approx(logit, rel=1e-5, abs=1e-5)
            assert found["probability"][number].item() == pytest.approx(probability, abs=1e-6)
            attention = attention_per_head(log_attention).mean(0)
            torch.testing.assert_close(found["attention"][number].double(), attention, rtol=1e-4, atol=1e-7)


@pytest.mark.slow(but=".pt2")
@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
def test_a_fitted_committee(bundle, ending, tmp_path):
    path = export_bundle(bundle, tmp_path / f"model{ending}")
    check(path, bundle)
    about = read_metadata(path)
    assert about["method"] == "committee"
    assert about["fingerprint"] == bundle.identity.fingerprint
    assert json.loads(about["thresholds"]) == [bundle.threshold]


@pytest.mark.slow
def test_a_committee_that_knows_nothing_gives_the_prior(bundle, tmp_path):
    committee = bundle.model
    assert isinstance(committee, Committee)
    blind = committee.of(range(len(committee)))
    blind.shown = False
    blind = replace(bundle, model=blind)
    check(export_bundle(blind, tmp_path / "model.pt2"), blind)


@pytest.mark.slow
def test_several_findings_and_a_trained_method(bundle, tmp_path):
    """The ONNX graph rounds features to the store's format, too: unrounded ones differ by more than the tolerance."""
    other = replace(bundle, config=Config("transmil"), model=build_model("transmil", 16).eval(), features=16)
    first = replace(other, config=Config("ng"), model=build_model("ng", 16).eval(), finding=Finding("any"))
    both = replace(first, further=(replace(other, finding=Finding("epidural")),))
    path = export_bundle(both, tmp_path / "model.onnx")
    scan = 100 * torch.randn(9, 16, generator=torch.Generator().manual_seed(1))
    found = open_graph(path)(scan)
    wanted = [logit for logit, _ in scores_of(both, scan)]
    unrounded = first.model(scan, torch.tensor([9])).logit.item()
    assert found["logit"].tolist() == pytest.approx(wanted, rel=1e-5)
    assert abs(unrounded - wanted[0]) > 1e-4 * abs(wanted[0])
    assert json.loads(read_metadata(path)["findings"]) == ["any", "epidural"]
