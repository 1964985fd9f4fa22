"""AdamW, weight decay, the cosine schedule and class weights train as a loop of torch's own optimizers does."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from normal_guidance.core.bags import Bags
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.methods import BEYOND, build_model
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep import execution as execution_module
from normal_guidance.sweep import sweep as sweep_module
from normal_guidance.sweep.config import Config, Execution, grid
from normal_guidance.sweep.estimate import estimate_sweep
from normal_guidance.sweep.execution import fitting_chunk
from normal_guidance.sweep.loop import train_model
from normal_guidance.sweep.stack import Stack
from normal_guidance.sweep.sweep import Sweep, sweep

FEATURES = 8
EXACT = Execution(precision="float64")
ALL = {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine", "class_weights": True}
OPTIONS = [
    ALL,
    {"optimizer": "adamw"},
    {"optimizer": "adamw", "momentum": 0.5},
    {"weight_decay": 0.1},
    {"schedule": "cosine"},
    {"class_weights": True},
]


def scans(n: int, seed: int) -> Bags:
    """A third of the scans is positive, so that class weights matter."""
    bags = shifted_mean(2 * n, seed, features=FEATURES, max_slices=33, shift=2.0).to(dtype=torch.float64)
    positive, negative = (torch.where(bags.labels == label)[0] for label in (1, 0))
    return bags[torch.cat([positive[: n // 3], negative[: n - n // 3]])]


@pytest.fixture(scope="module")
def train() -> Bags:
    return scans(50, seed=1)


@pytest.fixture(scope="module")
def val() -> Bags:
    return scans(30, seed=2)


def strengths(method: str, l1: float) -> list[float]:
    """L1 or none.  None alone for MHNG: the keys' bias begins at 0 and has no gradient, so rounding decides its sign,
    by which AdamW moves it as far as any other parameter; of all that is compared, L1 alone depends on it."""
    return [0.0] if method == "mhng" else [l1, 0.0]


def loop_of_torch(config: Config, train: Bags, val: Bags) -> Tensor:
    """The training and the validation loss of each epoch, with nothing of `normal_guidance.sweep`."""
    torch.manual_seed(config.seed)
    model, shuffling = build_model(config.method, FEATURES), torch.Generator().manual_seed(config.seed)
    penalized = [model.classifier.weight] if config.method in BEYOND else list(model.parameters())
    others = [p for p in model.parameters() if all(p is not one for one in penalized)]
    groups = [{"params": penalized, "weight_decay": config.weight_decay}, {"params": others, "weight_decay": 0.0}]
    if config.optimizer == "adamw":
        optimizer = torch.optim.AdamW(groups, lr=config.lr, betas=(config.momentum, 0.999))
    else:
        optimizer = torch.optim.SGD(groups, lr=config.lr, momentum=config.momentum)
    last = config.epochs if config.schedule == "cosine" else 10**9
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, last)
    positives, count = int(train.labels.sum()), len(train)
    of_class = [count / (2 * (count - positives)), count / (2 * positives)] if config.class_weights else [1.0, 1.0]
    found = []
    for _ in range(config.epochs):
        losses = []
        for numbers in torch.randperm(count, generator=shuffling).split(config.batch_size):
            if len(numbers) < config.batch_size:
                continue
            batch = train[numbers]
            prediction = model(batch.features, batch.layout)
            weight = torch.tensor([of_class[label] for label in batch.labels.tolist()])
            loss = F.binary_cross_entropy_with_logits(prediction.logit, batch.labels.double(), weight=weight)
            loss = loss + 0.5 * config.l1 * sum(p.abs().sum() for p in penalized)
            if config.method.endswith("ng"):
                loss = loss + NormalGuidance()(prediction.log_attention, lengths=batch.lengths, from_logits=True)
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
            losses.append(loss.detach())
        scheduler.step()
        with torch.no_grad():
            logits = model(val.features, val.layout).logit
        found.append(torch.stack([*losses]).mean())
        found.append(F.binary_cross_entropy_with_logits(logits, val.labels.double()))
    return torch.stack(found).reshape(-1, 2)


def losses_of(result: Sweep) -> Tensor:
    return result.history[:, :, [0, 3]]


@pytest.mark.usefixtures("double")
@pytest.mark.slow(
    but=("ng-options0", "evidence_ng-options0", "mean-options0", *(f"ng-options{i}" for i in range(1, 6)))
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", ["mean", "ng", "mhng", "evidence_ng", "whole_bells"])
def test_one_configuration_trains_as_a_loop_of_torch_does(
    method: str, options: dict[str, object], train: Bags, val: Bags
) -> None:
    usual = Config(method, lr=0.03, l1=strengths(method, 1e-3)[0], epochs=4, batch_size=16, seed=5)
    config = replace(usual, **options)
    want = loop_of_torch(config, train, val)
    plain = loop_of_torch(usual, train, val)
    assert not torch.allclose(want, plain, rtol=1e-4), "the options change nothing, so nothing is tested"
    history = torch.tensor([[epoch.loss, epoch.val_loss] for epoch in train_model(config, train, val).history])
    torch.testing.assert_close(history, want, rtol=0, atol=1e-6)
    torch.testing.assert_close(losses_of(sweep([config], train, val, EXACT))[:, 0], want, rtol=0, atol=1e-6)


def test_those_that_stay_when_others_leave_keep_their_moments(
    train: Bags, val: Bags, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sweep_module, "WORTH_LEAVING", 1)
    base = Config("abmil", epochs=12, batch_size=16, patience=2, **ALL)
    configs = grid(base, lr=[0.3, 0.1, 0.01, 0.001], l1=[0.0])
    result = sweep(configs, train, val, EXACT)
    assert len(result.chunks) > 1, "no configuration was dropped"
    fits = [train_model(config, train, val) for config in configs]
    assert result.trained.tolist() == [len(one.history) for one in fits]
    assert result.best_epoch.tolist() == [one.best.number if one.best else 0 for one in fits]


def test_the_learning_rate_falls_where_graphs_read_it() -> None:
    configs = [Config("ng", lr=lr, epochs=4, schedule="cosine") for lr in (0.1, 1.0)]
    stack = Stack.of(configs, FEATURES, dtype=torch.float64)
    place, reference = stack.lr.data_ptr(), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(reference, 4)
    for epoch in range(1, 5):
        stack.begin_epoch(epoch)
        want = scheduler.get_last_lr()[0]
        torch.testing.assert_close(stack.lr, torch.tensor([0.1 * want, want], dtype=torch.float64))
        reference.step()
        scheduler.step()
    assert scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-12)
    assert stack.lr.data_ptr() == place


def test_adamw_needs_memory_for_one_more_moment(train: Bags, val: Bags, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, disks = [], []
    monkeypatch.setattr(execution_module, "machine_memory", lambda: (None, 2**27))
    for optimizer in ("sgd", "adamw"):
        configs: Sequence[Config] = [Config("abmil", batch_size=16, optimizer=optimizer)] * 1000
        sizes.append(fitting_chunk(configs, train, val, Execution()))
        disks.append(estimate_sweep(configs[:1], train, val).disk_bytes)
    assert sizes[1] < sizes[0]
    assert disks[1] > disks[0]


def test_lambda_rises_where_graphs_read_it() -> None:
    config = Config("ng", guidance_weight=2.0, warmup=4)
    stack = Stack.of([config, replace(config, guidance_weight=0.0, divergence="reverse_kl")], FEATURES)
    place = stack.guidance_weights.data_ptr()
    for epoch, want in ((1, 0.5), (3, 1.5), (9, 2.0), (2, 1.0)):
        stack.begin_epoch(epoch)
        assert stack.guidance_weights.tolist() == [[want, 0.0], [0.0, 0.0]]
    assert stack.guidance_weights.data_ptr() == place, "recorded graphs read it where it was"
