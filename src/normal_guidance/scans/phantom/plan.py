"""The plan of a phantom dataset: patients, scans, lengths, and the places of lesions; no pixels yet.

Every quantity has its own stream of random numbers, so that none reveals another.  Blocks follow the paper's tables.
Their chest and abdomen rows (except the number of blocks) are exchanged: as printed, they contradict scans' lengths.
With these places the centered Gaussian has about the localization AUROC that the paper reports for it.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from normal_guidance.base.errors import UserError, choose_one_of

GAP = 3  # most negative slices inside one block; two blocks lie farther apart

QUANTILES = (0.0, 0.05, 0.25, 0.5, 0.75, 0.95, 1.0)  # the quantiles in `Anatomy.fractions`

MIN_SLICES = 12  # fewest slices of a scan; with fewer, its ends could not lie outside the organ


@dataclass(frozen=True)
class Anatomy:
    """The distributions of one body part: the paper's tables, and values of a plausible scan."""

    positive: float  # share of positive scans
    bags_by_blocks: tuple[int, ...]  # positive scans with 1, 2, ... blocks: the paper's first block table.
    fractions: tuple[float, ...]  # `QUANTILES` of a block's share of the scan: the paper's third block table
    centre: tuple[float, float]  # mean and standard deviation of a block's centre, as shares of the scan
    organ: tuple[float, float]  # part of the scan, from its lower end, where lesions can be
    slices: int  # median number of slices of a scan; real chest and abdomen scans have 246 and 319 on average
    extent: float  # length of the scan in mm
    kinds: Mapping[str, float]  # kinds of lesions and their shares
    scans_per_patient: tuple[float, ...]  # share of the patients with 1, 2, ... scans.


ANATOMIES = {
    "head": Anatomy(
        positive=0.41,
        bags_by_blocks=(8296, 569, 17),
        fractions=(0.017, 0.053, 0.172, 0.342, 0.513, 0.688, 0.78),  # not 1.0: both ends lie outside the brain
        centre=(0.5, 0.19),
        organ=(0.12, 0.90),
        slices=32,
        extent=165.0,
        kinds={
            "intraparenchymal": 0.35,
            "subdural": 0.25,
            "subarachnoid": 0.2,
            "intraventricular": 0.15,
            "epidural": 0.05,
        },
        scans_per_patient=(0.86, 0.1, 0.04),
    ),
    "chest": Anatomy(
        positive=0.30,
        bags_by_blocks=(1437, 497, 185, 65, 16, 7, 4),
        fractions=(0.002, 0.006, 0.027, 0.063, 0.174, 0.401, 0.78),  # not 0.87, for the same reason
        centre=(0.5, 0.175),
        organ=(0.12, 0.90),
        slices=64,
        extent=320.0,
        kinds={"left": 0.4, "right": 0.6},
        scans_per_patient=(1.0,),
    ),
    "abdomen": Anatomy(
        positive=0.08,
        bags_by_blocks=(304, 53, 7, 1),
        fractions=(0.001, 0.004, 0.023, 0.059, 0.137, 0.283, 0.499),
        centre=(0.45, 0.8),
        organ=(0.02, 0.97),
        slices=64,
        extent=420.0,
        kinds={"Active_Extravasation": 0.6, "Bowel": 0.4},
        scans_per_patient=(0.5, 0.5),
    ),
}

ORGANS = {"liver": 0.1, "spleen": 0.1, "kidney": 0.06}
"""Share of abdomen patients whose solid organ is injured, whatever the label of their scans."""


@dataclass(frozen=True)
class LesionBlock:
    """Neighbouring slices [start, stop) that show one lesion, or one look-alike."""

    start: int
    stop: int
    kind: str


@dataclass(frozen=True)
class ScanPlan:
    """One scan to be drawn."""

    number: int
    patient: int
    anatomy: str
    slices: int
    blocks: tuple[LesionBlock, ...]
    seed: int
    injuries: Mapping[str, str] = field(default_factory=dict)
    """Injured solid organs of the patient and their grade, 'low' or 'high'; the scan's label ignores them."""

    @property
    def slice_labels(self) -> np.ndarray:
        """One 0 or 1 per slice, from the lower end up."""
        labels = np.zeros(self.slices, np.int8)
        for block in self.blocks:
            labels[block.start : block.stop] = 1
        return labels

    @property
    def label(self) -> int:
        return int(bool(self.blocks))

    def stream(self, name: str) -> np.random.Generator:
        """Random numbers of one property of this scan."""
        return stream(self.seed, name, self.number)

    def patient_stream(self, name: str) -> np.random.Generator:
        """Random numbers of one property of the patient, the same for all of the patient's scans."""
        return stream(self.seed, name, self.patient)


def stream(seed: int, name: str, *numbers: int) -> np.random.Generator:
    """Random numbers for one purpose, independent of those for any other."""
    return np.random.default_rng(np.random.SeedSequence([seed, zlib.crc32(name.encode()), *numbers]))


def plan(
    anatomy: str, scans: int, seed: int, *, positive: float | None = None, slices: int | None = None
) -> list[ScanPlan]:
    """Draws the scans of a dataset, patient by patient; `positive` is a share, `slices` the median of the lengths."""
    choose_one_of("anatomy", anatomy, ANATOMIES)
    kind = ANATOMIES[anatomy]
    share, median = kind.positive if positive is None else positive, slices or kind.slices
    if scans < 1:
        raise UserError(f"scans is {scans}; it must be at least 1")
    if not 0 <= seed < 2**63:
        raise UserError(f"seed is {seed}; give a number from 0 to 2**63 - 1")
    if not 0 <= share <= 1:
        raise UserError(f"positive is {share}; give a share, from 0 to 1")
    if median < MIN_SLICES:
        raise UserError(f"slices is {median}; a scan has at least {MIN_SLICES}")
    order = stream(seed, "labels").permutation(scans)
    is_positive = order < round(share * scans)
    # Real scans of a body part differ in length by about a factor of two.
    factors = np.exp(stream(seed, "lengths").normal(0.0, 0.2, scans).clip(-0.45, 0.6))
    lengths = np.maximum(np.rint(median * factors).astype(int), MIN_SLICES)
    planned = []
    for number, patient in enumerate(_patients(kind, scans, seed)):
        size = int(lengths[number])
        blocks = _draw_blocks(kind, size, stream(seed, "blocks", number)) if is_positive[number] else ()
        injuries: dict[str, str] = {}
        if anatomy == "abdomen":
            random = stream(seed, "injuries", patient)
            for organ, frequency in ORGANS.items():
                injured, low = random.random() < frequency, random.random() < 0.5  # both are drawn for every organ
                if injured:
                    injuries[organ] = "low" if low else "high"
        planned.append(ScanPlan(number, patient, anatomy, size, blocks, seed, injuries))
    return planned


def _patients(kind: Anatomy, scans: int, seed: int) -> list[int]:
    """The patient of every scan."""
    random, patient = stream(seed, "patients"), 0
    patients: list[int] = []
    while len(patients) < scans:
        count = 1 + int(random.choice(len(kind.scans_per_patient), p=kind.scans_per_patient))
        patients += [patient] * count
        patient += 1
    return patients[:scans]


def _draw_blocks(kind: Anatomy, slices: int, random: np.random.Generator) -> tuple[LesionBlock, ...]:
    frequencies = np.array(kind.bags_by_blocks) / sum(kind.bags_by_blocks)
    count = 1 + int(random.choice(len(frequencies), p=frequencies))
    fractions = np.interp(random.random(count), QUANTILES, kind.fractions)
    first, last = int(np.ceil(kind.organ[0] * slices)), int(np.floor(kind.organ[1] * slices))
    lengths: list[int] = np.maximum(np.rint(fractions * slices).astype(int), 1).tolist()
    # The longest block is shortened until all fit with gaps between them; short scans may have fewer blocks.
    while sum(lengths) + (GAP + 1) * (len(lengths) - 1) > last - first:
        longest = lengths.index(max(lengths))
        if lengths[longest] > 1:
            lengths[longest] -= 1
        else:
            lengths.pop()
    starts = _draw_starts(lengths, first, last, slices, kind.centre, random)
    kinds = random.choice(list(kind.kinds), len(lengths), p=list(kind.kinds.values())).tolist()
    blocks = [LesionBlock(start, start + n, name) for start, n, name in zip(starts, lengths, kinds, strict=True)]
    return tuple(sorted(blocks, key=lambda block: block.start))


def _draw_starts(
    lengths: Sequence[int], first: int, last: int, slices: int, centre: tuple[float, float], random: np.random.Generator
) -> list[int]:
    sizes = np.array(lengths)
    for _ in range(100):
        starts = np.rint(random.normal(*centre, len(sizes)) * slices - sizes / 2).astype(int)
        # A block that would leave the organ is drawn again if it is short and moved in if it is long.
        starts = np.where(sizes > (last - first) / 2, starts.clip(first, last - sizes), starts)
        order = starts.argsort()
        stops = (starts + sizes)[order]
        inside = starts.min() >= first and stops.max() <= last
        if inside and (starts[order][1:] - stops[:-1] > GAP).all():
            return [int(start) for start in starts]
    # No room was found: the free slices are distributed at random between the blocks, in a random order.
    order = random.permutation(len(sizes))
    free = last - first - int(sizes.sum()) - (GAP + 1) * (len(sizes) - 1)
    before = np.concatenate([[0], (sizes[order] + GAP + 1).cumsum()[:-1]])
    starts = np.empty(len(sizes), int)
    starts[order] = first + before + np.sort(random.integers(0, free + 1, len(sizes)))
    return [int(start) for start in starts]
