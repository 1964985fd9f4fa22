"""The table and the figure of docs/results/mitbih.md."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import field_tables
from make_page import IMAGES

SET = "ecg"
SECTIONS: dict[str, Callable[[], str]] = {"methods": partial(field_tables.of_set, SET)}


def draw() -> None:
    field_tables.draw(SET, IMAGES / "mitbih.png")
