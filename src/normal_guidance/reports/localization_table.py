"""One table of all methods: localization beyond a guess by position, hits, errors in slices and mm, and overlaps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from normal_guidance.core.methods import method_title
from normal_guidance.presentation.text_tables import LATEX_HEAD, Grid, as_csv, as_json, write_page
from normal_guidance.statistics.localization import LocalizationMeasures, Summary
from normal_guidance.statistics.number_format import NOTHING, digits, signed
from normal_guidance.statistics.skill import PatientSpecific, Skill

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

BEYOND = {"skill": "Skill", "patient_specific": "Patient-specific"}
"""Measures that a guess by position cannot reach."""

ABOUT_BEYOND = (
    "Skill: the share of the way from the best guess by position to perfect localization, by localization AUROC; 0 is "
    "as good as the guess. Patient-specific: localization AUROC minus that by other patients' attention at the same "
    "relative positions. "
)

CAPTION = (
    "Positive test scans with both kinds of slices. {beyond}Top-k hit: one of the k slices of the highest attention is "
    "positive. Peak error: from the highest attention to the nearest positive slice, median over scans. Overlap: "
    "intersection over union of the shortest interval that holds 50 or 90 % of the attention with the true blocks. "
    "Means over scans, then over {seeds}."
)


@dataclass(frozen=True)
class Measures:
    """The results of `localization_measures`, and what is beyond a guess by position: method -> seed -> measures."""

    dataset: str
    found: Mapping[str, Mapping[int, LocalizationMeasures]]
    beyond: Mapping[str, Mapping[int, tuple[Skill, PatientSpecific]]] = field(default_factory=dict)

    def grid(self) -> Grid:
        """The table for reading, without measures that no scan has (mm, where positions are unknown)."""
        means = {method: self._means(method) for method in self.found}
        titles = BEYOND | COLUMNS
        columns = [name for name in titles if any(math.isfinite(own.get(name, math.nan)) for own in means.values())]
        rows = [
            [method_title(method, self.dataset), *(_cell(name, own.get(name, math.nan)) for name in columns)]
            for method, own in means.items()
        ]
        seeds = max((len(of_seeds) for of_seeds in self.found.values()), default=0)
        about = ABOUT_BEYOND if {*columns} & {*BEYOND} else ""
        caption = CAPTION.format(beyond=about, seeds=f"{seeds} split{'s' * (seeds > 1)}")
        return Grid(
            f"Where attention points, {self.dataset}", caption, ["Method", *(titles[name] for name in columns)], rows
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
        found: dict[str, list[float]] = {}
        for name, one in ((name, one) for seed in self.found[method] for name, one in self._summary(method, seed)):
            found.setdefault(name, []).append(one.value)
        return {name: math.fsum(values) / len(values) for name, values in found.items()}

    def _summary(self, method: str, seed: int) -> Iterator[tuple[str, Summary]]:
        if seed in self.beyond.get(method, {}):
            skill, specific = self.beyond[method][seed]
            yield "skill", Summary(skill.skill, "mean", skill.scans)
            yield "patient_specific", Summary(specific.difference, "mean", specific.scans)
        yield from self.found[method][seed].summary().items()

    def _records(self) -> list[dict[str, object]]:
        return [
            {"dataset": self.dataset, "method": method, "seed": seed, "measure": name, "value": one.value,
             "kind": one.kind, "scans": one.scans}
            for method, of_seeds in self.found.items()
            for seed in of_seeds
            for name, one in self._summary(method, seed)
        ]  # fmt: skip


def _cell(name: str, value: float) -> str:
    if not math.isfinite(value):
        return NOTHING
    if name in BEYOND:
        return signed(value)
    return f"{value:.1f}" if name.startswith("peak_error") else digits(value)
