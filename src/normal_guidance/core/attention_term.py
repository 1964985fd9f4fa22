"""Terms on attention that are added to a training loss: what all regularizers, Normal Guidance included, share.

A term takes attention in any form, of any model, with one or several heads, and returns lambda times the mean over bags
and heads of its value.  A new one is a subclass of `AttentionTerm` with the method `values`, and a `Regularizer` in a
file of `core.regularizers`.

Everything is computed from log-attention, in float32 or better, also under mixed precision.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from jaxtyping import Float, Shaped
from torch import Tensor, nn

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import Array, as_tensor, is_number
from normal_guidance.core.bells import Padded, Positions
from normal_guidance.core.layout import Layout, Mask, as_mask
from normal_guidance.core.prediction import Features

Values = Float[Tensor, "*shape"]
Lengths = Array | Layout
BagLabels = Shaped[Tensor, "bags"]

LEAST_SUM, MOST_SUM = 0.25, 1.01
"""The sums over the slices beyond which attention is suspected to be logits.  A class token keeps a share for itself,
so sums below one are in order; bfloat16 rounds sums to .008."""

LEAST_LOGIT = -1e4  # logits below it are those that a model hides from its softmax; float16 reaches -65,504


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
        self._looked = False

    def values(self, log_a: Padded, layout: Layout, given: Given) -> Float[Tensor, "bags heads"]:
        """The value of each bag and head, without lambda, from log-attention that is hidden in the padding."""
        raise NotImplementedError

    def forward(
        self,
        attention: Values,
        mask: Array | None = None,
        *,
        lengths: Lengths | None = None,
        from_logits: bool = False,
        labels: Array | None = None,
        positions: Array | None = None,
        features: Features | None = None,
    ) -> Float[Tensor, ""]:
        """The loss, a scalar.

        The first call of a term looks at the values of attention: it warns where they look like logits without
        `from_logits`, the mask inverted, or slices not last, and refuses NaN.  Later calls do not, so a GPU waits once
        at most; compiled code never looks.  Attention, its form and `positions` are as for `normal_reference`, but
        attention must be a tensor, because no gradient flows through an array.

        Args:
            labels: 0 or 1 for each bag; other numbers are refused on the CPU, and make the loss NaN elsewhere if it
                depends on labels.
            features: the embeddings of the slices, in the same form as attention.
        """
        refuse_arrays(attention, ". For the value alone, call per_bag(attention)")
        given = {"labels": labels, "positions": positions, "features": features}
        return self.weight * self.per_bag(attention, mask, lengths=lengths, from_logits=from_logits, **given).mean()

    def per_bag(
        self,
        attention: Array,
        mask: Array | None = None,
        *,
        lengths: Lengths | None = None,
        from_logits: bool = False,
        labels: Array | None = None,
        positions: Array | None = None,
        features: Array | None = None,
    ) -> Float[Tensor, "bags"] | Float[Tensor, "bags heads"]:
        """One value per bag (and head), without lambda; arguments as for `forward`, attention in any form."""
        values = as_tensor(attention, "attention")
        padded, layout = as_padded(values, mask, lengths)
        given = Given(
            None if labels is None else _checked_labels(as_tensor(labels, "labels", values), layout),
            None if positions is None else as_tensor(positions, "positions", values),
            None if features is None else as_tensor(features, "features", values),
        )
        if not (self._looked or torch.compiler.is_compiling()):
            shape = tuple(values.shape) if mask is None and lengths is None else None
            self._looked = check_values(padded, layout, type(self).__name__, from_logits, shape)
        if self.in_order and mask is not None:
            # The real slices of every bag come before its padding.
            order = layout.mask.to(torch.int8).argsort(dim=1, descending=True, stable=True)
            if given.features is not None:
                order_of_rows = order[:, :, None].expand_as(given.features)
                given = given._replace(features=given.features.gather(1, order_of_rows))
            padded = padded.gather(-1, order[:, None].expand_as(padded))
            layout = Layout.padded_unchecked(layout.mask.sum(1), layout.mask.shape[1])
        with full_precision(values):
            log_a = log_attention(padded, layout, from_logits, self.renormalize)
            each = self.values(log_a, layout, given)
        return each.squeeze(1) if is_single_head(values, layout) else each

    def extra_repr(self) -> str:
        return f"weight={self.weight}"


@dataclass(frozen=True)
class Regularizer:
    """One row of the table of regularizers, `core.regularizers.REGULARIZERS`."""

    name: str  # as `--regularizer` takes it, and the name of its file
    title: str
    term: Callable[..., AttentionTerm]  # makes the term of a weight and of the options that it has
    about: str  # what it does to attention, in a sentence
    options: tuple[str, ...] = ()  # fields of `Config` that `term` takes


def refuse_arrays(attention: object, instead: str = "") -> None:
    """Refuse a loss of what is not a tensor."""
    if not isinstance(attention, Tensor):
        raise UserError(
            f"attention: got {type(attention).__name__}; a loss needs the model's tensor, since no gradient flows "
            f"through an array or a list{instead}"
        )


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


def as_padded(
    values: Shaped[Tensor, "*shape"], mask: Array | None, lengths: Lengths | None, name: str = "attention"
) -> tuple[Padded, Layout]:
    """Attention, or what `name` says, in any accepted form as `(bags, heads, longest)`, and its layout."""
    layout = _layout(values, None if mask is None else as_mask(mask, values), lengths, name)
    values = values if values.is_floating_point() else values.to(torch.get_default_dtype())
    padded = layout.fold(values) if layout.is_packed else values
    return (padded[:, None] if is_single_head(values, layout) else padded), layout


def check_values(
    padded: Padded, layout: Layout, name: str, from_logits: bool, unmasked: tuple[int, ...] | None
) -> bool:
    """Warn of attention that looks wrong, refuse NaN; False if values cannot be read, as under `vmap`."""
    with torch.no_grad(), full_precision(padded):
        given = padded.detach().float()
        try:
            doubts = [] if unmasked is None else [_doubt_about_axes(given, unmasked, from_logits)]
            doubts += [] if unmasked is None else [_doubt_about_padding(given, from_logits)]
            doubts += [] if layout.is_packed else [_doubt_about_mask(given, layout, from_logits)]
            real = given.masked_fill(~layout.mask[:, None], 0)
            if real.isnan().any():
                bag, head, place = real.isnan().nonzero()[0].tolist()
                raise UserError(
                    f"attention of bag {bag}, head {head}, position {place} is NaN; look for NaN in the features or in "
                    "the model's output"
                )
            doubts += [_doubt_about_logits(real) if from_logits else _doubt_about_values(real)]
        except RuntimeError:
            return False
    doubt = next(filter(None, doubts), "")
    if doubt:
        warnings.warn(f"{name}: attention {doubt} (said once)", stacklevel=6)
    return True


def _doubt_about_axes(given: Padded, shape: tuple[int, ...], from_logits: bool) -> str:
    """Attention `(B, S, 1)` or `(S, 1)` reads as scans of one slice, which no term changes."""
    if shape[-1] != 1 or shape[-2] == 1:
        return ""
    squeezed = "attention.squeeze(-1)" if len(shape) == 3 else "attention.T"
    if from_logits:
        many = f"of shape {shape} has one slice in every bag; if its second axis holds the slices, pass {squeezed}"
        return many if len(shape) == 3 else ""
    sums = given.sum(1 if len(shape) == 3 else 0)
    # Attention over a single slice is 1, so only slices in the wrong axis add up to 1 there.
    if not ((sums - 1).abs() <= MOST_SUM - 1).all().item():
        return ""
    axis = "second" if len(shape) == 3 else "first"
    return f"of shape {shape} adds up to 1 over its {axis} axis; if that axis holds the slices, pass {squeezed}"


def _doubt_about_padding(given: Padded, from_logits: bool) -> str:
    """Bags whose last slices are hidden from the softmax, beside bags without such slices, look padded."""
    hidden = (given < LEAST_LOGIT) if from_logits else (given == 0)
    at_end = hidden.all(1).flip(-1).int().cumprod(-1).sum(-1)  # how many of a bag's last slices no head attends to
    if not ((at_end == 0).any() & (at_end > 0).any()).item():
        return ""
    bag = int(at_end.argmax())
    return (
        f"of bag {bag} is hidden on its last {int(at_end[bag])} slices; if they are padding, pass the mask, which is "
        "True for real slices"
    )


def _doubt_about_mask(given: Padded, layout: Layout, from_logits: bool) -> str:
    real = layout.mask[:, None]
    if from_logits:
        inside, outside = (given.masked_fill(hidden, -torch.inf).amax(-1) for hidden in (~real, real))
        swapped = (inside < LEAST_LOGIT) & (outside > LEAST_LOGIT)
    else:
        inside, outside = (given.masked_fill(hidden, 0).abs().sum(-1) for hidden in (~real, real))
        swapped = (inside < MOST_SUM - 1) & (outside > LEAST_SUM)
    if not swapped.any().item():
        return ""
    bag = swapped.any(-1).nonzero()[0].item()
    return (
        f"of bag {bag} lies outside its mask, on slices marked False; is the mask inverted? True marks real slices: "
        "write ~mask"
    )


def _doubt_about_values(real: Padded) -> str:
    sums = real.sum(-1)
    least, fewest, most = torch.stack([real.amin(), sums.amin(), sums.amax()]).tolist()
    if least >= 0 and fewest >= LEAST_SUM and most <= MOST_SUM:
        return ""
    total = fewest if fewest < LEAST_SUM else most
    what = f"has values down to {least:.3g}" if least < 0 else f"adds up to {total:.3g} over the slices of a bag"
    return (
        f"{what}, so it does not look like probabilities; for logits or log-attention, pass from_logits=True; if it is "
        "attention after dropout, switch that dropout off"
    )


def _doubt_about_logits(real: Padded) -> str:
    if real.shape[-1] == 1 or real.amin().item() < 0 or ((real.sum(-1) - 1).abs() > MOST_SUM - 1).any().item():
        return ""
    return "adds up to 1 over the slices of each bag, so it looks like probabilities; leave from_logits out"


def _checked_labels(labels: Shaped[Tensor, "..."], layout: Layout) -> BagLabels:
    if tuple(labels.shape) != (layout.bags,):
        raise UserError(f"labels of shape {tuple(labels.shape)} for {layout.bags} bags; give one for each bag")
    # Reading values would make a GPU wait and cannot be compiled, so only the CPU checks them.
    if labels.device.type == "cpu" and not torch.compiler.is_compiling():
        wrong = (labels != 0) & (labels != 1)
        if wrong.any():
            bag = int(wrong.nonzero()[0])
            raise UserError(f"labels: bag {bag} has {labels[bag].item()}; labels are 0 or 1")
    return labels


def _layout(values: Shaped[Tensor, "*shape"], mask: Mask | None, lengths: Lengths | None, name: str) -> Layout:
    shape = tuple(values.shape)
    if lengths is not None:
        layout = lengths if isinstance(lengths, Layout) else Layout.packed(as_tensor(lengths, "lengths", values))
        slices = layout.mask.numel() if layout.sizes is None else sum(layout.sizes)
        fits = values.ndim in (1, 2) and shape[-1] == slices if layout.is_packed else _fits(shape, layout.mask)
        if mask is not None:
            raise UserError(f"{name} has a mask and lengths; give the mask for padded values, lengths for packed ones")
        if not fits:
            packed = "(slices,) or (heads, slices)" if name == "attention" else "(slices,)"
            form = packed if layout.is_packed else f"the layout's {tuple(layout.mask.shape)}"
            raise UserError(
                f"{name} of shape {shape} with lengths adding up to {slices}; give packed {name} {form}, or a mask for "
                f"padded {name}"
            )
        return layout
    if mask is None and values.ndim in (2, 3):
        mask = torch.ones(shape[0], shape[-1], dtype=torch.bool, device=values.device)
    if mask is None or 0 in shape or not _fits(shape, mask):
        raise UserError(
            f"{name} of shape {shape} and mask of shape {None if mask is None else tuple(mask.shape)}; give (B, S) or "
            f"(B, H, S) with a mask (B, S), slices last, or packed {name} with lengths="
        )
    # Reading values would make a GPU wait and cannot be compiled, so only the CPU checks them; elsewhere a bag without
    # a real slice adds 0 to the mean.
    if mask.device.type == "cpu" and not torch.compiler.is_compiling() and not mask.any(1).all():
        empty = (~mask.any(1)).nonzero().flatten().tolist()
        raise UserError(
            f"mask: bags {empty} have no real slice; leave empty bags out, or write ~mask if True marks padding in it"
        )
    # Slice numbers count real slices only, so the padding may be anywhere.
    return Layout(mask.sum(1), mask)


def _fits(shape: tuple[int, ...], mask: Mask) -> bool:
    return len(shape) in (2, 3) and (shape[0], shape[-1]) == tuple(mask.shape)


def is_single_head(values: Shaped[Tensor, "*shape"], layout: Layout) -> bool:
    return values.ndim == (1 if layout.is_packed else 2)


def full_precision(values: Tensor) -> torch.autocast:
    """Switch autocast off: terms are always float32 or better."""
    return torch.autocast(device_type=values.device.type, enabled=False)


def checked_weight(weight: float) -> float:
    if not is_number(weight) or not 0 <= weight < math.inf:
        raise UserError(f"guidance weight (lambda) is {weight!r}; it must be a finite number >= 0")
    return weight if isinstance(weight, int) else float(weight)
