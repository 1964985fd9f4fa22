"""The runs of a study on a Ray cluster: each run is a task, with the same folder as on one machine.

Every machine must see the stores and the study's folder under the same path.  If a machine dies, Ray starts its runs
again elsewhere, and they continue from what their folders hold.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch

from normal_guidance.evaluation.run_report import load_run
from normal_guidance.evaluation.study import Listener, Study, StudyData, TrainingJob, options_of
from normal_guidance.ray_cluster import RETRIES, connected
from normal_guidance.training.execution import Execution


def train_on_cluster(address: str, study: Study, jobs: Sequence[TrainingJob], listener: Listener) -> None:
    """Trains the jobs, as many at a time as the cluster has room for, and returns when all are done.

    A run needs a GPU, or as many CPUs as this process has threads.
    """
    if not jobs:
        return
    with connected(address) as cluster:
        import ray

        kind = torch.device(study.execution.device).type
        execution = replace(study.execution, device=kind)  # Ray chooses the GPU of a machine
        needs = {"GPU": 1.0} if kind == "cuda" else {"CPU": float(_threads())}
        cluster.room(needs, "use fewer threads (OMP_NUM_THREADS)")
        remote: Any = ray.remote(
            num_cpus=needs.get("CPU", 1.0), num_gpus=needs.get("GPU", 0.0), max_retries=RETRIES, max_calls=1
        )(_train)
        here = [replace(job, folder=job.folder.resolve()) for job in jobs]
        running = {remote.remote(study.dataset, job, execution, options_of(study), _threads()): job for job in here}
        while running:
            (done, *_), _ = ray.wait(list(running))
            job = running.pop(done)
            cluster.result(done)
            listener.finished(job.title, load_run(job.folder))


def _train(
    dataset: StudyData, job: TrainingJob, execution: Execution, options: Mapping[str, Any], threads: int
) -> None:
    """Trains one job in a process of the cluster."""
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")
    torch.set_num_threads(threads)  # as many as on the calling machine, for the same bits
    job.run(dataset.parts(job.seed), execution, options, None)


def _threads() -> int:
    return torch.get_num_threads()
