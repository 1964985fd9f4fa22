"""A GPU gives the same numbers.  Needs only torch and pytest: `pytest --noconftest tests/core/test_cuda.py`."""

import pytest
import torch

from normal_guidance.core.guidance import DIVERGENCES, NormalGuidance
from normal_guidance.core.layout import Layout, unpack
from normal_guidance.core.methods import NAMED, build_model
from normal_guidance.core.metrics import auprc, auroc, localization

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device here")

LENGTHS = [5, 1, 33, 70, 12, 2]


@pytest.mark.parametrize("form", ["packed", "padded"])
@pytest.mark.parametrize("method", [name for name, method in NAMED.items() if method.model == name])
def test_models_equal_the_cpu_in_float64(method: str, form: str) -> None:
    torch.manual_seed(0)
    features = torch.randn(sum(LENGTHS), 32, dtype=torch.float64)
    layout = Layout.packed(LENGTHS)
    if form == "padded":
        features, mask = unpack(features, torch.tensor(LENGTHS))
        layout = Layout.from_mask(mask)
    model = build_model(method, 32).double()
    results = []
    for device in ("cpu", "cuda"):
        model.to(device)
        prediction = model(features.to(device), layout.to(device))
        loss = prediction.logit.nan_to_num().square().sum() + prediction.attention.square().sum()
        parameters = list(model.parameters())  # some of CLAM and ACMIL only serve terms of the training loss
        gradients = torch.autograd.grad(loss, parameters, materialize_grads=True) if parameters else ()
        results.append([prediction.logit, prediction.attention, *gradients])
    for cpu, cuda in zip(*results, strict=True):
        torch.testing.assert_close(cuda.cpu(), cpu, atol=1e-9, rtol=1e-7, equal_nan=True)


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_guidance_equals_the_cpu_and_ignores_autocast(kind: str) -> None:
    logits = 3 * torch.randn(4, 8, 1727)
    guidance = NormalGuidance(divergence=kind)
    want = guidance(logits, from_logits=True)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        got = guidance(logits.cuda(), from_logits=True)
    assert got.dtype == torch.float32
    torch.testing.assert_close(got.cpu(), want, rtol=1e-5, atol=0)


def test_metrics_equal_the_cpu() -> None:
    scores, labels = torch.randn(32, 2500).round(decimals=1), torch.randint(0, 2, (2500,))
    for metric in (auroc, auprc):
        torch.testing.assert_close(
            metric(scores.cuda(), labels.cuda()).cpu(), metric(scores, labels), rtol=0, atol=1e-12
        )
    lengths = torch.tensor(LENGTHS)
    slices, slice_labels = torch.randn(3, sum(LENGTHS)), torch.randint(0, 2, (sum(LENGTHS),))
    here, there = (localization(slices.to(d), slice_labels.to(d), lengths.to(d)) for d in ("cpu", "cuda"))
    torch.testing.assert_close(there.auroc.cpu(), here.auroc, rtol=0, atol=1e-12)
