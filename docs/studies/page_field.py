"""The summary of docs/results/field.md: method by dataset."""

from __future__ import annotations

from collections.abc import Callable

from field_tables import GUESSES, LIDC, LOCALIZATION, ORDER, SCAN, SEMI, splits, title
from make_page import table

from normal_guidance.core.methods import CEILING
from normal_guidance.statistics.bootstrap import measure
from normal_guidance.statistics.number_format import NOTHING, digits
from normal_guidance.statistics.scores import Metric

SETS = {
    "prostate-70": "PROSTATEx (MRI)",
    "ecg": "MIT-BIH (ECG)",
    LIDC.name: "LIDC positions (drawn features)",
    SEMI.name: "Semi-synthetic (drawn)",
    "head": "Head phantoms (drawn CT)",
}


def summary() -> str:
    """Localization and scan AUROC of every method on every set; the best of a column is bold.

    A star marks methods that have predicted the first division alone.
    """
    columns = [(name, metric) for name in SETS for metric in (LOCALIZATION, SCAN)]
    scores = {name: measure(splits(name)) for name in SETS}
    first = {name: measure(splits(name, 1)) for name in SETS}
    own = {(name, metric): scores[name].get(metric, {}) for name, metric in columns}
    best = {
        column: max(values[method] for method in ORDER if method in values and method not in (*GUESSES, CEILING))
        for column, values in own.items()
    }

    def cell(method: str, column: tuple[str, Metric]) -> str:
        name, metric = column
        if method not in own[column]:
            alone = first[name].get(metric, {}).get(method)
            return NOTHING if alone is None else f"{digits(alone)}*"
        value = own[column][method]
        return f"**{digits(value)}**" if value == best[column] else digits(value)

    rows = [
        [title(method), *(cell(method, column) for column in columns)]
        for method in ORDER
        if any(cell(method, column) != NOTHING for column in columns)
    ]
    names = [f"{SETS[name]}: {'localization' if metric == LOCALIZATION else 'scan AUROC'}" for name, metric in columns]
    return table(["Method", *names], rows)


SECTIONS: dict[str, Callable[[], str]] = {"summary": summary}
