"""Learning curves of a grid, and validation AUROC of its configurations.

Both figures read a run's history.parquet (`normal_guidance.sweep.run.history_table`).
"""

from __future__ import annotations

import numpy as np
import pandas as pd
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.colors import Normalize
from matplotlib.figure import Figure
from matplotlib.patches import Patch, Rectangle

from normal_guidance.base.errors import UserError
from normal_guidance.show.figure_style import RED, WIDTH, method_color, styled
from normal_guidance.show.text_tables import digits

GROUP = ["divergence", "guidance_weight", "seed"]
"""Selection does not choose among these (`normal_guidance.sweep.sweep.group_of`): a figure shows one value of each."""

TITLES = {"loss": "training loss", "train_auroc": "training AUROC", "val_auroc": "validation AUROC"}
"""The columns of a run's history that are drawn, with their titles."""

VALUE, NONE, WINNER = "value", "no selectable epoch", "winner"
"""Meanings of the grid's rectangles, as their `gid`, which SVG keeps."""

LOG_EPOCHS = 50  # with more epochs the axis is logarithmic, so that fast and slow learning rates are both readable


def selected_epochs(history: pd.DataFrame) -> pd.DataFrame:
    """The kept epoch of each configuration that has one: the winner, then by validation AUROC, then by number."""
    missing = [column for column in ("config", "val_auroc", "selected", "winner", *GROUP) if column not in history]
    if missing:
        raise UserError(f"history has no column {missing[0]!r}; give the history.parquet of a run")
    groups = history[GROUP].drop_duplicates()
    if len(groups) != 1:
        raise UserError(
            f"history holds {len(groups)} groups that differ in {', '.join(GROUP)}; give the rows of one of them"
        )
    return history[history["selected"]].sort_values(["winner", "val_auroc", "config"], ascending=[False, False, True])


@styled
def plot_learning_curves(history: pd.DataFrame, method: str) -> Figure:
    """Loss and AUROC by epoch: the winner in the method's colour, its selected epoch marked, the others thin and grey.

    Without a selectable epoch there is no winner, and the figure says so.
    """
    kept = selected_epochs(history)
    winner = None if kept.empty else kept.iloc[0]
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    panels = figure.subplots(1, len(TITLES), sharex=True)
    panels[2].sharey(panels[1])
    for panel, (column, title) in zip(panels, TITLES.items(), strict=True):
        _draw_curves(panel, history, column, winner, method_color(method))
        panel.set(xlabel="epoch", title=title)
    panels[0].set_ylabel("loss")
    panels[1].set_ylabel("AUROC")
    if history["epoch"].max() > LOG_EPOCHS:
        panels[0].set_xscale("log")
        panels[0].xaxis.set_major_formatter("{x:g}")
    # A logarithmic axis that shows the whole winner, but no other loss beyond 1,000 times the median.
    loss = history["loss"][np.isfinite(history["loss"]) & (history["loss"] > 0)]
    if len(loss):
        low, high = max(loss.min(), loss.median() / 1000), min(loss.max(), loss.median() * 1000)
        if winner is not None:
            curve = history.loc[history["config"] == winner["config"], "loss"]
            low, high = min(low, curve.min()), max(high, curve.max())
        panels[0].set(yscale="log", ylim=(low / 1.15, high * 1.15))
    handles, names = panels[0].get_legend_handles_labels()
    figure.legend(handles, names, loc="outside upper center", ncols=len(names))
    return figure


def _draw_curves(panel: Axes, history: pd.DataFrame, column: str, winner: pd.Series | None, color: str) -> None:
    """Draw a column of the history, one line per configuration; the winner is drawn last, on top."""
    label = "other configurations" if winner is not None else "no configuration has a selectable epoch"
    for number, curve in history.groupby("config"):
        if winner is None or number != winner["config"]:
            panel.plot(curve["epoch"], curve[column], color="0.75", lw=0.5, label=label, rasterized=True)
            label = "_"  # one entry of the legend for all
    if winner is None:
        return
    curve = history[history["config"] == winner["config"]]
    chosen = f"chosen: learning rate {winner['lr']:g}, L1 {winner['l1']:g}"
    panel.plot(curve["epoch"], curve[column], color=color, lw=1.6, label=chosen)
    panel.plot(
        winner["epoch"], winner[column], ls="", marker="o", ms=6, color="black", mec="white", zorder=4,
        label=f"selected epoch {winner['epoch']:.0f}, validation AUROC {digits(winner['val_auroc'])}",
    )  # fmt: skip


@styled
def plot_grid(history: pd.DataFrame) -> Figure:
    """Validation AUROC at the kept epoch of each learning rate and L1 strength, the winner framed.

    A configuration without a selectable epoch is hatched; one that was not trained is blank.
    """
    kept = selected_epochs(history)
    configs = history.drop_duplicates("config")
    rates, strengths = sorted(configs["lr"].unique()), sorted(configs["l1"].unique())
    figure = Figure(figsize=(1.9 + 0.8 * len(strengths), 1.5 + 0.42 * len(rates)), layout="constrained")
    panel = figure.subplots()
    # The scale spans .1 of AUROC at least, so that colours do not exaggerate small differences.
    highest = kept["val_auroc"].max() if len(kept) else 1.0
    scale = Normalize(min(highest - 0.1, kept["val_auroc"].min()) if len(kept) else 0.5, highest)
    values = dict(zip(kept["config"], kept["val_auroc"], strict=True))
    for number, lr, l1 in configs[["config", "lr", "l1"]].itertuples(index=False):
        corner = (strengths.index(l1) - 0.5, rates.index(lr) - 0.5)
        if number not in values:
            panel.add_patch(Rectangle(corner, 1, 1, facecolor="white", edgecolor="0.6", hatch="////", lw=0, gid=NONE))
            continue
        color = colormaps["cividis"](scale(values[number]))
        panel.add_patch(Rectangle(corner, 1, 1, facecolor=color, lw=0, gid=VALUE))
        brightness = float(np.dot(color[:3], [0.299, 0.587, 0.114]))
        ink = "black" if brightness > 0.5 else "white"
        middle = (corner[0] + 0.5, corner[1] + 0.5)
        panel.text(*middle, digits(values[number]), ha="center", va="center", color=ink)
    handles = []
    if len(kept):
        corner = (strengths.index(kept["l1"].iloc[0]) - 0.5, rates.index(kept["lr"].iloc[0]) - 0.5)
        panel.add_patch(Rectangle(corner, 1, 1, fill=False, edgecolor=RED, lw=2.4, zorder=4, gid=WINNER))
        handles.append(Patch(fill=False, edgecolor=RED, lw=2, label="chosen"))
    if len(kept) < len(configs):
        handles.append(Patch(facecolor="white", edgecolor="0.6", hatch="////", label="no selectable epoch"))
    # Labels of rows and columns, and white lines between the cells.
    panel.hlines(np.arange(len(rates) + 1) - 0.5, -0.5, len(strengths) - 0.5, color="white", lw=1.2, zorder=3)
    panel.vlines(np.arange(len(strengths) + 1) - 0.5, -0.5, len(rates) - 0.5, color="white", lw=1.2, zorder=3)
    panel.set(xlim=(-0.5, len(strengths) - 0.5), ylim=(-0.5, len(rates) - 0.5))
    panel.set(xlabel="L1 strength", ylabel="learning rate")
    panel.set_title("Validation AUROC at the selected epoch", loc="left")
    panel.set_xticks(range(len(strengths)), [f"{strength:g}".replace("e-0", "e-") for strength in strengths])
    panel.set_yticks(range(len(rates)), [f"{rate:g}".replace("e-0", "e-") for rate in rates])
    panel.tick_params(length=0)
    panel.spines[["left", "bottom"]].set_visible(False)
    panel.legend(handles=handles, loc="lower right", bbox_to_anchor=(1, 1), borderaxespad=0.3, ncols=len(handles))
    return figure
