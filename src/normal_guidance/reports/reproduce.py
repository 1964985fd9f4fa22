"""The paper's tables from the data on: train what is not trained yet, then tell everything that a folder holds.

    DIR/<method>/<seed>/               a run of the paper's grid (`normal_guidance.evaluation.runs`)
    DIR/<method>/<seed>/scores.json    of what needs no training: Centered Gaussian and the ceiling
    DIR/tables.md .tex .csv .json      ours, published, difference, and what validation chose
    DIR/sensitivity/<method>/<seed>/   the grid for each divergence and lambda; its tables stand beside

Complete runs are not repeated, so a study may be stopped and may grow: another method or seed fills up the same tables.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime, timedelta
from functools import cache
from pathlib import Path
from typing import Any

from normal_guidance.core.bags import Bags
from normal_guidance.core.metrics import mean_and_sd
from normal_guidance.core.models import METHODS, CenteredGaussian
from normal_guidance.data.synthetic import SEEDS, SemiSynthetic, bayes_scan_scores, bayes_slice_scores, semi_synthetic
from normal_guidance.errors import UserError
from normal_guidance.evaluation.published import CEILING, METRICS, Choice, published_choice, published_sd_kind
from normal_guidance.evaluation.runs import Run, Selected, environment, load_run, run_sweep
from normal_guidance.evaluation.scores import Scores, score
from normal_guidance.features.store import fingerprint_of
from normal_guidance.files import write_atomically
from normal_guidance.reports.tables import (
    LATEX_HEAD,
    RULE,
    TITLES,
    PaperTables,
    SensitivityTable,
    digits,
    paper_tables,
    sensitivity_table,
)
from normal_guidance.training.config import Config, grid, sensitivity_grid
from normal_guidance.training.fit import predict
from normal_guidance.training.run import CONFIG, REPORT, read_json, write_json
from normal_guidance.training.selection import group_of
from normal_guidance.training.sweep import Execution
from normal_guidance.training.watch import Progress

SCORES = "scores.json"
SENSITIVITY = "sensitivity"

PUBLISHED_FORM, LOG_DENSITY = "published form", "log-density"
"""How Centered Gaussian is scored: the first is its row of the tables, the second is told in the notes."""

Watch = Callable[[Progress], None]


# ----------------------------------------------------------------------------------------------------
# What to reproduce
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Dataset:
    """Where the scans of each seed come from, and the best that anything can do on them.

    Args:
        name: as the published tables call it.
        draw: a seed's training, validation and test scans.
        ceiling: the scores of the tables' last row on the test scans.
        seeds: those of the published repetitions.
    """

    name: str
    draw: Callable[[int], SemiSynthetic]
    ceiling: Callable[[Bags], Scores]
    seeds: tuple[int, ...]


def bayes_oracle(test: Bags) -> Scores:
    """Bayes' rule for scans and for slices of the semi-synthetic data.

    Example:
        >>> from normal_guidance.data.synthetic import semi_synthetic_part
        >>> bayes_oracle(semi_synthetic_part(1001, "test")).scan_auroc
        0.80088
    """
    return score(test, bayes_slice_scores(test), bayes_scan_scores(test))


DATASETS = {one.name: one for one in (Dataset("semi-synthetic", semi_synthetic, bayes_oracle, tuple(SEEDS)),)}
"""What `nguide reproduce` knows."""


@dataclass(frozen=True)
class Study:
    """Methods and seeds to reproduce in a folder.

    Args:
        methods: names in `METHODS`; the ceiling comes with every seed.
        seeds: of the partition, and so of initial weights and order.
        protocol: how to train; its method and seed are those of each run.

    Example:
        >>> Study(DATASETS["semi-synthetic"], Path("out"), ("ng",), (7,))
        Traceback (most recent call last):
        normal_guidance.errors.UserError: seed 7 is none of semi-synthetic's; choose among 1001, 2001, 3001
    """

    dataset: Dataset
    folder: Path
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    protocol: Config = field(default_factory=lambda: Config("ng"))
    execution: Execution = field(default_factory=Execution)

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in METHODS:
                raise UserError(f"method {method!r} is unknown; choose among {', '.join(METHODS)}")
        for seed in self.seeds:
            if seed not in self.dataset.seeds:
                known = ", ".join(map(str, self.dataset.seeds))
                raise UserError(f"seed {seed} is none of {self.dataset.name}'s; choose among {known}")
        if self.folder.exists() and not self.folder.is_dir():
            raise UserError(f"{self.folder} is a file; name a folder for the study")

    def config(self, method: str, seed: int) -> Config:
        """The protocol for one run; `renormalize` means something only where there is guidance."""
        renormalize = self.protocol.renormalize or not METHODS[method].guided
        return replace(self.protocol, method=method, seed=seed, renormalize=renormalize)


@dataclass(frozen=True)
class Listener:
    """Who wants to know how far a study is.

    Args:
        watching: lends, for a run named by its title, a function that is told its progress.
        finished: is told of every run that has just been trained.
    """

    watching: Callable[[str], AbstractContextManager[Watch | None]] = lambda title: nullcontext()
    finished: Callable[[str, Run], object] = lambda title, run: None


# ----------------------------------------------------------------------------------------------------
# Doing it
# ----------------------------------------------------------------------------------------------------


def reproduce(
    study: Study, *, make_grid: Callable[[Config], Sequence[Config]] = grid, listener: Listener | None = None
) -> Results:
    """Trains what the study lacks and writes the paper's tables of everything that is complete in its folder.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> from normal_guidance.data.synthetic import shifted_mean
        >>> def draw(seed: int) -> SemiSynthetic:
        ...     return SemiSynthetic(*(shifted_mean(40, seed + i, features=8) for i in range(3)))
        >>> small = Dataset("semi-synthetic", draw, bayes_oracle, (1001,))
        >>> with TemporaryDirectory() as folder:
        ...     study = Study(small, Path(folder), ("mean",), (1001,), Config("ng", epochs=5, batch_size=8))
        ...     results = reproduce(study)
        ...     sorted(path.name for path in Path(folder).iterdir())
        ['ceiling', 'mean', 'tables.csv', 'tables.json', 'tables.md', 'tables.tex']
        >>> [row.title for row in results.tables[0].rows]
        ['Mean pooling', 'Bayes oracle']
    """
    listener = listener or Listener()
    trained = [method for method in study.methods if METHODS[method].scores_scans]
    untrained = [*(method for method in study.methods if method not in trained), CEILING]
    _train(study, _jobs(study, trained, make_grid, study.folder), listener, untrained)
    results = collect(study.folder, study.dataset.name)
    results.write(study.folder, "tables")
    return results


def reproduce_sensitivity(
    study: Study,
    *,
    make_grid: Callable[[Config], Sequence[Config]] = sensitivity_grid,
    listener: Listener | None = None,
) -> dict[str, Results]:
    """The same for the sensitivity to divergence and lambda, one table for each guided method of the study."""
    for method in study.methods:
        if not METHODS[method].guided:
            guided = ", ".join(name for name in METHODS if METHODS[name].guided)
            raise UserError(f"method {method!r} has no guidance to vary; choose among {guided}")
    folder = study.folder / SENSITIVITY
    jobs = _jobs(study, study.methods, make_grid, folder, title=f"{SENSITIVITY} of ")
    _train(study, jobs, listener or Listener())
    results = {method: collect_sensitivity(study.folder, study.dataset.name, method) for method in study.methods}
    for method, one in results.items():
        one.write(folder, method)
    return results


@dataclass(frozen=True)
class _Job:
    """One run: what to train, and where."""

    title: str
    folder: Path
    seed: int
    configs: tuple[Config, ...]

    def is_done(self, dataset: str) -> bool:
        """Whether the folder holds this run, complete; another complete run is refused.

        How it was computed does not matter here, so a folder can be told about on any machine.
        """
        if not (self.folder / REPORT).is_file():
            return False
        _check_dataset(self.folder, read_json(self.folder / REPORT), dataset)
        before, now = read_json(self.folder / CONFIG)["configs"], [asdict(config) for config in self.configs]
        if before != now:
            what = _difference(before, now)
            raise UserError(
                f"{self.folder} holds another run: {what}; give another folder, or the options it began with"
            )
        return True


def _jobs(
    study: Study,
    methods: Sequence[str],
    make_grid: Callable[[Config], Sequence[Config]],
    folder: Path,
    title: str = "",
) -> list[_Job]:
    return [
        _Job(
            title=f"{title}{method}, seed {seed}",
            folder=folder / method / str(seed),
            seed=seed,
            configs=tuple(make_grid(study.config(method, seed))),
        )
        for seed in study.seeds
        for method in methods
    ]


def _check_dataset(folder: Path, report: Mapping[str, Any], dataset: str) -> None:
    other = report["options"].get("dataset")
    if other != dataset:
        raise UserError(f"{folder} is about {other or 'other scans'}, not {dataset}; give another folder")


def _difference(before: Sequence[Mapping[str, Any]], now: Sequence[Mapping[str, Any]]) -> str:
    if len(before) != len(now):
        return f"{len(before)} configurations, not {len(now)}"
    pairs = ((old, new, name) for old, new in zip(before, now, strict=True) for name in new)
    return next(
        f"{name} was {old.get(name)}, now it is {new[name]}" for old, new, name in pairs if old.get(name) != new[name]
    )


def _train(study: Study, jobs: Sequence[_Job], listener: Listener, untrained: Sequence[str] = ()) -> None:
    # All folders are looked at before hours go into the first.
    lacking = [job for job in jobs if not job.is_done(study.dataset.name)]
    for seed in study.seeds:
        _train_seed(study, seed, [job for job in lacking if job.seed == seed], listener, untrained)


def _train_seed(study: Study, seed: int, jobs: Sequence[_Job], listener: Listener, untrained: Sequence[str]) -> None:
    """One seed's scans are drawn if something needs them, and gone when this returns."""
    name, draw = study.dataset.name, cache(study.dataset.draw)
    for method in untrained:
        path = study.folder / method / str(seed) / SCORES
        if path.is_file():
            _check_dataset(path.parent, read_json(path), name)
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        write_json(path, _score_untrained(study, method, draw(seed).test))
    for job in jobs:
        options = {"dataset": name, "date": datetime.now(UTC).date().isoformat()}
        parts = draw(seed)
        with listener.watching(job.title) as watch:
            run = run_sweep(job.folder, job.configs, *parts, study.execution, options=options, watch=watch)
        listener.finished(job.title, run)


def _score_untrained(study: Study, method: str, test: Bags) -> dict[str, Any]:
    if method == CEILING:
        scores = {CEILING: study.dataset.ceiling(test)}
    else:
        forms = {PUBLISHED_FORM: True, LOG_DENSITY: False}
        models = {form: CenteredGaussian(published=published) for form, published in forms.items()}
        scores = {form: score(test, predict(model, test).slice_scores) for form, model in models.items()}
    return {
        "options": {"dataset": study.dataset.name, "date": datetime.now(UTC).date().isoformat()},
        "data": {"test": {"scans": len(test), "fingerprint": fingerprint_of({"test": test})}},
        "environment": environment(Execution()),
        "scores": {form: asdict(one) for form, one in scores.items()},
    }


# ----------------------------------------------------------------------------------------------------
# Telling about it
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Chosen:
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
    """Of the whole run."""
    published: Choice | None

    @property
    def setting(self) -> str:
        """Divergence and lambda, for methods that have them."""
        return f"{self.divergence}, λ {self.guidance_weight:g}"

    def cells(self, label: str) -> list[str]:
        """A row of the table: what the row is about, and what `CHOSEN_HEADER` lists.

        Example:
            >>> Chosen("ng", 1001, "forward_kl", 1.0, 0.001, 0.1, 7, 0.75, 90.0, Choice(0.01, 0.1)).cells("NG")
            ['NG', '1001', '0.001', '0.1', '7', '0.7500', '90', '0.01', '0.1']
        """
        theirs = ["-", "-"] if self.published is None else [f"{number:g}" for number in self.published]
        ours = [f"{self.l1:g}", f"{self.lr:g}", str(self.epoch), f"{self.val_auroc:.4f}", f"{self.seconds:.0f}"]
        return [label, str(self.seed), *ours, *theirs]


CHOSEN_HEADER = ("Seed", "L1", "lr", "Epoch", "Validation AUROC", "Seconds", "Published L1", "Published lr")


@dataclass(frozen=True)
class Results:
    """Tables, choices and notes of a study, made by `collect`; `about` says what they were computed with."""

    title: str
    dataset: str
    method: str | None
    """Whose sensitivity it is; None for the paper's four tables."""
    tables: tuple[PaperTables, ...] | tuple[SensitivityTable, ...]
    """One for each set of seeds, the largest first."""
    chosen: tuple[Chosen, ...]
    notes: tuple[str, ...]
    about: Mapping[str, Any]

    def markdown(self) -> str:
        """A page of documentation as it is."""
        head = [f"# {self.title}", "", *(f"- {line}" for line in self._about_lines()), ""]
        tables = [
            part for table in self.tables for part in (f"## {_over(table.seeds)}\n", self._named(table.markdown()))
        ]
        rows = [one.cells(one.setting if self.method else METHODS[one.method].title) for one in self.chosen]
        header = ("Setting" if self.method else "Method", *CHOSEN_HEADER)
        chosen = ["## What validation chose", "", *_markdown_table(header, rows), ""] if rows else []
        notes = ["## Notes", "", *(f"- {note}" for note in self.notes), ""] if self.notes else []
        return "\n".join([*head, *tables, *chosen, *notes])

    def latex(self) -> str:
        r"""The tables for `\input`; what they were computed with stands above them as comments."""
        comments = [f"% {line}" for line in (self.title, *self._about_lines(), *self.notes)]
        tables = [self._named(table.latex()).removeprefix(LATEX_HEAD) for table in self.tables]
        return "\n".join([*comments, LATEX_HEAD, *tables])

    def csv(self) -> str:
        """One line per number and all its digits."""
        first, *others = [table.csv() for table in self.tables] or [""]
        return first + "".join(text.partition("\n")[2] for text in others)  # one header for all

    def json(self) -> str:
        """Everything, for computing."""
        parts = [json.loads(table.json()) for table in self.tables]
        merged = {name: [record for part in parts for record in part.get(name, [])] for name in ("tables", "per_seed")}
        chosen = [asdict(one) | {"published": one.published and one.published._asdict()} for one in self.chosen]
        content = {
            "dataset": self.dataset,
            "method": self.method,
            "about": dict(self.about),
            "rule": RULE,
            **merged,
            "chosen": chosen,
            "notes": self.notes,
        }
        return json.dumps(content, indent=1, ensure_ascii=False, allow_nan=False) + "\n"

    def write(self, folder: Path, stem: str) -> list[Path]:
        """Write `stem`.md, .tex, .csv and .json, each whole or not at all."""
        texts = {".md": self.markdown(), ".tex": self.latex(), ".csv": self.csv(), ".json": self.json()}
        folder.mkdir(parents=True, exist_ok=True)
        paths = [folder / f"{stem}{suffix}" for suffix in texts]
        for path, text in zip(paths, texts.values(), strict=True):
            write_atomically(path, text.encode())
        return paths

    def _about_lines(self) -> list[str]:
        about = self.about
        return [
            f"Software: {'; '.join(about['software'])}",
            f"Machine: {'; '.join(about['machines'])}",
            f"Date: {' to '.join(dict.fromkeys((about['dates'][0], about['dates'][-1])))}",
            f"Training time: {timedelta(seconds=round(about['seconds']))} (h:mm:ss) for {about['runs']} runs",
            f"Departures from the paper's protocol: {_departures_line(about['departures'])}",
        ]

    def _named(self, text: str) -> str:
        # The sensitivity table's caption knows the paper's method only.
        return text if self.method is None else text.replace(METHODS["ng"].title, METHODS[self.method].title)


def collect(folder: str | Path, dataset: str) -> Results:
    """The paper's tables of every complete run of `dataset` in a study's folder, whoever asked for it.

    Methods that have been run with other seeds than the rest stand in tables of their own, which say their seeds.

    Example:
        >>> collect("nowhere", "semi-synthetic")
        Traceback (most recent call last):
        normal_guidance.errors.UserError: nowhere holds no complete run on semi-synthetic; run: nguide reproduce
        semi-synthetic --out nowhere
    """
    found = list(_found(Path(folder), dataset, (*METHODS, CEILING)))
    if not found:
        raise UserError(f"{folder} holds no complete run on {dataset}; run: nguide reproduce {dataset} --out {folder}")
    _check_same_scans(found)
    by_method: dict[str, dict[int, Scores]] = defaultdict(dict)
    for one in found:
        if (scores := one.scores) is not None:
            by_method[one.method][one.seed] = scores
    by_seeds: dict[tuple[int, ...], dict[str, list[Scores]]] = defaultdict(dict)
    for method, of_seed in by_method.items():
        by_seeds[tuple(sorted(of_seed))][method] = [of_seed[seed] for seed in sorted(of_seed)]
    order = sorted(by_seeds, key=lambda seeds: (-len(seeds), seeds))
    return Results(
        title=f"{dataset.capitalize()}: the paper's tables, reproduced",
        dataset=dataset,
        method=None,
        tables=tuple(paper_tables(by_seeds[seeds], seeds, dataset) for seeds in order),
        chosen=tuple(_chosen(found, dataset)),
        notes=(*_unselected(found), *_seeds_note(order), *_gaussian_note(found, dataset)),
        about=_about(found),
    )


def collect_sensitivity(folder: str | Path, dataset: str, method: str) -> Results:
    """The sensitivity of a method, of every seed that is complete in a study's folder."""
    found = list(_found(Path(folder) / SENSITIVITY, dataset, (method,)))
    if not found:
        raise UserError(f"{folder} holds no complete sensitivity run of {method} on {dataset}; run it first")
    results: dict[tuple[str, float], list[Scores]] = defaultdict(list)
    for one in found:
        for winner in one.winners:
            if winner.test is not None:
                results[winner.config.divergence, winner.config.guidance_weight].append(winner.test)
    seeds = [one.seed for one in found]
    complete = {setting: scores for setting, scores in results.items() if len(scores) == len(seeds)}
    return Results(
        title=f"{dataset.capitalize()}: sensitivity of {METHODS[method].title}",
        dataset=dataset,
        method=method,
        tables=(sensitivity_table(complete, seeds, dataset),) if complete else (),
        chosen=tuple(_chosen(found, dataset)),
        notes=tuple(_left_out(sorted(_settings(found) - set(complete)), results, len(seeds))),
        about=_about(found, axes=("divergence", "guidance_weight")),
    )


@dataclass(frozen=True)
class _Found:
    """What is complete for one method and seed: a run's report, or the scores of what is not trained."""

    method: str
    seed: int
    folder: Path
    report: Mapping[str, Any]
    winners: tuple[Selected, ...] = ()

    @property
    def scores(self) -> Scores | None:
        """None where no epoch could be selected."""
        if "scores" in self.report:
            return Scores(**next(iter(self.report["scores"].values())))
        return self.winners[0].test if self.winners else None


def _found(folder: Path, dataset: str, methods: Sequence[str]) -> Iterator[_Found]:
    """By method in the order of the tables, then by seed; runs on other data are not ours."""
    for method in methods:
        seeds = sorted(int(path.name) for path in (folder / method).glob("*") if path.name.isdecimal())
        for seed in seeds:
            one = _load(method, seed, folder / method / str(seed))
            if one is not None and one.report["options"].get("dataset") == dataset:
                yield one


def _load(method: str, seed: int, folder: Path) -> _Found | None:
    if (folder / SCORES).is_file():
        return _Found(method, seed, folder, read_json(folder / SCORES))
    if (folder / REPORT).is_file():
        run = load_run(folder)
        return _Found(method, seed, folder, run.report, run.winners)
    return None


def _check_same_scans(found: Sequence[_Found]) -> None:
    first: dict[int, _Found] = {}
    for one in found:
        other = first.setdefault(one.seed, one)
        if one.report["data"]["test"]["fingerprint"] != other.report["data"]["test"]["fingerprint"]:
            raise UserError(
                f"{one.folder} and {other.folder} were scored on different test scans; delete one and run it again"
            )


def _chosen(found: Sequence[_Found], dataset: str) -> Iterator[Chosen]:
    for one in found:
        for winner in one.winners:
            config, guided = winner.config, METHODS[one.method].guided
            standard = group_of(config) == group_of(Config(one.method, seed=config.seed))
            yield Chosen(
                method=one.method,
                seed=one.seed,
                divergence=config.divergence if guided else None,
                guidance_weight=config.guidance_weight if guided else None,
                l1=config.l1,
                lr=config.lr,
                epoch=winner.epoch,
                val_auroc=winner.val_auroc,
                seconds=one.report["seconds"]["total"],
                published=published_choice(one.method, dataset, one.seed) if standard else None,
            )


def _settings(found: Sequence[_Found]) -> set[tuple[str, float]]:
    configs = [config for one in found for config in read_json(one.folder / CONFIG)["configs"]]
    return {(config["divergence"], config["guidance_weight"]) for config in configs}


def _left_out(
    settings: Sequence[tuple[str, float]], results: Mapping[tuple[str, float], Sequence[Scores]], seeds: int
) -> Iterator[str]:
    for setting in settings:
        missing = seeds - len(results.get(setting, ()))
        yield f"{setting[0]}, λ {setting[1]:g}: left out, no epoch could be selected for {missing} of {seeds} seeds"


def _unselected(found: Sequence[_Found]) -> list[str]:
    return [
        f"{METHODS[one.method].title}, seed {one.seed}: {one.report['note']}; the tables leave it out"
        for one in found
        if one.scores is None
    ]


def _seeds_note(order: Sequence[Sequence[int]]) -> list[str]:
    if len(order) < 2:
        return []
    return [
        "Not every method has been run, or has a selected epoch, for the same seeds: means are over the seeds that "
        "there are, and methods with other seeds stand in tables of their own."
    ]


def _gaussian_note(found: Sequence[_Found], dataset: str) -> list[str]:
    scores = [Scores(**one.report["scores"][LOG_DENSITY]) for one in found if one.method == "centered_gaussian"]
    if not scores:
        return []
    texts = []
    for metric in METRICS[:2]:
        kind = published_sd_kind(metric, "centered_gaussian", dataset)
        number = mean_and_sd([getattr(one, metric) for one in scores], kind)
        texts.append(f"{TITLES[metric]} {digits(number.mean)} ± {digits(number.sd)} ({kind} sd)")
    return [
        "Centered Gaussian is scored in the form behind the published figure: positions linspace(1, S-1, S), the "
        f"density in float64, ties where it underflows. By its log-density, without ties: {', '.join(texts)}."
    ]


def _about(found: Sequence[_Found], axes: Sequence[str] = ()) -> dict[str, Any]:
    """What the numbers were computed with; `axes` are what the study varies, no departures."""
    runs = [one for one in found if "execution" in one.report]
    departures: dict[str, dict[str, Any]] = defaultdict(dict)
    for one in runs:
        own = {name: value for name, value in one.report["departures"].items() if name not in axes}
        departures[one.method][str(one.seed)] = own
    return {
        "software": sorted({_software(one.report["environment"]) for one in found}),
        "machines": sorted({_machine(one.report) for one in runs or found}),
        "dates": sorted({one.report["options"]["date"] for one in found}),
        "runs": len(runs),
        "seconds": sum(one.report["seconds"]["total"] for one in runs),
        "departures": departures,
    }


def _software(versions: Mapping[str, Any]) -> str:
    commit = versions["commit"]
    where = f"commit {commit['id'][:12]}{' with uncommitted changes' * commit['dirty']}" if commit else "installed"
    return f"normal-guidance {versions['normal_guidance']}, {where}, torch {versions['torch']}"


def _machine(report: Mapping[str, Any]) -> str:
    execution = report.get("execution")
    return report["environment"]["device"] + (f", {execution['precision']}" if execution else "")


def _departures_line(departures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Method -> seed -> departures; what several runs share is said once."""
    runs_of: dict[str, list[str]] = defaultdict(list)
    for method, of_seeds in departures.items():
        texts = {seed: ", ".join(f"{name} {value}" for name, value in own.items()) for seed, own in of_seeds.items()}
        for text in dict.fromkeys(texts.values()):
            seeds = [seed for seed in texts if texts[seed] == text]
            runs_of[text].append(method if len(seeds) == len(texts) else f"{method} seed {', '.join(seeds)}")
    return "; ".join(f"{text} ({', '.join(runs)})" for text, runs in runs_of.items() if text) or "none"


def _over(seeds: Sequence[int]) -> str:
    return f"Over seed{'s' * (len(seeds) > 1)} {', '.join(map(str, seeds))}"


def _markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str]) -> str:
        padded = (f"{cell:{side}{width}}" for cell, side, width in zip(cells, sides, widths, strict=True))
        return f"| {' | '.join(padded)} |"

    sides = "<" + ">" * (len(widths) - 1)
    rule = [f":{'-' * (widths[0] + 1)}", *(f"{'-' * (width + 1)}:" for width in widths[1:])]
    return [line(header), f"|{'|'.join(rule)}|", *map(line, rows)]
