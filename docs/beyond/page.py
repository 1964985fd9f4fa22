"""docs/results/beyond.md: its tables and figures, each between its own two comments."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from matplotlib.figure import Figure
from measure_replication import put

from beyond.choosing import regret_table
from beyond.figures import data_rows, form_rows, plot_data, plot_forms
from beyond.points import AXES, Protocol
from beyond.results import Found
from beyond.tables import IN_PROGRESS, Row, about, axis_table, data_tables
from normal_guidance.errors import UserError
from normal_guidance.files import write_atomically
from normal_guidance.presentation.figure_style import save

DOCS = Path(__file__).resolve().parents[1]
PAGE, IMAGES = DOCS / "results" / "beyond.md", DOCS / "images"

FIGURES: dict[str, tuple[str, Callable[[Found], list[Row]], Callable[[list[Row]], Figure]]] = {
    "form": ("Localization AUROC against scan AUROC of every form", form_rows, plot_forms),
    "data": ("Localization and scan AUROC over the variants of the data", data_rows, plot_data),
}
"""Axis -> what its figure shows, and how it is made."""

FILES = {"form": "beyond-forms.png", "data": "beyond-data.png"}


def sections(found: Found, protocol: Protocol) -> dict[str, str]:
    """The content of every place in the page."""
    made = {"about": about(found, protocol)}
    for axis in AXES:
        made[axis] = data_tables(found) if axis == "data" else axis_table(found, axis)
    made["choice"] = regret_table(found)
    made |= {f"figure_{axis}": _shown(axis) if FIGURES[axis][1](found) else IN_PROGRESS for axis in FIGURES}
    return made


def _shown(axis: str) -> str:
    return f"![{FIGURES[axis][0]}](../images/{FILES[axis]})"


def draw(found: Found, images: Path = IMAGES) -> list[Path]:
    """Writes those figures that something is known for."""
    drawn = []
    for axis, (_, rows_of_axis, plot) in FIGURES.items():
        if rows := rows_of_axis(found):
            drawn.append(save(plot(rows), images / FILES[axis]))
    return drawn


def write_page(found: Found, protocol: Protocol, page: Path = PAGE, images: Path = IMAGES) -> None:
    """Tables and figures into the page; words around them stay."""
    if protocol.is_trial:
        raise UserError("the page is about the whole data; leave --sizes and --features out, or show with --tables")
    text = page.read_text(encoding="utf-8")
    for name, made in sections(found, protocol).items():
        text = put(text, name, made)
    draw(found, images)
    write_atomically(page, text.encode())
