"""A batch laid out in a fixed number of rows: bags of any length, in tensors whose shapes never change.

`Layout.packed` keeps its lengths in Python, so every batch is a new shape to a compiler; a padded layout computes
bags x longest scan rows.  Here the bags of a batch lie one below the other in a fixed number of rows, the last of which
may be unused, and the lengths are tensors.  The same compiled code and CUDA graphs then serve every batch, the cost
grows with the slices, and the host never waits for the device.

Each bag begins with one free row for the class token, so that the token can be prepended without moving 378 MB of
projected rows.  Operations that are not dense algebra on rows are in `core.ragged`: attention, products within a bag,
smoothing.  A slot is one of the fixed rows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from normal_guidance.core.layout import Layout
from normal_guidance.core.packed import find_bags
from normal_guidance.core.ragged import dense, products


@dataclass(frozen=True, eq=False)
class SlottedLayout(Layout):
    """A batch laid out in a fixed number of rows.

    Bag b takes one row for its class token, then `lengths[b]` rows for its slices; unused rows come last.  Numbers per
    slice are returned padded, `(bags, heads, longest)`, as by a padded layout.
    """

    first: Int[Tensor, "bags"]
    """The row of each bag's class token."""
    bag: Int[Tensor, "rows"]
    """The bag of each row; the number of bags for an unused row."""
    counts_token: bool = False
    """Whether `lengths` and `starts` include the class token's row."""

    @classmethod
    def of(cls, lengths: Int[Tensor, "bags"], rows: int, longest: int) -> SlottedLayout:
        """The layout of bags with these lengths; `rows` must hold them and their tokens.  Does not wait for the GPU."""
        first = (lengths + 1).cumsum(0) - lengths - 1
        bag = find_bags(torch.arange(rows, device=lengths.device), lengths + 1)
        return cls.at(lengths, first, bag, longest)

    @classmethod
    def at(
        cls, lengths: Int[Tensor, "bags"], first: Int[Tensor, "bags"], bag: Int[Tensor, "rows"], longest: int
    ) -> SlottedLayout:
        """The layout from parts that were computed beforehand, for a whole epoch at once."""
        place = torch.arange(longest, device=lengths.device)
        return cls(
            lengths=lengths,
            mask=place < lengths[:, None],
            sizes=None,
            pad_index=(first[:, None] + 1 + place).clamp_max(bag.shape[0] - 1),
            unpad_index=None,
            first=first,
            bag=bag,
        )

    @property
    def rows(self) -> int:
        return self.bag.shape[0]

    @property
    def row_shape(self) -> tuple[int, ...]:
        return (self.rows,)

    @property
    def starts(self) -> Int[Tensor, "bags"]:
        return self.first if self.counts_token else self.first + 1

    def is_token(self) -> Bool[Tensor, "rows"]:
        """Which rows are for class tokens."""
        previous = F.pad(self.bag[:-1], (1, 0), value=-1)
        return (self.bag != previous) & (self.bag < self.bags)

    def fold(self, values: Shaped[Tensor, "*heads rows"]) -> Shaped[Tensor, "bags *heads longest"]:
        assert self.pad_index is not None
        return dense.fold(values, self.starts, self.lengths, self.bag, self.pad_index).movedim(-2, 0)

    def with_class_token(self) -> SlottedLayout:
        """The same rows, with the class token's row counted as row 0 of its bag."""
        lengths, longest = self.lengths + 1, self.longest + 1
        place = torch.arange(longest, device=lengths.device)
        return replace(
            self,
            lengths=lengths,
            mask=place < lengths[:, None],
            pad_index=(self.first[:, None] + place).clamp_max(self.rows - 1),
            counts_token=True,
        )

    def prepend(self, token: Float[Tensor, "1 features"], rows: Float[Tensor, "rows features"]) -> Tensor:
        """The rows with the token in every class token's row."""
        return torch.where(self.is_token()[:, None], token.to(rows.dtype), rows)

    def take_first(self, rows: Float[Tensor, "rows features"]) -> Float[Tensor, "bags features"]:
        if not self.counts_token:
            return super().take_first(rows)
        return dense.take_first(rows, self.first, self.bag, self.is_token())

    def project(
        self, rows: Float[Tensor, "*parts rows inputs"], weight: Float[Tensor, "*parts outputs inputs"]
    ) -> Float[Tensor, "*parts rows outputs"]:
        return dense.project(rows, weight)

    def dot(
        self, queries: Float[Tensor, "bags queries features"], rows: Float[Tensor, "rows features"]
    ) -> Float[Tensor, "bags queries longest"]:
        return products.dot(queries, rows, self.starts, self.lengths, self.longest)

    def pool(
        self, weights: Float[Tensor, "bags heads longest"], rows: Float[Tensor, "rows features"]
    ) -> Float[Tensor, "bags heads features"]:
        return products.pool(weights, rows, self.starts, self.lengths)
