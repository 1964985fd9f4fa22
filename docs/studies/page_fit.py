"""The tables and the figure of docs/results/fit.md and its appendices.

They are made from docs/results/tables/fit.parquet (`keep_fit`) and beyond.parquet.  A fold is a split: scores are means
over folds, and intervals come from resampled patients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
from keep import read, results_of
from make_page import IMAGES, TABLES, table
from matplotlib.figure import Figure
from removed_heads import COMMITTEE, color_of, title_of

from normal_guidance.show.figure_style import (
    WIDTH,
    save,
    styled,
)
from normal_guidance.show.text_tables import NOTHING, digits, signed
from normal_guidance.statistics.differences import Claim, Difference, differences, measure
from normal_guidance.statistics.skill import MIDDLE, POSITION_DENSITY, skill
from normal_guidance.statistics.split_results import MethodResults, Metric, SplitResults
from normal_guidance.study.drawn import VARIANTS

SEMI, ORACLE = "semi/", "oracle"
ALL = 3
"""A set is divided into folds so often at most."""
LOCALIZATION: Metric = "localization_auroc"
SCAN: Metric = "scan_auroc"
TITLES = {COMMITTEE: "**nguide fit**", MIDDLE: "Distance from the middle", POSITION_DENSITY: "Positions of findings"}
CHOSEN = "ng chosen"
"""Normal Guidance with lambda .1, 1 or 10 by validation; `ng` has lambda 1, as in the paper."""
GUESSES = (MIDDLE, POSITION_DENSITY)
METHODS = ("max", "mean", "abmil", "smap", "ng", "evidence", "evidence_ng", "whole_bells", "whole_bells_ng")
DRAWN = ("abmil", "smap", "ng", "evidence", "whole_bells")
SETS = {"prostatex": "prostate-70", "head": "head", "chest": "chest", "abdomen": "abdomen", "ecg": "ecg"}
"""The sets that are divided into folds, by the names of their tables."""

Row = dict[str, Any]


def title(method: str, dataset: str = "") -> str:
    """The method's title; that of `nguide fit` is bold in tables."""
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
def splits(name: str, seed: int = 0, divisions: int = ALL) -> tuple[SplitResults, ...]:
    """The folds of a set's first divisions, with the methods that have predicted all of them."""
    parts: dict[tuple[int, int], dict[str, Row]] = defaultdict(dict)
    for row in rows():
        own = row["seed"] == (seed if row["method"] not in GUESSES else 0)
        if row["set"] == name and own and row["repeat"] < divisions:
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


def of_set(name: str) -> str:
    """Every method on one set: scores, skill, and what `nguide fit` has beyond it."""
    own = splits(name)
    scores = measure(own)
    methods = [method for method in (COMMITTEE, *METHODS, *GUESSES) if method in own[0].methods]
    prior = max(scores[LOCALIZATION][guess] for guess in GUESSES)
    gains = {
        metric: {
            one.against: one
            for one in differences(
                own,
                [Claim(COMMITTEE, method, metric) for method in methods[1:] if method in scores[metric]],
            )
        }
        for metric in (LOCALIZATION, SCAN)
    }
    return table(
        ["Method", "Localization", "Skill", "Scan AUROC", "nguide fit: localization", "nguide fit: scan AUROC"],
        [
            [
                title(method),
                digits(scores[LOCALIZATION][method]),
                signed(skill(scores[LOCALIZATION][method], prior)),
                digits(scores[SCAN][method]) if method in scores[SCAN] else NOTHING,
                *(gain(gains[metric].get(method)) for metric in (LOCALIZATION, SCAN)),
            ]
            for method in methods
        ],
    )


def gain(one: Difference | None) -> str:
    if one is None:
        return NOTHING
    words = f"{signed(one.estimate)} [{digits(one.low)}, {digits(one.high)}]"
    return f"**{words}**" if one.low > 0 or one.high < 0 else words


# ----------------------------------------------------------------------------------------------------
# Semi-synthetic data
# ----------------------------------------------------------------------------------------------------


@cache
def drawn(variant: str) -> tuple[SplitResults, ...]:
    """The test sets of a variant's seeds, with the oracle and the single methods of beyond.md at lambda 1."""
    singles: dict[int, dict[str, Row]] = defaultdict(dict)
    for row in read(TABLES / "beyond.parquet"):
        if row["variant"] == variant and row["job"] in (*DRAWN, ORACLE) and row["weight"] in (None, 1.0):
            singles[row["seed"]][row["job"]] = row
    own = {
        int(row["set"].split("/")[2]): row
        for row in rows()
        if row["set"].startswith(f"{SEMI}{variant}/") and row["method"] == COMMITTEE
    }
    return tuple(
        _split(
            own_row := own[seed],
            {COMMITTEE: results(own_row), **{job: results_of(row)[1] for job, row in singles[seed].items()}},
        )
        for seed in sorted(own)
    )


def semi_synthetic() -> str:
    """Means of the paper's three seeds, and `nguide fit` beside the best single method of each column."""
    lines = []
    for variant, about in VARIANTS.items():
        if not any(row["set"].startswith(f"{SEMI}{variant}/") for row in rows()):
            continue
        scores = measure(own := drawn(variant))
        best = [max(DRAWN, key=lambda method, of=metric: scores[of][method]) for metric in (LOCALIZATION, SCAN)]
        claimed = [Claim(COMMITTEE, one, metric) for one, metric in zip(best, (LOCALIZATION, SCAN), strict=True)]
        cells = [
            f"{digits(scores[LOCALIZATION][method])} / {digits(scores[SCAN][method])}"
            for method in (COMMITTEE, *DRAWN, ORACLE)
        ]
        gains = [f"{gain(one)} ({title_of(one.against)})" for one in differences(own, claimed)]
        lines.append([about.title, f"**{cells[0]}**", *cells[1:], *gains])
    header = ["Data", "nguide fit", *map(title_of, DRAWN), "Bayes oracle"]
    return table([*header, "beyond the best: localization", "beyond the best: scan AUROC"], lines)


# ----------------------------------------------------------------------------------------------------
# Other seeds
# ----------------------------------------------------------------------------------------------------


def stability() -> str:
    """How much training again from another seed moves the scores."""
    lines = []
    for name, method in product(("prostatex", "head"), (COMMITTEE, "ng", "whole_bells_ng")):
        found: dict[int, dict[int, Row]] = defaultdict(dict)
        for row in rows():
            if (row["set"], row["method"], row["repeat"]) == (SETS[name], method, 0):
                found[row["seed"]][row["fold"]] = row
        seeds = [measure([_split(row, {method: results(row)}) for row in own.values()]) for own in found.values()]
        if len(seeds) > 1:
            values = [np.array([scores[metric][method] for scores in seeds]) for metric in (LOCALIZATION, SCAN)]
            cells = [f"{digits(own.mean())} ± {digits(own.std(ddof=1))}" for own in values]
            lines.append([name, title(method), len(seeds), *cells])
    return table(["Data", "Method", "Seeds", "Localization", "Scan AUROC"], lines)


# ----------------------------------------------------------------------------------------------------
# Summary: what nguide fit has beyond the best single method, Normal Guidance and position
# ----------------------------------------------------------------------------------------------------

HEADINGS = {
    "prostatex": "PROSTATEx (MRI)",
    "ecg": "MIT-BIH (ECG)",
    "head": "Head phantoms",
    "chest": "Chest phantoms",
    "abdomen": "Abdomen phantoms",
}
BEST, GUIDED, GUESS = "the best single method", "Normal Guidance", "the best guess by position"


@cache
def gains(name: str) -> tuple[dict[str, Difference], Difference]:
    """What `nguide fit` has on a set: localization beyond the best single method, guidance and position, and scan AUROC
    beyond the best single method."""
    own = splits(name)
    scores = measure(own)
    methods = [method for method in own[0].methods if method not in (COMMITTEE, *GUESSES)]
    best, tells = (max(methods, key=lambda one, of=metric: scores[of][one]) for metric in (LOCALIZATION, SCAN))
    guess = max(GUESSES, key=lambda one: scores[LOCALIZATION][one])
    against = {BEST: best, GUIDED: "ng", GUESS: guess}
    claims = [Claim(COMMITTEE, one, LOCALIZATION) for one in against.values()]
    *found, scan = differences(own, [*claims, Claim(COMMITTEE, tells, SCAN)])
    return dict(zip(against, found, strict=True)), scan


def summary() -> str:
    """One row a set that is divided into folds."""
    lines = []
    for name, heading in HEADINGS.items():
        scores = measure(splits(SETS[name]))
        against, scan = gains(SETS[name])
        own = " / ".join(digits(scores[metric][COMMITTEE]) for metric in (LOCALIZATION, SCAN))
        best, last = (f"{gain(one)} ({title(one.against)})" for one in (against[BEST], scan))
        lines.append([heading, own, best, *(gain(against[other]) for other in (GUIDED, GUESS)), last])
    beyond = [f"Localization beyond {other}" for other in (BEST, GUIDED, GUESS)]
    return table(["Data", TITLES[COMMITTEE], *beyond, f"Scan AUROC beyond {BEST}"], lines)


@styled
def figure() -> Figure:
    """The localization that `nguide fit` has beyond three others, with intervals, one row a set."""
    drawn = Figure(figsize=(WIDTH, 0.36 * WIDTH), layout="constrained")
    panel = drawn.subplots()
    looks = {BEST: (color_of(COMMITTEE), "P"), GUIDED: (color_of("ng"), "o"), GUESS: ("0.45", "s")}
    for place, name in enumerate(HEADINGS):
        for shift, (label, one) in zip((-0.22, 0.0, 0.22), gains(SETS[name])[0].items(), strict=True):
            color, marker = looks[label]
            panel.plot([one.low, one.high], [place + shift] * 2, color=color, lw=1.6)
            panel.plot(
                [one.estimate], [place + shift], color=color, marker=marker, ms=6, ls="", label=f"beyond {label}"
            )
    panel.axvline(0, color="black", lw=0.8)
    panel.set_yticks(range(len(HEADINGS)), list(HEADINGS.values()))
    panel.invert_yaxis()
    panel.set_xlabel("Localization AUROC of nguide fit minus that of the other (95 % interval)")
    handles = {label: handle for handle, label in zip(*panel.get_legend_handles_labels(), strict=True)}
    drawn.legend(list(handles.values()), list(handles), loc="outside upper center", ncols=3)
    return drawn


def draw() -> None:
    save(figure(), IMAGES / "fit.png")


SECTIONS: dict[str, Callable[[], str]] = {
    **{name: partial(of_set, own) for name, own in SETS.items()},
    "summary": summary,
    "semi_synthetic": semi_synthetic,
    "stability": stability,
}
