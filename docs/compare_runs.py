"""Compares one method with every other of kept runs on the semi-synthetic test scans, pair by pair: is it ahead?

    .venv/bin/python docs/compare_runs.py posterior_bells docs/results/runs/semi-synthetic docs/results/runs/beyond

`nguide reproduce --report` tests what the paper's text is about: a method against its twin, the centred Gaussian, the
ceiling.  Here one method is tested against all that have predictions for every seed, with Holm's correction over them.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from normal_guidance.core.method_names import CEILING
from normal_guidance.core.models import EVERY_METHOD
from normal_guidance.evaluation.study import SEMI_SYNTHETIC
from normal_guidance.evaluation.study_folder import find_results
from normal_guidance.evaluation.study_predictions import StudyPredictions, read_prediction
from normal_guidance.reports.difference_tables import Differences
from normal_guidance.statistics.differences import Claim, differences
from normal_guidance.statistics.scores import Metric
from normal_guidance.training.run_folder import PREDICTION_TABLE

METRICS: tuple[Metric, ...] = ("localization_auroc", "scan_auroc")


def predicted(folders: Sequence[Path]) -> dict[str, dict[int, Path]]:
    """Method -> seed -> run, of those that have predictions for every seed."""
    runs: dict[str, dict[int, Path]] = {}
    for folder in folders:
        for one in find_results(folder, SEMI_SYNTHETIC.name):
            if (one.folder / PREDICTION_TABLE).exists():
                runs.setdefault(one.method, {})[one.seed] = one.folder
    return {method: seeds for method, seeds in runs.items() if set(seeds) == set(SEMI_SYNTHETIC.seeds)}


def answers(runs: dict[str, dict[int, Path]], seed: int) -> StudyPredictions:
    """What every method said about the test scans of one seed."""
    scans = SEMI_SYNTHETIC.draw(seed, "test")
    return StudyPredictions(
        seed, scans, {method: read_prediction(seeds[seed], scans) for method, seeds in runs.items()}
    )


def compare(method: str, folders: Sequence[Path]) -> Differences:
    """Of the method, against each of the others, in localization and scan AUROC."""
    runs = predicted(folders)
    if method not in runs:
        sys.exit(f"{method} has no predictions for every seed; there are {', '.join(runs)}")
    claims = [
        Claim(method, other, metric)
        for metric in METRICS
        for other in (*EVERY_METHOD, CEILING)
        if other in runs and other != method and (metric != "scan_auroc" or other != "centered_gaussian")
    ]
    splits = [answers(runs, seed).outcomes(list(runs)) for seed in SEMI_SYNTHETIC.seeds]
    return Differences(SEMI_SYNTHETIC.name, tuple(differences(splits, claims)))


def main() -> None:
    if len(sys.argv) < 3:
        sys.exit("give a method and at least one folder of runs")
    print(compare(sys.argv[1], [Path(folder) for folder in sys.argv[2:]]).markdown())


if __name__ == "__main__":
    main()
