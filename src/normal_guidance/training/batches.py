"""What the engines train on: scans by number, batches of packed rows, and an epoch's batches laid out in slots."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Protocol, TypeVar, runtime_checkable

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.core.bags import UNKNOWN, Bags
from normal_guidance.core.packed import find_bags
from normal_guidance.core.slotted_layout import SlottedLayout
from normal_guidance.errors import UserError

LOADING_BATCH = 256
"""Scans read together when all features are loaded to the device."""

PREFETCH = 4
"""Batches that a reading thread may be ahead of the engine."""

T = TypeVar("T")
U = TypeVar("U")


@runtime_checkable
class Scans(Protocol):
    """What training needs of a set of scans; `Bags` and a feature store both are one."""

    @property
    def lengths(self) -> Int[Tensor, "scans"]: ...
    @property
    def labels(self) -> Int[Tensor, "scans"]: ...
    @property
    def width(self) -> int: ...
    @property
    def dtype(self) -> torch.dtype: ...
    def rows(self, scans: Int[Tensor, "chosen"]) -> Float[Tensor, "slices features"]:
        """The packed features of the chosen scans."""
        ...


def slice_labels_of(scans: Scans) -> Int[Tensor, "slices"]:
    """The labels of all slices, for a supervised reference: nowhere else does training read them.

    Example:
        >>> slice_labels_of(Bags(torch.zeros(2, 1), torch.tensor([2]), torch.tensor([1])))
        Traceback (most recent call last):
        normal_guidance.errors.UserError: a supervised reference learns slice labels, but 1 scans have none; add them to
        the scans, or leave the reference out
    """
    labels: Tensor | None = getattr(scans, "slice_labels", None)
    if labels is None:
        raise UserError(
            f"a supervised reference learns slice labels, but {len(scans.lengths)} scans have none; add them to the "
            "scans, or leave the reference out"
        )
    return labels


class Targets:
    """What is learnt of scans: their labels or, for a supervised reference, those of their slices, packed.

    Example:
        >>> slice_labels = torch.tensor([0, 0, 1, 0, 1])
        >>> bags = Bags(torch.zeros(5, 1), torch.tensor([2, 3]), torch.tensor([0, 1]), slice_labels)
        >>> [Targets(bags, on_slices=on).of(torch.tensor([1, 0])).tolist() for on in (False, True)]
        [[1, 0], [1, 0, 1, 0, 0]]
    """

    def __init__(self, scans: Scans, *, on_slices: bool) -> None:
        self.labels = scans.labels
        self.of_slices = slice_labels_of(scans).split(scans.lengths.tolist()) if on_slices else None

    def of(self, numbers: Int[Tensor, "chosen"]) -> Int[Tensor, "targets"]:
        """Those of the chosen scans, one after the other."""
        if self.of_slices is None:
            return self.labels[numbers]
        return torch.cat([self.of_slices[number] for number in numbers.tolist()])


def pool_scans(scans: Scans, pool: Callable[[Tensor], Tensor]) -> Bags:
    """Each scan reduced to one row by a pooling without parameters: what follows is logistic regression.

    Mean and max pooling then need one pass over the features, and each of the 1,000 epochs reads one row a scan.

    Example:
        >>> bags = Bags(torch.tensor([[1.0], [3.0], [5.0]]), torch.tensor([2, 1]), torch.tensor([0, 1]))
        >>> pool_scans(bags, lambda rows: rows.mean(0)).features.flatten().tolist()
        [2.0, 5.0]
    """
    dtype = torch.promote_types(scans.dtype, torch.float32)  # a mean of half-precision numbers is not one itself
    rows = [pool(scans.rows(torch.tensor([number])).to(dtype)) for number in range(len(scans.lengths))]
    return Bags(torch.stack(rows), torch.ones_like(scans.lengths), scans.labels)


def prefetch(make: Callable[[T], U], items: Iterable[T]) -> Iterator[U]:
    """`make(item)` for every item, made by a thread that runs ahead; its error is raised here.

    Example:
        >>> [int(x) for x in prefetch(lambda i: torch.tensor(i * i), range(3))]
        [0, 1, 4]
    """
    made: queue.Queue[tuple[U] | BaseException | None] = queue.Queue(PREFETCH)
    stopped = threading.Event()

    def put(value: tuple[U] | BaseException | None) -> None:
        while not stopped.is_set():
            with contextlib.suppress(queue.Full):
                made.put(value, timeout=0.1)
                return

    def work() -> None:
        try:
            for item in items:
                if stopped.is_set():
                    return
                put((make(item),))
            put(None)
        except BaseException as error:  # raised where the batch is asked for
            put(error)

    threading.Thread(target=work, daemon=True).start()
    try:
        while (value := made.get()) is not None:
            if isinstance(value, BaseException):
                raise value
            yield value[0]
    finally:
        stopped.set()


@dataclass(frozen=True, eq=False)
class Directory:
    """Lengths and labels of the scans, on the device; for a supervised reference the labels of their slices, too.

    One more scan, of one row of zeros, stands behind the last: it fills up batches that have too few.
    """

    lengths: Int[Tensor, "scans"]
    labels: Int[Tensor, "scans"]
    slice_labels: Int[Tensor, "slices"] | None = None
    longest: int = 0
    """What slice labels are padded to."""

    @classmethod
    def of(cls, scans: Scans, device: torch.device, slices_to: int | None = None) -> Directory:
        """`slices_to` asks for targets that are slices, and says what to pad them to."""
        one, zero = torch.ones(1, dtype=torch.int64), torch.zeros(1, dtype=torch.int64)
        lengths = torch.cat([scans.lengths.cpu(), one]).to(device)
        labels = torch.cat([scans.labels.cpu(), zero]).to(device)
        if slices_to is None:
            return cls(lengths, labels)
        of_slices = torch.cat([slice_labels_of(scans).cpu().to(torch.int8), torch.tensor([UNKNOWN], dtype=torch.int8)])
        return cls(lengths, labels, of_slices.to(device), slices_to)

    def targets(
        self, scans: Int[Tensor, "*steps bags"]
    ) -> Int[Tensor, "*steps bags"] | Int[Tensor, "*steps bags longest"]:
        """The scans' labels; or those of their slices, `UNKNOWN` in the padding."""
        if self.slice_labels is None:
            return self.labels[scans]
        slot = torch.arange(self.longest, device=scans.device)
        starts = (self.lengths.cumsum(0) - self.lengths)[scans]
        labels = self.slice_labels[(starts[..., None] + slot).clamp_max(len(self.slice_labels) - 1)]
        return torch.where(slot < self.lengths[scans][..., None], labels, UNKNOWN)

    @property
    def filler(self) -> int:
        """The number of the scan that fills up."""
        return len(self.lengths) - 1


@dataclass(frozen=True, eq=False)
class Plan:
    """Every batch of an epoch, laid out in slots: worked out at once, so that a step has nothing left to arrange."""

    source: Int[Tensor, "steps rows"]
    """For each slot the row of the table that stands in it; the table's last row, of zeros, where no slice does."""
    lengths: Int[Tensor, "steps bags"]
    first: Int[Tensor, "steps bags"]
    bag: Int[Tensor, "steps rows"]
    labels: Int[Tensor, "steps bags"] | Int[Tensor, "steps bags longest"]

    @classmethod
    def of(
        cls,
        directory: Directory,
        scans: Int[Tensor, "steps bags"],
        starts: Int[Tensor, "steps bags"],
        zeros: int,
        rows: int,
    ) -> Plan:
        """`starts` says where each scan's rows begin in the table, `zeros` where its row of zeros is."""
        lengths = directory.lengths[scans]
        first = (lengths + 1).cumsum(1) - lengths - 1
        row = torch.arange(rows, device=scans.device)
        bag = find_bags(row, lengths + 1)
        inside = bag.clamp_max(scans.shape[1] - 1)
        position = row - first.gather(1, inside)
        is_slice = (position > 0) & (bag < scans.shape[1])
        source = starts.gather(1, inside) + position - 1
        return cls(
            source=torch.where(is_slice, source, zeros).clamp_max(zeros),
            lengths=lengths,
            first=first,
            bag=bag,
            labels=directory.targets(scans),
        )

    def batch(self, step: Int[Tensor, "one"], longest: int) -> tuple[Tensor, SlottedLayout, Tensor]:
        """Source rows, layout and labels of one batch.  `step` has a dimension: compilers read 0-d ones on the host."""
        source, lengths, first, bag, labels = (
            part[step][0] for part in (self.source, self.lengths, self.first, self.bag, self.labels)
        )
        return source, SlottedLayout.at(lengths, first, bag, longest), labels

    def narrow(self, rows: int) -> Plan:
        """The first `rows` slots, for batches that need no more; views."""
        return Plan(self.source[:, :rows], self.lengths, self.first, self.bag[:, :rows], self.labels)

    def copy_(self, other: Plan) -> None:
        """Another epoch into the same memory, which compiled code and CUDA graphs have been given."""
        for name in self.__dataclass_fields__:
            getattr(self, name).copy_(getattr(other, name))


class Resident:
    """All rows on the device: a batch is a choice of them."""

    def __init__(self, scans: Scans, device: torch.device, dtype: torch.dtype, slices_to: int | None = None) -> None:
        self.directory = Directory.of(scans, device, slices_to)
        self.table = torch.zeros(int(scans.lengths.sum()) + 1, scans.width, dtype=dtype, device=device)
        begin = 0
        for chunk in torch.arange(len(scans.lengths)).split(LOADING_BATCH):
            rows = scans.rows(chunk)
            self.table[begin : begin + len(rows)] = rows.to(device, dtype)
            begin += len(rows)

    def plan(self, scans: Int[Tensor, "steps bags"], rows: int) -> Plan:
        lengths = self.directory.lengths
        starts = (lengths.cumsum(0) - lengths)[scans]
        return Plan.of(self.directory, scans, starts, len(self.table) - 1, rows)

    def staged(self, scans: Int[Tensor, "steps bags"]) -> Iterator[None]:
        """Once per batch, when its rows are in the table: they always are."""
        return iter([None] * len(scans))


class Streamed:
    """Rows that do not fit the device: a thread reads batches ahead, and each is copied while the last is computed."""

    def __init__(
        self, scans: Scans, device: torch.device, dtype: torch.dtype, rows: int, slices_to: int | None = None
    ) -> None:
        self.scans, self.dtype, self.device = scans, dtype, device
        self.directory = Directory.of(scans, device, slices_to)
        self.table = torch.zeros(rows + 1, scans.width, dtype=dtype, device=device)
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def plan(self, scans: Int[Tensor, "steps bags"], rows: int) -> Plan:
        lengths = self.directory.lengths[scans]
        return Plan.of(self.directory, scans, lengths.cumsum(1) - lengths, len(self.table) - 1, rows)

    def staged(self, scans: Int[Tensor, "steps bags"]) -> Iterator[None]:
        """Once per batch, when its rows are in the table."""
        for rows, landed in prefetch(self._land, scans.cpu()):
            if landed is not None:
                torch.cuda.current_stream().wait_event(landed)
                rows.record_stream(torch.cuda.current_stream())
            self.table[: len(rows)].copy_(rows)
            yield

    def _land(self, batch: Int[Tensor, "bags"]) -> tuple[Float[Tensor, "rows features"], torch.cuda.Event | None]:
        """A batch on the device, copied beside the computation; scans that only fill up have no rows."""
        rows = self.scans.rows(batch[batch != self.directory.filler]).to(self.dtype)
        if self.stream is None:
            return rows, None
        with torch.cuda.stream(self.stream):
            rows = rows.pin_memory().to(self.device, non_blocking=True)
            return rows, self.stream.record_event()


def batched(scans: Int[Tensor, "scans"], size: int, filler: int) -> Int[Tensor, "steps size"]:
    """Batches of `size` scans, the last one filled up.

    Example:
        >>> batched(torch.arange(3), 2, filler=9).tolist()
        [[0, 1], [2, 9]]
    """
    missing = -len(scans) % size
    return torch.cat([scans, scans.new_full((missing,), filler)]).reshape(-1, size)
