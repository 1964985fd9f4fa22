"""Numbers in sentences and tables, in the style of the paper: three digits, no leading zero."""

from __future__ import annotations

import math
from collections.abc import Callable

NOTHING = "-"
"""The text for a missing number."""


def digits(value: float | None) -> str:
    """Round to three digits, halves up whatever the binary fraction; never "-.000", and "-" for NaN."""
    if value is None or not math.isfinite(value):
        return NOTHING
    whole = thousandths(value)
    return ("-" if whole < 0 else "") + f"{abs(whole) / 1000:.3f}".lstrip("0")


def thousandths(value: float) -> int:
    """The number that `digits` prints, in thousandths, to compare numbers as printed."""
    # Halves go towards +infinity, so that a difference from a printed number equals the difference of printed numbers.
    # The inner rounding removes the rounding error of a mean.
    return math.floor(round(value * 1000, 9) + 0.5)


def signed(difference: float | None) -> str:
    """Like `digits`, with a plus sign for positive numbers."""
    text = digits(difference)
    return text if text[0] == "-" or text == digits(0.0) else f"+{text}"


TOO_FEW = "too few scans for an interval"
"""Stands in the brackets of an interval that could not be made."""


def interval(low: float, high: float, number: Callable[[float], str] = digits) -> str:
    """The ends of an interval in brackets, or why there are none."""
    known = math.isfinite(low) and math.isfinite(high)
    return f"[{number(low)}, {number(high)}]" if known else f"[{TOO_FEW}]"


def yes_no(answer: bool | None) -> str:
    """A yes or no in a table, "-" for None."""
    return NOTHING if answer is None else "yes" if answer else "no"


def p_value(p: float) -> str:
    """A p-value in a sentence; never "p = .000"."""
    return f"p < {digits(0.001)}" if p < 0.001 else f"p = {digits(p)}"
