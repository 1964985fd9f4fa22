"""The test scans of a split with every method's results on them, as the statistics need them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Annotated, Literal, get_args

import numpy as np
import torch
from jaxtyping import Bool, Float, Float64, Int, Int64, Shaped
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.records import NULL_IS_NAN, Between
from normal_guidance.core.arrays import bag_of_rows, place_in_bag, sum_per_bag
from normal_guidance.core.bags import UNKNOWN, LabelledScans
from normal_guidance.core.metrics import localization, scan_level

Metric = Literal["localization_auroc", "localization_auprc", "scan_auroc", "scan_auprc"]

METRICS: tuple[Metric, ...] = get_args(Metric)  # the paper's four result tables, each named after its field of `Scores`

SHARE = Between(0.0, 1.0)


@dataclass(frozen=True)
class Scores:
    """Localization over the positive scans with slices of both classes, and classification over all scans."""

    localization_auroc: Annotated[float, SHARE, NULL_IS_NAN]
    localization_auprc: Annotated[float, SHARE, NULL_IS_NAN]
    scan_auroc: Annotated[float | None, SHARE, NULL_IS_NAN]
    scan_auprc: Annotated[float | None, SHARE, NULL_IS_NAN]
    localized: Annotated[int, Between(0.0)]  # scans on which localization was measured
    left_out: Annotated[int, Between(0.0)]  # positive scans whose slice labels are missing or all of one class


def score(
    bags: LabelledScans, slice_scores: Float[Tensor, "slices"], scan_scores: Float[Tensor, "scans"] | None = None
) -> Scores:
    """The scores of one method; localization is NaN where no slice is labelled, and `scan_scores` None without any."""
    # Negative scans have no positive slice, so `localization` leaves them out by itself.
    known = torch.full(slice_scores.shape, UNKNOWN) if bags.slice_labels is None else bags.slice_labels
    localized = localization(slice_scores, known, bags.lengths)
    scans = None if scan_scores is None else scan_level(scan_scores, bags.labels)
    return Scores(
        localization_auroc=localized.mean_auroc.item(),
        localization_auprc=localized.mean_auprc.item(),
        scan_auroc=None if scans is None else scans.auroc.item(),
        scan_auprc=None if scans is None else scans.auprc.item(),
        localized=len(localized.kept),
        left_out=int(bags.labels.sum()) - len(localized.kept),
    )


PerScan = Float64[np.ndarray, "scans"]


@dataclass(frozen=True)
class MethodResults:
    """One method's results on the test scans: localization within each scan (NaN if undefined), and any scan scores."""

    auroc: PerScan
    auprc: PerScan
    scan_scores: PerScan | None = None


@dataclass(frozen=True)
class SplitResults:
    """The test scans of one split, and the results of every method on exactly these scans."""

    scan_ids: tuple[str, ...]
    patient_ids: tuple[str, ...]
    labels: Int64[np.ndarray, "scans"]
    methods: Mapping[str, MethodResults]

    def __post_init__(self) -> None:
        scans = len(self.labels)
        sizes = {"scan_ids": len(self.scan_ids), "patient_ids": len(self.patient_ids)}
        if wrong := [f"{size} {name}" for name, size in sizes.items() if size != scans]:
            raise UserError(f"{wrong[0]} for {scans} labels; give one for each scan")
        if doubled := [scan for scan, count in Counter(self.scan_ids).items() if count > 1]:
            raise UserError(f"scan {doubled[0]!r} is tested twice in one split; give every scan once")
        if wrong_labels := set(self.labels.tolist()) - {0, 1}:
            raise UserError(f"label {min(wrong_labels)} is neither 0 nor 1; leave scans without a label out")
        if not self.methods:
            raise UserError("no method was tested; give at least one")
        for method, measured in self.methods.items():
            values = {"auroc": measured.auroc, "auprc": measured.auprc, "scan scores": measured.scan_scores}
            for name, value in values.items():
                if value is not None and len(value) != scans:
                    raise UserError(f"{method!r} has {len(value)} {name} for {scans} scans; give one for each")
            for name in ("auroc", "auprc"):
                # A paired comparison needs the same scans; if only one method has NaN, its slice scores hold NaN.
                differs = np.flatnonzero(np.isfinite(getattr(measured, name)) != self.localized)
                if len(differs):
                    raise UserError(
                        f"scan {self.scan_ids[differs[0]]!r} has a localization {name} by some methods and not by "
                        f"others ({method!r} among them); all methods must score all slices of the same scans"
                    )
            if measured.scan_scores is not None and np.isnan(measured.scan_scores).any():
                scan = self.scan_ids[int(np.isnan(measured.scan_scores).argmax())]
                raise UserError(f"{method!r} has no score for scan {scan!r}; score all scans or none")

    @property
    def localized(self) -> Bool[np.ndarray, "scans"]:
        """Which scans have a localization: positive scans with slices of both classes."""
        return np.isfinite(next(iter(self.methods.values())).auroc)


def split_results(
    scans: LabelledScans,
    slice_scores: Mapping[str, Float[Tensor, "slices"]],
    scan_scores: Mapping[str, Float[Tensor, "scans"]],
) -> SplitResults:
    """The results of one split, from the methods' scores of its packed slices and of its scans."""
    # A method without an entry in `scan_scores`, or with NaN for every scan (the centred Gaussian), has no scan score.
    # Scans without slice labels have no localization.
    if unknown := [method for method in scan_scores if method not in slice_scores]:
        raise UserError(f"{unknown[0]!r} scores scans but no slices; give its slice scores, or leave it out")
    tested: dict[str, MethodResults] = {}
    for method, scores in slice_scores.items():
        auroc, auprc = np.full((2, len(scans.labels)), np.nan)
        if scans.slice_labels is not None:
            localized = localization(scores, scans.slice_labels, scans.lengths)
            kept = localized.kept.cpu().numpy()
            auroc[kept], auprc[kept] = localized.auroc.cpu().numpy(), localized.auprc.cpu().numpy()
        of_scans = scan_scores.get(method)
        if of_scans is not None:
            of_scans = None if of_scans.isnan().all() else of_scans.detach().cpu().double()
        tested[method] = MethodResults(auroc, auprc, None if of_scans is None else of_scans.numpy())
    return SplitResults(tuple(scans.scan_ids), tuple(scans.patient_ids), scans.labels.cpu().long().numpy(), tested)


@dataclass(frozen=True)
class Patients:
    """The patients of all splits together, numbered, and whether each has a positive scan; made by `patients_of`."""

    ids: tuple[str, ...]
    positive: Bool[np.ndarray, "patients"]
    of_scans: tuple[Int64[np.ndarray, "_"], ...]  # for each split, the patient number of every scan

    def counted(self, chosen: Sequence[Bool[np.ndarray, "_"]]) -> int:
        """The number of patients to whom the chosen scans of the splits belong."""
        return len(np.unique(np.concatenate([of[scans] for of, scans in zip(self.of_scans, chosen, strict=True)])))


def patients_of(splits: Sequence[SplitResults]) -> Patients:
    """The patients of all splits; the splits must agree on the methods, and on the scans that they share."""
    if not splits:
        raise UserError("no split was given; test at least one")
    _check_agreement(splits)
    ids = tuple(sorted({patient for split in splits for patient in split.patient_ids}))
    number = {patient: i for i, patient in enumerate(ids)}
    of_scans = tuple(np.array([number[patient] for patient in split.patient_ids], dtype=np.int64) for split in splits)
    positive = np.zeros(len(ids), dtype=bool)
    for split, of in zip(splits, of_scans, strict=True):
        positive[of[split.labels == 1]] = True
    return Patients(ids, positive, of_scans)


def _check_agreement(splits: Sequence[SplitResults]) -> None:
    first, seen = splits[0], dict[str, tuple[str, int]]()
    for i, split in enumerate(splits):
        if differing := sorted(set(split.methods) ^ set(first.methods)):
            raise UserError(f"method {differing[0]!r} was tested in some splits only; test it in all, or leave it out")
        for method, measured in split.methods.items():
            if (measured.scan_scores is None) != (first.methods[method].scan_scores is None):
                raise UserError(
                    f"{method!r} has scan scores in some splits only; score scans in all of them or in none"
                )
        for scan, *facts in zip(split.scan_ids, split.patient_ids, split.labels.tolist(), strict=True):
            known = seen.setdefault(scan, (facts[0], facts[1]))
            if known != tuple(facts):
                raise UserError(
                    f"scan {scan!r} has patient and label {known} in one split and {tuple(facts)} in split {i + 1}; "
                    "give different scans different ids"
                )


UNITS = 2**40
"""The sum of a scan's attention as whole numbers. Sums of whole numbers are exact in any order, on any device and after
any number of scans; 64 bits have room for 8 million scans."""


@dataclass(frozen=True)
class PackedScans:
    """The start and stop of each packed scan, and the scan of each slice."""

    lengths: Int64[Tensor, "scans"]
    starts: Int64[Tensor, "scans"]
    stops: Int64[Tensor, "scans"]
    of_slice: Int64[Tensor, "slices"]

    @classmethod
    def of(cls, lengths: Int[Tensor, "scans"]) -> PackedScans:
        """The scans with these numbers of slices, each at least 1."""
        lengths = lengths.long()
        stops = lengths.cumsum(0)
        return cls(lengths, stops - lengths, stops, bag_of_rows(lengths))

    @property
    def places(self) -> Int64[Tensor, "slices"]:
        """Each slice's place in its scan, counted from 0."""
        return place_in_bag(self.lengths)

    def count(self, values: Shaped[Tensor, "slices"]) -> Int64[Tensor, "scans"]:
        """The sum of flags or whole numbers in each scan, exact."""
        return sum_per_bag(values, self.lengths)

    def reduce(self, values: Shaped[Tensor, "slices"], how: Literal["sum", "amin", "amax"]) -> Shaped[Tensor, "scans"]:
        """The sum, minimum or maximum of each scan; NaN affects its own scan only."""
        empty = values.new_zeros(len(self.lengths))
        return empty.scatter_reduce(0, self.of_slice, values, how, include_self=False)

    def locate(self, flags: Shaped[Tensor, "slices"]) -> tuple[int, int]:
        """The scan of the first flagged slice, and the slice's place in it."""
        first = int(flags.nonzero()[0])
        return int(self.of_slice[first]), int(self.places[first])


def whole_numbers(attention: Float[Tensor, "slices"], scans: PackedScans) -> Int64[Tensor, "slices"]:
    """Attention as whole numbers that add up to about `UNITS` in each scan."""
    attention = attention.detach().double()
    wrong = ~(attention.isfinite() & (attention >= 0))
    if wrong.any():
        scan, index = scans.locate(wrong)
        raise UserError(
            f"scan {scan}, position {index}: attention {attention[wrong][0].item()} is not a finite number of 0 or "
            "more; pass attention, not its logarithm, of a model that has not diverged"
        )
    total = scans.reduce(attention, "sum")
    if (total <= 0).any():
        scan = int((total <= 0).nonzero()[0])
        raise UserError(f"scan {scan}: attention is 0 on all of its slices, so no slice holds a share of it")
    return (attention / total[scans.of_slice] * UNITS).round().long()
