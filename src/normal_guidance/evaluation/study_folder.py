"""The complete results in a study's folder.

DIR/<method>/<seed>/                 a run of the grid (`normal_guidance.evaluation.runs`)
DIR/<method>/<seed>/scores.json      scores of what needs no training, Centered Gaussian and the Bayes oracle
                                     ("ceiling"); predictions.parquet lies beside it, as in runs
DIR/slice_reference/<seed>/ and DIR/scan_reference/<seed>/   together the ceiling where no oracle is known
DIR/sensitivity/<method>/<seed>/     the grid for each divergence and lambda
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from normal_guidance.core.methods import CEILING, COMMITTEE, COMPARED, SCAN_REFERENCE, SLICE_REFERENCE
from normal_guidance.errors import UserError
from normal_guidance.evaluation.run_report import (
    Run,
    Selected,
    check_environments,
    environments_of,
    load_run,
    scores_from_json,
)
from normal_guidance.evaluation.supervised import References
from normal_guidance.files import read_json
from normal_guidance.statistics.scores import Scores
from normal_guidance.training.run_folder import REPORT
from normal_guidance.typed_json import ContentError, read_as

SCORES = "scores.json"
SENSITIVITY = "sensitivity"

PUBLISHED_FORM, LOG_DENSITY = "published form", "log-density"
"""How Centered Gaussian is scored: the tables show the first, the notes mention the second."""

FORMS = {CEILING: (CEILING,), COMMITTEE: (COMMITTEE,), "centered_gaussian": (PUBLISHED_FORM, LOG_DENSITY)}
"""Rows without a sweep, and the names of their scores."""

REFERENCES = (SLICE_REFERENCE, SCAN_REFERENCE)
"""Models that are trained with slice labels."""

EVERYTHING = (*COMPARED, CEILING, *REFERENCES)
"""All names that a study's folder may hold."""


@dataclass(frozen=True)
class StudyResult:
    """The complete result for one method and seed: a run, or the scores of a method without a sweep."""

    method: str
    seed: int
    folder: Path
    dataset: str | None
    fingerprints: Mapping[str, str]
    """Fingerprint of the scans of each part."""
    run: Run | None
    forms: Mapping[str, Scores]
    """Scores of a method without a sweep; the tables show the first."""
    departures: Mapping[str, Any]
    environments: tuple[Mapping[str, Any], ...]
    """One for every start of the run."""
    precision: str | None
    """Precision of the run's training; None for a method without a sweep."""

    @property
    def winners(self) -> tuple[Selected, ...]:
        return self.run.winners if self.run else ()

    @property
    def scores(self) -> Scores | None:
        """Test scores; None where no epoch could be selected."""
        if self.run is None:
            return next(iter(self.forms.values()))
        return self.winners[0].test if self.winners else None

    def check_dataset(self, name: str) -> None:
        if self.dataset != name:
            raise UserError(f"{self.folder} is about {self.dataset or 'other scans'}, not {name}; give another folder")


def find_folders(folder: Path, methods: Sequence[str] | None = None) -> Iterator[tuple[str, int, Path]]:
    """Yield method, seed and path of every folder DIR/METHOD/SEED, by method in the given order, then by seed.

    Without `methods`, every folder's name is one: first those of the paper's tables in their order, then the rest.
    """
    if methods is None:
        rank = {method: number for number, method in enumerate(EVERYTHING)}
        names = (path.name for path in folder.glob("*") if path.is_dir())
        methods = sorted(names, key=lambda name: (rank.get(name, len(rank)), name))
    for method in methods:
        seeds = (path for path in (folder / method).glob("*") if path.name.isdecimal())
        for path in sorted(seeds, key=lambda path: int(path.name)):
            yield method, int(path.name), path


def find_results(folder: Path, dataset: str, methods: Sequence[str] = EVERYTHING) -> Iterator[StudyResult]:
    """Yield the complete results on one dataset, by method in the given order, then by seed."""
    for method, seed, path in find_folders(folder, methods):
        one = load_result(method, seed, path)
        if one is not None and one.dataset == dataset:
            yield one


def load_result(method: str, seed: int, folder: Path) -> StudyResult | None:
    """Load a result; None where nothing is complete.  A file of another shape is refused."""
    path = folder / (SCORES if method in FORMS else REPORT)
    if not path.is_file():
        return None
    run = None if method in FORMS else load_run(folder)
    content = read_json(path) if run is None else run.report
    try:
        known = read_as(_Content, content, exact=False)
        if run is None:  # a run's were checked when it was loaded
            check_environments(content)
        return StudyResult(
            method=method,
            seed=seed,
            folder=folder,
            dataset=read_as(str | None, known.options.get("dataset"), "options.dataset"),
            fingerprints={part: read_as(str, scans.get("fingerprint"), part) for part, scans in known.data.items()},
            run=run,
            forms={form: scores_from_json(known.scores[form]) for form in FORMS.get(method, ())},
            departures=content["departures"] if run else {},
            environments=tuple(environments_of(content)),
            precision=content["execution"]["precision"] if run else None,
        )
    except (ContentError, KeyError) as error:
        raise UserError(
            f"{path} is damaged or not written by nguide ({error}); delete it, or give another folder"
        ) from error


@dataclass(frozen=True)
class _Content:
    """The types of what is read from scores.json and from report.json."""

    options: dict[str, Any]
    data: dict[str, dict[str, Any]]
    scores: dict[str, dict[str, Any]] = field(default_factory=dict)


def reference_scores(found: Sequence[StudyResult]) -> dict[int, Scores]:
    """Scores of the supervised reference, the tables' last row, for every seed that has both of its runs."""
    runs = {(one.method, one.seed): one.run for one in found if one.run is not None}
    scores = {}
    for seed in sorted({seed for _, seed in runs}):
        slices, scans = (runs.get((reference, seed)) for reference in REFERENCES)
        both = References(slices, scans).scores if slices and scans else None
        if both is not None:
            scores[seed] = both
    return scores
