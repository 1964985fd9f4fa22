"""Positions in any form fold to the same points, and their unit does not change a reference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from normal_guidance.base.errors import UserError
from normal_guidance.core.guidance import DIVERGENCES, NormalGuidance, normal_reference
from normal_guidance.core.layout import Layout, SlottedLayout, unpack

MODES = 3
LENGTHS = st.lists(st.integers(MODES, 40), min_size=1, max_size=4)
"""A bag has at least as many slices as modes; fewer are refused."""


def millimetres(lengths: list[int], spacing: float, start: float) -> torch.Tensor:
    return torch.cat([start + spacing * torch.arange(size, dtype=torch.float64) for size in lengths])


@given(LENGTHS, st.floats(0.01, 1e4), st.booleans(), st.floats(-1e4, 1e4), st.integers(1, MODES))
def test_even_spacing_leaves_the_reference_as_it_is(
    lengths: list[int], spacing: float, downward: bool, start: float, modes: int
) -> None:
    """In numbers: moments move and scale with the positions, so exponents stay."""
    counts = torch.tensor(lengths)
    logits = 3 * torch.randn(2, sum(lengths), dtype=torch.float64)
    positions = millimetres(lengths, -spacing if downward else spacing, start)
    counted = normal_reference(logits, lengths=counts, from_logits=True, modes=modes)
    measured = normal_reference(logits, lengths=counts, from_logits=True, positions=positions, modes=modes)
    torch.testing.assert_close(measured, counted, rtol=1e-6, atol=1e-8)


def test_uneven_spacing_is_the_normal_of_the_positions_by_hand() -> None:
    """a = (1/2, 1/4, 1/4) at 0, 5 and 15 mm: mean 5, variance 37.5, exponents -25/75, 0 and -100/75."""
    attention = torch.tensor([[0.5, 0.25, 0.25]], dtype=torch.float64)
    density = torch.tensor([math.exp(-1 / 3), 1.0, math.exp(-4 / 3)], dtype=torch.float64)
    got = normal_reference(attention, positions=torch.tensor([[0.0, 5.0, 15.0]]))
    torch.testing.assert_close(got[0], density / density.sum())
    assert not torch.allclose(got, normal_reference(attention), atol=0.01)


@pytest.mark.parametrize("dimensions", [2, 3])
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


@pytest.mark.parametrize(("dimensions", "modes"), [(None, 1), (1, 2), (2, 1), (2, 2)])
@given(LENGTHS)
def test_packed_padded_and_one_bag_at_a_time_agree(dimensions: int | None, modes: int, lengths: list[int]) -> None:
    counts, guidance = torch.tensor(lengths), NormalGuidance(modes=modes)
    logits = torch.randn(sum(lengths), dtype=torch.float64)
    shape = (sum(lengths),) if dimensions is None else (sum(lengths), dimensions)
    positions = torch.randn(shape, dtype=torch.float64)
    padded, mask = unpack(logits, counts)
    padded_positions = unpack(positions, counts)[0]
    hole = ~mask if dimensions is None else ~mask[..., None]
    padded_positions = padded_positions.masked_fill(hole, torch.nan)  # padding holds anything
    forms = [
        (logits, {"lengths": counts}, positions),
        (logits, {"lengths": Layout.packed(lengths)}, positions),
        (padded, {"lengths": Layout.padded(counts, max(lengths))}, padded_positions),
        (padded, {"lengths": SlottedLayout.of(counts, sum(lengths) + 9, max(lengths))}, padded_positions),
        (padded, {"mask": mask}, padded_positions),
    ]
    gradients = []
    for values, form, places in forms:
        leaf = values.clone().requires_grad_()
        guidance(leaf, **form, positions=places, from_logits=True).backward()
        gradients.append(leaf.grad[mask] if leaf.ndim == 2 else leaf.grad)
    bags = zip(logits.split(lengths), positions.split(lengths), strict=True)
    single = [guidance.per_bag(one[None], positions=place[None], from_logits=True) for one, place in bags]
    together = guidance.per_bag(logits, lengths=counts, positions=positions, from_logits=True)
    torch.testing.assert_close(together, torch.cat(single))
    for gradient in gradients[1:]:
        torch.testing.assert_close(gradient, gradients[0])


@pytest.mark.parametrize(("kind", "dimensions"), [*zip(DIVERGENCES, (1, 2, 2), strict=True)])
def test_extreme_attention_has_finite_gradients(kind: str, dimensions: int) -> None:
    logits = (1e4 * torch.randint(-1, 2, (8, 3, 60))).float().requires_grad_()
    mask = torch.arange(60) < torch.randint(1, 61, (8, 1))
    positions = 1e3 * torch.randn(8, 60, dimensions)
    loss = NormalGuidance(divergence=kind)(logits, mask, positions=positions, from_logits=True)
    loss.backward()
    assert loss.isfinite()
    assert logits.grad.isfinite().all()


def test_one_slice_and_slices_in_one_place() -> None:
    one = normal_reference(torch.rand(2, 1), positions=torch.tensor([[7.0], [-3.0]]))
    torch.testing.assert_close(one, torch.ones(2, 1))
    same = normal_reference(torch.tensor([[0.9, 0.1]]), positions=torch.full((1, 2, 2), 5.0))
    torch.testing.assert_close(same, torch.full((1, 2), 0.5))  # one place: the reference cannot tell them apart


def test_mistakes_are_named(unchecked: None) -> None:
    guidance = NormalGuidance()
    with pytest.raises(UserError, match=r"positions of shape \(2, 4\): expected \(2, 5\), or"):
        guidance(torch.full((2, 5), 0.2), positions=torch.rand(2, 4))
    with pytest.raises(UserError, match=r"positions of shape \(1, 5, 2\): expected \(5,\), or"):
        guidance(torch.full((5,), 0.4), lengths=torch.tensor([2, 3]), positions=torch.rand(1, 5, 2))
    with pytest.raises(UserError, match=r"positions of bags \[1\] are not all finite"):
        guidance(torch.full((2, 2), 0.5), positions=torch.tensor([[0.0, 1.0], [0.0, torch.nan]]))
