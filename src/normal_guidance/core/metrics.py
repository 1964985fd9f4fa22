"""Ranking metrics for many configurations at once: AUROC and AUPRC per scan and, within a scan, per slice.

One sort per row serves both metrics. In ascending order, the running count at the first entry of each group of equal
scores is the number of positives or negatives strictly below every entry of the group. The counts are integers, so ties
count exactly one half, and infinities rank like any other score.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from jaxtyping import Bool, Float, Float64, Int, Int64
from torch import Tensor

from normal_guidance.base.errors import UserError, choose_one_of
from normal_guidance.core.arrays import Array, as_tensor
from normal_guidance.core.blocks import count_slices

MAX_PADDING = 1 / 8  # the largest share of padding in a row, when bags of similar length are padded together

MAX_CELLS = 2**22
"""The most scores ranked at a time, at about 80 bytes each, to limit memory; a single bag is always ranked whole."""

SdKind = Literal["population", "sample"]

PUBLISHED_SD: dict[str, SdKind] = {"localization": "population", "scan": "sample"}
"""The kind of standard deviation that the paper prints for each metric."""


def auroc(scores: Array, labels: Array, mask: Array | None = None) -> Float64[Tensor, "*configs"]:
    r"""Area under the ROC curve of every row; ties count one half.

    $\mathrm{AUROC} = \frac{1}{PN} \sum_{p,n} [s_p > s_n] + \tfrac12 [s_p = s_n]$

    Args:
        scores: `(..., n)`, one row for each configuration, as a tensor, an array or a list; the same for the others.
        labels: 0 or 1, broadcast to the scores. Another label is refused on the CPU; on a GPU it makes its row NaN, so
            that nothing waits for the device.
        mask: True where a score counts, broadcast to the scores.

    A row with one class only or with a NaN score is NaN.

    >>> auroc(torch.tensor([[0.1, 0.4, 0.4, 0.9], [0.9, 0.4, 0.4, 0.1]]), torch.tensor([0, 0, 1, 1]))
    tensor([0.8750, 0.1250], dtype=torch.float64)
    """
    return _auroc(_rank(*_prepare(scores, labels, mask)))


def auprc(scores: Array, labels: Array, mask: Array | None = None) -> Float64[Tensor, "*configs"]:
    r"""Average precision of every row; equal scores share one threshold.

    $\mathrm{AUPRC} = \frac1P \sum_p \#\{\text{positives} \ge s_p\} \,/\, \#\{\text{all} \ge s_p\}$

    Arguments as for `auroc`. A row without positives or with a NaN score is NaN.

    >>> auprc(torch.tensor([0.1, 0.4, 0.35, 0.8]), torch.tensor([0, 0, 1, 1]))
    tensor(0.8333, dtype=torch.float64)
    """
    return _auprc(_rank(*_prepare(scores, labels, mask)))


@dataclass(frozen=True)
class ScanLevel:
    """AUROC and AUPRC over scans, one value per configuration.

    >>> result = scan_level(torch.tensor([[0.2, 0.9], [0.9, 0.2]]), torch.tensor([0, 1]))
    >>> result.auprc
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """

    auroc: Float64[Tensor, "*configs"]
    auprc: Float64[Tensor, "*configs"]


def scan_level(logits: Array, labels: Array) -> ScanLevel:
    """AUROC and AUPRC of scan logits against scan labels, from one sort.

    Args:
        logits: `(..., bags)`, one row for each configuration; probabilities rank alike.
        labels: 0 or 1 for each bag.

    >>> scan_level(torch.tensor([[-1.0, 0.5, 2.0], [0.0, 1.0, -1.0]]), torch.tensor([0, 1, 1])).auroc
    tensor([1.0000, 0.5000], dtype=torch.float64)
    """
    ranking = _rank(*_prepare(logits, labels, None, "logits"))
    return ScanLevel(auroc=_auroc(ranking), auprc=_auprc(ranking))


@dataclass(frozen=True)
class Localization:
    """AUROC and AUPRC of the slices within each bag, and the numbers of bags left out, by reason.

    `kept` holds the indices of the bags with slices of both classes, in the order of the last dimension.

    >>> labels = torch.tensor([0, 1, 1, 0, -1])
    >>> result = localization(torch.tensor([0.1, 0.9, 0.1, 0.9, 0.5]), labels, torch.tensor([2, 2, 1]))
    >>> result.mean_auroc.item(), result.kept.tolist(), result.unlabelled
    (0.5, [0, 1], 1)
    """

    auroc: Float64[Tensor, "*configs kept"]
    auprc: Float64[Tensor, "*configs kept"]
    kept: Int64[Tensor, "kept"]
    unlabelled: int
    all_negative: int
    all_positive: int

    @property
    def mean_auroc(self) -> Float64[Tensor, "*configs"]:
        """Plain mean over the kept bags."""
        return self.auroc.mean(-1)

    @property
    def mean_auprc(self) -> Float64[Tensor, "*configs"]:
        """Plain mean over the kept bags."""
        return self.auprc.mean(-1)


def localization(scores: Array, slice_labels: Array, lengths: Array | None = None) -> Localization:
    """AUROC and AUPRC of the slices within each packed bag that has slices of both classes.

    Args:
        scores: `(..., slices)`, attention or its logarithm, one row for each configuration.
        slice_labels: 1, 0 or, for all slices of a bag at once, -1 (unknown).
        lengths: slices of each bag, which must be given. Negative bags may be passed too: they are left out, and
            `all_negative` counts them.

    >>> scores = torch.tensor([0.1, 0.7, 0.2, 0.6, 0.4])
    >>> result = localization(scores, torch.tensor([0, 1, 0, 0, 0]), torch.tensor([3, 2]))
    >>> result.auroc, result.kept, result.all_negative
    (tensor([1.], dtype=torch.float64), tensor([0]), 1)
    """
    if lengths is None:
        raise UserError(
            "lengths: none are given; they are the slices of each bag, such as [40, 35], and scores and slice_labels "
            "hold the slices of all bags one after the other. For lists with one tensor a bag, write "
            "localization(torch.cat(scores), torch.cat(slice_labels), [len(one) for one in scores])"
        )
    scores = as_tensor(scores, "scores")
    labels, counted = as_tensor(slice_labels, "slice_labels", scores), as_tensor(lengths, "lengths", scores)
    if not labels.ndim or scores.shape[-1:] != labels.shape:
        raise UserError(
            f"scores of shape {tuple(scores.shape)} do not fit slice_labels of shape "
            f"{tuple(labels.shape)}: both need one entry per slice of all bags"
        )
    if counted.numel() and (counted.is_floating_point() or counted.dtype == torch.bool):
        raise UserError(f"lengths: {counted.dtype}; give whole numbers, the slices of each bag")
    labels, counted = labels.to(scores.device), counted.to(scores.device, torch.int64)
    counts, positive = count_slices(labels, counted), labels == 1
    kept = counts.mixed.nonzero().squeeze(1)
    starts, sizes = (counted.cumsum(0) - counted)[kept], counted[kept]
    rocs = scores.new_empty((*scores.shape[:-1], len(kept)), dtype=torch.float64)
    prcs = torch.empty_like(rocs)
    for chunk, longest in _chunks(sizes, configs=math.prod(scores.shape[:-1])):
        offset = torch.arange(longest, device=scores.device)
        real = offset < sizes[chunk, None]
        # Padding reads slice 0, but is never counted.
        index = torch.where(real, starts[chunk, None] + offset, 0)
        padded = scores.index_select(-1, index.flatten()).unflatten(-1, index.shape)
        ranking = _rank(padded, positive[index], real)
        rocs[..., chunk], prcs[..., chunk] = _auroc(ranking), _auprc(ranking)
    return Localization(
        auroc=rocs,
        auprc=prcs,
        kept=kept,
        unlabelled=int(counts.unlabelled.sum()),
        all_negative=int(counts.all_negative.sum()),
        all_positive=int(counts.all_positive.sum()),
    )


@dataclass(frozen=True)
class MeanSd:
    """A mean and a standard deviation of a named kind."""

    mean: float
    sd: float
    kind: SdKind

    def __str__(self) -> str:
        return f"{self.mean:.3f} ± {self.sd:.3f} ({self.kind} sd)"


def mean_and_sd(values: Sequence[float] | Float[Tensor, "seeds"], sd: SdKind) -> MeanSd:
    """Mean and standard deviation over seeds, of n (population) or n - 1 (sample); that of one value is then NaN."""
    choose_one_of("sd", sd, ("population", "sample"))
    numbers = torch.as_tensor(values, dtype=torch.float64)
    if numbers.ndim != 1 or not len(numbers):
        raise UserError(f"values must be a vector of one or more numbers, got shape {tuple(numbers.shape)}")
    squares = (numbers - numbers.mean()).square().sum()
    freedom = len(numbers) - (sd == "sample")
    return MeanSd(mean=numbers.mean().item(), sd=(squares / freedom).sqrt().item(), kind=sd)


@dataclass(frozen=True)
class _Ranking:
    """Entries in ascending order of score: their class, and the number of each class strictly below."""

    positive: Bool[Tensor, "*rows n"]
    negative: Bool[Tensor, "*rows n"]
    positives_below: Int[Tensor, "*rows n"]
    negatives_below: Int[Tensor, "*rows n"]
    undefined: Bool[Tensor, "*rows"]


def _rank(scores: Tensor, positive: Tensor, counted: Tensor) -> _Ranking:
    """Sort every row once; entries that are not `counted` belong to neither class, so they have no weight."""
    scores = scores.detach()  # counts have no gradient, so the sort need not be recorded
    undefined = (counted & scores.isnan()).any(-1)
    negative = counted & ~positive
    ordered, order = scores.masked_fill(~counted, 0.0).sort(dim=-1)
    # One gather of a signed byte moves both classes.
    label = ((positive & counted).char() - negative.char()).expand_as(scores).gather(-1, order)
    positive, negative = label > 0, label < 0
    first_of_ties = torch.ones_like(positive)
    first_of_ties[..., 1:] = ordered[..., 1:] != ordered[..., :-1]
    # The running count of flags at the first entry of a group of ties; it never falls, so a running maximum carries it
    # through the group.
    before = (flags.cumsum(-1, dtype=torch.int32) - flags.int() for flags in (positive, negative))
    positives_below, negatives_below = (torch.where(first_of_ties, count, 0).cummax(-1).values for count in before)
    return _Ranking(positive, negative, positives_below, negatives_below, undefined)


def _auroc(ranking: _Ranking) -> Tensor:
    pairs = ranking.positive.sum(-1) * ranking.negative.sum(-1)
    lower = torch.where(ranking.positive, ranking.negatives_below, 0).sum(-1)
    higher = torch.where(ranking.negative, ranking.positives_below, 0).sum(-1)
    # The other pairs are ties and count one half: 2 AUROC pairs = 2 lower + (pairs - lower - higher).
    area = (pairs + lower - higher).double() / (2 * pairs).double()
    return area.masked_fill(ranking.undefined, torch.nan)


def _auprc(ranking: _Ranking) -> Tensor:
    positives = ranking.positive.sum(-1, keepdim=True)
    negatives = ranking.negative.sum(-1, keepdim=True)
    hits = (positives - ranking.positives_below).double()
    precision = hits / (hits + (negatives - ranking.negatives_below))
    area = torch.where(ranking.positive, precision, 0.0).sum(-1) / positives.squeeze(-1)
    return area.masked_fill(ranking.undefined, torch.nan)


def _prepare(
    given: Array, given_labels: Array, given_mask: Array | None, name: str = "scores"
) -> tuple[Tensor, Tensor, Tensor]:
    """Checked scores, and which entries are positive and which are counted, in the scores' shape."""
    scores = as_tensor(given, name)
    labels = as_tensor(given_labels, "labels", scores)
    mask = None if given_mask is None else as_tensor(given_mask, "mask", scores)
    if not scores.ndim or not scores.shape[-1]:
        raise UserError(f"{name} of shape {tuple(scores.shape)} are empty; give a vector of at least one number")
    if not scores.is_floating_point():
        scores = scores.double()
    if mask is not None and mask.dtype != torch.bool:
        raise UserError(
            f"mask is {mask.dtype}; it must be boolean, True where a score counts: write mask.bool(), or "
            "mask.astype(bool) for an array"
        )
    labels = _expand("labels", labels, scores)
    counted = _expand("mask", scores.new_ones(1, dtype=torch.bool) if mask is None else mask, scores)
    positive = labels == 1
    wrong = counted & ~positive & (labels != 0)
    if wrong.device.type == "cpu" and wrong.any():
        raise UserError(f"labels: {labels[wrong][0].item()} is neither 0 nor 1; mask it out or correct it")
    # On a GPU the test above would wait for the device, so a wrong label turns its row into NaN instead.
    return scores.masked_fill(wrong, torch.nan), positive, counted


def _expand(name: str, tensor: Tensor, scores: Tensor) -> Tensor:
    try:
        return tensor.expand_as(scores)
    except RuntimeError as error:
        raise UserError(
            f"{name} of shape {tuple(tensor.shape)} cannot broadcast to scores of shape "
            f"{tuple(scores.shape)}: give one entry per score, or one row for all configurations"
        ) from error


def _chunks(lengths: Int64[Tensor, "kept"], configs: int) -> Iterator[tuple[Tensor, int]]:
    """Yield indices of bags to pad together, longest first, and the length to pad them to."""
    sizes, order = lengths.sort(descending=True)
    ascending = -sizes.cpu()
    start = 0
    while start < len(order):
        longest = -int(ascending[start])
        shortest = math.ceil(longest * (1 - MAX_PADDING))
        similar = int(torch.searchsorted(ascending, -shortest, right=True))
        stop = min(similar, start + max(1, MAX_CELLS // (longest * max(1, configs))))
        yield order[start:stop], longest
        start = stop
