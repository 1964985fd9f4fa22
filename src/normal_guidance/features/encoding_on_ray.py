"""Encoding on a Ray cluster: each unit is a task, and this process saves the results.

If a machine dies, Ray runs its tasks again elsewhere.  The bytes are those of one machine, because a unit depends on
its scans alone, and every machine must have the same encoder, the same torch and room for the same number of threads.
All machines must see the scans under the same path.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any
from uuid import uuid4

import torch

from normal_guidance.data.manifest import ScanRow
from normal_guidance.data.worker_pool import Pool
from normal_guidance.errors import UserError
from normal_guidance.features.encoding_folder import Encoded
from normal_guidance.features.encoding_machine import UNIT, Inputs, Machine, Setup
from normal_guidance.features.preprocessing import Statistics
from normal_guidance.ray_cluster import RETRIES, Connection, connected


@contextmanager
def connect(address: str, setup: Setup) -> Iterator[Cluster]:
    """Connects to a running cluster."""
    with connected(address) as connection:
        yield Cluster(connection, setup)


class Cluster:
    """Encodes as `normal_guidance.features.encoding_machine.Machine` does, on many machines."""

    def __init__(self, connection: Connection, setup: Setup) -> None:
        import ray

        self.connection, self.setup, self.job = connection, ray.put(setup), uuid4().hex
        self.needs = _needs(setup)
        self.slots = connection.room(self.needs, "ask for less (--threads, --workers, --device)")

    def measure(self, inputs: Inputs, scans: Iterable[ScanRow]) -> Iterator[dict[str, Statistics | None]]:
        """Mean and sd of scans, some at a time; None for those that cannot be read."""
        yield from self._run(_measure, inputs, enumerate(_in_units(scans)))

    def encode(
        self,
        inputs: Inputs,
        units: Iterable[tuple[int, list[ScanRow]]],
        report_slices: Callable[[int], object] = lambda slices: None,
    ) -> Iterator[tuple[int, Encoded]]:
        """Encodes numbered units; results come in any order, and `report_slices` is not called."""
        yield from self._run(_encode, inputs, units)

    def _run(
        self, function: Callable[..., Any], inputs: Inputs, units: Iterable[tuple[int, list[ScanRow]]]
    ) -> Iterator[Any]:
        """Runs a task for each unit, with as many waiting as running; yields results as they come."""
        import ray

        # max_calls: a process keeps its encoder, also on the GPU, where Ray would end it after each task.
        remote: Any = ray.remote(
            num_cpus=self.needs["CPU"], num_gpus=self.needs.get("GPU", 0.0), max_retries=RETRIES, max_calls=0
        )(function)
        shared, waiting = ray.put(inputs), iter(units)
        running: list[Any] = []
        while True:
            while len(running) < 2 * self.slots and (unit := next(waiting, None)) is not None:
                running.append(remote.remote(self.job, self.setup, shared, *unit))
            if not running:
                return
            ready, running = ray.wait(running)
            yield self.connection.result(ready[0])


def _needs(setup: Setup) -> Mapping[str, float]:
    """What a task needs: cores for the encoder, or a GPU and cores for the workers that decode for it."""
    if torch.device(setup.options.device).type == "cuda":
        return {"GPU": 1.0, "CPU": float(max(1, setup.workers))}
    return {"CPU": float(setup.options.threads or 1)}


def _in_units(scans: Iterable[ScanRow]) -> Iterator[list[ScanRow]]:
    rows: list[ScanRow] = []
    for row in scans:
        rows.append(row)
        if sum(map(len, rows)) >= UNIT:
            yield rows
            rows = []
    if rows:
        yield rows


_MACHINES: dict[str, Machine] = {}
"""By job, the encoder and workers of this process; at most one entry."""


def _encode(job: str, setup: Setup, inputs: Inputs, number: int, rows: list[ScanRow]) -> tuple[int, Encoded]:
    (result,) = _machine(job, setup, inputs).encode(inputs, [(number, rows)])
    return result


def _measure(job: str, setup: Setup, inputs: Inputs, _: int, rows: list[ScanRow]) -> dict[str, Statistics | None]:
    measured: dict[str, Statistics | None] = {}
    for one in _machine(job, setup, inputs).measure(inputs, rows):
        measured |= one
    return measured


def _machine(job: str, setup: Setup, inputs: Inputs) -> Machine:
    """The machine of this process; an error if its results could differ from those of the others."""
    if job not in _MACHINES:
        import socket

        where = f"machine {socket.gethostname()} of the Ray cluster"
        if torch.__version__ != setup.torch:
            raise UserError(
                f"{where} has torch {torch.__version__}, not {setup.torch}; install the same version on all machines"
            )
        if not inputs.decoding.root.is_dir():
            raise UserError(
                f"{where} does not see {inputs.decoding.root}; give a path that all machines share (--root)"
            )
        encoder = setup.load(device=setup.options.device, precision=setup.options.precision)
        if encoder.fingerprint != setup.fingerprint:
            raise UserError(f"{where} has other weights of {encoder.name}; copy the same file to all machines")
        while _MACHINES:
            _MACHINES.popitem()[1].close()  # of an earlier job
        _MACHINES[job] = Machine(setup, encoder, Pool(setup.workers, setup.timeout))
    return _MACHINES[job]
