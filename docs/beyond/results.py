"""Results as files: one JSON a job and seed, small, whole or not there, with what intervals are computed from."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from beyond.points import Job, Point, Protocol
from normal_guidance.errors import UserError
from normal_guidance.files import make_folder, read_json, write_atomically
from normal_guidance.statistics.split_results import MethodResults, SplitResults


@dataclass(frozen=True)
class Winner:
    """The selected epoch of the selected configuration of one lambda; of what is not trained only `test` is set."""

    test: MethodResults
    weight: float = 1.0
    lr: float | None = None
    l1: float | None = None
    epoch: int | None = None
    val_auroc: float | None = None
    numbers: Mapping[str, float] = field(default_factory=dict)
    criteria: Mapping[str, float] = field(default_factory=dict)
    """Of validation scans, without slice labels; for jobs that ask for lambda."""
    val_localization: float | None = None
    """By slice labels of the validation scans; for the same jobs."""

    def as_json(self) -> dict[str, Any]:
        kept = {name: value for name, value in vars(self).items() if name != "test"}
        test = {
            "auroc": [round(value, 6) for value in self.test.auroc.tolist() if not math.isnan(value)],
            "auprc": [round(value, 4) for value in self.test.auprc.tolist() if not math.isnan(value)],
            "scan_scores": None if self.test.scan_scores is None else _nine_digits(self.test.scan_scores),
        }
        return {**kept, "test": test}


def _nine_digits(values: np.ndarray) -> list[float]:
    """Enough for every float32 to stay itself."""
    return [float(f"{value:.9g}") for value in values.tolist()]


@dataclass(frozen=True)
class Result:
    """What one job on one seed left."""

    job: Mapping[str, Any]
    seed: int
    protocol: Protocol
    labels: tuple[int, ...]
    """Of the test scans; the positive ones are those that have a localization."""
    winners: tuple[Winner, ...]
    """None where no epoch could be selected."""
    about: Mapping[str, Any]

    def winner(self, weight: float) -> Winner | None:
        return next((one for one in self.winners if one.weight == weight), None)


def path_of(folder: Path, job: Job, seed: int) -> Path:
    return folder / job.variant / job.name / f"{seed}.json"


def write(folder: Path, job: Job, result: Result) -> None:
    path = path_of(folder, job, result.seed)
    make_folder(path.parent)
    content = {
        "job": result.job,
        "seed": result.seed,
        "protocol": asdict(result.protocol),
        "about": result.about,
        "labels": "".join(map(str, result.labels)),
        "winners": [one.as_json() for one in result.winners],
    }
    write_atomically(path, json.dumps(content, separators=(",", ":")).encode())


def read(folder: Path, job: Job, seed: int, protocol: Protocol) -> Result | None:
    """The result if it is there; one of another job or protocol is refused."""
    path = path_of(folder, job, seed)
    if not path.exists():
        return None
    content = read_json(path)
    for name, asked in (("job", job.as_json()), ("protocol", asdict(protocol))):
        known = json.loads(json.dumps(asked))
        if content[name] != known:
            differing = next(key for key in known if content[name].get(key) != known[key])
            raise UserError(
                f"{path} is of another {name}: {differing} is {content[name].get(differing)}, not {known[differing]}; "
                "give another folder (--runs), or the options that it was made with"
            )
    labels = tuple(map(int, content["labels"]))
    winners = tuple(_winner(one, np.array(labels) == 1) for one in content["winners"])
    return Result(content["job"], seed, protocol, labels, winners, content["about"])


def _winner(content: Mapping[str, Any], positive: np.ndarray) -> Winner:
    test, rest = content["test"], {name: value for name, value in content.items() if name != "test"}
    both = {name: np.full(len(positive), np.nan) for name in ("auroc", "auprc")}
    for name, values in both.items():
        values[positive] = test[name]
    scores = test["scan_scores"]
    return Winner(test=MethodResults(**both, scan_scores=None if scores is None else np.array(scores, float)), **rest)


Found = Mapping[tuple[Job, int], Result]
"""All results that are there, by job and seed."""


def read_all(folder: Path, jobs: Sequence[Job], seeds: Sequence[int], protocol: Protocol) -> Found:
    every = {(job, seed): read(folder, job, seed, protocol) for job in jobs for seed in seeds}
    return {key: result for key, result in every.items() if result is not None}


def winners_of(found: Found, point: Point) -> dict[int, Winner]:
    """By seed."""
    results = {seed: result for (job, seed), result in found.items() if job == point.job}
    winners = {seed: result.winner(point.weight) for seed, result in results.items()}
    return {seed: winner for seed, winner in winners.items() if winner is not None}


def split(found: Found, points: Sequence[Point], seed: int) -> SplitResults:
    """The test scans of a seed, and these points on them, by label; all have a winner, and all are of one variant."""
    labels = np.array(found[points[0].job, seed].labels, dtype=np.int64)
    ids = tuple(f"{seed}-{number}" for number in range(len(labels)))
    return SplitResults(ids, ids, labels, {point.label: winners_of(found, point)[seed].test for point in points})
