"""The configurations that a study chose, trained again from several initial weights.

A study trains every configuration once for each partition, so a method's number is one draw of its initial weights.
Here the chosen configuration of every partition is trained from more of them, all at once, and so is the published one
where it differs.  Data, order of the scans and protocol stay the same.

    STUDY/initialisations/chosen/METHOD/SEED       runs with one winner for each initialisation
    STUDY/initialisations/published/METHOD/SEED
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import product
from pathlib import Path

import numpy as np

from normal_guidance.errors import UserError
from normal_guidance.evaluation.published import published_choice
from normal_guidance.evaluation.study import Listener, Study, Train, TrainingJob, train_jobs
from normal_guidance.evaluation.study_folder import FORMS, find_results, load_result
from normal_guidance.statistics.scores import Metric
from normal_guidance.training.config import Config

INITIALISATIONS = "initialisations"
ORIGINS = ("chosen", "published")
"""Whose choice is trained again: validation's in this study, or the authors' where it differs."""

STEP = 10_000
"""Seeds of initial weights lie so far apart; the first is the study's own."""


def from_initialisations(config: Config, count: int) -> tuple[Config, ...]:
    """Return the configuration with so many seeds of initial weights, its own first."""
    return tuple(replace(config, seed=config.seed + STEP * number) for number in range(count))


def initialisation_jobs(study: Study, count: int) -> list[TrainingJob]:
    """Return a job for each trained method and partition of a complete study, and each of `ORIGINS`."""
    methods = [method for method in study.methods if method not in FORMS]
    return [job for seed in study.seeds for method in methods for job in _jobs_of_run(study, method, seed, count)]


def _jobs_of_run(study: Study, method: str, seed: int, count: int) -> Iterator[TrainingJob]:
    found = load_result(method, seed, study.folder / method / str(seed))
    if found is None:
        raise UserError(f"{study.folder} has no complete run {method}/{seed}; train it first, by the same command")
    if not found.winners:
        return  # nothing was selected
    chosen = found.winners[0].config
    configs = {"chosen": chosen}
    theirs = published_choice(method, study.dataset.name, seed)
    if theirs is not None and theirs != (chosen.l1, chosen.lr):
        configs["published"] = replace(chosen, l1=theirs.l1, lr=theirs.lr)
    for origin, config in configs.items():
        yield TrainingJob(
            method=method,
            folder=study.folder / INITIALISATIONS / origin / method / str(seed),
            protocol=replace(study.config(method, seed), l1=config.l1, lr=config.lr),
            make_grid=partial(from_initialisations, count=count),
            title=f"{count} initialisations of {method}, {origin}, seed {seed}",
        )


def train_initialisations(
    study: Study, count: int, listener: Listener | None = None, train: Train | None = None
) -> None:
    """Train what the study's folder lacks."""
    train_jobs(study, initialisation_jobs(study, count), listener, train)


@dataclass(frozen=True)
class Initialisations:
    """The test scores of one method from every initialisation, for each partition."""

    method: str
    origin: str
    scores: Mapping[int, Mapping[int, float]]
    """Seed of the partition -> seed of the initial weights -> score, where an epoch was selected."""
    best: Mapping[int, int] = field(default_factory=dict)
    """Seed of the partition -> seed of the initial weights with the highest validation AUROC."""

    @property
    def means(self) -> np.ndarray:
        """The mean over the partitions for every combination of their initialisations: what a study might have shown."""
        return np.array([np.mean(one) for one in product(*(values.values() for values in self.scores.values()))])

    @property
    def first(self) -> float:
        """The mean of the study's own initialisations; NaN where nothing was selected from one of them."""
        return float(np.mean([values.get(seed, np.nan) for seed, values in self.scores.items()]))

    @property
    def chosen(self) -> float:
        """The mean where validation chooses the initialisation of each partition; NaN where its choice is unknown."""
        return float(np.mean([values.get(self.best.get(seed, -1), np.nan) for seed, values in self.scores.items()]))

    def share_below(self, value: float) -> float:
        """The share of `means` that do not exceed a value."""
        return float((self.means <= value).mean())


def collect_initialisations(folder: Path, dataset: str, metric: Metric) -> list[Initialisations]:
    """Return the scores of all complete runs below a study's folder, by origin and method.

    Where validation chose what the authors chose, its run counts for both.  A method's partition is left out where no
    initialisation could be selected.
    """
    runs: dict[tuple[str, str], Initialisations] = {}
    for origin in ORIGINS:
        for one in find_results(folder / INITIALISATIONS / origin, dataset):
            tested = [winner for winner in one.winners if winner.test is not None]
            if not tested:
                continue
            values = {winner.config.seed: getattr(winner.test, metric) for winner in tested}
            best = max(tested, key=lambda winner: winner.val_auroc).config
            theirs = published_choice(one.method, dataset, one.seed) == (best.l1, best.lr)
            for whose in (origin, "published") if theirs and origin == "chosen" else (origin,):
                row = runs.setdefault((whose, one.method), Initialisations(one.method, whose, {}, {}))
                scores = dict(sorted({**row.scores, one.seed: values}.items()))
                runs[whose, one.method] = replace(row, scores=scores, best={**row.best, one.seed: best.seed})
    found = sorted(runs.values(), key=lambda row: ORIGINS.index(row.origin))
    return [
        row for row in found if row.origin == "chosen" or row.scores != _scores_of(runs.get(("chosen", row.method)))
    ]


def _scores_of(row: Initialisations | None) -> Mapping[int, Mapping[int, float]]:
    return {} if row is None else row.scores
