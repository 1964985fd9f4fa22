"""Predictions of a model on scans whose slices are all shown, reordered, or partly removed."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor, nn

from normal_guidance.core.packed import bag_of_rows, sum_per_bag
from normal_guidance.errors import UserError
from normal_guidance.training.batches import Scans, in_batches

Model = Callable[[Tensor, Tensor], Any]
"""Takes packed features (slices, features) and lengths (scans,), and returns logits (scans,) and attention (slices,).

Every model of this package does.  It may return a `Prediction`, any object with `logit` and `attention`, or the pair;
attention of several heads, (heads, slices), is averaged.
"""

BATCH = 64
"""Scans that go through the model together."""


class ScanPredictions(NamedTuple):
    """A model's predictions for all scans.

    Attributes:
        logit: one number per scan; NaN from a model without a scan score.
        scores: numbers that rank a scan's slices: log-attention where the model gives it, or else attention.
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
        """The slices of a mask, in their own order."""
        return cls(keep.nonzero().squeeze(1), sum_per_bag(keep, lengths))


def predict_scans(
    model: Model, scans: Scans, shown: SliceSelection | None = None, *, batch_size: int = BATCH
) -> ScanPredictions:
    """The model's predictions for every scan, without gradients, on its device and in its dtype.

    `shown` names the slices that the model sees of each scan and their order; without it, the model sees whole scans.
    """
    lengths = scans.lengths.cpu()
    if shown is None:
        shown = SliceSelection(torch.arange(int(lengths.sum())), lengths)
    starts, shown_starts = _starts(lengths), _starts(shown.lengths)
    parts = []
    with _evaluating(model), torch.no_grad():
        for batch in in_batches(lengths, batch_size):
            first, behind = int(batch[0]), int(batch[-1]) + 1
            local = shown.slices[shown_starts[first] : shown_starts[behind]] - starts[first]
            rows = scans.rows(batch)
            parts.append(_predict_batch(model, rows[local.to(rows.device)], shown.lengths[batch]))
    return ScanPredictions(*(torch.cat(fields) for fields in zip(*parts, strict=True)))


def _starts(lengths: Int[Tensor, "scans"]) -> list[int]:
    """The first slice of every scan, and the number of all slices."""
    return [0, *lengths.cumsum(0).tolist()]


@contextmanager
def _evaluating(model: Model) -> Iterator[None]:
    """Switches dropout and the like off inside the block: they would be taken for an effect of the change."""
    training = isinstance(model, nn.Module) and model.training
    if isinstance(model, nn.Module):
        model.eval()
    try:
        yield
    finally:
        if isinstance(model, nn.Module):
            model.train(training)


def _predict_batch(
    model: Model, rows: Float[Tensor, "slices features"], lengths: Int[Tensor, "scans"]
) -> ScanPredictions:
    if isinstance(model, nn.Module):
        rows = rows.to(next(model.parameters(), rows))
    return _checked(model(rows, lengths.to(rows.device)), lengths, len(rows))


def _checked(output: Any, lengths: Int[Tensor, "scans"], slices: int) -> ScanPredictions:
    """A model's output as predictions on the CPU; an output of another kind, shape or range is an error."""
    if hasattr(output, "logit") and hasattr(output, "attention"):
        logit, attention = output.logit, output.attention
    elif isinstance(output, tuple | list) and len(output) == 2:
        logit, attention = output
    else:
        raise UserError(
            f"the model returned {type(output).__name__}; wrap it in a function that returns (logit, attention), one "
            "logit per scan and one number per slice"
        )
    logit, attention = torch.as_tensor(logit).cpu().double().flatten(), torch.as_tensor(attention).cpu().double()
    if attention.ndim == 2:
        attention = attention.mean(0)
    if logit.shape != lengths.shape or attention.shape != (slices,):
        raise UserError(
            f"the model returned {len(logit)} logits and attention of shape {tuple(attention.shape)} for "
            f"{len(lengths)} scans with {slices} slices; return one logit per scan and one number per slice, packed "
            "without padding (normal_guidance.pack)"
        )
    if not (attention.isfinite() & (attention >= 0)).all():
        raise UserError(
            "the model's attention is negative or not finite; return attention, not its logarithm or logits"
        )
    total = sum_per_bag(attention, lengths)
    if (total <= 0).any():
        raise UserError(
            "the model's attention is 0 on all slices of a scan; return attention above 0 on at least one slice"
        )
    scores = output.slice_scores.cpu().double() if hasattr(output, "slice_scores") else attention
    return ScanPredictions(logit, scores, attention / total[bag_of_rows(lengths)])
