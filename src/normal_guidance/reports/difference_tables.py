"""Which differences between methods are significant, as tables and sentences."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from normal_guidance.core.methods import method_title
from normal_guidance.errors import UserError
from normal_guidance.files import read_json_as
from normal_guidance.presentation.text_tables import LATEX_HEAD, Grid, as_csv, as_json, write_page
from normal_guidance.reports.figures.comparisons import ForestRow
from normal_guidance.reports.paper_tables import TITLES
from normal_guidance.statistics.differences import LEVEL, Difference
from normal_guidance.statistics.number_format import interval, p_value, signed, yes_no
from normal_guidance.statistics.scores import METRICS, Metric
from normal_guidance.typed_json import ContentError, read_as

METHOD = (
    f"Differences are averaged over the splits. Intervals ({100 * LEVEL:g} %) and p-values come from the bootstrap "
    "over patients, paired between methods; p-values of scan AUROC come from DeLong's test, for patients with several "
    "scans and in several splits. Shown: the p-value, adjusted by Holm for all differences in this metric, is below "
    f"{1 - LEVEL:.2g}. Intervals are not corrected for the number of comparisons. The statistics are about these "
    "trained models on other patients; they do not cover other initial weights. Centered Gaussian is scored by its "
    "log-density."
)


@dataclass(frozen=True)
class Differences:
    """All tested differences of a study on one dataset."""

    dataset: str
    found: tuple[Difference, ...]

    @property
    def titles(self) -> Mapping[str, str]:
        """Titles of all methods that are compared."""
        names = {name for one in self.found for name in (one.method, one.against)}
        return {name: method_title(name, self.dataset) for name in names}

    def sentences(self, metric: Metric) -> list[str]:
        """The differences in one metric, one sentence each."""
        return [one.words(self.titles) for one in self._in(metric)]

    def forest(self, metric: Metric) -> list[ForestRow]:
        """Rows for `plot_differences`, without differences that could not be tested."""
        return [
            ForestRow(
                f"{self.titles[one.method]} − {self.titles[one.against]}", one.estimate, one.low, one.high, one.shown
            )
            for one in self._in(metric)
            if one.p == one.p
        ]

    def grids(self) -> Iterator[Grid]:
        """One table per metric."""
        for metric in METRICS:
            if rows := [self._row(one) for one in self._in(metric)]:
                header = ["Method", "Against", "Difference", "Interval", "p (Holm)", "Shown", "Scans", "Patients"]
                yield Grid(f"Differences in {TITLES[metric]}, {self.dataset}", METHOD, header, rows)

    def markdown(self) -> str:
        """The tables, each followed by its differences in words."""
        parts = [f"# {self.dataset.capitalize()}: which differences are real", ""]
        for metric, grid in zip(self._metrics(), self.grids(), strict=True):
            parts += [grid.markdown(level=2), *(f"- {sentence}" for sentence in self.sentences(metric)), ""]
        return "\n".join(parts)

    def latex(self) -> str:
        r"""The tables for `\input`, with booktabs and graphicx."""
        return "\n".join([LATEX_HEAD, *(grid.latex() for grid in self.grids())])

    def csv(self) -> str:
        """One line per difference, with all digits."""
        return as_csv(self._records()) if self.found else ""

    def json(self) -> str:
        """The same records as CSV."""
        return as_json({"dataset": self.dataset, "about": METHOD, "differences": self._records()})

    def write(self, folder: Path, stem: str) -> list[Path]:
        """Write `stem`.md, .tex, .csv and .json, each whole or not at all."""
        return write_page(folder, stem, self.markdown(), self.latex(), self.csv(), self.json())

    def _in(self, metric: Metric) -> Sequence[Difference]:
        return [one for one in self.found if one.metric == metric]

    def _metrics(self) -> list[Metric]:
        return [metric for metric in METRICS if self._in(metric)]

    def _row(self, one: Difference) -> list[str]:
        tested = one.p == one.p
        return [
            self.titles[one.method],
            self.titles[one.against],
            signed(one.estimate),
            interval(one.low, one.high) if tested else "-",
            p_value(one.p_adjusted).removeprefix("p ").removeprefix("= ") if tested else "-",
            yes_no(one.shown) if tested else "-",
            f"{one.scans:,}",
            f"{one.patients:,}",
        ]

    def _records(self) -> list[dict[str, object]]:
        return [{"dataset": self.dataset, **asdict(one), "shown": one.shown, "test": one.test} for one in self.found]


def read_differences(path: Path) -> Differences:
    """Reads the JSON of `Differences.write`, where null stands for NaN."""
    again = "write the differences again"
    content = read_json_as(path, _Content, again)
    found = []
    for number, one in enumerate(content.differences):
        record = {name: -1.0 if name in MAY_BE_NULL and value is None else value for name, value in one.items()}
        try:
            known = read_as(Difference, record, f"differences[{number}]", exact=False)
        except ContentError as error:
            raise UserError(f"{path} is damaged: {error}; {again}") from error
        missing: dict[str, Any] = {name: math.nan for name in MAY_BE_NULL if one.get(name) is None}
        found.append(replace(known, **missing))
    return Differences(content.dataset, tuple(found))


MAY_BE_NULL = ("estimate", "low", "high", "p", "p_adjusted")


@dataclass(frozen=True)
class _Content:
    """The types of the JSON of `Differences`."""

    dataset: str
    about: str
    differences: list[dict[str, Any]]
