"""Exported models and bundles give the outputs of the models they were made of, whatever the number of slices."""

import json
import sys
from dataclasses import replace

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.clinic.predict.predicting import scores_of
from normal_guidance.core.methods import DISTINCT, EVERY_METHOD, build_model
from normal_guidance.core.prediction import attention_per_head
from normal_guidance.fit.bundle import Bundle
from normal_guidance.fit.ensemble import COMPONENTS, Ensemble
from normal_guidance.fit.export import (
    LEAST,
    TOLERANCE,
    OneScan,
    export_bundle,
    export_model,
    open_graph,
    prove,
    read_metadata,
    relative_difference,
    trace,
    write_graph,
)
from normal_guidance.scans.index.manifest import Finding
from normal_guidance.sweep.config import Config
from small_bundle import fitted_bundle

# Guidance and other terms are losses: their methods are the same modules.
MODELS = tuple(dict.fromkeys(EVERY_METHOD[name].model for name in DISTINCT))
LENGTHS = (1, 2, 3, 11, 40, 131)
WIDTH = 16


def model_of(name: str, width: int = WIDTH) -> torch.nn.Module:
    """A model whose attention is uneven, as after training."""
    model = build_model(name, width)
    generator = torch.Generator().manual_seed(3)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return model.eval()


def packed(model: torch.nn.Module, scan: torch.Tensor) -> dict[str, torch.Tensor]:
    """What the model itself gives for the scan: packed, as everything else in the package calls it."""
    with torch.no_grad():
        prediction = model(scan, torch.tensor([len(scan)]))
    return {name: getattr(prediction, name) for name in OneScan.OUTPUTS}


def check(run, model: torch.nn.Module, lengths=LENGTHS, width: int = WIDTH) -> None:
    for slices in lengths:
        scan = torch.randn(slices, width, generator=torch.Generator().manual_seed(slices))
        made = run(scan)
        for name, wanted in packed(model, scan).items():
            assert relative_difference(made[name], wanted, LEAST.get(name, 1.0)) <= TOLERANCE, (slices, name)


def test_every_method_is_exported():
    for name in DISTINCT:
        assert type(build_model(name, WIDTH)) is type(build_model(EVERY_METHOD[name].model, WIDTH))


@pytest.mark.parametrize("name", MODELS)
def test_an_exported_program_gives_the_models_outputs(name):
    model = model_of(name)
    program = trace(OneScan(model), WIDTH).module()
    check(lambda scan: dict(zip(OneScan.OUTPUTS, program(scan), strict=True)), model)


@pytest.mark.slow(but=("max", "smtp", "whole_bells"))  # every kind of layer but gates
@pytest.mark.parametrize("name", MODELS)
def test_onnx_runtime_gives_the_models_outputs(name, tmp_path):
    model = model_of(name)
    check(open_graph(export_model(model, tmp_path / "model.onnx", features=WIDTH)), model)


@pytest.mark.slow
@pytest.mark.parametrize("name", MODELS)
def test_full_size(name, tmp_path):
    """The paper's embeddings, and more slices than a matrix of windows is otherwise made for."""
    model = build_model(name).eval()
    check(open_graph(export_model(model, tmp_path / "model.onnx", features=768)), model, (1, 40, 300, 2100), 768)


def test_metadata_and_programs_in_files(tmp_path):
    model = model_of("abmil")
    path, graph = export_model(model, tmp_path / "model.pt2", metadata={"method": "abmil"}), OneScan(model)
    about = {"method": "abmil", "features": "16", "outputs": "logit,attention,log_attention"}
    assert about.items() <= read_metadata(path).items()
    check(open_graph(path), model, (1, 9))
    prove(path, graph, WIDTH, OneScan.OUTPUTS)
    with pytest.raises(UserError, match="differs"):
        prove(path, OneScan(build_model("abmil", WIDTH).eval()), WIDTH, OneScan.OUTPUTS)


def test_exporting_changes_nothing_about_the_model(tmp_path):
    model = model_of("mean").double().train()
    before, state = packed(model, torch.ones(3, WIDTH).double()), torch.get_rng_state()
    export_model(model, tmp_path / "model.pt2")
    assert model.training
    torch.testing.assert_close(packed(model, torch.ones(3, WIDTH).double()), before, rtol=0, atol=0)
    assert torch.equal(state, torch.get_rng_state())


class Counting(torch.nn.Module):
    """Depends on the number of slices in a way that tracing cannot see."""

    def forward(self, features):
        return (features.sum()[None] * (1 if torch.compiler.is_exporting() else 2),)


class Branching(torch.nn.Module):
    def forward(self, features):
        return (features.mean()[None] if features.shape[0] > 40 else features.sum()[None],)


@pytest.mark.parametrize(
    ("graph", "message"),
    [
        (Counting(), "the exported logit of a scan of 1 slices differs from the model's by 5"),
        (Branching(), "Branching cannot be traced for any number of slices"),
    ],
)
def test_graphs_that_depend_on_the_number_of_slices_are_not_written(graph, message, tmp_path):
    with pytest.raises(UserError, match=message):
        write_graph(graph, tmp_path / "model.pt2", 4, ["logit"], {})
    assert list(tmp_path.iterdir()) == []


def test_mistakes_are_named(tmp_path, monkeypatch):
    (tmp_path / "dir.pt2").mkdir()
    with pytest.raises(UserError, match=r"dir.pt2 is a folder; name a file in it, such as .*model.pt2"):
        export_model(model_of("mean"), tmp_path / "dir.pt2")
    monkeypatch.setitem(sys.modules, "onnxscript", None)
    with pytest.raises(UserError, match=r"pip install 'normal-guidance\[export\]'"):
        export_model(model_of("mean"), tmp_path / "model.onnx")


class Own(torch.nn.Module):
    """A model of another make, which returns what it is told to."""

    def __init__(self, output):
        super().__init__()
        self.output, self.classifier = output, torch.nn.Sequential(torch.nn.Linear(4, 1))

    def forward(self, features, bags):
        return self.output(self.classifier(features))


@pytest.mark.parametrize(  # the page of errors (docs/errors_page.py) has the others
    ("model", "options", "message"),
    [
        (Own(torch.sigmoid), {"features": 4}, "Own returned Tensor; give a model that takes"),
        (Own(lambda rows: (rows, rows)), {"features": 4}, "Own returned tuple; give a model that takes"),
        ("mean", {"metadata": {5: "epochs"}}, "metadata 5 is 'epochs'; give names and values as text"),
    ],
)
def test_what_cannot_be_exported_is_named(model, options, message, tmp_path, unchecked):
    model = model_of(model) if isinstance(model, str) else model
    with pytest.raises(UserError, match=message):
        export_model(model, tmp_path / "model.pt2", **options)
    assert list(tmp_path.iterdir()) == []


def test_differences_are_seen():
    nan, inf = float("nan"), float("inf")
    assert relative_difference(torch.tensor([nan, -inf, 2.0]), torch.tensor([nan, -inf, 2.0])) == 0.0
    for wrong in ([nan, -inf, 3.0], [nan, inf, 2.0], [0.0, -inf, 2.0], [nan, 0.0, 2.0], [nan, -inf, nan]):
        assert not relative_difference(torch.tensor(wrong), torch.tensor([nan, -inf, 2.0])) < 0.4


@pytest.fixture(scope="module")
def bundle() -> Bundle:
    return fitted_bundle(COMPONENTS + 2)


def check_bundle(path, bundle: Bundle) -> None:
    run = open_graph(path)
    for slices in (1, 2, 5, 33, 127, 129, 300):  # windows are summed in another way from 129 slices on
        scan = 3 * torch.randn(slices, bundle.features, generator=torch.Generator().manual_seed(slices))
        made = run(scan)
        scores = scores_of(bundle, scan)
        for number, (model, (logit, log_attention)) in enumerate(zip(bundle.each, scores, strict=True)):
            assert made["logit"][number].item() == pytest.approx(logit, rel=1e-5, abs=1e-5)
            probability = model.operation.calibration.probability(logit)
            assert made["probability"][number].item() == pytest.approx(probability, abs=1e-6)
            attention = attention_per_head(log_attention).mean(0)
            torch.testing.assert_close(made["attention"][number].double(), attention, rtol=1e-4, atol=1e-7)


@pytest.mark.slow(but=".pt2")
@pytest.mark.parametrize("ending", [".onnx", ".pt2"])
def test_a_fitted_ensemble(bundle, ending, tmp_path):
    path = export_bundle(bundle, tmp_path / f"model{ending}")
    check_bundle(path, bundle)
    about = read_metadata(path)
    assert (about["method"], about["fingerprint"]) == ("ensemble", bundle.identity.fingerprint)
    assert json.loads(about["thresholds"]) == [bundle.threshold]


@pytest.mark.slow
def test_an_ensemble_that_knows_nothing_gives_the_prior(bundle, tmp_path):
    blind = replace(bundle, model=Ensemble(list(bundle.model.kinds), shown=False).eval())
    check_bundle(export_bundle(blind, tmp_path / "model.pt2"), blind)


@pytest.mark.slow
def test_several_findings_and_a_trained_method(bundle, tmp_path):
    """The ONNX graph rounds features to the store's format, too: unrounded ones differ by more than the tolerance."""
    other = replace(bundle, config=Config("transmil"), model=build_model("transmil", 16).eval(), features=16)
    first = replace(other, config=Config("ng"), model=build_model("ng", 16).eval(), finding=Finding("any"))
    both = replace(first, further=(replace(other, finding=Finding("epidural")),))
    path = export_bundle(both, tmp_path / "model.onnx")
    scan = 2049.0 + 4 * torch.randint(8, (9, 16), generator=torch.Generator().manual_seed(1))  # float16 takes 1 away
    made, wanted = open_graph(path)(scan), [logit for logit, _ in scores_of(both, scan)]
    unrounded = first.model(scan, torch.tensor([9])).logit.item()
    assert made["logit"].tolist() == pytest.approx(wanted, rel=1e-5)
    assert abs(unrounded - wanted[0]) > 1e-4 * abs(wanted[0])
    assert json.loads(read_metadata(path)["findings"]) == ["any", "epidural"]
