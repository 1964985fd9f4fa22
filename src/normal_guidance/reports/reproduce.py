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
from datetime import timedelta
from functools import cache
from pathlib import Path
from typing import Any

from normal_guidance.core.bags import Bags
from normal_guidance.core.models import METHODS, CenteredGaussian
from normal_guidance.data.synthetic import SEEDS, SemiSynthetic, bayes_scan_scores, bayes_slice_scores, semi_synthetic
from normal_guidance.errors import UserError
from normal_guidance.evaluation.published import CEILING, METRICS, Choice, published_choice, published_sd_kind
from normal_guidance.evaluation.runs import (
    NOT_OURS,
    Run,
    Selected,
    environment,
    environments_of,
    load_run,
    run_sweep,
)
from normal_guidance.evaluation.scores import Scores, score
from normal_guidance.features.store import fingerprint_of
from normal_guidance.files import make_folder, read_json, write_json
from normal_guidance.reports.tables import (
    LATEX_HEAD,
    RULE,
    TITLES,
    Grid,
    PaperTables,
    SensitivityTable,
    mean_sd,
    over_seeds,
    paper_tables,
    sensitivity_table,
    write_page,
)
from normal_guidance.training.config import Config, grid, sensitivity_grid
from normal_guidance.training.fit import predict
from normal_guidance.training.run import CONFIG, REPORT, identity_of, is_begun
from normal_guidance.training.selection import group_of
from normal_guidance.training.stack import initial_model
from normal_guidance.training.sweep import Execution
from normal_guidance.training.watch import Progress

SCORES = "scores.json"
SENSITIVITY = "sensitivity"

PUBLISHED_FORM, LOG_DENSITY = "published form", "log-density"
"""How Centered Gaussian is scored: the first is its row of the tables, the second is told in the notes."""

FORMS = {CEILING: (CEILING,), "centered_gaussian": (PUBLISHED_FORM, LOG_DENSITY)}
"""What is not trained, and the names of its scores."""

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
        >>> [row.title for row in results.table.rows]
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
    configs: tuple[Config, ...]

    @property
    def seed(self) -> int:
        return self.configs[0].seed

    def is_done(self, study: Study) -> bool:
        """Whether the folder holds this run, complete; another one, complete or begun, is refused.

        How a complete one was computed does not matter here, so a folder can be told about on any machine.
        """
        found = _load(self.configs[0].method, self.seed, self.folder)
        if found is not None:
            found.check_dataset(study.dataset.name)
        identity = identity_of(self.configs, study.execution, {})
        compared = ("configs",) if found else ("configs", "execution")
        is_begun(self.folder, {name: identity[name] for name in compared})
        return found is not None


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
            configs=tuple(make_grid(study.config(method, seed))),
        )
        for seed in study.seeds
        for method in methods
    ]


def _train(study: Study, jobs: Sequence[_Job], listener: Listener, untrained: Sequence[str] = ()) -> None:
    # All folders are looked at before hours go into the first.
    lacking = [job for job in jobs if not job.is_done(study)]
    unscored = [(seed, method) for seed in study.seeds for method in untrained if not _is_scored(study, method, seed)]
    make_folder(study.folder)
    for seed in study.seeds:
        _train_seed(study, seed, lacking, [method for of_seed, method in unscored if of_seed == seed], listener)


def _is_scored(study: Study, method: str, seed: int) -> bool:
    found = _load(method, seed, study.folder / method / str(seed))
    if found is not None:
        found.check_dataset(study.dataset.name)
    return found is not None


def _train_seed(study: Study, seed: int, lacking: Sequence[_Job], unscored: Sequence[str], listener: Listener) -> None:
    """One seed's scans are drawn if something needs them, and gone when this returns."""
    draw, jobs = cache(study.dataset.draw), [job for job in lacking if job.seed == seed]
    for job in lacking if jobs else ():
        initial_model(job.configs[0], draw(seed).train.width)  # refuses what cannot be built, of later seeds too
    for method in unscored:
        folder = study.folder / method / str(seed)
        make_folder(folder)
        write_json(folder / SCORES, _score_untrained(study, method, draw(seed).test))
    for job in jobs:
        options = {"dataset": study.dataset.name}
        with listener.watching(job.title) as watch:
            run = run_sweep(job.folder, job.configs, *draw(seed), study.execution, options=options, watch=watch)
        listener.finished(job.title, run)


def _score_untrained(study: Study, method: str, test: Bags) -> dict[str, Any]:
    if method == CEILING:
        scores = {CEILING: study.dataset.ceiling(test)}
    else:
        forms = {PUBLISHED_FORM: True, LOG_DENSITY: False}
        models = {form: CenteredGaussian(published=published) for form, published in forms.items()}
        scores = {form: score(test, predict(model, test).slice_scores) for form, model in models.items()}
    return {
        "options": {"dataset": study.dataset.name},
        "data": {"test": {"scans": len(test), "fingerprint": fingerprint_of({"test": test})}},
        "environments": [environment(Execution())],
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
    table: PaperTables | SensitivityTable | None
    """None where nothing has scores."""
    chosen: tuple[Chosen, ...]
    notes: tuple[str, ...]
    about: Mapping[str, Any]

    def markdown(self) -> str:
        """A page of documentation as it is."""
        head = [f"# {self.title}", "", *(f"- {line}" for line in self._about_lines()), ""]
        tables = ["## Tables", "", self.table.markdown()] if self.table else []
        rows = [one.cells(one.setting if self.method else METHODS[one.method].title) for one in self.chosen]
        header = ("Setting" if self.method else "Method", *CHOSEN_HEADER)
        chosen = [Grid("What validation chose", "", header, rows).markdown(level=2)] if rows else []
        notes = ["## Notes", "", *(f"- {note}" for note in self.notes), ""] if self.notes else []
        return "\n".join([*head, *tables, *chosen, *notes])

    def latex(self) -> str:
        r"""The tables for `\input`; what they were computed with stands above them as comments."""
        comments = [f"% {line}" for line in (self.title, *self._about_lines(), *self.notes)]
        return "\n".join([*comments, self.table.latex() if self.table else LATEX_HEAD])

    def csv(self) -> str:
        """One line per number and all its digits."""
        return self.table.csv() if self.table else ""

    def json(self) -> str:
        """Everything, for computing."""
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

    def _about_lines(self) -> list[str]:
        about = self.about
        return [
            f"Software: {'; '.join(about['software'])}",
            f"Machine: {'; '.join(about['machines'])}",
            f"Date: {' to '.join(dict.fromkeys((about['dates'][0], about['dates'][-1])))}",
            f"Training time: {timedelta(seconds=round(about['seconds']))} (h:mm:ss) for {about['runs']} runs",
            f"Departures from the paper's protocol: {_departures_line(about['departures'])}",
        ]


def collect(folder: str | Path, dataset: str) -> Results:
    """The paper's tables of every complete run of `dataset` in a study's folder, whoever asked for it.

    Methods that have been run with fewer seeds than others say so in their rows.

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
    table = paper_tables(by_method, dataset) if by_method else None
    return Results(
        title=f"{dataset.capitalize()}: the paper's tables, reproduced",
        dataset=dataset,
        method=None,
        table=table,
        chosen=tuple(_chosen(found, dataset)),
        notes=(*_unselected(found), *_seeds_note(table), *_gaussian_note(found, dataset)),
        about=_about(found),
    )


def collect_sensitivity(folder: str | Path, dataset: str, method: str) -> Results:
    """The sensitivity of a method, of every seed that is complete in a study's folder."""
    found = list(_found(Path(folder) / SENSITIVITY, dataset, (method,)))
    if not found:
        raise UserError(f"{folder} holds no complete sensitivity run of {method} on {dataset}; run it first")
    results: dict[tuple[str, float], dict[int, Scores]] = defaultdict(dict)
    for one in found:
        for winner in one.winners:
            if winner.test is not None:
                results[winner.config.divergence, winner.config.guidance_weight][one.seed] = winner.test
    complete = {setting: of_seeds for setting, of_seeds in results.items() if len(of_seeds) == len(found)}
    return Results(
        title=f"{dataset.capitalize()}: sensitivity of {METHODS[method].title}",
        dataset=dataset,
        method=method,
        table=sensitivity_table(complete, dataset, method) if complete else None,
        chosen=tuple(_chosen(found, dataset)),
        notes=tuple(_left_out(sorted(_settings(found) - set(complete)), results, len(found))),
        about=_about(found, axes=("divergence", "guidance_weight")),
    )


@dataclass(frozen=True)
class _Found:
    """What is complete for one method and seed: a run, or the scores of what is not trained."""

    method: str
    seed: int
    folder: Path
    dataset: str | None
    test: str | None
    """Fingerprint of the test scans."""
    run: Run | None
    forms: Mapping[str, Scores]
    """Of what is not trained; the first is its row of the tables."""
    departures: Mapping[str, Any]
    software: tuple[str, ...]
    machines: tuple[str, ...]
    dates: tuple[str, ...]
    """Of every start."""

    @property
    def winners(self) -> tuple[Selected, ...]:
        return self.run.winners if self.run else ()

    @property
    def scores(self) -> Scores | None:
        """None where no epoch could be selected."""
        if self.run is None:
            return next(iter(self.forms.values()))
        return self.winners[0].test if self.winners else None

    def check_dataset(self, name: str) -> None:
        if self.dataset != name:
            raise UserError(f"{self.folder} is about {self.dataset or 'other scans'}, not {name}; give another folder")


def _found(folder: Path, dataset: str, methods: Sequence[str]) -> Iterator[_Found]:
    """By method in the order of the tables, then by seed; runs on other data are not ours."""
    for method in methods:
        seeds = sorted(int(path.name) for path in (folder / method).glob("*") if path.name.isdecimal())
        for seed in seeds:
            one = _load(method, seed, folder / method / str(seed))
            if one is not None and one.dataset == dataset:
                yield one


def _load(method: str, seed: int, folder: Path) -> _Found | None:
    """None where nothing is complete; a file of another shape is refused here, so that nothing stumbles over it."""
    path = folder / (SCORES if method in FORMS else REPORT)
    if not path.is_file():
        return None
    run = None if method in FORMS else load_run(folder)
    content = read_json(path) if run is None else run.report
    try:
        starts = environments_of(content)
        how = f", {content['execution']['precision']}" if run else ""
        return _Found(
            method=method,
            seed=seed,
            folder=folder,
            dataset=content["options"].get("dataset"),
            test=content["data"].get("test", {}).get("fingerprint"),
            run=run,
            forms={form: Scores(**content["scores"][form]) for form in FORMS.get(method, ())},
            departures=content["departures"] if run else {},
            software=tuple(map(_software, starts)),
            machines=tuple(f"{start['device']}{how}" for start in starts),
            dates=tuple(str(start["date"]) for start in starts),
        )
    except NOT_OURS as error:
        raise UserError(f"{path} is damaged or none of ours ({error!r}); delete it, or give another folder") from error


def _check_same_scans(found: Sequence[_Found]) -> None:
    first: dict[int, _Found] = {}
    for one in found:
        other = first.setdefault(one.seed, one)
        if one.test != other.test:
            raise UserError(
                f"{one.folder} and {other.folder} were scored on different test scans; delete one and run it again"
            )


def _chosen(found: Sequence[_Found], dataset: str) -> Iterator[Chosen]:
    for one in found:
        if one.run is None:
            continue
        for winner in one.run.winners:
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
                seconds=one.run.seconds,
                published=published_choice(one.method, dataset, one.seed) if standard else None,
            )


def _settings(found: Sequence[_Found]) -> set[tuple[str, float]]:
    settings = set()
    for one in found:
        path = one.folder / CONFIG
        try:
            settings |= {(config["divergence"], config["guidance_weight"]) for config in read_json(path)["configs"]}
        except NOT_OURS as error:
            raise UserError(f"{path} is damaged or none of ours ({error!r}); copy the run again") from error
    return settings


def _left_out(
    settings: Sequence[tuple[str, float]], results: Mapping[tuple[str, float], Mapping[int, Scores]], seeds: int
) -> Iterator[str]:
    for setting in settings:
        missing = seeds - len(results.get(setting, ()))
        yield f"{setting[0]}, λ {setting[1]:g}: left out, no epoch could be selected for {missing} of {seeds} seeds"


def _unselected(found: Sequence[_Found]) -> list[str]:
    return [
        f"{METHODS[one.method].title}, seed {one.seed}: {one.run.note}; the tables leave it out"
        for one in found
        if one.run and one.scores is None
    ]


def _seeds_note(table: PaperTables | None) -> list[str]:
    if table is None or all(row.seeds == table.seeds for row in table.rows):
        return []
    return [
        "Not every method has been run, or has a selected epoch, for every seed: means are over the seeds that there "
        "are, and rows with fewer say so."
    ]


def _gaussian_note(found: Sequence[_Found], dataset: str) -> list[str]:
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


def _about(found: Sequence[_Found], axes: Sequence[str] = ()) -> dict[str, Any]:
    """What the numbers were computed with; `axes` are what the study varies, no departures."""
    runs = [one for one in found if one.run]
    departures: dict[str, dict[str, Any]] = defaultdict(dict)
    for one in runs:
        own = {name: value for name, value in one.departures.items() if name not in axes}
        departures[one.method][str(one.seed)] = own
    return {
        "software": sorted({name for one in found for name in one.software}),
        "machines": sorted({name for one in runs or found for name in one.machines}),
        "dates": sorted({date for one in found for date in one.dates}),
        "runs": len(runs),
        "seconds": sum(one.run.seconds for one in runs if one.run),
        "departures": departures,
    }


def _software(versions: Mapping[str, Any]) -> str:
    commit = versions["commit"]
    where = "installed"
    if commit:
        how = " (as told)" if commit.get("told") else " with uncommitted changes" if commit["dirty"] else ""
        where = f"commit {commit['id'][:12]}{how}"
    return f"normal-guidance {versions['normal_guidance']}, {where}, torch {versions['torch']}"


def _departures_line(departures: Mapping[str, Mapping[str, Mapping[str, Any]]]) -> str:
    """Method -> seed -> departures; what several runs share is said once."""
    runs_of: dict[str, list[str]] = defaultdict(list)
    for method, of_seeds in departures.items():
        texts = {seed: ", ".join(f"{name} {value}" for name, value in own.items()) for seed, own in of_seeds.items()}
        for text in dict.fromkeys(texts.values()):
            seeds = [seed for seed in texts if texts[seed] == text]
            runs_of[text].append(method if len(seeds) == len(texts) else f"{method} seed {', '.join(seeds)}")
    return "; ".join(f"{text} ({', '.join(runs)})" for text, runs in runs_of.items() if text) or "none"
