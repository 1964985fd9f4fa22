"""Training data for the engines: scans by number, packed batches, and epochs of batches with a fixed number of rows."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass

import torch
from jaxtyping import Float, Int
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.base.workers import in_background
from normal_guidance.core.arrays import find_bags
from normal_guidance.core.bags import UNKNOWN, Bags, ScanSet
from normal_guidance.core.layout import SlottedLayout

LOADING_BATCH = 256  # scans read together when all features are loaded to the device

MOST_PLACES = 2**19  # slices of a batch without gradients, padded to its longest scan; a scan is never divided

PREFETCH = 4  # batches that the reading thread may prepare ahead of the engine


def slice_labels_of(scans: ScanSet) -> Int[Tensor, "slices"]:
    """The labels of all slices, for the supervised reference only: nothing else in training reads them."""
    labels: Tensor | None = getattr(scans, "slice_labels", None)
    if labels is None:
        raise UserError(
            f"a supervised reference learns slice labels, but {len(scans.lengths)} scans have none; add them to the "
            "scans, or leave the reference out"
        )
    return labels


class Targets:
    """The labels to learn: those of the scans or, for a supervised reference, those of their slices, packed."""

    def __init__(self, scans: ScanSet, *, on_slices: bool) -> None:
        self.labels = scans.labels
        self.of_slices = slice_labels_of(scans).split(scans.lengths.tolist()) if on_slices else None

    def of(self, numbers: Int[Tensor, "chosen"]) -> Int[Tensor, "targets"]:
        """The labels of the chosen scans, one scan after the other."""
        if self.of_slices is None:
            return self.labels[numbers]
        return torch.cat([self.of_slices[number] for number in numbers.tolist()])


def check_scans_like(scans: object, name: str) -> None:
    """Refuse what is not a set of scans, such as a list of arrays."""
    if not isinstance(scans, ScanSet):
        raise UserError(
            f"{name}: got {type(scans).__name__}; give Bags (of a list of Bag: Bags.pack), or open_store(FOLDER)"
        )
    if not len(scans.lengths):
        raise UserError(f"{name}: there are no scans in it; give at least one")


def in_batches(lengths: Int[Tensor, "scans"], most: int) -> list[Int[Tensor, "batch"]]:
    """The numbers of all scans in their order, in batches of at most `most` scans and `MOST_PLACES` padded slices."""
    batches, begin, longest = [], 0, 0
    for number, length in enumerate(lengths.tolist()):
        longest = max(longest, length)
        if number > begin and (number - begin == most or (number - begin + 1) * longest > MOST_PLACES):
            batches.append(torch.arange(begin, number))
            begin, longest = number, length
    return [*batches, torch.arange(begin, len(lengths))]


def heaviest_batch(lengths: Int[Tensor, "scans"], size: int, orders: Iterable[Tensor]) -> Int[Tensor, "size"]:
    """The scans of the batch with the most slices in all epochs, whose orders are given."""
    whole = len(lengths) // size * size
    batches = torch.cat([order[:whole].reshape(-1, size) for order in orders])
    return batches[lengths[batches].sum(1).argmax()]


def draw_orders(scans: int, seed: int, state: Tensor | None = None) -> Iterator[tuple[Tensor, Tensor]]:
    """Yield the order of the scans in every epoch, and the generator's state after drawing it."""
    generator = torch.Generator().manual_seed(seed)
    if state is not None:
        generator.set_state(state)
    while True:
        order = torch.randperm(scans, generator=generator)
        yield order, generator.get_state()


def pool_scans(scans: ScanSet, pool: Callable[[Tensor], Tensor]) -> Bags:
    """Reduce each scan to one row by a pooling without parameters; the rest of the model is logistic regression.

    Mean and max pooling then need one pass over the features, and each of the 1,000 epochs reads one row per scan.
    """
    dtype = torch.promote_types(scans.dtype, torch.float32)  # half precision would round the mean
    rows = [pool(scans.rows(torch.tensor([number])).to(dtype)) for number in range(len(scans.lengths))]
    return Bags(torch.stack(rows), torch.ones_like(scans.lengths), scans.labels)


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The layouts (`SlottedLayout`) of all batches of an epoch, computed at once so that a step only reads them."""

    source: Int[Tensor, "steps rows"]
    """Each batch row's row in the feature table; where there is no slice, the table's last row, which is all zeros."""
    lengths: Int[Tensor, "steps bags"]
    first: Int[Tensor, "steps bags"]
    bag: Int[Tensor, "steps rows"]
    labels: Int[Tensor, "steps bags"] | Int[Tensor, "steps bags longest"]

    @classmethod
    def of(
        cls,
        table: FeatureTable,
        scans: Int[Tensor, "steps bags"],
        starts: Int[Tensor, "steps bags"],
        rows: int,
    ) -> EpochPlan:
        """The plan for a table in which scans begin at rows `starts`, and whose last row is all zeros."""
        zeros = len(table.rows) - 1
        lengths = table.lengths[scans]
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
            labels=table.targets(scans),
        )

    def batch(self, step: Int[Tensor, "one"], longest: int) -> tuple[Tensor, SlottedLayout, Tensor]:
        """Source rows, layout and labels of one batch.  `step` is a vector, as compilers read a scalar on the host."""
        source, lengths, first, bag, labels = (
            part[step][0] for part in (self.source, self.lengths, self.first, self.bag, self.labels)
        )
        return source, SlottedLayout.at(lengths, first, bag, longest), labels

    def narrow(self, rows: int) -> EpochPlan:
        """Views of the first `rows` rows, for batches that need no more."""
        return EpochPlan(self.source[:, :rows], self.lengths, self.first, self.bag[:, :rows], self.labels)

    def copy_(self, other: EpochPlan) -> None:
        """Copy another epoch into the same memory, from which compiled code and CUDA graphs read."""
        for name in self.__dataclass_fields__:
            getattr(self, name).copy_(getattr(other, name))


class FeatureTable:
    """A table of features on the device, from which batches select rows, and the lengths and labels of all scans.

    An extra scan at the end, with one row of zeros, fills up batches that have too few scans.
    """

    def __init__(
        self, scans: ScanSet, device: torch.device, rows: int, dtype: torch.dtype, slices_to: int | None
    ) -> None:
        """With `slices_to`, for a supervised reference, targets are slice labels, padded to that length."""
        self.rows = torch.zeros(rows + 1, scans.width, dtype=dtype, device=device)
        self.lengths = torch.cat([scans.lengths.cpu(), torch.ones(1, dtype=torch.int64)]).to(device)
        self.labels = torch.cat([scans.labels.cpu(), torch.zeros(1, dtype=torch.int64)]).to(device)
        self.filler, self.longest, self.slice_labels = len(scans.lengths), slices_to, None
        if slices_to is not None:
            unknown = torch.tensor([UNKNOWN], dtype=torch.int8)
            self.slice_labels = torch.cat([slice_labels_of(scans).cpu().to(torch.int8), unknown]).to(device)

    def targets(
        self, scans: Int[Tensor, "*steps bags"]
    ) -> Int[Tensor, "*steps bags"] | Int[Tensor, "*steps bags longest"]:
        """The labels of the scans, or of their slices with `UNKNOWN` in the padding."""
        if self.slice_labels is None or self.longest is None:
            return self.labels[scans]
        position = torch.arange(self.longest, device=scans.device)
        starts = (self.lengths.cumsum(0) - self.lengths)[scans]
        labels = self.slice_labels[(starts[..., None] + position).clamp_max(len(self.slice_labels) - 1)]
        return torch.where(position < self.lengths[scans][..., None], labels, UNKNOWN)


class Resident(FeatureTable):
    """All features on the device."""

    def __init__(self, scans: ScanSet, device: torch.device, dtype: torch.dtype, slices_to: int | None = None) -> None:
        super().__init__(scans, device, int(scans.lengths.sum()), dtype, slices_to)
        begin = 0
        for chunk in torch.arange(len(scans.lengths)).split(LOADING_BATCH):
            rows = scans.rows(chunk)
            self.rows[begin : begin + len(rows)] = rows.to(device, dtype)
            begin += len(rows)

    def plan(self, scans: Int[Tensor, "steps bags"], rows: int) -> EpochPlan:
        return EpochPlan.of(self, scans, (self.lengths.cumsum(0) - self.lengths)[scans], rows)

    def staged(self, scans: Int[Tensor, "steps bags"]) -> Iterator[None]:
        """Yield once per batch, when its rows are in the table; here they always are."""
        return iter([None] * len(scans))


class Streamed(FeatureTable):
    """Features too large for the device: a thread reads ahead, and each batch is copied during the step before it."""

    def __init__(
        self, scans: ScanSet, device: torch.device, dtype: torch.dtype, rows: int, slices_to: int | None = None
    ) -> None:
        super().__init__(scans, device, rows, dtype, slices_to)
        self.scans = scans
        self.stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    def plan(self, scans: Int[Tensor, "steps bags"], rows: int) -> EpochPlan:
        lengths = self.lengths[scans]
        return EpochPlan.of(self, scans, lengths.cumsum(1) - lengths, rows)

    def staged(self, scans: Int[Tensor, "steps bags"]) -> Iterator[None]:
        """Yield once per batch, when its rows are in the table."""
        for rows, copied in in_background(map(self._copy, scans.cpu()), PREFETCH):
            if copied is not None:
                torch.cuda.current_stream().wait_event(copied)
                rows.record_stream(torch.cuda.current_stream())
            self.rows[: len(rows)].copy_(rows)
            yield

    def _copy(self, batch: Int[Tensor, "bags"]) -> tuple[Float[Tensor, "rows features"], torch.cuda.Event | None]:
        """Copy a batch to the device on a separate stream; scans that only fill up the batch have no rows."""
        rows = self.scans.rows(batch[batch != self.filler]).to(self.rows.dtype)
        if self.stream is None:
            return rows, None
        with torch.cuda.stream(self.stream):
            rows = rows.pin_memory().to(self.rows.device, non_blocking=True)
            return rows, self.stream.record_event()


def batched(scans: Int[Tensor, "scans"], size: int, filler: int) -> Int[Tensor, "steps size"]:
    """Batches of `size` scans, the last one filled up with `filler`."""
    missing = -len(scans) % size
    return torch.cat([scans, scans.new_full((missing,), filler)]).reshape(-1, size)
