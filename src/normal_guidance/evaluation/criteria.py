r"""Criteria for the choice of lambda that use no slice labels.

Validation AUROC cannot see where a model looks: a scan may be classified well from the wrong slices.  What can be
asked without slice labels is whether the attended slices carry what the model knows.  Each scan is cut at its most
attended interval, and the model is asked again about that interval alone (kept), about the rest (removed), and about
the scan without another interval of the same length (elsewhere).

How long that interval is can be decided in two ways (`CUTS`): as short as holds a share of the attention, or a share
of the scan's slices.  The first asks about what the model claims, but takes less away the sharper attention is: of two
models that rank slices alike, the sharper one is then found to need its slices less.  The second takes the same from
all models, so their numbers can be compared; the share should be about what a finding fills.

    kept        scan AUROC of the attended interval alone: is it sufficient?
    removed     1 - scan AUROC without it: is it necessary?
    contrast    the sum of both, less 1: AUROC kept less AUROC removed
    deletion    how far the logit of positive scans falls without it, beyond the fall without another interval
    kept_loss   minus the log-loss of the attended interval alone, after a refit of scale and offset

A sixth, `agreement`, asks whether models trained from other seeds attend to the same slices.  Uniform attention and
attention that depends on position alone always agree, so agreement with the attention of *other* scans, stretched to
the same length, is subtracted.

What is kept alone is no alarm for inverted attention: the least evidence of a scan tells positive scans from negative
ones as well, if less.

All are the higher the better, and none depends on the scale of the logits.  Which of them lands nearest the choice
that slice labels would make is a question for a study, not for this module.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Float64, Int
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.metrics import auroc
from normal_guidance.core.models import Prediction
from normal_guidance.core.packed import bag_of_rows, place_in_bag
from normal_guidance.errors import UserError
from normal_guidance.evaluation.trust.changed_scans import SliceSelection
from normal_guidance.statistics.localization import smallest_interval
from normal_guidance.statistics.slice_ranks import rank_correlation

Predict = Callable[[Bags], Prediction]
"""A trained model: packed scans in, packed predictions out; `functools.partial(training.fit.predict, model)` is one."""

CutName = Literal["attention", "slices"]

CUTS: dict[CutName, str] = {
    "attention": "the smallest interval that holds a share of the attention",
    "slices": "the interval of a share of the slices that holds the most attention",
}
"""How the attended interval is found."""

SHARE = 0.5
"""Of a bell of attention, the mean ± 0.67 sd; a scan of two or more slices always keeps a rest."""

ELSEWHERE = 4
"""Other intervals of the same length that the fall of a logit is compared with."""

BATCH = 256
"""Scans that are cut and asked about together."""

REFIT_STEPS = 50
"""Newton steps for the two numbers of a refit: it converges in about ten."""


@dataclass(frozen=True)
class Answers:
    """The logits of each scan, whole and cut; scans of which nothing would be left are left out."""

    labels: Int[Tensor, "scans"]
    whole: Float64[Tensor, "scans"]
    kept: Float64[Tensor, "scans"]
    removed: Float64[Tensor, "scans"]
    elsewhere: Float64[Tensor, "scans"]
    """The mean over `ELSEWHERE` intervals drawn at random."""
    left_out: int


def ask(predict: Predict, scans: Bags, *, share: float = SHARE, of: CutName = "attention", seed: int = 0) -> Answers:
    """The model's logits of whole and of cut scans.  Slice labels are taken away first, so nothing here can see them.

    Example:
        >>> from functools import partial
        >>> from normal_guidance.core.models import build_model
        >>> from normal_guidance.simulate.semi_synthetic import shifted_mean
        >>> from normal_guidance.training.fit import predict
        >>> answers = ask(partial(predict, build_model("abmil", 8)), shifted_mean(20, seed=1, features=8))
        >>> answers.kept.shape, answers.left_out
        (torch.Size([20]), 0)
    """
    if of not in CUTS:
        raise UserError(f"cut by {of!r} is unknown; choose one of {', '.join(CUTS)}")
    generator = torch.Generator().manual_seed(seed)
    parts = [_ask_batch(predict, batch, share, of, generator) for batch in _blind(scans).batches(BATCH)]
    labels, whole, kept, removed, elsewhere = (torch.cat(column) for column in zip(*parts, strict=True))
    if not 0 < int(labels.sum()) < len(labels):
        raise UserError(f"{int(labels.sum())} of {len(labels)} scans are positive; criteria need scans of both kinds")
    if not whole.isfinite().all():
        raise UserError("the model has no finite scan score for every scan; criteria ask how that score changes")
    return Answers(labels, whole, kept, removed, elsewhere, left_out=len(scans) - len(labels))


def _blind(scans: Bags) -> Bags:
    return Bags(scans.features, scans.lengths, scans.labels, scan_ids=scans.scan_ids)


def _ask_batch(
    predict: Predict, scans: Bags, share: float, of: CutName, generator: torch.Generator
) -> tuple[Tensor, ...]:
    whole = predict(scans)
    attention = whole.attention.to(scans.features.device)
    if of == "attention":
        first, last = smallest_interval(attention, scans.lengths, share)
        length = last - first + 1
    else:
        first, length = most_attended(attention, scans, share)
    chosen = (length < scans.lengths).nonzero().flatten()
    scans, logit, length = scans[chosen], whole.logit.to(chosen.device)[chosen], length[chosen]
    if not len(chosen):
        return scans.labels, *[torch.zeros(0, dtype=torch.float64)] * 4
    inside = _interval(scans, first[chosen], length)
    elsewhere = []
    for _ in range(ELSEWHERE):
        draw = torch.rand(len(scans), generator=generator, dtype=torch.float64).to(length.device)
        start = (draw * (scans.lengths - length + 1)).long()
        elsewhere.append(_logit(predict, scans, ~_interval(scans, start, length)))
    return (
        scans.labels,
        logit.double(),
        _logit(predict, scans, inside),
        _logit(predict, scans, ~inside),
        torch.stack(elsewhere).mean(0),
    )


def most_attended(
    attention: Float[Tensor, "slices"], scans: Bags, share: float
) -> tuple[Int[Tensor, "scans"], Int[Tensor, "scans"]]:
    """First slice and length of each scan's interval of a share of its slices that holds the most attention.

    At least one slice and, where there is more than one, not all of them; of equal intervals the first.

    Example:
        >>> scans = Bags(torch.zeros(6, 1), torch.tensor([4, 2]), torch.tensor([0, 1]))
        >>> most_attended(torch.tensor([0.1, 0.2, 0.4, 0.3, 0.5, 0.5]), scans, share=0.5)
        (tensor([2, 0]), tensor([2, 1]))
    """
    if not 0 < share < 1:
        raise UserError(f"share is {share}; cut more than 0 and less than all slices")
    length = (share * scans.lengths.double()).round().long().clamp_min(1).minimum((scans.lengths - 1).clamp_min(1))
    running = F.pad(scans.layout.pad(attention.double()).cumsum(1), (1, 0))
    start = torch.arange(running.shape[1], device=length.device)
    stop = start + length[:, None]
    held = running.gather(1, stop.clamp_max(running.shape[1] - 1)) - running
    return held.masked_fill(stop > scans.lengths[:, None], -1.0).argmax(1), length


def _interval(scans: Bags, first: Int[Tensor, "scans"], length: Int[Tensor, "scans"]) -> Bool[Tensor, "slices"]:
    """Which slices lie in their scan's interval."""
    place, scan = place_in_bag(scans.lengths), bag_of_rows(scans.lengths)
    return (place >= first[scan]) & (place < (first + length)[scan])


def _logit(predict: Predict, scans: Bags, slices: Bool[Tensor, "slices"]) -> Float64[Tensor, "scans"]:
    """Of the scans with these slices only; there is at least one in every scan."""
    chosen = SliceSelection.where(slices, scans.lengths)
    cut = Bags(scans.features[chosen.slices], chosen.lengths, scans.labels, scan_ids=scans.scan_ids)
    return predict(cut).logit.to(chosen.lengths.device, torch.float64)


# ----------------------------------------------------------------------------------------------------
# Criteria of one model
# ----------------------------------------------------------------------------------------------------


def kept_auroc(answers: Answers) -> float:
    """Scan AUROC when only the attended interval is kept.

    Example:
        >>> logits = torch.tensor([0.0, 1.0], dtype=torch.float64)
        >>> kept_auroc(Answers(torch.tensor([0, 1]), logits, logits, -logits, logits, left_out=0))
        1.0
    """
    return auroc(answers.kept, answers.labels).item()


def removed_auroc(answers: Answers) -> float:
    """1 - scan AUROC when the attended interval is removed."""
    return 1 - auroc(answers.removed, answers.labels).item()


def contrast(answers: Answers) -> float:
    """AUROC of the attended interval less AUROC of the rest: 0 if either says as much about the scan as the other."""
    return kept_auroc(answers) + removed_auroc(answers) - 1


def deletion(answers: Answers) -> float:
    """Mean fall of positive scans' logits without the attended interval beyond that without others, in sds.

    The sd is that of the whole scans' logits, over all scans.
    """
    fall = (answers.elsewhere - answers.removed)[answers.labels == 1]
    return (fall.mean() / answers.whole.std().clamp_min(torch.finfo(torch.float64).tiny)).item()


def kept_loss(answers: Answers) -> float:
    """Minus the log-loss of the kept interval's logits, their scale and offset fitted to the labels.

    A fit, because logits of a part are of another scale than those of the whole; a scale of 0 or more, because a part
    whose logits are upside down says the wrong thing.
    """
    return -_refitted_loss(answers.kept, answers.labels.double())


def _refitted_loss(logits: Float64[Tensor, "scans"], labels: Float64[Tensor, "scans"]) -> float:
    """The least log-loss of scale * logit + offset: logistic regression by Newton steps, slightly damped."""
    x = torch.stack([(logits - logits.mean()) / logits.std().clamp_min(1e-12), torch.ones_like(logits)], 1)
    theta = torch.zeros(2, dtype=torch.float64, device=logits.device)
    for _ in range(REFIT_STEPS):
        p = torch.sigmoid(x @ theta)
        # The ridge stands for one scan; it keeps scans that are told apart without error from scales without end.
        gradient = x.T @ (p - labels) + theta
        theta = theta - torch.linalg.solve((x * (p * (1 - p))[:, None]).T @ x + torch.eye(2).to(x), gradient)
    if theta[0] < 0:
        theta = torch.stack([theta[0] * 0, torch.logit(labels.mean())])
    return F.binary_cross_entropy_with_logits(x @ theta, labels).item()


CRITERIA: dict[str, Callable[[Answers], float]] = {
    "kept": kept_auroc,
    "removed": removed_auroc,
    "contrast": contrast,
    "deletion": deletion,
    "kept_loss": kept_loss,
}
"""Those of one model; the higher the better."""


def criteria(
    predict: Predict, scans: Bags, *, share: float = SHARE, of: CutName = "attention", seed: int = 0
) -> dict[str, float]:
    """All of `CRITERIA` for one model on validation scans, from three passes over the scans and `ELSEWHERE` more.

    Example:
        >>> from functools import partial
        >>> from normal_guidance.core.models import build_model
        >>> from normal_guidance.simulate.semi_synthetic import shifted_mean
        >>> from normal_guidance.training.fit import predict
        >>> sorted(criteria(partial(predict, build_model("mean", 8)), shifted_mean(40, seed=1, features=8)))
        ['contrast', 'deletion', 'kept', 'kept_loss', 'removed']
    """
    answers = ask(predict, scans, share=share, of=of, seed=seed)
    return {name: criterion(answers) for name, criterion in CRITERIA.items()}


# ----------------------------------------------------------------------------------------------------
# Agreement of several models
# ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Agreement:
    """Mean rank correlation of two models' attention to the same scan, and to two different scans.

    Example:
        >>> print(Agreement(same=0.8, other=0.3, scans=120))
        0.500 (same scan 0.800, other scans 0.300; 120 scans)
    """

    same: float
    other: float
    scans: int

    @property
    def beyond_position(self) -> float:
        """What agreement the scan itself accounts for: the criterion."""
        return self.same - self.other

    def __str__(self) -> str:
        return (
            f"{self.beyond_position:.3f} (same scan {self.same:.3f}, other scans {self.other:.3f}; {self.scans} scans)"
        )


def agreement(
    attentions: Sequence[Float[Tensor, "slices"]], lengths: Int[Tensor, "scans"], labels: Int[Tensor, "scans"]
) -> Agreement:
    """Whether models trained from several seeds attend to the same slices of positive scans of two slices or more.

    `attentions` holds each model's attention (or log-attention: ranks are the same) to the same packed scans.  The
    other scan is the next positive one, its attention stretched to this one's length.

    Example:
        >>> lengths, labels = torch.tensor([3, 3]), torch.tensor([1, 1])
        >>> print(agreement([torch.tensor([1.0, 2, 3, 3, 2, 1])] * 2, lengths, labels))
        2.000 (same scan 1.000, other scans -1.000; 2 scans)
    """
    if len(attentions) < 2 or any(len(one) != int(lengths.sum()) for one in attentions):
        sizes = [len(one) for one in attentions]
        raise UserError(f"attention of {sizes} slices; agreement needs two models or more on the same scans")
    chosen = ((labels == 1) & (lengths > 1)).nonzero().flatten().tolist()
    if len(chosen) < 2:
        raise UserError(f"{len(chosen)} positive scans have two slices or more; agreement needs two such scans")
    models = [[one.double().split(lengths.tolist())[scan] for scan in chosen] for one in attentions]
    same, other = [], []
    for one, two in itertools.combinations(models, 2):
        turned = [_stretched(two[(scan + 1) % len(two)], len(attention)) for scan, attention in enumerate(one)]
        same.append(_correlations(one, two))
        other.append(_correlations(one, turned))
    return Agreement(torch.cat(same).mean().item(), torch.cat(other).mean().item(), len(chosen))


def _correlations(
    one: Sequence[Float64[Tensor, "_"]], other: Sequence[Float64[Tensor, "_"]]
) -> Float64[Tensor, "scans"]:
    """Of ranks, scan by scan; 0 where all slices tie, since uniform attention points nowhere."""
    return rank_correlation(torch.cat(list(one)), torch.cat(list(other)), torch.tensor([*map(len, one)])).nan_to_num(0)


def _stretched(attention: Float64[Tensor, "slices"], length: int) -> Float64[Tensor, "length"]:
    """Linear between the slices, the first and the last in place."""
    return F.interpolate(attention[None, None], size=length, mode="linear", align_corners=True)[0, 0]
