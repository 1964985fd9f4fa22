"""The sweep trains the slice reference like torch's layers and optimizer, and nothing else reads its labels."""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn

from engines import first_orders, make_engine
from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import UNKNOWN, Bags
from normal_guidance.core.methods import DISTINCT, EVERY_METHOD
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep import engine as engine_module
from normal_guidance.sweep.config import Config, Execution, grid
from normal_guidance.sweep.engine import PackedEngine
from normal_guidance.sweep.stack import Stack
from normal_guidance.sweep.sweep import sweep

Sets = tuple[Bags, Bags]
FEATURES = 6
EXACT = Execution(precision="float64")


def scans(n: int, seed: int) -> Bags:
    """Short and long scans, shorter than a wide window too, and some without slice labels."""
    bags = shifted_mean(n, seed, features=FEATURES, min_slices=4, max_slices=30, block=4, shift=1.5)
    labels = list(bags.slice_labels.split(bags.lengths.tolist()))
    for number in range(0, n, 7):
        labels[number] = torch.full_like(labels[number], UNKNOWN)
    return replace(bags, slice_labels=torch.cat(labels)).to(dtype=torch.float64)


@pytest.fixture(scope="module")
def sets() -> Sets:
    return scans(52, seed=1), scans(30, seed=8)


def small_grid(width: int = 4, **options: object) -> tuple[Config, ...]:
    base = Config("slice_reference", receptive_field=width, **{"epochs": 3, "batch_size": 16, "seed": 5, **options})
    return grid(base, lr=[0.1, 0.01], l1=[0.01, 0.0])


def textbook(config: Config, train: Bags, val: Bags) -> tuple[list[list[float]], nn.Module]:
    """What `HISTORY` names for every epoch, one bag at a time, and the model after the last."""
    torch.manual_seed(config.seed)
    width = config.receptive_field
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # an even width is padded by a copy
        convolution = nn.Conv1d(FEATURES, FEATURES, width, groups=FEATURES, padding="same")
    model = nn.ModuleDict({"convolution": convolution, "classifier": nn.Linear(FEATURES, 1)}).double()
    # Drawn in float32, as the sweep draws them whatever it computes in.
    optimizer = torch.optim.SGD(model.parameters(), lr=config.lr, momentum=0.9)
    order, history = torch.Generator().manual_seed(config.seed), []

    def of(bags: Bags, number: int) -> tuple[Tensor, Tensor]:
        bag = bags[number]
        logits = model["classifier"](model["convolution"](bag.features.T[None])[0].T).squeeze(1)
        return (logits[:0], torch.empty(0)) if bag.slice_labels is None else (logits, bag.slice_labels.double())

    def batch_of(bags: Bags, numbers: Sequence[int]) -> tuple[Tensor, Tensor]:
        pairs = [of(bags, number) for number in numbers]
        return torch.cat([logits for logits, _ in pairs]), torch.cat([labels for _, labels in pairs])

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for _ in range(config.epochs):
            losses, seen = [], []
            permutation = torch.randperm(len(train), generator=order)
            for batch in permutation[: len(train) // 16 * 16].split(16):
                logits, labels = batch_of(train, batch.tolist())
                loss = F.binary_cross_entropy_with_logits(logits, labels)
                loss = loss + 0.5 * config.l1 * sum(p.abs().sum() for p in model.parameters())
                optimizer.zero_grad()
                loss.backward()
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                losses.append(loss.item())
                seen.append((logits.detach(), labels))
            with torch.no_grad():
                held_out = batch_of(val, range(len(val)))
            running = [torch.cat(part) for part in zip(*seen, strict=True)]
            aurocs = [roc_auc_score(labels, logits) for logits, labels in (running, held_out)]
            val_loss = F.binary_cross_entropy_with_logits(*held_out).item()
            history.append([sum(losses) / len(losses), *aurocs, val_loss])
    return history, model


@pytest.mark.slow(but="recorded-12")
@pytest.mark.parametrize("width", [1, 4, 12, 15])
@pytest.mark.parametrize("kind", ["packed", "recorded", "streamed"])
def test_engines_train_as_torchs_own_layers_do(kind: str, width: int, sets: Sets) -> None:
    configs = small_grid(width)
    engine = make_engine(kind, configs, *sets)
    want = [textbook(config, *sets) for config in configs]
    for number, (order, _) in enumerate(first_orders(sets[0], configs)):
        loss, train_auroc = engine.train_epoch(order)
        got = torch.stack([loss, train_auroc, *engine.evaluate()], 1)
        torch.testing.assert_close(got, torch.tensor([history[number] for history, _ in want]).double())
    for number, (_, model) in enumerate(want):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(engine.parameters[name][number], parameter.detach())


def test_slices_are_ranked_some_configurations_at_a_time(sets: Sets, monkeypatch) -> None:
    whole = sweep(small_grid(), *sets, EXACT)
    monkeypatch.setattr(engine_module, "MAX_CELLS", 1)
    assert sweep(small_grid(), *sets, EXACT).history.equal(whole.history)


class Sealed:
    """Scans whose slice labels must not be read."""

    def __init__(self, bags: Bags) -> None:
        self.bags = bags
        self.lengths, self.labels, self.width, self.dtype = bags.lengths, bags.labels, bags.width, bags.dtype

    def rows(self, numbers: Tensor) -> Tensor:
        return self.bags.rows(numbers)

    @property
    def slice_labels(self) -> Tensor:
        raise AssertionError("slice labels were read")


@pytest.mark.parametrize("engine", ["packed", "recorded"])
@pytest.mark.parametrize("method", [name for name in DISTINCT if EVERY_METHOD[name].scores_scans])
def test_no_method_reads_slice_labels(method: str, engine: str) -> None:
    train, val = (Sealed(shifted_mean(20, seed, features=8)) for seed in (1, 2))
    config = Config(method, epochs=1, batch_size=8)
    assert len(sweep([config], train, val, Execution(engine=engine)).history) == 1
    with pytest.raises(AssertionError, match="slice labels were read"):  # the seal can break
        sweep([Config("slice_reference", receptive_field=3, epochs=1, batch_size=8)], train, val)


def test_slices_that_cannot_be_learnt(sets: Sets) -> None:
    train, val = sets
    with pytest.raises(UserError, match="learns slice labels, but 52 scans have none"):
        sweep(small_grid(), replace(train, slice_labels=None), val)
    with pytest.raises(UserError, match=r"0 of \d+ validation slices are positive"):
        sweep(small_grid(), train, val[val.labels == 0])


def test_a_batch_without_any_label_moves_nothing(sets: Sets) -> None:
    """The loss of a batch without labels is 0, not NaN."""
    val = sets[1]
    some, none = val[val.positive_slices > 0], val[:16]
    unknown = replace(none, slice_labels=torch.full_like(none.slice_labels, UNKNOWN))
    stack = Stack.of(small_grid(), FEATURES, dtype=torch.float64)
    engine = PackedEngine(stack, unknown, some, 16, "float64")
    loss, logits = stack.losses(engine.weights, unknown.features, unknown.layout, unknown.slice_labels)
    assert loss.tolist() == [0.0] * 4
    gradients = torch.autograd.grad(loss.sum(), list(engine.weights.values()))
    assert all(not gradient.any() for gradient in gradients)
    assert logits.shape == (4, len(unknown.features))
