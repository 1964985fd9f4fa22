"""Which epoch of a configuration is kept, and which configuration wins: by scan labels of the validation set alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor

from normal_guidance.training.config import Config
from normal_guidance.training.engine import Engine
from normal_guidance.training.stack import Parameters


def group_of(config: Config) -> tuple[object, ...]:
    """What selection does not choose among: the best lr and l1 are picked for each of these."""
    return (config.divergence, config.guidance_weight, config.seed)


@dataclass(frozen=True, eq=False)
class Winner:
    """The best epoch of the best configuration of a group."""

    config: Config
    number: int
    """Of the configuration, in the order of the sweep."""
    epoch: int
    val_auroc: float
    weights: Mapping[str, Tensor]


class Selection:
    """The best epoch of each configuration so far, its weights included, on the device."""

    def __init__(self, engine: Engine, train_above_val: bool) -> None:
        count, device = len(engine.stack.configs), engine.device
        self.train_above_val = train_above_val
        self.epoch = torch.zeros(count, dtype=torch.int64, device=device)
        self.val = torch.full((count,), -math.inf, dtype=torch.float64, device=device)
        self.weights = {name: torch.zeros_like(p) for name, p in engine.parameters.items()}

    @torch.no_grad()
    def update(self, epoch: int, train: Tensor, val: Tensor, parameters: Parameters) -> None:
        """The first of equally good epochs stays; NaN is never better."""
        better: Bool[Tensor, "configs"] = val > self.val
        if self.train_above_val:
            better = better & (train > val)
        self.epoch = torch.where(better, epoch, self.epoch)
        self.val = torch.where(better, val, self.val)
        for name, kept in self.weights.items():
            chosen = better.reshape(-1, *[1] * (kept.ndim - 1))
            torch.where(chosen, parameters[name], kept, out=kept)

    def waited(self, epoch: int, patience: int) -> bool:
        """Whether no configuration has had a better epoch for `patience` epochs."""
        return bool((epoch - self.epoch >= patience).all())
