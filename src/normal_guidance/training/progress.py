"""Progress reports and time accounting of a sweep, with as few waits for the GPU as possible."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from normal_guidance.training.batches import Scans
from normal_guidance.training.sweep_state import SweepState


@dataclass(frozen=True, eq=False)
class SweepProgress:
    """The progress of a sweep after an epoch."""

    epoch: int
    epochs: int
    first_config: int
    best_val_auroc: float
    slices_per_second: float
    done: float
    """Share of the whole sweep that is done."""


class Watch:
    """Reports progress at most every `SECONDS`, since reading results makes the device wait."""

    SECONDS = 0.5

    def __init__(self, watch: Callable[[SweepProgress], None] | None, state: SweepState, train: Scans) -> None:
        self.watch, self.state = watch, state
        self.slices = int(train.lengths.sum())
        self.begin = self.last = time.monotonic()
        self.first_epoch = state.pending[0].epoch

    def __call__(self, epoch: int, best_val: Tensor) -> None:
        config, now = self.state.configs[0], time.monotonic()
        if self.watch is None or (now - self.last < self.SECONDS and epoch < config.epochs):
            return
        self.last = now
        size, total = len(self.state.pending[0].members), len(self.state.configs)
        before = max((winner.val_auroc for winner in self.state.winners), default=-math.inf)
        elapsed = max(now - self.begin, 1e-9)
        self.watch(
            SweepProgress(
                epoch=epoch,
                epochs=config.epochs,
                first_config=self.state.done,
                best_val_auroc=max(before, best_val.max().item()),
                slices_per_second=size * self.slices * (epoch - self.first_epoch) / elapsed,
                done=(self.state.done + size * epoch / config.epochs) / total,
            )
        )


class Clock:
    """Adds up the time between marks.  On CUDA marks are events that only `settle` reads, so that nothing waits."""

    def __init__(self, device: torch.device, seconds: dict[str, float]) -> None:
        self.cuda, self.seconds = device.type == "cuda", seconds
        self.events: list[tuple[str | None, torch.cuda.Event]] = []
        self.last = time.monotonic()
        self.mark(None)

    def mark(self, what: str | None) -> None:
        """Count the time since the last mark as spent on `what`; None counts it nowhere."""
        if self.cuda:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.events.append((what, event))
            return
        now = time.monotonic()
        if what is not None:
            self.seconds[what] += now - self.last
        self.last = now

    def settle(self) -> None:
        """Add up the marks so far; waits for the device."""
        if not self.cuda:
            return
        torch.cuda.synchronize()
        for (_, begin), (what, end) in pairwise(self.events):
            if what is not None:
                self.seconds[what] += begin.elapsed_time(end) / 1000
        self.events = self.events[-1:]
