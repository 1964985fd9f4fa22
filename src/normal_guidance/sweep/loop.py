"""One configuration trained in a plain PyTorch loop, and predictions for whole sets of scans.

The sweep trains many configurations at once and must give the same numbers; this loop is what it is tested against.
"""

from __future__ import annotations

import copy
import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import checked_whole
from normal_guidance.core.bags import UNKNOWN, Bags, ScanSet
from normal_guidance.core.layout import Layout
from normal_guidance.core.metrics import auroc
from normal_guidance.core.prediction import Prediction, set_epoch
from normal_guidance.scans.features.store import FeatureStore
from normal_guidance.sweep.batches import check_scans_like, in_batches, slice_labels_of
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.stack import BETA_2, balanced_weights, initial_model
from normal_guidance.sweep.sweep import check_scans


@dataclass(frozen=True)
class EpochScores:
    """The results of one epoch; the training AUROC comes from each batch's logits just before its step."""

    number: int
    loss: float
    train_auroc: float
    val_auroc: float
    val_loss: float


@dataclass(frozen=True, eq=False)
class TrainedModel:
    """A trained model with the weights of its best epoch, or of the last epoch if none could be selected."""

    model: nn.Module
    config: Config
    history: tuple[EpochScores, ...]
    best: EpochScores | None


def select_epoch(history: tuple[EpochScores, ...], *, train_above_val: bool = False) -> EpochScores | None:
    """The epoch with the highest validation AUROC, of equals that of the lowest loss; `Config` has the paper's rule."""
    comparable = [epoch for epoch in history if not math.isnan(epoch.val_auroc)]
    if train_above_val:
        eligible = [epoch for epoch in comparable if epoch.train_auroc > epoch.val_auroc]
        return max(eligible, key=lambda epoch: epoch.val_auroc, default=None)
    return max(comparable, key=lambda epoch: (epoch.val_auroc, -epoch.val_loss), default=None)


def train_model(config: Config, train: Bags | FeatureStore, val: Bags | FeatureStore) -> TrainedModel:
    """Train one configuration: clipped gradients, reshuffled batches, last partial batch dropped; the model is on eval.

    The features of a store are loaded into memory; `sweep` reads them from the disk.

    Validation scan labels alone choose the kept epoch (`select_epoch`); for the supervised reference, validation slice
    labels do.

    Example:
        >>> from normal_guidance.study.drawn import shifted_mean
        >>> train, val = shifted_mean(64, seed=1, features=8), shifted_mean(32, seed=2, features=8)
        >>> len(train_model(Config("abmil", epochs=2, batch_size=16), train, val).history)
        2
    """
    if not isinstance(config, Config):
        raise UserError(f"config: got {type(config).__name__}; give Config(METHOD), such as Config('ng')")
    check_scans(config, train, val)
    train, val = _in_memory(train, "train"), _in_memory(val, "val")
    model = initial_model(config, train.width).to(train.features)
    optimizer = _optimizer(config, model)
    shuffling = torch.Generator().manual_seed(config.seed)
    history: tuple[EpochScores, ...] = ()
    best: EpochScores | None = None
    best_weights = None
    risen, peak = 0, -math.inf
    for number in range(1, config.epochs + 1):
        loss, train_auroc = _train_epoch(model, optimizer, train, config, shuffling, number)
        logits, labels = _scored(config, predict_bags(model, val), val)
        val_loss = F.binary_cross_entropy_with_logits(logits.double(), labels.double()).item()
        epoch = EpochScores(number, loss, train_auroc, auroc(logits, labels).item(), val_loss)
        history, before = (*history, epoch), best
        best = select_epoch(history, train_above_val=config.train_above_val)
        if best is epoch:
            best_weights = copy.deepcopy(model.state_dict())
        rises = best is epoch and (before is None or epoch.val_auroc > before.val_auroc)
        if rises or epoch.val_auroc > peak:
            risen, peak = number, max(peak, epoch.val_auroc)
        if config.patience is not None and number - risen >= config.patience:
            break
    if best_weights is not None:
        model.load_state_dict(best_weights)
    return TrainedModel(model.eval(), config, history, best)


def _in_memory(scans: Bags | FeatureStore, name: str) -> Bags:
    if isinstance(scans, FeatureStore):
        return scans.bags()
    if not isinstance(scans, Bags):
        raise UserError(f"{name}: got {type(scans).__name__}; give Bags, or open_store(FOLDER)")
    return scans


def _optimizer(config: Config, model: nn.Module) -> torch.optim.Optimizer:
    named, exempt = list(model.named_parameters()), config.spec.unpenalized
    groups = [
        {"params": [p for name, p in named if name not in exempt], "weight_decay": config.weight_decay},
        {"params": [p for name, p in named if name in exempt], "weight_decay": 0.0},
    ]
    if config.optimizer == "adamw":
        return torch.optim.AdamW(groups, lr=config.lr, betas=(config.momentum, BETA_2))
    return torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)


def _train_epoch(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    train: Bags,
    config: Config,
    shuffling: torch.Generator,
    number: int,
) -> tuple[float, float]:
    model.train()
    regularizer, parameters = config.regularizer(number), list(model.parameters())
    set_epoch(model, number)
    penalized = [p for name, p in model.named_parameters() if name not in config.spec.unpenalized]
    class_weights = None
    if config.class_weights:
        every = slice_labels_of(train) if config.on_slices else train.labels
        class_weights = balanced_weights(every).to(train.features)
    for group in optimizer.param_groups:
        group["lr"] = config.rate(number)
    losses, logits, labels = [], [], []
    for batch in train.batches(config.batch_size, shuffle=True, generator=shuffling, drop_last=True):
        prediction = model(batch.features, batch.layout)
        targets = slice_labels_of(batch) if config.on_slices else batch.labels
        # The loss behind the published numbers: BCE + alpha/2 sum |theta| + lambda D(r, a).
        loss = config.spec.loss(prediction, targets, class_weights)
        loss = loss + 0.5 * config.l1 * torch.stack([parameter.abs().sum() for parameter in penalized]).sum()
        if regularizer is not None:
            given = {"lengths": batch.layout, "labels": targets, "features": batch.features}
            loss = loss + regularizer(prediction.log_attention, from_logits=True, **given)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(parameters, config.clip_norm)
        optimizer.step()
        losses.append(loss.detach())
        logit, label = _scored(config, prediction, batch)
        logits.append(logit.detach())
        labels.append(label)
    return torch.stack(losses).mean().item(), auroc(torch.cat(logits), torch.cat(labels)).item()


def _scored(config: Config, prediction: Prediction, bags: Bags) -> tuple[Tensor, Tensor]:
    """Logits and labels of the targets of AUROC: scans, or for the supervised reference slices with a known label."""
    if not config.on_slices:
        return prediction.logit, bags.labels
    labels = slice_labels_of(bags)
    return prediction.slice_scores[labels != UNKNOWN], labels[labels != UNKNOWN]


@torch.no_grad()
def predict_bags(model: nn.Module, scans: ScanSet, *, batch_size: int = 256) -> Prediction:
    """Packed predictions for all scans in their order, without gradients or dropout, on the model's device and dtype.

    Example:
        >>> from normal_guidance.study.drawn import shifted_mean
        >>> from normal_guidance.core.methods import build_model
        >>> bags = shifted_mean(5, seed=1, features=8)
        >>> predict_bags(build_model("mean", 8), bags).logit.shape
        torch.Size([5])
    """
    if not isinstance(model, nn.Module):
        raise UserError(
            f"model: got {type(model).__name__}; give a torch module, such as train_model(...).model; predict takes "
            "the folder of a model"
        )
    check_scans_like(scans, "scans")
    batch_size = checked_whole("batch_size", batch_size)
    parts: list[Prediction] = []
    training = {module: module.training for module in model.modules()}
    model.eval()
    try:
        for batch in in_batches(scans.lengths, batch_size):
            rows = scans.rows(batch)
            rows = rows.to(next(model.parameters(), rows))  # a model without parameters leaves them unchanged
            parts.append(model(rows, Layout.packed(scans.lengths[batch]).to(rows.device)))
    finally:
        for module, before in training.items():
            module.training = before
    return Prediction(
        logit=torch.cat([part.logit for part in parts]),
        attention=torch.cat([part.attention for part in parts]),
        log_attention=torch.cat([part.log_attention for part in parts], dim=-1),
    )
