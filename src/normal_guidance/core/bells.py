r"""Bells along the slices: attention from window sums, and the normals that guidance aims at.

With K a kernel matrix along the slices, every slice collects the scores x around it, and attention is their softmax.
Guidance enforces a bell by a loss; a mixture of bells has it by construction: each slice's softmax weight is spread as
a bell, $K_{jk} = \exp(-(|j-k| / \sigma)^p / 2)$, a normal's at p = 2, with a flat top and steep sides as p grows.

Both products are one matrix product: 64 scans of 1,083 slices and 32 configurations take 29 GFLOP, forward and
backward, and a kernel of 0.3 GB.  Long scans are summed by blocks, from one row of the kernel (`window_sums`).

Everything is float64, whatever the model's dtype.  $K_{jj} = 1$, so $a_j$ is never far below $q_j$: its logarithm,
which guidance and localization need, is exact down to e^-548, where float32 would lose it at e^-87 and make distant
slices tie; and no setting of matrix units rounds the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from jaxtyping import Float, Float64, Int, Shaped
from torch import Tensor, nn

from normal_guidance.base.errors import UserError
from normal_guidance.core.kernels.products import operator
from normal_guidance.core.layout import Layout, SlottedLayout, as_rows
from normal_guidance.core.prediction import FEATURES, BagsLike, Features, Prediction

# A normal fitted to attention does not depend on the unit of positions, so they matter only where spacing changes in a
# scan, where slices have more than one coordinate (patches), and for a fixed width, such as a kernel in millimetres.

Positions = Shaped[Tensor, "*rows_and_dimensions"]
Points = Float64[Tensor, "bags dimensions longest"]


def slice_numbers(layout: Layout) -> Float[Tensor, "bags longest"]:
    """The slices' numbers, counted from the middle of their bag: small numbers, so float32 keeps its digits."""
    # Counted among the real slices, so padding may lie anywhere.
    return layout.mask.cumsum(-1) - (layout.lengths[:, None] + 1) / 2


def fold_positions(positions: Positions, layout: Layout) -> Points:
    """Positions, packed or padded like the layout, as `(bags, dimensions, longest)`, in the same unit; 0 in padding."""
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
    """Points measured from the middle of their bag, in units of the distance between neighbours."""
    # On a regular grid of S = n^d points a coordinate has the variance h^2 (n^2 - 1) / 12, so h^2 = 12 mean(Var) /
    # (S^(2/d) - 1); for irregular points, h is their typical distance.  A floor of the variance then means the same in
    # any unit.
    count = layout.lengths[:, None, None].double()
    middle = points.sum(-1, keepdim=True) / count
    away = (points - middle).masked_fill(~layout.mask[:, None], 0)
    variance = (away.square().sum(-1, keepdim=True) / count).mean(1, keepdim=True)
    squared = 12 * variance / (count ** (2 / points.shape[1]) - 1)
    # One slice, or all in one place: any unit will do.
    return away / torch.where((variance > 0) & (count > 1), squared, 1.0).sqrt()


class SliceReference(nn.Module):
    r"""Localization's ceiling, $z_j = w^\top (b + \sum_k c_k \odot h_{j + k - 1 - \lfloor (R-1)/2 \rfloor}) + v$."""

    # A depthwise convolution of R taps, then a linear layer, as one matrix product: both are linear, so the features
    # are multiplied by the R vectors c_k * w.  It is not in `METHODS`, because it learns from slice labels.
    # `attention` is the probability that a slice is positive, `log_attention` its logit; the scan's logit is NaN.

    def __init__(self, features: int = FEATURES, *, receptive_field: int) -> None:
        super().__init__()
        if receptive_field < 1:
            raise UserError(f"receptive_field is {receptive_field}; it must be at least 1 slice")
        self.convolution = nn.Conv1d(features, features, receptive_field, groups=features)
        self.classifier = nn.Linear(features, 1)

    def forward(self, features: Features, bags: BagsLike | None = None) -> Prediction:
        rows, layout = as_rows(features, bags, self.classifier.in_features)
        weight, bias = self.classifier.weight[0], self.convolution.bias
        assert bias is not None
        kernel = self.convolution.weight[:, 0].T.contiguous() * weight  # c_k * w, one row a tap
        constant = bias @ weight + self.classifier.bias
        # Contiguous and on the left: `vmap` makes the taps of all configurations the rows of one matrix product.
        taps = (kernel.to(rows.dtype) @ rows.T).to(weight.dtype)
        if isinstance(layout, SlottedLayout):  # rows that do not hold a slice get a number that no slice has
            bag = torch.where(layout.is_token(), -1, layout.bag)
        else:
            number = torch.arange(layout.bags, device=layout.mask.device)
            bag = layout.restore(torch.where(layout.mask, number[:, None], -1)).flatten()
        logits = layout.hide(layout.fold(_add_windows(taps, bag) + constant))
        nowhere = torch.full((layout.bags,), torch.nan, device=rows.device, dtype=weight.dtype)
        return Prediction(nowhere, layout.restore(logits.sigmoid()), layout.restore(logits[:, None]))


def _add_windows(taps: Float[Tensor, "taps rows"], bag: Int[Tensor, "rows"]) -> Float[Tensor, "rows"]:
    """For each row r, the sum over k of tap k at row r + k - (R-1)//2, over rows of the same bag."""
    # Read with rows one column longer, the flat matrix shifts row k by k numbers, so a column is a diagonal.  Indexing
    # would scatter the gradient; this is padding and a view, forward and backward.
    width, rows = taps.shape
    before = (width - 1) // 2
    after = width - 1 - before
    same = bag == F.pad(bag, (before, after), value=-2).unfold(0, width, 1).T
    flat = F.pad(F.pad(taps, (before, after)).flatten(), (0, width))
    shifted = flat.unflatten(0, (width, -1))[:, :rows]
    return torch.where(same, shifted, 0).sum(0)


# Sums under a symmetric window around every slice, $y_j = \sum_k t_{|j-k|} x_k$, and their gradients.
# They are made block by block, from a band of the Toeplitz matrix that serves every block, and nothing of it is kept
# for the gradient, which is again such a sum.  On the CPU a band ends with the last tap that is not 0, and rows without
# values in reach are left out; a GPU would have to wait for either.  A Fourier transform would be faster, but its error
# is relative to the largest sum, while the logarithm of attention needs the smallest ones exactly.

Rows = Float[Tensor, "*many rows longest"]

AT_ONCE = 2**22  # numbers that blocks read together

DENSE_SUMS = 2048
"""Slices up to which a matrix of slices x slices is made, for every configuration: its product is faster.  On the CPU,
where the matrices of many configurations leave the caches, up to a quarter of it."""


def is_long(longest: int, device: torch.device) -> bool:
    """Whether scans are too long for a matrix of slices x slices."""
    return longest > (DENSE_SUMS if device.type == "cuda" else DENSE_SUMS // 4)


def window_sums(values: Rows, taps: Float[Tensor, "*many reach"]) -> Rows:
    """Sums under windows, tap 0 at the slice itself and the others at their distance; rows are 0 beyond a scan."""
    # `many` is at most one dimension.  The last taps that are 0 get no gradient on the CPU.
    if torch.compiler.is_exporting():  # of one configuration, without blocks: their number would be fixed in the graph
        reach, longest = len(taps) - 1, values.shape[1]
        read = torch.arange(longest, device=values.device)[:, None] + torch.arange(2 * reach + 1, device=values.device)
        return F.pad(values, (reach, reach))[:, read] @ torch.cat([taps[1:].flip(0), taps])
    if taps.ndim == 2:
        return stacked_sums(values, taps)
    return stacked_sums(values[None], taps[None]).squeeze(0)


def _gradients(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, Tensor | None]:
    values, taps = ctx.saved_tensors
    for_values, for_taps = ctx.needs_input_grad
    return (
        stacked_sums(gradient, taps) if for_values else None,
        stacked_tap_gradient(gradient, values, taps) if for_taps else None,
    )


@operator(
    "window_sums",
    stacked=2,
    gradient=_gradients,
    like=lambda values, taps: values.new_empty(values.shape),
    schema="(Tensor values, Tensor taps) -> Tensor",
)
def stacked_sums(values: Tensor, taps: Tensor) -> Tensor:
    """`window_sums` of (C, R, S) values with (C, T) taps: (C, R, S)."""
    sums = torch.empty_like(values, memory_format=torch.contiguous_format)
    for x, t, y in zip(values, taps, sums, strict=True):
        reach = _reach(t, x)
        size = _block_size(reach)
        band, blocks = _band(t[: reach + 1], size), _blocks(torch.zeros_like(x), size)
        for place, windows in _windows(x, reach, size):
            blocks[place] = windows @ band
        y.copy_(blocks.flatten(1)[:, : x.shape[1]])
    return sums


@operator(
    "window_sums_tap_gradient",
    stacked=3,
    like=lambda gradient, values, taps: taps.new_empty(taps.shape),
    schema="(Tensor gradient, Tensor values, Tensor taps) -> Tensor",
)
def stacked_tap_gradient(gradient: Tensor, values: Tensor, taps: Tensor) -> Tensor:
    """The gradient of (C, T) taps from (C, R, S) gradients and values."""
    gradients = torch.zeros_like(taps)
    for g, x, t, into in zip(gradient, values, taps, gradients, strict=True):
        reach = _reach(t, x)
        size = _block_size(reach)
        width, blocks = size + 2 * reach, _blocks(g, size)
        products = x.new_zeros(size, width)  # of each slice of a block with each that it reads
        for place, windows in _windows(x, reach, size):
            products += blocks[place].mT @ windows
        # Row i of a block reads distance o - reach at column i + o: sums along the diagonals.
        by_offset = products.as_strided((size, 2 * reach + 1), (width + 1, 1)).sum(0)
        before, middle, behind = by_offset.split([reach, 1, reach])
        into[: reach + 1] = torch.cat([middle, before.flip(0) + behind])
    return gradients


def _reach(taps: Tensor, values: Tensor) -> int:
    """The greatest distance that counts."""
    if taps.is_cuda:
        return min(len(taps), values.shape[1]) - 1
    counting = taps[: values.shape[1]].nonzero()
    return int(counting[-1]) if len(counting) else 0


def _block_size(reach: int) -> int:
    """Slices whose sums are made together: twice the reach of a window, within bounds."""
    return max(64, min(2 * reach, 256))


def _blocks(rows: Float[Tensor, "rows longest"], size: int) -> Float[Tensor, "rows blocks size"]:
    return F.pad(rows, (0, -rows.shape[1] % size)).unflatten(1, (-1, size))


def _band(taps: Float[Tensor, "reach_and_one"], size: int) -> Float[Tensor, "width size"]:
    """Entry (i, j): the tap by which the sum at slice j of a block counts slice i of those that it reads."""
    both = F.pad(torch.cat([taps[1:].flip(0), taps]), (size - 1, size - 1))
    return both.unfold(0, size, 1).flip(1)


def _windows(
    rows: Float[Tensor, "rows longest"], reach: int, size: int
) -> Iterator[tuple[tuple[Tensor, Tensor], Float[Tensor, "some width"]]]:
    """Rows and blocks, some at a time, and the slices that they read; on the CPU only those with values."""
    width, longest = size + 2 * reach, rows.shape[1]
    padded = F.pad(rows, (reach, reach + -longest % size))
    every = padded.unfold(1, width, size)
    if rows.is_cuda:
        index = torch.arange(len(rows) * every.shape[1], device=rows.device)
        row, block = index // every.shape[1], index % every.shape[1]
    else:
        before = F.pad(padded.ne(0).cumsum(1), (1, 0))  # values before each slice
        first = torch.arange(0, longest, size)
        row, block = (before[:, first + width] > before[:, first]).nonzero(as_tuple=True)
    for some in zip(*(index.split(max(1, AT_ONCE // width)) for index in (row, block)), strict=True):
        yield some, every[some]


SIGMA, BETA, KAPPA, SHAPE = 3.0, 0.25, 4.0, 2.0
"""Initial values: bells about seven slices wide at half height, a soft choice among them, little attention to windows
half outside the scan, and the shape of a normal."""

STEEPEST, FARTHEST = 5.0, 7.0
"""Upper bounds of the log of a learned shape and of the log of a powered distance.  e^(-e^7 / 2) is practically 0;
beyond the bounds the value would be 0 and its gradient NaN.  So no entry of K, and no sum K q, is below e^-549."""

LEAST = (1 + 1e-12) * math.exp(-0.5 * math.exp(FARTHEST))
"""A learned bell at `FARTHEST` and beyond, rounded up, so that what is above it ends there."""

Scores = Float[Tensor, "bags longest"]
Distances = Float64[Tensor, "*shape"]


def gaussian_window(distance: Distances, log_sigma: Float[Tensor, ""]) -> Distances:
    r"""$\exp(-d^2 / 2\sigma^2)$: 1 at the slice itself, so that windows are sums, not means."""
    in_sigmas = distance * torch.exp(-log_sigma.double())
    return torch.exp(-0.5 * in_sigmas.square())


def shaped_window(distance: Distances, log_sigma: Float[Tensor, ""], log_shape: Float[Tensor, ""]) -> Distances:
    r"""$\exp(-(|d| / \sigma)^p / 2)$: a normal's bell at p = 2, a box of half-width sigma as p grows."""
    log_distance = distance.abs().clamp_min(1e-300).log() - log_sigma.double()  # finite at a distance of 0
    power = torch.exp(log_shape.double().clamp_max(STEEPEST))
    return torch.exp(-0.5 * torch.exp((power * log_distance).clamp_max(FARTHEST)))


def smoothing(
    window: Callable[[Distances], Distances], longest: int, device: torch.device, least: float = 0.0
) -> Callable[[Scores], Scores]:
    """Window sums K x in float64, as a function of x; `least` is what the window keeps at great distances."""
    place = torch.arange(longest, device=device, dtype=torch.float64)
    if torch.compiler.is_exporting() or not is_long(longest, device):  # one graph for scans of any length
        kernel = window(place[:, None] - place)
        return lambda values: values.double() @ kernel
    above = (window(place) - least).clamp_min(0.0)

    return lambda values: window_sums(values.double(), above) + least * values.double().sum(-1, keepdim=True)


class WindowAttention(nn.Module):
    r"""Attention from scores around each slice, $\mathrm{softmax}(\beta K x)$, or with `bells` a mixture of bells."""

    # With `bells`, q = softmax(beta K x + kappa log K 1) and a = K q / sum(K q): a window that extends beyond the scan
    # is a less likely place.  Parameters are learned as logarithms: they stay positive, and a step of SGD changes them
    # by a factor.  (A negative beta would attend to the slices with least evidence.)

    def __init__(self, *, bells: bool) -> None:
        super().__init__()
        self.log_sigma = _starting_at(SIGMA)
        self.log_beta = _starting_at(BETA)
        self.log_kappa = _starting_at(KAPPA) if bells else None
        self.log_shape = _starting_at(SHAPE) if bells else None

    def forward(self, scores: Scores, layout: Layout) -> Scores:
        """log a of folded scores with any padding; in float32 or better, very low in the padding."""
        dtype = torch.promote_types(scores.dtype, torch.float32)
        real, size = scores.masked_fill(~layout.mask, 0), (layout.longest, scores.device)
        beta = torch.exp(self.log_beta.double())
        if self.log_kappa is None or self.log_shape is None:
            smooth = smoothing(partial(gaussian_window, log_sigma=self.log_sigma), *size)
            return layout.hide(layout.log_softmax(beta * smooth(real)).to(dtype))
        window = partial(shaped_window, log_sigma=self.log_sigma, log_shape=self.log_shape)
        smooth = smoothing(window, *size, LEAST)
        inside = smooth(layout.mask.double())  # at least 1 within the scan, from the slice itself
        log_prior = torch.exp(self.log_kappa.double()) * inside.log()
        log_q = layout.log_softmax(beta * smooth(real) + log_prior)
        return layout.hide(layout.log_softmax(smooth(log_q.exp()).log()).to(dtype))

    def extra_repr(self) -> str:
        return f"bells={self.log_kappa is not None}"


def _starting_at(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(math.log(value)))


# Reference distributions: from log-attention that sums to one over a bag's slices to log r, a constant to the gradient.
# The modes of a mixture have one common covariance: a mode with its own width could shrink onto a single slice, where
# the likelihood is unbounded, and the reference would reward the spikes that guidance is to smooth.  The first guess
# cuts attention where the cut removes most of its variance until there are k parts, so nothing is random.


VARIANCE_FLOOR = 1e-6
"""The least variance, in squared slices.  Attention on one slice has none; its reference then stays on that slice."""

EM_STEPS = 5
"""Steps from the first guess.  The reference is then within .01 (total variation, mean over random attention of 40 and
300 slices) of the result of 500 steps, and every step of training computes it anew."""

Padded = Float[Tensor, "bags heads longest"]
Shares = Float[Tensor, "bags heads modes longest"]
Weights = Float[Tensor, "bags heads 1 longest"]
Coordinates = Float[Tensor, "bags 1 dimensions longest"]


def log_normal(log_a: Padded, layout: Layout, least_width: float = 0.0) -> Padded:
    """log r by eqs. 2 and 3 of the paper, with a standard deviation of at least `least_width` slices."""
    a = log_a.detach().exp()
    j = slice_numbers(layout)[:, None]
    mean = (j * a).sum(-1, keepdim=True)
    mean = mean + ((j - mean) * a).sum(-1, keepdim=True)  # one step of refinement: removes the sum's rounding
    distance = (j - mean).square()
    variance = (distance * a).sum(-1, keepdim=True).clamp_min(_floor(least_width))
    return layout.log_softmax(-distance / (2 * variance))


@torch.no_grad()
def log_mixture(
    log_a: Padded, layout: Layout, points: Points | None = None, modes: int = 1, least_width: float = 0.0
) -> Padded:
    """log r of the mixture of normals fitted to attention at these points, by default the slice numbers."""
    # One dimension is computed in attention's precision, more dimensions in float64, because the covariance of points
    # on a line is singular apart from its floor.
    a = log_a.detach().exp()
    if points is None:
        x = slice_numbers(layout)[:, None, None].to(a.dtype)
    else:
        x = in_slices(points, layout)[:, None]
        x = x.to(a.dtype) if x.shape[2] == 1 else x
    weights = a.to(x.dtype)[:, :, None]
    shares = _first_guess(weights, x, modes, ordered=points is None)
    floor = _floor(least_width)
    log_pi, distance = _maximize(weights * shares, x, floor)
    for _ in range(EM_STEPS if modes > 1 else 0):
        shares = torch.softmax(log_pi - distance / 2, dim=2)
        log_pi, distance = _maximize(weights * shares, x, floor)
    log_modes = layout.log_softmax(-distance.flatten(1, 2) / 2).unflatten(1, distance.shape[1:3])
    return layout.hide(torch.logsumexp(log_pi + log_modes, dim=2).to(log_a.dtype))


def _floor(least_width: float) -> float:
    return max(VARIANCE_FLOOR, least_width**2)


def _maximize(weights: Shares, x: Coordinates, floor: float) -> tuple[Float[Tensor, "bags heads modes 1"], Shares]:
    """The log of each mode's weight, and squared distances from its mean in units of the common covariance."""
    mass = weights.sum(-1, keepdim=True).clamp_min(torch.finfo(weights.dtype).tiny)  # a mode may have died out
    log_pi = mass.log() - mass.sum(2, keepdim=True).log()
    x = x[:, :, None]
    mean = (weights[..., None, :] * x).sum(-1) / mass
    away = x - mean[..., None]
    mean = mean + (weights[..., None, :] * away).sum(-1) / mass
    away = x - mean[..., None]
    if x.shape[3] == 1:
        squared = away.squeeze(3).square()
        variance = (weights * squared).sum((2, 3), keepdim=True).clamp_min(floor)
        return log_pi, squared / variance
    covariance = ((weights[..., None, :] * away) @ away.mT).sum(2)
    covariance = covariance + floor * torch.eye(x.shape[3], dtype=x.dtype, device=x.device)
    root, _ = torch.linalg.cholesky_ex(covariance)
    return log_pi, torch.linalg.solve_triangular(root[:, :, None], away, upper=False).square().sum(3)


def _first_guess(weights: Weights, x: Coordinates, modes: int, *, ordered: bool) -> Shares:
    """Attention in `modes` parts along its main axis: one cut after the other, each where it removes most variance."""
    shares = torch.ones_like(weights)
    if modes == 1:
        return shares
    if x.shape[2] == 1:
        axis = x.expand_as(weights)
    else:  # the coordinate along the direction in which attention is widest
        away = x - (weights * x).sum(-1, keepdim=True) / weights.sum(-1, keepdim=True)
        _, directions = torch.linalg.eigh((weights * away) @ away.mT)
        axis = directions[..., -1:].mT @ away
    order = None if ordered else axis.argsort(-1)
    if order is not None:
        weights, axis = weights.gather(-1, order), axis.gather(-1, order)
    for _ in range(modes - 1):
        shares = _cut(weights, axis, shares)
    return shares if order is None else shares.gather(-1, order.argsort(-1).expand_as(shares))


def _cut(weights: Weights, axis: Weights, shares: Shares) -> Float[Tensor, "bags heads modes_and_one longest"]:
    r"""Cut the part P into L and R that removes most variance, $w_L w_R (m_L - m_R)^2 / w_P$."""
    mass = (weights * shares).cumsum(-1)
    moment = (weights * shares * axis).cumsum(-1)
    whole, total = mass[..., -1:], moment[..., -1:]
    # A side that only rounding makes non-empty must not decide.
    between = mass * (whole - mass) * whole
    possible = (between > torch.finfo(mass.dtype).eps * whole**3) & (shares > 0)
    removed = (moment * whole - total * mass).square() / between.where(possible, 1.0)
    best = removed.where(possible, 0.0).flatten(2).argmax(-1)[..., None, None]
    longest = weights.shape[-1]
    place = torch.arange(longest, device=axis.device)
    behind = (place > best % longest) & (torch.arange(shares.shape[2], device=axis.device)[:, None] == best // longest)
    moved = shares * behind
    return torch.cat([shares - moved, moved.sum(2, keepdim=True)], dim=2)
