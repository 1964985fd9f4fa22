"""What a model says about scans whose slices were left as they are, put into another order, or partly taken away."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor, nn

from normal_guidance.core.packed import bag_of_rows
from normal_guidance.errors import UserError
from normal_guidance.training.batches import Scans

Model = Callable[[Tensor, Tensor], Any]
"""Packed features (slices, features) and lengths (scans,) in; logits (scans,) and attention (slices,) out.

Every model of this package is one.  What comes back may be a `Prediction`, any object with `logit` and `attention`, or
the pair; attention of several heads, (heads, slices), is averaged.
"""

BATCH = 64
"""Scans that the model is given at a time."""


class Answer(NamedTuple):
    """What a model said about all scans.

    Attributes:
        logit: one number a scan; NaN from a model that has none.
        scores: what ranks a scan's slices: attention, or its logarithm where the model gives it.
        attention: shares, which add up to 1 in every scan.
    """

    logit: Float64[Tensor, "scans"]
    scores: Float64[Tensor, "slices"]
    attention: Float64[Tensor, "slices"]

    @property
    def scores_scans(self) -> bool:
        return not bool(self.logit.isnan().any())


class SliceSelection(NamedTuple):
    """Slices to show, by their numbers among all slices of all scans: scan after scan, in the order to show them."""

    slices: Int64[Tensor, "chosen"]
    lengths: Int64[Tensor, "scans"]

    @classmethod
    def where(cls, keep: Bool[Tensor, "slices"], lengths: Int[Tensor, "scans"]) -> SliceSelection:
        """The slices of a mask, in their own order.

        Example:
            >>> SliceSelection.where(torch.tensor([True, False, True]), torch.tensor([2, 1]))
            SliceSelection(slices=tensor([0, 2]), lengths=tensor([1, 1]))
        """
        counts = torch.zeros_like(lengths).index_add(0, bag_of_rows(lengths), keep.to(lengths.dtype))
        return cls(keep.nonzero().squeeze(1), counts)


def ask(model: Model, scans: Scans, chosen: SliceSelection | None = None, *, batch_size: int = BATCH) -> Answer:
    """The model's answer for every scan, without gradients, on its device and in its dtype.

    Example:
        >>> from normal_guidance.core.models import build_model
        >>> from normal_guidance.simulate.semi_synthetic import shifted_mean
        >>> ask(build_model("abmil", 8), shifted_mean(5, seed=1, features=8)).logit.shape
        torch.Size([5])
    """
    lengths = scans.lengths.cpu()
    if chosen is None:
        chosen = SliceSelection(torch.arange(int(lengths.sum())), lengths)
    starts, shown = _bounds(lengths), _bounds(chosen.lengths)
    parts = []
    with _evaluating(model), torch.no_grad():
        for batch in torch.arange(len(lengths)).split(batch_size):
            first, behind = int(batch[0]), int(batch[-1]) + 1
            local = chosen.slices[shown[first] : shown[behind]] - starts[first]
            rows = scans.rows(batch)
            parts.append(_ask_once(model, rows[local.to(rows.device)], chosen.lengths[batch]))
    return Answer(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def _bounds(lengths: Int[Tensor, "scans"]) -> list[int]:
    return [0, *lengths.cumsum(0).tolist()]


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    """Dropout and the like are switched off meanwhile: they would be taken for an effect."""
    training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    try:
        yield
    finally:
        if isinstance(model, nn.Module):
            model.train(training)


def _ask_once(model: Model, rows: Float[Tensor, "slices features"], lengths: Int[Tensor, "scans"]) -> Answer:
    if isinstance(model, nn.Module):
        rows = rows.to(next(model.parameters(), rows))
    return _read(model(rows, lengths.to(rows.device)), lengths, len(rows))


def _read(said: Any, lengths: Int[Tensor, "scans"], slices: int) -> Answer:
    """Checked, on the host."""
    if hasattr(said, "logit") and hasattr(said, "attention"):
        logit, attention = said.logit, said.attention
    elif isinstance(said, tuple | list) and len(said) == 2:
        logit, attention = said
    else:
        raise UserError(
            f"the model returned {type(said).__name__}; wrap it in a function that returns (logit, attention), one "
            "logit a scan and one number a slice"
        )
    logit, attention = torch.as_tensor(logit).cpu().double().flatten(), torch.as_tensor(attention).cpu().double()
    if attention.ndim == 2:
        attention = attention.mean(0)
    if logit.shape != lengths.shape or attention.shape != (slices,):
        raise UserError(
            f"the model returned {len(logit)} logits and attention of shape {tuple(attention.shape)} for "
            f"{len(lengths)} scans with {slices} slices; give one logit a scan and one number a slice, packed without "
            "padding (normal_guidance.pack)"
        )
    if not (attention.isfinite() & (attention >= 0)).all():
        raise UserError("the model's attention is negative or not finite; give attention, not its logarithm or logits")
    scan = bag_of_rows(lengths)
    total = torch.zeros(len(lengths), dtype=torch.float64).index_add(0, scan, attention)
    if (total <= 0).any():
        raise UserError("the model's attention is 0 on all slices of a scan; give attention that is not")
    scores = said.slice_scores.cpu().double() if hasattr(said, "slice_scores") else attention
    return Answer(logit, scores, attention / total[scan])
