"""Writes the tables of docs/results/semi-synthetic.md from the kept runs, as `nguide reproduce --report` makes them.

.venv/bin/python docs/show_semi_synthetic.py            prints them
.venv/bin/python docs/show_semi_synthetic.py --write    puts them into the page
"""

from __future__ import annotations

import sys
from functools import cache
from pathlib import Path

from measure_replication import show
from measured.text import difference, table

from normal_guidance.core.method_names import method_title
from normal_guidance.core.models import METHODS
from normal_guidance.evaluation.study import SEMI_SYNTHETIC, Study
from normal_guidance.reports.experiment_page import Experiment
from normal_guidance.reports.experiment_report import evaluate
from normal_guidance.reports.study_tables import collect
from normal_guidance.statistics.scores import Metric

DOCS = Path(__file__).parent
PAGE, RUNS = DOCS / "results/semi-synthetic.md", DOCS / "results/runs/semi-synthetic"
COMPARED: tuple[Metric, ...] = ("localization_auroc", "localization_auprc", "scan_auroc")


@cache
def experiment() -> Experiment:
    return evaluate(Study(SEMI_SYNTHETIC, RUNS, tuple(METHODS), SEMI_SYNTHETIC.seeds))


def tables() -> str:
    """What was computed with what, the paper's tables, every seed, and what validation chose."""
    _, body = collect(RUNS, SEMI_SYNTHETIC.name).markdown().split("\n", 1)
    return body.strip()


def differences() -> str:
    """Every difference that the paper's text is about; those that are shown are bold."""
    found = {(one.method, one.against, one.metric): one for one in experiment().differences.found}
    pairs = dict.fromkeys((method, against) for method, against, _ in found)
    rows = [
        [
            *(method_title(name, SEMI_SYNTHETIC.name) for name in pair),
            *(difference(found.get((*pair, metric))) for metric in COMPARED),
        ]
        for pair in pairs
    ]
    return table(["Method", "Against", "Localization AUROC", "Localization AUPRC", "Scan AUROC"], rows)


def measures() -> str:
    """Hits, errors and overlaps."""
    found = experiment().measures
    assert found is not None, "these scans have slice labels"
    grid = found.grid()
    return f"{grid.caption}\n\n{table(grid.header, grid.rows)}"


SECTIONS = {section.__name__: section for section in (tables, differences, measures)}


if __name__ == "__main__":
    show(PAGE, SECTIONS, write="--write" in sys.argv[1:])
