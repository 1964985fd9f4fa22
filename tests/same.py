"""Two calculations of the same: their values, and the gradients of everything that they depend on."""

from collections.abc import Iterable

import torch
from torch import Tensor


def assert_same(got: Tensor, want: Tensor, leaves: Iterable[Tensor], side: Tensor | None = None, **near: float) -> None:
    """Values agree, and so do the gradients of their sum weighted by `side`, which is random if left out."""
    torch.testing.assert_close(got, want, equal_nan=True, **near)
    side, leaves = torch.randn_like(want) if side is None else side, list(leaves)
    if leaves:
        options = {"retain_graph": True, "materialize_grads": True}
        gradients = [torch.autograd.grad(value.nan_to_num(), leaves, side, **options) for value in (got, want)]
        torch.testing.assert_close(*gradients, **near)
