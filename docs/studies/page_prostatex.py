"""The table and the figure of docs/results/prostatex.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import field_tables
from make_page import IMAGES

SET = "prostate-70"
SECTIONS: dict[str, Callable[[], str]] = {"methods": partial(field_tables.of_set, SET)}


def draw() -> None:
    field_tables.draw(SET, IMAGES / "prostatex.png")
