"""The figures of a fitted model's page: scans told apart, attention by position, and examples.

All show scans that the model was not trained on, and none names a scan or a patient.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from jaxtyping import Float, Float64, Int
from matplotlib.artist import Artist
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from sklearn.metrics import roc_curve
from torch import Tensor

from normal_guidance.presentation.figure_style import (
    BLUE,
    GREEN,
    ORANGE,
    WIDTH,
    fill_truth,
    label_slices,
    styled,
)
from normal_guidance.statistics.calibration import Operation
from normal_guidance.statistics.differences import student_quantile
from normal_guidance.statistics.wilson import wilson

POINTS = 50
"""Relative positions at which mean attention is drawn."""

BINS, IN_A_BIN = 8, 10
"""The most points of the calibration curve, and the fewest scans of each."""

ACROSS = 3
"""Examples in a row."""

GUESS = "0.25"
"""The colour of what knows nothing of the scan: chance, and the prior."""


@dataclass(frozen=True, eq=False)
class PredictedScans:
    """Scans that the model was not trained on, and what it says of them."""

    logits: Float[Tensor, "scans"]
    labels: Int[Tensor, "scans"]
    auroc: str


@styled
def plot_scans(parts: Mapping[str, PredictedScans], operation: Operation) -> Figure:
    """ROC curves with the threshold, and calibration; the first part chose the threshold."""
    figure = Figure(figsize=(WIDTH, 4.1), layout="constrained")
    curves, calibrated = figure.subplots(1, 2)
    for color, (name, own) in zip((BLUE, ORANGE), parts.items(), strict=False):
        false, true, _ = roc_curve(own.labels.numpy(), own.logits.numpy(), drop_intermediate=False)
        curves.plot(false, true, color=color, lw=1.6, label=f"{name}: AUROC {own.auroc}")
        odds = np.array([operation.calibration.probability(logit) for logit in own.logits.tolist()])
        _draw_calibration(calibrated, odds, own.labels.numpy(), name, color)
    if operation.point is not None:
        counts = operation.point.validation
        place = (1 - counts.specificity, counts.sensitivity)
        curves.plot(*place, ls="", marker="o", ms=6, color="0.1", label="threshold, out of fold")
    curves.set(xlabel="1 - specificity", ylabel="sensitivity", title="Positive scans found, by false alarms")
    calibrated.set(xlabel="probability", ylabel="share of positive scans", title="Does 0.7 mean 7 of 10 scans?")
    for panel, name in ((curves, "chance"), (calibrated, "as it says")):
        panel.plot([0, 1], [0, 1], color=GUESS, lw=0.9, ls="--", label=name)
        panel.set(xlim=(-0.01, 1.01), ylim=(-0.01, 1.01), aspect="equal")
        panel.legend(loc="upper center", bbox_to_anchor=(0.5, -0.17), ncols=2)
    return figure


def _draw_calibration(panel: Axes, probability: np.ndarray, labels: np.ndarray, name: str, color: str) -> None:
    """Shares of positive scans among scans of similar probability, with Wilson's intervals."""
    bins = max(1, min(BINS, len(labels) // IN_A_BIN))
    groups = np.array_split(np.argsort(probability, kind="stable"), bins)
    said = np.array([probability[group].mean() for group in groups])
    true = np.array([labels[group].mean() for group in groups])
    low, high = np.transpose([wilson(int(labels[group].sum()), len(group)) for group in groups])
    panel.vlines(said, low, high, color=color, lw=1.1)
    label = f"{name}: about {round(len(labels) / bins)} scans a point"
    panel.plot(said, true, ls="", marker="o", ms=4.5, color=color, label=label)


@styled
def plot_positions(
    attention: Float[Tensor, "slices"],
    prior: Float[Tensor, "slices"],
    labels: Int[Tensor, "scans"],
    lengths: Int[Tensor, "scans"],
) -> Figure:
    """Mean attention of positive and of negative scans by relative position, beside the prior."""
    along = (np.arange(POINTS) + 0.5) / POINTS
    own, expected = (by_position(values, lengths) for values in (attention, prior))
    figure = Figure(figsize=(WIDTH, 2.7), layout="constrained")
    panel = figure.subplots()
    for label, name, color in ((1, "positive scans", GREEN), (0, "negative scans", BLUE)):
        chosen = own[(labels == label).numpy()]
        mean = chosen.mean(0)
        if len(chosen) > 1:
            reach = student_quantile(0.95, len(chosen) - 1) * chosen.std(0, ddof=1) / np.sqrt(len(chosen))
            panel.fill_between(along, mean - reach, mean + reach, color=color, alpha=0.2, lw=0)
        panel.plot(along, mean, color=color, lw=1.7, label=f"mean of {len(chosen)} {name}")
    panel.plot(along, expected.mean(0), color=GUESS, lw=1.2, ls="--", label="the prior: before it looks at a scan")
    panel.axhline(1, color="0.75", lw=0.8, ls=":")
    panel.set(xlim=(0, 1), xlabel="position in the scan: 0 is its first slice, 1 its last")
    panel.set_ylabel("attention (1: even)")
    panel.set_ylim(bottom=0)
    panel.legend(loc="center left", bbox_to_anchor=(1.01, 0.5))
    return figure


def by_position(attention: Float[Tensor, "slices"], lengths: Int[Tensor, "scans"]) -> Float64[np.ndarray, "scans _"]:
    """Each scan's attention at relative positions, times its number of slices: even attention is 1 everywhere."""
    along = (np.arange(POINTS) + 0.5) / POINTS
    scans = [own.double().numpy() for own in attention.split(lengths.tolist())]
    return np.stack([np.interp(along, (np.arange(len(own)) + 0.5) / len(own), len(own) * own) for own in scans])


@dataclass(frozen=True, eq=False)
class Example:
    """One scan's attention, the prior beside it, and its slice labels if they are known."""

    title: str
    attention: Float[Tensor, "slices"]
    prior: Float[Tensor, "slices"]
    slice_labels: Int[Tensor, "slices"] | None = None


@styled
def plot_examples(examples: Sequence[Example]) -> Figure:
    """Attention along the slices of a few scans, in rows of `ACROSS`."""
    rows = -(-len(examples) // ACROSS)
    figure = Figure(figsize=(WIDTH, 1.75 * rows + 0.4), layout="constrained")
    panels = figure.subplots(rows, ACROSS, squeeze=False).flatten()
    entries: dict[str, Artist] = {}
    for panel, example in zip(panels, examples, strict=False):
        _draw_example(panel, example)
        handles, names = panel.get_legend_handles_labels()
        entries |= dict(zip(names, handles, strict=True))
    for panel in panels[len(examples) :]:
        panel.set_axis_off()
    for panel in panels[::ACROSS]:
        panel.set_ylabel("attention")
    figure.legend(list(entries.values()), list(entries), loc="outside lower center", ncols=len(entries))
    return figure


def _draw_example(panel: Axes, example: Example) -> None:
    slices = np.arange(1, len(example.attention) + 1)
    if example.slice_labels is not None:
        fill_truth(panel, example.slice_labels)
    panel.plot(slices, example.attention, color=GREEN, lw=1.6, label="attention, out of fold")
    panel.plot(slices, example.prior, color=GUESS, lw=1.1, ls="--", label="prior")
    panel.set(xlim=(0.5, len(slices) + 0.5), title=example.title)
    panel.set_ylim(bottom=0)
    label_slices(panel)
