"""The figures about the method: arrows are the gradients, and references those of each head."""

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.colors import to_hex
from matplotlib.quiver import Quiver

from normal_guidance.base.errors import UserError
from normal_guidance.core.guidance import DIVERGENCES, divergence, normal_reference
from normal_guidance.study.figures.divergences import draw_divergences, draw_heads, plot_divergences, plot_heads, pull


def two_peaks(slices: int = 40) -> torch.Tensor:
    j = torch.arange(slices, dtype=torch.float64)
    attention = torch.exp(-0.5 * (j - 10) ** 2 / 9) + 0.6 * torch.exp(-0.5 * (j - 28) ** 2 / 16) + 0.02
    return attention / attention.sum()


def by_hand(a: torch.Tensor, kind: str) -> torch.Tensor:
    """-dD/dz for a = softmax(z), differentiated on paper; r is a constant."""
    j = torch.arange(1, len(a) + 1)
    mean = (j * a).sum()
    density = torch.exp(-0.5 * (j - mean) ** 2 / ((j - mean) ** 2 * a).sum())
    r = density / density.sum()
    if kind == "forward_kl":
        return r - a
    if kind == "reverse_kl":
        return -a * ((a / r).log() - (a * (a / r).log()).sum())
    return -2 * a * ((a - r) - (a * (a - r)).sum())


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_the_pull_is_the_gradient(kind: str):
    assert torch.allclose(pull(two_peaks(), kind), by_hand(two_peaks(), kind), atol=1e-12)
    assert pull(two_peaks(), kind).sum().abs() < 1e-12  # a softmax does not mind a constant


@pytest.mark.parametrize("kind", DIVERGENCES)
def test_a_step_along_the_pull_lowers_the_divergence(kind: str):
    a, arrows = two_peaks(), pull(two_peaks(), kind)
    reference = normal_reference(a[None])
    moved = (a.log() + 1e-3 * arrows / arrows.abs().max()).softmax(0)
    assert divergence(reference, moved[None], kind) < divergence(reference, a[None], kind)


def test_arrows_start_at_attention_and_point_where_the_gradient_says():
    attention = two_peaks()
    reference = normal_reference(attention[None])[0]
    figure = plot_divergences(attention)
    assert len(figure.axes) == 3
    for panel, kind in zip(figure.axes, DIVERGENCES, strict=True):
        (arrows,) = [one for one in panel.collections if isinstance(one, Quiver)]
        assert np.allclose(arrows.get_offsets(), np.stack([np.arange(1, 41), attention], axis=1))
        assert not np.any(arrows.U)
        expected = by_hand(attention, kind).numpy()
        assert np.array_equal(np.sign(arrows.V), np.sign(expected))
        assert np.ptp(arrows.V / expected) < 1e-6  # one factor for the whole panel
        assert np.abs(arrows.V).max() == pytest.approx((reference - attention).abs().max().item())
        assert f"× {(arrows.V / expected)[0]:.3g}" in panel.get_title()
        drawn = [line.get_ydata() for line in panel.lines]
        assert np.allclose(drawn, np.stack([attention, reference]))


def test_arrows_of_forward_kl_end_at_the_reference():
    attention = two_peaks()
    panel = plot_divergences(attention).axes[0]
    (arrows,) = [one for one in panel.collections if isinstance(one, Quiver)]
    assert panel.get_title().startswith("Forward KL (mode-covering)")
    assert np.allclose(arrows.get_offsets()[:, 1] + arrows.V, normal_reference(attention[None])[0])


def test_attention_that_does_not_sum_to_one_is_divided_by_its_sum():
    one, three = (plot_divergences(factor * two_peaks()) for factor in (1, 3))
    for panel, other in zip(one.axes, three.axes, strict=True):
        assert np.allclose(panel.lines[0].get_ydata(), other.lines[0].get_ydata())


def test_truth_is_filled_in_all_panels(tmp_path: Path):
    labels = torch.zeros(40, dtype=torch.int64)
    labels[7:13] = 1
    figure = plot_divergences(two_peaks(), slice_labels=labels)
    assert [[(p.get_x(), p.get_width()) for p in panel.patches] for panel in figure.axes] == [[(7.5, 6.0)]] * 3
    assert not any(panel.patches for panel in plot_divergences(two_peaks()).axes)
    assert b"<svg" in draw_divergences(two_peaks(), tmp_path / "a.svg", slice_labels=labels).read_bytes()


def test_attention_that_underflowed_to_zero_is_drawn():
    attention = two_peaks().where(torch.arange(40) > 4, 0)
    for panel in plot_divergences(attention).axes:
        (arrows,) = [one for one in panel.collections if isinstance(one, Quiver)]
        assert np.isfinite(arrows.V).all()
    assert np.allclose(arrows.V[:5], 0)  # squared error does not see them


@pytest.mark.parametrize("attention", [torch.tensor([0.0, 1.0, 0.0]), torch.full((9,), torch.nan)])
def test_nothing_to_draw_is_said(attention: torch.Tensor):
    with pytest.raises(UserError, match="there is no pull to draw"):
        plot_divergences(attention)


def test_heads_stand_beside_their_references(tmp_path: Path):
    heads = {"before": torch.rand(8, 40), "after": 0.9 * torch.rand(8, 40).softmax(-1)}
    figure = plot_heads(heads, slice_labels=torch.ones(40, dtype=torch.int64))
    assert len(figure.axes) == 4
    for row, (title, attention) in enumerate(heads.items()):
        attention = (attention / attention.sum(-1, keepdim=True)).double()
        references = torch.stack([normal_reference(head[None])[0] for head in attention])
        for panel, expected in zip(figure.axes[2 * row : 2 * row + 2], (references, attention), strict=True):
            assert panel.get_title().startswith(f"{title}: ")
            assert len(panel.lines) == 9
            drawn = np.stack([line.get_ydata() for line in panel.lines])
            assert np.allclose(drawn[:8], expected, atol=1e-6)
            assert np.allclose(drawn[8], expected.mean(0), atol=1e-6)
            assert len(panel.patches) == 1
    assert len({to_hex(line.get_color()) for line in figure.axes[0].lines}) == 9
    assert draw_heads(heads, tmp_path / "heads.png").stat().st_size > 10_000
    with pytest.raises(UserError, match="no heads to draw"):
        plot_heads({})


def test_lists_and_arrays_are_drawn_as_tensors_are():
    assert len(plot_divergences([0.1, 0.6, 0.2, 0.1], slice_labels=[0, 1, 1, 0]).axes) == 3
    assert len(plot_heads({"mine": np.array([[0.1, 0.6, 0.3], [0.3, 0.3, 0.4]])}).axes) == 2


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: plot_divergences([[0.5, 0.5]]), r"attention has the shape \(1, 2\); give \(slices\)"),
        (lambda: plot_divergences([0.1, 0.6, 0.3], slice_labels=[1]), "slice_labels are 1 for 3 slices"),
        (lambda: plot_heads({"mine": [0.5, 0.5]}), r"attention of 'mine' has the shape \(2,\); give \(heads, slices\)"),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, said):
    with pytest.raises(UserError, match=said):
        draw()
