"""A checkpoint in memory, for tests of sweeps that are interrupted and resumed."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor


class MemoryCheckpoint:
    """Keeps every state, due every two epochs; with `interrupt_at`, saving that state raises KeyboardInterrupt."""

    def __init__(self, interrupt_at: int | None = None) -> None:
        self.saved: list[tuple[dict[str, Tensor], dict[str, Any]]] = []
        self.interrupt_at = interrupt_at

    def load(self) -> tuple[dict[str, Tensor], dict[str, Any]] | None:
        return self.saved[-1] if self.saved else None

    def save(self, tensors: Mapping[str, Tensor], about: Mapping[str, Any]) -> None:
        self.saved.append(({name: tensor.clone() for name, tensor in tensors.items()}, dict(about)))
        if len(self.saved) == self.interrupt_at:
            raise KeyboardInterrupt

    def due(self, epochs: int, seconds: float) -> bool:
        return epochs >= 2
