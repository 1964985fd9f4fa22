"""Attention made of bells against dense formulas, at its limits, and on data with known truth."""

import math
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp
from torch import Tensor
from torch.func import functional_call, stack_module_state, vmap

from normal_guidance.core import bells as window_sums
from normal_guidance.core.bells import WindowAttention, gaussian_window
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.layout import Layout
from normal_guidance.core.methods import build_model
from normal_guidance.core.models import EvidenceMIL
from normal_guidance.study.drawn import bayes_slice_scores, shifted_mean

BELLS = pytest.mark.parametrize("bells", [False, True])


@pytest.fixture(params=["whole kernel", "by blocks"])
def any_length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs as for short scans, and again as for long ones."""
    if request.param == "by blocks":
        monkeypatch.setattr(window_sums, "DENSE_SUMS", 0)


def attention_of(sigma: float, beta: float, *, bells: bool, kappa: float = 1e-9, shape: float = 2.0) -> WindowAttention:
    """By default bells have the shape of a normal, and windows beyond the scan are as likely as others."""
    attention = WindowAttention(bells=bells).double()
    for parameter, value in zip(attention.parameters(), (sigma, beta, kappa, shape), strict=bells):
        parameter.data.fill_(math.log(value))
    return attention


def dense_log_attention(
    scores: np.ndarray, sigma: float, beta: float, *, bells: bool, kappa: float = 1e-9, shape: float = 2.0
) -> np.ndarray:
    """One scan, entry by entry in log space: nothing underflows, at the cost of an S x S table of exponents."""
    j = np.arange(len(scores))
    exponent = -0.5 * (np.abs(j[:, None] - j) / sigma) ** shape
    window = np.exp(exponent)
    if not bells:
        return log_softmax(beta * (window * scores).sum(1))
    log_q = log_softmax(beta * (window * scores).sum(1) + kappa * np.log(window.sum(1)))
    return log_softmax(logsumexp(exponent + log_q, axis=1))


@BELLS
@given(
    lengths=st.lists(st.integers(1, 70), min_size=1, max_size=4),
    sigma=st.floats(0.05, 50),
    beta=st.floats(0.001, 20),
    kappa=st.floats(0.001, 30),
    shape=st.floats(0.3, 40),
)
def test_attention_equals_the_dense_formula_in_log_space(
    bells: bool, lengths: list[int], sigma: float, beta: float, kappa: float, shape: float
) -> None:
    form = {"bells": True, "kappa": kappa, "shape": shape} if bells else {"bells": False}
    scores = [torch.randn(length, dtype=torch.float64) for length in lengths]
    layout, near = Layout.packed(lengths), 1e-5 if bells else 1e-9  # of steep sides
    got = layout.restore(attention_of(sigma, beta, **form)(layout.fold(torch.cat(scores)), layout))
    for one, scan in zip(got.split(lengths), scores, strict=True):
        want = torch.from_numpy(dense_log_attention(scan.numpy(), sigma, beta, **form))
        within = want > -500 if bells else want <= 0
        torch.testing.assert_close(one[within], want[within], rtol=near, atol=near)


@pytest.mark.usefixtures("any_length")
@BELLS
def test_gradients_are_those_of_finite_differences(bells: bool) -> None:
    attention = attention_of(1.7, 0.6, bells=bells, kappa=2.0, shape=2.5)
    layout = Layout.padded(torch.tensor([5, 1, 8]), 9)
    scores = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)

    def visible(scores: Tensor, *parameters: Tensor) -> Tensor:
        own = dict(zip(dict(attention.named_parameters()), parameters, strict=True))
        return torch.func.functional_call(attention, own, (scores, layout))[layout.mask]

    assert torch.autograd.gradcheck(visible, (scores, *attention.parameters()))


@pytest.mark.usefixtures("any_length")
def test_a_scan_of_one_slice() -> None:
    model = EvidenceMIL(8, bells=True).double()
    with torch.no_grad():
        model.log_gamma.fill_(0.3)
    row = torch.randn(1, 8, dtype=torch.float64)
    got = model(row, [1])
    assert got.attention.item() == 1.0
    evidence = row @ model.classifier.weight[0]
    torch.testing.assert_close(got.logit, math.exp(0.3) * evidence + model.classifier.bias)
    tied = EvidenceMIL(8).double()
    torch.testing.assert_close(tied(row, [1]).logit, tied.classifier(row)[0])


@pytest.mark.usefixtures("any_length")
@pytest.mark.parametrize("method", ["evidence_ng", "whole_bells_ng"])
def test_long_scans_in_float32_equal_float64(method: str) -> None:
    """1,083 slices and evidence with a wide range: slices that float32 would round to 0, a tie, keep their order."""
    model, lengths = build_model(method, 8), [1083, 1, 300]
    with torch.no_grad():
        model.classifier.weight *= 30
    rows, layout = torch.randn(sum(lengths), 8), Layout.packed(lengths)
    single = model(rows, layout)
    losses = NormalGuidance()(single.log_attention, lengths=layout, from_logits=True)
    gradients = torch.autograd.grad(losses + single.logit.sum(), list(model.parameters()), materialize_grads=True)
    double = model.double()(rows.double(), layout)
    assert single.log_attention.dtype == torch.float32
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(single.log_attention.double(), double.log_attention, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(single.logit.double(), double.logit, rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("any_length")
def test_log_attention_is_exact_where_float32_would_be_zero() -> None:
    scores = torch.linspace(0, 9, 400)[None]
    log_a = attention_of(3.0, 5.0, bells=True)(scores, Layout.packed([400]))[0].detach()
    assert log_a.min() < -200  # e^-200 is nothing to float32
    assert (log_a.diff()[10:-10] > 0).all()  # no two slices tie
    want = dense_log_attention(scores[0].double().numpy(), 3.0, 5.0, bells=True)
    torch.testing.assert_close(log_a.double(), torch.from_numpy(want), rtol=1e-5, atol=1e-4)


EXTREMES = {
    False: list(product((-300.0, -20.0, -1.0, 20.0, 300.0), (-60.0, 0.0, 60.0))),  # log sigma, log beta
    True: [
        *product((-300.0, -1.0, 300.0), (-60.0, 8.0, 60.0), (1.4,), (0.7,)),
        *product((-20.0, 0.0, 20.0), (0.0,), (-60.0, 8.0), (-300.0, -2.0, 4.0, 300.0)),  # log kappa, log shape
    ],
}


@pytest.mark.usefixtures("any_length")
@BELLS
def test_extreme_parameters_give_finite_numbers_and_gradients(bells: bool) -> None:
    layout = Layout.packed([1, 150, 20])
    for values in EXTREMES[bells]:
        attention, scores = WindowAttention(bells=bells), torch.randn(171, requires_grad=True)
        for parameter, value in zip(attention.parameters(), values, strict=True):
            parameter.data.fill_(value)
        log_a = layout.restore(attention(layout.fold(scores), layout))
        sums = torch.stack([bag.exp().sum() for bag in log_a.split([1, 150, 20])])
        torch.testing.assert_close(sums, torch.ones(3), msg=str(values))
        loss = NormalGuidance()(log_a, lengths=layout, from_logits=True)
        for gradient in torch.autograd.grad(loss, [scores, *attention.parameters()]):
            assert gradient.isfinite().all(), values


def test_the_window_by_hand() -> None:
    window = gaussian_window(torch.tensor([0.0, 2.0, -3.0]).double(), torch.tensor(math.log(2.0)))
    assert window.tolist() == pytest.approx([1.0, math.exp(-0.5), math.exp(-1.125)], rel=1e-6)


def log_attention_and_gradients(attention: WindowAttention, stacked: dict[str, Tensor], dense: int) -> list[Tensor]:
    """Of scans and of stacked configurations, if scans up to this length have a whole kernel."""
    layout, generator = Layout.packed([700, 1, 300]), torch.Generator().manual_seed(0)
    scores = torch.randn(1001, dtype=torch.float64, generator=generator).requires_grad_()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(window_sums, "DENSE_SUMS", dense)
        folded = layout.fold(scores)
        log_a = vmap(lambda own: functional_call(attention, own, (folded, layout)))(stacked)[:, layout.mask]
        loss = log_a.clamp_min(-400).square().mean()
        return [log_a, *torch.autograd.grad(loss, [scores, *stacked.values()])]


@BELLS
def test_windows_by_blocks_equal_the_whole_kernel(bells: bool) -> None:
    """Narrow, usual, wide and endless windows, of all shapes, stacked: log-attention and every gradient."""
    forms = [(0.3, 0.6), (3.0, 0.25), (90.0, 0.02), (1e6, 0.001)]
    shapes = [(2.0, 2.0), (4.0, 9.0), (0.5, 0.7), (1.0, 2.0)]
    models = [
        attention_of(sigma, beta, bells=bells, kappa=kappa, shape=shape)
        for (sigma, beta), (kappa, shape) in zip(forms, shapes, strict=True)
    ]
    stacked, _ = stack_module_state(models)
    got, want = (log_attention_and_gradients(models[0], stacked, dense) for dense in (0, 1000))
    for one, other in zip(got, want, strict=True):
        assert one.any()
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12)


def test_whole_bells_attend_to_one_block_as_bayes_does() -> None:
    """With the true feature and only whole windows as long as the block, attention is the oracle's posterior."""
    block, shift = 11, 0.5
    bags = shifted_mean(200, seed=1003, features=1, block=block, shift=shift)
    model = build_model("whole_bells", 1).double()
    with torch.no_grad():
        model.classifier.weight.fill_(shift)
        model.attention.log_beta.fill_(0.0)
        model.attention.log_sigma.fill_(math.log(block / 2))
        model.attention.log_shape.fill_(math.log(140.0))
        model.attention.log_kappa.fill_(math.log(400.0))
        attention = model(bags.features.double(), bags.layout).attention
    posterior = bayes_slice_scores(bags, block=block, shift=shift).exp() / block
    torch.testing.assert_close(attention, posterior, rtol=1e-3, atol=1e-6)
