"""Variations of a method, made of its finished model: numbers that are held or start elsewhere."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from normal_guidance.core.models import EVERY_METHOD, Method
from normal_guidance.errors import UserError

NUMBERS = {"sigma": "σ", "beta": "β", "kappa": "κ", "shape": "p", "gamma": "γ"}
"""What bells learn beside their weights, each as its logarithm, `log_<name>`; and the paper's symbols."""

Values = Sequence[tuple[str, float]]
"""Names of `NUMBERS` and what they are."""


def hold(model: nn.Module, number: str, value: float) -> None:
    """Turns a parameter into a buffer of the same name: the model uses it, and nothing trains it.

    Not persistent: what a sweep keeps of its winner are parameters, and a state of those alone must load.
    """
    module, name = _owner(model, number)
    log_value = torch.full_like(getattr(module, name).detach(), math.log(value))
    delattr(module, name)
    module.register_buffer(name, log_value, persistent=False)


def start(model: nn.Module, number: str, value: float) -> None:
    """Sets where learning starts."""
    module, name = _owner(model, number)
    nn.init.constant_(getattr(module, name), math.log(value))


def _owner(model: nn.Module, number: str) -> tuple[nn.Module, str]:
    name = f"log_{number}"
    for module in model.modules():
        if name in dict(module.named_parameters(recurse=False)):
            return module, name
    raise UserError(f"{type(model).__name__} learns no {number}; hold or start something that it learns")


def numbers_of(model: nn.Module) -> dict[str, float]:
    """Those of `NUMBERS` that a model has, learned or held; the mean over heads."""
    tensors: dict[str, Tensor] = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    found = {name.rpartition(".")[2].removeprefix("log_"): tensor for name, tensor in tensors.items()}
    return {name: found[name].detach().exp().mean().item() for name in NUMBERS if name in found}


def varied(build: Callable[[int], nn.Module], held: Values, started: Values) -> Callable[[int], nn.Module]:
    """A builder of the same model with these numbers."""

    def build_varied(features: int) -> nn.Module:
        model = build(features)
        for number, value in held:
            hold(model, number, value)
        for number, value in started:
            start(model, number, value)
        return model

    return build_varied


@contextmanager
def registered(method: Method) -> Iterator[None]:
    """The method among `EVERY_METHOD`, where configurations look for it, while the block runs."""
    before = EVERY_METHOD.get(method.name)
    EVERY_METHOD[method.name] = method
    try:
        yield
    finally:
        if before is None:
            del EVERY_METHOD[method.name]
        else:
            EVERY_METHOD[method.name] = before
