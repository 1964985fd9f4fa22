"""The page and the figure of the tests of attention show the numbers that were measured."""

import math

import numpy as np
import pytest
from matplotlib.colors import to_hex

from normal_guidance.core.models import CenteredGaussian
from normal_guidance.show.figure_style import GREEN
from normal_guidance.study.figures.deletion import LINES, draw_trust, plot_trust
from normal_guidance.study.trust.examine import examine, trust_page, verdict_table
from small_trust import STRONG, bayes, fresh_abmil, strong_scans


@pytest.fixture(scope="module")
def found():
    return examine(bayes(STRONG), strong_scans(60), untrained=fresh_abmil)


def test_the_table_has_a_row_a_test(found):
    rows = verdict_table(found).rows
    assert [row[0] for row in rows] == [finding.title for finding in found.findings]
    assert [row[1] for row in rows] == [finding.verdict for finding in found.findings]
    assert rows[2][2] == str(found["deletion"].number)
    assert "60 scans" in verdict_table(found).caption


def test_the_page_tells_every_number_and_what_to_do(found):
    page = trust_page(found, picture="trust.png")
    for finding in found.findings:
        assert finding.meaning in page
        assert f"What to do: {finding.action}" in page
        for name in finding.more:
            assert f"- {name}: " in page
    assert "](trust.png)" in page
    assert "trust.png" not in trust_page(found)


def test_a_method_without_scan_score_has_a_page():
    page = trust_page(examine(CenteredGaussian(), strong_scans(30)))
    assert "scan AUROC unknown" in page
    assert "nan" not in page


def test_lines_are_the_curves_and_begin_or_end_with_the_whole_scan(found):
    figure = plot_trust(found.curves)
    assert len(figure.axes) == 4
    removed, kept = found.curves["deletion"], found.curves["insertion"]
    expected = [
        ("auroc", removed, [removed.whole_auroc, *removed.auroc["attended"]]),
        ("auroc", kept, [*kept.auroc["attended"], kept.whole_auroc]),
        ("logit", removed, [removed.whole_logit, *removed.logit["attended"]]),
        ("logit", kept, [*kept.logit["attended"], kept.whole_logit]),
    ]
    for panel, (_, curves, points) in zip(figure.axes, expected, strict=True):
        own = next(line for line in panel.lines if to_hex(line.get_color()) == to_hex(GREEN))
        assert np.allclose(own.get_ydata(), [point.value for point in points])
        assert own.get_xdata()[0 if curves is removed else -1] == (0.0 if curves is removed else 1.0)
        assert len([line for line in panel.lines if len(line.get_xdata()) == 6]) == len(LINES)
    assert math.isclose(expected[0][2][0].value, expected[1][2][-1].value)


def test_the_legend_names_every_order_once(found, tmp_path):
    (legend,) = plot_trust(found.curves).legends
    assert sorted(text.get_text() for text in legend.get_texts()) == sorted(line["label"] for line in LINES.values())
    without = examine(bayes(STRONG), strong_scans(30))
    (legend,) = plot_trust(without.curves, by="attention").legends
    assert "attended to by untrained models" not in {text.get_text() for text in legend.get_texts()}
    assert draw_trust(without.curves, tmp_path / "trust.svg").read_bytes().startswith(b"<?xml")
