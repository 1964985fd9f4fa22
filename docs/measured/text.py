"""How numbers and tables are written."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from torch import Tensor

from normal_guidance.statistics.differences import Difference
from normal_guidance.statistics.number_format import NOTHING, p_value, signed
from normal_guidance.statistics.number_format import digits as metric_digits


def digits(value: float, places: int = 3) -> str:
    """.689 for 0.689, as the paper's readers see it."""
    return f"{value:.{places}f}".replace("0.", ".", 1) if abs(value) < 1 else f"{value:.{places}f}"


def short(value: float) -> str:
    """Three significant digits, or a whole number."""
    if value >= 1000:
        return f"{value:,.0f}"
    return f"{value:.3g}".removeprefix("0") or "0"


def share(flags: Tensor) -> str:
    return f"{flags.double().mean():.0%}"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    cells = [list(header), ["---"] * len(header), *([str(cell) for cell in row] for row in rows)]
    return "\n".join(f"| {' | '.join(row)} |" for row in cells)


def difference(one: Difference | None) -> str:
    """With interval and adjusted p; bold if it is shown."""
    if one is None:
        return NOTHING
    if one.p != one.p:
        return f"{signed(one.estimate)} (too few scans)"
    interval = f"[{metric_digits(one.low)}, {metric_digits(one.high)}]"
    words = f"{signed(one.estimate)} {interval}, {p_value(one.p_adjusted)}"
    return f"**{words}**" if one.shown else words
