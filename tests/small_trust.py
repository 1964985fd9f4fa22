"""Scans and models for the tests of attention: one that is nearly Bayes', and ways to spoil its attention."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import torch
from torch import Tensor, nn

from normal_guidance.core.bags import Bags
from normal_guidance.core.layout import Layout
from normal_guidance.core.models import ABMIL
from normal_guidance.core.prediction import Prediction
from normal_guidance.scans.features.store import open_store, write_store
from normal_guidance.scans.index.manifest import PARTS
from normal_guidance.study.drawn import BLOCK, SHIFT, shifted_mean
from normal_guidance.sweep.config import Config
from normal_guidance.sweep.run import run_sweep
from small_study import some_scans, write_splits

FEATURES, STRONG = 64, 1.5

CONFIG = Config("ng", lr=0.1, epochs=8, batch_size=16, train_above_val=False)

Answering = Callable[[Tensor, Tensor], Prediction]


def paper_scans(count: int = 800, seed: int = 12) -> Bags:
    """As the paper's test scans, with fewer features of noise."""
    return shifted_mean(count, seed, features=FEATURES)


def strong_scans(count: int = 120, seed: int = 11) -> Bags:
    """So clear a signal that few scans show it."""
    return shifted_mean(count, seed, features=FEATURES, shift=STRONG)


def bayes(shift: float = SHIFT, *, sign: int = 1) -> Answering:
    """Bayes' rule for a block that may also hang over the scan's ends, so that any part of a scan has an answer.

    With sign -1 attention points away from the evidence, and the logit is what it was.
    """

    def model(features: Tensor, lengths: Tensor) -> Prediction:
        layout = Layout.packed(lengths)
        evidence = layout.pad((shift * features[:, 0] - shift**2 / 2).double())
        windows = nn.functional.pad(evidence, (BLOCK - 1, BLOCK - 1)).unfold(1, BLOCK, 1).sum(2)
        outside = torch.arange(windows.shape[1]) >= lengths[:, None] + BLOCK - 1
        windows = windows.masked_fill(outside, -torch.inf)
        log_a = layout.log_softmax(sign * windows.unfold(1, BLOCK, 1).logsumexp(2))
        logit = windows.logsumexp(1) - lengths.double().log()
        return Prediction(logit, layout.restore(log_a.exp()), layout.restore(log_a[:, None]))

    return model


def with_attention_of(attending: Answering, answering: Answering) -> Answering:
    """One model's logit with another's attention."""

    def model(features: Tensor, lengths: Tensor) -> Prediction:
        other = attending(features, lengths)
        return Prediction(answering(features, lengths).logit, other.attention, other.log_attention)

    return model


def fresh_abmil(seed: int) -> ABMIL:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ABMIL(FEATURES)


def with_learnt_classifier(model: nn.Module) -> nn.Module:
    """The classifier knows which feature counts; whatever attends does not."""
    with torch.no_grad():
        model.classifier.weight.zero_()
        model.classifier.weight[0, 0] = 1.0
    return model


def make_run(folder: Path) -> SimpleNamespace:
    """A store, a split, and a run as `nguide sweep STORE --split FILE` leaves it."""
    bags = some_scans(120)
    write_store(folder / "store", bags, provenance={"encoder": "noise"})
    (split,) = write_splits(folder, bags.scan_ids, [1001])
    store = open_store(folder / "store").with_parts(split)
    options = {"store": str(folder / "store"), "split": str(split)}
    run_sweep(folder / "run", [CONFIG], *(store.part(part) for part in PARTS), options=options)
    return SimpleNamespace(folder=folder, run=folder / "run", store=store, split=split)
