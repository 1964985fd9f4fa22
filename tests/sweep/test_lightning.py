"""The callback adds guidance to the loss of any LightningModule: the same steps as a loop with the term in its loss."""

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from normal_guidance.base.errors import UserError
from normal_guidance.core.bags import Bags, collate
from normal_guidance.core.guidance import NormalGuidance
from normal_guidance.core.layout import unpack
from normal_guidance.core.methods import build_model
from normal_guidance.core.prediction import Prediction
from normal_guidance.study.drawn import shifted_mean
from normal_guidance.sweep.lightning import GuidanceCallback

FEATURES, BATCH, LR = 4, 8, 0.1


class Classifier(LightningModule):
    """A module that knows nothing of guidance."""

    def __init__(self, *, as_mapping: bool = False, padded: bool = False) -> None:
        super().__init__()
        self.model, self.unused = build_model("abmil", FEATURES), nn.Linear(2, 2)
        self.as_mapping, self.padded = as_mapping, padded

    def training_step(self, batch: Bags, number: int) -> object:
        rows, bags = unpack(batch.features, batch.lengths) if self.padded else (batch.features, batch.lengths)
        loss = F.binary_cross_entropy_with_logits(self.model(rows, bags).logit, batch.labels.float())
        return {"loss": loss, "more": 1} if self.as_mapping else loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.parameters(), lr=LR)


class OwnModel(LightningModule):
    """A model of another make: scores of padded slices, and a mask."""

    class Scores(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Linear(FEATURES, 1)

        def forward(self, features: Tensor, mask: Tensor) -> Tensor:
            return self.weight(features).squeeze(-1).masked_fill(~mask, -torch.inf)

    def __init__(self) -> None:
        super().__init__()
        self.attention, self.classifier = self.Scores(), nn.Linear(FEATURES, 1)

    def training_step(self, batch: Bags, number: int) -> Tensor:
        features, mask = unpack(batch.features, batch.lengths)
        pooled = (self.attention(features, mask).softmax(-1)[..., None] * features).sum(1)
        return F.binary_cross_entropy_with_logits(self.classifier(pooled).squeeze(-1), batch.labels.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def loader() -> DataLoader:
    return DataLoader(shifted_mean(24, seed=1, features=FEATURES), batch_size=BATCH, collate_fn=collate)


def trained(module: LightningModule, folder: Path, *callbacks: GuidanceCallback) -> Trainer:
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    loud = ("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary")
    options = {"max_epochs": 2, "accelerator": "cpu", "log_every_n_steps": 1, **dict.fromkeys(loud, False)}
    trainer = Trainer(callbacks=list(callbacks), default_root_dir=folder, **options)
    trainer.fit(module, loader())
    return trainer


def by_hand(weight: float) -> nn.Module:
    torch.manual_seed(3)
    model = Classifier().model
    optimizer, guidance = torch.optim.SGD(model.parameters(), lr=LR), NormalGuidance(weight)
    for batch in [*loader(), *loader()]:
        prediction = model(batch.features, batch.lengths)
        loss = F.binary_cross_entropy_with_logits(prediction.logit, batch.labels.float())
        loss = loss + guidance(prediction.log_attention, lengths=batch.lengths, from_logits=True)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return model


pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers and checkpoints


class TwoModels(Classifier):
    def __init__(self) -> None:
        super().__init__()
        self.second = build_model("abmil", FEATURES)

    def training_step(self, batch: Bags, number: int) -> Tensor:
        logits = self.model(batch.features, batch.lengths).logit, self.second(batch.features, batch.lengths).logit
        return F.binary_cross_entropy_with_logits(sum(logits), batch.labels.float())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


def test_two_callbacks_guide_two_submodules_and_leave_the_module_as_it_was(tmp_path: Path) -> None:
    module = TwoModels()
    callbacks = GuidanceCallback(NormalGuidance()), GuidanceCallback(NormalGuidance(), module="second")
    trainer = trained(module, tmp_path, *callbacks)
    assert "training_step" not in vars(module)
    logged = [trainer.callback_metrics[f"guidance/{name}"] for name in ("model", "second")]
    assert min(logged) > 0
    assert logged[0] != logged[1]


def test_a_step_that_was_wrapped_before_stays_wrapped(tmp_path: Path) -> None:
    module, calls = Classifier(), []
    step = module.training_step

    def counted(*args: object) -> object:
        calls.append(args[1])
        return step(*args)

    module.training_step = counted
    trained(module, tmp_path, GuidanceCallback(NormalGuidance()))
    assert vars(module)["training_step"] is counted
    assert calls == [0, 1, 2] * 2


class Called(Classifier):
    """Calls its model in another way."""

    def __init__(self, call: Callable[[nn.Module, Bags], Prediction]) -> None:
        super().__init__()
        self.call = call

    def training_step(self, batch: Bags, number: int) -> Tensor:
        return F.binary_cross_entropy_with_logits(self.call(self.model, batch).logit, batch.labels.float())


@pytest.mark.parametrize(
    "module",
    [
        Classifier,
        lambda: Classifier(as_mapping=True),
        lambda: Classifier(padded=True),
        lambda: Called(lambda model, batch: model(batch.features, bags=batch.lengths)),
        lambda: Called(lambda model, batch: model(bags=batch.lengths, features=batch.features)),
        lambda: Called(lambda model, batch: model(batch.features, batch.lengths.tolist())),
    ],
    ids=["loss", "mapping", "padded", "keyword", "turned round", "list"],
)
def test_the_steps_are_those_of_a_loop_with_the_term_in_its_loss(
    module: Callable[[], LightningModule], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    made = module()
    trainer = trained(made, tmp_path, GuidanceCallback(NormalGuidance(2.0)))
    for name, value in by_hand(2.0).state_dict().items():
        torch.testing.assert_close(made.model.state_dict()[name], value)
    assert trainer.callback_metrics["guidance"] > 0
    assert not torch.equal(by_hand(0.0).score.weight, made.model.score.weight)  # the term has an effect
    assert "training_step" not in vars(made)
    assert not made.model._forward_hooks


def test_negatives_of_their_own_need_labels_that_the_callback_does_not_have() -> None:
    with pytest.raises(UserError, match="negatives='none' needs the labels of the bags"):
        GuidanceCallback(NormalGuidance(negatives="none"))
    GuidanceCallback(NormalGuidance(negatives="none"), find=lambda inputs, output: {"attention": 0, "labels": 0})


def test_a_model_of_another_make(tmp_path: Path) -> None:
    guidance, spread = NormalGuidance(20.0), {}
    for weight in (0.0, 20.0):
        torch.manual_seed(3)
        module = OwnModel()
        guidance.weight = weight
        found = GuidanceCallback(
            guidance, "attention", lambda inputs, output: {"attention": output, "mask": inputs[1], "from_logits": True}
        )
        trained(module, tmp_path, found)
        scores = module.attention(
            *unpack(*(getattr(shifted_mean(24, 1, features=FEATURES), x) for x in ("features", "lengths")))
        )
        spread[weight] = NormalGuidance()(scores.softmax(-1).detach()).item()
    assert spread[20.0] < spread[0.0]


def unlearning(model: nn.Module, batch: Bags) -> Prediction:
    with torch.no_grad():
        return model(batch.features, batch.lengths)


def returning(result: object) -> Classifier:
    module = Classifier()
    module.training_step = lambda *args: result
    return module


def by_itself() -> Classifier:
    module = Classifier()
    module.automatic_optimization = False
    return module


def finding(result: object) -> GuidanceCallback:
    return GuidanceCallback(NormalGuidance(), find=lambda inputs, output: result)


def guiding(module: str = "model") -> GuidanceCallback:
    return GuidanceCallback(NormalGuidance(), module)


@pytest.mark.parametrize(
    ("module", "callback", "message"),
    [
        (Classifier, lambda: finding(None), "find returned NoneType; return a dict, such as {'attention'"),
        (
            Classifier,
            lambda: finding({"weights": 1}),
            "dict with unknown 'weights'; the guidance takes attention, mask",
        ),
        (
            Classifier,
            lambda: finding({"from_logits": True}),
            "a dict with no 'attention'; the guidance takes attention",
        ),
        (Classifier, lambda: guiding("encoder"), "Classifier has no submodule 'encoder'; it has model, model.hidden"),
        (Classifier, lambda: guiding("unused"), "submodule 'unused' was not called in training_step"),
        (lambda: returning({"logit": 1}), guiding, "a dict of logit, without 'loss'; return the loss"),
        (lambda: returning({"loss": 1.0}), guiding, "training_step returned float as 'loss'; return"),
        (lambda: returning(0.5), guiding, "training_step returned float; return"),
        (
            lambda: Called(lambda model, batch: model.eval()(batch.features, batch.lengths)),
            guiding,
            r"submodule 'model' was called in eval mode .* call model\.train\(\)",
        ),
        (lambda: Called(unlearning), guiding, "'model' was called without gradients in training_step; call it outside"),
        (OwnModel, lambda: guiding("attention"), "output is Tensor, not a Prediction .* say where its attention is"),
        (by_itself, guiding, "Classifier optimizes by hand"),
    ],
)
def test_what_cannot_be_guided_says_why(
    module: Callable[[], LightningModule], callback: Callable[[], GuidanceCallback], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trained(module(), tmp_path, callback())
