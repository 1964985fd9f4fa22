"""The summary of docs/results/field.md: method by dataset."""

from __future__ import annotations

from collections.abc import Callable

from field_tables import LOCALIZATION, ORDER, SCAN, measured, title
from make_page import table
from page_fit import GUESSES

from normal_guidance.statistics.number_format import NOTHING, digits

SETS = {"prostate-70": "PROSTATEx (MRI)", "ecg": "MIT-BIH (ECG)", "head": "Head phantoms (drawn CT)"}


def summary() -> str:
    """Localization and scan AUROC of every method on every set; the best of a column is bold."""
    found = {name: {one.method: one for one in measured(name)} for name in SETS}
    columns = [(name, metric) for name in SETS for metric in (LOCALIZATION, SCAN)]
    best = {
        (name, metric): max(
            one.value[metric] for one in found[name].values() if metric in one.value and one.method not in GUESSES
        )
        for name, metric in columns
    }

    def cell(method: str, name: str, metric: str) -> str:
        one = found[name].get(method)
        if one is None or metric not in one.value:
            return NOTHING
        text = digits(one.value[metric])
        return f"**{text}**" if one.value[metric] == best[name, metric] else text

    rows = [
        [title(method), *(cell(method, name, metric) for name, metric in columns)]
        for method in ORDER
        if any(method in own for own in found.values())
    ]
    names = [f"{SETS[name]}: {'localization' if metric == LOCALIZATION else 'scan AUROC'}" for name, metric in columns]
    return table(["Method", *names], rows)


SECTIONS: dict[str, Callable[[], str]] = {"summary": summary}
