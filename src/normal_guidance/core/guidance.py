"""Normal Guidance: a loss that pulls attention along the slices of a scan toward the shape of a bell.

    L = (1/N) sum_i  BCE(y_i, yhat_i) + lambda D(r_i, a_i)                                     (paper, eq. 1)

For bag i with attention a_i over its slices j = 1..S_i, the reference r_i is the normal distribution with the mean
and variance of a_i itself, so guidance fixes the shape of attention and leaves its place open (eqs. 2 and 3).
Beyond the paper, r_i may depend on the bag's label, have several modes, and be fitted to given positions; the
defaults are the paper's.

Everything is computed from log-attention (`core.attention_term`).  The variance is centred
(E[J^2] - E[J]^2 in float32 gives .375 for .455 at 1,083 slices), r is in log space (the plain density underflows on
long scans), and D comes from log-softmax (clamped probabilities lose the gradient of three quarters of the slices at
S = 1,000 with logits of sd 5).

Reference: Harvey, Loevlie, Hughes, "Normal Guidance is what Attention Needs", 2026.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Literal

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from normal_guidance.base.errors import UserError, choose_one_of
from normal_guidance.core.arrays import Array, as_tensor, checked_whole, is_number
from normal_guidance.core.attention_term import (
    AttentionTerm,
    BagLabels,
    Given,
    Lengths,
    Values,
    as_padded,
    check_values,
    checked_weight,
    full_precision,
    is_single_head,
    log_attention,
    log_probability,
    refuse_arrays,
)
from normal_guidance.core.bells import Padded, Positions, fold_positions, log_mixture, log_normal
from normal_guidance.core.layout import Layout

DivergenceName = Literal["forward_kl", "reverse_kl", "squared_error"]

NegativesName = Literal["own", "uniform", "none"]


DIVERGENCES: dict[DivergenceName, Callable[[Tensor, Tensor], Tensor]] = {
    "forward_kl": lambda log_r, log_a: log_r.exp() * (log_r - log_a),
    "reverse_kl": lambda log_r, log_a: log_a.exp() * (log_a - log_r),
    "squared_error": lambda log_r, log_a: (log_r.exp() - log_a.exp()).square(),
}
"""The terms of D(r, a), as functions of (log r, log a); D is their sum over slices.

Forward KL (the paper's default) covers the modes of r, reverse KL seeks one, squared error seeks the mean.  The same
lambda acts differently with each: for uniform attention forward KL is .079 at any length, squared error .0037 at
40 slices and 8e-5 at 1,727."""

DIVERGENCE_TITLES: dict[DivergenceName, str] = {
    "forward_kl": "Forward KL",
    "reverse_kl": "Reverse KL",
    "squared_error": "Squared error",
}

NEGATIVES: dict[NegativesName, str] = {
    "own": "the normal of the bag's own attention, as in positive bags (the paper)",
    "uniform": "the uniform distribution: nothing to be found, nowhere to look",
    "none": "no guidance of negative bags",
}
"""The reference distributions for negative bags."""


def normal_reference(
    attention: Array,
    mask: Array | None = None,
    *,
    lengths: Lengths | None = None,
    from_logits: bool = False,
    positions: Array | None = None,
    modes: int = 1,
) -> Values:
    r"""The normal distribution with the mean and variance of the attended position, renormalised over the slices.

    $$ r_{ij} = \mathrm{softmax}_j\Big(-\frac{(j - \mathrm{E}[J])^2}{2\,\mathrm{Var}[J]}\Big),
       \quad \mathrm{E}[J] = \sum_j j\,a_{ij} $$

    No gradient flows through it.

    Args:
        attention: `(B, S)` or `(B, H, S)`, or packed `(N,)` or `(H, N)` with `lengths`.  Slices come last.  It may be
            a tensor, an array or a list, and so may the others.
        mask: True for real slices; without it all are real.  The result is 0 where it is False.
        lengths: slices per bag, for packed attention; or the bags' `Layout`, made once and used again.
        from_logits: `attention` holds logits before the softmax (or log-attention), more exact than probabilities.
        positions: places of the slices instead of their numbers: `(B, S)`, or packed `(N,)`.  With a last dimension of
            coordinates, such as `(B, S, 2)` for patches of an image, r is the normal in that many dimensions with
            attention's mean and covariance.  The unit does not matter, and evenly spaced slices give the same r as
            their numbers.
        modes: k, for a mixture of k normals of one width, fitted to attention by expectation maximisation.

    Example:
        >>> normal_reference(torch.tensor([[0.0, 0.5, 0.5, 0.0]])).round(decimals=3)
        tensor([[0.0090, 0.4910, 0.4910, 0.0090]])
        >>> normal_reference(torch.tensor([[0.1, 0.4, 0.0, 0.0, 0.4, 0.1]]), modes=2).round(decimals=2)
        tensor([[0.0700, 0.4300, 0.0100, 0.0100, 0.4300, 0.0700]])
    """
    values = as_tensor(attention, "attention")
    padded, layout = as_padded(values, mask, lengths)
    places = None if positions is None else as_tensor(positions, "positions", values)
    with torch.no_grad(), full_precision(values):
        log_a = log_attention(padded, layout, from_logits, renormalize=True)
        reference = _log_reference(log_a, layout, places, checked_whole("modes", modes)).exp()
    return layout.restore(reference.squeeze(1) if is_single_head(values, layout) else reference)


def divergence(
    reference: Array,
    attention: Array,
    kind: DivergenceName = "forward_kl",
    mask: Array | None = None,
    *,
    lengths: Lengths | None = None,
    from_logits: bool = False,
) -> Float[Tensor, "bags"] | Float[Tensor, "bags heads"]:
    r"""D(r, a), one value per bag and head: the caller reduces.

    Forward KL $\sum_j r_j \log(r_j/a_j)$, reverse KL $\sum_j a_j \log(a_j/r_j)$, squared error $\sum_j (r_j-a_j)^2$.
    Any reference can be given; gradients flow through both arguments.  Shapes are those of `normal_reference`.
    Attention is not renormalised (logits pass through the softmax).  Probabilities below the smallest normal number of
    their dtype count as that number; `NormalGuidance` keeps r in log space and is exact there.

    Example:
        >>> uniform = torch.full((1, 40), 1 / 40)
        >>> divergence(normal_reference(uniform), uniform, "forward_kl").round(decimals=3)
        tensor([0.0790])
    """
    choose_one_of("divergence", kind, DIVERGENCES)
    given = as_tensor(attention, "attention")
    wanted = as_tensor(reference, "reference", given)
    if wanted.shape != given.shape:
        raise UserError(
            f"reference of shape {tuple(wanted.shape)} and attention of shape {tuple(given.shape)} differ; give a "
            "reference for each head and bag: normal_reference(attention) has its shape"
        )
    padded, layout = as_padded(given, mask, lengths)
    with full_precision(given):
        log_a = log_attention(padded, layout, from_logits, renormalize=from_logits)
        log_r = layout.hide(log_probability(as_padded(wanted, mask, lengths)[0]))
        values = _divergence(log_r, log_a, kind)
    return values.squeeze(1) if is_single_head(given, layout) else values


class NormalGuidance(AttentionTerm):
    r"""The term $\lambda \cdot \mathrm{mean}_i\,\mathrm{mean}_h\,D(r_{ih}, a_{ih})$ to add to any training loss.

    Args:
        weight: lambda.  It is not comparable across divergences or scan lengths (see `DIVERGENCES`).
        divergence: a name in `DIVERGENCES`.
        renormalize: divide attention by its sum over the slices before comparing it with r (the paper's text).
            False compares it unchanged, as the authors' runs do.  It matters only where attention over the slices does
            not sum to one, as in a class token's row without its own entry; False then also penalises attention of the
            class token to itself.  With `from_logits`, False takes the values as finished log-attention.
        modes: the number of bells in r (see `normal_reference`).
        negatives: the reference of negative bags, a name in `NEGATIVES`; all but "own" need `labels` in every call.
            The mean is over all bags, so "none" counts negative ones as 0.
        least_width: the least standard deviation of r, in slices.  Without it, attention on one slice is its own
            reference and is not penalised.  In more than one dimension its square is added to the variance.

    Example:
        >>> attention = torch.tensor([[0.1, 0.1, 0.6, 0.2]], requires_grad=True)
        >>> loss = NormalGuidance(weight=1.0)(attention)
        >>> loss.backward()
        >>> round(loss.item(), 4)
        0.1397
    """

    def __init__(
        self,
        weight: float = 1.0,
        divergence: DivergenceName = "forward_kl",
        *,
        renormalize: bool = True,
        modes: int = 1,
        negatives: NegativesName = "own",
        least_width: float = 0.0,
    ) -> None:
        super().__init__(weight)
        choose_one_of("divergence", divergence, DIVERGENCES)
        choose_one_of("negatives", negatives, NEGATIVES)
        if not is_number(least_width) or not 0 <= least_width < math.inf:
            raise UserError(f"least_width is {least_width!r}; give a standard deviation in slices, 0 or more")
        self.divergence, self.renormalize, self.negatives = divergence, renormalize, negatives
        self.modes, self.least_width = checked_whole("modes", modes), float(least_width)

    def values(self, log_a: Padded, layout: Layout, given: Given) -> Float[Tensor, "bags heads"]:
        whole = log_a if self.renormalize else layout.log_softmax(log_a)
        log_r = _log_reference(whole, layout, given.positions, self.modes, self.least_width)
        if self.negatives == "uniform":
            negative = self._negative(given.labels)
            log_r = torch.where(negative[:, None, None], layout.log_softmax(torch.zeros_like(log_r)), log_r)
        values = _divergence(log_r, log_a, self.divergence)
        if self.negatives == "none":
            values = values.masked_fill(self._negative(given.labels)[:, None], 0)
        if self.negatives != "own" and given.labels is not None and given.labels.device.type != "cpu":
            # The CPU has refused other labels; elsewhere the check would wait for the device.
            wrong = (given.labels != 0) & (given.labels != 1)
            values = values.masked_fill(wrong[:, None], torch.nan)
        return values

    def _negative(self, labels: BagLabels | None) -> Bool[Tensor, "bags"]:
        if labels is None:
            raise UserError(
                f"NormalGuidance(negatives={self.negatives!r}) needs to know which bags are negative; pass labels=, "
                "0 or 1 for each bag"
            )
        return labels == 0

    def extra_repr(self) -> str:
        parts = [f"weight={self.weight}", f"divergence={self.divergence!r}", f"renormalize={self.renormalize}"]
        parts += [f"modes={self.modes}"] if self.modes > 1 else []
        parts += [f"negatives={self.negatives!r}"] if self.negatives != "own" else []
        parts += [f"least_width={self.least_width}"] if self.least_width else []
        return ", ".join(parts)


def label_reference(
    slice_labels: Array, mask: Array | None = None, *, lengths: Lengths | None = None
) -> Float[Tensor, "bags longest"] | Float[Tensor, "slices"]:
    """The reference of slice labels: uniform over the positive slices, or over all slices of a negative bag (App. F).

    Args:
        slice_labels: 0 or 1, `(B, S)`, or packed `(N,)` with `lengths`, as a tensor, an array or a list.
        mask: True for real slices; without it all are real.
        lengths: slices per bag, for packed labels.

    Example:
        >>> label_reference(torch.tensor([[0, 1, 1, 0], [0, 0, 0, 0]]))
        tensor([[0.0000, 0.5000, 0.5000, 0.0000],
                [0.2500, 0.2500, 0.2500, 0.2500]])
    """
    values = as_tensor(slice_labels, "slice_labels").to(torch.get_default_dtype())
    padded, layout = as_padded(values, mask, lengths, "slice_labels")
    if not is_single_head(values, layout):
        raise UserError(
            f"slice_labels of shape {tuple(values.shape)}; give (B, S), or packed (N,) with lengths; labels have no "
            "heads"
        )
    labels = padded.squeeze(1)
    wrong = ((labels != 0) & (labels != 1) & layout.mask).any(1)
    if wrong.any():
        raise UserError(
            f"slice labels of bags {wrong.nonzero().flatten().tolist()} are not all 0 or 1; leave unlabelled scans out"
        )
    positive = (labels == 1) & layout.mask
    chosen = torch.where(positive.any(1, keepdim=True), positive, layout.mask).to(padded.dtype)
    reference = chosen / chosen.sum(1, keepdim=True)
    return layout.restore(reference)


class LabelGuidance(nn.Module):
    """Guidance toward the true slices.  It USES SLICE LABELS in training, so it is not weakly supervised.

    It requires `uses_slice_labels=True`, is not in the table of methods, and no command-line flag turns it on.
    Reverse KL is refused: it is infinite wherever the reference is zero.

    Example:
        >>> guidance = LabelGuidance(uses_slice_labels=True)
        >>> guidance(torch.tensor([[0.25, 0.25, 0.25, 0.25]]), torch.tensor([[0, 1, 1, 0]])).round(decimals=4)
        tensor(0.6931)
    """

    def __init__(
        self,
        weight: float = 1.0,
        divergence: DivergenceName = "forward_kl",
        *,
        renormalize: bool = True,
        uses_slice_labels: bool = False,
    ) -> None:
        super().__init__()
        if not uses_slice_labels:
            raise UserError(
                "LabelGuidance trains on slice labels, which breaks weak supervision: results are not comparable with "
                "the other methods. If that is what you want, write LabelGuidance(..., uses_slice_labels=True); "
                "NormalGuidance needs no slice labels"
            )
        if divergence == "reverse_kl":
            raise UserError("LabelGuidance: reverse_kl is infinite where the reference is 0; use forward_kl")
        self.weight = checked_weight(weight)
        choose_one_of("divergence", divergence, DIVERGENCES)
        self.divergence, self.renormalize = divergence, renormalize
        self._looked = False

    def forward(
        self,
        attention: Values,
        slice_labels: Array,
        mask: Array | None = None,
        *,
        lengths: Lengths | None = None,
        from_logits: bool = False,
    ) -> Float[Tensor, ""]:
        """The loss, a scalar; `slice_labels` are `(B, S)`, or packed `(N,)` with `lengths`.

        The first call looks at attention as `NormalGuidance` does.
        """
        refuse_arrays(attention)
        padded, layout = as_padded(attention, mask, lengths)
        slices = tuple(layout.mask.shape) if lengths is None else tuple(attention.shape[-1:])
        labels = as_tensor(slice_labels, "slice_labels", attention)
        if tuple(labels.shape) != slices:
            raise UserError(
                f"slice_labels of shape {tuple(labels.shape)} for attention of shape {tuple(attention.shape)}; give "
                f"{slices}, one for each slice"
            )
        if not (self._looked or torch.compiler.is_compiling()):
            self._looked = check_values(padded, layout, "LabelGuidance", from_logits, unmasked=None)
        reference, _ = as_padded(label_reference(labels, mask, lengths=lengths), mask, lengths)
        with full_precision(attention):
            log_a = log_attention(padded, layout, from_logits, self.renormalize)
            values = _divergence(layout.hide(log_probability(reference)).expand_as(log_a), log_a, self.divergence)
        return self.weight * values.mean()


def _log_reference(
    log_a: Padded, layout: Layout, positions: Positions | None, modes: int, least_width: float = 0.0
) -> Padded:
    """log r from log-attention that sums to one over the slices; a constant to the gradient."""
    if positions is None and modes == 1:
        return log_normal(log_a, layout, least_width)
    # A GPU's mask is not read, which would wait for it.
    hidden = torch.compiler.is_compiling() or (layout.sizes is None and layout.lengths.device.type != "cpu")
    sizes = () if modes == 1 or hidden else layout.sizes or layout.lengths.tolist()
    short = next((bag for bag, size in enumerate(sizes) if size < modes), None)
    if short is not None:
        raise UserError(
            f"modes is {modes}, but bag {short} has {sizes[short]} slices; use fewer modes or leave such short bags out"
        )
    points = None if positions is None else fold_positions(positions, layout)
    return log_mixture(log_a, layout, points, modes, least_width)


def _divergence(log_r: Padded, log_a: Padded, kind: DivergenceName) -> Float[Tensor, "bags heads"]:
    """The sum of the terms over slices; both arguments are hidden in the padding, so its terms are 0."""
    return DIVERGENCES[kind](log_r, log_a).sum(-1)
