"""What all figures share: colours, files and the filled truth; and the density of positive slices."""

from itertools import combinations
from pathlib import Path

import matplotlib
import matplotlib.image
import numpy as np
import pytest
import torch
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from normal_guidance.base.errors import UserError
from normal_guidance.core.guidance import DIVERGENCES
from normal_guidance.core.methods import BEYOND, CEILING, COMPARED, REFERENCE_TITLES
from normal_guidance.show.figure_style import (
    DIVERGENCE_COLORS,
    METHOD_COLORS,
    METHOD_MARKERS,
    STYLE,
    fill_truth,
    method_color,
    save,
    shortened,
    styled,
)
from normal_guidance.study.figures.attention import ROWS
from normal_guidance.study.figures.datasets import draw_density, plot_density

# Machado, Oliveira, Fernandes, 2009: what linear RGB looks like without one kind of cone.
SIGHT = {
    "normal": np.eye(3),
    "protanope": [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    "deuteranope": [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.01182, 0.04294, 0.968881]],
    "tritanope": [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.3039]],
}


def seen(color: str, sight: str) -> np.ndarray:
    """CIELAB of a colour as someone sees it."""
    srgb = np.array(to_rgb(color))
    linear = np.where(srgb <= 0.04045, srgb / 12.92, ((srgb + 0.055) / 1.055) ** 2.4)
    linear = np.clip(np.array(SIGHT[sight]) @ linear, 0, 1)
    to_xyz = np.array([[0.4124, 0.3576, 0.1805], [0.2126, 0.7152, 0.0722], [0.0193, 0.1192, 0.9505]])
    xyz = to_xyz @ linear / np.array([0.9505, 1, 1.089])
    f = np.where(xyz > 0.008856, np.cbrt(xyz), 7.787 * xyz + 16 / 116)
    return np.array([116 * f[1] - 16, 500 * (f[0] - f[1]), 200 * (f[1] - f[2])])


def distance(one: str, other: str, sight: str) -> float:
    return float(np.linalg.norm(seen(one, sight) - seen(other, sight)))


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize(
    "methods", [*ROWS, ("centered_gaussian", "max", "mean", "abmil", "smap", "ng"), (*BEYOND, "ng")]
)
def test_methods_that_meet_in_a_panel_look_different_to_everybody(methods, sight):
    colors = [METHOD_COLORS[method] for method in methods]
    assert min(distance(one, other, sight) for one, other in combinations(colors, 2)) > 15


def test_the_papers_own_orange_and_green_would_fail_that_test():
    assert distance("#FF7F0E", "#2CA02C", "protanope") < 5
    assert distance("#E69F00", "#009E73", "protanope") > 50


def test_every_method_and_divergence_has_its_own_colour():
    assert set(METHOD_COLORS) == {*COMPARED, CEILING, *REFERENCE_TITLES} == set(METHOD_MARKERS)
    assert len({METHOD_COLORS[name] for name in (*COMPARED, CEILING)}) == len(COMPARED) + 1
    assert set(DIVERGENCE_COLORS) == set(DIVERGENCES)


def test_twins_have_the_same_hue():
    """The largest channel tells blue, orange and green apart."""
    for one, twin in zip(*ROWS, strict=True):
        assert np.argmax(to_rgb(METHOD_COLORS[one])) == np.argmax(to_rgb(METHOD_COLORS[twin]))
        assert METHOD_MARKERS[one] != METHOD_MARKERS[twin]


def test_an_unknown_method_is_refused():
    with pytest.raises(UserError, match="method 'vit' has no colour; choose one of centered_gaussian, "):
        method_color("vit")


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("b.svg", b"<?xml"), ("deep/c.PNG", b"\x89PNG")])
def test_the_name_decides_the_format(tmp_path: Path, name: str, start: bytes):
    assert save(Figure(), tmp_path / name).read_bytes().startswith(start)
    assert [path.name for path in (tmp_path / name).parent.iterdir()] == [Path(name).name]  # nothing half written


def test_the_same_figure_gives_the_same_file(tmp_path: Path):
    for form in ("png", "svg"):
        one, two = (draw_density({"a": np.ones(20)}, tmp_path / f"{n}.{form}").read_bytes() for n in (1, 2))
        assert one == two


def test_bad_names_are_refused(tmp_path: Path):
    with pytest.raises(UserError, match=r"a\.pdf: figures are written as png or svg"):
        save(Figure(), tmp_path / "a.pdf")
    (tmp_path / "file").touch()
    with pytest.raises(UserError, match="lies under, a file"):
        save(Figure(), tmp_path / "file" / "a.png")


def test_figures_ignore_the_callers_settings_and_leave_them_alone():
    @styled
    def plot() -> Figure:
        figure = Figure()
        figure.subplots().set_title("x")
        return figure

    with matplotlib.rc_context({"axes.titlesize": 40}):
        assert plot().axes[0].title.get_fontsize() == STYLE["axes.titlesize"]
        assert matplotlib.rcParams["axes.titlesize"] == 40


def test_long_names_keep_both_ends():
    assert shortened("scan 7") == "scan 7"
    assert shortened("0123456789", most=10) == "0123456789"
    assert shortened("0123456789", most=7) == "012…789"


@pytest.mark.parametrize(
    ("labels", "blocks"),
    [
        ([0, 0, 0], []),
        ([0, 1, 0], [(1.5, 2.5)]),  # a single slice has a width, too
        ([1, 1, 0, 0, 1], [(0.5, 2.5), (4.5, 5.5)]),
        ([-1, -1, -1], []),
    ],
)
def test_blocks_of_positive_slices_are_filled(labels: list[int], blocks: list[tuple[float, float]]):
    panel = Figure().subplots()
    fill_truth(panel, torch.tensor(labels))
    assert [(patch.get_x(), patch.get_x() + patch.get_width()) for patch in panel.patches] == blocks
    assert len(panel.get_legend_handles_labels()[1]) == min(1, len(blocks))


def test_density_draws_what_it_is_given(tmp_path: Path):
    densities = {"head": np.linspace(0, 2, 20), "chest": np.ones(10)}
    figure = plot_density(densities)
    assert [panel.get_title() for panel in figure.axes] == ["head", "chest"]
    for panel, density in zip(figure.axes, densities.values(), strict=True):
        steps = panel.patches[-1].get_data()
        assert np.array_equal(steps.values, density)
        assert np.allclose(steps.edges, np.linspace(0, 1, len(density) + 1))
        assert panel.get_xlabel()
    image = matplotlib.image.imread(draw_density(densities, tmp_path / "density.png"))
    assert image.shape[1] > 900
    with pytest.raises(UserError, match="no density"):
        plot_density({})
