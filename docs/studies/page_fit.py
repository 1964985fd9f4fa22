"""The tables and the figure of docs/results/fit.md and its appendix.

Those of the ensemble come from docs/results/tables/ensemble.parquet: a division into folds is a split.  Those of the
committee come from fit.parquet (`keep_fit`): a fold is a split.  Intervals resample patients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache
from itertools import product
from typing import Any

import numpy as np
import torch
from keep import read
from make_page import IMAGES, TABLES, table
from matplotlib.figure import Figure
from removed_heads import COMMITTEE, color_of, title_of

from normal_guidance.fit.fit_ensemble import KINDS, groups_of
from normal_guidance.show.figure_style import (
    WIDTH,
    save,
    styled,
)
from normal_guidance.show.text_tables import NOTHING, digits, signed
from normal_guidance.statistics.differences import Claim, Difference, differences, measure
from normal_guidance.statistics.skill import MIDDLE, POSITION_DENSITY
from normal_guidance.statistics.split_results import MethodResults, Metric, SplitResults

SEMI = "semi/"
ALL = 3
"""A set is divided into folds so often at most."""
LOCALIZATION: Metric = "localization_auroc"
SCAN: Metric = "scan_auroc"
TITLES = {COMMITTEE: "**Committee**", MIDDLE: "Distance from the middle", POSITION_DENSITY: "Positions of findings"}
CHOSEN = "ng chosen"
"""Normal Guidance with lambda .1, 1 or 10 by validation; `ng` has lambda 1, as in the paper."""
GUESSES = (MIDDLE, POSITION_DENSITY)
Row = dict[str, Any]


def title(method: str, dataset: str = "") -> str:
    """The method's title; the committee's is bold in tables."""
    if method == CHOSEN:
        return f"{title_of('ng')}, lambda chosen"
    return TITLES.get(method) or title_of(method, dataset)


@cache
def rows() -> tuple[Row, ...]:
    return tuple(read(TABLES / "fit.parquet"))


def results(row: Row) -> MethodResults:
    auroc = np.asarray(row["auroc"], dtype=np.float64)
    ranks = np.asarray(row["scan_rank"], dtype=np.float64) if row["scan_rank"] else None
    return MethodResults(auroc, auroc, ranks)  # AUPRC is not kept, and no table shows it


@cache
def splits(name: str, divisions: int = ALL) -> tuple[SplitResults, ...]:
    """The folds of a set's first divisions, with the methods that have predicted all of them."""
    parts: dict[tuple[int, int], dict[str, Row]] = defaultdict(dict)
    for row in rows():
        if row["set"] == name and row["seed"] == 0 and row["repeat"] < divisions:
            parts[row["repeat"], row["fold"]][row["method"]] = row
    parts = {part: own for part, own in parts.items() if COMMITTEE in own}
    everywhere = set.intersection(*(set(own) for own in parts.values()))
    return tuple(
        _split(own[COMMITTEE], {method: results(own[method]) for method in own if method in everywhere})
        for _, own in sorted(parts.items())
    )


def _split(row: Row, methods: dict[str, MethodResults]) -> SplitResults:
    scans, patients = (tuple(map(str, row[name])) for name in ("scans", "patients"))
    if row["set"].startswith(SEMI):  # every seed has scans of its own
        scans = patients = tuple(f"{row['set']}/{scan}" for scan in scans)
    return SplitResults(scans, patients, np.asarray(row["labels"], dtype=np.int64), methods)


def gain(one: Difference | None) -> str:
    if one is None:
        return NOTHING
    words = f"{signed(one.estimate)} [{digits(one.low)}, {digits(one.high)}]"
    return f"**{words}**" if one.low > 0 or one.high < 0 else words


# ----------------------------------------------------------------------------------------------------
# Other seeds
# ----------------------------------------------------------------------------------------------------


AGAIN = {"PROSTATEx (MRI)": "prostate-70", "Head phantoms": "head"}
"""Sets of which the first division was trained again."""


def stability() -> str:
    """How much training again from another seed moves the scores."""
    lines = []
    for (heading, name), method in product(AGAIN.items(), (COMMITTEE, "ng", "whole_bells_ng")):
        found: dict[int, dict[int, Row]] = defaultdict(dict)
        for row in rows():
            if (row["set"], row["method"], row["repeat"]) == (name, method, 0):
                found[row["seed"]][row["fold"]] = row
        seeds = [measure([_split(row, {method: results(row)}) for row in own.values()]) for own in found.values()]
        if len(seeds) > 1:
            values = [np.array([scores[metric][method] for scores in seeds]) for metric in (LOCALIZATION, SCAN)]
            cells = [f"{digits(own.mean())} ± {digits(own.std(ddof=1))}" for own in values]
            lines.append([heading, title(method), len(seeds), *cells])
    return table(["Data", "Method", "Seeds", "Localization", "Scan AUROC"], lines)


# ----------------------------------------------------------------------------------------------------
# The ensemble, its kinds of members, position and the committee, out of fold (`benchmarks/study_members.py`)
# ----------------------------------------------------------------------------------------------------

HEADINGS = {
    "ct-ich": "ct-ich (head CT)",
    "prostatex": "PROSTATEx (MRI)",
    "ecg": "MIT-BIH (ECG)",
    "head": "Head phantoms",
    "chest": "Chest phantoms",
    "abdomen": "Abdomen phantoms",
}
ENSEMBLE, BOTH = "ensemble", (LOCALIZATION, SCAN)
MEMBERS = [kind.method for kind in KINDS]


@cache
def divisions(name: str) -> tuple[SplitResults, ...]:
    """A set's divisions into folds, each with all its scans."""
    parts: dict[int, list[Row]] = defaultdict(list)
    for row in read(TABLES / "ensemble.parquet"):
        if row["set"] == name:
            parts[row["repeat"]].append(row)
    return tuple(
        SplitResults(
            tuple(str(scan) for scan in range(len(own[0]["labels"]))),
            tuple(map(str, own[0]["patients"])),
            np.asarray(own[0]["labels"], dtype=np.int64),
            {row["method"]: results(row) for row in own},
        )
        for _, own in sorted(parts.items())
    )


def beyond(name: str, other: str) -> Difference | None:
    """What `nguide fit` localizes beyond another on a set that has both."""
    own = divisions(name)
    return differences(own, [Claim(ENSEMBLE, other, LOCALIZATION)])[0] if other in own[0].methods else None


def both(scores: dict[Metric, dict[str, float]], method: str) -> str:
    cells = [digits(scores[metric][method]) if method in scores[metric] else NOTHING for metric in BOTH]
    return " / ".join(cells)


def rival(name: str) -> str:
    """The kind of members that localizes best on a set."""
    scores = measure(divisions(name))[LOCALIZATION]
    return max(MEMBERS, key=lambda method: scores.get(method, 0.0))


def ensemble() -> str:
    """One row a set: what `nguide fit` localizes beyond position, the committee and the best kind of its members."""
    lines = []
    for name, heading in HEADINGS.items():
        scores = measure(divisions(name))
        gains = [gain(one) for one in (beyond(name, other) for other in (MIDDLE, COMMITTEE, rival(name)))]
        lines.append([heading, f"**{both(scores, ENSEMBLE)}**", digits(scores[LOCALIZATION][MIDDLE]), *gains])
    others = ("beyond position", "beyond the committee", "beyond the best kind")
    return table(["Data", "nguide fit", "Position", *others], lines)


def kinds() -> str:
    """The scores of the ensemble, of each kind, of position and of the committee."""
    scores = {name: measure(divisions(name)) for name in HEADINGS}
    titles = {ENSEMBLE: "**nguide fit**", MIDDLE: TITLES[MIDDLE], COMMITTEE: "Committee, the default before"}
    lines = [
        [titles.get(method) or title_of(method), *(both(scores[name], method) for name in HEADINGS)]
        for method in (ENSEMBLE, *MEMBERS, MIDDLE, COMMITTEE)
    ]
    return table(["Slices / scans", *HEADINGS.values()], lines)


@styled
def figure() -> Figure:
    """The localization of `nguide fit` beyond position, the committee and the best kind, one row a set."""
    drawn = Figure(figsize=(WIDTH, 0.4 * WIDTH), layout="constrained")
    panel = drawn.subplots()
    looks = {"position": ("0.45", "s"), "the committee": (color_of(COMMITTEE), "P"), "the best kind": ("#1F77B4", "o")}
    for place, name in enumerate(HEADINGS):
        for shift, label, other in zip((-0.22, 0.0, 0.22), looks, (MIDDLE, COMMITTEE, rival(name)), strict=True):
            if one := beyond(name, other):
                color, marker = looks[label]
                panel.plot([one.low, one.high], [place + shift] * 2, color=color, lw=1.6)
                look = {"color": color, "marker": marker, "ms": 6, "ls": ""}
                panel.plot([one.estimate], [place + shift], label=f"beyond {label}", **look)
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(HEADINGS)), list(HEADINGS.values()))
    panel.invert_yaxis()
    panel.set_xlabel("Localization AUROC of nguide fit minus that of the other (95 % interval)")
    handles = {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    drawn.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=3)
    return drawn


@styled
def folds_figure() -> Figure:
    """Which folds the groups of models are trained on, chosen on and predict, one row a group."""
    count = 5
    groups = groups_of(torch.arange(count))
    drawn = Figure(figsize=(WIDTH, 0.5 * WIDTH), layout="constrained")
    panel = drawn.subplots()
    looks = {"trained on": "#BBD5EC", "chosen on": "#F6C667", "predicted": "#C94C4C"}
    for row, (predicted, own) in enumerate(zip(groups.predicted.tolist(), groups.validation, strict=True)):
        for fold in range(count):
            role = "predicted" if fold == predicted else "chosen on" if own[fold] else "trained on"
            place = row + 0.6 * predicted  # a gap after the groups that predict the same fold
            panel.barh(place, 0.94, left=fold + 0.03, height=0.86, color=looks[role], label=role)
    panel.set_xticks([fold + 0.5 for fold in range(count)], [f"fold {fold + 1}" for fold in range(count)])
    panel.set_yticks([])
    panel.set_ylabel("20 groups of models of each kind")
    panel.invert_yaxis()
    for side in ("left", "bottom"):
        panel.spines[side].set_visible(False)
    panel.tick_params(length=0)
    handles = {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    drawn.legend([handles[name] for name in looks], list(looks), loc="outside upper center", ncols=3)
    return drawn


def draw() -> None:
    save(figure(), IMAGES / "fit.png")
    save(folds_figure(), IMAGES / "fit-folds.png")


SECTIONS: dict[str, Callable[[], str]] = {
    "ensemble": ensemble,
    "kinds": kinds,
    "stability": stability,
}
