"""Scans as bags of slices: packed features of any length, labels and ids, checked once on creation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import overload

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from normal_guidance.core.layout import Layout
from normal_guidance.core.packed import find_bags, sum_per_bag
from normal_guidance.errors import UserError
from normal_guidance.quantities import size_text

UNKNOWN = -1
"""The slice label of every slice in a scan without slice labels."""

CHECK_ROWS = 65_536
"""Rows checked for NaN at a time, which limits memory."""


@dataclass(frozen=True, eq=False)
class Bag:
    """One scan: features `(slices, features)` in spatial order, its label, and its slice labels if known.

    Example:
        >>> Bag(torch.zeros(3, 8), label=1, slice_labels=torch.tensor([0, 1, 1]), scan_id="A17").features.shape
        torch.Size([3, 8])
    """

    features: Float[Tensor, "slices features"]
    label: int
    slice_labels: Int[Tensor, "slices"] | None = None
    scan_id: str | None = None
    patient_id: str | None = None


@dataclass(frozen=True, eq=False, repr=False)
class Bags:
    """Many scans, packed: all slices one below the other, and the number of slices of each scan.

    Args:
        features: `(slices, features)`, finite.
        lengths: slices per scan, each at least 1, adding up to all slices.
        labels: one 0 or 1 per scan.
        slice_labels: one 0 or 1 per slice, `UNKNOWN` (-1) for every slice of a scan without slice labels; None if no
            scan has any.  Used for evaluation only.
        scan_ids: unique names; numbered by default.
        patient_ids: one per scan; by default each scan is its own patient.

    A positive scan whose slice labels are missing or all of one class is kept for scan scores, but is not
    `localizable`; `repr` counts such scans.

    Example:
        >>> bags = Bags(torch.randn(5, 8), torch.tensor([2, 3]), torch.tensor([0, 1]), torch.tensor([0, 0, 0, 1, 1]))
        >>> bags
        Bags(2 scans of 2-3 slices (median 2), 5 slices x 8 features, 1 positive (50.0 %), 1 localizable, 160 B)
        >>> bags[1].slice_labels
        tensor([0, 1, 1])
        >>> [batch.labels.tolist() for batch in bags.batches(1)]
        [[0], [1]]
    """

    features: Float[Tensor, "slices features"]
    lengths: Int[Tensor, "scans"]
    labels: Int[Tensor, "scans"]
    slice_labels: Int[Tensor, "slices"] | None = None
    scan_ids: tuple[str, ...] = ()
    patient_ids: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        fill = object.__setattr__  # only here may a frozen dataclass be changed
        _check_types(self)
        if not self.scan_ids:
            fill(self, "scan_ids", tuple(f"scan-{i}" for i in range(len(self.lengths))))
        if not self.patient_ids:
            fill(self, "patient_ids", self.scan_ids)
        _check_sizes(self)
        _check_labels(self)
        fill(self, "labels", self.labels.long())
        fill(self, "lengths", self.lengths.long())
        if self.slice_labels is not None:
            fill(self, "slice_labels", self.slice_labels.long())
        _check_slice_labels(self)
        _check_finite(self)

    @classmethod
    def pack(cls, bags: Sequence[Bag]) -> Bags:
        """Pack scans; `unpack` is the exact inverse.

        Example:
            >>> Bags.pack([Bag(torch.zeros(2, 8), 0), Bag(torch.ones(3, 8), 1)]).lengths
            tensor([2, 3])
        """
        if not bags:
            raise UserError("no scans to pack; give at least one Bag")
        ids = tuple(f"scan-{i}" if bag.scan_id is None else bag.scan_id for i, bag in enumerate(bags))
        for scan, bag in zip(ids, bags, strict=True):
            if bag.label not in (0, 1):
                raise UserError(f"scan {scan!r} has label {bag.label}; labels are 0 or 1")
            if bag.features.ndim != 2 or bag.features.shape[1] != bags[0].features.shape[-1]:
                raise UserError(
                    f"scan {scan!r}: features of shape {tuple(bag.features.shape)}, while the first scan has "
                    f"{tuple(bags[0].features.shape)}; every scan needs (slices, features) with the same features"
                )
            if bag.slice_labels is not None and len(bag.slice_labels) != len(bag.features):
                raise UserError(f"scan {scan!r}: {len(bag.slice_labels)} slice labels for {len(bag.features)} slices")
        device = bags[0].features.device
        known = any(bag.slice_labels is not None for bag in bags)
        return cls(
            features=torch.cat([bag.features for bag in bags]),
            lengths=torch.tensor([len(bag.features) for bag in bags], device=device),
            labels=torch.tensor([bag.label for bag in bags], device=device),
            slice_labels=torch.cat([_slice_labels_of(bag) for bag in bags]) if known else None,
            scan_ids=ids,
            patient_ids=tuple(
                scan if bag.patient_id is None else bag.patient_id for scan, bag in zip(ids, bags, strict=True)
            ),
        )

    def unpack(self) -> list[Bag]:
        """The scans as a list of views: the inverse of `pack`."""
        return [self[i] for i in range(len(self))]

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int) -> Bag: ...
    @overload
    def __getitem__(self, index: slice | Sequence[int] | Shaped[Tensor, "chosen"]) -> Bags: ...

    def __getitem__(self, index: int | slice | Sequence[int] | Shaped[Tensor, "chosen"]) -> Bag | Bags:
        """One scan by number; several as `Bags` by slice, or by a list, array or tensor of numbers or booleans."""
        every = range(len(self))
        if isinstance(index, slice):
            return self._select(every[index])
        numbers = torch.as_tensor(index)
        if numbers.ndim == 0:
            return self._bag(every[int(numbers)])
        if numbers.dtype == torch.bool:
            if len(numbers) != len(self):
                raise UserError(f"a boolean choice of {len(numbers)} for {len(self)} scans; give one per scan")
            numbers = numbers.nonzero().flatten()
        return self._select([every[int(number)] for number in numbers])

    def __iter__(self) -> Iterator[Bag]:
        return (self[i] for i in range(len(self)))

    def batches(
        self,
        size: int,
        *,
        generator: torch.Generator | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
    ) -> Iterator[Bags]:
        """Batches of `size` scans, in order or shuffled by `generator`; a smaller last batch is kept or dropped."""
        if size < 1:
            raise UserError(f"batch size is {size}; it must be at least 1")
        order = torch.randperm(len(self), generator=generator) if shuffle else torch.arange(len(self))
        for batch in order.split(size):
            if len(batch) == size or (len(batch) and not drop_last):
                yield self[batch]

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> Bags:
        """A copy with its tensors on `device`, and its features (not its labels) in `dtype`."""
        return self._unchecked(
            features=self.features.to(device=device, dtype=dtype),
            lengths=self.lengths.to(device),
            labels=self.labels.to(device),
            slice_labels=None if self.slice_labels is None else self.slice_labels.to(device),
        )

    @property
    def width(self) -> int:
        """Features per slice."""
        return self.features.shape[1]

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the features."""
        return self.features.dtype

    def rows(self, scans: Int[Tensor, "chosen"]) -> Float[Tensor, "slices features"]:
        """The packed features of the chosen scans, one after the other."""
        starts = self._starts
        return torch.cat([self.features[:0], *(self.features[starts[i] : starts[i + 1]] for i in scans.tolist())])

    @cached_property
    def layout(self) -> Layout:
        """The `Layout` of the slices, for the models."""
        return Layout.packed(self.lengths)

    @cached_property
    def positive_slices(self) -> Int[Tensor, "scans"]:
        """The number of positive slices in each scan."""
        if self.slice_labels is None:
            return torch.zeros_like(self.lengths)
        return sum_per_bag(self.slice_labels == 1, self.lengths)

    @cached_property
    def localizable(self) -> Bool[Tensor, "scans"]:
        """Scans on which localization can be measured: positive, with slices labelled positive and negative."""
        return (self.labels == 1) & (self.positive_slices > 0) & (self.positive_slices < self.lengths)

    @property
    def left_out_of_localization(self) -> int:
        """The number of positive scans whose slice labels are missing or all of one class."""
        return int((self.labels == 1).sum() - self.localizable.sum())

    @property
    def memory(self) -> int:
        """The size of the features in bytes."""
        return self.features.element_size() * self.features.nelement()

    def __repr__(self) -> str:
        if not len(self):
            return f"Bags(no scans, {self.features.shape[1]} features)"
        positive = int(self.labels.sum())
        parts = [
            f"{len(self)} scans of {int(self.lengths.min())}-{int(self.lengths.max())} slices "
            f"(median {int(self.lengths.median())})",
            f"{len(self.features)} slices x {self.features.shape[1]} features",
            f"{positive} positive ({100 * positive / len(self):.1f} %)",
        ]
        if self.slice_labels is not None:
            left_out = self.left_out_of_localization
            parts.append(f"{int(self.localizable.sum())} localizable")
            parts += [f"{left_out} positive but not localizable"] if left_out else []
        return f"Bags({', '.join([*parts, size_text(self.memory)])})"

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *self.lengths.cumsum(0).tolist()]

    def _bag(self, i: int) -> Bag:
        rows = slice(self._starts[i], self._starts[i + 1])
        labels = None if self.slice_labels is None else self.slice_labels[rows]
        known = labels is not None and bool((labels != UNKNOWN).all())
        return Bag(
            features=self.features[rows],
            label=int(self.labels[i]),
            slice_labels=labels if known else None,
            scan_id=self.scan_ids[i],
            patient_id=self.patient_ids[i],
        )

    def _select(self, chosen: Sequence[int]) -> Bags:
        if isinstance(chosen, range) and chosen.step == 1 and len(chosen):
            rows: slice | Tensor = slice(self._starts[chosen.start], self._starts[chosen.stop])  # a view, no copy
        else:
            spans = [torch.arange(self._starts[i], self._starts[i + 1]) for i in chosen]
            rows = torch.cat([torch.arange(0), *spans]).to(self.features.device)
        scans = torch.tensor(list(chosen), dtype=torch.int64, device=self.lengths.device)
        return self._unchecked(
            features=self.features[rows] if isinstance(rows, slice) else self.features.index_select(0, rows),
            lengths=self.lengths[scans],
            labels=self.labels[scans],
            slice_labels=None if self.slice_labels is None else self.slice_labels[rows],
            scan_ids=tuple(self.scan_ids[i] for i in chosen),
            patient_ids=tuple(self.patient_ids[i] for i in chosen),
        )

    def _unchecked(self, **changes: object) -> Bags:
        """A part or a copy of these bags, which are checked already."""
        made = object.__new__(Bags)
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__} | changes
        for name, value in fields.items():
            object.__setattr__(made, name, value)
        return made


def _slice_labels_of(bag: Bag) -> Int[Tensor, "slices"]:
    if bag.slice_labels is not None:
        return bag.slice_labels
    return torch.full((len(bag.features),), UNKNOWN, device=bag.features.device)


def _name(bags: Bags, scan: int) -> str:
    return f"scan {bags.scan_ids[scan]!r}"


def _check_types(bags: Bags) -> None:
    for what, tensor, dimensions in (
        ("features", bags.features, 2),
        ("lengths", bags.lengths, 1),
        ("labels", bags.labels, 1),
        ("slice_labels", bags.slice_labels, 1),
    ):
        if tensor is None and what == "slice_labels":
            continue
        if not isinstance(tensor, Tensor):
            raise UserError(f"{what}: got {type(tensor).__name__}; give a tensor: torch.as_tensor({what})")
        if tensor.ndim != dimensions:
            raise UserError(f"{what}: shape {tuple(tensor.shape)}; expected {dimensions} dimension(s)")
        if tensor.is_floating_point() is not (what == "features") and what != "labels":
            raise UserError(f"{what}: {tensor.dtype}; expected {'floats' if what == 'features' else 'integers'}")


def _check_sizes(bags: Bags) -> None:
    scans = len(bags.lengths)
    for what, count in (
        ("labels", len(bags.labels)),
        ("scan_ids", len(bags.scan_ids)),
        ("patient_ids", len(bags.patient_ids)),
    ):
        if count != scans:
            raise UserError(f"{what}: {count} for {scans} scans; give one per scan")
    doubled = [name for name, count in Counter(bags.scan_ids).items() if count > 1]
    if doubled:
        raise UserError(f"scan {doubled[0]!r} appears more than once ({len(doubled)} such ids); ids must be unique")
    empty = (bags.lengths < 1).nonzero().flatten().tolist()
    if empty:
        raise UserError(f"{_name(bags, empty[0])} has no slices ({len(empty)} such scans); leave empty scans out")
    slices = len(bags.features)
    if int(bags.lengths.sum()) != slices:
        raise UserError(
            f"lengths add up to {int(bags.lengths.sum())}, but features hold {slices} slices; the last scan is "
            f"{bags.scan_ids[-1] if scans else None!r}: check that no slice was dropped or doubled"
        )
    if bags.slice_labels is not None and len(bags.slice_labels) != slices:
        raise UserError(f"slice_labels: {len(bags.slice_labels)} for {slices} slices; give one per slice")


def _check_labels(bags: Bags) -> None:
    wrong = ((bags.labels != 0) & (bags.labels != 1)).nonzero().flatten().tolist()
    if wrong:
        value = bags.labels[wrong[0]].item()
        raise UserError(f"{_name(bags, wrong[0])} has label {value} ({len(wrong)} such scans); labels are 0 or 1")


def _check_slice_labels(bags: Bags) -> None:
    labels = bags.slice_labels
    if labels is None:
        return
    wrong = ((labels != 0) & (labels != 1) & (labels != UNKNOWN)).nonzero().flatten().tolist()
    if wrong:
        scan, position = _locate(bags, wrong[0])
        raise UserError(
            f"{_name(bags, scan)}, slice {position}: label {labels[wrong[0]].item()}; slice labels are 0 or 1, or "
            f"{UNKNOWN} for all slices of a scan without labels"
        )
    unknown = sum_per_bag(labels == UNKNOWN, bags.lengths)
    mixed = ((unknown > 0) & (unknown < bags.lengths)).nonzero().flatten().tolist()
    if mixed:
        raise UserError(
            f"{_name(bags, mixed[0])}: {int(unknown[mixed[0]])} of {int(bags.lengths[mixed[0]])} slices have no label "
            f"({len(mixed)} such scans); label all slices of a scan or none"
        )
    against = ((bags.labels == 0) & (bags.positive_slices > 0)).nonzero().flatten().tolist()
    if against:
        raise UserError(
            f"{_name(bags, against[0])} is labelled negative but has {int(bags.positive_slices[against[0]])} positive "
            f"slices ({len(against)} such scans); correct the label of the scan or of its slices"
        )


def _check_finite(bags: Bags) -> None:
    for start in range(0, len(bags.features), CHECK_ROWS):
        rows = bags.features[start : start + CHECK_ROWS]
        # The sum is not finite if any term is not, so one pass without a mask of the features' size is enough.
        if torch.isfinite(rows.sum()):
            continue
        finite = rows.isfinite()
        if finite.all():
            continue  # finite values whose sum overflows
        row, column = (~finite).nonzero()[0].tolist()
        scan, position = _locate(bags, start + row)
        raise UserError(
            f"{_name(bags, scan)}, slice {position}, feature {column}: value {rows[row, column].item()}; features must "
            "be finite: encode this scan again or leave it out"
        )


def _locate(bags: Bags, row: int) -> tuple[int, int]:
    """The scan of a row, and the row's place in the scan."""
    scan = int(find_bags(torch.tensor([row], device=bags.lengths.device), bags.lengths))
    return scan, row - int(bags.lengths[:scan].sum())
