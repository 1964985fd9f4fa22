"""What a sweep would take: a few batches are really trained, and nothing is written."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch

from normal_guidance.base.system import is_out_of_memory, peak_bytes
from normal_guidance.core.bags import Bags
from normal_guidance.sweep.batches import pool_scans
from normal_guidance.sweep.config import Config, Execution, check_together
from normal_guidance.sweep.engine import RESIDENT_SHARE, Engine, SlottedEngine, matrix_precision, row_dtype, synchronize
from normal_guidance.sweep.execution import (
    choose_engine,
    compiled_seconds,
    current_device,
    fitting_chunk,
    release_memory,
)
from normal_guidance.sweep.run import Data
from normal_guidance.sweep.sweep import HISTORY, check_scans

BATCHES = 4  # batches that are trained for the measurement, and evaluated; one, where a batch takes longer than `SLOW`
SLOW = 2.0  # seconds of a batch that is not trained a second time

STATES = 3  # copies of all parameters in a saved state: weights, momenta, those of the best epoch; AdamW has one more


@dataclass(frozen=True)
class SweepEstimate:
    """What training all configurations of one run would take on this machine, if no patience ends it early."""

    method: str
    configs: int
    chunks: int  # parts that are trained one after the other, because memory does not hold all
    scans: int  # training and validation scans
    slices: int  # their slices
    batches: int  # training batches of an epoch
    epochs: int
    engine: str  # the engine that would train: packed, recorded or compiled
    device: str
    device_bytes: int  # most memory: on CUDA of the card, else of this process
    disk_bytes: int  # the saved state, from which a killed run resumes
    step_s: float  # seconds of a training step of one chunk
    first_step_s: float  # seconds from the start to the first step
    total_s: float  # estimated seconds for all


def _sample(scans: Data, count: int) -> Data:
    """So many scans at random, or all."""
    chosen = torch.randperm(len(scans), generator=torch.Generator().manual_seed(0))[:count].sort().values
    if isinstance(scans, Bags):
        return scans[chosen]
    return scans.select(torch.zeros(len(scans), dtype=torch.bool).index_fill(0, chosen, True))


def estimate_sweep(
    configs: Sequence[Config], train: Data, val: Data, execution: Execution | None = None
) -> SweepEstimate:
    """Estimate what `sweep` would take with the same arguments, by training a few batches, always the same ones."""
    check_together(configs)
    execution = execution or Execution()
    config = configs[0]
    check_scans(config, train, val)
    chunk = min(execution.chunk or len(configs), len(configs))
    if config.spec.pool is None:  # a pooled scan is one row, of which any number fits
        chunk = fitting_chunk(configs, train, val, execution)
    with matrix_precision(execution.precision), current_device(execution.device):
        while True:
            try:
                trial = _try(configs[:chunk], train, val, execution, batches=1)
                if trial.step_s < SLOW:
                    trial = _try(configs[:chunk], train, val, execution, batches=BATCHES)
                break
            except RuntimeError as error:
                if not is_out_of_memory(error) or chunk == 1:
                    raise
                chunk = -(-chunk // 2)
            release_memory()
    chunks = math.ceil(len(configs) / chunk)
    steps = len(train.lengths) // config.batch_size
    epoch = steps * trial.step_s + len(val.lengths) * trial.val_s
    engine, seconds = trial.engine, config.epochs * epoch
    if engine == "recorded" and execution.engine is None and (compiled := compiled_seconds(seconds)) is not None:
        engine, seconds = "compiled", compiled
    states = STATES + (config.optimizer == "adamw")
    values = (states * trial.parameters * 4 + config.epochs * len(HISTORY) * 8) * len(configs)
    return SweepEstimate(
        method=config.method,
        configs=len(configs),
        chunks=chunks,
        scans=len(train.lengths) + len(val.lengths),
        slices=int(train.lengths.sum() + val.lengths.sum()),
        batches=steps,
        epochs=config.epochs,
        engine=engine,
        device=execution.device,
        device_bytes=trial.bytes,
        disk_bytes=values,
        step_s=trial.step_s,
        first_step_s=trial.first_step_s,
        total_s=trial.first_step_s + chunks * seconds,
    )


@dataclass(frozen=True)
class SweepTrial:
    engine: str
    step_s: float
    val_s: float  # seconds of one validation scan
    first_step_s: float
    bytes: int
    parameters: int  # of one configuration


def _try(configs: Sequence[Config], train: Data, val: Data, execution: Execution, batches: int) -> SweepTrial:
    """Train and evaluate so many batches, twice if they are fast: the first time also prepares what is needed."""
    config, begin = configs[0], time.monotonic()
    some_train, some_val = (_sample(scans, batches * config.batch_size) for scans in (train, val))
    left = 0.0  # what pooling the other scans would take
    if config.spec.pool is not None:
        few = len(some_train.lengths) + len(some_val.lengths)
        some_train, some_val = (pool_scans(scans, config.spec.pool) for scans in (some_train, some_val))
        left = (time.monotonic() - begin) * ((len(train.lengths) + len(val.lengths)) / few - 1)
    steps = len(some_train.lengths) // config.batch_size
    work = config.epochs * (len(train.lengths) // config.batch_size) // steps  # all of it, in epochs of the trial
    short = [replace(each, epochs=2) for each in configs]
    engine = choose_engine(short, some_train, some_val, execution, config.seed, work)
    order = torch.arange(len(some_train.lengths))
    synchronize(engine.device)
    prepared = time.monotonic() - begin
    training, evaluation = _timed(engine, lambda: engine.train_epoch(order)), _timed(engine, engine.evaluate)
    if training < SLOW * steps:
        first = training + evaluation
        training, evaluation = _timed(engine, lambda: engine.train_epoch(order)), _timed(engine, engine.evaluate)
        prepared += max(0.0, first - training - evaluation)
    recorded = isinstance(engine, SlottedEngine)
    left_rows = 0  # memory of the features that are not in the trial, if they fit a card; else they are streamed
    if recorded and engine.device.type == "cuda":
        pooled = config.spec.pool is not None
        rows = sum(len(scans.lengths) if pooled else int(scans.lengths.sum()) for scans in (train, val))
        rows -= int(some_train.lengths.sum() + some_val.lengths.sum())
        left_rows = rows * train.width * row_dtype(execution.precision).itemsize
        if left_rows >= RESIDENT_SHARE * torch.cuda.mem_get_info(execution.device)[0]:
            left_rows = 0
    return SweepTrial(
        engine="compiled" if engine.compiled else "recorded" if recorded else "packed",
        step_s=training / steps,
        val_s=evaluation / len(some_val.lengths),
        first_step_s=prepared + left,
        bytes=peak_bytes(execution.device) + left_rows,
        parameters=sum(value[0].numel() for value in engine.parameters.values()),
    )


def _timed(engine: Engine, run: Callable[[], object]) -> float:
    begin = time.monotonic()
    run()
    synchronize(engine.device)
    return time.monotonic() - begin
