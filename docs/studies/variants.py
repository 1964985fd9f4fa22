"""The semi-synthetic data and eight variants of them, for the results page `beyond`, with the best possible scores.

`normal_guidance.study.drawn` has the paper's own data.  Here several blocks may be shifted, and several features.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from jaxtyping import Float64, Int64
from torch import Tensor

from normal_guidance.base.errors import choose_one_of
from normal_guidance.core.bags import Bags
from normal_guidance.core.blocks import GAP
from normal_guidance.scans.index.manifest import PARTS
from normal_guidance.study.drawn import BLOCK, FEATURES, MAX_SLICES, MIN_SLICES, PREVALENCE, SEEDS, SHIFT, SIZES

SEPARATION = GAP + 1
"""Fewest negative slices between two blocks of a scan: with fewer, `core.blocks` counts them as one block."""


class SemiSynthetic(NamedTuple):
    """The three sets of one repetition."""

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
    blocks: int = 1,
    signals: int = 1,
) -> Bags:
    """As `drawn.shifted_mean`, with several blocks, all arrangements equally probable, and several shifted features."""
    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(min_slices, max_slices + 1, (n,), generator=generator)
    h = torch.randn(int(lengths.sum()), features, generator=generator, dtype=torch.float32)
    starts = torch.stack([_draw_starts(size, block, blocks, generator) for size in lengths.tolist()])
    labels = torch.bernoulli(torch.full((n,), prevalence, dtype=torch.float32), generator=generator).long()
    slice_labels = torch.zeros(len(h), dtype=torch.int64)
    row = torch.arange(len(h))
    for start in starts.unbind(1):
        first = (lengths.cumsum(0) - lengths + start).repeat_interleave(lengths)
        slice_labels += labels.repeat_interleave(lengths) * ((first <= row) & (row < first + block))
    h[:, :signals] += shift * slice_labels[:, None]
    return Bags(h, lengths, labels, slice_labels, scan_ids=tuple(f"synthetic-{seed}-{i:06d}" for i in range(n)))


def _draw_starts(size: int, block: int, blocks: int, generator: torch.Generator) -> Int64[Tensor, "blocks"]:
    """The first slices of a scan's blocks: an arrangement is a choice of `blocks` places among the free ones."""
    free = size - _least_slices(block, blocks) + blocks
    if blocks == 1:
        return torch.randint(0, free, (1,), generator=generator)
    chosen = torch.randperm(free, generator=generator)[:blocks].sort().values
    return chosen + torch.arange(blocks) * (block + SEPARATION - 1)


def _least_slices(block: int, blocks: int) -> int:
    """The number of slices that these blocks need."""
    return blocks * block + (blocks - 1) * SEPARATION


@dataclass(frozen=True)
class Variant:
    """Differences from the paper's data, as options of `shifted_mean`."""

    title: str
    options: Mapping[str, Any] = field(default_factory=dict)
    test: Mapping[str, Any] = field(default_factory=dict)  # of the test set alone
    sizes: tuple[int, int, int] | None = None  # None: `SIZES`


VARIANTS: dict[str, Variant] = {
    "paper": Variant("The paper's data"),
    "two_blocks": Variant("Two blocks of 6 slices", {"blocks": 2, "block": 6}),
    "three_blocks": Variant("Three blocks of 4 slices", {"blocks": 3, "block": 4}),
    "short_blocks": Variant("Blocks of 6 slices in the test set alone", test={"block": 6}),
    "long_blocks": Variant("Blocks of 18 slices in the test set alone", test={"block": 18}),
    "eight_signals": Variant("Eight features share the signal", {"signals": 8, "shift": SHIFT / math.sqrt(8)}),
    "few_scans": Variant("A tenth of the training and validation scans", sizes=(1_000, 250, 1_000)),
    "more_noise": Variant("Four times as many features", {"features": 4 * FEATURES}),
}
"""Each variant changes one thing.  Several blocks together have as many positive slices as the paper's one block, and
eight features together as much evidence as its one feature, so that the ceiling shows the cost of the form alone."""


def semi_synthetic(seed: int = 1001, variant: str = "paper") -> SemiSynthetic:
    """Draw all three sets of one of the paper's repetitions: 1.7 GB (6.7 GB with the variant `more_noise`)."""
    return SemiSynthetic(*(semi_synthetic_part(seed, part, variant) for part in SemiSynthetic._fields))


def semi_synthetic_part(seed: int, part: str, variant: str = "paper") -> Bags:
    """Draw one set of `semi_synthetic`: 'train', 'val' or 'test'."""
    choose_one_of("variant", variant, VARIANTS)
    index, chosen = PARTS.index(part), VARIANTS[variant]
    options = {**chosen.options, **(chosen.test if part == "test" else {})}
    return shifted_mean((chosen.sizes or SIZES)[index], SEEDS[seed][index], **options)


def bayes_scan_scores(
    bags: Bags, *, block: int = BLOCK, shift: float = SHIFT, blocks: int = 1, signals: int = 1
) -> Float64[Tensor, "scans"]:
    """As `drawn.bayes_scan_scores`; the sum runs over all arrangements of several blocks."""
    # Each arrangement is counted once for each of its blocks.
    return _log_joint(bags, block, shift, blocks, signals).logsumexp(1) - math.log(blocks)


def bayes_slice_scores(
    bags: Bags, *, block: int = BLOCK, shift: float = SHIFT, blocks: int = 1, signals: int = 1
) -> Float64[Tensor, "slices"]:
    """As `drawn.bayes_slice_scores`: the probability that a slice lies in any of the blocks."""
    log_joint = _log_joint(bags, block, shift, blocks, signals)
    evidence = log_joint.logsumexp(1, keepdim=True) - math.log(blocks)
    log_posterior = log_joint - evidence  # log p(u | h_i, S_i, y_i=1)
    # Windows of R starts that end at j are U_ij: outside 1..S-R+1 a start has probability 0.
    nowhere = log_posterior.new_full((len(bags), block - 1), -torch.inf)
    candidates = torch.cat([nowhere, log_posterior, nowhere], dim=1).unfold(1, block, 1)
    # Where one start is almost certain, rounding may lift the sum above 1.
    return bags.layout.restore(candidates.logsumexp(2).clamp_max(0.0))


def _log_joint(bags: Bags, block: int, shift: float, blocks: int, signals: int) -> Float64[Tensor, "scans starts"]:
    """log p(h_i, a block begins at u | S_i, y_i=1) - log p(h_i | y_i=0) of every u; -inf where it would leave the scan.

    Blocks do not overlap, so a slice begins, or belongs to, at most one of them.
    """
    least = _least_slices(block, blocks)
    # log N(h; Δ, 1) - log N(h; 0, 1)
    evidence = (shift * bags.features[:, :signals].double() - shift**2 / 2).sum(1)
    log_ratio = bags.layout.pad(evidence).unfold(1, block, 1).sum(2)
    starts = bags.lengths[:, None] - block + 1
    possible = torch.arange(log_ratio.shape[1], device=log_ratio.device) < starts
    log_ratio = log_ratio.masked_fill(~possible, -torch.inf)
    # p(u | S_i, y_i=1) = 1 / the number of arrangements, C(free, blocks)
    free = bags.lengths[:, None] - least + blocks
    arrangements = torch.stack([(free - k).double().log() - math.log(k + 1) for k in range(blocks)]).sum(0)
    return log_ratio + _log_others(log_ratio, block, blocks) - arrangements


def _log_others(log_ratio: Float64[Tensor, "scans starts"], block: int, blocks: int) -> Float64[Tensor, "scans starts"]:
    """log of the sum, over all arrangements of the other blocks around one at u, of their likelihood ratios."""
    before = _log_before(log_ratio, block, blocks)
    behind = [sums.flip(1) for sums in _log_before(log_ratio.flip(1), block, blocks)]
    return torch.stack([sums + others for sums, others in zip(before, reversed(behind), strict=True)]).logsumexp(0)


def _log_before(
    log_ratio: Float64[Tensor, "scans starts"], block: int, blocks: int
) -> list[Float64[Tensor, "scans starts"]]:
    """The sums of `_log_others` for 0, 1, ... blocks - 1 blocks that all end at least `SEPARATION` slices before u."""
    sums = [torch.zeros_like(log_ratio)]
    for _ in range(blocks - 1):
        ended = torch.logcumsumexp(log_ratio + sums[-1], dim=1)
        away = min(block + SEPARATION, log_ratio.shape[1])
        nowhere = log_ratio.new_full((len(log_ratio), away), -torch.inf)
        sums.append(torch.cat([nowhere, ended[:, : log_ratio.shape[1] - away]], dim=1))
    return sums
