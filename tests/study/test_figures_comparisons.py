"""Methods, settings and differences are drawn at their numbers."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.colors import same_color

from normal_guidance.base.errors import UserError
from normal_guidance.core.guidance import DIVERGENCES
from normal_guidance.core.methods import METHODS
from normal_guidance.core.metrics import MeanSd
from normal_guidance.show.figure_style import DIVERGENCE_COLORS, METHOD_COLORS
from normal_guidance.study.figures.comparisons import (
    MEAN,
    PUBLISHED,
    SEED,
    ForestRow,
    MethodValues,
    SettingValues,
    draw_differences,
    draw_methods,
    draw_sensitivity,
    plot_differences,
    plot_methods,
    plot_sensitivity,
)
from normal_guidance.study.references import published, published_sensitivity

VALUES = (0.70, 0.75, 0.71)


def lines(panel: Axes, label: str) -> list:
    return [line for line in panel.lines if line.get_label() == label]


def segments(panel: Axes) -> list[np.ndarray]:
    """Error bars, each [[x, y], [x, y]]."""
    return [box.lines[2][0].get_segments()[0] for box in panel.containers]


def words(figure) -> list[str]:
    return [text.get_text() for text in figure.legends[0].get_texts()]


def test_methods_over_seeds_with_the_published_beside():
    rows = [MethodValues(name, VALUES, published("localization_auroc", name, "chest-ct")) for name in METHODS]
    figure = plot_methods(rows)
    (panel,) = figure.axes
    assert [tick.get_text() for tick in panel.get_yticklabels()] == [method.title for method in METHODS.values()]
    assert panel.yaxis_inverted()  # the first on top
    for place, (row, seeds, mean, bar) in enumerate(
        zip(rows, lines(panel, SEED), lines(panel, MEAN), segments(panel), strict=True)
    ):
        assert tuple(seeds.get_xdata()) == VALUES
        assert mean.get_xdata() == pytest.approx([0.72, 0.72])
        assert seeds.get_color() == mean.get_color() == METHOD_COLORS[row.method]
        assert bar[:, 0] == pytest.approx(
            [row.published.mean - row.published.sd, row.published.mean + row.published.sd]
        )
        assert abs(seeds.get_ydata()[0] - place) < 0.5
        assert abs(bar[0, 1] - place) < 0.5
        assert bar[0, 1] > seeds.get_ydata()[0]  # beneath
    assert words(figure) == [SEED, MEAN, PUBLISHED]
    assert panel.get_xlabel() == "localization AUROC"


def test_nothing_published_and_nothing_ours(tmp_path: Path):
    figure = plot_methods(
        [MethodValues("ceiling", VALUES, title="Bayes oracle"), MethodValues("centered_gaussian", ())],
        metric="scan AUROC",
    )
    (panel,) = figure.axes
    assert words(figure) == [SEED, MEAN]
    assert not panel.containers
    assert len(lines(panel, MEAN)) == 1
    assert [tick.get_text() for tick in panel.get_yticklabels()] == ["Bayes oracle", "Centered Gaussian"]
    assert panel.get_xlabel() == "scan AUROC"
    assert draw_methods([MethodValues("ng", VALUES)], tmp_path / "a.svg").exists()
    with pytest.raises(UserError, match="no method to draw"):
        plot_methods([])
    with pytest.raises(UserError, match="method 'mine' has no colour"):
        plot_methods([MethodValues("mine", VALUES)])


def settings(metrics=("localization_auroc", "scan_auroc")) -> list[SettingValues]:
    return [
        SettingValues(metric, kind, weight, tuple(weight / 100 + value for value in VALUES),
                      published_sensitivity(metric, "head-ct", kind, weight))
        for metric in metrics for kind in DIVERGENCES for weight in (10.0, 0.1, 1.0)
    ]  # fmt: skip


def test_sensitivity_has_a_panel_for_each_metric_and_a_line_for_each_divergence():
    figure = plot_sensitivity(settings())
    assert [panel.get_ylabel() for panel in figure.axes] == ["localization_auroc", "scan_auroc"]
    for panel in figure.axes:
        assert [tick.get_text() for tick in panel.get_xticklabels()] == ["0.1", "1", "10"]
        for kind in DIVERGENCES:
            (line,) = lines(panel, kind)
            assert line.get_color() == DIVERGENCE_COLORS[kind]
            assert line.get_ydata() == pytest.approx([0.721, 0.73, 0.82])
            assert np.round(line.get_xdata()).tolist() == [0, 1, 2]
        dots = np.concatenate([dot.get_ydata() for dot in lines(panel, SEED)])
        assert sorted(dots) == pytest.approx(
            sorted(3 * [weight / 100 + value for weight in (0.1, 1, 10) for value in VALUES])
        )


def test_published_settings_stand_at_their_lambda_in_their_colour():
    """The paper prints each divergence at lambda 1, and forward KL at .1 and 10 for localization only."""
    localization, scan = plot_sensitivity(settings()).axes
    assert len(localization.containers) == 5
    assert len(scan.containers) == 3
    for place, weight in ((0, 0.1), (2, 10.0)):
        number = published_sensitivity("localization_auroc", "head-ct", "forward_kl", weight)
        (box,) = [box for box in localization.containers if round(float(box.lines[0].get_xdata()[0])) == place]
        assert box.lines[0].get_ydata() == [number.mean]
        assert box.lines[2][0].get_segments()[0][:, 1] == pytest.approx(
            [number.mean - number.sd, number.mean + number.sd]
        )
        assert same_color(box.lines[0].get_color(), DIVERGENCE_COLORS["forward_kl"])


def test_sensitivity_of_any_number_of_metrics(tmp_path: Path):
    for count in (1, 3, 4):
        figure = plot_sensitivity(
            settings(("localization_auroc", "scan_auroc", "localization_auprc", "scan_auprc")[:count])
        )
        assert len(figure.axes) == count
    only = [SettingValues("mine", "reverse_kl", 0.0, VALUES)]  # no lambda at all has its place, too
    assert words(plot_sensitivity(only)) == ["Reverse KL, ours"]
    assert draw_sensitivity(only, tmp_path / "a.png").exists()
    with pytest.raises(UserError, match="no setting to draw"):
        plot_sensitivity([])


def test_differences_are_drawn_with_their_intervals_and_numbers(tmp_path: Path):
    rows = [
        ForestRow("NG against ABMIL", 0.135, 0.09, 0.18, significant=True),
        ForestRow("Sm against ABMIL", -0.02, -0.05, 0.01, significant=False),
    ]
    figure = plot_differences(rows, metric="scan AUROC")
    (panel,) = figure.axes
    zero, *drawn = panel.lines
    assert list(zero.get_xdata()) == [0, 0]
    for place, row in enumerate(rows):
        interval, estimate = drawn[2 * place : 2 * place + 2]
        assert list(interval.get_xdata()) == [row.low, row.high]
        assert list(interval.get_ydata()) == [place, place]
        assert (*estimate.get_xdata(), *estimate.get_ydata()) == (row.estimate, place)
        assert (estimate.get_markerfacecolor() == "white") is not row.significant
    assert [text.get_text() for text in panel.texts] == ["+.135 [.090, .180]", "-.020 [-.050, .010]"]
    assert [tick.get_text() for tick in panel.get_yticklabels()] == [row.label for row in rows]
    assert panel.get_xlabel() == "difference in scan AUROC"
    assert draw_differences(rows, tmp_path / "a.png").exists()
    with pytest.raises(UserError, match="no difference to draw"):
        plot_differences([])


def test_text_of_a_long_forest_keeps_clear():
    rows = [
        ForestRow(f"TransMIL + Multi-Head Normal Guidance against Centered Gaussian {n}", 0.1, 0.05, 0.15, True)
        for n in range(12)
    ]
    figure = plot_differences(rows)
    figure.draw_without_rendering()
    (panel,) = figure.axes
    boxes = [text.get_window_extent() for text in (*panel.get_yticklabels(), *panel.texts)]
    for i, one in enumerate(boxes):
        assert one.x0 > 0
        assert one.x1 < figure.bbox.width
        assert not any(one.overlaps(other) for other in boxes[i + 1 :])
    assert panel.get_window_extent().width > 200


def test_a_difference_that_prints_as_zero_has_no_sign():
    assert str(ForestRow("x", 0.0001, -0.02, 0.02, False)) == ".000 [-.020, .020]"


def test_a_published_number_needs_no_value_of_ours():
    (panel,) = plot_methods([MethodValues("ng", (), MeanSd(0.8, 0.1, "population"))]).axes
    assert segments(panel)[0][:, 0] == pytest.approx([0.7, 0.9])
