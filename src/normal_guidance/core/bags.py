"""Scans as bags of slices: packed features of any length, labels and ids, checked once on creation."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import index
from typing import Any, Protocol, overload, runtime_checkable

import torch
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from normal_guidance.base.errors import UserError, shorten
from normal_guidance.base.system import size_text
from normal_guidance.core.arrays import Array, as_tensor, check_device, find_bags, sum_per_bag
from normal_guidance.core.layout import Layout

UNKNOWN = -1  # the slice label of every slice in a scan without slice labels
CHECK_ROWS = 65_536  # rows checked for NaN at a time, which limits memory


GIVE_PACKED = (
    "Bags(features, lengths, labels) takes the slices of all scans one below the other; for one array a scan, write "
    "Bags.from_arrays(arrays, labels)"
)


def _fill(bag: Bag | Bags, **fields: object) -> None:
    """Sets fields of a frozen dataclass, which only its own making may do."""
    for name, value in fields.items():
        object.__setattr__(bag, name, value)


@dataclass(frozen=True, eq=False, init=False)
class Bag:
    """One scan: features `(slices, features)` in spatial order, its label, and its slice labels if known.

    Numbers may be tensors, numpy arrays, pandas columns or lists; the bag holds tensors.  Features that are not a
    tensor yet become float32 where they were float64, numpy's default, or whole numbers.

    Args:
        features: `(slices, features)`.
        label: 0 or 1, as a number or as a tensor or an array of one.
        slice_labels: one 0 or 1 per slice.
        scan_id: a name.
        patient_id: whose scan it is.

    Example:
        >>> Bag(torch.zeros(3, 8), label=1, slice_labels=[0, 1, 1], scan_id="A17").features.shape
        torch.Size([3, 8])
    """

    features: Float[Tensor, "slices features"]
    label: int
    slice_labels: Int[Tensor, "slices"] | None = None
    scan_id: str | None = None
    patient_id: str | None = None

    def __init__(
        self,
        features: Array,
        label: object,
        slice_labels: Array | None = None,
        scan_id: object = None,
        patient_id: object = None,
    ) -> None:
        who = "the scan" if scan_id is None else f"scan {str(scan_id)!r}"
        rows = _as_features(features, f"{who}: features")
        _fill(
            self,
            features=rows,
            label=_as_label(label, who),
            slice_labels=None if slice_labels is None else _as_slice_labels(slice_labels, rows, who),
            scan_id=None if scan_id is None else str(scan_id),
            patient_id=None if patient_id is None else str(patient_id),
        )

    def __repr__(self) -> str:
        parts = ["a scan without a name" if self.scan_id is None else repr(self.scan_id)]
        parts += [f"{len(self.features)} slices x {self.features.shape[1]} features", f"label {self.label}"]
        parts += [] if self.slice_labels is None else [f"{int((self.slice_labels == 1).sum())} positive slices"]
        return f"Bag({', '.join(parts)})"


def _as_features(values: Array, name: str) -> Float[Tensor, "rows features"]:
    rows = as_tensor(values, name)
    if rows is not values and (rows.dtype == torch.float64 or not rows.is_floating_point()):
        rows = rows.to(torch.get_default_dtype())
    if rows.ndim != 2:
        raise UserError(f"{name} of shape {tuple(rows.shape)}; give (slices, features), a row for each slice")
    if not rows.is_floating_point():
        raise UserError(f"{name}: {rows.dtype}; expected floats: write features.float()")
    return rows


def _as_slice_labels(values: Array, rows: Tensor, who: str) -> Int[Tensor, "slices"]:
    labels = as_tensor(values, f"{who}: slice_labels", rows)
    if labels.shape != rows.shape[:1]:
        count = len(labels) if labels.ndim == 1 else f"shape {tuple(labels.shape)} of"
        raise UserError(f"{who}: {count} slice labels for {len(rows)} slices; give one for each slice")
    _refuse_wrong_slice_labels(labels, lambda row: (who, row))
    return labels.long()


def _refuse_wrong_slice_labels(labels: Shaped[Tensor, "slices"], locate: Callable[[int], tuple[str, int]]) -> None:
    """Refuse labels other than 0, 1 and unknown; `locate` says which slice of which scan a row is."""
    wrong = ((labels != 0) & (labels != 1) & (labels != UNKNOWN)).nonzero().flatten()
    if len(wrong):
        who, position = locate(int(wrong[0]))
        raise UserError(
            f"{who}, position {position}: label {labels[wrong[0]].item()}; slice labels are 0 or 1, or {UNKNOWN} for "
            "all slices of a scan without labels"
        )


def _as_label(label: object, who: str) -> int:
    single = label.numel() == 1 if isinstance(label, Tensor) else getattr(label, "size", 1) == 1
    value = label.item() if hasattr(label, "item") and single else label
    if not isinstance(value, int | float) or value not in (0, 1):
        raise UserError(f"{who} has label {value!r}; labels are 0 or 1")
    return int(value)


def number_of_scan(scan: int | str, scan_ids: Sequence[str], where: str) -> int:
    """The number of a scan, counted from 0, by its id, or by a number that may count from the end."""
    if not isinstance(scan, str):
        try:
            return range(len(scan_ids))[index(scan)]
        except (IndexError, TypeError) as error:  # not a UserError: Python's sequences end with an IndexError
            raise type(error)(
                f"no scan {scan!r} in {where}; give its id, or its number from 0 to {len(scan_ids) - 1}"
            ) from None
    if scan not in scan_ids:
        raise UserError(f"no scan {scan!r} in {where}; its {len(scan_ids)} scans are {shorten(', '.join(scan_ids))}")
    return scan_ids.index(scan)


@dataclass(frozen=True, eq=False, repr=False, init=False)
class Bags:
    """Many scans, packed: all slices one below the other, and the number of slices of each scan.

    Numbers may be tensors, numpy arrays, pandas columns or lists; the bags hold tensors.  `Bags.from_arrays` makes them
    of a list with one array for each scan, `Bags.pack` of a list of `Bag`, and `collate` of what a `Dataset` gives.

    Args:
        features: `(slices, features)`, finite; float64 arrays become float32 tensors, while a tensor keeps its dtype.
        lengths: slices per scan, each at least 1, adding up to all slices.
        labels: one 0 or 1 per scan.
        slice_labels: one 0 or 1 per slice, `UNKNOWN` (-1) for every slice of a scan without slice labels; None if no
            scan has any.  Used for evaluation only.
        scan_ids: unique names; numbered by default.
        patient_ids: one per scan; by default each scan is its own patient.

    A positive scan whose slice labels are missing or all of one class is kept for scan scores, but is not
    `localizable`; `repr` counts such scans.

    Example:
        >>> bags = Bags(torch.randn(5, 8), lengths=[2, 3], labels=[0, 1], slice_labels=[0, 0, 0, 1, 1])
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

    def __init__(
        self,
        features: Array,
        lengths: Array,
        labels: Array | None = None,
        slice_labels: Array | None = None,
        scan_ids: Sequence[str] = (),
        patient_ids: Sequence[str] = (),
    ) -> None:
        first = features[0] if isinstance(features, list | tuple) and features else None
        if getattr(first, "ndim", 1) > 1 or getattr(features, "ndim", 2) == 3:
            what = f"{type(features).__name__} of {len(features)} arrays"  # type: ignore[arg-type]
            raise UserError(f"features: got a {what}; {GIVE_PACKED}")
        if labels is None:
            raise UserError(f"Bags: got no labels; {GIVE_PACKED}")
        rows = _as_features(features, "features")
        _fill(
            self,
            features=rows,
            lengths=_vector(lengths, "lengths", rows, "scan"),
            labels=_vector(labels, "labels", rows, "scan"),
            slice_labels=None if slice_labels is None else _vector(slice_labels, "slice_labels", rows, "slice"),
        )
        names = checked_ids(scan_ids, "scan_ids") or tuple(f"scan-{i}" for i in range(len(self.lengths)))
        _fill(self, scan_ids=names, patient_ids=checked_ids(patient_ids, "patient_ids") or names)
        if len(self.lengths) and (self.lengths.is_floating_point() or self.lengths.dtype == torch.bool):
            raise UserError(f"lengths: {self.lengths.dtype}; expected integers, the slices of each scan")
        _check_sizes(self)
        _check_slice_labels(self)
        whole = None if self.slice_labels is None else self.slice_labels.long()
        _fill(self, labels=self.labels.long(), lengths=self.lengths.long(), slice_labels=whole)
        _check_finite(self)

    @classmethod
    def from_arrays(
        cls,
        arrays: Iterable[Array],
        labels: Array,
        *,
        slice_labels: Sequence[Array | None] | None = None,
        scan_ids: Sequence[str] = (),
        patient_ids: Sequence[str] = (),
    ) -> Bags:
        """The bags of a list with one array `(slices, features)` for each scan.

        An array `(scans, slices, features)` is taken, too, if no scan in it ends with padding.  Labels and ids are as
        in `Bags`.

        Args:
            arrays: the features of each scan, as tensors, numpy arrays or lists.
            slice_labels: for each scan one 0 or 1 per slice, or None for a scan without slice labels.

        Example:
            >>> arrays = [torch.randn(2, 8), torch.randn(3, 8)]
            >>> Bags.from_arrays(arrays, [0, 1], slice_labels=[None, [0, 1, 1]])
            Bags(2 scans of 2-3 slices (median 2), 5 slices x 8 features, 1 positive (50.0 %), 1 localizable, 160 B)
        """
        scans, known = _as_list(arrays), as_tensor(labels, "labels").flatten()
        names = checked_ids(scan_ids, "scan_ids") or tuple(f"scan-{number}" for number in range(len(scans)))
        if not isinstance(slice_labels, Iterable | None):
            raise UserError(
                f"slice_labels: got {type(slice_labels).__name__}; give a list with one vector for each scan"
            )
        of_slices = [None] * len(scans) if slice_labels is None else list(slice_labels)
        patients = checked_ids(patient_ids, "patient_ids") or names
        given = {"labels": known, "slice_labels": of_slices, "scan_ids": names, "patient_ids": patients}
        _check_one_per_scan(len(scans), given)
        return cls.pack([Bag(*scan) for scan in zip(scans, known, of_slices, names, patients, strict=True)])

    @classmethod
    def pack(cls, bags: Sequence[Bag]) -> Bags:
        """Pack scans; `unpack` is the exact inverse.

        Example:
            >>> Bags.pack([Bag(torch.zeros(2, 8), 0), Bag(torch.ones(3, 8), 1)]).lengths
            tensor([2, 3])
        """
        if not isinstance(bags, Sequence):
            raise UserError(f"bags: got {type(bags).__name__}; give a list of Bag: Bag(features, label)")
        wrong = next((bag for bag in bags if not isinstance(bag, Bag)), None)
        if wrong is not None:
            raise UserError(f"bags: got {type(wrong).__name__} in the list; give a list of Bag: Bag(features, label)")
        if not bags:
            raise UserError("no scans to pack; give at least one Bag")
        ids = tuple(f"scan-{i}" if bag.scan_id is None else bag.scan_id for i, bag in enumerate(bags))
        for scan, bag in zip(ids, bags, strict=True):
            if bag.features.shape[1] != bags[0].features.shape[1]:
                raise UserError(
                    f"scan {scan!r}: features of shape {tuple(bag.features.shape)}, while the first scan has "
                    f"{tuple(bags[0].features.shape)}; every scan needs (slices, features) with the same features"
                )
        device = bags[0].features.device
        known = any(bag.slice_labels is not None for bag in bags)
        of_slices = [
            torch.full((len(bag.features),), UNKNOWN, device=device) if bag.slice_labels is None else bag.slice_labels
            for bag in bags
        ]
        return cls(
            features=torch.cat([bag.features for bag in bags]),
            lengths=torch.tensor([len(bag.features) for bag in bags], device=device),
            labels=torch.tensor([bag.label for bag in bags], device=device),
            slice_labels=torch.cat(of_slices) if known else None,
            scan_ids=ids,
            patient_ids=tuple(
                scan if bag.patient_id is None else bag.patient_id for scan, bag in zip(ids, bags, strict=True)
            ),
        )

    def unpack(self) -> list[Bag]:
        """The scans as a list of views: the inverse of `pack`."""
        return list(self)

    def __len__(self) -> int:
        return len(self.lengths)

    @overload
    def __getitem__(self, index: int | str) -> Bag: ...
    @overload
    def __getitem__(self, index: slice | Array) -> Bags: ...

    def __getitem__(self, index: int | str | slice | Array) -> Bag | Bags:
        """One scan by number or id; several as `Bags` by slice, list, array or tensor of numbers or booleans."""
        if isinstance(index, str):
            return self._bag(number_of_scan(index, self.scan_ids, "the bags"))
        if isinstance(index, slice):
            return self._select(range(len(self))[index])
        numbers = as_tensor(index, "scans") if not isinstance(index, int) else torch.tensor(index)
        if (numbers.numel() and numbers.is_floating_point()) or numbers.ndim > 1:
            raise UserError(f"scans: got {numbers.dtype} of shape {tuple(numbers.shape)}; give numbers of scans")
        if numbers.ndim == 0:
            return self._bag(*self._places([int(numbers)]))
        if numbers.dtype == torch.bool:
            if len(numbers) != len(self):
                raise UserError(f"a boolean choice of {len(numbers)} for {len(self)} scans; give one per scan")
            numbers = numbers.nonzero().flatten()
        return self._select(self._places(numbers.tolist()))

    def _places(self, numbers: Sequence[int]) -> list[int]:
        """The numbers of scans, those counted from the end turned into those from the start."""
        return [number_of_scan(int(number), self.scan_ids, "the bags") for number in numbers]

    def __iter__(self) -> Iterator[Bag]:
        return (self[i] for i in range(len(self)))

    def batches(
        self, size: int, *, generator: torch.Generator | None = None, shuffle: bool = False, drop_last: bool = False
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
        check_device(device)
        return self._with_tensors(lambda tensor: tensor.to(device, dtype if tensor is self.features else None))

    def pin_memory(self) -> Bags:
        """A copy in pinned memory, as a `DataLoader` with `pin_memory=True` asks for it."""
        return self._with_tensors(Tensor.pin_memory)

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
    def memory(self) -> int:
        """The size of the features in bytes."""
        return self.features.element_size() * self.features.nelement()

    def __repr__(self) -> str:
        if not len(self):
            return f"Bags(no scans, {self.features.shape[1]} features)"
        parts = sizes_in_words(self)
        if self.slice_labels is not None:
            localizable = int(self.localizable.sum())
            left_out = int((self.labels == 1).sum()) - localizable
            parts.append(f"{localizable} localizable")
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

    def _with_tensors(self, change: Callable[[Tensor], Tensor]) -> Bags:
        """A copy with every tensor changed."""
        fields = {name: getattr(self, name) for name in self.__dataclass_fields__}
        return self._unchecked(**{name: change(value) for name, value in fields.items() if isinstance(value, Tensor)})

    def _unchecked(self, **changes: object) -> Bags:
        """A part or a copy of these bags, which are checked already."""
        made = object.__new__(Bags)
        _fill(made, **{name: getattr(self, name) for name in self.__dataclass_fields__} | changes)
        return made


@runtime_checkable
class ScanSet(Protocol):
    """A set of scans to train on, such as `Bags` or a feature store; training sees no slice labels."""

    @property
    def lengths(self) -> Int[Tensor, "scans"]: ...
    @property
    def labels(self) -> Int[Tensor, "scans"]: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def rows(self, scans: Int[Tensor, "chosen"]) -> Float[Tensor, "slices features"]: ...


@runtime_checkable
class LabelledScans(ScanSet, Protocol):
    """Scans with everything that measuring needs, such as `Bags` or a feature store."""

    @property
    def slice_labels(self) -> Int[Tensor, "slices"] | None: ...
    @property
    def scan_ids(self) -> tuple[str, ...]: ...
    @property
    def patient_ids(self) -> tuple[str, ...]: ...
    def __len__(self) -> int: ...


def sizes_in_words(scans: ScanSet) -> list[str]:
    """Scans, slices and positives, for a repr."""
    lengths, positive = scans.lengths, int(scans.labels.sum())
    return [
        f"{len(lengths)} scans of {int(lengths.min())}-{int(lengths.max())} slices (median {int(lengths.median())})",
        f"{int(lengths.sum())} slices x {scans.width} features",
        f"{positive} positive ({100 * positive / len(lengths):.1f} %)",
    ]


def collate(scans: Sequence[Bag | Sequence[Any]]) -> Bags:
    """One batch of what a `Dataset` gives for each scan: the `collate_fn` of a `torch.utils.data.DataLoader`.

    Scans may have any number of slices; nothing is padded.  A scan that a sampler draws twice is in the batch twice,
    and its second copy is called `A17 (2)`.

    Args:
        scans: `Bag`, or `(features, label)`, or `(features, label, slice_labels)`, for each scan.

    Example:
        >>> from torch.utils.data import DataLoader, Dataset
        >>> class Scans(Dataset):
        ...     def __len__(self):
        ...         return 4
        ...     def __getitem__(self, number):
        ...         return torch.randn(10 + number, 8), number % 2  # read a file here
        >>> for batch in DataLoader(Scans(), batch_size=2, collate_fn=collate):
        ...     print(batch.features.shape, batch.lengths, batch.labels)
        torch.Size([21, 8]) tensor([10, 11]) tensor([0, 1])
        torch.Size([25, 8]) tensor([12, 13]) tensor([0, 1])
    """
    if isinstance(scans, str) or not isinstance(scans, Sequence):
        raise UserError(f"scans: got {type(scans).__name__}; give a list of Bag or of (features, label)")
    if not scans:
        raise UserError("scans: the list is empty; a batch needs at least one scan")
    bags = [_as_bag(scan, number) for number, scan in enumerate(scans)]
    seen: Counter[str] = Counter()
    for number, bag in enumerate(bags):
        if bag.scan_id is not None:
            seen[bag.scan_id] += 1
            if seen[bag.scan_id] > 1:
                patient = bag.scan_id if bag.patient_id is None else bag.patient_id
                bags[number] = replace(bag, scan_id=f"{bag.scan_id} ({seen[bag.scan_id]})", patient_id=patient)
    return Bags.pack(bags)


def _as_bag(scan: object, number: int) -> Bag:
    if isinstance(scan, Bag):
        return scan
    if not isinstance(scan, tuple | list) or not 2 <= len(scan) <= 3:
        what = f"{len(scan)} values" if isinstance(scan, tuple | list) else type(scan).__name__
        raise UserError(f"scan {number} of the batch: got {what}; the dataset should give Bag or (features, label)")
    try:
        return Bag(*scan)
    except UserError as error:
        raise UserError(f"scan {number} of the batch: {error}") from error


def looks_padded(rows: Float[Tensor, "slices features"]) -> bool:
    """Whether the last slice is 0 throughout, as padding is and no encoder's output."""
    return not bool(rows[-1:].nan_to_num().any())


def _as_list(arrays: Iterable[Array]) -> list[Array]:
    """One array for each scan, of a list or of an array with one more axis."""
    if isinstance(arrays, str | bytes | Mapping | Bags) or not isinstance(arrays, Iterable):
        raise UserError(f"arrays: got {type(arrays).__name__}; give a list of arrays (slices, features), one a scan")
    axes = getattr(arrays, "ndim", None)
    if axes is not None and axes != 3:
        raise UserError(
            f"arrays: got one array of shape {tuple(getattr(arrays, 'shape', ()))}; give a list of arrays (slices, "
            "features), one a scan"
        )
    scans = list(arrays)
    if not scans:
        raise UserError("arrays: the list is empty; give one array (slices, features) for each scan")
    padded = [number for number, scan in enumerate(scans) if axes == 3 and looks_padded(as_tensor(scan, "arrays"))]
    if padded:
        raise UserError(
            f"arrays: the last slice of scan {padded[0]} is 0 throughout, like padding ({len(padded)} such scans); "
            "give each scan without it: [scan[:n] for scan, n in zip(arrays, lengths)]"
        )
    return scans


def _vector(values: Array, name: str, rows: Tensor, what: str) -> Shaped[Tensor, "values"]:
    tensor = as_tensor(values, name, rows)
    if tensor.ndim != 1:
        raise UserError(f"{name} of shape {tuple(tensor.shape)}; give a vector, one number for each {what}")
    return tensor


def checked_ids(ids: Sequence[str], name: str) -> tuple[str, ...]:
    """The ids as texts; what is not a list of them is refused."""
    if isinstance(ids, str) or not isinstance(ids, Iterable):
        raise UserError(f"{name}: got {type(ids).__name__} {ids!r}; give a list, one for each scan, or leave it out")
    return tuple(map(str, ids))


def _check_one_per_scan(scans: int, given: Mapping[str, Sized]) -> None:
    for name, values in given.items():
        if len(values) != scans:
            raise UserError(f"{name}: {len(values)} for {scans} scans; give one per scan")


def _check_sizes(bags: Bags) -> None:
    scans = len(bags.lengths)
    _check_one_per_scan(scans, {name: getattr(bags, name) for name in ("labels", "scan_ids", "patient_ids")})
    doubled = [name for name, count in Counter(bags.scan_ids).items() if count > 1]
    if doubled:
        raise UserError(f"scan {doubled[0]!r} appears more than once ({len(doubled)} such ids); ids must be unique")
    empty = (bags.lengths < 1).nonzero().flatten().tolist()
    if empty:
        raise UserError(
            f"scan {bags.scan_ids[empty[0]]!r} has no slices ({len(empty)} such scans); leave empty scans out"
        )
    slices = len(bags.features)
    if int(bags.lengths.sum()) != slices:
        raise UserError(
            f"lengths add up to {int(bags.lengths.sum())}, but features hold {slices} slices; the last scan is "
            f"{bags.scan_ids[-1] if scans else None!r}: check that no slice was dropped or doubled"
        )
    if bags.slice_labels is not None and len(bags.slice_labels) != slices:
        raise UserError(f"slice_labels: {len(bags.slice_labels)} for {slices} slices; give one per slice")
    wrong = ((bags.labels != 0) & (bags.labels != 1)).nonzero().flatten().tolist()
    if wrong:
        value = bags.labels[wrong[0]].item()
        raise UserError(
            f"scan {bags.scan_ids[wrong[0]]!r} has label {value} ({len(wrong)} such scans); labels are 0 or 1"
        )


def _check_slice_labels(bags: Bags) -> None:
    labels = bags.slice_labels
    if labels is None:
        return
    _refuse_wrong_slice_labels(labels, partial(_locate, bags))
    unknown = sum_per_bag(labels == UNKNOWN, bags.lengths.long())
    mixed = ((unknown > 0) & (unknown < bags.lengths)).nonzero().flatten().tolist()
    if mixed:
        raise UserError(
            f"scan {bags.scan_ids[mixed[0]]!r}: {int(unknown[mixed[0]])} of {int(bags.lengths[mixed[0]])} slices have "
            f"no label ({len(mixed)} such scans); label all slices of a scan or none"
        )
    against = ((bags.labels == 0) & (bags.positive_slices > 0)).nonzero().flatten().tolist()
    if against:
        raise UserError(
            f"scan {bags.scan_ids[against[0]]!r} is labelled negative but has {int(bags.positive_slices[against[0]])} "
            f"positive slices ({len(against)} such scans); correct the label of the scan or of its slices"
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
        who, position = _locate(bags, start + row)
        raise UserError(
            f"{who}, position {position}, feature {column}: value {rows[row, column].item()}; "
            "features must be finite: encode this scan again or leave it out"
        )


def _locate(bags: Bags, row: int) -> tuple[str, int]:
    """The scan of a row, for a message, and the row's place in the scan."""
    scan = int(find_bags(torch.tensor([row], device=bags.lengths.device), bags.lengths))
    return f"scan {bags.scan_ids[scan]!r}", row - int(bags.lengths[:scan].sum())
