"""Writes the tables of docs/results/phantoms.md from what `nguide experiment` left for the three layouts.

    .venv/bin/python docs/show_phantoms.py            prints them
    .venv/bin/python docs/show_phantoms.py --write    puts them into the page

docs/results/runs/phantoms holds tables.json, differences.json and measures.json of each study.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any

from measure_replication import show
from measured.text import difference, table

from normal_guidance.core.method_names import CEILING, method_title
from normal_guidance.core.models import EVERY_METHOD
from normal_guidance.reports.difference_tables import read_differences
from normal_guidance.statistics.differences import COUNTERPARTS, RIVALS, Difference
from normal_guidance.statistics.number_format import digits
from normal_guidance.statistics.scores import METRICS, Metric

DOCS = Path(__file__).parent
PAGE, STUDIES = DOCS / "results/phantoms.md", DOCS / "results/runs/phantoms"
LAYOUTS = ("head", "chest", "abdomen")
LOCALIZATION: Metric = "localization_auroc"

Records = list[dict[str, Any]]


def records(layout: str, document: str, part: str, **wanted: object) -> Records:
    """The lines of one document of a layout's study that have these values."""
    lines: Records = json.loads((STUDIES / layout / f"{document}.json").read_text())[part]
    return [line for line in lines if all(line[name] == value for name, value in wanted.items())]


def means(metric: Metric) -> str:
    """Mean and sd of every method in each layout."""
    found = {
        layout: {one["method"]: one for one in records(layout, "tables", "tables", table=metric)} for layout in LAYOUTS
    }
    methods = [method for method in (*EVERY_METHOD, CEILING) if method in found[LAYOUTS[0]]]
    rows = [[method_title(method), *(_mean(found[layout].get(method)) for layout in LAYOUTS)] for method in methods]
    return table(["Method", *LAYOUTS], rows)


def _mean(one: dict[str, Any] | None) -> str:
    if one is None or one["ours_mean"] is None:
        return "-"
    splits = len(one["seeds"])
    return f"{digits(one['ours_mean'])} ± {digits(one['ours_sd'])}" + f" ({splits} of 3 splits)" * (splits < 3)


@cache
def tested(layout: str) -> dict[tuple[str, str, str], Difference]:
    """The differences of a layout's study by method, against what, and metric."""
    found = read_differences(STUDIES / layout / "differences.json").found
    return {(one.method, one.against, one.metric): one for one in found}


def against(metric: Metric, pairs: Iterable[tuple[str, str]]) -> str:
    """Differences of these pairs in each layout; those that are shown are bold."""
    rows = []
    for pair in pairs:
        found = [tested(layout).get((*pair, metric)) for layout in LAYOUTS]
        if any(found):
            rows.append([*map(method_title, pair), *map(difference, found)])
    return table(["Method", "Against", *LAYOUTS], rows)


GAUSSIAN = [(method, "centered_gaussian") for method in EVERY_METHOD if method not in ("max", "mean")]
PAIRS = [*COUNTERPARTS.items(), *RIVALS.items()]
CEILINGS = [(method, CEILING) for method in EVERY_METHOD if method not in ("max", "mean")]

SECTIONS: dict[str, Callable[[], str]] = {
    **{metric: partial(means, metric) for metric in METRICS if metric != "scan_auprc"},
    "gaussian": partial(against, LOCALIZATION, GAUSSIAN),
    "twins": partial(against, LOCALIZATION, PAIRS),
    "scan_twins": partial(against, "scan_auroc", PAIRS),
    "supervised": partial(against, LOCALIZATION, CEILINGS),
}


if __name__ == "__main__":
    show(PAGE, SECTIONS, write="--write" in sys.argv[1:])
