"""Key slices: the few slices of a scan to look at first, chosen by attention and kept apart."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

KEYS = 5
"""The most key slices of a scan."""

APART_MM = 8.0
"""The least distance between key slices, which are never adjacent either: neighbours show the same thing."""


def key_slices(attention: Float[Tensor, "slices"], count: int = KEYS, spacing: float | None = None) -> tuple[int, ...]:
    """The slices to look at first, counted from 0, highest attention first.

    Each is at least `APART_MM` from those before it (or 2 slices, if that is more or the spacing is unknown).  The list
    ends where attention falls below an even share, 1 / slices, so a scan with all attention in one place has few.
    Of slices with the same attention, the one nearest to the mean position comes first.

    Example:
        >>> import torch
        >>> key_slices(torch.tensor([0.02, 0.08, 0.3, 0.28, 0.02, 0.02, 0.25, 0.03]), spacing=5.0)
        (2, 6)
        >>> key_slices(torch.full((9,), 1 / 9), count=3)
        (4, 2, 6)
    """
    slices = len(attention)
    apart = 2 if not spacing else max(2, math.ceil(APART_MM / spacing))
    shares = (attention.double() / attention.double().sum()).tolist()
    middle = sum(place * share for place, share in enumerate(shares))
    order = sorted(range(slices), key=lambda place: (-round(shares[place], 9), abs(place - middle), place))
    chosen: list[int] = []
    for place in order:
        enough = shares[place] >= (1 - 1e-6) / slices or not chosen
        if len(chosen) == count or not enough:
            break
        if all(abs(place - other) >= apart for other in chosen):
            chosen.append(place)
    return tuple(chosen)
