"""Packed rows of a fixed number: bags of any length, shapes that never change, no word from the device to the host.

`Layout.packed` knows its lengths in Python, so every batch is a new shape to a compiler; a padded layout pays for
batch x longest scan.  Here a batch of bags lies one below the other in `rows` slots, of which the last ones may be
unused; lengths are tensors.  Compiled code and CUDA graphs then serve every batch, and cost grows with the slices.

Each bag begins with a slot for the class token, so that it can be prepended without moving 378 MB of projected rows.
What cannot be written as dense algebra on rows is in `core.ragged`: attention, products within a bag, smoothing.
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
    """Bag b occupies a slot for its class token and `lengths[b]` slots for its slices; unused slots come last.

    Per-slice numbers come back padded, `(bags, heads, longest)`, as from a padded layout.

    Example:
        >>> layout = SlottedLayout.of(torch.tensor([2, 3]), rows=8, longest=4)
        >>> layout.pad(torch.arange(8.0))
        tensor([[1., 2., 0., 0.],
                [4., 5., 6., 0.]])
    """

    first: Int[Tensor, "bags"]
    """The slot of each bag's class token."""
    bag: Int[Tensor, "rows"]
    """Which bag a row belongs to; one too many for an unused row."""
    counts_token: bool = False
    """Whether the class token is one of the rows that this layout speaks of."""

    @classmethod
    def of(cls, lengths: Int[Tensor, "bags"], rows: int, longest: int) -> SlottedLayout:
        """The layout of bags of these lengths; `rows` must hold them and their tokens.  No host synchronisation."""
        first = (lengths + 1).cumsum(0) - lengths - 1
        bag = find_bags(torch.arange(rows, device=lengths.device), lengths + 1)
        return cls.at(lengths, first, bag, longest)

    @classmethod
    def at(
        cls, lengths: Int[Tensor, "bags"], first: Int[Tensor, "bags"], bag: Int[Tensor, "rows"], longest: int
    ) -> SlottedLayout:
        """The layout whose parts were worked out beforehand, for a whole epoch at once."""
        slot = torch.arange(longest, device=lengths.device)
        return cls(
            lengths=lengths,
            mask=slot < lengths[:, None],
            sizes=None,
            pad_index=(first[:, None] + 1 + slot).clamp_max(bag.shape[0] - 1),
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
        """Rows that are slots of class tokens."""
        previous = F.pad(self.bag[:-1], (1, 0), value=-1)
        return (self.bag != previous) & (self.bag < self.bags)

    def fold(self, values: Shaped[Tensor, "*heads rows"]) -> Shaped[Tensor, "bags *heads longest"]:
        """Padding reads the rows that follow, not one and the same: the gradient is scattered without a queue."""
        return values[..., self.pad_index].movedim(-2, 0)

    def with_class_token(self) -> SlottedLayout:
        """The same rows, the class token's slot counted as row 0 of its bag."""
        lengths, longest = self.lengths + 1, self.longest + 1
        slot = torch.arange(longest, device=lengths.device)
        return replace(
            self,
            lengths=lengths,
            mask=slot < lengths[:, None],
            pad_index=(self.first[:, None] + slot).clamp_max(self.rows - 1),
            counts_token=True,
        )

    def prepend(self, token: Float[Tensor, "1 features"], rows: Float[Tensor, "rows features"]) -> Tensor:
        """The rows with the token in every class token's slot."""
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
