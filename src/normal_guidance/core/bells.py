r"""Attention from scores around each slice: windows, and mixtures of whole bells whose shape is built in.

With K a kernel matrix along the slices, every slice collects the scores x around it (window sums over the scan's own
slices), and attention is their softmax.  With the Gaussian kernel, $K_{jk} = \exp(-(j-k)^2 / 2\sigma^2)$:

    a = softmax(beta K x)

Normal Guidance enforces a bell by a loss; a mixture of bells has it by construction.  Each slice's softmax weight is
spread as a bell.  A window that extends beyond the scan collects less; if the finding lies wholly within the scan, such
a window is also a less likely place for it, so its prior is the part of it inside the scan to a learned power:

    q = softmax(beta K x + kappa log K 1),   a = K q / sum(K q)

Bayes' rule gives this with an infinite kappa for blocks that lie wholly inside.  Bells may have flat tops and steep
sides: $K_{jk} = \exp(-(|j-k| / \sigma)^p / 2)$ with a learned p.

Both products are one matrix product, with a separate width for every configuration: 64 scans of 1,083 slices and 32
configurations take 29 GFLOP, forward and backward, and a kernel of 0.3 GB.  The kernel for 20,000 slices would take
3 GB for every configuration, and its gradient as much again several times: long scans are summed by blocks, from one
row of the kernel (`core.window_sums`).  Neither has a cut-off: where the kernel has fallen to its least value, that
value counts.

Everything is float64, whatever the model's dtype.  $K_{jj} = 1$, so $a_j$ is never far below $q_j$: its logarithm,
which guidance and localization need, is exact down to e^-548, where float32 would lose it at e^-87 and make distant
slices tie; and no setting of matrix units rounds the sums.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial

import torch
from jaxtyping import Bool, Float, Float64
from torch import Tensor, nn

from normal_guidance.core.layout import Layout
from normal_guidance.core.window_sums import is_long, window_sums

SIGMA, BETA, KAPPA, SHAPE = 3.0, 0.25, 4.0, 2.0
"""Initial values: bells about seven slices wide at half height, a soft choice among them, little attention to windows
half outside the scan, and the shape of a normal."""

NEAREST = 1e-300
"""Replaces a distance of 0 before a learned power, because its logarithm must be finite."""

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
    log_distance = distance.abs().clamp_min(NEAREST).log() - log_sigma.double()
    power = torch.exp(log_shape.double().clamp_max(STEEPEST))
    return torch.exp(-0.5 * torch.exp((power * log_distance).clamp_max(FARTHEST)))


def smoothing(
    window: Callable[[Distances], Distances], longest: int, device: torch.device, least: float = 0.0
) -> Callable[[Scores], Scores]:
    """Window sums along the slices, K x, in float64, as a function of x, which is 0 in the padding.

    `least` is the value that the window keeps at great distances.
    """
    place = torch.arange(longest, device=device, dtype=torch.float64)
    if torch.compiler.is_exporting() or not is_long(longest):  # one graph for scans of any length
        kernel = window(place[:, None] - place)
        return lambda values: values.double() @ kernel
    above = (window(place) - least).clamp_min(0.0)

    def by_blocks(values: Scores) -> Scores:
        values = values.double()
        return window_sums(values, above) + least * values.sum(-1, keepdim=True)

    return by_blocks


class WindowAttention(nn.Module):
    r"""Attention from scores around each slice: $\mathrm{softmax}(\beta K x)$, or with `bells` a mixture of bells.

    $$ q = \mathrm{softmax}_j(\beta\,(K x)_j + \kappa \log (K 1)_j), \quad a_j = \frac{(K q)_j}{\sum_{j'} (K q)_{j'}} $$

    Width $\sigma$, sharpness $\beta$, and with `bells` the prior's power $\kappa$ and the shape p, are learned as
    logarithms: they stay positive, and a step of SGD changes them by a factor, whatever their size.  (A negative
    $\beta$ would attend to the slices with least evidence.)

    Args:
        bells: whether each slice's softmax weight is spread as a bell around it, of learned shape, and windows that
            extend beyond the scan are less likely.
    """

    def __init__(self, *, bells: bool) -> None:
        super().__init__()
        self.log_sigma = _starting_at(SIGMA)
        self.log_beta = _starting_at(BETA)
        self.log_kappa = _starting_at(KAPPA) if bells else None
        self.log_shape = _starting_at(SHAPE) if bells else None

    def forward(self, scores: Scores, layout: Layout) -> Scores:
        """log a of folded scores with any padding; in float32 or better, very low in the padding."""
        dtype = torch.promote_types(scores.dtype, torch.float32)
        real, size = layout.mask, (layout.longest, scores.device)
        if self.log_kappa is None or self.log_shape is None:
            smooth = smoothing(partial(gaussian_window, log_sigma=self.log_sigma), *size)
            return layout.hide(layout.log_softmax(self._collect(scores, real, smooth)).to(dtype))
        window = partial(shaped_window, log_sigma=self.log_sigma, log_shape=self.log_shape)
        smooth = smoothing(window, *size, LEAST)
        inside = smooth(real.double())  # at least 1 within the scan, from the slice itself
        log_prior = torch.exp(self.log_kappa.double()) * inside.log()
        log_q = layout.log_softmax(self._collect(scores, real, smooth) + log_prior)
        return layout.hide(layout.log_softmax(smooth(log_q.exp()).log()).to(dtype))

    def _collect(
        self, scores: Scores, real: Bool[Tensor, "bags longest"], smooth: Callable[[Scores], Scores]
    ) -> Scores:
        """The evidence of the windows, beta K x."""
        return torch.exp(self.log_beta.double()) * smooth(scores.masked_fill(~real, 0))

    def extra_repr(self) -> str:
        return f"bells={self.log_kappa is not None}"


def _starting_at(value: float) -> nn.Parameter:
    return nn.Parameter(torch.tensor(math.log(value)))
