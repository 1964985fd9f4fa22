"""The tables and the figure of docs/results/semi-synthetic.md and its appendices.

They are made from docs/results/tables/semi-synthetic.parquet, which also holds runs that docs/results/beyond.md
compares with them, each under the name of its set.
"""

from __future__ import annotations

import json
from typing import Any

import numpy as np
from field_tables import SEMI as KEPT
from make_page import IMAGES, table

from normal_guidance.core.methods import method_title
from normal_guidance.show.figure_style import save
from normal_guidance.show.text_tables import NOTHING, digits
from normal_guidance.study.experiment import SEMI_SYNTHETIC
from normal_guidance.study.reproduction import (
    INITIALISATIONS,
    INNER,
    ORIGINS,
    InitialisationTable,
    initialisation_tables,
    plot_initialisations,
)
from normal_guidance.study.study_tables import StudyTables, collect

PAPER = "semi-synthetic"
"""The set of the paper's nine methods and the oracle."""

runs, run_folders, scores = KEPT.runs, KEPT.run_folders, KEPT.scores


def collected() -> StudyTables:
    """What `nguide reproduce` tells about the runs."""
    with run_folders(PAPER) as folder:
        return collect(folder, SEMI_SYNTHETIC.name)


def summary() -> str:
    """Ours beside the published, and what other initial weights would have shown."""
    numbers: dict[tuple[str, str], dict[str, Any]] = {
        (one["table"], one["method"]): one for one in json.loads(collected().json())["tables"]
    }
    again = {one.method: one.means for one in _initialisations()[0].rows if one.origin == "chosen"}
    rows = []
    for method in dict.fromkeys(method for _, method in numbers):
        cells = [
            f"{digits(one[f'{whose}_mean'])} ± {digits(one[f'{whose}_sd'])}" if one[f"{whose}_mean"] else NOTHING
            for one in (numbers[metric, method] for metric in ("localization_auroc", "scan_auroc"))
            for whose in ("ours", "published")
        ]
        low, middle, high = np.percentile(again[method], INNER) if method in again else (np.nan,) * 3
        spread = f"{digits(middle)} [{digits(low)}, {digits(high)}]" if method in again else NOTHING
        rows.append([method_title(method, PAPER), *cells[:2], spread, *cells[2:]])
    header = ["Method", "Localization, ours", "published", "Median of 8 initial weights [95 % of means]"]
    return table([*header, "Scan AUROC, ours", "published"], rows)


def tables() -> str:
    """What was computed with what, the paper's tables, every seed, and what validation chose."""
    _, body = collected().markdown().split("\n", 1)
    return body.strip()


def initialisations() -> str:
    """What other initial weights would have shown of localization."""
    return _initialisations()[0].grid().markdown(3).strip()


def draw() -> None:
    save(plot_initialisations(_initialisations()[0]), IMAGES / "semi-synthetic.png")


def _initialisations() -> list[InitialisationTable]:
    with run_folders(*(f"{INITIALISATIONS}/{origin}" for origin in ORIGINS)) as folder:
        return initialisation_tables(folder, PAPER)


SECTIONS = {section.__name__: section for section in (summary, tables, initialisations)}
