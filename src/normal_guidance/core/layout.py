"""The layout of bags in the rows of a feature matrix: packed (no padding) or padded, behind one interface.

A ragged batch is packed: all slices of all bags one below the other, plus `lengths`.  Dense layers run on these rows,
so their cost grows with the number of slices and not with bags x longest scan.  Only operations that depend on where a
bag ends use a `Layout`: it pads small numbers per slice (scores, attention) to `(bags, heads, longest)`, but never wide
rows (768 features).

A `Layout` can also describe rows that are already padded, `(bags, longest, features)` flattened.  Shapes are then
fixed and no gather is needed, which suits `torch.compile` and `torch.func.vmap` over many configurations.
Models use this interface and work with either form.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int, Shaped
from torch import Tensor

from normal_guidance.base.errors import UserError
from normal_guidance.core.arrays import Array, PerBag, as_tensor, bag_of_rows, find_bags
from normal_guidance.core.kernels import products
from normal_guidance.core.kernels.products import Queries, Rows, Weights

Mask = Bool[Tensor, "bags longest"]  # True for real slices
Folded = Shaped[Tensor, "bags *heads longest"]

SMOOTHING_BLOCK = 32  # slices in one block of `Layout.windows`: with a halo of 10 a block reads 52 rows to smooth 32


@dataclass(frozen=True, eq=False)
class Layout:
    """The place of each bag's slices among the rows.

    Example:
        >>> layout = Layout.packed(torch.tensor([2, 3]))
        >>> layout.pad(torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]))
        tensor([[1., 2., 0.],
                [3., 4., 5.]])
    """

    lengths: PerBag
    mask: Mask
    sizes: tuple[int, ...] | None = None
    """The lengths as Python integers for packed rows; None for `bags x longest` rows, padding included."""
    pad_index: Int[Tensor, "bags longest"] | None = None
    unpad_index: Int[Tensor, "rows"] | None = None

    @classmethod
    def packed(cls, lengths: Array) -> Layout:
        """The layout of packed rows: the slices of all bags, one bag after the other."""
        counts = _whole_numbers(lengths)
        sizes = tuple(counts.tolist())
        if not sizes or min(sizes) < 1:
            empty = [i for i, size in enumerate(sizes) if size < 1]
            raise UserError(
                f"lengths: every bag needs at least one slice; empty: {empty or 'the whole batch'}; leave those out"
            )
        device, counts = counts.device, counts.long()
        rows, longest = sum(sizes), max(sizes)
        starts = counts.cumsum(0) - counts
        offset = torch.arange(longest, device=device)
        bag = bag_of_rows(counts, rows)
        return cls(
            lengths=counts,
            mask=products.inside_bags(counts, longest),
            sizes=sizes,
            pad_index=(starts[:, None] + offset).clamp_max(rows - 1),
            unpad_index=bag * longest + torch.arange(rows, device=device) - starts[bag],
        )

    @classmethod
    def padded(cls, lengths: Array, longest: int) -> Layout:
        """The layout of `bags x longest` padded rows; a bag's real slices come first.  Only the CPU checks lengths."""
        counts = _whole_numbers(lengths)
        if counts.device.type == "cpu" and not torch.compiler.is_compiling():
            wrong = ((counts < 1) | (counts > longest)).nonzero().flatten().tolist()
            if wrong:
                raise UserError(
                    f"lengths: bag {wrong[0]} has {int(counts[wrong[0]])} slices; give 1 to {longest}, the padded "
                    "length, or pad further"
                )
        return cls.padded_unchecked(counts, longest)

    @classmethod
    def padded_unchecked(cls, lengths: PerBag, longest: int) -> Layout:
        """The same without a look at the lengths, also where `vmap` hides them."""
        return cls(lengths, products.inside_bags(lengths, longest))

    @classmethod
    def from_mask(cls, mask: Mask) -> Layout:
        """The padded layout of a boolean mask, True for real slices, which must come first."""
        mask = as_mask(mask)
        layout = cls.padded_unchecked(mask.sum(1), mask.shape[1])
        wrong = (layout.mask != mask).any(1) | (layout.lengths == 0)
        if wrong.any():
            raise UserError(
                f"mask: bags {wrong.nonzero().flatten().tolist()} are empty or have padding before a real slice; "
                "put the real slices (True) first"
            )
        return layout

    @property
    def bags(self) -> int:
        return self.mask.shape[0]

    @property
    def longest(self) -> int:
        return self.mask.shape[1]

    @property
    def is_packed(self) -> bool:
        return self.sizes is not None

    @property
    def row_shape(self) -> tuple[int, ...]:
        """The shape of the caller's feature tensor without its last dimension."""
        return (self.bags, self.longest) if self.sizes is None else (sum(self.sizes),)

    def fold(self, values: Shaped[Tensor, "*heads rows"]) -> Folded:
        """Numbers per row as `(bags, longest)`, or with heads.  The padding is arbitrary: `hide` it before use."""
        if self.pad_index is None:
            return values.view(*values.shape[:-1], self.bags, self.longest).movedim(-2, 0)
        return values[..., self.pad_index].movedim(-2, 0)

    def pad(self, values: Shaped[Tensor, "*heads rows"]) -> Folded:
        """Like `fold`, with zeros in the padding; on packed rows the inverse of `restore`."""
        padded = self.fold(values)
        return padded.masked_fill(~self._mask_for(padded), 0)

    def hide(self, scores: Float[Tensor, "bags *heads longest"]) -> Float[Tensor, "bags *heads longest"]:
        """Scores with the lowest finite number in the padding: its exponential is 0, and 0 times it is 0, not NaN."""
        return scores.masked_fill(~self._mask_for(scores), torch.finfo(scores.dtype).min)

    def _mask_for(self, padded: Folded) -> Bool[Tensor, "bags *one longest"]:
        return self.mask if padded.ndim == 2 else self.mask[:, None]

    def restore(self, padded: Folded) -> Shaped[Tensor, "*heads rows"] | Folded:
        """Numbers per slice in the caller's form: `(rows,)` or `(heads, rows)` if packed, unchanged if padded."""
        if self.unpad_index is None:
            return padded
        return padded.movedim(0, -2).flatten(-2)[..., self.unpad_index]

    def log_softmax(self, scores: Float[Tensor, "bags *heads longest"]) -> Float[Tensor, "bags *heads longest"]:
        """The log-softmax over each bag's real slices, in float32 or better; the padding's exponential is 0."""
        if scores.dtype in (torch.float16, torch.bfloat16):
            scores = scores.float()
        return F.log_softmax(self.hide(scores), dim=-1)

    def with_class_token(self) -> Layout:
        """The layout with one more row, the class token, before each bag's slices."""
        if self.sizes is None:
            return Layout.padded_unchecked(self.lengths + 1, self.longest + 1)
        tokens = Layout.packed([size + 1 for size in self.sizes])
        return tokens.to(self.lengths.device)

    def prepend(self, token: Float[Tensor, "1 features"], rows: Rows) -> Tensor:
        """The rows of `with_class_token`: the token before each bag's slices."""
        if self.sizes is None:
            padded = rows.view(self.bags, self.longest, -1)
            return torch.cat([token.expand(self.bags, 1, -1), padded], dim=1).flatten(0, 1)
        return torch.cat([piece for bag in rows.split(self.sizes) for piece in (token, bag)])

    def take_first(self, rows: Rows) -> Float[Tensor, "bags features"]:
        """Row 0 of each bag."""
        return take_rows(rows, self.starts)

    def first_rows(self, count: int) -> Int[Tensor, "bags count"]:
        """Row numbers of each bag's first slices; shorter bags repeat their last one."""
        offset = torch.arange(count, device=self.lengths.device)
        return self.starts[:, None] + torch.minimum(offset, self.lengths[:, None] - 1)

    @property
    def starts(self) -> PerBag:
        """The row at which each bag begins."""
        if self.pad_index is not None:
            return self.pad_index[:, 0]
        return torch.arange(self.bags, device=self.lengths.device) * self.longest

    def project(
        self, rows: Float[Tensor, "*parts rows inputs"], weight: Float[Tensor, "*parts outputs inputs"]
    ) -> Float[Tensor, "*parts rows outputs"]:
        """Every row times the transposed weight."""
        return rows @ weight.mT

    def dot(self, queries: Queries, rows: Rows) -> Weights:
        """Products of each bag's queries with its own rows: s_bqj = u_bq . x_bj.  The padding is arbitrary."""
        if self.sizes is None or self.pad_index is None:
            return queries @ rows.view(self.bags, self.longest, -1).transpose(1, 2)
        scores = [u @ x.T for u, x in zip(queries.unbind(), rows.split(self.sizes), strict=True)]
        return torch.cat(scores, dim=1)[:, self.pad_index].movedim(1, 0)

    def pool(self, weights: Weights, rows: Rows) -> Queries:
        """Weighted sums over each bag's own rows: z_bh = sum_j a_bhj x_bj.  Weights must be 0 in the padding."""
        weights = weights.to(rows.dtype)
        if self.sizes is None:
            return weights @ rows.view(self.bags, self.longest, -1)
        if rows.is_cuda and not rows.requires_grad and self.pad_index is not None:
            return weights @ rows[self.pad_index]  # one kernel, where a bag at a time would wait for each launch
        shares = self.restore(weights).split(self.sizes, dim=-1)
        return torch.stack([a @ x for a, x in zip(shares, rows.split(self.sizes), strict=True)])

    def windows(self, halo: int) -> tuple[Int[Tensor, "window blocks"], Int[Tensor, "rows"]]:
        """Rows that blocks read, to be smoothed by a banded matrix of this halo, and the order of the results."""
        device, block = self.lengths.device, SMOOTHING_BLOCK
        rows_of_bag = torch.full_like(self.lengths, self.longest) if self.sizes is None else self.lengths
        counts = (rows_of_bag + block - 1) // block
        blocks = sum(-(-size // block) for size in self.sizes or [self.longest] * self.bags)
        first = counts.cumsum(0) - counts
        bag = bag_of_rows(counts, blocks)
        number = torch.arange(blocks, device=device) - first[bag]
        position = torch.arange(self.longest, device=device).expand(self.bags, -1)
        reach = torch.arange(block + 2 * halo, device=device)[:, None] + number * block - halo
        read = self.starts[bag] + mirror(reach, self.lengths[bag])
        write = (position % block) * blocks + first[:, None] + position // block
        return read, self.restore(write) if self.is_packed else write.flatten()

    def to(self, device: torch.device | str) -> Layout:
        """The same layout with its tensors on another device."""
        if self.lengths.device == torch.device(device):
            return self
        return replace(self, **{name: value.to(device) for name, value in vars(self).items() if hasattr(value, "to")})


def _whole_numbers(lengths: Array) -> Shaped[Tensor, "bags"]:
    counts = as_tensor(lengths, "lengths")
    if counts.numel() and (counts.is_floating_point() or counts.dtype == torch.bool or counts.ndim != 1):
        raise UserError(
            f"lengths are {counts.dtype} of shape {tuple(counts.shape)}; give whole numbers (bags,), the slices of "
            "each bag"
        )
    return counts


def mirror(position: Int[Tensor, "*shape"], length: Int[Tensor, "*or_one"]) -> Int[Tensor, "*shape"]:
    """Reflect positions outside [0, length) at the end slices, as often as needed: -1 -> 1, length -> length - 2."""
    period = (2 * (length - 1)).clamp_min(1)
    folded = position % period
    return torch.minimum(folded, period - folded).minimum(length - 1)


def take_rows(rows: Rows, index: Int[Tensor, "*shape"]) -> Float[Tensor, "*shape features"]:
    """`rows[index]`, five times faster backward on the CPU."""
    # Not `index_select`: inductor (torch 2.13, CPU) multiplies its gradient in `vmap` by the number of configurations.
    return F.embedding(index, rows)


def as_rows(
    features: Float[Tensor, "slices features"] | Float[Tensor, "bags longest features"],
    bags: Layout | PerBag | Mask | Sequence[int] | None,
    width: int | None = None,
) -> tuple[Rows, Layout]:
    """The rows and the layout of bags in any form: lengths, a boolean mask (finite padding), or a `Layout`."""
    if bags is None:
        raise UserError(
            f"model: got {type(features).__name__} alone; a model takes features and the slices of each scan: "
            "model(bags.features, bags.lengths), or model(padded, mask)"
        )
    layout = bags if isinstance(bags, Layout) else _layout_of(bags)
    if not isinstance(features, Tensor):
        raise UserError(
            f"features: got {type(features).__name__}; a model takes a tensor: torch.as_tensor(features).float()"
        )
    shape = tuple(features.shape)
    if not shape:
        raise UserError(
            "features: got a single number; give (slices, features) with lengths, or (bags, longest, features) with a "
            "mask"
        )
    if width is not None and shape[-1] != width:
        raise UserError(
            f"features of shape {shape} are {shape[-1]} wide, but the model takes {width}; "
            f"build it with features={shape[-1]}"
        )
    if shape[:-1] != layout.row_shape:
        if len(layout.row_shape) == 1:
            raise UserError(
                f"packed features of shape {shape} do not fit lengths that add up to {layout.row_shape[0]}; "
                "expected (slices, features). For padded features (bags, longest, features) pass a boolean mask"
            )
        raise UserError(
            f"padded features of shape {shape} do not fit a mask of shape {layout.row_shape}; "
            "expected (bags, longest, features). For packed features (slices, features) pass integer lengths"
        )
    return features.reshape(-1, shape[-1]), layout


def as_mask(mask: Array, like: Tensor | None = None) -> Mask:
    """A boolean mask in any form, True for real slices; another type is refused, as 0 and 1 may also be lengths."""
    tensor = as_tensor(mask, "mask", like)
    if tensor.ndim != 2:
        raise UserError(
            f"mask of shape {tuple(tensor.shape)}; give (bags, longest), True for real slices; lengths are not a mask"
        )
    if tensor.dtype != torch.bool:
        write = "write mask.astype(bool)" if hasattr(mask, "astype") else "give True and False"
        write = "write mask.bool()" if isinstance(mask, Tensor) else write
        raise UserError(f"mask is {tensor.dtype}; it must be boolean, True for real slices: {write}")
    return tensor


def _layout_of(bags: Array) -> Layout:
    bags = as_tensor(bags, "bags")
    if bags.dtype == torch.bool and bags.ndim == 2:
        return Layout.from_mask(bags)
    if not bags.is_floating_point() and bags.dtype != torch.bool and bags.ndim == 1:
        return Layout.packed(bags)
    raise UserError(
        f"bags: got {bags.dtype} of shape {tuple(bags.shape)}; pass integer lengths (bags,) for packed features "
        "or a boolean mask (bags, longest) for padded ones"
    )


def pack(padded: Array, mask: Array) -> tuple[Shaped[Tensor, "slices *features"], PerBag]:
    """Pack padded values: the real slices of all bags one below the other, and the lengths.

    Args:
        padded: `(bags, longest)`, or with further dimensions behind.
        mask: `(bags, longest)`, True for real slices.

    Example:
        >>> rows, lengths = pack(torch.tensor([[1, 2, 0], [3, 4, 5]]), torch.tensor([[True, True, False], [True] * 3]))
        >>> rows, lengths
        (tensor([1, 2, 3, 4, 5]), tensor([2, 3]))
    """
    values = as_tensor(padded, "padded")
    real = as_mask(mask, values)
    if values.shape[:2] != real.shape:
        raise UserError(
            f"padded values of shape {tuple(values.shape)} and mask of shape {tuple(real.shape)}; both begin with "
            "(bags, longest)"
        )
    return values[real], real.sum(1)


def unpack(rows: Array, lengths: Array) -> tuple[Shaped[Tensor, "bags longest *features"], Mask]:
    """Pad packed values with zeros, and return the mask too: the exact inverse of `pack`.

    Args:
        rows: `(slices,)`, or with further dimensions behind.
        lengths: slices of each bag.

    Example:
        >>> unpack(torch.tensor([1, 2, 3, 4, 5]), torch.tensor([2, 3]))[0]
        tensor([[1, 2, 0],
                [3, 4, 5]])
    """
    values = as_tensor(rows, "rows")
    layout = Layout.packed(as_tensor(lengths, "lengths", values))
    if layout.unpad_index is None or values.ndim < 1 or len(values) != len(layout.unpad_index):
        slices = int(layout.lengths.sum())
        raise UserError(
            f"lengths add up to {slices} slices, but rows have the shape {tuple(values.shape)}; give a row for each "
            "slice of every bag"
        )
    padded = values.new_zeros(layout.bags * layout.longest, *values.shape[1:])
    padded[layout.unpad_index] = values
    return padded.view(layout.bags, layout.longest, *values.shape[1:]), layout.mask


@dataclass(frozen=True, eq=False, kw_only=True)
class SlottedLayout(Layout):
    """A batch in a fixed number of rows, whose lengths are tensors: the same compiled code and CUDA graph serve all."""

    # Bag b takes a row for its class token, so that it is prepended without moving rows, then `lengths[b]` rows for its
    # slices; unused rows come last.  Numbers per slice are returned padded, `(bags, heads, longest)`.

    first: PerBag  # the row of each bag's class token
    bag: Int[Tensor, "rows"]  # the bag of each row; the number of bags for an unused row
    counts_token: bool = False  # whether `lengths` and `starts` include the class token's row

    @classmethod
    def of(cls, lengths: PerBag, rows: int, longest: int) -> SlottedLayout:
        """The layout of bags with these lengths; `rows` must hold them and their tokens.  Does not wait for the GPU."""
        first = (lengths + 1).cumsum(0) - lengths - 1
        bag = find_bags(torch.arange(rows, device=lengths.device), lengths + 1)
        return cls.at(lengths, first, bag, longest)

    @classmethod
    def at(cls, lengths: PerBag, first: PerBag, bag: Int[Tensor, "rows"], longest: int) -> SlottedLayout:
        """The layout from parts that were computed beforehand, for a whole epoch at once."""
        offset = torch.arange(longest, device=lengths.device)
        pad_index = (first[:, None] + 1 + offset).clamp_max(bag.shape[0] - 1)
        return cls(lengths, products.inside_bags(lengths, longest), None, pad_index, first=first, bag=bag)

    @property
    def row_shape(self) -> tuple[int, ...]:
        return tuple(self.bag.shape)

    @property
    def starts(self) -> PerBag:
        return self.first if self.counts_token else self.first + 1

    def is_token(self) -> Bool[Tensor, "rows"]:
        """Which rows are for class tokens."""
        previous = F.pad(self.bag[:-1], (1, 0), value=-1)
        return (self.bag != previous) & (self.bag < self.bags)

    def fold(self, values: Shaped[Tensor, "*heads rows"]) -> Folded:
        assert self.pad_index is not None
        return products.fold(values, self.starts, self.lengths, self.bag, self.pad_index).movedim(-2, 0)

    def with_class_token(self) -> SlottedLayout:
        """The same rows, with the class token's row counted as row 0 of its bag."""
        lengths, longest = self.lengths + 1, self.longest + 1
        offset = torch.arange(longest, device=lengths.device)
        return replace(
            self,
            lengths=lengths,
            mask=products.inside_bags(lengths, longest),
            pad_index=(self.first[:, None] + offset).clamp_max(len(self.bag) - 1),
            counts_token=True,
        )

    def prepend(self, token: Float[Tensor, "1 features"], rows: Rows) -> Tensor:
        """The rows with the token in every class token's row."""
        return torch.where(self.is_token()[:, None], token.to(rows.dtype), rows)

    def take_first(self, rows: Rows) -> Float[Tensor, "bags features"]:
        if not self.counts_token:
            return super().take_first(rows)
        return products.take_first(rows, self.first, self.bag, self.is_token())

    def project(
        self, rows: Float[Tensor, "*parts rows inputs"], weight: Float[Tensor, "*parts outputs inputs"]
    ) -> Float[Tensor, "*parts rows outputs"]:
        return products.project(rows, weight)

    def dot(self, queries: Queries, rows: Rows) -> Weights:
        return products.dot(queries, rows, self.starts, self.lengths, self.longest)

    def pool(self, weights: Weights, rows: Rows) -> Queries:
        return products.pool(weights, rows, self.starts, self.lengths)
