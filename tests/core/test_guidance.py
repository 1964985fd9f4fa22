"""Guidance against hand calculation, against float64, and in every form of its arguments."""

import math
from collections.abc import Callable

import numpy as np
import pandas as pd
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from normal_guidance.base.errors import UserError
from normal_guidance.core.bells import EM_STEPS
from normal_guidance.core.guidance import (
    DIVERGENCES,
    LabelGuidance,
    NormalGuidance,
    divergence,
    label_reference,
    normal_reference,
)
from normal_guidance.core.layout import Layout, SlottedLayout, unpack
from normal_guidance.core.methods import build_model
from same import assert_same

KINDS = pytest.mark.parametrize("kind", DIVERGENCES)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)
POSITIONED = st.lists(st.integers(3, 40), min_size=1, max_size=4)  # at least as many slices as modes


def bells(places: list[float], weights: list[float], sd: float = 2.0, slices: int = 60) -> Tensor:
    """The log-attention `(1, slices)` of a mixture of bells of one width."""
    j = torch.arange(slices, dtype=torch.float64)
    modes = [w * (-((j - place) ** 2) / (2 * sd**2)).softmax(0) for place, w in zip(places, weights, strict=True)]
    return torch.stack(modes).sum(0).log()[None]


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


def assert_float32_keeps_its_digits(guidance: NormalGuidance, logits: Tensor, from_logits: bool, most: float) -> None:
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = logits.to(dtype, copy=True).requires_grad_()
        loss = guidance(leaf if from_logits else leaf.softmax(-1), from_logits=from_logits)
        loss.backward()
        results.append((loss.double(), leaf.grad.double()))
    (value, gradient), (exact_value, exact_gradient) = results
    assert (value - exact_value).abs() / exact_value.abs() < most
    assert (gradient - exact_gradient).norm() / exact_gradient.norm() < most


@pytest.mark.parametrize("spread", [0.1, 5.0, 20.0])
@KINDS
def test_float32_keeps_its_digits_on_the_longest_scan(kind: str, spread: float) -> None:
    logits, guidance = torch.randn(4, 1727), NormalGuidance(divergence=kind)
    assert_float32_keeps_its_digits(guidance, spread * logits, True, 1e-4)
    assert_float32_keeps_its_digits(guidance, min(spread, 5) * logits, False, 1e-4)  # at 20 attention underflows
    two = torch.cat([bells([300.0, 700.0], [0.4, 0.6], 60.0, 1000), bells([100.0, 900.0], [0.7, 0.3], 30.0, 1000)])
    two = (two.clamp_min(-20) + 0.5 * torch.randn(2, 1000)).float()
    assert_float32_keeps_its_digits(NormalGuidance(divergence=kind, modes=2), two, True, 1e-3)


@pytest.mark.parametrize("from_logits", [True, False])
@pytest.mark.parametrize("dimensions", [0, 1, 2])
@pytest.mark.parametrize("options", [{}, {"renormalize": False}, {"modes": 3}], ids=str)
@KINDS
def test_extreme_logits_have_finite_gradients(
    kind: str, options: dict[str, object], dimensions: int, from_logits: bool
) -> None:
    logits = (1e4 * torch.randint(-1, 2, (8, 3, 60))).float().requires_grad_()
    mask = torch.arange(60) < torch.randint(3 if "modes" in options else 1, 61, (8, 1))
    positions = 1e3 * torch.randn(8, 60, dimensions) if dimensions else None
    log_attention = logits.masked_fill(~mask[:, None], -torch.inf).log_softmax(-1)
    attention = log_attention if from_logits else log_attention.exp()
    guidance = NormalGuidance(divergence=kind, **options)
    loss = guidance(attention, mask, positions=positions, from_logits=from_logits)
    loss.backward()
    assert loss.isfinite()
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
        torch.testing.assert_close(in_float32.sum(-1), torch.ones(3))


OPTIONS = [{}, {"negatives": "uniform"}, {"negatives": "none"}, {"modes": 2}, {"modes": 3}]
AT_POSITIONS = [({}, ()), ({"modes": 2}, (1,)), ({}, (2,)), ({"modes": 2}, (2,))]  # and the shape of each


@pytest.mark.parametrize(("options", "shape"), [*((options, None) for options in OPTIONS), *AT_POSITIONS], ids=str)
@pytest.mark.filterwarnings("ignore:NormalGuidance. attention adds up to")
@pytest.mark.filterwarnings("ignore:NormalGuidance. attention of shape")  # all bags may have one slice
@given(lengths=LENGTHS, kind=st.sampled_from(list(DIVERGENCES)), renormalize=st.booleans(), from_logits=st.booleans())
def test_packed_padded_slotted_stacked_and_one_bag_at_a_time_agree(
    options: dict[str, object],
    shape: tuple[int, ...] | None,
    lengths: list[int],
    kind: str,
    renormalize: bool,
    from_logits: bool,
) -> None:
    lengths = [max(length, options.get("modes", 1)) for length in lengths]
    counts, labels, longest = torch.tensor(lengths), torch.arange(len(lengths)) % 2, max(lengths)
    guidance = NormalGuidance(0.7, kind, renormalize=renormalize, **options)
    packed = torch.randn(2, sum(lengths), dtype=torch.float64)
    packed = packed - 4 if from_logits else packed.exp() / 500  # does not sum to one, as a class token's row
    padded, mask = unpack(packed.T, counts)
    padded = padded.movedim(-1, 1).masked_fill(~mask[:, None], 0.3)  # padding holds anything
    positions = torch.zeros(sum(lengths)) if shape is None else torch.randn(sum(lengths), *shape, dtype=torch.float64)
    padded_positions = unpack(positions, counts)[0].masked_fill(
        ~mask.view(*mask.shape, *[1] * len(shape or ())), torch.nan
    )
    forms = {
        "lengths": {"lengths": counts},
        "packed": {"lengths": Layout.packed(lengths)},
        "mask": {"mask": mask},
        "padded": {"lengths": Layout.padded(counts, longest)},
        "slotted": {"lengths": SlottedLayout.of(counts, rows=sum(lengths) + len(lengths) + 3, longest=longest)},
    }
    leaf = packed.clone().requires_grad_()
    want = torch.zeros((), dtype=torch.float64)
    for bag, label, place in zip(leaf.split(lengths, dim=-1), labels, positions.split(lengths), strict=True):
        at = None if shape is None else place[None]
        want = want + guidance(bag[None], from_logits=from_logits, labels=label[None], positions=at) / len(lengths)
    want.backward()
    for name, form in forms.items():
        is_packed = name in ("lengths", "packed")
        given_leaf = (packed if is_packed else padded).clone().requires_grad_()
        places = None if shape is None else positions if is_packed else padded_positions

        def loss(values: Tensor, form: dict[str, object] = form | {"positions": places}) -> Tensor:
            return guidance(values, from_logits=from_logits, labels=labels, **form)

        value = loss(given_leaf)
        value.backward()
        gradient = given_leaf.grad if is_packed else given_leaf.grad.movedim(1, -1)[mask].T
        torch.testing.assert_close(value, want)
        torch.testing.assert_close(gradient, leaf.grad)
        if name in ("packed", "padded", "slotted"):
            stacked = vmap(loss)(torch.stack([given_leaf.detach(), 2 * given_leaf.detach()]))
            torch.testing.assert_close(stacked, torch.stack([value.detach(), loss(2 * given_leaf.detach())]))


def test_padding_may_lie_anywhere_in_a_mask() -> None:
    attention = torch.rand(1, 5, dtype=torch.float64).softmax(-1)
    spaced = torch.zeros(1, 8, dtype=torch.float64)
    mask = torch.tensor([[False, True, True, False, True, True, True, False]])
    spaced[mask] = attention.flatten()
    torch.testing.assert_close(normal_reference(spaced, mask)[mask], normal_reference(attention).flatten())
    assert not normal_reference(spaced, mask)[~mask].any()


def test_renormalize_off_penalises_what_the_class_token_keeps_for_itself() -> None:
    """With half of the row on the class token, forward KL grows by log 2 and the moments do not change."""
    row = torch.rand(1, 4, 12, dtype=torch.float64).softmax(-1) / 2
    on, off = NormalGuidance(), NormalGuidance(renormalize=False)
    assert off(row).item() == pytest.approx(on(row).item() + math.log(2))
    assert off(row.log(), from_logits=True).item() == pytest.approx(off(row).item())


@KINDS
@pytest.mark.parametrize("heads", [None, 3])
def test_negative_bags_have_the_reference_that_was_asked_for(kind: str, heads: int | None) -> None:
    """Values and gradients: their own reference, a uniform one, or none."""
    logits = torch.randn((4, 12) if heads is None else (4, heads, 12), dtype=torch.float64, requires_grad=True)
    mask = torch.arange(12) < torch.tensor([[12], [5], [1], [9]])
    negative = torch.tensor([False, True, True, False])
    options = {"mask": mask, "from_logits": True}
    own = NormalGuidance(divergence=kind).per_bag(logits, **options)
    flat = (mask / mask.sum(1, keepdim=True)).double()
    flat = flat if heads is None else flat[:, None].expand_as(logits)
    wanted = {"own": own, "uniform": divergence(flat, logits, kind, **options), "none": 0 * own}
    for negatives, of_negative in wanted.items():
        got = NormalGuidance(divergence=kind, negatives=negatives).per_bag(logits, **options, labels=~negative)
        which = negative if heads is None else negative[:, None]
        assert_same(got, torch.where(which, of_negative, own), [logits])


@pytest.mark.parametrize(
    ("places", "weights"),
    [([12.0, 40.0], [0.5, 0.5]), ([8.0, 30.0], [0.85, 0.15]), ([9.0, 30.0, 50.0], [0.2, 0.5, 0.3])],
)
def test_a_mixture_of_bells_is_its_own_reference(places: list[float], weights: list[float]) -> None:
    log_a = bells(places, weights)
    modes = len(places)
    assert NormalGuidance(modes=modes)(log_a, from_logits=True).item() < 1e-3
    assert NormalGuidance()(log_a, from_logits=True).item() > 0.5, "one bell does not fit"
    torch.testing.assert_close(normal_reference(log_a, from_logits=True, modes=modes), log_a.exp(), rtol=0, atol=5e-3)


def test_the_mixture_is_what_expectation_maximisation_leads_to() -> None:
    """The same steps, one bag at a time and in plain numbers; the first guess is the best of all single cuts."""
    for log_a in 1.5 * torch.randn(5, 30, dtype=torch.float64):
        a, j = log_a.softmax(0), torch.arange(30, dtype=torch.float64)

        def within(cut: int, a: Tensor = a, j: Tensor = j) -> float:
            parts = [(a[:cut], j[:cut]), (a[cut:], j[cut:])]
            return sum((w * (x - (w @ x) / w.sum()) ** 2).sum().item() for w, x in parts)

        best = min(range(1, 30), key=within)
        shares = torch.stack([(j < best).double(), (j >= best).double()])
        for step in range(EM_STEPS + 1):
            weights = a * shares
            pi = weights.sum(1)
            mean = weights @ j / pi
            squared = (j - mean[:, None]) ** 2
            variance = (weights * squared).sum()
            density = pi[:, None] * (-squared / (2 * variance)).exp()
            if step < EM_STEPS:
                shares = density / density.sum(0)
        want = (pi[:, None] * (-squared / (2 * variance)).softmax(1)).sum(0)
        got = normal_reference(log_a[None], from_logits=True, modes=2)[0]
        torch.testing.assert_close(got, want)


@given(LENGTHS, st.integers(1, 4), st.sampled_from([0.0, 1.0, 30.0]))
def test_references_are_distributions_and_no_gradient_flows_through_them(
    lengths: list[int], modes: int, spread: float
) -> None:
    assume(min(lengths) >= modes)
    counts = torch.tensor(lengths)
    logits = (spread * torch.randn(2, sum(lengths), dtype=torch.float64)).requires_grad_()
    r = normal_reference(logits, lengths=counts, from_logits=True, modes=modes)
    assert not r.requires_grad
    assert (r >= 0).all()
    for bag in r.split(lengths, dim=1):
        torch.testing.assert_close(bag.sum(1), torch.ones(2, dtype=torch.float64))
    NormalGuidance(modes=modes)(logits, lengths=counts, from_logits=True).backward()
    a = torch.cat([bag.softmax(1) for bag in logits.detach().split(lengths, dim=1)], 1)
    torch.testing.assert_close(logits.grad, (a - r) / (2 * len(lengths)))


@KINDS
@pytest.mark.parametrize(("modes", "dimensions"), [(1, None), (1, 2), (2, 1)])
def test_gradients_are_those_of_the_divergence_from_a_fixed_reference(
    kind: str, modes: int, dimensions: int | None
) -> None:
    logits = torch.randn(3, 15, dtype=torch.float64, requires_grad=True)
    positions = None if dimensions is None else torch.randn(3, 15, dimensions)
    guidance = NormalGuidance(divergence=kind, modes=modes)
    (got,) = torch.autograd.grad(guidance(logits, positions=positions, from_logits=True), logits)
    r = normal_reference(logits, positions=positions, modes=modes, from_logits=True)

    def fixed(values: Tensor) -> Tensor:
        return divergence(r, values, kind, from_logits=True).mean()

    (want,) = torch.autograd.grad(fixed(logits), logits)
    torch.testing.assert_close(got, want)
    assert torch.autograd.gradcheck(fixed, (logits,))


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


@given(POSITIONED, st.floats(0.01, 1e4), st.booleans(), st.floats(-1e4, 1e4), st.integers(1, 3))
def test_even_spacing_leaves_the_reference_as_it_is(
    lengths: list[int], spacing: float, downward: bool, start: float, modes: int
) -> None:
    """In numbers: moments move and scale with the positions, so exponents stay."""
    counts = torch.tensor(lengths)
    logits = 3 * torch.randn(2, sum(lengths), dtype=torch.float64)
    numbers = torch.cat([torch.arange(size, dtype=torch.float64) for size in lengths])
    positions = start + (-spacing if downward else spacing) * numbers
    counted = normal_reference(logits, lengths=counts, from_logits=True, modes=modes)
    measured = normal_reference(logits, lengths=counts, from_logits=True, positions=positions, modes=modes)
    torch.testing.assert_close(measured, counted, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("dimensions", [1, 2, 3])
def test_points_have_the_normal_with_their_mean_and_covariance(dimensions: int) -> None:
    """The reference equals torch's density, for any unit, shift and rotation of the coordinates."""
    points = torch.randn(1, 50, dimensions, dtype=torch.float64) @ torch.randn(dimensions, dimensions).double()
    logits = torch.randn(1, 50, dtype=torch.float64)
    a = logits.softmax(1)[0]
    mean = a @ points[0]
    covariance = (points[0] - mean).T @ (a[:, None] * (points[0] - mean))
    log_density = torch.distributions.MultivariateNormal(mean, covariance).log_prob(points[0])
    got = normal_reference(logits, positions=points, from_logits=True)
    torch.testing.assert_close(got[0], log_density.softmax(0), rtol=1e-3, atol=1e-5)
    turn, _ = torch.linalg.qr(torch.randn(dimensions, dimensions, dtype=torch.float64))
    moved = 0.25 * points @ turn + 1e3
    torch.testing.assert_close(normal_reference(logits, positions=moved, from_logits=True), got, rtol=1e-5, atol=1e-8)


def test_points_on_a_line_are_slices() -> None:
    """The covariance of points on a line is singular; the reference equals that of one dimension."""
    logits = torch.randn(3, 20)
    along = torch.arange(20.0)
    line = torch.stack([3 * along, 4 * along], -1).expand(3, -1, -1)
    got = normal_reference(logits, positions=line, from_logits=True)
    torch.testing.assert_close(got, normal_reference(logits, from_logits=True), rtol=1e-3, atol=1e-5)


def test_one_slice_and_slices_in_one_place() -> None:
    one = normal_reference(torch.rand(2, 1), positions=torch.tensor([[7.0], [-3.0]]))
    torch.testing.assert_close(one, torch.ones(2, 1))
    same = normal_reference(torch.tensor([[0.9, 0.1]]), positions=torch.full((1, 2, 2), 5.0))
    torch.testing.assert_close(same, torch.full((1, 2), 0.5))  # one place: the reference cannot tell them apart


THIRD = torch.full((2, 3), 1 / 3)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: NormalGuidance(math.nan), r"lambda\) is nan"),
        (lambda: NormalGuidance(least_width=-1.0), "least_width is -1.0; give a standard deviation"),
        (lambda: NormalGuidance(modes=3)(torch.full((7,), 0.2), lengths=[5, 2]), "modes is 3, but bag 1 has 2 slices"),
        (lambda: NormalGuidance(negatives="none")(THIRD, labels=torch.zeros(3)), r"labels of shape \(3,\) for 2 bags"),
        (
            lambda: NormalGuidance()(torch.rand(2, 4), lengths=Layout.padded(torch.tensor([3, 2]), 3)),
            r"lengths adding up to 6; give packed attention the layout's \(2, 3\)",
        ),
        (lambda: NormalGuidance()(THIRD, THIRD > 0, lengths=[3, 3]), "attention has a mask and lengths"),
        (
            lambda: NormalGuidance()(torch.tensor([[0.5, 0.5], [0.5, torch.nan]])),
            "attention of bag 1, head 0, position 1 is NaN; look for NaN in the features",
        ),
        (
            lambda: NormalGuidance()(torch.full((5,), 0.3), lengths=[2, 3], positions=torch.rand(1, 5, 2)),
            r"positions of shape \(1, 5, 2\): expected \(5,\), or",
        ),
        (
            lambda: NormalGuidance()(THIRD, positions=torch.tensor([[0.0, 1.0, 2.0], [0.0, torch.nan, 2.0]])),
            r"positions of bags \[1\] are not all finite",
        ),
    ],
)
def test_mistakes_are_named(call: Callable[[], object], message: str, unchecked: None) -> None:
    """Beside those of docs/errors_page.py."""
    with pytest.raises(UserError, match=message):
        call()


def test_what_is_not_a_mistake_is_taken(unchecked: None) -> None:
    assert NormalGuidance(np.float32(0.5), modes=np.int64(2), least_width=np.float32(1.0)).modes == 2
    assert NormalGuidance()(THIRD, labels=torch.tensor([True, False])).isfinite()
    two = torch.tensor([[0.3, 0.7]])
    torch.testing.assert_close(normal_reference(two, modes=2), two, rtol=0, atol=1e-6)
    assert "weight=1.0, divergence='forward_kl', renormalize=True" in repr(NormalGuidance())
    assert repr(NormalGuidance(modes=2, negatives="none")).endswith("renormalize=True, modes=2, negatives='none')")


LOGITS = torch.tensor([[-2.0, 0.0, 3.0], [0.5, 0.1, 0.2]])
MASK = torch.tensor([[True, True, True, False], [True, True, False, False]])
HIDDEN = torch.tensor([[1.0, -0.5, 0.3, 2.0], [0.1, 0.2, -1.0, 0.4]]).masked_fill(~MASK, -torch.inf)
HALF_HIDDEN = torch.stack([LOGITS[0], torch.tensor([0.1, 0.2, -torch.inf])])
COLUMNS = LOGITS.softmax(-1)[:, :, None]
AS_LOGITS = {"from_logits": True}


@pytest.mark.parametrize(
    ("attention", "options", "message"),
    [
        (LOGITS, {}, "NormalGuidance: attention has values down to -2, .* pass from_logits=True"),
        (LOGITS.abs(), {}, "adds up to 5 over the slices of a bag"),
        (LOGITS.abs() / 50, {}, "adds up to 0.016 over the slices of a bag"),
        (LOGITS.softmax(-1), AS_LOGITS, "looks like probabilities; leave from_logits out"),
        # Attention (B, S, 1) reads as heads over one slice, where every term is 0.
        (COLUMNS, {}, r"\(2, 3, 1\) adds up to 1 over its second axis.*attention.squeeze\(-1\)"),
        (COLUMNS[0], {}, r"\(3, 1\) adds up to 1 over its first axis.*pass attention.T"),
        (COLUMNS.log(), AS_LOGITS, r"\(2, 3, 1\) has one slice in every bag; if its second axis .* \(said once\)"),
        *(
            (given, {"mask": ~MASK, **options}, "of bag 0 lies outside its mask.*inverted.*True marks real slices")
            for given, options in ((HIDDEN.softmax(-1), {}), (HIDDEN, AS_LOGITS))
        ),
        *(
            (given, options, "of bag 1 is hidden on its last 1 slices; if they are padding, pass the mask")
            for given, options in ((HALF_HIDDEN.softmax(-1), {}), (HALF_HIDDEN, AS_LOGITS))
        ),
    ],
)
def test_arguments_that_look_wrong_are_told_of_once(
    attention: Tensor, options: dict[str, object], message: str
) -> None:
    guidance = NormalGuidance()
    with pytest.warns(UserWarning, match=message):
        guidance(attention, **options)
    guidance(attention, **options)  # another warning would be an error here


def test_arguments_that_look_right_are_taken_in_silence() -> None:
    calls = [
        (LOGITS, AS_LOGITS),
        (LOGITS.softmax(-1), {}),
        (0.6 * LOGITS.softmax(-1), {}),  # a class token keeps the rest
        (torch.tensor([[0.5, 0.5, 9.0]]), {"mask": torch.tensor([[True, True, False]])}),  # padding is not looked at
        (HIDDEN.softmax(-1), {"mask": MASK}),
        (HIDDEN, {"mask": MASK, **AS_LOGITS}),
        (HALF_HIDDEN, {"mask": HALF_HIDDEN.isfinite(), **AS_LOGITS}),
        (HALF_HIDDEN[1:], AS_LOGITS),  # all bags end so: it may be attention
        *((torch.ones(shape), {}) for shape in ((3, 1), (1, 1), (3, 5, 1), (1, 1, 1))),  # scans of one slice
        (torch.ones(3), {"lengths": [1, 1, 1]}),
        # Two heads whose class token keeps half: the mask says that there is one slice.
        (torch.full((1, 2, 1), 0.5), {"mask": torch.ones(1, 1, dtype=torch.bool)}),
    ]
    for attention, options in calls:
        value = NormalGuidance()(attention, **options)
        assert value.isfinite()
        assert attention.shape[-1] > 1 or value == 0
    # Under vmap nothing is looked at.
    stacked = vmap(NormalGuidance())(torch.stack([LOGITS, LOGITS + 1]).abs())
    with pytest.warns(UserWarning, match="does not look like probabilities"):
        torch.testing.assert_close(stacked[0], NormalGuidance()(LOGITS.abs()))


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
