"""The table and the figure of docs/results/lidc-positions.md, from docs/results/tables/lidc-positions.parquet."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import field_tables
from field_tables import LIDC
from make_page import IMAGES

SECTIONS: dict[str, Callable[[], str]] = {"methods": partial(field_tables.of_set, LIDC.name)}


def draw() -> None:
    field_tables.draw(LIDC.name, IMAGES / "lidc-positions.png")
