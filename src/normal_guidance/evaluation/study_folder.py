"""What is complete in a study's folder.

DIR/<method>/<seed>/                 a run of the grid (`normal_guidance.evaluation.runs`)
DIR/<method>/<seed>/scores.json      of what needs no training: Centered Gaussian, the Bayes oracle ("ceiling"),
                                     with predictions.parquet beside it, as runs have one
DIR/slice_reference/<seed>/ and DIR/scan_reference/<seed>/   together the ceiling where no oracle is known
DIR/sensitivity/<method>/<seed>/     the grid for each divergence and lambda
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normal_guidance.core.method_names import CEILING, SCAN_REFERENCE, SLICE_REFERENCE
from normal_guidance.core.models import EVERY_METHOD
from normal_guidance.errors import UserError
from normal_guidance.evaluation.run_report import NOT_OURS, Run, Selected, environments_of, load_run
from normal_guidance.evaluation.supervised import References
from normal_guidance.files import read_json
from normal_guidance.statistics.scores import Scores
from normal_guidance.training.run_folder import REPORT

SCORES = "scores.json"
SENSITIVITY = "sensitivity"

PUBLISHED_FORM, LOG_DENSITY = "published form", "log-density"
"""How Centered Gaussian is scored: the first is its row of the tables, the second is told in the notes."""

FORMS = {CEILING: (CEILING,), "centered_gaussian": (PUBLISHED_FORM, LOG_DENSITY)}
"""What is not trained, and the names of its scores."""

REFERENCES = (SLICE_REFERENCE, SCAN_REFERENCE)
"""What is trained with slice labels."""

EVERYTHING = (*EVERY_METHOD, CEILING, *REFERENCES)
"""What a study's folder may hold."""


@dataclass(frozen=True)
class StudyResult:
    """What is complete for one method and seed: a run, or the scores of what is not trained."""

    method: str
    seed: int
    folder: Path
    dataset: str | None
    fingerprints: Mapping[str, str]
    """Of the scans of each part."""
    run: Run | None
    forms: Mapping[str, Scores]
    """Of what is not trained; the first is its row of the tables."""
    departures: Mapping[str, Any]
    environments: tuple[Mapping[str, Any], ...]
    """Of every start."""
    precision: str | None
    """Of the run."""

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


def find_folders(folder: Path, methods: Sequence[str] | None = None) -> Iterator[tuple[str, int, Path]]:
    """Yield method, seed and path of every folder DIR/METHOD/SEED, by method in the given order, then by seed.

    Without `methods`, every folder's name is one: first those of the paper's tables in their order, then the rest.

    Example:
        >>> from tempfile import TemporaryDirectory
        >>> with TemporaryDirectory() as folder:
        ...     for name in ("mine/1", "ng/10", "ng/9", "ng/notes", "mean/9"):
        ...         (Path(folder) / name).mkdir(parents=True)
        ...     [f"{method}/{seed}" for method, seed, _ in find_folders(Path(folder))]
        ['mean/9', 'ng/9', 'ng/10', 'mine/1']
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
    """None where nothing is complete; a file of another shape is refused here, so that nothing stumbles over it."""
    path = folder / (SCORES if method in FORMS else REPORT)
    if not path.is_file():
        return None
    run = None if method in FORMS else load_run(folder)
    content = read_json(path) if run is None else run.report
    try:
        return StudyResult(
            method=method,
            seed=seed,
            folder=folder,
            dataset=content["options"].get("dataset"),
            fingerprints={part: scans["fingerprint"] for part, scans in content["data"].items()},
            run=run,
            forms={form: Scores(**content["scores"][form]) for form in FORMS.get(method, ())},
            departures=content["departures"] if run else {},
            environments=tuple(_complete(start) for start in environments_of(content)),
            precision=content["execution"]["precision"] if run else None,
        )
    except NOT_OURS as error:
        raise UserError(f"{path} is damaged or none of ours ({error!r}); delete it, or give another folder") from error


def _complete(environment: Mapping[str, Any]) -> Mapping[str, Any]:
    """As it is, if it tells what the tables tell of it."""
    for name in ("normal_guidance", "commit", "torch", "device", "date"):
        environment[name]
    return environment


def reference_scores(found: Sequence[StudyResult]) -> dict[int, Scores]:
    """Of every seed with both supervised references, what they are the tables' last row with."""
    runs = {(one.method, one.seed): one.run for one in found if one.run is not None}
    scores = {}
    for seed in sorted({seed for _, seed in runs}):
        slices, scans = (runs.get((reference, seed)) for reference in REFERENCES)
        both = References(slices, scans).scores if slices and scans else None
        if both is not None:
            scores[seed] = both
    return scores
