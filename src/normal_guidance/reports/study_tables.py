"""The results of a study, read from its folder: the paper's tables, what validation chose, and notes."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from normal_guidance.core.methods import CEILING, EVERY_METHOD, SCAN_REFERENCE, method_title
from normal_guidance.errors import UserError
from normal_guidance.evaluation.published import Choice, published_choice, published_sd_kind
from normal_guidance.evaluation.study import DATASETS
from normal_guidance.evaluation.study_folder import (
    LOG_DENSITY,
    REFERENCES,
    SENSITIVITY,
    StudyResult,
    find_results,
    reference_scores,
)
from normal_guidance.files import read_json_as
from normal_guidance.presentation.text_tables import LATEX_HEAD, Grid, write_page
from normal_guidance.quantities import time_text
from normal_guidance.reports.paper_tables import (
    RULE,
    TITLES,
    PaperTables,
    SensitivityTable,
    mean_sd,
    over_seeds,
    paper_tables,
    sensitivity_table,
)
from normal_guidance.statistics.scores import METRICS, Scores
from normal_guidance.training.config import Config
from normal_guidance.training.run_folder import CONFIG
from normal_guidance.training.selection import group_of


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
