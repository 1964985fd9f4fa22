"""The page of errors: what the public functions say to five mistakes each, by making the mistakes.

python docs/errors_page.py    prints the page, and fails where a mistake is accepted or an error says too little

docs/site_hook.py shows what is printed as reference/errors.md, with a box to search it.
"""

from __future__ import annotations

import contextlib
import os
import re
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

EACH = 5
"""The least number of mistakes that each public function is shown with."""

NOT_CALLED = {"Prediction", "UserError"}
"""Public classes that people receive and do not make."""

LEAD = """# Errors: message and what to do

Paste the message that you saw: every message names the object, the value and what to do next, and below is the call
that leads to it. A mistake that you can correct is a `normal_guidance.UserError`, a `ValueError`; the command line
prints it without a traceback and ends with exit code 2.

<p class="errors-search" hidden>
<input type="search" aria-label="Search the messages" placeholder="a message, or words of it"> <span></span>
</p>

"""

SHARED = """## Lines that the calls share

```python
import numpy as np
import pandas as pd
import torch

import normal_guidance as ng
from normal_guidance.study.drawn import shifted_mean

bags, other = shifted_mean(20, seed=1, features=8), shifted_mean(20, seed=2, features=4)  # 8 and 4 features a slice
attention = torch.full((2, 4), 0.25)  # two scans of four slices
model = ng.build_model("abmil", features=8)
finder = ng.SliceFinder(folds=3)
guidance = ng.NormalGuidance()
```
"""

MISTAKES: Mapping[str, Sequence[str]] = {
    "fit": (
        'ng.fit("no-such-store", out="new")',
        'ng.fit(np.zeros((5, 8)), out="new")',
        'ng.fit([torch.zeros(3, 8)], out="new")',
        'ng.fit([torch.zeros(3, 8)], [0, 1], out="new")',
        'ng.fit("store", [0, 1], out="new")',
        "ng.fit(bags, out=bags.labels)",
        'ng.fit(bags[:4], out="new")',
        'ng.fit(bags, out="new", sensitivity=95)',
        'ng.fit(bags, out="new", coverage=90)',
        'ng.fit(bags, out="new", device="gpu")',
        'ng.fit(bags, out="new", finding="tumour")',
        'ng.fit(bags, out="new", test=bags)',
        'ng.fit(bags, out="new", seed=-1)',
        'ng.fit(bags, out="new", sensitivity="high")',
        'ng.fit(bags, out="new", coverage="high")',
        'ng.fit(bags, out="new", device=["cpu"])',
        'ng.fit(bags, out="new", patient_ids="AB")',
        'ng.fit("store", out="new", patient_ids=["A"])',
        'ng.fit(bags, out="full")',
        'ng.fit(bags, "labels.csv")',
    ),
    "predict": (
        'ng.predict("new-scans", "no-such-model")',
        'ng.predict("no-such-scans", "model")',
        'ng.predict([], "model")',
        'ng.predict(other, "model")',
        'ng.predict(np.zeros((5, 8)), "model")',
        'ng.predict([np.zeros((5, 4))], "model")',
        "ng.predict(bags, model)",
        "ng.predict(bags, finder)",
        'ng.predict(bags, "model", threshold=0.5)',
        'ng.predict(bags, "model", options=None)',
    ),
    "PredictOptions": (
        "ng.PredictOptions(keys=0)",
        "ng.PredictOptions(keys=2.5)",
        "ng.PredictOptions(workers=-1)",
        "ng.PredictOptions(batch_size=0)",
        "ng.PredictOptions(share=50)",
        'ng.PredictOptions(share="half")',
        "ng.PredictOptions(threshold=0.5)",
    ),
    "SliceFinder": (
        "finder.predict(bags)",
        "finder.fit(np.zeros((5, 8)))",
        "finder.fit([np.zeros((5, 8)), np.zeros((6, 8))])",
        "finder.fit(np.zeros((2, 5, 8)), y=[0, 1])",
        "finder.fit([np.zeros((5, 8)), np.zeros((6, 8))], y=[0, 2])",
        'finder.fit([np.zeros((5, 8)), np.zeros((6, 8))], y=["no", "yes"])',
        "finder.fit([np.zeros((5, 8)), np.zeros((6, 4))], y=[0, 1])",
        "finder.fit(bags, y=[0, 1])",
        "finder.fit(bags, groups=['A', 'B'])",
        "finder.fit([])",
        'finder.fit("store")',
        'finder.fit([np.zeros((5, 8)), np.zeros((6, 8))], y=["0", "1"])',
        "finder.fit([np.zeros((5, 8)), np.zeros((6, 8))], y=[[0], [1, 0]])",
        "finder.fit(bags, groups='AB')",
        "ng.SliceFinder(folds=1).fit(bags)",
        "ng.SliceFinder(folds=2.5).fit(bags)",
        'ng.SliceFinder(folds="five").fit(bags)',
        "ng.SliceFinder(seed=2**40).fit(bags)",
        "ng.SliceFinder(seed=None).fit(bags)",
        'ng.SliceFinder(device="gpu").fit(bags)',
        "ng.SliceFinder(folds=3).fit(bags).predict(other)",
        "ng.SliceFinder(trees=100)",
    ),
    "Bag": (
        "ng.Bag(np.zeros(8), 1)",
        "ng.Bag(np.zeros((3, 8)), 2)",
        'ng.Bag(np.zeros((3, 8)), "positive", scan_id="A17")',
        "ng.Bag(np.zeros((3, 8)), 1, slice_labels=[0, 1])",
        'ng.Bag([["a", "b"]], 1)',
        "ng.Bag([[1.0, 2.0], [3.0]], 1)",
        "ng.Bag(np.zeros((2, 8)), 1, slice_labels=[0.7, 1.9])",
        "ng.Bag(torch.zeros(3, 8, dtype=torch.int64), 1)",
        "ng.Bag(None, 1)",
        "ng.Bag(np.zeros((3, 8)))",
    ),
    "Bags": (
        "ng.Bags(torch.zeros(5, 8), [2, 4], [0, 1])",
        "ng.Bags(torch.zeros(5, 8), [2.0, 3.0], [0, 1])",
        "ng.Bags(torch.zeros(5, 8), [5, 0], [0, 1])",
        "ng.Bags(torch.zeros(5, 8), [2, 3], [0, 2])",
        'ng.Bags(torch.zeros(5, 8), [2, 3], pd.Series(["no", "yes"]))',
        "ng.Bags(torch.zeros(5, 8), [2, 3], [0, 1, 1])",
        "ng.Bags(torch.zeros(5, 8), [2, 3], [0, 1], slice_labels=[0, 1, 0, 1, 1])",
        "ng.Bags(torch.full((5, 8), torch.nan), [2, 3], [0, 1])",
        'ng.Bags(torch.zeros(5, 8), [2, 3], [0, 1], scan_ids=["A", "A"])',
        "ng.Bags([np.zeros((2, 8)), np.zeros((3, 8))], [0, 1])",
        "ng.Bags.from_arrays(np.zeros((3, 8)), [1])",
        "ng.Bags.from_arrays(np.zeros((2, 3, 8)), [0, 1])",
        "ng.Bags.from_arrays([np.zeros((3, 8))], [0, 1])",
        "ng.Bags.from_arrays([np.zeros((3, 8))], [2])",
        "ng.Bags.from_arrays([np.zeros((2, 8)), np.zeros((2, 4))], [0, 1])",
        'ng.Bags.from_arrays("store", [0, 1])',
        "ng.Bags.pack([np.zeros((3, 8))])",
        "ng.Bags.pack([ng.Bag(torch.zeros(2, 8), 0), ng.Bag(torch.zeros(2, 4), 1)])",
        "ng.Bags(torch.zeros(5, 8), [2, 3], [0, 1], scan_ids=None)",
        "ng.Bags(torch.zeros(5, 8), [2, 3], [0, 1], patient_ids=5)",
        "ng.Bags.from_arrays([np.zeros((3, 8))], [1], slice_labels=5)",
        'bags.to("gpu")',
        "bags[[True, False]]",
        "next(bags.batches(0))",
    ),
    "collate": (
        "ng.collate([])",
        "ng.collate([torch.zeros(3, 8)])",
        "ng.collate([(torch.zeros(3, 8), 0), (torch.zeros(3, 4), 1)])",
        "ng.collate([(torch.zeros(3, 8), 0), (torch.zeros(3, 8), 7)])",
        "ng.collate([(torch.zeros(3, 8),)])",
        "ng.collate(torch.zeros(2, 3, 8))",
    ),
    "export_model": (
        'ng.export_model(model, "model.tflite")',
        'ng.export_model(model, "model")',
        'ng.export_model("model", "model.onnx")',
        'ng.export_model(torch.nn.Linear(8, 1), "linear.onnx")',
        'ng.export_model(torch.nn.Linear(8, 1), "linear.onnx", features=8)',
        'ng.export_model(model, "model.onnx", features=4)',
        'ng.export_model(model, "model.onnx", features="8")',
        'ng.export_model(model, "model.onnx", metadata={"epochs": 5})',
        'ng.export_model(model, "model.onnx", metadata={"outputs": "a,b"})',
        'ng.export_model(model, "no-such-folder/model.pt2")',
        "ng.export_model(model)",
    ),
    "push_to_hub": (
        'ng.push_to_hub("model", "just-a-name")',
        'ng.push_to_hub("no-such-model", "lab/name", dry_run="card")',
        'ng.push_to_hub("full", "lab/name", dry_run="card")',
        'ng.push_to_hub("model", "lab/name", dry_run="full")',
        'ng.push_to_hub(model, "lab/name", dry_run="card")',
        'ng.push_to_hub("model", "lab/name", dry_run=True)',
        'ng.push_to_hub("model", "lab/name.git")',
        'ng.push_to_hub("model", None)',
    ),
    "pull_from_hub": (
        'ng.pull_from_hub("just-a-name", "new")',
        'ng.pull_from_hub("https://huggingface.co/lab/name", "new")',
        'ng.pull_from_hub(None, "new")',
        'ng.pull_from_hub("lab/name/v2", "new")',
        'ng.pull_from_hub("lab/name", "full")',
        'ng.pull_from_hub("lab/name")',
    ),
    "open_store": (
        'ng.open_store("no-such-folder")',
        'ng.open_store("model")',
        'ng.open_store("full")',
        'ng.open_store("features.npz")',
        "ng.open_store(None)",
        "ng.open_store(bags)",
    ),
    "NormalGuidance": (
        "ng.NormalGuidance(-1)",
        'ng.NormalGuidance("0.1")',
        "ng.NormalGuidance(True)",
        'ng.NormalGuidance(divergence="kl")',
        'ng.NormalGuidance(divergence=["forward_kl"])',
        'ng.NormalGuidance(negatives=["own"])',
        'ng.NormalGuidance(negatives="flat")',
        "ng.NormalGuidance(modes=0)",
        "ng.NormalGuidance(modes=5)(attention)",
        "guidance(np.full((2, 4), 0.25))",
        "guidance(attention, np.ones((2, 4)))",
        "guidance(attention, torch.ones(4, 2, dtype=torch.bool))",
        "guidance(attention.flatten())",
        "guidance(attention.flatten(), lengths=[3, 4])",
        "ng.NormalGuidance()(attention * torch.nan)",
        "ng.NormalGuidance()(attention * torch.nan, from_logits=True)",
        "guidance(attention, labels=[0, 2])",
        "guidance(attention, labels=['no', 'yes'])",
        'ng.NormalGuidance(negatives="none")(attention)',
        "ng.NormalGuidance(lam=1.0)",
    ),
    "LabelGuidance": (
        "ng.LabelGuidance()",
        'ng.LabelGuidance(divergence="reverse_kl", uses_slice_labels=True)',
        "ng.LabelGuidance(-1, uses_slice_labels=True)",
        'ng.LabelGuidance(divergence=["forward_kl"], uses_slice_labels=True)',
        "ng.LabelGuidance(uses_slice_labels=True)(attention * torch.nan, torch.zeros(2, 4))",
        "ng.LabelGuidance(uses_slice_labels=True)(attention, [[0, 1, 1]])",
        "ng.LabelGuidance(uses_slice_labels=True)(attention.numpy(), torch.zeros(2, 4))",
        "ng.LabelGuidance(uses_slice_labels=True)(attention, torch.full((2, 4), -1))",
    ),
    "normal_reference": (
        'ng.normal_reference("attention")',
        "ng.normal_reference(attention[0])",
        "ng.normal_reference(attention, [3, 4])",
        "ng.normal_reference(attention, modes=1.5)",
        "ng.normal_reference(attention, modes=5)",
        "ng.normal_reference(attention, positions=[0, 5, 10, 15])",
        "ng.normal_reference(attention.flatten(), lengths=[8, 0])",
        "ng.normal_reference(torch.zeros(0, 4))",
    ),
    "label_reference": (
        "ng.label_reference([0, 1, 1, 0])",
        "ng.label_reference([[0, 1], [-1, -1]])",
        'ng.label_reference([["no", "yes"]])',
        "ng.label_reference([[0, 1, 1, 0]], lengths=[3])",
        "ng.label_reference(torch.zeros(2, 3, 4))",
        "ng.label_reference([[0, 1], [0]])",
    ),
    "divergence": (
        "ng.divergence(attention[:, :3], attention)",
        'ng.divergence(attention, attention, "kl")',
        'ng.divergence(attention, attention, ["kl"])',
        "ng.divergence(attention, attention, mask=[[1] * 4] * 2)",
        "ng.divergence(attention, attention, mask=torch.ones(2, 4))",
        "ng.divergence(attention[0], attention[0])",
        "ng.divergence(attention, None)",
        "ng.divergence(attention, attention, mask=[[False] * 4, [True] * 4])",
    ),
    "Layout": (
        "ng.Layout.packed([])",
        "ng.Layout.packed([3, 0])",
        "ng.Layout.packed([2.5, 3.0])",
        'ng.Layout.packed("2,3")',
        "ng.Layout.padded([2, 9], 4)",
        "ng.Layout.padded([2.5, 3.0], 4)",
        "ng.Layout.from_mask(torch.ones(2, 4))",
        "ng.Layout.from_mask([[False, True], [True, True]])",
    ),
    "pack": (
        "ng.pack(torch.zeros(2, 4, 8), torch.ones(2, 4))",
        "ng.pack(torch.zeros(2, 4, 8), torch.ones(4, 2, dtype=torch.bool))",
        "ng.pack(torch.zeros(2, 4, 8), [4, 3])",
        "ng.pack(torch.zeros(2, 4, 8), np.ones(4, dtype=bool))",
        "ng.pack([[1, 2], [3]], [[True, True], [True, False]])",
    ),
    "unpack": (
        "ng.unpack(torch.zeros(5, 8), [2, 4])",
        "ng.unpack(torch.zeros(5, 8), [2.0, 3.0])",
        "ng.unpack(torch.zeros(5, 8), [5, 0])",
        "ng.unpack(torch.zeros(5, 8), [[2, 3]])",
        'ng.unpack("rows", [2, 3])',
    ),
    "build_model": (
        'ng.build_model("abml")',
        'ng.build_model("abmil", hiden=64)',
        'ng.build_model("abmil", hidden=0)',
        'ng.build_model("abmil", features="768")',
        'ng.build_model("transmil", features=10)',
        "ng.build_model(ng.NormalGuidance)",
        "model(bags)",
        "model(torch.tensor(1.0), [1])",
        "model(torch.zeros(5, 4), [2, 3])",
        "model(torch.zeros(5, 8), [2, 4])",
        "model(np.zeros((5, 8)), [2, 3])",
    ),
    "Config": (
        'ng.Config("abml")',
        'ng.Config("ng", lr=-1)',
        'ng.Config("ng", lr="0.1")',
        'ng.Config("ng", lr=True)',
        'ng.Config("ng", negatives=["own"])',
        'ng.Config("ng", epochs=1.5)',
        'ng.Config("ng", divergence="kl")',
        'ng.Config("ng", optimizer="adam")',
        'ng.Config("ng", patience=0)',
        'ng.Config("centered_gaussian")',
        'ng.Config("ng", learning_rate=0.1)',
    ),
    "grid": (
        'ng.grid("ng")',
        'ng.grid(ng.Config("ng"), lr=0.1)',
        'ng.grid(ng.Config("ng"), lr=[])',
        'ng.grid(ng.Config("ng"), lr=None)',
        'ng.grid(ng.Config("ng"), lr=[-0.1])',
        'ng.grid(ng.Config("ng"), divergence=["kl"])',
        'ng.grid(ng.Config("ng"), divergence="kl")',
        'ng.grid(ng.Config("ng"), epochs=[10, 20])',
    ),
    "train_model": (
        'ng.train_model("ng", bags, bags)',
        'ng.train_model(ng.Config("ng"), bags, bags)',
        'ng.train_model(ng.Config("ng", batch_size=8), [torch.zeros(3, 8)], bags)',
        'ng.train_model(ng.Config("ng", batch_size=8), bags, other)',
        'ng.train_model(ng.Config("ng", batch_size=8), bags[bags.labels == 1], bags)',
        'ng.train_model(ng.Config("ng", batch_size=8, modes=1000), bags, bags)',
        'ng.train_model(ng.Config("ng", batch_size=8), bags, None)',
    ),
    "predict_bags": (
        'ng.predict_bags("model", bags)',
        "ng.predict_bags(bags, model)",
        "ng.predict_bags(model, [torch.zeros(3, 8)])",
        "ng.predict_bags(model, other)",
        "ng.predict_bags(model, bags, batch_size=0)",
        "ng.predict_bags(model, bags[:0])",
    ),
    "sweep": (
        'ng.sweep(ng.Config("ng"), bags, bags)',
        "ng.sweep([], bags, bags)",
        'ng.sweep([ng.Config("ng", batch_size=8)], bags, bags, execution="cuda")',
        'ng.sweep(["ng"], bags, bags)',
        'ng.sweep([ng.Config("ng"), ng.Config("abmil")], bags, bags)',
        'ng.sweep([ng.Config("ng")], bags, bags)',
        'ng.sweep([ng.Config("ng", batch_size=8)], bags, other)',
        'ng.sweep([ng.Config("ng", batch_size=8)], bags.features, bags)',
        'ng.sweep([ng.Config("ng", batch_size=8)], bags, bags[bags.labels == 0])',
    ),
    "Execution": (
        'ng.Execution("gpu")',
        "ng.Execution(chunk=0)",
        "ng.Execution(chunk=1.5)",
        'ng.Execution(precision="float16")',
        'ng.Execution(precision="bf16")',
        'ng.Execution(engine="fast")',
    ),
    "auroc": (
        "ng.auroc([0.1, 0.9], [0, 2])",
        "ng.auroc([], [])",
        "ng.auroc([0.1, 0.9], [0, 1, 1])",
        'ng.auroc([0.1, 0.9], ["no", "yes"])',
        "ng.auroc([0.1, 0.9], [0, 1], mask=[1, 1])",
        "ng.auroc(0.5, 1)",
    ),
    "auprc": (
        "ng.auprc([0.1, 0.9], [0, 0.5])",
        "ng.auprc(torch.zeros(2, 0), [])",
        "ng.auprc(np.zeros((3, 2)), np.zeros(3))",
        "ng.auprc([0.1, None], [0, 1])",
        "ng.auprc([0.1, 0.9], [0, 1], mask=np.ones(2))",
    ),
    "scan_level": (
        "ng.scan_level([0.1, 0.9], [0, -1])",
        "ng.scan_level([], [])",
        "ng.scan_level([0.1, 0.9], [0, 1, 1])",
        'ng.scan_level(["low", "high"], [0, 1])',
        'ng.scan_level({"A": 0.1}, [0])',
    ),
    "localization": (
        "ng.localization([[0.1, 0.9], [0.5]], [[0, 1], [1]])",
        "ng.localization([0.1, 0.9], [0, 1, 1], [3])",
        "ng.localization([0.1, 0.9], [0, 1], [3])",
        "ng.localization([0.1, 0.9], [0, 2], [2])",
        "ng.localization([0.1, 0.9], [0, -1], [2])",
        "ng.localization([0.1, 0.9], [0, 1], [2.0])",
        "ng.localization([0.1, 0.9], [0, 1], [2, 0])",
        "ng.localization(bags, [0, 1], [2])",
    ),
    "GuidanceCallback": (
        'ng.GuidanceCallback("ng")',
        "ng.GuidanceCallback(guidance, module=model)",
        'ng.GuidanceCallback(guidance, find="attention")',
        'run(ng.GuidanceCallback(guidance, module="encoder"))',
        'run(ng.GuidanceCallback(guidance, module="model.score"))',
        'run(ng.GuidanceCallback(guidance, module="unused"))',
        'ng.GuidanceCallback(ng.NormalGuidance(negatives="none"))',
        "run(ng.GuidanceCallback(guidance, find=lambda inputs, output: None))",
        "ng.GuidanceCallback(weight=1.0)",
    ),
}

NOTES = {
    "GuidanceCallback": "`run` fits a `LightningModule` with the submodules `model`, of `build_model`, and `unused`, "
    "which no step calls."
}

KINDS = ("UserError", "TypeError", "NotFittedError")
"""The errors that people may see: ours, Python's of a wrong call, and scikit-learn's of an estimator without a fit."""

INTERNAL = re.compile(
    r"Traceback|object has no attribute|has no len|is not subscriptable|NoneType' object|not iterable|<function"
    r"|mat1 and mat2|size mismatch|The size of tensor|unsupported operand|must match the size|torch\.Size|0x[0-9a-f]{6}"
)
"""Words of errors that come from inside and not from a check."""


def namespace(folder: Path) -> dict[str, Any]:
    """The names that the calls use; the files that they use are made in the folder."""
    import numpy as np

    from normal_guidance.fit.fit_ensemble import FoldPlan
    from normal_guidance.fit.fitting import fit_model
    from normal_guidance.scans.features.store import write_store

    made: dict[str, Any] = {"run": run}
    (block,) = re.findall(r"```python\n(.*?)```", SHARED, re.DOTALL)
    exec(block, made)
    (folder / "full").mkdir()
    (folder / "full" / "notes.txt").write_text("mine")
    np.savez(folder / "features.npz", x=np.zeros((3, 8)))
    store = write_store(folder / "store", made["bags"], provenance={})
    fit_model(store, folder / "model", plan=FoldPlan(folds=3))
    return made


def run(callback: Any) -> None:
    """Fit a small module with the callback."""
    import logging

    import torch
    from lightning.pytorch import LightningModule, Trainer

    import normal_guidance as ng

    class Module(LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.model, self.unused = ng.build_model("abmil", features=8), torch.nn.Linear(8, 8)

        def training_step(self, batch: Any, number: int) -> Any:
            return self.model(batch.features, batch.lengths).logit.mean()

        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters(), lr=0.1)

    for name in ("lightning.pytorch", "lightning.fabric"):
        logging.getLogger(name).setLevel(logging.ERROR)
    scans = [(torch.zeros(3, 8), 1), (torch.zeros(2, 8), 0)]
    loader = torch.utils.data.DataLoader(scans, batch_size=2, collate_fn=ng.collate)
    quiet = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False}
    Trainer(max_epochs=1, accelerator="cpu", enable_model_summary=False, callbacks=[callback], **quiet).fit(
        Module(), loader
    )


Found = dict[str, list[tuple[str, str, str]]]
"""The call, the kind of the error and its text, for each mistake of each function."""


def make_mistakes() -> Found:
    """Make every mistake in a folder of its own, and keep what was said."""
    found: Found = {}
    with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        names = namespace(Path(folder))
        for name, calls in MISTAKES.items():
            found[name] = [(call, *_said(call, names)) for call in calls]
    return found


def _said(call: str, names: dict[str, Any]) -> tuple[str, str]:
    try:
        made = eval(call, names)
        if hasattr(made, "__next__"):
            list(made)
    except Exception as error:
        return type(error).__name__, str(error).replace(f"{Path.cwd()}{os.sep}", "")
    return "nothing", "it was accepted"


def problems(found: Found, public: Sequence[str]) -> list[str]:
    """What is wrong with the errors: too few for a function, of another kind, twice the same, or from inside."""
    wrong = [f"{name}: no mistake is shown" for name in public if name not in found]
    for name, said in found.items():
        texts = {text for _, kind, text in said if kind == "UserError"}
        if len(texts) < EACH:
            wrong.append(f"{name}: {len(texts)} different errors; show {EACH}")
        python = [call for call, kind, _ in said if kind == "TypeError"]
        if len(python) > 1:
            wrong.append(f"{name}: {len(python)} calls are refused by Python: {', '.join(python)}")
        for call, kind, text in said:
            if kind not in KINDS or (kind == "UserError" and INTERNAL.search(text)):
                wrong.append(f"{call}: {kind}: {text}")
    return wrong


def public_callables() -> list[str]:
    """The public names that can be called, but for those that people only receive."""
    import normal_guidance as ng

    return [name for name in ng.__all__ if callable(getattr(ng, name)) and name not in NOT_CALLED]


def page(found: Found) -> str:
    """The page in Markdown."""
    parts = [LEAD]
    for name, said in found.items():
        note = f"\n{NOTES[name]}\n" if name in NOTES else ""
        rows = "\n".join(f"| {_mark(kind)}{_text(text)} | `{_cell(call)}` |" for call, kind, text in said)
        parts.append(f"## {name}\n{note}\n| message | call |\n|---|---|\n{rows}\n")
    return "\n".join([*parts, SHARED, '<script src="../assets/errors-search.js"></script>\n'])


def _mark(kind: str) -> str:
    return "" if kind == "UserError" else f"`{kind}`: "


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def _text(text: str) -> str:
    """The text of an error in a cell: one line, with the signs of Markdown as they are."""
    return re.sub(r"([\\|*_<>\[\]`])", r"\\\1", " ".join(text.split()))


def main() -> int:
    found = make_mistakes()
    wrong = problems(found, public_callables())
    for line in wrong:
        print(line, file=sys.stderr)
    print(page(found))
    return 1 if wrong else 0


if __name__ == "__main__":
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    sys.exit(main())
