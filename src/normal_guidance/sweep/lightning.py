"""Normal Guidance in a Lightning `Trainer`: a callback that adds it to the loss of any `LightningModule`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normal_guidance.base.errors import UserError
from normal_guidance.base.system import importing
from normal_guidance.core.arrays import as_tensor
from normal_guidance.core.attention_term import AttentionTerm
from normal_guidance.core.layout import Layout
from normal_guidance.core.prediction import Prediction

with importing("lightning", "GuidanceCallback needs lightning"):
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback

# Maps the inputs and the output of a module to the arguments of the guidance: attention, mask or lengths.
FindAttention = Callable[[tuple[Any, ...], Any], Mapping[str, Any]]


def attention_of_prediction(inputs: tuple[Any, ...], output: Any) -> Mapping[str, Any]:
    """The arguments of the guidance for a module of `build_model`, which takes `(features, bags)`."""
    if not isinstance(output, Prediction) or len(inputs) != 2:
        raise UserError(
            f"the module's output is {type(output).__name__}, not a Prediction of (features, bags); say where its "
            "attention is: GuidanceCallback(guidance, module, find=lambda inputs, output: {'attention': ...})"
        )
    given = inputs[1]
    bags = given if isinstance(given, Layout) else as_tensor(given, "bags", output.logit)
    is_mask = isinstance(bags, Tensor) and bags.dtype == torch.bool
    return {"attention": output.log_attention, "from_logits": True, "mask" if is_mask else "lengths": bags}


class GuidedStep:
    """A `training_step` whose result passes through `add`, until `remove`.

    Other callbacks may wrap the step too, and end in any order: a step that lies below another only lets results
    through, and goes when it lies on top.
    """

    def __init__(self, pl_module: LightningModule, add: Callable[[Any], Any]) -> None:
        self.pl_module, self.add = pl_module, add
        self.below = vars(pl_module).get("training_step")
        self.step = pl_module.training_step
        self.__wrapped__ = inspect.unwrap(self.step)  # Lightning reads the signature of the step
        self.is_over = False
        pl_module.training_step = self  # type: ignore[method-assign]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        result = self.step(*args, **kwargs)
        return result if self.is_over else self.add(result)

    def remove(self) -> None:
        self.is_over = True
        own = vars(self.pl_module)
        while isinstance(top := own.get("training_step"), GuidedStep) and top.is_over:
            if top.below is None:
                del own["training_step"]
            else:
                own["training_step"] = top.below


class GuidanceCallback(Callback):
    """Adds guidance to the loss that `training_step` returns, and logs it as `guidance`.

    A trainer may have several, one for each submodule; they log `guidance/` and the submodule's name.

    The attention is that of one submodule, taken from its forward pass; the `LightningModule` need not change.  If the
    submodule runs several times in a step, the mean of its terms counts.  Validation is not guided.

    Args:
        guidance: such as `NormalGuidance(weight=1.0)`.
        module: the submodule's name in the `LightningModule`, as `named_modules` has it, such as "model".
        find: maps the submodule's inputs and output to the arguments of the guidance; without it, the submodule is one
            of `build_model`.

    Example:
        >>> from normal_guidance.core.guidance import NormalGuidance
        >>> GuidanceCallback(
        ...     NormalGuidance(weight=1.0),
        ...     module="attention",
        ...     find=lambda inputs, output: {"attention": output, "mask": inputs[1], "from_logits": True},
        ... )
        GuidanceCallback(NormalGuidance(weight=1.0, divergence='forward_kl', renormalize=True), module='attention')
    """

    def __init__(
        self, guidance: AttentionTerm, module: str = "model", find: FindAttention = attention_of_prediction
    ) -> None:
        super().__init__()
        if not isinstance(guidance, AttentionTerm):
            raise UserError(f"guidance: got {type(guidance).__name__}; give NormalGuidance(weight=1.0) or another term")
        if not isinstance(module, str):
            raise UserError(
                f"module: got {type(module).__name__}; give the name of a submodule of the LightningModule, as 'model'"
            )
        if not callable(find):
            raise UserError(f"find: got {type(find).__name__}; give a function of the submodule's inputs and output")
        negatives = getattr(guidance, "negatives", "own")
        if find is attention_of_prediction and negatives != "own":
            raise UserError(
                f"negatives={negatives!r} needs the labels of the bags, which a submodule's inputs and output do not "
                "hold; leave it out, or give a find whose result has 'labels'"
            )
        self.guidance, self.module, self.find = guidance, module, find
        self._takes = tuple(inspect.signature(guidance.forward).parameters)
        self._terms: list[Tensor] = []
        self._unguided = ""
        self._undo: list[Callable[[], None]] = []

    def __repr__(self) -> str:
        return f"GuidanceCallback({self.guidance}, module={self.module!r})"

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Watch the submodule and wrap `training_step`, until the end of the fit."""
        if not pl_module.automatic_optimization:
            raise UserError(
                f"{type(pl_module).__name__} optimizes by hand, so it returns no loss to add guidance to; call the "
                "guidance in training_step: loss = loss + guidance(attention, mask)"
            )
        self._end()
        named = dict(pl_module.named_modules())
        if self.module not in named or not self.module:
            raise UserError(
                f"{type(pl_module).__name__} has no submodule {self.module!r}; it has {', '.join(filter(None, named))}"
            )
        callbacks = trainer.callbacks  # type: ignore[attr-defined]
        several = sum(isinstance(callback, GuidanceCallback) for callback in callbacks) > 1
        name = f"guidance/{self.module}" if several else "guidance"
        hook = named[self.module].register_forward_hook(self._watch, with_kwargs=True)
        step = GuidedStep(pl_module, lambda result: self._add(pl_module, name, result))
        self._undo = [hook.remove, step.remove]

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        """Forget what the submodule did between the steps, such as in validation."""
        self._terms.clear()
        self._unguided = ""

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Leave the module as it was."""
        self._end()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave the module as it was."""
        self._end()

    def _end(self) -> None:
        while self._undo:
            self._undo.pop()()
        self._terms.clear()

    def _watch(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        if not torch.is_grad_enabled():
            self._unguided = "called without gradients in training_step; call it outside torch.no_grad()"
        elif not module.training:
            self._unguided = f"called in eval mode in training_step; call {self.module}.train() after what changed it"
        else:
            given = inspect.signature(module.forward).bind(*args, **kwargs)
            arguments = self.find((*given.args, *given.kwargs.values()), output)
            self._check_arguments(arguments)
            self._terms.append(self.guidance(**arguments))

    def _check_arguments(self, arguments: Any) -> None:
        if not isinstance(arguments, Mapping):
            raise UserError(f"find returned {type(arguments).__name__}; return a dict, such as {{'attention': ...}}")
        unknown = [name for name in arguments if name not in self._takes]
        if unknown or "attention" not in arguments:
            lacks = f"unknown {unknown[0]!r}" if unknown else "no 'attention'"
            raise UserError(f"find returned a dict with {lacks}; the guidance takes {', '.join(self._takes)}")

    def _add(self, pl_module: LightningModule, name: str, result: Any) -> Any:
        if result is None:
            return None  # Lightning skips this batch
        loss = result.get("loss") if isinstance(result, Mapping) else result
        if not isinstance(loss, Tensor):
            raise UserError(f"training_step returned {_described(result)}; return the loss, or a dict with 'loss'")
        if not self._terms:
            raise UserError(
                f"submodule {self.module!r} was "
                + (self._unguided or "not called in training_step; name the one whose forward gives attention")
            )
        term = torch.stack(self._terms).mean()
        self._terms.clear()
        pl_module.log(name, term.detach())
        return {**result, "loss": loss + term} if isinstance(result, Mapping) else loss + term


def _described(result: Any) -> str:
    if not isinstance(result, Mapping):
        return type(result).__name__
    if "loss" in result:
        return f"{type(result['loss']).__name__} as 'loss'"
    return f"a dict of {', '.join(map(str, result)) or 'nothing'}, without 'loss'"
