"""The sweep and the plain loop train as a loop of torch does; what labels and L1 concern."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from sklearn.metrics import roc_auc_score
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR

from engines import first_orders, make_engine
from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import UNKNOWN, Bags
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.methods import BEYOND, DISTINCT, EVERY_METHOD, build_model
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep import engine as engine_module
from normal_guidance.sweep import execution as execution_module
from normal_guidance.sweep.config import Config, Execution, grid
from normal_guidance.sweep.engine import PackedEngine
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
    """Some shorter than a wide window, some without slice labels; a third is positive, so that class weights matter."""
    sizes = {"min_slices": 4, "max_slices": 33, "block": 4}
    bags = shifted_mean(2 * n, seed, features=FEATURES, shift=2.0, **sizes).to(dtype=torch.float64)
    positive, negative = (torch.where(bags.labels == label)[0] for label in (1, 0))
    bags = bags[torch.cat([positive[: n // 3], negative[: n - n // 3]])]
    without = (torch.arange(n) % 7 == 0).repeat_interleave(bags.lengths)
    return replace(bags, slice_labels=bags.slice_labels.masked_fill(without, UNKNOWN))


@pytest.fixture(scope="module")
def sets() -> Sets:
    return scans(50, seed=1), scans(30, seed=2)


def reference_grid(width: int = 4) -> tuple[Config, ...]:
    base = Config("slice_reference", receptive_field=width, epochs=3, batch_size=16, seed=5)
    return grid(base, lr=[0.1, 0.01], l1=[0.01, 0.0])


class SliceLayers(nn.Module):
    """The slice reference of torch's layers, one bag at a time."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convolution = nn.Conv1d(FEATURES, FEATURES, width, groups=FEATURES, padding="same")
        self.classifier = nn.Linear(FEATURES, 1)

    def forward(self, bags: Bags) -> Tensor:
        return torch.cat([self.classifier(self.convolution(bag.features.T[None])[0].T).squeeze(1) for bag in bags])


def loop_of_torch(config: Config, train: Bags, val: Bags) -> tuple[Tensor, nn.Module]:
    """What `HISTORY` names for every epoch, and the model after the last, with nothing of `normal_guidance.sweep`."""
    torch.manual_seed(config.seed)
    width, shuffling = config.receptive_field, torch.Generator().manual_seed(config.seed)
    # Drawn in the default dtype, as the sweep draws it whatever it computes in.
    model = (build_model(config.method, FEATURES) if width is None else SliceLayers(width)).double()
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
    weights, history = torch.tensor(of_class, dtype=torch.float64), []

    def scored(bags: Bags) -> tuple[Tensor, Tensor, Tensor | float]:
        """Logits and labels of what is learnt, scans or slices with a label, and the term on attention."""
        if width is not None:
            known = bags.slice_labels != UNKNOWN
            return model(bags)[known], bags.slice_labels[known], 0.0
        prediction, guided = model(bags.features, bags.layout), config.method.endswith("ng")
        term = NormalGuidance(float(guided))(prediction.log_attention, lengths=bags.lengths, from_logits=True)
        return prediction.logit, bags.labels, term

    for _ in range(config.epochs):
        losses, seen = [], []
        order, whole = torch.randperm(count, generator=shuffling), count // config.batch_size * config.batch_size
        for numbers in order[:whole].split(config.batch_size):
            logits, labels, term = scored(train[numbers])
            loss = F.binary_cross_entropy_with_logits(logits, labels.double(), weight=weights[labels])
            loss = loss + 0.5 * config.l1 * sum(p.abs().sum() for p in penalized) + term
            optimizer.zero_grad()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), config.clip_norm)
            optimizer.step()
            losses.append(loss.item())
            seen.append((logits.detach(), labels))
        scheduler.step()
        with torch.no_grad():
            *held_out, _ = scored(val)
        running = [torch.cat(part) for part in zip(*seen, strict=True)]
        aurocs = [roc_auc_score(labels, logits) for logits, labels in (running, held_out)]
        val_loss = F.binary_cross_entropy_with_logits(held_out[0], held_out[1].double()).item()
        history.append([sum(losses) / len(losses), *aurocs, val_loss])
    return torch.tensor(history, dtype=torch.float64), model


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
    want, plain = (loop_of_torch(asked, *sets)[0] for asked in (config, usual))
    assert not torch.allclose(want, plain, rtol=1e-4), "the options change nothing, so nothing is tested"
    history = [
        [each.loss, each.train_auroc, each.val_auroc, each.val_loss] for each in train_model(config, *sets).history
    ]
    for got in (torch.tensor(history), sweep([config], *sets, EXACT).history[:, 0]):
        torch.testing.assert_close(got, want, rtol=0, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Using padding='same':UserWarning")  # an even width is padded by a copy
@pytest.mark.slow(but="recorded-12")
@pytest.mark.parametrize("width", [1, 4, 12, 15])
@pytest.mark.parametrize("kind", ["packed", "recorded", "streamed"])
def test_engines_train_the_slice_reference_as_torchs_own_layers(kind: str, width: int, sets: Sets) -> None:
    configs = reference_grid(width)
    engine = make_engine(kind, configs, *sets)
    want = [loop_of_torch(config, *sets) for config in configs]
    for number, (order, _) in enumerate(first_orders(sets[0], configs)):
        loss, train_auroc = engine.train_epoch(order)
        got = torch.stack([loss, train_auroc, *engine.evaluate()], 1)
        torch.testing.assert_close(got, torch.stack([history[number] for history, _ in want]))
    for number, (_, model) in enumerate(want):
        for name, parameter in model.named_parameters():
            torch.testing.assert_close(engine.parameters[name][number], parameter.detach())


def test_slices_are_ranked_some_configurations_at_a_time(sets: Sets, monkeypatch) -> None:
    whole = sweep(reference_grid(), *sets, EXACT)
    monkeypatch.setattr(engine_module, "MAX_CELLS", 1)
    assert sweep(reference_grid(), *sets, EXACT).history.equal(whole.history)


@pytest.mark.parametrize("engine", ["packed", "recorded"])
@pytest.mark.parametrize("method", [name for name in DISTINCT if EVERY_METHOD[name].scores_scans])
def test_slice_labels_enter_no_methods_training(method: str, engine: str) -> None:
    config = Config(method, epochs=1, batch_size=8)
    seeing = [shifted_mean(20, seed, features=8) for seed in (1, 2)]
    blind = [replace(bags, slice_labels=None) for bags in seeing]
    labelled, unlabelled = (sweep([config], *scans, Execution(engine=engine)).history for scans in (seeing, blind))
    assert labelled.equal(unlabelled)
    assert train_model(config, *seeing).history == train_model(config, *blind).history


def test_slices_that_cannot_be_learnt(sets: Sets) -> None:
    train, val = sets
    with pytest.raises(UserError, match="learns slice labels, but 50 scans have none"):
        sweep(reference_grid(), replace(train, slice_labels=None), val)
    with pytest.raises(UserError, match=r"0 of \d+ validation slices are positive"):
        sweep(reference_grid(), train, val[val.labels == 0])


def test_a_batch_without_any_label_moves_nothing(sets: Sets) -> None:
    """The loss of a batch without labels is 0, not NaN."""
    val = sets[1]
    some, none = val[val.positive_slices > 0], val[:16]
    unknown = replace(none, slice_labels=torch.full_like(none.slice_labels, UNKNOWN))
    stack = Stack.of(reference_grid(), FEATURES, dtype=torch.float64)
    engine = PackedEngine(stack, unknown, some, 16, "float64")
    loss, logits = stack.losses(engine.weights, unknown.features, unknown.layout, unknown.slice_labels)
    assert loss.tolist() == [0.0] * 4
    gradients = torch.autograd.grad(loss.sum(), list(engine.weights.values()))
    assert all(not gradient.any() for gradient in gradients)
    assert logits.shape == (4, len(unknown.features))


def test_the_learning_rate_and_lambda_change_where_graphs_read_them() -> None:
    config = Config("ng", lr=0.1, epochs=4, schedule="cosine", guidance_weight=2.0, warmup=3)
    idle = replace(config, lr=1.0, guidance_weight=0.0, divergence="reverse_kl")
    stack = Stack.of([config, idle], FEATURES, dtype=torch.float64)
    read = [stack.lr.data_ptr(), stack.guidance_weights.data_ptr()]
    reference = torch.optim.SGD([torch.zeros(1)], lr=1.0)
    scheduler = CosineAnnealingLR(reference, 4)
    for epoch, weight in enumerate((2 / 3, 4 / 3, 2.0, 2.0), start=1):
        stack.begin_epoch(epoch)
        want = scheduler.get_last_lr()[0]
        torch.testing.assert_close(stack.lr, torch.tensor([0.1 * want, want], dtype=torch.float64))
        weights = torch.tensor([[weight, 0.0], [0.0, 0.0]], dtype=torch.float64)
        torch.testing.assert_close(stack.guidance_weights, weights)
        reference.step()
        scheduler.step()
    assert scheduler.get_last_lr()[0] == pytest.approx(0.0, abs=1e-12)
    assert [stack.lr.data_ptr(), stack.guidance_weights.data_ptr()] == read


def test_adamw_needs_memory_for_one_more_moment(sets: Sets, monkeypatch: Patch) -> None:
    monkeypatch.setattr(execution_module, "machine_memory", lambda: (None, 2**27))
    sgd, adamw = ([Config("abmil", batch_size=16, optimizer=optimizer)] * 1000 for optimizer in ("sgd", "adamw"))
    assert fitting_chunk(adamw, *sets, Execution()) < fitting_chunk(sgd, *sets, Execution())
    assert estimate_sweep(adamw[:1], *sets).disk_bytes > estimate_sweep(sgd[:1], *sets).disk_bytes


@pytest.mark.parametrize("method", BEYOND)
def test_l1_moves_all_but_what_it_leaves_alone(method: str) -> None:
    stack = Stack.of([Config(method, lr=0.1, l1=1.0), Config(method, lr=0.1, l1=0.0)], 2 * FEATURES)
    parameters, unpenalized = stack.initial_parameters(), BEYOND[method].unpenalized
    assert [name for name in parameters if name not in unpenalized] == ["classifier.weight"]  # w alone
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
