"""The first table and the figure of docs/results/robustness.md, from docs/results/tables/robustness-bits.csv.

The table has a row for each run that flipped bits (today by tests/fuzz/own_cases.py): how many ended in which way.
"""

from __future__ import annotations

import csv
from collections.abc import Callable

from make_page import IMAGES, TABLES, table
from matplotlib.figure import Figure

from normal_guidance.show.figure_style import (
    BLUE,
    GREEN,
    ORANGE,
    RED,
    WIDTH,
    save,
    styled,
)

COLORS = {"refused": GREEN, "same": BLUE, "only shown": ORANGE, "silent": RED, "traceback": "black"}
BAD = ("silent", "traceback")


def runs() -> dict[str, dict[str, int]]:
    """Run -> ending -> number of bits."""
    with (TABLES / "robustness-bits.csv").open(encoding="utf-8", newline="") as file:
        return {
            f"{row['run']}, {row['commit']}": {name: int(row[name]) for name in COLORS} for row in csv.DictReader(file)
        }


def bits() -> str:
    """One row a run; what must not be is bold."""
    rows = [
        [name, *(f"**{count:,}**" if ending in BAD and count else f"{count:,}" for ending, count in own.items())]
        for name, own in runs().items()
    ]
    return table(["", *COLORS], rows)


@styled
def figure() -> Figure:
    """The share of each ending, one bar a run."""
    drawn = Figure(figsize=(WIDTH, 0.22 * WIDTH), layout="constrained")
    panel = drawn.subplots()
    for place, own in enumerate(runs().values()):
        left = 0.0
        for ending, count in own.items():
            share = 100 * count / sum(own.values())
            panel.barh(place, share, left=left, color=COLORS[ending], label=ending if place == 0 else None)
            left += share
    panel.set_yticks(range(len(runs())), list(runs()))
    panel.invert_yaxis()
    panel.set_xlim(0, 100)
    panel.set_xlabel("Flipped bits (%)")
    drawn.legend(loc="outside upper center", ncols=len(COLORS))
    return drawn


def draw() -> None:
    save(figure(), IMAGES / "robustness.png")


SECTIONS: dict[str, Callable[[], str]] = {"bits": bits}
