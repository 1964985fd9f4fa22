"""Every method on one set: tables and figures of prostatex.md, mitbih.md and lidc-positions.md, summary of field.md.

A real set is that of docs/results/tables/fit.parquet, on the folds of all its divisions; TransMIL's family has
predicted the first division of PROSTATEx alone.  A drawn set has a table of its own, and its partitions are the splits.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

import numpy as np
from kept_runs import KeptRuns
from make_page import table
from matplotlib.figure import Figure
from page_fit import ALL, CHOSEN, LOCALIZATION, SCAN, gain
from page_fit import GUESSES as GUESSES_OF_FOLDS
from page_fit import splits as splits_of_folds
from page_fit import title as title_of
from removed_heads import COMMITTEE, color_of

from normal_guidance.core.methods import CEILING, DISTINCT, EVERY_METHOD
from normal_guidance.show.figure_style import (
    WIDTH,
    save,
    styled,
)
from normal_guidance.show.text_tables import NOTHING, digits
from normal_guidance.statistics.differences import Claim, Difference, differences, measure, resample
from normal_guidance.statistics.split_results import Metric, SplitResults
from normal_guidance.study.experiment import LIDC_POSITIONS, SEMI_SYNTHETIC

GUESSES = (*GUESSES_OF_FOLDS, "centered_gaussian")
"""Scores that see a slice's position and nothing else."""

ORDER = (CEILING, COMMITTEE, *(name for name in DISTINCT if EVERY_METHOD[name].scores_scans), CHOSEN, *GUESSES)
METRICS: tuple[Metric, ...] = (LOCALIZATION, SCAN)
AXES = {LOCALIZATION: "Localization AUROC", SCAN: "Scan AUROC"}


SEMI = KeptRuns(SEMI_SYNTHETIC.name, SEMI_SYNTHETIC.seeds)
LIDC = KeptRuns(LIDC_POSITIONS.name, LIDC_POSITIONS.seeds)


def title(method: str) -> str:
    """The method's title; the best possible is the Bayes oracle."""
    return title_of(method, SEMI.name)


def splits(name: str, divisions: int = ALL) -> Sequence[SplitResults]:
    """The results of a set's scans by every method that has predicted all of its splits."""
    if name == LIDC.name:
        return LIDC.splits(name)
    if name != SEMI.name:
        return splits_of_folds(name, divisions=divisions)
    own = SEMI.splits(name, "beyond", "field")
    committee = [splits_of_folds(f"semi/paper/{seed}")[0].methods[COMMITTEE] for seed in SEMI.seeds]
    return [replace(one, methods={**one.methods, COMMITTEE: fit}) for one, fit in zip(own, committee, strict=True)]


@dataclass(frozen=True)
class Measured:
    """One method on one set: each metric with its interval, and what it has beyond the committee."""

    method: str
    value: dict[Metric, float]
    interval: dict[Metric, tuple[float, float]]
    beyond: dict[Metric, Difference]


@cache
def measured(name: str, divisions: int = ALL) -> tuple[Measured, ...]:
    """All methods of a set, the best localization first."""
    own = splits(name, divisions)
    scores, draws = measure(own), resample(own)
    methods = [method for method in ORDER if method in own[0].methods]
    has = {method: [metric for metric in METRICS if method in scores[metric]] for method in methods}
    claims = [Claim(one, COMMITTEE, metric) for one in methods if one != COMMITTEE for metric in has[one]]
    beyond = {(one.method, one.metric): one for one in differences(own, claims)}
    found = [
        Measured(
            method,
            {metric: scores[metric][method] for metric in has[method]},
            {metric: _interval(draws[metric][method]) for metric in has[method]},
            {metric: beyond[method, metric] for metric in METRICS if (method, metric) in beyond},
        )
        for method in methods
    ]
    return tuple(sorted(found, key=lambda one: -one.value[LOCALIZATION]))


def _interval(draws: np.ndarray) -> tuple[float, float]:
    low, high = np.nanpercentile(draws, [2.5, 97.5])
    return float(low), float(high)


def prior(name: str) -> float:
    """The best guess by position."""
    return max(one.value[LOCALIZATION] for one in measured(name) if one.method in GUESSES)


def ceiling(name: str, metric: Metric) -> float | None:
    """The best possible value, where it is known."""
    return next((one.value[metric] for one in measured(name) if one.method == CEILING), None)


def of_set(name: str) -> str:
    """The table of a set: every method with its intervals, and its localization beyond the committee's."""
    rows = []
    for one in measured(name):
        cells = (
            f"{digits(one.value[metric])} [{', '.join(map(digits, one.interval[metric]))}]"
            if metric in one.value
            else NOTHING
            for metric in METRICS
        )
        rows.append([title(one.method), *cells, gain(one.beyond.get(LOCALIZATION))])
    return table(["Method", "Localization", "Scan AUROC", "Localization beyond the committee"], rows)


@styled
def figure(name: str) -> Figure:
    """Every method with its interval, the best localization above; a line for the best guess by position."""
    rows = [one for one in measured(name) if one.method not in (*GUESSES, CEILING)]
    drawn = Figure(figsize=(WIDTH, 0.8 + 0.24 * len(rows)), layout="constrained")
    panels = drawn.subplots(1, 2, sharey=True)
    for panel, metric in zip(panels, METRICS, strict=True):
        for place, one in enumerate(rows):
            color = color_of(one.method.split(" ")[0])
            panel.plot(one.interval[metric], [place, place], color=color, lw=1.6)
            panel.plot([one.value[metric]], [place], marker="o", ms=5, color=color)
        panel.set_xlabel(AXES[metric])
        panel.axvline(0.5, color="0.85", lw=0.8, zorder=0)
        if (best := ceiling(name, metric)) is not None:
            panel.axvline(best, color="0.4", ls=":", lw=1, label="best possible")
    panels[0].axvline(prior(name), color="0.4", ls="--", lw=1, label="best guess by position")
    panels[0].legend(loc="lower left", bbox_to_anchor=(0.0, 1.0), ncols=2)
    panels[0].set_yticks(range(len(rows)), [title(one.method).replace("**", "") for one in rows])
    panels[0].invert_yaxis()
    return drawn


def draw(name: str, path: Path) -> None:
    save(figure(name), path)
