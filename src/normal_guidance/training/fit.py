"""One configuration trained by the paper's protocol, and predictions for whole sets of scans."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn

from normal_guidance.core.bags import Bags
from normal_guidance.core.guidance import DivergenceName, NormalGuidance
from normal_guidance.core.metrics import auroc
from normal_guidance.core.models import METHODS, Prediction, build_model
from normal_guidance.errors import UserError
from normal_guidance.training.objective import objective


@dataclass(frozen=True)
class Config:
    """One configuration: `lr` and `l1` are a point of the paper's grid, the other defaults are its protocol.

    Args:
        method: a name in `METHODS`; guided methods add the guidance term.
        lr: learning rate of SGD with momentum.
        l1: alpha, the strength of L1 on all trainable parameters.
        guidance_weight: lambda; not comparable across divergences or scan lengths.
        divergence: a name in `DIVERGENCES`.
        renormalize: see `NormalGuidance`.
    """

    method: str
    lr: float = 0.01
    l1: float = 0.0
    guidance_weight: float = 1.0
    divergence: DivergenceName = "forward_kl"
    renormalize: bool = True
    epochs: int = 1000
    batch_size: int = 64
    momentum: float = 0.9
    clip_norm: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS or not METHODS[self.method].scores_scans:
            trainable = ", ".join(name for name, method in METHODS.items() if method.scores_scans)
            raise UserError(f"method {self.method!r} cannot be trained; choose one of {trainable}")
        for name, least in (("lr", 0.0), ("l1", 0.0), ("epochs", 1), ("batch_size", 1), ("clip_norm", 0.0)):
            if not getattr(self, name) >= least:
                raise UserError(f"{name} is {getattr(self, name)}; it must be at least {least}")
            if isinstance(least, int) and not isinstance(getattr(self, name), int):
                raise UserError(f"{name} is {getattr(self, name)}; it must be a whole number")
        NormalGuidance(self.guidance_weight, self.divergence)  # refuses what it cannot use, guided or not

    def guidance(self) -> NormalGuidance | None:
        """The guidance term, for the methods that have one."""
        if not METHODS[self.method].guided:
            return None
        return NormalGuidance(self.guidance_weight, self.divergence, renormalize=self.renormalize)


@dataclass(frozen=True)
class Epoch:
    """What one epoch left behind; the training AUROC is a running one, from the batches as they were trained on."""

    number: int
    loss: float
    train_auroc: float
    val_auroc: float


@dataclass(frozen=True, eq=False)
class Fit:
    """A trained model with the weights of its best epoch; of the last one if no epoch could be selected."""

    model: nn.Module
    config: Config
    history: tuple[Epoch, ...]
    best: Epoch | None


def select_epoch(history: tuple[Epoch, ...]) -> Epoch | None:
    """The first epoch with the highest validation AUROC among those whose training AUROC is above it, if any is.

    Example:
        >>> history = (Epoch(1, 0.7, 0.5, 0.6), Epoch(2, 0.6, 0.8, 0.7), Epoch(3, 0.5, 0.9, 0.7))
        >>> select_epoch(history).number
        2
    """
    eligible = [epoch for epoch in history if epoch.train_auroc > epoch.val_auroc]
    return max(eligible, key=lambda epoch: epoch.val_auroc, default=None)


def fit(config: Config, train: Bags, val: Bags, *, on_epoch: Callable[[Epoch], None] | None = None) -> Fit:
    """Trains one configuration: SGD with momentum, clipped gradients, reshuffled batches, last partial batch dropped.

    The kept epoch is chosen by scan labels of the validation set alone (`select_epoch`).

    Example:
        >>> from normal_guidance.data.synthetic import shifted_mean
        >>> train, val = shifted_mean(64, seed=1, features=8), shifted_mean(32, seed=2, features=8)
        >>> len(fit(Config("abmil", epochs=2, batch_size=16), train, val).history)
        2
    """
    if len(train) < config.batch_size:
        raise UserError(
            f"{len(train)} training scans do not fill one batch of {config.batch_size}; use a smaller batch size"
        )
    with torch.random.fork_rng(devices=[]):  # the caller's generator is left as it was
        torch.manual_seed(config.seed)
        model = build_model(config.method, train.features.shape[1]).to(train.features)
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=config.momentum)
    shuffling = torch.Generator().manual_seed(config.seed)
    history: tuple[Epoch, ...] = ()
    best_weights = None
    for number in range(1, config.epochs + 1):
        loss, train_auroc = _train_epoch(model, optimizer, train, config, shuffling)
        epoch = Epoch(number, loss, train_auroc, _scan_auroc(predict(model, val), val))
        history = (*history, epoch)
        if select_epoch(history) is epoch:
            best_weights = copy.deepcopy(model.state_dict())
        if on_epoch is not None:
            on_epoch(epoch)
    if best_weights is not None:
        model.load_state_dict(best_weights)
    return Fit(model, config, history, select_epoch(history))


def _train_epoch(
    model: nn.Module, optimizer: torch.optim.Optimizer, train: Bags, config: Config, shuffling: torch.Generator
) -> tuple[float, float]:
    model.train()
    guidance, parameters = config.guidance(), list(model.parameters())
    losses, logits, labels = [], [], []
    for batch in train.batches(config.batch_size, shuffle=True, generator=shuffling, drop_last=True):
        prediction = model(batch.features, batch.layout)
        loss = objective(prediction, batch.labels, batch.layout, parameters, l1=config.l1, guidance=guidance)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        optimizer.step()
        losses.append(loss.detach())
        logits.append(prediction.logit.detach())
        labels.append(batch.labels)
    return torch.stack(losses).mean().item(), auroc(torch.cat(logits), torch.cat(labels)).item()


def _scan_auroc(prediction: Prediction, bags: Bags) -> float:
    return auroc(prediction.logit, bags.labels).item()


@torch.no_grad()
def predict(model: nn.Module, bags: Bags, *, batch_size: int = 256) -> Prediction:
    """Packed predictions for all scans, in their order, without gradients.

    Example:
        >>> from normal_guidance.data.synthetic import shifted_mean
        >>> bags = shifted_mean(5, seed=1, features=8)
        >>> predict(build_model("mean", 8), bags).logit.shape
        torch.Size([5])
    """
    model.eval()
    parts = [model(batch.features, batch.layout) for batch in bags.batches(batch_size)]
    return Prediction(
        logit=torch.cat([part.logit for part in parts]),
        attention=torch.cat([part.attention for part in parts]),
        log_attention=torch.cat([part.log_attention for part in parts], dim=-1),
    )
