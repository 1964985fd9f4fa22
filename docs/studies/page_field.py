"""The tables and the figure of docs/results/field.md: method by dataset."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from field_tables import AXES, GUESSES, LIDC, LOCALIZATION, METRICS, ORDER, SEMI, splits, title
from make_page import IMAGES, table
from matplotlib.figure import Figure
from removed_heads import COMMITTEE, color_of

from normal_guidance.core.methods import CEILING
from normal_guidance.show.figure_style import (
    WIDTH,
    save,
    styled,
)
from normal_guidance.show.text_tables import NOTHING, digits
from normal_guidance.statistics.differences import measure

SETS = {
    "prostate-70": "PROSTATEx (MRI)",
    "ecg": "MIT-BIH (ECG)",
    LIDC.name: "LIDC positions (drawn features)",
    SEMI.name: "Semi-synthetic (drawn)",
    "head": "Head phantoms (drawn CT)",
}


SHOWN = {COMMITTEE: "P", "ng": "o", "abmil": "o", "smap": "o", "whole_bells": "D", "acmil": "s", "millet": "s"}
"""Methods that the figure names, with their markers; all others are grey."""


@styled
def figure() -> Figure:
    """One panel a metric, one row a set, one mark a method; lines for the best guess and the best possible."""
    drawn = Figure(figsize=(WIDTH, 0.4 * WIDTH), layout="constrained")
    panels = drawn.subplots(1, 2, sharey=True)
    for panel, metric in zip(panels, METRICS, strict=True):
        for place, name in enumerate(SETS):
            values = measure(splits(name)).get(metric, {})
            for method in (one for one in ORDER if one in values and one not in GUESSES):
                where = [values[method]], [place]
                if method == CEILING:
                    panel.plot(*where, marker="|", ms=18, mew=2, color="black", ls="", label="best possible")
                elif method not in SHOWN:
                    panel.plot(*where, marker="o", ms=4, color="0.75", ls="", zorder=1, label="all others")
                else:
                    look: dict[str, Any] = {
                        "color": color_of(method),
                        "marker": SHOWN[method],
                        "mec": "white",
                        "mew": 0.6,
                    }
                    size, look["zorder"] = (10, 4) if method == COMMITTEE else (7, 3)
                    panel.plot(*where, ms=size, ls="", label=title(method).replace("**", ""), **look)
            if guesses := [values[guess] for guess in GUESSES if guess in values]:
                panel.plot(
                    [max(guesses)], [place], marker="|", ms=18, color="0.45", ls="", label="best guess by position"
                )
        panel.set_xlabel(AXES[metric])
        panel.grid(axis="x", color="0.93", lw=0.7)
        panel.set_axisbelow(True)
    panels[0].set_yticks(range(len(SETS)), list(SETS.values()))
    panels[0].set_ylim(len(SETS) - 0.5, -0.5)
    handles = {label: handle for handle, label in zip(*panels[0].get_legend_handles_labels(), strict=True)}
    drawn.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=5)
    return drawn


def draw() -> None:
    save(figure(), IMAGES / "field.png")


def localization() -> str:
    """The localization of every method on every set; the best of a column is bold.

    A star marks methods that have predicted the first division alone.
    """
    own = {name: measure(splits(name))[LOCALIZATION] for name in SETS}
    first = {name: measure(splits(name, 1))[LOCALIZATION] for name in SETS}
    best = {
        name: max(values[method] for method in ORDER if method in values and method not in (*GUESSES, CEILING))
        for name, values in own.items()
    }

    def cell(method: str, name: str) -> str:
        if method not in own[name]:
            alone = first[name].get(method)
            return NOTHING if alone is None else f"{digits(alone)}*"
        value = own[name][method]
        return f"**{digits(value)}**" if value == best[name] else digits(value)

    rows = [[title(method), *(cell(method, name) for name in SETS)] for method in ORDER]
    return table(["Method", *SETS.values()], [row for row in rows if set(row[1:]) != {NOTHING}])


SECTIONS: dict[str, Callable[[], str]] = {"localization": localization}
