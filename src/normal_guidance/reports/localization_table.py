"""Localization as hits, errors in slices and mm, and overlaps: one table of all methods."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from normal_guidance.core.method_names import method_title
from normal_guidance.presentation.text_tables import LATEX_HEAD, Grid, as_csv, as_json, write_page
from normal_guidance.statistics.localization import LocalizationMeasures
from normal_guidance.statistics.number_format import NOTHING, digits

COLUMNS = {
    "top_1_hit": "Top-1 hit",
    "top_3_hit": "Top-3 hit",
    "top_5_hit": "Top-5 hit",
    "peak_error_slices": "Peak error (slices)",
    "peak_error_mm": "Peak error (mm)",
    "overlap_50": "Overlap 50 %",
    "overlap_90": "Overlap 90 %",
    "attention_on_positives": "Attention on positives",
}

CAPTION = (
    "Positive test scans with both kinds of slices. Top-k hit: one of the k slices of the highest attention is "
    "positive. Peak error: from the highest attention to the nearest positive slice, median over scans. Overlap: "
    "intersection over union of the shortest interval that holds 50 or 90 % of the attention with the true blocks. "
    "Means over scans, then over {seeds}."
)


@dataclass(frozen=True)
class Measures:
    """The results of `localization_measures`: method -> seed -> measures."""

    dataset: str
    found: Mapping[str, Mapping[int, LocalizationMeasures]]

    def grid(self) -> Grid:
        """The table for reading, without measures that no scan has (mm, where positions are unknown)."""
        means = {method: self._means(method) for method in self.found}
        columns = [name for name in COLUMNS if any(math.isfinite(own[name]) for own in means.values())]
        rows = [
            [method_title(method, self.dataset), *(_cell(name, own[name]) for name in columns)]
            for method, own in means.items()
        ]
        seeds = max((len(of_seeds) for of_seeds in self.found.values()), default=0)
        caption = CAPTION.format(seeds=f"{seeds} split{'s' * (seeds > 1)}")
        return Grid(
            f"Where attention points, {self.dataset}", caption, ["Method", *(COLUMNS[name] for name in columns)], rows
        )

    def csv(self) -> str:
        """One line per method, seed and measure."""
        return as_csv(self._records())

    def json(self) -> str:
        """The same records as CSV."""
        return as_json({"dataset": self.dataset, "measures": self._records()})

    def write(self, folder: Path, stem: str) -> list[Path]:
        """Write `stem`.md, .tex, .csv and .json, each whole or not at all."""
        grid = self.grid()
        return write_page(folder, stem, grid.markdown(level=1), LATEX_HEAD + grid.latex(), self.csv(), self.json())

    def _means(self, method: str) -> dict[str, float]:
        summaries = [measures.summary() for measures in self.found[method].values()]
        return {name: math.fsum(one[name].value for one in summaries) / len(summaries) for name in COLUMNS}

    def _records(self) -> list[dict[str, object]]:
        return [
            {"dataset": self.dataset, "method": method, "seed": seed, "measure": name, "value": one.value,
             "kind": one.kind, "scans": one.scans}
            for method, of_seeds in self.found.items()
            for seed, measures in of_seeds.items()
            for name, one in measures.summary().items()
        ]  # fmt: skip


def _cell(name: str, value: float) -> str:
    if not math.isfinite(value):
        return NOTHING
    return f"{value:.1f}" if name.startswith("peak_error") else digits(value)
