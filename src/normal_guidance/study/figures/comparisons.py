"""Numbers side by side: methods over seeds, settings of guidance, and differences with their intervals."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from normal_guidance.base.errors import UserError
from normal_guidance.core.guidance import DIVERGENCE_TITLES, DIVERGENCES, DivergenceName
from normal_guidance.core.methods import method_title
from normal_guidance.core.metrics import MeanSd
from normal_guidance.show.figure_style import DIVERGENCE_COLORS, METHOD_MARKERS, WIDTH, method_color, styled
from normal_guidance.show.text_tables import interval, signed

SEED, MEAN, PUBLISHED = "ours, one seed", "mean of ours", "published mean ± sd"  # their names in legends

PUBLISHED_STYLE: dict[str, Any] = {"color": "0.35", "marker": "D", "ms": 4.5, "mfc": "white", "lw": 1.1}


@dataclass(frozen=True)
class MethodValues:
    """One metric of one method: a value per seed, and the published mean and sd (None where there is none).

    Args:
        method: a name in `METHODS`, or "ceiling".
        title: replaces the method's own title, for instance "Bayes oracle" for a ceiling.
    """

    method: str
    values: tuple[float, ...]
    published: MeanSd | None = None
    title: str | None = None


@styled
def plot_methods(rows: Sequence[MethodValues], *, metric: str = "localization AUROC") -> Figure:
    """One row per method: a dot per seed, their mean, and the published mean ± sd just below.

    Example:
        >>> rows = [MethodValues("ng", (0.87, 0.86), MeanSd(0.871, 0.002, "population"))]
        >>> len(plot_methods(rows).axes)
        1
    """
    if not rows:
        raise UserError("there is no method to draw; give the values of at least one")
    figure = Figure(figsize=(0.78 * WIDTH, 0.9 + 0.36 * len(rows)), layout="constrained")
    panel = figure.subplots()
    for line, row in enumerate(rows):
        color, above, beneath = method_color(row.method), line - 0.13, line + 0.22
        panel.plot(
            row.values, [above] * len(row.values), ls="", marker=METHOD_MARKERS[row.method], ms=6, color=color,
            alpha=0.75, mec="white", mew=0.6, label=SEED,
        )  # fmt: skip
        if row.values:
            mean = math.fsum(row.values) / len(row.values)
            panel.plot([mean, mean], [above - 0.22, above + 0.22], color=color, lw=2, label=MEAN)
        if row.published is not None:
            panel.errorbar(row.published.mean, beneath, xerr=row.published.sd, label=PUBLISHED, **PUBLISHED_STYLE)
    _finish_rows(panel, [row.title or method_title(row.method) for row in rows], metric, "0.9")
    handles = [
        Line2D([], [], ls="", marker="o", ms=6, color="0.4", mec="white", label=SEED),
        Line2D([], [], ls="", marker="|", ms=11, mew=2, color="0.4", label=MEAN),
    ]
    if any(row.published for row in rows):
        handles.append(Line2D([], [], label=PUBLISHED, **PUBLISHED_STYLE))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles))
    return figure


def _finish_rows(panel: Axes, names: Sequence[str], label: str, shade: str) -> None:
    """Write the names on the left, the first row on top, with thin lines between rows, a grid and the axis' label."""
    panel.grid(axis="x", color=shade, lw=0.7)
    panel.set_axisbelow(True)
    panel.set_xlabel(label)
    panel.set_yticks(range(len(names)), names)
    panel.set_ylim(len(names) - 0.45, -0.55)
    panel.tick_params(axis="y", length=0, labelsize=9)
    panel.spines["left"].set_visible(False)
    panel.hlines([line + 0.5 for line in range(len(names) - 1)], 0, 1, color="0.92", lw=0.8,
                 transform=panel.get_yaxis_transform(), zorder=0)  # fmt: skip


@dataclass(frozen=True)
class SettingValues:
    """One metric of a guided method under one divergence and lambda (`weight`), one value per seed."""

    metric: str
    divergence: DivergenceName
    weight: float
    values: tuple[float, ...]
    published: MeanSd | None = None


@styled
def plot_sensitivity(rows: Sequence[SettingValues]) -> Figure:
    """One panel per metric: its mean by lambda, a line per divergence, a dot per seed, and published numbers.

    Example:
        >>> rows = [SettingValues("localization AUROC", "forward_kl", weight, (0.8, 0.9)) for weight in (0.1, 1.0)]
        >>> len(plot_sensitivity(rows).axes)
        1
    """
    metrics = list(dict.fromkeys(row.metric for row in rows))
    if not metrics:
        raise UserError("there is no setting to draw; give the values of at least one divergence and lambda")
    columns = min(len(metrics), 2)
    lines = math.ceil(len(metrics) / columns)
    figure = Figure(figsize=(WIDTH if columns > 1 else 0.55 * WIDTH, 0.6 + 2.6 * lines), layout="constrained")
    panels = figure.subplots(lines, columns, squeeze=False).flatten()
    for panel, metric in zip(panels, metrics, strict=False):
        _draw_settings(panel, [row for row in rows if row.metric == metric])
        panel.set(xlabel="λ, the weight of guidance", ylabel=metric)
    for unused in panels[len(metrics) :]:
        unused.remove()
    drawn = [kind for kind in DIVERGENCES if any(row.divergence == kind for row in rows)]
    colors = [(DIVERGENCE_COLORS[kind], f"{DIVERGENCE_TITLES[kind]}, ours") for kind in drawn]
    handles = [Line2D([], [], color=color, label=label, marker="o", ms=4, lw=1.6) for color, label in colors]
    if any(row.published for row in rows):
        handles.append(Line2D([], [], label=PUBLISHED, **PUBLISHED_STYLE))
    figure.legend(handles=handles, loc="outside upper center", ncols=len(handles) if columns > 1 else 2)
    return figure


def _draw_settings(panel: Axes, rows: Sequence[SettingValues]) -> None:
    """Lambdas at equal distances, divergences slightly apart at each, and published numbers to the right of ours."""
    weights = sorted({row.weight for row in rows})
    for number, divergence in enumerate(DIVERGENCES):
        color, aside = DIVERGENCE_COLORS[divergence], 0.12 * (number - 1)
        settings = sorted((row for row in rows if row.divergence == divergence), key=lambda row: row.weight)
        means = {
            weights.index(row.weight) + aside: math.fsum(row.values) / len(row.values) for row in settings if row.values
        }
        panel.plot(list(means), list(means.values()), color=color, lw=1.6, label=divergence)
        for row in settings:
            line = weights.index(row.weight) + aside
            seeds = [line] * len(row.values)
            panel.plot(seeds, row.values, ls="", marker="o", ms=4, color=color, alpha=0.6, label=SEED)
            if row.published is not None:
                style = PUBLISHED_STYLE | {"color": color}
                panel.errorbar(line + 0.045, row.published.mean, yerr=row.published.sd, label=PUBLISHED, **style)
    panel.set_xticks(range(len(weights)), [f"{weight:g}" for weight in weights])
    panel.set_xlim(-0.4, len(weights) - 0.6)
    panel.grid(axis="y", color="0.9", lw=0.7)


@dataclass(frozen=True)
class ForestRow:
    """An estimated difference with its confidence interval, and whether it is significant."""

    label: str
    estimate: float
    low: float
    high: float
    significant: bool

    def __str__(self) -> str:
        """The estimate and its interval.

        Example:
            >>> print(ForestRow("NG - ABMIL", 0.135, 0.09, 0.18, True))
            +.135 [.090, .180]
        """
        return f"{signed(self.estimate)} {interval(self.low, self.high)}"


@styled
def plot_differences(rows: Sequence[ForestRow], *, metric: str = "localization AUROC") -> Figure:
    """A forest plot: one row per difference, drawn and in numbers; significant ones are filled and dark.

    Example:
        >>> rows = [ForestRow("NG against ABMIL", 0.135, 0.09, 0.18, significant=True)]
        >>> len(plot_differences(rows).axes)
        1
    """
    if not rows:
        raise UserError("there is no difference to draw; give at least one")
    figure = Figure(figsize=(WIDTH, 0.95 + 0.27 * len(rows)), layout="constrained")
    panel = figure.subplots()
    panel.axvline(0, color="0.5", lw=0.9, zorder=1)
    for line, row in enumerate(rows):
        color, face = ("0.1", "0.1") if row.significant else ("0.45", "white")
        panel.plot([row.low, row.high], [line, line], color=color, lw=1.6, solid_capstyle="butt", zorder=2)
        panel.plot(row.estimate, line, marker="o", ms=6, color=color, mfc=face, zorder=3)
        panel.text(1.02, line, str(row), transform=panel.get_yaxis_transform(), va="center", color=color)
    _finish_rows(panel, [row.label for row in rows], f"difference in {metric}", "0.92")
    handles = [
        Line2D([], [], color="0.1", marker="o", ms=6, lw=1.6, label="significant"),
        Line2D([], [], color="0.45", marker="o", mfc="white", ms=6, lw=1.6, label="not significant"),
    ]
    figure.legend(handles=handles, loc="outside upper center", ncols=2)
    return figure
