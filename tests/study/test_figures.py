"""Figures are drawn at their numbers, in colours that mean the same everywhere."""

from itertools import combinations
from pathlib import Path

import matplotlib
import numpy as np
import pandas as pd
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import same_color, to_hex, to_rgb
from matplotlib.figure import Figure
from matplotlib.quiver import Quiver

from normal_guidance import figures
from normal_guidance.base.errors import UserError
from normal_guidance.core.guidance import DIVERGENCES, normal_reference
from normal_guidance.core.methods import BEYOND, CEILING, COMPARED, METHODS, NAMED, REFERENCE_TITLES
from normal_guidance.core.metrics import MeanSd
from normal_guidance.show.figure_style import (
    DIVERGENCE_COLORS,
    METHOD_COLORS,
    METHOD_MARKERS,
    RED,
    STYLE,
    TRUTH,
    fill_truth,
    save,
    shortened,
    styled,
)
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.study.figures.attention import ROWS, random_scans
from normal_guidance.study.figures.comparisons import MEAN, PUBLISHED, SEED
from normal_guidance.study.figures.training import GROUP, NONE, VALUE, WINNER, selected_epochs
from normal_guidance.study.references import published, published_sensitivity
from normal_guidance.sweep.config import Config, grid
from normal_guidance.sweep.run import write_history
from normal_guidance.sweep.sweep import Sweep, sweep

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


@pytest.mark.parametrize("sight", SIGHT)
@pytest.mark.parametrize(
    "methods", [*ROWS, ("centered_gaussian", "max", "mean", "abmil", "smap", "ng"), (*BEYOND, "ng")]
)
def test_methods_that_meet_in_a_panel_look_different_to_everybody(methods, sight):
    looks = [seen(METHOD_COLORS[method], sight) for method in methods]
    assert min(np.linalg.norm(one - other) for one, other in combinations(looks, 2)) > 15


def test_every_method_and_divergence_has_its_own_colour():
    assert set(METHOD_COLORS) == {*COMPARED, CEILING, *REFERENCE_TITLES} == set(METHOD_MARKERS)
    assert len({METHOD_COLORS[name] for name in (*COMPARED, CEILING)}) == len(COMPARED) + 1
    assert set(DIVERGENCE_COLORS) == set(DIVERGENCES)
    for one, twin in zip(*ROWS, strict=True):  # the largest channel tells blue, orange and green apart
        assert np.argmax(to_rgb(METHOD_COLORS[one])) == np.argmax(to_rgb(METHOD_COLORS[twin]))
        assert METHOD_MARKERS[one] != METHOD_MARKERS[twin]


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("b.svg", b"<?xml"), ("deep/c.PNG", b"\x89PNG")])
def test_the_name_decides_the_format_and_the_same_figure_gives_the_same_file(tmp_path: Path, name: str, start: bytes):
    path = figures.save(figures.plot_density({"a": np.ones(20)}), tmp_path / name)
    assert path.read_bytes().startswith(start)
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # nothing half written
    again = figures.save(figures.plot_density({"a": np.ones(20)}), tmp_path / "again" / name)
    assert path.read_bytes() == again.read_bytes()


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
    assert [shortened("0123456789", most) for most in (24, 10, 7)] == ["0123456789", "0123456789", "012…789"]


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


def test_density_draws_what_it_is_given():
    densities = {"head": np.linspace(0, 2, 20), "chest": np.ones(10)}
    figure = figures.plot_density(densities)
    assert [panel.get_title() for panel in figure.axes] == ["head", "chest"]
    for panel, density in zip(figure.axes, densities.values(), strict=True):
        steps = panel.patches[-1].get_data()
        assert np.array_equal(steps.values, density)
        assert np.allclose(steps.edges, np.linspace(0, 1, len(density) + 1))


VALUES = (0.70, 0.75, 0.71)


def lines(panel: Axes, label: str) -> list:
    return [line for line in panel.lines if line.get_label() == label]


def segments(panel: Axes) -> list[np.ndarray]:
    """Error bars, each [[x, y], [x, y]]."""
    return [box.lines[2][0].get_segments()[0] for box in panel.containers]


def ends(number: MeanSd) -> list[float]:
    return [number.mean - number.sd, number.mean + number.sd]


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_methods_over_seeds_with_the_published_beside():
    rows = [figures.MethodValues(name, VALUES, published("localization_auroc", name, "chest-ct")) for name in METHODS]
    figure = figures.plot_methods(rows)
    (panel,) = figure.axes
    assert [tick.get_text() for tick in panel.get_yticklabels()] == [method.title for method in METHODS.values()]
    assert panel.yaxis_inverted()  # the first on top
    drawn = zip(rows, lines(panel, SEED), lines(panel, MEAN), segments(panel), strict=True)
    for line, (row, seeds, mean, bar) in enumerate(drawn):
        assert tuple(seeds.get_xdata()) == VALUES
        assert mean.get_xdata() == pytest.approx([0.72, 0.72])
        assert seeds.get_color() == mean.get_color() == METHOD_COLORS[row.method]
        assert bar[:, 0] == pytest.approx(ends(row.published))
        assert line - 0.5 < seeds.get_ydata()[0] < bar[0, 1] < line + 0.5  # beneath
    assert words(figure) == [SEED, MEAN, PUBLISHED]
    assert panel.get_xlabel() == "localization AUROC"


def test_sensitivity_has_a_panel_for_each_metric_a_line_for_each_divergence_and_published_numbers():
    figure = figures.plot_sensitivity(
        [
            figures.SettingValues(metric, kind, weight, tuple(weight / 100 + value for value in VALUES),
                          published_sensitivity(metric, "head-ct", kind, weight))
            for metric in ("localization_auroc", "scan_auroc") for kind in DIVERGENCES for weight in (10.0, 0.1, 1.0)
        ]
    )  # fmt: skip
    assert [panel.get_ylabel() for panel in figure.axes] == ["localization_auroc", "scan_auroc"]
    for panel in figure.axes:
        assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0.1", "1", "10"]
        for kind in DIVERGENCES:
            (line,) = lines(panel, kind)
            assert line.get_color() == DIVERGENCE_COLORS[kind]
            assert line.get_ydata() == pytest.approx([0.721, 0.73, 0.82])
            assert np.round(line.get_xdata()).tolist() == [0, 1, 2]
        dots = np.sort(np.concatenate([dot.get_ydata() for dot in lines(panel, SEED)]))
        assert dots == pytest.approx(np.sort(3 * [weight / 100 + value for weight in (0.1, 1, 10) for value in VALUES]))
    # The paper prints each divergence at lambda 1, and forward KL at .1 and 10 for localization only.
    localization, scan = figure.axes
    assert (len(localization.containers), len(scan.containers)) == (5, 3)
    number = published_sensitivity("localization_auroc", "head-ct", "forward_kl", 10.0)
    (box,) = [box for box in localization.containers if round(float(box.lines[0].get_xdata()[0])) == 2]
    assert box.lines[0].get_ydata() == [number.mean]
    assert box.lines[2][0].get_segments()[0][:, 1] == pytest.approx(ends(number))
    assert same_color(box.lines[0].get_color(), DIVERGENCE_COLORS["forward_kl"])


def test_differences_are_drawn_with_their_intervals_and_numbers():
    rows = [
        figures.ForestRow("NG against ABMIL", 0.135, 0.09, 0.18, significant=True),
        figures.ForestRow("Sm against ABMIL", -0.02, -0.05, 0.01, significant=False),
    ]
    figure = figures.plot_differences(rows, metric="scan AUROC")
    (panel,) = figure.axes
    zero, *drawn = panel.lines
    assert list(zero.get_xdata()) == [0, 0]
    for line, row in enumerate(rows):
        interval, estimate = drawn[2 * line : 2 * line + 2]
        assert interval.get_xydata().tolist() == [[row.low, line], [row.high, line]]
        assert estimate.get_xydata().tolist() == [[row.estimate, line]]
        assert (estimate.get_markerfacecolor() == "white") is not row.significant
    assert [text.get_text() for text in panel.texts] == ["+.135 [.090, .180]", "-.020 [-.050, .010]"]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == [row.label for row in rows]
    assert panel.get_xlabel() == "difference in scan AUROC"
    assert str(figures.ForestRow("x", 0.0001, -0.02, 0.02, False)) == ".000 [-.020, .020]"


@pytest.mark.parametrize(
    "plot",
    [
        lambda: figures.plot_methods(
            [figures.MethodValues("ng", VALUES), figures.MethodValues("centered_gaussian", ())]
        ),
        lambda: figures.plot_sensitivity([figures.SettingValues("mine", "reverse_kl", 0.0, VALUES)]),
        lambda: figures.plot_divergences(two_peaks(), slice_labels=torch.ones(40, dtype=torch.int64)),
        lambda: figures.plot_attention([figures.AttendedScan("tiny", {"abmil": torch.ones(1)}, torch.ones(1).long())]),
    ],
)
def test_figures_with_little_to_show_are_written(plot, tmp_path: Path):
    assert b"<svg" in figures.save(plot(), tmp_path / "deep" / "a.svg").read_bytes()


def test_text_of_a_long_forest_keeps_clear():
    rows = [
        figures.ForestRow(f"TransMIL + Multi-Head Normal Guidance against Centered Gaussian {n}", 0.1, 0.05, 0.15, True)
        for n in range(12)
    ]
    figure = figures.plot_differences(rows)
    figure.draw_without_rendering()
    (panel,) = figure.axes
    boxes = [text.get_window_extent() for text in (*panel.get_yticklabels(), *panel.texts)]
    for i, box in enumerate(boxes):
        assert 0 < box.x0 < box.x1 < figure.bbox.width
        assert not any(box.overlaps(other) for other in boxes[i + 1 :])
    assert panel.get_window_extent().width > 200


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


def test_arrows_start_at_attention_and_point_where_the_gradient_says():
    attention = two_peaks()
    reference = normal_reference(attention[None])[0]
    figure = figures.plot_divergences(attention)
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
        if kind == "forward_kl":  # its arrows end at the reference
            assert panel.get_title().startswith("Forward KL (mode-covering)")
            assert np.allclose(arrows.get_offsets()[:, 1] + arrows.V, reference)


def test_attention_that_underflowed_or_does_not_sum_to_one_is_drawn():
    attention = two_peaks().where(torch.arange(40) > 4, 0)
    for panel in figures.plot_divergences(attention).axes:
        (arrows,) = [one for one in panel.collections if isinstance(one, Quiver)]
        assert np.isfinite(arrows.V).all()
    assert np.allclose(arrows.V[:5], 0)  # squared error does not see them
    for panel, other in zip(*(figures.plot_divergences(factor * two_peaks()).axes for factor in (1, 3)), strict=True):
        assert np.allclose(panel.lines[0].get_ydata(), other.lines[0].get_ydata())


def test_heads_stand_beside_their_references():
    heads = {"before": torch.rand(8, 40), "after": 0.9 * torch.rand(8, 40).softmax(-1)}
    figure = figures.plot_heads(heads, slice_labels=torch.ones(40, dtype=torch.int64))
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


TWO_GROUPS = pd.DataFrame({name: [1, 2] for name in ("config", "val_auroc", "selected", "winner", *GROUP)})


@pytest.mark.parametrize(
    ("draw", "said"),
    [
        (lambda: figures.plot_divergences(torch.tensor([0.0, 1.0, 0.0])), "it has no pull to draw"),
        (lambda: figures.plot_divergences([[0.5, 0.5]]), r"attention has the shape \(1, 2\); give \(slices\)"),
        (lambda: figures.plot_divergences([0.1, 0.6, 0.3], slice_labels=[1]), "slice_labels are 1 for 3 slices"),
        (lambda: figures.plot_heads({}), "no heads to draw"),
        (
            lambda: figures.plot_heads({"mine": [0.5, 0.5]}),
            r"attention of 'mine' has the shape \(2,\); give \(heads, slices\)",
        ),
        (
            lambda: figures.AttendedScan("A", {"ng": [[0.5, 0.5]]}),
            r"attention by ng has the shape \(1, 2\); give \(slices\)",
        ),
        (
            lambda: figures.AttendedScan("A", {"abmil": torch.ones(4), "ng": torch.ones(3)}),
            "'A': 3 slices by ng, 4 by another",
        ),
        (
            lambda: figures.AttendedScan("A", {"abmil": torch.ones(4)}, torch.ones(5).long()),
            "'A': slice labels are 5 for 4 s",
        ),
        (lambda: figures.AttendedScan("A", {}), "'A' has no attention"),
        (lambda: scan(thumbnails=[(0, np.zeros((2, 2)))]), "thumbnail of slice 0"),
        (lambda: figures.plot_attention([]), "no scan to draw"),
        (
            lambda: figures.plot_attention([scan(methods=("abmil",)), scan("B", methods=("ng",))]),
            "'B' has attention of ng, 'A17' of abmil; give the same methods",
        ),
        (
            lambda: figures.plot_attention([scan(methods=("mine",))]),
            "method 'mine' has no colour; choose one of centered_gau",
        ),
        (lambda: figures.plot_methods([]), "no method to draw"),
        (lambda: figures.plot_sensitivity([]), "no setting to draw"),
        (lambda: figures.plot_density({}), "densities are empty"),
        (lambda: figures.plot_differences([]), "no difference to draw"),
        (lambda: save(Figure(), Path("a.pdf")), r"a\.pdf: figures are written as png or svg"),
        (lambda: save(Figure(), Path(__file__) / "a.png"), "lies under, a file"),
        (lambda: figures.plot_grid(pd.DataFrame({"config": []})), "no column 'val_auroc'"),
        (
            lambda: figures.plot_learning_curves(TWO_GROUPS, "ng"),
            "2 groups that differ in divergence, guidance_weight, seed",
        ),
    ],
)
def test_what_cannot_be_drawn_is_refused(draw, said, unchecked):
    with pytest.raises(UserError, match=said):
        draw()


COLUMNS = ("loss", "train_auroc", "val_auroc")


@pytest.fixture(scope="module")
def result() -> Sweep:
    train, val = (shifted_mean(64, seed, features=8, shift=1.0) for seed in (1, 2))
    configs = grid(Config("abmil", epochs=6, batch_size=16), lr=(0.1, 0.01, 1e-4), l1=(1.0, 0.01, 0.0))
    return sweep(configs, train, val)


@pytest.fixture
def history(result: Sweep, tmp_path: Path) -> pd.DataFrame:
    write_history(tmp_path, result)
    return pd.read_parquet(tmp_path / "history.parquet")


def corners(panel: Axes, gid: str) -> set[tuple[float, float]]:
    return {patch.get_xy() for patch in panel.patches if patch.get_gid() == gid}


def test_the_winner_comes_first_then_the_first_of_equal_configurations(history: pd.DataFrame, result: Sweep):
    first = selected_epochs(history).iloc[0]
    (winner,) = result.winners
    assert (first["config"], first["epoch"], first["val_auroc"]) == (winner.number, winner.epoch, winner.val_auroc)
    equal = history.assign(val_auroc=0.75, winner=False)
    assert selected_epochs(equal)["config"].iloc[0] == history.loc[history["selected"], "config"].min()


def test_curves_of_all_configurations_are_drawn_and_the_winners_is_marked(
    history: pd.DataFrame, result: Sweep, tmp_path: Path
):
    (winner,) = result.winners
    figure = figures.plot_learning_curves(history, "ng")
    assert [panel.get_title() for panel in figure.axes] == ["training loss", "training AUROC", "validation AUROC"]
    for panel, column in zip(figure.axes, COLUMNS, strict=True):
        *others, own, mark = panel.lines
        by_config = [one[column].to_numpy() for _, one in history.groupby("config")]
        assert np.array_equal(own.get_ydata(), by_config.pop(winner.number))
        assert own.get_color() == METHOD_COLORS["ng"]
        assert np.array_equal([line.get_ydata() for line in others], by_config)
        assert {line.get_color() for line in others} == {"0.75"}
        assert all(line.get_linewidth() < own.get_linewidth() for line in others)
        at = history[(history["config"] == winner.number) & (history["epoch"] == winner.epoch)].iloc[0]
        assert (*mark.get_xdata(), *mark.get_ydata()) == (winner.epoch, at[column])
    assert figure.axes[0].get_xscale() == "linear"
    assert figures.plot_learning_curves(history.assign(epoch=20 * history["epoch"]), "ng").axes[2].get_xscale() == "log"
    assert figures.save(figure, tmp_path / "curves.png").stat().st_size > 10_000
    _, chosen, selected = words(figure)
    assert f"learning rate {winner.config.lr:g}, L1 {winner.config.l1:g}" in chosen
    assert f"selected epoch {winner.epoch}, " in selected


def test_a_configuration_that_diverged_does_not_flatten_the_others(history: pd.DataFrame, result: Sweep):
    lost = (result.winners[0].number + 1) % len(result.configs)
    usual = history["loss"].median()
    for value in (1e30, np.inf, np.nan):
        history.loc[(history["config"] == lost) & (history["epoch"] > 2), "loss"] = value
        panel = figures.plot_learning_curves(history, "ng").axes[0]
        own, (low, high) = panel.lines[-2].get_ydata(), panel.get_ylim()
        assert low < own.min() <= own.max() < high < 2000 * usual


def test_a_run_without_winner_says_so(history: pd.DataFrame, tmp_path: Path):
    nobody = history.assign(selected=False)
    figure = figures.plot_learning_curves(nobody, "ng")
    assert words(figure) == ["no configuration has a selectable epoch"]
    assert {line.get_color() for panel in figure.axes for line in panel.lines} == {"0.75"}
    panel = figures.plot_grid(nobody).axes[0]
    assert len(corners(panel, NONE)) == 9
    assert not corners(panel, VALUE) | corners(panel, WINNER)
    assert figures.save(figures.plot_grid(nobody), tmp_path / "grid.svg").exists()


def test_the_grid_shows_each_configurations_best_selectable_epoch(history: pd.DataFrame, result: Sweep):
    panel = figures.plot_grid(history).axes[0]
    assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0", "0.01", "1"]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["0.0001", "0.01", "0.1"]
    drawn = {text.get_position(): text.get_text() for text in panel.texts}
    hatched = corners(panel, NONE)

    def cell(config: Config) -> tuple[int, int]:
        return [0.0, 0.01, 1.0].index(config.l1), [1e-4, 0.01, 0.1].index(config.lr)

    for number, config in enumerate(result.configs):
        own = history[history["config"] == number]
        selectable = own[own["train_auroc"] > own["val_auroc"]]
        if selectable.empty:
            assert tuple(np.subtract(cell(config), 0.5)) in hatched
        else:
            assert float(drawn[cell(config)]) == pytest.approx(selectable["val_auroc"].max(), abs=0.00051)
    assert len(drawn) + len(hatched) == 9
    assert corners(panel, WINNER) == {tuple(np.subtract(cell(result.winners[0].config), 0.5))}


ALL = ("abmil", "smap", "ng", "transmil", "smtp", "mhng")
SCORING = tuple(name for name, method in NAMED.items() if method.scores_scans)


def scan(
    title: str = "A17", slices: int = 30, methods=ALL, *, labelled: bool = True, thumbnails=None
) -> figures.AttendedScan:
    labels = torch.zeros(slices, dtype=torch.int64)
    labels[4:9] = 1
    attention = {method: torch.rand(slices).softmax(0) for method in methods}
    return figures.AttendedScan(title, attention, labels if labelled else None, thumbnails)


def panels(figure: Figure) -> list[Axes]:
    """Those with curves, not the strips of thumbnails."""
    return [axes for axes in figure.axes if axes.get_ylim() == (0, 1.12)]


def curves(panel: Axes) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_xydata() for line in panel.lines if not line.get_label().startswith("_")}


def legends(figure: Figure) -> list[list[str]]:
    return [[text.get_text() for text in part.legends[0].get_texts()] for part in figure.subfigs]


def test_two_rows_of_methods_and_a_column_for_each_scan():
    scans = [scan(f"scan {n}", 20 + n) for n in range(4)]
    figure = figures.plot_attention(scans)
    assert len(panels(figure)) == len(figure.axes) == 8
    assert [panel.get_title() for panel in panels(figure)] == [*(f"scan {n}" for n in range(4)), *[""] * 4]
    for column, attended in enumerate(scans):
        for row, methods in enumerate((ALL[:3], ALL[3:])):
            for method, line in zip(methods, curves(panels(figure)[4 * row + column]).values(), strict=True):
                attention = attended.attention[method].numpy()
                assert np.allclose(line.T, [np.arange(1, len(attention) + 1), attention / attention.max()])
    assert legends(figure) == [
        [TRUTH, "ABMIL", "ABMIL + Smooth Operator", "ABMIL + Normal Guidance"],
        ["TransMIL", "TransMIL + Smooth Operator", "TransMIL + Multi-Head Normal Guidance"],
    ]
    labels = [panel.get_xlabel() for panel in panels(figure)]
    assert labels == [""] * 4 + ["slice"] * 4


def test_other_methods_get_rows_of_their_own():
    """What the paper does not have: one row without guidance, one with it, and one of the rest."""
    figure = figures.plot_attention([scan(methods=("max", "evidence_ng", "ng", "evidence", "whole_bells"))])
    assert [list(curves(panel)) for panel in panels(figure)] == [
        ["ABMIL + Normal Guidance"],
        ["Tied Evidence", "Mixture of Whole Bells"],
        ["Tied Evidence + Normal Guidance"],
        ["Max pooling"],
    ]


def test_truth_is_filled_and_explained_where_it_is_known():
    known, unknown = panels(figures.plot_attention([scan(), scan(labelled=False)]))[:2]
    assert [(patch.get_x(), patch.get_width()) for patch in known.patches] == [(4.5, 5.0)]
    assert not unknown.patches
    assert TRUTH in legends(figures.plot_attention([scan(labelled=False), scan()]))[0]
    assert TRUTH not in legends(figures.plot_attention([scan(labelled=False)]))[0]


def test_thumbnails_stand_above_the_panel_with_their_numbers():
    images = [(3, np.full((8, 8), 1.0)), (7, np.full((8, 4), 5.0)), (20, np.arange(64, dtype=np.uint8).reshape(8, 8))]
    with_images, without = scan(thumbnails=images), scan("B", 24)
    figure = figures.plot_attention([with_images, without])
    strip, empty = (axes for axes in figure.axes if axes not in panels(figure))
    assert [text.get_text() for text in strip.texts] == ["3", "7", "20"]
    for drawn, (_, image) in zip(strip.images, images, strict=True):
        assert np.array_equal(drawn.get_array(), image)
        assert drawn.get_clim() == (0, 63)  # one scale for all slices of a scan
    left, right, bottom, top = strip.images[1].get_extent()
    assert (top - bottom) / (right - left) == pytest.approx(2)  # not stretched
    framed = [same_color(patch.get_edgecolor(), RED) for patch in strip.patches]
    assert framed == [False, True, False]  # slice 7 is positive, 3 and 20 are not
    marks = [line.get_xdata()[0] for line in panels(figure)[0].lines if line.get_marker() == "v"]
    assert marks == [3, 7, 20]
    assert (strip.get_title(), empty.get_title(), list(empty.images)) == ("A17", "B", [])


@pytest.mark.parametrize(("methods", "scans"), [(ALL, 4), (SCORING, 1), (SCORING, 4)])
def test_nothing_lies_on_anything_else(methods, scans):
    """Titles, legends and panels of a full figure keep clear of each other once it is laid out."""
    images = [(n, np.zeros((8, 8))) for n in (2, 9, 16, 23)]
    names = [f"1.2.826.0.1.3680043.8.498.{n:012d}" for n in range(scans)]
    figure = figures.plot_attention([scan(name, methods=methods, thumbnails=images) for name in names])
    figure.draw_without_rendering()
    boxes = [drawn.get_tightbbox() for drawn in (*figure.axes, *(part.legends[0] for part in figure.subfigs))]
    for i, box in enumerate(boxes):
        assert -1 < box.x0 < box.x1 < figure.bbox.width + 1
        for other in boxes[i + 1 :]:
            shared = np.minimum(box.max, other.max) - np.maximum(box.min, other.min)
            assert shared.min() < 2


def test_random_scans_are_repeatable_in_order_and_no_more_than_there_are():
    candidates = list(range(100, 200))
    assert random_scans(candidates) == random_scans(candidates) == sorted(random_scans(candidates))
    assert len(set(random_scans(candidates))) == 4
    assert random_scans(candidates) != random_scans(candidates, seed=1)
    assert random_scans([7, 8]) == [7, 8]
    assert set(random_scans(candidates, 50)) <= set(candidates)
