"""The results of a study, read from its folder: the paper's tables, what validation chose, and notes."""

from __future__ import annotations

import json
import math
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from normal_guidance.base.errors import UserError
from normal_guidance.base.files import read_json_as
from normal_guidance.base.records import ContentError, read_as
from normal_guidance.base.system import time_text
from normal_guidance.core.blocks import GAP, PERCENTILES
from normal_guidance.core.guidance import DIVERGENCE_TITLES, DIVERGENCES, DivergenceName
from normal_guidance.core.methods import (
    CEILING,
    COMPARED,
    EVERY_METHOD,
    NAMED,
    REFERENCES,
    SCAN_REFERENCE,
    method_title,
)
from normal_guidance.core.metrics import PUBLISHED_SD, MeanSd, SdKind, mean_and_sd
from normal_guidance.scans.index.indexing import Description
from normal_guidance.show.text_tables import (
    LATEX_HEAD,
    NOTHING,
    Grid,
    as_csv,
    as_json,
    digits,
    interval,
    p_value,
    signed,
    thousandths,
    write_page,
    yes_no,
)
from normal_guidance.statistics.differences import LEVEL, Difference
from normal_guidance.statistics.localization import LocalizationMeasures, Summary
from normal_guidance.statistics.skill import PatientSpecific, Skill
from normal_guidance.statistics.split_results import METRICS, Metric, Scores
from normal_guidance.study.experiment import (
    DATASETS,
    LOG_DENSITY,
    SENSITIVITY,
    StudyResult,
    find_results,
    reference_scores,
)
from normal_guidance.study.figures.comparisons import ForestRow
from normal_guidance.study.references import (
    Choice,
    published,
    published_choice,
    published_sd_kind,
    published_seed,
    published_sensitivity,
)
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.run import CONFIG
from normal_guidance.sweep.sweep import group_of

# The paper's tables with our numbers beside the published ones, as Markdown, LaTeX, CSV and JSON.
# Markdown and LaTeX are for reading: three digits, like the paper's. CSV and JSON are for computing: every digit, one
# record per number, the same columns for every dataset, and an empty field (null) where there is no number.


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


@dataclass(frozen=True)
class ChosenConfiguration:
    """The configuration and epoch that validation chose in one run, beside the published choice."""

    method: str
    seed: int
    divergence: str | None
    guidance_weight: float | None
    l1: float
    lr: float
    epoch: int
    val_auroc: float
    seconds: float
    """Training time of the whole run."""
    published: Choice | None

    @property
    def setting(self) -> str:
        """Divergence and lambda, for methods that have them."""
        return f"{self.divergence}, λ {self.guidance_weight:g}"

    def cells(self, label: str) -> list[str]:
        """A row of the table: its label, then the columns of `CHOSEN_HEADER`."""
        theirs = ["-", "-"] if self.published is None else [f"{number:g}" for number in self.published]
        ours = [f"{self.l1:g}", f"{self.lr:g}", str(self.epoch), f"{self.val_auroc:.4f}", f"{self.seconds:.0f}"]
        return [label, str(self.seed), *ours, *theirs]


CHOSEN_HEADER = ("Seed", "L1", "lr", "Epoch", "Validation AUROC", "Seconds", "Published L1", "Published lr")


@dataclass(frozen=True)
class Results:
    """Tables, choices and notes of a study, made by `collect`; `about` holds software, machines, dates and protocol."""

    title: str
    dataset: str
    method: str | None
    """The method of a sensitivity table; None for the paper's four tables."""
    table: PaperTables | SensitivityTable | None
    """None where no method has scores."""
    chosen: tuple[ChosenConfiguration, ...]
    notes: tuple[str, ...]
    about: Mapping[str, Any]

    def markdown(self) -> str:
        """The whole page: software and machines, tables, choices, notes."""
        head = [f"# {self.title}", "", *(f"- {line}" for line in self.about_lines()), ""]
        tables = ["## Tables", "", self.table.markdown()] if self.table else []
        chosen = [self.chosen_grid().markdown(level=2)] if self.chosen else []
        notes = ["## Notes", "", *(f"- {note}" for note in self.notes), ""] if self.notes else []
        return "\n".join([*head, *tables, *chosen, *notes])

    def chosen_grid(self) -> Grid:
        """The configuration that validation chose in every run, as a table."""
        rows = [one.cells(one.setting if self.method else method_title(one.method)) for one in self.chosen]
        header = ("Setting" if self.method else "Method", *CHOSEN_HEADER)
        shown = len(header) if any(one.published for one in self.chosen) else len(header) - len(Choice._fields)
        return Grid("What validation chose", "", header[:shown], [row[:shown] for row in rows])

    def latex(self) -> str:
        r"""The tables for `\input`; software, machines and notes stand above them as comments."""
        comments = [f"% {line}" for line in (self.title, *self.about_lines(), *self.notes)]
        return "\n".join([*comments, self.table.latex() if self.table else LATEX_HEAD])

    def csv(self) -> str:
        """One line per number, with all digits."""
        return self.table.csv() if self.table else ""

    def json(self) -> str:
        """All numbers, choices and notes, for programs."""
        numbers = json.loads(self.table.json()) if self.table else {}
        chosen = [asdict(one) | {"published": one.published and one.published._asdict()} for one in self.chosen]
        content = {
            "dataset": self.dataset,
            "method": self.method,
            "about": dict(self.about),
            "rule": RULE,
            "tables": numbers.get("tables", []),
            "per_seed": numbers.get("per_seed", []),
            "chosen": chosen,
            "notes": self.notes,
        }
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, folder: Path, stem: str) -> list[Path]:
        """Write `stem`.md, .tex, .csv and .json, each whole or not at all."""
        return write_page(folder, stem, self.markdown(), self.latex(), self.csv(), self.json())

    def about_lines(self) -> list[str]:
        """Software, machine, dates, training time and protocol behind the numbers."""
        about = self.about
        return [
            f"Software: {'; '.join(about['software'])}",
            f"Machine: {'; '.join(about['machines'])}",
            f"Date: {' to '.join(dict.fromkeys((about['dates'][0], about['dates'][-1])))}",
            f"Training time: {time_text(about['seconds'])} (h:mm:ss) for {about['runs']} runs",
            f"Departures from the paper's protocol: {_departures_line(about['departures'])}",
        ]


def collect(folder: str | Path, dataset: str) -> Results:
    """The paper's tables of every complete run of `dataset` in a study's folder.

    A method with fewer seeds than others says so in its row.
    """
    found = list(find_results(Path(folder), dataset))
    if not found:
        command = f"reproduce {dataset}" if dataset in DATASETS else f"experiment STORE --dataset {dataset}"
        raise UserError(f"{folder} holds no complete run on {dataset}; run: nguide {command} --out {folder}")
    _check_same_scans(found)
    by_method: dict[str, dict[int, Scores]] = defaultdict(dict)
    for one in found:
        if one.method not in REFERENCES and (scores := one.scores) is not None:
            by_method[one.method][one.seed] = scores
    if references := reference_scores(found):
        by_method[CEILING] = references
    table = paper_tables(by_method, dataset) if by_method else None
    printed = table is not None and any(cell.published for row in table.rows for cell in row.cells)
    what = "the paper's tables, reproduced" if printed else "the methods beside each other"
    return Results(
        title=f"{dataset.capitalize()}: {what}",
        dataset=dataset,
        method=None,
        table=table,
        chosen=tuple(_chosen(found, dataset)),
        notes=(*_unselected_notes(found), *_seeds_note(table), *_gaussian_note(found, dataset)),
        about=_about(found),
    )


def collect_sensitivity(folder: str | Path, dataset: str, method: str) -> Results:
    """The sensitivity of a method to divergence and lambda, over every complete seed in a study's folder."""
    found = list(find_results(Path(folder) / SENSITIVITY, dataset, (method,)))
    if not found:
        raise UserError(f"{folder} holds no complete sensitivity run of {method} on {dataset}; run it first")
    results: dict[tuple[str, float], dict[int, Scores]] = defaultdict(dict)
    for one in found:
        for winner in one.winners:
            if winner.test is not None:
                results[winner.config.divergence, winner.config.guidance_weight][one.seed] = winner.test
    complete = {setting: of_seeds for setting, of_seeds in results.items() if len(of_seeds) == len(found)}
    return Results(
        title=f"{dataset.capitalize()}: sensitivity of {EVERY_METHOD[method].title}",
        dataset=dataset,
        method=method,
        table=sensitivity_table(complete, dataset, method) if complete else None,
        chosen=tuple(_chosen(found, dataset)),
        notes=tuple(_left_out_notes(sorted(_settings(found) - set(complete)), results, len(found))),
        about=_about(found, axes=("divergence", "guidance_weight")),
    )


def _check_same_scans(found: Sequence[StudyResult]) -> None:
    first: dict[int, StudyResult] = {}
    for one in found:
        if one.method == SCAN_REFERENCE:
            continue  # its scans are pooled to one row each
        other = first.setdefault(one.seed, one)
        if one.fingerprints.get("test") != other.fingerprints.get("test"):
            raise UserError(
                f"{one.folder} and {other.folder} were scored on different test scans; delete one and run it again "
                "(drawn scans differ in their last bits between kinds of processor: score a study on one)"
            )


def _chosen(found: Sequence[StudyResult], dataset: str) -> Iterator[ChosenConfiguration]:
    for one in found:
        if one.run is None:
            continue
        for winner in one.run.winners:
            config, about = winner.config, winner.config.spec
            standard = one.method in EVERY_METHOD and group_of(config) == group_of(Config(one.method, seed=config.seed))
            yield ChosenConfiguration(
                method=one.method,
                seed=one.seed,
                divergence=config.divergence if about.guided else None,
                guidance_weight=None if about.regularizer is None else config.guidance_weight,
                l1=config.l1,
                lr=config.lr,
                epoch=winner.epoch,
                val_auroc=winner.val_auroc,
                seconds=one.run.seconds,
                published=published_choice(one.method, dataset, one.seed) if standard else None,
            )


def _settings(found: Sequence[StudyResult]) -> set[tuple[str, float]]:
    settings: set[tuple[str, float]] = set()
    for one in found:
        configs = read_json_as(one.folder / CONFIG, _Configs, exact=False).configs
        settings |= {(config.divergence, config.guidance_weight) for config in configs}
    return settings


@dataclass(frozen=True)
class _Configs:
    """What is read here of a run's config.json."""

    configs: list[Config]


def _left_out_notes(
    settings: Sequence[tuple[str, float]], results: Mapping[tuple[str, float], Mapping[int, Scores]], seeds: int
) -> Iterator[str]:
    for setting in settings:
        missing = seeds - len(results.get(setting, ()))
        yield f"{setting[0]}, λ {setting[1]:g}: left out, no epoch could be selected for {missing} of {seeds} seeds"


def _unselected_notes(found: Sequence[StudyResult]) -> list[str]:
    return [
        f"{method_title(one.method)}, seed {one.seed}: {one.run.note}; the tables leave it out"
        for one in found
        if one.run and one.scores is None
    ]


def _seeds_note(table: PaperTables | None) -> list[str]:
    if table is None or all(row.seeds == table.seeds for row in table.rows):
        return []
    return [
        "Some methods lack a run or a selected epoch for some seeds. Their means are over the seeds that they have, "
        "and their rows say how many."
    ]


def _gaussian_note(found: Sequence[StudyResult], dataset: str) -> list[str]:
    scores = [one.forms[LOG_DENSITY] for one in found if one.method == "centered_gaussian"]
    if not scores:
        return []
    texts = []
    for metric in METRICS[:2]:
        kind = published_sd_kind(metric, "centered_gaussian", dataset)
        number = over_seeds([getattr(one, metric) for one in scores], kind)
        texts.append(f"{TITLES[metric]} {mean_sd(number)} ({kind} sd)")
    return [
        "Centered Gaussian is scored in the form behind the published figure: positions linspace(1, S-1, S), the "
        f"density in float64, ties where it underflows. By its log-density, without ties: {', '.join(texts)}."
    ]


def _about(found: Sequence[StudyResult], axes: Sequence[str] = ()) -> dict[str, Any]:
    """Software, machines, dates and protocol; options that the study varies (`axes`) are not departures from it."""
    runs = [one for one in found if one.run]
    departures: dict[str, dict[str, Any]] = defaultdict(dict)
    for one in runs:
        own = {name: value for name, value in one.departures.items() if name not in axes}
        departures[one.method][str(one.seed)] = own
    return {
        "software": sorted({name for one in found for name in map(software, one.environments)}),
        "machines": sorted({name for one in runs or found for name in _machines(one)}),
        "dates": sorted({str(start["date"]) for one in found for start in one.environments}),
        "runs": len(runs),
        "seconds": sum(one.run.seconds for one in runs if one.run),
        "departures": departures,
    }


def _machines(one: StudyResult) -> list[str]:
    how = f", {one.precision}" if one.precision else ""
    return [f"{start['device']}{how}" for start in one.environments]


def software(versions: Mapping[str, Any]) -> str:
    """The versions of this package and of torch in one environment, as pages show them."""
    commit = versions["commit"]
    where = "installed"
    if commit:
        how = " (as stated)" if commit.get("told") else " with uncommitted changes" if commit["dirty"] else ""
        where = f"commit {commit['id'][:12]}{how}"
    return f"normal-guidance {versions['normal_guidance']}, {where}, torch {versions['torch']}"


def _departures_line(departures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """One line from method -> seed -> departures; departures that several runs share appear once."""
    runs_of: dict[str, list[str]] = defaultdict(list)
    for method, of_seeds in departures.items():
        texts = {seed: ", ".join(f"{name} {value}" for name, value in own.items()) for seed, own in of_seeds.items()}
        for text in dict.fromkeys(texts.values()):
            seeds = [seed for seed in texts if texts[seed] == text]
            runs_of[text].append(method if len(seeds) == len(texts) else f"{method} seed {', '.join(seeds)}")
    return "; ".join(f"{text} ({', '.join(runs)})" for text, runs in runs_of.items() if text) or "none"


# One table of all methods: localization beyond a guess by position, hits, errors in slices and mm, and overlaps.


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


# Which differences between methods are significant, as tables and sentences.


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


# The paper's tables about a dataset: scans and their lengths, and three tables of blocks of positive slices.


BLOCKS = f"A block may bridge up to {GAP} negative slices."


def description_tables(name: str, parts: Mapping[str, Description]) -> list[Grid]:
    """The tables of one dataset, one row for each part (for instance 'all', or 'train', 'val' and 'test')."""
    scans = Grid(
        f"Scans of {name}",
        "",
        ["Part", "Scans", "Positive", "Patients", "Slices", "With slice labels", "Positive slices"],
        [
            [part, *(f"{n:,}" for n in (d.scans, d.positive, d.patients, d.slices, d.labelled, d.positive_slices))]
            for part, d in parts.items()
        ],
    )
    lengths = _percentiles("Slices in a scan", "", [(part, d.lengths) for part, d in parts.items()], "{:.0f}")
    known = {part: d.blocks for part, d in parts.items() if d.blocks is not None}
    if not known:
        return [scans, lengths]
    most = max(max(blocks.bags_by_blocks) for blocks in known.values())
    numbers = Grid(
        "Blocks in a positive scan",
        f"How many of the scans with positive slices have so many blocks. {BLOCKS}",
        ["Part", *(f"{n} block{'s' * (n > 1)}" for n in range(1, most + 1))],
        [[part, *_shares(blocks.bags_by_blocks, most)] for part, blocks in known.items()],
    )
    sizes = [(part, blocks.summary()["length"]) for part, blocks in known.items()]
    fractions = [(part, blocks.summary()["fraction"]) for part, blocks in known.items()]
    return [
        scans,
        lengths,
        numbers,
        _percentiles("Slices in a block", BLOCKS, sizes, "{:.0f}"),
        _percentiles("Share of the scan in a block", BLOCKS, fractions, "{:.3f}"),
    ]


def _shares(bags_by_blocks: Mapping[int, int], most: int) -> list[str]:
    total = sum(bags_by_blocks.values())
    return [f"{bags_by_blocks[n]}/{total}" if n in bags_by_blocks else "-" for n in range(1, most + 1)]


def _percentiles(title: str, caption: str, rows: Sequence[tuple[str, Mapping[str, float]]], form: str) -> Grid:
    columns = ["mean", *PERCENTILES]
    cells = [[part, *(form.format(values[column]) for column in columns)] for part, values in rows]
    return Grid(title, caption, ["Part", *(column.capitalize() for column in columns)], cells)
