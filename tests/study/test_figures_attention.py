"""The attention figure: a column a scan, a row for each family of methods, truth, thumbnails and references."""

from pathlib import Path

import numpy as np
import pytest
import torch
from matplotlib.axes import Axes
from matplotlib.colors import same_color
from matplotlib.figure import Figure

from normal_guidance.base.errors import UserError
from normal_guidance.core.guidance import normal_reference
from normal_guidance.core.methods import METHODS, NAMED
from normal_guidance.show.figure_style import METHOD_COLORS, RED, TRUTH
from normal_guidance.study.figures.attention import AttendedScan, draw_attention, plot_attention, random_scans

ALL = ("abmil", "smap", "ng", "transmil", "smtp", "mhng")


def scan(title: str = "A17", slices: int = 30, methods=ALL, *, labelled: bool = True, thumbnails=None) -> AttendedScan:
    labels = torch.zeros(slices, dtype=torch.int64)
    labels[4:9] = 1
    attention = {method: torch.rand(slices).softmax(0) for method in methods}
    return AttendedScan(title, attention, labels if labelled else None, thumbnails)


def panels(figure: Figure) -> list[Axes]:
    """Those with curves, not the strips of thumbnails."""
    return [axes for axes in figure.axes if axes.get_ylim() == (0, 1.12)]


def curves(panel: Axes) -> dict[str, np.ndarray]:
    return {line.get_label(): line.get_xydata() for line in panel.lines if not line.get_label().startswith("_")}


def legends(figure: Figure) -> list[list[str]]:
    return [[text.get_text() for text in part.legends[0].get_texts()] for part in figure.subfigs]


def test_two_rows_of_methods_and_a_column_for_each_scan():
    scans = [scan(f"scan {n}", 20 + n) for n in range(4)]
    figure = plot_attention(scans)
    assert len(panels(figure)) == 8
    assert [panel.get_title() for panel in panels(figure)] == [*(f"scan {n}" for n in range(4)), *[""] * 4]
    for column, one in enumerate(scans):
        for row, methods in enumerate((ALL[:3], ALL[3:])):
            drawn = curves(panels(figure)[4 * row + column])
            assert len(drawn) == 3
            for method, line in zip(methods, drawn.values(), strict=True):
                attention = one.attention[method].numpy()
                assert np.array_equal(line[:, 0], np.arange(1, len(attention) + 1))
                assert np.allclose(line[:, 1], attention / attention.max())
    assert legends(figure) == [
        [TRUTH, "ABMIL", "ABMIL + Smooth Operator", "ABMIL + Normal Guidance"],
        ["TransMIL", "TransMIL + Smooth Operator", "TransMIL + Multi-Head Normal Guidance"],
    ]
    labels = [panel.get_xlabel() for panel in panels(figure)]
    assert labels == [""] * 4 + ["slice"] * 4


def test_a_method_has_its_colour_whatever_else_is_drawn():
    for methods in (ALL, ("ng",), ("mhng", "ng")):
        lines = [line for panel in panels(plot_attention([scan(methods=methods)])) for line in panel.lines]
        assert {line.get_label(): line.get_color() for line in lines} == {
            METHODS[method].title: METHOD_COLORS[method] for method in methods
        }


def test_other_methods_get_a_row_of_their_own():
    figure = plot_attention([scan(methods=("centered_gaussian", "abmil", "max"))])
    assert [list(curves(panel)) for panel in panels(figure)] == [["ABMIL"], ["Centered Gaussian", "Max pooling"]]


def test_what_the_paper_does_not_have_gets_a_row_without_and_one_with_guidance():
    figure = plot_attention([scan(methods=("evidence_ng", "ng", "evidence", "whole_bells"))])
    assert [list(curves(panel)) for panel in panels(figure)] == [
        ["ABMIL + Normal Guidance"],
        ["Tied Evidence", "Mixture of Whole Bells"],
        ["Tied Evidence + Normal Guidance"],
    ]


def test_truth_is_filled_where_it_is_known():
    known, unknown = panels(plot_attention([scan(), scan(labelled=False)]))[:2]
    assert [(patch.get_x(), patch.get_width()) for patch in known.patches] == [(4.5, 5.0)]
    assert not unknown.patches


def test_the_legend_explains_truth_that_only_a_later_scan_has():
    assert TRUTH in legends(plot_attention([scan(labelled=False), scan()]))[0]
    assert TRUTH not in legends(plot_attention([scan(labelled=False)]))[0]


@pytest.mark.parametrize("scans", [1, 2, 4])
def test_the_legends_stay_inside_the_figure(scans):
    methods = tuple(name for name, method in NAMED.items() if method.scores_scans)
    figure = plot_attention([scan(methods=methods) for _ in range(scans)])
    figure.draw_without_rendering()
    whole = figure.bbox
    for part in figure.subfigs:
        box = part.legends[0].get_window_extent()
        assert whole.x0 <= box.x0
        assert box.x1 <= whole.x1


def test_the_reference_is_that_of_the_named_method_at_the_scale_of_its_curve():
    one = scan(methods=("abmil", "ng"))
    drawn = curves(panels(plot_attention([one], reference="ng"))[0])
    bell = normal_reference(one.attention["ng"][None])[0] / one.attention["ng"].max()
    assert np.allclose(drawn["ABMIL + Normal Guidance: normal reference"][:, 1], bell)
    assert len(drawn) == 3
    assert len(curves(panels(plot_attention([one]))[0])) == 2


def test_thumbnails_stand_above_the_panel_with_their_numbers():
    images = [(3, np.full((8, 8), 1.0)), (7, np.full((8, 4), 5.0)), (20, np.arange(64, dtype=np.uint8).reshape(8, 8))]
    with_images, without = scan(thumbnails=images), scan("B", 24)
    figure = plot_attention([with_images, without])
    strips = [axes for axes in figure.axes if axes not in panels(figure)]
    strip, empty = strips
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
    assert strip.get_title() == "A17"
    assert not empty.images
    assert empty.get_title() == "B"


def test_without_thumbnails_there_is_no_strip():
    figure = plot_attention([scan(), scan()])
    assert figure.axes == panels(figure)


def test_nothing_lies_on_anything_else(tmp_path: Path):
    """Titles, legends and panels of a full figure keep clear of each other once it is laid out."""
    images = [(n, np.zeros((8, 8))) for n in (2, 9, 16, 23)]
    scans = [scan(f"1.2.826.0.1.3680043.8.498.{n:012d}", 30, thumbnails=images) for n in range(4)]
    figure = plot_attention(scans)
    figure.draw_without_rendering()
    boxes = [axes.get_tightbbox() for axes in figure.axes] + [
        part.legends[0].get_tightbbox() for part in figure.subfigs
    ]
    for i, one in enumerate(boxes):
        assert one.x0 > -1
        assert one.x1 < figure.bbox.width + 1
        for other in boxes[i + 1 :]:
            overlap = min(one.x1, other.x1) - max(one.x0, other.x0), min(one.y1, other.y1) - max(one.y0, other.y0)
            assert min(overlap) < 2


def test_one_slice_and_svg(tmp_path: Path):
    one = AttendedScan("tiny", {"abmil": torch.ones(1)}, torch.ones(1, dtype=torch.int64))
    assert b"<svg" in draw_attention([one], tmp_path / "deep" / "attention.svg").read_bytes()


def test_random_scans_are_repeatable_in_order_and_no_more_than_there_are():
    candidates = list(range(100, 200))
    assert random_scans(candidates) == random_scans(candidates) == sorted(random_scans(candidates))
    assert len(set(random_scans(candidates))) == 4
    assert random_scans(candidates) != random_scans(candidates, seed=1)
    assert random_scans([7, 8]) == [7, 8]
    assert set(random_scans(candidates, 50)) <= set(candidates)


@pytest.mark.usefixtures("unchecked")
def test_scans_that_do_not_fit_are_refused():
    with pytest.raises(UserError, match="'A': 3 slices by ng, 4 by another method"):
        AttendedScan("A", {"abmil": torch.ones(4), "ng": torch.ones(3)})
    with pytest.raises(UserError, match="'A': 5 slice labels for 4 slices"):
        AttendedScan("A", {"abmil": torch.ones(4)}, torch.ones(5, dtype=torch.int64))
    with pytest.raises(UserError, match="'A' has no attention"):
        AttendedScan("A", {})
    with pytest.raises(UserError, match="thumbnail of slice 0"):
        scan(thumbnails=[(0, np.zeros((2, 2)))])
    with pytest.raises(UserError, match="no scan to draw"):
        plot_attention([])
    with pytest.raises(UserError, match="'B' has attention of ng, 'A17' of abmil; give the same methods"):
        plot_attention([scan(methods=("abmil",)), scan("B", methods=("ng",))])
    with pytest.raises(UserError, match="method 'mine' has no colour"):
        plot_attention([scan(methods=("mine",))])
    with pytest.raises(UserError, match="reference 'mhng' is not among the methods to draw; choose one of abmil, ng"):
        plot_attention([scan(methods=("abmil", "ng"))], reference="mhng")


def test_lists_and_arrays_are_drawn_as_tensors_are():
    from_lists = AttendedScan("A", {"ng": [0.1, 0.6, 0.3]}, slice_labels=np.array([False, True, False]))
    assert from_lists.curve("ng").tolist() == pytest.approx([0.1, 0.6, 0.3])
    assert from_lists.truth().tolist() == [0, 1, 0]
    assert len(plot_attention([from_lists]).axes) > 0


@pytest.mark.parametrize(
    ("attention", "said"),
    [
        ({"ng": [[0.5, 0.5]]}, r"attention by ng has the shape \(1, 2\); give \(slices\)"),
        ({"ng": ["a"]}, "which holds text"),
    ],
)
def test_what_is_no_attention_is_refused(attention, said):
    with pytest.raises(UserError, match=said):
        AttendedScan("A", attention)
