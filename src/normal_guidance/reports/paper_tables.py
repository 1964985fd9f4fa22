"""The paper's tables with our numbers beside the published ones, as Markdown, LaTeX, CSV and JSON.

Markdown and LaTeX are for reading: three digits, like the paper's. CSV and JSON are for computing: every digit, one
record per number, the same columns for every dataset, and an empty field (null) where there is no number.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, cast

from normal_guidance.core.guidance import DIVERGENCE_TITLES, DIVERGENCES, DivergenceName
from normal_guidance.core.methods import CEILING, COMPARED, EVERY_METHOD, NAMED, method_title
from normal_guidance.core.metrics import PUBLISHED_SD, MeanSd, SdKind, mean_and_sd
from normal_guidance.errors import UserError
from normal_guidance.evaluation.published import published, published_sd_kind, published_seed, published_sensitivity
from normal_guidance.presentation.text_tables import LATEX_HEAD, Grid, as_csv, as_json
from normal_guidance.statistics.number_format import NOTHING, digits, signed, thousandths, yes_no
from normal_guidance.statistics.scores import METRICS, Metric, Scores

TITLES: dict[Metric, str] = {
    "localization_auroc": "Localization AUROC",
    "localization_auprc": "Localization AUPRC",
    "scan_auroc": "Scan AUROC",
    "scan_auprc": "Scan AUPRC",
}

ROUNDING = 0.0005
"""Published numbers are rounded to three digits: the true mean, and the true sd, may lie this far off."""

RULE = "Inside 2 sd: |difference| ≤ 2 × published sd, .0005 of rounding allowed on the published mean and on that sd."


@dataclass(frozen=True)
class Comparison:
    """One metric of one method: our value of every seed, and the published mean and sd (None where there is none)."""

    metric: Metric
    values: tuple[float, ...]
    """One per seed; empty where the method has no such score."""
    sd_kind: SdKind
    published: MeanSd | None

    @property
    def ours(self) -> MeanSd | None:
        """Mean and sd over the seeds."""
        return over_seeds(self.values, self.sd_kind) if self.values else None

    @property
    def difference(self) -> float | None:
        """Ours minus published."""
        return self.ours.mean - self.published.mean if self.ours and self.published else None

    @property
    def inside_2_sd(self) -> bool | None:
        """Whether ours agrees with the published mean (see `RULE`); None where either is missing or NaN."""
        if self.published is None or self.difference is None or math.isnan(self.difference):
            return None
        # The mean as printed may be off by ROUNDING, and so may the sd, which counts twice.
        return abs(self.difference) <= 2 * (self.published.sd + ROUNDING) + ROUNDING

    def record(self) -> dict[str, object]:
        """The columns that CSV and JSON share."""
        return {
            "ours_mean": self.ours and self.ours.mean,
            "ours_sd": self.ours and self.ours.sd,
            "sd_kind": self.sd_kind,
            "published_mean": self.published and self.published.mean,
            "published_sd": self.published and self.published.sd,
            "difference": self.difference,
            "inside_2_sd": self.inside_2_sd,
        }


def over_seeds(values: Sequence[float], kind: SdKind) -> MeanSd:
    """Mean and sd over seeds; the sd of one seed is NaN, because 0 would look like agreement."""
    number = mean_and_sd(values, kind)
    return number if len(values) > 1 else replace(number, sd=math.nan)


def mean_sd(number: MeanSd | None) -> str:
    """The text that the paper would print, without an sd for one seed, or "-" where there is no number."""
    if number is None or math.isnan(number.mean):
        return NOTHING
    return digits(number.mean) if math.isnan(number.sd) else f"{digits(number.mean)} ± {digits(number.sd)}"


@dataclass(frozen=True)
class MethodRow:
    """One method's row in all four tables: its scores, one per seed, and its cells, one per metric of `METRICS`."""

    method: str
    title: str
    seeds: tuple[int, ...]
    scores: tuple[Scores, ...]
    cells: tuple[Comparison, ...]


@dataclass(frozen=True)
class PaperTables:
    """The four result tables of one dataset and the seeds behind them; made by `paper_tables`."""

    dataset: str
    seeds: tuple[int, ...]
    """The seeds of all rows together."""
    rows: tuple[MethodRow, ...]

    def markdown(self) -> str:
        """Four tables and the seeds, for GitHub."""
        return "\n".join(grid.markdown() for grid in self.grids())

    def latex(self) -> str:
        r"""The same for `\input`, with booktabs and graphicx."""
        return "\n".join([LATEX_HEAD, *(grid.latex() for grid in self.grids())])

    def csv(self) -> str:
        """One line per table and method."""
        return as_csv([record for record, _ in self._records()])

    def json(self) -> str:
        """The same records as CSV, and the values of every seed with the published ones."""
        tables = [record | {"ours_per_seed": cell.values} for record, cell in self._records()]
        return as_json({"rule": RULE, "tables": tables, "per_seed": list(self._seed_records())})

    def _records(self) -> Iterator[tuple[dict[str, object], Comparison]]:
        for i, metric in enumerate(METRICS):
            for row in self.rows:
                cell, key = row.cells[i], {"dataset": self.dataset, "table": metric, "method": row.method}
                yield key | cell.record() | {"seeds": row.seeds}, cell

    def _seed_records(self) -> Iterator[dict[str, Any]]:
        for row in self.rows:
            for seed, scores in zip(row.seeds, row.scores, strict=True):
                known = {f"published_{m}": published_seed(m, row.method, self.dataset, seed) for m in METRICS}
                yield {"method": row.method, "seed": seed} | asdict(scores) | known

    def grids(self) -> Iterator[Grid]:
        """The four tables, then every seed."""
        for i, metric in enumerate(METRICS):
            yield self._grid(metric, [row.cells[i] for row in self.rows])
        yield self._seed_grid()

    def _grid(self, metric: Metric, column: Sequence[Comparison]) -> Grid:
        header = ["Method", "Ours"]
        cells = [[self._label(row), mean_sd(cell.ours)] for row, cell in zip(self.rows, column, strict=True)]
        spread = f"{self._sd_note(metric, column)} over " if len(self.seeds) > 1 else "From "
        caption = f"{spread}{_count_seeds(self.seeds)}."
        if any(cell.published for cell in column):
            header += ["Published", "Difference", "Inside 2 sd"]
            caption = f"{caption} {RULE}"
            for shown, cell in zip(cells, column, strict=True):
                shown += [mean_sd(cell.published), signed(cell.difference), yes_no(cell.inside_2_sd)]
        return Grid(f"{TITLES[metric]}, {self.dataset}", caption, header, cells)

    def _label(self, row: MethodRow) -> str:
        """The title, with the number of seeds if other rows have more."""
        fewer = f" ({len(row.seeds)} of {len(self.seeds)} seeds)" if len(row.seeds) < len(self.seeds) else ""
        return f"{row.title}{fewer}"

    def _sd_note(self, metric: Metric, column: Sequence[Comparison]) -> str:
        usual, pairs = PUBLISHED_SD[metric.partition("_")[0]], zip(self.rows, column, strict=True)
        others = [f"{row.title}: {cell.sd_kind} sd" for row, cell in pairs if cell.sd_kind != usual]
        return f"Mean ± {usual} sd" + (f" ({', '.join(others)}, as in the paper)" if others else "")

    def _seed_grid(self) -> Grid:
        records, titles = list(self._seed_records()), {row.method: row.title for row in self.rows}
        columns: list[tuple[str, str]] = []
        for metric in METRICS:
            columns.append((metric, TITLES[metric]))
            if any(record[f"published_{metric}"] is not None for record in records):
                columns.append((f"published_{metric}", "Published"))
        rows = [
            [titles[record["method"]], str(record["seed"]), *(digits(record[name]) for name, _ in columns),
             str(record["localized"]), str(record["left_out"])]
            for record in records
        ]  # fmt: skip
        header = ["Method", "Seed", *(title for _, title in columns), "Localized", "Left out"]
        caption = (
            "Localized: positive scans that localization was measured on. Left out: positive scans whose slice labels "
            "are missing or all of one class."
            + (" Published: from the authors' notebooks." if len(columns) > 4 else "")
        )
        return Grid(f"Every seed, {self.dataset}", caption, header, rows)


def paper_tables(results: Mapping[str, Mapping[int, Scores]], dataset: str) -> PaperTables:
    """The paper's tables of `results`: method or "ceiling" -> seed -> `Scores`.

    Methods come in the order of `METHODS`; those without results are not shown, and those with fewer seeds than others
    say so. Published numbers stand beside ours where the paper has this dataset ("semi-synthetic", "head-ct",
    "chest-ct", "abdomen-ct").
    """
    _check_results(results)
    names = (*COMPARED, CEILING)
    if unknown := [method for method in results if method not in names]:
        raise UserError(f"method {unknown[0]!r} is unknown; choose one of {', '.join(names)}")
    seeds = tuple(sorted({seed for of_seeds in results.values() for seed in of_seeds}))
    rows = [_row(method, results[method], dataset) for method in names if method in results]
    return PaperTables(dataset, seeds, tuple(rows))


def _row(method: str, of_seeds: Mapping[int, Scores], dataset: str) -> MethodRow:
    seeds = tuple(sorted(of_seeds))
    scores = tuple(of_seeds[seed] for seed in seeds)
    cells = tuple(
        Comparison(
            metric,
            _values(scores, metric, method),
            published_sd_kind(metric, method, dataset),
            published(metric, method, dataset),
        )
        for metric in METRICS
    )
    return MethodRow(method, method_title(method, dataset), seeds, scores, cells)


@dataclass(frozen=True)
class SettingRow:
    """One divergence with one lambda (`weight`): its cells, one per metric of `METRICS`."""

    divergence: DivergenceName
    weight: float
    cells: tuple[Comparison, ...]


@dataclass(frozen=True)
class SensitivityTable:
    """How a guided method depends on divergence and lambda; made by `sensitivity_table`."""

    dataset: str
    method: str
    seeds: tuple[int, ...]
    rows: tuple[SettingRow, ...]

    def markdown(self) -> str:
        """For GitHub, the best of each column in bold."""
        return self.grid().markdown()

    def latex(self) -> str:
        r"""The same for `\input`, with booktabs and graphicx."""
        return "\n".join([LATEX_HEAD, self.grid().latex()])

    def csv(self) -> str:
        """One line per metric and setting."""
        return as_csv([record for record, _ in self._records()])

    def json(self) -> str:
        """The same records as CSV, with the values of every seed."""
        tables = [record | {"ours_per_seed": cell.values} for record, cell in self._records()]
        return as_json({"rule": RULE, "tables": tables})

    def _best(self, i: int) -> list[bool]:
        """Which rows have the highest mean of metric i; means that print alike count as equal."""
        means = [cell.mean if (cell := row.cells[i].ours) else math.nan for row in self.rows]
        finite = [thousandths(mean) for mean in means if math.isfinite(mean)]
        return [math.isfinite(mean) and thousandths(mean) == max(finite) for mean in means]

    def _records(self) -> Iterator[tuple[dict[str, object], Comparison]]:
        for i, metric in enumerate(METRICS):
            for row, best in zip(self.rows, self._best(i), strict=True):
                key = {"dataset": self.dataset, "table": metric, "method": self.method}
                setting = {"divergence": row.divergence, "lambda": row.weight}
                yield key | setting | row.cells[i].record() | {"best": best, "seeds": self.seeds}, row.cells[i]

    def grid(self) -> Grid:
        """One row per setting."""
        header = ["Divergence", "λ"]
        rows = [[DIVERGENCE_TITLES[row.divergence], f"{row.weight:g}"] for row in self.rows]
        bold: set[tuple[int, int]] = set()
        for i, metric in enumerate(METRICS):
            bold |= {(r, len(header)) for r, best in enumerate(self._best(i)) if best}
            header.append(TITLES[metric])
            beside = any(row.cells[i].published for row in self.rows)
            header += ["Published"] * beside
            for shown, row in zip(rows, self.rows, strict=True):
                shown += [mean_sd(row.cells[i].ours), *([mean_sd(row.cells[i].published)] * beside)]
        seeds = f"from {_count_seeds(self.seeds)}"
        if len(self.seeds) > 1:
            seeds = f"mean ± sd over {_count_seeds(self.seeds)}: population sd for localization, sample sd for scans"
        caption = f"{EVERY_METHOD[self.method].title}, {seeds}. The best of ours is bold."
        return Grid(f"Sensitivity to divergence and λ, {self.dataset}", caption, header, rows, frozenset(bold))


def sensitivity_table(
    results: Mapping[tuple[str, float], Mapping[int, Scores]], dataset: str, method: str = "ng"
) -> SensitivityTable:
    """The sensitivity of a guided method: (divergence, lambda) -> seed -> `Scores`, the same seeds for all.

    Divergences come in the order of `DIVERGENCES`, lambda ascending. Published numbers stand beside ours for "ng" on
    "head-ct", the only such table in the paper.
    """
    _check_results(results)
    if method not in EVERY_METHOD or not EVERY_METHOD[method].guided:
        guided = ", ".join(name for name in NAMED if NAMED[name].guided)
        raise UserError(f"method {method!r} has no guidance to vary; choose one of {guided}")
    order: list[str] = list(DIVERGENCES)
    if unknown := [divergence for divergence, _ in results if divergence not in order]:
        raise UserError(f"divergence {unknown[0]!r} is unknown; choose one of {', '.join(order)}")
    seeds = tuple(sorted(next(iter(results.values()))))
    for setting, of_seeds in results.items():
        if tuple(sorted(of_seeds)) != seeds:
            # Otherwise the best setting would be the one with the kindest seeds.
            raise UserError(
                f"{setting} has seeds {sorted(of_seeds)}, not {list(seeds)}; give the same seeds for all settings"
            )
    settings = sorted(results, key=lambda setting: (order.index(setting[0]), setting[1]))
    rows = []
    for setting in settings:
        scores = [results[setting][seed] for seed in seeds]
        cells = _compare_setting(scores, setting, dataset, method)
        rows.append(SettingRow(cast(DivergenceName, setting[0]), setting[1], cells))
    return SensitivityTable(dataset, method, seeds, tuple(rows))


def _compare_setting(
    scores: Sequence[Scores], setting: tuple[str, float], dataset: str, method: str
) -> tuple[Comparison, ...]:
    return tuple(
        Comparison(
            metric,
            _values(scores, metric, str(setting)),
            published_sd_kind(metric, method, dataset),
            published_sensitivity(metric, dataset, *setting) if method == "ng" else None,
        )
        for metric in METRICS
    )


def _check_results(results: Mapping[Any, Mapping[int, Scores]]) -> None:
    if not results:
        raise UserError("there are no results for a table; score at least one method")
    for name, of_seeds in results.items():
        if not of_seeds:
            raise UserError(f"{name!r} has no scores; give one per seed, or leave it out")


def _values(scores: Sequence[Scores], metric: Metric, name: str) -> tuple[float, ...]:
    """One value per seed, or none at all where the method has no such score."""
    values = [value for one in scores if (value := getattr(one, metric)) is not None]
    if values and len(values) < len(scores):
        raise UserError(f"{name!r} has {metric} for {len(values)} of {len(scores)} seeds; score all of them or none")
    return tuple(values)


def _count_seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' * (len(seeds) > 1)} ({', '.join(map(str, seeds))})"
