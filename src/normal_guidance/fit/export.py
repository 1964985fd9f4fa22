"""Models as files for other programs: ONNX (`.onnx`), or PyTorch's own exported program (`.pt2`), without our code.

The graph takes one scan, packed features `(slices, features)` in float32, with any number of slices.  There is no
batch: scans have different lengths, padding would have to be hidden in every program that calls the graph, and one
scan is quick.  Memory grows with the square of the slices in TransMIL and its relatives (8 heads) and in the two heads
beyond the paper (one matrix in float64: 3 GB for 20,000 slices).
"""

from __future__ import annotations

import json
import math
import os
import tempfile
from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch._dynamo.exc import UserError as TorchUserError
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import GuardOnDataDependentSymNode

from normal_guidance import __version__
from normal_guidance.base.errors import UserError, shorten
from normal_guidance.base.files import write_atomically
from normal_guidance.base.system import importing, without_warnings
from normal_guidance.core.arrays import checked_whole
from normal_guidance.core.layout import Layout
from normal_guidance.core.prediction import Prediction, attention_per_head
from normal_guidance.fit.bundle import Bundle
from normal_guidance.fit.ensemble import Ensemble
from normal_guidance.scans.features.store import DTYPES

ONNX, PROGRAM = ".onnx", ".pt2"
OWN = ("normal_guidance", "features", "outputs")  # names in the metadata of a file that a caller cannot give
METADATA = "metadata.json"  # the file in an exported program that holds its metadata

# The most by which an output of a file may differ from its model's: attention relative to its largest value, others to
# 1 or, if larger, to their largest value.  Both compute in float32, but sum in other orders.
TOLERANCE = 1e-4
LEAST = {"attention": 0.0}  # what outputs are measured against at least, if not 1: attention may be small everywhere
LENGTHS = (1, 2, 37, 150)  # slices of the random scans on which a written file is compared with its model
EXAMPLE = 7  # slices of the scan that is traced; the graph does not depend on it


class OneScan(nn.Module):
    """A model of bags as a function of one scan: logit (1,), attention (slices,), log-attention (heads, slices)."""

    OUTPUTS = ("logit", "attention", "log_attention")

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, features: Float[Tensor, "slices features"]) -> tuple[Tensor, Tensor, Tensor]:
        made = predict_one(self.model, features)
        return made.logit, made.attention[0], made.log_attention[0]


def predict_one(model: nn.Module, features: Float[Tensor, "slices features"]) -> Prediction:
    """The prediction for one scan as a padded batch of one, which is traced without reading its length."""
    slices = features.shape[0]
    lengths = torch.full((1,), slices, dtype=torch.int64, device=features.device)
    prediction = model(features[None], Layout.padded(lengths, slices))
    if not isinstance(prediction, Prediction):
        raise UserError(
            f"{type(model).__name__} returned {type(prediction).__name__}; give a model that takes (features, bags) "
            "and returns a Prediction, as those of build_model do"
        )
    return prediction


def export_model(
    model: nn.Module,
    path: str | Path,
    *,
    features: int | None = None,
    metadata: Mapping[str, str] | None = None,
) -> Path:
    """Write a model as ONNX or as an exported program, by the ending of the path, and prove that the file equals it.

    The file takes `features`, `(slices, features)` in float32, and gives `logit`, `attention` and `log_attention`
    (`OneScan`).  What was written is run on random scans of several lengths beside the model, ONNX by ONNX Runtime.

    Args:
        model: one of `METHODS` or of your own that takes the same arguments; copied to the CPU, in eval mode, float32.
        path: a file that ends in `.onnx` or `.pt2`.
        features: features per slice; without it, those of the model's classifier.
        metadata: what the file shall say of itself, beside the version.

    Example:
        >>> from normal_guidance.core.methods import build_model
        >>> folder = tempfile.mkdtemp()
        >>> export_model(build_model("abmil", 16), Path(folder) / "abmil.pt2", metadata={"method": "abmil"}).name
        'abmil.pt2'
    """
    if isinstance(model, str | Path):
        raise UserError(
            f"model: got the path {str(model)!r}; give a torch module, such as train_model(...).model. A command "
            f"exports the folder of a model: nguide export {model} --out {path}"
        )
    if not isinstance(model, nn.Module):
        raise UserError(f"model: got {type(model).__name__}; give a torch module, such as train_model(...).model")
    known = _width(model)
    width = known if features is None else features
    if width is None:
        raise UserError(f"{type(model).__name__} does not say how many features a slice has; give them: features=768")
    width = checked_whole("features", width)
    if known not in (None, width):
        raise UserError(f"features is {width}, but {type(model).__name__} takes {known} a slice; leave features out")
    try:
        with torch.no_grad():
            OneScan(deepcopy(model).float().cpu().eval())(torch.zeros(EXAMPLE, width))
    except UserError:
        raise
    except (RuntimeError, TypeError, ValueError) as error:  # the exporter's own words name lines of other programs
        raise UserError(
            f"{type(model).__name__} does not take a scan of {width} features a slice "
            f"({shorten(' '.join(str(error).split()), 200)}); correct features=, or give a model that takes (features, "
            "bags) as those of build_model do"
        ) from error
    return write_graph(OneScan(model), path, width, OneScan.OUTPUTS, metadata or {})


def _width(model: nn.Module) -> int | None:
    width = (
        model.features
        if isinstance(model, Ensemble)
        else getattr(getattr(model, "classifier", None), "in_features", None)
    )
    return None if width is None else int(width)


def write_graph(
    graph: nn.Module, path: str | Path, features: int, outputs: Sequence[str], metadata: Mapping[str, str]
) -> Path:
    """Write a function from `(slices, features)` to a tuple of tensors, and prove that the file equals it."""
    path = Path(path)
    if not path.parent.is_dir():
        raise UserError(f"{path} cannot be written: there is no folder {path.parent}; make it first")
    if path.suffix not in (ONNX, PROGRAM):
        raise UserError(f"{path} ends in {path.suffix!r}; name a file that ends in {ONNX} or {PROGRAM}")
    if path.is_dir():
        raise UserError(f"{path} is a folder; name a file in it, such as {path / f'model{path.suffix}'}")
    for name, value in metadata.items():
        if name in OWN:
            raise UserError(f"metadata has {name!r}, which the file says of itself; choose another name")
        if not isinstance(name, str) or not isinstance(value, str):
            raise UserError(f"metadata {name!r} is {value!r}; give names and values as text, such as {str(value)!r}")
    if path.suffix == ONNX:
        require_export()
    about = {"normal_guidance": __version__, "features": str(features), "outputs": ",".join(outputs), **metadata}
    graph = deepcopy(graph).float().cpu().eval()
    program = trace(graph, features)
    with tempfile.TemporaryDirectory() as folder:
        draft = Path(folder) / path.name
        if path.suffix == ONNX:
            names: dict[str, Any] = {"input_names": ["features"], "output_names": list(outputs)}
            with without_warnings():
                made = torch.onnx.export(program, external_data=False, verbose=False, **names)
            assert made is not None
            made.model.metadata_props.update(about)
            made.save(draft, external_data=False)
        else:
            torch.export.save(program, draft, extra_files={METADATA: json.dumps(about)})
        prove(draft, graph, features, outputs)
        write_atomically(path, draft.read_bytes())
    return path


def trace(graph: nn.Module, features: int) -> ExportedProgram:
    """The exported program of a function of one scan's features, for any number of slices from 1 on."""
    # The values of the example do not matter; a generator of its own leaves the caller's random numbers alone.
    example = torch.randn(EXAMPLE, features, generator=torch.Generator().manual_seed(0))
    try:
        with torch.no_grad(), without_warnings():
            program = torch.export.export(graph, (example,), dynamic_shapes={"features": {0: Dim("slices", min=1)}})
    except (TorchUserError, GuardOnDataDependentSymNode) as error:
        reason = " ".join(str(error).split())[:300]
        raise UserError(
            f"{type(graph).__name__} cannot be traced for any number of slices ({reason} ...); write its forward pass "
            "without Python branches on the slices"
        ) from error
    # Checks of a tensor's type, which conversions leave: under vmap, over the members of an ensemble, ONNX's exporter
    # cannot ask for the shape that they want to see.
    for node in program.graph.find_nodes(op="call_function", target=torch.ops.aten._assert_tensor_metadata.default):
        program.graph.erase_node(node)
    program.graph_module.recompile()
    return program


def read_metadata(path: str | Path) -> dict[str, str]:
    path = Path(path)
    if path.suffix == PROGRAM:
        extra: dict[str, Any] = {METADATA: ""}
        torch.export.load(path, extra_files=extra)
        return dict(json.loads(extra[METADATA]))
    require_export()
    import onnx

    return {entry.key: entry.value for entry in onnx.load(path, load_external_data=False).metadata_props}


Run = Callable[[Tensor], dict[str, Tensor]]


def open_graph(path: str | Path) -> Run:
    """A function from one scan's features to the outputs by name of an exported file, as another program runs it."""
    path = Path(path)
    if path.suffix == PROGRAM:
        module, names = torch.export.load(path).module(), read_metadata(path)["outputs"].split(",")

        def run_program(features: Float[Tensor, "slices features"]) -> dict[str, Tensor]:
            with torch.no_grad():
                return dict(zip(names, module(features.float()), strict=True))

        return run_program
    require_export()
    import onnxruntime

    session = onnxruntime.InferenceSession(os.fspath(path), providers=["CPUExecutionProvider"])
    given = [output.name for output in session.get_outputs()]

    def run_session(features: Float[Tensor, "slices features"]) -> dict[str, Tensor]:
        values = session.run(None, {"features": features.float().numpy()})
        return {name: torch.from_numpy(value) for name, value in zip(given, values, strict=True)}

    return run_session


def prove(path: Path, graph: nn.Module, features: int, outputs: Sequence[str]) -> None:
    """Refuse a file whose outputs differ from its model's on random scans by more than `TOLERANCE`."""
    run = open_graph(path)
    generator = torch.Generator().manual_seed(1)
    for slices in LENGTHS:
        scan = torch.randn(slices, features, generator=generator)
        with torch.no_grad():
            wanted = dict(zip(outputs, graph(scan), strict=True))
        made = run(scan)
        for name, value in wanted.items():
            difference = relative_difference(made[name], value, LEAST.get(name, 1.0))
            if not difference <= TOLERANCE:
                raise UserError(
                    f"the exported {name} of a scan of {slices} slices differs from the model's by {difference:.1e} of "
                    f"its size; {TOLERANCE:g} is allowed, so {path.name} was not written"
                )


def relative_difference(made: Tensor, wanted: Tensor, least: float = 0.0) -> float:
    """The largest difference relative to the largest value or `least`; what is not finite must be the same in both."""
    made, wanted = made.detach().double(), wanted.detach().double()
    finite = wanted.isfinite()
    if made.shape != wanted.shape or not torch.equal(made[~finite].nan_to_num(7.0), wanted[~finite].nan_to_num(7.0)):
        return math.inf
    if not finite.any():
        return 0.0
    made, wanted = made[finite], wanted[finite]
    largest = wanted.abs().max().clamp_min(max(least, torch.finfo(torch.float32).tiny))
    return float((made - wanted).abs().max() / largest)


def require_export() -> None:
    with importing("export", f"ONNX needs onnx, onnxruntime and onnxscript, a file that ends in {PROGRAM} does not"):
        import onnx  # noqa: F401
        import onnxruntime  # noqa: F401
        import onnxscript  # noqa: F401


OUTPUTS = ("probability", "logit", "attention")


class BundleGraph(nn.Module):
    """The findings' probabilities, logits `(findings,)` and attention `(findings, slices)` of one scan's features."""

    def __init__(self, bundle: Bundle) -> None:
        super().__init__()
        self.dtype = DTYPES[bundle.dtype]
        self.models = nn.ModuleList(each.model for each in bundle.each)
        self.calibrations = [each.operation.calibration for each in bundle.each]

    def forward(self, features: Float[Tensor, "slices features"]) -> tuple[Tensor, Tensor, Tensor]:
        rows = features.to(self.dtype).float()  # rounded as those of the training scans were
        made = [predict_one(model, rows) for model in self.models]
        attention = [attention_per_head(scan.log_attention[0].double()).mean(0) for scan in made]
        logits = torch.cat([scan.logit for scan in made])
        odds = [
            line.slope * scan.logit.double() + line.intercept
            for scan, line in zip(made, self.calibrations, strict=True)
        ]
        return torch.cat(odds).sigmoid().float(), logits, torch.stack(attention).float()


def export_bundle(bundle: Bundle, path: str | Path) -> Path:
    """Write a bundle as ONNX or as an exported program, and prove that the file equals it."""
    about = {
        "method": bundle.method,
        "fingerprint": bundle.identity.fingerprint,
        "encoder": "" if bundle.encoder is None else bundle.encoder.name,
        "encoder_fingerprint": "" if bundle.encoder is None else bundle.encoder.fingerprint,
        "preprocessing": json.dumps(None if bundle.preprocessing is None else bundle.preprocessing.to_dict()),
        "expects": str(bundle.expects),
        "findings": json.dumps([None if each.finding is None else each.finding.name for each in bundle.each]),
        "thresholds": json.dumps([each.threshold for each in bundle.each]),
        "caution": "Research software, not a medical device.",
    }
    return write_graph(BundleGraph(bundle), path, bundle.features, OUTPUTS, about)
