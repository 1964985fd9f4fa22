"""The callback adds guidance to the loss of any LightningModule: the same steps as a loop with the term in its loss."""

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

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

pytestmark = pytest.mark.filterwarnings("ignore")  # Lightning's own, about workers and checkpoints


def plainly(model: nn.Module, batch: Bags) -> Prediction:
    return model(batch.features, batch.lengths)


class Classifier(LightningModule):
    """A module that knows nothing of guidance; how it calls its model, and what it makes of the loss, may be others."""

    def __init__(
        self, call: Callable[[nn.Module, Bags], Prediction] = plainly, give: Callable[[Tensor], object] = lambda x: x
    ) -> None:
        super().__init__()
        self.model, self.unused = build_model("abmil", FEATURES), nn.Linear(2, 2)
        self.call, self.give = call, give

    def training_step(self, batch: Bags, number: int) -> object:
        loss = F.binary_cross_entropy_with_logits(self.call(self.model, batch).logit, batch.labels.float())
        return self.give(loss)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=LR)


class TwoModels(Classifier):
    def __init__(self) -> None:
        super().__init__(self.both)
        self.second = build_model("abmil", FEATURES)

    def both(self, model: nn.Module, batch: Bags) -> Prediction:
        first, second = plainly(model, batch), plainly(self.second, batch)
        return first._replace(logit=first.logit + second.logit)


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


def guiding(module: str = "model", **options: object) -> GuidanceCallback:
    return GuidanceCallback(NormalGuidance(), module, **options)


def finding(result: object) -> GuidanceCallback:
    """Such a callback may have negatives of their own: what is found may hold labels."""
    return GuidanceCallback(NormalGuidance(negatives="none"), find=lambda inputs, output: result)


def found_by_hand(inputs: tuple[Tensor, ...], output: Prediction) -> dict[str, object]:
    """As for a model of another make."""
    return {"attention": output.log_attention, "lengths": inputs[1], "from_logits": True}


def test_two_callbacks_guide_two_submodules_and_leave_the_module_as_it_was(tmp_path: Path) -> None:
    module = TwoModels()
    trainer = trained(module, tmp_path, guiding(), guiding("second"))
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
    trained(module, tmp_path, guiding())
    assert vars(module)["training_step"] is counted
    assert calls == [0, 1, 2] * 2


@pytest.mark.parametrize(
    ("module", "options"),
    [
        (Classifier, {}),
        (Classifier, {"find": found_by_hand}),
        (lambda: Classifier(give=lambda loss: {"loss": loss, "more": 1}), {}),
        (lambda: Classifier(lambda model, batch: model(*unpack(batch.features, batch.lengths))), {}),
        (lambda: Classifier(lambda model, batch: model(batch.features, bags=batch.lengths)), {}),
        (lambda: Classifier(lambda model, batch: model(bags=batch.lengths, features=batch.features)), {}),
        (lambda: Classifier(lambda model, batch: model(batch.features, batch.lengths.tolist())), {}),
    ],
    ids=["loss", "found", "mapping", "padded", "keyword", "turned round", "list"],
)
def test_the_steps_are_those_of_a_loop_with_the_term_in_its_loss(
    module: Callable[[], LightningModule], options: dict[str, Any], tmp_path: Path
) -> None:
    torch.manual_seed(3)
    made = module()
    trainer = trained(made, tmp_path, GuidanceCallback(NormalGuidance(2.0), **options))
    for name, value in by_hand(2.0).state_dict().items():
        torch.testing.assert_close(made.model.state_dict()[name], value)
    assert trainer.callback_metrics["guidance"] > 0
    assert not torch.equal(by_hand(0.0).score.weight, made.model.score.weight)  # the term has an effect
    assert "training_step" not in vars(made)
    assert not made.model._forward_hooks


def unlearning(model: nn.Module, batch: Bags) -> Prediction:
    with torch.no_grad():
        return plainly(model, batch)


def scoring(model: nn.Module, batch: Bags) -> Prediction:
    model.score(torch.zeros(1, 128))
    return plainly(model, batch)


def by_itself() -> Classifier:
    module = Classifier()
    module.automatic_optimization = False
    return module


@pytest.mark.parametrize(
    ("module", "callback", "message"),
    [
        (Classifier, lambda: finding(None), "find returned NoneType; return a dict, such as {'attention'"),
        (Classifier, lambda: finding({"weights": 1}), "unknown 'weights'; the guidance takes attention, mask"),
        (Classifier, lambda: finding({"from_logits": True}), "a dict with no 'attention'; the guidance takes"),
        (Classifier, lambda: guiding("encoder"), "Classifier has no submodule 'encoder'; it has model, model.hidden"),
        (Classifier, lambda: guiding("unused"), "submodule 'unused' was not called in training_step"),
        (lambda: Classifier(give=lambda _: {"logit": 1}), guiding, "a dict of logit, without 'loss'; return the loss"),
        (lambda: Classifier(give=lambda _: {"loss": 1.0}), guiding, "training_step returned float as 'loss'; return"),
        (lambda: Classifier(give=lambda _: 0.5), guiding, "training_step returned float; return"),
        (
            lambda: Classifier(lambda model, batch: plainly(model.eval(), batch)),
            guiding,
            r"submodule 'model' was called in eval mode .* call model\.train\(\)",
        ),
        (lambda: Classifier(unlearning), guiding, "'model' was called without gradients in training_step; call it out"),
        (lambda: Classifier(scoring), lambda: guiding("model.score"), "Tensor, not a Prediction .* say where its"),
        (Classifier, lambda: GuidanceCallback(NormalGuidance(negatives="none")), "'none' needs the labels of the bags"),
        (by_itself, guiding, "Classifier optimizes by hand"),
    ],
)
def test_what_cannot_be_guided_says_why(
    module: Callable[[], LightningModule], callback: Callable[[], GuidanceCallback], message: str, tmp_path: Path
) -> None:
    with pytest.raises(UserError, match=message):
        trained(module(), tmp_path, callback())
