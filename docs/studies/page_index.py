"""The tables of docs/results/index.md: who wins where, and what to expect on real data."""

from __future__ import annotations

from collections.abc import Callable

from field_tables import GUESSES, LOCALIZATION, METRICS, Measured, measured, title
from make_page import table
from page_field import SETS
from page_fit import gain
from removed_heads import COMMITTEE

from normal_guidance.core.methods import CEILING
from normal_guidance.show.text_tables import NOTHING, digits, signed
from normal_guidance.statistics.differences import Difference

REAL = ("prostate-70", "ecg")


def best_other(name: str) -> Measured:
    """The method beside `nguide fit` that localizes best on a set."""
    return next(one for one in measured(name) if one.method not in (COMMITTEE, CEILING, *GUESSES))


def winners() -> str:
    """One row a set: `nguide fit`, the best other method, Normal Guidance, ABMIL, the best guess, the best possible."""
    rows = []
    for name, heading in SETS.items():
        known = {one.method: one for one in measured(name)}
        other = best_other(name)
        guess = next(one for one in measured(name) if one.method in GUESSES)
        cells = (_both(known.get(method)) for method in ("ng", "abmil"))
        lead = _turned(other.beyond[LOCALIZATION])
        best = f"{_both(other)} ({title(other.method)})"
        bound = _both(known.get(CEILING))
        rows.append([heading, _both(known[COMMITTEE]), best, lead, *cells, digits(guess.value[LOCALIZATION]), bound])
    header = ["Data", title(COMMITTEE), "Best other method", "Lead of nguide fit in localization"]
    return table([*header, title("ng"), title("abmil"), "Best guess by position", "Best possible"], rows)


def expect() -> str:
    """Scores with intervals on real data: `nguide fit`, the best other method and Normal Guidance."""
    rows = []
    for name in REAL:
        known = {one.method: one for one in measured(name)}
        for method in dict.fromkeys((COMMITTEE, best_other(name).method, "ng")):
            one = known[method]
            cells = (f"{digits(one.value[m])} [{', '.join(map(digits, one.interval[m]))}]" for m in METRICS)
            rows.append([SETS[name], title(method), *cells])
    return table(["Data", "Method", "Slices: localization AUROC", "Scans: scan AUROC"], rows)


def _both(one: Measured | None) -> str:
    return NOTHING if one is None else " / ".join(digits(one.value[metric]) for metric in METRICS)


def _turned(one: Difference) -> str:
    """What `nguide fit` has beyond the other method, from what that has beyond `nguide fit`."""
    words = f"{signed(-one.estimate)} [{digits(-one.high)}, {digits(-one.low)}]"
    return f"**{words}**" if gain(one).startswith("**") else words


SECTIONS: dict[str, Callable[[], str]] = {"winners": winners, "expect": expect}
