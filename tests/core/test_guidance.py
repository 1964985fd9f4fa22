"""Guidance against hand calculation, against float64, and in every form of its arguments."""

import math
import warnings
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normal_guidance.base.errors import UserError
from normal_guidance.core.guidance import (
    DIVERGENCES,
    LabelGuidance,
    NormalGuidance,
    divergence,
    label_reference,
    normal_reference,
)
from normal_guidance.core.layout import Layout, unpack
from normal_guidance.core.methods import build_model

KINDS = pytest.mark.parametrize("kind", DIVERGENCES)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def test_three_slices_by_hand() -> None:
    """a = (1/2, 1/4, 1/4): mean 7/4, variance 11/16, exponents -(j - 7/4)^2 / (11/8) = -9/22, -1/22, -25/22."""
    attention = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    density = [math.exp(-9 / 22), math.exp(-1 / 22), math.exp(-25 / 22)]
    r = [value / sum(density) for value in density]
    a = [0.5, 0.25, 0.25]
    want = {
        "forward_kl": sum(p * math.log(p / q) for p, q in zip(r, a, strict=True)),
        "reverse_kl": sum(q * math.log(q / p) for p, q in zip(r, a, strict=True)),
        "squared_error": sum((p - q) ** 2 for p, q in zip(r, a, strict=True)),
    }
    reference = normal_reference(attention)
    torch.testing.assert_close(reference, torch.tensor([r], dtype=torch.float64), atol=1e-15, rtol=0)
    for kind in DIVERGENCES:
        assert divergence(reference, attention, kind).item() == pytest.approx(want[kind], rel=1e-12)
        assert NormalGuidance(2.0, kind)(attention).item() == pytest.approx(2 * want[kind], rel=1e-12)


def test_gradient_of_forward_kl_by_hand() -> None:
    """With r fixed, d/dlogit_j of sum r log(r/a) is a_j - r_j; it would differ if a gradient flowed through r."""
    logits = torch.randn(2, 7, dtype=torch.float64, requires_grad=True)
    NormalGuidance()(logits, from_logits=True).backward()
    a = logits.detach().softmax(-1)
    torch.testing.assert_close(logits.grad, (a - normal_reference(a)) / 2)


def test_uniform_attention_has_the_values_of_the_specification() -> None:
    for slices, kind, value in [
        (40, "forward_kl", "7.9e-02"),
        (1727, "forward_kl", "7.9e-02"),
        (40, "squared_error", "3.7e-03"),
        (1727, "squared_error", "8e-05"),
    ]:
        uniform = torch.full((1, slices), 1 / slices)
        got = divergence(normal_reference(uniform), uniform, kind).item()
        assert f"{got:.{1 if '.' in value else 0}e}" == value


@pytest.mark.parametrize("spread", [0.1, 1.0, 5.0, 20.0])
@KINDS
@pytest.mark.parametrize("from_logits", [True, False])
def test_float32_keeps_its_digits_on_the_longest_scan(kind: str, spread: float, from_logits: bool) -> None:
    logits = min(spread, 20 if from_logits else 5) * torch.randn(4, 1727)  # at 20 attention itself underflows
    results = []
    for dtype in (torch.float32, torch.float64):
        given_logits = logits.to(dtype, copy=True).requires_grad_()
        attention = given_logits if from_logits else given_logits.softmax(-1)
        loss = NormalGuidance(divergence=kind)(attention, from_logits=from_logits)
        loss.backward()
        results.append((loss.double(), given_logits.grad.double()))
    (value, gradient), (exact_value, exact_gradient) = results
    assert (value - exact_value).abs() / exact_value.abs() < 1e-4
    assert (gradient - exact_gradient).norm() / exact_gradient.norm() < 1e-4


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("renormalize", [True, False])
@KINDS
def test_extreme_logits_have_finite_gradients(kind: str, from_logits: bool, renormalize: bool) -> None:
    logits = (1e4 * torch.randint(-1, 2, (8, 3, 60))).float().requires_grad_()
    mask = torch.arange(60) < torch.randint(1, 61, (8, 1))
    log_attention = logits.masked_fill(~mask[:, None], -torch.inf).log_softmax(-1)
    attention = log_attention if from_logits else log_attention.exp()
    loss = NormalGuidance(divergence=kind, renormalize=renormalize)(attention, mask, from_logits=from_logits)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


@KINDS
def test_attention_that_the_class_token_keeps_for_itself_is_no_nan(kind: str) -> None:
    """The moments are right even where every slice's probability underflows."""
    log_attention = torch.full((1, 10), -150.0, requires_grad=True)
    loss = NormalGuidance(divergence=kind, renormalize=False)(log_attention, from_logits=True)
    loss.backward()
    assert loss.isfinite()
    assert log_attention.grad.isfinite().all()


@KINDS
def test_slices_at_minus_infinity_are_no_nan(kind: str) -> None:
    logits = torch.tensor([[0.0, -torch.inf, 1.0, 2.0]], requires_grad=True)
    loss = NormalGuidance(divergence=kind)(logits, from_logits=True)
    loss.backward()
    assert not loss.isnan()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize("method", ["ng", "mhng"])
@KINDS
def test_guidance_of_a_model_under_bfloat16_autocast(kind: str, method: str) -> None:
    """With scores in bfloat16 everything else is float32, as if the scores were float32."""
    model, layout = build_model(method, 16), Layout.packed([200, 37])
    guidance = NormalGuidance(divergence=kind)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        prediction = model(torch.randn(237, 16), layout)
        mixed = guidance(prediction.log_attention, lengths=layout, from_logits=True)
        scores = torch.nn.functional.linear(torch.randn(4, 300, 8), torch.randn(1, 8)).squeeze(-1)
        assert scores.dtype == torch.bfloat16
        half = guidance(scores, from_logits=True)
        again = guidance(scores.float(), from_logits=True)
    assert prediction.log_attention.dtype == mixed.dtype == half.dtype == torch.float32
    plain = guidance(prediction.log_attention, lengths=layout, from_logits=True)
    torch.testing.assert_close(mixed, plain, rtol=1e-5, atol=0)
    torch.testing.assert_close(half, again, rtol=1e-5, atol=0)
    # A distribution to float32's digits, which bfloat16 would miss by about .001.
    if method == "ng":
        sums = torch.stack([part.sum() for part in prediction.attention.split([200, 37])])
        torch.testing.assert_close(sums, torch.ones(2), rtol=1e-5, atol=0)


@KINDS
def test_bfloat16_autocast_changes_nothing(kind: str) -> None:
    logits = 3 * torch.randn(4, 2, 200)
    guidance = NormalGuidance(divergence=kind)
    plain = guidance(logits, from_logits=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = guidance(logits, from_logits=True)
        reference = normal_reference(logits.softmax(-1))
    assert mixed.dtype == reference.dtype == torch.float32
    torch.testing.assert_close(mixed, plain, rtol=1e-5, atol=0)


@given(LENGTHS, st.sampled_from([0.0, 1.0, 30.0]))
def test_reference_is_the_normal_with_the_moments_of_attention(lengths: list[int], spread: float) -> None:
    """Against the paper's own formulas in float64: E[J^2] - E[J]^2, the density at j = 1..S, divided by its sum."""
    logits = spread * torch.randn(3, sum(lengths), dtype=torch.float64)
    got = normal_reference(logits, lengths=torch.tensor(lengths), from_logits=True)
    single = normal_reference(logits.float(), lengths=torch.tensor(lengths), from_logits=True)
    for bag, reference, in_float32 in zip(*(x.split(lengths, -1) for x in (logits, got, single)), strict=True):
        a, j = bag.softmax(-1), torch.arange(1, bag.shape[-1] + 1, dtype=torch.float64)
        mean = (j * a).sum(-1, keepdim=True)
        variance = (j**2 * a).sum(-1, keepdim=True) - mean**2
        if variance.min() > 1e-3:  # below that, E[J^2] - E[J]^2 itself has few digits left
            density = torch.exp(-((j - mean) ** 2) / (2 * variance))
            torch.testing.assert_close(reference, density / density.sum(-1, keepdim=True), rtol=1e-7, atol=1e-9)
        torch.testing.assert_close(reference.sum(-1), torch.ones(3, dtype=torch.float64))
        torch.testing.assert_close(in_float32.sum(-1), torch.ones(3))
        assert (reference >= 0).all()


def test_reference_does_not_underflow_on_long_scans() -> None:
    """The authors' form divides densities by their sum, which is below 1e-6 when the variance is tiny."""
    attention = torch.zeros(1, 1727)
    attention[0, 900] = 1.0
    reference = normal_reference(attention)
    assert reference.sum().item() == pytest.approx(1.0)
    assert reference.argmax().item() == 900


@pytest.mark.filterwarnings("ignore:NormalGuidance. attention adds up to")
@given(LENGTHS, st.sampled_from(list(DIVERGENCES)), st.booleans(), st.booleans())
def test_packed_padded_and_one_bag_at_a_time_agree(
    lengths: list[int], kind: str, from_logits: bool, renormalize: bool
) -> None:
    counts = torch.tensor(lengths)
    packed = torch.randn(2, sum(lengths), dtype=torch.float64)
    packed = packed - 4 if from_logits else packed.exp() / 500  # does not sum to one, as a class token's row
    guidance = NormalGuidance(0.7, kind, renormalize=renormalize)
    padded, mask = unpack(packed.T, counts)
    padded = padded.movedim(-1, 1).masked_fill(~mask[:, None], 0.3)  # padding holds anything

    values, gradients = [], []
    for form in ("packed", "layout", "padded", "bags"):
        leaf = (padded if form == "padded" else packed).clone().requires_grad_()
        if form == "packed":
            loss = guidance(leaf, lengths=counts, from_logits=from_logits)
        elif form == "layout":
            loss = guidance(leaf, lengths=Layout.packed(lengths), from_logits=from_logits)
        elif form == "padded":
            loss = guidance(leaf, mask, from_logits=from_logits)
        else:
            bags = leaf.split(lengths, dim=-1)
            loss = torch.stack([guidance(bag[None], from_logits=from_logits) for bag in bags]).mean()
        loss.backward()
        values.append(loss.detach())
        gradients.append(leaf.grad.movedim(1, -1)[mask].T if form == "padded" else leaf.grad)
    for value, gradient in zip(values[1:], gradients[1:], strict=True):
        torch.testing.assert_close(value, values[0])
        torch.testing.assert_close(gradient, gradients[0])


def test_padding_may_lie_anywhere_in_a_mask() -> None:
    attention = torch.rand(1, 5, dtype=torch.float64).softmax(-1)
    spaced = torch.zeros(1, 8, dtype=torch.float64)
    mask = torch.tensor([[False, True, True, False, True, True, True, False]])
    spaced[mask] = attention.flatten()
    torch.testing.assert_close(normal_reference(spaced, mask)[mask], normal_reference(attention).flatten())
    assert not normal_reference(spaced, mask)[~mask].any()


def test_single_head_and_many_heads_have_their_own_shapes() -> None:
    padded, packed = torch.rand(4, 6).softmax(-1), torch.rand(24)
    lengths = torch.tensor([6, 6, 6, 6])
    assert normal_reference(padded).shape == (4, 6)
    assert normal_reference(packed, lengths=lengths).shape == (24,)
    assert divergence(padded, padded, "forward_kl").shape == (4,)
    assert divergence(packed, packed, "forward_kl", lengths=lengths).shape == (4,)
    heads = torch.rand(4, 3, 6).softmax(-1)
    assert normal_reference(heads).shape == (4, 3, 6)
    assert divergence(heads, heads, "reverse_kl", torch.ones(4, 6, dtype=torch.bool)).shape == (4, 3)
    assert divergence(torch.rand(3, 24), torch.rand(3, 24), "squared_error", lengths=lengths).shape == (4, 3)
    assert NormalGuidance().per_bag(padded).shape == (4,)
    assert NormalGuidance().per_bag(heads).shape == (4, 3)


@KINDS
def test_divergence_of_a_distribution_from_itself_is_zero(kind: str) -> None:
    logits = torch.randn(3, 9, dtype=torch.float64)
    torch.testing.assert_close(
        divergence(logits.softmax(-1), logits, kind, from_logits=True), torch.zeros(3, dtype=torch.float64)
    )


def test_guidance_makes_attention_a_bell() -> None:
    logits = torch.randn(1, 40, requires_grad=True)
    optimizer = torch.optim.SGD([logits], lr=5.0)
    guidance = NormalGuidance()
    first = guidance(logits, from_logits=True).item()
    for _ in range(300):
        optimizer.zero_grad()
        guidance(logits, from_logits=True).backward()
        optimizer.step()
    attention = logits.detach().softmax(-1)[0]
    assert guidance(attention[None]).item() < first / 50
    rises = attention.diff() > 0
    assert (rises.int().diff() <= 0).all()  # up, then down: one mode


def test_renormalize_off_penalises_what_the_class_token_keeps_for_itself() -> None:
    """With half of the row on the class token, forward KL grows by log 2 and the moments do not change."""
    row = torch.rand(1, 4, 12, dtype=torch.float64).softmax(-1) / 2
    on, off = NormalGuidance(), NormalGuidance(renormalize=False)
    assert off(row).item() == pytest.approx(on(row).item() + math.log(2))
    assert off(row.log(), from_logits=True).item() == pytest.approx(off(row).item())


def test_label_reference_is_uniform_over_what_it_should_be() -> None:
    labels = torch.tensor([0, 1, 1, 0, 0, 0])
    want = torch.tensor([0, 0.5, 0.5, 1 / 3, 1 / 3, 1 / 3])
    torch.testing.assert_close(label_reference(labels, lengths=torch.tensor([3, 3])), want)
    padded, mask = unpack(labels, torch.tensor([3, 3]))
    torch.testing.assert_close(label_reference(padded, mask)[mask], want)


@pytest.mark.parametrize("kind", ["forward_kl", "squared_error"])
def test_label_guidance_is_least_at_the_labels_and_per_head(kind: str) -> None:
    labels = torch.tensor([[0, 1, 1, 0]])
    guidance = LabelGuidance(divergence=kind, uses_slice_labels=True)
    heads = torch.tensor([[0, 0.5, 0.5, 0]]).expand(1, 2, 4)
    assert guidance(heads, labels).item() == pytest.approx(0, abs=1e-6)
    assert guidance(torch.full((1, 4), 0.25), labels).item() > 0.1
    logits = torch.zeros(1, 4, requires_grad=True)
    guidance(logits, labels, from_logits=True).backward()
    assert logits.grad.isfinite().all()


def test_label_guidance_cannot_be_switched_on_by_accident() -> None:
    with pytest.raises(UserError, match="uses_slice_labels=True"):
        LabelGuidance()
    with pytest.raises(UserError, match=r"bags \[1\] are not all 0 or 1; leave unlabelled scans out"):
        label_reference(torch.tensor([[0, 1], [-1, -1]]))
    with pytest.raises(
        UserError, match=r"slice_labels of shape \(1, 3\) for attention of shape \(1, 4\); give \(1, 4\)"
    ):
        LabelGuidance(uses_slice_labels=True)(torch.rand(1, 4), torch.tensor([[0, 1, 1]]))
    with pytest.raises(UserError, match="reverse_kl is infinite"):
        LabelGuidance(divergence="reverse_kl", uses_slice_labels=True)


def test_mistakes_are_named(unchecked: None) -> None:
    with pytest.raises(UserError, match="'kl' is unknown; choose one of forward_kl, reverse_kl, squared_error"):
        NormalGuidance(divergence="kl")
    with pytest.raises(UserError, match=r"lambda\) is -1"):
        NormalGuidance(-1)
    with pytest.raises(UserError, match=r"lambda\) is inf"):
        NormalGuidance(math.inf)
    with pytest.raises(UserError, match=r"mask: bags \[1\] have no real slice"):
        NormalGuidance()(torch.rand(2, 3), torch.tensor([[True] * 3, [False] * 3]))
    with pytest.raises(UserError, match=r"attention of shape \(0, 3\)"):
        NormalGuidance()(torch.rand(0, 3))
    with pytest.raises(UserError, match=r"lengths adding up to 6; give packed attention the layout's \(2, 3\)"):
        NormalGuidance()(torch.rand(2, 4), lengths=Layout.padded(torch.tensor([3, 2]), 3))
    with pytest.raises(UserError, match=r"lambda\) is nan"):
        NormalGuidance(math.nan)
    with pytest.raises(UserError, match=r"attention of shape \(2, 5\) and mask of shape \(2, 4\)"):
        NormalGuidance()(torch.rand(2, 5), torch.ones(2, 4, dtype=torch.bool))
    with pytest.raises(UserError, match=r"attention of shape \(5,\) and mask of shape None"):
        NormalGuidance()(torch.rand(5))
    with pytest.raises(UserError, match=r"attention of shape \(5,\) with lengths adding up to 4"):
        NormalGuidance()(torch.rand(5), lengths=torch.tensor([2, 2]))
    with pytest.raises(UserError, match=r"mask is torch.uint8; .* write mask.bool\(\)"):
        NormalGuidance()(torch.rand(2, 5), torch.ones(2, 5, dtype=torch.uint8))
    with pytest.raises(UserError, match=r"lengths are torch.float32 of shape \(1,\)"):
        NormalGuidance()(torch.rand(5), lengths=torch.tensor([5.0]))
    with pytest.raises(UserError, match=r"reference of shape \(1, 3\) and attention of shape \(1, 4\) differ"):
        divergence(torch.rand(1, 3), torch.rand(1, 4))
    assert "weight=1.0, divergence='forward_kl', renormalize=True" in repr(NormalGuidance())


LOGITS = torch.tensor([[-2.0, 0.0, 3.0], [0.5, 0.1, 0.2]])


@pytest.mark.parametrize(
    ("attention", "message"),
    [
        (LOGITS, "has values down to -2, .* pass from_logits=True"),
        (LOGITS.abs(), "adds up to 5 over the slices of a bag"),
        (LOGITS.abs() / 50, "adds up to 0.016 over the slices of a bag"),
    ],
    ids=["negative", "more than one", "much less than one"],
)
def test_logits_without_from_logits_are_told_once(attention: torch.Tensor, message: str) -> None:
    guidance = NormalGuidance()
    with pytest.warns(UserWarning, match=rf"NormalGuidance: attention {message}"):
        guidance(attention)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guidance(attention)  # said once
        NormalGuidance()(attention, from_logits=True)
        NormalGuidance()(attention.softmax(-1))
        NormalGuidance()(0.6 * attention.softmax(-1))  # a class token keeps the rest
        padded = torch.tensor([[0.5, 0.5, 9.0]])
        NormalGuidance()(padded, torch.tensor([[True, True, False]]))  # the padding is not looked at


def test_the_look_at_attention_is_left_out_under_vmap() -> None:
    guidance = NormalGuidance()
    stacked = torch.stack([LOGITS, LOGITS + 1]).abs()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        got = torch.func.vmap(guidance)(stacked)
    with pytest.warns(UserWarning, match="does not look like probabilities"):
        torch.testing.assert_close(got[0], guidance(stacked[0]))


def test_nan_names_bag_and_slice() -> None:
    attention = torch.full((2, 4), 0.25)
    attention[1, 2] = torch.nan
    with pytest.raises(UserError, match="attention of bag 1, head 0, slice 2 is NaN; look for NaN in the features"):
        NormalGuidance()(attention)


def test_slices_in_the_wrong_axis_are_warned_of() -> None:
    """Attention (B, S, 1) reads as heads over one slice, where every term is 0; real scans of one slice are taken."""
    attention = torch.rand(3, 5).softmax(-1)
    with pytest.warns(UserWarning, match=r"\(3, 5, 1\) adds up to 1 over its second axis.*attention.squeeze\(-1\)"):
        NormalGuidance()(attention[:, :, None])
    with pytest.warns(UserWarning, match=r"\(5, 1\) adds up to 1 over its first axis.*pass attention.T"):
        NormalGuidance()(attention[0, :, None])
    with pytest.warns(
        UserWarning, match=r"\(3, 5, 1\) has one slice in every bag; if its second axis .* \(said once\)"
    ):
        NormalGuidance()(attention.log()[:, :, None], from_logits=True)
    for shape in ((3, 1), (1, 1), (3, 5, 1), (1, 1, 1)):
        assert NormalGuidance()(torch.ones(shape)) == 0
    assert NormalGuidance()(torch.ones(3), lengths=[1, 1, 1]) == 0
    halves = torch.full((1, 2, 1), 0.5)  # two heads whose class token keeps half: the mask says that there is one slice
    assert NormalGuidance()(halves, torch.ones(1, 1, dtype=torch.bool)) == 0


@pytest.mark.parametrize("from_logits", [False, True])
def test_an_inverted_mask_is_told_once(from_logits: bool) -> None:
    mask = torch.tensor([[True, True, True, False], [True, True, False, False]])
    logits = torch.randn(2, 4).masked_fill(~mask, -torch.inf)
    guidance, attention = NormalGuidance(), logits if from_logits else logits.softmax(-1)
    with pytest.warns(
        UserWarning, match="of bag 0 lies outside its mask.*is the mask inverted.*True marks real slices"
    ):
        guidance(attention, ~mask, from_logits=from_logits)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guidance(attention, ~mask, from_logits=from_logits)  # said once
        NormalGuidance()(attention, mask, from_logits=from_logits)
    with pytest.raises(UserError, match=r"bags \[0\] have no real slice; .* write ~mask if True marks padding"):
        NormalGuidance()(attention, ~torch.tensor([[True] * 4, [True, True, False, False]]))


FORMS = {"tensor": lambda x: x, "array": lambda x: x.numpy(), "list": lambda x: x.tolist()}


@pytest.mark.parametrize("form", FORMS.values(), ids=FORMS)
def test_every_form_of_numbers_gives_the_same(form: Callable[[torch.Tensor], object]) -> None:
    attention = torch.tensor([[0.2, 0.5, 0.3], [0.6, 0.4, 0.0]])
    mask, lengths, labels = torch.tensor([[True] * 3, [True, True, False]]), torch.tensor([3, 2]), torch.tensor([0, 1])
    packed, guidance = attention[mask], NormalGuidance(negatives="none")
    want, reference = guidance(attention, mask, labels=labels), normal_reference(attention, mask)
    torch.testing.assert_close(guidance(attention, form(mask), labels=form(labels)), want)
    torch.testing.assert_close(guidance(packed, lengths=form(lengths), labels=form(labels)), want)
    torch.testing.assert_close(guidance.per_bag(form(attention), form(mask), labels=form(labels)).mean(), want)
    torch.testing.assert_close(normal_reference(form(attention), form(mask)), reference)
    torch.testing.assert_close(normal_reference(form(packed), lengths=form(lengths)), reference[mask])
    torch.testing.assert_close(
        divergence(form(reference), form(attention), mask=form(mask)), divergence(reference, attention, mask=mask)
    )
    torch.testing.assert_close(label_reference(form(torch.tensor([[0, 1]]))), torch.tensor([[0.0, 1.0]]))
    column = pd.Series(packed.numpy(), index=list("abcde"))
    torch.testing.assert_close(normal_reference(column, lengths=form(lengths)), reference[mask])


def test_a_loss_of_an_array_cannot_train(unchecked: None) -> None:
    with pytest.raises(UserError, match="attention: got ndarray; a loss needs the model's tensor, since no gradient"):
        NormalGuidance()(np.full((2, 3), 1 / 3))
    with pytest.raises(UserError, match="attention: got list; a loss needs"):
        LabelGuidance(uses_slice_labels=True)([[0.5, 0.5]], [[0, 1]])


def test_labels_are_zero_or_one() -> None:
    attention = torch.full((3, 4), 0.25)
    for labels, shown in (([0, 1, 2], "bag 2 has 2"), ([0.0, 0.5, 1.0], "bag 1 has 0.5"), ([-1, 0, 1], "bag 0 has -1")):
        with pytest.raises(UserError, match=f"labels: {shown}; labels are 0 or 1"):
            NormalGuidance()(attention, labels=torch.tensor(labels))
    assert NormalGuidance()(attention, labels=torch.tensor([True, False, True])).isfinite()


def test_numbers_of_numpy_are_numbers_and_true_is_not_one(unchecked: None) -> None:
    assert NormalGuidance(np.float32(0.5), modes=np.int64(2), least_width=np.float32(1.0)).modes == 2
    with pytest.raises(UserError, match=r"lambda. is True"):
        NormalGuidance(True)


def test_nan_is_refused_in_logits_and_by_label_guidance() -> None:
    nan = torch.full((1, 2), torch.nan)
    with pytest.raises(UserError, match="slice 0 is NaN"):
        NormalGuidance()(nan, from_logits=True)
    with pytest.raises(UserError, match="slice 0 is NaN"):
        LabelGuidance(uses_slice_labels=True)(nan, torch.zeros(1, 2))


def test_label_guidance_warns_of_logits() -> None:
    with pytest.warns(UserWarning, match=r"LabelGuidance: attention .* pass from_logits=True"):
        LabelGuidance(uses_slice_labels=True)(torch.tensor([[-9.0, 5.0]]), torch.tensor([[0, 1]]))


def test_scans_of_one_slice_are_only_warned_of() -> None:
    with pytest.warns(UserWarning, match="adds up to 1 over its first axis"):
        assert NormalGuidance(renormalize=False)(torch.tensor([[0.5], [0.5]])).isfinite()


@pytest.mark.parametrize("from_logits", [False, True])
def test_padding_without_a_mask_is_asked_about_once(from_logits: bool) -> None:
    logits = torch.randn(3, 6)
    logits[1, 4:] = -torch.inf
    given, guidance = (logits if from_logits else logits.softmax(-1)), NormalGuidance()
    with pytest.warns(UserWarning, match="of bag 1 is hidden on its last 2 slices; if they are padding, pass the mask"):
        guidance(given, from_logits=from_logits)
    guidance(given, from_logits=from_logits)
    NormalGuidance()(given, logits.isfinite(), from_logits=from_logits)
    NormalGuidance()(given[1:2], from_logits=from_logits)  # all bags end so: it may be attention


def test_probabilities_with_from_logits_are_asked_about() -> None:
    attention = torch.randn(3, 6).softmax(-1)
    with pytest.warns(UserWarning, match="looks like probabilities; leave from_logits out"):
        NormalGuidance()(attention, from_logits=True)
    NormalGuidance()(attention.log(), from_logits=True)
