r"""Positions of the slices of a scan: counted, in millimetres, or as points of a plane.

A normal distribution fitted to attention does not depend on the unit.  If every slice lies at
$x_j = s\,j + t$, then $\mathrm{E}[X] = s\,\mathrm{E}[J] + t$ and $\mathrm{Var}[X] = s^2\,\mathrm{Var}[J]$, so

$$ \frac{(x_j - \mathrm{E}[X])^2}{2\,\mathrm{Var}[X]} = \frac{(j - \mathrm{E}[J])^2}{2\,\mathrm{Var}[J]} $$

and the reference is the same for any spacing s.  Positions matter where spacing changes within a scan (a gap, thin
slices below and thick ones above), where slices have more than one coordinate (patches), and for anything with a fixed
width, such as a kernel in millimetres, which uses `fold_positions`.
"""

from __future__ import annotations

import torch
from jaxtyping import Float, Float64, Shaped
from torch import Tensor

from normal_guidance.core.layout import Layout
from normal_guidance.errors import UserError

Positions = Shaped[Tensor, "*rows_and_dimensions"]
Points = Float64[Tensor, "bags dimensions longest"]


def slice_numbers(layout: Layout) -> Float[Tensor, "bags longest"]:
    """The slices' numbers, counted from the middle of their bag: small numbers, so float32 keeps its digits."""
    # Counted among the real slices, so padding may lie anywhere.
    return layout.mask.cumsum(-1) - (layout.lengths[:, None] + 1) / 2


def fold_positions(positions: Positions, layout: Layout) -> Points:
    """Positions in any form as `(bags, dimensions, longest)`, in the same unit, 0 in the padding.

    Args:
        positions: packed `(slices,)` or `(slices, dimensions)`, or padded `(bags, longest)` or
            `(bags, longest, dimensions)`, like the layout.
    """
    # In the form of attention: padded from every layout except packed ones.
    shape, rows = tuple(positions.shape), layout.row_shape if layout.is_packed else tuple(layout.mask.shape)
    if shape[: len(rows)] != rows or positions.ndim > len(rows) + 1 or 0 in shape:
        raise UserError(
            f"positions of shape {shape}: expected {rows}, or {rows} and a last dimension of coordinates; "
            "one position for each slice, in the form that attention has"
        )
    points = positions.double().reshape(*rows, -1)
    points = layout.fold(points.T) if layout.is_packed else points.movedim(-1, 1)
    points = points.masked_fill(~layout.mask[:, None], 0)
    # Reading values would make a GPU wait and cannot be compiled, so only the CPU checks them.
    if points.device.type == "cpu" and not torch.compiler.is_compiling() and not points.isfinite().all():
        wrong = (~points.isfinite()).flatten(1).any(1).nonzero().flatten().tolist()
        raise UserError(f"positions of bags {wrong} are not all finite; give every slice a finite position")
    return points


def in_slices(points: Points, layout: Layout) -> Points:
    r"""Points measured from the middle of their bag, in units of the distance between neighbours.

    On a regular grid of $S = n^d$ points a coordinate has the variance $h^2 (n^2 - 1) / 12$, so
    $h^2 = 12\,\overline{\mathrm{Var}} / (S^{2/d} - 1)$; for irregular points, h is their typical distance.
    A floor of the variance, for example, then means the same in any unit.
    """
    count = layout.lengths[:, None, None].double()
    middle = points.sum(-1, keepdim=True) / count
    away = (points - middle).masked_fill(~layout.mask[:, None], 0)
    variance = (away.square().sum(-1, keepdim=True) / count).mean(1, keepdim=True)
    squared = 12 * variance / (count ** (2 / points.shape[1]) - 1)
    # One slice, or all in one place: any unit will do.
    return away / torch.where((variance > 0) & (count > 1), squared, 1.0).sqrt()
