"""Attention made of bells against dense formulas, at its limits, and on data with known truth; the
slice reference; and sums under windows, by blocks against the whole matrix: values, gradients, stacked, compiled.
"""

import math
import sys
from itertools import product

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax, logsumexp
from torch import Tensor
from torch.func import vmap

from in_a_process import assert_compiled_equals_eager, assert_script_passes, needs_cuda
from normal_guidance.base.errors import UserError
from normal_guidance.core import bells as module
from normal_guidance.core.bells import (
    SliceReference,
    WindowAttention,
    window_sums,
)
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.layout import Layout, SlottedLayout, unpack
from normal_guidance.core.methods import build_model
from normal_guidance.core.models import EvidenceMIL
from normal_guidance.study.drawn import bayes_slice_scores, shifted_mean
from same import assert_same

BELLS = pytest.mark.parametrize("bells", [False, True])


@pytest.fixture(params=["whole kernel", "by blocks"])
def any_length(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test runs as for short scans, and again as for long ones."""
    if request.param == "by blocks":
        monkeypatch.setattr(module, "DENSE_SUMS", 0)


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
    dense=st.sampled_from([0, 2048]),
)
def test_attention_equals_the_dense_formula_in_log_space(
    bells: bool, lengths: list[int], sigma: float, beta: float, kappa: float, shape: float, dense: int
) -> None:
    """The result by one matrix, and that by blocks of it."""
    form = {"bells": True, "kappa": kappa, "shape": shape} if bells else {"bells": False}
    scores = [torch.randn(length, dtype=torch.float64) for length in lengths]
    layout, near = Layout.packed(lengths), 1e-5 if bells else 1e-9  # of steep sides
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "DENSE_SUMS", dense)
        got = layout.restore(attention_of(sigma, beta, **form)(layout.fold(torch.cat(scores)), layout))
    for log_a, scan in zip(got.split(lengths), scores, strict=True):
        want = torch.from_numpy(dense_log_attention(scan.numpy(), sigma, beta, **form))
        within = want > -500 if bells else want <= 0
        torch.testing.assert_close(log_a[within], want[within], rtol=near, atol=near)


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
        model.classifier.weight *= 300
    rows, layout = torch.randn(sum(lengths), 8), Layout.packed(lengths)
    single = model(rows, layout)
    losses = NormalGuidance()(single.log_attention, lengths=layout, from_logits=True)
    gradients = torch.autograd.grad(losses + single.logit.sum(), list(model.parameters()), materialize_grads=True)
    double = model.double()(rows.double(), layout)
    assert single.log_attention.dtype == torch.float32
    assert double.log_attention.min() < -110, "no slice is 0 to float32"
    assert all(gradient.isfinite().all() for gradient in gradients)
    torch.testing.assert_close(single.log_attention.double(), double.log_attention, rtol=1e-4, atol=1e-3)
    torch.testing.assert_close(single.logit.double(), double.logit, rtol=1e-4, atol=1e-4)


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


LENGTHS = [5, 1, 40, 13, 2]


def reference_and_rows(width: int) -> tuple[SliceReference, Tensor]:
    model = SliceReference(features=6, receptive_field=width).double()
    return model, torch.randn(sum(LENGTHS), 6, dtype=torch.float64)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")  # an even width is padded by a copy
@pytest.mark.parametrize("width", [1, 2, 3, 12, 35])
@pytest.mark.parametrize("form", ["packed", "padded", "slotted"])
def test_it_is_the_textbooks_layers(form: str, width: int) -> None:
    model, rows = reference_and_rows(width)
    lengths = torch.tensor(LENGTHS)
    layer = {"weight": model.convolution.weight, "bias": model.convolution.bias, "padding": "same", "groups": 6}
    mixed = [F.conv1d(bag.T[None], **layer)[0].T for bag in rows.split(LENGTHS)]
    want = model.classifier(torch.cat(mixed)).squeeze(1)
    padded, mask = unpack(rows, lengths)
    if form == "packed":
        got = model(rows, lengths).slice_scores
    elif form == "padded":
        garbage = torch.where(mask[:, :, None], padded, 1e3)
        got = model(garbage, mask).slice_scores[mask]
    else:
        layout = SlottedLayout.of(lengths, rows=80, longest=45)
        slots = torch.full((80, 6), 1e3, dtype=torch.float64)  # class tokens and unused slots hold anything
        slots[layout.pad_index[:, :40][mask]] = rows
        got = model(slots, layout).slice_scores[:, :40][mask]
    assert_same(got, want, model.parameters())


def test_a_prediction_holds_probabilities_and_logits_and_no_scan_score() -> None:
    model, rows = reference_and_rows(3)
    prediction = model(rows, Layout.packed(LENGTHS))
    assert prediction.log_attention.shape == (1, sum(LENGTHS))
    torch.testing.assert_close(prediction.attention, prediction.slice_scores.sigmoid())
    assert prediction.logit.isnan().all()
    assert prediction.logit.shape == (len(LENGTHS),)
    padded = model(*unpack(rows, torch.tensor(LENGTHS)))
    assert padded.attention[1, 1:].eq(0).all(), "padding has no probability"


def test_a_window_of_nothing_is_refused() -> None:
    with pytest.raises(UserError, match="receptive_field is 0"):
        SliceReference(4, receptive_field=0)


def by_matrix(values: Tensor, taps: Tensor) -> Tensor:
    place = torch.arange(values.shape[-1], device=values.device)
    distance = (place[:, None] - place).abs()
    return values @ torch.where(distance < len(taps), taps[distance.clamp_max(len(taps) - 1)], 0.0)


def draw(rows: int, longest: int, reach: int) -> tuple[Tensor, Tensor]:
    """Rows that end before the longest one, as scans do, and taps that fall by many orders of magnitude."""
    values = torch.randn(rows, longest, dtype=torch.float64)
    values[0, longest // 2 :] = 0.0
    taps = torch.linspace(0, -200, reach, dtype=torch.float64).exp()
    return values.requires_grad_(), taps.requires_grad_()


@given(rows=st.integers(1, 4), longest=st.integers(1, 700), reach=st.integers(1, 900))
def test_sums_and_gradients_are_those_of_the_matrix(rows: int, longest: int, reach: int) -> None:
    leaves = draw(rows, longest, reach)
    assert_same(window_sums(*leaves), by_matrix(*leaves), leaves)


def test_small_sums_are_exact() -> None:
    """A hundred orders of magnitude below the largest: a Fourier transform would give noise of 1e-16."""
    values = torch.zeros(1, 3000, dtype=torch.float64)
    values[0, 0] = 1.0
    taps = torch.linspace(0, -500, 3000, dtype=torch.float64).exp()
    torch.testing.assert_close(window_sums(values, taps)[0], taps, rtol=1e-12, atol=0)


@pytest.mark.parametrize("shared", [None, 0, 1])
def test_stacked_configurations_equal_one_after_the_other(shared: int | None) -> None:
    """Each with values and taps of its own, or one of both shared."""
    leaves = [torch.stack([draw(2, 500, 500)[number].detach() for _ in range(3)]) for number in (0, 1)]
    leaves[1] = leaves[1] * torch.tensor([[1.0], [2.0], [0.0]])
    leaves = [leaf[0] if number == shared else leaf for number, leaf in enumerate(leaves)]
    for leaf in leaves:
        leaf.requires_grad_()
    dims = tuple(None if number == shared else 0 for number in range(2))
    got = vmap(window_sums, dims)(*leaves)
    each = [[leaf if number == shared else leaf[c] for number, leaf in enumerate(leaves)] for c in range(3)]
    want = torch.stack([by_matrix(*own) for own in each])
    assert_same(got, want, leaves, side=want.detach())  # taps of 0 get no gradient


def compiled(device: str) -> None:
    leaves = [leaf.detach().expand(3, *leaf.shape).clone().to(device).requires_grad_() for leaf in draw(2, 600, 600)]
    assert_compiled_equals_eager(lambda *own: vmap(window_sums)(*own).square().sum(), leaves)


@pytest.mark.slow
def test_compiled_and_stacked_equals_eager() -> None:
    assert_script_passes(__file__, "cpu")


@needs_cuda
def test_on_cuda_equals_the_matrix() -> None:
    leaves = [leaf.detach().cuda().requires_grad_() for leaf in draw(3, 700, 700)]
    assert_same(window_sums(*leaves), by_matrix(*leaves), leaves)


if __name__ == "__main__":
    compiled(*sys.argv[1:])
