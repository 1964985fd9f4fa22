"""Deletion and insertion: how much the scan's score depends on the slices that attention points at."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from normal_guidance.show.figure_style import BLUE, GREEN, ORANGE, RED, WIDTH, styled
from normal_guidance.study.trust.attention_tests import By, Curves, Kind, Score

LINES: dict[str, dict[str, Any]] = {
    "random": {"color": "0.55", "lw": 1.2, "label": "random slices"},
    "moved": {"color": "0.55", "lw": 1.2, "ls": "--", "label": "the same attention, moved along the scan"},
    "middle": {"color": ORANGE, "lw": 1.2, "label": "middle slices"},
    "untrained": {"color": RED, "lw": 1.2, "ls": "--", "label": "attended to by untrained models"},
    "least attended": {"color": BLUE, "lw": 1.2, "label": "least attended"},
    "attended": {"color": GREEN, "lw": 2.2, "marker": "o", "ms": 4, "label": "most attended"},
}
"""In drawing order: the line of the attended slices comes last and lies on top."""

TITLES: dict[Kind, str] = {"deletion": "Slices removed", "insertion": "Slices kept, all others removed"}
SCORES: dict[Score, str] = {"auroc": "scan AUROC", "logit": "mean logit of positive scans (sd)"}
SHARE: dict[By, str] = {
    "slices": "share of a scan's slices",
    "attention": "fewest slices that hold this share of attention",
}


@styled
def plot_trust(curves: Mapping[Kind, Curves], *, by: By = "slices") -> Figure:
    """Four panels: scan AUROC and the logit of positive scans, slices removed and slices kept; one line per order.

    Attention that can be trusted is the lowest line on the left, and the highest on the right.
    """
    figure = Figure(figsize=(WIDTH, 5.6), layout="constrained")
    panels = figure.subplots(len(SCORES), len(TITLES), sharex="col", sharey="row", squeeze=False)
    for row, score in zip(panels, SCORES, strict=True):
        for panel, kind in zip(row, TITLES, strict=True):
            _draw(panel, curves[kind], score)
        row[0].set_ylabel(SCORES[score])
    for panel, kind in zip(panels[0], TITLES, strict=True):
        panel.set_title(TITLES[kind])
        panel.axhline(0.5, color="0.8", lw=0.8, zorder=0)
    for panel in panels[-1]:
        panel.set_xlabel(SHARE[by])
    figure.align_ylabels()
    handles, names = panels[0][0].get_legend_handles_labels()
    figure.legend(handles[::-1], names[::-1], loc="outside upper center", ncols=3)
    return figure


def _draw(panel: Axes, curves: Curves, score: Score) -> None:
    lines, whole = (curves.auroc, curves.whole_auroc) if score == "auroc" else (curves.logit, curves.whole_logit)
    for order, style in LINES.items():
        if order not in lines:
            continue
        share, value = list(curves.shares), [point.value for point in lines[order]]
        if curves.kind == "deletion":  # deletion begins with the whole scan, insertion ends with it
            share, value = [0.0, *share], [whole.value, *value]
        else:
            share, value = [*share, 1.0], [*value, whole.value]
        panel.plot(share, value, **style)
