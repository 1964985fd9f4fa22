"""Two figures: all forms by both AUROCs, and methods over the variants of the data."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from beyond.points import COMPARED, points_of, title
from beyond.results import Found
from beyond.tables import LOCALIZATION, SCANS, SHOWN, Interval, Row, rows_of
from normal_guidance.presentation.figure_style import METHOD_MARKERS, WIDTH, method_color, styled
from normal_guidance.simulate.semi_synthetic import VARIANTS

NAMES = {LOCALIZATION: "localization AUROC", SCANS: "scan AUROC"}


def form_rows(found: Found) -> list[Row]:
    return rows_of(found, points_of("form"))


def data_rows(found: Found) -> list[Row]:
    return rows_of(found, points_of("data"))


@styled
def plot_forms(rows: Sequence[Row]) -> Figure:
    """Localization against classification, one marker a method, with 95 % intervals; the oracle as lines."""
    figure = Figure(figsize=(WIDTH, 0.52 * WIDTH), layout="constrained")
    panel = figure.subplots()
    for row in rows:
        method, where, label = row.point.job.method, row.values[LOCALIZATION], row.point.label
        if method == "oracle":
            panel.axhline(where.value, color="black", lw=1, label=label)
            panel.axvline(row.values[SCANS].value, color="black", lw=1)
        elif SCANS not in row.values:
            panel.axhline(where.value, color="0.45", lw=1, ls=_dashes(method), label=label)
        else:
            scan = row.values[SCANS]
            panel.errorbar(scan.value, where.value, xerr=_reach(scan), yerr=_reach(where), label=label, **_look(method))
    panel.set_xlabel(f"{NAMES[SCANS]} (mean over seeds, 95 % interval)")
    panel.set_ylabel(NAMES[LOCALIZATION])
    panel.grid(color="0.93", lw=0.7)
    panel.set_axisbelow(True)
    figure.legend(loc="outside right center")
    return figure


@styled
def plot_data(rows: Sequence[Row]) -> Figure:
    """One panel a metric, one column a variant, one marker a method; the variant's oracle as a line."""
    variants = [name for name in VARIANTS if any(row.point.job.variant == name for row in rows)]
    methods = [name for name in COMPARED if name != "oracle"]
    figure = Figure(figsize=(WIDTH, 0.75 * WIDTH), layout="constrained")
    panels = figure.subplots(2, 1, sharex=True)
    for panel, metric in zip(panels, SHOWN, strict=True):
        for row in rows:
            method, value = row.point.job.method, row.values[metric]
            place = float(variants.index(row.point.job.variant))
            if method == "oracle":
                panel.plot(
                    [place - 0.42, place + 0.42], [value.value] * 2, color="black", lw=1.4, label=row.point.label
                )
            else:
                place += 0.8 * ((methods.index(method) + 0.5) / len(methods) - 0.5)
                panel.errorbar(place, value.value, yerr=_reach(value), label=row.point.label, **_look(method, size=5))
        panel.set_ylabel(NAMES[metric])
        panel.grid(axis="y", color="0.93", lw=0.7)
        panel.set_axisbelow(True)
        panel.tick_params(axis="x", length=0)
    panels[-1].set_xlim(-0.6, len(variants) - 0.4)
    panels[-1].set_xticks(range(len(variants)), [_folded(VARIANTS[name].title) for name in variants])
    _legend(figure, panels[0])
    return figure


def _legend(figure: Figure, panel: Axes) -> None:
    """One entry a method, in the order of the tables."""
    handles, labels = panel.get_legend_handles_labels()
    once: dict[str, Any] = dict(zip(labels, handles, strict=True))
    ordered = [name for name in map(title, COMPARED) if name in once]
    figure.legend([once[name] for name in ordered], ordered, loc="outside upper center", ncols=4)


def _look(method: str, size: float = 6.5) -> dict[str, Any]:
    return {
        "color": method_color(method),
        "marker": METHOD_MARKERS[method],
        "ms": size,
        "mec": "white",
        "mew": 0.6,
        "lw": 0,
        "elinewidth": 1,
    }


def _reach(value: Interval) -> float:
    return value.high - value.value


def _dashes(method: str) -> tuple[int, tuple[int, ...]]:
    """A pattern for each of those that have no scan score."""
    return 0, {"centered_gaussian": (6, 3), "ends_of_bells": (1, 2), "ends_of_whole_bells": (4, 2, 1, 2)}[method]


def _folded(text: str, width: int = 17) -> str:
    """In lines of about so many letters."""
    lines = [""]
    for word in text.split():
        if len(lines[-1]) + len(word) >= width and lines[-1]:
            lines.append("")
        lines[-1] = f"{lines[-1]} {word}".strip()
    return "\n".join(lines)
