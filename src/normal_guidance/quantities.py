"""Counts, sizes and times as people read them."""

from __future__ import annotations

from datetime import timedelta

LARGEST_SEED = 2**31 - 1
"""The largest seed of folds: scikit-learn takes less than 2**32, and each repeat has the next one."""


def count_text(count: int, what: str) -> str:
    """Return a number of things; a plural ends in s."""
    return f"{count:,} {what}{'' if count == 1 else 's'}"


def size_text(count: int) -> str:
    """Return bytes in the largest unit that fits."""
    for name, size in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count >= size:
            return f"{count / size:,.1f} {name}"
    return f"{count} B"


def time_text(seconds: float | int) -> str:
    """Return seconds as hours, minutes and seconds."""
    return str(timedelta(seconds=round(seconds)))
