"""The tables of docs/results/fit.md, from docs/results/tables/fit.parquet (`keep_fit`) and beyond.parquet.

A fold is a split: scores are means over folds, and intervals come from resampled patients.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable
from functools import cache, partial
from itertools import product
from typing import Any

import numpy as np
from keep import read, results_of
from make_page import TABLES, table
from removed_heads import title_of

from normal_guidance.core.methods import COMMITTEE
from normal_guidance.simulate.semi_synthetic import VARIANTS
from normal_guidance.statistics.bootstrap import measure
from normal_guidance.statistics.differences import Claim, Difference, differences
from normal_guidance.statistics.number_format import NOTHING, digits, signed
from normal_guidance.statistics.scores import Metric
from normal_guidance.statistics.skill import MIDDLE, POSITION_DENSITY, skill
from normal_guidance.statistics.split_results import MethodResults, SplitResults

SEMI, ORACLE = "semi/", "oracle"
ALL = 3
"""A set is divided into folds so often at most."""
LOCALIZATION: Metric = "localization_auroc"
SCAN: Metric = "scan_auroc"
TITLES = {COMMITTEE: "**nguide fit**", MIDDLE: "Distance from the middle", POSITION_DENSITY: "Positions of findings"}
GUESSES = (MIDDLE, POSITION_DENSITY)
METHODS = ("max", "mean", "abmil", "smap", "ng", "evidence", "evidence_ng", "whole_bells", "whole_bells_ng")
DRAWN = ("abmil", "smap", "ng", "evidence", "whole_bells")
SETS = {"prostatex": "prostate-70", "head": "head", "chest": "chest", "abdomen": "abdomen", "ecg": "ecg"}
"""The sets that are divided into folds, by the names of their tables."""

Row = dict[str, Any]


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
                TITLES.get(method) or title_of(method),
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
            lines.append([name, TITLES.get(method) or title_of(method), len(seeds), *cells])
    return table(["Data", "Method", "Seeds", "Localization", "Scan AUROC"], lines)


SECTIONS: dict[str, Callable[[], str]] = {
    **{name: partial(of_set, own) for name, own in SETS.items()},
    "semi_synthetic": semi_synthetic,
    "stability": stability,
}
