"""Terms on attention that are added to a training loss: what all regularizers, Normal Guidance included, share.

A term takes attention in any form, of any model, with one or several heads, and returns lambda times the mean over bags
and heads of its value.  A new one is a subclass of `AttentionTerm` with the method `values`, and a `Regularizer` in a
file of `core.regularizers`.

Everything is computed from log-attention, in float32 or better, also under mixed precision.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor, nn

from normal_guidance.core.layout import Layout
from normal_guidance.core.positions import Positions
from normal_guidance.core.prediction import Features
from normal_guidance.errors import UserError

Padded = Float[Tensor, "bags heads longest"]
Values = Float[Tensor, "*shape"]
Mask = Bool[Tensor, "bags longest"]
Lengths = Int[Tensor, "bags"] | Layout
BagLabels = Shaped[Tensor, "bags"]


class Given(NamedTuple):
    """What a term may know about the bags beside their attention."""

    labels: BagLabels | None = None
    positions: Positions | None = None
    features: Features | None = None


class AttentionTerm(nn.Module):
    """A term to add to any training loss: `weight` times the mean of `values`.

    Args:
        weight: lambda.  It is not comparable across terms.
    """

    renormalize = True
    """Whether attention is divided by its sum over the slices first; see `NormalGuidance`."""
    in_order = False
    """Whether `values` needs a bag's real slices first, in their order; a caller's mask may have padding anywhere."""

    def __init__(self, weight: float = 1.0) -> None:
        super().__init__()
        self.weight = checked_weight(weight)

    def values(self, log_a: Padded, layout: Layout, given: Given) -> Float[Tensor, "bags heads"]:
        """The value of each bag and head, without lambda, from log-attention that is hidden in the padding."""
        raise NotImplementedError

    def forward(
        self,
        attention: Values,
        mask: Mask | None = None,
        *,
        lengths: Lengths | None = None,
        from_logits: bool = False,
        labels: BagLabels | None = None,
        positions: Positions | None = None,
        features: Features | None = None,
    ) -> Float[Tensor, ""]:
        """The loss, a scalar.

        Args:
            attention: `(B, S)` or `(B, H, S)`, or packed `(N,)` or `(H, N)` with `lengths`.  Slices come last.
            mask: True for real slices; without it all are real.
            lengths: slices per bag, for packed attention; or the bags' `Layout`, made once and used again.
            from_logits: `attention` holds logits before the softmax (or log-attention), more exact than probabilities.
            labels: 0 or 1 for each bag.
            positions: places of the slices instead of their numbers (`normal_reference`).
            features: the embeddings of the slices, in the same form as attention.
        """
        given = {"labels": labels, "positions": positions, "features": features}
        return self.weight * self.per_bag(attention, mask, lengths=lengths, from_logits=from_logits, **given).mean()

    def per_bag(
        self,
        attention: Values,
        mask: Mask | None = None,
        *,
        lengths: Lengths | None = None,
        from_logits: bool = False,
        labels: BagLabels | None = None,
        positions: Positions | None = None,
        features: Features | None = None,
    ) -> Float[Tensor, "bags"] | Float[Tensor, "bags heads"]:
        """One value per bag (and head), without lambda; arguments as for `forward`."""
        padded, layout = as_padded(attention, mask, lengths)
        if self.in_order and mask is not None:
            padded, layout, features = _moved_to_front(padded, mask, features)
        with full_precision(attention):
            log_a = log_attention(padded, layout, from_logits, self.renormalize)
            values = self.values(log_a, layout, Given(labels, positions, features))
        return values.squeeze(1) if is_single_head(attention, layout) else values

    def extra_repr(self) -> str:
        return f"weight={self.weight}"


@dataclass(frozen=True)
class Regularizer:
    """One row of the table of regularizers, `core.regularizers.REGULARIZERS`.

    Args:
        name: as `--regularizer` takes it, and the name of its file.
        title: as it stands behind the model's title.
        term: makes the term of a weight and of the options that it has.
        about: what it does to attention, in a sentence.
        options: fields of `Config` that `term` takes.
    """

    name: str
    title: str
    term: Callable[..., AttentionTerm]
    about: str
    options: tuple[str, ...] = ()


def log_attention(padded: Padded, layout: Layout, from_logits: bool, renormalize: bool) -> Padded:
    """log a, hidden in the padding."""
    padded = padded if padded.dtype == torch.float64 else padded.float()
    # -inf on a real slice would give 0 * inf; a large finite number makes the loss huge, and its gradient still a - r.
    log_a = padded.clamp_min(torch.finfo(padded.dtype).min / 4) if from_logits else log_probability(padded)
    return layout.log_softmax(log_a) if renormalize else layout.hide(log_a)


def log_probability(probability: Padded) -> Padded:
    """The log of a probability, with the smallest normal number instead of 0."""
    probability = probability if probability.dtype == torch.float64 else probability.float()
    return probability.clamp_min(torch.finfo(probability.dtype).tiny).log()


def as_padded(values: Values, mask: Mask | None, lengths: Lengths | None) -> tuple[Padded, Layout]:
    """Attention in any accepted form as `(bags, heads, longest)`, and its layout."""
    layout = _layout(values, mask, lengths)
    padded = layout.fold(values) if layout.is_packed else values
    return (padded[:, None] if is_single_head(values, layout) else padded), layout


def _moved_to_front(padded: Padded, mask: Mask, features: Features | None) -> tuple[Padded, Layout, Features | None]:
    """Attention and features with the real slices of every bag before its padding."""
    order = mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
    if features is not None:
        features = features.gather(1, order[:, :, None].expand_as(features))
    return padded.gather(-1, order[:, None].expand_as(padded)), Layout.padded(mask.sum(1), mask.shape[1]), features


def _layout(values: Values, mask: Mask | None, lengths: Lengths | None) -> Layout:
    shape = tuple(values.shape)
    if lengths is not None:
        layout = lengths if isinstance(lengths, Layout) else Layout.packed(lengths)
        slices = layout.mask.numel() if layout.sizes is None else sum(layout.sizes)
        fits = values.ndim in (1, 2) and shape[-1] == slices if layout.is_packed else _fits(shape, layout.mask)
        if mask is not None or not fits:
            form = "(slices,) or (heads, slices)" if layout.is_packed else f"the layout's {tuple(layout.mask.shape)}"
            raise UserError(
                f"attention of shape {shape} with lengths adding up to {slices}: expected {form}, and no mask"
            )
        return layout
    if mask is None and values.ndim in (2, 3):
        mask = torch.ones(shape[0], shape[-1], dtype=torch.bool, device=values.device)
    if mask is not None and mask.dtype != torch.bool:
        raise UserError(f"mask is {mask.dtype}; it must be boolean, True for real slices: write mask.bool()")
    if mask is None or 0 in shape or not _fits(shape, mask):
        raise UserError(
            f"attention of shape {shape} and mask of shape {None if mask is None else tuple(mask.shape)}: expected "
            "(B, S) or (B, H, S) with a mask (B, S), or packed attention with lengths="
        )
    # Reading values would make a GPU wait and cannot be compiled, so only the CPU checks them; elsewhere a bag without
    # a real slice adds 0 to the mean.
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not mask.any(1).all():
        empty = (~mask.any(1)).nonzero().flatten().tolist()
        raise UserError(f"mask: bags {empty} have no real slice; leave empty bags out")
    # Slice numbers count real slices only, so the padding may be anywhere.
    return Layout(lengths=mask.sum(1), mask=mask, sizes=None, pad_index=None, unpad_index=None)


def _fits(shape: tuple[int, ...], mask: Mask) -> bool:
    return len(shape) in (2, 3) and (shape[0], shape[-1]) == tuple(mask.shape)


def is_single_head(values: Values, layout: Layout) -> bool:
    return values.ndim == (1 if layout.is_packed else 2)


def full_precision(values: Tensor) -> torch.autocast:
    """Switch autocast off: terms are always float32 or better."""
    return torch.autocast(device_type=values.device.type, enabled=False)


def checked_weight(weight: float) -> float:
    if not 0 <= weight < math.inf:
        raise UserError(f"guidance weight (lambda) is {weight}; it must be a finite number >= 0")
    return weight
