"""One scan's attention as the page draws it: the curve, its heads, the fitted normal, and the key slices."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from normal_guidance.core.guidance import normal_reference
from normal_guidance.statistics import key_slices as by_attention

FLAT = 0.01
"""Attention is flat if its slices differ by less than this share of the highest."""

DIGITS = 7
"""Significant digits of a float32; the page receives no more."""


def curve(
    attention: Float[Tensor, "slices"],
    heads: Float[Tensor, "heads slices"],
    probability: float | None,
    spacing: float | None = None,
) -> dict[str, Any]:
    """Describe one method's attention for the page.

    Args:
        attention: the heads' mean, or the slice reference's probabilities, which need not sum to one.
        heads: log-attention of each head.
        probability: the scan's probability.
        spacing: mm from slice to slice.
    """
    return {
        "probability": number(probability),
        "attention": numbers(attention),
        "normal": numbers(fitted_normal(attention)),
        # One head is the curve itself.
        "heads": [numbers(head) for head in heads.exp()] if len(heads) > 1 else [],
        "key_slices": key_slices(attention, spacing),
    }


def fitted_normal(attention: Float[Tensor, "slices"]) -> Float[Tensor, "slices"]:
    """The normal with the curve's own mean and variance (eqs. 2 and 3), scaled to the curve's sum."""
    total = attention.sum()
    if not total > 0:
        return torch.zeros_like(attention)
    return normal_reference((attention / total)[None])[0] * total


def key_slices(attention: Float[Tensor, "slices"], spacing: float | None = None) -> list[int]:
    """Choose key slices as `nguide predict` does; none where all slices are about equal, as in mean pooling."""
    if attention.max() - attention.min() <= FLAT * attention.max():
        return []
    return list(by_attention.key_slices(attention, spacing=spacing))


def number(value: float | None) -> float | None:
    """Round a number for JSON, which has no NaN."""
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def numbers(values: Tensor | Sequence[float]) -> list[float | None]:
    return [number(value) for value in (values.tolist() if isinstance(values, Tensor) else values)]
