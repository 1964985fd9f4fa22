"""The table and the figure of docs/results/phantoms.md, from docs/results/tables/phantoms.parquet.

A row of that table is a mean over the splits of a layout (`against` is empty) or a tested difference.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

from keep import read
from make_page import IMAGES, TABLES, table
from matplotlib.figure import Figure
from removed_heads import GUIDED, SHOWN, color_of, title_of

from normal_guidance.core.methods import CEILING
from normal_guidance.show.figure_style import WIDTH, save, styled
from normal_guidance.show.text_tables import NOTHING, digits
from normal_guidance.statistics.split_results import Metric

LAYOUTS = ("head", "chest", "abdomen")
LOCALIZATION: Metric = "localization_auroc"


@cache
def rows() -> dict[tuple[str, str, str, str | None], dict[str, Any]]:
    """By layout, metric, method and what it is compared with."""
    return {
        (row["layout"], row["metric"], row["method"], row["against"]): row for row in read(TABLES / "phantoms.parquet")
    }


def localization() -> str:
    """Mean and sd of every method in each layout."""
    methods = [method for method in SHOWN if (LAYOUTS[0], LOCALIZATION, method, None) in rows()]
    return table(
        ["Method", *LAYOUTS],
        [[title_of(method), *(_mean(layout, method) for layout in LAYOUTS)] for method in methods],
    )


def _mean(layout: str, method: str) -> str:
    row = rows().get((layout, LOCALIZATION, method, None))
    if row is None or row["estimate"] is None:
        return NOTHING
    splits = f" ({row['splits']} of 3 splits)" if row["splits"] < 3 else ""
    return f"{digits(row['estimate'])} ± {digits(row['sd'])}{splits}"


@styled
def figure() -> Figure:
    """One panel a layout, one row a model: without guidance hollow, with guidance filled; lines for the references."""
    models = [GUIDED[method] for method in GUIDED if (LAYOUTS[0], LOCALIZATION, method, None) in rows()]
    pairs = {"abmil": "ng", **{model: f"{model}_ng" for model in models}}
    drawn = Figure(figsize=(WIDTH, 0.34 * WIDTH), layout="constrained")
    panels = drawn.subplots(1, len(LAYOUTS), sharey=True, sharex=True)
    for panel, layout in zip(panels, LAYOUTS, strict=True):
        for place, (model, guided) in enumerate(pairs.items()):
            ends = [rows()[layout, LOCALIZATION, method, None]["estimate"] for method in (model, guided)]
            color = color_of(model)
            panel.plot(ends, [place, place], color=color, lw=1.6, zorder=1)
            panel.plot(ends[:1], [place], marker="o", ms=7, mfc="white", mec=color, ls="", label="without guidance")
            panel.plot(ends[1:], [place], marker="o", ms=7, color=color, ls="", label="with Normal Guidance")
        for method, dashes, label in (("centered_gaussian", "--", "centred Gaussian"), (CEILING, ":", "slice labels")):
            panel.axvline(
                rows()[layout, LOCALIZATION, method, None]["estimate"], color="0.4", ls=dashes, lw=1, label=label
            )
        panel.set_title(layout)
        panel.set_xlabel("Localization AUROC")
    panels[0].set_yticks(range(len(pairs)), [title_of(model) for model in pairs])
    panels[0].invert_yaxis()
    handles = {label: handle for handle, label in zip(*panels[0].get_legend_handles_labels(), strict=True)}
    drawn.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=4)
    return drawn


def draw() -> None:
    save(figure(), IMAGES / "phantoms.png")


SECTIONS: dict[str, Callable[[], str]] = {"localization": localization}
