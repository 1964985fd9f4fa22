"""The results of a study, read from its folder: the paper's tables, what validation chose, differences and measures.

Markdown and LaTeX have three digits, like the paper; CSV and JSON every digit, null where there is no number.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from normal_guidance.base.errors import UserError, reading
from normal_guidance.base.files import make_folder, read_json_as, write_atomically
from normal_guidance.base.system import time_text
from normal_guidance.core.blocks import GAP, PERCENTILES
from normal_guidance.core.guidance import DIVERGENCE_TITLES, DIVERGENCES, DivergenceName
from normal_guidance.core.methods import (
    CEILING,
    COMPARED,
    EVERY_METHOD,
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
    yes_no,
)
from normal_guidance.statistics.differences import LEVEL, Difference
from normal_guidance.statistics.localization import Summary
from normal_guidance.statistics.split_results import METRICS, Metric, Scores
from normal_guidance.study import references
from normal_guidance.study.experiment import (
    DATASETS,
    LOG_DENSITY,
    SENSITIVITY,
    StudyResult,
    find_results,
    reference_scores,
)
from normal_guidance.study.figures.comparisons import ForestRow
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.run import CONFIG
from normal_guidance.sweep.sweep import group_of

TITLES: dict[Metric, str] = {
    "localization_auroc": "Localization AUROC",
    "localization_auprc": "Localization AUPRC",
    "scan_auroc": "Scan AUROC",
    "scan_auprc": "Scan AUPRC",
}

ROUNDING = 0.0005  # published numbers are rounded to three digits: the true mean, and the true sd, may lie this far off

PER_SEED = "ours_per_seed"

RULE = "Inside 2 sd: |difference| ≤ 2 × published sd, .0005 of rounding allowed on the published mean and on that sd."

Records = list[dict[str, Any]]


class Rendered:
    """Tables and the records behind them, written in four formats."""

    def grids(self) -> Sequence[Grid]:
        raise NotImplementedError

    def records(self) -> Records:
        """One record per number; CSV leaves out the values of single seeds."""
        raise NotImplementedError

    def content(self) -> dict[str, Any]:
        """What JSON holds."""
        raise NotImplementedError

    def markdown(self) -> str:
        return "\n".join(grid.markdown() for grid in self.grids())

    def latex(self) -> str:
        return "\n".join([LATEX_HEAD, *(grid.latex() for grid in self.grids())])

    def csv(self) -> str:
        records = [{name: value for name, value in record.items() if name != PER_SEED} for record in self.records()]
        return as_csv(records) if records else ""

    def json(self) -> str:
        return as_json(self.content())

    def write(self, folder: Path, stem: str) -> list[Path]:
        """Write `stem`.md, .tex, .csv and .json, each whole or not at all; make the folder if it is missing."""
        make_folder(folder)
        texts = {"md": self.markdown(), "tex": self.latex(), "csv": self.csv(), "json": self.json()}
        written = {folder / f"{stem}.{ending}": text for ending, text in texts.items()}
        for path, text in written.items():
            with reading(path, "choose another folder", wrong="cannot be written"):
                write_atomically(path, text.encode())
        return [*written]


@dataclass(frozen=True)
class Comparison:
    """One metric of one method: our value of every seed, and the published mean and sd (None where there is none)."""

    metric: Metric
    values: tuple[float, ...]  # one per seed; empty where the method has no such score
    sd_kind: SdKind
    published: MeanSd | None

    @property
    def ours(self) -> MeanSd | None:
        return over_seeds(self.values, self.sd_kind) if self.values else None

    @property
    def difference(self) -> float | None:
        return self.ours.mean - self.published.mean if self.ours and self.published else None

    @property
    def inside_2_sd(self) -> bool | None:
        """Whether ours agrees with the published mean (see `RULE`); None where either is missing or NaN."""
        if self.published is None or self.difference is None or math.isnan(self.difference):
            return None
        # The mean as printed may be off by ROUNDING, and so may the sd, which counts twice.
        return abs(self.difference) <= 2 * (self.published.sd + ROUNDING) + ROUNDING

    def record(self) -> dict[str, object]:
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


SHOWN_METRICS: tuple[Metric, ...] = ("localization_auroc", "scan_auroc")
"""Metrics that get figures, sentences and tables of initialisations; the tables of a study have all four."""


def mean_sd(number: MeanSd | None) -> str:
    """The text that the paper would print, without an sd for one seed, or "-" where there is no number."""
    if number is None or math.isnan(number.mean):
        return NOTHING
    return digits(number.mean) if math.isnan(number.sd) else f"{digits(number.mean)} ± {digits(number.sd)}"


@dataclass(frozen=True)
class TableRow:
    """One method, or one setting of a guided one: its scores, one per seed, and a cell for each of `METRICS`."""

    method: str
    title: str
    seeds: tuple[int, ...]
    scores: tuple[Scores, ...]
    cells: tuple[Comparison, ...]
    setting: tuple[DivergenceName, float] | None = None  # divergence and lambda in a table of sensitivity


@dataclass(frozen=True)
class PaperTables(Rendered):
    """The four result tables of one dataset, or how one guided method depends on divergence and lambda."""

    dataset: str
    rows: tuple[TableRow, ...]
    varied: str | None = None  # the method of a sensitivity table

    @property
    def seeds(self) -> tuple[int, ...]:
        return tuple(sorted({seed for row in self.rows for seed in row.seeds}))

    def records(self) -> Records:
        """One per metric and row; the best of each metric is marked where settings are compared."""
        return [
            {"dataset": self.dataset, "table": metric, "method": row.method}
            | ({"divergence": row.setting[0], "lambda": row.setting[1]} if row.setting else {})
            | row.cells[i].record()
            | ({"best": best} if row.setting else {})
            | {"seeds": row.seeds, PER_SEED: row.cells[i].values}
            for i, metric in enumerate(METRICS)
            for row, best in zip(self.rows, self._best(i), strict=True)
        ]

    def per_seed(self) -> Records:
        """The scores of every method and seed, beside what the authors' notebooks show of it."""
        return [
            {"method": row.method, "seed": seed}
            | asdict(scores)
            | {f"published_{m}": references.published_seed(m, row.method, self.dataset, seed) for m in METRICS}
            for row in self.rows
            for seed, scores in zip(row.seeds, row.scores, strict=True)
            if row.setting is None
        ]

    def content(self) -> dict[str, Any]:
        return {"rule": RULE, "tables": self.records(), "per_seed": self.per_seed()}

    def grids(self) -> list[Grid]:
        if self.varied is not None:
            return [self._settings_grid(self.varied)]
        return [*(self._metric_grid(i, metric) for i, metric in enumerate(METRICS)), self._seeds_grid()]

    def _metric_grid(self, i: int, metric: Metric) -> Grid:
        header, column = ["Method", "Ours"], [row.cells[i] for row in self.rows]
        cells = []
        for row, cell in zip(self.rows, column, strict=True):
            fewer = f" ({len(row.seeds)} of {len(self.seeds)} seeds)" if len(row.seeds) < len(self.seeds) else ""
            cells.append([f"{row.title}{fewer}", mean_sd(cell.ours)])
        usual, spread = PUBLISHED_SD[metric.partition("_")[0]], "From "
        if len(self.seeds) > 1:
            others = [f"{row.title}: {row.cells[i].sd_kind} sd" for row in self.rows if row.cells[i].sd_kind != usual]
            exceptions = f" ({', '.join(others)}, as in the paper)" if others else ""
            spread = f"Mean ± {usual} sd{exceptions} over "
        caption = f"{spread}{_count_seeds(self.seeds)}."
        if any(cell.published for cell in column):
            header += ["Published", "Difference", "Inside 2 sd"]
            caption = f"{caption} {RULE}"
            for shown, cell in zip(cells, column, strict=True):
                shown += [mean_sd(cell.published), signed(cell.difference), yes_no(cell.inside_2_sd)]
        return Grid(f"{TITLES[metric]}, {self.dataset}", caption, header, cells)

    def _seeds_grid(self) -> Grid:
        records, titles = self.per_seed(), {row.method: row.title for row in self.rows}
        columns: dict[str, str] = {}
        for metric in METRICS:
            columns[metric] = TITLES[metric]
            if any(record[f"published_{metric}"] is not None for record in records):
                columns[f"published_{metric}"] = "Published"
        rows = [
            [titles[record["method"]], str(record["seed"]), *(digits(record[name]) for name in columns),
             str(record["localized"]), str(record["left_out"])]
            for record in records
        ]  # fmt: skip
        header = ["Method", "Seed", *columns.values(), "Localized", "Left out"]
        caption = (
            "Localized: positive scans that localization was measured on. Left out: positive scans whose slice labels "
            "are missing or all of one class."
            + (" Published: from the authors' notebooks." if len(columns) > len(METRICS) else "")
        )
        return Grid(f"Every seed, {self.dataset}", caption, header, rows)

    def _best(self, i: int) -> list[bool]:
        """Which rows have the highest mean of metric i; means that print alike count as equal."""
        means = [cell.mean if (cell := row.cells[i].ours) else math.nan for row in self.rows]
        finite = [thousandths(mean) for mean in means if math.isfinite(mean)]
        return [math.isfinite(mean) and thousandths(mean) == max(finite) for mean in means]

    def _settings_grid(self, method: str) -> Grid:
        header = ["Divergence", "λ"]
        rows = [[DIVERGENCE_TITLES[row.setting[0]], f"{row.setting[1]:g}"] for row in self.rows if row.setting]
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
        caption = f"{EVERY_METHOD[method].title}, {seeds}. The best of ours is bold."
        return Grid(f"Sensitivity to divergence and λ, {self.dataset}", caption, header, rows, frozenset(bold))


def paper_tables(results: Mapping[str, Mapping[int, Scores]], dataset: str) -> PaperTables:
    """Make the paper's tables of `results`: method or "ceiling" -> seed -> `Scores`."""
    rows = []
    for method in (name for name in (*COMPARED, CEILING) if name in results):
        cells = {metric: references.published(metric, method, dataset) for metric in METRICS}
        rows.append(_row(method, method_title(method, dataset), results[method], dataset, cells))
    return PaperTables(dataset, tuple(rows))


def sensitivity_table(
    results: Mapping[tuple[DivergenceName, float], Mapping[int, Scores]], dataset: str, method: str = "ng"
) -> PaperTables:
    """Tabulate the sensitivity of a guided method: (divergence, lambda) -> seed -> `Scores`, the same seeds for all."""
    order, rows = list(DIVERGENCES), []
    for setting in sorted(results, key=lambda setting: (order.index(setting[0]), setting[1])):
        cells: dict[Metric, MeanSd | None] = dict.fromkeys(METRICS)
        if method == "ng":
            cells = {metric: references.published_sensitivity(metric, dataset, *setting) for metric in METRICS}
        rows.append(_row(method, str(setting), results[setting], dataset, cells, setting))
    return PaperTables(dataset, tuple(rows), method)


def _row(
    method: str,
    title: str,
    of_seeds: Mapping[int, Scores],
    dataset: str,
    printed: Mapping[Metric, MeanSd | None],
    setting: tuple[DivergenceName, float] | None = None,
) -> TableRow:
    """A row, with one value per seed in each cell, or none at all where the method has no such score."""
    seeds, cells = tuple(sorted(of_seeds)), []
    scores = tuple(of_seeds[seed] for seed in seeds)
    for metric, number in printed.items():
        values = tuple(value for of_seed in scores if (value := getattr(of_seed, metric)) is not None)
        if values and (lacking := [seed for seed in seeds if getattr(of_seeds[seed], metric) is None]):
            which = f"{_count_seeds(lacking)} of {len(seeds)}"
            raise UserError(f"{method} has no {metric} for {which}; train these again, or leave them out")
        cells.append(Comparison(metric, values, references.published_sd_kind(metric, method, dataset), number))
    return TableRow(method, title, seeds, scores, tuple(cells), setting)


def _count_seeds(seeds: Sequence[int]) -> str:
    return f"{len(seeds)} seed{'s' * (len(seeds) > 1)} ({', '.join(map(str, seeds))})"


@dataclass(frozen=True)
class StudyTables(Rendered):
    """Tables, choices and notes of a study, made by `collect`; `about` holds software, machines, dates and protocol."""

    title: str
    dataset: str
    method: str | None  # of a sensitivity table; None for the paper's four tables
    table: PaperTables | None  # None where no method has scores
    chosen: Records  # the configuration and epoch of each run, beside the published choice
    notes: tuple[str, ...]
    about: Mapping[str, Any]

    def markdown(self) -> str:
        head = [f"# {self.title}", "", *(f"- {line}" for line in self.about_lines()), ""]
        tables = ["## Tables", "", self.table.markdown()] if self.table else []
        chosen = [self.chosen_grid().markdown(level=2)] if self.chosen else []
        notes = ["## Notes", "", *(f"- {note}" for note in self.notes), ""] if self.notes else []
        return "\n".join([*head, *tables, *chosen, *notes])

    def chosen_grid(self) -> Grid:
        header = ["Setting" if self.method else "Method", "Seed", "L1", "lr", "Epoch", "Validation AUROC", "Seconds"]
        beside = any(choice["published"] for choice in self.chosen)
        rows = []
        for choice in self.chosen:
            weight, theirs = choice["guidance_weight"], choice["published"]
            setting = f"{choice['divergence']}, λ {weight:g}" if self.method else method_title(choice["method"])
            ours = [f"{choice['l1']:g}", f"{choice['lr']:g}", str(choice["epoch"]), f"{choice['val_auroc']:.4f}"]
            row = [setting, str(choice["seed"]), *ours, f"{choice['seconds']:.0f}"]
            if beside:
                row += ["-", "-"] if theirs is None else [f"{number:g}" for number in theirs.values()]
            rows.append(row)
        header += ["Published L1", "Published lr"] if beside else []
        return Grid("What validation chose", "", header, rows)

    def latex(self) -> str:
        comments = [f"% {line}" for line in (self.title, *self.about_lines(), *self.notes)]
        return "\n".join([*comments, self.table.latex() if self.table else LATEX_HEAD])

    def records(self) -> Records:
        return self.table.records() if self.table else []

    def content(self) -> dict[str, Any]:
        return {
            "dataset": self.dataset,
            "method": self.method,
            "about": dict(self.about),
            **(self.table.content() if self.table else {"rule": RULE, "tables": [], "per_seed": []}),
            "chosen": self.chosen,
            "notes": self.notes,
        }

    def about_lines(self) -> list[str]:
        about = self.about
        return [
            f"Software: {'; '.join(about['software'])}",
            f"Machine: {'; '.join(about['machines'])}",
            f"Date: {' to '.join(dict.fromkeys((about['dates'][0], about['dates'][-1])))}",
            f"Training time: {time_text(about['seconds'])} (h:mm:ss) for {about['runs']} runs",
            f"Departures from the paper's protocol: {_departures_line(about['departures'])}",
        ]


def collect(folder: str | Path, dataset: str) -> StudyTables:
    """Make the paper's tables of every complete run of `dataset` in a study's folder."""
    results = list(find_results(Path(folder), dataset))
    if not results:
        command = f"reproduce {dataset}" if dataset in DATASETS else f"experiment STORE --dataset {dataset}"
        raise UserError(f"{folder} holds no complete run on {dataset}; run: nguide {command} --out {folder}")
    first: dict[int, StudyResult] = {}
    for result in results:
        # The scans of the scan reference are pooled to one row each.
        other = result if result.method == SCAN_REFERENCE else first.setdefault(result.seed, result)
        if result.fingerprints.get("test") != other.fingerprints.get("test"):
            raise UserError(
                f"{result.folder} and {other.folder} were scored on different test scans; delete one and run it again "
                "(drawn scans differ in their last bits between kinds of processor: score a study on one)"
            )
    by_method: dict[str, dict[int, Scores]] = defaultdict(dict)
    for result in results:
        if result.method not in REFERENCES and (scores := result.scores) is not None:
            by_method[result.method][result.seed] = scores
    if ceiling := reference_scores(results):
        by_method[CEILING] = ceiling
    table = paper_tables(by_method, dataset) if by_method else None
    printed = table is not None and any(cell.published for row in table.rows for cell in row.cells)
    what = "the paper's tables, reproduced" if printed else "the methods beside each other"
    return StudyTables(
        title=f"{dataset.capitalize()}: {what}",
        dataset=dataset,
        method=None,
        table=table,
        chosen=list(_chosen(results, dataset)),
        notes=tuple(_notes(results, table, dataset)),
        about=_about(results),
    )


def collect_sensitivity(folder: str | Path, dataset: str, method: str) -> StudyTables:
    """The sensitivity of a method to divergence and lambda, over every complete seed in a study's folder."""
    runs = list(find_results(Path(folder) / SENSITIVITY, dataset, (method,)))
    if not runs:
        raise UserError(f"{folder} holds no complete sensitivity run of {method} on {dataset}; run it first")
    settings: dict[tuple[DivergenceName, float], dict[int, Scores]] = {}
    for run in runs:
        for config in read_json_as(run.folder / CONFIG, _RunConfigs, exact=False).configs:
            settings.setdefault((config.divergence, config.guidance_weight), {})
        for winner in run.winners:
            if winner.test is not None:
                settings[winner.config.divergence, winner.config.guidance_weight][run.seed] = winner.test
    # With other seeds than the others, a setting might be the best for having the kindest.
    complete = {setting: of_seeds for setting, of_seeds in settings.items() if len(of_seeds) == len(runs)}
    notes = [
        f"{divergence}, λ {weight:g}: left out, no epoch could be selected for {len(runs) - len(of_seeds)} of "
        f"{len(runs)} seeds"
        for (divergence, weight), of_seeds in sorted(settings.items())
        if len(of_seeds) < len(runs)
    ]
    return StudyTables(
        title=f"{dataset.capitalize()}: sensitivity of {EVERY_METHOD[method].title}",
        dataset=dataset,
        method=method,
        table=sensitivity_table(complete, dataset, method) if complete else None,
        chosen=list(_chosen(runs, dataset)),
        notes=tuple(notes),
        about=_about(runs, axes=("divergence", "guidance_weight")),
    )


@dataclass(frozen=True)
class _RunConfigs:
    configs: list[Config]


def _chosen(results: Sequence[StudyResult], dataset: str) -> Iterator[dict[str, Any]]:
    for result in results:
        if result.run is None:
            continue
        method, seed = result.method, result.seed
        for winner in result.run.winners:
            config, about = winner.config, winner.config.spec
            standard = method in EVERY_METHOD and group_of(config) == group_of(Config(method, seed=config.seed))
            theirs = references.published_choice(method, dataset, seed) if standard else None
            yield {
                "method": method,
                "seed": seed,
                "divergence": config.divergence if about.guided else None,
                "guidance_weight": None if about.regularizer is None else config.guidance_weight,
                "l1": config.l1,
                "lr": config.lr,
                "epoch": winner.epoch,
                "val_auroc": winner.val_auroc,
                "seconds": result.run.seconds,
                "published": theirs and theirs._asdict(),
            }


def _notes(results: Sequence[StudyResult], table: PaperTables | None, dataset: str) -> Iterator[str]:
    for result in results:
        if result.run and result.scores is None:
            title = method_title(result.method)
            yield f"{title}, seed {result.seed}: {result.run.note}; the tables leave it out"
    if table is not None and any(row.seeds != table.seeds for row in table.rows):
        yield (
            "Some methods lack a run or a selected epoch for some seeds. Their means are over the seeds that they "
            "have, and their rows say how many."
        )
    gaussian = [result.forms[LOG_DENSITY] for result in results if result.method == "centered_gaussian"]
    if gaussian:
        texts = []
        for metric in METRICS[:2]:
            kind = references.published_sd_kind(metric, "centered_gaussian", dataset)
            number = over_seeds([getattr(scores, metric) for scores in gaussian], kind)
            texts.append(f"{TITLES[metric]} {mean_sd(number)} ({kind} sd)")
        yield (
            "Centered Gaussian is scored in the form behind the published figure: positions linspace(1, S-1, S), the "
            f"density in float64, ties where it underflows. By its log-density, without ties: {', '.join(texts)}."
        )


def _about(results: Sequence[StudyResult], axes: Sequence[str] = ()) -> dict[str, Any]:
    """Software, machines, dates and protocol; options that the study varies (`axes`) are not departures from it."""
    runs = [result for result in results if result.run]
    departures: dict[str, dict[str, Any]] = defaultdict(dict)
    for run in runs:
        kept = {name: value for name, value in run.departures.items() if name not in axes}
        departures[run.method][str(run.seed)] = kept
    starts = [start for result in results for start in result.environments]
    machines = [(start["device"], result.precision) for result in runs or results for start in result.environments]
    return {
        "software": sorted({_software_line(start) for start in starts}),
        "machines": sorted({f"{device}, {precision}" if precision else str(device) for device, precision in machines}),
        "dates": sorted({str(start["date"]) for start in starts}),
        "runs": len(runs),
        "seconds": sum(result.run.seconds for result in runs if result.run),
        "departures": departures,
    }


def _software_line(versions: Mapping[str, Any]) -> str:
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
        texts = {seed: ", ".join(f"{name} {value}" for name, value in run.items()) for seed, run in of_seeds.items()}
        for text in dict.fromkeys(texts.values()):
            seeds = [seed for seed in texts if texts[seed] == text]
            runs_of[text].append(method if len(seeds) == len(texts) else f"{method} seed {', '.join(seeds)}")
    return "; ".join(f"{text} ({', '.join(runs)})" for text, runs in runs_of.items() if text) or "none"


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

BEYOND = {"skill": "Skill", "patient_specific": "Patient-specific"}  # measures that a guess by position cannot reach

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
class Measures(Rendered):
    """Where attention points, and what is beyond a guess by position: (method, seed) -> measure -> its summary."""

    dataset: str
    summaries: Mapping[tuple[str, int], Mapping[str, Summary]]

    def grids(self) -> list[Grid]:
        """One table, without measures that no scan has (mm, where positions are unknown)."""
        titles, methods = BEYOND | COLUMNS, Counter(method for method, _ in self.summaries)
        values: dict[tuple[str, str], list[float]] = defaultdict(list)
        for (method, _), of_run in self.summaries.items():
            for name, summary in of_run.items():
                values[method, name].append(summary.value)
        means = {key: math.fsum(of_seeds) / len(of_seeds) for key, of_seeds in values.items()}
        columns = [name for name in titles if any(math.isfinite(means.get((m, name), math.nan)) for m in methods)]
        rows = []
        for method in methods:
            cells = [_measure_cell(name, means.get((method, name), math.nan)) for name in columns]
            rows.append([method_title(method, self.dataset), *cells])
        about = ABOUT_BEYOND if {*columns} & {*BEYOND} else ""
        splits = max(methods.values(), default=0)
        caption = CAPTION.format(beyond=about, seeds=f"{splits} split{'s' * (splits > 1)}")
        header = ["Method", *(titles[name] for name in columns)]
        return [Grid(f"Where attention points, {self.dataset}", caption, header, rows)]

    def markdown(self) -> str:
        return self.grids()[0].markdown(level=1)

    def records(self) -> Records:
        return [
            {"dataset": self.dataset, "method": method, "seed": seed, "measure": name, "value": summary.value,
             "kind": summary.kind, "scans": summary.scans}
            for (method, seed), of_run in self.summaries.items()
            for name, summary in of_run.items()
        ]  # fmt: skip

    def content(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "measures": self.records()}


def _measure_cell(name: str, value: float) -> str:
    if not math.isfinite(value):
        return NOTHING
    if name in BEYOND:
        return signed(value)
    return f"{value:.1f}" if name.startswith("peak_error") else digits(value)


METHOD = (
    f"Differences are averaged over the splits. Intervals ({100 * LEVEL:g} %) and p-values come from the bootstrap "
    "over patients, paired between methods; p-values of scan AUROC come from DeLong's test, for patients with several "
    "scans and in several splits. Shown: the p-value, adjusted by Holm for all differences in this metric, is below "
    f"{1 - LEVEL:.2g}. Intervals are not corrected for the number of comparisons. The statistics are about these "
    "trained models on other patients; they do not cover other initial weights. Centered Gaussian is scored by its "
    "log-density."
)


@dataclass(frozen=True)
class Differences(Rendered):
    """All tested differences between methods on one dataset, as tables and sentences."""

    dataset: str
    rows: tuple[Difference, ...]

    @property
    def titles(self) -> Mapping[str, str]:
        names = {name for row in self.rows for name in (row.method, row.against)}
        return {name: method_title(name, self.dataset) for name in names}

    def by_metric(self) -> dict[Metric, list[Difference]]:
        groups = {metric: [row for row in self.rows if row.metric == metric] for metric in METRICS}
        return {metric: group for metric, group in groups.items() if group}

    def sentences(self, metric: Metric) -> list[str]:
        return [row.words(self.titles) for row in self.by_metric().get(metric, ())]

    def forest(self, metric: Metric) -> list[ForestRow]:
        """Rows for `plot_differences`, without differences that could not be tested."""
        tested = [row for row in self.by_metric().get(metric, ()) if row.p == row.p]
        names = [f"{self.titles[row.method]} − {self.titles[row.against]}" for row in tested]
        return [ForestRow(n, d.estimate, d.low, d.high, d.shown) for n, d in zip(names, tested, strict=True)]

    def grids(self) -> list[Grid]:
        header = ["Method", "Against", "Difference", "Interval", "p (Holm)", "Shown", "Scans", "Patients"]
        return [
            Grid(f"Differences in {TITLES[metric]}, {self.dataset}", METHOD, header, [self._row(row) for row in group])
            for metric, group in self.by_metric().items()
        ]

    def markdown(self) -> str:
        parts = [f"# {self.dataset.capitalize()}: which differences are real", ""]
        for metric, grid in zip(self.by_metric(), self.grids(), strict=True):
            parts += [grid.markdown(level=2), *(f"- {sentence}" for sentence in self.sentences(metric)), ""]
        return "\n".join(parts)

    def records(self) -> Records:
        return [{"dataset": self.dataset, **asdict(row), "shown": row.shown, "test": row.test} for row in self.rows]

    def content(self) -> dict[str, Any]:
        return {"dataset": self.dataset, "about": METHOD, "differences": self.records()}

    def _row(self, row: Difference) -> list[str]:
        tested = [NOTHING] * 3
        if row.p == row.p:
            p = p_value(row.p_adjusted).removeprefix("p ").removeprefix("= ")
            tested = [interval(row.low, row.high), p, yes_no(row.shown)]
        names = [self.titles[row.method], self.titles[row.against]]
        return [*names, signed(row.estimate), *tested, f"{row.scans:,}", f"{row.patients:,}"]


BLOCKS = f"A block may bridge up to {GAP} negative slices."


def description_tables(name: str, parts: Mapping[str, Description]) -> list[Grid]:
    """The tables about a dataset, one row for each part (for instance 'all', or 'train', 'val' and 'test')."""
    header = ["Part", "Scans", "Positive", "Patients", "Slices", "With slice labels", "Positive slices"]
    numbers = [
        [part, *(f"{n:,}" for n in (d.scans, d.positive, d.patients, d.slices, d.labelled, d.positive_slices))]
        for part, d in parts.items()
    ]
    scans = Grid(f"Scans of {name}", "", header, numbers)
    lengths = _percentiles("Slices in a scan", "", {part: d.lengths for part, d in parts.items()}, "{:.0f}")
    known = {part: d.blocks for part, d in parts.items() if d.blocks is not None}
    if not known:
        return [scans, lengths]
    most = max(max(blocks.bags_by_blocks) for blocks in known.values())
    numbers = []
    for part, blocks in known.items():
        total, counts = sum(blocks.bags_by_blocks.values()), blocks.bags_by_blocks
        numbers.append([part, *(f"{counts[n]}/{total}" if n in counts else "-" for n in range(1, most + 1))])
    caption = f"How many of the scans with positive slices have so many blocks. {BLOCKS}"
    header = ["Part", *(f"{n} block{'s' * (n > 1)}" for n in range(1, most + 1))]
    tables = [scans, lengths, Grid("Blocks in a positive scan", caption, header, numbers)]
    for title, key, form in (
        ("Slices in a block", "length", "{:.0f}"),
        ("Share of the scan in a block", "fraction", "{:.3f}"),
    ):
        tables.append(_percentiles(title, BLOCKS, {part: b.summary()[key] for part, b in known.items()}, form))
    return tables


def _percentiles(title: str, caption: str, rows: Mapping[str, Mapping[str, float]], form: str) -> Grid:
    columns = ["mean", *PERCENTILES]
    cells = [[part, *(form.format(values[column]) for column in columns)] for part, values in rows.items()]
    return Grid(title, caption, ["Part", *(column.capitalize() for column in columns)], cells)
