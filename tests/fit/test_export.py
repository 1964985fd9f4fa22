"""Exported models give the outputs of the models they were made of, whatever the number of slices."""

import sys

import pytest
import torch

from normal_guidance.base.errors import UserError
from normal_guidance.core.methods import DISTINCT, EVERY_METHOD, build_model
from normal_guidance.fit.export import (
    LEAST,
    TOLERANCE,
    OneScan,
    export_model,
    open_graph,
    prove,
    read_metadata,
    relative_difference,
    trace,
    write_graph,
)
from normal_guidance.fit.export import _unchecked as unchecked

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
        found = model(scan, torch.tensor([len(scan)]))
    return {"logit": found.logit, "attention": found.attention, "log_attention": found.log_attention}


def check(run, model: torch.nn.Module, lengths=LENGTHS, width: int = WIDTH) -> None:
    for slices in lengths:
        scan = torch.randn(slices, width, generator=torch.Generator().manual_seed(slices))
        found = run(scan)
        for name, wanted in packed(model, scan).items():
            assert relative_difference(found[name], wanted, LEAST.get(name, 1.0)) <= TOLERANCE, (slices, name)


def test_every_method_is_exported():
    assert {EVERY_METHOD[name].model for name in DISTINCT} == set(MODELS)
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
    path = export_model(model, tmp_path / "model.pt2", metadata={"method": "abmil"})
    assert {"method": "abmil", "features": "16", "outputs": "logit,attention,log_attention"}.items() <= read_metadata(
        path
    ).items()
    check(open_graph(path), model, (1, 9))


def test_exporting_changes_nothing_about_the_model(tmp_path):
    model = model_of("mean").double().train()
    before, state = packed(model, torch.ones(3, WIDTH).double()), torch.get_rng_state()
    export_model(model, tmp_path / "model.pt2")
    after = packed(model, torch.ones(3, WIDTH).double())
    assert model.training
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(state, torch.get_rng_state())


class Counting(torch.nn.Module):
    """Depends on the number of slices in a way that tracing cannot see."""

    def forward(self, features):
        return (features.sum()[None] * (1 if torch.compiler.is_exporting() else 2),)


def test_a_graph_that_differs_is_not_written(tmp_path):
    with pytest.raises(UserError, match=r"the exported logit of a scan of 1 slices differs from the model's by 5"):
        write_graph(Counting(), tmp_path / "model.pt2", 4, ["logit"], {})
    assert list(tmp_path.iterdir()) == []


class Branching(torch.nn.Module):
    def forward(self, features):
        return (features.mean()[None] if features.shape[0] > 40 else features.sum()[None],)


def test_a_graph_that_depends_on_the_number_of_slices_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"Branching cannot be traced for any number of slices"):
        write_graph(Branching(), tmp_path / "model.pt2", 4, ["logit"], {})


def test_mistakes_are_named(tmp_path, monkeypatch):
    with pytest.raises(UserError, match=r"model.bin ends in '.bin'; name a file that ends in .onnx or .pt2"):
        export_model(model_of("mean"), tmp_path / "model.bin")
    with pytest.raises(UserError, match=r"CenteredGaussian does not say how many features a slice has; give them"):
        export_model(build_model("centered_gaussian"), tmp_path / "model.pt2")
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


@pytest.mark.parametrize(
    ("model", "options", "message"),
    [
        (Own(torch.sigmoid), {}, "Own does not say how many features a slice has; give them"),
        (Own(torch.sigmoid), {"features": 4}, "Own returned Tensor; give a model that takes"),
        (Own(lambda rows: (rows, rows)), {"features": 4}, "Own returned tuple; give a model that takes"),
        (torch.nn.Linear(8, 1), {"features": 8}, r"Linear does not take a scan of 8 features a slice .* as those of"),
        ("mean", {"features": 4}, "features is 4, but [A-Za-z]+ takes 16 a slice; leave features out"),
        ("mean", {"features": "8"}, "features is '8'; give a whole number"),
        ("mean", {"features": -1}, "features is -1; give a whole number"),
        ("mean", {"metadata": {"epochs": 5}}, "metadata 'epochs' is 5; give names and values as text, such as '5'"),
        ("mean", {"metadata": {"outputs": "a,b"}}, "metadata has 'outputs', which the file says of itself"),
        ("mean", {"metadata": {5: "epochs"}}, "metadata 5 is 'epochs'; give names and values as text"),
    ],
)
def test_what_cannot_be_exported_is_named(model, options, message, tmp_path):
    model = model_of(model) if isinstance(model, str) else model
    with unchecked(), pytest.raises(UserError, match=message):  # as in production: no checks of types
        export_model(model, tmp_path / "model.pt2", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_is_not_a_file(tmp_path):
    (tmp_path / "dir.pt2").mkdir()
    with pytest.raises(UserError, match=r"dir.pt2 is a folder; name a file in it, such as .*model.pt2"):
        export_model(model_of("mean"), tmp_path / "dir.pt2")


def test_differences_are_seen():
    nan, inf = float("nan"), float("inf")
    assert relative_difference(torch.tensor([nan, -inf, 2.0]), torch.tensor([nan, -inf, 2.0])) == 0.0
    for wrong in ([nan, -inf, 3.0], [nan, inf, 2.0], [0.0, -inf, 2.0], [nan, 0.0, 2.0], [nan, -inf, nan]):
        assert not relative_difference(torch.tensor(wrong), torch.tensor([nan, -inf, 2.0])) < 0.4


def test_prove_reports_the_largest_difference(tmp_path):
    graph = OneScan(model_of("abmil"))
    path = export_model(graph.model, tmp_path / "model.pt2")
    assert 0.0 <= prove(path, graph, WIDTH, OneScan.OUTPUTS) <= TOLERANCE
    with pytest.raises(UserError, match="differs"):
        prove(path, OneScan(build_model("abmil", WIDTH).eval()), WIDTH, OneScan.OUTPUTS)
