"""Normal Guidance in a Lightning `Trainer`: a callback that adds it to the loss of any `LightningModule`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normal_guidance.core.attention_term import AttentionTerm
from normal_guidance.core.layout import Layout
from normal_guidance.core.prediction import Prediction
from normal_guidance.errors import UserError

try:
    from lightning.pytorch import LightningModule, Trainer
    from lightning.pytorch.callbacks import Callback
except ImportError as error:
    raise UserError("GuidanceCallback needs lightning; pip install 'normal-guidance[lightning]'") from error

FindAttention = Callable[[tuple[Any, ...], Any], Mapping[str, Any]]
"""Maps the inputs and the output of a module to the arguments of the guidance: attention, mask or lengths."""


def attention_of_prediction(inputs: tuple[Any, ...], output: Any) -> Mapping[str, Any]:
    """The arguments of the guidance for a module of `build_model`, which takes `(features, bags)`.

    Example:
        >>> from normal_guidance.core.methods import build_model
        >>> inputs = (torch.randn(5, 8), torch.tensor([2, 3]))
        >>> sorted(attention_of_prediction(inputs, build_model("ng", 8)(*inputs)))
        ['attention', 'from_logits', 'lengths']
    """
    if not isinstance(output, Prediction) or len(inputs) != 2:
        raise UserError(
            f"the module's output is {type(output).__name__}, not a Prediction of (features, bags); say where its "
            "attention is: GuidanceCallback(guidance, module, find=lambda inputs, output: {'attention': ...})"
        )
    bags, about = inputs[1], {"attention": output.log_attention, "from_logits": True}
    is_mask = isinstance(bags, Tensor) and bags.dtype == torch.bool
    lengths = bags if isinstance(bags, Layout | Tensor) else torch.as_tensor(bags)
    return {**about, "mask": bags} if is_mask else {**about, "lengths": lengths}


class GuidanceCallback(Callback):
    """Adds guidance to the loss that `training_step` returns, and logs it as `guidance`.

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
        self.guidance, self.module, self.find = guidance, module, find
        self._terms: list[Tensor] = []
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
        handle = self._submodule(pl_module).register_forward_hook(self._watch)
        step = pl_module.training_step

        def guided_step(*args: Any, **kwargs: Any) -> Any:
            self._terms.clear()
            return self._add(pl_module, step(*args, **kwargs))

        pl_module.training_step = guided_step  # type: ignore[method-assign]
        self._undo = [handle.remove, lambda: delattr(pl_module, "training_step")]

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

    def _submodule(self, pl_module: LightningModule) -> nn.Module:
        named = dict(pl_module.named_modules())
        if self.module not in named or not self.module:
            raise UserError(
                f"{type(pl_module).__name__} has no submodule {self.module!r}; it has {', '.join(filter(None, named))}"
            )
        return named[self.module]

    def _watch(self, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
        if module.training and torch.is_grad_enabled():
            self._terms.append(self.guidance(**self.find(inputs, output)))

    def _add(self, pl_module: LightningModule, result: Any) -> Any:
        if result is None:
            return None  # Lightning skips this batch
        if not self._terms:
            raise UserError(
                f"submodule {self.module!r} was not called in training_step; name the one whose forward gives attention"
            )
        term = torch.stack(self._terms).mean()
        self._terms.clear()
        pl_module.log("guidance", term.detach())
        return {**result, "loss": result["loss"] + term} if isinstance(result, Mapping) else result + term
