"""Shifted Mean MIL, the paper's semi-synthetic data, and the best that anything can do on it.

Noise everywhere, but in a positive scan one feature of one block of adjacent slices has a shifted mean.  The process
is known, so Bayes' rule gives the ceilings for scans and for slices in closed form.

A training set of 10,000 scans holds about 400,000 slices x 768 features: 1.2 GB, drawn once and shifted in place.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from jaxtyping import Float64
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.models import FEATURES
from normal_guidance.errors import UserError

BLOCK = 12
"""R, the adjacent slices of a positive scan whose first feature is shifted: as long as in head CT."""

SHIFT = 0.5
"""Δ, the mean of the first feature in that block."""

MIN_SLICES, MAX_SLICES = 20, 60
"""S is uniform between these, both included: as in head CT."""

PREVALENCE = 0.5
"""Probability that a scan is positive."""

SEEDS = {1001: (1001, 1002, 1003), 2001: (2001, 2002, 2003), 3001: (3001, 3002, 3003)}
"""The paper's three repetitions: the seeds of their training, validation and test sets."""

SIZES = (10_000, 2_500, 1_000)
"""Scans of a training, a validation and a test set."""


class SemiSynthetic(NamedTuple):
    """The three sets of one repetition.

    Example:
        >>> part = shifted_mean(2, seed=1, features=1)
        >>> SemiSynthetic(train=part, val=part, test=part)._fields
        ('train', 'val', 'test')
    """

    train: Bags
    val: Bags
    test: Bags


def shifted_mean(
    n: int,
    seed: int,
    *,
    features: int = FEATURES,
    min_slices: int = MIN_SLICES,
    max_slices: int = MAX_SLICES,
    block: int = BLOCK,
    shift: float = SHIFT,
    prevalence: float = PREVALENCE,
) -> Bags:
    r"""Draws `n` scans of noise; in a positive one, feature 0 of `block` adjacent slices has the mean `shift`.

    $$ y_i \sim \mathrm{Bern}(\pi), \quad S_i \sim \mathrm{Unif}\{20, \dots, 60\}, \quad
       u_i \sim \mathrm{Unif}\{1, \dots, S_i - R + 1\}, \quad
       h_{ijk} \sim \mathcal{N}(\Delta\, y_i\, [u_i \le j < u_i + R]\, [k = 1],\, 1) $$

    The order of the draws is part of the definition: with the defaults, the scans of a seed are the paper's own.
    Every scan draws a start, the negative ones too, which do not use it.

    Reference: Harvey et al., 2026 (Shifted Mean MIL); the paper's appendix on semi-synthetic data.

    Example:
        >>> bags = shifted_mean(4, seed=1003, features=8)
        >>> bags
        Bags(4 scans of 23-40 slices (median 35), 133 slices x 8 features, 2 positive (50.0 %), 2 localizable, 4.2 KiB)
        >>> bags.positive_slices.max(), bags.scan_ids[3]
        (tensor(12), 'synthetic-1003-000003')
    """
    _check_sizes(n, seed, features, min_slices, max_slices)
    _check_block(block, shift)
    if block > min_slices:
        raise UserError(f"block is {block}, but a scan may have {min_slices} slices; raise min_slices or shorten block")
    if not 0 <= prevalence <= 1:
        raise UserError(f"prevalence is {prevalence}; give a probability, from 0 to 1")

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(min_slices, max_slices + 1, (n,), generator=generator)
    h = torch.randn(int(lengths.sum()), features, generator=generator, dtype=torch.float32)
    # One call per scan: one call for all scans draws other numbers.
    starts = torch.cat([torch.randint(0, size - block + 1, (1,), generator=generator) for size in lengths.tolist()])
    # Not `bernoulli_(p)`: for a single p it reads the generator in another way.
    labels = torch.bernoulli(torch.full((n,), prevalence, dtype=torch.float32), generator=generator).long()

    first = (lengths.cumsum(0) - lengths + starts).repeat_interleave(lengths)
    row = torch.arange(len(h))
    slice_labels = labels.repeat_interleave(lengths) * ((first <= row) & (row < first + block))
    h[:, 0] += shift * slice_labels
    return Bags(h, lengths, labels, slice_labels, scan_ids=tuple(f"synthetic-{seed}-{i:06d}" for i in range(n)))


def semi_synthetic(seed: int = 1001) -> SemiSynthetic:
    """The training, validation and test set of one of the paper's repetitions: 1.7 GB.

    `semi_synthetic_part` draws one of them alone.  Reference: the paper's section on data sets.

    Example:
        >>> semi_synthetic(seed=7)
        Traceback (most recent call last):
        normal_guidance.errors.UserError: seed 7 is none of the paper's; choose one of 1001, 2001, 3001
    """
    return SemiSynthetic(*(semi_synthetic_part(seed, part) for part in SemiSynthetic._fields))


def semi_synthetic_part(seed: int, part: str) -> Bags:
    """One set of `semi_synthetic`: 'train', 'val' or 'test'.

    Reference: the paper's section on data sets.

    Example:
        >>> semi_synthetic_part(1001, "test").labels.sum()
        tensor(507)
    """
    if seed not in SEEDS:
        raise UserError(f"seed {seed} is none of the paper's; choose one of {', '.join(map(str, SEEDS))}")
    if part not in SemiSynthetic._fields:
        raise UserError(f"part {part!r} is unknown; choose one of {', '.join(SemiSynthetic._fields)}")
    index = SemiSynthetic._fields.index(part)
    return shifted_mean(SIZES[index], SEEDS[seed][index])


def bayes_scan_scores(bags: Bags, *, block: int = BLOCK, shift: float = SHIFT) -> Float64[Tensor, "scans"]:
    r"""The Bayes estimator of the scan's label: no score ranks the scans of `shifted_mean` better on average.

    $$ \log \frac{p(h_i \mid S_i, y_i{=}1)}{p(h_i \mid S_i, y_i{=}0)}
       = \log \frac{1}{S_i - R + 1} \sum_{u=1}^{S_i-R+1} \prod_{j=u}^{u+R-1} e^{\Delta h_{ij1} - \Delta^2/2} $$

    Reference: Harvey et al., 2026, Eq. (10); the paper's ceiling for semi-synthetic scans.

    Example:
        >>> from normal_guidance.core.metrics import auroc
        >>> bags = shifted_mean(1000, seed=8, features=1)
        >>> auroc(bayes_scan_scores(bags), bags.labels)
        tensor(0.8132, dtype=torch.float64)
    """
    return _log_joint(bags, block, shift).logsumexp(1)


def bayes_slice_scores(bags: Bags, *, block: int = BLOCK, shift: float = SHIFT) -> Float64[Tensor, "slices"]:
    r"""The Bayes estimator of the slices' labels in a positive scan, as a log-probability.

    $$ \log p(y_{ij}{=}1 \mid h_i, S_i, y_i{=}1) = \log \sum_{u \in \mathcal{U}_{ij}} p(u \mid h_i, S_i, y_i{=}1),
       \quad \mathcal{U}_{ij} = \{\max(1, j-R+1), \dots, \min(S_i-R+1, j)\} $$

    In a negative scan it still answers as if the scan were positive.

    Reference: the paper's Eq. "marginal" and its appendix on the Bayes estimator for localization.

    Example:
        >>> from normal_guidance.core.metrics import localization
        >>> bags = shifted_mean(1000, seed=8, features=1)
        >>> localization(bayes_slice_scores(bags), bags.slice_labels, bags.lengths).mean_auroc
        tensor(0.8746, dtype=torch.float64)
    """
    log_joint = _log_joint(bags, block, shift)
    log_posterior = log_joint - log_joint.logsumexp(1, keepdim=True)  # log p(u | h_i, S_i, y_i=1)
    # Windows of R starts that end at j are U_ij: outside 1..S-R+1 a start has probability 0.
    nowhere = log_posterior.new_full((len(bags), block - 1), -torch.inf)
    candidates = torch.cat([nowhere, log_posterior, nowhere], dim=1).unfold(1, block, 1)
    # Where one start is all but certain, rounding may carry the sum above 1.
    return bags.layout.restore(candidates.logsumexp(2).clamp_max(0.0))


def _log_joint(bags: Bags, block: int, shift: float) -> Float64[Tensor, "scans starts"]:
    """log p(h_i, u | S_i, y_i=1) - log p(h_i | y_i=0) of every start u; -inf where the block would leave the scan."""
    _check_block(block, shift)
    short = (bags.lengths < block).nonzero().flatten().tolist()
    if short:
        raise UserError(
            f"scan {bags.scan_ids[short[0]]!r} has {int(bags.lengths[short[0]])} slices, fewer than a block of {block} "
            f"({len(short)} such scans); leave them out or pass the block that the scans were drawn with"
        )
    evidence = shift * bags.features[:, 0].double() - shift**2 / 2  # log N(h; Δ, 1) - log N(h; 0, 1)
    log_ratio = bags.layout.pad(evidence).unfold(1, block, 1).sum(2)
    starts = bags.lengths[:, None] - block + 1  # p(u | S_i, y_i=1) = 1 / starts
    possible = torch.arange(log_ratio.shape[1], device=log_ratio.device) < starts
    return (log_ratio - starts.double().log()).masked_fill(~possible, -torch.inf)


def _check_sizes(n: int, seed: int, features: int, min_slices: int, max_slices: int) -> None:
    for name, value in (("n", n), ("features", features), ("min_slices", min_slices)):
        if value < 1:
            raise UserError(f"{name} is {value}; it must be at least 1")
    if max_slices < min_slices:
        raise UserError(f"max_slices is {max_slices}, below min_slices ({min_slices}); exchange them or raise it")
    if not 0 <= seed < 2**64:
        raise UserError(f"seed is {seed}; give a number from 0 to 2**64 - 1")


def _check_block(block: int, shift: float) -> None:
    if block < 1:
        raise UserError(f"block is {block}; it must be at least 1 slice")
    if not math.isfinite(shift):
        raise UserError(f"shift is {shift}; it must be finite")
