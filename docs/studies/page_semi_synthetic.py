"""The tables of docs/results/semi-synthetic.md, from docs/results/tables/semi-synthetic.parquet.

The same table holds runs that docs/results/beyond.md compares with them, each under the name of its set.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from math import fsum
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from keep import read, results_of
from make_page import TABLES, difference, table
from removed_heads import SHOWN

from normal_guidance.core.methods import method_title
from normal_guidance.evaluation.study import SEMI_SYNTHETIC
from normal_guidance.evaluation.study_folder import FORMS, SCORES
from normal_guidance.reports.localization_table import CAPTION, COLUMNS
from normal_guidance.reports.study_tables import Results, collect
from normal_guidance.statistics.differences import Claim, Difference, claims
from normal_guidance.statistics.differences import differences as test
from normal_guidance.statistics.number_format import digits
from normal_guidance.statistics.scores import Metric, Scores
from normal_guidance.statistics.split_results import SplitResults
from normal_guidance.training.run_folder import REPORT

PAPER = "semi-synthetic"
"""The set of the paper's nine methods and the oracle."""

COMPARED: dict[Metric, str] = {
    "localization_auroc": "Localization AUROC",
    "localization_auprc": "Localization AUPRC",
    "scan_auroc": "Scan AUROC",
}


@cache
def runs(*sets: str) -> dict[tuple[str, int], dict[str, Any]]:
    """Method and seed -> row of the table, of these sets."""
    found = read(TABLES / "semi-synthetic.parquet")
    return {(row["method"], row["seed"]): row for row in found if row["set"] in sets}


@contextmanager
def run_folders(name: str) -> Iterator[Path]:
    """The reports of a set as the run folders that they come from, so that the library reads them."""
    with TemporaryDirectory() as folder:
        for (method, seed), row in runs(name).items():
            run = Path(folder, method, str(seed))
            run.mkdir(parents=True)
            (run / (SCORES if method in FORMS else REPORT)).write_text(row["report"], encoding="utf-8")
        yield Path(folder)


def collected() -> Results:
    """What `nguide reproduce` tells about the runs."""
    with run_folders(PAPER) as folder:
        return collect(folder, SEMI_SYNTHETIC.name)


def scores(name: str) -> dict[tuple[str, int], Scores]:
    """Method and seed -> what each run of a set reached on the test scans."""
    found = {}
    for method, seed in sorted(runs(name), key=lambda key: SHOWN.index(key[0])):
        report = json.loads(runs(name)[method, seed]["report"])
        reached = report["scores"][FORMS[method][0]] if method in FORMS else report["winners"][0]["test"]
        found[method, seed] = Scores(**reached)
    return found


def splits(*sets: str) -> list[SplitResults]:
    """Per-scan results of each seed, of methods that have them for every seed."""
    own = {key: row for key, row in runs(*sets).items() if row["auroc"] is not None}
    methods = [method for method in SHOWN if all((method, seed) in own for seed in SEMI_SYNTHETIC.seeds)]
    made = []
    for seed in SEMI_SYNTHETIC.seeds:
        results = {method: results_of(own[method, seed]) for method in methods}
        labels = results[methods[0]][0]
        ids = tuple(f"{seed}-{number:06}" for number in range(len(labels)))  # in this order they are resampled
        made.append(SplitResults(ids, ids, labels, {method: one for method, (_, one) in results.items()}))
    return made


def compare(method: str, *sets: str) -> dict[tuple[str, Metric], Difference]:
    """One method against every other of these sets in localization and scan AUROC, with Holm's correction over them."""
    tested = splits(*sets)
    metrics: tuple[Metric, ...] = ("localization_auroc", "scan_auroc")
    claimed = [
        Claim(method, other, metric)
        for metric in metrics
        for other in tested[0].methods
        if other != method and (metric != "scan_auroc" or other != "centered_gaussian")
    ]
    return {(one.against, one.metric): one for one in test(tested, claimed)}


def tables() -> str:
    """What was computed with what, the paper's tables, every seed, and what validation chose."""
    _, body = collected().markdown().split("\n", 1)
    return body.strip()


def differences() -> str:
    """Every difference that the paper's text is about; those that are shown are bold."""
    tested = splits(PAPER)
    found = {(one.method, one.against, one.metric): one for one in test(tested, claims(list(tested[0].methods)))}
    rows = [
        [
            *(method_title(name, PAPER) for name in pair),
            *(difference(found.get((*pair, metric))) for metric in COMPARED),
        ]
        for pair in dict.fromkeys((method, against) for method, against, _ in found)
    ]
    return table(["Method", "Against", *COMPARED.values()], rows)


def measures() -> str:
    """Hits, errors and overlaps: means over the seeds."""
    columns = {name: heading for name, heading in COLUMNS.items() if name != "peak_error_mm"}
    rows = []
    for method in dict.fromkeys(
        method for method in SHOWN for seed in SEMI_SYNTHETIC.seeds if (method, seed) in runs(PAPER)
    ):
        seeds: Sequence[Any] = [runs(PAPER)[method, seed]["measures"] for seed in SEMI_SYNTHETIC.seeds]
        means = {name: fsum(one[name] for one in seeds) / len(seeds) for name in columns}
        shown = (f"{value:.1f}" if name.startswith("peak_error") else digits(value) for name, value in means.items())
        rows.append([method_title(method, PAPER), *shown])
    caption = CAPTION.format(beyond="", seeds="3 splits")  # skill was not measured when the runs were made
    return f"{caption}\n\n{table(['Method', *columns.values()], rows)}"


SECTIONS = {section.__name__: section for section in (tables, differences, measures)}
