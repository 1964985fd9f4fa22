"""The field's methods against torchmil, or a textbook of their papers, with copied weights: values and gradients."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
import torchmil.models
from torch import Tensor, nn

from normal_guidance.core.field import acmil, clam
from normal_guidance.core.methods import EVERY_METHOD, FIELD, build_model
from normal_guidance.core.prediction import normal, scan_cross_entropy, set_epoch, uniform

FEATURES = 12
LENGTHS = [17, 30, 19, 24]
LABELS = torch.tensor([0, 1, 1, 0])
KINDS = ("weight", "bias")


@pytest.fixture
def rows() -> Tensor:
    return torch.randn(sum(LENGTHS), FEATURES, dtype=torch.float64, generator=torch.Generator().manual_seed(3))


def ours_of(name: str) -> nn.Module:
    torch.manual_seed(1)
    model = build_model(name, FEATURES).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.3 * torch.randn_like(parameter)
    set_epoch(model, 4)
    return model


def loss_of(name: str, model: nn.Module, rows: Tensor) -> Tensor:
    return EVERY_METHOD[name].loss(model(rows, torch.tensor(LENGTHS)), LABELS, None)


def gradients(loss: Tensor, model: nn.Module) -> dict[str, Tensor]:
    names, parameters = zip(*model.named_parameters(), strict=True)
    return dict(zip(names, torch.autograd.grad(loss, parameters), strict=True))


def torchmil_loss(
    theirs: nn.Module, rows: Tensor, loss: Callable[[dict[str, Tensor]], Tensor]
) -> tuple[Tensor, Tensor]:
    """The logits of torchmil's model, and the mean over the bags of what `loss` makes of its losses."""
    pairs = zip(rows.split(LENGTHS), LABELS, strict=True)
    logits, losses = zip(*(theirs.compute_loss(label[None].double(), bag[None]) for bag, label in pairs), strict=True)
    return torch.cat(logits), torch.stack([loss(each).double() for each in losses]).mean()


def smooth_hinge(logits: Tensor, targets: Tensor) -> Tensor:
    """The smooth loss of Berrada et al., 2018, for two classes: the log of sum_k exp(s_k + [k != y]), minus s_y."""
    y = targets.long()
    wrong = torch.ones_like(logits).scatter(1, y, 0.0)
    return (torch.logsumexp(logits + wrong, 1) - logits.gather(1, y).squeeze(1)).mean()


def test_clam_equals_torchmil(rows: Tensor) -> None:
    ours = ours_of("clam")
    theirs = torchmil.models.CLAM_SB((FEATURES,), att_dim=128, gated=True, k_sample=clam.SLICES).double()
    del theirs.inst_loss_fn
    theirs.inst_loss_fn = smooth_hinge  # its own compares every slice with every other slice's label (torchmil 1.0.2)
    layers = {"attention.hidden": "pool.fc1", "attention.gate": "pool.fc_gated", "attention.score": "pool.fc2"}
    theirs_of = {own: (name, slice(None)) for own, name in (layers | {"classifier": "classifier"}).items()}
    names = {name.replace(".module", ""): parameter for name, parameter in theirs.named_parameters()}
    copied = {f"{name}.{kind}": (f"{own}.{kind}", part) for own, (name, part) in theirs_of.items() for kind in KINDS}
    for number in range(2):
        part = slice(2 * number, 2 * number + 2)
        copied |= {f"inst_classifiers.{number}.{kind}": (f"instances.{kind}", part) for kind in KINDS}
    del copied["pool.fc2.bias"]  # torchmil has none: softmax ignores it
    assert copied.keys() == names.keys()
    with torch.no_grad():
        for name, (own, part) in copied.items():
            names[name].copy_(ours.get_parameter(own)[part])

    def joint(losses: dict[str, Tensor]) -> Tensor:
        return clam.SHARE * losses["BCEWithLogitsLoss"] + (1 - clam.SHARE) * losses["InstLoss"].double()

    logits, want = torchmil_loss(theirs, rows, joint)
    torch.testing.assert_close(ours(rows, torch.tensor(LENGTHS)).logit, logits)
    got = loss_of("clam", ours, rows)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # torchmil computes the slices' loss in float32
    mine, others = gradients(got, ours), dict(zip(names, torch.autograd.grad(want, list(names.values())), strict=True))
    for name, (own, part) in copied.items():
        torch.testing.assert_close(mine[own][part], others[name], rtol=1e-5, atol=1e-6)


def test_dsmil_equals_torchmil(rows: Tensor) -> None:
    ours = ours_of("dsmil")
    theirs = torchmil.models.DSMIL((FEATURES,), att_dim=128).double()
    pairs = {"query": "q_nn", "instance": "inst_classifier", "classifier": "bag_classifier"}
    weights = ours.state_dict()
    theirs.load_state_dict({f"{b}.{kind}": weights[f"{a}.{kind}"] for a, b in pairs.items() for kind in KINDS})
    logits, want = torchmil_loss(theirs, rows, lambda losses: sum(losses.values()) / 2)  # twice the streams' mean
    torch.testing.assert_close(ours(rows, torch.tensor(LENGTHS)).logit, logits, rtol=1e-6, atol=1e-6)
    got = loss_of("dsmil", ours, rows)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)  # torchmil's cross-entropy is in float32
    named = {f"{a}.{kind}": theirs.get_parameter(f"{b}.{kind}") for a, b in pairs.items() for kind in KINDS}
    others = dict(zip(named, torch.autograd.grad(want, list(named.values())), strict=True))
    torch.testing.assert_close(gradients(got, ours), others, rtol=1e-5, atol=1e-6)


def laplacian(size: int) -> Tensor:
    chain = torch.diag(torch.ones(size - 1, dtype=torch.float64), 1)
    chain = chain + chain.T
    return torch.diag(chain.sum(1)) - chain


def test_probsmooth_equals_torchmil(rows: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    ours = ours_of("probsmooth")
    theirs = torchmil.models.ProbSmoothABMIL((FEATURES,), att_dim=128, n_samples_train=8).double()
    weights = ours.state_dict()
    hidden = nn.Linear(FEATURES, 128).double()
    hidden.load_state_dict({kind: weights[f"hidden.{kind}"] for kind in KINDS})
    theirs.pool.in_mlp = nn.Sequential(hidden, nn.Tanh())  # ABMIL's layer; torchmil has two of its own
    theirs.pool.mu_f_nn, theirs.pool.log_diag_Sigma_nn = nn.Linear(128, 1).double(), nn.Linear(128, 1).double()
    for place, layer in enumerate((theirs.pool.mu_f_nn, theirs.pool.log_diag_Sigma_nn)):
        layer.load_state_dict({kind: weights[f"score.{kind}"][place : place + 1] for kind in KINDS})
    theirs.classifier = nn.Linear(FEATURES, 1).double()
    theirs.classifier.load_state_dict({kind: weights[f"classifier.{kind}"] for kind in KINDS})

    total = torch.zeros((), dtype=torch.float64)
    for bag, label in zip(rows.split(LENGTHS), LABELS, strict=True):
        drawn = normal(bag, ours.epoch, 8).double().T[None]
        monkeypatch.setattr(torch, "randn", lambda *shape, drawn=drawn, **_: drawn)
        adjacency = (torch.eye(len(bag), dtype=torch.float64) - laplacian(len(bag)))[None]  # torchmil has I - A for L
        total = total + sum(theirs.compute_loss(label[None].double(), bag[None], adjacency)[1].values())
    monkeypatch.undo()
    got, want = loss_of("probsmooth", ours, rows), total / len(LENGTHS)
    torch.testing.assert_close(got, want, rtol=1e-6, atol=1e-6)
    mine = gradients(got, ours)
    score = [theirs.pool.mu_f_nn, theirs.pool.log_diag_Sigma_nn]
    others = torch.autograd.grad(
        want, [hidden.weight, theirs.classifier.weight, *(layer.weight for layer in score), *(x.bias for x in score)]
    )
    wanted = {
        "hidden.weight": others[0],
        "classifier.weight": others[1],
        "score.weight": torch.cat(others[2:4]),
        "score.bias": torch.cat(others[4:6]),
    }
    torch.testing.assert_close({name: mine[name] for name in wanted}, wanted, rtol=1e-5, atol=1e-6)


def gated(bag: Tensor, layer: nn.Module) -> Tensor:
    inner = torch.tanh(F.linear(bag, layer.hidden.weight, layer.hidden.bias))
    inner = inner * torch.sigmoid(F.linear(bag, layer.gate.weight, layer.gate.bias))
    return F.linear(inner, layer.score.weight, layer.score.bias)  # (slices, heads)


def textbook_madmil(model: nn.Module, bag: Tensor) -> tuple[Tensor, Tensor]:
    pooled, attention = [], []
    for head, part in zip(model.heads, bag.chunk(4, dim=1), strict=True):
        a = gated(part, head).softmax(0)
        pooled.append((a * part).sum(0))
        attention.append(a[:, 0])
    return model.classifier(torch.cat(pooled)).squeeze(), torch.stack(attention)


def textbook_millet(model: nn.Module, bag: Tensor) -> tuple[Tensor, Tensor]:
    gate = torch.sigmoid(model.score(torch.tanh(model.hidden(bag))))
    interpretation = gate * model.classifier(bag)
    return interpretation.mean(), interpretation.T.softmax(1)


@pytest.mark.parametrize(("name", "textbook"), [("madmil", textbook_madmil), ("millet", textbook_millet)])
def test_models_without_a_loss_of_their_own_equal_the_textbook(name: str, textbook: object, rows: Tensor) -> None:
    model = ours_of(name)
    prediction = model(rows, torch.tensor(LENGTHS))
    logits, attention = zip(*(textbook(model, bag) for bag in rows.split(LENGTHS)), strict=True)
    torch.testing.assert_close(prediction.logit, torch.stack(logits))
    torch.testing.assert_close(prediction.log_attention.exp(), torch.cat(attention, 1))
    want = F.binary_cross_entropy_with_logits(torch.stack(logits), LABELS.double())
    torch.testing.assert_close(gradients(loss_of(name, model, rows), model), gradients(want, model))


def test_acmil_equals_the_textbook(rows: Tensor) -> None:
    model = ours_of("acmil")
    losses, logits = [], []
    for bag, label in zip(rows.split(LENGTHS), LABELS.double(), strict=True):
        scores = gated(bag, model.attention)  # (slices, branches)
        chance = uniform(bag, model.epoch, acmil.BRANCHES).T
        masked = scores.clone()
        for branch in range(acmil.BRANCHES):
            best = scores[:, branch].argsort(descending=True)[: -(-len(bag) // acmil.TOP)]
            for place in best.tolist():
                if chance[place, branch] < acmil.HIDDEN:
                    masked[place, branch] = -torch.inf
        attention, whole = masked.softmax(0), scores.softmax(0)
        branches = torch.stack(
            [attention[:, k] @ bag @ model.branches.weight[k] + model.branches.bias[k] for k in range(acmil.BRANCHES)]
        )
        scan = model.classifier(attention.mean(1) @ bag).squeeze()
        pairs = [(i, j) for i in range(acmil.BRANCHES) for j in range(i)]
        similar = torch.stack([F.cosine_similarity(whole[:, i], whole[:, j], dim=0) for i, j in pairs]).mean()
        losses.append(
            F.binary_cross_entropy_with_logits(scan, label)
            + F.binary_cross_entropy_with_logits(branches, label.expand(acmil.BRANCHES))
            + similar
        )
        logits.append(model.classifier(whole.mean(1) @ bag).squeeze())
    torch.testing.assert_close(model(rows, torch.tensor(LENGTHS)).logit, torch.stack(logits))
    got, want = loss_of("acmil", model, rows), torch.stack(losses).mean()
    torch.testing.assert_close(got, want)
    torch.testing.assert_close(gradients(got, model), gradients(want, model))


def test_clams_slices_are_at_most_half_of_a_short_scan() -> None:
    """A scan of three slices gives one from either end; a scan of one slice gives none."""
    model = ours_of("clam")
    short = model(torch.randn(4, FEATURES, dtype=torch.float64), torch.tensor([3, 1])).extra
    bag = torch.randn(3, FEATURES, dtype=torch.float64)
    scores, margins = gated(bag, model.attention)[:, 0], model.instances(bag).reshape(3, 2, 2)
    margin = margins[..., 1] - margins[..., 0]
    want = (F.softplus(1 - margin[scores.argmax()]) + F.softplus(1 + margin[scores.argmin()])) / 2
    torch.testing.assert_close(model(bag, torch.tensor([3])).extra["own"][0], want)
    assert not short["own"][1].any()
    assert not short["other"][1].any()


@pytest.mark.parametrize("name", ["acmil", "probsmooth"])
def test_random_training_is_new_in_every_epoch(name: str, rows: Tensor) -> None:
    model = ours_of(name)
    before = model(rows, torch.tensor(LENGTHS))
    set_epoch(model, 5)
    later = model(rows, torch.tensor(LENGTHS))
    torch.testing.assert_close(later.logit, before.logit)
    assert any(not torch.equal(later.extra[key], before.extra[key]) for key in before.extra)


def test_random_numbers_are_uniform_and_independent() -> None:
    model = ours_of("acmil")
    rows = torch.randn(20_000, FEATURES, generator=torch.Generator().manual_seed(0))
    numbers = uniform(rows, model.epoch, 4)
    counts = torch.histc(numbers, bins=20, min=0, max=1)
    assert ((counts - 4_000).abs() < 5 * 4_000**0.5).all()
    assert (torch.corrcoef(numbers).fill_diagonal_(0).abs() < 0.03).all()
    set_epoch(model, 9)
    assert torch.corrcoef(torch.stack([numbers[0], uniform(rows, model.epoch, 4)[0]]))[0, 1].abs() < 0.03
    assert normal(rows, model.epoch, 1).abs().max() < 7


@pytest.mark.parametrize("name", FIELD)
def test_class_weights_weigh_the_scans(name: str, rows: Tensor) -> None:
    """With no weight on negative scans, their labels' part of the loss has no gradient."""
    prediction = ours_of(name)(rows, torch.tensor(LENGTHS))
    weights = torch.tensor([0.0, 2.0], dtype=torch.float64)
    weighted, plain = (FIELD[name].loss(prediction, LABELS, given) for given in (weights, None))
    logit = prediction.logit
    assert not torch.allclose(weighted, plain)
    torch.testing.assert_close(
        scan_cross_entropy(logit, LABELS, weights), scan_cross_entropy(logit[1:3], LABELS[1:3]), rtol=1e-9, atol=0
    )
