"""AdamW, weight decay, cosine schedule and class weights train as a loop of torch's does; L1 spares some parameters."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

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
from normal_guidance.sweep.stack import Stack, descend
from normal_guidance.sweep.sweep import sweep

Sets, Patch = tuple[Bags, Bags], pytest.MonkeyPatch
FEATURES = 8
EXACT = Execution(precision="float64")
ALL = {"optimizer": "adamw", "weight_decay": 0.1, "schedule": "cosine", "class_weights": True}
OPTIONS = [ALL, {"optimizer": "adamw"}, {"optimizer": "adamw", "momentum": 0.5}]
OPTIONS += [{name: ALL[name]} for name in ("weight_decay", "schedule", "class_weights")]


def scans(n: int, seed: int) -> Bags:
    """A third of the scans is positive, so that class weights matter."""
    bags = shifted_mean(2 * n, seed, features=FEATURES, max_slices=33, shift=2.0).to(dtype=torch.float64)
    positive, negative = (torch.where(bags.labels == label)[0] for label in (1, 0))
    return bags[torch.cat([positive[: n // 3], negative[: n - n // 3]])]


@pytest.fixture(scope="module")
def sets() -> Sets:
    return scans(50, seed=1), scans(30, seed=2)


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
    scheduler = CosineAnnealingLR(optimizer, config.epochs if config.schedule == "cosine" else 10**9)
    positives, count = int(train.labels.sum()), len(train)
    of_class = [count / (2 * (count - positives)), count / (2 * positives)] if config.class_weights else [1.0, 1.0]
    found = []
    for _ in range(config.epochs):
        losses = []
        order, whole = torch.randperm(count, generator=shuffling), count // config.batch_size * config.batch_size
        for batch in (train[numbers] for numbers in order[:whole].split(config.batch_size)):
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


@pytest.mark.usefixtures("double")
@pytest.mark.slow(
    but=("ng-options0", "evidence_ng-options0", "mean-options0", *(f"ng-options{i}" for i in range(1, 6)))
)
@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize("method", ["mean", "ng", "mhng", "evidence_ng", "whole_bells"])
def test_one_configuration_trains_as_a_loop_of_torch_does(method: str, options: dict[str, object], sets: Sets) -> None:
    # MHNG without L1: the keys' bias begins at 0 and has no gradient, so rounding decides its sign, by which AdamW
    # moves it as far as any other parameter; of all that is compared, L1 alone depends on it.
    usual = Config(method, lr=0.03, l1=0.0 if method == "mhng" else 1e-3, epochs=4, batch_size=16, seed=5)
    config = replace(usual, **options)
    want, plain = (loop_of_torch(asked, *sets) for asked in (config, usual))
    assert not torch.allclose(want, plain, rtol=1e-4), "the options change nothing, so nothing is tested"
    history = torch.tensor([[epoch.loss, epoch.val_loss] for epoch in train_model(config, *sets).history])
    torch.testing.assert_close(history, want, rtol=0, atol=1e-6)
    swept = sweep([config], *sets, EXACT).history[:, 0, [0, 3]]
    torch.testing.assert_close(swept, want, rtol=0, atol=1e-6)


def test_those_that_stay_when_others_leave_keep_their_moments(sets: Sets, monkeypatch: Patch) -> None:
    monkeypatch.setattr(sweep_module, "WORTH_LEAVING", 1)
    base = Config("abmil", epochs=12, batch_size=16, patience=2, **ALL)
    configs = grid(base, lr=[0.3, 0.1, 0.01, 0.001], l1=[0.0])
    result = sweep(configs, *sets, EXACT)
    assert len(result.chunks) > 1, "no configuration was dropped"
    fits = [train_model(config, *sets) for config in configs]
    assert result.trained.tolist() == [len(fit.history) for fit in fits]
    assert (~result.history[:, :, 0].isnan()).sum(0).tolist() == result.trained.tolist()
    assert result.best_epoch.tolist() == [fit.best.number if fit.best else 0 for fit in fits]


def test_the_learning_rate_falls_where_graphs_read_it() -> None:
    configs = [Config("ng", lr=lr, epochs=4, schedule="cosine") for lr in (0.1, 1.0)]
    stack = Stack.of(configs, FEATURES, dtype=torch.float64)
    place, reference = stack.lr.data_ptr(), torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = CosineAnnealingLR(reference, 4)
    for epoch in range(1, 5):
        stack.begin_epoch(epoch)
        want = scheduler.get_last_lr()[0]
        torch.testing.assert_close(stack.lr, torch.tensor([0.1 * want, want], dtype=torch.float64))
        reference.step()
        scheduler.step()
    assert scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-12)
    assert stack.lr.data_ptr() == place


def test_adamw_needs_memory_for_one_more_moment(sets: Sets, monkeypatch: Patch) -> None:
    monkeypatch.setattr(execution_module, "machine_memory", lambda: (None, 2**27))
    sgd, adamw = ([Config("abmil", batch_size=16, optimizer=optimizer)] * 1000 for optimizer in ("sgd", "adamw"))
    assert fitting_chunk(adamw, *sets, Execution()) < fitting_chunk(sgd, *sets, Execution())
    assert estimate_sweep(adamw[:1], *sets).disk_bytes > estimate_sweep(sgd[:1], *sets).disk_bytes


def test_lambda_rises_where_graphs_read_it() -> None:
    config = Config("ng", guidance_weight=2.0, warmup=4)
    stack = Stack.of([config, replace(config, guidance_weight=0.0, divergence="reverse_kl")], FEATURES)
    place = stack.guidance_weights.data_ptr()
    for epoch, want in ((1, 0.5), (3, 1.5), (9, 2.0), (2, 1.0)):
        stack.begin_epoch(epoch)
        assert stack.guidance_weights.tolist() == [[want, 0.0], [0.0, 0.0]]
    assert stack.guidance_weights.data_ptr() == place, "recorded graphs read it where it was"


@pytest.mark.parametrize("method", BEYOND)
def test_l1_moves_all_but_what_it_leaves_alone(method: str) -> None:
    stack = Stack.of([Config(method, lr=0.1, l1=1.0), Config(method, lr=0.1, l1=0.0)], 2 * FEATURES)
    parameters, unpenalized = stack.initial_parameters(), BEYOND[method].unpenalized
    before = {name: theta.clone() for name, theta in parameters.items()}
    zeros = {name: torch.zeros_like(theta) for name, theta in parameters.items()}
    penalty = descend(
        parameters, list(zeros.values()), {name: t.clone() for name, t in zeros.items()},
        lr=stack.lr, l1=stack.l1, momentum=0.9, clip_norm=1.0, unpenalized=unpenalized,
    )  # fmt: skip
    for name, theta in parameters.items():
        assert theta[1].equal(before[name][1])
        penalized = name not in unpenalized and bool(before[name][0].any())  # what starts at 0 has no sign to follow
        assert theta[0].equal(before[name][0]) != penalized, name
    counted = sum(theta[0].abs().sum() for name, theta in before.items() if name not in unpenalized)
    torch.testing.assert_close(penalty, torch.stack([0.5 * counted, torch.zeros(())]))


def test_strong_l1_leaves_no_evidence_and_the_windows_as_they_were() -> None:
    """With a penalty on width and sharpness, their logarithms would end at 0, so both at 1."""
    train, val = (shifted_mean(64, seed, features=2 * FEATURES) for seed in (1, 2))
    model = train_model(Config("whole_bells", lr=0.1, l1=50.0, epochs=40, batch_size=16), train, val).model
    assert model.classifier.weight.abs().max() < 0.2
    assert model.attention.log_sigma.exp().item() == pytest.approx(3.0, abs=0.5)
    assert model.attention.log_beta.exp().item() == pytest.approx(0.25, abs=0.05)
