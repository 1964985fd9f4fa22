"""References beyond the paper: those that depend on the bag's label, and those with several modes."""

import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from torch.func import vmap

from normal_guidance.base.errors import UserError
from normal_guidance.core.bells import EM_STEPS, log_mixture, log_normal
from normal_guidance.core.guidance import DIVERGENCES, NEGATIVES, NormalGuidance, divergence, normal_reference
from normal_guidance.core.layout import Layout, SlottedLayout, unpack

KINDS = pytest.mark.parametrize("kind", DIVERGENCES)
LENGTHS = st.lists(st.integers(1, 40), min_size=1, max_size=5)


def bells(places: list[float], weights: list[float], sd: float = 2.0, slices: int = 60) -> Tensor:
    """The log-attention `(1, slices)` of a mixture of bells of one width."""
    j = torch.arange(slices, dtype=torch.float64)
    modes = [w * (-((j - place) ** 2) / (2 * sd**2)).softmax(0) for place, w in zip(places, weights, strict=True)]
    return torch.stack(modes).sum(0).log()[None]


# ----------------------------------------------------------------------------------------------------
# The bag's label
# ----------------------------------------------------------------------------------------------------


@KINDS
@pytest.mark.parametrize("heads", [None, 3])
def test_negative_bags_have_the_reference_that_was_asked_for(kind: str, heads: int | None) -> None:
    logits = torch.randn((4, 12) if heads is None else (4, heads, 12), dtype=torch.float64)
    mask = torch.arange(12) < torch.tensor([[12], [5], [1], [9]])
    labels = torch.tensor([1, 0, 0, 1])
    options = {"mask": mask, "from_logits": True, "labels": labels}
    own = NormalGuidance(divergence=kind).per_bag(logits, mask, from_logits=True)
    assert torch.equal(NormalGuidance(divergence=kind, negatives="own").per_bag(logits, **options), own)
    none = NormalGuidance(divergence=kind, negatives="none").per_bag(logits, **options)
    assert torch.equal(none[labels == 1], own[labels == 1])
    assert not none[labels == 0].any()
    uniform = NormalGuidance(divergence=kind, negatives="uniform").per_bag(logits, **options)
    assert torch.equal(uniform[labels == 1], own[labels == 1])
    flat = (mask / mask.sum(1, keepdim=True)).double()
    flat = flat if heads is None else flat[:, None].expand_as(logits)
    want = divergence(flat, logits, kind, mask, from_logits=True)
    torch.testing.assert_close(uniform[labels == 0], want[labels == 0])


def test_the_mean_is_over_all_bags() -> None:
    logits, labels = torch.randn(3, 9), torch.tensor([1, 0, 0])
    own = NormalGuidance().per_bag(logits, from_logits=True)
    loss = NormalGuidance(2.0, negatives="none")(logits, from_logits=True, labels=labels)
    torch.testing.assert_close(loss, 2 * own[0] / 3)
    nobody = NormalGuidance(negatives="none")(logits, from_logits=True, labels=torch.zeros(3))
    assert nobody == 0


def test_gradients_of_negative_bags_by_hand() -> None:
    """The gradient of forward KL is a - r over the number of bags, with r uniform; without guidance it is 0."""
    labels = torch.tensor([0, 1])
    gradients = {}
    for negatives in NEGATIVES:
        logits = torch.randn(2, 7, generator=torch.Generator().manual_seed(1)).double().requires_grad_()
        NormalGuidance(negatives=negatives)(logits, from_logits=True, labels=labels).backward()
        gradients[negatives], a = logits.grad, logits.detach().softmax(1)
    torch.testing.assert_close(gradients["uniform"][0], (a[0] - 1 / 7) / 2)
    torch.testing.assert_close(gradients["own"], (a - normal_reference(a)) / 2)
    assert not gradients["none"][0].any()
    for negatives in NEGATIVES:
        torch.testing.assert_close(gradients[negatives][1], gradients["own"][1])


# ----------------------------------------------------------------------------------------------------
# Several modes
# ----------------------------------------------------------------------------------------------------


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


@given(LENGTHS)
def test_the_mixture_of_one_is_the_normal(lengths: list[int]) -> None:
    """A mixture of one mode against the paper's formula, which `modes=1` itself uses."""
    layout = Layout.packed(lengths)
    log_a = layout.log_softmax(layout.fold(2 * torch.randn(3, sum(lengths), dtype=torch.float64)))
    got, want = (layout.restore(one.exp()) for one in (log_mixture(log_a, layout), log_normal(log_a, layout)))
    torch.testing.assert_close(got, want)
    logits = layout.restore(log_a)
    one = NormalGuidance(modes=1)(logits, lengths=layout, from_logits=True)
    assert torch.equal(one, NormalGuidance()(logits, lengths=layout, from_logits=True))


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


def test_turned_attention_has_a_turned_reference() -> None:
    logits = torch.randn(20, 31, dtype=torch.float64)
    for modes in (2, 3):
        plain, turned = (normal_reference(one, from_logits=True, modes=modes) for one in (logits, logits.flip(1)))
        torch.testing.assert_close(turned, plain.flip(1))


@KINDS
def test_extreme_attention_has_finite_gradients(kind: str) -> None:
    logits = (1e4 * torch.randint(-1, 2, (8, 3, 60))).float().requires_grad_()
    mask = torch.arange(60) < torch.randint(3, 61, (8, 1))
    loss = NormalGuidance(divergence=kind, modes=3)(logits, mask, from_logits=True)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_more_modes_than_slices_are_refused() -> None:
    two = torch.tensor([[0.3, 0.7]])
    torch.testing.assert_close(normal_reference(two, modes=2), two, rtol=0, atol=1e-6)
    with pytest.raises(UserError, match="modes is 3, but bag 0 has 2 slices; use fewer modes or leave such short bags"):
        normal_reference(two, modes=3)
    with pytest.raises(UserError, match="modes is 3, but bag 1 has 2 slices"):
        NormalGuidance(modes=3)(torch.full((7,), 0.2), lengths=[5, 2])


def test_a_spike_on_a_bell_does_not_get_a_mode_of_no_width() -> None:
    """The reason for a common width: the reference must not reward a spike on a single slice."""
    log_a = bells([20.0], [1.0], sd=5.0)
    log_a[0, 45] = log_a.max() + 1  # a fifth of all attention on one slice
    a, r = log_a.softmax(1)[0], normal_reference(log_a, from_logits=True, modes=2)[0]
    assert a[45] > 0.15
    assert r[45] < a[45] / 2
    assert r[43:48].min() > 0.5 * r[45], "a bell stands there, as wide as the other"


def test_guidance_with_two_modes_makes_attention_two_bells() -> None:
    start = torch.randn(1, 40) + 3 * torch.isin(torch.arange(40), torch.tensor([8, 9, 10, 29, 30]))
    ends = {}
    for modes in (1, 2):
        logits = start.clone().requires_grad_()
        optimizer = torch.optim.SGD([logits], lr=5.0)
        for _ in range(100):
            optimizer.zero_grad()
            NormalGuidance(modes=modes)(logits, from_logits=True).backward()
            optimizer.step()
        attention = logits.detach().softmax(1)[0]
        ends[modes] = attention[15:25].sum().item(), attention[[9, 29]].min().item()
    between, peak = ends[2]
    assert between < ends[1][0] / 2, "the valley stays, where one bell has its top"
    assert peak > 2 * between / 10, "both tops stand above it"


# ----------------------------------------------------------------------------------------------------
# Every form
# ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [{"negatives": "uniform"}, {"negatives": "none"}, {"modes": 2}, {"modes": 3}], ids=str
)
@given(lengths=LENGTHS, kind=st.sampled_from(list(DIVERGENCES)), renormalize=st.booleans())
def test_packed_padded_slotted_and_stacked_agree(
    options: dict[str, object], lengths: list[int], kind: str, renormalize: bool
) -> None:
    lengths = [max(length, options.get("modes", 1)) for length in lengths]
    counts, labels = torch.tensor(lengths), torch.arange(len(lengths)) % 2
    guidance = NormalGuidance(0.7, kind, renormalize=renormalize, **options)
    packed = torch.randn(2, sum(lengths), dtype=torch.float64) - 4
    padded, mask = unpack(packed.T, counts)
    padded = padded.movedim(-1, 1).masked_fill(~mask[:, None], 0.3)  # padding holds anything
    longest = max(lengths)
    layouts = {
        "packed": Layout.packed(lengths),
        "padded": Layout.padded(counts, longest),
        "slotted": SlottedLayout.of(counts, rows=sum(lengths) + len(lengths) + 3, longest=longest),
    }
    want = None
    for name, layout in layouts.items():
        leaf = (packed if name == "packed" else padded).clone().requires_grad_()

        def loss(values: Tensor, layout: Layout = layout) -> Tensor:
            return guidance(values, lengths=layout, from_logits=True, labels=labels)

        value = loss(leaf)
        value.backward()
        stacked = vmap(loss)(torch.stack([leaf.detach(), leaf.detach() + 1, 2 * leaf.detach()]))
        torch.testing.assert_close(stacked[0], value.detach())
        torch.testing.assert_close(stacked[2], loss(2 * leaf.detach()))
        gradient = leaf.grad if name == "packed" else leaf.grad.movedim(1, -1)[mask].T
        want = (value.detach(), gradient) if want is None else want
        torch.testing.assert_close(value.detach(), want[0])
        torch.testing.assert_close(gradient, want[1])


@KINDS
@pytest.mark.parametrize("modes", [1, 2])
@pytest.mark.parametrize("dimensions", [None, 1, 2])
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


@KINDS
def test_float32_keeps_its_digits(kind: str) -> None:
    logits = torch.cat([bells([300.0, 700.0], [0.4, 0.6], 60.0, 1000), bells([100.0, 900.0], [0.7, 0.3], 30.0, 1000)])
    logits = (logits.clamp_min(-20) + 0.5 * torch.randn(2, 1000)).float()
    results = []
    for dtype in (torch.float32, torch.float64):
        leaf = logits.to(dtype, copy=True).requires_grad_()
        loss = NormalGuidance(divergence=kind, modes=2)(leaf, from_logits=True)
        loss.backward()
        results.append((loss.double(), leaf.grad.double()))
    (value, gradient), (exact_value, exact_gradient) = results
    assert (value - exact_value).abs() / exact_value < 1e-3
    assert (gradient - exact_gradient).norm() / exact_gradient.norm() < 1e-3


def test_mixed_precision_changes_nothing() -> None:
    logits, guidance = 3 * torch.randn(4, 2, 50), NormalGuidance(modes=2)
    plain = guidance(logits, from_logits=True)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = guidance(logits, from_logits=True)
        flat = guidance(logits, from_logits=True, positions=torch.rand(4, 50, 2))
    assert mixed.dtype == flat.dtype == torch.float32
    torch.testing.assert_close(mixed, plain)


def test_mistakes_are_named(unchecked: None) -> None:
    for modes in (0, 1.5, True):
        with pytest.raises(UserError, match=f"modes is {modes}; give a whole number of at least 1"):
            NormalGuidance(modes=modes)
    with pytest.raises(UserError, match="modes is 0"):
        normal_reference(torch.rand(1, 3), modes=0)
    with pytest.raises(UserError, match="negatives 'flat' is unknown; choose one of own, uniform, none"):
        NormalGuidance(negatives="flat")
    with pytest.raises(UserError, match=r"NormalGuidance\(negatives='uniform'\) needs to know which bags are negative"):
        NormalGuidance(negatives="uniform")(torch.full((2, 3), 1 / 3))
    with pytest.raises(UserError, match=r"labels of shape \(3,\) for 2 bags"):
        NormalGuidance(negatives="none")(torch.rand(2, 3), labels=torch.zeros(3))
    assert repr(NormalGuidance(modes=2, negatives="none")).endswith("renormalize=True, modes=2, negatives='none')")
