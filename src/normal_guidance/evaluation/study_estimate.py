"""What a study would take: one run of each method is estimated, for all of its runs that are missing."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from normal_guidance.core.methods import SLICE_REFERENCE
from normal_guidance.evaluation.study import Study, TrainingJob
from normal_guidance.evaluation.study_folder import SENSITIVITY
from normal_guidance.evaluation.supervised import slice_reference_config
from normal_guidance.training.estimate import SweepEstimate, estimate_sweep


def estimate_study(study: Study, jobs: Sequence[TrainingJob]) -> list[tuple[SweepEstimate, int]]:
    """Estimate the jobs that are not done yet: an estimate for each method and grid, and its number of runs."""
    lacking = [job for job in jobs if not job.is_done(study)]
    groups: dict[tuple[str, str], list[TrainingJob]] = {}
    for job in lacking:
        groups.setdefault((str(job.folder.parent.parent), job.method), []).append(job)
    found = []
    for same in groups.values():
        job = same[0]
        train, val = (study.dataset.draw(job.seed, part) for part in ("train", "val"))
        protocol = job.protocol
        if job.method == SLICE_REFERENCE:
            protocol = slice_reference_config(protocol, train, job.receptive_field)
        estimate = estimate_sweep(tuple(job.make_grid(protocol)), train, val, study.execution)
        varied = f", {SENSITIVITY}" if job.folder.parent.parent.name == SENSITIVITY else ""
        found.append((replace(estimate, method=f"{job.method}{varied}"), len(same)))
    return found
