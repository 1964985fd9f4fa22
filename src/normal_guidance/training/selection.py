"""Selection of the best epoch and the best configuration, by the scan labels of the validation set alone.

Only the supervised reference is selected by slice labels: its engine measures AUROC on the validation slices.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Int64
from torch import Tensor

from normal_guidance.training.config import Config
from normal_guidance.training.stacked_model import Parameters


def group_of(config: Config) -> tuple[object, ...]:
    """The values that selection keeps apart: it picks the best lr and l1 within each group."""
    return (config.divergence, config.guidance_weight, config.seed)


@dataclass(frozen=True, eq=False)
class Winner:
    """The best epoch of the best configuration of a group."""

    config: Config
    number: int
    """The number of the configuration in the sweep."""
    epoch: int
    val_auroc: float
    val_loss: float
    weights: Mapping[str, Tensor]

    def rank(self) -> tuple[float, float, int]:
        """The higher, the better; by the paper's rule (`Config.train_above_val`) the first of equals is the best."""
        loss = 0.0 if self.config.train_above_val else self.val_loss
        return (self.val_auroc, -loss, -self.number)


class Selection:
    """The best epoch of each configuration so far, its weights included, on the device.

    The best has the highest validation AUROC, and of equals the lowest validation loss.  With `train_above_val`, the
    paper's rule, only epochs whose training AUROC is above their validation AUROC count, and of equals the first.

    Patience counts from the last epoch whose validation AUROC was higher than that of the selected one or of all before
    it. So a configuration that still learns goes on while its training AUROC is below its validation AUROC, and one
    whose AUROC stays at its highest stops, although its loss may still fall.
    """

    def __init__(self, parameters: Parameters, train_above_val: bool = False, patience: int | None = None) -> None:
        first = next(iter(parameters.values()))
        count, device = len(first), first.device
        self.train_above_val, self.patience = train_above_val, patience
        self.epoch = torch.zeros(count, dtype=torch.int64, device=device)
        self.val = torch.full((count,), -math.inf, dtype=torch.float64, device=device)
        self.loss = torch.full_like(self.val, math.inf)
        self.risen, self.peak = self.epoch.clone(), self.val.clone()
        self.weights = {name: torch.zeros_like(p) for name, p in parameters.items()}

    @torch.no_grad()
    def update(self, epoch: int, train: Tensor, val: Tensor, loss: Tensor, parameters: Parameters) -> None:
        """Keep this epoch where it is better, never one of NaN; configurations out of patience stop selecting."""
        rises: Bool[Tensor, "configs"] = val > self.val
        higher: Bool[Tensor, "configs"] = val > self.peak
        better = rises | ((val == self.val) & (loss < self.loss))
        if self.train_above_val:
            better = rises = rises & (train > val)
        if self.patience is not None:
            patient = epoch - self.risen <= self.patience
            better, rises, higher = better & patient, rises & patient, higher & patient
        self.risen = torch.where(rises | higher, epoch, self.risen)
        self.peak = torch.where(higher, val, self.peak)
        self.epoch = torch.where(better, epoch, self.epoch)
        self.val = torch.where(better, val, self.val)
        self.loss = torch.where(better, loss, self.loss)
        for name, kept in self.weights.items():
            chosen = better.reshape(-1, *[1] * (kept.ndim - 1))
            torch.where(chosen, parameters[name], kept, out=kept)

    def trained(self, epoch: int) -> Int64[Tensor, "configs"]:
        """The number of epochs that count for each configuration after this epoch: those before its patience ended.

        A configuration out of patience is trained on with its chunk, but its later epochs change nothing.
        """
        if self.patience is None:
            return torch.full_like(self.epoch, epoch)
        return (self.risen + self.patience).clamp_max(epoch)

    def over(self, epoch: int) -> list[bool]:
        """Which configurations have run out of patience."""
        if self.patience is None:
            return [False] * len(self.epoch)
        return (epoch - self.risen >= self.patience).tolist()
