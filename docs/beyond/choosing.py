"""Lambda without slice labels: what each criterion would choose, and how far that is from what slice labels choose."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from statistics import fmean

import numpy as np
from measured.text import short, table

from beyond.points import CHOOSING, plain, title
from beyond.results import Found, Result, Winner
from beyond.tables import IN_PROGRESS
from normal_guidance.statistics.number_format import digits

Worth = Callable[[Winner], float]
"""Of a lambda's winner; the highest is chosen."""


@dataclass(frozen=True)
class Choice:
    """What a rule chose in one seed."""

    weight: float
    localization: float
    regret: float
    """What is lost against the lambda that localizes best on the test scans."""


def localization(winner: Winner) -> float:
    """On the test scans."""
    return float(np.nanmean(winner.test.auroc))


def rules(result: Result) -> dict[str, Worth]:
    """Every criterion that all lambdas have a value of, between what is done now and what slice labels would do."""
    names = [name for name in result.winners[0].criteria if all(name in one.criteria for one in result.winners)]
    return {
        "validation scan AUROC": _val_auroc,
        **{name: partial(_criterion, name) for name in names},
        "slice labels of the validation scans": _val_localization,
    }


def _val_auroc(winner: Winner) -> float:
    assert winner.val_auroc is not None
    return winner.val_auroc


def _criterion(name: str, winner: Winner) -> float:
    return winner.criteria[name]


def _val_localization(winner: Winner) -> float:
    assert winner.val_localization is not None
    return winner.val_localization


def choose(result: Result, worth: Worth) -> Choice:
    """The first lambda of the highest worth."""
    chosen = max(result.winners, key=worth)
    best = max(map(localization, result.winners))
    return Choice(chosen.weight, localization(chosen), best - localization(chosen))


def choices(found: Found, method: str) -> dict[str, list[Choice]]:
    """Rule -> its choice in every seed."""
    results = [
        result for (job, _), result in sorted(found.items(), key=lambda item: item[0][1]) if job == plain(method)
    ]
    made: dict[str, list[Choice]] = {}
    for result in results:
        if result.winners:
            for name, worth in rules(result).items():
                made.setdefault(name, []).append(choose(result, worth))
    return made


def regret_table(found: Found) -> str:
    """One row a rule: for each method the lambdas that it chose, and its regret; the mean regret over methods last."""
    by_method = {method: made for method in CHOOSING if (made := choices(found, method))}
    if not by_method:
        return IN_PROGRESS
    header = ["lambda chosen by"]
    for method in by_method:
        header += [f"{title(method)}: λ", "localization AUROC", "regret"]
    names = list(dict.fromkeys(name for made in by_method.values() for name in made))
    rows = []
    for name in names:
        cells = [name]
        for made in by_method.values():
            of_seeds = made.get(name, [])
            cells += [", ".join(short(one.weight) for one in of_seeds), *_means(of_seeds)]
        every = [one.regret for made in by_method.values() for one in made.get(name, [])]
        rows.append([*cells, digits(fmean(every))])
    return table([*header, "regret, all"], rows)


def _means(of_seeds: list[Choice]) -> list[str]:
    if not of_seeds:
        return ["-", "-"]
    return [digits(fmean(one.localization for one in of_seeds)), digits(fmean(one.regret for one in of_seeds))]
